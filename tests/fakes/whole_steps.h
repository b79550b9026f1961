// SPDX-License-Identifier: Apache-2.0
/* What a rendezvous table does in rounds, as a whole, however many rounds that takes. */
#ifndef TESTS_FAKES_WHOLE_STEPS_H
#define TESTS_FAKES_WHOLE_STEPS_H

#include "base/clock.h"
#include "server/rendezvous/rendezvous.h"

static inline void abort_whole_step(struct tl_rendezvous *table, uint64_t step, const struct tl_error *status)
{
    struct tl_quota quota = {.used = 0};
    while (!tl_rendezvous_abort_step(table, step, status, &quota))
        tl_quota_renew(&quota);
}

/* Returns how many values were dropped. */
static inline uint64_t end_whole_step(struct tl_rendezvous *table, uint64_t step)
{
    struct tl_quota quota = {.used = 0};
    uint64_t dropped_count = 0;
    while (!tl_rendezvous_end_step(table, step, &quota, &dropped_count))
        tl_quota_renew(&quota);
    return dropped_count;
}

static inline int64_t expire_all(struct tl_rendezvous *table, int64_t now_ns)
{
    struct tl_quota quota = {.used = 0};
    int64_t next_ns;
    while ((next_ns = tl_rendezvous_expire(table, now_ns, &quota)) <= now_ns && next_ns != TL_TIME_NEVER)
        tl_quota_renew(&quota);
    return next_ns;
}

static inline void release_whole_incarnation(struct tl_rendezvous *table, uint64_t incarnation)
{
    struct tl_table_release releasing = {.incarnation = incarnation};
    struct tl_quota quota = {.used = 0};
    while (!tl_rendezvous_release_incarnation(table, &releasing, &quota))
        tl_quota_renew(&quota);
}

#endif
