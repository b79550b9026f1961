# SPDX-License-Identifier: Apache-2.0
"""Scenarios of tensors that are put at a peer, which fetches them over the transport."""
import random

import exchange

ROUNDS = 4
MANY = 100


class Puts(exchange.Pair):
    """From this worker to its peer."""
    def put(self, key, step, content, dims=None):
        tensor = self.here.make(content, dims)
        op = self.here.put(self.peer, key, tensor, step)
        return self.here.wait(1)[op]

    def check(self, key, step, content):
        """The peer itself has it, and gives it to this worker."""
        op = self.here.ask(self.peer, key, step)
        got = self.here.wait(1)[op]
        self.assertEqual(("OK", step, content), (got.status, got.step, got.tensor.bytes), got)

    def test_sizes(self):
        for step in range(ROUNDS):
            for size in (1, 100, 3000, 40000, 300000, 5 << 20):
                content = random.randbytes(size)
                done = self.put(f"put/{size}", step, content)
                self.assertEqual("OK", done.status, done)
                self.assertIn(done.path, self.paths)
                if size > 1 << 20:
                    self.assertEqual(self.paths[0], done.path, done)
                self.check(f"put/{size}", step, content)

    def test_nothing_in_it_and_strings(self):
        done = self.put("put/empty", 0, b"", (3, 0))
        self.assertEqual(("OK", "none"), (done.status, done.path))
        done = self.put("put/dead", 0, None)
        self.assertEqual(("OK", "none"), (done.status, done.path))
        strings = [random.randbytes(size) for size in (0, 1, 30, 5000)]
        done = self.put("put/words", 0, strings)
        self.assertEqual(("OK", "serialized"), (done.status, done.path))
        op = self.here.ask(self.peer, "put/words", 0)
        self.assertEqual(strings, self.here.wait(1)[op].tensor.strings())

    def test_many_at_once(self):
        contents = [random.randbytes(random.choice(self.transport.sizes)) for _ in range(MANY)]
        tensors = [self.here.make(content) for content in contents]
        asked = {self.here.put(self.peer, f"many/{number}", tensor, 1): number for number, tensor in enumerate(tensors)}
        for done in self.here.wait(MANY).values():
            self.assertEqual("OK", done.status, done)
            self.assertIn(done.path, self.paths)
        self.assertEqual(MANY, len(asked))
        for number, content in enumerate(contents):
            self.check(f"many/{number}", 1, content)

    def test_earlier_step(self):
        self.assertEqual("OK", self.put("back", 5, bytes(100000)).status)
        self.assertEqual("FAILED_PRECONDITION", self.put("back", 4, bytes(100000)).status)
        self.check("back", 5, bytes(100000))

    def test_cancelled(self):
        """What was there stays whole until the new one is."""
        contents = {0: random.randbytes(300000)}
        self.assertEqual("OK", self.put("given/up", 0, contents[0]).status)
        for step in range(1, ROUNDS * 5):
            contents[step] = random.randbytes(300000)
            op = self.here.put(self.peer, "given/up", self.here.make(contents[step]), step)
            self.here.cancel(op)
            self.assertIn(self.here.wait(1)[op].status, ("OK", "CANCELLED"))
            op = self.here.ask(self.peer, "given/up", 0)
            got = self.here.wait(1)[op]
            self.assertEqual(("OK", contents[got.step]), (got.status, got.tensor.bytes), got)
