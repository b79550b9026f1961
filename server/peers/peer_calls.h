// SPDX-License-Identifier: Apache-2.0
/*
 * Calls of operations at a peer: tl_put, tl_list, tl_stat, tl_remove.
 *
 * Such a call goes over the connection of a link that this worker has opened. When the peer has opened the one in use,
 * a one-way link is opened besides, which stays. It carries no data connection: when the one in use ends, another one
 * is opened for the calls that come. Some calls run at a time, and the others wait.
 *
 * Failure modes: while the peer cannot be reached, calls wait. When the additional link cannot be opened, or ends
 * before it is up, all calls that wait fail with the reason, unless there is another link by then, and may be made
 * again. When the peer refuses links of this worker (TL_PERMISSION_DENIED: it may not read), they fail with that.
 *
 * Thread: the loop's owner.
 */
#ifndef SERVER_PEERS_PEER_CALLS_H
#define SERVER_PEERS_PEER_CALLS_H

#include "server/peers/data_connection.h"

#include <tensorlane/status.h>

struct tl_link;
struct tl_peer;

/* A call on its way, from tl_peer_call_wait until tl_peer_call_over. */
struct tl_call_wait {
    struct tl_list place; /* in peer->calls.waiting */
    bool is_running;
    bool awaits_data; /* a put's: it does not go while a data connection to the peer is being set up */
    /* The call may be started on this link. tl_peer_call_over follows. */
    void (*ready)(struct tl_call_wait *wait, struct tl_link *link);
    /* There is no link to make the call on, for this reason; the call does not wait any more. */
    void (*failed)(struct tl_call_wait *wait, const struct tl_error *reason);
};

/* Neither callback comes inside of this call. */
void tl_peer_call_wait(struct tl_peer *peer, struct tl_call_wait *wait);
/* The call has ended, or does not wait any more. */
void tl_peer_call_over(struct tl_peer *peer, struct tl_call_wait *wait);

/* Returns whether the peer can fetch the tensor of a put over a data connection, or will be able to,
 * as where the link that it needs is being opened. *ret_reason says why it cannot, and is never freed. */
enum tl_data_connection_use tl_peer_put_use(struct tl_peer *peer, const char **ret_reason);

#endif
