// SPDX-License-Identifier: Apache-2.0
/* What a rendezvous table has published, listed or withdrawn by pattern: whole walks, which workers make in steps. */
#ifndef FAKES_TABLE_LIST_H
#define FAKES_TABLE_LIST_H

#include <stdlib.h>
#include <string.h>

#include "base/glob.h"
#include "server/rendezvous/rendezvous.h"
#include "tensor/annotations.h"

static inline void table_listing_fini(struct tl_listing *listing)
{
    for (size_t i = 0; i < listing->count; i++)
        free(listing->items[i].key);
    free(listing->items);
    *listing = (struct tl_listing){.items = NULL};
}

static inline int table_compare(const void *a, const void *b)
{
    return strcmp(((const struct tl_listed *)a)->key, ((const struct tl_listed *)b)->key);
}

/* Returns the entries sorted by key; pattern NULL or "": all. */
static inline enum tl_status table_list(struct tl_rendezvous *from, const char *pattern, struct tl_listing *ret_listing,
                                        struct tl_error *ret_error)
{
    struct tl_table_walk walk;
    struct tl_table_entry entry;
    struct tl_listing listing = {.items = NULL};
    enum tl_status status = tl_rendezvous_walk_begin(from, &walk, ret_error);
    if (status != TL_OK) return status;
    struct tl_glob *glob = tl_glob_create(pattern != NULL && *pattern != '\0' ? pattern : "*");
    while (tl_rendezvous_walk_next(from, &walk, &entry, 1) > 0) {
        tl_annotations_put(entry.annotations);
        if (!tl_glob_is_match(glob, entry.key)) continue;
        listing.items = realloc(listing.items, (listing.count + 1) * sizeof(*listing.items));
        listing.items[listing.count++] = (struct tl_listed){.key = strdup(entry.key),
                                                            .step = entry.step,
                                                            .publication = entry.publication,
                                                            .meta_data = entry.meta_data};
    }
    tl_glob_destroy(glob);
    tl_rendezvous_walk_end(from, &walk);
    if (listing.count > 1) qsort(listing.items, listing.count, sizeof(*listing.items), table_compare);
    *ret_listing = listing;
    return TL_OK;
}

static inline size_t table_withdraw_matching(struct tl_rendezvous *from, const char *pattern)
{
    struct tl_table_walk walk;
    struct tl_table_entry entry;
    size_t count = 0;
    if (tl_rendezvous_walk_begin(from, &walk, NULL) != TL_OK) return 0;
    struct tl_glob *glob = tl_glob_create(pattern);
    while (tl_rendezvous_walk_next(from, &walk, &entry, 1) > 0) {
        tl_annotations_put(entry.annotations);
        if (!tl_glob_is_match(glob, entry.key)) continue;
        if (tl_rendezvous_withdraw_number(from, entry.key, entry.publication)) count++;
    }
    tl_glob_destroy(glob);
    tl_rendezvous_walk_end(from, &walk);
    return count;
}

#endif
