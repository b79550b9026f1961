// SPDX-License-Identifier: Apache-2.0
/* The "jobs" object: which layer every task gets, and errors. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "config/cluster.h"
#include "config/jobs.h"
#include "fakes/run_suite.h"

#define CLUSTER "\"cluster\": {\"ps\": [\"h:1\", \"h:2\"], \"worker\": {\"3\": \"h:3\", \"5\": \"h:4\"}}"

static struct tl_json_doc doc;
static struct tl_arena *arena;
static struct tl_settings_layer *top;
static struct tl_config_task *tasks;
static const struct tl_settings_layer *layers[4];
static struct tl_error error;

/* Reads {CLUSTER,\n"jobs": TEXT}. */
static enum tl_status read_jobs(const char *text)
{
    static char whole[4096];
    size_t count;
    struct tl_json_value cluster, member;
    snprintf(whole, sizeof(whole), "{" CLUSTER ",\n\"jobs\": %s}", text);
    arena = tl_arena_create();
    ck_assert_int_eq(tl_settings_create(arena, "f", &top, &error), TL_OK);
    ck_assert_int_eq(tl_json_doc_open(&doc, whole, strlen(whole), "f", &error), TL_OK);
    struct tl_json_value root = tl_json_root(&doc);
    ck_assert(tl_json_member(&root, "cluster", &cluster));
    ck_assert_int_eq(tl_cluster_read(&cluster, false, arena, &tasks, &count, &error), TL_OK);
    ck_assert_uint_eq(count, 4);
    for (size_t i = 0; i < count; i++) {
        layers[i] = top;
    }
    ck_assert(tl_json_member(&root, "jobs", &member));
    return tl_jobs_read(&member, &cluster, tasks, count, NULL, arena, top, layers, &error);
}

static void close_jobs(void)
{
    tl_json_doc_close(&doc);
    tl_arena_destroy(arena);
}

static void check_refused(const char *text, const char *message)
{
    ck_assert_int_eq(read_jobs(text), TL_INVALID_ARGUMENT);
    ck_assert_str_eq(error.message, message);
    close_jobs();
}

START_TEST(tasks_without_settings_share_the_top_layer)
{
    ck_assert_int_eq(read_jobs("{}"), TL_OK);
    for (size_t i = 0; i < 4; i++) {
        ck_assert_ptr_eq(layers[i], top);
    }
    close_jobs();
}
END_TEST

START_TEST(a_job_changes_its_tasks_and_a_task_itself)
{
    ck_assert_int_eq(read_jobs("{\"worker\": {\"tasks\": {\"5\": {\"limits\": {\"waiting\": 7}}}, \"checksum\": true, "
                               "\"limits\": {\"waiting\": 6, \"connections\": 9}}}"),
                     TL_OK);
    ck_assert_ptr_eq(layers[0], top);
    ck_assert_ptr_eq(layers[1], top);
    ck_assert_uint_eq(layers[2]->settings.waiting_receivers, 6);
    ck_assert_uint_eq(layers[2]->settings.connections, 9);
    ck_assert(layers[2]->settings.checksum);
    /* The order in the text does not matter. */
    ck_assert_uint_eq(layers[3]->settings.waiting_receivers, 7);
    ck_assert_uint_eq(layers[3]->settings.connections, 9);
    ck_assert(layers[3]->settings.checksum);
    size_t waiting = tl_settings_find(offsetof(struct tl_settings, waiting_receivers));
    size_t connections = tl_settings_find(offsetof(struct tl_settings, connections));
    ck_assert_str_eq(layers[3]->origins[waiting].origin, "f:2 (jobs.worker.tasks.5.limits.waiting)");
    ck_assert_str_eq(layers[3]->origins[connections].origin, "f:2 (jobs.worker.limits.connections)");
    ck_assert_uint_eq(top->settings.waiting_receivers, 65536);
    close_jobs();
}
END_TEST

START_TEST(all_tasks_of_a_job_share_its_layer)
{
    ck_assert_int_eq(read_jobs("{\"ps\": {\"checksum\": true}}"), TL_OK);
    ck_assert_ptr_ne(layers[0], top);
    ck_assert_ptr_eq(layers[0], layers[1]);
    ck_assert_ptr_eq(layers[2], top);
    close_jobs();
}
END_TEST

START_TEST(jobs_and_tasks_must_be_in_the_cluster)
{
    check_refused("{\"wroker\": {}}", "f:2:10: jobs.wroker: there is no job in the cluster called \"wroker\"; did you "
                                      "mean \"worker\"?");
    check_refused("{\"evaluation\": {}}", "f:2:10: jobs.evaluation: there is no job in the cluster called "
                                          "\"evaluation\"; use one of \"ps\", \"worker\"");
    check_refused(
        "{\"ps\": {\"tasks\": {\"2\": {}}}}",
        "f:2:27: jobs.ps.tasks.2: task 2 is not in the cluster, where job \"ps\" has the tasks 0 to 1; add it "
        "there or correct the index");
    check_refused(
        "{\"worker\": {\"tasks\": {\"4\": {}}}}",
        "f:2:31: jobs.worker.tasks.4: task 4 is not in the cluster, where job \"worker\" has 2 tasks between 3 "
        "and 5; add it there or correct the index");
    check_refused("{\"ps\": {\"tasks\": {\"00\": {}}}}",
                  "f:2:27: jobs.ps.tasks.00: \"00\" is no task index; write a number of 0 to 999999999 without leading "
                  "zeros");
}
END_TEST

START_TEST(wrong_types_are_refused)
{
    check_refused("[]", "f:2:9: jobs: must be an object of jobs, {\"ps\": {...}}, not a list");
    check_refused("{\"ps\": []}", "f:2:16: jobs.ps: must be an object of settings, not a list");
    check_refused("{\"ps\": {\"tasks\": []}}",
                  "f:2:26: jobs.ps.tasks: must be an object of tasks, {\"0\": {...}}, not a list");
    check_refused("{\"ps\": {\"tasks\": {\"0\": true}}}",
                  "f:2:32: jobs.ps.tasks.0: must be an object of settings, not true");
}
END_TEST

START_TEST(settings_are_checked_on_every_level)
{
    check_refused("{\"ps\": {\"cheksum\": true}}",
                  "f:2:17: jobs.ps.cheksum: there is no setting \"cheksum\"; did you mean \"checksum\"?");
    check_refused(
        "{\"ps\": {\"tasks\": {\"0\": {\"tasks\": {}}}}}",
        "f:2:33: jobs.ps.tasks.0.tasks: there is no setting \"tasks\"; use one of \"protocol\", \"rdma\", "
        "\"connect\", \"checksum\", \"listen\", \"publish\", \"device\", \"peers\", \"limits\", \"timeouts\", "
        "\"local\", \"verbs\", \"gpu\", \"security\", \"log\"");
    check_refused("{\"ps\": {\"tasks\": {\"1\": {\"limits\": {\"held\": -1}}}}}",
                  "f:2:52: jobs.ps.tasks.1.limits.held: -1 is negative; write a number of bytes, or a size such as "
                  "\"512MiB\"");
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("jobs");
    TCase *tcase = tcase_create("jobs");
    tcase_add_test(tcase, tasks_without_settings_share_the_top_layer);
    tcase_add_test(tcase, a_job_changes_its_tasks_and_a_task_itself);
    tcase_add_test(tcase, all_tasks_of_a_job_share_its_layer);
    tcase_add_test(tcase, jobs_and_tasks_must_be_in_the_cluster);
    tcase_add_test(tcase, wrong_types_are_refused);
    tcase_add_test(tcase, settings_are_checked_on_every_level);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
