// SPDX-License-Identifier: Apache-2.0
/* TensorFlow's variables: both spellings, which one wins, errors, and warnings. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "config/config.h"
#include "fakes/run_suite.h"

#define CLUSTER "\"cluster\": {\"ps\": [\"a:1\", \"b:1\"], \"worker\": {\"4\": \"[::1]:2\"}}"
#define MAX_WARNINGS 8

static struct tl_config *config;
static struct tl_error error;
static char warnings[MAX_WARNINGS][TL_ERROR_MESSAGE_BYTES];
static size_t warning_count;

static void note_warning(void *context, const char *message)
{
    ck_assert_ptr_eq(context, &warning_count);
    ck_assert_uint_lt(warning_count, MAX_WARNINGS);
    strcpy(warnings[warning_count++], message);
}

static void parse(const char *text)
{
    enum tl_status status = tl_config_parse(text, strlen(text), "c.json", NULL, &config, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
}

static enum tl_status apply_to(const char *const *variables)
{
    const struct tl_config_environment environment = {variables, note_warning, &warning_count};
    warning_count = 0;
    return tl_config_apply_environment(config, &environment, &error);
}

#define APPLY(...) apply_to((const char *const[]){__VA_ARGS__, NULL})

static struct tl_config_value value_of(const struct tl_config_task *task, const char *path)
{
    struct tl_config_value values[64];
    size_t count = tl_config_values(config, task, values, TL_ARRAY_COUNT(values));
    for (size_t i = 0; i < count; i++) {
        if (strcmp(values[i].path, path) == 0) return values[i];
    }
    ck_abort_msg("there is no value %s", path);
    return values[0];
}

static void check_value(const char *name, const char *path, const char *json, const char *origin)
{
    const struct tl_config_task *task = NULL;
    ck_assert_int_eq(tl_config_find_name(config, name, &task, &error), TL_OK);
    struct tl_config_value value = value_of(task, path);
    ck_assert_str_eq(value.value, json);
    ck_assert_str_eq(value.origin, origin);
}

START_TEST(every_variable_in_both_spellings)
{
    static const struct {
        const char *path, *variable, *value, *json;
    } cases[] = {
        {"verbs.devices", "RDMA_DEVICE", "mlx5_0", "\"mlx5_0\""},
        {"verbs.port", "RDMA_DEVICE_PORT", "2", "2"},
        {"verbs.gid_index", "RDMA_GID_INDEX", "0", "0"},
        {"verbs.pkey_index", "RDMA_QP_PKEY_INDEX", "3", "3"},
        {"verbs.pkey_index", "RDMA_PKEY", "65535", "65535"},
        {"verbs.queue_depth", "RDMA_QP_QUEUE_DEPTH", "16", "16"},
        {"verbs.queue_depth", "RDMA_QUEUE_DEPTH", "2048", "2048"},
        {"verbs.timeout", "RDMA_QP_TIMEOUT", "31", "31"},
        {"verbs.timeout", "RDMA_TIMEOUT", "0", "0"},
        {"verbs.retry_count", "RDMA_QP_RETRY_COUNT", "7", "7"},
        {"verbs.retry_count", "RDMA_RETRY_CNT", "3", "3"},
        {"verbs.service_level", "RDMA_QP_SL", "7", "7"},
        {"verbs.service_level", "RDMA_SL", "1", "1"},
        {"verbs.mtu", "RDMA_QP_MTU", "4096", "4096"},
        {"verbs.mtu", "RDMA_MTU", "256", "256"},
        {"verbs.traffic_class", "RDMA_TRAFFIC_CLASS", "106", "106"},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(cases); i++) {
        char variable[64], origin[64];
        snprintf(variable, sizeof(variable), "%s=%s", cases[i].variable, cases[i].value);
        snprintf(origin, sizeof(origin), "environment (%s)", cases[i].variable);
        parse("{" CLUSTER "}");
        ck_assert_msg(APPLY("PATH=/bin", variable) == TL_OK, "%s: %s", variable, error.message);
        ck_assert_uint_eq(warning_count, 0);
        check_value("ps:0", cases[i].path, cases[i].json, origin);
        check_value("worker:4", cases[i].path, cases[i].json, origin);
        check_value("ps:0", "limits.chunk", "\"2MiB\"", "default");
        tl_config_destroy(config);
    }
}
END_TEST

START_TEST(settings_are_filled)
{
    char device[] = "RDMA_DEVICE=mlx5_0:1,^mlx5_1";
    parse("{" CLUSTER "}");
    ck_assert_int_eq(APPLY(device, "RDMA_GID_INDEX=3", "RDMA_MTU=1024"), TL_OK);
    memset(device, 'x', sizeof(device) - 1);
    for (size_t i = 0; i < config->task_count; i++) {
        const struct tl_verbs_settings *verbs = &config->tasks[i].settings.verbs;
        ck_assert_str_eq(verbs->devices, "mlx5_0:1,^mlx5_1");
        ck_assert_uint_eq(verbs->gid_index, 3);
        ck_assert_uint_eq(verbs->mtu_bytes, 1024);
        ck_assert_uint_eq(verbs->timeout, 14);
    }
    tl_config_destroy(config);
}
END_TEST

START_TEST(the_file_wins_on_every_level)
{
    parse("{" CLUSTER ", \"jobs\": {\"ps\": {\"verbs\": {\"timeout\": 9}, \"tasks\": {\"1\": {\"verbs\": "
          "{\"mtu\": \"auto\"}}}}}}");
    ck_assert_int_eq(APPLY("RDMA_TIMEOUT=20", "RDMA_MTU=1024"), TL_OK);
    check_value("ps:0", "verbs.timeout", "9", "c.json:1 (jobs.ps.verbs.timeout)");
    check_value("ps:1", "verbs.timeout", "9", "c.json:1 (jobs.ps.verbs.timeout)");
    check_value("worker:4", "verbs.timeout", "20", "environment (RDMA_TIMEOUT)");
    ck_assert_uint_eq(config->client_settings.verbs.timeout, 20);
    ck_assert_str_eq(value_of(NULL, "verbs.timeout").origin, "environment (RDMA_TIMEOUT)");
    check_value("ps:0", "verbs.mtu", "1024", "environment (RDMA_MTU)");
    check_value("ps:1", "verbs.mtu", "\"auto\"", "c.json:1 (jobs.ps.tasks.1.verbs.mtu)");
    tl_config_destroy(config);

    parse("{" CLUSTER ", \"verbs\": {\"timeout\": 14}}");
    ck_assert_int_eq(APPLY("RDMA_TIMEOUT=20"), TL_OK);
    check_value("ps:0", "verbs.timeout", "14", "c.json:1 (verbs.timeout)");
    ck_assert_uint_eq(config->tasks[0].settings.verbs.timeout, 14);
    tl_config_destroy(config);
}
END_TEST

START_TEST(an_evaluator_has_an_environment_too)
{
    static const char text[] = "{\"cluster\": {\"ps\": [\"a:1\"]}, \"task\": {\"type\": \"evaluator\"}}";
    ck_assert_int_eq(tl_config_parse_tf(text, strlen(text), &config, &error), TL_OK);
    ck_assert_int_eq(APPLY("RDMA_SL=5"), TL_OK);
    ck_assert_uint_eq(config->self->settings.verbs.service_level, 5);
    ck_assert_str_eq(value_of(config->self, "verbs.service_level").origin, "environment (RDMA_SL)");
    ck_assert_int_eq(config->self->settings.protocol, TL_PROTOCOL_GRPC);
    ck_assert_uint_eq(config->tasks[0].settings.verbs.service_level, 5);
    tl_config_destroy(config);
}
END_TEST

START_TEST(two_spellings_agree_or_are_refused)
{
    parse("{" CLUSTER ", \"verbs\": {\"timeout\": 1}}");
    ck_assert_int_eq(APPLY("RDMA_PKEY=3", "RDMA_QP_PKEY_INDEX=03"), TL_OK);
    check_value("ps:0", "verbs.pkey_index", "3", "environment (RDMA_QP_PKEY_INDEX)");
    /* The same where the file wins. */
    ck_assert_int_eq(APPLY("RDMA_TIMEOUT=15", "RDMA_QP_TIMEOUT=14", "RDMA_SL=1"), TL_INVALID_ARGUMENT);
    ck_assert_str_eq(error.message, "environment variables RDMA_QP_TIMEOUT and RDMA_TIMEOUT are 14 and 15, but both "
                                    "mean verbs.timeout; unset one");
    check_value("ps:0", "verbs.service_level", "0", "default");
    ck_assert_int_eq(APPLY("RDMA_TIMEOUT=15", "RDMA_QP_TIMEOUT="), TL_OK);
    tl_config_destroy(config);
}
END_TEST

START_TEST(empty_is_unset)
{
    parse("{" CLUSTER "}");
    ck_assert_int_eq(APPLY("RDMA_DEVICE=", "RDMA_GID_INDEX="), TL_OK);
    check_value("ps:0", "verbs.devices", "\"\"", "default");
    check_value("ps:0", "verbs.gid_index", "\"auto\"", "default");
    ck_assert_int_eq(apply_to((const char *const[]){NULL}), TL_OK);
    tl_config_destroy(config);
}
END_TEST

START_TEST(bad_values_are_refused)
{
    static const struct {
        const char *variable, *message;
    } cases[] = {
        {"RDMA_TIMEOUT=99", "environment variable RDMA_TIMEOUT: 99 is out of range; it may be 0 to 31, as "
                            "verbs.timeout"},
        {"RDMA_QP_SL=8", "environment variable RDMA_QP_SL: 8 is out of range; it may be 0 to 7, as "
                         "verbs.service_level"},
        {"RDMA_DEVICE_PORT=0", "environment variable RDMA_DEVICE_PORT: 0 is out of range; it may be 1 to 255, as "
                               "verbs.port"},
        {"RDMA_GID_INDEX=-1", "environment variable RDMA_GID_INDEX: \"-1\" is no whole number; it may be 0 to 255, as "
                              "verbs.gid_index"},
        {"RDMA_MTU=1000", "environment variable RDMA_MTU: 1000 is not 256, 512, 1024, 2048 or 4096, as verbs.mtu"},
        {"RDMA_PKEY=0x1", "environment variable RDMA_PKEY: \"0x1\" is no whole number; it may be 0 to 65535, as "
                          "verbs.pkey_index"},
        {"RDMA_SL= 1", "environment variable RDMA_SL: \" 1\" is no whole number; it may be 0 to 7, as "
                       "verbs.service_level"},
        {"RDMA_QUEUE_DEPTH=99999999999999999999999",
         "environment variable RDMA_QUEUE_DEPTH: \"99999999999999999999999\" is no whole number; it may be 16 to "
         "65536, as verbs.queue_depth"},
        {"RDMA_DEVICE=mlx5_0 mlx5_1", "environment variable RDMA_DEVICE: \"mlx5_0 mlx5_1\" does not name a device; "
                                      "entries are like mlx5_0, mlx5_0:1 or ^mlx5_1, as verbs.devices"},
        {"RDMA_DEVICE=\xff\x1b", "environment variable RDMA_DEVICE: \"\\xff\\x1b\" does not name a device; entries are "
                                 "like mlx5_0, mlx5_0:1 or ^mlx5_1, as verbs.devices"},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(cases); i++) {
        parse("{" CLUSTER ", \"verbs\": {\"timeout\": 1}}");
        ck_assert_int_eq(APPLY(cases[i].variable, "RDMA_TRAFFIC_CLASS=1"), TL_INVALID_ARGUMENT);
        ck_assert_str_eq(error.message, cases[i].message);
        ck_assert_int_eq(error.code, TL_INVALID_ARGUMENT);
        check_value("ps:0", "verbs.traffic_class", "0", "default");
        tl_config_destroy(config);
    }
}
END_TEST

START_TEST(unknown_variables_are_warned_of)
{
    parse("{" CLUSTER "}");
    ck_assert_int_eq(APPLY("RDMA_QP_TIMEOT=1", "RDMA_SL=1", "RDMAV_FORK_SAFE=1", "rdma_sl=9", "RDMA_\x1b[31m=1"),
                     TL_OK);
    ck_assert_uint_eq(warning_count, 2);
    ck_assert_str_eq(warnings[0], "environment variable \"RDMA_QP_TIMEOT\" has no effect; did you mean "
                                  "\"RDMA_QP_TIMEOUT\"?");
    ck_assert_ptr_nonnull(strstr(warnings[1], "\"RDMA_\\x1b[31m\" has no effect"));
    check_value("ps:0", "verbs.service_level", "1", "environment (RDMA_SL)");
    const struct tl_config_environment silent = {.variables = (const char *const[]){"RDMA_X=1", NULL}};
    ck_assert_int_eq(tl_config_apply_environment(config, &silent, &error), TL_OK);
    tl_config_destroy(config);
}
END_TEST

START_TEST(it_may_be_applied_again)
{
    parse("{" CLUSTER "}");
    ck_assert_int_eq(APPLY("RDMA_SL=1"), TL_OK);
    ck_assert_int_eq(APPLY("RDMA_SL=2"), TL_OK);
    check_value("ps:0", "verbs.service_level", "2", "environment (RDMA_SL)");
    tl_config_destroy(config);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("environment");
    TCase *tcase = tcase_create("environment");
    tcase_add_test(tcase, every_variable_in_both_spellings);
    tcase_add_test(tcase, settings_are_filled);
    tcase_add_test(tcase, the_file_wins_on_every_level);
    tcase_add_test(tcase, an_evaluator_has_an_environment_too);
    tcase_add_test(tcase, two_spellings_agree_or_are_refused);
    tcase_add_test(tcase, empty_is_unset);
    tcase_add_test(tcase, bad_values_are_refused);
    tcase_add_test(tcase, unknown_variables_are_warned_of);
    tcase_add_test(tcase, it_may_be_applied_again);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
