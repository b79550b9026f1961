// SPDX-License-Identifier: Apache-2.0
/* Messages, writes, exposures, sleeping and the end over the local provider. */
#include "dataplane/local.h"

#include <check.h>

#include "base/clock.h"
#include "dataplane/probe.h"

#define PATIENCE_NS (30 * TL_NS_PER_SEC)

START_TEST(a_probe)
{
    struct tl_provider *provider;
    struct tl_error error = {0};
    ck_assert_msg(tl_local_open(&(struct tl_local_options){0}, &provider, &error) == TL_OK, "%s", error.message);
    ck_assert_msg(tl_provider_probe(provider, TL_KEYS_REGION, PATIENCE_NS, &error) == TL_OK, "%s", error.message);
    provider->ops->close(provider);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("local_provider");
    TCase *tcase = tcase_create("local_provider");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, a_probe);
    suite_add_tcase(suite, tcase);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed == 0 ? 0 : 1;
}
