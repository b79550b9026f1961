#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Certificates that are replaced or revoked while workers run: the change counts without a restart, and no other link
breaks."""
import json

import cli_support
from cli_support import run, some_tensors, wait_until, write_safetensors

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
