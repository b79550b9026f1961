// SPDX-License-Identifier: Apache-2.0
/*
 * The workloads of tl_groups. Those whose sizes are spread are click-through-rate models: most tensors are small, a few
 * have tens of kilobytes. Wide & Deep has the 26 columns of categories of the Criteo data with 16 values for each id;
 * columns with fewer categories than a batch has examples ask for each category once.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/bench/groups/groups.h"

/* Sizes are multiples of a unit; the smallest one is so many units. */
#define UNIT_BYTES 4
#define UNIT_COUNT 4
#define COLUMN_TENSORS 4 /* tensors with the same column in their key */
#define BATCH_COUNT 128
#define EMBEDDING_VALUES 16

const struct groups_workload groups_workloads[] = {
    {"ctr", "fetch", "ctr", 2000, 6250.0, 21123772, true},
    {"ctr-small", "fetch", "cts", 2000, 159.5, 943764, true},
    {"4096", "fetch", "4ki", 1000, 0, 1000 * 4096, false},
    {"256", "fetch", "256", 1000, 0, 1000 * 256, false},
    {"keys-2000", "keys-2000", "key", 2000, 0, 2000 * 256, false},
    {"keys-100000", "keys-100000", "key", 100000, 0, 100000 * 256, false},
};
const size_t groups_workload_count = GROUPS_COUNT(groups_workloads);

/* Source: Steele, Lea, Flood, Fast splittable pseudorandom number generators, 2014. */
static uint64_t splitmix64(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static uint64_t spread_size(double span, uint64_t *state)
{
    double u = (double)(splitmix64(state) >> 11) / 9007199254740992.0; /* 2^53 */
    return UNIT_BYTES * (uint64_t)llround(UNIT_COUNT * pow(span, u));
}

uint64_t *groups_sizes(const struct groups_workload *workload)
{
    uint64_t *sizes = groups_allocate(workload->count, sizeof(*sizes));
    uint64_t state = 1, total = 0;
    for (size_t i = 0; i < workload->count; i++) {
        sizes[i] = workload->span > 0 ? spread_size(workload->span, &state) : workload->total_bytes / workload->count;
        total += sizes[i];
    }
    if (total != workload->total_bytes) {
        char reason[96];
        snprintf(reason, sizeof(reason), "its sizes are %" PRIu64 " bytes together instead of %" PRIu64, total,
                 workload->total_bytes);
        groups_die(workload->name, reason);
    }
    return sizes;
}

void groups_key(const struct groups_workload *workload, size_t index, char ret_key[GROUPS_KEY_BYTES])
{
    snprintf(ret_key, GROUPS_KEY_BYTES, "%s/column-%03zu/%04zu", workload->prefix, index / COLUMN_TENSORS, index);
}

/* --------------------------------------------------------------------------------------------------- Wide & Deep -- */

struct shape {
    enum tl_dtype dtype;
    unsigned rank;
    uint64_t dims[2];
};

static const uint64_t layer_widths[] = {429, 100, 75, 50, 25, 1};

static uint64_t row_count(size_t column)
{
    static const uint64_t small[WIDE_DEEP_COLUMN_COUNT] = {
        [5] = 24, [8] = 3, [13] = 27, [16] = 10, [19] = 4, [21] = 18, [22] = 15, [24] = 105};
    return small[column] > 0 ? small[column] : BATCH_COUNT;
}

static struct shape shape_down(size_t place)
{
    if (place < WIDE_DEEP_COLUMN_COUNT) return (struct shape){TL_F32, 2, {row_count(place), EMBEDDING_VALUES}};
    if (place < WIDE_DEEP_EMBEDDING_COUNT)
        return (struct shape){TL_F32, 2, {row_count(place - WIDE_DEEP_COLUMN_COUNT), 1}};
    size_t dense = place - WIDE_DEEP_EMBEDDING_COUNT, layer = dense / 2;
    if (dense % 2 == 0) return (struct shape){TL_F32, 2, {layer_widths[layer], layer_widths[layer + 1]}};
    return (struct shape){TL_F32, 1, {layer_widths[layer + 1]}};
}

static struct shape shape_up(size_t place)
{
    if (place < WIDE_DEEP_COLUMN_COUNT) return (struct shape){TL_I64, 1, {row_count(place)}};
    return shape_down(place - WIDE_DEEP_COLUMN_COUNT);
}

static void check_shape(const struct tl_tensor *tensor, struct shape shape, const char *what)
{
    bool is_right = tl_tensor_dtype(tensor) == shape.dtype && tl_tensor_rank(tensor) == shape.rank;
    for (unsigned i = 0; is_right && i < shape.rank; i++)
        is_right = tl_tensor_dims(tensor)[i] == shape.dims[i];
    if (!is_right) groups_die(what, "the tensor that was received has another type or shape than that which was sent");
}

void wide_deep_check_up(const struct tl_tensor *tensor, size_t place)
{
    check_shape(tensor, shape_up(place), "ids or gradients");
}

void wide_deep_check_down(const struct tl_tensor *tensor, size_t place)
{
    check_shape(tensor, shape_down(place), "embeddings or dense layers");
}

uint64_t wide_deep_up_seed(size_t worker, size_t place)
{
    return (worker + 1) * 1000 + place;
}

uint64_t wide_deep_down_seed(size_t worker, size_t place)
{
    if (place >= WIDE_DEEP_EMBEDDING_COUNT) return place; /* the dense layers are the same for all workers */
    return (worker + 1) * 10000 + place;
}

struct tl_tensor *wide_deep_create_up(size_t worker, size_t place)
{
    struct shape shape = shape_up(place);
    return groups_create_tensor(shape.dtype, shape.rank, shape.dims, wide_deep_up_seed(worker, place));
}

struct tl_tensor *wide_deep_create_down(size_t worker, size_t place)
{
    struct shape shape = shape_down(place);
    return groups_create_tensor(shape.dtype, shape.rank, shape.dims, wide_deep_down_seed(worker, place));
}

void wide_deep_up_key(size_t place, char ret_key[GROUPS_KEY_BYTES])
{
    if (place < WIDE_DEEP_COLUMN_COUNT)
        snprintf(ret_key, GROUPS_KEY_BYTES, "wide-deep/ids/%02zu", place);
    else
        snprintf(ret_key, GROUPS_KEY_BYTES, "wide-deep/gradient/%02zu", place - WIDE_DEEP_COLUMN_COUNT);
}

void wide_deep_down_key(size_t worker, size_t place, char ret_key[GROUPS_KEY_BYTES])
{
    if (place < WIDE_DEEP_EMBEDDING_COUNT)
        snprintf(ret_key, GROUPS_KEY_BYTES, "wide-deep/%zu/embedding/%02zu", worker, place);
    else
        snprintf(ret_key, GROUPS_KEY_BYTES, "wide-deep/dense/%02zu", place - WIDE_DEEP_EMBEDDING_COUNT);
}
