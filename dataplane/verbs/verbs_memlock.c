// SPDX-License-Identifier: Apache-2.0
/*
 * The limit of locked memory: registered memory is pinned and counts against RLIMIT_MEMLOCK, unless the process has
 * CAP_IPC_LOCK. A limit of 64 KiB, which many systems start with, is the most common reason why RDMA does not work, so
 * it is looked at before anything is opened, and named when a registration fails.
 */
#include "dataplane/verbs/verbs_internal.h"

#include <inttypes.h>
#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/error.h"
#include "base/text.h"

static bool may_lock_anything(void)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3] = {{0}};
    return syscall(SYS_capget, &header, data) == 0 && (data[0].effective >> CAP_IPC_LOCK & 1) != 0;
}

enum tl_status verbs_memlock_error(uint64_t len_bytes, const char *what, struct tl_error *ret_error)
{
    char need[32], limit_text[32];
    struct rlimit limit = {0};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                        "%s needs %s of locked memory, the limit is %s; raise it: ulimit -l unlimited in the shell, "
                        "LimitMEMLOCK=infinity in the systemd unit, --ulimit memlock=-1 for the container",
                        what, tl_text_format_size(len_bytes, need, sizeof(need)),
                        tl_text_format_size(limit.rlim_cur, limit_text, sizeof(limit_text)));
}

bool verbs_exceeds_memlock(uint64_t len_bytes)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return false;
    return len_bytes > limit.rlim_cur && !may_lock_anything();
}

enum tl_status tl_verbs_check_memlock(const struct tl_verbs_options *options, struct tl_error *ret_error)
{
    uint64_t len_bytes = verbs_slots_default_bytes(options->queue_depth) + options->pool_bytes;
    return verbs_exceeds_memlock(len_bytes) ? verbs_memlock_error(len_bytes, "the data plane", ret_error) : TL_OK;
}
