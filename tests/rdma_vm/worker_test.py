#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Workers on real verbs: the scenarios of all transports (tests/scenarios), and those of a device, of a failing wire,
of what is written where, of health while packets are lost, and of two hosts of which one dies or has a worker that
cannot start (worker_device.py, worker_wire.py, worker_memory.py, worker_probe.py, worker_hosts.py). All of them run
inside the guest."""
import os
import pathlib
import re
import unittest

import guest_support

SCENARIOS = guest_support.ROOT / "tests/scenarios"
# By default the sender's processor takes the packets of the pair. A thread that moves to another processor then
# overtakes its own packets, which no wire does; rxe sends them again, and binds windows anew. So one processor takes
# all packets.
IN_ORDER = "for queue in /sys/class/net/v[ab]/queues/rx-0; do echo 1 > $queue/rps_cpus; done"
BUILD = pathlib.Path(os.environ.get("TENSORLANE_BUILD") or guest_support.ROOT / "build/release")
# The cards reach the GPUs of the double of libcudart.
DIRECT = BUILD / "tests/rdma_vm/libdirect.so"


class WorkerTest(guest_support.GuestTest):
    def run_scenarios(self, program, topology, *options):
        """Runs a program of scenarios: some must have run, all must have passed, and none may be skipped."""
        os.environ.update(TENSORLANE_BUILD=str(BUILD), PYTHONPATH=str(SCENARIOS))
        script = f"export LD_PRELOAD={DIRECT}; python3 -B {program}"
        if topology == "veth":
            script = f"{IN_ORDER}; {script}"
        result = self.run_guest(script, "--topology", topology, "--show", str(BUILD), *options,
                                timeout=450)
        self.assert_status(0, result)
        # Output of the other guest may stand in the middle of a line.
        self.assertRegex(result.stderr, r"\nRan [1-9]\d* tests in ", result.stderr)
        self.assertNotRegex(result.stderr, r"skipped=|FAILED", result.stderr)

    def test_scenarios(self):
        self.run_scenarios("tests/scenarios/run.py verbs", "veth")

    def test_scenarios_of_reading(self):
        self.run_scenarios("tests/scenarios/run.py gdr", "veth")

    def test_one_device(self):
        self.run_scenarios("tests/rdma_vm/worker_device.py", "dummy")

    def test_wire(self):
        self.run_scenarios("tests/rdma_vm/worker_probe.py && python3 -B tests/rdma_vm/worker_wire.py", "veth")

    def test_memory(self):
        self.run_scenarios("tests/rdma_vm/worker_memory.py", "veth")

    def test_hosts(self):
        self.run_scenarios("tests/rdma_vm/worker_hosts.py", "two-guests", "--memory", "768", "--peer",
                           f"export LD_PRELOAD={DIRECT}; exec python3 -B tests/rdma_vm/worker_hosts.py serve")

    def test_demo(self):
        script = "examples/demo.py --divide 4 config/examples/demo-rdma.json"
        result = self.run_guest(script, "--show", str(BUILD), timeout=180)
        self.assert_status(0, result)
        self.assertEqual(2, len(re.findall("paths: verbs zero-copy 17, verbs inline 15$", result.stdout, re.MULTILINE)),
                         result.stdout)
        for path, count in (("zero-copy", 17), ("inline", 15)):
            self.assertEqual(count, len(re.findall(rf"^(?:features|classifier)\.\S+ +\[.* verbs {path} +",
                                                   result.stdout, re.MULTILINE)))
        self.assertIn("2 of 2 workers are healthy", result.stdout)
        self.assertIn("The RDMA card is emulated (soft-RoCE)", result.stdout)
        self.assertIn("done: 32 tensors, 8650186 parameters, pulled 2 times and equal\n", result.stdout)


if __name__ == "__main__":
    unittest.main(verbosity=2)
