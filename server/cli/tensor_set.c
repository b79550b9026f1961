// SPDX-License-Identifier: Apache-2.0
/* The tensors of several files. Two of one name would silently replace each other on the worker, so that is an error.
 */
#include "server/cli/tensor_set.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tensorlane/worker.h>

#include "base/error.h"
#include "base/text.h"
#include "server/cli/file_limit.h"

static enum tl_status add_item(struct tl_tensor_set *set, const char *path, const char *prefix,
                               const struct tl_named_tensor *named, struct tl_error *ret_error)
{
    size_t len = strlen(prefix) + strlen(named->name);
    char *key = malloc(len + 1);
    if (!key) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: no memory for its names", path);
    snprintf(key, len + 1, "%s%s", prefix, named->name);
    if (len == 0 || len > TL_MAX_KEY_BYTES || !tl_text_is_utf8(key, len)) {
        tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                     "%s: tensor '%.64s%s': its key of %zu bytes is not 1 to %d bytes of UTF-8; rename it", path, key,
                     len > 64 ? "..." : "", len, TL_MAX_KEY_BYTES);
        free(key);
        return TL_INVALID_ARGUMENT;
    }
    set->items[set->count++] = (struct tl_set_item){.key = key, .tensor = tl_tensor_get(named->tensor), .path = path};
    return TL_OK;
}

static enum tl_status add_file(struct tl_tensor_set *set, const char *path, const char *prefix,
                               struct tl_error *ret_error)
{
    struct tl_tensor_list list = {0};
    enum tl_status status = tl_tensor_file_read(path, &list, ret_error);
    if (status != TL_OK) return status;
    struct tl_set_item *items = reallocarray(set->items, set->count + list.count + 1, sizeof(*items));
    if (items) {
        set->items = items;
    } else {
        status = tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: no memory for its names", path);
    }
    for (size_t i = 0; status == TL_OK && i < list.count; i++)
        status = add_item(set, path, prefix, &list.items[i], ret_error);
    tl_tensor_list_fini(&list);
    return status;
}

static int compare_keys(const void *a, const void *b)
{
    const struct tl_set_item *const *left = a, *const *right = b;
    return strcmp((*left)->key, (*right)->key);
}

static enum tl_status check_unique(const struct tl_tensor_set *set, struct tl_error *ret_error)
{
    enum tl_status status = TL_OK;
    const struct tl_set_item **sorted = calloc(set->count + 1, sizeof(const struct tl_set_item *));
    if (!sorted) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for %zu names", set->count);
    for (size_t i = 0; i < set->count; i++)
        sorted[i] = &set->items[i];
    qsort(sorted, set->count, sizeof(*sorted), compare_keys);
    for (size_t i = 1; status == TL_OK && i < set->count; i++) {
        if (strcmp(sorted[i - 1]->key, sorted[i]->key) != 0) continue;
        status = tl_error_set(ret_error, TL_ALREADY_EXISTS,
                              "tensor '%s' is in %s and in %s; publish one of them, or give it another name",
                              sorted[i]->key, sorted[i - 1]->path, sorted[i]->path);
    }
    free(sorted);
    return status;
}

enum tl_status tl_tensor_set_read(struct tl_tensor_set *set, const char *const *paths, size_t path_count,
                                  const char *prefix, struct tl_error *ret_error)
{
    (void)tl_file_limit_raise();
    for (size_t i = 0; i < path_count; i++) {
        enum tl_status status = add_file(set, paths[i], prefix, ret_error);
        if (status != TL_OK) return status;
    }
    return check_unique(set, ret_error);
}

void tl_tensor_set_fini(struct tl_tensor_set *set)
{
    for (size_t i = 0; i < set->count; i++) {
        free(set->items[i].key);
        tl_tensor_put(set->items[i].tensor);
    }
    free(set->items);
    *set = (struct tl_tensor_set){0};
}

uint64_t tl_tensor_set_bytes(const struct tl_tensor_set *set)
{
    uint64_t total = 0;
    for (size_t i = 0; i < set->count; i++)
        total += tl_tensor_size_bytes(set->items[i].tensor);
    return total;
}
