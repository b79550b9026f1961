// SPDX-License-Identifier: Apache-2.0
/* A tensor that takes long to hash or to copy: the busy side answers its peer in between. */
#include <check.h>
#include <stdlib.h>

#include "base/error.h"
#include "dataplane/engine/conn_internal.h"
#include "fakes/engine_pair.h"
#include "fakes/fake_clock.h"
#include "fakes/run_suite.h"

/* This size takes three pumps. */
#define SIZE_BYTES (5 * (uint64_t)PUMP_BYTES / 2)
#define MANY_ROUNDS 1000

static struct engine_pair pair;
static struct engine_pair_options options;
static struct engine_side *asker;
static struct engine_side *owner;
static struct engine_ask ask;
static uint64_t sent_bytes; /* The bytes that the owner had sent before the transfer. */

static void setup(void)
{
    engine_pair_defaults(&options);
    options.memory.max_pool_bytes = 8 * SIZE_BYTES;
    options.engine.piece_bytes = PUMP_BYTES / 2;
}

static void begin(bool wants_checksum)
{
    engine_pair_open(&pair, &options);
    asker = pair.left;
    owner = pair.right;
    ask = (struct engine_ask){.wants_checksum = wants_checksum};
    sent_bytes = engine_side_stats(owner).bytes_sent;
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, SIZE_BYTES, 1));
    engine_ask_start(asker, &ask, "key", 1);
}

static bool is_asker_halfway(void)
{
    return ask.is_open && ask.fetch.received_bytes > 0 && ask.fetch.received_bytes < SIZE_BYTES;
}

static bool is_owner_halfway(void)
{
    uint64_t bytes = engine_side_stats(owner).bytes_sent - sent_bytes;
    return bytes > 0 && bytes < SIZE_BYTES;
}

static bool has_owner_begun(void)
{
    return engine_side_stats(owner).bytes_sent > sent_bytes;
}

static void run_until(bool (*is_reached)(void))
{
    for (unsigned i = 0; i < MANY_ROUNDS && !is_reached(); i++) {
        for (unsigned s = 0; s < 2 && !is_reached(); s++) {
            engine_side_settle(&pair.sides[s]);
            (void)engine_side_round(&pair.sides[s]);
        }
    }
    ck_assert_msg(is_reached(), "it has never come to that");
}

/* The asker copies on what arrives. So the owner writes all of it before the asker's next round, which then has more to
 * copy than it may. */
static void begin_copying(bool wants_checksum)
{
    options.engine.is_bounce_forced = true;
    options.engine.slot_count = options.fabric.poll_batch = 1024;
    begin(wants_checksum);
    for (unsigned i = 0; i < MANY_ROUNDS && !is_asker_halfway(); i++) {
        engine_side_settle(asker);
        (void)engine_side_round(asker);
        do {
            engine_side_settle(owner);
        } while (engine_side_round(owner));
    }
    ck_assert(is_asker_halfway());
}

/* One round of the busy side is enough. */
static void expect_answer(struct engine_side *busy, struct engine_side *other)
{
    uint64_t count = engine_side_stats(busy).credits_sent;
    other->conn->credits.is_ping_wanted = true;
    other->conn->credits.is_wanted = true;
    conn_pump_later(other->conn);
    for (unsigned i = 0; i < 2; i++) /* The write is posted, and carried. */
        (void)engine_side_round(other);
    (void)engine_side_round(busy);
    ck_assert_uint_eq(engine_side_stats(busy).credits_sent, count + 1);
}

static void expect_value(enum tl_path path)
{
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 1);
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert_int_eq(ask.fetch.path, path);
    ck_assert_int_eq(ask.fetch.is_verified, ask.wants_checksum);
    ck_assert(engine_is_bytes(ask.fetch.destination, SIZE_BYTES, 1));
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}

START_TEST(asker_hashes)
{
    begin(true);
    run_until(is_asker_halfway);
    expect_answer(asker, owner);
    ck_assert(is_asker_halfway());
    expect_value(TL_PATH_ZERO_COPY);
}
END_TEST

START_TEST(asker_copies)
{
    begin_copying(false);
    uint64_t before_bytes = engine_side_stats(asker).bytes_bounced;
    ck_assert_uint_le(before_bytes, 2 * (uint64_t)PUMP_BYTES); /* Those of the round before, and of this one. */
    expect_answer(asker, owner);
    ck_assert_uint_le(engine_side_stats(asker).bytes_bounced - before_bytes, (uint64_t)PUMP_BYTES);
    expect_value(TL_PATH_BOUNCE);
}
END_TEST

/* What is neither hashed nor copied is written as fast as space allows. */
START_TEST(owner_hashes)
{
    for (int wants_checksum = 1; wants_checksum >= 0; wants_checksum--) {
        setup();
        begin(wants_checksum);
        run_until(has_owner_begun);
        ck_assert_int_eq(is_owner_halfway(), wants_checksum);
        if (wants_checksum) expect_answer(owner, asker);
        ck_assert_int_eq(is_owner_halfway(), wants_checksum);
        expect_value(TL_PATH_ZERO_COPY);
    }
}
END_TEST

/* One write is never larger than what may be hashed at once. */
START_TEST(large_pieces)
{
    options.engine.piece_bytes = 0;
    begin(true);
    run_until(is_owner_halfway);
    expect_answer(owner, asker);
    ck_assert(is_owner_halfway());
    expect_value(TL_PATH_ZERO_COPY);
}
END_TEST

/* What has arrived is delivered: the owner knows it. */
START_TEST(cancelled_halfway)
{
    begin(true);
    run_until(is_asker_halfway);
    engine_ask_cancel(&ask);
    ck_assert_uint_eq(ask.done_count, 0);
    expect_value(TL_PATH_ZERO_COPY);
}
END_TEST

START_TEST(broken_halfway)
{
    struct tl_error reason;
    if (_i == 1) {
        begin_copying(true);
    } else {
        begin(true);
        run_until(is_asker_halfway);
    }
    tl_error_set(&reason, TL_UNAVAILABLE, "the cable was cut");
    tl_conn_close(asker->conn, &reason);
    engine_pair_run(&pair);
    ck_assert_uint_eq(asker->closed_count, 1);
    expect_value(_i == 1 ? TL_PATH_BOUNCE : TL_PATH_ZERO_COPY);
}
END_TEST

/* The checksum finds a byte that changes on the way, wherever it is. */
START_TEST(damaged_in_each_part)
{
    begin(true);
    run_until(is_asker_halfway);
    ((uint8_t *)tl_tensor_data(ask.fetch.destination))[ask.fetch.received_bytes + (_i == 0 ? 0 : PUMP_BYTES)] ^= 1;
    engine_pair_run(&pair);
    ck_assert_int_eq(ask.result.code, TL_DATA_LOSS);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("engine_busy");
    TCase *tcase = tcase_create("engine_busy");
    tcase_set_timeout(tcase, 60);
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, asker_hashes);
    tcase_add_test(tcase, asker_copies);
    tcase_add_test(tcase, owner_hashes);
    tcase_add_test(tcase, large_pieces);
    tcase_add_test(tcase, cancelled_halfway);
    tcase_add_loop_test(tcase, broken_halfway, 0, 2);
    tcase_add_loop_test(tcase, damaged_in_each_part, 0, 2);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
