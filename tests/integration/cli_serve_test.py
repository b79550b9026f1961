#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""tensorlane serve: readiness, signals, the service manager, published files, and everything that keeps it from
starting."""
import contextlib
import json
import os
import pathlib
import resource
import signal
import socket
import subprocess
import threading
import time
import unittest

import grpc

import cli_support
from cli_support import HEALTH, environment, free_ports, run, some_tensors, wait_until, write_safetensors


class Ready(cli_support.Case):
    def test_readiness_line(self):
        cluster = self.cluster(ps=1)
        model = write_safetensors(self.folder / "model.safetensors", some_tensors())
        worker = cluster.start("ps", 0, "--publish", model)
        line = worker.find("worker ready")
        self.assertIn("level=info msg=\"worker ready\" name=/job:ps/task:0", line)
        self.assertIn(f"address={cluster.address()} port={cluster.port()} incarnation=", line)
        self.assertIn(f"published={len(some_tensors())}", line)
        self.assertEqual(worker.stop(), 0)
        self.assertIn("worker stopped", worker.output)

    def test_readiness_is_logged_at_every_level(self):
        worker = self.cluster(ps=1).start("ps", 0, "--log-level", "error")
        self.assertEqual(worker.stop(), 0)
        self.assertEqual(len(worker.lines), 1, worker.output)

    def test_log_as_json(self):
        worker = self.cluster(ps=1).start("ps", 0, "--log-format", "json")
        line = json.loads(worker.find("worker ready"))
        self.assertEqual((line["msg"], line["name"]), ("worker ready", "/job:ps/task:0"))
        self.assertEqual(worker.stop(), 0)

    def test_log_as_configured(self):
        worker = self.cluster(ps=1, extra={"log": {"format": "json", "level": "error"}}).start()
        self.assertEqual(worker.stop(), 0)
        self.assertEqual(len(worker.lines), 1, worker.output)
        json.loads(worker.lines[0])

    def test_wrong_log_flags(self):
        config = self.cluster(ps=1).path
        start = ("serve", "--config", config, "--job", "ps")
        self.assert_error(2, "there are error, warn, info and debug", *start, "--log-level", "loud")
        self.assert_error(2, "there are key-value and json", *start, "--log-format", "xml")

    def test_configuration_from_standard_input(self):
        cluster = self.cluster(ps=1)
        with open(cluster.path, encoding="ascii") as text:
            worker = self.spawn("serve", "--config", "-", "--job", "ps", stdin=text)
        worker.await_line("worker ready")
        self.assertEqual(worker.stop(), 0)

    def test_configuration_from_tf_config(self):
        port, other = free_ports(2)
        tf_config = {"cluster": {"ps": [f"127.0.0.1:{port}"], "worker": [f"127.0.0.1:{other}"]},
                     "task": {"type": "worker", "index": 0}}
        worker = self.spawn("serve", env=environment(TF_CONFIG=json.dumps(tf_config)))
        self.assertIn("name=/job:worker/task:0", worker.await_line("worker ready"))
        self.assertEqual(worker.stop(), 0)

    def test_variables_of_tensorflow(self):
        cluster = self.cluster(ps=1)
        worker = self.spawn("serve", "-c", cluster.path, "-j", "ps",
                            env=environment(RDMA_QP_TIMEOT="14", RDMA_QP_TIMEOUT="14"))
        worker.await_line("worker ready")
        self.assertIn('reason="environment variable \\"RDMA_QP_TIMEOT\\" has no effect; did you mean '
                      '\\"RDMA_QP_TIMEOUT\\"?"', worker.find("level=warn"))
        self.assert_error(1, "environment variables RDMA_QP_TIMEOUT and RDMA_TIMEOUT are 14 and 15", "serve", "-c",
                          cluster.path, "-j", "ps", env=environment(RDMA_QP_TIMEOUT="14", RDMA_TIMEOUT="15"))

    def test_an_evaluator_is_not_in_the_cluster(self):
        tf_config = {"cluster": {"ps": [f"127.0.0.1:{free_ports(1)[0]}"]}, "task": {"type": "evaluator", "index": 0}}
        worker = self.spawn("serve", env=environment(TF_CONFIG=json.dumps(tf_config)))
        self.assertIn("name=/job:evaluator/task:0", worker.await_line("worker ready"))
        self.assertEqual(worker.stop(), 0)

    def test_listening_elsewhere(self):
        cluster = self.cluster(ps=1, extra={"publish": ["model.safetensors"]})
        write_safetensors(self.folder / "model.safetensors", {"a": ("F32", (1,), b"abcd")})
        elsewhere = f"127.0.0.1:{free_ports(1)[0]}"
        worker = cluster.start("ps", 0, "--listen", elsewhere)
        self.assertIn(f"address={cluster.address()} port={elsewhere.split(':')[1]}", worker.find("worker ready"))
        self.assertIn("1 tensor,", self.assert_run(0, "ls", "--address", elsewhere).stdout)
        self.assert_run(2, "health", cluster.address())

    def test_listening_on_a_port_that_the_system_chooses(self):
        worker = self.cluster(ps=1).start("ps", 0, "--listen", "127.0.0.1:0")
        port = worker.find("worker ready").split(" port=")[1].split()[0]
        self.assert_run(0, *HEALTH, f"127.0.0.1:{port}")

    def test_configured_and_given_files(self):
        cluster = self.cluster(ps=1, extra={"publish": ["one.safetensors"]})
        write_safetensors(self.folder / "one.safetensors", {"a": ("F32", (1,), b"abcd")})
        write_safetensors(self.folder / "two.safetensors", {"b": ("F32", (1,), b"abcd")})
        worker = cluster.start("ps", 0, "--publish", "two.safetensors", cwd=self.folder)
        self.assertIn("published=2", worker.find("worker ready"))

    def test_low_limit_of_file_sizes(self):
        """Shared memory counts as a file. Without it there is gRPC."""
        def lower():
            resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 10, 100 << 10))
        model = write_safetensors(self.folder / "model.safetensors", some_tensors())
        cluster = self.cluster(ps=1)
        worker = cluster.start("ps", 0, "--publish", model, preexec_fn=lower)
        pulled = self.assert_run(0, "pull", "--config", cluster.path, "--from", "ps:0", "-o", self.folder / "copy.st",
                                 preexec_fn=lower)
        self.assertRegex(pulled.stdout, "paths: .*grpc 6\n")
        self.assertEqual(worker.stop(), 0)

    def test_low_limit_of_open_files(self):
        def lower():
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        worker = self.cluster(ps=1).start(preexec_fn=lower)
        self.assertIn("limit=256", worker.find("limit of open files"))
        self.assertEqual(worker.stop(), 0)

    def test_soft_limit_of_open_files_is_raised(self):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if hard == resource.RLIM_INFINITY or hard <= 300:
            self.skipTest("the hard limit of open files is not usable")
        worker = self.cluster(ps=1).start(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)))
        limits = pathlib.Path(f"/proc/{worker.pid}/limits").read_text()
        soft = next(line.split()[3] for line in limits.splitlines() if line.startswith("Max open files"))
        self.assertEqual(soft, str(hard))

    def test_as_many_files_as_it_may_open_at_most(self):
        """The soft limit is raised before the files are opened."""
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if hard != resource.RLIM_INFINITY and hard <= 600:
            self.skipTest("the hard limit of open files is not usable")
        publish = []
        for number in range(300):
            path = write_safetensors(self.folder / f"{number}.safetensors", {f"t{number}": ("U8", (1,), b"x")})
            publish += ["--publish", path]
        worker = self.cluster(ps=1).start("ps", 0, *publish, preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_NOFILE, (256, hard)))
        self.assertIn("published=300", worker.find("worker ready"))


class NoReader(cli_support.Case):
    """Standard error is a full pipe without a reader."""

    def start(self, cluster, *arguments):
        self.read_end, write_end = os.pipe()
        self.addCleanup(os.close, self.read_end)
        os.set_blocking(write_end, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write_end, b"." * 4096)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write_end, b".")
        os.set_blocking(write_end, True)
        worker = subprocess.Popen([cli_support.PROGRAM, "serve", "--config", cluster.path, "--job", "ps", "--log-level",
                                   "debug", *arguments], env=environment(), stdin=subprocess.DEVNULL,
                                  stdout=subprocess.DEVNULL, stderr=write_end)
        os.close(write_end)
        self.addCleanup(worker.wait)
        self.addCleanup(worker.kill)
        wait_until(lambda: run("health", cluster.address()).returncode == 0, "serving")
        return worker

    def await_in_pipe(self, text):
        read = b""
        os.set_blocking(self.read_end, False)

        def is_there():
            nonlocal read
            with contextlib.suppress(BlockingIOError):
                read += os.read(self.read_end, 65536)
            return text in read
        wait_until(is_there, text)
        return read.lstrip(b".").decode()

    def test_it_serves_and_ends(self):
        cluster = self.cluster(ps=1)
        model = write_safetensors(self.folder / "model.safetensors", some_tensors())
        worker = self.start(cluster, "--publish", model)
        self.assert_run(0, "pull", "--address", cluster.address(), "-o", self.folder / "out.safetensors")
        worker.send_signal(signal.SIGHUP)
        self.assert_run(0, *HEALTH, cluster.address())
        worker.send_signal(signal.SIGTERM)
        self.assertEqual(worker.wait(cli_support.PATIENCE), 0)

    def test_second_signal(self):
        cluster = self.cluster(ps=1, extra={**cli_support.OVER_GRPC, "timeouts": {"drain": "300s"}})
        size = 1 << 28
        model = write_safetensors(self.folder / "big.safetensors", {"zeros": ("U8", (size,), b"")}, {"zeros": size})
        worker = self.start(cluster, "--publish", model)
        gate = cli_support.Gate(self, cluster.port(), size // 8)
        self.spawn("pull", "--address", gate.address, "-o", self.folder / "out.safetensors", "--timeout", "300s")
        gate.await_held()
        worker.send_signal(signal.SIGTERM)
        wait_until(lambda: run(*HEALTH, cluster.address()).returncode != 0, "stopping")
        worker.send_signal(signal.SIGTERM)
        self.assertEqual(worker.wait(cli_support.PATIENCE), 1)

    def test_what_was_lost_is_counted(self):
        worker = self.start(self.cluster(ps=1))

        def is_taken():
            status = pathlib.Path(f"/proc/{worker.pid}/status").read_text()
            pending = next(line.split()[1] for line in status.splitlines() if line.startswith("ShdPnd:"))
            return int(pending, 16) & 1 == 0
        for _ in range(2):  # When the worker takes the second signal, it loses the line about the first.
            worker.send_signal(signal.SIGHUP)
            wait_until(is_taken, "SIGHUP is taken")
        self.await_in_pipe(b"....")
        worker.send_signal(signal.SIGHUP)
        text = self.await_in_pipe(b"SIGHUP is ignored")
        self.assertRegex(text, r"^ts=\S+ level=warn msg=\"lines were lost here: .*\" lines=[1-9][0-9]*\nts=")
        worker.send_signal(signal.SIGTERM)
        self.assertEqual(worker.wait(cli_support.PATIENCE), 0)


class Signals(cli_support.Case):
    def test_sigint_ends_it_too(self):
        self.assertEqual(self.cluster(ps=1).start().stop(signal.SIGINT), 0)

    def test_sighup_is_not_fatal(self):
        worker = self.cluster(ps=1).start()
        worker.send(signal.SIGHUP)
        worker.await_line("SIGHUP is ignored")
        self.assertEqual(worker.stop(), 0)

    def test_second_signal_ends_at_once(self):
        cluster = self.cluster(ps=1, extra={**cli_support.OVER_GRPC, "timeouts": {"drain": "300s"}})
        size = 1 << 28
        model = write_safetensors(self.folder / "big.safetensors", {"zeros": ("U8", (size,), b"")}, {"zeros": size})
        worker = cluster.start("ps", 0, "--publish", model)
        gate = cli_support.Gate(self, cluster.port(), size // 8)
        self.spawn("pull", "--address", gate.address, "-o", self.folder / "out.safetensors", "--timeout", "300s")
        gate.await_held()
        worker.send(signal.SIGTERM)
        worker.await_line("worker stopping")
        self.assertIsNone(worker.process.poll())
        worker.send(signal.SIGTERM)
        self.assertEqual(worker.wait(), 1)
        self.assertIn("second signal", worker.output)

    def test_running_transfers_may_finish(self):
        cluster = self.cluster(ps=1, extra={**cli_support.OVER_GRPC, "timeouts": {"drain": "300s"}})
        size = 1 << 28
        model = write_safetensors(self.folder / "big.safetensors", {"zeros": ("U8", (size,), b"")}, {"zeros": size})
        worker = cluster.start("ps", 0, "--publish", model)
        gate = cli_support.Gate(self, cluster.port(), size // 8)
        puller = self.spawn("pull", "--address", gate.address, "-o", self.folder / "out.safetensors")
        gate.await_held()
        worker.send(signal.SIGTERM)
        worker.await_line("worker stopping")
        gate.open()
        self.assertEqual(puller.wait(), 0, puller.output)
        self.assertEqual(worker.wait(), 0)

    def test_ends_with_its_parent(self):
        cluster = self.cluster(ps=1)
        script = '"$0" serve --config "$1" --job ps --parent $$ & wait'
        shell = subprocess.Popen(["/bin/sh", "-c", script, cli_support.PROGRAM, cluster.path], env=environment(),
                                 stderr=subprocess.PIPE, text=True)
        with shell:
            is_ready = any("worker ready" in line for line in iter(shell.stderr.readline, ""))
            shell.kill()
            self.assertTrue(is_ready)
            self.assertIn("worker stopped", shell.stderr.read())

    def test_a_parent_that_is_none(self):
        self.assert_error(1, "that started this one has ended", "serve", "--config", self.cluster(ps=1).path, "--job",
                          "ps", "--parent", "1")


class ServiceManager(cli_support.Case):
    def listen(self, address):
        manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(manager.close)
        manager.bind(address)
        manager.settimeout(cli_support.PATIENCE)
        return manager

    def receive(self, manager, wanted):
        while True:
            text = manager.recv(4096).decode()
            if wanted in text.splitlines():
                return text

    def receive_anew(self, manager, wanted, count):
        """Waits for so many messages that were sent from now on."""
        manager.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while manager.recv(4096):
                pass
        manager.settimeout(cli_support.PATIENCE)
        for _ in range(count):
            self.receive(manager, wanted)

    def test_notification(self):
        path = str(self.folder / "notify")
        manager = self.listen(path)
        worker = self.cluster(ps=1).start(env=environment(NOTIFY_SOCKET=path))
        self.assertIn("STATUS=/job:ps/task:0 serves 0 published tensors", self.receive(manager, "READY=1"))
        worker.send(signal.SIGTERM)
        self.assertIn("STATUS=", self.receive(manager, "STOPPING=1"))
        self.assertEqual(worker.wait(), 0)

    def test_a_long_drain(self):
        """The manager is told how long to wait."""
        path = str(self.folder / "notify")
        manager = self.listen(path)
        worker = self.cluster(ps=1, extra={"timeouts": {"drain": "2h"}}).start(env=environment(NOTIFY_SOCKET=path))
        self.receive(manager, "READY=1")
        worker.send(signal.SIGTERM)
        self.assertIn("\nEXTEND_TIMEOUT_USEC=7210000000\n", self.receive(manager, "STOPPING=1"))
        self.assertEqual(worker.wait(), 0)

    def test_abstract_name(self):
        name = f"tensorlane-test-{os.getpid()}"
        manager = self.listen("\0" + name)
        self.cluster(ps=1).start(env=environment(NOTIFY_SOCKET="@" + name))
        self.receive(manager, "READY=1")

    def test_watchdog(self):
        path = str(self.folder / "notify")
        manager = self.listen(path)
        self.cluster(ps=1).start(env=environment(NOTIFY_SOCKET=path, WATCHDOG_USEC=1000000))
        for _ in range(3):
            self.receive(manager, "WATCHDOG=1")

    def test_watchdog_of_a_worker_with_certificates(self):
        """The worker is asked with TLS. When its certificate has been revoked, it answers all the same."""
        certs = self.folder / "certs"
        tls = {"ca": "certs/ca.pem", "crl": "certs/ca.crl", "certificate": "certs/{name}.pem",
               "key": "certs/{name}.key"}
        cluster = self.cluster(ps=1, extra={"security": {"tls": tls, "allow": [{"who": ["any"], "what": ["read"]}]}})
        self.assert_run(0, "cert", "init", "-o", certs)
        self.assert_run(0, "cert", "issue", "-o", certs, "--config", cluster.path)
        path = str(self.folder / "notify")
        manager = self.listen(path)
        worker = cluster.start(env=environment(NOTIFY_SOCKET=path, WATCHDOG_USEC=1000000))
        for _ in range(2):
            self.receive(manager, "WATCHDOG=1")
        self.assert_run(0, "cert", "revoke", "-o", certs, certs / "ps-0.pem")
        worker.await_line("certificates loaded again")
        self.receive_anew(manager, "WATCHDOG=1", 4)  # these take two periods after which files are looked at
        self.assertEqual(worker.output.count("certificates loaded again"), 1)

    def test_watchdog_while_others_hold_all_connections(self):
        """A worker that refuses the call to itself has answered it."""
        cluster = self.cluster(ps=1, extra={"limits": {"connections": 4}})
        path = str(self.folder / "notify")
        manager = self.listen(path)
        cluster.start(env=environment(NOTIFY_SOCKET=path, WATCHDOG_USEC=1000000))
        channel = self.enterContext(grpc.insecure_channel(cluster.address()))
        is_over = threading.Event()
        self.addCleanup(is_over.set)
        reflect = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        held = []

        def requests():
            yield b"\x3a\x00"  # which services there are
            is_over.wait()

        def hold():
            """Three quarters of the limit are one address's. The worker's own call may have one of them just now."""
            call = reflect(requests())
            try:
                next(call)
            except grpc.RpcError as refusal:
                self.assertIn("limits.connections", refusal.details())
                return False
            held.append(call)
            return len(held) == 3
        wait_until(hold, "three calls")
        wait_until(lambda: "limits.connections" in run("ls", "--address", cluster.address()).stderr, "a refusal")
        self.receive_anew(manager, "WATCHDOG=1", 2)
        self.assertTrue(all(call.is_active() for call in held))

    def test_watchdog_of_another_process(self):
        path = str(self.folder / "notify")
        manager = self.listen(path)
        worker = self.cluster(ps=1).start(env=environment(NOTIFY_SOCKET=path, WATCHDOG_USEC=50000, WATCHDOG_PID=1))
        self.receive(manager, "READY=1")
        time.sleep(0.5)
        worker.send(signal.SIGTERM)
        self.assertNotIn("WATCHDOG=1", manager.recv(4096).decode())

    def test_manager_that_is_not_there(self):
        worker = self.cluster(ps=1).start(env=environment(NOTIFY_SOCKET=str(self.folder / "nobody")))
        worker.await_line("service manager was not notified")
        self.assertEqual(worker.stop(), 0)

    def test_socket_names_that_cannot_be(self):
        for name, reason in (("relative", "neither an absolute path"), ("/" + "a" * 200, "not 2 to 107 bytes")):
            worker = self.cluster(ps=1).start(env=environment(NOTIFY_SOCKET=name))
            self.assertIn(reason, worker.await_line("service manager was not notified"))
            self.assertEqual(worker.stop(), 0)


class Refused(cli_support.Case):
    def refuse(self, pattern, *arguments, config=None, **options):
        config = config or self.cluster(ps=1).path
        return self.assert_error(1, "^tensorlane serve: .*" + pattern, "serve", "--no-wait", "--config", config,
                                 "--job", "ps", *arguments, **options)

    def test_bad_configuration(self):
        bad = self.folder / "bad.json"
        bad.write_text('{"cluster": {"ps": ["127.0.0.1:99999"]}}')
        self.refuse("bad.json:1:", config=bad)
        self.refuse("nowhere.json", config=self.folder / "nowhere.json")
        self.assert_error(1, "standard input:1:1: ", "serve", "--config", "-", "--job", "ps", input="x")

    def test_no_configuration(self):
        self.assert_error(1, "give --config FILE or set the environment variable TF_CONFIG", "serve")
        self.assert_error(1, "TF_CONFIG", "serve", env=environment(TF_CONFIG="[]"))

    def test_no_such_task(self):
        config = self.cluster(ps=1).path
        self.assert_error(1, "which task\\?", "serve", "--config", config)
        self.assert_error(1, "ps", "serve", "--config", config, "--job", "pss")
        self.refuse("task", "--task", "7", config=config)

    def test_a_number_without_its_job(self):
        task = {"cluster": {"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2", "127.0.0.1:3"]},
                "task": {"type": "worker", "index": 0}}
        for command in (["serve"], ["config", "show"], ["devices"]):
            self.assert_error(1, "--task 1 of which job\\? --job; without both, /job:worker/task:0", *command,
                              "--task", 1, env=environment(TF_CONFIG=json.dumps(task)))

    def test_a_configuration_from_a_pipe(self):
        cluster = self.cluster(ps=1)
        cluster.start()
        read_end, write_end = os.pipe()
        self.addCleanup(os.close, read_end)
        os.write(write_end, cluster.path.read_bytes())
        os.close(write_end)
        self.assert_error(1, f"{cluster.address()}: another process uses the address", "serve", "--config",
                          f"/dev/fd/{read_end}", "--job", "ps", "--no-wait", pass_fds=[read_end])

    def test_port_in_use(self):
        cluster = self.cluster(ps=1)
        cluster.start()
        self.refuse(f"{cluster.address()}: another process uses the address", config=cluster.path)

    def test_an_address_of_another_machine(self):
        self.refuse("192.0.2.1", "--listen", "192.0.2.1:4000")

    def test_files_that_cannot_be_published(self):
        self.refuse("missing.safetensors", "--publish", self.folder / "missing.safetensors")
        self.refuse("not a regular file", "--publish", self.folder)
        model = write_safetensors(self.folder / "model.safetensors", some_tensors())
        whole = model.read_bytes()
        for length in (0, 7, 20, len(whole) - 1):
            cut = self.folder / "cut.safetensors"
            cut.write_bytes(whole[:length])
            self.refuse("cut.safetensors", "--publish", cut)

    def test_a_file_that_is_cut_off_meanwhile(self):
        """A file is read for the first time before there is a worker."""
        tensors = {f"t{number}": ("U8", (0,), b"") for number in range(100000)}
        path = write_safetensors(self.folder / "many.safetensors", tensors)
        worker = self.spawn("serve", "--config", self.cluster(ps=1).path, "--job", "ps", "--publish", path, "--no-wait")
        wait_until(lambda: str(path) in pathlib.Path(f"/proc/{worker.pid}/maps").read_text(), "mapped")
        os.truncate(path, 4096)
        self.assertEqual(worker.wait(), 1, worker.output)
        self.assertIn("many.safetensors had ", worker.output)

    def test_empty_files_and_archives_are_called_so(self):
        config = self.cluster(ps=1).path
        for name, content, pattern in (
                ("a.safetensors", b"", "a.safetensors is empty"), ("b.npy", b"", "b.npy is empty"),
                ("c.npz", b"PK\x03\x04" + bytes(60), "c.npz is a zip archive, as .npz files are")):
            (self.folder / name).write_bytes(content)
            self.assert_error(1, pattern, "serve", "--no-wait", "--config", config, "--job", "ps", "--publish",
                              self.folder / name)

    def test_a_port_that_the_user_may_not_use(self):
        without = ["setpriv", "--bounding-set=-net_bind_service", "--inh-caps=-net_bind_service"]
        if subprocess.run([*without, "true"], check=False, capture_output=True).returncode != 0:
            self.skipTest("the capability cannot be given up here")
        result = subprocess.run([*without, cli_support.PROGRAM, "serve", "--config", self.cluster(ps=1).path, "--job",
                                 "ps", "--listen", "127.0.0.1:1"], check=False, capture_output=True, text=True,
                                timeout=cli_support.PATIENCE)
        self.assertEqual(result.returncode, 1)
        self.assertIn("choose a larger one, or give the process CAP_NET_BIND_SERVICE", result.stderr)

    def test_one_name_in_two_files(self):
        one = write_safetensors(self.folder / "one.safetensors", {"a": ("F32", (1,), b"abcd")})
        two = write_safetensors(self.folder / "two.safetensors", {"a": ("F32", (1,), b"abcd")})
        self.refuse("'a' is in .*one.safetensors and in .*two.safetensors", "--publish", one, "--publish", two)

    def test_an_unreadable_file(self):
        if os.geteuid() == 0:
            self.skipTest("root may read everything")
        model = write_safetensors(self.folder / "model.safetensors", some_tensors())
        model.chmod(0)
        self.refuse("model.safetensors.*ermission", "--publish", model)


@unittest.skipIf(os.path.isdir("/sys/class/infiniband") and os.listdir("/sys/class/infiniband"),
                 "this machine has an RDMA device, so that nothing keeps the worker from starting")
class LastWords(cli_support.Case):
    """A worker that cannot start says why to those who ask at its address."""
    REASON, REMEDY = "no RDMA device", 'or set rdma to "prefer", which allows gRPC'

    def setUp(self):
        super().setUp()
        self.refused = self.cluster(ps=1, worker=1, extra={"connect": "eager", "jobs": {
            "ps": {"protocol": "grpc+verbs", "rdma": "require"}, "worker": {"protocol": "grpc"}}})

    def start(self, *arguments, **options):
        worker = self.spawn("serve", "--config", self.refused.path, "--job", "ps", *arguments, **options)
        worker.await_line("the worker cannot start; it says why")
        return worker

    def assert_ended(self, worker, code):
        self.assertEqual(code, 1)
        self.assertRegex(worker.lines[-1], f'^tensorlane serve: rdma is "require".*{self.REASON}.*{self.REMEDY}')

    def test_health_has_the_reason(self):
        worker = self.start()
        begin = time.monotonic()
        shown = json.loads(self.assert_run(4, *HEALTH, "--config", self.refused.path, "--json").stdout)
        cli_support.assert_soon(self, begin)
        finding = shown["workers"][0]
        self.assertEqual((finding["healthy"], finding["stage"], finding["verified"]), (False, "serving", "identity"))
        self.assertRegex(finding["reason"], f"^it could not start: .*{self.REASON}")
        self.assertIn(self.REMEDY, finding["remedy"])
        self.assertEqual((finding["host_name"], finding["process_id"]), (socket.gethostname(), worker.process.pid))
        self.assert_error(4, "NOT_SERVING", *HEALTH, self.refused.address())
        self.assert_ended(worker, worker.stop())

    def test_others_are_refused_with_the_reason(self):
        worker = self.start()
        address = self.refused.address()
        model = write_safetensors(self.folder / "model.safetensors", some_tensors())
        for command in (("ls", "--address", address), ("push", model, "--address", address),
                        ("pull", "--address", address, "-o", self.folder / "out.safetensors")):
            self.assert_error(1, f"/job:ps/task:0 could not start: .*{self.REASON}", *command)
        peer = self.refused.start("worker", 0, "--log-level", "info")
        self.assertRegex(peer.await_line("peer cannot be reached"), f"could not start: .*{self.REASON}")
        self.assert_ended(worker, worker.stop(signal.SIGINT))

    def test_it_ends_by_itself(self):
        worker = self.start("--last-words", "200ms")
        self.assert_ended(worker, worker.wait())

    def test_no_wait(self):
        self.assert_error(1, f'^tensorlane serve: rdma is "require".*{self.REASON}', "serve", "--no-wait", "--config",
                          self.refused.path, "--job", "ps")

    def test_a_path_that_is_not_utf8(self):
        cluster = self.cluster(ps=1)
        path = self.folder / os.fsdecode(b"model-\xe9.safetensors")
        write_safetensors(path, some_tensors())
        write_safetensors(self.folder / "model-\\xE9.safetensors", some_tensors())  # as messages show that path
        self.assert_error(1, r"the path .*model-\\xE9.safetensors is not UTF-8", "serve", "--no-wait", "--config",
                          cluster.path, "--job", "ps", "--publish", path)
        worker = self.spawn("serve", "--config", cluster.path, "--job", "ps", "--publish", path)
        worker.await_line("the worker cannot start")
        shown = json.loads(self.assert_run(4, "health", "--config", cluster.path, "--json").stdout)
        self.assertRegex(shown["workers"][0]["reason"], r"^it could not start: .*model-\?\.safetensors is not UTF-8")
        self.assertEqual(worker.stop(), 1)

    def test_a_file_that_is_not_there(self):
        cluster = self.cluster(ps=1)
        worker = self.spawn("serve", "--config", cluster.path, "--job", "ps", "--publish", self.folder / "nowhere")
        self.assertRegex(worker.await_line("the worker cannot start"), 'reason="cannot open .*nowhere: No such file')
        shown = json.loads(self.assert_run(4, "health", "--config", cluster.path, "--json").stdout)
        self.assertRegex(shown["workers"][0]["reason"], "^it could not start: .*nowhere: No such file")
        self.assertEqual(worker.stop(), 1)

    def test_the_service_manager_is_told(self):
        path = str(self.folder / "notify")
        manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(manager.close)
        manager.bind(path)
        manager.settimeout(cli_support.PATIENCE)
        worker = self.start(env=environment(NOTIFY_SOCKET=path))
        self.assertRegex(manager.recv(4096).decode(), f'^STATUS=cannot start: rdma is "require".*{self.REASON}')
        self.assert_ended(worker, worker.stop())

    def test_up_shows_the_reason(self):
        launcher = self.spawn("up", "--config", self.refused.path)
        self.assertEqual(launcher.wait(), 1)
        self.assertRegex(launcher.find("tensorlane up: /job:ps/task:0"),
                         f'ended with exit status 1; stopping all: rdma is "require".*{self.REASON}.*{self.REMEDY}')


if __name__ == "__main__":
    cli_support.main()
