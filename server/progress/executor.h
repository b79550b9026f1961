// SPDX-License-Identifier: Apache-2.0
/*
 * Executors: where callbacks belong.
 *
 * Operations, peers and links belong to the owner of the worker's loop, requests that came over a transport to the
 * owner of its reactor. The rendezvous table calls back on whichever of these threads caused it. So an object that is
 * called back asks whether this thread is in its executor: if so it goes on at once, if not it posts a closure to its
 * executor. The thread that runs a loop or a reactor enters its executor for the duration of a round.
 */
#ifndef SERVER_PROGRESS_EXECUTOR_H
#define SERVER_PROGRESS_EXECUTOR_H

#include <stdbool.h>

#include "base/mailbox.h"

struct tl_executor {
    bool is_only; /* this worker has no other executor: every thread is in this one */
    /* Runs the closure in the executor. Thread: any. */
    void (*post)(const struct tl_executor *executor, struct tl_closure *closure);
    /* Posts the closure at the end of this round, together with all others to that executor. Returns false when this
     * executor does not do that for `to`. NULL: it does so for none. Thread: one that is in this executor. */
    bool (*send)(const struct tl_executor *executor, const struct tl_executor *to, struct tl_closure *closure);
    /* Runs the closure, which is not deferred already, at the end of this round, before what `send` has gathered. NULL:
     * what could be deferred is done at once. Thread: one that is in this executor. */
    void (*defer)(const struct tl_executor *executor, struct tl_closure *closure);
};

/* True when this thread is in the executor now. */
bool tl_executor_is_here(const struct tl_executor *executor);

/* Runs the closure in the executor. The executor that this thread is in may gather such closures for the end of its
 * round. Thread: any. */
void tl_executor_post(const struct tl_executor *executor, struct tl_closure *closure);

/* Enters an executor. Returns the one that this thread was in (NULL: none), for tl_executor_leave. */
const struct tl_executor *tl_executor_enter(const struct tl_executor *executor);
void tl_executor_leave(const struct tl_executor *former);

#endif
