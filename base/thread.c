// SPDX-License-Identifier: Apache-2.0
/*
 * Threads of the library.
 *
 * A program may wait for its signals in one thread of its own (sigwait, signalfd); a thread of ours that does not block
 * them would take them away. What a fault raises stays unblocked: it belongs to the thread that made it.
 */
#include "base/thread.h"

#include <signal.h>
#include <stddef.h>
#include <string.h>

#include "base/check.h"
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
