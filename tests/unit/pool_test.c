// SPDX-License-Identifier: Apache-2.0
/* The pool: regions, growth, giving up, exhaustion, blocks that outlive it, and all possible failures. */
#include <check.h>
#include <string.h>

#include "fakes/region_provider.h"

#include "tests/fakes/fault_alloc.h"

#include "dataplane/memory/blocks.c"
#include "dataplane/memory/pool.c"
#include "dataplane/memory/pool_grow.c"
#include "fakes/run_suite.h"

#define KIB UINT64_C(1024)
#define MIB (1024 * KIB)

static struct region_provider provider;
static struct tl_pool *pool;
static struct tl_error error;

static void wanted(void *context)
{
    (void)context;
    ck_abort_msg("nothing waits");
}

static const struct tl_pool_hooks hooks = {.wanted = wanted};

static void setup(void)
{
    region_provider_init(&provider);
}

static void teardown(void)
{
    tl_pool_close(pool);
    ck_assert_uint_eq(provider.live_count, 0);
}

static void open_small_pool(uint64_t first_bytes, uint64_t pool_bytes, uint64_t max_bytes)
{
    ck_assert_int_eq(tl_pool_create(&provider.base, first_bytes, pool_bytes, max_bytes, &hooks, &pool, &error), TL_OK);
}

static void open_pool(uint64_t pool_bytes, uint64_t max_bytes)
{
    open_small_pool(pool_bytes, pool_bytes, max_bytes);
}

static struct tl_block *take(uint64_t len_bytes)
{
    struct tl_block *block = NULL;
    ck_assert_int_eq(tl_pool_take(pool, len_bytes, &block, &error), TL_OK);
    memset((void *)block->address, 0xab, len_bytes);
    return block;
}

static void refuse(uint64_t len_bytes)
{
    struct tl_block *block = NULL;
    ck_assert_int_eq(tl_pool_take(pool, len_bytes, &block, &error), TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_null(block);
}

static void expect(uint64_t regions, uint64_t bytes, uint64_t used_bytes)
{
    struct tl_pool_stats stats;
    tl_pool_get_stats(pool, &stats);
    ck_assert_uint_eq(stats.regions, regions);
    ck_assert_uint_eq(stats.bytes, bytes);
    ck_assert_uint_eq(stats.used_bytes, used_bytes);
    ck_assert_uint_eq(provider.live_count, regions);
    ck_assert_uint_eq(provider.live_bytes, bytes);
}

START_TEST(alignment)
{
    open_pool(8 * MIB, 8 * MIB);
    struct tl_block *small = take(1), *other = take(65), *large = take(MIB), *larger = take(MIB + 1);
    ck_assert_uint_eq(small->address % 64, 0);
    ck_assert_uint_eq(other->address % 64, 0);
    ck_assert_uint_eq(large->address % 4096, 0);
    ck_assert_uint_eq(larger->address % 4096, 0);
    expect(1, 8 * MIB, 64 + 128 + MIB + MIB + 64);
    tl_pool_give(other);
    tl_pool_give(large);
    tl_pool_give(small);
    tl_pool_give(larger);
    expect(1, 8 * MIB, 0);
    tl_pool_give(take(8 * MIB));
}
END_TEST

#ifdef TL_HAS_ADDRESS_SANITIZER
START_TEST(late_writes_are_found)
{
    open_pool(64 * KIB, 64 * KIB);
    struct tl_block *block = take(100);
    char *bytes = (char *)block->address;
    ck_assert(!__asan_address_is_poisoned(bytes + 99));
    ck_assert(__asan_address_is_poisoned(bytes + 104));
    tl_pool_give(block);
    ck_assert(__asan_address_is_poisoned(bytes));
}
END_TEST
#endif

START_TEST(sizes_are_rounded)
{
    open_pool(1, 0);
    expect(1, 4 * KIB, 0);
    tl_pool_give(take(4 * KIB));
    refuse(4 * KIB + 1);
    tl_pool_close(pool);
    open_pool(0, UINT64_MAX);
    expect(1, 4 * KIB, 0);
    tl_pool_give(take(5 * KIB));
    expect(2, 12 * KIB, 0);
}
END_TEST

START_TEST(growth)
{
    open_pool(64 * KIB, 280 * KIB);
    struct tl_block *a = take(64 * KIB), *b = take(40 * KIB), *c = take(100 * KIB - 1);
    expect(3, 228 * KIB, 204 * KIB);
    /* What is left of the maximum is less than a whole region. */
    struct tl_block *d = take(50 * KIB);
    expect(4, 280 * KIB, 254 * KIB);
    refuse(28 * KIB);
    struct tl_block *e = take(24 * KIB);
    expect(4, 280 * KIB, 278 * KIB);
    tl_pool_give(a);
    tl_pool_give(b);
    tl_pool_give(c);
    tl_pool_give(d);
    tl_pool_give(e);
    expect(4, 280 * KIB, 0);
}
END_TEST

/* A pool may begin small. Then all that would have fitted without that still does. */
START_TEST(small_beginning)
{
    struct tl_block *blocks[6];
    struct tl_pool_stats stats;
    open_small_pool(4 * KIB, 16 * KIB, 32 * KIB);
    expect(1, 4 * KIB, 0);
    blocks[0] = take(4 * KIB);
    expect(1, 4 * KIB, 4 * KIB);
    for (unsigned i = 1; i < 5; i++) {
        blocks[i] = take(4 * KIB);
        expect(2, 20 * KIB, (i + 1) * 4 * KIB);
    }
    blocks[5] = take(16 * KIB);
    expect(3, 36 * KIB, 36 * KIB);
    refuse(4 * KIB);
    for (unsigned i = 1; i < 6; i++)
        tl_pool_give(blocks[i]);
    blocks[1] = take(32 * KIB); /* the others are given up, but not the first */
    expect(2, 36 * KIB, 36 * KIB);
    tl_pool_give(blocks[0]);
    tl_pool_give(blocks[1]);
    tl_pool_get_stats(pool, &stats);
    ck_assert_uint_eq(stats.used_bytes, 0);
}
END_TEST

/* Where locked memory does not suffice for a usual region, one of the size that is needed is made. */
START_TEST(small_beginning_and_little_locked_memory)
{
    provider.locked_limit_bytes = 14 * KIB;
    open_small_pool(4 * KIB, 16 * KIB, 32 * KIB);
    struct tl_block *first = take(4 * KIB), *second = take(8 * KIB);
    expect(2, 12 * KIB, 12 * KIB);
    refuse(4 * KIB);
    ck_assert_ptr_nonnull(strstr(error.message, "locked memory is scarce"));
    tl_pool_give(first);
    tl_pool_give(second);
}
END_TEST

/* Until it has grown, large blocks make it grow as well when they are asked for early. */
START_TEST(small_beginning_and_large_blocks)
{
    struct tl_block *block = NULL;
    bool is_more_wanted = false;
    open_small_pool(512 * KIB, 4 * MIB, 8 * MIB);
    ck_assert_int_eq(tl_pool_take_early(pool, 450 * KIB, &block, &is_more_wanted, &error), TL_OK);
    ck_assert_ptr_null(block);
    ck_assert(is_more_wanted);
    ck_assert_ptr_null(tl_pool_serve(pool));
    expect(2, 4 * MIB + 512 * KIB, 0);
    ck_assert_int_eq(tl_pool_take_early(pool, 450 * KIB, &block, &is_more_wanted, &error), TL_OK);
    ck_assert_ptr_nonnull(block);
    tl_pool_give(block);
}
END_TEST

START_TEST(exhaustion)
{
    open_pool(64 * KIB, 128 * KIB);
    struct tl_block *block = take(KIB);
    refuse(129 * KIB);
    ck_assert_ptr_nonnull(strstr(error.message, "verbs.max_pool"));
    ck_assert_ptr_nonnull(strstr(error.message, "135168")); /* The requested size, in pages. */
    ck_assert_ptr_nonnull(strstr(error.message, "131072"));
    refuse(INT64_MAX);
    struct tl_block *other = take(64 * KIB);
    refuse(64 * KIB);
    tl_pool_give(block);
    tl_pool_give(take(64 * KIB));
    tl_pool_give(other);
    expect(2, 128 * KIB, 0);
}
END_TEST

START_TEST(unused_regions_are_given_up)
{
    open_pool(64 * KIB, 256 * KIB);
    struct tl_block *first = take(64 * KIB), *second = take(64 * KIB), *third = take(64 * KIB);
    expect(3, 192 * KIB, 192 * KIB);
    refuse(128 * KIB);
    tl_pool_give(second);
    struct tl_block *large = take(128 * KIB);
    expect(3, 256 * KIB, 256 * KIB);
    tl_pool_give(first);
    tl_pool_give(large);
    /* The first region stays. */
    refuse(256 * KIB);
    tl_pool_give(third);
    refuse(256 * KIB);
    expect(1, 64 * KIB, 0);
    tl_pool_give(take(192 * KIB));
    expect(2, 256 * KIB, 0);
}
END_TEST

/* A small block comes back for the next request of its size, and counts as free space when nothing else fits. */
START_TEST(small_blocks_are_kept)
{
    open_pool(64 * KIB, 64 * KIB);
    struct tl_block *small = take(100), *other = take(100);
    tl_pool_give(small);
    expect(1, 64 * KIB, 128);
    struct tl_block *larger = take(129);
    ck_assert_ptr_ne(larger, small);
    ck_assert_ptr_eq(take(128), small);
    expect(1, 64 * KIB, 128 + 128 + 192);
    tl_pool_give(other);
    struct tl_block *many[100];
    for (size_t i = 0; i < 100; i++)
        many[i] = take(64);
    for (size_t i = 0; i < 100; i++)
        tl_pool_give(many[i]);
    ck_assert_uint_eq(pool->spare_bytes, 100 * 64 + 128);
    struct tl_block *rest = take(64 * KIB - 128 - 192 - 128 - 64);
    ck_assert_uint_eq(pool->spare_bytes, 0);
    tl_pool_give(rest);
    tl_pool_give(small);
    expect(1, 64 * KIB, 192);
    ck_assert_uint_gt(pool->spare_bytes, 0);
    tl_pool_close(pool);
    pool = NULL;
    tl_pool_give(larger);
}
END_TEST

/* What a group of thousands of small tensors gives back is there for the next one; more is joined to larger blocks. */
START_TEST(the_blocks_of_a_group_are_kept)
{
    static struct tl_block *many[MAX_SPARES + 100];
    open_pool(1024 * KIB, 1024 * KIB);
    for (size_t i = 0; i < TL_ARRAY_COUNT(many); i++)
        many[i] = take(64);
    for (size_t i = 0; i < TL_ARRAY_COUNT(many); i++)
        tl_pool_give(many[i]);
    ck_assert_uint_eq(pool->spare_bytes, MAX_SPARES * 64);
    for (size_t i = MAX_SPARES; i-- > 0;)
        ck_assert_ptr_eq(take(64), many[i]);
    ck_assert_uint_eq(pool->spare_bytes, 0);
    for (size_t i = 0; i < MAX_SPARES; i++)
        tl_pool_give(many[i]);
}
END_TEST

START_TEST(regions_of_addresses)
{
    open_pool(64 * KIB, 256 * KIB);
    char outside;
    struct tl_block *first = take(64 * KIB), *second = take(64 * KIB), *third = take(100 * KIB);
    struct tl_block *blocks_[] = {first, second, third};
    ck_assert_ptr_null(tl_pool_find(pool, &outside, 1));
    ck_assert_ptr_null(tl_pool_find(pool, NULL, 0));
    ck_assert_ptr_null(tl_pool_find(pool, (void *)UINTPTR_MAX, 1));
    for (size_t i = 0; i < 3; i++) {
        char *start = (char *)blocks_[i]->address;
        uint64_t len_bytes = blocks_[i]->len_bytes;
        struct tl_region *region = tl_pool_find(pool, start, len_bytes);
        ck_assert_ptr_nonnull(region);
        ck_assert_ptr_eq(region->address, start);
        ck_assert_ptr_eq(tl_pool_find(pool, start + len_bytes - 1, 1), region);
        ck_assert_ptr_eq(tl_pool_region_of(pool, blocks_[i]), region);
        ck_assert_ptr_null(
            tl_pool_region_of((struct tl_pool *)(void *)&blocks_, blocks_[i])); /* It belongs to no other pool. */
        /* Regions may touch, but none covers more than itself. */
        ck_assert_ptr_null(tl_pool_find(pool, start, region->len_bytes + 1));
        ck_assert_ptr_null(tl_pool_find(pool, start + 1, UINT64_MAX));
        tl_pool_give(blocks_[i]);
    }
}
END_TEST

START_TEST(blocks_outlive_the_pool)
{
    open_pool(64 * KIB, 192 * KIB);
    struct tl_block *first = take(60 * KIB), *second = take(60 * KIB), *part = take(KIB);
    take(KIB);
    tl_pool_give(second);
    tl_pool_close(pool);
    ck_assert_uint_eq(provider.live_count, 0);
    struct tl_pool *closed = pool;
    pool = NULL;
    memset((void *)first->address, 1, first->len_bytes);
    tl_pool_give(first);
    memset((void *)part->address, 1, part->len_bytes);
    tl_pool_give(part);
    /* The region that was forgotten above. */
    struct tl_block *last = closed->regions[0]->first;
    while (last->is_free)
        last = last->after;
    tl_pool_give(last);
}
END_TEST

START_TEST(the_first_region_fails)
{
    provider.fail_countdown = 1;
    ck_assert_int_eq(tl_pool_create(&provider.base, 64 * KIB, 64 * KIB, 64 * KIB, &hooks, &pool, &error),
                     TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(error.message, "verbs.pool"));
    ck_assert_ptr_nonnull(strstr(error.message, "locked memory is scarce"));
    ck_assert_ptr_null(pool);
    ck_assert_int_eq(tl_pool_create(&provider.base, UINT64_C(1) << 60, UINT64_C(1) << 60, 0, &hooks, &pool, NULL),
                     TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_null(pool);
}
END_TEST

START_TEST(a_later_region_fails)
{
    open_pool(64 * KIB, 128 * KIB);
    struct tl_block *block = take(64 * KIB);
    provider.fail_countdown = 1;
    refuse(KIB);
    ck_assert_ptr_nonnull(strstr(error.message, "locked memory is scarce"));
    expect(1, 64 * KIB, 64 * KIB);
    tl_pool_give(take(KIB));
    tl_pool_give(block);
    expect(2, 128 * KIB, 0);
}
END_TEST

START_TEST(no_memory)
{
    for (unsigned n = 1;; n++) {
        fault_arm(n);
        enum tl_status status = tl_pool_create(&provider.base, 64 * KIB, 64 * KIB, MIB, &hooks, &pool, &error);
        if (!fault_was_hit()) break;
        ck_assert_int_eq(status, TL_RESOURCE_EXHAUSTED);
        ck_assert_ptr_null(pool);
        ck_assert_uint_eq(provider.live_count, 0);
    }
    /* From 8 regions on the list of regions grows, too. */
    struct tl_block *blocks_[9];
    for (unsigned i = 0; i < TL_ARRAY_COUNT(blocks_); i++) {
        for (unsigned n = 1;; n++) {
            blocks_[i] = NULL;
            fault_arm(n);
            enum tl_status status = tl_pool_take(pool, 60 * KIB, &blocks_[i], &error);
            if (!fault_was_hit()) {
                ck_assert_int_eq(status, TL_OK);
                break;
            }
            ck_assert_int_eq(status, TL_RESOURCE_EXHAUSTED);
            ck_assert_ptr_null(blocks_[i]);
            ck_assert_uint_eq(provider.live_count, pool->region_count);
        }
    }
    expect(9, 9 * 64 * KIB, 9 * 60 * KIB);
    for (unsigned i = 0; i < TL_ARRAY_COUNT(blocks_); i++)
        tl_pool_give(blocks_[i]);
    expect(9, 9 * 64 * KIB, 0);
}
END_TEST

/* Blocks keep what was written into them, whatever happens to others. */
START_TEST(random_use)
{
    enum { SLOTS = 64, OPERATIONS = 4000 };
    struct tl_block *slots[SLOTS] = {NULL};
    uint64_t lens[SLOTS];
    open_small_pool(_i == 0 ? 256 * KIB : 8 * KIB, 256 * KIB, 2 * MIB);
    srand(1);
    for (int i = 0; i < OPERATIONS + SLOTS; i++) {
        int slot = i < OPERATIONS ? rand() % SLOTS : i - OPERATIONS;
        if (slots[slot]) {
            const char *bytes = (const char *)slots[slot]->address;
            ck_assert_int_eq(bytes[0], slot);
            ck_assert_int_eq(memcmp(bytes, bytes + 1, lens[slot] - 1), 0);
            tl_pool_give(slots[slot]);
            slots[slot] = NULL;
        } else if (i < OPERATIONS) {
            lens[slot] = 1 + (uint64_t)rand() % (rand() % 8 == 0 ? 300 * KIB : 5 * KIB);
            if (tl_pool_take(pool, lens[slot], &slots[slot], &error) == TL_OK)
                memset((void *)slots[slot]->address, slot, lens[slot]);
        }
    }
    struct tl_pool_stats stats;
    tl_pool_get_stats(pool, &stats);
    ck_assert_uint_eq(stats.used_bytes, 0);
    ck_assert_uint_le(stats.bytes, 2 * MIB);
}
END_TEST

START_TEST(regions_stay_few)
{
    enum { COUNT = 4096 };
    static struct tl_block *blocks[COUNT];
    struct tl_pool_stats stats;
    open_pool(4 * KIB, 64 * MIB);
    for (unsigned i = 0; i < COUNT; i++)
        blocks[i] = take(4 * KIB);
    tl_pool_get_stats(pool, &stats);
    ck_assert_uint_lt(stats.regions, COUNT / 8);
    for (unsigned i = 0; i < COUNT; i++)
        tl_pool_give(blocks[i]);
}
END_TEST

START_TEST(no_more_regions_than_the_provider_takes)
{
    struct tl_block *blocks[3];
    provider.base.limits.max_pool_regions = 3;
    open_pool(4 * KIB, 64 * MIB);
    for (unsigned i = 0; i < 3; i++)
        blocks[i] = take(4 * KIB);
    refuse(4 * KIB);
    ck_assert_msg(strstr(error.message, "the pool has 3 regions, which is the most; make them larger (") != NULL, "%s",
                  error.message);
    /* A region that is wholly free makes space for another one. */
    tl_pool_give(blocks[2]);
    blocks[2] = take(12 * KIB);
    for (unsigned i = 0; i < 3; i++)
        tl_pool_give(blocks[i]);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("pool");
    TCase *tcase = tcase_create("pool");
    tcase_set_timeout(tcase, 60);
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, regions_stay_few);
    tcase_add_test(tcase, no_more_regions_than_the_provider_takes);
    tcase_add_test(tcase, alignment);
#ifdef TL_HAS_ADDRESS_SANITIZER
    tcase_add_test(tcase, late_writes_are_found);
#endif
    tcase_add_test(tcase, sizes_are_rounded);
    tcase_add_test(tcase, growth);
    tcase_add_test(tcase, exhaustion);
    tcase_add_test(tcase, unused_regions_are_given_up);
    tcase_add_test(tcase, small_blocks_are_kept);
    tcase_add_test(tcase, the_blocks_of_a_group_are_kept);
    tcase_add_test(tcase, regions_of_addresses);
    tcase_add_test(tcase, blocks_outlive_the_pool);
    tcase_add_test(tcase, the_first_region_fails);
    tcase_add_test(tcase, a_later_region_fails);
    tcase_add_test(tcase, no_memory);
    tcase_add_loop_test(tcase, random_use, 0, 2);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("small_beginning"); /* tests/defects runs it alone */
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, small_beginning);
    tcase_add_test(tcase, small_beginning_and_large_blocks);
    tcase_add_test(tcase, small_beginning_and_little_locked_memory);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
