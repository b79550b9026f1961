#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The wheel that ./dev wheel has built: what is inside, the tests of the package with it and NumPy of PyPI, its types,
and the program."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import zipfile

import wheel_support
from wheel_support import ROOT, WHEELS


# What is written in Python is not checked itself, and what engines load is not without them.
MYPY_SETTINGS = """[mypy]
ignore_errors = true
ignore_missing_imports = true
"""
ALLOWED = r"""
tensorlane\.(Blocking)?Subscription\.__init__  # only Worker makes them
tensorlane\.Tensor\.__buffer__  # of Python 3.12
tensorlane\.Worker\.__del__
tensorlane\.(ray|sglang|verl|vllm)
"""


class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = wheel_support.install(cls)

    def run_python(self, *arguments):
        environment = {**os.environ, "PYTHONPATH": self.folder, "TENSORLANE_PYTHON_PACKAGES": self.folder}
        result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment,
                                timeout=200, check=False)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout

    def test_contents(self):
        self.assertRegex(WHEELS[0].name, r"^tensorlane-[\d.]+-cp311-abi3-manylinux_2_\d+_x86_64\.whl$")
        names = zipfile.ZipFile(WHEELS[0]).namelist()
        for wanted in ("py.typed", "__init__.pyi", "bin/tensorlane", "licenses/LICENSE"):
            self.assertTrue(any(name.endswith(wanted) for name in names), wanted)
        self.assertFalse([name for name in names if "verbs" in name or ".libs/libgrpc" in name])

    def test_stable_interface(self):
        """The extension uses nothing but what Python 3.11 and later promise to keep."""
        self.run_python("-m", "abi3audit", "--strict", WHEELS[0])

    def test_licenses(self):
        """Each library inside is a component of a bill of materials, and each component has its license."""
        wheel = zipfile.ZipFile(WHEELS[0])
        texts = {pathlib.Path(name).stem: wheel.read(name).decode() for name in wheel.namelist()
                 if "/licenses/" in name and not name.endswith("/")}
        components = [component for name in wheel.namelist() if name.endswith(".cdx.json")
                      for component in json.loads(wheel.read(name))["components"]]
        names = {component["name"] for component in components} - {"tensorlane"}
        # Licenses of what gRPC contains: of Debian's package of the same, or of Debian's gRPC that contains it, too.
        others = {"abseil-cpp": "libabsl", "address_sorting": "libgrpc", "re2": "libre2", "upb": "libgrpc",
                  "xxhash": "libxxhash", "zlib": "zlib1g", "uthash": "uthash-dev"}
        for name in names:
            found = [text for stem, text in texts.items() if stem.startswith(others.get(name, name))]
            self.assertTrue(found and min(map(len, found)) > 500, name)
        self.assertLessEqual({"grpcio", "utf8_range", *others}, names)
        for library in (name for name in wheel.namelist() if ".libs/" in name and ".so" in name):
            stem = pathlib.Path(library).name.split("-")[0].replace("libcrypto", "libssl")
            self.assertTrue(any(name.startswith(stem) for name in names), library)

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

    def test_types(self):
        """A program that uses the package passes mypy --strict, and the stubs are like the module."""
        with tempfile.TemporaryDirectory() as folder:
            settings, allowed = pathlib.Path(folder, "settings"), pathlib.Path(folder, "allowed")
            settings.write_text(MYPY_SETTINGS)
            allowed.write_text(ALLOWED)
            self.run_python("-m", "mypy", "--strict", "--cache-dir", folder, ROOT / "tests/interop/typed_program.py")
            self.run_python("-m", "mypy.stubtest", "--mypy-config-file", settings, "--allowlist", allowed,
                            "--ignore-unused-allowlist", "tensorlane")

    def test_program(self):
        version = self.run_python("-c", "import sys; from tensorlane import _program; sys.argv[1:] = ['version']; "
                                  "_program.main()")
        self.assertRegex(version, r"gRPC .*1\.\d+")


if __name__ == "__main__":
    unittest.main(verbosity=2)
