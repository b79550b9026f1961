// SPDX-License-Identifier: Apache-2.0
/*
 * The table of all settings, and the layers.
 *
 * Happy path: defaults; then one layer per object of the file that has settings. Every member is found in the table by
 * group and name, read, and its place noted. Failure modes: an unknown name is refused with the nearest; "security" is
 * refused until a version defines it; a value that is wrong by itself is refused where it stands, one that contradicts
 * another at the place that was set last.
 */
#include "config/settings.h"

#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "config/quote.h"
#include "config/settings_layer.h"

#define KIB UINT64_C(1024)
#define MIB (KIB * 1024)
#define GIB (MIB * 1024)
#define TIB (GIB * 1024)
#define US UINT64_C(1000)
#define MS ((uint64_t)TL_NS_PER_MS)
#define SEC ((uint64_t)TL_NS_PER_SEC)
#define HOUR (3600 * SEC)

/* One message of a stream: large enough that the cost per message vanishes, small enough that the messages of several
 * tensors alternate. */
#define DEFAULT_CHUNK_BYTES (2 * MIB)

/* Names that are known anywhere, for the search of the nearest. */
#define MAX_NAMES 32

/* clang-format off */
#define CHOICE_OF(value, word) {word, value, NULL},
const struct tl_choice tl_protocol_choices[] = {
    TL_PROTOCOLS(CHOICE_OF)
    {"grpc+gdr", -1, "the gdr transport"},
    {"grpc+mpi", -1, "the mpi transport"},
    {NULL, 0, NULL},
};
/* clang-format on */

static const struct tl_choice rdma_choices[] = {
    {"prefer", TL_RDMA_PREFER, NULL},
    {"require", TL_RDMA_REQUIRE, NULL},
    {"off", TL_RDMA_OFF, NULL},
    {NULL, 0, NULL},
};

static const struct tl_choice connect_choices[] = {
    {"lazy", TL_CONNECT_LAZY, NULL},
    {"eager", TL_CONNECT_EAGER, NULL},
    {NULL, 0, NULL},
};

static const struct tl_choice keys_choices[] = {
    {"window", TL_VERBS_KEYS_WINDOW, NULL},
    {"region", TL_VERBS_KEYS_REGION, NULL},
    {NULL, 0, NULL},
};

static const struct tl_choice process_vm_choices[] = {
    {"auto", TL_PROCESS_VM_AUTO, NULL},
    {"off", TL_PROCESS_VM_OFF, NULL},
    {NULL, 0, NULL},
};

static const struct tl_choice map_choices[] = {
    {"files", TL_LOCAL_MAP_FILES, NULL},
    {"off", TL_LOCAL_MAP_OFF, NULL},
    {NULL, 0, NULL},
};

static const struct tl_choice log_level_choices[] = {
    {"error", TL_LOG_ERROR, NULL},
    {"warn", TL_LOG_WARN, NULL},
    {"info", TL_LOG_INFO, NULL},
    {"debug", TL_LOG_DEBUG, NULL},
    {NULL, 0, NULL},
};

static const struct tl_choice log_format_choices[] = {
    {"key-value", TL_LOG_KEY_VALUE, NULL},
    {"json", TL_LOG_JSON, NULL},
    {NULL, 0, NULL},
};

#define TOP(name_) .name = (name_), .path = (name_)
#define IN(group_, name_) .group = group_, .name = name_, .path = group_ "." name_
#define AT(member) .offset = offsetof(struct tl_settings, member)
#define CHOICE(list, first) .kind = TL_SETTING_CHOICE, .choices = (list), .default_value = (uint64_t)(first)
#define NUMBER(kind_, min_, max_, default_) .kind = (kind_), .min = (min_), .max = (max_), .default_value = (default_)
#define SIZE(min, max, first) NUMBER(TL_SETTING_SIZE, min, max, first)
#define COUNT(min, max, first) NUMBER(TL_SETTING_COUNT, min, max, first)
#define DURATION(min, max, first) NUMBER(TL_SETTING_DURATION, min, max, first)
#define AUTO_SIZE(min, max) NUMBER(TL_SETTING_SIZE, min, max, TL_SETTING_AUTO), .has_auto = true
#define AUTO_COUNT(min, max) NUMBER(TL_SETTING_COUNT, min, max, TL_SETTING_AUTO), .has_auto = true

/* clang-format off */
const struct tl_setting tl_settings_table[] = {
    {TOP("protocol"), AT(protocol), CHOICE(tl_protocol_choices, TL_PROTOCOL_AUTO)},
    {TOP("rdma"), AT(rdma), CHOICE(rdma_choices, TL_RDMA_PREFER)},
    {TOP("connect"), AT(connect), CHOICE(connect_choices, TL_CONNECT_LAZY)},
    {TOP("checksum"), AT(checksum), .kind = TL_SETTING_BOOL},
    {TOP("listen"), AT(listen), .kind = TL_SETTING_ADDRESS},
    {TOP("publish"), AT(publish), .kind = TL_SETTING_FILES},
    {IN("peers", "addresses"), AT(peer_networks), .kind = TL_SETTING_NETWORKS},
    {IN("limits", "chunk"), AT(chunk_bytes), SIZE(4 * KIB, 16 * MIB, DEFAULT_CHUNK_BYTES)},
    {IN("limits", "inflight"), AT(inflight_bytes), SIZE(4 * KIB, 1 * TIB, 64 * MIB)},
    {IN("limits", "held"), AT(held_bytes), SIZE(4 * KIB, 1024 * TIB, 16 * GIB)},
    {IN("limits", "waiting"), AT(waiting_receivers), COUNT(1, 16777216, 65536)},
    {IN("limits", "connections"), AT(connections), COUNT(1, 1048576, 16384)},
    {IN("timeouts", "connect"), AT(connect_timeout_ns), DURATION(1 * MS, 24 * HOUR, 10 * SEC)},
    {IN("timeouts", "request"), AT(request_timeout_ns), DURATION(1 * MS, 168 * HOUR, 60 * SEC)},
    {IN("timeouts", "keepalive"), AT(keepalive_ns), DURATION(100 * MS, 24 * HOUR, 10 * SEC)},
    {IN("timeouts", "keepalive_answer"), AT(keepalive_timeout_ns), DURATION(100 * MS, 24 * HOUR, 5 * SEC)},
    {IN("timeouts", "reservation"), AT(reservation_timeout_ns), DURATION(1 * MS, 24 * HOUR, 30 * SEC)},
    {IN("timeouts", "stalled"), AT(stalled_timeout_ns), DURATION(1 * MS, 24 * HOUR, 60 * SEC)},
    {IN("timeouts", "drain"), AT(drain_timeout_ns), DURATION(0, 24 * HOUR, 10 * SEC)},
    {IN("local", "socket_folder"), AT(local.socket_folder), .kind = TL_SETTING_FOLDER},
    {IN("local", "pool"), AT(local.pool_bytes), SIZE(1 * MIB, 1 * TIB, 4 * MIB)},
    {IN("local", "max_pool"), AT(local.max_pool_bytes), AUTO_SIZE(1 * MIB, 1024 * TIB)},
    {IN("local", "slots"), AT(local.slot_count), COUNT(16, 4096, 256)},
    {IN("local", "spin"), AT(local.spin_ns), DURATION(0, 1 * SEC, 50 * US)},
    {IN("local", "peer_timeout"), AT(local.peer_timeout_ns), DURATION(50 * MS, 1 * HOUR, 3 * SEC)},
    {IN("local", "process_vm"), AT(local.process_vm), CHOICE(process_vm_choices, TL_PROCESS_VM_AUTO)},
    {IN("local", "map"), AT(local.map), CHOICE(map_choices, TL_LOCAL_MAP_FILES)},
    {IN("verbs", "devices"), AT(verbs.devices), .kind = TL_SETTING_DEVICES},
    {IN("verbs", "port"), AT(verbs.port), AUTO_COUNT(1, 255)},
    {IN("verbs", "gid_index"), AT(verbs.gid_index), AUTO_COUNT(0, 255)},
    {IN("verbs", "mtu"), AT(verbs.mtu_bytes), AUTO_COUNT(256, 4096), .is_power_of_two = true},
    {IN("verbs", "service_level"), AT(verbs.service_level), COUNT(0, 7, 0)},
    {IN("verbs", "traffic_class"), AT(verbs.traffic_class), COUNT(0, 255, 0)},
    {IN("verbs", "timeout"), AT(verbs.timeout), COUNT(0, 31, 14)},
    {IN("verbs", "retry_count"), AT(verbs.retry_count), COUNT(0, 7, 6)},
    {IN("verbs", "queue_depth"), AT(verbs.queue_depth), COUNT(16, 65536, 1024)},
    {IN("verbs", "pkey_index"), AT(verbs.pkey_index), COUNT(0, 65535, 0)},
    {IN("verbs", "keys"), AT(verbs.keys), CHOICE(keys_choices, TL_VERBS_KEYS_WINDOW)},
    {IN("verbs", "pool"), AT(verbs.pool_bytes), SIZE(1 * MIB, 1 * TIB, 64 * MIB)},
    {IN("verbs", "max_pool"), AT(verbs.max_pool_bytes), AUTO_SIZE(1 * MIB, 1024 * TIB)},
    {IN("verbs", "cached"), AT(verbs.cached_bytes), AUTO_SIZE(0, 1024 * TIB)},
    {IN("verbs", "register"), AT(verbs.register_bytes), SIZE(0, 1 * TIB, 256 * KIB)},
    {IN("verbs", "piece"), AT(verbs.piece_bytes), AUTO_SIZE(4 * KIB, 2 * GIB)},
    {IN("verbs", "spin"), AT(verbs.spin_ns), DURATION(0, 1 * SEC, 50 * US)},
    {IN("verbs", "slots"), AT(verbs.slot_count), COUNT(16, 4096, 256)},
    {IN("verbs", "peer_timeout"), AT(verbs.peer_timeout_ns), DURATION(50 * MS, 1 * HOUR, 800 * MS)},
    {IN("verbs", "bounce"), AT(verbs.is_bounce_forced), .kind = TL_SETTING_BOOL},
    {IN("log", "level"), AT(log_level), CHOICE(log_level_choices, TL_LOG_INFO)},
    {IN("log", "format"), AT(log_format), CHOICE(log_format_choices, TL_LOG_KEY_VALUE)},
};
/* clang-format on */
const size_t tl_settings_count = TL_ARRAY_COUNT(tl_settings_table);

#define REFUSAL_OF(value, word) [value] = "the protocol is " word,
const char *tl_settings_protocol_refusal(const struct tl_settings *settings, enum tl_protocol protocol)
{
    static const char *const refusals[] = {TL_PROTOCOLS(REFUSAL_OF)};
    bool is_wanted = settings->protocol == TL_PROTOCOL_AUTO || settings->protocol == protocol;
    return is_wanted ? NULL : refusals[settings->protocol];
}

/* What may stand on a level beside settings. */
static const char *const structure[][4] = {
    [TL_LEVEL_DEFAULT] = {NULL},
    [TL_LEVEL_ENVIRONMENT] = {NULL},
    [TL_LEVEL_TOP] = {"cluster", "jobs", "$schema", NULL},
    [TL_LEVEL_JOB] = {"tasks", NULL},
    [TL_LEVEL_TASK] = {NULL},
};

size_t tl_settings_find(size_t offset)
{
    size_t i = 0;
    while (tl_settings_table[i].offset != offset) {
        i++;
        TL_CHECK(i < tl_settings_count);
    }
    return i;
}

#define LAYER_BYTES                                                                                                    \
    (sizeof(struct tl_settings_layer) + sizeof(struct tl_setting_origin[TL_ARRAY_COUNT(tl_settings_table)]))

struct tl_settings_layer *tl_settings_copy(const struct tl_settings_layer *layer, struct tl_arena *arena)
{
    struct tl_settings_layer *copy = tl_arena_alloc(arena, LAYER_BYTES);
    if (copy) memcpy(copy, layer, LAYER_BYTES);
    return copy;
}

enum tl_status tl_settings_create(struct tl_arena *arena, const char *source, struct tl_settings_layer **ret_layer,
                                  struct tl_error *ret_error)
{
    struct tl_settings_layer *layer = tl_arena_alloc(arena, LAYER_BYTES);
    if (!layer) return tl_json_no_memory(source, ret_error);
    for (size_t i = 0; i < tl_settings_count; i++) {
        const struct tl_setting *setting = &tl_settings_table[i];
        tl_setting_set_default(setting, &layer->settings);
        const char *value = tl_setting_format(setting, &layer->settings, arena);
        if (!value) return tl_json_no_memory(source, ret_error);
        layer->origins[i] = (struct tl_setting_origin){.value = value, .origin = "default", .node = TL_JSON_NONE};
    }
    *ret_layer = layer;
    return TL_OK;
}

/* ------------------------------------------------------------------------------------------------------ layers -- */

/* What reading one object needs all the way down. */
struct reading {
    enum tl_settings_level level;
    const char *folder;
    struct tl_arena *arena;
    struct tl_settings_layer *layer;
};

static bool is_same_group(const char *a, const char *b)
{
    return a == b || (a && b && strcmp(a, b) == 0);
}

/* The names that may stand in a group, or at the top of a level; returns how many. */
static size_t list_names(const char *group, enum tl_settings_level level, const char **ret_names)
{
    size_t count = 0;
    const char *last_group = NULL;
    for (size_t i = 0; i < tl_settings_count; i++) {
        const struct tl_setting *setting = &tl_settings_table[i];
        if (is_same_group(setting->group, group)) {
            ret_names[count++] = setting->name;
        } else if (!group && !is_same_group(setting->group, last_group)) {
            ret_names[count++] = setting->group;
        }
        last_group = setting->group;
    }
    for (size_t i = 0; !group && structure[level][i]; i++) {
        ret_names[count++] = structure[level][i];
    }
    TL_CHECK(count <= MAX_NAMES);
    return count;
}

enum tl_status tl_settings_note_origin(struct tl_settings_layer *layer, size_t setting,
                                       const struct tl_json_value *value, enum tl_settings_level level,
                                       struct tl_arena *arena, struct tl_error *ret_error)
{
    char path[TL_JSON_PATH_BYTES];
    struct tl_setting_origin origin = {.level = level, .node = value->node};
    origin.value = tl_setting_format(&tl_settings_table[setting], &layer->settings, arena);
    origin.origin = tl_arena_format(arena, "%s:%u (%s)", value->doc->source, tl_json_line(value),
                                    tl_json_places_path(&value->doc->places, value->node, path));
    if (!origin.value || !origin.origin) return tl_json_no_memory(value->doc->source, ret_error);
    layer->origins[setting] = origin;
    return TL_OK;
}

/* Settings of earlier releases, and what to do in their place. */
static const struct {
    const char *group, *name, *remedy;
} former_settings[] = {
    {"local", "silence", "is called \"peer_timeout\" now; rename it"},
    {"local", "users",
     "does not exist any more: only workers of one user share memory; remove it, and run workers that "
     "are to share memory as one user (workers of different users use another transport)"},
    {"verbs", "silence", "is called \"peer_timeout\" now; rename it"},
};

/* What to do in place of a setting of an earlier release; NULL: there was no such setting. */
static const char *find_remedy(const char *group, const char *name)
{
    for (size_t i = 0; i < TL_ARRAY_COUNT(former_settings); i++) {
        if (is_same_group(former_settings[i].group, group) && strcmp(former_settings[i].name, name) == 0)
            return former_settings[i].remedy;
    }
    return NULL;
}

static enum tl_status read_member(struct reading *reading, const char *group, const struct tl_json_value *member,
                                  struct tl_error *ret_error)
{
    for (size_t i = 0; i < tl_settings_count; i++) {
        const struct tl_setting *setting = &tl_settings_table[i];
        if (!is_same_group(setting->group, group) || strcmp(setting->name, member->key) != 0) continue;
        enum tl_status status =
            tl_setting_read(setting, member, reading->arena, reading->folder, &reading->layer->settings, ret_error);
        reading->layer->origins[i].is_wrong = status != TL_OK;
        if (status != TL_OK) return status;
        return tl_settings_note_origin(reading->layer, i, member, reading->level, reading->arena, ret_error);
    }
    const char *remedy = find_remedy(group, member->key);
    if (remedy != NULL)
        return tl_json_fail_key(member, TL_INVALID_ARGUMENT, ret_error, "the setting \"%s\" %s", member->key, remedy);
    const char *names[MAX_NAMES];
    size_t count = list_names(group, reading->level, names);
    return tl_json_fail_unknown_key(member, "setting", names, count, ret_error);
}

static enum tl_status read_group(struct reading *reading, const struct tl_json_value *group, struct tl_error *ret_error)
{
    enum tl_status status = tl_json_expect(group, JSON_OBJECT, "an object of settings", ret_error);
    struct tl_json_value member;
    if (status != TL_OK) return status;
    TL_JSON_FOREACH(group, member)
    {
        status = tl_json_collect(group->doc, read_member(reading, group->key, &member, ret_error), ret_error);
        if (status != TL_OK) return status;
    }
    return TL_OK;
}

static bool is_group(const char *name)
{
    for (size_t i = 0; i < tl_settings_count; i++) {
        const char *group = tl_settings_table[i].group;
        if (group && strcmp(group, name) == 0) return true;
    }
    return false;
}

static bool is_structure(const char *key, enum tl_settings_level level)
{
    for (size_t i = 0; structure[level][i]; i++) {
        if (strcmp(structure[level][i], key) == 0) return true;
    }
    return false;
}

enum tl_status tl_settings_read(const struct tl_json_value *object, enum tl_settings_level level, const char *folder,
                                struct tl_arena *arena, const struct tl_settings_layer *below,
                                const struct tl_settings_layer **ret_layer, struct tl_error *ret_error)
{
    enum tl_status status = tl_json_expect(object, JSON_OBJECT, "an object of settings", ret_error);
    if (status != TL_OK) return status;
    struct reading reading = {.level = level, .folder = folder, .arena = arena};
    reading.layer = tl_settings_copy(below, arena);
    if (!reading.layer) return tl_json_no_memory(object->doc->source, ret_error);
    struct tl_json_value member;
    TL_JSON_FOREACH(object, member)
    {
        if (is_structure(member.key, level)) continue;
        if (strcmp(member.key, "security") == 0) {
            status = tl_json_fail_key(&member, TL_UNIMPLEMENTED, ret_error,
                                      "is reserved: a later version will define it; remove it");
        } else {
            status = is_group(member.key) ? read_group(&reading, &member, ret_error)
                                          : read_member(&reading, NULL, &member, ret_error);
        }
        status = tl_json_collect(object->doc, status, ret_error);
        if (status != TL_OK) return status;
    }
    *ret_layer = reading.layer;
    return TL_OK;
}

/* The error for two settings that contradict each other, at the one that was set last. The defaults agree, so that one
 * of them was set in the file. */
static enum tl_status refuse_order(const struct tl_settings_layer *layer, size_t small_offset, size_t large_offset,
                                   struct tl_json_doc *doc, struct tl_error *ret_error)
{
    size_t small = tl_settings_find(small_offset), large = tl_settings_find(large_offset);
    const struct tl_setting_origin *small_origin = &layer->origins[small], *large_origin = &layer->origins[large];
    const struct tl_setting_origin *last = small_origin->level > large_origin->level ? small_origin : large_origin;
    const char *small_name = tl_settings_table[small].name, *large_name = tl_settings_table[large].name;
    struct tl_json_value value = {.doc = doc, .node = last->node};
    return tl_json_fail(&value, TL_INVALID_ARGUMENT, ret_error, "%s is %s and %s is %s; %s must be at least %s",
                        large_name, large_origin->value, small_name, small_origin->value, large_name, small_name);
}

/* Two settings of which the first must not be larger. */
static const struct {
    size_t small_offset, large_offset;
} ordered_settings[] = {
    {offsetof(struct tl_settings, chunk_bytes), offsetof(struct tl_settings, inflight_bytes)},
    {offsetof(struct tl_settings, local.pool_bytes), offsetof(struct tl_settings, local.max_pool_bytes)},
    {offsetof(struct tl_settings, verbs.pool_bytes), offsetof(struct tl_settings, verbs.max_pool_bytes)},
};

static uint64_t number_at(const struct tl_settings *settings, size_t offset)
{
    uint64_t number;
    memcpy(&number, (const char *)settings + offset, sizeof(number));
    return number;
}

enum tl_status tl_settings_check(const struct tl_settings_layer *layer, struct tl_json_doc *doc,
                                 struct tl_error *ret_error)
{
    for (size_t i = 0; i < TL_ARRAY_COUNT(ordered_settings); i++) {
        size_t small = ordered_settings[i].small_offset, large = ordered_settings[i].large_offset;
        if (number_at(&layer->settings, large) >= number_at(&layer->settings, small)) continue;
        if (layer->origins[tl_settings_find(small)].is_wrong || layer->origins[tl_settings_find(large)].is_wrong)
            continue;
        enum tl_status status = tl_json_collect(doc, refuse_order(layer, small, large, doc, ret_error), ret_error);
        if (status != TL_OK) return status;
    }
    return TL_OK;
}
