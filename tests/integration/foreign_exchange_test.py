#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A worker as it appears to another worker, which is written in Python from the .proto files (foreign_worker.py)."""
import random
import subprocess
import sys
import unittest

import cli_support
from cli_support import PATIENCE, some_tensors, wait_until, write_safetensors
from foreign_support import ABSENT, XXH3, Code, ForeignCase, as_tensor, checksum
from foreign_worker import ForeignWorker

from tensorlane.v1 import transfer_pb2


class ExchangeCase(ForeignCase):
    def foreign(self, incarnation=7, **options):
        worker = ForeignWorker(self.channel, incarnation, **options)
        self.addCleanup(worker.break_off)
        return worker

    def opened(self, **options):
        worker = self.foreign(**options)
        worker.open()
        return worker


class Exchange(ExchangeCase):
    def peer(self):
        return {peer.name: peer for peer in self.identify().peers}["/job:worker/task:0"]

    def assert_arrived(self, arrived, tensors):
        for one in arrived:
            self.assertIsNone(one.failure)
            self.assertEqual(as_tensor(one.first.meta_data, one.data), tensors[one.key], one.key)
            self.assertFalse(one.first.is_one_shot)
            if XXH3:
                self.assertEqual(one.checksum, checksum(one.data), one.key)

    def test_hello(self):
        self.start()
        foreign = self.foreign()
        hello = foreign.open(expected_name="/job:ps/task:0", received=[1, 2, 3])
        worker = self.identify()
        self.assertEqual((hello.name, hello.incarnation, hello.software_version, hello.protocol_version),
                         ("/job:ps/task:0", worker.incarnation, worker.software_version, worker.protocol_version))
        self.assertEqual(foreign.close(), Code.OK)

    def test_hello_that_is_refused(self):
        self.start(timeouts={"connect": "3s"})
        for code, pattern, changes in (
                (Code.FAILED_PRECONDITION, "/job:ps/task:0 was called as ps:9", {"expected_name": "ps:9"}),
                (Code.FAILED_PRECONDITION, "protocol version 99", {"protocol_version": 99}),
                (Code.FAILED_PRECONDITION, "no incarnation", {"incarnation": 0}),
                (Code.FAILED_PRECONDITION, "is this worker itself", {"name": "/job:ps/task:0"}),
                (Code.INVALID_ARGUMENT, "name of the peer", {"name": "x" * 5000})):
            with self.subTest(pattern), self.refused(code, pattern):
                foreign = self.foreign()
                foreign.open(**changes)
                foreign.read()
        for code, pattern, say in (
                (Code.INVALID_ARGUMENT, "before the hello", lambda foreign: foreign.request(["a"])),
                (Code.DEADLINE_EXCEEDED, "connect time-out", lambda foreign: None)):
            with self.subTest(pattern), self.refused(code, pattern):
                foreign = self.foreign()
                say(foreign)
                foreign.read()

    def test_a_second_hello(self):
        self.start()
        foreign = self.opened()
        with self.refused(Code.INVALID_ARGUMENT, "a second hello"):
            foreign.open()

    def test_many_tensors(self):
        tensors = {**some_tensors(), "large": ("U8", (5 << 20,), random.Random(4).randbytes(5 << 20))}
        tensors.update({f"small/{i}": ("I32", (i,), random.Random(i).randbytes(4 * i)) for i in range(600)})
        self.start(tensors, limits={"chunk": "64KiB", "inflight": "128KiB"})
        foreign = self.opened()
        foreign.request(tensors)
        self.assert_arrived(foreign.take(), tensors)
        foreign.request(["large"], first_number=10000, wants_checksum=False)
        again, = foreign.take()
        self.assertIsNone(again.checksum)
        self.assertEqual(bytes(again.data), tensors["large"][2])
        foreign.send(received=[1, 10000, 99999], cancels=[1, 99999])
        foreign.request(["scalar"], first_number=10001)
        self.assert_arrived(foreign.take(), tensors)
        self.assertEqual(foreign.close(), Code.OK)
        self.assertEqual(self.counter("protocol_errors"), 0)

    def test_waiting_and_cancel(self):
        self.start()
        foreign = self.opened()
        foreign.request([ABSENT, "late", "later"])
        self.await_waiting(3)
        foreign.cancel(1)
        self.await_waiting(2)
        self.publish("later", b"x")
        self.publish("late", b"y")
        self.assert_arrived(foreign.take(), {"later": ("U8", (1,), b"x"), "late": ("U8", (1,), b"y")})
        foreign.request([ABSENT])
        self.await_waiting(1)
        foreign.break_off()
        self.await_waiting(0)

    def test_cancel_in_the_middle(self):
        size = 64 << 20
        write_safetensors(self.folder / "big", {"big": ("U8", (size,), b"")}, {"big": size})
        self.start(publish=["big"])
        self.publish("small", b"x")
        foreign = self.opened()
        foreign.request(["big"])
        foreign.read()
        foreign.cancel(1)
        foreign.request(["small"], first_number=2)
        self.assert_arrived(foreign.take(), {"small": ("U8", (1,), b"x")})
        self.assertEqual(self.counter("tensors_sent"), 1)
        self.assertLess(self.counter("bytes_sent"), size)

    def test_failures_of_one_request(self):
        self.start({"a": ("U8", (1,), b"x")}, limits={"waiting": 1})
        foreign = self.opened()
        _, second, third = foreign.request([ABSENT, ABSENT, "a"])
        while not (second.is_over and third.is_over):
            foreign.read()
        self.assertEqual(second.failure.code, Code.RESOURCE_EXHAUSTED.value[0])
        self.assertIn(ABSENT, second.failure.message)
        self.assertEqual(third.data, b"x")
        foreign.cancel(1)
        self.await_waiting(0)
        self.assertEqual(foreign.close(), Code.OK)

    def test_frames_that_break_the_protocol(self):
        self.start()
        for pattern, say in (
                ("request number 0", lambda foreign: foreign.request([ABSENT], first_number=0)),
                ("request number 5 is 0 or already in use",
                 lambda foreign: [foreign.request([ABSENT], first_number=5) for _ in range(2)]),
                ("key is missing", lambda foreign: foreign.request([""])),
                ("key of 513 bytes", lambda foreign: foreign.request(["k" * 513])),
                ("belong to no chunk", lambda foreign: foreign.send(data=b"x")),
                ("a chunk of 9 bytes in a frame that has 1 left",
                 lambda foreign: foreign.send(chunks=[transfer_pb2.Chunk(number=1, len_bytes=9)], data=b"x"))):
            foreign = self.opened()
            with self.subTest(pattern), self.refused(Code.INVALID_ARGUMENT, pattern):
                say(foreign)
                foreign.take() or foreign.read()
        self.await_waiting(0)
        self.assertEqual(self.counter("protocol_errors"), 6)

    def break_in_the_middle(self):
        """Receives a part of a large tensor, then breaks the stream; returns the tensor and the part."""
        data = random.Random(5).randbytes(16 << 20)
        self.start()
        self.publish("w", data, 1)
        foreign = self.opened()
        part, = foreign.request(["w"])
        while len(part.data) < 3 << 20:
            foreign.read()
        foreign.break_off()
        self.assertLess(len(part.data), len(data))
        return ("U8", (len(data),), data), part

    def test_resume(self):
        tensor, part = self.break_in_the_middle()
        foreign = self.opened()
        rest, = foreign.request(["w"], resume=part)
        foreign.take()
        self.assertEqual((rest.first.offset, rest.publication, rest.first.step), (len(part.data), part.publication, 1))
        self.assert_arrived([rest], {"w": tensor})

    def test_resume_with_nothing_left(self):
        tensor, part = self.break_in_the_middle()
        part.data = bytearray(tensor[2])
        foreign = self.opened()
        rest, = foreign.request(["w"], resume=part)
        foreign.take()
        self.assertEqual((rest.first.offset, rest.first.len_bytes), (len(tensor[2]), 0))
        self.assert_arrived([rest], {"w": tensor})

    def test_resume_that_cannot_be(self):
        tensor, part = self.break_in_the_middle()
        part.data += bytes(len(tensor[2]))
        foreign = self.opened()
        beyond, = foreign.request(["w"], resume=part)
        foreign.take()
        other = ("U8", (5,), b"other")
        self.publish("w", other[2], 2)
        replaced, = foreign.request(["w"], first_number=2, resume=beyond)
        foreign.take()
        self.assertEqual((beyond.first.offset, replaced.first.offset), (0, 0))
        self.assertNotEqual(replaced.publication, part.publication)
        self.assert_arrived([beyond], {"w": tensor})
        self.assert_arrived([replaced], {"w": other})

    def test_a_member_of_the_cluster(self):
        self.start()
        for incarnation in (7, 8):
            foreign = self.opened(incarnation=incarnation, name="/job:worker/task:0")
            wait_until(lambda: self.peer().state == "up", "the peer is up")
            self.assertEqual((self.peer().incarnation, self.peer().transport), (incarnation, "grpc"))
            self.assertEqual(foreign.close(), Code.OK)
            wait_until(lambda: self.peer().state != "up", "the peer is gone")

    def test_the_worker_stops_in_the_middle(self):
        """Running transfers may finish, new requests are refused, and the worker waits for our end of the stream."""
        data = random.Random(6).randbytes(48 << 20)
        self.start(timeouts={"drain": "300s"})
        self.publish("w", data)
        foreign = self.opened()
        large, waiting = foreign.request(["w", ABSENT])
        foreign.read()
        self.drain()
        self.worker.await_line("worker stopping")
        late, = foreign.request(["w"], first_number=3)
        foreign.take()
        for refused in (waiting, late):
            self.assertEqual(refused.failure.code, Code.UNAVAILABLE.value[0])
        self.assertEqual(large.data, data)
        while not foreign.is_goodbye:
            foreign.read()
        self.assertEqual(foreign.close(), Code.OK)


class OneShot(ExchangeCase):
    """A tensor that was sent, not published, goes to one receiver, which may be a foreign worker."""
    KEY, STEP, TENSOR = "one", 3, ("U8", (9,), b"all of it")

    LIBRARY = cli_support.BUILD / "lib/libtensorlane.so"

    @classmethod
    def setUpClass(cls):
        if cli_support.SANITIZE or not cls.LIBRARY.exists():
            raise unittest.SkipTest("Python cannot load libtensorlane.so: it is not there, or built with a sanitizer")

    def setUp(self):
        super().setUp()
        self.served = self.cluster(ps=1, worker=1, extra={"timeouts": {"reservation": "1h"}, "log": {"level": "error"}})
        script = cli_support.SOURCE / "tests/integration/one_shot_sender.py"
        self.sender = subprocess.Popen([sys.executable, script, self.LIBRARY, self.served.path, self.KEY,
                                        str(self.STEP), self.TENSOR[2]], stdout=subprocess.PIPE, text=True)
        for clean_up in (self.sender.stdout.close, self.sender.wait, self.sender.kill):
            self.addCleanup(clean_up)
        self.assertEqual(self.sender.stdout.readline(), "sending\n")
        self.channel = self.connect()
        wait_until(lambda: self.counter("held_tensors") == 1, "the tensor is there")

    def assert_sent(self):
        self.assertEqual(self.sender.stdout.readline(), "sent\n")
        self.channel.close()
        self.assertEqual(self.sender.wait(PATIENCE), 0)

    def assert_one(self, one):
        self.assertTrue(one.first.is_one_shot)
        self.assertEqual((one.first.step, as_tensor(one.first.meta_data, one.data)), (self.STEP, self.TENSOR))

    def test_client(self):
        with self.refused(Code.DEADLINE_EXCEEDED):
            next(self.receive(self.KEY, self.STEP - 1, timeout=0.1))
        self.assertEqual(self.collect(self.receive(self.KEY, self.STEP, True), True), (self.STEP, self.TENSOR))
        self.assert_sent()

    def test_worker(self):
        foreign = self.opened()
        foreign.request([self.KEY], self.STEP)
        self.assert_one(*foreign.take())
        self.assertEqual(foreign.close(), Code.OK)
        self.assert_sent()

    def break_before_acknowledging(self, **options):
        """Breaks the stream before the acknowledgement. Then the worker keeps the tensor for the receiver that asked
        for it."""
        foreign = self.opened(**options)
        foreign.request([self.KEY], self.STEP)
        one, = foreign.take(acknowledges=False)
        foreign.break_off()
        with self.refused(Code.DEADLINE_EXCEEDED):
            next(self.receive(self.KEY, self.STEP, timeout=0.1))
        self.assertEqual(self.counter("held_tensors"), 1)
        return one

    def test_acknowledged_on_the_next_stream(self):
        self.assert_one(self.break_before_acknowledging())
        foreign = self.foreign()
        foreign.open(received=[1])
        self.assertEqual(foreign.close(), Code.OK)
        self.assert_sent()

    def test_asked_for_again(self):
        first = self.break_before_acknowledging()
        foreign = self.opened()
        foreign.request([self.KEY], self.STEP, resume=first)
        again, = foreign.take()
        self.assert_one(again)
        self.assertEqual((again.publication, again.first.offset), (first.publication, len(self.TENSOR[2])))
        self.assertEqual(foreign.close(), Code.OK)
        self.assert_sent()

    def test_the_process_comes_back_as_another(self):
        """The worker offers what it had reserved for the former process again."""
        name = "/job:worker/task:0"
        self.break_before_acknowledging(name=name)
        foreign = self.opened(name=name, incarnation=8)
        foreign.request([self.KEY], self.STEP)
        self.assert_one(*foreign.take())
        self.assertEqual(foreign.close(), Code.OK)
        self.assert_sent()


if __name__ == "__main__":
    cli_support.main()
