// SPDX-License-Identifier: Apache-2.0
/*
 * Threads of the library.
 *
 * A program may wait for its signals in one thread of its own (sigwait, signalfd); a thread of ours that does not block
 * them would take them away. What a fault raises stays unblocked: it belongs to the thread that made it.
 */
#include "base/thread.h"

#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"

static void block_signals(sigset_t *ret_before)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS, SIGPROF};
    sigset_t blocked;
    sigfillset(&blocked);
    for (size_t i = 0; i < TL_ARRAY_COUNT(faults); i++)
        sigdelset(&blocked, faults[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, ret_before);
}

enum tl_status tl_thread_start(const char *name, void *(*run)(void *argument), void *argument, pthread_t *ret_thread,
                               struct tl_error *ret_error)
{
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, ret_thread != NULL ? PTHREAD_CREATE_JOINABLE : PTHREAD_CREATE_DETACHED);
    sigset_t before;
    pthread_t thread;
    block_signals(&before);
    int failure = pthread_create(&thread, &attributes, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (failure != 0) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "cannot start the thread %s: %s", name,
                            strerror(failure));
    }
    if (ret_thread != NULL) {
        *ret_thread = thread;
        pthread_setname_np(thread, name);
    }
    return TL_OK;
}

/* The system counts a thread that was joined until it has gone altogether, a moment later. */
#define SETTLE_PAUSE_US 100
#define MAX_SETTLE_LOOKS 1000

/* Returns the number of threads of this process plus a constant, or 0 where the system does not show it. */
static nlink_t count_threads(void)
{
    struct stat info;
    return stat("/proc/self/task", &info) == 0 ? info.st_nlink : 0;
}

static void *wait_at_gate(void *gate)
{
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
    return NULL;
}

enum tl_status tl_thread_check_available(unsigned count, struct tl_error *ret_error)
{
    enum tl_status status = TL_OK;
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_t threads[TL_THREAD_MAX_PROBES];
    unsigned started = 0;
    const nlink_t before = count_threads();
    TL_CHECK(count <= TL_THREAD_MAX_PROBES);
    pthread_mutex_lock(&gate);
    while (status == TL_OK && started < count) {
        status = tl_thread_start("tl-probe", wait_at_gate, &gate, &threads[started], ret_error);
        if (status == TL_OK) started++;
    }
    pthread_mutex_unlock(&gate);
    for (unsigned i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    for (unsigned i = 0; i < MAX_SETTLE_LOOKS && count_threads() > before; i++)
        usleep(SETTLE_PAUSE_US);
    return status;
}

#define FEW_PROCESSORS 2

bool tl_thread_has_few_processors(void)
{
    cpu_set_t processors;
    return sched_getaffinity(0, sizeof(processors), &processors) == 0 && CPU_COUNT(&processors) <= FEW_PROCESSORS;
}

/* A yield that takes so long has let another thread run. */
#define YIELDED_NS 5000

bool tl_thread_yields(int64_t *inout_now_ns, int64_t *inout_next_ns)
{
    int64_t before_ns = *inout_now_ns;
    if (before_ns < *inout_next_ns) return false;
    (void)sched_yield();
    *inout_now_ns = tl_clock_now_ns();
    *inout_next_ns = *inout_now_ns + TL_THREAD_YIELD_NS;
    return *inout_now_ns - before_ns >= YIELDED_NS;
}
