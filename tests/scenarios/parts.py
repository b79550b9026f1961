# SPDX-License-Identifier: Apache-2.0
"""Scenarios of parts of tensors: boxes, and ranges of bytes."""
import random

import exchange
from workers import Failed, Part

ROUNDS = 2
# Small and large parts; the last dimension is contiguous.
SHAPES = ((6, 10, 9), (20, 30, 700))
WHOLE, ROWS, COLUMNS, CORNER = "whole", "rows", "columns", "corner"


def box_of(kind, dims):
    """Returns the start and the size of a box; whole and rows are in one piece."""
    start, size = [0] * len(dims), list(dims)
    if kind in (ROWS, CORNER):
        start[0], size[0] = dims[0] // 3, dims[0] // 2
    if kind in (COLUMNS, CORNER):
        start[-1], size[-1] = dims[-1] // 4, dims[-1] // 2
    return tuple(start), tuple(size)


def cut(content, dims, start, size):
    """Returns the bytes of a box."""
    stride = len(content) // dims[0]
    if len(dims) == 1:
        return content[start[0] * stride:(start[0] + size[0]) * stride]
    return b"".join(cut(content[place * stride:(place + 1) * stride], dims[1:], start[1:], size[1:])
                    for place in range(start[0], start[0] + size[0]))


def paste(content, dims, start, size, part):
    """Returns the content with the bytes of a box replaced."""
    stride, count = len(content) // dims[0], len(part) // size[0]
    if len(dims) == 1:
        return content[:start[0] * stride] + part + content[(start[0] + size[0]) * stride:]
    pieces = [content[place * stride:(place + 1) * stride] for place in range(dims[0])]
    for place in range(size[0]):
        pieces[start[0] + place] = paste(pieces[start[0] + place], dims[1:], start[1:], size[1:],
                                         part[place * count:(place + 1) * count])
    return b"".join(pieces)


class Parts(exchange.Pair):
    """Of published and sent values, by itself and into a box of a destination."""
    def is_possible(self, kind, is_put_into_box=False):
        """Parts that are not in one piece are copied together by a processor."""
        return kind in (WHOLE, ROWS) or not (self.owner.kind or (is_put_into_box and self.receiver.kind))

    def receive(self, key, part, destination=None, step=0):
        op = self.here.ask(self.peer, key, step, destination, part=part)
        return self.here.wait(1)[op]

    def check(self, got, wanted):
        self.assertEqual("OK", got.status, got)
        self.assertEqual(wanted, got.tensor.bytes)
        self.assertTrue(got.is_verified)
        self.assertIn(got.path, self.paths)

    def test_boxes(self):
        """The second time the meta-data of the part is known. A new value has new bytes."""
        for dims in SHAPES:
            for step in range(ROUNDS):
                content = random.randbytes(dims[0] * dims[1] * dims[2])
                self.there.publish("box", self.there.make(content, dims), step)
                for kind in (WHOLE, ROWS, COLUMNS, CORNER):
                    start, size = box_of(kind, dims)
                    got = self.receive("box", Part(start, size), step=step)
                    if self.is_possible(kind):
                        self.check(got, cut(content, dims, start, size))
                        self.assertEqual((size, step), (got.tensor.dims, got.step))
                    else:
                        self.assertEqual("UNIMPLEMENTED", got.status, got)

    def test_into_a_destination(self):
        for dims in SHAPES:
            content = random.randbytes(dims[0] * dims[1] * dims[2])
            self.there.publish("mine", self.there.make(content, dims))
            for kind in (ROWS, COLUMNS, CORNER):
                if not self.is_possible(kind):
                    continue
                start, size = box_of(kind, dims)
                wanted = cut(content, dims, start, size)
                destination = self.here.make(bytes(len(wanted)), size)
                got = self.receive("mine", Part(start, size), destination)
                self.check(got, wanted)
                self.assertEqual(destination.address, got.tensor.address)

    def test_into_a_box(self):
        """What is around the box stays."""
        for dims in SHAPES:
            content = random.randbytes(dims[0] * dims[1] * dims[2])
            self.there.publish("placed", self.there.make(content, dims))
            for kind in (WHOLE, ROWS, COLUMNS, CORNER):
                start, size = box_of(kind, dims)
                before = random.randbytes(len(content))
                destination = self.here.make(before, dims)
                # Another place than that in the value.
                to = tuple(dim - count for dim, count in zip(dims, size))
                part = Part(start, size, destination_start=to)
                if self.is_possible(kind, is_put_into_box=True):
                    got = self.receive("placed", part, destination)
                    self.check(got, paste(before, dims, to, size, cut(content, dims, start, size)))
                    self.assertEqual(destination.address, got.tensor.address)
                elif self.receiver.kind:
                    with self.assertRaisesRegex(Failed, "not in one piece"):
                        self.receive("placed", part, destination)
                else:
                    self.assertEqual("UNIMPLEMENTED", self.receive("placed", part, destination).status)

    def test_ranges(self):
        for size in (100, 70001, 5 << 20):
            content = random.randbytes(size)
            self.there.publish("ranges", self.there.make(content))
            ranges = ((size // 2, size // 4), (0, 17), (size - 9, 9))
            got = self.receive("ranges", Part(ranges=ranges[:1]))
            self.check(got, content[size // 2:size // 2 + size // 4])
            got = self.receive("ranges", Part(ranges=ranges))
            if self.owner.kind:
                self.assertEqual("UNIMPLEMENTED", got.status, got)
            else:
                self.check(got, b"".join(content[start:start + count] for start, count in ranges))

    def test_sent(self):
        """A part of a sent value is all that comes of it. A wrong one leaves it to others."""
        for step, dims in enumerate(SHAPES):
            content = random.randbytes(dims[0] * dims[1] * dims[2])
            kind = COLUMNS if self.is_possible(COLUMNS) else ROWS
            start, size = box_of(kind, dims)
            self.there.send("sent", self.there.make(content, dims), step)
            self.assertEqual("OUT_OF_RANGE", self.receive("sent", Part(start, (dims[0] + 1,) + size[1:]),
                                                          step=step).status)
            self.check(self.receive("sent", Part(start, size), step=step), cut(content, dims, start, size))
            self.assertEqual("OK", self.there.wait(1).popitem()[1].status)

    def test_what_is_no_part(self):
        self.there.publish("small", self.there.make(bytes(100), (10, 10)))
        self.there.publish("words", self.there.make([b"a", b"b"]))
        for part in (Part((5, 0), (6, 10)), Part((0, 1 << 40), (1, 1)), Part((0,), (1,)), Part(ranges=((50, 51),))):
            self.assertEqual("OUT_OF_RANGE", self.receive("small", part).status)
        self.assertEqual("FAILED_PRECONDITION", self.receive("words", Part((0,), (1,))).status)
        destination = self.here.make(bytes(16), (4, 4))
        with self.assertRaisesRegex(Failed, "OUT_OF_RANGE"):
            self.receive("small", Part((0, 0), (2, 2), destination_start=(3, 3)), destination)
        self.check(self.receive("small", Part((1, 0), (2, 10))), bytes(20))
