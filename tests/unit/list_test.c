// SPDX-License-Identifier: Apache-2.0
/* Intrusive lists. */
#include <check.h>
#include <stdlib.h>

#include "base/list.h"
#include "fakes/run_suite.h"

struct item {
    int number;
    struct tl_list link;
};

static struct tl_list head, other;
static struct item items[4];

static void setup(void)
{
    tl_list_init(&head);
    tl_list_init(&other);
    for (int i = 0; i < 4; i++) {
        items[i].number = i;
        tl_list_init(&items[i].link);
    }
}

/* Returns the elements of a list as decimal digits, first in front, or -1 when the back links differ. */
static int digits(struct tl_list *list)
{
    int forward = 0, backward = 0, scale = 1;
    TL_LIST_FOREACH(list, node)
    forward = forward * 10 + TL_CONTAINER_OF(node, struct item, link)->number;
    for (struct tl_list *node = list->prev; node != list; node = node->prev, scale *= 10)
        backward += scale * TL_CONTAINER_OF(node, struct item, link)->number;
    return forward == backward ? forward : -1;
}

START_TEST(push_and_pop)
{
    ck_assert(tl_list_is_empty(&head));
    ck_assert_ptr_null(tl_list_pop_front(&head));
    ck_assert(!tl_list_is_linked(&items[1].link));
    tl_list_push_back(&head, &items[2].link);
    tl_list_push_back(&head, &items[3].link);
    tl_list_push_front(&head, &items[1].link);
    ck_assert(tl_list_is_linked(&items[1].link));
    ck_assert_int_eq(digits(&head), 123);
    ck_assert_ptr_eq(tl_list_pop_front(&head), &items[1].link);
    ck_assert(!tl_list_is_linked(&items[1].link));
    ck_assert_int_eq(digits(&head), 23);
}
END_TEST

START_TEST(insert_and_remove)
{
    tl_list_push_back(&head, &items[1].link);
    tl_list_push_back(&head, &items[3].link);
    tl_list_insert_before(&items[3].link, &items[2].link);
    ck_assert_int_eq(digits(&head), 123);
    tl_list_remove(&items[2].link);
    ck_assert_int_eq(digits(&head), 13);
    tl_list_remove(&items[2].link);
    ck_assert_int_eq(digits(&head), 13);
    tl_list_remove(&items[1].link);
    tl_list_remove(&items[3].link);
    ck_assert(tl_list_is_empty(&head));
}
END_TEST

START_TEST(splice)
{
    tl_list_splice_back(&head, &other);
    ck_assert(tl_list_is_empty(&head));
    tl_list_push_back(&other, &items[2].link);
    tl_list_push_back(&other, &items[3].link);
    tl_list_splice_back(&head, &other);
    ck_assert_int_eq(digits(&head), 23);
    ck_assert(tl_list_is_empty(&other));
    tl_list_push_back(&other, &items[1].link);
    tl_list_splice_back(&head, &other);
    ck_assert_int_eq(digits(&head), 231);
}
END_TEST

START_TEST(foreach_safe_allows_removal)
{
    int seen = 0;
    for (int i = 1; i < 4; i++)
        tl_list_push_back(&head, &items[i].link);
    TL_LIST_FOREACH_SAFE(&head, node)
    {
        seen = seen * 10 + TL_CONTAINER_OF(node, struct item, link)->number;
        tl_list_remove(node);
    }
    ck_assert_int_eq(seen, 123);
    ck_assert(tl_list_is_empty(&head));
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("list");
    TCase *tcase = tcase_create("list");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, push_and_pop);
    tcase_add_test(tcase, insert_and_remove);
    tcase_add_test(tcase, splice);
    tcase_add_test(tcase, foreach_safe_allows_removal);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
