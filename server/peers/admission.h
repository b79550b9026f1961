// SPDX-License-Identifier: Apache-2.0
/*
 * Decides who the peer is on a link that a peer opens. There are no certificates yet, so a name counts only from its
 * owner's addresses:
 *
 *   - A member's name is taken from an address that the host of its entry in the cluster resolves to, from any address
 *     of this machine when that host is this machine too, and from what peers.addresses lists; "any" takes it from
 *     everywhere.
 *   - An incarnation that belongs to a member is refused from every other process, and the incarnation of a connected
 *     client is taken from the same address only. Requests are named by the incarnation of the peer that asks, so
 *     acknowledgements and cancels then count only from that peer, on any of its links.
 *
 *   - While spare descriptors are in use, no link is taken: links are kept for long, and the spares are there so that a
 *     worker without descriptors can be asked what it lacks.
 *
 * Happy path: numeric hosts are compared at once; a name is looked up by a thread when the first link asks, and the
 * link waits; what was found is used for a minute, and looked up again when an address does not fit it, at most once a
 * second. Failure modes: a name that cannot be looked up now keeps the addresses that were found last; without any the
 * link is refused with TL_UNAVAILABLE, and the peer tries again.
 *
 * Thread: the loop's owner.
 */
#ifndef SERVER_PEERS_ADMISSION_H
#define SERVER_PEERS_ADMISSION_H

#include "control/control.h"
#include "control/lookup.h"

struct tl_peer;
struct tl_worker;

/* The addresses from which one member may connect. */
struct tl_origin {
    struct tl_endpoint endpoint;
    struct tl_ip *ips; /* [ip_count], what the latest lookup of the host has found; NULL: there was none */
    size_t ip_count;
    bool is_numeric;          /* the host is an address, and never looked up */
    struct tl_lookup *lookup; /* under way; NULL: none */
    int64_t looked_up_ns;     /* when the latest lookup ended; 0: none has */
    struct tl_error failure;  /* why the latest lookup failed; code TL_OK: it found ips */
};

/* Reads peers.addresses of the worker. Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_admission_init(struct tl_worker *worker, struct tl_error *ret_error) TL_MUST_USE;
void tl_admission_fini(struct tl_worker *worker); /* after a failed init too */

/* Prepares the origin of a member with this entry, "host:port". Errors: TL_INVALID_ARGUMENT: it is none.
 * TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_origin_init(struct tl_origin *origin, const char *address, struct tl_error *ret_error) TL_MUST_USE;
/* Ends a lookup and frees the addresses. A zeroed origin is accepted. */
void tl_origin_fini(struct tl_origin *origin);

/* Returns whether a link may be taken; the handler of tl_control_handlers. */
enum tl_link_admission tl_peers_admit(struct tl_worker *worker, const struct tl_identity *who,
                                      struct tl_error *ret_error);

#endif
