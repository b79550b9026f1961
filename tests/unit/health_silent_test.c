// SPDX-License-Identifier: Apache-2.0
/* What is said of a worker whose address takes connections and does not answer: by the process that listens, and by
 * what other workers know. */
#include <check.h>
#include <stdio.h>
#include <string.h>

#include "fakes/run_suite.h"
#include "server/cli/health.h"
#include "server/cli/local_process.h"

static bool is_listening;
static struct tl_local_process process;

bool tl_local_process_listening(const char *address, struct tl_local_process *ret_process)
{
    ck_assert_str_eq(address, "10.0.0.7:4000");
    *ret_process = process;
    return is_listening;
}

static struct tl_config_task tasks[2] = {{.name = (char *)"/job:ps/task:0", .address = (char *)"10.0.0.7:4000"},
                                         {.name = (char *)"/job:worker/task:0", .address = (char *)"10.0.0.8:4000"}};
static struct tl_peer_description peer;
static struct tl_health_finding findings[2];

static void setup(void)
{
    is_listening = true;
    process = (struct tl_local_process){.pid = 4711,
                                        .name = "tensorlane",
                                        .state = 'S',
                                        .is_worker = true,
                                        .descriptors = 20,
                                        .descriptor_limit = 1024,
                                        .user = 17};
    peer = (struct tl_peer_description){.name = (char *)"/job:ps/task:0",
                                        .state = (char *)"down",
                                        .incarnation = 5,
                                        .host_name = (char *)"gpu-7",
                                        .process_id = 815};
    for (size_t i = 0; i < 2; i++)
        findings[i] = (struct tl_health_finding){.task = &tasks[i]};
    findings[0].is_silent = true;
    snprintf(findings[0].reason, sizeof(findings[0].reason), "silent");
    snprintf(findings[0].remedy, sizeof(findings[0].remedy), "look there");
}

static void identify(void)
{
    findings[1].description.peers = &peer;
    findings[1].description.peer_count = 1;
}

static void expect(bool is_local, const char *reason, const char *remedy)
{
    findings[0].is_local = is_local;
    tl_health_explain_silent(findings, 2, &findings[0]);
    ck_assert_msg(strstr(findings[0].reason, reason) != NULL, "\"%s\" lacks \"%s\"", findings[0].reason, reason);
    ck_assert_msg(strstr(findings[0].remedy, remedy) != NULL, "\"%s\" lacks \"%s\"", findings[0].remedy, remedy);
}

START_TEST(stopped)
{
    process.state = 'T';
    expect(true, "process 4711 (tensorlane) at 10.0.0.7:4000 is stopped", "kill -CONT 4711");
    process.state = 't';
    expect(true, "a debugger holds process 4711", "detach");
}
END_TEST

START_TEST(out_of_descriptors)
{
    process.descriptors = 1022;
    expect(true, "process 4711 (tensorlane) at 10.0.0.7:4000 has 1022 of 1024 descriptors open",
           "prlimit --pid 4711 --nofile=");
    process.descriptors = 1021;
    expect(true, "takes the connections at 10.0.0.7:4000 but does not answer", "it is overloaded or hangs");
    process.state = 'D';
    expect(true, "process 4711", "it waits for a disk");
}
END_TEST

START_TEST(another_program)
{
    process.is_worker = false;
    snprintf(process.name, sizeof(process.name), "sshd");
    expect(true, "another program listens at 10.0.0.7:4000: process 4711 (sshd)", "stop it, or give this task another");
    /* A program with the library in it that another worker has identified. */
    identify();
    peer.process_id = 4711;
    expect(true, "process 4711 (sshd) takes the connections", "overloaded");
}
END_TEST

START_TEST(a_forwarded_port)
{
    process.is_worker = false;
    snprintf(process.name, sizeof(process.name), "docker-proxy");
    identify();
    expect(true, "has identified it as /job:ps/task:0 (process 815 on gpu-7)", "\"ps -o stat= -p 815\" shows T");
    expect(true, "; process 4711 (docker-proxy) takes the connections here and forwards them", "kill -CONT");
    /* No worker has seen it, but what answers speaks HTTP/2. */
    peer.incarnation = 0;
    findings[0].has_http2 = true;
    expect(true, "process 4711 (docker-proxy) takes the connections at 10.0.0.7:4000 but does not answer",
           "it hangs, or forwards the port");
}
END_TEST

START_TEST(a_process_of_another_user)
{
    process.pid = 0;
    expect(true, "silent", "look there; the process belongs to user 17");
    identify();
    expect(true, "/job:worker/task:0 has identified it as /job:ps/task:0", "kill -CONT");
}
END_TEST

START_TEST(another_machine)
{
    is_listening = false;
    expect(false, "silent", "look there");
    expect(true, "silent", "look there");
    peer.incarnation = 0;
    identify();
    expect(false, "silent", "look there");
    peer.incarnation = 5;
    expect(false, "has identified it as /job:ps/task:0 (process 815 on gpu-7): it is stopped, out of descriptors",
           "\"ps -o stat= -p 815\" shows T");
    peer.process_id = 0;
    expect(false, "has identified it as /job:ps/task:0: it is stopped", "\"ps\" shows T");
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("health_silent");
    TCase *tcase = tcase_create("health_silent");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, stopped);
    tcase_add_test(tcase, out_of_descriptors);
    tcase_add_test(tcase, another_program);
    tcase_add_test(tcase, a_forwarded_port);
    tcase_add_test(tcase, a_process_of_another_user);
    tcase_add_test(tcase, another_machine);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
