# SPDX-License-Identifier: Apache-2.0
"""What the tests of the Python package share: they find the package, and make workers that know each other.

A package that is built with a sanitizer needs its library before anything else, so that the program starts itself again
with it. AddressSanitizer looks for no leaks then, because Python leaves much to the end of its process.
ThreadSanitizer sees what the package and the library do, and the locks of Python; its library is gcc's, because that of
clang, which compiles them, cannot be loaded in front of a program.
"""
import asyncio
import os
import pathlib
import subprocess
import sys
import textwrap
import time
import unittest

SOURCE = pathlib.Path(os.environ.get("TENSORLANE_SOURCE") or pathlib.Path(__file__).parents[2])
BUILD = pathlib.Path(os.environ.get("TENSORLANE_BUILD") or SOURCE / "build/release")
SANITIZE = os.environ.get("TENSORLANE_SANITIZE", "")
# For tests whose children allocate memory: a thread of the parent may have had the sanitizer's own lock, which gcc's
# AddressSanitizer does not give back in a child before gcc 14. It then hangs, in one run of twenty under load.
without_address_sanitizer = unittest.skipIf("address" in SANITIZE, "a child waits for the sanitizer's own lock")
# Another folder that has the package, such as an installed wheel.
INSTALLED = os.environ.get("TENSORLANE_PYTHON_PACKAGES")
PACKAGES = pathlib.Path(INSTALLED or BUILD / "lib/python")
PATIENCE = int(os.environ.get("TENSORLANE_PATIENCE", "120"))
# Time-outs of a call that must fail for the lack of one thing alone: the next one is tried when anything else has not
# come in time.
TIMEOUTS = 0.3, 3, 30

if not (PACKAGES / "tensorlane/_tensorlane.abi3.so").exists():
    print("the Python package was not built: python3-dev is not installed")
    sys.exit(77)
LIBRARIES = {"address": "libasan.so", "thread": "libtsan.so"}
OPTIONS = {"address": {"PYTHONMALLOC": "malloc", "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1"},
           "thread": {}}
for sanitizer, library in LIBRARIES.items():
    if sanitizer in SANITIZE and "LD_PRELOAD" not in os.environ:
        library = subprocess.run(["gcc", f"-print-file-name={library}"], capture_output=True, text=True,
                                 check=True).stdout.strip()
        os.environ.update(LD_PRELOAD=library, **OPTIONS[sanitizer])
        os.execv(sys.executable, [sys.executable, *sys.argv])
sys.path.insert(0, str(PACKAGES))

import tensorlane


class WorkersCase(unittest.TestCase):
    """Two workers that no file names: `peer` is what the worker `asker` calls the worker `owner`."""
    CONFIG = {"log": {"level": "error"}}

    def setUp(self):
        self.owner = self.open()
        self.asker = self.open()
        self.peer = self.asker.add_peer(self.owner.address)

    def open(self, **settings):
        worker = tensorlane.Worker({**self.CONFIG, **settings}, address="127.0.0.1:0")
        self.addCleanup(worker.close)
        return worker


def wait_until(condition, what):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not so after {PATIENCE} s")
        time.sleep(0.005)


async def until_gone(reference, worker):
    """Waits until nothing refers to an object. Each call gives back what the worker does not use any more."""
    while reference() is not None:
        await asyncio.sleep(0.005)
        worker.publish("any", b"")


# What a script begins with: two workers, as in WorkersCase.
PROLOGUE = """
import asyncio, gc, os, signal, sys, threading, time
import numpy
import tensorlane
owner = tensorlane.Worker({"log": {"level": "error"}}, address="127.0.0.1:0")
asker = tensorlane.Worker({"log": {"level": "error"}}, address="127.0.0.1:0")
peer = asker.add_peer(owner.address)
"""


def start_script(script, prologue=PROLOGUE):
    """Starts a Python program; its standard output can be read."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    return subprocess.Popen([sys.executable, "-c", prologue + textwrap.dedent(script)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env=environment)


def run_script(script, prologue=PROLOGUE):
    """Runs a Python program that must succeed; returns what it has printed."""
    process = start_script(script, prologue)
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"the program hangs; it has printed:\n{out}\n{err}") from None
    if process.returncode:
        raise AssertionError(f"the program ended with {process.returncode}:\n{out}\n{err}")
    return out
