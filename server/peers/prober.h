// SPDX-License-Identifier: Apache-2.0
/*
 * Tries all peers of a worker on request (tensorlane.v1.Cluster/Probe).
 *
 * Happy path: the first call starts a round, further calls join it; some threads try one peer after the other, the last
 * one posts the round to the loop, and all calls are answered. Meanwhile the loop tries the data paths
 * (server/peers/path_probe.h). A call that comes soon after a round gets its results again, so that asking often costs
 * little. Only members of the cluster are tried, at the addresses of the configuration. A round changes nothing of
 * links and data connections that work; where data paths are wanted it sets up those that are missing.
 *
 * Thread: the loop's owner.
 */
#ifndef SERVER_PEERS_PROBER_H
#define SERVER_PEERS_PROBER_H

#include "control/control.h"

struct tl_worker;

/* The handler of tl_control_handlers. Errors: TL_UNAVAILABLE: the worker closes. TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_prober_ask(void *worker, const struct tl_probe_results **ret_results, struct tl_error *ret_error);
/* Gives a round up, and ends the calls that wait for it. */
void tl_prober_stop(struct tl_worker *worker);
void tl_prober_fini(struct tl_worker *worker);

#endif
