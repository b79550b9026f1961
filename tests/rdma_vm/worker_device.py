#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Runs inside the guest with one device, started by worker_test.py: workers that lack something for the data plane, or
have less than others."""
import copy
import json
import random
import subprocess
import tempfile
import unittest

import workers
from workers import NO_LOCKED_MEMORY, OVER_VERBS, PROGRAM, Server, Tensor, Worker

CLUSTER = {"cluster": {"ps": ["10.10.0.1:4000", "10.10.0.1:4002"], "worker": ["10.10.0.1:4001"]},
           "protocol": "grpc+verbs", "rdma": "require", "timeouts": {"drain": "5s", "connect": "60s"},
           # These settings suit the guests of a busy machine. The setting timeout avoids that rxe sends packets again:
           # it would bind windows again, which fails because they are bound.
           "verbs": {"timeout": 22, "piece": "1MiB", "peer_timeout": "10s", "pool": "4MiB"}}


def cluster(ps=None, **settings):
    """Returns the cluster, with settings for all workers and for /job:ps/task:0."""
    config = copy.deepcopy(CLUSTER) | settings
    if ps:
        config["jobs"] = {"ps": {"tasks": {"0": ps}}}
    return config


class Packets(unittest.TestCase):
    def test_packets_of_two_sizes(self):
        config = cluster(ps={"verbs": {"mtu": 1024}})
        with Worker(config, "ps") as there, Worker(config, "worker") as here:
            content = random.randbytes(3000001)
            there.publish("x", Tensor(content))
            got = here.receive(here.peer("/job:ps/task:0"), "x")
            self.assertEqual(("OK", "zero-copy"), (got.status, got.path), got)
            self.assertEqual(content, got.tensor.bytes)


class Addresses(unittest.TestCase):
    def test_ipv6(self):
        """Without any setting the GID follows from the worker's address."""
        workers.run("ip", "addr", "add", "fd00::1/64", "dev", "d0", "nodad")
        self.addCleanup(workers.run, "ip", "addr", "del", "fd00::1/64", "dev", "d0")
        config = {"cluster": {"ps": ["[fd00::1]:4000"], "worker": ["[fd00::1]:4001"]}, "protocol": "grpc+verbs",
                  "rdma": "require"}
        with Worker(config, "ps") as there, Worker(config, "worker") as here:
            there.publish("x", Tensor(b"sixth" * 100000))
            got = here.receive(here.peer("/job:ps/task:0"), "x")
            self.assertEqual(("OK", "zero-copy", b"sixth" * 100000), (got.status, got.path, got.tensor.bytes), got)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(config, file)
            file.flush()
            shown = json.loads(workers.run(PROGRAM, "devices", "-c", file.name, "-j", "ps", "--json"))
        self.assertEqual(("rxe0", "fd00::1", "RoCE v2"),
                         tuple(shown["chosen"][name] for name in ("device", "gid", "gid_type")))


class Lacking(unittest.TestCase):
    """A worker that cannot have a data plane: under prefer it works over gRPC and says why; under require it does not
    start. What any transport may lack is in tests/scenarios/choice.py."""
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
                workers.push(config, "/job:ps/task:0", workers.make_checkpoint(f"{folder}/small.safetensors", 8))
            got = here.receive(here.peer("/job:ps/task:0"), "features.0.bias")
            self.assertEqual(("OK", "grpc"), (got.status, got.path), got)
            self.assertIn(reason, got.reason)
        self.assert_last_words(cluster(ps=ps), reason, remedy, wrap)

    def assert_last_words(self, config, reason, remedy, wrap):
        """Under require it says what it lacks to health, which need not run with the same limits, and then ends."""
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(config, file)
            file.flush()
            with subprocess.Popen([*wrap, PROGRAM, "serve", "-c", file.name, "-j", "ps"], text=True,
                                  stderr=subprocess.PIPE) as refused:
                said = ""
                while "the worker cannot start" not in said:
                    line = refused.stderr.readline()
                    self.assertNotEqual("", line, said)
                    said += line
                shown = subprocess.run([PROGRAM, "health", "-c", file.name, "--json"], text=True, capture_output=True,
                                       check=False, timeout=workers.PATIENCE_SEC)
                refused.terminate()
                said += refused.stderr.read()
        self.assertEqual(1, refused.returncode, said)
        self.assertIn(reason, said)
        self.assertIn(remedy, said)
        finding = json.loads(shown.stdout)["workers"][0]
        self.assertEqual((False, "serving"), (finding["healthy"], finding["stage"]), finding)
        self.assertIn(reason, finding["reason"])
        self.assertIn(remedy, finding["remedy"])

    def test_locked_memory(self):
        self.assert_lacking("locked", "ulimit -l unlimited", wrap=NO_LOCKED_MEMORY)

    def test_gid_index(self):
        self.assert_lacking("GID index 200", ps={"verbs": {"gid_index": 200}})


class Removed(unittest.TestCase):
    """A device is taken away while workers use it."""
    REMEDY = "start the worker anew"

    def setUp(self):
        workers.run("ip", "link", "add", "d1", "mtu", "4200", "type", "dummy")
        workers.run("ip", "addr", "add", "10.11.0.1/24", "dev", "d1")
        workers.run("ip", "link", "set", "d1", "up")
        workers.run("rdma", "link", "add", "rxe1", "type", "rxe", "netdev", "d1")

    def findings(self, config):
        """Returns what health says of each worker."""
        shown = subprocess.run([PROGRAM, "health", "-c", "-", "--json"], input=json.dumps(config), text=True,
                               capture_output=True, check=False, timeout=workers.PATIENCE_SEC)
        return [(each["stage"], each["healthy"], each["reason"], each["remedy"])
                for each in json.loads(shown.stdout)["workers"]]

    def test_device_is_removed(self):
        """Later requests are answered over gRPC, or fail under require; all say what to do."""
        config = {"cluster": {"ps": ["127.0.0.1:4000"], "worker": ["127.0.0.1:4001", "127.0.0.1:4002"]},
                  "protocol": "grpc+verbs", "verbs": {"devices": "rxe1"},
                  "jobs": {"worker": {"tasks": {"1": {"rdma": "require"}}}}}
        with Worker(config, "ps") as there, Worker(config, "worker") as here, Worker(config, "worker", 1) as strict:
            there.publish("x", Tensor(b"here"))
            for each in here, strict:
                self.assertIn(each.receive(each.peer("/job:ps/task:0"), "x").path, OVER_VERBS)
            # The device ends when no process has it open.
            removal = subprocess.Popen(["ip", "link", "del", "d1"])
            for each, end in (here, ("OK", "grpc")), (strict, ("UNAVAILABLE", "none")):
                found = []
                workers.wait_until(
                    lambda: found.append(each.receive(each.peer("/job:ps/task:0"), "x"))
                    or self.REMEDY in found[-1].message + found[-1].reason,
                    lambda: f"the loss is reported, but {found[-1]}")
                self.assertEqual(end, (found[-1].status, found[-1].path), found[-1])
            self.assertEqual([("device", is_healthy, "rxe1:1: the device was removed", self.REMEDY + " to use it again")
                              for is_healthy in (True, True, False)], self.findings(config))
        self.assertEqual(0, removal.wait(workers.PATIENCE_SEC))


if __name__ == "__main__":
    unittest.main(verbosity=2)
