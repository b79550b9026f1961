#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The systemd unit: systemd-analyze finds no fault with it, and its instance becomes job and task."""
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

import source

TEMPLATE = "deploy/tensorlane@.service.in"
# Calls that a worker makes and that are not in each group of systemd.
NEEDED_CALLS = ("mincore", "mmap", "madvise", "mlock2", "memfd_create", "sendmsg")


def verify(unit):
    result = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True,
                            check=False)
    # systemd-analyze also reads other units of the machine, whose defects do not count here.
    ours = [line for line in result.stderr.splitlines() if "tensorlane" in line]
    return ours if ours or result.returncode == 0 else [result.stderr]


def started_with(unit, instance, folder):
    """Returns the arguments that the unit's command gives to the program for an instance."""
    command = re.search(r"^ExecStart=/bin/sh -c '(.*)' (\S+)$", unit, re.MULTILINE)
    script = command[1].replace("$$", "$").replace("%%", "%")
    result = subprocess.run(["/bin/sh", "-c", script, command[2].replace("%i", instance)], cwd=folder,
                            capture_output=True, text=True, check=False)
    return result.stdout.split()


def allowed_calls(unit):
    """Returns the names of the system calls that the unit allows; groups are those of systemd-analyze."""
    allowed, left = set(), re.search(r"^SystemCallFilter=(.*)$", unit, re.MULTILINE)[1].split()
    while left:
        name = left.pop()
        if not name.startswith("@"):
            allowed.add(name)
            continue
        listed = subprocess.run(["systemd-analyze", "syscall-filter", "--no-pager", name], capture_output=True,
                                text=True, check=True)
        left += [line.strip() for line in listed.stdout.splitlines()[1:] if line.strip() and "#" not in line]
    return allowed


def main():
    if not shutil.which("systemd-analyze"):
        source.skip("systemd-analyze is not installed (package systemd)")
    problems = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        program = folder / "tensorlane"
        program.write_text('#!/bin/sh\necho "$@"\n', encoding="ascii")
        os.chmod(program, 0o755)
        text = source.read(TEMPLATE).replace("@bindir@", name)
        unit = folder / "tensorlane@.service"
        unit.write_text(text, encoding="utf-8")
        problems += verify(unit)

        broken = folder / "broken@.service"
        broken.write_text(text.replace("Type=notify", "Type=tensorlane"), encoding="utf-8")
        if not verify(broken):
            problems.append("systemd-analyze accepts a unit that is wrong: this test proves nothing")

        for instance, job, task in [("ps-0", "ps", "0"), ("worker-12", "worker", "12"), ("a-b-3", "a-b", "3")]:
            expected = ["serve", "--config", "/etc/tensorlane/cluster.json", "--job", job, "--task", task]
            found = started_with(text, instance, folder)
            if found != expected:
                problems.append(f"{instance} starts tensorlane with {found}, not {expected}")
        # Dynamic users without a name differ from instance to instance, and refuse each other's shared memory.
        if not re.search(r"^User=[a-z]+$", text, re.MULTILINE):
            problems.append("the instances are no one user")
        allowed = allowed_calls(text)
        problems += [f"SystemCallFilter= lacks {call}" for call in NEEDED_CALLS if call not in allowed]
    source.finish(problems, 6)


if __name__ == "__main__":
    main()
