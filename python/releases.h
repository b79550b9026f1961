// SPDX-License-Identifier: Apache-2.0
/*
 * Gives the memory of Python objects back, which the library lets go of on any of its threads.
 *
 * A release callback must not wait for Python's lock: a thread of the library that does so waits for a Python thread
 * that may be waiting for it. So a callback only puts the memory into a list, and asks Python's main thread to empty
 * it; each call of the package empties it as well. Nothing is asked of an interpreter that ends (py_releases_stop), and
 * what comes later stays in memory until the process has ended.
 */
#ifndef PYTHON_RELEASES_H
#define PYTHON_RELEASES_H

#include "python/python.h"

#include <stdbool.h>

#include "python/dlpack.h"

struct py_releases;

/* What keeps the memory of one tensor: the first of these that is set. */
struct py_release {
    struct py_releases *releases;
    struct py_release *next;
    struct dlpack_versioned *versioned;
    struct dlpack_managed *managed;
    Py_buffer view; /* obj is NULL when there is none */
};

/* Returns NULL without memory. The caller has one reference. */
struct py_releases *py_releases_create(void);

/* Gives the caller's reference back. Thread: any. */
void py_releases_put(struct py_releases *releases);

/* Creates what a tensor keeps, with a reference to the list; NULL without memory. */
struct py_release *py_release_create(struct py_releases *releases);

/* Gives the memory back, now. Needs Python's lock; leaves the current exception as it is. */
void py_release_run(struct py_release *release);

/* A tl_release_fn whose context is a struct py_release. */
void py_release_later(void *data, void *context);

/* Empties the list. Needs Python's lock; runs code of objects that end; leaves the current exception as it is. */
void py_releases_run(struct py_releases *releases);

/* From now on threads of the library may release something, of this process and not of one that is forked from it.
 * Needs Python's lock. Returns false with errno when the kernel has no memory for the mark, or is older than
 * Linux 4.14.
 */
bool py_releases_start(struct py_releases *releases);

/* Returns whether this process was forked from one that has called py_releases_start. Asks no system call, since each
 * receive looks several times. Thread: any. */
bool py_releases_are_of_parent(const struct py_releases *releases);

/* From now on nothing is asked of Python's main thread. */
void py_releases_stop(struct py_releases *releases);

#endif
