// SPDX-License-Identifier: Apache-2.0
/* Options of the verbs provider: ranges, lists of devices, addresses, the limit of locked memory. */
#include <check.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "dataplane/verbs/verbs_internal.h"
#include "fakes/run_suite.h"

static struct tl_verbs_options defaults(void)
{
    struct tl_verbs_options options;
    tl_verbs_options_init(&options);
    return options;
}

static void expect_refused(const struct tl_verbs_options *options, const char *prefix)
{
    struct tl_error error = {0};
    ck_assert_int_eq(tl_verbs_options_check(options, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(error.code, TL_INVALID_ARGUMENT);
    ck_assert_msg(strncmp(error.message, prefix, strlen(prefix)) == 0, "'%s' does not begin with '%s'", error.message,
                  prefix);
}

START_TEST(defaults_are_accepted)
{
    struct tl_verbs_options options = defaults();
    ck_assert_int_eq(tl_verbs_options_check(&options, NULL), TL_OK);
    ck_assert_int_eq(options.gid_index, -1);
    ck_assert_int_eq(options.keys, TL_KEYS_WINDOW);
    ck_assert_int_lt(options.retry_count, 7);
}
END_TEST

#define EXPECT_RANGE(member, name, min, max)                                                                           \
    do {                                                                                                               \
        struct tl_verbs_options options = defaults();                                                                  \
        options.member = (min);                                                                                        \
        ck_assert_int_eq(tl_verbs_options_check(&options, NULL), TL_OK);                                               \
        options.member = (max);                                                                                        \
        ck_assert_int_eq(tl_verbs_options_check(&options, NULL), TL_OK);                                               \
        options.member = (min)-1;                                                                                      \
        expect_refused(&options, name ": ");                                                                           \
        options.member = (max) + 1;                                                                                    \
        expect_refused(&options, name ": ");                                                                           \
    } while (0)

START_TEST(numbers_have_ranges)
{
    EXPECT_RANGE(port, "port", 0, 255);
    EXPECT_RANGE(gid_index, "gid_index", -1, 255);
    EXPECT_RANGE(service_level, "service_level", 0, 7);
    EXPECT_RANGE(traffic_class, "traffic_class", 0, 255);
    EXPECT_RANGE(timeout, "timeout", 0, 31);
    EXPECT_RANGE(retry_count, "retry_count", 0, 7);
    EXPECT_RANGE(pkey_index, "pkey_index", 0, 65535);
    EXPECT_RANGE(queue_depth, "queue_depth", 16, 65536);
}
END_TEST

START_TEST(mtu_is_a_power_of_two)
{
    const uint32_t good[] = {0, 256, 512, 1024, 2048, 4096}, bad[] = {1, 128, 255, 257, 1500, 4095, 8192, UINT32_MAX};
    struct tl_verbs_options options = defaults();
    for (size_t i = 0; i < TL_ARRAY_COUNT(good); i++) {
        options.mtu_bytes = good[i];
        ck_assert_int_eq(tl_verbs_options_check(&options, NULL), TL_OK);
    }
    for (size_t i = 0; i < TL_ARRAY_COUNT(bad); i++) {
        options.mtu_bytes = bad[i];
        expect_refused(&options, "mtu: ");
    }
}
END_TEST

START_TEST(mtu_is_rounded_down)
{
    ck_assert_int_eq(verbs_mtu_from_bytes(4096), IBV_MTU_4096);
    ck_assert_int_eq(verbs_mtu_from_bytes(4095), IBV_MTU_2048);
    ck_assert_int_eq(verbs_mtu_from_bytes(1500), IBV_MTU_1024);
    ck_assert_int_eq(verbs_mtu_from_bytes(256), IBV_MTU_256);
    for (enum ibv_mtu mtu = IBV_MTU_256; mtu <= IBV_MTU_4096; mtu++)
        ck_assert_int_eq(verbs_mtu_from_bytes(verbs_mtu_to_bytes(mtu)), mtu);
}
END_TEST

START_TEST(addresses)
{
    static const char *const bad[] = {"",
                                      "host",
                                      "10.0.0",
                                      "10.0.0.1:4000",
                                      "[::1]",
                                      "::g",
                                      "1111:2222:3333:4444:5555:6666:7777:8888:9999:aaaa:bbbb"};
    struct tl_verbs_options options = defaults();
    uint8_t gid[16];
    char text[64];
    options.address = "10.1.2.3";
    ck_assert_int_eq(tl_verbs_options_check(&options, NULL), TL_OK);
    ck_assert(verbs_address_to_gid("10.1.2.3", gid));
    ck_assert_mem_eq(gid, "\0\0\0\0\0\0\0\0\0\0\xff\xff\x0a\x01\x02\x03", 16);
    ck_assert(verbs_gid_is_v4(gid));
    verbs_gid_to_text(gid, text, sizeof(text));
    ck_assert_str_eq(text, "10.1.2.3");
    ck_assert(verbs_address_to_gid("fe80::1%eth0", gid));
    ck_assert_mem_eq(gid, "\xfe\x80\0\0\0\0\0\0\0\0\0\0\0\0\0\x01", 16);
    ck_assert(!verbs_gid_is_v4(gid));
    verbs_gid_to_text(gid, text, sizeof(text));
    ck_assert_str_eq(text, "fe80::1");
    ck_assert(verbs_address_to_gid("::ffff:10.1.2.3", gid));
    ck_assert(verbs_gid_is_v4(gid));
    for (size_t i = 0; i < TL_ARRAY_COUNT(bad); i++) {
        options.address = bad[i];
        expect_refused(&options, "address: ");
    }
}
END_TEST

/* -------------------------------------------------------------------------------------------- lists of devices -- */

static const char *const devices[] = {"mlx5_0", "mlx5_1", "mlx5_10", "rxe0"};

static bool is_allowed(const char *list, const char *device, unsigned port)
{
    struct verbs_filter filter;
    bool is_allowed = false;
    ck_assert_int_eq(verbs_filter_parse(list, &filter, NULL), TL_OK);
    verbs_filter_resolve(&filter, devices, TL_ARRAY_COUNT(devices));
    verbs_filter_find(&filter, device, port, &is_allowed);
    return is_allowed;
}

START_TEST(no_list_allows_all)
{
    ck_assert(is_allowed(NULL, "mlx5_0", 1));
    ck_assert(is_allowed("", "rxe0", 2));
}
END_TEST

START_TEST(names_and_ports)
{
    ck_assert(is_allowed("mlx5_0:1", "mlx5_0", 1));
    ck_assert(!is_allowed("mlx5_0:1", "mlx5_0", 2));
    ck_assert(!is_allowed("mlx5_0:1", "rxe0", 1));
    ck_assert(is_allowed("rxe0,mlx5_0:255", "mlx5_0", 255));
}
END_TEST

START_TEST(exclusions)
{
    ck_assert(!is_allowed("mlx5,^mlx5_1", "mlx5_1", 1));
    ck_assert(is_allowed("mlx5,^mlx5_1", "mlx5_0", 1));
    ck_assert(is_allowed("^mlx5_1", "rxe0", 1));
    ck_assert(!is_allowed("^mlx5_1,mlx5_1", "mlx5_1", 1));
    ck_assert(!is_allowed("^mlx5_0:2", "mlx5_0", 2));
    ck_assert(is_allowed("^mlx5_0:2", "mlx5_0", 1));
}
END_TEST

START_TEST(prefixes_only_of_no_device)
{
    ck_assert(!is_allowed("mlx5_1", "mlx5_10", 1));
    ck_assert(is_allowed("mlx5_", "mlx5_10", 1));
    ck_assert(!is_allowed("=mlx5_", "mlx5_10", 1));
    ck_assert(is_allowed("^=mlx5", "mlx5_10", 1));
    ck_assert(!is_allowed("^mlx5", "mlx5_10", 1));
}
END_TEST

START_TEST(what_is_no_list)
{
    static const char *const bad[] = {
        ",",    "a,",   ",a",    "a,,b", "^",
        "=",    ":1",   "a:",    "a:0",  "a:256",
        "a:1x", "a:-1", "a:1:2", "../a", "a123456789012345678901234567890123456789012345678901234567890123"};
    struct tl_verbs_options options = defaults();
    for (size_t i = 0; i < TL_ARRAY_COUNT(bad); i++) {
        options.devices = bad[i];
        expect_refused(&options, "devices: ");
    }
}
END_TEST

START_TEST(lists_are_bounded)
{
    char list[4 * VERBS_FILTER_ENTRIES + 4] = "";
    struct tl_verbs_options options = defaults();
    for (unsigned i = 0; i < VERBS_FILTER_ENTRIES; i++)
        strcat(list, i == 0 ? "a" : ",a");
    options.devices = list;
    ck_assert_int_eq(tl_verbs_options_check(&options, NULL), TL_OK);
    strcat(list, ",a");
    expect_refused(&options, "devices: more than 32");
}
END_TEST

/* ----------------------------------------------------------------------------------------------- locked memory -- */

static void drop_privileges(rlim_t limit)
{
    struct rlimit limits = {limit, limit};
    ck_assert_int_eq(setrlimit(RLIMIT_MEMLOCK, &limits), 0);
    /* Root's CAP_IPC_LOCK goes with its user number. */
    if (geteuid() == 0) ck_assert_int_eq(setuid(65534), 0);
}

START_TEST(memlock_tells_the_remedy)
{
    static const char *const parts[] = {"1.00 GB", "65.5 KB", "ulimit -l unlimited", "LimitMEMLOCK=infinity",
                                        "--ulimit memlock=-1"};
    struct tl_error error = {0};
    drop_privileges(65536);
    struct tl_verbs_options options = {.pool_bytes = 1000000000};
    ck_assert_int_eq(tl_verbs_check_memlock(&options, &error), TL_RESOURCE_EXHAUSTED);
    for (size_t i = 0; i < TL_ARRAY_COUNT(parts); i++)
        ck_assert_msg(strstr(error.message, parts[i]) != NULL, "no '%s' in '%s'", parts[i], error.message);
}
END_TEST

START_TEST(memlock_that_suffices)
{
    enum { LIMIT_BYTES = 1 << 20 };
    drop_privileges(LIMIT_BYTES);
    /* The queues of one peer count, too: 16 slots and 4 that may be idle, and messages that leave. */
    struct tl_verbs_options options = {.pool_bytes = LIMIT_BYTES - (20 + 17) * TL_SLOT_BYTES, .queue_depth = 16};
    ck_assert_int_eq(tl_verbs_check_memlock(&options, NULL), TL_OK);
    options.pool_bytes++;
    ck_assert_int_eq(tl_verbs_check_memlock(&options, NULL), TL_RESOURCE_EXHAUSTED);
    options.pool_bytes--;
    ck_assert_int_eq(tl_verbs_check_memlock(&options, NULL), TL_OK);
    options.queue_depth++;
    ck_assert_int_eq(tl_verbs_check_memlock(&options, NULL), TL_RESOURCE_EXHAUSTED);
    ck_assert(verbs_exceeds_memlock(UINT64_MAX));
    /* An idle peer with a pool of its own locks at most 2 MiB. */
    ck_assert_uint_le(verbs_slots_default_bytes(TL_VERBS_DEFAULT_QUEUE_DEPTH), 1 << 20);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("verbs_options");
    TCase *options = tcase_create("options"), *lists = tcase_create("lists"), *memlock = tcase_create("memlock");
    tcase_add_test(options, defaults_are_accepted);
    tcase_add_test(options, numbers_have_ranges);
    tcase_add_test(options, mtu_is_a_power_of_two);
    tcase_add_test(options, mtu_is_rounded_down);
    tcase_add_test(options, addresses);
    tcase_add_test(lists, no_list_allows_all);
    tcase_add_test(lists, names_and_ports);
    tcase_add_test(lists, exclusions);
    tcase_add_test(lists, prefixes_only_of_no_device);
    tcase_add_test(lists, what_is_no_list);
    tcase_add_test(lists, lists_are_bounded);
    tcase_add_test(memlock, memlock_tells_the_remedy);
    tcase_add_test(memlock, memlock_that_suffices);
    suite_add_tcase(suite, options);
    suite_add_tcase(suite, lists);
    suite_add_tcase(suite, memlock);
    return run_suite(suite);
}
