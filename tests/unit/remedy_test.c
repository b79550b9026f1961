// SPDX-License-Identifier: Apache-2.0
/* Messages are taken apart into what is wrong and what to do. */
#include <check.h>
#include <string.h>

#include "fakes/run_suite.h"
#include "server/cli/remedy.h"
#include "server/transports/transport_choice.h"

static void expect(const char *message, const char *reason, const char *remedy)
{
    const char *found;
    size_t len = tl_remedy_split(message, &found);
    ck_assert_uint_eq(len, strlen(reason));
    ck_assert_mem_eq(message, reason, len);
    ck_assert_str_eq(found, remedy);
}

START_TEST(messages)
{
    expect("", "", "");
    expect("it is down", "it is down", "");
    expect("it is down; pull it up", "it is down", "pull it up");
    expect("it is down; pull it up; wait", "it is down", "pull it up; wait");
}
END_TEST

START_TEST(lists_of_devices)
{
    expect(TL_NO_PORT "; a:1: down; b:1: excluded", TL_NO_PORT "; a:1: down; b:1: excluded", "");
    expect("nothing: " TL_NO_PORT "; a:1: down; b:1: excluded; repair that",
           "nothing: " TL_NO_PORT "; a:1: down; b:1: excluded", "repair that");
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("remedy");
    TCase *tcase = tcase_create("remedy");
    tcase_add_test(tcase, messages);
    tcase_add_test(tcase, lists_of_devices);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
