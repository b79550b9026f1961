#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A disk that is full, or fills up while a pull runs: the error says how many bytes of which file did not fit, the
target keeps its content, and nothing else is left.

The disk is a small file system that only this test sees: the test runs itself again in a mount namespace. It is skipped
where it cannot make one.
"""
import os
import signal
import subprocess

import cli_support
from cli_support import environment, read_safetensors, some_tensors, write_safetensors

DISK_BYTES = 1 << 20


class Disk(cli_support.Case):
    def setUp(self):
        super().setUp()
        self.disk = self.folder / "disk"
        self.disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", self.disk], check=True)
        self.addCleanup(subprocess.run, ["umount", "--lazy", self.disk], check=False)
        self.out = self.disk / "out.safetensors"

    def serve(self, sizes):
        """Starts a worker that publishes zeros; the argument gives the bytes of each tensor by name."""
        model = write_safetensors(self.folder / "model.safetensors",
                                  {name: ("U8", (size,), b"") for name, size in sizes.items()}, sizes)
        served = self.cluster(ps=1, extra=cli_support.OVER_GRPC)
        self.worker = served.start("ps", 0, "--publish", model)
        self.target = ("--address", served.address())
        return served, model.stat().st_size

    def left(self):
        return sorted(os.listdir(self.disk))

    def fill(self, left_bytes=0):
        """Fills the disk except for so many bytes."""
        free = os.statvfs(self.disk).f_bavail * os.statvfs(self.disk).f_frsize
        (self.disk / "filler").write_bytes(bytes(free - left_bytes))

    def test_no_room_for_a_file(self):
        _, size = self.serve({"big": 4 * DISK_BYTES, "small": 100})
        result = self.assert_error(1, "^tensorlane pull: cannot allocate [0-9]+ bytes of disk space for "
                                      f"{self.disk}/.out.safetensors.tmp-[0-9a-f]+: No space left on device",
                                   "pull", *self.target, "-o", self.out)
        # The writer's own header may be padded differently; the data is what counts.
        asked = int(result.stderr.split("allocate ")[1].split()[0])
        self.assertLess(abs(asked - size), 64)
        self.assertEqual(self.left(), [])
        self.assert_run(0, "pull", "small", *self.target, "-o", self.out)
        self.assertEqual(read_safetensors(self.out), {"small": ("U8", (100,), bytes(100))})

    def test_what_was_there_stays(self):
        self.serve({"big": 4 * DISK_BYTES})
        self.out.write_text("old")
        self.assert_error(1, "No space left", "pull", *self.target, "-o", self.out)
        self.assertEqual((self.left(), self.out.read_text()), (["out.safetensors"], "old"))

    def test_no_room_for_a_folder(self):
        """The first files fit."""
        self.serve({f"t{n}": DISK_BYTES // 3 for n in range(5)})
        # A header of 128 bytes is in front of the data.
        self.assert_error(1, f"^tensorlane pull: cannot allocate {DISK_BYTES // 3 + 128} bytes of disk space for "
                             f"{self.disk}/.npy.tmp-[0-9a-f]+/t[0-9].npy: No space left on device",
                          "pull", *self.target, "-o", f"{self.disk}/npy/")
        self.assertEqual(self.left(), [])

    def test_not_even_a_byte_is_free(self):
        self.serve({"small": 100})
        self.fill()
        self.assert_error(1, "No space left", "pull", *self.target, "-o", self.out)
        self.assert_error(1, "No space left", "pull", *self.target, "-o", f"{self.disk}/npy/")
        self.assertEqual(self.left(), ["filler"])

    def test_it_becomes_full_meanwhile(self):
        """Another program fills the disk after the pull has checked the free space."""
        size = DISK_BYTES * 7 // 8
        served, _ = self.serve({"zeros": size})
        for flags in ([], ["--no-checksum"]):
            gate = cli_support.Gate(self, served.port(), size // 8)
            puller = self.spawn("pull", "--address", gate.address, "-o", self.out, *flags)
            gate.await_held()
            self.fill()
            gate.open()
            self.assertEqual(puller.wait(), 1, puller.output)
            self.assertRegex(puller.output, "^tensorlane pull: a part of .*out.safetensors.tmp-.* could not be written")
            self.assertEqual(self.left(), ["filler"])
            (self.disk / "filler").unlink()
        self.assert_run(0, "pull", *self.target, "-o", self.out)

    def test_it_stops_when_it_is_full(self):
        """A pull does not receive what it cannot write: it ends before the rest has come."""
        size = DISK_BYTES * 7 // 8
        served, _ = self.serve({"zeros": size})
        last = cli_support.Gate(self, served.port(), size // 2)
        first = cli_support.Gate(self, last.port, size // 8)
        puller = self.spawn("pull", "--address", first.address, "-o", self.out, "--timeout", "300s")
        first.await_held()
        self.fill()
        first.open()
        self.assertEqual(puller.wait(), 1, puller.output)
        self.assertIn("could not be written", puller.output)
        self.assertEqual(self.left(), ["filler"])

    def test_the_log_is_on_it(self):
        self.fill()
        served = self.cluster(ps=1)
        model = write_safetensors(self.folder / "model.safetensors", some_tensors())
        (self.disk / "log").touch()
        with open(self.disk / "log", "ab") as log:
            worker = subprocess.Popen([cli_support.PROGRAM, "serve", "--config", served.path, "--job", "ps",
                                       "--publish", model], env=environment(), stdout=log, stderr=log)
        self.addCleanup(worker.wait)
        self.addCleanup(worker.kill)
        cli_support.wait_until(lambda: cli_support.run("health", served.address()).returncode == 0, "a healthy worker")
        worker.send_signal(signal.SIGHUP)
        self.assert_run(0, "pull", "--address", served.address(), "-o", self.folder / "out.safetensors")
        worker.send_signal(signal.SIGTERM)
        self.assertEqual(worker.wait(timeout=cli_support.PATIENCE), 0)
        self.assertEqual((self.disk / "log").read_bytes(), b"")


if __name__ == "__main__":
    cli_support.enter_namespace(["sh", "-c", 'mount -t tmpfs -o size=64k tmpfs "$0"', "/tmp"], "file system")
    cli_support.main()
