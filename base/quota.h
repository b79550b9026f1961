// SPDX-License-Identifier: Apache-2.0
/*
 * How much the owner of an event loop handles before it looks at others: at most TL_QUOTA members of whatever there are
 * many of, such as messages of a peer, operations of a group or closures. What is left over waits until others had
 * their turn. The greatest number that was ever handled shows whether that is so.
 *
 * Thread: the owner's, unless a function says otherwise.
 */
#ifndef BASE_QUOTA_H
#define BASE_QUOTA_H

#include <stdatomic.h>
#include <stdint.h>

#define TL_QUOTA 512

/* So many bytes that are copied count as one member. */
#define TL_MEMBER_COPY_BYTES (64 * 1024)

struct tl_quota {
    uint32_t used;         /* members that were handled since others had their turn */
    _Atomic uint32_t most; /* the greatest value of `used` so far */
};

static inline uint32_t tl_quota_left(const struct tl_quota *quota)
{
    return quota->used < TL_QUOTA ? TL_QUOTA - quota->used : 0;
}

/* So many members were handled, or are about to be. */
static inline void tl_quota_use(struct tl_quota *quota, uint32_t count)
{
    quota->used += count;
    if (quota->used > atomic_load_explicit(&quota->most, memory_order_relaxed))
        atomic_store_explicit(&quota->most, quota->used, memory_order_relaxed);
}

/* So many bytes were copied, or are about to be. They count as members, but as no more than are left. */
static inline void tl_quota_use_copy(struct tl_quota *quota, uint64_t len_bytes)
{
    uint64_t count = len_bytes / TL_MEMBER_COPY_BYTES, left = tl_quota_left(quota);
    tl_quota_use(quota, (uint32_t)(count < left ? count : left));
}

/* Others have their turn now. */
static inline void tl_quota_renew(struct tl_quota *quota)
{
    quota->used = 0;
}

/* Thread: any. */
static inline uint32_t tl_quota_most(const struct tl_quota *quota)
{
    return atomic_load_explicit(&quota->most, memory_order_relaxed);
}

#endif
