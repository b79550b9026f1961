// SPDX-License-Identifier: Apache-2.0
/* What `tensorlane devices` prints about devices that this machine need not have. */
#include "server/cli/devices.h"

#include <check.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "fakes/run_suite.h"
#include "fakes/sound_card.h"
#include "fakes/temp_folder.h"

static struct tl_verbs_candidate candidates[] = {
    {SOUND_CARD, .reason = "its GID is the worker's address, RoCE v2", .mtu_bytes = 1024, .speed_mbps = 103124},
    {.order = 1,
     .reason = "later",
     .device = "mlx5_0",
     .port = 1,
     .gid_index = 2,
     .gid = "10.0.0.1",
     .gid_type = "RoCE v1",
     .interface = "eth0",
     .state = "active",
     .link_layer = "Ethernet",
     .mtu_bytes = 1024,
     .max_mtu_bytes = 4096,
     .numa_node = -1},
    {.order = -1,
     .reason = "cannot open /dev/infiniband/uverbs1: Permission denied",
     .device = "mlx5_\x1b",
     .port = 0,
     .gid_index = -1,
     .numa_node = -1},
};

static char output[8192];

/* Runs a printer with standard output in a file, and returns the content. */
static void capture(bool (*print)(const struct tl_devices_report *report), const struct tl_devices_report *report)
{
    FILE *file = tmpfile();
    ck_assert_ptr_nonnull(file);
    fflush(stdout);
    int saved = dup(STDOUT_FILENO);
    dup2(fileno(file), STDOUT_FILENO);
    bool is_printed = print(report);
    fflush(stdout);
    dup2(saved, STDOUT_FILENO);
    close(saved);
    rewind(file);
    output[fread(output, 1, sizeof(output) - 1, file)] = '\0';
    fclose(file);
    ck_assert(is_printed);
}

static void check_has(const char *text)
{
    ck_assert_msg(strstr(output, text) != NULL, "no \"%s\" in:\n%s", text, output);
}

START_TEST(table)
{
    const struct tl_devices_report report = {.candidates = candidates, .count = TL_ARRAY_COUNT(candidates)};
    capture(tl_devices_print_table, &report);
    check_has("    1  mlx5_0");
    check_has("1    3  10.0.0.1  RoCE v2  eth0");
    check_has("active  Ethernet  1024  103.124     1  yes      its GID is the worker's address, RoCE v2\n");
    check_has("    2  mlx5_0");
    check_has("    -  mlx5_\\x1B     -    -  -");
    check_has("cannot open /dev/infiniband/uverbs1: Permission denied\n");
    check_has("a worker takes the first whose GID is its own address");
}
END_TEST

START_TEST(verdicts)
{
    struct tl_config_task task = {.name = "/job:ps/task:0"};
    struct tl_devices_report report = {.candidates = candidates, .count = 3, .task = &task};
    capture(tl_devices_print_table, &report);
    check_has("\n/job:ps/task:0 would use mlx5_0 port 1 with GID 3\n");
    task.settings.protocol = TL_PROTOCOL_GRPC_GDR;
    capture(tl_devices_print_table, &report);
    check_has(" with GID 3, and would read what it receives\n");
    task.settings.verbs.keys = TL_VERBS_KEYS_REGION;
    capture(tl_devices_print_table, &report);
    check_has(" with GID 3; owners would write what it receives, since verbs.keys is \"region\"\n");
    task.settings = (struct tl_settings){.protocol = TL_PROTOCOL_AUTO};
    report.refusal = "rdma is off";
    capture(tl_devices_print_table, &report);
    check_has("\n/job:ps/task:0 would use none: rdma is off\n");
    report = (struct tl_devices_report){.candidates = candidates + 2, .count = 1, .task = &task};
    capture(tl_devices_print_table, &report);
    check_has(
        "\n/job:ps/task:0 would use none: its tensors travel over gRPC, within this host through shared memory\n");
    task.settings.rdma = TL_RDMA_REQUIRE;
    capture(tl_devices_print_table, &report);
    check_has("\n/job:ps/task:0 would use none: its tensors travel within this host only, since rdma is \"require\"\n");
    task.settings = (struct tl_settings){.protocol = TL_PROTOCOL_GRPC_VERBS};
    capture(tl_devices_print_table, &report);
    check_has("\n/job:ps/task:0 would use none: its tensors travel over gRPC\n");
    task.settings.rdma = TL_RDMA_REQUIRE;
    report.lock_error = (struct tl_error){.code = TL_RESOURCE_EXHAUSTED, .message = "64 MiB are needed"};
    capture(tl_devices_print_table, &report);
    check_has("\n/job:ps/task:0 would use none, and would not start: rdma is \"require\"\n");
    check_has("\nlocked memory: 64 MiB are needed\n");
    report.task = NULL;
    capture(tl_devices_print_table, &report);
    check_has("\nnone can be used\n");
}
END_TEST

/* The first candidate failed, and a write through the second was verified. */
START_TEST(a_second_choice)
{
    struct tl_config_task task = {.name = "/job:ps/task:0"};
    const struct tl_devices_report report = {
        .candidates = candidates, .count = 3, .failed_count = 1, .is_verified = true, .task = &task};
    capture(tl_devices_print_table, &report);
    check_has("RoCE v2\n");
    check_has("later; a write through it was verified\n");
    check_has("\n/job:ps/task:0 would use mlx5_0 port 1 with GID 2\n");
}
END_TEST

START_TEST(none_that_works)
{
    const struct tl_devices_report report = {.candidates = candidates, .count = 3, .failed_count = 2};
    capture(tl_devices_print_table, &report);
    check_has("\nnone can be used\n");
}
END_TEST

static json_t *capture_json(const struct tl_devices_report *report)
{
    capture(tl_devices_print_json, report);
    json_t *root = json_loads(output, 0, NULL);
    ck_assert_msg(root != NULL, "%s", output);
    return root;
}

static const char *text_of(json_t *object, const char *key)
{
    return json_string_value(json_object_get(object, key));
}

START_TEST(json)
{
    struct tl_config_task task = {.name = "/job:ps/task:0"};
    struct tl_devices_report report = {.candidates = candidates, .count = 3, .task = &task};
    json_t *root = capture_json(&report), *devices = json_object_get(root, "devices");
    ck_assert_str_eq(text_of(root, "name"), "/job:ps/task:0");
    ck_assert_str_eq(text_of(root, "rdma"), "prefer");
    ck_assert_uint_eq(json_array_size(devices), 3);
    ck_assert(json_equal(json_array_get(devices, 0), json_object_get(root, "chosen")));
    ck_assert_str_eq(text_of(root, "reason"), candidates[0].reason);
    json_t *first = json_array_get(devices, 0), *last = json_array_get(devices, 2);
    ck_assert_int_eq(json_integer_value(json_object_get(first, "order")), 1);
    ck_assert_int_eq(json_integer_value(json_object_get(first, "gid_index")), 3);
    ck_assert_int_eq(json_integer_value(json_object_get(first, "mtu")), 1024);
    ck_assert_int_eq(json_integer_value(json_object_get(first, "speed_mbps")), 103124);
    ck_assert_int_eq(json_integer_value(json_object_get(first, "numa_node")), 1);
    ck_assert(json_is_true(json_object_get(first, "windows")));
    ck_assert(json_is_null(json_object_get(first, "verified")));
    ck_assert(json_is_null(json_object_get(last, "order")) && json_is_null(json_object_get(last, "port")));
    ck_assert(json_is_false(json_object_get(last, "usable")));
    ck_assert(json_is_true(json_object_get(json_object_get(root, "memlock"), "ok")));
    json_decref(root);

    report.failed_count = 1;
    report.is_verified = true;
    root = capture_json(&report);
    ck_assert(json_is_false(json_object_get(json_array_get(json_object_get(root, "devices"), 0), "verified")));
    ck_assert(json_is_false(json_object_get(json_array_get(json_object_get(root, "devices"), 0), "usable")));
    ck_assert(json_is_true(json_object_get(json_object_get(root, "chosen"), "verified")));
    ck_assert_int_eq(json_integer_value(json_object_get(json_object_get(root, "chosen"), "order")), 2);
    json_decref(root);

    report.failed_count = 0;
    report.is_verified = false;
    report.refusal = "rdma is off";
    report.lock_error = (struct tl_error){.code = TL_RESOURCE_EXHAUSTED, .message = "too little"};
    root = capture_json(&report);
    ck_assert(json_is_null(json_object_get(root, "chosen")));
    ck_assert_str_eq(text_of(root, "reason"), "rdma is off");
    ck_assert_str_eq(text_of(json_object_get(root, "memlock"), "reason"), "too little");
    json_decref(root);

    report = (struct tl_devices_report){.list_error = {.code = TL_NOT_FOUND, .message = "no RDMA device"}};
    root = capture_json(&report);
    ck_assert_str_eq(text_of(root, "reason"), "no RDMA device");
    ck_assert_ptr_null(json_object_get(root, "name"));
    json_decref(root);
    report = (struct tl_devices_report){.candidates = candidates + 2, .count = 1};
    root = capture_json(&report);
    ck_assert_str_eq(text_of(root, "reason"), "none of the devices can be used");
    json_decref(root);
}
END_TEST

/* -------------------------------------------------------------------------------------------------------- GPUs -- */

static struct tl_device_info gpus[] = {
    {.device = {.kind = TL_DEVICE_CUDA, .index = 0},
     .name = "NVIDIA \x1b",
     .pci_address = "0000:3b:00.0",
     .memory_bytes = 80000000000},
    {.device = {.kind = TL_DEVICE_CUDA, .index = 1}},
};

#define GPU "devices/pci0000:3a/0000:3b:00.0"
#define CARD "devices/pci0000:3a/0000:3c:00.0"

/* What the kernel shows of a GPU and a card below the same host bridge. */
static void make_sys(void)
{
    static const char *const folders[] = {"bus",
                                          "bus/pci",
                                          "bus/pci/devices",
                                          "class",
                                          "class/infiniband",
                                          "class/infiniband/mlx5_0",
                                          "devices",
                                          "devices/pci0000:3a",
                                          GPU,
                                          CARD};
    temp_folder_make();
    for (size_t i = 0; i < TL_ARRAY_COUNT(folders); i++)
        ck_assert_int_eq(mkdir(temp_path(folders[i]), 0700), 0);
    ck_assert_int_eq(symlink(temp_path(GPU), temp_path("bus/pci/devices/0000:3b:00.0")), 0);
    ck_assert_int_eq(symlink(temp_path(CARD), temp_path("class/infiniband/mlx5_0/device")), 0);
    FILE *file = fopen(temp_path(GPU "/numa_node"), "we");
    ck_assert_ptr_nonnull(file);
    fputs("1\n", file);
    fclose(file);
}

static const struct tl_devices_report with_gpus = {
    .candidates = candidates, .count = 3, .gpus = gpus, .gpu_count = 2, .sys = temp_folder};

START_TEST(gpu_table)
{
    capture(tl_devices_print_gpus, &with_gpus);
    check_has("GPU    NAME         PCI            MEMORY  NUMA  PATH       RDMA CARDS\n");
    check_has("gpu:0  NVIDIA \\x1B  0000:3b:00.0  80.0 GB     1  gpu-proxy  mlx5_0: same host bridge, ");
    check_has(", mlx5_\\x1B: unknown\n");
    check_has("gpu:1  -            -                   -     -  gpu-proxy  mlx5_0: unknown, mlx5_\\x1B: unknown\n");
    check_has("\na tensor on a GPU travels as gpu-proxy: the GPU copies it into pinned memory");
    check_has("not yet run on hardware");
    const struct tl_devices_report without_cards = {.gpus = gpus, .gpu_count = 1, .sys = temp_folder};
    capture(tl_devices_print_gpus, &without_cards);
    ck_assert_ptr_null(strstr(output, "CARDS"));
}
END_TEST

START_TEST(no_gpus)
{
    const struct tl_devices_report report = {.gpu_error = {.code = TL_NOT_FOUND, .message = "CUDA is \x1b"}};
    capture(tl_devices_print_gpus, &report);
    ck_assert_str_eq(output, "no GPU can be used: CUDA is \\x1B\n");
    json_t *root = capture_json(&report), *found = json_object_get(root, "cuda");
    ck_assert(json_is_false(json_object_get(found, "ok")));
    ck_assert_str_eq(text_of(found, "reason"), "CUDA is \x1b");
    ck_assert_uint_eq(json_array_size(json_object_get(root, "gpus")), 0);
    json_decref(root);
}
END_TEST

START_TEST(gpu_json)
{
    json_t *root = capture_json(&with_gpus), *list = json_object_get(root, "gpus");
    json_t *first = json_array_get(list, 0), *last = json_array_get(list, 1), *cards = json_object_get(first, "cards");
    ck_assert(json_is_true(json_object_get(json_object_get(root, "cuda"), "ok")));
    ck_assert_str_eq(text_of(first, "device"), "gpu:0");
    ck_assert_str_eq(text_of(first, "pci_address"), "0000:3b:00.0");
    ck_assert_int_eq(json_integer_value(json_object_get(first, "memory_bytes")), 80000000000);
    ck_assert_int_eq(json_integer_value(json_object_get(first, "numa_node")), 1);
    ck_assert_str_eq(text_of(first, "path"), "gpu-proxy");
    ck_assert_ptr_nonnull(strstr(text_of(first, "reason"), "pinned memory"));
    ck_assert_uint_eq(json_array_size(cards), 2);
    ck_assert_str_eq(text_of(json_array_get(cards, 0), "device"), "mlx5_0");
    ck_assert_str_eq(text_of(json_array_get(cards, 0), "distance"), "host bridge");
    ck_assert_str_eq(text_of(json_array_get(cards, 1), "distance"), "unknown");
    ck_assert(json_is_null(json_object_get(last, "memory_bytes")) && json_is_null(json_object_get(last, "numa_node")));
    json_decref(root);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("devices_report");
    TCase *tcase = tcase_create("devices_report");
    tcase_add_test(tcase, table);
    tcase_add_test(tcase, verdicts);
    tcase_add_test(tcase, a_second_choice);
    tcase_add_test(tcase, none_that_works);
    tcase_add_test(tcase, json);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("gpus");
    tcase_add_checked_fixture(tcase, make_sys, temp_folder_remove);
    tcase_add_test(tcase, gpu_table);
    tcase_add_test(tcase, no_gpus);
    tcase_add_test(tcase, gpu_json);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
