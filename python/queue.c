// SPDX-License-Identifier: Apache-2.0
/*
 * Queue: what an event loop waits for. Its descriptor is readable while results are there, drain takes them.
 *
 * The loop refers to the Queue, and the Queue to what waits for the results, but not to the Worker: a Worker that
 * nothing refers to any more is closed, whatever loop it was used in.
 *
 * Threads that wait for one Queue do so one after the other: completions must be converted in the order in which they
 * were taken, since the last one of an operation frees it.
 */
#include "python/worker.h"

#include <pthread.h>
#include <time.h>

/* What waits looks so often whether it shall end. */
#define WAIT_NS INT64_C(50000000)

struct queue_object {
    PyObject_HEAD PyObject *module_object; /* so that the state stays; it is given back last */
    struct py_core *core;
    struct py_queue *queue;
    pthread_mutex_t waiting; /* the thread that waits has it, and gets it without Python's lock */
};

static struct queue_object *queue_of(PyObject *self)
{
    return (struct queue_object *)self;
}

PyObject *py_queue_object(struct py_core *core, PyObject *module_object)
{
    PyTypeObject *type = (PyTypeObject *)core->module->queue_type;
    struct py_queue *queue = py_queue_take(core);
    if (queue == NULL) return NULL;
    struct queue_object *self = (struct queue_object *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) {
        py_queue_give(core, queue);
        return NULL;
    }
    Py_INCREF(module_object);
    self->module_object = module_object;
    self->core = py_core_get(core);
    self->queue = queue;
    pthread_mutex_init(&self->waiting, NULL);
    return (PyObject *)self;
}

struct py_queue *py_queue_of(struct py_module *module, PyObject *object)
{
    if ((PyObject *)Py_TYPE(object) == module->queue_type) return queue_of(object)->queue;
    PyErr_Format(PyExc_TypeError, "%R is no Queue", (PyObject *)Py_TYPE(object));
    return NULL;
}

static int queue_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(queue_of(self)->module_object);
    for (struct py_op *op = queue_of(self)->queue != NULL ? queue_of(self)->queue->ops : NULL; op != NULL;
         op = op->next) {
        Py_VISIT(op->token);
        Py_VISIT(op->peer);
        Py_VISIT(op->key);
        Py_VISIT(op->results);
    }
    return 0;
}

/* The operations stay open, and what waits for them is forgotten: references that are taken out of them end here. */
static int queue_clear(PyObject *self)
{
    struct py_queue *queue = queue_of(self)->queue;
    struct py_op *op = queue != NULL ? queue->ops : NULL;
    while (op != NULL) {
        PyObject *token = op->token;
        if (token == Py_None) {
            op = op->next;
            continue;
        }
        Py_INCREF(Py_None);
        op->token = Py_None;
        Py_XDECREF(token); /* this may run any code, so that the list is read from its start again */
        op = queue->ops;
    }
    return 0;
}

static void queue_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject *module_object = queue_of(self)->module_object;
    PyObject_GC_UnTrack(self);
    if (queue_of(self)->queue != NULL) py_queue_give(queue_of(self)->core, queue_of(self)->queue);
    py_core_put(queue_of(self)->core);
    pthread_mutex_destroy(&queue_of(self)->waiting);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_XDECREF(module_object);
    Py_DECREF(type);
}

static PyObject *queue_fileno(PyObject *self, PyObject *unused)
{
    (void)unused;
    return PyLong_FromLong(tl_cq_fd(queue_of(self)->queue->cq));
}

/* Appends (token, value, error, is_over) to a list or deque, and frees the result. */
static int append(PyObject *list, struct py_result *result)
{
    PyObject *entry =
        Py_BuildValue("(OOOO)", result->op->token, result->value != NULL ? result->value : Py_None,
                      result->error != NULL ? result->error : Py_None, result->is_over ? Py_True : Py_False);
    py_result_free(result);
    PyObject *appended = entry != NULL ? PyObject_CallMethod(list, "append", "(O)", entry) : NULL;
    Py_XDECREF(entry);
    Py_XDECREF(appended);
    return appended != NULL ? 0 : -1;
}

#define CAPACITY 64

/* Puts what completions bring into a list, in the form of append. */
static void append_all(PyObject *self, PyObject *list, struct tl_completion *completions, size_t count)
{
    struct py_result result;
    for (size_t i = 0; i < count; i++)
        if (py_op_take(queue_of(self)->core, &completions[i], &result) && append(list, &result) != 0)
            PyErr_WriteUnraisable(self);
}

/* Nothing completes in a forked child: all that is open ends there with an error. */
static void append_failures(PyObject *self, PyObject *list)
{
    struct py_result result;
    while (queue_of(self)->queue->ops != NULL) {
        py_op_fail(queue_of(self)->core, queue_of(self)->queue->ops, &result);
        if (append(list, &result) != 0) PyErr_WriteUnraisable(self);
    }
}

static PyObject *queue_drain(PyObject *self, PyObject *list)
{
    struct queue_object *of = queue_of(self);
    struct tl_completion completions[CAPACITY];
    if (py_module_is_forked(of->core->module)) {
        append_failures(self, list);
        Py_RETURN_NONE;
    }
    size_t count;
    do { /* once more when the worker is closed, since nothing waits for the descriptor any more */
        count = tl_cq_poll(of->queue->cq, completions, CAPACITY);
        append_all(self, list, completions, count);
    } while (count > 0 && of->core->worker == NULL);
    py_releases_run(of->core->module->releases);
    Py_RETURN_NONE;
}

/* Returns false when another thread has waited for the queue all the time that a wait takes. Without Python's lock. */
static bool lock_waiting(struct queue_object *of)
{
    struct timespec until;
    if (pthread_mutex_trylock(&of->waiting) == 0) return true;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += WAIT_NS;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    return pthread_mutex_clocklock(&of->waiting, CLOCK_MONOTONIC, &until) == 0;
}

/* It returns soon, so that what calls it can look whether there is still something to wait for. Results are in the list
 * whatever exception a signal raises next. */
static PyObject *queue_wait(PyObject *self, PyObject *list)
{
    struct queue_object *of = queue_of(self);
    struct tl_completion completions[CAPACITY];
    if (py_module_is_forked(of->core->module)) {
        py_core_check(of->core);
        return NULL;
    }
    const struct py_op *op = of->queue->ops;
    size_t count = 0, min_count = op != NULL && op->next == NULL ? py_op_awaited_count(op) : 1;
    bool is_alone;
    Py_BEGIN_ALLOW_THREADS;
    is_alone = lock_waiting(of);
    if (is_alone) count = tl_cq_wait_many(of->queue->cq, completions, CAPACITY, min_count, WAIT_NS);
    Py_END_ALLOW_THREADS;
    append_all(self, list, completions, count);
    if (is_alone) pthread_mutex_unlock(&of->waiting);
    py_releases_run(of->core->module->releases);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"fileno", queue_fileno, METH_NOARGS, "Returns a descriptor that is readable while results are there."},
    {"drain", queue_drain, METH_O,
     "Appends results that are there to a list or deque, of 64 completions at most, or of all when the worker is "
     "closed: (token, value, error, is_over) for each. In a forked child all that is open has failed."},
    {"wait", queue_wait, METH_O, "Waits for results for 50 ms at most, and appends them to a list or deque."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_dealloc, queue_dealloc},
    {Py_tp_traverse, queue_traverse},
    {Py_tp_clear, queue_clear},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec py_queue_spec = {
    .name = "tensorlane._tensorlane.Queue",
    .basicsize = sizeof(struct queue_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
