// SPDX-License-Identifier: Apache-2.0
/*
 * The values that each worker has for probes: a peer that asks for one of them, by its key and TL_PROBE_STEP, shows
 * that tensors travel to it over the connection that it has asked on. They are in no table, and neither tensors of the
 * user nor a full table have anything to do with them.
 */
#ifndef SERVER_PROBE_VALUES_H
#define SERVER_PROBE_VALUES_H

#include "tensor/transfer.h"

/* No value of a user has this step under these keys, because nothing comes after it. */
#define TL_PROBE_STEP UINT64_MAX

enum tl_probe_size {
    TL_PROBE_SMALL, /* fits into one packet wherever packets pass */
    TL_PROBE_LARGE, /* needs several packets of every size */
    TL_PROBE_SIZES,
};

struct tl_probe_values {
    struct tl_tensor *tensors[TL_PROBE_SIZES];
    uint64_t publication;
};

const char *tl_probe_value_key(enum tl_probe_size size);
uint64_t tl_probe_value_bytes(enum tl_probe_size size);

/* Makes the values. Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_probe_values_init(struct tl_probe_values *values, struct tl_error *ret_error) TL_MUST_USE;
void tl_probe_values_fini(struct tl_probe_values *values); /* may be called after a failed init too */

/* Returns whether a request is that of a probe, and then its answer, with a reference for the caller. Thread: any. */
bool tl_probe_values_find(const struct tl_probe_values *values, const char *key, uint64_t step,
                          struct tl_offer *ret_offer);

#endif
