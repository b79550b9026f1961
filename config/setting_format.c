// SPDX-License-Identifier: Apache-2.0
/*
 * Writes the value of one setting as JSON, for people who ask what is in force.
 *
 * Happy path: numbers with a unit get the largest one that divides them, so that nothing is rounded and the text can be
 * put back into the file. Failure mode: no memory.
 */
#include "config/setting_value.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/text.h"
#include "config/allow_list.h"
#include "config/network_list.h"

static const void *const_field(const struct tl_settings *settings, const struct tl_setting *setting)
{
    return (const char *)settings + setting->offset;
}

const char *tl_choice_name(const struct tl_choice *choices, int value)
{
    for (const struct tl_choice *choice = choices; choice->name; choice++) {
        if (choice->value == value) return choice->name;
    }
    return "";
}

/* Writes number and unit, the largest unit that divides the number. */
static char *format_with_unit(uint64_t number, const char *const *units, const uint64_t *factors, size_t count,
                              char *buffer)
{
    size_t best = 0;
    for (size_t i = 1; i < count; i++) {
        if (number != 0 && number % factors[i] == 0 && factors[i] > factors[best]) best = i;
    }
    snprintf(buffer, TL_SETTING_NUMBER_BYTES, "%" PRIu64 "%s", number / factors[best], units[best]);
    return buffer;
}

char *tl_setting_format_number(enum tl_setting_kind kind, uint64_t number, char ret_text[TL_SETTING_NUMBER_BYTES])
{
    static const char *const size_units[] = {"B", "KiB", "MiB", "GiB", "TiB", "KB", "MB", "GB", "TB"};
    static const uint64_t size_factors[] = {
        1,
        UINT64_C(1) << 10,
        UINT64_C(1) << 20,
        UINT64_C(1) << 30,
        UINT64_C(1) << 40,
        UINT64_C(1000),
        UINT64_C(1000000),
        UINT64_C(1000000000),
        UINT64_C(1000000000000),
    };
    static const char *const duration_units[] = {"ns", "us", "ms", "s", "h"};
    static const uint64_t duration_factors[] = {1, 1000, TL_NS_PER_MS, TL_NS_PER_SEC, 3600 * TL_NS_PER_SEC};
    if (kind == TL_SETTING_SIZE) {
        return format_with_unit(number, size_units, size_factors, TL_ARRAY_COUNT(size_units), ret_text);
    }
    if (kind == TL_SETTING_DURATION) {
        if (number == 0) return strcpy(ret_text, "0s");
        return format_with_unit(number, duration_units, duration_factors, TL_ARRAY_COUNT(duration_units), ret_text);
    }
    snprintf(ret_text, TL_SETTING_NUMBER_BYTES, "%" PRIu64, number);
    return ret_text;
}

const char *tl_json_dump(json_t *json, struct tl_arena *arena)
{
    if (!json) return NULL;
    size_t length = json_dumpb(json, NULL, 0, JSON_ENCODE_ANY);
    char *text = length > 0 ? tl_arena_alloc(arena, length + 1) : NULL;
    if (text) json_dumpb(json, text, length, JSON_ENCODE_ANY);
    json_decref(json);
    return text;
}

const char *tl_json_text(const char *text, struct tl_arena *arena)
{
    return tl_json_dump(json_string(text), arena);
}

static const char *format_files(const struct tl_settings *settings, struct tl_arena *arena)
{
    json_t *list = json_array();
    for (size_t i = 0; i < settings->publish_count; i++) {
        /* The name of the folder is the user's and need not be UTF-8, which JSON must be. */
        bool is_utf8 = tl_text_is_utf8(settings->publish[i], strlen(settings->publish[i]));
        if (json_array_append_new(list, json_string(is_utf8 ? settings->publish[i] : "(not UTF-8)")) != 0) {
            json_decref(list);
            return NULL;
        }
    }
    return tl_json_dump(list, arena);
}

const char *tl_setting_format(const struct tl_setting *setting, const struct tl_settings *settings,
                              struct tl_arena *arena)
{
    char number_text[TL_SETTING_NUMBER_BYTES];
    const void *from = const_field(settings, setting);
    struct tl_device device;
    uint64_t number = 0;
    const char *text = NULL;
    int choice = 0;
    bool flag = false;
    switch (setting->kind) {
    case TL_SETTING_CHOICE:
        memcpy(&choice, from, sizeof(choice));
        return tl_json_text(tl_choice_name(setting->choices, choice), arena);
    case TL_SETTING_BOOL:
        memcpy(&flag, from, sizeof(flag));
        return flag ? "true" : "false";
    case TL_SETTING_ADDRESS:
        memcpy(&text, from, sizeof(text));
        return text ? tl_json_text(text, arena) : "null";
    case TL_SETTING_NETWORKS:
        memcpy(&text, from, sizeof(text));
        return tl_network_list_format(text, arena);
    case TL_SETTING_FILE:
    case TL_SETTING_FOLDER:
        memcpy(&text, from, sizeof(text));
        if (text && !tl_text_is_utf8(text, strlen(text))) text = "(not UTF-8)";
        return text ? tl_json_text(text, arena) : "\"\"";
    case TL_SETTING_DEVICES:
        memcpy(&text, from, sizeof(text));
        return text ? tl_json_text(text, arena) : "\"\"";
    case TL_SETTING_TENSOR_DEVICE:
        memcpy(&device, from, sizeof(device));
        if (device.kind == TL_DEVICE_HOST) return "\"host\"";
        return tl_arena_format(arena, "\"gpu:%" PRId32 "\"", device.index);
    case TL_SETTING_FILES:
        return format_files(settings, arena);
    case TL_SETTING_ALLOW:
        return tl_allow_list_format(&settings->security, arena);
    case TL_SETTING_COUNT:
    case TL_SETTING_SIZE:
    case TL_SETTING_DURATION:
        break;
    }
    memcpy(&number, from, sizeof(number));
    if (setting->has_auto && number == TL_SETTING_AUTO) return "\"auto\"";
    if (setting->kind == TL_SETTING_COUNT) return tl_arena_format(arena, "%" PRIu64, number);
    return tl_arena_format(arena, "\"%s\"", tl_setting_format_number(setting->kind, number, number_text));
}
