// SPDX-License-Identifier: Apache-2.0
#include "base/file_size.h"

#include <errno.h>
#include <sys/resource.h>

bool tl_file_size_is_allowed(uint64_t len_bytes)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || len_bytes <= limit.rlim_cur)
        return true;
    errno = EFBIG;
    return false;
}
