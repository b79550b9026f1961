#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""LMCache's own factory loads the client of tensorlane.kv from its configuration, and LMCache's adapter drives it with
its own keys and memory objects: stores, look-ups, loads, deletions, and an owner that dies. Storage managers, which are
what an LMCache server has, store in one process what they load in another."""
import itertools
import logging
import os
import select
import subprocess
import sys
import time
import unittest

from engines_support import (KILL_DELAYS_SEC, PATIENCE, kill_in_the_middle, packages, start_owner,
                             stop_and_kill_soon)

with packages():
    import torch
    from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
    from lmcache.v1.distributed.config import (EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig,
                                               StorageManagerConfig)
    from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
    from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
    from lmcache.v1.distributed.l2_adapters.native_plugin_l2_adapter import NativePluginL2AdapterConfig
    from lmcache.v1.distributed.storage_manager import StorageManager
    from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

from tensorlane import kv

BLOCK = 256 << 10
COUNT = 64


def key_of(number):
    return ObjectKey(chunk_hash=number.to_bytes(32, "big"), model_name="org/model", kv_rank=3)


def memory(value):
    raw = torch.full((BLOCK,), value, dtype=torch.uint8)
    meta = MemoryObjMetadata(shape=torch.Size([BLOCK]), dtype=torch.uint8, address=0, phy_size=BLOCK, ref_count=1)
    return TensorMemoryObj(raw, meta, None)


def plugin_config(address):
    return NativePluginL2AdapterConfig.from_dict({
        "type": "native_plugin", "module_path": "tensorlane.kv", "class_name": "LMCacheClient",
        "adapter_params": {"address": address, "timeout": 10}, "max_capacity_gb": 1})


class LMCache(unittest.TestCase):
    def setUp(self):
        self.start("127.0.0.1:0")
        self.adapter = self.make_adapter()

    def start(self, address):
        self.owner, self.address = start_owner(self, address)

    def make_adapter(self):
        adapter = create_l2_adapter_from_registry(plugin_config(self.address))
        self.addCleanup(adapter.close)
        return adapter

    def await_event(self, descriptor):
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        self.assertTrue(poller.poll(PATIENCE * 1000))
        os.eventfd_read(descriptor)

    def store(self, numbers):
        # The adapter's views do not keep the memory alive.
        objects = [memory(number % 251) for number in numbers]
        task = self.adapter.submit_store_task([key_of(number) for number in numbers], objects)
        self.await_event(self.adapter.get_store_event_fd())
        self.assertEqual(len(objects), len(numbers))
        return self.adapter.pop_completed_store_tasks()[task]

    def look_up(self, numbers, adapter=None):
        adapter = adapter or self.adapter
        task = adapter.submit_lookup_and_lock_task([key_of(number) for number in numbers], {})
        self.await_event(adapter.get_lookup_and_lock_event_fd())
        bitmap = adapter.query_lookup_and_lock_result(task)
        return [bitmap.test(place) for place in range(len(numbers))]

    def load(self, numbers, adapter=None):
        adapter = adapter or self.adapter
        objects = [memory(255) for _ in numbers]
        task = adapter.submit_load_task([key_of(number) for number in numbers], objects)
        self.await_event(adapter.get_load_event_fd())
        bitmap = adapter.query_load_result(task)
        return [one.raw_data[0].item() if bitmap.test(place) and bool((one.raw_data == one.raw_data[0]).all()) else None
                for place, one in enumerate(objects)]

    def test_its_path_is_in_the_log_of_lmcache(self):
        logger = logging.getLogger("lmcache.tensorlane")
        self.assertTrue(logger.isEnabledFor(logging.INFO) and logger.hasHandlers())
        with self.assertLogs(logger, "INFO") as logs:
            self.store(range(COUNT))
            self.load(range(COUNT))
        self.assertRegex("\n".join(logs.output), "large values from .* come by ")

    def test_store_look_up_load_and_delete(self):
        self.assertTrue(self.store(range(COUNT)).is_successful())
        self.assertEqual(self.look_up([0, COUNT, 5]), [True, False, True])
        self.assertEqual(self.load(range(COUNT)), list(range(COUNT)))
        self.assertEqual(self.load([3, COUNT]), [3, None])
        self.adapter.delete([key_of(3)])
        self.assertEqual(self.look_up([3, 4]), [False, True])
        other = self.make_adapter()
        self.assertEqual(self.load([4, 5], other), [4, 5])
        self.assertTrue(self.adapter.report_status()["is_healthy"])

    def test_an_owner_that_dies_and_comes_back(self):
        self.assertTrue(self.store(range(4)).is_successful())
        self.owner.kill()
        self.owner.wait()
        self.wait_until_lost()
        self.assertEqual(self.load([0]), [None])
        self.start(self.address)
        for _ in range(PATIENCE):
            if self.store(range(4)).is_successful():
                break
            select.select([], [], [], 1)
        self.assertEqual(self.load([3]), [3])

    def wait_until_lost(self):
        """What is mapped is found until the link has ended."""
        end = time.monotonic() + PATIENCE
        while any(self.look_up([0, 1])):
            self.assertLess(time.monotonic(), end)
            time.sleep(0.01)

    def test_an_owner_that_dies_in_the_middle(self):
        self.assertTrue(self.store(range(COUNT)).is_successful())
        for call, count in ((self.load, COUNT + 1), (self.store, COUNT)):  # the owner is asked about what is not there
            stop_and_kill_soon(self, self.owner)
            result = call(range(count))
            self.assertEqual(result if call == self.load else result.is_successful(),
                             [None] * count if call == self.load else False)
            self.owner.wait()
            self.start(self.address)
            for _ in range(PATIENCE):
                if self.store(range(COUNT)).is_successful():
                    break
                select.select([], [], [], 1)
        self.assertEqual(self.load(range(COUNT)), list(range(COUNT)))

    def test_clients_that_die_in_the_middle(self):
        self.assertTrue(self.store(range(COUNT)).is_successful())
        script = f"""if True:
            import sys
            sys.path.insert(0, {os.path.dirname(__file__)!r})
            import lmcache_test as test
            case = test.LMCache("make_adapter")
            case.address = {self.address!r}
            case.adapter = case.make_adapter()
            while True:
                case.CALL
                print("done", flush=True)
        """
        for call, delay in itertools.product(("load(range(test.COUNT))", "store(range(1000, 1000 + test.COUNT))"),
                                             KILL_DELAYS_SEC):
            kill_in_the_middle(self, script.replace("CALL", call), delay)
            self.assertEqual(self.load(range(COUNT)), list(range(COUNT)))
            self.assertTrue(self.store(range(COUNT)).is_successful())


class Jobs(unittest.TestCase):
    """LMCache's storage managers write objects to their own memory, store them at the owner by themselves, and
    prefetch them from it."""
    LAYOUT = MemoryLayoutDesc([torch.Size([2, 4, 64, 128])], [torch.bfloat16])
    NUMBERS = range(32)
    LOADER = f"""if True:
        import sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import lmcache_test as test
        case = test.Jobs("make")
        print(case.load(case.make(sys.argv[1])), flush=True)
        case.doCleanups()
    """

    def make(self, address):
        memory = L1ManagerConfig(L1MemoryManagerConfig(64 << 20, use_lazy=False, shm_name=""))
        manager = StorageManager(StorageManagerConfig(memory, EvictionConfig("LRU"),
                                                      L2AdaptersConfig([plugin_config(address)])))
        self.addCleanup(manager.close)
        return manager

    def store(self, manager, numbers):
        keys = [key_of(number) for number in numbers]
        objects = manager.reserve_write(keys, self.LAYOUT)
        for number, key in zip(numbers, keys):
            objects[key].tensor.fill_(number)
        manager.finish_write(keys)

    def load(self, manager):
        """Returns how many objects came from the owner, and what they are."""
        keys = [key_of(number) for number in self.NUMBERS]
        task = manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, 0, self.LAYOUT)]))
        self.assertTrue(manager.wait_prefetch_status(task, PATIENCE))
        count = manager.query_prefetch_status(task).l2_hit_count
        with manager.read_prefetched_results(keys[:count]) as objects:
            values = [one.tensor.unique().tolist() for one in objects]
        manager.finish_read_prefetched(keys[:count])
        return count, values

    def wait_for_blocks(self, address, count):
        with kv.Client(address) as client:
            end = time.monotonic() + PATIENCE
            while client.describe().get("blocks") != count and time.monotonic() < end:
                time.sleep(0.1)
            self.assertEqual(client.describe()["blocks"], count)

    def test_one_process_loads_what_another_one_has_stored(self):
        _, address = start_owner(self)
        self.store(self.make(address), self.NUMBERS)
        self.wait_for_blocks(address, len(self.NUMBERS))
        loaded = subprocess.run([sys.executable, "-c", self.LOADER, address], stdout=subprocess.PIPE, text=True,
                                timeout=PATIENCE, check=True).stdout
        expected = len(self.NUMBERS), [[float(number)] for number in self.NUMBERS]
        self.assertIn(f"{expected}\n", loaded)

    def test_an_owner_that_dies_and_comes_back(self):
        owner, address = start_owner(self)
        writer = self.make(address)
        self.store(writer, self.NUMBERS)
        self.wait_for_blocks(address, len(self.NUMBERS))
        owner.kill()
        owner.wait()
        self.assertEqual(self.load(self.make(address)), (0, []))  # its client has met no owner
        start_owner(self, address)
        reader, loaded, end = self.make(address), (0, []), time.monotonic() + PATIENCE
        while loaded[0] < len(self.NUMBERS) and time.monotonic() < end:
            writer.delete_l1_keys([key_of(number) for number in self.NUMBERS], force=True)
            self.store(writer, self.NUMBERS)
            time.sleep(1)
            loaded = self.load(reader)
        self.assertEqual(loaded, (len(self.NUMBERS), [[float(number)] for number in self.NUMBERS]))


if __name__ == "__main__":
    unittest.main(verbosity=2)
