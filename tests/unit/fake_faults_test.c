// SPDX-License-Identifier: Apache-2.0
/* The fake provider with faults: each one by script, and all of them by seed. */
#include "fakes/fake_sides.h"
#include "fakes/run_suite.h"

static void setup(void)
{
    sides_open(NULL, NULL, &side_options);
}

static void setup_manual(void)
{
    sides_open(&(struct fake_fabric_options){.is_manual = true}, NULL, &side_options);
}

static void setup_flushed_first(void)
{
    sides_open(&(struct fake_fabric_options){.is_flushed_first = true}, NULL, &side_options);
}

static void rule(struct fake_rule rule)
{
    fake_fabric_add_rule(fabric, &rule);
}

static void ring(struct side *side)
{
    tl_queue_pair_doorbell(side->pair);
}

static void carry(struct side *side)
{
    ring(side);
    while (fake_fabric_step(fabric, side->pair)) {
    }
}

/* b exposes its first 16 bytes, and a writes one of them. */
static void post_write(char byte, const char *name)
{
    if (b->exposure.region == NULL) {
        expose(b, 0, 16);
        ring(b);
        settle();
    }
    a->memory[0] = byte;
    a->pair->ops->write(a->pair, a->region, a->memory, 1, &b->exposure.descriptor, 0, true, 9, work(a, name));
    ring(a);
}

/* ----------------------------------------------------------------------------------------------- of operations -- */

START_TEST(drop_holds_until_disconnected)
{
    rule((struct fake_rule){.fault = FAKE_DROP, .kinds = FAKE_WRITE});
    send_text(a, "one", work(a, "x"));
    post_write('X', "w");
    send_text(a, "two", work(a, "y"));
    ring(a);
    settle();
    ck_assert_str_eq(a->trace, "x+");
    disconnect(a);
    settle();
    ck_assert_str_eq(a->trace, "x+ broken w- y- drained");
    ck_assert_str_eq(b->trace, "m:one");
    ck_assert_int_eq(b->memory[0], 0);
}
END_TEST

START_TEST(delay_takes_steps)
{
    rule((struct fake_rule){.fault = FAKE_DELAY, .provider = a->provider, .from = 2, .count = 3});
    send_text(a, "one", NULL);
    send_text(a, "two", NULL);
    send_text(a, "three", NULL);
    ring(a);
    for (unsigned i = 0; i < 1 + 3; i++)
        ck_assert(fake_fabric_step(fabric, a->pair));
    ck_assert_uint_eq(counters(a).messages, 1);
    ck_assert(fake_fabric_step(fabric, a->pair));
    ck_assert_uint_eq(counters(a).messages, 2);
    settle();
    ck_assert_str_eq(b->trace, "m:one m:two m:three");
}
END_TEST

START_TEST(a_lost_ack_is_cancelled_though_it_happened)
{
    rule((struct fake_rule){.fault = FAKE_LOSE_ACK, .kinds = FAKE_WRITE});
    rule((struct fake_rule){.fault = FAKE_LOSE_ACK, .kinds = FAKE_REVOKE});
    post_write('X', "w");
    settle();
    ck_assert_str_eq(b->trace, "i:9/1");
    ck_assert_int_eq(b->memory[0], 'X');
    ck_assert_str_eq(a->trace, "");
    disconnect(a);
    b->pair->ops->revoke(b->pair, &b->exposure, work(b, "r"));
    ring(b);
    settle();
    ck_assert_str_eq(a->trace, "broken w- drained");
    disconnect(b);
    settle();
    ck_assert_str_eq(b->trace, "i:9/1 broken r- drained");
}
END_TEST

/* The writer is gone, its memory is used for something else, and still the write arrives. */
START_TEST(late_lands_until_drained)
{
    rule((struct fake_rule){.fault = FAKE_LATE, .kinds = FAKE_WRITE});
    post_write('X', "w");
    settle();
    disconnect(a);
    while (fake_fabric_step(fabric, a->pair) || side_poll(a) > 0) {
    }
    ck_assert_str_eq(a->trace, "broken w- drained");
    a->memory[0] = 'Y';
    disconnect(b);
    side_poll(b);
    ck_assert_str_eq(b->trace, "broken");
    ck_assert_int_eq(b->memory[0], 0);
    ck_assert(fake_fabric_land_late(fabric));
    ck_assert_int_eq(b->memory[0], 'X');
    ck_assert(!fake_fabric_land_late(fabric));
    settle();
    ck_assert_str_eq(b->trace, "broken drained"); /* There is no immediate. */
    ck_assert_uint_eq(counters(b).late_landed, 1);
    ck_assert(fake_fabric_write_at(fabric, 0).has_landed);
}
END_TEST

START_TEST(late_reaches_a_side_that_is_not_broken)
{
    rule((struct fake_rule){.fault = FAKE_LATE});
    send_text(a, "late", work(a, "x"));
    disconnect(a);
    while (fake_fabric_step(fabric, a->pair) || side_poll(a) > 0) {
    }
    ck_assert_str_eq(a->trace, "broken x- drained");
    ck_assert_str_eq(b->trace, "");
    settle(); /* step_any lets it land. */
    ck_assert_str_eq(b->trace, "m:late");
}
END_TEST

START_TEST(late_is_refused_once_drained)
{
    rule((struct fake_rule){.fault = FAKE_LATE, .kinds = FAKE_WRITE});
    post_write('X', "w");
    disconnect(b);
    while (fake_fabric_step(fabric, b->pair) || side_poll(b) > 0) {
    }
    ck_assert_str_eq(b->trace, "broken drained");
    disconnect(a);
    settle();
    ck_assert_int_eq(b->memory[0], 0);
    ck_assert_uint_eq(counters(b).late_refused, 1);
}
END_TEST

/* The state after a cancel that revoked without waiting for the writer. */
START_TEST(late_breaks_a_side_that_has_revoked)
{
    rule((struct fake_rule){.fault = FAKE_LATE, .kinds = FAKE_WRITE});
    post_write('X', "w");
    b->pair->ops->revoke(b->pair, &b->exposure, work(b, "r"));
    carry(b);
    side_poll(b);
    disconnect(a);
    settle();
    ck_assert_str_eq(b->trace, "r+ broken drained");
    ck_assert_int_eq(b->memory[0], 0);
}
END_TEST

START_TEST(late_after_its_target_is_gone)
{
    rule((struct fake_rule){.fault = FAKE_LATE});
    b->is_destroyed_when_drained = true;
    send_text(a, "late", NULL);
    ring(a);
    disconnect(a);
    disconnect(b);
    settle();
    ck_assert_str_eq(b->trace, "broken drained");
}
END_TEST

START_TEST(polls_land_what_is_late)
{
    rule((struct fake_rule){.fault = FAKE_LATE, .kinds = FAKE_WRITE});
    post_write('X', "w");
    disconnect(a);
    while (side_poll(a) > 0) {
    }
    ck_assert_int_eq(b->memory[0], 0);
    side_poll(b);
    ck_assert_int_eq(b->memory[0], 'X');
    ck_assert_str_eq(b->trace, "i:9/1");
}
END_TEST

START_TEST(rnr_that_passes)
{
    rule((struct fake_rule){.fault = FAKE_RNR, .count = 7});
    send_text(a, "one", work(a, "x"));
    ring(a);
    settle();
    ck_assert_str_eq(a->trace, "x+");
    ck_assert_uint_eq(counters(a).rnr_tries, 7);
}
END_TEST

START_TEST(rnr_for_too_long)
{
    rule((struct fake_rule){.fault = FAKE_RNR});
    send_text(a, "one", work(a, "x"));
    ring(a);
    settle();
    ck_assert_str_eq(a->trace, "broken x- drained");
    ck_assert_str_eq(b->trace, "broken drained");
}
END_TEST

START_TEST(break_at_the_third)
{
    rule((struct fake_rule){.fault = FAKE_BREAK, .pair = a->pair, .from = 3});
    send_text(b, "other", work(b, "o"));
    ring(b);
    settle();
    for (unsigned i = 0; i < 4; i++)
        send_text(a, "m", work(a, "x"));
    ring(a);
    settle();
    ck_assert_str_eq(a->trace, "m:other x+ x+ broken x- x- drained");
    ck_assert_str_eq(b->trace, "o+ m:m m:m");
}
END_TEST

START_TEST(break_at_a_bind_and_a_revoke)
{
    rule((struct fake_rule){.fault = FAKE_BREAK, .kinds = FAKE_BIND | FAKE_REVOKE, .from = 2});
    expose(a, 0, 8);
    a->pair->ops->revoke(a->pair, &a->exposure, work(a, "r"));
    ring(a);
    settle();
    ck_assert_str_eq(a->trace, "broken r- drained");
    ck_assert_uint_eq(counters(a).exposures_out, 0);
}
END_TEST

START_TEST(post_failure_breaks_at_once)
{
    rule((struct fake_rule){.fault = FAKE_POST_FAILURE, .from = 2});
    send_text(a, "one", work(a, "x"));
    send_text(a, "two", work(a, "y"));
    send_text(a, "three", work(a, "z"));
    settle(); /* It was not even rung. */
    ck_assert_str_eq(a->trace, "broken x- y- z- drained");
    ck_assert_str_eq(b->trace, "");
    ck_assert_ptr_nonnull(strstr(a->reason.message, "refuses"));
}
END_TEST

/* A second queue pair of b's provider, whose peer is c. */
static struct tl_queue_pair *second_pair(struct side *owner)
{
    struct tl_queue_pair *pair = NULL;
    struct tl_pair_address pair_address;
    side_open(owner, "fake_c", NULL, &side_options);
    ck_assert_int_eq(tl_queue_pair_create(a->provider, &side_options, &side_events, owner, &pair, NULL), TL_OK);
    owner->pair->ops->get_address(owner->pair, &pair_address);
    ck_assert_int_eq(pair->ops->connect(pair, &pair_address, NULL), TL_OK);
    pair->ops->get_address(pair, &pair_address);
    ck_assert_int_eq(owner->pair->ops->connect(owner->pair, &pair_address, NULL), TL_OK);
    return pair;
}

START_TEST(an_overrun_breaks_all_of_its_provider)
{
    struct side *c = &sides[2];
    struct tl_queue_pair *second = second_pair(c);
    rule((struct fake_rule){.fault = FAKE_CQ_OVERRUN});
    send_text(a, "one", work(a, "x"));
    ring(a);
    settle();
    ck_assert_str_eq(a->trace, "broken x- drained");
    ck_assert_str_eq(c->trace, "broken drained"); /* The second queue pair of a writes this into c's trace. */
    ck_assert_ptr_nonnull(strstr(a->reason.message, "overrun"));
    ck_assert_str_eq(b->trace, "");
    second->ops->destroy(second);
    struct tl_region *region;
    ck_assert_int_eq(tl_region_create(a->provider, a->memory, 1, TL_REGION_READ, &region, NULL), TL_OK);
    tl_region_destroy(region);
    fake_provider_overrun(b->provider);
    settle();
    ck_assert_str_eq(b->trace, "broken drained");
}
END_TEST

START_TEST(a_device_that_is_gone_refuses_everything)
{
    struct tl_error error;
    struct tl_pair_address pair_address;
    struct tl_queue_pair *created = NULL;
    side_open(&sides[2], "fake_c", NULL, &side_options);
    struct tl_provider *provider = sides[2].provider;
    ck_assert_int_eq(tl_queue_pair_create(provider, &side_options, &side_events, &sides[2], &created, NULL), TL_OK);
    fake_provider_remove(provider);
    struct tl_region *region = (void *)&error;
    struct tl_queue_pair *pair = (void *)&error;
    ck_assert_int_eq(tl_region_create(provider, a->memory, 1, TL_REGION_READ, &region, &error), TL_UNAVAILABLE);
    ck_assert_int_eq(tl_queue_pair_create(provider, &side_options, &side_events, a, &pair, &error), TL_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(error.message, "gone"));
    a->pair->ops->get_address(a->pair, &pair_address);
    ck_assert_int_eq(created->ops->connect(created, &pair_address, NULL), TL_UNAVAILABLE);
    ck_assert(region == (void *)&error && pair == (void *)&error);
    settle();
    ck_assert_str_eq(sides[2].trace, "broken broken drained drained");
    created->ops->destroy(created);
}
END_TEST

START_TEST(a_device_that_goes_at_an_operation)
{
    rule((struct fake_rule){.fault = FAKE_DEVICE_GONE, .from = 2});
    send_text(a, "one", work(a, "x"));
    send_text(a, "two", work(a, "y"));
    ring(a);
    settle();
    ck_assert_str_eq(a->trace, "x+ broken y- drained");
    struct tl_region *region;
    ck_assert_int_eq(tl_region_create(a->provider, a->memory, 1, TL_REGION_READ, &region, NULL), TL_UNAVAILABLE);
}
END_TEST

START_TEST(flushed_before_the_owner_is_notified)
{
    rule((struct fake_rule){.fault = FAKE_BREAK});
    send_text(a, "one", work(a, "x"));
    send_text(a, "two", work(a, "y"));
    ring(a);
    settle();
    ck_assert_str_eq(a->trace, "x- y- broken drained");
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- of calls -- */

START_TEST(calls_fail_by_number)
{
    struct tl_region *regions[3] = {NULL, NULL, NULL};
    struct tl_error error = {0};
    rule((struct fake_rule){.fault = FAKE_REGION_FAILURE, .from = 2});
    rule((struct fake_rule){.fault = FAKE_CREATE_FAILURE, .provider = b->provider, .times = FAKE_ALWAYS});
    rule((struct fake_rule){.fault = FAKE_EXPOSE_FAILURE, .pair = a->pair});
    for (unsigned i = 0; i < 3; i++) {
        enum tl_status status = tl_region_create(a->provider, a->memory, 8, TL_REGION_READ, &regions[i], &error);
        ck_assert_int_eq(status, i == 1 ? TL_RESOURCE_EXHAUSTED : TL_OK);
    }
    ck_assert_ptr_null(regions[1]);
    ck_assert_ptr_nonnull(strstr(error.message, "fake_a"));
    tl_region_destroy(regions[0]);
    tl_region_destroy(regions[2]);
    struct tl_queue_pair *pair = NULL;
    for (unsigned i = 0; i < 3; i++) {
        enum tl_status status = tl_queue_pair_create(b->provider, &side_options, &side_events, b, &pair, NULL);
        ck_assert_int_eq(status, TL_RESOURCE_EXHAUSTED);
    }
    struct tl_exposure exposure = {0};
    enum tl_status status = tl_queue_pair_expose(a->pair, a->region, a->memory, 8, &exposure, NULL);
    ck_assert_int_eq(status, TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_null(exposure.region);
    ck_assert_uint_eq(counters(a).operations_out, 0);
    expose(a, 0, 8);
}
END_TEST

START_TEST(connect_fails_and_may_be_tried_again)
{
    struct side *c = &sides[2];
    struct tl_pair_address pair_address;
    rule((struct fake_rule){.fault = FAKE_CONNECT_FAILURE});
    side_open(c, "fake_c", NULL, &side_options);
    a->pair->ops->get_address(a->pair, &pair_address);
    ck_assert_int_eq(c->pair->ops->connect(c->pair, &pair_address, NULL), TL_UNAVAILABLE);
    c->pair->ops->destroy(c->pair);
    c->pair = NULL;
    ck_assert_int_eq(tl_queue_pair_create(c->provider, &side_options, &side_events, c, &c->pair, NULL), TL_OK);
    ck_assert_int_eq(c->pair->ops->connect(c->pair, &pair_address, NULL), TL_OK);
    /* The peer is connected to another queue pair, and does not answer. */
    send_text(c, "hello", work(c, "x"));
    ring(c);
    settle();
    ck_assert_str_eq(c->trace, "broken x- drained");
    ck_assert_str_eq(a->trace, "");
}
END_TEST

START_TEST(rules_are_counted_apart)
{
    rule((struct fake_rule){.fault = FAKE_LOSE_ACK, .from = 2});
    rule((struct fake_rule){.fault = FAKE_BREAK, .from = 2, .times = 2});
    send_text(a, "one", work(a, "x"));
    send_text(a, "two", work(a, "y"));
    ring(a);
    settle();
    ck_assert_str_eq(b->trace, "m:one m:two"); /* The first rule decided. */
    send_text(b, "three", work(b, "z"));
    ring(b);
    settle();
    ck_assert_str_eq(b->trace, "m:one m:two broken z- drained");
    fake_fabric_clear_rules(fabric);
}
END_TEST

/* --------------------------------------------------------------------------------------------- order and seeds -- */

START_TEST(queue_pairs_in_any_order)
{
    struct side *c = &sides[2];
    struct tl_queue_pair *second = second_pair(c);
    send_text(a, "first", work(a, "x"));
    second->ops->message(second, "second", 6, work(a, "y"));
    ring(a);
    tl_queue_pair_doorbell(second);
    ck_assert(fake_fabric_step(fabric, second));
    ck_assert(fake_fabric_step(fabric, a->pair));
    settle();
    ck_assert_str_eq(a->trace, "y+ x+");
    disconnect(c);
    struct tl_error reason = {.code = TL_ABORTED};
    second->ops->disconnect(second, &reason);
    settle();
    second->ops->destroy(second);
}
END_TEST

/* Four messages each way under faults; returns the events of both sides, in their order. */
static void run_seed(uint64_t seed, bool is_manual, bool has_faults, char *ret_trace, size_t trace_bytes)
{
    memset(sides, 0, sizeof(sides));
    work_count = 0;
    sides_open(&(struct fake_fabric_options){.seed = seed, .is_manual = is_manual}, NULL, &side_options);
    for (enum fake_fault fault = 0; has_faults && fault < FAKE_REGION_FAILURE; fault++)
        fake_fabric_set_chance(fabric, fault, 60000);
    char merged[1024] = "";
    expose(a, 0, 8);
    for (unsigned i = 0; i < 4; i++) {
        send_text(a, "m", work(a, "x"));
        send_text(b, "n", work(b, "y"));
    }
    ring(a);
    ring(b);
    for (bool did_move = true; did_move;) {
        size_t len_a = strlen(a->trace);
        size_t len_b = strlen(b->trace);
        did_move = is_manual && fake_fabric_step_any(fabric);
        did_move |= side_poll(a) > 0;
        did_move |= side_poll(b) > 0;
        size_t len = strlen(merged);
        snprintf(merged + len, sizeof(merged) - len, "%s|%s|", a->trace + len_a, b->trace + len_b);
    }
    ck_assert(has_faults || strstr(merged, "broken") == NULL);
    snprintf(ret_trace, trace_bytes, "%s", merged);
    sides_close();
}

static void differ_by_seed(bool is_manual, bool has_faults)
{
    char first[1024];
    char again[1024];
    unsigned different = 0;
    run_seed(1, is_manual, has_faults, first, sizeof(first));
    for (uint64_t seed = 1; seed <= 60; seed++) {
        char other[1024];
        run_seed(seed, is_manual, has_faults, other, sizeof(other));
        run_seed(seed, is_manual, has_faults, again, sizeof(again));
        ck_assert_str_eq(again, other);
        different += strcmp(first, other) != 0;
    }
    ck_assert_uint_gt(different, 30);
}

START_TEST(seeds_choose_the_order_of_steps)
{
    differ_by_seed(true, false);
}
END_TEST

START_TEST(seeds_choose_the_order_within_polls)
{
    differ_by_seed(false, false);
}
END_TEST

START_TEST(seeds_choose_faults)
{
    differ_by_seed(true, true);
    differ_by_seed(false, true);
}
END_TEST

static void add_scripted(Suite *suite)
{
    TCase *tcase = tcase_create("carried by steps");
    tcase_add_checked_fixture(tcase, setup_manual, sides_close);
    tcase_add_test(tcase, drop_holds_until_disconnected);
    tcase_add_test(tcase, delay_takes_steps);
    tcase_add_test(tcase, a_lost_ack_is_cancelled_though_it_happened);
    tcase_add_test(tcase, late_lands_until_drained);
    tcase_add_test(tcase, late_reaches_a_side_that_is_not_broken);
    tcase_add_test(tcase, late_is_refused_once_drained);
    tcase_add_test(tcase, late_breaks_a_side_that_has_revoked);
    tcase_add_test(tcase, late_after_its_target_is_gone);
    tcase_add_test(tcase, rnr_that_passes);
    tcase_add_test(tcase, rnr_for_too_long);
    tcase_add_test(tcase, break_at_the_third);
    tcase_add_test(tcase, break_at_a_bind_and_a_revoke);
    tcase_add_test(tcase, post_failure_breaks_at_once);
    tcase_add_test(tcase, an_overrun_breaks_all_of_its_provider);
    tcase_add_test(tcase, a_device_that_is_gone_refuses_everything);
    tcase_add_test(tcase, a_device_that_goes_at_an_operation);
    tcase_add_test(tcase, queue_pairs_in_any_order);
    suite_add_tcase(suite, tcase);
}

static void add_others(Suite *suite)
{
    TCase *tcase = tcase_create("carried by polls");
    tcase_add_checked_fixture(tcase, setup, sides_close);
    tcase_add_test(tcase, drop_holds_until_disconnected);
    tcase_add_test(tcase, polls_land_what_is_late);
    tcase_add_test(tcase, rnr_that_passes);
    tcase_add_test(tcase, rnr_for_too_long);
    tcase_add_test(tcase, break_at_the_third);
    tcase_add_test(tcase, post_failure_breaks_at_once);
    tcase_add_test(tcase, calls_fail_by_number);
    tcase_add_test(tcase, connect_fails_and_may_be_tried_again);
    tcase_add_test(tcase, rules_are_counted_apart);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("flushed first");
    tcase_add_checked_fixture(tcase, setup_flushed_first, sides_close);
    tcase_add_test(tcase, flushed_before_the_owner_is_notified);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("seeds");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, seeds_choose_the_order_of_steps);
    tcase_add_test(tcase, seeds_choose_the_order_within_polls);
    tcase_add_test(tcase, seeds_choose_faults);
    suite_add_tcase(suite, tcase);
}

int main(void)
{
    Suite *suite = suite_create("fake_faults");
    add_scripted(suite);
    add_others(suite);
    return run_suite(suite);
}
