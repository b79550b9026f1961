// SPDX-License-Identifier: Apache-2.0
/* Methods of Worker that are about peers, steps and counters. */
#include "python/worker_object.h"

#include <stdlib.h>
#include <string.h>

/* Calls that wait look for signals so often. */
#define WAIT_NS INT64_C(50000000)

static struct py_worker *worker_of(PyObject *self)
{
    return (struct py_worker *)self;
}

/* While a call uses the worker without Python's lock, closing waits for it. */
static PyThreadState *leave_python(struct py_core *core)
{
    atomic_fetch_add(&core->users, 1);
    return PyEval_SaveThread();
}

static void enter_python(struct py_core *core, PyThreadState *thread)
{
    PyEval_RestoreThread(thread);
    atomic_fetch_sub(&core->users, 1);
}

/* -------------------------------------------------------------------------------------------------------- peers -- */

/* Finds a peer by name, and keeps its id. */
static bool find_peer(PyObject *self, PyObject *name, tl_peer_id *ret_peer)
{
    struct py_worker *worker = worker_of(self);
    struct tl_error error;
    PyObject *known = PyDict_GetItemWithError(worker->peers, name);
    if (known != NULL) {
        *ret_peer = PyLong_AsUnsignedLongLong(known);
        return true;
    }
    const char *text = PyErr_Occurred() ? NULL : py_text(name, "peer");
    if (text == NULL || !py_core_check(worker->core)) return false;
    if (tl_worker_find_peer(worker->core->worker, text, ret_peer, &error) != TL_OK) {
        py_raise(worker->module, &error, name, NULL);
        return false;
    }
    PyObject *id = PyLong_FromUnsignedLongLong(*ret_peer);
    bool is_kept = id != NULL && PyDict_SetItem(worker->peers, name, id) == 0;
    Py_XDECREF(id);
    return is_kept;
}

bool py_worker_peer(PyObject *self, PyObject *peer, tl_peer_id *ret_peer)
{
    if (PyLong_Check(peer)) return py_convert_uint64(peer, ret_peer) != 0;
    if (PyUnicode_Check(peer)) return find_peer(self, peer, ret_peer);
    PyErr_Format(PyExc_TypeError, "peer must be a name or the number that add_peer has returned, not %R",
                 (PyObject *)Py_TYPE(peer));
    return false;
}

PyObject *py_worker_add_peer(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"address", "name", "incarnation", NULL};
    const char *address, *name = NULL;
    uint64_t incarnation = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s|zO&:add_peer", names, &address, &name, py_convert_uint64,
                                     &incarnation))
        return NULL;
    struct py_core *core = py_worker_core(self);
    if (core == NULL) return NULL;
    tl_peer_id peer;
    struct tl_error error;
    PyThreadState *thread = leave_python(core);
    enum tl_status status = tl_worker_add_peer(core->worker, address, name, incarnation, &peer, &error);
    enter_python(core, thread);
    if (status == TL_OK) return PyLong_FromUnsignedLongLong(peer);
    PyObject *given = PyUnicode_FromString(address);
    if (given != NULL) py_raise(core->module, &error, given, NULL);
    Py_XDECREF(given);
    return NULL;
}

PyObject *py_worker_remove_peer(PyObject *self, PyObject *peer_object)
{
    tl_peer_id peer;
    struct tl_error error;
    struct py_core *core = py_worker_core(self);
    if (core == NULL || !py_worker_peer(self, peer_object, &peer) || !py_core_check(core)) return NULL;
    PyDict_Clear(worker_of(self)->peers); /* a name may stand for another peer later */
    PyThreadState *thread = leave_python(core);
    enum tl_status status = tl_worker_remove_peer(core->worker, peer, &error);
    enter_python(core, thread);
    PyDict_Clear(worker_of(self)->peers); /* with names that were looked up meanwhile */
    if (status != TL_OK) return py_raise(core->module, &error, peer_object, NULL);
    Py_RETURN_NONE;
}

static PyObject *describe_peer(const struct tl_peer_info *info)
{
    static const char *const states[] = {"idle", "connecting", "up", "down"};
    const char *state = (unsigned)info->state < 4 ? states[info->state] : "unknown";
    return Py_BuildValue("(KsssKKss)", (unsigned long long)info->id, info->name, info->address, state,
                         (unsigned long long)info->incarnation, (unsigned long long)info->restart_count,
                         info->transport, info->reason.code != TL_OK ? info->reason.message : "");
}

/* Returns the ids of all peers, which the caller frees; NULL with an exception. */
static tl_peer_id *all_peers(struct py_core *core, size_t *ret_count)
{
    size_t capacity = tl_worker_peers(core->worker, NULL, 0);
    tl_peer_id *peers = calloc(capacity + 1, sizeof(*peers));
    if (peers == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    *ret_count = tl_worker_peers(core->worker, peers, capacity);
    if (*ret_count > capacity) *ret_count = capacity;
    return peers;
}

PyObject *py_worker_peers(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct py_core *core = py_worker_core(self);
    size_t count;
    tl_peer_id *peers = core != NULL ? all_peers(core, &count) : NULL;
    if (peers == NULL) return NULL;
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < count; i++) {
        struct tl_peer_info info = {.size_bytes = sizeof(info)};
        struct tl_error error;
        if (!py_core_check(core)) {
            Py_CLEAR(list);
            break;
        }
        PyThreadState *thread = leave_python(core);
        enum tl_status status = tl_worker_peer_info(core->worker, peers[i], &info, &error);
        enter_python(core, thread);
        if (status != TL_OK) continue; /* it was removed meanwhile */
        PyObject *entry = describe_peer(&info);
        if (entry == NULL || PyList_Append(list, entry) != 0) Py_CLEAR(list);
        Py_XDECREF(entry);
    }
    free(peers);
    return list;
}

/* Reads a sequence of peers, or None for all. Returns NULL with an exception. */
static tl_peer_id *read_peers(PyObject *self, PyObject *object, size_t *ret_count)
{
    if (object == Py_None) return all_peers(worker_of(self)->core, ret_count);
    Py_ssize_t count = PySequence_Size(object);
    if (count < 0) return NULL;
    tl_peer_id *peers = calloc((size_t)count + 1, sizeof(*peers));
    if (peers == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *peer = PySequence_GetItem(object, i);
        bool is_found = peer != NULL && py_worker_peer(self, peer, &peers[i]);
        Py_XDECREF(peer);
        if (is_found) continue;
        free(peers);
        return NULL;
    }
    *ret_count = (size_t)count;
    return peers;
}

/* Waits in short steps, between which signals and the end of the worker are noticed. */
static enum tl_status wait_in_steps(struct py_core *core, const tl_peer_id *peers, size_t count, size_t min_count,
                                    int64_t timeout_ns, struct tl_error *ret_error)
{
    while (py_core_check(core)) {
        int64_t step_ns = timeout_ns < WAIT_NS ? timeout_ns : WAIT_NS;
        PyThreadState *thread = leave_python(core);
        enum tl_status status = tl_worker_wait_for_peers(core->worker, peers, count, min_count, step_ns, ret_error);
        enter_python(core, thread);
        if (timeout_ns != TL_TIMEOUT_NONE) timeout_ns -= step_ns;
        if (status != TL_DEADLINE_EXCEEDED || timeout_ns <= 0) return status;
        if (PyErr_CheckSignals() != 0) break;
    }
    return TL_CANCELLED;
}

PyObject *py_worker_wait_for_peers(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"peers", "min_count", "timeout", NULL};
    PyObject *object = Py_None;
    uint64_t min_count = 0;
    int64_t timeout_ns = TL_TIMEOUT_NONE;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OO&O&:wait_for_peers", names, &object, py_convert_uint64,
                                     &min_count, py_convert_timeout, &timeout_ns))
        return NULL;
    if (timeout_ns == TL_TIMEOUT_DEFAULT) timeout_ns = TL_TIMEOUT_NONE;
    struct py_core *core = py_worker_core(self);
    size_t count;
    tl_peer_id *peers = core != NULL ? read_peers(self, object, &count) : NULL;
    if (peers == NULL) return NULL;
    struct tl_error error;
    enum tl_status status = wait_in_steps(core, peers, count, min_count, timeout_ns, &error);
    free(peers);
    if (PyErr_Occurred()) return NULL;
    if (status != TL_OK) return py_raise(core->module, &error, object, NULL);
    Py_RETURN_NONE;
}

/* -------------------------------------------------------------------------------------------- steps and counters -- */

PyObject *py_worker_abort_step(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"step", "message", "code", NULL};
    uint64_t step;
    const char *message;
    int code = TL_ABORTED;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&s|i:abort_step", names, py_convert_uint64, &step, &message,
                                     &code))
        return NULL;
    struct py_core *core = py_worker_core(self);
    if (core == NULL) return NULL;
    struct tl_error error;
    PyThreadState *thread = leave_python(core);
    enum tl_status status = tl_worker_abort_step(core->worker, step, (enum tl_status)code, message, &error);
    enter_python(core, thread);
    if (status != TL_OK) return py_raise(core->module, &error, NULL, NULL);
    Py_RETURN_NONE;
}

PyObject *py_worker_end_step(PyObject *self, PyObject *step_object)
{
    uint64_t step, dropped_count;
    struct tl_error error;
    if (!py_convert_uint64(step_object, &step)) return NULL; /* this may run any code, which may close the worker */
    struct py_core *core = py_worker_core(self);
    if (core == NULL) return NULL;
    PyThreadState *thread = leave_python(core);
    enum tl_status status = tl_worker_end_step(core->worker, step, &dropped_count, &error);
    enter_python(core, thread);
    py_releases_run(core->module->releases);
    if (status != TL_OK) return py_raise(core->module, &error, NULL, NULL);
    return PyLong_FromUnsignedLongLong(dropped_count);
}

#define COUNTER(name)                                                                                                  \
    {                                                                                                                  \
#name, offsetof(struct tl_worker_stats, name)                                                                  \
    }

static const struct {
    const char *name;
    size_t offset;
} counters[] = {
    COUNTER(tensors_sent),      COUNTER(tensors_received),  COUNTER(bytes_sent),      COUNTER(bytes_received),
    COUNTER(bytes_copied_send), COUNTER(frames_sent),       COUNTER(frames_received), COUNTER(requests_retried),
    COUNTER(tensors_dropped),   COUNTER(waiting_receivers), COUNTER(held_tensors),    COUNTER(held_bytes),
    COUNTER(published_tensors), COUNTER(published_bytes),   COUNTER(open_operations), COUNTER(protocol_errors),
};

PyObject *py_worker_counters(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct py_core *core = py_worker_core(self);
    if (core == NULL) return NULL;
    struct tl_worker_stats stats = {.size_bytes = sizeof(stats)};
    struct tl_error error;
    PyThreadState *thread = leave_python(core);
    enum tl_status status = tl_worker_stats(core->worker, &stats, &error);
    enter_python(core, thread);
    if (status != TL_OK) return py_raise(core->module, &error, NULL, NULL);
    PyObject *dict = PyDict_New();
    for (size_t i = 0; dict != NULL && i < sizeof(counters) / sizeof(counters[0]); i++) {
        uint64_t value;
        memcpy(&value, (const char *)&stats + counters[i].offset, sizeof(value));
        PyObject *number = PyLong_FromUnsignedLongLong(value);
        if (number == NULL || PyDict_SetItemString(dict, counters[i].name, number) != 0) Py_CLEAR(dict);
        Py_XDECREF(number);
    }
    return dict;
}
