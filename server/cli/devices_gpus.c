// SPDX-License-Identifier: Apache-2.0
/* Prints what GPUs there are, how far they are from the RDMA cards, and how tensors on them travel. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <tensorlane/path.h>

#include "base/check.h"
#include "base/text.h"
#include "server/cli/devices.h"
#include "server/cli/json_out.h"
#include "server/cli/output.h"
#include "server/pci_place.h"
#include "server/cli/table.h"

#define WHY                                                                                                            \
    "the GPU copies it into pinned memory of the data plane; as gpu-direct where a card reads it on the GPU itself; "  \
    "as grpc where there is no data plane, or its receiver wants it on a GPU; not yet run on hardware"

/* Whether a candidate is the first of its card. */
static bool is_first(const struct tl_devices_report *report, size_t place)
{
    for (size_t i = 0; i < place; i++)
        if (strcmp(report->candidates[i].device, report->candidates[place].device) == 0) return false;
    return true;
}

static void add_cards(struct tl_table *table, const struct tl_devices_report *report, const struct tl_device_info *gpu)
{
    static const char *const texts[] = {
        [TL_PCI_UNKNOWN] = "unknown",
        [TL_PCI_SWITCH] = "same PCI switch",
        [TL_PCI_HOST_BRIDGE] = "same host bridge",
        [TL_PCI_NUMA_NODE] = "same NUMA node",
        [TL_PCI_ACROSS] = "across NUMA nodes",
    };
    char text[1024] = "";
    size_t len = 0;
    for (size_t i = 0; i < report->count && len < sizeof(text); i++) {
        const char *card = report->candidates[i].device;
        if (!is_first(report, i)) continue;
        len += (size_t)snprintf(text + len, sizeof(text) - len, "%s%s: %s", len > 0 ? ", " : "", card,
                                texts[tl_pci_distance_to_card(report->sys, gpu->pci_address, card)]);
    }
    tl_table_add(table, "%s", len > 0 ? text : "-");
}

static void add_row(struct tl_table *table, const struct tl_devices_report *report, const struct tl_device_info *gpu)
{
    char name[TL_DEVICE_TEXT_BYTES], size[32];
    int node = tl_pci_numa_node(report->sys, gpu->pci_address);
    tl_table_add(table, "%s", tl_device_format(gpu->device, name));
    tl_table_add(table, "%s", gpu->name[0] != '\0' ? gpu->name : "-");
    tl_table_add(table, "%s", gpu->pci_address[0] != '\0' ? gpu->pci_address : "-");
    tl_table_add(table, "%s", gpu->memory_bytes > 0 ? tl_text_format_size(gpu->memory_bytes, size, sizeof(size)) : "-");
    if (node >= 0) {
        tl_table_add(table, "%d", node);
    } else {
        tl_table_add(table, "-");
    }
    tl_table_add(table, "%s", tl_path_name(TL_PATH_GPU_PROXY));
    add_cards(table, report, gpu);
}

/* Whether the task keeps what it publishes on this device. */
static bool is_kept_on(const struct tl_devices_report *report, struct tl_device device)
{
    const struct tl_device *kept = report->task ? &report->task->settings.device : NULL;
    return kept && kept->kind == device.kind && kept->index == device.index;
}

/* What the settings of the task say about GPUs. */
static void print_settings(const struct tl_devices_report *report)
{
    char name[TL_DEVICE_TEXT_BYTES];
    if (!report->task) return;
    if (report->task->settings.device.kind != TL_DEVICE_HOST)
        printf("%s keeps published files and pushed tensors on %s (\"device\")\n", report->task->name,
               tl_device_format(report->task->settings.device, name));
    if (report->task->settings.gpu.is_proxy_forced)
        printf("no card accesses the GPUs of %s (\"gpu.proxy\")\n", report->task->name);
}

bool tl_devices_print_gpus(const struct tl_devices_report *report)
{
    static const struct tl_column columns[] = {
        {.title = "GPU"},
        {.title = "NAME"},
        {.title = "PCI"},
        {.title = "MEMORY", .is_right = true},
        {.title = "NUMA", .is_right = true},
        {.title = "PATH"},
        {.title = "RDMA CARDS", .wraps = true, .is_optional = true},
    };
    if (report->gpu_error.code != TL_OK) {
        printf("no GPU can be used: ");
        tl_output_put_escaped(stdout, report->gpu_error.message);
        putchar('\n');
        print_settings(report);
        return true;
    }
    struct tl_table *table = tl_table_create(columns, TL_ARRAY_COUNT(columns));
    if (!table) return false;
    for (size_t i = 0; i < report->gpu_count; i++)
        add_row(table, report, &report->gpus[i]);
    if (report->list_error.code == TL_OK) putchar('\n'); /* behind another table */
    bool is_printed = tl_table_print(table, stdout);
    tl_table_destroy(table);
    if (is_printed) printf("a tensor on a GPU travels as %s: %s\n", tl_path_name(TL_PATH_GPU_PROXY), WHY);
    if (is_printed) print_settings(report);
    return is_printed;
}

static void put_gpu(struct tl_json_out *object, const struct tl_devices_report *report,
                    const struct tl_device_info *gpu)
{
    char name[TL_DEVICE_TEXT_BYTES];
    int node = tl_pci_numa_node(report->sys, gpu->pci_address);
    tl_json_out_put_text(object, "device", tl_device_format(gpu->device, name));
    tl_json_out_put_text(object, "name", gpu->name);
    tl_json_out_put_text(object, "pci_address", gpu->pci_address);
    if (gpu->memory_bytes > 0) {
        tl_json_out_put_u64(object, "memory_bytes", gpu->memory_bytes);
    } else {
        tl_json_out_put_json(object, "memory_bytes", "null");
    }
    if (node >= 0) {
        tl_json_out_put_u64(object, "numa_node", (uint64_t)node);
    } else {
        tl_json_out_put_json(object, "numa_node", "null");
    }
    tl_json_out_put_text(object, "path", tl_path_name(TL_PATH_GPU_PROXY));
    tl_json_out_put_text(object, "reason", WHY);
    tl_json_out_put_bool(object, "kept_on", is_kept_on(report, gpu->device));
    struct tl_json_out *cards = tl_json_out_put_array(object, "cards");
    for (size_t i = 0; i < report->count; i++) {
        const char *card = report->candidates[i].device;
        if (!is_first(report, i)) continue;
        struct tl_json_out *each = tl_json_out_append_object(cards);
        tl_json_out_put_text(each, "device", card);
        tl_json_out_put_text(each, "distance",
                             tl_pci_distance_name(tl_pci_distance_to_card(report->sys, gpu->pci_address, card)));
    }
}

void tl_devices_put_gpus(struct tl_json_out *root, const struct tl_devices_report *report)
{
    struct tl_json_out *gpus = tl_json_out_put_array(root, "gpus");
    for (size_t i = 0; i < report->gpu_count; i++)
        put_gpu(tl_json_out_append_object(gpus), report, &report->gpus[i]);
    struct tl_json_out *cuda = tl_json_out_put_object(root, "cuda");
    tl_json_out_put_bool(cuda, "ok", report->gpu_error.code == TL_OK);
    tl_json_out_put_text(cuda, "reason", report->gpu_error.code == TL_OK ? "" : report->gpu_error.message);
}
