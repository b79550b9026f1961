#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Workers of the Python package: calls that wait, errors, peers, steps, Ctrl-C."""
import asyncio
import gc
import json
import os
import pathlib
import pickle
import select
import signal
import sys
import tempfile
import threading
import unittest

import python_support
from cli_support import free_ports
from python_support import WorkersCase, start_script, tensorlane, wait_until

import numpy

SECOND = {"timeout": 1}


class Calls(WorkersCase):
    def test_publish_and_recv(self):
        values = numpy.arange(100_000, dtype=numpy.float32).reshape(10, -1)
        self.owner.publish("weights", values, step=7)
        got = self.asker.recv_wait(self.peer, "weights", step=5)
        self.assertEqual((got.dtype, got.shape, got.step), ("F32", (10, 10_000), 7))
        self.assertIn(got.path, ("zero-copy", "bounce"))
        self.assertEqual(bool(got.path_reason), got.path != "zero-copy")
        self.assertGreater(got.duration, 0)
        self.assertFalse(got.is_verified)
        numpy.testing.assert_array_equal(numpy.asarray(got), values)
        self.assertTrue(self.asker.recv_wait(self.peer, "weights", checksum=True).is_verified)
        self.owner.withdraw("weights")
        with self.assertRaises(tensorlane.DeadlineExceeded):
            self.asker.recv_wait(self.peer, "weights", timeout=0.01)
        with self.assertRaises(tensorlane.NotFound) as caught:
            self.owner.withdraw("weights")
        self.assertEqual(caught.exception.key, "weights")

    def test_paths(self):
        self.owner.publish("small", b"12")
        self.asker.wait_for_peers([self.peer])
        python_support.wait_until(lambda: self.asker.recv_wait(self.peer, "small").path == "inline", "local is up")
        own = self.owner.recv_wait(self.owner.name, "small")
        self.assertEqual((own.path, own.readonly, bytes(own)), ("self", True, b"12"))
        values = bytearray(b"12")
        self.owner.publish("small", values)
        own = self.owner.recv_wait(self.owner.name, "small")
        self.assertTrue(numpy.shares_memory(numpy.asarray(own), numpy.asarray(values)))
        self.assertFalse(numpy.asarray(own).flags.writeable)
        other = self.open(protocol="grpc")
        got = other.recv_wait(other.add_peer(self.owner.address), "small")
        self.assertEqual((got.path, got.path_reason), ("grpc", "the protocol is grpc"))

    def test_into(self):
        values = numpy.arange(50, dtype=numpy.int16)
        self.owner.publish("values", values)
        array, buffer = numpy.zeros(50, numpy.int16), memoryview(bytearray(100)).cast("h")
        for into in (array, buffer, tensorlane.wrap(array), tensorlane.empty((50,), "I16")):
            got = self.asker.recv_wait(self.peer, "values", into=into)
            numpy.testing.assert_array_equal(numpy.asarray(into), values)
            numpy.testing.assert_array_equal(numpy.asarray(got), values)
            self.assertTrue(numpy.shares_memory(numpy.asarray(got), numpy.asarray(into)))
        for into, error in ((numpy.zeros(49, numpy.int16), tensorlane.FailedPrecondition),
                            (numpy.zeros(50, numpy.uint16), tensorlane.FailedPrecondition),
                            (bytes(100), (BufferError, ValueError)), (tensorlane.wrap(bytes(100)), ValueError),
                            (5, TypeError)):
            with self.subTest(into), self.assertRaises(error):
                self.asker.recv_wait(self.peer, "values", into=into)

    def test_callers_that_drive_the_worker(self):
        self.owner.publish("values", b"1234")
        with tensorlane.Worker(self.CONFIG, address="127.0.0.1:0", progress="caller") as driven:
            peer = driven.add_peer(self.owner.address)
            wait_until(lambda: driven.recv_wait(peer, "values").path == "inline", "local is up")
            self.assertEqual([bytes(got) for got in driven.recv_many_wait(peer, ["values"] * 3)], [b"1234"] * 3)
            with self.assertRaises(tensorlane.DeadlineExceeded):
                driven.recv_wait(peer, "none", timeout=0.01)
            for value in driven.subscribe_wait(peer, "values", timeout=python_support.PATIENCE):
                self.assertEqual(bytes(value), b"1234")
                break
            self.assertEqual(len(driven.list_wait(peer)), 1)
            with self.assertRaisesRegex(tensorlane.FailedPrecondition, "progress"):
                asyncio.run(driven.recv(peer, "values"))
        with self.assertRaises(ValueError):
            tensorlane.Worker(self.CONFIG, address="127.0.0.1:0", progress="threads")

    def test_a_mapped_file_that_is_cut(self):
        """It reads as zeros; without the worker's handler of SIGBUS the program would end."""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "values.npy"
            numpy.save(path, numpy.ones(1 << 20, "u1"))
            owner = self.open(publish=[str(path)])
            peer = self.asker.add_peer(owner.address)
            self.asker.wait_for_peers([peer])
            wait_until(lambda: self.asker.recv_wait(peer, "values", mapped=True).path == "mapped", "it is mapped")
            got = self.asker.recv_wait(peer, "values", mapped=True)
            os.truncate(path, 4096)
            self.assertEqual(bytes(got)[-4096:], bytes(4096))

    def test_numbers_of_tasks(self):
        for task in (1 << 32, -1):
            with self.assertRaises(OverflowError):
                tensorlane.Worker({"cluster": {"w": ["127.0.0.1:0"]}}, job="w", task=task)

    def test_a_name_without_a_cluster(self):
        with self.assertRaisesRegex(tensorlane.Error, "there is none at all$"):
            self.asker.recv_wait("nope", "values", timeout=1)

    def test_mapped(self):
        shared = tensorlane.empty((1 << 20,), "U8", shared=True)
        self.owner.publish("shared", shared)
        self.asker.wait_for_peers([self.peer])
        wait_until(lambda: self.asker.recv_wait(self.peer, "shared", mapped=True).path == "mapped", "it is mapped")
        got = self.asker.recv_wait(self.peer, "shared", mapped=True)
        self.assertTrue(got.readonly)
        self.assertEqual(bytes(got), bytes(1 << 20))

    def test_send(self):
        results = []
        thread = threading.Thread(target=lambda: results.append(self.owner.send_wait("one", b"shot", step=3)))
        thread.start()
        got = self.asker.recv_wait(self.peer, "one", step=3)
        thread.join()
        self.assertEqual((results, bytes(got), got.step), ([None], b"shot", 3))
        with self.assertRaises(tensorlane.DeadlineExceeded):
            self.owner.send_wait("none asks", b"", timeout=0.01)

    def test_recv_many(self):
        for i in range(20):
            self.owner.publish(f"row/{i}", numpy.full(3, i), step=i)
        rows = self.asker.recv_many_wait(self.peer, [f"row/{i}" for i in range(20)])
        self.assertEqual([numpy.asarray(row)[0] for row in rows], list(range(20)))
        self.assertEqual([row.step for row in rows], list(range(20)))
        into = [numpy.zeros(3, int), None]
        rows = self.asker.recv_many_wait(self.peer, [("row/4", 4), "row/5"], into=into)
        self.assertEqual((into[0][0], numpy.asarray(rows[1])[0]), (4, 5))
        self.assertEqual(self.asker.recv_many_wait(self.peer, []), [])

    def fail_in_part(self, keys):
        """Receives all but the last of the keys, which never comes; a slow machine gets more time for the others.
        Returns the error."""
        for timeout in python_support.TIMEOUTS:
            with self.assertRaises(tensorlane.DeadlineExceeded) as caught:
                self.asker.recv_many_wait(self.peer, keys, timeout=timeout)
            if not any(isinstance(one, tensorlane.Error) for one in caught.exception.results[:-1]):
                break
        return caught.exception

    def test_recv_many_of_hundreds(self):
        """They come with one wait, also beside one that fails; a group may be over before its members are."""
        keys = [f"row/{i}" for i in range(600)]
        for i, key in enumerate(keys):
            self.owner.publish(key, numpy.full(3, i))
        rows = self.asker.recv_many_wait(self.peer, keys)
        self.assertEqual([numpy.asarray(row)[0] for row in rows], list(range(600)))
        *rows, absent = self.fail_in_part([*keys, "absent"]).results
        self.assertEqual([numpy.asarray(row)[0] for row in rows], list(range(600)))
        self.assertIsInstance(absent, tensorlane.DeadlineExceeded)
        *rows, absent = self.asker.recv_many_wait(self.peer, [*keys, "absent"], timeout=600, min_count=600)
        self.assertEqual([numpy.asarray(row)[0] for row in rows], list(range(600)))
        self.assertIsInstance(absent, tensorlane.Cancelled)

    def test_recv_many_that_fails_in_part(self):
        self.owner.publish("there", b"1")
        error = self.fail_in_part(["there", "absent"])
        there, absent = error.results
        self.assertEqual((bytes(there), type(absent), absent.key), (b"1", tensorlane.DeadlineExceeded, "absent"))
        self.assertEqual(error.key, ("there", "absent"))
        again = pickle.loads(pickle.dumps(error))  # without the tensors
        self.assertEqual((type(again), str(again), again.peer, again.key, again.results),
                         (type(error), str(error), error.peer, error.key, None))
        there, absent = self.asker.recv_many_wait(self.peer, ["there", "absent"], min_count=1)
        self.assertEqual((bytes(there), type(absent)), (b"1", tensorlane.Cancelled))
        there, absent = self.asker.recv_many_wait(self.peer, ["there", "absent"], min_count=1, group_timeout=60)
        self.assertEqual(bytes(there), b"1")
        with self.assertRaises(tensorlane.DeadlineExceeded):
            self.asker.recv_many_wait(self.peer, ["absent"], timeout=600, group_timeout=0)

    def test_steps(self):
        self.owner.abort_step(5, "the batch is bad")
        with self.assertRaisesRegex(tensorlane.Aborted, "the batch is bad"):
            self.asker.recv_wait(self.peer, "gradient", step=5)
        self.owner.abort_step(6, "it is gone", tensorlane.DataLoss.code)
        with self.assertRaises(tensorlane.DataLoss):
            self.asker.recv_wait(self.peer, "gradient", step=6)
        self.assertEqual(self.owner.end_step(5), 0)
        results = []
        thread = threading.Thread(target=lambda: results.append(error_of(self.owner.send_wait, "unread", b"", step=7)))
        thread.start()
        wait_until(lambda: self.owner.counters()["held_tensors"] == 1, "it is held")
        self.assertEqual(self.owner.end_step(7), 1)
        thread.join()
        self.assertEqual(results, [tensorlane.Cancelled])

    def test_arguments(self):
        recv = self.asker.recv_wait
        for error, call in (
                (TypeError, lambda: recv(self.peer)), (TypeError, lambda: recv(self.peer, b"key")),
                (TypeError, lambda: recv(None, "key")), (ValueError, lambda: recv(self.peer, "a\0b")),
                (ValueError, lambda: recv(self.peer, "k" * 513)), (ValueError, lambda: recv(self.peer, "")),
                (OverflowError, lambda: recv(self.peer, "key", step=-1)),
                (OverflowError, lambda: recv(self.peer, "key", step=1 << 64)),
                (ValueError, lambda: recv(self.peer, "key", timeout=-1)),
                (ValueError, lambda: recv(self.peer, "key", timeout=float("nan"))),
                (tensorlane.NotFound, lambda: recv(12345, "key")),
                (tensorlane.NotFound, lambda: recv("/job:none/task:0", "key")),
                (ValueError, lambda: self.asker.recv_many_wait(self.peer, ["a"], into=[])),
                (TypeError, lambda: self.asker.recv_many_wait(self.peer, [5])),
                (TypeError, lambda: self.owner.publish("key", object()))):
            with self.subTest(), self.assertRaises(error):
                call()
        self.assertEqual(self.asker.counters()["open_operations"], 0)

    def test_closed(self):
        with self.open() as worker:
            self.assertFalse(worker.closed)
        self.assertTrue(worker.closed)
        worker.close()
        for call in (lambda: worker.recv_wait("ps:0", "key"), lambda: worker.name, worker.counters, worker.peers,
                     lambda: worker.publish("key", b"")):
            with self.assertRaisesRegex(tensorlane.FailedPrecondition, "closed"):
                call()
        self.assertEqual(worker.health(), (False, ("the worker is closed",)))

    def test_calls_that_wait_end_with_the_worker(self):
        calls = (lambda: self.asker.recv_wait(self.peer, "none"), lambda: self.asker.send_wait("none", b""),
                 lambda: self.asker.recv_many_wait(self.peer, ["none", "neither"]),
                 lambda: self.asker.wait_for_peers([self.asker.add_peer("127.0.0.1:9")]))
        errors = []
        threads = [threading.Thread(target=lambda call=call: errors.append(error_of(call))) for call in calls]
        for thread in threads:
            thread.start()
        wait_until(lambda: self.asker.counters()["open_operations"] >= 4, "all wait")
        self.asker.close()
        for thread in threads:
            thread.join()
        self.assertLessEqual(set(errors), {tensorlane.Cancelled, tensorlane.FailedPrecondition})
        self.assertEqual(len(errors), 4)


def error_of(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except Exception as error:
        return type(error)
    return None


class Errors(unittest.TestCase):
    def test_classes(self):
        classes = tensorlane.Error.__subclasses__()
        self.assertEqual(sorted(error.code for error in classes), list(range(1, 17)))
        for error in classes:
            self.assertIs(getattr(tensorlane, error.__name__), error)
            self.assertEqual(error.status, "".join(("_" if letter.isupper() else "") + letter.upper()
                                                   for letter in error.__name__)[1:])

    def test_configuration(self):
        with self.assertRaisesRegex(tensorlane.InvalidArgument, "clutser"):
            tensorlane.Worker({"clutser": {}}, job="ps")
        with self.assertRaises(tensorlane.NotFound):
            tensorlane.Worker({"cluster": {"ps": ["127.0.0.1:1"]}}, job="worker")
        with self.assertRaises(tensorlane.Error):
            tensorlane.Worker("/there/is/no/such.json", job="ps")
        self.assertTrue(issubclass(tensorlane.InvalidArgument, ValueError))
        self.assertTrue(issubclass(tensorlane.DeadlineExceeded, TimeoutError))


class Cluster(unittest.TestCase):
    """Workers of a cluster; that of the job "ps" listens at any free port of a task that nothing dials but itself."""

    def test_sources_of_the_configuration(self):
        config = {"cluster": {"ps": [f"127.0.0.1:{free_ports(1)[0]}"]}, "log": {"level": "error"}}
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "cluster.json")
            path.write_text(json.dumps(config), encoding="utf-8")
            for source in (config, path, str(path)):
                with tensorlane.Worker(source, job="ps", task=0) as worker, \
                        tensorlane.Worker(source, client=True) as client:
                    self.assertEqual((worker.name, client.name), ("/job:ps/task:0", ""))
                    worker.publish("key", b"value")
                    for name in ("ps:0", "/job:ps/task:0"):
                        self.assertEqual(bytes(client.recv_wait(name, "key")), b"value")
        os.environ["TF_CONFIG"] = json.dumps({"cluster": config["cluster"], "task": {"type": "ps", "index": 0}})
        self.addCleanup(os.environ.pop, "TF_CONFIG")
        with tensorlane.Worker() as worker:
            self.assertEqual(worker.name, "/job:ps/task:0")


class Peers(WorkersCase):
    def test_peers(self):
        self.owner.publish("key", b"value")
        self.asker.recv_wait(self.peer, "key")
        peers = {peer.id: peer for peer in self.asker.peers()}
        self.assertEqual((peers[self.peer].state, peers[self.peer].name, peers[self.peer].address),
                         ("up", self.owner.name, self.owner.address))
        self.assertEqual(peers[self.peer].incarnation, self.owner.incarnation)
        self.assertEqual(bytes(self.asker.recv_wait(self.owner.name, "key")), b"value")
        self.assertTrue(self.asker.health().is_healthy)
        self.asker.remove_peer(self.owner.name)
        with self.assertRaises(tensorlane.NotFound):
            self.asker.recv_wait(self.owner.name, "key")
        again = self.asker.add_peer(self.owner.address, name=self.owner.name, incarnation=self.owner.incarnation)
        self.assertNotEqual(again, self.peer)
        with self.assertRaises(tensorlane.AlreadyExists) as caught:
            self.asker.add_peer("127.0.0.1:9", name=self.owner.name)
        self.assertEqual(caught.exception.peer, "127.0.0.1:9")
        self.assertEqual(bytes(self.asker.recv_wait(self.owner.name, "key")), b"value")

    def test_bytes_of_what_came(self):
        """They say how they came, as the tensor does."""
        self.owner.publish("key", numpy.zeros(1000), step=3)
        got = self.asker.recv_wait(self.peer, "key", checksum=True)
        seen = got.as_bytes()
        for name in ("step", "path", "path_reason", "duration", "is_verified"):
            self.assertEqual(getattr(seen, name), getattr(got, name), name)
        self.assertEqual((seen.step, seen.is_verified), (3, True))
        self.assertNotEqual(seen.path, "none")

    def test_a_peer_that_is_not_there(self):
        absent = self.asker.add_peer("127.0.0.1:9")
        with self.assertRaises(tensorlane.DeadlineExceeded) as caught:
            self.asker.wait_for_peers([absent], timeout=0.2)
        self.assertEqual(caught.exception.peer, [absent])
        wait_until(lambda: not self.asker.health().is_healthy, "the peer is down")
        self.assertIn("127.0.0.1:9", self.asker.health().reasons[0])
        self.asker.wait_for_peers([self.peer, absent], min_count=1)
        with self.assertRaisesRegex(tensorlane.InvalidArgument, "cannot wait for 3 peers of 2; min_count is at most 2"):
            self.asker.wait_for_peers([self.peer, absent], min_count=3)

    def test_removed_while_it_is_waited_for(self):
        errors = []
        thread = threading.Thread(
            target=lambda: errors.append(error_of(self.asker.recv_wait, self.peer, "none", timeout=600)))
        thread.start()
        wait_until(lambda: self.asker.counters()["open_operations"] == 1, "it waits")
        self.asker.remove_peer(self.peer)
        thread.join()
        self.assertEqual(errors, [tensorlane.Cancelled])


class BlockingSubscriptions(WorkersCase):
    def test_published(self):
        steps = []
        self.owner.publish("weights", b"0")
        for value in self.asker.subscribe_wait(self.peer, "weights"):
            steps.append((value.step, bytes(value)))
            if value.step == 5:
                break
            self.owner.publish("weights", str(value.step + 1).encode(), step=value.step + 1)
            del value
        self.assertEqual(steps, [(step, str(step).encode()) for step in range(6)])
        gc.collect()
        wait_until(lambda: self.asker.counters()["open_operations"] == 0, "the subscription that was left has ended")

    def test_a_timeout_of_0(self):
        """What has come is there."""
        with self.asker.subscribe_wait(self.peer, "weights", timeout=0) as subscription:
            self.assertRaises(tensorlane.DeadlineExceeded, next, subscription)
            self.owner.publish("weights", b"", step=1)
            self.assertTrue(select.select([subscription._queue], [], [], python_support.PATIENCE)[0])
            self.assertEqual(next(subscription).step, 1)
            self.assertRaises(tensorlane.DeadlineExceeded, next, subscription)

    def test_into_and_timeout(self):
        into = [numpy.zeros(4, numpy.int64) for _ in range(2)]
        with self.asker.subscribe_wait(self.peer, "rows", into=into, timeout=0.01) as subscription:
            with self.assertRaises(tensorlane.DeadlineExceeded) as caught:
                next(subscription)
            self.assertEqual((caught.exception.peer, caught.exception.key), (self.peer, "rows"))
            self.owner.publish("rows", numpy.full(4, 3), step=3)
            while True:
                try:
                    value = next(subscription)
                    break
                except tensorlane.DeadlineExceeded:
                    continue
            self.assertTrue(any(numpy.shares_memory(numpy.asarray(value), one) for one in into))
            self.owner.publish("rows", numpy.full(3, 4), step=4)
            with self.assertRaises(tensorlane.FailedPrecondition):
                while True:
                    try:
                        next(subscription)
                    except tensorlane.DeadlineExceeded:
                        continue

    def test_end(self):
        """It ends with its peer, by close in another thread, and with its worker."""
        def wait(subscription, results):
            try:
                results.append(list(subscription))
            except tensorlane.Error as error:
                results.append(type(error))

        for end, expected in ((lambda one: one.close(), []), (lambda _: self.asker.remove_peer(self.peer),
                                                              tensorlane.Cancelled),
                              (lambda _: self.asker.close(), tensorlane.Cancelled)):
            self.peer = self.asker.add_peer(self.owner.address)
            subscription, results = self.asker.subscribe_wait(self.peer, "none"), []
            thread = threading.Thread(target=wait, args=(subscription, results))
            thread.start()
            wait_until(lambda: self.asker.counters()["open_operations"] == 1, "it is open")
            end(subscription)
            thread.join(python_support.PATIENCE)
            self.assertEqual(results, [expected])
            self.assertEqual(list(subscription), [])


class Interrupts(unittest.TestCase):
    def test_ctrl_c(self):
        """It ends each call that waits, and the worker works on."""
        for call in ('asker.recv_wait(peer, "none", timeout=600)', 'asker.send_wait("none", b"", timeout=600)',
                     'asker.recv_many_wait(peer, ["none"] * 3, timeout=600)',
                     'asker.wait_for_peers([asker.add_peer("127.0.0.1:9")])',
                     'next(asker.subscribe_wait(peer, "none"))',
                     'asker.pull_state_dict_wait(peer, timeout=600)',
                     *(f'asker.{what}, timeout=600)' for what in (
                         'put_wait(asker.add_peer("127.0.0.1:9"), "none", b""',
                         'list_wait(asker.add_peer("127.0.0.1:9")',
                         'stat_wait(asker.add_peer("127.0.0.1:9"), "none"',
                         'remove_wait(asker.add_peer("127.0.0.1:9"), "none"'))):
            with self.subTest(call):
                process = start_script(f"""
                    owner.publish("key", b"value")
                    try:
                        print("waiting", flush=True)
                        {call}
                    except KeyboardInterrupt:
                        print(bytes(asker.recv_wait(peer, "key")), flush=True)
                    asker.close()
                    owner.close()
                    """)
                self.addCleanup(process.kill)
                self.assertEqual(process.stdout.readline(), "waiting\n")
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=python_support.PATIENCE)
                self.assertEqual((out, process.returncode), ("b'value'\n", 0), err)

    def test_each_call_at_any_moment(self):
        """So it does each call, and what that was about is still whole; no call gets what another one waited for."""
        out = python_support.run_script("""
            values = numpy.arange(1000)
            state = {"one": numpy.zeros(3), "two": numpy.zeros((2, 2))}
            owner.publish("key", values)
            owner.publish_state_dict(state)
            asker.recv_wait(peer, "key")
            with asker.subscribe_wait(peer, "key") as subscription:
                next(subscription)
            def add_and_remove():
                asker.remove_peer(asker.add_peer("127.0.0.1:9"))
            def take_first():
                with asker.subscribe_wait(peer, "key") as subscription:
                    next(subscription)
            def send():
                try:
                    asker.send_wait("none", values, step=count + 1, timeout=0)
                except (tensorlane.DeadlineExceeded, tensorlane.AlreadyExists):
                    pass
            numbers = iter(range(1 << 30))
            def wait():
                key = f"none {next(numbers)}"
                try:
                    asker.recv_wait(peer, key, timeout=0.1)
                except tensorlane.DeadlineExceeded as error:
                    assert error.key == key, error
            calls = (lambda: asker.put_wait(peer, "put", values, may_go_back=True), lambda: asker.list_wait(peer),
                     lambda: asker.stat_wait(peer, "key"), lambda: asker.remove_wait(peer, "put"),
                     lambda: owner.publish("key", values), lambda: asker.wait_for_peers([peer]),
                     send, wait, take_first, add_and_remove,
                     lambda: owner.publish_state_dict(state), lambda: asker.pull_state_dict_wait(peer),
                     lambda: numpy.from_dlpack(tensorlane.wrap(values)), asker.peers, asker.counters,
                     lambda: asker.recv_wait(peer, "key", part=tensorlane.Box((1,), (5,))))
            def interrupt(*_):
                global is_interrupted
                is_interrupted = True  # Python ignores what is raised while an object ends
                raise KeyboardInterrupt
            signal.signal(signal.SIGALRM, interrupt)
            count = 0
            for call in calls:
                for _ in range(10):
                    is_interrupted = False
                    try:
                        signal.setitimer(signal.ITIMER_REAL, 0.001)
                        while not is_interrupted:
                            call()
                            count += 1
                    except KeyboardInterrupt:
                        pass
                call()
            gc.collect()
            while asker.counters()["open_operations"]:
                time.sleep(0.01)
            assert numpy.asarray(asker.recv_wait(peer, "key")).sum() == 499500
            print(len(asker.pull_state_dict_wait(peer)[0]), len(asker.peers()))
            asker.close()
            owner.close()
            """)
        self.assertRegex(out, r"^2 \d+\n$")

    def test_at_any_moment(self):
        """An exception of a signal handler ends calls wherever they are; nothing stays open, and all still works."""
        out = python_support.run_script("""
            owner.publish("key", b"value")
            asker.recv_wait(peer, "key")
            count = interrupted = 0
            def interrupt(*_):
                raise KeyboardInterrupt
            signal.signal(signal.SIGALRM, interrupt)
            delay = 0.001
            while interrupted < 300 or count == 0 and delay < 10:
                if interrupted >= 300:
                    delay *= 2  # the machine is too slow for all of these calls in so short a time
                try:
                    signal.setitimer(signal.ITIMER_REAL, delay)
                    while True:
                        asker.recv_wait(peer, "key", into=bytearray(5))
                        asker.recv_many_wait(peer, ["key"] * 3)
                        count += 1
                except KeyboardInterrupt:
                    interrupted += 1
            while asker.counters()["open_operations"]:
                time.sleep(0.01)
            assert bytes(asker.recv_wait(peer, "key")) == b"value"
            print(count > 0)
            asker.close()
            owner.close()
            """)
        self.assertEqual(out, "True\n")


if __name__ == "__main__":
    unittest.main(verbosity=2)
