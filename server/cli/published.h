// SPDX-License-Identifier: Apache-2.0
/* Choosing among what a worker publishes, by patterns. */
#ifndef SERVER_CLI_PUBLISHED_H
#define SERVER_CLI_PUBLISHED_H

#include <stdbool.h>
#include <stddef.h>

#include "tensor/transfer.h"

/* Keeps the items that match at least one of the patterns (none given: all) and none of the excluded ones; frees the
 * others.
 * *ret_unmatched: how many patterns match nothing; may be NULL.
 * Errors: TL_NOT_FOUND: a pattern that matches nothing, naming the nearest key; where nothing is published, saying so.
 * The listing is as before. */
enum tl_status tl_published_select(struct tl_listing *listing, const char *const *patterns, size_t pattern_count,
                                   const char *const *excluded, size_t excluded_count, size_t *ret_unmatched,
                                   struct tl_error *ret_error) TL_MUST_USE;

/* Says that the pattern matches nothing of the listing, naming the nearest key; returns TL_NOT_FOUND. */
enum tl_status tl_published_not_found(const struct tl_listing *listing, const char *pattern,
                                      struct tl_error *ret_error);

/* The annotations of what is listed, each once: *ret_maps has *ret_count of them, in an order for bsearch. They live as
 * long as the listing. Ownership of *ret_maps: free. Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_published_annotations(const struct tl_listing *listing, const struct tl_annotations ***ret_maps,
                                        size_t *ret_count, struct tl_error *ret_error) TL_MUST_USE;
/* Which of them these are; they must be among them. */
size_t tl_published_find_annotations(const struct tl_annotations *const *maps, size_t count,
                                     const struct tl_annotations *annotations);

#endif
