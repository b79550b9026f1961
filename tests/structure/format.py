#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The source is formatted as clang-format does it; ./dev format does so."""
import shutil
import subprocess

import source


def main():
    if not shutil.which("clang-format"):
        source.skip("clang-format is not installed")
    files = source.files(".c", ".h")
    result = subprocess.run(["clang-format", "--dry-run", "--Werror", *files], cwd=source.ROOT, capture_output=True,
                            text=True, check=False)
    bad = sorted({line.split(":")[0] for line in result.stderr.splitlines() if ": error: " in line})
    problems = [f"{path}: run ./dev format" for path in bad]
    if result.returncode and not bad:
        problems.append(result.stderr)
    source.finish(problems, len(files))


if __name__ == "__main__":
    main()
