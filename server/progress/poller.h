// SPDX-License-Identifier: Apache-2.0
/*
 * The poller: one round of a worker's loop and, where these have no threads of their own, of its reactors, by one
 * thread.
 *
 * While requests travel on the transports the reactors are polled all the time and gRPC once in many rounds, because a
 * look at its queue costs more than a round trip. When nothing happens for a while the owner sleeps in the loop; a
 * helper thread waits for the events that would wake a reactor, and wakes the loop. No event is lost in between: the
 * reactors are armed before the helper watches them, and the helper watches before the owner sleeps.
 *
 * A reactor that does not run would answer no ping, and its peers would take the process for dead. Therefore the helper
 * asks for a round at regular intervals (tl_poller_heartbeat).
 */
#ifndef SERVER_PROGRESS_POLLER_H
#define SERVER_PROGRESS_POLLER_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "control/loop.h"
#include "dataplane/reactor.h"
#include "server/progress/executor.h"

/* A reactor that has no thread of its own. */
struct tl_polled_reactor {
    struct tl_reactor *reactor;
    const struct tl_executor *executor;
    int64_t spin_ns; /* how long a busy owner polls without a result before it sleeps */
    int64_t beat_ns; /* how often the helper checks that rounds are run */
};

/* Called by the helper. */
struct tl_poller_heartbeat {
    void (*look)(void *context);
    void *context;
};

struct tl_poller {
    struct tl_loop *loop;
    const struct tl_executor *loop_executor;

    struct tl_polled_reactor *reactors; /* [reactor_count] */
    size_t reactor_count;               /* 0: they run elsewhere, or there are none */
    int64_t spin_ns;
    int64_t busy_count;      /* requests that travel on the transports */
    unsigned rounds_to_grpc; /* until gRPC is looked at again */
    int epoll_fd;            /* the helper waits on it */
    int stop_fd;             /* eventfd: the helper ends */
    int beat_ms;
    struct tl_poller_heartbeat beat;
    pthread_t helper;
};

/* Starts the helper, if there are reactors; the array is copied. With count 0, beat is not used. Errors:
 * TL_RESOURCE_EXHAUSTED: no memory, no descriptor or no thread. */
enum tl_status tl_poller_init(struct tl_poller *poller, struct tl_loop *loop, const struct tl_executor *loop_executor,
                              const struct tl_polled_reactor *reactors, size_t count,
                              const struct tl_poller_heartbeat *beat, struct tl_error *ret_error) TL_MUST_USE;
void tl_poller_fini(struct tl_poller *poller);

/* Makes the next round look at gRPC, however busy the data plane is. Thread: as tl_poller_run. */
static inline void tl_poller_want_grpc(struct tl_poller *poller)
{
    poller->rounds_to_grpc = 0;
}

/* Runs one round; sleeps until deadline_ns (0: not at all) when there is nothing to do. Returns whether anything was
 * done. Thread: one at a time. */
bool tl_poller_run(struct tl_poller *poller, int64_t deadline_ns);

#endif
