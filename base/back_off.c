// SPDX-License-Identifier: Apache-2.0
#include "base/back_off.h"

#include "base/random.h"

int64_t tl_back_off_ns(int64_t first_ns, int64_t max_ns, unsigned failure_count)
{
    int64_t pause_ns = first_ns;
    for (; failure_count > 0 && pause_ns < max_ns; failure_count--)
        pause_ns = pause_ns <= max_ns / 2 ? pause_ns * 2 : max_ns;
    return pause_ns / 2 + (int64_t)(tl_random_u64() % (uint64_t)(pause_ns / 2));
}
