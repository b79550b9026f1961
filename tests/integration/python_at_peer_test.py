#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The other direction from Python: put, list, stat and remove at a peer."""
import asyncio
import gc
import pathlib
import tempfile
import unittest
import weakref

import python_support
from python_support import WorkersCase, tensorlane

import numpy


class AtPeer(WorkersCase):
    def test_put(self):
        values = numpy.arange(6.0).reshape(2, 3)
        put = self.asker.put_wait(self.peer, "values", values, step=4)
        self.assertEqual(put.nbytes, values.nbytes)
        self.assertNotIn(put.path, ("none", ""))
        self.assertIsInstance(put.path_reason, str)
        self.assertGreater(put.duration, 0)
        values[:] = 0  # the peer has a copy of its own
        self.assertEqual(self.owner.recv_wait(self.owner.name, "values").step, 4)
        numpy.testing.assert_array_equal(numpy.asarray(self.asker.recv_wait(self.peer, "values")).ravel(), range(6))
        with self.assertRaises(tensorlane.FailedPrecondition) as caught:
            self.asker.put_wait(self.peer, "values", b"old", step=3)
        self.assertEqual((caught.exception.key, caught.exception.peer), ("values", self.peer))
        self.asker.put_wait(self.peer, "values", b"old", step=3, may_go_back=True)
        self.assertEqual(bytes(self.asker.recv_wait(self.peer, "values")), b"old")

    def test_put_holds_memory_until_its_end(self):
        memory = numpy.zeros(100_000)
        held = weakref.ref(memory)
        self.asker.put_wait(self.peer, "values", memory)
        del memory
        python_support.wait_until(lambda: self.asker.counters() and held() is None, "the memory is given back")

    def test_list_and_stat(self):
        for step, key in enumerate(("b/2", "a/1", "b/1")):
            self.owner.publish(key, numpy.zeros((2, 3), numpy.int16), step=step)
        listed = self.asker.list_wait(self.peer)
        self.assertEqual([one.key for one in listed], ["a/1", "b/1", "b/2"])
        self.assertEqual([one.key for one in self.asker.list_wait(self.peer, "b/*")], ["b/1", "b/2"])
        self.assertEqual(self.asker.list_wait(self.peer, "none"), [])
        one = self.asker.stat_wait(self.peer, "b/1")
        self.assertEqual(one, tensorlane.ListedTensor("b/1", 2, "I16", (2, 3), 12, {}, False))
        self.assertEqual(one, listed[1])
        with self.assertRaises(tensorlane.NotFound) as caught:
            self.asker.stat_wait(self.peer, "none")
        self.assertEqual(caught.exception.key, "none")

    def test_annotations(self):
        header = b'{"__metadata__":{"format":"pt"},"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "model.safetensors")
            path.write_bytes(len(header).to_bytes(8, "little") + header + b"1")
            owner = self.open(publish=[str(path)])
            one, = self.asker.list_wait(self.asker.add_peer(owner.address))
            self.assertEqual(one.annotations, {"format": "pt"})

    def test_remove(self):
        for key in ("a", "b", "c"):
            self.owner.publish(key, b"")
        self.assertEqual(self.asker.remove_wait(self.peer, "[ab]"), 2)
        self.assertEqual(self.asker.remove_wait(self.peer, "[ab]"), 0)
        self.assertEqual([one.key for one in self.asker.list_wait(self.peer)], ["c"])
        for pattern in ("", 7, "\0"):
            with self.subTest(pattern), self.assertRaises((ValueError, TypeError)):
                self.asker.remove_wait(self.peer, pattern)

    def test_awaitable(self):
        async def main():
            self.assertEqual((await self.asker.put(self.peer, "a", b"1", step=1)).nbytes, 1)
            listed = await self.asker.list(self.peer)
            one = await self.asker.stat(self.peer, "a")
            with self.assertRaises(tensorlane.NotFound):
                await self.asker.stat(self.peer, "none")
            return listed, one, await self.asker.remove(self.peer, "*")

        listed, one, count = asyncio.run(asyncio.wait_for(main(), python_support.PATIENCE))
        self.assertEqual((listed, one.step, count), ([one], 1, 1))

    def test_what_nothing_waits_for(self):
        """Results that come after their task was cancelled are dropped."""
        self.owner.publish("a", b"")

        async def main():
            tasks = [asyncio.ensure_future(self.asker.list(self.peer)) for _ in range(20)]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return await self.asker.list(self.peer)

        self.assertEqual(len(asyncio.run(asyncio.wait_for(main(), python_support.PATIENCE))), 1)
        gc.collect()
        python_support.wait_until(lambda: self.asker.counters()["open_operations"] == 0, "nothing is open")

    def test_errors(self):
        nowhere = self.asker.add_peer("127.0.0.1:9")
        for call in (lambda: self.asker.put_wait(nowhere, "a", b"", timeout=0.01),
                     lambda: self.asker.list_wait(nowhere, timeout=0.01),
                     lambda: self.asker.stat_wait(nowhere, "a", timeout=0.01),
                     lambda: self.asker.remove_wait(nowhere, "*", timeout=0.01)):
            with self.assertRaises(tensorlane.DeadlineExceeded) as caught:
                call()
            self.assertEqual(caught.exception.peer, nowhere)
        with self.assertRaises(TypeError):
            self.asker.put_wait(self.peer, "a", object())
        with self.assertRaises(tensorlane.InvalidArgument):
            self.asker.put_wait(self.peer, "", b"")
        with self.assertRaises(tensorlane.NotFound):
            self.asker.list_wait(12345)


if __name__ == "__main__":
    unittest.main(verbosity=2)
