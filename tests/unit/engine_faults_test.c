// SPDX-License-Identifier: Apache-2.0
/*
 * The n-th allocation or the n-th registration of an engine fails, for every n, while it connects and transfers: calls
 * return a status, fetches end with one, connections end with a reason; nothing leaks and no callback runs twice.
 */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fakes/engine_pair.h"
#include "fakes/fake_clock.h"

#include "tests/fakes/fault_alloc.h"

#undef fail /* check.h defines this name. */
#define place timer_place
#include "base/timer.c"
#undef place
#include "dataplane/engine/asked_keys.c"
#include "dataplane/engine/conn.c"
#include "dataplane/engine/conn_handles.c"
#include "dataplane/engine/conn_keys.c"
#include "dataplane/engine/conn_memory.c"
#include "dataplane/engine/engine.c"
#include "dataplane/engine/kept_keys.c"
#include "dataplane/engine/request.c"
#include "dataplane/engine/response.c"
#include "fakes/run_suite.h"

static struct engine_pair engines;
static struct engine_pair_options engine_options;

static void setup(void)
{
    engine_pair_defaults(&engine_options);
    engine_options.engine.register_bytes = 1000;
}

/* ---------------------------------------------------------------------------------------------------- scenario -- */

/* Makes both connections; returns false when that has failed, with a status and nothing left behind. */
static bool connect_both(void)
{
    uint8_t bytes[2][TL_CONN_ADDRESS_BYTES];
    uint32_t len_bytes[2];
    struct tl_error error = {.code = TL_OK};
    for (unsigned i = 0; i < 2; i++) {
        if (engine_side_try_create_conn(&engines.sides[i], &error) != TL_OK) {
            ck_assert_int_eq(error.code, TL_RESOURCE_EXHAUSTED);
            ck_assert_ptr_null(engines.sides[i].conn);
            return false;
        }
        len_bytes[i] = tl_conn_get_address(engines.sides[i].conn, bytes[i]);
    }
    for (unsigned i = 2; i-- > 0;) {
        if (tl_conn_connect(engines.sides[i].conn, bytes[1 - i], len_bytes[1 - i], &error) != TL_OK) return false;
    }
    engine_pair_run(&engines);
    return true;
}

static void end_both(void)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_CANCELLED, "once more");
    for (unsigned i = 0; i < 2; i++) {
        if (engines.sides[i].conn != NULL) tl_conn_close(engines.sides[i].conn, &reason);
    }
    engine_pair_run(&engines);
}

static bool is_usable(void)
{
    return engines.left->conn != NULL && tl_conn_is_up(engines.left->conn);
}

/* Returns whether the value was received. */
static bool receive(struct engine_ask *ask, const char *key, uint64_t step, bool is_cancelled)
{
    if (!is_usable()) return false;
    engine_ask_start(engines.left, ask, key, step);
    engine_pair_run(&engines);
    if (is_cancelled) engine_ask_cancel(ask);
    for (unsigned i = 0; i < 8 && ask->is_open; i++) {
        engine_pair_run(&engines);
        fake_clock_advance(engine_options.engine.peer_timeout_ns / 2);
    }
    engine_pair_run(&engines);
    ck_assert_uint_eq(ask->done_count, 1);
    enum tl_status code = ask->result.code;
    ck_assert_msg(code == TL_OK || code == TL_RESOURCE_EXHAUSTED || code == TL_UNAVAILABLE || code == TL_CANCELLED,
                  "%s", ask->result.message);
    engine_ask_fini(ask);
    return code == TL_OK;
}

/* Asks for each value, one after the other; returns whether it was received. */
static bool transfer(uint64_t step, struct tl_tensor *tensor, bool is_unregistered, bool is_cancelled)
{
    struct engine_ask ask = {.is_unregistered = is_unregistered, .wants_checksum = step % 2 == 0};
    if (tensor != NULL) engine_side_send(engines.right, "key", step, tensor);
    return receive(&ask, "key", step, is_cancelled);
}

/* A published file, which may be mapped. */
static bool transfer_file(void)
{
    struct engine_ask ask = {.may_map = true};
    engine_side_publish(engines.right, "file", 0, engine_file_bytes(5000, 8));
    return receive(&ask, "file", 0, false);
}

/* Returns how many of the values have come. */
static unsigned run_scenario(void)
{
    struct tl_tensor *dead;
    unsigned count = 0;
    ck_assert_int_eq(tl_tensor_create_dead(&dead, NULL), TL_OK);
    if (!connect_both()) end_both();
    count += transfer(1, engine_pool_bytes(engines.right, 3000, 1), false, false);
    count += transfer(2, engine_pool_bytes(engines.right, 3000, 2), false, false);
    count += transfer(3, engine_bytes(5000, 3), true, false);
    count += transfer(4, engine_bytes(500, 4), true, false);
    count += transfer(5, dead, false, false);
    count += transfer(6, NULL, false, true);
    count += transfer_file();
    return count;
}

#define VALUES 6

/* After the fault everything works again. */
static void expect_all_is_well(void)
{
    end_both();
    ck_assert(connect_both() && is_usable());
    ck_assert(transfer(7, engine_pool_bytes(engines.right, 3000, 7), false, false));
    engine_pair_close(&engines);
}

/* --------------------------------------------------------------------------------------------------- the walks -- */

START_TEST(every_allocation)
{
    bool was_hit = true;
    unsigned number = 0;
    engine_options.provider.max_write_bytes = _i == 0 ? 1 << 20 : 700;
    engine_options.engine.is_bounce_forced = _i == 2;
    engine_options.engine.inline_bytes = _i == 3 ? TL_INLINE_BYTES : 0;
    while (was_hit) {
        engine_pair_init(&engines, &engine_options);
        fault_arm(++number);
        unsigned count = run_scenario();
        was_hit = fault_was_hit();
        if (!was_hit) ck_assert_uint_eq(count, VALUES);
        expect_all_is_well();
        ck_assert_uint_lt(number, 2000);
    }
    ck_assert_uint_gt(number, 15);
}
END_TEST

START_TEST(every_registration)
{
    for (unsigned number = 1; number < 12; number++) {
        for (unsigned times = 1; times < 3; times++) {
            engine_pair_init(&engines, &engine_options);
            fake_fabric_add_rule(engines.fabric,
                                 &(struct fake_rule){.fault = FAKE_REGION_FAILURE, .from = number, .times = times});
            ck_assert_uint_eq(run_scenario(), VALUES); /* It goes through the pool instead. */
            fake_fabric_clear_rules(engines.fabric);
            expect_all_is_well();
        }
    }
}
END_TEST

START_TEST(engine_without_memory)
{
    struct tl_engine *engine = NULL;
    struct tl_error error;
    engine_pair_init(&engines, &engine_options);
    fault_arm(1);
    ck_assert_int_eq(tl_engine_create(engines.left->reactor, engines.left->memory, &engine_options.engine,
                                      engines.left->engine->source.ops, engines.left, &engine, &error),
                     TL_RESOURCE_EXHAUSTED);
    ck_assert(fault_was_hit());
    ck_assert_ptr_null(engine);
    tl_engine_destroy(NULL);
    engine_pair_close(&engines);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("engine_faults");
    TCase *tcase = tcase_create("engine_faults");
    tcase_set_timeout(tcase, 100);
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_loop_test(tcase, every_allocation, 0, 4);
    tcase_add_test(tcase, every_registration);
    tcase_add_test(tcase, engine_without_memory);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
