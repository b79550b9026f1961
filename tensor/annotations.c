// SPDX-License-Identifier: Apache-2.0
/* Annotations lie in one piece of memory: the object, its sorted pairs, their texts. */
#include "tensor/annotations.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "base/text.h"

struct tl_annotations {
    atomic_uint reference_count;
    size_t count;
    uint64_t size_bytes; /* size of this object */
    struct tl_annotation items[];
};

static int compare_keys(const void *a, const void *b)
{
    return strcmp(((const struct tl_annotation *)a)->key, ((const struct tl_annotation *)b)->key);
}

static enum tl_status check_items(const struct tl_annotation *items, size_t count, size_t *ret_text_bytes,
                                  struct tl_error *ret_error)
{
    size_t text_bytes = 0;
    if (count > TL_MAX_ANNOTATIONS)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%zu annotations (__metadata__); at most %d are possible",
                            count, TL_MAX_ANNOTATIONS);
    for (size_t i = 0; i < count; i++) {
        if (!items[i].key || !items[i].value)
            return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "annotation %zu (__metadata__) has no %s", i,
                                items[i].key ? "value" : "key");
        size_t key_bytes = strlen(items[i].key), value_bytes = strlen(items[i].value);
        if (!tl_text_is_utf8(items[i].key, key_bytes) || !tl_text_is_utf8(items[i].value, value_bytes))
            return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "annotation %zu (__metadata__) is not UTF-8", i);
        text_bytes += key_bytes + value_bytes;
    }
    if (text_bytes > TL_MAX_ANNOTATIONS_BYTES)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "annotations (__metadata__) of %zu bytes; at most %d are possible", text_bytes,
                            TL_MAX_ANNOTATIONS_BYTES);
    *ret_text_bytes = text_bytes;
    return TL_OK;
}

static const char *copy_text(const char *text, char **place)
{
    char *copy = *place;
    size_t size_bytes = strlen(text) + 1;
    memcpy(copy, text, size_bytes);
    *place += size_bytes;
    return copy;
}

enum tl_status tl_annotations_create(const struct tl_annotation *items, size_t count,
                                     struct tl_annotations **ret_annotations, struct tl_error *ret_error)
{
    size_t text_bytes;
    enum tl_status status = check_items(items, count, &text_bytes, ret_error);
    if (status != TL_OK) return status;
    if (count == 0) {
        *ret_annotations = NULL;
        return TL_OK;
    }
    size_t size_bytes = sizeof(struct tl_annotations) + count * (sizeof(*items) + 2) + text_bytes;
    struct tl_annotations *annotations = malloc(size_bytes);
    if (!annotations) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for annotations");
    atomic_init(&annotations->reference_count, 1);
    annotations->count = count;
    annotations->size_bytes = size_bytes;
    char *place = (char *)&annotations->items[count];
    for (size_t i = 0; i < count; i++) {
        annotations->items[i].key = copy_text(items[i].key, &place);
        annotations->items[i].value = copy_text(items[i].value, &place);
    }
    qsort(annotations->items, count, sizeof(*items), compare_keys);
    for (size_t i = 1; i < count; i++) {
        const char *key = annotations->items[i].key;
        if (strcmp(annotations->items[i - 1].key, key) != 0) continue;
        status = tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the annotation '%.64s' is there twice", key);
        free(annotations);
        return status;
    }
    *ret_annotations = annotations;
    return TL_OK;
}

struct tl_annotations *tl_annotations_get(struct tl_annotations *annotations)
{
    if (annotations) TL_CHECK(atomic_fetch_add_explicit(&annotations->reference_count, 1, memory_order_relaxed) > 0);
    return annotations;
}

void tl_annotations_put(struct tl_annotations *annotations)
{
    if (!annotations) return;
    unsigned before = atomic_fetch_sub_explicit(&annotations->reference_count, 1, memory_order_acq_rel);
    TL_CHECK(before > 0);
    if (before == 1) free(annotations);
}

const struct tl_annotation *tl_annotations_items(const struct tl_annotations *annotations, size_t *ret_count)
{
    *ret_count = annotations ? annotations->count : 0;
    return annotations ? annotations->items : NULL;
}

uint64_t tl_annotations_bytes(const struct tl_annotations *annotations)
{
    return annotations ? annotations->size_bytes : 0;
}

int tl_annotations_compare(const struct tl_annotations *a, const struct tl_annotations *b)
{
    if (a == b) return 0;
    if (a->count != b->count) return a->count < b->count ? -1 : 1;
    for (size_t i = 0; i < a->count; i++) {
        int order = strcmp(a->items[i].key, b->items[i].key);
        if (order == 0) order = strcmp(a->items[i].value, b->items[i].value);
        if (order != 0) return order;
    }
    return 0;
}
