// SPDX-License-Identifier: Apache-2.0
/* Receives whose values do not exist yet hold nothing that others need: whatever waits, what exists arrives. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/error.h"
#include "dataplane/engine/request_internal.h"
#include "dataplane/engine/response_internal.h"
#include "fakes/engine_case.h"
#include "fakes/run_suite.h"

#define ABSENT 3500
#define SIZE_BYTES 1000

static struct engine_ask *absent; /* [ABSENT] */

static void setup(void)
{
    engine_pair_defaults(&options);
    options.engine.request_count = 2 * ABSENT;
    absent = calloc(ABSENT, sizeof(*absent));
    ck_assert_ptr_nonnull(absent);
}

static void teardown(void)
{
    free(absent);
}

/* ----------------------------------------------------------------------------------------------------- waiting -- */

static void expect(uint64_t seed)
{
    ck_assert_uint_eq(ask.done_count, 1);
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert(engine_is_bytes(ask.fetch.destination, SIZE_BYTES, seed));
    engine_ask_fini(&ask);
}

static void receive(const char *key, uint64_t step, uint64_t seed)
{
    engine_ask_start(asker, &ask, key, step);
    engine_pair_run(&pair);
    expect(seed);
}

/* Asks for values of this key that do not exist. */
static void ask_in_vain(const char *key)
{
    for (unsigned i = 0; i < ABSENT; i++)
        engine_ask_start(asker, &absent[i], key, 1000 + i);
    engine_pair_run(&pair);
}

/* Sends them all, and checks that they arrive. */
static void send_all(const char *key)
{
    for (unsigned i = 0; i < ABSENT; i++) {
        engine_side_send(owner, key, 1000 + i, engine_bytes(SIZE_BYTES, i));
        if (i % 10 == 9) engine_pair_run(&pair);
        if (i % 10 != 9) continue;
        for (unsigned k = i - 9; k <= i; k++) {
            ck_assert_uint_eq(absent[k].done_count, 1);
            ck_assert_msg(absent[k].result.code == TL_OK, "%u: %s", k, absent[k].result.message);
            ck_assert(engine_is_bytes(absent[k].fetch.destination, SIZE_BYTES, k));
            engine_ask_fini(&absent[k]);
        }
    }
}

/* All are asked, however many wait. */
START_TEST(values_that_exist_arrive)
{
    options.engine.keys = _i == 0 ? TL_KEYS_WINDOW : TL_KEYS_REGION;
    open_pair();
    ask_in_vain("unknown");
    ck_assert_uint_eq(owner->open_serve_count, ABSENT);
    engine_side_publish(owner, "there", 1, engine_bytes(SIZE_BYTES, 1));
    receive("there", 1, 1);
    engine_side_send(owner, "sent", 2, engine_bytes(SIZE_BYTES, 2));
    receive("sent", 2, 2);
    send_all("unknown");
    engine_pair_close(&pair);
}
END_TEST

/* ------------------------------------------------------------------------------------------- windows and memory -- */

static void publish_and_receive(const char *key, uint64_t step)
{
    engine_side_publish(owner, key, step, engine_bytes(SIZE_BYTES, step));
    receive(key, step, step);
}

/* Meta-data of the key is known, so that absent values are asked for with a place. */
static void ask_with_places(void)
{
    engine_side_send(owner, "known", 1, engine_bytes(SIZE_BYTES, 1));
    receive("known", 1, 1);
    ask_in_vain("known");
    ck_assert_uint_eq(owner->open_serve_count, ABSENT);
}

/* Whatever holds places, what exists finds one: another key, whose meta-data is known or not, and the other way. */
static void expect_others_pass(void)
{
    for (uint64_t step = 1; step <= 5; step++)
        publish_and_receive("there", step);
    engine_side_send(asker, "back", 1, engine_bytes(SIZE_BYTES, 7));
    engine_ask_start(owner, &ask, "back", 1);
    engine_pair_run(&pair);
    expect(7);
    send_all("known");
    ck_assert_uint_eq(asker->conn->posts.windows_used + asker->conn->posts.early_windows, 0);
    engine_pair_close(&pair);
}

#define POOL_BYTES (1 << 20)

/* Absent values take at most three quarters of the pool. */
START_TEST(a_quarter_of_the_pool_stays_free)
{
    options.engine.keys = _i % 2 == 0 ? TL_KEYS_WINDOW : TL_KEYS_REGION;
    options.engine.is_bounce_forced = _i >= 2;
    options.memory.pool_bytes = options.memory.max_pool_bytes = POOL_BYTES;
    options.engine.peer_memory = options.memory;
    open_pair();
    ask_with_places();
    uint64_t used_bytes = engine_side_memory(asker).pool_used_bytes;
    if (_i % 2 == 0) ck_assert_uint_le(used_bytes, POOL_BYTES / 4 * 3);
    ck_assert_uint_ge(used_bytes, POOL_BYTES / 2);
    ck_assert_uint_eq(engine_side_memory(asker).pool_waiting, 0);
    expect_others_pass();
}
END_TEST

/* A pool that may grow grows, so that the next values have their places when they are asked for. */
START_TEST(a_pool_that_may_grow_has_places)
{
    enum { AT_ONCE = 1000 };
    options.memory.pool_bytes = POOL_BYTES;
    options.memory.max_pool_bytes = 16 * POOL_BYTES;
    open_pair();
    engine_side_publish(owner, "there", 1, engine_bytes(SIZE_BYTES, 1));
    receive("there", 1, 1);
    for (unsigned round = 0; round < 4; round++) {
        uint64_t updates = engine_side_stats(asker).meta_data_updates;
        for (unsigned i = 0; i < AT_ONCE; i++)
            engine_ask_start(asker, &absent[i], "there", 1);
        engine_pair_run(&pair);
        for (unsigned i = 0; i < AT_ONCE; i++) {
            ck_assert_msg(absent[i].result.code == TL_OK, "%s", absent[i].result.message);
            engine_ask_fini(&absent[i]);
        }
        updates = engine_side_stats(asker).meta_data_updates - updates;
        engine_side_settle(asker);
        if (round == 0) ck_assert_uint_gt(updates, 0);
        if (round == 3) ck_assert_uint_eq(updates, 0);
    }
    ck_assert_uint_le(engine_side_memory(asker).pool_bytes, 3 * POOL_BYTES);
    engine_pair_close(&pair);
}
END_TEST

/* Absent values take at most three quarters of the windows, written or read. */
START_TEST(a_quarter_of_the_windows_stays_free)
{
    enum { WINDOWS = 40 };
    options.provider.window_count = WINDOWS;
    options.engine.is_reading = _i == 1;
    open_pair();
    ask_with_places();
    ck_assert_uint_eq(asker->conn->posts.early_windows, _i == 1 ? 0 : WINDOWS * 3 / 4);
    expect_others_pass();
}
END_TEST

/* A connection has only so many windows for absent values. */
START_TEST(windows_for_absent_values_are_bounded)
{
    options.memory.pool_bytes = options.memory.max_pool_bytes = 16 << 20;
    open_pair();
    ask_with_places();
    ck_assert_uint_eq(asker->conn->posts.early_windows, 3072);
    expect_others_pass();
}
END_TEST

/* Destinations of users are registered, while they are awaited or when the value is there. */
START_TEST(destinations_of_users)
{
    options.memory.pool_bytes = options.memory.max_pool_bytes = POOL_BYTES;
    options.engine.register_bytes = _i == 0 ? 1 : SIZE_BYTES + 1;
    open_pair();
    for (unsigned i = 0; i < ABSENT; i++)
        absent[i].is_unregistered = true;
    ask_with_places();
    ck_assert_uint_eq(engine_side_memory(asker).pool_waiting, 0);
    expect_others_pass();
}
END_TEST

/* -------------------------------------------------------------------------------------------------------- size -- */

_Static_assert(sizeof(struct request) <= 104, "a request that waits is small");
_Static_assert(sizeof(struct response) <= 136, "a response that waits is small");

static unsigned placement_count(void)
{
    const struct conn_requests *requests = &asker->conn->requests;
    unsigned count = 0;
    for (uint32_t i = 0; i < requests->handle_count; i++)
        count += requests->handles[i].request != NULL && requests->handles[i].request->placement != NULL;
    return count;
}

static unsigned sending_count(void)
{
    const struct conn_responses *responses = &owner->conn->responses;
    unsigned count = 0;
    for (uint32_t i = 0; i < responses->place_count; i++)
        for (const struct response *response = responses->by_handle[i]; response != NULL; response = response->next)
            count += response->sending != NULL;
    return count;
}

/* What is needed once a value exists is allocated then, and what has a place has it before. */
START_TEST(what_waits_is_small)
{
    options.engine.is_reading = _i == 1;
    open_pair();
    ask_in_vain("unknown");
    ck_assert_uint_eq(placement_count(), 0);
    ck_assert_uint_eq(sending_count(), 0);
    send_all("unknown");
    ask_with_places();
    ck_assert_uint_eq(placement_count(), asker->conn->posts.early_windows);
    ck_assert_uint_eq(sending_count(), asker->conn->posts.early_windows);
    expect_others_pass();
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- handles -- */

/* A peer that takes fewer requests than may wait lets the others wait, and they go when those end. */
START_TEST(handles_of_requests_that_end_are_used_again)
{
    options.engine.request_count = 70; /* One more table than the first. */
    open_pair();
    ask_in_vain("unknown");
    ck_assert_uint_eq(owner->open_serve_count, 70);
    ck_assert_uint_eq(asker->conn->requests.handle_count, 70);
    for (unsigned i = 0; i < ABSENT; i++)
        engine_ask_cancel(&absent[i]);
    engine_pair_run(&pair);
    for (unsigned i = 0; i < ABSENT; i++) {
        ck_assert_int_eq(absent[i].result.code, TL_CANCELLED);
        engine_ask_fini(&absent[i]);
    }
    ck_assert_uint_eq(asker->conn->requests.open_count, 0);
    engine_side_publish(owner, "there", 1, engine_bytes(SIZE_BYTES, 1));
    receive("there", 1, 1);
    engine_pair_close(&pair);
}
END_TEST

/* Adds a case of this name, which tests/defects/run selects. */
#define ADD(suite, test, count)                                                                                        \
    do {                                                                                                               \
        TCase *tcase = tcase_create(#test);                                                                            \
        tcase_add_checked_fixture(tcase, setup, teardown);                                                             \
        tcase_set_timeout(tcase, 100);                                                                                 \
        tcase_add_loop_test(tcase, test, 0, count);                                                                    \
        suite_add_tcase(suite, tcase);                                                                                 \
    } while (0)

int main(void)
{
    Suite *suite = suite_create("engine_waits");
    ADD(suite, values_that_exist_arrive, 2);
    ADD(suite, a_quarter_of_the_pool_stays_free, 4);
    ADD(suite, a_pool_that_may_grow_has_places, 1);
    ADD(suite, a_quarter_of_the_windows_stays_free, 2);
    ADD(suite, windows_for_absent_values_are_bounded, 1);
    ADD(suite, destinations_of_users, 2);
    ADD(suite, what_waits_is_small, 2);
    ADD(suite, handles_of_requests_that_end_are_used_again, 1);
    return run_suite(suite);
}
