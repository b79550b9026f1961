// SPDX-License-Identifier: Apache-2.0
/* TF_CONFIG: what TensorFlow accepts is accepted, this task is found in it, and it can be rewritten as our JSON. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "config/config.h"
#include "config/settings_layer.h"
#include "fakes/run_suite.h"

#define CLUSTER "\"cluster\": {\"worker\": [\"w0:1\", \"w1:1\"], \"ps\": [\"p0:1\"]}"

static struct tl_config *config;
static struct tl_error error;

static void parse(const char *text)
{
    enum tl_status status = tl_config_parse_tf(text, strlen(text), &config, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
}

static void check_refused_as(const char *text, enum tl_status code, const char *message)
{
    struct tl_config *untouched = (struct tl_config *)&error;
    char *json = (char *)&error;
    ck_assert_int_eq(tl_config_parse_tf(text, strlen(text), &untouched, &error), code);
    ck_assert_str_eq(error.message, message);
    ck_assert_ptr_eq(untouched, &error);
    ck_assert_int_eq(tl_config_tf_to_json(text, strlen(text), &json, &error), code);
    ck_assert_str_eq(error.message, message);
    ck_assert_ptr_eq(json, &error);
}

static void check_refused(const char *text, const char *message)
{
    check_refused_as(text, TL_INVALID_ARGUMENT, message);
}

static void check_self(const char *text, const char *name)
{
    parse(text);
    ck_assert_ptr_nonnull(config->self);
    ck_assert_str_eq(config->self->name, name);
    tl_config_destroy(config);
}

START_TEST(cluster_and_task_are_read)
{
    parse("{" CLUSTER ", \"task\": {\"type\": \"worker\", \"index\": 1}, \"rpc_layer\": \"grpc\"}");
    ck_assert_str_eq(config->source, "TF_CONFIG");
    ck_assert_uint_eq(config->task_count, 3);
    ck_assert_str_eq(config->tasks[0].name, "/job:ps/task:0");
    ck_assert_ptr_eq(config->self, &config->tasks[2]);
    ck_assert_str_eq(config->self->address, "w1:1");
    ck_assert_int_eq(config->self->settings.protocol, TL_PROTOCOL_GRPC);
    tl_config_destroy(config);
}
END_TEST

START_TEST(the_index_may_be_a_text_or_missing)
{
    check_self("{" CLUSTER ", \"task\": {\"type\": \"worker\", \"index\": \"1\"}}", "/job:worker/task:1");
    check_self("{" CLUSTER ", \"task\": {\"type\": \"worker\"}}", "/job:worker/task:0");
    check_self("{\"cluster\": {\"worker\": {\"7\": \"h:1\"}}, \"task\": {\"type\": \"worker\", \"index\": 7}}",
               "/job:worker/task:7");
}
END_TEST

START_TEST(all_jobs_of_tensorflow_are_known)
{
    check_self(
        "{\"cluster\": {\"chief\": [\"c:1\"], \"worker\": [\"w:1\"]}, \"task\": {\"type\": \"chief\", \"index\": 0}}",
        "/job:chief/task:0");
    check_self("{\"cluster\": {\"master\": [\"m:1\"]}, \"task\": {\"type\": \"master\"}}", "/job:master/task:0");
    check_self("{\"cluster\": {\"evaluator\": [\"e:1\"]}, \"task\": {\"type\": \"evaluator\"}}",
               "/job:evaluator/task:0");
}
END_TEST

START_TEST(unknown_members_are_passed_over)
{
    check_self("{" CLUSTER ", \"environment\": \"cloud\", \"job\": {\"scale\": [1, {}]}, \"protocol\": 5, \"task\": "
               "{\"type\": \"ps\", \"index\": 0, \"trial\": \"3\", \"cloud\": null}}",
               "/job:ps/task:0");
}
END_TEST

START_TEST(a_job_without_tasks_is_passed_over)
{
    check_self("{\"cluster\": {\"worker\": [\"w:1\"], \"ps\": [], \"chief\": {}}, \"task\": {\"type\": \"worker\"}}",
               "/job:worker/task:0");
    check_refused("{\"cluster\": {\"ps\": []}}",
                  "TF_CONFIG:1:13: cluster: the cluster has no tasks; add a job such as \"worker\": [\"host:4000\"]");
}
END_TEST

START_TEST(without_task_there_is_no_self)
{
    parse("{" CLUSTER "}");
    ck_assert_ptr_null(config->self);
    tl_config_destroy(config);
}
END_TEST

START_TEST(the_evaluator_need_not_be_in_the_cluster)
{
    struct tl_config_value values[64];
    parse("{" CLUSTER ", \"task\": {\"type\": \"evaluator\", \"index\": 0}}");
    ck_assert_str_eq(config->self->name, "/job:evaluator/task:0");
    ck_assert_str_eq(config->self->job, "evaluator");
    ck_assert_ptr_null(config->self->address);
    ck_assert(config->self < config->tasks || config->self >= config->tasks + config->task_count);
    ck_assert_int_eq(config->self->settings.protocol, TL_PROTOCOL_GRPC);
    ck_assert_uint_eq(config->self->settings.chunk_bytes, 2 << 20);
    ck_assert_uint_eq(tl_config_values(config, config->self, values, 64), tl_settings_count);
    ck_assert_str_eq(values[4].path, "listen");
    ck_assert_str_eq(values[4].value, "null");
    const struct tl_config_task *task;
    ck_assert_int_eq(tl_config_find_name(config, "evaluator:0", &task, &error), TL_NOT_FOUND);
    tl_config_destroy(config);
}
END_TEST

START_TEST(rpc_layer_is_the_protocol)
{
    static const char *const without[] = {"null", "\"\"", "\"grpc\""};
    struct tl_config_value values[1];
    for (size_t i = 0; i < TL_ARRAY_COUNT(without); i++) {
        char text[256] = "{" CLUSTER ", \"rpc_layer\": ";
        strcat(text, without[i]);
        strcat(text, "}");
        parse(text);
        ck_assert_int_eq(config->tasks[0].settings.protocol, TL_PROTOCOL_GRPC);
        tl_config_values(config, &config->tasks[0], values, 1);
        ck_assert_str_eq(values[0].value, "\"grpc\"");
        ck_assert_str_eq(values[0].origin, i == 2 ? "TF_CONFIG:1 (rpc_layer)" : "default of TF_CONFIG");
        tl_config_destroy(config);
    }
    check_refused_as("{" CLUSTER ", \"rpc_layer\": \"grpc+mpi\"}", TL_UNIMPLEMENTED,
                     "TF_CONFIG:1:72: rpc_layer: \"grpc+mpi\" needs the mpi transport, which this version does not "
                     "have; use one of \"auto\", \"grpc\", \"grpc+local\", \"grpc+verbs\", \"grpc+gdr\"");
    check_refused("{" CLUSTER ", \"rpc_layer\": \"grcp\"}",
                  "TF_CONFIG:1:72: rpc_layer: \"grcp\" is no value of rpc_layer; did you mean \"grpc\"?");
    check_refused("{" CLUSTER ", \"rpc_layer\": 5}", "TF_CONFIG:1:72: rpc_layer: must be a string, not a number");
}
END_TEST

START_TEST(wrong_clusters_are_refused)
{
    check_refused("{}", "TF_CONFIG:1:1: top level: \"cluster\" is missing; add \"cluster\": {\"worker\": "
                        "[\"host:4000\"]}");
    check_refused("{\"cluster\": [\"worker\"]}", "TF_CONFIG:1:13: cluster: must be an object of jobs, not a list");
    check_refused("{\"cluster\": {\"wroker\": [\"h:1\"]}}", "TF_CONFIG:1:14: cluster.wroker: there is no job of "
                                                            "TensorFlow called \"wroker\"; did you mean \"worker\"?");
    check_refused("{\"cluster\": {\"chief\": [\"h:1\", \"h:2\"]}}",
                  "TF_CONFIG:1:23: cluster.chief: there are 2 tasks; a cluster has at most one chief");
    check_refused("{\"cluster\": {\"master\": [\"h:1\", \"h:2\"]}}",
                  "TF_CONFIG:1:24: cluster.master: there are 2 tasks; a cluster has at most one master");
    check_refused("{\"cluster\": {\"evaluator\": {\"0\": \"h:1\", \"1\": \"h:2\"}}}",
                  "TF_CONFIG:1:27: cluster.evaluator: there are 2 tasks; a cluster has at most one evaluator");
    check_refused("{\"cluster\": {\"worker\": [\"h:1\", \"h:1\"]}}",
                  "TF_CONFIG:1:32: cluster.worker[1]: /job:worker/task:1 has the address h:1, which /job:worker/task:0 "
                  "has too; give each task its own");
    check_refused("cluster", "TF_CONFIG:1:7: top level: not JSON: '[' or '{' expected near 'cluster'; JSON has no "
                             "comments and no comma after the last member");
}
END_TEST

START_TEST(wrong_tasks_are_refused)
{
    check_refused("{" CLUSTER ", \"task\": 5}",
                  "TF_CONFIG:1:67: task: must be an object, {\"type\": ..., \"index\": ...}, not a number");
    check_refused("{" CLUSTER ", \"task\": {\"index\": 0}}",
                  "TF_CONFIG:1:67: task: \"type\" is missing; add the job of this process, such as \"worker\"");
    check_refused("{" CLUSTER ", \"task\": {\"type\": 5}}",
                  "TF_CONFIG:1:76: task.type: must be a job such as \"worker\", not a number");
    check_refused("{" CLUSTER ", \"task\": {\"type\": \"wroker\"}}", "TF_CONFIG:1:76: task.type: there is no job of "
                                                                     "TensorFlow called \"wroker\"; did you mean "
                                                                     "\"worker\"?");
    check_refused("{" CLUSTER ", \"task\": {\"type\": \"chief\"}}",
                  "TF_CONFIG:1:76: task.type: job \"chief\" is not in the cluster; use one of \"ps\", \"worker\"");
    check_refused(
        "{" CLUSTER ", \"task\": {\"type\": \"worker\", \"index\": 2}}",
        "TF_CONFIG:1:95: task.index: task 2 is not in the cluster, where job \"worker\" has the tasks 0 to 1");
}
END_TEST

START_TEST(wrong_indexes_are_refused)
{
    static const char *const bad[] = {"-1",   "1.0", "\"-1\"", "\"01\"",     "\"\"",
                                      "null", "[]",  "true",   "1000000000", "\"x\""};
    for (size_t i = 0; i < TL_ARRAY_COUNT(bad); i++) {
        char text[256] = "{" CLUSTER ", \"task\": {\"type\": \"worker\", \"index\": ";
        strcat(text, bad[i]);
        strcat(text, "}}");
        check_refused(text, "TF_CONFIG:1:95: task.index: must be the task's index, a number of 0 to 999999999");
    }
}
END_TEST

START_TEST(rewritten_as_our_json)
{
    static const char text[] =
        "{\"cluster\": {\"worker\": [\"w0:1\", \"w1:1\"], \"ps\": {\"3\": \"[::1]:1\"}, \"chief\": []}, "
        "\"task\": {\"type\": \"worker\", \"index\": 1}, \"environment\": \"cloud\"}";
    char *json;
    ck_assert_int_eq(tl_config_tf_to_json(text, strlen(text), &json, &error), TL_OK);
    ck_assert_str_eq(json, "{\n"
                           "  \"cluster\": {\n"
                           "    \"ps\": {\n"
                           "      \"3\": \"[::1]:1\"\n"
                           "    },\n"
                           "    \"worker\": [\n"
                           "      \"w0:1\",\n"
                           "      \"w1:1\"\n"
                           "    ]\n"
                           "  },\n"
                           "  \"protocol\": \"grpc\"\n"
                           "}\n");
    ck_assert_int_eq(tl_config_parse(json, strlen(json), "ours", NULL, &config, &error), TL_OK);
    ck_assert_uint_eq(config->task_count, 3);
    tl_config_destroy(config);
    free(json);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("tf_config");
    TCase *tcase = tcase_create("tf_config");
    tcase_add_test(tcase, cluster_and_task_are_read);
    tcase_add_test(tcase, the_index_may_be_a_text_or_missing);
    tcase_add_test(tcase, all_jobs_of_tensorflow_are_known);
    tcase_add_test(tcase, unknown_members_are_passed_over);
    tcase_add_test(tcase, a_job_without_tasks_is_passed_over);
    tcase_add_test(tcase, without_task_there_is_no_self);
    tcase_add_test(tcase, the_evaluator_need_not_be_in_the_cluster);
    tcase_add_test(tcase, rpc_layer_is_the_protocol);
    tcase_add_test(tcase, wrong_clusters_are_refused);
    tcase_add_test(tcase, wrong_tasks_are_refused);
    tcase_add_test(tcase, wrong_indexes_are_refused);
    tcase_add_test(tcase, rewritten_as_our_json);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
