// SPDX-License-Identifier: Apache-2.0
/* Blocks: best fit, alignment, coalescing, no memory, and random use against a map that is too simple to be wrong. */
#include <check.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fakes/fault_alloc.h"

#include "dataplane/memory/blocks.c"
#include "fakes/run_suite.h"

#define UNIT 64
#define START ((uintptr_t)0x7f0000000000)

static struct tl_blocks blocks;
static int owner;

static struct tl_block *take(uint64_t len_bytes, uint64_t alignment)
{
    struct tl_block *found = tl_blocks_find(&blocks, len_bytes, alignment);
    if (!found) return NULL;
    struct tl_block *taken = tl_blocks_take(&blocks, found, len_bytes, alignment);
    ck_assert_ptr_nonnull(taken);
    ck_assert(!taken->is_free);
    ck_assert_uint_eq(taken->len_bytes, len_bytes);
    ck_assert_uint_eq(taken->address % alignment, 0);
    return taken;
}

START_TEST(whole_range)
{
    struct tl_block *range = tl_blocks_add(&blocks, START, 10 * UNIT, &owner);
    ck_assert(tl_block_is_whole_range(range));
    ck_assert_ptr_null(take(11 * UNIT, UNIT));
    struct tl_block *block = take(10 * UNIT, UNIT);
    ck_assert_uint_eq(block->address, START);
    ck_assert_ptr_eq(block->owner, &owner);
    ck_assert(!tl_block_is_whole_range(block));
    ck_assert_uint_eq(blocks.used_bytes, 10 * UNIT);
    ck_assert_ptr_null(take(1, 1));
    ck_assert_ptr_eq(tl_blocks_give(&blocks, block), range);
    ck_assert_uint_eq(blocks.used_bytes, 0);
    tl_blocks_remove(&blocks, range);
    ck_assert_ptr_null(blocks.root);
}
END_TEST

START_TEST(best_fit)
{
    struct tl_block *pieces[7];
    static const uint64_t lens[] = {5, 1, 3, 1, 4, 1, 3}; /* Sizes in units; blocks 0, 2, 4 and 6 are given back. */
    struct tl_block *range = tl_blocks_add(&blocks, START, 18 * UNIT, &owner);
    for (size_t i = 0; i < 7; i++)
        pieces[i] = take(lens[i] * UNIT, UNIT);
    for (size_t i = 0; i < 7; i += 2)
        tl_blocks_give(&blocks, pieces[i]);
    /* The smallest block that fits is taken; of two equal ones the lowest. */
    pieces[2] = take(2 * UNIT, UNIT);
    ck_assert_uint_eq(pieces[2]->address, START + 6 * UNIT);
    pieces[6] = take(3 * UNIT, UNIT);
    ck_assert_uint_eq(pieces[6]->address, START + 15 * UNIT);
    pieces[4] = take(3 * UNIT, UNIT);
    ck_assert_uint_eq(pieces[4]->address, START + 10 * UNIT);
    pieces[0] = take(5 * UNIT, UNIT);
    ck_assert_uint_eq(pieces[0]->address, START);
    for (size_t i = 0; i < 7; i++)
        tl_blocks_give(&blocks, pieces[i]);
    tl_blocks_remove(&blocks, range);
}
END_TEST

START_TEST(coalescing)
{
    /* The freed block has nothing free beside it, then free space before it, behind it, and on both sides. */
    static const int orders[][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    struct tl_block *range = tl_blocks_add(&blocks, START, 3 * UNIT, &owner);
    for (size_t i = 0; i < TL_ARRAY_COUNT(orders); i++) {
        struct tl_block *pieces[3];
        for (int j = 0; j < 3; j++)
            pieces[j] = take(UNIT, UNIT);
        for (int j = 0; j < 3; j++) {
            ck_assert(!tl_block_is_whole_range(range));
            tl_blocks_give(&blocks, pieces[orders[i][j]]);
        }
        ck_assert(tl_block_is_whole_range(range));
        ck_assert_uint_eq(range->len_bytes, 3 * UNIT);
    }
    tl_blocks_remove(&blocks, range);
}
END_TEST

START_TEST(ranges_that_touch_stay_apart)
{
    struct tl_block *low = tl_blocks_add(&blocks, START, 2 * UNIT, &owner);
    struct tl_block *high = tl_blocks_add(&blocks, START + 2 * UNIT, 2 * UNIT, &blocks);
    ck_assert_ptr_null(take(3 * UNIT, UNIT));
    struct tl_block *first = take(2 * UNIT, UNIT), *second = take(2 * UNIT, UNIT);
    ck_assert_ptr_eq(first->owner, &owner);
    ck_assert_ptr_eq(second->owner, &blocks);
    tl_blocks_give(&blocks, second);
    tl_blocks_give(&blocks, first);
    ck_assert(tl_block_is_whole_range(low));
    ck_assert(tl_block_is_whole_range(high));
    tl_blocks_remove(&blocks, low);
    tl_blocks_remove(&blocks, high);
}
END_TEST

START_TEST(badly_aligned_blocks_are_passed_over)
{
    const uint64_t page = 4096;
    struct tl_block *odd = tl_blocks_add(&blocks, START + UNIT, page, &owner);
    struct tl_block *even = tl_blocks_add(&blocks, START + 8 * page, page, &owner);
    struct tl_block *block = take(page, page);
    ck_assert_uint_eq(block->address, START + 8 * page);
    ck_assert_ptr_null(take(page, page));
    ck_assert_ptr_nonnull(tl_blocks_find(&blocks, page, UNIT));
    tl_blocks_give(&blocks, block);
    tl_blocks_remove(&blocks, odd);
    tl_blocks_remove(&blocks, even);
}
END_TEST

START_TEST(no_memory)
{
    fault_arm(1);
    ck_assert_ptr_null(tl_blocks_add(&blocks, START, 3 * 4096, &owner));
    ck_assert(fault_was_hit());
    struct tl_block *range = tl_blocks_add(&blocks, START + UNIT, 3 * 4096, &owner);
    for (unsigned n = 1; n <= 2; n++) {
        struct tl_block *found = tl_blocks_find(&blocks, 4096, 4096);
        fault_arm(n);
        ck_assert_ptr_null(tl_blocks_take(&blocks, found, 4096, 4096));
        ck_assert(fault_was_hit());
        ck_assert(tl_block_is_whole_range(range));
        ck_assert_uint_eq(blocks.used_bytes, 0);
    }
    struct tl_block *block = take(4096, 4096);
    fault_arm(1);
    tl_blocks_give(&blocks, block);
    ck_assert(!fault_was_hit());
    ck_assert(tl_block_is_whole_range(range));
    tl_blocks_remove(&blocks, range);
}
END_TEST

/* ----------------------------------------------------------------------------------------------- against a map -- */

enum { RANGES = 3, RANGE_UNITS = 200, SLOTS = 40, SEQUENCES = 300, OPERATIONS = 200 };

static uint64_t random_state;

/* SplitMix64. */
static unsigned below(unsigned limit)
{
    uint64_t z = (random_state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (unsigned)((z ^ (z >> 31)) % limit);
}

static bool is_taken[RANGES][RANGE_UNITS];

/* The second range starts right behind the first. */
static uintptr_t range_start(int range)
{
    return START + UNIT * (uintptr_t)(range < 2 ? range * RANGE_UNITS : 1000 + 3);
}

/* Returns where best fit must put a block; 0: nowhere. */
static uintptr_t expected_address(uint64_t units, uint64_t alignment)
{
    uint64_t best_units = UINT64_MAX;
    uintptr_t best = 0;
    for (int r = 0; r < RANGES; r++) {
        for (unsigned i = 0, end; i < RANGE_UNITS; i = end + 1) {
            for (end = i; end < RANGE_UNITS && !is_taken[r][end];)
                end++;
            uintptr_t start = range_start(r) + i * UNIT;
            uintptr_t address = (start + alignment - 1) / alignment * alignment;
            if (address + units * UNIT > start + (end - i) * UNIT) continue;
            if (end - i < best_units) best = address;
            if (end - i < best_units) best_units = end - i;
        }
    }
    return best;
}

static void mark(const struct tl_block *block, bool taken)
{
    int r = block->address >= range_start(2) ? 2 : block->address >= range_start(1);
    uint64_t at = (block->address - range_start(r)) / UNIT;
    ck_assert_uint_le(at + block->len_bytes / UNIT, RANGE_UNITS);
    for (uint64_t i = 0; i < block->len_bytes / UNIT; i++) {
        if (is_taken[r][at + i] == taken) ck_abort_msg("unit %" PRIu64 " of range %d", at + i, r);
        is_taken[r][at + i] = taken;
    }
}

static void do_one(struct tl_block **slot)
{
    if (*slot) {
        mark(*slot, false);
        tl_blocks_give(&blocks, *slot);
        *slot = NULL;
        return;
    }
    uint64_t units = 1 + below(below(4) == 0 ? RANGE_UNITS : 16);
    uint64_t alignment = (uint64_t)UNIT << below(5);
    uintptr_t address = expected_address(units, alignment);
    *slot = take(units * UNIT, alignment);
    ck_assert_uint_eq(*slot ? (*slot)->address : 0, address);
    if (*slot) mark(*slot, true);
}

START_TEST(random_use)
{
    for (unsigned sequence = 0; sequence < SEQUENCES; sequence++) {
        struct tl_block *ranges[RANGES], *slots[SLOTS] = {NULL};
        random_state = sequence;
        for (int r = 0; r < RANGES; r++)
            ranges[r] = tl_blocks_add(&blocks, range_start(r), RANGE_UNITS * UNIT, &owner);
        for (int i = 0; i < OPERATIONS; i++)
            do_one(&slots[below(SLOTS)]);
        for (int i = 0; i < SLOTS; i++)
            if (slots[i]) do_one(&slots[i]);
        ck_assert_uint_eq(blocks.used_bytes, 0);
        for (int r = 0; r < RANGES; r++)
            tl_blocks_remove(&blocks, ranges[r]);
        ck_assert_ptr_null(blocks.root);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("blocks");
    TCase *tcase = tcase_create("blocks");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, whole_range);
    tcase_add_test(tcase, best_fit);
    tcase_add_test(tcase, coalescing);
    tcase_add_test(tcase, ranges_that_touch_stay_apart);
    tcase_add_test(tcase, badly_aligned_blocks_are_passed_over);
    tcase_add_test(tcase, no_memory);
    tcase_add_test(tcase, random_use);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
