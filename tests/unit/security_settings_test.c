// SPDX-License-Identifier: Apache-2.0
/* The settings under "security": files of each process, rules, and what contradicts what. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "config/config.h"
#include "config/settings_layer.h"
#include "fakes/run_suite.h"

#define CLUSTER "\"cluster\": {\"ps\": [\"a:1\", \"b:1\"], \"worker\": {\"4\": \"[::1]:2\"}}"
#define FILES "\"ca\": \"ca.pem\", \"certificate\": \"{name}.pem\", \"key\": \"/k/{name}/{name}.key\""
#define TLS "\"tls\": {" FILES "}"

static struct tl_config *config;
static struct tl_error error;

/* Reads a configuration with these settings under "security", and these others. */
static enum tl_status read_settings(const char *security, const char *others)
{
    char text[8192];
    snprintf(text, sizeof(text), "{" CLUSTER "%s,\n\"security\": {%s}}", others, security);
    return tl_config_parse(text, strlen(text), "c.json", "dir", &config, &error);
}

static void check_accepted(const char *security, const char *others)
{
    ck_assert_msg(read_settings(security, others) == TL_OK, "%s", error.message);
}

static void check_refused(const char *security, const char *others, const char *message)
{
    ck_assert_int_eq(read_settings(security, others), TL_INVALID_ARGUMENT);
    ck_assert_str_eq(error.message, message);
}

static const char *value_of(const struct tl_config_task *task, const char *path)
{
    struct tl_config_value values[64];
    size_t count = tl_config_values(config, task, values, TL_ARRAY_COUNT(values));
    for (size_t i = 0; i < count; i++) {
        if (strcmp(values[i].path, path) == 0) return values[i].value;
    }
    ck_abort_msg("there is no value %s", path);
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------- files -- */

START_TEST(a_name_stands_for_the_process)
{
    check_accepted(TLS, "");
    ck_assert_str_eq(config->tasks[0].settings.security.ca, "dir/ca.pem");
    ck_assert_str_eq(config->tasks[0].settings.security.certificate, "dir/ps-0.pem");
    ck_assert_str_eq(config->tasks[0].settings.security.key, "/k/ps-0/ps-0.key");
    ck_assert_ptr_null(config->tasks[0].settings.security.crl);
    ck_assert_str_eq(config->tasks[2].settings.security.certificate, "dir/worker-4.pem");
    ck_assert_str_eq(config->client_settings.security.certificate, "dir/client.pem");
    ck_assert_str_eq(value_of(&config->tasks[1], "security.tls.certificate"), "\"dir/ps-1.pem\"");
    ck_assert_str_eq(value_of(&config->tasks[1], "security.tls.ca"), "\"dir/ca.pem\"");
    ck_assert_str_eq(value_of(&config->tasks[1], "security.tls.crl"), "\"\"");
    ck_assert_str_eq(value_of(NULL, "security.tls.key"), "\"/k/client/client.key\"");
    tl_config_destroy(config);
}
END_TEST

START_TEST(names_stay_when_the_environment_changes_settings)
{
    static const char *const variables[] = {"RDMA_SL=3", NULL};
    const struct tl_config_environment environment = {.variables = variables};
    check_accepted(TLS, "");
    ck_assert_int_eq(tl_config_apply_environment(config, &environment, &error), TL_OK);
    ck_assert_uint_eq(config->tasks[1].settings.verbs.service_level, 3);
    ck_assert_str_eq(config->tasks[1].settings.security.certificate, "dir/ps-1.pem");
    ck_assert_str_eq(config->client_settings.security.certificate, "dir/client.pem");
    ck_assert_str_eq(value_of(&config->tasks[1], "security.tls.certificate"), "\"dir/ps-1.pem\"");
    tl_config_destroy(config);
}
END_TEST

START_TEST(tasks_and_jobs_have_files_of_their_own)
{
    check_accepted(TLS, ", \"jobs\": {\"ps\": {\"security\": {\"tls\": {\"key\": \"ps.key\"}}, \"tasks\": {\"1\": "
                        "{\"security\": {\"tls\": {\"crl\": \"{name}.crl\", \"min_version\": \"1.2\"}}}}}}");
    ck_assert_str_eq(config->tasks[0].settings.security.key, "dir/ps.key");
    ck_assert_str_eq(config->tasks[1].settings.security.crl, "dir/ps-1.crl");
    ck_assert_int_eq(config->tasks[1].settings.security.min_version, TL_TLS_1_2);
    ck_assert_int_eq(config->tasks[0].settings.security.min_version, TL_TLS_1_3);
    ck_assert_str_eq(config->tasks[2].settings.security.key, "/k/worker-4/worker-4.key");
    tl_config_destroy(config);
}
END_TEST

START_TEST(authority_certificate_and_key_belong_together)
{
    static const char rest[] = "\"ca\", \"certificate\" and \"key\" belong together: set all three, or none";
    char message[256];
    snprintf(message, sizeof(message), "c.json:2:28: security.tls.ca: \"certificate\" is missing; %s", rest);
    check_refused("\"tls\": {\"ca\": \"x\"}", "", message);
    snprintf(message, sizeof(message), "c.json:2:37: security.tls.certificate: \"ca\" is missing; %s", rest);
    check_refused("\"tls\": {\"certificate\": \"x\"}", "", message);
    /* The place is that of the file that was set last. */
    snprintf(message, sizeof(message), "c.json:1:109: jobs.ps.security.tls.key: \"key\" is missing; %s", rest);
    check_refused(TLS, ", \"jobs\": {\"ps\": {\"security\": {\"tls\": {\"key\": \"\"}}}}", message);
}
END_TEST

START_TEST(nothing_protects_without_certificates)
{
    static const char rest[] = "without certificates this protects nothing; set \"ca\", \"certificate\" and \"key\" of "
                               "security.tls, or remove it";
    char message[256];
    snprintf(message, sizeof(message), "c.json:2:29: security.tls.crl: %s", rest);
    check_refused("\"tls\": {\"crl\": \"x\"}", "", message);
    snprintf(message, sizeof(message), "c.json:2:37: security.tls.min_version: %s", rest);
    check_refused("\"tls\": {\"min_version\": \"1.2\"}", "", message);
    snprintf(message, sizeof(message), "c.json:2:25: security.encrypt: %s", rest);
    check_refused("\"encrypt\": \"require\"", "", message);
    snprintf(message, sizeof(message), "c.json:2:23: security.allow: %s", rest);
    check_refused("\"allow\": []", "", message);
    check_accepted("", "");
    tl_config_destroy(config);
}
END_TEST

START_TEST(what_must_be_encrypted_does_not_travel_over_rdma)
{
    static const char *const protocols[] = {"grpc+verbs", "grpc+gdr"};
    char others[64], message[512];
    check_accepted(TLS ", \"encrypt\": \"require\"", "");
    tl_config_destroy(config);
    check_accepted(TLS ", \"encrypt\": \"require\"", ", \"protocol\": \"grpc+local\", \"rdma\": \"off\"");
    tl_config_destroy(config);
    check_accepted(TLS, ", \"rdma\": \"require\"");
    tl_config_destroy(config);
    check_refused(
        "\"encrypt\": \"require\", " TLS, ", \"rdma\": \"require\"",
        "c.json:2:25: security.encrypt: rdma is \"require\", and security.encrypt is \"require\", but nothing "
        "encrypts what RDMA carries; write rdma \"prefer\", or encrypt \"prefer\"");
    for (size_t i = 0; i < TL_ARRAY_COUNT(protocols); i++) {
        snprintf(others, sizeof(others), ", \"protocol\": \"%s\"", protocols[i]);
        snprintf(message, sizeof(message),
                 "c.json:2:25: security.encrypt: protocol is \"%s\", and security.encrypt is \"require\", but nothing "
                 "encrypts what RDMA carries; write protocol \"auto\", or encrypt \"prefer\"",
                 protocols[i]);
        check_refused("\"encrypt\": \"require\", " TLS, others, message);
    }
}
END_TEST

/* ------------------------------------------------------------------------------------------------------- rules -- */

START_TEST(rules_are_roles_and_actions)
{
    static const struct {
        enum tl_role_kind kind;
        const char *name;
    } expected[] = {
        {TL_ROLE_ANY, "any"},
        {TL_ROLE_MEMBER, "member"},
        {TL_ROLE_JOB, "/job:ps/task:"},
        {TL_ROLE_TASK, "/job:worker/task:4"},
        {TL_ROLE_CLIENT, "spiffe://example.org/client/ann"},
        {TL_ROLE_CLIENT, "ann.example.org"},
        {TL_ROLE_CLIENT, "ann"},
        {TL_ROLE_TRUST_DOMAIN, "spiffe://other.org/"},
        {TL_ROLE_TRUST_DOMAIN, "spiffe://third_1/"},
        {TL_ROLE_CLIENT, "spiffe://other.org/job/ps/task/0"},
    };
    check_accepted(TLS ", \"allow\": [{\"who\": [\"any\", \"member\", \"job:ps\", \"task:worker:4\", "
                       "\"spiffe://example.org/client/ann\", \"ann.example.org\", \"ann.\", "
                       "\"trust-domain:other.org\", \"trust-domain:third_1\", "
                       "\"spiffe://other.org/job/ps/task/0\"], \"what\": [\"read\", "
                       "\"health\"]}, {\"what\": [\"withdraw\", \"publish\"], \"who\": [\"job:worker\"]}]",
                   "");
    const struct tl_security_settings *security = &config->tasks[0].settings.security;
    ck_assert_uint_eq(security->allow_count, 2);
    ck_assert_str_eq(security->foreign_names, "spiffe://example.org/client/ann other.org third_1 "
                                              "spiffe://other.org/job/ps/task/0");
    ck_assert_uint_eq(security->allow[0].role_count, TL_ARRAY_COUNT(expected));
    for (size_t i = 0; i < TL_ARRAY_COUNT(expected); i++) {
        ck_assert_int_eq(security->allow[0].roles[i].kind, expected[i].kind);
        ck_assert_str_eq(security->allow[0].roles[i].name, expected[i].name);
    }
    ck_assert_uint_eq(security->allow[0].actions, 1U << TL_ACTION_READ | 1U << TL_ACTION_HEALTH);
    ck_assert_uint_eq(security->allow[1].actions, 1U << TL_ACTION_PUBLISH | 1U << TL_ACTION_WITHDRAW);
    ck_assert_str_eq(value_of(&config->tasks[0], "security.allow"),
                     "[{\"who\": [\"any\", \"member\", \"job:ps\", \"task:worker:4\", "
                     "\"spiffe://example.org/client/ann\", \"ann.example.org\", \"ann.\", "
                     "\"trust-domain:other.org\", \"trust-domain:third_1\", "
                     "\"spiffe://other.org/job/ps/task/0\"], \"what\": [\"read\", "
                     "\"health\"]}, {\"who\": [\"job:worker\"], \"what\": [\"publish\", \"withdraw\"]}]");
    tl_config_destroy(config);
}
END_TEST

START_TEST(rules_replace_those_below)
{
    check_accepted(TLS ", \"allow\": []",
                   ", \"jobs\": {\"ps\": {\"security\": {\"allow\": [{\"who\": [\"any\"], \"what\": [\"list\"]}]}}}");
    ck_assert_uint_eq(config->client_settings.security.allow_count, 0);
    ck_assert_uint_eq(config->tasks[0].settings.security.allow_count, 1);
    ck_assert_uint_eq(config->tasks[0].settings.security.allow->actions, 1U << TL_ACTION_LIST);
    ck_assert_uint_eq(config->tasks[2].settings.security.allow_count, 0);
    tl_config_destroy(config);
}
END_TEST

/* Words at which the error points at a role of the first rule. */
static void check_role_refused(const char *role, const char *reason)
{
    char security[4096], message[1024];
    snprintf(security, sizeof(security), "\"allow\": [{\"what\": [\"read\"], \"who\": [\"%s\"]}], " TLS, role);
    snprintf(message, sizeof(message), "c.json:2:51: security.allow[0].who[0]: %s", reason);
    check_refused(security, "", message);
}

START_TEST(words_that_are_no_roles_are_refused)
{
    static const char *const wrong[] = {"job:",
                                        "task:ps",
                                        "task:ps:",
                                        "task:ps:x",
                                        "task:ps:01",
                                        "task::0",
                                        "jobs",
                                        "spiffe://",
                                        "spiffe://a",
                                        "spiffe://a/",
                                        "spiffe://a//b",
                                        "spiffe://a/b c",
                                        "spiffe://a/b/",
                                        "spiffe://Example.org/a",
                                        "spiffe://.org/a",
                                        "spiffe:///a",
                                        "spiffe://a/../b",
                                        "spiffe://a/.",
                                        "trust-domain:a/b",
                                        "ann",
                                        "a..b",
                                        ".a",
                                        "http://a/b",
                                        "a.b/c",
                                        "",
                                        "trust-domain:",
                                        "trust-domain:A",
                                        "trust-domain:a/b",
                                        "trust-domain:a..b",
                                        "trust-domain:a."};
    static const char *const unnamed[] = {"spiffe://other.org/job/ps", "spiffe://other.org/job/ps/task/01",
                                          "spiffe://other.org/job/ps/task/0/1", "spiffe://other.org/job/ps/tasks/0"};
    check_role_refused("membr", "\"membr\" is no role; did you mean \"member\"?");
    check_role_refused("Any", "\"Any\" is no role; did you mean \"any\"?");
    check_role_refused("ann", "\"ann\" is no role; did you mean \"any\"?");
    check_role_refused("everybody",
                       "\"everybody\" is no role; use one of \"any\", \"member\", \"job:JOB\", "
                       "\"task:JOB:INDEX\", \"trust-domain:NAME\", \"spiffe://DOMAIN/PATH\", \"NAME.DOMAIN\"");
    for (size_t i = 0; i < TL_ARRAY_COUNT(wrong); i++) {
        char security[256];
        snprintf(security, sizeof(security), TLS ", \"allow\": [{\"who\": [\"%s\"], \"what\": [\"read\"]}]", wrong[i]);
        ck_assert_int_eq(read_settings(security, ""), TL_INVALID_ARGUMENT);
        ck_assert_msg(strstr(error.message, " is no role; ") != NULL, "%s", error.message);
    }
    for (size_t i = 0; i < TL_ARRAY_COUNT(unnamed); i++) {
        char message[512];
        snprintf(message, sizeof(message),
                 "\"%s\" is no name of a task; write spiffe://DOMAIN/job/JOB/task/INDEX for one of another trust "
                 "domain, and \"task:JOB:INDEX\" for one of this cluster",
                 unnamed[i]);
        check_role_refused(unnamed[i], message);
    }
}
END_TEST

START_TEST(roles_name_jobs_and_tasks_of_the_cluster)
{
    check_role_refused("job:wroker", "there is no job \"wroker\" in the cluster; did you mean \"worker\"?");
    check_role_refused("task:pss:0", "there is no job \"pss\" in the cluster; did you mean \"ps\"?");
    check_role_refused("task:ps:2", "task 2 is not in the cluster, where job \"ps\" has the tasks 0 to 1; add it there "
                                    "or correct the index");
}
END_TEST

START_TEST(wrong_rules_are_refused)
{
    check_refused("\"allow\": {}, " TLS, "", "c.json:2:23: security.allow: must be a list of rules, not an object");
    check_refused("\"allow\": [7], " TLS, "",
                  "c.json:2:24: security.allow[0]: must be a rule, {\"who\": [...], \"what\": [...]}, not a number");
    check_refused("\"allow\": [{\"who\": [\"any\"]}], " TLS, "",
                  "c.json:2:24: security.allow[0]: \"what\" is missing; write {\"who\": [\"member\"], \"what\": "
                  "[\"read\"]}");
    check_refused("\"allow\": [{\"whom\": [\"any\"]}], " TLS, "",
                  "c.json:2:25: security.allow[0].whom: there is no member of a rule \"whom\"; did you mean \"who\"?");
    check_refused("\"allow\": [{\"who\": []}], " TLS, "",
                  "c.json:2:32: security.allow[0].who: an empty list; remove the rule");
    check_refused("\"allow\": [{\"who\": [1]}], " TLS, "",
                  "c.json:2:33: security.allow[0].who[0]: must be a role such as \"job:worker\", not a number");
    check_refused("\"allow\": [{\"what\": [null]}], " TLS, "",
                  "c.json:2:34: security.allow[0].what[0]: must be an action such as \"read\", not null");
    check_refused("\"allow\": [{\"what\": [\"raed\"]}], " TLS, "",
                  "c.json:2:34: security.allow[0].what[0]: \"raed\" is no action; did you mean \"read\"?");
    check_refused("\"allow\": [{\"what\": [\"everything\"]}], " TLS, "",
                  "c.json:2:34: security.allow[0].what[0]: \"everything\" is no action; use one of \"read\", "
                  "\"publish\", \"push\", \"withdraw\", \"list\", \"peers\", \"health\"");
}
END_TEST

START_TEST(lists_have_an_end)
{
    char security[8192];
    int len = snprintf(security, sizeof(security), "\"allow\": [");
    for (int i = 0; i <= TL_MAX_ALLOW_RULES; i++)
        len += snprintf(security + len, sizeof(security) - (size_t)len, "%s{}", i > 0 ? "," : "");
    snprintf(security + len, sizeof(security) - (size_t)len, "], " TLS);
    check_refused(security, "", "c.json:2:23: security.allow: 65 rules are too many; there may be 64");
    len = snprintf(security, sizeof(security), "\"allow\": [{\"who\": [");
    for (int i = 0; i <= TL_MAX_ALLOW_ROLES; i++)
        len += snprintf(security + len, sizeof(security) - (size_t)len, "%s\"any\"", i > 0 ? "," : "");
    snprintf(security + len, sizeof(security) - (size_t)len, "]}], " TLS);
    check_refused(security, "", "c.json:2:32: security.allow[0].who: 257 entries are too many; there may be 256");
}
END_TEST

START_TEST(all_errors_of_rules_are_collected)
{
    static const char text[] =
        "{" CLUSTER ", \"security\": {\"tls\": {\"ca\": \"x\", \"key\": 1}, \"encrypt\": \"on\",\n"
        "\"allow\": [{\"who\": [\"jobs:ps\", \"job:pss\", \"x y\"], \"what\": [\"see\"]}, {}]}}";
    static const char *const expected[] = {
        "security.tls.key: ",         "security.encrypt: ",          "security.allow[0].who[0]: ",
        "security.allow[0].who[2]: ", "security.allow[0].what[0]: ", "security.allow[1]: "};
    static struct tl_config_errors errors;
    ck_assert_int_eq(tl_config_parse_all_errors(text, strlen(text), "c", NULL, &config, &errors, &error),
                     TL_INVALID_ARGUMENT);
    for (size_t i = 0; i < errors.count && i < TL_ARRAY_COUNT(expected); i++)
        ck_assert_msg(strstr(errors.items[i].error.message, expected[i]), "%s", errors.items[i].error.message);
    ck_assert_uint_eq(errors.count, TL_ARRAY_COUNT(expected));
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("security settings");
    TCase *files = tcase_create("files"), *rules = tcase_create("rules");
    tcase_add_test(files, a_name_stands_for_the_process);
    tcase_add_test(files, names_stay_when_the_environment_changes_settings);
    tcase_add_test(files, tasks_and_jobs_have_files_of_their_own);
    tcase_add_test(files, authority_certificate_and_key_belong_together);
    tcase_add_test(files, nothing_protects_without_certificates);
    tcase_add_test(files, what_must_be_encrypted_does_not_travel_over_rdma);
    tcase_add_test(rules, rules_are_roles_and_actions);
    tcase_add_test(rules, rules_replace_those_below);
    tcase_add_test(rules, words_that_are_no_roles_are_refused);
    tcase_add_test(rules, roles_name_jobs_and_tasks_of_the_cluster);
    tcase_add_test(rules, wrong_rules_are_refused);
    tcase_add_test(rules, lists_have_an_end);
    tcase_add_test(rules, all_errors_of_rules_are_collected);
    suite_add_tcase(suite, files);
    suite_add_tcase(suite, rules);
    return run_suite(suite);
}
