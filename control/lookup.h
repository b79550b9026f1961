// SPDX-License-Identifier: Apache-2.0
/*
 * A look-up: finds, in a thread of its own, the address at which a host accepts connections.
 *
 * Links use it for names, so that they ask the same name service as the tools do, and so that an error distinguishes a
 * wrong name from a closed port. gRPC, which would ask one of its own, is given a numeric address.
 *
 * Thread: the loop's owner.
 */
#ifndef CONTROL_LOOKUP_H
#define CONTROL_LOOKUP_H

#include "control/endpoint.h"
#include "control/loop.h"

struct tl_lookup;

/* What was found: a target, or why there is none. */
typedef void (*tl_lookup_done_fn)(void *owner, const char *target, const struct tl_error *error);

/* Starts a look-up, whose dialling ends at deadline_ns. done is called once, from the loop, unless the look-up is
 * abandoned before. Errors: TL_RESOURCE_EXHAUSTED: no memory or thread. */
enum tl_status tl_lookup_start(struct tl_loop *loop, const struct tl_endpoint *endpoint, int64_t deadline_ns,
                               tl_lookup_done_fn done, void *owner, struct tl_lookup **ret_lookup,
                               struct tl_error *ret_error) TL_MUST_USE;

/* A host has at most so many addresses here; more are dropped. */
#define TL_LOOKUP_MAX_IPS 64

/* All addresses of a host that were found, or why there are none: count is 0 then. */
typedef void (*tl_lookup_ips_fn)(void *owner, const struct tl_ip *ips, size_t count, const struct tl_error *error);

/* The same without dialling: finds all addresses of the host. */
enum tl_status tl_lookup_ips(struct tl_loop *loop, const struct tl_endpoint *endpoint, tl_lookup_ips_fn done,
                             void *owner, struct tl_lookup **ret_lookup, struct tl_error *ret_error) TL_MUST_USE;

/* Its end is of no interest any more; the thread frees what it holds. Not after done. */
void tl_lookup_abandon(struct tl_lookup *lookup);

#endif
