// SPDX-License-Identifier: Apache-2.0
/*
 * The annotations of a pulled file: those of all its tensors together, which may come from several files.
 *
 * Where two files say different things under one key, neither is true of the new file, so that the key is left out with
 * a warning.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "server/cli/output.h"
#include "server/cli/published.h"
#include "server/cli/pull.h"

static int compare_pairs(const void *a, const void *b)
{
    const struct tl_annotation *left = a, *right = b;
    int order = strcmp(left->key, right->key);
    return order != 0 ? order : strcmp(left->value, right->value);
}

static void warn_of_conflict(struct tl_pull *pull, const char *key, const char *one, const char *other)
{
    if (pull->is_quiet) return;
    tl_progress_bar_end(&pull->bar);
    tl_output_error("pull",
                    "warning: the files that the tensors come from say '%.64s%s' and '%.64s%s' for '%.64s%s' in "
                    "__metadata__; it is left out",
                    one, strlen(one) > 64 ? "..." : "", other, strlen(other) > 64 ? "..." : "", key,
                    strlen(key) > 64 ? "..." : "");
}

/* Keeps one of each group of sorted pairs with the same key, none where the values differ; returns how many. */
static size_t merge(struct tl_pull *pull, struct tl_annotation *pairs, size_t count)
{
    size_t kept = 0, end;
    for (size_t begin = 0; begin < count; begin = end) {
        for (end = begin + 1; end < count && strcmp(pairs[end].key, pairs[begin].key) == 0;)
            end++;
        if (strcmp(pairs[begin].value, pairs[end - 1].value) == 0)
            pairs[kept++] = pairs[begin];
        else
            warn_of_conflict(pull, pairs[begin].key, pairs[begin].value, pairs[end - 1].value);
    }
    return kept;
}

/* All pairs of all maps, sorted; NULL: no memory. */
static struct tl_annotation *gather(const struct tl_annotations *const *maps, size_t map_count, size_t *ret_count)
{
    size_t total = 0, used = 0, count;
    for (size_t i = 0; i < map_count; i++) {
        (void)tl_annotations_items(maps[i], &count);
        total += count;
    }
    struct tl_annotation *pairs = calloc(total + 1, sizeof(*pairs));
    if (!pairs) return NULL;
    for (size_t i = 0; i < map_count; i++) {
        const struct tl_annotation *items = tl_annotations_items(maps[i], &count);
        memcpy(pairs + used, items, count * sizeof(*items));
        used += count;
    }
    qsort(pairs, total, sizeof(*pairs), compare_pairs);
    *ret_count = total;
    return pairs;
}

enum tl_status tl_pull_merge_annotations(struct tl_pull *pull, struct tl_error *ret_error)
{
    const struct tl_annotations **maps;
    size_t map_count, count;
    enum tl_status status = tl_published_annotations(&pull->listing, &maps, &map_count, ret_error);
    if (status != TL_OK) return status;
    struct tl_annotation *pairs = gather(maps, map_count, &count);
    free(maps);
    if (!pairs) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for annotations");
    struct tl_error error;
    status = tl_annotations_create(pairs, merge(pull, pairs, count), &pull->annotations, &error);
    free(pairs);
    if (status == TL_OK) return TL_OK;
    if (status != TL_INVALID_ARGUMENT) return tl_error_copy(ret_error, &error);
    if (!pull->is_quiet) {
        tl_progress_bar_end(&pull->bar);
        tl_output_error("pull", "warning: %s; the output has none", error.message);
    }
    return TL_OK;
}
