#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Clients that talk nonsense, stall, die or come in thousands: the worker goes on serving others, and frees what such
clients used."""
import contextlib
import itertools
import os
import random
import resource
import select
import signal
import socket
import struct
import threading
import time

import cli_support
from cli_support import HEALTH, PATIENCE, Gate, read_safetensors, some_tensors, wait_until, write_safetensors

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
ACKNOWLEDGED, END_STREAM, END_HEADERS = 1, 1, 4
IDLE_CONNECTIONS = 10000


def frame(kind, flags=0, stream=0, payload=b"", length=None):
    """Builds a frame of HTTP/2. The argument length is for a frame that claims a wrong length."""
    size = len(payload) if length is None else length
    return struct.pack(">BHBBI", size >> 16, size & 0xffff, kind, flags, stream) + payload


HELLO = PREFACE + frame(SETTINGS) + frame(SETTINGS, ACKNOWLEDGED)


def literal(name, value):
    """Builds a header field of HPACK, without tables and without Huffman's code."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call(stream, method, flags=END_HEADERS):
    fields = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", method), (b":authority", b"x"),
              (b"content-type", b"application/grpc"), (b"te", b"trailers"))
    return frame(HEADERS, flags, stream, b"".join(literal(*field) for field in fields))


EXCHANGE = call(1, b"/tensorlane.v1.Transfer/Exchange")
# What a client sends before it stays silent, by the name of the case.
NONSENSE = {
    "nothing": b"",
    "another protocol": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "SSH": b"SSH-2.0-OpenSSH_9.2\r\n",
    "a beginning": PREFACE[:9],
    "no settings": PREFACE,
    "settings of no whole number": PREFACE + frame(SETTINGS, payload=b"12345"),
    "settings that are cut": PREFACE + frame(SETTINGS, payload=b"123", length=60),
    "an unknown frame": HELLO + frame(0xee, 0xff, 7, b"x" * 100),
    "a frame that is too long": HELLO + frame(DATA, stream=1, payload=b"x", length=(1 << 24) - 1),
    "data of no call": HELLO + frame(DATA, stream=1, payload=b"x" * 100),
    "headers that are none": HELLO + frame(HEADERS, END_HEADERS, 1, b"\xff" * 200),
    "headers that never end": HELLO + frame(HEADERS, 0, 1, literal(b"a", b"b")) + frame(CONTINUATION, 0, 1) * 5000,
    "more of no headers": HELLO + frame(CONTINUATION, END_HEADERS, 1, literal(b"a", b"b")),
    "headers that are too long": HELLO + frame(HEADERS, END_HEADERS, 1, literal(b"a", b"b" * 127) * 2000),
    "a call of the wrong side": HELLO + call(2, b"/tensorlane.v1.Transfer/Exchange"),
    "a push": HELLO + frame(PUSH_PROMISE, END_HEADERS, 1, b"\0\0\0\2" + literal(b"a", b"b")),
    "a window of nothing": HELLO + EXCHANGE + frame(WINDOW_UPDATE, stream=1, payload=bytes(4)),
    "a window that overflows": HELLO + frame(WINDOW_UPDATE, payload=b"\x7f\xff\xff\xff") * 2,
    "pings": HELLO + frame(PING, payload=bytes(8)) * 5000,
    "its end": HELLO + frame(GOAWAY, payload=bytes(8)),
    "a call and nothing else": HELLO + EXCHANGE,
    "a call of no method": HELLO + call(1, b""),
    "a message that is cut": HELLO + EXCHANGE + frame(DATA, stream=1, payload=struct.pack(">BI", 0, 1000) + b"x"),
    "a message that is too long": HELLO + EXCHANGE + frame(DATA, stream=1, payload=struct.pack(">BI", 0, 2**32 - 1)),
    "a compressed message": HELLO + EXCHANGE + frame(DATA, stream=1, payload=struct.pack(">BI", 1, 3) + b"abc"),
    "a message that is none": HELLO + EXCHANGE + frame(DATA, stream=1, payload=struct.pack(">BI", 0, 3) + b"\xff" * 3),
    "calls that are cancelled": HELLO + b"".join(
        call(n, b"/tensorlane.v1.Transfer/Exchange") + frame(RST_STREAM, stream=n, payload=struct.pack(">I", 8))
        for n in range(1, 2001, 2)),
    "calls that are left": HELLO + b"".join(
        call(n, b"/tensorlane.v1.Transfer/Receive") + call(n + 2, b"/grpc.health.v1.Health/Watch")
        for n in range(1, 1001, 4)),
}


class ClientCase(cli_support.Case):
    def setUp(self):
        super().setUp()
        self.clients = []
        self.addCleanup(self.hang_up)

    def serve(self, extra=None, **options):
        """Starts a worker that publishes a few tensors."""
        self.tensors = some_tensors()
        self.start(write_safetensors(self.folder / "model.safetensors", self.tensors), extra, **options)

    def serve_big(self):
        """Starts a worker that publishes a tensor large enough to be interrupted."""
        size = 1 << 27
        self.tensors = {"zeros": ("U8", (size,), bytes(size))}
        self.start(write_safetensors(self.folder / "model.safetensors", self.tensors, {"zeros": size}))

    def start(self, model, extra=None, **options):
        self.served = self.cluster(ps=1, extra={**cli_support.OVER_GRPC, **(extra or {})})
        self.worker = self.served.start("ps", 0, "--publish", model, **options)
        self.idle_descriptors = self.descriptors()

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.worker.pid}/fd"))

    def connect(self, says=b""):
        client = socket.create_connection(("127.0.0.1", self.served.port()), timeout=PATIENCE)
        self.clients.append(client)
        with contextlib.suppress(ConnectionError):  # The worker may hang up before it has read everything.
            client.sendall(says)
        return client

    def hang_up(self):
        for client in self.clients:
            client.close()
        self.clients.clear()

    def await_end(self, client):
        """Waits until the worker hangs up."""
        with contextlib.suppress(ConnectionError):
            while client.recv(65536):
                pass

    def assert_is_healthy(self):
        self.assert_run(0, *HEALTH, self.served.address())

    def is_healthy_or_full(self):
        """Returns whether health answers. gRPC refuses connections while its memory for messages is used up, until
        timeouts.stalled ends that; nothing else may be wrong."""
        result = cli_support.run(*HEALTH, self.served.address())
        if result.returncode != 0:
            self.assertIn("is its memory for messages used up", result.stderr)
        return result.returncode == 0

    def assert_serves(self):
        self.assert_is_healthy()
        self.assert_run(0, "pull", "--address", self.served.address(), "-o", self.folder / "out.safetensors")
        self.assertEqual(read_safetensors(self.folder / "out.safetensors"), self.tensors)

    def assert_all_is_given_back(self):
        """The worker frees everything once the clients are gone."""
        self.hang_up()
        wait_until(lambda: self.descriptors() <= self.idle_descriptors, "the worker's connections are closed")
        self.assertEqual(self.worker.stop(), 0)


class RequestGate(Gate):
    """A gate that holds what goes to the worker instead of what comes from it."""

    def _pump(self, source, sink, is_counted):
        super()._pump(source, sink, not is_counted)


class Nonsense(ClientCase):
    def test_each_and_then_a_client(self):
        self.serve()
        for what, says in NONSENSE.items():
            with self.subTest(what):
                self.connect(says)
                self.assert_is_healthy()
        self.assert_serves()
        self.assert_all_is_given_back()

    def test_random_bytes(self):
        self.serve()
        source = random.Random(7)
        for n in range(300):
            start = (b"", PREFACE, HELLO, HELLO + EXCHANGE)[n % 4]
            self.connect(start + source.randbytes(source.randrange(3000)))
        self.assert_serves()
        self.assert_all_is_given_back()

    def test_while_a_pull_runs(self):
        self.serve_big()
        gate = Gate(self, self.served.port(), 1 << 24)
        puller = self.spawn("pull", "--address", gate.address, "-o", self.folder / "out.safetensors")
        gate.await_held()
        for says in NONSENSE.values():
            self.connect(says)
        self.assert_is_healthy()
        gate.open()
        self.assertEqual(puller.wait(), 0, puller.output)
        self.assertEqual(read_safetensors(self.folder / "out.safetensors"), self.tensors)


class Windows:
    """How many bytes a client may send, as the worker has said in its window updates."""

    def __init__(self, streams):
        self.of_connection = self.first = 65535
        self.of_streams = dict.fromkeys(streams, self.first)
        self.received = b""

    def hear(self, client):
        """Reads what is there, and answers it. Returns False when the worker has hung up."""
        while select.select([client], [], [], 0.01)[0]:
            piece = client.recv(65536)
            if not piece:
                return False
            self.received += piece
        while len(self.received) >= 9:
            size = int.from_bytes(self.received[:3], "big")
            if len(self.received) < 9 + size:
                break
            kind, flags, stream = struct.unpack(">BBI", self.received[3:9])
            payload, self.received = self.received[9:9 + size], self.received[9 + size:]
            self._hear_frame(client, kind, flags, stream, payload)
        return True

    def _hear_frame(self, client, kind, flags, stream, payload):
        if kind == WINDOW_UPDATE and stream == 0:
            self.of_connection += int.from_bytes(payload, "big")
        elif kind == WINDOW_UPDATE and stream in self.of_streams:
            self.of_streams[stream] += int.from_bytes(payload, "big")
        elif kind == RST_STREAM:
            self.of_streams.pop(stream, None)
        elif kind == PING and not flags & ACKNOWLEDGED:
            client.sendall(frame(PING, ACKNOWLEDGED, payload=payload))
        elif kind == SETTINGS and not flags & ACKNOWLEDGED:
            for key, value in struct.iter_unpack(">HI", payload):
                if key == 4:  # This setting is the first window of each stream.
                    self.of_streams = {n: left + value - self.first for n, left in self.of_streams.items()}
                    self.first = value
            client.sendall(frame(SETTINGS, ACKNOWLEDGED))

    def take(self, stream, most):
        count = min(most, self.of_connection, self.of_streams.get(stream, 0))
        if count <= 0:
            return 0
        self.of_connection -= count
        self.of_streams[stream] -= count
        return count


class Floods(ClientCase):
    """Clients that send more than a worker can parse or hold. The memory of the worker is measured only without
    sanitizers, because their allocators keep freed memory for a while."""
    FLOOD_SEC = 60

    def send_all(self, client, blocks):
        """Sends the blocks, for FLOOD_SEC at most. Returns True when the worker hangs up."""
        end = time.monotonic() + self.FLOOD_SEC
        try:
            for block in blocks:
                client.sendall(block)
                if time.monotonic() > end:
                    return False
        except ConnectionError:
            return True
        return False

    def status(self, name):
        """Returns a line of /proc/PID/status, the worker's memory in MiB."""
        with open(f"/proc/{self.worker.pid}/status", encoding="ascii") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) >> 10

    def assert_holds(self, most_mib):
        """The worker held a bounded amount of memory, and has freed it."""
        if cli_support.SANITIZE:
            return
        self.assertLess(self.status("VmHWM"), most_mib)
        wait_until(lambda: self.status("VmRSS") < 256, "the memory is given back")

    def test_window_updates(self):
        """gRPC's estimate of the bytes to read next must not overflow."""
        self.serve()
        update = frame(WINDOW_UPDATE, stream=3, payload=struct.pack(">I", 1)) * 80000
        client = self.connect(HELLO)
        flood = threading.Thread(target=self.send_all, args=(client, itertools.repeat(update, 2500)))
        flood.start()
        while flood.is_alive():  # The health checks leave the worker less time to read than the flood has to send.
            cli_support.run("health", self.served.address(), "-connect-timeout", "1s", "-rpc-timeout", "1s")
        flood.join()
        self.assert_serves()
        self.assert_all_is_given_back()

    def test_calls_that_are_cancelled_at_once(self):
        """Others are served, and little memory is held. Whether the worker hangs up depends on which side is faster."""
        self.serve()
        end = 100000 if cli_support.SANITIZE else 600000

        def cancelled(stream):
            reset = frame(RST_STREAM, stream=stream, payload=struct.pack(">I", 8))
            return call(stream, b"/tensorlane.v1.Transfer/Exchange") + reset
        blocks = (b"".join(cancelled(stream) for stream in range(first, first + 2000, 2))
                  for first in range(1, end, 2000))
        flood = threading.Thread(target=self.send_all, args=(self.connect(HELLO), blocks))
        flood.start()
        while flood.is_alive():
            self.assert_is_healthy()
        flood.join()
        self.assert_serves()
        self.assert_holds(1536)
        self.assert_all_is_given_back()

    def test_headers_that_stay_unfinished(self):
        self.serve({"timeouts": {"stalled": "1s"}})
        name_and_length = b"\0\1a" + b"\x7f\x81\xaf\xa6\x96\x0b"  # The length says that a value of 3 GB follows.
        client = self.connect(HELLO + frame(HEADERS, 0, 1, name_and_length))
        byte = frame(CONTINUATION, 0, 1, b"x")
        # More than the worker lets pass without a message. It comes frame by frame, because the guard ends a connection
        # sooner that keeps the worker busy for long, as several copies of all headers do with sanitizers. When the
        # worker answers a client that came after a frame, it has dealt with the frame.
        for _ in range(80):
            self.send_all(client, [frame(CONTINUATION, 0, 1, bytes(1 << 14))])
            self.assertTrue(self.connect(HELLO).recv(1))

        def drip():
            time.sleep(0.05)
            with contextlib.suppress(ConnectionError):
                client.sendall(byte)
                return False
            return True
        wait_until(drip, "the worker hangs up")
        self.assertRegex(self.worker.await_line("connection ended"), "timeouts.stalled")
        self.assert_serves()
        self.assert_all_is_given_back()

    def test_messages_that_stay_unfinished(self):
        self.serve({"timeouts": {"stalled": "2s"}})
        size = 1 << 24
        left = dict.fromkeys(range(1, 201, 2), size + 4)
        calls = b"".join(call(stream, b"/tensorlane.v1.Transfer/Publish") for stream in left)
        client = self.connect(PREFACE + frame(SETTINGS) + calls)  # The worker's settings are acknowledged as they come.
        windows = Windows(left)
        end = time.monotonic() + PATIENCE
        with contextlib.suppress(ConnectionError):
            while windows.hear(client) and time.monotonic() < end:
                for stream in left:
                    while count := windows.take(stream, min(left[stream], 1 << 14)):
                        start = struct.pack(">BI", 0, size) if left[stream] == size + 4 else b""
                        left[stream] -= count
                        client.sendall(frame(DATA, 0, stream, (start + bytes(count))[:count]))
                wait_until(self.is_healthy_or_full, "health answers")
        self.assertRegex(self.worker.await_line("connection ended"), "unfinished")
        self.assert_serves()
        self.assert_holds(1300)
        self.assert_all_is_given_back()


class Silent(ClientCase):
    PROBED = {"timeouts": {"keepalive": "200ms", "keepalive_answer": "3s", "connect": "60s"}}

    def test_clients_that_do_not_introduce_themselves(self):
        self.serve(self.PROBED)
        for client in [self.connect(says) for says in (b"", PREFACE[:9], PREFACE, PREFACE + frame(SETTINGS, length=6))]:
            self.await_end(client)
        self.assert_serves()
        self.assert_all_is_given_back()

    def test_a_link_without_a_handshake(self):
        self.serve({"timeouts": {"connect": "500ms"}})
        client = self.connect(HELLO + EXCHANGE)
        received = b""
        while b"connect time-out" not in received:  # This is the message of the status, which gRPC sends as it is.
            piece = client.recv(65536)
            self.assertTrue(piece, received)
            received += piece
        self.assert_serves()

    def test_clients_whose_machine_is_gone(self):
        """Such clients do not answer the probes of the connection, whether they have calls or not."""
        self.serve(self.PROBED)
        for client in [self.connect(says) for says in (HELLO, HELLO + call(1, b"/grpc.health.v1.Health/Watch"))]:
            self.await_end(client)
        self.assert_serves()
        self.assert_all_is_given_back()


class Dead(ClientCase):
    def start_pull(self, name):
        """Starts a pull that the gate holds in the middle."""
        gate = Gate(self, self.served.port(), 1 << 24)
        puller = self.spawn("pull", "--address", gate.address, "-o", self.folder / name)
        gate.await_held()
        return gate, puller

    def test_one_of_two(self):
        self.serve_big()
        (_, first), (gate, second) = self.start_pull("first.safetensors"), self.start_pull("second.safetensors")
        first.send(signal.SIGKILL)
        self.assertEqual(first.wait(), -signal.SIGKILL)
        self.assert_is_healthy()
        gate.open()
        self.assertEqual(second.wait(), 0, second.output)
        self.assertEqual(read_safetensors(self.folder / "second.safetensors"), self.tensors)
        self.assertFalse((self.folder / "first.safetensors").exists())
        self.assert_serves()

    def test_all(self):
        self.serve_big()
        pulls = [self.start_pull(f"{n}.safetensors") for n in range(5)]
        for _, puller in pulls:
            puller.send(signal.SIGKILL)
        for gate, puller in pulls:
            puller.wait()
            gate.open()
        self.assert_serves()
        self.assert_all_is_given_back()

    def test_a_stalled_one_does_not_hold_up_others(self):
        self.serve_big()
        gate, stalled = self.start_pull("stalled.safetensors")
        self.assert_serves()
        self.assertIsNone(stalled.process.poll())
        gate.open()
        self.assertEqual(stalled.wait(), 0, stalled.output)

    def test_a_push_that_breaks_off(self):
        """The worker neither publishes nor keeps the part that came: its memory suffices for one such tensor only."""
        self.serve({"limits": {"held": "200MiB"}})
        size = 1 << 27
        zeros = write_safetensors(self.folder / "big.safetensors", {"zeros": ("U8", (size,), b"")}, {"zeros": size})
        gate = RequestGate(self, self.served.port(), size // 2)
        pusher = self.spawn("push", zeros, "--address", gate.address)
        gate.await_held()
        self.assert_error(1, "cannot take zeros", "push", zeros, "--address", self.served.address())
        pusher.send(signal.SIGKILL)
        pusher.wait()
        gate.open()
        self.assert_serves()
        wait_until(lambda: cli_support.run("push", zeros, "--address", self.served.address()).returncode == 0,
                   "there is room again")


class Thousands(ClientCase):
    def test_idle_connections(self):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if hard != resource.RLIM_INFINITY and hard < IDLE_CONNECTIONS + 200:
            self.skipTest(f"{IDLE_CONNECTIONS + 200} open files are needed and {hard} allowed (ulimit -Hn)")
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.serve()
        for n in range(IDLE_CONNECTIONS):
            self.connect(HELLO if n % 4 else b"")
        # gRPC closes each connection some 15 s after it was accepted; a slow machine has not accepted the last one by
        # then.
        wait_until(lambda: self.descriptors() >= IDLE_CONNECTIONS // 4, "the worker has thousands of connections")
        self.assert_serves()
        self.hang_up()
        self.assert_serves()
        self.assert_all_is_given_back()

    def test_more_than_the_limit_of_open_files(self):
        """Without free descriptors the worker serves no new client; as soon as it has some again, it serves all of
        them."""
        self.serve(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)))
        for _ in range(300):
            self.connect(HELLO)
        wait_until(lambda: self.descriptors() >= 120, "the worker has no descriptors left")
        self.hang_up()
        wait_until(lambda: cli_support.run("health", self.served.address()).returncode == 0, "a healthy worker")
        self.assert_serves()
        self.assert_all_is_given_back()


if __name__ == "__main__":
    cli_support.main()
