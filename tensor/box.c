// SPDX-License-Identifier: Apache-2.0
#include "tensor/box.h"

#include <inttypes.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"

static bool is_whole(const struct tl_box *box, const struct tl_meta_data *meta_data)
{
    for (unsigned i = 0; i < box->rank; i++) {
        if (box->size[i] != meta_data->shape.dims[i]) return false;
    }
    return true;
}

static bool is_empty(const struct tl_box *box)
{
    for (unsigned i = 0; i < box->rank; i++) {
        if (box->size[i] == 0) return true;
    }
    return false;
}

/* Finds the runs of a box that lies in the shape and is not empty. Returns false when one begins or ends within a
 * byte. */
static bool find_runs(const struct tl_box *box, const struct tl_meta_data *meta_data, struct tl_box_runs *ret_runs)
{
    const uint64_t *dims = meta_data->shape.dims;
    uint64_t stride_bits[TL_MAX_RANK];
    uint64_t bits = tl_dtype_bits(meta_data->dtype), run_bits = bits, first_bits = 0;
    bool are_bytes = true;
    *ret_runs = (struct tl_box_runs){.outer_rank = box->rank, .count = 1};
    for (unsigned i = box->rank; i-- > 0;) {
        stride_bits[i] = bits;
        first_bits += box->start[i] * bits;
        bits *= dims[i];
    }
    /* The dimensions inside of the last one that is not whole belong to the run, and that one itself. */
    while (ret_runs->outer_rank > 0) {
        unsigned i = --ret_runs->outer_rank;
        run_bits = box->size[i] * stride_bits[i];
        if (box->size[i] != dims[i]) break;
    }
    for (unsigned i = 0; i < ret_runs->outer_rank; i++) {
        ret_runs->count *= box->size[i];
        ret_runs->size[i] = box->size[i];
        ret_runs->stride_bytes[i] = stride_bits[i] / 8;
        are_bytes = are_bytes && (stride_bits[i] % 8 == 0 || box->size[i] == 1);
    }
    ret_runs->first_bytes = first_bits / 8;
    ret_runs->run_bytes = (run_bits + 7) / 8;
    return is_whole(box, meta_data) || (are_bytes && first_bits % 8 == 0 && run_bits % 8 == 0);
}

enum tl_status tl_box_check(const struct tl_box *box, const struct tl_meta_data *meta_data, struct tl_error *ret_error)
{
    const struct tl_shape *shape = &meta_data->shape;
    struct tl_box_runs runs;
    char text[TL_SHAPE_TEXT_BYTES];
    if (meta_data->is_dead || meta_data->dtype == TL_STRING)
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION, "a tensor of strings, or a dead one, has no parts");
    if (box->rank != shape->rank)
        return tl_error_set(ret_error, TL_OUT_OF_RANGE, "the box has %u dimensions, the tensor is %s", box->rank,
                            tl_shape_format(shape, text, sizeof(text)));
    for (unsigned i = 0; i < box->rank; i++) {
        uint64_t end;
        if (tl_add_u64(box->start[i], box->size[i], &end) && end <= shape->dims[i]) continue;
        return tl_error_set(ret_error, TL_OUT_OF_RANGE,
                            "the box has %" PRIu64 " from %" PRIu64 " on in dimension %u, the tensor is %s",
                            box->size[i], box->start[i], i, tl_shape_format(shape, text, sizeof(text)));
    }
    if (is_empty(box) || find_runs(box, meta_data, &runs)) return TL_OK;
    return tl_error_set(ret_error, TL_FAILED_PRECONDITION, "the box begins or ends within a byte of %s elements",
                        tl_dtype_name(meta_data->dtype));
}

void tl_box_find_runs(const struct tl_box *box, const struct tl_meta_data *meta_data, struct tl_box_runs *ret_runs)
{
    TL_CHECK(!is_empty(box) && find_runs(box, meta_data, ret_runs));
}

bool tl_box_is_dense(const struct tl_box *box, const struct tl_meta_data *meta_data, uint64_t *ret_offset_bytes)
{
    struct tl_box_runs runs;
    *ret_offset_bytes = 0;
    if (is_empty(box)) return true;
    (void)find_runs(box, meta_data, &runs);
    *ret_offset_bytes = runs.first_bytes;
    return runs.count == 1;
}

void tl_box_meta_data(const struct tl_box *box, const struct tl_meta_data *meta_data,
                      struct tl_meta_data *ret_meta_data)
{
    struct tl_error error;
    *ret_meta_data = (struct tl_meta_data){.dtype = meta_data->dtype, .shape.rank = box->rank};
    for (unsigned i = 0; i < box->rank; i++)
        ret_meta_data->shape.dims[i] = box->size[i];
    /* It is no more than the whole. */
    if (tl_shape_size_bytes(meta_data->dtype, &ret_meta_data->shape, &ret_meta_data->size_bytes, &error) != TL_OK)
        ret_meta_data->size_bytes = 0;
}

void tl_box_walk(const struct tl_box_runs *runs, void *whole, uint64_t offset_bytes, uint64_t len_bytes,
                 tl_bytes_fn visit, void *context)
{
    uint64_t place[TL_MAX_RANK] = {0}; /* where the run lies in the outer dimensions */
    uint64_t number = offset_bytes / runs->run_bytes;
    uint64_t skipped_bytes = offset_bytes % runs->run_bytes;
    unsigned char *run = (unsigned char *)whole + runs->first_bytes;
    TL_CHECK(offset_bytes <= runs->count * runs->run_bytes &&
             len_bytes <= runs->count * runs->run_bytes - offset_bytes);
    for (unsigned dim = runs->outer_rank; dim-- > 0; number /= runs->size[dim]) {
        place[dim] = number % runs->size[dim];
        run += place[dim] * runs->stride_bytes[dim];
    }
    while (len_bytes > 0) {
        uint64_t bytes = tl_min_u64(len_bytes, runs->run_bytes - skipped_bytes);
        visit(context, run + skipped_bytes, (size_t)bytes);
        len_bytes -= bytes;
        skipped_bytes = 0;
        for (unsigned dim = runs->outer_rank; dim-- > 0;) {
            run += runs->stride_bytes[dim];
            if (++place[dim] < runs->size[dim]) break;
            run -= runs->size[dim] * runs->stride_bytes[dim];
            place[dim] = 0;
        }
    }
}
