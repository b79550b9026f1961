#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""`tensorlane health` in the guest: the stages of the data plane of real workers, and what stops them."""
import json
import os
import pathlib
import unittest

import guest_support

BUILD = pathlib.Path(os.environ.get("TENSORLANE_BUILD") or guest_support.ROOT / "build/release")
CLUSTER = {"cluster": {"ps": ["10.10.0.1:4000"], "worker": ["10.10.0.1:4001"]}, "protocol": "grpc+verbs",
           "connect": "eager"}
LOCAL = {"cluster": {"ps": ["127.0.0.1:4000"], "worker": ["127.0.0.1:4001"]}}
# The clusters by name: the settings of all workers, and of the worker in question.
CASES = {
    "good": ({"rdma": "require"}, {}),
    "region": ({"rdma": "require", "verbs": {"keys": "region"}}, {}),
    "mixed": ({}, {"verbs": {"gid_index": 200}}),
    "second": ({"rdma": "require", **LOCAL, "verbs": {"devices": "rxe1,rxe0"}}, {}),
    "none_works": ({**LOCAL, "verbs": {"devices": "rxe1"}}, {}),
    "not_started": ({"rdma": "require"}, {"verbs": {"devices": "^rxe"}}),
}

SCRIPT = f"""
set -u
export LC_ALL=C.UTF-8
T={BUILD}/bin/tensorlane
# try NAME STAGE TASK...: starts the tasks, waits until one of them is at the stage, all of them listen (but in the case
# not_started) and no path is on its way or tried again, and shows the cluster
try() {{
    local config=/tmp/$1.json name=$1 stage=$2 pids=() task
    shift 2
    for task; do
        $T serve -c $config -j $task > /tmp/$name.$task.log 2>&1 &
        pids+=($!)
    done
    for _ in {{1..50}}; do
        $T health -c $config --json > /tmp/shown
        if grep -q '"stage": "'$stage'"' /tmp/shown && ! grep -qE 'being set up|in time' /tmp/shown &&
            {{ [[ $name == not_started ]] || ! grep -q '"stage": "tcp"' /tmp/shown; }}; then break; fi
        sleep 0.1
    done
    echo "== $name"
    cat /tmp/shown
    $T health -c $config --pairs > /tmp/$name.pairs
    kill "${{pids[@]}}"
    wait "${{pids[@]}}"
}}
""" + "".join(f"cat > /tmp/{name}.json <<'END'\n{json.dumps({**CLUSTER, **all_, 'jobs': {'worker': own}})}\nEND\n"
              for name, (all_, own) in CASES.items()) + """
try good paths ps worker
try region paths ps worker
try mixed paths ps worker
# Its only GID is one without a route, which its table does not show.
ip link add d1 type dummy
ip link set d1 mtu 4200
sysctl -qw net.ipv6.conf.d1.disable_ipv6=1
ip link set d1 up
rdma link add rxe1 type rxe netdev d1
try second paths ps worker
grep "a card is passed over" /tmp/second.ps.log >&2
cat /tmp/good.pairs >&2
try none_works device ps worker
try not_started port ps
# A worker that gives a path up says why.
grep "gives no reason" /tmp/*.log >&2 && exit 1
exit 0
"""


class HealthTest(guest_support.GuestTest):
    def assert_finding(self, finding, is_healthy, stage, verified):
        self.assertEqual((is_healthy, stage, verified), (finding["healthy"], finding["stage"], finding["verified"]),
                         finding)

    def assert_measured(self, finding):
        """Latency and rate are those of the path to the other worker, within what an emulated card may have, and no
        other path has any."""
        for peer in finding["peers"]:
            if peer["name"] == finding["name"]:
                self.assertNotIn("latency_ns", peer)
                self.assertNotIn("bytes_per_second", peer)
                self.assertNotIn("mtu", peer)
            else:
                self.assertIn(peer["latency_ns"] // 1000, range(1, 1000 * 1000))
                self.assertIn(peer["bytes_per_second"] // 1000, range(10, 100 * 1000 * 1000))
                self.assertIn(peer["mtu"], (1024, 2048, 4096))

    def test_health(self):
        result = self.run_guest(SCRIPT, "--show", str(BUILD), timeout=240)
        self.assert_status(0, result)
        shown = {}
        for part in result.stdout.split("== ")[1:]:
            name, text = part.split("\n", 1)
            shown[name] = json.loads(text)["workers"]
        for finding in shown["good"]:
            self.assert_finding(finding, True, "paths", "paths")
            self.assertEqual("", finding["reason"])
            found = finding["data_plane"]
            self.assertEqual(("rxe0", 1, "10.10.0.1", "RoCE v2", "active", "Ethernet", "window", True),
                             tuple(found[key] for key in ("device", "port", "gid", "gid_type", "port_state",
                                                         "link_layer", "keys", "isolated")))
            self.assertIn(found["mtu"], (1024, 2048, 4096))
            self.assert_measured(finding)
        for pair in (("ps", "worker"), ("worker", "ps")):
            self.assertRegex(result.stderr, r"/job:{}/task:0 +/job:{}/task:0 +up +ok +verbs +\d+\.\d us +\d+.* "
                                            r"[KMG]i?B/s".format(*pair))
        for finding in shown["region"]:
            self.assert_finding(finding, True, "paths", "paths")
            self.assert_measured(finding)
            self.assertIn("peers are not isolated", finding["reason"])
        self.assert_finding(shown["mixed"][0], True, "paths", "port")
        self.assertIn("over grpc to /job:worker/task:0", shown["mixed"][0]["reason"])
        self.assert_finding(shown["mixed"][1], True, "device", "transports")
        self.assertIn("GID index 200 is asked for", shown["mixed"][1]["reason"])
        self.assertIn("tensorlane devices --config", shown["mixed"][1]["remedy"])
        self.assertNotIn("isolated", shown["mixed"][1]["data_plane"])
        passed_over = r"^rxe1:1 GID 0 fe80:\S+: a probe write failed: the card cannot reach "
        for finding in shown["second"]:
            self.assert_finding(finding, True, "paths", "paths")
            self.assertIn("rxe0 port 1 is not the first choice: rxe1:1 GID 0 fe80:", finding["reason"])
            self.assertEqual("rxe0", finding["data_plane"]["device"])
            self.assertRegex(finding["data_plane"]["passed_over"], passed_over)
            self.assertRegex(finding["data_plane"]["not_tried"], r"^rxe0:1 GID \d+ fe80:\S+$")
        self.assertRegex(result.stderr, r'level=warn msg="a card is passed over" device="rxe1:1 GID 0 fe80:\S+" '
                                        'reason="a probe write failed: the card cannot reach ')
        for finding in shown["none_works"]:
            self.assert_finding(finding, True, "device", "transports")
            self.assertRegex(finding["reason"], passed_over)
            self.assertIn("look at routes", finding["remedy"])
        self.assert_finding(shown["not_started"][0], True, "port", "port")
        self.assert_finding(shown["not_started"][1], False, "tcp", "resolve")
        self.assertIn("it would not start", shown["not_started"][1]["remedy"])
        self.assertIn("excluded by devices", shown["not_started"][1]["remedy"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
