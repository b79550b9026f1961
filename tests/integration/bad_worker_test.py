#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Workers that lie about their tensors, break the protocol or stay silent: a pull ends with one line that says what is
wrong, and leaves nothing behind."""
import concurrent.futures
import os
import struct
import unittest

import cli_support
from foreign_support import XXH3, checksum, cluster_pb2, grpc, transfer_pb2
from cli_support import PATIENCE, read_safetensors, run, write_safetensors

DATA = b"data"
META = transfer_pb2.MetaData(dtype=transfer_pb2.U8, dims=[4], size_bytes=4)
ENTRY = transfer_pb2.ListEntry(key="a", meta_data=META, publication=5)
WAITS = object()  # In a script: from here on the worker sends nothing, and does not end the call.
# A pull gives up after this time. It suffices a slow machine, and is shorter than the time after which a pull reports
# that nothing comes.
TIMEOUT_SEC = 4
TIMED_OUT = f"nothing was received for {TIMEOUT_SEC}.00 s, with 0 of 1 tensors complete; the worker is connected"


def meta(dtype=transfer_pb2.U8, dims=(4,), size_bytes=4, **fields):
    return transfer_pb2.MetaData(dtype=dtype, dims=dims, size_bytes=size_bytes, **fields)


def hello(**fields):
    return transfer_pb2.Frame(hello=transfer_pb2.Hello(**{
        "protocol_version": 1, "name": "/job:ps/task:0", "incarnation": 77, "software_version": "9", **fields}))


def chunk(number, data=DATA, offset=0, meta_data=META, sum_of=None, **fields):
    """Builds a frame with a chunk; sum_of names the bytes whose checksum is in it."""
    result = transfer_pb2.Chunk(number=number, offset=offset, len_bytes=len(data), meta_data=meta_data, publication=5)
    if sum_of is not None:
        result.has_checksum, result.checksum = True, checksum(sum_of)
    for name, value in fields.items():
        setattr(result, name, value)
    return transfer_pb2.Frame(chunks=[result], data=data)


def failure(number, code, message):
    return transfer_pb2.Frame(failures=[transfer_pb2.Failure(number=number, status=transfer_pb2.Status(
        code=code, message=message))])


# For each case: what the worker answers to a request, and what the pull prints.
ANSWERS = {
    "more bytes than announced": (lambda n: [chunk(n, b"data and more", sum_of=DATA)],
                                  "tensor 'a': the peer sends 13 bytes where 4 of 4 announced bytes are left"),
    "more bytes later": (lambda n: [chunk(n, b"da"), chunk(n, b"ta and more", 2, None)],
                         "tensor 'a': the peer sends 11 bytes where 2 of 4 announced bytes are left"),
    "a gap": (lambda n: [chunk(n, b"da"), chunk(n, b"a", 3, None)], "tensor 'a'.*offset 3 where 2 was next"),
    "an offset twice": (lambda n: [chunk(n, b"da"), chunk(n, b"da", 0, None)], "tensor 'a'.*offset 0 where 2 was next"),
    "a first offset beyond the start": (lambda n: [chunk(n, b"ta", 2)], "tensor 'a'.* at byte 2, but 0 bytes"),
    "an offset beyond everything": (lambda n: [chunk(n, DATA, 2**64 - 4)], "tensor 'a'.* at byte 18446744073709551612"),
    "another shape than it lists": (lambda n: [chunk(n, b"da", meta_data=meta(dims=[2], size_bytes=2))],
                                    r"tensor 'a'.*U8 \[2\] and does not fit the destination, which is U8 \[4\]"),
    "another dtype than it lists": (lambda n: [chunk(n, meta_data=meta(transfer_pb2.F32, [1]))],
                                    r"tensor 'a'.*F32 \[1\] and does not fit the destination, which is U8 \[4\]"),
    "a shape with more bytes": (lambda n: [chunk(n, meta_data=meta(dims=[400]))], "tensor 'a'.*has 400 bytes, not 4"),
    "a shape beyond 64 bits": (lambda n: [chunk(n, meta_data=meta(dims=[2**63, 2**63], size_bytes=0))],
                               "tensor 'a': dimension 0 is"),
    "17 dimensions": (lambda n: [chunk(n, meta_data=meta(dims=[4] + [1] * 16))], "tensor 'a'.*17 dimensions"),
    "an unknown dtype": (lambda n: [chunk(n, meta_data=meta(99))], "tensor 'a': dtype INVALID \\(99\\)"),
    "no dtype": (lambda n: [chunk(n, meta_data=meta(0))], "tensor 'a': dtype INVALID \\(0\\)"),
    "a dead tensor": (lambda n: [chunk(n, b"", meta_data=meta(size_bytes=0, is_dead=True))], "tensor 'a': a dead t"),
    "no meta-data": (lambda n: [chunk(n, meta_data=None)], "tensor 'a'.*bytes before the meta-data"),
    "meta-data twice": (lambda n: [chunk(n, b"da"), chunk(n, b"ta", 2, meta(dims=[2, 2]))], "tensor 'a'.*at byte 2"),
    "a wrong checksum": (lambda n: [chunk(n, sum_of=b"date")], "tensor 'a': the checksum of the 4 bytes"),
    "no checksum": (lambda n: [chunk(n)], "tensor 'a': the peer sent no checksum"),
    "bytes of no chunk": (lambda n: [transfer_pb2.Frame(data=b"x")], "broke the protocol: 1 bytes that belong to no"),
    "a chunk without its bytes": (lambda n: [chunk(n, b"", len_bytes=4)], "broke the protocol: a chunk of 4 bytes"),
    "a failure": (lambda n: [failure(n, 9, "not today")], "tensor 'a': not today\n"),
    "a failure that is none": (lambda n: [failure(n, 0, "")], "tensor 'a': the peer gave no reason"),
    "a failure for terminals": (lambda n: [failure(n, 4000000000, "\x1b[31mred")], r"tensor 'a': \\x1B\[31mred"),
    "a failure with a long story": (lambda n: [failure(n, 13, "long " * 20000)], "tensor 'a': long long"),
    "a failure that is not UTF-8": (lambda n: [failure(n, 13, "~~").SerializeToString().replace(b"~~", b"\xff\0")],
                                    "broke the protocol: a message that is no tensorlane.v1.Frame"),
    "another hello": (lambda n: [hello()], "broke the protocol: a second hello"),
    "no frame": (lambda n: [b"\xff" * 100], "broke the protocol: a message that is no tensorlane.v1.Frame"),
    "nesting": (lambda n: [b"\x32\x80\x01" * 5000], "broke the protocol: a message that is no tensorlane.v1.Frame"),
    "a frame that is too long": (lambda n: [chunk(n, bytes(17 << 20))], "message larger than max"),
    "answers to others only": (lambda n: [chunk(n + 7, sum_of=DATA), failure(n + 8, 5, "x"), WAITS],
                               TIMED_OUT),
    "nothing": (lambda n: [WAITS], TIMED_OUT),
    "the end": (lambda n: [], "closed the connection"),
}
# For each case: the first frames of the worker, and what the pull prints.
HANDSHAKES = {
    "nothing": ([WAITS], "the worker is being connected to"),
    "the end": ([], "the worker is (being connected to|out of reach)"),
    "something else": ([chunk(1)], "broke the protocol: a frame before the hello"),
    "another version": ([hello(protocol_version=99)],
                        "/job:ps/task:0 \\(version 9\\) speaks protocol version 99, this client speaks 1; run"),
    "another name": ([hello(name="/job:other/task:3")], "is /job:other/task:3, not /job:ps/task:0"),
    "no name": ([hello(name="")], "is a client, not /job:ps/task:0"),
    "a name that is too long": ([hello(name="n" * 100000)], "a name of the peer of 100000 bytes"),
    "a name for terminals": ([hello(name="\x1b[2J")], r"is \\x1B\[2J, not /job:ps/task:0"),
    "no incarnation": ([hello(incarnation=0)], "gave no incarnation"),
}
# These handshakes fail for good, so the pull does not try again.
HOPELESS = {what: HANDSHAKES[what] for what in ("another version", "another name", "no name", "no incarnation")}
# For each case: what the worker lists, and what the pull prints.
LISTINGS = {
    "no meta-data": ([transfer_pb2.ListEntry(key="a")],
                     "sent an invalid response: a: the meta-data of the tensor is missing"),
    "no key": ([transfer_pb2.ListEntry(meta_data=META)], "sent an invalid response: the key is missing"),
    "a key that is too long": ([transfer_pb2.ListEntry(key="k" * 513, meta_data=META)], "a key of 513 bytes"),
    "a key with NUL": ([transfer_pb2.ListEntry(key="a\0b", meta_data=META)], "a NUL in a text"),
    "a key twice": ([ENTRY, ENTRY], "tensor 'a' is there twice"),
    "shape and bytes that disagree": ([transfer_pb2.ListEntry(key="a", meta_data=meta(size_bytes=5))],
                                      r"a: a tensor of U8 with shape \[4\] has 4 bytes, not 5"),
    "more bytes than any disk has": ([transfer_pb2.ListEntry(key="a", meta_data=meta(dims=[2**60], size_bytes=2**60))],
                                     "cannot allocate 115292150460684[0-9]+ bytes of disk space for "),
    "more bytes than there are": ([transfer_pb2.ListEntry(key=key, meta_data=meta(dims=[2**62], size_bytes=2**62))
                                   for key in "abcd"], "have more than 2\\^63-1 bytes"),
}


class HostileWorker:
    """A server that calls itself /job:ps/task:0; it lists, shakes hands and answers as its script says."""

    def __init__(self, case, answer=lambda n: [chunk(n, sum_of=DATA)], handshake=(hello(),), listing=(ENTRY,),
                 version=1):
        self.answer, self.handshake, self.listing, self.version = answer, handshake, listing, version
        server = grpc.server(concurrent.futures.ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        handlers = {"/tensorlane.v1.Cluster/Identify": grpc.unary_unary_rpc_method_handler(self.identify),
                    "/tensorlane.v1.Transfer/List": grpc.unary_stream_rpc_method_handler(self.list),
                    "/tensorlane.v1.Transfer/Exchange": grpc.stream_stream_rpc_method_handler(self.exchange)}

        class Handler(grpc.GenericRpcHandler):
            def service(self, details):
                return handlers.get(details.method)
        server.add_generic_rpc_handlers((Handler(),))
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        case.addCleanup(server.stop, None)

    def identify(self, _request, _context):
        return cluster_pb2.IdentifyResponse(job="ps", incarnation=77, protocol_version=self.version,
                                            software_version="9", is_serving=True).SerializeToString()

    def list(self, _request, _context):
        yield transfer_pb2.ListResponse(entries=self.listing).SerializeToString()

    def say(self, frames, requests):
        for frame in frames:
            if frame is WAITS:
                for _ in requests:
                    pass
                return
            yield frame if isinstance(frame, bytes) else frame.SerializeToString()

    def exchange(self, requests, _context):
        next(requests)
        yield from self.say(self.handshake, requests)
        for text in requests:
            for request in transfer_pb2.Frame.FromString(text).requests:
                frames = self.answer(request.number)
                yield from self.say(frames, requests)
                if not frames:
                    return


@unittest.skipIf(XXH3 is None, "libxxhash.so.0 is not there")
class Hostile(cli_support.Case):
    def pull(self, folder, worker, timeout=f"{TIMEOUT_SEC}s"):
        folder.mkdir()
        return run("pull", "--address", worker.address, "-o", folder / "out.safetensors", "--timeout", timeout)

    def check_all(self, cases, make_worker, timeout=f"{TIMEOUT_SEC}s"):
        """Pulls from all workers at the same time, because many pulls end only with the time-out."""
        def pull_one(place):
            what, script = place
            return self.pull(self.folder / what, make_worker(script), timeout)
        pool = concurrent.futures.ThreadPoolExecutor(8)
        results = pool.map(pull_one, [(what, script) for what, (script, _) in cases.items()])
        for (what, (_, pattern)), result in zip(cases.items(), results):
            with self.subTest(what):
                self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
                self.assertRegex(result.stderr, "^tensorlane pull: [^\x00-\x1f\x7f]+\n$")
                self.assertRegex(result.stderr, pattern)
                self.assertEqual(os.listdir(self.folder / what), [])
        pool.shutdown()

    def test_an_honest_one(self):
        result = self.pull(self.folder / "honest", HostileWorker(self))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(read_safetensors(self.folder / "honest/out.safetensors"), {"a": ("U8", (4,), DATA)})

    def test_answers(self):
        self.check_all(ANSWERS, lambda script: HostileWorker(self, answer=script))

    def test_handshakes(self):
        self.check_all(HANDSHAKES, lambda script: HostileWorker(self, handshake=script))

    def test_handshakes_that_fail_for_good(self):
        """The time-out is longer than the test's patience."""
        self.check_all(HOPELESS, lambda script: HostileWorker(self, handshake=script), timeout="600s")

    def test_another_version_by_itself(self):
        """The commands neither ask nor change anything on a worker of another release."""
        worker = HostileWorker(self, version=99)
        model = write_safetensors(self.folder / "model.safetensors", {"a": ("U8", (4,), DATA)})
        for command in (["ls"], ["rm", "*"], ["push", model], ["pull", "-o", self.folder / "out"]):
            self.assert_error(1, f"^tensorlane {command[0]}: /job:ps/task:0 at {worker.address} \\(version 9\\) speaks "
                                 "protocol version 99, this program speaks 1; run the same release on both\n$",
                              *command, "--address", worker.address, "--timeout", "600s")

    def test_no_worker(self):
        server = grpc.server(concurrent.futures.ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        self.addCleanup(server.stop, None)
        self.assert_error(1, f"^tensorlane ls: {address}: the gRPC server that answers is not a tensorlane worker: ",
                          "ls", "--address", address)

    def test_listings(self):
        self.check_all(LISTINGS, lambda script: HostileWorker(self, listing=script))

    def test_late_answers_are_passed_over(self):
        """Bytes for a request that was never made do no harm to the real one."""
        worker = HostileWorker(self, lambda n: [chunk(n + 7, b"lies"), failure(n + 8, 5, "x"), chunk(n, sum_of=DATA)])
        result = self.pull(self.folder / "late", worker)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(read_safetensors(self.folder / "late/out.safetensors"), {"a": ("U8", (4,), DATA)})


if __name__ == "__main__":
    cli_support.main()
