# SPDX-License-Identifier: Apache-2.0
"""Scenarios in which peers fail: they are killed, stopped, ended under load, and cut off.

/job:worker/task:0 is in this process; its peers are processes of their own. After each fault every request must have
completed, with the right bytes or the reason, and the data connection must have come back.
"""
import collections
import contextlib
import datetime
import pathlib
import random
import re
import resource
import signal
import socket
import tempfile
import time
import unittest

import transports
import workers
from workers import Server, Tensor, Worker

PEER = "/job:ps/task:0"
BYSTANDER = "/job:ps/task:1"
IDLE_LOOKS = 50
# How often a test tries to meet transfers that are under way, and how often it then kills the peer.
ATTEMPTS = 30
KILLS = 3
# How many tensors are under way when links are lost, and how often links are lost. A receive whose tensor is lost fails
# after FEW_SEC.
ONE_SHOTS = 100
CUTS = 4
FEW_SEC = 60


class Harness(unittest.TestCase):
    """A worker here, a peer that publishes a small VGG16, and a data connection that has carried all of it."""
    transport = None
    rdma = "prefer"
    timeouts = {"keepalive": "1s", "keepalive_answer": "5s", "drain": "5s"}

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.checkpoint = workers.make_checkpoint(f"{cls.folder.name}/vgg16.safetensors", 8)
        cls.content = workers.read_checkpoint(cls.checkpoint)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def setUp(self):
        self.start(self.transport.faulty[self.rdma])

    def start(self, data_plane, ps=None):
        """Takes the settings of the transport, for all workers and in addition for /job:ps."""
        self.stack = contextlib.ExitStack()
        self.addCleanup(self.stack.close)
        self.config = self.transport.cluster(data_plane, rdma=self.rdma, timeouts=self.timeouts)
        if ps:
            self.config["jobs"] = {"ps": {self.transport.section: ps}}
        self.ps = self.stack.enter_context(Server(self.config, "ps", publish=[self.checkpoint]))
        self.here = self.stack.enter_context(Worker(self.config, "worker"))
        self.peer = self.here.peer(PEER)
        self.bystander = None
        self.early = {}
        self.assert_comes_back()

    def start_bystander(self):
        self.stack.enter_context(Server(self.config, "ps", 1, publish=[self.checkpoint]))
        self.bystander = self.here.peer(BYSTANDER)
        self.assert_comes_back(self.bystander)

    def ask_all(self, peer=None):
        return {self.here.ask(peer or self.peer, name): name for name in self.content}

    def receive_all(self, peer=None):
        return self.wait_all(self.ask_all(peer))

    def wait_all(self, asked):
        """Returns the completions by name, after comparing the bytes."""
        found = {}
        while asked.keys() - self.early.keys():
            self.early |= self.here.wait(1)
        for op, name in asked.items():
            found[name] = done = self.early.pop(op)
            if done.status == "OK":
                self.assertEqual(self.content[name], done.tensor.bytes, name)
                done.tensor = None
        return found

    def interrupt(self, what):
        """Calls `what` when something has arrived. Returns the requests, and whether some were still open at that
        moment."""
        asked = self.ask_all()
        self.early |= self.here.wait(1)
        what()
        self.early |= self.here.poll()
        return asked, any(op not in self.early or self.early[op].status != "OK" for op in asked)

    def reports(self, log):
        """Returns why the peer was lost, according to the log. The link of the control plane may be lost first, and the
        data connection with it."""
        return re.findall(rf'level=warn msg="(?:no data connection|peer lost)" peer={PEER}.* reason="([^"]+)"', log)

    def assert_good(self, found):
        """Everything came over the transport."""
        for name, done in found.items():
            self.assertEqual("OK", done.status, done)
            self.assertIn(done.path, self.transport.paths, f"{name}: {done}")

    def assert_over(self, found):
        """Everything came, or failed with a reason: never over gRPC under require, never failed under prefer."""
        for name, done in found.items():
            if done.status != "OK":
                self.assertEqual(("require", "UNAVAILABLE"), (self.rdma, done.status), f"{name}: {done}")
                self.assertNotEqual("", done.message)
            elif done.path not in self.transport.paths:
                self.assertEqual(("prefer", "grpc"), (self.rdma, done.path), f"{name}: {done}")
                self.assertNotEqual("", done.reason)

    def assert_comes_back(self, peer=None):
        """After a while at most, everything comes over the transport again."""
        def is_back():
            found = self.receive_all(peer)
            self.assert_over(found)
            return all(done.path in self.transport.paths for done in found.values())
        workers.wait_until(is_back, "the data connection is back")


class Prefer(Harness):
    """What fails over the transport continues over gRPC."""
    def test_peer_killed(self):
        self.start_bystander()
        hits = 0
        for _ in range(ATTEMPTS):
            asked, is_hit = self.interrupt(self.ps.kill)
            self.assert_good(self.receive_all(self.bystander))
            self.ps.start()
            self.assert_over(self.wait_all(asked))
            self.assert_comes_back()
            hits += is_hit
            if hits == KILLS:
                break
        self.assertEqual(KILLS, hits, "the transfers were mostly over")

    def test_peer_stopped(self):
        self.start_bystander()
        for _ in range(ATTEMPTS):
            with workers.logged() as log:
                asked, is_hit = self.interrupt(lambda: self.ps.signal(signal.SIGSTOP))
                if is_hit:
                    workers.wait_until(lambda: self.reports(log()), "a peer that stands still is reported")
                    self.assert_good(self.receive_all(self.bystander))
                self.ps.signal(signal.SIGCONT)
            self.assert_over(self.wait_all(asked))
            self.assert_comes_back()
            if is_hit:
                return
        self.fail("the transfers were always over")

    def test_peer_ends_under_load(self):
        for _ in range(ATTEMPTS):
            asked, is_hit = self.interrupt(self.ps.process.terminate)
            self.assertEqual(0, self.ps.process.wait(workers.PATIENCE_SEC), self.ps.text())
            self.ps.start()
            self.assert_over(self.wait_all(asked))
            self.assert_comes_back()
            if is_hit:
                return
        self.fail("the transfers were always over")


class Require(Prefer):
    """What fails over the transport ends with UNAVAILABLE, or is asked for again."""
    rdma = "require"


class Cut(Harness):
    """A process loses its connections while its peers live."""
    def test_connections_are_lost(self):
        for _ in range(5):
            asked = self.ask_all()
            self.transport.cut()
            self.assert_over(self.wait_all(asked))
            self.assert_comes_back()


class CutRequire(Cut):
    """The same under require, which forbids gRPC."""
    rdma = "require"


class CutLinks(unittest.TestCase):
    """Two workers lose their links, and the data connections with them, while one-shot tensors are under way."""
    transport = None

    def test_nothing_is_lost_or_kept(self):
        """A tensor that has arrived counts as received on both sides; the others are asked for again."""
        config = self.transport.cluster({}, timeouts={"drain": "1s"})
        with Worker(config, "ps") as there, Worker(config, "worker") as here:
            peer = here.peer(PEER)
            there.publish("published", Tensor(b"is there"))
            for cut in range(CUTS):
                workers.wait_until(lambda: here.receive(peer, "published").path in self.transport.paths,
                                   "a data connection")
                asked = {}
                for number in range(cut * ONE_SHOTS, (cut + 1) * ONE_SHOTS):
                    content = b"%07d" % number * random.choice((1, 100, 3000))
                    asked[here.ask(peer, "once", number, timeout_sec=FEW_SEC)] = content
                    there.send("once", Tensor(content), number, FEW_SEC)
                got = here.wait(random.randrange(ONE_SHOTS // 2))
                transports.cut_sockets(socket.AF_INET)
                got |= here.wait(ONE_SHOTS - len(got))
                for op, done in got.items():
                    self.assertEqual(("OK", asked[op]), (done.status, done.tensor and done.tensor.bytes), done)
                for done in there.wait(ONE_SHOTS).values():
                    self.assertEqual("OK", done.status, done)


class Scarce(Harness):
    """The transport cannot be set up for a while: tensors go over gRPC, with the reason, and then it comes back."""
    def test_no_descriptors(self):
        """Each round leaves some more descriptors, so that another step of the set-up fails."""
        pid = self.ps.process.pid
        held = sum(transports.descriptors(pid).values())
        for spare in (-1, 0, 1):
            limit = held + spare
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, held + 1000))
            self.transport.cut()
            found = []

            def is_settled():
                nonlocal limit
                found.append(self.here.receive(self.peer, "features.0.bias"))
                comes = found[-1].path in self.transport.paths
                if comes and spare < 0:  # One of those that were counted was about to be closed.
                    limit -= 1
                    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, held + 1000))
                    self.transport.cut()
                    return False
                return comes or found[-1].path == "grpc" and "Too many open files" in found[-1].reason
            workers.wait_until(is_settled, lambda: f"a path or the want of descriptors, but {found[-1]}")
            self.assert_over(self.receive_all())
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (held + 1000, held + 1000))
            self.assert_comes_back()


class Defaults(unittest.TestCase):
    """Workers with default settings."""
    transport = None

    def setUp(self):
        self.config = self.transport.cluster()
        self.stack = contextlib.ExitStack()
        self.addCleanup(self.stack.close)
        self.server = self.stack.enter_context(Server(self.config, "ps"))
        self.here = self.stack.enter_context(Worker(self.config, "worker"))
        self.log = self.stack.enter_context(workers.logged())
        with tempfile.TemporaryDirectory() as folder:
            workers.push(self.config, PEER, workers.make_checkpoint(f"{folder}/small.safetensors", 8))
        self.peer = self.here.peer(PEER)
        workers.wait_until(self.comes, "a data connection")

    def comes(self):
        return self.here.receive(self.peer, "features.0.bias").path in self.transport.paths


class Frozen(Defaults):
    """A stopped peer is reported by the peer time-out before receives with a deadline of some seconds give up."""
    def test_peer_that_is_frozen(self):
        """The requests are answered when the peer runs again."""
        strict = self.stack.enter_context(Worker(self.config | {"rdma": "require"}, "worker", 1))
        strict_peer = strict.peer(PEER)
        self.assertEqual("OK", strict.receive(strict_peer, "features.0.bias").status)
        self.server.signal(signal.SIGSTOP)
        begin, start = len(self.log()), time.time()
        op = self.here.ask(self.peer, "features.0.bias")
        strict.ask(strict_peer, "features.0.bias", timeout_sec=self.transport.give_up_sec)
        done, = strict.wait(1).values()
        self.assertEqual("UNAVAILABLE", done.status, done)
        self.assertIn("has been silent for", done.message)
        reason = r'ts=(\S+) level=warn msg="no data connection" peer=/job:ps/task:0 .* has been silent for (\d+) ms'
        workers.wait_until(lambda: re.search(reason, self.log()[begin:]), "the peer time-out is reported")
        when, silent_ms = re.search(reason, self.log()[begin:]).groups()
        report = datetime.datetime.fromisoformat(when).timestamp()
        print(f"a frozen peer was reported after {report - start:.3f} s, {silent_ms} ms without a message", flush=True)
        self.assertTrue(self.here.is_quiet(0.1))
        self.server.signal(signal.SIGCONT)
        done, = self.here.wait(1).values()
        self.assertEqual((op, "OK"), (done.op, done.status), done)
        workers.wait_until(self.comes, "the data connection is back")


def thread_files(pid, name):
    return [path.read_text() for path in pathlib.Path(f"/proc/{pid}/task").glob(f"*/{name}")]


def switches(pid):
    """Returns how often the threads of a process have gone to sleep."""
    return sum(int(re.search(r"\nvoluntary_ctxt_switches:\s+(\d+)", text)[1]) for text in thread_files(pid, "status"))


def running_threads(pid):
    """Returns the threads of a process that have a processor or wait for one."""
    return [text.split()[0] for text in thread_files(pid, "stat") if text.rpartition(")")[2].split()[0] == "R"]


class Idle(Defaults):
    """Workers without work sleep."""
    def assert_sleeps(self, when):
        """The server sleeps for some seconds. A polling thread would run in every look, also where it rarely gets a
        processor, and a napping one would wake up a thousand times a second."""
        pid = self.server.process.pid
        begin, woken, running = time.monotonic(), switches(pid), collections.Counter()
        for _ in range(IDLE_LOOKS):
            time.sleep(0.05)
            running.update(running_threads(pid))
        woken, passed_sec = switches(pid) - woken, time.monotonic() - begin
        most = max(running.values(), default=0)
        print(f"{when}: {woken} wake-ups in {passed_sec:.1f} s; a thread ran in {most} of {IDLE_LOOKS} looks",
              flush=True)
        self.assertLess(woken, 200 * passed_sec)
        self.assertLess(most, IDLE_LOOKS / 2)

    def test_workers_without_work_sleep(self):
        """Workers also sleep while a receive waits, although both sides check then that the other one lives."""
        time.sleep(1)
        self.assert_sleeps("nothing is open")
        self.here.ask(self.peer, "never", timeout_sec=1000)
        self.assert_sleeps("a receive waits")
