// SPDX-License-Identifier: Apache-2.0
/*
 * The engine when the pool of one side is full. A request whose value exists waits for memory, first come first served,
 * and one whose value does not exist waits for nothing else (engine_waits_test.c); a cancel and the end of the
 * connection end the wait; a request that can never fit fails at once with the reason.
 */
#include <check.h>
#include <string.h>

#include "base/clock.h"
#include "dataplane/engine/conn_internal.h"
#include "fakes/engine_pair.h"
#include "fakes/run_suite.h"

enum { MAX_BLOCKS = 128, ASKS = 8 };

static struct engine_pair pair;
static struct engine_pair_options options;
static struct engine_side *asker;
static struct engine_side *owner;
static struct engine_ask asks[ASKS];
static struct tl_tensor *blocks[MAX_BLOCKS];
static unsigned block_count;

static void setup(void)
{
    engine_pair_defaults(&options);
    options.memory.pool_bytes = options.memory.max_pool_bytes = 4 << 20;
    block_count = 0;
}

static void open_pair(void)
{
    engine_pair_open(&pair, &options);
    asker = pair.left;
    owner = pair.right;
}

/* Takes all free memory of the pool. */
static void fill(struct engine_side *side)
{
    for (uint64_t size_bytes = 1 << 20; size_bytes >= 64; size_bytes /= 2) {
        const struct tl_meta_data bytes = {
            .dtype = TL_U8, .shape = {.rank = 1, .dims = {size_bytes}}, .size_bytes = size_bytes};
        while (tl_memory_tensor_take(side->memory, &bytes, NULL, &blocks[block_count], NULL) == TL_OK)
            ck_assert_uint_lt(++block_count, MAX_BLOCKS);
    }
}

static void release(void)
{
    while (block_count > 0)
        tl_tensor_put(blocks[--block_count]);
}

static void ask_for(unsigned i, bool is_unregistered)
{
    asks[i].is_unregistered = is_unregistered;
    engine_ask_start(asker, &asks[i], "key", i);
}

static void expect_waiting(struct engine_side *side, uint64_t count)
{
    engine_pair_run(&pair);
    ck_assert_uint_eq(engine_side_memory(side).pool_waiting, count);
    ck_assert_uint_eq(side->conn->ending.held_count, count);
}

static void expect_done(unsigned i, uint64_t size_bytes, enum tl_path path)
{
    ck_assert_uint_eq(asks[i].done_count, 1);
    ck_assert_msg(asks[i].result.code == TL_OK, "%s", asks[i].result.message);
    ck_assert(engine_is_bytes(asks[i].fetch.destination, size_bytes, i));
    ck_assert_int_eq(asks[i].fetch.path, path);
    engine_ask_fini(&asks[i]);
}

/* Makes the meta-data of the key known. */
static void exchange_once(uint64_t size_bytes)
{
    engine_side_send(owner, "key", 7, engine_pool_bytes(owner, size_bytes, 7));
    ask_for(7, false);
    engine_pair_run(&pair);
    expect_done(7, size_bytes, TL_PATH_ZERO_COPY);
}

/* --------------------------------------------------------------------------------------------------- the owner -- */

START_TEST(copies_out_wait)
{
    enum { SIZE_BYTES = 600 };
    open_pair();
    fill(owner);
    for (unsigned i = 0; i < 3; i++) {
        engine_side_send(owner, "key", i, engine_bytes(SIZE_BYTES, i));
        ask_for(i, false);
    }
    expect_waiting(owner, 3);
    for (unsigned i = 0; i < 3; i++)
        ck_assert_uint_eq(asks[i].done_count, 0);
    release();
    engine_pair_run(&pair);
    for (unsigned i = 0; i < 3; i++)
        expect_done(i, SIZE_BYTES, TL_PATH_BOUNCE);
    ck_assert_uint_eq(engine_side_memory(owner).pool_waits, 3);
    engine_pair_close(&pair);
}
END_TEST

/* A tensor of several pieces gets one block after the other. */
START_TEST(pieces_share_one_block)
{
    enum { SIZE_BYTES = 2 << 20 };
    open_pair();
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_REGION_FAILURE, .times = FAKE_ALWAYS});
    fill(owner);
    tl_tensor_put(blocks[--block_count]);
    tl_tensor_put(blocks[0]);
    blocks[0] = engine_pool_bytes(owner, (1 << 20) - (256 << 10), 0);
    engine_side_send(owner, "key", 0, engine_bytes(SIZE_BYTES, 0));
    ask_for(0, false);
    engine_pair_run(&pair);
    expect_done(0, SIZE_BYTES, TL_PATH_BOUNCE);
    release();
    engine_pair_close(&pair);
}
END_TEST

/* A request that gives up leaves the queue, and the value to others. */
START_TEST(cancelled_while_the_owner_waits)
{
    open_pair();
    fill(owner);
    for (unsigned i = 0; i < 3; i++) {
        engine_side_send(owner, "key", i, engine_bytes(600, i));
        ask_for(i, false);
    }
    expect_waiting(owner, 3);
    engine_ask_cancel(&asks[0]);
    engine_ask_cancel(&asks[1]);
    expect_waiting(owner, 1);
    for (unsigned i = 0; i < 2; i++) {
        ck_assert_int_eq(asks[i].result.code, TL_CANCELLED);
        engine_ask_fini(&asks[i]);
        ck_assert(engine_side_has(owner, "key", i));
    }
    release();
    engine_pair_run(&pair);
    expect_done(2, 600, TL_PATH_BOUNCE);
    engine_pair_close(&pair);
}
END_TEST

/* --------------------------------------------------------------------------------------------------- the asker -- */

/* 0: the meta-data is known when it is asked for; 1: only when the value comes. */
START_TEST(destinations_wait)
{
    enum { SIZE_BYTES = 5000 };
    open_pair();
    if (_i == 0) exchange_once(SIZE_BYTES);
    fill(asker);
    for (unsigned i = 0; i < 3; i++) {
        engine_side_send(owner, "key", i, engine_pool_bytes(owner, SIZE_BYTES, i));
        ask_for(i, false);
    }
    expect_waiting(asker, 3);
    release();
    engine_pair_run(&pair);
    for (unsigned i = 0; i < 3; i++)
        expect_done(i, SIZE_BYTES, TL_PATH_ZERO_COPY);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(copies_in_wait)
{
    enum { SIZE_BYTES = 5000 };
    open_pair();
    if (_i == 0) exchange_once(SIZE_BYTES);
    fill(asker);
    for (unsigned i = 0; i < 3; i++) {
        engine_side_send(owner, "key", i, engine_pool_bytes(owner, SIZE_BYTES, i));
        ask_for(i, true);
    }
    expect_waiting(asker, 3);
    release();
    engine_pair_run(&pair);
    for (unsigned i = 0; i < 3; i++)
        expect_done(i, SIZE_BYTES, TL_PATH_BOUNCE);
    engine_pair_close(&pair);
}
END_TEST

/* Memory is taken as others give it back, in the order of asking. */
START_TEST(first_come_first_served)
{
    open_pair();
    exchange_once(1 << 20);
    fill(asker);
    for (unsigned i = 0; i < 3; i++) {
        engine_side_send(owner, "key", i, engine_pool_bytes(owner, 1 << 20, i));
        ask_for(i, false);
    }
    expect_waiting(asker, 3);
    for (unsigned i = 0; i < 3; i++) {
        tl_tensor_put(blocks[0]);
        memmove(blocks, blocks + 1, --block_count * sizeof(*blocks));
        expect_waiting(asker, 2 - i);
        for (unsigned k = 0; k < 3; k++)
            ck_assert_uint_eq(asks[k].done_count, k <= i);
    }
    for (unsigned k = 0; k < 3; k++)
        expect_done(k, 1 << 20, TL_PATH_ZERO_COPY);
    release();
    engine_pair_close(&pair);
}
END_TEST

/* 0: the wait is for its destination, whose meta-data was known; 1: likewise, unknown; 2: the wait is for the copy. */
START_TEST(cancelled_while_the_asker_waits)
{
    open_pair();
    if (_i == 0) exchange_once(5000);
    fill(asker);
    for (unsigned i = 0; i < 3; i++) {
        engine_side_send(owner, "key", i, engine_pool_bytes(owner, 5000, i));
        ask_for(i, _i == 2);
    }
    expect_waiting(asker, 3);
    engine_ask_cancel(&asks[0]);
    engine_ask_cancel(&asks[2]);
    expect_waiting(asker, 1);
    for (unsigned i = 0; i < 3; i += 2) {
        ck_assert_uint_eq(asks[i].done_count, 1);
        ck_assert_int_eq(asks[i].result.code, TL_RESOURCE_EXHAUSTED);
        ck_assert_ptr_nonnull(strstr(asks[i].result.message, "waited for 5000 bytes of the pool"));
        ck_assert_ptr_nonnull(strstr(asks[i].result.message, "verbs.max_pool"));
        ck_assert(engine_side_has(owner, "key", i));
        engine_ask_fini(&asks[i]);
    }
    release();
    engine_pair_run(&pair);
    expect_done(1, 5000, _i == 2 ? TL_PATH_BOUNCE : TL_PATH_ZERO_COPY);
    engine_pair_close(&pair);
}
END_TEST

/* The space is there, and its closure on the way, when the request is given up. */
START_TEST(cancelled_when_the_space_has_come)
{
    open_pair();
    exchange_once(5000);
    uint64_t used_bytes = engine_side_memory(asker).pool_used_bytes;
    fill(asker);
    engine_side_send(owner, "key", 0, engine_pool_bytes(owner, 5000, 0));
    ask_for(0, false);
    expect_waiting(asker, 1);
    release();
    engine_side_settle(asker);
    ck_assert_uint_eq(engine_side_memory(asker).pool_waiting, 0);
    ck_assert_uint_eq(asker->conn->ending.held_count, 1);
    engine_ask_cancel(&asks[0]);
    engine_pair_run(&pair);
    ck_assert_int_eq(asks[0].result.code, TL_RESOURCE_EXHAUSTED);
    engine_ask_fini(&asks[0]);
    ck_assert_uint_eq(engine_side_memory(asker).pool_used_bytes, used_bytes);
    engine_pair_close(&pair);
}
END_TEST

/* The closure may be on its way then. */
START_TEST(the_connection_ends_meanwhile)
{
    struct engine_side *full = NULL;
    open_pair();
    exchange_once(5000);
    full = (_i & 1) ? owner : asker;
    for (unsigned i = 0; i < 3; i++)
        engine_side_send(owner, "key", i, engine_bytes(5000, i));
    fill(full);
    for (unsigned i = 0; i < 3; i++)
        ask_for(i, false);
    expect_waiting(full, 3);
    if (_i & 2) {
        release();
        engine_side_settle(full);
    }
    const struct tl_error reason = {.code = TL_UNAVAILABLE, .message = "the test says so"};
    tl_conn_close(full->conn, &reason);
    engine_pair_run(&pair);
    ck_assert_ptr_null(full->conn);
    if (full == owner) tl_conn_close(asker->conn, &reason);
    engine_pair_run(&pair);
    for (unsigned i = 0; i < 3; i++) {
        ck_assert_int_eq(asks[i].result.code, TL_UNAVAILABLE);
        engine_ask_fini(&asks[i]);
    }
    ck_assert_uint_eq(engine_side_memory(full).pool_waiting, 0);
    release();
    engine_pair_close(&pair);
}
END_TEST

START_TEST(what_never_fits)
{
    open_pair();
    engine_side_send(owner, "key", 0, engine_bytes(5 << 20, 0));
    ask_for(0, false);
    engine_pair_run(&pair);
    ck_assert_int_eq(asks[0].result.code, TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(asks[0].result.message, "5242880 bytes never fit into the pool"));
    ck_assert_ptr_nonnull(strstr(asks[0].result.message, "4194304"));
    ck_assert_ptr_nonnull(strstr(asks[0].result.message, "raise its maximum (verbs.max_pool)"));
    engine_ask_fini(&asks[0]);
    ck_assert(engine_side_has(owner, "key", 0));
    ck_assert_uint_eq(engine_side_memory(asker).pool_waits, 0);
    engine_pair_close(&pair);
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- growing -- */

static void expect_no_region_of_the_reactor(void)
{
    for (unsigned i = 0; i < 2; i++) {
        struct fake_counters counters;
        fake_provider_get_counters(pair.sides[i].provider, &counters);
        ck_assert_uint_eq(counters.reactor_regions, 0);
    }
}

/* The registration thread makes a region. */
START_TEST(the_reactor_makes_no_region)
{
    options.memory.max_pool_bytes = 16 << 20;
    open_pair();
    exchange_once(5000);
    fill(asker);
    ck_assert_uint_eq(engine_side_memory(asker).pool_regions, 1);
    ask_for(0, false);
    engine_side_send(owner, "key", 0, engine_pool_bytes(owner, 5000, 0));
    engine_pair_run(&pair);
    expect_done(0, 5000, TL_PATH_ZERO_COPY);
    ck_assert_uint_eq(engine_side_memory(asker).pool_regions, 2);
    release();
    expect_no_region_of_the_reactor();
    engine_pair_close(&pair);
}
END_TEST

/* When the pool has no space for handshakes, a side registers memory for them alone, or the connection fails. */
START_TEST(a_full_pool_separates_no_workers)
{
    struct tl_error none;
    options.engine.keys = TL_KEYS_WINDOW;
    engine_pair_init(&pair, &options);
    asker = pair.left;
    owner = pair.right;
    fill(asker);
    const struct fake_rule fault = {.fault = FAKE_REGION_FAILURE};
    fake_fabric_add_rule(pair.fabric, &fault);
    ck_assert_int_eq(engine_side_try_create_conn(asker, &none), TL_RESOURCE_EXHAUSTED);
    engine_pair_connect(&pair);
    engine_pair_run(&pair);
    ck_assert(tl_conn_is_up(asker->conn) && tl_conn_is_up(owner->conn));
    release();
    exchange_once(5000);
    engine_pair_close(&pair);
}
END_TEST

/* A round does not make or destroy the pool of a peer either. */
START_TEST(the_reactor_makes_no_pool_of_a_peer)
{
    const struct tl_error reason = {.code = TL_UNAVAILABLE, .message = "the test says so"};
    options.engine.keys = TL_KEYS_REGION;
    open_pair();
    ck_assert_ptr_ne(asker->conn->memory, asker->memory);
    exchange_once(5000);
    for (unsigned i = 0; i < 3; i++) {
        tl_conn_close(asker->conn, &reason);
        tl_conn_close(owner->conn, &reason);
        engine_pair_run(&pair);
        engine_pair_connect(&pair);
        engine_pair_run(&pair);
        ck_assert_uint_eq(asker->up_count, i + 2);
    }
    expect_no_region_of_the_reactor();
    engine_pair_close(&pair);
}
END_TEST

/* Under keys of regions a peer cannot write elsewhere: nothing is registered in vain, and memory of the peers' pools is
 * counted. */
START_TEST(destinations_outside_of_the_pool_of_a_peer)
{
    enum { SIZE_BYTES = 200000 };
    options.engine.keys = TL_KEYS_REGION;
    open_pair();
    uint64_t pool_bytes = options.memory.pool_bytes + options.engine.peer_memory.pool_bytes;
    ck_assert_uint_eq(engine_side_memory(asker).pool_bytes, pool_bytes);
    for (unsigned i = 0; i < 2; i++) {
        engine_side_send(owner, "key", i, engine_pool_bytes(owner, SIZE_BYTES, i));
        ask_for(i, true);
        if (i == 1) {
            (void)engine_side_round(asker);
            ck_assert_uint_eq(asker->conn->ending.held_count, 0);
            ck_assert_uint_ge(engine_side_memory(asker).pool_used_bytes, SIZE_BYTES);
        }
        engine_pair_run(&pair);
        expect_done(i, SIZE_BYTES, TL_PATH_BOUNCE);
    }
    ck_assert_uint_eq(engine_side_memory(asker).registrations, 0);
    engine_side_send(owner, "key", 2, engine_pool_bytes(owner, SIZE_BYTES, 2));
    ask_for(2, false);
    engine_pair_run(&pair);
    expect_done(2, SIZE_BYTES, TL_PATH_ZERO_COPY);
    expect_no_region_of_the_reactor();
    engine_pair_close(&pair);
}
END_TEST

/* The error names the setting to raise. */
START_TEST(what_never_fits_into_the_pool_of_a_peer)
{
    options.engine.keys = TL_KEYS_REGION;
    options.engine.peer_memory.max_pool_bytes = options.engine.peer_memory.pool_bytes;
    open_pair();
    engine_side_send(owner, "key", 0, engine_bytes(5 << 20, 0));
    ask_for(0, true);
    engine_pair_run(&pair);
    ck_assert_int_eq(asks[0].result.code, TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(asks[0].result.message, "verbs.max_pool"));
    ck_assert_ptr_null(strstr(asks[0].result.message, "verbs.cached"));
    engine_ask_fini(&asks[0]);
    engine_pair_close(&pair);
}
END_TEST

/* No region can be made: a request that fits into the existing one waits for it, a larger one fails with the reason. */
START_TEST(no_more_regions)
{
    options.memory.max_pool_bytes = 64 << 20;
    open_pair();
    fill(asker);
    fake_fabric_add_rule(
        pair.fabric,
        &(struct fake_rule){.fault = FAKE_REGION_FAILURE, .provider = asker->provider, .times = FAKE_ALWAYS});
    engine_side_send(owner, "key", 0, engine_pool_bytes(owner, 5000, 0));
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, 5 << 20, 1));
    ask_for(0, false);
    expect_waiting(asker, 1);
    release();
    ask_for(1, false);
    engine_pair_run(&pair);
    expect_done(0, 5000, TL_PATH_ZERO_COPY);
    ck_assert_int_eq(asks[1].result.code, TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(asks[1].result.message, "verbs.pool"));
    engine_ask_fini(&asks[1]);
    ck_assert(engine_side_has(owner, "key", 1));
    engine_pair_close(&pair);
}
END_TEST

/* Everything is copied through a pool that is smaller than what is under way: no transfer holds a part of what it needs
 * while it waits for the rest. */
START_TEST(forced_copies_through_a_small_pool)
{
    enum { SIZE_BYTES = 1500000 };
    options.engine.is_bounce_forced = true;
    open_pair();
    for (unsigned i = 0; i < ASKS; i++) {
        engine_side_send(owner, "key", i, engine_bytes(SIZE_BYTES, i));
        ask_for(i, false);
    }
    engine_pair_run(&pair);
    for (unsigned i = 0; i < ASKS; i++)
        expect_done(i, SIZE_BYTES, TL_PATH_BOUNCE);
    ck_assert_uint_gt(engine_side_memory(asker).pool_waits, 0);
    engine_pair_close(&pair);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("engine_room");
    TCase *tcase = tcase_create("engine_room");
    tcase_set_timeout(tcase, 60);
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, copies_out_wait);
    tcase_add_test(tcase, pieces_share_one_block);
    tcase_add_test(tcase, cancelled_while_the_owner_waits);
    tcase_add_loop_test(tcase, destinations_wait, 0, 2);
    tcase_add_loop_test(tcase, copies_in_wait, 0, 2);
    tcase_add_test(tcase, first_come_first_served);
    tcase_add_loop_test(tcase, cancelled_while_the_asker_waits, 0, 3);
    tcase_add_test(tcase, cancelled_when_the_space_has_come);
    tcase_add_loop_test(tcase, the_connection_ends_meanwhile, 0, 4);
    tcase_add_test(tcase, what_never_fits);
    tcase_add_test(tcase, the_reactor_makes_no_region);
    tcase_add_test(tcase, a_full_pool_separates_no_workers);
    tcase_add_test(tcase, the_reactor_makes_no_pool_of_a_peer);
    tcase_add_test(tcase, destinations_outside_of_the_pool_of_a_peer);
    tcase_add_test(tcase, what_never_fits_into_the_pool_of_a_peer);
    tcase_add_test(tcase, no_more_regions);
    tcase_add_test(tcase, forced_copies_through_a_small_pool);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
