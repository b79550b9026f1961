// SPDX-License-Identifier: Apache-2.0
/*
 * Connections that are dialled: the beginning of TCP, and how the owner of a dial is told of its end.
 *
 * Happy path: the owner has a handle; the thread connects, shakes hands, and posts the result to the owner's loop,
 * which frees the handle. Failure mode: an owner that abandons its handle is told nothing more, and the thread frees
 * it.
 */
#include <errno.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "control/tls_handshake_internal.h"

/* --------------------------------------------------------------------------------------------------------- end -- */

void tls_dial_free(struct tl_tls_dial *dial)
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
    tls_dial_free(dial);
}

bool tls_dial_is_abandoned(struct tl_tls_dial *dial)
{
    pthread_mutex_lock(&dial->mutex);
    bool is_abandoned = dial->is_abandoned;
    pthread_mutex_unlock(&dial->mutex);
    return is_abandoned;
}

void tls_dial_end(struct tl_tls_dial *dial)
{
    pthread_mutex_lock(&dial->mutex);
    dial->is_over = true;
    bool is_abandoned = dial->is_abandoned;
    if (!is_abandoned) tl_loop_post(dial->loop, &dial->closure);
    pthread_mutex_unlock(&dial->mutex);
    if (is_abandoned) tls_dial_free(dial);
}

void tl_tls_dial_abandon(struct tl_tls_dial *dial)
{
    pthread_mutex_lock(&dial->mutex);
    dial->is_abandoned = true;
    pthread_mutex_unlock(&dial->mutex);
}

/* --------------------------------------------------------------------------------------------------- beginning -- */

/* The interface of a link-local address, "ipv6:[fe80::1%25eth0]:4000"; 0: none is named, or it does not exist. */
static uint32_t zone_of(const char *target)
{
    char name[IF_NAMESIZE];
    const char *zone = strstr(target, "%25");
    size_t len = zone != NULL ? strcspn(zone + 3, "]") : 0;
    if (len == 0 || len >= sizeof(name)) return 0;
    memcpy(name, zone + 3, len);
    name[len] = '\0';
    uint32_t index = if_nametoindex(name);
    return index != 0 ? index : (uint32_t)strtoul(name, NULL, 10);
}

int tls_dial_connect(const char *target, int64_t keepalive_timeout_ns, struct tl_error *ret_error)
{
    struct sockaddr_storage address;
    struct tl_ip ip;
    const char *port = strrchr(target, ':');
    if (port == NULL || !tl_endpoint_ip(target, &ip)) {
        tl_error_set(ret_error, TL_INVALID_ARGUMENT, "\"%s\" is no address that can be dialled", target);
        return -1;
    }
    socklen_t length = tl_ip_to_sockaddr(&ip, (uint16_t)strtoul(port + 1, NULL, 10), &address);
    if (address.ss_family == AF_INET6) ((struct sockaddr_in6 *)&address)->sin6_scope_id = zone_of(target);
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

struct tl_tls_dial *tls_dial_create(struct tl_loop *loop, const struct tl_tls_address *address,
                                    tl_tls_dialled_fn dialled, void *owner)
{
    struct tl_tls_dial *dial = calloc(1, sizeof(*dial));
    if (dial == NULL) return NULL;
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
    return dial;
}
