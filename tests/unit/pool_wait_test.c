// SPDX-License-Identifier: Apache-2.0
/* Waiting for space in the pool: which request is served, when and with what; which never is; how requests leave the
 * queue. */
#include <check.h>
#include <string.h>

#include "fakes/region_provider.h"

#include "dataplane/memory/pool.h"
#include "fakes/run_suite.h"

#define KIB UINT64_C(1024)

static struct region_provider provider;
static struct tl_pool *pool;
static struct tl_error error;
static unsigned wanted_count;
static unsigned evictable_count; /* Unused registrations, of 64 KiB each. */

static void wanted(void *context)
{
    ck_assert_ptr_eq(context, &provider);
    wanted_count++;
}

static bool evict(void *context)
{
    ck_assert_ptr_eq(context, &provider);
    if (evictable_count == 0) return false;
    evictable_count--;
    provider.locked_limit_bytes += 64 * KIB;
    return true;
}

static const struct tl_pool_hooks hooks = {.wanted = wanted, .evict = evict, .context = &provider};

static void setup(void)
{
    region_provider_init(&provider);
    wanted_count = 0;
    evictable_count = 0;
}

static void teardown(void)
{
    tl_pool_close(pool);
    ck_assert_uint_eq(provider.live_count, 0);
}

static void open_pool(uint64_t pool_bytes, uint64_t max_bytes)
{
    ck_assert_int_eq(tl_pool_create(&provider.base, pool_bytes, pool_bytes, max_bytes, &hooks, &pool, &error), TL_OK);
}

/* NULL: there is no space now. */
static struct tl_block *take_now(uint64_t len_bytes)
{
    struct tl_block *block = NULL;
    ck_assert_int_eq(tl_pool_take_now(pool, len_bytes, &block, &error), TL_OK);
    return block;
}

static struct tl_block *take(uint64_t len_bytes)
{
    struct tl_block *block = NULL;
    ck_assert_int_eq(tl_pool_take(pool, len_bytes, &block, &error), TL_OK);
    return block;
}

static void begin(struct tl_pool_wait *wait, uint64_t len_bytes)
{
    unsigned before = wanted_count;
    *wait = (struct tl_pool_wait){.len_bytes = len_bytes};
    tl_list_init(&wait->link);
    ck_assert_int_eq(tl_pool_wait(pool, wait, &error), TL_OK);
    ck_assert_uint_eq(wanted_count, before + 1);
}

static void expect_served(struct tl_pool_wait *wait)
{
    ck_assert_ptr_eq(tl_pool_serve(pool), wait);
    ck_assert_msg(wait->error.code == TL_OK, "%s", wait->error.message);
    ck_assert_uint_ge(wait->block->len_bytes, wait->len_bytes);
    memset((void *)wait->block->address, 0xcd, wait->len_bytes);
}

static void expect_no_waiter(void)
{
    ck_assert_ptr_null(tl_pool_serve(pool));
}

static struct tl_pool_stats stats(void)
{
    struct tl_pool_stats now;
    tl_pool_get_stats(pool, &now);
    return now;
}

START_TEST(taking_never_makes_a_region)
{
    open_pool(64 * KIB, 128 * KIB);
    struct tl_block *block = take_now(64 * KIB);
    ck_assert_ptr_nonnull(block);
    ck_assert_ptr_null(take_now(1));
    ck_assert_uint_eq(provider.created_count, 1);
    tl_pool_give(block);
    tl_pool_give(take_now(64 * KIB));
    ck_assert_uint_eq(wanted_count, 0);
}
END_TEST

START_TEST(the_serving_thread_makes_the_region)
{
    struct tl_pool_wait wait;
    open_pool(64 * KIB, 128 * KIB);
    struct tl_block *block = take(64 * KIB);
    begin(&wait, 10 * KIB);
    ck_assert_uint_eq(provider.created_count, 1);
    expect_served(&wait);
    ck_assert_uint_eq(provider.created_count, 2);
    expect_no_waiter();
    tl_pool_give(wait.block);
    tl_pool_give(block);
    ck_assert_uint_eq(stats().waits, 1);
    ck_assert_uint_eq(stats().waiting, 0);
}
END_TEST

/* Small requests do not pass the large one in front, neither those that wait nor those that come. */
START_TEST(first_come_first_served)
{
    struct tl_pool_wait large, small;
    open_pool(64 * KIB, 64 * KIB);
    struct tl_block *one = take(32 * KIB), *other = take(32 * KIB);
    begin(&large, 60 * KIB);
    begin(&small, KIB);
    expect_no_waiter();
    tl_pool_give(one);
    ck_assert_uint_eq(wanted_count, 3);
    expect_no_waiter();
    ck_assert_ptr_null(take_now(KIB));
    ck_assert_uint_eq(stats().waiting, 2);
    tl_pool_give(other);
    expect_served(&large);
    expect_served(&small);
    expect_no_waiter();
    struct tl_block *last = take_now(KIB);
    ck_assert_ptr_nonnull(last);
    tl_pool_give(last);
    tl_pool_give(large.block);
    tl_pool_give(small.block);
}
END_TEST

/* An unused region is given up for a larger one, once its last block has come back. */
START_TEST(regions_are_exchanged)
{
    struct tl_pool_wait wait;
    open_pool(64 * KIB, 192 * KIB);
    struct tl_block *lasting = take(64 * KIB), *block = take(64 * KIB);
    begin(&wait, 128 * KIB);
    expect_no_waiter();
    tl_pool_give(block);
    expect_served(&wait);
    ck_assert_uint_eq(stats().regions, 2);
    ck_assert_uint_eq(stats().bytes, 192 * KIB);
    tl_pool_give(wait.block);
    tl_pool_give(lasting);
}
END_TEST

START_TEST(what_never_fits)
{
    struct tl_pool_wait wait = {.len_bytes = 129 * KIB};
    open_pool(64 * KIB, 192 * KIB);
    tl_list_init(&wait.link);
    ck_assert_int_eq(tl_pool_wait(pool, &wait, &error), TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(error.message, "132096"));
    ck_assert_ptr_nonnull(strstr(error.message, "196608"));
    ck_assert_ptr_nonnull(strstr(error.message, "raise its maximum (verbs.max_pool)"));
    ck_assert_uint_eq(stats().waiting, 0);
    /* It may fit once more than the first region may be given up. */
    begin(&wait, 128 * KIB);
    expect_served(&wait);
    tl_pool_give(wait.block);
    /* A request no larger than the first region always fits. */
    tl_pool_close(pool);
    open_pool(64 * KIB, 64 * KIB);
    begin(&wait, 64 * KIB);
    expect_served(&wait);
    tl_pool_give(wait.block);
}
END_TEST

START_TEST(too_many)
{
    static struct tl_pool_wait waits[TL_POOL_MAX_WAITING + 1];
    open_pool(64 * KIB, 64 * KIB);
    struct tl_block *block = take(64 * KIB);
    for (unsigned i = 0; i < TL_POOL_MAX_WAITING; i++)
        begin(&waits[i], 1);
    struct tl_pool_wait *last = &waits[TL_POOL_MAX_WAITING];
    last->len_bytes = 1;
    tl_list_init(&last->link);
    ck_assert_int_eq(tl_pool_wait(pool, last, &error), TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(error.message, "verbs.max_pool"));
    ck_assert(tl_pool_withdraw(pool, &waits[7]));
    begin(last, 1);
    for (unsigned i = 0; i <= TL_POOL_MAX_WAITING; i++)
        if (i != 7) ck_assert(tl_pool_withdraw(pool, &waits[i]));
    tl_pool_give(block);
}
END_TEST

/* The request behind the one that leaves may fit. */
START_TEST(withdrawn)
{
    struct tl_pool_wait first, second, third;
    open_pool(64 * KIB, 64 * KIB);
    struct tl_block *block = take(32 * KIB);
    begin(&first, 64 * KIB);
    begin(&second, 16 * KIB);
    begin(&third, 16 * KIB);
    expect_no_waiter();
    unsigned before = wanted_count;
    ck_assert(tl_pool_withdraw(pool, &third));
    ck_assert_uint_eq(wanted_count, before);
    ck_assert(tl_pool_withdraw(pool, &first));
    ck_assert_uint_eq(wanted_count, before + 1);
    ck_assert(!tl_pool_withdraw(pool, &first));
    expect_served(&second);
    ck_assert(!tl_pool_withdraw(pool, &second));
    expect_no_waiter();
    tl_pool_give(second.block);
    tl_pool_give(block);
    ck_assert_uint_eq(stats().waits, 3);
}
END_TEST

/* The provider is at work meanwhile; a request that leaves then still learns of the end. */
static struct tl_pool_wait *leaving;

static void leave(struct region_provider *of)
{
    of->hook = NULL;
    ck_assert(!tl_pool_withdraw(pool, leaving));
}

START_TEST(withdrawn_while_it_is_served)
{
    struct tl_pool_wait wait;
    open_pool(64 * KIB, 128 * KIB);
    struct tl_block *block = take(64 * KIB);
    leaving = &wait;
    begin(&wait, KIB);
    provider.hook = leave;
    provider.fail_countdown = _i == 0 ? 0 : 1;
    ck_assert_ptr_eq(tl_pool_serve(pool), &wait);
    if (_i == 0) {
        tl_pool_give(wait.block);
    } else {
        ck_assert_int_eq(wait.error.code, TL_RESOURCE_EXHAUSTED);
    }
    expect_no_waiter();
    tl_pool_give(block);
}
END_TEST

/* The provider refuses a region: a request that fits into the existing ones waits for them, a larger one fails with the
 * reason. */
START_TEST(no_region)
{
    struct tl_pool_wait small, large;
    open_pool(64 * KIB, 1024 * KIB);
    struct tl_block *block = take(64 * KIB);
    provider.locked_limit_bytes = 100 * KIB;
    begin(&small, KIB);
    begin(&large, 65 * KIB);
    expect_no_waiter();
    tl_pool_give(block);
    expect_served(&small);
    ck_assert_ptr_eq(tl_pool_serve(pool), &large);
    ck_assert_int_eq(large.error.code, TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(large.error.message, "locked memory is scarce"));
    ck_assert_ptr_nonnull(strstr(large.error.message, "verbs.pool"));
    ck_assert_ptr_null(large.block);
    tl_pool_give(small.block);
}
END_TEST

/* Unused registrations are evicted first, as many as necessary and no more. */
START_TEST(idle_registrations_make_space)
{
    struct tl_pool_wait wait;
    open_pool(64 * KIB, 1024 * KIB);
    provider.locked_limit_bytes = 64 * KIB;
    evictable_count = 4;
    begin(&wait, 130 * KIB);
    expect_served(&wait);
    ck_assert_uint_eq(evictable_count, 1);
    struct tl_block *block = take(64 * KIB);
    ck_assert_uint_eq(evictable_count, 1);
    evictable_count = 1;
    struct tl_block *other = take(60 * KIB);
    ck_assert_uint_eq(evictable_count, 0);
    begin(&wait, 64 * KIB);
    expect_no_waiter();
    tl_pool_give(block);
    tl_pool_give(other);
    ck_assert_ptr_eq(tl_pool_serve(pool), &wait);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("pool_wait");
    TCase *tcase = tcase_create("pool_wait");
    tcase_set_timeout(tcase, 60);
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, taking_never_makes_a_region);
    tcase_add_test(tcase, the_serving_thread_makes_the_region);
    tcase_add_test(tcase, first_come_first_served);
    tcase_add_test(tcase, regions_are_exchanged);
    tcase_add_test(tcase, what_never_fits);
    tcase_add_test(tcase, too_many);
    tcase_add_test(tcase, withdrawn);
    tcase_add_loop_test(tcase, withdrawn_while_it_is_served, 0, 2);
    tcase_add_test(tcase, no_region);
    tcase_add_test(tcase, idle_registrations_make_space);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
