#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Workers in separate processes exchange tensors through shared memory.

The tests cover when that path is chosen, what the tools report about it, and what happens when a process dies.
"""
import json
import os
import pathlib
import signal
import threading
import time
import unittest

import cli_support
from cli_support import (HEALTH, ask_until_in_time, read_safetensors, run, some_tensors, wait_until, was_probed_late,
                         write_safetensors)

LARGE = 1 << 27


class LocalCase(cli_support.Case):
    def serve(self, extra=None, tensors=None, zeros=None):
        self.tensors = some_tensors() if tensors is None else tensors
        self.model = write_safetensors(self.folder / "model.safetensors", self.tensors, zeros)
        self.served = self.cluster(ps=1, worker=1, extra={"connect": "eager", **(extra or {})})
        self.worker = self.served.start("ps", 0, "--publish", self.model)
        self.target = ("--config", self.served.path, "--from", "ps:0")

    def pull(self, *arguments):
        result = self.assert_run(0, "pull", *self.target, "-o", self.folder / "out.safetensors", "--json", *arguments)
        return json.loads(result.stdout)

    def health(self, code=0, *arguments):
        """Returns what health reports, by worker. With code None the exit status is not checked."""
        result = ask_until_in_time(lambda: run(*HEALTH, "--config", self.served.path, "--json", *arguments),
                                   lambda result: code == 0 and was_probed_late(result))
        if code is not None:
            self.assertEqual(result.returncode, code, f"{result.stdout}\n{result.stderr}")
        shown = json.loads(result.stdout)
        return {worker["name"]: worker for worker in shown["workers"]}

    def pair(self, code=0):
        """Returns how ps:0 sees worker:0; code means what it means in health."""
        peers = self.health(code, "--quick")["/job:ps/task:0"].get("peers", [])
        unknown = {"state": "", "transport": "", "reason": ""}
        return next((peer for peer in peers if peer["name"] == "/job:worker/task:0"), unknown)

    def await_pair(self, transport):
        wait_until(lambda: self.pair(None)["transport"] == transport, f"the pair is reached over {transport}")

    def counters(self):
        """Without --quick the worker would try its peers, whose answers count too."""
        return self.health(0, "--quick")["/job:ps/task:0"]["counters"]


class Choice(LocalCase):
    def test_the_reason_is_that_of_the_largest(self):
        """It may come after those of smaller ones."""
        sizes = {"first": 64 << 10, "second": 3 << 20, "third": 64 << 10}
        self.serve(tensors={name: ("U8", (size,), bytes(size)) for name, size in sizes.items()})
        shown = self.pull()
        self.assertEqual(shown["paths"], {"bounce": 3})
        self.assertIn("both sides copy it", shown["reasons"]["bounce"])

    def test_auto(self):
        """Large tensors are copied by both sides at the same time, or from their own memory (docs/local.md)."""
        size = 3 << 20
        self.serve(tensors={f"w{i}": ("U8", (size,), os.urandom(size)) for i in range(4)})
        shown = self.pull()
        self.assertEqual(read_safetensors(self.folder / "out.safetensors"), self.tensors)
        self.assertEqual(sum(shown["paths"].values()), 4)
        self.assertLessEqual(set(shown["paths"]), {"bounce", "zero-copy"})
        self.assertIn("bounce", shown["paths"])
        self.served.start("worker", 0)
        self.await_pair("local")
        self.assertEqual(self.counters()["data_bytes_bounced"], 0)
        self.assertIn(self.counters()["data_bytes_sent"] - 4 * size, range(100))  # the handshake writes some bytes too

    def test_memory_is_not_read(self):
        self.serve({"local": {"process_vm": "off"}})
        local = next(t for t in self.health(4)["/job:ps/task:0"]["transports"] if t["name"] == "local")
        self.assertIn("copied twice, local.process_vm is off", local["reason"])
        self.assertIn("local.process_vm", self.pull()["reasons"]["bounce"])
        shown = self.assert_run(0, "pull", *self.target, "-o", self.folder / "out.safetensors").stdout
        self.assertRegex(shown, r"\nbounce because: memory outside of the pool is copied, .* \(local\.process_vm\)\n")

    def test_every_protocol(self):
        self.serve()
        for protocol, paths in (("grpc", {"grpc", "none"}), ("grpc+local", {"zero-copy", "bounce", "inline", "none"})):
            self.assertLessEqual(set(self.pull("--protocol", protocol)["paths"]), paths)

    def test_a_protocol_that_does_not_exist(self):
        self.assert_error(2, "--protocol fast: there are auto, grpc, .* and no other", "pull", "--address",
                          "127.0.0.1:1", "-o", self.folder / "out.safetensors", "--protocol", "fast")

    def test_required(self):
        for protocol in ("auto", "grpc+local"):
            with self.subTest(protocol):
                self.serve({"rdma": "require", "protocol": protocol})
                self.served.start("worker", 0)
                self.await_pair("local")
                findings = self.health()
                self.assertEqual({finding["stage"] for finding in findings.values()}, {"paths"})

    def test_health(self):
        self.serve()
        self.served.start("worker", 0)
        self.await_pair("local")
        pair = self.pair()
        self.assertEqual(pair["reason"], "")
        self.assertGreater(pair["bytes_per_second"], 0)
        finding = self.health()["/job:ps/task:0"]
        self.assertEqual((finding["stage"], finding["reason"]), ("paths", ""))
        local = next(t for t in finding["transports"] if t["name"] == "local")
        self.assertRegex(local["reason"], r"socket: no file; memory of users: .*; huge pages: \d+ reserved")

    def test_a_socket_in_a_folder(self):
        sockets = self.folder / "sockets"
        sockets.mkdir(mode=0o700)
        self.serve({"local": {"socket_folder": "sockets"}})  # the folder is next to the configuration
        other = self.served.start("worker", 0)
        self.await_pair("local")
        self.assertEqual(list(sockets.iterdir()), [], "a connected pair has no accept socket")
        local = next(t for t in self.health()["/job:ps/task:0"]["transports"] if t["name"] == "local")
        self.assertRegex(local["reason"], f"socket: {sockets};")
        other.stop()
        self.worker.stop()
        self.assertEqual(list(sockets.iterdir()), [])

    def test_one_that_cannot_have_it(self):
        """The worker warns once, names the transport and not a card, and says what to do."""
        self.serve({"local": {"socket_folder": "/nowhere/at/all"}, "connect": "lazy"})
        warnings = [line for line in self.worker.output.splitlines() if "level=warn" in line]
        self.assertEqual(len(warnings), 1, warnings)
        self.assertRegex(warnings[0], r'transport=local reason="cannot make a socket in /nowhere/at/all \(local.socket')
        self.assertEqual(self.pull()["paths"].keys(), {"grpc", "none"})

    @unittest.skipIf(os.geteuid() != 0, "only root can start a process of another user")
    def test_two_users(self):
        """Workers of two users do not share memory and do not try again and again; their tensors travel over gRPC."""
        self.folder.chmod(0o755)
        self.serve({"jobs": {"worker": {"connect": "lazy"}}})
        other = self.served.start("worker", 0, user=65534, group=65534)
        wait_until(lambda: "only workers of one user" in self.pair(None)["reason"], "each worker refuses the other one")
        began, before = time.monotonic(), self.counters()["data_reactor_sleeps"]
        time.sleep(1)  # repeated attempts would follow each other within tenths of a second
        sleeps = self.counters()["data_reactor_sleeps"] - before
        self.assertLess(sleeps / (time.monotonic() - began), 8, "the reactor wakes only rarely")
        pair = self.pair()
        self.assertEqual(pair["transport"], "grpc")
        self.assertNotIn("local: local:", pair["reason"])
        finding = self.health()["/job:ps/task:0"]
        self.assertEqual(finding["stage"], "paths", finding)
        self.assertRegex(finding["reason"],
                         "over grpc to /job:worker/task:0: local: .* only workers of one user share memory")
        for worker in (self.worker, other):
            line = worker.find("transport=local reason=")
            self.assertRegex(line, "user (0|65534) and this worker to user (0|65534); "
                                   "only workers of one user share memory")

    def test_one_that_does_not_want_it(self):
        self.serve({"jobs": {"worker": {"protocol": "grpc+verbs", "rdma": "off"}}})
        self.served.start("worker", 0)
        wait_until(lambda: self.pair(None)["state"] == "up", "connected")
        pair = self.pair()
        self.assertEqual(pair["transport"], "grpc")
        self.assertIn("local: ", pair["reason"])


class ClientPeer(LocalCase):
    """The program pull is no task, so that the top level of the configuration decides how its tensors travel."""

    def test_the_configuration_decides(self):
        self.serve({"protocol": "grpc", "jobs": {"ps": {"protocol": "auto"}}})
        self.assertLessEqual(set(self.pull()["paths"]), {"grpc", "none"})
        self.assertLessEqual(set(self.pull("--protocol", "auto")["paths"]), {"zero-copy", "bounce", "inline", "none"})

    def test_shared_memory_as_configured(self):
        (self.folder / "sockets").mkdir(mode=0o700)
        self.serve({"protocol": "grpc+local", "local": {"process_vm": "off", "socket_folder": "sockets"},
                    "jobs": {"ps": {"local": {"process_vm": "auto"}}}}, {"w": ("U8", (1 << 20,), bytes(1 << 20))})
        self.assertEqual(self.pull()["paths"], {"bounce": 1})

    def test_the_worker_wants_another_transport(self):
        self.serve({"protocol": "grpc+local", "jobs": {"ps": {"protocol": "grpc"}}})
        self.assertLessEqual(set(self.pull()["paths"]), {"grpc", "none"})
        self.serve({"protocol": "grpc+local", "rdma": "require", "jobs": {"ps": {"protocol": "grpc"}}})
        self.assert_error(1, "rdma is .require.*the protocol is grpc", "pull", *self.target, "-o",
                          self.folder / "required.safetensors")
        self.assertFalse((self.folder / "required.safetensors").exists())


class Death(LocalCase):
    def setUp(self):
        super().setUp()
        self.serve({"connect": "eager"}, {"zeros": ("U8", (LARGE,), b"")}, {"zeros": LARGE})

    def pull_again_and_again(self, results, stop):
        while not stop.is_set():
            out = self.folder / "again.safetensors"
            results.append(run("pull", *self.target, "-o", out, "--no-checksum", "--timeout", "30s").returncode)

    def test_killed_and_restarted(self):
        """A worker notices at once that its peer was killed, and has a local path to the restarted peer."""
        other = self.served.start("worker", 0)
        self.await_pair("local")
        for _ in range(3):
            other.send(signal.SIGKILL)
            other.wait()
            wait_until(lambda: self.pair(None)["state"] != "up", "the death is noticed")
            other = self.served.start("worker", 0)
            self.await_pair("local")
        self.assertIsNone(self.worker.process.poll())

    def test_the_owner_is_killed_while_it_sends(self):
        """When the owner was killed and started again, pulls succeed again."""
        results, stop = [], threading.Event()
        puller = threading.Thread(target=self.pull_again_and_again, args=(results, stop))
        puller.start()
        try:
            for _ in range(3):
                count = len(results)
                wait_until(lambda count=count: len(results) > count, "a pull has ended")
                time.sleep(0.05)
                self.worker.send(signal.SIGKILL)
                self.worker.wait()
                self.worker = self.served.start("ps", 0, "--publish", self.model)
        finally:
            stop.set()
            puller.join()
        self.assertEqual(self.assert_run(0, "pull", *self.target, "-o", self.folder / "out.safetensors").returncode, 0)

    def test_a_puller_is_killed(self):
        """A puller that was killed leaves no open descriptor in the worker."""
        def descriptors():
            return len(os.listdir(f"/proc/{self.worker.pid}/fd"))
        self.pull()
        idle = descriptors()
        for _ in range(5):
            puller = self.spawn("pull", *self.target, "-o", self.folder / "out.safetensors")
            time.sleep(0.05)
            puller.send(signal.SIGKILL)
            puller.wait()
        wait_until(lambda: descriptors() <= idle + 1, "descriptors are closed")
        self.pull()

    def test_sigterm_under_load(self):
        """A worker that is asked to stop lets running transfers finish, and then stops."""
        pullers = [self.spawn("pull", *self.target, "-o", self.folder / f"{i}.safetensors", "--timeout", "5s")
                   for i in range(3)]
        time.sleep(0.1)
        self.assertEqual(self.worker.stop(), 0, self.worker.output)
        self.assertIn("worker stopped", self.worker.output)
        for puller in pullers:
            self.assertIn(puller.wait(), (0, 1), puller.output)


class Many(LocalCase):
    def test_all_to_all(self):
        count = 12
        self.served = self.cluster(node=count, extra={"connect": "eager"})
        launcher = self.spawn("up", "--config", self.served.path)
        launcher.await_line("all ready after")

        def all_local():
            return all(worker.get("peers") and all(peer["transport"] in ("local", "self") for peer in worker["peers"])
                       for worker in self.health(None).values())
        wait_until(all_local, "all pairs are local")
        self.assertEqual(launcher.stop(), 0)


if __name__ == "__main__":
    if not pathlib.Path("/proc/sys/kernel/random/boot_id").exists():
        raise unittest.SkipTest("no boot id")
    cli_support.main()
