// SPDX-License-Identifier: Apache-2.0
/*
 * The relay: moves bytes between TLS connections and gRPC's ends of pairs of Unix sockets.
 *
 * The owner of a loop moves them while it is at work, so that a request and its answer wake no thread besides those
 * that handle them; otherwise a thread of the relay's does. That thread also helps where they are many, and the process
 * may use more than two processors. Both directions of a connection have one buffer; what the other side does not take
 * at once waits with the connection, and nothing more is read for it until it has left.
 *
 * Thread: any, unless a function says otherwise.
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
 * Errors: TL_RESOURCE_EXHAUSTED: no memory or descriptor. TL_INTERNAL: the system lacks SO_COOKIE. After one,
 * connection and session stay the caller's. */
enum tl_status tl_tls_relay_add(struct tl_tls_relay *relay, int connection, struct tl_tls_session *session,
                                const char *target, int *ret_fd, struct tl_error *ret_error) TL_MUST_USE;

/* tl_tls_find. */
struct tl_tls_peer *tl_tls_relay_find(struct tl_tls_relay *relay, uint64_t cookie);

/* A loop's owner may enter from now on; wake_fd, an eventfd, ends its waits when it is written to, and outlives this.
 * Once. Errors: TL_RESOURCE_EXHAUSTED: no memory. Thread: the loop's owner, as the rest of these. */
enum tl_status tl_tls_relay_attach(struct tl_tls_relay *relay, int wake_fd, struct tl_error *ret_error) TL_MUST_USE;
void tl_tls_relay_detach(struct tl_tls_relay *relay);

/* Takes the connections over from the thread until tl_tls_relay_drive gives them back. False: there are none, or the
 * thread is at work. */
bool tl_tls_relay_enter(struct tl_tls_relay *relay);

/* Moves what can be moved; if that is nothing, waits for some until deadline_ns (0: not at all), and for a millisecond
 * at most. Returns for how many sockets something came. *ret_is_over: nothing came for a millisecond, much did, or the
 * thread has taken the connections back: enter again before the next call. */
unsigned tl_tls_relay_drive(struct tl_tls_relay *relay, int64_t deadline_ns, bool *ret_is_over);

/* The owner drives no more for now. Returns whether it gives the connections back, because something is left to move.
 */
bool tl_tls_relay_pause(struct tl_tls_relay *relay);

/* Ends connections whose peer the context does not accept, soon. */
void tl_tls_relay_recheck(struct tl_tls_relay *relay, struct tl_tls_context *context);

#endif
