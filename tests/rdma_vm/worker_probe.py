#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Runs inside the guest with two devices and a wire between them, started by worker_test.py: `tensorlane health` while
the network loses packets of the devices, and no others. The workers reach each other over TCP all the time."""
import contextlib
import json
import pathlib
import subprocess
import tempfile
import time
import unittest

import transports
import workers

PS, WORKER = "/job:ps/task:0", "/job:worker/task:0"
# A fault must be named so soon after it has begun, or after the workers have started.
SOON_SEC = 5
BLOCK = "pref", "1", "ipproto", "udp", "dport", "4791", "blackhole"
# The total length in the header of IP: 1,408 to 2,047 bytes in two parts, 2,048 to 4,095, 4,096 to 8,191.
LARGE = ("0x0580 0xff80", "0x0600 0xfe00", "0x0800 0xf800", "0x1000 0xf000")


@contextlib.contextmanager
def blocked():
    """No packet of a device arrives at the other one."""
    for end in ("va", "vb"):
        workers.run("ip", "rule", "add", "iif", end, *BLOCK)
    try:
        yield
    finally:
        for end in ("va", "vb"):
            workers.run("ip", "rule", "del", "iif", end, *BLOCK)


@contextlib.contextmanager
def large_lost():
    """Packets of UDP that are larger than 1,400 bytes do not arrive at vb."""
    workers.run("tc", "qdisc", "add", "dev", "vb", "clsact")
    try:
        for length in LARGE:
            workers.run("tc", "filter", "add", "dev", "vb", "ingress", "protocol", "ip", "u32",
                        "match", "ip", "protocol", "17", "0xff", "match", "u16", *length.split(), "at", "2",
                        "action", "drop")
        yield
    finally:
        workers.run("tc", "qdisc", "del", "dev", "vb", "clsact")


class Probes(unittest.TestCase):
    def start(self, **settings):
        self.stack = contextlib.ExitStack()
        self.addCleanup(self.stack.close)
        self.config = transports.BY_NAME["verbs"].cluster(**settings)
        self.config["cluster"] = {job: addresses[:1] for job, addresses in self.config["cluster"].items()}
        self.path = pathlib.Path(self.stack.enter_context(tempfile.TemporaryDirectory()), "cluster.json")
        self.path.write_text(json.dumps(self.config), encoding="utf-8")
        for job in ("ps", "worker"):
            self.stack.enter_context(workers.Server(self.config, job))

    def health(self, *options):
        """Returns the exit status and the rows by name."""
        result = subprocess.run([workers.PROGRAM, "health", "--config", self.path, "--json", *options],
                                stdout=subprocess.PIPE, text=True, check=False)
        return result.returncode, {row["name"]: row for row in json.loads(result.stdout)["workers"]}

    def wait_until_paths_are_up(self):
        workers.wait_until(lambda: all(row["verified"] == "paths" for row in self.health("--quick")[1].values()),
                           "the data paths are up")

    def await_fault(self, status):
        """Returns the rows once all of them name a fault. Results of a probe hold for two seconds while all is well."""
        begin = time.monotonic()
        found, rows = self.health()
        while not all(row["reason"] for row in rows.values()) and time.monotonic() - begin < SOON_SEC:
            found, rows = self.health()
        took = time.monotonic() - begin
        print(f"{self.id()}: {took:.1f} s", *(f"{row['reason']}; {row['remedy']}" for row in rows.values()),
              sep="\n  ", flush=True)
        self.assertEqual(status, found, rows)
        self.assertLess(took, SOON_SEC)
        return rows

    def assert_unhealthy(self, reason, remedy):
        """Both rows have the fault of the pair, which one worker at least has found; that one is named first."""
        rows = self.await_fault(4)
        self.assertIn("path", [probe["stage"] for row in rows.values() for probe in row["probes"]])
        for row in rows.values():
            self.assertEqual((False, "probe"), (row["healthy"], row["stage"]), row)
            self.assertRegex(row["reason"], f"^no tensor travels between ({PS} and {WORKER}|{WORKER} and {PS}), "
                                            f"because their data path fails: {reason}")
            self.assertRegex(row["remedy"], remedy)

    def assert_over_grpc(self, reason, remedy):
        """Each row tells of the path, and is healthy all the same."""
        for name, row in self.await_fault(0).items():
            self.assertEqual((True, "paths"), (row["healthy"], row["stage"]), row)
            self.assertRegex(row["reason"], f"^over grpc to {WORKER if name == PS else PS}: {reason}")
            self.assertRegex(row["remedy"], remedy)

    def assert_well(self):
        status, rows = self.health()
        self.assertEqual(0, status, rows)
        for row in rows.values():
            self.assertEqual((True, ""), (row["healthy"], row["reason"]), row)
            self.assertEqual([(True, "", "")], [(probe["ok"], probe["stage"], probe["reason"])
                                                for probe in row["probes"]])

    NOTHING = r".*nothing arrives through rxe\d:1 .* while the link over TCP works: UDP port 4791 is blocked between"
    ALLOW = r"^allow it in both directions in firewalls and security groups"
    SIZE = r".*packets with 1024 bytes of data pass through rxe0:1 from 10.9.0.1 to 10.9.0.2, those with 2048 do not"
    MTU = r"^set verbs.mtu to 1024, or raise the MTU of the switch ports"

    def test_blocked_at_start_and_lazy(self):
        with blocked():
            self.start(connect="lazy")
            self.assert_over_grpc(self.NOTHING, self.ALLOW)

    def test_blocked_while_idle_and_require(self):
        self.start(connect="eager", rdma="require")
        self.wait_until_paths_are_up()
        self.assert_well()
        with blocked():
            self.assert_unhealthy(self.NOTHING, self.ALLOW)

    def test_blocked_under_lazy_and_require(self):
        with blocked():
            self.start(connect="lazy", rdma="require")
            self.assert_unhealthy(self.NOTHING, self.ALLOW)

    def test_blocked_at_start(self):
        with blocked():
            self.start(connect="eager")
            self.assert_over_grpc(self.NOTHING, self.ALLOW)

    def test_large_packets_are_lost_while_idle(self):
        self.start(connect="lazy", rdma="require")
        self.assert_well()
        with large_lost():
            self.assert_unhealthy(self.SIZE, self.MTU)

    def test_large_packets_are_lost_at_start(self):
        with large_lost():
            self.start(connect="eager")
            self.assert_over_grpc(self.SIZE, self.MTU)


if __name__ == "__main__":
    unittest.main(verbosity=2)
