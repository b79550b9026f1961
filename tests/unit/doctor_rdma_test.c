// SPDX-License-Identifier: Apache-2.0
/* What `tensorlane doctor` says of cards that this machine need not have. */
#include "server/cli/doctor_rdma.h"

#include <check.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "fakes/doctor_report.h"
#include "fakes/run_suite.h"
#include "fakes/sound_card.h"

static const struct tl_doctor_needs usual = {.pool_bytes = 64 << 20};
static const struct tl_doctor_needs required = {.is_rdma_required = true, .pool_bytes = 64 << 20};
static struct tl_verbs_candidate candidates[3];
static struct tl_config_task task;
static struct tl_devices_report devices;

/* One sound port with two GIDs, and what the kernel tells of it. */
static void make_card(void)
{
    make_roots();
    task = (struct tl_config_task){.name = "/job:ps/task:0"};
    candidates[0] = (struct tl_verbs_candidate){SOUND_CARD, .reason = "its GID is the worker's address",
                                                .mtu_bytes = 4096, .speed_mbps = 100000};
    candidates[1] = candidates[0];
    candidates[1].order = 1;
    candidates[1].gid_index = 2;
    snprintf(candidates[1].gid_type, sizeof(candidates[1].gid_type), "RoCE v1");
    devices = (struct tl_devices_report){.task = &task, .candidates = candidates, .count = 2};
    make_file("sys/class/infiniband/mlx5_0/ports/1/pkeys/0", "0xffff\n");
    make_file("sys/class/infiniband/mlx5_0/ports/1/pkeys/1", "0x0000\n");
    make_file("sys/class/infiniband/mlx5_0/ports/1/pkeys/2", "0x0001\n");
    make_file("sys/class/net/eth0/mtu", "9000\n");
    make_file("sys/devices/system/node/node1/cpulist", "8-15,24-31\n");
    make_file("proc/self/status", "Name:\tx\nCpus_allowed_list:\t0-8\nMems_allowed_list:\t0\n");
}

/* Looks at the ports and checks the one line that is about `what`. */
static void check_port(const struct tl_doctor_needs *needs, enum tl_doctor_verdict verdict, const char *what,
                       const char *value, const char *cause, const char *remedy)
{
    report.count = 0;
    tl_doctor_check_ports(&report, &roots, needs, &devices);
    size_t found_count = 0;
    struct tl_doctor_line found = {.what = ""};
    for (size_t i = 0; i < report.count; i++) {
        if (strcmp(report.lines[i].what, what) != 0) continue;
        found = report.lines[i];
        found_count++;
    }
    ck_assert_msg(found_count == 1, "%zu lines about %s", found_count, what);
    report.lines[report.count - 1] = found;
    check_last(verdict, what, value, cause, remedy);
}

START_TEST(sound_port)
{
    check_port(&usual, TL_DOCTOR_OK, "port mlx5_0:1", "active, Ethernet, 100 Gbit/s", "", "");
    check_port(&usual, TL_DOCTOR_OK, "GIDs of mlx5_0:1", "3: 10.0.0.1 RoCE v2 eth0, 2: 10.0.0.1 RoCE v1 eth0", "", "");
    check_port(&usual, TL_DOCTOR_OK, "MTU of mlx5_0:1", "4096 of 4096; eth0 has 9000", "", "");
    check_port(&usual, TL_DOCTOR_OK, "partition keys of mlx5_0:1", "0: 0xffff, 2: 0x0001", "", "");
    check_port(&usual, TL_DOCTOR_OK, "memory windows of mlx5_0", "type 2", "", "");
    check_port(&usual, TL_DOCTOR_OK, "NUMA node of mlx5_0", "1", "", "");
}
END_TEST

START_TEST(port_is_down)
{
    for (size_t i = 0; i < 2; i++)
        snprintf(candidates[i].state, sizeof(candidates[i].state), "down");
    check_port(&usual, TL_DOCTOR_NOTE, "port mlx5_0:1", "down", "the port is down", "look at the cable");
    check_port(&required, TL_DOCTOR_FAULT, "port mlx5_0:1", "down", "the port is down", "look at the cable");
}
END_TEST

/* Where a task requires a card and has one, the others need not work. */
START_TEST(another_port_is_down)
{
    candidates[2] = candidates[0];
    candidates[2].order = -1;
    candidates[2].port = 2;
    candidates[2].gid_index = -1;
    candidates[2].has_windows = false;
    snprintf(candidates[2].state, sizeof(candidates[2].state), "down");
    make_file("sys/class/infiniband/mlx5_0/ports/2/pkeys/0", "0x0000\n");
    devices.count = 3;
    check_port(&required, TL_DOCTOR_OK, "port mlx5_0:1", "active", "", "");
    check_port(&required, TL_DOCTOR_NOTE, "port mlx5_0:2", "down", "the port is down", "look at the cable");
    check_port(&required, TL_DOCTOR_NOTE, "GIDs of mlx5_0:2", "none", "no address", "give it one");
    check_port(&required, TL_DOCTOR_NOTE, "partition keys of mlx5_0:2", "", "is empty", "set it to one");
    candidates[0].order = candidates[1].order = -1;
    check_port(&required, TL_DOCTOR_FAULT, "port mlx5_0:2", "down", "the port is down", "look at the cable");
}
END_TEST

START_TEST(no_gid)
{
    devices.count = 1;
    candidates[0].gid_index = -1;
    check_port(&usual, TL_DOCTOR_NOTE, "GIDs of mlx5_0:1", "none", "its interface has no address", "give it one");
}
END_TEST

START_TEST(small_mtu)
{
    candidates[0].mtu_bytes = 1024;
    make_file("sys/class/net/eth0/mtu", "1500\n");
    check_port(&required, TL_DOCTOR_NOTE, "MTU of mlx5_0:1", "1024 of 4096; eth0 has 1500",
               "packets carry 1024 bytes, and could 4096", "ip link set eth0 mtu 4200");
}
END_TEST

START_TEST(partition_keys)
{
    task.settings.verbs.pkey_index = 3;
    check_port(&usual, TL_DOCTOR_NOTE, "partition keys of mlx5_0:1", "0: 0xffff",
               "verbs.pkey_index is 3, and the table of the port has 3 entries", "set it to an entry");
    check_port(&required, TL_DOCTOR_FAULT, "partition keys of mlx5_0:1", "0: 0xffff", "verbs.pkey_index is 3",
               "set it to an entry");
    task.settings.verbs.pkey_index = 1;
    check_port(&required, TL_DOCTOR_FAULT, "partition keys of mlx5_0:1", "0: 0xffff",
               "this entry of the table is empty", "set it to one that is not");
    task.settings.verbs.pkey_index = 2;
    check_port(&required, TL_DOCTOR_NOTE, "partition keys of mlx5_0:1", "0: 0xffff",
               "a limited member of partition 0x0001", "full member");
    snprintf(candidates[0].device, sizeof(candidates[0].device), "mlx5_9");
    devices.count = 1;
    check_port(&required, TL_DOCTOR_UNKNOWN, "partition keys of mlx5_9:1", "-", "shows no table", "ibv_devinfo");
}
END_TEST

START_TEST(no_windows)
{
    candidates[0].has_windows = false;
    check_port(&usual, TL_DOCTOR_NOTE, "memory windows of mlx5_0", "none", "no memory windows of type 2",
               "set verbs.keys to \"region\"");
    check_port(&required, TL_DOCTOR_FAULT, "memory windows of mlx5_0", "none", "no memory windows", "set verbs.keys");
    task.settings.verbs.keys = TL_VERBS_KEYS_REGION;
    check_port(&required, TL_DOCTOR_OK, "memory windows of mlx5_0", "none", "", "");
}
END_TEST

START_TEST(far_node)
{
    make_file("proc/self/status", "Cpus_allowed_list:\t0-7,16-23,40\n");
    check_port(&usual, TL_DOCTOR_NOTE, "NUMA node of mlx5_0", "1", "this process may run on 0-7,16-23,40 only",
               "numactl --cpunodebind=1");
    make_file("proc/self/status", "Cpus_allowed_list:\t0,16,30\n");
    check_port(&usual, TL_DOCTOR_OK, "NUMA node of mlx5_0", "1", "", "");
    candidates[0].numa_node = -1;
    check_port(&usual, TL_DOCTOR_OK, "NUMA node of mlx5_0", "none", "", "");
}
END_TEST

START_TEST(device_without_node)
{
    candidates[0] = (struct tl_verbs_candidate){
        .order = -1, .device = "mlx5_0", .gid_index = -1, .reason = "cannot open it; a container needs --device"};
    devices.count = 1;
    check_port(&usual, TL_DOCTOR_NOTE, "device mlx5_0", "-", "cannot open it", "a container needs --device");
    snprintf(candidates[0].reason, sizeof(candidates[0].reason), "cannot ask it");
    check_port(&required, TL_DOCTOR_FAULT, "device mlx5_0", "-", "cannot ask it", "dmesg");
}
END_TEST

/* ------------------------------------------------------------------------------------------------------ choice -- */

START_TEST(chosen)
{
    devices.failed_count = 1;
    devices.is_verified = true;
    tl_doctor_check_choice(&report, &usual, &devices);
    check_last(TL_DOCTOR_OK, "card for /job:ps/task:0", "mlx5_0 port 1 with GID 2; a write through it was verified", "",
               "");
    devices.task = NULL;
    tl_doctor_check_choice(&report, &usual, &devices);
    check_last(TL_DOCTOR_OK, "card for a task", "mlx5_0 port 1", "", "");
}
END_TEST

START_TEST(none_chosen)
{
    candidates[0].order = candidates[1].order = -1;
    snprintf(candidates[0].reason, sizeof(candidates[0].reason), "its GID is not the worker's address 10.0.0.9");
    tl_doctor_check_choice(&report, &usual, &devices);
    check_last(TL_DOCTOR_NOTE, "card for /job:ps/task:0", "none",
               "mlx5_0 port 1: its GID is not the worker's address 10.0.0.9", "tensorlane devices");
    tl_doctor_check_choice(&report, &required, &devices);
    check_last(TL_DOCTOR_FAULT, "card for /job:ps/task:0", "none", "its GID is not", "tensorlane devices");
}
END_TEST

/* What other lines say already is not repeated. */
START_TEST(nothing_to_choose)
{
    devices.refusal = "rdma is off";
    tl_doctor_check_choice(&report, &usual, &devices);
    devices.refusal = NULL;
    devices.lock_error.code = TL_RESOURCE_EXHAUSTED;
    tl_doctor_check_choice(&report, &usual, &devices);
    devices.lock_error.code = TL_OK;
    devices.list_error.code = TL_NOT_FOUND;
    tl_doctor_check_choice(&report, &usual, &devices);
    ck_assert_uint_eq(report.count, 0);
    devices.list_error = (struct tl_error){.code = TL_INVALID_ARGUMENT, .message = "devices: no list; correct it"};
    tl_doctor_check_choice(&report, &usual, &devices);
    check_last(TL_DOCTOR_NOTE, "card for /job:ps/task:0", "-", "devices: no list", "correct it");
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("doctor_rdma");
    TCase *ports = tcase_create("ports");
    tcase_add_checked_fixture(ports, make_card, remove_roots);
    tcase_add_test(ports, sound_port);
    tcase_add_test(ports, port_is_down);
    tcase_add_test(ports, another_port_is_down);
    tcase_add_test(ports, no_gid);
    tcase_add_test(ports, small_mtu);
    tcase_add_test(ports, partition_keys);
    tcase_add_test(ports, no_windows);
    tcase_add_test(ports, far_node);
    tcase_add_test(ports, device_without_node);
    suite_add_tcase(suite, ports);
    TCase *choice = tcase_create("choice");
    tcase_add_checked_fixture(choice, make_card, remove_roots);
    tcase_add_test(choice, chosen);
    tcase_add_test(choice, none_chosen);
    tcase_add_test(choice, nothing_to_choose);
    suite_add_tcase(suite, choice);
    return run_suite(suite);
}
