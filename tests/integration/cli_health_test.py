#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""tensorlane health: the exit codes and messages of grpc_health_probe, and the stages of a cluster's check."""
import concurrent.futures
import contextlib
import functools
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time
import unittest

import cli_support
from cli_support import (HEALTH, environment, free_ports, run, run_in_terminal, some_tensors, wait_until,
                         write_safetensors)

try:
    import grpc
    from grpc_health.v1 import health_pb2
    from tensorlane.v1 import cluster_pb2
except ImportError:
    grpc = None


class Silent:
    """A port that accepts connections and sends the given bytes, or nothing."""

    def __init__(self, case, says=b""):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.says, self.connections = says, []
        threading.Thread(target=self._accept, daemon=True).start()
        case.addCleanup(self._close)

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                self.connections.append(connection)
                connection.sendall(self.says)

    def _close(self):
        for connection in [self.listener, *self.connections]:
            connection.close()


class HealthCase(cli_support.Case):
    def foreign_server(self, credentials=None, is_gzip=False, **methods):
        """Starts a gRPC server that is no worker. The arguments map the names of methods to handlers."""
        if grpc is None:
            self.skipTest("python3-grpcio or the generated modules are not there")
        kinds = {"Check": (health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse),
                 "Identify": (cluster_pb2.IdentifyRequest, cluster_pb2.IdentifyResponse),
                 "Probe": (cluster_pb2.ProbeRequest, cluster_pb2.ProbeResponse)}
        services = {"Check": "grpc.health.v1.Health", "Identify": "tensorlane.v1.Cluster",
                    "Probe": "tensorlane.v1.Cluster"}
        server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)],
                             compression=grpc.Compression.Gzip if is_gzip else None)
        for name, handler in methods.items():
            request, response = kinds[name]
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(services[name], {
                name: grpc.unary_unary_rpc_method_handler(
                    handler, request_deserializer=request.FromString,
                    response_serializer=response.SerializeToString)}),))
        port = (server.add_secure_port("127.0.0.1:0", credentials) if credentials
                else server.add_insecure_port("127.0.0.1:0"))
        server.start()
        self.addCleanup(server.stop, None)
        return f"127.0.0.1:{port}"


class Wire:
    """A port that forwards to a server and keeps what the client sends."""

    def __init__(self, case, address, silent_count=0):
        self.host, self.port = address.rsplit(":", 1)
        self.silent_count, self.silent = silent_count, []  # The first connections that are taken, but not forwarded.
        self.sent = b""
        self.ended = threading.Event()  # Set when the server has ended a connection.
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()
        case.addCleanup(self.listener.close)

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                if len(self.silent) < self.silent_count:
                    self.silent.append(client)
                    continue
                server = socket.create_connection((self.host, int(self.port)))
                threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _pump(self, source, sink, is_kept):
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                if is_kept:
                    self.sent += piece
                sink.sendall(piece)
        if not is_kept:
            self.ended.set()
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Probe(HealthCase):
    def test_serving(self):
        cluster = self.cluster(ps=1)
        cluster.start()
        address = cluster.address()
        for arguments in ([address], ["-addr", address], ["--addr", address], [f"-addr={address}"],
                          [f"--addr={address}"], ["-addr", address, "-service", "tensorlane.v1.Transfer"],
                          ["-addr", address, "-user-agent", "probe/1"], ["-tls=false", "-addr", address],
                          ["-alts=false", "-spiffe=false", "-gzip=false", "-addr", address],
                          ["-rpc-header", "a: b", "-addr", address]):
            result = self.assert_run(0, *HEALTH, *arguments)
            self.assertEqual((result.stdout, result.stderr), ("status: SERVING\n", ""))

    def test_verbose(self):
        cluster = self.cluster(ps=1)
        cluster.start()
        result = self.assert_run(0, *HEALTH, "-v", "-addr", cluster.address())
        self.assertEqual(result.stdout, "status: SERVING\n")
        self.assertRegex(result.stderr, f'^asking {cluster.address()} for service "", .*\ntime elapsed: ')

    def test_version(self):
        self.assertRegex(self.assert_run(0, "health", "-version").stdout, r"^\d+\.\d+\.\d+\n$")

    def test_usage(self):
        for pattern, *arguments in (
                ("whose health",), ("whose health", "-addr", ""),
                ("unknown flag -adr; did you mean --addr", "-adr", "x:1"),
                ("one address at a time", "a:1", "b:2"), ("given twice", "-addr", "a:1", "b:2"),
                ("not a duration above zero", "-connect-timeout", "0s", "a:1"),
                ("not a duration above zero", "-rpc-timeout", "-1s", "a:1"),
                ("not a duration above zero", "-rpc-timeout", "1", "a:1"),
                ("lacks its HOST:PORT", "-addr"), ("belong to --config", "a:1", "--json"),
                ("belong to --config", "a:1", "--watch"), ("not both", "a:1", "--config", "x"),
                ("belongs to an address", "--config", "x", "-service", "y"),
                ("--gzip and --tls belong to an address", "--config", "x", "-tls"),
                ("--gzip and --tls belong to an address", "--config", "x", "-rpc-header", "a: b"),
                ("--gzip and --tls belong to an address", "--config", "x", "-gzip"),
                ("-tls-ca-cert has no effect without -tls", "-tls-ca-cert", "x", "a:1"),
                ("-tls-no-verify has no effect without -tls", "-tls-no-verify", "a:1"),
                ("-tls-server-name has no effect without -tls", "-tls-server-name=x", "a:1"),
                ("-tls-client-cert has no effect without -tls", "-tls-client-cert=x", "-tls-client-key=y", "a:1"),
                ("belong together", "-tls", "-tls-client-cert=x", "a:1"),
                ("belong together", "-tls", "-tls-client-key=x", "a:1"),
                ("-tls-ca-cert would not be used", "-tls", "-tls-no-verify", "-tls-ca-cert=x", "a:1"),
                ("-tls-server-name would not be used", "-tls", "-tls-no-verify", "-tls-server-name=x", "a:1"),
                ("cannot read nowhere.pem", "-tls", "-tls-ca-cert", "nowhere.pem", "a:1"),
                ("/dev/null has no CERTIFICATE in PEM", "-tls", "-tls-ca-cert", "/dev/null", "a:1"),
                ("/dev/zero is not a PEM file", "-tls", "-tls-ca-cert", "/dev/zero", "a:1"),
                ("--alts: ALTS works on Google's machines only", "-alts", "a:1"),
                ("--spiffe: this program does not speak with a SPIFFE agent", "-spiffe", "a:1"),
                ("-rpc-header 'a' has no colon", "-rpc-header", "a", "a:1"),
                ('header "a b" has a name', "-rpc-header", "a b: c", "a:1"),
                ('header "" has a name', "-rpc-header", ": c", "a:1"),
                ('header "grpc-timeout" has a name', "-rpc-header", "grpc-timeout: 1S", "a:1"),
                ('header "a" has a value with more than printable', "-rpc-header", "a: \u00e4", "a:1"),
                ('header "a" has a value with more than printable', "-rpc-header", "a: b\nc", "a:1")):
            self.assert_error(1, "^tensorlane health: .*" + pattern, "health", *arguments)

    def test_not_connected(self):
        address = f"127.0.0.1:{free_ports(1)[0]}"
        result = self.assert_error(2, f'failed to connect service "{address}" within 1.00 s: .*refused', "health",
                                   address)
        self.assertEqual(result.stdout, "")
        self.assert_error(2, 'failed to connect service "nowhere.invalid:1" within ', *HEALTH, "nowhere.invalid:1")

    def test_no_grpc_at_all(self):
        for says in (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b"\0" * 100):
            self.assert_error(2, "failed to connect service", "health", Silent(self, says).address)

    def test_a_server_without_the_service(self):
        address = self.foreign_server(Identify=lambda request, context: cluster_pb2.IdentifyResponse())
        self.assert_error(3, "does not implement the grpc health protocol", *HEALTH, address)

    def test_an_unknown_service(self):
        cluster = self.cluster(ps=1)
        cluster.start()
        self.assert_error(3, "health rpc failed: NOT_FOUND", *HEALTH, cluster.address(), "-service", "nothing.v1")

    def test_too_slow(self):
        release = threading.Event()
        self.addCleanup(release.set)

        def wait(_request, _context):
            release.wait(cli_support.PATIENCE)
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
        self.assert_error(3, "timeout: health rpc did not complete within 300 ms", "health",
                          self.foreign_server(Check=wait), "-connect-timeout", "60s", "-rpc-timeout", "300ms")

    def test_not_serving(self):
        for status in (0, 2, 3, 77):
            address = self.foreign_server(Check=lambda *_: health_pb2.HealthCheckResponse(status=status))
            result = self.assert_error(4, "service unhealthy \\(responded with ", *HEALTH, address)
            self.assertEqual(result.stdout, "")

    def test_another_server(self):
        asked = []

        def check(request, context):
            asked.append((request.service, dict(context.invocation_metadata())["user-agent"]))
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
        self.assert_run(0, *HEALTH, "-addr", self.foreign_server(Check=check), "-service", "a.b", "-user-agent",
                        "probe/7")
        self.assertEqual(asked[0][0], "a.b")
        self.assertIn("probe/7", asked[0][1])
        self.assert_run(0, *HEALTH, self.foreign_server(Check=check))
        self.assertTrue(asked[1][1].startswith("grpc_health_probe "), asked[1][1])

    def test_headers(self):
        asked = []

        def check(_request, context):
            asked.extend(item for item in context.invocation_metadata() if item[0] != "user-agent")
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
        address = self.foreign_server(Check=check)
        result = self.assert_run(0, *HEALTH, "-v", address, "-rpc-header", "Authorization:  Bearer a:b ",
                                 "-rpc-header", "x-Twice: 1", "-rpc-header=x-twice:2", "-rpc-header", "empty:",
                                 "-rpc-header", "name-bin: \u00e4")
        self.assertEqual(sorted(asked), [("authorization", "Bearer a:b "), ("empty", ""),
                                         ("name-bin", "\u00e4".encode()), ("x-twice", "1"), ("x-twice", "2")])
        self.assertIn("with header authorization\n", result.stderr)
        self.assertNotIn("Bearer", result.stderr)

    def test_gzip(self):
        """The test reads the bytes on the wire, because servers do not report compression."""
        asked = []

        def check(request, _context):
            asked.append(request.service)
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
        wire = Wire(self, self.foreign_server(Check=check, is_gzip=True))
        name = "a" * 4000
        self.assert_run(0, *HEALTH, wire.address, "-service", name)
        self.assertNotIn(b"\x1f\x8b\x08", wire.sent)
        self.assertIn(name.encode(), wire.sent)
        wire.sent = b""
        self.assert_run(0, *HEALTH, wire.address, "-service", name, "-gzip")
        self.assertIn(b"grpc-encoding", wire.sent)
        self.assertIn(b"\x1f\x8b\x08", wire.sent)
        self.assertNotIn(name.encode(), wire.sent)
        self.assertEqual(asked, [name, name])

    def test_an_address_without_a_host_is_this_machine(self):
        cluster = self.cluster(ps=1)
        cluster.start()
        for address in (["-addr", f":{cluster.port()}"], [f":{cluster.port()}"]):
            self.assertEqual(self.assert_run(0, *HEALTH, *address).stdout, "status: SERVING\n")
        port = free_ports(1)[0]
        self.assert_error(2, f"localhost:{port}", "health", f"-addr=:{port}")
        self.assert_error(2, "has no port", "health", "-addr=:")

    def test_the_probe_of_the_container_takes_flags(self):
        """It ends with 0 or 1; what other codes mean is not said for containers."""
        text = (cli_support.SOURCE / "deploy/Containerfile").read_text(encoding="ascii")
        probe = text.split("HEALTHCHECK ")[1].split(" CMD ")[1].split("\n")[0]
        cluster = self.cluster(ps=1)
        cluster.start()
        for flags, code in (("", 0), (" -connect-timeout 60s -rpc-timeout=60s", 0), (" -service no.such", 1)):
            result = subprocess.run(["/bin/sh", "-c", probe.replace("tensorlane", cli_support.PROGRAM)], check=False,
                                    env=environment(TENSORLANE_PROBE=cluster.address() + flags), capture_output=True,
                                    text=True, timeout=cli_support.PATIENCE)
            self.assertEqual(result.returncode, code, result.stderr)

    def test_gzip_that_is_not_taken(self):
        cluster = self.cluster(ps=1)
        cluster.start()
        self.assert_error(3, "health rpc failed: UNIMPLEMENTED: .*; a server that takes no compressed messages needs "
                             "the probe without -gzip", *HEALTH, cluster.address(), "-gzip")

    def test_standard_output_is_full(self):
        cluster = self.cluster(ps=1)
        cluster.start()
        with open("/dev/full", "w", encoding="ascii") as full:
            self.assert_run(1, *HEALTH, cluster.address(), stdout=full)


class Idle(HealthCase):
    def test_a_client_that_is_idle_connects_anew(self):
        """Python's client does not answer probes between its calls."""
        if grpc is None:
            self.skipTest("python3-grpcio or the generated modules are not there")
        cluster = self.cluster(ps=1, extra={"timeouts": {"keepalive": "200ms", "keepalive_answer": "200ms"}})
        cluster.start()
        wire = Wire(self, cluster.address())
        channel = grpc.insecure_channel(wire.address)
        self.addCleanup(channel.close)
        check = channel.unary_unary("/grpc.health.v1.Health/Check",
                                    request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                                    response_deserializer=health_pb2.HealthCheckResponse.FromString)

        def is_answered():
            try:
                check(health_pb2.HealthCheckRequest(), timeout=cli_support.PATIENCE)
            except grpc.RpcError as error:
                self.assertEqual(error.code(), grpc.StatusCode.UNAVAILABLE)
                return False
            return True
        wait_until(is_answered, "an answer")
        self.assertTrue(wire.ended.wait(cli_support.PATIENCE), "the worker keeps the connection")
        wait_until(is_answered, "another answer")


class Certificates:
    """A certificate authority and what it has signed, in files of a folder."""

    def __init__(self, folder):
        self.folder = folder
        self.openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=authority", "-keyout",
                     self.key("ca"), "-out", self.path("ca"), "-addext", "basicConstraints=critical,CA:TRUE")

    def openssl(self, *arguments):
        subprocess.run(["openssl", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL, timeout=cli_support.PATIENCE)

    def path(self, name):
        return self.folder / f"{name}.pem"

    def key(self, name):
        return self.folder / f"{name}.key"

    def sign(self, name, subject):
        """Signs a certificate; the subject has the form of subjectAltName."""
        request, extensions = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={subject}\n")
        self.openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", self.key(name), "-out",
                     request)
        self.openssl("x509", "-req", "-in", request, "-CA", self.path("ca"), "-CAkey", self.key("ca"),
                     "-CAcreateserial", "-days", "2", "-extfile", extensions, "-out", self.path(name))

    def server(self, name, wants_client=False):
        pair = (self.key(name).read_bytes(), self.path(name).read_bytes())
        return grpc.ssl_server_credentials([pair], self.path("ca").read_bytes() if wants_client else None, wants_client)


@unittest.skipIf(shutil.which("openssl") is None, "openssl is not there to make certificates")
class Tls(HealthCase):
    def setUp(self):
        super().setUp()
        if grpc is None:
            self.skipTest("python3-grpcio or the generated modules are not there")
        self.certificates = Certificates(self.folder)
        self.certificates.sign("server", "DNS:probe.example,IP:127.0.0.1")
        self.ca = ("-tls", "-tls-ca-cert", self.certificates.path("ca"))

    def serve(self, name="server", wants_client=False):
        def check(_request, context):
            self.client = context.auth_context().get("x509_common_name")
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
        return self.foreign_server(Check=check, credentials=self.certificates.server(name, wants_client))

    def refused(self, reason, *arguments):
        self.assert_error(2, "failed to connect service .* accepts connections but the TLS handshake failed: .*"
                          + reason, *HEALTH, *arguments)

    def test_serving(self):
        address = self.serve()
        result = self.assert_run(0, *HEALTH, "-addr", address, *self.ca, "-v")
        self.assertEqual(result.stdout, "status: SERVING\n")
        self.assertIn("with TLS, trusting the authorities given, without a certificate of ours, for the server "
                      f"{address}\n", result.stderr)

    def test_without_the_authority(self):
        address = self.serve()
        self.refused("certificate verify failed", address, "-tls")
        self.certificates.sign("nobody", "DNS:nobody")
        self.refused("certificate verify failed", address, "-tls", "-tls-ca-cert", self.certificates.path("nobody"))
        self.assert_run(0, *HEALTH, address, "-tls", "-tls-no-verify")

    def test_name_of_the_server(self):
        self.certificates.sign("other", "DNS:other.example")
        address = self.serve("other")
        self.refused("not in peer certificate", address, *self.ca)
        self.refused("not in peer certificate", address, *self.ca, "-tls-server-name", "probe.example")
        self.assert_run(0, *HEALTH, address, *self.ca, "-tls-server-name", "other.example")
        self.assert_run(0, *HEALTH, address, "-tls", "-tls-no-verify")

    def test_server_that_wants_to_know_us(self):
        self.certificates.sign("me", "DNS:me")
        address = self.serve(wants_client=True)
        mine = ("-tls-client-cert", self.certificates.path("me"), "-tls-client-key", self.certificates.key("me"))
        self.refused("", address, *self.ca)
        self.refused("", address, "-tls", "-tls-no-verify")
        for flags in (self.ca, ("-tls", "-tls-no-verify")):
            self.client = None
            self.assert_run(0, *HEALTH, address, *flags, *mine)
            self.assertEqual(self.client, [b"me"])

    def test_files_that_do_not_fit(self):
        address = self.serve()
        damaged = self.folder / "damaged.pem"
        lines = self.certificates.path("ca").read_text().splitlines()
        damaged.write_text("\n".join([lines[0], "%%%%" + lines[1][4:], *lines[2:]]))
        key = ("-tls-client-cert", self.certificates.path("server"), "-tls-client-key", self.certificates.key("ca"))
        for flags in (("-tls", "-tls-ca-cert", damaged), (*self.ca, *key)):
            self.assert_error(1, "TLS rejects the certificates or the key", *HEALTH, address, *flags)
        self.assert_error(1, "has no CERTIFICATE in PEM", "health", address, "-tls", "-tls-ca-cert",
                          self.certificates.key("ca"))

    def test_one_side_only(self):
        cluster = self.cluster(ps=1)
        cluster.start()
        self.refused("", cluster.address(), *self.ca)
        self.assert_error(2, "does not speak gRPC \\(HTTP/2 without TLS\\)", *HEALTH, self.serve())


class Whole(HealthCase):
    def check(self, code, path, *arguments, ask=None):
        """Returns what --json says of each worker, by name."""
        ask = ask or self.assert_run
        shown = json.loads(ask(code, "health", "--config", path, "--json", *arguments).stdout)
        self.assertEqual(shown["healthy"], code == 0)
        return {worker["name"]: worker for worker in shown["workers"]}

    def check_pairs(self, path):
        """The same of healthy workers that try each other."""
        return self.check(0, path, ask=self.assert_probed)

    def test_healthy(self):
        cluster = self.cluster(ps=1, worker=2, extra={"protocol": "grpc"})
        workers = [cluster.start("ps"), cluster.start("worker", 0), cluster.start("worker", 1)]
        found = self.check_pairs(cluster.path)
        self.assertEqual(list(found), ["/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"])
        for name, worker in zip(found, workers):
            incarnation = worker.find("worker ready").split("incarnation=")[1].split()[0]
            finding = found[name]
            self.assertRegex(incarnation, "^0x[0-9a-f]{16}$")
            self.assertEqual((finding["healthy"], finding["stage"], finding["verified"], finding["reason"],
                              finding["remedy"], finding["incarnation"]),
                             (True, "transports", "transports", "", "", incarnation))
            self.assertIn(("grpc", True), [(transport["name"], transport["available"])
                                           for transport in finding["transports"]])
            self.assertEqual({peer["name"] for peer in finding["peers"]} | {name}, set(found))
        table = self.assert_probed(0, "health", "--config", cluster.path).stdout.splitlines()
        self.assertEqual(table[0].split(), ["WORKER", "ADDRESS", "HEALTHY", "STAGE", "VERSION"])
        self.assertRegex(table[1], rf"^/job:ps/task:0 +{cluster.address()} +yes +transports +\d+\.\d+\.\d+$")
        self.assertEqual(table[-1], "3 of 3 workers are healthy")
        table = self.assert_probed(0, "health", "--config", cluster.path, "--incarnations").stdout.splitlines()
        self.assertEqual(table[0].split()[-1], "INCARNATION")
        self.assertEqual([line.split()[-1] for line in table[1:-1]],
                         [found[name]["incarnation"] for name in found])

    def test_a_worker_of_tf_config_without_rpc_layer(self):
        cluster = self.cluster(ps=1)
        tf_config = json.dumps({"cluster": {"ps": [cluster.address()]}, "task": {"type": "ps", "index": 0}})
        self.spawn("serve", env=environment(TF_CONFIG=tf_config)).await_line("worker ready")
        finding = self.check(0, cluster.path)["/job:ps/task:0"]
        self.assertEqual((finding["stage"], finding["verified"]), ("local", "transports"))
        self.assertEqual(finding["reason"], f'the worker\'s own configuration sets protocol to "grpc", {cluster.path} '
                                            'to "auto"')
        self.assertIn('set "rpc_layer" there to "auto"', finding["remedy"])

    def test_pairs(self):
        cluster = self.cluster(ps=1, worker=1)
        cluster.start("ps")
        cluster.start("worker")
        output = self.assert_probed(0, "health", "--config", cluster.path, "--pairs").stdout
        self.assertRegex(output, r"(?m)^FROM +TO +STATE +PROBE\b")
        self.assertRegex(output, r"(?m)^/job:ps/task:0 +/job:worker/task:0 +(idle|up|connecting) ")

    def test_a_worker_that_looks_for_its_peer_elsewhere(self):
        """The operator reaches both workers, and one of them does not reach the other."""
        cluster = self.cluster(ps=1, worker=1, extra={"protocol": "grpc", "connect": "lazy"})
        elsewhere = f"127.0.0.1:{cli_support.free_ports(1)[0]}"
        others = self.write_json({"cluster": {"ps": [cluster.address()], "worker": [elsewhere]}, "protocol": "grpc",
                                  "connect": "lazy"}, "others.json")
        self.spawn("serve", "--config", others, "--job", "ps", "--task", "0").await_line("worker ready")
        cluster.start("worker")
        found = self.check(4, cluster.path)
        for finding in found.values():
            self.assertEqual((finding["healthy"], finding["stage"]), (False, "probe"), finding)
            self.assertIn(f"/job:ps/task:0 does not reach /job:worker/task:0, which answers here: {elsewhere}",
                          finding["reason"])
            self.assertIn(f"allow TCP to {elsewhere}", finding["remedy"])
        self.check(0, cluster.path, "--quick")

    def test_a_peer_that_has_just_started(self):
        """What was found before it started is not held against it."""
        cluster = self.cluster(ps=1, worker=1, extra={"protocol": "grpc"})
        cluster.start("ps")
        self.check(4, cluster.path)
        cluster.start("worker")
        self.check_pairs(cluster.path)

    def answering_cluster(self, answer, uptime_ns=0, name="cluster.json"):
        """Returns the configuration of two servers that say they are workers. Those of job ps answer Probe so."""
        serving = lambda *_: health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
        identify = lambda job: lambda *_: cluster_pb2.IdentifyResponse(
            job=job, incarnation=5, protocol_version=1, is_serving=True, uptime_ns=uptime_ns,
            transports=[cluster_pb2.TransportState(name="grpc", is_available=True)])
        jobs = {"ps": answer, "worker": lambda *_: cluster_pb2.ProbeResponse()}
        addresses = {job: [self.foreign_server(Check=serving, Identify=identify(job) if grpc else None, Probe=probe)]
                     for job, probe in jobs.items()}
        return self.write_json({"cluster": addresses, "protocol": "grpc"}, name)

    def test_an_old_failure_is_asked_for_again(self):
        answers = []

        def answer(*_):
            answers.append(cluster_pb2.PeerProbe(name="/job:worker/task:0", is_ok=len(answers) > 0,
                                                 stage="" if answers else "tcp", age_ns=60 * 10**9))
            return cluster_pb2.ProbeResponse(peers=answers[-1:])

        self.check(0, self.answering_cluster(answer))
        self.assertEqual(len(answers), 2)

    def test_failures_that_stay_old_and_many_workers_that_hang(self):
        """Each of these waits for long, so that they wait at the same time."""
        cases = (self.a_failure_of_a_peer_that_ran_already_counts, self.a_failure_that_stays_old_is_not_judged,
                 self.many_workers_at_once)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            for case, future in [(case, pool.submit(case)) for case in cases]:
                with self.subTest(case.__name__):
                    future.result()

    def a_failure_of_a_peer_that_ran_already_counts(self):
        """With many peers it takes long until the worker tries them again."""
        def answer(*_):
            return cluster_pb2.ProbeResponse(peers=[cluster_pb2.PeerProbe(
                name="/job:worker/task:0", is_ok=False, stage="tcp", reason="refused", age_ns=60 * 10**9)])
        found = self.check(4, self.answering_cluster(answer, uptime_ns=61 * 10**9, name="ran.json"))
        self.assertEqual([finding["stage"] for finding in found.values()], ["probe", "probe"])

    def a_failure_that_stays_old_is_not_judged(self):
        """The server is slow, too: all asks have one deadline."""
        old = lambda: cluster_pb2.ProbeResponse(peers=[cluster_pb2.PeerProbe(
            name="/job:worker/task:0", is_ok=False, stage="tcp", reason="refused", age_ns=3600 * 10**9)])
        began = time.monotonic()
        found = self.check(0, self.answering_cluster(lambda *_: time.sleep(4) or old(), name="stays.json"))
        self.assertLess(time.monotonic() - began, 40)
        probe = found["/job:ps/task:0"]["probes"][0]
        self.assertEqual((probe["ok"], probe["stage"]), (True, ""))
        self.assertIn("not tried this peer again", probe["reason"])

    def many_workers_at_once(self):
        """All workers hang. If health asked them one after the other, it would outlast the test's patience."""
        listener = socket.create_server(("0.0.0.0", 0), backlog=1024)
        self.addCleanup(listener.close)
        tasks = [f"127.1.{n + 1}.1:{listener.getsockname()[1]}" for n in range(100)]
        found = self.check(4, self.write_json({"cluster": {"ps": tasks}}, "many.json"), "-connect-timeout", "6s")
        self.assertEqual({finding["stage"] for finding in found.values()}, {"grpc"})

    def test_probing_again_and_again_costs_one_round(self):
        """The second answer is older by the time between the two, unless the results were renewed meanwhile."""
        cluster = self.cluster(ps=1, worker=1, extra={"protocol": "grpc"})
        cluster.start("ps")
        cluster.start("worker")
        for _ in range(5):
            self.check_pairs(cluster.path)
            time.sleep(0.5)
            found = self.check_pairs(cluster.path)
            if found["/job:ps/task:0"]["probes"][0]["age_seconds"] >= 0.5:
                return
        self.fail("each call has started another round")

    def test_the_command_lacks_descriptors(self):
        watch = self.spawn("health", "--config", self.cluster(ps=1).path, "--watch", "--interval", "100ms", "--json")

        def remedies(reason):
            findings = [json.loads(line)["workers"][0] for line in list(watch.lines)[:-1]]
            return [finding["remedy"] for finding in findings if reason in finding["reason"]]
        wait_until(lambda: remedies("refused the connection"), "a round with descriptors")
        resource.prlimit(watch.pid, resource.RLIMIT_NOFILE, (3, 3))
        wait_until(lambda: remedies("was not dialled: Too many open files"), "a round without descriptors")
        self.assertEqual({"give this command more descriptors (ulimit -n) or memory; the worker was not asked"},
                         set(remedies("was not dialled: Too many open files")))

    def test_the_command_lacks_descriptors_in_grpc(self):
        """Its own look at the port takes fewer descriptors than the call, and goes well. With one descriptor too few it
        is mostly the socket that is lacking; when it is what wakes one of gRPC's threads, gRPC aborts."""
        cluster = self.cluster(ps=1, extra={"protocol": "grpc"})
        cluster.start()
        wanted = (f"tensorlane ls: {cluster.address()} was not dialled: Too many open files; this process needs more "
                  "descriptors or memory\n")
        env = environment(ASAN_OPTIONS="detect_leaks=0")  # The search for leaks takes descriptors, too.
        said = set()
        for _ in range(20):
            for limit in range(5, 50):
                few = functools.partial(resource.setrlimit, resource.RLIMIT_NOFILE, (limit, limit))
                result = run("ls", "--address", cluster.address(), env=env, preexec_fn=few)
                if result.returncode == 0:
                    break
                last = result.stderr
            said.add(last)
            if wanted in said:
                break
        self.assertIn(wanted, said)

    def test_not_started(self):
        cluster = self.cluster(ps=1, worker=1)
        cluster.start("ps")
        found = self.check(4, cluster.path)
        self.assertTrue(found["/job:ps/task:0"]["healthy"])
        finding = found["/job:worker/task:0"]
        self.assertEqual((finding["healthy"], finding["stage"]), (False, "tcp"))
        self.assertIn("refused", finding["reason"])
        self.assertIn(f"tensorlane serve --config {cluster.path} --job worker --task 0", finding["remedy"])
        result = self.assert_run(4, "health", "--config", cluster.path)
        self.assertIn("1 of 2 workers are healthy", result.stdout)
        lines = result.stdout.splitlines()
        place = next(i for i, line in enumerate(lines) if line.startswith("/job:worker/task:0"))
        self.assertRegex(lines[place + 1], "^    reason: .*refused")
        self.assertRegex(lines[place + 2], "^    remedy: start it there: tensorlane serve --config")
        self.assertEqual([line for line in lines if len(line) > 80], [])

    def test_unresolvable(self):
        path = self.write_json({"cluster": {"ps": ["nowhere.invalid:4000"]}})
        finding = self.check(4, path, "-connect-timeout", "60s")["/job:ps/task:0"]
        self.assertEqual(finding["stage"], "resolve")
        self.assertIn("host name", finding["remedy"])

    def test_no_grpc_at_all(self):
        for says in (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"):
            path = self.write_json({"cluster": {"ps": [Silent(self, says).address]}})
            finding = self.check(4, path, "-connect-timeout", "3s")["/job:ps/task:0"]
            self.assertEqual(finding["stage"], "grpc")
            said = "reason" if says == b"" else "remedy"  # The process behind a silent port is looked up.
            self.assertIn("another program listens", finding[said])

    def test_a_grpc_server_that_is_no_worker(self):
        address = self.foreign_server(
            Check=lambda *_: health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING))
        finding = self.check(4, self.write_json({"cluster": {"ps": [address]}}))["/job:ps/task:0"]
        self.assertEqual((finding["stage"], finding["reason"]),
                         ("identity", "the gRPC server that answers is not a tensorlane worker"))

    def test_another_worker(self):
        cluster = self.cluster(ps=1)
        worker = cluster.start()
        path = self.write_json({"cluster": {"worker": {"3": cluster.address()}}}, "other.json")
        finding = self.check(4, path)["/job:worker/task:3"]
        self.assertEqual((finding["stage"], finding["reason"]),
                         ("identity", f"the worker that answers is /job:ps/task:0 on host {socket.gethostname()}, "
                                      f"process {worker.process.pid}"))
        self.assertEqual((finding["listens"], finding["process_id"]), ([cluster.address()], worker.process.pid))
        self.assertIn("/job:worker/task:3", finding["remedy"])

    def test_a_worker_that_does_not_serve(self):
        address = self.foreign_server(Identify=lambda *_: cluster_pb2.IdentifyResponse(
            job="ps", task=0, incarnation=5, software_version="9.9.9", protocol_version=1, is_serving=False))
        finding = self.check(4, self.write_json({"cluster": {"ps": [address]}}))["/job:ps/task:0"]
        self.assertEqual((finding["stage"], finding["incarnation"], finding["version"]),
                         ("serving", "0x0000000000000005", "9.9.9"))

    def test_a_worker_whose_health_service_disagrees(self):
        address = self.foreign_server(
            Identify=lambda *_: cluster_pb2.IdentifyResponse(job="ps", protocol_version=1, is_serving=True),
            Check=lambda *_: health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING))
        self.assertEqual(self.check(4, self.write_json({"cluster": {"ps": [address]}}))["/job:ps/task:0"]["stage"],
                         "serving")

    def test_a_worker_without_transports(self):
        off = [cluster_pb2.TransportState(name="grpc", is_available=False, reason="switched off")] if grpc else []
        for given, reason in (([], "it has no transport at all"), (off, "switched off")):
            address = self.foreign_server(
                Identify=lambda *_: cluster_pb2.IdentifyResponse(job="ps", protocol_version=1, is_serving=True,
                                                                 transports=given),
                Check=lambda *_: health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING))
            finding = self.check(4, self.write_json({"cluster": {"ps": [address]}}))["/job:ps/task:0"]
            self.assertEqual((finding["stage"], finding["reason"]), ("transports", reason))

    def test_a_worker_that_hangs(self):
        cluster = self.cluster(ps=1)
        worker = cluster.start()
        worker.send(signal.SIGSTOP)
        finding = self.check(4, cluster.path, "-connect-timeout", "500ms", "-rpc-timeout", "500ms")["/job:ps/task:0"]
        self.assertIn(finding["stage"], ("tcp", "grpc"))
        self.assertNotEqual(finding["remedy"], "")

    def test_a_worker_that_is_busy_for_a_moment(self):
        """The first time, neither the connection of the look nor that of the call is served."""
        cluster = self.cluster(ps=1, extra={"protocol": "grpc"})
        cluster.start()
        wire = Wire(self, cluster.address(), silent_count=2)
        self.check(0, self.write_json({"cluster": {"ps": [wire.address]}, "protocol": "grpc"}, "slow.json"))
        self.assertEqual(len(wire.silent), 2)

    def test_a_stopped_worker_goes_on_with_the_remedy(self):
        cluster = self.cluster(ps=1, worker=1)
        worker = cluster.start()
        cluster.start("worker")
        worker.send(signal.SIGSTOP)
        begin = time.monotonic()
        finding = self.check(4, cluster.path)["/job:ps/task:0"]
        cli_support.assert_soon(self, begin)
        self.assertEqual((finding["healthy"], finding["stage"], finding["reason"], finding["remedy"]), (
            False, "grpc", f"process {worker.pid} (tensorlane) at {cluster.address()} is stopped",
            f"let it go on: kill -CONT {worker.pid}"))
        subprocess.run(finding["remedy"].split(": ")[1].split(), check=True)
        self.check_pairs(cluster.path)

    def start_without_descriptors(self, cluster):
        """Starts a worker that has no descriptor left once its start is over. Returns it, its limit, and a function
        that gives it more."""
        def settle(worker):
            """What the start has opened for a moment is closed again."""
            seen = []

            def is_settled():
                seen.append(cli_support.descriptors(worker.pid))
                return len(seen) > 50 and seen[-50:] == seen[-1:] * 50
            wait_until(is_settled, "a steady number of descriptors")
        worker = cluster.start_without_gap(settle)
        held = len(cli_support.descriptors(worker.pid))
        hard = resource.prlimit(worker.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (held, hard))
        return worker, held, lambda: resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (hard, hard))

    def assert_without_descriptors(self, finding, worker, held):
        self.assertEqual((finding["stage"], finding["verified"]), ("serving", "identity"), finding)
        self.assertRegex(finding["reason"], rf"^\d+ of {held} descriptors are open, so that connections and files ")
        self.assertIn(f'give it more: "prlimit --pid {worker.pid} --nofile=NUMBER" as root for now', finding["remedy"])

    def test_a_worker_without_descriptors_can_be_asked(self):
        cluster = self.cluster(ps=1, extra={"protocol": "grpc"})
        worker, held, give = self.start_without_descriptors(cluster)
        begin = time.monotonic()
        finding = self.check(4, cluster.path, *HEALTH[1:])["/job:ps/task:0"]
        cli_support.assert_soon(self, begin)
        self.assert_without_descriptors(finding, worker, held)
        worker.await_line("the limit of open files is reached; connections take spare descriptors")
        give()
        self.assertEqual(self.check(0, cluster.path)["/job:ps/task:0"]["troubles"], [])

    def test_links_leave_the_spare_descriptors_to_health(self):
        """More peers want a link than there are spares; they get it when there are descriptors again."""
        # A peer logs why its first attempt failed, and a change of the message not at once: no attempt may time out
        # because the machine is slow.
        cluster = self.cluster(ps=1, worker=6, extra={"protocol": "grpc", "jobs": {"worker": {
            "connect": "eager", "timeouts": {"connect": "60s"}}}})
        worker, held, give = self.start_without_descriptors(cluster)
        peers = [self.spawn("serve", "--config", cluster.path, "--job", "worker", "--task", task) for task in range(6)]
        refusal = (f"/job:ps/task:0 has no descriptors left for another connection; give it more: \\\"prlimit --pid "
                   f"{worker.pid} --nofile=NUMBER\\\" as root on host {socket.gethostname()}")
        for peer in peers:
            peer.await_line(refusal)
        finding = self.check(4, cluster.path)["/job:ps/task:0"]
        self.assert_without_descriptors(finding, worker, held)
        for peer in peers:
            self.assertIsNone(peer.find("peer=/job:ps/task:0 address"), peer.output)
        give()
        for peer in peers:
            peer.await_line("msg=\"peer up\" peer=/job:ps/task:0")

    def served_file(self):
        """Starts a worker that publishes a file."""
        cluster = self.cluster(ps=1, extra={"protocol": "grpc"})
        model = write_safetensors(self.folder / "model.safetensors", some_tensors())
        worker = cluster.start("ps", 0, "--publish", model)
        self.check(0, cluster.path)
        return cluster, model, worker

    def await_trouble(self, cluster):
        """Returns what health says as soon as the worker has noticed the fault."""
        found = {}

        def is_noticed():
            shown = json.loads(run("health", "--config", cluster.path, "--json").stdout)
            found.update(shown["workers"][0])
            return found["troubles"]
        begin = time.monotonic()
        wait_until(is_noticed, "trouble")
        cli_support.assert_soon(self, begin)
        return found

    def test_a_published_file_is_truncated(self):
        cluster, model, worker = self.served_file()
        size = model.stat().st_size
        os.truncate(model, size - 1)
        finding = self.await_trouble(cluster)
        self.assertEqual((finding["healthy"], finding["stage"], finding["reason"], finding["remedy"]), (
            False, "serving", f"model.safetensors had {size} bytes when it was opened and has {size - 1} now",
            "publish it again, and replace files by rename"))
        self.assertIn(str(model), worker.await_line("a published file is not what it was"))
        self.assertEqual(worker.output.count("is not what it was"), 1)

    def test_a_published_file_is_written_to(self):
        cluster, model, _worker = self.served_file()
        with open(model, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"!")
        finding = self.await_trouble(cluster)
        self.assertEqual((finding["healthy"], finding["reason"]),
                         (False, "model.safetensors was modified after it was opened"))

    def test_a_published_file_is_replaced(self):
        cluster, model, _worker = self.served_file()
        os.rename(write_safetensors(self.folder / "new.safetensors", some_tensors()), model)
        finding = self.await_trouble(cluster)
        self.assertEqual((finding["healthy"], finding["reason"]), (True, ""))
        self.assertEqual(finding["troubles"], [
            {"what": "file", "reason": "model.safetensors was replaced by another file; the old content is served",
             "remedy": "start the worker anew to serve the new one", "breaks_transfers": False}])
        self.assertRegex(self.assert_run(0, "health", "--config", cluster.path).stdout,
                         r"    warning: model\.safetensors was replaced by another file; the")
        self.assert_run(0, "rm", "*", "--address", cluster.address())
        wait_until(lambda: not self.check(0, cluster.path)["/job:ps/task:0"]["troubles"], "no trouble any more")

    def test_a_published_file_is_removed(self):
        cluster, model, _worker = self.served_file()
        model.unlink()
        finding = self.await_trouble(cluster)
        self.assertEqual((finding["healthy"], finding["troubles"][0]["reason"]),
                         (True, "model.safetensors was removed; its content is still served"))

    def test_hostile_answers_do_not_reach_the_terminal(self):
        address = self.foreign_server(Identify=lambda *_: cluster_pb2.IdentifyResponse(
            job="\x1b[2J\nps", software_version="\x07\u202e1", protocol_version=1))
        path = self.write_json({"cluster": {"ps": [address]}})
        result = self.assert_run(4, "health", "--config", path)
        self.assertNotRegex(result.stdout + result.stderr, "[\x00-\x09\x0b-\x1f\u202e]")
        code, output = run_in_terminal("health", "--config", path, env=environment(NO_COLOR="1"))
        self.assertEqual(code, 4)
        self.assertNotRegex(output.replace("\r\n", ""), "[\x00-\x1f\u202e]")

    def test_configuration_that_is_wrong(self):
        bad = self.folder / "bad.json"
        bad.write_text("{")
        result = self.assert_run(1, "health", "--config", bad, "--json")
        shown = json.loads(result.stdout)
        self.assertEqual((shown["healthy"], shown["stage"], shown["workers"]), (False, "config", []))
        self.assertIn("bad.json", shown["reason"])
        self.assert_error(1, "nowhere.json", "health", "--config", self.folder / "nowhere.json")

    def test_watch(self):
        cluster = self.cluster(ps=1)
        watch = self.spawn("health", "--config", cluster.path, "--watch", "--interval", "100ms", "--json")

        def has_shown(health):
            return any(json.loads(line)["healthy"] == health for line in list(watch.lines)[:-1])
        wait_until(lambda: has_shown(False), "an unhealthy round")
        cluster.start()
        wait_until(lambda: has_shown(True), "a healthy round")
        self.assertEqual(watch.stop(signal.SIGINT), -signal.SIGINT)

    def test_watch_ends_with_its_reader(self):
        cluster = self.cluster(ps=1)
        read_end, write_end = os.pipe()
        watch = subprocess.Popen([cli_support.PROGRAM, "health", "--config", cluster.path, "--watch", "--interval",
                                  "10ms"], env=environment(), stdout=write_end, stderr=subprocess.DEVNULL)
        os.close(write_end)
        self.assertTrue(os.read(read_end, 4096))
        os.close(read_end)
        self.assertEqual(watch.wait(timeout=cli_support.PATIENCE), 1)

    def test_table_fits_a_narrow_terminal(self):
        cluster = self.cluster(ps=1, worker=1)
        cluster.start("ps")
        code, output = run_in_terminal("health", "--config", cluster.path, columns=130, env=environment(NO_COLOR="1"))
        self.assertEqual(code, 4)
        self.assertLessEqual(max(map(len, output.split("\r\n"))), 130)
        code, output = run_in_terminal("health", "--config", cluster.path, columns=200)
        self.assertIn("\x1b[32myes\x1b[0m", output)
        self.assertIn("\x1b[31mno\x1b[0m", output)



class DataPlane(HealthCase):
    """What health concludes from what workers say of their data planes; the servers here can say anything."""

    def find(self, code, settings=None, says=None, peer_settings=None, arguments=(), verbs=None):
        """Returns the finding for a worker that should have these settings and reports this state."""
        transports = [cluster_pb2.TransportState(name="grpc", is_available=True)] if grpc else []
        if verbs is not None and grpc:
            transports.append(cluster_pb2.TransportState(name="verbs", is_available=verbs == "", reason=verbs))
        rest = dict(says or {})
        transports += rest.pop("transports", [])
        address = self.foreign_server(
            Identify=lambda *_: cluster_pb2.IdentifyResponse(job="ps", protocol_version=1, is_serving=True,
                                                             transports=transports, **rest),
            Check=lambda *_: health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING))
        path = self.write_json({"cluster": {"ps": [address], "worker": ["127.0.0.1:1", "127.0.0.1:2"]},
                                "jobs": {"ps": settings or {}, "worker": peer_settings or {}}})
        shown = json.loads(self.assert_run(4, "health", "--config", path, "--json", *arguments).stdout)
        finding = shown["workers"][0]
        self.assertEqual(finding["healthy"], code == 0, finding)
        return finding

    def assert_finding(self, finding, stage, verified, reason="", remedy=""):
        self.assertEqual((finding["stage"], finding["verified"]), (stage, verified), finding)
        self.assertIn(reason, finding["reason"])
        self.assertIn(remedy, finding["remedy"])
        if not reason:
            self.assertEqual((finding["reason"], finding["remedy"]), ("", ""))

    @staticmethod
    def plane(**values):
        return {"data_plane": cluster_pb2.DataPlane(**values)} if grpc else {}

    @staticmethod
    def peers(*peers, **values):
        if not grpc:
            return {}
        return {**DataPlane.plane(**values), "peers": [
            cluster_pb2.PeerState(name=f"/job:worker/task:{n}", state=state, transport=transport, reason=reason,
                                  latency_ns=1500, bytes_per_second=2000000000, mtu_bytes=1024)
            for n, (state, transport, reason) in enumerate(peers)]}

    def test_not_wanted(self):
        for settings in ({"rdma": "off"}, {"protocol": "grpc", "rdma": "require"}):
            self.assert_finding(self.find(0, settings, verbs="no card"), "transports", "transports")

    def test_no_device(self):
        reason = "no RDMA device: nothing there; load the driver"
        self.assert_finding(self.find(0, verbs=reason), "device", "transports", "no RDMA device: nothing there",
                            "load the driver")
        self.assert_finding(self.find(4, {"rdma": "require"}, verbs=reason), "device", "transports", "no RDMA device")
        reason = "no RDMA port can be used; a:1 10.0.0.1: excluded; b:1 10.0.0.2: down"
        self.assert_finding(self.find(0, verbs=reason), "device", "transports", reason, "tensorlane devices --config ")
        self.assert_finding(self.find(0, verbs="the card sulks"), "device", "transports", "the card sulks",
                            "tensorlane devices --config ")

        for n, (text, stage, remedy) in enumerate((
                ("b:1 10.0.0.2: the port is down: see the cable; a:1 10.0.0.1: excluded", "port", "look at the cable"),
                ("b:1 10.0.0.2: verbs.pkey_index 5 is beyond the table; a:1: the port is down", "device",
                 "correct verbs.pkey_index in "),
                ("a:1 10.0.0.1: excluded; b:1 10.0.0.2: the port is down", "device", "tensorlane devices --config "))):
            with self.subTest(n):
                finding = self.find(0, verbs=f"no RDMA port can be used; {text}")
                self.assertEqual(finding["stage"], stage, finding)
                self.assertIn(remedy, finding["remedy"])

    def test_a_machine_without_a_card(self):
        """Where the settings leave the choice to the machine, a missing card is no shortcoming."""
        reason = "no RDMA device: the kernel knows none; load the driver of the card, or make a soft-RoCE device"
        for says in ({}, self.peers(("up", "grpc", "no card there"))):
            self.assert_finding(self.find(0, {}, says, verbs=reason), "transports", "transports")
        self.assert_finding(self.find(0, {"protocol": "grpc+verbs"}, verbs=reason), "device", "transports",
                            "no RDMA device", "load the driver of the card")
        self.assert_finding(self.find(4, {"rdma": "require"}, verbs=reason), "device", "transports", "no RDMA device")

    def test_another_protocol(self):
        if grpc is None:
            self.skipTest("python3-grpcio or the generated modules are not there")
        for own, transport, settings, stage in (("grpc+local", "verbs", {}, "device"),
                                                ("grpc+verbs", "local", {}, "local"),
                                                ("grpc", "verbs", {"protocol": "grpc+verbs"}, "device")):
            says = {"transports": [cluster_pb2.TransportState(name=transport, reason=f"the protocol is {own}")]}
            expected = (f"the worker's own configuration sets protocol to \"{own}\", {self.folder}/cluster.json to "
                        f"\"{settings.get('protocol', 'auto')}\"")
            self.assert_finding(self.find(0, settings, says), stage, "transports", expected, "configuration")
            finding = self.find(4, {**settings, "rdma": "require"}, says)
            self.assertNotIn("tensorlane devices", finding["remedy"])
        says = {"transports": [cluster_pb2.TransportState(name="verbs", reason="rdma is off")]}
        self.assert_finding(self.find(0, {}, says), "device", "transports",
                            f"sets rdma to \"off\", {self.folder}/cluster.json to \"prefer\"", "same configuration")

    def test_broken_shared_memory(self):
        """Without a card, too, it is shared memory that is to be repaired."""
        cluster = self.cluster(ps=1, extra={"local": {"socket_folder": str(self.folder / "nowhere")}})
        cluster.start()
        shown = json.loads(self.assert_run(0, "health", "--config", cluster.path, "--json").stdout)["workers"][0]
        self.assertEqual((shown["stage"], shown["verified"]), ("local", "transports"))
        self.assertIn("local.socket_folder", shown["reason"])
        self.assertIn("start the worker anew", shown["remedy"])

    def test_broken_shared_memory_beside_a_card(self):
        if grpc is None:
            self.skipTest("python3-grpcio or the generated modules are not there")
        says = self.peers(("up", "verbs", ""), device="mlx5_0", port=1, port_state="active", keys="window")
        says["transports"] = [cluster_pb2.TransportState(name="local", reason="the folder is not there")]
        self.assert_finding(self.find(0, {"rdma": "require"}, says, verbs=""), "local", "paths",
                            "the folder is not there", "start the worker anew")

    def test_says_nothing(self):
        """The worker runs on this machine, so health reports what this machine lacks."""
        finding = self.find(0, {"protocol": "grpc+verbs"})
        self.assertEqual(finding["stage"], "device")
        self.assertNotEqual(finding["reason"], "")
        self.assertNotIn("says nothing", finding["reason"])

    def test_memlock(self):
        says = self.plane(memlock="64 MiB are needed; ulimit -l unlimited")
        self.assert_finding(self.find(4, {"rdma": "require"}, says, verbs="cannot lock"), "memlock", "transports",
                            "64 MiB are needed", "ulimit -l unlimited")

    def test_port(self):
        says = self.plane(device="mlx5_0", port=2, port_state="down")
        self.assert_finding(self.find(0, {}, says, verbs=""), "port", "device", "port 2 of mlx5_0 is down", "cable")
        self.assert_finding(self.find(4, {"rdma": "require"}, says, verbs=""), "port", "device", "is down")

    def test_all_is_well(self):
        values = {"device": "mlx5_0", "port": 1, "gid_index": 3, "gid": "10.0.0.1", "gid_type": "RoCE v2",
                  "interface": "eth0", "port_state": "active", "link_layer": "Ethernet", "mtu_bytes": 4096,
                  "keys": "window", "reason": "its GID is the worker's address", "not_tried": "mlx5_0:1 GID 2 10.0.0.1"}
        says = self.peers(("up", "verbs", ""), ("idle", "", ""), **values)
        finding = self.find(0, {"rdma": "require"}, says, verbs="")
        self.assert_finding(finding, "paths", "paths")
        self.assertEqual(finding["data_plane"], {
            "memlock": "", "device": "mlx5_0", "port": 1, "gid_index": 3, "gid": "10.0.0.1", "gid_type": "RoCE v2",
            "interface": "eth0", "port_state": "active", "link_layer": "Ethernet", "mtu": 4096, "keys": "window",
            "reason": "its GID is the worker's address", "passed_over": "",
            "not_tried": "mlx5_0:1 GID 2 10.0.0.1", "isolated": True})
        peer = finding["peers"][0]
        self.assertEqual((peer["latency_ns"], peer["bytes_per_second"], peer["mtu"]), (1500, 2000000000, 1024))
        result = self.assert_run(4, "health", "--config", self.folder / "cluster.json", "--pairs").stdout
        self.assertRegex(result, r"/job:ps/task:0 +\S+ +yes +paths +mlx5_0:1")
        self.assertRegex(result, r"/job:ps/task:0 +/job:worker/task:0 +up +verbs +1\.5 us +2\.0\d* GB/s")
        self.assertNotIn("processor's caches", result)

    def test_a_rate_of_the_caches_is_marked(self):
        self.find(0, {"protocol": "grpc"}, self.peers(("up", "local", "")))
        result = self.assert_run(4, "health", "--config", self.folder / "cluster.json", "--pairs").stdout
        self.assertIn("The rate over local is that of the processor's caches", result)

    def test_no_peer_connected(self):
        says = self.peers(("idle", "", ""), ("down", "", "refused"), port_state="active")
        self.assert_finding(self.find(0, {"rdma": "require"}, says, verbs=""), "port", "port")

    def test_a_pair_that_is_not_on_verbs(self):
        says = self.peers(("up", "grpc", "no card there; none here"), ("up", "verbs", ""), port_state="active")
        self.assert_finding(self.find(0, {}, says, verbs=""), "paths", "port",
                            "over grpc to /job:worker/task:0: no card there; none here", "--pairs")
        self.assert_finding(self.find(4, {"rdma": "require"}, says, verbs=""), "paths", "port", "over grpc to")
        both = self.peers(("up", "grpc", "no card there"), ("up", "grpc", ""), port_state="active")
        self.assert_finding(self.find(4, {"rdma": "require"}, both, verbs=""), "paths", "port",
                            "over grpc to /job:worker/task:0, and to 1 more: no card there")
        # Peers that are configured without RDMA lack no path.
        self.assert_finding(self.find(0, {"rdma": "require"}, both, peer_settings={"rdma": "off"}, verbs=""), "port",
                            "port")

    def test_isolation(self):
        says = self.peers(("up", "verbs", ""), device="d", port_state="active", keys="region")
        finding = self.find(0, {}, says, verbs="")
        self.assert_finding(finding, "paths", "paths", "peers are not isolated: verbs.keys is \"region\"",
                            "set verbs.keys to \"window\"")
        self.assertFalse(finding["data_plane"]["isolated"])

    def test_a_second_choice(self):
        for keys in ("window", "region"):
            says = self.peers(("up", "verbs", ""), device="mlx5_1", port=1, port_state="active", keys=keys,
                              passed_over="mlx5_0:1 GID 3 10.0.0.1: a probe write failed: nothing came")
            finding = self.find(0, {"rdma": "require"}, says, verbs="")
            self.assert_finding(finding, "paths", "paths",
                                "mlx5_1 port 1 is not the first choice: mlx5_0:1 GID 3 10.0.0.1: a probe write failed: "
                                "nothing came", "repair what was passed over")
            self.assertEqual(keys == "region", "peers are not isolated" in finding["reason"])
            self.assertEqual(keys == "region", "set verbs.keys" in finding["remedy"])

    def test_a_worker_that_would_not_start(self):
        path = self.write_json({"cluster": {"ps": ["127.0.0.1:1"]}, "protocol": "grpc+verbs", "rdma": "require"})
        shown = json.loads(self.assert_run(4, "health", "--config", path, "--json").stdout)
        self.assertEqual(shown["workers"][0]["stage"], "tcp")
        self.assertIn("rdma is \"require\", and it would not start: ", shown["workers"][0]["remedy"])

    def test_local(self):
        self.assert_error(1, "--local belong to --config", "health", "127.0.0.1:1", "--local")
        path = self.write_json({"cluster": {"ps": ["192.0.2.1:1"]}, "protocol": "grpc+verbs",
                                "rdma": "require"})
        remedies = [json.loads(self.assert_run(4, "health", "--config", path, "--json", "-connect-timeout", "200ms",
                                               *arguments).stdout)["workers"][0]["remedy"]
                    for arguments in ((), ("--local",))]
        self.assertNotIn("would not start", remedies[0])
        self.assertIn("would not start", remedies[1])

    def test_environment(self):
        path = self.write_json({"cluster": {"ps": ["127.0.0.1:1"]}})
        self.assert_error(1, "environment variable RDMA_SL: 9 is out of range", "health", "--config", path,
                          env=environment(RDMA_SL="9"))


class Compared(HealthCase):
    """What health concludes from what several workers say; the servers here can say anything."""

    START_NS = 30 * 10**9
    ROUTES = "both answer from here: look at routes and firewalls between the two, and at the logs of both"

    def setUp(self):
        super().setUp()
        if grpc is None:
            self.skipTest("python3-grpcio or the generated modules are not there")

    def workers(self, *says, others=(), **config):
        """Starts a server for each of the answers and returns what --json says of them and of the other addresses, with
        the exit code."""
        addresses = []
        for index, answer in enumerate(says):
            values = {"job": "ps", "task": index, "protocol_version": 1, "is_serving": True, "incarnation": index + 1,
                      "uptime_ns": self.START_NS, "transports": [
                          cluster_pb2.TransportState(name="grpc", is_available=True)], **answer}
            addresses.append(self.foreign_server(
                Identify=lambda *_, values=values: cluster_pb2.IdentifyResponse(**values),
                Check=lambda *_: health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)))
        path = self.write_json({"cluster": {"ps": [*addresses, *others]}, "protocol": "grpc", **config})
        result = cli_support.run("health", "--config", path, "--json", "-connect-timeout", "60s", "-rpc-timeout", "60s")
        return result.returncode, json.loads(result.stdout)["workers"]

    @staticmethod
    def peer(index, state="up", reason="", **values):
        return cluster_pb2.PeerState(name=f"/job:ps/task:{index}", state=state, reason=reason, **values)

    def test_a_pair_that_is_not_connected(self):
        late = "10.0.0.2:4000 did not take the connection in time; is the machine up, and is there a firewall?"
        refused = "10.0.0.2:4000 refused the connection; is the worker started?"
        other = "10.0.0.2:4000 speaks another version; start it anew"
        for state, reason in (("down", late), ("connecting", late), ("down", refused), ("down", other)):
            code, rows = self.workers({"peers": [self.peer(1, state, reason), self.peer(2)]},
                                      {"peers": [self.peer(0), self.peer(2)]}, {})
            self.assertEqual((code, [row["healthy"] for row in rows]), (4, [False, False, True]), rows)
            self.assertEqual((rows[0]["stage"], rows[1]["stage"]), ("paths", "paths"))
            rest = f" at {rows[1]['address']}: {reason.split('; ', maxsplit=1)[0]}"
            self.assertEqual(rows[0]["reason"], f"it cannot reach /job:ps/task:1{rest}")
            self.assertEqual(rows[1]["reason"], f"/job:ps/task:0 cannot reach it{rest}")
            for row in rows[:2]:
                self.assertEqual(row["remedy"], "start it anew" if reason == other else self.ROUTES)

    def serve(self, name, job, task=0, **config):
        path = self.write_json({"protocol": "grpc", **config}, name)
        worker = self.spawn("serve", "--config", path, "--job", job, "--task", task)
        worker.await_line("worker ready")
        return path, worker

    def rows(self, path):
        def ask():
            begin = time.monotonic()
            result = cli_support.run("health", "--config", path, "--json", "-connect-timeout", "60s")
            cli_support.assert_soon(self, begin)
            return result
        result = cli_support.ask_until_in_time(ask, cli_support.was_probed_late)
        shown = json.loads(result.stdout)
        return result.returncode, {worker["name"]: worker for worker in shown["workers"]}, shown["note"]

    def addresses(self, count):
        return [f"127.0.0.1:{port}" for port in free_ports(count)]

    def test_another_cluster(self):
        ps, worker, chief = self.addresses(3)
        path, _ = self.serve("right.json", "ps", cluster={"ps": [ps], "worker": [worker]})
        self.serve("wrong.json", "worker", cluster={"chief": [chief], "worker": [worker]})
        code, rows, note = self.rows(path)
        right, wrong = rows["/job:ps/task:0"], rows["/job:worker/task:0"]
        self.assertEqual((code, right["stage"], wrong["stage"]), (4, "config", "config"))
        self.assertEqual(wrong["reason"],
                         "it runs with another cluster.json than /job:ps/task:0: it has chief, lacks ps")
        self.assertEqual(right["reason"], "/job:worker/task:0 runs with another cluster.json, which lacks this worker")
        self.assertIn("give all workers the same file, and start this one anew", wrong["remedy"])
        self.assertEqual(note, f"the workers have /job:chief/task:0, which {path} lacks")
        self.assertEqual(right["settings"]["protocol"], "grpc")
        table = self.assert_run(4, "health", "--config", path).stdout.splitlines()
        self.assertTrue(table[-1].startswith("the workers have /job:chief/task:0"))

    def test_another_cluster_with_fewer_tasks(self):
        ps, first, second = self.addresses(3)
        path, _ = self.serve("right.json", "ps", cluster={"ps": [ps], "worker": [first, second]})
        self.serve("right.json", "worker", 0, cluster={"ps": [ps], "worker": [first, second]})
        self.serve("wrong.json", "worker", 1, cluster={"ps": [ps], "worker": {"1": second}})
        code, rows, _ = self.rows(path)
        self.assertEqual((code, [row["healthy"] for row in rows.values()]), (4, [True, False, False]), rows)
        self.assertEqual(rows["/job:worker/task:1"]["reason"], "it runs with another cluster.json than "
                         "/job:worker/task:0: it lacks /job:worker/task:0")

    def test_parts_of_a_cluster(self):
        """Two workers that do not know each other, each with the part of the cluster that it needs."""
        ps, first, second, unused = self.addresses(4)
        path, _ = self.serve("all.json", "ps", cluster={"ps": [ps], "worker": [first, second]})
        self.serve("first.json", "worker", 0, cluster={"ps": [ps], "worker": {"0": first}})
        self.serve("second.json", "worker", 1, cluster={"ps": [ps], "worker": {"1": second}})
        code, rows, note = self.rows(path)
        self.assertEqual((code, note, [row["reason"] for row in rows.values()]), (0, "", ["", "", ""]), rows)
        more = self.write_json({"cluster": {"ps": [ps], "eval": [unused]}, "protocol": "grpc"}, "more.json")
        code, rows, note = self.rows(more)
        self.assertEqual(code, 4)
        self.assertIn("refused the connection", rows["/job:eval/task:0"]["reason"])
        self.assertIn(", and no worker that answers has this task in its cluster.json",
                      rows["/job:eval/task:0"]["reason"])
        self.assertEqual(note, f"the workers have /job:worker/task:0, /job:worker/task:1, which {more} lacks")

    def test_a_part_that_is_enough(self):
        """A worker that only answers need not know those that ask it."""
        asked = {"peers": [self.peer(1)]}
        for state, code in (("up", 0), ("idle", 4), ("down", 4)):
            found, rows = self.workers({"peers": [self.peer(0), self.peer(1, state)]}, asked)
            self.assertEqual((found, [row["healthy"] for row in rows]), (code, 2 * [code == 0]), rows)
            self.assertEqual(rows[1]["reason"],
                             "it runs with another cluster.json than /job:ps/task:0: it lacks /job:ps/task:0")
            self.assertIn("which lacks this worker", rows[0]["reason"])

    def test_a_worker_that_shall_listen_on_loopback(self):
        """Something in front of it forwards its port."""
        for listen, reason in (("127.0.0.1:4000", ""), (
                "gpu-1:4000", "it listens at 127.0.0.1:4000, where other machines cannot reach it")):
            _, rows = self.workers({"listens": ["127.0.0.1:4000"],
                                    "settings": [cluster_pb2.Setting(path="listen", value=listen)]},
                                   others=["nowhere.invalid:4000"])
            self.assertEqual(rows[0]["reason"], reason)

    def test_forwarded_ports(self):
        """The workers know each other by other addresses than this command."""
        ps, worker = self.addresses(2)
        path, _ = self.serve("outside.json", "ps", cluster={"ps": [ps], "worker": [worker]})
        self.serve("inside.json", "worker", cluster={"ps": [Wire(self, ps).address], "worker": [worker]})
        code, rows, note = self.rows(path)
        self.assertEqual((code, note, [row["reason"] for row in rows.values()]), (0, "", ["", ""]), rows)

    def test_another_address(self):
        reason = "10.0.0.9:4000 refused the connection; is the worker started?"
        code, rows = self.workers(
            {"peers": [self.peer(0, address="a:1"), self.peer(1, "down", reason, address="10.0.0.9:4000")]},
            {"peers": [self.peer(0, address="a:1"), self.peer(1, address="10.0.0.2:4000")]})
        self.assertEqual((code, [row["healthy"] for row in rows]), (4, [False, False]), rows)
        for row in rows:
            self.assertIn("cannot reach", row["reason"])
            self.assertIn("10.0.0.9:4000 refused the connection", row["reason"])
            self.assertEqual(row["remedy"], f"{self.ROUTES}; also: /job:ps/task:0 dials /job:ps/task:1 at "
                             "10.0.0.9:4000, the cluster.json of /job:ps/task:1 says 10.0.0.2:4000: unless ports are "
                             "forwarded, give all workers the same file, and start them anew")
        # Two spellings of one address.
        for dialled, own in (("GPU-1:4000", "gpu-1.:4000"), ("[fd00:0::7]:4000", "[fd00::7]:4000")):
            _, rows = self.workers(
                {"peers": [self.peer(0, address="a:1"), self.peer(1, "down", reason, address=dialled)]},
                {"peers": [self.peer(0, address="a:1"), self.peer(1, address=own)]})
            self.assertEqual([row["remedy"] for row in rows], [self.ROUTES, self.ROUTES])

    def test_protocols_that_share_grpc_only(self):
        def says(protocol, rdma="prefer"):
            return {"peers": [self.peer(0), self.peer(1)],
                    "settings": [cluster_pb2.Setting(path="protocol", value=protocol),
                                 cluster_pb2.Setting(path="rdma", value=rdma)]}
        for rdma, expected in (("prefer", 0), ("require", 4)):
            code, rows = self.workers(says("grpc+local", rdma), says("grpc+verbs"))
            self.assertEqual((code, rows[0]["healthy"], rows[1]["healthy"]), (expected, rdma == "prefer", True))
            self.assertEqual(rows[0]["reason"], 'its protocol is "grpc+local", that of /job:ps/task:1 is "grpc+verbs": '
                                                'the two share gRPC only')
            self.assertIn("set the same protocol", rows[0]["remedy"])
        _, rows = self.workers(says("grpc+local", "require"), {**says("grpc+verbs"), "task": 7})
        self.assertEqual((rows[0]["healthy"], rows[0]["reason"]), (True, ""))
        for pair in (("grpc", "grpc+verbs"), ("grpc+gdr", "grpc+verbs"), ("auto", "grpc+local"),
                     ("grpc+local", "grpc+local")):
            code, rows = self.workers(*map(says, pair))
            self.assertEqual((code, [row["reason"] for row in rows]), (0, ["", ""]))

    def test_two_processes_as_one_task(self):
        ps, second, worker = self.addresses(3)
        eager = {"connect": "eager"}
        path, watcher = self.serve("one.json", "worker", cluster={"ps": [ps], "worker": [worker]})
        _, first = self.serve("one.json", "ps", cluster={"ps": [ps], "worker": [worker]}, **eager)
        _, rival = self.serve("two.json", "ps", cluster={"ps": [second], "worker": [worker]}, **eager)
        watcher.await_line("two processes claim one task")
        warning = watcher.find("two processes claim one task")
        for process in (first, rival):
            self.assertIn(f"process {process.pid} on {socket.gethostname()} (", warning)
        _, rows, _ = self.rows(path)
        row = rows["/job:ps/task:0"]
        self.assertEqual((row["healthy"], row["stage"]), (False, "identity"))
        self.assertEqual(row["remedy"], "stop one of them, if both still run")
        self.assertRegex(row["reason"], r", which last took turns \d+ s ago$")
        for process in (first, rival):
            self.assertIn(f"process {process.pid} on {socket.gethostname()}", row["reason"])
        self.assertTrue(rows["/job:worker/task:0"]["healthy"])
        restarts = [line for line in list(watcher.lines) if "peer has restarted" in line and "level=info" in line]
        self.assertLessEqual(len(restarts), 3, watcher.output)
        self.assertEqual(watcher.output.count("two processes claim one task"), 1)
        self.assertIn("level=info msg=\"peer has another cluster.json, with other tasks or addresses\"", watcher.output)

    def test_one_cluster_in_two_spellings(self):
        ports = free_ports(2)
        workers = [self.serve(f"{host}.json", job, connect="eager",
                              cluster={"ps": [f"{host}:{ports[0]}"], "worker": [f"{host}:{ports[1]}"]})[1]
                   for job, host in (("ps", "localhost"), ("worker", "LOCALHOST"))]
        for worker in workers:
            worker.await_line("peer up")
            self.assertNotIn("another cluster.json", worker.output)

    def test_two_processes_that_do_not_meet(self):
        """Each worker is connected to another process, which it believes to be the same task."""
        seen = {n: self.peer(2, incarnation=n, host_name=f"host-{n}", process_id=10 * n) for n in (5, 6)}
        members = [self.peer(0), self.peer(1)]
        code, rows = self.workers(
            {"peers": [*members, seen[5]]}, {"peers": [*members, seen[6]]},
            {"peers": [*members, self.peer(2)], "incarnation": 5, "host_name": "host-5", "process_id": 50})
        self.assertEqual((code, [row["healthy"] for row in rows]), (4, [True, True, False]), rows)
        self.assertEqual(rows[2]["reason"],
                         "two processes are /job:ps/task:2: process 50 on host-5 and process 60 on host-6")
        code, rows = self.workers(
            {"peers": [*members, seen[5]]}, {"peers": [*members, self.peer(2, "down", incarnation=6)]},
            {"peers": [*members, self.peer(2)], "incarnation": 5, "uptime_ns": 1})
        self.assertEqual((code, [row["reason"] for row in rows]), (0, ["", "", ""]))

    def answers(self, *lists):
        """Starts a server for each list, which gives one answer after the other and the last one again and again.
        None is a failure."""
        def identify(index, answers):
            def answer(_request, context):
                values = answers.pop(0) if len(answers) > 1 else answers[0]
                if values is None:
                    context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
                return cluster_pb2.IdentifyResponse(**{
                    "job": "ps", "task": index, "protocol_version": 1, "is_serving": True, "incarnation": index + 1,
                    "transports": [cluster_pb2.TransportState(name="grpc", is_available=True)], **values})
            return answer
        path = self.write_json({"protocol": "grpc", "cluster": {"ps": [
            self.foreign_server(
                Identify=identify(index, list(answers)),
                Check=lambda *_: health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING))
            for index, answers in enumerate(lists)]}})
        code, rows, _ = self.rows(path)
        return code, list(rows.values())

    def test_a_restart_between_two_answers(self):
        """Peers that are connected to the process before the restart have heard of it when they are asked again."""
        def says(incarnation):
            return {"peers": [self.peer(0), self.peer(1), self.peer(2, incarnation=incarnation)]}
        restarted = {"incarnation": 8, "peers": [self.peer(n) for n in range(3)]}
        code, rows = self.answers([says(7), says(8)], [says(7), says(8)], [restarted])
        self.assertEqual((code, [row["reason"] for row in rows]), (0, ["", "", ""]))
        # What a worker has said that does not answer again does not count.
        code, rows = self.answers([says(7), None], [says(8)], [restarted])
        self.assertEqual((code, [row["reason"] for row in rows]), (0, ["", "", ""]))
        code, rows = self.answers([says(7), says(7)], [says(8)], [restarted])
        self.assertEqual((code, [row["healthy"] for row in rows]), (4, [True, True, False]), rows)

    def test_a_long_reason(self):
        """A worker tells of two processes in more bytes than a row has."""
        to_the_end = 1006 * "x" + "; stop it"  # The semicolon lies just behind the row's reason.
        for rest, remedy in ((to_the_end, "stop it"), (3960 * "x" + "; stop it", "stop it"),
                             (4000 * "x", "stop one of them")):
            code, rows = self.workers({"peers": [self.peer(0), self.peer(1, "up", "two processes are " + rest)]},
                                      {"peers": [self.peer(0), self.peer(1)]}, {})
            self.assertEqual((code, [row["healthy"] for row in rows]), (4, [True, False, True]), rows)
            self.assertRegex(rows[1]["reason"], "^two processes are x{900}")
            self.assertEqual(rows[1]["remedy"], remedy)
            self.assertEqual([rows[n]["reason"] + rows[n]["remedy"] for n in (0, 2)], ["", ""])

    def test_a_pair_that_need_not_be_connected(self):
        for first, second in (
                ({"peers": [self.peer(1, "idle", "refused")]}, {}), ({"peers": [self.peer(1, "connecting")]}, {}),
                ({"peers": [self.peer(1, "down", "refused")], "uptime_ns": self.START_NS - 1}, {}),
                ({"peers": [self.peer(1, "down", "refused")]}, {"uptime_ns": self.START_NS - 1}),
                ({"peers": [self.peer(7, "down", "refused")]}, {})):
            code, rows = self.workers(first, second)
            self.assertEqual((code, [row["reason"] for row in rows]), (0, ["", ""]))
        code, rows = self.workers({"peers": [self.peer(1, "down", "refused")]}, {"is_serving": False})
        self.assertEqual((code, [row["healthy"] for row in rows]), (4, [True, False]), rows)
        self.assertEqual(rows[1]["stage"], "serving")


if __name__ == "__main__":
    cli_support.main()
