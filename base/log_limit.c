// SPDX-License-Identifier: Apache-2.0
#include "base/log_limit.h"

#include <string.h>
#include <xxhash.h>

#include "base/clock.h"
#include "base/random.h"

#define PAUSE_NS (60 * TL_NS_PER_SEC)

void tl_log_limit_init(struct tl_log_limit *limit)
{
    *limit = (struct tl_log_limit){.hash_seed = tl_random_u64()};
    pthread_mutex_init(&limit->mutex, NULL);
}

void tl_log_limit_fini(struct tl_log_limit *limit)
{
    pthread_mutex_destroy(&limit->mutex);
}

/* Returns the place of the cause, or one that it may take; NULL: all are taken. */
static struct tl_log_limit_cause *find_place(struct tl_log_limit *limit, uint64_t hash, int64_t now_ns)
{
    struct tl_log_limit_cause *place = NULL;
    for (size_t i = 0; i < limit->count; i++) {
        struct tl_log_limit_cause *cause = &limit->causes[i];
        if (cause->hash == hash) return cause;
        if (now_ns - cause->time_ns >= PAUSE_NS) place = cause;
    }
    if (place != NULL || limit->count == TL_LOG_LIMIT_CAUSES) return place;
    place = &limit->causes[limit->count++];
    place->time_ns = now_ns - PAUSE_NS;
    return place;
}

bool tl_log_limit_passes(struct tl_log_limit *limit, const char *cause)
{
    uint64_t hash = XXH3_64bits_withSeed(cause, strlen(cause), limit->hash_seed);
    int64_t now_ns = tl_clock_now_ns();
    pthread_mutex_lock(&limit->mutex);
    struct tl_log_limit_cause *place = find_place(limit, hash, now_ns);
    bool passes = place != NULL && now_ns - place->time_ns >= PAUSE_NS;
    if (passes) *place = (struct tl_log_limit_cause){.hash = hash, .time_ns = now_ns};
    pthread_mutex_unlock(&limit->mutex);
    return passes;
}
