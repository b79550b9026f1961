// SPDX-License-Identifier: Apache-2.0
/*
 * A TCP proxy between workers, in a thread of its own, that loses connections and holds bytes back on command.
 *
 * "Up" are the bytes from the connecting side to the listening side, "down" the others. A cluster puts a worker behind
 * a proxy: its address is the proxy's port, and its "listen" is another one.
 */
#ifndef FAKES_PROXY_H
#define FAKES_PROXY_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#define PROXY_MAX 64
#define PROXY_BUFFER_BYTES 65536

enum proxy_way { PROXY_UP = 0, PROXY_DOWN = 1 };

/* Bytes on their way through one connection in one direction. */
struct proxy_flow {
    unsigned char bytes[PROXY_BUFFER_BYTES];
    unsigned begin;
    unsigned end;
};

struct proxy_pair {
    int fds[2]; /* The connecting side and the listening side; -1: gone. */
    struct proxy_flow flows[2];
};

struct proxy {
    unsigned port;
    unsigned target_port;
    pthread_t thread;
    pthread_mutex_t mutex; /* Protects what follows. */
    int listener;
    int wake;
    bool is_stopping;
    bool is_refusing;
    uint64_t passed[2];
    uint64_t limit[2]; /* The limit of passed; bytes beyond it are held back. */
    unsigned accepted;
    struct proxy_pair *pairs[PROXY_MAX];
};

void proxy_start(struct proxy *proxy, unsigned target_port);
void proxy_stop(struct proxy *proxy);

/* Lets so many more bytes pass (UINT64_MAX: all), then holds them back. */
void proxy_limit(struct proxy *proxy, enum proxy_way way, uint64_t more_bytes);
/* Waits until the allowed bytes have passed. */
void proxy_wait_limit(struct proxy *proxy, enum proxy_way way);
/* Ends all connections at once with a reset; new ones are possible. */
void proxy_cut(struct proxy *proxy);
/* Ends all connections on the connecting side; the other side does not learn of it until proxy_cut. */
void proxy_cut_near(struct proxy *proxy);
/* Ends them on the listening side; the connecting side does not learn of it. */
void proxy_cut_far(struct proxy *proxy);
/* Ends those connections that proxy_cut_near has half ended. */
void proxy_cut_broken(struct proxy *proxy);
/* Accepts and resets new connections, or lets them pass again. */
void proxy_refuse(struct proxy *proxy, bool is_refusing);

uint64_t proxy_passed(struct proxy *proxy, enum proxy_way way);
unsigned proxy_accepted(struct proxy *proxy);

#endif
