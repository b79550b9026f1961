// SPDX-License-Identifier: Apache-2.0
/*
 * The transports of a worker, in the order in which they are preferred.
 *
 * Happy path: those that the settings want are opened when the worker opens; each has a reactor and sessions of its
 * own, and each peer a data connection for each of them (server/peers/data_connections.h). Failure modes: one that
 * cannot be opened is missing, and its reason is kept; with "rdma": "require" the worker does not open when none can be
 * opened.
 *
 * Thread: the loop's owner.
 */
#ifndef SERVER_TRANSPORTS_TRANSPORTS_H
#define SERVER_TRANSPORTS_TRANSPORTS_H

#include "server/transports/transport.h"
#include "server/progress/poller.h"

/* The sources of the transports of this version, the preferred one first. */
#define TL_TRANSPORTS(X) X(tl_transport_local) X(tl_transport_verbs)

#define TL_COUNT_ONE(source) +1
enum { TL_MAX_TRANSPORTS = TL_TRANSPORTS(TL_COUNT_ONE) };

extern const struct tl_transport_source *const tl_transports_all[TL_MAX_TRANSPORTS];

/* A transport, or the reason why there is none. */
struct tl_transport_slot {
    const struct tl_transport_source *source;
    struct tl_transport *transport; /* NULL: there is none */
    bool is_wanted;                 /* the settings want this transport */
    const char *reason;             /* why there is none */
    struct tl_error error;
};

/* Opens the transports. Errors, only with "rdma": "require": TL_INVALID_ARGUMENT and others: the reason why there is
 * none. */
enum tl_status tl_transports_create(struct tl_worker *worker, const struct tl_transport_source *const *sources,
                                    size_t count, bool has_thread, struct tl_error *ret_error) TL_MUST_USE;
/* Destroys the transports, which have no sessions. Thread: any, when no thread runs their rounds any more. */
void tl_transports_destroy(struct tl_worker *worker);

/* Joins the reasons why transports, the first `count` of the worker's, are not in use into one text: each with the name
 * of its transport where the settings want several. "" for none. Thread: any. */
void tl_transports_join(const struct tl_worker *worker, const char *const *reasons, size_t count, char *ret_text,
                        size_t capacity);

/* Composes the error for "rdma": "require" when no transport can be used: it names those that the settings want. where:
 * "from here"; reasons: the result of tl_transports_join. */
void tl_transports_require(const struct tl_worker *worker, enum tl_status code, const char *where, const char *reasons,
                           struct tl_error *ret_error);

/* Returns the transport that needs its sources in registered memory; NULL: none is open. */
struct tl_transport *tl_transport_needing_regions(const struct tl_worker *worker);
/* Returns how many transports are open. */
size_t tl_transports_count(const struct tl_worker *worker);
/* Lists the reactors; ret_reactors has TL_MAX_TRANSPORTS places. Returns how many. */
size_t tl_transports_polled(const struct tl_worker *worker, struct tl_polled_reactor *ret_reactors);
/* Adds up the counters of all transports. Blocks: as tl_transport_get_stats. */
void tl_transports_get_stats(struct tl_worker *worker, struct tl_engine_stats *ret_engine,
                             struct tl_memory_stats *ret_memory, struct tl_reactor_stats *ret_reactor);
/* Drains all transports (tl_transport_drain); drained is called at once when there are none. */
void tl_transports_drain(struct tl_worker *worker, int64_t deadline_ns, void (*drained)(void *context), void *context);

/* Adds to the description which transports there are, and what they work with or lack. Errors: TL_RESOURCE_EXHAUSTED:
 * no memory. */
enum tl_status tl_transports_describe(const struct tl_worker *worker, struct tl_description *description,
                                      struct tl_error *ret_error) TL_MUST_USE;

/* Describes the GPUs that this process has opened, as seen from the worker's card; nothing of CUDA is called. It is
 * part of tl_transports_describe, behind the card. Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_transports_describe_gpus(const struct tl_worker *worker, struct tl_description *description,
                                           struct tl_error *ret_error) TL_MUST_USE;

#endif
