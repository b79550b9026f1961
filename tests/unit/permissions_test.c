// SPDX-License-Identifier: Apache-2.0
/* The rules of "security.allow": who may do what, what a refusal says, and how often it is logged. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "fakes/fake_clock.h"
#include "fakes/log_capture.h"
#include "fakes/run_suite.h"
#include "server/peers/permissions.h"

#define FILES "\"tls\": {\"ca\": \"a\", \"certificate\": \"c\", \"key\": \"k\"}"

static struct tl_config *config;
static struct tl_permissions *permissions;
static struct tl_error error;

/* The permissions of ps:0 with these rules; "": the default. */
static void create(const char *allow)
{
    char text[2048];
    snprintf(text, sizeof(text),
             "{\"cluster\": {\"ps\": [\"a:1\", \"b:1\"], \"worker\": {\"0\": \"c:1\", \"10\": \"d:1\"}}, \"security\": "
             "{" FILES "%s%s}}",
             allow[0] != '\0' ? ", \"allow\": " : "", allow);
    ck_assert_msg(tl_config_parse(text, strlen(text), "c.json", NULL, &config, &error) == TL_OK, "%s", error.message);
    ck_assert_int_eq(
        tl_permissions_create(config, &config->tasks[0].settings.security, config->tasks[0].name, &permissions, &error),
        TL_OK);
}

static void destroy(void)
{
    tl_permissions_destroy(permissions);
    tl_config_destroy(config);
}

static struct tl_identity proven(const char *name, bool is_member)
{
    struct tl_identity identity = {.source = TL_IDENTITY_PROVEN, .is_member = is_member, .address = "ipv4:10.0.0.7:5"};
    snprintf(identity.certified, sizeof(identity.certified), "%s", name);
    return identity;
}

static bool may(const struct tl_identity *caller, enum tl_action action)
{
    uint64_t refused = tl_permissions_refused(permissions);
    enum tl_status status = tl_permissions_check(permissions, caller, action, &error);
    ck_assert_int_eq(tl_permissions_allow(permissions, caller, action), status == TL_OK);
    ck_assert_uint_eq(tl_permissions_refused(permissions), refused + (status != TL_OK));
    if (status != TL_OK) ck_assert_int_eq(status, TL_PERMISSION_DENIED);
    return status == TL_OK;
}

/* The actions that the caller may take. */
static unsigned actions_of(const char *name, bool is_member)
{
    const struct tl_identity caller = proven(name, is_member);
    unsigned actions = 0;
    for (unsigned i = 0; i < TL_ACTION_COUNT; i++)
        if (may(&caller, (enum tl_action)i)) actions |= 1U << i;
    return actions;
}

#define A(action) (1U << TL_ACTION_##action)
#define ALL ((1U << TL_ACTION_COUNT) - 1)

START_TEST(without_rules_members_read_list_push_and_see_peers)
{
    create("");
    ck_assert_uint_eq(actions_of("/job:worker/task:10", true), A(READ) | A(LIST) | A(PUSH) | A(PEERS) | A(HEALTH));
    ck_assert_uint_eq(actions_of("spiffe://example.org/client/ann", false), A(HEALTH));
    ck_assert_uint_eq(actions_of("ann.example.org", false), A(HEALTH));
    /* Certificates of tasks that the cluster does not have are no members'. */
    ck_assert_uint_eq(actions_of("/job:worker/task:1", true), A(HEALTH));
    ck_assert_uint_eq(actions_of("/job:chief/task:0", true), A(HEALTH));
    destroy();
}
END_TEST

START_TEST(a_name_that_is_claimed_counts_for_nothing)
{
    create("[{\"who\": [\"any\"], \"what\": [\"read\"]}]");
    struct tl_identity caller = {.source = TL_IDENTITY_CLAIMED, .name = "/job:ps/task:1", .is_member = true};
    ck_assert(!may(&caller, TL_ACTION_READ));
    ck_assert(may(&caller, TL_ACTION_HEALTH));
    ck_assert_ptr_nonnull(strstr(error.message, "a caller without a certificate may not read at /job:ps/task:0: "));
    caller.source = TL_IDENTITY_PROVEN; /* by a certificate without a name */
    ck_assert(!may(&caller, TL_ACTION_READ));
    destroy();
}
END_TEST

START_TEST(a_worker_may_do_everything_to_itself)
{
    create("[]");
    ck_assert_uint_eq(actions_of("/job:ps/task:0", true), ALL);
    ck_assert_uint_eq(actions_of("/job:ps/task:0", false), A(HEALTH));
    ck_assert_uint_eq(actions_of("/job:ps/task:1", true), A(HEALTH));
    destroy();
}
END_TEST

START_TEST(each_role_names_its_callers)
{
    create("[{\"who\": [\"any\"], \"what\": [\"list\"]}, {\"who\": [\"member\"], \"what\": [\"read\"]},"
           " {\"who\": [\"job:worker\"], \"what\": [\"push\"]}, {\"who\": [\"task:worker:0\"], \"what\": "
           "[\"withdraw\"]}, {\"who\": [\"spiffe://example.org/client/ann\", \"Ann.Example.org\", \"ann.\"], "
           "\"what\": [\"publish\"]}]");
    ck_assert_uint_eq(actions_of("/job:ps/task:1", true), A(LIST) | A(READ) | A(HEALTH));
    ck_assert_uint_eq(actions_of("/job:worker/task:10", true), A(LIST) | A(READ) | A(PUSH) | A(HEALTH));
    ck_assert_uint_eq(actions_of("/job:worker/task:0", true), A(LIST) | A(READ) | A(PUSH) | A(WITHDRAW) | A(HEALTH));
    ck_assert_uint_eq(actions_of("/job:worker/task:5", true), A(LIST) | A(HEALTH)); /* no task of the cluster */
    ck_assert_uint_eq(actions_of("spiffe://example.org/client/ann", false), A(LIST) | A(PUBLISH) | A(HEALTH));
    ck_assert_uint_eq(actions_of("ann.example.org", false), A(LIST) | A(PUBLISH) | A(HEALTH));
    ck_assert_uint_eq(actions_of("ann", false), A(LIST) | A(PUBLISH) | A(HEALTH));
    ck_assert_uint_eq(actions_of("ann.example.org.evil", false), A(LIST) | A(HEALTH));
    ck_assert_uint_eq(actions_of("spiffe://example.org/client/anna", false), A(LIST) | A(HEALTH));
    ck_assert_uint_eq(actions_of("spiffe://example.org/client/Ann", false), A(LIST) | A(HEALTH));
    /* A client whose name looks like that of a task. */
    ck_assert_uint_eq(actions_of("/job:worker/task:0", false), A(LIST) | A(HEALTH));
    destroy();
}
END_TEST

START_TEST(a_trust_domain_is_a_role)
{
    create("[{\"who\": [\"member\"], \"what\": [\"read\"]}, {\"who\": [\"trust-domain:other.org\"], \"what\": "
           "[\"list\"]}]");
    ck_assert_uint_eq(actions_of("spiffe://other.org/job/ps/task/1", false), A(LIST) | A(HEALTH));
    ck_assert_uint_eq(actions_of("spiffe://other.org/client/ann", false), A(LIST) | A(HEALTH));
    ck_assert_uint_eq(actions_of("spiffe://other.org.evil/client/ann", false), A(HEALTH));
    ck_assert_uint_eq(actions_of("spiffe://example.org/client/ann", false), A(HEALTH));
    ck_assert_uint_eq(actions_of("/job:ps/task:1", true), A(READ) | A(HEALTH));
    destroy();
}
END_TEST

START_TEST(a_task_of_another_trust_domain_is_a_role)
{
    create("[{\"who\": [\"spiffe://other.org/job/ps/task/1\"], \"what\": [\"read\"]}]");
    ck_assert_uint_eq(actions_of("spiffe://other.org/job/ps/task/1", false), A(READ) | A(HEALTH));
    ck_assert_uint_eq(actions_of("spiffe://other.org/job/ps/task/10", false), A(HEALTH));
    ck_assert_uint_eq(actions_of("spiffe://other.org/job/ps/task/0", false), A(HEALTH));
    ck_assert_uint_eq(actions_of("spiffe://third.org/job/ps/task/1", false), A(HEALTH));
    ck_assert_uint_eq(actions_of("/job:ps/task:1", true), A(HEALTH));
    destroy();
    create("[{\"who\": [\"spiffe://other.org/client/ann.\"], \"what\": [\"read\"]}]");
    ck_assert_uint_eq(actions_of("spiffe://other.org/client/ann.", false), A(READ) | A(HEALTH));
    ck_assert_uint_eq(actions_of("spiffe://other.org/client/ann", false), A(HEALTH));
    destroy();
}
END_TEST

START_TEST(without_certificates_everybody_may_do_everything)
{
    const struct tl_identity caller = {.source = TL_IDENTITY_NONE};
    for (unsigned i = 0; i < TL_ACTION_COUNT; i++) {
        ck_assert_int_eq(tl_permissions_check(NULL, &caller, (enum tl_action)i, &error), TL_OK);
        ck_assert(tl_permissions_allow(NULL, &caller, (enum tl_action)i));
    }
    ck_assert_uint_eq(tl_permissions_refused(NULL), 0);
    tl_permissions_destroy(NULL);
}
END_TEST

START_TEST(a_refusal_names_caller_action_and_those_who_may)
{
    const struct tl_identity caller = proven("/job:worker/task:10", true);
    create("[{\"who\": [\"job:ps\", \"ann.example.org\"], \"what\": [\"push\", \"peers\"]}, {\"who\": "
           "[\"task:worker:0\"], \"what\": [\"push\"]}]");
    ck_assert(!may(&caller, TL_ACTION_PUSH));
    ck_assert_str_eq(error.message, "/job:worker/task:10 may not push at /job:ps/task:0: security.allow gives \"push\" "
                                    "to job:ps, ann.example.org, task:worker:0; add a rule there");
    ck_assert(!may(&caller, TL_ACTION_PEERS));
    ck_assert_str_eq(error.message, "/job:worker/task:10 may not see peers at /job:ps/task:0: security.allow gives "
                                    "\"peers\" to job:ps, ann.example.org; add a rule there");
    ck_assert(!may(&caller, TL_ACTION_WITHDRAW));
    ck_assert_str_eq(error.message, "/job:worker/task:10 may not withdraw at /job:ps/task:0: security.allow gives "
                                    "\"withdraw\" to no caller; add a rule there");
    ck_assert_int_eq(tl_permissions_check(permissions, &caller, TL_ACTION_WITHDRAW, NULL), TL_PERMISSION_DENIED);
    destroy();
}
END_TEST

START_TEST(a_long_list_of_roles_is_cut)
{
    char allow[2048] = "[{\"what\": [\"push\"], \"who\": [";
    const struct tl_identity caller = proven("/job:ps/task:1", true);
    for (int i = 0; i < 40; i++)
        snprintf(allow + strlen(allow), sizeof(allow) - strlen(allow), "%s\"client-%02d.example.org\"",
                 i > 0 ? "," : "", i);
    strcat(allow, "]}]");
    create(allow);
    ck_assert(!may(&caller, TL_ACTION_PUSH));
    ck_assert_ptr_nonnull(strstr(error.message, "client-00.example.org, client-01.example.org, "));
    ck_assert_ptr_nonnull(strstr(error.message, ", ...; add a rule there"));
    ck_assert_uint_lt(strlen(error.message), 500);
    destroy();
}
END_TEST

START_TEST(each_caller_is_logged_once_a_minute)
{
    struct tl_identity caller = proven("ann.example.org", false);
    const struct tl_identity other = proven("bob.example.org", false);
    create("");
    log_capture_begin();
    for (int i = 0; i < 3; i++) {
        for (int j = 0; j < 100; j++)
            ck_assert(!may(j % 2 == 0 ? &caller : &other, TL_ACTION_READ));
        ck_assert_uint_eq(log_capture_count("caller=ann.example.org action=read address=ipv4:10.0.0.7:5"), i + 1);
        ck_assert_uint_eq(log_capture_count("caller=bob.example.org"), i + 1);
        fake_clock_advance(60 * TL_NS_PER_SEC);
    }
    ck_assert_uint_eq(tl_permissions_refused(permissions), 300);
    destroy();
}
END_TEST

START_TEST(many_callers_fill_no_log)
{
    create("");
    log_capture_begin();
    for (int i = 0; i < 1000; i++) {
        char name[32];
        snprintf(name, sizeof(name), "c%d.example.org", i);
        const struct tl_identity caller = proven(name, false);
        ck_assert(!may(&caller, TL_ACTION_READ));
        ck_assert(!may(&caller, TL_ACTION_LIST));
    }
    ck_assert_uint_eq(log_capture_count("a caller was refused"), 64);
    fake_clock_advance(60 * TL_NS_PER_SEC);
    const struct tl_identity last = proven("c999.example.org", false);
    ck_assert(!may(&last, TL_ACTION_READ));
    ck_assert_uint_eq(log_capture_count("caller=c999.example.org"), 1);
    destroy();
}
END_TEST

#define ADD(name)                                                                                                      \
    do {                                                                                                               \
        TCase *tcase = tcase_create(#name);                                                                            \
        tcase_add_test(tcase, name);                                                                                   \
        suite_add_tcase(suite, tcase);                                                                                 \
    } while (0)

int main(void)
{
    Suite *suite = suite_create("permissions");
    ADD(without_rules_members_read_list_push_and_see_peers);
    ADD(a_name_that_is_claimed_counts_for_nothing);
    ADD(a_worker_may_do_everything_to_itself);
    ADD(each_role_names_its_callers);
    ADD(a_trust_domain_is_a_role);
    ADD(a_task_of_another_trust_domain_is_a_role);
    ADD(without_certificates_everybody_may_do_everything);
    ADD(a_refusal_names_caller_action_and_those_who_may);
    ADD(a_long_list_of_roles_is_cut);
    ADD(each_caller_is_logged_once_a_minute);
    ADD(many_callers_fill_no_log);
    return run_suite(suite);
}
