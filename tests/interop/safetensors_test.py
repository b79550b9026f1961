#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Files of the safetensors package are published, and the package loads what pull and push have made of them."""
import sys

import cli_support
from cli_support import run

try:
    import numpy
    import safetensors
    import safetensors.numpy
except ImportError as missing:
    print(f"a package of PyPI is not there: {missing}")
    sys.exit(cli_support.SKIPPED)

TYPES = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32",
         "float64",
         "complex64"]


def tensors_of_all_types():
    random = numpy.random.default_rng(1)
    made = {f"layer.{name}": random.integers(0, 2, (3, 5, 7)).astype(name) for name in TYPES}
    made["scalar"] = numpy.array(3.5, dtype=numpy.float32)
    made["empty"] = numpy.zeros((0, 4), dtype=numpy.float32)
    made["large"] = random.random((1000, 1000), dtype=numpy.float32)
    return made


class Safetensors(cli_support.Case):
    def setUp(self):
        super().setUp()
        self.tensors = tensors_of_all_types()
        self.model = self.folder / "model.safetensors"
        self.metadata = {"format": "np", "author": "Zoë"}
        safetensors.numpy.save_file(self.tensors, self.model, metadata=self.metadata)

    def assert_loads(self, path):
        """The package reads the file, and its tensors and metadata are those that were saved."""
        with safetensors.safe_open(path, framework="np") as file:
            self.assertEqual(file.metadata(), self.metadata)
        loaded = safetensors.numpy.load_file(path)
        self.assertEqual(sorted(loaded), sorted(self.tensors))
        for name, tensor in self.tensors.items():
            self.assertEqual(loaded[name].dtype, tensor.dtype, name)
            self.assertEqual(loaded[name].shape, tensor.shape, name)
            self.assertTrue(numpy.array_equal(loaded[name], tensor), name)

    def pull(self, cluster, *options):
        output = self.folder / "pulled.safetensors"
        result = run("pull", "--config", cluster.path, "--from", "ps:0", "-o", output, *options)
        self.assertEqual(result.returncode, 0, result.stderr)
        return output

    def test_what_was_saved_is_pulled_and_loads(self):
        for protocol in ("auto", "grpc"):
            cluster = self.cluster(ps=1)
            cluster.start("ps", 0, "--publish", self.model)
            self.assert_loads(self.pull(cluster, "--protocol", protocol))

    def test_what_was_pushed_is_pulled_and_loads(self):
        cluster = self.cluster(ps=1)
        cluster.start("ps", 0)
        result = run("push", "--config", cluster.path, "--to", "ps:0", self.model)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assert_loads(self.pull(cluster))


if __name__ == "__main__":
    cli_support.main()
