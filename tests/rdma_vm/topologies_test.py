#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Two devices in one guest whose packets cross a wire that tests can disturb, and two guests of which one can die."""
import re
import unittest

import guest_support
from guest_support import PERFTEST

VETH = PERFTEST + """
tc qdisc add dev va root netem loss 1%
perftest rxe1 10.9.0.2 rxe0 ib_write_bw -s 65536 -n 20
tc -s qdisc show dev va
tests/rdma_vm/link va down
tests/rdma_vm/link va up
perftest rxe0 10.9.0.1 rxe1 ib_write_bw -s 65536 -n 20
tc qdisc change dev va root netem loss 100%
if timeout 2 bash -c '< /dev/tcp/10.9.0.2/18515'; then exit 4; fi
[[ $? != 1 ]] || exit 5  # refused: not cut off
"""

PEER = """
count=$(cat "$RESULTS/boots" || echo 0)
echo $((count + 1)) > "$RESULTS/boots"
while :; do timeout 20 ib_write_bw -x 1 -d rxe0 -s 65536 -n 20 > /dev/null 2>&1 || true; done
"""
TWO_GUESTS = """
set -eu
reaches() {
    for _ in {1..100}; do
        if timeout 20 ib_write_bw -x 1 -d rxe0 -s 65536 -n 20 10.8.0.2 > /tmp/client 2>&1; then return; fi
        sleep 0.2
    done
    cat /tmp/client
    return 1
}
is_silent() {
    local status=0
    timeout 2 bash -c '< /dev/tcp/10.8.0.2/18515' 2> /tmp/client || status=$?
    [[ $status == 124 ]] || grep -q 'No route' /tmp/client
}
reaches
tests/rdma_vm/peer pause
is_silent
tests/rdma_vm/peer resume
reaches
tests/rdma_vm/peer kill
is_silent
tests/rdma_vm/peer start
reaches
echo "boots of the peer: $(cat "$RESULTS/boots")"
"""


class TopologiesTest(guest_support.GuestTest):
    def test_veth(self):
        result = self.run_guest(VETH, "--topology", "veth")
        self.assert_status(0, result)
        # The transfer moves 20 times 64 KiB, in packets of 4 KiB.
        packets = int(re.search(r"(\d+) pkt", result.stdout)[1])
        self.assertGreaterEqual(packets, 320)

    def test_two_guests(self):
        result = self.run_guest(TWO_GUESTS, "--topology", "two-guests", "--peer", PEER)
        self.assert_status(0, result)
        self.assertEqual("boots of the peer: 2\n", result.stdout)

    def test_peer_fails(self):
        result = self.run_guest('until [[ -e "$RESULTS/guest1/status" ]]; do sleep 0.1; done', "--topology",
                                "two-guests", "--peer", "echo no, thanks; exit 7")
        self.assert_failed("the peer's command has ended with 7", result)
        self.assertIn("peer: no, thanks\n", result.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
