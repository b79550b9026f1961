// SPDX-License-Identifier: Apache-2.0
/* What the tests of devices share: the double of CUDA 12 where no loop may call it, and tensors of bytes. */
#ifndef FAKES_DEVICE_CASE_H
#define FAKES_DEVICE_CASE_H

#include <check.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "base/loop_core.h"
#include "fakes/cuda/fake_cuda.h"
#include "fakes/pattern.h"
#include "tensor/device.h"
#include "tensor/tensor.h"

static const struct tl_device host = {.kind = TL_DEVICE_HOST};
static const struct tl_device gpu0 = {.kind = TL_DEVICE_CUDA, .index = 0};
static const struct tl_device gpu1 = {.kind = TL_DEVICE_CUDA, .index = 1};
static const struct fake_cuda *cuda;

static inline bool is_driven(void)
{
    return tl_loop_core_is_driven_here();
}

static inline void setup_cuda(void)
{
    if (cuda) return; /* by an earlier test of this process */
    cuda = fake_cuda_open(12);
    cuda->set_forbidden(is_driven);
}

/* Waits until the library has no more than so many allocations on devices: it frees them on a thread of its own. */
static inline void await_frees(unsigned device_allocations)
{
    struct fake_cuda_counts counts;
    for (cuda->get_counts(&counts); counts.device_allocations > device_allocations; cuda->get_counts(&counts))
        usleep(1000);
    ck_assert_uint_eq(counts.device_allocations, device_allocations);
}

/* Waits until nothing is left of memory that processes can map. */
static inline void await_unmaps(void)
{
    struct fake_cuda_counts counts;
    for (cuda->get_counts(&counts); counts.reservations + counts.handles > 0; cuda->get_counts(&counts))
        usleep(1000);
    ck_assert_uint_eq(counts.mappings, 0);
}

/* The end of a test that gives everything back. */
static inline void teardown_cuda(void)
{
    await_frees(0);
    await_unmaps();
}

static inline struct tl_tensor *bytes_on(struct tl_device device, uint64_t size_bytes)
{
    struct tl_tensor *tensor = NULL;
    struct tl_error error;
    enum tl_status status = tl_tensor_create_on(device, TL_U8, 1, &size_bytes, &tensor, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    return tensor;
}

/* Wraps memory of a device that the test has allocated. */
static inline struct tl_tensor_view view_of(struct tl_device device, void *data, const uint64_t *size_bytes)
{
    return (struct tl_tensor_view){.size_bytes = sizeof(struct tl_tensor_view),
                                   .dtype = TL_U8,
                                   .rank = 1,
                                   .dims = size_bytes,
                                   .device = device,
                                   .data = data,
                                   .capacity_bytes = *size_bytes};
}

/* The bytes of a tensor where the test may look at them. */
static inline unsigned char *look(const struct tl_tensor *tensor)
{
    if (tl_tensor_device(tensor).kind == TL_DEVICE_HOST) return tl_tensor_data(tensor);
    return cuda->view(tl_tensor_data(tensor));
}

static inline void fill(struct tl_tensor *tensor, unsigned seed)
{
    pattern_fill(look(tensor), tl_tensor_size_bytes(tensor), seed);
}

static inline bool is_filled(const struct tl_tensor *tensor, unsigned seed)
{
    return pattern_is(look(tensor), tl_tensor_size_bytes(tensor), seed);
}

/* What there is on the device, once all that was asked for and given back before is done: an allocation for which there
 * is no memory waits for that. */
static inline unsigned device_allocations_at_last(void)
{
    const uint64_t huge = UINT64_C(1) << 50;
    struct fake_cuda_counts counts;
    struct tl_tensor *tensor;
    ck_assert_int_eq(tl_tensor_create_on(gpu0, TL_U8, 1, &huge, &tensor, NULL), TL_RESOURCE_EXHAUSTED);
    cuda->get_counts(&counts);
    return counts.device_allocations;
}

static inline void copy(struct tl_tensor *to, const struct tl_tensor *from)
{
    struct tl_error error;
    enum tl_status status = tl_tensor_copy(to, from, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
}

/* Every pinned block of the device is free, at once or soon. */
static inline void check_blocks(struct tl_device device)
{
    void *blocks[TL_STAGING_BLOCKS];
    struct tl_tensor *from = bytes_on(device, 1), *to = bytes_on(host, 1);
    copy(to, from); /* they are pinned from here on */
    tl_tensor_put(from);
    tl_tensor_put(to);
    for (unsigned i = 0; i < TL_STAGING_BLOCKS; i++) {
        for (unsigned n = 0; n < 60000 && (blocks[i] = tl_device_staging_try(device)) == NULL; n++)
            usleep(1000);
        ck_assert_ptr_nonnull(blocks[i]);
    }
    ck_assert_ptr_null(tl_device_staging_try(device));
    for (unsigned i = 0; i < TL_STAGING_BLOCKS; i++)
        tl_device_staging_put(device, blocks[i], false);
}

#endif
