#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Two workers on two hosts, between which the network loses something: `tensorlane health` reaches both and says that
they do not reach each other, why, and what to do."""
import json
import time

import cli_support
import net_support


class Pairs(cli_support.Case):
    connect = "eager"

    def setUp(self):
        super().setUp()
        self.network = net_support.Network(self)
        self.hosts = {"ps": self.network.a, "worker": self.network.b}
        self.path = self.write_json({
            "cluster": {job: [f"{host.address}:4000"] for job, host in self.hosts.items()},
            "protocol": "grpc", "connect": self.connect})

    def start(self):
        for job, host in self.hosts.items():
            process = self.spawn("serve", "--config", self.path, "--job", job, "--task", "0", before=host.inside)
            process.await_line("worker ready")

    def health(self, code, *arguments):
        result = self.assert_run(code, "health", "--config", self.path, "--json", *arguments)
        return {worker["name"]: worker for worker in json.loads(result.stdout)["workers"]}

    def assert_both(self, reason, remedy):
        """Both rows have the same reason, soon, and health exits with the code of unhealthy workers."""
        begin = time.monotonic()
        found = self.health(4)
        cli_support.assert_soon(self, begin)
        for finding in found.values():
            self.assertEqual((finding["healthy"], finding["stage"]), (False, "probe"), finding)
            self.assertRegex(finding["reason"], reason)
            self.assertRegex(finding["remedy"], remedy)
        table = self.assert_run(4, "health", "--config", self.path, "--pairs").stdout
        self.assertIn("0 of 2 workers are healthy", table)
        return found

    def test_nothing_is_lost(self):
        self.start()
        found = self.health(0)
        for finding in found.values():
            self.assertEqual([(probe["ok"], probe["stage"], probe["reason"]) for probe in finding["probes"]],
                             [(True, "", "")])
            self.assertLess(abs(finding["probes"][0]["clock_offset_seconds"]), 5)

    def test_tcp_is_blocked_between_the_two(self):
        self.start()
        self.network.block_tcp()
        self.assert_both("^/job:ps/task:0 does not reach /job:worker/task:0, nor the other way round, which answers "
                         "here: 10.2.0.2:4000 ",
                         "^allow TCP to 10.2.0.2:4000 from the host of /job:ps/task:0 in firewalls")
        quick = self.health(0, "--quick")
        self.assertTrue(all("probes" not in finding for finding in quick.values()))

    def test_large_packets_are_lost_in_one_direction(self):
        self.network.lose_large_to_b()
        self.start()
        found = self.assert_both("^large messages from /job:ps/task:0 to /job:worker/task:0 are lost: 10[.]",
                                 "lower the MTU of the sending interface .*tcp_mtu_probing")
        self.assertEqual(found["/job:ps/task:0"]["probes"][0]["direction"], "to")
        self.assertEqual(found["/job:worker/task:0"]["probes"][0]["direction"], "from")


class LazyPairs(Pairs):
    connect = "lazy"


if __name__ == "__main__":
    net_support.enter()
    cli_support.main()
