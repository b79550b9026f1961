// SPDX-License-Identifier: Apache-2.0
/* The tensors that wait to be fetched by the peers that they are put at. */
#include <check.h>

#include "server/put_sources.h"
#include "fakes/run_suite.h"

#define RECEIVER 7u

static struct tl_put_sources sources;
static struct tl_put_item items[3];
static struct tl_tensor *tensor;

static void setup(void)
{
    const uint64_t dim = 3;
    tl_put_sources_init(&sources);
    ck_assert_int_eq(tl_tensor_create(TL_U8, 1, &dim, &tensor, NULL), TL_OK);
    for (size_t i = 0; i < 3; i++)
        tl_put_sources_add(&sources, &items[i], tensor, RECEIVER);
}

static void teardown(void)
{
    for (size_t i = 0; i < 3; i++)
        tl_put_sources_remove(&sources, &items[i]);
    ck_assert(tl_list_is_empty(&sources.items));
    tl_put_sources_fini(&sources);
    tl_tensor_put(tensor);
}

static struct tl_tensor *find(uint64_t number, uint64_t receiver)
{
    struct tl_offer offer;
    ck_assert(tl_put_sources_find(&sources, TL_PUT_KEY, number, receiver, &offer));
    ck_assert(offer.tensor == NULL || (offer.step == number && offer.publication != 0 && !offer.is_one_shot));
    tl_tensor_put(offer.tensor);
    return offer.tensor;
}

START_TEST(each_is_found_by_its_number)
{
    struct tl_offer offer;
    ck_assert_uint_ne(items[0].number, 0);
    ck_assert_uint_ne(items[0].number, items[1].number);
    for (size_t i = 0; i < 3; i++)
        ck_assert_ptr_eq(find(items[i].number, RECEIVER), tensor);
    ck_assert_ptr_null(find(0, RECEIVER));
    ck_assert(!tl_put_sources_find(&sources, "weights", items[0].number, RECEIVER, &offer));
}
END_TEST

START_TEST(only_the_process_that_it_is_for_finds_it)
{
    ck_assert_ptr_null(find(items[0].number, RECEIVER + 1));
    ck_assert_ptr_null(find(items[0].number, 0));
}
END_TEST

START_TEST(nothing_is_found_when_the_put_is_over)
{
    uint64_t number = items[1].number;
    tl_put_sources_remove(&sources, &items[1]);
    tl_put_sources_remove(&sources, &items[1]);
    ck_assert_ptr_null(find(number, RECEIVER));
    ck_assert_ptr_eq(find(items[2].number, RECEIVER), tensor);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("put_sources");
    TCase *tcase = tcase_create("found");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, each_is_found_by_its_number);
    tcase_add_test(tcase, nothing_is_found_when_the_put_is_over);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("only_the_process_that_it_is_for_finds_it");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, only_the_process_that_it_is_for_finds_it);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
