# SPDX-License-Identifier: Apache-2.0
"""Scenarios of receives that wait: those whose values do not exist yet keep no others from arriving."""
import exchange

ABSENT = 5000
BYTES = 1000
OTHERS = 50
AT_ONCE = 100
FIRST_STEP = 1000


class Waiting(exchange.Pair):
    """Thousands of values that do not exist are asked for first, of which many have known meta-data and would fill the
    small pool."""
    settings = {"pool": "1MiB", "max_pool": "1MiB"}

    @staticmethod
    def content(number):
        return b"%05d" % number * (BYTES // 5)

    def send(self, key, number, step):
        self.there.send(key, self.there.make(self.content(number)), step)

    def assert_arrives(self, got, number):
        self.assertEqual("OK", got.status, got)
        self.assertEqual(self.content(number), got.tensor.bytes)
        self.assertIn(got.path, self.paths)

    def ask_in_vain(self):
        """Asks for values that do not exist, and returns key, step and number of each by operation."""
        for key in ("absent/0", "absent/1"):
            self.exchange(key, 0, self.there.make(self.content(0)))
        asked = {}
        for number in range(ABSENT):
            key = f"absent/{number % 2}" if number % 4 else f"unknown/{number}"
            asked[self.here.ask(self.peer, key, FIRST_STEP + number)] = (key, FIRST_STEP + number, number)
        return asked

    def assert_others_arrive(self):
        """Published values, values that are sent later, and the other way round."""
        for number in range(OTHERS):
            self.there.publish(f"published/{number}", self.there.make(self.content(number)), 1)
            self.assert_arrives(self.here.receive(self.peer, f"published/{number}"), number)
        asked = {self.here.ask(self.peer, f"later/{number}", 1): number for number in range(OTHERS)}
        for number in range(OTHERS):
            self.send(f"later/{number}", number, 1)
        for op, got in self.here.wait(OTHERS).items():
            self.assert_arrives(got, asked[op])
        self.there.wait(OTHERS)
        self.here.send("back", self.here.make(self.content(7)), 1)
        got = self.there.receive(self.there.peer("/job:worker/task:0"), "back", 1)
        self.assertEqual(("OK", self.content(7)), (got.status, got.tensor.bytes), got)
        self.here.wait(1)

    def assert_producer_passes(self):
        """A value that its owner makes when the receiver has got another one, which is asked for later."""
        first = self.here.ask(self.peer, "made from", 1)
        second = self.here.ask(self.peer, "needed", 1)
        self.send("needed", 1, 1)
        found = self.here.wait(1)
        self.assertEqual([second], list(found))
        self.assert_arrives(found[second], 1)
        self.there.wait(1)
        self.send("made from", 2, 1)
        self.assert_arrives(self.here.wait(1)[first], 2)
        self.there.wait(1)

    def test_what_exists_arrives(self):
        asked = self.ask_in_vain()
        self.assert_others_arrive()
        self.assert_producer_passes()
        sent = list(asked.values())
        for begin in range(0, ABSENT, AT_ONCE):  # whose memory is given back before the next ones come
            for key, step, number in sent[begin:begin + AT_ONCE]:
                self.send(key, number, step)
            for op, got in self.here.wait(AT_ONCE).items():
                self.assertEqual("OK", got.status, got)
                self.assertEqual(self.content(asked[op][2]), got.tensor.bytes)
            self.assertEqual({"OK"}, {done.status for done in self.there.wait(AT_ONCE).values()})


class WaitingPrefer(Waiting):
    rdma = "prefer"
