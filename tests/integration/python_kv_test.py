#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""tensorlane.kv: blocks at an owner that several clients share, its limits, and processes that die."""
import asyncio
import concurrent.futures
import ctypes
import gc
import json
import os
import pathlib
import random
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock
import warnings
import weakref

from cli_support import free_ports
from python_support import (PACKAGES, PATIENCE, SANITIZE, run_script, start_script, tensorlane, wait_until,
                            without_address_sanitizer)

from tensorlane import kv

BLOCK = 64 << 10
OPERATIONS = 10000
SLOW = 64 << 20
# It stops in the middle of what it receives.
SLOW_READER = """
import os, signal, threading
import tensorlane
into = bytearray({size})
def stop():
    while not into[{size} // 4]:
        pass
    os.kill(os.getpid(), signal.SIGSTOP)
threading.Thread(target=stop).start()
with tensorlane.Worker({{"log": {{"level": "error"}}}}, address="127.0.0.1:0") as worker:
    worker.recv_wait(worker.add_peer("{address}"), "shown", into=into)
print(set(into[::4096]), flush=True)
"""


def block(number, size=BLOCK):
    return bytes([number % 251]) * size


class Owned(unittest.TestCase):
    limit, ttl, options = "16MiB", 0, ()

    def setUp(self):
        self.start(f"127.0.0.1:{free_ports(1)[0]}")  # where an owner can follow this one
        self.cache = self.client()

    def start(self, address):
        self.log = tempfile.TemporaryFile("w+")
        self.addCleanup(self.log.close)
        self.owner = subprocess.Popen(
            [sys.executable, "-m", "tensorlane.kv", "--address", address, "--limit", self.limit, "--ttl",
             str(self.ttl), *self.options], stdout=subprocess.PIPE, stderr=self.log, text=True,
            env={**os.environ, "PYTHONPATH": str(PACKAGES)})
        self.addCleanup(self.end, self.owner)
        self.address = self.owner.stdout.readline().split()[-1]

    def end(self, process):
        process.kill()
        process.wait()
        process.stdout.close()

    def client(self, **options):
        client = kv.Client(self.address, **{"timeout": PATIENCE, **options})
        self.addCleanup(client.close)
        return client

    def set(self, first, count, size=BLOCK):
        keys = [f"k{number}" for number in range(first, first + count)]
        return self.cache.set(keys, [block(number, size) for number in range(first, first + count)])

    def settle(self):
        """From now on what the client has set is in the index for it, too."""
        self.cache.describe()

    def get(self, keys, client=None, size=BLOCK):
        """Returns the blocks, and None for each that was not there."""
        into = [bytearray(size) for _ in keys]
        return [bytes(one) if found else None for one, found in zip(into, (client or self.cache).get(keys, into))]


class Blocks(Owned):
    def test_what_is_set_is_there_for_all(self):
        self.assertEqual(self.set(0, 20), [True] * 20)
        other = self.client()
        self.assertEqual(self.get(["k3", "none", "k19"], other), [block(3), None, block(19)])
        self.assertEqual(other.exists(["k0", "none", "k1"]), [True, False, True])
        self.assertEqual(other.remove(["k0", "none"]), [True, False])
        self.assertEqual(self.cache.exists(["k0", "k1"]), [False, True])
        self.assertEqual(self.cache.get([], []), [])

    def test_a_client_that_closes_is_not_lost(self):
        with self.client() as other:
            other.set(["k"], [block(1)])
        self.cache.describe()
        self.owner.terminate()
        self.owner.wait()
        self.log.seek(0)
        said = self.log.read()
        self.assertIn("a client at", said)
        self.assertNotIn("level=warn", said)

    def test_later_blocks_replace_earlier_ones(self):
        self.set(1, 1)
        self.assertEqual(self.cache.set(["k1"], [block(9, 1000)]), [True])
        self.assertEqual(self.get(["k1"], size=1000), [block(9, 1000)])
        self.assertEqual(self.get(["k1"]), [None])  # of another size
        self.assertEqual(self.cache.describe()["used_bytes"], 1000)

    def test_an_owner_that_cannot_map_what_is_shown(self):
        """Then it receives the blocks."""
        ask = self.cache._ask

        async def refuse_places(request, number=None):
            return "no place" if "places" in request else await ask(request, number)

        with unittest.mock.patch.object(self.cache, "_ask", refuse_places):
            self.assertEqual(self.set(0, 2), [True] * 2)
        self.assertEqual(self.get(["k0", "k1"]), [block(0), block(1)])

    def test_keys_of_any_kind(self):
        keys = ["a/b*c?[d]", "ü" * 300, "x" * 5000, "", "nul\0", "@"]
        self.assertEqual(self.cache.set(keys, [block(i) for i in range(len(keys))]), [True] * len(keys))
        self.assertEqual(self.get(keys), [block(i) for i in range(len(keys))])

    def test_keys_that_are_none(self):
        """A key that UTF-8 lacks fails alone. A text is a list of keys, as it is for Python."""
        self.assertEqual(self.cache.set(["good", "\ud800"], [block(1), block(2)]), [True, False])
        self.settle()
        self.assertEqual(self.get(["\ud800", "good"]), [None, block(1)])
        self.assertEqual(self.cache.remove(["\ud800", "good"]), [False, True])
        self.assertEqual(self.cache.set("ab", [block(3), block(4)]), [True, True])
        self.assertEqual(self.get(["a", "b"]), [block(3), block(4)])
        self.assertEqual(self.cache.remove("ab"), [True, True])

    def test_blocks_without_bytes(self):
        for empty in (bytearray(), memoryview((ctypes.c_int * 0 * 3)()), memoryview((ctypes.c_int * 3 * 0)())):
            with self.subTest(shape=memoryview(empty).shape):
                self.assertEqual(self.cache.set(["empty", "k1"], [empty, block(1)]), [True, True])
                self.assertEqual(self.cache.get(["empty", "k1"], [empty, bytearray(BLOCK)]), [True, True])

    def test_more_than_the_memory_for_what_is_set(self):
        size = kv.STAGE_BYTES // 8 - 1
        with unittest.mock.patch.object(kv, "STAGE_BYTES", 2 * BLOCK):
            client = self.client()
            keys = ["a", "b", "c"]
            self.assertEqual(client.set(keys[:2], [block(1), block(2)]), [True] * 2)
            self.assertEqual(client.set(keys, [block(4), block(5), block(6)]), [True] * 3)
            self.assertEqual(client.set(["big"], [block(7, size)]), [True])
        self.assertEqual(self.get(keys), [block(4), block(5), block(6)])
        self.assertEqual(self.get(["big"], size=size), [block(7, size)])

    def test_many_threads(self):
        wrong = []

        def use(number):
            for count in range(20):
                key = [f"t{number}-{count}"]
                if self.cache.set(key, [block(number)]) != [True] or self.get(key) != [block(number)]:
                    wrong.append(key)

        threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])


class Program(Owned):
    def test_it_ends_by_signals(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            self.owner.send_signal(number)
            self.assertEqual(self.owner.wait(PATIENCE), 0)
            self.start(self.address)

    def test_it_ends_by_a_signal_while_it_serves(self):
        """A second signal changes nothing."""
        stop = threading.Event()
        self.addCleanup(stop.set)

        def load():
            cache, keys = self.client(timeout=1), [f"k{number}" for number in range(2000)]
            while not stop.is_set():
                cache.set(keys, [b"small"] * len(keys))

        threads = [threading.Thread(target=load) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: self.cache.describe().get("stored", 0) > 10000, "blocks are stored")
        for _ in range(2):
            self.owner.send_signal(signal.SIGTERM)
        code = self.owner.wait(PATIENCE)
        stop.set()
        for thread in threads:
            thread.join()
        self.log.seek(0)
        said = self.log.read()
        self.assertNotIn("Traceback", said)
        self.assertNotIn("never retrieved", said)
        self.assertEqual(code, 0)

    def test_a_limit_that_is_too_large(self):
        result = subprocess.run([sys.executable, "-m", "tensorlane.kv", "--address", "127.0.0.1:0", "--limit",
                                 "10000000TiB"], text=True, capture_output=True, check=False,
                                env={**os.environ, "PYTHONPATH": str(PACKAGES)})
        self.assertEqual(result.returncode, 2)
        self.assertIn("is no size", result.stderr)

    def test_times_that_are_none(self):
        for ttl in ("-3", "nan", "soon"):
            result = subprocess.run([sys.executable, "-m", "tensorlane.kv", "--address", "nowhere", "--limit", "1MiB",
                                     "--ttl", ttl], text=True, capture_output=True, check=False,
                                    env={**os.environ, "PYTHONPATH": str(PACKAGES)})
            self.assertEqual(result.returncode, 2)
            self.assertIn(f"'{ttl}' is no number of seconds", result.stderr)

    def test_what_keeps_it_from_starting(self):
        nowhere = str(pathlib.Path(tempfile.gettempdir()) / "nowhere.json")
        for options, pattern in ((["--address", self.address], "another process uses the address"),
                                 (["--address", ""], "address"),
                                 (["--address", "127.0.0.1:0", "--settings", nowhere], "nowhere.json")):
            result = subprocess.run([sys.executable, "-m", "tensorlane.kv", "--limit", "1MiB", *options], text=True,
                                    capture_output=True, env={**os.environ, "PYTHONPATH": str(PACKAGES)}, check=False)
            self.assertEqual(result.returncode, 1)
            self.assertRegex(result.stderr.splitlines()[-1], f"^python -m tensorlane.kv: .*{pattern}")
            self.assertNotIn("Traceback", result.stderr)

    def test_a_standard_output_that_is_full(self):
        with open("/dev/full", "w", encoding="utf-8") as full:
            result = subprocess.run([sys.executable, "-m", "tensorlane.kv", "--address", "127.0.0.1:0", "--limit",
                                     "1MiB"], text=True, stdout=full, stderr=subprocess.PIPE, check=False,
                                    env={**os.environ, "PYTHONPATH": str(PACKAGES)}, timeout=PATIENCE)
        self.assertEqual(result.returncode, 1)
        self.assertIn("python -m tensorlane.kv: cannot write to standard output: ", result.stderr)
        self.assertNotIn("Traceback", result.stderr)
        self.assertNotIn("Exception", result.stderr)


class Index(Owned):
    """Blocks that a client finds in the owner's index."""

    def test_the_owner_is_not_asked(self):
        self.set(0, 4)
        self.settle()
        hasty = self.client(timeout=1)
        wait_until(lambda: hasty.exists(["k0"]) == [True], "the client has met the owner")
        self.owner.send_signal(signal.SIGSTOP)
        self.assertEqual(hasty.exists(["k0", "k3"]), [True, True])
        self.assertEqual(self.get(["k2", "k1"], hasty), [block(2), block(1)])
        self.assertEqual(self.get(["k2", "none"], hasty), [None, None])  # the whole call fails
        self.owner.send_signal(signal.SIGCONT)

    def test_what_a_client_has_set_last(self):
        """It is what the client gets, although the owner has not been told to keep it yet."""
        say, late = self.cache._say, []

        async def say_late(request, number):
            if request["do"] == "keep":
                return late.append((request, number))
            while late:
                await say(*late.pop())
            await say(request, number)

        with unittest.mock.patch.object(self.cache, "_say", say_late):
            for number in range(3):
                self.assertEqual(self.cache.set(["k"], [block(number)]), [True])
                self.assertTrue(self.get(["k"]) == [block(number)], number)

    def test_what_is_removed(self):
        for number in range(20):
            self.set(0, 1)
            self.settle()
            self.assertEqual(self.cache.exists(["k0"]), [True])
            self.assertEqual(self.cache.remove(["k0"]), [True])
            self.assertEqual((self.cache.exists(["k0"]), self.get(["k0"])), ([False], [None]))

    def test_more_blocks_than_entries(self):
        count = 3 * kv.MIN_ENTRIES
        self.assertEqual(self.set(0, count, 100), [True] * count)
        self.settle()
        keys = [f"k{number}" for number in range(count)]
        self.assertEqual(self.cache.exists(keys), [True] * count)
        self.assertEqual(self.get(keys, size=100), [block(number, 100) for number in range(count)])

    def test_what_is_replaced_while_it_is_read(self):
        """What comes is one block or the other, and nothing in between. On one processor they would take turns."""
        size, is_over = 4 << 20, threading.Event()
        processors = os.sched_getaffinity(0)
        self.addCleanup(os.sched_setaffinity, 0, processors)
        values = [block(number, size) for number in range(2)]
        worker = tensorlane.Worker({"log": {"level": "error"}}, address="127.0.0.1:0")
        self.addCleanup(worker.close)
        blocks = kv.Blocks(worker, size, 0)

        def replace():
            os.sched_setaffinity(0, {max(processors)})
            while not is_over.is_set():
                for value in values:
                    one = blocks.reserve(size)  # always the same memory
                    one.view[size // 2:] = value[size // 2:]  # a reader is in front
                    one.view[:size // 2] = value[:size // 2]
                    blocks.add("k", one)
                    del one
                    time.sleep(0.001)

        thread = threading.Thread(target=replace)
        thread.start()
        os.sched_setaffinity(0, {min(processors)})
        try:
            into, count, seen, end = bytearray(size), 0, set(), time.monotonic() + PATIENCE
            while count < 1000 and time.monotonic() < end:
                if kv._tensorlane._index_read(blocks._index, blocks._memory, ["k"], [into]) == [True]:
                    count += 1
                    self.assertTrue(into in values)
                    seen.add(into[0])
        finally:
            is_over.set()
            thread.join()
        self.assertEqual((count, len(seen)), (1000, 2))

    def test_an_owner_in_the_place_of_another_one(self):
        """The memory of the former owner still has what it had."""
        self.set(0, 1)
        self.settle()
        self.assertEqual(self.get(["k0"]), [block(0)])
        self.end(self.owner)
        self.start(self.address)
        other = self.client()
        wait_until(lambda: other.set(["k0"], [block(9)]) == [True], "the owner is there")
        wait_until(lambda: self.cache._endpoint.info(self.cache._peer()).state == "up", "the client has found it")
        got = []
        wait_until(lambda: got.extend(self.get(["k0"])) or got[-1] is not None, "it is asked")
        self.assertTrue(got[-1] == block(9))

    def test_an_owner_in_the_place_of_another_one_while_its_memory_is_mapped(self):
        """A client does not use the memory of one with the index of the other."""
        self.set(0, 1)
        client = self.client()
        map_one = client._endpoint.map

        async def map_late(peer, key, timeout):
            if key == "kv/index":
                client._endpoint.map = map_one
                former = client._endpoint.info(peer).incarnation
                self.end(self.owner)
                await asyncio.get_running_loop().run_in_executor(None, self.start, self.address)
                with kv.Client(self.address) as other:
                    wait_until(lambda: other.set(["k0"], [block(9)]) == [True], "the owner is there")
                    wait_until(lambda: other.exists(["k0"]) == [True], "it is in the index")
                # A map that begins before the client has found the other owner fails.
                while client._endpoint.info(peer).state != "up" or client._endpoint.info(peer).incarnation == former:
                    await asyncio.sleep(0.01)
            return await map_one(peer, key, PATIENCE)

        # A client that sees the owner gone while the next one starts gives up: it has nothing to mix then.
        with (unittest.mock.patch.object(client._endpoint, "map", map_late),
              unittest.mock.patch.object(client._endpoint, "check")):
            self.assertIn(self.get(["k0"], client), [[None], [block(9)]])
        wait_until(lambda: self.get(["k0"], client) == [block(9)], "it is asked")

    def test_what_another_client_has_replaced(self):
        """When its set is over nothing finds the earlier block, although the owner has not been told to keep it yet."""
        other = self.client()
        self.set(0, 1)
        self.settle()
        self.assertEqual(self.get(["k0"], other), [block(0)])

        async def say_nothing(request, number, say=self.cache._say):
            if request["do"] != "keep":
                await say(request, number)

        with unittest.mock.patch.object(self.cache, "_say", say_nothing):
            self.assertEqual(self.cache.set(["k0"], [block(9)]), [True])
        index, memory = other._index, other._memory
        self.assertEqual(kv._tensorlane._index_read(index, memory, ["k0"], None), [False])

    def test_what_was_found_stays_until_it_is_got(self):
        count = (16 << 20) // BLOCK
        keys = [f"k{number}" for number in range(count)]
        self.assertTrue(all(self.set(0, count)))
        self.settle()
        other = self.client()
        for number in range(5):
            found = other.describe()["found"]
            self.assertEqual(self.cache.exists(keys[:4]), [True] * 4)
            wait_until(lambda found=found: other.describe()["found"] >= found + 4, "the owner knows it")
            self.assertEqual(other.set([f"more {number}"], [block(number)]), [True])
        self.assertEqual(self.get(keys[:4]), [block(number) for number in range(4)])

    def test_lists_that_do_not_fit(self):
        self.set(0, 2)
        self.settle()
        self.assertEqual(self.cache.exists([["k0"], "k1", 5]), [False, True, False])
        self.assertRaises(ValueError, self.cache.get, ["k0", "k1"], [bytearray(BLOCK)])
        self.assertRaises(ValueError, self.cache.get, ["k0"], [bytearray(BLOCK)] * 2)
        self.assertRaises(TypeError, self.cache.get, ["none"], [bytes(BLOCK)])
        self.assertRaisesRegex(ValueError, "2 keys and 1 blocks", self.cache.set, ["a", "b"], [block(1)])
        self.assertRaisesRegex(ValueError, "1 keys and 2 blocks", self.cache.set, ["a"], [block(1)] * 2)
        self.assertEqual(self.cache.exists(["a", "b"]), [False, False])

    def test_an_index_of_any_kind(self):
        """What the owner says is not believed."""
        add, remove, read = (getattr(kv._tensorlane, f"_index_{name}") for name in ("add", "remove", "read"))
        size, memory, into = 16 * kv.ENTRY_BYTES, b"abcd" * 25, bytearray(10)
        index = tensorlane.empty((size + 8,), "U8")
        index = memoryview(index)
        for stamp, (begin, length, is_found) in enumerate(
                ((0, 10, True), (90, 10, True), (91, 10, False), (1 << 63, 10, False), (2 ** 64 - 1, 10, False),
                 (0, 9, False), (0, 2 ** 64 - 1, False)), 1):
            with self.subTest(begin=begin, length=length):
                index[:] = bytes(size + 8)
                add(index, "a", begin, length, stamp)
                self.assertEqual(read(index, memory, ["a", "b", None, 5, "\ud800"], [into] * 5),
                                 [is_found] + [False] * 4)
                self.assertEqual(read(index, memory, ["a"], None), [True])
                if is_found:
                    self.assertEqual(into, memory[begin:begin + length])
                remove(index, "a", stamp + 1)
                self.assertEqual(read(index, memory, ["a"], None), [True])
                remove(index, "a", stamp)
                self.assertEqual(read(index, memory, ["a"], None), [False])
        for index in (b"", bytes(kv.ENTRY_BYTES), bytes(size), index[1:-7]):
            self.assertEqual(read(index, memory, ["a"], [into]), [False])
        index = bytearray(size)
        add(memoryview(index)[1:], "a", 0, 10, 1)
        self.assertEqual(index, bytes(size))
        for wrong in ((index, memory, ["a"], []), (index, memory, ["a"], 5), (index, memory, ("a",), None),
                      (index, memory, ["a"], [b"it cannot be written"]), (index, memory, ["a"], [5])):
            with self.assertRaises((TypeError, ValueError, BufferError)):
                read(*wrong)


class Limits(Owned):
    limit = "1MiB"

    def test_the_oldest_blocks_go(self):
        for first in range(0, 64, 8):
            self.assertEqual(self.set(first, 8), [True] * 8)
            described = self.cache.describe()
            self.assertLessEqual(described["used_bytes"], 1 << 20)
        self.assertEqual(self.cache.exists([f"k{number}" for number in range(64)]), [False] * 48 + [True] * 16)
        self.assertEqual(described["evicted"], 48)
        self.assertEqual(self.get(["k63", "k0"]), [block(63), None])

    def test_what_was_used_last_stays(self):
        for settle in (lambda: None, self.settle):
            self.set(0, 16)
            settle()
            self.assertEqual(self.get(["k0"]), [block(0)])
            self.set(16, 15)
            self.assertEqual(self.cache.exists(["k0", "k1", "k30"]), [True, False, True])

    def test_what_was_used_is_said_in_time(self):
        other = self.client()
        self.set(0, 1)
        self.settle()
        found = other.describe()["found"]
        self.assertEqual(self.get(["k0"]), [block(0)])
        self.assertEqual(self.cache.exists(["k0"]), [True])
        wait_until(lambda: other.describe()["found"] > found, "the owner knows it")

    def add(self, blocks, key, size=1000):
        block = blocks.reserve(size)
        self.assertIsNotNone(block)
        blocks.add(key, block)
        return block

    def has(self, blocks, keys, lease=None):
        return [block is not None for block in blocks.find(keys, lease)]

    def test_what_is_being_received_stays(self):
        blocks = kv.Blocks(self.worker(), 2000, 0)
        for key in "ab":
            self.add(blocks, key)
        self.assertEqual(self.has(blocks, ["a"], lease=1), [True])
        blocks.find(["b"])
        self.add(blocks, "c")  # in place of b, which was used later, but is not leased
        self.assertEqual(self.has(blocks, ["a", "b", "c"]), [True, False, True])
        self.assertEqual(self.has(blocks, ["a", "c"], lease=2), [True, True])
        self.assertIsNone(blocks.reserve(1000))
        blocks.release(1)
        self.assertIsNone(blocks.reserve(1000))
        blocks.release(2)
        self.assertIsNotNone(blocks.reserve(1000))

    def test_what_ends_while_it_is_being_received_stays_until_it_has_come(self):
        blocks = kv.Blocks(self.worker(), 2000, 0.001)
        first = self.add(blocks, "a")
        second = self.add(blocks, "b")
        self.assertEqual(self.has(blocks, ["a", "b"], lease=1), [True, True])
        self.assertTrue(blocks.remove("a"))
        time.sleep(0.002)
        blocks.end_old()
        self.assertEqual(self.has(blocks, ["a", "b"]), [False, False])
        self.assertFalse(blocks.remove("a"))
        self.assertEqual(blocks.used_bytes, 2000)
        self.assertIsNone(blocks.reserve(1000))
        self.assertEqual((first.view.nbytes, second.view.nbytes), (1000, 1000))
        blocks.release(1)
        self.assertEqual(blocks.used_bytes, 0)
        self.assertEqual(blocks.counts["expired"], 1)

    def test_what_is_replaced_while_it_is_being_received_stays_until_it_has_come(self):
        blocks = kv.Blocks(self.worker(), 3000, 0)
        first = self.add(blocks, "a")
        self.assertEqual(blocks.find(["a"], lease=1), [first])
        second = self.add(blocks, "a")
        self.assertEqual(blocks.find(["a"], lease=2), [second])
        self.assertEqual(blocks.used_bytes, 2000)
        blocks.release(1)
        self.assertEqual(blocks.used_bytes, 1000)
        blocks.release(2)
        self.assertEqual(blocks.find(["a"]), [second])

    def test_blocks_that_are_gone_leave_nothing_behind(self):
        blocks = kv.Blocks(self.worker(), 2000, 1000)
        for key in "aaabcd":  # a is replaced; a and b are evicted
            self.add(blocks, key)
        blocks.remove("c")
        self.assertEqual([key for _, key in blocks._ends.values()], ["d"])
        self.add(blocks, "e")
        self.assertEqual(self.has(blocks, "de"), [True, True])
        with unittest.mock.patch.object(time, "monotonic", lambda now=time.monotonic(): now + 1001):
            blocks.end_old()
        self.assertEqual((self.has(blocks, "de"), blocks.counts["expired"]), ([False, False], 2))

    def test_leases_end(self):
        blocks = kv.Blocks(self.worker(), 1000, 0)
        self.add(blocks, "a")
        blocks.find(["a"], lease=1)
        with unittest.mock.patch.object(time, "monotonic", lambda now=time.monotonic(): now + kv.LEASE_SEC + 1):
            blocks.end_old()
        self.assertIsNotNone(blocks.reserve(1000))

    def test_what_is_shown_is_shown_until_the_last_lease_of_it_ends(self):
        worker = self.worker()
        blocks = kv.Blocks(worker, 1000, 0)
        block, published = self.add(blocks, "a"), worker.counters()["published_tensors"]
        for lease in (1, 2):
            blocks.find(["a"], lease)
            blocks.show(lease, "shown", block, lease)
        for lease, count in ((1, 1), (2, 0)):
            blocks.release(lease)
            self.assertEqual(worker.counters()["published_tensors"] - published, count)

    def test_memory_is_not_used_again_while_a_slow_reader_has_it(self):
        owner = self.worker()
        blocks = kv.Blocks(owner, SLOW, 0)
        self.add(blocks, "k", SLOW).view[:] = block(1, SLOW)
        blocks.show(1, "shown", blocks.find(["k"], lease=1)[0], 0)
        reader = start_script(SLOW_READER.format(address=owner.address, size=SLOW), "")
        self.addCleanup(self.end, reader)
        self.addCleanup(reader.stderr.close)
        os.waitpid(reader.pid, os.WUNTRACED)
        blocks.release(1)
        # On a busy machine the reader may have come to its end before it was stopped.
        if another := blocks.reserve(SLOW):
            another.view[:] = block(2, SLOW)
        reader.send_signal(signal.SIGCONT)
        self.assertEqual(reader.stdout.readline(), "{1}\n")
        wait_until(lambda: another or blocks.reserve(SLOW), "it is given back")

    def test_memory_is_not_used_again_while_something_refers_to_it(self):
        blocks = kv.Blocks(self.worker(), 1000, 0)
        view = self.add(blocks, "a").view
        self.assertIsNone(blocks.reserve(1000))
        self.assertEqual((blocks.used_bytes, view.nbytes), (0, 1000))
        del view
        self.assertIsNotNone(blocks.reserve(1000))

    def test_parts_of_memory_are_joined(self):
        room, taken = kv.Room(1000), {}
        random.seed(1)
        for _ in range(5000):
            size = random.choice((0, 1, 7, 100, 250))
            begin = room.take(size)
            if begin is None or random.random() < 0.3:
                if begin is not None:
                    room.give_back(begin, size)
                for begin, size in [taken.popitem() for _ in range(len(taken) // 2)]:
                    room.give_back(begin, size)
            elif size:
                self.assertTrue(begin >= 0 and begin + size <= 1000)
                self.assertFalse(any(begin < other + length and other < begin + size
                                     for other, length in taken.items()))
                taken[begin] = size
        for begin, size in taken.items():
            room.give_back(begin, size)
        self.assertEqual((room.take(1001), room.take(1000), room.take(1)), (None, 0, None))

    def test_many_free_parts_of_different_sizes(self):
        """The one that fits best is found with few comparisons."""
        class Size(int):
            compared = 0

            def __lt__(self, other):
                Size.compared += 1
                return int(self) < int(other)

            def __gt__(self, other):
                Size.compared += 1
                return int(self) > int(other)

        count = 2000
        room = kv.Room(2 * count * count)
        sizes = [size for number in range(2, count) for size in (2 * number, 1)]
        for begin, size in [(room.take(size), size) for size in sizes][::2]:
            room.give_back(begin, size)
        self.assertEqual(room.take(Size(count - 1)), sum(range(4, count, 2)) + count // 2 - 2)
        self.assertLess(Size.compared, 50)

    def test_clients_do_not_evict_each_other(self):
        async def take_in():
            owner = kv.Owner("127.0.0.1:0", 1000, config={"log": {"level": "error"}})
            for number in range(kv.MAX_CLIENTS + 10):
                owner._take_in(json.dumps({"id": str(number), "address": f"127.0.0.1:{number + 1}",
                                           "incarnation": 0}).encode())
            clients = list(owner._clients.values())
            self.assertEqual(len(clients), kv.MAX_CLIENTS)
            numbers = {client.peer.number for client in clients}
            self.assertLessEqual(numbers, {peer.id for peer in owner.worker.peers()})
            owner._endpoint.peer("127.0.0.1:1000")
            self.assertLessEqual(numbers, {peer.id for peer in owner.worker.peers()})
            for client in clients:
                client.task.cancel()
            await asyncio.wait([client.task for client in clients])
            owner.worker.close()

        with self.assertLogs("tensorlane.kv", "WARNING"):
            asyncio.run(take_in())

    def test_many_clients_are_looked_at_together(self):
        """The worker lists its peers once in a second, however many clients there are."""
        async def serve():
            owner = kv.Owner("127.0.0.1:0", 1000, config={"log": {"level": "error"}})
            for number in range(20):
                owner._take_in(json.dumps({"id": str(number), "address": f"127.0.0.1:{number + 1}",
                                           "incarnation": 0}).encode())
            infos = owner.worker.peers()
            with unittest.mock.patch.object(tensorlane.Worker, "peers", return_value=infos) as peers:
                serving = asyncio.ensure_future(owner.run())
                while not peers.called:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0)
            self.assertEqual(peers.call_count, 1)
            serving.cancel()
            await asyncio.wait([serving, *(client.task for client in owner._clients.values())])
            owner.worker.close()

        asyncio.run(serve())

    def test_the_memory_of_a_client_that_has_gone(self):
        """The owner lets go of it without the collector of cycles."""
        async def serve():
            owner = kv.Owner("127.0.0.1:0", 1 << 20, config={"log": {"level": "error"}})
            serving = asyncio.ensure_future(owner.run())
            with kv.Client(owner.address, timeout=PATIENCE) as client:
                self.assertEqual(await asyncio.wrap_future(client.submit(client.set_async, ["a"], [b"a"])), [True])
            stage = weakref.ref(next(iter(owner._clients.values())).stage)
            next(iter(owner._clients.values())).task.cancel()  # as when the client cannot be reached for some time
            while stage() is not None:
                await asyncio.sleep(0.005)
            serving.cancel()
            await asyncio.wait([serving])
            owner.worker.close()

        gc.disable()
        self.addCleanup(gc.enable)
        asyncio.run(asyncio.wait_for(serve(), PATIENCE))

    def test_an_owner_without_memory_to_look_at_its_clients(self):
        """It goes on, and looks at them later."""
        async def serve():
            owner = kv.Owner("127.0.0.1:0", 1000, config={"log": {"level": "error"}})
            failures = [tensorlane.ResourceExhausted("no memory"), MemoryError()]
            with (unittest.mock.patch.object(tensorlane.Worker, "peers", side_effect=[*failures, []]) as peers,
                  self.assertLogs("tensorlane.kv", "WARNING") as said):
                serving = asyncio.ensure_future(owner.run())
                while peers.call_count < 3 and not serving.done():
                    await asyncio.sleep(0.01)
                self.assertFalse(serving.done())
            self.assertEqual(len(said.output), 2)
            serving.cancel()
            await asyncio.wait([serving])
            owner.worker.close()

        asyncio.run(serve())

    def worker(self):
        worker = tensorlane.Worker({"log": {"level": "error"}}, address="127.0.0.1:0")
        self.addCleanup(worker.close)
        return worker

    def test_what_was_received_is_said_after_a_call_that_fails(self):
        self.assertEqual(self.set(0, 1, 1 << 20), [True])
        self.cache._index = None  # so that the owner is asked
        self.assertEqual(self.cache.get(["k0"], [bytearray(1 << 20)]), [True])
        self.assertRaises(TypeError, self.cache.exists, [b"no text"])
        self.settle()
        self.assertEqual(self.client().set(["k1"], [block(1, 1 << 20)]), [True])

    def test_what_does_not_fit_is_refused(self):
        self.assertEqual(self.cache.set(["big", "small"], [block(1, 2 << 20), block(2)]), [False, True])
        self.assertEqual(self.cache.describe()["refused"], 1)

    def test_many_clients_stay_within_the_limit(self):
        got = []

        def use(number):
            client = self.client()
            for count in range(100):
                keys = [f"{number}-{count}-{place}" for place in range(4)]
                client.set(keys, [block(number)] * 4)
                got.append([one and one == block(number) for one in self.get(keys, client)])

        threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            self.assertLessEqual(self.cache.describe()["used_bytes"], 1 << 20)
        for thread in threads:
            thread.join()
        self.assertEqual(len(got), 600)
        self.assertFalse(any(False in one for one in got))
        self.assertTrue(any(True in one for one in got))
        self.assertGreater(self.cache.describe()["evicted"], 100)

    def test_memory_is_used_again(self):
        for _ in range(30):
            self.assertEqual(self.set(0, 8), [True] * 8)
        described = self.cache.describe()
        self.assertEqual((described["blocks"], described["used_bytes"]), (8, 8 * BLOCK))


class Times(Owned):
    ttl = 1

    def test_blocks_end(self):
        self.set(0, 4)
        wait_until(lambda: not any(self.cache.exists(["k0", "k1", "k2", "k3"])), "the blocks end")
        wait_until(lambda: self.cache.describe()["used_bytes"] == 0, "their memory is free")
        self.assertEqual(self.cache.describe()["expired"], 4)


class Failures(Owned):
    def test_an_owner_that_dies_and_comes_back(self):
        self.set(0, 4)
        self.end_owner()
        wait_until(lambda: self.get(["k0", "k1"]) == [None, None], "the link has ended")
        self.assertEqual(self.set(0, 2), [False, False])
        self.start(self.address)
        wait_until(lambda: all(self.set(0, 4)), "the owner is found again")
        self.assertEqual(self.get(["k3"]), [block(3)])

    def end_owner(self):
        self.owner.kill()
        self.owner.wait()

    def test_an_owner_that_does_not_answer(self):
        hasty = self.client(timeout=1)
        wait_until(lambda: hasty.set(["a"], [block(1)]) == [True], "the client has met the owner")
        self.owner.send_signal(signal.SIGSTOP)
        self.assertEqual(hasty.exists(["a", "none"]), [False, False])
        self.owner.send_signal(signal.SIGCONT)
        wait_until(lambda: hasty.exists(["a"]) == [True], "the owner is asked again")

    def test_what_is_copied_too_late_is_not_there(self):
        self.set(0, 1)
        self.assertEqual(self.get(["k0"]), [block(0)])
        self.cache._index = None
        with unittest.mock.patch.object(kv, "LEASE_SEC", 0), self.assertLogs("tensorlane.kv", "WARNING"):
            self.assertEqual(self.get(["k0"]), [None])

    def test_an_owner_that_is_not_there(self):
        self.end_owner()
        client = self.client(timeout=2)
        self.assertEqual(client.exists(["a"]), [False])

    def test_a_set_that_is_given_up_before_the_owner_receives_it(self):
        hasty = self.client(timeout=1)
        wait_until(lambda: hasty.set(["first"], [block(1)]) == [True], "the client has met the owner")
        self.owner.send_signal(signal.SIGSTOP)
        self.assertEqual(hasty.set(["a"], [block(2)]), [False])
        self.owner.send_signal(signal.SIGCONT)
        wait_until(lambda: hasty.set(["b"], [block(3)]) == [True], "the owner is asked again")
        self.assertEqual(self.get(["b"]), [block(3)])
        self.assertIn(self.get(["a"]), [[None], [block(2)]])

    def test_a_client_that_is_refused_once(self):
        self.set(0, 1)
        client = self.client()
        meet = client._meet

        async def be_refused():
            client._meet = meet
            raise tensorlane.PermissionDenied("not now")

        client._meet = be_refused
        self.assertEqual(client.exists(["k0"]), [False])
        self.assertEqual(client.exists(["k0"]), [False])  # it rests
        wait_until(lambda: client.exists(["k0"]) == [True], "it says hello again")

    def test_addresses_of_another_form(self):
        for address in ("localhost", "", ":4700", "localhost:", "localhost:port", "localhost:47 00", "::1:"):
            with self.subTest(address=address), self.assertRaisesRegex(ValueError, f"HOST:PORT, which '{address}'"):
                kv.Client(address).close()

    def test_a_name_that_is_none(self):
        for address in ("no-such-host.invalid:4700", "a..b:4700"):
            client = kv.Client(address)
            with self.assertLogs("tensorlane.kv", "WARNING"):
                self.assertEqual(client.exists(["a"]), [False])
            client.close()
            self.assertRaises(RuntimeError, client.exists, ["a"])

    def test_memory_of_calls_that_fail(self):
        """It is given back without the collector of cycles."""
        def fail(client, keys, into):
            try:
                self.assertEqual(client.get(keys, into), [False] * len(keys))
            except TypeError:  # assertRaises would clear the frames.
                pass

        def is_free(memory):
            try:
                memory.append(0)
            except BufferError:
                return False
            return True

        gc.disable()
        self.addCleanup(gc.enable)
        nowhere = kv.Client("no-such-host.invalid:4700")
        self.addCleanup(nowhere.close)
        for client, keys, *others in ((nowhere, ["a"]), (self.cache, ["a", "b"], b"read-only"),
                                      (self.cache, [b"no text"])):
            with self.subTest(keys=keys):
                memory = bytearray(10)
                fail(client, keys, [memory, *others])
                wait_until(lambda: is_free(memory), "nothing refers to the memory")
        memory, calls = bytearray(10), kv.LMCacheClient(self.address)
        self.addCleanup(calls.close)
        calls.submit_batch_get(["a", "b"], [memory, b"read-only"])
        wait_until(calls.drain_completions, "the call fails")
        wait_until(lambda: is_free(memory), "nothing refers to the memory")

    def test_a_client_that_dies_while_it_sets(self):
        script = f"""if True:
            import os, signal
            from tensorlane import kv
            client = kv.Client("{self.address}")
            client.set(["first"], [b"x" * 65536])
            print("ready", flush=True)
            while True:
                client.set([str(i) for i in range(64)], [b"y" * 65536] * 64)
        """
        other = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,
                                 env={**os.environ, "PYTHONPATH": str(PACKAGES)})
        self.addCleanup(self.end, other)
        self.assertEqual(other.stdout.readline(), "ready\n")
        wait_until(lambda: self.cache.describe()["stored"] > 100, "blocks are stored")
        other.kill()
        def is_given_back():
            now = self.cache.describe()
            return now["used_bytes"] == now["blocks"] * BLOCK
        wait_until(is_given_back, "what was under way is given back")
        self.assertEqual(self.get(["first"]), [b"x" * BLOCK])

    def test_an_owner_that_cannot_be_made_leaves_its_address(self):
        """Also while its error is kept."""
        address = f"127.0.0.1:{free_ports(1)[0]}"
        kept = None
        try:
            kv.Owner(address, 1 << 62, config={"log": {"level": "error"}})
        except tensorlane.ResourceExhausted as error:
            kept = error
        kv.Owner(address, 1000, config={"log": {"level": "error"}}).worker.close()
        self.assertIsNotNone(kept)

    def test_timeouts_that_are_none(self):
        wrong = (("5", TypeError), (True, TypeError), (None, TypeError), (-1, ValueError), (float("nan"), ValueError))
        for timeout, error in wrong:
            with self.subTest(timeout=timeout), self.assertRaises(error):
                self.client(timeout=timeout)

    @without_address_sanitizer
    def test_clients_made_in_a_forked_child(self):
        """They work where no worker was open before, and otherwise say what to do."""
        out = run_script("""
            import os, sys
            import tensorlane
            from tensorlane import kv

            def in_child(call):
                pid = os.fork()
                if pid == 0:
                    try:
                        call()
                    finally:
                        os._exit(0)
                os.waitpid(pid, 0)

            def use():
                with kv.Client("127.0.0.1:1", timeout=1) as client:
                    print(client.exists(["a"]), flush=True)

            def refuse():
                try:
                    kv.Client("127.0.0.1:1")
                except tensorlane.FailedPrecondition as error:
                    print(error, flush=True)

            in_child(use)
            with kv.Client("127.0.0.1:1", timeout=1) as client:
                client.exists(["a"])
            in_child(refuse)
            """, prologue="").splitlines()
        self.assertEqual(out[0], "[False]")
        self.assertRegex(out[1], "fork before the first worker or client is made, or start processes with the method")

    @without_address_sanitizer
    def test_fork(self):
        """Calls of the child raise an error, those under way too, and those of the parent go on."""
        self.assertEqual(self.set(0, 1), [True])
        may_end = threading.Event()
        self.addCleanup(may_end.set)

        async def wait():
            await asyncio.get_running_loop().run_in_executor(None, may_end.wait)
            return "done"

        under_way = self.cache.submit(wait)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                with self.cache:
                    for call in (lambda: self.set(1, 1), lambda: self.get(["k0"]), lambda: self.cache.exists(["k0"])):
                        with self.assertRaisesRegex(tensorlane.FailedPrecondition, "fork"):
                            call()
                    with self.assertRaisesRegex(tensorlane.FailedPrecondition, "fork"):
                        under_way.result(2)
                status = 7
            finally:
                os._exit(status)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 7)
        may_end.set()
        self.assertEqual(under_way.result(PATIENCE), "done")
        self.assertEqual(self.get(["k0"]), [block(0)])

    def test_a_call_that_is_given_up_before_its_client_has_failed_to_meet_the_owner(self):
        """The failure is no exception that nothing has retrieved."""
        out = run_script("""
            import asyncio, gc
            from tensorlane import kv
            said = []
            client = kv.Client("127.0.0.1:1")
            client._loop.set_exception_handler(lambda loop, context: said.append(context["message"]))

            async def meet():
                await asyncio.sleep(0.01)
                raise kv.Unavailable("there is no owner")

            async def main():
                client._meet = meet
                call = asyncio.ensure_future(client._known())
                await asyncio.sleep(0)
                call.cancel()
                await asyncio.wait([call, client._meeting])
                client._meeting = call = None
                gc.collect()

            client.submit(main).result()
            client.close()
            print(said)
            """, prologue="")
        self.assertEqual(out, "[]\n")

    def test_closing_ends_calls(self):
        client = self.client()
        self.owner.send_signal(signal.SIGSTOP)
        future = client.submit(client.exists_async, ["a"])
        client.close()
        with self.assertRaises(BaseException):
            future.result(PATIENCE)
        self.assertRaises(RuntimeError, client.exists, ["a"])
        self.owner.send_signal(signal.SIGCONT)

    def test_waiting_in_the_thread_of_the_client(self):
        """It would never end."""
        client = kv.Client(self.address)
        for call in (client.close, client.describe, lambda: client.set(["a"], [b"b"]), lambda: client.exists(["a"])):
            async def wait(call=call):
                with self.assertRaisesRegex(RuntimeError, "the thread of the client"):
                    call()
            client.submit(wait).result(PATIENCE)
        self.assertEqual(client.exists(["a"]), [False])
        client.close()

    def test_a_client_that_is_dropped(self):
        """It warns, and leaves neither a thread nor descriptors behind, also when its own thread collects it."""
        def count():
            gc.collect()  # of the warning, too, which refers to the client
            return len(os.listdir("/proc/self/fd"))

        self.set(0, 1)
        self.settle()
        before = count()
        for is_own in (False, True):
            with self.subTest(is_own=is_own), self.assertWarnsRegex(ResourceWarning, "cache at .* was not closed"):
                client = kv.Client(self.address)
                self.assertEqual(self.get(["k0"], client), [block(0)])
                thread, loop = client._thread, client._loop
                wait_until(lambda saying=client._saying: saying is None or saying.done(), "it says what it has found")
                gc.disable()
                try:
                    del client
                    if is_own:
                        loop.call_soon_threadsafe(gc.collect)
                    else:
                        gc.collect()
                finally:
                    gc.enable()
                thread.join(PATIENCE)
                self.assertTrue(loop.is_closed())
            wait_until(lambda: count() <= before, "the descriptors are closed")

    def test_the_interpreter_ends_with_a_client_open(self):
        out = run_script(f"""
            from tensorlane import kv
            client = kv.Client("{self.address}")
            print(client.set(["a"], [b"b"]))
            """, prologue="")
        self.assertEqual(out, "[True]\n")

    def test_closing_beside_calls(self):
        """Each call of another thread ends, with what it was for or because the client is closed."""
        self.set(0, 4)
        keys = [f"k{number}" for number in range(4)]
        for _ in range(5):
            client, begun, ends = self.client(), threading.Barrier(5, timeout=PATIENCE), []

            def call(client=client, begun=begun, ends=ends):
                self.assertEqual(client.exists(keys), [True] * 4)
                begun.wait()
                try:
                    while True:
                        self.assertEqual(self.get(keys, client), [block(number) for number in range(4)])
                        self.assertEqual(client.set([f"own {threading.get_ident()}"], [block(9)]), [True])
                except (RuntimeError, concurrent.futures.CancelledError) as error:
                    ends.append(error)

            threads = [threading.Thread(target=call) for _ in range(4)]
            for thread in threads:
                thread.start()
            begun.wait()
            client.close()
            for thread in threads:
                thread.join(PATIENCE)
            self.assertEqual(len(ends), 4)
        self.assertEqual(self.get(keys), [block(number) for number in range(4)])


class Stranger:
    """A client that says what the test wants."""

    def __init__(self, address):
        self.worker = tensorlane.Worker({"log": {"level": "error"}}, address="127.0.0.1:0")
        self.peer = self.worker.add_peer(address)
        self.number = 0

    def greet(self, hello=None, step=0):
        hello = hello or json.dumps({"id": "stranger", "address": self.worker.address,
                                     "incarnation": self.worker.incarnation}).encode()
        self.worker.put_wait(self.peer, "kv/hello", hello, step, may_go_back=True)

    def say(self, request):
        self.number += 1
        self.worker.send_wait("kv/request/stranger", request, self.number, timeout=30)

    def ask(self, request):
        self.say(request)
        return json.loads(bytes(self.worker.recv_wait(self.peer, "kv/reply/stranger", self.number, timeout=30)))


class Strangers(Owned):
    def setUp(self):
        super().setUp()
        self.stranger = Stranger(self.address)
        self.addCleanup(self.stranger.worker.close)

    def test_hellos_of_any_kind(self):
        for number, hello in enumerate([
                b"{", b"\xff", b"[]", b"5", b'{"id": "a"}', b'{"id": [], "address": "127.0.0.1:1", "incarnation": 0}',
                b'{"id": "a", "address": 5, "incarnation": 0}', b'{"id": "a", "address": "b", "incarnation": "c"}',
                b'{"id": "a", "address": "127.0.0.1:1", "incarnation": -1}',
                b'{"id": "%s", "address": "127.0.0.1:1", "incarnation": 0}' % (b"x" * 5000)]):
            with self.subTest(hello=hello[:80]):
                self.stranger.greet(hello)
                self.assertEqual(self.client(timeout=10).set(["a"], [block(number)]), [True])
        self.stranger.greet(step=1 << 63)
        self.assertEqual(self.get(["a"], self.client()), [block(number)])

    def test_values_without_bytes(self):
        """Strings and dead tensors, which programs in C can send."""
        class Strings:
            def __bytes__(self):
                raise BufferError("a tensor of STRING has no such buffer")

        owner = kv.Owner("127.0.0.1:0", 1 << 20)
        self.addCleanup(owner.worker.close)

        async def hellos(*_):
            yield Strings()

        with (unittest.mock.patch.object(tensorlane.Worker, "subscribe", hellos),
              self.assertLogs("tensorlane.kv", "WARNING"), self.assertRaises(TimeoutError)):
            asyncio.run(asyncio.wait_for(owner._hear(), 0.1))  # It goes on.
        self.assertEqual(kv._bytes_of(Strings()), b"")

    def test_requests_of_any_kind(self):
        self.stranger.greet()
        for keys, rest in (
                ("5", ""), ("{}", ""), ('[["a"]]', ""), ('["\\ud800"]', '"sizes": [1000]'), ("[5]", '"sizes": [1000]'),
                ('["a"]', ""), ('["a"]', '"sizes": [-1099511627776]'), ('["a"]', '"sizes": [NaN]'),
                ('["a"]', '"sizes": [true]'), ('["a"]', '"sizes": [1e3]'), ('["a"]', '"sizes": [1000, 1000]'),
                ('["a", "b"]', '"sizes": [1000]'), ('["a", "b"]', '"sizes": [1000, "x"]'),
                ('["a"]', '"sizes": [1180591620717411303424]'), ('["a"]', '"sizes": [1000], "done": [[]]'),
                ('["a"]', '"sizes": [1000], "slot": "x"')):
            text = f'{{"do": "set", "slot": 0, "keys": {keys}{", " if rest else ""}{rest}}}'
            with self.subTest(request=text):
                self.assertIn(self.stranger.ask(text.encode()), ([], [False], [False, False]))
                self.assertEqual(self.cache.describe()["used_bytes"], 0)
        self.stranger.worker.publish("kv/up/0/0", b"of another size", 1 << 40)
        self.assertEqual(self.stranger.ask(b'{"do": "set", "keys": ["a"], "sizes": [1000], "slot": 0}'), [False])
        self.assertEqual(self.cache.describe()["used_bytes"], 0)
        for text in (b"{", b"[]", b"\xff", b"{}"):
            self.assertEqual(self.stranger.ask(text), [])
        self.assertEqual(self.stranger.ask(b'{"do": "exists", "keys": ["a"]}'), [False])

    def test_what_is_not_confirmed_is_not_there(self):
        self.stranger.greet()

        def show():
            self.stranger.worker.publish("kv/up/0/0", block(5), self.stranger.number + 1)
            return self.stranger.ask(b'{"do": "set", "keys": ["a"], "sizes": [%d], "slot": 0}' % BLOCK)

        self.assertEqual(show(), [True])
        self.assertEqual(self.cache.exists(["a"]), [False])
        wait_until(lambda: self.cache.describe()["used_bytes"] == 0, "its memory is given back")
        self.assertEqual(show(), [True])
        self.stranger.say(b'{"do": "keep", "keys": [], "of": %d}' % self.stranger.number)
        wait_until(lambda: self.cache.exists(["a"]) == [True], "it is there")
        self.assertEqual(self.get(["a"]), [block(5)])

    def test_what_a_peer_removes(self):
        self.set(0, 4)
        self.assertEqual(self.stranger.worker.remove_wait(self.stranger.peer, "kv/page"), 1)
        self.assertEqual(self.stranger.worker.remove_wait(self.stranger.peer, "kv/memory"), 1)
        other = self.client()
        self.assertEqual(self.get(["k1", "none"], other), [block(1), None])  # it cannot map the memory
        self.stranger.worker.remove_wait(self.stranger.peer, "kv/down/*")
        self.assertEqual(self.get(["k2"], other), [block(2)])
        self.assertEqual(other.set(["k1"], [block(7)]), [True])
        # What one client has confirmed may come after what another one asks.
        wait_until(lambda: self.get(["k1", "k3"]) == [block(7), block(3)], "it is there")


class Unmapped:
    """The memory of the other process cannot be mapped."""

    def start(self, address):
        settings = tempfile.NamedTemporaryFile("w", suffix=".json")
        self.addCleanup(settings.close)
        json.dump({"local": {"map": "off"}}, settings)
        settings.flush()
        self.options = ["--settings", settings.name]
        super().start(address)


class WithoutMapping(Unmapped, Blocks):
    """Blocks are received."""

    def test_it_is_so(self):
        self.set(0, 1)
        self.assertIsNone(self.cache._memory)


class Interrupts(Owned):
    """Signals whose handlers raise an exception end calls, which use the caller's memory no more."""
    limit = "640MiB"  # what was given up stays for 10 s
    size = 34 << 20

    def setUp(self):
        super().setUp()
        self.addCleanup(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, self.interrupt))
        self.assertEqual(self.set(1, 1), [True])
        self.settle()
        self.cache._index = None  # so that the owner is asked

    def interrupt(self, *_):
        raise KeyboardInterrupt

    def end_by_signal(self, call, delay=0.3):
        """Returns whether the signal came before the call ended."""
        try:
            signal.setitimer(signal.ITIMER_REAL, delay)
            call()
            signal.setitimer(signal.ITIMER_REAL, 0)
            return False
        except KeyboardInterrupt:
            return True

    def end_in_submit(self, call):
        """The signal comes before the call knows its future."""
        def submit(coroutine, loop, submit=asyncio.run_coroutine_threadsafe):
            future = submit(coroutine, loop)
            if not raised:
                raised.append(True)
                raise KeyboardInterrupt
            return future

        raised = []
        with unittest.mock.patch.object(asyncio, "run_coroutine_threadsafe", submit):
            self.assertRaises(KeyboardInterrupt, call)
        return True

    def test_closing(self):
        """The thread ends, and calls say at once that the client is closed."""
        client = kv.Client(self.address)
        self.assertEqual(client.exists(["k1"]), [True])
        self.end_in_submit(client.close)
        client._thread.join(PATIENCE)
        self.assertFalse(client._thread.is_alive())
        self.assertRaisesRegex(RuntimeError, "closed", client.exists, ["k1"])
        client._endpoint.worker.close(0)

    def test_a_call_that_was_not_submitted_yet(self):
        """Python does not warn that nothing awaited it."""
        def submit(coroutine, loop, submit=asyncio.run_coroutine_threadsafe):
            if not raised:
                raised.append(True)
                raise KeyboardInterrupt
            return submit(coroutine, loop)

        raised = []
        with (warnings.catch_warnings(record=True) as said,
              unittest.mock.patch.object(asyncio, "run_coroutine_threadsafe", submit)):
            warnings.simplefilter("always")
            self.assertRaises(KeyboardInterrupt, self.cache.exists, ["k1"])
            gc.collect()
        self.assertEqual([str(one.message) for one in said], [])
        self.assertEqual(self.cache.exists(["k1"]), [True])

    def test_a_handler_that_uses_the_client(self):
        """The signal comes in the middle of a call of the same thread."""
        results = []

        def use(*_):
            results.append(self.cache.exists(["k1"]))

        def exists(keys):
            signal.raise_signal(signal.SIGALRM)
            return self.cache.exists_async(keys)

        signal.signal(signal.SIGALRM, use)
        self.assertEqual(self.cache.submit(exists, ["k1"]).result(PATIENCE), [True])
        self.assertEqual(results, [[True]])

    def test_a_set_is_not_kept(self):
        for number, end in enumerate((self.end_by_signal, self.end_in_submit)):
            with self.subTest(end=end.__name__):
                key, value = f"new {number}", bytearray(block(2))
                self.owner.send_signal(signal.SIGSTOP)
                try:
                    is_ended = end(lambda: self.cache.set([key, "k1"], [value, value]))
                finally:
                    value[:] = block(3)
                    self.owner.send_signal(signal.SIGCONT)
                self.assertTrue(is_ended)
                self.settle()
                self.assertTrue(self.get([key, "k1"], self.client()) == [None, block(1)])

    def test_a_get_writes_nothing_more(self):
        for end in self.end_by_signal, self.end_in_submit:
            with self.subTest(end=end.__name__):
                into = bytearray(BLOCK)
                self.owner.send_signal(signal.SIGSTOP)
                try:
                    self.assertTrue(end(lambda: self.cache.get(["k1"], [into])))
                finally:
                    self.owner.send_signal(signal.SIGCONT)
                self.assertTrue(self.get(["k1"]) == [block(1)])
                self.settle()
                self.assertTrue(into == bytes(BLOCK))

    def test_calls_that_end_at_any_time(self):
        other, is_ended = self.client(), []
        value, into = bytearray(self.size), bytearray(self.size)
        for number in range(12):
            value[:] = block(1, self.size)
            is_ended.append(self.end_by_signal(lambda: self.cache.set(["big"], [value]), 0.005 + number * 0.008))
            value[:] = block(2, self.size)
            self.settle()
            self.assertTrue(self.get(["big"], other, self.size) in ([None], [block(1, self.size)]))
            if not other.exists(["big"])[0]:
                self.assertEqual(other.set(["big"], [block(1, self.size)]), [True])
            into[:] = bytes(self.size)
            is_ended.append(self.end_by_signal(lambda: self.cache.get(["big"], [into]), 0.001 + number * 0.004))
            then = bytes(into)
            time.sleep(0.05)
            self.assertTrue(then == into)
            self.assertEqual(other.remove(["big"]), [True])
        self.assertIn(True, is_ended)


class InterruptsWithoutMapping(Unmapped, Interrupts):
    pass


@unittest.skipIf(SANITIZE, "sanitizers keep memory that was freed")
class Memory(Owned):
    limit = "1MiB"

    def test_many_operations_leave_the_owner_flat(self):
        def size():
            with open(f"/proc/{self.owner.pid}/statm", encoding="ascii") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        def use(count):
            for first in range(0, count, 50):
                keys = [f"k{number}" for number in range(first, first + 50)]
                self.assertTrue(all(self.cache.set(keys, [block(1, 1024)] * 50)))
                self.assertTrue(all(self.cache.get(keys, [bytearray(1024) for _ in keys])))
            return size()

        before = use(3000)
        self.assertLess(use(OPERATIONS) - before, 4 << 20)


class LMCacheCalls(Owned):
    """The calls that LMCache makes, with its own buffers in ctypes. The interop tests have LMCache itself."""

    def test_calls(self):
        client = kv.LMCacheClient(self.address)
        self.addCleanup(client.close)
        poller = select.poll()
        poller.register(client.event_fd(), select.POLLIN)

        def complete(number):
            self.assertTrue(poller.poll(PATIENCE * 1000))
            (done, is_well, error, results), = client.drain_completions()
            self.assertEqual((done, error), (number, ""))
            return is_well, results

        into = bytearray(BLOCK)
        self.assertEqual(complete(client.submit_batch_set(["a", "b"], [memoryview(block(1)), memoryview(block(2))])),
                         (True, [True, True]))
        self.assertEqual(complete(client.submit_batch_exists(["a", "c"])), (True, [True, False]))
        self.assertEqual(complete(client.submit_batch_get(["b", "c"], [memoryview(into), memoryview(bytearray(4))])),
                         (True, [True, False]))
        self.assertEqual(bytes(into), block(2))
        self.assertEqual(complete(client.submit_batch_delete(["a", "c"])), (True, [True, False]))
        self.assertEqual(client.drain_completions(), [])
        client.close()
        self.assertEqual(client.drain_completions(), [])

    @without_address_sanitizer
    def test_fork(self):
        """The child does not take the lock, which a thread of the parent may have at that moment."""
        client, may_end = kv.LMCacheClient(self.address), threading.Event()
        self.addCleanup(client.close)
        self.addCleanup(may_end.set)

        async def wait(keys):
            await asyncio.get_running_loop().run_in_executor(None, may_end.wait)
            return keys

        client._submit(wait, [True])
        with client._event_lock:
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    self.assertRaises(tensorlane.FailedPrecondition, client.drain_completions)
                    client.close()
                    status = 7
                finally:
                    os._exit(status)
        try:
            wait_until(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG), "the child ends")
        finally:
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
        self.assertEqual(os.waitstatus_to_exitcode(status), 7)
        self.assertEqual(client.drain_completions(), [])
        may_end.set()
        wait_until(client.drain_completions, "the call of the parent ends")

    def test_a_client_that_is_dropped(self):
        """Its descriptor is closed."""
        client = kv.LMCacheClient(self.address)
        event = client.event_fd()
        with self.assertWarns(ResourceWarning):
            del client
            gc.collect()
        self.assertRaises(OSError, os.fstat, event)


if __name__ == "__main__":
    unittest.main(verbosity=2)
