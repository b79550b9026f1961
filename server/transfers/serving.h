// SPDX-License-Identifier: Apache-2.0
/*
 * Requests of peers for tensors of this worker, between a transport and the rendezvous table. One serving for each
 * thread that transports run on: the loop's owner, and the reactor's. Both lock the table. The reactor's locks it once
 * to acknowledge several values that were received in one round.
 *
 * Happy path: a request becomes a receiver in the table; the table's answer, now or later, is the reply; the end of the
 * serve acknowledges, releases or orphans what was reserved for it. Failure modes: a worker that is closing refuses; a
 * request that broke off frees its slot at once if it still waited, else the value stays reserved for
 * reservation_timeout_ns. A request can be over while the table's answer, given on another thread, is still on its
 * way to the executor: then the answer ends as the request did.
 *
 * Thread: that of its executor.
 */
#ifndef SERVER_TRANSFERS_SERVING_H
#define SERVER_TRANSFERS_SERVING_H

#include "base/spares.h"
#include "server/progress/executor.h"
#include "tensor/transfer.h"

struct tl_worker;

/* So many values are acknowledged together at most. */
#define TL_SERVING_RECEIVED 16

struct tl_serving {
    struct tl_worker *worker;
    const struct tl_executor *executor;
    struct tl_list serves;    /* struct served (serving.c) */
    struct tl_list unrefused; /* the same: those that the close has not come to yet */
    struct tl_spares spares;  /* struct served, to be used again */
    bool wants_copies;        /* a copy in registered memory is served in place of the tensor, where there is one
                              (server/transports/transport.h) */
    bool is_closing;
    struct tl_closure round_closure;                    /* goes on with the close */
    struct tl_request_id received[TL_SERVING_RECEIVED]; /* not acknowledged yet */
    uint8_t received_count;
    bool is_received_deferred;          /* received_closure is */
    struct tl_closure received_closure; /* acknowledges them */
};

void tl_serving_init(struct tl_serving *serving, struct tl_worker *worker, const struct tl_executor *executor);

/* The functions of a transport's source, with the serving as its context. */
extern const struct tl_source_ops tl_serving_ops;

/* Acknowledges what was received. Fails the requests that still wait for a tensor, some in each round of its
 * executor, and all that come later. Called once. */
void tl_serving_close(struct tl_serving *serving);

/* Nothing is served any more. A zeroed serving is accepted. */
void tl_serving_fini(struct tl_serving *serving);

#endif
