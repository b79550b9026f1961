// SPDX-License-Identifier: Apache-2.0
/* Every method asks whether its caller may take its action before it does anything. */
#include <check.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "fakes/fake_worker.h"
#include "fakes/raw_call.h"
#include "fakes/run_suite.h"

/* As docs/security.md lists them. */
static const struct {
    const char *method;
    enum tl_action action;
} methods[] = {
    {"/tensorlane.v1.Transfer/Exchange", TL_ACTION_READ},
    {"/tensorlane.v1.Transfer/Receive", TL_ACTION_READ},
    {"/tensorlane.v1.Transfer/Publish", TL_ACTION_PUSH},
    {"/tensorlane.v1.Transfer/Withdraw", TL_ACTION_WITHDRAW},
    {"/tensorlane.v1.Transfer/List", TL_ACTION_LIST},
    {"/tensorlane.v1.Cluster/Identify", TL_ACTION_PEERS},
    {"/tensorlane.v1.Cluster/Probe", TL_ACTION_PEERS},
    {"/tensorlane.v1.Cluster/Echo", TL_ACTION_HEALTH},
    {"/grpc.health.v1.Health/Check", TL_ACTION_HEALTH},
    {"/grpc.health.v1.Health/Watch", TL_ACTION_HEALTH},
    {"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", TL_ACTION_LIST},
    {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", TL_ACTION_LIST},
};

static struct fake_worker worker;
static struct raw_call call;

static void setup(void)
{
    fake_worker_init(&worker);
}

static void teardown(void)
{
    fake_worker_stop(&worker, 0);
}

START_TEST(every_method_asks_before_it_does_anything)
{
    unsigned asked[TL_ACTION_COUNT] = {0};
    worker.script.refused = (1U << TL_ACTION_COUNT) - 1;
    fake_worker_start(&worker);
    for (size_t i = 0; i < TL_ARRAY_COUNT(methods); i++) {
        char words[32];
        snprintf(words, sizeof(words), "nobody may %s", tl_action_names[methods[i].action]);
        raw_call_open(&call, worker.address, methods[i].method, TL_TIME_NEVER);
        const struct tl_error *status = raw_call_finish(&call);
        ck_assert_msg(status->code == TL_PERMISSION_DENIED, "%s: %s", methods[i].method, status->message);
        ck_assert_msg(strcmp(status->message, words) == 0, "%s: %s", methods[i].method, status->message);
        raw_call_close(&call);
        asked[methods[i].action]++;
    }
    const struct fake_seen seen = fake_worker_seen(&worker);
    ck_assert_mem_eq(seen.asked, asked, sizeof(asked));
    ck_assert_uint_eq(seen.requests, 0);
    ck_assert_uint_eq(seen.admitted, 0);
}
END_TEST

START_TEST(one_action_is_refused_without_the_others)
{
    worker.script.refused = 1U << TL_ACTION_PEERS;
    fake_worker_start(&worker);
    for (size_t i = 0; i < TL_ARRAY_COUNT(methods); i++) {
        raw_call_open(&call, worker.address, methods[i].method, TL_TIME_NEVER);
        raw_call_half_close(&call);
        bool is_refused = raw_call_finish(&call)->code == TL_PERMISSION_DENIED;
        ck_assert_msg(is_refused == (methods[i].action == TL_ACTION_PEERS), "%s", methods[i].method);
        raw_call_close(&call);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("services_refused");
    TCase *tcase = tcase_create("every_method_asks_before_it_does_anything");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, every_method_asks_before_it_does_anything);
    tcase_add_test(tcase, one_action_is_refused_without_the_others);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
