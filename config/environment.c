// SPDX-License-Identifier: Apache-2.0
/*
 * TensorFlow's variables RDMA_* as settings.
 *
 * Happy path: every variable of the table that is set is read into its setting; then every task gets these values where
 * its settings are the defaults. The file always wins, because it says what the cluster is meant to be, and the
 * variables may be left over. Failure modes: a value that is none, or two spellings that differ, is an error, also
 * where the file wins, since it was set on purpose; an unknown variable is a warning.
 */
#include <inttypes.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "config/config_private.h"
#include "config/device_list.h"
#include "config/quote.h"

#define PREFIX "RDMA_"
#define MAX_DIGITS 19

/* Both columns are TensorFlow's: what its manual says, and what its code reads. */
static const struct alias {
    const char *documented;
    const char *implemented;
    size_t offset; /* in struct tl_settings */
} aliases[] = {
    {"RDMA_DEVICE", NULL, offsetof(struct tl_settings, verbs.devices)},
    {"RDMA_DEVICE_PORT", NULL, offsetof(struct tl_settings, verbs.port)},
    {"RDMA_GID_INDEX", NULL, offsetof(struct tl_settings, verbs.gid_index)},
    {"RDMA_QP_PKEY_INDEX", "RDMA_PKEY", offsetof(struct tl_settings, verbs.pkey_index)},
    {"RDMA_QP_QUEUE_DEPTH", "RDMA_QUEUE_DEPTH", offsetof(struct tl_settings, verbs.queue_depth)},
    {"RDMA_QP_TIMEOUT", "RDMA_TIMEOUT", offsetof(struct tl_settings, verbs.timeout)},
    {"RDMA_QP_RETRY_COUNT", "RDMA_RETRY_CNT", offsetof(struct tl_settings, verbs.retry_count)},
    {"RDMA_QP_SL", "RDMA_SL", offsetof(struct tl_settings, verbs.service_level)},
    {"RDMA_QP_MTU", "RDMA_MTU", offsetof(struct tl_settings, verbs.mtu_bytes)},
    {"RDMA_TRAFFIC_CLASS", NULL, offsetof(struct tl_settings, verbs.traffic_class)},
};

/* What the variables say of one setting. */
struct given {
    const char *variable; /* NULL: nothing */
    uint64_t number;
    const char *devices;
};

/* The value of a variable; NULL: it is not set, or to nothing. */
static const char *find_variable(const struct tl_config_environment *environment, const char *name)
{
    size_t len = strlen(name);
    for (const char *const *variable = environment->variables; *variable; variable++) {
        bool is_named = strncmp(*variable, name, len) == 0 && (*variable)[len] == '=';
        if (is_named) return (*variable)[len + 1] != '\0' ? *variable + len + 1 : NULL;
    }
    return NULL;
}

static bool parse_number(const char *text, uint64_t *ret_number)
{
    uint64_t number = 0;
    size_t len = strspn(text, "0123456789");
    if (len == 0 || len > MAX_DIGITS || text[len] != '\0') return false;
    for (; *text; text++)
        number = number * 10 + (uint64_t)(*text - '0');
    *ret_number = number;
    return true;
}

/* Reads the value of a variable. */
static enum tl_status read_value(const char *variable, const char *text, const struct tl_setting *setting,
                                 struct given *ret_given, struct tl_error *ret_error)
{
    char quoted[TL_QUOTE_BYTES], min[TL_SETTING_NUMBER_BYTES], max[TL_SETTING_NUMBER_BYTES];
    struct given given = {.variable = variable, .devices = text};
    struct tl_error reason;
    enum tl_status status = TL_OK;
    if (setting->kind == TL_SETTING_DEVICES) {
        status = tl_device_list_check(text, &reason);
    } else if (!parse_number(text, &given.number)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "environment variable %s: %s is no whole number; it may be %s to %s, as %s", variable,
                            tl_quote(text, quoted), tl_setting_format_number(setting->kind, setting->min, min),
                            tl_setting_format_number(setting->kind, setting->max, max), setting->path);
    } else {
        status = tl_setting_check_number(setting, given.number, &reason);
    }
    if (status != TL_OK) {
        return tl_error_set(ret_error, status, "environment variable %s: %s, as %s", variable, reason.message,
                            setting->path);
    }
    *ret_given = given;
    return TL_OK;
}

static enum tl_status read_alias(const struct tl_config_environment *environment, const struct alias *alias,
                                 struct given *ret_given, struct tl_error *ret_error)
{
    const struct tl_setting *setting = &tl_settings_table[tl_settings_find(alias->offset)];
    const char *documented = find_variable(environment, alias->documented);
    const char *implemented = alias->implemented ? find_variable(environment, alias->implemented) : NULL;
    struct given second = {.variable = NULL};
    enum tl_status status = TL_OK;
    *ret_given = second;
    if (documented) status = read_value(alias->documented, documented, setting, ret_given, ret_error);
    if (status == TL_OK && implemented) {
        status = read_value(alias->implemented, implemented, setting, &second, ret_error);
    }
    if (status != TL_OK || !second.variable) return status;
    if (ret_given->variable && ret_given->number != second.number) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "environment variables %s and %s are %" PRIu64 " and %" PRIu64
                            ", but both mean %s; unset one",
                            alias->documented, alias->implemented, ret_given->number, second.number, setting->path);
    }
    if (!ret_given->variable) *ret_given = second;
    return TL_OK;
}

/* ---------------------------------------------------------------------------------------------------- warnings -- */

/* Lists all names that are known; returns how many. */
static size_t list_names(const char *ret_names[2 * TL_ARRAY_COUNT(aliases)])
{
    size_t count = 0;
    for (size_t i = 0; i < TL_ARRAY_COUNT(aliases); i++) {
        ret_names[count++] = aliases[i].documented;
        if (aliases[i].implemented) ret_names[count++] = aliases[i].implemented;
    }
    return count;
}

static void warn_of_unknown(const struct tl_config_environment *environment, const char *variable)
{
    const char *names[2 * TL_ARRAY_COUNT(aliases)];
    char name[TL_QUOTE_BYTES], quoted[TL_QUOTE_BYTES], suggestion[TL_ERROR_MESSAGE_BYTES / 2];
    struct tl_error message;
    size_t count = list_names(names), len = strcspn(variable, "=");
    if (len >= sizeof(name)) len = sizeof(name) - 1;
    *(char *)mempcpy(name, variable, len) = '\0';
    for (size_t i = 0; i < count; i++) {
        if (strcmp(names[i], name) == 0) return;
    }
    tl_error_set(&message, TL_INVALID_ARGUMENT, "environment variable %s has no effect; %s", tl_quote(name, quoted),
                 tl_json_suggest(name, names, count, suggestion, sizeof(suggestion)));
    environment->warn(environment->context, message.message);
}

static void warn(const struct tl_config_environment *environment)
{
    if (!environment->warn) return;
    for (const char *const *variable = environment->variables; *variable; variable++) {
        if (strncmp(*variable, PREFIX, strlen(PREFIX)) == 0) warn_of_unknown(environment, *variable);
    }
}

/* ---------------------------------------------------------------------------------------------------- applying -- */

/* Writes one value into the layer where that has a default. */
static enum tl_status apply_one(struct tl_settings_layer *layer, const struct given *given, size_t index,
                                struct tl_arena *arena, const char *source, struct tl_error *ret_error)
{
    const struct tl_setting *setting = &tl_settings_table[index];
    struct tl_setting_origin origin = {.level = TL_LEVEL_ENVIRONMENT, .node = TL_JSON_NONE};
    void *field = (char *)&layer->settings + setting->offset;
    if (layer->origins[index].level > TL_LEVEL_ENVIRONMENT) return TL_OK;
    if (setting->kind == TL_SETTING_DEVICES) {
        const char *devices = tl_arena_format(arena, "%s", given->devices);
        if (!devices) return tl_json_no_memory(source, ret_error);
        memcpy(field, &devices, sizeof(devices));
    } else {
        memcpy(field, &given->number, sizeof(given->number));
    }
    origin.value = tl_setting_format(setting, &layer->settings, arena);
    origin.origin = tl_arena_format(arena, "environment (%s)", given->variable);
    if (!origin.value || !origin.origin) return tl_json_no_memory(source, ret_error);
    layer->origins[index] = origin;
    return TL_OK;
}

/* A copy of the layer with the values of the environment. */
static enum tl_status apply_all(const struct tl_config *config, const struct tl_settings_layer *layer,
                                const struct given *given, const struct tl_settings_layer **ret_layer,
                                struct tl_error *ret_error)
{
    struct tl_arena *arena = tl_config_private(config)->arena;
    struct tl_settings_layer *copy = tl_settings_copy(layer, arena);
    if (!copy) return tl_json_no_memory(config->source, ret_error);
    for (size_t i = 0; i < TL_ARRAY_COUNT(aliases); i++) {
        if (!given[i].variable) continue;
        enum tl_status status =
            apply_one(copy, &given[i], tl_settings_find(aliases[i].offset), arena, config->source, ret_error);
        if (status != TL_OK) return status;
    }
    *ret_layer = copy;
    return TL_OK;
}

/* Makes the layers of all tasks, [task_count], and that of all others. Tasks that share a layer share its copy. */
static enum tl_status make_layers(const struct tl_config *config, const struct given *given,
                                  const struct tl_settings_layer **layers, const struct tl_settings_layer **ret_top,
                                  struct tl_error *ret_error)
{
    const struct tl_config_private *memory = tl_config_private(config);
    enum tl_status status = apply_all(config, memory->top, given, ret_top, ret_error);
    for (size_t i = 0; status == TL_OK && i < config->task_count; i++) {
        bool is_shared = i > 0 && memory->layers[i] == memory->layers[i - 1];
        if (is_shared) {
            layers[i] = layers[i - 1];
        } else {
            status = apply_all(config, memory->layers[i], given, &layers[i], ret_error);
        }
    }
    return status;
}

static bool is_among_tasks(const struct tl_config *config, const struct tl_config_task *task)
{
    return task >= config->tasks && task < config->tasks + config->task_count;
}

/* The files of "security" stay: a layer has them with "{name}", and no variable changes them. */
static void replace(struct tl_settings *settings, const struct tl_settings_layer *layer)
{
    const struct tl_security_settings security = settings->security;
    *settings = layer->settings;
    settings->security = security;
}

static enum tl_status apply(struct tl_config *config, const struct given *given, struct tl_error *ret_error)
{
    struct tl_config_private *memory = tl_config_private(config);
    const struct tl_settings_layer **layers = tl_arena_alloc_array(memory->arena, config->task_count, sizeof(*layers));
    const struct tl_settings_layer *top;
    if (!layers) return tl_json_no_memory(config->source, ret_error);
    enum tl_status status = make_layers(config, given, layers, &top, ret_error);
    if (status != TL_OK) return status;
    memory->layers = layers;
    memory->top = top;
    replace(&config->client_settings, top);
    for (size_t i = 0; i < config->task_count; i++)
        replace(&config->tasks[i].settings, layers[i]);
    /* Such a self is ours to write: it is in the arena. */
    if (config->self && !is_among_tasks(config, config->self))
        replace(&((struct tl_config_task *)(uintptr_t)config->self)->settings, top);
    return TL_OK;
}

enum tl_status tl_config_apply_environment(struct tl_config *config, const struct tl_config_environment *environment,
                                           struct tl_error *ret_error)
{
    struct given given[TL_ARRAY_COUNT(aliases)];
    bool is_any_given = false;
    enum tl_status status = TL_OK;
    for (size_t i = 0; status == TL_OK && i < TL_ARRAY_COUNT(aliases); i++) {
        status = read_alias(environment, &aliases[i], &given[i], ret_error);
        is_any_given |= status == TL_OK && given[i].variable != NULL;
    }
    if (status == TL_OK && is_any_given) status = apply(config, given, ret_error);
    if (status == TL_OK) warn(environment);
    return status;
}
