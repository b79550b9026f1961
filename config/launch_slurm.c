// SPDX-License-Identifier: Apache-2.0
/*
 * Slurm's node lists and numbers of tasks.
 *
 * A list has items with commas between them; an item is text with any number of ranges in brackets,
 * "rack[0-1]n[01-16]", and the last brackets count fastest. The digits of a range's first number say how wide its
 * numbers are.
 */
#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "config/launch.h"
#include "config/quote.h"

/* Digits of a number in a node list. */
#define MAX_DIGITS 15

/* Where the numbers of tasks are read, "2(x3),1". */
struct counts {
    const char *whole; /* NULL: each host has value */
    const char *rest;
    uint32_t value;
    uint32_t left; /* hosts that still have value */
};

struct expansion {
    struct tl_launch *launch;
    const char *node_list;
    struct counts counts;
    char name[TL_LAUNCH_HOST_BYTES];
    struct tl_error *ret_error;
};

static enum tl_status fail_list(const struct expansion *expansion, const char *why)
{
    char quoted[TL_QUOTE_BYTES];
    return tl_error_set(expansion->ret_error, TL_INVALID_ARGUMENT, "%s: %s", tl_quote(expansion->node_list, quoted),
                        why);
}

/* Reads digits at *at and moves it behind them. */
static bool read_number(const char **at, uint64_t *ret_number, int *ret_digits)
{
    uint64_t number = 0;
    int digits = 0;
    for (; isdigit((unsigned char)**at); (*at)++) {
        if (++digits > MAX_DIGITS) return false;
        number = number * 10 + (uint64_t)(**at - '0');
    }
    *ret_number = number;
    *ret_digits = digits;
    return digits > 0;
}

/* Takes the next entry, such as "2(x3)". */
static bool read_count(struct counts *counts)
{
    uint64_t value, repeat = 1;
    int digits;
    const char *at = counts->rest;
    if (!read_number(&at, &value, &digits)) return false;
    if (strncmp(at, "(x", 2) == 0) {
        at += 2;
        if (!read_number(&at, &repeat, &digits) || *at++ != ')') return false;
    }
    if (*at == ',')
        at++;
    else if (*at)
        return false;
    if (value == 0 || value > TL_LAUNCH_MAX_TASKS || repeat == 0 || repeat > UINT32_MAX) return false;
    *counts = (struct counts){counts->whole, at, (uint32_t)value, (uint32_t)repeat};
    return true;
}

static enum tl_status fail_counts(const struct expansion *expansion, const char *why)
{
    char quoted[TL_QUOTE_BYTES];
    return tl_error_set(expansion->ret_error, TL_INVALID_ARGUMENT, "%s: %s", tl_quote(expansion->counts.whole, quoted),
                        why);
}

static enum tl_status add_host(struct expansion *expansion, size_t name_bytes)
{
    struct counts *counts = &expansion->counts;
    if (counts->whole && counts->left == 0) {
        if (!*counts->rest) return fail_counts(expansion, "has fewer numbers of tasks than the node list has nodes");
        if (!read_count(counts)) return fail_counts(expansion, "is no list of numbers of tasks, such as \"2(x3),1\"");
    }
    if (counts->whole) counts->left--;
    return tl_launch_add(expansion->launch, expansion->name, name_bytes, counts->value, expansion->ret_error);
}

static enum tl_status expand(struct expansion *expansion, size_t name_bytes, const char *item, const char *end);

/* Expands the numbers of one range, "001-004" or "7", which *at is moved behind, each with what follows the brackets.
 */
static enum tl_status expand_range(struct expansion *expansion, size_t name_bytes, const char **at, const char *rest,
                                   const char *end)
{
    uint64_t first, last;
    int width, digits;
    enum tl_status status = TL_OK;
    if (!read_number(at, &first, &width)) return fail_list(expansion, "a range has no number");
    last = first;
    if (**at == '-') {
        (*at)++;
        if (!read_number(at, &last, &digits)) return fail_list(expansion, "a range has no last number");
    }
    if (last < first) return fail_list(expansion, "a range ends before it begins");
    for (uint64_t number = first; status == TL_OK && number <= last; number++) {
        size_t space = sizeof(expansion->name) - name_bytes;
        int length = snprintf(expansion->name + name_bytes, space, "%0*llu", width, (unsigned long long)number);
        if ((size_t)length >= space) return fail_list(expansion, "a name is too long");
        status = expand(expansion, name_bytes + (size_t)length, rest, end);
    }
    return status;
}

/* Adds all hosts that the item stands for, whose names begin with the name_bytes bytes that are there. */
static enum tl_status expand(struct expansion *expansion, size_t name_bytes, const char *item, const char *end)
{
    for (; item < end && *item != '['; item++) {
        if (name_bytes + 1 >= sizeof(expansion->name)) return fail_list(expansion, "a name is too long");
        expansion->name[name_bytes++] = *item;
    }
    if (item == end) return add_host(expansion, name_bytes);
    const char *rest = memchr(item, ']', (size_t)(end - item));
    if (!rest) return fail_list(expansion, "a bracket is not closed");
    const char *at = item;
    do {
        at++;
        enum tl_status status = expand_range(expansion, name_bytes, &at, rest + 1, end);
        if (status != TL_OK) return status;
    } while (*at == ',');
    return at == rest ? TL_OK : fail_list(expansion, "a range has another character than digits, - and ,");
}

/* The end of the item that begins here: the next comma outside brackets, or the end of the list. */
static const char *item_end(const char *item)
{
    bool is_inside = false;
    for (; *item && (*item != ',' || is_inside); item++) {
        if (*item == '[') is_inside = true;
        if (*item == ']') is_inside = false;
    }
    return item;
}

enum tl_status tl_launch_add_slurm(struct tl_launch *launch, const char *node_list, const char *tasks_per_node,
                                   uint32_t per_host, struct tl_error *ret_error)
{
    struct expansion expansion = {
        .launch = launch,
        .node_list = node_list,
        .counts = {.whole = tasks_per_node, .rest = tasks_per_node, .value = per_host},
        .ret_error = ret_error,
    };
    for (const char *item = node_list, *end;; item = end + 1) {
        end = item_end(item);
        enum tl_status status = expand(&expansion, 0, item, end);
        if (status != TL_OK) return status;
        if (!*end) break;
    }
    if (tasks_per_node && (expansion.counts.left > 0 || *expansion.counts.rest))
        return fail_counts(&expansion, "has more numbers of tasks than the node list has nodes");
    return TL_OK;
}
