# SPDX-License-Identifier: Apache-2.0
"""Scenarios of clusters in which some workers lack the transport."""
import json
import subprocess
import tempfile
import unittest

import workers
from workers import PROGRAM, Server, Tensor, Worker

PLAIN = "/job:ps/task:0"
OTHER = "/job:ps/task:1"


def with_settings(config, own):
    """Returns the cluster, with settings for /job:ps/task:0."""
    return config | {"jobs": {"ps": {"tasks": {"0": own}}}}


class Mixed(unittest.TestCase):
    """One worker of the cluster has gRPC alone."""
    transport = None

    def start(self, rdma):
        config = with_settings(self.transport.cluster({}, rdma=rdma), {"protocol": "grpc"})
        opened = [Worker(config, job, task) for job, task in (("worker", 0), ("ps", 0), ("ps", 1))]
        for worker in opened:
            self.addCleanup(worker.__exit__)
        return opened

    def test_prefer(self):
        here, plain, other = self.start("prefer")
        plain.publish("x", Tensor(b"plain"))
        other.publish("x", Tensor(b"other"))
        got = here.receive(here.peer(PLAIN), "x")
        self.assertEqual(("grpc", b"plain"), (got.path, got.tensor.bytes))
        self.assertNotEqual("", got.reason)
        self.assertIn(here.receive(here.peer(OTHER), "x").path, self.transport.paths)
        other.publish("y", Tensor(b"for plain"))
        self.assertEqual("grpc", plain.receive(plain.peer(OTHER), "y").path)

    def test_require(self):
        here, plain, other = self.start("require")
        plain.publish("x", Tensor(b"plain"))
        other.publish("x", Tensor(b"other"))
        got = here.receive(here.peer(PLAIN), "x")
        self.assertEqual("UNAVAILABLE", got.status, got)
        self.assertIn("the protocol is grpc", got.message)
        self.assertIn(here.receive(here.peer(OTHER), "x").path, self.transport.paths)


class Readers(unittest.TestCase):
    """Each worker decides for what it receives whether it reads it; its peer may decide otherwise."""
    transport = None
    READ = "read from the memory of its owner"
    SIZE = 1 << 20

    def exchange(self, own):
        """Returns how each of two workers receives from the other one; own are the settings of /job:ps/task:0."""
        config = with_settings(self.transport.cluster({}, rdma="require"), own)
        with Worker(config, "worker") as here, Worker(config, "ps") as other:
            found = []
            for worker, owner, name in ((here, other, PLAIN), (other, here, "/job:worker/task:0")):
                content = name.encode().ljust(self.SIZE, b".")
                owner.publish("x", Tensor(content))
                got = worker.receive(worker.peer(name), "x")
                self.assertEqual(("OK", "zero-copy"), (got.status, got.path), got)
                self.assertEqual(content, got.tensor.bytes)
                found.append(got.reason)
            return found

    def test_both_read(self):
        self.assertEqual([self.READ, self.READ], self.exchange({}))

    def test_one_reads(self):
        self.assertEqual([self.READ, ""], self.exchange({"protocol": "grpc+verbs"}))

    def test_one_cannot_be_read(self):
        self.assertEqual("written by its owner, whose verbs.keys is region",
                         self.exchange({"protocol": "grpc+verbs", "verbs": {"keys": "region"}})[0])


class Lacking(unittest.TestCase):
    """A worker that cannot have the transport: under prefer it works over gRPC and says why; under require it does not
    start."""
    transport = None

    def setUp(self):
        settings, self.reason = self.transport.lacking
        self.config = with_settings(self.transport.cluster({}), {self.transport.section: settings})

    def test_prefer(self):
        with Server(self.config, "ps") as server, Worker(self.config, "worker") as here, \
                Worker(self.config, "ps", 1) as other:
            self.assertIn(self.reason, server.text())
            other.publish("x", Tensor(b"beside"))
            self.assertIn(here.receive(here.peer(OTHER), "x").path, self.transport.paths)
            with tempfile.TemporaryDirectory() as folder:
                workers.push(self.config, PLAIN, workers.write_checkpoint(f"{folder}/y.safetensors", {"y": b"pushed"}))
            got = here.receive(here.peer(PLAIN), "y")
            self.assertEqual(("OK", "grpc", b"pushed"), (got.status, got.path, got.tensor.bytes), got)
            self.assertIn(self.reason, got.reason)

    def test_require(self):
        refused = subprocess.run([PROGRAM, "serve", "--no-wait", "-c", "-", "-j", "ps"], text=True, capture_output=True,
                                 check=False, input=json.dumps(self.config | {"rdma": "require"}),
                                 timeout=workers.PATIENCE_SEC)
        self.assertEqual(1, refused.returncode, refused.stderr)
        self.assertIn(self.reason, refused.stderr)
