// SPDX-License-Identifier: Apache-2.0
/*
 * A listing whose entries are taken in the order of their keys, without sorting all of them in one go: a binary heap.
 *
 * The entries that were not taken come first in `items`, the smallest at the front; those that were taken follow, and
 * stay where they are until the listing goes.
 */
#ifndef CONTROL_LISTING_H
#define CONTROL_LISTING_H

#include "tensor/transfer.h"

/* Puts the last of the listing's items, which was just appended, into its place. */
void tl_listing_sift(struct tl_listing *listing);
/* Takes the smallest of the first left_count items (not 0), which is items[0] before; it stays valid as long as the
 * listing. */
const struct tl_listed *tl_listing_take(struct tl_listing *listing, size_t left_count);

/* Frees the last item's key and annotations, and forgets it. */
void tl_listing_drop_last(struct tl_listing *listing);

#endif
