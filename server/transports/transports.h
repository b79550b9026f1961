// SPDX-License-Identifier: Apache-2.0
/*
 * The transports of a worker, one for each transport, in the order in which they are preferred.
 *
 * Happy path: those that the settings want are opened when the worker opens; each has a reactor and sessions of its
 * own, and each peer a data connection for each of them (server/peers/data_connections.h). Failure modes: one that
 * cannot be opened is missing, and its reason kept; with "rdma": "require" the worker does not open when none can.
 *
 * Thread: the loop's owner.
 */
#ifndef SERVER_TRANSPORTS_TRANSPORTS_H
#define SERVER_TRANSPORTS_TRANSPORTS_H

#include "server/transports/transport.h"
#include "server/progress/poller.h"

#define TL_MAX_TRANSPORTS 2

/* A data plane, or why there is none. */
struct tl_transport_slot {
    const struct tl_transport_source *source;
    struct tl_transport *transport; /* NULL: none */
    bool is_wanted;                 /* by the settings */
    const char *reason;             /* why there is none */
    struct tl_error error;
};

/* Opens them. Errors: TL_INVALID_ARGUMENT and others, with "rdma": "require": why there is none. */
enum tl_status tl_transports_create(struct tl_worker *worker, const struct tl_transport_source *const *sources,
                                    size_t count, bool has_thread, struct tl_error *ret_error) TL_MUST_USE;
/* No session is left. Thread: any, when nobody drives any more. */
void tl_transports_destroy(struct tl_worker *worker);

/* One text from the reasons why transports, the first `count` of the worker's, are not in use: each with the name of
 * its transport where the settings want several. "" for none. Thread: any. */
void tl_transports_join(const struct tl_worker *worker, const char *const *reasons, size_t count, char *ret_text,
                        size_t capacity);

/* The error where "rdma" is "require" and no data plane can be used: it names those that the settings want. where:
 * "from here"; reasons: as tl_transports_join has put them together. */
void tl_transports_require(const struct tl_worker *worker, enum tl_status code, const char *where, const char *reasons,
                           struct tl_error *ret_error);

/* The one that needs its sources in registered memory; NULL: none is open. */
struct tl_transport *tl_transports_of_cards(const struct tl_worker *worker);
/* How many are open. */
size_t tl_transports_count(const struct tl_worker *worker);
/* The reactors that have no thread; ret_reactors has TL_MAX_TRANSPORTS. Returns how many. */
size_t tl_transports_polled(const struct tl_worker *worker, struct tl_polled_reactor *ret_reactors);
/* Counters of all together. Blocks: as tl_transport_get_stats. */
void tl_transports_get_stats(struct tl_worker *worker, struct tl_engine_stats *ret_engine,
                             struct tl_memory_stats *ret_memory, struct tl_reactor_stats *ret_reactor);
/* As tl_transport_drain, of all; drained is called at once when there are none. */
void tl_transports_drain(struct tl_worker *worker, int64_t deadline_ns, void (*drained)(void *context), void *context);

/* Tells in the description which transports there are, and what the transports work with or lack. Errors:
 * TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_transports_describe(const struct tl_worker *worker, struct tl_description *description,
                                      struct tl_error *ret_error) TL_MUST_USE;

#endif
