// SPDX-License-Identifier: Apache-2.0
/*
 * A pattern is a nondeterministic automaton whose states are the bits of a word, or of several: state i says that the
 * first i items of the pattern have matched what was read of the name. An item matches one character; a '*' in front of
 * item i lets state i stay for any character. For a character c, `accepts` has bit i where item i matches c, so that
 *
 *      states = (states & accepts[c]) << 1 | (states & stars)
 *
 * reads it. The name matches when it is over and the last state is set. All characters that no item tells apart are one
 * class, which a binary search finds.
 */
#include "base/glob.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"

#define WORD_BITS 64
#define ANY_CHARACTER UINT32_MAX

/* What an item matches: [first_range, first_range + range_count) of the ranges, or all but these. */
struct item {
    uint32_t first_range, range_count;
    bool is_inverted;
};

struct range {
    uint32_t low, high;
};

/* A pattern while it is compiled; each array has a place for every byte of the pattern. */
struct parsed {
    struct item *items;
    struct range *ranges;
    uint32_t *borders; /* the first character of each class */
    uint32_t item_count, range_count, border_count;
};

struct tl_glob {
    uint32_t item_count, word_count, class_count;
    uint32_t *borders; /* [class_count], ascending, the first is 0 */
    uint64_t *stars;   /* [word_count] */
    uint64_t *accepts; /* [class_count][word_count] */
};

/* Takes one character off *cursor: a code point, or a byte of invalid UTF-8 as a number that is no code point. */
static uint32_t next_char(const char **cursor)
{
    const unsigned char *bytes = (const unsigned char *)*cursor;
    size_t len = tl_text_utf8_char_len(*cursor, strnlen(*cursor, 4));
    if (len == 0) {
        *cursor += 1;
        return 0x80000000u | bytes[0];
    }
    *cursor += len;
    if (len == 1) return bytes[0];
    uint32_t point = bytes[0] & (0x7Fu >> len);
    for (size_t i = 1; i < len; i++)
        point = point << 6 | (bytes[i] & 0x3Fu);
    return point;
}

static uint32_t next_set_char(const char **cursor)
{
    if (**cursor == '\\' && (*cursor)[1]) ++*cursor;
    return next_char(cursor);
}

/* ----------------------------------------------------------------------------------------------------- parsing -- */

static void add_range(struct parsed *parsed, struct item *item, uint32_t low, uint32_t high)
{
    if (low > high) return;
    parsed->ranges[parsed->range_count++] = (struct range){.low = low, .high = high};
    item->range_count++;
}

/* *cursor is behind a '['. True, with the cursor behind the ']', when the set has an end. */
static bool parse_set(struct parsed *parsed, const char **cursor, struct item *item)
{
    const char *p = *cursor;
    item->is_inverted = *p == '!' || *p == '^';
    if (item->is_inverted) p++;
    /* A ']' that comes first is a member. */
    for (bool is_first = true; is_first || *p != ']'; is_first = false) {
        if (*p == '\0') {
            parsed->range_count = item->first_range;
            *item = (struct item){.first_range = item->first_range};
            return false;
        }
        uint32_t low = next_set_char(&p), high = low;
        if (p[0] == '-' && p[1] && p[1] != ']') {
            p++;
            high = next_set_char(&p);
        }
        add_range(parsed, item, low, high);
    }
    *cursor = p + 1;
    return true;
}

/* Reads the pattern; ret_stars has a bit for each state, all zero. */
static void parse(struct parsed *parsed, const char *pattern, uint64_t *ret_stars)
{
    bool may_have_sets = true; /* no '[' without an end has come: after one that has none, none has */
    while (*pattern) {
        if (*pattern == '*') {
            ret_stars[parsed->item_count / WORD_BITS] |= UINT64_C(1) << parsed->item_count % WORD_BITS;
            pattern++;
            continue;
        }
        struct item item = {.first_range = parsed->range_count};
        const char *behind = pattern + 1;
        if (*pattern == '?') {
            pattern++;
            add_range(parsed, &item, 0, ANY_CHARACTER);
        } else if (*pattern == '[' && may_have_sets && (may_have_sets = parse_set(parsed, &behind, &item))) {
            pattern = behind;
        } else {
            uint32_t c = *pattern == '[' ? next_char(&pattern) : next_set_char(&pattern);
            add_range(parsed, &item, c, c);
        }
        parsed->items[parsed->item_count++] = item;
    }
}

static int compare_numbers(const void *a, const void *b)
{
    uint32_t left = *(const uint32_t *)a, right = *(const uint32_t *)b;
    return (left > right) - (left < right);
}

/* Where one class of characters ends and another begins: at both ends of each range. */
static void find_borders(struct parsed *parsed)
{
    uint32_t count = 0, kept = 0;
    parsed->borders[count++] = 0;
    for (uint32_t i = 0; i < parsed->range_count; i++) {
        parsed->borders[count++] = parsed->ranges[i].low;
        if (parsed->ranges[i].high != ANY_CHARACTER) parsed->borders[count++] = parsed->ranges[i].high + 1;
    }
    qsort(parsed->borders, count, sizeof(*parsed->borders), compare_numbers);
    for (uint32_t i = 0; i < count; i++) {
        if (i == 0 || parsed->borders[i] != parsed->borders[kept - 1]) parsed->borders[kept++] = parsed->borders[i];
    }
    parsed->border_count = kept;
}

/* --------------------------------------------------------------------------------------------------- compiling -- */

/* The class that the character belongs to. */
static uint32_t find_class(const struct tl_glob *glob, uint32_t c)
{
    uint32_t first = 0, count = glob->class_count;
    while (count > 1) {
        uint32_t half = count / 2;
        if (glob->borders[first + half] <= c) {
            first += half;
            count -= half;
        } else {
            count = half;
        }
    }
    return first;
}

static void set_accepts(struct tl_glob *glob, const struct parsed *parsed, uint32_t index)
{
    const struct item *item = &parsed->items[index];
    uint64_t bit = UINT64_C(1) << index % WORD_BITS;
    uint64_t *column = &glob->accepts[index / WORD_BITS];
    for (uint32_t i = 0; i < item->range_count; i++) {
        const struct range *range = &parsed->ranges[item->first_range + i];
        for (uint32_t class = find_class(glob, range->low);
             class < glob->class_count && glob->borders[class] <= range->high; class ++)
            column[(size_t) class * glob->word_count] |= bit;
    }
    if (!item->is_inverted) return;
    for (uint32_t class = 0; class < glob->class_count; class ++)
        column[(size_t) class * glob->word_count] ^= bit;
}

static struct tl_glob *compile(const struct parsed *parsed, const uint64_t *stars)
{
    struct tl_glob *glob = calloc(1, sizeof(*glob));
    if (glob == NULL) return NULL;
    glob->item_count = parsed->item_count;
    glob->word_count = parsed->item_count / WORD_BITS + 1;
    glob->class_count = parsed->border_count;
    glob->borders = malloc(glob->class_count * sizeof(*glob->borders));
    glob->stars = malloc(glob->word_count * sizeof(*glob->stars));
    glob->accepts = calloc((size_t)glob->class_count * glob->word_count, sizeof(*glob->accepts));
    if (glob->borders == NULL || glob->stars == NULL || glob->accepts == NULL) {
        tl_glob_destroy(glob);
        return NULL;
    }
    memcpy(glob->borders, parsed->borders, glob->class_count * sizeof(*glob->borders));
    memcpy(glob->stars, stars, glob->word_count * sizeof(*glob->stars));
    for (uint32_t i = 0; i < glob->item_count; i++)
        set_accepts(glob, parsed, i);
    return glob;
}

struct tl_glob *tl_glob_create(const char *pattern)
{
    size_t len = strlen(pattern);
    struct parsed parsed = {0};
    uint64_t *stars = calloc(len / WORD_BITS + 1, sizeof(*stars));
    parsed.items = malloc((len + 1) * sizeof(*parsed.items));
    parsed.ranges = malloc((len + 1) * sizeof(*parsed.ranges));
    parsed.borders = malloc((2 * len + 1) * sizeof(*parsed.borders));
    struct tl_glob *glob = NULL;
    if (stars != NULL && parsed.items != NULL && parsed.ranges != NULL && parsed.borders != NULL) {
        parse(&parsed, pattern, stars);
        find_borders(&parsed);
        glob = compile(&parsed, stars);
    }
    free(stars);
    free(parsed.items);
    free(parsed.ranges);
    free(parsed.borders);
    return glob;
}

void tl_glob_destroy(struct tl_glob *glob)
{
    if (glob == NULL) return;
    free(glob->borders);
    free(glob->stars);
    free(glob->accepts);
    free(glob);
}

/* ---------------------------------------------------------------------------------------------------- matching -- */

bool tl_glob_is_match(const struct tl_glob *glob, const char *name)
{
    uint64_t states[glob->word_count];
    memset(states, 0, sizeof(states));
    states[0] = 1;
    while (*name) {
        const uint64_t *accepts = &glob->accepts[(size_t)find_class(glob, next_char(&name)) * glob->word_count];
        uint64_t carry = 0, any = 0;
        for (uint32_t i = 0; i < glob->word_count; i++) {
            uint64_t moved = states[i] & accepts[i];
            states[i] = moved << 1 | carry | (states[i] & glob->stars[i]);
            carry = moved >> (WORD_BITS - 1);
            any |= states[i];
        }
        if (any == 0) return false;
    }
    return states[glob->item_count / WORD_BITS] >> glob->item_count % WORD_BITS & 1;
}
