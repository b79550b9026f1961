// SPDX-License-Identifier: Apache-2.0
/*
 * `tensorlane doctor`: looks at this machine and explains what keeps workers from their work, or makes them slow.
 *
 * Without a configuration it looks at the machine alone; with one also at what the tasks of this machine need, and at
 * all workers, as far as they can be reached from here. Each line of the report is ok, a note, a fault or unknown, with
 * the cause and the remedy. It needs no privilege and says what does. Failure modes: a configuration that cannot be
 * read is an error; everything else becomes a line.
 */
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"
#include "config/config.h"
#include "server/cli/cluster_tls.h"
#include "server/cli/command.h"
#include "server/cli/doctor.h"
#include "server/cli/doctor_peers.h"
#include "server/cli/doctor_rdma.h"
#include "server/cli/doctor_tasks.h"
#include "server/cli/options.h"
#include "server/cli/output.h"
#include "server/cli/task_config.h"

static const struct tl_doctor_roots roots = {.proc = "/proc", .sys = "/sys", .etc = "/etc"};

struct doctor {
    struct tl_config *config; /* NULL: none was named */
    struct tl_doctor_tasks tasks;
    struct tl_doctor_needs needs;
    struct tl_doctor_report report;
};

/* The soft limit counts for locked memory, the hard one for files, because `serve` raises that limit itself. */
static void read_limits(uint64_t *ret_memlock, uint64_t *ret_nofile)
{
    struct rlimit memlock = {.rlim_cur = RLIM_INFINITY}, nofile = {.rlim_max = RLIM_INFINITY};
    (void)getrlimit(RLIMIT_MEMLOCK, &memlock);
    (void)getrlimit(RLIMIT_NOFILE, &nofile);
    *ret_memlock = memlock.rlim_cur == RLIM_INFINITY ? UINT64_MAX : memlock.rlim_cur;
    *ret_nofile = nofile.rlim_max == RLIM_INFINITY ? UINT64_MAX : nofile.rlim_max;
}

static enum tl_status read_config(const char *path, struct doctor *doctor, struct tl_error *ret_error)
{
    enum tl_status status = tl_config_read(path, &doctor->config, ret_error);
    if (status == TL_OK) status = tl_task_config_apply_environment(doctor->config, "doctor", ret_error);
    if (status == TL_OK) status = tl_cluster_tls_open(&doctor->config->client_settings, ret_error);
    if (status != TL_OK) return status;
    if (!tl_doctor_tasks_init(&doctor->tasks, doctor->config)) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the addresses of all tasks");
    }
    tl_doctor_tasks_needs(&doctor->tasks, &doctor->needs);
    return TL_OK;
}

/* ------------------------------------------------------------------------------------------------------ checks -- */

static void check_machine(struct doctor *doctor)
{
    struct tl_doctor_report *report = &doctor->report;
    const struct tl_doctor_needs *needs = &doctor->needs;
    struct tl_error lock_error;
    uint64_t memlock_bytes, nofile;
    read_limits(&memlock_bytes, &nofile);
    struct tl_verbs_options options;
    tl_verbs_options_init(&options);
    options.pool_bytes = needs->pool_bytes;
    if (needs->queue_depth > 0) options.queue_depth = needs->queue_depth;
    lock_error.code = tl_verbs_check_memlock(&options, &lock_error);
    tl_doctor_check_versions(report, &roots);
    tl_doctor_check_memlock(report, needs, memlock_bytes, &lock_error);
    tl_doctor_check_nofile(report, needs, nofile);
    tl_doctor_check_modules(report, &roots, needs);
    tl_doctor_check_huge_pages(report, &roots);
    tl_doctor_check_numa(report, &roots);
    tl_doctor_check_tracing(report, &roots);
    tl_doctor_check_kernel_log(report, &roots, geteuid() == 0);
}

/* The first task of each host that is this machine: others of the host have the same cards. */
static bool is_first_here(const struct tl_doctor_tasks *tasks, size_t place)
{
    if (!tl_doctor_task_is_here(&tasks->tasks[place])) return false;
    for (size_t i = 0; i < place; i++)
        if (tasks->tasks[i].host == tasks->tasks[place].host) return false;
    return true;
}

/* The cards as one task would find them when it starts; NULL: any task. False: its address has a fault. */
static bool check_cards(struct doctor *doctor, const struct tl_config_task *task, bool wants_ports)
{
    struct tl_devices_report devices = {.task = task};
    struct tl_error error;
    /* A name that cannot be resolved has a line already. */
    if (tl_devices_look(&devices, &error) != TL_OK) return false;
    if (wants_ports) tl_doctor_check_ports(&doctor->report, &roots, &doctor->needs, &devices);
    tl_doctor_check_choice(&doctor->report, &doctor->needs, &devices);
    free(devices.candidates);
    return true;
}

static void check_rdma(struct doctor *doctor)
{
    bool wants_ports = true;
    if (doctor->needs.is_rdma_refused) return;
    for (size_t i = 0; doctor->config && i < doctor->config->task_count; i++) {
        if (!is_first_here(&doctor->tasks, i)) continue;
        if (check_cards(doctor, &doctor->config->tasks[i], wants_ports)) wants_ports = false;
    }
    if (wants_ports) (void)check_cards(doctor, NULL, true);
}

static int run(const char *config_path, bool is_json)
{
    struct doctor doctor = {.needs = {.connections = TL_DEFAULT_CONNECTIONS, .pool_bytes = TL_DEFAULT_POOL_BYTES}};
    struct tl_error error;
    int code = TL_EXIT_FAILED;
    if (config_path && read_config(config_path, &doctor, &error) != TL_OK) {
        tl_output_error("doctor", "%s", error.message);
    } else {
        check_machine(&doctor);
        tl_doctor_check_network(&doctor.report, &roots, doctor.config ? &doctor.tasks : NULL);
        check_rdma(&doctor);
        if (doctor.config) tl_doctor_check_peers(&doctor.report, &doctor.tasks);
        bool has_fault = tl_doctor_count(&doctor.report, TL_DOCTOR_FAULT) > 0;
        if (is_json ? tl_doctor_print_json(&doctor.report) : tl_doctor_print_text(&doctor.report)) {
            code = tl_output_finish("doctor", has_fault ? TL_EXIT_FAULT : TL_EXIT_OK);
        } else {
            tl_output_error("doctor", "no memory for the report");
        }
    }
    tl_doctor_report_fini(&doctor.report);
    tl_doctor_tasks_fini(&doctor.tasks);
    tl_config_destroy(doctor.config);
    return code;
}

int tl_command_doctor(int argc, char **argv)
{
    const char *config_path = NULL;
    bool is_json = false;
    int first;
    const struct tl_option items[] = {
        {"config", 'c', TL_OPTION_TEXT, &config_path, "FILE", "also look at what the tasks of this cluster need here"},
        {"json", 0, TL_OPTION_FLAG, &is_json, NULL, "print one JSON object"},
    };
    const struct tl_options options = {
        .command = "doctor",
        .usage = "[--config FILE] [--json]",
        .description = "Looks at this machine and explains what keeps workers from their work, or makes them slow.\n"
                       "Exit codes: 0 no fault, 1 failed, 2 usage, 4 at least one fault.",
        .items = items,
        .count = TL_ARRAY_COUNT(items),
        .usage_exit = TL_EXIT_USAGE,
    };
    int code = tl_options_parse(&options, argc, argv, &first);
    if (code >= 0) return code;
    if (first < argc) return tl_options_refuse(&options, "unexpected argument %s", argv[first]);
    return run(config_path, is_json);
}
