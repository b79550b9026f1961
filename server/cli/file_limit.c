// SPDX-License-Identifier: Apache-2.0
#include "server/cli/file_limit.h"

rlim_t tl_file_limit_raise(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return RLIM_INFINITY;
    limit.rlim_cur = limit.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &limit); /* a process may always do that */
    return limit.rlim_max;
}
