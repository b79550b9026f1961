// SPDX-License-Identifier: Apache-2.0
/* Deliveries within a worker: from everywhere to everywhere, behind a stream, failing, and stopped at each step. */
#include <check.h>
#include <pthread.h>

#include "fakes/fault_alloc.h"

#include "tensor/delivery.c"

#include "fakes/device_case.h"
#include "fakes/run_suite.h"
#include "tensor/cuda_interface.h"

/* Several blocks, and the last one in part. */
#define SIZE_BYTES (3 * TL_STAGING_BLOCK_BYTES + 777)

static const struct tl_device *const places[] = {&host, &gpu0, &gpu1};

/* What stands for the loop. */
static struct tl_mailbox mailbox;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t came = PTHREAD_COND_INITIALIZER;
static unsigned posts;

static struct tl_delivery *delivery;
static struct tl_tensor *got;
static struct tl_error result;
static unsigned done_count;

static void post(void *loop, struct tl_closure *closure)
{
    ck_assert_ptr_eq(loop, &mailbox);
    pthread_mutex_lock(&mutex);
    bool must_wake = tl_mailbox_post(&mailbox, closure);
    ck_assert(!must_wake);
    posts++;
    pthread_cond_signal(&came);
    pthread_mutex_unlock(&mutex);
}

static void done(void *context, struct tl_tensor *tensor, const struct tl_error *status)
{
    ck_assert_ptr_eq(context, &result);
    got = tensor;
    result = *status;
    done_count++;
}

static void setup(void)
{
    setup_cuda();
    tl_mailbox_init(&mailbox);
    tl_tensor_put(bytes_on(gpu0, 0));
    tl_tensor_put(bytes_on(gpu1, 0));
}

static void start(struct tl_tensor *value, struct tl_tensor *destination, struct tl_device device)
{
    const struct tl_delivery_options options = {.value = value,
                                                .destination = destination,
                                                .device = device,
                                                .post = post,
                                                .loop = &mailbox,
                                                .done = done,
                                                .context = &result};
    tl_loop_core_enter();
    ck_assert(tl_delivery_start(&options, &delivery));
    tl_loop_core_leave();
}

/* Waits for the next step. */
static void run(void)
{
    pthread_mutex_lock(&mutex);
    while (posts == 0)
        pthread_cond_wait(&came, &mutex);
    posts--;
    pthread_mutex_unlock(&mutex);
    tl_loop_core_enter();
    (void)tl_mailbox_run(&mailbox, &(struct tl_quota){0});
    tl_loop_core_leave();
}

static void run_to_the_end(void)
{
    while (done_count == 0)
        run();
    ck_assert_uint_eq(done_count, 1);
}

static void expect_delivered(unsigned seed)
{
    ck_assert_msg(result.code == TL_OK, "%s", result.message);
    ck_assert(is_filled(got, seed));
}

static struct tl_tensor *value_on(struct tl_device device, uint64_t size_bytes)
{
    struct tl_tensor *tensor = bytes_on(device, size_bytes);
    fill(tensor, 5);
    return tensor;
}

/* Shows the tensor behind what the stream holds now. */
static struct tl_tensor *behind(struct tl_tensor *tensor, void *stream)
{
    struct tl_tensor *alias;
    struct tl_device_fence *fence = NULL;
    struct tl_error error;
    tl_tensor_set_stream(tensor, (tl_stream)stream);
    ck_assert_int_eq(tl_tensor_create_alias(tensor, NULL, NULL, &alias, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_record_fence(tensor, &fence, &error), TL_OK);
    tl_tensor_set_fence(alias, fence);
    tl_tensor_put(tensor);
    return alias;
}

START_TEST(to_a_new_tensor)
{
    struct tl_device from = *places[_i / 3], to = *places[_i % 3];
    struct tl_tensor *value = value_on(from, SIZE_BYTES);
    start(value, NULL, to);
    run_to_the_end();
    expect_delivered(5);
    ck_assert_int_eq(tl_tensor_device(got).kind, to.kind);
    ck_assert_int_eq(tl_tensor_device(got).index, to.index);
    ck_assert((got == value) == (_i / 3 == _i % 3));
    tl_tensor_put(got);
    tl_tensor_put(value);
}
END_TEST

START_TEST(to_a_destination)
{
    struct tl_tensor *value = value_on(*places[_i / 3], SIZE_BYTES),
                     *destination = bytes_on(*places[_i % 3], SIZE_BYTES);
    start(value, destination, host);
    run_to_the_end();
    expect_delivered(5);
    ck_assert_ptr_eq(got, destination);
    tl_tensor_put(got);
    tl_tensor_put(destination);
    tl_tensor_put(value);
}
END_TEST

START_TEST(without_bytes)
{
    struct tl_tensor *value = bytes_on(gpu0, 0);
    start(value, NULL, host);
    run_to_the_end();
    expect_delivered(0);
    ck_assert_int_eq(tl_tensor_device(got).kind, TL_DEVICE_HOST);
    tl_tensor_put(got);
    tl_tensor_put(value);
}
END_TEST

static void fill_late(void *context)
{
    fill(context, 9);
}

/* By reference, and as a copy. */
START_TEST(behind_a_stream)
{
    void *stream = cuda->create_stream(0, false);
    struct tl_tensor *tensor = value_on(gpu0, 1000);
    cuda->hold(stream, true);
    cuda->launch(stream, fill_late, tensor);
    struct tl_tensor *value = behind(tensor, stream);
    start(value, NULL, _i == 0 ? gpu0 : host);
    ck_assert(tl_delivery_is_fenced(delivery));
    /* Another one does not wait for it. */
    struct tl_delivery *held = delivery;
    struct tl_tensor *other = value_on(gpu0, 1000);
    start(other, NULL, host);
    run_to_the_end();
    expect_delivered(5);
    tl_tensor_put(got);
    tl_tensor_put(other);
    done_count = 0;
    ck_assert(tl_delivery_is_fenced(held));
    cuda->hold(stream, false);
    run_to_the_end();
    expect_delivered(9);
    ck_assert((got == value) == (_i == 0));
    tl_tensor_put(got);
    tl_tensor_put(value);
}
END_TEST

static void do_nothing(void *context)
{
    ck_assert_ptr_null(context);
}

/* Nothing tells the test when the stream has run, so what runs there does not touch the tensor, which may be gone. */
static struct tl_tensor *at_the_fence(void)
{
    void *stream = cuda->create_stream(0, false);
    struct tl_tensor *tensor = value_on(gpu0, 1000);
    cuda->hold(stream, true);
    cuda->launch(stream, do_nothing, NULL);
    struct tl_tensor *value = behind(tensor, stream);
    start(value, NULL, gpu1);
    ck_assert(tl_delivery_stop(delivery));
    cuda->hold(stream, false);
    return value;
}

static struct tl_tensor *at_the_allocation(void)
{
    struct tl_tensor *value = value_on(host, 1000);
    start(value, NULL, gpu0);
    ck_assert(!tl_delivery_is_fenced(delivery));
    ck_assert(tl_delivery_stop(delivery));
    return value;
}

/* A copy that runs is not stopped. */
static struct tl_tensor *at_the_copy(void)
{
    struct tl_tensor *value = value_on(gpu0, 1000), *destination = bytes_on(host, 1000);
    cuda->hold(NULL, true);
    start(value, destination, host);
    ck_assert(!tl_delivery_stop(delivery));
    cuda->hold(NULL, false);
    run_to_the_end();
    expect_delivered(5);
    tl_tensor_put(got);
    tl_tensor_put(destination);
    done_count = 0;
    return value;
}

static struct tl_tensor *(*const stops[])(void) = {at_the_fence, at_the_allocation, at_the_copy};

START_TEST(stopped)
{
    struct tl_tensor *value = stops[_i]();
    while (device_allocations_at_last() > (tl_tensor_is_on_device(value) ? 1 : 0)) {
        tl_loop_core_enter();
        (void)tl_mailbox_run(&mailbox, &(struct tl_quota){0});
        tl_loop_core_leave();
    }
    ck_assert_uint_eq(done_count, 0);
    ck_assert(!tl_tensor_is_shared(value));
    tl_tensor_put(value);
}
END_TEST

/* Every call of CUDA fails once. */
START_TEST(failing_calls)
{
    for (unsigned number = 1;; number++) {
        struct tl_tensor *value = value_on(gpu1, 1000);
        void *stream = cuda->create_stream(1, false);
        value = behind(value, stream);
        done_count = 0;
        cuda->fail_call(number, TL_CUDA_INVALID_VALUE, false);
        start(value, NULL, gpu0);
        run_to_the_end();
        cuda->fail_call(0, 0, false);
        if (result.code == TL_OK) ck_assert(is_filled(got, 5));
        ck_assert((got == NULL) == (result.code != TL_OK));
        tl_tensor_put(got);
        tl_tensor_put(value);
        if (number == 60) return;
    }
}
END_TEST

START_TEST(no_memory)
{
    struct tl_tensor *value = value_on(host, 10);
    const struct tl_delivery_options options = {
        .value = value, .device = gpu0, .post = post, .loop = &mailbox, .done = done, .context = &result};
    fault_arm(1);
    ck_assert(!tl_delivery_start(&options, &delivery));
    ck_assert(fault_was_hit());
    ck_assert(!tl_tensor_is_shared(value));
    tl_tensor_put(value);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("delivery");
    TCase *tcase = tcase_create("delivery");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_loop_test(tcase, to_a_new_tensor, 1, 9); /* from host to host no device is involved */
    tcase_add_loop_test(tcase, to_a_destination, 1, 9);
    tcase_add_test(tcase, without_bytes);
    tcase_add_loop_test(tcase, behind_a_stream, 0, 2);
    tcase_add_loop_test(tcase, stopped, 0, TL_ARRAY_COUNT(stops));
    tcase_add_test(tcase, failing_calls);
    tcase_add_test(tcase, no_memory);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
