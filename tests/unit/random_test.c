// SPDX-License-Identifier: Apache-2.0
/* Random numbers: never 0, never repeated, every bit used, and every answer of the kernel is handled. */
#include <check.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

static uint64_t scripted[4];
static int scripted_errors[4];
static unsigned script_len, script_place;

static ssize_t fake_getrandom(void *buffer, size_t len, unsigned flags)
{
    if (script_place >= script_len) return getrandom(buffer, len, flags);
    unsigned i = script_place++;
    errno = scripted_errors[i];
    if (scripted_errors[i] != 0) return -1;
    memcpy(buffer, &scripted[i], len);
    return (ssize_t)len;
}

#define getrandom fake_getrandom
#include "base/random.c"
#include "fakes/run_suite.h"

START_TEST(differs)
{
    uint64_t zeros = 0, ones = 0, first = tl_random_u64(), second = tl_random_u64();
    ck_assert_uint_ne(first, second);
    for (int i = 0; i < 200; i++) {
        uint64_t number = tl_random_u64();
        ones |= number;
        zeros |= ~number;
    }
    ck_assert_uint_eq(ones, UINT64_MAX);
    ck_assert_uint_eq(zeros, UINT64_MAX);
}
END_TEST

START_TEST(zero_is_drawn_again)
{
    scripted[1] = 42;
    script_len = 2;
    ck_assert_uint_eq(tl_random_u64(), 42);
}
END_TEST

START_TEST(interruption_is_repeated)
{
    scripted_errors[0] = EINTR;
    scripted[1] = 43;
    script_len = 2;
    ck_assert_uint_eq(tl_random_u64(), 43);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("random");
    TCase *tcase = tcase_create("random");
    tcase_add_test(tcase, differs);
    tcase_add_test(tcase, zero_is_drawn_again);
    tcase_add_test(tcase, interruption_is_repeated);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
