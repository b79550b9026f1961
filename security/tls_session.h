// SPDX-License-Identifier: Apache-2.0
/*
 * One TLS connection over a socket that does not block.
 *
 * Happy path: create; tl_tls_session_handshake until it is done, which on the side that dials includes that the peer
 * has answered, so that it has accepted us; then reads and writes. What a call composes for the peer waits in the
 * session until tl_tls_session_flush has sent it.
 *
 * Failure modes: an error ends the session; what it composed for the peer (an alert that says why) can still be
 * flushed. The messages say what was wrong with whose certificate, or what the peer answered.
 *
 * Thread: one at a time.
 */
#ifndef SECURITY_TLS_SESSION_H
#define SECURITY_TLS_SESSION_H

#include <stddef.h>
#include <stdint.h>

#include "security/tls_context.h"

struct tl_tls_session;

enum tl_tls_role { TL_TLS_ACCEPTS, TL_TLS_DIALS };

enum tl_tls_progress {
    TL_TLS_DONE,
    TL_TLS_WANTS_READ, /* again when the socket has more to read */
    TL_TLS_ENDED,      /* the peer has ended the connection */
    TL_TLS_FAILED,     /* the error says why */
};

/* The socket stays the caller's and outlives the session. expected_name is the name that the peer's certificate must
 * be for, "/job:ps/task:0"; NULL: any, but that of a member on the side that dials. Errors: TL_RESOURCE_EXHAUSTED: no
 * memory. */
enum tl_status tl_tls_session_create(struct tl_tls_context *context, enum tl_tls_role role, int socket,
                                     const char *expected_name, struct tl_tls_session **ret_session,
                                     struct tl_error *ret_error) TL_MUST_USE;
void tl_tls_session_destroy(struct tl_tls_session *session); /* NULL is accepted */

/* Goes on with the handshake. The error is TL_UNAUTHENTICATED: one side does not accept the other; TL_UNAVAILABLE: the
 * peer does not speak TLS, or has gone. */
enum tl_tls_progress tl_tls_session_handshake(struct tl_tls_session *session, struct tl_error *ret_error);

/* Who the peer is, and until when its certificate, and those between it and the authority that is trusted, are valid
 * (seconds since 1970), once the handshake is done. */
const struct tl_certificate_name *tl_tls_session_peer(const struct tl_tls_session *session);
int64_t tl_tls_session_not_after(const struct tl_tls_session *session);

/* Whether a context that was loaded later accepts the peer, too: its authorities, its list of revoked certificates, and
 * the clock. With the context of the handshake nothing is looked at again. Errors: TL_UNAUTHENTICATED. */
enum tl_status tl_tls_session_recheck(const struct tl_tls_session *session, const struct tl_tls_context *context,
                                      struct tl_error *ret_error) TL_MUST_USE;

/* Reads plain bytes, as many as are there and fit, of at most 64 records. TL_TLS_DONE: there may be more. With any
 * other result, too, *ret_len_bytes bytes have come before it. Errors: TL_UNAUTHENTICATED: the peer does not accept
 * us. TL_RESOURCE_EXHAUSTED: the peer sends messages of TLS itself without end. TL_UNAVAILABLE: all else. */
enum tl_tls_progress tl_tls_session_read(struct tl_tls_session *session, void *bytes, size_t capacity,
                                         size_t *ret_len_bytes, struct tl_error *ret_error);

/* Encrypts all bytes for the peer. False: the session has failed; so it does when more than 1 MiB waits for a peer that
 * does not read. */
bool tl_tls_session_write(struct tl_tls_session *session, const void *bytes, size_t len_bytes) TL_MUST_USE;
/* Says that nothing more follows. */
void tl_tls_session_write_end(struct tl_tls_session *session);

enum tl_tls_flushed { TL_TLS_FLUSHED, TL_TLS_BLOCKED, TL_TLS_BROKEN };
/* Sends what waits for the peer. TL_TLS_BLOCKED: again when the socket can be written to. TL_TLS_BROKEN: the connection
 * takes nothing any more. */
enum tl_tls_flushed tl_tls_session_flush(struct tl_tls_session *session);

#endif
