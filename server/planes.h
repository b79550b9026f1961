// SPDX-License-Identifier: Apache-2.0
/*
 * The data planes of a worker, one for each transport, in the order in which they are preferred.
 *
 * Happy path: those that the settings want are opened when the worker opens; each has a reactor and sessions of its
 * own, and each peer a data path for each of them (server/data_paths.h). Failure modes: one that cannot be opened is
 * missing, and its reason kept; with "rdma": "require" the worker does not open when none can.
 *
 * Thread: the loop's owner.
 */
#ifndef SERVER_PLANES_H
#define SERVER_PLANES_H

#include "server/plane.h"
#include "server/turn.h"

#define TL_MAX_PLANES TL_MAX_DRIVEN

/* A data plane, or why there is none. */
struct tl_plane_slot {
    const struct tl_plane_source *source;
    struct tl_plane *plane; /* NULL: none */
    bool is_wanted;         /* by the settings */
    const char *reason;     /* why there is none */
    struct tl_error error;
};

/* Opens them. Errors: TL_INVALID_ARGUMENT and others, with "rdma": "require": why there is none. */
enum tl_status tl_planes_create(struct tl_worker *worker, const struct tl_plane_source *const *sources, size_t count,
                                bool has_thread, struct tl_error *ret_error) TL_MUST_USE;
/* No session is left. Thread: any, when nobody drives any more. */
void tl_planes_destroy(struct tl_worker *worker);

/* One text from the reasons why data planes, the first `count` of the worker's, are not in use: each with the name of
 * its transport where the settings want several. "" for none. Thread: any. */
void tl_planes_join(const struct tl_worker *worker, const char *const *reasons, size_t count, char *ret_text,
                    size_t capacity);

/* The error where "rdma" is "require" and no data plane can be used: it names those that the settings want. where:
 * "from here"; reasons: as tl_planes_join has put them together. */
void tl_planes_require(const struct tl_worker *worker, enum tl_status code, const char *where, const char *reasons,
                       struct tl_error *ret_error);

/* The one that needs its sources in registered memory; NULL: none is open. */
struct tl_plane *tl_planes_of_cards(const struct tl_worker *worker);
/* How many are open. */
size_t tl_planes_count(const struct tl_worker *worker);
/* The reactors that have no thread; ret_reactors has TL_MAX_PLANES. Returns how many. */
size_t tl_planes_driven(const struct tl_worker *worker, struct tl_turn_reactor *ret_reactors);
/* Counters of all together. Blocks: as tl_plane_get_stats. */
void tl_planes_get_stats(struct tl_worker *worker, struct tl_engine_stats *ret_engine,
                         struct tl_memory_stats *ret_memory, struct tl_reactor_stats *ret_reactor);
/* As tl_plane_drain, of all; drained is called at once when there are none. */
void tl_planes_drain(struct tl_worker *worker, int64_t deadline_ns, void (*drained)(void *context), void *context);

/* Tells in the description which transports there are, and what the data planes work with or lack. Errors:
 * TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_planes_describe(const struct tl_worker *worker, struct tl_description *description,
                                  struct tl_error *ret_error) TL_MUST_USE;

#endif
