// SPDX-License-Identifier: Apache-2.0
/* A whole configuration from text: what it contains, what can be found in it, and where its values come from. */
#include "config/config.h"
#include "config/settings_layer.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "fakes/run_suite.h"

#define CLUSTER "\"cluster\": {\"ps\": [\"a:1\", \"b:1\"], \"worker\": {\"4\": \"[::1]:2\"}}"

static struct tl_config *config;
static struct tl_error error;

static void parse(const char *text)
{
    enum tl_status status = tl_config_parse(text, strlen(text), "dir/c.json", "dir", &config, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
}

static void check_refused(const char *text, enum tl_status code, const char *message)
{
    struct tl_config *untouched = (struct tl_config *)&error;
    ck_assert_int_eq(tl_config_parse(text, strlen(text), "c.json", NULL, &untouched, &error), code);
    ck_assert_str_eq(error.message, message);
    ck_assert_int_eq(error.code, code);
    ck_assert_ptr_eq(untouched, &error);
    ck_assert_int_eq(tl_config_parse(text, strlen(text), "c.json", NULL, &untouched, NULL), code);
}

static const struct tl_config_task *task_named(const char *name)
{
    const struct tl_config_task *task = NULL;
    ck_assert_int_eq(tl_config_find_name(config, name, &task, &error), TL_OK);
    return task;
}

/* Returns the value with this path. */
static struct tl_config_value value_of(const struct tl_config_task *task, const char *path)
{
    struct tl_config_value values[64];
    size_t count = tl_config_values(config, task, values, TL_ARRAY_COUNT(values));
    ck_assert_uint_le(count, TL_ARRAY_COUNT(values));
    for (size_t i = 0; i < count; i++) {
        if (strcmp(values[i].path, path) == 0) return values[i];
    }
    ck_abort_msg("there is no value %s", path);
    return values[0];
}

static void check_value(const struct tl_config_task *task, const char *path, const char *json, const char *origin)
{
    struct tl_config_value value = value_of(task, path);
    ck_assert_str_eq(value.value, json);
    ck_assert_str_eq(value.origin, origin);
}

/* Collects all errors and compares each with a line of `expected`, [count]. */
static void check_all_refused(const char *text, const char *const *expected, size_t count)
{
    static struct tl_config_errors errors;
    struct tl_config *untouched = (struct tl_config *)&error;
    enum tl_status status = tl_config_parse_all_errors(text, strlen(text), "c.json", NULL, &untouched, &errors, &error);
    ck_assert_ptr_eq(untouched, &error);
    for (size_t i = 0; i < errors.count && i < count; i++)
        ck_assert_str_eq(errors.items[i].error.message, expected[i]);
    ck_assert_uint_eq(errors.count, count);
    ck_assert(!errors.is_full);
    ck_assert_int_eq(status, errors.items[0].error.code);
    ck_assert_str_eq(error.message, expected[0]);
}

START_TEST(all_errors_are_collected_in_the_order_of_the_text)
{
    static const char *const expected[] = {
        "c.json:1:13: $schema: must be a string, not a number",
        "c.json:2:28: cluster.ps[1]: must be an address such as \"host:4000\", not a number",
        "c.json:2:31: cluster.ps[2]: /job:ps/task:2 has the address a:1, which /job:ps/task:0 has too; give each task "
        "its own",
        "c.json:2:39: cluster.\"b d\": \"b d\" is no job name; use 1 to 128 letters, digits, '_', '.' and '-'",
        "c.json:3:14: publish[0]: must be a file such as \"model.safetensors\", not a number",
        "c.json:3:22: publish[2]: \"x\" is published twice; keep one",
        "c.json:4:18: jobs.ps.rdmaa: there is no setting \"rdmaa\"; did you mean \"rdma\"?",
        "c.json:4:41: jobs.ps.limits.wait: there is no setting \"wait\"; use one of \"chunk\", \"inflight\", \"held\", "
        "\"waiting\", \"connections\"",
        "c.json:5:12: jobs.ps.tasks.7: task 7 is not in the cluster, where job \"ps\" has the tasks 0 to 2; add it "
        "there or correct the index",
        "c.json:5:39: jobs.ps.tasks.2.checksum: must be true or false, not a number",
        "c.json:6:14: security: must be an object of settings, not a list",
    };
    check_all_refused("{\"$schema\": 3,\n"
                      " \"cluster\": {\"ps\": [\"a:1\", 5, \"a:1\"], \"b d\": [\"c:1\"]},\n"
                      " \"publish\": [1, \"x\", \"x\"],\n"
                      " \"jobs\": {\"ps\": {\"rdmaa\": 1, \"limits\": {\"wait\": 3},\n"
                      " \"tasks\": {\"7\": {}, \"2\": {\"checksum\": 4}}}},\n"
                      " \"security\": []}",
                      expected, TL_ARRAY_COUNT(expected));
}
END_TEST

START_TEST(what_follows_from_an_error_is_not_collected)
{
    /* Jobs whose entries in the cluster are wrong are no unknown jobs, and a limit that is wrong contradicts nothing.
     */
    static const char *const expected[] = {
        "c.json:1:20: cluster.ps: must be a list of addresses, [\"host:4000\"], or a map, {\"0\": \"host:4000\"}, not "
        "a "
        "number",
        "c.json:1:38: cluster.worker[0]: address \"x\" has no port; write host:port",
        "c.json:2:25: limits.chunk: 64MB is out of range; it may be 4KiB to 16MiB",
        "c.json:3:42: jobs.ps.tasks.0.rdma: must be a string, not a number",
    };
    static const char *const no_cluster[] = {
        "c.json:1:13: cluster: must be an object of jobs, not a list",
        "c.json:1:45: jobs.ps.checksum: must be true or false, not a number",
    };
    check_all_refused("{\"cluster\": {\"ps\": 7, \"worker\": [    \"x\"]},\n"
                      " \"limits\":    {\"chunk\": \"64MB\", \"inflight\": \"1MiB\"},\n"
                      " \"jobs\": {\"ps\": {\"tasks\": {\"0\": {\"rdma\": 1}}}, \"worker\": {\"tasks\": {\"0\": {}}}}}",
                      expected, TL_ARRAY_COUNT(expected));
    check_all_refused("{\"cluster\": [], \"jobs\": {\"ps\": {\"checksum\": 0}}}", no_cluster,
                      TL_ARRAY_COUNT(no_cluster));
}
END_TEST

START_TEST(a_contradiction_that_several_tasks_have_is_collected_once)
{
    static const char *const expected[] = {
        "c.json:1:12: cluster: the cluster has no tasks; add a job such as \"worker\": [\"host:4000\"]",
    };
    static const char *const contradictions[] = {
        "c.json:2:42: limits.inflight: inflight is \"1MiB\" and chunk is \"2MiB\"; inflight must be at least chunk",
        "c.json:3:70: jobs.ps.local.max_pool: max_pool is \"1MiB\" and pool is \"4MiB\"; max_pool must be at least "
        "pool",
    };
    check_all_refused("{\"cluster\":{}, \"jobs\": {}}", expected, TL_ARRAY_COUNT(expected));
    check_all_refused("{\"cluster\": {\"ps\": [\"a:1\", \"a:2\"], \"worker\": [\"a:3\"]},\n"
                      " \"limits\": {\"chunk\": \"2MiB\", \"inflight\": \"1MiB\"},\n"
                      " \"jobs\": {\"worker\": {\"checksum\": true}, \"ps\": {\"local\": {\"max_pool\": \"1MiB\"}}}}",
                      contradictions, TL_ARRAY_COUNT(contradictions));
}
END_TEST

START_TEST(a_text_that_is_not_json_has_one_error)
{
    static struct tl_config_errors errors = {.count = 1};
    static const char text[] = "{\"cluster\": {]}";
    ck_assert_int_eq(tl_config_parse_all_errors(text, strlen(text), "c.json", NULL, &config, &errors, &error),
                     TL_INVALID_ARGUMENT);
    ck_assert_uint_eq(errors.count, 0);
    ck_assert_ptr_nonnull(strstr(error.message, "not JSON"));
}
END_TEST

START_TEST(no_more_errors_are_collected_than_there_is_space_for)
{
    static struct tl_config_errors errors;
    static char text[TL_CONFIG_MAX_ERRORS * 8];
    for (int extra = 0; extra <= 1; extra++) {
        char *end = stpcpy(text, "{\"cluster\": {\"ps\": [\"a:1\"");
        for (int i = 0; i < TL_CONFIG_MAX_ERRORS + extra; i++)
            end = stpcpy(end, ", 1");
        strcpy(end, "]}}");
        enum tl_status status =
            tl_config_parse_all_errors(text, strlen(text), "c.json", NULL, &config, &errors, &error);
        ck_assert_int_eq(status, TL_INVALID_ARGUMENT);
        ck_assert_uint_eq(errors.count, TL_CONFIG_MAX_ERRORS);
        ck_assert_int_eq(errors.is_full, extra == 1);
    }
}
END_TEST

START_TEST(the_smallest_configuration)
{
    parse("{\"cluster\": {\"worker\": [\"host:4000\"]}}");
    ck_assert_str_eq(config->source, "dir/c.json");
    ck_assert_uint_eq(config->task_count, 1);
    ck_assert_ptr_null(config->self);
    ck_assert_str_eq(config->tasks[0].name, "/job:worker/task:0");
    ck_assert_str_eq(config->tasks[0].address, "host:4000");
    ck_assert_ptr_null(config->tasks[0].settings.listen);
    ck_assert_uint_eq(config->tasks[0].settings.chunk_bytes, 2 << 20);
    tl_config_destroy(config);
}
END_TEST

START_TEST(the_text_may_go_away)
{
    char *text = strdup("{" CLUSTER ", \"listen\": \"0.0.0.0:0\", \"publish\": [\"m.npy\"]}");
    char *source = strdup("c.json"), *folder = strdup("/data");
    ck_assert_int_eq(tl_config_parse(text, strlen(text), source, folder, &config, &error), TL_OK);
    memset(text, 'x', strlen(text));
    free(text);
    free(source);
    free(folder);
    const struct tl_config_task *task = task_named("worker:4");
    ck_assert_str_eq(config->source, "c.json");
    ck_assert_str_eq(task->settings.listen, "0.0.0.0:0");
    ck_assert_str_eq(task->settings.publish[0], "/data/m.npy");
    check_value(task, "publish", "[\"/data/m.npy\"]", "c.json:1 (publish)");
    tl_config_destroy(config);
}
END_TEST

START_TEST(later_layers_win)
{
    parse("{" CLUSTER ",\n"
          "\"limits\": {\"chunk\": \"2MiB\", \"waiting\": 10},\n"
          "\"jobs\": {\"ps\": {\"limits\": {\"waiting\": 20}, \"publish\": [\"x\", \"/y\"],\n"
          "\"tasks\": {\"1\": {\"limits\": {\"waiting\": 30}, \"publish\": []}}}}}");
    const struct tl_config_task *first = task_named("ps:0"), *second = task_named("ps:1"),
                                *other = task_named("worker:4");
    ck_assert_uint_eq(other->settings.waiting_receivers, 10);
    ck_assert_uint_eq(first->settings.waiting_receivers, 20);
    ck_assert_uint_eq(second->settings.waiting_receivers, 30);
    ck_assert_uint_eq(first->settings.publish_count, 2);
    ck_assert_uint_eq(second->settings.publish_count, 0);
    ck_assert_uint_eq(second->settings.chunk_bytes, 2 << 20);
    check_value(other, "limits.waiting", "10", "dir/c.json:2 (limits.waiting)");
    check_value(first, "limits.waiting", "20", "dir/c.json:3 (jobs.ps.limits.waiting)");
    check_value(second, "limits.waiting", "30", "dir/c.json:4 (jobs.ps.tasks.1.limits.waiting)");
    check_value(second, "limits.chunk", "\"2MiB\"", "dir/c.json:2 (limits.chunk)");
    check_value(first, "publish", "[\"dir/x\", \"/y\"]", "dir/c.json:3 (jobs.ps.publish)");
    check_value(second, "publish", "[]", "dir/c.json:4 (jobs.ps.tasks.1.publish)");
    check_value(second, "timeouts.request", "\"60s\"", "default");
    tl_config_destroy(config);
}
END_TEST

START_TEST(a_client_has_the_settings_of_the_top_level)
{
    parse("{" CLUSTER ", \"rdma\": \"off\",\n\"local\": {\"socket_folder\": \"s\"},\n"
          "\"jobs\": {\"ps\": {\"rdma\": \"require\", \"tasks\": {\"0\": {\"protocol\": \"grpc\"}}}}}");
    ck_assert_int_eq(config->tasks[0].settings.rdma, TL_RDMA_REQUIRE);
    ck_assert_int_eq(config->client_settings.rdma, TL_RDMA_OFF);
    ck_assert_int_eq(config->client_settings.protocol, TL_PROTOCOL_AUTO);
    ck_assert_int_eq(config->client_error.code, TL_OK);
    check_value(NULL, "rdma", "\"off\"", "dir/c.json:1 (rdma)");
    check_value(NULL, "local.socket_folder", "\"dir/s\"", "dir/c.json:2 (local.socket_folder)");
    check_value(NULL, "protocol", "\"auto\"", "default");
    tl_config_destroy(config);
}
END_TEST

START_TEST(values_come_in_order_and_up_to_the_capacity)
{
    struct tl_config_value values[64] = {0};
    parse("{" CLUSTER "}");
    size_t count = tl_config_values(config, &config->tasks[0], NULL, 0);
    ck_assert_uint_eq(count, tl_settings_count);
    ck_assert_uint_eq(tl_config_values(config, &config->tasks[0], values, 2), count);
    ck_assert_str_eq(values[0].path, "protocol");
    ck_assert_str_eq(values[1].path, "rdma");
    ck_assert_ptr_null(values[2].path);
    ck_assert_uint_eq(tl_config_values(config, &config->tasks[0], values, 64), count);
    ck_assert_str_eq(values[count - 1].path, "log.format");
    tl_config_destroy(config);
}
END_TEST

START_TEST(listen_is_by_default_the_own_address)
{
    parse("{" CLUSTER ", \"jobs\": {\"ps\": {\"tasks\": {\"1\": {\"listen\": \"[::]:9\"}}}}}");
    check_value(task_named("ps:0"), "listen", "\"a:1\"", "default");
    check_value(task_named("ps:1"), "listen", "\"[::]:9\"", "dir/c.json:1 (jobs.ps.tasks.1.listen)");
    check_value(task_named("worker:4"), "listen", "\"[::1]:2\"", "default");
    tl_config_destroy(config);
}
END_TEST

START_TEST(the_top_level_is_checked)
{
    check_refused("{}", TL_INVALID_ARGUMENT,
                  "c.json:1:1: top level: \"cluster\" is missing; add \"cluster\": "
                  "{\"worker\": [\"host:4000\"]}");
    check_refused("{\"clusters\": {}}", TL_INVALID_ARGUMENT,
                  "c.json:1:2: clusters: there is no setting \"clusters\"; did you mean \"cluster\"?");
    check_refused("{\"$schema\": 5, " CLUSTER "}", TL_INVALID_ARGUMENT,
                  "c.json:1:13: $schema: must be a string, not a number");
    check_refused("{\"cluster\": {}}", TL_INVALID_ARGUMENT,
                  "c.json:1:13: cluster: the cluster has no tasks; add a job "
                  "such as \"worker\": [\"host:4000\"]");
    check_refused("{" CLUSTER ", \"protocol\": \"grpc+mpi\"}", TL_UNIMPLEMENTED,
                  "c.json:1:77: protocol: \"grpc+mpi\" needs the mpi transport, which this version does not have; use "
                  "one of \"auto\", \"grpc\", \"grpc+local\", \"grpc+verbs\", \"grpc+gdr\"");
    check_refused("{" CLUSTER ", \"rdma\": \"required\"}", TL_INVALID_ARGUMENT,
                  "c.json:1:73: rdma: \"required\" is no value of rdma; did you mean \"require\"?");
    parse("{\"$schema\": \"schema.json\", " CLUSTER "}");
    tl_config_destroy(config);
}
END_TEST

START_TEST(contradictions_are_found_in_what_is_in_force)
{
    /* The top level contradicts itself, but every task has its own value; only a client peer has none. */
    parse("{" CLUSTER ", \"limits\": {\"chunk\": \"8MiB\", \"inflight\": \"4MiB\"}, \"jobs\": {"
          "\"ps\": {\"limits\": {\"inflight\": \"8MiB\"}}, \"worker\": {\"limits\": {\"chunk\": \"1MiB\"}}}}");
    ck_assert_str_eq(config->client_error.message,
                     "dir/c.json:1:105: limits.inflight: inflight is \"4MiB\" and chunk is "
                     "\"8MiB\"; inflight must be at least chunk");
    tl_config_destroy(config);
    check_refused(
        "{" CLUSTER ",\n\"limits\": {\"inflight\": \"4MiB\"},\n"
        "\"jobs\": {\"ps\": {\"tasks\": {\"1\": {\"limits\": {\"chunk\": \"8MiB\"}}}}}}",
        TL_INVALID_ARGUMENT,
        "c.json:3:53: jobs.ps.tasks.1.limits.chunk: inflight is \"4MiB\" and chunk is \"8MiB\"; inflight must "
        "be at least chunk");
}
END_TEST

START_TEST(tasks_are_found)
{
    const struct tl_config_task *task = NULL;
    parse("{" CLUSTER "}");
    ck_assert_int_eq(tl_config_find_task(config, "ps", 1, &task, &error), TL_OK);
    ck_assert_str_eq(task->name, "/job:ps/task:1");
    ck_assert_int_eq(tl_config_find_name(config, "/job:worker/task:4", &task, &error), TL_OK);
    ck_assert_str_eq(task->job, "worker");
    ck_assert_int_eq(tl_config_find_name(config, "ps:0", &task, &error), TL_OK);
    ck_assert_uint_eq(task->index, 0);
    tl_config_destroy(config);
}
END_TEST

START_TEST(tasks_that_are_not_there_are_not_found)
{
    static const struct {
        const char *name;
        const char *message;
    } cases[] = {
        {"ps:2", "dir/c.json: there is no task 2; job \"ps\" has the tasks 0 to 1"},
        {"worker:0", "dir/c.json: there is no task 0; job \"worker\" has only task 4"},
        {"/job:wroker/task:4", "dir/c.json: there is no job \"wroker\"; did you mean \"worker\"?"},
        {"/job:evaluator/task:0", "dir/c.json: there is no job \"evaluator\"; use one of \"ps\", \"worker\""},
        {"/job:ps/task0", "dir/c.json: \"/job:ps/task0\" is no task, which is written \"/job:ps/task:0\" or \"ps:0\"; "
                          "did you mean \"/job:ps/task:0\"?"},
        {"", "dir/c.json: \"\" is no task, which is written \"/job:ps/task:0\" or \"ps:0\"; use one of "
             "\"/job:ps/task:0\", \"/job:ps/task:1\", \"/job:worker/task:4\""},
    };
    parse("{" CLUSTER "}");
    for (size_t i = 0; i < TL_ARRAY_COUNT(cases); i++) {
        const struct tl_config_task *task = (const struct tl_config_task *)&error;
        ck_assert_int_eq(tl_config_find_name(config, cases[i].name, &task, &error), TL_NOT_FOUND);
        ck_assert_str_eq(error.message, cases[i].message);
        ck_assert_int_eq(error.code, TL_NOT_FOUND);
        ck_assert_ptr_eq(task, &error);
    }
    tl_config_destroy(config);
}
END_TEST

START_TEST(names_that_are_none_are_not_found)
{
    static const char *const names[] = {"ps",    "ps:",          ":0",      "ps:-1",          "ps:00",
                                        "ps:0x", "/job:/task:0", "/job:ps", "ps:99999999999", "/job:ps/task:0 "};
    char long_name[4096];
    const struct tl_config_task *task;
    parse("{" CLUSTER "}");
    for (size_t i = 0; i < TL_ARRAY_COUNT(names); i++) {
        ck_assert_int_eq(tl_config_find_name(config, names[i], &task, &error), TL_NOT_FOUND);
        ck_assert_ptr_nonnull(strstr(error.message, "is no task, which is written"));
    }
    memset(long_name, 'j', sizeof(long_name));
    strcpy(long_name + sizeof(long_name) - 3, ":0");
    ck_assert_int_eq(tl_config_find_name(config, long_name, &task, &error), TL_NOT_FOUND);
    ck_assert_int_eq(tl_config_find_task(config, long_name, 0, &task, NULL), TL_NOT_FOUND);
    tl_config_destroy(config);
}
END_TEST

START_TEST(null_can_be_destroyed)
{
    tl_config_destroy(NULL);
}
END_TEST

START_TEST(large_clusters_are_read)
{
    enum { TASKS = 20000 };
    char *text = malloc(TASKS * 80), *end = text;
    end += sprintf(end, "{\"cluster\": {\"w\": [\"h0:1\"");
    for (int i = 1; i < TASKS; i++) {
        end += sprintf(end, ",\n\"h%d:1\"", i);
    }
    end += sprintf(end, "]},\n\"jobs\": {\"w\": {\"tasks\": {\"0\": {\"checksum\": true}");
    for (int i = 1; i < TASKS; i++) {
        end += sprintf(end, ",\n\"%d\": {\"checksum\": true}", i);
    }
    strcpy(end, "}}}}");
    parse(text);
    ck_assert_uint_eq(config->task_count, TASKS);
    check_value(task_named("w:19999"), "checksum", "true", "dir/c.json:40000 (jobs.w.tasks.19999.checksum)");
    tl_config_destroy(config);
    free(text);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("config");
    TCase *tcase = tcase_create("config");
    tcase_add_test(tcase, the_smallest_configuration);
    tcase_add_test(tcase, all_errors_are_collected_in_the_order_of_the_text);
    tcase_add_test(tcase, what_follows_from_an_error_is_not_collected);
    tcase_add_test(tcase, a_contradiction_that_several_tasks_have_is_collected_once);
    tcase_add_test(tcase, a_text_that_is_not_json_has_one_error);
    tcase_add_test(tcase, no_more_errors_are_collected_than_there_is_space_for);
    tcase_add_test(tcase, the_text_may_go_away);
    tcase_add_test(tcase, later_layers_win);
    tcase_add_test(tcase, a_client_has_the_settings_of_the_top_level);
    tcase_add_test(tcase, values_come_in_order_and_up_to_the_capacity);
    tcase_add_test(tcase, listen_is_by_default_the_own_address);
    tcase_add_test(tcase, the_top_level_is_checked);
    tcase_add_test(tcase, contradictions_are_found_in_what_is_in_force);
    tcase_add_test(tcase, tasks_are_found);
    tcase_add_test(tcase, tasks_that_are_not_there_are_not_found);
    tcase_add_test(tcase, names_that_are_none_are_not_found);
    tcase_add_test(tcase, null_can_be_destroyed);
    tcase_add_test(tcase, large_clusters_are_read);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
