#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""How a worker behaves in an unusual environment (proxies that it must not use, a log without a reader, signals), and
what it logs there, line by line."""
import json
import os
import resource
import signal
import socket
import subprocess
import threading
import unittest

import cli_support
from cli_support import HEALTH, PATIENCE, environment, run, some_tensors, wait_until, write_safetensors


class Counter:
    """A port that accepts connections, hangs up and counts them."""

    def __init__(self, case, port=0):
        self.listener = socket.create_server(("127.0.0.1", port))
        self.port = self.listener.getsockname()[1]
        self.count = 0
        threading.Thread(target=self._accept, daemon=True).start()
        case.addCleanup(self.listener.close)

    def _accept(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.count += 1
            connection.close()


class Proxies(cli_support.Case):
    def test_workers_do_not_use_them(self):
        proxy = Counter(self)
        url = f"http://127.0.0.1:{proxy.port}"
        names = ("grpc_proxy", "http_proxy", "https_proxy", "all_proxy")
        env = environment(**{name: url for name in names}, **{name.upper(): url for name in names}, no_proxy=None,
                          NO_PROXY=None, no_grpc_proxy=None)
        model = write_safetensors(self.folder / "model.safetensors", some_tensors())
        served = self.cluster(ps=1, worker=1, extra={"connect": "eager"})
        worker = served.start("ps", 0, "--publish", model, env=env)
        served.start("worker", 0, env=env)
        worker.await_line("peer up")
        from_ps = ("--config", served.path, "--from", "ps:0")
        self.assert_probed(0, *HEALTH, "--config", served.path, env=env)
        self.assert_run(0, *HEALTH, served.address(), env=env)
        self.assert_run(0, "ls", *from_ps, env=env)
        self.assert_run(0, "pull", *from_ps, "-o", self.folder / "out.safetensors", env=env)
        self.assert_run(0, "push", model, "--config", served.path, "--to", "worker:0", env=env)
        self.assert_run(0, "rm", "*", *from_ps, env=env)
        self.assertEqual(proxy.count, 0)


class Surroundings(cli_support.Case):
    def test_sigpipe_is_nothing(self):
        served = self.cluster(ps=1)
        worker = served.start()
        worker.send(signal.SIGPIPE)
        self.assert_run(0, *HEALTH, served.address())
        self.assertEqual(worker.stop(), 0)

    def test_the_reader_of_the_log_has_gone(self):
        served = self.cluster(ps=1)
        read_end, write_end = os.pipe()
        worker = subprocess.Popen([cli_support.PROGRAM, "serve", "--config", served.path, "--job", "ps"],
                                  env=environment(), stdout=write_end, stderr=write_end)
        self.addCleanup(worker.wait)
        self.addCleanup(worker.kill)
        os.close(write_end)
        os.close(read_end)
        wait_until(lambda: run("health", served.address()).returncode == 0, "a healthy worker")
        worker.send_signal(signal.SIGHUP)  # The worker logs this signal.
        self.assert_run(0, *HEALTH, served.address())
        worker.send_signal(signal.SIGTERM)
        self.assertEqual(worker.wait(timeout=PATIENCE), 0)


class Log(cli_support.Case):
    def lines_of(self, worker):
        """Returns all lines, each of which must be JSON with the fields that every line has."""
        result = [json.loads(line) for line in worker.lines]
        for line in result:
            self.assertRegex(line["ts"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")
            self.assertIn(line["level"], ("error", "warn", "info", "debug"))
            self.assertNotEqual(line["msg"], "")
        return result

    def make_trouble(self, served, worker):
        """Causes log lines: peers that come and go, nonsense, transfers, a lack of descriptors."""
        other = self.cluster("other.json", ps=1)
        other.path.write_text(json.dumps({"cluster": {"worker": [other.address()], "ps": [served.address()]},
                                          "connect": "eager"}))
        self.spawn("serve", "--config", other.path, "--job", "worker").await_line("peer up")
        self.assert_run(0, "pull", "--address", served.address(), "-o", self.folder / "out.safetensors")
        clients = [socket.create_connection(("127.0.0.1", served.port())) for _ in range(200)]
        clients[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        clients[1].sendall(b"\xff\"\\\n{}\0" * 100)
        worker.await_line("new connections wait")
        for client in clients:
            client.close()
        worker.send(signal.SIGHUP)
        worker.await_line("SIGHUP is ignored")
        wait_until(lambda: run("health", served.address()).returncode == 0, "a healthy worker")

    def test_every_line_is_json(self):
        for level in ("info", "debug"):
            model = write_safetensors(self.folder / "model.safetensors", some_tensors())
            served = self.cluster(ps=1, worker=1, extra={"connect": "eager", "publish": [str(model)]})
            worker = served.start("ps", 0, "--log-format", "json", "--log-level", level,
                                  env=environment(GRPC_VERBOSITY="debug" if level == "debug" else "error"),
                                  preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)))
            self.make_trouble(served, worker)
            self.assertEqual(worker.stop(), 0)
            said = {line["msg"] for line in self.lines_of(worker)}
            self.assertLessEqual({"worker ready", "peer cannot be reached", "worker stopped",
                                  "new connections wait, because the limit of open files or of memory is "
                                  "reached"}, said)

    def test_tensors_are_not_in_it(self):
        """At level info a worker logs as many lines for 1500 tensors as for one."""
        counts = []
        for count in (1, 1500):
            model = write_safetensors(self.folder / "model.safetensors",
                                      {f"name of a tensor {n}": ("U8", (8,), bytes(8)) for n in range(count)})
            served = self.cluster(ps=1)
            worker = served.start("ps", 0, "--publish", model, "--log-format", "json", "--log-level", "info")
            out = self.folder / "out.safetensors"
            for command in (["pull", "-o", out], ["push", model], ["pull", "-o", out], ["rm", "*"]):
                self.assert_run(0, *command, "--address", served.address())
            self.assertEqual(worker.stop(), 0)
            self.assertNotIn("name of a tensor", worker.output)
            counts.append(len(self.lines_of(worker)))
        self.assertEqual(counts[0], counts[1], counts)

    def test_a_peer_that_is_not_there_is_said_once(self):
        """The worker logs once that a peer is missing, however often it tries to connect."""
        served = self.cluster(ps=1, worker=1, extra={"connect": "eager"})
        absent = Counter(self, served.port("worker"))
        worker = served.start("ps", 0)
        wait_until(lambda: absent.count > 6, "enough attempts")
        self.assertEqual(worker.stop(), 0)
        self.assertEqual(sum("peer cannot be reached" in line for line in worker.lines), 1, worker.output)

    def test_the_environment_is_not_in_it(self):
        secret = "s3cr3t-in-the-environment"
        served = self.cluster(ps=1)
        worker = served.start("ps", 0, "--log-level", "debug", env=environment(TOKEN=secret, GRPC_VERBOSITY="debug"))
        self.assert_run(0, *HEALTH, served.address())
        self.assertEqual(worker.stop(), 0)
        self.assertNotIn(secret, worker.output)


@unittest.skipIf(os.geteuid() != 0, "only root can act as another user, whose limit on threads counts")
@unittest.skipIf(cli_support.SANITIZE, "sanitizers need threads of their own")
class FewThreads(cli_support.Case):
    """With any limit on threads, every command works or says in time that it needs more threads."""
    LIMITS = range(1, 20)

    def as_user_with(self, count):
        """Returns the options of a process whose user runs nothing else and may have this many threads."""
        user = 100000 + os.getpid()
        return {"user": user, "group": user, "extra_groups": [],
                "preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NPROC, (count, count))}

    def setUp(self):
        super().setUp()
        self.folder.chmod(0o755)
        output = self.folder / "output"
        output.mkdir()
        output.chmod(0o777)
        self.out = output / "out.safetensors"
        self.served = self.cluster(ps=1)

    def try_commands(self, *commands):
        """Returns how often each command worked."""
        worked = [0] * len(commands)
        for count in self.LIMITS:
            for i, command in enumerate(commands):
                result = run(*command, **self.as_user_with(count))
                worked[i] += result.returncode == 0
                if result.returncode != 0:
                    self.assertRegex(result.stderr, "thread.* Resource temporarily unavailable")
        return worked

    def test_ls_and_pull(self):
        model = write_safetensors(self.folder / "model.safetensors", some_tensors())
        self.served.start("ps", 0, "--publish", model)
        peer = ("--config", self.served.path, "--from", "ps:0", "--timeout", "60s")
        worked = self.try_commands(["ls", *peer], ["pull", *peer, "-o", self.out], [*HEALTH, self.served.address()])
        self.assertGreater(min(worked), 0)

    def test_serve(self):
        """The worker listens or ends by itself; once it listens, SIGTERM ends it."""
        ready_count = 0
        for count in self.LIMITS:
            worker = self.spawn("serve", "--config", self.served.path, "--job", "ps", "--task", 0,
                                "--last-words", "200ms", **self.as_user_with(count))
            wait_until(lambda: worker.find("worker ready") or worker.process.poll() is not None, "it decides")
            code = worker.stop()
            is_ready = worker.find("worker ready") is not None
            self.assertEqual(code, 0 if is_ready else 1, worker.output)
            if not is_ready:
                self.assertRegex(worker.output, "tensorlane serve: .*thread.* Resource temporarily unavailable")
            ready_count += is_ready
        self.assertGreater(ready_count, 0)


if __name__ == "__main__":
    cli_support.main()
