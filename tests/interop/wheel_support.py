# SPDX-License-Identifier: Apache-2.0
"""The wheel that ./dev wheel has built, for the tests that need it; they are skipped where there is none."""
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(os.environ["TENSORLANE_SOURCE"])
WHEELS = list((ROOT / "build/wheel/dist").glob("tensorlane-*.whl"))

if not WHEELS:
    print("there is no wheel in build/wheel/dist: run ./dev wheel")
    sys.exit(77)


def install(case):
    """Installs the wheel into a folder, which stays as long as the tests of the class, and returns its path."""
    folder = tempfile.TemporaryDirectory()
    case.addClassCleanup(folder.cleanup)
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
                    "--no-index", "--target", folder.name, WHEELS[0]], check=True)
    return folder.name
