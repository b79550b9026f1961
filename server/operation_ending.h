// SPDX-License-Identifier: Apache-2.0
/*
 * The end of many operations at once: those at a peer that is gone, or all when the worker closes. Some end in each
 * round of the loop, so that others have their turn.
 */
#ifndef SERVER_OPERATION_ENDING_H
#define SERVER_OPERATION_ENDING_H

#include <tensorlane/worker.h>

#include "base/mailbox.h"

struct tl_peer;

struct tl_ops_ending {
    struct tl_closure closure; /* the next round, deferred */
    struct tl_worker *worker;
    const struct tl_peer *peer;    /* what receives from this peer, or is called there, ends; NULL: everything */
    const struct tl_error *status; /* valid until `over` */
    size_t chain;                  /* the calls in the chains of worker->operations.calls before this one have ended */
    void (*over)(struct tl_ops_ending *ending);
};

/* Ends the receives, subscriptions and calls of a zeroed structure whose fields from worker to status are set, and then
 * calls `over`, perhaps before it returns. What begins meanwhile must end by itself. The closure can be removed from
 * its list to end nothing more. */
void tl_ops_end(struct tl_ops_ending *ending);

#endif
