// SPDX-License-Identifier: Apache-2.0
/*
 * One connection of the relay (control/tls_relay.h): its two sockets, its session, and the bytes that are on their way
 * between them.
 *
 * Happy path: epoll says, edge-triggered, which of the two sockets can be read or written. The connection is then moved
 * step by step, until neither direction gets further.
 *
 * Failure modes: when one side has ended, what came from it before is still brought to the other one. A connection
 * whose TLS went wrong is logged.
 *
 * Thread: any for tl_relayed_create and tl_relayed_free; for the rest the one that has the relay's mutex `moving`.
 */
#ifndef CONTROL_TLS_RELAYED_H
#define CONTROL_TLS_RELAYED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/list.h"
#include "base/log_limit.h"
#include "control/tls.h"
#include "security/tls_session.h"

/* Bytes that are moved in one step. */
#define TL_RELAYED_STEP_BYTES (128 * 1024)

/* What all connections of a relay share. */
struct tl_relayed_shared {
    int epoll;                     /* waits for the sockets */
    uint8_t *buffer;               /* [TL_RELAYED_STEP_BYTES] */
    size_t pass_bytes;             /* moved in this pass */
    size_t blocked_count;          /* connections whose peer does not take all that is to be sent */
    struct tl_log_limit log_limit; /* for each peer whose TLS went wrong */
};

/* One of the two sockets of a connection, as epoll knows it. */
struct tl_relayed_end {
    struct tl_relayed *relayed;
    int fd;
    bool can_read;
    bool has_ended; /* reads must find the end */
    bool can_write;
    bool asks_write; /* epoll is asked when it can be written to */
};

struct tl_relayed {
    struct tl_list place; /* in the relay's list of all */
    struct tl_list ready; /* in its list of those that can be moved */
    uint64_t cookie;      /* identifies gRPC's end of the pair */
    struct tl_tls_peer *peer;
    struct tl_tls_session *session;
    struct tl_relayed_end tcp;
    struct tl_relayed_end pair;
    uint8_t *plain; /* [plain_begin, plain_end) waits for gRPC; NULL: nothing does */
    size_t plain_begin;
    size_t plain_end;
    bool is_wire_ended; /* nothing more comes from the peer */
    bool is_pair_ended; /* nothing more comes from gRPC */
    int64_t ended_ns;   /* when the first of these became true; 0: neither is */
    int64_t not_after;  /* end of the peer's chain of certificates, in seconds since 1970 */
};

/* Returns a connection without sockets, which refers to the session; NULL: no memory. */
struct tl_relayed *tl_relayed_create(struct tl_tls_session *session, const char *target);
/* Frees it without its sockets and its session. */
void tl_relayed_free(struct tl_relayed *relayed);
/* Takes it out of its lists, closes its sockets and its session, and frees it. */
void tl_relayed_close(struct tl_relayed_shared *shared, struct tl_relayed *relayed);

/* Has epoll wait for both sockets; false: it cannot, and errno says why. */
bool tl_relayed_watch(const struct tl_relayed_shared *shared, struct tl_relayed *relayed);
/* Notes what epoll has said of one of the sockets. */
void tl_relayed_note(struct tl_relayed_shared *shared, struct tl_relayed_end *end, uint32_t events);

enum tl_relayed_step {
    TL_RELAYED_MOVED,
    TL_RELAYED_WAITS, /* nothing can be moved before epoll says so */
    TL_RELAYED_OVER   /* nothing is left to be moved */
};

/* Moves up to TL_RELAYED_STEP_BYTES in each direction. */
enum tl_relayed_step tl_relayed_move(struct tl_relayed_shared *shared, struct tl_relayed *relayed);

void tl_relayed_log_end(const struct tl_relayed *relayed, const struct tl_error *error);

#endif
