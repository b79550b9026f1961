// SPDX-License-Identifier: Apache-2.0
/* The table of settings and the layers: defaults, origins, unknown names, contradictions. */
#include <check.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "config/settings_layer.h"
#include "dataplane/verbs/verbs.h"
#include "fakes/run_suite.h"

static struct tl_json_doc doc;
static struct tl_arena *arena;
static struct tl_settings_layer *defaults;
static struct tl_error error;

static void open_text(const char *text)
{
    arena = tl_arena_create();
    ck_assert_int_eq(tl_settings_create(arena, "f", &defaults, &error), TL_OK);
    ck_assert_int_eq(tl_json_doc_open(&doc, text, strlen(text), "f", &error), TL_OK);
}

static void close_text(void)
{
    tl_json_doc_close(&doc);
    tl_arena_destroy(arena);
}

static enum tl_status read_level(enum tl_settings_level level, const struct tl_settings_layer **ret_layer)
{
    struct tl_json_value root = tl_json_root(&doc);
    return tl_settings_read(&root, level, NULL, arena, defaults, ret_layer, &error);
}

static void check_refused(enum tl_settings_level level, const char *text, enum tl_status code, const char *message)
{
    const struct tl_settings_layer *layer = NULL;
    open_text(text);
    ck_assert_int_eq(read_level(level, &layer), code);
    ck_assert_str_eq(error.message, message);
    ck_assert_int_eq(error.code, code);
    ck_assert_ptr_null(layer);
    close_text();
}

START_TEST(defaults_are_those_of_the_manual)
{
    open_text("{}");
    const struct tl_settings *settings = &defaults->settings;
    ck_assert_int_eq(settings->protocol, TL_PROTOCOL_AUTO);
    ck_assert_int_eq(settings->rdma, TL_RDMA_PREFER);
    ck_assert_int_eq(settings->connect, TL_CONNECT_LAZY);
    ck_assert(!settings->checksum);
    ck_assert_ptr_null(settings->listen);
    ck_assert_ptr_null(settings->publish);
    ck_assert_uint_eq(settings->publish_count, 0);
    ck_assert_ptr_null(settings->peer_networks);
    ck_assert_uint_eq(settings->chunk_bytes, 2 << 20);
    ck_assert_uint_eq(settings->inflight_bytes, 64 << 20);
    ck_assert_uint_eq(settings->held_bytes, UINT64_C(16) << 30);
    ck_assert_uint_eq(settings->waiting_receivers, 65536);
    ck_assert_uint_eq(settings->connections, 16384);
    ck_assert_int_eq(settings->connect_timeout_ns, 10 * TL_NS_PER_SEC);
    ck_assert_int_eq(settings->request_timeout_ns, 60 * TL_NS_PER_SEC);
    ck_assert_int_eq(settings->keepalive_ns, 10 * TL_NS_PER_SEC);
    ck_assert_int_eq(settings->keepalive_timeout_ns, 5 * TL_NS_PER_SEC);
    ck_assert_int_eq(settings->reservation_timeout_ns, 30 * TL_NS_PER_SEC);
    ck_assert_int_eq(settings->stalled_timeout_ns, 60 * TL_NS_PER_SEC);
    ck_assert_int_eq(settings->drain_timeout_ns, 10 * TL_NS_PER_SEC);
    ck_assert_ptr_null(settings->local.socket_folder);
    ck_assert_uint_eq(settings->local.pool_bytes, 4 << 20);
    ck_assert_uint_eq(settings->local.max_pool_bytes, TL_SETTING_AUTO);
    ck_assert_uint_eq(settings->local.slot_count, 128);
    ck_assert_int_eq(settings->local.spin_ns, 50000);
    ck_assert_int_eq(settings->local.peer_timeout_ns, 3 * TL_NS_PER_SEC);
    ck_assert_int_eq(settings->local.process_vm, TL_PROCESS_VM_AUTO);
    ck_assert_int_eq(settings->local.map, TL_LOCAL_MAP_FILES);
    ck_assert_ptr_null(settings->verbs.devices);
    ck_assert_uint_eq(settings->verbs.port, TL_SETTING_AUTO);
    ck_assert_uint_eq(settings->verbs.gid_index, TL_SETTING_AUTO);
    ck_assert_uint_eq(settings->verbs.mtu_bytes, TL_SETTING_AUTO);
    ck_assert_uint_eq(settings->verbs.service_level, 0);
    ck_assert_uint_eq(settings->verbs.traffic_class, 0);
    ck_assert_uint_eq(settings->verbs.timeout, TL_VERBS_DEFAULT_TIMEOUT);
    ck_assert_uint_eq(settings->verbs.retry_count, TL_VERBS_DEFAULT_RETRY_COUNT);
    ck_assert_uint_eq(settings->verbs.queue_depth, TL_VERBS_DEFAULT_QUEUE_DEPTH);
    ck_assert_uint_eq(settings->verbs.pkey_index, 0);
    ck_assert_int_eq(settings->verbs.keys, TL_VERBS_KEYS_WINDOW);
    ck_assert_uint_eq(settings->verbs.pool_bytes, 64 << 20);
    ck_assert_uint_eq(settings->verbs.max_pool_bytes, TL_SETTING_AUTO);
    ck_assert_uint_eq(settings->verbs.cached_bytes, TL_SETTING_AUTO);
    ck_assert_uint_eq(settings->verbs.register_bytes, 256 << 10);
    ck_assert_uint_eq(settings->verbs.piece_bytes, TL_SETTING_AUTO);
    ck_assert_int_eq(settings->verbs.spin_ns, 50000);
    ck_assert_uint_eq(settings->verbs.slot_count, TL_VERBS_DEFAULT_SLOTS);
    ck_assert_int_eq(settings->verbs.peer_timeout_ns, 800 * TL_NS_PER_MS);
    ck_assert(!settings->verbs.is_bounce_forced);
    ck_assert_int_eq(settings->device.kind, TL_DEVICE_HOST);
    ck_assert_int_eq(settings->device.index, 0);
    ck_assert(!settings->gpu.is_proxy_forced);
    ck_assert_ptr_null(settings->security.ca);
    ck_assert_ptr_null(settings->security.certificate);
    ck_assert_ptr_null(settings->security.key);
    ck_assert_ptr_null(settings->security.crl);
    ck_assert_int_eq(settings->security.min_version, TL_TLS_1_3);
    ck_assert_int_eq(settings->security.encrypt, TL_ENCRYPT_PREFER);
    ck_assert_uint_eq(settings->security.allow_count, 1);
    ck_assert_uint_eq(settings->security.allow->role_count, 1);
    ck_assert_int_eq(settings->security.allow->roles->kind, TL_ROLE_MEMBER);
    ck_assert_uint_eq(settings->security.allow->actions,
                      1U << TL_ACTION_READ | 1U << TL_ACTION_PUSH | 1U << TL_ACTION_LIST | 1U << TL_ACTION_PEERS);
    ck_assert_int_eq(settings->log_level, TL_LOG_INFO);
    ck_assert_int_eq(settings->log_format, TL_LOG_KEY_VALUE);
    ck_assert_int_eq(tl_settings_check(defaults, &doc, &error), TL_OK);
    close_text();
}
END_TEST

START_TEST(the_table_is_sound)
{
    for (size_t i = 0; i < tl_settings_count; i++) {
        const struct tl_setting *setting = &tl_settings_table[i];
        bool is_number = setting->kind == TL_SETTING_SIZE || setting->kind == TL_SETTING_COUNT ||
                         setting->kind == TL_SETTING_DURATION;
        char path[64];
        snprintf(path, sizeof(path), "%s%s%s%s%s", setting->group ? setting->group : "", setting->group ? "." : "",
                 setting->subgroup ? setting->subgroup : "", setting->subgroup ? "." : "", setting->name);
        ck_assert_str_eq(setting->path, path);
        ck_assert_uint_eq(tl_settings_find(setting->offset), i);
        if (i > 0) ck_assert_uint_gt(setting->offset, tl_settings_table[i - 1].offset);
        ck_assert_int_eq(setting->kind == TL_SETTING_CHOICE, setting->choices != NULL);
        bool is_auto = setting->has_auto && setting->default_value == TL_SETTING_AUTO;
        if (is_number && !is_auto) ck_assert_uint_le(setting->min, setting->default_value);
        if (is_number && !is_auto) ck_assert_uint_le(setting->default_value, setting->max);
        if (is_number) ck_assert_uint_lt(setting->max, TL_SETTING_AUTO);
    }
}
END_TEST

/* Returns the schema's entry for a setting. */
static json_t *schema_entry(json_t *schema, const struct tl_setting *setting)
{
    json_t *settings = json_object_get(json_object_get(json_object_get(schema, "$defs"), "settings"), "properties");
    if (setting->group) settings = json_object_get(json_object_get(settings, setting->group), "properties");
    if (setting->subgroup) settings = json_object_get(json_object_get(settings, setting->subgroup), "properties");
    return json_object_get(settings, setting->name);
}

/* The schema has bounds for numbers, and has them for texts in its descriptions. */
static void check_schema_bounds(const struct tl_setting *setting, json_t *entry)
{
    char min[TL_SETTING_NUMBER_BYTES], max[TL_SETTING_NUMBER_BYTES], range[2 * TL_SETTING_NUMBER_BYTES + 8];
    const char *description = json_string_value(json_object_get(entry, "description"));
    json_t *kinds = json_object_get(entry, "anyOf");
    json_t *number = kinds ? json_array_get(kinds, 0) : entry,
           *last = json_array_get(kinds, json_array_size(kinds) - 1);
    ck_assert_int_eq(setting->has_auto, json_object_get(last, "const") != NULL);
    tl_setting_format_number(setting->kind, setting->min, min);
    tl_setting_format_number(setting->kind, setting->max, max);
    snprintf(range, sizeof(range), ", %s to %s", setting->min > 0 ? min : "0", max);
    if (setting->kind == TL_SETTING_SIZE || setting->kind == TL_SETTING_DURATION) {
        ck_assert_msg(strstr(description, range) != NULL, "%s: no \"%s\" in: %s", setting->path, range, description);
    }
    if (setting->kind == TL_SETTING_SIZE || setting->kind == TL_SETTING_COUNT) {
        ck_assert_int_eq(json_integer_value(json_object_get(number, "minimum")), setting->min);
        ck_assert_int_eq(json_integer_value(json_object_get(number, "maximum")), setting->max);
    }
}

/* The manual's row for a setting has its default and its bounds. */
static void check_manual_row(const struct tl_setting *setting, const char *manual, const char *default_value)
{
    char row_start[64], line[512], text[128], min[TL_SETTING_NUMBER_BYTES], max[TL_SETTING_NUMBER_BYTES];
    snprintf(row_start, sizeof(row_start), "\n| `%s` | ", setting->path);
    const char *row = strstr(manual, row_start);
    ck_assert_msg(row != NULL, "%s has no row in the manual", setting->path);
    snprintf(line, sizeof(line), "%.*s", (int)strcspn(row + 1, "\n"), row + 1);
    if (setting->kind != TL_SETTING_ADDRESS) {
        snprintf(text, sizeof(text), "| `%s` |", default_value);
        ck_assert_msg(strstr(line, text) != NULL, "no %s in: %s", text, line);
    }
    if (setting->max > 0) {
        snprintf(text, sizeof(text), "| %s to %s", tl_setting_format_number(setting->kind, setting->min, min),
                 tl_setting_format_number(setting->kind, setting->max, max));
        ck_assert_msg(strstr(line, text) != NULL, "no %s in: %s", text, line);
    }
    for (const struct tl_choice *choice = setting->choices; choice && choice->name; choice++) {
        snprintf(text, sizeof(text), "`\"%s\"`", choice->name);
        ck_assert_int_eq(strstr(line, text) != NULL, choice->lacks == NULL);
    }
}

START_TEST(the_manual_has_the_same_settings)
{
    static char manual[65536];
    char path[4096];
    const char *source = getenv("TENSORLANE_SOURCE");
    snprintf(path, sizeof(path), "%s/docs/config.md", source ? source : ".");
    FILE *file = fopen(path, "r");
    ck_assert_msg(file != NULL, "%s cannot be read; run in the source's folder or set TENSORLANE_SOURCE", path);
    size_t len_bytes = fread(manual, 1, sizeof(manual) - 1, file);
    fclose(file);
    manual[len_bytes] = '\0';
    open_text("{}");
    for (size_t i = 0; i < tl_settings_count; i++) {
        check_manual_row(&tl_settings_table[i], manual, defaults->origins[i].value);
    }
    close_text();
}
END_TEST

/* The schema lists exactly the words that can be chosen. */
static void check_schema_choices(const struct tl_setting *setting, json_t *entry)
{
    json_t *names = json_object_get(entry, "enum");
    size_t count = 0;
    for (const struct tl_choice *choice = setting->choices; choice && choice->name; choice++) {
        if (choice->lacks) continue;
        ck_assert_str_eq(json_string_value(json_array_get(names, count++)), choice->name);
    }
    ck_assert_uint_eq(json_array_size(names), count);
}

START_TEST(the_schema_has_the_same_settings)
{
    const char *source = getenv("TENSORLANE_SOURCE");
    char path[4096];
    snprintf(path, sizeof(path), "%s/config/schema.json", source ? source : ".");
    json_t *schema = json_load_file(path, JSON_REJECT_DUPLICATES, NULL);
    ck_assert_msg(schema != NULL, "%s cannot be read; run in the source's folder or set TENSORLANE_SOURCE", path);
    open_text("{}");
    for (size_t i = 0; i < tl_settings_count; i++) {
        const struct tl_setting *setting = &tl_settings_table[i];
        json_t *entry = schema_entry(schema, setting);
        ck_assert_msg(entry != NULL, "%s is not in the schema", setting->path);
        ck_assert_ptr_nonnull(json_object_get(entry, "description"));
        if (setting->kind != TL_SETTING_ADDRESS) {
            char *shown = json_dumps(json_object_get(entry, "default"), JSON_ENCODE_ANY);
            ck_assert_str_eq(shown, defaults->origins[i].value);
            free(shown);
        }
        check_schema_bounds(setting, entry);
        check_schema_choices(setting, entry);
    }
    json_decref(schema);
    close_text();
}
END_TEST

START_TEST(every_setting_can_be_set)
{
    static const char text[] =
        "{\"protocol\": \"grpc\", \"rdma\": \"off\", \"connect\": \"eager\", \"checksum\": true,\n"
        "\"listen\": \"0.0.0.0:1\", \"publish\": [\"m\"], "
        "\"peers\": {\"addresses\": [\"10.1.0.0/16\", \"fd00::1\"]},\n"
        "\"limits\": {\"chunk\": \"4KiB\", \"inflight\": 8192, \"held\": \"1GB\", \"waiting\": 2, \"connections\": "
        "3},\n"
        "\"timeouts\": {\"connect\": \"1ms\", \"request\": \"2s\", \"keepalive\": \"3s\", \"keepalive_answer\": "
        "\"4s\",\n"
        "\"reservation\": \"5s\", \"stalled\": \"6s\", \"drain\": \"0\"}, \"log\": {\"level\": \"debug\", \"format\": "
        "\"json\"},\n"
        "\"verbs\": {\"devices\": \"a:1,^b\", \"port\": 2, \"gid_index\": 0, \"mtu\": 512, \"service_level\": 7,\n"
        "\"traffic_class\": 106, \"timeout\": 0, \"retry_count\": 7, \"queue_depth\": 16, \"pkey_index\": 3,\n"
        "\"keys\": \"region\", \"pool\": \"1MiB\", \"max_pool\": \"2MiB\", \"cached\": 0, \"register\": 1,\n"
        "\"piece\": \"4KiB\", \"spin\": \"0\", \"slots\": 16, \"peer_timeout\": \"1s\", \"bounce\": true},\n"
        "\"local\": {\"socket_folder\": \"/run/x\", \"pool\": \"1MiB\", \"max_pool\": "
        "\"3MiB\",\n"
        "\"slots\": 17, \"spin\": \"1us\", \"peer_timeout\": \"2s\", \"process_vm\": \"off\", \"map\": \"off\"},\n"
        "\"gpu\": {\"proxy\": true}, \"device\": \"gpu:3\",\n"
        "\"security\": {\"tls\": {\"ca\": \"ca.pem\", \"certificate\": \"{name}.pem\", \"key\": \"k\", \"crl\": "
        "\"c\",\n"
        "\"min_version\": \"1.2\"}, \"encrypt\": \"require\", \"allow\": [{\"who\": [\"any\"], \"what\": "
        "[\"list\"]}]}}";
    static const char *const written[] = {
        "\"grpc\"",
        "\"off\"",
        "\"eager\"",
        "true",
        "\"0.0.0.0:1\"",
        "[\"m\"]",
        "\"gpu:3\"",
        "[\"10.1.0.0/16\", \"fd00::1\"]",
        "\"4KiB\"",
        "\"8KiB\"",
        "\"1GB\"",
        "2",
        "3",
        "\"1ms\"",
        "\"2s\"",
        "\"3s\"",
        "\"4s\"",
        "\"5s\"",
        "\"6s\"",
        "\"0s\"",
        /* local */
        "\"/run/x\"",
        "\"1MiB\"",
        "\"3MiB\"",
        "17",
        "\"1us\"",
        "\"2s\"",
        "\"off\"",
        "\"off\"",
        /* verbs */
        "\"a:1,^b\"",
        "2",
        "0",
        "512",
        "7",
        "106",
        "0",
        "7",
        "16",
        "3",
        "\"region\"",
        "\"1MiB\"",
        "\"2MiB\"",
        "\"0B\"",
        "\"1B\"",
        "\"4KiB\"",
        "\"0s\"",
        "16",
        "\"1s\"",
        "true",
        /* gpu */
        "true",
        /* security */
        "\"ca.pem\"",
        "\"{name}.pem\"",
        "\"k\"",
        "\"c\"",
        "\"1.2\"",
        "\"require\"",
        "[{\"who\": [\"any\"], \"what\": [\"list\"]}]",
        /* log */
        "\"debug\"",
        "\"json\"",
    };
    static const unsigned lines[] = {1,  1,  1,  1,  2,  2,  12, 2,  3,  3,  3,  3,  3,  4,  4,  4,  4, 5, 5, 5,
                                     10, 10, 10, 11, 11, 11, 11, 11, 6,  6,  6,  6,  6,  7,  7,  7,  7, 7, 8, 8,
                                     8,  8,  8,  9,  9,  9,  9,  9,  12, 13, 13, 13, 13, 14, 14, 14, 5, 5};
    const struct tl_settings_layer *layer;
    ck_assert_uint_eq(TL_ARRAY_COUNT(written), tl_settings_count);
    ck_assert_uint_eq(TL_ARRAY_COUNT(lines), tl_settings_count);
    open_text(text);
    ck_assert_int_eq(read_level(TL_LEVEL_TASK, &layer), TL_OK);
    for (size_t i = 0; i < tl_settings_count; i++) {
        char origin[64];
        snprintf(origin, sizeof(origin), "f:%u (%s)", lines[i], tl_settings_table[i].path);
        ck_assert_str_eq(layer->origins[i].value, written[i]);
        ck_assert_str_eq(layer->origins[i].origin, origin);
        ck_assert_int_eq(layer->origins[i].level, TL_LEVEL_TASK);
    }
    ck_assert_str_eq(layer->settings.peer_networks, "10.1.0.0/16,fd00::1");
    ck_assert_uint_eq(layer->settings.inflight_bytes, 8192);
    ck_assert_int_eq(layer->settings.reservation_timeout_ns, 5 * TL_NS_PER_SEC);
    ck_assert_str_eq(layer->settings.local.socket_folder, "/run/x");
    ck_assert_int_eq(layer->settings.local.process_vm, TL_PROCESS_VM_OFF);
    ck_assert_int_eq(layer->settings.local.map, TL_LOCAL_MAP_OFF);
    ck_assert_str_eq(layer->settings.verbs.devices, "a:1,^b");
    ck_assert_uint_eq(layer->settings.verbs.gid_index, 0);
    ck_assert_uint_eq(layer->settings.verbs.mtu_bytes, 512);
    ck_assert_int_eq(layer->settings.verbs.keys, TL_VERBS_KEYS_REGION);
    ck_assert(layer->settings.verbs.is_bounce_forced);
    ck_assert(layer->settings.gpu.is_proxy_forced);
    ck_assert_int_eq(layer->settings.device.kind, TL_DEVICE_CUDA);
    ck_assert_int_eq(layer->settings.device.index, 3);
    close_text();
}
END_TEST

static void expect_networks(const char *value, const char *networks, const char *written)
{
    const struct tl_settings_layer *layer;
    char text[256];
    snprintf(text, sizeof(text), "{\"peers\": {\"addresses\": %s}}", value);
    open_text(text);
    ck_assert_int_eq(read_level(TL_LEVEL_TOP, &layer), TL_OK);
    if (networks == NULL) {
        ck_assert_ptr_null(layer->settings.peer_networks);
    } else {
        ck_assert_str_eq(layer->settings.peer_networks, networks);
    }
    ck_assert_str_eq(layer->origins[tl_settings_find(offsetof(struct tl_settings, peer_networks))].value, written);
    close_text();
}

static void expect_no_networks(const char *value, const char *reason)
{
    const struct tl_settings_layer *layer;
    char text[2048];
    snprintf(text, sizeof(text), "{\"peers\": {\"addresses\": %s}}", value);
    open_text(text);
    ck_assert_int_eq(read_level(TL_LEVEL_TOP, &layer), TL_INVALID_ARGUMENT);
    ck_assert_msg(strstr(error.message, reason) != NULL, "%s", error.message);
    close_text();
}

START_TEST(addresses_of_peers_are_any_or_a_list)
{
    expect_networks("[]", NULL, "[]");
    expect_networks("\"any\"", "any", "\"any\"");
    expect_networks("[\"10.0.0.7\", \"fd00::/8\"]", "10.0.0.7,fd00::/8", "[\"10.0.0.7\", \"fd00::/8\"]");
    expect_no_networks("\"10.0.0.7\"", "peers.addresses: \"10.0.0.7\" is not \"any\"");
    expect_no_networks("[\"any\"]", "neither a numeric address nor a network");
    expect_no_networks("[\"gpu-0.example\"]", "neither a numeric address nor a network");
    expect_no_networks("[\"10.0.0.0/33\"]", "neither a numeric address nor a network");
    expect_no_networks("[\"10.0.0.7:4000\"]", "neither a numeric address nor a network");
    expect_no_networks("[7]", "an address or a network");
    expect_no_networks("7", "a list of addresses");
    char many[8 * 257 + 3] = "[";
    for (int i = 0; i < 257; i++)
        strcat(many, i == 0 ? "\"::1\"" : ",\"::1\"");
    expect_no_networks(strcat(many, "]"), "257 entries are too many");
}
END_TEST

static void check_device_refused(const char *value, const char *message)
{
    char text[64], whole[256];
    snprintf(text, sizeof(text), "{\"device\": %s}", value);
    snprintf(whole, sizeof(whole), "f:1:12: device: %s", message);
    check_refused(TL_LEVEL_TOP, text, TL_INVALID_ARGUMENT, whole);
}

START_TEST(a_device_is_the_host_or_a_gpu)
{
    static const char *const wrong[] = {"",      "gpu",    "gpu:",   "gpu:-1", "gpu:00",         "gpu:1 ",
                                        "GPU:0", "cuda:0", "gpu:1x", "0",      "gpu:1234567890", "host:0"};
    const struct tl_settings_layer *layer;
    for (size_t i = 0; i < TL_ARRAY_COUNT(wrong); i++) {
        char value[32], message[192];
        snprintf(value, sizeof(value), "\"%s\"", wrong[i]);
        snprintf(message, sizeof(message),
                 "\"%s\" is no device; write \"host\", or a GPU such as \"gpu:0\" (tensorlane devices lists them)",
                 wrong[i]);
        check_device_refused(value, message);
    }
    check_device_refused("0", "must be \"host\", or a GPU such as \"gpu:0\", not a number");
    open_text("{\"device\": \"gpu:999999999\"}");
    ck_assert_int_eq(read_level(TL_LEVEL_JOB, &layer), TL_OK);
    ck_assert_int_eq(layer->settings.device.index, 999999999);
    close_text();
    open_text("{\"device\": \"host\"}");
    ck_assert_int_eq(read_level(TL_LEVEL_TASK, &layer), TL_OK);
    ck_assert_int_eq(layer->settings.device.kind, TL_DEVICE_HOST);
    close_text();
}
END_TEST

START_TEST(a_folder_starts_where_the_file_is)
{
    const struct tl_settings_layer *layer;
    open_text("{\"local\": {\"socket_folder\": \"run\"}}");
    struct tl_json_value root = tl_json_root(&doc);
    ck_assert_int_eq(tl_settings_read(&root, TL_LEVEL_TOP, "/etc/x", arena, defaults, &layer, &error), TL_OK);
    ck_assert_str_eq(layer->settings.local.socket_folder, "/etc/x/run");
    close_text();
    open_text("{\"local\": {\"socket_folder\": \"\"}}");
    ck_assert_int_eq(read_level(TL_LEVEL_TOP, &layer), TL_OK);
    ck_assert_ptr_null(layer->settings.local.socket_folder);
    close_text();
}
END_TEST

START_TEST(a_pool_fits_into_all_pools)
{
    const struct tl_settings_layer *layer;
    open_text("{\"verbs\": {\"pool\": \"2MiB\", \"max_pool\": \"1MiB\"}}");
    ck_assert_int_eq(read_level(TL_LEVEL_TOP, &layer), TL_OK);
    ck_assert_int_eq(tl_settings_check(layer, &doc, &error), TL_INVALID_ARGUMENT);
    ck_assert_str_eq(error.message, "f:1:40: verbs.max_pool: max_pool is \"1MiB\" and pool is \"2MiB\"; max_pool must "
                                    "be at least pool");
    close_text();
    open_text("{\"verbs\": {\"pool\": \"2MiB\", \"max_pool\": \"2MiB\"}}");
    ck_assert_int_eq(read_level(TL_LEVEL_TOP, &layer), TL_OK);
    ck_assert_int_eq(tl_settings_check(layer, &doc, &error), TL_OK);
    close_text();
}
END_TEST

START_TEST(what_is_not_set_stays)
{
    const struct tl_settings_layer *layer;
    open_text("{\"limits\": {\"held\": \"1GiB\"}, \"timeouts\": {}}");
    ck_assert_int_eq(read_level(TL_LEVEL_JOB, &layer), TL_OK);
    for (size_t i = 0; i < tl_settings_count; i++) {
        bool is_held = strcmp(tl_settings_table[i].path, "limits.held") == 0;
        ck_assert_str_eq(layer->origins[i].origin, is_held ? "f:1 (limits.held)" : "default");
        if (!is_held) ck_assert_str_eq(layer->origins[i].value, defaults->origins[i].value);
    }
    ck_assert_uint_eq(layer->settings.chunk_bytes, defaults->settings.chunk_bytes);
    close_text();
}
END_TEST

START_TEST(former_settings_are_refused_with_what_to_do)
{
    check_refused(TL_LEVEL_TOP, "{\"local\": {\"silence\": \"1s\"}}", TL_INVALID_ARGUMENT,
                  "f:1:12: local.silence: the setting \"silence\" is called \"peer_timeout\" now; rename it");
    check_refused(TL_LEVEL_TOP, "{\"local\": {\"users\": \"same\"}}", TL_INVALID_ARGUMENT,
                  "f:1:12: local.users: the setting \"users\" does not exist any more: only workers of one user share "
                  "memory; remove it, and run workers that are to share memory as one user (workers of different users "
                  "use another transport)");
}
END_TEST

START_TEST(unknown_names_are_refused)
{
    check_refused(TL_LEVEL_TOP, "{\"protocl\": 1}", TL_INVALID_ARGUMENT,
                  "f:1:2: protocl: there is no setting \"protocl\"; did you mean \"protocol\"?");
    check_refused(TL_LEVEL_TOP, "{\"limit\": {}}", TL_INVALID_ARGUMENT,
                  "f:1:2: limit: there is no setting \"limit\"; did you mean \"limits\"?");
    check_refused(TL_LEVEL_TOP, "{\"timeouts\": {\"keep_alive\": \"1s\"}}", TL_INVALID_ARGUMENT,
                  "f:1:15: timeouts.keep_alive: there is no setting \"keep_alive\"; did you mean \"keepalive\"?");
    check_refused(TL_LEVEL_TOP, "{\"chunk\": 1}", TL_INVALID_ARGUMENT,
                  "f:1:2: chunk: there is no setting \"chunk\"; use one of \"protocol\", \"rdma\", \"connect\", "
                  "\"checksum\", \"listen\", \"publish\", \"device\", \"peers\", \"limits\", \"timeouts\", \"local\", "
                  "\"verbs\", \"gpu\", \"security\", \"log\", \"cluster\", ...");
    check_refused(TL_LEVEL_TASK, "{\"log\": {\"levle\": 1}}", TL_INVALID_ARGUMENT,
                  "f:1:10: log.levle: there is no setting \"levle\"; did you mean \"level\"?");
}
END_TEST

START_TEST(structure_belongs_to_its_level)
{
    static const struct {
        const char *name;
        enum tl_settings_level level;
    } cases[] = {{"cluster", TL_LEVEL_TOP}, {"jobs", TL_LEVEL_TOP}, {"$schema", TL_LEVEL_TOP}, {"tasks", TL_LEVEL_JOB}};
    for (size_t i = 0; i < TL_ARRAY_COUNT(cases); i++) {
        for (enum tl_settings_level level = TL_LEVEL_TOP; level <= TL_LEVEL_TASK; level++) {
            const struct tl_settings_layer *layer;
            char text[64];
            snprintf(text, sizeof(text), "{\"%s\": 1}", cases[i].name);
            open_text(text);
            ck_assert_int_eq(read_level(level, &layer) == TL_OK, level == cases[i].level);
            close_text();
        }
    }
}
END_TEST

START_TEST(groups_are_objects)
{
    check_refused(TL_LEVEL_TOP, "{\"limits\": 5}", TL_INVALID_ARGUMENT,
                  "f:1:12: limits: must be an object of settings, not a number");
    check_refused(TL_LEVEL_JOB, "{\"log\": \"debug\"}", TL_INVALID_ARGUMENT,
                  "f:1:9: log: must be an object of settings, not a string");
}
END_TEST

START_TEST(a_group_within_a_group_is_an_object)
{
    check_refused(TL_LEVEL_TOP, "{\"security\": null}", TL_INVALID_ARGUMENT,
                  "f:1:14: security: must be an object of settings, not null");
    check_refused(TL_LEVEL_JOB, "{\"security\": {\"tls\": true}}", TL_INVALID_ARGUMENT,
                  "f:1:22: security.tls: must be an object of settings, not true");
    check_refused(TL_LEVEL_TASK, "{\"security\": {\"tls\": {\"folder\": 1}}}", TL_INVALID_ARGUMENT,
                  "f:1:23: security.tls.folder: there is no setting \"folder\"; use one of \"ca\", \"certificate\", "
                  "\"key\", \"crl\", \"min_version\"");
    check_refused(TL_LEVEL_TASK, "{\"security\": {\"ca\": 1}}", TL_INVALID_ARGUMENT,
                  "f:1:15: security.ca: there is no setting \"ca\"; use one of \"tls\", \"encrypt\", \"allow\"");
    check_refused(TL_LEVEL_TASK, "{\"tls\": {}}", TL_INVALID_ARGUMENT,
                  "f:1:2: tls: there is no setting \"tls\"; use one of \"protocol\", \"rdma\", \"connect\", "
                  "\"checksum\", \"listen\", \"publish\", \"device\", \"peers\", \"limits\", \"timeouts\", \"local\", "
                  "\"verbs\", \"gpu\", \"security\", \"log\"");
    check_refused(TL_LEVEL_TASK, "{\"security\": {\"tls\": {\"min_version\": \"1.1\"}}}", TL_INVALID_ARGUMENT,
                  "f:1:38: security.tls.min_version: \"1.1\" is no value of min_version; did you mean \"1.2\"?");
    check_refused(TL_LEVEL_TASK, "{\"security\": {\"tls\": {\"key\": 7}}}", TL_INVALID_ARGUMENT,
                  "f:1:30: security.tls.key: must be a file such as \"certs/ca.pem\", not a number");
}
END_TEST

START_TEST(inflight_must_hold_a_chunk)
{
    const struct tl_settings_layer *top, *job;
    struct tl_json_value root, member;
    open_text("{\"a\": {\"limits\": {\"chunk\": \"8MiB\"}}, \"b\": {\"limits\": {\"inflight\": \"4MiB\"}},\n"
              "\"c\": {\"limits\": {\"inflight\": \"8MiB\"}}, \"d\": {\"limits\": {\"inflight\": \"1MB\", \"chunk\": "
              "\"1MiB\"}}}");
    root = tl_json_root(&doc);
    ck_assert(tl_json_member(&root, "a", &member));
    ck_assert_int_eq(tl_settings_read(&member, TL_LEVEL_TOP, NULL, arena, defaults, &top, &error), TL_OK);
    ck_assert_int_eq(tl_settings_check(top, &doc, &error), TL_OK);
    ck_assert(tl_json_member(&root, "c", &member));
    ck_assert_int_eq(tl_settings_read(&member, TL_LEVEL_JOB, NULL, arena, top, &job, &error), TL_OK);
    ck_assert_int_eq(tl_settings_check(job, &doc, &error), TL_OK);

    ck_assert(tl_json_member(&root, "b", &member));
    ck_assert_int_eq(tl_settings_read(&member, TL_LEVEL_JOB, NULL, arena, top, &job, &error), TL_OK);
    ck_assert_int_eq(tl_settings_check(job, &doc, &error), TL_INVALID_ARGUMENT);
    ck_assert_str_eq(error.message, "f:1:67: b.limits.inflight: inflight is \"4MiB\" and chunk is \"8MiB\"; inflight "
                                    "must be at least chunk");
    /* The error names the setting that was set last, here chunk. */
    ck_assert_int_eq(tl_settings_read(&member, TL_LEVEL_TOP, NULL, arena, defaults, &top, &error), TL_OK);
    ck_assert(tl_json_member(&root, "a", &member));
    ck_assert_int_eq(tl_settings_read(&member, TL_LEVEL_TASK, NULL, arena, top, &job, &error), TL_OK);
    ck_assert_int_eq(tl_settings_check(job, &doc, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "f:1:28: a.limits.chunk: "));

    ck_assert(tl_json_member(&root, "d", &member));
    ck_assert_int_eq(tl_settings_read(&member, TL_LEVEL_TOP, NULL, arena, defaults, &top, &error), TL_OK);
    ck_assert_int_eq(tl_settings_check(top, &doc, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "d.limits.inflight: inflight is \"1MB\" and chunk is \"1MiB\""));
    close_text();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("settings");
    TCase *tcase = tcase_create("settings");
    tcase_add_test(tcase, defaults_are_those_of_the_manual);
    tcase_add_test(tcase, the_table_is_sound);
    tcase_add_test(tcase, the_schema_has_the_same_settings);
    tcase_add_test(tcase, the_manual_has_the_same_settings);
    tcase_add_test(tcase, every_setting_can_be_set);
    tcase_add_test(tcase, what_is_not_set_stays);
    tcase_add_test(tcase, former_settings_are_refused_with_what_to_do);
    tcase_add_test(tcase, unknown_names_are_refused);
    tcase_add_test(tcase, structure_belongs_to_its_level);
    tcase_add_test(tcase, groups_are_objects);
    tcase_add_test(tcase, a_group_within_a_group_is_an_object);
    tcase_add_test(tcase, inflight_must_hold_a_chunk);
    tcase_add_test(tcase, addresses_of_peers_are_any_or_a_list);
    tcase_add_test(tcase, a_device_is_the_host_or_a_gpu);
    tcase_add_test(tcase, a_folder_starts_where_the_file_is);
    tcase_add_test(tcase, a_pool_fits_into_all_pools);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
