// SPDX-License-Identifier: Apache-2.0
/* The struct of a Worker, for the files that have its methods. */
#ifndef PYTHON_WORKER_OBJECT_H
#define PYTHON_WORKER_OBJECT_H

#include "python/worker.h"

struct py_worker {
    PyObject_HEAD PyObject *module_object; /* so that the state stays; it is given back last */
    struct py_module *module;
    struct py_core *core; /* NULL until it is open */
    PyObject *peers;      /* ids that were found, by name */
};

/* Returns the core if the worker may be used, NULL with an exception. */
struct py_core *py_worker_core(PyObject *self);

/* Returns the module, borrowed. */
PyObject *py_worker_module(PyObject *self);

/* Finds a peer by its id or name ("ps:0", "/job:ps/task:0"). Returns false with an exception. */
bool py_worker_peer(PyObject *self, PyObject *peer, tl_peer_id *ret_peer);

/* Returns the text of a str without NUL; NULL with an exception. what: for its message. */
const char *py_text(PyObject *object, const char *what);

/* For PyArg_Parse: an int as uint64_t. */
int py_convert_uint64(PyObject *object, void *ret_number);

/* Methods. In worker_single.c, one tensor for each call: */
PyObject *py_worker_publish(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *py_worker_withdraw(PyObject *self, PyObject *key);
PyObject *py_worker_recv_wait(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *py_worker_send_wait(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *py_worker_recv(PyObject *self, PyObject *args);
PyObject *py_worker_send(PyObject *self, PyObject *args);
/* In worker_many.c, several: */
PyObject *py_worker_recv_many_wait(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *py_worker_recv_many(PyObject *self, PyObject *args);
PyObject *py_worker_subscribe(PyObject *self, PyObject *args);
/* In worker_at_peer.c, at a peer: (queue or None, token, peer, key or pattern, ...). Without a queue they wait. */
PyObject *py_worker_put(PyObject *self, PyObject *args);
PyObject *py_worker_list(PyObject *self, PyObject *args);
PyObject *py_worker_stat(PyObject *self, PyObject *args);
PyObject *py_worker_remove(PyObject *self, PyObject *args);
/* In worker_peers.c, peers, steps and counters: */
PyObject *py_worker_add_peer(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *py_worker_remove_peer(PyObject *self, PyObject *peer);
PyObject *py_worker_peers(PyObject *self, PyObject *unused);
PyObject *py_worker_wait_for_peers(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *py_worker_abort_step(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *py_worker_end_step(PyObject *self, PyObject *step);
PyObject *py_worker_counters(PyObject *self, PyObject *unused);

#endif
