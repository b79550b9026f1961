// SPDX-License-Identifier: Apache-2.0
/* Allocations that no thread waits for: that come, that fail, and that are given up at every moment. */
#include <check.h>
#include <pthread.h>

#include "fakes/fault_alloc.h"

#include "tensor/allocation.c"

#include "base/mailbox.h"
#include "fakes/device_case.h"
#include "fakes/run_suite.h"
#include "tensor/cuda_interface.h"

static const struct tl_meta_data hundred_bytes = {.dtype = TL_U8, .shape = {1, {100}}, .size_bytes = 100};

/* What stands for the loop: closures come one at a time. */
static struct tl_mailbox mailbox;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t came = PTHREAD_COND_INITIALIZER;
static unsigned post_count;

static struct tl_tensor *tensor;
static struct tl_error result;
static unsigned done_count;

static void post(void *loop, struct tl_closure *closure)
{
    ck_assert_ptr_eq(loop, &mailbox);
    ck_assert(!is_driven());
    bool must_wake = tl_mailbox_post(&mailbox, closure);
    ck_assert(!must_wake);
    pthread_mutex_lock(&mutex);
    post_count++;
    pthread_cond_signal(&came);
    pthread_mutex_unlock(&mutex);
}

static void done(void *context, struct tl_tensor *allocated, const struct tl_error *status)
{
    ck_assert_ptr_eq(context, &result);
    tensor = allocated;
    result = *status;
    done_count++;
}

static void setup(void)
{
    setup_cuda();
    tl_mailbox_init(&mailbox);
    ck_assert_int_eq(tl_device_open(gpu0, NULL), TL_OK);
}

static struct tl_allocation *start(const struct tl_meta_data *meta_data)
{
    const struct tl_allocation_options options = {
        .device = gpu0, .meta_data = meta_data, .post = post, .loop = &mailbox, .done = done, .context = &result};
    tl_loop_core_enter();
    struct tl_allocation *allocation = tl_allocation_start(&options);
    tl_loop_core_leave();
    return allocation;
}

static void await_post(void)
{
    pthread_mutex_lock(&mutex);
    while (post_count == 0)
        pthread_cond_wait(&came, &mutex);
    post_count--;
    pthread_mutex_unlock(&mutex);
}

static void run(void)
{
    tl_loop_core_enter();
    (void)tl_mailbox_run(&mailbox, &(struct tl_quota){0});
    tl_loop_core_leave();
}

START_TEST(comes)
{
    const struct tl_meta_data empty = {.dtype = TL_F32, .shape = {1, {0}}};
    ck_assert_ptr_nonnull(start(_i == 0 ? &hundred_bytes : &empty));
    await_post();
    ck_assert_uint_eq(done_count, 0);
    run();
    ck_assert_uint_eq(done_count, 1);
    ck_assert_msg(result.code == TL_OK, "%s", result.message);
    ck_assert_int_eq(tl_tensor_device(tensor).kind, TL_DEVICE_CUDA);
    ck_assert_int_eq(tl_tensor_dtype(tensor), _i == 0 ? TL_U8 : TL_F32);
    ck_assert_uint_eq(tl_tensor_size_bytes(tensor), _i == 0 ? 100 : 0);
    ck_assert(!tl_tensor_is_read_only(tensor));
    if (_i == 0) fill(tensor, 1);
    tl_tensor_put(tensor);
    ck_assert_uint_eq(device_allocations_at_last(), 0);
}
END_TEST

START_TEST(fails)
{
    const struct tl_meta_data huge = {
        .dtype = TL_U8, .shape = {1, {UINT64_C(1) << 50}}, .size_bytes = UINT64_C(1) << 50};
    ck_assert_ptr_nonnull(start(&huge));
    await_post();
    run();
    ck_assert_int_eq(result.code, TL_RESOURCE_EXHAUSTED);
    ck_assert_msg(strstr(result.message, "on gpu:0") != NULL, "%s", result.message);
    ck_assert_ptr_null(tensor);
}
END_TEST

/* What was given back before is free when an allocation fails for lack of memory. */
START_TEST(waits_for_frees)
{
    cuda->fail_call(1, TL_CUDA_NO_MEMORY, false);
    ck_assert_ptr_nonnull(start(&hundred_bytes));
    await_post();
    run();
    ck_assert_str_eq(cuda->failed_call(), "cudaMalloc");
    ck_assert_msg(result.code == TL_OK, "%s", result.message);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(is_given_up_before_it_comes)
{
    struct tl_allocation *allocation;
    for (unsigned i = 0; i < 50; i++) {
        allocation = start(&hundred_bytes);
        tl_allocation_put(allocation);
        run();
    }
    ck_assert_uint_eq(device_allocations_at_last(), 0);
    run();
    ck_assert_uint_eq(device_allocations_at_last(), 0);
    ck_assert_uint_eq(done_count, 0);
}
END_TEST

START_TEST(is_given_up_when_its_closure_is_on_the_way)
{
    struct tl_allocation *allocation = start(&hundred_bytes);
    await_post();
    tl_allocation_put(allocation);
    ck_assert_uint_eq(device_allocations_at_last(), 1);
    run();
    ck_assert_uint_eq(device_allocations_at_last(), 0);
    ck_assert_uint_eq(done_count, 0);
    tl_allocation_put(NULL);
}
END_TEST

START_TEST(no_memory)
{
    fault_arm(1);
    ck_assert_ptr_null(start(&hundred_bytes));
    ck_assert(fault_was_hit());
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("allocation");
    TCase *tcase = tcase_create("allocation");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_loop_test(tcase, comes, 0, 2);
    tcase_add_test(tcase, fails);
    tcase_add_test(tcase, waits_for_frees);
    tcase_add_test(tcase, is_given_up_before_it_comes);
    tcase_add_test(tcase, is_given_up_when_its_closure_is_on_the_way);
    tcase_add_test(tcase, no_memory);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
