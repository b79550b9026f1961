// SPDX-License-Identifier: Apache-2.0
/*
 * A worker as Python objects share it, and the queues that its operations complete on.
 *
 * A Worker has one, and so has each Queue. What the library still knows outlives the objects that began it: a queue
 * whose object has gone while operations are open is lost; its operations are cancelled, and it is destroyed when they
 * have completed, at the latest when the worker has been closed.
 *
 * After fork nothing here calls the library; what the child has of a worker stays until its process ends.
 */
#ifndef PYTHON_WORKER_H
#define PYTHON_WORKER_H

#include "python/module.h"

#include <stdatomic.h>

struct py_op;

/* A completion queue and the operations that name it. */
struct py_queue {
    struct py_queue *next; /* in a list of the worker */
    struct tl_cq *cq;
    struct py_op *ops; /* the open ones */
};

/* Everything but users is protected by Python's lock. */
struct py_core {
    size_t references;
    struct py_module *module; /* the module whose objects refer to this */
    struct tl_worker *worker; /* NULL when it is closed */
    bool is_closing;          /* no call may begin */
    atomic_uint users;        /* calls under way without Python's lock */
    struct py_queue *idle;    /* for calls that wait */
    struct py_queue *lost;
};

/* One operation; for many receives or sends, all of them. */
struct py_op {
    struct py_queue *queue;
    struct py_op *next, **link; /* in the queue's list */
    PyObject *token;            /* what the event loop hands the result to; NULL: a call waits for it */
    PyObject *peer, *key;       /* for errors; NULL: none */
    PyObject *results;          /* a list with a result for each of many; NULL: there is one */
    size_t open_count;     /* members that must complete before the group ends; 0: it may end earlier, or is none */
    struct py_op **handle; /* where its Operation refers to it; NULL: it has none */
    tl_op_id id;
};

/* What an operation has brought. */
struct py_result {
    struct py_op *op;
    PyObject *value; /* a Tensor, a list, None; NULL: see error */
    PyObject *error; /* an exception, or NULL */
    bool is_over;    /* the operation is over, and its op freed when the result is */
};

/* Takes a worker that was opened; it is closed when the last reference is put. NULL with an exception. */
struct py_core *py_core_create(struct py_module *module, struct tl_worker *worker);
struct py_core *py_core_get(struct py_core *core);
void py_core_put(struct py_core *core);

/* Closes the worker, unless it was. Calls that wait end first. */
void py_core_close(struct py_core *core, int64_t timeout_ns);

/* Returns whether the worker may be used; otherwise raises why not. */
bool py_core_check(struct py_core *core);

/* Returns a queue without open operations, NULL with an exception. */
struct py_queue *py_queue_take(struct py_core *core);

/* Gives a queue back, for another call; one that has open operations is lost. */
void py_queue_give(struct py_core *core, struct py_queue *queue);

/* Creates an operation on a queue, with references to what it is about; NULL with an exception. */
struct py_op *py_op_create(struct py_queue *queue, PyObject *token, PyObject *peer, PyObject *key);
void py_op_free(struct py_op *op);

/* Takes what a completion brings, and the tensor that is in it. Returns whether there is a result: members of a group
 * and what nothing waits for any more have none. On a lack of memory the error is that. */
bool py_op_take(struct py_core *core, struct tl_completion *completion, struct py_result *ret_result);

/* Ends an operation of a worker that must not be used, with the error that says why. */
void py_op_fail(struct py_core *core, struct py_op *op, struct py_result *ret_result);

/* Gives the references of a result back, and the operation if it is over. */
void py_result_free(struct py_result *result);

/* Returns how many completions a thread waits for at once that waits for the operation alone. */
size_t py_op_awaited_count(const struct py_op *op);

/* Waits for the operation without Python's lock. Returns its value, NULL with an exception; KeyboardInterrupt and the
 * like give the operation up. The queue goes back. */
PyObject *py_op_wait(struct py_core *core, struct py_op *op);

/* Creates the Operation of an operation, which cancels it when nothing refers to the Operation any more. NULL with an
 * exception for no operation, and without memory; the operation is cancelled then. */
PyObject *py_operation_create(struct py_core *core, PyObject *module_object, struct py_op *op);

/* Returns a list of what is in a listing, each as the arguments of tensorlane.ListedTensor; NULL with an exception. */
PyObject *py_listing_to_list(struct py_module *module, const struct tl_listing *listing);

/* Creates a Queue of a worker, on which the methods of the Worker begin operations. */
PyObject *py_queue_object(struct py_core *core, PyObject *module_object);

/* Returns the queue of a Queue; NULL with an exception when the object is none. */
struct py_queue *py_queue_of(struct py_module *module, PyObject *object);

#endif
