#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""tensorlane.ray with a real Ray on this machine: arrays and tensors between actors and to the driver, what is given
back when objects go, and what happens when a process stops, dies or is too slow.

A process that is stopped by a signal stands for one that is slow, or in the middle of a transfer, at any moment.
"""
import ctypes
import gc
import logging
import os
import pathlib
import re
import signal
import time
import unittest

from engines_support import PATIENCE, packages

# Transfers fail after this time, which Ray's processes read from the environment.
FETCH_SEC = 20
os.environ["RAY_rdt_fetch_fail_timeout_milliseconds"] = str(FETCH_SEC * 1000)
# Ray's processes keep no records of tasks, which grow with each call.
os.environ["RAY_task_events_report_interval_ms"] = "0"

with packages():
    import numpy
    import ray
    import torch

import tensorlane.ray

tensorlane.ray.register(numpy.ndarray)
tensorlane.ray.register(torch.Tensor, "TENSORLANE_TORCH")
OBJECTS = 10000


class Process:
    """What all actors have: what a test asks about the process."""

    def pid(self):
        return os.getpid()

    def counters(self):
        return tensorlane.ray._endpoint.worker.counters()

    def size(self):
        """Bytes of this process in memory that it uses, and its descriptors."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        status = pathlib.Path("/proc/self/status").read_text(encoding="ascii").split("\n")
        memory = sum(int(line.split()[1]) << 10 for line in status if line.startswith(("RssAnon", "RssShmem")))
        return memory, len(os.listdir("/proc/self/fd"))

    def idle(self):
        tensorlane.ray._endpoint.worker
        return len(tensorlane.ray._endpoint._peers)


@ray.remote(num_cpus=0)
class Numpy(Process):
    @ray.method(tensor_transport="TENSORLANE")
    def make(self, count, dtype="f4"):
        return numpy.arange(count).astype(dtype)

    @ray.method(tensor_transport="TENSORLANE")
    def nested(self):
        return {"a": numpy.arange(6.0).reshape(2, 3).T, "b": [numpy.array(3.5), numpy.zeros((0, 4))], "text": "text"}

    @ray.method(tensor_transport="TENSORLANE")
    def spoilt(self):
        return [numpy.arange(10), numpy.array(["text"])]

    def total(self, array):
        return float(array.sum())

    def total_of_all(self, *arrays):
        return float(sum(array.sum() for array in arrays))

    def look(self, nested):
        return nested["a"].tolist(), nested["b"][0].item(), nested["b"][1].shape, nested["text"]

    def put(self, count):
        return [ray.put(numpy.arange(count), _tensor_transport="TENSORLANE")]


@ray.remote(num_cpus=0)
class Torch(Process):
    @ray.method(tensor_transport="TENSORLANE_TORCH")
    def make(self, shape, dtype):
        return torch.ones(shape, dtype=dtype, requires_grad=dtype.is_floating_point)

    @ray.method(tensor_transport="TENSORLANE_TORCH")
    def views(self):
        whole = torch.arange(12.0).reshape(3, 4)
        return {"column": whole[:, 1], "row": whole[1], "scalar": torch.tensor(7)}

    def look(self, tensor):
        return float(tensor.double().sum()), str(tensor.dtype), tuple(tensor.shape)

    def look_at_views(self, views):
        return {name: tensor.tolist() for name, tensor in views.items()}


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


records = Records()


def setUpModule():
    logging.getLogger("ray.tensorlane").addHandler(records)
    ray.init(num_cpus=2, _node_ip_address="127.0.0.1", include_dashboard=False, object_store_memory=200 << 20,
             log_to_driver=False)
    unittest.addModuleCleanup(ray.shutdown)


class Ray(unittest.TestCase):
    def get(self, refs):
        return ray.get(refs, timeout=PATIENCE)

    def actors(self, count, kind=Numpy):
        made = [kind.options(enable_tensor_transport=True).remote() for _ in range(count)]
        for actor in made:
            self.addCleanup(ray.kill, actor)
        self.get([actor.idle.remote() for actor in made])
        return made

    def await_counters(self, actor, **wanted):
        """Ray frees objects some time after their last reference has gone."""
        end = time.monotonic() + PATIENCE
        while True:
            counters = self.get(actor.counters.remote())
            if all(counters[name] == value for name, value in wanted.items()):
                return
            self.assertLess(time.monotonic(), end, counters)
            time.sleep(0.2)

    def stop(self, actor):
        pid = self.get(actor.pid.remote())
        os.kill(pid, signal.SIGSTOP)
        self.addCleanup(lambda: os.path.exists(f"/proc/{pid}") and os.kill(pid, signal.SIGCONT))
        return pid


class Arrays(Ray):
    def test_between_actors_and_to_several_receivers(self):
        owner, *readers = self.actors(4)
        for count in (0, 1, 10, 1 << 20):
            ref = owner.make.remote(count)
            wanted = float(numpy.arange(count, dtype="f4").sum())
            self.assertEqual(self.get([reader.total.remote(ref) for reader in readers]), [wanted] * 3)
            self.assertEqual(self.get(owner.total.remote(ref)), wanted)
        refs = [owner.make.remote(1000) for _ in range(5)]
        self.assertEqual(self.get(readers[0].total_of_all.remote(*refs)), 5 * 499500.0)

    def test_the_driver_gets_them_and_they_can_be_written(self):
        owner, = self.actors(1)
        for dtype in ("f4", "f8", "i1", "u2", "i8", "?", "c8"):
            array = self.get(owner.make.remote(100000, dtype))
            self.assertTrue((array == numpy.arange(100000).astype(dtype)).all())
            self.assertEqual(array.dtype, dtype)
            array[0] = 1
        path = [text for text in records.texts if re.search("large values from .* come by (zero-copy|bounce)", text)]
        self.assertTrue(path, records.texts)

    def test_nested_objects(self):
        owner, reader = self.actors(2)
        ref = owner.nested.remote()
        wanted = ([[0, 3], [1, 4], [2, 5]], 3.5, (0, 4), "text")
        self.assertEqual(self.get(reader.look.remote(ref)), wanted)
        nested = self.get(ref)
        self.assertEqual((nested["a"].tolist(), nested["b"][0].item(), nested["b"][1].shape, nested["text"]), wanted)

    def test_what_is_put(self):
        owner, reader = self.actors(2)
        mine = ray.put(numpy.arange(1000), _tensor_transport="TENSORLANE")
        self.assertEqual(self.get(reader.total.remote(mine)), 499500.0)
        theirs, = self.get(owner.put.remote(1000))
        self.assertEqual(self.get(theirs).sum(), 499500)


class Memory(Ray):
    def test_objects_that_go_are_given_back(self):
        owner, reader = self.actors(2)
        refs = [owner.make.remote(100000) for _ in range(20)]
        self.get([reader.total.remote(ref) for ref in refs])
        self.await_counters(owner, published_tensors=20)
        del refs
        self.await_counters(owner, published_tensors=0, published_bytes=0)
        self.await_counters(reader, published_tensors=0, open_operations=0)

    def test_an_object_that_cannot_be_published_leaves_nothing(self):
        owner, = self.actors(1)
        with self.assertRaises(ray.exceptions.RayError):
            self.get(owner.spoilt.remote())
        self.await_counters(owner, published_tensors=0)

    def test_many_objects_leave_the_processes_flat(self):
        owner, reader = self.actors(2)

        def move(count):
            for _ in range(0, count, 100):
                refs = [owner.make.remote(256) for _ in range(100)]
                self.assertEqual(self.get([reader.total.remote(ref) for ref in refs]), [32640.0] * 100)
            del refs
            self.await_counters(owner, published_tensors=0)
            return [self.get(actor.size.remote()) for actor in (owner, reader)]

        # Ray's own tables grow at first.
        before = move(OBJECTS)
        after = move(OBJECTS)
        for (bytes_before, files_before), (bytes_after, files_after) in zip(before, after):
            # 10,000 objects of 1 KiB would be 10 MiB, and much more with all that describes them.
            self.assertLess(bytes_after - bytes_before, 8 << 20)
            self.assertLessEqual(files_after, files_before + 4)


class Failures(Ray):
    def test_an_owner_that_dies_in_the_middle(self):
        owner, other, reader = self.actors(3)
        ref, whole = owner.make.remote(1 << 20), other.make.remote(10)
        self.assertEqual(self.get(reader.total.remote(ref)), float(numpy.arange(1 << 20, dtype="f4").sum()))
        ref = owner.make.remote(1 << 20)
        self.get(owner.pid.remote())
        pid = self.stop(owner)
        began = reader.total.remote(ref)
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        with self.assertRaises(Exception) as caught:
            self.get(began)
        self.assertNotIsInstance(caught.exception, ray.exceptions.GetTimeoutError)
        self.assertRegex(str(caught.exception), r"[\d.]+:\d+ is gone|ActorDied|died")
        # The reader goes on with others.
        self.assertEqual(self.get(reader.total.remote(whole)), 45.0)

    def test_an_owner_that_does_not_answer(self):
        owner, other, reader = self.actors(3)
        ref = owner.make.remote(1 << 20)
        self.get(owner.pid.remote())
        pid = self.stop(owner)
        with self.assertRaises(ray.exceptions.GetTimeoutError):
            ray.get(ref, timeout=1)
        with self.assertRaises(Exception) as caught:
            self.get(reader.total.remote(ref))
        self.assertNotIsInstance(caught.exception, ray.exceptions.GetTimeoutError)
        self.assertEqual(self.get(reader.total.remote(other.make.remote(10))), 45.0)
        os.kill(pid, signal.SIGCONT)
        self.assertEqual(self.get(reader.total.remote(owner.make.remote(10))), 45.0)
        self.await_counters(reader, open_operations=0)

    def test_a_reader_that_dies_in_the_middle(self):
        owner, reader, other = self.actors(3)
        ref = owner.make.remote(1 << 24)
        self.get(owner.pid.remote())
        pid = self.stop(reader)
        began = reader.total.remote(ref)
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        with self.assertRaises(ray.exceptions.RayError):
            self.get(began)
        wanted = float(numpy.arange(1 << 24, dtype="f4").sum())
        self.assertEqual(self.get(other.total.remote(ref)), wanted)
        del ref, began
        self.await_counters(owner, published_tensors=0)

    def test_an_abort_ends_a_receive(self):
        owner, = self.actors(1)
        ref = owner.make.remote(1 << 20)
        self.get(owner.pid.remote())
        manager = ray._private.worker.global_worker.rdt_manager
        meta = manager.wait_for_tensor_transport_metadata(ref.hex(), PATIENCE)
        self.stop(owner)
        transport = ray.experimental.rdt.util.get_tensor_transport_manager("TENSORLANE")
        fetch = transport.fetch_multiple_tensors(ref.hex(), meta, None)
        with self.assertRaises(TimeoutError):
            transport.wait_fetch_complete(fetch, 0)
        transport.abort_transport(ref.hex(), None)
        with self.assertRaises(tensorlane.Cancelled):
            transport.wait_fetch_complete(fetch, PATIENCE)

    def test_a_fetch_that_is_dropped_is_cancelled(self):
        owner, = self.actors(1)
        ref = owner.make.remote(1 << 20)
        manager = ray._private.worker.global_worker.rdt_manager
        meta = manager.wait_for_tensor_transport_metadata(ref.hex(), PATIENCE)
        self.stop(owner)
        worker = tensorlane.ray._endpoint.worker
        before = worker.counters()["open_operations"]
        transport = ray.experimental.rdt.util.get_tensor_transport_manager("TENSORLANE")
        fetch = transport.fetch_multiple_tensors(ref.hex(), meta, None)
        with self.assertRaises(TimeoutError):
            transport.wait_fetch_complete(fetch, 0)
        self.assertGreater(worker.counters()["open_operations"], before)
        del fetch
        end = time.monotonic() + FETCH_SEC / 2
        while worker.counters()["open_operations"] > before and time.monotonic() < end:
            time.sleep(0.05)
        self.assertEqual(worker.counters()["open_operations"], before)


class Tensors(Ray):
    def test_tensors_of_torch(self):
        owner, reader = self.actors(2, Torch)
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.bool):
            ref = owner.make.remote((300, 400), dtype)
            self.assertEqual(self.get(reader.look.remote(ref)), (120000.0, str(dtype), (300, 400)))
            self.assertEqual(self.get(ref).dtype, dtype)
        ref = owner.views.remote()
        wanted = {"column": [1.0, 5.0, 9.0], "row": [4.0, 5.0, 6.0, 7.0], "scalar": 7}
        self.assertEqual(self.get(reader.look_at_views.remote(ref)), wanted)
        self.assertEqual({name: tensor.tolist() for name, tensor in self.get(ref).items()}, wanted)

    def test_into_buffers(self):
        owner, = self.actors(1, Torch)
        buffer = torch.zeros(300, 400)
        ref = owner.make.remote((300, 400), torch.float32)
        ray.experimental.set_target_for_ref(ref, [buffer])
        got = self.get(ref)
        self.assertEqual(got.data_ptr(), buffer.data_ptr())
        self.assertEqual(float(buffer.sum()), 120000.0)


if __name__ == "__main__":
    unittest.main(verbosity=2)
