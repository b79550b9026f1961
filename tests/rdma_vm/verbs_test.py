#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The verbs provider: its programs in the guest, over one device and over two with a wire between them."""
import os
import pathlib
import unittest

import guest_support

BUILD = pathlib.Path(os.environ.get("TENSORLANE_BUILD") or guest_support.ROOT / "build/release")
PROGRAMS = ["verbs_device_test", "verbs_provider_test", "verbs_failure_test", "verbs_card_test",
            "verbs_direct_test"]


# Memory where huge pages are reserved, first for all processes, then as in a container that may map but not touch them.
HUGE_PAGES = f"""
echo 16 > /proc/sys/vm/nr_hugepages
grep "HugePages_Free: *16" /proc/meminfo >&2
memory() {{
    CK_RUN_CASE=pages {BUILD}/tests/unit/pages_test
    CK_RUN_CASE=pages {BUILD}/tests/unit/local_provider_test
}}
memory
mkdir /tmp/groups
mount -t cgroup2 none /tmp/groups
echo +hugetlb > /tmp/groups/cgroup.subtree_control
mkdir /tmp/groups/none
echo 0 > /tmp/groups/none/hugetlb.2MB.max
echo $$ > /tmp/groups/none/cgroup.procs
memory
"""


class VerbsTest(guest_support.GuestTest):
    def run_programs(self, topology, programs, more=""):
        script = "set -eu\n" + "".join(f"{BUILD / 'tests/rdma_vm' / program}\n" for program in programs) + more
        result = self.run_guest(script, "--topology", topology, "--show", str(BUILD), timeout=300)
        self.assert_status(0, result)
        count = len(programs) + 4 * bool(more)
        self.assertEqual(count, result.stdout.count("100%: Checks: "), result.stdout)

    def test_one_device(self):
        self.run_programs("dummy", PROGRAMS + ["verbs_cycles_test"], HUGE_PAGES)

    def test_wire(self):
        self.run_programs("veth", PROGRAMS)


if __name__ == "__main__":
    unittest.main(verbosity=2)
