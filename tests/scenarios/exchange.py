# SPDX-License-Identifier: Apache-2.0
"""Scenarios of workers that exchange tensors while none of them fails."""
import itertools
import json
import math
import random
import tempfile
import threading
import unittest

import devices
import workers
from devices import HOST
from workers import Server, Tensor, Worker

PEER = "/job:ps/task:0"
UNDER_WAY = 200
STEPS = 60
BOTH_STEPS = 4
BOTH_COUNT = 100
ABORTED = 12
WAITING = 20
LARGE_BYTES = 1 << 20


class Pull(unittest.TestCase):
    """Published files, as the command line pulls them: the shape of VGG16, verified."""
    transport = None
    owner = receiver = HOST

    def test_checkpoint(self):
        config = self.transport.cluster({}, rdma="require", jobs={"ps": {"device": str(self.owner)}})
        with tempfile.TemporaryDirectory() as folder:
            # Between devices, which come in three ways, a smaller one: a processor may be emulated.
            divisor = 8 if self.owner.kind or self.receiver.kind else 4
            checkpoint = workers.make_checkpoint(f"{folder}/vgg16.safetensors", divisor)
            with Server(config, "ps", publish=[checkpoint]):
                pulled = workers.pull(config, PEER, f"{folder}/copy.safetensors", "--verify-against", checkpoint,
                                      *devices.flags(self.receiver))
            self.assertTrue(pulled["complete"], pulled)
            self.assertEqual((32, 32, 32, 0), (sum(pulled["paths"].values()), pulled["verified"], pulled["compared"],
                                               pulled["failed"]))
            if self.owner.kind or self.receiver.kind:
                self.assertLessEqual(pulled["paths"].keys(),
                                     set(self.transport.paths_between(self.owner, self.receiver)))
                return
            self.assertEqual(self.transport.checkpoint_paths.keys(), pulled["paths"].keys())
            for path, counts in self.transport.checkpoint_paths.items():
                self.assertIn(pulled["paths"][path], counts)


class Pair(unittest.TestCase):
    """Two workers of this process, each with a thread of its own, and with its tensors on a device."""
    transport = None
    owner = receiver = HOST
    is_driven = False
    settings = {}
    rdma = "require"

    @classmethod
    def setUpClass(cls):
        config = cls.transport.cluster(cls.settings, rdma=cls.rdma, timeouts={"drain": "5s", "connect": "60s"})
        cls.here = Worker(config, "worker", is_driven=cls.is_driven, device=cls.receiver)
        cls.there = Worker(config, "ps", is_driven=cls.is_driven, device=cls.owner)
        cls.peer = cls.here.peer(PEER)
        cls.paths = cls.transport.paths_between(cls.owner, cls.receiver)

    @classmethod
    def tearDownClass(cls):
        cls.here.__exit__()
        cls.there.__exit__()
        devices.assert_free()

    @classmethod
    def times(cls, count):
        """Returns how often to do what takes long with tensors on the GPUs of the double."""
        return max(1, count // cls.transport.gpu_divisor) if cls.owner.kind or cls.receiver.kind else count

    def exchange(self, key, step, tensor, is_verified=True):
        """Sends and receives a tensor in either order; returns what arrived."""
        def send():
            self.there.send(key, tensor, step)

        def ask():
            self.here.ask(self.peer, key, step, is_verified=is_verified)
        first, second = (send, ask) if random.random() < 0.5 else (ask, send)
        first()
        second()
        got, = self.here.wait(1).values()
        sent, = self.there.wait(1).values()
        self.assertEqual(("OK", "OK"), (sent.status, got.status), (sent, got))
        if got.path not in ("none", "serialized"):
            self.assertEqual(str(self.receiver), str(got.tensor.device))
        return got


class Exchange(Pair):
    """All kinds of tensors, in any order."""
    receive_count = 10000

    def test_receives_in_random_order(self):
        order = [(number, kind) for number in range(self.times(self.receive_count)) for kind in "sr"]
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
                    self.there.send(key, self.there.make(content), number)
                else:
                    asked[self.here.ask(self.peer, key, number)] = content
            for op, got in self.here.wait(len(asked)).items():
                self.assertEqual(("OK", asked[op]), (got.status, got.tensor and got.tensor.bytes), got)
                self.assertEqual(str(self.receiver), str(got.tensor.device))
                paths.add(got.path)
            self.assertEqual({"OK"}, {sent.status for sent in self.there.wait(len(asked)).values()})
        self.assertLessEqual(paths, set(self.paths))

    def test_meta_data_changes_every_step(self):
        for step in range(STEPS):
            dims = tuple(random.randrange(1, 9) for _ in range(random.randrange(1, 6)))
            content = random.randbytes(math.prod(dims))
            got = self.exchange("shape", step, self.there.make(content, dims))
            self.assertEqual((dims, content), (got.tensor.dims, got.tensor.bytes))
            self.assertIn(got.path, self.paths)

    def test_dead_every_other_step(self):
        for step in range(STEPS):
            is_dead = step % 2 == 0
            got = self.exchange("maybe", step, self.there.make(None if is_dead else b"alive%d" % step))
            self.assertEqual(is_dead, got.tensor.is_dead)
            self.assertIn(got.path, ("none",) if is_dead else self.paths)
            if not is_dead:
                self.assertEqual(b"alive%d" % step, got.tensor.bytes)

    def test_nothing_in_it(self):
        got = self.exchange("empty", 0, self.there.make(b"", (3, 0)))
        self.assertEqual(((3, 0), "none"), (got.tensor.dims, got.path))

    def test_strings(self):
        for step in range(STEPS):
            strings = [random.randbytes(random.choice((0, 1, 30, 5000))) for _ in range(random.randrange(1, 40))]
            got = self.exchange("words", step, self.there.make(strings))
            self.assertEqual((strings, "serialized"), (got.tensor.strings(), got.path))

    def test_both_ask_each_other(self):
        """Both ask for everything at once, large and small tensors."""
        back = self.there.peer("/job:worker/task:0")
        back_paths = self.transport.paths_between(self.receiver, self.owner)
        for step in range(self.times(BOTH_STEPS)):
            contents = [random.randbytes(random.choice(self.transport.sizes)) for _ in range(BOTH_COUNT)]
            asked = []
            for asker, peer, sender in ((self.here, self.peer, self.there), (self.there, back, self.here)):
                asked.append({asker.ask(peer, f"both/{number}", step): number for number in range(BOTH_COUNT)})
                for number, content in enumerate(contents):
                    sender.send(f"both/{number}", sender.make(content), step)
            for (worker, paths), mine in zip(((self.here, self.paths), (self.there, back_paths)), asked):
                found = worker.wait(2 * BOTH_COUNT)
                self.assertEqual({"OK"}, {done.status for done in found.values()})
                for op, number in mine.items():
                    self.assertEqual(contents[number], found[op].tensor.bytes)
                    self.assertIn(found[op].path, paths)

    def test_fastest_path(self):
        """Large tensors take it when it is known, which for a GPU is not at once."""
        found, steps = [], itertools.count()

        def is_fastest():
            content = random.randbytes(LARGE_BYTES)
            got = self.exchange("large", next(steps), self.there.make(content), is_verified=False)
            self.assertEqual(content, got.tensor.bytes)
            found.append(got.path)
            return found[-1] == self.paths[0]
        workers.wait_until(is_fastest, lambda: f"{self.paths[0]}, but {found}")
        self.assertLessEqual(set(found), set(self.paths))

    def test_into_memory_of_the_user(self):
        for step, size in enumerate((1, 5000, 70001, 5 << 20)):
            content = random.randbytes(size)
            destination = self.here.make(bytes(size))
            op = self.here.ask(self.peer, "mine", step, destination)
            self.there.send("mine", self.there.make(content), step)
            got = self.here.wait(1)[op]
            self.assertEqual("OK", self.there.wait(1).popitem()[1].status)
            self.assertEqual(("OK", destination.address), (got.status, got.tensor.address), got)
            self.assertEqual(content, destination.bytes)
            self.assertIn(got.path, self.paths)

    def test_subscription(self):
        """Each sent value comes once and in order, then the newest published one, without being asked for."""
        paths = self.transport.paths_between(self.owner, HOST)
        op = self.here.subscribe(self.peer, "flow", from_step=1, count=3)
        for step in range(STEPS):
            self.there.send("flow", self.there.make(b"%05d" % step * 1000), step)
        for step in range(1, STEPS):
            got = self.here.next()
            self.assertEqual(("OK", step, op), (got.status, got.step, got.op), got)
            self.assertEqual(b"%05d" % step * 1000, got.tensor.bytes)
            self.assertTrue(got.is_verified)
            self.assertIn(got.path, paths)
            got = None
        self.assertEqual({"OK"}, {sent.status for sent in self.there.wait(STEPS - 1).values()})
        for version in range(STEPS, STEPS + 10):
            self.there.publish("flow", self.there.make(b"%05d" % version * 1000), version)
            got = self.here.next()
            self.assertEqual(("OK", version), (got.status, got.step), got)
            self.assertEqual(b"%05d" % version * 1000, got.tensor.bytes)
            got = None
        self.assertTrue(self.here.cancel(op))
        self.assertEqual(("CANCELLED", op), (lambda last: (last.status, last.op))(self.here.next()))
        self.assertEqual(1, self.there.end_step(0))
        self.assertEqual("CANCELLED", self.there.wait(1).popitem()[1].status)

    def test_step_is_aborted(self):
        """The owner aborts a step, then the receiver does: waiting receives end with the reason, and the step can be
        used again."""
        for worker in (self.there, self.here):
            asked = {self.here.ask(self.peer, f"never/{number}", ABORTED) for number in range(WAITING)}
            self.exchange("before", 0, self.there.make(b"these come later"))
            worker.abort_step(ABORTED, "DATA_LOSS", "the loss is not a number")
            found = self.here.wait(WAITING)
            self.assertEqual(asked, found.keys())
            for done in found.values():
                self.assertEqual("DATA_LOSS", done.status, done)
                self.assertIn("the loss is not a number", done.message)
            self.assertEqual(0, worker.end_step(ABORTED))
            self.assertEqual(b"again", self.exchange("never/0", ABORTED, self.there.make(b"again")).tensor.bytes)


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
