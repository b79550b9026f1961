#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Signals whose handlers raise an exception at any moment, as that of Ctrl-C does."""
import asyncio
import itertools
import sys
import unittest

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
        self.owner.publish("a", b"a")

    def run_once(self):
        self.loop.run_until_complete(asyncio.sleep(0))

    def wait_for_operations(self, count):
        wait_until(lambda: self.asker.counters()["open_operations"] == count, f"{count} operations are open")

    def test_results_that_are_handed_over(self):
        """All futures and subscriptions get what has arrived, once."""
        async def receive():
            return bytes(await self.asker.recv(self.peer, "a"))

        async def read(subscription):
            return [(await subscription.__anext__()).step for _ in range(2)]

        async def subscribe():
            return self.asker.subscribe(self.peer, "steps")

        for place in itertools.count():
            self.owner.publish("steps", b"", step=2 * place)
            subscription = self.loop.run_until_complete(subscribe())
            tasks = [self.loop.create_task(call) for call in (receive(), read(subscription), receive())]
            self.run_once()
            self.wait_for_operations(1)
            with Interrupt(place, "drain", "hand_over", "take_from", "wake") as interrupt:
                try:
                    self.loop.run_until_complete(asyncio.wait(tasks[:1], timeout=python_support.PATIENCE))
                except KeyboardInterrupt:
                    pass
            self.owner.publish("steps", b"", step=2 * place + 1)
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=python_support.PATIENCE))
            self.assertTrue(all(task.done() for task in tasks), f"a result was lost at instruction {place}")
            self.assertEqual([task.result() for task in tasks], [b"a", [2 * place, 2 * place + 1], b"a"])
            subscription.close()
            self.wait_for_operations(0)
            if not interrupt.is_done:
                break
        self.assertGreater(place, 50)


if __name__ == "__main__":
    unittest.main(verbosity=2)
