#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""SGLang's and vLLM's own factories load the classes of tensorlane that store their blocks, which then move blocks in
host memory. Their schedulers and caches need a model on a GPU, and are not run."""
import collections
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import unittest

from engines_support import PATIENCE, packages, start_owner

with packages():
    import numpy
    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
    from vllm.logger import _configure_vllm_root_logger as configure_logging
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
    from vllm.v1.kv_offload.tiering.base import TransferJob
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory


class Owned(unittest.TestCase):
    def setUp(self):
        self.start("127.0.0.1:0")

    def start(self, address):
        self.owner, self.address = start_owner(self, address)


class SGLang(Owned):
    def make(self, rank=0):
        config = HiCacheStorageConfig(
            tp_rank=rank, tp_size=2, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
            enable_storage_metrics=False, is_page_first_layout=False, model_name="org/model",
            extra_config={"backend_name": "tensorlane", "module_path": "tensorlane.sglang", "class_name": "HiCache",
                          "address": self.address})
        storage = StorageBackendFactory.create_backend("dynamic", config, None)
        self.addCleanup(storage.close)
        return storage

    def test_pages(self):
        storage, other_rank = self.make(), self.make(rank=1)
        pages = [torch.full((2, 64, 8, 16), number, dtype=torch.bfloat16) for number in range(8)]
        keys = [f"hash{number}" for number in range(8)]
        self.assertTrue(storage.batch_set(keys, pages))
        self.assertEqual(storage.batch_exists([*keys, "none"]), 8)
        self.assertEqual(storage.batch_exists(["hash0", "none", "hash1"]), 1)
        self.assertEqual(other_rank.batch_exists(keys), 0)
        targets = [torch.empty(2 * 64 * 8 * 16, dtype=torch.bfloat16) for _ in range(9)]
        got = storage.batch_get([*keys, "none"], targets)
        self.assertEqual([None if page is None else page.mean().item() for page in got], [*map(float, range(8)), None])
        self.assertTrue(storage.set("one", pages[3].transpose(0, 1)))
        self.assertIsNotNone(storage.get("one", targets[0]))
        self.assertTrue(storage.exists("one"))
        self.owner.kill()
        end = time.monotonic() + PATIENCE
        while storage.batch_exists(keys) and time.monotonic() < end:  # what is mapped is found until the link has ended
            time.sleep(0.01)
        self.assertEqual(storage.batch_exists(keys), 0)
        self.assertFalse(storage.batch_set(keys, pages))

    def pages(self):
        return {f"hash{number}": torch.full((64 << 10,), number, dtype=torch.bfloat16) for number in range(8)}

    def set_again(self, storage):
        pages, end = self.pages(), time.monotonic() + PATIENCE
        while not storage.batch_set(list(pages), list(pages.values())):
            self.assertLess(time.monotonic(), end)
            time.sleep(0.1)

    def get_all(self, storage):
        """Returns what the pages have; None: a page is not there."""
        got = storage.batch_get(list(self.pages()), [torch.empty(64 << 10, dtype=torch.bfloat16) for _ in range(8)])
        return [None if page is None else page.unique().tolist() for page in got]

    def test_an_owner_that_dies_in_the_middle(self):
        storage, pages = self.make(), self.pages()
        # The owner is asked about the one that is not there.
        for call, expected in ((lambda: storage.batch_get([*pages, "none"], [*pages.values(), torch.empty(1)]),
                                [None] * 9),
                               (lambda: storage.batch_set(list(pages), list(pages.values())), False)):
            self.set_again(storage)
            self.owner.send_signal(signal.SIGSTOP)
            killer = threading.Timer(0.5, self.owner.kill)
            killer.start()
            self.addCleanup(killer.join)
            self.assertEqual(call(), expected)
            self.owner.wait()
            self.start(self.address)
        self.set_again(storage)
        self.assertEqual(self.get_all(storage), [[float(number)] for number in range(8)])

    def test_processes_that_die_in_the_middle(self):
        storage = self.make()
        self.set_again(storage)
        script = f"""if True:
            import sys
            sys.path.insert(0, {os.path.dirname(__file__)!r})
            import hicache_test
            case = hicache_test.SGLang("make")
            case.address = {self.address!r}
            storage = case.make()
            while True:
                case.CALL(storage)
                print("done", flush=True)
        """
        for call in ("get_all", "set_again"):
            process = subprocess.Popen([sys.executable, "-c", script.replace("CALL", call)], stdout=subprocess.PIPE,
                                       stderr=subprocess.DEVNULL, text=True)
            self.addCleanup(process.stdout.close)
            self.addCleanup(process.wait)
            self.addCleanup(process.kill)
            while process.stdout.readline() != "done\n":
                self.assertIsNone(process.poll())
            process.kill()
            process.wait()
            self.assertEqual(self.get_all(storage), [[float(number)] for number in range(8)])
            self.set_again(storage)


class VLLM(Owned):
    CHUNK = 128 << 10

    def setUp(self):
        super().setUp()
        self.memory = numpy.zeros((32, self.CHUNK), numpy.uint8)
        config = {"type": "Tier", "module_path": "tensorlane.vllm", "address": self.address}
        self.tier = SecondaryTierFactory.create_secondary_tier(config, memoryview(self.memory), None)
        self.addCleanup(self.tier.shutdown)
        self.keys = [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(16)]
        self.request = ReqContext(req_id="r")

    def job(self, number, keys, chunks, is_promotion):
        return TransferJob(number, keys, numpy.array(chunks), is_promotion, self.request)

    def finish(self):
        self.tier.drain_jobs()
        result, = self.tier.get_finished_jobs()
        return result

    def look_up(self, key):
        end = time.monotonic() + PATIENCE
        while (result := self.tier.lookup(key, self.request)) is LookupResult.RETRY:
            self.assertLess(time.monotonic(), end)
            self.tier.on_schedule_end(ScheduleEndContext((), ()))
            time.sleep(0.01)
        return result

    def test_chunks(self):
        self.tier.on_new_request(self.request)
        for number in range(16):
            self.memory[number] = number + 1
        self.tier.submit_store(self.job(1, self.keys, range(16), False))
        result = self.finish()
        self.assertEqual((result.job_id, result.success, result.transfer_bytes), (1, True, 16 * self.CHUNK))
        self.assertIs(self.look_up(self.keys[3]), LookupResult.HIT)
        self.assertIs(self.look_up(make_offload_key(b"none", 0)), LookupResult.MISS)
        self.tier.submit_load(self.job(2, self.keys, range(16, 32), True))
        self.assertTrue(self.finish().success)
        self.assertTrue((self.memory[16:] == self.memory[:16]).all())
        self.tier.submit_load(self.job(3, [self.keys[0], make_offload_key(b"none", 0)], [16, 17], True))
        result = self.finish()
        self.assertEqual((result.success, result.successful_keys), (False, [self.keys[0]]))
        self.assertFalse(self.tier.has_pending_work())
        self.tier.on_request_finished(self.request)

    def test_its_path_is_in_the_log_of_vllm(self):
        self.addCleanup(setattr, logging.getLogger("vllm"), "level", logging.getLogger("vllm").level)
        configure_logging()  # as vLLM's engine does
        logger = logging.getLogger("vllm.tensorlane")
        self.assertTrue(logger.isEnabledFor(logging.INFO) and logger.hasHandlers())
        with self.assertLogs(logger, "INFO") as logs:
            self.tier.submit_store(self.job(1, self.keys, range(16), False))
            self.finish()
            self.tier.submit_load(self.job(2, self.keys, range(16), True))
            self.finish()
        self.assertRegex("\n".join(logs.output), "large values from .* come by ")

    def test_a_job_that_is_taken_at_once(self):
        """vLLM may ask for results between the result and the end of the job; what it waits for has its result."""
        tier = self.tier

        class Eager(collections.deque):
            def append(self, finished):
                super().append(finished)
                self.taken = list(tier.get_finished_jobs())

        tier._finished = Eager()
        with self.assertNoLogs("concurrent.futures", "ERROR"):
            tier.submit_store(self.job(1, self.keys, range(16), False))
            end = time.monotonic() + PATIENCE
            while tier.has_pending_work():
                self.assertLess(time.monotonic(), end)
                time.sleep(0.01)
            tier.client.describe()  # the callback is over
        self.assertTrue(tier._finished.taken[0].success)

    def test_a_job_that_cannot_begin(self):
        self.tier.client.close()
        with self.assertRaises(RuntimeError):
            self.tier.submit_store(self.job(1, self.keys, range(16), False))
        self.assertFalse(self.tier.has_pending_work())
        self.tier.drain_jobs()

    def test_an_owner_that_dies(self):
        self.tier.submit_store(self.job(1, self.keys, range(16), False))
        self.assertTrue(self.finish().success)
        self.owner.send_signal(signal.SIGSTOP)
        # The owner is asked about the one that is not there.
        self.tier.submit_load(self.job(2, [*self.keys, make_offload_key(b"none", 0)], range(17), True))
        self.tier.submit_store(self.job(3, self.keys, range(16), False))
        self.owner.kill()
        self.tier.drain_jobs()
        results = {result.job_id: result for result in self.tier.get_finished_jobs()}
        self.assertEqual((results[2].successful_keys, results[3].success), ([], False))
        self.assertIs(self.look_up(self.keys[1]), LookupResult.MISS)


if __name__ == "__main__":
    unittest.main(verbosity=2)
