// SPDX-License-Identifier: Apache-2.0
/* Copying bytes that nobody reads soon. */
#ifndef BASE_COPY_H
#define BASE_COPY_H

#include <stddef.h>

/* As memcpy, but past the processor's caches where it can: the destination is not read into them first, and does not
 * push out what is in them, such as the pieces that are about to be copied. Faster for what is part of something larger
 * than the caches, slower for anything else. Whoever is told of the copy afterwards, also in another thread, sees it.
 */
void tl_copy_uncached(void *to, const void *from, size_t len_bytes);

#endif
