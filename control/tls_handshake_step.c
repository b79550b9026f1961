// SPDX-License-Identifier: Apache-2.0
/*
 * What the handshake thread does with one connection.
 *
 * Happy path: a connection waits, with no more than its descriptor, until its peer has sent something; then it gets a
 * session, and takes a step of the handshake whenever there is more to read. What has passed goes to the relay.
 *
 * Failure modes: a client that speaks HTTP/2 without TLS is told so in its language. Each reason of a refusal is logged
 * at most once a minute for each address. The pair of sockets behind an accepted connection is made of spare
 * descriptors when there are no others, so that each connection that the listener has accepted with one of its spares
 * is served.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/error.h"
#include "base/log.h"
#include "control/connection.h"
#include "control/tls_handshake_internal.h"

/* -------------------------------------------------------------------------------------------------------- ends -- */

void tls_handshake_end(struct tl_tls_handshakes *handshakes, struct handshake *handshake)
{
    tl_list_remove(&handshake->place);
    if (handshake->dial == NULL) handshakes->accepted_count--;
    tl_tls_session_destroy(handshake->session);
    if (handshake->connection >= 0) {
        /* A duplicate of the descriptor, which a forked process may have, would keep it in epoll. */
        (void)epoll_ctl(handshakes->epoll, EPOLL_CTL_DEL, handshake->connection, NULL);
        (void)close(handshake->connection);
    }
    if (handshake->dial != NULL) tls_dial_end(handshake->dial);
    free(handshake);
}

static void log_refusal(struct tl_tls_handshakes *handshakes, const struct handshake *handshake, const char *reason)
{
    char cause[TL_ENDPOINT_TARGET_BYTES + TL_ERROR_MESSAGE_BYTES];
    const char *port = strrchr(handshake->target, ':'); /* another one for each connection */
    int address_len = port != NULL ? (int)(port - handshake->target) : 0;
    snprintf(cause, sizeof(cause), "%.*s %s", address_len, handshake->target, reason);
    if (!tl_log_limit_passes(&handshakes->log_limit, cause)) {
        handshakes->unlogged_count++;
        return;
    }
    TL_LOG_AT_WARN("TLS handshake failed", TL_STR("address", handshake->target), TL_STR("reason", reason),
                   TL_U64("others", handshakes->unlogged_count));
    handshakes->unlogged_count = 0;
}

void tls_handshake_fail(struct tl_tls_handshakes *handshakes, struct handshake *handshake, const struct tl_error *error)
{
    if (handshake->session != NULL) (void)tl_tls_session_flush(handshake->session);
    if (handshake->dial != NULL) {
        tl_error_copy(&handshake->dial->failure, error);
        tl_error_prefix(&handshake->dial->failure, "%s: ", handshake->dial->label);
    } else {
        log_refusal(handshakes, handshake, error->message);
    }
    tls_handshake_end(handshakes, handshake);
}

/* ------------------------------------------------------------------------------------------------------- steps -- */

static void wait_for(struct tl_tls_handshakes *handshakes, struct handshake *handshake, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.ptr = handshake};
    (void)epoll_ctl(handshakes->epoll, EPOLL_CTL_MOD, handshake->connection, &event);
}

void tls_handshake_keep_spares(struct tl_tls_handshakes *handshakes)
{
    while (handshakes->spare_count < TLS_MAX_SPARES) {
        int fd = fcntl(handshakes->event, F_DUPFD_CLOEXEC, 0);
        if (fd < 0) return;
        handshakes->spares[handshakes->spare_count++] = fd;
    }
    atomic_store(&handshakes->uses_spares, false);
}

/* Closes the spares that a pair of sockets needs; false: there are none. */
static bool make_way(struct tl_tls_handshakes *handshakes)
{
    if (handshakes->spare_count < TLS_PAIR_DESCRIPTORS) return false;
    atomic_store(&handshakes->uses_spares, true);
    for (unsigned i = 0; i < TLS_PAIR_DESCRIPTORS; i++)
        (void)close(handshakes->spares[--handshakes->spare_count]);
    return true;
}

/* As tl_tls_relay_add, with spare descriptors when there are no others. What is dialled gets none: links keep their
 * connections for long. */
static enum tl_status add_to_relay(struct tl_tls_handshakes *handshakes, const struct handshake *handshake, int *ret_fd,
                                   struct tl_error *ret_error)
{
    enum tl_status status = tl_tls_relay_add(handshakes->relay, handshake->connection, handshake->session,
                                             handshake->target, ret_fd, ret_error);
    if (status != TL_RESOURCE_EXHAUSTED || handshake->dial != NULL || !make_way(handshakes)) return status;
    return tl_tls_relay_add(handshakes->relay, handshake->connection, handshake->session, handshake->target, ret_fd,
                            ret_error);
}

static void handshake_pass(struct tl_tls_handshakes *handshakes, struct handshake *handshake)
{
    struct tl_error error;
    int fd;
    (void)epoll_ctl(handshakes->epoll, EPOLL_CTL_DEL, handshake->connection, NULL);
    int connection = handshake->connection;
    uint64_t cookie = tl_connection_cookie(connection); /* before the relay has it, which may close it at once */
    /* Certificates may have been loaded again since the handshake began. */
    enum tl_status status = tl_tls_session_recheck(handshake->session, handshakes->context, &error);
    if (status == TL_OK) status = add_to_relay(handshakes, handshake, &fd, &error);
    if (status != TL_OK) {
        tls_handshake_fail(handshakes, handshake, &error);
        return;
    }
    handshake->connection = -1;
    handshake->session = NULL;
    if (handshake->dial != NULL) {
        handshake->dial->fd = fd;
    } else {
        handshake->accepted(handshake->context, fd, connection, cookie);
    }
    tls_handshake_end(handshakes, handshake);
}

/* What a client that does not use TLS is told: the beginning of HTTP/2, and its end, with a reason that it shows. */
static void refuse_plain(const struct handshake *handshake)
{
    static const char reason[] = "this worker speaks TLS only: give the client security.tls";
    enum { REASON_BYTES = sizeof(reason) - 1, HEAD_BYTES = 9 + 9 + 8 };
    static const uint8_t head[HEAD_BYTES] = {
        0, 0,  0,
        8, 0,  0,
        0, 0,  0, /* empty SETTINGS; then a GOAWAY of 8 bytes and the reason, */
        0, 0,  8 + REASON_BYTES,
        7, 0,  0,
        0, 0,  0, /* that nothing was processed, */
        0, 0,  0,
        0, 0,  0,
        0, 12, /* for lack of security (INADEQUATE_SECURITY) */
    };
    uint8_t text[HEAD_BYTES + REASON_BYTES];
    memcpy(text, head, HEAD_BYTES);
    text[3] = 4;
    memcpy(text + HEAD_BYTES, reason, REASON_BYTES);
    (void)send(handshake->connection, text, sizeof(text), MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* Waits for the client to go: the end of the connection could reach it before the reason. */
static void wait_for_refused(struct tl_tls_handshakes *handshakes, struct handshake *handshake)
{
    char unread[4096];
    ssize_t got = recv(handshake->connection, unread, sizeof(unread), MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) tls_handshake_end(handshakes, handshake);
}

/* Whether the peer has gone without a word, as those do that only look whether the port is open. */
static bool is_gone(const struct handshake *handshake)
{
    char byte;
    return recv(handshake->connection, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
}

/* Whether the first bytes are those of HTTP/2. */
static bool is_plain(const struct handshake *handshake)
{
    static const char preface[] = "PRI * HTTP/2.0";
    char bytes[sizeof(preface) - 1];
    return recv(handshake->connection, bytes, sizeof(bytes), MSG_PEEK | MSG_DONTWAIT) == (ssize_t)sizeof(bytes) &&
           memcmp(bytes, preface, sizeof(bytes)) == 0;
}

/* Makes the session; false: there is none, and will be none. */
static bool begin_session(struct tl_tls_handshakes *handshakes, struct handshake *handshake)
{
    struct tl_tls_dial *dial = handshake->dial;
    struct tl_error error;
    enum tl_status status = TL_OK;
    if (dial == NULL && is_gone(handshake)) {
        tls_handshake_end(handshakes, handshake);
        return false;
    }
    if (dial == NULL && is_plain(handshake)) {
        refuse_plain(handshake);
        log_refusal(handshakes, handshake, "it speaks HTTP/2 without TLS");
        handshake->is_refused = true;
        return false;
    }
    if (status == TL_OK) {
        status = tl_tls_session_create(
            handshakes->context, dial != NULL ? TL_TLS_DIALS : TL_TLS_ACCEPTS, handshake->connection,
            dial != NULL && dial->expected_name[0] != '\0' ? dial->expected_name : NULL, &handshake->session, &error);
    }
    if (status != TL_OK) tls_handshake_fail(handshakes, handshake, &error);
    return status == TL_OK;
}

/* Whether TCP is connected; false: the handshake waits, or has ended. */
static bool finish_connecting(struct tl_tls_handshakes *handshakes, struct handshake *handshake)
{
    int error_number = 0;
    socklen_t length = sizeof(error_number);
    (void)getsockopt(handshake->connection, SOL_SOCKET, SO_ERROR, &error_number, &length);
    if (error_number != 0) {
        struct tl_error error;
        tl_error_set(&error, TL_UNAVAILABLE, "no TCP connection: %s", strerror(error_number));
        tls_handshake_fail(handshakes, handshake, &error);
        return false;
    }
    handshake->is_connecting = false;
    return true;
}

void tls_handshake_step(struct tl_tls_handshakes *handshakes, struct handshake *handshake)
{
    if (handshake->is_refused) {
        wait_for_refused(handshakes, handshake);
        return;
    }
    if (handshake->is_connecting && !finish_connecting(handshakes, handshake)) return;
    if (handshake->session == NULL && !begin_session(handshakes, handshake)) return;
    struct tl_error error;
    enum tl_tls_progress progress = tl_tls_session_handshake(handshake->session, &error);
    if (progress == TL_TLS_ENDED) tl_error_set(&error, TL_UNAVAILABLE, "no TLS connection: it ended the connection");
    if (progress == TL_TLS_ENDED || progress == TL_TLS_FAILED) {
        tls_handshake_fail(handshakes, handshake, &error);
        return;
    }
    enum tl_tls_flushed flushed = tl_tls_session_flush(handshake->session);
    if (flushed == TL_TLS_BROKEN) {
        tl_error_set(&error, TL_UNAVAILABLE, "no TLS connection: it ended the connection");
        tls_handshake_fail(handshakes, handshake, &error);
    } else if (progress == TL_TLS_DONE) {
        handshake_pass(handshakes, handshake);
    } else {
        wait_for(handshakes, handshake, flushed == TL_TLS_BLOCKED ? EPOLLIN | EPOLLOUT : EPOLLIN);
    }
}
