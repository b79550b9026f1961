#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What the plug-ins for engines have in common: receives that another thread cancels, that have a deadline, and that
end when the peer is gone; one line of log for each change of path."""
import asyncio
import gc
import logging
import signal
import threading
import types
import unittest
import weakref

from python_support import PATIENCE, start_script, tensorlane, until_gone, wait_until

import numpy
from tensorlane import _engine

OWNER = """
import sys, time
import tensorlane
owner = tensorlane.Worker({"log": {"level": "error"}}, address="127.0.0.1:0")
for name in ("a", "b"):
    owner.publish(name, name.encode() * 100000)
print(owner.address, flush=True)
time.sleep(1000)
"""


class Engines(unittest.TestCase):
    def setUp(self):
        self.process = start_script("", OWNER)
        for stream in (self.process.stdout, self.process.stderr):
            self.addCleanup(stream.close)
        self.addCleanup(self.process.wait)
        self.addCleanup(self.process.kill)
        self.endpoint = _engine.Endpoint(lambda: "127.0.0.1", logging.getLogger("engine"), config={
            "log": {"level": "error"}})
        self.peer = self.endpoint.peer(self.process.stdout.readline().strip())
        self.addCleanup(lambda: self.endpoint.worker.close())

    def receive(self, keys, timeout=PATIENCE):
        return self.endpoint.receive(self.peer, keys, [None] * len(keys), timeout)

    def test_values_and_their_path(self):
        with self.assertLogs("engine", "INFO") as logs:
            for _ in range(3):
                got = self.receive(["a", "b"]).wait()
                self.assertEqual([bytes(tensor)[:2] for tensor in got], [b"aa", b"bb"])
        self.assertEqual(len([line for line in logs.output if "large values from" in line]), 1, logs.output)

    def test_each_change_of_path_is_said_once(self):
        def came(path, reason="", nbytes=1 << 20):
            return types.SimpleNamespace(path=path, path_reason=reason, nbytes=nbytes)

        with self.assertLogs("engine", "INFO") as logs:
            for tensor in (came("mapped"), came("mapped"), came("zero-copy"), came("mapped"), came("none"),
                           came("bounce", "no memory"), came("bounce", "unaligned"), came("zero-copy"),
                           came("grpc", "x"), came("grpc", "x"), came("mapped"), came("inline", nbytes=1),
                           came("inline", nbytes=1)):
                self.endpoint.note(self.peer, [tensor])
            for number in range(100):
                self.endpoint.note(self.peer, [came("grpc", str(number))])
        self.assertEqual([line.split(" come by ")[1] for line in logs.output][:8], [
            "mapped", "zero-copy", "bounce (no memory)", "bounce (unaligned)", "grpc (x)", "mapped", "inline",
            "grpc (0)"])
        self.assertLess(len(self.peer.paths[True][1]), 20)

    def test_a_receive_that_is_asked_whether_it_is_done(self):
        receive = self.receive(["none"])
        self.assertRaises(TimeoutError, receive.wait, 0)
        self.assertRaises(TimeoutError, receive.wait, 0.1)
        threading.Timer(0.1, receive.cancel).start()
        self.assertRaises(tensorlane.Cancelled, receive.wait)
        self.assertEqual(self.peer.users, 0)

    def test_a_signal_as_the_value_comes(self):
        """The next wait has it."""
        def wait(results):
            while not results:
                queue.wait(results)
            raise KeyboardInterrupt

        receive = self.receive(["a"])
        queue, receive._queue = receive._queue, types.SimpleNamespace(wait=wait)
        self.assertRaises(KeyboardInterrupt, receive.wait)
        receive._queue = queue
        self.assertEqual(receive.wait(0)[0].nbytes, 100000)

    def test_memory_of_receives_that_fail(self):
        """It is given back without the collector of cycles."""
        async def main(receive):
            into = numpy.zeros(5)
            gone = weakref.ref(into)
            try:
                await receive(into)
            except tensorlane.DeadlineExceeded:  # assertRaises would clear the frames.
                del into
            await until_gone(gone, self.endpoint.worker)

        gc.disable()
        self.addCleanup(gc.enable)
        for receive in (lambda into: self.endpoint.receive_async(self.peer, "none", into, 0.01),
                        lambda into: self.endpoint.receive_all(self.peer, ["none"], [into], 0.01)):
            asyncio.run(asyncio.wait_for(main(receive), PATIENCE))

    def test_deadlines(self):
        self.assertRaises(tensorlane.DeadlineExceeded, self.receive(["none"], 0.2).wait)
        with self.assertRaises(tensorlane.DeadlineExceeded):
            asyncio.run(self.endpoint.receive_async(self.peer, "none", None, 0.2))

    def test_a_peer_that_is_gone(self):
        waiting = self.receive(["none"])
        self.receive(["a"]).wait()
        self.process.send_signal(signal.SIGKILL)
        with self.assertRaisesRegex(tensorlane.Unavailable, f"{self.peer.address} is gone: "):
            waiting.wait()
        with self.assertRaisesRegex(tensorlane.Unavailable, "is gone"):
            asyncio.run(self.endpoint.receive_async(self.peer, "none", None, PATIENCE))

    def test_receives_that_nothing_waits_for_are_cancelled(self):
        receive = self.receive(["none"])
        self.assertGreater(self.endpoint.worker.counters()["open_operations"], 0)
        del receive
        self.assertEqual(self.peer.users, 0)
        wait_until(lambda: self.endpoint.worker.counters()["open_operations"] == 0, "it is cancelled")

    def test_receives_that_do_not_begin(self):
        with self.assertRaises(TypeError):
            self.endpoint.receive(self.peer, ["a"], [5], PATIENCE)
        self.assertEqual(self.peer.users, 0)

    def test_peers_that_are_not_used_are_removed(self):
        for number in range(_engine.MAX_PEERS + 10):
            self.endpoint.peer(f"127.0.0.1:{number + 1}")
        self.assertLessEqual(len(self.endpoint.worker.peers()), _engine.MAX_PEERS + 1)


if __name__ == "__main__":
    unittest.main(verbosity=2)
