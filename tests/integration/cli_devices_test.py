#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""`tensorlane devices` on a machine without RDMA devices, with GPUs of a double of CUDA, and errors that it finds
before it looks for them. The tests in the virtual machine run it with RDMA devices."""
import json
import os

import cli_support
from cli_support import BUILD, environment, run

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
            self.assertRegex(result.stdout, "^(no GPU can be used: |GPU )")
            self.assertIn("rdma link add", result.stderr)
        shown = json.loads(run("devices", "--json").stdout)
        self.assertEqual((shown["devices"], shown["chosen"]), ([], None))
        self.assertIn("no RDMA device", shown["reason"])
        self.assertTrue({"ok", "reason"} <= shown["memlock"].keys())
        shown = json.loads(run("devices", "--json", "-c", config, "-j", "ps").stdout)
        self.assertEqual((shown["name"], shown["rdma"]), ("/job:ps/task:0", "prefer"))

    def test_gpus(self):
        for major in (11, 12, 13):
            env = environment(LD_LIBRARY_PATH=BUILD / f"tests/fakes/cuda/{major}")
            shown = json.loads(run("devices", "--json", env=env).stdout)
            self.assertEqual(shown["cuda"], {"ok": True, "reason": ""})
            self.assertEqual([(gpu["device"], gpu["name"], gpu["pci_address"], gpu["path"]) for gpu in shown["gpus"]],
                             [("gpu:0", "Fake GPU 0", "fa00:3b:00.0", "gpu-proxy"),
                              ("gpu:1", "Fake GPU 1", "fa01:3b:00.0", "gpu-proxy")])
            result = run("devices", env=env)
            self.assertRegex(result.stdout, r"\ngpu:1  Fake GPU 1  fa01:3b:00\.0  537 MB     -  gpu-proxy")
            self.assertIn("not yet run on hardware", result.stdout)

    def test_where_a_task_keeps_values(self):
        env = environment(LD_LIBRARY_PATH=BUILD / "tests/fakes/cuda/12")
        config = self.cluster(ps=1, extra={"device": "gpu:1", "gpu": {"proxy": True}}).path
        of_task = ("--config", config, "--job", "ps")
        shown = json.loads(run("devices", "--json", *of_task, env=env).stdout)
        self.assertEqual([gpu["kept_on"] for gpu in shown["gpus"]], [False, True])
        result = run("devices", *of_task, env=env)
        self.assertIn('/job:ps/task:0 keeps published files and pushed tensors on gpu:1 ("device")\n', result.stdout)
        self.assertIn('no card accesses the GPUs of /job:ps/task:0 ("gpu.proxy")\n', result.stdout)
        self.assertEqual([gpu["kept_on"] for gpu in json.loads(run("devices", "--json", env=env).stdout)["gpus"]],
                         [False, False])

    def test_no_gpu(self):
        # A library that is none takes the place of those that the machine may have.
        for name in ("13", "12", "11.0"):
            (self.folder / f"libcudart.so.{name}").write_bytes(b"")
        env = environment(LD_LIBRARY_PATH=self.folder)
        without, result = json.loads(run("devices", "--json").stdout), run("devices", env=env)
        shown = json.loads(run("devices", "--json", env=env).stdout)
        self.assertEqual((shown["devices"], shown["chosen"]), (without["devices"], without["chosen"]))
        self.assertEqual((shown["gpus"], shown["cuda"]["ok"]), ([], False))
        self.assertIn("there is no libcudart", shown["cuda"]["reason"])
        self.assertIn("no GPU can be used: there is no libcudart", result.stdout)

    def test_other_commands_load_no_cuda(self):
        env = environment(LD_LIBRARY_PATH=BUILD / "tests/fakes/cuda/12", LD_DEBUG="files")
        self.assertIn("libcudart", run("devices", env=env).stderr)
        config = self.cluster(ps=1).path
        for arguments in (("doctor",), ("health", "--config", config), ("config", "check", config)):
            self.assertNotIn("libcudart", run(*arguments, env=env).stderr)

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
