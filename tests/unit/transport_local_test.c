// SPDX-License-Identifier: Apache-2.0
/* What the settings mean for the plane of the host. */
#include <check.h>
#include <string.h>

#include "base/clock.h"
#include "fakes/run_suite.h"
#include "server/transports/transport.h"

static int64_t attempt_ns(int64_t connect_timeout_ns)
{
    const struct tl_settings settings = {.connect_timeout_ns = connect_timeout_ns};
    struct tl_transport_options options;
    tl_transport_local.read(&settings, &options);
    ck_assert_int_lt(options.engine.connect_ns, options.attempt_ns);
    return options.engine.connect_ns;
}

/* Dozens of workers that connect all to all on few cores take seconds for each path: to give up means to begin anew,
 * all of them. */
START_TEST(an_attempt_may_take_as_long_as_connecting)
{
    ck_assert_int_eq(attempt_ns(TL_NS_PER_SEC), TL_NS_PER_SEC);
    ck_assert_int_eq(attempt_ns(10 * TL_NS_PER_SEC), 10 * TL_NS_PER_SEC);
    ck_assert_int_eq(attempt_ns(3600 * TL_NS_PER_SEC), 10 * TL_NS_PER_SEC);
}
END_TEST

START_TEST(half_of_memory)
{
    ck_assert_uint_gt(tl_transport_half_of_memory(), 1 << 20);
}
END_TEST

START_TEST(a_folder_for_sockets_allows_other_addresses)
{
    const struct tl_settings without = {.local.socket_folder = NULL}, with = {.local.socket_folder = "/run/x"};
    ck_assert_ptr_nonnull(strstr(tl_transport_local.address_remedy(&without), "set local.socket_folder"));
    ck_assert_ptr_null(tl_transport_local.address_remedy(&with));
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("transport_local");
    TCase *tcase = tcase_create("transport_local");
    tcase_add_test(tcase, an_attempt_may_take_as_long_as_connecting);
    tcase_add_test(tcase, half_of_memory);
    tcase_add_test(tcase, a_folder_for_sockets_allows_other_addresses);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
