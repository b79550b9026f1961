// SPDX-License-Identifier: Apache-2.0
/* Methods of Worker that publish at a peer, and that say and end what is published there. */
#include "python/worker_object.h"

/* What such a method is called with; no queue: it waits. */
struct request {
    enum tl_op_kind kind;
    PyObject *queue, *token, *peer, *text; /* the key or pattern */
    PyObject *tensor_object;
    struct tl_tensor *tensor;
    uint64_t step;
    int may_go_back;
    int64_t timeout_ns;
};

static enum tl_status submit(struct tl_worker *worker, tl_peer_id peer, const char *text, const struct request *request,
                             struct py_op *op, struct tl_error *ret_error)
{
    struct tl_cq *cq = op->queue->cq;
    struct tl_put_options options = {.size_bytes = sizeof(options), .may_go_back = request->may_go_back};
    switch (request->kind) {
    case TL_OP_PUT:
        return tl_put(worker, peer, text, request->step, request->tensor, &options, request->timeout_ns, cq, op,
                      &op->id, ret_error);
    case TL_OP_LIST:
        return tl_list(worker, peer, text, request->timeout_ns, cq, op, &op->id, ret_error);
    case TL_OP_STAT:
        return tl_stat(worker, peer, text, request->timeout_ns, cq, op, &op->id, ret_error);
    default:
        return tl_remove(worker, peer, text, request->timeout_ns, cq, op, &op->id, ret_error);
    }
}

/* Begins it on a queue; NULL with an exception. */
static struct py_op *begin(PyObject *self, struct py_core *core, struct py_queue *queue, struct request *request)
{
    tl_peer_id peer;
    struct tl_error error;
    const char *text =
        py_text(request->text, request->kind == TL_OP_PUT || request->kind == TL_OP_STAT ? "key" : "pattern");
    if (text == NULL || !py_worker_peer(self, request->peer, &peer)) return NULL;
    if (request->tensor_object != NULL &&
        (request->tensor = py_tensor_of(core->module, request->tensor_object, false)) == NULL)
        return NULL;
    enum tl_status status = TL_OK;
    struct py_op *op = NULL;
    if (py_core_check(core)) op = py_op_create(queue, request->token, request->peer, request->text);
    if (op != NULL) status = submit(core->worker, peer, text, request, op, &error);
    tl_tensor_put(request->tensor);
    if (status == TL_OK) return op;
    py_op_free(op);
    py_raise(core->module, &error, request->peer, request->text);
    return NULL;
}

/* Returns what a call that waits brings, otherwise the Operation. */
static PyObject *run(PyObject *self, struct request *request)
{
    bool waits = request->queue == Py_None;
    struct py_core *core = py_worker_core(self);
    if (core == NULL) return NULL;
    if (waits) request->token = NULL;
    struct py_queue *queue = waits ? py_queue_take(core) : py_queue_of(core->module, request->queue);
    struct py_op *op = queue != NULL ? begin(self, core, queue, request) : NULL;
    if (op != NULL) return waits ? py_op_wait(core, op) : py_operation_create(core, py_worker_module(self), op);
    if (waits && queue != NULL) py_queue_give(core, queue);
    return NULL;
}

PyObject *py_worker_put(PyObject *self, PyObject *args)
{
    struct request request = {.kind = TL_OP_PUT};
    if (!PyArg_ParseTuple(args, "OOOOOO&pO&:_put", &request.queue, &request.token, &request.peer, &request.text,
                          &request.tensor_object, py_convert_uint64, &request.step, &request.may_go_back,
                          py_convert_timeout, &request.timeout_ns))
        return NULL;
    return run(self, &request);
}

static PyObject *ask(PyObject *self, PyObject *args, enum tl_op_kind kind)
{
    struct request request = {.kind = kind};
    if (!PyArg_ParseTuple(args, "OOOOO&", &request.queue, &request.token, &request.peer, &request.text,
                          py_convert_timeout, &request.timeout_ns))
        return NULL;
    return run(self, &request);
}

PyObject *py_worker_list(PyObject *self, PyObject *args)
{
    return ask(self, args, TL_OP_LIST);
}

PyObject *py_worker_stat(PyObject *self, PyObject *args)
{
    return ask(self, args, TL_OP_STAT);
}

PyObject *py_worker_remove(PyObject *self, PyObject *args)
{
    return ask(self, args, TL_OP_REMOVE);
}

/* ----------------------------------------------------------------------------------------------------- listings -- */

static PyObject *annotations_of(const struct tl_listing_entry *entry)
{
    PyObject *dict = PyDict_New();
    for (size_t i = 0; dict != NULL && i < entry->annotation_count; i++) {
        PyObject *value = PyUnicode_FromString(entry->annotations[i].value);
        if (value == NULL || PyDict_SetItemString(dict, entry->annotations[i].key, value) != 0) Py_CLEAR(dict);
        Py_XDECREF(value);
    }
    return dict;
}

static PyObject *describe(const struct tl_listing_entry *entry)
{
    PyObject *shape = PyTuple_New(entry->rank);
    for (unsigned i = 0; shape != NULL && i < entry->rank; i++) {
        PyObject *size = PyLong_FromUnsignedLongLong(entry->dims[i]);
        if (size == NULL || PyTuple_SetItem(shape, i, size) != 0) Py_CLEAR(shape);
    }
    PyObject *annotations = shape != NULL ? annotations_of(entry) : NULL;
    if (annotations == NULL) {
        Py_XDECREF(shape);
        return NULL;
    }
    return Py_BuildValue("(sKsNKNN)", entry->key, (unsigned long long)entry->step, tl_dtype_name(entry->dtype), shape,
                         (unsigned long long)entry->tensor_bytes, annotations, PyBool_FromLong(entry->is_dead));
}

PyObject *py_listing_to_list(struct py_module *module, const struct tl_listing *listing)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < tl_listing_count(listing); i++) {
        struct tl_listing_entry entry = {.size_bytes = sizeof(entry)};
        struct tl_error error;
        PyObject *described = tl_listing_entry(listing, i, &entry, &error) == TL_OK
                                  ? describe(&entry)
                                  : py_raise(module, &error, NULL, NULL);
        if (described == NULL || PyList_Append(list, described) != 0) Py_CLEAR(list);
        Py_XDECREF(described);
    }
    return list;
}
