#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""`tensorlane doctor` on loopback: a sound machine, limits that are too low, names that mislead, and peers that cannot
be reached."""
import os
import shutil

import cli_support
from doctor_support import DoctorCase

REQUIRE = {"protocol": "grpc+verbs", "rdma": "require"}


class Doctor(DoctorCase):
    def test_a_sound_machine(self):
        served = self.cluster(ps=1, worker=1)
        for arguments in ([], ["--config", served.path]):
            lines = self.doctor(*arguments, code=0)
            for what in ("tensorlane", "kernel", "locked memory", "open files", "RDMA modules", "huge pages",
                         "NUMA nodes", "kernel log"):
                self.assertIn(what, lines)
        self.assertEqual(lines["host 127.0.0.1"]["value"], "127.0.0.1 (IPv4)")

    def test_text(self):
        result = self.assert_run(0, "doctor")
        first, titles, *_, last = result.stdout.splitlines()
        self.assertRegex(first, r"^tensorlane [0-9.]+ on .*, \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
        self.assertRegex(titles, "^VERDICT +WHAT +VALUE$")
        self.assertRegex(last, r"^0 faults, \d+ notes, \d+ unknown, \d+ ok$")
        explained = [line for line in result.stdout.splitlines() if line.startswith("    ")]
        self.assertLessEqual(max(map(len, explained), default=0), 80)

    def test_refused(self):
        self.assert_error(2, "unexpected argument", "doctor", "x")
        self.assert_error(1, "cannot open", "doctor", "--config", self.folder / "missing.json")

    def test_limit_of_open_files(self):
        served = self.cluster(ps=1, worker=1)
        line = self.doctor("-c", served.path, under=("prlimit", "--nofile=70:70"), code=4)["open files"]
        self.assertEqual((line["verdict"], line["value"]), ("fault", "70"))
        self.assertIn("a worker with 1 peers needs some 80 descriptors", line["cause"])
        self.assertIn("LimitNOFILE=", line["remedy"])
        line = self.doctor("-c", served.path, under=("prlimit", "--nofile=1000:1000"), code=0)["open files"]
        self.assertEqual((line["verdict"], line["value"]), ("note", "1000"))
        self.assertIn("limits.connections", line["remedy"])

    def test_limit_of_locked_memory(self):
        limit = ["prlimit", "--memlock=65536:65536"]
        if os.geteuid() == 0:
            if not shutil.which("setpriv"):
                self.skipTest("there is no setpriv (util-linux)")
            limit += ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"]
        line = self.doctor(under=limit)["locked memory"]
        self.assertIn(line["verdict"], ("note", "fault"))  # a fault where there is a card
        self.assertEqual(line["value"], "65.5 KB")
        served = self.cluster(ps=1, worker=1, extra=REQUIRE)
        line = self.doctor("-c", served.path, under=limit, code=4)["locked memory"]
        self.assertEqual(line["verdict"], "fault")
        self.assertIn("the limit is 65.5 KB", line["cause"])
        self.assertIn("LimitMEMLOCK=infinity", line["remedy"])

    def test_no_card_is_a_fault_where_it_is_required(self):
        if os.path.isdir("/sys/class/infiniband"):
            self.skipTest("this machine has RDMA devices")
        required = self.cluster(ps=1, worker=1, extra=REQUIRE)
        line = self.doctor("-c", required.path, code=4)["RDMA modules"]
        self.assertEqual(line["verdict"], "fault")
        self.assertIn("the kernel knows no RDMA device", line["cause"])
        preferred = self.cluster("preferred.json", ps=1, worker=1, extra={**REQUIRE, "rdma": "prefer"})
        self.assertEqual(self.doctor("-c", preferred.path, code=0)["RDMA modules"]["verdict"], "ok")


if __name__ == "__main__":
    cli_support.main()
