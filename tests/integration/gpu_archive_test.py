#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The archive of ./dev gpu-archive, unpacked in an empty folder, with a double of CUDA in the place of a driver and
libcudart: what its script `run` prints, and how it ends. The archive is made without PyPI, and so has no libcudart."""
import os
import pathlib
import re
import subprocess
import tarfile
import tempfile

import cli_support
from cli_support import BUILD, PATIENCE, SOURCE

MAX_BYTES = 60 << 20
GLIBC = re.compile(r"^(linux-vdso|/lib64/ld-linux|lib(c|m|dl|rt|pthread|resolv)\.so)")
# Those of the machine come first.
OWN = ("libstdc++.so.6", "libgcc_s.so.1")


def write_program(path, text):
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)


# What stands in the place of gpu_check: $1 is the check.
STUB = """
case $1 in
about)
    case $LD_LIBRARY_PATH in
    *cuda*) echo "libcudart has version 12.9" ;;
    *) echo "there is no libcudart"; exit 77 ;;
    esac
    ;;
worker) echo "ok     worker: right"; {worker} ;;
pair) echo "ok     pair: right"; {pair} ;;
streams) echo "the device is not one for this"; exit 77 ;;
esac
"""


class Archive(cli_support.Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.place = tempfile.TemporaryDirectory()
        folder = pathlib.Path(cls.place.name)
        cls.file, cls.root = folder / "gpu.tar.gz", folder / "tensorlane-gpu"
        made = subprocess.run([SOURCE / "tests/gpu/archive", cls.file], capture_output=True, text=True, check=True,
                              env={**os.environ, "TENSORLANE_BUILD": str(BUILD), "PIP_NO_INDEX": "1"})
        cls.said = made.stderr
        with tarfile.open(cls.file) as archive:
            archive.extractall(folder)
        cls.double = folder / "double"
        cls.double.mkdir()
        (cls.double / "libcudart.so.13").symlink_to(BUILD / "tests/fakes/cuda/13/libcudart.so.13")
        (cls.double / "libcuda.so.1").symlink_to("libcudart.so.13")

    @classmethod
    def tearDownClass(cls):
        cls.place.cleanup()
        super().tearDownClass()

    def start(self, *command, path="/usr/bin:/bin", **changes):
        """Runs a command in an environment that knows nothing of the build. Returns its exit status and output."""
        options = {name: value for name, value in os.environ.items() if name.endswith("SAN_OPTIONS")}
        result = subprocess.run(command, env={"PATH": path, **options, **changes}, cwd=self.folder, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=2 * PATIENCE, check=False)
        return result.returncode, result.stdout

    def test_what_is_in_it(self):
        self.assertIn("the archive has no libcudart: ", self.said)
        self.assertFalse((self.root / "cuda").exists())
        self.assertLess(self.file.stat().st_size, MAX_BYTES)
        about = (self.root / "ABOUT").read_text()
        self.assertRegex(about, r"^commit: ([0-9a-f]{40}(, with changes)?|unknown)\n"
                                r"tensorlane \d+\.\d+\.\d+ \([^)]+\); ")
        self.assertRegex(about, r"needs glibc 2\.\d+, and 2\.\d+ where")

    def test_libraries(self):
        """All but those of glibc come from the archive."""
        for program in ("gpu_check", "gpu_dmabuf"):
            code, output = self.start("ldd", self.root / "bin" / program)
            self.assertEqual(code, 0, output)
            for line in output.splitlines():
                name, _, path = line.strip().partition(" => ")
                if not GLIBC.match(name) and name not in OWN:
                    self.assertTrue(path.startswith(str(self.root / "bin/../lib/")), line)

    def test_everything_with_a_double(self):
        tools = self.folder / "tools"
        tools.mkdir()
        write_program(tools / "compute-sanitizer", 'echo "===== ERROR SUMMARY: 0 errors in $6"\n"$5" about\n')
        code, output = self.start(self.root / "run", path=f"{tools}:/usr/bin:/bin", LD_LIBRARY_PATH=str(self.double),
                                  PYTHONPATH=str(SOURCE / "tests/fakes/cuda"))
        self.assertEqual(code, 0, output)
        self.assertNotRegex(output, "(?m)^FAIL")
        log, = self.folder.glob("tensorlane-gpu-*.log")
        self.assertEqual(log.read_text(), output)
        for text in ("tensorlane on a GPU, 20", "commit: ", "gpu:1: Fake GPU 1", "libcudart has version 13.0",
                     "not yet run on hardware"):
            self.assertIn(text, output)
        for name in ("dma-buf gpu:0", "tl_tensor_copy gpu:1", "worker gpu:0 -> gpu:1", "pair grpc gpu:0 -> gpu:0",
                     "pair auto host -> gpu:1", "streams tl_tensor_copy, own stream",
                     "streams auto recv, per-thread stream", "compute-sanitizer pair"):
            self.assertRegex(output, f"(?m)^ok     {re.escape(name)}: ")
        self.assertRegex(output, r"(?m)^ok     pair auto gpu:0 -> host: .*; paths: [a-z-]+ \d+, the largest because: ")
        self.assertIn("ok     compute-sanitizer worker: ===== ERROR SUMMARY: 0 errors in worker", output)
        self.assertRegex(output, "(?m)^ok     PyTorch tl_tensor_copy: ")
        for name in ("to host, 64 MiB", "from host, 64 MiB", r"between processes, \d+ MiB"):
            self.assertRegex(output, rf"(?m)^figure {name}: \d\.\d\d of ")
        self.assertRegex(output.splitlines()[-1], r"^\d\d ok, 0 failed, \d skipped; written to tensorlane-gpu-")

    def test_wrong_bytes_are_seen(self):
        code, output = self.start(self.root / "bin/gpu_check", "streams", LD_LIBRARY_PATH=str(self.double),
                                  FAKE_CUDA_WRONG_KERNELS="1")
        self.assertEqual(code, 1, output)
        self.assertRegex(output, "(?m)^FAIL   streams grpc send, own stream: ")

    def test_no_driver(self):
        lacking = self.folder / "lacking"
        lacking.mkdir()
        (lacking / "libcuda.so.1").write_bytes(b"")
        code, output = self.start(self.root / "run", "log", LD_LIBRARY_PATH=str(lacking))
        self.assertEqual(code, 77, output)
        self.assertIn("there is no libcuda.so.1", output)
        self.assertIn("nothing was checked", output)

    def run_stub(self, worker=":", pair=":"):
        """Runs the script alone, with programs that end as a test wants."""
        target = self.folder / "stub"
        for name in ("bin", "cuda"):
            (target / name).mkdir(parents=True)
        for name in ("run", "ABOUT"):
            (target / name).write_bytes((self.root / name).read_bytes())
        write_program(target / "bin/gpu_check", STUB.format(worker=worker, pair=pair))
        for name in ("gpu_dmabuf", "tensorlane"):
            write_program(target / "bin" / name, "exit 0\n")
        return self.start("sh", target / "run", "log", PYTHON="no-python")

    def test_own_runtime_is_used_where_there_is_none(self):
        code, output = self.run_stub()
        self.assertEqual(code, 0, output)
        self.assertIn("libcudart has version 12.9", output)
        self.assertIn("skip   streams: the device is not one for this", output)
        self.assertRegex(output, r"2 ok, 0 failed, \d skipped; written to log\n$")

    def test_a_failure_is_counted_once_and_ends_nothing(self):
        code, output = self.run_stub(worker="echo 'FAIL   worker: wrong'; exit 1")
        self.assertEqual(code, 1, output)
        self.assertIn("ok     pair: right", output)
        self.assertRegex(output, r"2 ok, 1 failed, \d skipped")

    def test_a_check_that_dies_has_failed(self):
        for end in ("kill -SEGV $$", "exit 1", "exit 5"):
            code, output = self.run_stub(pair=end)
            self.assertEqual(code, 1, output)
            self.assertRegex(output, r"(?m)^FAIL   pair: ended with \d+$")
            self.assertRegex(output, r"2 ok, 1 failed, \d skipped")
            subprocess.run(["rm", "-r", self.folder / "stub"], check=True)

    def test_its_manual(self):
        code, output = self.start(self.root / "run", "--help")
        self.assertEqual(code, 2)
        self.assertIn("./run [LOG]", output)


if __name__ == "__main__":
    cli_support.main()
