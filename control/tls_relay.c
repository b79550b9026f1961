// SPDX-License-Identifier: Apache-2.0
/*
 * The relay: what is declared in tls_relay.h, and the relay's thread.
 *
 * Happy path: a connection of which epoll says something waits in `ready` and is moved (control/tls_relayed.h), for a
 * bounded number of bytes at a time, until neither direction gets further. The thread that moves bytes holds the mutex
 * `moving`.
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
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/log.h"
#include "base/number_map.h"
#include "base/thread.h"
#include "control/connection.h"
#include "control/tls_relayed.h"

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
/* What each end of a pair may have under way, as far as the system allows (net.core.wmem_max). With the system's
 * default of 208 KiB gRPC and the relay wake each other for each piece of that size. */
#define PAIR_BYTES (4 * 1024 * 1024)

struct tl_tls_relay {
    pthread_t thread;
    bool has_thread;
    int outer; /* waits for the epoll instance of the sockets, in the thread */
    int event;
    int wake_fd;           /* the loop's; -1: none is attached */
    atomic_bool is_driven; /* the loop's owner looks at the sockets, and the thread does not; changes under `moving` */
    pthread_mutex_t mutex; /* guards these four */
    struct tl_number_map by_cookie; /* struct tl_relayed */
    struct tl_list added;           /* struct tl_relayed.place: not yet in `all` */
    struct tl_tls_context *context; /* to check peers against; NULL: none, or done */
    bool is_ending;
    pthread_mutex_t moving; /* guards what follows, and struct tl_relayed; taken before `mutex` */
    struct tl_relayed_shared shared;
    struct tl_list all;
    struct tl_list ready;
    int64_t period_ns; /* when certificates are looked at next */
    int64_t moved_ns;  /* when something was moved last while it is driven */
    bool may_help;     /* the thread moves beside the owner where much is to be moved */
    int64_t helped_ns; /* when it was last needed for that */
};

/* ------------------------------------------------------------------------------------------------- connections -- */

static void end_relayed(struct tl_tls_relay *relay, struct tl_relayed *relayed)
{
    pthread_mutex_lock(&relay->mutex);
    tl_number_map_remove(&relay->by_cookie, relayed->cookie);
    pthread_mutex_unlock(&relay->mutex);
    tl_relayed_close(&relay->shared, relayed);
}

static void set_ready(struct tl_tls_relay *relay, struct tl_relayed *relayed)
{
    if (!tl_list_is_linked(&relayed->ready)) tl_list_push_back(&relay->ready, &relayed->ready);
}

/* Much has been moved in this pass: the thread moves the next bytes while gRPC has these. */
static bool needs_help(const struct tl_tls_relay *relay)
{
    return relay->may_help && relay->shared.pass_bytes >= BULK_BYTES;
}

/* Moves what can be moved, for a bounded time, and ends the connection when nothing is left to do for it. */
static void move(struct tl_tls_relay *relay, struct tl_relayed *relayed, size_t step_count)
{
    for (size_t step = 0; step < step_count; step++) {
        if (needs_help(relay) && atomic_load(&relay->is_driven)) break;
        enum tl_relayed_step result = tl_relayed_move(&relay->shared, relayed);
        if (result == TL_RELAYED_OVER) end_relayed(relay, relayed);
        if (result != TL_RELAYED_MOVED) return;
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
        struct tl_relayed *relayed = TL_CONTAINER_OF(place, struct tl_relayed, place);
        tl_list_push_back(&relay->all, &relayed->place);
        if (tl_relayed_watch(&relay->shared, relayed)) {
            set_ready(relay, relayed);
        } else {
            TL_LOG_AT_WARN("TLS connection ended", TL_STR("address", relayed->peer->target),
                           TL_STR("reason", strerror(errno)));
            end_relayed(relay, relayed);
        }
    }
}

/* Whether the connection may go on; otherwise the error says why not. */
static bool is_accepted_still(const struct tl_relayed *relayed, const struct tl_tls_context *context, int64_t now,
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
        struct tl_relayed *relayed = TL_CONTAINER_OF(place, struct tl_relayed, place);
        struct tl_error error;
        if (!is_accepted_still(relayed, context, now, &error)) {
            tl_relayed_log_end(relayed, &error);
            end_relayed(relay, relayed);
        } else if (relayed->ended_ns != 0 && now_ns - relayed->ended_ns > LINGER_NS) {
            end_relayed(relay, relayed);
        }
    }
    tl_tls_context_release(context);
}

static void note_event(struct tl_tls_relay *relay, const struct epoll_event *event)
{
    struct tl_relayed_end *end = event->data.ptr;
    if (end == NULL) return; /* an eventfd: edge-triggered, it need not be read */
    tl_relayed_note(&relay->shared, end, event->events);
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
    int count = epoll_wait(relay->shared.epoll, events, MAX_EVENTS, tl_list_is_empty(&relay->ready) ? timeout_ms : 0);
    for (int i = 0; i < count; i++)
        note_event(relay, &events[i]);
    take_added(relay);
    size_t ready_count = count_ready(relay), step_count = tl_max_u64(MAX_STEPS / tl_max_u64(ready_count, 1), 1);
    tl_list_init(&moving);
    tl_list_splice_back(&moving, &relay->ready);
    relay->shared.pass_bytes = 0;
    while ((place = tl_list_pop_front(&moving)) != NULL)
        move(relay, TL_CONTAINER_OF(place, struct tl_relayed, ready), step_count);
    if (needs_help(relay)) relay->helped_ns = tl_clock_now_ns();
    return count > 0 ? (unsigned)count : ready_count > 0;
}

/* Says who looks at the sockets. `moving` is held. */
static void set_driven(struct tl_tls_relay *relay, bool is_driven)
{
    if (atomic_load(&relay->is_driven) == is_driven) return;
    struct epoll_event event = {.events = is_driven ? 0 : EPOLLIN};
    TL_CHECK(epoll_ctl(relay->outer, EPOLL_CTL_MOD, relay->shared.epoll, &event) == 0);
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
    if (epoll_ctl(relay->shared.epoll, EPOLL_CTL_ADD, wake_fd, &event) != 0)
        return tl_error_set_errno(ret_error, errno, "cannot wait for TLS connections");
    relay->wake_fd = wake_fd;
    return TL_OK;
}

void tl_tls_relay_detach(struct tl_tls_relay *relay)
{
    pthread_mutex_lock(&relay->moving);
    set_driven(relay, false);
    pthread_mutex_unlock(&relay->moving);
    (void)epoll_ctl(relay->shared.epoll, EPOLL_CTL_DEL, relay->wake_fd, NULL);
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
    bool is_left = !tl_list_is_empty(&relay->ready) || relay->shared.blocked_count > 0;
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
    tl_log_limit_init(&relay->shared.log_limit);
    tl_list_init(&relay->added);
    tl_list_init(&relay->all);
    tl_list_init(&relay->ready);
    relay->shared.epoll = epoll_create1(EPOLL_CLOEXEC);
    relay->outer = epoll_create1(EPOLL_CLOEXEC);
    relay->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    relay->shared.buffer = aligned_alloc(PAGE_BYTES, TL_RELAYED_STEP_BYTES);
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.ptr = NULL};
    struct epoll_event nested = {.events = EPOLLIN};
    enum tl_status status = TL_OK;
    if (relay->shared.epoll < 0 || relay->outer < 0 || relay->event < 0 ||
        epoll_ctl(relay->shared.epoll, EPOLL_CTL_ADD, relay->event, &event) != 0 ||
        epoll_ctl(relay->outer, EPOLL_CTL_ADD, relay->shared.epoll, &nested) != 0)
        status = tl_error_set_errno(ret_error, errno, "cannot wait for TLS connections");
    if (status == TL_OK && relay->shared.buffer == NULL)
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
        end_relayed(relay, TL_CONTAINER_OF(relay->all.next, struct tl_relayed, place));
}

void tl_tls_relay_destroy(struct tl_tls_relay *relay)
{
    if (relay == NULL) return;
    tl_number_map_fini(&relay->by_cookie);
    tl_tls_context_release(relay->context);
    if (relay->shared.epoll >= 0) (void)close(relay->shared.epoll);
    if (relay->outer >= 0) (void)close(relay->outer);
    if (relay->event >= 0) (void)close(relay->event);
    pthread_mutex_destroy(&relay->mutex);
    pthread_mutex_destroy(&relay->moving);
    tl_log_limit_fini(&relay->shared.log_limit);
    free(relay->shared.buffer);
    free(relay);
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

/* Gives the thread a connection and our end of its pair. */
static enum tl_status add_relayed(struct tl_tls_relay *relay, struct tl_relayed *relayed, const int pair[2],
                                  int connection, struct tl_error *ret_error)
{
    relayed->cookie = tl_connection_cookie(pair[1]);
    if (relayed->cookie == 0)
        return tl_error_set_errno(ret_error, errno,
                                  "no TLS connection: this system lacks the socket option SO_COOKIE, which Linux has "
                                  "since 4.12");
    relayed->tcp.fd = connection;
    relayed->pair.fd = pair[0];
    pthread_mutex_lock(&relay->mutex);
    bool is_added = tl_number_map_add(&relay->by_cookie, relayed->cookie, relayed);
    if (is_added) tl_list_push_back(&relay->added, &relayed->place);
    pthread_mutex_unlock(&relay->mutex);
    return is_added ? TL_OK : tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a TLS connection");
}

enum tl_status tl_tls_relay_add(struct tl_tls_relay *relay, int connection, struct tl_tls_session *session,
                                const char *target, int *ret_fd, struct tl_error *ret_error)
{
    int pair[2];
    struct tl_relayed *relayed = tl_relayed_create(session, target);
    if (relayed == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a TLS connection");
    if (make_pair(pair) != 0) {
        tl_relayed_free(relayed);
        return tl_error_set_errno(ret_error, errno, "no TLS connection");
    }
    enum tl_status status = add_relayed(relay, relayed, pair, connection, ret_error);
    if (status != TL_OK) {
        (void)close(pair[0]);
        (void)close(pair[1]);
        tl_relayed_free(relayed);
        return status;
    }
    *ret_fd = pair[1];
    (void)eventfd_write(relay->event, 1);
    return TL_OK;
}

struct tl_tls_peer *tl_tls_relay_find(struct tl_tls_relay *relay, uint64_t cookie)
{
    pthread_mutex_lock(&relay->mutex);
    const struct tl_relayed *relayed = tl_number_map_find(&relay->by_cookie, cookie);
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
