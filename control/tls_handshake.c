// SPDX-License-Identifier: Apache-2.0
/*
 * The handshake thread.
 *
 * Happy path: a connection waits, with no more than its descriptor, until its peer has sent something; then it gets a
 * session, and takes a step of the handshake whenever there is more to read. What has passed goes to the relay.
 * Connections that are dialled are connected here, too.
 *
 * Failure modes: each handshake has a deadline. There are places for MAX_HANDSHAKES connections that were accepted; one
 * more ends the oldest, so that others are served however many say nothing. A client that speaks HTTP/2 without TLS is
 * told so in its language. Each reason of a refusal is logged at most once a minute for each address. Files that have
 * changed and cannot be used are logged once; what was loaded before stays in use. The pair of sockets behind an
 * accepted connection is made of spare descriptors when there are no others, so that each connection that the listener
 * has accepted with one of its spares is served; the thread opens the spares again when others have been closed.
 */
#include "control/tls_handshake.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/log.h"
#include "base/log_limit.h"
#include "base/thread.h"
#include "control/listener.h"

#define MAX_HANDSHAKES 1024
#define MAX_EVENTS 64
#define PERIOD_NS TL_NS_PER_SEC
/* A connection needs so many descriptors for its pair of sockets. */
#define PAIR_DESCRIPTORS 2
#define MAX_SPARES (TL_LISTENER_MAX_SPARES * PAIR_DESCRIPTORS)

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
    int spares[MAX_SPARES]; /* [spare_count] */
    unsigned spare_count;
    atomic_bool uses_spares;       /* a connection took spares, and not all have been opened again */
    int64_t period_ns;             /* when files are looked at next */
    struct tl_log_limit log_limit; /* for each address and reason */
    uint64_t unlogged_count;       /* refusals since one was logged last */
    struct tl_error load_failure;  /* what the look before found; code TL_OK: none */
    bool is_failure_logged;
};

/* -------------------------------------------------------------------------------------------------------- ends -- */

static void dial_free(struct tl_tls_dial *dial)
{
    if (dial->fd >= 0) (void)close(dial->fd);
    pthread_mutex_destroy(&dial->mutex);
    free(dial);
}

static void dial_deliver(struct tl_closure *closure)
{
    struct tl_tls_dial *dial = TL_CONTAINER_OF(closure, struct tl_tls_dial, closure);
    /* Waits for the thread to leave the mutex. */
    pthread_mutex_lock(&dial->mutex);
    bool is_abandoned = dial->is_abandoned;
    pthread_mutex_unlock(&dial->mutex);
    if (!is_abandoned) {
        int fd = dial->fd;
        dial->fd = -1;
        dial->dialled(dial->owner, fd, &dial->failure);
    }
    dial_free(dial);
}

static bool dial_is_abandoned(struct tl_tls_dial *dial)
{
    pthread_mutex_lock(&dial->mutex);
    bool is_abandoned = dial->is_abandoned;
    pthread_mutex_unlock(&dial->mutex);
    return is_abandoned;
}

static void dial_end(struct tl_tls_dial *dial)
{
    pthread_mutex_lock(&dial->mutex);
    dial->is_over = true;
    bool is_abandoned = dial->is_abandoned;
    if (!is_abandoned) tl_loop_post(dial->loop, &dial->closure);
    pthread_mutex_unlock(&dial->mutex);
    if (is_abandoned) dial_free(dial);
}

/* Frees it, without what the relay has taken over (connection -1, session NULL), and ends its dial. */
static void handshake_end(struct tl_tls_handshakes *handshakes, struct handshake *handshake)
{
    tl_list_remove(&handshake->place);
    if (handshake->dial == NULL) handshakes->accepted_count--;
    tl_tls_session_destroy(handshake->session);
    if (handshake->connection >= 0) {
        /* A duplicate of the descriptor, which a forked process may have, would keep it in epoll. */
        (void)epoll_ctl(handshakes->epoll, EPOLL_CTL_DEL, handshake->connection, NULL);
        (void)close(handshake->connection);
    }
    if (handshake->dial != NULL) dial_end(handshake->dial);
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

static void handshake_fail(struct tl_tls_handshakes *handshakes, struct handshake *handshake,
                           const struct tl_error *error)
{
    if (handshake->session != NULL) (void)tl_tls_session_flush(handshake->session);
    if (handshake->dial != NULL) {
        tl_error_copy(&handshake->dial->failure, error);
        tl_error_prefix(&handshake->dial->failure, "%s: ", handshake->dial->label);
    } else {
        log_refusal(handshakes, handshake, error->message);
    }
    handshake_end(handshakes, handshake);
}

/* ------------------------------------------------------------------------------------------------------- steps -- */

static void wait_for(struct tl_tls_handshakes *handshakes, struct handshake *handshake, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.ptr = handshake};
    (void)epoll_ctl(handshakes->epoll, EPOLL_CTL_MOD, handshake->connection, &event);
}

/* Opens the spares that are missing, as far as there are descriptors. */
static void keep_spares(struct tl_tls_handshakes *handshakes)
{
    while (handshakes->spare_count < MAX_SPARES) {
        int fd = fcntl(handshakes->event, F_DUPFD_CLOEXEC, 0);
        if (fd < 0) return;
        handshakes->spares[handshakes->spare_count++] = fd;
    }
    atomic_store(&handshakes->uses_spares, false);
}

/* Closes the spares that a pair of sockets needs; false: there are none. */
static bool make_way(struct tl_tls_handshakes *handshakes)
{
    if (handshakes->spare_count < PAIR_DESCRIPTORS) return false;
    atomic_store(&handshakes->uses_spares, true);
    for (unsigned i = 0; i < PAIR_DESCRIPTORS; i++)
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
    /* Certificates may have been loaded again since the handshake began. */
    enum tl_status status = tl_tls_session_recheck(handshake->session, handshakes->context, &error);
    if (status == TL_OK) status = add_to_relay(handshakes, handshake, &fd, &error);
    if (status != TL_OK) {
        handshake_fail(handshakes, handshake, &error);
        return;
    }
    handshake->connection = -1;
    handshake->session = NULL;
    if (handshake->dial != NULL) {
        handshake->dial->fd = fd;
    } else {
        handshake->accepted(handshake->context, fd, connection);
    }
    handshake_end(handshakes, handshake);
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
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) handshake_end(handshakes, handshake);
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
        handshake_end(handshakes, handshake);
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
    if (status != TL_OK) handshake_fail(handshakes, handshake, &error);
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
        handshake_fail(handshakes, handshake, &error);
        return false;
    }
    handshake->is_connecting = false;
    return true;
}

static void handshake_step(struct tl_tls_handshakes *handshakes, struct handshake *handshake)
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
        handshake_fail(handshakes, handshake, &error);
        return;
    }
    enum tl_tls_flushed flushed = tl_tls_session_flush(handshake->session);
    if (flushed == TL_TLS_BROKEN) {
        tl_error_set(&error, TL_UNAVAILABLE, "no TLS connection: it ended the connection");
        handshake_fail(handshakes, handshake, &error);
    } else if (progress == TL_TLS_DONE) {
        handshake_pass(handshakes, handshake);
    } else {
        wait_for(handshakes, handshake, flushed == TL_TLS_BLOCKED ? EPOLLIN | EPOLLOUT : EPOLLIN);
    }
}

/* ----------------------------------------------------------------------------------------------------- thread -- */

/* Takes over a handshake that another thread has added. */
static void begin(struct tl_tls_handshakes *handshakes, struct handshake *handshake)
{
    if (handshake->dial != NULL) {
        tl_list_push_back(&handshakes->dialled, &handshake->place);
    } else {
        tl_list_push_back(&handshakes->accepted, &handshake->place);
        handshakes->accepted_count++;
    }
    struct tl_error error;
    struct epoll_event event = {.events = handshake->is_connecting ? EPOLLOUT : EPOLLIN, .data.ptr = handshake};
    if (handshake->connection < 0) {
        handshake_fail(handshakes, handshake, &handshake->dial->failure);
    } else if (epoll_ctl(handshakes->epoll, EPOLL_CTL_ADD, handshake->connection, &event) != 0) {
        tl_error_set_errno(&error, errno, "no TLS connection");
        handshake_fail(handshakes, handshake, &error);
    }
}

static void end_late(struct tl_tls_handshakes *handshakes, struct handshake *handshake)
{
    if (handshake->is_refused) {
        handshake_end(handshakes, handshake);
        return;
    }
    struct tl_error error;
    tl_error_set(&error, TL_DEADLINE_EXCEEDED, "%s",
                 handshake->is_connecting     ? "no TCP connection within the connect time-out"
                 : handshake->session == NULL ? "it said nothing within the connect time-out"
                 : handshake->dial != NULL    ? "the TLS handshake did not end within the connect time-out"
                                              : "its TLS handshake did not end within the connect time-out");
    handshake_fail(handshakes, handshake, &error);
}

static void take_added(struct tl_tls_handshakes *handshakes)
{
    struct tl_list added;
    tl_list_init(&added);
    pthread_mutex_lock(&handshakes->mutex);
    tl_list_splice_back(&added, &handshakes->added);
    pthread_mutex_unlock(&handshakes->mutex);
    struct tl_list *place;
    while ((place = tl_list_pop_front(&added)) != NULL)
        begin(handshakes, TL_CONTAINER_OF(place, struct handshake, place));
    while (handshakes->accepted_count > MAX_HANDSHAKES) {
        struct tl_error error;
        tl_error_set(&error, TL_RESOURCE_EXHAUSTED, "more than %d handshakes are under way, and this is the oldest",
                     MAX_HANDSHAKES);
        handshake_fail(handshakes, TL_CONTAINER_OF(handshakes->accepted.next, struct handshake, place), &error);
    }
}

/* Ends what is late or not wanted any more. Accepted ones are in the order of their deadlines. */
static void end_all_late(struct tl_tls_handshakes *handshakes)
{
    int64_t now_ns = tl_clock_now_ns();
    while (!tl_list_is_empty(&handshakes->accepted)) {
        struct handshake *oldest = TL_CONTAINER_OF(handshakes->accepted.next, struct handshake, place);
        if (now_ns < oldest->deadline_ns) break;
        end_late(handshakes, oldest);
    }
    struct tl_list *next;
    for (struct tl_list *place = handshakes->dialled.next; place != &handshakes->dialled; place = next) {
        next = place->next;
        struct handshake *handshake = TL_CONTAINER_OF(place, struct handshake, place);
        if (now_ns >= handshake->deadline_ns) {
            end_late(handshakes, handshake);
        } else if (dial_is_abandoned(handshake->dial)) {
            handshake_end(handshakes, handshake);
        }
    }
}

static void maybe_load(struct tl_tls_handshakes *handshakes)
{
    int64_t now_ns = tl_clock_now_ns();
    if (now_ns < handshakes->period_ns) return;
    handshakes->period_ns = now_ns + PERIOD_NS;
    if (tl_tls_context_is_current(handshakes->context, &handshakes->settings)) {
        handshakes->load_failure.code = TL_OK;
        return;
    }
    struct tl_tls_context *context;
    struct tl_error error;
    if (tl_tls_context_load(&handshakes->settings, &context, &error) == TL_OK) {
        TL_LOG_AT_INFO("certificates loaded again", TL_STR("name", tl_tls_context_self(context)->text));
        tl_tls_relay_recheck(handshakes->relay, context);
        tl_tls_context_release(handshakes->context);
        handshakes->context = context;
        handshakes->load_failure.code = TL_OK;
        return;
    }
    /* Between two files that are replaced one after the other, they may not fit each other for a moment. */
    bool is_same =
        handshakes->load_failure.code != TL_OK && strcmp(handshakes->load_failure.message, error.message) == 0;
    if (is_same && !handshakes->is_failure_logged) {
        TL_LOG_AT_ERROR("changed certificates cannot be used, those before stay in use",
                        TL_STR("reason", error.message));
    }
    handshakes->is_failure_logged = is_same;
    handshakes->load_failure = error;
}

static bool is_ending(struct tl_tls_handshakes *handshakes)
{
    pthread_mutex_lock(&handshakes->mutex);
    bool is_ending = handshakes->is_ending;
    pthread_mutex_unlock(&handshakes->mutex);
    return is_ending;
}

static int sleep_ms(const struct tl_tls_handshakes *handshakes)
{
    int64_t due_ns = handshakes->period_ns;
    if (!tl_list_is_empty(&handshakes->accepted)) {
        const struct handshake *oldest = TL_CONTAINER_OF(handshakes->accepted.next, struct handshake, place);
        if (oldest->deadline_ns < due_ns) due_ns = oldest->deadline_ns;
    }
    TL_LIST_FOREACH(&handshakes->dialled, place)
    {
        const struct handshake *handshake = TL_CONTAINER_OF(place, struct handshake, place);
        if (handshake->deadline_ns < due_ns) due_ns = handshake->deadline_ns;
    }
    return (int)((tl_clock_remaining_ns(due_ns) + TL_NS_PER_MS - 1) / TL_NS_PER_MS);
}

static void *run(void *argument)
{
    struct tl_tls_handshakes *handshakes = argument;
    struct epoll_event events[MAX_EVENTS];
    while (!is_ending(handshakes)) {
        int count = epoll_wait(handshakes->epoll, events, MAX_EVENTS, sleep_ms(handshakes));
        for (int i = 0; i < count; i++) {
            eventfd_t ignored;
            if (events[i].data.ptr == NULL)
                (void)eventfd_read(handshakes->event, &ignored);
            else
                handshake_step(handshakes, events[i].data.ptr);
        }
        take_added(handshakes);
        end_all_late(handshakes);
        maybe_load(handshakes);
        keep_spares(handshakes);
    }
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------ public -- */

/* Copies the settings; false without memory. */
static bool copy_settings(struct tl_tls_handshakes *handshakes, const struct tl_tls_settings *settings)
{
    const char *const from[] = {settings->ca, settings->certificate, settings->key, settings->crl,
                                settings->foreign_names};
    for (size_t i = 0; i < TL_ARRAY_COUNT(from); i++) {
        handshakes->strings[i] = from[i] != NULL ? strdup(from[i]) : NULL;
        if (from[i] != NULL && handshakes->strings[i] == NULL) return false;
    }
    handshakes->settings = (struct tl_tls_settings){.ca = handshakes->strings[0],
                                                    .certificate = handshakes->strings[1],
                                                    .key = handshakes->strings[2],
                                                    .crl = handshakes->strings[3],
                                                    .foreign_names = handshakes->strings[4],
                                                    .is_tls12_allowed = settings->is_tls12_allowed};
    return true;
}

static enum tl_status open_descriptors(struct tl_tls_handshakes *handshakes, struct tl_error *ret_error)
{
    handshakes->epoll = epoll_create1(EPOLL_CLOEXEC);
    handshakes->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    if (handshakes->epoll >= 0 && handshakes->event >= 0 &&
        epoll_ctl(handshakes->epoll, EPOLL_CTL_ADD, handshakes->event, &event) == 0)
        return TL_OK;
    return tl_error_set_errno(ret_error, errno, "cannot wait for TLS handshakes");
}

enum tl_status tl_tls_handshakes_create(const struct tl_tls_options *options, struct tl_tls_relay *relay,
                                        struct tl_tls_handshakes **ret_handshakes, struct tl_error *ret_error)
{
    struct tl_tls_handshakes *handshakes = calloc(1, sizeof(*handshakes));
    if (handshakes == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for TLS handshakes");
    handshakes->relay = relay;
    handshakes->timeout_ns = options->handshake_timeout_ns;
    handshakes->keepalive_timeout_ns = options->keepalive_timeout_ns;
    pthread_mutex_init(&handshakes->mutex, NULL);
    tl_log_limit_init(&handshakes->log_limit);
    tl_list_init(&handshakes->added);
    tl_list_init(&handshakes->accepted);
    tl_list_init(&handshakes->dialled);
    handshakes->epoll = handshakes->event = -1;
    enum tl_status status = TL_OK;
    if (!copy_settings(handshakes, &options->settings))
        status = tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for TLS handshakes");
    if (status == TL_OK) status = tl_tls_context_load(&handshakes->settings, &handshakes->context, ret_error);
    if (status == TL_OK) status = open_descriptors(handshakes, ret_error);
    if (status == TL_OK) keep_spares(handshakes);
    if (status == TL_OK) status = tl_thread_start("tl-tls-shake", run, handshakes, &handshakes->thread, ret_error);
    if (status != TL_OK) {
        tl_tls_handshakes_destroy(handshakes);
        return status;
    }
    handshakes->has_thread = true;
    *ret_handshakes = handshakes;
    return TL_OK;
}

void tl_tls_handshakes_end(struct tl_tls_handshakes *handshakes)
{
    if (!handshakes->has_thread) return;
    pthread_mutex_lock(&handshakes->mutex);
    handshakes->is_ending = true;
    pthread_mutex_unlock(&handshakes->mutex);
    (void)eventfd_write(handshakes->event, 1);
    pthread_join(handshakes->thread, NULL);
    take_added(handshakes);
    while (!tl_list_is_empty(&handshakes->accepted))
        handshake_end(handshakes, TL_CONTAINER_OF(handshakes->accepted.next, struct handshake, place));
    struct tl_error error;
    tl_error_set(&error, TL_CANCELLED, "closed before the TLS handshake ended");
    while (!tl_list_is_empty(&handshakes->dialled))
        handshake_fail(handshakes, TL_CONTAINER_OF(handshakes->dialled.next, struct handshake, place), &error);
}

void tl_tls_handshakes_destroy(struct tl_tls_handshakes *handshakes)
{
    if (handshakes == NULL) return;
    tl_tls_context_release(handshakes->context);
    if (handshakes->epoll >= 0) (void)close(handshakes->epoll);
    if (handshakes->event >= 0) (void)close(handshakes->event);
    while (handshakes->spare_count > 0)
        (void)close(handshakes->spares[--handshakes->spare_count]);
    pthread_mutex_destroy(&handshakes->mutex);
    tl_log_limit_fini(&handshakes->log_limit);
    for (size_t i = 0; i < TL_ARRAY_COUNT(handshakes->strings); i++)
        free(handshakes->strings[i]);
    free(handshakes);
}

/* Gives it to the thread; false: that has ended, and the handshake was freed. */
static bool add(struct tl_tls_handshakes *handshakes, struct handshake *handshake)
{
    pthread_mutex_lock(&handshakes->mutex);
    bool is_added = !handshakes->is_ending;
    if (is_added) tl_list_push_back(&handshakes->added, &handshake->place);
    pthread_mutex_unlock(&handshakes->mutex);
    if (is_added) {
        (void)eventfd_write(handshakes->event, 1);
    } else {
        if (handshake->connection >= 0) (void)close(handshake->connection);
        free(handshake);
    }
    return is_added;
}

bool tl_tls_handshakes_use_spares(const struct tl_tls_handshakes *handshakes)
{
    return atomic_load(&handshakes->uses_spares);
}

void tl_tls_handshakes_accept(struct tl_tls_handshakes *handshakes, int connection, tl_tls_accepted_fn accepted,
                              void *context)
{
    struct handshake *handshake = calloc(1, sizeof(*handshake));
    if (handshake == NULL) {
        (void)close(connection);
        return;
    }
    tl_list_init(&handshake->place);
    handshake->connection = connection;
    handshake->accepted = accepted;
    handshake->context = context;
    handshake->deadline_ns = tl_clock_deadline_ns(handshakes->timeout_ns);
    (void)tl_endpoint_peer(connection, handshake->target);
    (void)add(handshakes, handshake);
}

/* Begins to connect; -1 with the error. */
static int connect_to(const char *target, int64_t keepalive_timeout_ns, struct tl_error *ret_error)
{
    struct sockaddr_storage address;
    struct tl_ip ip;
    const char *port = strrchr(target, ':');
    if (port == NULL || !tl_endpoint_ip(target, &ip)) {
        tl_error_set(ret_error, TL_INVALID_ARGUMENT, "\"%s\" is no address that can be dialled", target);
        return -1;
    }
    socklen_t length = tl_ip_to_sockaddr(&ip, (uint16_t)strtoul(port + 1, NULL, 10), &address);
    int fd = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0) {
        const int on = 1;
        int timeout_ms = tl_clock_to_ms(keepalive_timeout_ns);
        (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
        (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof(timeout_ms));
        if (connect(fd, (const struct sockaddr *)&address, length) == 0 || errno == EINPROGRESS) return fd;
    }
    tl_error_set(ret_error,
                 errno == EMFILE || errno == ENFILE || errno == ENOMEM ? TL_RESOURCE_EXHAUSTED : TL_UNAVAILABLE,
                 "no TCP connection: %s", strerror(errno));
    if (fd >= 0) (void)close(fd);
    return -1;
}

enum tl_status tl_tls_handshakes_dial(struct tl_tls_handshakes *handshakes, struct tl_loop *loop,
                                      const struct tl_tls_address *address, tl_tls_dialled_fn dialled, void *owner,
                                      struct tl_tls_dial **ret_dial, struct tl_error *ret_error)
{
    struct handshake *handshake = calloc(1, sizeof(*handshake));
    struct tl_tls_dial *dial = calloc(1, sizeof(*dial));
    if (handshake == NULL || dial == NULL) {
        free(handshake);
        free(dial);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to dial %s", address->label);
    }
    dial->closure.run = dial_deliver;
    tl_list_init(&dial->closure.link);
    dial->loop = loop;
    dial->dialled = dialled;
    dial->owner = owner;
    dial->fd = -1;
    snprintf(dial->label, sizeof(dial->label), "%s", address->label);
    snprintf(dial->expected_name, sizeof(dial->expected_name), "%s",
             address->expected_name != NULL ? address->expected_name : "");
    pthread_mutex_init(&dial->mutex, NULL);
    tl_list_init(&handshake->place);
    handshake->dial = dial;
    handshake->deadline_ns = address->deadline_ns;
    snprintf(handshake->target, sizeof(handshake->target), "%s", address->target);
    handshake->connection = connect_to(address->target, handshakes->keepalive_timeout_ns, &dial->failure);
    handshake->is_connecting = true;
    *ret_dial = dial;
    if (add(handshakes, handshake)) return TL_OK;
    dial_free(dial);
    return tl_error_set(ret_error, TL_CANCELLED, "%s was not dialled: this process is closing", address->label);
}

void tl_tls_dial_abandon(struct tl_tls_dial *dial)
{
    pthread_mutex_lock(&dial->mutex);
    dial->is_abandoned = true;
    pthread_mutex_unlock(&dial->mutex);
}
