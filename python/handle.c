// SPDX-License-Identifier: Apache-2.0
/*
 * Operation: what a call that completes in a Queue returns. cancel() ends it early.
 *
 * An Operation that nothing refers to any more cancels what is still open. So an operation ends with what waits for it,
 * also when a signal raises an exception just after the call.
 */
#include "python/worker.h"

struct handle {
    PyObject_HEAD PyObject *module_object; /* so that the state stays; it is given back last */
    struct py_core *core;
    struct py_op *op; /* NULL: it is over */
};

static struct handle *handle_of(PyObject *self)
{
    return (struct handle *)self;
}

static void cancel(struct py_core *core, const struct py_op *op)
{
    if (!core->is_closing && !py_module_is_forked(core->module)) (void)!tl_cancel(core->worker, op->id);
}

/* Cancels an operation for which nothing waits. */
static void give_up(struct py_core *core, struct py_op *op)
{
    PyObject *token = op->token;
    op->handle = NULL;
    cancel(core, op);
    Py_INCREF(Py_None);
    op->token = Py_None;
    Py_XDECREF(token);
}

PyObject *py_operation_create(struct py_core *core, PyObject *module_object, struct py_op *op)
{
    if (op == NULL) return NULL;
    PyTypeObject *type = (PyTypeObject *)core->module->operation_type;
    PyObject *self = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) {
        give_up(core, op);
        return NULL;
    }
    Py_INCREF(module_object);
    handle_of(self)->module_object = module_object;
    handle_of(self)->core = py_core_get(core);
    handle_of(self)->op = op;
    op->handle = &handle_of(self)->op;
    return self;
}

static int handle_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(handle_of(self)->module_object);
    return 0;
}

static void handle_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject *module_object = handle_of(self)->module_object;
    PyObject_GC_UnTrack(self);
    if (handle_of(self)->op != NULL) give_up(handle_of(self)->core, handle_of(self)->op);
    py_core_put(handle_of(self)->core);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_XDECREF(module_object);
    Py_DECREF(type);
}

static PyObject *handle_cancel(PyObject *self, PyObject *unused)
{
    (void)unused;
    if (handle_of(self)->op != NULL) cancel(handle_of(self)->core, handle_of(self)->op);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"cancel", handle_cancel, METH_NOARGS, "Cancels the operation, unless it is over."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_dealloc, handle_dealloc},
    {Py_tp_traverse, handle_traverse},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec py_operation_spec = {
    .name = "tensorlane._tensorlane.Operation",
    .basicsize = sizeof(struct handle),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
