// SPDX-License-Identifier: Apache-2.0
/*
 * A JSON text that was read, with the place of every value: what the other files of this folder walk over.
 *
 * Happy path: open; iterate with first and next, which see jansson's values and the scanner's nodes side by side;
 * close. Failure modes: every error that a walker finds is composed here, "FILE:LINE:COLUMN: PATH: message".
 */
#ifndef CONFIG_JSON_DOC_H
#define CONFIG_JSON_DOC_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tensorlane/status.h>

#include "config/config.h"
#include "config/json_place.h"

/* Larger texts are refused. */
#define TL_JSON_MAX_BYTES ((size_t)16 << 20)

struct tl_json_doc {
    const char *source; /* the file's name in messages */
    json_t *root;       /* an object */
    struct tl_json_places places;
    size_t line_offset; /* where the last line number was asked for, and what it was */
    unsigned line;
    struct tl_config_errors *errors; /* collects errors; NULL: the first error ends the reading */
    size_t error_offset;             /* the place that the last error names */
};

/* One value of the document. Copies are as good as the original. */
struct tl_json_value {
    struct tl_json_doc *doc;
    json_t *json;    /* borrowed from the document */
    const char *key; /* NULL for the root and for elements of arrays */
    size_t index;    /* index of an element of an array */
    uint32_t node;
};

/* Reads a text, whose root must be an object; text and source must stay until close.
 * Errors: TL_INVALID_ARGUMENT: no JSON object, a key that appears twice, more than TL_JSON_MAX_BYTES.
 * TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_json_doc_open(struct tl_json_doc *doc, const char *text, size_t len_bytes, const char *source,
                                struct tl_error *ret_error) TL_MUST_USE;
void tl_json_doc_close(struct tl_json_doc *doc);

struct tl_json_value tl_json_root(struct tl_json_doc *doc);

/* The first member of an object or element of an array, and the one after it. False when there is none, or when the
 * parent is neither. */
bool tl_json_first(const struct tl_json_value *parent, struct tl_json_value *ret_child);
bool tl_json_next(const struct tl_json_value *parent, struct tl_json_value *child);

/* The member with this key. False when there is none. */
bool tl_json_member(const struct tl_json_value *object, const char *key, struct tl_json_value *ret_member);

#define TL_JSON_FOREACH(parent, child)                                                                                 \
    for (bool child##_is = tl_json_first(parent, &(child)); child##_is; child##_is = tl_json_next(parent, &(child)))

/* "an object", "a string", for messages. */
const char *tl_json_type_name(const json_t *json);

/* The line on which a member starts, from 1. Cheap when asked in the order of the text. */
unsigned tl_json_line(const struct tl_json_value *value);

/* Composes an error that points at the value, or at its key, and returns the code. */
enum tl_status tl_json_fail(const struct tl_json_value *value, enum tl_status code, struct tl_error *ret_error,
                            const char *format, ...) __attribute__((format(printf, 4, 5)));
enum tl_status tl_json_fail_key(const struct tl_json_value *value, enum tl_status code, struct tl_error *ret_error,
                                const char *format, ...) __attribute__((format(printf, 4, 5)));

/* The error for a name that is none of the candidates: at the key, with the nearest candidate or, when none is near,
 * all of them (as long as they are few). `what` says what the name should be, "setting". */
enum tl_status tl_json_fail_unknown_key(const struct tl_json_value *value, const char *what,
                                        const char *const *candidates, size_t count, struct tl_error *ret_error);

/* TL_OK when the value is of the type; else the error, "must be WHAT, not a string". */
enum tl_status tl_json_expect(const struct tl_json_value *value, json_type type, const char *what,
                              struct tl_error *ret_error) TL_MUST_USE;

/* Collects an error, so that reading can go on behind it. Returns TL_OK where it can: the status is TL_OK, or the error
 * was collected. Otherwise returns the status: the document collects no errors, there is no memory, or there are too
 * many errors. An error that was collected before is collected once. */
enum tl_status tl_json_collect(const struct tl_json_doc *doc, enum tl_status status,
                               const struct tl_error *error) TL_MUST_USE;

/* The end of a source's name, short enough for a message. */
const char *tl_json_shown_source(const char *source);

/* "no memory for the configuration". */
enum tl_status tl_json_no_memory(const char *source, struct tl_error *ret_error);

/* Writes "no protocol "grcp"; did you mean "grpc"?", or the list, to the buffer: the end of a message about a name. */
char *tl_json_suggest(const char *name, const char *const *candidates, size_t count, char *buffer, size_t capacity);

#endif
