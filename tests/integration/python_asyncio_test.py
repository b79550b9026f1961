#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The awaitable calls of the Python package: event loops wait for the completion queue's descriptor."""
import asyncio
import gc
import select
import threading
import unittest
import weakref

import python_support
from python_support import WorkersCase, tensorlane, wait_until

import numpy


class Awaitables(WorkersCase):
    def run_async(self, coroutine):
        return asyncio.run(asyncio.wait_for(coroutine, python_support.PATIENCE))

    def open_operations(self):
        return self.asker.counters()["open_operations"]

    def test_recv(self):
        self.owner.publish("weights", numpy.arange(5, dtype=numpy.float64), step=7)

        async def main():
            threads = threading.active_count()
            got = await self.asker.recv(self.peer, "weights", step=7)
            into = numpy.zeros(5)
            again, *others = await asyncio.gather(
                self.asker.recv(self.peer, "weights", into=into, checksum=True),
                *(self.asker.recv(self.peer, "weights") for _ in range(200)))
            self.assertEqual(threads, threading.active_count())
            return got, into, again, others

        got, into, again, others = self.run_async(main())
        self.assertEqual((got.step, into.sum(), again.is_verified), (7, 10, True))
        self.assertEqual({float(numpy.asarray(other).sum()) for other in others}, {10.0})

    def test_errors(self):
        async def main():
            for error, call in ((tensorlane.DeadlineExceeded, lambda: self.asker.recv(self.peer, "none", timeout=0.01)),
                                (tensorlane.NotFound, lambda: self.asker.recv("/job:none/task:0", "key")),
                                (ValueError, lambda: self.asker.recv(self.peer, "")),
                                (TypeError, lambda: self.asker.send("key", object())),
                                (tensorlane.DeadlineExceeded, lambda: self.asker.send("key", b"", timeout=0.01))):
                with self.assertRaises(error) as caught:
                    await call()
            self.assertEqual(caught.exception.key, "key")

        self.run_async(main())
        self.assertEqual(self.open_operations(), 0)
        with self.assertRaises(RuntimeError):  # there is no loop
            self.asker.recv(self.peer, "key").send(None)

    def test_send(self):
        async def main():
            sent = asyncio.ensure_future(self.owner.send("one", b"shot", step=1))
            got = await self.asker.recv(self.peer, "one", step=1)
            return bytes(got), await sent

        self.assertEqual(self.run_async(main()), (b"shot", None))

    def test_recv_many(self):
        self.owner.publish("there", b"1")

        async def main():
            both = await self.asker.recv_many(self.peer, ["there", ("there", 0)])
            for timeout in python_support.TIMEOUTS:
                with self.assertRaises(tensorlane.DeadlineExceeded) as caught:
                    await self.asker.recv_many(self.peer, ["there", "absent"], timeout=timeout)
                if not isinstance(caught.exception.results[0], tensorlane.Error):
                    break
            return [bytes(one) for one in both], caught.exception.results

        both, (there, absent) = self.run_async(main())
        self.assertEqual((both, bytes(there), absent.key), ([b"1", b"1"], b"1", "absent"))

    def test_memory_of_calls_that_fail(self):
        """It is given back without the collector of cycles."""
        calls = {
            "recv": lambda memory: self.asker.recv(self.peer, "none", into=memory, timeout=0.01),
            "recv_many": lambda memory: self.asker.recv_many(self.peer, ["none"], into=[memory], timeout=0.01),
            "send": lambda memory: self.asker.send("none", memory, timeout=0.01),
            "put": lambda memory: self.asker.put(self.asker.add_peer("127.0.0.1:9"), "none", memory, timeout=0.01),
            "pull_state_dict": lambda memory: self.asker.pull_state_dict(self.peer, into={"a": memory}, timeout=0.01),
        }

        async def main(call):
            memory = numpy.zeros(5)
            gone = weakref.ref(memory)
            try:
                await call(memory)
            except tensorlane.Error:  # assertRaises would clear the frames.
                del memory
            await python_support.until_gone(gone, self.asker)

        gc.disable()
        self.addCleanup(gc.enable)
        for name, call in calls.items():
            with self.subTest(name):
                self.run_async(main(call))

    def test_cancel(self):
        async def main():
            tasks = [asyncio.ensure_future(call) for call in (
                self.asker.recv(self.peer, "none", timeout=600), self.asker.send("none", b"", timeout=600),
                self.asker.recv_many(self.peer, ["none"] * 3, timeout=600))]
            await asyncio.sleep(0)
            self.assertGreaterEqual(self.open_operations(), 3)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.assertTrue(all(task.cancelled() for task in tasks))
            with self.assertRaises(asyncio.TimeoutError):
                await asyncio.wait_for(self.asker.recv(self.peer, "none"), 0.01)

        self.run_async(main())
        wait_until(lambda: self.open_operations() == 0, "nothing is open")

    def test_close(self):
        """Both in the loop's thread and in another one it ends what is awaited."""
        async def main(close):
            tasks = [asyncio.ensure_future(self.asker.recv(self.peer, "none", timeout=600)) for _ in range(200)]
            tasks.append(asyncio.ensure_future(self.asker.recv_many(self.peer, ["none"] * 100, timeout=600)))
            await asyncio.sleep(0)
            await close()
            errors = await asyncio.gather(*tasks, return_exceptions=True)
            self.assertEqual({type(error) for error in errors}, {tensorlane.Cancelled})
            with self.assertRaises(tensorlane.FailedPrecondition):
                await self.asker.recv(self.peer, "none")

        async def close_here():
            self.asker.close()

        async def close_elsewhere():
            await asyncio.get_running_loop().run_in_executor(None, self.asker.close)

        async def leave():
            async with self.asker:
                pass

        async def close_twice():
            await asyncio.gather(close_elsewhere(), close_elsewhere(), close_here())

        for close in (close_here, close_elsewhere, leave, close_twice):
            with self.subTest(close.__name__):
                self.run_async(main(close))
            self.asker = self.open()
            self.peer = self.asker.add_peer(self.owner.address)

    def test_async_with(self):
        async def main():
            async with self.open() as worker:
                worker.publish("key", b"value")
                self.assertEqual(bytes(await worker.recv(worker.name, "key")), b"value")
            self.assertTrue(worker.closed)

        self.run_async(main())

    def test_several_loops(self):
        self.owner.publish("key", b"value")

        async def main():
            return bytes(await self.asker.recv(self.peer, "key"))

        async def leave_open():
            asyncio.ensure_future(self.asker.recv(self.peer, "none", timeout=600))
            await asyncio.sleep(0)

        for _ in range(20):
            self.assertEqual(self.run_async(main()), b"value")
            self.run_async(leave_open())
        results = []
        threads = [threading.Thread(target=lambda: results.extend(self.run_async(main()) for _ in range(20)))
                   for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(results, [b"value"] * 80)
        self.assertLessEqual(len(self.asker._inboxes), 5)
        wait_until(lambda: self.open_operations() == 0, "nothing is open")


class Subscriptions(WorkersCase):
    def run_async(self, coroutine):
        return asyncio.run(asyncio.wait_for(coroutine, python_support.PATIENCE))

    def test_published(self):
        async def main():
            steps = []
            self.owner.publish("weights", b"0", step=0)
            async for value in self.asker.subscribe(self.peer, "weights"):
                self.assertEqual(int(bytes(value)), value.step)
                steps.append(value.step)
                if value.step == 5:
                    break
                self.owner.publish("weights", str(value.step + 1).encode(), step=value.step + 1)
                del value
            return steps

        self.assertEqual(self.run_async(main()), list(range(6)))
        gc.collect()
        wait_until(lambda: self.asker.counters()["open_operations"] == 0, "the subscription that was left has ended")

    def test_sent_into(self):
        async def main():
            into = [numpy.zeros(4, numpy.int64) for _ in range(2)]
            sends = [asyncio.ensure_future(self.owner.send("rows", numpy.full(4, step), step)) for step in range(1, 9)]
            values = []
            async with self.asker.subscribe(self.peer, "rows", into=into) as subscription:
                async for value in subscription:
                    array = numpy.asarray(value)
                    self.assertTrue(any(numpy.shares_memory(array, one) for one in into))
                    values.append((value.step, int(array[0])))
                    del value, array
                    if len(values) == 8:
                        break
            await asyncio.gather(*sends)
            return values

        self.assertEqual(self.run_async(main()), [(step, step) for step in range(1, 9)])

    def test_a_value_that_does_not_fit(self):
        async def main():
            into = [numpy.zeros(4, numpy.int64)]
            async with self.asker.subscribe(self.peer, "weights", into=into) as subscription:
                self.owner.publish("weights", numpy.zeros(3), step=1)
                with self.assertRaises(tensorlane.FailedPrecondition):
                    await subscription.__anext__()
                self.owner.publish("weights", numpy.full(4, 2), step=2)
                value = await subscription.__anext__()
                self.assertEqual((value.step, into[0][0]), (2, 2))

        self.run_async(main())

    def test_a_value_of_step_0_that_does_not_fit(self):
        """It ends nothing: the next value comes, and the end of the subscription after it."""
        async def main():
            into = [numpy.zeros(4, numpy.int64)]
            async with self.asker.subscribe(self.peer, "weights", into=into) as subscription:
                self.owner.publish("weights", numpy.zeros(3), step=0)
                with self.assertRaises(tensorlane.FailedPrecondition):
                    await subscription.__anext__()
                self.owner.publish("weights", numpy.full(4, 1), step=1)
                self.assertEqual((await subscription.__anext__()).step, 1)
                self.owner.publish("others", numpy.zeros(3), step=0)
                other = self.asker.subscribe(self.peer, "others", into=into)
                queue = self.asker._inboxes[asyncio.get_running_loop()].queue
                self.assertTrue(select.select([queue], [], [], python_support.PATIENCE)[0])
                self.asker.remove_peer(self.peer)
                for error in (tensorlane.FailedPrecondition, tensorlane.Cancelled, StopAsyncIteration):
                    with self.assertRaises(error):
                        await other.__anext__()

        self.run_async(main())

    def test_two_tasks(self):
        """The second is refused while the first waits, and the first gets its value."""
        async def main():
            async with self.asker.subscribe(self.peer, "weights") as subscription:
                waiting = asyncio.ensure_future(subscription.__anext__())
                await asyncio.sleep(0)
                with self.assertRaisesRegex(RuntimeError, "another task"):
                    await subscription.__anext__()
                self.owner.publish("weights", b"1", step=1)
                self.assertEqual((await waiting).step, 1)
                with self.assertRaises(asyncio.TimeoutError):
                    await asyncio.wait_for(subscription.__anext__(), 0.01)
                self.owner.publish("weights", b"2", step=2)
                self.assertEqual((await subscription.__anext__()).step, 2)

        self.run_async(main())

    def test_end(self):
        async def main():
            subscription = self.asker.subscribe(self.peer, "weights")
            waiting = asyncio.ensure_future(subscription.__anext__())
            await asyncio.sleep(0)
            subscription.close()
            with self.assertRaises(StopAsyncIteration):
                await waiting
            other = self.asker.subscribe(self.peer, "weights")
            self.asker.remove_peer(self.peer)
            with self.assertRaises(tensorlane.Cancelled):
                await other.__anext__()
            with self.assertRaises(StopAsyncIteration):
                await other.__anext__()
            with self.assertRaises(ValueError):
                self.asker.subscribe(self.asker.name, "weights", count=0)

        self.run_async(main())
        wait_until(lambda: self.asker.counters()["open_operations"] == 0, "nothing is open")


if __name__ == "__main__":
    unittest.main(verbosity=2)
