#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A worker as it appears to clients that have only the .proto files of this project."""
import concurrent.futures
import contextlib
import random
import threading

import cli_support
from cli_support import (BUILD, PATIENCE, environment, read_safetensors, run, some_tensors, wait_until,
                         write_safetensors)
from foreign_support import ABSENT, XXH3, Code, ForeignCase, checksum, meta_data
from foreign_worker import PROTOCOL_VERSION, ForeignWorker

import google.protobuf.descriptor_pb2
import grpc
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2
from grpc_reflection.v1 import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2 as reflection_alpha_pb2
from grpc_reflection.v1alpha import reflection_pb2_grpc as reflection_alpha_pb2_grpc
from tensorlane.v1 import transfer_pb2

HEALTH_SERVICES = ("", "tensorlane.v1.Cluster", "tensorlane.v1.Transfer")
SERVICES = {"grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection",
            "tensorlane.v1.Cluster", "tensorlane.v1.Transfer"}
# Bits of an element of every type that a safetensors file can have.
BITS = {"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64, "F16": 16,
        "BF16": 16, "F32": 32, "F64": 64, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
        "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
ServingStatus = health_pb2.HealthCheckResponse


class Health(ForeignCase):
    def watch(self, service):
        return self.health.Watch(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE)

    def test_check(self):
        self.start()
        for service in HEALTH_SERVICES:
            self.assertEqual(self.check(service), ServingStatus.SERVING, service)
        for service in ("tensorlane.v1", "tensorlane.v1.Cluster ", "no.such.Service"):
            with self.refused(Code.NOT_FOUND, f'"{service}"'):
                self.check(service)

    def test_watch_until_the_worker_drains(self):
        self.start()
        watches = [self.watch(service) for service in HEALTH_SERVICES]
        for watch in watches:
            self.assertEqual(next(watch).status, ServingStatus.SERVING)
        self.drain()
        for watch in watches:
            self.assertEqual(next(watch).status, ServingStatus.NOT_SERVING)
            with self.refused(Code.UNAVAILABLE, "shutting down"):
                next(watch)

    def test_watch_an_unknown_service(self):
        self.start()
        watch = self.watch("no.such.Service")
        self.assertEqual(next(watch).status, ServingStatus.SERVICE_UNKNOWN)
        self.assertEqual(self.check(""), ServingStatus.SERVING)
        self.assertTrue(watch.is_active())
        self.drain()
        with self.refused(Code.UNAVAILABLE, "shutting down"):
            next(watch)

    def test_watchers_that_leave(self):
        self.start()
        for _ in range(100):
            watch = self.watch("")
            self.assertEqual(next(watch).status, ServingStatus.SERVING)
            watch.cancel()
        self.assertEqual(self.check(""), ServingStatus.SERVING)


class Reflection(ForeignCase):
    def setUp(self):
        super().setUp()
        self.start({"a": ("F32", (2, 3), bytes(range(24)))})
        self.versions = {"v1": (reflection_pb2, reflection_pb2_grpc),
                         "v1alpha": (reflection_alpha_pb2, reflection_alpha_pb2_grpc)}

    def ask(self, version, *questions):
        """Asks questions, each a dictionary, on one stream, and returns the answers."""
        messages, stubs = self.versions[version]
        requests = [messages.ServerReflectionRequest(host="anything", **question) for question in questions]
        stub = stubs.ServerReflectionStub(self.channel)
        answers = list(stub.ServerReflectionInfo(iter(requests), timeout=PATIENCE))
        self.assertEqual([answer.original_request for answer in answers], requests)
        self.assertEqual({answer.valid_host for answer in answers}, {"anything"})
        return answers

    def files_of(self, answer):
        files = [google.protobuf.descriptor_pb2.FileDescriptorProto.FromString(data)
                 for data in answer.file_descriptor_response.file_descriptor_proto]
        self.assertTrue(files, answer)
        return files

    def test_services_and_their_files(self):
        for version in self.versions:
            listed, = self.ask(version, {"list_services": "*"})
            self.assertEqual({service.name for service in listed.list_services_response.service}, SERVICES)
            for service in SERVICES:
                by_symbol = self.files_of(self.ask(version, {"file_containing_symbol": service})[0])
                package, name = service.rsplit(".", 1)
                self.assertEqual(by_symbol[0].package, package)
                self.assertIn(name, [inside.name for inside in by_symbol[0].service])
                by_name = self.files_of(self.ask(version, {"file_by_filename": by_symbol[0].name})[0])
                self.assertEqual(by_name, by_symbol)

    def test_questions_without_answer(self):
        for version in self.versions:
            *failed, listed = self.ask(version, {"file_containing_symbol": "tensorlane.v1.Nothing"},
                                       {"file_by_filename": "../etc/passwd"}, {"file_by_filename": ""},
                                       {"all_extension_numbers_of_type": "no.Message"},
                                       {"file_containing_extension": {"containing_type": "tensorlane.v1.Frame",
                                                                      "extension_number": 100}},
                                       {}, {"list_services": ""})
            codes = [answer.error_response.error_code for answer in failed]
            self.assertEqual(codes, [Code.NOT_FOUND.value[0]] * 5 + [Code.UNIMPLEMENTED.value[0]])
            self.assertEqual(len(listed.list_services_response.service), len(SERVICES))

    def rebuild(self, version):
        """Does what grpcurl does: builds all types of all services from answers alone."""
        pool = descriptor_pool.DescriptorPool()
        files = {file.name: file for service in sorted(SERVICES)
                 for file in self.files_of(self.ask(version, {"file_containing_symbol": service})[0])}

        def add(name):
            file = files.pop(name, None)
            if file:
                for imported in file.dependency:
                    add(imported)
                pool.Add(file)
        for name in list(files):
            add(name)
        return pool

    def method(self, pool, service, name):
        """Returns a method as a function that takes fields, and the kind of its messages."""
        method = pool.FindServiceByName(service).methods_by_name[name]
        classes = getattr(message_factory, "GetMessageClass", None) or message_factory.MessageFactory(pool).GetPrototype
        request, response = classes(method.input_type), classes(method.output_type)
        described = google.protobuf.descriptor_pb2.MethodDescriptorProto()
        method.CopyToProto(described)
        kind = "stream" if described.server_streaming else "unary"
        call = getattr(self.channel, f"unary_{kind}")(f"/{service}/{name}", request.SerializeToString,
                                                      response.FromString)
        return lambda **fields: call(request(**fields), timeout=PATIENCE)

    def test_calls_through_descriptors(self):
        for version in self.versions:
            pool = self.rebuild(version)
            for service in SERVICES:
                self.assertTrue(pool.FindServiceByName(service).methods)
            who = self.method(pool, "tensorlane.v1.Cluster", "Identify")()
            self.assertEqual((who.job, who.task, who.incarnation), ("ps", 0, self.identify().incarnation))
            self.assertEqual(self.method(pool, "grpc.health.v1.Health", "Check")(service="").status, 1)
            listed, = self.method(pool, "tensorlane.v1.Transfer", "List")(pattern="a")
            self.assertEqual([entry.key for entry in listed.entries], ["a"])
            piece, = self.method(pool, "tensorlane.v1.Transfer", "Receive")(key="a")
            self.assertEqual(piece.data, bytes(range(24)))


class Identify(ForeignCase):
    def test_it_says_everything(self):
        tensors = some_tensors()
        self.start(tensors)
        first, who = self.identify(), self.identify()
        self.assertEqual((who.job, who.task, who.is_serving, who.protocol_version), ("ps", 0, True, PROTOCOL_VERSION))
        self.assertIn(who.software_version, run("--version").stdout)
        self.assertTrue(who.software_version)
        self.assertNotEqual(who.incarnation, 0)
        self.assertEqual(who.incarnation, first.incarnation)
        self.assertGreater(who.uptime_ns, first.uptime_ns)
        self.assertEqual([transport.name for transport in who.transports if transport.is_available], ["grpc", "local"])
        self.assertTrue(all(transport.reason for transport in who.transports))
        states = {peer.name: (peer.state, peer.incarnation) for peer in who.peers}
        self.assertEqual(states["/job:worker/task:0"], ("idle", 0))
        counters = {counter.name: counter.value for counter in who.counters}
        self.assertEqual(counters["published_tensors"], len(tensors))
        self.assertEqual(counters["published_bytes"], sum(len(data) for _, _, data in tensors.values()))
        self.assertEqual(counters["waiting_receivers"], 0)

    def test_every_process_is_another(self):
        self.start()
        before = self.identify().incarnation
        self.channel.close()
        self.stop()
        self.worker = self.served.start("ps", 0)
        self.is_draining = False
        channel = self.connect()
        self.assertNotEqual(self.identify().incarnation, before)
        channel.close()
        self.stop()


class List(ForeignCase):
    def test_everything_and_some(self):
        tensors = some_tensors()
        self.start(tensors)
        entries, _ = self.list()
        self.assertEqual([entry.key for entry in entries], sorted(tensors, key=str.encode))
        for entry in entries:
            self.assertEqual(entry.meta_data, meta_data(*tensors[entry.key]))
            self.assertNotEqual(entry.publication, 0)
        self.assertEqual(len({entry.publication for entry in entries}), len(entries))
        for pattern, keys in (("layer.0.*", ["layer.0.bias", "layer.0.weight"]), ("scalar", ["scalar"]),
                              ("große*", ["große Zahl"]), ("?ask", ["mask"]), ("nothing", []), ("layer", [])):
            self.assertEqual([entry.key for entry in self.list(pattern)[0]], keys, pattern)
        with self.refused(Code.INVALID_ARGUMENT, "pattern"):
            self.list("x" * 5000)

    def test_in_many_messages(self):
        names = [f"{i:05}" for i in range(1000)]
        self.start({name: ("U8", (), b"x") for name in names})
        entries, message_count = self.list()
        self.assertEqual([entry.key for entry in entries], names)
        self.assertGreater(message_count, 1)


class Receive(ForeignCase):
    def test_tensors_on_a_gpu(self):
        """The GPU is that of a double of CUDA, which ends a worker that touches its memory itself."""
        tensors = {name: ("U8", (size,), random.Random(size).randbytes(size))
                   for name, size in (("empty", 0), ("small", 9), ("pieces", 3_000_001))}
        self.start(tensors, env=environment(LD_LIBRARY_PATH=BUILD / "tests/fakes/cuda/12"), device="gpu:1")
        for name, tensor in tensors.items():
            for wants_checksum in (False, True):
                received = self.collect(self.receive(name, 0, wants_checksum), wants_checksum)
                self.assertEqual(received, (0, tensor), name)

    def test_every_type_and_shape(self):
        tensors, source = {}, random.Random(1)
        for shape in ((), (0, 4), (8,), (3, 8, 5), (1,) * 15 + (24,), (16, 8, 1000)):
            for dtype, bits in BITS.items():
                count = 1
                for dim in shape:
                    count *= dim
                if count * bits % 8 == 0:
                    tensors[f"{dtype} {shape}"] = (dtype, shape, source.randbytes(count * bits // 8))
        self.start(tensors, limits={"chunk": "64KiB"})
        for name, tensor in read_safetensors(self.folder / "model.safetensors").items():
            for wants_checksum in (False, True):
                step, received = self.collect(self.receive(name, 0, wants_checksum), wants_checksum)
                self.assertEqual((step, received), (0, tensor), name)
        self.assertEqual(self.counter("tensors_sent"), 2 * len(tensors))

    def test_pieces_fit_a_client_with_default_limits(self):
        """gRPC's clients accept messages of at most 4 MiB by default, so pieces are small enough whatever the worker's
        chunk is."""
        data = random.Random(2).randbytes(9 << 20)
        self.start({"a": ("U8", (len(data),), data)}, limits={"chunk": "16MiB"})
        self.assertEqual(self.collect(self.receive("a", 0, True), True)[1][2], data)

    def test_a_tensor_that_does_not_come(self):
        self.start()
        with self.refused(Code.DEADLINE_EXCEEDED):
            next(self.receive(ABSENT, timeout=0.2))
        waiting = [self.receive(ABSENT, step) for step in range(5)]
        self.await_waiting(5)
        for call in waiting:
            call.cancel()
        self.await_waiting(0)

    def test_more_waiting_than_allowed(self):
        self.start(limits={"waiting": 1})
        first = self.receive(ABSENT)
        self.await_waiting(1)
        with self.refused(Code.RESOURCE_EXHAUSTED, f"{ABSENT}"):
            next(self.receive(ABSENT, 1))
        first.cancel()
        self.await_waiting(0)

    def test_waiting_when_the_worker_stops(self):
        self.start()
        call = self.receive(ABSENT)
        self.await_waiting(1)
        self.drain()
        with self.refused(Code.UNAVAILABLE, "/job:ps/task:0 is shutting down"):
            next(call)

    def test_a_step_or_a_later_one(self):
        self.start()
        self.publish("w", b"five", 5)
        for step in (0, 5):
            self.assertEqual(self.collect(self.receive("w", step)), (5, ("U8", (4,), b"five")))
        calls = {step: self.receive("w", step) for step in (6, 7, 8)}
        self.await_waiting(3)
        self.publish("w", b"seven", 7)
        for step in (6, 7):
            self.assertEqual(self.collect(calls[step]), (7, ("U8", (5,), b"seven")))
        self.await_waiting(1)
        self.publish("w", b"last", 2**64 - 1)
        self.assertEqual(self.collect(calls[8]), (2**64 - 1, ("U8", (4,), b"last")))

    def test_keys_that_cannot_be(self):
        self.start({"k" * 512: ("U8", (1,), b"x")})
        for key, pattern in (("", "key is missing"), ("k" * 513, "key of 513 bytes")):
            with self.refused(Code.INVALID_ARGUMENT, pattern):
                next(self.receive(key))
        self.assertEqual(self.collect(self.receive("k" * 512))[1][2], b"x")

    def test_clients_that_leave_in_the_middle(self):
        size = 64 << 20
        write_safetensors(self.folder / "big", {"big": ("U8", (size,), b"")}, {"big": size})
        self.start(publish=["big"])
        for _ in range(5):
            call = self.receive("big")
            self.assertEqual(len(next(call).data), 2 << 20)
            call.cancel()
        self.assertEqual(self.collect(self.receive("big", 0, True), True)[1], ("U8", (size,), bytes(size)))
        self.assertEqual(self.counter("tensors_sent"), 1)


class Publish(ForeignCase):
    def assert_published(self, *keys):
        self.assertEqual([entry.key for entry in self.list()[0]], list(keys))

    def test_and_pull(self):
        self.start()
        tensors = some_tensors()
        publications = [self.publish(name, data, 3, dtype, shape, 1000)
                        for name, (dtype, shape, data) in tensors.items()]
        self.assertEqual(len(set(publications) - {0}), len(tensors))
        self.assertEqual({entry.key: entry.publication for entry in self.list()[0]}, dict(zip(tensors, publications)))
        self.assertEqual({entry.step for entry in self.list()[0]}, {3})
        out = self.folder / "out.safetensors"
        self.assert_run(0, "pull", "--address", self.served.address(), "-o", out)
        self.assertEqual(read_safetensors(out), tensors)

    def test_a_later_step_stays_by_default(self):
        self.start()
        self.publish("w", b"new", 3)
        self.publish("w", b"new", 3)
        first = transfer_pb2.PublishRequest(key="w", step=2, meta_data=meta_data("U8", (3,), b"old"), data=b"old")
        with self.assertRaises(grpc.RpcError) as refused:
            self.send_publish([first])
        self.assertEqual(refused.exception.code(), grpc.StatusCode.FAILED_PRECONDITION)
        self.assertEqual([entry.step for entry in self.list()[0]], [3])
        first.may_go_back = True
        self.send_publish([first])
        self.assertEqual([entry.step for entry in self.list()[0]], [2])

    def test_in_one_message_with_checksum(self):
        if XXH3 is None:
            self.skipTest("libxxhash.so.0 is not there")
        self.start()
        data = random.Random(3).randbytes(100000)
        message = transfer_pb2.PublishRequest(key="a", step=1, meta_data=meta_data("BF16", (50000,), data),
                                              has_checksum=True, checksum=checksum(data), data=data)
        self.send_publish([message])
        self.assertEqual(self.collect(self.receive("a", 1, True), True), (1, ("BF16", (50000,), data)))
        message.checksum ^= 1
        message.step = 2
        with self.refused(Code.DATA_LOSS, "^a: .*checksum"):
            self.send_publish([message])
        self.assertEqual(self.collect(self.receive("a"))[0], 1)

    def test_what_does_not_fit(self):
        self.start()
        for code, pattern, shape, wrong in (
                (Code.DATA_LOSS, "9 bytes were announced, but only 8", [9], {"size_bytes": 9}),
                (Code.INVALID_ARGUMENT, "7 bytes were announced, and at least 8", [7], {"size_bytes": 7}),
                (Code.INVALID_ARGUMENT, "8 bytes, not 9", [8], {"size_bytes": 9}),
                (Code.INVALID_ARGUMENT, "F32.*32 bytes, not 8", [8], {"dtype": transfer_pb2.F32}),
                (Code.INVALID_ARGUMENT, "dtype", [8], {"dtype": 0}),
                (Code.INVALID_ARGUMENT, "dtype", [8], {"dtype": 27}),
                (Code.INVALID_ARGUMENT, "17 dimensions", [1] * 17, {}),
                (Code.OUT_OF_RANGE, "2\\^63", [2**62, 4], {"size_bytes": 2**64 - 1}),
                (Code.INVALID_ARGUMENT, "a dead tensor", [8], {"is_dead": True})):
            with self.subTest(pattern), self.refused(code, f"^a: .*{pattern}"):
                self.publish("a", b"12345678", shape=shape, wrong=wrong)
        self.assert_published()
        self.assertEqual(self.counter("held_bytes"), 0)

    def test_annotations(self):
        """A message lists the annotations of one file once, however many tensors refer to them."""
        self.start()
        first = transfer_pb2.PublishRequest(meta_data=meta_data("U8", (1,), b"x"), data=b"x")
        for i in range(20):
            first.key = f"{i:02}"
            first.annotations.items.clear()
            if i > 0:
                first.annotations.items.update({"format": "pt", "i": str(i % 2) * (30000 if i < 10 else 1)})
            self.send_publish([first])
        messages = list(self.transfer.List(transfer_pb2.ListRequest(), timeout=PATIENCE))
        listed = {entry.key: dict(message.annotations[entry.annotations - 1].items) if entry.annotations else {}
                  for message in messages for entry in message.entries}
        self.assertEqual(listed.pop("00"), {})
        for key, items in listed.items():
            self.assertEqual(items, {"format": "pt", "i": str(int(key) % 2) * (30000 if int(key) < 10 else 1)})
        self.assertLess(max(message.ByteSize() for message in messages), 256 << 10)
        self.assertGreater(len(messages), 1)
        for key in ("x", "y"):
            first.key = key
            self.send_publish([first])
        message, = self.transfer.List(transfer_pb2.ListRequest(pattern="[xy]"), timeout=PATIENCE)
        self.assertEqual([entry.annotations for entry in message.entries], [1, 1])
        self.assertEqual(len(message.annotations), 1)

    def test_annotations_that_cannot_be(self):
        self.start()
        first = transfer_pb2.PublishRequest(key="a", meta_data=meta_data("U8", (1,), b"x"), data=b"x")
        for pattern, items in (("annotations .* of 65537 bytes; at most 65536", {"k": "v" * 65536}),
                               ("1025 annotations .*at most 1024", {str(i): "" for i in range(1025)})):
            first.annotations.items.clear()
            first.annotations.items.update(items)
            with self.subTest(pattern), self.refused(Code.INVALID_ARGUMENT, f"^a: {pattern}"):
                self.send_publish([first])
        self.assert_published()
        self.assertEqual(self.counter("held_bytes"), 0)

    def test_messages_that_do_not_fit(self):
        self.start()
        first = transfer_pb2.PublishRequest(key="a", meta_data=meta_data("U8", (2,), b"xy"), data=b"x")
        for pattern, messages in (("no message", []), ("key is missing", [transfer_pb2.PublishRequest(data=b"x")]),
                                  ("meta-data of the tensor is missing", [transfer_pb2.PublishRequest(key="a")]),
                                  ("first message only", [first, first])):
            with self.subTest(pattern), self.refused(Code.INVALID_ARGUMENT, pattern):
                self.send_publish(messages)
        self.assert_published()

    def test_more_than_may_be_held(self):
        self.start(limits={"held": "1MiB"})
        self.publish("a", bytes(700000))
        with self.refused(Code.RESOURCE_EXHAUSTED, "limits.held"):
            self.publish("b", bytes(700000))
        self.assertEqual(self.withdraw("a"), 1)
        self.publish("b", bytes(700000))
        self.assert_published("b")

    def test_a_client_that_leaves_in_the_middle(self):
        self.start(limits={"held": "1MiB"})
        arrived, left = threading.Event(), threading.Event()

        def messages():
            yield transfer_pb2.PublishRequest(key="a", meta_data=meta_data("U8", (785000,), bytes(785000)), data=b"x")
            arrived.set()
            left.wait(PATIENCE)
        call = self.transfer.Publish.future(messages(), timeout=PATIENCE)
        self.assertTrue(arrived.wait(PATIENCE))
        wait_until(lambda: self.counter("bytes_received") == 1, "the first byte is there")
        with self.refused(Code.RESOURCE_EXHAUSTED):
            self.publish("b", b"y")
        call.cancel()
        left.set()

        def is_free():
            with contextlib.suppress(grpc.RpcError):
                return self.publish("b", b"y")
        wait_until(is_free, "what was admitted is free again")
        self.assert_published("b")

    def test_replaced_or_withdrawn_while_it_is_received(self):
        self.start()
        size = 48 << 20
        for step, change in ((1, lambda: self.publish("w", b"b" * size, 2)), (2, lambda: self.withdraw("*"))):
            self.publish("w", b"a" * size, step)
            sent = self.counter("tensors_sent")
            call = self.receive("w", 0, True)
            first = next(call)
            change()
            self.assertEqual(self.counter("tensors_sent"), sent)
            self.assertEqual(self.collect([first, *call], True), (step, ("U8", (size,), b"a" * size)))
        self.assert_published()

    def test_never_mixed(self):
        self.start(limits={"chunk": "4KiB"})
        size, last = 1 << 16, 100
        self.publish("w", bytes(size))

        def receive():
            """Receives until the last version has come; returns the steps that it saw."""
            steps = [0]
            while steps[-1] != last:
                step, (_, _, data) = self.collect(self.receive("w", 0, True), True)
                self.assertEqual(data.count(step), size, f"step {step} has bytes of others")
                steps.append(step)
            return steps
        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            readers = [threads.submit(receive) for _ in range(3)]
            for step in range(1, last + 1):
                self.publish("w", bytes([step]) * size, step)
        for reader in readers:
            self.assertEqual(reader.result(), sorted(reader.result()))

    def test_withdraw(self):
        self.start({name: ("U8", (), b"x") for name in ("a/1", "a/2", "a/b/3", "b", "[c]")})
        for pattern, count, left in (("x*", 0, 5), ("a/?", 2, 3), ("[[]c]", 1, 2), ("b", 1, 1), ("b", 0, 1),
                                     ("*", 1, 0)):
            self.assertEqual(self.withdraw(pattern), count, pattern)
            self.assertEqual(len(self.list()[0]), left, pattern)
        with self.refused(Code.INVALID_ARGUMENT, "pattern is missing"):
            self.withdraw("")
        with self.refused(Code.DEADLINE_EXCEEDED):
            next(self.receive("b", timeout=0.1))


class Calls(ForeignCase):
    """Errors that a well-meant client may make."""

    def test_compressed(self):
        self.start({"a": ("U8", (1,), b"x")})
        plain = self.identity
        for algorithm in (grpc.Compression.Gzip, grpc.Compression.Deflate):
            self.connect(compression=algorithm)
            for call in (lambda: self.publish("b", bytes(1 << 20)), self.identify, lambda: self.check(""),
                         lambda: next(self.receive("a")), self.list, lambda: self.withdraw("*"),
                         lambda: ForeignWorker(self.connect(compression=algorithm), 7).open()):
                with self.refused(Code.UNIMPLEMENTED, "ompress"):
                    call()
        self.identity = plain
        self.assertEqual(self.counter("published_tensors"), 1)

    def test_methods_that_are_not_there(self):
        self.start()
        for method in ("/tensorlane.v1.Transfer/Steal", "/tensorlane.v2.Transfer/List", "/grpc.health.v1.Health/check"):
            with self.refused(Code.UNIMPLEMENTED, "no such method"):
                self.channel.unary_unary(method)(b"", timeout=PATIENCE)
        self.identify()

    def test_messages_that_are_none(self):
        self.start()
        methods = ("Cluster/Identify", "Transfer/List", "Transfer/Receive", "Transfer/Withdraw", "Transfer/Publish",
                   "Transfer/Exchange")
        for method in methods:
            for message in (b"\xff" * 20, b"\x0a\x05a", b"x" * 100000):
                with self.subTest(method, message=message[:20]), self.refused(Code.INVALID_ARGUMENT):
                    self.channel.stream_unary("/tensorlane.v1." + method)(iter([message]), timeout=PATIENCE)
            if method != "Transfer/Exchange":
                with self.subTest(method), self.refused(Code.INVALID_ARGUMENT, "sent no message"):
                    self.channel.stream_unary("/tensorlane.v1." + method)(iter([]), timeout=PATIENCE)
        with self.refused(Code.INVALID_ARGUMENT, "a second message"):
            self.channel.stream_unary("/tensorlane.v1.Cluster/Identify")(iter([b"", b""]), timeout=PATIENCE)
        with self.refused(Code.RESOURCE_EXHAUSTED):
            self.channel.unary_unary("/tensorlane.v1.Cluster/Identify")(bytes(64 << 20), timeout=PATIENCE)
        self.identify()


if __name__ == "__main__":
    cli_support.main()
