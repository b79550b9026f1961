// SPDX-License-Identifier: Apache-2.0
/* Node lists of Slurm, host files, the order of tasks, names of pods, and errors. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "config/launch.h"
#include "fakes/run_suite.h"

static struct tl_launch launch;
static struct tl_error error;

/* Writes the hosts as "a*2 b*1". */
static const char *hosts(void)
{
    static char text[1024];
    size_t length = 0;
    text[0] = '\0';
    for (const struct tl_launch_host *host = launch.hosts; host; host = host->hh.next)
        length += (size_t)snprintf(text + length, sizeof(text) - length, "%s%s*%u", length ? " " : "", host->name,
                                   host->task_count);
    tl_launch_fini(&launch);
    return text;
}

/* Writes the tasks as "a0 a1 b0". */
static const char *placed(uint32_t run)
{
    static char text[1024];
    struct tl_launch_task tasks[64];
    size_t length = 0;
    ck_assert_uint_le(launch.task_count, TL_ARRAY_COUNT(tasks));
    tl_launch_place(&launch, run, tasks);
    for (uint32_t i = 0; i < launch.task_count; i++)
        length += (size_t)snprintf(text + length, sizeof(text) - length, "%s%s%u", length ? " " : "",
                                   tasks[i].host->name, tasks[i].place);
    return text;
}

static void check_refused(enum tl_status status, const char *message)
{
    ck_assert_int_eq(status, TL_INVALID_ARGUMENT);
    ck_assert_str_eq(error.message, message);
    tl_launch_fini(&launch);
}

START_TEST(node_lists)
{
    static const char *const cases[][3] = {
        {"one", NULL, "one*1"},
        {"node[001-003,007],gpu-[1-2]-x", NULL, "node001*1 node002*1 node003*1 node007*1 gpu-1-x*1 gpu-2-x*1"},
        {"r[0-1]n[9-10]", NULL, "r0n9*1 r0n10*1 r1n9*1 r1n10*1"},
        {"n[098-101]", NULL, "n098*1 n099*1 n100*1 n101*1"},
        {"a,b", "3,1", "a*3 b*1"},
        {"a[1-3],b", "2(x3),1", "a1*2 a2*2 a3*2 b*1"},
        {"a[1-2],b[1-2]", "2(x3),1(x1)", "a1*2 a2*2 b1*2 b2*1"},
        {"10.0.0.[1-2]", NULL, "10.0.0.1*1 10.0.0.2*1"},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(cases); i++) {
        ck_assert_int_eq(tl_launch_add_slurm(&launch, cases[i][0], cases[i][1], 1, &error), TL_OK);
        ck_assert_str_eq(hosts(), cases[i][2]);
    }
}
END_TEST

START_TEST(refused_node_lists)
{
    static const char *const cases[][3] = {
        {"", NULL, "\"\" is no name of a host"},
        {"a,", NULL, "\"\" is no name of a host"},
        {"a b", NULL, "\"a b\" is no name of a host"},
        {"a]", NULL, "\"a]\" is no name of a host"},
        {"a[1", NULL, "\"a[1\": a bracket is not closed"},
        {"a[]", NULL, "\"a[]\": a range has no number"},
        {"a[1,]", NULL, "\"a[1,]\": a range has no number"},
        {"a[1-]", NULL, "\"a[1-]\": a range has no last number"},
        {"a[2-1]", NULL, "\"a[2-1]\": a range ends before it begins"},
        {"a[1;2]", NULL, "\"a[1;2]\": a range has another character than digits, - and ,"},
        {"a[1234567890123456]", NULL, "\"a[1234567890123456]\": a range has no number"},
        {"a[1-70000]", NULL, "there are more than 65536 tasks"},
        {"a[1-999999999999999]", NULL, "there are more than 65536 tasks"},
        {"a,b", "1", "\"1\": has fewer numbers of tasks than the node list has nodes"},
        {"a", "1,1", "\"1,1\": has more numbers of tasks than the node list has nodes"},
        {"a", "1(x2)", "\"1(x2)\": has more numbers of tasks than the node list has nodes"},
        {"a", "x", "\"x\": is no list of numbers of tasks, such as \"2(x3),1\""},
        {"a", "0", "\"0\": is no list of numbers of tasks, such as \"2(x3),1\""},
        {"a", "1(x", "\"1(x\": is no list of numbers of tasks, such as \"2(x3),1\""},
        {"a", "1(x1", "\"1(x1\": is no list of numbers of tasks, such as \"2(x3),1\""},
        {"a", "70000", "\"70000\": is no list of numbers of tasks, such as \"2(x3),1\""},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(cases); i++)
        check_refused(tl_launch_add_slurm(&launch, cases[i][0], cases[i][1], 1, &error), cases[i][2]);
}
END_TEST

START_TEST(names_have_an_end)
{
    char list[400];
    memset(list, 'a', sizeof(list));
    for (size_t i = 50; i < 250; i += 50)
        list[i] = '.'; /* A part of a name has at most 63 bytes. */
    strcpy(list + 254, "[1-10]");
    ck_assert_int_eq(tl_launch_add_slurm(&launch, list, NULL, 1, &error), TL_INVALID_ARGUMENT);
    ck_assert(strstr(error.message, "a name is too long"));
    ck_assert_uint_eq(launch.task_count, 9);
    tl_launch_fini(&launch);
    memset(list, 'a', sizeof(list) - 1);
    list[sizeof(list) - 1] = '\0';
    ck_assert_int_eq(tl_launch_add_slurm(&launch, list, NULL, 1, &error), TL_INVALID_ARGUMENT);
    ck_assert(strstr(error.message, "a name is too long"));
}
END_TEST

static enum tl_status add_hostfile(const char *lines, uint32_t per_host)
{
    char text[512];
    snprintf(text, sizeof(text), "%s", lines);
    return tl_launch_add_hostfile(&launch, text, per_host, &error);
}

START_TEST(host_files)
{
    ck_assert_int_eq(add_hostfile("# nodes\n\na slots=2 max_slots=4\nb:3  # three\r\n c\t\nc\n", 0), TL_OK);
    ck_assert_str_eq(hosts(), "a*2 b*3 c*2");
    ck_assert_int_eq(add_hostfile("[fd00::1]:2\nfd00::2\n[fd00::3]", 0), TL_OK);
    ck_assert_str_eq(hosts(), "fd00::1*2 fd00::2*1 fd00::3*1");
    ck_assert_int_eq(add_hostfile("a slots=8\nb\na\n", 2), TL_OK);
    ck_assert_str_eq(hosts(), "a*2 b*2");
    ck_assert_int_eq(add_hostfile("", 0), TL_OK);
    ck_assert_str_eq(hosts(), "");
}
END_TEST

START_TEST(refused_host_files)
{
    static const char colon[] =
        "line 2: behind the colon of a host stands how many tasks it has, a number of 1 to 65536";
    check_refused(add_hostfile("a\nb:x", 0), colon);
    check_refused(add_hostfile("a\nb:0", 0), colon);
    check_refused(add_hostfile("a\n[fd00::1]:", 0), colon);
    check_refused(add_hostfile("a\n[fd00::1]x:8", 0), colon);
    check_refused(add_hostfile("a 8", 0), "line 1: \"8\"; a line is \"HOST\", \"HOST:N\" or \"HOST slots=N\"");
    check_refused(add_hostfile("a slots=0", 0),
                  "line 1: \"slots=0\"; a line is \"HOST\", \"HOST:N\" or \"HOST slots=N\"");
    check_refused(add_hostfile("a\"b", 0), "line 1: \"a\\\"b\" is no name of a host");
    check_refused(add_hostfile("a slots=65536\nb", 0), "line 2: there are more than 65536 tasks");
    check_refused(add_hostfile("a\n-b", 0), "line 2: address \"-b\" has a host that is no name; use letters, digits, "
                                            "'-', '_' and '.', and no scheme or path");
    check_refused(add_hostfile("a\nfe80::g", 0), "line 2: address \"fe80::g\" is no IPv6 address; a host has no port");
    check_refused(add_hostfile("0.0.0.0", 0),
                  "line 1: address \"0.0.0.0\" cannot be dialled by other machines; name the machine here and bind to "
                  "all addresses with \"listen\"");
}
END_TEST

START_TEST(hosts_in_two_spellings)
{
    static const char *const cases[][2] = {{"a", "A"}, {"b.", "b"}, {"::1", "[0:0::1]"}};
    for (size_t i = 0; i < TL_ARRAY_COUNT(cases); i++) {
        char lines[64], message[128];
        snprintf(lines, sizeof(lines), "%s\n%s", cases[i][0], cases[i][1]);
        const char *name = i == 2 ? "0:0::1" : cases[i][1];
        snprintf(message, sizeof(message), "line 2: \"%s\" is the host %s in another spelling; write it in one", name,
                 cases[i][0]);
        check_refused(add_hostfile(lines, 0), message);
        check_refused(add_hostfile(lines, 1), message);
    }
}
END_TEST

START_TEST(order_of_tasks)
{
    ck_assert_int_eq(tl_launch_add_slurm(&launch, "a,b", "3,1", 0, &error), TL_OK);
    launch.group = 1;
    ck_assert_int_eq(tl_launch_add_slurm(&launch, "c,d", "1,2", 0, &error), TL_OK);
    ck_assert_str_eq(placed(TL_LAUNCH_BLOCK), "a0 a1 a2 b0 c0 d0 d1");
    ck_assert_str_eq(placed(TL_LAUNCH_CYCLIC), "a0 b0 a1 a2 c0 d0 d1");
    ck_assert_str_eq(placed(2), "a0 a1 b0 a2 c0 d0 d1");
    check_refused(tl_launch_add(&launch, "a", 1, 1, &error), "a is in two components of the job");
}
END_TEST

START_TEST(names_of_pods)
{
    char host[TL_LAUNCH_HOST_BYTES], long_pattern[300];
    ck_assert_int_eq(tl_launch_expand("t-{job}-{index}.s", "ps", 3, 0, host, &error), TL_OK);
    ck_assert_str_eq(host, "t-ps-3.s");
    ck_assert_int_eq(tl_launch_expand("t-{group}-{index}.s", "ps", 7, 4, host, &error), TL_OK);
    ck_assert_str_eq(host, "t-1-3.s");
    check_refused(tl_launch_expand("t-{pod}", "ps", 0, 0, host, &error),
                  "\"t-{pod}\": there are {job}, {index} and {group} in braces");
    memset(long_pattern, 'a', sizeof(long_pattern) - 1);
    long_pattern[sizeof(long_pattern) - 1] = '\0';
    ck_assert_int_eq(tl_launch_expand(long_pattern, "ps", 0, 0, host, &error), TL_INVALID_ARGUMENT);
    ck_assert(strstr(error.message, "makes names of hosts that are too long"));
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("launch");
    TCase *tests = tcase_create("launch");
    tcase_add_test(tests, node_lists);
    tcase_add_test(tests, refused_node_lists);
    tcase_add_test(tests, names_have_an_end);
    tcase_add_test(tests, host_files);
    tcase_add_test(tests, refused_host_files);
    tcase_add_test(tests, hosts_in_two_spellings);
    tcase_add_test(tests, order_of_tasks);
    tcase_add_test(tests, names_of_pods);
    suite_add_tcase(suite, tests);
    return run_suite(suite);
}
