// SPDX-License-Identifier: Apache-2.0
/*
 * Keeps what others can cause from filling the log: an event is logged at most once a minute for each of its causes,
 * and for at most TL_LOG_LIMIT_CAUSES causes in that time. What is not logged is left to its caller to count.
 *
 * Thread: any.
 */
#ifndef BASE_LOG_LIMIT_H
#define BASE_LOG_LIMIT_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TL_LOG_LIMIT_CAUSES 64

/* A cause, by its hash, and when it was logged. */
struct tl_log_limit_cause {
    uint64_t hash;
    int64_t time_ns;
};

struct tl_log_limit {
    pthread_mutex_t mutex;
    uint64_t hash_seed;                                    /* so that no peer can make up causes that hide others */
    struct tl_log_limit_cause causes[TL_LOG_LIMIT_CAUSES]; /* [count] */
    size_t count;
};

void tl_log_limit_init(struct tl_log_limit *limit);
void tl_log_limit_fini(struct tl_log_limit *limit);

/* Returns whether an event with this cause is to be logged now. */
bool tl_log_limit_passes(struct tl_log_limit *limit, const char *cause);

#endif
