# SPDX-License-Identifier: Apache-2.0
"""GPUs for scenarios: those of the double of libcudart (tests/fakes/cuda), which ends a process that misuses them.

    devices.load()                                          once, before anything uses a GPU
    with Worker(config, "worker", device=devices.GPU) as here: ...
    devices.assert_free()
"""
import ctypes
import os
import pathlib
import time

FOLDER = "tests/fakes/cuda/12"
PATIENCE_SEC = 60


class Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("index", ctypes.c_int32)]

    def __str__(self):
        return f"gpu:{self.index}" if self.kind else "host"


HOST, GPU = Device(0, 0), Device(1, 0)
DOUBLE = []


def load(build):
    """Makes the double the libcudart of this process, and of those that it starts."""
    folder = pathlib.Path(build, FOLDER)
    os.environ["LD_LIBRARY_PATH"] = str(folder)
    DOUBLE.append(ctypes.CDLL(str(folder / "libcudart.so.12")))
    for name, result, arguments in (("allocations", ctypes.c_uint, ()), ("begun_bytes", ctypes.c_uint64, ()),
                                    ("view", ctypes.c_void_p, (ctypes.c_void_p,)), ("hold", None, (ctypes.c_bool,))):
        function = getattr(DOUBLE[0], f"fake_cuda_{name}")
        function.restype, function.argtypes = result, arguments


def flags(device):
    """Returns how to tell a command where to receive."""
    return ("--device", str(device)) if device.kind else ()


def allocations():
    """Returns how many allocations the library has on the GPUs of this process."""
    return DOUBLE[0].fake_cuda_allocations()


def begun_bytes():
    """Returns for how many bytes copies to, from and between the GPUs of this process were begun."""
    return DOUBLE[0].fake_cuda_begun_bytes()


def hold(is_held):
    """While they are held, the GPUs of this process do nothing."""
    DOUBLE[0].fake_cuda_hold(is_held)


def view(address):
    """Returns where this process may touch the byte of a GPU."""
    return DOUBLE[0].fake_cuda_view(address)


def assert_free():
    """The library frees memory of GPUs on a thread of its own."""
    end = time.monotonic() + PATIENCE_SEC
    while allocations():
        assert time.monotonic() < end, f"{allocations()} allocations are left on GPUs"
        time.sleep(0.01)
