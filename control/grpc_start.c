// SPDX-License-Identifier: Apache-2.0
#include "control/grpc_start.h"

#include <grpc/grpc.h>
#include <grpc/support/cpu.h>
#include <grpc/support/sync.h>
#include <grpc/support/time.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "base/thread.h"

/* gRPC 1.51 aborts the process when one connection has had bytes to read without a pause for about 2 GiB: its estimate
 * of how much to read next then overflows the int that it computes the size of new buffers with (maybe_make_read_slices
 * in tcp_posix.cc). Any client can cause that. The older way to make buffers, which this variable selects, limits the
 * size. The variable is set before main, while no other thread reads the environment. */
__attribute__((constructor)) static void choose_read_buffers(void)
{
    static const char choice[] = "-tcp_read_chunks";
    if (strncmp(grpc_version_string(), "29.", 3) != 0) return; /* the core of gRPC 1.51 */
    const char *others = getenv("GRPC_EXPERIMENTS");
    char all[1024];
    int length = snprintf(all, sizeof(all), "%s%s%s", others != NULL ? others : "", others != NULL ? "," : "", choice);
    (void)setenv("GRPC_EXPERIMENTS", length < (int)sizeof(all) ? all : choice, 1);
}

/* The threads that gRPC 1.51 starts: with grpc_init the default executor, the resolver executor and a thread for
 * timers; with the first channel an event engine with a thread for each processor, within limits, and one for its
 * timers. gRPC does not check whether a thread was started: if one is missing, calls and the end of the event engine
 * never finish. */
#define GRPC_THREADS 4
#define GRPC_MIN_ENGINE_THREADS 2
#define GRPC_MAX_ENGINE_THREADS 32

static enum tl_status check_threads(struct tl_error *ret_error)
{
    unsigned count = gpr_cpu_num_cores();
    if (count < GRPC_MIN_ENGINE_THREADS) count = GRPC_MIN_ENGINE_THREADS;
    if (count > GRPC_MAX_ENGINE_THREADS) count = GRPC_MAX_ENGINE_THREADS;
    count += GRPC_THREADS;
    struct tl_error problem;
    if (tl_thread_check_available(count, &problem) == TL_OK) return TL_OK;
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                        "gRPC needs %u threads, and not all of them can be started: %s; raise the limit on processes "
                        "(ulimit -u, TasksMax= of systemd, pids.max of the container)",
                        count, problem.message);
}

/* Initialises gRPC for the life of the process. It is never shut down: its shutdown runs in the background, waits up to
 * 10 s for a poller of its own when a connection was closed in the middle of a write, and blocks the next
 * initialisation meanwhile. A channel that is never destroyed keeps the event engine, which would end with the last
 * channel, and never finish that if it could not start a thread under load. */
static void init_for_life(void)
{
    static grpc_channel *volatile keeper; /* volatile: it must be stored although nothing reads it */
    grpc_init();
    keeper = grpc_lame_client_channel_create("keeper", GRPC_STATUS_UNAVAILABLE, "keeper");
    TL_CHECK(keeper != NULL);
}

#define LOCK_WAITERS 2

/* A barrier made of gRPC's locks. */
struct lock_barrier {
    gpr_mu mutex;
    gpr_cv is_complete;
    atomic_uint missing_count; /* atomic because ThreadSanitizer does not see gRPC's locks */
};

static void *wait_at_barrier(void *argument)
{
    struct lock_barrier *barrier = argument;
    gpr_mu_lock(&barrier->mutex);
    if (atomic_fetch_sub(&barrier->missing_count, 1) == 1) gpr_cv_broadcast(&barrier->is_complete);
    while (atomic_load(&barrier->missing_count) > 0)
        (void)gpr_cv_wait(&barrier->is_complete, &barrier->mutex, gpr_inf_future(GPR_CLOCK_MONOTONIC));
    gpr_mu_unlock(&barrier->mutex);
    return NULL;
}

/* gRPC's locks are abseil's. The first time that two threads of a process wait for one of them, abseil looks for the
 * frequency of the processor in files of /sys. Many machines lack these files: errno is ENOENT afterwards. gRPC 1.51
 * takes locks between its connect and its look at errno, so that a connection that is under way may count as failed
 * ("No such file or directory"). Therefore two threads wait for one lock before anything is dialled: the thread that
 * comes to the barrier last holds the lock while it wakes the others, which need the lock to go on. */
static enum tl_status make_lock_contention(struct tl_error *ret_error)
{
    struct lock_barrier barrier = {.missing_count = LOCK_WAITERS + 1};
    pthread_t threads[LOCK_WAITERS];
    unsigned count = 0;
    enum tl_status status = TL_OK;
    gpr_mu_init(&barrier.mutex);
    gpr_cv_init(&barrier.is_complete);
    while (count < LOCK_WAITERS && status == TL_OK) {
        status = tl_thread_start("tl-lock", wait_at_barrier, &barrier, &threads[count], ret_error);
        count += status == TL_OK;
    }
    atomic_fetch_sub(&barrier.missing_count, LOCK_WAITERS - count);
    (void)wait_at_barrier(&barrier);
    while (count > 0)
        (void)pthread_join(threads[--count], NULL);
    gpr_cv_destroy(&barrier.is_complete);
    gpr_mu_destroy(&barrier.mutex);
    return status;
}

enum tl_status tl_grpc_start(struct tl_error *ret_error)
{
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static bool is_initialised;
    enum tl_status status = TL_OK;
    pthread_mutex_lock(&mutex);
    if (!is_initialised) {
        status = check_threads(ret_error);
        if (status == TL_OK) status = make_lock_contention(ret_error);
        if (status == TL_OK) init_for_life();
        is_initialised = status == TL_OK;
    }
    pthread_mutex_unlock(&mutex);
    return status;
}
