// SPDX-License-Identifier: Apache-2.0
/* A bounded number of threads takes one index after the other. The caller's thread takes part, so that it works even
 * when no other can be started. */
#include "server/cli/threads.h"

#include <pthread.h>
#include <stdatomic.h>

#include <tensorlane/status.h>

#include "base/thread.h"

#define MAX_THREADS 64

struct round {
    void (*run)(void *context, size_t index);
    void *context;
    size_t count;
    atomic_size_t next; /* the first index that is not begun yet */
};

static void *run_indexes(void *argument)
{
    struct round *round = argument;
    for (size_t index; (index = atomic_fetch_add(&round->next, 1)) < round->count;)
        round->run(round->context, index);
    return NULL;
}

void tl_run_all(size_t count, void (*run)(void *context, size_t index), void *context)
{
    struct round round = {.run = run, .context = context, .count = count};
    pthread_t threads[MAX_THREADS];
    size_t started = 0;
    struct tl_error error;
    while (started < MAX_THREADS && started + 1 < count &&
           tl_thread_start("tl-run-all", run_indexes, &round, &threads[started], &error) == TL_OK)
        started++;
    run_indexes(&round);
    for (size_t i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
}
