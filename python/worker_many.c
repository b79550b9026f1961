// SPDX-License-Identifier: Apache-2.0
/* Methods of Worker that receive many tensors with one call, and subscriptions. */
#include "python/part.h"
#include "python/worker_object.h"

#include <stdlib.h>

/* What many receives are called with, and what is made of that. */
struct receives {
    PyObject *peer, *keys_object, *into, *parts_object;
    uint64_t step, min_count;
    int64_t timeout_ns, group_timeout_ns;
    int wants_checksum;
    PyObject *keys; /* a tuple of the keys */
    struct tl_recv_item *items;
    struct py_part *parts; /* NULL: each receives the whole */
    size_t count;
};

/* ------------------------------------------------------------------------------------------------------ reading -- */

static void receives_fini(struct receives *receives)
{
    for (size_t i = 0; receives->items != NULL && i < receives->count; i++)
        tl_tensor_put(receives->items[i].destination);
    for (size_t i = 0; receives->parts != NULL && i < receives->count; i++)
        py_part_fini(&receives->parts[i]);
    free(receives->parts);
    free(receives->items);
    Py_CLEAR(receives->keys);
}

/* Reads a key, or a key with a step. Puts the key into the tuple. */
static bool read_item(struct receives *receives, size_t place, PyObject *object)
{
    PyObject *key = object;
    receives->items[place].step = receives->step;
    if (PyTuple_Check(object) && !PyArg_ParseTuple(object, "OO&;an item is a key or (key, step)", &key,
                                                   py_convert_uint64, &receives->items[place].step))
        return false;
    receives->items[place].key = py_text(key, "key");
    if (receives->items[place].key == NULL) return false;
    Py_INCREF(key);
    return PyTuple_SetItem(receives->keys, (Py_ssize_t)place, key) == 0;
}

/* Reads the destination of an item: any entry may be None. */
static bool read_destination(struct py_module *module, struct receives *receives, size_t place)
{
    PyObject *object = PySequence_GetItem(receives->into, (Py_ssize_t)place);
    if (object != NULL && object != Py_None) receives->items[place].destination = py_tensor_of(module, object, true);
    Py_XDECREF(object);
    return !PyErr_Occurred();
}

/* Reads the part of an item: any entry may be None. */
static bool read_part(struct receives *receives, size_t place)
{
    PyObject *object = PySequence_GetItem(receives->parts_object, (Py_ssize_t)place);
    struct py_part *part = &receives->parts[place];
    if (object != NULL && object != Py_None && py_part_init(part, object)) receives->items[place].part = &part->part;
    Py_XDECREF(object);
    return !PyErr_Occurred();
}

/* Returns whether an argument is None or has an entry for each key; otherwise raises. */
static bool check_count(PyObject *argument, const char *name, Py_ssize_t count)
{
    if (argument == Py_None || PySequence_Size(argument) == count) return true;
    if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "%s must have as many entries as there are keys", name);
    return false;
}

/* Reads all items; false with an exception, and then receives_fini is still to be called. */
static bool receives_read(struct py_module *module, struct receives *receives)
{
    Py_ssize_t count = PySequence_Size(receives->keys_object);
    if (count < 0) return false;
    bool has_parts = receives->parts_object != Py_None;
    if (!check_count(receives->into, "into", count) || !check_count(receives->parts_object, "parts", count))
        return false;
    receives->keys = PyTuple_New(count);
    receives->items = calloc((size_t)count + 1, sizeof(*receives->items));
    if (has_parts) receives->parts = calloc((size_t)count + 1, sizeof(*receives->parts));
    if (receives->keys == NULL || receives->items == NULL || (has_parts && receives->parts == NULL)) {
        if (!PyErr_Occurred()) PyErr_NoMemory();
        return false;
    }
    receives->count = (size_t)count;
    for (size_t i = 0; i < receives->count; i++) {
        PyObject *object = PySequence_GetItem(receives->keys_object, (Py_ssize_t)i);
        bool is_read = object != NULL && read_item(receives, i, object) &&
                       (receives->into == Py_None || read_destination(module, receives, i)) &&
                       (!has_parts || read_part(receives, i));
        Py_XDECREF(object);
        if (!is_read) return false;
    }
    return true;
}

/* ---------------------------------------------------------------------------------------------------- beginning -- */

/* The library knows no group time-out as 0; one of 0 seconds is the least. */
static int64_t group_timeout_of(int64_t timeout_ns)
{
    if (timeout_ns == TL_TIMEOUT_DEFAULT) return 0;
    return timeout_ns > 0 ? timeout_ns : 1;
}

/* Begins all on a queue; NULL with an exception. */
static struct py_op *begin(PyObject *self, struct py_core *core, struct py_queue *queue, PyObject *token,
                           struct receives *receives)
{
    tl_peer_id peer;
    struct tl_error error;
    if (!py_worker_peer(self, receives->peer, &peer) || !receives_read(core->module, receives) || !py_core_check(core))
        return NULL;
    struct py_op *op = py_op_create(queue, token, receives->peer, receives->keys);
    if (op == NULL) return NULL;
    op->results = PyList_New((Py_ssize_t)receives->count);
    if (op->results == NULL) {
        py_op_free(op);
        return NULL;
    }
    for (size_t i = 0; i < receives->count; i++) {
        receives->items[i].user_data = op;
        Py_INCREF(Py_None);
        PyList_SetItem(op->results, (Py_ssize_t)i, Py_None);
    }
    struct tl_recv_many_options options = {
        .size_bytes = sizeof(options),
        .item_bytes = sizeof(receives->items[0]),
        .min_count = receives->min_count,
        .group_timeout_ns = group_timeout_of(receives->group_timeout_ns),
        .wants_checksum = receives->wants_checksum,
    };
    if (options.min_count == 0 && options.group_timeout_ns == 0) op->open_count = receives->count;
    if (tl_recv_many(core->worker, peer, receives->items, receives->count, &options, receives->timeout_ns, queue->cq,
                     op, &op->id, &error) == TL_OK)
        return op;
    py_op_free(op);
    py_raise(core->module, &error, receives->peer, receives->keys);
    return NULL;
}

PyObject *py_worker_recv_many_wait(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"peer",      "keys",          "step",     "into",  "timeout",
                            "min_count", "group_timeout", "checksum", "parts", NULL};
    struct receives receives = {.into = Py_None,
                                .parts_object = Py_None,
                                .timeout_ns = TL_TIMEOUT_DEFAULT,
                                .group_timeout_ns = TL_TIMEOUT_DEFAULT};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|O&$OO&O&O&pO:recv_many_wait", names, &receives.peer,
                                     &receives.keys_object, py_convert_uint64, &receives.step, &receives.into,
                                     py_convert_timeout, &receives.timeout_ns, py_convert_uint64, &receives.min_count,
                                     py_convert_timeout, &receives.group_timeout_ns, &receives.wants_checksum,
                                     &receives.parts_object))
        return NULL;
    struct py_core *core = py_worker_core(self);
    struct py_queue *queue = core != NULL ? py_queue_take(core) : NULL;
    if (queue == NULL) return NULL;
    struct py_op *op = begin(self, core, queue, NULL, &receives);
    receives_fini(&receives);
    if (op != NULL) return py_op_wait(core, op);
    py_queue_give(core, queue);
    return NULL;
}

PyObject *py_worker_recv_many(PyObject *self, PyObject *args)
{
    PyObject *queue_object, *token;
    struct receives receives = {.into = Py_None};
    if (!PyArg_ParseTuple(args, "OOOOO&OO&O&O&pO:_recv_many", &queue_object, &token, &receives.peer,
                          &receives.keys_object, py_convert_uint64, &receives.step, &receives.into, py_convert_timeout,
                          &receives.timeout_ns, py_convert_uint64, &receives.min_count, py_convert_timeout,
                          &receives.group_timeout_ns, &receives.wants_checksum, &receives.parts_object))
        return NULL;
    struct py_core *core = py_worker_core(self);
    struct py_queue *queue = core != NULL ? py_queue_of(core->module, queue_object) : NULL;
    struct py_op *op = queue != NULL ? begin(self, core, queue, token, &receives) : NULL;
    receives_fini(&receives);
    return py_operation_create(core, py_worker_module(self), op);
}

/* ------------------------------------------------------------------------------------------------ subscriptions -- */

/* Reads destinations, which the caller puts and frees; NULL with an exception. */
static struct tl_tensor **read_destinations(struct py_module *module, PyObject *into, size_t *ret_count)
{
    Py_ssize_t count = PySequence_Size(into);
    if (count < 0) return NULL;
    struct tl_tensor **tensors = calloc((size_t)count + 1, sizeof(struct tl_tensor *));
    if (tensors == NULL) PyErr_NoMemory();
    *ret_count = tensors != NULL ? (size_t)count : 0;
    for (size_t i = 0; i < *ret_count && !PyErr_Occurred(); i++) {
        PyObject *object = PySequence_GetItem(into, (Py_ssize_t)i);
        if (object != NULL) tensors[i] = py_tensor_of(module, object, true);
        Py_XDECREF(object);
    }
    return tensors;
}

static struct py_op *subscribe(PyObject *self, struct py_core *core, struct py_queue *queue, PyObject *token,
                               PyObject *peer_object, PyObject *key_object, struct tl_subscribe_options *options)
{
    tl_peer_id peer;
    struct tl_error error;
    const char *key = py_text(key_object, "key");
    if (key == NULL || !py_worker_peer(self, peer_object, &peer) || !py_core_check(core)) return NULL;
    struct py_op *op = py_op_create(queue, token, peer_object, key_object);
    if (op == NULL) return NULL;
    if (tl_subscribe(core->worker, peer, key, options, queue->cq, op, &op->id, &error) == TL_OK) return op;
    py_op_free(op);
    py_raise(core->module, &error, peer_object, key_object);
    return NULL;
}

PyObject *py_worker_subscribe(PyObject *self, PyObject *args)
{
    PyObject *queue_object, *token, *peer, *key, *into;
    uint64_t count;
    int wants_checksum;
    struct tl_subscribe_options options = {.size_bytes = sizeof(options)};
    struct tl_tensor **destinations = NULL;
    if (!PyArg_ParseTuple(args, "OOOOO&O&Op:_subscribe", &queue_object, &token, &peer, &key, py_convert_uint64,
                          &options.from_step, py_convert_uint64, &count, &into, &wants_checksum))
        return NULL;
    struct py_core *core = py_worker_core(self);
    struct py_queue *queue = core != NULL ? py_queue_of(core->module, queue_object) : NULL;
    if (queue == NULL) return NULL;
    options.count = count;
    options.wants_checksum = wants_checksum;
    if (into != Py_None) destinations = read_destinations(core->module, into, &options.count);
    options.destinations = (struct tl_tensor *const *)destinations;
    struct py_op *op = !PyErr_Occurred() ? subscribe(self, core, queue, token, peer, key, &options) : NULL;
    for (size_t i = 0; destinations != NULL && i < options.count; i++)
        tl_tensor_put(destinations[i]);
    free(destinations);
    return py_operation_create(core, py_worker_module(self), op);
}
