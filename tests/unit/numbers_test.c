// SPDX-License-Identifier: Apache-2.0
/* Queues of numbers: order, memory that is used again, and lack of memory. */
#include "fakes/fault_alloc.h"

#include "base/numbers.c"

#include <check.h>

#include "fakes/run_suite.h"

static void expect(const struct tl_numbers *numbers, uint64_t first, size_t count)
{
    bool is_right = numbers->count == count;
    for (size_t i = 0; i < count; i++)
        is_right &= tl_numbers_items(numbers)[i] == first + i;
    ck_assert_msg(is_right, "not the %zu numbers from %llu", count, (unsigned long long)first);
}

START_TEST(empty_queue_needs_no_memory)
{
    struct tl_numbers numbers = {0};
    tl_numbers_drop(&numbers, 0);
    ck_assert(tl_numbers_push_all(&numbers, NULL, 0));
    expect(&numbers, 0, 0);
    tl_numbers_fini(&numbers);
}
END_TEST

START_TEST(comes_out_as_it_went_in)
{
    struct tl_numbers numbers = {0};
    uint64_t pushed = 0, dropped = 0;
    for (unsigned round = 0; round < 500; round++) {
        bool is_pushed = true;
        for (unsigned i = 0; i < round % 7; i++)
            is_pushed &= tl_numbers_push(&numbers, pushed++);
        ck_assert(is_pushed);
        size_t drop = round % 5 < pushed - dropped ? round % 5 : (size_t)(pushed - dropped);
        tl_numbers_drop(&numbers, drop);
        dropped += drop;
        expect(&numbers, dropped, (size_t)(pushed - dropped));
    }
    tl_numbers_drop(&numbers, (size_t)(pushed - dropped));
    expect(&numbers, 0, 0);
    tl_numbers_fini(&numbers);
}
END_TEST

START_TEST(memory_is_used_again)
{
    struct tl_numbers numbers = {0};
    bool is_pushed = true;
    for (uint64_t i = 0; i < 100000; i++) {
        is_pushed &= tl_numbers_push(&numbers, i);
        if (i >= 10) tl_numbers_drop(&numbers, 1);
    }
    ck_assert(is_pushed);
    expect(&numbers, 99990, 10);
    ck_assert_uint_le(numbers.capacity, FIRST_CAPACITY);
    tl_numbers_fini(&numbers);
}
END_TEST

START_TEST(many_at_once)
{
    uint64_t items[1000];
    struct tl_numbers numbers = {0};
    for (uint64_t i = 0; i < 1000; i++)
        items[i] = i;
    ck_assert(tl_numbers_push_all(&numbers, items, 300));
    tl_numbers_drop(&numbers, 100);
    ck_assert(tl_numbers_push_all(&numbers, items + 300, 700));
    expect(&numbers, 100, 900);
    tl_numbers_fini(&numbers);
}
END_TEST

START_TEST(stays_as_it_is_without_memory)
{
    struct tl_numbers numbers = {0};
    fault_arm(1);
    ck_assert(!tl_numbers_push(&numbers, 1));
    ck_assert(fault_was_hit());
    expect(&numbers, 0, 0);
    for (uint64_t i = 0; i < FIRST_CAPACITY; i++)
        ck_assert(tl_numbers_push(&numbers, i));
    fault_arm(1);
    ck_assert(!tl_numbers_push(&numbers, 1));
    ck_assert(fault_was_hit());
    expect(&numbers, 0, FIRST_CAPACITY);
    ck_assert(!tl_numbers_push_all(&numbers, tl_numbers_items(&numbers), SIZE_MAX / 2));
    ck_assert(!tl_numbers_push_all(&numbers, tl_numbers_items(&numbers), SIZE_MAX));
    expect(&numbers, 0, FIRST_CAPACITY);
    tl_numbers_fini(&numbers);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("numbers");
    TCase *queue = tcase_create("queue");
    tcase_add_test(queue, empty_queue_needs_no_memory);
    tcase_add_test(queue, comes_out_as_it_went_in);
    tcase_add_test(queue, memory_is_used_again);
    tcase_add_test(queue, many_at_once);
    tcase_add_test(queue, stays_as_it_is_without_memory);
    suite_add_tcase(suite, queue);
    return run_suite(suite);
}
