// SPDX-License-Identifier: Apache-2.0
/* Patterns over a listing. A pattern that matches nothing is a mistake, and the error shows what was perhaps meant. */
#include "server/cli/published.h"

#include <stdlib.h>

#include "base/check.h"
#include "base/error.h"
#include "base/glob.h"
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

/* Patterns as they are compared with keys. */
struct globs {
    struct tl_glob **items; /* [count] */
    size_t count;
};

static void globs_fini(struct globs *globs)
{
    for (size_t i = 0; i < globs->count; i++)
        tl_glob_destroy(globs->items[i]);
    free(globs->items);
}

static enum tl_status globs_init(struct globs *globs, const char *const *patterns, size_t count,
                                 struct tl_error *ret_error)
{
    *globs = (struct globs){.items = calloc(count + 1, sizeof(struct tl_glob *))};
    while (globs->items != NULL && globs->count < count) {
        struct tl_glob *glob = tl_glob_create(patterns[globs->count]);
        if (glob == NULL) break;
        globs->items[globs->count++] = glob;
    }
    if (globs->items != NULL && globs->count == count) return TL_OK;
    globs_fini(globs);
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for %zu patterns", count);
}

static bool matches_any(const char *key, const struct globs *globs)
{
    for (size_t i = 0; i < globs->count; i++)
        if (tl_glob_is_match(globs->items[i], key)) return true;
    return false;
}

static bool is_matched(const struct tl_listing *listing, const struct tl_glob *glob)
{
    for (size_t i = 0; i < listing->count; i++)
        if (tl_glob_is_match(glob, listing->items[i].key)) return true;
    return false;
}

/* Counts the patterns that match nothing; the error is that of the first one. */
static enum tl_status check_matched(const struct tl_listing *listing, const char *const *patterns,
                                    const struct globs *globs, size_t *ret_unmatched, struct tl_error *ret_error)
{
    enum tl_status status = TL_OK;
    size_t unmatched = 0;
    for (size_t i = 0; i < globs->count; i++) {
        if (is_matched(listing, globs->items[i])) continue;
        if (status == TL_OK) status = tl_published_not_found(listing, patterns[i], ret_error);
        unmatched++;
    }
    if (ret_unmatched) *ret_unmatched = unmatched;
    return status;
}

/* Leaves what is wanted in the listing. */
static void keep(struct tl_listing *listing, const struct globs *wanted, const struct globs *excluded)
{
    size_t kept = 0;
    for (size_t i = 0; i < listing->count; i++) {
        char *key = listing->items[i].key;
        if ((wanted->count == 0 || matches_any(key, wanted)) && !matches_any(key, excluded)) {
            listing->items[kept++] = listing->items[i];
        } else {
            free(key);
            tl_annotations_put(listing->items[i].annotations);
        }
    }
    listing->count = kept;
}

enum tl_status tl_published_select(struct tl_listing *listing, const char *const *patterns, size_t pattern_count,
                                   const char *const *excluded, size_t excluded_count, size_t *ret_unmatched,
                                   struct tl_error *ret_error)
{
    struct globs wanted, unwanted;
    enum tl_status status = globs_init(&wanted, patterns, pattern_count, ret_error);
    if (status != TL_OK) return status;
    status = globs_init(&unwanted, excluded, excluded_count, ret_error);
    if (status == TL_OK) {
        status = check_matched(listing, patterns, &wanted, ret_unmatched, ret_error);
        if (status == TL_OK) keep(listing, &wanted, &unwanted);
        globs_fini(&unwanted);
    }
    globs_fini(&wanted);
    return status;
}

static int compare_maps(const void *a, const void *b)
{
    return tl_annotations_compare(*(const struct tl_annotations *const *)a, *(const struct tl_annotations *const *)b);
}

enum tl_status tl_published_annotations(const struct tl_listing *listing, const struct tl_annotations ***ret_maps,
                                        size_t *ret_count, struct tl_error *ret_error)
{
    size_t count = 0, kept = 0;
    const struct tl_annotations **maps = calloc(listing->count + 1, sizeof(const struct tl_annotations *));
    if (!maps)
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a list of %zu tensors", listing->count);
    for (size_t i = 0; i < listing->count; i++) {
        const struct tl_annotations *map = listing->items[i].annotations;
        if (map && (count == 0 || maps[count - 1] != map)) maps[count++] = map;
    }
    qsort(maps, count, sizeof(*maps), compare_maps);
    for (size_t i = 0; i < count; i++)
        if (kept == 0 || tl_annotations_compare(maps[kept - 1], maps[i]) != 0) maps[kept++] = maps[i];
    *ret_maps = maps;
    *ret_count = kept;
    return TL_OK;
}

size_t tl_published_find_annotations(const struct tl_annotations *const *maps, size_t count,
                                     const struct tl_annotations *annotations)
{
    const struct tl_annotations *const *found = bsearch(&annotations, maps, count, sizeof(*maps), compare_maps);
    TL_CHECK(found);
    return (size_t)(found - maps);
}
