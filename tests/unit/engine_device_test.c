// SPDX-License-Identifier: Apache-2.0
/* Values on a device, as the owner sends them over the data plane: through its pinned memory and the pool. */
#include <check.h>
#include <stdio.h>
#include <string.h>
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

/* Runs both sides until the fetch is done. The device is at work on its own threads. */
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

static void expect(uint64_t size_bytes, unsigned seed)
{
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert_uint_eq(tl_tensor_size_bytes(ask.fetch.destination), size_bytes);
    ck_assert(is_filled(ask.fetch.destination, seed));
    ck_assert_int_eq(ask.fetch.path, TL_PATH_BOUNCE);
    if (!ask.is_unregistered)
        ck_assert_msg(strstr(ask.fetch.path_reason, "copied by the owner") != NULL, "%s", ask.fetch.path_reason);
    engine_ask_fini(&ask);
}

/* All blocks of the device are free. */
static void check_blocks(void)
{
    void *blocks[TL_STAGING_BLOCKS];
    struct tl_tensor *from = bytes_on(gpu0, 1), *to = bytes_on(host, 1);
    copy(to, from); /* they are pinned from here on */
    tl_tensor_put(from);
    tl_tensor_put(to);
    for (unsigned i = 0; i < TL_STAGING_BLOCKS; i++) {
        for (unsigned n = 0; n < 10000 && (blocks[i] = tl_device_staging_try(gpu0)) == NULL; n++)
            nap();
        ck_assert_ptr_nonnull(blocks[i]);
    }
    for (unsigned i = 0; i < TL_STAGING_BLOCKS; i++)
        tl_device_staging_put(gpu0, blocks[i], false);
}

static const uint64_t sizes[] = {1, 5000, PIECE, PIECE + 1, 6 * PIECE + 77};

/* Each byte is copied from the device once, whether the meta-data is known or not, and whoever has the memory. */
START_TEST(all_bytes_arrive)
{
    struct fake_cuda_counts before, after;
    options.engine.keys = _i % 2 == 0 ? TL_KEYS_WINDOW : TL_KEYS_REGION;
    options.engine.is_reading = _i / 2 == 1;
    open_pair();
    for (unsigned i = 0; i < TL_ARRAY_COUNT(sizes); i++) {
        for (unsigned round = 0; round < 4; round++) {
            cuda->get_counts(&before);
            engine_side_publish(owner, "key", i, value_of(sizes[i], i));
            ask.wants_checksum = round % 2 == 1;
            ask.is_unregistered = round >= 2;
            engine_ask_start(asker, &ask, "key", i);
            run_until_done();
            expect(sizes[i], i);
            cuda->get_counts(&after);
            ck_assert_uint_eq(after.copied_bytes - before.copied_bytes, sizes[i]);
        }
    }
    engine_pair_close(&pair);
    check_blocks();
}
END_TEST

/* The asker gives up, or the connection ends, while the device is at work: nothing is left, and the value stays where
 * it is until the device is done. */
START_TEST(given_up)
{
    struct tl_error reason;
    open_pair();
    struct tl_tensor *value = value_of(3 * PIECE, 1);
    engine_side_send(owner, "key", 1, tl_tensor_get(value));
    engine_side_publish(owner, "first", 1, value_of(10, 1)); /* the blocks are pinned with it */
    engine_ask_start(asker, &ask, "first", 1);
    run_until_done();
    expect(10, 1);
    cuda->hold(NULL, true);
    engine_ask_start(asker, &ask, "key", 1);
    run_for_a_while();
    ck_assert_uint_eq(ask.done_count, 0);
    if (_i == 0) {
        engine_ask_cancel(&ask);
    } else {
        tl_error_set(&reason, TL_UNAVAILABLE, "ended by the test");
        tl_conn_close(owner->conn, &reason);
    }
    run_until_done();
    ck_assert_int_ne(ask.result.code, TL_OK);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
    ck_assert(tl_tensor_is_shared(value));
    cuda->hold(NULL, false);
    for (unsigned n = 0; n < 10000 && tl_tensor_is_shared(value); n++)
        nap();
    ck_assert(!tl_tensor_is_shared(value));
    tl_tensor_put(value);
    check_blocks();
}
END_TEST

/* A value that a stream is still to write is read after that. */
START_TEST(stream_comes_first)
{
    struct tl_device_fence *fence;
    struct tl_error error;
    void *stream = cuda->create_stream(0, false);
    cuda->hold(stream, true);
    ck_assert_int_eq(tl_device_fence_record(gpu0, (tl_stream)stream, &fence, &error), TL_OK);
    open_pair();
    struct tl_tensor *value = value_of(5000, 1);
    tl_tensor_set_fence(value, fence);
    engine_side_publish(owner, "key", 1, tl_tensor_get(value));
    engine_ask_start(asker, &ask, "key", 1);
    run_for_a_while();
    ck_assert_uint_eq(ask.done_count, 0);
    fill(value, 2);
    cuda->hold(stream, false);
    run_until_done();
    expect(5000, 2);
    tl_tensor_put(value);
    engine_pair_close(&pair);
}
END_TEST

/* Many values at once, more than the pool holds: each waits for its turn. */
START_TEST(more_than_the_pool)
{
    enum { MANY = 12 };
    static struct engine_ask asks[MANY];
    char key[16];
    options.memory.pool_bytes = options.memory.max_pool_bytes = 4 << 20;
    open_pair();
    for (unsigned i = 0; i < MANY; i++) {
        snprintf(key, sizeof(key), "key %u", i);
        engine_side_publish(owner, key, 1, value_of(3 * PIECE, i));
        asks[i] = (struct engine_ask){.is_unregistered = true};
        engine_ask_start(asker, &asks[i], key, 1);
    }
    for (unsigned i = 0; i < MANY; i++) {
        for (unsigned n = 0; n < 50000 && asks[i].done_count == 0; n++) {
            engine_pair_run(&pair);
            nap();
        }
        ck_assert_msg(asks[i].done_count == 1 && asks[i].result.code == TL_OK, "%s", asks[i].result.message);
        ck_assert(is_filled(asks[i].fetch.destination, i));
        engine_ask_fini(&asks[i]);
    }
    engine_pair_close(&pair);
    check_blocks();
}
END_TEST

/* A device that is lost fails the fetch with its name; the connection carries on. */
START_TEST(lost_device)
{
    open_pair();
    engine_side_publish(owner, "other", 1, engine_bytes(5000, 4));
    engine_side_publish(owner, "key", 1, value_of(3 * PIECE, 1));
    cuda->hold(NULL, true);
    engine_ask_start(asker, &ask, "key", 1);
    run_for_a_while();
    cuda->break_device(0, 700);
    cuda->hold(NULL, false);
    run_until_done();
    ck_assert_int_eq(ask.result.code, TL_FAILED_PRECONDITION);
    ck_assert_msg(strstr(ask.result.message, "gpu:0 is lost") != NULL, "%s", ask.result.message);
    engine_ask_fini(&ask);
    engine_ask_start(asker, &ask, "other", 1);
    run_until_done();
    ck_assert_int_eq(ask.result.code, TL_OK);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

int main(void)
{
    TCase *device = tcase_create("device");
    tcase_add_checked_fixture(device, setup, NULL);
    tcase_add_loop_test(device, all_bytes_arrive, 0, 4);
    tcase_add_loop_test(device, given_up, 0, 2);
    tcase_add_test(device, stream_comes_first);
    tcase_add_test(device, more_than_the_pool);
    tcase_add_test(device, lost_device);
    Suite *suite = suite_create("engine_device");
    suite_add_tcase(suite, device);
    return run_suite(suite);
}
