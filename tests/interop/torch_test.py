#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Tensors of torch in every direction and of every dtype, those of ml_dtypes, and models of torch."""
import asyncio
import sys
import unittest

import python_support
from python_support import WorkersCase, tensorlane

try:
    import ml_dtypes
    import numpy
    import torch
except ImportError as missing:
    print(f"a package of PyPI is not there: {missing}")
    sys.exit(77)

DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "complex128": "C128", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
}


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


class Torch(WorkersCase):
    def assert_same(self, one, other):
        self.assertEqual((one.dtype, one.shape), (other.dtype, other.shape))
        self.assertTrue(torch.equal(bits(one), bits(other)))

    def test_every_dtype(self):
        for name, ours in DTYPES.items():
            dtype = getattr(torch, name)
            values = torch.arange(1, 13, dtype=torch.float32).reshape(3, 4).to(dtype)
            with self.subTest(name):
                self.owner.publish(name, values)
                got = self.asker.recv_wait(self.peer, name)
                self.assertEqual(got.dtype, ours)
                tensor = torch.from_dlpack(got)
                self.assert_same(tensor, values)
                into = torch.zeros(12, dtype=torch.uint8).repeat(values.element_size()).view(dtype).reshape(3, 4)
                self.asker.recv_wait(self.peer, name, into=into)
                self.assert_same(into, values)
                self.asker.put_wait(self.peer, name, into)
                self.assert_same(torch.from_dlpack(self.asker.recv_wait(self.peer, name)), values)

    def test_ml_dtypes(self):
        for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
                     "float8_e8m0fnu"):
            values = numpy.array([[0.5, 1], [2, 4]]).astype(getattr(ml_dtypes, name))
            with self.subTest(name):
                self.owner.publish(name, values)
                got = self.asker.recv_wait(self.peer, name)
                self.assertEqual(numpy.asarray(got).dtype, values.dtype)
                self.assertTrue((numpy.asarray(got) == values).all())
                self.assertEqual(torch.from_dlpack(got).to(torch.float32).tolist(), values.astype(float).tolist())
                into = numpy.zeros_like(values)
                self.asker.recv_wait(self.peer, name, into=into)
                self.assertTrue((into == values).all())

    def test_shapes(self):
        for shape in ((), (0,), (3, 0, 2), (1,), (1, 1, 5), (2,) * 12):
            values = torch.rand(shape, dtype=torch.float64)
            self.owner.publish("values", values)
            self.assert_same(torch.from_dlpack(self.asker.recv_wait(self.peer, "values")), values)

    def test_sent_and_many(self):
        values = [torch.full((1000,), i, dtype=torch.bfloat16) for i in range(8)]

        async def main():
            sends = [asyncio.ensure_future(self.owner.send(str(i), one)) for i, one in enumerate(values)]
            into = [torch.zeros_like(one) if i % 2 else None for i, one in enumerate(values)]
            got = await self.asker.recv_many(self.peer, [str(i) for i in range(8)], into=into)
            await asyncio.gather(*sends)
            return [into[i] if i % 2 else torch.from_dlpack(one) for i, one in enumerate(got)]

        for one, other in zip(asyncio.run(asyncio.wait_for(main(), python_support.PATIENCE)), values):
            self.assert_same(one, other)

    def test_subscription(self):
        into = [torch.zeros(4, dtype=torch.bfloat16) for _ in range(2)]
        with self.asker.subscribe_wait(self.peer, "values", into=into, timeout=python_support.PATIENCE) as values:
            for step in range(1, 5):
                self.owner.publish("values", torch.full((4,), step, dtype=torch.bfloat16), step=step)
                got = next(values)
                tensor = torch.from_dlpack(got)
                self.assertEqual((got.step, tensor.tolist()), (step, [step] * 4))
                self.assertIn(tensor.data_ptr(), [one.data_ptr() for one in into])
                del got, tensor

    def test_parts(self):
        table = torch.arange(4096 * 16, dtype=torch.float32).reshape(4096, 16).to(torch.bfloat16)
        self.owner.publish("table", table)
        into = torch.zeros(100, 32, dtype=torch.bfloat16)
        self.asker.recv_wait(self.peer, "table", part=tensorlane.Box((50, 0), (100, 16), (0, 16)), into=into)
        self.assert_same(into[:, 16:].contiguous(), table[50:150])
        self.assertEqual(into[:, :16].abs().sum(), 0)

    def test_memory_lives_as_long_as_a_tensor(self):
        self.owner.publish("values", torch.ones(1 << 20))
        tensor = torch.from_dlpack(self.asker.recv_wait(self.peer, "values"))
        self.asker.close()
        self.owner.close()
        self.assertEqual(tensor.add_(1).sum(), 2 << 20)

    def test_what_cannot_be_used(self):
        for tensor, error in ((torch.ones(3, 4).t(), tensorlane.InvalidArgument),
                              (torch.ones(3, requires_grad=True), BufferError),
                              (torch.ones(3).to_sparse(), BufferError),
                              (torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), ValueError)):
            with self.assertRaises(error):
                self.owner.publish("values", tensor)

    def test_model(self):
        torch.manual_seed(1)
        source = torch.nn.TransformerEncoderLayer(16, 2, 32, dtype=torch.bfloat16)
        self.owner.publish_state_dict(source, step=3)
        module = torch.nn.TransformerEncoderLayer(16, 2, 32, dtype=torch.bfloat16)
        _, step = self.asker.pull_state_dict_wait(self.peer, into=module)
        self.assertEqual(step, 3)
        for one, other in zip(module.parameters(), source.parameters(), strict=True):
            self.assert_same(one.detach(), other.detach())


if __name__ == "__main__":
    unittest.main(verbosity=2)
