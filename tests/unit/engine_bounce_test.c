// SPDX-License-Identifier: Apache-2.0
/* Why a tensor was copied: the fetch reports the true reason, and what cannot be registered is logged. */
#include <check.h>
#include <string.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/clock.h"
#include "base/error.h"
#include "dataplane/engine/message.h"
#include "fakes/engine_case.h"
#include "fakes/fake_clock.h"
#include "fakes/log_capture.h"
#include "fakes/run_suite.h"
#include "fakes/temp_folder.h"
#include "tensor/mapped_file.h"
#include "tensor/mapped_tensor.h"

#define SMALL_BYTES 5000
#define LARGE_BYTES 200000
#define PIECE_BYTES 16384 /* how a tensor of LARGE_BYTES is divided */

static void setup(void)
{
    engine_pair_defaults(&options);
}

static void fail_registrations(const struct engine_side *side)
{
    fake_fabric_add_rule(
        pair.fabric,
        &(struct fake_rule){.fault = FAKE_REGION_FAILURE, .provider = side->provider, .times = FAKE_ALWAYS});
}

static void fetch(uint64_t step, struct tl_tensor *source, bool is_unregistered)
{
    engine_side_send(owner, "key", step, source);
    ask.is_unregistered = is_unregistered;
    engine_ask_start(asker, &ask, "key", step);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 1);
}

static void expect_copy(const char *reason)
{
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert_int_eq(ask.fetch.path, TL_PATH_BOUNCE);
    ck_assert_msg(strstr(ask.fetch.path_reason, reason) != NULL, "%s", ask.fetch.path_reason);
    engine_ask_fini(&ask);
}

START_TEST(small_memory)
{
    open_pair();
    fetch(1, engine_pool_bytes(owner, SMALL_BYTES, 1), true);
    expect_copy("verbs.register");
    fetch(2, engine_bytes(SMALL_BYTES, 2), false);
    expect_copy("copied by the owner");
    fetch(3, engine_bytes(SMALL_BYTES, 3), true); /* Both reasons hold; the one that we know more about is reported. */
    expect_copy("verbs.register");
    engine_pair_close(&pair);
}
END_TEST

START_TEST(forced)
{
    options.engine.is_bounce_forced = true;
    open_pair();
    fetch(1, engine_pool_bytes(owner, LARGE_BYTES, 1), true);
    expect_copy("verbs.bounce");
    engine_pair_close(&pair);
}
END_TEST

START_TEST(keys_of_regions)
{
    options.engine.keys = TL_KEYS_REGION;
    open_pair();
    fetch(1, engine_pool_bytes(owner, LARGE_BYTES, 1), true);
    expect_copy("verbs.keys: region");
    engine_pair_close(&pair);
}
END_TEST

START_TEST(refused_at_the_asker)
{
    log_capture_begin();
    open_pair();
    fail_registrations(asker);
    for (uint64_t step = 1; step <= 3; step++) {
        fetch(step, engine_pool_bytes(owner, LARGE_BYTES, step), true);
        expect_copy("left: cannot register memory");
    }
    ck_assert_uint_eq(log_capture_count("left: cannot register memory"), 1);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(refused_at_the_owner)
{
    log_capture_begin();
    open_pair();
    fail_registrations(owner);
    for (uint64_t step = 1; step <= 3; step++) {
        fetch(step, engine_bytes(LARGE_BYTES, step), false);
        expect_copy("copied by the owner");
    }
    ck_assert_uint_eq(log_capture_count("right: cannot register memory"), 1);
    engine_pair_close(&pair);
}
END_TEST

/* Each change is logged, even when only numbers differ. */
START_TEST(the_reason_changes)
{
    options.memory.max_cached_bytes = LARGE_BYTES / 2;
    log_capture_begin();
    open_pair();
    for (uint64_t step = 1; step <= 3; step++) {
        fetch(step, engine_pool_bytes(owner, LARGE_BYTES + step, step), true);
        expect_copy("verbs.cached");
    }
    ck_assert_uint_eq(log_capture_count("verbs.cached"), 1);
    fail_registrations(asker);
    fetch(4, engine_pool_bytes(owner, LARGE_BYTES / 2, 4), true);
    expect_copy("left: cannot register memory");
    ck_assert_uint_eq(log_capture_count("left: cannot register memory"), 1);
    fetch(5, engine_pool_bytes(owner, LARGE_BYTES, 5), true);
    expect_copy("verbs.cached");
    ck_assert_uint_eq(log_capture_count("verbs.cached"), 2);
    engine_pair_close(&pair);
}
END_TEST

/* Neither way is open. More pool could help; the other reason is in the log. */
START_TEST(no_space_either)
{
    options.memory.pool_bytes = options.memory.max_pool_bytes = 4 << 20;
    log_capture_begin();
    open_pair();
    fail_registrations(asker);
    fetch(1, engine_bytes(5 << 20, 1), true);
    ck_assert_int_eq(ask.result.code, TL_RESOURCE_EXHAUSTED);
    ck_assert_msg(strstr(ask.result.message, "verbs.max_pool") != NULL, "%s", ask.result.message);
    ck_assert_uint_eq(log_capture_count("left: cannot register memory"), 1);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

static void expect_no_copy(void)
{
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert_int_eq(ask.fetch.path, TL_PATH_ZERO_COPY);
    engine_ask_fini(&ask);
}

/* Where nothing needs to be registered, a tensor goes through the pool if that has space. */
START_TEST(copied_while_there_is_space)
{
    options.provider.needs_no_regions = true;
    options.engine.copy_bytes = LARGE_BYTES + 1;
    options.memory.pool_bytes = options.memory.max_pool_bytes = 4 << 20;
    options.engine.peer_memory = options.memory;
    open_pair();
    fetch(1, engine_pool_bytes(owner, LARGE_BYTES, 1), true);
    expect_copy("it is small");
    fetch(2, engine_pool_bytes(owner, LARGE_BYTES + 2, 2), true);
    expect_copy("both sides copy it");
    struct tl_tensor *all = engine_pool_bytes(asker, 4 << 20, 3);
    fetch(4, engine_pool_bytes(owner, LARGE_BYTES, 4), true);
    expect_no_copy();
    fetch(4, engine_pool_bytes(owner, 2 * LARGE_BYTES, 4), true);
    expect_no_copy();
    tl_tensor_put(all);
    fetch(5, engine_pool_bytes(owner, LARGE_BYTES, 5), true);
    expect_copy("it is small");
    engine_pair_close(&pair);
}
END_TEST

/* The rest of the pool is for tensors that the library chooses memory for. */
START_TEST(copies_leave_half_of_a_grown_pool)
{
    options.provider.needs_no_regions = true;
    options.engine.copy_bytes = LARGE_BYTES + 1;
    open_pair();
    struct tl_tensor *first = engine_pool_bytes(asker, 3 << 20, 1);
    fetch(2, engine_pool_bytes(owner, LARGE_BYTES, 2), true);
    expect_copy("it is small");
    struct tl_tensor *second = engine_pool_bytes(asker, 3 << 20, 3);
    ck_assert_uint_eq(engine_side_memory(asker).pool_bytes, 8 << 20);
    fetch(4, engine_pool_bytes(owner, LARGE_BYTES, 4), true);
    expect_no_copy();
    tl_tensor_put(first);
    fetch(5, engine_pool_bytes(owner, LARGE_BYTES, 5), true);
    expect_copy("it is small");
    tl_tensor_put(second);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(copies_leave_half_of_a_pool_that_cannot_grow)
{
    options.provider.needs_no_regions = true;
    options.engine.copy_bytes = LARGE_BYTES + 1;
    options.memory.max_pool_bytes = options.memory.pool_bytes;
    options.engine.peer_memory = options.memory;
    open_pair();
    struct tl_tensor *most = engine_pool_bytes(asker, 3 << 19, 1);
    fetch(2, engine_pool_bytes(owner, LARGE_BYTES, 2), true);
    expect_copy("it is small");
    struct tl_tensor *more = engine_pool_bytes(asker, 1 << 19, 3);
    fetch(4, engine_pool_bytes(owner, LARGE_BYTES, 4), true);
    expect_no_copy();
    tl_tensor_put(most);
    tl_tensor_put(more);
    engine_pair_close(&pair);
}
END_TEST

/* The writer is a processor, and tensors are copied through the pool. */
static void start_copying(void)
{
    options.provider.needs_no_regions = true;
    options.engine.copy_bytes = LARGE_BYTES + 1;
    open_pair();
    fetch(1, engine_pool_bytes(owner, LARGE_BYTES, 1), true); /* The meta-data is known from now on. */
    expect_copy("it is small");
    fake_fabric_set_manual(pair.fabric, true);
    engine_side_send(owner, "key", 2, engine_bytes(LARGE_BYTES, 2));
    ask.is_unregistered = true;
    engine_ask_start(asker, &ask, "key", 2);
}

/* Carries one operation after the other until the asker has copied a part. */
static void run_until_a_part_is_copied(void)
{
    uint64_t before_bytes = engine_side_stats(asker).bytes_bounced;
    for (unsigned i = 0; i < 1000 && engine_side_stats(asker).bytes_bounced == before_bytes; i++) {
        while (engine_side_round(asker) || engine_side_round(owner)) {
        }
        ck_assert(fake_fabric_step_any(pair.fabric));
    }
    uint64_t copied_bytes = engine_side_stats(asker).bytes_bounced - before_bytes;
    ck_assert_uint_gt(copied_bytes, 0);
    ck_assert_uint_lt(copied_bytes, LARGE_BYTES);
    ck_assert_uint_eq(ask.done_count, 0);
}

START_TEST(copied_while_the_rest_arrives)
{
    start_copying();
    uint64_t writes = engine_side_stats(owner).writes_posted;
    run_until_a_part_is_copied();
    fake_fabric_set_manual(pair.fabric, false);
    engine_pair_run(&pair);
    ck_assert_uint_eq(engine_side_stats(owner).writes_posted - writes, (LARGE_BYTES + PIECE_BYTES - 1) / PIECE_BYTES);
    ck_assert_uint_eq(engine_side_stats(asker).bytes_bounced, 2 * LARGE_BYTES);
    ck_assert(engine_is_bytes(ask.fetch.destination, LARGE_BYTES, 2));
    expect_copy("it is small");
    engine_pair_close(&pair);
}
END_TEST

/* What was copied counts for nothing: another transport would continue after it with another value. */
START_TEST(broken_after_a_part)
{
    struct tl_error reason;
    start_copying();
    run_until_a_part_is_copied();
    ck_assert_uint_gt(ask.fetch.received_bytes, 0);
    tl_error_set(&reason, TL_UNAVAILABLE, "the connection is closed");
    tl_conn_close(asker->conn, &reason);
    fake_fabric_set_manual(pair.fabric, false);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 1);
    ck_assert_int_eq(ask.result.code, TL_UNAVAILABLE);
    ck_assert_uint_eq(ask.fetch.received_bytes, 0);
    ck_assert_ptr_null(ask.fetch.destination);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

/* Nothing more is copied once the request is given up, because its owner may soon have the destination back. */
START_TEST(given_up_after_a_part)
{
    start_copying();
    run_until_a_part_is_copied();
    uint64_t before_bytes = engine_side_stats(asker).bytes_bounced;
    tl_conn_cancel(asker->conn, &ask.fetch);
    unsigned steps = 0;
    while (fake_fabric_step_any(pair.fabric)) {
        while (engine_side_round(asker) || engine_side_round(owner)) {
        }
        if (ask.done_count > 0) break; /* All has come before the owner knew: it is delivered. */
        ck_assert_uint_eq(engine_side_stats(asker).bytes_bounced, before_bytes);
        steps++;
    }
    ck_assert_uint_gt(steps, 1);
    fake_fabric_set_manual(pair.fabric, false);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 1);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------- laps -- */

#define LAP_BYTES 65536

/* Opens two sides that register nothing, and copy through so much of the pool. */
static void open_copying(uint64_t copy_bytes)
{
    options.provider.needs_no_regions = true;
    options.engine.copy_bytes = copy_bytes;
    open_pair();
}

/* The value is larger than its bounce buffer, which is written round and round. */
static void start_lapping(void)
{
    open_copying(LAP_BYTES);
    fetch(1, engine_pool_bytes(owner, LARGE_BYTES, 1), true);
    expect_copy("both sides copy it");
    fake_fabric_set_manual(pair.fabric, true);
    engine_side_send(owner, "key", 2, engine_bytes(LARGE_BYTES, 2));
    ask.is_unregistered = true;
    engine_ask_start(asker, &ask, "key", 2);
}

START_TEST(laps)
{
    start_lapping();
    uint64_t used_bytes = engine_side_memory(asker).pool_used_bytes;
    run_until_a_part_is_copied();
    ck_assert_uint_le(engine_side_memory(asker).pool_used_bytes, used_bytes + LAP_BYTES);
    fake_fabric_set_manual(pair.fabric, false);
    engine_pair_run(&pair);
    ck_assert_uint_eq(engine_side_stats(asker).bytes_bounced, 2 * LARGE_BYTES);
    ck_assert(engine_is_bytes(ask.fetch.destination, LARGE_BYTES, 2));
    expect_copy("both sides copy it");
    engine_pair_close(&pair);
}
END_TEST

/* Sizes around those of laps and their parts. */
START_TEST(sizes_of_laps)
{
    open_copying(LAP_BYTES);
    for (uint64_t i = 0; i < 64; i++) {
        uint64_t part_bytes = LAP_BYTES / TL_LAP_PARTS;
        uint64_t size_bytes = LAP_BYTES + 1 + i / 4 * part_bytes + i % 4 - 2;
        fetch(1 + i, engine_pool_bytes(owner, size_bytes, i), true);
        ck_assert(engine_is_bytes(ask.fetch.destination, size_bytes, i));
        expect_copy(size_bytes <= LAP_BYTES ? "it is small" : "both sides copy it");
    }
    engine_pair_close(&pair);
}
END_TEST

/* Bytes that were not copied on are not written over. */
START_TEST(at_most_a_lap_ahead)
{
    start_lapping();
    uint64_t sent_bytes = engine_side_stats(owner).bytes_sent;
    uint64_t copied_bytes = engine_side_stats(asker).bytes_bounced;
    for (unsigned i = 0; i < 1000 && ask.done_count == 0; i++) {
        while (engine_side_round(owner) || fake_fabric_step_any(pair.fabric)) {
        }
        uint64_t ahead_bytes =
            engine_side_stats(owner).bytes_sent - sent_bytes - (engine_side_stats(asker).bytes_bounced - copied_bytes);
        ck_assert_uint_le(ahead_bytes, LAP_BYTES);
        (void)engine_side_round(asker);
    }
    ck_assert_uint_eq(ask.done_count, 1);
    ck_assert(engine_is_bytes(ask.fetch.destination, LARGE_BYTES, 2));
    expect_copy("both sides copy it");
    fake_fabric_set_manual(pair.fabric, false);
    engine_pair_close(&pair);
}
END_TEST

/* A round copies at most one piece when it polls, and one in its pump: others have their turn then. */
START_TEST(a_piece_at_a_time)
{
    enum { PIECE = 256 * 1024, SIZE = 16 * PIECE };
    open_copying(4 * PIECE);
    engine_side_send(owner, "key", 1, engine_bytes(SIZE, 1));
    ask.is_unregistered = true;
    engine_ask_start(asker, &ask, "key", 1);
    for (unsigned i = 0; i < 1000 && ask.done_count == 0; i++) {
        while (engine_side_round(owner)) {
        }
        uint64_t before_bytes = engine_side_stats(asker).bytes_bounced;
        (void)engine_side_round(asker);
        ck_assert_uint_le(engine_side_stats(asker).bytes_bounced - before_bytes, 2 * PIECE);
    }
    ck_assert_uint_eq(ask.done_count, 1);
    ck_assert(engine_is_bytes(ask.fetch.destination, SIZE, 1));
    expect_copy("both sides copy it");
    engine_pair_close(&pair);
}
END_TEST

/* Nothing is copied into a destination any more whose request was given up. */
START_TEST(given_up_after_a_lap)
{
    start_lapping();
    run_until_a_part_is_copied();
    uint64_t before_bytes = engine_side_stats(asker).bytes_bounced;
    tl_conn_cancel(asker->conn, &ask.fetch);
    fake_fabric_set_manual(pair.fabric, false);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 1);
    ck_assert_int_eq(ask.result.code, TL_CANCELLED);
    ck_assert_uint_eq(engine_side_stats(asker).bytes_bounced, before_bytes);
    engine_ask_fini(&ask);
    ck_assert(engine_side_has(owner, "key", 2));
    engine_pair_close(&pair);
}
END_TEST

START_TEST(broken_after_a_lap)
{
    struct tl_error reason;
    start_lapping();
    run_until_a_part_is_copied();
    tl_error_set(&reason, TL_UNAVAILABLE, "the connection is closed");
    tl_conn_close(asker->conn, &reason);
    fake_fabric_set_manual(pair.fabric, false);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 1);
    ck_assert_int_eq(ask.result.code, TL_UNAVAILABLE);
    ck_assert_ptr_null(ask.fetch.destination);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(laps_with_a_checksum)
{
    open_copying(LAP_BYTES);
    for (uint64_t step = 1; step <= 2; step++) {
        ask.wants_checksum = true;
        fetch(step, engine_pool_bytes(owner, LARGE_BYTES, step), true);
        ck_assert(engine_is_bytes(ask.fetch.destination, LARGE_BYTES, step));
        expect_copy("both sides copy it");
    }
    engine_pair_close(&pair);
}
END_TEST

/* Boxes of a matrix, which do not lie in one piece. */
#define ROWS 400
#define COLUMNS 600

static const struct tl_box box = {.rank = 2, .start = {3, 5}, .size = {ROWS - 7, COLUMNS - 99}};

/* Returns a matrix of which each byte says where it is, or one of zeros. */
static struct tl_tensor *matrix(bool is_counting)
{
    const uint64_t dims[] = {ROWS, COLUMNS};
    struct tl_tensor *tensor;
    ck_assert_int_eq(tl_tensor_create(TL_U8, 2, dims, &tensor, NULL), TL_OK);
    unsigned char *bytes = tl_tensor_data(tensor);
    for (size_t i = 0; i < ROWS * COLUMNS; i++)
        bytes[i] = is_counting ? (unsigned char)(1 + i % 251) : 0;
    return tensor;
}

/* Returns the box of a matrix, whose reference it takes over. */
static struct tl_tensor *box_of(struct tl_tensor *whole)
{
    struct tl_tensor *tensor;
    ck_assert_int_eq(tl_tensor_create_box(whole, &box, false, &tensor, NULL), TL_OK);
    ck_assert(tl_tensor_is_in_runs(tensor));
    tl_tensor_put(whole);
    return tensor;
}

static void expect_box(struct tl_tensor *whole)
{
    struct tl_tensor *source = matrix(true);
    const unsigned char *from = tl_tensor_data(source), *to = tl_tensor_data(whole);
    for (size_t i = 0; i < ROWS * COLUMNS; i++) {
        uint64_t row = i / COLUMNS - box.start[0], column = i % COLUMNS - box.start[1];
        unsigned char expected = row < box.size[0] && column < box.size[1] ? from[i] : 0;
        if (to[i] != expected) ck_abort_msg("byte %zu is %u and not %u", i, to[i], expected);
    }
    tl_tensor_put(source);
}

#define MANY 9
#define MOST_LAPS 4 /* how many wait for no other */

static struct engine_ask many[MANY];
static struct tl_tensor *held[2];
static struct tl_tensor *wholes[MANY]; /* matrices with the destinations that do not lie in one piece; NULL: none */

/* Asks for many large values, which exist, while the pool has nothing to spare. */
static void start_many(bool may_grow, bool is_in_runs)
{
    char key[16];
    open_copying(LAP_BYTES);
    for (unsigned i = 0; i < 2; i++)
        held[i] = engine_pool_bytes(asker, may_grow ? 3 << 20 : 4 << 20, i);
    ck_assert_uint_eq(engine_side_memory(asker).pool_bytes, 8 << 20);
    if (!may_grow) fail_registrations(asker);
    for (unsigned i = 0; i < MANY; i++) {
        snprintf(key, sizeof(key), "key %u", i);
        wholes[i] = is_in_runs ? matrix(false) : NULL;
        if (is_in_runs) many[i].destination = box_of(tl_tensor_get(wholes[i]));
        engine_side_send(owner, key, 1, is_in_runs ? box_of(matrix(true)) : engine_bytes(LARGE_BYTES, i));
        many[i].is_unregistered = !is_in_runs;
        engine_ask_start(asker, &many[i], key, 1);
    }
}

static void expect_many(enum tl_path path)
{
    for (unsigned i = 0; i < MANY; i++) {
        ck_assert_uint_eq(many[i].done_count, 1);
        ck_assert_msg(many[i].result.code == TL_OK, "%s", many[i].result.message);
        ck_assert_int_eq(many[i].fetch.path, path);
        if (wholes[i] != NULL)
            expect_box(wholes[i]);
        else
            ck_assert(engine_is_bytes(many[i].fetch.destination, LARGE_BYTES, i));
    }
}

static void end_many(void)
{
    for (unsigned i = 0; i < MANY; i++) {
        engine_ask_fini(&many[i]);
        tl_tensor_put(wholes[i]);
    }
    for (unsigned i = 0; i < 2; i++)
        tl_tensor_put(held[i]);
    engine_pair_close(&pair);
}

/* Large values wait for each other, so that a few bounce buffers are enough for all. */
START_TEST(laps_one_after_the_other)
{
    start_many(true, _i == 1);
    uint64_t used_bytes = engine_side_memory(asker).pool_used_bytes, most_bytes = 0;
    fake_fabric_set_manual(pair.fabric, true);
    do {
        while (engine_side_round(asker) || engine_side_round(owner))
            most_bytes = tl_max_u64(most_bytes, engine_side_memory(asker).pool_used_bytes);
        if (_i == 1) fake_clock_advance(TL_NS_PER_SEC / 10); /* these wait without a limit */
    } while (fake_fabric_step_any(pair.fabric));
    fake_fabric_set_manual(pair.fabric, false);
    engine_pair_run(&pair);
    ck_assert_uint_eq(most_bytes - used_bytes, MOST_LAPS * LAP_BYTES);
    expect_many(TL_PATH_BOUNCE);
    end_many();
}
END_TEST

/* They wait for a while only: then their destinations are exposed themselves, if they lie in one piece. */
START_TEST(laps_are_not_awaited_for_ever)
{
    start_many(false, _i == 1);
    engine_pair_run(&pair);
    for (unsigned i = 0; i < MANY; i++)
        ck_assert_uint_eq(many[i].done_count, 0);
    for (unsigned i = 0; i < 11; i++) { /* the connection lives meanwhile */
        fake_clock_advance(TL_NS_PER_SEC / 10);
        engine_pair_run(&pair);
    }
    for (unsigned i = 0; i < MANY; i++)
        ck_assert_uint_eq(many[i].done_count, _i == 1 ? 0 : 1); /* boxes wait on */
    tl_tensor_put(held[0]);
    held[0] = NULL;
    engine_pair_run(&pair);
    expect_many(_i == 1 ? TL_PATH_BOUNCE : TL_PATH_ZERO_COPY);
    end_many();
}
END_TEST

/* Those that wait, for memory or for others, are given up, or end with their connection. */
START_TEST(laps_that_are_given_up)
{
    struct tl_error reason;
    start_many(false, _i >= 2);
    engine_pair_run(&pair);
    tl_error_set(&reason, TL_UNAVAILABLE, "the connection is closed");
    if (_i % 2 == 0) tl_conn_close(asker->conn, &reason);
    for (unsigned i = 0; _i % 2 == 1 && i < MANY; i++)
        tl_conn_cancel(asker->conn, &many[(i + 3) % MANY].fetch);
    engine_pair_run(&pair);
    for (unsigned i = 0; i < MANY; i++) {
        ck_assert_uint_eq(many[i].done_count, 1);
        ck_assert_int_ne(many[i].result.code, TL_OK);
    }
    fake_clock_advance(2 * TL_NS_PER_SEC);
    engine_pair_run(&pair);
    end_many();
}
END_TEST

static struct tl_tensor *open_sparse(const char *name)
{
    struct tl_mapped_file *file;
    struct tl_tensor *tensor;
    const struct tl_shape shape = {.rank = 1, .dims = {LARGE_BYTES}};
    ck_assert_int_eq(truncate(temp_path(name), LARGE_BYTES), 0);
    ck_assert_int_eq(tl_mapped_file_open(temp_path(name), &file, NULL), TL_OK);
    ck_assert_int_eq(tl_mapped_tensor_create(file, 0, TL_U8, &shape, &tensor, NULL), TL_OK);
    tl_mapped_file_put(file);
    return tensor;
}

static bool is_in_memory(const struct tl_tensor *tensor)
{
    return !tl_mapped_file_may_wait(tl_tensor_data(tensor), LARGE_BYTES);
}

/* The owner's processor does not read a file that is not in memory: the receiver does. */
START_TEST(laps_of_a_file)
{
    temp_folder_make();
    temp_write(temp_path("first"), "", 0);
    temp_write(temp_path("second"), "", 0);
    start_lapping();
    fake_fabric_set_manual(pair.fabric, false);
    engine_pair_run(&pair);
    expect_copy("both sides copy it");
    struct tl_tensor *first = open_sparse("first"), *second = open_sparse("second");
    ck_assert(!is_in_memory(first) && !is_in_memory(second));
    fetch(3, tl_tensor_get(first), true); /* the meta-data is as before */
    expect_no_copy();
    ck_assert(is_in_memory(first));
    fetch(4, first, true);
    expect_copy("both sides copy it");
    engine_side_send(owner, "other", 1, second);
    ask.is_unregistered = true;
    engine_ask_start(asker, &ask, "other", 1); /* the meta-data is not known */
    engine_pair_run(&pair);
    expect_no_copy();
    engine_pair_close(&pair);
    temp_folder_remove();
}
END_TEST

static uint64_t unregistered_exposures(void)
{
    struct fake_counters counters;
    fake_provider_get_counters(asker->provider, &counters);
    return counters.unregistered_exposures;
}

/* Fetches a value that lies in a file. Returns how many destinations were exposed without a region: the asker's thread
 * reads into those. */
static uint64_t fetch_from_file(uint64_t step, struct tl_tensor *source, bool is_unregistered)
{
    uint64_t before = unregistered_exposures();
    fetch(step, source, is_unregistered);
    return unregistered_exposures() - before;
}

/* The owner's processor waits for no file, whatever memory the receiver has chosen. Once the pages are in memory, all
 * is as without a file. */
START_TEST(destinations_of_a_file)
{
    bool is_unregistered = _i == 1;
    temp_folder_make();
    temp_write(temp_path("file"), "", 0);
    open_copying(LARGE_BYTES + 1);
    fetch(1, engine_pool_bytes(owner, LARGE_BYTES, 1), is_unregistered); /* The meta-data is known from now on. */
    engine_ask_fini(&ask);
    struct tl_tensor *tensor = open_sparse("file");
    uint64_t updates = engine_side_stats(asker).meta_data_updates;
    ck_assert(!is_in_memory(tensor));
    ck_assert_uint_eq(fetch_from_file(2, tl_tensor_get(tensor), is_unregistered), 1);
    expect_no_copy();
    ck_assert_uint_eq(engine_side_stats(asker).meta_data_updates, ++updates);
    ck_assert(is_in_memory(tensor));
    ck_assert_uint_eq(fetch_from_file(3, tensor, is_unregistered), 0);
    if (is_unregistered)
        expect_copy("it is small");
    else
        expect_no_copy();
    ck_assert_uint_eq(engine_side_stats(asker).meta_data_updates, updates);
    engine_pair_close(&pair);
    temp_folder_remove();
}
END_TEST

/* A receiver that cannot read the owner's memory is written to, and asks only once more. */
START_TEST(unreadable_memory_of_a_file)
{
    temp_folder_make();
    temp_write(temp_path("file"), "", 0);
    options.engine.is_bounce_forced = true;
    open_copying(LARGE_BYTES + 1);
    ck_assert_uint_eq(fetch_from_file(1, open_sparse("file"), false), 0);
    expect_copy("verbs.bounce");
    ck_assert_uint_eq(engine_side_stats(asker).meta_data_updates, 1);
    engine_pair_close(&pair);
    temp_folder_remove();
}
END_TEST

/* ------------------------------------------------------------------------------------------------------- runs -- */

/* Asks for columns, which go to the same columns of this matrix. */
static void start_runs(uint64_t step, struct tl_tensor *whole)
{
    engine_side_send(owner, "key", step, box_of(matrix(true)));
    ask.destination = box_of(tl_tensor_get(whole));
    engine_ask_start(asker, &ask, "key", step);
}

/* Neither the value nor the destination lies in one piece. The asker copies through its pool, and so does an owner with
 * a card. */
START_TEST(runs)
{
    options.provider.needs_no_regions = (_i & 1) != 0;
    options.engine.copy_bytes = (_i & 1) != 0 ? LAP_BYTES : 0;
    open_pair();
    for (uint64_t step = 1; step <= 3; step++) {
        struct tl_tensor *whole = matrix(false);
        ask.wants_checksum = (_i & 2) != 0;
        start_runs(step, whole);
        engine_pair_run(&pair);
        ck_assert_uint_eq(ask.done_count, 1);
        expect_box(whole);
        expect_copy("in one piece");
        tl_tensor_put(whole);
    }
    ck_assert_uint_eq(engine_side_stats(asker).bytes_bounced, 3 * box.size[0] * box.size[1]);
    ck_assert_uint_eq(engine_side_stats(owner).bytes_bounced, (_i & 1) != 0 ? 0 : 3 * box.size[0] * box.size[1]);
    engine_pair_close(&pair);
}
END_TEST

/* The connection ends, or the request is given up, while pieces are on their way. */
START_TEST(runs_that_end_early)
{
    struct tl_error reason;
    struct tl_tensor *whole = matrix(false);
    options.provider.needs_no_regions = true;
    options.engine.copy_bytes = LAP_BYTES;
    open_pair();
    fake_fabric_set_manual(pair.fabric, true);
    start_runs(1, whole);
    run_until_a_part_is_copied();
    tl_error_set(&reason, TL_UNAVAILABLE, "the connection is closed");
    if (_i == 0) {
        tl_conn_close(asker->conn, &reason);
    } else {
        tl_conn_cancel(asker->conn, &ask.fetch);
    }
    fake_fabric_set_manual(pair.fabric, false);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 1);
    ck_assert_int_eq(ask.result.code, _i == 0 ? TL_UNAVAILABLE : TL_CANCELLED);
    engine_ask_fini(&ask);
    tl_tensor_put(whole);
    engine_pair_close(&pair);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("engine_bounce");
    TCase *tcase = tcase_create("engine_bounce");
    tcase_set_timeout(tcase, 60);
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, small_memory);
    tcase_add_test(tcase, forced);
    tcase_add_test(tcase, keys_of_regions);
    tcase_add_test(tcase, refused_at_the_asker);
    tcase_add_test(tcase, refused_at_the_owner);
    tcase_add_test(tcase, the_reason_changes);
    tcase_add_test(tcase, no_space_either);
    tcase_add_test(tcase, copied_while_there_is_space);
    tcase_add_test(tcase, copies_leave_half_of_a_grown_pool);
    tcase_add_test(tcase, copies_leave_half_of_a_pool_that_cannot_grow);
    tcase_add_test(tcase, copied_while_the_rest_arrives);
    tcase_add_test(tcase, broken_after_a_part);
    tcase_add_test(tcase, given_up_after_a_part);
    suite_add_tcase(suite, tcase);
    TCase *laps_case = tcase_create("laps");
    tcase_set_timeout(laps_case, 60);
    tcase_add_checked_fixture(laps_case, setup, NULL);
    tcase_add_test(laps_case, laps);
    tcase_add_loop_test(laps_case, laps_one_after_the_other, 0, 2);
    tcase_add_loop_test(laps_case, laps_are_not_awaited_for_ever, 0, 2);
    tcase_add_loop_test(laps_case, laps_that_are_given_up, 0, 4);
    tcase_add_test(laps_case, sizes_of_laps);
    tcase_add_test(laps_case, at_most_a_lap_ahead);
    tcase_add_test(laps_case, a_piece_at_a_time);
    tcase_add_test(laps_case, given_up_after_a_lap);
    tcase_add_test(laps_case, broken_after_a_lap);
    tcase_add_test(laps_case, laps_with_a_checksum);
    tcase_add_test(laps_case, laps_of_a_file);
    tcase_add_loop_test(laps_case, destinations_of_a_file, 0, 2);
    tcase_add_test(laps_case, unreadable_memory_of_a_file);
    suite_add_tcase(suite, laps_case);
    TCase *runs_case = tcase_create("runs");
    tcase_set_timeout(runs_case, 60);
    tcase_add_checked_fixture(runs_case, setup, NULL);
    tcase_add_loop_test(runs_case, runs, 0, 4);
    tcase_add_loop_test(runs_case, runs_that_end_early, 0, 2);
    suite_add_tcase(suite, runs_case);
    return run_suite(suite);
}
