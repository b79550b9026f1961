// SPDX-License-Identifier: Apache-2.0
/*
 * Homes: where callbacks belong.
 *
 * Operations, peers and links belong to the owner of the worker's loop, requests that came over the data plane to the
 * owner of its reactor. The rendezvous table calls back on whichever of the two threads caused it. So whoever waits
 * there asks whether he is at executor: if so he goes on at once, if not he sends himself a closure. Who drives a loop
 * or a reactor enters its executor for the duration of a round.
 */
#ifndef SERVER_PROGRESS_EXECUTOR_H
#define SERVER_PROGRESS_EXECUTOR_H

#include <stdbool.h>

#include <tensorlane/status.h>

#include "base/mailbox.h"

struct tl_executor {
    bool is_only; /* there is no other executor in this worker: everybody is here */
    /* Delivers the closure at executor. Thread: any. */
    void (*post)(const struct tl_executor *executor, struct tl_closure *closure);
};

/* True when this thread is in the executor now. */
bool tl_executor_is_here(const struct tl_executor *executor);

/* Enters an executor; returns the one that this thread was in (NULL: none), for tl_executor_leave. */
const struct tl_executor *tl_executor_enter(const struct tl_executor *executor);
void tl_executor_leave(const struct tl_executor *former);

/* An error that is taken along: NULL for TL_OK and for NULL; a constant, with code TL_RESOURCE_EXHAUSTED, when there is
 * no memory. Ownership: tl_error_drop. */
const struct tl_error *tl_error_keep(const struct tl_error *error);
void tl_error_drop(const struct tl_error *kept); /* NULL is accepted */

/* The kept one, or TL_OK for NULL. */
const struct tl_error *tl_error_kept(const struct tl_error *kept);

#endif
