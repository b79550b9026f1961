#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The current gRPC core is pinned: its version, where it comes from and its hash agree, and the list of its sources is
one that CMake reads as it is meant. ./dev takes no other core."""
import re
import subprocess

import source

FOLDER = source.ROOT / "cmake/grpc_current"
PIN = re.compile(r"^set\(GRPC_CURRENT_(\w+) (\S+)\)$", re.MULTILINE)


def pin_problems(text):
    pin = dict(PIN.findall(text))
    version = pin.get("VERSION", "")
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        yield f"pin.cmake: '{version}' is no version"
    if not re.fullmatch(rf"https://files\.pythonhosted\.org/packages/\S+/grpcio-{re.escape(version)}\.tar\.gz",
                        pin.get("URL", "")):
        yield f"pin.cmake: the URL is not that of grpcio {version}'s source distribution"
    if not re.fullmatch(r"[0-9a-f]{64}", pin.get("SHA256", "")):
        yield "pin.cmake: the SHA-256 has not 64 hexadecimal digits"


def list_problems(lines):
    seen, has_unit = set(), False
    for line in lines:
        if not line or line.startswith("#"):
            continue
        if re.fullmatch(r"<(\d+|alone)>", line):
            has_unit = True
        elif not has_unit or not re.fullmatch(r"(src/core|third_party)/[\w./-]+\.cc?", line):
            yield f"sources.txt: '{line}' is neither a unit nor a source in one"
        elif line in seen:
            yield f"sources.txt: {line} is there twice"
        seen.add(line)


def main():
    lines = (FOLDER / "sources.txt").read_text(encoding="utf-8").splitlines()
    problems = [*pin_problems((FOLDER / "pin.cmake").read_text(encoding="utf-8")), *list_problems(lines)]
    refused = subprocess.run([source.ROOT / "dev", "build", "--grpc", "1.51"], capture_output=True, text=True,
                             check=False)
    if refused.returncode != 1 or "--grpc current" not in refused.stderr:
        problems.append(f"dev: --grpc 1.51 ends with {refused.returncode}: {refused.stderr}")
    source.finish(problems, len(lines))


if __name__ == "__main__":
    main()
