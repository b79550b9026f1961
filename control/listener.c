// SPDX-License-Identifier: Apache-2.0
/*
 * Listening sockets, and the thread that accepts connections from them.
 *
 * Happy path: bind all addresses, start the thread, which sleeps until it may begin and then in poll; it takes all
 * connections that are there and gives them away. An event ends it.
 *
 * Failure modes: a connection that has gone before it was taken is passed over. When one cannot be taken for lack of
 * descriptors or memory, it stays in the kernel's queue and the thread tries again after a pause, saying so once; it
 * says when the queue is empty again. A few spare descriptors are kept: when all others are used up, they make way for
 * connections one after the other, so that a worker in this state can still be asked what it lacks. They are opened
 * again as soon as others have been closed. A link keeps its connection for long, so that the worker admits none while
 * spares are in use.
 */
#include "control/listener.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"
#include "control/control.h"
#include "control/endpoint.h"

/* Connections taken from one socket before the others are looked at. */
#define MAX_TAKEN 64
#define PAUSE_MS 100

enum listener_state { LISTENER_OPEN, LISTENER_TAKING, LISTENER_ENDING };

struct tl_listener {
    tl_connection_fn take;
    void *context;
    struct pollfd waits[1 + TL_CONTROL_MAX_LISTENS]; /* the first is the event that announces a new state */
    size_t socket_count;
    atomic_int state;                   /* enum listener_state */
    bool is_short;                      /* the thread's: it was said that connections wait */
    int spares[TL_LISTENER_MAX_SPARES]; /* [spare_count]; the thread's */
    unsigned spare_count;
    atomic_bool uses_spares;       /* a connection took a spare, and not all have been opened again */
    atomic_int_least64_t short_ns; /* when a connection lacked a descriptor last; 0: never */
    bool has_thread;
    pthread_t thread;
};

/* ------------------------------------------------------------------------------------------------------ taking -- */

static void log_shortage(struct tl_listener *listener, int error_number)
{
    if (listener->is_short) return;
    listener->is_short = true;
    TL_LOG_AT_WARN("new connections wait, because the limit of open files or of memory is reached",
                   TL_STR("reason", strerror(error_number)));
}

/* Opens the spares that are missing, as far as there are descriptors. */
static void keep_spares(struct tl_listener *listener)
{
    while (listener->spare_count < TL_LISTENER_MAX_SPARES) {
        int fd = fcntl(listener->waits[0].fd, F_DUPFD_CLOEXEC, 0);
        if (fd < 0) return;
        listener->spares[listener->spare_count++] = fd;
    }
    atomic_store(&listener->uses_spares, false);
}

/* As accept4, with a spare descriptor when there is no other. Returns -1 with errno when there is none either. */
static int accept_connection(struct tl_listener *listener, int fd)
{
    int connection = accept4(fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (connection >= 0 || (errno != EMFILE && errno != ENFILE)) return connection;
    int error_number = errno;
    /* The kernel takes a descriptor before it looks whether a connection waits. */
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    if (poll(&wait, 1, 0) == 0) {
        errno = EAGAIN;
        return -1;
    }
    atomic_store(&listener->short_ns, tl_clock_now_ns());
    if (listener->spare_count == 0) {
        errno = error_number;
        return -1;
    }
    if (!atomic_exchange(&listener->uses_spares, true)) {
        TL_LOG_AT_WARN("the limit of open files is reached; connections take spare descriptors",
                       TL_U64("spare", listener->spare_count));
    }
    close(listener->spares[--listener->spare_count]);
    return accept4(fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
}

static void give(struct tl_listener *listener, int fd)
{
    int on = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    listener->take(listener->context, fd);
}

/* Takes what is there. Returns 0 when it was all, EAGAIN when there may be more, else why the next one cannot be
 * taken. */
static int take_some(struct tl_listener *listener, int fd)
{
    for (unsigned n = 0; n < MAX_TAKEN; n++) {
        int connection = accept_connection(listener, fd);
        if (connection >= 0) {
            give(listener, connection);
        } else if (errno == EAGAIN) {
            return 0;
        } else if (errno != EINTR && errno != ECONNABORTED && errno != EPROTO) {
            return errno;
        }
    }
    return EAGAIN;
}

/* Takes from every socket; true when the thread must pause. */
static bool take_from_all(struct tl_listener *listener)
{
    bool is_all_taken = true;
    bool must_pause = false;
    for (size_t i = 1; i <= listener->socket_count; i++) {
        int error_number = take_some(listener, listener->waits[i].fd);
        if (error_number != 0) is_all_taken = false;
        if (error_number == 0 || error_number == EAGAIN) continue;
        log_shortage(listener, error_number);
        must_pause = true;
    }
    if (listener->is_short && is_all_taken) {
        listener->is_short = false;
        TL_LOG_AT_INFO("new connections are accepted again");
    }
    keep_spares(listener);
    return must_pause;
}

static void *run(void *argument)
{
    struct tl_listener *listener = argument;
    bool is_paused = false;
    enum listener_state state;
    while ((state = (enum listener_state)atomic_load(&listener->state)) != LISTENER_ENDING) {
        bool is_taking = state == LISTENER_TAKING;
        eventfd_t ignored;
        /* No event tells that a descriptor is free again: spares that are missing are tried for now and then. */
        bool is_waiting = is_taking && (is_paused || listener->spare_count < TL_LISTENER_MAX_SPARES);
        (void)poll(listener->waits, is_taking && !is_paused ? 1 + listener->socket_count : 1,
                   is_waiting ? PAUSE_MS : -1);
        if (listener->waits[0].revents != 0) (void)eventfd_read(listener->waits[0].fd, &ignored);
        is_paused = is_taking && take_from_all(listener);
    }
    return NULL;
}

static void change_state(struct tl_listener *listener, enum listener_state state)
{
    atomic_store(&listener->state, state);
    (void)eventfd_write(listener->waits[0].fd, 1);
}

/* ----------------------------------------------------------------------------------------------------- binding -- */

static uint16_t *port_of(struct sockaddr *address)
{
    return address->sa_family == AF_INET6 ? &((struct sockaddr_in6 *)address)->sin6_port
                                          : &((struct sockaddr_in *)address)->sin_port;
}

static bool is_bound(const struct tl_listener *listener, const struct addrinfo *item)
{
    for (size_t i = 1; i <= listener->socket_count; i++) {
        struct sockaddr_storage bound = {0};
        socklen_t length = sizeof(bound);
        if (getsockname(listener->waits[i].fd, (struct sockaddr *)&bound, &length) == 0 && length == item->ai_addrlen &&
            memcmp(&bound, item->ai_addr, length) == 0)
            return true;
    }
    return false;
}

/* Adds a socket that listens on the address; returns errno, 0 when it does. */
static int listen_on(struct tl_listener *listener, const struct addrinfo *item)
{
    const int on = 1, off = 0;
    int fd = socket(item->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return errno;
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (item->ai_family == AF_INET6) (void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    if (bind(fd, item->ai_addr, item->ai_addrlen) != 0 || listen(fd, SOMAXCONN) != 0) {
        int failure = errno;
        close(fd);
        return failure;
    }
    listener->waits[++listener->socket_count] = (struct pollfd){.fd = fd, .events = POLLIN};
    return 0;
}

static uint16_t bound_port(const struct tl_listener *listener)
{
    struct sockaddr_storage bound = {0};
    socklen_t length = sizeof(bound);
    if (getsockname(listener->waits[1].fd, (struct sockaddr *)&bound, &length) != 0) return 0;
    return ntohs(*port_of((struct sockaddr *)&bound));
}

/* Listens on each of the addresses. It is enough when one of them can be bound, but not when another process has one,
 * unless any port will do. Returns errno of the first that failed, 0 when it is enough. */
static int listen_on_all(struct tl_listener *listener, struct addrinfo *found)
{
    int first_failure = 0;
    for (struct addrinfo *item = found; item != NULL && listener->socket_count < TL_CONTROL_MAX_LISTENS;
         item = item->ai_next) {
        if (item->ai_family != AF_INET && item->ai_family != AF_INET6) continue;
        uint16_t *port = port_of(item->ai_addr);
        bool is_any_port = *port == 0;
        if (is_any_port && listener->socket_count > 0) *port = htons(bound_port(listener));
        if (is_bound(listener, item)) continue;
        int failure = listen_on(listener, item);
        if (failure == EADDRINUSE && !is_any_port) return failure;
        if (first_failure == 0) first_failure = failure;
    }
    if (listener->socket_count > 0) return 0;
    return first_failure != 0 ? first_failure : EADDRNOTAVAIL;
}

static enum tl_status bind_failed(const char *address, int error_number, struct tl_error *ret_error)
{
    if (error_number == EADDRINUSE) {
        return tl_error_set(ret_error, TL_ALREADY_EXISTS,
                            "cannot listen on %s: another process uses the address; stop it or change the port",
                            address);
    }
    if (error_number == EACCES) {
        return tl_error_set(ret_error, TL_PERMISSION_DENIED,
                            "cannot listen on %s: this user may not use the port, which is below "
                            "net.ipv4.ip_unprivileged_port_start (1024); choose a larger one, or give the process "
                            "CAP_NET_BIND_SERVICE",
                            address);
    }
    if (error_number == EMFILE || error_number == ENFILE) {
        return tl_error_set_errno(ret_error, error_number, "cannot listen on %s", address);
    }
    return tl_error_set(
        ret_error, TL_UNAVAILABLE,
        "cannot listen on %s: %s; is it an address of this machine? \"listen\" in the configuration can "
        "differ from the address that peers dial",
        address, strerror(error_number));
}

static enum tl_status resolve_and_bind(struct tl_listener *listener, const char *address, struct tl_error *ret_error)
{
    struct tl_endpoint endpoint;
    enum tl_status status = tl_endpoint_parse(address, &endpoint, ret_error);
    if (status != TL_OK) return status;
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE};
    struct addrinfo *found = NULL;
    int failure = getaddrinfo(endpoint.host, endpoint.port, &hints, &found);
    if (failure != 0) {
        return tl_error_set(ret_error, TL_UNAVAILABLE, "cannot listen on %s: %s; check the name in the configuration",
                            address, gai_strerror(failure));
    }
    int error_number = listen_on_all(listener, found);
    freeaddrinfo(found);
    return error_number == 0 ? TL_OK : bind_failed(address, error_number, ret_error);
}

/* ------------------------------------------------------------------------------------------------------ public -- */

enum tl_status tl_listener_open(const char *address, tl_connection_fn take, void *context,
                                struct tl_listener **ret_listener, uint16_t *ret_port, struct tl_error *ret_error)
{
    enum tl_status status;
    struct tl_listener *listener = calloc(1, sizeof(*listener));
    if (listener == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to listen on %s", address);
    listener->take = take;
    listener->context = context;
    atomic_init(&listener->state, LISTENER_OPEN);
    listener->waits[0] = (struct pollfd){.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), .events = POLLIN};
    if (listener->waits[0].fd < 0) {
        status = tl_error_set_errno(ret_error, errno, "cannot listen on %s", address);
        goto fail;
    }
    status = resolve_and_bind(listener, address, ret_error);
    if (status != TL_OK) goto fail;
    keep_spares(listener);
    status = tl_thread_start("tl-listener", run, listener, &listener->thread, ret_error);
    if (status != TL_OK) goto fail;
    listener->has_thread = true;
    *ret_port = bound_port(listener);
    *ret_listener = listener;
    return TL_OK;

fail:
    tl_listener_close(listener);
    return status;
}

size_t tl_listener_describe(const struct tl_listener *listener, char (*ret_texts)[TL_LISTENER_TEXT_BYTES],
                            size_t capacity)
{
    size_t count = 0;
    for (size_t i = 1; i <= listener->socket_count && count < capacity; i++) {
        struct sockaddr_storage bound = {0};
        socklen_t length = sizeof(bound);
        char host[48], port[8];
        if (getsockname(listener->waits[i].fd, (struct sockaddr *)&bound, &length) != 0) continue;
        if (getnameinfo((struct sockaddr *)&bound, length, host, sizeof(host), port, sizeof(port),
                        NI_NUMERICHOST | NI_NUMERICSERV) != 0)
            continue;
        snprintf(ret_texts[count++], TL_LISTENER_TEXT_BYTES, bound.ss_family == AF_INET6 ? "[%s]:%s" : "%s:%s", host,
                 port);
    }
    return count;
}

void tl_listener_start(struct tl_listener *listener)
{
    change_state(listener, LISTENER_TAKING);
}

bool tl_listener_uses_spares(const struct tl_listener *listener)
{
    return atomic_load(&listener->uses_spares);
}

int64_t tl_listener_short_ns(const struct tl_listener *listener)
{
    return atomic_load(&listener->short_ns);
}

void tl_listener_close(struct tl_listener *listener)
{
    if (listener == NULL) return;
    if (listener->has_thread) {
        change_state(listener, LISTENER_ENDING);
        pthread_join(listener->thread, NULL);
    }
    for (size_t i = 0; i <= listener->socket_count; i++)
        if (listener->waits[i].fd >= 0) close(listener->waits[i].fd);
    for (unsigned i = 0; i < listener->spare_count; i++)
        close(listener->spares[i]);
    free(listener);
}
