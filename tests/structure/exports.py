#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The libraries export exactly the functions that the public headers mark with TL_API, and no name is defined twice.

A name defined twice is one in two objects of the internal archives: the linker would silently take one of them.
"""
import collections
import os
import pathlib
import re
import subprocess

import source

DECLARED = re.compile(r"^TL_API\b[^;(]*?\b(\w+)\s*\(", re.MULTILINE)
LIBRARIES = pathlib.Path(os.environ["TENSORLANE_BUILD"]) / "lib"
LISTINGS = {"libtensorlane.so": ["nm", "-D", "--defined-only"], "libtensorlane.a": ["nm", "-g", "--defined-only"]}


def exported(command, path):
    lines = subprocess.run([*command, path], capture_output=True, text=True, check=True).stdout.splitlines()
    return {fields[2] for fields in (line.split() for line in lines) if len(fields) == 3}


def defined_twice(archives):
    """Returns names with more than one definition among the objects of the archives."""
    counts = collections.Counter()
    for archive in archives:
        lines = subprocess.run(["nm", "-g", "--defined-only", archive], capture_output=True, text=True,
                               check=True).stdout.splitlines()
        counts.update(fields[2] for fields in (line.split() for line in lines) if len(fields) == 3)
    return sorted(name for name, count in counts.items() if count > 1)


def main():
    declared = set()
    for path in source.files(".h"):
        if path.parts[0] == "include":
            declared |= set(DECLARED.findall(source.read(path)))
    problems = [f"{name}: is public and does not begin with tl_" for name in declared if not name.startswith("tl_")]
    for library, command in LISTINGS.items():
        names = exported(command, LIBRARIES / library)
        problems += [f"{library}: {name} is declared and not defined" for name in sorted(declared - names)]
        problems += [f"{library}: {name} is exported and not declared" for name in sorted(names - declared)]
    internal = [path for path in (LIBRARIES / "libtensorlane_internal.a", LIBRARIES / "libtensorlane_cli.a")
                if path.exists()]
    problems += [f"{name} is defined in more than one file" for name in defined_twice(internal)]
    source.finish(problems, len(declared))


if __name__ == "__main__":
    main()
