# SPDX-License-Identifier: Apache-2.0
"""What the tests of workers under TLS share: a cluster with certificates of tensorlane cert."""
import socket
import ssl
import subprocess

import cli_support
from cli_support import PATIENCE

# What the tools of these tests do.
EVERYBODY = [{"who": ["any"], "what": ["read", "list", "push", "peers", "withdraw"]}]


def openssl(*arguments):
    return subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=True).stdout


class TlsCase(cli_support.Case):
    def secured(self, extra=None, allow=EVERYBODY, **jobs):
        """Makes an authority, certificates for all tasks and the tools, and a configuration that uses them."""
        settings = {"tls": {"ca": "certs/ca.pem", "certificate": "certs/{name}.pem", "key": "certs/{name}.key"},
                    "allow": allow}
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
                      self.assert_probed(0, "health", "--config", cluster.path).stdout)
