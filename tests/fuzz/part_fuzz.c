// SPDX-License-Identifier: Apache-2.0
/* Names of parts as peers send them, and what is made of them: no more bytes than the tensor has, and none outside. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "tensor/part.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct tl_tensor *make(enum tl_dtype dtype)
{
    static const uint64_t dims[] = {3, 4, 5};
    struct tl_tensor *tensor;
    struct tl_error error;
    TL_CHECK(tl_tensor_create(dtype, 3, dims, &tensor, &error) == TL_OK);
    memset(tl_tensor_data(tensor), 1, tl_tensor_size_bytes(tensor));
    return tensor;
}

/* Takes parts of small values, each made for it: a part has no bytes but those of its value. */
static void take_small(const char *name)
{
    static const enum tl_dtype dtypes[] = {TL_F32, TL_I4};
    struct tl_error error;
    for (unsigned i = 0; i < 4; i++) {
        struct tl_tensor *value = make(dtypes[i % 2]);
        const struct tl_part_costs costs = {.copies = i >= 2};
        if (tl_part_take(name, &costs, &value, &error) == TL_OK) {
            const unsigned char *bytes = tl_tensor_data(value);
            for (uint64_t j = 0; j < tl_tensor_size_bytes(value); j++)
                TL_CHECK(bytes[j] == 1);
        }
        tl_tensor_put(value);
    }
}

/* Returns a value whose larger boxes are shown in runs. It is made once: to fill it takes longer than all else. */
static struct tl_tensor *large_value(void)
{
    static const uint64_t dims[] = {32, 64, 33};
    static struct tl_tensor *large;
    struct tl_error error;
    if (large == NULL) {
        TL_CHECK(tl_tensor_create(TL_F32, 3, dims, &large, &error) == TL_OK);
        unsigned char *bytes = tl_tensor_data(large);
        for (uint64_t i = 0; i < tl_tensor_size_bytes(large); i++)
            bytes[i] = (unsigned char)(i ^ i >> 8 ^ i >> 16);
    }
    return tl_tensor_get(large);
}

/* A part in runs, read in pieces of some size, has the same bytes as its copy. */
static void take_runs(const char *name, uint64_t piece_bytes)
{
    static unsigned char piece[1 << 16];
    const struct tl_part_costs runs_costs = {.takes_runs = true}, copy_costs = {.copies = true};
    struct tl_tensor *runs = large_value(), *copy = large_value();
    struct tl_error error;
    if (tl_part_take(name, &runs_costs, &runs, &error) == TL_OK && tl_tensor_is_in_runs(runs)) {
        TL_CHECK(tl_part_take(name, &copy_costs, &copy, &error) == TL_OK);
        uint64_t bytes = tl_tensor_size_bytes(copy);
        TL_CHECK(tl_tensor_size_bytes(runs) == bytes);
        const unsigned char *expected = tl_tensor_data(copy);
        for (uint64_t offset = 0, length; offset < bytes; offset += length) {
            length = bytes - offset < piece_bytes ? bytes - offset : piece_bytes;
            tl_tensor_read(runs, offset, length, piece);
            TL_CHECK(memcmp(piece, expected + offset, length) == 0);
        }
    }
    tl_tensor_put(runs);
    tl_tensor_put(copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char name[TL_MAX_KEY_BYTES + 1];
    if (size == 0 || size > TL_MAX_KEY_BYTES) return 0;
    memcpy(name, data, size);
    name[size] = '\0';
    if (!tl_part_is_name(name)) return 0;
    take_small(name);
    take_runs(name, 1 + data[size - 1] * UINT64_C(257)); /* the key's last byte: no more than the piece has */
    return 0;
}
