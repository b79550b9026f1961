// SPDX-License-Identifier: Apache-2.0
/* Memory of devices when the host has none left. */
#include <check.h>

#include "fakes/fault_alloc.h"

#include "tensor/cuda_memory.c"

#include "fakes/device_case.h"
#include "fakes/run_suite.h"

static struct tl_error error;
static unsigned released_count;

static void release(void *data, void *context)
{
    (void)data;
    (void)context;
    released_count++;
}

static enum tl_status try_create(struct tl_device_memory **ret_memory)
{
    return tl_device_memory_create(gpu0, 100, ret_memory, &error);
}

static enum tl_status try_wrap(struct tl_device_memory **ret_memory)
{
    static void *data;
    if (!data) data = cuda->allocate(0, 100);
    return tl_device_memory_wrap(gpu0, data, 100, release, NULL, ret_memory, &error);
}

static enum tl_status (*const attempts[])(struct tl_device_memory **) = {try_create, try_wrap};

START_TEST(out_of_memory)
{
    struct tl_device_memory *memory = NULL;
    struct fake_cuda_counts counts;
    tl_tensor_put(bytes_on(gpu0, 0)); /* opens the device, which is kept */
    for (unsigned n = 1; !memory; n++) {
        fault_arm(n);
        enum tl_status status = attempts[_i](&memory);
        if (!fault_was_hit()) {
            ck_assert_uint_gt(n, 1);
            ck_assert_msg(status == TL_OK, "%s", error.message);
            break;
        }
        ck_assert_int_eq(status, TL_RESOURCE_EXHAUSTED);
        ck_assert_ptr_null(memory);
        cuda->get_counts(&counts);
        ck_assert_uint_eq(counts.device_allocations, 0);
        ck_assert_uint_eq(released_count, 0);
    }
    tl_device_memory_destroy(memory);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("device_faults");
    TCase *tcase = tcase_create("device_faults");
    tcase_add_checked_fixture(tcase, setup_cuda, NULL);
    tcase_add_loop_test(tcase, out_of_memory, 0, TL_ARRAY_COUNT(attempts));
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
