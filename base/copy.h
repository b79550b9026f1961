// SPDX-License-Identifier: Apache-2.0
/* Copying bytes that will not be read soon. */
#ifndef BASE_COPY_H
#define BASE_COPY_H

#include <stddef.h>

/* Copies like memcpy, but past the processor's caches where it can: the destination is not read into the caches first,
 * and does not displace their contents, such as the pieces that are copied next. It is faster for a piece of something
 * larger than the caches, and slower for anything else. A thread that is notified after the copy sees the bytes. */
void tl_copy_uncached(void *to, const void *from, size_t len_bytes);

#endif
