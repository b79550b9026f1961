// SPDX-License-Identifier: Apache-2.0
/* JSON, by jansson. A struct tl_json_out is a json_t under a name that keeps jansson's header in this file. */
#include "server/cli/json_out.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/log.h"
#include "server/cli/output.h"

/* Digits of a number that is no integer: nanoseconds of a second. */
#define REAL_DIGITS JSON_REAL_PRECISION(9)

/* Set when something could not be added; what is printed would lack it. Commands print from one thread. */
static bool is_incomplete;

static json_t *as_jansson(struct tl_json_out *json)
{
    return (json_t *)(void *)json;
}

static struct tl_json_out *from_jansson(json_t *json)
{
    if (!json) is_incomplete = true;
    return (struct tl_json_out *)(void *)json;
}

struct tl_json_out *tl_json_out_object(void)
{
    return from_jansson(json_object());
}

void tl_json_out_destroy(struct tl_json_out *json)
{
    json_decref(as_jansson(json));
}

struct tl_json_out *tl_json_out_parse(const char *text, size_t len_bytes)
{
    json_t *json = json_loadb(text, len_bytes, 0, NULL);
    if (json_is_object(json)) return from_jansson(json);
    json_decref(json);
    return NULL;
}

/* Puts value, whose reference it takes, and returns it; NULL when that failed. */
static json_t *put(struct tl_json_out *object, const char *key, json_t *value)
{
    if (json_object_set_new(as_jansson(object), key, value) == 0) return value;
    is_incomplete = true;
    return NULL;
}

static json_t *append(struct tl_json_out *array, json_t *value)
{
    if (json_array_append_new(as_jansson(array), value) == 0) return value;
    is_incomplete = true;
    return NULL;
}

struct tl_json_out *tl_json_out_put_object(struct tl_json_out *object, const char *key)
{
    json_t *member = json_object_get(as_jansson(object), key);
    return from_jansson(json_is_object(member) ? member : put(object, key, json_object()));
}

struct tl_json_out *tl_json_out_put_array(struct tl_json_out *object, const char *key)
{
    json_t *member = json_object_get(as_jansson(object), key);
    return from_jansson(json_is_array(member) ? member : put(object, key, json_array()));
}

struct tl_json_out *tl_json_out_put_new_array(struct tl_json_out *object, const char *key)
{
    return from_jansson(put(object, key, json_array()));
}

struct tl_json_out *tl_json_out_append_object(struct tl_json_out *array)
{
    return from_jansson(append(array, json_object()));
}

static json_t *text_value(const char *text)
{
    json_t *value = json_string(text);
    if (value) return value;
    char *escaped = tl_output_escape(text);
    if (!escaped) return NULL;
    value = json_string(escaped);
    free(escaped);
    return value;
}

void tl_json_out_append_text(struct tl_json_out *array, const char *text)
{
    append(array, text_value(text));
}

void tl_json_out_put_text(struct tl_json_out *object, const char *key, const char *text)
{
    put(object, key, text_value(text));
}

void tl_json_out_put_u64(struct tl_json_out *object, const char *key, uint64_t value)
{
    char digits[24];
    snprintf(digits, sizeof(digits), "%" PRIu64, value);
    put(object, key, value <= INT64_MAX ? json_integer((json_int_t)value) : json_string(digits));
}

void tl_json_out_put_real(struct tl_json_out *object, const char *key, double value)
{
    put(object, key, json_real(value));
}

void tl_json_out_put_bool(struct tl_json_out *object, const char *key, bool value)
{
    put(object, key, json_boolean(value));
}

void tl_json_out_put_json(struct tl_json_out *object, const char *key, const char *value)
{
    json_t *json = json_loads(value, JSON_DECODE_ANY, NULL);
    put(object, key, json ? json : text_value(value));
}

void tl_json_out_put_incarnation(struct tl_json_out *object, const char *key, uint64_t incarnation)
{
    char digits[24];
    snprintf(digits, sizeof(digits), TL_INCARNATION_FORMAT, incarnation);
    put(object, key, json_string(digits));
}

void tl_json_out_put_annotations(struct tl_json_out *object, const struct tl_annotations *annotations)
{
    size_t count;
    const struct tl_annotation *items = tl_annotations_items(annotations, &count);
    for (size_t i = 0; i < count; i++)
        tl_json_out_put_text(object, items[i].key, items[i].value);
}

char *tl_json_out_text(struct tl_json_out *json, bool is_one_line)
{
    size_t layout = is_one_line ? JSON_COMPACT : JSON_INDENT(2);
    char *text = is_incomplete ? NULL : json_dumps(as_jansson(json), layout | REAL_DIGITS);
    tl_json_out_destroy(json);
    return text;
}

bool tl_json_out_print(struct tl_json_out *json, bool is_one_line)
{
    char *text = tl_json_out_text(json, is_one_line);
    if (!text) return false;
    tl_output_line(text);
    free(text);
    return true;
}
