#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Signals whose handlers raise an exception at any moment, as that of Ctrl-C does."""
import asyncio
import gc
import itertools
import sys
import unittest
import warnings

import python_support
from python_support import WorkersCase, tensorlane, wait_until


class Interrupt:
    """Raises KeyboardInterrupt before an instruction of some functions of the package, which is counted from 0, as a
    handler of a signal may."""

    def __init__(self, place, *names):
        self.left = place
        self.names = names
        self.is_done = False

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def trace(self, frame, event, _):
        if frame.f_code.co_filename != tensorlane.__file__ or frame.f_code.co_name not in self.names:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not self.is_done:
            self.is_done = self.left == 0
            self.left -= 1
            if self.is_done:
                raise KeyboardInterrupt
        return self.trace


class Interrupts(WorkersCase):
    def setUp(self):
        super().setUp()
        self.loop = asyncio.new_event_loop()
        self.addCleanup(self.loop.close)
        self.nowhere = self.asker.add_peer("127.0.0.1:9")

    def run_once(self):
        self.loop.run_until_complete(asyncio.sleep(0))

    def wait_for_operations(self, count, what=""):
        wait_until(lambda: self.asker.counters()["open_operations"] == count, f"{what}: {count} operations are open")

    def test_results_that_are_handed_over(self):
        """All futures and subscriptions get what has arrived, once."""
        async def receive(step):
            return (await self.asker.recv(self.peer, "steps", step)).step

        async def read(subscription):
            return (await subscription.__anext__()).step

        async def subscribe(step):
            return self.asker.subscribe(self.peer, "steps", step)

        def wait(tasks):
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=python_support.PATIENCE))

        for place in itertools.count():
            step = 2 * place + 1
            subscription = self.loop.run_until_complete(subscribe(step))
            tasks = [self.loop.create_task(call) for call in (receive(step), read(subscription), receive(step))]
            self.run_once()
            self.owner.publish("steps", b"", step)
            self.wait_for_operations(1)
            with Interrupt(place, "drain", "hand_over", "take_from", "wake") as interrupt:
                try:
                    wait(tasks)
                except KeyboardInterrupt:
                    pass
            wait(tasks)
            self.assertTrue(all(task.done() for task in tasks), f"a result was lost at instruction {place}")
            self.owner.publish("steps", b"", step + 1)
            tasks.append(self.loop.create_task(read(subscription)))
            wait(tasks)
            self.assertEqual([task.result() for task in tasks], [step, step, step, step + 1])
            subscription.close()
            self.wait_for_operations(0)
            if not interrupt.is_done:
                break
        self.assertGreater(place, 30)

    def test_operations_that_begin(self):
        """What a call has begun ends with it."""
        calls = {
            "recv": lambda: self.asker.recv(self.peer, "none", timeout=600),
            "recv_many": lambda: self.asker.recv_many(self.peer, ["none"], timeout=600),
            "send": lambda: self.asker.send("none", b"", timeout=600),
            "put": lambda: self.asker.put(self.nowhere, "none", b"", timeout=600),
            "list": lambda: self.asker.list(self.nowhere, timeout=600),
            "stat": lambda: self.asker.stat(self.nowhere, "none", timeout=600),
            "remove": lambda: self.asker.remove(self.nowhere, "none", timeout=600),
            "pull_state_dict": lambda: self.asker.pull_state_dict(self.peer, timeout=600),
            "subscribe": self.subscribe,
        }
        warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that nothing awaits after an interrupt
        for name, call in calls.items():
            for place in itertools.count():
                with Interrupt(place, name, "_request", "__init__") as interrupt:
                    task = self.loop.create_task(call())
                    try:
                        self.run_once()
                    except KeyboardInterrupt:
                        pass
                if not interrupt.is_done:
                    break
                self.loop.run_until_complete(asyncio.wait([task], timeout=python_support.PATIENCE))
                self.assertIsInstance(task.exception(), KeyboardInterrupt)
                del task
                gc.collect()
                self.wait_for_operations(0, f"{name} at instruction {place}")
            self.assertGreater(place, 10, name)
            task.cancel()
            self.run_once()
            del task
            gc.collect()
            self.wait_for_operations(0, name)

    async def subscribe(self):
        return self.asker.subscribe(self.peer, "none")


if __name__ == "__main__":
    unittest.main(verbosity=2)
