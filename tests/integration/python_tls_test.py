#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The Python package under TLS, with certificates of tensorlane cert: what may be done, what is refused, and the
settings file of the plug-ins for engines."""
import json
import logging
import os
import pathlib
import subprocess
import tempfile
import unittest
from unittest import mock

from cli_support import free_ports
from python_support import BUILD, PATIENCE, tensorlane, wait_until

from tensorlane import _engine

READ_ONLY = [{"who": ["any"], "what": ["read", "peers"]}]


class Secured(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        ps, worker = (f"127.0.0.1:{port}" for port in free_ports(2))
        self.cluster = {"ps": [ps], "worker": [worker]}
        self.config = self.write("cluster.json", "certs", cluster=self.cluster)
        self.make_certificates("certs")

    def write(self, name, certs, **settings):
        tls = {"ca": f"{certs}/ca.pem", "certificate": f"{certs}/{{name}}.pem", "key": f"{certs}/{{name}}.key"}
        path = self.folder / name
        path.write_text(json.dumps({"log": {"level": "error"}, "security": {"tls": tls, "allow": READ_ONLY},
                                    **settings}))
        return path

    def make_certificates(self, certs):
        # The program has its sanitizer inside, and does not start with another one loaded before it.
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        for arguments in (["init"], ["issue", "--config", self.config]):
            subprocess.run([BUILD / "bin/tensorlane", "cert", *arguments, "--folder", self.folder / certs], check=True,
                           capture_output=True, env=environment)

    def open(self, config, job):
        worker = tensorlane.Worker(config, job=job)
        self.addCleanup(worker.close)
        return worker

    def test_members_and_what_they_may_not_do(self):
        owner, asker = self.open(self.config, "ps"), self.open(self.config, "worker")
        owner.publish("key", b"value" * 100_000, step=1)
        got = asker.recv_wait("ps:0", "key", timeout=PATIENCE)
        self.assertEqual((bytes(got), got.step), (b"value" * 100_000, 1))
        with self.assertRaises(tensorlane.PermissionDenied) as caught:
            asker.put_wait("ps:0", "mine", b"value", timeout=PATIENCE)
        self.assertEqual((caught.exception.peer, caught.exception.key), ("ps:0", "mine"))

    def test_a_worker_of_another_authority(self):
        owner = self.open(self.config, "ps")
        owner.publish("key", b"value")
        self.make_certificates("others")
        stranger = self.open(self.write("others.json", "others", cluster=self.cluster), "worker")

        def is_refused():
            with self.assertRaises(tensorlane.DeadlineExceeded) as caught:
                stranger.wait_for_peers(["ps:0"], timeout=0.2)
            return "the certificate of" in str(caught.exception)

        wait_until(is_refused, "the stranger is refused")
        with self.assertRaises(tensorlane.DeadlineExceeded):
            stranger.recv_wait("ps:0", "key", timeout=0.1)
        self.assertEqual(owner.counters()["tensors_sent"], 0)

    def test_the_settings_of_engines(self):
        """Both sides have their certificates from the file that TENSORLANE_SETTINGS names."""
        endpoints = []
        for name in ("ps-0", "worker-0"):
            path = self.write(f"{name}.json", "certs")
            path.write_text(path.read_text().replace("{name}", name))
            endpoints.append(_engine.Endpoint(lambda: "127.0.0.1", logging.getLogger("engine")))
            with mock.patch.dict(os.environ, {_engine.SETTINGS: str(path)}):
                self.addCleanup(endpoints[-1].worker.close)
        owner, asker = endpoints
        owner.worker.publish("key", b"value" * 100_000)
        got, = asker.receive(asker.peer(owner.worker.address), ["key"], [None], PATIENCE).wait()
        self.assertEqual(bytes(got), b"value" * 100_000)
        self.make_certificates("others")
        path = self.write("stranger.json", "others")
        path.write_text(path.read_text().replace("{name}", "worker-0"))
        stranger = _engine.Endpoint(lambda: "127.0.0.1", logging.getLogger("engine"))
        with mock.patch.dict(os.environ, {_engine.SETTINGS: str(path)}):
            self.addCleanup(stranger.worker.close)
        with self.assertRaisesRegex(tensorlane.Unavailable, "is gone: .*the certificate of"):
            stranger.receive(stranger.peer(owner.worker.address), ["key"], [None], PATIENCE).wait()


if __name__ == "__main__":
    unittest.main(verbosity=2)
