#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Runs inside the guest with two devices and a wire between them, started by worker_test.py: what peers write, where,
and until when.

Nearly all workers are in this process, /job:worker/task:0 at 10.9.0.1 and the others at 10.9.0.2. So the tests can look
at what they post, and turn it into what a lying peer would post.
"""
import contextlib
import ctypes
import json
import random
import re
import subprocess
import sys
import unittest

import posts  # This import must come before workers.
import devices
import workers
from devices import GPU, HOST
from workers import OVER_VERBS, Tensor, Worker

PEER = "/job:ps/task:0"
LIAR = "/job:ps/task:1"
HERE = "/job:worker/task:0"
MIB = 1 << 20
# The sizes of cancelled transfers. The slow wire needs longer for the second one than a peer may take to answer a
# cancel.
LONG_BYTES = 6 * MIB
LONGER_BYTES = 16 * MIB
SLOW = "tbf rate 90mbit burst 64kb limit 4mb"
CANCELS = 2
TENSORS = 50
SIZES = (600001, 3 * MIB + 5)
LIE_BYTES = MIB
REFUSED = "a key that it may not use|the key was revoked, or never given"
KEPT = b"\x22" * LIE_BYTES
GUESSES = 3
# Members of a group, receives that wait, and what each may cost (docs/groups.md).
MEMBERS = 1000
WAITING, WAITING_KEYS = 5000, 20
WAITING_BYTES = 512
M_ARENA_MAX = -8  # of mallopt: what one arena has allocated is counted
# A handshake tries a read of so many bytes at most.
TRIED_BYTES = 4096


READS = {"jobs": {"worker": {"protocol": "grpc+gdr"}}}


def cluster(keys, **verbs):
    return {"cluster": {"ps": ["10.9.0.2:4000", "10.9.0.2:4002"], "worker": ["10.9.0.1:4001"]},
            "protocol": "grpc+verbs", "rdma": "require", "timeouts": {"drain": "1s", "connect": "60s"},
            "verbs": {"keys": keys, "piece": "128KiB", "peer_timeout": "10s", "pool": "64MiB", "timeout": 22} | verbs}


@contextlib.contextmanager
def slow_wire():
    for device in ("va", "vb"):
        workers.run("tc", "qdisc", "add", "dev", device, "root", *SLOW.split())
    try:
        yield
    finally:
        for device in ("va", "vb"):
            workers.run("tc", "qdisc", "del", "dev", device, "root")


def lost(log, peer):
    """Returns why the data connections to the peer were lost, according to the log."""
    return re.findall(rf'level=warn msg="no data connection" peer={peer}.* reason="([^"]+)"', log())


def pinned_bytes():
    with open("/proc/self/status", encoding="utf-8") as status:
        return int(re.search(r"^VmPin:\s+(\d+) kB$", status.read(), re.MULTILINE)[1]) * 1024


class Idle(unittest.TestCase):
    """A peer that has written nothing costs little pinned memory, whichever keys it has."""
    def test_pinned(self):
        for keys in ("window", "region"):
            with self.subTest(keys), Worker(cluster(keys), "worker") as here, Worker(cluster(keys), "ps") as there:
                before = pinned_bytes()
                there.publish("small", Tensor(b"8 bytes."), 1)
                here.ask(here.peer(PEER), "small", 1)
                got, = here.wait(1).values()
                self.assertEqual(("OK", "inline"), (got.status, got.path), got)
                of_both = pinned_bytes() - before
                self.assertGreater(of_both, 0)
                self.assertLessEqual(of_both, 2 * 2 * MIB)


class Stats(ctypes.Structure):
    _fields_ = [("size_bytes", ctypes.c_size_t)] + [(name, ctypes.c_uint64) for name in (
        "tensors_sent", "tensors_received", "bytes_sent", "bytes_received", "bytes_copied_send", "frames_sent",
        "frames_received", "requests_retried", "tensors_dropped", "waiting_receivers", "held_tensors", "held_bytes",
        "published_tensors", "published_bytes", "open_operations", "protocol_errors")]


def stats_of(worker):
    stats = Stats(size_bytes=ctypes.sizeof(Stats))
    workers.call("tl_worker_stats", worker.handle, ctypes.byref(stats))
    return stats


class Allocated(ctypes.Structure):
    """struct mallinfo2"""
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks",
                                                     "fsmblks", "uordblks", "fordblks", "keepcost")]


def allocated_bytes():
    find = ctypes.CDLL(None).mallinfo2
    find.restype = Allocated
    found = find()
    return found.uordblks + found.hblkhd


def own(config):
    """The process of the owner. For each number in its input, it says what it has allocated when so many receives wait
    for its values."""
    with Worker(json.loads(config), "ps") as there:
        for number in range(MEMBERS):
            there.publish(f"small/{number}", Tensor(b"%08d" % number), 1)
        print("ready", flush=True)
        for line in sys.stdin:
            workers.wait_until(lambda: stats_of(there).waiting_receivers == int(line), "they wait")
            print(allocated_bytes(), flush=True)


class Many(unittest.TestCase):
    """Thousands of small values and receives, with one process on each side."""
    def many(self, config):
        with subprocess.Popen([sys.executable, "-B", __file__, "own", json.dumps(config)], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True) as owner:
            self.assertEqual("ready\n", owner.stdout.readline())
            with Worker(config, "worker") as here:
                self.messages(here)
                self.waiting(here, owner)
            owner.stdin.close()

    def messages(self, here):
        """A group of small values takes few messages in both directions, also when its keys are new."""
        items = [(f"small/{number}", 1) for number in range(MEMBERS)]
        here.receive(here.peer(PEER), "small/0", 1)
        for _ in range(2):
            before = stats_of(here)
            group = here.ask_many(here.peer(PEER), items)
            found = here.wait(MEMBERS + 1)
            self.assertEqual("OK", found.pop(group).status)
            self.assertEqual({("OK", "inline")}, {(got.status, got.path) for got in found.values()})
            after = stats_of(here)
            self.assertLessEqual(after.frames_sent - before.frames_sent, MEMBERS // 20)
            self.assertLessEqual(after.frames_received - before.frames_received, MEMBERS // 20)

    def waiting(self, here, owner):
        """A receive that waits costs little at either side, besides its key."""
        def owner_bytes(count):
            owner.stdin.write(f"{count}\n")
            owner.stdin.flush()
            return int(owner.stdout.readline())

        keys = [f"absent/{number:04}" for number in range(WAITING_KEYS)]
        items = [(key, step) for step in range(1, 1 + WAITING // WAITING_KEYS) for key in keys]
        here.ask(here.peer(PEER), "first", 1)
        before = owner_bytes(1), allocated_bytes()
        here.ask_many(here.peer(PEER), items)
        after = owner_bytes(1 + WAITING), allocated_bytes()
        for side, begin, end in zip(("owner", "asker"), before, after):
            each = (end - begin) // WAITING
            print(f"{side}: {each} bytes for each receive that waits", file=sys.stderr)
            self.assertGreater(each, 0, side)
            self.assertLessEqual(each, WAITING_BYTES + len(keys[0]) + 1, side)

    def test_writing(self):
        self.many(cluster("window"))

    def test_reading(self):
        self.many(cluster("window") | READS)


class Cancelled(unittest.TestCase):
    """Receives are cancelled while their bytes come, and their memory is used again as soon as they are over: the
    user's memory under keys of windows, memory of the peer's pool under keys of regions."""
    more = {}
    owner = receiver = HOST

    def start(self, keys, size, **verbs):
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        config = cluster(keys, **verbs) | self.more
        self.path = "gpu-direct" if self.owner.kind or self.receiver.kind else "zero-copy"
        self.there = stack.enter_context(Worker(config, "ps", device=self.owner))
        self.here = stack.enter_context(Worker(config, "worker", device=self.receiver))
        self.log = stack.enter_context(workers.logged())
        self.peer = self.here.peer(PEER)
        self.size = size
        self.source = self.there.make(b"\x77" * self.size)
        self.destination = self.here.make(bytes(self.size)) if keys == "window" else None
        self.there.publish("long", self.source)
        self.there.publish("other", self.there.make(b"\x22" * self.size))
        self.receive("long", self.destination)
        self.use_again()
        stack.enter_context(slow_wire())

    def receive(self, key, destination=None):
        """Receives directly, over the path; values on GPUs are copied first, while the card is tried."""
        found = []
        workers.wait_until(lambda: found.append(self.here.receive(self.peer, key, 0, destination, is_verified=False))
                           or (found[-1].status != "UNAVAILABLE" and found[-1].path != "gpu-proxy"), "a path")
        self.assertEqual(("OK", self.path), (found[-1].status, found[-1].path), found)
        return found[-1].tensor

    def watch(self, begin):
        """Returns the first and the last byte of what goes to the address, and the operation before them."""
        place = devices.view(begin) if self.receiver.kind else begin
        return self.op, ctypes.c_uint8.from_address(place), ctypes.c_uint8.from_address(place + self.size - 1)

    def ask(self):
        """Begins to receive; returns the operation, and where its first and last byte go."""
        posts.begin()
        self.op = self.here.ask(self.peer, "long", 0, self.destination, is_verified=False)
        written = []
        workers.wait_until(lambda: written.extend(posts.writes(posts.take(), self.source))
                           or written, "the peer writes", pause_sec=0.001)
        return self.watch(written[0].remote)

    def use_again(self):
        """Only others write to this memory now."""
        content = b"\x22" * self.size
        other = self.destination
        if other:
            ctypes.memmove(other.place, content, self.size)
        else:
            other = self.receive("other")
        self.assertEqual(content, other.bytes)
        self.assertTrue(self.here.is_quiet(0.5))
        self.assertEqual(content, other.bytes, "something was written later")

    def cancel_many(self):
        for _ in range(CANCELS):
            op, first, last = self.ask()
            workers.wait_until(lambda: first.value == 0x77, "the write begins", pause_sec=0.001)
            self.assertNotEqual(0x77, last.value, "the write is over")
            self.here.cancel(op)
            done, = self.here.wait(1).values()
            self.assertEqual("CANCELLED", done.status, done)
            self.use_again()

    def peer_stops(self, keys):
        """The peer stops after what it has posted, and the path stays."""
        self.start(keys, LONG_BYTES, queue_depth=16)
        self.cancel_many()
        self.assertEqual([], lost(self.log, PEER))

    def path_is_stopped(self, keys):
        """The peer has slots to post all of it: after a while the path is taken down, with the writes in flight."""
        self.start(keys, LONGER_BYTES, slots=256)
        self.cancel_many()
        self.assertEqual(CANCELS, len(lost(self.log, PEER)))

    def test_peer_stops_window(self):
        self.peer_stops("window")

    def test_peer_stops_region(self):
        self.peer_stops("region")

    def test_path_is_stopped_window(self):
        self.path_is_stopped("window")

    def test_path_is_stopped_region(self):
        self.path_is_stopped("region")


class CancelledReads(Cancelled):
    """The same where the receiver reads: a cancel waits for the reads that are posted, and the data connection
    stays."""
    more = READS

    def ask(self):
        posts.begin()
        self.op = self.here.ask(self.peer, "long", 0, self.destination, is_verified=False)
        workers.wait_until(lambda: posts.reads(posts.take(), self.destination), "the receiver reads", pause_sec=0.001)
        return self.watch(self.destination.address)

    def test_reads_are_awaited(self):
        self.peer_stops("window")

    # What is posted has nothing to do with the size of the tensor, and regions are not read.
    test_peer_stops_window = test_peer_stops_region = None
    test_path_is_stopped_window = test_path_is_stopped_region = None


class CancelledOnGpus(Cancelled):
    """The card writes from a GPU to a GPU."""
    owner = receiver = GPU
    # Under keys of regions peers write no GPU; where the path is stopped, what is in flight is the same.
    test_peer_stops_region = test_path_is_stopped_window = test_path_is_stopped_region = None


class CancelledReadsOnGpus(CancelledReads):
    """The card reads from a GPU into a GPU."""
    owner = receiver = GPU


class Posted(unittest.TestCase):
    """On the zero-copy path bytes go from the sender's memory to the receiver's, and nowhere else."""
    def assert_direct(self, here, peer, source, destination, keys):
        """Receives what source holds, under the name of its size."""
        size = len(source.bytes)
        posts.begin()
        got = here.receive(peer, str(size), 0, destination)
        found = posts.take()
        self.assertEqual(("OK", "zero-copy", source.bytes), (got.status, got.path, got.tensor.bytes), got)
        place = 0
        for post in posts.writes(found):
            self.assertEqual((source.address + place, got.tensor.address + place), (post.local, post.remote))
            place += post.bytes
        self.assertEqual(size, place)
        exposed = [(post.local, post.bytes) for post in found if post.opcode == posts.BIND]
        self.assertEqual([(got.tensor.address, size)] * (keys == "window"), exposed)
        if destination:
            self.assertEqual(destination.address, got.tensor.address)

    def exchange(self, keys, with_destination):
        """The tensors are large enough to lie in memory of their own; small tensors of users are copied."""
        config = cluster(keys)
        with Worker(config, "ps") as there, Worker(config, "worker") as here:
            peer = here.peer(PEER)
            there.publish("warm", Tensor(b"the path is verified by writes"))
            here.receive(peer, "warm")
            for size in SIZES:
                source = Tensor(random.randbytes(size))
                there.publish(str(size), source)
                for _ in range(2):
                    destination = Tensor(bytes(size)) if with_destination else None
                    self.assert_direct(here, peer, source, destination, keys)

    def test_into_memory_of_the_library(self):
        for keys in ("window", "region"):
            with self.subTest(keys):
                self.exchange(keys, False)

    def test_one_message_and_one_write(self):
        """The limits are per tensor whose meta-data is known; now and then a message returns slots."""
        config = cluster("window", piece="1MiB")
        with Worker(config, "ps") as there, Worker(config, "worker") as here:
            peer = here.peer(PEER)
            there.publish("x", Tensor(random.randbytes(MIB)))
            for count in (2, TENSORS):
                regions = workers.resources()["mr"]
                posts.begin()
                for _ in range(count):
                    done = here.receive(peer, "x", is_verified=False)
                    self.assertEqual(("OK", "zero-copy"), (done.status, done.path), done)
                found = posts.take()
            self.assertEqual(TENSORS, len(posts.writes(found)))
            message_count = sum(post.opcode == posts.SEND for post in found)
            self.assertIn(message_count, range(TENSORS, TENSORS + TENSORS // 10))
            self.assertEqual(regions, workers.resources()["mr"])

    def test_into_memory_of_the_user(self):
        self.exchange("window", True)

    def test_reads(self):
        """One message each way, reads of just what was asked for, and a release."""
        config = cluster("window", piece="1MiB") | READS
        size = SIZES[0]
        with Worker(config, "ps") as there, Worker(config, "worker") as here:
            peer = here.peer(PEER)
            source, destination = Tensor(random.randbytes(size)), Tensor(bytes(size))
            there.publish("x", source)
            for _ in range(2):
                posts.begin()
                got = here.receive(peer, "x", 0, destination)
                found = posts.take()
                self.assertEqual(("OK", "zero-copy", source.bytes), (got.status, got.path, destination.bytes), got)
            place = 0
            for post in posts.reads(found):
                self.assertEqual((destination.address + place, source.address + place), (post.local, post.remote))
                place += post.bytes
            self.assertEqual(size, place)
            self.assertEqual([], posts.writes(found))
            self.assertEqual([(source.address, size)],
                             [(post.local, post.bytes) for post in found if post.opcode == posts.BIND])
            self.assertEqual(1, sum(post.opcode == posts.WRITE_WITH_IMMEDIATE for post in found))


class Refused(unittest.TestCase):
    """A peer writes with keys that are not its own, or are no longer valid. Its own path breaks, and nothing else
    happens."""
    more = {}

    def start(self, keys):
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        config = cluster(keys, piece="1MiB") | self.more
        self.there = stack.enter_context(Worker(config, "ps"))
        self.liar = stack.enter_context(Worker(config, "ps", 1))
        self.here = stack.enter_context(Worker(config, "worker"))
        self.log = stack.enter_context(workers.logged())
        self.lie = Tensor(b"\xee" * LIE_BYTES)
        self.large = Tensor(random.randbytes(4 * MIB))
        self.liar.publish("x", self.lie)
        self.there.publish("large", self.large)
        self.early = {}
        self.receive(LIAR, "x")

    def wait(self, op):
        while op not in self.early:
            self.early |= self.here.wait(1)
        return self.early.pop(op)

    def receive(self, name, key, step=0, destination=None):
        """Returns what came over the path, and what was posted for it."""
        found = []

        def has_come():
            posts.begin()
            found.append(self.wait(self.here.ask(self.here.peer(name), key, step, destination)))
            return found[-1].status != "UNAVAILABLE"
        workers.wait_until(has_come, f"a path to {name}")
        self.assertEqual("OK", found[-1].status, found[-1])
        self.assertIn(found[-1].path, OVER_VERBS, found[-1])
        return found[-1], posts.take()

    def writers(self):
        """Returns the queue pairs over which the bystander's bytes come."""
        return {post.queue_pair for post in posts.writes(self.receive(PEER, "large")[1], self.large)}

    def send_lie(self, address, key):
        """The liar's next answer goes to the address with the key, while the bystander's bytes come."""
        before, lost_before = self.writers(), len(lost(self.log, LIAR))
        asked = [self.here.ask(self.here.peer(PEER), "large") for _ in range(4)]
        posts.redirect(self.lie, address, key)
        lie = self.here.ask(self.here.peer(LIAR), "x")
        workers.wait_until(posts.is_redirected, "the liar writes")
        workers.wait_until(lambda: any(re.search(REFUSED, reason) for reason in lost(self.log, LIAR)[lost_before:]),
                           "the lie is refused")
        for op in asked:
            done = self.wait(op)
            self.assertEqual(("OK", self.large.bytes), (done.status, done.tensor.bytes), done)
            self.assertIn(done.path, OVER_VERBS, done)
        self.assertEqual(before, self.writers(), "the bystander's path has changed")
        self.assertEqual([], lost(self.log, PEER))
        done = self.wait(lie)
        self.assertIn(done.status, ("OK", "UNAVAILABLE"), done)
        if done.status == "OK":
            self.assertEqual(self.lie.bytes, done.tensor.bytes)
        self.receive(LIAR, "x")

    def park(self, name, worker, destination):
        """Begins a request that waits at the worker, with its destination open; returns the request, its key and that
        of its region."""
        worker.publish("later", Tensor(b"\x01" * LIE_BYTES), 1)
        self.receive(name, "later", 1, destination)
        posts.begin()
        op = self.here.ask(self.here.peer(name), "later", 2, destination)
        bound = []
        workers.wait_until(lambda: bound.extend(post for post in posts.take() if post.opcode == posts.BIND) or bound,
                           "the destination is exposed")
        self.assertEqual((destination.address, LIE_BYTES), (bound[0].local, bound[0].bytes))
        return op, bound[0].key, bound[0].region_key

    def test_stale_keys(self):
        self.start("window")
        destination = Tensor(bytes(LIE_BYTES))
        _, found = self.receive(LIAR, "x", 0, destination)
        written = posts.writes(found, self.lie)[0]
        self.assertEqual(destination.address, written.remote)
        destination.fill(KEPT)
        self.send_lie(written.remote, written.key)
        self.assertEqual(KEPT, destination.bytes)

    def test_keys_of_others(self):
        """Tries open windows of another peer, the key of the memory behind them, and guessed keys."""
        self.start("window")
        destination = Tensor(KEPT)
        op, key, region_key = self.park(PEER, self.there, destination)
        destination.fill(KEPT)
        for guess in (key, region_key, key + 1, *(random.getrandbits(32) for _ in range(GUESSES))):
            self.send_lie(destination.address, guess)
            self.assertEqual(KEPT, destination.bytes)
        self.there.publish("later", Tensor(b"\x02" * LIE_BYTES), 2)
        self.assertEqual(("OK", b"\x02" * LIE_BYTES), (self.wait(op).status, destination.bytes))

    def test_guessed_keys_of_regions(self):
        self.start("region")
        got, found = self.receive(PEER, "large")
        key = posts.writes(found, self.large)[0].key
        for guess in (key ^ 0x80, *(random.getrandbits(32) for _ in range(GUESSES))):
            self.send_lie(got.tensor.address, guess)
            self.assertEqual(self.large.bytes, got.tensor.bytes)

    def test_own_key(self):
        """With an open key of its own the liar does write: the other writes are refused for their keys."""
        self.start("window")
        destination = Tensor(KEPT)
        op, key, _ = self.park(LIAR, self.liar, destination)
        posts.redirect(self.lie, destination.address, key)
        self.assertEqual("DATA_LOSS", self.wait(self.here.ask(self.here.peer(LIAR), "x", 0, Tensor(KEPT))).status)
        self.assertEqual(self.lie.bytes, destination.bytes)
        self.liar.publish("later", Tensor(b"\x02" * LIE_BYTES), 2)
        self.assertEqual("OK", self.wait(op).status)

    def assert_bystander(self, lie, ask):
        """A message of the liar has a wrong length in what `ask` makes it say: its path ends with the reason, and comes
        back. The bystander's bytes come as before. Requests over the path fail or are asked again."""
        self.start("window")
        before = self.writers()
        posts.falsify(lie, "v06")
        op = ask()
        workers.wait_until(posts.is_falsified, "the false message is posted")
        workers.wait_until(lambda: any("UTF-8" in reason for reason in lost(self.log, LIAR)), "the lie is refused")
        self.assertEqual(before, self.writers(), "the bystander's path has changed")
        self.assertEqual([], lost(self.log, PEER))
        self.receive(LIAR, "x")
        return op

    def test_v06_length_of_a_key_that_lies(self):
        self.assert_bystander(posts.REQUEST, lambda: self.liar.ask(self.liar.peer(HERE), "v06", timeout_sec=1))

    def test_v06_length_of_a_text_that_lies(self):
        def ask():
            op = self.here.ask(self.here.peer(LIAR), "never", 6)
            self.receive(LIAR, "x")
            self.liar.abort_step(6, "DATA_LOSS", "v06")
            return op
        self.assertIn(self.wait(self.assert_bystander(posts.ERROR_STATUS, ask)).status, ("UNAVAILABLE", "DATA_LOSS"))


class FalseSources(Refused):
    """A peer shows memory that is not its own, or no longer there, to a receiver that reads: the read is refused by the
    peer's card, only their data connection breaks, and nothing counts as received."""
    more = READS

    def reads_of_large(self):
        """Receives the bystander's tensor; returns the reads of its bytes. A new connection of the liar may have tried
        a read in the same memory of the pool just before: such a read has fewer bytes than a piece."""
        done, found = self.receive(PEER, "large")
        return [post for post in posts.reads(found, done.tensor) if post.bytes > TRIED_BYTES]

    def readers(self):
        """Returns the queue pairs over which the bystander's bytes come."""
        return {post.queue_pair for post in self.reads_of_large()}

    def assert_refused(self, address, key):
        before, lost_before = self.readers(), len(lost(self.log, LIAR))
        asked = [self.here.ask(self.here.peer(PEER), "large") for _ in range(4)]
        posts.redirect_source(self.lie, address, key)
        destination = Tensor(KEPT)
        lie = self.here.ask(self.here.peer(LIAR), "x", 0, destination)
        workers.wait_until(posts.is_redirected, "the liar shows memory")
        workers.wait_until(lambda: len(lost(self.log, LIAR)) > lost_before, "the read is refused")
        for op in asked:
            done = self.wait(op)
            self.assertEqual(("OK", self.large.bytes), (done.status, done.tensor.bytes), done)
        self.assertEqual(before, self.readers(), "the bystander's data connection has changed")
        self.assertEqual([], lost(self.log, PEER))
        done = self.wait(lie)
        self.assertIn(done.status, ("OK", "UNAVAILABLE"), done)
        self.assertEqual(self.lie.bytes if done.status == "OK" else KEPT, destination.bytes)
        self.receive(LIAR, "x")

    def test_false_sources(self):
        """Keys that were never given, and that of another peer's memory."""
        self.start("window")
        for key in (random.getrandbits(32) for _ in range(GUESSES)):
            self.assert_refused(self.lie.address, key)
        self.assert_refused(self.large.address, self.reads_of_large()[0].key)

    test_stale_keys = test_keys_of_others = test_guessed_keys_of_regions = test_own_key = None
    test_v06_length_of_a_key_that_lies = test_v06_length_of_a_text_that_lies = None


if __name__ == "__main__":
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    devices.load(workers.BUILD)
    if sys.argv[1:2] == ["own"]:
        own(sys.argv[2])
    else:
        unittest.main(verbosity=2)
