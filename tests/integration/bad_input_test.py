#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Files that lie, change or disappear: each command says which file and why, writes nothing, and a worker that serves
several files goes on with the others."""
import json
import os
import struct

import cli_support
from cli_support import HEALTH, read_safetensors, some_tensors, write_safetensors

ARRAY = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }\n"
ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def safetensors(header, data=b"", length=None):
    """Returns the bytes of a file. The header is an object that JSON can write, or the text itself."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def npy(header, data, version=1):
    text = header.encode()
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text)) + text + data


def entry(**changes):
    return {"a": {**ENTRY, **changes}}


# For each kind of file and each defect: the bytes, and what the message says besides the file's name.
LYING = {
    "safetensors": {
        "no bytes": (b"", "is empty"),
        "half of the length": (b"\x10\0\0\0", "4 bytes are too few"),
        "a length without header": (safetensors(b"", length=16), "a header of 16 bytes in a file of 8"),
        "a length beyond the file": (safetensors(entry(), bytes(4), 4096), "a header of 4096 bytes in a file of"),
        "a length beyond any file": (safetensors(entry(), bytes(4), 2**64 - 1), f"a header of {2**64 - 1} bytes"),
        "a cut header": (safetensors(b'{"a":{"dtype":"F32","sha'), "not valid JSON"),
        "a list": (safetensors(b"[1, 2]  "), "does not start with '{'"),
        "nesting": (safetensors(b'{"a":' + b"[" * 100000 + b"]" * 100000 + b"}"), "depth"),
        "a name that is not UTF-8": (safetensors(b'{"\xff":' + json.dumps(ENTRY).encode() + b"}"), "byte 0xff"),
        "an empty name": (safetensors({"": ENTRY}, bytes(4)), "name of a tensor has 0 bytes"),
        "overlapping offsets": (safetensors({"a": {**ENTRY, "shape": [2], "data_offsets": [0, 8]},
                                             "b": {**ENTRY, "data_offsets": [4, 8]}}, bytes(8)),
                                "tensor 'b' .* overlaps"),
        "the same bytes twice": (safetensors({"a": ENTRY, "b": ENTRY}, bytes(4)), "tensor 'b' .* overlaps"),
        "a hole": (safetensors({"a": ENTRY, "b": {**ENTRY, "data_offsets": [8, 12]}}, bytes(12)), "tensor 'b' .* hole"),
        "bytes of no tensor": (safetensors(entry(), bytes(9)), "end at byte 4 of the data, which has 9"),
        "offsets beyond the file": (safetensors(entry(shape=[100], data_offsets=[0, 400]), bytes(4)),
                                    "tensor 'a': .*\\[0, 400\\]"),
        "offsets beyond any file": (safetensors(entry(data_offsets=[2**63, 2**63 + 4]), bytes(4)), "too big integer"),
        "offsets the wrong way round": (safetensors(entry(data_offsets=[4, 0]), bytes(4)), "tensor 'a': "),
        "a negative offset": (safetensors(entry(data_offsets=[-4, 0]), bytes(4)), "tensor 'a': "),
        "a name twice": (safetensors(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                                     b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', bytes(8)),
                         "duplicate object key near '\"a\"'"),
        "a name twice, in two spellings": (
            safetensors(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                        b'"\\u0061":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', bytes(8)), "duplicate"),
        "a shape with more bytes": (safetensors(entry(shape=[2]), bytes(4)),
                                    "tensor 'a': F32 of shape \\[2\\] has 8 bytes, data_offsets span 4"),
        "a shape with fewer bytes": (safetensors(entry(data_offsets=[0, 8]), bytes(8)),
                                     "tensor 'a': F32 of shape \\[1\\] has 4 bytes, data_offsets span 8"),
        "a shape beyond 64 bits": (safetensors(entry(shape=[2**62, 4]), bytes(4)), "tensor 'a': .*2\\^63"),
        "a negative dimension": (safetensors(entry(shape=[-1]), bytes(4)), "tensor 'a': dimension 0"),
        "a dimension that is no number": (safetensors(entry(shape=["1"]), bytes(4)), "tensor 'a': dimension 0"),
        "17 dimensions": (safetensors(entry(shape=[1] * 17), bytes(4)), "tensor 'a': rank 17"),
        "an unknown dtype": (safetensors(entry(dtype="F33"), bytes(4)), "tensor 'a': unknown dtype \"F33\""),
    },
    "npy": {
        "no bytes": (b"", "is empty"),
        "another beginning": (b"\x93NUMPX\x01\x00", "does not start as"),
        "a cut header": (npy(ARRAY, b"")[:20], "a header of 58 bytes in a file of 20"),
        "cut data": (npy(ARRAY, bytes(7)), "has 8 bytes, but 7 follow"),
        "more data": (npy(ARRAY, bytes(9)), "has 8 bytes, but 9 follow"),
        "objects": (npy(ARRAY.replace("<f4", "|O"), bytes(16)), "dtype '\\|O' is not supported"),
        "no shape": (npy("{'descr': '<f4', 'fortran_order': False}\n", bytes(8)), "not a dictionary"),
        "a version to come": (npy(ARRAY, bytes(8), 9), "version 9"),
    },
}


class Lying(cli_support.Case):
    def for_each(self, check):
        """Calls check(path, pattern) for each file of LYING; the message must match the pattern."""
        for kind, files in LYING.items():
            for what, (data, pattern) in files.items():
                with self.subTest(kind, what=what):
                    path = self.folder / f"lying.{kind}"
                    path.write_bytes(data)
                    check(path, f"/lying.{kind}.* ?{pattern}")

    def test_it_is_not_served(self):
        config = self.cluster(ps=1).path
        self.for_each(lambda path, pattern: self.assert_error(
            1, "^tensorlane serve: .*" + pattern, "serve", "--no-wait", "--config", config, "--job", "ps", "--publish",
            path))

    def test_it_is_not_pushed(self):
        cluster = self.cluster(ps=1)
        worker = cluster.start()
        self.for_each(lambda path, pattern: self.assert_error(
            1, "^tensorlane push: .*" + pattern, "push", path, "--address", cluster.address()))
        self.assertIn("0 tensors,", self.assert_run(0, "ls", "--address", cluster.address()).stdout)
        self.assertEqual(worker.stop(), 0)

    def test_nothing_is_like_it(self):
        cluster = self.cluster(ps=1)
        cluster.start("ps", 0, "--publish", write_safetensors(self.folder / "model.safetensors", some_tensors()))
        (self.folder / "output").mkdir()

        def check(path, pattern):
            self.assert_error(1, "^tensorlane pull: .*" + pattern, "pull", "--address", cluster.address(), "-o",
                              self.folder / "output/out.safetensors", "--verify-against", path)
            self.assertEqual(os.listdir(self.folder / "output"), [])
        self.for_each(check)


class ServedCase(cli_support.Case):
    """A worker that serves two files, one of which is damaged while it runs."""

    def setUp(self):
        super().setUp()
        (self.folder / "output").mkdir()
        self.hurt = write_safetensors(self.folder / "hurt.safetensors",
                                      {"hurt.first": ("U8", (70000,), bytes(70000)),
                                       "hurt.last": ("U8", (70000,), os.urandom(70000))})
        self.sound = write_safetensors(self.folder / "sound.safetensors", some_tensors())
        self.served = self.cluster(ps=1)
        self.worker = self.served.start("ps", 0, "--publish", self.hurt, "--publish", self.sound)
        self.target = ("--config", self.served.path, "--from", "ps:0")
        self.out = self.folder / "output/out.safetensors"

    def assert_hurt(self, pattern, *flags):
        """A pull of the damaged file fails for this reason; a pull of everything else succeeds."""
        for wanted in ([], ["hurt.first"], ["hurt.*", "mask"]):
            self.assert_error(1, r"^tensorlane pull: tensor 'hurt\..*hurt\.safetensors " + pattern, "pull", *wanted,
                              *self.target, "-o", self.out, *flags)
            self.assertEqual(os.listdir(self.folder / "output"), [])
        self.assert_run(0, "pull", *self.target, "-o", self.out, "--exclude", "hurt.*", *flags)
        self.assertEqual(read_safetensors(self.out), some_tensors())
        self.out.unlink()
        self.assertIn(f"{len(some_tensors()) + 2} tensors,", self.assert_run(0, "ls", *self.target).stdout)
        self.assert_run(0, *HEALTH, self.served.address())
        self.assertIsNone(self.worker.process.poll())

    def assert_whole(self, expected):
        self.assert_run(0, "pull", "hurt.*", *self.target, "-o", self.out)
        self.assertEqual(read_safetensors(self.out), expected)


class Changed(ServedCase):
    def test_shrunk(self):
        size = self.hurt.stat().st_size
        for left in (size - 1, size // 2, 4096, 0):
            os.truncate(self.hurt, left)
            self.assert_hurt(f"had {size} bytes when it was opened and has {left} now")
        self.assert_hurt("had ", "--no-checksum")

    def test_grown(self):
        with open(self.hurt, "ab") as file:
            file.write(b"more")
        self.assert_hurt("had ")

    def test_overwritten_in_place(self):
        with open(self.hurt, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        self.assert_hurt("was modified after it was opened")
        self.assert_hurt("was modified after it was opened", "--no-checksum")

    def test_pushed_again_after_it_shrank(self):
        os.truncate(self.hurt, 0)
        self.assert_hurt("had ")
        mended = {"hurt.first": ("U8", (3,), b"abc"), "hurt.last": ("F32", (1,), b"abcd")}
        write_safetensors(self.folder / "mended.safetensors", mended)
        self.assert_run(0, "push", self.folder / "mended.safetensors", "--address", self.served.address())
        self.assert_whole(mended)

    def test_replaced_by_rename_or_removed(self):
        """The worker goes on serving the file that it opened, even if the name now belongs to another file."""
        expected = read_safetensors(self.hurt)
        os.rename(write_safetensors(self.folder / "new", {"other": ("U8", (1,), b"x")}), self.hurt)
        self.assert_whole(expected)
        self.hurt.unlink()
        self.assert_whole(expected)


class ChangedMeanwhile(cli_support.Case):
    BYTES = 1 << 27

    def start_pull(self, *flags):
        """A pull of a tensor of zeros that has begun and cannot end before self.gate is opened."""
        (self.folder / "output").mkdir()
        self.model = self.write("model.safetensors")
        self.served = self.cluster(ps=1, extra=cli_support.OVER_GRPC)
        self.worker = self.served.start("ps", 0, "--publish", self.model)
        self.gate = cli_support.Gate(self, self.served.port(), self.BYTES // 8)
        path = self.write_json({"cluster": {"ps": [self.gate.address]}}, "gate.json")
        puller = self.spawn("pull", "--config", path, "-o", self.folder / "output/out.safetensors", *flags)
        self.gate.await_held()
        return puller

    def write(self, name, size=BYTES, marks=()):
        """A file of one tensor that takes no disk space: zeros, and an x at each mark."""
        path = write_safetensors(self.folder / name, {"zeros": ("U8", (size,), b"")}, {"zeros": size})
        self.mark(path, marks)
        return path

    def mark(self, path, offsets):
        with open(path, "r+b") as file:
            for offset in offsets:
                file.seek(offset, os.SEEK_END)
                file.write(b"x")

    def restart(self, model):
        self.worker.end()
        self.worker = self.spawn("serve", "--config", self.served.path, "--job", "ps", "--publish", model)
        self.worker.await_line("worker ready")
        self.gate.open()

    def pulled(self):
        return read_safetensors(self.folder / "output/out.safetensors")["zeros"]

    def test_overwritten_in_place(self):
        puller = self.start_pull()
        self.mark(self.model, [-1])
        self.gate.open()
        self.assertEqual(puller.wait(), 1)
        self.assertRegex(puller.lines[-1], r"^tensorlane pull: tensor 'zeros': .*/model\.safetensors was modified")
        self.assertEqual(os.listdir(self.folder / "output"), [])
        self.assert_run(0, *HEALTH, self.served.address())

    def check_other_bytes(self, *flags):
        """The pull writes one of the two files completely, never the beginning of one and the end of the other."""
        puller = self.start_pull(*flags)
        self.restart(self.write("other.safetensors", self.BYTES, [-self.BYTES, -1]))
        self.assertEqual(puller.wait(), 0, puller.output)
        _, _, data = self.pulled()
        self.assertEqual((len(data), data[:1], data[-1:], data.count(0)), (self.BYTES, b"x", b"x", self.BYTES - 2))

    def test_the_worker_comes_back_with_other_bytes(self):
        self.check_other_bytes()

    def test_the_worker_comes_back_with_other_bytes_without_checksums(self):
        self.check_other_bytes("--no-checksum")

    def test_the_worker_comes_back_with_another_shape(self):
        puller = self.start_pull()
        self.restart(self.write("other.safetensors", 1000))
        self.assertEqual(puller.wait(), 0, puller.output)
        self.assertEqual(self.pulled(), ("U8", (1000,), bytes(1000)))

    def test_the_worker_comes_back_without_the_tensor(self):
        """The tensor may still be published: a pull waits until nothing has come for the time-out."""
        puller = self.start_pull("--timeout", "4s")
        self.restart(write_safetensors(self.folder / "other.safetensors", {"other": ("U8", (1,), b"x")}))
        self.assertEqual(puller.wait(), 1, puller.output)
        self.assertRegex(puller.lines[-1], "^tensorlane pull: .*nothing was received for 4.00 s, with 0 of 1 tensors")
        self.assertEqual(os.listdir(self.folder / "output"), [])


class Names(cli_support.Case):
    def test_names_that_would_leave_the_folder(self):
        cluster = self.cluster(ps=1)
        (self.folder / "output").mkdir()
        cluster.start()
        for name in ("..", ".", "/etc/tensorlane", "a/../../b", "../../b", "./a", "a/", ".a", "x" * 252):
            path = write_safetensors(self.folder / "m.safetensors", {name: ("U8", (1,), b"x"), "z": ("U8", (1,), b"x")})
            self.assert_run(0, "push", path, "--address", cluster.address())
            self.assert_error(1, "the name cannot be that of a file", "pull", "--address", cluster.address(), "-o",
                              f"{self.folder}/output/npy/")
            self.assertEqual(self.files(), ["cluster.json", "m.safetensors", "output"])
            self.assert_run(0, "rm", "*", "--address", cluster.address())

    def test_names_that_are_odd(self):
        cluster = self.cluster(ps=1)
        names = ["a b", "a\nb", "-rf", "a..b", "~", "$(x)", "*", "größe", "x" * 251]
        path = write_safetensors(self.folder / "m.safetensors", {name: ("U8", (1,), b"x") for name in names})
        cluster.start("ps", 0, "--publish", path)
        self.assert_run(0, "pull", "--address", cluster.address(), "-o", f"{self.folder}/npy/")
        self.assertEqual(set(os.listdir(self.folder / "npy")), {f"{name}.npy" for name in names})


if __name__ == "__main__":
    cli_support.main()
