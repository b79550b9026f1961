// SPDX-License-Identifier: Apache-2.0
/*
 * The guard of the accepted connections.
 *
 * Happy path: each connection has an entry at the index of gRPC's descriptor. Calls and messages add to its credit on
 * the loop's thread; every PERIOD_NS the guard's thread asks the kernel for the bytes received and compares. An entry
 * whose descriptor is closed, or belongs to something else, is found by the socket's cookie and forgotten.
 *
 * Failure modes: gRPC may close a descriptor at any time, and its number may be taken by another file. So the guard
 * ends a connection through a duplicate, after it has compared the cookie of that. The duplicate takes the place of a
 * spare descriptor, so that a process without free descriptors ends a connection, too.
 */
#include "control/guard.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/tcp.h>
#include <malloc.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"
#include "control/endpoint.h"

#define PERIOD_NS (500 * TL_NS_PER_MS)
/* Processor time in one round from which on the loop is stuck. */
#define BUSY_NS (350 * TL_NS_PER_MS)
/* A connection that sent less in a period is not the cause, unless so much of it is unfinished. */
#define MIN_RECENT_BYTES (64 * 1024)
#define MIN_UNFINISHED_BYTES (1024 * 1024)
/* What no message explains, and need not: frames about the connection itself. In all, and for each time limit. */
#define SLACK_BYTES (1024 * 1024)
#define REGULAR_BYTES (64 * 1024)
/* Headers of a call, at most. */
#define CALL_BYTES (16 * 1024)
/* Frames around a message. */
#define MESSAGE_BYTES 256
/* The client says of each so many bytes that it has read them: window updates, pings. */
#define SENT_BYTES_PER_CREDIT 16
/* Looks between two chances for others to have the mutex. */
#define MAX_LOOKS 64
/* Periods after which memory of ended connections goes back to the system. */
#define TRIM_PERIODS 4

struct connection {
    int socket;              /* the TCP connection */
    uint64_t cookie;         /* identifies that socket; 0 where there is no entry */
    uint64_t grpc_cookie;    /* identifies gRPC's socket, which is the same one without a relay */
    uint64_t credit;         /* bytes that came to something */
    uint64_t received_bytes; /* at the last look */
    uint64_t recent_bytes;   /* received between the last two looks */
    uint64_t unfinished_bytes;
    uint64_t old_bytes; /* received_bytes when the time limit of these began */
    int64_t limit_ns;   /* when they must have come to something */
    size_t held_count;  /* calls that this process does not read now */
};

struct tl_guard {
    struct tl_guard_options options;
    pthread_t thread;
    bool has_thread;
    int nothing;           /* an eventfd that nothing uses */
    int spare;             /* the same, or the duplicate of a socket that is being ended */
    pthread_mutex_t mutex; /* protects the fields below */
    pthread_cond_t changed;
    bool is_ending;
    struct connection *connections; /* [capacity] */
    size_t capacity;
    size_t count;
    struct tl_loop_pulse pulse; /* at the first look in the round that the loop is in */
    unsigned trim_periods;      /* until memory is given back; 0: nothing to give back */
};

/* ----------------------------------------------------------------------------------------------------- sockets -- */

static bool get_info(int fd, struct tcp_info *ret_info)
{
    socklen_t length = sizeof(*ret_info);
    *ret_info = (struct tcp_info){0};
    return getsockopt(fd, IPPROTO_TCP, TCP_INFO, ret_info, &length) == 0;
}

/* Unlike shutdown(2), this drops what was received and not read, which could keep gRPC busy for minutes. */
static void disconnect(int fd)
{
    const struct sockaddr nowhere = {.sa_family = AF_UNSPEC};
    if (connect(fd, &nowhere, sizeof(nowhere)) != 0) (void)shutdown(fd, SHUT_RDWR);
}

static void end_connection(struct tl_guard *guard, int fd, const char *reason)
{
    struct connection *connection = &guard->connections[fd];
    if (dup3(connection->socket, guard->spare, O_CLOEXEC) < 0) return; /* gRPC has closed it: the next look sees that */
    char peer[TL_ENDPOINT_TARGET_BYTES] = "";
    if (tl_connection_cookie(guard->spare) == connection->cookie) {
        (void)tl_endpoint_peer(guard->spare, peer);
        disconnect(guard->spare);
        TL_LOG_AT_WARN("connection ended", TL_STR("address", peer), TL_STR("reason", reason),
                       TL_U64("unfinished_bytes", connection->unfinished_bytes));
    }
    (void)dup3(guard->nothing, guard->spare, O_CLOEXEC);
    connection->cookie = 0;
    guard->count--;
    guard->trim_periods = TRIM_PERIODS;
}

/* ----------------------------------------------------------------------------------------------------- looking -- */

/* Updates the entry; false when the connection is gone. */
static bool look_at(struct connection *connection)
{
    struct tcp_info info;
    if (tl_connection_cookie(connection->socket) != connection->cookie || !get_info(connection->socket, &info))
        return false;
    uint64_t received = info.tcpi_bytes_received;
    uint64_t answers = info.tcpi_bytes_acked / SENT_BYTES_PER_CREDIT;
    /* Credit that is not needed is not kept for later. */
    if (connection->credit + answers > received) connection->credit = received > answers ? received - answers : 0;
    uint64_t explained = connection->credit + answers;
    connection->recent_bytes = received - connection->received_bytes;
    connection->received_bytes = received;
    connection->unfinished_bytes = received > explained ? received - explained : 0;
    return true;
}

/* The bytes that were received until now must come to something in the time that begins now. */
static void begin_limit(const struct tl_guard *guard, struct connection *connection)
{
    connection->old_bytes = connection->received_bytes;
    connection->limit_ns = tl_clock_deadline_ns(guard->options.max_unfinished_ns);
}

static bool is_too_old(const struct tl_guard *guard, struct connection *connection, int64_t now_ns)
{
    if (now_ns < connection->limit_ns) return false;
    uint64_t finished = connection->received_bytes - connection->unfinished_bytes;
    bool is_old = connection->held_count == 0 && finished + SLACK_BYTES < connection->old_bytes;
    begin_limit(guard, connection);
    connection->credit += REGULAR_BYTES;
    return is_old;
}

/* The connection that keeps the loop from turning; -1: none that is known. */
static int find_culprit(const struct tl_guard *guard)
{
    int fast = -1, large = -1;
    for (int fd = 0; fd < (int)guard->capacity; fd++) {
        const struct connection *connection = &guard->connections[fd];
        if (connection->cookie == 0) continue;
        if (fast < 0 || connection->recent_bytes > guard->connections[fast].recent_bytes) fast = fd;
        if (large < 0 || connection->unfinished_bytes > guard->connections[large].unfinished_bytes) large = fd;
    }
    if (fast >= 0 && guard->connections[fast].recent_bytes >= MIN_RECENT_BYTES) return fast;
    return large >= 0 && guard->connections[large].unfinished_bytes >= MIN_UNFINISHED_BYTES ? large : -1;
}

/* Whether the loop's thread has been at work inside of gRPC for long without an event. */
static bool is_stuck(struct tl_guard *guard)
{
    struct tl_loop_pulse now;
    tl_loop_get_pulse(guard->options.loop, &now);
    if (now.rounds != guard->pulse.rounds) guard->pulse = now;
    return now.is_in_grpc && now.cpu_ns - guard->pulse.cpu_ns >= BUSY_NS;
}

/* The loop's thread must not wait for thousands of looks. */
static void let_others_in(struct tl_guard *guard)
{
    pthread_mutex_unlock(&guard->mutex);
    pthread_mutex_lock(&guard->mutex);
}

static void look(struct tl_guard *guard)
{
    int64_t now_ns = tl_clock_now_ns();
    bool was_stuck = is_stuck(guard);
    for (int fd = 0; fd < (int)guard->capacity; fd++) {
        if (fd % MAX_LOOKS == 0) let_others_in(guard);
        struct connection *connection = &guard->connections[fd];
        if (connection->cookie == 0) continue;
        if (!look_at(connection)) {
            connection->cookie = 0;
            guard->count--;
        } else if (connection->unfinished_bytes > guard->options.max_unfinished_bytes) {
            end_connection(guard, fd, "it has more unfinished messages than the worker holds");
        } else if (is_too_old(guard, connection, now_ns)) {
            end_connection(guard, fd, "its messages stayed unfinished for timeouts.stalled");
        }
    }
    int culprit = was_stuck ? find_culprit(guard) : -1;
    if (culprit >= 0) end_connection(guard, culprit, "it sent so much besides messages that nothing else was served");
}

/* Gives memory of the connections that were ended back to the system, which the allocator would keep. */
static void maybe_trim(struct tl_guard *guard)
{
    if (guard->trim_periods == 0 || --guard->trim_periods > 0) return;
    pthread_mutex_unlock(&guard->mutex);
    (void)malloc_trim(0);
    pthread_mutex_lock(&guard->mutex);
}

static void *run(void *argument)
{
    struct tl_guard *guard = argument;
    pthread_mutex_lock(&guard->mutex);
    while (!guard->is_ending) {
        if (guard->count == 0 && guard->trim_periods == 0) {
            pthread_cond_wait(&guard->changed, &guard->mutex);
            continue;
        }
        int64_t due_ns = tl_clock_deadline_ns(PERIOD_NS);
        struct timespec due = {.tv_sec = due_ns / TL_NS_PER_SEC, .tv_nsec = due_ns % TL_NS_PER_SEC};
        int failure = 0;
        while (!guard->is_ending && failure != ETIMEDOUT)
            failure = pthread_cond_timedwait(&guard->changed, &guard->mutex, &due);
        if (guard->is_ending) break;
        look(guard);
        maybe_trim(guard);
    }
    pthread_mutex_unlock(&guard->mutex);
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------ public -- */

enum tl_status tl_guard_create(const struct tl_guard_options *options, struct tl_guard **ret_guard,
                               struct tl_error *ret_error)
{
    struct tl_guard *guard = calloc(1, sizeof(*guard));
    if (guard == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the guard of connections");
    guard->options = *options;
    guard->nothing = eventfd(0, EFD_CLOEXEC);
    guard->spare = guard->nothing >= 0 ? fcntl(guard->nothing, F_DUPFD_CLOEXEC, 0) : -1;
    int error_number = errno;
    pthread_mutex_init(&guard->mutex, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&guard->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    enum tl_status status = TL_OK;
    if (guard->spare < 0)
        status = tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                              "no descriptor for the guard of connections: %s (ulimit -n)", strerror(error_number));
    if (status == TL_OK) status = tl_thread_start("tl-guard", run, guard, &guard->thread, ret_error);
    if (status != TL_OK) {
        tl_guard_destroy(guard);
        return status;
    }
    guard->has_thread = true;
    *ret_guard = guard;
    return TL_OK;
}

void tl_guard_destroy(struct tl_guard *guard)
{
    if (guard == NULL) return;
    if (guard->has_thread) {
        pthread_mutex_lock(&guard->mutex);
        guard->is_ending = true;
        pthread_cond_signal(&guard->changed);
        pthread_mutex_unlock(&guard->mutex);
        pthread_join(guard->thread, NULL);
    }
    pthread_cond_destroy(&guard->changed);
    pthread_mutex_destroy(&guard->mutex);
    if (guard->nothing >= 0) (void)close(guard->nothing);
    if (guard->spare >= 0) (void)close(guard->spare);
    free(guard->connections);
    free(guard);
}

/* Provides space for an entry of the descriptor; false without memory. */
static bool make_space(struct tl_guard *guard, int fd)
{
    if ((size_t)fd < guard->capacity) return true;
    size_t capacity = 2 * ((size_t)fd + 32);
    struct connection *connections = realloc(guard->connections, capacity * sizeof(*connections));
    if (connections == NULL) return false;
    for (size_t i = guard->capacity; i < capacity; i++)
        connections[i] = (struct connection){0};
    guard->connections = connections;
    guard->capacity = capacity;
    return true;
}

void tl_guard_add(struct tl_guard *guard, int fd, int socket, uint64_t cookie)
{
    pthread_mutex_lock(&guard->mutex);
    if (cookie != 0 && make_space(guard, fd)) {
        if (guard->connections[fd].cookie == 0) guard->count++;
        guard->connections[fd] = (struct connection){
            .socket = socket,
            .cookie = cookie,
            .grpc_cookie = tl_connection_cookie(fd),
            .limit_ns = tl_clock_deadline_ns(guard->options.max_unfinished_ns),
        };
        if (guard->count == 1) pthread_cond_signal(&guard->changed);
    }
    pthread_mutex_unlock(&guard->mutex);
}

/* NULL: it is not watched, and another connection may have its descriptor. */
static struct connection *find(const struct tl_guard *guard, const struct tl_connection *connection)
{
    if (connection->fd < 0 || (size_t)connection->fd >= guard->capacity) return NULL;
    struct connection *found = &guard->connections[connection->fd];
    return found->grpc_cookie == connection->cookie ? found : NULL;
}

static void add_credit(struct tl_guard *guard, const struct tl_connection *connection, uint64_t bytes)
{
    pthread_mutex_lock(&guard->mutex);
    struct connection *found = find(guard, connection);
    if (found != NULL) found->credit += bytes;
    pthread_mutex_unlock(&guard->mutex);
}

void tl_guard_call_began(struct tl_guard *guard, const struct tl_connection *connection)
{
    add_credit(guard, connection, CALL_BYTES);
}

void tl_guard_message(struct tl_guard *guard, const struct tl_connection *connection, uint64_t message_bytes)
{
    add_credit(guard, connection, message_bytes + message_bytes / 8 + MESSAGE_BYTES);
}

void tl_guard_hold(struct tl_guard *guard, const struct tl_connection *connection, bool is_held)
{
    pthread_mutex_lock(&guard->mutex);
    struct connection *found = find(guard, connection);
    if (found != NULL && is_held) found->held_count++;
    if (found != NULL && !is_held && found->held_count > 0 && --found->held_count == 0) begin_limit(guard, found);
    pthread_mutex_unlock(&guard->mutex);
}

void tl_guard_call_ended(struct tl_guard *guard, const struct tl_connection *connection)
{
    add_credit(guard, connection, guard->options.max_message_bytes);
}
