// SPDX-License-Identifier: Apache-2.0
/*
 * Checks the list of users when the configuration is read. Which users there are only the worker's machine can tell, so
 * that names stay names; numbers become text, and the entries are joined by commas, which no name has.
 */
#include "config/user_list.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "config/config.h"
#include "config/quote.h"

/* Longest name of a user, as useradd has it. */
#define MAX_NAME_CHARACTERS 32
/* What useradd takes; a machine's own rules may be stricter. */
#define NAME_CHARACTERS "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-"
/* The largest number means nobody. */
#define MAX_UID (UINT32_MAX - 1)

static bool is_name(const char *text)
{
    size_t len = strspn(text, NAME_CHARACTERS);
    return len > 0 && len <= MAX_NAME_CHARACTERS && text[len] == '\0' && strchr("0123456789-.", text[0]) == NULL;
}

/* One entry as text. */
static enum tl_status read_entry(const struct tl_json_value *entry, char *ret_text, size_t capacity,
                                 struct tl_error *ret_error)
{
    char quoted[TL_QUOTE_BYTES];
    if (json_is_integer(entry->json)) {
        json_int_t uid = json_integer_value(entry->json);
        if (uid < 0 || uid > (json_int_t)MAX_UID) {
            return tl_json_fail(entry, TL_INVALID_ARGUMENT, ret_error,
                                "%" JSON_INTEGER_FORMAT " is no number of a user; it may be 0 to %u", uid,
                                (unsigned)MAX_UID);
        }
        snprintf(ret_text, capacity, "%" JSON_INTEGER_FORMAT, uid);
        return TL_OK;
    }
    enum tl_status status = tl_json_expect(entry, JSON_STRING, "a user's name or number", ret_error);
    if (status != TL_OK) return status;
    const char *name = json_string_value(entry->json);
    if (strcmp(name, "any") == 0 || strcmp(name, "same") == 0) {
        return tl_json_fail(entry, TL_INVALID_ARGUMENT, ret_error, "\"%s\" stands alone, not in a list", name);
    }
    if (!is_name(name)) {
        return tl_json_fail(entry, TL_INVALID_ARGUMENT, ret_error, "%s is no name of a user; write one, or a number",
                            tl_quote(name, quoted));
    }
    snprintf(ret_text, capacity, "%s", name);
    return TL_OK;
}

static enum tl_status read_list(const struct tl_json_value *value, struct tl_arena *arena, const char **ret_users,
                                struct tl_error *ret_error)
{
    char list[TL_LOCAL_MAX_USERS * (MAX_NAME_CHARACTERS + 1) + 1] = "";
    char text[MAX_NAME_CHARACTERS + 1];
    struct tl_json_value entry;
    size_t count = json_array_size(value->json), used = 0;
    if (count > TL_LOCAL_MAX_USERS) {
        return tl_json_fail(value, TL_INVALID_ARGUMENT, ret_error, "%zu users are too many; there may be %d", count,
                            TL_LOCAL_MAX_USERS);
    }
    TL_JSON_FOREACH(value, entry)
    {
        enum tl_status status = read_entry(&entry, text, sizeof(text), ret_error);
        if (status != TL_OK) return status;
        used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%s", used > 0 ? "," : "", text);
    }
    const char *users = count > 0 ? tl_arena_format(arena, "%s", list) : NULL;
    if (count > 0 && !users) return tl_json_no_memory(value->doc->source, ret_error);
    *ret_users = users;
    return TL_OK;
}

enum tl_status tl_user_list_read(const struct tl_json_value *value, struct tl_arena *arena, const char **ret_users,
                                 struct tl_error *ret_error)
{
    char quoted[TL_QUOTE_BYTES];
    if (json_is_array(value->json)) return read_list(value, arena, ret_users, ret_error);
    enum tl_status status = tl_json_expect(value, JSON_STRING, "\"same\", \"any\" or a list of users", ret_error);
    if (status != TL_OK) return status;
    const char *word = json_string_value(value->json);
    if (strcmp(word, "same") == 0) {
        *ret_users = NULL;
    } else if (strcmp(word, "any") == 0) {
        *ret_users = "any";
    } else {
        return tl_json_fail(value, TL_INVALID_ARGUMENT, ret_error,
                            "%s is neither \"same\" nor \"any\"; write one of them, or a list of users",
                            tl_quote(word, quoted));
    }
    return TL_OK;
}

const char *tl_user_list_format(const char *users, struct tl_arena *arena)
{
    char list[TL_LOCAL_MAX_USERS * (MAX_NAME_CHARACTERS + 5) + 3];
    size_t used = 0;
    if (!users) return "\"same\"";
    if (strcmp(users, "any") == 0) return "\"any\"";
    for (const char *entry = users; *entry != '\0';) {
        size_t len = strcspn(entry, ",");
        const char *quote = entry[0] >= '0' && entry[0] <= '9' ? "" : "\"";
        used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%s%.*s%s", used > 0 ? ", " : "[", quote, (int)len,
                                 entry, quote);
        entry += len + (entry[len] == ',');
    }
    return tl_arena_format(arena, "%s]", list);
}
