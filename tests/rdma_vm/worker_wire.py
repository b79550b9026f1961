#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Runs inside the guest with two devices and a wire between them, started by worker_test.py: workers while the network
fails. tests/scenarios/peers.py, whose workers these are, has their behaviour while peers fail.

Each fault must hit running transfers. The tests show it by packets that the devices sent again, by the report that the
path is lost, or over a wire so slow that some tensors had arrived before the fault and others had not.
"""
import contextlib
import pathlib
import unittest

import peers
import transports
import workers

LINK = str(pathlib.Path(__file__).with_name("link"))
PARTITION = str(pathlib.Path(__file__).with_name("partition"))
# The transfer of all tensors takes some seconds.
SLOW = "rate 40mbit limit 10000"
# The counters of a device for lost and damaged packets.
RETRANSMISSION_COUNTERS = ("rcvd_seq_err", "out_of_seq_request", "duplicate_request", "retry_exceeded_err",
                           "completer_retry_err")


def retransmissions():
    """Returns how many lost packets the devices have had to repeat so far."""
    folders = pathlib.Path("/sys/class/infiniband").glob("rxe*/ports/1/hw_counters")
    return sum(int((folder / name).read_text()) for folder in folders for name in RETRANSMISSION_COUNTERS
               if (folder / name).exists())


@contextlib.contextmanager
def undone(*command):
    """Runs it at the end, however the test ends."""
    try:
        yield
    finally:
        workers.run(*command)


class Wire(peers.Harness):
    transport = transports.BY_NAME["verbs"]

    @contextlib.contextmanager
    def disturbed(self, what):
        """Shapes the wire like that in both directions."""
        self.disturb("add", what)
        try:
            yield
        finally:
            for device in ("va", "vb"):
                workers.run("tc", "qdisc", "del", "dev", device, "root")

    @staticmethod
    def disturb(how, what):
        for device in ("va", "vb"):
            workers.run("tc", "qdisc", how, "dev", device, "root", "netem", *what.split())

    @contextlib.contextmanager
    def broken(self, *command):
        """Disturbs the middle of transfers over a slow wire until the loss is reported; returns the requests."""
        with workers.logged() as log, self.disturbed(SLOW):
            asked, is_hit = self.interrupt(lambda: workers.run(*command))
            self.assertTrue(is_hit, "all had arrived before")
            workers.wait_until(lambda: self.reports(log()), "the loss is reported")
            yield asked, log


class Prefer(Wire):
    """What fails over the path continues over gRPC. Every packet that is sent again may break a path here: rxe then
    binds a window anew, which fails because it is bound."""

    def through(self, what):
        before = retransmissions()
        with workers.logged() as log:
            with self.disturbed(what):
                found = self.receive_all()
            lost = retransmissions() - before
            reports = self.reports(log())
        self.assert_over(found)
        print({path: sum(done.path == path for done in found.values()) for path in workers.PATHS}, what,
              f"{lost} retransmissions", reports, flush=True)
        # A device does not count a loss when it repeats the packet before another one has come.
        self.assertTrue(lost or reports, "nothing was lost")
        self.assert_comes_back()

    def test_loss_of_10_percent(self):
        self.through("loss 10%")

    def test_partition(self):
        with self.broken(PARTITION) as (asked, _):
            pass
        self.assert_over(self.wait_all(asked))
        self.assert_comes_back()

    def link_down(self, end):
        with undone(LINK, end, "up"), self.broken(LINK, end, "down") as (asked, _):
            pass
        self.assert_over(self.wait_all(asked))
        self.assert_comes_back()

    def test_local_link_down(self):
        self.link_down("va")

    def test_remote_link_down(self):
        self.link_down("vb")

    def test_gid_removed(self):
        address = "10.9.0.1/32", "dev", "va"
        with undone(LINK, "va", "up"), undone("ip", "addr", "add", *address), \
                self.broken("ip", "addr", "del", *address) as (asked, _):
            pass
        self.assert_over(self.wait_all(asked))
        self.assert_comes_back()


class Read(Wire):
    """The receiver reads. A read whose bytes were lost is repeated by its card."""
    transport = transports.BY_NAME["gdr"]
    through, test_loss, test_partition = Prefer.through, Prefer.test_loss_of_10_percent, Prefer.test_partition


class Require(Prefer):
    """What fails over the path ends with UNAVAILABLE, or is asked again."""
    rdma = "require"

    def test_loss_of_1_percent(self):
        self.through("loss 1%")

    def test_corruption(self):
        self.through("corrupt 2%")


class Deadlines(Wire):
    """Either the worker or the card finds out that the peer does not answer. gRPC takes its time here."""
    timeouts = {"keepalive": "60s", "keepalive_answer": "60s", "drain": "1s"}

    def setUp(self):
        pass

    def test_card_that_tries_for_ever(self):
        """The card retries for ever, as rxe does with a retry count of 7."""
        self.start({"keys": "region", "piece": "128KiB", "peer_timeout": "2s", "retry_count": 7})
        with self.broken(PARTITION) as (_, log):
            self.assertIn("has been silent for", self.reports(log())[0])

    def test_card_of_the_peer_that_would_try_for_ever(self):
        """The card takes our settings: its writes fail long before the peer time-out."""
        self.start({"keys": "region", "piece": "128KiB", "peer_timeout": "100s", "timeout": 12, "retry_count": 3},
                   ps={"timeout": 0, "retry_count": 7})
        with self.broken(PARTITION):
            self.ps.await_log("the peer does not answer: it is gone, or the network between is down")


if __name__ == "__main__":
    unittest.main(verbosity=2)
