// SPDX-License-Identifier: Apache-2.0
/*
 * TLS for everything that gRPC carries: handshakes before gRPC sees a connection, and a relay that moves the bytes
 * between the connection and gRPC afterwards (docs/security.md).
 *
 * Happy path: a socket that was accepted, or an address to dial, is given to the handshake thread. When both sides have
 * accepted each other, a pair of Unix sockets is made: one end is for gRPC, the relay thread has the other one.
 *
 * Failure modes: a handshake that fails, or lasts too long, ends its connection; so do an end of either side, a
 * certificate that has expired, and one that files which were loaded later do not accept. A socket that is accepted and
 * says nothing takes a place, of which there are MAX_HANDSHAKES (tls_handshake.c); one more ends the oldest.
 *
 * Thread: any, unless a function says otherwise.
 */
#ifndef CONTROL_TLS_H
#define CONTROL_TLS_H

#include <grpc/grpc.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "control/endpoint.h"
#include "control/loop.h"
#include "security/tls_context.h"

struct tl_tls;

struct tl_tls_options {
    struct tl_tls_settings settings; /* its strings are copied */
    int64_t handshake_timeout_ns;
    int64_t keepalive_timeout_ns; /* for bytes of a connection to be acknowledged by its peer */
};

/* Loads the files and starts the threads. Errors: as tl_tls_context_load. TL_RESOURCE_EXHAUSTED: no memory, thread or
 * descriptor. */
enum tl_status tl_tls_create(const struct tl_tls_options *options, struct tl_tls **ret_tls,
                             struct tl_error *ret_error) TL_MUST_USE;

/* From now on the loop's owner moves bytes itself while it is at work, and the relay thread the rest. Once.
 * Errors: TL_RESOURCE_EXHAUSTED: no descriptor. Thread: the loop's owner, as tl_tls_end then. */
enum tl_status tl_tls_attach(struct tl_tls *tls, struct tl_loop *loop, struct tl_error *ret_error) TL_MUST_USE;

/* Ends all connections and handshakes, and the threads: nothing that was accepted is called any more, and dials fail,
 * those that come later, too. Once. Blocks: for a handshake that is being computed. */
void tl_tls_end(struct tl_tls *tls);

struct tl_tls *tl_tls_retain(struct tl_tls *tls); /* NULL is accepted, and returned */
/* The last release frees it; it was ended before. NULL is accepted. */
void tl_tls_release(struct tl_tls *tls);

/* The other side of a TLS connection. */
struct tl_tls_peer {
    atomic_uint references;
    struct tl_certificate_name name;
    char target[TL_ENDPOINT_TARGET_BYTES]; /* where the connection comes from, or was dialled to */
};

struct tl_tls_peer *tl_tls_peer_retain(struct tl_tls_peer *peer);
void tl_tls_peer_release(struct tl_tls_peer *peer); /* NULL is accepted */

/* Finds whose connection it is of which gRPC has the end with this cookie (tl_connection_cookie); NULL: none that is
 * up. Ownership: tl_tls_peer_release. */
struct tl_tls_peer *tl_tls_find(struct tl_tls *tls, uint64_t cookie);

/* A connection has passed its handshake: gRPC's end of the pair, which is the callee's, and the TCP connection, for the
 * callee to look at (tl_connection_cookie). The relay may have ended it, and its descriptor may be another file's by
 * now. Thread: the handshake thread. */
typedef void (*tl_tls_accepted_fn)(void *context, int fd, int connection, uint64_t cookie);

/* Takes over a TCP connection that was accepted. */
void tl_tls_accept(struct tl_tls *tls, int connection, tl_tls_accepted_fn accepted, void *context);

/* Whether connections that were accepted have taken spare descriptors that could not be opened again yet. */
bool tl_tls_uses_spares(const struct tl_tls *tls);

struct tl_tls_dial;

/* How a dial has ended: with gRPC's end of the pair, which is the callee's, or (fd -1) the reason. Thread: the loop's
 * owner. */
typedef void (*tl_tls_dialled_fn)(void *owner, int fd, const struct tl_error *failure);

struct tl_tls_address {
    const char *target;        /* "ipv4:10.0.0.7:4000" */
    const char *label;         /* how messages call it: "ps-0.example.org:4000" */
    const char *expected_name; /* that the peer's certificate must be for; NULL: any */
    int64_t deadline_ns;
};

/* Connects to an address. dialled is called once, unless the dial is abandoned before. The strings are copied.
 * Errors: TL_RESOURCE_EXHAUSTED: no memory. TL_CANCELLED: it has ended. */
enum tl_status tl_tls_dial(struct tl_tls *tls, struct tl_loop *loop, const struct tl_tls_address *address,
                           tl_tls_dialled_fn dialled, void *owner, struct tl_tls_dial **ret_dial,
                           struct tl_error *ret_error) TL_MUST_USE;
/* Its end is of no interest any more. Not after dialled. Thread: the loop's owner. */
void tl_tls_dial_abandon(struct tl_tls_dial *dial);

#endif
