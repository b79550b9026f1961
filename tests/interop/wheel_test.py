#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The wheel that ./dev wheel has built: what is inside, the tests of the package with it and NumPy of PyPI, the
program, and a process that has grpcio as well, in either order of import."""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import zipfile

ROOT = pathlib.Path(os.environ["TENSORLANE_SOURCE"])
WHEELS = list((ROOT / "build/wheel/dist").glob("tensorlane-*.whl"))
BOTH = """
def theirs():
    import grpc
    with grpc.insecure_channel("127.0.0.1:9") as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=0.2)
        except grpc.FutureTimeoutError:
            print("theirs")

def ours():
    import tensorlane
    with tensorlane.Worker({"log": {"level": "error"}, "protocol": "grpc"}, address="127.0.0.1:0") as owner, \\
            tensorlane.Worker({"log": {"level": "error"}, "protocol": "grpc"}, address="127.0.0.1:0") as asker:
        owner.publish("key", b"value")
        got = asker.recv_wait(asker.add_peer(owner.address), "key")
        print(bytes(got), got.path)
"""

if not WHEELS:
    print("there is no wheel in build/wheel/dist: run ./dev wheel")
    sys.exit(77)


class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
                        "--no-index", "--target", cls.folder.name, WHEELS[0]], check=True)

    def run_python(self, *arguments):
        environment = {**os.environ, "PYTHONPATH": self.folder.name, "TENSORLANE_PYTHON_PACKAGES": self.folder.name}
        result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment,
                                timeout=200, check=False)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout

    def test_contents(self):
        self.assertRegex(WHEELS[0].name, r"^tensorlane-[\d.]+-cp311-abi3-manylinux_2_\d+_x86_64\.whl$")
        names = zipfile.ZipFile(WHEELS[0]).namelist()
        for wanted in ("py.typed", "__init__.pyi", "bin/tensorlane", "licenses/LICENSE", "licenses/grpcio.txt",
                       "licenses/libssl3.txt", "sboms/auditwheel.cdx.json", "sboms/grpc.cdx.json"):
            self.assertTrue(any(name.endswith(wanted) for name in names), wanted)
        self.assertFalse([name for name in names if "verbs" in name or "libgrpc" in name])

    def test_suite(self):
        for test in sorted((ROOT / "tests/integration").glob("python_*_test.py")):
            with self.subTest(test.name):
                self.run_python(test)

    def test_ml_dtypes(self):
        printed = self.run_python("-c", """
import ml_dtypes, numpy, tensorlane
for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"):
    values = numpy.array([[0.5, 1], [2, 4]]).astype(getattr(ml_dtypes, name))
    tensor = tensorlane.wrap(values)
    back = numpy.asarray(tensor)
    assert back.dtype == values.dtype and numpy.shares_memory(back, values) and (back == values).all(), name
    print(tensor.dtype, tensor.shape)
""")
        self.assertEqual(printed.split("\n")[:2], ["BF16 (2, 2)", "F8_E4M3 (2, 2)"])

    def test_program(self):
        version = self.run_python("-c", "import sys; from tensorlane import _program; sys.argv[1:] = ['version']; "
                                  "_program.main()")
        self.assertRegex(version, r"gRPC .*1\.\d+")

    def test_grpcio_in_the_same_process(self):
        for calls in (("theirs", "ours", "theirs"), ("ours", "theirs", "ours")):
            with self.subTest(calls):
                printed = self.run_python("-c", BOTH + "\n".join(f"{call}()" for call in calls))
                self.assertEqual(printed.split("\n")[:-1],
                                 [{"theirs": "theirs", "ours": "b'value' grpc"}[call] for call in calls])


if __name__ == "__main__":
    unittest.main(verbosity=2)
