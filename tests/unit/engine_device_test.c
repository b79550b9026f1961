// SPDX-License-Identifier: Apache-2.0
/* Values on a device, as the owner sends them over the data plane: through the pool, and before that is pinned through
 * pinned memory of the device as well. */
#include <check.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/error.h"
#include "dataplane/engine/response_internal.h"
#include "fakes/device_case.h"
#include "fakes/engine_case.h"
#include "fakes/run_suite.h"
#include "tensor/device.h"

#define PIECE ((uint64_t)256 * 1024)
#define LAP_BYTES ((uint64_t)64 * 1024)

static void setup(void)
{
    setup_cuda();
    engine_pair_defaults(&options);
    options.engine.inline_bytes = TL_INLINE_BYTES; /* nothing comes inline from or to a device */
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
    ck_assert_int_eq(ask.fetch.path, TL_PATH_GPU_PROXY);
    if (!ask.is_unregistered)
        ck_assert_msg(strstr(ask.fetch.path_reason, "copied by the owner") != NULL, "%s", ask.fetch.path_reason);
    engine_ask_fini(&ask);
}

/* Waits until the owner's pool is pinned, or cannot be; returns the reason. */
static const char *await_pinning(void)
{
    struct tl_error error;
    ck_assert_int_eq(tl_device_open(gpu0, &error), TL_OK);
    const char *reason = tl_memory_why_not_pinned(owner->memory, gpu0);
    for (unsigned i = 0; i < 50000 && reason != NULL && strstr(reason, "is being pinned") != NULL; i++) {
        nap();
        reason = tl_memory_why_not_pinned(owner->memory, gpu0);
    }
    return reason;
}

static void await_registrations(unsigned count)
{
    struct fake_cuda_counts counts;
    cuda->get_counts(&counts);
    for (unsigned i = 0; i < 50000 && counts.registrations > count; i++) {
        nap();
        cuda->get_counts(&counts);
    }
    ck_assert_uint_eq(counts.registrations, count);
}

static const uint64_t sizes[] = {1, 5000, PIECE, PIECE + 1, 6 * PIECE + 77};

/* Each byte is copied from the device once, whether the meta-data is known or not, with either kind of keys. */
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
    for (cuda->get_counts(&after); after.registrations == 0; cuda->get_counts(&after))
        nap(); /* the first value has begun that */
    engine_pair_close(&pair);
    await_registrations(0);
    check_blocks(gpu0);
}
END_TEST

/* With a pinned pool each piece is copied once, by the device, without a block of the device. Where the pool cannot be
 * pinned, the CPU copies each byte once more, and the values arrive all the same. */
START_TEST(straight_into_the_pool)
{
    struct fake_cuda_counts before, after;
    void *blocks[TL_STAGING_BLOCKS];
    bool is_pinned = _i < 4;
    options.engine.keys = _i % 2 == 0 ? TL_KEYS_WINDOW : TL_KEYS_REGION;
    options.engine.is_reading = _i / 2 == 1;
    open_pair();
    check_blocks(gpu0); /* they are allocated from here on */
    await_frees(0);
    if (!is_pinned) cuda->fail_call(1, 2, false);
    ck_assert_int_eq(await_pinning() == NULL, is_pinned);
    for (unsigned i = 0; i < TL_STAGING_BLOCKS && is_pinned; i++)
        blocks[i] = tl_device_staging_try(gpu0);
    for (unsigned i = 0; i < TL_ARRAY_COUNT(sizes); i++) {
        for (unsigned round = 0; round < 4; round++) {
            uint64_t bounced = engine_side_memory(owner).bounced_bytes;
            cuda->get_counts(&before);
            engine_side_publish(owner, "key", i, value_of(sizes[i], i));
            ask.wants_checksum = round % 2 == 1;
            ask.is_unregistered = round >= 2;
            engine_ask_start(asker, &ask, "key", i);
            run_until_done();
            expect(sizes[i], i);
            cuda->get_counts(&after);
            ck_assert_uint_eq(after.copied_bytes - before.copied_bytes, sizes[i]);
            /* Pieces are smaller for an asker that copies them on. */
            if (round < 2) ck_assert_uint_eq(after.copies - before.copies, (sizes[i] + PIECE - 1) / PIECE);
            ck_assert_uint_eq(engine_side_memory(owner).bounced_bytes - bounced, is_pinned ? 0 : sizes[i]);
        }
    }
    ck_assert_uint_eq(engine_side_stats(owner).bytes_bounced, engine_side_memory(owner).bounced_bytes);
    if (is_pinned) tl_device_staging_give(gpu0, blocks, TL_STAGING_BLOCKS);
    engine_pair_close(&pair);
    await_registrations(0);
    check_blocks(gpu0);
}
END_TEST

/* The asker gives up, or the connection ends, while the device is at work: nothing is left, and the value stays where
 * it is until the device is done, as does the block of a pinned pool. */
START_TEST(given_up)
{
    struct tl_error reason;
    options.may_keep_blocks = true;
    open_pair();
    struct tl_tensor *value = value_of(3 * PIECE, 1);
    engine_side_send(owner, "key", 1, tl_tensor_get(value));
    engine_side_publish(owner, "first", 1, value_of(10, 1)); /* the blocks are pinned with it */
    engine_ask_start(asker, &ask, "first", 1);
    run_until_done();
    expect(10, 1);
    bool is_pinned = _i / 2 == 1;
    if (is_pinned) ck_assert_ptr_null(await_pinning());
    cuda->hold(NULL, true);
    engine_ask_start(asker, &ask, "key", 1);
    run_for_a_while();
    ck_assert_uint_eq(ask.done_count, 0);
    if (_i % 2 == 0) {
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
    if (is_pinned) await_registrations(1); /* the region with the block */
    cuda->hold(NULL, false);
    for (unsigned n = 0; n < 10000 && tl_tensor_is_shared(value); n++)
        nap();
    ck_assert(!tl_tensor_is_shared(value));
    tl_tensor_put(value);
    await_registrations(0);
    check_blocks(gpu0);
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
    options.memory.max_pool_bytes = 4 << 20;
    options.memory.pool_bytes = _i == 0 ? 4 << 20 : 1 << 20; /* it grows meanwhile */
    open_pair();
    if (_i == 1) ck_assert_ptr_null(await_pinning());
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
    if (_i == 1) ck_assert_uint_eq(engine_side_memory(owner).bounced_bytes, 0);
    engine_pair_close(&pair);
    await_registrations(0);
    check_blocks(gpu0);
}
END_TEST

/* Values for an asker that copies them on out of a lap of its own memory, and lags behind. */
static void open_pair_with_lap(void)
{
    options.provider.needs_no_regions = true;
    options.engine.keys = TL_KEYS_REGION;
    options.engine.copy_bytes = LAP_BYTES;
    open_pair();
}

static void start_unregistered(struct engine_ask *started, const char *key, uint64_t size_bytes, unsigned seed,
                               bool wants_checksum)
{
    engine_side_publish(owner, key, 1, value_of(size_bytes, seed));
    *started = (struct engine_ask){.is_unregistered = true, .wants_checksum = wants_checksum};
    engine_ask_start(asker, started, key, 1);
}

/* The asker frees space while the device reads a piece: what is written is that piece, and not what lies behind it. */
START_TEST(space_while_a_piece_is_read)
{
    char key[16];
    open_pair_with_lap();
    for (unsigned i = 0; i < 6; i++) {
        snprintf(key, sizeof(key), "key %u", i);
        start_unregistered(&ask, key, 300000 + 1000 * i, i, _i == 1);
        for (unsigned n = 0; n < 50000 && ask.done_count == 0; n++) {
            for (unsigned ahead = 0; ahead < n % 8; ahead++) {
                engine_side_round(owner);
                nap();
            }
            engine_side_round(asker);
            engine_side_round(owner);
        }
        ck_assert_uint_eq(ask.done_count, 1);
        expect(300000 + 1000 * i, i);
    }
    engine_pair_close(&pair);
    check_blocks(gpu0);
}
END_TEST

/* Takes what is left of the owner's pool. */
static unsigned fill_pool(struct tl_tensor *taken[], unsigned most)
{
    unsigned count = 0;
    struct tl_error error;
    for (uint64_t size_bytes = 1 << 20; size_bytes >= 4096; size_bytes /= 2) {
        const struct tl_meta_data meta_data = {
            .dtype = TL_U8, .shape = {.rank = 1, .dims = {size_bytes}}, .size_bytes = size_bytes};
        while (count < most && tl_memory_tensor_create(owner->memory, &meta_data, &taken[count], &error) == TL_OK)
            count++;
    }
    ck_assert_uint_lt(count, most);
    return count;
}

/* The device may still write into the pool for a fetch that is over. */
static void await_unused_pool(void)
{
    for (unsigned n = 0; n < 5000 && engine_side_memory(owner).pool_used_bytes > 0; n++) {
        engine_pair_run(&pair);
        nap();
    }
}

/* Whether the device reads a piece into memory of the pool. */
static bool is_piece_read(void)
{
    for (unsigned place = 0; place < owner->conn->responses.place_count; place++)
        for (struct response *response = owner->conn->responses.by_handle[place]; response; response = response->next)
            if (response->sending != NULL && response->sending->pieces.piece != NULL) return true;
    return false;
}

static unsigned count_open(const struct engine_ask asks[], unsigned count)
{
    unsigned open_count = 0;
    for (unsigned i = 0; i < count; i++)
        open_count += asks[i].is_open;
    return open_count;
}

/* The asker frees space while the owner waits for memory of its pool: the owner waits once for each value, however
 * often it hears of space. When the device reads slowly, nothing may wait: what is to be found is found by one of
 * several repetitions. 0: the fetches are cancelled. 1: the connection ends. Others: until all are written. */
START_TEST(space_while_the_owner_waits_for_its_pool)
{
    enum { MANY = 8, MOST_TAKEN = 4096, ROUNDS = 2000 };
    static struct engine_ask asks[MANY];
    static struct tl_tensor *taken[MOST_TAKEN];
    char key[16];
    struct tl_error reason;
    open_pair_with_lap();
    for (unsigned i = 0; i < MANY; i++) {
        snprintf(key, sizeof(key), "key %u", i);
        start_unregistered(&asks[i], key, 300000, i, false);
    }
    cuda->hold(NULL, true);
    for (unsigned n = 0; n < ROUNDS && !is_piece_read(); n++)
        engine_pair_run(&pair);
    unsigned taken_count = fill_pool(taken, MOST_TAKEN);
    cuda->hold(NULL, false);
    /* The pieces that have memory pass it on to each other. */
    for (unsigned n = 0; n < ROUNDS || (_i > 1 && n < 50 * ROUNDS && count_open(asks, MANY) > 0); n++) {
        engine_side_round(owner);
        engine_side_round(asker);
        if (n % 50 == 0) nap();
        ck_assert_uint_le(engine_side_memory(owner).pool_waiting, count_open(asks, MANY));
    }
    for (unsigned i = 0; i < MANY && _i == 0; i++)
        if (asks[i].is_open) engine_ask_cancel(&asks[i]);
    tl_error_set(&reason, TL_UNAVAILABLE, "ended by the test");
    if (_i == 1) tl_conn_close(asker->conn, &reason);
    run_for_a_while();
    for (unsigned i = 0; i < taken_count; i++)
        tl_tensor_put(taken[i]);
    for (unsigned i = 0; i < MANY; i++) {
        for (unsigned n = 0; n < 50000 && asks[i].done_count == 0; n++) {
            engine_pair_run(&pair);
            nap();
        }
        ck_assert_uint_eq(asks[i].done_count, 1);
        /* On a slow machine it takes the link before there is memory. */
        if (asks[i].result.code == TL_OK) ck_assert(is_filled(asks[i].fetch.destination, i));
        engine_ask_fini(&asks[i]);
    }
    await_unused_pool();
    ck_assert_uint_eq(engine_side_memory(owner).pool_waiting, 0);
    ck_assert_uint_eq(engine_side_memory(owner).pool_used_bytes, 0);
    engine_pair_close(&pair);
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
    tcase_add_loop_test(device, straight_into_the_pool, 0, 5);
    tcase_add_loop_test(device, given_up, 0, 4);
    tcase_add_test(device, stream_comes_first);
    tcase_add_loop_test(device, more_than_the_pool, 0, 2);
    tcase_add_test(device, lost_device);
    Suite *suite = suite_create("engine_device");
    suite_add_tcase(suite, device);
    TCase *piece = tcase_create("space_while_a_piece_is_read"); /* a case of its own, which tests/defects selects */
    tcase_add_checked_fixture(piece, setup, NULL);
    tcase_add_loop_test(piece, space_while_a_piece_is_read, 0, 2);
    suite_add_tcase(suite, piece);
    TCase *pool = tcase_create("space_while_the_owner_waits_for_its_pool"); /* the same */
    tcase_add_checked_fixture(pool, setup, NULL);
    tcase_add_loop_test(pool, space_while_the_owner_waits_for_its_pool, 0, 8);
    suite_add_tcase(suite, pool);
    return run_suite(suite);
}
