// SPDX-License-Identifier: Apache-2.0
/*
 * The workers of a cluster as seen from here.
 *
 * Happy path: all are asked as `tensorlane health` asks them; then a bounded number of threads tries their addresses
 * over TCP. Each worker gets a line with what health says, and one for each of its addresses. Failure mode: without
 * memory or threads, fewer threads take longer, and what is not known is a line.
 */
#include "server/cli/cluster_tls.h"
#include "server/cli/doctor_peers.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tensorlane/version.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/text.h"
#include "server/cli/doctor_tcp.h"
#include "server/cli/threads.h"
#include "server/tls_options.h"

#define CLOCK_NS (5 * TL_NS_PER_SEC)

/* The addresses of one task. */
struct trial {
    const struct tl_doctor_task *task;
    struct tl_doctor_reached reached[TL_DOCTOR_MAX_IPS];
    size_t count;
    bool is_worker; /* it has identified itself before */
    struct tl_doctor_clock clock;
};

struct trials {
    struct trial *items; /* [count] */
    size_t count;
    struct tl_tls_context *tls; /* NULL: the cluster has none */
};

/* Asks once more, only for the time. */
static void ask_clock(const char *address, struct tl_doctor_clock *ret_clock)
{
    const struct tl_call_options call = {
        .address = address, .secure = tl_cluster_tls(), .connect_timeout_ns = CLOCK_NS, .rpc_timeout_ns = CLOCK_NS};
    struct tl_description description = {0};
    struct tl_error error;
    ret_clock->before_ns = tl_clock_unix_ns();
    if (tl_client_identify(&call, &description, NULL, &error) == TL_OK) ret_clock->unix_ns = description.unix_ns;
    ret_clock->after_ns = tl_clock_unix_ns();
    tl_description_fini(&description);
}

/* A link-local address cannot be tried without its zone. */
static void try_task(void *context, size_t place)
{
    struct trials *trials = context;
    struct trial *trial = &trials->items[place];
    const struct tl_doctor_host *host = trial->task->host;
    const struct tl_doctor_endpoint endpoint = {
        .port = trial->task->dialled_port, .tls = trials->tls, .task = trial->task->task->name};
    for (size_t i = 0; host && i < host->ip_count; i++)
        if (!tl_ip_is_link_local(&host->ips[i]))
            tl_doctor_reach(&endpoint, &host->ips[i], &trial->reached[trial->count++]);
    if (trial->is_worker) ask_clock(trial->task->task->address, &trial->clock);
}

void tl_doctor_judge_worker(struct tl_doctor_report *report, const struct tl_health_finding *finding,
                            const char *own_version)
{
    char what[96];
    const char *version = finding->has_description ? finding->description.software_version : "";
    bool is_other = finding->has_description && strcmp(version, own_version) != 0;
    snprintf(what, sizeof(what), "worker %.80s", finding->task->name);
    enum tl_doctor_verdict verdict = !finding->is_healthy                     ? TL_DOCTOR_FAULT
                                     : finding->reason[0] != '\0' || is_other ? TL_DOCTOR_NOTE
                                                                              : TL_DOCTOR_OK;
    tl_doctor_add(report, verdict, what, "%s, stage %s%s%s", finding->is_healthy ? "healthy" : "not healthy",
                  tl_health_stage_name(finding->stage), version[0] != '\0' ? ", version " : "", version);
    if (finding->reason[0] != '\0') {
        tl_doctor_explain_both(report, finding->reason, finding->remedy[0] != '\0' ? finding->remedy : "see its log");
    } else if (is_other) {
        tl_doctor_explain(report,
                          "the worker has version %s, this program %s; where something does not work between "
                          "them, install the same version on all machines",
                          version, own_version);
    }
}

void tl_doctor_judge_clock(struct tl_doctor_report *report, const char *task, const struct tl_doctor_clock *clock)
{
    char what[96], difference[32], error[32];
    if (clock->unix_ns == 0) return;
    int64_t uncertain_ns = (clock->after_ns - clock->before_ns) / 2;
    int64_t ahead_ns = clock->unix_ns - (clock->before_ns + uncertain_ns);
    int64_t apart_ns = ahead_ns < 0 ? -ahead_ns : ahead_ns;
    bool is_apart = apart_ns > TL_NS_PER_SEC + uncertain_ns;
    snprintf(what, sizeof(what), "clock of %.80s", task);
    tl_text_format_duration(apart_ns, difference, sizeof(difference));
    tl_doctor_add(report, is_apart ? TL_DOCTOR_NOTE : TL_DOCTOR_OK, what, "%s %s this machine's, give or take %s",
                  difference, ahead_ns < 0 ? "behind" : "before",
                  tl_text_format_duration(uncertain_ns, error, sizeof(error)));
    if (!is_apart) return;
    tl_doctor_explain(report,
                      "the clocks differ, so that the logs of the two cannot be compared line by line; set both "
                      "by the same time service (chronyc tracking, timedatectl)");
}

static void report_all(struct tl_doctor_report *report, const struct tl_health_finding *findings,
                       const struct trials *trials)
{
    for (size_t i = 0; i < trials->count; i++) {
        const struct trial *trial = &trials->items[i];
        tl_doctor_judge_worker(report, &findings[i], tl_version());
        tl_doctor_judge_reached(report, trial->task->task->name, trial->task->dialled_port, trial->reached,
                                trial->count);
        tl_doctor_judge_clock(report, trial->task->task->name, &trial->clock);
    }
}

/* The workers know of tasks that this configuration lacks. */
static void judge_configuration(struct tl_doctor_report *report, const char *source, const char *note)
{
    if (note[0] == '\0') return;
    tl_doctor_add(report, TL_DOCTOR_NOTE, "configuration", "%s", source);
    tl_doctor_explain_both(report, note, "give this machine the same cluster.json that the workers have");
}

/* Returns whether it is known what connections to the workers need. */
static bool load_tls(const struct tl_settings *settings, struct tl_tls_context **ret_context)
{
    struct tl_tls_options options;
    struct tl_error error;
    *ret_context = NULL;
    return !tl_tls_options_of(settings, &options) ||
           tl_tls_context_load(&options.settings, NULL, ret_context, &error) == TL_OK;
}

void tl_doctor_check_peers(struct tl_doctor_report *report, const struct tl_doctor_tasks *tasks)
{
    const struct tl_health_flags flags = {.service = ""};
    char note[TL_ERROR_MESSAGE_BYTES];
    const size_t count = tasks->config->task_count;
    struct trials trials = {.items = calloc(count, sizeof(*trials.items)), .count = count};
    struct tl_health_finding *findings = calloc(count, sizeof(*findings));
    if (trials.items && findings && load_tls(&tasks->config->client_settings, &trials.tls)) {
        for (size_t i = 0; i < count; i++)
            trials.items[i].task = &tasks->tasks[i];
        tl_health_check_cluster(&flags, tasks->config, findings, note);
        judge_configuration(report, tasks->config->source, note);
        for (size_t i = 0; i < count; i++)
            trials.items[i].is_worker = findings[i].has_description;
        tl_run_all(count, try_task, &trials);
        report_all(report, findings, &trials);
    } else {
        report->is_incomplete = true;
    }
    tl_health_findings_destroy(findings, count);
    tl_tls_context_release(trials.tls);
    free(trials.items);
}
