// SPDX-License-Identifier: Apache-2.0
/* Addresses and networks as text: which are equal, and which are on this machine. */
#include <check.h>
#include <netinet/in.h>

#include "base/ip.h"
#include "control/endpoint.h"
#include "fakes/run_suite.h"

static struct tl_ip ip(const char *text)
{
    struct tl_ip result;
    ck_assert_msg(tl_ip_parse(text, &result), "%s", text);
    return result;
}

static bool is_equal(const char *a, const char *b)
{
    struct tl_ip first = ip(a), second = ip(b);
    return tl_ip_is_equal(&first, &second);
}

static bool has(const char *network, const char *address)
{
    struct tl_ip_network parsed;
    struct tl_ip member = ip(address);
    ck_assert_msg(tl_ip_network_parse(network, &parsed), "%s", network);
    return tl_ip_network_has(&parsed, &member);
}

START_TEST(what_is_the_same)
{
    ck_assert(is_equal("10.0.0.7", "::ffff:10.0.0.7"));
    ck_assert(is_equal("fd00::7", "fd00:0:0::7"));
    ck_assert(is_equal("fe80::1%eth0", "fe80::1%eth1"));
    ck_assert(!is_equal("10.0.0.7", "10.0.0.8"));
    char text[TL_IP_TEXT_BYTES];
    struct tl_ip four = ip("::ffff:10.0.0.7"), six = ip("fd00:0:0::7");
    ck_assert_str_eq(tl_ip_format(&four, text), "10.0.0.7");
    ck_assert_str_eq(tl_ip_format(&six, text), "fd00::7");
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_addr = {htonl(0x0a000007)}};
    struct tl_ip got, expected = ip("10.0.0.7");
    ck_assert(tl_ip_of_sockaddr((const struct sockaddr *)&v4, &got));
    ck_assert(tl_ip_is_equal(&got, &expected));
    v4.sin_family = AF_UNIX;
    ck_assert(!tl_ip_of_sockaddr((const struct sockaddr *)&v4, &got));
}
END_TEST

START_TEST(what_is_no_address)
{
    static const char *const texts[] = {"",     "10.0.0",  "10.0.0.256", "10.0.0.7:1", "10.0.0.7%eth0",
                                        "host", "fd00::g", "/8"};
    struct tl_ip got;
    for (unsigned i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
        ck_assert_msg(!tl_ip_parse(texts[i], &got), "%s", texts[i]);
}
END_TEST

START_TEST(what_is_in_a_network)
{
    ck_assert(has("10.1.0.0/16", "10.1.255.3"));
    ck_assert(has("10.1.0.0/16", "::ffff:10.1.0.0"));
    ck_assert(!has("10.1.0.0/16", "10.2.0.1"));
    ck_assert(has("10.1.2.128/25", "10.1.2.129"));
    ck_assert(!has("10.1.2.128/25", "10.1.2.127"));
    ck_assert(has("10.1.2.3", "10.1.2.3"));
    ck_assert(!has("10.1.2.3", "10.1.2.2"));
    ck_assert(has("0.0.0.0/0", "192.168.7.7"));
    ck_assert(!has("0.0.0.0/0", "fd00::1"));
    ck_assert(has("fd00::/8", "fdff::1"));
    ck_assert(has("::/0", "10.0.0.1"));
    struct tl_ip_network network;
    static const char *const texts[] = {
        "",           "/8",          "10.1.0.0/",       "10.1.0.0/33", "10.1.0.0/x", "10.1.0.0/-1",
        "fd00::/129", "fd00::/0008", "fe80::1%eth0/64", "host/8"};
    for (unsigned i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
        ck_assert_msg(!tl_ip_network_parse(texts[i], &network), "%s", texts[i]);
}
END_TEST

START_TEST(what_is_on_this_machine)
{
    ck_assert(tl_endpoint_is_here("ipv4:127.0.0.1:4000"));
    ck_assert(tl_endpoint_is_here("ipv4:127.9.9.9:4000"));
    ck_assert(tl_endpoint_is_here("ipv6:[::1]:4000"));
    ck_assert(tl_endpoint_is_here("unix:/run/tensorlane"));
    ck_assert(tl_endpoint_is_here("unix-abstract:tensorlane"));
    /* These are for documentation (RFC 5737, RFC 3849): no machine has them. */
    ck_assert(!tl_endpoint_is_here("ipv4:192.0.2.1:4000"));
    ck_assert(!tl_endpoint_is_here("ipv6:[2001:db8::1]:4000"));
    ck_assert(!tl_endpoint_is_here("ipv6:[fe80::1%25nowhere]:4000"));
    ck_assert(!tl_endpoint_is_here("fd:7"));
    ck_assert(!tl_endpoint_is_here(""));
}
END_TEST

START_TEST(what_the_kernel_takes)
{
    static const char *const texts[] = {"10.0.0.7", "fd00::7"};
    for (size_t i = 0; i < 2; i++) {
        struct sockaddr_storage address;
        struct tl_ip given = ip(texts[i]), back;
        ck_assert_uint_eq(tl_ip_to_sockaddr(&given, 4000, &address),
                          i == 0 ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6));
        ck_assert_int_eq(address.ss_family, i == 0 ? AF_INET : AF_INET6);
        /* The port has the same place in both. */
        ck_assert_uint_eq(((struct sockaddr_in *)(void *)&address)->sin_port, htons(4000));
        ck_assert(tl_ip_of_sockaddr((struct sockaddr *)&address, &back));
        ck_assert(tl_ip_is_equal(&given, &back));
        ck_assert_str_eq(tl_ip_family(&given), i == 0 ? "IPv4" : "IPv6");
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("ip");
    TCase *all = tcase_create("all");
    tcase_add_test(all, what_is_the_same);
    tcase_add_test(all, what_is_no_address);
    tcase_add_test(all, what_is_in_a_network);
    tcase_add_test(all, what_is_on_this_machine);
    tcase_add_test(all, what_the_kernel_takes);
    suite_add_tcase(suite, all);
    return run_suite(suite);
}
