// SPDX-License-Identifier: Apache-2.0
/*
 * Values that go from device to device over local providers (gpu-ipc): two engines in this process, of which the one
 * imports what the other has exported. What is copied, how often, and what is left behind.
 */
#include <check.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "fakes/ipc_case.h"
#include "fakes/run_suite.h"

static void close_conns(void)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "ended by the test");
    if (asker->conn != NULL) tl_conn_close(asker->conn, &reason);
    if (owner->conn != NULL) tl_conn_close(owner->conn, &reason);
}

/* ------------------------------------------------------------------------------------------------------ copies -- */

/* One copy, into the memory of either device; a value in the same memory is not imported again. */
START_TEST(memory_of_the_library)
{
    const struct tl_device device = _i == 0 ? gpu0 : gpu1;
    open_pair();
    struct tl_tensor *value = value_on(gpu0, LARGE_BYTES, 1);
    struct fake_cuda_counts before = counts();
    for (uint64_t step = 1; step <= 3; step++) {
        engine_side_send(owner, "key", step, tl_tensor_get(value));
        start(device, step);
        expect(1, TL_PATH_GPU_IPC);
        ck_assert_int_eq(tl_tensor_device(ask.fetch.destination).index, device.index);
        engine_ask_fini(&ask);
    }
    ck_assert_uint_eq(counts().copies, before.copies + 3);
    ck_assert_uint_eq(counts().imports, before.imports + 1);
    ck_assert_uint_eq(engine_side_stats(asker).bytes_bounced + engine_side_stats(owner).bytes_bounced, 0);
    ck_assert_uint_eq(engine_side_stats(asker).memory_copied, 3);
    ck_assert_uint_eq(engine_side_values(owner), 0);
    tl_tensor_put(value);
}
END_TEST

static unsigned released_count;
static bool is_small; /* the kind of other memory */

static void release(void *data, void *context)
{
    (void)context;
    cuda->free(data);
    __atomic_fetch_add(&released_count, 1, __ATOMIC_SEQ_CST);
}

/* Small memory of the library, or memory of the program: it is copied on its device first. */
static struct tl_tensor *other_value(unsigned seed)
{
    const uint64_t size_bytes = LARGE_BYTES;
    struct tl_tensor *tensor = NULL;
    if (is_small) return value_on(gpu0, SMALL_BYTES, seed);
    struct tl_tensor_view view = view_of(gpu0, cuda->allocate(0, size_bytes), &size_bytes);
    view.release = release;
    ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, NULL), TL_OK);
    fill(tensor, seed);
    return tensor;
}

START_TEST(other_memory)
{
    is_small = _i == 1;
    open_pair();
    struct fake_cuda_counts before = counts();
    for (unsigned step = 1; step <= 3; step++) {
        engine_side_send(owner, "key", step, other_value(step));
        start(gpu0, step);
        expect(step, TL_PATH_GPU_IPC);
        engine_ask_fini(&ask);
    }
    ck_assert_uint_eq(counts().copies, before.copies + 6);
    ck_assert_uint_eq(counts().imports, before.imports + 1);
    ck_assert_uint_eq(engine_side_stats(asker).bytes_bounced + engine_side_stats(owner).bytes_bounced, 0);
    int64_t until_ns = tl_clock_deadline_ns(MOST_NS);
    while (!is_small && __atomic_load_n(&released_count, __ATOMIC_SEQ_CST) < 3 && tl_clock_now_ns() < until_ns)
        usleep(100);
    ck_assert(is_small || released_count == 3);
}
END_TEST

static void fill_again(void *value)
{
    fill(value, 9);
}

/* Lets the value be filled by a stream that is held. Returns the stream. */
static void *fill_late(struct tl_tensor *value)
{
    void *stream = cuda->create_stream(0, false);
    struct tl_device_fence *fence;
    cuda->hold(stream, true);
    cuda->launch(stream, fill_again, value);
    ck_assert_int_eq(tl_device_fence_record(gpu0, (tl_stream)stream, &fence, NULL), TL_OK);
    tl_tensor_set_fence(value, fence);
    return stream;
}

static struct tl_tensor *wrapped(uint64_t size_bytes)
{
    struct tl_tensor *tensor;
    struct tl_tensor_view view = view_of(gpu0, cuda->allocate(0, size_bytes), &size_bytes);
    view.release = release;
    ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, NULL), TL_OK);
    return tensor;
}

static void send_wrapped(uint64_t step, uint64_t size_bytes)
{
    engine_side_send(owner, "key", step, wrapped(size_bytes));
}

/* What a smaller value has left idle makes space for a larger one. */
START_TEST(idle_copies_make_space)
{
    static const uint64_t sizes[] = {UINT64_C(60) << 20, UINT64_C(200) << 20};
    open_pair();
    for (unsigned step = 0; step < TL_ARRAY_COUNT(sizes); step++) {
        send_wrapped(step, sizes[step]);
        ask.destination = bytes_on(gpu0, sizes[step]); /* it would be waited for a short time only */
        start(gpu0, step);
        run_until_done();
        ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
        ck_assert_int_eq(ask.fetch.path, TL_PATH_GPU_IPC);
        engine_ask_fini(&ask);
    }
}
END_TEST

/* Two copies of this size would take more memory than they may. */
#define HALF_BYTES (UINT64_C(130) << 20)

static struct engine_ask second;

/* Asks for two values, each of which is to be copied, while nothing is copied. */
static void start_two(void)
{
    open_pair();
    ask.destination = bytes_on(gpu0, HALF_BYTES);
    second = (struct engine_ask){.device = gpu0, .destination = bytes_on(gpu0, HALF_BYTES)};
    send_wrapped(1, HALF_BYTES);
    send_wrapped(2, HALF_BYTES);
    cuda->hold(NULL, true);
    start(gpu0, 1);
    engine_ask_start(asker, &second, "key", 2);
    run_for_a_while();
}

/* When the copies take as much memory as they may, the next value waits. */
START_TEST(copies_wait)
{
    start_two();
    cuda->hold(NULL, false);
    while (ask.done_count == 0 || second.done_count == 0) {
        run_rounds();
        ck_assert_uint_le(owner->conn->responses.copied_bytes, UINT64_C(256) << 20);
    }
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert_msg(second.result.code == TL_OK, "%s", second.result.message);
    ck_assert_int_eq(ask.fetch.path, TL_PATH_GPU_IPC);
    ck_assert_int_eq(second.fetch.path, TL_PATH_GPU_IPC);
    engine_ask_fini(&ask);
    engine_ask_fini(&second);
}
END_TEST

/* A value whose stream is late takes no memory from one that is ready. */
START_TEST(late_streams_hold_up_no_others)
{
    open_pair();
    struct tl_tensor *late = wrapped(HALF_BYTES);
    void *stream = fill_late(late);
    engine_side_send(owner, "key", 1, late);
    send_wrapped(2, HALF_BYTES);
    second = (struct engine_ask){.device = gpu0, .destination = bytes_on(gpu0, HALF_BYTES)};
    ask.destination = bytes_on(gpu0, HALF_BYTES);
    engine_ask_start(asker, &second, "key", 1);
    run_for_a_while();
    start(gpu0, 2);
    run_until_done();
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert_uint_eq(second.done_count, 0);
    cuda->hold(stream, false);
    RUN_UNTIL(second.done_count > 0);
    ck_assert(is_filled(second.fetch.destination, 9));
    ck_assert_int_eq(second.fetch.path, TL_PATH_GPU_IPC);
    engine_ask_fini(&ask);
    engine_ask_fini(&second);
}
END_TEST

/* Copies of small values are used again, whatever large ones there were meanwhile. */
START_TEST(small_copies_stay)
{
    static const uint64_t sizes[] = {UINT64_C(1) << 20, HALF_BYTES, UINT64_C(1) << 20};
    open_pair();
    for (unsigned step = 0; step < TL_ARRAY_COUNT(sizes); step++) {
        uint64_t imports = counts().imports;
        send_wrapped(step, sizes[step]);
        ask.destination = bytes_on(gpu0, sizes[step]);
        start(gpu0, step);
        run_until_done();
        ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
        ck_assert_uint_eq(counts().imports, imports + (step < 2));
        engine_ask_fini(&ask);
        RUN_UNTIL(owner->conn->responses.count == 0);
    }
    ck_assert_uint_eq(owner->conn->responses.idle_copy_bytes, UINT64_C(2) << 20);
}
END_TEST

/* The value that waits is given up (_i 0), the one before it is (1), or the connection ends (2). */
START_TEST(copies_that_wait_end)
{
    start_two();
    RUN_UNTIL(!tl_list_is_empty(&owner->conn->responses.awaiting_copies));
    if (_i == 0) engine_ask_cancel(&second);
    if (_i == 1) engine_ask_cancel(&ask);
    if (_i == 2) close_conns();
    if (_i == 0) RUN_UNTIL(second.done_count > 0);
    cuda->hold(NULL, false);
    RUN_UNTIL(ask.done_count > 0 && second.done_count > 0);
    ck_assert_int_eq(ask.result.code, _i == 0 ? TL_OK : _i == 1 ? TL_CANCELLED : TL_UNAVAILABLE);
    ck_assert_int_eq(second.result.code, _i == 0 ? TL_CANCELLED : _i == 1 ? TL_OK : TL_UNAVAILABLE);
    RUN_UNTIL(engine_side_values(owner) == (_i == 2 ? 2 : 1));
    engine_ask_fini(&ask);
    engine_ask_fini(&second);
}
END_TEST

/* The bytes of a stream that is late. */
START_TEST(behind_its_fence)
{
    is_small = _i == 1;
    open_pair();
    struct tl_tensor *value = _i == 0 ? value_on(gpu0, LARGE_BYTES, 1) : other_value(1);
    void *stream = fill_late(value);
    engine_side_send(owner, "key", 1, value);
    start(gpu0, 1);
    run_for_a_while();
    ck_assert_uint_eq(ask.done_count, 0);
    cuda->hold(stream, false);
    expect(9, TL_PATH_GPU_IPC);
    engine_ask_fini(&ask);
}
END_TEST

/* A value in the middle of the memory, and a destination of the caller. */
START_TEST(into_memory_of_the_caller)
{
    struct tl_tensor *destination = bytes_on(gpu0, LARGE_BYTES);
    open_pair();
    engine_side_send(owner, "key", 1, value_on(gpu0, LARGE_BYTES, 3));
    ask.destination = destination;
    start(gpu0, 1);
    expect(3, TL_PATH_GPU_IPC);
    ck_assert_ptr_eq(ask.fetch.destination, destination);
    engine_ask_fini(&ask);
}
END_TEST

/* Memory that is given back does not stay mapped at the peer, though nothing else travels. */
START_TEST(memory_that_is_given_back)
{
    open_pair();
    engine_side_send(owner, "key", 1, value_on(gpu0, LARGE_BYTES, 1));
    start(gpu0, 1);
    expect(1, TL_PATH_GPU_IPC);
    engine_ask_fini(&ask);
    RUN_UNTIL(counts().mappings + counts().handles == 0);
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- no sharing -- */

static void forbid(int number)
{
    if (number == 0) options.engine.is_gpu_proxy_forced = true;
    if (number == 1) ask.wants_checksum = true;
    if (number == 2) cuda->set_sharing(false);
}

/* The value travels through the pool, and the reason is named. */
START_TEST(what_is_written)
{
    static const char *const reasons[] = {"gpu.proxy", "makes the checksum", "could not show", "has it on the host"};
    if (_i == 0) forbid(0);
    if (_i == 2) forbid(2);
    open_pair();
    if (_i == 1) forbid(1);
    engine_side_send(owner, "key", 1, value_on(_i == 3 ? host : gpu0, LARGE_BYTES, 4));
    start(gpu0, 1);
    expect(4, TL_PATH_GPU_PROXY);
    expect_reason(reasons[_i]);
    ck_assert_uint_eq(counts().imports, 0);
    engine_ask_fini(&ask);
}
END_TEST

/* A device value for the host travels as before. */
START_TEST(for_the_host)
{
    open_pair();
    engine_side_send(owner, "key", 1, value_on(gpu0, LARGE_BYTES, 4));
    start(host, 1);
    run_until_done();
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert(is_filled(ask.fetch.destination, 4));
    ck_assert_int_ne(ask.fetch.path, TL_PATH_GPU_IPC);
    engine_ask_fini(&ask);
}
END_TEST

/* Whichever call fails once: the value arrives, or the receive says why not and the value is kept; and the next value
 * travels. What cannot be imported is written. */
START_TEST(a_call_fails)
{
    bool was_import_hit = false;
    is_small = _i == 1;
    for (unsigned number = 1; number < 50; number++) {
        open_pair();
        engine_side_send(owner, "key", 1, _i == 0 ? value_on(gpu0, LARGE_BYTES, 1) : other_value(1));
        struct tl_tensor *destination = bytes_on(gpu0, _i == 0 ? LARGE_BYTES : SMALL_BYTES);
        ask.destination = destination;
        cuda->fail_call(number, 719, false);
        start(gpu0, 1);
        run_until_done();
        const char *failed = cuda->failed_call();
        bool was_hit = failed != NULL;
        cuda->fail_call(0, 0, false);
        if (was_hit && strcmp(failed, "cuMemImportFromShareableHandle") == 0) {
            was_import_hit = true;
            ck_assert_int_eq(ask.fetch.path, TL_PATH_GPU_PROXY);
            expect_reason("mapping memory of another process failed on gpu:0");
        }
        if (ask.result.code == TL_OK) ck_assert(is_filled(ask.fetch.destination, 1));
        /* What is copied out of the owner's memory is the owner's until then. */
        bool is_read = engine_side_stats(asker).memory_copied > 0;
        if (ask.result.code != TL_OK && is_read) ck_assert_uint_eq(engine_side_values(owner), 1);
        ck_assert(was_hit || ask.result.code == TL_OK);
        engine_ask_fini(&ask);
        engine_pair_close(&pair);
    }
    ck_assert(was_import_hit || is_small); /* how often an event is asked before is not known */
}
END_TEST

/* ------------------------------------------------------------------------------------------------- while it runs -- */

/* A cancel waits for the copy, which writes into the destination; then the value is there for others. */
START_TEST(cancelled)
{
    start_held(5);
    engine_ask_cancel(&ask);
    run_for_a_while();
    ck_assert_uint_eq(ask.done_count, 0);
    cuda->hold(NULL, false);
    run_until_done();
    ck_assert_int_eq(ask.result.code, TL_CANCELLED);
    engine_ask_fini(&ask);
    run_for_a_while();
    ck_assert(engine_side_has(owner, "key", 1));
    ask = (struct engine_ask){.is_open = false};
    start(gpu0, 1);
    expect(5, TL_PATH_GPU_IPC);
    engine_ask_fini(&ask);
}
END_TEST

/* The connection ends while the copy runs: the receive waits for it, and does not take its bytes. */
START_TEST(the_connection_breaks)
{
    start_held(6);
    if (_i == 0) {
        close_conns();
    } else {
        struct tl_error reason = {.code = TL_UNAVAILABLE, .message = "ended by the test"};
        tl_conn_close(owner->conn, &reason);
    }
    run_for_a_while();
    ck_assert_uint_eq(ask.done_count, 0);
    cuda->hold(NULL, false);
    run_until_done();
    ck_assert_int_eq(ask.result.code, TL_UNAVAILABLE);
    ck_assert_uint_eq(engine_side_values(owner), 1);
    engine_ask_fini(&ask);
}
END_TEST

/* The owner is asked to copy other memory, and the connection ends, or the receive is cancelled. */
START_TEST(while_the_owner_copies)
{
    open_pair();
    is_small = true;
    engine_side_send(owner, "key", 1, other_value(7));
    cuda->hold(NULL, true);
    start(gpu0, 1);
    run_for_a_while();
    if (_i == 0) {
        engine_ask_cancel(&ask);
    } else {
        close_conns();
    }
    run_for_a_while();
    cuda->hold(NULL, false);
    run_until_done();
    ck_assert_int_eq(ask.result.code, _i == 0 ? TL_CANCELLED : TL_UNAVAILABLE);
    RUN_UNTIL(engine_side_values(owner) == 1);
    run_for_a_while();
    ck_assert_uint_eq(engine_side_values(owner), 1);
    engine_ask_fini(&ask);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("engine_ipc");
    TCase *copies = tcase_create("copies"), *pool = tcase_create("through the pool"),
          *end = tcase_create("while_it_runs"), *idle = tcase_create("idle_copies_make_space"),
          *waits = tcase_create("copies_wait");
    TCase *const cases[] = {copies, pool, end, idle, waits};
    for (unsigned i = 0; i < TL_ARRAY_COUNT(cases); i++) {
        tcase_set_timeout(cases[i], 60);
        tcase_add_checked_fixture(cases[i], setup_ipc, teardown_ipc);
        suite_add_tcase(suite, cases[i]);
    }
    tcase_add_loop_test(copies, memory_of_the_library, 0, 2);
    tcase_add_loop_test(copies, other_memory, 0, 2);
    tcase_add_loop_test(copies, behind_its_fence, 0, 2);
    tcase_add_test(copies, into_memory_of_the_caller);
    tcase_add_test(copies, memory_that_is_given_back);
    tcase_add_loop_test(pool, what_is_written, 0, 4);
    tcase_add_test(pool, for_the_host);
    TCase *failures = tcase_create("failures"); /* a free that fails frees nothing */
    tcase_set_timeout(failures, 60);
    tcase_add_checked_fixture(failures, setup_ipc, NULL);
    tcase_add_loop_test(failures, a_call_fails, 0, 2);
    suite_add_tcase(suite, failures);
    tcase_add_test(idle, idle_copies_make_space);
    tcase_add_test(waits, copies_wait);
    tcase_add_test(waits, late_streams_hold_up_no_others);
    tcase_add_test(waits, small_copies_stay);
    tcase_add_test(end, cancelled);
    tcase_add_loop_test(end, the_connection_breaks, 0, 2);
    tcase_add_loop_test(end, while_the_owner_copies, 0, 2);
    tcase_add_loop_test(end, copies_that_wait_end, 0, 3);
    return run_suite(suite);
}
