// SPDX-License-Identifier: Apache-2.0
/*
 * Subscriptions of this program (tl_subscribe): every value of a key of a peer arrives in buffers that were given in
 * advance.
 *
 * Each buffer has a slot, which asks with the subscription's number (tl_fetch_subscription). The owner gives each
 * request another value (server/rendezvous/). A value that has arrived is lent to the program (borrow.h); when its last
 * reference is put, the slot asks again. So as many requests wait at the owner as there are free buffers.
 *
 * Failure modes: a connection that breaks is no end: what was asked is asked again with the same numbers, in the order
 * in which it was asked first. A value that cannot be received is a completion with its status; its slot asks again
 * when that completion was read, so that a peer cannot fill the queue. A status with which the peer refuses a request
 * ends the subscription. Its last completion comes when no transport and no closure uses its slots any more.
 */
#ifndef SERVER_TRANSFERS_SUBSCRIPTION_H
#define SERVER_TRANSFERS_SUBSCRIPTION_H

#include "server/worker_internal.h"

/* Ends a subscription. Returns false when there is none with this id, or it ends already. Thread: the loop's. */
bool tl_subscription_cancel(struct tl_worker *worker, tl_op_id id);

#endif
