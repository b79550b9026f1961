#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The packages that ./dev installs: README.md lists them all, and on a system without dpkg-query ./dev does. What is no
argument of a command is refused before anything is built."""
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

import source

# The programs that ./dev calls before it looks for packages.
TOOLS = ("bash", "dirname", "readlink")


def packages():
    """Returns the packages of each list by the name of the list."""
    text = (source.ROOT / "dev").read_text(encoding="utf-8")
    found = re.findall(r"^(\w+)_packages=\((.*?)\)", text, re.DOTALL | re.MULTILINE)
    return {name: words.split() for name, words in found}


def say_elsewhere(*command):
    """Returns what ./dev prints on a system that has no dpkg-query."""
    with tempfile.TemporaryDirectory() as folder:
        for tool in TOOLS:
            pathlib.Path(folder, tool).symlink_to(shutil.which(tool))
        result = subprocess.run([source.ROOT / "dev", *command], env={**os.environ, "PATH": folder},
                                capture_output=True, text=True, check=False)
    return result.returncode, result.stderr


def problems_of(lists):
    readme = (source.ROOT / "README.md").read_text(encoding="utf-8")
    for name, words in lists.items():
        for word in words:
            if f"`{word}`" not in readme:
                yield f"README.md: lacks {word}, which ./dev installs ({name}_packages)"
    for command, wanted in ((("build",), lists["build"]), (("test", "--quick"), lists["build"] + lists["test"])):
        code, said = say_elsewhere(*command)
        missing = [word for word in wanted if word not in said.split() and word + "." not in said.split()]
        if code != 1 or missing:
            yield (f"dev {' '.join(command)}: without dpkg-query it ends with {code} and does not name {missing}:\n"
                   f"{said}")
    for words in (("--help",), ("0",), ("5x",), ("5", "5")):
        code, said = say_elsewhere("fuzz", *words)
        if code != 1 or "usage: ./dev fuzz" not in said:
            yield f"dev fuzz {' '.join(words)}: ends with {code}, and does not say how it is called:\n{said}"
    if "openssl" not in lists["test"]:
        yield "dev: the tests of TLS need openssl, which test_packages lacks"


def main():
    lists = packages()
    source.finish(list(problems_of(lists)), sum(map(len, lists.values())))


if __name__ == "__main__":
    main()
