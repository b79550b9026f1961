#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Every header compiles alone, twice in one file, as the code that includes it does.

    headers.py own|public

own compiles all headers except those of the benchmarks, in the way that the project's own code is compiled, with gcc:
the presets tsan and fuzz compile that code with clang. public compiles those of include/, as strict C99 and as C++.
"""
import functools
import os
import shutil
import subprocess
import sys

import source

WARNINGS = ["-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
# Those of the Python package, within the stable interface of this version.
LIMITED = "-DPy_LIMITED_API=0x030b0000"
OWN = ["-std=gnu11", LIMITED, "-D_GNU_SOURCE", "-Wconversion", "-Wno-sign-conversion", "-Wmissing-prototypes",
       "-Wstrict-prototypes", "-x", "c"]
PUBLIC = {
    "C99": ["gcc", "-std=c99", "-pedantic", "-x", "c"],
    "C11, clang": ["clang", "-std=c11", "-pedantic", "-x", "c"],
    "C++11": ["g++", "-std=c++11", "-pedantic", "-x", "c++"],
    "C++20": ["g++", "-std=c++20", "-pedantic", "-x", "c++"],
}


@functools.cache
def python_includes():
    """Returns the options with which Python's headers are found; none where they are not installed."""
    found = subprocess.run(["pkg-config", "--cflags", "python3"], capture_output=True, text=True, check=False)
    return found.stdout.replace("-I", "-isystem ").split()


def compile_alone(header, command):
    """Returns the compiler's complaints about a file that includes the header twice and nothing else."""
    line = f"<{header.relative_to('include')}>" if header.parts[0] == "include" else f'"{header}"'
    folders = [source.ROOT, source.ROOT / "include", source.ROOT / "tests", os.environ["TENSORLANE_BUILD"] + "/proto/c"]
    result = subprocess.run([*command, *WARNINGS, *(f"-I{folder}" for folder in folders), *python_includes(), "-"],
                            input=f"#include {line}\n#include {line}\n", capture_output=True, text=True, check=False)
    return result.stderr if result.returncode else ""


def main():
    kind = sys.argv[1]
    commands = PUBLIC if kind == "public" else {"gcc": ["gcc", *OWN]}
    for command in commands.values():
        if not shutil.which(command[0]):
            source.skip(f"{command[0]} is not installed")
    headers = [path for path in source.files(".h")
               if path.parts[0] == "include" or (kind != "public" and path.parts[:2] != ("tests", "bench"))
               and (path.parts[0] != "python" or python_includes())]
    problems = []
    for header in headers:
        for name, command in commands.items():
            complaint = compile_alone(header, command)
            if complaint:
                problems.append(f"{header} does not compile alone ({name}):\n{complaint}")
    source.finish(problems, len(headers))


if __name__ == "__main__":
    main()
