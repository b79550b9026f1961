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

#include <tensorlane/tensor.h>

/* Takes one more reference; NULL is accepted. Thread: any. */
struct tl_annotations *tl_annotations_get(struct tl_annotations *annotations);

/* The pairs, sorted by key; NULL and 0 for NULL. They live as long as the annotations. */
const struct tl_annotation *tl_annotations_items(const struct tl_annotations *annotations, size_t *ret_count);

/* What they take in memory; 0 for NULL. */
uint64_t tl_annotations_bytes(const struct tl_annotations *annotations);

/* Orders by what they say: 0 when that is the same. Neither is NULL. */
int tl_annotations_compare(const struct tl_annotations *a, const struct tl_annotations *b);

#endif
