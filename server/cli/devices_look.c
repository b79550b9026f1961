// SPDX-License-Identifier: Apache-2.0
/* Looks at the RDMA devices of this machine as a worker does when it starts. */
#include <stdio.h>

#include "server/cli/devices.h"
#include "server/transports/transport_verbs.h"
#include "server/transports/verbs_settings.h"

/* Notes in the list why a candidate cannot be used after all. */
static void note_failure(void *context, unsigned order, const char *name, const char *why)
{
    struct tl_verbs_candidate *candidates = context;
    (void)name;
    snprintf(candidates[order].reason, sizeof(candidates[order].reason), "%s", why);
}

/* Does what a worker does when it starts. */
static void choose(const struct tl_verbs_options *options, struct tl_verbs_candidate *candidates,
                   struct tl_devices_report *report)
{
    unsigned order;
    struct tl_error error;
    size_t usable_count = tl_transport_count_usable(candidates, report->count);
    if (usable_count == 0 || report->refusal || report->lock_error.code != TL_OK) return;
    if (tl_transport_choose_verbs(options, candidates, report->count, note_failure, candidates, &order, &error) ==
        TL_OK) {
        report->failed_count = order;
        report->is_verified = true;
    } else if (tl_transport_is_about_memlock(error.message)) {
        report->lock_error = error;
    } else {
        report->failed_count = usable_count;
    }
}

enum tl_status tl_devices_look(struct tl_devices_report *report, struct tl_error *ret_error)
{
    const struct tl_config_task *task = report->task;
    struct tl_verbs_options options;
    char host[TL_VERBS_HOST_BYTES];
    tl_verbs_options_init(&options);
    options.pool_bytes = TL_DEFAULT_POOL_BYTES;
    if (task) {
        report->refusal = tl_verbs_settings_refusal(&task->settings);
        enum tl_status status = tl_verbs_settings_read(&task->settings, task->address, host, &options, ret_error);
        if (status != TL_OK) return status;
    }
    report->list_error.code = tl_verbs_list(&options, &report->candidates, &report->count, &report->list_error);
    report->lock_error.code = tl_verbs_check_memlock(&options, &report->lock_error);
    if (report->list_error.code == TL_OK) choose(&options, report->candidates, report);
    return TL_OK;
}
