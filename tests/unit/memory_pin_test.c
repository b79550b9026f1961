// SPDX-License-Identifier: Apache-2.0
/* The pool is pinned for copies of devices: its regions and those that it grows by, until nothing can use them. */
#include <semaphore.h>
#include <string.h>
#include <sys/mman.h>

#include "base/clock.h"
#include "base/error.h"
#include "dataplane/memory/memory.h"
#include "fakes/device_case.h"
#include "fakes/log_capture.h"
#include "fakes/region_provider.h"
#include "fakes/run_suite.h"
#include "tensor/device.h"
#include "tensor/piece.h"

#define MIB (UINT64_C(1) << 20)
#define PATIENCE_NS (20 * TL_NS_PER_SEC)

static struct region_provider provider;
static struct tl_memory *memory;
static struct tl_error error;
static sem_t posted;

static const struct tl_memory_options options = {
    .pool_bytes = MIB, .max_pool_bytes = 3 * MIB, .max_cached_bytes = MIB, .max_cached_count = 4};

static unsigned registrations(void)
{
    struct fake_cuda_counts counts;
    cuda->get_counts(&counts);
    return counts.registrations;
}

/* Regions are unpinned on a thread of the device, a moment after they were given up. */
static void await_registrations(unsigned count)
{
    int64_t until_ns = tl_clock_now_ns() + PATIENCE_NS;
    while (registrations() > count && tl_clock_now_ns() < until_ns)
        usleep(100);
    ck_assert_uint_eq(registrations(), count);
}

static void open_memory(void)
{
    region_provider_init(&provider);
    ck_assert_int_eq(sem_init(&posted, 0, 0), 0);
    ck_assert_int_eq(tl_memory_create(&provider.base, &options, &memory, &error), TL_OK);
}

static void setup(void)
{
    setup_cuda();
    ck_assert_int_eq(tl_device_open(gpu0, &error), TL_OK);
    open_memory();
}

static void close_memory(void)
{
    tl_memory_destroy(memory);
    memory = NULL;
    ck_assert_uint_eq(provider.live_count, 0);
}

static void teardown(void)
{
    close_memory();
    await_registrations(0);
}

static struct tl_tensor *take(uint64_t size_bytes)
{
    const struct tl_meta_data bytes = {.dtype = TL_U8, .shape = {1, {size_bytes}}, .size_bytes = size_bytes};
    struct tl_tensor *tensor = NULL;
    enum tl_status status = tl_memory_tensor_create(memory, &bytes, &tensor, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    return tensor;
}

/* Asks as a reactor does, which must not wait. */
static const char *why_not(void)
{
    tl_loop_core_enter();
    const char *reason = tl_memory_why_not_pinned(memory, gpu0);
    tl_loop_core_leave();
    return reason;
}

/* Waits until the pool is pinned, or cannot be; returns the reason. */
static const char *await_end(void)
{
    int64_t until_ns = tl_clock_now_ns() + PATIENCE_NS;
    const char *reason = why_not();
    while (reason != NULL && strstr(reason, "is being pinned") != NULL && tl_clock_now_ns() < until_ns) {
        usleep(100);
        reason = why_not();
    }
    return reason;
}

/* ----------------------------------------------------------------------------------------------------- pinning -- */

/* Nothing is pinned before a device is used. Then all regions are, with what lies in them. */
START_TEST(regions_that_exist)
{
    struct tl_tensor *tensors[3] = {take(MIB), take(MIB), take(100000)};
    struct tl_tensor *other = bytes_on(host, 100);
    ck_assert_uint_eq(registrations(), 0);
    ck_assert(!tl_memory_is_pinned(memory, tensors[0]));
    ck_assert_msg(strstr(why_not(), "is being pinned") != NULL, "%s", why_not());
    ck_assert_ptr_null(await_end());
    ck_assert_uint_eq(registrations(), 3);
    for (unsigned i = 0; i < 3; i++) {
        ck_assert(tl_memory_is_pinned(memory, tensors[i]));
        tl_tensor_put(tensors[i]);
    }
    ck_assert(!tl_memory_is_pinned(memory, other));
    ck_assert_uint_eq(registrations(), 3); /* blocks come and go */
    tl_tensor_put(other);
}
END_TEST

static void post(void *context, struct tl_closure *closure)
{
    (void)context;
    (void)closure;
    sem_post(&posted);
}

static void ignore(struct tl_closure *closure)
{
    (void)closure;
}

/* A region that is added later is pinned before its blocks are given: to callers that can wait, and to others. */
START_TEST(regions_that_are_added)
{
    const struct tl_meta_data bytes = {.dtype = TL_U8, .shape = {1, {MIB}}, .size_bytes = MIB};
    struct tl_memory_wait wait = {.closure.run = ignore, .post = post};
    struct tl_tensor *tensors[3] = {NULL};
    ck_assert_ptr_null(await_end());
    for (unsigned i = 0; i < 2; i++) {
        tensors[i] = take(MIB);
        ck_assert_uint_eq(registrations(), i + 1);
        ck_assert(tl_memory_is_pinned(memory, tensors[i]));
    }
    ck_assert_int_eq(tl_memory_await(memory, &wait, MIB, &error), TL_OK);
    while (sem_wait(&posted) != 0) {
    }
    ck_assert_int_eq(tl_memory_tensor_take(memory, &bytes, &wait, &tensors[2], &error), TL_OK);
    ck_assert(tl_memory_is_pinned(memory, tensors[2]));
    ck_assert_ptr_null(why_not());
    ck_assert_uint_eq(registrations(), 3);
    for (unsigned i = 0; i < 3; i++)
        tl_tensor_put(tensors[i]);
}
END_TEST

/* A region that the pool gives up is unpinned before its memory is unmapped, which the double checks. */
START_TEST(a_region_is_given_up)
{
    ck_assert_ptr_null(await_end());
    struct tl_tensor *tensors[3] = {take(MIB), take(MIB), take(MIB)};
    ck_assert_uint_eq(registrations(), 3);
    for (unsigned i = 0; i < 3; i++)
        tl_tensor_put(tensors[i]);
    struct tl_tensor *large = take(2 * MIB); /* in place of two regions */
    ck_assert(tl_memory_is_pinned(memory, large));
    await_registrations(2);
    tl_tensor_put(large);
}
END_TEST

static void notify(void *context, struct tl_piece *piece, const struct tl_error *status)
{
    (void)context;
    (void)piece;
    (void)status;
    ck_abort_msg("it was given up");
}

/* The memory ends while a device copies into a block that its holder has given back: the copy has the block until it is
 * over, and the region goes with it. */
START_TEST(closed_while_a_copy_runs)
{
    ck_assert_ptr_null(await_end());
    struct tl_tensor *value = bytes_on(gpu0, 5000), *block = take(5000);
    unsigned char *bytes = tl_tensor_data(block);
    const struct tl_piece_options piece_options = {
        .tensor = value, .len_bytes = 5000, .host = block, .post = post, .notify = notify};
    fill(value, 3);
    cuda->hold(NULL, true);
    struct tl_piece *piece = tl_piece_read(&piece_options);
    usleep(20000); /* the copy is in its stream */
    tl_piece_put(piece);
    tl_tensor_put(block);
    close_memory();
    usleep(20000);
    ck_assert_uint_eq(registrations(), 1);
    ck_assert_int_eq(msync(bytes - (uintptr_t)bytes % 4096, 4096, MS_ASYNC), 0); /* it is mapped */
    cuda->hold(NULL, false);
    await_registrations(0);
    tl_tensor_put(value);
    await_frees(0);
    open_memory(); /* for the end of the test */
}
END_TEST

/* A tensor that a program keeps outlives the memory; putting it in a thread that drives a loop waits for nothing. */
START_TEST(a_tensor_outlives_the_memory)
{
    struct tl_tensor *tensor = take(5000);
    ck_assert_ptr_null(await_end());
    close_memory();
    memset(tl_tensor_data(tensor), 1, 5000);
    ck_assert_uint_eq(registrations(), 1);
    tl_loop_core_enter();
    tl_tensor_put(tensor);
    tl_loop_core_leave();
    await_registrations(0);
    open_memory(); /* for the end of the test */
}
END_TEST

/* The memory ends right after the first call. */
START_TEST(closed_while_it_is_pinned)
{
    struct tl_tensor *tensors[3] = {take(MIB), take(MIB), take(MIB)};
    (void)why_not();
    usleep((useconds_t)_i * 200);
    for (unsigned i = 0; i < 3; i++)
        tl_tensor_put(tensors[i]);
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- failures -- */

/* The reason is logged once; the regions that are pinned serve, and so do the others. */
START_TEST(a_region_cannot_be_pinned)
{
    log_capture_begin();
    bool is_the_first = _i == 0;
    if (!is_the_first) ck_assert_ptr_null(await_end());
    struct tl_tensor *first = take(MIB);
    cuda->fail_call(1, 2, false);
    struct tl_tensor *second = is_the_first ? NULL : take(MIB);
    const char *reason = await_end();
    ck_assert_ptr_nonnull(reason);
    ck_assert_msg(strstr(reason, "pinning 1048576 bytes of the host failed on gpu:0") != NULL, "%s", reason);
    ck_assert_int_eq(tl_memory_is_pinned(memory, first), !is_the_first);
    struct tl_tensor *third = take(MIB);
    ck_assert(!tl_memory_is_pinned(memory, third));
    if (second) ck_assert(!tl_memory_is_pinned(memory, second));
    ck_assert_ptr_eq(why_not(), reason);
    ck_assert_uint_eq(registrations(), !is_the_first);
    tl_tensor_put(first);
    tl_tensor_put(second);
    tl_tensor_put(third);
    close_memory(); /* its thread has written the log */
    ck_assert_uint_eq(log_capture_count("memory is not pinned for GPUs"), 1);
    open_memory();
}
END_TEST

static bool is_unpinning_failed(void)
{
    const char *failed = cuda->failed_call();
    return failed != NULL && strcmp(failed, "cudaHostUnregister") == 0;
}

/* Each call of CUDA fails once: while the pool is pinned, grows and closes, nothing else fails, and nothing is left,
 * unless CUDA does not let go of it. */
START_TEST(a_call_fails_once)
{
    bool was_hit = true;
    unsigned number = 0, left = 0;
    while (was_hit) {
        cuda->fail_call(++number, 999, false);
        (void)await_end();
        struct tl_tensor *tensors[3] = {take(MIB), take(MIB), take(5000)};
        for (unsigned i = 0; i < 3; i++)
            tl_tensor_put(tensors[i]);
        tl_tensor_put(take(2 * MIB));
        close_memory();
        int64_t until_ns = tl_clock_now_ns() + PATIENCE_NS;
        while (registrations() != left + is_unpinning_failed() && tl_clock_now_ns() < until_ns)
            usleep(100);
        left += is_unpinning_failed();
        was_hit = cuda->failed_call() != NULL;
        cuda->fail_call(0, 0, false);
        ck_assert_uint_eq(registrations(), left);
        open_memory();
    }
    ck_assert_uint_eq(number, 9); /* each of four regions is pinned and unpinned */
    ck_assert_uint_gt(left, 0);   /* how many differs: the last is pinned before or after two are unpinned */
}
END_TEST

/* A device that is lost does not let go of its memory, which stays mapped; the next pool is not pinned. */
START_TEST(lost_device)
{
    struct tl_tensor *tensor = take(5000);
    void *address = tl_tensor_data(tensor);
    ck_assert_ptr_null(await_end());
    cuda->break_device(0, 700);
    tl_tensor_put(tensor);
    close_memory();
    ck_assert_int_eq(tl_device_open(gpu1, &error), TL_OK);
    usleep(50000);
    ck_assert_int_eq(msync(address, 4096, MS_ASYNC), 0);
    open_memory();
    const char *reason = await_end();
    ck_assert_msg(reason != NULL && strstr(reason, "gpu:0 is lost") != NULL, "%s", reason);
    ck_assert(!tl_memory_is_pinned(memory, tensor = take(5000)));
    tl_tensor_put(tensor);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("memory_pin");
    TCase *tcase = tcase_create("memory_pin");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, regions_that_exist);
    tcase_add_test(tcase, regions_that_are_added);
    tcase_add_test(tcase, a_region_is_given_up);
    tcase_add_test(tcase, closed_while_a_copy_runs);
    tcase_add_test(tcase, a_tensor_outlives_the_memory);
    tcase_add_loop_test(tcase, closed_while_it_is_pinned, 0, 10);
    tcase_add_loop_test(tcase, a_region_cannot_be_pinned, 0, 2);
    tcase_add_test(tcase, lost_device);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("failing_calls");
    tcase_add_checked_fixture(tcase, setup, close_memory);
    tcase_add_test(tcase, a_call_fails_once);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
