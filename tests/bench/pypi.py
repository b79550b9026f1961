# SPDX-License-Identifier: Apache-2.0
"""The peers that come from PyPI, each in a virtual environment of its own in the build folder.

They are large (TensorFlow 2 GB, PyTorch 6 GB on disk; the others are small) and are installed once. What cannot be
installed is skipped, and says what was missing.
"""
import platform
import shutil
import subprocess
import sys

INSTALL_SEC = 1200
# name -> package, Python module, GiB of disk that the installation takes, and whether what the package asks for is left
# out: NIXL asks for PyTorch, and does without it when no tensor of PyTorch's is moved.
PACKAGES = {
    "tensorflow": ("tensorflow-cpu" if platform.machine() == "x86_64" else "tensorflow", "tensorflow", 4,
                   False),
    "gloo": ("torch", "torch", 9, False),
    "ucx": ("libucx-cu12", "libucx", 1, False),
    "nixl": ("nixl-cu12", "nixl_cu12", 1, True),
    "mooncake": ("mooncake-transfer-engine-non-cuda", "mooncake", 1, False),
}


class Missing(Exception):
    """Why a peer is left out."""


def run(command, what):
    try:
        result = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=INSTALL_SEC,
                                check=False)
    except subprocess.TimeoutExpired as error:
        raise Missing(f"{what} took longer than {INSTALL_SEC} s") from error
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines()
        raise Missing(f"{what} failed: {lines[-1] if lines else result.returncode}")


def has_module(python, module):
    return python.exists() and subprocess.run(
        [python, "-c", f"import importlib.util, sys; sys.exit(not importlib.util.find_spec('{module}'))"],
        capture_output=True, check=False).returncode == 0


def install(name, folder, say):
    """Returns the Python that has the package. Raises Missing."""
    package, module, needed_gib, is_alone = PACKAGES[name]
    home = folder / f"pypi-{name}"
    python = home / "bin" / "python"
    if has_module(python, module):
        return python
    free_gib = shutil.disk_usage(folder).free >> 30
    if free_gib < needed_gib:
        raise Missing(f"{package} needs {needed_gib} GiB of disk, {free_gib} are free")
    say(f"installing {package} from PyPI, once, into {home}")
    run([sys.executable, "-m", "venv", "--clear", home], "python3 -m venv (Debian: python3-venv)")
    pip = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check"]
    run([*pip, "numpy"], "pip install numpy")
    run([*pip, *(["--no-deps"] if is_alone else []), package], f"pip install {package}")
    return python
