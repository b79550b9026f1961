#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Parts of tensors from Python: boxes and ranges of bytes, densely or into a box of the destination."""
import asyncio
import unittest

import python_support
from python_support import WorkersCase, tensorlane

import numpy

Box = tensorlane.Box


class Parts(WorkersCase):
    def setUp(self):
        super().setUp()
        self.values = numpy.arange(120, dtype=numpy.int32).reshape(4, 5, 6)
        self.owner.publish("values", self.values, step=3)

    def recv(self, part, **options):
        return self.asker.recv_wait(self.peer, "values", part=part, **options)

    def test_box(self):
        got = self.recv(Box((1, 0, 2), (2, 5, 3)))
        self.assertEqual((got.shape, got.dtype, got.step), ((2, 5, 3), "I32", 3))
        numpy.testing.assert_array_equal(numpy.asarray(got), self.values[1:3, :, 2:5])
        into = numpy.zeros((2, 5, 3), numpy.int32)
        self.assertTrue(self.recv(Box([1, 0, 2], [2, 5, 3]), into=into, checksum=True).is_verified)
        numpy.testing.assert_array_equal(into, self.values[1:3, :, 2:5])

    def test_into_a_box(self):
        into = numpy.full((3, 6, 4), -1, numpy.int32)
        self.recv(Box((1, 0, 2), (2, 5, 3), into_start=(1, 1, 0)), into=into)
        expected = numpy.full((3, 6, 4), -1, numpy.int32)
        expected[1:3, 1:6, 0:3] = self.values[1:3, :, 2:5]
        numpy.testing.assert_array_equal(into, expected)

    def test_ranges(self):
        got = self.recv([(4, 8), (100, 3)])
        everything = self.values.tobytes()
        self.assertEqual((got.dtype, got.shape, bytes(got)), ("U8", (11,), everything[4:12] + everything[100:103]))
        into = bytearray(11)
        self.recv(((4, 8), (100, 3)), into=into)
        self.assertEqual(into, bytes(got))

    def test_only_the_part_travels(self):
        before = self.asker.counters()["bytes_received"]
        self.recv(Box((0, 0, 0), (1, 5, 6)))
        self.recv([(0, 7)])
        self.assertEqual(self.asker.counters()["bytes_received"] - before, 120 + 7)

    def test_many(self):
        parts = [Box((row, 0, 0), (1, 5, 6)) for row in range(4)] + [None, [(0, 4)]]
        into = [numpy.zeros((1, 5, 6), numpy.int32) for _ in range(4)] + [None, None]
        got = self.asker.recv_many_wait(self.peer, ["values"] * 6, parts=parts, into=into)
        numpy.testing.assert_array_equal(numpy.concatenate(into[:4]), self.values)
        numpy.testing.assert_array_equal(numpy.asarray(got[4]), self.values)
        self.assertEqual(bytes(got[5]), b"\0" * 4)

    def test_awaitable(self):
        async def main():
            one = await self.asker.recv(self.peer, "values", part=Box((3, 0, 0), (1, 1, 6)))
            return [one, *await self.asker.recv_many(self.peer, ["values"], parts=[Box((3, 0, 0), (1, 1, 6))])]

        for got in asyncio.run(asyncio.wait_for(main(), python_support.PATIENCE)):
            numpy.testing.assert_array_equal(numpy.asarray(got), self.values[3:, :1])

    def test_errors(self):
        packed = tensorlane.empty((4, 3), "I4")
        self.owner.publish("packed", packed)
        with self.assertRaises(tensorlane.FailedPrecondition):
            self.asker.recv_wait(self.peer, "packed", part=Box((0, 1), (4, 1)))
        for part, error in ((Box((4, 0, 0), (1, 5, 6)), tensorlane.OutOfRange), ([(470, 11)], tensorlane.OutOfRange),
                            (Box((0, 0), (1, 5)), tensorlane.Error), (Box((0, 0, 0), (1, 5)), ValueError),
                            (Box((0,) * 3, (1,) * 3, (0,)), ValueError), (Box((0,) * 17, (1,) * 17), ValueError),
                            ([], ValueError), (Box((-1, 0, 0), (1, 5, 6)), OverflowError), ([(0, -1)], OverflowError),
                            (Box("abc", (1,) * 3), TypeError), (7, TypeError), ([7], TypeError), ([(1,)], TypeError),
                            ([(1, 2, 3)], TypeError)):
            with self.subTest(part), self.assertRaises(error):
                self.recv(part)
            with self.subTest(part), self.assertRaises(error):
                self.asker.recv_many_wait(self.peer, ["values"], parts=[part])
        for parts in ([], [None] * 2, 7):
            with self.subTest(parts), self.assertRaises((ValueError, TypeError)):
                self.asker.recv_many_wait(self.peer, ["values"], parts=parts)
        self.assertEqual(self.asker.counters()["open_operations"], 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)
