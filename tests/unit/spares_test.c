// SPDX-License-Identifier: Apache-2.0
/* Objects that are used again: what is returned is zeroed, and no more are kept than a bound. */
#include <check.h>

#include "base/spares.h"
#include "fakes/run_suite.h"

#define OBJECT_BYTES 40

START_TEST(objects_are_used_again)
{
    static const char zeros[OBJECT_BYTES];
    struct tl_spares spares = {0};
    for (unsigned round = 0; round < 2; round++) {
        char *one = tl_spares_get(&spares, OBJECT_BYTES);
        char *other = tl_spares_get(&spares, OBJECT_BYTES);
        ck_assert_ptr_ne(one, other);
        ck_assert_mem_eq(one, zeros, OBJECT_BYTES);
        ck_assert_mem_eq(other, zeros, OBJECT_BYTES);
        memset(one, 1, OBJECT_BYTES);
        memset(other, 2, OBJECT_BYTES);
        tl_spares_put(&spares, one);
        tl_spares_put(&spares, other);
        ck_assert_uint_eq(spares.count, TL_MAX_SPARES < 2 ? TL_MAX_SPARES : 2);
    }
    tl_spares_fini(&spares);
    ck_assert_ptr_null(spares.first);
}
END_TEST

START_TEST(no_more_are_kept_than_the_bound)
{
    struct tl_spares spares = {0};
    for (unsigned i = 0; i < TL_MAX_SPARES + 10; i++)
        tl_spares_put(&spares, calloc(1, OBJECT_BYTES));
    ck_assert_uint_eq(spares.count, TL_MAX_SPARES);
    tl_spares_fini(&spares);
    ck_assert_uint_eq(spares.count, 0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("spares");
    TCase *tcase = tcase_create("spares");
    tcase_add_test(tcase, objects_are_used_again);
    tcase_add_test(tcase, no_more_are_kept_than_the_bound);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
