# SPDX-License-Identifier: Apache-2.0
"""Scenarios of subscriptions of sent values: either side restarts, steps are aborted, shapes change, and two subscribe
to one key. Each value arrives once."""
import contextlib
import unittest

import exchange
import workers
from workers import Worker

KEY = "flow"
VALUES = 12
# A small one, one that is written at once, and one that is written in pieces.
SIZES = (9, 40000, 3000007)


class Subscriptions(unittest.TestCase):
    transport = None

    def setUp(self):
        self.config = self.transport.cluster({}, rdma="prefer", timeouts={"drain": "1s", "connect": "2s"})
        self.stack = contextlib.ExitStack()
        self.addCleanup(self.stack.close)

    @staticmethod
    def content(step):
        return b"%09d" % step * (SIZES[step % len(SIZES)] // 9)

    def open(self, job):
        return self.stack.enter_context(Worker(self.config, job))

    def send(self, there, *steps):
        for step in steps:
            there.send(KEY, workers.Tensor(self.content(step)), step)

    def expect(self, here, op, step):
        got = here.next()
        self.assertEqual(("OK", step, op), (got.status, got.step, got.op), got)
        self.assertEqual(self.content(step), got.tensor.bytes)

    def expect_sent(self, there, count):
        self.assertEqual({"OK"}, {sent.status for sent in there.wait(count).values()})

    def test_shapes_that_change(self):
        """The buffers are those of the library, which fit each value."""
        here, there = self.open("worker"), self.open("ps")
        op = here.subscribe(here.peer(exchange.PEER), KEY, count=1)
        for step in range(VALUES):
            self.send(there, step)
            self.expect(here, op, step)
        self.expect_sent(there, VALUES)

    def test_aborted_steps(self):
        """A value of a step that was aborted at its owner does not come; one whose step was aborted at the receiver is
        an error."""
        here, there = self.open("worker"), self.open("ps")
        self.send(there, 1, 2)
        there.abort_step(1, "DATA_LOSS", "bad there")
        self.assertEqual("DATA_LOSS", there.wait(1).popitem()[1].status)
        op = here.subscribe(here.peer(exchange.PEER), KEY, count=1)
        self.expect(here, op, 2)
        here.abort_step(3, "DATA_LOSS", "bad here")
        self.send(there, 3, 4)
        got = here.next()
        self.assertEqual(("DATA_LOSS", "bad here", 3), (got.status, got.message, got.step), got)
        got = None
        self.expect(here, op, 4)
        here.end_step(3)
        self.send(there, 5)
        self.expect(here, op, 5)

    def test_two_subscribers_of_one_key(self):
        """Each value goes to one of them."""
        here, there = self.open("worker"), self.open("ps")
        peer = here.peer(exchange.PEER)
        ops = {here.subscribe(peer, KEY, count=2) for _ in range(2)}
        self.send(there, *range(VALUES))
        found = {}
        for _ in range(VALUES):
            got = here.next()
            self.assertEqual("OK", got.status, got)
            self.assertEqual(self.content(got.step), got.tensor.bytes)
            found.setdefault(got.op, []).append(got.step)
            got = None
        self.assertLessEqual(found.keys(), ops)
        self.assertEqual(list(range(VALUES)), sorted(step for steps in found.values() for step in steps))
        self.expect_sent(there, VALUES)

    def test_owner_restarts(self):
        """The subscription goes on at the new process."""
        here = self.open("worker")
        op = here.subscribe(here.peer(exchange.PEER), KEY, count=1)
        for first in (1, 4):
            with Worker(self.config, "ps") as there:
                for step in range(first, first + 3):
                    self.send(there, step)
                    self.expect(here, op, step)
                self.expect_sent(there, 3)

    def test_receiver_restarts(self):
        """What the former process has not had is there for the next one."""
        there = self.open("ps")
        with Worker(self.config, "worker") as here:
            op = here.subscribe(here.peer(exchange.PEER), KEY, count=1)
            self.send(there, 1)
            self.expect(here, op, 1)
            self.expect_sent(there, 1)
            self.assertTrue(here.cancel(op))
            self.assertEqual("CANCELLED", here.next().status)
        self.send(there, 2, 3)
        here = self.open("worker")
        op = here.subscribe(here.peer(exchange.PEER), KEY, count=1)
        for step in (2, 3):
            self.expect(here, op, step)
        self.expect_sent(there, 2)
