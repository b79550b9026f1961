// SPDX-License-Identifier: Apache-2.0
/* Destinations on a device: bytes go there through a bounce buffer (proxy), or the card writes or reads into them. */
#include <check.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/error.h"
#include "dataplane/engine/request_internal.h"
#include "fakes/device_case.h"
#include "fakes/engine_case.h"
#include "fakes/fake_clock.h"
#include "fakes/run_suite.h"
#include "tensor/device.h"

#define PIECE ((uint64_t)256 * 1024)
#define BLOCK TL_STAGING_BLOCK_BYTES

static void setup(void)
{
    setup_cuda();
    engine_pair_defaults(&options);
    options.engine.inline_bytes = TL_INLINE_BYTES; /* nothing comes inline from or to a device */
}

/* The card reaches the device. */
static void setup_direct(void)
{
    setup();
    options.provider.reach = cuda->reach;
}

static struct tl_tensor *value_on(struct tl_device device, uint64_t size_bytes, unsigned seed)
{
    struct tl_tensor *tensor = bytes_on(device, size_bytes);
    if (size_bytes > 0) fill(tensor, seed);
    return tensor;
}

static void nap(void)
{
    const struct timespec moment = {.tv_nsec = 200 * 1000};
    nanosleep(&moment, NULL);
}

/* Runs both sides until the fetch is done. The device is at work on its own threads. */
static void run_until_done(struct engine_ask *of)
{
    for (unsigned i = 0; i < 50000 && of->done_count == 0; i++) {
        engine_pair_run(&pair);
        nap();
    }
    ck_assert_uint_eq(of->done_count, 1);
}

static void run_for_a_while(void)
{
    for (unsigned i = 0; i < 100; i++) {
        engine_pair_run(&pair);
        nap();
    }
}

static enum request_state state_of(const struct engine_ask *of)
{
    const struct request *request = of->fetch.transport_state;
    return request != NULL ? request->state : REQUEST_NEVER;
}

static const struct request *request_of(const struct engine_ask *of)
{
    ck_assert_ptr_nonnull(of->fetch.transport_state);
    return of->fetch.transport_state;
}

static void run_until_state(const struct engine_ask *of, enum request_state state)
{
    for (unsigned i = 0; i < 5000 && state_of(of) != state; i++) {
        engine_pair_run(&pair);
        nap();
    }
    ck_assert_int_eq(state_of(of), state);
}

/* Asks for a new tensor on the device, which is open, or for the destination of the ask. */
static void start(const char *key, uint64_t step)
{
    ck_assert_int_eq(tl_device_open(gpu0, NULL), TL_OK);
    ask.device = gpu0;
    engine_ask_start(asker, &ask, key, step);
}

static void expect(uint64_t size_bytes, unsigned seed, enum tl_path path)
{
    run_until_done(&ask);
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert_uint_eq(tl_tensor_size_bytes(ask.fetch.destination), size_bytes);
    ck_assert(tl_tensor_is_on_device(ask.fetch.destination));
    if (size_bytes > 0) ck_assert(is_filled(ask.fetch.destination, seed));
    ck_assert_msg(ask.fetch.path == path, "%s: %s", tl_path_name(ask.fetch.path), ask.fetch.path_reason);
}

static void expect_reason(const char *part)
{
    ck_assert_msg(strstr(ask.fetch.path_reason, part) != NULL, "%s", ask.fetch.path_reason);
}

static void expect_failure(enum tl_status code, const char *part)
{
    run_until_done(&ask);
    ck_assert_msg(ask.result.code == code, "%d: %s", ask.result.code, ask.result.message);
    ck_assert_msg(strstr(ask.result.message, part) != NULL, "%s", ask.result.message);
}

static void close_conn(void)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "ended by the test");
    if (asker->conn != NULL) tl_conn_close(asker->conn, &reason);
    if (owner->conn != NULL) tl_conn_close(owner->conn, &reason);
}

static uint64_t copied_bytes(void)
{
    struct fake_cuda_counts counts;
    cuda->get_counts(&counts);
    return counts.copied_bytes;
}

/* Nothing is left: neither at the engines nor of the device. */
static void finish(void)
{
    engine_pair_close(&pair);
    cuda->hold(NULL, false);
    check_blocks(gpu0);
    await_frees(0);
}

/* ------------------------------------------------------------------------------------------------------- proxy -- */

static const uint64_t sizes[] = {1, 5000, PIECE, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77};

/* Each byte is copied to the device once, and read back once if there is a checksum; with known meta-data and without,
 * written and read, into new tensors and those of the caller. */
START_TEST(all_bytes_arrive)
{
    options.engine.keys = _i % 2 == 0 ? TL_KEYS_WINDOW : TL_KEYS_REGION;
    options.engine.is_reading = _i / 2 == 1;
    options.provider.max_write_bytes = PIECE;
    open_pair();
    for (unsigned i = 0; i < TL_ARRAY_COUNT(sizes); i++) {
        for (unsigned round = 0; round < 4; round++) {
            uint64_t before = copied_bytes();
            engine_side_publish(owner, "key", 4 * i + round, engine_bytes(1, 0));
            engine_side_publish(owner, "key", 4 * i + round, value_on(host, sizes[i], i + round));
            ask.wants_checksum = round % 2 == 1;
            ask.destination = round / 2 == 1 ? bytes_on(gpu0, sizes[i]) : NULL;
            struct tl_tensor *destination = ask.destination;
            start("key", 4 * i + round);
            expect(sizes[i], i + round, TL_PATH_GPU_PROXY);
            expect_reason(_i % 2 == 0 ? "the transport reaches no memory of devices" : "only into the pool");
            if (destination != NULL) ck_assert_ptr_eq(ask.fetch.destination, destination);
            ck_assert_uint_eq(copied_bytes() - before, sizes[i] * (1 + round % 2));
            engine_ask_fini(&ask);
        }
    }
    if (_i == 2) ck_assert_uint_gt(engine_side_stats(asker).reads_posted, 0);
    finish();
}
END_TEST

/* The pool is pinned with the first of them; then the CPU copies none of their bytes. */
START_TEST(pinned_pool)
{
    options.engine.keys = _i == 1 ? TL_KEYS_REGION : TL_KEYS_WINDOW;
    options.engine.is_reading = _i == 2;
    open_pair();
    engine_side_publish(owner, "first", 1, engine_pool_bytes(owner, 10, 1));
    start("first", 1);
    run_until_done(&ask);
    ck_assert_int_eq(ask.fetch.path, TL_PATH_GPU_PROXY);
    engine_ask_fini(&ask);
    while (tl_memory_why_not_pinned(asker->conn->memory, gpu0) != NULL)
        nap();
    uint64_t bounced = engine_side_memory(asker).bounced_bytes, before = copied_bytes();
    struct tl_tensor *value = engine_pool_bytes(owner, 2 * BLOCK + 5, 1);
    fill(value, 1);
    engine_side_publish(owner, "key", 1, value);
    ask.wants_checksum = true;
    start("key", 1);
    expect(2 * BLOCK + 5, 1, TL_PATH_GPU_PROXY);
    ck_assert_uint_eq(engine_side_memory(asker).bounced_bytes, bounced);
    ck_assert_uint_eq(copied_bytes() - before, 2 * (2 * BLOCK + 5));
    engine_ask_fini(&ask);
    finish();
}
END_TEST

/* Both sides are devices. */
START_TEST(from_device_to_device)
{
    options.engine.is_reading = _i == 1;
    open_pair();
    engine_side_publish(owner, "key", 1, value_on(gpu1, 2 * BLOCK + 5, 3));
    uint64_t before = copied_bytes();
    ask.wants_checksum = true;
    start("key", 1);
    expect(2 * BLOCK + 5, 3, TL_PATH_GPU_PROXY);
    ck_assert_uint_eq(copied_bytes() - before, 3 * (2 * BLOCK + 5));
    engine_ask_fini(&ask);
    finish();
}
END_TEST

/* The first bytes are on their way to the device before the last ones have come. */
START_TEST(copied_while_the_rest_arrives)
{
    struct engine_ask *const of = &ask;
    options.provider.max_write_bytes = PIECE;
    options.engine.is_reading = _i == 1;
    open_pair();
    engine_side_publish(owner, "key", 1, value_on(host, 8 * PIECE, 1));
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_DELAY,
                                                          .kinds = _i == 1 ? FAKE_READ : FAKE_WRITE,
                                                          .from = 4,
                                                          .times = FAKE_ALWAYS,
                                                          .min_bytes = 1000,
                                                          .count = 20000});
    start("key", 1);
    for (unsigned i = 0; i < 5000 && of->fetch.received_bytes == 0; i++) {
        (void)engine_side_round(asker);
        (void)engine_side_round(owner);
        engine_side_settle(asker);
        nap();
    }
    ck_assert_uint_gt(of->fetch.received_bytes, 0);
    ck_assert_uint_lt(request_of(of)->received_bytes, 8 * PIECE);
    expect(8 * PIECE, 1, TL_PATH_GPU_PROXY);
    engine_ask_fini(&ask);
    finish();
}
END_TEST

/* Values without bytes call nothing of the device, and wait for nothing. */
START_TEST(without_bytes)
{
    static const uint64_t none = 0;
    struct tl_tensor *dead, *empty;
    options.engine.is_reading = _i == 1;
    open_pair();
    ck_assert_int_eq(tl_tensor_create_dead(&dead, NULL), TL_OK);
    ck_assert_int_eq(tl_tensor_create(TL_U8, 1, &none, &empty, NULL), TL_OK);
    engine_side_publish(owner, "dead", 1, dead);
    engine_side_publish(owner, "empty", 1, empty);
    cuda->hold(NULL, true);
    ask.wants_checksum = true;
    start("dead", 1);
    run_until_done(&ask);
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert(tl_tensor_is_dead(ask.fetch.destination) && !tl_tensor_is_on_device(ask.fetch.destination));
    engine_ask_fini(&ask);
    ask.wants_checksum = true;
    start("empty", 1);
    expect(0, 0, TL_PATH_NONE);
    engine_ask_fini(&ask);
    struct fake_cuda_counts counts;
    cuda->get_counts(&counts);
    ck_assert_uint_eq(counts.device_allocations, 0);
    engine_pair_close(&pair);
    cuda->hold(NULL, false);
}
END_TEST

/* The value gets another shape between two receives, and a size of zero. */
START_TEST(another_value_than_expected)
{
    options.engine.is_reading = _i == 1;
    open_pair();
    const uint64_t values[] = {PIECE, 3 * PIECE, 0, 100, PIECE};
    for (unsigned i = 0; i < TL_ARRAY_COUNT(values); i++) {
        engine_side_publish(owner, "key", i, value_on(host, values[i], i));
        start("key", i);
        expect(values[i], i, values[i] > 0 ? TL_PATH_GPU_PROXY : TL_PATH_NONE);
        engine_ask_fini(&ask);
    }
    finish();
}
END_TEST

static const char *why_not(void)
{
    return tl_memory_why_not_written(asker->memory, gpu0, options.engine.keys);
}

/* Has the card tried, and returns when the result is known. */
static void await_probe(void)
{
    for (unsigned i = 0; i < 50000; i++) {
        const char *reason = why_not();
        if (reason == NULL || strstr(reason, "for the first time") == NULL) return;
        nap();
    }
    ck_assert_msg(false, "%s", why_not());
}

/* ---------------------------------------------------------------------------------------------------- checksum -- */

/* What the device holds is compared: a byte that is wrong there, or on the way, is found. */
START_TEST(wrong_checksum)
{
    if (_i >= 2) options.provider.reach = cuda->reach;
    options.engine.is_reading = _i % 2 == 1;
    open_pair();
    if (_i >= 2) await_probe(); /* which would get the wrong byte */
    engine_side_publish(owner, "key", 1, value_on(host, PIECE, 1));
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_CORRUPT,
                                                          .kinds = options.engine.is_reading ? FAKE_READ : FAKE_WRITE,
                                                          .min_bytes = 1000});
    ask.wants_checksum = true;
    start("key", 1);
    expect_failure(TL_DATA_LOSS, "checksum");
    engine_ask_fini(&ask);
    finish();
}
END_TEST

/* ------------------------------------------------------------------------------------------------------- memory -- */

/* A destination for which the pool can never have enough memory may travel over the link. */
START_TEST(more_than_the_pool_may_have)
{
    options.memory.max_pool_bytes = options.memory.pool_bytes;
    options.engine.is_reading = _i == 1;
    open_pair();
    for (unsigned round = 0; round < 2; round++) { /* the second time with known meta-data */
        engine_side_send(owner, "key", round, value_on(host, 2 * options.memory.pool_bytes, 1));
        start("key", round);
        expect_failure(TL_RESOURCE_EXHAUSTED, "max_pool");
        ck_assert(ask.fetch.is_rerouted);
        ck_assert_str_eq(ask.fetch.path_reason, ask.result.message);
        engine_ask_fini(&ask);
        ck_assert(engine_side_has(owner, "key", round));
    }
    ck_assert_int_eq(owner->last_end, TL_SERVE_CANCELLED);
    ck_assert_uint_eq(engine_side_stats(asker).rerouted, 2);
    finish();
}
END_TEST

/* One on the host as well, in memory of the library or of the user, and under known meta-data. */
START_TEST(more_than_the_pool_may_have_on_the_host)
{
    options.memory.max_pool_bytes = options.memory.pool_bytes;
    options.engine.is_bounce_forced = _i == 1;
    open_pair();
    for (unsigned round = 0; round < 2; round++) {
        engine_side_send(owner, "key", round, value_on(host, 2 * options.memory.pool_bytes, 1));
        ask = (struct engine_ask){.device = host};
        engine_ask_start(asker, &ask, "key", round);
        expect_failure(TL_RESOURCE_EXHAUSTED, "max_pool");
        ck_assert(ask.fetch.is_rerouted);
        engine_ask_fini(&ask);
        ck_assert(engine_side_has(owner, "key", round));
    }
    ck_assert_uint_eq(engine_side_stats(asker).rerouted, 2);
    finish();
}
END_TEST

/* Nothing tells when a request begins to wait for memory, since the device is at work before: time passes until the
 * fetch is done. */
static void let_time_pass(const struct engine_ask *of)
{
    for (unsigned i = 0; i < 50000 && of->done_count == 0; i++) {
        fake_clock_advance(10 * TL_NS_PER_MS);
        engine_pair_run(&pair);
        nap();
    }
}

/* Both workers have pools that are full of what they receive, and need memory there to send. Neither waits for the
 * other for ever: a value is asked for over the link, and the memory that it would have gone to lets the other one
 * come. */
START_TEST(both_pools_are_full)
{
    static struct engine_ask other;
    options.memory.pool_bytes = options.memory.max_pool_bytes = 4 << 20;
    options.engine.is_bounce_forced = _i == 1;
    open_pair();
    struct tl_device where = _i == 0 ? gpu0 : host;
    engine_side_send(owner, "key", 1, value_on(where, 4 << 20, 1));
    engine_side_send(asker, "key", 1, value_on(where, 4 << 20, 2));
    ck_assert_int_eq(tl_device_open(gpu0, NULL), TL_OK);
    ask = other = (struct engine_ask){.device = where};
    engine_ask_start(asker, &ask, "key", 1);
    engine_ask_start(owner, &other, "key", 1);
    run_for_a_while();
    ck_assert_uint_eq(ask.done_count + other.done_count, 0);
    struct engine_ask *const asks[] = {&ask, &other};
    for (unsigned i = 0; i < 2; i++) {
        bool is_first = asks[i] == &ask;
        let_time_pass(asks[i]);
        run_until_done(asks[i]);
        if (asks[i]->result.code == TL_OK) {
            ck_assert(is_filled(asks[i]->fetch.destination, is_first ? 1 : 2));
        } else {
            ck_assert_int_eq(asks[i]->result.code, TL_UNAVAILABLE);
            ck_assert(asks[i]->fetch.is_rerouted);
            ck_assert_msg(strstr(asks[i]->fetch.path_reason, "max_pool") != NULL, "%s", asks[i]->fetch.path_reason);
            ck_assert(engine_side_has(is_first ? owner : asker, "key", 1));
            ck_assert_int_eq((is_first ? owner : asker)->last_end, TL_SERVE_BROKEN); /* it stays reserved */
        }
        engine_ask_fini(asks[i]);
    }
    finish();
}
END_TEST

/* Many values at once, more than the pool holds: each waits for its turn. */
START_TEST(more_than_the_pool)
{
    enum { MANY = 12 };
    static struct engine_ask asks[MANY];
    char key[16];
    options.memory.pool_bytes = options.memory.max_pool_bytes = 4 << 20;
    options.engine.is_reading = _i == 1;
    open_pair();
    for (unsigned i = 0; i < MANY; i++) {
        snprintf(key, sizeof(key), "key %u", i);
        engine_side_publish(owner, key, 1, value_on(host, 3 * PIECE, i));
        ck_assert_int_eq(tl_device_open(gpu0, NULL), TL_OK);
        asks[i] = (struct engine_ask){.device = gpu0, .wants_checksum = i % 2 == 0};
        engine_ask_start(asker, &asks[i], key, 1);
    }
    for (unsigned i = 0; i < MANY; i++) {
        run_until_done(&asks[i]);
        ck_assert_msg(asks[i].result.code == TL_OK, "%s", asks[i].result.message);
        ck_assert(is_filled(asks[i].fetch.destination, i));
        engine_ask_fini(&asks[i]);
    }
    finish();
}
END_TEST

/* The device has no memory. Before the request has asked, the value may be a smaller one than last time. */
START_TEST(allocation_that_fails)
{
    options.engine.is_reading = _i == 1;
    open_pair();
    engine_side_publish(owner, "key", 1, value_on(host, 2 * PIECE, 1));
    start("key", 1);
    expect(2 * PIECE, 1, TL_PATH_GPU_PROXY);
    engine_ask_fini(&ask);
    await_frees(0);
    cuda->set_capacity(PIECE);
    start("key", 1);
    expect_failure(TL_RESOURCE_EXHAUSTED, "tensor 'key': allocating 524288 bytes failed on gpu:0");
    ck_assert(!ask.fetch.is_rerouted);
    engine_ask_fini(&ask);
    engine_side_publish(owner, "key", 2, value_on(host, 1000, 2));
    start("key", 2);
    expect(1000, 2, TL_PATH_GPU_PROXY);
    engine_ask_fini(&ask);
    cuda->set_capacity(SIZE_MAX);
    finish();
}
END_TEST

/* ------------------------------------------------------------------------------------------------------ the end -- */

enum way { CANCELLED, BROKEN, LOST, WAYS };

static void end_in(enum way way)
{
    if (way == CANCELLED) engine_ask_cancel(&ask);
    if (way == BROKEN) close_conn();
    if (way == LOST) cuda->break_device(0, 700);
}

static void do_nothing(void *unused)
{
    (void)unused;
}

/* While the memory of the destination is allocated, which a full device does when frees are over. */
START_TEST(ends_while_it_allocates)
{
    enum way way = (enum way)(_i / 4);
    bool is_known = _i % 2 == 1;
    options.engine.is_reading = _i / 2 % 2 == 1;
    open_pair();
    engine_side_send(owner, "key", 1, value_on(host, PIECE, 1));
    if (is_known) {
        start("key", 1);
        expect(PIECE, 1, TL_PATH_GPU_PROXY);
        engine_ask_fini(&ask);
        engine_side_send(owner, "key", 1, value_on(host, PIECE, 1));
    }
    /* A kernel runs, and what is freed waits for it. */
    struct tl_tensor *full = bytes_on(gpu0, 100);
    await_frees(1);
    cuda->set_capacity(PIECE);
    void *stream = cuda->create_stream(0, true);
    cuda->hold(stream, true);
    cuda->launch(stream, do_nothing, NULL);
    tl_tensor_put(full);
    start("key", 1);
    run_until_state(&ask, REQUEST_PREPARING);
    run_for_a_while();
    ck_assert_int_eq(state_of(&ask), REQUEST_PREPARING);
    ck_assert_ptr_nonnull(request_of(&ask)->placement->landing.allocation);
    end_in(way);
    if (way == LOST) cuda->hold(stream, false);
    run_until_done(&ask);
    ck_assert_int_eq(ask.result.code, way == CANCELLED ? TL_CANCELLED
                                      : way == BROKEN  ? TL_UNAVAILABLE
                                                       : TL_FAILED_PRECONDITION);
    engine_ask_fini(&ask);
    ck_assert(engine_side_has(owner, "key", 1));
    cuda->hold(stream, false);
    engine_pair_close(&pair);
    cuda->set_capacity(SIZE_MAX);
    if (way != LOST) await_frees(0);
}
END_TEST

/* Memory comes in the end. With a source that is read, the owner does not keep it meanwhile. */
START_TEST(allocated_late)
{
    options.engine.is_reading = _i == 1;
    open_pair();
    engine_side_send(owner, "key", 1, value_on(host, PIECE, 1));
    struct tl_tensor *full = bytes_on(gpu0, 100);
    await_frees(1);
    cuda->set_capacity(PIECE);
    void *stream = cuda->create_stream(0, true);
    cuda->hold(stream, true);
    cuda->launch(stream, do_nothing, NULL);
    tl_tensor_put(full);
    start("key", 1);
    run_for_a_while();
    ck_assert_int_eq(state_of(&ask), REQUEST_PREPARING);
    ck_assert(request_of(&ask)->has_source == (_i == 1));
    for (unsigned i = 0; i < 8; i++) {
        fake_clock_advance(TL_NS_PER_SEC / 4);
        engine_pair_run(&pair);
    }
    ck_assert(!request_of(&ask)->has_source && request_of(&ask)->is_source_returned == (_i == 1));
    cuda->hold(stream, false);
    expect(PIECE, 1, TL_PATH_GPU_PROXY);
    engine_ask_fini(&ask);
    cuda->set_capacity(SIZE_MAX);
    finish();
}
END_TEST

/* Makes the blocks of the device, so that a held device holds copies only. */
static void pin_blocks(void)
{
    check_blocks(gpu0);
}

static struct tl_tensor *begin_held(uint64_t size_bytes)
{
    struct tl_tensor *destination = bytes_on(gpu0, size_bytes);
    pin_blocks();
    cuda->hold(NULL, true);
    engine_side_send(owner, "key", 1, value_on(host, size_bytes, 1));
    ask.destination = tl_tensor_get(destination);
    return destination;
}

/* The fetch is done only when the device has let go of the destination. */
static void check_let_go(struct tl_tensor *destination, enum way way)
{
    run_for_a_while();
    if (way != LOST) {
        ck_assert_uint_eq(ask.done_count, 0);
        cuda->hold(NULL, false);
    }
    run_until_done(&ask);
    engine_ask_fini(&ask);
    ck_assert(!tl_tensor_is_shared(destination));
    if (way != LOST) {
        fill(destination, 9);
        run_for_a_while();
        ck_assert(is_filled(destination, 9));
    }
    tl_tensor_put(destination);
}

/* While a piece is copied and the rest is on its way. */
START_TEST(ends_while_bytes_arrive)
{
    enum way way = (enum way)(_i / 2);
    options.engine.is_reading = _i % 2 == 1;
    options.provider.max_write_bytes = PIECE;
    open_pair();
    struct tl_tensor *destination = begin_held(8 * PIECE);
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_DROP,
                                                          .kinds = _i % 2 == 1 ? FAKE_READ : FAKE_WRITE,
                                                          .from = 4,
                                                          .min_bytes = 1000});
    start("key", 1);
    run_for_a_while();
    ck_assert_int_eq(state_of(&ask), _i % 2 == 1 ? REQUEST_READING : REQUEST_ASKED);
    ck_assert_ptr_nonnull(request_of(&ask)->placement->landing.piece);
    end_in(way);
    if (way != BROKEN) { /* what is held up comes no more, so that the connection must end */
        run_for_a_while();
        close_conn();
    }
    if (way == LOST) cuda->hold(NULL, false);
    check_let_go(destination, way);
    ck_assert(engine_side_has(owner, "key", 1));
    engine_pair_close(&pair);
    if (way != LOST) await_frees(0);
}
END_TEST

/* While the last copies are made: all has arrived, so that a cancel and the end of the connection change nothing. */
START_TEST(ends_while_it_copies)
{
    enum way way = (enum way)(_i / 2);
    options.engine.is_reading = _i % 2 == 1;
    open_pair();
    struct tl_tensor *destination = begin_held(3 * BLOCK);
    start("key", 1);
    run_until_state(&ask, REQUEST_COPYING);
    end_in(way);
    run_for_a_while();
    ck_assert(!engine_side_has(owner, "key", 1));
    if (way != LOST) {
        ck_assert_uint_eq(ask.done_count, 0);
        ck_assert_int_eq(state_of(&ask), REQUEST_COPYING);
    }
    cuda->hold(NULL, false);
    run_until_done(&ask);
    if (way == LOST) {
        ck_assert_int_eq(ask.result.code, TL_FAILED_PRECONDITION);
        ck_assert_msg(strstr(ask.result.message, "key: gpu:0 is lost") != NULL, "%s", ask.result.message);
    } else {
        ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
        ck_assert(is_filled(destination, 1));
    }
    engine_ask_fini(&ask);
    ck_assert(!tl_tensor_is_shared(destination));
    tl_tensor_put(destination);
    engine_pair_close(&pair);
    if (way != LOST) await_frees(0);
}
END_TEST

/* The device is lost while bytes arrive: the request is given up, and the connection carries on. */
START_TEST(lost_while_bytes_arrive)
{
    options.engine.is_reading = _i == 1;
    options.provider.max_write_bytes = PIECE;
    open_pair();
    struct tl_tensor *destination = begin_held(8 * PIECE);
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_DELAY,
                                                          .kinds = _i == 1 ? FAKE_READ : FAKE_WRITE,
                                                          .from = 4,
                                                          .min_bytes = 1000,
                                                          .count = 100000});
    start("key", 1);
    for (unsigned i = 0; i < 300; i++) {
        (void)engine_side_round(asker);
        (void)engine_side_round(owner);
        nap();
    }
    ck_assert_ptr_nonnull(request_of(&ask)->placement->landing.piece);
    cuda->break_device(0, 700);
    cuda->hold(NULL, false);
    expect_failure(TL_FAILED_PRECONDITION, "key: gpu:0 is lost");
    engine_ask_fini(&ask);
    engine_side_publish(owner, "other", 1, engine_bytes(5000, 4));
    engine_ask_start(asker, &ask, "other", 1);
    run_until_done(&ask);
    ck_assert_int_eq(ask.result.code, TL_OK);
    engine_ask_fini(&ask);
    tl_tensor_put(destination);
    engine_pair_close(&pair);
}
END_TEST

/* A request that waits for its copies holds up no other one. */
START_TEST(others_pass_by)
{
    static struct engine_ask other;
    open_pair();
    struct tl_tensor *destination = begin_held(PIECE);
    start("key", 1);
    run_until_state(&ask, REQUEST_COPYING);
    engine_side_publish(owner, "other", 1, engine_bytes(5000, 4));
    other = (struct engine_ask){.is_unregistered = true};
    engine_ask_start(asker, &other, "other", 1);
    run_until_done(&other);
    ck_assert_int_eq(other.result.code, TL_OK);
    ck_assert(engine_is_bytes(other.fetch.destination, 5000, 4));
    engine_ask_fini(&other);
    ck_assert_uint_eq(ask.done_count, 0);
    cuda->hold(NULL, false);
    expect(PIECE, 1, TL_PATH_GPU_PROXY);
    engine_ask_fini(&ask);
    tl_tensor_put(destination);
    finish();
}
END_TEST

/* ------------------------------------------------------------------------------------------------------ direct -- */

static const uint64_t direct_sizes[] = {64 * 1024, PIECE + 1, 6 * PIECE + 77};

/* No byte is copied, except for a checksum, which reads what the device holds. */
START_TEST(nothing_is_copied)
{
    options.engine.is_reading = _i == 1;
    options.provider.max_write_bytes = PIECE;
    open_pair();
    await_probe();
    ck_assert_ptr_null(why_not());
    for (unsigned i = 0; i < TL_ARRAY_COUNT(direct_sizes); i++) {
        for (unsigned round = 0; round < 4; round++) {
            struct tl_tensor *value = engine_pool_bytes(owner, direct_sizes[i], 1);
            fill(value, i + round);
            engine_side_publish(owner, "key", 4 * i + round, value);
            uint64_t before = copied_bytes(), bounced = engine_side_memory(asker).bounced_bytes;
            ask.wants_checksum = round % 2 == 1;
            start("key", 4 * i + round);
            expect(direct_sizes[i], i + round, TL_PATH_GPU_DIRECT);
            ck_assert_ptr_null(ask.fetch.path_reason);
            ck_assert_uint_eq(copied_bytes() - before, round % 2 == 1 ? direct_sizes[i] : 0);
            ck_assert_uint_eq(engine_side_memory(asker).bounced_bytes, bounced);
            engine_ask_fini(&ask);
        }
    }
    ck_assert_uint_gt(engine_side_memory(asker).registrations, 0);
    if (_i == 1) ck_assert_uint_gt(engine_side_stats(asker).reads_posted, 0);
    finish();
}
END_TEST

/* From device to device, and nothing is copied on the way. */
START_TEST(directly_on_both_sides)
{
    options.engine.is_reading = _i == 1;
    open_pair();
    await_probe();
    while (tl_memory_why_not_direct(owner->memory, gpu1, options.engine.keys) != NULL)
        nap();
    uint64_t before = copied_bytes();
    engine_side_publish(owner, "key", 1, value_on(gpu1, 3 * PIECE, 1));
    start("key", 1);
    expect(3 * PIECE, 1, TL_PATH_GPU_DIRECT);
    ck_assert_uint_eq(copied_bytes(), before);
    engine_ask_fini(&ask);
    finish();
}
END_TEST

/* A value that its owner copies is not called direct. */
START_TEST(copied_by_its_owner)
{
    open_pair();
    await_probe();
    options.engine.register_bytes = 0;
    engine_side_publish(owner, "key", 1, engine_bytes(PIECE, 1));
    fake_fabric_add_rule(pair.fabric,
                         &(struct fake_rule){.fault = FAKE_REGION_FAILURE, .provider = owner->provider, .times = 9});
    ask.device = gpu0;
    engine_ask_start(asker, &ask, "key", 1);
    run_until_done(&ask);
    ck_assert_int_eq(ask.fetch.path, TL_PATH_BOUNCE);
    expect_reason("copied by the owner");
    engine_ask_fini(&ask);
    finish();
}
END_TEST

/* The card cannot write the device, for one reason or another, and the completion says why. */
START_TEST(not_direct)
{
    static const char *const reasons[] = {
        "does not order what cards write", "has no dma-buf", "verbs.register", "verbs.bounce", "verbs.keys: region",
        "cannot register memory",          "gpu.proxy"};
    uint64_t size_bytes = _i == 2 ? 1000 : PIECE;
    if (_i == 0) cuda->order_writes(false);
    if (_i == 1) cuda->set_direct(false, false);
    options.engine.is_bounce_forced = _i == 3;
    options.engine.is_gpu_proxy_forced = _i == 6;
    options.engine.keys = _i == 4 ? TL_KEYS_REGION : TL_KEYS_WINDOW;
    open_pair();
    await_probe();
    if (_i == 5) {
        fake_fabric_add_rule(
            pair.fabric, &(struct fake_rule){.fault = FAKE_REGION_FAILURE, .provider = asker->provider, .times = 2});
    }
    struct tl_tensor *value = engine_pool_bytes(owner, size_bytes, 1);
    fill(value, 1);
    engine_side_publish(owner, "key", 1, value);
    start("key", 1);
    expect(size_bytes, 1, TL_PATH_GPU_PROXY);
    expect_reason(reasons[_i]);
    engine_ask_fini(&ask);
    finish();
    cuda->order_writes(true);
    cuda->set_direct(true, true);
}
END_TEST

/* The first destination that is wanted is written through the pool while the card is tried. */
START_TEST(the_first_destination)
{
    open_pair();
    fake_fabric_hold_regions(pair.fabric, true); /* so that the probe takes longer */
    struct tl_tensor *value = engine_pool_bytes(owner, PIECE, 1);
    fill(value, 1);
    engine_side_publish(owner, "key", 1, value);
    start("key", 1);
    expect(PIECE, 1, TL_PATH_GPU_PROXY);
    expect_reason("for the first time");
    engine_ask_fini(&ask);
    fake_fabric_hold_regions(pair.fabric, false);
    await_probe();
    start("key", 1);
    expect(PIECE, 1, TL_PATH_GPU_DIRECT);
    engine_ask_fini(&ask);
    finish();
}
END_TEST

/* A request ends while its destination is registered, or while the card writes it. */
START_TEST(direct_that_ends)
{
    enum way way = (enum way)(_i / 4);
    bool is_registering = _i % 2 == 0;
    options.engine.is_reading = _i / 2 % 2 == 1;
    open_pair();
    await_probe();
    struct tl_tensor *destination = bytes_on(gpu0, PIECE), *value = engine_pool_bytes(owner, PIECE, 1);
    engine_side_send(owner, "key", 1, value);
    ask.destination = tl_tensor_get(destination);
    if (is_registering) {
        fake_fabric_hold_regions(pair.fabric, true);
    } else {
        fake_fabric_add_rule(pair.fabric,
                             &(struct fake_rule){.fault = FAKE_DROP,
                                                 .kinds = options.engine.is_reading ? FAKE_READ : FAKE_WRITE,
                                                 .min_bytes = 1000});
    }
    start("key", 1);
    for (unsigned i = 0; i < 200; i++) {
        (void)engine_side_round(asker);
        (void)engine_side_round(owner);
        if (!is_registering) engine_side_settle(asker);
    }
    ck_assert_uint_eq(ask.done_count, 0);
    end_in(way);
    for (unsigned i = 0; i < 200; i++) {
        (void)engine_side_round(asker);
        (void)engine_side_round(owner);
    }
    ck_assert_uint_eq(ask.done_count, is_registering || way == CANCELLED ? 0 : 1);
    fake_fabric_hold_regions(pair.fabric, false);
    if (!is_registering && way == CANCELLED) close_conn();
    run_until_done(&ask);
    ck_assert_int_ne(ask.result.code, TL_OK);
    engine_ask_fini(&ask);
    ck_assert(!tl_tensor_is_shared(destination));
    ck_assert(engine_side_has(owner, "key", 1));
    tl_tensor_put(destination);
    finish();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("engine_destination");
    TCase *proxy = tcase_create("proxy");
    tcase_add_checked_fixture(proxy, setup, NULL);
    tcase_add_loop_test(proxy, all_bytes_arrive, 0, 3);
    tcase_add_loop_test(proxy, pinned_pool, 0, 3);
    tcase_add_loop_test(proxy, from_device_to_device, 0, 2);
    tcase_add_loop_test(proxy, copied_while_the_rest_arrives, 0, 2);
    tcase_add_loop_test(proxy, without_bytes, 0, 2);
    tcase_add_loop_test(proxy, another_value_than_expected, 0, 2);
    tcase_add_loop_test(proxy, wrong_checksum, 0, 4);
    tcase_add_loop_test(proxy, more_than_the_pool_may_have, 0, 2);
    tcase_add_loop_test(proxy, more_than_the_pool, 0, 2);
    tcase_add_loop_test(proxy, both_pools_are_full, 0, 2);
    tcase_add_loop_test(proxy, allocation_that_fails, 0, 2);
    tcase_add_loop_test(proxy, ends_while_it_allocates, 0, 12);
    tcase_add_loop_test(proxy, allocated_late, 0, 2);
    tcase_add_loop_test(proxy, ends_while_bytes_arrive, 0, 6);
    tcase_add_loop_test(proxy, ends_while_it_copies, 0, 6);
    tcase_add_loop_test(proxy, lost_while_bytes_arrive, 0, 2);
    tcase_add_test(proxy, others_pass_by);
    suite_add_tcase(suite, proxy);
    TCase *on_host = tcase_create("more_than_the_pool_may_have_on_the_host"); /* tests/defects runs it alone */
    tcase_add_checked_fixture(on_host, setup, NULL);
    tcase_add_loop_test(on_host, more_than_the_pool_may_have_on_the_host, 0, 2);
    suite_add_tcase(suite, on_host);
    TCase *direct = tcase_create("direct");
    tcase_add_checked_fixture(direct, setup_direct, NULL);
    tcase_add_loop_test(direct, nothing_is_copied, 0, 2);
    tcase_add_loop_test(direct, directly_on_both_sides, 0, 2);
    tcase_add_test(direct, copied_by_its_owner);
    tcase_add_loop_test(direct, not_direct, 0, 7);
    tcase_add_test(direct, the_first_destination);
    tcase_add_loop_test(direct, direct_that_ends, 0, 8);
    suite_add_tcase(suite, direct);
    return run_suite(suite);
}
