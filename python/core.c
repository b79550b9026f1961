// SPDX-License-Identifier: Apache-2.0
#include "python/worker.h"

#include <stdlib.h>
#include <time.h>

/* ------------------------------------------------------------------------------------------------------- queues -- */

static void pause_briefly(void)
{
    const struct timespec pause = {.tv_nsec = 1000000};
    nanosleep(&pause, NULL);
}

/* Frees a queue none of whose operations can complete any more, with the completions that nothing has read. */
static void queue_destroy(struct py_queue *queue)
{
    tl_cq_destroy(queue->cq);
    while (queue->ops != NULL)
        py_op_free(queue->ops);
    free(queue);
}

/* Reads what has completed on a lost queue. Returns whether nothing is open on it. */
static bool queue_sweep(struct py_core *core, struct py_queue *queue)
{
    struct tl_completion completion;
    struct py_result result;
    while (queue->ops != NULL && tl_cq_poll(queue->cq, &completion, 1) == 1)
        if (py_op_take(core, &completion, &result)) py_result_free(&result);
    return queue->ops == NULL;
}

/* Keeps a queue on which something is open. Python code may have closed the worker since that was seen. */
static void keep_lost(struct py_core *core, struct py_queue *queue)
{
    if (core->worker == NULL) {
        queue_destroy(queue);
        return;
    }
    queue->next = core->lost;
    core->lost = queue;
}

/* Destroys lost queues on which nothing is open any more. What is dropped may run any code, also this: so a queue is in
 * no list meanwhile. */
static void sweep_lost(struct py_core *core)
{
    struct py_queue *unswept = core->lost;
    core->lost = NULL;
    while (unswept != NULL) {
        struct py_queue *queue = unswept;
        unswept = queue->next;
        if (queue_sweep(core, queue)) {
            queue_destroy(queue);
        } else {
            keep_lost(core, queue);
        }
    }
}

struct py_queue *py_queue_take(struct py_core *core)
{
    sweep_lost(core);
    struct py_queue *queue = core->idle;
    if (queue != NULL) {
        core->idle = queue->next;
        return queue;
    }
    struct tl_error error;
    if ((queue = calloc(1, sizeof(*queue))) == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    if (tl_cq_create(&queue->cq, &error) == TL_OK) return queue;
    free(queue);
    py_raise(core->module, &error, NULL, NULL);
    return NULL;
}

/* Cancels what is open; its results go nowhere. */
static void queue_lose(struct py_core *core, struct py_queue *queue)
{
    for (struct py_op *op = queue->ops; op != NULL; op = op->next) {
        PyObject *token = op->token;
        Py_INCREF(Py_None);
        op->token = Py_None;
        Py_XDECREF(token);
        if (!core->is_closing) (void)!tl_cancel(core->worker, op->id);
    }
    keep_lost(core, queue);
}

void py_queue_give(struct py_core *core, struct py_queue *queue)
{
    if (py_module_is_forked(core->module)) return;
    if (core->worker == NULL) {
        queue_destroy(queue);
    } else if (queue->ops != NULL) {
        queue_lose(core, queue);
    } else {
        queue->next = core->idle;
        core->idle = queue;
    }
}

/* -------------------------------------------------------------------------------------------------------- cores -- */

struct py_core *py_core_create(struct py_module *module, struct tl_worker *worker)
{
    struct py_core *core = calloc(1, sizeof(*core));
    if (core == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    core->references = 1;
    core->module = module;
    core->worker = worker;
    return core;
}

struct py_core *py_core_get(struct py_core *core)
{
    core->references++;
    return core;
}

void py_core_put(struct py_core *core)
{
    if (core == NULL || --core->references > 0) return;
    if (py_module_is_forked(core->module)) return;
    core->references = 1; /* while it closes */
    py_core_close(core, TL_TIMEOUT_DEFAULT);
    free(core);
}

static void destroy_all(struct py_queue **list)
{
    while (*list != NULL) {
        struct py_queue *queue = *list;
        *list = queue->next;
        queue_destroy(queue);
    }
}

void py_core_close(struct py_core *core, int64_t timeout_ns)
{
    if (core->is_closing || py_module_is_forked(core->module)) return;
    core->is_closing = true;
    Py_BEGIN_ALLOW_THREADS;
    while (atomic_load(&core->users) > 0)
        pause_briefly();
    tl_worker_close(core->worker, timeout_ns);
    Py_END_ALLOW_THREADS;
    core->worker = NULL;
    destroy_all(&core->idle);
    destroy_all(&core->lost);
    py_releases_run(core->module->releases);
}

bool py_core_check(struct py_core *core)
{
    if (core == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the worker has not been opened");
    } else if (py_module_is_forked(core->module)) {
        py_raise_text(core->module, TL_FAILED_PRECONDITION,
                      "the worker belongs to the process that this one was forked from; fork before the first worker "
                      "is opened, or start processes with the method \"spawn\"");
    } else if (core->is_closing) {
        py_raise_text(core->module, TL_FAILED_PRECONDITION, "the worker is closed");
    } else {
        return true;
    }
    return false;
}
