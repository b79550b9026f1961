// SPDX-License-Identifier: Apache-2.0
/* Prints what RDMA devices there are and which one a worker would take, as a table or as JSON. */
#include <inttypes.h>
#include <stdio.h>

#include "base/check.h"
#include "server/cli/devices.h"
#include "server/cli/json_out.h"
#include "server/cli/output.h"
#include "server/cli/table.h"
#include "server/transports/local_settings.h"

const struct tl_verbs_candidate *tl_devices_chosen(const struct tl_devices_report *report)
{
    bool has_any = !report->refusal && report->failed_count < report->count;
    const struct tl_verbs_candidate *next = has_any ? &report->candidates[report->failed_count] : NULL;
    return next && next->order >= 0 ? next : NULL;
}

/* ------------------------------------------------------------------------------------------------------- table -- */

static const char *or_dash(const char *text)
{
    return text[0] != '\0' ? text : "-";
}

/* A number, or "-" when it is not known. */
static void add_number(struct tl_table *table, int64_t number, bool is_known)
{
    if (is_known) {
        tl_table_add(table, "%" PRId64, number);
    } else {
        tl_table_add(table, "-");
    }
}

/* What a write through a candidate has shown. */
enum verdict { NOT_TRIED, FAILED, VERIFIED };

static enum verdict verdict_of(const struct tl_devices_report *report, size_t place)
{
    if (place < report->failed_count) return FAILED;
    return place == report->failed_count && report->is_verified ? VERIFIED : NOT_TRIED;
}

static void add_row(struct tl_table *table, const struct tl_verbs_candidate *candidate, enum verdict verdict)
{
    bool is_asked = candidate->port != 0;
    bool is_usable = candidate->order >= 0 && verdict != FAILED;
    add_number(table, candidate->order + 1, candidate->order >= 0);
    tl_table_paint(table, is_usable ? TL_COLOUR_GREEN : TL_COLOUR_RED);
    tl_table_add(table, "%s", candidate->device);
    add_number(table, candidate->port, is_asked);
    add_number(table, candidate->gid_index, candidate->gid_index >= 0);
    tl_table_add(table, "%s", or_dash(candidate->gid));
    tl_table_add(table, "%s", or_dash(candidate->gid_type));
    tl_table_add(table, "%s", or_dash(candidate->interface));
    tl_table_add(table, "%s", or_dash(candidate->state));
    tl_table_add(table, "%s", or_dash(candidate->link_layer));
    add_number(table, candidate->mtu_bytes, candidate->mtu_bytes > 0);
    if (candidate->speed_mbps > 0) {
        tl_table_add(table, "%g", (double)candidate->speed_mbps / 1000);
    } else {
        tl_table_add(table, "-");
    }
    add_number(table, candidate->numa_node, candidate->numa_node >= 0);
    tl_table_add(table, "%s", !is_asked ? "-" : candidate->has_windows ? "yes" : "no");
    tl_table_add(table, "%s%s", candidate->reason, verdict == VERIFIED ? "; a write through it was verified" : "");
}

/* How the tensors of a task without a device travel. */
static const char *describe_rest(const struct tl_settings *settings)
{
    bool is_required = settings->rdma == TL_RDMA_REQUIRE;
    if (tl_local_settings_refusal(settings) != NULL) {
        return is_required ? "would use none, and would not start: rdma is \"require\""
                           : "would use none: its tensors travel over gRPC";
    }
    return is_required ? "would use none: its tensors travel within this host only, since rdma is \"require\""
                       : "would use none: its tensors travel over gRPC, within this host through shared memory";
}

/* How a task with a device receives. */
static const char *describe_reading(const struct tl_settings *settings)
{
    if (settings->protocol != TL_PROTOCOL_GRPC_GDR) return "";
    return settings->verbs.keys == TL_VERBS_KEYS_WINDOW
               ? ", and would read what it receives"
               : "; owners would write what it receives, since verbs.keys is \"region\"";
}

/* What the table means for the task. */
static void print_verdict(const struct tl_devices_report *report)
{
    const struct tl_verbs_candidate *chosen = tl_devices_chosen(report);
    const char *name = report->task ? report->task->name : NULL;
    if (report->task) {
        tl_output_put_escaped(stdout, name);
        if (chosen) {
            printf(" would use %s port %" PRIu32 " with GID %d%s\n", chosen->device, chosen->port, chosen->gid_index,
                   describe_reading(&report->task->settings));
        } else if (report->refusal) {
            printf(" would use none: %s\n", report->refusal);
        } else {
            printf(" %s\n", describe_rest(&report->task->settings));
        }
    } else if (chosen) {
        printf("a worker takes the first whose GID is its own address; --config, --job and --task show which\n");
    } else {
        printf("none can be used\n");
    }
    if (report->lock_error.code != TL_OK) {
        printf("locked memory: ");
        tl_output_put_escaped(stdout, report->lock_error.message);
        putchar('\n');
    }
}

bool tl_devices_print_table(const struct tl_devices_report *report)
{
    static const struct tl_column columns[] = {
        {.title = "ORDER", .is_right = true},
        {.title = "DEVICE"},
        {.title = "PORT", .is_right = true},
        {.title = "GID", .is_right = true},
        {.title = "ADDRESS"},
        {.title = "TYPE"},
        {.title = "INTERFACE"},
        {.title = "STATE"},
        {.title = "LINK"},
        {.title = "MTU", .is_right = true},
        {.title = "GBIT/S", .is_right = true},
        {.title = "NUMA", .is_right = true},
        {.title = "WINDOWS"},
        {.title = "WHY", .wraps = true},
    };
    struct tl_table *table = tl_table_create(columns, TL_ARRAY_COUNT(columns));
    if (!table) return false;
    for (size_t i = 0; i < report->count; i++)
        add_row(table, &report->candidates[i], verdict_of(report, i));
    bool is_printed = report->count == 0 || tl_table_print(table, stdout);
    tl_table_destroy(table);
    if (is_printed) print_verdict(report);
    return is_printed;
}

/* -------------------------------------------------------------------------------------------------------- JSON -- */

static void put_optional(struct tl_json_out *object, const char *key, int64_t value, bool is_known)
{
    if (is_known) {
        tl_json_out_put_u64(object, key, (uint64_t)value);
    } else {
        tl_json_out_put_json(object, key, "null");
    }
}

static void put_candidate(struct tl_json_out *object, const struct tl_verbs_candidate *candidate, enum verdict verdict)
{
    put_optional(object, "order", candidate->order + 1, candidate->order >= 0);
    tl_json_out_put_bool(object, "usable", candidate->order >= 0 && verdict != FAILED);
    tl_json_out_put_json(object, "verified", verdict == NOT_TRIED ? "null" : verdict == FAILED ? "false" : "true");
    tl_json_out_put_text(object, "reason", candidate->reason);
    tl_json_out_put_text(object, "device", candidate->device);
    put_optional(object, "port", candidate->port, candidate->port != 0);
    put_optional(object, "gid_index", candidate->gid_index, candidate->gid_index >= 0);
    tl_json_out_put_text(object, "gid", candidate->gid);
    tl_json_out_put_text(object, "gid_type", candidate->gid_type);
    tl_json_out_put_text(object, "interface", candidate->interface);
    tl_json_out_put_text(object, "state", candidate->state);
    tl_json_out_put_text(object, "link_layer", candidate->link_layer);
    put_optional(object, "mtu", candidate->mtu_bytes, candidate->mtu_bytes > 0);
    put_optional(object, "max_mtu", candidate->max_mtu_bytes, candidate->max_mtu_bytes > 0);
    put_optional(object, "speed_mbps", candidate->speed_mbps, candidate->speed_mbps > 0);
    put_optional(object, "numa_node", candidate->numa_node, candidate->numa_node >= 0);
    tl_json_out_put_bool(object, "windows", candidate->has_windows);
}

bool tl_devices_print_json(const struct tl_devices_report *report)
{
    const struct tl_verbs_candidate *chosen = tl_devices_chosen(report);
    struct tl_json_out *root = tl_json_out_object();
    if (report->task) {
        tl_json_out_put_text(root, "name", report->task->name);
        tl_json_out_put_text(root, "rdma", tl_settings_rdma_name(report->task->settings.rdma));
    }
    struct tl_json_out *devices = tl_json_out_put_array(root, "devices");
    for (size_t i = 0; i < report->count; i++)
        put_candidate(tl_json_out_append_object(devices), &report->candidates[i], verdict_of(report, i));
    if (chosen) {
        put_candidate(tl_json_out_put_object(root, "chosen"), chosen, verdict_of(report, report->failed_count));
        tl_json_out_put_text(root, "reason", chosen->reason);
    } else {
        tl_json_out_put_json(root, "chosen", "null");
        tl_json_out_put_text(root, "reason",
                             report->refusal                    ? report->refusal
                             : report->list_error.code != TL_OK ? report->list_error.message
                                                                : "none of the devices can be used");
    }
    struct tl_json_out *memlock = tl_json_out_put_object(root, "memlock");
    tl_json_out_put_bool(memlock, "ok", report->lock_error.code == TL_OK);
    tl_json_out_put_text(memlock, "reason", report->lock_error.code == TL_OK ? "" : report->lock_error.message);
    tl_devices_put_gpus(root, report);
    return tl_json_out_print(root, false);
}
