// SPDX-License-Identifier: Apache-2.0
/*
 * Tensors around the memory of Python objects: a Tensor, a buffer (NumPy's arrays, array.array, bytes), or what has
 * __dlpack__ (torch). Nothing is copied, so elements must lie in row-major order without gaps.
 */
#include "python/module.h"

#include <stdlib.h>
#include <string.h>

#include "python/dtype.h"

/* Wraps memory of the host or of a device; release is the tensor's from now on, also when this fails. */
static struct tl_tensor *wrap(struct py_module *module, struct tl_tensor_view *view, struct py_release *release)
{
    struct tl_tensor *tensor;
    struct tl_error error;
    view->size_bytes = sizeof(*view);
    view->release = py_release_later;
    view->release_context = release;
    if (tl_tensor_wrap(view, &tensor, &error) == TL_OK) return tensor;
    py_raise(module, &error, NULL, NULL);
    py_release_run(release);
    return NULL;
}

/* Returns the bytes of a tensor, which is larger than any memory when they are too many. */
static uint64_t size_of(enum tl_dtype dtype, unsigned rank, const uint64_t *dims)
{
    uint64_t count = 1;
    for (unsigned i = 0; i < rank; i++)
        if (__builtin_mul_overflow(count, dims[i], &count)) return UINT64_MAX;
    uint64_t bits;
    if (__builtin_mul_overflow(count, tl_dtype_bits(dtype), &bits)) return UINT64_MAX;
    return bits / 8 + (bits % 8 != 0);
}

/* ------------------------------------------------------------------------------------------------------ buffers -- */

static struct tl_tensor *wrap_buffer(struct py_module *module, struct py_release *release, enum tl_dtype dtype)
{
    const Py_buffer *buffer = &release->view;
    uint64_t dims[TL_MAX_RANK];
    if (dtype == TL_DTYPE_INVALID) dtype = py_dtype_of_format(buffer->format, (size_t)buffer->itemsize);
    if (dtype == TL_DTYPE_INVALID || tl_dtype_bits(dtype) != 8 * (uint64_t)buffer->itemsize) {
        py_raise_text(module, TL_INVALID_ARGUMENT, "elements of the format \"%s\" are of no dtype of tensorlane",
                      buffer->format != NULL ? buffer->format : "B");
        py_release_run(release);
        return NULL;
    }
    if (buffer->ndim > TL_MAX_RANK) {
        py_raise_text(module, TL_INVALID_ARGUMENT, "the tensor has %d dimensions; there may be %d", buffer->ndim,
                      TL_MAX_RANK);
        py_release_run(release);
        return NULL;
    }
    for (int i = 0; i < buffer->ndim; i++)
        dims[i] = (uint64_t)buffer->shape[i];
    struct tl_tensor_view view = {
        .dtype = dtype,
        .rank = (unsigned)buffer->ndim,
        .dims = dims,
        .data = buffer->buf,
        .capacity_bytes = (uint64_t)buffer->len,
        .read_only = buffer->readonly != 0,
    };
    return wrap(module, &view, release);
}

struct tl_tensor *py_tensor_of_buffer(struct py_module *module, PyObject *object, bool wants_write, enum tl_dtype dtype)
{
    struct py_release *release = py_release_create(module->releases);
    if (release == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (wants_write ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, &release->view, flags) != 0) {
        release->view.obj = NULL;
        py_release_run(release);
        return NULL;
    }
    return wrap_buffer(module, release, dtype);
}

/* ------------------------------------------------------------------------------------------------------- DLPack -- */

/* Returns whether elements lie in row-major order without gaps. The stride of one element alone means nothing. */
static bool is_contiguous(const struct dlpack_tensor *tensor)
{
    int64_t stride = 1;
    for (int i = 0; i < tensor->rank; i++)
        if (tensor->dims[i] == 0) return true;
    for (int i = tensor->rank - 1; tensor->strides != NULL && i >= 0; i--) {
        if (tensor->dims[i] != 1 && tensor->strides[i] != stride) return false;
        stride *= tensor->dims[i];
    }
    return true;
}

static struct tl_tensor *wrap_dlpack(struct py_module *module, const struct dlpack_tensor *from,
                                     struct py_release *release, uint64_t flags, bool wants_write)
{
    bool is_host = from->device.kind == DLPACK_CPU || from->device.kind == DLPACK_CUDA_HOST;
    struct tl_tensor_view view = {
        .dtype = py_dtype_of_dlpack(from->dtype),
        .rank = (unsigned)from->rank,
        .dims = (const uint64_t *)from->dims,
        .device = {is_host ? TL_DEVICE_HOST : TL_DEVICE_CUDA, is_host ? 0 : from->device.index},
        .data = from->data,
        .offset_bytes = from->offset_bytes,
        .read_only = (flags & DLPACK_READ_ONLY) != 0,
        .stream = TL_STREAM_LEGACY,
    };
    bool is_padded = (flags & DLPACK_IS_PADDED) != 0 && from->dtype.bits % 8 != 0;
    const char *problem = NULL;
    if (!is_host && from->device.kind != DLPACK_CUDA) problem = "it is on a device that is neither the host nor CUDA";
    if (view.dtype == TL_DTYPE_INVALID || is_padded) problem = "its elements are of no dtype of tensorlane";
    if (from->rank < 0 || from->rank > TL_MAX_RANK) problem = "it has more than 16 dimensions";
    if (problem == NULL && !is_contiguous(from))
        problem = "its elements do not lie in row-major order without gaps; make it contiguous first";
    if (wants_write && view.read_only) problem = "it is read-only";
    if (problem != NULL) {
        py_raise_text(module, TL_INVALID_ARGUMENT, "the tensor cannot be used: %s", problem);
        py_release_run(release);
        return NULL;
    }
    uint64_t size_bytes = size_of(view.dtype, view.rank, view.dims);
    if (__builtin_add_overflow(from->offset_bytes, size_bytes, &view.capacity_bytes)) view.capacity_bytes = UINT64_MAX;
    return wrap(module, &view, release);
}

static struct tl_tensor *take_versioned(struct py_module *module, PyObject *capsule, bool wants_write)
{
    struct dlpack_versioned *managed = PyCapsule_GetPointer(capsule, DLPACK_CAPSULE_VERSIONED);
    struct py_release *release = managed != NULL ? py_release_create(module->releases) : NULL;
    if (release == NULL) {
        if (managed != NULL) PyErr_NoMemory();
        return NULL;
    }
    if (managed->major != DLPACK_MAJOR) {
        py_release_run(release); /* the capsule gives back what is in it */
        py_raise_text(module, TL_UNIMPLEMENTED, "the tensor is given by version %u of DLPack; this package knows %d",
                      managed->major, DLPACK_MAJOR);
        return NULL;
    }
    if (PyCapsule_SetName(capsule, DLPACK_CAPSULE_VERSIONED_USED) != 0) {
        py_release_run(release);
        return NULL;
    }
    release->versioned = managed;
    return wrap_dlpack(module, &managed->tensor, release, managed->flags, wants_write);
}

static struct tl_tensor *take_capsule(struct py_module *module, PyObject *capsule, bool wants_write)
{
    if (PyCapsule_IsValid(capsule, DLPACK_CAPSULE_VERSIONED)) return take_versioned(module, capsule, wants_write);
    struct dlpack_managed *managed = PyCapsule_GetPointer(capsule, DLPACK_CAPSULE);
    struct py_release *release = managed != NULL ? py_release_create(module->releases) : NULL;
    if (release == NULL) {
        if (managed != NULL) PyErr_NoMemory();
        return NULL;
    }
    if (PyCapsule_SetName(capsule, DLPACK_CAPSULE_USED) != 0) {
        py_release_run(release);
        return NULL;
    }
    release->managed = managed;
    return wrap_dlpack(module, &managed->tensor, release, 0, wants_write);
}

/* Returns the kind of device of what has __dlpack_device__, -1 with an exception. */
static long device_kind(PyObject *object)
{
    PyObject *device = PyObject_CallMethod(object, "__dlpack_device__", NULL);
    PyObject *kind = device != NULL ? PySequence_GetItem(device, 0) : NULL;
    Py_XDECREF(device);
    PyObject *number = kind != NULL ? PyNumber_Long(kind) : NULL;
    Py_XDECREF(kind);
    long value = number != NULL ? PyLong_AsLong(number) : -1;
    Py_XDECREF(number);
    return value;
}

/* Calls __dlpack__. On a GPU what has been written so far comes before what follows in its legacy stream, which is the
 * stream of the tensor that is made here. */
static PyObject *call_dlpack(PyObject *object, bool is_cuda, bool is_versioned)
{
    PyObject *method = PyObject_GetAttrString(object, "__dlpack__");
    PyObject *args = PyTuple_New(0), *kwargs = PyDict_New(), *capsule = NULL;
    PyObject *version = Py_BuildValue("(ii)", DLPACK_MAJOR, DLPACK_MINOR);
    PyObject *stream = PyLong_FromLong(TL_STREAM_LEGACY);
    if (method != NULL && args != NULL && kwargs != NULL && version != NULL && stream != NULL &&
        (!is_versioned || PyDict_SetItemString(kwargs, "max_version", version) == 0) &&
        (!is_cuda || PyDict_SetItemString(kwargs, "stream", stream) == 0))
        capsule = PyObject_Call(method, args, kwargs);
    Py_XDECREF(method);
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    Py_XDECREF(version);
    Py_XDECREF(stream);
    return capsule;
}

struct tl_tensor *py_tensor_of_dlpack(struct py_module *module, PyObject *object, bool wants_write)
{
    long kind = device_kind(object);
    if (kind == -1 && PyErr_Occurred()) return NULL;
    PyObject *capsule = call_dlpack(object, kind == DLPACK_CUDA, true);
    if (capsule == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) { /* a producer that knows no versions */
        PyErr_Clear();
        capsule = call_dlpack(object, kind == DLPACK_CUDA, false);
    }
    if (capsule == NULL) return NULL;
    struct tl_tensor *tensor = take_capsule(module, capsule, wants_write);
    Py_DECREF(capsule);
    return tensor;
}

/* ------------------------------------------------------------------------------------------------------- choice -- */

/* An array may have a dtype of another package than NumPy's, such as ml_dtypes: tensorlane._arrays says then which
 * bytes are elements of which dtype. Otherwise the exception with which its buffer was refused stays. */
static struct tl_tensor *of_refused_array(struct py_module *module, PyObject *object, bool wants_write)
{
    PyObject *type, *value, *traceback, *bytes;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *arrays = PyImport_ImportModule("tensorlane._arrays");
    PyObject *described = arrays != NULL ? PyObject_CallMethod(arrays, "describe", "O", object) : NULL;
    Py_XDECREF(arrays);
    if (described == Py_None) {
        Py_DECREF(described);
        PyErr_Restore(type, value, traceback);
        return NULL;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    const char *dtype;
    struct tl_tensor *tensor = NULL;
    if (described != NULL && PyArg_ParseTuple(described, "Os", &bytes, &dtype))
        tensor = py_tensor_of_buffer(module, bytes, wants_write, py_dtype_of_name(dtype));
    Py_XDECREF(described);
    return tensor;
}

struct tl_tensor *py_tensor_of(struct py_module *module, PyObject *object, bool wants_write)
{
    struct tl_tensor *own = py_tensor_own(module, object);
    if (own != NULL) return tl_tensor_get(own);
    if (PyObject_HasAttrString(object, "dtype") && PyObject_CheckBuffer(object)) {
        struct tl_tensor *tensor = py_tensor_of_buffer(module, object, wants_write, TL_DTYPE_INVALID);
        if (tensor != NULL || !PyErr_ExceptionMatches(PyExc_ValueError)) return tensor;
        return of_refused_array(module, object, wants_write);
    }
    if (PyObject_CheckBuffer(object)) return py_tensor_of_buffer(module, object, wants_write, TL_DTYPE_INVALID);
    if (PyObject_HasAttrString(object, "__dlpack__")) return py_tensor_of_dlpack(module, object, wants_write);
    PyErr_Format(PyExc_TypeError,
                 "%R is no tensor: neither of tensorlane, nor with __dlpack__, nor with the buffer protocol",
                 (PyObject *)Py_TYPE(object));
    return NULL;
}
