// SPDX-License-Identifier: Apache-2.0
/* Opening a device, and fences, when the host has no memory or no thread left, or another device is being opened. */
#include <check.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

#include "fakes/fault_alloc.h"

static int fault_pthread_create(pthread_t *ret_thread, const pthread_attr_t *attributes, void *(*run)(void *argument),
                                void *argument)
{
    return fault_is_due() ? EAGAIN : pthread_create(ret_thread, attributes, run, argument);
}

#define pthread_create fault_pthread_create
#include "base/thread.c"
#undef pthread_create
#define cuda functions_of_cuda
#define look look_at_device
#include "tensor/cuda_device.c"
#undef cuda
#undef look

#include "fakes/device_case.h"
#include "fakes/run_suite.h"

static struct tl_error error;

static void expect_failure(enum tl_status status)
{
    ck_assert_msg(status == TL_RESOURCE_EXHAUSTED, "%d: %s", status, status != TL_OK ? error.message : "");
}

/* Memory for the device, and its threads. */
START_TEST(a_device_cannot_be_opened)
{
    struct tl_device_memory *memory = NULL;
    unsigned n;
    for (n = 1; !memory; n++) {
        fault_arm(n);
        enum tl_status status = tl_device_memory_create(gpu0, 1, &memory, &error);
        if (!fault_was_hit()) {
            ck_assert_msg(status == TL_OK, "%s", error.message);
        } else {
            expect_failure(status);
            ck_assert_ptr_null(memory);
        }
    }
    ck_assert_uint_gt(n, 4);
    tl_device_memory_destroy(memory);
}
END_TEST

/* The same for memory that is wrapped: its release thread is one more. */
START_TEST(memory_cannot_be_wrapped)
{
    struct tl_device_memory *memory = NULL;
    void *data = cuda->allocate(0, 100);
    tl_tensor_put(bytes_on(gpu0, 0));
    fault_arm(1);
    expect_failure(tl_device_memory_wrap(gpu0, data, 100, (tl_release_fn)abort, NULL, &memory, &error));
    ck_assert(fault_was_hit());
    ck_assert_ptr_null(memory);
    ck_assert_int_eq(tl_device_memory_wrap(gpu0, data, 100, NULL, NULL, &memory, &error), TL_OK);
    tl_device_memory_destroy(memory);
}
END_TEST

START_TEST(a_fence_without_memory)
{
    struct tl_device_fence *fence = NULL;
    tl_tensor_put(bytes_on(gpu0, 0));
    fault_arm(1);
    expect_failure(tl_device_fence_record(gpu0, TL_STREAM_DEFAULT, &fence, &error));
    ck_assert(fault_was_hit());
    ck_assert_ptr_null(fence);
    ck_assert_int_eq(tl_device_fence_record(gpu0, TL_STREAM_DEFAULT, &fence, &error), TL_OK);
    tl_device_fence_put(fence);
}
END_TEST

/* In the child no thread has the mutex that a thread of the parent held. */
START_TEST(a_fence_in_a_forked_process)
{
    struct tl_device_fence *fence = NULL;
    int status;
    ck_assert_int_eq(tl_device_fence_record(gpu0, TL_STREAM_DEFAULT, &fence, &error), TL_OK);
    lock(&fence->device->mutex);
    pid_t child = fork();
    if (child == 0) {
        (void)signal(SIGALRM, SIG_DFL);
        alarm(10);
        tl_device_fence_put(fence);
        _exit(0);
    }
    unlock(&fence->device->mutex);
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%x", (unsigned)status);
    tl_device_fence_put(fence);
}
END_TEST

/* A request for a block that is taken back before it is made is not in a list. */
START_TEST(a_block_that_was_not_asked_for)
{
    struct tl_staging_wait wait = {.device = gpu0};
    tl_list_init(&wait.link);
    tl_tensor_put(bytes_on(gpu0, 0));
    ck_assert(!tl_device_staging_cancel(&wait));
}
END_TEST

static void *take_blocks(void *ret_block)
{
    void *blocks[2];
    unsigned count;
    struct tl_error take_error;
    ck_assert_int_eq(tl_device_staging_take(gpu0, blocks, &count, &take_error), TL_OK);
    ck_assert_uint_eq(count, 1);
    *(void **)ret_block = blocks[0];
    return NULL;
}

static void note_block(struct tl_staging_wait *wait, void *block, const struct tl_error *status)
{
    (void)wait;
    ck_assert_int_eq(status->code, TL_OK);
    tl_device_staging_put(gpu0, block, false);
}

/* A caller that waits for a block has its turn before requests that come later, of which there may always be one. */
START_TEST(blocks_go_to_the_first)
{
    struct tl_tensor *tensor = bytes_on(gpu0, 1), *on_host = bytes_on(host, 1);
    struct tl_staging_wait later = {.device = gpu0, .ready = note_block};
    struct tl_cuda_device *device = tl_cuda_device_of(gpu0);
    void *blocks[TL_STAGING_BLOCKS], *taken = NULL;
    pthread_t thread;
    bool is_waiting = false;
    copy(on_host, tensor); /* pins the blocks */
    for (unsigned i = 0; i < TL_STAGING_BLOCKS; i++)
        ck_assert_ptr_nonnull(blocks[i] = tl_device_staging_try(gpu0));
    ck_assert_int_eq(pthread_create(&thread, NULL, take_blocks, &taken), 0);
    while (!is_waiting) {
        usleep(1000);
        lock(&device->mutex);
        is_waiting = !tl_list_is_empty(&device->staging_waits);
        unlock(&device->mutex);
    }
    tl_list_init(&later.link);
    tl_device_staging_request(&later);
    tl_device_staging_put(gpu0, blocks[0], false);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    ck_assert_ptr_eq(taken, blocks[0]);
    ck_assert(tl_device_staging_cancel(&later)); /* it still waits */
    for (unsigned i = 0; i < TL_STAGING_BLOCKS; i++)
        tl_device_staging_put(gpu0, blocks[i], false);
    tl_tensor_put(tensor);
    tl_tensor_put(on_host);
}
END_TEST

/* A copy needs an event, which is made of memory. */
START_TEST(a_copy_without_memory)
{
    struct tl_tensor *tensor = bytes_on(gpu0, 10), *on_host = bytes_on(host, 10);
    tl_tensor_set_stream(tensor, TL_STREAM_NONE);
    fault_arm(1);
    ck_assert_int_ne(tl_tensor_copy(on_host, tensor, &error), TL_OK);
    ck_assert(fault_was_hit());
    ck_assert_int_eq(error.code, TL_RESOURCE_EXHAUSTED);
    copy(on_host, tensor);
    tl_tensor_put(tensor);
    tl_tensor_put(on_host);
}
END_TEST

/* Opening a device takes long, and a broken one for ever. */
START_TEST(another_device_is_being_opened)
{
    struct tl_tensor *tensor = bytes_on(gpu0, 10), *on_host = bytes_on(host, 10);
    lock(&opening);
    copy(on_host, tensor);
    tl_tensor_put(bytes_on(gpu0, 10));
    unlock(&opening);
    tl_tensor_put(tensor);
    tl_tensor_put(on_host);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("device_open");
    TCase *tcase = tcase_create("device_open");
    tcase_add_checked_fixture(tcase, setup_cuda, teardown_cuda);
    tcase_add_test(tcase, a_device_cannot_be_opened);
    tcase_add_test(tcase, memory_cannot_be_wrapped);
    tcase_add_test(tcase, a_fence_without_memory);
    tcase_add_test(tcase, a_fence_in_a_forked_process);
    tcase_add_test(tcase, a_block_that_was_not_asked_for);
    tcase_add_test(tcase, blocks_go_to_the_first);
    tcase_add_test(tcase, a_copy_without_memory);
    tcase_add_test(tcase, another_device_is_being_opened);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
