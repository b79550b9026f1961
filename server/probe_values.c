// SPDX-License-Identifier: Apache-2.0
#include "server/probe_values.h"

#include <string.h>

#include "base/arith.h"
#include "base/random.h"

/* After so many bytes the values begin again: a prime number, so that no piece of a usual size is like the next one. */
#define PERIOD_BYTES UINT64_C(251)

static const struct {
    const char *key;
    uint64_t bytes;
} sizes[TL_PROBE_SIZES] = {
    [TL_PROBE_SMALL] = {"tensorlane.probe/256", 256},
    [TL_PROBE_LARGE] = {"tensorlane.probe/65536", 65536},
};

const char *tl_probe_value_key(enum tl_probe_size size)
{
    return sizes[size].key;
}

uint64_t tl_probe_value_bytes(enum tl_probe_size size)
{
    return sizes[size].bytes;
}

enum tl_status tl_probe_values_init(struct tl_probe_values *values, struct tl_error *ret_error)
{
    *values = (struct tl_probe_values){.publication = tl_random_u64() | 1};
    for (size_t i = 0; i < TL_PROBE_SIZES; i++) {
        enum tl_status status = tl_tensor_create(TL_U8, 1, &sizes[i].bytes, &values->tensors[i], ret_error);
        if (status != TL_OK) return status;
        /* Bytes that are not all equal, so that the checksum shows those that did not arrive. */
        uint8_t *bytes = tl_tensor_data(values->tensors[i]);
        for (uint64_t j = 0; j < PERIOD_BYTES; j++)
            bytes[j] = (uint8_t)(j + 1);
        for (uint64_t j = PERIOD_BYTES; j < sizes[i].bytes; j += PERIOD_BYTES)
            memcpy(bytes + j, bytes, tl_min_u64(PERIOD_BYTES, sizes[i].bytes - j));
    }
    return TL_OK;
}

void tl_probe_values_fini(struct tl_probe_values *values)
{
    for (size_t i = 0; i < TL_PROBE_SIZES; i++)
        tl_tensor_put(values->tensors[i]);
}

bool tl_probe_values_find(const struct tl_probe_values *values, const char *key, uint64_t step,
                          struct tl_offer *ret_offer)
{
    if (step != TL_PROBE_STEP) return false;
    for (size_t i = 0; i < TL_PROBE_SIZES; i++) {
        if (strcmp(key, sizes[i].key) != 0) continue;
        *ret_offer = (struct tl_offer){
            .tensor = tl_tensor_get(values->tensors[i]), .step = step, .publication = values->publication};
        return true;
    }
    return false;
}
