#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The setting "device": a worker keeps its published files and what is pushed to it in the memory of a GPU, which
belongs to a double of CUDA. The double ends the worker when it touches that memory itself."""
import json
import os

import cli_support
from cli_support import (BUILD, HEALTH, environment, read_metadata, read_safetensors, run, some_tensors,
                         write_safetensors)

METADATA = {"format": "pt", "name": "model"}


def with_cuda(major=12, **changes):
    return environment(LD_LIBRARY_PATH=BUILD / f"tests/fakes/cuda/{major}", **changes)


class DeviceCase(cli_support.Case):
    def setUp(self):
        super().setUp()
        self.model = write_safetensors(self.folder / "model.safetensors", some_tensors(), metadata=METADATA)

    def serve(self, *arguments, env=None, **extra):
        """Starts a worker that keeps everything on gpu:1, unless the arguments say otherwise."""
        self.served = self.cluster(ps=1, extra={"device": "gpu:1", **extra})
        self.worker = self.served.start("ps", 0, *arguments, env=env or with_cuda())
        self.at_ps = ("--config", self.served.path, "--from", "ps:0")

    def pulled(self, *flags, env=None):
        out = self.folder / "out.safetensors"
        self.assert_run(0, "pull", *self.at_ps, "-o", out, *flags, env=env)
        return read_safetensors(out), read_metadata(out)

    def health(self, code=0):
        shown = json.loads(self.assert_run(code, *HEALTH, "--config", self.served.path, "--json").stdout)
        return shown["workers"][0]


class KeptOnDevice(DeviceCase):
    def test_files(self):
        self.serve("--publish", self.model)
        expected = (some_tensors(), METADATA)
        self.assertEqual(self.pulled("--verify-against", self.model), expected)
        self.assertEqual(self.pulled("--no-checksum"), expected)
        self.assertEqual(self.pulled("--protocol", "grpc"), expected)
        self.assertEqual(self.pulled("--device", "gpu:0", env=with_cuda()), expected)
        shown = json.loads(self.assert_run(0, "ls", *self.at_ps, "--json").stdout)
        self.assertEqual({tensor["name"] for tensor in shown["tensors"]}, set(some_tensors()))
        self.assertEqual(self.worker.stop(), 0)

    def test_every_cuda(self):
        for major in (11, 13):
            self.serve("--publish", self.model, env=with_cuda(major), device="gpu:0")
            self.assertEqual(self.pulled(), (some_tensors(), METADATA))
            self.assertEqual(self.worker.stop(), 0)

    def test_the_file_is_needed_no_more(self):
        """What was copied to the device does not change with its file, so that nothing is wrong with the worker."""
        self.serve("--publish", self.model)
        with open(self.model, "r+b") as file:
            file.truncate(100)
        self.assertEqual(self.pulled()[0], some_tensors())
        os.unlink(self.model)
        self.assertEqual(self.pulled()[0], some_tensors())
        self.assertEqual((self.health()["healthy"], self.health()["troubles"]), (True, []))

    def test_pushed(self):
        self.serve()
        to_ps = ("--config", self.served.path, "--to", "ps:0")
        self.assert_run(0, "push", self.model, *to_ps, "--step", 3)
        self.assertEqual(self.pulled(), (some_tensors(), METADATA))
        # Again, over gRPC, and an older step, which is refused.
        self.assert_run(0, "push", self.model, *to_ps, "--step", 4)
        self.assert_error(1, "is published with step 4", "push", self.model, *to_ps, "--step", 2)
        self.assertEqual(self.pulled("--device", "gpu:0", env=with_cuda())[0], some_tensors())
        self.assert_run(0, "rm", "*", "--config", self.served.path, "--from", "ps:0")
        self.assertEqual(self.worker.stop(), 0)

    def test_cuda_is_loaded_for_a_device_only(self):
        """A member loads CUDA where its settings name a GPU; tools that read the same settings do not."""
        self.serve("--publish", self.model, env=with_cuda(LD_DEBUG="files"), device="gpu:0")
        self.assertTrue(self.worker.find("libcudart"))
        env = with_cuda(LD_DEBUG="files")
        for arguments in (("pull", *self.at_ps, "-o", self.folder / "out"), ("ls", *self.at_ps),
                          ("health", "--config", self.served.path), ("config", "check", self.served.path)):
            self.assertNotIn("libcudart", run(*arguments, env=env).stderr)


class Health(DeviceCase):
    """Workers tell which GPUs they have opened, and how tensors on these travel."""

    def health_text(self, *flags):
        return self.assert_run(0, *HEALTH, "--config", self.served.path, *flags).stdout

    def test_where_values_are_kept(self):
        self.serve(protocol="grpc")
        (gpu,) = self.health()["gpus"]
        self.assertEqual(gpu, {"name": "gpu:1", "model": "Fake GPU 1", "pci_address": "fa01:3b:00.0", "lost": False,
                               "kept_on": True, "card": "", "distance": "", "path": "grpc",
                               "reason": "the protocol is grpc"})
        self.assertNotIn("gpu", self.health_text())
        shown = self.health_text("--pairs")
        self.assertRegex(" ".join(shown.split()), "gpu: gpu:1, Fake GPU 1 at fa01:3b:00.0, keeps published files and "
                                                  "pushed tensors; tensors travel as grpc: the protocol is grpc")
        self.assertLessEqual(max(map(len, shown.splitlines())), 80)

    def test_no_gpu_is_used(self):
        """The worker is asked for its GPUs, and loads nothing of CUDA for the answer."""
        self.serve(env=with_cuda(LD_DEBUG="files"), device="host")
        self.assertEqual(self.health()["gpus"], [])
        self.assertNotIn("gpu", self.health_text("--pairs"))
        self.worker.stop()
        self.assertFalse(any("libcudart" in line for line in self.worker.lines))


class CannotStart(cli_support.Case):
    def start(self, pattern, *arguments, env=None, device="gpu:2"):
        cluster = self.cluster(ps=1, extra={"device": device})
        result = self.assert_run(1, "serve", "--no-wait", "--config", cluster.path, "--job", "ps", *arguments,
                                 env=env or with_cuda())
        self.assertRegex(result.stderr.splitlines()[-1], "^tensorlane serve: " + pattern)

    def test_no_such_device(self):
        self.start('"device": there is no gpu:2; CUDA sees 2 of them, counted from gpu:0; set it to a GPU that '
                   'tensorlane devices shows on this machine, or to "host"$')

    def test_no_cuda(self):
        # A library that is none takes the place of those that the machine may have.
        for name in ("13", "12", "11.0"):
            (self.folder / f"libcudart.so.{name}").write_bytes(b"")
        self.start('"device": there is no libcudart', env=environment(LD_LIBRARY_PATH=self.folder))

    def test_last_words(self):
        cluster = self.cluster(ps=1, extra={"device": "gpu:2"})
        worker = self.spawn("serve", "--config", cluster.path, "--job", "ps", env=with_cuda())
        worker.await_line("the worker cannot start; it says why")
        shown = json.loads(self.assert_run(4, "health", "--config", cluster.path, "--json").stdout)
        finding = shown["workers"][0]
        self.assertRegex(finding["reason"], '^it could not start: "device": there is no gpu:2')
        self.assertRegex(finding["remedy"], "set it to a GPU that tensorlane devices shows")
        self.assertEqual(worker.stop(), 1)

    def test_it_does_not_fit(self):
        model = write_safetensors(self.folder / "m", {"a": ("U8", (4,), b""), "b": ("U8", (600 << 20,), b"")},
                                  {"a": 4, "b": 600 << 20})
        self.start(f"{model}: tensor 'b' \\(629 MB\\) cannot be kept on gpu:1: .*out of memory.*; publish less there, "
                   'free memory of the GPU, or set "device" to "host"$', "--publish", model, device="gpu:1")


if __name__ == "__main__":
    cli_support.main()
