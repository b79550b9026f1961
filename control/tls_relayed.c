// SPDX-License-Identifier: Apache-2.0
#include "control/tls_relayed.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"

struct tl_tls_peer *tl_tls_peer_retain(struct tl_tls_peer *peer)
{
    atomic_fetch_add(&peer->references, 1);
    return peer;
}

void tl_tls_peer_release(struct tl_tls_peer *peer)
{
    if (peer != NULL && atomic_fetch_sub(&peer->references, 1) == 1) free(peer);
}

void tl_relayed_free(struct tl_relayed *relayed)
{
    tl_tls_peer_release(relayed->peer);
    free(relayed->plain);
    free(relayed);
}

struct tl_relayed *tl_relayed_create(struct tl_tls_session *session, const char *target)
{
    struct tl_relayed *relayed = calloc(1, sizeof(*relayed));
    struct tl_tls_peer *peer = calloc(1, sizeof(*peer));
    if (relayed == NULL || peer == NULL) {
        free(relayed);
        free(peer);
        return NULL;
    }
    atomic_init(&peer->references, 1);
    peer->name = *tl_tls_session_peer(session);
    snprintf(peer->target, sizeof(peer->target), "%s", target);
    relayed->peer = peer;
    relayed->session = session;
    relayed->not_after = tl_tls_session_not_after(session);
    tl_list_init(&relayed->place);
    tl_list_init(&relayed->ready);
    relayed->tcp = (struct tl_relayed_end){.relayed = relayed, .fd = -1, .can_read = true, .can_write = true};
    relayed->pair = relayed->tcp;
    return relayed;
}

/* A duplicate of the descriptor, which a forked process or the guard may have, would keep the socket in epoll. */
static void close_end(const struct tl_relayed_shared *shared, const struct tl_relayed_end *end)
{
    (void)epoll_ctl(shared->epoll, EPOLL_CTL_DEL, end->fd, NULL);
    (void)close(end->fd);
}

static void set_blocked(struct tl_relayed_shared *shared, struct tl_relayed *relayed, bool is_blocked)
{
    if (relayed->tcp.can_write == !is_blocked) return;
    relayed->tcp.can_write = !is_blocked;
    shared->blocked_count += is_blocked ? 1 : -1;
}

void tl_relayed_close(struct tl_relayed_shared *shared, struct tl_relayed *relayed)
{
    set_blocked(shared, relayed, false);
    tl_list_remove(&relayed->place);
    tl_list_remove(&relayed->ready);
    tl_tls_session_destroy(relayed->session);
    close_end(shared, &relayed->tcp);
    close_end(shared, &relayed->pair);
    tl_relayed_free(relayed);
}

static void note_end(struct tl_relayed *relayed, bool *end)
{
    *end = true;
    if (relayed->ended_ns == 0) relayed->ended_ns = tl_clock_now_ns();
}

/* A Unix socket says whenever its peer has read that it can be written to, so that it is asked only when that matters.
 */
static bool watch(const struct tl_relayed_shared *shared, int operation, struct tl_relayed_end *end)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | EPOLLET, .data.ptr = end};
    if (!end->can_write) event.events |= EPOLLOUT;
    end->asks_write = !end->can_write;
    return epoll_ctl(shared->epoll, operation, end->fd, &event) == 0;
}

static void maybe_watch(const struct tl_relayed_shared *shared, struct tl_relayed_end *end)
{
    if (end->asks_write == end->can_write) (void)watch(shared, EPOLL_CTL_MOD, end);
}

bool tl_relayed_watch(const struct tl_relayed_shared *shared, struct tl_relayed *relayed)
{
    return watch(shared, EPOLL_CTL_ADD, &relayed->tcp) && watch(shared, EPOLL_CTL_ADD, &relayed->pair);
}

void tl_relayed_note(struct tl_relayed_shared *shared, struct tl_relayed_end *end, uint32_t events)
{
    if ((events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) end->can_read = true;
    if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) end->has_ended = true;
    bool can_write = (events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) != 0;
    if (can_write && end == &end->relayed->tcp) set_blocked(shared, end->relayed, false);
    if (can_write) end->can_write = true;
}

/* ------------------------------------------------------------------------------------------------------ moving -- */

/* Gives gRPC what waits for it; false: it does not take all of it now. */
static bool push_plain(struct tl_relayed *relayed, const uint8_t *bytes, size_t *begin, size_t end)
{
    while (*begin < end) {
        ssize_t sent = send(relayed->pair.fd, bytes + *begin, end - *begin, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0) {
            *begin += (size_t)sent;
        } else if (errno == EAGAIN) {
            relayed->pair.can_write = false;
            return false;
        } else if (errno != EINTR) {
            /* gRPC has closed its end and does not want the rest. */
            note_end(relayed, &relayed->is_pair_ended);
            *begin = end;
        }
    }
    return true;
}

/* Keeps what gRPC did not take; false without memory. */
static bool keep_plain(struct tl_relayed *relayed, const uint8_t *bytes, size_t len_bytes)
{
    relayed->plain = malloc(len_bytes);
    if (relayed->plain == NULL) return false;
    memcpy(relayed->plain, bytes, len_bytes);
    relayed->plain_begin = 0;
    relayed->plain_end = len_bytes;
    return true;
}

void tl_relayed_log_end(const struct tl_relayed *relayed, const struct tl_error *error)
{
    TL_LOG_AT_WARN("TLS connection ended", TL_STR("peer", relayed->peer->name.text),
                   TL_STR("address", relayed->peer->target), TL_STR("reason", error->message));
}

/* One step from the peer to gRPC; false: nothing can be moved now. */
static bool move_in(struct tl_relayed_shared *shared, struct tl_relayed *relayed)
{
    if (relayed->plain != NULL) {
        if (!relayed->pair.can_write || !push_plain(relayed, relayed->plain, &relayed->plain_begin, relayed->plain_end))
            return false;
        free(relayed->plain);
        relayed->plain = NULL;
    }
    if (!relayed->tcp.can_read || relayed->is_wire_ended) return false;
    size_t len_bytes, begin = 0;
    struct tl_error error;
    switch (tl_tls_session_read(relayed->session, shared->buffer, TL_RELAYED_STEP_BYTES, &len_bytes, &error)) {
    case TL_TLS_DONE:
        break;
    case TL_TLS_WANTS_READ:
        relayed->tcp.can_read = false;
        break;
    case TL_TLS_FAILED:
        if (error.code != TL_UNAVAILABLE && tl_log_limit_passes(&shared->log_limit, relayed->peer->name.text))
            tl_relayed_log_end(relayed, &error);
        note_end(relayed, &relayed->is_wire_ended);
        break;
    case TL_TLS_ENDED:
        note_end(relayed, &relayed->is_wire_ended);
    }
    shared->pass_bytes += len_bytes;
    if (!push_plain(relayed, shared->buffer, &begin, len_bytes) &&
        !keep_plain(relayed, shared->buffer + begin, len_bytes - begin)) {
        note_end(relayed, &relayed->is_wire_ended);
    }
    return len_bytes > 0;
}

/* One step from gRPC to the peer; false: nothing can be moved now. */
static bool move_out(struct tl_relayed_shared *shared, struct tl_relayed *relayed)
{
    if (!relayed->tcp.can_write) return false;
    switch (tl_tls_session_flush(relayed->session)) {
    case TL_TLS_FLUSHED:
        break;
    case TL_TLS_BLOCKED:
        set_blocked(shared, relayed, true);
        return false;
    case TL_TLS_BROKEN:
        note_end(relayed, &relayed->is_wire_ended);
        note_end(relayed, &relayed->is_pair_ended);
        return false;
    }
    if (!relayed->pair.can_read || relayed->is_pair_ended) return false;
    ssize_t got = recv(relayed->pair.fd, shared->buffer, TL_RELAYED_STEP_BYTES, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
        relayed->pair.can_read = errno == EINTR;
        return errno == EINTR;
    }
    if (got <= 0) {
        note_end(relayed, &relayed->is_pair_ended);
        tl_tls_session_write_end(relayed->session);
        return true;
    }
    shared->pass_bytes += (size_t)got;
    if (got < TL_RELAYED_STEP_BYTES && !relayed->pair.has_ended) relayed->pair.can_read = false;
    if (tl_tls_session_write(relayed->session, shared->buffer, (size_t)got)) return true;
    note_end(relayed, &relayed->is_wire_ended);
    note_end(relayed, &relayed->is_pair_ended);
    return false;
}

enum tl_relayed_step tl_relayed_move(struct tl_relayed_shared *shared, struct tl_relayed *relayed)
{
    bool has_moved = move_in(shared, relayed);
    has_moved = move_out(shared, relayed) || has_moved;
    if (has_moved) return TL_RELAYED_MOVED;
    bool is_read = relayed->is_wire_ended && relayed->plain == NULL;
    bool is_written = relayed->is_pair_ended && relayed->tcp.can_write;
    if (is_read || is_written) return TL_RELAYED_OVER;
    maybe_watch(shared, &relayed->tcp);
    maybe_watch(shared, &relayed->pair);
    return TL_RELAYED_WAITS;
}
