// SPDX-License-Identifier: Apache-2.0
/* What `tensorlane doctor` says of workers, and of their addresses after small and large packets were tried. */
#include "server/cli/doctor_peers.h"

#include <check.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "fakes/doctor_report.h"
#include "fakes/run_suite.h"
#include "server/cli/doctor_tcp.h"

#define TASK "/job:ps/task:0"

static struct tl_doctor_reached make_reached(const char *address, enum tl_doctor_reach usual,
                                             enum tl_doctor_reach small)
{
    struct tl_doctor_reached reached = {.usual = {.reach = usual, .segment_bytes = 1448}, .small = {.reach = small}};
    ck_assert(tl_ip_parse(address, &reached.ip));
    return reached;
}

static void judge(const struct tl_doctor_reached *reached, size_t count)
{
    report.count = 0;
    tl_doctor_judge_reached(&report, TASK, 4000, reached, count);
    ck_assert_uint_eq(report.count, count);
}

START_TEST(all_is_reached)
{
    const struct tl_doctor_reached reached = make_reached("10.0.0.7", TL_DOCTOR_REACH_ALL, TL_DOCTOR_REACH_NONE);
    judge(&reached, 1);
    check_last(TL_DOCTOR_OK, "TCP to " TASK, "10.0.0.7:4000 (IPv4): large packets both ways, segments of 1448 bytes",
               "", "");
}
END_TEST

START_TEST(no_connection)
{
    struct tl_doctor_reached reached[2] = {make_reached("fd00::7", TL_DOCTOR_REACH_ALL, TL_DOCTOR_REACH_NONE),
                                           make_reached("10.0.0.7", TL_DOCTOR_REACH_NONE, TL_DOCTOR_REACH_NONE)};
    reached[1].usual.error_number = ECONNREFUSED;
    judge(&reached[1], 1);
    check_last(TL_DOCTOR_FAULT, "TCP to " TASK, "10.0.0.7:4000 (IPv4): no connection",
               "10.0.0.7:4000 (IPv4) refuses the connection", "start the worker");
    judge(reached, 2);
    check_last(TL_DOCTOR_NOTE, "TCP to " TASK, "no connection",
               "refuses the connection, while [fd00::7]:4000 (IPv6) answers", "let it listen at this address");
    reached[1].usual.error_number = ETIMEDOUT;
    judge(&reached[1], 1);
    check_last(TL_DOCTOR_FAULT, "TCP to " TASK, "no connection", "does not answer to TCP", "allow TCP port 4000");
    reached[1].usual.error_number = ENETUNREACH;
    judge(&reached[1], 1);
    check_last(TL_DOCTOR_FAULT, "TCP to " TASK, "no connection", "cannot be reached: Network is unreachable",
               "check the address");
}
END_TEST

START_TEST(no_answer)
{
    struct tl_doctor_reached reached = make_reached("10.0.0.7", TL_DOCTOR_REACH_TCP, TL_DOCTOR_REACH_TCP);
    judge(&reached, 1);
    check_last(TL_DOCTOR_FAULT, "TCP to " TASK, "connected, no answer", "answers to no packet of any size",
               "kill -CONT");
    reached = make_reached("10.0.0.7", TL_DOCTOR_REACH_FOREIGN, TL_DOCTOR_REACH_NONE);
    judge(&reached, 1);
    check_last(TL_DOCTOR_FAULT, "TCP to " TASK, "no HTTP/2", "does not speak HTTP/2", "stop the other program");
}
END_TEST

START_TEST(large_packets_are_lost)
{
    struct tl_doctor_reached reached = make_reached("10.0.0.7", TL_DOCTOR_REACH_SMALL, TL_DOCTOR_REACH_ALL);
    judge(&reached, 1);
    check_last(TL_DOCTOR_FAULT, "TCP to " TASK, "small packets only",
               "packets with 500 bytes of data pass to 10.0.0.7:4000 (IPv4), those with 1448 are lost",
               "net.ipv4.tcp_mtu_probing=1");
    reached = make_reached("10.0.0.7", TL_DOCTOR_REACH_LARGE_TO, TL_DOCTOR_REACH_ALL);
    judge(&reached, 1);
    check_last(TL_DOCTOR_FAULT, "TCP to " TASK, "small packets only", "pass from 10.0.0.7:4000", "lower the MTU");
    reached = make_reached("10.0.0.7", TL_DOCTOR_REACH_SMALL, TL_DOCTOR_REACH_SMALL);
    judge(&reached, 1);
    check_last(TL_DOCTOR_FAULT, "TCP to " TASK, "small packets only", "at any size of packets", "look at its log");
}
END_TEST

START_TEST(workers)
{
    const struct tl_config_task task = {.name = TASK};
    struct tl_health_finding finding = {.task = &task, .is_healthy = true, .stage = TL_HEALTH_STAGE_PATHS};
    tl_doctor_judge_worker(&report, &finding, "1.0");
    check_last(TL_DOCTOR_OK, "worker " TASK, "healthy, stage paths", "", "");
    static char version[] = "0.9";
    finding.has_description = true;
    finding.description.software_version = version;
    tl_doctor_judge_worker(&report, &finding, "1.0");
    check_last(TL_DOCTOR_NOTE, "worker " TASK, "healthy, stage paths, version 0.9", "the worker has version 0.9",
               "install the same version");
    tl_doctor_judge_worker(&report, &finding, "0.9");
    check_last(TL_DOCTOR_OK, "worker " TASK, "version 0.9", "", "");
    snprintf(finding.reason, sizeof(finding.reason), "over grpc to ps:1");
    tl_doctor_judge_worker(&report, &finding, "0.9");
    check_last(TL_DOCTOR_NOTE, "worker " TASK, "healthy", "over grpc to ps:1", "see its log");
    snprintf(finding.reason, sizeof(finding.reason), "it refused; is it started?");
    snprintf(finding.remedy, sizeof(finding.remedy), "start it");
    finding.is_healthy = false;
    tl_doctor_judge_worker(&report, &finding, "0.9");
    check_last(TL_DOCTOR_FAULT, "worker " TASK, "not healthy", "it refused; is it started?", "start it");
    ck_assert_str_eq(report.lines[report.count - 1].remedy, "start it");
}
END_TEST

START_TEST(clocks)
{
    struct tl_doctor_clock clock = {.before_ns = 10 * TL_NS_PER_SEC, .after_ns = 12 * TL_NS_PER_SEC};
    tl_doctor_judge_clock(&report, TASK, &clock);
    ck_assert_uint_eq(report.count, 0);
    clock.unix_ns = 13 * TL_NS_PER_SEC;
    tl_doctor_judge_clock(&report, TASK, &clock);
    check_last(TL_DOCTOR_OK, "clock of " TASK, "2.00 s before this machine's, give or take 1.00 s", "", "");
    clock.unix_ns++;
    tl_doctor_judge_clock(&report, TASK, &clock);
    check_last(TL_DOCTOR_NOTE, "clock of " TASK, "2.00 s before", "the clocks differ", "chronyc");
    clock.unix_ns = 8 * TL_NS_PER_SEC;
    tl_doctor_judge_clock(&report, TASK, &clock);
    check_last(TL_DOCTOR_NOTE, "clock of " TASK, "3.00 s behind this machine's", "the clocks differ", "chronyc");
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("doctor_peers");
    TCase *peers = tcase_create("peers");
    tcase_add_checked_fixture(peers, make_roots, remove_roots);
    tcase_add_test(peers, all_is_reached);
    tcase_add_test(peers, no_connection);
    tcase_add_test(peers, no_answer);
    tcase_add_test(peers, large_packets_are_lost);
    tcase_add_test(peers, workers);
    tcase_add_test(peers, clocks);
    suite_add_tcase(suite, peers);
    return run_suite(suite);
}
