// SPDX-License-Identifier: Apache-2.0
/* Copies between host and devices: all bytes, in the order of the caller's streams, beside each other. */
#include <pthread.h>
#include <stdatomic.h>

#include "base/error.h"
#include "fakes/device_case.h"
#include "fakes/run_suite.h"
#include "tensor/device.h"

static struct tl_error error;

static void expect(enum tl_status got, enum tl_status status, const char *text)
{
    ck_assert_int_eq(got, status);
    ck_assert_msg(strstr(error.message, text) != NULL, "%s", error.message);
}

/* A copy on a thread of its own. */
struct copying {
    pthread_t thread;
    struct tl_tensor *to;
    struct tl_tensor *from;
    enum tl_status status;
    struct tl_error error;
    atomic_bool is_over;
};

static void *run_copy(void *argument)
{
    struct copying *copying = argument;
    copying->status = tl_tensor_copy(copying->to, copying->from, &copying->error);
    copying->is_over = true;
    return NULL;
}

static void begin(struct copying *copying, struct tl_tensor *to, struct tl_tensor *from)
{
    *copying = (struct copying){.to = to, .from = from};
    ck_assert_int_eq(pthread_create(&copying->thread, NULL, run_copy, copying), 0);
}

static enum tl_status end(struct copying *copying)
{
    ck_assert_int_eq(pthread_join(copying->thread, NULL), 0);
    return copying->status;
}

static void set_stream(struct tl_tensor *tensor, void *stream)
{
    tl_tensor_set_stream(tensor, (tl_stream)stream);
}

static struct fake_cuda_counts counts(void)
{
    struct fake_cuda_counts counts;
    cuda->get_counts(&counts);
    return counts;
}

/* ------------------------------------------------------------------------------------------------------- bytes -- */

static const uint64_t sizes[] = {1,
                                 4097,
                                 TL_STAGING_BLOCK_BYTES - 1,
                                 TL_STAGING_BLOCK_BYTES,
                                 TL_STAGING_BLOCK_BYTES + 1,
                                 2 * TL_STAGING_BLOCK_BYTES,
                                 4 * TL_STAGING_BLOCK_BYTES + 5};

/* From the host over both devices, and back. */
START_TEST(all_bytes_arrive)
{
    uint64_t size_bytes = sizes[_i];
    uint64_t pieces = (size_bytes + TL_STAGING_BLOCK_BYTES - 1) / TL_STAGING_BLOCK_BYTES;
    cuda->set_seed((uint64_t)_i);
    struct tl_tensor *tensors[] = {bytes_on(host, size_bytes), bytes_on(gpu0, size_bytes), bytes_on(gpu0, size_bytes),
                                   bytes_on(gpu1, size_bytes), bytes_on(host, size_bytes)};
    fill(tensors[0], (unsigned)_i);
    for (int i = 1; i < 5; i++)
        copy(tensors[i], tensors[i - 1]);
    ck_assert(is_filled(tensors[1], (unsigned)_i));
    ck_assert(is_filled(tensors[4], (unsigned)_i));
    ck_assert_uint_eq(counts().copies, 2 * pieces + 2); /* none of the device tensors is copied more than once */
    ck_assert_uint_eq(counts().copied_bytes, 4 * size_bytes);
    for (int i = 0; i < 5; i++)
        tl_tensor_put(tensors[i]);
}
END_TEST

START_TEST(without_bytes)
{
    struct tl_tensor *from = bytes_on(host, 0), *to = bytes_on(gpu0, 0);
    copy(to, from);
    ck_assert_uint_eq(counts().copies, 0);
    tl_tensor_put(from);
    tl_tensor_put(to);
}
END_TEST

START_TEST(with_every_release_of_cuda)
{
    cuda = fake_cuda_open(_i);
    struct tl_tensor *from = bytes_on(host, 100), *middle = bytes_on(gpu0, 100), *to = bytes_on(host, 100);
    fill(from, 9);
    copy(middle, from);
    copy(to, middle);
    ck_assert(is_filled(to, 9));
    const uint64_t size_bytes = 50;
    struct tl_tensor *wrapped = NULL;
    struct tl_tensor_view view = view_of(gpu0, cuda->allocate(0, 50), &size_bytes);
    ck_assert_int_eq(tl_tensor_wrap(&view, &wrapped, &error), TL_OK);
    tl_tensor_put(wrapped);
    tl_tensor_put(from);
    tl_tensor_put(middle);
    tl_tensor_put(to);
}
END_TEST

static enum tl_status gone(void *context, const void *data, uint64_t len_bytes, struct tl_error *ret_error)
{
    (void)data;
    (void)len_bytes;
    unsigned *countdown = context;
    if (*countdown > 0 && --*countdown > 0) return TL_OK;
    return tl_error_set(ret_error, TL_DATA_LOSS, "gone");
}

/* The guard of the source says so before a piece, or at the end. */
START_TEST(a_source_that_is_lost_meanwhile)
{
    uint64_t size_bytes = 3 * TL_STAGING_BLOCK_BYTES;
    struct tl_tensor *from = bytes_on(host, size_bytes), *to = bytes_on(_i < 4 ? gpu0 : host, size_bytes);
    unsigned countdown = _i < 4 ? (unsigned)_i + 1 : 1;
    tl_tensor_set_guard(from, gone, &countdown);
    expect(tl_tensor_copy(to, from, &error), TL_DATA_LOSS, "gone");
    tl_tensor_put(from);
    tl_tensor_put(to);
}
END_TEST

START_TEST(what_cannot_be_copied)
{
    const uint64_t size_bytes = 8, dims[] = {2, 4};
    const struct tl_string text = {"a", 1};
    void *data = cuda->allocate(0, 16);
    struct tl_tensor *a = bytes_on(gpu0, 8), *b = NULL;
    ck_assert_int_eq(tl_tensor_create_on(gpu0, TL_U8, 2, dims, &b, &error), TL_OK);
    expect(tl_tensor_copy(a, b, &error), TL_INVALID_ARGUMENT,
           "a tensor of U8 [2, 4] cannot be copied into one of U8 [8]");
    tl_tensor_put(b);
    ck_assert_int_eq(tl_tensor_create(TL_I8, 1, &size_bytes, &b, &error), TL_OK);
    expect(tl_tensor_copy(a, b, &error), TL_INVALID_ARGUMENT, "I8 [8]");
    tl_tensor_put(b);
    ck_assert_int_eq(tl_tensor_create_dead(&b, &error), TL_OK);
    expect(tl_tensor_copy(a, b, &error), TL_INVALID_ARGUMENT, "no value");
    expect(tl_tensor_copy(b, a, &error), TL_INVALID_ARGUMENT, "read-only or dead");
    tl_tensor_put(b);
    ck_assert_int_eq(tl_tensor_create_strings(0, NULL, &text, &b, &error), TL_OK);
    expect(tl_tensor_copy(a, b, &error), TL_UNIMPLEMENTED, "STRING");
    tl_tensor_put(b);
    expect(tl_tensor_copy(a, a, &error), TL_INVALID_ARGUMENT, "share memory");
    tl_tensor_put(a);
    struct tl_tensor_view view = view_of(gpu0, data, &size_bytes);
    view.read_only = true;
    ck_assert_int_eq(tl_tensor_wrap(&view, &a, &error), TL_OK);
    view.read_only = false;
    view.capacity_bytes = 16;
    view.offset_bytes = 7;
    ck_assert_int_eq(tl_tensor_wrap(&view, &b, &error), TL_OK);
    expect(tl_tensor_copy(b, a, &error), TL_INVALID_ARGUMENT, "share memory");
    expect(tl_tensor_copy(a, b, &error), TL_INVALID_ARGUMENT, "read-only");
    tl_tensor_put(a);
    tl_tensor_put(b);
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- streams -- */

static void fill_by_kernel(void *context)
{
    fill(context, 77);
}

static void note_by_kernel(void *context)
{
    struct tl_tensor *tensor = context;
    ck_assert_int_eq(look(tensor)[0], FAKE_POISON);
}

/* Copies between tensors that no stream has to do with show that copies go on. The tensors are made beforehand, and
 * not given back, because a free waits for every stream. */
static struct tl_tensor *beside, *beside_on_host;
static atomic_bool is_waited_for;

static void prepare_beside(void)
{
    beside = bytes_on(gpu0, 10);
    beside_on_host = bytes_on(host, 10);
    tl_tensor_set_stream(beside, TL_STREAM_NONE);
    copy(beside_on_host, beside); /* pins what copies need, which could wait as well */
}

static void copy_beside(void)
{
    copy(beside_on_host, beside);
    copy(beside, beside_on_host);
}

enum { OWN_STREAM, DEFAULT_STREAM, LEGACY_STREAM, STREAM_OF_THE_THREAD };

static void teardown(void)
{
    if (beside) tl_tensor_put(beside);
    if (beside) tl_tensor_put(beside_on_host);
    teardown_cuda();
}

/* The kernel is in a stream that is held, and the tensor's stream is that one, or one that comes after it. */
static void *launch_held(struct tl_tensor *tensor, int kind, void (*kernel)(void *))
{
    void *stream = kind == LEGACY_STREAM ? (void *)TL_STREAM_LEGACY : cuda->create_stream(0, true);
    cuda->hold(stream, true);
    cuda->launch(stream, kernel, tensor);
    set_stream(tensor, kind == OWN_STREAM ? stream : kind == DEFAULT_STREAM ? NULL : (void *)TL_STREAM_LEGACY);
    return stream;
}

START_TEST(a_source_is_read_after_its_stream)
{
    struct tl_tensor *from = bytes_on(gpu0, 5000), *to = bytes_on(host, 5000);
    struct copying copying;
    prepare_beside();
    void *stream = launch_held(from, _i, fill_by_kernel);
    begin(&copying, to, from);
    copy_beside();
    copy_beside();
    ck_assert(!copying.is_over);
    cuda->hold(stream, false);
    ck_assert_msg(end(&copying) == TL_OK, "%s", copying.error.message);
    ck_assert(is_filled(to, 77));
    tl_tensor_put(from);
    tl_tensor_put(to);
}
END_TEST

START_TEST(a_destination_is_written_after_its_stream)
{
    struct tl_tensor *from = bytes_on(host, 5000), *to = bytes_on(gpu0, 5000);
    struct copying copying;
    fill(from, 5);
    prepare_beside();
    void *stream = launch_held(to, _i, note_by_kernel);
    begin(&copying, to, from);
    copy_beside();
    ck_assert(!copying.is_over);
    cuda->hold(stream, false);
    ck_assert_msg(end(&copying) == TL_OK, "%s", copying.error.message);
    ck_assert(is_filled(to, 5));
    tl_tensor_put(from);
    tl_tensor_put(to);
}
END_TEST

#define WAITING 3 /* each wants two of the four blocks */

START_TEST(copies_that_wait_for_streams_hold_no_blocks)
{
    struct copying copyings[WAITING];
    void *streams[WAITING];
    struct tl_tensor *from[WAITING], *to[WAITING];
    for (int i = 0; i < WAITING; i++) {
        from[i] = bytes_on(gpu0, 2 * TL_STAGING_BLOCK_BYTES);
        to[i] = bytes_on(host, 2 * TL_STAGING_BLOCK_BYTES);
    }
    prepare_beside();
    for (int i = 0; i < WAITING; i++) {
        streams[i] = launch_held(from[i], OWN_STREAM, fill_by_kernel);
        begin(&copyings[i], to[i], from[i]);
    }
    for (int i = 0; i < 50; i++)
        copy_beside();
    for (int i = 0; i < WAITING; i++)
        cuda->hold(streams[i], false);
    for (int i = 0; i < WAITING; i++) {
        ck_assert_msg(end(&copyings[i]) == TL_OK, "%s", copyings[i].error.message);
        ck_assert(is_filled(to[i], 77));
        tl_tensor_put(from[i]);
        tl_tensor_put(to[i]);
    }
}
END_TEST

START_TEST(the_stream_of_the_thread)
{
    struct tl_tensor *from = bytes_on(gpu0, 5000), *to = bytes_on(host, 5000);
    cuda->make_current(0);
    cuda->launch((void *)TL_STREAM_PER_THREAD, fill_by_kernel, from);
    tl_tensor_set_stream(from, TL_STREAM_PER_THREAD);
    copy(to, from);
    ck_assert(is_filled(to, 77));
    tl_tensor_put(from);
    tl_tensor_put(to);
}
END_TEST

static void *wait_in_thread(void *tensor)
{
    struct tl_error own_error;
    ck_assert_msg(tl_tensor_wait(tensor, &own_error) == TL_OK, "%s", own_error.message);
    ck_assert(atomic_exchange(&is_waited_for, true) == false);
    return NULL;
}

START_TEST(waiting_for_a_stream)
{
    struct tl_tensor *tensor = bytes_on(gpu0, 5000), *on_host = bytes_on(host, 5000);
    pthread_t thread;
    prepare_beside();
    void *stream = launch_held(tensor, _i, fill_by_kernel);
    ck_assert_int_eq(pthread_create(&thread, NULL, wait_in_thread, tensor), 0);
    copy_beside();
    copy_beside();
    ck_assert(!atomic_load(&is_waited_for));
    cuda->hold(stream, false);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    tl_tensor_set_stream(tensor, TL_STREAM_NONE);
    copy(on_host, tensor);
    ck_assert(is_filled(on_host, 77));
    ck_assert_int_eq(tl_tensor_wait(tensor, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_wait(on_host, &error), TL_OK);
    tl_tensor_put(tensor);
    tl_tensor_put(on_host);
}
END_TEST

START_TEST(nothing_to_wait_for)
{
    struct tl_tensor *from = bytes_on(gpu0, 5000), *to = bytes_on(host, 5000);
    prepare_beside();
    void *stream = launch_held(from, DEFAULT_STREAM, fill_by_kernel);
    tl_tensor_set_stream(from, TL_STREAM_NONE);
    copy(to, from);
    ck_assert_int_eq(look(to)[4999], FAKE_POISON);
    cuda->hold(stream, false);
    copy_beside();
    tl_tensor_set_stream(from, (tl_stream)stream);
    copy(to, from);
    ck_assert(is_filled(to, 77));
    tl_tensor_put(from);
    tl_tensor_put(to);
}
END_TEST

START_TEST(a_stream_that_is_captured)
{
    struct tl_tensor *from = bytes_on(gpu0, 10), *to = bytes_on(host, 10);
    void *stream = cuda->create_stream(0, true);
    struct fake_cuda_thread thread;
    set_stream(from, stream);
    cuda->begin_capture(stream);
    expect(tl_tensor_copy(to, from, &error), TL_FAILED_PRECONDITION, "is being captured into a graph");
    expect(tl_tensor_copy(from, to, &error), TL_FAILED_PRECONDITION, "is being captured into a graph");
    tl_tensor_set_stream(from, TL_STREAM_DEFAULT); /* would wait for it */
    expect(tl_tensor_copy(to, from, &error), TL_FAILED_PRECONDITION, "is being captured into a graph");
    tl_tensor_set_stream(from, TL_STREAM_NONE);
    copy(to, from);
    ck_assert(cuda->end_capture(stream));
    cuda->get_thread(&thread);
    ck_assert_uint_eq(thread.pushed, 0);
    ck_assert_int_eq(thread.capture_mode, 0);
    tl_tensor_put(from);
    tl_tensor_put(to);
}
END_TEST

START_TEST(a_stream_of_another_device)
{
    struct tl_tensor *from = bytes_on(gpu0, 10), *to = bytes_on(host, 10);
    set_stream(from, cuda->create_stream(1, true));
    expect(tl_tensor_copy(to, from, &error), TL_INVALID_ARGUMENT, "cannot be used on gpu:0");
    tl_tensor_set_stream(from, -2);
    expect(tl_tensor_copy(to, from, &error), TL_INVALID_ARGUMENT, "-2 is not a stream");
    tl_tensor_put(from);
    tl_tensor_put(to);
}
END_TEST

/* -------------------------------------------------------------------------------------------- beside each other -- */

START_TEST(a_free_that_waits_holds_up_no_copy)
{
    struct tl_tensor *busy = bytes_on(gpu0, 10), *freed = bytes_on(gpu0, 10);
    prepare_beside();
    void *stream = launch_held(busy, OWN_STREAM, fill_by_kernel);
    tl_tensor_put(freed); /* waits for the kernel */
    copy_beside();
    copy_beside();
    ck_assert_uint_eq(counts().device_allocations, 3);
    cuda->hold(stream, false);
    await_frees(2); /* the kernel is over */
    tl_tensor_put(busy);
}
END_TEST

START_TEST(a_device_that_breaks_meanwhile)
{
    struct tl_tensor *from = bytes_on(gpu0, 3 * TL_STAGING_BLOCK_BYTES);
    struct tl_tensor *to = bytes_on(host, 3 * TL_STAGING_BLOCK_BYTES);
    struct copying copying;
    prepare_beside();
    copy_beside();
    if (_i == 0) {
        launch_held(from, OWN_STREAM, fill_by_kernel); /* a fence fails */
    } else {
        tl_tensor_set_stream(from, TL_STREAM_NONE);
        cuda->hold(NULL, true); /* a copy that runs fails */
    }
    begin(&copying, to, from);
    cuda->break_device(0, 700);
    ck_assert_int_eq(end(&copying), TL_FAILED_PRECONDITION);
    ck_assert_ptr_nonnull(strstr(copying.error.message, "gpu:0 is lost"));
    tl_tensor_put(from);
    tl_tensor_put(to);
}
END_TEST

/* The copy is made by the other device, whose own streams are sound. */
START_TEST(the_device_of_a_fence_breaks)
{
    struct tl_tensor *from = bytes_on(gpu0, 10), *to = bytes_on(gpu1, 10), *on_host = bytes_on(host, 10);
    struct copying copying;
    prepare_beside();
    launch_held(from, OWN_STREAM, fill_by_kernel);
    begin(&copying, to, from);
    copy_beside();
    cuda->break_device(0, 700);
    ck_assert_int_eq(end(&copying), TL_FAILED_PRECONDITION);
    ck_assert_ptr_nonnull(strstr(copying.error.message, "gpu:0 is lost"));
    copy(on_host, to);
    tl_tensor_put(from);
    tl_tensor_put(to);
    tl_tensor_put(on_host);
}
END_TEST

#define COPIERS 6
#define ROUNDS 8

static void *copy_around(void *argument)
{
    unsigned seed = (unsigned)(uintptr_t)argument;
    for (unsigned round = 0; round < ROUNDS; round++) {
        uint64_t size_bytes = 1 + (uint64_t)(seed * 7919 + round * 104729) % (6 << 20);
        struct tl_tensor *from = bytes_on(host, size_bytes), *to = bytes_on(host, size_bytes);
        struct tl_tensor *first = bytes_on(seed % 2 ? gpu0 : gpu1, size_bytes), *second = bytes_on(gpu0, size_bytes);
        fill(from, seed + round);
        copy(first, from);
        copy(second, first);
        copy(to, second);
        ck_assert(is_filled(to, seed + round));
        tl_tensor_put(from);
        tl_tensor_put(to);
        tl_tensor_put(first);
        tl_tensor_put(second);
    }
    return NULL;
}

START_TEST(many_threads)
{
    pthread_t threads[COPIERS];
    cuda->set_seed((uint64_t)_i);
    for (uintptr_t i = 0; i < COPIERS; i++)
        ck_assert_int_eq(pthread_create(&threads[i], NULL, copy_around, (void *)i), 0);
    for (unsigned i = 0; i < COPIERS; i++)
        ck_assert_int_eq(pthread_join(threads[i], NULL), 0);
    await_frees(0);
    struct fake_cuda_counts now = counts();
    ck_assert_uint_eq(now.host_allocations, 2); /* the blocks of each device, however many want them */
    ck_assert_uint_eq(now.streams, 4);
    ck_assert_uint_le(now.events, 8 * COPIERS);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("device_copy");
    TCase *tcase = tcase_create("device_copy");
    tcase_add_checked_fixture(tcase, setup_cuda, teardown);
    tcase_add_loop_test(tcase, all_bytes_arrive, 0, sizeof(sizes) / sizeof(sizes[0]));
    tcase_add_test(tcase, without_bytes);
    tcase_add_loop_test(tcase, a_source_that_is_lost_meanwhile, 0, 5);
    tcase_add_test(tcase, what_cannot_be_copied);
    tcase_add_loop_test(tcase, a_source_is_read_after_its_stream, OWN_STREAM, STREAM_OF_THE_THREAD);
    tcase_add_loop_test(tcase, waiting_for_a_stream, OWN_STREAM, STREAM_OF_THE_THREAD);
    tcase_add_loop_test(tcase, a_destination_is_written_after_its_stream, OWN_STREAM, STREAM_OF_THE_THREAD);
    tcase_add_test(tcase, copies_that_wait_for_streams_hold_no_blocks);
    tcase_add_test(tcase, the_stream_of_the_thread);
    tcase_add_test(tcase, nothing_to_wait_for);
    tcase_add_test(tcase, a_stream_that_is_captured);
    tcase_add_test(tcase, a_stream_of_another_device);
    tcase_add_test(tcase, a_free_that_waits_holds_up_no_copy);
    tcase_add_loop_test(tcase, a_device_that_breaks_meanwhile, 0, 2);
    tcase_add_test(tcase, the_device_of_a_fence_breaks);
    tcase_add_loop_test(tcase, many_threads, 0, 2);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("releases");
    tcase_add_loop_test(tcase, with_every_release_of_cuda, 11, 14);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
