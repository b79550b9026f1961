// SPDX-License-Identifier: Apache-2.0
/* Of the values that are ready for one peer that of the greater priority travels first, written or read. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>

#include "dataplane/engine/request_internal.h"
#include "fakes/engine_case.h"
#include "fakes/run_suite.h"

enum { COUNT = 8, PIECE_BYTES = 1000, SIZE_BYTES = 64 * PIECE_BYTES, MOST_ROUNDS = 10000 };

static struct engine_ask asks[COUNT], urgent;

static void ask_for(struct engine_ask *asked, const char *key, uint8_t priority, uint64_t seed)
{
    *asked = (struct engine_ask){.priority = priority};
    engine_ask_start(asker, asked, key, 1);
    engine_side_send(owner, key, 1, engine_pool_bytes(owner, SIZE_BYTES, seed));
}

static void round_of_both(void)
{
    (void)engine_side_round(owner);
    (void)engine_side_round(asker);
}

static bool has_begun(const struct engine_ask *asked)
{
    const struct request *request = asked->fetch.transport_state;
    return request != NULL && request->received_bytes > 0;
}

static void open_with_many(bool is_reading)
{
    char key[16];
    engine_pair_defaults(&options);
    options.engine.piece_bytes = PIECE_BYTES;
    options.engine.is_reading = is_reading;
    options.fabric.poll_batch = 1;
    open_pair();
    for (unsigned i = 0; i < COUNT; i++) {
        snprintf(key, sizeof(key), "key%u", i);
        ask_for(&asks[i], key, 0, i);
    }
    unsigned begun_count = 0;
    for (unsigned round = 0; round < MOST_ROUNDS && begun_count < COUNT; round++) {
        round_of_both();
        begun_count = 0;
        for (unsigned i = 0; i < COUNT; i++)
            begun_count += has_begun(&asks[i]);
    }
    ck_assert_uint_eq(begun_count, COUNT);
}

static unsigned done_count(void)
{
    unsigned count = 0;
    for (unsigned i = 0; i < COUNT; i++)
        count += asks[i].done_count;
    return count;
}

static void close_after_all(void)
{
    engine_pair_run(&pair);
    ck_assert_uint_eq(done_count(), COUNT);
    for (unsigned i = 0; i < COUNT; i++) {
        ck_assert(engine_is_bytes(asks[i].fetch.destination, SIZE_BYTES, i));
        engine_ask_fini(&asks[i]);
    }
    ck_assert(engine_is_bytes(urgent.fetch.destination, SIZE_BYTES, COUNT));
    engine_ask_fini(&urgent);
    engine_pair_close(&pair);
}

/* A value that is asked for last passes all that have begun. */
START_TEST(greater_priority_passes)
{
    open_with_many(_i == 1);
    ask_for(&urgent, "urgent", TL_MAX_PRIORITY, COUNT);
    for (unsigned round = 0; round < MOST_ROUNDS && urgent.done_count == 0; round++)
        round_of_both();
    ck_assert_uint_eq(urgent.done_count, 1);
    ck_assert_uint_eq(done_count(), 0);
    close_after_all();
}
END_TEST

/* Of one priority each sends a piece after the other, so that the last one ends last. */
START_TEST(same_priority_passes_none)
{
    open_with_many(_i == 1);
    ask_for(&urgent, "urgent", 0, COUNT);
    for (unsigned round = 0; round < MOST_ROUNDS && done_count() < COUNT; round++)
        round_of_both();
    ck_assert_uint_eq(done_count(), COUNT);
    ck_assert_uint_eq(urgent.done_count, 0);
    close_after_all();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("engine_priority");
    TCase *passes = tcase_create("greater_priority_passes");
    tcase_add_loop_test(passes, greater_priority_passes, 0, 2);
    suite_add_tcase(suite, passes);
    TCase *same = tcase_create("same_priority_passes_none");
    tcase_add_loop_test(same, same_priority_passes_none, 0, 2);
    suite_add_tcase(suite, same);
    return run_suite(suite);
}
