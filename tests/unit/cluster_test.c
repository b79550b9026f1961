// SPDX-License-Identifier: Apache-2.0
/* The "cluster" object: tasks in order, and everything that is refused. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "config/cluster.h"
#include "fakes/run_suite.h"

static struct tl_json_doc doc;
static struct tl_arena *arena;
static struct tl_config_task *tasks;
static size_t task_count;
static struct tl_error error;

/* Reads {"cluster": TEXT}. */
static enum tl_status read_cluster(const char *text, bool allows_empty_jobs)
{
    static char whole[4096];
    struct tl_json_value cluster;
    snprintf(whole, sizeof(whole), "{\"cluster\": %s}", text);
    arena = tl_arena_create();
    ck_assert_int_eq(tl_json_doc_open(&doc, whole, strlen(whole), "f", &error), TL_OK);
    struct tl_json_value root = tl_json_root(&doc);
    ck_assert(tl_json_member(&root, "cluster", &cluster));
    return tl_cluster_read(&cluster, allows_empty_jobs, arena, &tasks, &task_count, &error);
}

static void close_cluster(void)
{
    tl_json_doc_close(&doc);
    tl_arena_destroy(arena);
}

static void check_refused(const char *text, const char *message)
{
    ck_assert_msg(read_cluster(text, false) == TL_INVALID_ARGUMENT, "%s is accepted", text);
    ck_assert_str_eq(error.message, message);
    ck_assert_int_eq(error.code, TL_INVALID_ARGUMENT);
    close_cluster();
}

START_TEST(tasks_are_sorted_by_job_and_index)
{
    static const struct {
        const char *name;
        const char *job;
        uint32_t index;
        const char *address;
    } expected[] = {
        {"/job:a/task:0", "a", 0, "h:1"},
        {"/job:ps/task:0", "ps", 0, "H:2"},
        {"/job:ps/task:1", "ps", 1, "10.0.0.1:3"},
        {"/job:worker/task:2", "worker", 2, "[::1]:4"},
        {"/job:worker/task:10", "worker", 10, "h:5"},
    };
    ck_assert_int_eq(
        read_cluster("{\"worker\": {\"10\": \"h:5\", \"2\": \"[::1]:4\"}, \"ps\": [\"H:2\", \"10.0.0.1:3\"], \"a\": "
                     "[\"h:1\"]}",
                     false),
        TL_OK);
    ck_assert_uint_eq(task_count, TL_ARRAY_COUNT(expected));
    for (size_t i = 0; i < task_count; i++) {
        ck_assert_str_eq(tasks[i].name, expected[i].name);
        ck_assert_str_eq(tasks[i].job, expected[i].job);
        ck_assert_uint_eq(tasks[i].index, expected[i].index);
        ck_assert_str_eq(tasks[i].address, expected[i].address);
    }
    close_cluster();
}
END_TEST

START_TEST(limits_of_names_and_indexes_are_accepted)
{
    char text[512], job[129];
    memset(job, 'j', 128);
    job[128] = '\0';
    snprintf(text, sizeof(text), "{\"%s\": {\"999999999\": \"h:1\"}, \"-._A9\": [\"h:2\"]}", job);
    ck_assert_int_eq(read_cluster(text, false), TL_OK);
    ck_assert_uint_eq(task_count, 2);
    ck_assert_uint_eq(tasks[1].index, 999999999);
    ck_assert_str_eq(tasks[1].job, job);
    close_cluster();
}
END_TEST

START_TEST(wrong_types_are_refused)
{
    check_refused("[]", "f:1:13: cluster: must be an object of jobs, not a list");
    check_refused("null", "f:1:13: cluster: must be an object of jobs, not null");
    check_refused("{\"ps\": \"h:1\"}", "f:1:20: cluster.ps: must be a list of addresses, [\"host:4000\"], or a map, "
                                       "{\"0\": \"host:4000\"}, not a string");
    check_refused("{\"ps\": [\"h:1\", 4000]}",
                  "f:1:28: cluster.ps[1]: must be an address such as \"host:4000\", not a number");
    check_refused("{\"ps\": {\"0\": [\"h:1\"]}}",
                  "f:1:26: cluster.ps.0: must be an address such as \"host:4000\", not a list");
}
END_TEST

START_TEST(a_cluster_or_job_without_tasks_is_refused)
{
    check_refused("{}", "f:1:13: cluster: the cluster has no tasks; add a job such as \"worker\": [\"host:4000\"]");
    check_refused("{\"a\": [\"h:1\"], \"ps\": []}",
                  "f:1:34: cluster.ps: the job has no tasks; add an address such as \"host:4000\" or remove the job");
    check_refused("{\"ps\": {}}",
                  "f:1:20: cluster.ps: the job has no tasks; add an address such as \"host:4000\" or remove the job");
}
END_TEST

START_TEST(jobs_without_tasks_can_be_allowed)
{
    ck_assert_int_eq(read_cluster("{\"ps\": [], \"worker\": [\"h:1\"], \"chief\": {}}", true), TL_OK);
    ck_assert_uint_eq(task_count, 1);
    ck_assert_str_eq(tasks[0].name, "/job:worker/task:0");
    close_cluster();
    ck_assert_int_eq(read_cluster("{\"ps\": []}", true), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "the cluster has no tasks"));
    close_cluster();
}
END_TEST

START_TEST(job_names_are_checked)
{
    char text[512], job[130], message[512];
    check_refused("{\"\": [\"h:1\"]}",
                  "f:1:14: cluster.\"\": \"\" is no job name; use 1 to 128 letters, digits, '_', '.' and '-'");
    check_refused("{\"a/b\": [\"h:1\"]}",
                  "f:1:14: cluster.\"a/b\": \"a/b\" is no job name; use 1 to 128 letters, digits, '_', '.' and '-'");
    check_refused("{\"a\\n\": [\"h:1\"]}",
                  "f:1:14: cluster.\"a\\x0a\": \"a\\x0a\" is no job name; use 1 to 128 letters, "
                  "digits, '_', '.' and '-'");
    memset(job, 'j', 129);
    job[129] = '\0';
    snprintf(text, sizeof(text), "{\"%s\": [\"h:1\"]}", job);
    snprintf(message, sizeof(message),
             "f:1:14: cluster.\"%.64s...\": \"%.64s...\" is no job name; use 1 to 128 letters, digits, '_', '.' and "
             "'-'",
             job, job);
    check_refused(text, message);
}
END_TEST

START_TEST(task_indexes_are_checked)
{
    static const char *const bad[] = {
        "", "x", "-1", "+1", "01", "00", "1.0", " 1", "1000000000", "99999999999999999999", "1e3"};
    for (size_t i = 0; i < TL_ARRAY_COUNT(bad); i++) {
        char text[128];
        snprintf(text, sizeof(text), "{\"ps\": {\"0\": \"h:1\", \"%s\": \"h:2\"}}", bad[i]);
        ck_assert_int_eq(read_cluster(text, false), TL_INVALID_ARGUMENT);
        ck_assert_ptr_nonnull(strstr(error.message, "f:1:33: cluster.ps."));
        ck_assert_ptr_nonnull(
            strstr(error.message, "is no task index; write a number of 0 to 999999999 without leading zeros"));
        close_cluster();
    }
}
END_TEST

START_TEST(addresses_are_checked)
{
    check_refused("{\"ps\": [\"h:1\", \"h:65536\"]}",
                  "f:1:28: cluster.ps[1]: address \"h:65536\" has a port that is no number up to 65535");
    check_refused(
        "{\"ps\": [\"h:0\"]}",
        "f:1:21: cluster.ps[0]: address \"h:0\" has port 0, which cannot be dialled; use a port of 1 to 65535");
}
END_TEST

START_TEST(two_tasks_at_one_address_are_refused)
{
    check_refused("{\"ps\": [\"h:1\", \"h:2\", \"h:1\"]}",
                  "f:1:35: cluster.ps[2]: /job:ps/task:2 has the address h:1, which /job:ps/task:0 has too; give each "
                  "task its own");
    check_refused("{\"z\": [\"[::1]:1\"], \"a\": {\"5\": \"[0:0::1]:1\"}}",
                  "f:1:43: cluster.a.5: /job:a/task:5 has the address [0:0::1]:1, which /job:z/task:0 has too; give "
                  "each task its own");
    /* When several pairs are equal, the error names the one that a reader meets first. */
    check_refused("{\"z\": [\"z:1\", \"Z:1\"], \"a\": [\"a:1\", \"a.:1\"]}",
                  "f:1:27: cluster.z[1]: /job:z/task:1 has the address Z:1, which /job:z/task:0 has too; give each "
                  "task its own");
}
END_TEST

START_TEST(searching)
{
    size_t first, end;
    const char *names[4];
    ck_assert_int_eq(read_cluster("{\"b\": [\"h:1\", \"h:2\"], \"a\": {\"7\": \"h:3\"}, \"bb\": [\"h:4\"]}", false),
                     TL_OK);
    ck_assert(tl_cluster_find_job(tasks, task_count, "b", &first, &end));
    ck_assert_uint_eq(first, 1);
    ck_assert_uint_eq(end, 3);
    ck_assert_ptr_eq(tl_cluster_find_index(tasks, first, end, 1), &tasks[2]);
    ck_assert_ptr_null(tl_cluster_find_index(tasks, first, end, 2));
    ck_assert(tl_cluster_find_job(tasks, task_count, "bb", &first, &end));
    ck_assert_uint_eq(end, 4);
    ck_assert(!tl_cluster_find_job(tasks, task_count, "", &first, &end));
    ck_assert(!tl_cluster_find_job(tasks, task_count, "c", &first, &end));
    ck_assert(!tl_cluster_find_job(tasks, task_count, "aa", &first, &end));
    ck_assert_uint_eq(tl_cluster_job_names(tasks, task_count, names, 4), 3);
    ck_assert_str_eq(names[0], "a");
    ck_assert_str_eq(names[2], "bb");
    ck_assert_uint_eq(tl_cluster_job_names(tasks, task_count, names, 2), 2);
    close_cluster();
}
END_TEST

START_TEST(jobs_are_described)
{
    char text[128];
    ck_assert_int_eq(
        read_cluster("{\"a\": [\"h:1\", \"h:2\"], \"b\": {\"7\": \"h:3\"}, \"c\": {\"1\": \"h:4\", \"9\": \"h:5\"}}",
                     false),
        TL_OK);
    ck_assert_str_eq(tl_cluster_describe_job(tasks, 0, 2, text, sizeof(text)), "job \"a\" has the tasks 0 to 1");
    ck_assert_str_eq(tl_cluster_describe_job(tasks, 2, 3, text, sizeof(text)), "job \"b\" has only task 7");
    ck_assert_str_eq(tl_cluster_describe_job(tasks, 3, 5, text, sizeof(text)), "job \"c\" has 2 tasks between 1 and 9");
    close_cluster();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("cluster");
    TCase *tcase = tcase_create("cluster");
    tcase_add_test(tcase, tasks_are_sorted_by_job_and_index);
    tcase_add_test(tcase, limits_of_names_and_indexes_are_accepted);
    tcase_add_test(tcase, wrong_types_are_refused);
    tcase_add_test(tcase, a_cluster_or_job_without_tasks_is_refused);
    tcase_add_test(tcase, jobs_without_tasks_can_be_allowed);
    tcase_add_test(tcase, job_names_are_checked);
    tcase_add_test(tcase, task_indexes_are_checked);
    tcase_add_test(tcase, addresses_are_checked);
    tcase_add_test(tcase, two_tasks_at_one_address_are_refused);
    tcase_add_test(tcase, searching);
    tcase_add_test(tcase, jobs_are_described);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
