#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""tensorlane pull: into safetensors and npy, with patterns, verified; and failures, which must leave nothing behind."""
import json
import os
import pathlib
import re
import signal
import socket
import struct
import subprocess
import threading
import unittest

import cli_support
from cli_support import (PATIENCE, environment, free_ports, read_metadata, read_safetensors, run, run_in_terminal,
                         some_tensors, write_safetensors)

try:
    import numpy
except ImportError:
    numpy = None

BIG_BYTES = 1 << 28


class PullCase(cli_support.Case):
    def serve(self, tensors=None, name="model.safetensors", **jobs):
        """Starts a cluster whose ps publishes the tensors."""
        self.tensors = some_tensors() if tensors is None else tensors
        self.model = write_safetensors(self.folder / name, self.tensors)
        cluster = self.cluster(**(jobs or {"ps": 1}))
        self.worker = cluster.start("ps", 0, "--publish", self.model)
        self.target = ("--config", cluster.path, "--from", "ps:0")
        return cluster

    def serve_big(self, size=BIG_BYTES):
        """Starts a cluster whose ps publishes a tensor large enough to be interrupted; it takes no disk space."""
        self.model = write_safetensors(self.folder / "big.safetensors", {"zeros": ("U8", (size,), b"")},
                                       {"zeros": size})
        cluster = self.cluster(ps=1, extra=cli_support.OVER_GRPC)
        self.worker = cluster.start("ps", 0, "--publish", self.model)
        self.target = ("--config", cluster.path, "--from", "ps:0")
        return cluster

    def out(self, name="out.safetensors"):
        return self.folder / "output" / name

    def setUp(self):
        super().setUp()
        (self.folder / "output").mkdir()

    def pull_error(self, pattern, *arguments, **options):
        """Runs a pull that must fail and leave nothing behind."""
        result = self.assert_error(1, "^tensorlane pull: .*" + pattern, "pull", *self.target, "-o", self.out(),
                                   *arguments, **options)
        self.assert_nothing_left()
        return result

    def assert_nothing_left(self):
        self.assertEqual(os.listdir(self.folder / "output"), [])

    def publish_strings(self, address, key):
        try:
            import grpc
            from tensorlane.v1 import transfer_pb2
        except ImportError as lacking:
            self.skipTest(f"{lacking.name} is not installed")
        data = struct.pack("<QQ", 1, 2) + b"abc"
        request = transfer_pb2.PublishRequest(key=key, step=0, data=data, meta_data=transfer_pb2.MetaData(
            dtype=transfer_pb2.STRING, dims=[2], size_bytes=len(data)))
        with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            call = channel.stream_unary("/tensorlane.v1.Transfer/Publish",
                                        request_serializer=transfer_pb2.PublishRequest.SerializeToString,
                                        response_deserializer=transfer_pb2.PublishResponse.FromString)
            call(iter([request]), timeout=PATIENCE)

    def pull_while_the_shape_changes(self, *arguments, **options):
        """Each pull sees the shape that was listed or another one: it succeeds or fails with an error."""
        cluster = self.serve({"a": ("F32", (8,), bytes(32))})
        files = [write_safetensors(self.folder / f"{n}.safetensors", {"a": ("F32", (n,), bytes(4 * n))})
                 for n in (3, 8)]
        stop = threading.Event()

        def republish():
            while not stop.is_set():
                for path in files:
                    run("push", path, "--address", cluster.address(), "--quiet")

        thread = threading.Thread(target=republish)
        thread.start()
        try:
            for _ in range(10):
                result = run("pull", *self.target, "-o", self.out(), *arguments, **options)
                self.assertIn(result.returncode, (0, 1), result.stderr)
                if result.returncode == 0:
                    self.assertIn(read_safetensors(self.out())["a"][1], ((3,), (8,)))
                    self.out().unlink()
                else:
                    self.assertRegex(result.stderr, "tensor 'a': ")
                self.assert_nothing_left()
        finally:
            stop.set()
            thread.join()


class Pull(PullCase):
    def test_outputs_that_have_no_name(self):
        """They are refused before anything is asked."""
        for path in ("./", "/", "q/..", "q/../"):
            with self.subTest(path=path):
                self.assert_error(2, f"-o {path.rstrip('/') or '/'}: it does not end in the name", "pull", "--address",
                                  "127.0.0.1:9", "--format", "npy", "-o", path)
        self.assert_error(2, "-o=x: write -o x or --output=x", "pull", "--address", "127.0.0.1:9", "-o=x")
        self.assert_error(2, "-q=: .*--quiet=", "pull", "--address", "127.0.0.1:9", "-o", "x", "-q=true")

    def test_umask_forbids_the_user_what_it_writes(self):
        options = {}
        cluster = self.serve({"a/b": ("F32", (8,), bytes(32))})
        if os.geteuid() == 0:  # Permissions do not bind root.
            options = {"user": 65534, "group": 65534, "extra_groups": []}
            for path in (self.folder, self.folder / "output"):
                os.chown(path, 65534, 65534)
            try:
                run("--version", **options)
            except PermissionError:
                self.skipTest("the user 65534 cannot run the program")
        for umask in (0o277, 0o200, 0o400, 0o777):
            for name in (f"{umask:o}.safetensors", f"{umask:o}/"):
                with self.subTest(name=name):
                    self.assert_run(0, "pull", "--address", cluster.address(), "-o", f"{self.out()}-{name}",
                                    umask=umask, **options)
                    path = pathlib.Path(f"{self.out()}-{name}")
                    self.assertEqual(path.stat().st_mode & 0o777, (0o777 if path.is_dir() else 0o666) & ~umask)
                    path.chmod(0o700)

    def test_everything(self):
        cluster = self.serve()
        result = self.assert_run(0, "pull", *self.target, "-o", self.out())
        self.assertEqual(read_safetensors(self.out()), self.tensors)
        self.assertRegex(result.stdout, rf"^pulled {len(self.tensors)} tensors, .* from /job:ps/task:0 at "
                                        rf"{cluster.address()}; paths: .*\d+\n(bounce because: .*\n)?verified \d+ of ")
        self.assertEqual(os.listdir(self.folder / "output"), ["out.safetensors"])

    def test_metadata_of_the_published_files(self):
        """A folder of npy files cannot have metadata."""
        cluster = self.cluster(ps=1)
        files = [write_safetensors(self.folder / name, {name: ("U8", (2,), b"xy")}, metadata=metadata)
                 for name, metadata in (("a", {"format": "pt", "epoch": "1"}), ("b", {"format": "pt", "epoch": "2"}))]
        cluster.start("ps", 0, "--publish", files[0], "--publish", files[1])
        self.target = ("--config", cluster.path, "--from", "ps:0")
        result = self.assert_run(0, "pull", *self.target, "-o", self.out())
        self.assertEqual(read_metadata(self.out()), {"format": "pt"})
        self.assertIn("say '1' and '2' for 'epoch' in __metadata__; it is left out\n", result.stderr)
        self.assert_run(0, "pull", "b", *self.target, "-o", self.out())
        self.assertEqual(read_metadata(self.out()), {"format": "pt", "epoch": "2"})
        result = self.assert_run(0, "pull", *self.target, "-o", str(self.out("npy")) + "/")
        self.assertEqual(result.stderr, "")

    def test_by_address(self):
        cluster = self.serve()
        self.assert_run(0, "pull", "--address", cluster.address(), "-o", self.out())
        self.assertEqual(read_safetensors(self.out()), self.tensors)

    def test_by_tf_config(self):
        cluster = self.serve()
        env = environment(TF_CONFIG=json.dumps({"cluster": {"ps": [cluster.address()]}}))
        self.assert_run(0, "pull", "-o", self.out(), env=env)
        self.assertEqual(read_safetensors(self.out()), self.tensors)

    def test_patterns(self):
        self.serve()
        for patterns, excluded, expected in (
                (["layer.*"], [], {"layer.0.weight", "layer.0.bias", "layer.1.weight"}),
                (["*.bias", "scalar"], [], {"layer.0.bias", "scalar"}),
                (["layer.[1-9].*"], [], {"layer.1.weight"}),
                ([], ["layer.*", "empty"], {"scalar", "mask", "große Zahl"}),
                (["layer.*"], ["*.weight"], {"layer.0.bias"})):
            flags = [part for pattern in excluded for part in ("--exclude", pattern)]
            self.assert_run(0, "pull", *patterns, *self.target, "-o", self.out(), *flags)
            self.assertEqual(set(read_safetensors(self.out())), expected)

    def test_json(self):
        cluster = self.serve()
        shown = json.loads(self.assert_run(0, "pull", *self.target, "-o", self.out(), "--json", "--table").stdout)
        self.assertEqual(shown["tensors"], len(self.tensors))
        self.assertEqual(shown["bytes"], sum(len(data) for _, _, data in self.tensors.values()))
        self.assertEqual(shown["failed"], 0)
        self.assertEqual(shown["verified"], len(self.tensors))
        self.assertEqual(sum(shown["paths"].values()), len(self.tensors))
        self.assertLessEqual(set(shown["paths"]), {"zero-copy", "bounce", "inline", "none"})
        self.assertGreater(shown["seconds"], 0)
        self.assertEqual((shown["from"], shown["address"]), ("/job:ps/task:0", cluster.address()))
        self.assertEqual((shown["output"], shown["complete"]), (str(self.out()), True))
        details = {item["name"]: (item["dtype"], tuple(item["shape"]), item["bytes"]) for item in shown["details"]}
        self.assertEqual(details, {name: (dtype, shape, len(data))
                                   for name, (dtype, shape, data) in self.tensors.items()})

    def test_without_checksum(self):
        self.serve()
        for flag in ("--no-checksum", "--checksum=false"):
            result = self.assert_run(0, "pull", *self.target, "-o", self.out(), flag)
            self.assertIn("not verified (--no-checksum)", result.stdout)
            shown = json.loads(self.assert_run(0, "pull", *self.target, "-o", self.out(), flag, "--json").stdout)
            self.assertEqual(shown["verified"], 0)

    def test_table(self):
        self.serve()
        rows = self.assert_run(0, "pull", *self.target, "-o", self.out(), "--table").stdout.splitlines()
        self.assertEqual(rows[0].split(), ["TENSOR", "SHAPE", "DTYPE", "BYTES", "PATH", "TIME"])
        row = next(row for row in rows if row.startswith("layer.0.weight "))
        self.assertRegex(row, r"\[64, 33\] +F32 +8448 +local (zero-copy|bounce) +\d")

    def test_quiet(self):
        self.serve()
        result = self.assert_run(0, "pull", *self.target, "-o", self.out(), "--quiet")
        self.assertEqual((result.stdout, result.stderr), ("", ""))

    def test_replaces_an_existing_file(self):
        self.serve()
        self.out().write_text("old")
        self.assert_run(0, "pull", *self.target, "-o", self.out())
        self.assertEqual(read_safetensors(self.out()), self.tensors)

    def test_hundreds_of_tensors(self):
        tensors = {f"t{i:04}": ("F32", (i % 50,), struct.pack("<f", i) * (i % 50)) for i in range(1500)}
        self.serve(tensors)
        self.assert_run(0, "pull", *self.target, "-o", self.out())
        self.assertEqual(read_safetensors(self.out()), tensors)

    def test_compare(self):
        self.serve()
        result = self.assert_run(0, "pull", *self.target, "-o", self.out(), "--verify-against", self.model)
        self.assertIn(f"compared {len(self.tensors)} of {len(self.tensors)} with {self.model} in ", result.stdout)

    def test_progress_bar_on_a_terminal(self):
        self.serve_big(1 << 30)
        code, output = run_in_terminal("pull", *self.target, "-o", self.out(), columns=120)
        self.assertEqual(code, 0, output)
        self.assertRegex(output, r"\[#*\.*\] +\d+% .* of 1\.07 GB, .*/s, .* left\x1b\[K")
        self.assertIn("pulled 1 tensor, 1.07 GB in ", output.rsplit("\r\x1b[K", 1)[1])

    def test_npy(self):
        tensors = {name: tensor for name, tensor in some_tensors().items() if tensor[0] != "BF16"}
        self.serve(tensors)
        for output, flags in (("folder/", []), ("other", ["--format", "npy"])):
            self.assert_run(0, "pull", *self.target, "-o", f"{self.folder}/output/{output}", *flags)
            folder = self.folder / "output" / output
            self.assertEqual({path.name for path in folder.iterdir()}, {f"{name}.npy" for name in tensors})
            if numpy is None:
                continue
            for name, (_, shape, data) in tensors.items():
                array = numpy.load(folder / f"{name}.npy")
                self.assertEqual((array.shape, array.tobytes()), (shape, data), name)

    def test_npy_in_subfolders(self):
        tensors = {name: ("U8", (3,), name.encode()[:3]) for name in ("a/b/c1", "a/b/d", "a/x12", "abc")}
        self.serve(tensors)
        self.assert_run(0, "pull", *self.target, "-o", f"{self.folder}/output/folder/")
        folder = self.folder / "output/folder"
        self.assertEqual({str(path.relative_to(folder)) for path in folder.rglob("*.npy")},
                         {f"{name}.npy" for name in tensors})
        self.assertEqual((folder / "a/b/c1.npy").read_bytes()[-3:], b"a/b")
        # A failed pull leaves no folder behind.
        path = write_safetensors(self.folder / "other.safetensors", {"abc": ("U8", (3,), b"xyz")})
        self.assert_error(1, "^tensorlane pull: ", "pull", *self.target, "-o", f"{self.folder}/output/second/",
                          "--verify-against", path)
        self.assertEqual(os.listdir(self.folder / "output"), ["folder"])

    def test_npy_of_one_tensor(self):
        """The suffix .npy makes the output an npy file, whatever the tensor is called; several tensors do not fit into
        it."""
        tensors = {"a/b": ("F32", (2, 1), bytes(range(8))), "c": ("U8", (3,), b"xyz")}
        self.serve(tensors)
        self.assert_run(0, "pull", "a/b", *self.target, "-o", self.out("x.npy"))
        whole = self.out("x.npy").read_bytes()
        self.assertEqual((whole[:6], whole[-8:]), (b"\x93NUMPY", tensors["a/b"][2]))
        if numpy is not None:
            array = numpy.load(self.out("x.npy"))
            self.assertEqual((array.dtype.str, array.shape, array.tobytes()), ("<f4", (2, 1), tensors["a/b"][2]))
        self.assert_error(1, "x.npy is a file for one tensor, and 2 were chosen", "pull", *self.target, "-o",
                          self.out("x.npy"))
        self.assert_error(2, "must not end in .npy", "pull", *self.target, "-o", self.out("y.npy"), "--format",
                          "safetensors")
        self.assert_error(2, "npz archives are not written", "pull", *self.target, "-o", self.out("y.npz"))
        self.assertEqual((os.listdir(self.folder / "output"), self.out("x.npy").read_bytes()), (["x.npy"], whole))

    def test_keeps_the_mode_of_a_file(self):
        self.serve()
        for mode in (0o600, 0o400, 0o666):
            self.out().write_text("old")
            self.out().chmod(mode)
            self.assert_run(0, "pull", *self.target, "-o", self.out())
            self.assertEqual(self.out().stat().st_mode & 0o7777, mode)
            self.assertEqual(read_safetensors(self.out()), self.tensors)
            self.out().unlink()

    @unittest.skipIf(os.geteuid() != 0, "only root can give a file away")
    def test_keeps_the_owner_of_a_file(self):
        self.serve()
        self.out().write_text("old")
        os.chown(self.out(), 12, 34)
        self.assert_run(0, "pull", *self.target, "-o", self.out())
        self.assertEqual((self.out().stat().st_uid, self.out().stat().st_gid), (12, 34))

    def test_the_folder_of_the_output_cannot_be_synced(self):
        """Nobody may open it; the output is there all the same."""
        self.serve()
        self.out().parent.chmod(0o333)
        self.addCleanup(self.out().parent.chmod, 0o755)
        prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
        command = [*prefix, cli_support.PROGRAM, "pull", *self.target, "-o", self.out(), "--json"]
        result = subprocess.run(list(map(str, command)), env=environment(), check=False, timeout=PATIENCE,
                                capture_output=True, text=True)
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertRegex(result.stderr, "^tensorlane pull: .*out.safetensors is complete but may not outlast a crash: "
                                        "cannot sync the folder ")
        shown = json.loads(result.stdout)
        self.assertEqual((shown["complete"], shown["failed"]), (True, 0))
        self.assertIn("may not outlast a crash", shown["error"])
        self.assertEqual(read_safetensors(self.out()), self.tensors)

    def test_follows_symbolic_links(self):
        """A pull replaces the file that a link leads to and keeps its mode; a link to a missing file is replaced
        itself."""
        self.serve()
        elsewhere = self.folder / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "old").write_text("old")
        (elsewhere / "old").chmod(0o640)
        inode = (elsewhere / "old").stat().st_ino
        (elsewhere / "hop").symlink_to("old")
        self.out().symlink_to("../elsewhere/hop")
        self.assert_run(0, "pull", *self.target, "-o", self.out())
        self.assertTrue(self.out().is_symlink() and (elsewhere / "hop").is_symlink())
        self.assertEqual(read_safetensors(elsewhere / "old"), self.tensors)
        self.assertEqual((elsewhere / "old").stat().st_mode & 0o777, 0o640)
        self.assertNotEqual((elsewhere / "old").stat().st_ino, inode)
        (elsewhere / "old").unlink()
        self.assert_run(0, "pull", *self.target, "-o", self.out())
        self.assertFalse(self.out().is_symlink())
        self.assertEqual(read_safetensors(self.out()), self.tensors)
        self.assertEqual(os.listdir(elsewhere), ["hop"])
        self.out().unlink()
        self.out().symlink_to("out.safetensors")
        self.assert_error(1, "symbolic links", "pull", *self.target, "-o", self.out())


class Refused(PullCase):
    def test_no_worker_there(self):
        self.target = ("--address", f"127.0.0.1:{free_ports(1)[0]}")
        self.pull_error("refused")

    def test_nothing_published(self):
        cluster = self.cluster(ps=1)
        cluster.start()
        self.target = ("--config", cluster.path, "--from", "ps:0")
        self.pull_error("nothing is published")
        self.pull_error("nothing is published at all", "x*")

    def test_nothing_matches(self):
        self.serve()
        self.pull_error("nothing published matches 'layer.0.wieght'; the nearest is 'layer.0.weight'", "layer.0.wieght")
        self.pull_error(f"nothing published matches 'zzz\\*'; there are {len(self.tensors)} tensors", "scalar", "zzz*")
        self.pull_error("every tensor is excluded", "--exclude", "*")

    def test_another_worker_than_expected(self):
        self.serve()
        cluster = self.cluster(ps=1)
        cluster.start()
        wrong = self.write_json({"cluster": {"worker": [cluster.address()]}}, "wrong.json")
        self.target = ("--config", wrong)
        self.assert_run(0, "push", self.model, "--address", cluster.address())
        self.pull_error("127.0.0.1:[0-9]+ is /job:ps/task:0, not /job:worker/task:0; correct the configuration, or "
                        "start /job:worker/task:0 there\n", "--timeout", "600s")

    def test_no_worker_at_all(self):
        with socket.create_server(("127.0.0.1", 0)) as other:
            self.target = ("--address", f"127.0.0.1:{other.getsockname()[1]}")
            self.pull_error("", "--timeout", "1s")

    def test_folder_that_is_missing(self):
        self.serve()
        result = self.assert_error(1, f"the folder {self.folder}/no does not exist; create it first", "pull",
                                   *self.target, "-o", self.folder / "no/out.safetensors")
        self.assertEqual(result.stdout, "")

    def test_names_that_are_no_file_names(self):
        for name in ("../escape", "a//b", ".hidden"):
            self.serve({name: ("F32", (1,), b"abcd"), "fine": ("F32", (1,), b"abcd")})
            result = self.assert_error(1, "^tensorlane pull: .*" + re.escape(name), "pull", *self.target, "-o",
                                       f"{self.folder}/output/folder/")
            self.assert_nothing_left()
            self.assertNotIn("Traceback", result.stderr)
        self.assertFalse(any("escape" in name for name in self.files()))

    def test_dtype_that_npy_lacks(self):
        self.serve()
        self.assert_error(1, "layer.1.weight", "pull", *self.target, "-o", f"{self.folder}/output/folder/")
        self.assert_nothing_left()

    def test_folder_that_exists(self):
        self.serve({"a": ("F32", (1,), b"abcd")})
        (self.folder / "output/folder").mkdir()
        self.assert_error(1, "folder.*exist", "pull", *self.target, "-o", f"{self.folder}/output/folder/")
        self.assertEqual(os.listdir(self.folder / "output/folder"), [])

    def test_strings(self):
        cluster = self.serve()
        self.publish_strings(cluster.address(), "vocabulary")
        result = self.pull_error("tensor 'vocabulary' consists of strings, .*leave it out with --exclude 'vocabulary'")
        self.assertEqual(result.stdout, "")
        self.assert_run(0, "pull", *self.target, "-o", self.out(), "--exclude", "vocabulary")
        self.assertEqual(set(read_safetensors(self.out())), set(self.tensors))

    def test_json_has_errors_too(self):
        self.serve()
        result = self.pull_error("nothing published matches", "zzz*", "--json")
        shown = json.loads(result.stdout)
        self.assertEqual((shown["tensors"], shown["complete"], shown["failed"]), (0, False, 1))
        self.assertIn("nothing published matches", shown["error"])
        result = self.assert_run(1, "pull", "--address", "127.0.0.1:1", "-o", self.out(), "--json")
        self.assertIsNone(json.loads(result.stdout)["failed"])  # which tensors there are is not known

    def test_names_do_not_reach_the_terminal_as_they_are(self):
        self.serve({"\x1b[31mred": ("F32", (1,), b"abcd")})
        for arguments in (["ls", *self.target], ["pull", *self.target, "-o", self.out(), "--table"],
                          ["pull", "q*", *self.target, "-o", self.out()]):
            result = run(*arguments)
            self.assertNotIn("\x1b", result.stdout + result.stderr)
            self.assertIn("\\x1B[31mred", result.stdout + result.stderr)

    def test_standard_output_is_full(self):
        self.serve()
        with open("/dev/full", "w", encoding="ascii") as full:
            self.assert_run(1, "pull", *self.target, "-o", self.out(), stdout=full)

    def test_standard_output_is_closed(self):
        """What the program prints must not land in the file that it writes."""
        self.serve()
        command = ["/bin/sh", "-c", "exec \"$0\" \"$@\" >&-", cli_support.PROGRAM, "pull", *self.target, "-o",
                   self.out()]
        subprocess.run(list(map(str, command)), env=environment(), check=False, timeout=PATIENCE)
        self.assertEqual(read_safetensors(self.out()), self.tensors)


class Compared(PullCase):
    def test_other_bytes(self):
        self.serve()
        dtype, shape, data = self.tensors["mask"]
        other = dict(self.tensors, mask=(dtype, shape, data[:-1] + bytes([data[-1] ^ 1])))
        path = write_safetensors(self.folder / "other.safetensors", other)
        result = self.pull_error("tensor 'mask' differs from that of .*other", "--verify-against", path, "--json")
        self.assertEqual(json.loads(result.stdout)["failed"], 1)

    def test_other_shape(self):
        self.serve()
        dtype, _, data = self.tensors["mask"]
        path = write_safetensors(self.folder / "other.safetensors", dict(self.tensors, mask=(dtype, (10, 100), data)))
        self.pull_error("tensor 'mask' has another dtype or shape", "--verify-against", path)

    def test_missing_tensor(self):
        self.serve()
        fewer = {name: tensor for name, tensor in self.tensors.items() if name != "mask"}
        path = write_safetensors(self.folder / "other.safetensors", fewer)
        self.pull_error("tensor 'mask' was received but .* has none", "--verify-against", path)

    def test_missing_file(self):
        """It is known before anything is received, or even asked for."""
        self.target = ("--address", "127.0.0.1:9")
        self.pull_error("nowhere.safetensors", "--verify-against", self.folder / "nowhere.safetensors")


class Broken(PullCase):
    def start_big_pull(self, *arguments):
        """A pull that has begun and cannot end before self.gate is opened."""
        cluster = self.serve_big()
        self.gate = cli_support.Gate(self, cluster.port(), BIG_BYTES // 8)
        path = self.write_json({"cluster": {"ps": [self.gate.address]}}, "gate.json")
        puller = self.spawn("pull", "--config", path, "-o", self.out(), *arguments)
        self.gate.await_held()
        self.assertEqual(len(os.listdir(self.folder / "output")), 1)
        return puller

    def test_interrupted(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGXCPU):
            puller = self.start_big_pull()
            self.assertEqual(puller.stop(number), -number, puller.output)
            self.assert_nothing_left()
            self.worker.end()

    def test_the_worker_dies(self):
        puller = self.start_big_pull("--timeout", "4s")
        self.worker.end()
        self.gate.open()
        self.assertEqual(puller.wait(), 1)
        self.assertRegex(puller.lines[-1], "^tensorlane pull: /job:ps/task:0 at .*: nothing was received for 4.00 s, "
                                           "with 0 of 1 tensors complete; the worker is ")
        self.assert_nothing_left()

    def test_a_pull_that_stands_still_says_why_and_until_when(self):
        cluster = self.serve_big()
        gate = cli_support.Gate(self, cluster.port(), BIG_BYTES // 8)
        path = self.write_json({"cluster": {"ps": [gate.address]}, "protocol": "grpc"}, "gate.json")
        code, output = run_in_terminal("pull", "--config", path, "-o", self.out(), "--timeout", "5s", columns=200)
        self.assertEqual(code, 1, output)
        # The program shows its progress from the beginning on.
        self.assertIn(f"\rasking /job:ps/task:0 at {gate.address} what it publishes\x1b[K\r[", output)
        self.assertRegex(output, r"\r[0-9.]+ [KM]B of \S+ MB; nothing has come for [1-4] s, gives up in [1-4] s: the "
                                 r"worker is connected\x1b\[K")
        self.assertIn("nothing was received for 5.00 s", output.rsplit("\r\x1b[K", 1)[1])

    def test_the_worker_hangs(self):
        puller = self.start_big_pull("--timeout", "4s")
        self.assertEqual(puller.wait(), 1)
        self.assertIn("nothing was received for 4.00 s", puller.lines[-1])
        self.assert_nothing_left()

    def test_the_worker_comes_back(self):
        puller = self.start_big_pull("--json")
        self.worker.end()
        again = self.spawn("serve", "--config", self.folder / "cluster.json", "--job", "ps", "--publish", self.model)
        again.await_line("worker ready")
        self.gate.open()
        self.assertEqual(puller.wait(), 0, puller.output)
        shown = json.loads(puller.output)
        self.assertEqual((shown["bytes"], shown["verified"]), (BIG_BYTES, 1))
        self.assertEqual(os.listdir(self.folder / "output"), ["out.safetensors"])

    def test_the_file_shrinks_while_it_is_served(self):
        puller = self.start_big_pull()
        os.truncate(self.model, 4096)
        self.gate.open()
        self.assertEqual(puller.wait(), 1)
        self.assertRegex(puller.lines[-1], r"^tensorlane pull: tensor 'zeros': .*big\.safetensors")
        self.assert_nothing_left()
        self.assertIsNone(self.worker.process.poll())
        self.assertIn("1 tensor,", self.assert_run(0, "ls", *self.target).stdout)

    def test_a_tensor_changes_its_shape_meanwhile(self):
        self.pull_while_the_shape_changes()

    def test_the_disk_is_full(self):
        self.serve_big()
        script = ('mount -t tmpfs -o size=1m tmpfs "$1" || exit 77; shift; "$0" "$@"; code=$?; '
                  '[ -z "$(ls -A "$MOUNTED")" ] || exit 99; exit $code')
        mounted = str(self.folder / "output")
        command = ["unshare", "--mount", "--map-root-user", "/bin/sh", "-c", script, cli_support.PROGRAM, mounted,
                   "pull", *map(str, self.target), "-o", str(self.out())]
        try:
            result = subprocess.run(command, env=environment(MOUNTED=mounted), capture_output=True, text=True,
                                    check=False, timeout=PATIENCE)
        except FileNotFoundError:
            self.skipTest("there is no unshare")
        if result.returncode == 77 or "unshare" in result.stderr:
            self.skipTest("file systems cannot be mounted here")
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertRegex(result.stderr, "^tensorlane pull: .*No space left")


if __name__ == "__main__":
    cli_support.main()
