// SPDX-License-Identifier: Apache-2.0
/*
 * Tries the data paths to peers, as a part of a round of probes (server/peers/prober.h).
 *
 * Happy path: as a receive does, the probe of a peer wants a link to it and waits for a data connection; over that it
 * asks for the two values that each worker has for this (server/probe_values.h), the small one first, and checks the
 * bytes. A connection that is up shows in this way that it still works, and one that has to be set up shows it already
 * by its handshake.
 *
 * Failure modes: a connection that breaks is set up again by its own states, and the probe waits for that, because the
 * handshake finds out why nothing passes. Then the reason of the connection is that of the probe. What waits for memory
 * or for a place on a busy connection until the end is not judged, nor is a peer without a link, of an older release,
 * or to which the two workers have no transport.
 *
 * Thread: the loop's owner.
 */
#ifndef SERVER_PEERS_PATH_PROBE_H
#define SERVER_PEERS_PATH_PROBE_H

#include "control/client.h"

struct tl_path_round;
struct tl_worker;

/* Begins to try the peers with the names in results, that at index `first` first, until deadline_ns. One is tried at a
 * time, besides those that take long, because all workers of a cluster may do so at once. over(context) follows once,
 * perhaps before this returns, unless the round is released before. Ownership: tl_path_round_release. NULL: no memory;
 * over is not called. */
struct tl_path_round *tl_path_round_start(struct tl_worker *worker, const struct tl_probe_results *results,
                                          size_t first, int64_t deadline_ns, void (*over)(void *context),
                                          void *context);
/* Returns why no tensor travels over a data path to the peer at that index of the results, "cause; remedy"; "": tensors
 * do, or it was not judged. */
const char *tl_path_round_reason(const struct tl_path_round *round, size_t index);
/* Gives up the probe of one peer, unless it is over. */
void tl_path_round_give_up(struct tl_path_round *round, size_t index);
/* Gives up what is still open. The round is freed when that has ended. NULL is accepted. */
void tl_path_round_release(struct tl_path_round *round);

#endif
