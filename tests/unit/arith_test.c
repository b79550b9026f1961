// SPDX-License-Identifier: Apache-2.0
/* Checked arithmetic at its edges. */
#include <check.h>
#include <stdlib.h>

#include "base/arith.h"
#include "fakes/run_suite.h"

START_TEST(add)
{
    uint64_t sum = 5;
    ck_assert(tl_add_u64(UINT64_MAX - 1, 1, &sum));
    ck_assert_uint_eq(sum, UINT64_MAX);
    sum = 5;
    ck_assert(!tl_add_u64(UINT64_MAX, 1, &sum));
    ck_assert_uint_eq(sum, 5);
}
END_TEST

START_TEST(mul)
{
    uint64_t product = 5;
    ck_assert(tl_mul_u64(UINT64_C(1) << 32, (UINT64_C(1) << 32) - 1, &product));
    ck_assert_uint_eq(product, UINT64_MAX - UINT32_MAX);
    product = 5;
    ck_assert(!tl_mul_u64(UINT64_C(1) << 32, UINT64_C(1) << 32, &product));
    ck_assert_uint_eq(product, 5);
    ck_assert(tl_mul_u64(UINT64_MAX, 0, &product));
    ck_assert_uint_eq(product, 0);
}
END_TEST

START_TEST(min_max)
{
    ck_assert_uint_eq(tl_min_u64(1, 2), 1);
    ck_assert_uint_eq(tl_min_u64(2, 1), 1);
    ck_assert_uint_eq(tl_max_u64(UINT64_MAX, 1), UINT64_MAX);
    ck_assert_uint_eq(tl_max_u64(1, 1), 1);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("arith");
    TCase *tcase = tcase_create("arith");
    tcase_add_test(tcase, add);
    tcase_add_test(tcase, mul);
    tcase_add_test(tcase, min_max);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
