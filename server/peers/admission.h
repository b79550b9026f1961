// SPDX-License-Identifier: Apache-2.0
/*
 * Who is who on links that others open. There are no certificates yet, so a name counts only from where its owner is:
 *
 *   - A member's name is taken from an address that the host of its entry in the cluster resolves to, from any address
 *     of this machine when that host is this machine too, and from what peers.addresses lists; "any" takes it from
 *     everywhere.
 *   - An incarnation that is known of a member is taken from nobody else, and that of a client that is connected only
 *     from the same address. Requests are named by the incarnation of the peer that asks, so acknowledgements and
 *     cancels then count only from that peer, on any of its links.
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

/* From where one member may connect. */
struct tl_origin {
    struct tl_endpoint endpoint;
    struct tl_ip *ips; /* [ip_count], of the endpoint's host, as they were found last; NULL: never */
    size_t ip_count;
    bool is_numeric;          /* the host is an address, and never looked up */
    struct tl_lookup *lookup; /* under way; NULL: none */
    int64_t looked_up_ns;     /* when the latest one ended; 0: none has */
    struct tl_error failure;  /* of the latest one; code TL_OK: it found ips */
    struct tl_ip refused_ip;  /* that was logged last, */
    int64_t refused_ns;       /* and when; 0: none was */
};

/* peers.addresses of the worker. Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_admission_init(struct tl_worker *worker, struct tl_error *ret_error) TL_MUST_USE;
void tl_admission_fini(struct tl_worker *worker); /* after a failed init too */

/* The entry of the member: "host:port". Errors: TL_INVALID_ARGUMENT: it is none. TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_origin_init(struct tl_origin *origin, const char *address, struct tl_error *ret_error) TL_MUST_USE;
/* A zeroed origin is accepted. */
void tl_origin_fini(struct tl_origin *origin);

/* The handler of tl_control_handlers. */
enum tl_link_admission tl_peers_admit(struct tl_worker *worker, const struct tl_identity *who,
                                      struct tl_error *ret_error);

#endif
