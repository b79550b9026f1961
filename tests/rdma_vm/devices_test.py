#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""`tensorlane devices` in the guest: what it says of real devices, what a task would use, and why it would not use
others."""
import json
import os
import pathlib
import unittest

import guest_support

BUILD = pathlib.Path(os.environ.get("TENSORLANE_BUILD") or guest_support.ROOT / "build/release")
CLUSTER = {"cluster": {"ps": ["10.10.0.1:4000", "10.10.0.99:4000"]}, "protocol": "grpc+verbs", "rdma": "require",
           "jobs": {"ps": {"tasks": {"1": {"verbs": {"devices": "rxe0"}}}}}}

# The only GID of rxe1 has no route, so the device's table does not show it.
SECOND = {"cluster": {"ps": ["127.0.0.1:4000"]}, "verbs": {"devices": "rxe1,rxe0"}}

# A soft-RoCE port has one partition key.
KEYS = {"cluster": {"ps": ["10.10.0.1:4000"]}, "verbs": {"pkey_index": 5}, "protocol": "grpc+verbs"}

SCRIPT = f"""
set -u
export LC_ALL=C.UTF-8
devices() {{ {BUILD}/bin/tensorlane devices "$@"; echo "exit $?"; }}
cat > /tmp/c.json <<'END'
{json.dumps(CLUSTER)}
END
cat > /tmp/second.json <<'END'
{json.dumps(SECOND)}
END
cat > /tmp/keys.json <<'END'
{json.dumps(KEYS)}
END
show() {{ echo "== $1"; shift; "$@" 2>&1; }}
show table devices
show json devices --json
show task devices -c /tmp/c.json -j ps
show named devices -c /tmp/c.json -j ps -t 1
show wrong_gid env RDMA_GID_INDEX=200 {BUILD}/bin/tensorlane devices -c /tmp/c.json -j ps
show excluded env RDMA_DEVICE=^rxe {BUILD}/bin/tensorlane devices -c /tmp/c.json -j ps
show keys devices -c /tmp/keys.json -j ps
doctor() {{ {BUILD}/bin/tensorlane doctor --json "$@"; }}
show doctor doctor
show doctor_task doctor -c /tmp/c.json
show doctor_keys doctor -c /tmp/keys.json
show check_keys {BUILD}/bin/tensorlane config check /tmp/keys.json
ip link set "$(rdma -j link show rxe0/1 | sed 's/.*"netdev":"\\([^"]*\\)".*/\\1/')" down
show down devices
show doctor_down doctor
ip link add d1 type dummy
ip link set d1 mtu 4200
sysctl -qw net.ipv6.conf.d1.disable_ipv6=1
ip link set d1 up
rdma link add rxe1 type rxe netdev d1
ip link set d0 up
show passed_over devices -c /tmp/second.json -j ps
show second_json devices -c /tmp/second.json -j ps --json
sed -i s/rxe1,rxe0/rxe1/ /tmp/second.json
show first_only devices -c /tmp/second.json -j ps
show memlock setpriv --bounding-set -ipc_lock bash -c 'ulimit -l 64; {BUILD}/bin/tensorlane devices --json'
exit 0
"""


class DevicesTest(guest_support.GuestTest):
    def test_devices(self):
        result = self.run_guest(SCRIPT, "--show", str(BUILD))
        self.assert_status(0, result)
        parts = dict(part.split("\n", 1) for part in result.stdout.split("== ")[1:])
        self.assertRegex(parts["table"], r"ORDER +DEVICE +PORT +GID +ADDRESS +TYPE")
        self.assertRegex(parts["table"], r" 1  rxe0 +1 +\d+  10\.10\.0\.1 +RoCE v2 ")
        self.assertIn("exit 0", parts["table"])
        shown = json.loads(parts["json"].rsplit("exit 0", 1)[0])
        self.assertEqual((shown["chosen"]["device"], shown["chosen"]["state"], shown["chosen"]["windows"]),
                         ("rxe0", "active", True))
        self.assertIn("/job:ps/task:0 would use rxe0 port 1 with GID ", parts["task"])
        self.assertIn("its GID is the worker's address, RoCE v2", parts["task"])
        self.assertIn("/job:ps/task:1 would use rxe0 port 1", parts["named"])
        self.assertIn("would use none, and would not start: rdma is \"require\"", parts["wrong_gid"])
        self.assertIn("GID index 200 is asked for", parts["wrong_gid"])
        self.assertIn("excluded by devices \"^rxe\"", parts["excluded"])
        beyond = "verbs.pkey_index 5 is beyond the table of partition keys of this port: give one of 0 to 0"
        self.assertIn(beyond, parts["keys"])
        self.assertIn("exit 3", parts["keys"])
        self.assertIn("warning: /tmp/keys.json: /job:ps/task:0, which is to run on this machine, cannot use rxe0 "
                      f"port 1: {beyond}", parts["check_keys"])
        self.assertIn("/tmp/keys.json: ok (1 task)", parts["check_keys"])
        self.check_doctor({name: {line["what"]: line for line in json.loads(part)["lines"]}
                           for name, part in parts.items() if name.startswith("doctor")})
        self.assertIn("the port is down", parts["down"])
        self.assertIn("exit 3", parts["down"])
        row = r" {}  {} +1 +\d+  {} .*  {}\n"
        for name in ("passed_over", "first_only"):
            self.assertRegex(parts[name], row.format(1, "rxe1", r"fe80\S+",
                                                     "a probe write failed: the card cannot reach .*"))
        self.assertRegex(parts["passed_over"], row.format(2, "rxe0", r"10\.10\.0\.1",
                                                          "RoCE v2 of a device in devices; a "
                                                          "write through it was verified"))
        self.assertIn("/job:ps/task:0 would use rxe0 port 1", parts["passed_over"])
        self.assertIn("exit 0", parts["passed_over"])
        shown = json.loads(parts["second_json"].rsplit("exit 0", 1)[0])
        self.assertEqual(("rxe0", True), (shown["chosen"]["device"], shown["chosen"]["verified"]))
        self.assertEqual([("rxe1", False, False), ("rxe0", True, True), ("rxe0", True, None)],
                         [(each["device"], each["usable"], each["verified"]) for each in shown["devices"]])
        self.assertIn("/job:ps/task:0 would use none: its tensors travel over gRPC", parts["first_only"])
        self.assertIn("exit 3", parts["first_only"])
        self.assertIn("ulimit -l unlimited", json.loads(parts["memlock"])["memlock"]["reason"])

    def check_doctor(self, reports):
        for name in ("doctor", "doctor_task"):
            lines = reports[name]
            for what in ("port rxe0:1", "GIDs of rxe0:1", "partition keys of rxe0:1", "memory windows of rxe0"):
                self.assertEqual(lines[what]["verdict"], "ok", lines[what])
            self.assertIn("10.10.0.1 RoCE v2", lines["GIDs of rxe0:1"]["value"])
            self.assertIn("rdma_rxe", lines["RDMA modules"]["value"])
            self.assertEqual(lines["UDP port 4791"]["verdict"], "unknown")
        card = reports["doctor_task"]["card for /job:ps/task:0"]
        self.assertRegex(card["value"], "^rxe0 port 1 with GID [0-9]+; a write through it was verified$")
        keys = reports["doctor_keys"]["partition keys of rxe0:1"]
        self.assertEqual((keys["verdict"], keys["value"]), ("note", "0: 0xffff"))
        self.assertIn("verbs.pkey_index is 5, and the table of the port has 1 entries", keys["cause"])
        port = reports["doctor_down"]["port rxe0:1"]
        self.assertEqual((port["verdict"], port["cause"]), ("note", "the port is down"))


if __name__ == "__main__":
    unittest.main(verbosity=2)
