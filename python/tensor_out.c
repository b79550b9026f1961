// SPDX-License-Identifier: Apache-2.0
/*
 * Tensors for other packages, by DLPack. A capsule holds a reference to the tensor and nothing of Python, so that its
 * consumer may call the deleter from any thread, with or without Python's lock.
 */
#include "python/module.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "python/dtype.h"

/* What a capsule refers to. One of the two structs is used. */
struct export
{
    union {
        struct dlpack_managed managed;
        struct dlpack_versioned versioned;
    };
    struct tl_tensor *tensor;
    pid_t process;
    int64_t dims[TL_MAX_RANK];
    int64_t strides[TL_MAX_RANK];
};

/* After fork nothing of the library may be called, so that the child leaves the memory to the end of its process. */
static void export_destroy(struct export *export)
{
    if (export->process == getpid()) tl_tensor_put(export->tensor);
    free(export);
}

static void delete_managed(struct dlpack_managed *self)
{
    export_destroy(self->context);
}

static void delete_versioned(struct dlpack_versioned *self)
{
    export_destroy(self->context);
}

/* A capsule that nothing has consumed has its first name. */
static void destroy_capsule(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, DLPACK_CAPSULE_VERSIONED))
        delete_versioned(PyCapsule_GetPointer(capsule, DLPACK_CAPSULE_VERSIONED));
    else if (PyCapsule_IsValid(capsule, DLPACK_CAPSULE))
        delete_managed(PyCapsule_GetPointer(capsule, DLPACK_CAPSULE));
}

static struct dlpack_device device_of(const struct tl_tensor *tensor)
{
    struct tl_device device = tl_tensor_device(tensor);
    if (device.kind == TL_DEVICE_HOST) return (struct dlpack_device){DLPACK_CPU, 0};
    return (struct dlpack_device){DLPACK_CUDA, device.index};
}

/* Describes the tensor; dims and strides lie in the export. */
static struct dlpack_tensor describe(struct export *export, struct dlpack_dtype dtype)
{
    const struct tl_tensor *tensor = export->tensor;
    unsigned rank = tl_tensor_rank(tensor);
    int64_t stride = 1;
    for (unsigned i = rank; i-- > 0;) {
        export->dims[i] = (int64_t)tl_tensor_dims(tensor)[i];
        export->strides[i] = stride;
        if (export->dims[i] > 0) stride *= export->dims[i];
    }
    return (struct dlpack_tensor){
        .data = tl_tensor_data(tensor),
        .device = device_of(tensor),
        .rank = (int32_t)rank,
        .dtype = dtype,
        .dims = export->dims,
        .strides = export->strides,
    };
}

/* Takes the reference, also when it fails. */
static PyObject *create_capsule(struct tl_tensor *tensor, bool is_versioned, uint64_t flags, struct dlpack_dtype dtype)
{
    struct export *export = calloc(1, sizeof(*export));
    if (export == NULL) {
        tl_tensor_put(tensor);
        return PyErr_NoMemory();
    }
    export->tensor = tensor;
    export->process = getpid();
    PyObject *capsule;
    if (is_versioned) {
        export->versioned = (struct dlpack_versioned){DLPACK_MAJOR,     DLPACK_MINOR, export,
                                                      delete_versioned, flags,        describe(export, dtype)};
        capsule = PyCapsule_New(&export->versioned, DLPACK_CAPSULE_VERSIONED, destroy_capsule);
    } else {
        export->managed = (struct dlpack_managed){describe(export, dtype), export, delete_managed};
        capsule = PyCapsule_New(&export->managed, DLPACK_CAPSULE, destroy_capsule);
    }
    if (capsule == NULL) export_destroy(export);
    return capsule;
}

/* ------------------------------------------------------------------------------------------------------- copies -- */

/* Returns a new tensor with the same elements on a device. */
static struct tl_tensor *copy_to(struct py_module *module, const struct tl_tensor *tensor, struct tl_device device)
{
    struct tl_tensor *copy;
    struct tl_error error;
    enum tl_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = tl_tensor_create_on(device, tl_tensor_dtype(tensor), tl_tensor_rank(tensor), tl_tensor_dims(tensor), &copy,
                                 &error);
    if (status == TL_OK) {
        status = tl_tensor_copy(copy, tensor, &error);
        if (status != TL_OK) tl_tensor_put(copy);
    }
    Py_END_ALLOW_THREADS;
    if (status == TL_OK) return copy;
    py_raise(module, &error, NULL, NULL);
    return NULL;
}

struct tl_tensor *py_tensor_copy(struct py_module *module, const struct tl_tensor *tensor, struct tl_tensor *to)
{
    if (to == NULL) return copy_to(module, tensor, tl_tensor_device(tensor));
    struct tl_error error;
    enum tl_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = tl_tensor_copy(to, tensor, &error);
    Py_END_ALLOW_THREADS;
    if (status == TL_OK) return tl_tensor_get(to);
    py_raise(module, &error, NULL, NULL);
    return NULL;
}

/* Reads two numbers. format: "ii;", and what the object is. Returns false with an exception. */
static bool read_pair(PyObject *object, const char *format, int *ret_first, int *ret_second)
{
    PyObject *pair = PySequence_Tuple(object);
    bool is_read = pair != NULL && PyArg_ParseTuple(pair, format, ret_first, ret_second);
    Py_XDECREF(pair);
    return is_read;
}

/* Reads dl_device. Returns whether it is one that this package knows. */
static bool read_device(PyObject *object, struct tl_device *ret_device)
{
    int kind, index;
    if (!read_pair(object, "ii;dl_device is (kind, index)", &kind, &index)) return false;
    if (kind != DLPACK_CPU && kind != DLPACK_CUDA) {
        PyErr_Format(PyExc_BufferError, "a tensor cannot be given on a device of the kind %d", kind);
        return false;
    }
    *ret_device = (struct tl_device){kind == DLPACK_CPU ? TL_DEVICE_HOST : TL_DEVICE_CUDA, index};
    return true;
}

struct wish {
    PyObject *stream, *version, *device, *copy;
};

/* Returns a reference to the tensor, or to a copy where the consumer wants one; NULL with an exception. */
static struct tl_tensor *choose(struct py_module *module, struct tl_tensor *tensor, const struct wish *wish,
                                bool *ret_is_copied)
{
    struct tl_device device = tl_tensor_device(tensor), own = device;
    if (wish->device != Py_None && !read_device(wish->device, &device)) return NULL;
    bool is_there = device.kind == own.kind && device.index == own.index;
    int wants_copy = wish->copy == Py_None ? !is_there : PyObject_IsTrue(wish->copy);
    if (wants_copy < 0) return NULL;
    if (!wants_copy && !is_there) {
        PyErr_SetString(PyExc_BufferError, "the tensor is on another device and must not be copied");
        return NULL;
    }
    *ret_is_copied = wants_copy;
    return wants_copy ? copy_to(module, tensor, device) : tl_tensor_get(tensor);
}

/* Returns whether the consumer knows capsules with a version: 1, 0, or -1 with an exception. */
static int knows_versions(PyObject *version)
{
    if (version == Py_None) return 0;
    int major, minor;
    if (!read_pair(version, "ii;max_version is (major, minor)", &major, &minor)) return -1;
    return major >= DLPACK_MAJOR;
}

/* Makes the bytes visible in the consumer's stream. What was wrapped follows the legacy stream (call_dlpack), and all
 * that has come is visible in each. Returns false with an exception. */
static bool follow_stream(struct py_module *module, const struct tl_tensor *tensor, PyObject *stream)
{
    if (stream == Py_None || tl_tensor_device(tensor).kind == TL_DEVICE_HOST) return true;
    long long number = PyLong_AsLongLong(stream);
    if (number == -1 && PyErr_Occurred()) return false;
    if (number == TL_STREAM_DEFAULT || number < TL_STREAM_NONE) {
        PyErr_Format(PyExc_ValueError, "%R is no stream; 1 is the legacy stream, 2 that of the thread", stream);
        return false;
    }
    if (number == TL_STREAM_NONE || number == TL_STREAM_LEGACY) return true;
    struct tl_error error;
    enum tl_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = tl_tensor_wait(tensor, &error);
    Py_END_ALLOW_THREADS;
    if (status != TL_OK) py_raise(module, &error, NULL, NULL);
    return status == TL_OK;
}

PyObject *py_tensor_to_dlpack(struct py_module *module, struct tl_tensor *tensor, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"stream", "max_version", "dl_device", "copy", NULL};
    struct wish wish = {Py_None, Py_None, Py_None, Py_None};
    struct dlpack_dtype dtype;
    bool is_copied;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOO:__dlpack__", names, &wish.stream, &wish.version,
                                     &wish.device, &wish.copy))
        return NULL;
    int is_versioned = knows_versions(wish.version);
    if (is_versioned < 0) return NULL;
    if (tl_tensor_is_dead(tensor) || !py_dtype_to_dlpack(tl_tensor_dtype(tensor), &dtype))
        return PyErr_Format(PyExc_BufferError, "DLPack has no tensor that is %s",
                            tl_tensor_is_dead(tensor) ? "dead" : "of strings");
    struct tl_tensor *chosen = choose(module, tensor, &wish, &is_copied);
    if (chosen == NULL) return NULL;
    bool is_read_only = tl_tensor_is_read_only(chosen);
    if (is_read_only && !is_versioned) {
        tl_tensor_put(chosen);
        PyErr_SetString(PyExc_BufferError, "the tensor is read-only, which the consumer cannot be told without "
                                           "max_version; copy=True gives it memory of its own");
        return NULL;
    }
    if (!follow_stream(module, chosen, wish.stream)) {
        tl_tensor_put(chosen);
        return NULL;
    }
    uint64_t flags = (is_read_only ? DLPACK_READ_ONLY : 0) | (is_copied ? DLPACK_IS_COPIED : 0);
    return create_capsule(chosen, is_versioned, flags, dtype);
}

PyObject *py_tensor_dlpack_device(const struct tl_tensor *tensor)
{
    struct dlpack_device device = device_of(tensor);
    return Py_BuildValue("(ii)", (int)device.kind, (int)device.index);
}
