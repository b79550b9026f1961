// SPDX-License-Identifier: Apache-2.0
/* Messages, writes, windows and sleeping over the verbs provider on soft-RoCE. */
#include "tests/rdma_vm/verbs_sides.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "fakes/run_suite.h"

/* ------------------------------------------------------------------------------------------------------- traffic -- */

START_TEST(messages_arrive)
{
    const uint32_t sizes[] = {0, 1, 64, 256, 257, TL_SLOT_BYTES};
    uint8_t data[TL_SLOT_BYTES];
    set_up(16, 16, TL_KEYS_WINDOW);
    fill_memory(data, sizeof(data), 3);
    for (unsigned i = 0; i < TL_ARRAY_COUNT(sizes); i++) {
        struct job job = new_job(&a);
        a.pair->ops->message(a.pair, data, sizes[i], &job.work);
        tl_queue_pair_ring(a.pair);
        PUMP_UNTIL(b.messages == i + 1 && job.done == 1);
        ck_assert_int_eq(job.status, TL_OK);
        ck_assert_uint_eq(b.last_len, sizes[i]);
        ck_assert_int_eq(memcmp(b.last, data, sizes[i]), 0);
    }
    tear_down();
}
END_TEST

START_TEST(nothing_leaves_before_the_bell)
{
    struct job job = new_job(&a);
    set_up(16, 16, TL_KEYS_WINDOW);
    a.pair->ops->message(a.pair, "x", 1, &job.work);
    ck_assert_uint_eq(a.pair->ops->room(a.pair), 15);
    for (unsigned i = 0; i < 1000; i++) {
        a.provider->ops->poll(a.provider);
        b.provider->ops->poll(b.provider);
    }
    ck_assert_uint_eq(b.messages, 0);
    ck_assert_uint_eq(job.done, 0);
    tl_queue_pair_ring(a.pair);
    PUMP_UNTIL(b.messages == 1 && job.done == 1);
    ck_assert_uint_eq(a.pair->ops->room(a.pair), 16);
    tear_down();
}
END_TEST

START_TEST(answers_from_callbacks)
{
    set_up(8, 8, TL_KEYS_WINDOW);
    b.answers = true;
    for (unsigned i = 1; i <= 500; i++) {
        send_text(&a, "ping", NULL);
        PUMP_UNTIL(a.messages == i && a.pair->ops->room(a.pair) > 0);
    }
    ck_assert_uint_eq(b.messages, 500);
    tear_down();
}
END_TEST

/* Far more posts than records and slots, several to a doorbell; done in the order of posting. */
START_TEST(many_posts)
{
    enum { COUNT = 10000, SLOTS = 32 };
    static struct job jobs[COUNT];
    unsigned posted = 0;
    set_up(SLOTS, 21, TL_KEYS_WINDOW);
    for (unsigned i = 0; i < COUNT; i++)
        jobs[i] = new_job(&a);
    while (posted < COUNT) {
        unsigned room = a.pair->ops->room(a.pair), credits = SLOTS - (posted - b.messages);
        for (unsigned i = 0; i < room && i < credits && posted < COUNT; i++) {
            a.pair->ops->message(a.pair, &posted, sizeof(posted), &jobs[posted].work);
            posted++;
        }
        tl_queue_pair_ring(a.pair);
        PUMP_UNTIL(a.pair->ops->room(a.pair) > 0 && posted - b.messages < SLOTS);
    }
    PUMP_UNTIL(b.messages == COUNT && jobs[COUNT - 1].done == 1);
    ck_assert_mem_eq(b.last, &(unsigned){COUNT - 1}, sizeof(unsigned));
    bool is_right = true;
    for (unsigned i = 0; i < COUNT; i++)
        is_right &= jobs[i].done == 1 && jobs[i].order == i + 1 && jobs[i].status == TL_OK;
    ck_assert(is_right);
    tear_down();
}
END_TEST

static void write_and_verify(enum tl_keys keys)
{
    struct tl_exposure exposure = {0};
    struct job silent = new_job(&a), telling = new_job(&a), empty = new_job(&a), revoked = new_job(&b);
    set_up(16, 16, keys);
    make_memory(MIB);
    expose_memory(&b, target_region, target + 4096, 65536, &exposure);
    let_expose_happen(&b);
    write_to(&exposure, 100, 1000, 0, false, &silent);
    write_to(&exposure, 2000, 64536, 1000, true, &telling);
    tl_queue_pair_ring(a.pair);
    PUMP_UNTIL(b.immediates == 1 && telling.done == 1);
    ck_assert_uint_eq(silent.order, 1);
    ck_assert_uint_eq(b.last_immediate, 0xcafe0001);
    ck_assert_uint_eq(b.last_immediate_len, 64536);
    ck_assert_int_eq(memcmp(target + 4096, source + 100, 1000), 0);
    ck_assert_int_eq(memcmp(target + 5096, source + 2000, 64536), 0);
    ck_assert_uint_eq(target[4095], 0);
    ck_assert_uint_eq(target[4096 + 65536], 0);
    a.pair->ops->write(a.pair, NULL, NULL, 0, &(struct tl_descriptor){0}, 0, true, 7, &empty.work);
    tl_queue_pair_ring(a.pair);
    PUMP_UNTIL(b.immediates == 2 && empty.done == 1);
    ck_assert_uint_eq(b.last_immediate_len, 0);
    bool has_window = keys == TL_KEYS_WINDOW;
    b.pair->ops->revoke(b.pair, &exposure, has_window ? &revoked.work : NULL);
    ck_assert_ptr_null(exposure.region);
    tl_queue_pair_ring(b.pair);
    PUMP_UNTIL(!has_window || revoked.done == 1);
    ck_assert_int_eq(revoked.status, TL_OK);
    tear_down();
}

START_TEST(writes_through_windows)
{
    write_and_verify(TL_KEYS_WINDOW);
}
END_TEST

START_TEST(writes_into_regions)
{
    write_and_verify(TL_KEYS_REGION);
}
END_TEST

START_TEST(large_writes)
{
    struct tl_exposure exposure = {0};
    struct job last = new_job(&a);
    const uint64_t len = 32 * MIB, piece = 8 * MIB;
    set_up(16, 16, TL_KEYS_WINDOW);
    make_memory(len);
    expose_memory(&b, target_region, target, len, &exposure);
    let_expose_happen(&b);
    for (uint64_t at = 0; at < len; at += piece)
        write_to(&exposure, at, piece, at, at + piece == len, at + piece == len ? &last : NULL);
    tl_queue_pair_ring(a.pair);
    PUMP_UNTIL(b.immediates == 1 && last.done == 1);
    ck_assert_int_eq(memcmp(source, target, len), 0);
    tear_down();
}
END_TEST

/* Windows are bound again and again, with keys that are not the ones before; bind and revoke leave together. */
START_TEST(windows_are_used_again)
{
    struct tl_exposure exposure = {0};
    uint8_t before[TL_DESCRIPTOR_MAX_BYTES] = {0};
    set_up(16, 16, TL_KEYS_WINDOW);
    make_memory(MIB);
    for (unsigned i = 0; i < 600; i++) {
        struct job revoked = new_job(&b), written = new_job(&a);
        uint64_t len = 64 + i;
        expose_memory(&b, target_region, target + i, len, &exposure);
        ck_assert_int_ne(memcmp(before, exposure.descriptor.bytes, sizeof(before)), 0);
        memcpy(before, exposure.descriptor.bytes, sizeof(before));
        let_expose_happen(&b);
        write_to(&exposure, i, len, 0, true, &written);
        tl_queue_pair_ring(a.pair);
        PUMP_UNTIL(b.immediates == i + 1);
        b.pair->ops->revoke(b.pair, &exposure, &revoked.work);
        tl_queue_pair_ring(b.pair);
        PUMP_UNTIL(revoked.done == 1 && written.done == 1);
    }
    ck_assert_int_eq(memcmp(target + 599, source + 599, 663), 0);
    for (unsigned i = 0; i < 100; i++) {
        struct job revoked = new_job(&b);
        ck_assert_int_eq(tl_queue_pair_expose(b.pair, target_region, target, 64, &exposure, NULL), TL_OK);
        b.pair->ops->revoke(b.pair, &exposure, &revoked.work);
        tl_queue_pair_ring(b.pair);
        PUMP_UNTIL(revoked.done == 1);
        ck_assert_int_eq(revoked.status, TL_OK);
    }
    ck_assert_uint_eq(a.broken + b.broken, 0);
    tear_down();
}
END_TEST

START_TEST(many_windows_at_a_time)
{
    enum { COUNT = 200 };
    static struct tl_exposure exposures[COUNT];
    static struct job jobs[COUNT];
    set_up(16, 64, TL_KEYS_WINDOW);
    make_memory(MIB);
    for (unsigned i = 0; i < COUNT; i++) {
        PUMP_UNTIL(b.pair->ops->room(b.pair) > 0);
        expose_memory(&b, target_region, target + 64 * i, 64, &exposures[i]);
    }
    let_expose_happen(&b);
    for (unsigned i = 0; i < COUNT; i++) {
        jobs[i] = new_job(&b);
        PUMP_UNTIL(a.pair->ops->room(a.pair) > 0);
        write_to(&exposures[i], 64 * i, 64, 0, i == COUNT - 1, NULL);
        tl_queue_pair_ring(a.pair);
    }
    PUMP_UNTIL(b.immediates == 1);
    ck_assert_int_eq(memcmp(target, source, (size_t)64 * COUNT), 0);
    for (unsigned i = 0; i < COUNT; i++) {
        PUMP_UNTIL(b.pair->ops->room(b.pair) > 0);
        b.pair->ops->revoke(b.pair, &exposures[i], &jobs[i].work);
        tl_queue_pair_ring(b.pair);
    }
    PUMP_UNTIL(jobs[COUNT - 1].done == 1);
    tear_down();
}
END_TEST

/* ------------------------------------------------------------------------------------------------------ sleeping -- */

START_TEST(sleepers_wake)
{
    set_up(16, 16, TL_KEYS_WINDOW);
    for (unsigned i = 1; i <= 20; i++) {
        while (!tl_provider_arm(b.provider))
            b.provider->ops->poll(b.provider);
        if (i == 1) ck_assert(!is_readable(&b, 0));
        send_text(&a, "wake up", NULL);
        ck_assert(is_readable(&b, 20000));
        tl_provider_disarm(b.provider);
        ck_assert(!is_readable(&b, 0));
        PUMP_UNTIL(b.messages == i);
    }
    tear_down();
}
END_TEST

/* What arrived before arming is found by it, and not lost. */
START_TEST(arming_loses_nothing)
{
    set_up(16, 16, TL_KEYS_WINDOW);
    unsigned found = 0;
    for (unsigned i = 1; i <= 50; i++) {
        struct job job = new_job(&a);
        send_text(&a, "early", &job);
        while (job.done == 0)
            a.provider->ops->poll(a.provider);
        found += !tl_provider_arm(b.provider);
        PUMP_UNTIL(b.messages == i);
    }
    ck_assert_uint_gt(found, 0);
    tear_down();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("verbs_provider");
    TCase *tests = tcase_create("tests");
    tcase_set_timeout(tests, 90);
    tcase_add_test(tests, messages_arrive);
    tcase_add_test(tests, nothing_leaves_before_the_bell);
    tcase_add_test(tests, answers_from_callbacks);
    tcase_add_test(tests, many_posts);
    tcase_add_test(tests, writes_through_windows);
    tcase_add_test(tests, writes_into_regions);
    tcase_add_test(tests, large_writes);
    tcase_add_test(tests, windows_are_used_again);
    tcase_add_test(tests, many_windows_at_a_time);
    tcase_add_test(tests, sleepers_wake);
    tcase_add_test(tests, arming_loses_nothing);
    suite_add_tcase(suite, tests);
    return run_suite(suite);
}
