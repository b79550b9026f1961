// SPDX-License-Identifier: Apache-2.0
/*
 * Builds a configuration from a text, and answers questions about it.
 *
 * Happy path: the text becomes a document; the settings of its top level make a layer; the cluster becomes tasks, all
 * with that layer; "jobs" replaces the layers of some; every layer is checked and copied into its tasks; the document
 * is closed, since the configuration keeps copies of all it needs. Failure modes: any error drops the arena, and with
 * it all that was built.
 */
#include "config/config.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "config/allow_list.h"
#include "config/cluster.h"
#include "config/config_private.h"
#include "config/jobs.h"
#include "config/quote.h"
#include "config/security.h"

/* More names than these are not searched for the nearest. */
#define MAX_NAMES 256
/* Holds a job's name and a task's index. */

enum tl_status tl_config_create(const char *source, struct tl_config **ret_config, struct tl_error *ret_error)
{
    struct tl_arena *arena = tl_arena_create();
    if (!arena) return tl_json_no_memory(source, ret_error);
    struct tl_config *config = tl_arena_alloc(arena, sizeof(*config));
    struct tl_config_private *memory = tl_arena_alloc(arena, sizeof(*memory));
    char *copy = tl_arena_format(arena, "%s", source);
    if (!config || !memory || !copy) {
        tl_arena_destroy(arena);
        return tl_json_no_memory(source, ret_error);
    }
    memory->arena = arena;
    config->memory = memory;
    config->source = copy;
    *ret_config = config;
    return TL_OK;
}

void tl_config_destroy(struct tl_config *config)
{
    if (config) tl_arena_destroy(tl_config_private(config)->arena);
}

enum tl_status tl_config_read_cluster(struct tl_config *config, const struct tl_json_value *cluster,
                                      bool allows_empty_jobs, const struct tl_settings_layer *top,
                                      struct tl_error *ret_error)
{
    struct tl_config_private *memory = tl_config_private(config);
    memory->top = top; /* also when the cluster is wrong */
    enum tl_status status =
        tl_cluster_read(cluster, allows_empty_jobs, memory->arena, &config->tasks, &config->task_count, ret_error);
    if (status != TL_OK) return status;
    memory->layers = tl_arena_alloc_array(memory->arena, config->task_count, sizeof(*memory->layers));
    memory->addresses = tl_arena_alloc_array(memory->arena, config->task_count, sizeof(*memory->addresses));
    if (!memory->layers || !memory->addresses) return tl_json_no_memory(config->source, ret_error);
    for (size_t i = 0; i < config->task_count; i++) {
        memory->layers[i] = top;
        memory->addresses[i] = tl_json_text(config->tasks[i].address, memory->arena);
        if (!memory->addresses[i]) return tl_json_no_memory(config->source, ret_error);
    }
    return TL_OK;
}

/* Checks a layer that tasks have. */
static enum tl_status check_layer(const struct tl_config *config, const struct tl_settings_layer *layer,
                                  struct tl_json_doc *doc, struct tl_error *ret_error)
{
    bool has_other_errors = doc->errors && doc->errors->count > 0;
    enum tl_status status = tl_settings_check(layer, doc, ret_error);
    /* A job that a rule names may be missing because its entry is wrong. */
    if (status != TL_OK || has_other_errors) return status;
    return tl_allow_list_check_tasks(&layer->settings.security, doc, config->tasks, config->task_count, ret_error);
}

/* Fills the settings of all tasks, and of a process that is none, from their layers. */
static enum tl_status fill_settings(struct tl_config *config, struct tl_error *ret_error)
{
    struct tl_config_private *memory = tl_config_private(config);
    size_t count = config->task_count;
    memory->files = tl_arena_alloc_array(memory->arena, count + 1, sizeof(*memory->files));
    if (!memory->files) return tl_json_no_memory(config->source, ret_error);
    config->client_settings = memory->top->settings;
    bool is_complete = tl_security_name_files(&config->client_settings, NULL, memory->arena, &memory->files[count]);
    for (size_t i = 0; is_complete && i < count; i++) {
        struct tl_config_task *task = &config->tasks[i];
        task->settings = memory->layers[i]->settings;
        is_complete = tl_security_name_files(&task->settings, task, memory->arena, &memory->files[i]);
    }
    return is_complete ? TL_OK : tl_json_no_memory(config->source, ret_error);
}

enum tl_status tl_config_apply_layers(struct tl_config *config, struct tl_json_doc *doc, struct tl_error *ret_error)
{
    const struct tl_config_private *memory = tl_config_private(config);
    for (size_t i = 0; i < config->task_count; i++) {
        bool is_checked = i > 0 && memory->layers[i] == memory->layers[i - 1];
        enum tl_status status = is_checked ? TL_OK : check_layer(config, memory->layers[i], doc, ret_error);
        if (status != TL_OK) return status;
    }
    enum tl_status status = fill_settings(config, ret_error);
    if (status != TL_OK) return status;
    /* A contradiction that no task has is an error only for a process that is no task. */
    struct tl_config_errors *errors = doc->errors;
    doc->errors = NULL;
    config->client_error.code = tl_settings_check(memory->top, doc, &config->client_error);
    doc->errors = errors;
    return TL_OK;
}

/* ----------------------------------------------------------------------------------------------------- parsing -- */

/* Checks that a configuration without tasks has none. */
static enum tl_status refuse_tasks(const struct tl_json_value *root, struct tl_error *ret_error)
{
    static const char *const names[] = {"cluster", "jobs"};
    struct tl_json_value value;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (!tl_json_member(root, names[i], &value)) continue;
        return tl_json_fail(&value, TL_INVALID_ARGUMENT, ret_error,
                            "a worker that is opened with an address belongs to no cluster; remove \"%s\", or open the "
                            "worker with job and task in place of the address",
                            names[i]);
    }
    return TL_OK;
}

static enum tl_status build_tasks(struct tl_config *config, const struct tl_json_value *root, const char *folder,
                                  const struct tl_settings_layer *top, struct tl_error *ret_error)
{
    struct tl_config_private *memory = tl_config_private(config);
    struct tl_json_value cluster = {.json = NULL}, jobs;
    enum tl_status status;
    memory->top = top;
    if (memory->is_alone) return tl_json_collect(root->doc, refuse_tasks(root, ret_error), ret_error);
    if (tl_json_member(root, "cluster", &cluster)) {
        status = tl_config_read_cluster(config, &cluster, false, top, ret_error);
    } else {
        status = tl_json_fail(root, TL_INVALID_ARGUMENT, ret_error,
                              "\"cluster\" is missing; add \"cluster\": {\"worker\": [\"host:4000\"]}");
    }
    status = tl_json_collect(root->doc, status, ret_error);
    if (status == TL_OK && tl_json_member(root, "jobs", &jobs)) {
        status = tl_jobs_read(&jobs, &cluster, config->tasks, config->task_count, folder, memory->arena, top,
                              memory->layers, ret_error);
    }
    return tl_json_collect(root->doc, status, ret_error);
}

static enum tl_status build(struct tl_config *config, struct tl_json_doc *doc, const char *folder,
                            struct tl_error *ret_error)
{
    struct tl_config_private *memory = tl_config_private(config);
    struct tl_json_value root = tl_json_root(doc), schema;
    struct tl_settings_layer *defaults;
    const struct tl_settings_layer *top;
    enum tl_status status = tl_settings_create(memory->arena, config->source, &defaults, ret_error);
    /* The settings come first, because a misspelt "cluster" is then an unknown name, and not one that is missing. */
    if (status == TL_OK) {
        status = tl_settings_read(&root, TL_LEVEL_TOP, folder, memory->arena, defaults, &top, ret_error);
    }
    if (status == TL_OK && tl_json_member(&root, "$schema", &schema)) {
        status = tl_json_collect(doc, tl_json_expect(&schema, JSON_STRING, "a string", ret_error), ret_error);
    }
    if (status == TL_OK) status = build_tasks(config, &root, folder, top, ret_error);
    if (status == TL_OK) status = tl_config_apply_layers(config, doc, ret_error);
    return status;
}

static int compare_offsets(const void *left, const void *right)
{
    const struct tl_config_error *a = left, *b = right;
    return a->offset < b->offset ? -1 : a->offset > b->offset;
}

/* Sorts the errors that were collected, and returns the first one. */
static enum tl_status first_error(struct tl_config_errors *errors, struct tl_error *ret_error)
{
    if (errors->count == 0) return TL_OK;
    qsort(errors->items, errors->count, sizeof(errors->items[0]), compare_offsets);
    return tl_error_copy(ret_error, &errors->items[0].error);
}

enum tl_status tl_config_parse_source(const struct tl_config_source *source, struct tl_config **ret_config,
                                      struct tl_config_errors *ret_errors, struct tl_error *ret_error)
{
    struct tl_config *config;
    struct tl_json_doc doc;
    if (ret_errors) *ret_errors = (struct tl_config_errors){0};
    enum tl_status status = tl_config_create(source->name, &config, ret_error);
    if (status != TL_OK) return status;
    tl_config_private(config)->is_alone = source->is_alone;
    const char *folder = source->folder;
    status = tl_json_doc_open(&doc, source->text, source->len_bytes, config->source, ret_error);
    if (status == TL_OK) {
        doc.errors = ret_errors;
        status = tl_json_collect(&doc, build(config, &doc, folder, ret_error), ret_error);
        tl_json_doc_close(&doc);
        if (ret_errors && status == TL_RESOURCE_EXHAUSTED) ret_errors->count = 0;
        if (ret_errors && status != TL_RESOURCE_EXHAUSTED) status = first_error(ret_errors, ret_error);
    }
    if (status != TL_OK) {
        tl_config_destroy(config);
        return status;
    }
    *ret_config = config;
    return TL_OK;
}

enum tl_status tl_config_parse_all_errors(const char *text, size_t len_bytes, const char *source, const char *folder,
                                          struct tl_config **ret_config, struct tl_config_errors *ret_errors,
                                          struct tl_error *ret_error)
{
    const struct tl_config_source from = {.name = source, .folder = folder, .text = text, .len_bytes = len_bytes};
    return tl_config_parse_source(&from, ret_config, ret_errors, ret_error);
}

enum tl_status tl_config_parse(const char *text, size_t len_bytes, const char *source, const char *folder,
                               struct tl_config **ret_config, struct tl_error *ret_error)
{
    return tl_config_parse_all_errors(text, len_bytes, source, folder, ret_config, NULL, ret_error);
}

enum tl_status tl_config_parse_settings(const char *text, size_t len_bytes, const char *source,
                                        struct tl_config **ret_config, struct tl_error *ret_error)
{
    const struct tl_config_source from = {.name = source, .text = text, .len_bytes = len_bytes, .is_alone = true};
    return tl_config_parse_source(&from, ret_config, NULL, ret_error);
}

/* --------------------------------------------------------------------------------------------------- searching -- */

enum tl_status tl_config_find_task(const struct tl_config *config, const char *job, uint32_t index,
                                   const struct tl_config_task **ret_task, struct tl_error *ret_error)
{
    size_t first, end;
    char quoted[TL_QUOTE_BYTES], text[TL_ERROR_MESSAGE_BYTES / 2];
    if (!tl_cluster_find_job(config->tasks, config->task_count, job, &first, &end)) {
        const char *names[MAX_NAMES];
        size_t count = tl_cluster_job_names(config->tasks, config->task_count, names, MAX_NAMES);
        return tl_error_set(ret_error, TL_NOT_FOUND, "%s: there is no job %s; %s", tl_json_shown_source(config->source),
                            tl_quote(job, quoted), tl_json_suggest(job, names, count, text, sizeof(text)));
    }
    const struct tl_config_task *task = tl_cluster_find_index(config->tasks, first, end, index);
    if (!task) {
        return tl_error_set(ret_error, TL_NOT_FOUND, "%s: there is no task %u; %s",
                            tl_json_shown_source(config->source), index,
                            tl_cluster_describe_job(config->tasks, first, end, text, sizeof(text)));
    }
    *ret_task = task;
    return TL_OK;
}

bool tl_config_split_name(const char *name, char ret_job[TL_CONFIG_JOB_BYTES], uint32_t *ret_index)
{
    bool is_long = strncmp(name, "/job:", 5) == 0;
    const char *separator = is_long ? "/task:" : ":";
    const char *start = is_long ? name + 5 : name;
    const char *end = strstr(start, separator);
    if (!end || end == start || (size_t)(end - start) >= TL_CONFIG_JOB_BYTES) return false;
    if (!tl_cluster_parse_index(end + strlen(separator), ret_index)) return false;
    *(char *)mempcpy(ret_job, start, (size_t)(end - start)) = '\0';
    return true;
}

enum tl_status tl_config_find_name(const struct tl_config *config, const char *name,
                                   const struct tl_config_task **ret_task, struct tl_error *ret_error)
{
    char job[TL_CONFIG_JOB_BYTES], quoted[TL_QUOTE_BYTES], text[TL_ERROR_MESSAGE_BYTES / 2];
    uint32_t index;
    if (tl_config_split_name(name, job, &index)) return tl_config_find_task(config, job, index, ret_task, ret_error);
    const char *names[MAX_NAMES];
    size_t count = 0;
    for (; count < config->task_count && count < MAX_NAMES; count++) {
        names[count] = config->tasks[count].name;
    }
    return tl_error_set(ret_error, TL_NOT_FOUND,
                        "%s: %s is no task, which is written \"/job:ps/task:0\" or \"ps:0\"; %s", config->source,
                        tl_quote(name, quoted), tl_json_suggest(name, names, count, text, sizeof(text)));
}

/* ------------------------------------------------------------------------------------------------------ values -- */

size_t tl_config_values(const struct tl_config *config, const struct tl_config_task *task,
                        struct tl_config_value *ret_values, size_t capacity)
{
    const struct tl_config_private *memory = tl_config_private(config);
    bool is_member = task >= config->tasks && task < config->tasks + config->task_count;
    size_t place = is_member ? (size_t)(task - config->tasks) : 0;
    const struct tl_settings_layer *layer = is_member ? memory->layers[place] : memory->top;
    const struct tl_security_files *files = &memory->files[is_member ? place : config->task_count];
    for (size_t i = 0; i < tl_settings_count && i < capacity; i++) {
        const struct tl_setting *setting = &tl_settings_table[i];
        const struct tl_setting_origin *origin = &layer->origins[i];
        bool is_own_address = is_member && setting->kind == TL_SETTING_ADDRESS && !task->settings.listen;
        const char *file = tl_security_file_value(files, setting);
        ret_values[i] = (struct tl_config_value){
            .path = setting->path,
            .value = is_own_address ? memory->addresses[place]
                     : file         ? file
                                    : origin->value,
            .origin = origin->origin,
        };
    }
    return tl_settings_count;
}
