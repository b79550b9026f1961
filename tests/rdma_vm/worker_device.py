#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Inside the guest with one device: workers that use the data plane, and workers that lack something for it. Run by
worker_test.py."""
import contextlib
import copy
import datetime
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import tempfile
import time
import unittest

import workers
from workers import OVER_VERBS, PROGRAM, Server, Tensor, Worker

CLUSTER = {"cluster": {"ps": ["10.10.0.1:4000", "10.10.0.1:4002"], "worker": ["10.10.0.1:4001"]},
           "protocol": "grpc+verbs", "rdma": "require", "timeouts": {"drain": "5s"},
           # For guests of a busy machine. timeout: rxe binds windows anew when it sends packets again, which fails
           # since they are bound.
           "verbs": {"timeout": 22, "piece": "1MiB", "silence": "10s", "pool": "4MiB"}}
RECEIVE_COUNT = 10000
UNDER_WAY = 200
STEPS = 60
CYCLES = 50
IDLE_LOOKS = 50
NO_LOCKED_MEMORY = ("setpriv", "--bounding-set", "-ipc_lock", "bash", "-c", 'ulimit -l 64; exec "$@"', "-")


def cluster(ps=None, **settings):
    """The cluster, with settings of all workers and of /job:ps/task:0."""
    config = copy.deepcopy(CLUSTER) | settings
    if ps:
        config["jobs"] = {"ps": {"tasks": {"0": ps}}}
    return config


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def thread_files(pid, name):
    return [path.read_text() for path in pathlib.Path(f"/proc/{pid}/task").glob(f"*/{name}")]


def switches(pid):
    """How often its threads have gone to sleep."""
    return sum(int(re.search(r"\nvoluntary_ctxt_switches:\s+(\d+)", text)[1]) for text in thread_files(pid, "status"))


def thread_states(pid):
    return [text.rpartition(")")[2].split()[0] for text in thread_files(pid, "stat")]


def processor_time(pid):
    """In ticks."""
    return sum(sum(map(int, text.rpartition(")")[2].split()[11:13])) for text in thread_files(pid, "stat"))


def push(config, *files):
    """Publishes the files on /job:ps/task:0."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        workers.run(PROGRAM, "push", "-c", file.name, "--to", "/job:ps/task:0", *files)


class Pull(unittest.TestCase):
    def test_checkpoint(self):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = workers.make_checkpoint(f"{folder}/vgg16.safetensors")
            with Server(cluster(), "ps", publish=[checkpoint]):
                pulled = workers.pull(cluster(), "/job:ps/task:0", f"{folder}/copy.safetensors", "--verify-against",
                                      checkpoint)
            self.assertTrue(pulled["complete"], pulled)
            self.assertEqual(({"zero-copy": 32}, 32, 32, 0),
                             (pulled["paths"], pulled["verified"], pulled["compared"], pulled["failed"]))

    def test_packets_of_two_sizes(self):
        config = cluster(ps={"verbs": {"mtu": 1024}})
        with Worker(config, "ps") as there, Worker(config, "worker") as here:
            content = random.randbytes(3000001)
            there.publish("x", Tensor(content))
            got = here.receive(here.peer("/job:ps/task:0"), "x")
            self.assertEqual(("OK", "zero-copy"), (got.status, got.path), got)
            self.assertEqual(content, got.tensor.bytes)


class Exchange(unittest.TestCase):
    """Two workers of this process."""
    @classmethod
    def setUpClass(cls):
        cls.here = Worker(cluster(), "worker")
        cls.there = Worker(cluster(), "ps")
        cls.peer = cls.here.peer("/job:ps/task:0")

    @classmethod
    def tearDownClass(cls):
        cls.here.__exit__()
        cls.there.__exit__()

    def exchange(self, key, step, tensor):
        """Sends and receives, in either order; what arrived."""
        send, ask = lambda: self.there.send(key, tensor, step), lambda: self.here.ask(self.peer, key, step)
        first, second = (send, ask) if random.random() < 0.5 else (ask, send)
        first()
        second()
        sent, = self.there.wait(1).values()
        got, = self.here.wait(1).values()
        self.assertEqual(("OK", "OK"), (sent.status, got.status), (sent, got))
        return got

    def test_receives_in_random_order(self):
        order = [(number, kind) for number in range(RECEIVE_COUNT) for kind in "sr"]
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
        self.assertLessEqual(paths, set(OVER_VERBS))

    def test_meta_data_changes_every_step(self):
        for step in range(STEPS):
            dims = tuple(random.randrange(1, 9) for _ in range(random.randrange(1, 6)))
            count = 1
            for dim in dims:
                count *= dim
            content = random.randbytes(count)
            got = self.exchange("shape", step, Tensor(content, dims))
            self.assertEqual((dims, content), (got.tensor.dims, got.tensor.bytes))
            self.assertIn(got.path, OVER_VERBS)

    def test_dead_every_other_step(self):
        for step in range(STEPS):
            is_dead = step % 2 == 0
            got = self.exchange("maybe", step, Tensor(None if is_dead else b"alive%d" % step))
            self.assertEqual(is_dead, got.tensor.is_dead)
            self.assertIn(got.path, ("none",) if is_dead else OVER_VERBS)
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


class Cycles(unittest.TestCase):
    def test_nothing_leaks(self):
        """Workers come, receive and go; what the device and the other worker's process hold stays the same. Data paths
        alone: verbs_cycles_test.c."""
        with Server(cluster(), "ps") as server:
            with tempfile.TemporaryDirectory() as folder:
                push(cluster(), workers.make_checkpoint(f"{folder}/small.safetensors", 8))
            counts = []
            for number in range(CYCLES + 2):
                with Worker(cluster() | {"log": {"level": "error"}}, "worker") as here:
                    got = here.receive(here.peer("/job:ps/task:0"), "features.0.bias")
                    self.assertEqual("OK", got.status, got)
                    self.assertIn(got.path, OVER_VERBS)
                if number in (1, CYCLES + 1):
                    workers.wait_until(lambda: workers.resources()["qp"] <= (counts or [workers.resources()])[0]["qp"], "they end")
                    counts.append(workers.resources() |
                                  {"server": descriptors(server.process.pid), "own": descriptors("self")})
            self.assertEqual(*counts)


class Defaults(unittest.TestCase):
    def setUp(self):
        config = {"cluster": CLUSTER["cluster"] | {"worker": ["10.10.0.1:4001", "10.10.0.1:4003"]},
                  "protocol": "grpc+verbs"}
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        self.server = stack.enter_context(Server(config, "ps"))
        self.here = stack.enter_context(Worker(config, "worker"))
        self.strict = stack.enter_context(Worker(config | {"rdma": "require"}, "worker", 1))
        self.log = stack.enter_context(workers.logged())
        with tempfile.TemporaryDirectory() as folder:
            push(config, workers.make_checkpoint(f"{folder}/small.safetensors", 8))
        self.peer = self.here.peer("/job:ps/task:0")
        workers.wait_until(self.comes, "a data path")

    def comes(self):
        return self.here.receive(self.peer, "features.0.bias").path in OVER_VERBS

    def test_peer_that_is_frozen(self):
        """It is reported by silence, long before the card gives up and before those give up who wait two seconds; its
        requests are answered when it goes on."""
        strict_peer = self.strict.peer("/job:ps/task:0")
        self.assertEqual("OK", self.strict.receive(strict_peer, "features.0.bias").status)
        self.server.signal(signal.SIGSTOP)
        begin, start = len(self.log()), time.time()
        op = self.here.ask(self.peer, "features.0.bias")
        self.strict.ask(strict_peer, "features.0.bias", timeout_sec=2)
        done, = self.strict.wait(1).values()
        self.assertEqual("UNAVAILABLE", done.status, done)
        self.assertIn("has been silent for", done.message)
        reason = r'ts=(\S+) level=warn msg="no data path" peer=/job:ps/task:0 instead=.* has been silent for (\d+) ms'
        workers.wait_until(lambda: re.search(reason, self.log()[begin:]), "the silence is reported")
        when, silent_ms = re.search(reason, self.log()[begin:]).groups()
        report = datetime.datetime.fromisoformat(when).timestamp()
        print(f"a frozen peer was reported after {report - start:.3f} s, {silent_ms} ms of silence", flush=True)
        self.assertTrue(self.here.is_quiet(0.1))
        self.server.signal(signal.SIGCONT)
        done, = self.here.wait(1).values()
        self.assertEqual((op, "OK"), (done.op, done.status), done)
        workers.wait_until(self.comes, "the data path is back")

    def assert_sleeps(self, when):
        """The server, for some seconds. What polls is never off the processor of its own will, and what naps wakes up
        a thousand times a second."""
        pid = self.server.process.pid
        before, ticks = switches(pid), processor_time(pid)
        states = []
        for _ in range(IDLE_LOOKS):
            time.sleep(0.05)
            states += thread_states(pid)
        woken, ticks = switches(pid) - before, processor_time(pid) - ticks
        print(f"{when}: {woken} wake-ups, {states.count('R')} of {len(states)} looks at a thread found it at work, "
              f"{ticks} ticks of 10 ms", flush=True)
        self.assertLess(woken, 10 * IDLE_LOOKS)
        self.assertLess(states.count("R"), IDLE_LOOKS / 4)

    def test_workers_without_work_sleep(self):
        """Also while a receive waits, for which both sides ask each other whether they live."""
        time.sleep(1)
        self.assert_sleeps("nothing is open")
        self.here.ask(self.peer, "never", timeout_sec=1000)
        self.assert_sleeps("a receive waits")


class Lacking(unittest.TestCase):
    """A worker that cannot have a data plane: under prefer it works over gRPC and says why, else it does not start."""
    def assert_lacking(self, reason, remedy="", ps=None, wrap=()):
        config = cluster(ps=ps, rdma="prefer")
        with Server(config, "ps", wrap=wrap) as server, Worker(config, "worker") as here, \
                Worker(config, "ps", 1) as other:
            log = server.text()
            self.assertIn(reason, log)
            self.assertIn(remedy, log)
            other.publish("x", Tensor(b"beside"))
            self.assertIn(here.receive(here.peer("/job:ps/task:1"), "x").path, OVER_VERBS)
            with tempfile.TemporaryDirectory() as folder:
                push(config, workers.make_checkpoint(f"{folder}/small.safetensors", 8))
            got = here.receive(here.peer("/job:ps/task:0"), "features.0.bias")
            self.assertEqual(("OK", "grpc"), (got.status, got.path), got)
            self.assertIn(reason, got.reason)
        refused = subprocess.run([*wrap, PROGRAM, "serve", "-c", "-", "-j", "ps"], text=True, capture_output=True,
                                 input=json.dumps(cluster(ps=ps)), check=False, timeout=workers.PATIENCE_SEC)
        self.assertEqual(1, refused.returncode, refused.stderr)
        self.assertIn(reason, refused.stderr)
        self.assertIn(remedy, refused.stderr)

    def test_locked_memory(self):
        self.assert_lacking("locked", "ulimit -l unlimited", wrap=NO_LOCKED_MEMORY)

    def test_gid_index(self):
        self.assert_lacking("GID index 200", ps={"verbs": {"gid_index": 200}})

    def test_no_device(self):
        self.assert_lacking("excluded by devices", ps={"verbs": {"devices": "^rxe"}})

    def test_worker_with_grpc_only(self):
        config = cluster(ps={"protocol": "grpc"}, rdma="prefer")
        with Worker(config, "worker") as here, Worker(config, "ps", 0) as plain, Worker(config, "ps", 1) as other:
            plain.publish("x", Tensor(b"plain"))
            other.publish("x", Tensor(b"other"))
            got = here.receive(here.peer("/job:ps/task:0"), "x")
            self.assertEqual(("grpc", b"plain"), (got.path, got.tensor.bytes))
            self.assertNotEqual("", got.reason)
            self.assertIn(here.receive(here.peer("/job:ps/task:1"), "x").path, OVER_VERBS)
            other.publish("y", Tensor(b"for plain"))
            self.assertEqual("grpc", plain.receive(plain.peer("/job:ps/task:1"), "y").path)


if __name__ == "__main__":
    unittest.main(verbosity=2)
