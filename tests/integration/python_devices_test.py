#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Tensors on GPUs from Python, with a double of CUDA: they come and go by DLPack, and streams are waited for."""
import os
import unittest

from python_support import BUILD, SANITIZE, run_script

FOLDER = BUILD / "tests/fakes/cuda/13"
# The members of struct fake_cuda, in order; what a script calls has a type.
PROLOGUE = """
import ctypes, threading, time
import numpy
import tensorlane

NAMES = '''set_forbidden set_seed set_machine set_capacity fail_call failed_call break_device get_counts get_thread
    make_current allocate allocate_managed free set_direct set_sharing order_writes is_synchronous reach view
    create_stream launch hold begin_capture end_capture'''.split()
class Table(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in NAMES]
table = Table.in_dll(ctypes.CDLL("libcudart.so.13"), "fake_cuda_table")
create_stream = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_bool)(table.create_stream)
hold = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_bool)(table.hold)
KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
launch = ctypes.CFUNCTYPE(None, ctypes.c_void_p, KERNEL, ctypes.c_void_p)(table.launch)
LEGACY = 1

class Producer:
    # What another package would be: it has given a tensor on the GPU, and is told which stream its consumer uses.
    def __init__(self, values):
        self.tensor = tensorlane.wrap(values)
        self.streams = []
    def __dlpack_device__(self):
        return (2, 0)
    def __dlpack__(self, *, stream, max_version):
        self.streams.append(stream)
        return self.tensor.__dlpack__(max_version=max_version, dl_device=(2, 0), copy=True)

values = numpy.arange(1000.)
producer = Producer(values)
on_gpu = tensorlane.wrap(producer)
assert (on_gpu.device, producer.streams) == ("cuda:0", [LEGACY])
"""


@unittest.skipIf("address" in SANITIZE, "a double of CUDA maps memory that the sanitizer does not know")
class Devices(unittest.TestCase):
    def run_script(self, script):
        os.environ["LD_LIBRARY_PATH"] = str(FOLDER)
        self.addCleanup(os.environ.pop, "LD_LIBRARY_PATH")
        return run_script(script, prologue=PROLOGUE)

    def test_given_and_taken(self):
        self.run_script("""
            for wrong in (lambda: memoryview(on_gpu), lambda: numpy.asarray(on_gpu)):
                try:
                    wrong()
                    raise SystemExit("a tensor on the GPU has no buffer")
                except (BufferError, TypeError):
                    pass
            back = tensorlane.copy(on_gpu, tensorlane.empty((1000,), "F64"))
            numpy.testing.assert_array_equal(numpy.asarray(back), values)
            owner = tensorlane.Worker({"log": {"level": "error"}}, address="127.0.0.1:0")
            asker = tensorlane.Worker({"log": {"level": "error"}}, address="127.0.0.1:0")
            peer = asker.add_peer(owner.address)
            owner.publish("values", on_gpu)
            numpy.testing.assert_array_equal(numpy.asarray(asker.recv_wait(peer, "values")), values)
            into = tensorlane.wrap(Producer(numpy.zeros(1000)))
            got = asker.recv_wait(peer, "values", into=into)
            assert got.device == "cuda:0"
            back = tensorlane.copy(got, tensorlane.empty((1000,), "F64"))
            numpy.testing.assert_array_equal(numpy.asarray(back), values)
            asker.close()
            owner.close()
            """)

    def test_streams(self):
        """Another stream than the legacy one waits for what that holds; the same one, and none, wait for nothing."""
        self.run_script("""
            other = create_stream(0, False)
            kernel, ran = KERNEL(lambda _: ran.append(True)), []
            hold(LEGACY, True)
            launch(LEGACY, kernel, None)
            for stream in (None, -1, LEGACY):
                on_gpu.__dlpack__(stream=stream, max_version=(1, 1))
            taken = []
            thread = threading.Thread(target=lambda: taken.append(
                (on_gpu.__dlpack__(stream=other, max_version=(1, 1)), list(ran))))
            thread.start()
            for _ in range(20):
                on_gpu.__dlpack__(stream=-1, max_version=(1, 1))
                time.sleep(0.002)
            assert not taken and not ran, (taken, ran)
            hold(LEGACY, False)
            thread.join()
            assert taken[0][1] == [True], taken
            for stream in (0, -2):
                try:
                    on_gpu.__dlpack__(stream=stream, max_version=(1, 1))
                    raise SystemExit(f"{stream} is no stream")
                except ValueError:
                    pass
            """)


if __name__ == "__main__":
    unittest.main(verbosity=2)
