#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Limits are divided among clients: a client that takes all it can stops neither another client nor the health
check."""
import threading
import time

import cli_support
from cli_support import PATIENCE, Gate, wait_until
from foreign_support import ABSENT, Code, ForeignCase, meta_data

from grpc_health.v1 import health_pb2
from tensorlane.v1 import transfer_pb2


class SharesCase(ForeignCase):
    def from_another_address(self):
        """Makes further calls of this case come from 127.0.0.2."""
        gate = Gate(self, self.served.port(), 1 << 62, source="127.0.0.2")
        self.connect(gate.address)

    def count_waiting(self, calls):
        """Opens calls that wait for tensors that never come. Returns how many are not refused, and the calls."""
        refused = []

        def note(call):
            if call.code() == Code.RESOURCE_EXHAUSTED:
                refused.append(call)
        before = self.counter("waiting_receivers")
        waiting = [self.receive(ABSENT, step) for step in range(calls)]
        for call in waiting:
            call.add_done_callback(lambda call=call: note(call))
        wait_until(lambda: self.counter("waiting_receivers") - before + len(refused) == calls, "all calls are decided")
        return calls - len(refused), waiting


class Waiting(SharesCase):
    def test_one_client_leaves_room_for_another(self):
        self.start(limits={"waiting": 8})
        self.assertEqual(self.count_waiting(20)[0], 6)
        self.from_another_address()
        self.assertEqual(self.count_waiting(20)[0], 4)


class Connections(SharesCase):
    def test_one_client_leaves_room_for_another_and_for_health(self):
        self.start(limits={"connections": 8})
        waiting = [self.receive(ABSENT, step) for step in range(20)]
        first = self.transfer
        wait_until(lambda: [call.code() for call in waiting if not call.is_active()] == 14 * [Code.RESOURCE_EXHAUSTED],
                   "the calls beyond three quarters are refused")
        with self.refused(Code.RESOURCE_EXHAUSTED, "limits.connections"):
            list(first.List(transfer_pb2.ListRequest()))
        self.assertEqual(self.check(""), health_pb2.HealthCheckResponse.SERVING)
        watch = self.health.Watch(health_pb2.HealthCheckRequest(service=""))
        self.assertEqual(next(watch).status, health_pb2.HealthCheckResponse.SERVING)
        self.from_another_address()
        self.assertEqual(self.list(), ([], 0))
        self.assertEqual(self.count_waiting(3)[0], 3)
        for call in waiting:
            call.cancel()


class Pushes(SharesCase):
    def begin(self, key, size, source):
        """Begins a push whose pieces a function yields; returns its future."""
        def messages():
            yield transfer_pb2.PublishRequest(key=key, meta_data=meta_data("U8", (size,), range(size)))
            for piece in source():
                yield transfer_pb2.PublishRequest(data=piece)
        future = self.transfer.Publish.future(messages(), timeout=PATIENCE)
        self.addCleanup(future.cancel)
        return future

    def trickle(self):
        """Yields a byte at a time until the test ends."""
        is_over = threading.Event()
        self.addCleanup(is_over.set)
        while not is_over.wait(0.05):
            yield b"x"

    def test_one_client_leaves_room_for_another(self):
        self.start(limits={"held": "64MiB"})
        self.begin("slow", 40 << 20, self.trickle)
        wait_until(lambda: self.counter("bytes_received") > 0, "the push has begun")
        with self.refused(Code.RESOURCE_EXHAUSTED, "slow2.*limits.held"):
            self.begin("slow2", 10 << 20, list).result()
        self.from_another_address()
        self.publish("b", bytes(30 << 20))
        with self.refused(Code.RESOURCE_EXHAUSTED, "limits.held"):
            self.publish("c", bytes(30 << 20))

    def test_one_byte_at_a_time_ends(self):
        self.start(timeouts={"request": "1s"})
        slow = self.begin("slow", 1 << 30, self.trickle)
        with self.refused(Code.DEADLINE_EXCEEDED, "sends too slowly: after the first 1.00 s .* timeouts.request"):
            slow.result()

    def test_steadily_for_longer_than_the_time_of_a_request(self):
        self.start(timeouts={"request": "3s"})

        def steadily():
            for _ in range(12):
                time.sleep(0.3)
                yield bytes(1 << 18)
        self.assertNotEqual(self.begin("steady", 12 << 18, steadily).result().publication, 0)

    def test_empty_tensors_are_charged(self):
        self.start(limits={"held": "64KiB"})
        with self.refused(Code.RESOURCE_EXHAUSTED, "limits.held"):
            for i in range(1000):
                self.publish(f"empty{i}", b"")
        held = len(self.list()[0])
        self.assertIn(held, range(10, 64))
        self.assertEqual(self.withdraw("*"), held)
        self.publish("a", b"")


class Receives(SharesCase):
    """A client asks for each version of a tensor, and reads none of them."""

    def test_versions_that_were_replaced_are_not_kept(self):
        size = 4 << 20
        self.start(limits={"inflight": "1MiB", "chunk": "1MiB", "held": "64MiB"})
        unread = []
        for step in range(30):  # The worker may hold 12 of them in all.
            self.publish("v", bytes(size), step)
            unread.append(self.receive("v", step))
            self.addCleanup(unread[-1].cancel)
            wait_until(lambda: self.counter("waiting_receivers") == 0, "the call is answered")
        self.assertEqual(self.collect(unread[0])[0], 0)
        for call in unread[1:-1]:
            call.cancel()
        self.assertEqual(self.collect(unread[-1])[0], 29)


class Lists(SharesCase):
    """The worker has many tensors, with names for which matching a pattern takes long."""

    def setUp(self):
        super().setUp()
        self.names = ["a" * 470 + f"{i:06}" for i in range(20000)]
        self.start({name: ("U8", (0,), b"") for name in self.names})

    def test_a_costly_pattern_does_not_stop_the_worker(self):
        pattern = "*" + "a" * 240 + "b"
        costly = self.transfer.List(transfer_pb2.ListRequest(pattern=pattern), timeout=PATIENCE)
        withdrawal = self.transfer.Withdraw.future(transfer_pb2.WithdrawRequest(pattern=pattern), timeout=PATIENCE)
        self.addCleanup(costly.cancel)
        self.addCleanup(withdrawal.cancel)
        for _ in range(20):
            self.assertEqual(self.check("", PATIENCE / 3), health_pb2.HealthCheckResponse.SERVING)
        self.assertEqual([entry.key for entry in self.list("*01999?")[0]], self.names[19990:])
        self.assertEqual(list(costly), [])
        self.assertEqual(withdrawal.result().count, 0)
        self.assertEqual(self.counter("published_tensors"), len(self.names))

    def test_listings_that_are_not_read(self):
        unread = [self.transfer.List(transfer_pb2.ListRequest()) for _ in range(60)]
        for call in unread:
            self.addCleanup(call.cancel)
        wait_until(lambda: any(call.code() == Code.RESOURCE_EXHAUSTED for call in unread if not call.is_active()),
                   "one listing is refused")
        self.from_another_address()
        self.assertEqual([entry.key for entry in self.list()[0]], self.names)


if __name__ == "__main__":
    cli_support.main()
