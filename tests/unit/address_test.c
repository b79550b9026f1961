// SPDX-License-Identifier: Apache-2.0
/* Addresses: which texts are valid, how they are split, and one spelling for comparing. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "config/address.h"
#include "config/config.h"
#include "fakes/run_suite.h"

#define LABEL "a23456789012345678901234567890123456789012345678901234567890123" /* A label of 63 bytes. */

static struct tl_error error;

static void check_refused(const char *address, const char *fragment)
{
    char host[256] = "unchanged";
    uint16_t port = 7;
    ck_assert_msg(tl_address_split(address, host, sizeof(host), &port, &error) == TL_INVALID_ARGUMENT, "%s is accepted",
                  address);
    ck_assert_int_eq(error.code, TL_INVALID_ARGUMENT);
    ck_assert_msg(strstr(error.message, fragment) != NULL, "%s: %s", address, error.message);
    ck_assert_str_eq(host, "unchanged");
    ck_assert_uint_eq(port, 7);
    ck_assert_int_eq(tl_address_split(address, host, sizeof(host), &port, NULL), TL_INVALID_ARGUMENT);
}

START_TEST(split_takes_names_and_numbers)
{
    static const struct {
        const char *address;
        const char *host;
        uint16_t port;
    } cases[] = {
        {"127.0.0.1:4000", "127.0.0.1", 4000},
        {"host:1", "host", 1},
        {"host:65535", "host", 65535},
        {"host:0", "host", 0},
        {"Node_7.rack-2.example.:80", "Node_7.rack-2.example.", 80},
        {"[::1]:4000", "::1", 4000},
        {"[fe80::1%eth0]:4000", "fe80::1%eth0", 4000},
        {"[::ffff:10.0.0.1]:5", "::ffff:10.0.0.1", 5},
        {"[2001:DB8::0:1]:5", "2001:DB8::0:1", 5},
        {"3com.example:5", "3com.example", 5},
        {LABEL ".x:5", LABEL ".x", 5},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(cases); i++) {
        char host[256];
        uint16_t port;
        ck_assert_msg(tl_address_split(cases[i].address, host, sizeof(host), &port, &error) == TL_OK, "%s: %s",
                      cases[i].address, error.message);
        ck_assert_str_eq(host, cases[i].host);
        ck_assert_uint_eq(port, cases[i].port);
    }
}
END_TEST

START_TEST(an_address_without_host_is_refused)
{
    check_refused("", "has no host");
    check_refused(":4000", "has no host");
    check_refused("[]:4000", "has no host");
}
END_TEST

START_TEST(an_address_without_port_is_refused)
{
    check_refused("host", "has no port");
    check_refused("[::1]", "has no port");
    check_refused("[::1]4000", "has no port");
    check_refused("host:", "has a port that is no number");
}
END_TEST

START_TEST(a_port_that_is_none_is_refused)
{
    static const char *const ports[] = {"65536", "99999", "100000", "-1",  "+1",   " 1",    "1 ",
                                        "0x10",  "010",   "00",     "1.5", "port", "4000\n"};
    for (size_t i = 0; i < TL_ARRAY_COUNT(ports); i++) {
        char address[32];
        strcpy(address, "host:");
        strcat(address, ports[i]);
        check_refused(address, "has a port that is no number up to 65535");
    }
}
END_TEST

START_TEST(ipv6_needs_brackets)
{
    check_refused("::1", "write an IPv6 address in brackets");
    check_refused("::1:4000", "write an IPv6 address in brackets");
    check_refused("2001:db8::1:4000", "write an IPv6 address in brackets");
    check_refused("[::1:4000", "has no closing bracket");
    check_refused("[", "has no closing bracket");
}
END_TEST

START_TEST(brackets_need_ipv6)
{
    check_refused("[host]:4000", "has no IPv6 address in its brackets");
    check_refused("[127.0.0.1]:4000", "has no IPv6 address in its brackets");
    check_refused("[:::1]:4000", "has no IPv6 address in its brackets");
    check_refused("[1:2:3:4:5:6:7:8:9]:4000", "has no IPv6 address in its brackets");
    check_refused("[fe80::1%]:4000", "has no IPv6 address in its brackets");
    check_refused("[fe80::1%a b]:4000", "has no IPv6 address in its brackets");
    check_refused("[fe80::1%0123456789abcdef]:4000", "has no IPv6 address in its brackets");
    check_refused("[00000000000000000000000000000000000000000000000001::1]:4000",
                  "has no IPv6 address in its brackets");
}
END_TEST

START_TEST(a_host_that_is_none_is_refused)
{
    check_refused("127.0.0.256:4000", "no IPv4 address");
    check_refused("127.1:4000", "no IPv4 address");
    check_refused("2130706433:4000", "no IPv4 address");
    check_refused("1.2.3.4.:4000", "no IPv4 address");
    check_refused("01.2.3.4:4000", "no IPv4 address");
    check_refused("a..b:4000", "no name");
    check_refused(".a:4000", "no name");
    check_refused("-a:4000", "no name");
    check_refused("a b:4000", "no name");
    check_refused("a%62:4000", "no name");
    check_refused("caf\xc3\xa9:4000", "no name");
    check_refused("\xff:4000", "no name");
    check_refused("x" LABEL ":4000", "no name");
    check_refused("http://host:4000", "has a scheme or a path");
    check_refused("host:4000/path", "has a scheme or a path");
    check_refused("unix:/run/socket", "has a scheme or a path");
}
END_TEST

START_TEST(a_host_may_have_255_bytes)
{
    char address[600], host[256];
    uint16_t port;
    address[0] = '\0';
    for (size_t i = 0; i < 4; i++) {
        strcat(address, LABEL);
        if (i < 3) strcat(address, ".");
    }
    strcat(address, ":1");
    ck_assert_int_eq(tl_address_split(address, host, sizeof(host), &port, &error), TL_OK);
    ck_assert_uint_eq(strlen(host), 255);
    address[255] = '.';
    strcpy(address + 256, ":1");
    check_refused(address, "more than 255 bytes");
    memset(address, 'a', sizeof(address) - 1);
    address[sizeof(address) - 1] = '\0';
    check_refused(address, "more than 255 bytes");
}
END_TEST

START_TEST(a_small_buffer_is_refused)
{
    char host[5] = "....";
    uint16_t port;
    ck_assert_int_eq(tl_address_split("hosts:1", host, sizeof(host), &port, &error), TL_INVALID_ARGUMENT);
    ck_assert_str_eq(host, "....");
    ck_assert_int_eq(tl_address_split("host:1", host, sizeof(host), &port, &error), TL_OK);
    ck_assert_str_eq(host, "host");
}
END_TEST

START_TEST(one_spelling_for_equal_addresses)
{
    static const struct {
        const char *address;
        const char *canonical;
    } cases[] = {
        {"HOST.Example.:80", "host.example:80"},
        {"10.0.0.1:80", "10.0.0.1:80"},
        {"[0:0:0:0:0:0:0:1]:80", "[::1]:80"},
        {"[2001:DB8::]:80", "[2001:db8::]:80"},
        {"[FE80::1%Eth0]:80", "[fe80::1%Eth0]:80"},
        {"[1111:2222:3333:4444:5555:6666:7777:8888%0123456789abcde]:65535",
         "[1111:2222:3333:4444:5555:6666:7777:8888%0123456789abcde]:65535"},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(cases); i++) {
        char canonical[TL_ADDRESS_BYTES];
        ck_assert_int_eq(tl_address_check(cases[i].address, TL_ADDRESS_DIAL, canonical, &error), TL_OK);
        ck_assert_str_eq(canonical, cases[i].canonical);
    }
}
END_TEST

START_TEST(what_cannot_be_dialled_can_be_listened_on)
{
    static const struct {
        const char *address;
        const char *fragment;
    } cases[] = {
        {"host:0", "port 0, which cannot be dialled"},
        {"0.0.0.0:4000", "cannot be dialled by other machines"},
        {"[::]:4000", "cannot be dialled by other machines"},
        {"[0:0::0]:4000", "cannot be dialled by other machines"},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(cases); i++) {
        char canonical[TL_ADDRESS_BYTES];
        ck_assert_int_eq(tl_address_check(cases[i].address, TL_ADDRESS_LISTEN, canonical, &error), TL_OK);
        ck_assert_int_eq(tl_address_check(cases[i].address, TL_ADDRESS_DIAL, canonical, &error), TL_INVALID_ARGUMENT);
        ck_assert_ptr_nonnull(strstr(error.message, cases[i].fragment));
    }
}
END_TEST

START_TEST(the_same_host)
{
    ck_assert(tl_address_is_same_host("gpu-0:4000", "gpu-0:4001"));
    ck_assert(tl_address_is_same_host("[fd00::7]:4000", "[fd00::7]:4001"));
    ck_assert(!tl_address_is_same_host("gpu-0:4000", "gpu-01:4000"));
    ck_assert(!tl_address_is_same_host("[fd00::7]:4000", "[fd00::8]:4000"));
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("address");
    TCase *tcase = tcase_create("address");
    tcase_add_test(tcase, split_takes_names_and_numbers);
    tcase_add_test(tcase, an_address_without_host_is_refused);
    tcase_add_test(tcase, an_address_without_port_is_refused);
    tcase_add_test(tcase, a_port_that_is_none_is_refused);
    tcase_add_test(tcase, ipv6_needs_brackets);
    tcase_add_test(tcase, brackets_need_ipv6);
    tcase_add_test(tcase, a_host_that_is_none_is_refused);
    tcase_add_test(tcase, a_host_may_have_255_bytes);
    tcase_add_test(tcase, a_small_buffer_is_refused);
    tcase_add_test(tcase, one_spelling_for_equal_addresses);
    tcase_add_test(tcase, what_cannot_be_dialled_can_be_listened_on);
    tcase_add_test(tcase, the_same_host);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
