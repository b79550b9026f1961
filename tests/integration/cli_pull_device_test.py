#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""tensorlane pull --device: tensors are received into the memory of a GPU, which belongs to a double of CUDA, and the
output is written from there. The double ends the program when it touches that memory itself."""
import json
import os
import random

import cli_support
from cli_pull_test import PullCase
from cli_support import BUILD, environment, read_safetensors, run, some_tensors, write_safetensors

GPU = ("--device", "gpu:1")


def with_cuda(major=12, **changes):
    return environment(LD_LIBRARY_PATH=BUILD / f"tests/fakes/cuda/{major}", **changes)


class PullOnDevice(PullCase):
    def tensors_of_many_sizes(self):
        """The pinned blocks of the device, through which all bytes go, have 2 MiB."""
        source, block = random.Random(7), 2 << 20
        sizes = (1, 4095, 65536, block - 1, block, block + 1, 2 * block, (4 << 20) + 3, 9 << 20)
        return {**some_tensors(), **{f"of {size}": ("U8", (size,), source.randbytes(size)) for size in sizes}}

    def test_everything(self):
        self.serve(self.tensors_of_many_sizes())
        for major in (11, 12, 13):
            result = self.assert_run(0, "pull", *self.target, *GPU, "-o", self.out(), "--json", "--verify-against",
                                     self.model, env=with_cuda(major))
            self.assertEqual(read_safetensors(self.out()), self.tensors)
            shown, count = json.loads(result.stdout), len(self.tensors)
            self.assertEqual((shown["tensors"], shown["verified"], shown["compared"]), (count, count, count))
            self.assertEqual(shown["device"], "gpu:1")
            self.assertEqual(shown["paths"], {"gpu-proxy": count - 1, "none": 1})
            self.assertIn("its owner has it on the host", shown["reasons"]["gpu-proxy"])
            self.out().unlink()

    def test_without_checksum(self):
        self.serve(self.tensors_of_many_sizes())
        for gpu in ("gpu:0", "gpu:1"):
            self.assert_run(0, "pull", *self.target, "--device", gpu, "-o", self.out(), "--no-checksum",
                            env=with_cuda())
            self.assertEqual(read_safetensors(self.out()), self.tensors)

    def test_npy(self):
        tensors = {"a/b": ("F32", (2, 1), bytes(range(8))), "c": ("U8", (3,), b"xyz")}
        self.serve(tensors)
        self.assert_run(0, "pull", *self.target, *GPU, "-o", f"{self.folder}/output/folder/", env=with_cuda())
        for name, (_, _, data) in tensors.items():
            self.assertEqual((self.folder / f"output/folder/{name}.npy").read_bytes()[-len(data):], data)

    def test_more_than_is_asked_for_at_once(self):
        """The last tensor is asked for when the memory of the first ones has been given back."""
        size = 100 << 20
        names = {f"t{i}": size for i in range(4)}
        self.model = write_safetensors(self.folder / "big", {name: ("U8", (size,), b"") for name in names}, names)
        with open(self.model, "r+b") as file:
            for i in range(len(names)):
                file.seek(-size * i - 9, os.SEEK_END)
                file.write(f"number {i:02}".encode())
        cluster = self.cluster(ps=1)
        cluster.start("ps", 0, "--publish", self.model)
        self.target = ("--config", cluster.path, "--from", "ps:0")
        self.assert_run(0, "pull", *self.target, *GPU, "-o", self.out(), "--verify-against", self.model,
                        env=with_cuda())

    def test_more_tensors_than_pinned_blocks(self):
        """While the command waits for a block nothing drives its worker, which must not keep all of them."""
        tensors = {f"t{i:04}": ("U8", (i % 50,), bytes([i % 251]) * (i % 50)) for i in range(600)}
        self.serve(tensors)
        for flags in ((), ("--protocol", "grpc")):
            self.assert_run(0, "pull", *self.target, *GPU, "-o", self.out(), *flags, env=with_cuda())
            self.assertEqual(read_safetensors(self.out()), tensors)

    def test_over_grpc_only_where_that_is_allowed(self):
        """The largest tensor is one for which the pool can never have enough memory."""
        tensors = {"small": ("U8", (1000,), bytes(1000)), "large": ("U8", (3 << 20,), bytes(3 << 20))}
        model = write_safetensors(self.folder / "model.safetensors", tensors)
        for rdma in ("prefer", "require"):
            cluster = self.cluster(ps=1, extra={"rdma": rdma, "local": {"pool": "1MiB", "max_pool": "2MiB"}})
            cluster.start("ps", 0, "--publish", model)
            pull = ("pull", "--config", cluster.path, "--from", "ps:0", *GPU, "-o", self.out())
            if rdma == "prefer":
                self.assertIn("grpc 1, local gpu-proxy 1", self.assert_run(0, *pull, env=with_cuda()).stdout)
                self.assertEqual(read_safetensors(self.out()), tensors)
            else:
                self.assert_error(1, "raise its maximum .local.max_pool.", *pull, env=with_cuda())

    def test_strings(self):
        """They are refused as without a device, and leave the others alone."""
        cluster = self.serve()
        self.publish_strings(cluster.address(), "vocabulary")
        self.pull_error("tensor 'vocabulary' consists of strings", *GPU, env=with_cuda())
        self.assert_run(0, "pull", *self.target, *GPU, "-o", self.out(), "--exclude", "vocabulary", env=with_cuda())
        self.assertEqual(read_safetensors(self.out()), self.tensors)

    def test_replaced_by_another_shape(self):
        self.pull_while_the_shape_changes(*GPU, env=with_cuda())

    def test_other_bytes(self):
        self.serve()
        dtype, shape, data = self.tensors["mask"]
        other = dict(self.tensors, mask=(dtype, shape, data[:-1] + bytes([data[-1] ^ 1])))
        path = write_safetensors(self.folder / "other.safetensors", other)
        self.pull_error("tensor 'mask' differs from that of .*other", *GPU, "--verify-against", path, env=with_cuda())

    def test_cuda_is_loaded_for_a_device_only(self):
        self.serve()
        for flags, check in (((), self.assertNotIn), (GPU, self.assertIn)):
            result = self.assert_run(0, "pull", *self.target, *flags, "-o", self.out(),
                                     env=with_cuda(LD_DEBUG="files"))
            check("libcudart", result.stderr)
        self.assertEqual(json.loads(run("pull", *self.target, "-o", self.out(), "--json").stdout)["device"], "host")


class Refused(PullCase):
    def test_no_device(self):
        self.target = ("--address", "127.0.0.1:1")
        for text in ("", "gpu", "gpu:", "gpu:x", "gpu:-1", "gpu:1x", "gpu:12345678901", "cuda:0", "host", "0"):
            self.assert_error(2, f"^tensorlane pull: --device {text}: not a GPU; write one as gpu:0", "pull",
                              *self.target, "--device", text, "-o", self.out(), env=with_cuda())
        self.assert_nothing_left()

    def test_device_that_does_not_exist(self):
        self.serve()
        self.pull_error("--device gpu:2: there is no gpu:2; CUDA sees 2 of them", "--device", "gpu:2",
                        env=with_cuda())
        result = self.pull_error("--device gpu:999999: there is no gpu:999999", "--device", "gpu:999999", "--json",
                                 env=with_cuda())
        shown = json.loads(result.stdout)
        self.assertEqual((shown["complete"], shown["device"]), (False, "gpu:999999"))

    def test_no_cuda(self):
        # A library that is none takes the place of those that the machine may have.
        for name in ("13", "12", "11.0"):
            (self.folder / f"libcudart.so.{name}").write_bytes(b"")
        self.serve()
        self.pull_error("--device gpu:1: there is no libcudart", *GPU, env=environment(LD_LIBRARY_PATH=self.folder))


if __name__ == "__main__":
    cli_support.main()
