// SPDX-License-Identifier: Apache-2.0
#include "tensor/part.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/copy.h"
#include "base/error.h"

#define PREFIX_BYTES (sizeof(TL_PART_PREFIX) - 1)
/* A smaller box that is not in one piece is copied together at once: it travels as one piece anyway, or inline. */
#define MIN_RUNS_BYTES (UINT64_C(64) << 10)

/* --------------------------------------------------------------------------------------------------------- names -- */

const char *tl_part_key(const char *name)
{
    if (!tl_part_is_name(name)) return NULL;
    const char *end = strchr(name + PREFIX_BYTES, '/');
    return end != NULL && end[1] != '\0' ? end + 1 : NULL;
}

static bool add_pair(char *name, size_t *length, uint64_t first, uint64_t second)
{
    size_t left = TL_MAX_KEY_BYTES + 1 - *length;
    int written =
        snprintf(name + *length, left, "%s%" PRIx64 "+%" PRIx64, *length == PREFIX_BYTES + 1 ? "" : ",", first, second);
    *length += written > 0 ? (size_t)written : 0;
    return written > 0 && (size_t)written < left;
}

enum tl_status tl_part_name(const struct tl_part *part, const char *key, char ret_name[TL_MAX_KEY_BYTES + 1],
                            struct tl_error *ret_error)
{
    bool is_box = part->size != NULL, fits = true;
    size_t length = PREFIX_BYTES + 1;
    if (is_box == (part->range_count > 0) || (is_box && part->start == NULL) || part->rank > TL_MAX_RANK ||
        (part->range_count > 0 && part->ranges == NULL))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "the part of %.64s needs start and size in at most %u dimensions, or ranges, not both", key,
                            TL_MAX_RANK);
    snprintf(ret_name, TL_MAX_KEY_BYTES + 1, "%s%c", TL_PART_PREFIX, is_box ? 'b' : 'r');
    for (unsigned i = 0; is_box && fits && i < part->rank; i++)
        fits = add_pair(ret_name, &length, part->start[i], part->size[i]);
    for (size_t i = 0; fits && i < part->range_count; i++)
        fits = add_pair(ret_name, &length, part->ranges[i].offset_bytes, part->ranges[i].len_bytes);
    size_t key_bytes = strlen(key);
    if (!fits || length + 1 + key_bytes > TL_MAX_KEY_BYTES)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "the part of %.64s has too many numbers for one receive, which may have %d bytes with the "
                            "key; use tl_recv_many",
                            key, TL_MAX_KEY_BYTES);
    ret_name[length] = '/';
    memcpy(ret_name + length + 1, key, key_bytes + 1);
    return TL_OK;
}

/* Reads a hexadecimal number; the text moves on. Returns false when there is none, or it does not fit. */
static bool read_number(const char **text, uint64_t *ret_number)
{
    uint64_t number = 0;
    unsigned digits = 0;
    for (;; (*text)++, digits++) {
        char c = **text;
        unsigned digit = c >= '0' && c <= '9'   ? (unsigned)(c - '0')
                         : c >= 'a' && c <= 'f' ? (unsigned)(c - 'a') + 10
                                                : 16;
        if (digit == 16) break;
        if (digits == 16) return false;
        number = number << 4 | digit;
    }
    *ret_number = number;
    return digits > 0;
}

/* Reads a pair and what separates it from the next. */
static bool read_pair(const char **text, uint64_t *ret_first, uint64_t *ret_second)
{
    if (!read_number(text, ret_first) || *(*text)++ != '+' || !read_number(text, ret_second)) return false;
    if (**text == ',') return *++(*text) != '/';
    return **text == '/';
}

static enum tl_status no_name(struct tl_error *ret_error)
{
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the name of the part cannot be read");
}

/* -------------------------------------------------------------------------------------------------------- values -- */

static void replace(struct tl_tensor **value, struct tl_tensor *part)
{
    struct tl_tensor *whole = *value;
    *value = part;
    tl_tensor_put(whole);
}

static enum tl_status check_all(const struct tl_tensor *whole, struct tl_error *ret_error)
{
    return tl_tensor_check_readable(whole, 0, tl_tensor_size_bytes(whole), ret_error);
}

static enum tl_status create_copy(const struct tl_meta_data *meta_data, const struct tl_part_costs *costs,
                                  struct tl_tensor **ret_part, struct tl_error *ret_error)
{
    enum tl_status status = TL_OK;
    if (costs->charge != NULL && meta_data->size_bytes > 0)
        status = costs->charge(costs->context, meta_data->size_bytes, ret_error);
    return status == TL_OK ? tl_tensor_create_for(meta_data, ret_part, ret_error) : status;
}

/* Shows, or copies, what lies in one piece. */
static enum tl_status take_piece(const struct tl_meta_data *meta_data, uint64_t offset_bytes,
                                 const struct tl_part_costs *costs, struct tl_tensor **value,
                                 struct tl_error *ret_error)
{
    struct tl_tensor *part;
    uint64_t bytes = meta_data->size_bytes;
    if (!costs->copies) {
        enum tl_status status = tl_tensor_create_view(*value, meta_data, offset_bytes, true, &part, ret_error);
        if (status == TL_OK) replace(value, part);
        return status;
    }
    enum tl_status status = create_copy(meta_data, costs, &part, ret_error);
    if (status != TL_OK) return status;
    if (bytes > 0) tl_copy(tl_tensor_data(part), (const unsigned char *)tl_tensor_data(*value) + offset_bytes, bytes);
    replace(value, part);
    return TL_OK;
}

static enum tl_status on_a_device(struct tl_error *ret_error)
{
    return tl_error_set(ret_error, TL_UNIMPLEMENTED,
                        "the part is not in one piece and lies on a device; receive it piece by piece");
}

/* Shows the box, or copies it together. */
static enum tl_status take_runs(const struct tl_box *box, const struct tl_meta_data *meta_data,
                                const struct tl_part_costs *costs, struct tl_tensor **value, struct tl_error *ret_error)
{
    struct tl_tensor *runs, *part;
    enum tl_status status = tl_tensor_create_box(*value, box, true, &runs, ret_error);
    if (status != TL_OK) return status;
    if (costs->takes_runs && meta_data->size_bytes >= MIN_RUNS_BYTES) {
        replace(value, runs);
        return TL_OK;
    }
    status = create_copy(meta_data, costs, &part, ret_error);
    if (status == TL_OK) {
        tl_tensor_read(runs, 0, meta_data->size_bytes, tl_tensor_data(part));
        replace(value, part);
    }
    tl_tensor_put(runs);
    return status;
}

static enum tl_status take_box(const char *text, const struct tl_part_costs *costs, struct tl_tensor **value,
                               struct tl_error *ret_error)
{
    const struct tl_meta_data *whole = tl_tensor_meta_data(*value);
    struct tl_meta_data meta_data;
    struct tl_box box = {.rank = 0};
    uint64_t offset_bytes;
    while (*text != '/') {
        if (box.rank == TL_MAX_RANK || !read_pair(&text, &box.start[box.rank], &box.size[box.rank]))
            return no_name(ret_error);
        box.rank++;
    }
    enum tl_status status = tl_box_check(&box, whole, ret_error);
    if (status != TL_OK) return status;
    tl_box_meta_data(&box, whole, &meta_data);
    if (tl_box_is_dense(&box, whole, &offset_bytes))
        return take_piece(&meta_data, offset_bytes, costs, value, ret_error);
    if (tl_tensor_is_on_device(*value)) return on_a_device(ret_error);
    return take_runs(&box, &meta_data, costs, value, ret_error);
}

/* Checks the ranges, and adds up their lengths. */
static enum tl_status measure(const char *text, uint64_t size_bytes, uint64_t *ret_bytes, size_t *ret_count,
                              struct tl_error *ret_error)
{
    uint64_t first, length, end;
    *ret_bytes = 0;
    *ret_count = 0;
    while (*text != '/') {
        if (!read_pair(&text, &first, &length)) return no_name(ret_error);
        if (!tl_add_u64(first, length, &end) || end > size_bytes || !tl_add_u64(*ret_bytes, length, ret_bytes) ||
            *ret_bytes > size_bytes)
            return tl_error_set(ret_error, TL_OUT_OF_RANGE,
                                "%" PRIu64 " bytes from %" PRIu64 " on are not in the tensor, which has %" PRIu64
                                ", or all ranges together are longer than it is",
                                length, first, size_bytes);
        (*ret_count)++;
    }
    return *ret_count > 0 ? TL_OK : no_name(ret_error);
}

static enum tl_status take_ranges(const char *text, const struct tl_part_costs *costs, struct tl_tensor **value,
                                  struct tl_error *ret_error)
{
    struct tl_meta_data meta_data = {.dtype = TL_U8, .shape.rank = 1};
    struct tl_tensor *part;
    uint64_t first = 0, length, bytes;
    size_t count;
    if (tl_tensor_meta_data(*value)->dtype == TL_STRING)
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION, "a tensor of strings has no parts");
    enum tl_status status = measure(text, tl_tensor_size_bytes(*value), &bytes, &count, ret_error);
    if (status != TL_OK) return status;
    meta_data.size_bytes = meta_data.shape.dims[0] = bytes;
    if (count == 1) {
        (void)read_pair(&text, &first, &length);
        return take_piece(&meta_data, first, costs, value, ret_error);
    }
    if (tl_tensor_is_on_device(*value)) return on_a_device(ret_error);
    status = create_copy(&meta_data, costs, &part, ret_error);
    if (status != TL_OK) return status;
    unsigned char *to = tl_tensor_data(part);
    const unsigned char *from = tl_tensor_data(*value);
    while (*text != '/' && read_pair(&text, &first, &length)) {
        if (length == 0) continue; /* there may be no memory at all */
        tl_copy(to, from + first, length);
        to += length;
    }
    replace(value, part);
    return TL_OK;
}

enum tl_status tl_part_take(const char *name, const struct tl_part_costs *costs, struct tl_tensor **value,
                            struct tl_error *ret_error)
{
    const char *text = name + PREFIX_BYTES;
    struct tl_tensor *whole = *value;
    if (tl_part_key(name) == NULL || (*text != 'b' && *text != 'r')) return no_name(ret_error);
    if (tl_tensor_is_dead(whole)) return TL_OK;
    /* A file is checked before and after its bytes were copied, because one that is cut is read as zeros. */
    tl_tensor_get(whole);
    enum tl_status status = check_all(whole, ret_error);
    if (status == TL_OK)
        status =
            *text == 'b' ? take_box(text + 1, costs, value, ret_error) : take_ranges(text + 1, costs, value, ret_error);
    if (status == TL_OK && (status = check_all(whole, ret_error)) != TL_OK) {
        replace(value, tl_tensor_get(whole));
    }
    tl_tensor_put(whole);
    return status;
}
