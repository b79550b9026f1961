// SPDX-License-Identifier: Apache-2.0
/*
 * `tensorlane devices`: what RDMA devices this machine has, which one a task would use and why, and what GPUs there
 * are.
 *
 * With a task its settings and its address decide, as they do when the worker starts; without one all devices are
 * listed in the order in which they would be taken. They are tried in that order, until a write through one has been
 * verified. GPUs are listed as CUDA shows them, which is loaded for that, and with their distance from the cards.
 * Failure modes: no RDMA device that can be used is exit code 3, with the reason and what to do; where there is no GPU
 * or no CUDA, a line says what is missing.
 */
#include "server/cli/devices.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/check.h"
#include "server/cli/command.h"
#include "server/cli/options.h"
#include "server/cli/output.h"
#include "server/cli/task_config.h"
#include "server/transports/transport_verbs.h"

/* Prints what was found. Returns the exit code. */
static int report_devices(const struct tl_devices_report *report, bool is_json)
{
    bool has_list = report->list_error.code == TL_OK;
    int code = report->failed_count < tl_transport_count_usable(report->candidates, report->count) ? TL_EXIT_OK
               : has_list || report->list_error.code == TL_NOT_FOUND                               ? TL_EXIT_NO_DEVICE
                                                                                                   : TL_EXIT_FAILED;
    if (!has_list) tl_output_error("devices", "%s", report->list_error.message);
    bool is_printed = is_json ? tl_devices_print_json(report)
                              : (!has_list || tl_devices_print_table(report)) && tl_devices_print_gpus(report);
    if (!is_printed) {
        tl_output_error("devices", "no memory for the output");
        code = TL_EXIT_FAILED;
    }
    return tl_output_finish("devices", code);
}

static int run(const struct tl_task_flags *flags, bool is_json)
{
    struct tl_config *config = NULL;
    struct tl_devices_report report = {.sys = "/sys"};
    struct tl_error error;
    enum tl_status status = TL_OK;
    int code = TL_EXIT_FAILED;
    if (flags->config_path || tl_config_tf_text())
        status = tl_task_config_read(flags, "devices", &config, &report.task, &error);
    if (status == TL_OK) status = tl_devices_look(&report, &error);
    if (status == TL_OK) {
        report.gpu_error.code = tl_device_list(&report.gpus, &report.gpu_count, &report.gpu_error);
        code = report_devices(&report, is_json);
    } else {
        tl_output_error("devices", "%s", error.message);
    }
    free(report.candidates);
    free(report.gpus);
    tl_config_destroy(config);
    return code;
}

int tl_command_devices(int argc, char **argv)
{
    struct tl_task_flags flags = TL_TASK_FLAGS_INIT;
    bool is_json = false;
    int first;
    const struct tl_option items[] = {
        TL_TASK_OPTIONS(&flags),
        {"json", 0, TL_OPTION_FLAG, &is_json, NULL, "print one JSON object"},
    };
    const struct tl_options options = {
        .command = "devices",
        .usage = "[--json]\n--config FILE --job JOB --task N [--json]",
        .description = "Lists the RDMA devices of this machine, tells which one a task would use and why, and lists\n"
                       "the GPUs.\n"
                       "Exit codes: 0 there is an RDMA device that can be used, 1 failed, 2 usage, 3 there is none.",
        .items = items,
        .count = TL_ARRAY_COUNT(items),
        .usage_exit = TL_EXIT_USAGE,
    };
    int code = tl_options_parse(&options, argc, argv, &first);
    if (code >= 0) return code;
    if (first < argc) return tl_options_refuse(&options, "unexpected argument %s", argv[first]);
    if ((flags.job || flags.task != TL_TASK_NOT_GIVEN) && !flags.config_path && !tl_config_tf_text())
        return tl_options_refuse(&options, "a task of which cluster? --config FILE");
    return run(&flags, is_json);
}
