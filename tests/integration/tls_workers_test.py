#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Workers and tools under TLS: a cluster with certificates of tensorlane cert, and clients that may not be let in."""
import ipaddress
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
from cli_support import PATIENCE, descriptors, read_safetensors, run, some_tensors, wait_until, write_safetensors
from tls_support import TlsCase, openssl

NOT_LOCKED = "private keys lie in memory that is not locked, and may be written to swap space"


def has_little_locked_memory():
    """Whether this process may not lock the 4 MiB that a worker wants for keys, beside little else."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return limit != resource.RLIM_INFINITY and limit < 5 << 20


def link_local_hosts():
    """Returns the link-local addresses of this machine as hosts of a configuration, with their interfaces."""
    table = pathlib.Path("/proc/net/if_inet6")
    lines = [line.split() for line in table.read_text(encoding="ascii").splitlines()] if table.exists() else []
    return [f"[{ipaddress.IPv6Address(bytes.fromhex(digits))}%{interface}]"
            for digits, _, _, scope, _, interface in lines if scope == "20"]


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
        pairs = self.assert_probed(0, "health", "--pairs", *at).stdout
        self.assertIn("2 of 2 workers are healthy", pairs)
        for worker in workers:
            self.assertEqual(worker.stop(), 0)
            lines = [line for line in worker.lines if not (has_little_locked_memory() and NOT_LOCKED in line)]
            self.assertEqual([line for line in lines if "level=warn" in line or "level=error" in line], [])

    def test_link_local_addresses(self):
        hosts = link_local_hosts()
        if not hosts:
            self.skipTest("no interface of this machine has a link-local IPv6 address")
        cluster = self.secured(ps=2)
        config = pathlib.Path(cluster.path)
        config.write_text(config.read_text(encoding="utf-8").replace("127.0.0.1", hosts[0]), encoding="utf-8")
        for task in range(2):
            cluster.start("ps", task)
        self.assertIn("2 of 2 workers are healthy",
                      self.assert_probed(0, "health", "--pairs", "--config", cluster.path).stdout)

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

    def test_flags_of_grpc_health_probe(self):
        cluster = self.secured(ps=1)
        cluster.start()
        tls = ("health", "-addr", cluster.address(), "-tls", "-tls-ca-cert", self.certs / "ca.pem",
               "-connect-timeout", "60s", "-rpc-timeout", "60s")
        client = ("-tls-client-cert", self.certs / "client.pem", "-tls-client-key", self.certs / "client.key")
        self.assertEqual(self.assert_run(0, *tls, *client).stdout, "status: SERVING\n")
        self.assert_run(0, *tls, *client, "-tls-server-name", "localhost")
        self.assert_run(2, *tls[:-4], "-connect-timeout", "3s")
        self.assert_run(2, *tls, *client, "-tls-server-name", "other.example.org")
        for _ in range(10):
            result = run("health", "-addr", cluster.address())
            self.assertNotEqual(result.returncode, 0)
            self.assertIn("security.tls", result.stderr)

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
        used = len(descriptors(worker.pid))
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
        ask = ("health", "-addr", cluster.address(), "-tls", "-tls-ca-cert", self.certs / "ca.pem", "-tls-client-cert",
               self.certs / "client.pem", "-tls-client-key", self.certs / "client.key", "-connect-timeout", "60s",
               "-rpc-timeout", "60s")

        def connect_first(worker):
            """What a first connection opens for good is open then."""
            idle = descriptors(worker.pid)
            self.assert_run(0, *ask)
            wait_until(lambda: len(descriptors(worker.pid)) <= len(idle) + 1, "the end of the connection",
                       lambda: worker.output)
        worker = cluster.start_without_gap(connect_first)
        before = resource.prlimit(worker.pid, resource.RLIMIT_NOFILE)
        first_free = len(descriptors(worker.pid))
        resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (first_free, before[1]))
        for _ in range(3):
            held = [self.connect(cluster.port(), self.context()) for _ in range(2)]
            self.assert_run(0, *ask)
            for connection in held:
                connection.close()
            wait_until(lambda: len(descriptors(worker.pid)) == first_free, "the spares", lambda: worker.output)
        self.assertIn("connections take spare descriptors", worker.output)
        resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, before)
        self.assert_healthy(cluster, 1)


if __name__ == "__main__":
    cli_support.main()
