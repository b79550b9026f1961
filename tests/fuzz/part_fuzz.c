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

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const enum tl_dtype dtypes[] = {TL_F32, TL_I4};
    char name[TL_MAX_KEY_BYTES + 1];
    struct tl_error error;
    if (size == 0 || size > TL_MAX_KEY_BYTES) return 0;
    memcpy(name, data, size);
    name[size] = '\0';
    if (!tl_part_is_name(name)) return 0;
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
    return 0;
}
