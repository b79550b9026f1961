// SPDX-License-Identifier: Apache-2.0
/*
 * TF_CONFIG: the environment variable by which TensorFlow and the operators of Kubernetes describe to a process its
 * cluster and its own place in it.
 *
 * Happy path: "cluster" is read as our own, "rpc_layer" becomes the protocol, "task" becomes self. Members that are not
 * known are passed over, on every level, as TensorFlow does. Failure modes: those of "cluster"; a job that TensorFlow
 * does not have; more than one chief, master or evaluator; a task that is not in the cluster, unless it is the
 * evaluator, which TensorFlow keeps out of the cluster: self is then a task without address that is not among the
 * tasks, and can only receive.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "config/cluster.h"
#include "config/config_private.h"
#include "config/quote.h"

#define SOURCE "TF_CONFIG"
#define EVALUATOR "evaluator"
#define DEFAULT_ORIGIN "default of TF_CONFIG"

static const char *const job_names[] = {"chief", "master", "worker", "ps", EVALUATOR};

/* True for the jobs that have at most one task. */
static bool is_single(const char *job)
{
    return strcmp(job, "worker") != 0 && strcmp(job, "ps") != 0;
}

static bool is_job(const char *name)
{
    for (size_t i = 0; i < TL_ARRAY_COUNT(job_names); i++) {
        if (strcmp(job_names[i], name) == 0) return true;
    }
    return false;
}

static enum tl_status check_jobs(const struct tl_json_value *cluster, struct tl_error *ret_error)
{
    struct tl_json_value job;
    enum tl_status status = tl_json_expect(cluster, JSON_OBJECT, "an object of jobs", ret_error);
    if (status != TL_OK) return status;
    TL_JSON_FOREACH(cluster, job)
    {
        if (!is_job(job.key)) {
            return tl_json_fail_unknown_key(&job, "job of TensorFlow called", job_names, TL_ARRAY_COUNT(job_names),
                                            ret_error);
        }
        size_t count = json_is_array(job.json) ? json_array_size(job.json) : json_object_size(job.json);
        if (is_single(job.key) && count > 1) {
            return tl_json_fail(&job, TL_INVALID_ARGUMENT, ret_error,
                                "there are %zu tasks; a cluster has at most one %s", count, job.key);
        }
    }
    return TL_OK;
}

/* "rpc_layer" into the protocol of the layer; missing, null and "" mean grpc. */
static enum tl_status read_rpc_layer(const struct tl_json_value *root, struct tl_arena *arena,
                                     struct tl_settings_layer *layer, struct tl_error *ret_error)
{
    int protocol = TL_PROTOCOL_GRPC;
    size_t setting = tl_settings_find(offsetof(struct tl_settings, protocol));
    struct tl_json_value value;
    bool is_given = tl_json_member(root, "rpc_layer", &value) && !json_is_null(value.json) &&
                    !(json_is_string(value.json) && json_string_length(value.json) == 0);
    if (is_given) {
        enum tl_status status = tl_choice_read(tl_protocol_choices, &value, &protocol, ret_error);
        if (status != TL_OK) return status;
    }
    layer->settings.protocol = (enum tl_protocol)protocol;
    if (is_given) return tl_settings_note_origin(layer, setting, &value, TL_LEVEL_TOP, arena, ret_error);
    layer->origins[setting].value = tl_setting_format(&tl_settings_table[setting], &layer->settings, arena);
    layer->origins[setting].origin = DEFAULT_ORIGIN;
    return layer->origins[setting].value ? TL_OK : tl_json_no_memory(SOURCE, ret_error);
}

/* "index" of the task: a number, or a text of one; 0 when it is missing. *ret_value: where it stands, the task when it
 * is missing. */
static enum tl_status read_index(const struct tl_json_value *task, uint32_t *ret_index, struct tl_json_value *ret_value,
                                 struct tl_error *ret_error)
{
    struct tl_json_value value;
    *ret_index = 0;
    *ret_value = *task;
    if (!tl_json_member(task, "index", &value)) return TL_OK;
    *ret_value = value;
    if (json_is_string(value.json) && tl_cluster_parse_index(json_string_value(value.json), ret_index)) return TL_OK;
    json_int_t number = json_integer_value(value.json);
    if (json_is_integer(value.json) && number >= 0 && number <= TL_MAX_TASK_INDEX) {
        *ret_index = (uint32_t)number;
        return TL_OK;
    }
    return tl_json_fail(&value, TL_INVALID_ARGUMENT, ret_error, "must be the task's index, a number of 0 to %u",
                        TL_MAX_TASK_INDEX);
}

static enum tl_status make_evaluator(struct tl_config *config, uint32_t index, struct tl_error *ret_error)
{
    struct tl_config_private *memory = tl_config_private(config);
    struct tl_config_task *self = tl_arena_alloc(memory->arena, sizeof(*self));
    const char *name = tl_cluster_task_name(memory->arena, EVALUATOR, index);
    if (!self || !name) return tl_json_no_memory(SOURCE, ret_error);
    *self =
        (struct tl_config_task){.job = EVALUATOR, .index = index, .name = name, .settings = config->client_settings};
    config->self = self;
    return TL_OK;
}

/* Finds self, whose "type" and "index" are given; index_value is where the index stands. */
static enum tl_status find_self(struct tl_config *config, const struct tl_json_value *type,
                                const struct tl_json_value *index_value, uint32_t index, struct tl_error *ret_error)
{
    char quoted[TL_QUOTE_BYTES], text[TL_ERROR_MESSAGE_BYTES / 2];
    const char *job = json_string_value(type->json);
    size_t first, end;
    if (!is_job(job)) {
        return tl_json_fail(type, TL_INVALID_ARGUMENT, ret_error, "there is no job of TensorFlow called %s; %s",
                            tl_quote(job, quoted),
                            tl_json_suggest(job, job_names, TL_ARRAY_COUNT(job_names), text, sizeof(text)));
    }
    if (!tl_cluster_find_job(config->tasks, config->task_count, job, &first, &end)) {
        if (strcmp(job, EVALUATOR) == 0) return make_evaluator(config, index, ret_error);
        const char *names[TL_ARRAY_COUNT(job_names)];
        size_t count = tl_cluster_job_names(config->tasks, config->task_count, names, TL_ARRAY_COUNT(names));
        return tl_json_fail(type, TL_INVALID_ARGUMENT, ret_error, "job %s is not in the cluster; %s",
                            tl_quote(job, quoted), tl_json_suggest("", names, count, text, sizeof(text)));
    }
    config->self = tl_cluster_find_index(config->tasks, first, end, index);
    if (config->self) return TL_OK;
    return tl_json_fail(index_value, TL_INVALID_ARGUMENT, ret_error, "task %u is not in the cluster, where %s", index,
                        tl_cluster_describe_job(config->tasks, first, end, text, sizeof(text)));
}

static enum tl_status read_self(struct tl_config *config, const struct tl_json_value *root, struct tl_error *ret_error)
{
    struct tl_json_value task, type, index_value;
    uint32_t index;
    if (!tl_json_member(root, "task", &task)) return TL_OK;
    enum tl_status status = tl_json_expect(&task, JSON_OBJECT, "an object, {\"type\": ..., \"index\": ...}", ret_error);
    if (status != TL_OK) return status;
    if (!tl_json_member(&task, "type", &type)) {
        return tl_json_fail(&task, TL_INVALID_ARGUMENT, ret_error,
                            "\"type\" is missing; add the job of this process, such as \"worker\"");
    }
    status = tl_json_expect(&type, JSON_STRING, "a job such as \"worker\"", ret_error);
    if (status == TL_OK) status = read_index(&task, &index, &index_value, ret_error);
    if (status == TL_OK) status = find_self(config, &type, &index_value, index, ret_error);
    return status;
}

static enum tl_status build(struct tl_config *config, struct tl_json_doc *doc, struct tl_error *ret_error)
{
    struct tl_arena *arena = tl_config_private(config)->arena;
    struct tl_json_value root = tl_json_root(doc), cluster;
    struct tl_settings_layer *layer;
    if (!tl_json_member(&root, "cluster", &cluster)) {
        return tl_json_fail(&root, TL_INVALID_ARGUMENT, ret_error,
                            "\"cluster\" is missing; add \"cluster\": {\"worker\": [\"host:4000\"]}");
    }
    enum tl_status status = tl_settings_create(arena, SOURCE, &layer, ret_error);
    if (status == TL_OK) status = read_rpc_layer(&root, arena, layer, ret_error);
    if (status == TL_OK) status = check_jobs(&cluster, ret_error);
    if (status == TL_OK) status = tl_config_read_cluster(config, &cluster, true, layer, ret_error);
    if (status == TL_OK) status = tl_config_apply_layers(config, doc, ret_error);
    if (status == TL_OK) status = read_self(config, &root, ret_error);
    return status;
}

const char *tl_config_tf_text(void)
{
    const char *text = getenv("TF_CONFIG");
    return text && text[0] != '\0' ? text : NULL;
}

enum tl_status tl_config_parse_tf(const char *text, size_t len_bytes, struct tl_config **ret_config,
                                  struct tl_error *ret_error)
{
    struct tl_config *config;
    struct tl_json_doc doc;
    enum tl_status status = tl_config_create(SOURCE, &config, ret_error);
    if (status != TL_OK) return status;
    status = tl_json_doc_open(&doc, text, len_bytes, config->source, ret_error);
    if (status == TL_OK) {
        status = build(config, &doc, ret_error);
        tl_json_doc_close(&doc);
    }
    if (status != TL_OK) {
        tl_config_destroy(config);
        return status;
    }
    *ret_config = config;
    return TL_OK;
}

/* --------------------------------------------------------------------------------------------------- rewriting -- */

/* The addresses of the tasks [first, end) of one job: a list when they are numbered from 0 without gaps, else a map. */
static json_t *job_to_json(const struct tl_config *config, size_t first, size_t end)
{
    bool is_list = config->tasks[end - 1].index == end - first - 1;
    json_t *job = is_list ? json_array() : json_object();
    for (size_t i = first; job && i < end; i++) {
        const struct tl_config_task *task = &config->tasks[i];
        json_t *address = json_string(task->address);
        char index[16];
        snprintf(index, sizeof(index), "%u", task->index);
        int failed = is_list ? json_array_append_new(job, address) : json_object_set_new(job, index, address);
        if (failed) {
            json_decref(job);
            return NULL;
        }
    }
    return job;
}

static json_t *config_to_json(const struct tl_config *config)
{
    json_t *cluster = json_object();
    for (size_t first = 0, end; cluster && first < config->task_count; first = end) {
        const char *job = config->tasks[first].job;
        tl_cluster_find_job(config->tasks, config->task_count, job, &first, &end);
        if (json_object_set_new(cluster, job, job_to_json(config, first, end)) != 0) {
            json_decref(cluster);
            return NULL;
        }
    }
    const char *protocol = tl_choice_name(tl_protocol_choices, (int)config->tasks[0].settings.protocol);
    return cluster ? json_pack("{s:o, s:s}", "cluster", cluster, "protocol", protocol) : NULL;
}

enum tl_status tl_config_tf_to_json(const char *text, size_t len_bytes, char **ret_json, struct tl_error *ret_error)
{
    struct tl_config *config;
    enum tl_status status = tl_config_parse_tf(text, len_bytes, &config, ret_error);
    if (status != TL_OK) return status;
    json_t *root = config_to_json(config);
    tl_config_destroy(config);
    size_t length = root ? json_dumpb(root, NULL, 0, JSON_INDENT(2)) : 0;
    /* Not json_dumps: its memory is jansson's, the caller's is free's. */
    char *json = length > 0 ? malloc(length + 2) : NULL;
    if (!json || json_dumpb(root, json, length, JSON_INDENT(2)) != length) {
        free(json);
        json_decref(root);
        return tl_json_no_memory(SOURCE, ret_error);
    }
    json_decref(root);
    strcpy(json + length, "\n");
    *ret_json = json;
    return TL_OK;
}
