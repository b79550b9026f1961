#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the tests that need packages from PyPI, and prints a line for each: passed, failed or skipped.

    run.py [NAME...]    with the programs of build/release; NAME: only these tests, as ray_test

interop/NAME_test.py        tests with current versions of other projects' packages
integration/foreign_*.py    the tests with foreign gRPC clients, run with the current gRPC and protobuf

packages.ini says which packages each test needs. They are installed once, into virtual environments in build/interop.
Each line is "OUTCOME NAME"; for a skipped test it ends with what the test lacked. The output of a failed test follows
on lines of its own, indented.
"""
import configparser
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "bench"))
from pypi import Missing, run  # noqa: E402

FOLDER = ROOT / "build" / "interop"
SKIPPED = 77
TEST_SEC = 600


def install(name, packages, alone):
    """Returns the Python of the environment that has the packages."""
    home = FOLDER / name
    python, complete = home / "bin" / "python", home / "complete"
    wanted = " ".join([*packages, "alone:", *alone])
    if complete.exists() and complete.read_text() == wanted:
        return python
    run([sys.executable, "-m", "venv", "--clear", home], "python3 -m venv (Debian: python3-venv)")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if packages:
        run([*pip, *packages], f"pip install {' '.join(packages)} (is PyPI reachable?)")
    if alone:
        run([*pip, "--no-deps", *alone], f"pip install --no-deps {' '.join(alone)} (is PyPI reachable?)")
    complete.write_text(wanted)
    return python


def generate(python):
    """The messages for the protobuf that was installed; grpc.health becomes the package grpc_health, as the official
    one is called."""
    output = FOLDER / "messages"
    output.mkdir(exist_ok=True)
    paths, files = [], []
    for proto in sorted((ROOT / "proto").rglob("*.proto")):
        folder = str(proto.parent.relative_to(ROOT / "proto"))
        alias = folder.replace("grpc/", "grpc_", 1)
        paths.append(f"--proto_path={alias}={proto.parent}")
        files.append(f"{alias}/{proto.name}")
    run([python, "-m", "grpc_tools.protoc", *dict.fromkeys(paths), f"--python_out={output}",
         f"--grpc_python_out={output}", *files], "grpc_tools.protoc")
    return output


def run_test(python, messages, path):
    build = ROOT / "build" / "release"
    environment = {**os.environ, "TENSORLANE": str(build / "bin" / "tensorlane"), "TENSORLANE_BUILD": str(build),
                   "TENSORLANE_SOURCE": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1",
                   "PYTHONPATH": f"{messages}:{ROOT / 'tests' / 'integration'}"}
    try:
        result = subprocess.run([python, path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                errors="replace", timeout=TEST_SEC, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return "failed", f"took longer than {TEST_SEC} s"
    return {0: "passed", SKIPPED: "skipped"}.get(result.returncode, "failed"), result.stdout


def find(name):
    """Returns the path of a test."""
    path = pathlib.Path(__file__).with_name(f"{name}.py")
    return path if path.exists() else ROOT / "tests" / "integration" / f"{name}.py"


def report(python, messages, name):
    """Runs a test and prints how it went. Returns whether it has failed."""
    outcome, output = run_test(python, messages, find(name))
    lines = output.strip().splitlines()
    print(f"{outcome} {name}", lines[-1] if outcome == "skipped" and lines else "", flush=True)
    if outcome == "failed":
        print("\n".join("    " + line for line in lines), flush=True)
    return outcome == "failed"


def main():
    pins = configparser.ConfigParser()
    pins.read(pathlib.Path(__file__).with_name("packages.ini"), encoding="utf-8")
    messages, failed = None, 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in pins.sections():
        section = pins[name]
        tests = [test for test in section.get("tests", "").split() if test in (sys.argv[1:] or [test])]
        if not tests and messages:
            continue
        try:
            python = install(name, section.get("packages", "").split(), section.get("alone", "").split())
            messages = messages or generate(python)
        except (Missing, OSError) as error:
            for test in tests:
                print(f"skipped {test} {error}", flush=True)
            continue
        failed += sum([report(python, messages, test) for test in tests])
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
