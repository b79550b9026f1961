// SPDX-License-Identifier: Apache-2.0
/*
 * Tensor: a reference to a tensor, and how it came. It refers to no Python object but its type, so that it is no part
 * of a cycle.
 */
#include "python/module.h"

#include <stdlib.h>
#include <string.h>

#include "python/docstrings.h"
#include "python/dtype.h"

struct py_tensor {
    PyObject_HEAD struct py_module *module;
    struct tl_tensor *tensor;
    uint64_t step;
    const char *path; /* static, as the reason */
    const char *path_reason;
    double duration_s;
    bool is_verified;
};

static struct py_tensor *tensor_of(PyObject *self)
{
    return (struct py_tensor *)self;
}

PyObject *py_tensor_create(struct py_module *module, struct tl_tensor *tensor, const struct tl_completion *completion)
{
    PyTypeObject *type = (PyTypeObject *)module->tensor_type;
    allocfunc allocate = type != NULL ? (allocfunc)PyType_GetSlot(type, Py_tp_alloc) : NULL;
    struct py_tensor *self = allocate != NULL ? (struct py_tensor *)allocate(type, 0) : NULL;
    if (self == NULL) {
        tl_tensor_put(tensor);
        if (type == NULL) PyErr_SetString(PyExc_RuntimeError, "the module tensorlane has ended");
        return NULL;
    }
    self->module = module;
    self->tensor = tensor;
    self->path = tl_path_name(completion != NULL ? completion->path : TL_PATH_NONE);
    self->path_reason = completion != NULL && completion->path_reason != NULL ? completion->path_reason : "";
    if (completion != NULL) {
        self->step = completion->step;
        self->duration_s = (double)completion->duration_ns * 1e-9;
        self->is_verified = completion->is_verified;
    }
    return (PyObject *)self;
}

struct tl_tensor *py_tensor_own(struct py_module *module, PyObject *object)
{
    return (PyObject *)Py_TYPE(object) == module->tensor_type ? tensor_of(object)->tensor : NULL;
}

static void tensor_dealloc(PyObject *self)
{
    struct py_module *module = tensor_of(self)->module;
    PyTypeObject *type = Py_TYPE(self);
    if (module != NULL && !py_module_is_forked(module)) {
        tl_tensor_put(tensor_of(self)->tensor);
        py_releases_run(module->releases);
    }
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* ------------------------------------------------------------------------------------------------------ buffers -- */

/* Fills shape and strides, which a consumer reads until it releases the view. Elements without a format are shown as
 * bytes. */
static int describe_buffer(Py_buffer *view, const struct tl_tensor *tensor, bool is_bytes, int flags)
{
    const uint64_t size_bytes = tl_tensor_size_bytes(tensor);
    const uint64_t *dims = is_bytes ? &size_bytes : tl_tensor_dims(tensor);
    unsigned rank = is_bytes ? 1 : tl_tensor_rank(tensor);
    Py_ssize_t *numbers = calloc(2 * rank + 1, sizeof(*numbers));
    if (numbers == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    Py_ssize_t stride = view->itemsize;
    for (unsigned i = rank; i-- > 0;) {
        numbers[i] = (Py_ssize_t)dims[i];
        numbers[rank + i] = stride;
        stride *= numbers[i];
    }
    view->internal = numbers;
    view->ndim = (int)rank;
    view->shape = flags & PyBUF_ND ? numbers : NULL;
    view->strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES ? numbers + rank : NULL;
    return 0;
}

/* Returns whether elements in row-major order are in column-major order too. */
static bool is_column_major(const struct tl_tensor *tensor)
{
    unsigned long_dims = 0;
    for (unsigned i = 0; i < tl_tensor_rank(tensor); i++)
        if (tl_tensor_dims(tensor)[i] > 1) long_dims++;
    return long_dims <= 1 || tl_tensor_element_count(tensor) == 0;
}

static int tensor_get_buffer(PyObject *self, Py_buffer *view, int flags)
{
    const struct tl_tensor *tensor = tensor_of(self)->tensor;
    const char *problem = NULL, *format = py_dtype_format(tl_tensor_dtype(tensor));
    bool is_read_only = tl_tensor_is_read_only(tensor);
    view->obj = NULL;
    if (format == NULL && (flags & PyBUF_FORMAT)) problem = "the buffer protocol has no elements like these";
    if (is_read_only && (flags & PyBUF_WRITABLE)) problem = "it is read-only";
    if ((flags & PyBUF_F_CONTIGUOUS) == PyBUF_F_CONTIGUOUS && format != NULL && !is_column_major(tensor))
        problem = "its order is row-major";
    if (tl_tensor_device(tensor).kind != TL_DEVICE_HOST) problem = "it is not in the memory of the host";
    if (tl_tensor_is_dead(tensor)) problem = "it is dead";
    if (tl_tensor_dtype(tensor) == TL_STRING) problem = "its strings are given by strings()";
    if (problem != NULL) {
        PyErr_Format(PyExc_BufferError, "a tensor of %s has no such buffer: %s", tl_dtype_name(tl_tensor_dtype(tensor)),
                     problem);
        return -1;
    }
    view->buf = tl_tensor_data(tensor);
    view->len = (Py_ssize_t)tl_tensor_size_bytes(tensor);
    view->readonly = is_read_only;
    view->format = flags & PyBUF_FORMAT ? (char *)format : NULL;
    view->itemsize = format != NULL ? tl_dtype_bits(tl_tensor_dtype(tensor)) / 8 : 1;
    view->suboffsets = NULL;
    if (describe_buffer(view, tensor, format == NULL, flags) != 0) return -1;
    Py_INCREF(self);
    view->obj = self;
    return 0;
}

static void tensor_release_buffer(PyObject *self, Py_buffer *view)
{
    (void)self;
    free(view->internal);
}

/* --------------------------------------------------------------------------------------------------- attributes -- */

static PyObject *get_dtype(PyObject *self, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(tl_dtype_name(tl_tensor_dtype(tensor_of(self)->tensor)));
}

static PyObject *get_shape(PyObject *self, void *unused)
{
    (void)unused;
    const struct tl_tensor *tensor = tensor_of(self)->tensor;
    PyObject *shape = PyTuple_New((Py_ssize_t)tl_tensor_rank(tensor));
    for (unsigned i = 0; shape != NULL && i < tl_tensor_rank(tensor); i++) {
        PyObject *size = PyLong_FromUnsignedLongLong(tl_tensor_dims(tensor)[i]);
        if (size == NULL || PyTuple_SetItem(shape, (Py_ssize_t)i, size) != 0) Py_CLEAR(shape);
    }
    return shape;
}

static PyObject *get_nbytes(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(tl_tensor_size_bytes(tensor_of(self)->tensor));
}

static PyObject *get_device(PyObject *self, void *unused)
{
    (void)unused;
    struct tl_device device = tl_tensor_device(tensor_of(self)->tensor);
    if (device.kind == TL_DEVICE_HOST) return PyUnicode_FromString("cpu");
    return PyUnicode_FromFormat("cuda:%d", (int)device.index);
}

/* To see whether two tensors share memory. */
static PyObject *get_address(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromVoidPtr(tl_tensor_data(tensor_of(self)->tensor));
}

static PyObject *get_is_dead(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(tl_tensor_is_dead(tensor_of(self)->tensor));
}

static PyObject *get_readonly(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(tl_tensor_is_read_only(tensor_of(self)->tensor));
}

static PyObject *tensor_repr(PyObject *self)
{
    const struct py_tensor *of = tensor_of(self);
    PyObject *shape = get_shape(self, NULL);
    if (shape == NULL) return NULL;
    PyObject *repr =
        PyUnicode_FromFormat("<tensorlane.Tensor %s %R step=%llu path=%s>", tl_dtype_name(tl_tensor_dtype(of->tensor)),
                             shape, (unsigned long long)of->step, of->path);
    Py_DECREF(shape);
    return repr;
}

static PyGetSetDef attributes[] = {
    {"dtype", get_dtype, NULL, DOC_Tensor_dtype, NULL},
    {"shape", get_shape, NULL, DOC_Tensor_shape, NULL},
    {"_address", get_address, NULL, NULL, NULL},
    {"nbytes", get_nbytes, NULL, DOC_Tensor_nbytes, NULL},
    {"device", get_device, NULL, DOC_Tensor_device, NULL},
    {"is_dead", get_is_dead, NULL, DOC_Tensor_is_dead, NULL},
    {"readonly", get_readonly, NULL, DOC_Tensor_readonly, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef members[] = {
    {"step", T_ULONGLONG, offsetof(struct py_tensor, step), READONLY, DOC_Tensor_step},
    {"path", T_STRING, offsetof(struct py_tensor, path), READONLY, DOC_Tensor_path},
    {"path_reason", T_STRING, offsetof(struct py_tensor, path_reason), READONLY, DOC_Tensor_path_reason},
    {"duration", T_DOUBLE, offsetof(struct py_tensor, duration_s), READONLY, DOC_Tensor_duration},
    {"is_verified", T_BOOL, offsetof(struct py_tensor, is_verified), READONLY, DOC_Tensor_is_verified},
    {NULL, 0, 0, 0, NULL},
};

/* ------------------------------------------------------------------------------------------------------ methods -- */

static PyObject *tensor_dlpack(PyObject *self, PyObject *args, PyObject *kwargs)
{
    return py_tensor_to_dlpack(tensor_of(self)->module, tensor_of(self)->tensor, args, kwargs);
}

static PyObject *tensor_dlpack_device(PyObject *self, PyObject *unused)
{
    (void)unused;
    return py_tensor_dlpack_device(tensor_of(self)->tensor);
}

/* NumPy calls this for what has no buffer. */
static PyObject *tensor_array(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"dtype", "copy", NULL};
    PyObject *dtype = Py_None, *copy = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OO:__array__", names, &dtype, &copy)) return NULL;
    PyObject *arrays = PyImport_ImportModule("tensorlane._arrays");
    PyObject *array = arrays != NULL ? PyObject_CallMethod(arrays, "of_tensor", "OOO", self, dtype, copy) : NULL;
    Py_XDECREF(arrays);
    return array;
}

static PyObject *tensor_strings(PyObject *self, PyObject *unused)
{
    (void)unused;
    const struct tl_tensor *tensor = tensor_of(self)->tensor;
    uint64_t count = tl_tensor_element_count(tensor);
    PyObject *strings = PyList_New(0);
    for (uint64_t i = 0; strings != NULL && i < count; i++) {
        struct tl_string string;
        struct tl_error error;
        if (tl_tensor_string(tensor, i, &string, &error) != TL_OK) {
            Py_CLEAR(strings);
            return py_raise(tensor_of(self)->module, &error, NULL, NULL);
        }
        PyObject *bytes = PyBytes_FromStringAndSize(string.data, (Py_ssize_t)string.len_bytes);
        if (bytes == NULL || PyList_Append(strings, bytes) != 0) Py_CLEAR(strings);
        Py_XDECREF(bytes);
    }
    return strings;
}

static void put_base(void *data, void *base)
{
    (void)data;
    tl_tensor_put(base);
}

static PyObject *tensor_as_bytes(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct py_module *module = tensor_of(self)->module;
    struct tl_tensor *base = tensor_of(self)->tensor, *bytes;
    uint64_t size_bytes = tl_tensor_size_bytes(base);
    struct tl_tensor_view view = {
        .size_bytes = sizeof(view),
        .dtype = TL_U8,
        .rank = 1,
        .dims = &size_bytes,
        .device = tl_tensor_device(base),
        .data = tl_tensor_data(base),
        .capacity_bytes = size_bytes,
        .read_only = tl_tensor_is_read_only(base),
        .release = put_base,
        .release_context = base,
    };
    struct tl_error error;
    if (tl_tensor_wrap(&view, &bytes, &error) != TL_OK) return py_raise(module, &error, NULL, NULL);
    (void)tl_tensor_get(base);
    PyObject *created = py_tensor_create(module, bytes, NULL);
    if (created == NULL) return NULL;
    struct py_tensor *to = tensor_of(created), *from = tensor_of(self);
    to->step = from->step;
    to->path = from->path;
    to->path_reason = from->path_reason;
    to->duration_s = from->duration_s;
    to->is_verified = from->is_verified;
    return created;
}

static PyMethodDef methods[] = {
    {"__dlpack__", (PyCFunction)(void (*)(void))tensor_dlpack, METH_VARARGS | METH_KEYWORDS, DOC_Tensor___dlpack__},
    {"__dlpack_device__", tensor_dlpack_device, METH_NOARGS, DOC_Tensor___dlpack_device__},
    {"__array__", (PyCFunction)(void (*)(void))tensor_array, METH_VARARGS | METH_KEYWORDS, DOC_Tensor___array__},
    {"as_bytes", tensor_as_bytes, METH_NOARGS, DOC_Tensor_as_bytes},
    {"strings", tensor_strings, METH_NOARGS, DOC_Tensor_strings},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_dealloc, tensor_dealloc},
    {Py_tp_repr, tensor_repr},
    {Py_tp_getset, attributes},
    {Py_tp_members, members},
    {Py_tp_methods, methods},
    {Py_bf_getbuffer, tensor_get_buffer},
    {Py_bf_releasebuffer, tensor_release_buffer},
    {Py_tp_doc, DOC_Tensor},
    {0, NULL},
};

PyType_Spec py_tensor_spec = {
    .name = "tensorlane.Tensor",
    .basicsize = sizeof(struct py_tensor),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
