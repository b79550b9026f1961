// SPDX-License-Identifier: Apache-2.0
/* What `tensorlane devices` has found, and the report about it. */
#ifndef SERVER_CLI_DEVICES_H
#define SERVER_CLI_DEVICES_H

#include <stdbool.h>
#include <stddef.h>

#include <tensorlane/status.h>

#include "config/config.h"
#include "dataplane/verbs/verbs.h"
#include "tensor/device.h"

struct tl_json_out;

struct tl_devices_report {
    const struct tl_config_task *task;     /* NULL: none was named */
    struct tl_verbs_candidate *candidates; /* [count], as tl_verbs_list gives them */
    size_t count;
    size_t failed_count; /* the number of devices in front through which no write could be verified; their reason says
                            why */
    bool is_verified;    /* one through the next could */
    const char *refusal; /* why the task's settings want none; NULL: they do */
    struct tl_error list_error;  /* TL_OK, or why there is no candidate at all */
    struct tl_error lock_error;  /* TL_OK, or what is wrong with the limit of locked memory */
    struct tl_device_info *gpus; /* [gpu_count] */
    size_t gpu_count;
    struct tl_error gpu_error; /* TL_OK, or why there is none that can be used */
    const char *sys;           /* "/sys", which says where devices are */
};

/* Lists the devices and tries them as the settings of report->task say, or the defaults, until a write through one has
 * been verified. report is zeroed otherwise. Ownership: free(report->candidates). Errors: those of
 * tl_verbs_settings_read; what the devices lack is in the report. Blocks: opens every device. */
enum tl_status tl_devices_look(struct tl_devices_report *report, struct tl_error *ret_error) TL_MUST_USE;

/* The candidate that a worker would take; NULL: none. */
const struct tl_verbs_candidate *tl_devices_chosen(const struct tl_devices_report *report);

/* Print to standard output. False: no memory. */
bool tl_devices_print_table(const struct tl_devices_report *report);
bool tl_devices_print_json(const struct tl_devices_report *report);

/* The same for GPUs: prints them, or puts them into the object. */
bool tl_devices_print_gpus(const struct tl_devices_report *report);
void tl_devices_put_gpus(struct tl_json_out *root, const struct tl_devices_report *report);

#endif
