// SPDX-License-Identifier: Apache-2.0
/* Shares of a limit: how much one client gets, how much newcomers get, how far the sum goes, and which connections are
 * one client. */
#include <check.h>
#include <string.h>

#include "base/shares.c"
#include "fakes/run_suite.h"

#define LIMIT 1200

static struct tl_shares *shares;

static void setup(void)
{
    shares = tl_shares_create("limits.test", LIMIT);
    ck_assert_ptr_nonnull(shares);
}

static void teardown(void)
{
    tl_shares_destroy(shares);
}

static struct tl_share_client link_number(uint64_t number)
{
    return (struct tl_share_client){.link = number};
}

/* Returns how much a client gets when it takes one at a time for as long as it can. */
static uint64_t take_all(uint64_t number, struct tl_share **ret_share)
{
    struct tl_share_client client = link_number(number);
    struct tl_error error;
    uint64_t count = 0;
    while (tl_shares_take(shares, &client, 1, ret_share, &error) == TL_OK)
        count++;
    ck_assert_int_eq(error.code, TL_RESOURCE_EXHAUSTED);
    return count;
}

START_TEST(one_alone_has_three_quarters)
{
    struct tl_share *share;
    struct tl_error error;
    struct tl_share_client client = link_number(1);
    ck_assert_uint_eq(take_all(1, &share), LIMIT * 3 / 4);
    ck_assert_int_eq(tl_shares_take(shares, &client, 7, &share, &error), TL_RESOURCE_EXHAUSTED);
    ck_assert_str_eq(error.message, "limits.test (1200) has no space for 7 more of this client, which holds 900 of 900 "
                                    "in use; one client may have three quarters; free something or raise limits.test");
    tl_shares_give(share, 10);
    ck_assert_uint_eq(take_all(1, &share), 10);
    tl_shares_give(share, 900);
    ck_assert_uint_eq(tl_shares_used(shares), 0);
    ck_assert_int_eq(tl_shares_take(shares, &client, 901, &share, &error), TL_RESOURCE_EXHAUSTED);
    ck_assert_int_eq(tl_shares_take(shares, &client, UINT64_MAX, &share, &error), TL_RESOURCE_EXHAUSTED);
}
END_TEST

START_TEST(newcomers_have_their_share)
{
    struct tl_share *share[20];
    uint64_t held[20], sum = 0;
    for (unsigned i = 0; i < 20; i++) {
        held[i] = take_all(i + 1, &share[i]);
        if (i > 0) ck_assert_uint_eq(held[i], LIMIT / (i + 1));
        sum += held[i];
        if (i == 3) ck_assert_uint_lt(sum, 2 * LIMIT);
    }
    ck_assert_uint_eq(tl_shares_used(shares), sum);
    ck_assert_uint_lt(sum, LIMIT * 34 / 10);
    for (unsigned i = 0; i < 20; i++)
        tl_shares_give(share[i], held[i]);
    ck_assert_uint_eq(tl_shares_used(shares), 0);
}
END_TEST

START_TEST(a_limit_of_one)
{
    struct tl_share *share, *other;
    struct tl_error error;
    struct tl_share_client second = link_number(2);
    tl_shares_destroy(shares);
    shares = tl_shares_create("limits.test", 1);
    ck_assert_uint_eq(take_all(1, &share), 1);
    ck_assert_int_eq(tl_shares_take(shares, &second, 1, &other, &error), TL_RESOURCE_EXHAUSTED);
    tl_shares_give(share, 1);
    ck_assert_int_eq(tl_shares_take(shares, &second, 1, &other, &error), TL_OK);
    tl_shares_give(other, 1);
}
END_TEST

/* Clients that hold nothing no longer count, however many there were. */
START_TEST(those_that_are_gone_do_not_count)
{
    struct tl_share *share;
    struct tl_error error;
    for (uint64_t i = 100; i < 10100; i++) {
        struct tl_share_client client = link_number(i);
        ck_assert_int_eq(tl_shares_take(shares, &client, 1, &share, &error), TL_OK);
        tl_shares_give(share, 1);
    }
    ck_assert_uint_le(HASH_COUNT(shares->clients), IDLE_COUNT);
    ck_assert_uint_eq(take_all(1, &share), LIMIT * 3 / 4);
    struct tl_share *second;
    ck_assert_uint_eq(take_all(2, &second), LIMIT / 2);
    tl_shares_give(share, LIMIT * 3 / 4);
    tl_shares_give(second, LIMIT / 2);
}
END_TEST

/* More clients hold something than are kept when they hold nothing. */
START_TEST(many_at_a_time)
{
    static struct tl_share *all[LIMIT + 10];
    struct tl_error error;
    for (uint64_t i = 0; i < LIMIT; i++) {
        struct tl_share_client client = link_number(i + 1);
        ck_assert_int_eq(tl_shares_take(shares, &client, 1, &all[i], &error), TL_OK);
    }
    struct tl_share_client late = link_number(LIMIT + 1);
    ck_assert_int_eq(tl_shares_take(shares, &late, 1, &all[LIMIT], &error), TL_RESOURCE_EXHAUSTED);
    for (uint64_t i = 0; i < LIMIT; i++)
        tl_shares_give(all[i], 1);
    ck_assert_uint_eq(HASH_COUNT(shares->clients), IDLE_COUNT);
}
END_TEST

START_TEST(given_back_after_the_end)
{
    struct tl_share *share;
    struct tl_error error;
    struct tl_share_client client = link_number(1);
    ck_assert_int_eq(tl_shares_take(shares, &client, 5, &share, &error), TL_OK);
    tl_shares_destroy(shares);
    tl_shares_give(share, 2);
    tl_shares_give(share, 3); /* This frees it, or a sanitizer reports it. */
    shares = NULL;
    tl_shares_destroy(NULL);
}
END_TEST

static bool is_same(const char *a, const char *b)
{
    struct tl_share_client first = tl_share_client_of(a), second = tl_share_client_of(b);
    return memcmp(&first, &second, sizeof(first)) == 0;
}

START_TEST(addresses)
{
    ck_assert(is_same("ipv4:10.0.0.1:4000", "ipv4:10.0.0.1:5"));
    ck_assert(!is_same("ipv4:10.0.0.1:4000", "ipv4:10.0.0.2:4000"));
    ck_assert(is_same("ipv6:[fd00::1]:4000", "ipv6:%5Bfd00:0::1%5D:5"));
    ck_assert(is_same("ipv6:%5Bfe80::1%25eth0%5D:4000", "ipv6:[fe80::1]:4"));
    ck_assert(!is_same("ipv6:[fd00::1]:4000", "ipv6:[fd00::2]:4000"));
    ck_assert(is_same("ipv6:[::ffff:10.0.0.1]:4000", "ipv4:10.0.0.1:5"));
    ck_assert(is_same("unix:/tmp/a", "unix-abstract:b"));
    ck_assert(is_same("unix:", ""));
    ck_assert(is_same("ipv4:10.0.0.1.5.6.7.8.9.10.11.12", "unix:"));
    ck_assert(is_same("ipv6:[0000:0000:0000:0000:0000:0000:0000:0000:0000:0000:0000]:1", "unix:"));
    ck_assert(!is_same("ipv4:10.0.0.1:4000", "unix:"));
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("shares");
    TCase *cases = tcase_create("shares");
    tcase_add_checked_fixture(cases, setup, teardown);
    tcase_add_test(cases, one_alone_has_three_quarters);
    tcase_add_test(cases, newcomers_have_their_share);
    tcase_add_test(cases, a_limit_of_one);
    tcase_add_test(cases, those_that_are_gone_do_not_count);
    tcase_add_test(cases, many_at_a_time);
    tcase_add_test(cases, given_back_after_the_end);
    tcase_add_test(cases, addresses);
    suite_add_tcase(suite, cases);
    return run_suite(suite);
}
