#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Tensors of the Python package: what it takes from NumPy, buffers and DLPack, and what it gives to them."""
import array
import ctypes
import gc
import sys
import threading
import types
import unittest
import weakref
from unittest import mock

import python_support
from python_support import tensorlane

import numpy
from tensorlane import _arrays

DTYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "u2", "I16": "i2", "U32": "u4", "I32": "i4", "U64": "u8", "I64": "i8",
    "F16": "f2", "F32": "f4", "F64": "f8", "C64": "c8", "C128": "c16",
}
OWN_DTYPES = ["BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "I4", "U4", "F4", "F6_E2M3",
              "F6_E3M2"]


class OnlyDlpack:
    """Shows nothing of an object but DLPack, and what it was asked with."""

    def __init__(self, of, knows_versions=True):
        self.of = of
        self.knows_versions = knows_versions
        self.asked = []

    def __dlpack_device__(self):
        return self.of.__dlpack_device__()

    def __dlpack__(self, **options):
        self.asked.append(options)
        if "max_version" in options and not self.knows_versions:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return self.of.__dlpack__(**options)


class In(unittest.TestCase):
    def test_numpy(self):
        for name, letter in DTYPES.items():
            with self.subTest(name):
                values = numpy.arange(6).astype(letter).reshape(2, 3)
                tensor = tensorlane.wrap(values)
                self.assertEqual((tensor.dtype, tensor.shape, tensor.nbytes), (name, (2, 3), values.nbytes))
                self.assertEqual((tensor.device, tensor.readonly, tensor.is_dead), ("cpu", False, False))
                back = numpy.asarray(tensor)
                self.assertEqual(back.dtype, values.dtype)
                numpy.testing.assert_array_equal(back, values)
                self.assertTrue(numpy.shares_memory(back, values))

    def test_buffers(self):
        for source, dtype, shape in ((b"abc", "U8", (3,)), (bytearray(4), "U8", (4,)),
                                     (array.array("q", [1, 2]), "I64", (2,)), (array.array("f", []), "F32", (0,)),
                                     (memoryview(bytes(8)).cast("I", (2, 1)), "U32", (2, 1))):
            with self.subTest(source):
                tensor = tensorlane.wrap(source)
                self.assertEqual((tensor.dtype, tensor.shape), (dtype, shape))
                self.assertEqual(tensor.readonly, isinstance(source, bytes) or memoryview(source).readonly)

    def test_shapes(self):
        for shape in ((), (0,), (3, 0, 2), (1,) * 16):
            with self.subTest(shape):
                tensor = tensorlane.wrap(numpy.zeros(shape, numpy.float64))
                self.assertEqual(tensor.shape, shape)
                self.assertEqual(numpy.asarray(tensor).shape, shape)
                self.assertEqual(numpy.from_dlpack(tensor).shape, shape)
                self.assertEqual(memoryview(tensor).shape, shape)

    def test_refused(self):
        for source, error in ((numpy.zeros((4, 4))[:, ::2], ValueError), (numpy.zeros(3, ">f4"), ValueError),
                              (numpy.zeros(3, "M8[s]"), ValueError), (numpy.zeros((1,) * 17), ValueError),
                              (numpy.zeros(3, "i4,f4"), ValueError), (3, TypeError), ("text", TypeError)):
            with self.subTest(source), self.assertRaises(error):
                tensorlane.wrap(source)

    def test_dlpack(self):
        values = numpy.arange(6, dtype=numpy.int32).reshape(3, 2)
        for knows_versions in (False, True):
            producer = OnlyDlpack(tensorlane.wrap(values) if knows_versions else values, knows_versions)
            tensor = tensorlane.wrap(producer)
            self.assertEqual((tensor.dtype, tensor.shape), ("I32", (3, 2)))
            self.assertTrue(numpy.shares_memory(numpy.asarray(tensor), values))
            self.assertEqual(producer.asked[0], {"max_version": (1, 1)})
            self.assertEqual(len(producer.asked), 1 if knows_versions else 2)

    def test_dlpack_read_only(self):
        tensor = tensorlane.wrap(OnlyDlpack(tensorlane.wrap(b"fixed")))
        self.assertTrue(tensor.readonly)
        self.assertEqual(bytes(tensor), b"fixed")

    def test_dlpack_refused(self):
        with self.assertRaisesRegex(tensorlane.InvalidArgument, "row-major"):
            tensorlane.wrap(OnlyDlpack(numpy.zeros((4, 4))[:, ::2], False))
        failing = types.SimpleNamespace(__dlpack_device__=lambda: (1, 0), __dlpack__=None)
        with self.assertRaises(TypeError):
            tensorlane.wrap(failing)

    def test_memory_is_given_back(self):
        for source in (lambda values: values, lambda values: OnlyDlpack(values, False)):
            values = numpy.zeros(3)
            gone = weakref.ref(values)
            tensor = tensorlane.wrap(source(values))
            view = memoryview(tensor)
            del values, tensor
            gc.collect()
            self.assertIsNotNone(gone())
            del view
            gc.collect()
            self.assertIsNone(gone())


class Out(unittest.TestCase):
    def test_buffer_of_read_only(self):
        view = memoryview(tensorlane.wrap(b"abc"))
        self.assertTrue(view.readonly)
        self.assertFalse(numpy.asarray(tensorlane.wrap(b"abc")).flags.writeable)
        with self.assertRaises(TypeError):
            view[0] = 1

    def test_capsules(self):
        tensor = tensorlane.empty((2, 3))
        self.assertEqual(tensor.__dlpack_device__(), (1, 0))
        for options, name in (({}, "dltensor"), ({"max_version": None}, "dltensor"),
                              ({"max_version": (0, 8)}, "dltensor"), ({"max_version": (1, 0)}, "dltensor_versioned"),
                              ({"max_version": (1, 0), "dl_device": (1, 0), "copy": False}, "dltensor_versioned")):
            with self.subTest(options):
                self.assertIn(f'"{name}"', repr(tensor.__dlpack__(**options)))

    def test_read_only_and_copied(self):
        fixed = tensorlane.wrap(b"fixed")
        with self.assertRaisesRegex(BufferError, "read-only"):
            fixed.__dlpack__()
        self.assertEqual(flags_of(fixed.__dlpack__(max_version=(1, 0))), 1)
        self.assertEqual(flags_of(fixed.__dlpack__(max_version=(1, 0), copy=True)), 2)
        self.assertEqual(flags_of(tensorlane.empty((3,)).__dlpack__(max_version=(1, 0))), 0)
        copy = numpy.from_dlpack(OnlyCopy(fixed))
        self.assertEqual(copy.tobytes(), b"fixed")
        self.assertFalse(numpy.shares_memory(copy, numpy.asarray(fixed)))

    def test_orders_of_buffers(self):
        """Column-major order is refused where it is another one, and any order has that of the tensor."""
        writable, c_order, f_order, any_order = 0x1, 0x38, 0x58, 0x98
        get, release = ctypes.pythonapi.PyObject_GetBuffer, ctypes.pythonapi.PyBuffer_Release
        view = ctypes.create_string_buffer(256)
        for shape, flags, is_there in (((2, 3), c_order, True), ((2, 3), any_order, True), ((2, 3), f_order, False),
                                       ((2, 3), f_order | writable, False), ((1, 3, 1), f_order, True),
                                       ((), f_order, True), ((2, 0, 3), f_order, True)):
            with self.subTest(shape=shape, flags=flags):
                tensor = ctypes.py_object(tensorlane.empty(shape))
                if is_there:
                    get(tensor, view, flags)
                    release(view)
                else:
                    with self.assertRaisesRegex(BufferError, "row-major"):
                        get(tensor, view, flags)

    def test_devices(self):
        for device in ((8, 0), (99, 0)):
            with self.assertRaises(BufferError):
                tensorlane.empty((1,)).__dlpack__(dl_device=device)
        with self.assertRaises(BufferError):
            tensorlane.empty((1,)).__dlpack__(dl_device=(2, 0), copy=False)
        for name in ("max_version", "dl_device"):
            for wrong in (1, (1,), (1, 0, 0), ("1", "0"), object()):
                with self.subTest(name=name, wrong=wrong), self.assertRaises(TypeError):
                    tensorlane.empty((1,)).__dlpack__(**{name: wrong})

    def test_deleter_of_any_thread(self):
        """A consumer calls the deleter from a thread without Python's lock."""
        values = numpy.zeros(1000)
        gone = weakref.ref(values)
        capsule = tensorlane.wrap(values).__dlpack__(max_version=(1, 0))
        del values
        call = deleter_of(capsule)
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        python_support.wait_until(lambda: gone() is None, "the memory is given back")

    def test_capsules_that_nothing_takes(self):
        values = numpy.zeros(3)
        gone = weakref.ref(values)
        for options in ({}, {"max_version": (1, 1)}):
            tensorlane.wrap(values).__dlpack__(**options)
        del values
        self.assertIsNone(gone())

    def test_dtypes_that_numpy_lacks(self):
        absent = mock.patch.dict(sys.modules, ml_dtypes=None)
        absent.start()
        self.addCleanup(absent.stop)
        for name in OWN_DTYPES:
            with self.subTest(name):
                tensor = tensorlane.empty((2, 4), name)
                self.assertEqual((tensor.dtype, tensor.shape), (name, (2, 4)))
                self.assertIn("dltensor", repr(tensor.__dlpack__()))
                self.assertEqual(memoryview(tensor.as_bytes()).nbytes, tensor.nbytes)
                with self.assertRaisesRegex(BufferError, name):
                    memoryview(tensor)
                with self.assertRaisesRegex(TypeError, f"{name}; install a current ml_dtypes|no array like .* {name}"):
                    numpy.asarray(tensor)
                again = tensorlane.wrap(OnlyDlpack(tensor))
                self.assertEqual((again.dtype, again.shape), (name, (2, 4)))

    def test_dtypes_of_another_package(self):
        """ml_dtypes is not in Debian: here something of the same shape is in its place."""
        values = numpy.arange(4, dtype="u2")
        dtype = types.SimpleNamespace(name="bfloat16", itemsize=2, isnative=True)
        stand_in = types.SimpleNamespace(dtype=dtype, view=values.view)
        tensor = tensorlane._tensorlane._wrap_as(*_arrays.describe(stand_in))
        self.assertEqual((tensor.dtype, tensor.shape), ("BF16", (4,)))
        with mock.patch.dict(sys.modules, ml_dtypes=types.SimpleNamespace(bfloat16=numpy.dtype("u2"))):
            array = numpy.asarray(tensor)
        numpy.testing.assert_array_equal(array, values)
        dtype.isnative = False
        with self.assertRaisesRegex(tensorlane.InvalidArgument, "bfloat16 are in the other byte order"):
            _arrays.describe(stand_in)

    def test_dtypes_that_an_older_version_of_the_package_lacks(self):
        with (mock.patch.dict(sys.modules, ml_dtypes=types.SimpleNamespace()),
              self.assertRaisesRegex(TypeError, "F8_E8M0; install a current ml_dtypes")):
            numpy.asarray(tensorlane.empty((1,), "F8_E8M0"))

    def test_arrays_that_are_asked_for(self):
        values = numpy.arange(4, dtype="f4")
        tensor = tensorlane.wrap(values)
        self.assertTrue(numpy.shares_memory(tensor.__array__(copy=False), values))
        self.assertFalse(numpy.shares_memory(tensor.__array__(copy=True), values))
        self.assertEqual(tensor.__array__(dtype="f8").dtype, numpy.float64)
        with self.assertRaisesRegex(ValueError, "memory of its own"):
            tensor.__array__(dtype="f8", copy=False)

    def test_empty(self):
        self.assertEqual((tensorlane.empty((2,)).dtype, tensorlane.empty((), "I64").nbytes), ("F32", 8))
        shared = tensorlane.empty((8,), "U8", shared=True)
        self.assertEqual(bytes(shared), bytes(8))
        for arguments, error in (((2, "F32"), TypeError), (((-1,), "F32"), OverflowError), (((1,), "f32"), ValueError),
                                 (((1,), "STRING"), ValueError), (((1,) * 17,), ValueError),
                                 (((1 << 62, 8),), tensorlane.OutOfRange)):
            with self.subTest(arguments), self.assertRaises(error):
                tensorlane.empty(*arguments)


class OnlyCopy:
    def __init__(self, of):
        self.of = of

    def __dlpack__(self, stream=None):
        return self.of.__dlpack__(copy=True)


class Versioned(ctypes.Structure):
    """The beginning of what is in a capsule with a version."""
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64)]


def pointer_of(capsule):
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.POINTER(Versioned), [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, b"dltensor_versioned")


def flags_of(capsule):
    return pointer_of(capsule).contents.flags


def deleter_of(capsule):
    """Takes what is in the capsule. Returns a function that calls its deleter without Python's lock."""
    pointer = pointer_of(capsule)
    set_name = ctypes.pythonapi.PyCapsule_SetName
    set_name.argtypes = [ctypes.py_object, ctypes.c_char_p]
    name = b"used_dltensor_versioned"
    set_name(capsule, name)
    deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(Versioned))(pointer.contents.deleter)
    return lambda: (deleter(pointer), capsule, name)


if __name__ == "__main__":
    unittest.main(verbosity=2)
