// SPDX-License-Identifier: Apache-2.0
/*
 * The worker that a command talks to.
 *
 * The client that pulls belongs to no cluster, and the target is added to it, so that a worker of any cluster can be
 * pulled from by its address and no other worker is dialled. From the configuration it takes how tensors travel, as the
 * top level says it: the client is no task, so that settings of jobs and tasks do not concern it. Files, limits and
 * time-outs are those of workers and do not matter to the command.
 */
#include "server/cli/cluster_tls.h"
#include "server/cli/target.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "control/link.h"
#include "server/cli/command.h"
#include "server/cli/json_out.h"
#include "server/cli/output.h"
#include "server/cli/task_config.h"
#include "server/transports/transports.h"

#define MAX_CONNECT_TIMEOUT_NS (10 * TL_NS_PER_SEC)

static void store_task(struct tl_target *target, const struct tl_config_task *task)
{
    snprintf(target->name, sizeof(target->name), "%s", task->name);
    snprintf(target->address, sizeof(target->address), "%s", task->address);
}

static enum tl_status read_config(const char *path, struct tl_config **ret_config, struct tl_error *ret_error)
{
    if (path) return tl_config_read(path, ret_config, ret_error);
    const char *text = tl_config_tf_text();
    return tl_config_parse_tf(text, strlen(text), ret_config, ret_error);
}

static int resolve_by_config(struct tl_target *target, const struct tl_options *options)
{
    const struct tl_config_task *task = NULL;
    struct tl_error error;
    int code = -1;
    if (read_config(target->config_path, &target->config, &error) != TL_OK) {
        tl_output_error(options->command, "%s", error.message);
        return TL_EXIT_FAILED;
    }
    const struct tl_config *config = target->config;
    if (tl_cluster_tls_open(&config->client_settings, &error) != TL_OK) {
        tl_output_error(options->command, "%s", error.message);
        return TL_EXIT_FAILED;
    }
    if (target->task_name) {
        if (tl_config_find_name(config, target->task_name, &task, &error) == TL_OK) {
            store_task(target, task);
        } else {
            tl_output_error(options->command, "%s", error.message);
            code = TL_EXIT_FAILED;
        }
    } else if (config->task_count == 1) {
        store_task(target, &config->tasks[0]);
    } else {
        code = tl_options_refuse(options, "%s has %zu tasks; say which one, for example --%s %s", config->source,
                                 config->task_count, options->items[1].name, config->tasks[0].name);
    }
    return code;
}

static bool has_tls_flags(const struct tl_target *target)
{
    return target->ca_path || target->certificate_path || target->key_path;
}

/* Makes a configuration of what the flags say of TLS, which says nothing else. */
static enum tl_status read_tls_flags(struct tl_target *target, struct tl_error *ret_error)
{
    struct tl_json_out *json = tl_json_out_object();
    struct tl_json_out *cluster = tl_json_out_put_object(json, "cluster");
    struct tl_json_out *tls = tl_json_out_put_object(tl_json_out_put_object(json, "security"), "tls");
    tl_json_out_put_text(tl_json_out_put_object(cluster, "target"), "0", target->address);
    tl_json_out_put_text(tls, "ca", target->ca_path);
    tl_json_out_put_text(tls, "certificate", target->certificate_path);
    tl_json_out_put_text(tls, "key", target->key_path);
    char *text = tl_json_out_text(json, false);
    if (!text) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the names of certificates");
    enum tl_status status = tl_config_parse(text, strlen(text), "--tls-client-cert", NULL, &target->config, ret_error);
    free(text);
    if (status == TL_OK) status = tl_cluster_tls_open(&target->config->client_settings, ret_error);
    return status;
}

static int resolve_by_address(struct tl_target *target, const struct tl_options *options)
{
    char host[256];
    uint16_t port;
    struct tl_error error;
    if (target->config_path || target->task_name)
        return tl_options_refuse(options, "--address stands alone, without --config and --%s", options->items[1].name);
    if (tl_address_split(target->given_address, host, sizeof(host), &port, &error) != TL_OK)
        return tl_options_refuse(options, "--address: %s", error.message);
    if (port == 0)
        return tl_options_refuse(options, "--address %s: no worker listens on port 0", target->given_address);
    snprintf(target->address, sizeof(target->address), "%s", target->given_address);
    if (!has_tls_flags(target)) return -1;
    if (!target->ca_path || !target->certificate_path || !target->key_path)
        return tl_options_refuse(options, "--tls-ca-cert, --tls-client-cert and --tls-client-key belong together");
    if (read_tls_flags(target, &error) == TL_OK) return -1;
    tl_output_error(options->command, "%s", error.message);
    return TL_EXIT_FAILED;
}

int tl_target_resolve(struct tl_target *target, const struct tl_options *options)
{
    if (target->given_address) return resolve_by_address(target, options);
    if (has_tls_flags(target))
        return tl_options_refuse(options, "--tls-ca-cert, --tls-client-cert and --tls-client-key belong to --address; "
                                          "a configuration has security.tls");
    if (target->config_path || tl_config_tf_text()) return resolve_by_config(target, options);
    return tl_options_refuse(options, "which worker? --config FILE --%s TASK, or --address HOST:PORT",
                             options->items[1].name);
}

struct tl_call_options tl_target_call_options(const struct tl_target *target)
{
    return (struct tl_call_options){
        .address = target->address,
        .secure = tl_cluster_tls(),
        .expected_name = target->name[0] ? target->name : NULL,
        .connect_timeout_ns = target->timeout_ns < MAX_CONNECT_TIMEOUT_NS ? target->timeout_ns : MAX_CONNECT_TIMEOUT_NS,
        .rpc_timeout_ns = target->timeout_ns,
    };
}

/* What the process at the address says of itself fits what the user wants. */
static enum tl_status check_identity(const struct tl_target *target, const struct tl_description *description,
                                     const char *name, struct tl_error *ret_error)
{
    if (!description->job[0]) {
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                            "%s: this process is a client and no worker; name a worker's address", target->address);
    }
    if (target->name[0] && strcmp(target->name, name) != 0) {
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                            "%s is %s, not %s; correct the configuration, or start %s there", target->address, name,
                            target->name, target->name);
    }
    if (description->protocol_version != tl_client_protocol_version()) {
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                            "%s at %s (version %.32s) speaks protocol version %" PRIu32 ", this program speaks %" PRIu32
                            "; run the same release on both",
                            name, target->address, description->software_version, description->protocol_version,
                            tl_client_protocol_version());
    }
    return TL_OK;
}

enum tl_status tl_target_identify(struct tl_target *target, struct tl_error *ret_error)
{
    const struct tl_call_options call = tl_target_call_options(target);
    struct tl_description description = {0};
    char name[TL_MAX_NAME_BYTES];
    enum tl_status status = tl_client_identify(&call, &description, NULL, ret_error);
    /* A worker with certificates may refuse this; its own has shown that it is the one that was meant. */
    if (status == TL_PERMISSION_DENIED && call.secure != NULL) {
        if (ret_error != NULL) ret_error->code = TL_OK;
        return TL_OK;
    }
    if (status != TL_OK) {
        if (status == TL_UNIMPLEMENTED && ret_error)
            tl_error_prefix(ret_error,
                            "%s: the gRPC server that answers is not a tensorlane worker: ", target->address);
        return status;
    }
    snprintf(name, sizeof(name), "/job:%s/task:%" PRIu32, description.job, description.task);
    status = check_identity(target, &description, name, ret_error);
    if (status == TL_OK) snprintf(target->name, sizeof(target->name), "%s", name);
    tl_description_fini(&description);
    return status;
}

bool tl_target_is_hopeless(enum tl_status code)
{
    return code == TL_FAILED_PRECONDITION || code == TL_UNIMPLEMENTED || code == TL_PERMISSION_DENIED ||
           code == TL_UNAUTHENTICATED;
}

/* Returns whether a setting says how tensors travel: "rdma", "local.pool", "security.tls.ca". The settings of a
 * transport are the group with its name. */
static bool is_about_transports(const char *path)
{
    if (strcmp(path, "protocol") == 0 || strcmp(path, "rdma") == 0) return true;
    if (strncmp(path, "security.tls.", strlen("security.tls.")) == 0 || strcmp(path, "security.encrypt") == 0)
        return true;
    for (size_t i = 0; i < TL_MAX_TRANSPORTS; i++) {
        size_t len = strlen(tl_transports_all[i]->name);
        if (strncmp(path, tl_transports_all[i]->name, len) == 0 && path[len] == '.') return true;
    }
    return false;
}

/* Writes what the configuration says of how tensors travel. What it does not say stays the default, so that variables
 * of the environment can still set it. Returns false if there is no memory. */
static bool put_transports(struct tl_json_out *json, const struct tl_config *config)
{
    size_t count = tl_config_values(config, NULL, NULL, 0);
    struct tl_config_value *values = calloc(count + 1, sizeof(*values));
    if (!values) return false;
    tl_config_values(config, NULL, values, count);
    for (size_t i = 0; i < count; i++) {
        const struct tl_config_value *value = &values[i];
        if (!is_about_transports(value->path) || strcmp(value->origin, "default") == 0) continue;
        struct tl_json_out *group = json;
        const char *name = value->path;
        for (const char *dot; (dot = strchr(name, '.')); name = dot + 1) {
            char group_name[TL_CONNECTION_TRANSPORT_BYTES];
            snprintf(group_name, sizeof(group_name), "%.*s", (int)(dot - name), name);
            group = tl_json_out_put_object(group, group_name);
        }
        tl_json_out_put_json(group, name, value->value);
    }
    free(values);
    return true;
}

/* Makes the settings of the client. Returns NULL when there is no memory. Ownership: free. */
static char *make_settings(const struct tl_target *target)
{
    struct tl_json_out *settings = tl_json_out_object();
    if (target->config && !put_transports(settings, target->config)) {
        tl_json_out_destroy(settings);
        return NULL;
    }
    if (target->protocol) tl_json_out_put_text(settings, "protocol", target->protocol);
    return tl_json_out_text(settings, false);
}

enum tl_status tl_target_open_client(struct tl_target *target, struct tl_worker **ret_worker, tl_peer_id *ret_peer,
                                     struct tl_error *ret_error)
{
    struct tl_worker *worker = NULL;
    if (target->config && target->config->client_error.code != TL_OK)
        return tl_error_copy(ret_error, &target->config->client_error);
    char *settings = make_settings(target);
    if (!settings) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the settings of a client");
    /* The command waits for completions all the time; to have its own thread drive the worker spares a switch for each.
     */
    const struct tl_worker_options options = {.size_bytes = sizeof(options),
                                              .config_json = settings,
                                              .is_client = true,
                                              .address = "",
                                              .progress = TL_PROGRESS_CALLER};
    enum tl_status status = tl_worker_open(&options, &worker, ret_error);
    free(settings);
    if (status != TL_OK) return status;
    const char *name = target->name[0] != '\0' ? target->name : NULL;
    status = tl_worker_add_peer(worker, target->address, name, 0, ret_peer, ret_error);
    if (status != TL_OK) {
        tl_worker_close(worker, 0);
        return status;
    }
    *ret_worker = worker;
    return TL_OK;
}

void tl_target_fini(struct tl_target *target)
{
    tl_config_destroy(target->config);
    target->config = NULL;
}

char *tl_target_describe(const struct tl_target *target, char *buffer, size_t capacity)
{
    snprintf(buffer, capacity, "%s%s%s", target->name, target->name[0] ? " at " : "", target->address);
    return buffer;
}
