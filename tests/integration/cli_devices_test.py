#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""`tensorlane devices` on a machine without RDMA devices, and errors that it finds before it looks for them. The tests
in the virtual machine run it with devices."""
import json
import os

import cli_support
from cli_support import environment, run

CLASS = "/sys/class/infiniband"


def has_devices():
    return os.path.isdir(CLASS) and os.listdir(CLASS)


class Devices(cli_support.Case):
    def test_no_device(self):
        if has_devices():
            self.skipTest("this machine has RDMA devices")
        config = self.cluster(ps=1).path
        for arguments in ([], ["-c", config, "-j", "ps"]):
            result = self.assert_error(3, "no RDMA device: ", "devices", *arguments)
            self.assertEqual(result.stdout, "")
            self.assertIn("rdma link add", result.stderr)
        shown = json.loads(run("devices", "--json").stdout)
        self.assertEqual((shown["devices"], shown["chosen"]), ([], None))
        self.assertIn("no RDMA device", shown["reason"])
        self.assertTrue({"ok", "reason"} <= shown["memlock"].keys())
        shown = json.loads(run("devices", "--json", "-c", config, "-j", "ps").stdout)
        self.assertEqual((shown["name"], shown["rdma"]), ("/job:ps/task:0", "prefer"))

    def test_refused(self):
        config = self.cluster(ps=1).path
        self.assert_error(2, "a task of which cluster", "devices", "--job", "ps")
        self.assert_error(2, "unexpected argument", "devices", "mlx5_0")
        self.assert_error(1, "which task", "devices", "-c", config)
        self.assert_error(1, "there is no task 4", "devices", "-c", config, "-j", "ps", "-t", 4)
        self.assert_error(1, "cannot open", "devices", "-c", self.folder / "missing.json", "-j", "ps")
        self.assert_error(1, "environment variable RDMA_MTU: 1 is not 256", "devices", "-c", config, "-j", "ps",
                          env=environment(RDMA_MTU="1"))
        unknown = self.write_json({"cluster": {"ps": ["no-such-host.invalid:1"]}}, "unknown.json")
        self.assert_error(1, "cannot be resolved", "devices", "-c", unknown, "-j", "ps")


if __name__ == "__main__":
    cli_support.main()
