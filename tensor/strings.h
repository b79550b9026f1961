// SPDX-License-Identifier: Apache-2.0
/*
 * The serialized form of string tensors: for each element a little-endian 64-bit length, then the bytes of all elements
 * in order. Pure functions on bytes, and an index that makes looking up one of many strings cheap.
 */
#ifndef TENSOR_STRINGS_H
#define TENSOR_STRINGS_H

#include <stdbool.h>
#include <stdint.h>

#include <tensorlane/status.h>
#include <tensorlane/tensor.h>

/* Bytes that the strings take serialized.
 * Errors: TL_INVALID_ARGUMENT: a string with bytes and no data. TL_OUT_OF_RANGE: more than 2^63-1 bytes. */
enum tl_status tl_strings_size_bytes(const struct tl_string *strings, uint64_t count, uint64_t *ret_size_bytes,
                                     struct tl_error *ret_error) TL_MUST_USE;

/* Writes the serialized form, as many bytes as tl_strings_size_bytes said. */
void tl_strings_serialize(const struct tl_string *strings, uint64_t count, void *ret_bytes);

struct tl_string_index;

/* An index for count strings, empty: every look-up in it fails until tl_string_index_build. count * 8 must fit.
 * Errors: NULL: no memory. */
struct tl_string_index *tl_string_index_create(uint64_t count) TL_MUST_USE;
void tl_string_index_destroy(struct tl_string_index *index); /* NULL is accepted */

/* Checks the serialized form and fills the index.
 * Errors: TL_DATA_LOSS: the lengths do not add up to the bytes; the index is empty. */
enum tl_status tl_string_index_build(struct tl_string_index *index, const void *bytes, uint64_t len_bytes,
                                     struct tl_error *ret_error) TL_MUST_USE;

/* Looks up string number i, which must be below the count. The lengths are checked again: the bytes may be a mapping
 * that another process changes. Errors: TL_DATA_LOSS: the index is empty, or the string does not lie within the bytes.
 */
enum tl_status tl_string_index_find(const struct tl_string_index *index, const void *bytes, uint64_t len_bytes,
                                    uint64_t i, struct tl_string *ret_string, struct tl_error *ret_error) TL_MUST_USE;

#endif
