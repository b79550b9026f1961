#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Certificates that are replaced or revoked while workers run: the change counts without a restart, and no other link
breaks."""
import json
import socket
import ssl

import cli_support
from cli_support import PATIENCE, run, some_tensors, wait_until, write_safetensors

CLIENT = "spiffe://example.org/client/client"
ALLOW = [{"who": ["member"], "what": ["read", "list", "push", "peers"]},
         {"who": [CLIENT], "what": ["read", "list", "peers"]}]
TLS = {name: f"certs/{file}" for name, file in
       (("ca", "ca.pem"), ("crl", "ca.crl"), ("certificate", "{name}.pem"), ("key", "{name}.key"))}


class Reload(cli_support.Case):
    def setUp(self):
        super().setUp()
        self.certs = self.folder / "certs"
        self.assert_run(0, "cert", "init", "-o", self.certs)
        self.config = self.cluster(ps=1, worker=1, extra={"connect": "eager", "security": {"tls": TLS, "allow": ALLOW}})
        self.assert_run(0, "cert", "issue", "-o", self.certs, "--config", self.config.path)
        self.tensors = some_tensors()
        self.file = write_safetensors(self.folder / "x.safetensors", self.tensors)

    def start(self):
        """Starts both workers and waits until their link is up."""
        self.ps = self.config.start("ps", 0, "--publish", self.file)
        self.worker = self.config.start("worker")
        self.await_link()

    def links(self):
        """The state of the peer that each worker sees."""
        result = run("health", "--config", self.config.path, "--json")
        workers = json.loads(result.stdout).get("workers", []) if result.stdout else []
        return [peer["state"] for worker in workers for peer in worker.get("peers", [])
                if peer["name"] != worker["name"]]

    def await_link(self):
        wait_until(lambda: self.links() == ["up", "up"], "a link between the workers", lambda: self.ps.output)

    def list(self):
        return run("ls", "--config", self.config.path, "--from", "ps:0")

    def test_a_new_list_of_revoked_certificates_counts_at_once(self):
        self.start()
        self.assertEqual(self.list().returncode, 0)
        self.assert_run(0, "cert", "revoke", "-o", self.certs, self.certs / "client.pem")
        wait_until(lambda: self.list().returncode != 0, "a tool is refused")
        self.assertIn("our certificate is revoked", self.list().stderr)
        self.assert_run(0, "cert", "issue", "-o", self.certs, "--name", "client", "--force")
        self.assertEqual(self.list().returncode, 0, self.list().stderr)
        self.assertEqual(self.links(), ["up", "up"])
        for process in (self.ps, self.worker):
            self.assertIsNone(process.find("peer lost"))

    def begin_handshake(self, port):
        """Does all of a handshake but its last flight, which has the client's certificate. Returns the connection and
        that flight."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(self.certs / "ca.pem")
        context.load_cert_chain(self.certs / "client.pem", self.certs / "client.key")
        context.set_alpn_protocols(["h2"])
        arrived, leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        secured = context.wrap_bio(arrived, leaving)
        connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self.addCleanup(connection.close)
        while True:
            try:
                secured.do_handshake()
                return connection, leaving.read()
            except ssl.SSLWantReadError:
                connection.sendall(leaving.read())
                arrived.write(connection.recv(1 << 16))

    def test_a_certificate_that_is_revoked_during_its_handshake(self):
        """The list counts that is there when the handshake ends."""
        ps = self.config.start("ps", 0)
        port = self.config.port()
        connection, last_flight = self.begin_handshake(port)
        self.assert_run(0, "cert", "revoke", "-o", self.certs, self.certs / "client.pem")
        ps.await_line("certificates loaded again")
        connection.sendall(last_flight)
        line = ps.await_line("TLS handshake failed")
        self.assertIn("certificate revoked", line)
        with self.assertRaises((ConnectionResetError, EOFError)):
            while connection.recv(1 << 16):
                pass
            raise EOFError

    def test_certificates_are_replaced_while_workers_run(self):
        self.start()
        self.assert_run(0, "cert", "issue", "-o", self.certs, "--config", self.config.path, "--force")
        for process in (self.ps, self.worker):
            process.await_line("certificates loaded again")
        self.assertEqual(self.list().returncode, 0)
        self.assertEqual(self.links(), ["up", "up"])
        for process in (self.ps, self.worker):
            self.assertIsNone(process.find("peer lost"))


if __name__ == "__main__":
    cli_support.main()
