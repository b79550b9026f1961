// SPDX-License-Identifier: Apache-2.0
/* Which host names and addresses mean this machine, and how often the name service is asked. */
#include <check.h>
#include <netdb.h>

static unsigned lookup_count;

static int fake_getaddrinfo(const char *host, const char *service, const struct addrinfo *hints,
                            struct addrinfo **ret_found)
{
    struct addrinfo numeric = *hints;
    lookup_count++;
    numeric.ai_flags |= AI_NUMERICHOST;
    return getaddrinfo(host, service, &numeric, ret_found);
}

#define getaddrinfo fake_getaddrinfo
#include "fakes/run_suite.h"
#include "server/cli/local_host.c"

START_TEST(each_host_is_looked_up_once)
{
    const char *reason;
    struct tl_local_hosts *hosts = tl_local_hosts_create();
    ck_assert_ptr_nonnull(hosts);
    for (unsigned i = 0; i < 3; i++) {
        ck_assert(tl_local_hosts_has(hosts, "127.0.0.1", &reason));
        ck_assert_ptr_null(reason);
        ck_assert(tl_local_hosts_has(hosts, "::1", &reason));
        ck_assert(!tl_local_hosts_has(hosts, "192.0.2.1", &reason));
        ck_assert_ptr_null(reason);
        ck_assert(!tl_local_hosts_has(hosts, "no.such.host.invalid", &reason));
        ck_assert_ptr_nonnull(reason);
        ck_assert_uint_eq(lookup_count, 4);
    }
    tl_local_hosts_destroy(hosts);
    tl_local_hosts_destroy(NULL);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("local_host");
    TCase *tcase = tcase_create("local_host");
    tcase_add_test(tcase, each_host_is_looked_up_once);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
