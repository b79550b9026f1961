// SPDX-License-Identifier: Apache-2.0
/* Shapes and meta-data: what a receiver must know of a tensor before its bytes can be placed. */
#ifndef TENSOR_META_DATA_H
#define TENSOR_META_DATA_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include <tensorlane/status.h>
#include <tensorlane/tensor.h>

#define TL_USUAL_RANK 4

struct tl_shape {
    unsigned rank; /* 0..TL_MAX_RANK */
    uint64_t dims[TL_MAX_RANK];
};

struct tl_meta_data {
    enum tl_dtype dtype; /* TL_DTYPE_INVALID for a dead tensor */
    struct tl_shape shape;
    bool is_dead;
    uint64_t size_bytes; /* size of the elements; of the serialized form for TL_STRING */
};

/* Number of elements, 1 for rank 0.
 * Errors: TL_INVALID_ARGUMENT: rank out of range. TL_OUT_OF_RANGE: more than 2^63-1. */
enum tl_status tl_shape_element_count(const struct tl_shape *shape, uint64_t *ret_count,
                                      struct tl_error *ret_error) TL_MUST_USE;

/* Bytes of the elements of a dtype other than TL_STRING, the last byte of a packed type padded.
 * Errors: TL_INVALID_ARGUMENT: not such a dtype, or rank out of range. TL_OUT_OF_RANGE: more than 2^63-1. */
enum tl_status tl_shape_size_bytes(enum tl_dtype dtype, const struct tl_shape *shape, uint64_t *ret_size_bytes,
                                   struct tl_error *ret_error) TL_MUST_USE;

bool tl_shape_is_equal(const struct tl_shape *a, const struct tl_shape *b);

/* Writes "[64, 3, 3, 3]"; returns buffer. capacity of TL_SHAPE_TEXT_BYTES always suffices. */
#define TL_SHAPE_TEXT_BYTES (TL_MAX_RANK * 22 + 3)
char *tl_shape_format(const struct tl_shape *shape, char *buffer, size_t capacity);

/* Checks meta-data that came from outside: a known dtype (none for dead), rank in range (0 for dead), size_bytes what
 * dtype and shape say (any size that can hold the length table for TL_STRING, 0 for dead).
 * Errors: TL_INVALID_ARGUMENT: it does not. TL_OUT_OF_RANGE: does not fit. */
enum tl_status tl_meta_data_validate(const struct tl_meta_data *meta_data, struct tl_error *ret_error) TL_MUST_USE;

bool tl_meta_data_is_equal(const struct tl_meta_data *a, const struct tl_meta_data *b);

/* As of a value of which nothing is known. Dimensions beyond the rank are never looked at, so these leave them. */
static inline void tl_meta_data_clear(struct tl_meta_data *meta_data)
{
    meta_data->dtype = TL_DTYPE_INVALID;
    meta_data->shape.rank = 0;
    meta_data->is_dead = false;
    meta_data->size_bytes = 0;
}

static inline void tl_meta_data_copy(struct tl_meta_data *to, const struct tl_meta_data *from)
{
    to->dtype = from->dtype;
    to->is_dead = from->is_dead;
    to->size_bytes = from->size_bytes;
    to->shape.rank = from->shape.rank;
    /* Mostly there are no more dimensions than that: a few moves, and no call with a length that varies. */
    memcpy(to->shape.dims, from->shape.dims, TL_USUAL_RANK * sizeof(from->shape.dims[0]));
    for (unsigned i = TL_USUAL_RANK; i < from->shape.rank; i++)
        to->shape.dims[i] = from->shape.dims[i];
}

/* The dtype with this name (as tl_dtype_name); TL_DTYPE_INVALID when there is none. */
enum tl_dtype tl_dtype_from_name(const char *name, size_t len_bytes);

/* True for dtypes whose elements can be copied byte by byte (all but TL_STRING). */
bool tl_dtype_is_plain(enum tl_dtype dtype);

#endif
