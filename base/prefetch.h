// SPDX-License-Identifier: Apache-2.0
/* Brings memory into the processor's caches before it is used. */
#ifndef BASE_PREFETCH_H
#define BASE_PREFETCH_H

#include <stddef.h>

#define TL_CACHE_LINE_BYTES 64

/* Changes nothing, whatever the address. */
static inline void tl_prefetch(const void *address, size_t len_bytes)
{
    const char *bytes = (const char *)address;
    for (size_t at = 0; at < len_bytes; at += TL_CACHE_LINE_BYTES)
        __builtin_prefetch(bytes + at);
}

#endif
