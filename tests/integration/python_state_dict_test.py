#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""State dicts: whole models by name and step. In the place of torch there are arrays, and a class with state_dict."""
import asyncio
import threading
import types
import unittest
import unittest.mock

from python_support import WorkersCase, tensorlane

import numpy

from tensorlane import _state_dict


def model_of(value):
    embedding = numpy.full((100, 8), value, numpy.float32)
    return {"embedding": embedding, "layer.weight": numpy.full((8, 8), value), "layer.bias": numpy.full(8, value),
            "step": numpy.array(value), "none": numpy.zeros((0, 4)), "head": embedding}


class Module:
    """As a module of torch: its tensors are those of its parameters, which have gradients."""

    def __init__(self, arrays):
        self.arrays = arrays

    def state_dict(self):
        return {name: types.SimpleNamespace(detach=lambda array=array: array) for name, array in self.arrays.items()}


class Shard:
    def __init__(self, dim):
        self.dim = dim


class Replicate:
    pass


class Partial:
    pass


class Sharded:
    """As a DTensor: a process at a place of a mesh has a part of it."""

    def __init__(self, shape, local, placements, mesh, place):
        self.shape, self.local, self.placements = shape, local, placements
        self.device_mesh = types.SimpleNamespace(size=lambda dim: mesh[dim], get_coordinate=lambda: place)

    def to_local(self):
        return self.local


class StateDicts(WorkersCase):
    def assert_is(self, model, value):
        for name, array in model_of(value).items():
            numpy.testing.assert_array_equal(numpy.asarray(model[name]), array, name)

    def test_new_memory(self):
        self.owner.publish_state_dict(model_of(3), step=3)
        model, step = self.asker.pull_state_dict_wait(self.peer, step=2)
        self.assertEqual((step, list(model)), (3, list(model_of(3))))
        self.assert_is(model, 3)
        model, step = asyncio.run(self.asker.pull_state_dict(self.peer))
        self.assert_is(model, 3)

    def test_names_that_are_no_keys(self):
        """Nothing is published then, so that the step before stays whole."""
        self.owner.publish_state_dict(model_of(3), step=3)
        for name, error in (("n" * 510, tensorlane.InvalidArgument), ("a\0b", tensorlane.InvalidArgument),
                            ("\ud800", UnicodeEncodeError), (1, TypeError)):
            with self.subTest(name=name), self.assertRaises(error):
                self.owner.publish_state_dict({**model_of(5), name: numpy.zeros(4)}, step=5)
        model, step = self.asker.pull_state_dict_wait(self.peer, timeout=30)
        self.assertEqual(step, 3)
        self.assert_is(model, 3)

    def test_prefixes_that_are_no_keys(self):
        """Nothing is published under them."""
        for prefix, error in (("", tensorlane.InvalidArgument), (3, TypeError),
                              ("p" * 513, tensorlane.InvalidArgument)):
            with self.subTest(prefix=prefix), self.assertRaises(error):
                self.owner.publish_state_dict({"a": numpy.zeros(4)}, prefix=prefix)
        self.assertEqual(self.owner.counters()["published_tensors"], 0)

    def test_values_that_are_no_mapping(self):
        for call in (lambda: self.owner.publish_state_dict([numpy.zeros(4)]),
                     lambda: self.asker.pull_state_dict_wait(self.peer, into=[numpy.zeros(4)])):
            with self.assertRaisesRegex(TypeError, "a module or a mapping"):
                call()

    def test_what_is_no_state_dict(self):
        for index in (b"{", b"[]", b"\xff", b'{"a": 5}', b'{"a": {"key": 5, "dtype": "F32", "shape": []}}'):
            self.owner.publish("model", index)
            with self.subTest(index=index), self.assertRaisesRegex(tensorlane.FailedPrecondition, "no state dict"):
                self.asker.pull_state_dict_wait(self.peer, timeout=30)

    def test_into_a_module(self):
        self.owner.publish_state_dict(Module(model_of(5)), step=5)
        module, progress = Module(model_of(0)), []
        _, step = self.asker.pull_state_dict_wait(self.peer, into=module,
                                                  progress=lambda done, total: progress.append((done, total)))
        self.assert_is(module.arrays, 5)
        total = sum({array.ctypes.data: array.nbytes for array in module.arrays.values()}.values())
        self.assertEqual((step, progress), (5, [(total, total)]))

    def test_progress(self):
        self.addCleanup(setattr, _state_dict, "GROUP_BYTES", _state_dict.GROUP_BYTES)
        _state_dict.GROUP_BYTES = 100
        self.owner.publish_state_dict({str(i): bytes(60) for i in range(5)})
        progress = []
        self.asker.pull_state_dict_wait(self.peer, into={str(i): bytearray(60) for i in range(5)},
                                        progress=lambda *both: progress.append(both))
        self.assertEqual(progress, [(120, 300), (240, 300), (300, 300)])

    def pull_shard(self, whole, placements, mesh, place, part):
        """Pulls into what a place of a mesh has, and checks that this is the part, and that no other byte came."""
        local = numpy.zeros(whole[part].shape, whole.dtype)
        sharded = Sharded(whole.shape, local, placements, mesh, place)
        self.asker.pull_state_dict_wait(self.peer, into={"whole": numpy.zeros_like(whole)})
        index_bytes = self.asker.recv_wait(self.peer, "model").nbytes
        before = self.asker.counters()["bytes_received"]
        got, _ = self.asker.pull_state_dict_wait(self.peer, into={"whole": sharded})
        numpy.testing.assert_array_equal(local, whole[part])
        self.assertEqual(got["whole"].shape, local.shape)
        self.assertEqual(self.asker.counters()["bytes_received"] - before, local.nbytes + index_bytes)

    def test_shards(self):
        """Of a DTensor only the part travels that this process has; what torch.chunk leaves empty, nothing."""
        whole = numpy.arange(70, dtype=numpy.float32).reshape(7, 10)
        self.owner.publish_state_dict({"whole": whole})
        every = slice(None)
        for placements, mesh, place, part in (
                ([Shard(0)], (2,), (0,), slice(0, 4)), ([Shard(0)], (2,), (1,), slice(4, 7)),
                ([Shard(-1)], (4,), (3,), (every, slice(9, 10))), ([Shard(0)], (5,), (4,), slice(7, 7)),
                ([Replicate()], (2,), (1,), every), ([Replicate(), Shard(1)], (2, 2), (1, 0), (every, slice(0, 5))),
                ([Shard(0), Shard(1)], (2, 2), (1, 1), (slice(4, 7), slice(5, 10))),
                ([Shard(0), Shard(0)], (2, 2), (0, 1), slice(2, 4)),
                ([Shard(0)], (2,), None, (slice(0, 0), slice(0, 0)))):
            with self.subTest((placements, mesh, place)):
                self.pull_shard(whole, placements, mesh, place, part)

    def test_shards_that_do_not_fit(self):
        whole = numpy.zeros((4, 4))
        self.owner.publish_state_dict({"whole": whole})
        for sharded, error in ((Sharded((4, 4), whole[:2], [Partial()], (2,), (0,)), tensorlane.Unimplemented),
                               (Sharded((4, 4), whole[:1], [Shard(0)], (2,), (0,)), tensorlane.Unimplemented),
                               (Sharded((4, 8), whole, [Shard(1)], (2,), (0,)), tensorlane.FailedPrecondition)):
            with self.assertRaises(error):
                self.asker.pull_state_dict_wait(self.peer, into={"whole": sharded})
            with self.assertRaises(tensorlane.Unimplemented):
                self.owner.publish_state_dict({"whole": sharded})

    def test_shards_of_tied_weights(self):
        """The same part of one key comes once, and different parts of it come apart."""
        whole = numpy.arange(16.0).reshape(4, 4)
        self.owner.publish_state_dict({"embedding": whole, "head": whole, "rows": whole})
        columns, rows = numpy.zeros((4, 2)), numpy.zeros((2, 4))
        into = {name: Sharded((4, 4), columns, [Shard(1)], (2,), (1,)) for name in ("embedding", "head")}
        into["rows"] = Sharded((4, 4), rows, [Shard(0)], (2,), (0,))
        before = self.asker.counters()["tensors_received"]
        self.asker.pull_state_dict_wait(self.peer, into=into)
        numpy.testing.assert_array_equal(columns, whole[:, 2:])
        numpy.testing.assert_array_equal(rows, whole[:2])
        self.assertEqual(self.asker.counters()["tensors_received"] - before, 3)
        into["rows"] = Sharded((4, 4), columns.reshape(2, 4), [Shard(0)], (2,), (0,))
        with self.assertRaisesRegex(tensorlane.FailedPrecondition, "share memory"):
            self.asker.pull_state_dict_wait(self.peer, into=into)

    def test_tied_weights(self):
        """They travel once, also into a module that has them apart."""
        self.owner.publish_state_dict(model_of(1))
        self.assertEqual(self.owner.counters()["published_tensors"], 6)
        apart = {name: array.copy() for name, array in model_of(0).items()}
        before = self.asker.counters()["tensors_received"]
        self.asker.pull_state_dict_wait(self.peer, into=apart)
        self.assert_is(apart, 1)
        self.assertEqual(self.asker.counters()["tensors_received"] - before, 6)

    def test_what_does_not_fit(self):
        self.owner.publish_state_dict(model_of(1))
        into = model_of(0)
        into["another"] = into.pop("layer.bias")
        wrong = r"has also \['layer.bias'\], and lacks \['another'\]"
        with self.assertRaisesRegex(tensorlane.InvalidArgument, wrong) as caught:
            self.asker.pull_state_dict_wait(self.peer, into=into)
        self.assertEqual((caught.exception.peer, caught.exception.key), (self.peer, "model"))
        into = {**model_of(0), "layer.bias": numpy.zeros(9), "step": numpy.zeros((), numpy.int32)}
        wrong = r"layer.bias is I64 \(8,\), not F64 \(9,\); step is"
        with self.assertRaisesRegex(tensorlane.FailedPrecondition, wrong) as caught:
            self.asker.pull_state_dict_wait(self.peer, into=into)
        self.assertEqual((caught.exception.peer, caught.exception.key), (self.peer, "model"))
        self.assert_is({**into, "layer.bias": model_of(0)["layer.bias"], "step": numpy.array(0)}, 0)
        with self.assertRaises(tensorlane.Unimplemented):
            self.owner.publish_state_dict({"sharded": Sharded((1,), b"0", [], (), ())})

    def test_memory_that_is_shared_only_here(self):
        self.owner.publish_state_dict({"one": numpy.ones(8), "two": numpy.zeros(8), "none": numpy.zeros(0)})
        whole = numpy.full(12, 5.0)
        for into in ({"one": whole[:8], "two": whole[:8]}, {"one": whole[:8], "two": whole[4:]}):
            with self.assertRaisesRegex(tensorlane.FailedPrecondition, "one and two|two and one") as caught:
                self.asker.pull_state_dict_wait(self.peer, into={**into, "none": whole[:0]})
            self.assertEqual((caught.exception.peer, caught.exception.key), (self.peer, "model"))
        numpy.testing.assert_array_equal(whole, numpy.full(12, 5.0))
        whole = numpy.full(16, 5.0)
        self.asker.pull_state_dict_wait(self.peer, into={"one": whole[:8], "two": whole[8:], "none": whole[:0]})
        numpy.testing.assert_array_equal(whole, numpy.repeat((1.0, 0.0), 8))

    def test_a_publication_that_fails(self):
        """What it has published can be withdrawn, and so it can when a key has gone already."""
        publish = tensorlane.Worker.publish

        def publish_one(worker, key, tensor, step):
            if key != "model/one":
                raise tensorlane.ResourceExhausted("no memory")
            publish(worker, key, tensor, step)

        with (unittest.mock.patch.object(tensorlane.Worker, "publish", publish_one),
              self.assertRaises(tensorlane.ResourceExhausted)):
            self.owner.publish_state_dict({"one": numpy.ones(8), "two": numpy.ones(8)})
        self.assertEqual(self.owner.counters()["published_tensors"], 1)
        self.owner.withdraw_state_dict()
        self.assertEqual(self.owner.counters()["published_tensors"], 0)
        self.owner.publish_state_dict(model_of(1))
        self.owner.withdraw("model/layer.bias")
        self.owner.withdraw_state_dict()
        self.assertEqual(self.owner.counters()["published_tensors"], 0)
        with self.assertRaises(tensorlane.NotFound):
            self.owner.withdraw_state_dict()

    def test_copies(self):
        model = model_of(1)
        self.owner.publish_state_dict(model, copies=True)
        for array in model.values():
            array[...] = 9
        self.assert_is(self.asker.pull_state_dict_wait(self.peer)[0], 1)

    def test_publishing_again(self):
        """Names that are gone are withdrawn, and a pull has tensors of one step only."""
        self.owner.publish_state_dict(model_of(1), step=1)
        self.owner.publish_state_dict({"embedding": numpy.ones(3)}, step=2)
        self.assertEqual(self.owner.counters()["published_tensors"], 2)
        model, step = self.asker.pull_state_dict_wait(self.peer, step=1)
        self.assertEqual((list(model), step), (["embedding"], 2))
        self.owner.withdraw_state_dict()
        self.assertEqual(self.owner.counters()["published_tensors"], 0)
        with self.assertRaises(tensorlane.NotFound):
            self.owner.withdraw_state_dict()

    def test_prefixes_with_a_key_in_common(self):
        """The second state dict would be published in place of a tensor of the first one."""
        self.owner.publish_state_dict({"ema": numpy.ones(3)})
        with self.assertRaisesRegex(tensorlane.AlreadyExists, "model/ema is part .* under model; use") as caught:
            self.owner.publish_state_dict(model_of(1), prefix="model/ema")
        self.assertEqual(caught.exception.key, "model/ema")
        self.assertEqual(self.owner.counters()["published_tensors"], 2)
        self.owner.publish_state_dict({"mean": numpy.ones(3)})
        self.owner.publish_state_dict(model_of(1), prefix="model/ema")
        self.assert_is(self.asker.pull_state_dict_wait(self.peer, prefix="model/ema")[0], 1)

    def test_names_that_go_meanwhile(self):
        """A pull that has the index of a step, of which tensors are withdrawn then, brings the later step."""
        for pull in (self.asker.pull_state_dict_wait,
                     lambda *args, **options: asyncio.run(self.asker.pull_state_dict(*args, **options))):
            self.owner.publish_state_dict({"a": numpy.full(3, 1), "b": numpy.full(3, 1)}, step=1, prefix=pull.__name__)
            indexes = []

            def publish_again(index, *_):
                indexes.append(list(index))
                if len(indexes) == 1:
                    self.owner.publish_state_dict({"a": numpy.full(3, 2)}, step=2, prefix=pull.__name__)

            into = {"a": numpy.zeros(3, int), "b": numpy.zeros(3, int)}
            with unittest.mock.patch.object(_state_dict, "_check", publish_again):
                model, step = pull(self.peer, into=into, prefix=pull.__name__, timeout=2)
            self.assertEqual((step, list(model), indexes), (2, ["a"], [["a", "b"], ["a"]]))
            numpy.testing.assert_array_equal(into["a"], [2, 2, 2])
            self.owner.withdraw_state_dict(prefix=pull.__name__)
            with self.assertRaises(tensorlane.DeadlineExceeded):
                pull(self.peer, into=into, prefix=pull.__name__, timeout=0.1)

    def test_one_step(self):
        stop = threading.Event()

        def publish():
            step = 0
            while not stop.is_set():
                step += 1
                self.owner.publish_state_dict(model_of(step), step=step)
                stop.wait(0.002)

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            into, last = model_of(0), 0
            for _ in range(200):
                _, step = self.asker.pull_state_dict_wait(self.peer, into=into)
                self.assertGreaterEqual(step, last)
                self.assert_is(into, step)
                last = step
        finally:
            stop.set()
            thread.join()


if __name__ == "__main__":
    unittest.main(verbosity=2)
