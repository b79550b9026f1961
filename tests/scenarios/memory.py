# SPDX-License-Identifier: Apache-2.0
"""Scenarios of memory that is given back: from then on no peer writes there, whatever it does."""
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import tempfile
import time
import unittest

import devices
import workers
from devices import HOST
from workers import PROGRAM, Server, Worker

PEER = "/job:ps/task:0"
BYSTANDER = "/job:ps/task:1"
MIB = 1 << 20
LONG_BYTES = 64 * MIB
GPU_LONG_BYTES = 16 * MIB
OLD, NEW = b"\x77", b"\x22"
CANCELS = 3
ATTEMPTS = 300
KILLS = 3
RECEIVERS, GPU_RECEIVERS = 40, 15


class Landing:
    """How far the bytes of a transfer have come, wherever in this process they go: it looks at each MiB of every large
    mapping. The kernel reads the memory for us, since the library may unmap it meanwhile."""
    def __init__(self, long_bytes):
        self.min_bytes = long_bytes // 2
        self.memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        self.before = self.found()

    def found(self):
        found = set()
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                places, rights = line.split()[:2]
                begin, end = (int(place, 16) for place in places.split("-"))
                if "rw" not in rights or not self.min_bytes <= end - begin <= 16 * LONG_BYTES:
                    continue
                for address in range(begin, end, MIB):
                    with contextlib.suppress(OSError):
                        if os.pread(self.memory, 1, address) == OLD:
                            found.add(address)
        return found

    def has_begun(self):
        return bool(self.found() - self.before)

    def __del__(self):
        os.close(self.memory)


class Copying:
    """Whether bytes have come to a GPU of this process since."""
    def __init__(self):
        self.before = devices.begun_bytes()

    def has_begun(self):
        return devices.begun_bytes() > self.before


class InFlight(unittest.TestCase):
    """Two peers that publish large tensors, and data connections to them. What is published and what is received lie on
    devices."""
    transport = None
    owner = receiver = HOST

    @classmethod
    def setUpClass(cls):
        cls.long_bytes = GPU_LONG_BYTES if cls.owner.kind or cls.receiver.kind else LONG_BYTES
        cls.folder = tempfile.TemporaryDirectory()
        cls.file = workers.write_checkpoint(f"{cls.folder.name}/long.safetensors",
                                            {"long": OLD * cls.long_bytes, "other": NEW * cls.long_bytes})

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def setUp(self):
        stack = contextlib.ExitStack()
        self.addCleanup(devices.assert_free)
        self.addCleanup(stack.close)
        self.addCleanup(devices.hold, False)
        self.config = config = self.transport.cluster(self.transport.faulty["prefer"], timeouts={"drain": "5s"},
                                                      jobs={"ps": {"device": str(self.owner)}})
        self.ps = stack.enter_context(Server(config, "ps", publish=[self.file]))
        stack.enter_context(Server(config, "ps", 1, publish=[self.file]))
        self.here = stack.enter_context(Worker(config, "worker", device=self.receiver))
        self.paths = self.transport.paths_between(self.owner, self.receiver)
        self.peer, self.bystander = self.here.peer(PEER), self.here.peer(BYSTANDER)
        for peer in (self.peer, self.bystander):
            workers.wait_until(lambda peer=peer: self.receive(peer).path in self.paths, "a data connection")

    def receive(self, peer, destination=None):
        """Receives the tensor that other transfers write."""
        done = self.here.receive(peer, "other", 0, destination, is_verified=False)
        self.assertEqual("OK", done.status, done)
        return done

    def watch(self):
        return Copying() if self.receiver.kind else Landing(self.long_bytes)

    def await_path(self):
        workers.wait_until(lambda: self.receive(self.peer).path in self.paths,
                           "the data connection is back")

    def await_landing(self, landing):
        """Waits until the first bytes are there; returns the completions, if there already are some."""
        done = {}
        while not done and not landing.has_begun():
            done = self.here.poll()
        return done


class Cancelled(InFlight):
    """Receives are cancelled while their bytes come, and their memory is used again as soon as they are over. Nothing
    is written there later, neither by a peer that works nor by one that stood still meanwhile."""
    def cancel(self, destination, is_stopped):
        """Returns whether the cancel met a write in flight."""
        landing = self.watch()
        op = self.here.ask(self.peer, "long", 0, destination, is_verified=False)
        done = self.await_landing(landing)
        if is_stopped:
            self.ps.signal(signal.SIGSTOP)
        self.here.cancel(op)
        status = (done or self.here.wait(1))[op].status
        self.assertIn(status, ("OK", "CANCELLED"))
        return status == "CANCELLED"

    def use_again(self, destination, is_stopped):
        """Only others write to this memory now."""
        if destination:
            # This loop runs from the end to the beginning, so a late write, which goes the other way, cannot stay ahead
            # of it.
            for offset in reversed(range(0, self.long_bytes, MIB)):
                ctypes.memset(destination.place + offset, NEW[0], MIB)
            used = [destination]
        else:
            used = [self.receive(peer).tensor for peer in ([self.bystander] if is_stopped
                                                           else [self.peer, self.bystander])]
        if is_stopped:
            self.ps.signal(signal.SIGCONT)
        self.assertTrue(self.here.is_quiet(0.3))
        for tensor in used:
            self.assertEqual(NEW * self.long_bytes, tensor.bytes, "something was written later")

    def cancel_many(self, is_users, is_stopped):
        destination = self.here.make(bytes(self.long_bytes)) if is_users else None
        met = 0
        for _ in range(ATTEMPTS):
            if not self.cancel(destination, is_stopped):
                self.ps.signal(signal.SIGCONT)
                # Clear it, because the bytes that are there would look like those that come next.
                self.receive(self.peer, destination)
                continue
            met += 1
            self.use_again(destination, is_stopped)
            if met == CANCELS:
                break
            self.await_path()
        self.assertEqual(CANCELS, met, "the write was always over")

    def test_memory_of_the_library(self):
        self.cancel_many(is_users=False, is_stopped=False)

    def test_memory_of_the_user(self):
        self.cancel_many(is_users=True, is_stopped=False)

    def test_memory_of_the_library_and_a_peer_that_is_stopped(self):
        self.cancel_many(is_users=False, is_stopped=True)

    def test_memory_of_the_user_and_a_peer_that_is_stopped(self):
        self.cancel_many(is_users=True, is_stopped=True)


class Killed(InFlight):
    """A process is killed while bytes come from it or go to it, and nothing of it is left."""
    def test_peer(self):
        """The process that takes its place answers the request."""
        met, before = 0, None
        for _ in range(ATTEMPTS):
            landing = self.watch()
            devices.hold(self.receiver.kind)
            op = self.here.ask(self.peer, "long", 0, is_verified=False)
            done = self.await_landing(landing)
            self.ps.kill()
            done = done or self.here.poll()
            met += not done
            devices.hold(False)
            self.ps.start()
            done = (done or self.here.wait(1))[op]
            self.assertEqual(("OK", OLD * self.long_bytes), (done.status, done.tensor.bytes), done)
            done = None
            self.await_path()
            before = before or self.settled("self")
            if met == KILLS:
                break
        self.assertEqual(KILLS, met, "the write was always over")
        self.assert_holds(before, "self")

    def test_receiver(self):
        pid, before = self.ps.process.pid, None
        for number in range(GPU_RECEIVERS if self.owner.kind or self.receiver.kind else RECEIVERS):
            with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
                json.dump(self.config, file)
                file.flush()
                command = [PROGRAM, "pull", "-c", file.name, "--from", PEER, "-o", f"{self.folder.name}/copy",
                           *devices.flags(self.receiver)]
                with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as pull:
                    time.sleep(0.01 * (number % 20))
                    pull.kill()
            before = before or self.settled(pid)
        self.assert_holds(before, pid)
        self.assertIn(self.receive(self.peer).path, self.paths)

    def settled(self, pid):
        """Returns what a process holds when it has not changed for a second."""
        found = []

        def is_settled():
            found.append(self.transport.held(pid))
            return len(found) > 1 and found[-1] == found[-2]
        workers.wait_until(is_settled, "it settles", pause_sec=1)
        return found[-1]

    def assert_holds(self, before, pid):
        held = []
        workers.wait_until(lambda: held.append(self.transport.held(pid)) or held[-1] == before,
                           lambda: f"{pid} holds what it held, {before}, but {held[-1]}")
