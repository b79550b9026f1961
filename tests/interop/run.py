#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the tests that need packages from PyPI, and prints a line for each: passed, failed or skipped.

    run.py     with the programs of build/release

interop/NAME_test.py        tests with current versions of other projects' packages
integration/foreign_*.py    the tests with foreign gRPC clients, run with the current gRPC and protobuf

The packages are installed once, into a virtual environment in build/interop. Each line is "OUTCOME NAME"; for a skipped
test it ends with what the test lacked. The output of a failed test follows on lines of its own, indented.
"""
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "bench"))
from pypi import Missing, run  # noqa: E402

FOLDER = ROOT / "build" / "interop"
PACKAGES = ["grpcio", "grpcio-tools", "ml_dtypes", "numpy", "safetensors"]
FOREIGN = ["foreign_client_test.py", "foreign_exchange_test.py"]
SKIPPED = 77
TEST_SEC = 300


def install():
    """Returns the Python that has the packages."""
    python, complete = FOLDER / "bin" / "python", FOLDER / "complete"
    if complete.exists() and complete.read_text() == " ".join(PACKAGES):
        return python
    run([sys.executable, "-m", "venv", "--clear", FOLDER], "python3 -m venv (Debian: python3-venv)")
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES],
        f"pip install {' '.join(PACKAGES)} (is PyPI reachable?)")
    complete.write_text(" ".join(PACKAGES))
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


def main():
    tests = sorted(pathlib.Path(__file__).parent.glob("*_test.py"))
    tests += [ROOT / "tests" / "integration" / name for name in FOREIGN]
    try:
        python = install()
        messages = generate(python)
    except (Missing, OSError) as error:
        for test in tests:
            print(f"skipped {test.stem} {error}", flush=True)
        return 0
    has_failed = False
    for test in tests:
        outcome, output = run_test(python, messages, test)
        lines = output.strip().splitlines()
        print(f"{outcome} {test.stem}", lines[-1] if outcome == "skipped" and lines else "", flush=True)
        if outcome == "failed":
            has_failed = True
            print("\n".join("    " + line for line in lines), flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
