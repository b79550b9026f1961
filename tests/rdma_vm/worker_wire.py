#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Inside the guest with two devices and a wire between them: workers while the network fails. Run by worker_test.py.
What they do while their peers fail is in tests/scenarios/peers.py, whose workers these are.
"""
import contextlib
import pathlib
import time
import unittest

import peers
import transports
import workers

LINK = str(pathlib.Path(__file__).with_name("link"))


class Prefer(peers.Harness):
    """What fails goes on over gRPC. Every packet that is sent again may break a path here: rxe then binds a window
    anew, which fails since it is bound."""
    transport = transports.BY_NAME["verbs"]

    @contextlib.contextmanager
    def disturbed(self, what):
        for device in ("va", "vb"):
            workers.run("tc", "qdisc", "add", "dev", device, "root", "netem", *what.split())
        try:
            yield
        finally:
            for device in ("va", "vb"):
                workers.run("tc", "qdisc", "del", "dev", device, "root")

    def through(self, what):
        with self.disturbed(what):
            found = self.receive_all()
        self.assert_over(found)
        print({path: sum(done.path == path for done in found.values()) for path in workers.PATHS}, what, flush=True)
        self.assert_comes_back()

    def test_loss_of_1_percent(self):
        self.through("loss 1%")

    def test_loss_of_10_percent(self):
        self.through("loss 10%")

    def test_corruption(self):
        self.through("corrupt 2%")

    def test_partition(self):
        with self.disturbed("loss 100%"):
            asked = self.ask_all()
            time.sleep(3)
        self.assert_over(self.wait_all(asked))
        self.assert_comes_back()

    def link_down(self, end):
        asked = self.ask_all()
        workers.run(LINK, end, "down")
        time.sleep(2)
        workers.run(LINK, end, "up")
        self.assert_over(self.wait_all(asked))
        self.assert_comes_back()

    def test_local_link_down(self):
        self.link_down("va")

    def test_remote_link_down(self):
        self.link_down("vb")

    def test_gid_removed(self):
        asked = self.ask_all()
        workers.run("ip", "addr", "del", "10.9.0.1/32", "dev", "va")
        time.sleep(2)
        workers.run("ip", "addr", "add", "10.9.0.1/32", "dev", "va")
        workers.run(LINK, "va", "up")
        self.assert_over(self.wait_all(asked))
        self.assert_comes_back()


class Require(Prefer):
    """What fails is UNAVAILABLE, or is asked for again."""
    rdma = "require"


if __name__ == "__main__":
    unittest.main(verbosity=2)
