// SPDX-License-Identifier: Apache-2.0
/*
 * A session: one connection of the data plane with one peer, as the loop's thread sees it, from the first closure to
 * the reactor until nothing of it is left there.
 *
 * Happy path: tl_session_open starts it with the peer's identity. address_ready hands over what the peer must know. The
 * side that opened the link calls tl_session_connect when the peer has answered. After `up` the session carries
 * fetches; `closed` ends it. The connection itself belongs to the reactor's thread; closures that are embedded in the
 * session and in its requests go there, and each comes back. A session is freed when its connection has ended, no
 * closure is out and no request is left. Failure modes: whatever fails is reported by `closed`, once; a session that
 * its owner abandons ends by itself. The states are in server/peers/session_internal.h.
 *
 * Thread: the loop's owner.
 */
#ifndef SERVER_PEERS_SESSION_H
#define SERVER_PEERS_SESSION_H

#include "server/transports/transport.h"

struct tl_session;
struct tl_peer_request;

struct tl_session_events {
    /* The connection exists; these bytes go to the peer. The side that did not open the link is connecting already. */
    void (*address_ready)(void *owner, const uint8_t *bytes, uint32_t len_bytes);
    void (*up)(void *owner);
    /* The connection has ended, or could not be made. This is the last call, and comes once. The owner must not use the
     * session any more. */
    void (*closed)(void *owner, const struct tl_error *reason);
};

/* Opens a session. offer is the peer's address on the side that did not open the link, and NULL for the opener.
 * Ownership: the session frees itself. Errors: TL_RESOURCE_EXHAUSTED: no memory, or too many offers of this member, or
 * of clients, are under way. TL_INVALID_ARGUMENT: the offer is too long or not an address. TL_FAILED_PRECONDITION: as
 * tl_conn_check_address. */
enum tl_status tl_session_open(struct tl_transport *transport, const struct tl_identity *peer, const uint8_t *offer,
                               uint32_t len_bytes, const struct tl_session_events *events, void *owner,
                               struct tl_session **ret_session, struct tl_error *ret_error) TL_MUST_USE;
/* The opener's second step, with what the peer has answered. Errors: TL_INVALID_ARGUMENT: the answer is too long. */
enum tl_status tl_session_connect(struct tl_session *session, const uint8_t *bytes, uint32_t len_bytes,
                                  struct tl_error *ret_error) TL_MUST_USE;
/* Ends the session with this reason; no further callback reaches the owner. */
void tl_session_abandon(struct tl_session *session, const struct tl_error *reason);

/* Returns how many of the latest requests were answered over the session, and their numbers: the peer may not have
 * heard that their tensors have arrived. Valid until the loop's next round. */
size_t tl_session_unconfirmed(const struct tl_session *session, const uint64_t **ret_numbers);
/* Returns how fast the connection is; all fields are zero before it is up. */
const struct tl_conn_measures *tl_session_measures(const struct tl_session *session);
const struct tl_identity *tl_session_peer(const struct tl_session *session);

/* Asks for the tensor of the request; fetch.ops->done follows exactly once. */
void tl_session_fetch(struct tl_session *session, struct tl_peer_request *request);
/* Gives the request up. done follows all the same, once no write can reach the destination any more. */
void tl_session_cancel(struct tl_peer_request *request);
/* What a tl_request_ops has as `done` on the reactor: brings the result back to the loop. */
void tl_session_fetch_done(struct tl_fetch *fetch, const struct tl_error *result);

/* Ends the sessions of a transport that are not up, and lets all others finish what they carry. Called once. */
void tl_sessions_drain(struct tl_transport *transport);
/* Ends all sessions of a transport with this reason. */
void tl_sessions_close(struct tl_transport *transport, const struct tl_error *reason);

#endif
