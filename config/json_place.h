// SPDX-License-Identifier: Apache-2.0
/*
 * Where every value of a JSON text stands.
 *
 * jansson checks the text and gives the values, but not their places. This scanner reads the same text again and notes,
 * for every value, where it starts and which value holds it. Nodes are numbered in the order of the text, which is also
 * the order in which jansson gives members and elements (as long as no key appears twice).
 *
 * The text must be one that jansson accepted, or the part in front of the place where it found an error. For any other
 * text the scanner makes some nodes, and reads nothing outside of it.
 */
#ifndef CONFIG_JSON_PLACE_H
#define CONFIG_JSON_PLACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* No node. */
#define TL_JSON_NONE UINT32_MAX

/* Buffer for a path: long ones are cut at the front. */
#define TL_JSON_PATH_BYTES 512

struct tl_json_node {
    uint32_t key;    /* offset of the key's first quote, TL_JSON_NONE for the root and for elements of arrays */
    uint32_t value;  /* offset of the value's first character, TL_JSON_NONE when the text ends before it */
    uint32_t parent; /* TL_JSON_NONE for the root */
    uint32_t end;    /* the first node that is not inside this one */
};

struct tl_json_places {
    const char *text;
    size_t len_bytes;
    struct tl_json_node *nodes;
    uint32_t count;
    uint32_t open; /* the innermost node whose value was not complete at the end of the text */
    void (*release)(void *);
};

/* Scans a text of less than 4 GiB, which must stay. False: no memory. */
bool tl_json_places_init(struct tl_json_places *places, const char *text, size_t len_bytes);
void tl_json_places_fini(struct tl_json_places *places);

/* The first member or element of a node, and the one after it; TL_JSON_NONE when there is none. */
uint32_t tl_json_places_first(const struct tl_json_places *places, uint32_t node);
uint32_t tl_json_places_next(const struct tl_json_places *places, uint32_t node);

/* Another member of the same object with the same key, in front of node; TL_JSON_NONE when there is none. */
uint32_t tl_json_places_find_same_key(const struct tl_json_places *places, uint32_t node);

/* Writes the path of a node, like cluster.ps[0] or jobs."odd.name".rdma; returns the buffer. */
char *tl_json_places_path(const struct tl_json_places *places, uint32_t node, char ret_path[TL_JSON_PATH_BYTES]);

/* Line and column of an offset, both from 1; columns count characters. */
void tl_json_locate(const char *text, size_t offset, unsigned *ret_line, unsigned *ret_column);

#endif
