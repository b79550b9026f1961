// SPDX-License-Identifier: Apache-2.0
/*
 * Any bytes as a configuration, as TF_CONFIG, as an address, as the variables of a process, and as the node list, the
 * numbers of tasks, the pattern of names and the host file of a launcher.
 *
 * Input: one letter that says which of these the rest is (enum kind); without it, an empty configuration.
 *
 * What must hold: an error has a code and a message and gives nothing out; of what is accepted every value can be shown
 * and every task found; TF_CONFIG that is accepted is, rewritten, accepted as our own with the same tasks; variables
 * that are refused change nothing, and those that are accepted never what the file says.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/text.h"
#include "config/config.h"
#include "config/json_place.h"
#include "config/launch.h"

/* Paths are found by walking over siblings, so of a long text only the first ones are looked up. */
#define MAX_PATHS 64
#define MAX_VALUES 64
#define MAX_VARIABLES 32

enum kind {
    KIND_OURS = 'o',
    KIND_TENSORFLOWS = 't',
    KIND_ADDRESS = 'a',
    KIND_ENVIRONMENT = 'e',
    KIND_NODES = 'n',
    KIND_TASKS = 'c',
    KIND_PATTERN = 'p',
    KIND_HOSTS = 'h',
};

static void check_message(const char *message)
{
    size_t length = strnlen(message, TL_ERROR_MESSAGE_BYTES);
    TL_CHECK(length > 0 && length < TL_ERROR_MESSAGE_BYTES);
    TL_CHECK(tl_text_is_utf8(message, length));
    for (size_t i = 0; i < length; i++) {
        TL_CHECK((unsigned char)message[i] >= 0x20 && message[i] != 0x7f);
    }
}

static void check_error(enum tl_status status, const struct tl_error *error)
{
    TL_CHECK(error->code == status);
    TL_CHECK(status == TL_INVALID_ARGUMENT || status == TL_UNIMPLEMENTED);
    check_message(error->message);
}

static void check_task(const struct tl_config *config, const struct tl_config_task *task)
{
    struct tl_config_value values[MAX_VALUES];
    struct tl_error error;
    size_t count = tl_config_values(config, task, values, TL_ARRAY_COUNT(values));
    TL_CHECK(count <= TL_ARRAY_COUNT(values));
    for (size_t i = 0; i < count; i++) {
        TL_CHECK(values[i].path && values[i].value[0] != '\0' && values[i].origin[0] != '\0');
    }
    TL_CHECK(task->settings.inflight_bytes >= task->settings.chunk_bytes);
    if (!task->address) return;
    char host[256];
    uint16_t port = 0;
    TL_CHECK(tl_address_split(task->address, host, sizeof(host), &port, &error) == TL_OK && port > 0);
    const struct tl_config_task *found;
    TL_CHECK(tl_config_find_name(config, task->name, &found, &error) == TL_OK && found == task);
    TL_CHECK(tl_config_find_task(config, task->job, task->index, &found, &error) == TL_OK && found == task);
}

static void check_config(const struct tl_config *config)
{
    TL_CHECK(config->task_count > 0);
    for (size_t i = 0; i < config->task_count; i++) {
        check_task(config, &config->tasks[i]);
    }
    if (config->self) check_task(config, config->self);
}

/* Collecting all errors accepts the same texts; the errors are ordered, and what is refused has at least one. */
static void try_all_errors(const char *text, size_t len_bytes, bool is_accepted)
{
    static struct tl_config_errors errors;
    struct tl_config *config = NULL;
    struct tl_error error = {0};
    enum tl_status status =
        tl_config_parse_all_errors(text, len_bytes, "fuzz.json", "folder", &config, &errors, &error);
    TL_CHECK((status == TL_OK) == is_accepted && (config != NULL) == is_accepted);
    TL_CHECK(!is_accepted || errors.count == 0);
    if (!is_accepted) check_error(status, &error);
    for (size_t i = 0; i < errors.count; i++) {
        check_error(errors.items[i].error.code, &errors.items[i].error);
        TL_CHECK(errors.items[i].offset < len_bytes &&
                 (i == 0 || errors.items[i - 1].offset <= errors.items[i].offset));
    }
    tl_config_destroy(config);
}

static void try_ours(const char *text, size_t len_bytes)
{
    struct tl_config *config = NULL;
    struct tl_error error = {0};
    enum tl_status status = tl_config_parse(text, len_bytes, "fuzz.json", "folder", &config, &error);
    TL_CHECK((status == TL_OK) == (config != NULL));
    try_all_errors(text, len_bytes, status == TL_OK);
    if (status != TL_OK) {
        check_error(status, &error);
        return;
    }
    check_config(config);
    tl_config_destroy(config);
}

static void try_tensorflows(const char *text, size_t len_bytes)
{
    struct tl_config *config = NULL, *again;
    struct tl_error error = {0};
    char *json = NULL;
    enum tl_status status = tl_config_parse_tf(text, len_bytes, &config, &error);
    TL_CHECK(tl_config_tf_to_json(text, len_bytes, &json, &error) == status);
    if (status != TL_OK) {
        TL_CHECK(!config && !json);
        check_error(status, &error);
        return;
    }
    check_config(config);
    TL_CHECK(tl_config_parse(json, strlen(json), "again", NULL, &again, &error) == TL_OK);
    TL_CHECK(again->task_count == config->task_count);
    for (size_t i = 0; i < config->task_count; i++) {
        TL_CHECK(strcmp(again->tasks[i].name, config->tasks[i].name) == 0);
        TL_CHECK(strcmp(again->tasks[i].address, config->tasks[i].address) == 0);
    }
    tl_config_destroy(again);
    tl_config_destroy(config);
    free(json);
}

static void try_scanner(const char *text, size_t len_bytes)
{
    struct tl_json_places places;
    char path[TL_JSON_PATH_BYTES];
    TL_CHECK(tl_json_places_init(&places, text, len_bytes));
    for (uint32_t node = 0; node < places.count && node < MAX_PATHS; node++) {
        TL_CHECK(strlen(tl_json_places_path(&places, node, path)) < sizeof(path));
        tl_json_places_find_same_key(&places, node);
    }
    tl_json_places_fini(&places);
}

static void try_address(const char *text, size_t len_bytes)
{
    char address[512], host[256];
    uint16_t port;
    struct tl_error error = {0};
    if (len_bytes >= sizeof(address)) return;
    *(char *)mempcpy(address, text, len_bytes) = '\0';
    enum tl_status status = tl_address_split(address, host, sizeof(host), &port, &error);
    if (status != TL_OK) check_error(status, &error);
}

static void check_warning(void *context, const char *message)
{
    (void)context;
    check_message(message);
}

static void check_same_values(const struct tl_config *config, const struct tl_config_value *before, size_t count)
{
    struct tl_config_value values[MAX_VALUES];
    TL_CHECK(tl_config_values(config, &config->tasks[0], values, MAX_VALUES) == count);
    for (size_t i = 0; i < count; i++) {
        TL_CHECK(strcmp(values[i].value, before[i].value) == 0 && strcmp(values[i].origin, before[i].origin) == 0);
    }
}

/* Each line is a variable. */
static void try_environment(const char *text, size_t len_bytes)
{
    static const char json[] = "{\"cluster\": {\"a\": [\"h:1\"], \"b\": [\"h:2\"]},"
                               " \"jobs\": {\"b\": {\"verbs\": {\"port\": 2, \"devices\": \"x\"}}}}";
    const char *variables[MAX_VARIABLES + 1] = {NULL};
    const struct tl_config_environment environment = {.variables = variables, .warn = check_warning};
    struct tl_config_value before[MAX_VALUES];
    struct tl_config *config;
    struct tl_error error = {0};
    size_t variable_count = 0;
    char *lines = strndup(text, len_bytes), *rest = lines;
    TL_CHECK(lines && tl_config_parse(json, strlen(json), "fuzz.json", NULL, &config, &error) == TL_OK);
    for (char *line; variable_count < MAX_VARIABLES && (line = strsep(&rest, "\n")) != NULL;)
        variables[variable_count++] = line;
    size_t count = tl_config_values(config, &config->tasks[0], before, MAX_VALUES);
    enum tl_status status = tl_config_apply_environment(config, &environment, &error);
    if (status != TL_OK) {
        check_error(status, &error);
        check_same_values(config, before, count);
    }
    check_config(config);
    TL_CHECK(config->tasks[1].settings.verbs.port == 2 && strcmp(config->tasks[1].settings.verbs.devices, "x") == 0);
    tl_config_destroy(config);
    free(lines);
}

/* What is accepted has as many tasks as its hosts have together, and places each of them once. */
static void check_launch(struct tl_launch *launch, enum tl_status status, const struct tl_error *error)
{
    uint32_t count = 0;
    if (status != TL_OK) check_error(status, error);
    for (const struct tl_launch_host *host = launch->hosts; host; host = host->hh.next)
        count += host->task_count;
    TL_CHECK(count == launch->task_count && count <= TL_LAUNCH_MAX_TASKS);
    struct tl_launch_task *tasks = calloc(count + 1, sizeof(*tasks));
    TL_CHECK(tasks);
    tl_launch_place(launch, TL_LAUNCH_BLOCK, tasks);
    for (uint32_t i = 0; i < count; i++)
        TL_CHECK(tasks[i].place < tasks[i].host->task_count);
    free(tasks);
    tl_launch_fini(launch);
}

static void try_launch(enum kind kind, const char *text, size_t len_bytes)
{
    struct tl_launch launch = {0};
    struct tl_error error = {0};
    char host[TL_LAUNCH_HOST_BYTES], *copy = strndup(text, len_bytes);
    enum tl_status status = TL_OK;
    TL_CHECK(copy);
    if (kind == KIND_NODES) status = tl_launch_add_slurm(&launch, copy, NULL, 1, &error);
    if (kind == KIND_TASKS) status = tl_launch_add_slurm(&launch, "a,b[1-3]", copy, 0, &error);
    if (kind == KIND_PATTERN) status = tl_launch_expand(copy, "ps", 7, 2, host, &error);
    if (kind == KIND_HOSTS) status = tl_launch_add_hostfile(&launch, copy, 0, &error);
    check_launch(&launch, status, &error);
    free(copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len_bytes)
{
    enum kind kind = len_bytes > 0 ? data[0] : KIND_OURS;
    const char *text = (const char *)data + (len_bytes > 0);
    size_t text_bytes = len_bytes - (len_bytes > 0);
    switch (kind) {
    case KIND_OURS:
        try_ours(text, text_bytes);
        try_scanner(text, text_bytes);
        return 0;
    case KIND_TENSORFLOWS:
        try_tensorflows(text, text_bytes);
        return 0;
    case KIND_ADDRESS:
        try_address(text, text_bytes);
        return 0;
    case KIND_ENVIRONMENT:
        try_environment(text, text_bytes);
        return 0;
    case KIND_NODES:
    case KIND_TASKS:
    case KIND_PATTERN:
    case KIND_HOSTS:
        try_launch(kind, text, text_bytes);
        return 0;
    default:
        return -1; /* libFuzzer does not keep it */
    }
}
