// SPDX-License-Identifier: Apache-2.0
#include "control/listing.h"

#include <stdlib.h>
#include <string.h>

#include "control/client.h"

static bool is_before(const struct tl_listing *listing, size_t i, size_t j)
{
    return strcmp(listing->items[i].key, listing->items[j].key) < 0;
}

static void swap(struct tl_listing *listing, size_t i, size_t j)
{
    struct tl_listed item = listing->items[i];
    listing->items[i] = listing->items[j];
    listing->items[j] = item;
}

void tl_listing_sift(struct tl_listing *listing)
{
    for (size_t i = listing->count - 1; i > 0 && is_before(listing, i, (i - 1) / 2); i = (i - 1) / 2)
        swap(listing, i, (i - 1) / 2);
}

const struct tl_listed *tl_listing_take(struct tl_listing *listing, size_t left_count)
{
    size_t last = left_count - 1, i = 0;
    swap(listing, 0, last);
    for (size_t child = 1; child < last; child = 2 * i + 1) {
        if (child + 1 < last && is_before(listing, child + 1, child)) child++;
        if (!is_before(listing, child, i)) break;
        swap(listing, i, child);
        i = child;
    }
    return &listing->items[last];
}

void tl_listing_drop_last(struct tl_listing *listing)
{
    struct tl_listed *item = &listing->items[--listing->count];
    free(item->key);
    tl_annotations_put(item->annotations);
}

void tl_listing_fini(struct tl_listing *listing)
{
    while (listing->count > 0)
        tl_listing_drop_last(listing);
    free(listing->items);
    memset(listing, 0, sizeof(*listing));
}
