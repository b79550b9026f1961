// SPDX-License-Identifier: Apache-2.0
/* Comparing what a pull has received with the file that it is meant to equal. The tensors of both lie in mapped files;
 * the one that is compared with is guarded against being cut off meanwhile. */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "server/cli/interrupt.h"
#include "server/cli/pull.h"

/* Bytes compared between two looks for a signal. */
#define PIECE_BYTES (UINT64_C(64) << 20)

static int compare_names(const void *a, const void *b)
{
    const struct tl_named_tensor *left = a, *right = b;
    return strcmp(left->name, right->name);
}

/* The tensor of this name in a list that is sorted by name; NULL when there is none. */
static const struct tl_tensor *find(const struct tl_tensor_list *list, char *name)
{
    const struct tl_named_tensor wanted = {.name = name};
    const struct tl_named_tensor *found =
        list->count > 0 ? bsearch(&wanted, list->items, list->count, sizeof(wanted), compare_names) : NULL;
    return found ? found->tensor : NULL;
}

static enum tl_status compare_bytes(const struct tl_tensor *received, const struct tl_tensor *expected, const char *key,
                                    const char *path, struct tl_error *ret_error)
{
    const char *left = tl_tensor_data(received), *right = tl_tensor_data(expected);
    uint64_t size_bytes = tl_tensor_size_bytes(expected);
    for (uint64_t offset = 0; offset < size_bytes; offset += PIECE_BYTES) {
        uint64_t len = size_bytes - offset < PIECE_BYTES ? size_bytes - offset : PIECE_BYTES;
        if (tl_interrupt_is_set()) return tl_error_set(ret_error, TL_CANCELLED, "interrupted");
        bool is_equal = memcmp(left + offset, right + offset, len) == 0;
        /* Asked afterwards too: a file that was cut off reads as zeros. */
        enum tl_status status = tl_tensor_check_readable(expected, offset, len, ret_error);
        if (status != TL_OK) return status;
        if (!is_equal) return tl_error_set(ret_error, TL_DATA_LOSS, "tensor '%s' differs from that of %s", key, path);
    }
    return TL_OK;
}

static enum tl_status compare_item(const struct tl_pull *pull, const struct tl_pull_item *item,
                                   const struct tl_tensor_list *list, struct tl_error *ret_error)
{
    const struct tl_tensor *expected = find(list, item->listed->key);
    if (!expected)
        return tl_error_set(ret_error, TL_DATA_LOSS, "tensor '%s' was received but %s has none of this name",
                            item->listed->key, pull->compare_path);
    if (!tl_meta_data_is_equal(tl_tensor_meta_data(item->destination), tl_tensor_meta_data(expected)))
        return tl_error_set(ret_error, TL_DATA_LOSS, "tensor '%s' has another dtype or shape than that of %s",
                            item->listed->key, pull->compare_path);
    return compare_bytes(item->destination, expected, item->listed->key, pull->compare_path, ret_error);
}

enum tl_status tl_pull_compare(struct tl_pull *pull, struct tl_error *ret_error)
{
    int64_t start_ns = tl_clock_now_ns();
    struct tl_tensor_list list = {0};
    enum tl_status status = tl_tensor_file_read(pull->compare_path, &list, ret_error);
    if (status != TL_OK) return status;
    if (list.count > 0) qsort(list.items, list.count, sizeof(list.items[0]), compare_names);
    for (size_t i = 0; status == TL_OK && i < pull->listing.count; i++) {
        status = compare_item(pull, &pull->items[i], &list, ret_error);
        if (status == TL_OK) pull->compared_count++;
        if (status == TL_DATA_LOSS) pull->mismatched_count++;
    }
    tl_tensor_list_fini(&list);
    pull->compare_ns = tl_clock_now_ns() - start_ns;
    return status;
}
