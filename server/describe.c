// SPDX-License-Identifier: Apache-2.0
/* What a worker reports when a tool asks for its identity and its state. */
#include <stdlib.h>
#include <string.h>

#include <tensorlane/version.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "server/peers/permissions.h"
#include "server/troubles.h"
#include "server/worker_internal.h"

struct named_value {
    const char *name;
    uint64_t value;
};

static enum tl_status add_counters(struct tl_description *description, const struct named_value *values, size_t count,
                                   struct tl_error *ret_error)
{
    size_t total = description->counter_count + count;
    struct tl_counter *counters = realloc(description->counters, total * sizeof(*counters));
    if (counters == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for counters");
    description->counters = counters;
    for (size_t i = 0; i < count; i++) {
        struct tl_counter *counter = &counters[description->counter_count];
        counter->value = values[i].value;
        counter->name = strdup(values[i].name);
        if (counter->name == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for counters");
        description->counter_count++;
    }
    return TL_OK;
}

static enum tl_status count_transports(struct tl_worker *worker, struct tl_description *description,
                                       struct tl_error *ret_error)
{
    if (tl_transports_count(worker) == 0) return TL_OK;
    struct tl_engine_stats engine;
    struct tl_memory_stats memory;
    struct tl_reactor_stats reactor;
    tl_transports_get_stats(worker, &engine, &memory, &reactor);
    const struct named_value values[] = {
        {"data_tensors_sent", engine.tensors_sent},       {"data_tensors_received", engine.tensors_received},
        {"data_tensors_mapped", engine.tensors_mapped},   {"data_bytes_sent", engine.bytes_sent},
        {"data_bytes_received", engine.bytes_received},   {"data_bytes_bounced", engine.bytes_bounced},
        {"data_messages_sent", engine.messages_sent},     {"data_messages_received", engine.messages_received},
        {"data_slots_sent", engine.slots_sent},           {"data_slots_received", engine.slots_received},
        {"data_writes_posted", engine.writes_posted},     {"data_reads_posted", engine.reads_posted},
        {"data_sources_shown", engine.sources_shown},     {"data_meta_data_updates", engine.meta_data_updates},
        {"data_credits_sent", engine.credits_sent},       {"data_late_answers", engine.late_answers},
        {"data_protocol_errors", engine.protocol_errors}, {"data_connections_broken", engine.connections_broken},
        {"data_pool_bytes", memory.pool_bytes},           {"data_pool_used_bytes", memory.pool_used_bytes},
        {"data_pool_waits", memory.pool_waits},           {"data_pool_waiting", memory.pool_waiting},
        {"data_registrations", memory.registrations},     {"data_registered_bytes", memory.cached_bytes},
        {"data_registrations_evicted", memory.evictions}, {"data_reactor_rounds", reactor.rounds},
        {"data_reactor_sleeps", reactor.sleeps},          {"data_most_members", reactor.most_members},
    };
    return add_counters(description, values, TL_ARRAY_COUNT(values), ret_error);
}

static enum tl_status describe_counters(struct tl_worker *worker, struct tl_description *description,
                                        struct tl_error *ret_error)
{
    struct tl_control_stats control;
    struct tl_worker_stats stats;
    tl_control_get_stats(worker->control, &control);
    tl_worker_count(worker, &stats);
    const struct named_value values[] = {
        {"tensors_sent", stats.tensors_sent},
        {"tensors_received", stats.tensors_received},
        {"bytes_sent", stats.bytes_sent},
        {"bytes_received", stats.bytes_received},
        {"bytes_copied_send", stats.bytes_copied_send},
        {"frames_sent", stats.frames_sent},
        {"frames_received", stats.frames_received},
        {"protocol_errors", stats.protocol_errors},
        {"late_chunks", control.late_chunks},
        {"requests_retried", stats.requests_retried},
        {"tensors_dropped", stats.tensors_dropped},
        {"waiting_receivers", stats.waiting_receivers},
        {"held_tensors", stats.held_tensors},
        {"held_bytes", stats.held_bytes},
        {"published_tensors", stats.published_tensors},
        {"published_bytes", stats.published_bytes},
        {"open_operations", stats.open_operations},
        {"most_members", tl_quota_most(tl_loop_quota(worker->loop))},
        {"calls_refused", tl_permissions_refused(worker->members.permissions)},
    };
    enum tl_status status = add_counters(description, values, TL_ARRAY_COUNT(values), ret_error);
    if (status == TL_OK) status = count_transports(worker, description, ret_error);
    return status;
}

static enum tl_status describe_listens(const struct tl_worker *worker, struct tl_description *description,
                                       struct tl_error *ret_error)
{
    char texts[TL_CONTROL_MAX_LISTENS][TL_CONTROL_LISTEN_BYTES];
    size_t count = tl_control_listens(worker->control, texts, TL_CONTROL_MAX_LISTENS);
    description->listens = calloc(count > 0 ? count : 1, sizeof(*description->listens));
    for (size_t i = 0; description->listens != NULL && i < count; i++) {
        char *text = strdup(texts[i]);
        if (text == NULL) break;
        description->listens[description->listen_count++] = text;
    }
    if (description->listen_count == count && description->listens != NULL) return TL_OK;
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a description");
}

/* The settings that workers must agree upon, or that say how others reach this one. */
static bool matters_to_peers(const char *path)
{
    static const char *const paths[] = {"protocol",           "rdma",      "connect",          "listen",
                                        "verbs.keys",         "verbs.mtu", "verbs.pkey_index", "verbs.gid_index",
                                        "verbs.traffic_class"};
    for (size_t i = 0; i < TL_ARRAY_COUNT(paths); i++)
        if (strcmp(path, paths[i]) == 0) return true;
    return false;
}

/* Returns a copy of a value that is JSON, a text without its quotes. */
static char *copy_value(const char *value)
{
    size_t len = strlen(value);
    bool is_text = len >= 2 && value[0] == '"' && value[len - 1] == '"';
    return is_text ? strndup(value + 1, len - 2) : strdup(value);
}

static enum tl_status describe_settings(const struct tl_worker *worker, struct tl_description *description,
                                        struct tl_error *ret_error)
{
    if (worker->setup.task == NULL) return TL_OK;
    size_t count = tl_config_values(worker->setup.config, worker->setup.task, NULL, 0);
    struct tl_config_value *values = calloc(count + 1, sizeof(*values));
    description->settings = calloc(count + 1, sizeof(*description->settings));
    bool is_complete = values != NULL && description->settings != NULL;
    if (is_complete) tl_config_values(worker->setup.config, worker->setup.task, values, count);
    for (size_t i = 0; is_complete && i < count; i++) {
        if (!matters_to_peers(values[i].path) || strcmp(values[i].value, "null") == 0) continue;
        struct tl_setting_text *to = &description->settings[description->setting_count++];
        to->path = strdup(values[i].path);
        to->value = copy_value(values[i].value);
        is_complete = to->path != NULL && to->value != NULL;
    }
    free(values);
    return is_complete ? TL_OK : tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a description");
}

enum tl_status tl_worker_describe(void *context, struct tl_description *ret_description, struct tl_error *ret_error)
{
    struct tl_worker *worker = context;
    ret_description->job = strdup(worker->setup.task != NULL ? worker->setup.task->job : "");
    ret_description->task = worker->setup.task != NULL ? worker->setup.task->index : 0;
    ret_description->incarnation = worker->self.incarnation;
    ret_description->software_version = strdup(tl_version());
    ret_description->is_serving = !worker->closing.is_closing;
    ret_description->uptime_ns = (uint64_t)(tl_clock_now_ns() - worker->setup.opened_ns);
    ret_description->host_name = strdup(worker->self.host_name);
    ret_description->process_id = worker->self.process_id;
    ret_description->cluster_digest = worker->self.cluster_digest;
    ret_description->unix_ns = tl_clock_unix_ns();
    if (ret_description->job == NULL || ret_description->software_version == NULL ||
        ret_description->host_name == NULL) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a description");
    }
    enum tl_status status = tl_transports_describe(worker, ret_description, ret_error);
    if (status == TL_OK) status = tl_peers_describe(worker, ret_description, ret_error);
    if (status == TL_OK) status = describe_listens(worker, ret_description, ret_error);
    if (status == TL_OK) status = describe_settings(worker, ret_description, ret_error);
    if (status == TL_OK) status = describe_counters(worker, ret_description, ret_error);
    if (status == TL_OK) status = tl_troubles_describe(worker, ret_description, ret_error);
    return status;
}
