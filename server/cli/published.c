// SPDX-License-Identifier: Apache-2.0
/* Patterns over a listing. A pattern that matches nothing is a mistake, and the error shows what was perhaps meant. */
#include "server/cli/published.h"

#include <stdlib.h>

#include "base/error.h"
#include "base/text.h"

enum tl_status tl_published_not_found(const struct tl_listing *listing, const char *pattern, struct tl_error *ret_error)
{
    const char **keys = listing->count > 0 ? calloc(listing->count, sizeof(*keys)) : NULL;
    for (size_t i = 0; keys && i < listing->count; i++)
        keys[i] = listing->items[i].key;
    const char *nearest = keys ? tl_text_nearest(pattern, keys, listing->count) : NULL;
    free(keys);
    if (listing->count == 0)
        return tl_error_set(ret_error, TL_NOT_FOUND, "nothing published matches '%s': nothing is published at all",
                            pattern);
    if (nearest)
        return tl_error_set(ret_error, TL_NOT_FOUND, "nothing published matches '%s'; the nearest is '%s'", pattern,
                            nearest);
    return tl_error_set(ret_error, TL_NOT_FOUND, "nothing published matches '%s'; there are %zu tensors, such as '%s'",
                        pattern, listing->count, listing->items[0].key);
}

static bool matches_any(const char *key, const char *const *patterns, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (tl_text_glob_match(patterns[i], key)) return true;
    return false;
}

static bool is_matched(const struct tl_listing *listing, const char *pattern)
{
    for (size_t i = 0; i < listing->count; i++)
        if (tl_text_glob_match(pattern, listing->items[i].key)) return true;
    return false;
}

enum tl_status tl_published_select(struct tl_listing *listing, const char *const *patterns, size_t pattern_count,
                                   const char *const *excluded, size_t excluded_count, size_t *ret_unmatched,
                                   struct tl_error *ret_error)
{
    size_t kept = 0;
    enum tl_status status = TL_OK;
    size_t unmatched = 0;
    for (size_t i = 0; i < pattern_count; i++) {
        if (is_matched(listing, patterns[i])) continue;
        if (status == TL_OK) status = tl_published_not_found(listing, patterns[i], ret_error);
        unmatched++;
    }
    if (ret_unmatched) *ret_unmatched = unmatched;
    if (status != TL_OK) return status;
    for (size_t i = 0; i < listing->count; i++) {
        char *key = listing->items[i].key;
        bool is_wanted = pattern_count == 0 || matches_any(key, patterns, pattern_count);
        if (is_wanted && !matches_any(key, excluded, excluded_count)) {
            listing->items[kept++] = listing->items[i];
        } else {
            free(key);
        }
    }
    listing->count = kept;
    return TL_OK;
}
