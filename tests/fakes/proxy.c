// SPDX-License-Identifier: Apache-2.0
/* A TCP proxy. One thread polls everything; the commands of a test are protected by the mutex and take effect at
 * once. */
#include "fakes/proxy.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/check.h"

static struct sockaddr_in loopback(unsigned port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    address.sin_port = htons((uint16_t)port);
    return address;
}

static void wake(struct proxy *proxy)
{
    uint64_t one = 1;
    TL_CHECK(write(proxy->wake, &one, sizeof(one)) == sizeof(one));
}

static void end_side(int *fd)
{
    if (*fd < 0) return;
    struct linger reset = {.l_onoff = 1, .l_linger = 0};
    setsockopt(*fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
    close(*fd);
    *fd = -1;
}

static void end_pair(struct proxy *proxy, unsigned place)
{
    struct proxy_pair *pair = proxy->pairs[place];
    if (pair == NULL) return;
    end_side(&pair->fds[0]);
    end_side(&pair->fds[1]);
    free(pair);
    proxy->pairs[place] = NULL;
}

/* ------------------------------------------------------------------------------------------------------ thread -- */

static void no_delay(int fd)
{
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

static void take_connection(struct proxy *proxy)
{
    int near = accept4(proxy->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (near < 0) return;
    unsigned place = 0;
    while (place < PROXY_MAX && proxy->pairs[place] != NULL)
        place++;
    int far = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in target = loopback(proxy->target_port);
    bool is_connected =
        !proxy->is_refusing && place < PROXY_MAX && connect(far, (struct sockaddr *)&target, sizeof(target)) == 0;
    if (!is_connected) {
        end_side(&near);
        end_side(&far);
        return;
    }
    no_delay(near);
    no_delay(far);
    proxy->accepted++;
    proxy->pairs[place] = calloc(1, sizeof(struct proxy_pair));
    TL_CHECK(proxy->pairs[place] != NULL);
    proxy->pairs[place]->fds[0] = near;
    proxy->pairs[place]->fds[1] = far;
}

static uint64_t allowance(const struct proxy *proxy, int way)
{
    return proxy->limit[way] > proxy->passed[way] ? proxy->limit[way] - proxy->passed[way] : 0;
}

/* Moves what can be moved in one direction; returns false when the connection is over. */
static bool move(struct proxy *proxy, struct proxy_pair *pair, int way)
{
    struct proxy_flow *flow = &pair->flows[way];
    int from = pair->fds[way == PROXY_UP ? 0 : 1];
    int to = pair->fds[way == PROXY_UP ? 1 : 0];
    if (from < 0 || to < 0) return true;
    if (flow->begin == flow->end) {
        uint64_t space = allowance(proxy, way);
        if (space == 0) return true;
        size_t count = space < PROXY_BUFFER_BYTES ? (size_t)space : PROXY_BUFFER_BYTES;
        ssize_t got = recv(from, flow->bytes, count, MSG_DONTWAIT);
        if (got == 0 || (got < 0 && errno != EAGAIN)) return false;
        if (got < 0) return true;
        flow->begin = 0;
        flow->end = (unsigned)got;
        proxy->passed[way] += (uint64_t)got;
    }
    ssize_t sent = send(to, flow->bytes + flow->begin, flow->end - flow->begin, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) return false;
    if (sent > 0) flow->begin += (unsigned)sent;
    return true;
}

/* Returns the events for which one side of a pair is polled. */
static short wanted(const struct proxy *proxy, const struct proxy_pair *pair, int side)
{
    int out_way = side == 0 ? PROXY_UP : PROXY_DOWN;
    int in_way = side == 0 ? PROXY_DOWN : PROXY_UP;
    const struct proxy_flow *out = &pair->flows[out_way];
    const struct proxy_flow *in = &pair->flows[in_way];
    bool reads = out->begin == out->end && allowance(proxy, out_way) > 0;
    bool writes = in->begin < in->end;
    return (short)((reads ? POLLIN : 0) | (writes ? POLLOUT : 0));
}

static nfds_t fill_poll(const struct proxy *proxy, struct pollfd *polls)
{
    nfds_t count = 0;
    polls[count++] = (struct pollfd){.fd = proxy->wake, .events = POLLIN};
    polls[count++] = (struct pollfd){.fd = proxy->listener, .events = POLLIN};
    for (unsigned i = 0; i < PROXY_MAX; i++) {
        const struct proxy_pair *pair = proxy->pairs[i];
        if (pair == NULL || pair->fds[0] < 0 || pair->fds[1] < 0) continue;
        for (int side = 0; side < 2; side++) {
            short events = wanted(proxy, pair, side);
            /* With an empty set of events, the kernel would report an end again and again. */
            int fd = events != 0 ? pair->fds[side] : -1;
            polls[count++] = (struct pollfd){.fd = fd, .events = events};
        }
    }
    return count;
}

static void *run(void *context)
{
    struct proxy *proxy = context;
    struct pollfd polls[2 + 2 * PROXY_MAX];
    pthread_mutex_lock(&proxy->mutex);
    while (!proxy->is_stopping) {
        nfds_t count = fill_poll(proxy, polls);
        pthread_mutex_unlock(&proxy->mutex);
        (void)poll(polls, count, -1);
        pthread_mutex_lock(&proxy->mutex);
        uint64_t value;
        if (polls[0].revents != 0) TL_CHECK(read(proxy->wake, &value, sizeof(value)) == sizeof(value));
        if (polls[1].revents != 0) take_connection(proxy);
        for (unsigned i = 0; i < PROXY_MAX; i++) {
            struct proxy_pair *pair = proxy->pairs[i];
            if (pair == NULL) continue;
            if (!move(proxy, pair, PROXY_UP) || !move(proxy, pair, PROXY_DOWN)) end_pair(proxy, i);
        }
    }
    pthread_mutex_unlock(&proxy->mutex);
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------ public -- */

void proxy_start(struct proxy *proxy, unsigned target_port)
{
    *proxy = (struct proxy){.target_port = target_port, .limit = {UINT64_MAX, UINT64_MAX}};
    pthread_mutex_init(&proxy->mutex, NULL);
    proxy->wake = eventfd(0, EFD_CLOEXEC);
    proxy->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct sockaddr_in address = loopback(0);
    socklen_t length = sizeof(address);
    TL_CHECK(bind(proxy->listener, (struct sockaddr *)&address, sizeof(address)) == 0);
    TL_CHECK(listen(proxy->listener, 64) == 0);
    TL_CHECK(getsockname(proxy->listener, (struct sockaddr *)&address, &length) == 0);
    proxy->port = ntohs(address.sin_port);
    TL_CHECK(pthread_create(&proxy->thread, NULL, run, proxy) == 0);
}

void proxy_stop(struct proxy *proxy)
{
    pthread_mutex_lock(&proxy->mutex);
    proxy->is_stopping = true;
    wake(proxy);
    pthread_mutex_unlock(&proxy->mutex);
    pthread_join(proxy->thread, NULL);
    for (unsigned i = 0; i < PROXY_MAX; i++)
        end_pair(proxy, i);
    close(proxy->listener);
    close(proxy->wake);
    pthread_mutex_destroy(&proxy->mutex);
}

void proxy_limit(struct proxy *proxy, enum proxy_way way, uint64_t more_bytes)
{
    pthread_mutex_lock(&proxy->mutex);
    uint64_t passed = proxy->passed[way];
    proxy->limit[way] = more_bytes > UINT64_MAX - passed ? UINT64_MAX : passed + more_bytes;
    wake(proxy);
    pthread_mutex_unlock(&proxy->mutex);
}

void proxy_wait_limit(struct proxy *proxy, enum proxy_way way)
{
    for (bool is_reached = false; !is_reached; usleep(500)) {
        pthread_mutex_lock(&proxy->mutex);
        is_reached = proxy->passed[way] >= proxy->limit[way];
        pthread_mutex_unlock(&proxy->mutex);
    }
}

void proxy_cut(struct proxy *proxy)
{
    pthread_mutex_lock(&proxy->mutex);
    for (unsigned i = 0; i < PROXY_MAX; i++)
        end_pair(proxy, i);
    wake(proxy);
    pthread_mutex_unlock(&proxy->mutex);
}

static void cut_side(struct proxy *proxy, int side)
{
    pthread_mutex_lock(&proxy->mutex);
    for (unsigned i = 0; i < PROXY_MAX; i++)
        if (proxy->pairs[i] != NULL) end_side(&proxy->pairs[i]->fds[side]);
    wake(proxy);
    pthread_mutex_unlock(&proxy->mutex);
}

void proxy_cut_near(struct proxy *proxy)
{
    cut_side(proxy, 0);
}

void proxy_cut_far(struct proxy *proxy)
{
    cut_side(proxy, 1);
}

void proxy_cut_broken(struct proxy *proxy)
{
    pthread_mutex_lock(&proxy->mutex);
    for (unsigned i = 0; i < PROXY_MAX; i++)
        if (proxy->pairs[i] != NULL && proxy->pairs[i]->fds[0] < 0) end_pair(proxy, i);
    pthread_mutex_unlock(&proxy->mutex);
}

void proxy_refuse(struct proxy *proxy, bool is_refusing)
{
    pthread_mutex_lock(&proxy->mutex);
    proxy->is_refusing = is_refusing;
    pthread_mutex_unlock(&proxy->mutex);
}

uint64_t proxy_passed(struct proxy *proxy, enum proxy_way way)
{
    pthread_mutex_lock(&proxy->mutex);
    uint64_t passed = proxy->passed[way];
    pthread_mutex_unlock(&proxy->mutex);
    return passed;
}

unsigned proxy_accepted(struct proxy *proxy)
{
    pthread_mutex_lock(&proxy->mutex);
    unsigned accepted = proxy->accepted;
    pthread_mutex_unlock(&proxy->mutex);
    return accepted;
}
