#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Inside two guests: hosts that die or stand still in the middle of a transfer, and come back; and what health says of
a worker that cannot start on another host. Run by worker_test.py.

    worker_hosts.py          in guest 0: /job:worker/task:0 at 10.8.0.1, which receives, and the tests
    worker_hosts.py serve    in guest 1: /job:ps/task:0 at 10.8.0.2, whose host this is done to; and one that cannot
                             start
"""
import contextlib
import json
import pathlib
import re
import signal
import subprocess
import sys
import time
import unittest

import devices
import workers
from devices import GPU
from workers import NO_LOCKED_MEMORY, OVER_VERBS, PROGRAM, Server, Tensor, Worker

PEER_SCRIPT = str(pathlib.Path(__file__).with_name("peer"))
PEER = "/job:ps/task:0"
# A fault takes a while to happen, so the wire is so slow that the transfer takes some seconds.
LONG_BYTES = 16 << 20
SLOW = "tbf rate 40mbit burst 64kb limit 4mb"
PAUSE_SEC = 4
# Large enough for a card to reach it on the GPU.
MEDIUM_BYTES = 1 << 18
# The other host lets this cluster's /job:ps/task:0 lock less memory than it needs.
LIMITED = {"cluster": {"ps": ["10.8.0.2:4001"], "worker": ["10.8.0.1:4001"]}, "protocol": "grpc+verbs",
           "rdma": "require"}
SOON_SEC = 5


def cluster(rdma):
    """The setting timeout makes the card give up much later than the worker does."""
    return {"cluster": {"ps": ["10.8.0.2:4000"], "worker": ["10.8.0.1:4001"]}, "protocol": "grpc+verbs", "rdma": rdma,
            "verbs": {"piece": "128KiB", "peer_timeout": "1s", "timeout": 19},
            "timeouts": {"keepalive": "1s", "keepalive_answer": "5s", "drain": "1s"}}


def start_limited():
    """Its last words can be heard until the host ends."""
    command = [*NO_LOCKED_MEMORY, PROGRAM, "serve", "-c", "-", "-j", "ps", "--last-words", "1h"]
    with subprocess.Popen(command, stdin=subprocess.PIPE).stdin as config:
        config.write(json.dumps(LIMITED).encode())


def serve():
    start_limited()
    workers.run("tc", "qdisc", "add", "dev", "eth0", "root", *SLOW.split())
    with Worker(cluster("prefer"), "ps") as here:
        here.publish("long", Tensor(b"\x77" * LONG_BYTES))
        here.publish("long on a GPU", Tensor(b"\x77" * LONG_BYTES, device=GPU))
        here.publish("medium on a GPU", Tensor(b"\x77" * MEDIUM_BYTES, device=GPU))
        here.publish("short", Tensor(b"here"))
        signal.pause()


class Hosts(unittest.TestCase):
    def start(self, rdma, **more):
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        self.here = stack.enter_context(Worker(cluster(rdma) | more, "worker"))
        self.log = stack.enter_context(workers.logged())
        self.peer = self.here.peer(PEER)
        self.key, self.destination = "long", Tensor(bytes(LONG_BYTES))
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
        op = self.here.ask(self.peer, self.key, 0, self.destination, is_verified=self.key == "long")
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

    def use_gpus(self):
        """Returns when the cards reach the GPUs of both hosts."""
        self.key, self.destination = "long on a GPU", Tensor(bytes(LONG_BYTES), device=GPU)
        medium = Tensor(bytes(MEDIUM_BYTES), device=GPU)
        workers.wait_until(lambda: self.here.receive(self.peer, "medium on a GPU", 0, medium, is_verified=False).path
                           == "gpu-direct", "from GPU to GPU")

    def test_host_of_a_gpu_dies(self):
        self.start("require")
        self.use_gpus()
        self.host_dies()

    def test_host_of_a_gpu_dies_while_it_is_read(self):
        self.start("require", protocol="grpc+gdr")
        self.use_gpus()
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


class LockedMemory(unittest.TestCase):
    """The worker of the other host cannot start; the one of this host is sound."""
    # The pool, the slots of one peer, and what messages to it leave from.
    REASON = ('it could not start: rdma is "require", but no tensor can travel from here over verbs: the data plane '
              "needs 68.1 MB of locked memory, the limit is 65.5 KB")
    REMEDY = ("raise it: ulimit -l unlimited in the shell, LimitMEMLOCK=infinity in the systemd unit, --ulimit "
              "memlock=-1 for the container; ")

    def health(self, server):
        """Returns the exit status, and the rows by name."""
        begin = time.monotonic()
        result = subprocess.run([PROGRAM, "health", "--config", server.config, "--json"], stdout=subprocess.PIPE,
                                text=True, check=False)
        self.assertLess(time.monotonic() - begin, SOON_SEC)
        return result.returncode, {row["name"]: row for row in json.loads(result.stdout)["workers"]}

    def test_other_hosts_read_why(self):
        with Server(LIMITED, "worker") as sound:
            workers.wait_until(lambda: self.health(sound)[1][PEER]["stage"] != "tcp", "it listens", 60)
            status, rows = self.health(sound)
        self.assertEqual(4, status, rows)
        row = rows[PEER]
        self.assertEqual((False, "serving", "guest1"), (row["healthy"], row["stage"], row["host_name"]), row)
        self.assertEqual(self.REASON, row["reason"])
        self.assertTrue(row["remedy"].startswith(self.REMEDY), row)
        self.assertTrue(rows["/job:worker/task:0"]["healthy"], rows)


if __name__ == "__main__":
    devices.load(workers.BUILD)
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        unittest.main(verbosity=2)
