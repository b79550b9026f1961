#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The verbs provider: its programs in the guest, over one device and over two with a wire between them."""
import os
import pathlib
import unittest

import guest_support

BUILD = pathlib.Path(os.environ.get("TENSORLANE_BUILD") or guest_support.ROOT / "build/release")
PROGRAMS = ["verbs_device_test", "verbs_provider_test", "verbs_failure_test", "verbs_card_test"]


class VerbsTest(guest_support.GuestTest):
    def run_programs(self, topology, programs):
        script = "set -eu\n" + "".join(f"{BUILD / 'tests/rdma_vm' / program}\n" for program in programs)
        result = self.run_guest(script, "--topology", topology, "--show", str(BUILD), timeout=300)
        self.assert_status(0, result)
        self.assertEqual(len(programs), result.stdout.count("100%: Checks: "), result.stdout)

    def test_one_device(self):
        self.run_programs("dummy", PROGRAMS + ["verbs_cycles_test"])

    def test_wire(self):
        self.run_programs("veth", PROGRAMS)


if __name__ == "__main__":
    unittest.main(verbosity=2)
