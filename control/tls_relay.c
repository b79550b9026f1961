// SPDX-License-Identifier: Apache-2.0
/*
 * The relay thread.
 *
 * Happy path: epoll says, edge-triggered, which of the two sockets of a connection can be read or written; the
 * connection then waits in `ready` and is moved, for a bounded number of bytes at a time, until neither direction gets
 * further.
 *
 * Failure modes: when one side has ended, what came from it before is still brought to the other one, for LINGER_NS at
 * most. The certificates of peers are looked at again once a second: for the end of their time, and against a context
 * that was loaded after the handshake.
 */
#include "control/tls_relay.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/log.h"
#include "base/number_map.h"
#include "base/random.h"
#include "base/thread.h"

/* Bytes that are moved in one step. */
#define STEP_BYTES (128 * 1024)
/* Steps of one connection before others have theirs. */
#define MAX_STEPS 8
#define MAX_EVENTS 64
#define LINGER_NS (5 * TL_NS_PER_SEC)
#define PERIOD_NS TL_NS_PER_SEC
#define NAME_PREFIX "tensorlane-"

/* One of the two sockets of a connection, as epoll knows it. */
struct relay_end {
    struct relayed *relayed;
    int fd;
    bool can_read;
    bool can_write;
};

struct relayed {
    struct tl_list place; /* in relay->all */
    struct tl_list ready; /* in relay->ready */
    uint64_t id;          /* in the name of our end of the pair */
    struct tl_tls_peer *peer;
    struct tl_tls_session *session;
    struct relay_end tcp;
    struct relay_end pair;
    uint8_t *plain; /* [plain_begin, plain_end) waits for gRPC; NULL: nothing does */
    size_t plain_begin;
    size_t plain_end;
    bool is_wire_ended; /* nothing more comes from the peer */
    bool is_pair_ended; /* nothing more comes from gRPC */
    int64_t ended_ns;   /* when the first of these became true; 0: neither is */
    int64_t not_after;  /* end of the peer's certificate, in seconds since 1970 */
};

struct tl_tls_relay {
    pthread_t thread;
    bool has_thread;
    int epoll;
    int event;
    pthread_mutex_t mutex;          /* guards what follows */
    struct tl_number_map by_id;     /* struct relayed by id */
    struct tl_list added;           /* struct relayed.place: not yet in `all` */
    struct tl_tls_context *context; /* to check peers against; NULL: none, or done */
    bool is_ending;
    /* The thread's. */
    struct tl_list all;
    struct tl_list ready;
    int64_t period_ns; /* when certificates are looked at next */
    uint8_t *buffer;   /* [STEP_BYTES] */
};

/* ------------------------------------------------------------------------------------------------- connections -- */

struct tl_tls_peer *tl_tls_peer_retain(struct tl_tls_peer *peer)
{
    atomic_fetch_add(&peer->references, 1);
    return peer;
}

void tl_tls_peer_release(struct tl_tls_peer *peer)
{
    if (peer != NULL && atomic_fetch_sub(&peer->references, 1) == 1) free(peer);
}

/* Frees it without its sockets and its session. */
static void relayed_free(struct relayed *relayed)
{
    tl_tls_peer_release(relayed->peer);
    free(relayed->plain);
    free(relayed);
}

static struct relayed *relayed_create(struct tl_tls_session *session, const char *target)
{
    struct relayed *relayed = calloc(1, sizeof(*relayed));
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
    relayed->id = tl_random_u64();
    relayed->session = session;
    relayed->not_after = tl_tls_session_not_after(session);
    tl_list_init(&relayed->place);
    tl_list_init(&relayed->ready);
    relayed->tcp = (struct relay_end){.relayed = relayed, .fd = -1, .can_read = true, .can_write = true};
    relayed->pair = relayed->tcp;
    return relayed;
}

/* A duplicate of the descriptor, which a forked process or the guard may have, would keep the socket in epoll. */
static void close_end(struct tl_tls_relay *relay, const struct relay_end *end)
{
    (void)epoll_ctl(relay->epoll, EPOLL_CTL_DEL, end->fd, NULL);
    (void)close(end->fd);
}

/* Takes it out of everything and closes its sockets. */
static void relayed_end(struct tl_tls_relay *relay, struct relayed *relayed)
{
    pthread_mutex_lock(&relay->mutex);
    tl_number_map_remove(&relay->by_id, relayed->id);
    pthread_mutex_unlock(&relay->mutex);
    tl_list_remove(&relayed->place);
    tl_list_remove(&relayed->ready);
    tl_tls_session_destroy(relayed->session);
    close_end(relay, &relayed->tcp);
    close_end(relay, &relayed->pair);
    relayed_free(relayed);
}

static void set_ready(struct tl_tls_relay *relay, struct relayed *relayed)
{
    if (!tl_list_is_linked(&relayed->ready)) tl_list_push_back(&relay->ready, &relayed->ready);
}

static void note_end(struct relayed *relayed, bool *end)
{
    *end = true;
    if (relayed->ended_ns == 0) relayed->ended_ns = tl_clock_now_ns();
}

/* ------------------------------------------------------------------------------------------------------ moving -- */

/* Gives gRPC what waits for it; false: it does not take all of it now. */
static bool push_plain(struct relayed *relayed, const uint8_t *bytes, size_t *begin, size_t end)
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
static bool keep_plain(struct relayed *relayed, const uint8_t *bytes, size_t len_bytes)
{
    relayed->plain = malloc(len_bytes);
    if (relayed->plain == NULL) return false;
    memcpy(relayed->plain, bytes, len_bytes);
    relayed->plain_begin = 0;
    relayed->plain_end = len_bytes;
    return true;
}

static void log_end(const struct relayed *relayed, const struct tl_error *error)
{
    TL_LOG_AT_WARN("TLS connection ended", TL_STR("peer", relayed->peer->name.text),
                   TL_STR("address", relayed->peer->target), TL_STR("reason", error->message));
}

/* One step from the peer to gRPC; false: nothing can be moved now. */
static bool move_in(struct tl_tls_relay *relay, struct relayed *relayed)
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
    switch (tl_tls_session_read(relayed->session, relay->buffer, STEP_BYTES, &len_bytes, &error)) {
    case TL_TLS_DONE:
        break;
    case TL_TLS_WANTS_READ:
        relayed->tcp.can_read = false;
        break;
    case TL_TLS_FAILED:
        if (error.code == TL_UNAUTHENTICATED) log_end(relayed, &error);
        note_end(relayed, &relayed->is_wire_ended);
        break;
    case TL_TLS_ENDED:
        note_end(relayed, &relayed->is_wire_ended);
    }
    if (!push_plain(relayed, relay->buffer, &begin, len_bytes) &&
        !keep_plain(relayed, relay->buffer + begin, len_bytes - begin)) {
        note_end(relayed, &relayed->is_wire_ended);
    }
    return len_bytes > 0;
}

/* One step from gRPC to the peer; false: nothing can be moved now. */
static bool move_out(struct tl_tls_relay *relay, struct relayed *relayed)
{
    if (!relayed->tcp.can_write) return false;
    switch (tl_tls_session_flush(relayed->session)) {
    case TL_TLS_FLUSHED:
        break;
    case TL_TLS_BLOCKED:
        relayed->tcp.can_write = false;
        return false;
    case TL_TLS_BROKEN:
        note_end(relayed, &relayed->is_wire_ended);
        note_end(relayed, &relayed->is_pair_ended);
        return false;
    }
    if (!relayed->pair.can_read || relayed->is_pair_ended) return false;
    ssize_t got = recv(relayed->pair.fd, relay->buffer, STEP_BYTES, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
        relayed->pair.can_read = errno == EINTR;
        return errno == EINTR;
    }
    if (got <= 0) {
        note_end(relayed, &relayed->is_pair_ended);
        tl_tls_session_write_end(relayed->session);
        return true;
    }
    if (tl_tls_session_write(relayed->session, relay->buffer, (size_t)got)) return true;
    note_end(relayed, &relayed->is_wire_ended);
    note_end(relayed, &relayed->is_pair_ended);
    return false;
}

/* Moves what can be moved, for a bounded time, and ends the connection when nothing is left to do for it. */
static void move(struct tl_tls_relay *relay, struct relayed *relayed)
{
    for (unsigned step = 0; step < MAX_STEPS; step++) {
        bool has_moved = move_in(relay, relayed);
        has_moved = move_out(relay, relayed) || has_moved;
        if (has_moved) continue;
        bool is_read = relayed->is_wire_ended && relayed->plain == NULL;
        bool is_written = relayed->is_pair_ended && relayed->tcp.can_write;
        if (is_read || is_written) relayed_end(relay, relayed);
        return;
    }
    set_ready(relay, relayed);
}

/* ------------------------------------------------------------------------------------------------------ thread -- */

static bool watch(struct tl_tls_relay *relay, struct relay_end *end)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.ptr = end};
    return epoll_ctl(relay->epoll, EPOLL_CTL_ADD, end->fd, &event) == 0;
}

static void take_added(struct tl_tls_relay *relay)
{
    struct tl_list *place;
    for (;;) {
        pthread_mutex_lock(&relay->mutex);
        place = tl_list_pop_front(&relay->added);
        pthread_mutex_unlock(&relay->mutex);
        if (place == NULL) return;
        struct relayed *relayed = TL_CONTAINER_OF(place, struct relayed, place);
        tl_list_push_back(&relay->all, &relayed->place);
        if (watch(relay, &relayed->tcp) && watch(relay, &relayed->pair)) {
            set_ready(relay, relayed);
        } else {
            TL_LOG_AT_WARN("TLS connection ended", TL_STR("address", relayed->peer->target),
                           TL_STR("reason", strerror(errno)));
            relayed_end(relay, relayed);
        }
    }
}

/* Whether the connection may go on; otherwise the error says why not. */
static bool is_accepted_still(const struct relayed *relayed, const struct tl_tls_context *context, int64_t now,
                              struct tl_error *ret_error)
{
    if (now > relayed->not_after) {
        tl_error_set(ret_error, TL_UNAUTHENTICATED, "the certificate of %s has expired", relayed->peer->name.text);
        return false;
    }
    return context == NULL || tl_tls_session_recheck(relayed->session, context, ret_error) == TL_OK;
}

static void look_at_all(struct tl_tls_relay *relay)
{
    int64_t now_ns = tl_clock_now_ns();
    if (now_ns < relay->period_ns) return;
    relay->period_ns = now_ns + PERIOD_NS;
    pthread_mutex_lock(&relay->mutex);
    struct tl_tls_context *context = relay->context;
    relay->context = NULL;
    pthread_mutex_unlock(&relay->mutex);
    int64_t now = (int64_t)time(NULL);
    struct tl_list *next;
    for (struct tl_list *place = relay->all.next; place != &relay->all; place = next) {
        next = place->next;
        struct relayed *relayed = TL_CONTAINER_OF(place, struct relayed, place);
        struct tl_error error;
        if (!is_accepted_still(relayed, context, now, &error)) {
            log_end(relayed, &error);
            relayed_end(relay, relayed);
        } else if (relayed->ended_ns != 0 && now_ns - relayed->ended_ns > LINGER_NS) {
            relayed_end(relay, relayed);
        }
    }
    tl_tls_context_release(context);
}

static void note_event(struct tl_tls_relay *relay, const struct epoll_event *event)
{
    struct relay_end *end = event->data.ptr;
    if (end == NULL) {
        eventfd_t ignored;
        (void)eventfd_read(relay->event, &ignored);
        return;
    }
    if ((event->events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) end->can_read = true;
    if ((event->events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) != 0) end->can_write = true;
    set_ready(relay, end->relayed);
}

static bool is_ending(struct tl_tls_relay *relay)
{
    pthread_mutex_lock(&relay->mutex);
    bool is_ending = relay->is_ending;
    pthread_mutex_unlock(&relay->mutex);
    return is_ending;
}

static void *run(void *argument)
{
    struct tl_tls_relay *relay = argument;
    struct epoll_event events[MAX_EVENTS];
    while (!is_ending(relay)) {
        int timeout_ms = tl_list_is_empty(&relay->all) ? -1 : (int)(PERIOD_NS / TL_NS_PER_MS);
        int count = epoll_wait(relay->epoll, events, MAX_EVENTS, tl_list_is_empty(&relay->ready) ? timeout_ms : 0);
        for (int i = 0; i < count; i++)
            note_event(relay, &events[i]);
        take_added(relay);
        struct tl_list moving;
        tl_list_init(&moving);
        tl_list_splice_back(&moving, &relay->ready);
        struct tl_list *place;
        while ((place = tl_list_pop_front(&moving)) != NULL)
            move(relay, TL_CONTAINER_OF(place, struct relayed, ready));
        look_at_all(relay);
    }
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------ public -- */

enum tl_status tl_tls_relay_create(struct tl_tls_relay **ret_relay, struct tl_error *ret_error)
{
    struct tl_tls_relay *relay = calloc(1, sizeof(*relay));
    if (relay == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for TLS connections");
    pthread_mutex_init(&relay->mutex, NULL);
    tl_list_init(&relay->added);
    tl_list_init(&relay->all);
    tl_list_init(&relay->ready);
    relay->epoll = epoll_create1(EPOLL_CLOEXEC);
    relay->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    relay->buffer = malloc(STEP_BYTES);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    enum tl_status status = TL_OK;
    if (relay->epoll < 0 || relay->event < 0 || epoll_ctl(relay->epoll, EPOLL_CTL_ADD, relay->event, &event) != 0)
        status = tl_error_set_errno(ret_error, errno, "cannot wait for TLS connections");
    if (status == TL_OK && relay->buffer == NULL)
        status = tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for TLS connections");
    if (status == TL_OK) status = tl_thread_start("tl-tls-relay", run, relay, &relay->thread, ret_error);
    if (status != TL_OK) {
        tl_tls_relay_destroy(relay);
        return status;
    }
    relay->has_thread = true;
    *ret_relay = relay;
    return TL_OK;
}

void tl_tls_relay_end(struct tl_tls_relay *relay)
{
    if (relay->has_thread) {
        pthread_mutex_lock(&relay->mutex);
        relay->is_ending = true;
        pthread_mutex_unlock(&relay->mutex);
        (void)eventfd_write(relay->event, 1);
        pthread_join(relay->thread, NULL);
    }
    take_added(relay);
    while (!tl_list_is_empty(&relay->all))
        relayed_end(relay, TL_CONTAINER_OF(relay->all.next, struct relayed, place));
}

void tl_tls_relay_destroy(struct tl_tls_relay *relay)
{
    if (relay == NULL) return;
    tl_number_map_fini(&relay->by_id);
    tl_tls_context_release(relay->context);
    if (relay->epoll >= 0) (void)close(relay->epoll);
    if (relay->event >= 0) (void)close(relay->event);
    pthread_mutex_destroy(&relay->mutex);
    free(relay->buffer);
    free(relay);
}

/* Gives our end of the pair the name by which calls find the connection. */
static bool name_end(int fd, uint64_t id)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int len =
        snprintf(address.sun_path + 1, sizeof(address.sun_path) - 1, NAME_PREFIX "%016llx", (unsigned long long)id);
    return bind(fd, (struct sockaddr *)&address, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + len)) == 0;
}

enum tl_status tl_tls_relay_add(struct tl_tls_relay *relay, int connection, struct tl_tls_session *session,
                                const char *target, int *ret_fd, struct tl_error *ret_error)
{
    int pair[2];
    struct relayed *relayed = relayed_create(session, target);
    if (relayed == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a TLS connection");
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) {
        relayed_free(relayed);
        return tl_error_set_errno(ret_error, errno, "no TLS connection");
    }
    bool is_added = name_end(pair[0], relayed->id);
    relayed->tcp.fd = connection;
    relayed->pair.fd = pair[0];
    pthread_mutex_lock(&relay->mutex);
    is_added = is_added && tl_number_map_add(&relay->by_id, relayed->id, relayed);
    if (is_added) tl_list_push_back(&relay->added, &relayed->place);
    pthread_mutex_unlock(&relay->mutex);
    if (!is_added) {
        (void)close(pair[0]);
        (void)close(pair[1]);
        relayed_free(relayed);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a TLS connection");
    }
    *ret_fd = pair[1];
    (void)eventfd_write(relay->event, 1);
    return TL_OK;
}

/* Reads the number in the name of the socket at the other end; 0: it has none. */
static uint64_t id_of_peer(int fd)
{
    struct sockaddr_un address = {.sun_family = AF_UNSPEC};
    socklen_t len = sizeof(address);
    unsigned long long id;
    char name[sizeof(address.sun_path)] = "";
    if (getpeername(fd, (struct sockaddr *)&address, &len) != 0 || address.sun_family != AF_UNIX) return 0;
    size_t name_len = len - offsetof(struct sockaddr_un, sun_path);
    if (name_len < 2 || name_len >= sizeof(name) || address.sun_path[0] != '\0') return 0;
    memcpy(name, address.sun_path + 1, name_len - 1);
    return sscanf(name, NAME_PREFIX "%16llx", &id) == 1 ? (uint64_t)id : 0;
}

struct tl_tls_peer *tl_tls_relay_find(struct tl_tls_relay *relay, int fd)
{
    uint64_t id = fd >= 0 ? id_of_peer(fd) : 0;
    if (id == 0) return NULL;
    pthread_mutex_lock(&relay->mutex);
    const struct relayed *relayed = tl_number_map_find(&relay->by_id, id);
    struct tl_tls_peer *peer = relayed != NULL ? tl_tls_peer_retain(relayed->peer) : NULL;
    pthread_mutex_unlock(&relay->mutex);
    return peer;
}

void tl_tls_relay_recheck(struct tl_tls_relay *relay, struct tl_tls_context *context)
{
    pthread_mutex_lock(&relay->mutex);
    struct tl_tls_context *before = relay->context;
    relay->context = tl_tls_context_retain(context);
    pthread_mutex_unlock(&relay->mutex);
    tl_tls_context_release(before);
}
