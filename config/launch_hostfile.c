// SPDX-License-Identifier: Apache-2.0
/* Host files, as Open MPI ("host slots=8"), MPICH ("host:8"), PBS and LSF (a line for each task) write them. */
#include <ctype.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "config/launch.h"
#include "config/quote.h"

/* A number of tasks: 1 to TL_LAUNCH_MAX_TASKS. */
static bool parse_count(const char *text, uint32_t *ret_count)
{
    char *end;
    if (!isdigit((unsigned char)*text)) return false;
    unsigned long count = strtoul(text, &end, 10);
    if (*end || count == 0 || count > TL_LAUNCH_MAX_TASKS) return false;
    *ret_count = (uint32_t)count;
    return true;
}

/* Splits "host:8" and "[v6]:8"; an IPv6 address without brackets has no number. */
static bool split_host(char *word, uint32_t *ret_count)
{
    char *bracket = word[0] == '[' ? strchr(word, ']') : NULL;
    if (bracket && bracket[1] && bracket[1] != ':') return false;
    char *colon = bracket ? strchr(bracket, ':') : strchr(word, ':');
    if (bracket) memmove(word, word + 1, strlen(word));
    if (bracket) {
        bracket[-1] = '\0';
        colon = colon ? colon - 1 : NULL;
    } else if (colon && strchr(colon + 1, ':')) {
        return true;
    }
    if (!colon) return true;
    *colon = '\0';
    return parse_count(colon + 1, ret_count);
}

/* "slots=8" sets the number; what else launchers write with an equals sign says nothing about it. */
static bool read_word(const char *word, uint32_t *count)
{
    if (strncmp(word, "slots=", 6) == 0) return parse_count(word + 6, count);
    return strchr(word, '=') != NULL;
}

static enum tl_status read_line(struct tl_launch *launch, char *line, unsigned number, uint32_t per_host,
                                struct tl_error *ret_error)
{
    static const char blanks[] = " \t\r\v\f";
    char quoted[TL_QUOTE_BYTES], *rest = NULL;
    uint32_t count = 1;
    size_t length = strcspn(line, "#");
    line[length] = '\0';
    char *host = strtok_r(line, blanks, &rest);
    if (!host) return TL_OK;
    if (!split_host(host, &count))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "line %u: behind the colon of a host stands how many tasks "
                            "it has, a number of 1 to %u",
                            number, TL_LAUNCH_MAX_TASKS);
    for (char *word; (word = strtok_r(NULL, blanks, &rest)) != NULL;) {
        if (!read_word(word, &count))
            return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                                "line %u: %s; a line is \"HOST\", \"HOST:N\" or \"HOST slots=N\"", number,
                                tl_quote(word, quoted));
    }
    /* With a number for each host it counts once, however often the file names it. */
    if (per_host) count = tl_launch_find(launch, host) ? 0 : per_host;
    enum tl_status status = tl_launch_add(launch, host, strlen(host), count, ret_error);
    if (status != TL_OK) tl_error_prefix(ret_error, "line %u: ", number);
    return status;
}

enum tl_status tl_launch_add_hostfile(struct tl_launch *launch, char *text, uint32_t per_host,
                                      struct tl_error *ret_error)
{
    unsigned number = 0;
    for (char *line; (line = strsep(&text, "\n")) != NULL;) {
        enum tl_status status = read_line(launch, line, ++number, per_host, ret_error);
        if (status != TL_OK) return status;
    }
    return TL_OK;
}
