#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Workers and tools under TLS: a cluster with certificates of tensorlane cert, and clients that may not be let in."""
import contextlib
import json
import os
import pathlib
import re
import resource
import shutil
import socket
import ssl
import subprocess
import unittest

import cli_support
from cli_support import PATIENCE, read_safetensors, run, some_tensors, wait_until, write_safetensors

# What the tools of these tests do.
EVERYBODY = [{"who": ["any"], "what": ["read", "list", "push", "peers", "withdraw"]}]
# Restarts in one test; more are for a long run by hand.
CYCLES = int(os.environ.get("TENSORLANE_TEST_CYCLES", "10"))


def openssl(*arguments):
    return subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=True).stdout


class TlsCase(cli_support.Case):
    def secured(self, extra=None, **jobs):
        """Makes an authority, certificates for all tasks and the tools, and a configuration that uses them."""
        settings = {"tls": {"ca": "certs/ca.pem", "certificate": "certs/{name}.pem", "key": "certs/{name}.key"},
                    "allow": EVERYBODY}
        cluster = self.cluster(extra={"security": settings, **(extra or {})}, **jobs)
        self.certs = self.folder / "certs"
        self.assert_run(0, "cert", "init", "--folder", self.certs)
        self.assert_run(0, "cert", "issue", "--config", cluster.path, "--folder", self.certs)
        return cluster

    def context(self, name="client", **options):
        """Returns what Python's TLS needs to connect as this name."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(self.certs / "ca.pem")
        if name:
            context.load_cert_chain(self.certs / f"{name}.pem", self.certs / f"{name}.key")
        if options.get("alpn", True):
            context.set_alpn_protocols(["h2"])
        if "maximum" in options:
            context.maximum_version = options["maximum"]
        return context

    def connect(self, port, context):
        """Returns a TLS connection to the worker, which has sent the beginning of HTTP/2."""
        plain = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self.addCleanup(plain.close)
        secured = context.wrap_socket(plain)
        self.addCleanup(secured.close)
        first = secured.recv(9)
        if not first:
            raise ConnectionResetError("ended")
        return secured

    def assert_healthy(self, cluster, count):
        self.assertIn(f"{count} of {count} workers are healthy",
                      self.assert_run(0, "health", "--config", cluster.path).stdout)


class Cluster(TlsCase):
    def test_every_tool(self):
        cluster = self.secured(ps=2)
        model = write_safetensors(self.folder / "model.safetensors", some_tensors())
        workers = [cluster.start("ps", 0, "--publish", model), cluster.start("ps", 1)]
        pulled = self.folder / "pulled.safetensors"
        at = ("--config", cluster.path)
        self.assert_run(0, "pull", *at, "--from", "ps:0", "-o", pulled)
        self.assertEqual(read_safetensors(pulled), some_tensors())
        self.assert_run(0, "push", pulled, *at, "--to", "ps:1")
        shown = json.loads(self.assert_run(0, "ls", *at, "--from", "ps:1", "--json").stdout)
        self.assertEqual({tensor["name"] for tensor in shown["tensors"]}, set(some_tensors()))
        self.assert_run(0, "rm", "*", *at, "--from", "ps:1")
        self.assert_healthy(cluster, 2)
        pairs = self.assert_run(0, "health", "--pairs", *at).stdout
        self.assertIn("2 of 2 workers are healthy", pairs)
        for worker in workers:
            self.assertEqual(worker.stop(), 0)
            self.assertNotIn("level=warn", worker.output)
            self.assertNotIn("level=error", worker.output)

    def test_tools_at_an_address(self):
        cluster = self.secured(ps=1)
        model = write_safetensors(self.folder / "model.safetensors", some_tensors())
        cluster.start("ps", 0)
        plain = ("--address", cluster.address())
        at = (*plain, "--tls-ca-cert", self.certs / "ca.pem", "--tls-client-cert", self.certs / "client.pem",
              "--tls-client-key", self.certs / "client.key")
        pulled = self.folder / "pulled.safetensors"
        self.assert_run(0, "push", model, *at)
        self.assertIn(f"{len(some_tensors())} tensors", self.assert_run(0, "ls", *at).stdout)
        self.assert_run(0, "pull", *at, "-o", pulled)
        self.assertEqual(read_safetensors(pulled), some_tensors())
        self.assert_run(0, "rm", "*", *at)
        self.assert_error(1, "security.tls", "ls", *plain)

    def test_no_key_is_shown(self):
        cluster = self.secured(ps=1)
        worker = cluster.start()
        key = (self.certs / "ps-0.key").read_text().splitlines()[1]
        shown = [self.assert_run(0, "config", "show", "--config", cluster.path, "--job", "ps", "--task", "0").stdout,
                 self.assert_run(0, "health", "--config", cluster.path, "--json").stdout]
        worker.stop()
        for text in (*shown, worker.output):
            self.assertNotIn(key, text)
            self.assertNotIn("PRIVATE", text)

    def replace_by_rsa(self, name):
        """Gives a worker an RSA key and a certificate of the same name for it."""
        certificate, key, request = (self.certs / f"{name}.{kind}" for kind in ("pem", "key", "csr"))
        uri = re.search(r"URI:[^,\s]+", openssl("x509", "-in", certificate, "-noout", "-ext", "subjectAltName"))[0]
        openssl("req", "-new", "-newkey", "rsa:3072", "-nodes", "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        extensions = self.folder / "extensions"
        extensions.write_text(f"subjectAltName={uri}\nextendedKeyUsage=serverAuth,clientAuth\n")
        openssl("x509", "-req", "-in", request, "-CA", self.certs / "ca.pem", "-CAkey", self.certs / "ca.key", "-days",
                "2", "-extfile", extensions, "-out", certificate)
        key.chmod(0o600)

    def assert_in_secure_heap(self, pid, needles):
        """What the kernel leaves out of core files has the flag dd; the needles are in no other memory of the process,
        and each is there."""
        found, left_out, looked_at = [], set(), 0
        process = pathlib.Path("/proc", str(pid))
        with open(process / "smaps", encoding="utf-8") as maps, open(process / "mem", "rb", buffering=0) as memory:
            for place in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", maps.read()):
                begin, end = (int(number, 16) for number in place.split(None, 1)[0].split("-"))
                if not place.split()[1].startswith("rw") or "[v" in place.split("\n", 1)[0]:
                    continue
                memory.seek(begin)
                try:
                    content = memory.read(end - begin)
                except OSError:
                    continue
                names = [name for name, needle in needles.items() if needle in content]
                looked_at += len(content)
                if "dd" in place.rpartition("VmFlags:")[2].split():
                    left_out.update(names)
                else:
                    found += names
        self.assertGreater(looked_at, 1 << 20)
        self.assertEqual(found, [])
        return left_out

    def check_core_file(self, label):
        """label: what openssl calls the private number."""
        cluster = self.secured(ps=2)
        if label == "privateExponent":
            self.replace_by_rsa("ps-0")
        worker, other = cluster.start("ps", 0), cluster.start("ps", 1)
        self.assert_healthy(cluster, 2)
        path = self.certs / "ps-0.key"
        shown = openssl("pkey", "-in", path, "-noout", "-text")
        needles = {f"line {i}": line.encode() for i, line in enumerate(path.read_text().splitlines()[1:-1])}
        for name in [label, "prime1", "prime2", "exponent1", "exponent2", "coefficient"]:
            digits = re.search(name + r":\n((?:    .*\n)+)", shown)
            if digits is not None:
                number = bytes.fromhex("".join(digits[1].replace(":", "").split()))[-32:]
                needles |= {name: number, f"{name}, reversed": number[::-1]}
        left_out = self.assert_in_secure_heap(worker.pid, needles)
        self.assertIn(f"{label}, reversed", left_out, "this test looks for the wrong thing")
        other.stop()

    @unittest.skipIf(cli_support.SANITIZE, "sanitizers map more memory than can be read")
    def test_no_curve_key_is_in_a_core_file(self):
        self.check_core_file("priv")

    @unittest.skipIf(cli_support.SANITIZE, "sanitizers map more memory than can be read")
    def test_no_rsa_key_is_in_a_core_file(self):
        self.check_core_file("privateExponent")

    def test_restarts(self):
        """The worker that stays leaks nothing, however often its peer restarts."""
        cluster = self.secured(extra={"connect": "eager"}, ps=2)
        stays = cluster.start("ps", 0)
        def threads():
            names = []
            for path in pathlib.Path(f"/proc/{stays.pid}/task").glob("*/comm"):
                with contextlib.suppress(OSError): # it has just ended
                    names.append(path.read_text())
            return names
        def count():
            """Descriptors, and threads of the worker. gRPC adds to its own while all of these are busy."""
            own = [name for name in threads() if name.startswith(("tl-", "tensorlane"))]
            return len(os.listdir(f"/proc/{stays.pid}/fd")), len(own)
        counts, memory = [], []
        thread_count = len(threads())
        for _ in range(CYCLES):
            # A second link may take the place of the first one, so that a connection comes up twice.
            ups, ends = (stays.output.count(text) for text in ("data connection up", "has closed its connection"))
            restarts = cluster.start("ps", 1)
            wait_until(lambda: stays.output.count("data connection up") > ups, "the data connection",
                       lambda: stays.output)
            self.assertEqual(restarts.stop(), 0)
            wait_until(lambda: stays.output.count("has closed its connection") > ends, "the end",
                       lambda: stays.output)
            counts.append(count())
            memory.append(int(pathlib.Path(f"/proc/{stays.pid}/statm").read_text().split()[1]))
        wait_until(lambda: count() <= counts[1], "descriptors and threads are given back",
                   lambda: f"{counts} {count()}")
        self.assertLess(len(threads()), thread_count + CYCLES / 2 + 2, "each restart leaves a thread")
        print(f"{CYCLES} restarts: pages {memory[1]} -> {memory[-1]}, descriptors and threads {counts[1]} -> {count()}")


class Refused(TlsCase):
    def test_a_task_with_the_certificate_of_another(self):
        cluster = self.secured(extra={"connect": "eager"}, ps=2)
        first = cluster.start("ps", 0)
        for suffix in ("pem", "key"):
            shutil.copy(self.certs / f"ps-0.{suffix}", self.certs / f"ps-1.{suffix}")
        second = cluster.start("ps", 1)
        line = second.await_line("its certificate is for /job:ps/task:0")
        self.assertIn("says that it is /job:ps/task:1", line)
        line = first.await_line("for /job:ps/task:0, and not for /job:ps/task:1")
        self.assertIn("cannot be reached", line)

    def test_a_worker_without_tls(self):
        """Of each worker only the first reason is waited for: others are logged later."""
        cluster = self.secured(extra={"connect": "eager"}, ps=3)
        settings = json.loads(cluster.path.read_text())
        del settings["security"]
        plain = self.write_json(settings, "plain.json")
        first = cluster.start("ps", 0)
        second = self.spawn("serve", "--config", plain, "--job", "ps", "--task", "1")
        second.await_line("worker ready")
        second.await_line("security.tls")
        third = cluster.start("ps", 2)
        third.await_line("does not speak TLS")
        third.await_line("peer up")
        for worker, peer in ((first, 1), (second, 0), (second, 2), (third, 1)):
            self.assertIsNone(worker.find(f'msg="peer up" peer=/job:ps/task:{peer} '))

    def test_clients_that_are_not_let_in(self):
        cluster = self.secured(ps=1)
        worker = cluster.start()
        port = cluster.port()
        self.connect(port, self.context())
        for context, line in ((self.context(name=None), "it has no certificate"),
                              (self.context(alpn=False), "does not ask for HTTP/2 by ALPN"),
                              (self.context(maximum=ssl.TLSVersion.TLSv1_2), "no version of TLS that is accepted")):
            with self.assertRaises((ssl.SSLError, ConnectionError)):
                self.connect(port, context)
            worker.await_line(line)
        self.assert_healthy(cluster, 1)

    def test_tls_1_2_where_it_is_allowed(self):
        cluster = self.secured(ps=1)
        settings = json.loads(cluster.path.read_text())
        settings["security"]["tls"]["min_version"] = "1.2"
        cluster.path.write_text(json.dumps(settings))
        cluster.start()
        self.connect(cluster.port(), self.context(maximum=ssl.TLSVersion.TLSv1_2))
        self.assert_healthy(cluster, 1)

    def test_garbage_after_the_handshake(self):
        cluster = self.secured(ps=1)
        cluster.start()
        inside = self.connect(cluster.port(), self.context())
        inside.sendall(bytes(range(256)) * 100)
        with self.assertRaises((ssl.SSLError, ConnectionError, AssertionError)):
            while True:
                self.assertTrue(inside.recv(65536))
        outside = self.connect(cluster.port(), self.context())
        os.write(outside.fileno(), bytes(range(256)) * 100)
        with self.assertRaises((ssl.SSLError, ConnectionError, AssertionError)):
            while True:
                self.assertTrue(outside.recv(65536))
        self.assert_healthy(cluster, 1)


class Foreign(TlsCase):
    """Clients that know gRPC alone."""

    def setUp(self):
        super().setUp()
        try:
            import grpc
            from grpc_health.v1 import health_pb2, health_pb2_grpc
        except ImportError as missing:
            self.skipTest(f"python3-grpcio is not there: {missing}")
        self.grpc, self.health_pb2, self.health_pb2_grpc = grpc, health_pb2, health_pb2_grpc
        self.cluster = self.secured(ps=1)
        self.worker = self.cluster.start()

    def check(self, name, authority="ca"):
        """Returns what the health check says to the holder of this certificate."""
        read = lambda file: (self.certs / file).read_bytes()
        credentials = self.grpc.ssl_channel_credentials(read(f"{authority}.pem"), name and read(f"{name}.key"),
                                                        name and read(f"{name}.pem"))
        with self.grpc.secure_channel(self.cluster.address(), credentials) as channel:
            stub = self.health_pb2_grpc.HealthStub(channel)
            return stub.Check(self.health_pb2.HealthCheckRequest(), timeout=PATIENCE).status

    def test_health_check_of_python(self):
        self.assertEqual(self.check("client"), self.health_pb2.HealthCheckResponse.SERVING)
        with self.assertRaises(self.grpc.RpcError) as caught:
            self.check(None)
        self.assertEqual(caught.exception.code(), self.grpc.StatusCode.UNAVAILABLE)
        self.worker.await_line("it has no certificate")

    def test_flags_of_grpc_health_probe(self):
        tls = ("health", "-addr", self.cluster.address(), "-tls", "-tls-ca-cert", self.certs / "ca.pem",
               "-connect-timeout", "60s", "-rpc-timeout", "60s")
        client = ("-tls-client-cert", self.certs / "client.pem", "-tls-client-key", self.certs / "client.key")
        self.assertEqual(self.assert_run(0, *tls, *client).stdout, "status: SERVING\n")
        self.assert_run(0, *tls, *client, "-tls-server-name", "localhost")
        self.assert_run(2, *tls[:-4], "-connect-timeout", "3s")
        self.assert_run(2, *tls, *client, "-tls-server-name", "other.example.org")
        for _ in range(10):
            result = run("health", "-addr", self.cluster.address())
            self.assertNotEqual(result.returncode, 0)
            self.assertIn("security.tls", result.stderr)


class Floods(TlsCase):
    def memory(self, worker):
        return int(pathlib.Path(f"/proc/{worker.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    def test_ten_thousand_handshakes_at_once(self):
        """Each stops after its first message; others are served, and memory stays bounded."""
        cluster = self.secured(ps=1)
        worker = cluster.start()
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        hello = self.context().wrap_bio(incoming, outgoing)
        with self.assertRaises(ssl.SSLWantReadError):
            hello.do_handshake()
        first = outgoing.read()
        before = self.memory(worker)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 20000), hard))
        self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        count = 10000 if min(hard, 20000) > 11000 else min(hard, 20000) - 1000
        half_open = []
        for _ in range(count):
            half_open.append(socket.create_connection(("127.0.0.1", cluster.port()), timeout=PATIENCE))
            half_open[-1].send(first)
        self.assert_run(0, "health", "--config", cluster.path, "-connect-timeout", "60s", "-rpc-timeout", "60s")
        grown = self.memory(worker) - before
        print(f"{count} handshakes: {grown >> 20} MiB more")
        self.assertLess(grown, 512 << 20 if not cli_support.SANITIZE else 4 << 30)
        for connection in half_open:
            connection.close()
        self.assert_healthy(cluster, 1)

    def test_a_lack_of_descriptors(self):
        cluster = self.secured(ps=1)
        worker = cluster.start()
        used = len(os.listdir(f"/proc/{worker.pid}/fd"))
        resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (used + 30, used + 30))
        silent = [socket.create_connection(("127.0.0.1", cluster.port()), timeout=PATIENCE) for _ in range(200)]
        worker.await_line("limit of open files")
        for connection in silent:
            connection.close()
        wait_until(lambda: run("health", "--config", cluster.path).returncode == 0, "healthy again",
                   lambda: worker.output)

    def test_spare_descriptors(self):
        """Where no descriptor is left at all, clients are served by those that are kept for them, again and again."""
        cluster = self.secured(ps=1)
        worker = cluster.start()
        ask = ("health", "-addr", cluster.address(), "-tls", "-tls-ca-cert", self.certs / "ca.pem", "-tls-client-cert",
               self.certs / "client.pem", "-tls-client-key", self.certs / "client.key", "-connect-timeout", "60s",
               "-rpc-timeout", "60s")
        descriptors = lambda: {int(name) for name in os.listdir(f"/proc/{worker.pid}/fd")}
        idle = descriptors()
        self.assert_run(0, *ask)  # What a first connection opens for good is open then.
        wait_until(lambda: len(descriptors()) <= len(idle) + 1, "the end of the connection", lambda: worker.output)
        before = resource.prlimit(worker.pid, resource.RLIMIT_NOFILE)
        first_free = min(set(range(len(idle) + 2)) - descriptors())
        resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (first_free, before[1]))
        for _ in range(3):
            held = [self.connect(cluster.port(), self.context()) for _ in range(2)]
            self.assert_run(0, *ask)
            for connection in held:
                connection.close()
            wait_until(lambda: len(descriptors()) == first_free, "the spares", lambda: worker.output)
        self.assertIn("connections take spare descriptors", worker.output)
        resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, before)
        self.assert_healthy(cluster, 1)


if __name__ == "__main__":
    cli_support.main()
