// SPDX-License-Identifier: Apache-2.0
#include "python/module.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "python/block_index.h"
#include "python/docstrings.h"
#include "python/dtype.h"

bool py_module_is_forked(const struct py_module *module)
{
    return py_releases_are_of_parent(module->releases);
}

/* ------------------------------------------------------------------------------------------------------ errors -- */

PyObject *py_error_create(struct py_module *module, const struct tl_error *error, PyObject *peer, PyObject *key)
{
    PyObject *message = PyUnicode_DecodeUTF8(error->message, (Py_ssize_t)strlen(error->message), "replace");
    if (message == NULL) return NULL;
    PyObject *created = PyObject_CallMethod(module->errors, "_create", "iOOO", (int)error->code, message,
                                            peer != NULL ? peer : Py_None, key != NULL ? key : Py_None);
    Py_DECREF(message);
    return created;
}

PyObject *py_raise(struct py_module *module, const struct tl_error *error, PyObject *peer, PyObject *key)
{
    PyObject *created = py_error_create(module, error, peer, key);
    if (created == NULL) return NULL;
    PyErr_SetObject((PyObject *)Py_TYPE(created), created);
    Py_DECREF(created);
    return NULL;
}

PyObject *py_raise_text(struct py_module *module, enum tl_status status, const char *format, ...)
{
    struct tl_error error = {.code = status};
    va_list args;
    va_start(args, format);
    vsnprintf(error.message, sizeof(error.message), format, args);
    va_end(args);
    return py_raise(module, &error, NULL, NULL);
}

/* --------------------------------------------------------------------------------------------------- arguments -- */

int py_convert_timeout(PyObject *object, void *ret_timeout_ns)
{
    int64_t *timeout_ns = ret_timeout_ns;
    if (object == Py_None) {
        *timeout_ns = TL_TIMEOUT_DEFAULT;
        return 1;
    }
    double seconds = PyFloat_AsDouble(object);
    if (seconds == -1.0 && PyErr_Occurred()) return 0;
    if (isnan(seconds) || seconds < 0) {
        PyErr_SetString(PyExc_ValueError, "timeout is in seconds, at least 0; None: that of the configuration");
        return 0;
    }
    *timeout_ns = seconds < 9e9 ? (int64_t)(seconds * 1e9) : TL_TIMEOUT_NONE;
    return 1;
}

int py_shape_of(PyObject *shape, uint64_t ret_dims[TL_MAX_RANK])
{
    Py_ssize_t rank = PySequence_Size(shape);
    if (rank < 0) return -1;
    if (rank > TL_MAX_RANK) {
        PyErr_Format(PyExc_ValueError, "a shape of %zd dimensions; there may be %d", rank, TL_MAX_RANK);
        return -1;
    }
    for (Py_ssize_t i = 0; i < rank; i++) {
        PyObject *item = PySequence_GetItem(shape, i);
        PyObject *number = item != NULL ? PyNumber_Index(item) : NULL;
        Py_XDECREF(item);
        if (number == NULL) return -1;
        ret_dims[i] = PyLong_AsUnsignedLongLong(number);
        Py_DECREF(number);
        if (ret_dims[i] == (uint64_t)-1 && PyErr_Occurred()) return -1;
    }
    return (int)rank;
}

/* --------------------------------------------------------------------------------------------------- functions -- */

/* Returns the module if this process may use it, NULL with an exception. */
static struct py_module *usable_module(PyObject *self)
{
    struct py_module *module = PyModule_GetState(self);
    if (!py_module_is_forked(module)) return module;
    py_raise_text(module, TL_FAILED_PRECONDITION,
                  "this process was forked from one that has opened a worker, and can make no tensors; start processes "
                  "with the method \"spawn\"");
    return NULL;
}

static PyObject *module_empty(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"shape", "dtype", "shared", NULL};
    struct py_module *module = usable_module(self);
    PyObject *shape;
    const char *dtype = "F32";
    int is_shared = 0;
    if (module == NULL) return NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|s$p:empty", names, &shape, &dtype, &is_shared)) return NULL;
    uint64_t dims[TL_MAX_RANK];
    int rank = py_shape_of(shape, dims);
    if (rank < 0) return NULL;
    struct tl_tensor *tensor;
    struct tl_error error;
    enum tl_dtype of_name = py_dtype_of_name(dtype);
    if (of_name == TL_DTYPE_INVALID)
        return py_raise_text(module, TL_INVALID_ARGUMENT, "\"%s\" is no dtype; an example is \"F32\"", dtype);
    enum tl_status status = is_shared ? tl_tensor_create_shared(of_name, (unsigned)rank, dims, &tensor, &error)
                                      : tl_tensor_create(of_name, (unsigned)rank, dims, &tensor, &error);
    return status == TL_OK ? py_tensor_create(module, tensor, NULL) : py_raise(module, &error, NULL, NULL);
}

static PyObject *module_wrap(PyObject *self, PyObject *object)
{
    struct py_module *module = usable_module(self);
    struct tl_tensor *tensor = module != NULL ? py_tensor_of(module, object, false) : NULL;
    return tensor != NULL ? py_tensor_create(module, tensor, NULL) : NULL;
}

static PyObject *module_copy(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tensor", "to", NULL};
    struct py_module *module = usable_module(self);
    PyObject *object, *to_object = Py_None;
    struct tl_tensor *to = NULL, *copied = NULL;
    if (module == NULL) return NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O:copy", names, &object, &to_object)) return NULL;
    struct tl_tensor *tensor = py_tensor_of(module, object, false);
    if (tensor == NULL) return NULL;
    if (to_object != Py_None) to = py_tensor_of(module, to_object, true);
    if (to != NULL || to_object == Py_None) copied = py_tensor_copy(module, tensor, to);
    tl_tensor_put(tensor);
    tl_tensor_put(to);
    return copied != NULL ? py_tensor_create(module, copied, NULL) : NULL;
}

/* A buffer whose elements are those of a dtype that NumPy knows by another package alone. */
static PyObject *module_wrap_as(PyObject *self, PyObject *args)
{
    struct py_module *module = usable_module(self);
    PyObject *object;
    const char *dtype;
    if (module == NULL) return NULL;
    if (!PyArg_ParseTuple(args, "Os:_wrap_as", &object, &dtype)) return NULL;
    struct tl_tensor *tensor = py_tensor_of_buffer(module, object, false, py_dtype_of_name(dtype));
    return tensor != NULL ? py_tensor_create(module, tensor, NULL) : NULL;
}

static PyObject *module_stop(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct py_module *module = PyModule_GetState(self);
    py_releases_stop(module->releases);
    Py_RETURN_NONE;
}

static const struct {
    const char *name, *text;
} docstrings[] = {DOCSTRINGS};

/* For what is written in Python; docstrings of the rest are given where it is defined. */
static PyObject *module_docstrings(PyObject *self, PyObject *unused)
{
    (void)self;
    (void)unused;
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < sizeof(docstrings) / sizeof(docstrings[0]); i++) {
        PyObject *entry = Py_BuildValue("(ss)", docstrings[i].name, docstrings[i].text);
        if (entry == NULL || PyList_Append(list, entry) != 0) Py_CLEAR(list);
        Py_XDECREF(entry);
    }
    return list;
}

/* Whether this process can open no worker, because it was forked from one that had opened one. */
static PyObject *module_is_forked(PyObject *self, PyObject *unused)
{
    (void)unused;
    return PyBool_FromLong(py_module_is_forked(PyModule_GetState(self)));
}

static PyMethodDef functions[] = {
    {"empty", (PyCFunction)(void (*)(void))module_empty, METH_VARARGS | METH_KEYWORDS, DOC_empty},
    {"wrap", module_wrap, METH_O, DOC_wrap},
    {"copy", (PyCFunction)(void (*)(void))module_copy, METH_VARARGS | METH_KEYWORDS, DOC_copy},
    {"_wrap_as", module_wrap_as, METH_VARARGS, NULL},
    {"_index_add", py_index_add, METH_VARARGS, NULL},
    {"_index_remove", py_index_remove, METH_VARARGS, NULL},
    {"_index_read", py_index_read, METH_VARARGS, NULL},
    {"_docstrings", module_docstrings, METH_NOARGS, NULL},
    {"_is_forked", module_is_forked, METH_NOARGS, NULL},
    {"_stop", module_stop, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

/* ------------------------------------------------------------------------------------------------------ module -- */

static PyObject *add_type(PyObject *self, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(self, spec, NULL);
    if (type != NULL && PyModule_AddType(self, (PyTypeObject *)type) != 0) Py_CLEAR(type);
    return type;
}

static int module_exec(PyObject *self)
{
    struct py_module *module = PyModule_GetState(self);
    module->releases = py_releases_create();
    if (module->releases == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if ((module->errors = PyImport_ImportModule("tensorlane.errors")) == NULL) return -1;
    if ((module->tensor_type = add_type(self, &py_tensor_spec)) == NULL) return -1;
    if ((module->worker_type = add_type(self, &py_worker_spec)) == NULL) return -1;
    if ((module->queue_type = add_type(self, &py_queue_spec)) == NULL) return -1;
    if ((module->operation_type = add_type(self, &py_operation_spec)) == NULL) return -1;
    if (PyModule_AddIntConstant(self, "MAX_KEY_BYTES", TL_MAX_KEY_BYTES) != 0) return -1;
    return PyModule_AddStringConstant(self, "__version__", tl_version());
}

static int module_traverse(PyObject *self, visitproc visit, void *arg)
{
    struct py_module *module = PyModule_GetState(self);
    if (module == NULL) return 0;
    Py_VISIT(module->tensor_type);
    Py_VISIT(module->worker_type);
    Py_VISIT(module->queue_type);
    Py_VISIT(module->operation_type);
    Py_VISIT(module->errors);
    return 0;
}

static int module_clear(PyObject *self)
{
    struct py_module *module = PyModule_GetState(self);
    if (module == NULL) return 0;
    Py_CLEAR(module->tensor_type);
    Py_CLEAR(module->worker_type);
    Py_CLEAR(module->queue_type);
    Py_CLEAR(module->operation_type);
    Py_CLEAR(module->errors);
    return 0;
}

static void module_free(void *self)
{
    struct py_module *module = PyModule_GetState(self);
    if (module == NULL) return;
    module_clear(self);
    py_releases_put(module->releases);
    module->releases = NULL;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "tensorlane._tensorlane",
    .m_doc = "What the package tensorlane has in C.",
    .m_size = sizeof(struct py_module),
    .m_methods = functions,
    .m_slots = slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyObject *py_module_of(PyTypeObject *type)
{
    for (; type != NULL; type = PyType_GetSlot(type, Py_tp_base)) {
        PyObject *module = PyType_GetFlags(type) & Py_TPFLAGS_HEAPTYPE ? PyType_GetModule(type) : NULL;
        if (module != NULL && PyModule_GetDef(module) == &definition) return module;
        PyErr_Clear();
    }
    PyErr_SetString(PyExc_TypeError, "the type is not of the module tensorlane");
    return NULL;
}

PyMODINIT_FUNC PyInit__tensorlane(void);
PyMODINIT_FUNC PyInit__tensorlane(void)
{
    return PyModuleDef_Init(&definition);
}
