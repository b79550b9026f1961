// SPDX-License-Identifier: Apache-2.0
/*
 * The parts of the extension _tensorlane: what a module has, and what its files share.
 *
 * Objects: a Tensor (tensor.c), a Worker (worker.c), a Queue (queue.c), from which an event loop takes what has
 * completed, and an Operation (handle.c), which cancels what nothing waits for any more. All of them are used with
 * Python's lock held. They find the module's state in themselves, so that they work as long as they live, whatever has
 * become of the module.
 */
#ifndef PYTHON_MODULE_H
#define PYTHON_MODULE_H

#include "python/python.h"

#include <stdbool.h>

#include <tensorlane/tensorlane.h>

#include "python/releases.h"

struct py_module {
    PyObject *tensor_type;
    PyObject *worker_type;
    PyObject *queue_type;
    PyObject *operation_type;
    PyObject *errors;             /* the module tensorlane.errors */
    struct py_releases *releases; /* what the library has let go of */
};

/* Returns whether this process was forked from one that had opened a worker: nothing of the library may be called. */
bool py_module_is_forked(const struct py_module *module);

/* Returns the module of a type or of what it is derived from, borrowed; NULL with an exception. */
PyObject *py_module_of(PyTypeObject *type);

extern PyType_Spec py_tensor_spec;
extern PyType_Spec py_worker_spec;
extern PyType_Spec py_queue_spec;
extern PyType_Spec py_operation_spec;

/* ------------------------------------------------------------------------------------------------------ errors -- */

/* Creates the exception of an error. peer and key say what it is about; NULL: nothing. Returns NULL and raises what is
 * wrong when it cannot. */
PyObject *py_error_create(struct py_module *module, const struct tl_error *error, PyObject *peer, PyObject *key);

/* Raises the exception of an error; returns NULL. */
PyObject *py_raise(struct py_module *module, const struct tl_error *error, PyObject *peer, PyObject *key);

/* Raises an error that the package has found itself; returns NULL. */
PyObject *py_raise_text(struct py_module *module, enum tl_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* ----------------------------------------------------------------------------------------------------- tensors -- */

/* Creates a Tensor around a reference, which it takes, also when it fails. completion: how it came; NULL: it did not
 * come from a peer. */
PyObject *py_tensor_create(struct py_module *module, struct tl_tensor *tensor, const struct tl_completion *completion);

/* Returns the tensor of a Tensor, without a reference; NULL for any other object. */
struct tl_tensor *py_tensor_own(struct py_module *module, PyObject *object);

/* Returns a reference to the tensor of an object: a Tensor, or what has the buffer protocol or DLPack, whose memory is
 * not copied. wants_write: it must be memory that may be written. Returns NULL and raises an error when it cannot. */
struct tl_tensor *py_tensor_of(struct py_module *module, PyObject *object, bool wants_write);

/* The same for memory that is described by another dtype than that of its elements, as wide as these. */
struct tl_tensor *py_tensor_of_buffer(struct py_module *module, PyObject *object, bool wants_write,
                                      enum tl_dtype dtype);

/* The same for what has __dlpack__. */
struct tl_tensor *py_tensor_of_dlpack(struct py_module *module, PyObject *object, bool wants_write);

/* Copies a tensor into another one, or into a new one on the same device where `to` is NULL. Returns a reference to it;
 * NULL with an exception. Gives Python's lock up. */
struct tl_tensor *py_tensor_copy(struct py_module *module, const struct tl_tensor *tensor, struct tl_tensor *to);

/* The methods __dlpack__ and __dlpack_device__ of a tensor. */
PyObject *py_tensor_to_dlpack(struct py_module *module, struct tl_tensor *tensor, PyObject *args, PyObject *kwargs);
PyObject *py_tensor_dlpack_device(const struct tl_tensor *tensor);

/* Converts a shape, any sequence of integers. Returns the rank, or -1 with an exception. */
int py_shape_of(PyObject *shape, uint64_t ret_dims[TL_MAX_RANK]);

/* ------------------------------------------------------------------------------------------------------- times -- */

/* For PyArg_Parse: seconds, None (the default of the configuration) or infinity, as int64_t nanoseconds. */
int py_convert_timeout(PyObject *object, void *ret_timeout_ns);

#endif
