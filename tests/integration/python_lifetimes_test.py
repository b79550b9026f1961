#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""How long things of the Python package live: arrays, workers, processes that end, fork, cycles, memory."""
import asyncio
import ctypes
import gc
import os
import threading
import unittest
import warnings
import weakref

import python_support
from python_support import WorkersCase, run_script, tensorlane

import numpy

# A receive of 64 KiB has its own memory; what the allocator keeps for later is far less than what 100,000 would leave.
RECEIVES = 100_000
MOST_GROWTH_BYTES = 24 << 20


class Outlives(WorkersCase):
    def test_tensor_and_worker(self):
        self.owner.publish("key", numpy.arange(1000))
        got = self.asker.recv_wait(self.peer, "key")
        array, view, taken = numpy.asarray(got), memoryview(got), numpy.from_dlpack(got)
        own = numpy.asarray(self.owner.recv_wait(self.owner.name, "key"))
        del got
        self.asker.close()
        self.owner.close()
        del self.asker, self.owner
        self._cleanups.clear()
        gc.collect()
        for one in (array, view, taken, own):
            numpy.testing.assert_array_equal(numpy.asarray(one), numpy.arange(1000))

    def test_module(self):
        out = run_script("""
            owner.publish("key", numpy.arange(1000))
            got = asker.recv_wait(peer, "key")
            array, view, taken = numpy.asarray(got), memoryview(got), numpy.from_dlpack(got)
            owner.close()
            asker.close()
            del owner, asker, tensorlane
            for name in [name for name in sys.modules if name.startswith("tensorlane")]:
                del sys.modules[name]
            gc.collect()
            print(got, array.sum(), numpy.asarray(view).sum(), taken.sum())
            del got, array, view, taken
            gc.collect()
            """)
        self.assertTrue(out.endswith("499500 499500 499500\n"), out)

    def test_source_of_what_is_published(self):
        values = numpy.zeros(1000)
        gone = weakref.ref(values)
        self.owner.publish("key", values)
        del values
        got = self.asker.recv_wait(self.peer, "key")
        self.assertIsNotNone(gone())
        self.owner.publish("key", b"another")
        python_support.wait_until(lambda: gone() is None, "the memory is given back")
        self.assertEqual(numpy.asarray(got).sum(), 0)

    def test_a_send_that_nothing_refers_to(self):
        values = numpy.zeros(1000)
        gone = weakref.ref(values)

        async def main():
            sending = asyncio.ensure_future(self.owner.send("key", values, timeout=600))
            await asyncio.sleep(0)
            del sending

        asyncio.run(main())
        del values
        self.assertEqual(self.owner.counters()["published_tensors"], 0)
        self.owner.close()
        gc.collect()
        python_support.wait_until(lambda: gone() is None, "the memory is given back")

    def test_threads_that_wait_for_one_subscription(self):
        """What was taken first is converted first: the end of the subscription frees what values refer to."""
        subscription = self.asker.subscribe_wait(self.peer, "key")
        is_there, may_go_on = threading.Event(), threading.Event()
        self.addCleanup(may_go_on.set)

        class Slow(list):
            def append(self, entry):
                super().append(entry)
                is_there.set()
                may_go_on.wait()

        def wait(results, count):
            while len(results) < count:
                subscription._queue.wait(results)

        first, second = Slow(), []
        thread = threading.Thread(target=wait, args=(first, 1))
        thread.start()
        self.owner.publish("key", b"value")
        is_there.wait()
        subscription.close()
        for _ in range(5):
            subscription._queue.wait(second)
        self.assertEqual(second, [])
        may_go_on.set()
        thread.join()
        wait(second, 1)
        self.assertEqual([is_over for _, _, _, is_over in first + second], [False, True])

    def test_releases_after_python_was_asked_too_much(self):
        """What could not be handed to the main thread goes with what comes later."""
        arrays = [numpy.zeros(1000), numpy.zeros(1000)]
        gone = [weakref.ref(array) for array in arrays]
        # A capsule that ends calls nothing else of the package, which would empty the list.
        taken = [numpy.from_dlpack(tensorlane.wrap(array)) for array in arrays]
        arrays.clear()
        add, harmless = ctypes.pythonapi.Py_AddPendingCall, ctypes.pythonapi.PyErr_CheckSignals

        def fill():
            while add(ctypes.cast(harmless, ctypes.c_void_p), None) == 0:
                pass
            taken.pop()

        thread = threading.Thread(target=fill)
        thread.start()
        thread.join()  # and what was asked of this thread is done
        taken.pop()
        python_support.wait_until(lambda: all(one() is None for one in gone), "the memory is given back")


class Ends(unittest.TestCase):
    def test_the_interpreter_ends_with_operations_open(self):
        for script in (
                "owner.publish('key', numpy.zeros(1000)); got = asker.recv_wait(peer, 'key')",
                """
                threading.Thread(target=lambda: asker.recv_wait(peer, "none", timeout=600), daemon=True).start()
                threading.Thread(target=lambda: owner.send_wait("other", b"", timeout=600), daemon=True).start()
                while not asker.counters()["open_operations"]: time.sleep(0.01)
                """,
                """
                loop = asyncio.new_event_loop()
                async def main():
                    asyncio.ensure_future(asker.recv(peer, "none", timeout=600))
                    asyncio.ensure_future(owner.send("none", numpy.zeros(9), timeout=600))
                    subscription = asker.subscribe(peer, "none")
                    await asyncio.sleep(0.01)
                    return subscription
                kept = loop.run_until_complete(main())
                """,
                "owner.publish('key', numpy.zeros(1000)); raise SystemExit",
                "owner.publish('key', numpy.zeros(1000)); sys.modules.clear()"):
            with self.subTest(script):
                run_script(script)

    def test_an_error_ends_the_program(self):
        process = python_support.start_script("""
            owner.publish("key", numpy.zeros(1000))
            got = asker.recv_wait(peer, "key")
            raise ValueError("the end")
            """)
        _, err = process.communicate(timeout=python_support.PATIENCE)
        self.assertEqual(process.returncode, 1)
        self.assertIn("ValueError: the end", err)

    def test_a_worker_that_is_dropped(self):
        worker = tensorlane.Worker({"log": {"level": "error"}}, address="127.0.0.1:0")
        values = numpy.zeros(10)
        gone = weakref.ref(values)
        worker.publish("key", values)
        del values
        with self.assertWarnsRegex(ResourceWarning, "was not closed"):
            del worker
            gc.collect()
        python_support.wait_until(lambda: gone() is None, "the memory is given back")

    @python_support.without_address_sanitizer
    def test_fork(self):
        """The child gets errors, may use what it has, and ends in every way; the parent goes on."""
        out = run_script("""
            owner.publish("key", numpy.arange(1000))
            got = asker.recv_wait(peer, "key")
            array = numpy.asarray(got)
            async def receive():
                await asker.recv(peer, "key")
            def child(end):
                for call in (lambda: asker.recv_wait(peer, "key"), lambda: owner.publish("key", array),
                             lambda: asker.send_wait("key", array), asker.counters, asker.peers, lambda: asker.name,
                             lambda: asyncio.run(receive()), lambda: tensorlane.Worker(address="127.0.0.1:0"),
                             lambda: tensorlane.wrap(array), lambda: tensorlane.empty((1,)),
                             lambda: tensorlane.copy(array), lambda: tensorlane._tensorlane._wrap_as(array, "BF16")):
                    try:
                        call()
                        os._exit(3)
                    except tensorlane.FailedPrecondition as error:
                        assert "fork" in str(error), error
                assert array.sum() == 499500
                asker.close()
                globals().pop("owner")
                globals().pop("got")
                gc.collect()
                print("child", end, flush=True)
                if end == "exit": sys.exit(7)
                if end == "_exit": os._exit(7)
                raise ValueError("an error of the child")
            for end in ("exit", "_exit", "raise"):
                pid = os.fork()
                if pid == 0: child(end)
                _, status = os.waitpid(pid, 0)
                print(os.waitstatus_to_exitcode(status), flush=True)
            assert numpy.asarray(asker.recv_wait(peer, "key")).sum() == 499500
            asker.close()
            owner.close()
            """)
        self.assertEqual(out.split(), ["child", "exit", "7", "child", "_exit", "7", "child", "raise", "1"])

    @python_support.without_address_sanitizer
    def test_fork_while_calls_wait(self):
        """What an event loop of the parent waits for fails in the child, where nothing completes."""
        out = run_script("""
            loop = asyncio.new_event_loop()
            async def begin():
                subscription = asker.subscribe(peer, "none")
                calls = asker.recv(peer, "none", timeout=600), asker.recv_many(peer, ["none"] * 3, timeout=600), \\
                    owner.send("another", b"", timeout=600), anext(subscription)
                tasks = [loop.create_task(call) for call in calls]
                await asyncio.sleep(0)
                return subscription, tasks
            subscription, tasks = loop.run_until_complete(begin())
            blocking = asker.subscribe_wait(peer, "none")
            pid = os.fork()
            if pid == 0:
                signal.alarm(int(os.environ.get("TENSORLANE_PATIENCE", 120)) // 2)  # it hangs where this fails
                for task in tasks:
                    try:
                        loop.run_until_complete(task)
                    except tensorlane.FailedPrecondition as error:
                        assert "fork" in str(error), error
                        os.write(1, b"failed ")
                try:
                    next(blocking)
                except tensorlane.FailedPrecondition:
                    os.write(1, b"failed\\n")
                subscription.close()
                blocking.close()
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            owner.publish("none", b"value")
            assert loop.run_until_complete(asyncio.wait_for(tasks[0], 60)).nbytes
            asker.close()
            owner.close()
            """)
        self.assertEqual(out, "failed " * 4 + "failed\n")

    @python_support.without_address_sanitizer
    def test_fork_by_the_handler_of_a_signal(self):
        out = run_script("""
            def fork(*_):
                global pid
                pid = os.fork()
                if pid: owner.publish("none", b"value")
                else: signal.alarm(int(os.environ.get("TENSORLANE_PATIENCE", 120)) // 2)
            signal.signal(signal.SIGUSR1, fork)
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            try:
                asker.recv_wait(peer, "none", timeout=600)
            except tensorlane.FailedPrecondition:
                os._exit(7)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            """)
        self.assertEqual(out, "7\n")

    def test_fork_before_the_first_worker(self):
        out = run_script("""
            import os, sys, tensorlane
            pid = os.fork()
            with tensorlane.Worker({"log": {"level": "error"}}, address="127.0.0.1:0") as worker:
                worker.publish("key", b"value")
                os.write(1, bytes(worker.recv_wait(worker.name, "key")) + b"\\n")  # in one piece, as the other process
            if pid: sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            """, prologue="")
        self.assertEqual(out, "value\n" * 2)


class Collected(unittest.TestCase):
    def test_cycles(self):
        """A worker, its queue, a future that waits, and what waits for that one refer to each other."""
        async def main():
            worker = tensorlane.Worker({"log": {"level": "error"}}, address="127.0.0.1:0")

            async def wait():
                await worker.recv(worker.name, "none", timeout=600)

            worker.waiting = asyncio.ensure_future(wait())
            worker.itself = worker
            worker.subscription = worker.subscribe(worker.name, "none")
            await asyncio.sleep(0)
            worker.waiting.cancel()
            await asyncio.sleep(0)
            return weakref.ref(worker)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gone = asyncio.run(main())
            gc.collect()
        self.assertIsNone(gone())

    def test_a_future_that_nothing_else_refers_to(self):
        """The event loop refers to the queue, and so to the future; when the loop has gone, all goes."""
        class Marked(dict):
            pass

        worker = tensorlane.Worker({"log": {"level": "error"}}, address="127.0.0.1:0")
        self.addCleanup(worker.close)
        loop = asyncio.new_event_loop()
        marked = Marked()
        gone = weakref.ref(marked)

        async def main(marked):
            marked["future"] = asyncio.ensure_future(worker.recv(worker.name, "none", timeout=600))
            marked["future"].add_done_callback(lambda _: marked)
            await asyncio.sleep(0)

        loop.run_until_complete(main(marked))
        marked["future"]._log_destroy_pending = False
        del marked
        loop.close()
        del loop
        worker._inboxes.clear()
        gc.collect()
        self.assertIsNone(gone())
        python_support.wait_until(lambda: worker.counters()["open_operations"] == 0, "the receive was cancelled")

    def test_types(self):
        """The module and its types go when nothing refers to them."""
        out = run_script("""
            import gc, sys, weakref, tensorlane
            gone = weakref.ref(tensorlane._tensorlane), weakref.ref(tensorlane.Tensor)
            tensorlane._tensorlane._stop()
            import atexit
            atexit.unregister(tensorlane._close_all)
            del tensorlane
            for name in [name for name in sys.modules if name.startswith("tensorlane")]:
                del sys.modules[name]
            gc.collect()
            print([one() for one in gone])
            """, prologue="")
        self.assertEqual(out, "[None, None]\n")


    def test_in_several_interpreters(self):
        """Each has the module and its types for itself."""
        out = run_script("""
            import sys, tensorlane
            try:
                import _xxsubinterpreters as interpreters
            except ImportError:
                import _interpreters as interpreters
            USE = '''
            import tensorlane
            with tensorlane.Worker({"log": {"level": "error"}}, address="127.0.0.1:0") as worker:
                worker.publish("key", b"value")
                try:
                    worker.recv_wait(worker.name, "none", timeout=0)
                except tensorlane.DeadlineExceeded:
                    print(bytes(worker.recv_wait(worker.name, "key")), id(tensorlane.Tensor), flush=True)
            '''
            for _ in range(2):
                interpreter = interpreters.create()
                interpreters.run_string(interpreter, USE)
                exec(USE)
                interpreters.destroy(interpreter)
            """, prologue="")
        values, types = zip(*(line.split() for line in out.splitlines()))
        self.assertEqual(values, ("b'value'",) * 4)
        self.assertEqual(types[1], types[3])
        self.assertFalse({types[0], types[2]} & {types[1]})


@unittest.skipIf(python_support.SANITIZE, "sanitizers keep memory that was freed")
class Flat(WorkersCase):
    def resident_bytes(self):
        gc.collect()
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def test_receives(self):
        values = numpy.zeros(4096, numpy.float32)
        into = numpy.zeros(4096, numpy.float32)
        self.owner.publish("values", values)

        def receive(count):
            for _ in range(count // 10):
                for _ in range(4):
                    self.asker.recv_wait(self.peer, "values", into=into)
                numpy.asarray(self.asker.recv_wait(self.peer, "values"))
                for row in self.asker.recv_many_wait(self.peer, ["values"] * 5):
                    numpy.from_dlpack(row)
                self.owner.publish("values", values)

        receive(2000)
        before = self.resident_bytes()
        receive(RECEIVES)
        self.assertLess(self.resident_bytes() - before, MOST_GROWTH_BYTES)
        self.assertGreaterEqual(self.asker.counters()["tensors_received"], RECEIVES)

    def test_awaited(self):
        self.owner.publish("values", numpy.zeros(4096, numpy.float32))

        async def receive(count):
            for _ in range(count // 10):
                await asyncio.gather(*(self.asker.recv(self.peer, "values") for _ in range(10)))

        async def main():
            await receive(2000)
            before = self.resident_bytes()
            await receive(RECEIVES // 5)
            return self.resident_bytes() - before

        self.assertLess(asyncio.run(main()), MOST_GROWTH_BYTES)


if __name__ == "__main__":
    unittest.main(verbosity=2)
