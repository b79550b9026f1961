// SPDX-License-Identifier: Apache-2.0
/* Values on a device that the card reads there itself: nothing is copied, and what prevents it leads to a copy. */
#include <check.h>
#include <time.h>

#include "base/clock.h"
#include "base/error.h"
#include "fakes/device_case.h"
#include "fakes/engine_case.h"
#include "fakes/run_suite.h"
#include "tensor/device.h"

#define PIECE ((uint64_t)256 * 1024)

static void setup(void)
{
    setup_cuda();
    engine_pair_defaults(&options);
    options.engine.inline_bytes = TL_INLINE_BYTES; /* nothing comes inline from or to a device */
    options.provider.reach = cuda->reach;
}

static struct tl_tensor *value_of(uint64_t size_bytes, unsigned seed)
{
    struct tl_tensor *tensor = bytes_on(gpu0, size_bytes);
    fill(tensor, seed);
    return tensor;
}

static void nap(void)
{
    const struct timespec moment = {.tv_nsec = 200 * 1000};
    nanosleep(&moment, NULL);
}

static void run_until_done(void)
{
    for (unsigned i = 0; i < 50000 && ask.done_count == 0; i++) {
        engine_pair_run(&pair);
        nap();
    }
    ck_assert_uint_eq(ask.done_count, 1);
}

static void run_for_a_while(void)
{
    for (unsigned i = 0; i < 100; i++) {
        engine_pair_run(&pair);
        nap();
    }
}

/* Asks for the value, and returns its path. */
static enum tl_path fetch(const char *key, uint64_t step, uint64_t size_bytes, unsigned seed)
{
    engine_ask_start(asker, &ask, key, step);
    run_until_done();
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert_uint_eq(tl_tensor_size_bytes(ask.fetch.destination), size_bytes);
    ck_assert(is_filled(ask.fetch.destination, seed));
    enum tl_path path = ask.fetch.path;
    engine_ask_fini(&ask);
    return path;
}

static const char *why_not(void)
{
    return tl_memory_why_not_direct(owner->memory, gpu0, options.engine.keys);
}

/* Has the card tried, and returns when the result is known. */
static void await_probe(void)
{
    const char *reason = why_not();
    ck_assert_msg(reason != NULL && strstr(reason, "for the first time") != NULL, "%s", reason);
    for (unsigned i = 0; i < 50000; i++) {
        reason = why_not();
        if (reason == NULL || strstr(reason, "for the first time") == NULL) return;
        nap();
    }
    ck_assert_msg(false, "%s", reason);
}

static uint64_t copied_bytes(void)
{
    struct fake_cuda_counts counts;
    cuda->get_counts(&counts);
    return counts.copied_bytes;
}

static const uint64_t sizes[] = {64 * 1024, PIECE + 1, 6 * PIECE + 77};

/* No byte is copied, whether the meta-data is known or not, and whether the owner writes or the asker reads. */
START_TEST(nothing_is_copied)
{
    options.engine.keys = _i % 2 == 0 ? TL_KEYS_WINDOW : TL_KEYS_REGION;
    options.engine.is_reading = _i / 2 == 1;
    open_pair();
    await_probe();
    ck_assert_ptr_null(why_not());
    uint64_t before = copied_bytes(), bounced = engine_side_memory(owner).bounced_bytes;
    for (unsigned i = 0; i < TL_ARRAY_COUNT(sizes); i++) {
        for (unsigned round = 0; round < 3; round++) {
            engine_side_publish(owner, "key", 3 * i + round, value_of(sizes[i], i));
            ck_assert_int_eq(fetch("key", 3 * i + round, sizes[i], i), TL_PATH_GPU_DIRECT);
        }
    }
    ck_assert_uint_eq(copied_bytes(), before);
    ck_assert_uint_eq(engine_side_memory(owner).bounced_bytes, bounced);
    if (_i == 2) ck_assert_uint_gt(engine_side_stats(owner).sources_shown, 0);
    ck_assert_uint_gt(engine_side_memory(owner).registrations, 0);
    engine_pair_close(&pair);
    await_frees(0);
}
END_TEST

/* The first value that is wanted is copied while the card is tried; a later one is not. */
START_TEST(the_first_value)
{
    open_pair();
    fake_fabric_hold_regions(pair.fabric, true); /* so that the probe takes longer */
    engine_side_publish(owner, "key", 1, value_of(PIECE, 1));
    ck_assert_int_eq(fetch("key", 1, PIECE, 1), TL_PATH_GPU_PROXY);
    fake_fabric_hold_regions(pair.fabric, false);
    while (why_not() != NULL)
        nap();
    engine_side_publish(owner, "key", 2, value_of(PIECE, 2));
    ck_assert_int_eq(fetch("key", 2, PIECE, 2), TL_PATH_GPU_DIRECT);
    engine_pair_close(&pair);
}
END_TEST

/* What the CPU would have to read, and what is small, is copied. */
START_TEST(what_is_copied)
{
    options.engine.is_reading = _i == 1;
    open_pair();
    await_probe();
    engine_side_publish(owner, "key", 1, value_of(PIECE, 1));
    ask.wants_checksum = true;
    ck_assert_int_eq(fetch("key", 1, PIECE, 1), TL_PATH_GPU_PROXY);
    ask.wants_checksum = false;
    engine_side_publish(owner, "small", 1, value_of(1000, 2));
    ck_assert_int_eq(fetch("small", 1, 1000, 2), TL_PATH_GPU_PROXY);
    engine_pair_close(&pair);
}
END_TEST

/* Where the settings force it, the values go through pinned memory, though the card reaches the device. */
START_TEST(the_proxy_is_forced)
{
    options.engine.is_gpu_proxy_forced = true;
    options.engine.is_reading = _i == 1;
    open_pair();
    await_probe();
    ck_assert_ptr_null(why_not());
    uint64_t before = copied_bytes();
    engine_side_publish(owner, "key", 1, value_of(PIECE, 1));
    ck_assert_int_eq(fetch("key", 1, PIECE, 1), TL_PATH_GPU_PROXY);
    ck_assert_uint_ge(copied_bytes(), before + PIECE);
    engine_pair_close(&pair);
}
END_TEST

/* The card does not read before the stream is done with the value. */
START_TEST(stream_comes_first)
{
    struct tl_device_fence *fence;
    struct tl_error error;
    options.engine.is_reading = _i == 1;
    open_pair();
    await_probe();
    void *stream = cuda->create_stream(0, false);
    cuda->hold(stream, true);
    ck_assert_int_eq(tl_device_fence_record(gpu0, (tl_stream)stream, &fence, &error), TL_OK);
    struct tl_tensor *value = value_of(3 * PIECE, 1);
    tl_tensor_set_fence(value, fence);
    engine_side_publish(owner, "key", 1, tl_tensor_get(value));
    engine_ask_start(asker, &ask, "key", 1);
    run_for_a_while();
    ck_assert_uint_eq(ask.done_count, 0);
    fill(value, 2);
    cuda->hold(stream, false);
    run_until_done();
    ck_assert_int_eq(ask.fetch.path, TL_PATH_GPU_DIRECT);
    ck_assert(is_filled(ask.fetch.destination, 2));
    engine_ask_fini(&ask);
    tl_tensor_put(value);
    engine_pair_close(&pair);
}
END_TEST

/* The connection ends while the value is registered. */
START_TEST(broken_while_registering)
{
    struct tl_error error;
    options.engine.is_reading = _i == 1;
    open_pair();
    await_probe();
    fake_fabric_hold_regions(pair.fabric, true);
    engine_side_send(owner, "key", 1, value_of(PIECE, 1));
    engine_ask_start(asker, &ask, "key", 1);
    for (unsigned i = 0; i < 100; i++) {
        (void)engine_side_round(asker);
        (void)engine_side_round(owner);
    }
    ck_assert_uint_eq(ask.done_count, 0);
    tl_error_set(&error, TL_UNAVAILABLE, "ended by the test");
    tl_conn_close(owner->conn, &error);
    for (unsigned i = 0; i < 100; i++) {
        (void)engine_side_round(asker);
        (void)engine_side_round(owner);
    }
    ck_assert_ptr_nonnull(owner->conn); /* it waits for the registration */
    fake_fabric_hold_regions(pair.fabric, false);
    run_until_done();
    ck_assert_int_eq(ask.result.code, TL_UNAVAILABLE);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
    await_frees(0);
}
END_TEST

/* The asker gives up, the connection ends, or the device is lost while the fence is waited for. */
START_TEST(given_up)
{
    struct tl_device_fence *fence;
    struct tl_error error;
    options.engine.is_reading = _i / 3 == 1;
    open_pair();
    await_probe();
    void *stream = cuda->create_stream(0, false);
    cuda->hold(stream, true);
    ck_assert_int_eq(tl_device_fence_record(gpu0, (tl_stream)stream, &fence, &error), TL_OK);
    struct tl_tensor *value = value_of(3 * PIECE, 1);
    tl_tensor_set_fence(value, fence);
    engine_side_send(owner, "key", 1, tl_tensor_get(value));
    engine_ask_start(asker, &ask, "key", 1);
    run_for_a_while();
    ck_assert_uint_eq(ask.done_count, 0);
    if (_i % 3 == 0) {
        engine_ask_cancel(&ask);
    } else if (_i % 3 == 1) {
        tl_error_set(&error, TL_UNAVAILABLE, "ended by the test");
        tl_conn_close(owner->conn, &error);
    } else {
        cuda->break_device(0, 700);
        cuda->hold(stream, false);
    }
    run_until_done();
    ck_assert_int_ne(ask.result.code, TL_OK);
    if (_i % 3 == 2) ck_assert_msg(strstr(ask.result.message, "gpu:0 is lost") != NULL, "%s", ask.result.message);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
    if (_i % 3 != 2) cuda->hold(stream, false);
    for (unsigned n = 0; n < 10000 && tl_tensor_is_shared(value); n++)
        nap();
    ck_assert(!tl_tensor_is_shared(value));
    tl_tensor_put(value);
}
END_TEST

/* Whatever the probe meets, the values arrive through the pool, and the reason is kept. */
START_TEST(the_probe_fails)
{
    static const enum fake_fault faults[] = {FAKE_REGION_FAILURE, FAKE_CREATE_FAILURE, FAKE_CONNECT_FAILURE,
                                             FAKE_EXPOSE_FAILURE};
    open_pair();
    if (_i < 4) {
        fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = faults[_i]});
    } else if (_i < 6) {
        fake_fabric_add_rule(pair.fabric,
                             &(struct fake_rule){.fault = FAKE_CORRUPT, .kinds = FAKE_WRITE, .from = _i - 3});
    } else {
        cuda->set_direct(false, false);
    }
    await_probe();
    ck_assert_ptr_nonnull(why_not());
    fake_fabric_clear_rules(pair.fabric);
    engine_side_publish(owner, "key", 1, value_of(PIECE, 1));
    ck_assert_int_eq(fetch("key", 1, PIECE, 1), TL_PATH_GPU_PROXY);
    engine_pair_close(&pair);
    await_frees(0);
}
END_TEST

/* A value that cannot be registered is copied, and the next one is not. */
START_TEST(no_space_for_a_registration)
{
    options.engine.is_reading = _i == 1;
    open_pair();
    await_probe();
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_REGION_FAILURE, .times = 2});
    engine_side_publish(owner, "key", 1, value_of(PIECE, 1));
    ck_assert_int_eq(fetch("key", 1, PIECE, 1), TL_PATH_GPU_PROXY);
    fake_fabric_clear_rules(pair.fabric);
    engine_side_publish(owner, "key", 2, value_of(PIECE, 2));
    ck_assert_int_eq(fetch("key", 2, PIECE, 2), TL_PATH_GPU_DIRECT);
    engine_pair_close(&pair);
    await_frees(0);
}
END_TEST

int main(void)
{
    TCase *direct = tcase_create("direct");
    tcase_add_checked_fixture(direct, setup, NULL);
    tcase_add_loop_test(direct, nothing_is_copied, 0, 4);
    tcase_add_test(direct, the_first_value);
    tcase_add_loop_test(direct, what_is_copied, 0, 2);
    tcase_add_loop_test(direct, the_proxy_is_forced, 0, 2);
    tcase_add_loop_test(direct, stream_comes_first, 0, 2);
    tcase_add_loop_test(direct, broken_while_registering, 0, 2);
    tcase_add_loop_test(direct, given_up, 0, 6);
    tcase_add_loop_test(direct, the_probe_fails, 0, 7);
    tcase_add_loop_test(direct, no_space_for_a_registration, 0, 2);
    Suite *suite = suite_create("engine_direct");
    suite_add_tcase(suite, direct);
    return run_suite(suite);
}
