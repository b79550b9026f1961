// SPDX-License-Identifier: Apache-2.0
/*
 * Reads the value of one setting.
 *
 * Happy path: the kind of the setting decides which JSON types are welcome; the value is brought into bytes or
 * nanoseconds, checked against the bounds, and stored. Failure modes: a message says what the value must be, with an
 * example that can be copied.
 */
#include "config/setting_value.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "base/text.h"
#include "config/address.h"
#include "config/allow_list.h"
#include "config/device_list.h"
#include "config/device_name.h"
#include "config/network_list.h"
#include "config/quote.h"

/* Whole numbers up to here are exact as double. */
#define MAX_EXACT_REAL 9007199254740992.0
/* The longest list of choices. */
#define MAX_CHOICES 8

static void *field(struct tl_settings *settings, const struct tl_setting *setting)
{
    return (char *)settings + setting->offset;
}

/* ------------------------------------------------------------------------------------------------------- words -- */

enum tl_status tl_choice_read(const struct tl_choice *choices, const struct tl_json_value *value, int *ret_choice,
                              struct tl_error *ret_error)
{
    char suggestion[TL_ERROR_MESSAGE_BYTES / 2];
    char quoted[TL_QUOTE_BYTES];
    const char *available[MAX_CHOICES];
    size_t available_count = 0;
    enum tl_status status = tl_json_expect(value, JSON_STRING, "a string", ret_error);
    if (status != TL_OK) return status;
    const char *word = json_string_value(value->json);
    const struct tl_choice *chosen = NULL;
    for (const struct tl_choice *choice = choices; choice->name; choice++) {
        TL_CHECK(available_count < MAX_CHOICES);
        if (!choice->lacks) available[available_count++] = choice->name;
        if (strcmp(choice->name, word) == 0) chosen = choice;
    }
    if (!chosen) {
        return tl_json_fail(value, TL_INVALID_ARGUMENT, ret_error, "%s is no value of %s; %s", tl_quote(word, quoted),
                            value->key,
                            tl_json_suggest(word, available, available_count, suggestion, sizeof(suggestion)));
    }
    if (chosen->lacks) {
        return tl_json_fail(value, TL_UNIMPLEMENTED, ret_error, "\"%s\" needs %s, which this version does not have; %s",
                            chosen->name, chosen->lacks,
                            tl_json_suggest("", available, available_count, suggestion, sizeof(suggestion)));
    }
    *ret_choice = chosen->value;
    return TL_OK;
}

/* ----------------------------------------------------------------------------------------------------- numbers -- */

/* Says which powers of two are in the range. */
static enum tl_status refuse_power(const struct tl_setting *setting, uint64_t number, struct tl_error *ret_error)
{
    char list[128] = "";
    size_t len = 0;
    for (uint64_t power = setting->min; power <= setting->max && len < sizeof(list); power *= 2) {
        const char *separator = power == setting->min ? "" : power * 2 > setting->max ? " or " : ", ";
        len += (size_t)snprintf(list + len, sizeof(list) - len, "%s%" PRIu64, separator, power);
    }
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%" PRIu64 " is not %s", number, list);
}

enum tl_status tl_setting_check_number(const struct tl_setting *setting, uint64_t number, struct tl_error *ret_error)
{
    char min[TL_SETTING_NUMBER_BYTES], max[TL_SETTING_NUMBER_BYTES], given[TL_SETTING_NUMBER_BYTES];
    bool is_in_range = number >= setting->min && number <= setting->max;
    if (setting->is_power_of_two && (!is_in_range || (number & (number - 1)) != 0)) {
        return refuse_power(setting, number, ret_error);
    }
    if (is_in_range) return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s is out of range; it may be %s to %s",
                        tl_setting_format_number(setting->kind, number, given),
                        tl_setting_format_number(setting->kind, setting->min, min),
                        tl_setting_format_number(setting->kind, setting->max, max));
}

static enum tl_status check_bounds(const struct tl_setting *setting, const struct tl_json_value *value, uint64_t number,
                                   struct tl_error *ret_error)
{
    struct tl_error reason;
    enum tl_status status = tl_setting_check_number(setting, number, &reason);
    return status == TL_OK ? TL_OK : tl_json_fail(value, status, ret_error, "%s", reason.message);
}

/* A JSON number that is whole and not negative. */
static enum tl_status read_whole(const struct tl_json_value *value, const char *remedy, uint64_t *ret_number,
                                 struct tl_error *ret_error)
{
    if (json_is_integer(value->json)) {
        json_int_t number = json_integer_value(value->json);
        if (number < 0) {
            return tl_json_fail(value, TL_INVALID_ARGUMENT, ret_error, "%" JSON_INTEGER_FORMAT " is negative; write %s",
                                number, remedy);
        }
        *ret_number = (uint64_t)number;
        return TL_OK;
    }
    double real = json_real_value(value->json);
    if (real < 0 || real > MAX_EXACT_REAL || floor(real) != real) {
        return tl_json_fail(value, TL_INVALID_ARGUMENT, ret_error, "%g is no whole number of 0 or more; write %s", real,
                            remedy);
    }
    *ret_number = (uint64_t)real;
    return TL_OK;
}

static enum tl_status read_count(const struct tl_setting *setting, const struct tl_json_value *value, uint64_t *ret,
                                 struct tl_error *ret_error)
{
    if (!json_is_number(value->json)) {
        return tl_json_fail(value, TL_INVALID_ARGUMENT, ret_error,
                            "must be a whole number such as %" PRIu64 "%s, not %s",
                            setting->has_auto ? setting->min : setting->default_value,
                            setting->has_auto ? ", or \"auto\"" : "", tl_json_type_name(value->json));
    }
    return read_whole(value, "a whole number such as 1024", ret, ret_error);
}

static enum tl_status read_size(const struct tl_json_value *value, uint64_t *ret, struct tl_error *ret_error)
{
    char quoted[TL_QUOTE_BYTES];
    if (json_is_number(value->json)) {
        return read_whole(value, "a number of bytes, or a size such as \"512MiB\"", ret, ret_error);
    }
    enum tl_status status =
        tl_json_expect(value, JSON_STRING, "a size such as \"512MiB\", or a number of bytes", ret_error);
    if (status != TL_OK) return status;
    const char *text = json_string_value(value->json);
    if (tl_text_parse_size(text, ret)) return TL_OK;
    return tl_json_fail(value, TL_INVALID_ARGUMENT, ret_error,
                        "%s is no size; write one such as \"512MiB\" (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB)",
                        tl_quote(text, quoted));
}

static enum tl_status read_duration(const struct tl_json_value *value, uint64_t *ret, struct tl_error *ret_error)
{
    char quoted[TL_QUOTE_BYTES];
    int64_t ns;
    if (json_is_number(value->json)) {
        return tl_json_fail(value, TL_INVALID_ARGUMENT, ret_error,
                            "a number has no unit; write a duration such as \"250ms\" or \"10s\"");
    }
    enum tl_status status = tl_json_expect(value, JSON_STRING, "a duration such as \"250ms\" or \"10s\"", ret_error);
    if (status != TL_OK) return status;
    const char *text = json_string_value(value->json);
    if (!tl_text_parse_duration(text, &ns)) {
        return tl_json_fail(value, TL_INVALID_ARGUMENT, ret_error,
                            "%s is no duration; write one such as \"250ms\" or \"1m30s\" (ns, us, ms, s, m, h)",
                            tl_quote(text, quoted));
    }
    *ret = (uint64_t)ns;
    return TL_OK;
}

static enum tl_status read_number(const struct tl_setting *setting, const struct tl_json_value *value,
                                  struct tl_settings *settings, struct tl_error *ret_error)
{
    uint64_t number = TL_SETTING_AUTO;
    if (setting->has_auto && json_is_string(value->json) && strcmp(json_string_value(value->json), "auto") == 0) {
        memcpy(field(settings, setting), &number, sizeof(number));
        return TL_OK;
    }
    enum tl_status status = setting->kind == TL_SETTING_COUNT  ? read_count(setting, value, &number, ret_error)
                            : setting->kind == TL_SETTING_SIZE ? read_size(value, &number, ret_error)
                                                               : read_duration(value, &number, ret_error);
    if (status == TL_OK) status = check_bounds(setting, value, number, ret_error);
    if (status == TL_OK) memcpy(field(settings, setting), &number, sizeof(number));
    return status;
}

/* -------------------------------------------------------------------------------------- addresses, files, rest -- */

static enum tl_status read_address(const struct tl_json_value *value, struct tl_arena *arena, const char **ret_address,
                                   struct tl_error *ret_error)
{
    char canonical[TL_ADDRESS_BYTES];
    struct tl_error reason;
    enum tl_status status = tl_json_expect(value, JSON_STRING, "an address such as \"0.0.0.0:4000\"", ret_error);
    if (status != TL_OK) return status;
    const char *text = json_string_value(value->json);
    status = tl_address_check(text, TL_ADDRESS_LISTEN, canonical, &reason);
    if (status != TL_OK) return tl_json_fail(value, status, ret_error, "%s", reason.message);
    char *address = tl_arena_format(arena, "%s", text);
    if (!address) return tl_json_no_memory(value->doc->source, ret_error);
    *ret_address = address;
    return TL_OK;
}

/* True when an element in front of this one has the same text. */
static bool has_same_text(const struct tl_json_value *list, const struct tl_json_value *element)
{
    const char *text = json_string_value(element->json);
    for (size_t i = 0; i < element->index; i++) {
        const json_t *other = json_array_get(list->json, i);
        if (json_is_string(other) && strcmp(json_string_value(other), text) == 0) return true;
    }
    return false;
}

/* The name as seen from the folder. NULL: no memory. */
static char *place_file(struct tl_arena *arena, const char *folder, const char *name)
{
    bool is_relative = folder && folder[0] != '\0' && name[0] != '/';
    const char *slash = is_relative && folder[strlen(folder) - 1] != '/' ? "/" : "";
    return tl_arena_format(arena, "%s%s%s", is_relative ? folder : "", slash, name);
}

/* A file or a folder; `what` says which. */
static enum tl_status read_path(const struct tl_json_value *value, const char *what, struct tl_arena *arena,
                                const char *folder, const char **ret_path, struct tl_error *ret_error)
{
    enum tl_status status = tl_json_expect(value, JSON_STRING, what, ret_error);
    if (status != TL_OK) return status;
    const char *name = json_string_value(value->json);
    char *placed = name[0] != '\0' ? place_file(arena, folder, name) : NULL;
    if (name[0] != '\0' && !placed) return tl_json_no_memory(value->doc->source, ret_error);
    *ret_path = placed;
    return TL_OK;
}

static enum tl_status read_file(const struct tl_json_value *list, const struct tl_json_value *element,
                                struct tl_arena *arena, const char *folder, const char **ret_file,
                                struct tl_error *ret_error)
{
    char quoted[TL_QUOTE_BYTES];
    enum tl_status status = tl_json_expect(element, JSON_STRING, "a file such as \"model.safetensors\"", ret_error);
    if (status != TL_OK) return status;
    const char *name = json_string_value(element->json);
    if (name[0] == '\0') {
        return tl_json_fail(element, TL_INVALID_ARGUMENT, ret_error, "an empty file name; name a file or remove it");
    }
    if (has_same_text(list, element)) {
        return tl_json_fail(element, TL_INVALID_ARGUMENT, ret_error, "%s is published twice; keep one",
                            tl_quote(name, quoted));
    }
    char *file = place_file(arena, folder, name);
    if (!file) return tl_json_no_memory(element->doc->source, ret_error);
    *ret_file = file;
    return TL_OK;
}

static enum tl_status read_files(const struct tl_json_value *value, struct tl_arena *arena, const char *folder,
                                 struct tl_settings *settings, struct tl_error *ret_error)
{
    enum tl_status status = tl_json_expect(value, JSON_ARRAY, "a list of files", ret_error);
    if (status != TL_OK) return status;
    size_t count = json_array_size(value->json);
    if (count > TL_MAX_PUBLISHED_FILES) {
        return tl_json_fail(value, TL_INVALID_ARGUMENT, ret_error, "%zu files are too many; a task may publish %d",
                            count, TL_MAX_PUBLISHED_FILES);
    }
    const char **files = tl_arena_alloc_array(arena, count, sizeof(*files));
    if (!files) return tl_json_no_memory(value->doc->source, ret_error);
    struct tl_json_value element;
    TL_JSON_FOREACH(value, element)
    {
        files[element.index] = ""; /* what stays of a name that is wrong */
        status = read_file(value, &element, arena, folder, &files[element.index], ret_error);
        status = tl_json_collect(value->doc, status, ret_error);
        if (status != TL_OK) return status;
    }
    settings->publish = count > 0 ? files : NULL;
    settings->publish_count = count;
    return TL_OK;
}

static enum tl_status read_devices(const struct tl_json_value *value, struct tl_arena *arena, const char **ret_devices,
                                   struct tl_error *ret_error)
{
    struct tl_error reason;
    char *devices = NULL;
    enum tl_status status = tl_json_expect(value, JSON_STRING, "a text such as \"mlx5_0:1,^mlx5_1\"", ret_error);
    if (status != TL_OK) return status;
    const char *text = json_string_value(value->json);
    status = tl_device_list_check(text, &reason);
    if (status != TL_OK) return tl_json_fail(value, status, ret_error, "%s", reason.message);
    if (text[0] != '\0') {
        devices = tl_arena_format(arena, "%s", text);
        if (!devices) return tl_json_no_memory(value->doc->source, ret_error);
    }
    *ret_devices = devices;
    return TL_OK;
}

static enum tl_status read_tensor_device(const struct tl_json_value *value, struct tl_device *ret_device,
                                         struct tl_error *ret_error)
{
    char quoted[TL_QUOTE_BYTES];
    enum tl_status status = tl_json_expect(value, JSON_STRING, "\"host\", or a GPU such as \"gpu:0\"", ret_error);
    if (status != TL_OK) return status;
    const char *name = json_string_value(value->json);
    if (tl_device_name_parse(name, ret_device)) return TL_OK;
    return tl_json_fail(value, TL_INVALID_ARGUMENT, ret_error,
                        "%s is no device; write \"host\", or a GPU such as \"gpu:0\" (tensorlane devices lists them)",
                        tl_quote(name, quoted));
}

static enum tl_status read_bool(const struct tl_json_value *value, bool *ret_bool, struct tl_error *ret_error)
{
    if (!json_is_boolean(value->json)) {
        return tl_json_fail(value, TL_INVALID_ARGUMENT, ret_error, "must be true or false, not %s",
                            tl_json_type_name(value->json));
    }
    *ret_bool = json_is_true(value->json);
    return TL_OK;
}

enum tl_status tl_setting_read(const struct tl_setting *setting, const struct tl_json_value *value,
                               struct tl_arena *arena, const char *folder, struct tl_settings *settings,
                               struct tl_error *ret_error)
{
    switch (setting->kind) {
    case TL_SETTING_CHOICE:
        return tl_choice_read(setting->choices, value, field(settings, setting), ret_error);
    case TL_SETTING_BOOL:
        return read_bool(value, field(settings, setting), ret_error);
    case TL_SETTING_ADDRESS:
        return read_address(value, arena, field(settings, setting), ret_error);
    case TL_SETTING_FILES:
        return read_files(value, arena, folder, settings, ret_error);
    case TL_SETTING_FILE:
        return read_path(value, "a file such as \"certs/ca.pem\"", arena, folder, field(settings, setting), ret_error);
    case TL_SETTING_FOLDER:
        return read_path(value, "a folder such as \"/run/tensorlane\"", arena, folder, field(settings, setting),
                         ret_error);
    case TL_SETTING_NETWORKS:
        return tl_network_list_read(value, arena, field(settings, setting), ret_error);
    case TL_SETTING_DEVICES:
        return read_devices(value, arena, field(settings, setting), ret_error);
    case TL_SETTING_TENSOR_DEVICE:
        return read_tensor_device(value, field(settings, setting), ret_error);
    case TL_SETTING_ALLOW:
        return tl_allow_list_read(value, arena, &settings->security, ret_error);
    case TL_SETTING_SIZE:
    case TL_SETTING_COUNT:
    case TL_SETTING_DURATION:
        break;
    }
    return read_number(setting, value, settings, ret_error);
}

void tl_setting_set_default(const struct tl_setting *setting, struct tl_settings *settings)
{
    int choice = (int)setting->default_value;
    bool flag = setting->default_value != 0;
    const char *text = NULL;
    switch (setting->kind) {
    case TL_SETTING_CHOICE:
        memcpy(field(settings, setting), &choice, sizeof(choice));
        break;
    case TL_SETTING_BOOL:
        memcpy(field(settings, setting), &flag, sizeof(flag));
        break;
    case TL_SETTING_ADDRESS:
    case TL_SETTING_FILE:
    case TL_SETTING_FOLDER:
    case TL_SETTING_NETWORKS:
    case TL_SETTING_DEVICES:
        memcpy(field(settings, setting), &text, sizeof(text));
        break;
    case TL_SETTING_TENSOR_DEVICE:
        memset(field(settings, setting), 0, sizeof(struct tl_device)); /* the host */
        break;
    case TL_SETTING_FILES:
        settings->publish = NULL;
        settings->publish_count = 0;
        break;
    case TL_SETTING_ALLOW:
        tl_allow_list_set_default(&settings->security);
        break;
    case TL_SETTING_SIZE:
    case TL_SETTING_COUNT:
    case TL_SETTING_DURATION:
        memcpy(field(settings, setting), &setting->default_value, sizeof(setting->default_value));
        break;
    }
}
