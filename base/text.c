// SPDX-License-Identifier: Apache-2.0
/*
 * Text from outside. All functions accept any NUL-terminated bytes; none depends on the locale, allocates memory or
 * takes more time than the product of the lengths of its arguments.
 */
#include "base/text.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"

/* ------------------------------------------------------------------------------------------------------- UTF-8 -- */

size_t tl_text_utf8_char_len(const char *text, size_t len_bytes)
{
    const unsigned char *bytes = (const unsigned char *)text;
    size_t len;
    unsigned char low = 0x80, high = 0xBF; /* range of the second byte; it rules out overlong forms and surrogates */
    if (len_bytes == 0) return 0;
    if (bytes[0] < 0x80) return 1;
    if (bytes[0] < 0xC2 || bytes[0] > 0xF4) return 0;
    if (bytes[0] < 0xE0) {
        len = 2;
    } else if (bytes[0] < 0xF0) {
        len = 3;
        if (bytes[0] == 0xE0) low = 0xA0;
        if (bytes[0] == 0xED) high = 0x9F;
    } else {
        len = 4;
        if (bytes[0] == 0xF0) low = 0x90;
        if (bytes[0] == 0xF4) high = 0x8F;
    }
    if (len_bytes < len || bytes[1] < low || bytes[1] > high) return 0;
    for (size_t i = 2; i < len; i++)
        if ((bytes[i] & 0xC0) != 0x80) return 0;
    return len;
}

/* Returns whether each of the eight bytes is ASCII and none is NUL. */
static inline bool is_plain(uint64_t bytes)
{
    return ((bytes | (bytes - UINT64_C(0x0101010101010101))) & UINT64_C(0x8080808080808080)) == 0;
}

/* Returns how many bytes from the first on are certainly plain. */
static size_t count_plain(const char *text, size_t len_bytes)
{
    size_t place = 0;
    uint64_t bytes;
    for (; len_bytes - place >= sizeof(bytes); place += sizeof(bytes)) {
        memcpy(&bytes, text + place, sizeof(bytes));
        if (!is_plain(bytes)) return place;
    }
    uint32_t first, last; /* The first and last four bytes of the rest; together they cover it. */
    if (len_bytes - place < sizeof(first)) return place;
    memcpy(&first, text + place, sizeof(first));
    memcpy(&last, text + len_bytes - sizeof(last), sizeof(last));
    return is_plain((uint64_t)first << 32 | last) ? len_bytes : place;
}

bool tl_text_is_utf8(const char *text, size_t len_bytes)
{
    for (size_t place = count_plain(text, len_bytes); place < len_bytes;) {
        if ((signed char)text[place] > 0) { /* ASCII */
            place++;
            continue;
        }
        size_t len = tl_text_utf8_char_len(text + place, len_bytes - place);
        if (len == 0 || text[place] == '\0') return false;
        place += len;
    }
    return true;
}

void tl_text_make_utf8(char *text, size_t len_bytes)
{
    for (size_t place = 0; place < len_bytes;) {
        size_t len = tl_text_utf8_char_len(text + place, len_bytes - place);
        if (len == 0) text[place] = '?';
        place += len > 0 ? len : 1;
    }
}

/* ------------------------------------------------------------------------------------------ numbers with units -- */

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* A decimal number: whole + fraction / scale. */
struct decimal {
    uint64_t whole;
    uint64_t fraction;
    uint64_t scale;
};

/* Parses digits, optionally a point and digits; moves *cursor behind them. Of the fraction 18 digits count. */
static bool parse_decimal(const char **cursor, struct decimal *ret_decimal)
{
    const char *c = *cursor;
    struct decimal decimal = {.scale = 1};
    if (!is_digit(*c)) return false;
    for (; is_digit(*c); c++) {
        if (!tl_mul_u64(decimal.whole, 10, &decimal.whole)) return false;
        if (!tl_add_u64(decimal.whole, (uint64_t)(*c - '0'), &decimal.whole)) return false;
    }
    if (*c == '.') {
        if (!is_digit(*++c)) return false;
        for (unsigned digits = 0; is_digit(*c); c++, digits++) {
            if (digits >= 18 && *c != '0') return false;
            if (digits >= 18) continue;
            decimal.fraction = decimal.fraction * 10 + (uint64_t)(*c - '0');
            decimal.scale *= 10;
        }
    }
    *cursor = c;
    *ret_decimal = decimal;
    return true;
}

bool tl_text_parse_size(const char *text, uint64_t *ret_bytes)
{
    static const struct {
        const char *name;
        uint64_t bytes;
    } units[] = {
        {"", 1},
        {"B", 1},
        {"KB", UINT64_C(1000)},
        {"MB", UINT64_C(1000000)},
        {"GB", UINT64_C(1000000000)},
        {"TB", UINT64_C(1000000000000)},
        {"KiB", UINT64_C(1) << 10},
        {"MiB", UINT64_C(1) << 20},
        {"GiB", UINT64_C(1) << 30},
        {"TiB", UINT64_C(1) << 40},
    };
    const char *c = text;
    struct decimal decimal;
    if (!parse_decimal(&c, &decimal)) return false;
    bool has_space = *c == ' ';
    while (*c == ' ')
        c++;
    if (has_space && *c == '\0') return false;
    for (size_t i = 0; i < TL_ARRAY_COUNT(units); i++) {
        if (strcasecmp(c, units[i].name) != 0) continue;
        unsigned __int128 parts = (unsigned __int128)decimal.fraction * units[i].bytes;
        uint64_t bytes;
        if (parts % decimal.scale != 0) return false;
        if (!tl_mul_u64(decimal.whole, units[i].bytes, &bytes)) return false;
        if (!tl_add_u64(bytes, (uint64_t)(parts / decimal.scale), &bytes)) return false;
        *ret_bytes = bytes;
        return true;
    }
    return false;
}

/* Takes a unit of time off *cursor; 0 when there is none. */
static uint64_t parse_time_unit(const char **cursor)
{
    static const struct {
        const char *name;
        uint64_t ns;
    } units[] = {
        {"ns", 1},
        {"us", 1000},
        {"ms", 1000000}, /* before "m" */
        {"s", (uint64_t)TL_NS_PER_SEC},
        {"m", UINT64_C(60) * TL_NS_PER_SEC},
        {"h", UINT64_C(3600) * TL_NS_PER_SEC},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(units); i++) {
        size_t len = strlen(units[i].name);
        if (strncmp(*cursor, units[i].name, len) != 0) continue;
        *cursor += len;
        return units[i].ns;
    }
    return 0;
}

bool tl_text_parse_duration(const char *text, int64_t *ret_ns)
{
    const char *c = text;
    uint64_t total_ns = 0;
    if (strcmp(text, "0") == 0) {
        *ret_ns = 0;
        return true;
    }
    do {
        struct decimal decimal;
        uint64_t part_ns;
        if (!parse_decimal(&c, &decimal)) return false;
        uint64_t unit_ns = parse_time_unit(&c);
        if (unit_ns == 0) return false;
        if (!tl_mul_u64(decimal.whole, unit_ns, &part_ns)) return false;
        unsigned __int128 fraction_ns = (unsigned __int128)decimal.fraction * unit_ns / decimal.scale;
        if (!tl_add_u64(total_ns, part_ns, &total_ns)) return false;
        if (!tl_add_u64(total_ns, (uint64_t)fraction_ns, &total_ns)) return false;
    } while (*c);
    if (total_ns > INT64_MAX) return false;
    *ret_ns = (int64_t)total_ns;
    return true;
}

/* --------------------------------------------------------------------------------------- formatting for people -- */

/* Writes value with three digits and the unit of units[] that fits; every unit is 1000 of the one before. */
static void format_three_digits(double value, const char *const *units, size_t count, char *buffer, size_t capacity)
{
    size_t i = 0;
    /* 999.5 would be printed as 1000. */
    for (; value >= 999.5 && i + 1 < count; i++)
        value /= 1000;
    int decimals = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
    snprintf(buffer, capacity, "%.*f %s", decimals, value, units[i]);
}

char *tl_text_format_size(uint64_t bytes, char *buffer, size_t capacity)
{
    static const char *const units[] = {"KB", "MB", "GB", "TB", "PB", "EB"};
    if (bytes < 1000) {
        snprintf(buffer, capacity, "%u B", (unsigned)bytes);
    } else {
        format_three_digits((double)bytes / 1000, units, TL_ARRAY_COUNT(units), buffer, capacity);
    }
    return buffer;
}

char *tl_text_format_duration(int64_t ns, char *buffer, size_t capacity)
{
    static const char *const units[] = {"us", "ms", "s"};
    int64_t seconds = ns / TL_NS_PER_SEC;
    if (ns < 1000) {
        snprintf(buffer, capacity, "%d ns", ns < 0 ? 0 : (int)ns);
    } else if (seconds < 100) {
        format_three_digits((double)ns / 1000, units, TL_ARRAY_COUNT(units), buffer, capacity);
    } else if (seconds < 3600) {
        snprintf(buffer, capacity, "%dm%02ds", (int)(seconds / 60), (int)(seconds % 60));
    } else {
        snprintf(buffer, capacity, "%lldh%02dm", (long long)(seconds / 3600), (int)(seconds / 60 % 60));
    }
    return buffer;
}

/* ------------------------------------------------------------------------------------------------ nearest name -- */

#define MAX_NEAREST_BYTES 512

/* Edit distance of two texts (insert, delete, replace a byte), or limit + 1 as soon as it is known to be larger. */
static size_t edit_distance(const char *a, size_t a_len, const char *b, size_t b_len, size_t limit)
{
    uint16_t row[MAX_NEAREST_BYTES + 1];
    for (size_t j = 0; j <= b_len; j++)
        row[j] = (uint16_t)j;
    for (size_t i = 1; i <= a_len; i++) {
        size_t diagonal = row[0], smallest = i;
        row[0] = (uint16_t)i;
        for (size_t j = 1; j <= b_len; j++) {
            size_t distance = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            distance = tl_min_u64(distance, tl_min_u64(row[j], row[j - 1]) + 1);
            row[j] = (uint16_t)distance;
            smallest = tl_min_u64(smallest, distance);
        }
        if (smallest > limit) return limit + 1;
    }
    return row[b_len];
}

const char *tl_text_nearest(const char *name, const char *const *candidates, size_t count)
{
    const char *nearest = NULL;
    size_t name_len = strlen(name);
    if (name_len > MAX_NEAREST_BYTES) return NULL;
    size_t limit = tl_max_u64(name_len / 3, 2);
    for (size_t i = 0; i < count; i++) {
        size_t len = strlen(candidates[i]);
        if (len > MAX_NEAREST_BYTES || len > name_len + limit || name_len > len + limit) continue;
        size_t distance = edit_distance(name, name_len, candidates[i], len, limit);
        bool has_something_in_common = distance == 0 || distance < tl_max_u64(name_len, len);
        if (distance > limit || !has_something_in_common) continue;
        nearest = candidates[i];
        if (distance == 0) break;
        limit = distance - 1;
    }
    return nearest;
}

void tl_text_host_name(char *ret_text, size_t capacity)
{
    if (gethostname(ret_text, capacity) != 0) ret_text[0] = '\0';
    ret_text[capacity - 1] = '\0';
    if (!tl_text_is_utf8(ret_text, strlen(ret_text))) ret_text[0] = '\0';
}
