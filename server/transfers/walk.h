// SPDX-License-Identifier: Apache-2.0
/*
 * Looks for the published tensors that match a pattern of a client, to list or to withdraw them (control/control.h).
 *
 * Happy path: begin; step until it is complete, each for at most TL_WALK_STEP_NS: entries are copied out of the
 * rendezvous table a page at a time and matched without its mutex; end, after which what was found is freed in such
 * steps too. Failure modes: a listing that does not fit into its client's part of TL_LISTINGS_BYTES fails with
 * RESOURCE_EXHAUSTED.
 *
 * Thread: the loop's owner.
 */
#ifndef SERVER_TRANSFERS_WALK_H
#define SERVER_TRANSFERS_WALK_H

#include "base/clock.h"
#include "control/control.h"

/* How long a look takes at most before others get the loop. */
#define TL_WALK_STEP_NS (2 * TL_NS_PER_MS)
/* The listings that clients have not read to their end may have this many bytes together. */
#define TL_LISTINGS_BYTES (UINT64_C(512) << 20)

enum tl_status tl_walk_begin(void *worker, const struct tl_identity *client, const char *pattern, bool withdraws,
                             struct tl_walk **ret_walk, struct tl_error *ret_error);
enum tl_status tl_walk_step(void *worker, struct tl_walk *walk, struct tl_error *ret_error);
void tl_walk_end(void *worker, struct tl_walk *walk);

struct tl_worker;
void tl_walks_init(struct tl_worker *worker);
/* Frees the walks that have ended, after the loop has run for the last time. */
void tl_walks_fini(struct tl_worker *worker);

#endif
