// SPDX-License-Identifier: Apache-2.0
/*
 * The check of one worker, in stages that build upon each other: the name resolves, the port answers, what answers
 * speaks gRPC, it says it is the job and task that the configuration says, it serves, and at least one transport works;
 * then those of the data plane. The first that fails is the finding; it comes with what to do about it.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "config/address.h"
#include "control/control.h"
#include "server/cli/cluster_tls.h"
#include "server/cli/health.h"
#include "server/cli/local_host.h"
#include "server/cli/local_process.h"
#include "server/transports/local_settings.h"
#include "server/transports/verbs_settings.h"

#define DEFAULT_TIMEOUT_NS (5 * TL_NS_PER_SEC)
/* A server sends its first bytes as soon as it has taken the connection. One that does not is tried twice. */
#define HTTP2_NS (2 * TL_NS_PER_SEC)
/* A worker that has answered answers again within this time, for the connection and for the call. */
#define AGAIN_TIMEOUT_NS (1 * TL_NS_PER_SEC)

const char *tl_health_stage_name(enum tl_health_stage stage)
{
    static const char *const names[] = {
        [TL_HEALTH_STAGE_CONFIG] = "config",
        [TL_HEALTH_STAGE_RESOLVE] = "resolve",
        [TL_HEALTH_STAGE_TCP] = "tcp",
        [TL_HEALTH_STAGE_GRPC] = "grpc",
        [TL_HEALTH_STAGE_IDENTITY] = "identity",
        [TL_HEALTH_STAGE_SERVING] = "serving",
        [TL_HEALTH_STAGE_TRANSPORTS] = "transports",
        [TL_HEALTH_STAGE_LOCAL] = "local",
        [TL_HEALTH_STAGE_MEMLOCK] = "memlock",
        [TL_HEALTH_STAGE_DEVICE] = "device",
        [TL_HEALTH_STAGE_PORT] = "port",
        [TL_HEALTH_STAGE_PATHS] = "paths",
        [TL_HEALTH_STAGE_PROBE] = "probe",
    };
    return names[stage];
}

static void fail(struct tl_health_finding *finding, enum tl_health_stage stage, const char *reason)
{
    finding->stage = stage;
    finding->verified = stage - 1;
    snprintf(finding->reason, sizeof(finding->reason), "%s", reason);
}

static void set_remedy(struct tl_health_finding *finding, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static void set_remedy(struct tl_health_finding *finding, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(finding->remedy, sizeof(finding->remedy), format, arguments);
    va_end(arguments);
}

/* A worker that requires a data plane does not start without one. */
static void add_refusal_to_start(struct tl_health_finding *finding)
{
    struct tl_error error;
    const struct tl_settings *settings = &finding->task->settings;
    /* Shared memory is enough. */
    if (settings->rdma != TL_RDMA_REQUIRE || !tl_local_settings_refusal(settings)) return;
    if (tl_verbs_settings_refusal(settings)) return;
    if (tl_health_look_at_machine(finding->task, &error) == TL_HEALTH_STAGE_PATHS) return;
    size_t len = strlen(finding->remedy);
    snprintf(finding->remedy + len, sizeof(finding->remedy) - len, "; rdma is \"require\", and it would not start: %s",
             error.message);
}

/* Whether the worker's address is one of this machine. */
static bool is_on_this_machine(const struct tl_config_task *task)
{
    char host[256];
    uint16_t port;
    const char *reason;
    struct tl_local_hosts *hosts = tl_local_hosts_create();
    bool is_local = hosts && tl_address_split(task->address, host, sizeof(host), &port, NULL) == TL_OK &&
                    tl_local_hosts_has(hosts, host, &reason);
    tl_local_hosts_destroy(hosts);
    return is_local;
}

/* A host that is a name: the reason says what it resolved to, behind the address. */
static void name_address(struct tl_health_finding *finding, const char *where)
{
    const char *address = finding->task->address;
    char *place = strstr(finding->reason, address);
    char rest[TL_ERROR_MESSAGE_BYTES];
    if (where[0] == '\0' || !place) return;
    place += strlen(address);
    snprintf(rest, sizeof(rest), "%s", place);
    snprintf(place, sizeof(finding->reason) - (size_t)(place - finding->reason), " (%s)%s", where, rest);
}

/* The name of the worker's host means a loopback address on this machine, as Debian gives it to the machine's own
 * name. */
static bool is_loopback_name(const struct tl_health_finding *finding)
{
    return !tl_address_is_loopback(finding->task->address) && strstr(finding->reason, "(IPv4 127.") != NULL;
}

/* Nothing takes connections at the address. */
static void judge_no_connection(struct tl_health_finding *finding, const char *message, const char *source)
{
    const struct tl_config_task *task = finding->task;
    fail(finding, TL_HEALTH_STAGE_TCP, message);
    set_remedy(finding,
               "start it there: tensorlane serve --config %s --job %s --task %" PRIu32
               "; if it runs, look at both machines: tensorlane doctor --config %s",
               source, task->job, task->index, source);
    if (is_loopback_name(finding)) {
        set_remedy(finding,
                   "start it, if this is its machine; else correct its name in /etc/hosts, which means this machine "
                   "alone with an address of 127.0.0.0/8");
    }
    if (finding->is_local) add_refusal_to_start(finding);
}

/* A gRPC server has refused the call, or has not answered it. */
static void judge_failed_rpc(struct tl_health_finding *finding, const struct tl_error *error)
{
    const char *address = finding->task->address;
    if (error->code == TL_UNIMPLEMENTED) {
        fail(finding, TL_HEALTH_STAGE_IDENTITY, "the gRPC server that answers is not a tensorlane worker");
        set_remedy(finding, "stop the other server at %s, or give this task another port", address);
    } else if (error->code == TL_DEADLINE_EXCEEDED) {
        finding->is_silent = true;
        finding->has_http2 = true;
        fail(finding, TL_HEALTH_STAGE_GRPC, error->message);
        set_remedy(finding, "it is connected but does not answer: see its log and its load; stop and start it");
    } else {
        fail(finding, TL_HEALTH_STAGE_IDENTITY, error->message);
        set_remedy(finding, "see the log of the process at %s", address);
    }
}

/* The worker did not identify itself: finds the stage at which the call failed. */
static void judge_failed_call(struct tl_health_finding *finding, enum tl_call_stage stage, const struct tl_error *error,
                              const char *source)
{
    const char *address = finding->task->address;
    switch (stage) {
    case TL_CALL_RESOLVE:
        fail(finding, TL_HEALTH_STAGE_RESOLVE, error->message);
        set_remedy(finding, "correct the host name in %s, or make it known to DNS or /etc/hosts", source);
        break;
    case TL_CALL_CONNECT:
        judge_no_connection(finding, error->message, source);
        if (error->code == TL_RESOURCE_EXHAUSTED) {
            set_remedy(finding, "give this command more descriptors (ulimit -n) or memory; the worker was not asked");
        }
        break;
    case TL_CALL_SILENT:
        finding->is_silent = true;
        fail(finding, TL_HEALTH_STAGE_GRPC, error->message);
        set_remedy(finding,
                   "look there which process listens at %s (ss -ltnp): kill -CONT lets a stopped worker go on; stop "
                   "another program, or give this task another port",
                   address);
        break;
    case TL_CALL_HTTP2:
        fail(finding, TL_HEALTH_STAGE_GRPC, error->message);
        set_remedy(finding, "another program listens at %s; stop it or give this task another port", address);
        break;
    case TL_CALL_OPTIONS:
    case TL_CALL_RPC:
        judge_failed_rpc(finding, error);
        break;
    }
}

/* It said who it is. */
static bool judge_identity(struct tl_health_finding *finding, const char *source, const char *where)
{
    const struct tl_config_task *task = finding->task;
    const struct tl_description *description = &finding->description;
    char reason[TL_ERROR_MESSAGE_BYTES], process[512] = "";
    if (strcmp(description->job, task->job) == 0 && description->task == task->index) return true;
    if (description->host_name[0] != '\0')
        snprintf(process, sizeof(process), " on host %.256s, process %" PRIu64, description->host_name,
                 description->process_id);
    snprintf(reason, sizeof(reason), "%s%s%s is /job:%s/task:%" PRIu32 "%s", "the worker that answers",
             where[0] != '\0' ? " at " : "", where, description->job, description->task, process);
    fail(finding, TL_HEALTH_STAGE_IDENTITY, reason);
    if (where[0] != '\0') {
        set_remedy(
            finding,
            "%s means %s here: correct DNS or /etc/hosts of this machine, or the address of %s in %s; if they are "
            "right, start %s there instead",
            task->address, where, task->name, source, task->name);
        return false;
    }
    set_remedy(finding, "correct the address of %s in %s, or start %s at %s instead", task->name, source, task->name,
               task->address);
    return false;
}

/* Its health service says that it serves. */
static bool judge_serving(struct tl_health_finding *finding, const struct tl_call_options *call)
{
    struct tl_error error;
    int health = TL_HEALTH_UNKNOWN;
    const struct tl_description *description = &finding->description;
    bool is_serving = description->is_serving;
    enum tl_status status = is_serving ? tl_client_check_health(call, "", &health, NULL, &error) : TL_OK;
    if (!is_serving && description->reason[0] != '\0') {
        char reason[TL_ERROR_MESSAGE_BYTES];
        snprintf(reason, sizeof(reason), "it could not start: %.900s", description->reason);
        fail(finding, TL_HEALTH_STAGE_SERVING, reason);
        set_remedy(finding, "%s", description->remedy[0] != '\0' ? description->remedy : "see its log");
        return false;
    }
    if (status != TL_OK) {
        fail(finding, TL_HEALTH_STAGE_SERVING, error.message);
    } else if (!is_serving || health != TL_HEALTH_SERVING) {
        fail(finding, TL_HEALTH_STAGE_SERVING, "it runs but does not serve: it is starting or stopping");
    } else {
        return true;
    }
    set_remedy(finding, "wait, or see its log");
    return false;
}

/* The worker tells this caller no more than its health; who it is has its certificate proved. */
static void judge_health_alone(struct tl_health_finding *finding, const struct tl_call_options *call,
                               const struct tl_error *denial)
{
    finding->verified = TL_HEALTH_STAGE_IDENTITY;
    finding->description.is_serving = true; /* as far as it is known: its health service says the rest */
    if (!judge_serving(finding, call)) return;
    finding->is_healthy = true;
    finding->stage = finding->verified = TL_HEALTH_STAGE_SERVING;
    snprintf(finding->reason, sizeof(finding->reason), "it serves; more is not looked at: %.900s", denial->message);
    set_remedy(finding,
               "none for a check of its health; to see more, change security.allow, or use another certificate");
}

static struct tl_call_options make_call(const struct tl_health_flags *flags, const struct tl_config_task *task,
                                        int64_t timeout_ns, char *ret_where)
{
    return (struct tl_call_options){
        .address = task->address,
        .secure = tl_cluster_tls(),
        .expected_name = task->name,
        .ret_where = ret_where,
        .connect_timeout_ns = flags->connect_timeout_ns > 0 ? flags->connect_timeout_ns : timeout_ns,
        /* A time that the user gives counts for all of it. */
        .http2_timeout_ns = flags->connect_timeout_ns > 0 ? 0 : HTTP2_NS,
        .rpc_timeout_ns = flags->rpc_timeout_ns > 0 ? flags->rpc_timeout_ns : timeout_ns,
        .user_agent = flags->user_agent,
    };
}

/* It knows of nothing that makes transfers fail. */
static bool judge_troubles(struct tl_health_finding *finding)
{
    const struct tl_description *description = &finding->description;
    for (size_t i = 0; i < description->trouble_count; i++) {
        const struct tl_trouble *trouble = &description->troubles[i];
        if (!trouble->breaks_transfers) continue;
        fail(finding, TL_HEALTH_STAGE_SERVING, trouble->reason);
        set_remedy(finding, "%s", trouble->remedy);
        return false;
    }
    return true;
}

/* At least one way of moving tensors works. */
static bool judge_transports(struct tl_health_finding *finding)
{
    const struct tl_description *description = &finding->description;
    const char *reason = "it has no transport at all";
    for (size_t i = 0; i < description->transport_count; i++) {
        if (description->transports[i].is_available) return true;
        reason = description->transports[i].reason;
    }
    fail(finding, TL_HEALTH_STAGE_TRANSPORTS, reason);
    set_remedy(finding, "see the log of the worker for what each transport lacks");
    return false;
}

void tl_health_ask_again(const struct tl_health_flags *flags, struct tl_health_finding *finding)
{
    struct tl_error error;
    struct tl_description description = {0};
    const struct tl_call_options call = make_call(flags, finding->task, AGAIN_TIMEOUT_NS, NULL);
    if (tl_client_identify(&call, &description, NULL, &error) != TL_OK) return;
    tl_description_fini(&finding->description);
    finding->description = description;
    finding->is_unconfirmed = false;
}

/* The process that listens is one of this machine, and it is evident why it does not answer. */
static bool is_in_trouble(const struct tl_health_finding *finding)
{
    struct tl_local_process process;
    char reason[TL_ERROR_MESSAGE_BYTES], remedy[TL_ERROR_MESSAGE_BYTES];
    return finding->is_local && tl_local_process_listening(finding->task->address, &process) && process.pid != 0 &&
           tl_local_process_trouble(&process, finding->task->address, reason, remedy);
}

void tl_health_check_worker(const struct tl_health_flags *flags, const struct tl_config *config,
                            struct tl_health_finding *finding)
{
    char where[TL_CALL_WHERE_BYTES] = "";
    const struct tl_call_options call = make_call(flags, finding->task, DEFAULT_TIMEOUT_NS, where);
    enum tl_call_stage stage = TL_CALL_RESOLVE;
    struct tl_error error;
    enum tl_status status = tl_client_identify(&call, &finding->description, &stage, &error);
    /* Where the name service does not answer, asking it again would outlast the time-out. */
    finding->is_local = flags->is_local || (stage != TL_CALL_RESOLVE && is_on_this_machine(finding->task));
    /* A worker that is only busy may answer a moment later. */
    if (status != TL_OK && stage == TL_CALL_SILENT && call.http2_timeout_ns > 0 && !is_in_trouble(finding))
        status = tl_client_identify(&call, &finding->description, &stage, &error);
    if (status == TL_PERMISSION_DENIED && call.secure) {
        judge_health_alone(finding, &call, &error);
        return;
    }
    if (status != TL_OK) {
        judge_failed_call(finding, stage, &error, config->source);
        name_address(finding, where);
        return;
    }
    finding->has_description = true;
    if (!judge_identity(finding, config->source, where)) return;
    if (!judge_serving(finding, &call)) return;
    if (!judge_troubles(finding)) return;
    if (!judge_transports(finding)) return;
    tl_health_judge_data_plane(config, finding);
}
