// SPDX-License-Identifier: Apache-2.0
/*
 * What the files of the handshake thread share: tls_handshake.c, which has the thread, tls_handshake_step.c, what it
 * does with one connection, and tls_dial.c, the connections that are dialled.
 */
#ifndef CONTROL_TLS_HANDSHAKE_INTERNAL_H
#define CONTROL_TLS_HANDSHAKE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/list.h"
#include "base/log_limit.h"
#include "control/listener.h"
#include "control/tls_handshake.h"

/* A connection needs so many descriptors for its pair of sockets. */
#define TLS_PAIR_DESCRIPTORS 2
#define TLS_MAX_SPARES (TL_LISTENER_MAX_SPARES * TLS_PAIR_DESCRIPTORS)

/* A dial, as its owner sees it. It is freed by its last user: the thread, or the loop when it was posted. */
struct tl_tls_dial {
    struct tl_closure closure; /* to the loop, once is_over */
    struct tl_loop *loop;
    tl_tls_dialled_fn dialled;
    void *owner;
    char label[256];
    char expected_name[TL_CERTIFICATE_NAME_BYTES]; /* "": any */
    pthread_mutex_t mutex;                         /* guards these two */
    bool is_abandoned;
    bool is_over;
    int fd; /* the thread's until is_over */
    struct tl_error failure;
};

struct handshake {
    struct tl_list place;     /* in handshakes->added, accepted or dialled */
    struct tl_tls_dial *dial; /* NULL: it was accepted */
    tl_tls_accepted_fn accepted;
    void *context;
    int connection;
    bool is_connecting;             /* dialled: TCP is not connected yet */
    bool is_refused;                /* accepted: was told to use TLS; waits for the client to go */
    struct tl_tls_session *session; /* NULL: the peer has said nothing yet, or TCP is not connected */
    int64_t deadline_ns;
    char target[TL_ENDPOINT_TARGET_BYTES];
};

struct tl_tls_handshakes {
    struct tl_tls_relay *relay;
    struct tl_tls_settings settings;
    char *strings[5]; /* what the settings refer to */
    int64_t timeout_ns;
    int64_t keepalive_timeout_ns;
    int epoll;
    int event;
    pthread_t thread;
    bool has_thread;
    pthread_mutex_t mutex; /* guards these two */
    struct tl_list added;
    bool is_ending;
    /* The thread's. */
    struct tl_tls_context *context;
    struct tl_list accepted; /* the oldest first */
    size_t accepted_count;
    struct tl_list dialled;
    int spares[TLS_MAX_SPARES]; /* [spare_count] */
    unsigned spare_count;
    atomic_bool uses_spares;       /* a connection took spares, and not all have been opened again */
    int64_t period_ns;             /* when files are looked at next */
    struct tl_log_limit log_limit; /* for each address and reason */
    uint64_t unlogged_count;       /* refusals since one was logged last */
    struct tl_error load_failure;  /* what the look before found; code TL_OK: none */
    bool is_failure_logged;
};

/* ------------------------------------------------------------------------------------------------------- dials -- */

/* Makes one that is not under way yet; NULL: no memory. */
struct tl_tls_dial *tls_dial_create(struct tl_loop *loop, const struct tl_tls_address *address,
                                    tl_tls_dialled_fn dialled, void *owner);
/* Begins to connect; -1 with the error. */
int tls_dial_connect(const char *target, int64_t keepalive_timeout_ns, struct tl_error *ret_error);
/* Whether the owner does not want it any more. */
bool tls_dial_is_abandoned(struct tl_tls_dial *dial);
/* Tells its owner what has become of it, or frees it when that one does not want to know. */
void tls_dial_end(struct tl_tls_dial *dial);
/* Frees one whose end was not told and never will be. */
void tls_dial_free(struct tl_tls_dial *dial);

/* -------------------------------------------------------------------------------------------------- handshakes -- */

/* Takes a step when there is something to read or to write; may free the handshake. */
void tls_handshake_step(struct tl_tls_handshakes *handshakes, struct handshake *handshake);
/* Frees it, without what the relay has taken over (connection -1, session NULL), and ends its dial. */
void tls_handshake_end(struct tl_tls_handshakes *handshakes, struct handshake *handshake);
/* Does the same, after it has told the peer, and the owner of the dial or the log, why. */
void tls_handshake_fail(struct tl_tls_handshakes *handshakes, struct handshake *handshake,
                        const struct tl_error *error);
/* Opens the spares that are missing, as far as there are descriptors. */
void tls_handshake_keep_spares(struct tl_tls_handshakes *handshakes);

#endif
