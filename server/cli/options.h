// SPDX-License-Identifier: Apache-2.0
/*
 * Flags of a command as a table: what they are called, where their values go, what --help says of them.
 *
 *     static struct tl_option items[] = {{"config", 'c', TL_OPTION_TEXT, &path, "FILE", "the cluster's JSON file"}};
 *     int code = tl_options_parse(&options, argc, argv, &first);
 *     if (code >= 0) return code;
 */
#ifndef SERVER_CLI_OPTIONS_H
#define SERVER_CLI_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>

enum tl_option_kind {
    TL_OPTION_FLAG,     /* bool: --flag, --flag=true, --flag=false */
    TL_OPTION_TEXT,     /* const char * */
    TL_OPTION_TEXTS,    /* struct tl_texts: may be given more than once */
    TL_OPTION_DURATION, /* int64_t, nanoseconds, above 0 */
    TL_OPTION_U32,      /* uint32_t */
    TL_OPTION_U64,      /* uint64_t */
    TL_OPTION_REFUSED,  /* known, and an error unless it is =false; help says why */
};

/* Texts in the order in which they were given. Ownership of items: tl_texts_fini; the texts belong to argv. */
struct tl_texts {
    const char **items;
    size_t count;
};

void tl_texts_fini(struct tl_texts *texts);

struct tl_option {
    const char *name;
    char closure; /* 0: none */
    enum tl_option_kind kind;
    void *value;          /* not touched when the flag is not given */
    const char *argument; /* what its value is called in the help; NULL for flags */
    const char *help;     /* NULL: not listed */
};

struct tl_options {
    const char *command;     /* "pull": its name in messages */
    const char *usage;       /* "[PATTERN...] -o PATH", lines separated by '\n' */
    const char *description; /* one paragraph, may be more lines */
    const struct tl_option *items;
    size_t count;
    bool is_single_dash; /* -addr is --addr, as Go's programs have it */
    int usage_exit;      /* exit code of a wrong command line */
};

/* Reads the flags, which may stand before and after the other arguments. Returns -1 to go on, with the index of the
 * first argument that is no flag (they all stand at the end now), or the exit code: 0 after --help, usage_exit after a
 * line on stderr that names the flag and the remedy. */
int tl_options_parse(const struct tl_options *options, int argc, char **argv, int *ret_first);

/* Says that the command line is wrong; returns usage_exit. */
int tl_options_refuse(const struct tl_options *options, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
