// SPDX-License-Identifier: Apache-2.0
/* How queue pairs of the verbs provider break on soft-RoCE, and what is left of their work. */
#include "tests/rdma_vm/verbs_sides.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "fakes/run_suite.h"

/* ---------------------------------------------------------------------------------------------------- failures -- */

static void expect_reason(const struct side *side, const char *part)
{
    ck_assert_msg(strstr(side->reason.message, part) != NULL, "no '%s' in '%s'", part, side->reason.message);
}

START_TEST(late_write_is_refused)
{
    struct tl_exposure exposure = {0};
    struct job revoked = new_job_of(&b), late = new_job_of(&a);
    set_up(16, 16, TL_KEYS_WINDOW);
    make_memory(MIB);
    side_expose(&b, target_region, target, 65536, &exposure);
    let_expose_happen(&b);
    struct tl_exposure copy = exposure;
    b.pair->ops->revoke(b.pair, &exposure, &revoked.work);
    tl_queue_pair_doorbell(b.pair);
    PUMP_UNTIL(revoked.done == 1);
    write_to(&copy, 0, 65536, 0, false, &late);
    tl_queue_pair_doorbell(a.pair);
    PUMP_UNTIL(a.drained && b.drained);
    ck_assert_int_eq(late.status, TL_CANCELLED);
    ck_assert_uint_eq(late.broken_before, 1);
    expect_reason(&a, "revoked, or never given");
    expect_reason(&b, "a key that it may not use");
    ck_assert_int_eq(a.reason.code, TL_UNAVAILABLE);
    ck_assert_uint_eq(target[0], 0);
    ck_assert_uint_eq(target[1], 0);
    /* Windows that were bound when the queue pair broke hold no memory. */
    drop_memory();
    tear_down();
}
END_TEST

/* The window is revoked while the bytes come: once that is done, not one more byte lands. */
START_TEST(revoke_cuts_a_write_off)
{
    struct tl_exposure exposure = {0};
    struct job revoked = new_job_of(&b), cut = new_job_of(&a);
    const uint64_t len = 8 * MIB;
    set_up(16, 16, TL_KEYS_WINDOW);
    make_memory(len);
    uint8_t *seen = malloc(len);
    side_expose(&b, target_region, target, len, &exposure);
    let_expose_happen(&b);
    write_to(&exposure, 0, len, 0, false, &cut);
    tl_queue_pair_doorbell(a.pair);
    while (((volatile uint8_t *)target)[100000] == 0 && cut.done == 0)
        a.provider->ops->poll(a.provider);
    b.pair->ops->revoke(b.pair, &exposure, &revoked.work);
    tl_queue_pair_doorbell(b.pair);
    while (revoked.done == 0)
        b.provider->ops->poll(b.provider);
    memcpy(seen, target, len);
    PUMP_UNTIL(cut.done == 1);
    ck_assert_int_eq(memcmp(seen, target, len), 0);
    if (cut.status == TL_CANCELLED) PUMP_UNTIL(a.drained && b.drained);
    free(seen);
    tear_down();
}
END_TEST

/* Only its own queue pair can use a window. */
START_TEST(keys_of_others_are_refused)
{
    struct tl_exposure exposure = {0};
    struct side other_a, other_b;
    set_up(16, 16, TL_KEYS_WINDOW);
    make_memory(MIB);
    side_expose(&b, target_region, target, 4096, &exposure);
    let_expose_happen(&b);
    other_a = a;
    other_b = b;
    side_create(&a, 16, 16, TL_KEYS_WINDOW);
    side_create(&b, 16, 16, TL_KEYS_WINDOW);
    sides_connect();
    write_to(&exposure, 0, 4096, 0, false, NULL);
    tl_queue_pair_doorbell(a.pair);
    PUMP_UNTIL(a.drained && b.drained);
    ck_assert_uint_eq(target[1], 0);
    destroy_both();
    a.pair = other_a.pair;
    b.pair = other_b.pair;
    a.broken = b.broken = a.drained = b.drained = 0;
    struct job job = new_job_of(&a);
    write_to(&exposure, 0, 4096, 0, true, &job);
    tl_queue_pair_doorbell(a.pair);
    PUMP_UNTIL(job.done == 1 && b.immediates == 1);
    ck_assert_int_eq(job.status, TL_OK);
    tear_down();
}
END_TEST

START_TEST(writes_outside_are_not_posted)
{
    const struct {
        uint64_t offset, len;
    } outside[] = {{0, 4097}, {4096, 1}, {1, 4096}, {UINT64_MAX, 1}, {UINT64_MAX - 1, 4096}, {UINT64_MAX / 2, 10}};
    open_both(TL_KEYS_WINDOW);
    for (unsigned i = 0; i < TL_ARRAY_COUNT(outside); i++) {
        struct tl_exposure exposure = {0};
        struct job bad = new_job_of(&a), after = new_job_of(&a);
        side_create(&a, 4, 16, TL_KEYS_WINDOW);
        side_create(&b, 4, 16, TL_KEYS_WINDOW);
        sides_connect();
        make_memory(MIB);
        side_expose(&b, target_region, target, 4096, &exposure);
        write_to(&exposure, 0, outside[i].len, outside[i].offset, false, &bad);
        ck_assert_uint_eq(bad.done, 0);
        ck_assert_uint_gt(a.pair->ops->space(a.pair), 0);
        a.pair->ops->message(a.pair, "x", 1, &after.work);
        tl_queue_pair_doorbell(a.pair);
        PUMP_UNTIL(a.drained);
        ck_assert_uint_eq(a.pair->ops->space(a.pair), 0);
        expect_reason(&a, "outside of the 4096 that the peer has exposed");
        ck_assert_int_eq(bad.status, TL_CANCELLED);
        ck_assert_int_eq(after.status, TL_CANCELLED);
        ck_assert_uint_eq(after.broken_before, 1);
        ck_assert_uint_eq(b.messages + b.broken, 0);
        destroy_both();
        drop_memory();
    }
    close_both();
}
END_TEST

START_TEST(descriptors_that_are_none)
{
    struct tl_descriptor descriptor = {.len_bytes = 19};
    set_up(4, 16, TL_KEYS_WINDOW);
    make_memory(MIB);
    a.pair->ops->write(a.pair, source_region, source, 1, &descriptor, 0, false, 0, NULL);
    tl_queue_pair_doorbell(a.pair);
    PUMP_UNTIL(a.drained);
    expect_reason(&a, "not one of verbs");
    tear_down();
}
END_TEST

START_TEST(disconnect_with_work_outstanding)
{
    enum { COUNT = 12 };
    struct tl_exposure exposure = {0};
    struct job jobs[COUNT], late;
    set_up(16, 16, TL_KEYS_WINDOW);
    make_memory(8 * MIB);
    side_expose(&b, target_region, target, 8 * MIB, &exposure);
    let_expose_happen(&b);
    for (unsigned i = 0; i < COUNT; i++) {
        jobs[i] = new_job_of(&a);
        write_to(&exposure, 0, 8 * MIB, 0, false, &jobs[i]);
        if (i == COUNT / 2) tl_queue_pair_doorbell(a.pair);
    }
    side_disconnect(&a);
    side_disconnect(&a);
    late = new_job_of(&a);
    a.pair->ops->message(a.pair, "x", 1, &late.work);
    tl_queue_pair_doorbell(a.pair);
    ck_assert_uint_eq(a.broken, 0);
    ck_assert(!tl_provider_arm(a.provider));
    PUMP_UNTIL(a.drained == 1);
    ck_assert_uint_eq(a.broken, 1);
    expect_reason(&a, "the test is over");
    for (unsigned i = 0; i < COUNT; i++) {
        ck_assert_uint_eq(jobs[i].done, 1);
        ck_assert_uint_eq(jobs[i].order, i + 1);
        ck_assert_int_eq(jobs[i].status, TL_CANCELLED);
        ck_assert_uint_eq(jobs[i].broken_before, 1);
    }
    ck_assert_int_eq(late.status, TL_CANCELLED);
    ck_assert_uint_eq(late.order, COUNT + 1);
    side_disconnect(&a);
    tear_down();
}
END_TEST

/* The writer has learned that the message arrived. */
START_TEST(what_has_arrived_before_it_is_disconnected)
{
    struct tl_exposure exposure = {0};
    struct job jobs[2] = {new_job_of(&a), new_job_of(&a)};
    set_up(16, 16, TL_KEYS_WINDOW);
    make_memory(MIB);
    side_expose(&b, target_region, target, MIB, &exposure);
    let_expose_happen(&b);
    write_to(&exposure, 0, MIB, 0, true, &jobs[0]);
    send_text(&a, "and a message", &jobs[1]);
    while (!jobs[1].done)
        a.provider->ops->poll(a.provider);
    ck_assert_int_eq(jobs[0].status, TL_OK);
    ck_assert_int_eq(jobs[1].status, TL_OK);
    side_disconnect(&b);
    PUMP_UNTIL(b.drained);
    ck_assert_uint_eq(b.immediates, 1);
    ck_assert_uint_eq(b.messages, 1);
    ck_assert_int_eq(memcmp(source, target, MIB), 0);
    tear_down();
}
END_TEST

START_TEST(disconnect_before_connect)
{
    open_both(TL_KEYS_WINDOW);
    side_create(&a, 16, 16, TL_KEYS_WINDOW);
    side_create(&b, 16, 16, TL_KEYS_WINDOW);
    side_disconnect(&a);
    PUMP_UNTIL(a.drained == 1);
    a.pair->ops->destroy(a.pair);
    b.pair->ops->destroy(b.pair);
    close_both();
}
END_TEST

START_TEST(peer_that_is_gone)
{
    struct job job = new_job_of(&a);
    set_up(16, 16, TL_KEYS_WINDOW);
    side_disconnect(&b);
    PUMP_UNTIL(b.drained);
    b.pair->ops->destroy(b.pair);
    send_text(&a, "anybody there", &job);
    PUMP_UNTIL(a.drained);
    ck_assert_int_eq(job.status, TL_CANCELLED);
    expect_reason(&a, "the peer does not answer");
    a.pair->ops->destroy(a.pair);
    close_both();
}
END_TEST

START_TEST(slots_exhausted)
{
    set_up(4, 16, TL_KEYS_WINDOW);
    for (unsigned i = 0; i < 8; i++)
        a.pair->ops->message(a.pair, "x", 1, NULL);
    tl_queue_pair_doorbell(a.pair);
    while (!a.drained)
        a.provider->ops->poll(a.provider);
    expect_reason(&a, "no slot posted");
    PUMP_UNTIL(b.messages == 5); /* One may be idle at other times. */
    tear_down();
}
END_TEST

START_TEST(addresses_that_are_none)
{
    struct tl_pair_address pair_address = {.len_bytes = 3, .bytes = "abc"};
    struct tl_error error = {0};
    open_both(TL_KEYS_WINDOW);
    side_create(&a, 4, 4, TL_KEYS_WINDOW);
    side_create(&b, 4, 4, TL_KEYS_WINDOW);
    ck_assert_int_eq(a.pair->ops->connect(a.pair, &pair_address, &error), TL_INVALID_ARGUMENT);
    a.pair->ops->get_address(a.pair, &pair_address);
    pair_address.bytes[3]++;
    ck_assert_int_eq(a.pair->ops->connect(a.pair, &pair_address, &error), TL_FAILED_PRECONDITION);
    sides_connect();
    send_text(&a, "all is well", NULL);
    PUMP_UNTIL(b.messages == 1);
    tear_down();
}
END_TEST

/* Some cards look up the route when they are connected, others when they send. */
START_TEST(peer_without_a_route)
{
    struct tl_pair_address pair_address;
    struct tl_error error = {0};
    open_both(TL_KEYS_WINDOW);
    side_create(&a, 4, 4, TL_KEYS_WINDOW);
    side_create(&b, 4, 4, TL_KEYS_WINDOW);
    b.pair->ops->get_address(b.pair, &pair_address);
    memcpy(pair_address.bytes + 34, "\xc0\x00\x02\x01", 4);
    if (a.pair->ops->connect(a.pair, &pair_address, &error) == TL_OK) {
        send_text(&a, "anybody there", NULL);
        PUMP_UNTIL(a.drained);
        ck_assert_int_eq(a.reason.code, TL_DEADLINE_EXCEEDED);
        printf("no route: %s\n", a.reason.message);
    } else {
        ck_assert_int_eq(error.code, TL_UNAVAILABLE);
        ck_assert_msg(strstr(error.message, "192.0.2.1") != NULL, "%s", error.message);
    }
    a.pair->ops->destroy(a.pair);
    b.pair->ops->destroy(b.pair);
    close_both();
}
END_TEST

/* ---------------------------------------------------------------------------------------------- only with veth -- */

START_TEST(link_down_is_said_to_be_the_link)
{
    struct job job = new_job_of(&a);
    set_up(16, 16, TL_KEYS_WINDOW);
    ck_assert_int_eq(system("tests/rdma_vm/link va down"), 0);
    send_text(&a, "anybody there", &job);
    PUMP_UNTIL(a.drained);
    ck_assert_int_eq(system("tests/rdma_vm/link va up"), 0);
    ck_assert_int_eq(job.status, TL_CANCELLED);
    expect_reason(&a, "link: ");
    printf("link down: %s\n", a.reason.message);
    tear_down();
}
END_TEST

/* Nothing is sent here: the device's own event breaks the queue pair, and wakes a sleeping reactor. */
START_TEST(link_down_wakes_a_sleeper)
{
    set_up(16, 16, TL_KEYS_WINDOW);
    while (!tl_provider_arm(a.provider))
        a.provider->ops->poll(a.provider);
    ck_assert_int_eq(system("tests/rdma_vm/link va down"), 0);
    ck_assert(side_is_readable(&a, 20000));
    tl_provider_disarm(a.provider, true);
    PUMP_UNTIL(a.drained);
    ck_assert_int_eq(system("tests/rdma_vm/link va up"), 0);
    expect_reason(&a, "link: the port went down here");
    tear_down();
}
END_TEST

START_TEST(address_that_is_taken_away)
{
    struct side idle = {0};
    struct tl_pair_address from_b;
    struct tl_error error = {0};
    set_up(16, 16, TL_KEYS_WINDOW);
    idle.provider = a.provider;
    side_create(&idle, 4, 4, TL_KEYS_WINDOW);
    b.pair->ops->get_address(b.pair, &from_b);
    ck_assert_int_eq(system("ip addr del 10.9.0.1/32 dev va"), 0);
    PUMP_UNTIL(a.drained);
    expect_reason(&a, "link: the address 10.9.0.1");
    struct tl_queue_pair_options options = {.slot_count = 4, .work_count = 4, .keys = TL_KEYS_WINDOW};
    struct tl_queue_pair *pair;
    ck_assert_int_eq(tl_queue_pair_create(a.provider, &options, &side_events, &a, &pair, NULL), TL_UNAVAILABLE);
    ck_assert_int_eq(idle.pair->ops->connect(idle.pair, &from_b, &error), TL_UNAVAILABLE);
    printf("address gone: %s\n", error.message);
    idle.pair->ops->destroy(idle.pair);
    destroy_both();
    ck_assert_int_eq(system("ip addr add 10.9.0.1/32 dev va; tests/rdma_vm/link va up"), 0);
    while (tl_queue_pair_create(a.provider, &options, &side_events, &a, &pair, NULL) != TL_OK)
        usleep(1000);
    pair->ops->destroy(pair);
    close_both();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("verbs_failure");
    TCase *tests = tcase_create("tests");
    tcase_set_timeout(tests, 90);
    tcase_add_test(tests, late_write_is_refused);
    tcase_add_test(tests, revoke_cuts_a_write_off);
    tcase_add_test(tests, keys_of_others_are_refused);
    tcase_add_test(tests, writes_outside_are_not_posted);
    tcase_add_test(tests, descriptors_that_are_none);
    tcase_add_test(tests, disconnect_with_work_outstanding);
    tcase_add_test(tests, what_has_arrived_before_it_is_disconnected);
    tcase_add_test(tests, disconnect_before_connect);
    tcase_add_test(tests, peer_that_is_gone);
    tcase_add_test(tests, slots_exhausted);
    tcase_add_test(tests, addresses_that_are_none);
    tcase_add_test(tests, peer_without_a_route);
    if (has_veth()) tcase_add_test(tests, link_down_is_said_to_be_the_link);
    if (has_veth()) tcase_add_test(tests, link_down_wakes_a_sleeper);
    if (has_veth()) tcase_add_test(tests, address_that_is_taken_away);
    suite_add_tcase(suite, tests);
    return run_suite(suite);
}
