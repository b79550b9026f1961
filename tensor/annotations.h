// SPDX-License-Identifier: Apache-2.0
/*
 * Annotations: the texts that a safetensors file keeps under `__metadata__`, such as {"format": "pt"}.
 *
 * All tensors of a file refer to one map, which never changes and is freed with its last reference. Lists and pushes
 * carry it, so that a copy of the file has it again.
 */
#ifndef TENSOR_ANNOTATIONS_H
#define TENSOR_ANNOTATIONS_H

#include <stddef.h>
#include <stdint.h>

#include <tensorlane/status.h>

#define TL_MAX_ANNOTATIONS 1024
/* The size of all keys and values together. */
#define TL_MAX_ANNOTATIONS_BYTES (64 * 1024)

struct tl_annotation {
    const char *key;
    const char *value;
};

struct tl_annotations;

/* Copies the pairs, in any order; *ret_annotations has one reference, or is NULL when count is 0. The caller has
 * checked that the texts are UTF-8. Errors: TL_INVALID_ARGUMENT: more than TL_MAX_ANNOTATIONS pairs or
 * TL_MAX_ANNOTATIONS_BYTES bytes, or a key twice. TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_annotations_create(const struct tl_annotation *items, size_t count,
                                     struct tl_annotations **ret_annotations, struct tl_error *ret_error) TL_MUST_USE;

/* References; NULL is accepted by both. Thread: any. */
struct tl_annotations *tl_annotations_get(struct tl_annotations *annotations);
void tl_annotations_put(struct tl_annotations *annotations);

/* The pairs, sorted by key; NULL and 0 for NULL. They live as long as the annotations. */
const struct tl_annotation *tl_annotations_items(const struct tl_annotations *annotations, size_t *ret_count);

/* What they take in memory; 0 for NULL. */
uint64_t tl_annotations_bytes(const struct tl_annotations *annotations);

/* Orders by what they say: 0 when that is the same. Neither is NULL. */
int tl_annotations_compare(const struct tl_annotations *a, const struct tl_annotations *b);

#endif
