// SPDX-License-Identifier: Apache-2.0
/* Listings, as a program reads them. */
#include <stdlib.h>

#include "base/error.h"
#include "base/struct_version.h"
#include "control/client.h"
#include "tensor/annotations.h"

#include <tensorlane/worker.h>

_Static_assert(sizeof(struct tl_listing_entry) == TL_LISTING_ENTRY_FIRST_BYTES, "its first version");

size_t tl_listing_count(const struct tl_listing *listing)
{
    return listing->count;
}

enum tl_status tl_listing_entry(const struct tl_listing *listing, size_t place, struct tl_listing_entry *ret_entry,
                                struct tl_error *ret_error)
{
    enum tl_status status =
        tl_struct_check_size(ret_entry, TL_LISTING_ENTRY_FIRST_BYTES, "tl_listing_entry", ret_error);
    if (status != TL_OK) return status;
    if (place >= listing->count)
        return tl_error_set(ret_error, TL_OUT_OF_RANGE, "place %zu in a listing of %zu", place, listing->count);
    const struct tl_listed *item = &listing->items[place];
    struct tl_listing_entry entry = {.size_bytes = sizeof(entry),
                                     .key = item->key,
                                     .step = item->step,
                                     .dtype = item->meta_data.dtype,
                                     .rank = item->meta_data.shape.rank,
                                     .dims = item->meta_data.shape.dims,
                                     .tensor_bytes = item->meta_data.size_bytes,
                                     .is_dead = item->meta_data.is_dead};
    entry.annotations = tl_annotations_items(item->annotations, &entry.annotation_count);
    tl_struct_fill(ret_entry, &entry, sizeof(entry));
    return TL_OK;
}

void tl_listing_destroy(struct tl_listing *listing)
{
    if (listing == NULL) return;
    tl_listing_fini(listing);
    free(listing);
}
