#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The guest itself: it has a working RDMA device and this machine's files, passes on what a command writes and how it
ends, and treats every fault as a failure."""
import os
import pathlib
import signal
import subprocess
import tempfile
import time
import unittest

import guest_support
from guest_support import PERFTEST

DEVICE = PERFTEST + """
ibv_devinfo -d rxe0
perftest rxe0 10.10.0.1 rxe0 ib_write_bw -s 65536 -n 100
echo "it is $PWD, $FRUIT, $(ulimit -l)" >&2
echo kept > "$RESULTS/kept"
if echo x > written 2> /dev/null; then echo "the host can be written"; fi
if setpriv --bounding-set -ipc_lock bash -c 'ulimit -l 64; ibv_rc_pingpong -d rxe0 -g 1 -s 1000000'; then exit 4; fi
exit 3
"""
PATIENCE_SEC = 60


def children(pid):
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()]


def command_of(pid):
    """Returns the process's command line, which is empty when the process has ended."""
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def runs(pid):
    """Returns whether there is such a process that has not ended."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text("ascii").rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, what):
    end = time.monotonic() + PATIENCE_SEC
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"never happened: {what}")
        time.sleep(0.05)


class SmokeTest(guest_support.GuestTest):
    def test_device(self):
        os.environ["FRUIT"] = "a 'pear'\nand $more"
        with tempfile.TemporaryDirectory() as folder:
            result = self.run_guest(DEVICE, "--results", folder)
            self.assert_status(3, result)
            self.assertEqual("kept\n", pathlib.Path(folder, "kept").read_text("ascii"))
        self.assertRegex(result.stdout, r"hca_id:\s+rxe0\n(.*\n)*?.*PORT_ACTIVE")
        self.assertRegex(result.stdout, r"active_mtu:\s+4096")
        self.assertRegex(result.stdout, r"\n 65536 +100 +[\d.]*[1-9]")
        self.assertIn(f"it is {guest_support.ROOT}, a 'pear'\nand $more, unlimited\n", result.stderr)
        self.assertNotIn("the host can be written", result.stdout)
        self.assertIn("register", result.stderr, "64 KiB of locked memory were no limit")

    def test_hang(self):
        result = self.run_guest("echo begins; sleep 1000", timeout=2)
        self.assert_failed("has run its command for more than 2 s", result)
        self.assertEqual("begins\n", result.stdout)

    def test_panic(self):
        result = self.run_guest("echo c > /proc/sysrq-trigger; sleep 1000")
        self.assert_failed("ended without the exit status", result)
        self.assertIn("Kernel panic", result.stderr)

    def test_no_boot(self):
        self.assert_failed("has not booted within 0.1 s", self.run_guest("true", "--boot-timeout", "0.1"))

    def test_runner_is_killed(self):
        with subprocess.Popen([guest_support.RUN_GUEST, "sleep", "1000"], stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL, cwd=guest_support.ROOT) as runner:
            def qemu():
                return [pid for pid in children(runner.pid) if command_of(pid).startswith(b"qemu-system")]
            try:
                wait_until(qemu, "QEMU runs")
                guest, = qemu()
            finally:
                runner.send_signal(signal.SIGKILL)
        wait_until(lambda: not runs(guest), "QEMU ends with the runner")


if __name__ == "__main__":
    unittest.main(verbosity=2)
