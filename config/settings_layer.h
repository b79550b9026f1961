// SPDX-License-Identifier: Apache-2.0
/*
 * The layers that the settings of a task (config/settings.h) come from: default, environment, top level, job, task.
 *
 * A layer starts as a copy of the one below and is then changed by one object of the file; with every value goes where
 * it was set. Tasks without settings of their own share the layer of their job, jobs that of the top level.
 */
#ifndef CONFIG_SETTINGS_LAYER_H
#define CONFIG_SETTINGS_LAYER_H

#include <stdbool.h>
#include <stddef.h>

#include <tensorlane/status.h>

#include "config/arena.h"
#include "config/config.h"
#include "config/json_doc.h"
#include "config/settings_table.h"

enum tl_settings_level { TL_LEVEL_DEFAULT, TL_LEVEL_ENVIRONMENT, TL_LEVEL_TOP, TL_LEVEL_JOB, TL_LEVEL_TASK };

/* Where a value was set. */
struct tl_setting_origin {
    const char *value;  /* as JSON */
    const char *origin; /* "default", "environment (NAME)" or "FILE:LINE (PATH)" */
    enum tl_settings_level level;
    bool is_refused; /* the object has a wrong value for the setting; value and origin are those of the layer below */
    uint32_t node;   /* node of the value in the document, while that is open; TL_JSON_NONE when it is not from there */
};

struct tl_settings_layer {
    struct tl_settings settings;
    struct tl_setting_origin origins[]; /* [tl_settings_count], in the order of tl_settings_table */
};

/* The defaults. Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_settings_create(struct tl_arena *arena, const char *source, struct tl_settings_layer **ret_layer,
                                  struct tl_error *ret_error) TL_MUST_USE;

/* Copies a layer, so that the copy can be changed. NULL: no memory. */
struct tl_settings_layer *tl_settings_copy(const struct tl_settings_layer *layer, struct tl_arena *arena);

/* What the settings in `object` make of the layer `below`. Members of the object that are no settings but belong to its
 * level ("cluster", "jobs", "tasks") are passed over. Errors: TL_INVALID_ARGUMENT: unknown setting or wrong value.
 * TL_UNIMPLEMENTED: this version lacks it. TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_settings_read(const struct tl_json_value *object, enum tl_settings_level level, const char *folder,
                                struct tl_arena *arena, const struct tl_settings_layer *below,
                                const struct tl_settings_layer **ret_layer, struct tl_error *ret_error) TL_MUST_USE;

/* Notes that a setting of the layer was set by this value. Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_settings_note_origin(struct tl_settings_layer *layer, size_t setting,
                                       const struct tl_json_value *value, enum tl_settings_level level,
                                       struct tl_arena *arena, struct tl_error *ret_error) TL_MUST_USE;

/* Checks what concerns several settings. Errors: TL_INVALID_ARGUMENT: they contradict each other. */
enum tl_status tl_settings_check(const struct tl_settings_layer *layer, struct tl_json_doc *doc,
                                 struct tl_error *ret_error) TL_MUST_USE;

#endif
