// SPDX-License-Identifier: Apache-2.0
/*
 * Shapes, dtypes and meta-data: the arithmetic on sizes is checked, because they come from files and peers. Nothing
 * here allocates.
 */
#include "tensor/meta_data.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"

static const struct {
    const char *name;
    unsigned bits;
} dtypes[TL_DTYPE_COUNT] = {
    [TL_DTYPE_INVALID] = {"INVALID", 0},
    [TL_BOOL] = {"BOOL", 8},
    [TL_U8] = {"U8", 8},
    [TL_I8] = {"I8", 8},
    [TL_U16] = {"U16", 16},
    [TL_I16] = {"I16", 16},
    [TL_U32] = {"U32", 32},
    [TL_I32] = {"I32", 32},
    [TL_U64] = {"U64", 64},
    [TL_I64] = {"I64", 64},
    [TL_F16] = {"F16", 16},
    [TL_BF16] = {"BF16", 16},
    [TL_F32] = {"F32", 32},
    [TL_F64] = {"F64", 64},
    [TL_C64] = {"C64", 64},
    [TL_C128] = {"C128", 128},
    [TL_F8_E4M3] = {"F8_E4M3", 8},
    [TL_F8_E5M2] = {"F8_E5M2", 8},
    [TL_F8_E4M3FNUZ] = {"F8_E4M3FNUZ", 8},
    [TL_F8_E5M2FNUZ] = {"F8_E5M2FNUZ", 8},
    [TL_F8_E8M0] = {"F8_E8M0", 8},
    [TL_I4] = {"I4", 4},
    [TL_U4] = {"U4", 4},
    [TL_F4] = {"F4", 4},
    [TL_F6_E2M3] = {"F6_E2M3", 6},
    [TL_F6_E3M2] = {"F6_E3M2", 6},
    [TL_STRING] = {"STRING", 0},
};

static bool is_known(enum tl_dtype dtype)
{
    return (unsigned)dtype > TL_DTYPE_INVALID && (unsigned)dtype < TL_DTYPE_COUNT;
}

const char *tl_dtype_name(enum tl_dtype dtype)
{
    return dtypes[is_known(dtype) ? dtype : TL_DTYPE_INVALID].name;
}

unsigned tl_dtype_bits(enum tl_dtype dtype)
{
    return is_known(dtype) ? dtypes[dtype].bits : 0;
}

enum tl_dtype tl_dtype_from_name(const char *name, size_t len_bytes)
{
    for (unsigned i = TL_DTYPE_INVALID + 1; i < TL_DTYPE_COUNT; i++)
        if (strlen(dtypes[i].name) == len_bytes && memcmp(dtypes[i].name, name, len_bytes) == 0)
            return (enum tl_dtype)i;
    return TL_DTYPE_INVALID;
}

bool tl_dtype_is_plain(enum tl_dtype dtype)
{
    return tl_dtype_bits(dtype) != 0;
}

char *tl_shape_format(const struct tl_shape *shape, char *buffer, size_t capacity)
{
    size_t len = 0;
    if (capacity == 0) return buffer;
    for (unsigned i = 0; i < shape->rank && i < TL_MAX_RANK && len < capacity; i++)
        len += (size_t)snprintf(buffer + len, capacity - len, "%s%" PRIu64, i ? ", " : "[", shape->dims[i]);
    if (len < capacity) snprintf(buffer + len, capacity - len, shape->rank ? "]" : "[]");
    return buffer;
}

enum tl_status tl_shape_element_count(const struct tl_shape *shape, uint64_t *ret_count, struct tl_error *ret_error)
{
    uint64_t count = 1;
    bool has_zero = false, fits = true;
    if (shape->rank > TL_MAX_RANK)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "a tensor of rank %u is not possible; at most %u dimensions", shape->rank, TL_MAX_RANK);
    for (unsigned i = 0; i < shape->rank; i++) {
        if (shape->dims[i] > INT64_MAX)
            return tl_error_set(ret_error, TL_OUT_OF_RANGE, "dimension %u is %" PRIu64 ", more than 2^63-1", i,
                                shape->dims[i]);
        if (shape->dims[i] == 0) has_zero = true;
        /* Once it does not fit only a zero can make it fit again. */
        fits = fits && !__builtin_mul_overflow(count, shape->dims[i], &count) && count <= INT64_MAX;
    }
    if (has_zero) {
        count = 0;
    } else if (!fits) {
        char text[TL_SHAPE_TEXT_BYTES];
        return tl_error_set(ret_error, TL_OUT_OF_RANGE, "shape %s has more than 2^63-1 elements",
                            tl_shape_format(shape, text, sizeof(text)));
    }
    *ret_count = count;
    return TL_OK;
}

enum tl_status tl_shape_size_bytes(enum tl_dtype dtype, const struct tl_shape *shape, uint64_t *ret_size_bytes,
                                   struct tl_error *ret_error)
{
    uint64_t count;
    if (!tl_dtype_is_plain(dtype))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "dtype %s (%d) has no fixed element size",
                            tl_dtype_name(dtype), (int)dtype);
    enum tl_status status = tl_shape_element_count(shape, &count, ret_error);
    if (status != TL_OK) return status;
    unsigned __int128 size_bytes = ((unsigned __int128)count * tl_dtype_bits(dtype) + 7) / 8;
    if (size_bytes > INT64_MAX) {
        char text[TL_SHAPE_TEXT_BYTES];
        return tl_error_set(ret_error, TL_OUT_OF_RANGE, "shape %s of %s has more than 2^63-1 bytes",
                            tl_shape_format(shape, text, sizeof(text)), tl_dtype_name(dtype));
    }
    *ret_size_bytes = (uint64_t)size_bytes;
    return TL_OK;
}

bool tl_shape_is_equal(const struct tl_shape *a, const struct tl_shape *b)
{
    if (a->rank != b->rank || a->rank > TL_MAX_RANK) return false;
    for (unsigned i = 0; i < a->rank; i++)
        if (a->dims[i] != b->dims[i]) return false;
    return true;
}

bool tl_meta_data_is_equal(const struct tl_meta_data *a, const struct tl_meta_data *b)
{
    return a->dtype == b->dtype && a->is_dead == b->is_dead && a->size_bytes == b->size_bytes &&
           tl_shape_is_equal(&a->shape, &b->shape);
}

static enum tl_status validate_dead(const struct tl_meta_data *meta_data, struct tl_error *ret_error)
{
    if (meta_data->dtype == TL_DTYPE_INVALID && meta_data->shape.rank == 0 && meta_data->size_bytes == 0) return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                        "a dead tensor has dtype %d, rank %u and %" PRIu64 " bytes; all three must be 0",
                        (int)meta_data->dtype, meta_data->shape.rank, meta_data->size_bytes);
}

static enum tl_status validate_strings(const struct tl_meta_data *meta_data, struct tl_error *ret_error)
{
    uint64_t count;
    enum tl_status status = tl_shape_element_count(&meta_data->shape, &count, ret_error);
    if (status != TL_OK) return status;
    if (count > INT64_MAX / sizeof(uint64_t) || meta_data->size_bytes > INT64_MAX)
        return tl_error_set(ret_error, TL_OUT_OF_RANGE,
                            "a string tensor of %" PRIu64 " elements and %" PRIu64 " bytes is larger than 2^63-1 bytes",
                            count, meta_data->size_bytes);
    if (meta_data->size_bytes < count * sizeof(uint64_t))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "a string tensor of %" PRIu64 " elements has %" PRIu64
                            " bytes; its lengths alone need %" PRIu64,
                            count, meta_data->size_bytes, count * (uint64_t)sizeof(uint64_t));
    return TL_OK;
}

/* Whether it is, without zeros, what it says: the usual case, which every transfer meets several times. */
static bool is_plainly_right(const struct tl_meta_data *meta_data)
{
    uint64_t bits = tl_dtype_bits(meta_data->dtype);
    if (bits == 0 || meta_data->is_dead || meta_data->shape.rank > TL_MAX_RANK) return false;
    for (unsigned i = 0; i < meta_data->shape.rank; i++)
        if (__builtin_mul_overflow(bits, meta_data->shape.dims[i], &bits)) return false;
    return bits > 0 && bits <= INT64_MAX && meta_data->size_bytes == (bits + 7) / 8;
}

enum tl_status tl_meta_data_validate(const struct tl_meta_data *meta_data, struct tl_error *ret_error)
{
    uint64_t size_bytes = 0;
    if (is_plainly_right(meta_data)) return TL_OK;
    if (meta_data->is_dead) return validate_dead(meta_data, ret_error);
    if (meta_data->dtype == TL_STRING) return validate_strings(meta_data, ret_error);
    enum tl_status status = tl_shape_size_bytes(meta_data->dtype, &meta_data->shape, &size_bytes, ret_error);
    if (status != TL_OK) return status;
    if (meta_data->size_bytes != size_bytes) {
        char text[TL_SHAPE_TEXT_BYTES];
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "a tensor of %s with shape %s has %" PRIu64 " bytes, not %" PRIu64,
                            tl_dtype_name(meta_data->dtype), tl_shape_format(&meta_data->shape, text, sizeof(text)),
                            size_bytes, meta_data->size_bytes);
    }
    return TL_OK;
}
