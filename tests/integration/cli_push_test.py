#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""tensorlane push, ls and rm: they change what a running worker publishes, and files that cannot be pushed change
nothing."""
import json
import os
import pathlib
import resource
import socket
import struct
import time

import cli_support
from cli_support import (HEALTH, free_ports, read_metadata, read_safetensors, run, run_in_terminal, some_tensors,
                         wait_until, write_safetensors)


def write_npy(path, header, data, version=1):
    text = header.encode()
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    path.write_bytes(b"\x93NUMPY" + bytes([version, 0]) + length + text + data)
    return path


class PushCase(cli_support.Case):
    def setUp(self):
        super().setUp()
        self.cluster = self.cluster(ps=1, extra=cli_support.OVER_GRPC)
        self.worker = self.cluster.start()
        self.from_ps = ("--config", self.cluster.path, "--from", "/job:ps/task:0")
        self.to_ps = ("--config", self.cluster.path, "--to", "/job:ps/task:0")

    def listed(self, *patterns):
        """Returns what ls --json says, by name."""
        shown = json.loads(self.assert_run(0, "ls", *patterns, *self.from_ps, "--json").stdout)
        self.assertEqual(shown["count"], len(shown["tensors"]))
        return {tensor["name"]: tensor for tensor in shown["tensors"]}

    def model(self, tensors=None, name="model.safetensors"):
        return write_safetensors(self.folder / name, some_tensors() if tensors is None else tensors)

    def push_error(self, pattern, *files, published=0):
        """Runs a push that must fail and change nothing at the worker."""
        result = self.assert_error(1, "^tensorlane push: .*" + pattern, "push", *files, *self.to_ps)
        self.assertEqual(len(self.listed()), published)
        return result


class AnotherWorker(PushCase):
    def test_nothing_is_done_to_it(self):
        """The configuration says that another task is at the address."""
        self.assert_run(0, "push", self.model(), *self.to_ps)
        wrong = self.write_json({"cluster": {"ps": {"3": self.cluster.address()}}}, "wrong.json")
        for command in (["ls"], ["rm", "*"], ["push", self.folder / "model.safetensors", "--prefix", "more/"]):
            self.assert_error(1, f"^tensorlane {command[0]}: {self.cluster.address()} is /job:ps/task:0, not "
                                 "/job:ps/task:3; correct the configuration, or start /job:ps/task:3 there\n$",
                              *command, "--config", wrong)
        self.assertEqual(set(self.listed()), set(some_tensors()))


class Push(PushCase):
    def test_and_pull(self):
        result = self.assert_run(0, "push", self.model(), *self.to_ps)
        self.assertRegex(result.stdout, rf"^pushed {len(some_tensors())} tensors, .* to /job:ps/task:0 at ")
        self.assertEqual(result.stderr, "")
        out = self.folder / "out.safetensors"
        self.assert_run(0, "pull", *self.from_ps, "-o", out)
        self.assertEqual(read_safetensors(out), some_tensors())

    def metadata_of(self, *patterns):
        """Returns the metadata of the pulled file, and the warnings of the push."""
        out = self.folder / "out.safetensors"
        result = self.assert_run(0, "pull", *patterns, *self.from_ps, "-o", out)
        return read_metadata(out), result.stderr

    def test_metadata_of_a_file_comes_along(self):
        metadata = {"format": "pt", "café": "", "": "text\n\"quoted\"", "long": "ü" * 30000}
        self.assert_run(0, "push", write_safetensors(self.folder / "m", some_tensors(), metadata=metadata), *self.to_ps)
        self.assertEqual(self.metadata_of(), (metadata, ""))
        self.assertEqual(read_safetensors(self.folder / "out.safetensors"), some_tensors())
        shown = json.loads(self.assert_run(0, "ls", *self.from_ps, "--json").stdout)
        self.assertEqual(shown["metadata"], [metadata])
        self.assertEqual({tensor["metadata"] for tensor in shown["tensors"]}, {0})

    def test_metadata_of_several_files_is_merged(self):
        for name, metadata in (("a", {"format": "pt", "author": "A", "a": "1"}),
                               ("b", {"format": "pt", "author": "B" * 100}), ("c", None)):
            model = write_safetensors(self.folder / name, {name: ("U8", (2,), b"xy")}, metadata=metadata)
            self.assert_run(0, "push", model, *self.to_ps)
        merged, warned = self.metadata_of()
        self.assertEqual(merged, {"format": "pt", "a": "1"})
        self.assertEqual(warned, "tensorlane pull: warning: the files that the tensors come from say 'A' and "
                                 f"'{'B' * 64}...' for 'author' in __metadata__; it is left out\n")
        self.assertEqual(self.metadata_of("a", "c"), ({"format": "pt", "author": "A", "a": "1"}, ""))
        self.assertEqual(self.metadata_of("c"), (None, ""))
        shown = json.loads(self.assert_run(0, "pull", "b", *self.from_ps, "-o", self.folder / "out", "--json").stdout)
        self.assertEqual(shown["metadata"], {"format": "pt", "author": "B" * 100})
        self.assertEqual(self.assert_run(0, "pull", *self.from_ps, "-o", self.folder / "out", "-q").stderr, "")

    def test_too_much_metadata_is_left_out(self):
        model = write_safetensors(self.folder / "m", some_tensors(), metadata={"k": "x" * 65536})
        result = self.assert_run(0, "push", model, *self.to_ps)
        self.assertIn("annotations (__metadata__) of 65537 bytes; at most 65536", result.stderr)
        self.assertEqual(self.metadata_of(), (None, ""))

    def test_by_address(self):
        self.assert_run(0, "push", self.model(), "--address", self.cluster.address())
        self.assertEqual(set(self.listed()), set(some_tensors()))

    def test_step_and_prefix(self):
        self.assert_run(0, "push", self.model({"a": ("F32", (1,), b"abcd")}), *self.to_ps, "--step", 7, "--prefix",
                        "v/")
        self.assertEqual(self.listed()["v/a"]["step"], 7)
        self.assert_run(0, "push", self.folder / "model.safetensors", *self.to_ps, "--step", 8, "--prefix", "v/")
        self.assertEqual({name: tensor["step"] for name, tensor in self.listed().items()}, {"v/a": 8})

    def test_older_step_is_refused(self):
        """The worker accepts the same step again, because an interrupted push starts again from the beginning."""
        model = self.model({"a": ("F32", (1,), b"new!"), "b": ("F32", (1,), b"new!")})
        self.assert_run(0, "push", model, *self.to_ps, "--step", 3)
        for steps in (["--step", 1], []):
            self.push_error("tensor 'a' .*a is published with step 3, which is newer than step [01]; .*--force",
                            self.model({"a": ("F32", (1,), b"old!")}, "old.safetensors"), *steps, published=2)
        self.assertEqual({tensor["step"] for tensor in self.listed().values()}, {3})
        self.assert_run(0, "push", model, *self.to_ps, "--step", 3)
        self.assert_run(0, "push", model, *self.to_ps, "--step", 1, "--force")
        self.assertEqual({tensor["step"] for tensor in self.listed().values()}, {1})

    def test_largest_step(self):
        self.assert_run(0, "push", self.model({"a": ("F32", (1,), b"abcd")}), *self.to_ps, "--step", 2**64 - 1)
        self.assertEqual(self.listed()["a"]["step"], str(2**64 - 1))

    def test_several_files(self):
        one = self.model({"a": ("F32", (1,), b"abcd")}, "one.safetensors")
        two = write_npy(self.folder / "two.npy", "{'descr': '<i4', 'fortran_order': False, 'shape': (2, 1), }\n",
                        bytes(8))
        self.assert_run(0, "push", one, two, *self.to_ps)
        listed = self.listed()
        self.assertEqual(set(listed), {"a", "two"})
        self.assertEqual((listed["two"]["dtype"], listed["two"]["shape"], listed["two"]["bytes"]), ("I32", [2, 1], 8))

    def test_json(self):
        shown = json.loads(self.assert_run(0, "push", self.model(), *self.to_ps, "--json", "--step", 3).stdout)
        self.assertEqual((shown["tensors"], shown["failed"], shown["step"]), (len(some_tensors()), 0, 3))
        self.assertEqual(shown["bytes"], sum(len(data) for _, _, data in some_tensors().values()))

    def test_json_when_a_file_cannot_be_read(self):
        (self.folder / "bad.safetensors").write_bytes(b"bad")
        for files in ([self.folder / "missing"], [self.model(), self.folder / "bad.safetensors"]):
            shown = json.loads(self.assert_run(1, "push", *files, *self.to_ps, "--json").stdout)
            self.assertEqual((shown["tensors"], shown["failed"]), (0, None))
            self.assertIn(files[-1].name, shown["error"])

    def test_quiet(self):
        result = self.assert_run(0, "push", self.model(), *self.to_ps, "-q")
        self.assertEqual((result.stdout, result.stderr), ("", ""))

    def test_in_a_terminal(self):
        code, output = run_in_terminal("push", self.model(), *self.to_ps)
        self.assertEqual(code, 0, output)
        self.assertIn(f"pushed {len(some_tensors())} tensors", output)


class PushRefused(PushCase):
    def test_files_that_are_none(self):
        self.push_error("nowhere.npy", self.folder / "nowhere.npy")
        self.push_error("not a regular file", self.folder)

    def test_truncated(self):
        whole = self.model().read_bytes()
        for length in (0, 5, 8, 30, len(whole) - 1):
            cut = self.folder / "cut.safetensors"
            cut.write_bytes(whole[:length])
            self.push_error("cut.safetensors", cut)

    def lying(self, header, data=b"", length=None):
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path = self.folder / "lying.safetensors"
        path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
        return path

    def test_lying_safetensors(self):
        entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
        self.push_error("lying", self.lying({}, length=1 << 62))
        self.push_error("lying", self.lying(b"[1, 2]  "))
        self.push_error("tensor .a.", self.lying({"a": dict(entry, data_offsets=[0, 400])}, bytes(4)))
        self.push_error("tensor .a.", self.lying({"a": dict(entry, shape=[2])}, bytes(4)))
        self.push_error("tensor .a.", self.lying({"a": dict(entry, dtype="F33")}, bytes(4)))
        self.push_error("tensor .a.", self.lying({"a": dict(entry, shape=[-1])}, bytes(4)))
        self.push_error("tensor .a.", self.lying({"a": dict(entry, shape=[2**62, 4], data_offsets=[0, 4])}, bytes(4)))
        self.push_error("lying", self.lying({"a": entry, "b": entry}, bytes(4)))
        self.push_error("lying", self.lying({"a": entry, "b": dict(entry, data_offsets=[8, 12])}, bytes(12)))
        self.push_error("tensor .a.|\"a\"", self.lying(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                                        b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', bytes(8)))

    def test_damaged_npy(self):
        good = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }\n"
        for header, data in ((good, bytes(7)), (good, bytes(9)), (good.replace("<f4", ">f4"), bytes(8)),
                             (good.replace("<f4", "|O"), bytes(8)), (good.replace("(2,)", "(2"), bytes(8)),
                             ("{'descr': '<f4'}", bytes(8)), ("", b"")):
            self.push_error("bad.npy", write_npy(self.folder / "bad.npy", header, data))
        bad = self.folder / "bad.npy"
        bad.write_bytes(b"\x93NUMPX\x01\x00")
        self.push_error("bad.npy", bad)

    def test_a_good_file_beside_a_bad_one(self):
        bad = self.folder / "bad.npy"
        bad.write_bytes(b"x")
        self.push_error("bad.npy", self.model(), bad)

    def test_one_name_twice(self):
        self.push_error("'empty' is in .* and in ", self.model(name="a.safetensors"), self.model(name="b.safetensors"))

    def test_key_that_is_too_long(self):
        model = self.model({"a" * 500: ("F32", (1,), b"abcd")})
        self.assert_error(1, "key of 520 bytes", "push", model, *self.to_ps, "--prefix", "p" * 20)
        self.assert_run(0, "push", model, *self.to_ps, "--prefix", "p" * 12)

    def test_no_worker_there(self):
        model = self.model()
        result = self.assert_error(1, "refused the connection", "push", model, "--address",
                                   f"127.0.0.1:{free_ports(1)[0]}")
        self.assertEqual(result.stdout, "")
        result = self.assert_run(1, "push", model, "--address", f"127.0.0.1:{free_ports(1)[0]}", "--json")
        self.assertEqual(json.loads(result.stdout)["failed"], len(some_tensors()))

    def test_a_file_that_is_cut_off_meanwhile(self):
        """gRPC reads the file, too, and knows nothing but an address that cannot be read."""
        path, size = self.folder / "big.safetensors", 512 << 20
        for delay in (0.01, 0.02, 0.03, 0.04, 0.05, 0.06):
            write_safetensors(path, {"big": ("U8", (size,), b"")}, sparse_bytes={"big": size})
            pusher = self.spawn("push", path, "--address", self.cluster.address())
            wait_until(lambda: str(path) in pathlib.Path(f"/proc/{pusher.pid}/maps").read_text(), "mapped")
            time.sleep(delay)
            os.truncate(path, 4096)
            self.assertEqual(pusher.wait(), 1, pusher.output)
            self.assertIn("big.safetensors had ", pusher.output)

    def test_more_files_than_it_may_open(self):
        files = [write_safetensors(self.folder / f"{number}.safetensors", {f"t{number}": ("U8", (1,), b"x")})
                 for number in range(100)]
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        result = self.assert_run(1, "push", *files, *self.to_ps, preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_NOFILE, (64, 64)))
        self.assertRegex(result.stderr, "cannot open .*safetensors: .* raise the limit")
        if hard == resource.RLIM_INFINITY or hard > 300:
            self.assert_run(0, "push", *files, *self.to_ps, preexec_fn=lambda: resource.setrlimit(
                resource.RLIMIT_NOFILE, (64, hard)))

    def test_more_than_the_worker_holds(self):
        self.worker.stop()
        small = self.cluster_with_limit("4KiB")
        result = self.assert_error(1, "tensor '(mask|layer.*)'", "push", self.model(), "--address",
                                   small.address())
        self.assertIn("were published before it", result.stderr)
        self.assert_run(0, *HEALTH, small.address())

    def cluster_with_limit(self, limit):
        port = free_ports(1)[0]
        path = self.write_json({"cluster": {"ps": [f"127.0.0.1:{port}"]}, "limits": {"held": limit}}, "small.json")
        cluster = cli_support.Cluster(self, path, {"ps": [f"127.0.0.1:{port}"]})
        cluster.start()
        return cluster


class List(PushCase):
    def setUp(self):
        super().setUp()
        self.assert_run(0, "push", self.model(), *self.to_ps)

    def test_table(self):
        rows = self.assert_run(0, "ls", *self.from_ps).stdout.splitlines()
        self.assertEqual(rows[0].split(), ["NAME", "DTYPE", "SHAPE", "BYTES", "STEP"])
        names = [row.split("  ")[0] for row in rows[1:-1]]
        self.assertEqual(names, sorted(some_tensors(), key=lambda name: name.encode()))
        self.assertEqual(sum(len(data) for _, _, data in some_tensors().values()), 9954)
        self.assertEqual(rows[-1], f"{len(some_tensors())} tensors, 9.95 KB")
        row = next(row for row in rows if row.startswith("layer.1.weight "))
        self.assertRegex(row, r"BF16 +\[7, 5, 3\] +210 +0$")

    def test_patterns(self):
        self.assertEqual(set(self.listed("*.bias", "m*")), {"layer.0.bias", "mask"})
        self.assert_error(1, "nothing published matches 'maks'; the nearest is 'mask'", "ls", "maks", *self.from_ps)

    def test_json(self):
        listed = self.listed()
        for name, (dtype, shape, data) in some_tensors().items():
            self.assertEqual(listed[name],
                             {"name": name, "dtype": dtype, "shape": list(shape), "bytes": len(data), "step": 0})

    def test_nothing_published_is_no_error(self):
        self.assert_run(0, "rm", "*", *self.from_ps)
        self.assertIn("0 tensors, 0 B", self.assert_run(0, "ls", *self.from_ps).stdout)
        self.assertEqual(self.listed(), {})

    def test_what_is_no_worker(self):
        self.assert_error(1, "refused", "ls", "--address", f"127.0.0.1:{free_ports(1)[0]}")
        with socket.create_server(("127.0.0.1", 0)) as silent:
            self.assert_error(1, "^tensorlane ls: ", "ls", "--timeout", "500ms", "--address",
                              f"127.0.0.1:{silent.getsockname()[1]}")

    def test_standard_output_is_full(self):
        with open("/dev/full", "w", encoding="ascii") as full:
            result = self.assert_run(1, "ls", *self.from_ps, stdout=full)
        self.assertIn("cannot write to standard output", result.stderr)

    def test_a_reader_that_goes_away(self):
        read_end, write_end = os.pipe()
        os.close(read_end)
        self.assert_run(1, "ls", *self.from_ps, stdout=write_end)
        os.close(write_end)

    def test_names_are_wrapped_on_a_narrow_terminal(self):
        self.assert_run(0, "push", self.model({"n" * 90: ("F32", (1,), b"abcd")}), *self.to_ps)
        code, output = run_in_terminal("ls", *self.from_ps, columns=60)
        self.assertEqual(code, 0)
        rows = output.replace("\x1b[1m", "").replace("\x1b[0m", "").split("\r\n")
        self.assertLessEqual(max(map(len, rows)), 60)
        self.assertEqual(sum(row.count("n") for row in rows if row.startswith("nnn")), 90)


class Remove(PushCase):
    def setUp(self):
        super().setUp()
        self.assert_run(0, "push", self.model(), *self.to_ps)

    def test_patterns(self):
        result = self.assert_run(0, "rm", "layer.*", "scalar", *self.from_ps)
        self.assertEqual(result.stdout, "withdrew 4 tensors\n")
        self.assertEqual(set(self.listed()), {"empty", "mask", "große Zahl"})

    def test_json(self):
        shown = json.loads(self.assert_run(0, "rm", "mask", *self.from_ps, "--json").stdout)
        self.assertEqual(shown, {"address": self.cluster.address(), "withdrawn": 1})

    def test_nothing_matches(self):
        self.assert_error(1, "nothing published matches 'maks'; the nearest is 'mask'", "rm", "maks", *self.from_ps)
        self.assertEqual(len(self.listed()), len(some_tensors()))

    def test_one_of_two_matches(self):
        result = self.assert_error(1, "nothing published matches 'zzz'", "rm", "zzz", "mask", *self.from_ps)
        self.assertEqual(result.stdout, "withdrew 1 tensor\n")
        self.assertNotIn("mask", self.listed())

    def test_no_worker_there(self):
        self.assert_error(1, "refused", "rm", "*", "--address", f"127.0.0.1:{free_ports(1)[0]}")

    def test_a_pull_that_runs_ends_well(self):
        size = 1 << 27
        big = write_safetensors(self.folder / "big.safetensors", {"zeros": ("U8", (size,), b"")}, {"zeros": size})
        self.assert_run(0, "push", big, *self.to_ps)
        gate = cli_support.Gate(self, self.cluster.port(), size // 8)
        out = self.folder / "out.safetensors"
        puller = self.spawn("pull", "zeros", "--address", gate.address, "-o", out)
        gate.await_held()
        self.assert_run(0, "rm", "zeros", *self.from_ps)
        self.assertEqual(run("ls", "zeros", *self.from_ps).returncode, 1)
        gate.open()
        self.assertEqual(puller.wait(), 0, puller.output)
        self.assertGreater(out.stat().st_size, size)


if __name__ == "__main__":
    cli_support.main()
