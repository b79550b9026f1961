// SPDX-License-Identifier: Apache-2.0
/*
 * The layers of settings.
 *
 * Happy path: defaults; then one layer per object of the file that has settings. Every member is found in the table by
 * group and name, read, and its place noted. Failure modes: an unknown name is refused with the nearest; a value that
 * is wrong by itself is refused where it stands, one that contradicts another at the place that was set last.
 */
#include "config/settings_layer.h"

#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "config/quote.h"
#include "config/security.h"

/* Names that are known anywhere, for the search of the nearest. */
#define MAX_NAMES 32

/* What may stand on a level beside settings. */
static const char *const structure[][4] = {
    [TL_LEVEL_DEFAULT] = {NULL},
    [TL_LEVEL_ENVIRONMENT] = {NULL},
    [TL_LEVEL_TOP] = {"cluster", "jobs", "$schema", NULL},
    [TL_LEVEL_JOB] = {"tasks", NULL},
    [TL_LEVEL_TASK] = {NULL},
};

static size_t layer_bytes(void)
{
    return sizeof(struct tl_settings_layer) + tl_settings_count * sizeof(struct tl_setting_origin);
}

struct tl_settings_layer *tl_settings_copy(const struct tl_settings_layer *layer, struct tl_arena *arena)
{
    struct tl_settings_layer *copy = tl_arena_alloc(arena, layer_bytes());
    if (copy) memcpy(copy, layer, layer_bytes());
    return copy;
}

enum tl_status tl_settings_create(struct tl_arena *arena, const char *source, struct tl_settings_layer **ret_layer,
                                  struct tl_error *ret_error)
{
    struct tl_settings_layer *layer = tl_arena_alloc(arena, layer_bytes());
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

/* An object of settings: the top of a level, a group, or a subgroup of it. */
struct object {
    const char *group;    /* NULL: the top */
    const char *subgroup; /* NULL: the group itself */
};

/* What reading one object needs all the way down. */
struct reading {
    enum tl_settings_level level;
    const char *folder;
    struct tl_arena *arena;
    struct tl_settings_layer *layer;
};

static bool is_same(const char *a, const char *b)
{
    return a == b || (a && b && strcmp(a, b) == 0);
}

/* The name in the object under which a setting is found: its own, or that of an object that it is in. NULL: the setting
 * is elsewhere. */
static const char *name_within(const struct tl_setting *setting, const struct object *object, bool *ret_is_object)
{
    *ret_is_object = true;
    if (!object->group && setting->group) return setting->group;
    if (!is_same(setting->group, object->group)) return NULL;
    if (!object->subgroup && setting->subgroup) return setting->subgroup;
    *ret_is_object = false;
    return is_same(setting->subgroup, object->subgroup) ? setting->name : NULL;
}

/* The names that may stand in an object; returns how many. */
static size_t list_names(const struct object *object, enum tl_settings_level level, const char **ret_names)
{
    size_t count = 0;
    for (size_t i = 0; i < tl_settings_count; i++) {
        bool is_object;
        const char *name = name_within(&tl_settings_table[i], object, &is_object);
        bool is_listed = count > 0 && is_object && is_same(name, ret_names[count - 1]);
        if (name && !is_listed) ret_names[count++] = name;
    }
    for (size_t i = 0; !object->group && structure[level][i]; i++) {
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
        if (is_same(former_settings[i].group, group) && strcmp(former_settings[i].name, name) == 0)
            return former_settings[i].remedy;
    }
    return NULL;
}

static enum tl_status read_setting(struct reading *reading, const struct object *object,
                                   const struct tl_json_value *member, struct tl_error *ret_error)
{
    for (size_t i = 0; i < tl_settings_count; i++) {
        const struct tl_setting *setting = &tl_settings_table[i];
        bool is_object;
        const char *name = name_within(setting, object, &is_object);
        if (is_object || !name || strcmp(name, member->key) != 0) continue;
        enum tl_status status =
            tl_setting_read(setting, member, reading->arena, reading->folder, &reading->layer->settings, ret_error);
        reading->layer->origins[i].is_refused = status != TL_OK;
        if (status != TL_OK) return status;
        return tl_settings_note_origin(reading->layer, i, member, reading->level, reading->arena, ret_error);
    }
    const char *remedy = find_remedy(object->group, member->key);
    if (remedy != NULL)
        return tl_json_fail_key(member, TL_INVALID_ARGUMENT, ret_error, "the setting \"%s\" %s", member->key, remedy);
    const char *names[MAX_NAMES];
    size_t count = list_names(object, reading->level, names);
    return tl_json_fail_unknown_key(member, "setting", names, count, ret_error);
}

/* Whether the name stands for an object in this one. */
static bool is_object_within(const struct object *object, const char *key)
{
    for (size_t i = 0; i < tl_settings_count; i++) {
        bool is_object;
        const char *name = name_within(&tl_settings_table[i], object, &is_object);
        if (name && is_object && strcmp(name, key) == 0) return true;
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

static enum tl_status read_object(struct reading *reading, const struct object *object,
                                  const struct tl_json_value *value, struct tl_error *ret_error)
{
    enum tl_status status = tl_json_expect(value, JSON_OBJECT, "an object of settings", ret_error);
    struct tl_json_value member;
    if (status != TL_OK) return status;
    TL_JSON_FOREACH(value, member)
    {
        struct object inner = {.group = object->group ? object->group : member.key};
        if (object->group) inner.subgroup = member.key;
        if (!object->group && is_structure(member.key, reading->level)) continue;
        status = is_object_within(object, member.key) ? read_object(reading, &inner, &member, ret_error)
                                                      : read_setting(reading, object, &member, ret_error);
        status = tl_json_collect(value->doc, status, ret_error);
        if (status != TL_OK) return status;
    }
    return TL_OK;
}

enum tl_status tl_settings_read(const struct tl_json_value *object, enum tl_settings_level level, const char *folder,
                                struct tl_arena *arena, const struct tl_settings_layer *below,
                                const struct tl_settings_layer **ret_layer, struct tl_error *ret_error)
{
    static const struct object top = {.group = NULL};
    enum tl_status status = tl_json_expect(object, JSON_OBJECT, "an object of settings", ret_error);
    if (status != TL_OK) return status;
    struct reading reading = {.level = level, .folder = folder, .arena = arena};
    reading.layer = tl_settings_copy(below, arena);
    if (!reading.layer) return tl_json_no_memory(object->doc->source, ret_error);
    status = read_object(&reading, &top, object, ret_error);
    if (status == TL_OK) *ret_layer = reading.layer;
    return status;
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
        if (layer->origins[tl_settings_find(small)].is_refused || layer->origins[tl_settings_find(large)].is_refused)
            continue;
        enum tl_status status = tl_json_collect(doc, refuse_order(layer, small, large, doc, ret_error), ret_error);
        if (status != TL_OK) return status;
    }
    return tl_security_check(layer, doc, ret_error);
}
