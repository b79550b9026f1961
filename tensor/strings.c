// SPDX-License-Identifier: Apache-2.0
/*
 * String tensors as bytes. The index holds the place of every 256th string; a look-up adds up the lengths from there.
 * Lengths that do not fit are found when the index is built, which is before any code but the receiver sees the tensor.
 */
#include "tensor/strings.h"

#include <endian.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"

#define STRINGS_PER_ENTRY 256

struct tl_string_index {
    uint64_t count; /* number of strings */
    bool is_built;
    uint64_t places[]; /* places of the strings 0, 256, 512, ...: bytes from the start of the serialized form */
};

enum tl_status tl_strings_size_bytes(const struct tl_string *strings, uint64_t count, uint64_t *ret_size_bytes,
                                     struct tl_error *ret_error)
{
    uint64_t size_bytes;
    bool fits = tl_mul_u64(count, sizeof(uint64_t), &size_bytes);
    for (uint64_t i = 0; fits && i < count; i++) {
        if (!strings[i].data && strings[i].len_bytes > 0)
            return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                                "string %" PRIu64 " has %" PRIu64 " bytes but its data is NULL", i,
                                strings[i].len_bytes);
        fits = tl_add_u64(size_bytes, strings[i].len_bytes, &size_bytes);
    }
    if (!fits || size_bytes > INT64_MAX)
        return tl_error_set(ret_error, TL_OUT_OF_RANGE, "%" PRIu64 " strings have more than 2^63-1 bytes", count);
    *ret_size_bytes = size_bytes;
    return TL_OK;
}

void tl_strings_serialize(const struct tl_string *strings, uint64_t count, void *ret_bytes)
{
    unsigned char *lengths = ret_bytes;
    unsigned char *place = lengths + count * sizeof(uint64_t);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t len = htole64(strings[i].len_bytes);
        memcpy(lengths + i * sizeof(len), &len, sizeof(len));
        if (strings[i].len_bytes > 0) memcpy(place, strings[i].data, strings[i].len_bytes);
        place += strings[i].len_bytes;
    }
}

struct tl_string_index *tl_string_index_create(uint64_t count)
{
    uint64_t entry_count = count / STRINGS_PER_ENTRY + 1;
    struct tl_string_index *index = calloc(1, sizeof(*index) + entry_count * sizeof(index->places[0]));
    if (!index) return NULL;
    index->count = count;
    return index;
}

void tl_string_index_destroy(struct tl_string_index *index)
{
    free(index);
}

static uint64_t read_length(const void *bytes, uint64_t i)
{
    uint64_t len;
    memcpy(&len, (const unsigned char *)bytes + i * sizeof(len), sizeof(len));
    return le64toh(len);
}

enum tl_status tl_string_index_build(struct tl_string_index *index, const void *bytes, uint64_t len_bytes,
                                     struct tl_error *ret_error)
{
    uint64_t place = index->count * sizeof(uint64_t);
    index->is_built = false;
    if (place > len_bytes)
        return tl_error_set(ret_error, TL_DATA_LOSS,
                            "the lengths of %" PRIu64 " strings do not fit into %" PRIu64 " bytes", index->count,
                            len_bytes);
    for (uint64_t i = 0; i < index->count; i++) {
        if (i % STRINGS_PER_ENTRY == 0) index->places[i / STRINGS_PER_ENTRY] = place;
        uint64_t len = read_length(bytes, i);
        if (len > len_bytes - place)
            return tl_error_set(ret_error, TL_DATA_LOSS,
                                "string %" PRIu64 " of %" PRIu64 " bytes ends beyond the tensor's %" PRIu64 " bytes", i,
                                len, len_bytes);
        place += len;
    }
    if (place != len_bytes)
        return tl_error_set(ret_error, TL_DATA_LOSS,
                            "the strings end after %" PRIu64 " of the tensor's %" PRIu64 " bytes", place, len_bytes);
    index->is_built = true;
    return TL_OK;
}

enum tl_status tl_string_index_find(const struct tl_string_index *index, const void *bytes, uint64_t len_bytes,
                                    uint64_t i, struct tl_string *ret_string, struct tl_error *ret_error)
{
    TL_CHECK(i < index->count);
    if (!index->is_built) return tl_error_set(ret_error, TL_DATA_LOSS, "the strings of the tensor were not received");
    uint64_t place = index->places[i / STRINGS_PER_ENTRY];
    for (uint64_t j = i - i % STRINGS_PER_ENTRY; place <= len_bytes; j++) {
        uint64_t len = read_length(bytes, j);
        if (len > len_bytes - place) break;
        if (j == i) {
            *ret_string = (struct tl_string){.data = (const unsigned char *)bytes + place, .len_bytes = len};
            return TL_OK;
        }
        place += len;
    }
    return tl_error_set(ret_error, TL_DATA_LOSS, "string %" PRIu64 " lies outside of the tensor", i);
}
