// SPDX-License-Identifier: Apache-2.0
/* Two processes that are measured on two processors: otherwise the kernel puts them on one when it likes. */
#ifndef TESTS_BENCH_DATAPLANE_PROCESSORS_H
#define TESTS_BENCH_DATAPLANE_PROCESSORS_H

#include <sched.h>
#include <stdbool.h>

/* The calling process, which has one thread, stays on the first or the last of the processors that it may use. */
static inline void bench_stay_on_processor(bool is_last)
{
    cpu_set_t allowed, chosen;
    int found = -1;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
    for (int i = 0; i < CPU_SETSIZE; i++) {
        if (CPU_ISSET(i, &allowed) && (is_last || found < 0)) found = i;
    }
    CPU_ZERO(&chosen);
    CPU_SET(found, &chosen);
    (void)sched_setaffinity(0, sizeof(chosen), &chosen);
}

#endif
