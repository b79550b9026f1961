# SPDX-License-Identifier: Apache-2.0
"""What the tests of engines have in common: our package, which their processes find too, the packages of PyPI without
which they are skipped, and an owner of a cache. To be imported before any engine."""
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

PACKAGE = str(pathlib.Path(os.environ["TENSORLANE_BUILD"], "lib/python"))
PATIENCE = 120
# When processes are killed, counted from the end of a call.
KILL_DELAYS_SEC = (0, 0.001, 0.003)
SKIPPED = 77

sys.path.insert(0, PACKAGE)
os.environ["PYTHONPATH"] = f"{PACKAGE}:{os.environ.get('PYTHONPATH', '')}"
os.environ["RAY_AUTH_MODE"] = "disabled"


@contextlib.contextmanager
def packages():
    """Skips the whole test if something that is imported within is not there."""
    try:
        yield
    except ImportError as missing:
        print(f"a package of PyPI is not there: {missing}")
        sys.exit(SKIPPED)


def start_owner(case, address="127.0.0.1:0"):
    """Starts an owner of a cache, which ends with the test case. Returns its process and its address."""
    owner = subprocess.Popen([sys.executable, "-m", "tensorlane.kv", "--address", address, "--limit", "64MiB"],
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    case.addCleanup(owner.stdout.close)
    case.addCleanup(owner.wait)
    case.addCleanup(owner.kill)
    return owner, owner.stdout.readline().split()[-1]


def kill_in_the_middle(case, script, delay):
    """Runs a script that prints "done" after each of its calls, which have no end, and kills it so many seconds after
    the first call: in the middle of a later one."""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               text=True)
    case.addCleanup(process.stdout.close)
    case.addCleanup(process.wait)
    case.addCleanup(process.kill)
    while process.stdout.readline() != "done\n":
        case.assertIsNone(process.poll())
    time.sleep(delay)
    process.kill()
    process.wait()


def stop_and_kill_soon(case, process):
    """The process does nothing from now on, and ends a moment later."""
    process.send_signal(signal.SIGSTOP)
    killer = threading.Timer(0.5, process.kill)
    killer.start()
    case.addCleanup(killer.join)
