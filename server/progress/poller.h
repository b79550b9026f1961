// SPDX-License-Identifier: Apache-2.0
/*
 * The poller: one round of a worker's loop and of the reactors that belong to its owner, by one thread. These are all
 * reactors that have no thread of their own, and those that their threads have lent (server/progress/reactor_thread.h).
 *
 * While requests travel on the transports the reactors are polled all the time and gRPC once in many rounds, because a
 * look at its queue costs more than a round trip. When nothing happens for a while the owner sleeps in the loop; a
 * helper thread waits for the events that would wake a reactor, and wakes the loop. No event is lost in between: the
 * reactors are armed before the helper watches them, and the helper watches before the owner sleeps.
 *
 * A reactor that does not run would answer no ping, and its peers would take the process for dead. Therefore the helper
 * asks for a round at regular intervals (tl_poller_heartbeat).
 *
 * A reactor that was lent rests while the owner of the loop sleeps, and then goes back to its thread when there is
 * something to do. So there is no helper thread for it. It is borrowed when requests have travelled, few at a time, for
 * a while: a borrower whose peers are the ones that ask would only sleep, where a thread that spins answers sooner, and
 * with many requests under way a thread works beside the one that makes them, if the process may use more than two
 * processors.
 */
#ifndef SERVER_PROGRESS_POLLER_H
#define SERVER_PROGRESS_POLLER_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "control/loop.h"
#include "dataplane/reactor.h"
#include "server/progress/executor.h"
#include "server/progress/reactor_thread.h"

/* A reactor that runs in the rounds of the loop. */
struct tl_polled_reactor {
    struct tl_reactor *reactor;
    const struct tl_executor *executor;
    struct tl_reactor_thread *thread; /* lends the reactor; NULL: it has no thread */
    bool is_here;                     /* it belongs to the owner of the loop, always without a thread */
    bool is_left;                     /* its thread takes it later, if it has not yet */
    int64_t spin_ns;                  /* how long a busy owner polls without a result before it sleeps */
    int64_t beat_ns;                  /* how often the helper checks that rounds are run */
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
    size_t reactor_count;
    size_t here_count; /* reactors that belong to the owner of the loop */
    int64_t spin_ns;
    int64_t busy_count;      /* requests that travel on the transports */
    bool is_serving;         /* reactors without threads had something to do since a caller last polled in vain */
    int64_t most_to_borrow;  /* with more of them under way reactors are not borrowed */
    unsigned begun_count;    /* requests that were begun, few at a time, since reactors were asked for */
    unsigned rounds_to_grpc; /* until gRPC is looked at again */
    bool has_helper;         /* there are reactors without threads */
    int epoll_fd;            /* the helper waits on it */
    int stop_fd;             /* eventfd: the helper ends */
    int beat_ms;
    struct tl_poller_heartbeat beat;
    pthread_t helper;
};

/* Starts the helper, if there are reactors without threads, and only then uses beat; the array is copied. All reactors
 * have threads, or none has. Errors: TL_RESOURCE_EXHAUSTED: no memory, no descriptor or no thread. */
enum tl_status tl_poller_init(struct tl_poller *poller, struct tl_loop *loop, const struct tl_executor *loop_executor,
                              const struct tl_polled_reactor *reactors, size_t count,
                              const struct tl_poller_heartbeat *beat, struct tl_error *ret_error) TL_MUST_USE;
void tl_poller_fini(struct tl_poller *poller);

/* Makes the next round look at gRPC, however busy the data plane is. Thread: as tl_poller_run. */
static inline void tl_poller_want_grpc(struct tl_poller *poller)
{
    poller->rounds_to_grpc = 0;
}

/* Counts requests that begin (1) or end (-1) to travel on the transports. Thread: as tl_poller_run. */
static inline void tl_poller_busy(struct tl_poller *poller, int change)
{
    poller->busy_count += change;
    if (change > 0) poller->begun_count = poller->busy_count > poller->most_to_borrow ? 0 : poller->begun_count + 1;
}

/* Takes the reactors that rest, and asks for others, when that is worth it, or gives them back when it no longer is.
 * Thread: as tl_poller_run. */
void tl_poller_borrow(struct tl_poller *poller);
/* Rests the reactors that were lent. One that has something to do again and again stays. Thread: as tl_poller_run. */
void tl_poller_rest(struct tl_poller *poller);
/* Gives the reactors that were lent, and do not rest, back to their threads. Thread: as tl_poller_run. */
void tl_poller_give_back(struct tl_poller *poller);

/* Returns whether reactors were lent that do not rest. Thread: as tl_poller_run. */
static inline bool tl_poller_has_borrowed(const struct tl_poller *poller)
{
    return !poller->has_helper && poller->here_count > 0;
}

/* Runs one round; sleeps until deadline_ns (0: not at all) when there is nothing to do. Returns whether anything was
 * done. Thread: one at a time. */
bool tl_poller_run(struct tl_poller *poller, int64_t deadline_ns);

#endif
