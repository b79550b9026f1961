// SPDX-License-Identifier: Apache-2.0
/* Slots, space, windows, registered memory: with hardly any of each everything still arrives, or fails with the
 * reason. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "dataplane/engine/conn_internal.h"
#include "fakes/engine_case.h"
#include "fakes/fake_clock.h"
#include "fakes/run_suite.h"

static void setup(void)
{
    engine_pair_defaults(&options);
}

static void add_rule(enum fake_fault fault, const struct engine_side *side, unsigned times)
{
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = fault, .provider = side->provider, .times = times});
}

static void fetch(uint64_t step)
{
    engine_ask_start(asker, &ask, "key", step);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 1);
}

static void expect_fetch(uint64_t step, struct tl_tensor *tensor, enum tl_path path)
{
    uint64_t size_bytes = tl_tensor_size_bytes(tensor);
    engine_side_send(owner, "key", step, tensor);
    fetch(step);
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert(engine_is_bytes(ask.fetch.destination, size_bytes, step));
    ck_assert_int_eq(ask.fetch.path, path);
    engine_ask_fini(&ask);
}

/* ---------------------------------------------------------------------------------------------- slots and room -- */

#define MANY 1000
static struct engine_ask asks[2][MANY];

static void expect_many(bool is_sent_first)
{
    for (unsigned part = 0; part < 2; part++) {
        bool sends = (part == 0) == is_sent_first;
        for (unsigned i = 0; i < MANY; i++) {
            for (unsigned s = 0; s < 2; s++) {
                if (sends) {
                    engine_side_send(&pair.sides[s], "key", i, engine_pool_bytes(&pair.sides[s], 200, i));
                } else {
                    engine_ask_start(&pair.sides[1 - s], &asks[s][i], "key", i);
                }
            }
        }
        if (!is_sent_first) engine_pair_run(&pair);
    }
    engine_pair_run(&pair);
    for (unsigned i = 0; i < 2 * MANY; i++) {
        struct engine_ask *one = &asks[i % 2][i / 2];
        ck_assert_uint_eq(one->done_count, 1);
        ck_assert_int_eq(one->result.code, TL_OK);
        ck_assert(engine_is_bytes(one->fetch.destination, 200, i / 2));
        engine_ask_fini(one);
    }
    for (unsigned s = 0; s < 2; s++) {
        struct fake_counters counters;
        fake_provider_get_counters(pair.sides[s].provider, &counters);
        ck_assert_uint_eq(counters.rnr_tries, 0); /* Nothing was sent without a slot for it. */
        ck_assert_uint_eq(pair.sides[s].conn->credits.peer_slots_used,
                          pair.sides[1 - s].conn->credits.own_slots_returned);
    }
    engine_pair_close(&pair);
}

START_TEST(few_slots)
{
    options.engine.slot_count = 16;
    options.engine.request_count = 1000;
    open_pair();
    expect_many(_i == 0);
}
END_TEST

START_TEST(little_space)
{
    options.engine.work_count = 16;
    options.engine.slot_count = 1024;
    options.engine.request_count = 1000;
    open_pair();
    expect_many(_i == 0);
}
END_TEST

START_TEST(little_of_everything)
{
    options.engine.work_count = 16;
    options.engine.slot_count = 16;
    options.engine.request_count = 7;
    options.engine.key_count = 0;
    open_pair();
    expect_many(true);
}
END_TEST

/* Space comes back although no completion is wanted and the peer sends nothing. */
START_TEST(space_comes_back_by_itself)
{
    enum { COUNT = 100 };
    options.engine.work_count = 16;
    options.engine.slot_count = 4096;
    options.engine.request_count = 1000;
    open_pair();
    for (unsigned i = 0; i < COUNT; i++)
        engine_ask_start(asker, &asks[0][i], "key", i);
    engine_pair_run(&pair);
    ck_assert_uint_eq(owner->open_serve_count, COUNT);
    for (unsigned i = COUNT; i-- > 0;)
        engine_side_send(owner, "key", i, engine_pool_bytes(owner, 200, i));
    engine_pair_run(&pair);
    for (unsigned i = 0; i < COUNT; i++) {
        ck_assert_int_eq(asks[0][i].result.code, TL_OK);
        engine_ask_fini(&asks[0][i]);
    }
    engine_pair_close(&pair);
}
END_TEST

static uint32_t credits_of(const struct engine_side *side)
{
    return side->conn->credits.peer_slot_count -
           (side->conn->credits.peer_slots_used - side->conn->credits.peer_slots_returned);
}

static void round_of_both(void)
{
    for (unsigned i = 0; i < 8; i++)
        (void)engine_side_round(&pair.sides[i % 2]);
}

/* Both sides have filled all slots of the other one but the last, nothing of it has arrived, and then each checks
 * whether the other one lives. If the last slots were used for that, neither side could ever send anything again. */
START_TEST(pings_that_cross)
{
    options.engine.slot_count = 16;
    options.engine.request_count = 100;
    options.engine.peer_timeout_ns = 100 * TL_NS_PER_SEC;
    open_pair();
    fake_fabric_set_manual(pair.fabric, true);
    for (unsigned i = 0; i < 100; i++) {
        for (unsigned s = 0; s < 2; s++)
            engine_ask_start(&pair.sides[s], &asks[s][i], "key", i);
        round_of_both(); /* so that each REQUEST takes a slot */
    }
    fake_clock_advance(options.engine.peer_timeout_ns / 4);
    round_of_both();
    for (unsigned s = 0; s < 2; s++) {
        ck_assert(pair.sides[s].conn->credits.is_ping_wanted);
        ck_assert_uint_eq(credits_of(&pair.sides[s]), 1);
    }
    fake_fabric_set_manual(pair.fabric, false);
    engine_pair_run(&pair);
    for (unsigned i = 0; i < 100; i++) {
        for (unsigned s = 0; s < 2; s++)
            engine_side_send(&pair.sides[s], "key", i, engine_pool_bytes(&pair.sides[s], 200, i));
    }
    engine_pair_run(&pair);
    for (unsigned i = 0; i < 200; i++) {
        ck_assert_uint_eq(asks[i % 2][i / 2].done_count, 1);
        ck_assert_int_eq(asks[i % 2][i / 2].result.code, TL_OK);
        engine_ask_fini(&asks[i % 2][i / 2]);
    }
    engine_pair_close(&pair);
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- windows -- */

START_TEST(windows_are_waited_for)
{
    enum { COUNT = 40 };
    open_pair();
    expect_fetch(1000, engine_pool_bytes(owner, 200, 1000), TL_PATH_ZERO_COPY);
    fake_fabric_add_rule(pair.fabric,
                         &(struct fake_rule){.fault = FAKE_EXPOSE_FAILURE, .from = 3, .times = (unsigned)_i});
    for (unsigned i = 0; i < COUNT; i++) {
        engine_side_send(owner, "key", i, engine_pool_bytes(owner, 200, i));
        engine_ask_start(asker, &asks[0][i], "key", i);
    }
    engine_pair_run(&pair);
    for (unsigned i = 0; i < COUNT; i++) {
        ck_assert_msg(asks[0][i].result.code == TL_OK, "%u: %s", i, asks[0][i].result.message);
        engine_ask_fini(&asks[0][i]);
    }
    engine_pair_close(&pair);
}
END_TEST

/* Requests that wait for a window are cancelled, in any order; the window goes to the next one. */
START_TEST(cancelled_while_waiting_for_a_window)
{
    enum { COUNT = 12 };
    open_pair();
    expect_fetch(1000, engine_pool_bytes(owner, 200, 1000), TL_PATH_ZERO_COPY);
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_EXPOSE_FAILURE, .from = 2, .times = 1});
    for (unsigned i = 0; i < COUNT; i++)
        engine_ask_start(asker, &asks[0][i], "key", i);
    engine_pair_run(&pair);
    for (unsigned i = 0; i < COUNT; i += 2)
        engine_ask_cancel(&asks[0][i]);
    engine_pair_run(&pair);
    for (unsigned i = 1; i < COUNT; i += 2)
        engine_side_send(owner, "key", i, engine_pool_bytes(owner, 200, i));
    engine_pair_run(&pair);
    for (unsigned i = 0; i < COUNT; i++) {
        ck_assert_int_eq(asks[0][i].result.code, i % 2 == 0 ? TL_CANCELLED : TL_OK);
        engine_ask_fini(&asks[0][i]);
    }
    engine_pair_close(&pair);
}
END_TEST

START_TEST(no_window_at_all)
{
    open_pair();
    expect_fetch(1, engine_pool_bytes(owner, 200, 1), TL_PATH_ZERO_COPY);
    add_rule(FAKE_EXPOSE_FAILURE, asker, FAKE_ALWAYS);
    engine_side_send(owner, "key", 2, engine_pool_bytes(owner, 200, 2));
    fetch(2);
    ck_assert_int_eq(ask.result.code, TL_RESOURCE_EXHAUSTED);
    engine_ask_fini(&ask);
    fake_fabric_clear_rules(pair.fabric);
    ck_assert(tl_conn_is_up(asker->conn));
    fetch(2);
    ck_assert_int_eq(ask.result.code, TL_OK);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

/* ------------------------------------------------------------------------------------------- registered memory -- */

START_TEST(large_memory_of_users_is_registered_once)
{
    enum { SIZE_BYTES = 200000 };
    open_pair();
    struct tl_tensor *source = engine_bytes(SIZE_BYTES, 0);
    struct tl_tensor *destination = engine_bytes(SIZE_BYTES, 9);
    for (uint64_t step = 1; step <= 10; step++) {
        ask.destination = tl_tensor_get(destination);
        engine_side_send(owner, "key", step, tl_tensor_get(source));
        fetch(step);
        ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
        ck_assert_int_eq(ask.fetch.path, TL_PATH_ZERO_COPY);
        ck_assert(engine_is_bytes(destination, SIZE_BYTES, 0));
        engine_ask_fini(&ask);
    }
    ck_assert_uint_eq(engine_side_memory(owner).registrations, 1);
    ck_assert_uint_eq(engine_side_memory(asker).registrations, 1);
    ck_assert_uint_eq(engine_side_stats(owner).bytes_bounced + engine_side_stats(asker).bytes_bounced, 0);
    struct fake_write write = fake_fabric_write_at(pair.fabric, fake_fabric_write_count(pair.fabric) - 1);
    ck_assert_ptr_eq(write.source, tl_tensor_data(source));
    ck_assert_ptr_eq(write.destination, tl_tensor_data(destination));
    tl_tensor_put(source);
    tl_tensor_put(destination);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(small_memory_of_users_is_copied)
{
    open_pair();
    for (uint64_t step = 1; step <= 10; step++) {
        ask.is_unregistered = step % 2 == 1;
        bool is_pooled = step % 3 == 0;
        struct tl_tensor *tensor = is_pooled ? engine_pool_bytes(owner, 5000, step) : engine_bytes(5000, step);
        bool is_bounced = ask.is_unregistered || !is_pooled;
        expect_fetch(step, tensor, is_bounced ? TL_PATH_BOUNCE : TL_PATH_ZERO_COPY);
    }
    ck_assert_uint_eq(engine_side_memory(owner).registrations, 0);
    ck_assert_uint_eq(engine_side_memory(asker).registrations, 0);
    ck_assert_uint_eq(engine_side_stats(owner).bytes_bounced, 7 * 5000);
    ck_assert_uint_eq(engine_side_stats(asker).bytes_bounced, 5 * 5000);
    ck_assert_uint_eq(engine_side_memory(asker).bounced_bytes, 5 * 5000);
    engine_pair_close(&pair);
}
END_TEST

/* The tensor goes in pieces, of which a few are under way at a time. */
START_TEST(everything_is_copied_if_forced)
{
    options.engine.is_bounce_forced = true;
    open_pair();
    for (uint64_t step = 1; step <= 3; step++) {
        size_t count = fake_fabric_write_count(pair.fabric);
        expect_fetch(step, engine_pool_bytes(owner, 2000000, step), TL_PATH_BOUNCE);
        ck_assert_uint_eq(fake_fabric_write_count(pair.fabric) - count, 16);
    }
    ck_assert_uint_eq(engine_side_stats(owner).bytes_bounced, 6000000);
    ck_assert_uint_eq(engine_side_stats(asker).bytes_bounced, 6000000);
    engine_pair_close(&pair);
}
END_TEST

/* A tensor that cannot be registered goes through the pool. */
START_TEST(registering_fails)
{
    open_pair();
    if (_i & 1) add_rule(FAKE_REGION_FAILURE, asker, FAKE_ALWAYS);
    if (_i & 2) add_rule(FAKE_REGION_FAILURE, owner, FAKE_ALWAYS);
    for (uint64_t step = 1; step <= 3; step++) {
        ask.is_unregistered = true;
        expect_fetch(step, engine_bytes(200000, step), _i == 0 ? TL_PATH_ZERO_COPY : TL_PATH_BOUNCE);
    }
    engine_pair_close(&pair);
}
END_TEST

/* Neither way is open: the fetch says so, the connection stays, and the value is still there. */
START_TEST(no_memory_at_the_asker)
{
    options.memory.pool_bytes = options.memory.max_pool_bytes = 4 << 20;
    open_pair();
    add_rule(FAKE_REGION_FAILURE, asker, FAKE_ALWAYS);
    ask.is_unregistered = _i == 0; /* Otherwise the pool itself would give the destination. */
    engine_side_send(owner, "key", 1, engine_bytes(5 << 20, 1));
    fetch(1);
    ck_assert_int_eq(ask.result.code, TL_RESOURCE_EXHAUSTED);
    ck_assert_uint_gt(strlen(ask.result.message), 0);
    engine_ask_fini(&ask);
    ck_assert(tl_conn_is_up(asker->conn));
    ck_assert_uint_eq(engine_side_values(owner), 1);
    ck_assert_int_eq(owner->last_end, TL_SERVE_CANCELLED);
    expect_fetch(2, engine_pool_bytes(owner, 1000, 2), TL_PATH_ZERO_COPY);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(providers_that_need_no_regions)
{
    options.provider.needs_no_regions = true;
    open_pair();
    expect_fetch(1, engine_bytes(100, 1), TL_PATH_ZERO_COPY);
    expect_fetch(2, engine_bytes(1 << 20, 2), TL_PATH_ZERO_COPY);
    ck_assert_uint_eq(engine_side_memory(owner).registrations, 0);
    engine_pair_close(&pair);
}
END_TEST

/* A fetch of a value of another shape than it has memory for. */
START_TEST(destination_that_does_not_fit)
{
    open_pair();
    expect_fetch(1, engine_pool_bytes(owner, 200, 1), TL_PATH_ZERO_COPY);
    ask.destination = engine_pool_bytes(asker, 300, 0);
    engine_side_send(owner, "key", 2, engine_pool_bytes(owner, 200, 2));
    fetch(2);
    ck_assert_int_eq(ask.result.code, TL_INVALID_ARGUMENT);
    ck_assert_uint_eq(engine_side_values(owner), 1);
    engine_ask_fini(&ask);
    /* The former value does not fit, the present one does. */
    ask.destination = engine_pool_bytes(asker, 300, 0);
    expect_fetch(3, engine_pool_bytes(owner, 300, 3), TL_PATH_ZERO_COPY);
    engine_pair_close(&pair);
}
END_TEST

/* ----------------------------------------------------------------------------------------- parked for too long -- */

/* An asker that waits for space in its pool learns that the owner no longer keeps the value, and may ask again. */
START_TEST(value_is_not_kept_for_ever_for_an_asker_without_space)
{
    options.memory.pool_bytes = options.memory.max_pool_bytes = 4 << 20;
    options.engine.parked_ns = options.engine.peer_timeout_ns / 2;
    open_pair();
    struct tl_tensor *block = engine_pool_bytes(asker, 7 << 19, 0);
    engine_side_send(owner, "key", 1, engine_bytes(1 << 20, 1));
    engine_ask_start(asker, &ask, "key", 1);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 0);
    ck_assert_uint_eq(engine_side_memory(asker).pool_waiting, 1);
    fake_clock_advance(options.engine.parked_ns);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 1);
    ck_assert_int_eq(ask.result.code, TL_UNAVAILABLE);
    ck_assert_msg(strstr(ask.result.message, "timeouts.stalled") != NULL, "%s", ask.result.message);
    ck_assert(!ask.fetch.is_final);
    ck_assert_uint_eq(engine_side_memory(asker).pool_waiting, 0);
    ck_assert(tl_conn_is_up(asker->conn) && tl_conn_is_up(owner->conn));
    ck_assert(engine_side_has(owner, "key", 1));
    engine_ask_fini(&ask);
    tl_tensor_put(block);
    fetch(1);
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("engine_scarce");
    TCase *tcase = tcase_create("engine_scarce");
    tcase_set_timeout(tcase, 60);
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_loop_test(tcase, few_slots, 0, 2);
    tcase_add_loop_test(tcase, little_space, 0, 2);
    tcase_add_test(tcase, little_of_everything);
    tcase_add_test(tcase, space_comes_back_by_itself);
    tcase_add_test(tcase, pings_that_cross);
    tcase_add_loop_test(tcase, windows_are_waited_for, 1, 38);
    tcase_add_test(tcase, cancelled_while_waiting_for_a_window);
    tcase_add_test(tcase, no_window_at_all);
    tcase_add_test(tcase, large_memory_of_users_is_registered_once);
    tcase_add_test(tcase, small_memory_of_users_is_copied);
    tcase_add_test(tcase, everything_is_copied_if_forced);
    tcase_add_loop_test(tcase, registering_fails, 0, 4);
    tcase_add_loop_test(tcase, no_memory_at_the_asker, 0, 2);
    tcase_add_test(tcase, providers_that_need_no_regions);
    tcase_add_test(tcase, destination_that_does_not_fit);
    tcase_add_test(tcase, value_is_not_kept_for_ever_for_an_asker_without_space);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
