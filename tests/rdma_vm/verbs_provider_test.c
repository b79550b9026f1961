// SPDX-License-Identifier: Apache-2.0
/* Doorbells, large writes, windows and sleeping over the verbs provider on soft-RoCE; and what every provider does. */
#include "tests/rdma_vm/verbs_sides.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/check.h"
#include "fakes/provider_cases.h"
#include "fakes/run_suite.h"

/* ----------------------------------------------------------------------------------------------------- traffic -- */

START_TEST(nothing_leaves_before_the_bell)
{
    struct job job = new_job_of(&a);
    set_up(16, 16, TL_KEYS_WINDOW);
    a.pair->ops->message(a.pair, "x", 1, &job.work);
    ck_assert_uint_eq(a.pair->ops->space(a.pair), 15);
    for (unsigned i = 0; i < 1000; i++) {
        a.provider->ops->poll(a.provider);
        b.provider->ops->poll(b.provider);
    }
    ck_assert_uint_eq(b.messages, 0);
    ck_assert_uint_eq(job.done, 0);
    tl_queue_pair_doorbell(a.pair);
    PUMP_UNTIL(b.messages == 1 && job.done == 1);
    ck_assert_uint_eq(a.pair->ops->space(a.pair), 16);
    tear_down();
}
END_TEST

START_TEST(large_writes)
{
    struct tl_exposure exposure = {0};
    struct job last = new_job_of(&a);
    const uint64_t len = 32 * MIB, piece = 8 * MIB;
    set_up(16, 16, TL_KEYS_WINDOW);
    make_memory(len);
    side_expose(&b, target_region, target, len, &exposure);
    let_expose_happen(&b);
    for (uint64_t at = 0; at < len; at += piece)
        write_to(&exposure, at, piece, at, at + piece == len, at + piece == len ? &last : NULL);
    tl_queue_pair_doorbell(a.pair);
    PUMP_UNTIL(b.immediates == 1 && last.done == 1);
    ck_assert_int_eq(memcmp(source, target, len), 0);
    tear_down();
}
END_TEST

static void show(struct tl_region *region, void *address, uint64_t len_bytes, struct tl_exposure *ret_exposure)
{
    struct tl_error error = {0};
    ck_assert_msg(tl_queue_pair_expose_source(a.pair, region, address, len_bytes, false, ret_exposure, &error) == TL_OK,
                  "%s", error.message);
    tl_queue_pair_doorbell(a.pair);
    let_expose_happen(&a);
}

static void read_from(const struct tl_exposure *exposure, uint64_t from, uint64_t len_bytes, uint64_t to,
                      struct job *job)
{
    b.pair->ops->read(b.pair, target_region, target + to, len_bytes, &exposure->descriptor, from, &job->work);
}

/* b reads what a shows, as many pieces at a time as the cards agree on, and nothing once it is not shown any more. */
START_TEST(reads)
{
    struct tl_exposure exposure = {0};
    struct job jobs[16], revoked = new_job_of(&a), late = new_job_of(&b);
    const uint64_t len = 4 * MIB;
    set_up(32, 32, TL_KEYS_WINDOW);
    make_memory(2 * len);
    ck_assert(b.pair->read_depth > 0 && b.pair->read_depth <= 16 && b.pair->read_refusal == NULL);
    uint8_t *shown = map_memory(len);
    fill_bytes(shown, len, 5);
    struct tl_region *region = make_region(&a, shown, len, TL_REGION_WRITE);
    show(region, shown + 4096, len - 4096, &exposure);
    const uint64_t piece = (len - 4096) / b.pair->read_depth;
    for (unsigned i = 0; i < b.pair->read_depth; i++) {
        jobs[i] = new_job_of(&b);
        read_from(&exposure, i * piece, piece, 100 + i * piece, &jobs[i]);
    }
    tl_queue_pair_doorbell(b.pair);
    PUMP_UNTIL(jobs[b.pair->read_depth - 1].done == 1);
    for (unsigned i = 0; i < b.pair->read_depth; i++)
        ck_assert_int_eq(jobs[i].status, TL_OK);
    ck_assert_int_eq(memcmp(target + 100, shown + 4096, b.pair->read_depth * piece), 0);
    ck_assert_uint_eq(target[99], 0);
    ck_assert_uint_eq(target[100 + b.pair->read_depth * piece], 0);
    a.pair->ops->revoke(a.pair, &exposure, &revoked.work);
    tl_queue_pair_doorbell(a.pair);
    PUMP_UNTIL(revoked.done == 1);
    memset(target, 0, 1000);
    read_from(&exposure, 0, 1000, 0, &late);
    tl_queue_pair_doorbell(b.pair);
    PUMP_UNTIL(late.done == 1 && b.broken == 1);
    ck_assert_int_eq(late.status, TL_CANCELLED);
    ck_assert_uint_eq(target[0] | target[999], 0);
    side_disconnect(&a);
    PUMP_UNTIL(a.drained == 1 && b.drained == 1);
    tl_region_destroy(region);
    tear_down();
    munmap(shown, len);
}
END_TEST

/* What is shown cannot be written, and what is exposed for writing cannot be read. */
START_TEST(source_is_not_a_destination)
{
    struct tl_exposure exposure = {0};
    struct job job = new_job_of(&b);
    set_up(16, 16, TL_KEYS_WINDOW);
    make_memory(MIB);
    uint8_t *shown = map_memory(MIB);
    struct tl_region *region = make_region(&a, shown, MIB, TL_REGION_WRITE);
    if (_i == 0) {
        show(region, shown, MIB, &exposure);
        b.pair->ops->write(b.pair, target_region, target, 100, &exposure.descriptor, 0, false, 0, &job.work);
    } else {
        side_expose(&a, region, shown, MIB, &exposure);
        let_expose_happen(&a);
        read_from(&exposure, 0, 100, 0, &job);
    }
    tl_queue_pair_doorbell(b.pair);
    PUMP_UNTIL(job.done == 1 && b.broken == 1);
    ck_assert_int_eq(job.status, TL_CANCELLED);
    side_disconnect(&a);
    PUMP_UNTIL(a.drained == 1 && b.drained == 1);
    tl_region_destroy(region);
    tear_down();
    munmap(shown, MIB);
}
END_TEST

/* Nothing can be shown under keys of regions, and both sides know why. */
START_TEST(keys_of_regions_do_not_read)
{
    set_up(16, 16, TL_KEYS_REGION);
    ck_assert_uint_eq(a.pair->read_depth, 0);
    ck_assert_ptr_nonnull(strstr(a.pair->read_refusal, "verbs.keys is region"));
    tear_down();
}
END_TEST

/* Windows are bound again and again, each time with another key; bind and revoke leave together. */
START_TEST(windows_are_used_again)
{
    struct tl_exposure exposure = {0};
    uint8_t before[TL_DESCRIPTOR_MAX_BYTES] = {0};
    set_up(16, 16, TL_KEYS_WINDOW);
    make_memory(MIB);
    for (unsigned i = 0; i < 600; i++) {
        struct job revoked = new_job_of(&b), written = new_job_of(&a);
        uint64_t len = 64 + i;
        side_expose(&b, target_region, target + i, len, &exposure);
        ck_assert_int_ne(memcmp(before, exposure.descriptor.bytes, sizeof(before)), 0);
        memcpy(before, exposure.descriptor.bytes, sizeof(before));
        let_expose_happen(&b);
        write_to(&exposure, i, len, 0, true, &written);
        tl_queue_pair_doorbell(a.pair);
        PUMP_UNTIL(b.immediates == i + 1);
        b.pair->ops->revoke(b.pair, &exposure, &revoked.work);
        tl_queue_pair_doorbell(b.pair);
        PUMP_UNTIL(revoked.done == 1 && written.done == 1);
    }
    ck_assert_int_eq(memcmp(target + 599, source + 599, 663), 0);
    for (unsigned i = 0; i < 100; i++) {
        struct job revoked = new_job_of(&b);
        ck_assert_int_eq(tl_queue_pair_expose(b.pair, target_region, target, 64, &exposure, NULL), TL_OK);
        b.pair->ops->revoke(b.pair, &exposure, &revoked.work);
        tl_queue_pair_doorbell(b.pair);
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
        PUMP_UNTIL(b.pair->ops->space(b.pair) > 0);
        side_expose(&b, target_region, target + 64 * i, 64, &exposures[i]);
    }
    let_expose_happen(&b);
    for (unsigned i = 0; i < COUNT; i++) {
        jobs[i] = new_job_of(&b);
        PUMP_UNTIL(a.pair->ops->space(a.pair) > 0);
        write_to(&exposures[i], 64 * i, 64, 0, i == COUNT - 1, NULL);
        tl_queue_pair_doorbell(a.pair);
    }
    PUMP_UNTIL(b.immediates == 1);
    ck_assert_int_eq(memcmp(target, source, (size_t)64 * COUNT), 0);
    for (unsigned i = 0; i < COUNT; i++) {
        PUMP_UNTIL(b.pair->ops->space(b.pair) > 0);
        b.pair->ops->revoke(b.pair, &exposures[i], &jobs[i].work);
        tl_queue_pair_doorbell(b.pair);
    }
    PUMP_UNTIL(jobs[COUNT - 1].done == 1);
    tear_down();
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- sleeping -- */

START_TEST(sleepers_wake)
{
    set_up(16, 16, TL_KEYS_WINDOW);
    for (unsigned i = 1; i <= 20; i++) {
        while (!tl_provider_arm(b.provider))
            b.provider->ops->poll(b.provider);
        if (i == 1) ck_assert(!side_is_readable(&b, 0));
        send_text(&a, "wake up", NULL);
        ck_assert(side_is_readable(&b, 20000));
        tl_provider_disarm(b.provider, true);
        ck_assert(!side_is_readable(&b, 0));
        PUMP_UNTIL(b.messages == i);
    }
    tear_down();
}
END_TEST

/* Arming finds what arrived before it, so nothing is lost. */
START_TEST(arming_loses_nothing)
{
    set_up(16, 16, TL_KEYS_WINDOW);
    unsigned found = 0;
    for (unsigned i = 1; i <= 50; i++) {
        struct job job = new_job_of(&a);
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

/* ------------------------------------------------------------------------------------ what every provider does -- */

static void make_both(uint64_t len_bytes, struct provider_memory *ret_memory)
{
    make_memory(len_bytes);
    *ret_memory = (struct provider_memory){source, target, source_region, target_region};
}

static const struct provider_kind kind = {
    .has_windows = true, .set_up = set_up, .make_memory = make_both, .tear_down = tear_down};

int main(void)
{
    Suite *suite = suite_create("verbs_provider");
    TCase *tests = tcase_create("tests");
    tcase_set_timeout(tests, 90);
    tcase_add_test(tests, nothing_leaves_before_the_bell);
    tcase_add_test(tests, large_writes);
    tcase_add_test(tests, reads);
    tcase_add_loop_test(tests, source_is_not_a_destination, 0, 2);
    tcase_add_test(tests, keys_of_regions_do_not_read);
    tcase_add_test(tests, windows_are_used_again);
    tcase_add_test(tests, many_windows_at_a_time);
    tcase_add_test(tests, sleepers_wake);
    tcase_add_test(tests, arming_loses_nothing);
    provider_cases_add(tests, &kind);
    suite_add_tcase(suite, tests);
    return run_suite(suite);
}
