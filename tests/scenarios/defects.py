# SPDX-License-Identifier: Apache-2.0
"""Scenarios for those of the defects V1 to V18 (tests/defects/run) that two workers which keep the protocol can show
over any transport; the others need two engines over the fake provider, or a peer that lies."""
import random
import re

import exchange

MIB = 1 << 20
STEPS = 20
GPU_STEPS = 10
OPEN_STEPS = 12
WRAPS = 3000
UNDER_WAY = 100
# The first step of the exchanges in between; aborted steps stay aborted.
FIRST_BEFORE = 10000


def resident_bytes():
    """Returns the memory of this process, and of its GPUs, which belongs to the double."""
    with open("/proc/self/status", encoding="ascii") as status:
        return int(re.search(r"VmRSS:\s+(\d+) kB", status.read())[1]) * 1024


class Case(exchange.Pair):
    def assert_keeps_nothing(self, give):
        """Calls give(step), which exchanges about a MiB; afterwards neither worker holds it."""
        steps = GPU_STEPS if self.owner.kind or self.receiver.kind else STEPS
        for step in range(steps):
            give(step)
        before, held = resident_bytes(), self.transport.held_by_devices()
        for step in range(steps, 2 * steps):
            give(step)
        self.assertLess(resident_bytes() - before, steps * MIB // 2)
        self.assertEqual(held, self.transport.held_by_devices())


class Defects(Case):
    def abort(self, step, status, message):
        """The owner aborts the step after the requests for it have reached it."""
        self.exchange("before", FIRST_BEFORE + step, self.there.make(b"these come later"))
        self.there.abort_step(step, status, message)

    def test_v04_aborted_step(self):
        """Neither process ends, and the receiver gets the status with which the step was aborted, whatever it is."""
        for step, status in enumerate(("CANCELLED", "UNAVAILABLE", "OUT_OF_RANGE", "INTERNAL"), 100):
            op = self.here.ask(self.peer, "aborted", step)
            self.abort(step, status, "as the test says")
            done = self.here.wait(1)[op]
            self.assertEqual(status, done.status, done)
            self.assertIn("as the test says", done.message)
        self.exchange("after", 0, self.there.make(b"both live"))

    def test_long_words(self):
        """Keys and statuses of the greatest length."""
        for key in ("k" * 512, "\u00e4" * 256, "k"):
            self.assertEqual(b"found", self.exchange(key, 1, self.there.make(b"found")).tensor.bytes)
        op = self.here.ask(self.peer, "k" * 512, 200)
        self.abort(200, "DATA_LOSS", "m" * 1023)
        done = self.here.wait(1)[op]
        self.assertEqual("DATA_LOSS", done.status)
        self.assertIn("m" * 900, done.message)

    def test_v07_shapes_of_any_rank_and_dimension(self):
        for step, dims in enumerate(((), (1,) * 16, (1, 2) * 8, (70000,), (3, 70000), (2, 1, 70000, 1), (1 << 33, 0),
                                     (0, 1 << 62, 1), (1 << 17, 1, 1, 1, 1, 1, 1))):
            size = 1
            for dim in dims:
                size *= dim
            content = random.randbytes(size)
            for repeat in range(2):
                got = self.exchange("shape", 2 * step + repeat, self.there.make(content, dims))
                self.assertEqual((dims, content), (got.tensor.dims, got.tensor.bytes))

    def test_v10_other_sizes_and_refusals_leave_nothing_behind(self):
        def give(step):
            op = self.here.ask(self.peer, "size", 300 + step)
            if step % 2:
                self.there.send("size", self.there.make(bytes(MIB + 4096 * step)), 300 + step)
                self.there.wait(1)
            else:
                self.abort(300 + step, "DATA_LOSS", "as the test says")
            self.assertEqual("OK" if step % 2 else "DATA_LOSS", self.here.wait(1)[op].status)
        self.assert_keeps_nothing(give)

    def test_v11_steps_do_not_share_meta_data(self):
        """Requests of many steps are open on one key, and all their values differ."""
        self.exchange("steps", 1000, self.there.make(b"what is expected"))
        values = [None if step % 4 == 3 else random.randbytes(1 + step * 5000) for step in range(OPEN_STEPS)]
        asked = {self.here.ask(self.peer, "steps", step): step for step in range(OPEN_STEPS)}
        self.exchange("before", 2 * FIRST_BEFORE, self.there.make(b"these come later"))
        for step in random.sample(range(OPEN_STEPS), OPEN_STEPS):
            self.there.send("steps", self.there.make(values[step]), step)
        for op, got in self.here.wait(OPEN_STEPS).items():
            value = values[asked[op]]
            self.assertEqual(("OK", value is None), (got.status, got.tensor.is_dead), got)
            if value is not None:
                self.assertEqual(value, got.tensor.bytes)
        self.there.wait(OPEN_STEPS)

    def test_v14_open_requests_keep_their_name(self):
        """A request stays open while so many others come and go that every index is used several times."""
        late = self.here.ask(self.peer, "late", 1)
        for begin in range(3 * FIRST_BEFORE, 3 * FIRST_BEFORE + self.times(WRAPS), UNDER_WAY):
            asked = {self.here.ask(self.peer, "soon", number): b"%d" % number
                     for number in range(begin, begin + UNDER_WAY)}
            for number in range(begin, begin + UNDER_WAY):
                self.there.send("soon", self.there.make(b"%d" % number), number)
            for op, got in self.here.wait(UNDER_WAY).items():
                self.assertEqual(("OK", asked[op]), (got.status, got.tensor.bytes), got)
            self.there.wait(UNDER_WAY)
        self.there.send("late", self.there.make(b"the one that waited"), 1)
        self.assertEqual(b"the one that waited", self.here.wait(1)[late].tensor.bytes)
        self.there.wait(1)


class DefectsOfStrings(Case):
    """Small strings are copied on their way where memory must be registered."""
    def test_v09_strings_leave_nothing_behind(self):
        def give(step):
            for number in range(5):
                self.exchange("words", 4 * FIRST_BEFORE + 5 * step + number,
                              self.there.make([b"w" * (200000 - step), b"x"]))
        self.assert_keeps_nothing(give)
