#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""tensorlane.verl with verl's own code: its registry loads the engine, its worker groups and its manager drive it over
a real Ray, on the CPU. What needs a GPU or a model is not run: verl's trainers and rollout servers."""
import asyncio
import os
import signal
import time
import unittest

from engines_support import PATIENCE, packages

with packages():
    import ray
    import torch
    from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineRegistry
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.utils.import_utils import import_external_libs
    from verl.workers.config import CheckpointEngineConfig

BUCKET = 1 << 20
TIMEOUT = 20
MIDDLE = 8


def weights_of(step):
    """Weights of several dtypes, in more than one bucket, one of them larger than a bucket."""
    for number in range(12):
        dtype = torch.bfloat16 if number % 2 else torch.float32
        yield f"layer.{number}", torch.full((300, 100 * number + 1), float(number + step), dtype=dtype)
    yield "scalar", torch.tensor(step)
    yield "embedding", torch.full((700, 1000), float(step))


def sums_of(weights):
    return {name: (str(tensor.dtype), tuple(tensor.shape), float(tensor.double().sum())) for name, tensor in weights}


class Process(Worker):
    """A trainer or a rollout worker that has verl's engine, as verl's own workers do."""

    def __init__(self):
        super().__init__()
        import_external_libs("tensorlane.verl")
        self.engine = CheckpointEngineRegistry.new("tensorlane", bucket_size=BUCKET, timeout=TIMEOUT)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method, *args, **kwargs):
        return getattr(self.engine, method)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def send(self, step):
        asyncio.run(self.engine.send_weights(weights_of(step), global_steps=step))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def send_and_die(self, step):
        """Ends when several buckets are published, and not the last."""
        def weights():
            for number, weight in enumerate(weights_of(step)):
                if number == MIDDLE:
                    time.sleep(1)
                    os.kill(os.getpid(), signal.SIGKILL)
                yield weight
        asyncio.run(self.engine.send_weights(weights(), global_steps=step))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive(self, step, last=None):
        """last: the process ends when so many weights have come."""
        async def sums():
            got = {}
            async for name, tensor in self.engine.receive_weights(global_steps=step):
                got.update(sums_of([(name, tensor)]))
                if len(got) == last:
                    os.kill(os.getpid(), signal.SIGKILL)
            return got
        return asyncio.run(sums())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def addresses(self):
        """Where the buckets are."""
        return {bucket.tensor.data_ptr() for bucket in self.engine._buckets}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def published(self):
        import tensorlane.verl
        return tensorlane.verl._endpoint.worker.counters()["published_tensors"]


def setUpModule():
    # Worker groups keep their processors until the end.
    ray.init(num_cpus=64, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
    unittest.addModuleCleanup(ray.shutdown)


class Engine(unittest.TestCase):
    def group(self, count):
        pool = RayResourcePool([count], use_gpu=False, max_colocate_count=1)
        group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=RayClassWithInitArgs(ray.remote(Process)))
        for worker in group.workers:
            self.addCleanup(ray.kill, worker)
        return group

    def connect(self, trainers, rollouts):
        """As verl does before each update: its manager prepares all and tells them who they are."""
        config = CheckpointEngineConfig(backend="tensorlane", custom_backend_module="tensorlane.verl")
        CheckpointEngineManager(config, trainers, []).build_process_group(rollouts)

    def get(self, refs):
        return ray.get(refs, timeout=PATIENCE)

    def finalize(self, *groups):
        for group in groups:
            self.get(group.execute_checkpoint_engine(["finalize"] * group.world_size))

    def test_each_step_reaches_all_rollout_workers(self):
        trainers, rollouts, now = self.group(2), self.group(2), set()
        for step in (1, 2, 2, 7):
            self.connect(trainers, rollouts)
            results = self.get(trainers.send(step) + rollouts.receive(step))
            self.assertEqual(results[2:], [sums_of(weights_of(step))] * 2)
            self.finalize(trainers, rollouts)
            before, now = now, trainers.addresses()[0]
        self.assertTrue(before & now, "no memory is used again")
        counts = trainers.published()
        self.assertEqual(counts[1], 0)
        # One update only: a description and bytes for each of less than 20 buckets.
        self.assertLess(counts[0], 40)

    def test_memory_is_not_used_again_while_something_refers_to_it(self):
        import tensorlane.verl
        bucket = tensorlane.verl._HostBucket(1000)
        published = bucket.part(10)
        self.assertEqual((published.nbytes, bucket.is_free), (10, False))
        del published
        self.assertTrue(bucket.is_free)

    def test_a_worker_that_is_late_and_one_that_begins_again(self):
        trainers, rollouts = self.group(1), self.group(1)
        self.connect(trainers, rollouts)
        self.get(trainers.send(3))
        self.finalize(trainers)
        for _ in range(2):
            self.assertEqual(self.get(rollouts.receive(3)), [sums_of(weights_of(3))])

    def test_a_worker_that_is_later_than_the_next_update_is_told(self):
        trainers, rollouts, late = self.group(1), self.group(1), self.group(1)
        self.connect(trainers, late)
        self.get(trainers.send(1))
        self.connect(trainers, rollouts)
        self.get(trainers.send(2) + rollouts.receive(2))
        with self.assertRaisesRegex(ray.exceptions.RayTaskError, "FailedPrecondition: the trainer has begun the next"):
            self.get(late.receive(1))
        self.connect(trainers, late)
        self.assertEqual(self.get(trainers.send(3) + late.receive(3))[1], sums_of(weights_of(3)))

    def test_a_worker_that_dies_leaves_the_others(self):
        trainers, rollouts, others = self.group(1), self.group(1), self.group(1)
        self.connect(trainers, rollouts)
        pid, = rollouts.pid()
        began = rollouts.receive(1)
        os.kill(pid, signal.SIGKILL)
        self.get(trainers.send(1))
        with self.assertRaises(ray.exceptions.RayError):
            self.get(began)
        self.connect(trainers, others)
        self.assertEqual(self.get(trainers.send(2) + others.receive(2))[1], sums_of(weights_of(2)))

    def test_a_trainer_that_dies_ends_the_receive(self):
        trainers, rollouts, others = self.group(1), self.group(1), self.group(1)
        self.connect(trainers, rollouts)
        pid, = trainers.pid()
        began = rollouts.receive(1)
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        with self.assertRaises(ray.exceptions.RayTaskError) as caught:
            self.get(began)
        self.assertRegex(str(caught.exception), r"[\d.]+:\d+ is gone")
        self.connect(others, rollouts)
        self.assertEqual(self.get(others.send(2) + rollouts.receive(2))[1], sums_of(weights_of(2)))

    def test_a_worker_that_dies_in_the_middle_leaves_the_others(self):
        trainers, rollouts, others = self.group(1), self.group(1), self.group(1)
        self.connect(trainers, rollouts)
        self.get(trainers.send(1))
        with self.assertRaises(ray.exceptions.RayError):
            self.get(rollouts.receive(1, MIDDLE))
        self.connect(trainers, others)
        self.assertEqual(self.get(trainers.send(2) + others.receive(2))[1], sums_of(weights_of(2)))

    def test_a_trainer_that_dies_in_the_middle_ends_the_receive(self):
        trainers, rollouts, others = self.group(1), self.group(1), self.group(1)
        self.connect(trainers, rollouts)
        sent, received = trainers.send_and_die(1), rollouts.receive(1)
        with self.assertRaises(ray.exceptions.RayError):
            self.get(sent)
        with self.assertRaisesRegex(ray.exceptions.RayTaskError, r"[\d.]+:\d+ is gone"):
            self.get(received)
        self.connect(others, rollouts)
        self.assertEqual(self.get(others.send(2) + rollouts.receive(2))[1], sums_of(weights_of(2)))

    def test_a_trainer_that_sends_nothing_ends_the_receive(self):
        trainers, rollouts = self.group(1), self.group(1)
        self.connect(trainers, rollouts)
        with self.assertRaisesRegex(ray.exceptions.RayTaskError, "DeadlineExceeded"):
            self.get(rollouts.receive(1))


if __name__ == "__main__":
    unittest.main(verbosity=2)
