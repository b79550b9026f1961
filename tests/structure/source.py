# SPDX-License-Identifier: Apache-2.0
"""Finds the files of the source tree for the tests of its structure."""
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(os.environ.get("TENSORLANE_SOURCE") or pathlib.Path(__file__).parents[2])
SKIPPED = 77


def files(*suffixes):
    """Returns the sorted paths, relative to ROOT, of everything that is or could be committed."""
    try:
        listing = subprocess.run(["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                                 capture_output=True, check=True).stdout
        names = listing.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):  # The tree is an unpacked archive, or git is missing.
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*")
                 if path.relative_to(ROOT).parts[0] not in ("build", ".git") and "__pycache__" not in path.parts]
    return sorted(pathlib.Path(name) for name in names
                  if name and (ROOT / name).is_file() and (not suffixes or name.endswith(suffixes)))


def read(path):
    return (ROOT / path).read_text(encoding="utf-8", errors="replace")


def finish(problems, checked):
    """Prints the problems and ends the process, with 1 when there are any or nothing was checked."""
    for problem in problems:
        print(problem)
    print(f"{checked} checked, {len(problems)} problems")
    sys.exit(1 if problems or checked == 0 else 0)


def skip(lacking):
    print(lacking)
    sys.exit(SKIPPED)
