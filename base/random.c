// SPDX-License-Identifier: Apache-2.0
/* Random numbers from the kernel's generator. Blocks only until the kernel has seeded it once after boot. */
#include "base/random.h"

#include <errno.h>
#include <sys/random.h>

#include "base/check.h"

uint64_t tl_random_u64(void)
{
    uint64_t number = 0;
    while (number == 0) {
        ssize_t len = getrandom(&number, sizeof(number), 0);
        if (len == (ssize_t)sizeof(number)) continue;
        /* Requests of at most 256 bytes are never short; only a signal before the first seeding interrupts them. */
        TL_CHECK(len < 0 && errno == EINTR);
        number = 0;
    }
    return number;
}
