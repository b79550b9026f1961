# SPDX-License-Identifier: Apache-2.0
"""The command `tensorlane` of the wheel: it becomes the program that is inside."""
import os
import pathlib
import sys


def main():
    program = pathlib.Path(__file__).with_name("bin") / "tensorlane"
    os.execv(program, ["tensorlane", *sys.argv[1:]])
