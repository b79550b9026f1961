# SPDX-License-Identifier: Apache-2.0
"""Scenarios of groups: some members are dead, absent or aborted, and the others arrive."""
import unittest

import exchange
import workers
from workers import Worker

COUNT = 600
ABSENT = 50
STEP, BAD_STEP = 1, 2
DEAD_EVERY = 10
TIMEOUT_SEC = 3


class Groups(exchange.Pair):
    """Sent and published values, small and large ones."""
    @staticmethod
    def content(number, what=0):
        return b"%05d%05d" % (number, what) * (1 + number % 7 * 300)

    def is_dead(self, number):
        return number % DEAD_EVERY == 0

    def value(self, owner, number, what=0):
        return owner.make(None if self.is_dead(number) else self.content(number, what))

    def check(self, number, got, what=0):
        self.assertEqual("OK", got.status, got)
        self.assertEqual(self.is_dead(number), got.tensor.is_dead)
        if not self.is_dead(number):
            self.assertEqual(self.content(number, what), got.tensor.bytes)
            self.assertIn(got.path, self.paths)

    def take_group(self, group, count):
        """The completions of members by place, and that of the group, which is the last."""
        found = self.here.wait(count + 1)
        end = found.pop(group)
        self.assertEqual(set(range(group + 1, group + 1 + count)), set(found))
        return {op - group - 1: done for op, done in found.items()}, end

    def test_sent_absent_and_aborted(self):
        """A third of the values is there before the receivers, a third comes later; some never come, and some belong
        to a step that is aborted."""
        numbers = range(COUNT)
        for number in numbers[::3]:
            self.there.send(f"group/{number}", self.value(self.there, number), STEP)
        items = [(f"group/{number}", STEP) for number in numbers]
        items += [(f"bad/{number}", BAD_STEP) for number in range(ABSENT)]
        items += [(f"never/{number}", STEP) for number in range(ABSENT)]
        group = self.here.ask_many(self.peer, items, min_count=COUNT)
        for number in numbers[1::3]:
            self.there.send(f"group/{number}", self.value(self.there, number), STEP)
        self.there.abort_step(BAD_STEP, "DATA_LOSS", "the loss is not a number")
        for number in numbers[2::3]:
            self.there.publish(f"group/{number}", self.value(self.there, number), STEP)
        found, end = self.take_group(group, len(items))
        for number in numbers:
            self.check(number, found[number])
        for place in range(COUNT, COUNT + ABSENT):
            self.assertIn(found[place].status, ("DATA_LOSS", "CANCELLED"), found[place])
        for place in range(COUNT + ABSENT, len(items)):
            self.assertEqual("CANCELLED", found[place].status, found[place])
        self.assertEqual(("OK", COUNT, len(numbers[::DEAD_EVERY]), 2 * ABSENT),
                         (end.status, end.ok_count, end.dead_count, end.failed_count), end)
        sent = self.there.wait(len(numbers[::3]) + len(numbers[1::3]))
        self.assertEqual({"OK"}, {done.status for done in sent.values()})
        self.there.end_step(BAD_STEP)

    def test_time_of_the_group(self):
        """What has come counts when the time is up, and the rest goes on."""
        for number in range(10):
            self.there.publish(f"soon/{number}", self.value(self.there, number), STEP)
        items = [(f"soon/{number}", STEP) for number in range(20)]
        group = self.here.ask_many(self.peer, items, group_timeout_sec=TIMEOUT_SEC, leaves_rest=True)
        found = {}
        while group not in found:
            done = self.here.next()
            found[done.op] = done
        end = found.pop(group)
        self.assertEqual(("DEADLINE_EXCEEDED", len(found), 0), (end.status, end.ok_count, end.failed_count), end)
        for number in range(10, 20):
            self.there.publish(f"soon/{number}", self.value(self.there, number), STEP)
        found |= self.here.wait(20 - len(found))
        for number in range(20):
            self.check(number, found[group + 1 + number])


class GroupsRestart(unittest.TestCase):
    """The owner of a group's values restarts midway: what had not come is asked of the new one."""
    transport = None

    def test_owner_restarts(self):
        config = self.transport.cluster({}, rdma="prefer", timeouts={"drain": "1s", "connect": "2s"})
        content = {number: b"%06d" % number * (1 + number % 5 * 400) for number in range(COUNT)}
        with Worker(config, "worker") as here:
            peer = here.peer(exchange.PEER)
            group = here.ask_many(peer, [(f"key/{number}", STEP) for number in content])
            found = {}
            for part in (range(COUNT // 3), range(COUNT // 3, COUNT)):
                with Worker(config, "ps") as there:
                    for number in part:
                        there.publish(f"key/{number}", workers.Tensor(content[number]), STEP)
                    found |= here.wait(len(part) + (part[-1] == COUNT - 1))
            end = found.pop(group)
            self.assertEqual(("OK", COUNT, 0), (end.status, end.ok_count, end.failed_count), end)
            for number, value in content.items():
                done = found[group + 1 + number]
                self.assertEqual(("OK", value), (done.status, done.tensor and done.tensor.bytes), done)
