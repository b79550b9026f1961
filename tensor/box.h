// SPDX-License-Identifier: Apache-2.0
/* Boxes of tensors: a start and a size in each dimension, and the runs of bytes that make one up. */
#ifndef TENSOR_BOX_H
#define TENSOR_BOX_H

#include <stddef.h>

#include "tensor/meta_data.h"

/* A box of a tensor, with as many dimensions. */
struct tl_box {
    unsigned rank;
    uint64_t start[TL_MAX_RANK];
    uint64_t size[TL_MAX_RANK];
};

/* The runs of bytes of a box in memory: one for each place in its outer dimensions. */
struct tl_box_runs {
    unsigned outer_rank;
    uint64_t count;
    uint64_t run_bytes;
    uint64_t first_bytes;               /* offset of the first run in the whole */
    uint64_t size[TL_MAX_RANK];         /* [outer_rank] */
    uint64_t stride_bytes[TL_MAX_RANK]; /* [outer_rank]: from one place in a dimension to the next */
};

/* Called with bytes that lie one behind the other. */
typedef void (*tl_bytes_fn)(void *context, unsigned char *bytes, size_t len_bytes);

/* Checks that the box lies in a value of this meta-data. Errors:
 * TL_OUT_OF_RANGE: it reaches beyond the value, or its rank is another one. TL_FAILED_PRECONDITION: strings, a dead
 * value, or a box that begins or ends within a byte. */
enum tl_status tl_box_check(const struct tl_box *box, const struct tl_meta_data *meta_data,
                            struct tl_error *ret_error) TL_MUST_USE;
/* Whether a box that was checked lies in one piece, and where that begins. */
bool tl_box_is_dense(const struct tl_box *box, const struct tl_meta_data *meta_data, uint64_t *ret_offset_bytes);
/* Fills the meta-data of the box itself. */
void tl_box_meta_data(const struct tl_box *box, const struct tl_meta_data *meta_data,
                      struct tl_meta_data *ret_meta_data);
/* Finds the runs of a box that was checked and is not empty. */
void tl_box_find_runs(const struct tl_box *box, const struct tl_meta_data *meta_data, struct tl_box_runs *ret_runs);
/* Calls back with len_bytes of the bytes of a box, from the one at offset_bytes on, run by run. whole is the memory
 * that the box lies in. */
void tl_box_walk(const struct tl_box_runs *runs, void *whole, uint64_t offset_bytes, uint64_t len_bytes,
                 tl_bytes_fn visit, void *context);

#endif
