#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The demonstration as a user runs it, on free ports, and what it leaves behind; also the generator of its
checkpoint."""
import json
import os
import shutil
import signal
import socket
import struct
import subprocess

import cli_support
from cli_support import BUILD, PATIENCE, SANITIZE, SOURCE, environment

DEMO = SOURCE / "examples/demo.py"
GENERATOR = BUILD / "examples/make_vgg16"
PARAMETERS = 138357544
FREE_BYTES = 2 * 10**9


class Demo(cli_support.Case):
    def setUp(self):
        super().setUp()
        if not GENERATOR.exists():
            self.skipTest("the examples were not built")
        if shutil.disk_usage(self.folder).free < FREE_BYTES:
            self.skipTest(f"less than {FREE_BYTES // 10**9} GB are free in {self.folder}")
        (self.folder / "tmp").mkdir()
        self.env = environment(TMPDIR=self.folder / "tmp", TENSORLANE_BUILD=BUILD, TENSORLANE=cli_support.PROGRAM)

    def start(self, config, *arguments):
        demo = subprocess.Popen([DEMO, *arguments, config], env=self.env, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, start_new_session=True)
        self.addCleanup(self.end, demo)
        return demo

    def end(self, demo):
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGKILL)
        demo.communicate()

    def assert_nothing_left(self, cluster):
        self.assertEqual(os.listdir(self.folder / "tmp"), [])
        for job in ("ps", "worker"):
            with socket.socket() as probe:
                self.assertNotEqual(probe.connect_ex(("127.0.0.1", cluster.port(job))), 0)

    def test_whole(self):
        if SANITIZE:
            self.skipTest("slow with sanitizers; the parts are tested by themselves")
        cluster = self.cluster(ps=1, worker=1)
        demo = self.start(cluster.path)
        output, _ = demo.communicate(timeout=2 * PATIENCE)
        self.assertEqual(demo.returncode, 0, output)
        self.assertEqual(output.count("\npulled 32 tensors, 553 MB in "), 4, output)
        self.assertEqual(output.count("compared 32 of 32 with "), 4)
        self.assertRegex(output, r"(?m)^classifier\.0\.weight +\[4096, 25088\] +F32 +411041792 +"
                                 r"local (zero-copy|bounce) ")
        for which in ("first", "second"):
            self.assertRegex(output, rf"(?m)^auto +{which} +[0-9.]+ [MG]B/s, "
                                     r"(local (zero-copy|bounce|inline) [0-9]+,? ?)+$")
            self.assertRegex(output, rf"(?m)^grpc +{which} +[0-9.]+ [MG]B/s, grpc 32$")
        self.assertIn("2 of 2 workers are healthy", output)
        self.assertTrue(output.endswith("done: 32 tensors, 138357544 parameters, pulled 4 times and equal\n"))
        self.assert_nothing_left(cluster)

    def test_with_certificates(self):
        """The small checkpoint shows that each step works; of TLS, that nobody gets in without a certificate."""
        cluster = self.cluster(ps=1, worker=1)
        demo = self.start(cluster.path, "--divide", "8", "--tls")
        said = []
        for line in demo.stdout:
            said.append(line)
            if "worker ready" in line and "name=/job:ps/task:0" in line:
                self.assert_error(1, "security.tls", "ls", "--address", cluster.address())
        output = "".join(said)
        self.assertEqual(demo.wait(PATIENCE), 0, output)
        self.assertIn("$ tensorlane cert init --folder", output)
        self.assertIn("$ tensorlane cert issue --config", output)
        self.assertNotIn("PRIVATE", output)
        self.assertRegex(output, r"(?m)^auto +first +[0-9.]+ [MG]B/s, (local (zero-copy|bounce|inline) [0-9]+,? ?)+$")
        self.assertRegex(output, r"(?m)^grpc +second +[0-9.]+ [MG]B/s, grpc 32$")
        self.assertIn("2 of 2 workers are healthy", output)
        self.assertNotIn("authenticates nobody", output)
        self.assertRegex(output, r"done: 32 tensors, [0-9]+ parameters, pulled 4 times and equal\n$")
        self.assert_nothing_left(cluster)

    def test_a_port_in_use(self):
        cluster = self.cluster(ps=1, worker=1)
        with socket.create_server(("127.0.0.1", cluster.port("worker"))):
            output, _ = (demo := self.start(cluster.path)).communicate(timeout=PATIENCE)
        self.assertEqual(demo.returncode, 1, output)
        self.assertIn("another process uses the address", output)
        self.assertIn("demo: /job:worker/task:0 did not start", output)
        self.assert_nothing_left(cluster)

    def test_interrupted(self):
        cluster = self.cluster(ps=1, worker=1)
        demo = self.start(cluster.path)
        for line in demo.stdout:
            if "name=/job:ps/task:0" in line:
                break
        os.killpg(demo.pid, signal.SIGINT)  # A terminal signals the whole group, too.
        demo.communicate(timeout=PATIENCE)
        self.assertEqual(demo.returncode, 130)
        self.assert_nothing_left(cluster)

    def test_without_a_build_or_a_configuration(self):
        for changes, config, pattern in (({"TENSORLANE_BUILD": self.folder}, "x", "run ./dev build"),
                                         ({}, self.folder / "nowhere.json", "cannot read ")):
            changed = {**self.env, **{key: str(value) for key, value in changes.items()}}
            result = subprocess.run([DEMO, config], env=changed, capture_output=True, text=True, check=False,
                                    timeout=PATIENCE)
            self.assertEqual(result.returncode, 1)
            self.assertIn(pattern, result.stderr)

    def test_the_shipped_configuration(self):
        for name in ("demo.json", "demo-rdma.json"):
            checked = self.assert_run(0, "config", "check", SOURCE / "config/examples" / name)
            self.assertIn("(2 tasks)", checked.stdout)


class Generator(cli_support.Case):
    def setUp(self):
        super().setUp()
        if not GENERATOR.exists():
            self.skipTest("the examples were not built")

    def generate(self, code, *arguments, **options):
        result = subprocess.run([GENERATOR, *map(str, arguments)], capture_output=True, text=True, check=False,
                                timeout=PATIENCE, **options)
        self.assertEqual(result.returncode, code, result.stderr)
        return result

    def test_names_shapes_and_values(self):
        path = self.folder / "vgg16.safetensors"
        if shutil.disk_usage(self.folder).free < FREE_BYTES:
            self.skipTest(f"less than {FREE_BYTES // 10**9} GB are free in {self.folder}")
        self.generate(0, path)
        with open(path, "rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(length))
            some = [struct.unpack("<1000f", file.read(4000)) for _ in range(2)]
        self.assertEqual(len(header), 32)
        self.assertEqual(path.stat().st_size, 8 + length + 4 * PARAMETERS)
        count = 0
        for entry in header.values():
            elements = 1
            for dim in entry["shape"]:
                elements *= dim
            count += elements
            self.assertEqual(entry["data_offsets"][1] - entry["data_offsets"][0], 4 * elements)
        self.assertEqual(count, PARAMETERS)
        self.assertEqual(header["features.0.weight"]["shape"], [64, 3, 3, 3])
        self.assertEqual(header["features.28.bias"]["shape"], [512])
        self.assertEqual(header["classifier.0.weight"]["shape"], [4096, 25088])
        self.assertEqual(list(header)[-1], "classifier.6.bias")
        self.assertNotEqual(some[0], some[1])
        self.assertTrue(all(-0.05 <= value <= 0.05 for part in some for value in part))
        self.assertEqual(self.files(), ["vgg16.safetensors"])

    def test_scaled(self):
        path = self.folder / "small.safetensors"
        self.assertIn(": 32 tensors, 8650186 parameters, ", self.generate(0, "--divide", 4, path).stdout)
        with open(path, "rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(length))
        self.assertEqual(path.stat().st_size, 8 + length + 4 * 8650186)
        self.assertEqual(header["features.0.weight"]["shape"], [16, 3, 3, 3])
        self.assertEqual(header["classifier.0.weight"]["shape"], [1024, 6272])
        for divisor in ("3", "", "16", "-"):
            self.assertIn("usage: ", self.generate(2, "--divide", divisor, path).stderr)
        self.generate(2, "--divide")

    def test_usage(self):
        for arguments in ([], ["a", "b", "c"], ["a", "7x"], ["a", ""], ["--help"]):
            self.assertIn("usage: make_vgg16 [--divide 1|2|4|8] PATH [SEED]", self.generate(2, *arguments).stderr)
        self.assertIn("No such file", self.generate(1, self.folder / "no/vgg16.safetensors").stderr)
        self.assertEqual(self.files(), [])


if __name__ == "__main__":
    cli_support.main()
