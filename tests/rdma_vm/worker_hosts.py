#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Inside two guests: hosts that die or stand still in the middle of a transfer, and come back. Run by worker_test.py.

    worker_hosts.py          in guest 0: /job:worker/task:0 at 10.8.0.1, which receives, and the tests
    worker_hosts.py serve    in guest 1: /job:ps/task:0 at 10.8.0.2, whose host this is done to
"""
import contextlib
import pathlib
import re
import signal
import sys
import time
import unittest

import workers
from workers import OVER_VERBS, Tensor, Worker

PEER_SCRIPT = str(pathlib.Path(__file__).with_name("peer"))
PEER = "/job:ps/task:0"
# A fault takes a while to happen, so the wire is so slow that the transfer takes some seconds.
LONG_BYTES = 16 << 20
SLOW = "tbf rate 40mbit burst 64kb limit 4mb"
PAUSE_SEC = 4


def cluster(rdma):
    """The setting timeout makes the card give up much later than the worker does."""
    return {"cluster": {"ps": ["10.8.0.2:4000"], "worker": ["10.8.0.1:4001"]}, "protocol": "grpc+verbs", "rdma": rdma,
            "verbs": {"piece": "128KiB", "peer_timeout": "1s", "timeout": 19},
            "timeouts": {"keepalive": "1s", "keepalive_answer": "5s", "drain": "1s"}}


def serve():
    workers.run("tc", "qdisc", "add", "dev", "eth0", "root", *SLOW.split())
    with Worker(cluster("prefer"), "ps") as here:
        here.publish("long", Tensor(b"\x77" * LONG_BYTES))
        here.publish("short", Tensor(b"here"))
        signal.pause()


class Hosts(unittest.TestCase):
    def start(self, rdma, **more):
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        self.here = stack.enter_context(Worker(cluster(rdma) | more, "worker"))
        self.log = stack.enter_context(workers.logged())
        self.peer = self.here.peer(PEER)
        self.destination = Tensor(bytes(LONG_BYTES))
        self.comes_back()

    def lost(self):
        """Returns why data connections were lost."""
        return re.findall(rf'level=warn msg="no data connection" peer={PEER}.* reason="([^"]+)"', self.log())

    def comes_back(self):
        """After a while at most, tensors come over verbs."""
        found = []
        workers.wait_until(lambda: found.append(self.here.receive(self.peer, "short"))
                           or found[-1].path in OVER_VERBS, "the data connection is there")
        self.assertEqual(b"here", found[-1].tensor.bytes)

    def interrupt(self, how):
        """Does something to the peer's host in the middle of a transfer; returns why the data connection was lost."""
        before = len(self.lost())
        self.destination.fill(bytes(LONG_BYTES))
        op = self.here.ask(self.peer, "long", 0, self.destination)
        workers.wait_until(lambda: self.destination.first == 0x77, "the bytes come", pause_sec=0.001)
        workers.run(PEER_SCRIPT, how)
        self.assertEqual(0, self.destination.last, "the transfer was over")
        workers.wait_until(lambda: len(self.lost()) > before, "the loss is reported")
        self.assertRegex(self.lost()[before], "has been silent for .* it is dead, stopped or cut off")
        return op

    def host_dies(self):
        op = self.interrupt("kill")
        done, = self.here.wait(1).values()
        self.assertEqual((op, "UNAVAILABLE"), (done.op, done.status), done)
        self.assertIn("has been silent", done.message)
        workers.run(PEER_SCRIPT, "start")
        self.comes_back()

    def test_host_dies(self):
        self.start("require")
        self.host_dies()

    def test_host_dies_while_it_is_read(self):
        self.start("require", protocol="grpc+gdr")
        self.host_dies()

    def test_host_stands_still(self):
        """What the host had posted before it stood still must not be written when it runs again."""
        self.start("require")
        self.interrupt("pause")
        done, = self.here.wait(1).values()
        self.assertEqual("UNAVAILABLE", done.status, done)
        content = b"\x22" * LONG_BYTES
        self.destination.fill(content)
        workers.run(PEER_SCRIPT, "resume")
        self.assertTrue(self.here.is_quiet(2))
        self.assertEqual(content, self.destination.bytes, "something was written later")
        self.comes_back()

    def test_requests_wait_for_the_host(self):
        """Where gRPC may take over, the requests are answered once the host runs again."""
        self.start("prefer")
        op = self.interrupt("pause")
        time.sleep(PAUSE_SEC)
        workers.run(PEER_SCRIPT, "resume")
        done, = self.here.wait(1).values()
        self.assertEqual((op, "OK", b"\x77" * LONG_BYTES), (done.op, done.status, self.destination.bytes), done)
        self.comes_back()


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        unittest.main(verbosity=2)
