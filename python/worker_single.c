// SPDX-License-Identifier: Apache-2.0
/* Methods of Worker that move one tensor: each as a call that waits, and as one that completes in a Queue. */
#include "python/part.h"
#include "python/worker_object.h"

/* What a receive is called with. */
struct receive {
    PyObject *peer, *key, *into, *part;
    uint64_t step;
    int64_t timeout_ns;
    int wants_checksum, may_map;
};

/* Begins a receive of a part, or of the whole where that is NULL. */
static struct py_op *begin_receive_of(PyObject *self, struct py_core *core, struct py_queue *queue, PyObject *token,
                                      const struct receive *receive, const struct tl_part *part)
{
    tl_peer_id peer;
    struct tl_error error;
    const char *key = py_text(receive->key, "key");
    if (key == NULL || !py_worker_peer(self, receive->peer, &peer)) return NULL;
    struct tl_recv_options options = {.size_bytes = sizeof(options),
                                      .wants_checksum = receive->wants_checksum,
                                      .may_map = receive->may_map,
                                      .part = part};
    if (receive->into != Py_None) {
        options.destination = py_tensor_of(core->module, receive->into, true);
        if (options.destination == NULL) return NULL;
    }
    enum tl_status status = TL_OK;
    struct py_op *op = NULL;
    if (py_core_check(core)) op = py_op_create(queue, token, receive->peer, receive->key); /* it may be closed now */
    if (op != NULL)
        status = tl_recv(core->worker, peer, key, receive->step, &options, receive->timeout_ns, queue->cq, op, &op->id,
                         &error);
    tl_tensor_put(options.destination);
    if (status == TL_OK) return op;
    py_op_free(op);
    py_raise(core->module, &error, receive->peer, receive->key);
    return NULL;
}

/* Begins a receive on a queue; NULL with an exception. */
static struct py_op *begin_receive(PyObject *self, struct py_core *core, struct py_queue *queue, PyObject *token,
                                   const struct receive *receive)
{
    if (receive->part == Py_None) return begin_receive_of(self, core, queue, token, receive, NULL);
    struct py_part part;
    struct py_op *op = NULL;
    if (py_part_init(&part, receive->part)) op = begin_receive_of(self, core, queue, token, receive, &part.part);
    py_part_fini(&part);
    return op;
}

PyObject *py_worker_recv_wait(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"peer", "key", "step", "into", "timeout", "checksum", "mapped", "part", NULL};
    struct receive receive = {.into = Py_None, .part = Py_None, .timeout_ns = TL_TIMEOUT_DEFAULT};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|O&$OO&ppO:recv_wait", names, &receive.peer, &receive.key,
                                     py_convert_uint64, &receive.step, &receive.into, py_convert_timeout,
                                     &receive.timeout_ns, &receive.wants_checksum, &receive.may_map, &receive.part))
        return NULL;
    struct py_core *core = py_worker_core(self);
    struct py_queue *queue = core != NULL ? py_queue_take(core) : NULL;
    if (queue == NULL) return NULL;
    struct py_op *op = begin_receive(self, core, queue, NULL, &receive);
    if (op != NULL) return py_op_wait(core, op);
    py_queue_give(core, queue);
    return NULL;
}

PyObject *py_worker_recv(PyObject *self, PyObject *args)
{
    PyObject *queue_object, *token;
    struct receive receive = {.into = Py_None};
    if (!PyArg_ParseTuple(args, "OOOOO&OO&ppO:_recv", &queue_object, &token, &receive.peer, &receive.key,
                          py_convert_uint64, &receive.step, &receive.into, py_convert_timeout, &receive.timeout_ns,
                          &receive.wants_checksum, &receive.may_map, &receive.part))
        return NULL;
    struct py_core *core = py_worker_core(self);
    struct py_queue *queue = core != NULL ? py_queue_of(core->module, queue_object) : NULL;
    struct py_op *op = queue != NULL ? begin_receive(self, core, queue, token, &receive) : NULL;
    return py_operation_create(core, py_worker_module(self), op);
}

/* -------------------------------------------------------------------------------------------------------- sends -- */

struct send {
    PyObject *key, *tensor;
    uint64_t step;
    int64_t timeout_ns;
};

static struct py_op *begin_send(struct py_core *core, struct py_queue *queue, PyObject *token, const struct send *send)
{
    struct tl_error error;
    const char *key = py_text(send->key, "key");
    struct tl_tensor *tensor = key != NULL ? py_tensor_of(core->module, send->tensor, false) : NULL;
    if (tensor == NULL) return NULL;
    enum tl_status status = TL_OK;
    struct py_op *op = NULL;
    if (py_core_check(core)) op = py_op_create(queue, token, NULL, send->key);
    if (op != NULL)
        status = tl_send(core->worker, key, send->step, tensor, send->timeout_ns, queue->cq, op, &op->id, &error);
    tl_tensor_put(tensor);
    if (status == TL_OK) return op;
    py_op_free(op);
    py_raise(core->module, &error, NULL, send->key);
    return NULL;
}

PyObject *py_worker_send_wait(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"key", "tensor", "step", "timeout", NULL};
    struct send send = {.timeout_ns = TL_TIMEOUT_DEFAULT};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|O&$O&:send_wait", names, &send.key, &send.tensor,
                                     py_convert_uint64, &send.step, py_convert_timeout, &send.timeout_ns))
        return NULL;
    struct py_core *core = py_worker_core(self);
    struct py_queue *queue = core != NULL ? py_queue_take(core) : NULL;
    if (queue == NULL) return NULL;
    struct py_op *op = begin_send(core, queue, NULL, &send);
    if (op != NULL) return py_op_wait(core, op);
    py_queue_give(core, queue);
    return NULL;
}

PyObject *py_worker_send(PyObject *self, PyObject *args)
{
    PyObject *queue_object, *token;
    struct send send;
    if (!PyArg_ParseTuple(args, "OOOOO&O&:_send", &queue_object, &token, &send.key, &send.tensor, py_convert_uint64,
                          &send.step, py_convert_timeout, &send.timeout_ns))
        return NULL;
    struct py_core *core = py_worker_core(self);
    struct py_queue *queue = core != NULL ? py_queue_of(core->module, queue_object) : NULL;
    struct py_op *op = queue != NULL ? begin_send(core, queue, token, &send) : NULL;
    return py_operation_create(core, py_worker_module(self), op);
}

/* ------------------------------------------------------------------------------------------------- publications -- */

PyObject *py_worker_publish(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"key", "tensor", "step", NULL};
    PyObject *key_object, *object;
    uint64_t step = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|O&:publish", names, &key_object, &object, py_convert_uint64,
                                     &step))
        return NULL;
    struct py_core *core = py_worker_core(self);
    const char *key = core != NULL ? py_text(key_object, "key") : NULL;
    struct tl_tensor *tensor = key != NULL ? py_tensor_of(core->module, object, false) : NULL;
    if (tensor == NULL) return NULL;
    struct tl_error error;
    bool is_open = py_core_check(core);
    enum tl_status status = is_open ? tl_publish(core->worker, key, step, tensor, &error) : TL_OK;
    tl_tensor_put(tensor);
    py_releases_run(core->module->releases);
    if (!is_open) return NULL;
    if (status != TL_OK) return py_raise(core->module, &error, NULL, key_object);
    /* Python 3.11 may forget to look for a signal that comes while a thread of the library asks for a release. */
    if (PyErr_CheckSignals() != 0) return NULL;
    Py_RETURN_NONE;
}

PyObject *py_worker_withdraw(PyObject *self, PyObject *key_object)
{
    struct tl_error error;
    struct py_core *core = py_worker_core(self);
    const char *key = core != NULL ? py_text(key_object, "key") : NULL;
    if (key == NULL) return NULL;
    enum tl_status status = tl_withdraw(core->worker, key, &error);
    py_releases_run(core->module->releases);
    if (status != TL_OK) return py_raise(core->module, &error, NULL, key_object);
    Py_RETURN_NONE;
}
