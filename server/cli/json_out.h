// SPDX-License-Identifier: Apache-2.0
/*
 * JSON for machines, and the few changes that commands make to a configuration's JSON.
 *
 * Values are built from the outside in: tl_json_out_object, then tl_json_out_put... into it. Running out of memory is
 * remembered and reported once, by tl_json_out_print or tl_json_out_text, so that building needs no checks; every
 * function accepts NULL.
 */
#ifndef SERVER_CLI_JSON_OUT_H
#define SERVER_CLI_JSON_OUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tensor/annotations.h"

struct tl_json_out;

/* A new object; NULL when there is no memory. Ownership: tl_json_out_print, tl_json_out_text or tl_json_out_destroy. */
struct tl_json_out *tl_json_out_object(void);
void tl_json_out_destroy(struct tl_json_out *json);

/* Parses an object; NULL when it is none or there is no memory. */
struct tl_json_out *tl_json_out_parse(const char *text, size_t len_bytes);

/* The object or array that is a member of an object, made when there is none. It belongs to its parent. */
struct tl_json_out *tl_json_out_put_object(struct tl_json_out *object, const char *key);
struct tl_json_out *tl_json_out_put_array(struct tl_json_out *object, const char *key);

/* The same, but what the member had is lost. */
struct tl_json_out *tl_json_out_put_new_array(struct tl_json_out *object, const char *key);

/* Appends a new object, or a text, to an array. */
struct tl_json_out *tl_json_out_append_object(struct tl_json_out *array);
void tl_json_out_append_text(struct tl_json_out *array, const char *text);

/* Set a member. Text that is not UTF-8 is escaped. A number above 2^63-1 is written as a text of digits. */
void tl_json_out_put_text(struct tl_json_out *object, const char *key, const char *text);
void tl_json_out_put_u64(struct tl_json_out *object, const char *key, uint64_t value);
void tl_json_out_put_real(struct tl_json_out *object, const char *key, double value);
void tl_json_out_put_bool(struct tl_json_out *object, const char *key, bool value);
/* value is JSON text, of any type; what cannot be read is put as text. */
void tl_json_out_put_json(struct tl_json_out *object, const char *key, const char *value);
/* An incarnation, as the text that logs and tables have as well. */
void tl_json_out_put_incarnation(struct tl_json_out *object, const char *key, uint64_t incarnation);

/* Annotations as members of the object; NULL: none. */
void tl_json_out_put_annotations(struct tl_json_out *object, const struct tl_annotations *annotations);

/* Prints to standard output, indented or on one line, and destroys. False: no memory, nothing was printed. */
bool tl_json_out_print(struct tl_json_out *json, bool is_one_line);

/* The same as text. Ownership: free. NULL: no memory. */
char *tl_json_out_text(struct tl_json_out *json, bool is_one_line);

#endif
