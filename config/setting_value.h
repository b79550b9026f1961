// SPDX-License-Identifier: Apache-2.0
/* What a setting is: its name, the values that it may have, and how they are read from JSON and written as JSON. */
#ifndef CONFIG_SETTING_VALUE_H
#define CONFIG_SETTING_VALUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tensorlane/status.h>

#include "config/arena.h"
#include "config/config.h"
#include "config/json_doc.h"

enum tl_setting_kind {
    TL_SETTING_CHOICE,        /* one of a list of words; an enum or int in struct tl_settings */
    TL_SETTING_BOOL,          /* bool */
    TL_SETTING_ADDRESS,       /* const char *, NULL: none */
    TL_SETTING_FILES,         /* publish and publish_count */
    TL_SETTING_FILE,          /* const char *, NULL: none, "" in JSON */
    TL_SETTING_FOLDER,        /* const char *, NULL: none, "" in JSON */
    TL_SETTING_NETWORKS,      /* const char *, as peer_networks in struct tl_settings */
    TL_SETTING_DEVICES,       /* RDMA devices: const char *, NULL: no list, "" in JSON */
    TL_SETTING_TENSOR_DEVICE, /* where tensors lie: struct tl_device */
    TL_SETTING_ALLOW,         /* security.allow and security.allow_count */
    TL_SETTING_SIZE,          /* uint64_t; a number of bytes or text with a unit */
    TL_SETTING_COUNT,         /* uint64_t; a number */
    TL_SETTING_DURATION,      /* int64_t nanoseconds; text with a unit */
};

/* A task may publish so many files. */
#define TL_MAX_PUBLISHED_FILES 1024

struct tl_choice {
    const char *name; /* NULL ends a list */
    int value;
    const char *lacks; /* what this version lacks for it; NULL: it can be chosen */
};

struct tl_setting {
    const char *group;    /* the object it is in, "limits"; NULL: none */
    const char *subgroup; /* the object in that, "tls"; NULL: none */
    const char *name;
    const char *path; /* "limits.chunk" */
    enum tl_setting_kind kind;
    size_t offset; /* in struct tl_settings */
    uint64_t min;  /* for sizes, counts and durations */
    uint64_t max;
    bool has_auto;                   /* for sizes and counts: "auto" is TL_SETTING_AUTO */
    bool is_power_of_two;            /* for counts: nothing else is in the range */
    uint64_t default_value;          /* for everything that is a number in struct tl_settings */
    const struct tl_choice *choices; /* for TL_SETTING_CHOICE */
};

/* Reads the value into its field. `folder` (NULL: the current one) is where relative files start.
 * Errors: TL_INVALID_ARGUMENT: not such a value. TL_UNIMPLEMENTED: this version lacks it. TL_RESOURCE_EXHAUSTED: no
 * memory. */
enum tl_status tl_setting_read(const struct tl_setting *setting, const struct tl_json_value *value,
                               struct tl_arena *arena, const char *folder, struct tl_settings *settings,
                               struct tl_error *ret_error) TL_MUST_USE;

/* Whether the number is in the setting's range. Errors: TL_INVALID_ARGUMENT: no; the message says the range. */
enum tl_status tl_setting_check_number(const struct tl_setting *setting, uint64_t number,
                                       struct tl_error *ret_error) TL_MUST_USE;

/* Gives the field its default. */
void tl_setting_set_default(const struct tl_setting *setting, struct tl_settings *settings);

/* Holds every number with its unit. */
#define TL_SETTING_NUMBER_BYTES 32

/* Writes a size or a duration with the largest unit that divides it, a count as it is; returns the buffer. */
char *tl_setting_format_number(enum tl_setting_kind kind, uint64_t number, char ret_text[TL_SETTING_NUMBER_BYTES]);

/* The field as JSON, sizes and durations exact and with the largest unit that divides them. NULL: no memory. */
const char *tl_setting_format(const struct tl_setting *setting, const struct tl_settings *settings,
                              struct tl_arena *arena);

/* JSON as text; takes the reference. NULL: no memory, also when json is NULL. */
const char *tl_json_dump(json_t *json, struct tl_arena *arena);

/* Text as a JSON string, with its quotes. NULL: no memory. */
const char *tl_json_text(const char *text, struct tl_arena *arena);

/* Looks the word up; the error points at the value. Errors: as tl_setting_read. */
enum tl_status tl_choice_read(const struct tl_choice *choices, const struct tl_json_value *value, int *ret_choice,
                              struct tl_error *ret_error) TL_MUST_USE;

/* The word for a value. */
const char *tl_choice_name(const struct tl_choice *choices, int value);

#endif
