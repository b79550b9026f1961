// SPDX-License-Identifier: Apache-2.0
/*
 * What holds over every provider, stated once: messages arrive whole and in order, posts are done in the order of
 * posting, callbacks may post, writes bring their bytes to where they belong and nowhere else. The test of a provider
 * says how its sides are made, and adds these cases to its own.
 */
#ifndef FAKES_PROVIDER_CASES_H
#define FAKES_PROVIDER_CASES_H

#include "fakes/sides.h"

struct provider_memory {
    uint8_t *source;                 /* The memory of a, filled with fill_bytes(.., 1). */
    uint8_t *target;                 /* The memory of b, zeroed; a may write to what b exposes of it. */
    struct tl_region *source_region; /* NULL: none is needed. */
    struct tl_region *target_region;
};

struct provider_kind {
    bool has_windows; /* Otherwise a pair has keys of regions. */
    bool has_queue;   /* What is posted beyond the peer's slots waits; otherwise no test may do that. */
    /* Opens a and b, connected, each with so many slots and posts at a time; nothing has arrived. */
    void (*set_up)(uint32_t slots, uint32_t work, enum tl_keys keys);
    void (*make_memory)(uint64_t len_bytes, struct provider_memory *ret_memory); /* The sides exist until tear_down. */
    void (*tear_down)(void);
};

/* check forks each test, so the kind holds for the whole program. */
void provider_cases_add(TCase *tcase, const struct provider_kind *kind);

#endif
