// SPDX-License-Identifier: Apache-2.0
/* What `tensorlane doctor` says of machines that a test makes up: folders of the kernel, and limits. */
#include "server/cli/doctor.h"

#include <check.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "fakes/doctor_report.h"
#include "fakes/run_suite.h"

static const struct tl_doctor_needs usual = {.connections = 16384, .peer_count = 1, .pool_bytes = 64 << 20};
static const struct tl_doctor_needs required = {
    .is_rdma_required = true, .connections = 16384, .peer_count = 1, .pool_bytes = 64 << 20};
static const struct tl_doctor_needs refused = {.is_rdma_refused = true, .connections = 16384, .peer_count = 1};
static const struct tl_error enough = {.code = TL_OK};
static const struct tl_error too_little = {.code = TL_RESOURCE_EXHAUSTED,
                                           .message = "the data plane needs 67.1 MB; raise it: ulimit -l unlimited"};

/* ------------------------------------------------------------------------------------------------------ limits -- */

START_TEST(locked_memory)
{
    tl_doctor_check_memlock(&report, &usual, UINT64_MAX, &enough);
    check_last(TL_DOCTOR_OK, "locked memory", "unlimited", "", "");
    tl_doctor_check_memlock(&report, &usual, 65536, &too_little);
    check_last(TL_DOCTOR_NOTE, "locked memory", "65.5 KB", "the data plane needs 67.1 MB",
               "raise it: ulimit -l unlimited");
    tl_doctor_check_memlock(&report, &required, 65536, &too_little);
    check_last(TL_DOCTOR_FAULT, "locked memory", "65.5 KB", "the data plane needs", "ulimit -l");
    tl_doctor_check_memlock(&report, &refused, 65536, &too_little);
    check_last(TL_DOCTOR_OK, "locked memory", "65.5 KB", "", "");
}
END_TEST

START_TEST(open_files)
{
    tl_doctor_check_nofile(&report, &usual, UINT64_MAX);
    check_last(TL_DOCTOR_OK, "open files", "unlimited", "", "");
    tl_doctor_check_nofile(&report, &usual, 16448);
    check_last(TL_DOCTOR_OK, "open files", "16448", "", "");
    tl_doctor_check_nofile(&report, &usual, 16447);
    check_last(TL_DOCTOR_NOTE, "open files", "16447", "needs 16448", "or lower limits.connections");
    tl_doctor_check_nofile(&report, &usual, 79);
    check_last(TL_DOCTOR_FAULT, "open files", "79", "a worker with 1 peers needs some 80", "ulimit -Hn");
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- modules -- */

static void make_card(const char *vendor, const char *class)
{
    make_file("sys/bus/pci/devices/0000:3b:00.0/vendor", vendor);
    make_file("sys/bus/pci/devices/0000:3b:00.0/class", class);
}

START_TEST(no_card)
{
    tl_doctor_check_modules(&report, &roots, &usual);
    check_last(TL_DOCTOR_OK, "RDMA modules", "none; no RDMA device", "", "");
    tl_doctor_check_modules(&report, &roots, &required);
    check_last(TL_DOCTOR_FAULT, "RDMA modules", "none; no RDMA device", "the kernel knows no RDMA device",
               "load the driver");
}
END_TEST

START_TEST(unknown_card)
{
    make_card("0x15b3\n", "0x020000\n");
    tl_doctor_check_modules(&report, &roots, &usual);
    check_last(TL_DOCTOR_NOTE, "RDMA modules", "none", "the card at 0000:3b:00.0 is no RDMA device",
               "modprobe mlx5_ib");
    tl_doctor_check_modules(&report, &roots, &required);
    check_last(TL_DOCTOR_FAULT, "RDMA modules", "none", "the card at 0000:3b:00.0", "modprobe mlx5_ib");
    make_file("sys/bus/pci/devices/0000:3b:00.0/infiniband/mlx5_0/node_guid", "");
    tl_doctor_check_modules(&report, &roots, &usual);
    check_last(TL_DOCTOR_OK, "RDMA modules", "none; no RDMA device", "", "");
}
END_TEST

START_TEST(other_cards)
{
    make_card("0x8086\n", "0x020000\n");
    tl_doctor_check_modules(&report, &roots, &usual);
    check_last(TL_DOCTOR_OK, "RDMA modules", "none; no RDMA device", "", "");
    make_card("0x15b3\n", "0x010802\n");
    tl_doctor_check_modules(&report, &roots, &usual);
    check_last(TL_DOCTOR_OK, "RDMA modules", "none; no RDMA device", "", "");
}
END_TEST

START_TEST(modules)
{
    make_file("sys/class/infiniband/rxe0", "");
    make_file("sys/module/rdma_rxe/refcnt", "1\n");
    tl_doctor_check_modules(&report, &roots, &usual);
    check_last(TL_DOCTOR_NOTE, "RDMA modules", "rdma_rxe", "programs cannot reach the RDMA devices",
               "modprobe ib_uverbs");
    make_file("sys/class/infiniband_verbs/abi_version", "6\n");
    make_file("sys/module/ib_uverbs/refcnt", "1\n");
    tl_doctor_check_modules(&report, &roots, &usual);
    check_last(TL_DOCTOR_OK, "RDMA modules", "ib_uverbs, rdma_rxe", "", "");
}
END_TEST

/* ----------------------------------------------------------------------------------------- memory, permissions -- */

START_TEST(huge_pages)
{
    tl_doctor_check_huge_pages(&report, &roots);
    check_last(TL_DOCTOR_NOTE, "huge pages", "transparent: not built into the kernel", "small pages",
               "sysctl vm.nr_hugepages");
    make_file("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
    tl_doctor_check_huge_pages(&report, &roots);
    check_last(TL_DOCTOR_NOTE, "huge pages", "[never]", "small pages", "sysctl vm.nr_hugepages");
    make_file("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
    tl_doctor_check_huge_pages(&report, &roots);
    check_last(TL_DOCTOR_OK, "huge pages", "reserved: 0, free: 0, transparent: always [madvise] never", "", "");
    make_file("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
    make_file("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "512\n");
    make_file("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "12\n");
    tl_doctor_check_huge_pages(&report, &roots);
    check_last(TL_DOCTOR_OK, "huge pages", "reserved: 512, free: 12", "", "");
}
END_TEST

START_TEST(numa_nodes)
{
    tl_doctor_check_numa(&report, &roots);
    check_last(TL_DOCTOR_OK, "NUMA nodes", "does not tell", "", "");
    make_file("sys/devices/system/node/online", "0-1\n");
    make_file("sys/devices/system/node/node0/distance", "10 21\n");
    tl_doctor_check_numa(&report, &roots);
    check_last(TL_DOCTOR_OK, "NUMA nodes", "0-1; distances from node 0: 10 21", "", "");
}
END_TEST

START_TEST(tracing)
{
    tl_doctor_check_tracing(&report, &roots);
    check_last(TL_DOCTOR_OK, "reading of other processes", "not restricted", "", "");
    make_file("proc/sys/kernel/yama/ptrace_scope", "1\n");
    tl_doctor_check_tracing(&report, &roots);
    check_last(TL_DOCTOR_OK, "reading of other processes", "ptrace_scope is 1", "", "");
    make_file("proc/sys/kernel/yama/ptrace_scope", "2\n");
    tl_doctor_check_tracing(&report, &roots);
    check_last(TL_DOCTOR_NOTE, "reading of other processes", "ptrace_scope is 2", "copied twice", "sysctl kernel.yama");
}
END_TEST

START_TEST(kernel_log)
{
    make_file("proc/sys/kernel/dmesg_restrict", "1\n");
    tl_doctor_check_kernel_log(&report, &roots, false);
    check_last(TL_DOCTOR_UNKNOWN, "kernel log", "not readable", "needs root", "as root: dmesg");
    tl_doctor_check_kernel_log(&report, &roots, true);
    check_last(TL_DOCTOR_OK, "kernel log", "readable with dmesg", "", "");
    make_file("proc/sys/kernel/dmesg_restrict", "0\n");
    tl_doctor_check_kernel_log(&report, &roots, false);
    check_last(TL_DOCTOR_OK, "kernel log", "readable with dmesg", "", "");
}
END_TEST

START_TEST(versions)
{
    tl_doctor_check_versions(&report, &roots);
    check_last(TL_DOCTOR_UNKNOWN, "kernel", "-", "osrelease cannot be read", "mount /proc");
    make_file("proc/sys/kernel/osrelease", "6.1.0-18-amd64\n");
    tl_doctor_check_versions(&report, &roots);
    check_last(TL_DOCTOR_OK, "kernel", "6.1.0-18-amd64", "", "");
    ck_assert_str_eq(report.lines[report.count - 2].what, "tensorlane");
    ck_assert_ptr_nonnull(strstr(report.lines[report.count - 2].value, ", protocol "));
}
END_TEST

/* ------------------------------------------------------------------------------------------------------ report -- */

/* Returns what a printer writes to standard output. */
static const char *capture(bool (*print)(const struct tl_doctor_report *report))
{
    static char output[8192];
    FILE *file = tmpfile();
    ck_assert_ptr_nonnull(file);
    fflush(stdout);
    int saved = dup(STDOUT_FILENO);
    dup2(fileno(file), STDOUT_FILENO);
    bool is_printed = print(&report);
    fflush(stdout);
    dup2(saved, STDOUT_FILENO);
    close(saved);
    rewind(file);
    output[fread(output, 1, sizeof(output) - 1, file)] = '\0';
    fclose(file);
    ck_assert(is_printed);
    return output;
}

static void fill(void)
{
    tl_doctor_add(&report, TL_DOCTOR_OK, "kernel", "%s", "6.1");
    tl_doctor_add(&report, TL_DOCTOR_FAULT, "open files", "%d", 40);
    tl_doctor_explain(&report, "too few, \x1b; raise %s; really", "it");
}

START_TEST(text)
{
    fill();
    const char *output = capture(tl_doctor_print_text);
    ck_assert_int_eq(strncmp(output, "tensorlane ", 11), 0);
    ck_assert_ptr_nonnull(strstr(output, "\nok       kernel      6.1\nfault    open files  40\n"));
    ck_assert_ptr_nonnull(strstr(output, "\n    cause: too few, \\x1B\n    remedy: raise it; really\n"));
    ck_assert_ptr_nonnull(strstr(output, "\n1 faults, 0 notes, 0 unknown, 1 ok\n"));
}
END_TEST

START_TEST(json)
{
    fill();
    json_t *root = json_loads(capture(tl_doctor_print_json), 0, NULL);
    ck_assert_ptr_nonnull(root);
    ck_assert_int_eq(json_integer_value(json_object_get(root, "faults")), 1);
    ck_assert_uint_eq(json_array_size(json_object_get(root, "lines")), 2);
    const json_t *line = json_array_get(json_object_get(root, "lines"), 1);
    ck_assert_str_eq(json_string_value(json_object_get(line, "verdict")), "fault");
    ck_assert_str_eq(json_string_value(json_object_get(line, "what")), "open files");
    ck_assert_str_eq(json_string_value(json_object_get(line, "value")), "40");
    ck_assert_str_eq(json_string_value(json_object_get(line, "remedy")), "raise it; really");
    json_decref(root);
}
END_TEST

START_TEST(long_report)
{
    for (int i = 0; i < 200; i++)
        tl_doctor_add(&report, i % 2 == 0 ? TL_DOCTOR_NOTE : TL_DOCTOR_OK, "line", "%d", i);
    ck_assert_uint_eq(report.count, 200);
    ck_assert_uint_eq(tl_doctor_count(&report, TL_DOCTOR_NOTE), 100);
    ck_assert_str_eq(report.lines[199].value, "199");
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("doctor_machine");
    TCase *machine = tcase_create("machine");
    tcase_add_checked_fixture(machine, make_roots, remove_roots);
    tcase_add_test(machine, locked_memory);
    tcase_add_test(machine, open_files);
    tcase_add_test(machine, no_card);
    tcase_add_test(machine, unknown_card);
    tcase_add_test(machine, other_cards);
    tcase_add_test(machine, modules);
    tcase_add_test(machine, huge_pages);
    tcase_add_test(machine, numa_nodes);
    tcase_add_test(machine, tracing);
    tcase_add_test(machine, kernel_log);
    tcase_add_test(machine, versions);
    suite_add_tcase(suite, machine);
    TCase *printing = tcase_create("printing");
    tcase_add_checked_fixture(printing, make_roots, remove_roots);
    tcase_add_test(printing, text);
    tcase_add_test(printing, json);
    tcase_add_test(printing, long_report);
    suite_add_tcase(suite, printing);
    return run_suite(suite);
}
