#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Inside the guest with two devices and a wire between them: workers while the network and their peers fail. Run by
worker_test.py.

/job:worker/task:0 is in this process, at 10.9.0.1; what it receives from is at 10.9.0.2. After each fault all that was
asked for must have completed, with the right bytes or the reason, and the data path must have come back.
"""
import contextlib
import json
import os
import pathlib
import re
import signal
import struct
import tempfile
import time
import unittest

import workers
from workers import OVER_VERBS, Server, Worker

LINK = str(pathlib.Path(__file__).with_name("link"))
PEER = "/job:ps/task:0"
BYSTANDER = "/job:ps/task:1"


def cluster(rdma, keys):
    """Pieces so small, and a silence so long, that a busy machine's guest is not taken for a dead one."""
    return {"cluster": {"ps": ["10.9.0.2:4000", "10.9.0.2:4002"], "worker": ["10.9.0.1:4001"]},
            "protocol": "grpc+verbs", "rdma": rdma,
            "verbs": {"keys": keys, "piece": "128KiB", "silence": "2s", "pool": "16MiB"},
            "timeouts": {"keepalive": "1s", "keepalive_answer": "2s", "drain": "5s"}}


def read_checkpoint(path):
    """name -> bytes"""
    content = pathlib.Path(path).read_bytes()
    length, = struct.unpack("<Q", content[:8])
    return {name: content[8 + length + entry["data_offsets"][0]:8 + length + entry["data_offsets"][1]]
            for name, entry in json.loads(content[8:8 + length]).items()}


class Prefer(unittest.TestCase):
    """What fails goes on over gRPC. Every packet that is sent again may break a path here: rxe then binds a window
    anew, which fails since it is bound."""
    rdma, keys = "prefer", "window"

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.checkpoint = workers.make_checkpoint(f"{cls.folder.name}/vgg16.safetensors", 8)
        cls.content = read_checkpoint(cls.checkpoint)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def setUp(self):
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        config = cluster(self.rdma, self.keys)
        self.ps = stack.enter_context(Server(config, "ps", publish=[self.checkpoint]))
        self.here = stack.enter_context(Worker(config, "worker"))
        self.peer = self.here.peer(PEER)
        self.bystander = None
        self.stack = stack
        self.early = {}
        self.assert_comes_back()

    def start_bystander(self):
        self.stack.enter_context(Server(cluster(self.rdma, self.keys), "ps", 1, publish=[self.checkpoint]))
        self.bystander = self.here.peer(BYSTANDER)
        self.assert_comes_back(self.bystander)

    def ask_all(self, peer=None):
        return {self.here.ask(peer or self.peer, name): name for name in self.content}

    def receive_all(self, peer=None):
        return self.wait_all(self.ask_all(peer))

    def wait_all(self, asked):
        """name -> completion; the bytes are compared."""
        found = {}
        while asked.keys() - self.early.keys():
            self.early |= self.here.wait(1)
        for op, name in asked.items():
            found[name] = done = self.early.pop(op)
            if done.status == "OK":
                self.assertEqual(self.content[name], done.tensor.bytes, name)
                done.tensor = None
        return found

    def assert_good(self, found):
        """All over verbs."""
        for name, done in found.items():
            self.assertEqual("OK", done.status, done)
            self.assertIn(done.path, OVER_VERBS, f"{name}: {done}")

    def assert_over(self, found):
        """However they came, or why they did not: never over gRPC under require, never failed under prefer."""
        for name, done in found.items():
            if done.status != "OK":
                self.assertEqual(("require", "UNAVAILABLE"), (self.rdma, done.status), f"{name}: {done}")
                self.assertNotEqual("", done.message)
            elif done.path == "grpc":
                self.assertEqual("prefer", self.rdma, f"{name}: {done}")
                self.assertNotEqual("", done.reason)
            else:
                self.assertIn(done.path, OVER_VERBS, f"{name}: {done}")

    def assert_comes_back(self, peer=None):
        """Everything is received over verbs again, at the latest after a while."""
        def is_back():
            found = self.receive_all(peer)
            self.assert_over(found)
            return all(done.path in OVER_VERBS for done in found.values())
        workers.wait_until(is_back, "the data path is back")

    @contextlib.contextmanager
    def disturbed(self, what):
        for device in ("va", "vb"):
            workers.run("tc", "qdisc", "add", "dev", device, "root", "netem", *what.split())
        try:
            yield
        finally:
            for device in ("va", "vb"):
                workers.run("tc", "qdisc", "del", "dev", device, "root")

    def through(self, what):
        with self.disturbed(what):
            found = self.receive_all()
        self.assert_over(found)
        print({path: sum(done.path == path for done in found.values()) for path in workers.PATHS}, what, flush=True)
        self.assert_comes_back()

    def test_loss_of_1_percent(self):
        self.through("loss 1%")

    def test_loss_of_10_percent(self):
        self.through("loss 10%")

    def test_corruption(self):
        self.through("corrupt 2%")

    def test_partition(self):
        with self.disturbed("loss 100%"):
            asked = self.ask_all()
            time.sleep(3)
        self.assert_over(self.wait_all(asked))
        self.assert_comes_back()

    def link_down(self, end):
        asked = self.ask_all()
        workers.run(LINK, end, "down")
        time.sleep(2)
        workers.run(LINK, end, "up")
        self.assert_over(self.wait_all(asked))
        self.assert_comes_back()

    def test_local_link_down(self):
        self.link_down("va")

    def test_remote_link_down(self):
        self.link_down("vb")

    def test_gid_removed(self):
        asked = self.ask_all()
        workers.run("ip", "addr", "del", "10.9.0.1/32", "dev", "va")
        time.sleep(2)
        workers.run("ip", "addr", "add", "10.9.0.1/32", "dev", "va")
        workers.run(LINK, "va", "up")
        self.assert_over(self.wait_all(asked))
        self.assert_comes_back()

    def test_peer_killed(self):
        self.start_bystander()
        for _ in range(3):
            asked = self.ask_all()
            time.sleep(0.1)
            self.ps.kill()
            self.assert_good(self.receive_all(self.bystander))
            self.ps.start()
            self.assert_over(self.wait_all(asked))
            self.assert_comes_back()

    def test_peer_stopped(self):
        self.start_bystander()
        with workers.logged() as log:
            self.ps.signal(signal.SIGSTOP)
            asked = self.ask_all()
            # The link of the control plane may be lost first, and the data path with it.
            reason = rf'level=warn msg="(?:no data path|peer lost)" peer={PEER}.* reason="[^"]+"'
            workers.wait_until(lambda: re.search(reason, log()), "a peer that stands still is reported")
            self.assert_good(self.receive_all(self.bystander))
            self.ps.signal(signal.SIGCONT)
        self.assert_over(self.wait_all(asked))
        self.assert_comes_back()

    def test_peer_ends_under_load(self):
        asked = self.ask_all()
        time.sleep(0.05)
        self.assertEqual(0, self.ps.stop(), self.ps.text())
        self.ps.start()
        self.assert_over(self.wait_all(asked))
        self.assert_comes_back()


class Require(Prefer):
    """What fails is UNAVAILABLE, or is asked for again."""
    rdma, keys = "require", "region"


if __name__ == "__main__":
    unittest.main(verbosity=2)
