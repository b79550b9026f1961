# SPDX-License-Identifier: Apache-2.0
"""What the tests of engines have in common: our package, which their processes find too, the packages of PyPI without
which they are skipped, and an owner of a cache. To be imported before any engine."""
import contextlib
import os
import pathlib
import subprocess
import sys

PACKAGE = str(pathlib.Path(os.environ["TENSORLANE_BUILD"], "lib/python"))
PATIENCE = 120
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
