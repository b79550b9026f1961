// SPDX-License-Identifier: Apache-2.0
/*
 * Finding out how far a server can be reached, before gRPC is asked, whose errors do not distinguish a wrong name from
 * a closed port.
 *
 * Happy path: a numeric address is resolved in place, a name in a thread of its own, because getaddrinfo has no
 * deadline; then one address after the other is dialled, each with its share of the time that is left. Failure modes: a
 * look-up that does not end in time is left to its thread, which frees what the two share; a thread that cannot be
 * started is an error of the look-up.
 */
#include "control/endpoint.h"

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"

/* --------------------------------------------------------------------------------------------------- addresses -- */

static bool is_port(const char *text)
{
    size_t digits = strspn(text, "0123456789");
    return digits > 0 && digits <= 5 && text[digits] == '\0' && strtoul(text, NULL, 10) <= 65535;
}

enum tl_status tl_endpoint_parse(const char *address, struct tl_endpoint *ret_endpoint, struct tl_error *ret_error)
{
    const char *colon = strrchr(address, ':');
    if (colon == NULL || !is_port(colon + 1)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "the address \"%s\" has no port; write \"host:port\" with a port in 0..65535", address);
    }
    const char *host = address;
    size_t host_bytes = (size_t)(colon - address);
    bool has_brackets = host_bytes >= 2 && host[0] == '[' && host[host_bytes - 1] == ']';
    if (has_brackets) {
        host++;
        host_bytes -= 2;
    }
    if (!has_brackets && memchr(host, ':', host_bytes) != NULL) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "the address \"%s\" has more than one colon; write an IPv6 address as \"[::1]:4000\"",
                            address);
    }
    if (host_bytes == 0) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "the address \"%s\" has no host; write \"0.0.0.0\" or \"[::]\" for all of this machine",
                            address);
    }
    if (host_bytes >= sizeof(ret_endpoint->host)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the host of the address \"%s\" has %zu bytes; at most %zu",
                            address, host_bytes, sizeof(ret_endpoint->host) - 1);
    }
    memcpy(ret_endpoint->host, host, host_bytes);
    ret_endpoint->host[host_bytes] = '\0';
    snprintf(ret_endpoint->port, sizeof(ret_endpoint->port), "%s", colon + 1);
    return TL_OK;
}

/* The address for messages, as its user wrote it. */
#define ENDPOINT_FORMAT "%s%s%s:%s"
#define ENDPOINT_ARGS(endpoint)                                                                                        \
    strchr((endpoint)->host, ':') != NULL ? "[" : "", (endpoint)->host,                                                \
        strchr((endpoint)->host, ':') != NULL ? "]" : "", (endpoint)->port

/* ----------------------------------------------------------------------------------------------------- look-up -- */

/* Shared by the caller that waits and the thread that looks up; the last of the two frees it. */
struct lookup {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    struct tl_endpoint endpoint;
    bool is_done;
    bool is_abandoned;
    int failure; /* result of getaddrinfo */
    int error_number;
    struct addrinfo *found;
};

static int look_up(const struct tl_endpoint *endpoint, int flags, struct addrinfo **ret_found)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = flags};
    return getaddrinfo(endpoint->host, endpoint->port, &hints, ret_found);
}

static void lookup_destroy(struct lookup *lookup)
{
    if (lookup->found != NULL) freeaddrinfo(lookup->found);
    pthread_cond_destroy(&lookup->changed);
    pthread_mutex_destroy(&lookup->mutex);
    free(lookup);
}

static struct lookup *lookup_create(const struct tl_endpoint *endpoint)
{
    struct lookup *lookup = calloc(1, sizeof(*lookup));
    if (lookup == NULL) return NULL;
    pthread_mutex_init(&lookup->mutex, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&lookup->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    lookup->endpoint = *endpoint;
    return lookup;
}

static void *lookup_run(void *argument)
{
    struct lookup *lookup = argument;
    struct addrinfo *found = NULL;
    int failure = look_up(&lookup->endpoint, 0, &found);
    int error_number = errno;
    pthread_mutex_lock(&lookup->mutex);
    lookup->is_done = true;
    lookup->failure = failure;
    lookup->error_number = error_number;
    lookup->found = failure == 0 ? found : NULL;
    bool is_abandoned = lookup->is_abandoned;
    pthread_cond_signal(&lookup->changed);
    pthread_mutex_unlock(&lookup->mutex);
    if (is_abandoned) lookup_destroy(lookup);
    return NULL;
}

/* Waits for the end of the look-up; false when the deadline came first: the thread has it now. */
static bool lookup_wait(struct lookup *lookup, int64_t deadline_ns)
{
    struct timespec deadline = {.tv_sec = deadline_ns / TL_NS_PER_SEC, .tv_nsec = deadline_ns % TL_NS_PER_SEC};
    pthread_mutex_lock(&lookup->mutex);
    int failure = 0;
    while (!lookup->is_done && failure == 0) {
        failure = pthread_cond_timedwait(&lookup->changed, &lookup->mutex, &deadline);
    }
    bool is_done = lookup->is_done;
    lookup->is_abandoned = !is_done;
    pthread_mutex_unlock(&lookup->mutex);
    return is_done;
}

static enum tl_status no_such_host(const struct tl_endpoint *endpoint, int failure, int error_number,
                                   struct tl_error *ret_error)
{
    return tl_error_set(ret_error, TL_UNAVAILABLE,
                        "the host \"%s\" cannot be resolved: %s; check the name, and the name service of this machine",
                        endpoint->host, failure == EAI_SYSTEM ? strerror(error_number) : gai_strerror(failure));
}

enum tl_status tl_endpoint_resolve(const struct tl_endpoint *endpoint, int64_t deadline_ns, struct addrinfo **ret_found,
                                   struct tl_error *ret_error)
{
    struct addrinfo *found;
    if (look_up(endpoint, AI_NUMERICHOST, &found) == 0) {
        *ret_found = found;
        return TL_OK;
    }
    if (deadline_ns == TL_TIME_NEVER) {
        int failure = look_up(endpoint, 0, ret_found);
        return failure == 0 ? TL_OK : no_such_host(endpoint, failure, errno, ret_error);
    }
    struct lookup *lookup = lookup_create(endpoint);
    if (lookup == NULL || tl_thread_start("tl-lookup", lookup_run, lookup, NULL, ret_error) != TL_OK) {
        if (lookup != NULL) lookup_destroy(lookup);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                            "the host \"%s\" cannot be resolved: no memory or thread for it", endpoint->host);
    }
    if (!lookup_wait(lookup, deadline_ns)) {
        return tl_error_set(ret_error, TL_UNAVAILABLE,
                            "the host \"%s\" was not resolved in time; check the name service of this machine",
                            endpoint->host);
    }
    enum tl_status status = TL_OK;
    if (lookup->failure == 0) {
        *ret_found = lookup->found;
        lookup->found = NULL;
    } else {
        status = no_such_host(endpoint, lookup->failure, lookup->error_number, ret_error);
    }
    lookup_destroy(lookup);
    return status;
}

/* ---------------------------------------------------------------------------------------------------- dialling -- */

/* Waits until the socket is connected; returns errno of the attempt. */
static int wait_connected(int fd, int64_t deadline_ns)
{
    for (;;) {
        int64_t left_ms = tl_clock_remaining_ns(deadline_ns) / TL_NS_PER_MS;
        struct pollfd wait = {.fd = fd, .events = POLLOUT};
        int count = poll(&wait, 1, left_ms > INT32_MAX ? INT32_MAX : (int)left_ms + 1);
        if (count > 0) break;
        if (count < 0 && errno != EINTR) return errno;
        if (count == 0 && tl_clock_remaining_ns(deadline_ns) == 0) return ETIMEDOUT;
    }
    int failure = 0;
    socklen_t length = sizeof(failure);
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &failure, &length) != 0) return errno;
    return failure;
}

/* Returns errno of the attempt, 0 when the connection was taken. */
static int dial_one(const struct addrinfo *item, int64_t deadline_ns)
{
    int fd = socket(item->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return errno;
    int failure = 0;
    if (connect(fd, item->ai_addr, item->ai_addrlen) != 0) {
        failure = errno == EINPROGRESS || errno == EINTR ? wait_connected(fd, deadline_ns) : errno;
    }
    close(fd);
    return failure;
}

/* The addresses of a host that were dialled in vain. */
#define MAX_ATTEMPTS 8
struct attempts {
    size_t count;
    struct {
        const struct addrinfo *address;
        int failure; /* errno */
    } items[MAX_ATTEMPTS];
};

/* Which of the failures tells the most: that the host has answered, then that it has not. */
static int telling_failure(const struct attempts *attempts)
{
    int telling = attempts->items[0].failure;
    for (size_t i = 0; i < attempts->count; i++) {
        int failure = attempts->items[i].failure;
        if (failure == ECONNREFUSED) return failure;
        if (failure == ETIMEDOUT) telling = failure;
    }
    return telling;
}

static bool is_v6_only(const struct attempts *attempts)
{
    for (size_t i = 0; i < attempts->count; i++)
        if (attempts->items[i].address->ai_family != AF_INET6) return false;
    return true;
}

/* Writes " (IPv4 10.0.0.7, IPv6 fd00::7: Network is unreachable)": what was dialled, with the failures that are not the
 * telling one. "" for a host that is numeric already. */
static void format_attempts(const struct tl_endpoint *endpoint, const struct attempts *attempts, int telling,
                            char *ret_text, size_t capacity)
{
    struct tl_ip ip;
    size_t used = 0;
    ret_text[0] = '\0';
    if (tl_ip_parse(endpoint->host, &ip)) return;
    for (size_t i = 0; i < attempts->count && used < capacity; i++) {
        char where[TL_ENDPOINT_WHERE_BYTES];
        int failure = attempts->items[i].failure;
        tl_endpoint_where(attempts->items[i].address->ai_addr, where);
        used += (size_t)snprintf(ret_text + used, capacity - used, "%s%s%s%s", i == 0 ? " (" : ", ", where,
                                 failure != telling ? ": " : "", failure != telling ? strerror(failure) : "");
    }
    if (used + 1 < capacity) snprintf(ret_text + used, capacity - used, ")");
}

static enum tl_status dial_failed(const struct tl_endpoint *endpoint, const struct attempts *attempts,
                                  struct tl_error *ret_error)
{
    char tried[512];
    int failure = telling_failure(attempts);
    format_attempts(endpoint, attempts, failure, tried, sizeof(tried));
    switch (failure) {
    case ECONNREFUSED:
        return tl_error_set(
            ret_error, TL_UNAVAILABLE, ENDPOINT_FORMAT "%s refused the connection; is the worker started%s",
            ENDPOINT_ARGS(endpoint), tried,
            tried[0] != '\0' && is_v6_only(attempts) ? ", and does it listen on IPv6, which is all that "
                                                       "the name resolves to?"
                                                     : "?");
    case ETIMEDOUT:
        return tl_error_set(ret_error, TL_UNAVAILABLE,
                            ENDPOINT_FORMAT "%s did not take the connection in time; is the machine up, and is there a "
                                            "firewall in between?",
                            ENDPOINT_ARGS(endpoint), tried);
    case EMFILE:
    case ENFILE:
    case ENOBUFS:
    case ENOMEM:
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                            ENDPOINT_FORMAT "%s was not dialled: %s; this process needs more descriptors or memory",
                            ENDPOINT_ARGS(endpoint), tried, strerror(failure));
    default:
        return tl_error_set(ret_error, TL_UNAVAILABLE,
                            ENDPOINT_FORMAT "%s cannot be reached: %s; check the address and the network",
                            ENDPOINT_ARGS(endpoint), tried, strerror(failure));
    }
}

void tl_endpoint_where(const struct sockaddr *address, char ret_where[TL_ENDPOINT_WHERE_BYTES])
{
    struct tl_ip ip;
    char text[TL_IP_TEXT_BYTES];
    ret_where[0] = '\0';
    if (!tl_ip_of_sockaddr(address, &ip)) return;
    snprintf(ret_where, TL_ENDPOINT_WHERE_BYTES, "%s %s", tl_ip_family(&ip), tl_ip_format(&ip, text));
}

/* Writes the address as a target; the '%' in front of the scope of a link-local address is escaped there. False when it
 * does not fit. */
static bool format_target(const struct sockaddr *address, socklen_t len_bytes, char target[TL_ENDPOINT_TARGET_BYTES])
{
    char host[TL_ENDPOINT_TARGET_BYTES];
    char port[16];
    if (getnameinfo(address, len_bytes, host, sizeof(host), port, sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
        return false;
    }
    size_t address_bytes = strcspn(host, "%");
    const char *scope = host[address_bytes] == '%' ? host + address_bytes + 1 : NULL;
    int used = address->sa_family == AF_INET6
                   ? snprintf(target, TL_ENDPOINT_TARGET_BYTES, "ipv6:[%.*s%s%s]:%s", (int)address_bytes, host,
                              scope != NULL ? "%25" : "", scope != NULL ? scope : "", port)
                   : snprintf(target, TL_ENDPOINT_TARGET_BYTES, "ipv4:%s:%s", host, port);
    return used < TL_ENDPOINT_TARGET_BYTES;
}

/* An IPv4 address that came in through a socket for both versions, as what it is. */
static void unmap(struct sockaddr_storage *address, socklen_t *len_bytes)
{
    const struct sockaddr_in6 mapped = *(const struct sockaddr_in6 *)address;
    if (address->ss_family != AF_INET6 || !IN6_IS_ADDR_V4MAPPED(&mapped.sin6_addr)) return;
    struct sockaddr_in plain = {.sin_family = AF_INET, .sin_port = mapped.sin6_port};
    memcpy(&plain.sin_addr, mapped.sin6_addr.s6_addr + 12, sizeof(plain.sin_addr));
    memcpy(address, &plain, sizeof(plain));
    *len_bytes = sizeof(plain);
}

bool tl_endpoint_target(const struct tl_endpoint *endpoint, char ret_target[TL_ENDPOINT_TARGET_BYTES])
{
    struct addrinfo *found;
    if (look_up(endpoint, AI_NUMERICHOST, &found) != 0) return false;
    bool is_written = format_target(found->ai_addr, found->ai_addrlen, ret_target);
    freeaddrinfo(found);
    return is_written;
}

bool tl_endpoint_is_loopback(const char *target)
{
    static const char *const prefixes[] = {"ipv4:127.", "ipv6:[::1]:"};
    for (size_t i = 0; i < TL_ARRAY_COUNT(prefixes); i++)
        if (strncmp(target, prefixes[i], strlen(prefixes[i])) == 0) return true;
    return false;
}

bool tl_endpoint_ip(const char *target, struct tl_ip *ret_ip)
{
    char host[TL_ENDPOINT_TARGET_BYTES];
    size_t len = 0;
    if (strncmp(target, "ipv4:", 5) == 0) {
        target += 5;
        len = strcspn(target, ":");
    } else if (strncmp(target, "ipv6:[", 6) == 0) {
        target += 6;
        len = strcspn(target, "]");
    }
    if (len == 0 || len >= sizeof(host)) return false;
    memcpy(host, target, len);
    host[len] = '\0';
    return tl_ip_parse(host, ret_ip);
}

bool tl_endpoint_is_here(const char *target)
{
    struct tl_ip ip;
    if (strncmp(target, "unix:", 5) == 0 || strncmp(target, "unix-abstract:", 14) == 0) return true;
    return tl_endpoint_ip(target, &ip) && tl_ip_is_here(&ip);
}

bool tl_endpoint_peer(int fd, char ret_target[TL_ENDPOINT_TARGET_BYTES])
{
    struct sockaddr_storage address = {0};
    socklen_t len_bytes = sizeof(address);
    /* A connection that was reset before it was accepted has its address in SO_PEERNAME only, which wants to be asked
     * for as many bytes as it has. */
    if (getpeername(fd, (struct sockaddr *)&address, &len_bytes) != 0 &&
        (getsockname(fd, (struct sockaddr *)&address, &len_bytes) != 0 ||
         getsockopt(fd, SOL_SOCKET, SO_PEERNAME, &address, &len_bytes) != 0))
        return false;
    unmap(&address, &len_bytes);
    return format_target((const struct sockaddr *)&address, len_bytes, ret_target);
}

enum tl_status tl_endpoint_dial(const struct tl_endpoint *endpoint, const struct addrinfo *found, int64_t deadline_ns,
                                char ret_target[TL_ENDPOINT_TARGET_BYTES], struct tl_error *ret_error)
{
    int left = 0;
    for (const struct addrinfo *item = found; item != NULL; item = item->ai_next)
        left++;
    struct attempts attempts = {.count = 0};
    for (const struct addrinfo *item = found; item != NULL; item = item->ai_next, left--) {
        int64_t share_ns = tl_clock_remaining_ns(deadline_ns);
        int64_t until_ns = share_ns == TL_TIME_NEVER ? TL_TIME_NEVER : tl_clock_deadline_ns(share_ns / left);
        int failure = dial_one(item, until_ns);
        if (failure == 0 && format_target(item->ai_addr, item->ai_addrlen, ret_target)) return TL_OK;
        if (failure == 0) failure = EAFNOSUPPORT;
        if (attempts.count == MAX_ATTEMPTS) continue;
        attempts.items[attempts.count].address = item;
        attempts.items[attempts.count++].failure = failure;
    }
    return dial_failed(endpoint, &attempts, ret_error);
}
