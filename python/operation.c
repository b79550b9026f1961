// SPDX-License-Identifier: Apache-2.0
/* Operations: what a completion brings, and calls that wait for one. */
#include "python/worker.h"

#include <stdlib.h>
#include <string.h>

/* Calls that wait look for signals so often: Ctrl-C ends them, whichever thread of the process got the signal. */
#define WAIT_NS INT64_C(50000000)

struct py_op *py_op_create(struct py_queue *queue, PyObject *token, PyObject *peer, PyObject *key)
{
    struct py_op *op = calloc(1, sizeof(*op));
    if (op == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    Py_XINCREF(token);
    Py_XINCREF(peer);
    Py_XINCREF(key);
    op->token = token;
    op->peer = peer;
    op->key = key;
    op->queue = queue;
    op->next = queue->ops;
    op->link = &queue->ops;
    if (op->next != NULL) op->next->link = &op->next;
    queue->ops = op;
    return op;
}

void py_op_free(struct py_op *op)
{
    if (op->handle != NULL) *op->handle = NULL;
    *op->link = op->next;
    if (op->next != NULL) op->next->link = op->link;
    Py_XDECREF(op->token);
    Py_XDECREF(op->peer);
    Py_XDECREF(op->key);
    Py_XDECREF(op->results);
    free(op);
}

/* ------------------------------------------------------------------------------------------------------ results -- */

/* Takes the current exception as the error of the result, since there was no memory for what had come. */
static void take_exception(struct py_result *result)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    result->error = value;
}

/* Returns the key of a member of a group, borrowed. */
static PyObject *key_of(const struct py_op *op, uint64_t item)
{
    if (op->results == NULL || op->key == NULL || !PyTuple_Check(op->key)) return op->key;
    return PyTuple_GetItem(op->key, (Py_ssize_t)item);
}

/* What an operation that has succeeded without a tensor has brought; NULL with an exception. */
static PyObject *value_of(struct py_core *core, const struct tl_completion *completion)
{
    if (completion->listing != NULL) return py_listing_to_list(core->module, completion->listing);
    if (completion->kind == TL_OP_REMOVE) return PyLong_FromUnsignedLongLong(completion->removed_count);
    if (completion->kind == TL_OP_PUT)
        return Py_BuildValue("(ssKd)", tl_path_name(completion->path),
                             completion->path_reason != NULL ? completion->path_reason : "",
                             (unsigned long long)completion->bytes, (double)completion->duration_ns * 1e-9);
    Py_INCREF(Py_None);
    return Py_None;
}

/* Converts one completion. Takes what is in it. */
static void convert(struct py_core *core, struct tl_completion *completion, struct py_result *result)
{
    struct py_op *op = result->op;
    PyObject *key = completion->kind == TL_OP_RECV_MANY || completion->kind == TL_OP_SEND_MANY
                        ? op->key
                        : key_of(op, completion->item);
    if (completion->status.code != TL_OK) {
        tl_tensor_put(completion->tensor);
        result->error = py_error_create(core->module, &completion->status, op->peer, key);
    } else if (completion->tensor != NULL) {
        result->value = py_tensor_create(core->module, completion->tensor, completion);
    } else {
        result->value = value_of(core, completion);
    }
    tl_listing_destroy(completion->listing);
    if (result->value == NULL && result->error == NULL) take_exception(result);
}

/* Puts the result of a member into the list of its group. */
static void keep_member(struct py_result *result, uint64_t item)
{
    PyObject *of_member = result->value != NULL ? result->value : result->error;
    result->value = result->error = NULL;
    if (of_member != NULL) PyList_SetItem(result->op->results, (Py_ssize_t)item, of_member);
    if (result->op->open_count > 0) result->op->open_count--;
}

/* The group's own completion: its value is the list, and its error has the list as `results`. */
static void finish_group(struct py_result *result)
{
    if (result->error != NULL) {
        if (PyObject_SetAttrString(result->error, "results", result->op->results) != 0) PyErr_Clear();
        return;
    }
    Py_XDECREF(result->value);
    Py_INCREF(result->op->results);
    result->value = result->op->results;
}

bool py_op_take(struct py_core *core, struct tl_completion *completion, struct py_result *ret_result)
{
    struct py_op *op = completion->user_data;
    bool is_member = op->results != NULL && (completion->kind == TL_OP_RECV || completion->kind == TL_OP_SEND);
    *ret_result = (struct py_result){.op = op, .is_over = !is_member};
    if (completion->kind == TL_OP_SUBSCRIBE) ret_result->is_over = completion->is_last;
    if (op->token == Py_None) { /* nothing waits for it */
        tl_tensor_put(completion->tensor);
        tl_listing_destroy(completion->listing);
        if (ret_result->is_over) py_op_free(op);
        return false;
    }
    convert(core, completion, ret_result);
    if (is_member) {
        keep_member(ret_result, completion->item);
        return false;
    }
    if (op->results != NULL) finish_group(ret_result);
    return true;
}

void py_op_fail(struct py_core *core, struct py_op *op, struct py_result *ret_result)
{
    *ret_result = (struct py_result){.op = op, .is_over = true};
    if (!py_core_check(core)) take_exception(ret_result);
}

void py_result_free(struct py_result *result)
{
    Py_CLEAR(result->value);
    Py_CLEAR(result->error);
    if (result->is_over) py_op_free(result->op);
}

/* ------------------------------------------------------------------------------------------------------ waiting -- */

size_t py_op_awaited_count(const struct py_op *op)
{
    return op->open_count + 1;
}

/* Takes completions until the result of the operation is there. Returns whether it is. */
static bool wait_for_result(struct py_core *core, struct py_op *op, struct py_result *ret_result)
{
    struct tl_completion completions[16];
    struct tl_cq *cq = op->queue->cq;
    for (;;) {
        size_t count, min_count = py_op_awaited_count(op);
        Py_BEGIN_ALLOW_THREADS;
        count = tl_cq_wait_many(cq, completions, sizeof(completions) / sizeof(completions[0]), min_count, WAIT_NS);
        Py_END_ALLOW_THREADS;
        bool is_there = false;
        for (size_t i = 0; i < count; i++)
            is_there |= py_op_take(core, &completions[i], ret_result);
        if (is_there) return true;
        if (PyErr_CheckSignals() != 0) return false;
        if (py_module_is_forked(core->module)) return py_core_check(core); /* by the handler of a signal */
    }
}

PyObject *py_op_wait(struct py_core *core, struct py_op *op)
{
    struct py_queue *queue = op->queue;
    struct py_result result;
    PyObject *value = NULL;
    if (wait_for_result(core, op, &result)) {
        value = result.value;
        result.value = NULL;
        if (result.error != NULL) PyErr_SetObject((PyObject *)Py_TYPE(result.error), result.error);
        py_result_free(&result);
    }
    py_queue_give(core, queue);
    py_releases_run(core->module->releases);
    return value;
}
