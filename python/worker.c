// SPDX-License-Identifier: Apache-2.0
/* Worker: opening and closing. tensorlane.Worker is a class in Python that is derived from it. */
#include "python/worker_object.h"

#include <errno.h>
#include <string.h>

#include "python/docstrings.h"

static struct py_worker *worker_of(PyObject *self)
{
    return (struct py_worker *)self;
}

struct py_core *py_worker_core(PyObject *self)
{
    struct py_core *core = worker_of(self)->core;
    return py_core_check(core) ? core : NULL;
}

PyObject *py_worker_module(PyObject *self)
{
    return worker_of(self)->module_object;
}

const char *py_text(PyObject *object, const char *what)
{
    Py_ssize_t len_bytes;
    if (!PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be a str, not %R", what, (PyObject *)Py_TYPE(object));
        return NULL;
    }
    const char *text = PyUnicode_AsUTF8AndSize(object, &len_bytes);
    if (text == NULL || strlen(text) == (size_t)len_bytes) return text;
    PyErr_Format(PyExc_ValueError, "%s contains a NUL", what);
    return NULL;
}

int py_convert_uint64(PyObject *object, void *ret_number)
{
    PyObject *number = PyNumber_Index(object);
    if (number == NULL) return 0;
    unsigned long long value = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) return 0;
    *(uint64_t *)ret_number = value;
    return 1;
}

/* -------------------------------------------------------------------------------------------------- life cycle -- */

static PyObject *worker_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)args;
    (void)kwargs;
    PyObject *module_object = py_module_of(type);
    if (module_object == NULL) return NULL;
    Py_INCREF(module_object);
    struct py_worker *self = (struct py_worker *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) {
        Py_DECREF(module_object);
        return NULL;
    }
    self->module_object = module_object;
    self->module = PyModule_GetState(module_object);
    self->peers = PyDict_New();
    if (self->peers == NULL) Py_CLEAR(self);
    return (PyObject *)self;
}

static int worker_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(worker_of(self)->module_object);
    Py_VISIT(worker_of(self)->peers);
    return 0;
}

static int worker_clear(PyObject *self)
{
    Py_CLEAR(worker_of(self)->peers);
    return 0;
}

static void worker_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject *module_object = worker_of(self)->module_object;
    PyObject_GC_UnTrack(self);
    worker_clear(self);
    py_core_put(worker_of(self)->core);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_XDECREF(module_object);
    Py_DECREF(type);
}

static PyObject *worker_open(PyObject *self, PyObject *args)
{
    struct py_module *module = worker_of(self)->module;
    struct tl_worker_options options = {.size_bytes = sizeof(options)};
    int is_client, is_caller_driven;
    uint64_t task;
    if (!PyArg_ParseTuple(args, "zzzO&pzp:_open", &options.config_path, &options.config_json, &options.job,
                          py_convert_uint64, &task, &is_client, &options.address, &is_caller_driven))
        return NULL;
    if (task > UINT32_MAX) return PyErr_Format(PyExc_OverflowError, "task %llu is too large", (unsigned long long)task);
    options.task = (uint32_t)task;
    options.is_client = is_client;
    options.progress = is_caller_driven ? TL_PROGRESS_CALLER : TL_PROGRESS_THREAD;
    if (worker_of(self)->core != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the worker was opened before");
        return NULL;
    }
    if (py_module_is_forked(module))
        return py_raise_text(
            module, TL_FAILED_PRECONDITION,
            "this process was forked from one that has opened a worker, and cannot open another; start "
            "processes with the method \"spawn\"");
    if (!py_releases_start(module->releases))
        return py_raise_text(module, TL_RESOURCE_EXHAUSTED,
                             "no memory that the kernel clears in children of fork: %s; Linux 4.14 or later is needed",
                             strerror(errno));
    struct tl_worker *worker;
    struct tl_error error;
    enum tl_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = tl_guard_mapped_files(&error);
    if (status == TL_OK) status = tl_worker_open(&options, &worker, &error);
    Py_END_ALLOW_THREADS;
    if (status != TL_OK) return py_raise(module, &error, NULL, NULL);
    struct py_core *core = worker_of(self)->core == NULL ? py_core_create(module, worker) : NULL;
    if (core == NULL) {
        tl_worker_close(worker, 0);
        return PyErr_NoMemory();
    }
    worker_of(self)->core = core;
    Py_RETURN_NONE;
}

/* Returns whether the worker is closed, which it is not while another thread closes it. */
static PyObject *worker_close(PyObject *self, PyObject *args)
{
    int64_t timeout_ns;
    if (!PyArg_ParseTuple(args, "O&:_close", py_convert_timeout, &timeout_ns)) return NULL;
    struct py_core *core = worker_of(self)->core;
    if (core != NULL) py_core_close(core, timeout_ns);
    return PyBool_FromLong(core == NULL || core->worker == NULL);
}

static PyObject *worker_create_queue(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct py_core *core = py_worker_core(self);
    return core != NULL ? py_queue_object(core, worker_of(self)->module_object) : NULL;
}

/* --------------------------------------------------------------------------------------------------- attributes -- */

static PyObject *get_closed(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(worker_of(self)->core == NULL || worker_of(self)->core->is_closing);
}

static PyObject *get_name(PyObject *self, void *unused)
{
    (void)unused;
    struct py_core *core = py_worker_core(self);
    return core != NULL ? PyUnicode_FromString(tl_worker_name(core->worker)) : NULL;
}

static PyObject *get_address(PyObject *self, void *unused)
{
    (void)unused;
    struct py_core *core = py_worker_core(self);
    return core != NULL ? PyUnicode_FromString(tl_worker_address(core->worker)) : NULL;
}

static PyObject *get_incarnation(PyObject *self, void *unused)
{
    (void)unused;
    struct py_core *core = py_worker_core(self);
    return core != NULL ? PyLong_FromUnsignedLongLong(tl_worker_incarnation(core->worker)) : NULL;
}

static PyGetSetDef attributes[] = {
    {"closed", get_closed, NULL, DOC_Worker_closed, NULL},
    {"name", get_name, NULL, DOC_Worker_name, NULL},
    {"address", get_address, NULL, DOC_Worker_address, NULL},
    {"incarnation", get_incarnation, NULL, DOC_Worker_incarnation, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

#define WITH_KEYWORDS(function) (PyCFunction)(void (*)(void))(function), METH_VARARGS | METH_KEYWORDS

static PyMethodDef methods[] = {
    {"_open", worker_open, METH_VARARGS, NULL},
    {"_close", worker_close, METH_VARARGS, NULL},
    {"_create_queue", worker_create_queue, METH_NOARGS, NULL},
    {"publish", WITH_KEYWORDS(py_worker_publish), DOC_Worker_publish},
    {"withdraw", py_worker_withdraw, METH_O, DOC_Worker_withdraw},
    {"recv_wait", WITH_KEYWORDS(py_worker_recv_wait), DOC_Worker_recv_wait},
    {"send_wait", WITH_KEYWORDS(py_worker_send_wait), DOC_Worker_send_wait},
    {"_recv", py_worker_recv, METH_VARARGS, NULL},
    {"_send", py_worker_send, METH_VARARGS, NULL},
    {"recv_many_wait", WITH_KEYWORDS(py_worker_recv_many_wait), DOC_Worker_recv_many_wait},
    {"_recv_many", py_worker_recv_many, METH_VARARGS, NULL},
    {"_subscribe", py_worker_subscribe, METH_VARARGS, NULL},
    {"_put", py_worker_put, METH_VARARGS, NULL},
    {"_list", py_worker_list, METH_VARARGS, NULL},
    {"_stat", py_worker_stat, METH_VARARGS, NULL},
    {"_remove", py_worker_remove, METH_VARARGS, NULL},
    {"add_peer", WITH_KEYWORDS(py_worker_add_peer), DOC_Worker_add_peer},
    {"remove_peer", py_worker_remove_peer, METH_O, DOC_Worker_remove_peer},
    {"_peers", py_worker_peers, METH_NOARGS, NULL},
    {"wait_for_peers", WITH_KEYWORDS(py_worker_wait_for_peers), DOC_Worker_wait_for_peers},
    {"abort_step", WITH_KEYWORDS(py_worker_abort_step), DOC_Worker_abort_step},
    {"end_step", py_worker_end_step, METH_O, DOC_Worker_end_step},
    {"counters", py_worker_counters, METH_NOARGS, DOC_Worker_counters},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, worker_new},
    {Py_tp_dealloc, worker_dealloc},
    {Py_tp_traverse, worker_traverse},
    {Py_tp_clear, worker_clear},
    {Py_tp_getset, attributes},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec py_worker_spec = {
    .name = "tensorlane._tensorlane.Worker",
    .basicsize = sizeof(struct py_worker),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .slots = slots,
};
