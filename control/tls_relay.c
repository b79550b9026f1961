// SPDX-License-Identifier: Apache-2.0
/*
 * The relay: what is declared in tls_relay.h, and the relay's thread.
 *
 * Happy path: epoll says, edge-triggered, which of the two sockets of a connection can be read or written; the
 * connection then waits in `ready` and is moved, for a bounded number of bytes at a time, until neither direction gets
 * further. The thread that moves bytes holds the mutex `moving`.
 *
 * The thread waits for the epoll instance of the sockets in another one, `outer`. While the loop's owner drives, that
 * one does not look, so that the thread sleeps. Once a second the thread takes the connections back: to look at
 * certificates, and because the owner may have stopped driving without a word.
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

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/log.h"
#include "base/log_limit.h"
#include "base/number_map.h"
#include "base/random.h"
#include "base/thread.h"

/* Bytes that are moved in one step. */
#define STEP_BYTES (128 * 1024)
/* Steps of one pass, which all connections share before the owner does other work; each has one at least. */
#define MAX_STEPS 8
/* The kernel keeps what comes over a pair in pages; it copies out of them slowly to memory that lies a few bytes behind
 * the start of a page (tl_copy_is_close), as large memory of malloc does. */
#define PAGE_BYTES 4096
#define MAX_EVENTS 64
#define LINGER_NS (5 * TL_NS_PER_SEC)
#define PERIOD_NS TL_NS_PER_SEC
/* The loop's owner gives the connections back when nothing has come for so long. */
#define DRIVEN_NS TL_NS_PER_MS
/* From so many bytes in one pass on the thread moves them, beside what the owner does with those before, unless there
 * are few processors. */
#define BULK_BYTES (256 * 1024)
#define NAME_PREFIX "tensorlane-"
/* What each end of a pair may have under way, as far as the system allows (net.core.wmem_max). With the system's
 * default of 208 KiB gRPC and the relay wake each other for each piece of that size. */
#define PAIR_BYTES (4 * 1024 * 1024)

/* One of the two sockets of a connection, as epoll knows it. */
struct relay_end {
    struct relayed *relayed;
    int fd;
    bool can_read;
    bool has_ended; /* reads must find the end */
    bool can_write;
    bool asks_write; /* epoll is asked when it can be written to */
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
    int64_t not_after;  /* end of the peer's chain of certificates, in seconds since 1970 */
};

struct tl_tls_relay {
    pthread_t thread;
    bool has_thread;
    int epoll; /* waits for the sockets */
    int outer; /* waits for `epoll`, in the thread */
    int event;
    int wake_fd;                /* the loop's; -1: none is attached */
    atomic_bool is_driven;      /* the loop's owner looks at `epoll`, and the thread does not; changes under `moving` */
    pthread_mutex_t mutex;      /* guards these four */
    struct tl_number_map by_id; /* struct relayed by id */
    struct tl_list added;       /* struct relayed.place: not yet in `all` */
    struct tl_tls_context *context; /* to check peers against; NULL: none, or done */
    bool is_ending;
    pthread_mutex_t moving; /* guards what follows, and struct relayed; taken before `mutex` */
    struct tl_list all;
    struct tl_list ready;
    int64_t period_ns;             /* when certificates are looked at next */
    int64_t moved_ns;              /* when something was moved last while it is driven */
    size_t pass_bytes;             /* moved in this pass */
    size_t blocked_count;          /* connections whose peer does not take all that is to be sent */
    bool may_help;                 /* the thread moves beside the owner where much is to be moved */
    int64_t helped_ns;             /* when it was last needed for that */
    struct tl_log_limit log_limit; /* for each peer whose TLS went wrong */
    uint8_t *buffer;               /* [STEP_BYTES] */
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

static void set_blocked(struct tl_tls_relay *relay, struct relayed *relayed, bool is_blocked)
{
    if (relayed->tcp.can_write == !is_blocked) return;
    relayed->tcp.can_write = !is_blocked;
    relay->blocked_count += is_blocked ? 1 : -1;
}

/* Takes it out of everything and closes its sockets. */
static void relayed_end(struct tl_tls_relay *relay, struct relayed *relayed)
{
    pthread_mutex_lock(&relay->mutex);
    tl_number_map_remove(&relay->by_id, relayed->id);
    pthread_mutex_unlock(&relay->mutex);
    set_blocked(relay, relayed, false);
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

/* A Unix socket says whenever its peer has read that it can be written to, so that it is asked only when that matters.
 */
static bool watch(struct tl_tls_relay *relay, int operation, struct relay_end *end)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | EPOLLET, .data.ptr = end};
    if (!end->can_write) event.events |= EPOLLOUT;
    end->asks_write = !end->can_write;
    return epoll_ctl(relay->epoll, operation, end->fd, &event) == 0;
}

static void maybe_watch(struct tl_tls_relay *relay, struct relay_end *end)
{
    if (end->asks_write == end->can_write) (void)watch(relay, EPOLL_CTL_MOD, end);
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
        if (error.code != TL_UNAVAILABLE && tl_log_limit_passes(&relay->log_limit, relayed->peer->name.text))
            log_end(relayed, &error);
        note_end(relayed, &relayed->is_wire_ended);
        break;
    case TL_TLS_ENDED:
        note_end(relayed, &relayed->is_wire_ended);
    }
    relay->pass_bytes += len_bytes;
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
        set_blocked(relay, relayed, true);
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
    relay->pass_bytes += (size_t)got;
    if (got < STEP_BYTES && !relayed->pair.has_ended) relayed->pair.can_read = false;
    if (tl_tls_session_write(relayed->session, relay->buffer, (size_t)got)) return true;
    note_end(relayed, &relayed->is_wire_ended);
    note_end(relayed, &relayed->is_pair_ended);
    return false;
}

/* Much has been moved in this pass: the thread moves the next bytes while gRPC has these. */
static bool needs_help(const struct tl_tls_relay *relay)
{
    return relay->may_help && relay->pass_bytes >= BULK_BYTES;
}

/* Moves what can be moved, for a bounded time, and ends the connection when nothing is left to do for it. */
static void move(struct tl_tls_relay *relay, struct relayed *relayed, size_t step_count)
{
    for (size_t step = 0; step < step_count; step++) {
        if (needs_help(relay) && atomic_load(&relay->is_driven)) break;
        bool has_moved = move_in(relay, relayed);
        has_moved = move_out(relay, relayed) || has_moved;
        if (has_moved) continue;
        bool is_read = relayed->is_wire_ended && relayed->plain == NULL;
        bool is_written = relayed->is_pair_ended && relayed->tcp.can_write;
        if (is_read || is_written) {
            relayed_end(relay, relayed);
        } else {
            maybe_watch(relay, &relayed->tcp);
            maybe_watch(relay, &relayed->pair);
        }
        return;
    }
    set_ready(relay, relayed);
}

/* ------------------------------------------------------------------------------------------------------ thread -- */

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
        if (watch(relay, EPOLL_CTL_ADD, &relayed->tcp) && watch(relay, EPOLL_CTL_ADD, &relayed->pair)) {
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
        tl_error_set(ret_error, TL_UNAUTHENTICATED, "the certificate of %s, or one of its authorities, has expired",
                     relayed->peer->name.text);
        return false;
    }
    return context == NULL || tl_tls_session_recheck(relayed->session, context, ret_error) == TL_OK;
}

/* At most once in PERIOD_NS. */
static void look_at_all(struct tl_tls_relay *relay)
{
    int64_t now_ns = tl_clock_now_ns();
    if (now_ns < relay->period_ns) return;
    relay->period_ns = now_ns + PERIOD_NS;
    pthread_mutex_lock(&relay->mutex);
    struct tl_tls_context *context = relay->context;
    relay->context = NULL;
    pthread_mutex_unlock(&relay->mutex);
    take_added(relay); /* those that were added before the context was replaced must be looked at, too */
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
    if (end == NULL) return; /* an eventfd: edge-triggered, it need not be read */
    if ((event->events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) end->can_read = true;
    if ((event->events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) end->has_ended = true;
    bool can_write = (event->events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) != 0;
    if (can_write && end == &end->relayed->tcp) set_blocked(relay, end->relayed, false);
    if (can_write) end->can_write = true;
    set_ready(relay, end->relayed);
}

static bool is_ending(struct tl_tls_relay *relay)
{
    pthread_mutex_lock(&relay->mutex);
    bool is_ending = relay->is_ending;
    pthread_mutex_unlock(&relay->mutex);
    return is_ending;
}

static size_t count_ready(const struct tl_tls_relay *relay)
{
    size_t count = 0;
    for (const struct tl_list *place = relay->ready.next; place != &relay->ready; place = place->next)
        count++;
    return count;
}

/* Looks at the sockets, waits for them if nothing is to be moved, and moves. Returns for how many sockets something
 * came, and at least one where something was left to be moved. */
static unsigned move_all(struct tl_tls_relay *relay, int timeout_ms)
{
    struct epoll_event events[MAX_EVENTS];
    struct tl_list moving, *place;
    int count = epoll_wait(relay->epoll, events, MAX_EVENTS, tl_list_is_empty(&relay->ready) ? timeout_ms : 0);
    for (int i = 0; i < count; i++)
        note_event(relay, &events[i]);
    take_added(relay);
    size_t ready_count = count_ready(relay), step_count = tl_max_u64(MAX_STEPS / tl_max_u64(ready_count, 1), 1);
    tl_list_init(&moving);
    tl_list_splice_back(&moving, &relay->ready);
    relay->pass_bytes = 0;
    while ((place = tl_list_pop_front(&moving)) != NULL)
        move(relay, TL_CONTAINER_OF(place, struct relayed, ready), step_count);
    if (needs_help(relay)) relay->helped_ns = tl_clock_now_ns();
    return count > 0 ? (unsigned)count : ready_count > 0;
}

/* Says who looks at the sockets. `moving` is held. */
static void set_driven(struct tl_tls_relay *relay, bool is_driven)
{
    if (atomic_load(&relay->is_driven) == is_driven) return;
    struct epoll_event event = {.events = is_driven ? 0 : EPOLLIN};
    TL_CHECK(epoll_ctl(relay->outer, EPOLL_CTL_MOD, relay->epoll, &event) == 0);
    atomic_store(&relay->is_driven, is_driven);
    if (!is_driven && !tl_list_is_empty(&relay->ready)) (void)eventfd_write(relay->event, 1);
}

/* Returns how long the thread sleeps at most, -1: until something comes. `moving` is held. */
static int sleep_ms_of(const struct tl_tls_relay *relay)
{
    if (!tl_list_is_empty(&relay->ready)) return 0;
    return tl_list_is_empty(&relay->all) ? -1 : (int)(PERIOD_NS / TL_NS_PER_MS);
}

static void *run(void *argument)
{
    struct tl_tls_relay *relay = argument;
    int timeout_ms = -1;
    while (!is_ending(relay)) {
        struct epoll_event event;
        int count = epoll_wait(relay->outer, &event, 1, timeout_ms);
        /* The owner has just entered, and has what came. */
        if (count > 0 && atomic_load(&relay->is_driven)) continue;
        pthread_mutex_lock(&relay->moving);
        set_driven(relay, false);
        (void)move_all(relay, 0);
        look_at_all(relay);
        timeout_ms = sleep_ms_of(relay);
        pthread_mutex_unlock(&relay->moving);
    }
    return NULL;
}

/* ------------------------------------------------------------------------------------------------- loop's owner -- */

enum tl_status tl_tls_relay_attach(struct tl_tls_relay *relay, int wake_fd, struct tl_error *ret_error)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.ptr = NULL};
    if (epoll_ctl(relay->epoll, EPOLL_CTL_ADD, wake_fd, &event) != 0)
        return tl_error_set_errno(ret_error, errno, "cannot wait for TLS connections");
    relay->wake_fd = wake_fd;
    return TL_OK;
}

void tl_tls_relay_detach(struct tl_tls_relay *relay)
{
    pthread_mutex_lock(&relay->moving);
    set_driven(relay, false);
    pthread_mutex_unlock(&relay->moving);
    (void)epoll_ctl(relay->epoll, EPOLL_CTL_DEL, relay->wake_fd, NULL);
}

bool tl_tls_relay_enter(struct tl_tls_relay *relay)
{
    if (pthread_mutex_trylock(&relay->moving) != 0) return false;
    int64_t now_ns = tl_clock_now_ns();
    bool may_enter = !tl_list_is_empty(&relay->all) && now_ns - relay->helped_ns >= DRIVEN_NS;
    if (may_enter) {
        relay->moved_ns = now_ns;
        set_driven(relay, true);
    }
    pthread_mutex_unlock(&relay->moving);
    return may_enter;
}

/* Returns how long to wait, in whole milliseconds. */
static int wait_ms_until(int64_t deadline_ns)
{
    if (deadline_ns == 0) return 0;
    int64_t left_ns = deadline_ns - tl_clock_now_ns();
    if (left_ns <= 0) return 0;
    return (int)(DRIVEN_NS / TL_NS_PER_MS);
}

unsigned tl_tls_relay_drive(struct tl_tls_relay *relay, int64_t deadline_ns, bool *ret_is_over)
{
    *ret_is_over = true;
    if (pthread_mutex_trylock(&relay->moving) != 0) return 0;
    unsigned count = 0;
    if (atomic_load(&relay->is_driven)) {
        count = move_all(relay, wait_ms_until(deadline_ns));
        int64_t now_ns = tl_clock_now_ns();
        if (count > 0) relay->moved_ns = now_ns;
        *ret_is_over = now_ns - relay->moved_ns >= DRIVEN_NS || needs_help(relay);
        if (*ret_is_over) set_driven(relay, false);
    }
    pthread_mutex_unlock(&relay->moving);
    return count;
}

bool tl_tls_relay_pause(struct tl_tls_relay *relay)
{
    if (pthread_mutex_trylock(&relay->moving) != 0) return true; /* the thread takes them */
    bool is_left = !tl_list_is_empty(&relay->ready) || relay->blocked_count > 0;
    if (is_left) set_driven(relay, false);
    pthread_mutex_unlock(&relay->moving);
    return is_left;
}

/* ------------------------------------------------------------------------------------------------------ public -- */

enum tl_status tl_tls_relay_create(struct tl_tls_relay **ret_relay, struct tl_error *ret_error)
{
    struct tl_tls_relay *relay = calloc(1, sizeof(*relay));
    if (relay == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for TLS connections");
    pthread_mutex_init(&relay->mutex, NULL);
    pthread_mutex_init(&relay->moving, NULL);
    relay->may_help = !tl_thread_has_few_processors();
    tl_log_limit_init(&relay->log_limit);
    tl_list_init(&relay->added);
    tl_list_init(&relay->all);
    tl_list_init(&relay->ready);
    relay->epoll = epoll_create1(EPOLL_CLOEXEC);
    relay->outer = epoll_create1(EPOLL_CLOEXEC);
    relay->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    relay->buffer = aligned_alloc(PAGE_BYTES, STEP_BYTES);
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.ptr = NULL};
    struct epoll_event nested = {.events = EPOLLIN};
    enum tl_status status = TL_OK;
    if (relay->epoll < 0 || relay->outer < 0 || relay->event < 0 ||
        epoll_ctl(relay->epoll, EPOLL_CTL_ADD, relay->event, &event) != 0 ||
        epoll_ctl(relay->outer, EPOLL_CTL_ADD, relay->epoll, &nested) != 0)
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
    /* What gRPC has said last. */
    (void)move_all(relay, 0);
    while (!tl_list_is_empty(&relay->all))
        relayed_end(relay, TL_CONTAINER_OF(relay->all.next, struct relayed, place));
}

void tl_tls_relay_destroy(struct tl_tls_relay *relay)
{
    if (relay == NULL) return;
    tl_number_map_fini(&relay->by_id);
    tl_tls_context_release(relay->context);
    if (relay->epoll >= 0) (void)close(relay->epoll);
    if (relay->outer >= 0) (void)close(relay->outer);
    if (relay->event >= 0) (void)close(relay->event);
    pthread_mutex_destroy(&relay->mutex);
    pthread_mutex_destroy(&relay->moving);
    tl_log_limit_fini(&relay->log_limit);
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

/* As socketpair, with large buffers. */
static int make_pair(int ret_pair[2])
{
    const int bytes = PAIR_BYTES;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ret_pair) != 0) return -1;
    for (unsigned i = 0; i < 2; i++)
        (void)setsockopt(ret_pair[i], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
    return 0;
}

enum tl_status tl_tls_relay_add(struct tl_tls_relay *relay, int connection, struct tl_tls_session *session,
                                const char *target, int *ret_fd, struct tl_error *ret_error)
{
    int pair[2];
    struct relayed *relayed = relayed_create(session, target);
    if (relayed == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a TLS connection");
    if (make_pair(pair) != 0) {
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
