// SPDX-License-Identifier: Apache-2.0
/* Objects of one size that are used again instead of being freed, because they come and go by the thousand. */
#ifndef BASE_SPARES_H
#define BASE_SPARES_H

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/sanitizer.h"

/* So many objects are kept. Under AddressSanitizer one at most, because it does not see the use of one that is kept. */
#ifdef TL_HAS_ADDRESS_SANITIZER
#define TL_MAX_SPARES 1
#else
#define TL_MAX_SPARES 16384
#endif

/* Zeroed memory keeps none. */
struct tl_spares {
    void **first; /* each points to the next one */
    size_t count;
};

/* Returns zeroed memory, which may also be freed with free; NULL: there is none. All objects have the same size, at
 * least that of a pointer. */
static inline void *tl_spares_get(struct tl_spares *spares, size_t object_bytes)
{
    void **object = spares->first;
    if (object == NULL) return calloc(1, object_bytes);
    spares->first = *object;
    spares->count--;
    return memset(object, 0, object_bytes);
}

static inline void tl_spares_put(struct tl_spares *spares, void *memory)
{
    void **object = memory;
    if (spares->count >= TL_MAX_SPARES) {
        free(memory);
        return;
    }
    *object = spares->first;
    spares->first = object;
    spares->count++;
}

static inline void tl_spares_fini(struct tl_spares *spares)
{
    while (spares->first != NULL) {
        void **object = spares->first;
        spares->first = *object;
        free(object);
    }
    spares->count = 0;
}

#endif
