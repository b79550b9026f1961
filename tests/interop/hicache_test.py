#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""SGLang's and vLLM's own factories load the classes of tensorlane that store their blocks, and SGLang's cache
controller and vLLM's manager of tiers drive them on the CPU. Their schedulers need a model on a GPU, and are not run.
"""
import collections
import itertools
import logging
import os
import signal
import sys
import threading
import time
import unittest
import uuid

from engines_support import (KILL_DELAYS_SEC, PATIENCE, kill_in_the_middle, packages, start_owner,
                             stop_and_kill_soon)

with packages():
    import numpy
    import torch
    from sglang.srt.managers.cache_controller import HiCacheController, get_storage_hash_str
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
    from sglang.srt.runtime_context import get_parallel
    from vllm.logger import _configure_vllm_root_logger as configure_logging
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
    from vllm.v1.kv_offload.tiering.base import TransferJob
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager


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

    def pages(self, more=0):
        return {f"hash{number}": torch.full((64 << 10,), number + more, dtype=torch.bfloat16) for number in range(8)}

    def set_again(self, storage, more=0):
        pages, end = self.pages(more), time.monotonic() + PATIENCE
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
            stop_and_kill_soon(self, self.owner)
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
                case.CALL
                print("done", flush=True)
        """
        for call, delay in itertools.product(("get_all(storage)", "set_again(storage, 100)"), KILL_DELAYS_SEC):
            kill_in_the_middle(self, script.replace("CALL", call), delay)
            # Each page is as one of the two has set it, as a whole.
            for number, page in enumerate(self.get_all(storage)):
                self.assertIn(page, [[float(number)], [float(number + 100)]])
            self.set_again(storage)
            self.assertEqual(self.get_all(storage), [[float(number)] for number in range(8)])


class SGLangController(Owned):
    """SGLang's cache controller, with pools in host memory: its threads back pages up, and prefetch them."""
    PAGE, PAGES = 16, 8
    TOKENS = list(range(PAGE * PAGES))

    @classmethod
    def setUpClass(cls):
        get_parallel().override_permanently(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_tp_rank=0, attn_tp_size=1, attn_dcp_rank=0,
            attn_dcp_size=1, attn_dp_enabled=False)
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        cls.addClassCleanup(torch.distributed.destroy_process_group)

    def make(self):
        pool = MHATokenToKVPool(256, self.PAGE, torch.bfloat16, 2, 16, 2, "cpu", False)
        allocator = PagedTokenToKVPoolAllocator(256, self.PAGE, torch.bfloat16, "cpu", pool, False)
        host = MHATokenToKVPoolHost(pool._mha_buffer_info(), 2.0, 0, self.PAGE, "layer_first", pin_memory=False,
                                    device_capacity_tokens=256, start_layer=0, end_layer=1)
        controller = HiCacheController(
            allocator, host, self.PAGE, torch.distributed.group.WORLD, threading.Event(), storage_backend="dynamic",
            prefetch_threshold=self.PAGE, model_name="org/model", storage_backend_extra_config={
                "backend_name": "tensorlane", "module_path": "tensorlane.sglang", "class_name": "HiCache",
                "address": self.address})
        self.addCleanup(controller.detach_storage_backend)
        return controller, host

    def back_up(self, controller, host):
        """Returns how many tokens are stored."""
        indices = host.alloc(len(self.TOKENS))
        for number in range(self.PAGES):
            page = torch.full_like(host.get_dummy_flat_data_page(), number + 1)
            host.set_from_flat_data_page(int(indices[number * self.PAGE]), page)
        controller.write_storage(indices, self.TOKENS, get_storage_hash_str(self.TOKENS, None, page_size=self.PAGE))
        done = controller.ack_backup_queue.get(timeout=PATIENCE)
        host.free(indices)
        return done.completed_tokens

    def prefetch(self, controller, host):
        """Returns what the pages have that were found and came."""
        controller.prefetch("request", self.TOKENS)
        operation = controller.prefetch_hit_queue.get(timeout=PATIENCE)
        if operation.storage_hit_count == 0:
            return []
        operation.host_indices = host.alloc(operation.storage_hit_count)
        controller.prefetch_buffer.put(operation)
        tokens = 0
        while not (ack := controller.ack_prefetch_queue.get(timeout=PATIENCE)).completed_req:
            tokens = ack.completed_tokens
        return [host.get_data_page(operation.host_indices[number]).float().unique().tolist()
                for number in range(0, tokens, self.PAGE)]

    def test_pages_of_one_controller_reach_another_one(self):
        writer, reader = self.make(), self.make()
        self.assertEqual(self.prefetch(*reader), [])
        self.assertEqual(self.back_up(*writer), len(self.TOKENS))
        self.assertEqual(self.prefetch(*reader), [[float(number + 1)] for number in range(self.PAGES)])

    def test_an_owner_that_dies_and_comes_back(self):
        controller = self.make()
        self.assertEqual(self.back_up(*controller), len(self.TOKENS))
        self.owner.kill()
        self.owner.wait()
        self.assertEqual(self.back_up(*controller), 0)
        self.assertEqual(self.prefetch(*controller), [])
        self.start(self.address)
        end = time.monotonic() + PATIENCE
        while self.back_up(*controller) == 0:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.5)
        self.assertEqual(len(self.prefetch(*controller)), self.PAGES)


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


class VLLMManager(Owned):
    """vLLM's manager of tiers, with its own tier in host memory: it stores chunks by itself, and promotes those that
    are looked up."""
    CHUNK, CHUNKS = 128 << 10, 16

    def setUp(self):
        super().setUp()
        self.keys = [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(8)]

    def make(self, request):
        region = SharedOffloadRegion(uuid.uuid4().hex, self.CHUNKS, 0, self.CHUNK, self.CHUNK)
        primary = CPUPrimaryTierOffloadingManager(self.CHUNKS, region)
        config = {"type": "Tier", "module_path": "tensorlane.vllm", "address": self.address}
        tier = SecondaryTierFactory.create_secondary_tier(config, primary.get_kv_memoryview(), None)
        manager = TieringOffloadingManager(primary, [tier])
        self.addCleanup(manager.shutdown)
        manager.on_new_request(request)
        return manager

    def memory_of(self, manager, chunk):
        return numpy.asarray(manager.primary_tier.get_kv_memoryview())[int(chunk)]

    def step(self, manager):
        manager.on_schedule_end(ScheduleEndContext((), ()))
        time.sleep(0.01)

    def store(self, manager, request):
        output = manager.prepare_store(self.keys, request)
        for key, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids):
            self.memory_of(manager, chunk)[:] = self.keys.index(key) + 1
        manager.complete_store(output.keys_to_store, request)
        end = time.monotonic() + PATIENCE
        while manager.has_pending_work():
            self.assertLess(time.monotonic(), end)
            self.step(manager)
            manager.lookup(self.keys[0], request)  # it takes in what has finished

    def look_up(self, manager, request):
        """Returns the answers when none is "not yet"."""
        end = time.monotonic() + PATIENCE
        while True:
            found = [manager.lookup(key, request) for key in self.keys]
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found):
                return found
            self.assertLess(time.monotonic(), end)
            self.step(manager)

    def test_chunks_of_one_manager_reach_another_one(self):
        requests = [ReqContext(req_id=name) for name in "ab"]
        writer, reader = [self.make(request) for request in requests]
        self.store(writer, requests[0])
        self.assertEqual(self.look_up(reader, requests[1]), [LookupResult.HIT] * 8)
        chunks = reader.prepare_load(self.keys, requests[1]).chunk_ids
        self.assertEqual([set(self.memory_of(reader, chunk).tolist()) for chunk in chunks],
                         [{number + 1} for number in range(8)])
        reader.complete_load(self.keys, requests[1])

    def test_an_owner_that_dies(self):
        requests = [ReqContext(req_id=name) for name in "ab"]
        writer, reader = [self.make(request) for request in requests]
        self.owner.kill()
        self.owner.wait()
        self.store(writer, requests[0])
        self.assertEqual(self.look_up(reader, requests[1]), [LookupResult.MISS] * 8)


if __name__ == "__main__":
    unittest.main(verbosity=2)
