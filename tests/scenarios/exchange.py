# SPDX-License-Identifier: Apache-2.0
"""Scenarios of workers that exchange tensors while none of them fails."""
import json
import math
import random
import tempfile
import threading
import unittest

import workers
from workers import Server, Tensor, Worker

PEER = "/job:ps/task:0"
UNDER_WAY = 200
STEPS = 60
BOTH_STEPS = 4
BOTH_COUNT = 100
ABORTED = 12
WAITING = 20


class Pull(unittest.TestCase):
    """Published files, as the command line pulls them: the shape of VGG16, verified."""
    transport = None

    def test_checkpoint(self):
        config = self.transport.cluster({}, rdma="require")
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = workers.make_checkpoint(f"{folder}/vgg16.safetensors")
            with Server(config, "ps", publish=[checkpoint]):
                pulled = workers.pull(config, PEER, f"{folder}/copy.safetensors", "--verify-against", checkpoint)
            self.assertTrue(pulled["complete"], pulled)
            self.assertEqual((32, 32, 32, 0), (sum(pulled["paths"].values()), pulled["verified"], pulled["compared"],
                                               pulled["failed"]))
            self.assertEqual(self.transport.checkpoint_paths.keys(), pulled["paths"].keys())
            for path, counts in self.transport.checkpoint_paths.items():
                self.assertIn(pulled["paths"][path], counts)


class Pair(unittest.TestCase):
    """Two workers of this process, each with a thread of its own."""
    transport = None
    is_driven = False
    settings = {}

    @classmethod
    def setUpClass(cls):
        config = cls.transport.cluster(cls.settings, rdma="require", timeouts={"drain": "5s", "connect": "60s"})
        cls.here = Worker(config, "worker", is_driven=cls.is_driven)
        cls.there = Worker(config, "ps", is_driven=cls.is_driven)
        cls.peer = cls.here.peer(PEER)

    @classmethod
    def tearDownClass(cls):
        cls.here.__exit__()
        cls.there.__exit__()

    def exchange(self, key, step, tensor):
        """Sends and receives a tensor in either order; returns what arrived."""
        send, ask = lambda: self.there.send(key, tensor, step), lambda: self.here.ask(self.peer, key, step)
        first, second = (send, ask) if random.random() < 0.5 else (ask, send)
        first()
        second()
        got, = self.here.wait(1).values()
        sent, = self.there.wait(1).values()
        self.assertEqual(("OK", "OK"), (sent.status, got.status), (sent, got))
        return got


class Exchange(Pair):
    """All kinds of tensors, in any order."""
    receive_count = 10000

    def test_receives_in_random_order(self):
        order = [(number, kind) for number in range(self.receive_count) for kind in "sr"]
        for begin in range(0, len(order), 2 * UNDER_WAY):
            part = order[begin:begin + 2 * UNDER_WAY]
            random.shuffle(part)
            order[begin:begin + 2 * UNDER_WAY] = part
        paths = set()
        for begin in range(0, len(order), 2 * UNDER_WAY):
            asked = {}
            for number, kind in order[begin:begin + 2 * UNDER_WAY]:
                key = f"small/{number % 500}"
                content = b"%05d" % number * (1 + number % 500 % 9)
                if kind == "s":
                    self.there.send(key, Tensor(content), number)
                else:
                    asked[self.here.ask(self.peer, key, number)] = content
            for op, got in self.here.wait(len(asked)).items():
                self.assertEqual(("OK", asked[op]), (got.status, got.tensor and got.tensor.bytes), got)
                paths.add(got.path)
            self.assertEqual({"OK"}, {sent.status for sent in self.there.wait(len(asked)).values()})
        self.assertLessEqual(paths, set(self.transport.paths))

    def test_meta_data_changes_every_step(self):
        for step in range(STEPS):
            dims = tuple(random.randrange(1, 9) for _ in range(random.randrange(1, 6)))
            content = random.randbytes(math.prod(dims))
            got = self.exchange("shape", step, Tensor(content, dims))
            self.assertEqual((dims, content), (got.tensor.dims, got.tensor.bytes))
            self.assertIn(got.path, self.transport.paths)

    def test_dead_every_other_step(self):
        for step in range(STEPS):
            is_dead = step % 2 == 0
            got = self.exchange("maybe", step, Tensor(None if is_dead else b"alive%d" % step))
            self.assertEqual(is_dead, got.tensor.is_dead)
            self.assertIn(got.path, ("none",) if is_dead else self.transport.paths)
            if not is_dead:
                self.assertEqual(b"alive%d" % step, got.tensor.bytes)

    def test_nothing_in_it(self):
        got = self.exchange("empty", 0, Tensor(b"", (3, 0)))
        self.assertEqual(((3, 0), "none"), (got.tensor.dims, got.path))

    def test_strings(self):
        for step in range(STEPS):
            strings = [random.randbytes(random.choice((0, 1, 30, 5000))) for _ in range(random.randrange(1, 40))]
            got = self.exchange("words", step, Tensor(strings))
            self.assertEqual((strings, "serialized"), (got.tensor.strings(), got.path))

    def test_both_ask_each_other(self):
        """Both ask for everything at once, large and small tensors."""
        back = self.there.peer("/job:worker/task:0")
        for step in range(BOTH_STEPS):
            contents = [random.randbytes(random.choice(self.transport.sizes)) for _ in range(BOTH_COUNT)]
            asked = []
            for asker, peer, sender in ((self.here, self.peer, self.there), (self.there, back, self.here)):
                asked.append({asker.ask(peer, f"both/{number}", step): number for number in range(BOTH_COUNT)})
                for number, content in enumerate(contents):
                    sender.send(f"both/{number}", Tensor(content), step)
            for worker, mine in zip((self.here, self.there), asked):
                found = worker.wait(2 * BOTH_COUNT)
                self.assertEqual({"OK"}, {done.status for done in found.values()})
                for op, number in mine.items():
                    self.assertEqual(contents[number], found[op].tensor.bytes)
                    self.assertIn(found[op].path, self.transport.paths)

    def test_into_memory_of_the_user(self):
        for step, size in enumerate((1, 5000, 70001, 5 << 20)):
            content = random.randbytes(size)
            destination = Tensor(bytes(size))
            op = self.here.ask(self.peer, "mine", step, destination)
            self.there.send("mine", Tensor(content), step)
            got = self.here.wait(1)[op]
            self.assertEqual("OK", self.there.wait(1).popitem()[1].status)
            self.assertEqual(("OK", destination.address), (got.status, got.tensor.address), got)
            self.assertEqual(content, destination.bytes)
            self.assertIn(got.path, self.transport.paths)

    def test_step_is_aborted(self):
        """The owner aborts a step, then the receiver does: waiting receives end with the reason, and the step can be
        used again."""
        for worker in (self.there, self.here):
            asked = {self.here.ask(self.peer, f"never/{number}", ABORTED) for number in range(WAITING)}
            self.exchange("before", 0, Tensor(b"these come later"))
            worker.abort_step(ABORTED, "DATA_LOSS", "the loss is not a number")
            found = self.here.wait(WAITING)
            self.assertEqual(asked, found.keys())
            for done in found.values():
                self.assertEqual("DATA_LOSS", done.status, done)
                self.assertIn("the loss is not a number", done.message)
            self.assertEqual(0, worker.end_step(ABORTED))
            self.assertEqual(b"again", self.exchange("never/0", ABORTED, Tensor(b"again")).tensor.bytes)


class DrivenExchange(Exchange):
    """The same two workers without threads of their own: each wait advances them, and so does a thread of this test, so
    that they hear each other at all times."""
    is_driven = True
    receive_count = 2000

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.is_over = threading.Event()
        cls.movers = [threading.Thread(target=cls.move, args=(worker,)) for worker in (cls.here, cls.there)]
        for mover in cls.movers:
            mover.start()

    @classmethod
    def move(cls, worker):
        while not cls.is_over.is_set():
            worker.progress(0.1)

    @classmethod
    def tearDownClass(cls):
        cls.is_over.set()
        for mover in cls.movers:
            mover.join()
        super().tearDownClass()


class NarrowExchange(Exchange):
    """With few slots and little memory, and a kernel that does not let memory of other processes be read."""
    receive_count = 2000
    settings = {"slots": 16, "pool": "1MiB", "max_pool": "40MiB", "process_vm": "off"}


class Cycles(unittest.TestCase):
    """Workers start, receive and end; the devices and both processes hold as much as before."""
    transport = None

    def test_nothing_leaks(self):
        config = self.transport.cluster({}, rdma="require", timeouts={"drain": "5s"}, log={"level": "error"})
        with tempfile.TemporaryDirectory() as folder:
            content = random.randbytes(100000)
            file = workers.write_checkpoint(f"{folder}/x.safetensors", {"large": content, "small": content[:100]})
            with Server(config, "ps") as server:
                workers.push(config, PEER, file)
                before = None
                for number in range(self.transport.cycle_count + 2):
                    with Worker(config, "worker", is_driven=number % 2) as here:
                        peer = here.peer(PEER)
                        for name, size in (("large", 100000), ("small", 100)):
                            got = here.receive(peer, name)
                            self.assertEqual(("OK", content[:size]), (got.status, got.tensor.bytes), got)
                            self.assertIn(got.path, self.transport.paths)
                            got = None
                    if number == 1:
                        before = self.settled(server)
                workers.wait_until(lambda: self.held(server) == before, lambda: f"both hold what they held, {before},"
                                   f" but {json.dumps(self.held(server))}")

    def held(self, server):
        return {"devices": self.transport.held_by_devices(), "here": self.transport.held("self"),
                "there": self.transport.held(server.process.pid)}

    def settled(self, server):
        """Returns what is held when it has not changed for a second."""
        found = []
        workers.wait_until(lambda: found.append(self.held(server)) or (len(found) > 1 and found[-1] == found[-2]),
                           "it settles", pause_sec=1)
        return found[-1]
