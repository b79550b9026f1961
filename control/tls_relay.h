// SPDX-License-Identifier: Apache-2.0
/*
 * The relay: moves bytes between TLS connections and gRPC's ends of pairs of Unix sockets, in a thread of its own.
 *
 * Both directions of a connection have one buffer of the thread; what the other side does not take at once waits with
 * the connection, and nothing more is read for it until it has left. Thread: any.
 */
#ifndef CONTROL_TLS_RELAY_H
#define CONTROL_TLS_RELAY_H

#include "control/tls.h"
#include "security/tls_session.h"

struct tl_tls_relay;

enum tl_status tl_tls_relay_create(struct tl_tls_relay **ret_relay, struct tl_error *ret_error) TL_MUST_USE;
/* Ends all connections and the thread. */
void tl_tls_relay_end(struct tl_tls_relay *relay);
/* It was ended. NULL is accepted. */
void tl_tls_relay_destroy(struct tl_tls_relay *relay);

/* Takes over a connection and its session, whose handshake is done, and returns gRPC's end of a new pair of sockets.
 * Errors: TL_RESOURCE_EXHAUSTED: no memory or descriptor; connection and session stay the caller's. */
enum tl_status tl_tls_relay_add(struct tl_tls_relay *relay, int connection, struct tl_tls_session *session,
                                const char *target, int *ret_fd, struct tl_error *ret_error) TL_MUST_USE;

/* tl_tls_find. */
struct tl_tls_peer *tl_tls_relay_find(struct tl_tls_relay *relay, int fd);

/* Ends connections whose peer the context does not accept, soon. */
void tl_tls_relay_recheck(struct tl_tls_relay *relay, struct tl_tls_context *context);

#endif
