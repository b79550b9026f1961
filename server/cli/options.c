// SPDX-License-Identifier: Apache-2.0
/*
 * Flags. getopt_long splits the command line; the tables say what a flag means, so that every command checks values and
 * words its errors in the same way.
 */
#include "server/cli/options.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/text.h"
#include "server/cli/command.h"
#include "server/cli/output.h"

#define MAX_ITEMS 32
/* What getopt returns for item i is FIRST_VALUE + i: above every closure. */
#define FIRST_VALUE 256
#define HELP_VALUE (FIRST_VALUE + MAX_ITEMS)
#define HELP_COLUMN 30

void tl_texts_fini(struct tl_texts *texts)
{
    free(texts->items);
    *texts = (struct tl_texts){0};
}

int tl_options_refuse(const struct tl_options *options, const char *format, ...)
{
    char message[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    tl_output_error(options->command, "%s (tensorlane %s --help tells more)", message, options->command);
    return options->usage_exit;
}

/* ------------------------------------------------------------------------------------------------------ values -- */

/* As Go's strconv.ParseBool, in lower case too. */
static bool parse_bool(const char *text, bool *ret_value)
{
    static const char *const yes[] = {"1", "t", "T", "true", "TRUE", "True"};
    static const char *const no[] = {"0", "f", "F", "false", "FALSE", "False"};
    for (size_t i = 0; i < TL_ARRAY_COUNT(yes); i++) {
        if (strcmp(text, yes[i]) != 0 && strcmp(text, no[i]) != 0) continue;
        *ret_value = strcmp(text, yes[i]) == 0;
        return true;
    }
    return false;
}

static bool parse_u64(const char *text, uint64_t max, uint64_t *ret_value)
{
    char *end;
    if (text[0] < '0' || text[0] > '9') return false;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno != 0 || *end || value > max) return false;
    *ret_value = value;
    return true;
}

static bool store_number(const struct tl_option *item, const char *text)
{
    uint64_t number;
    if (!parse_u64(text, item->kind == TL_OPTION_U32 ? UINT32_MAX : UINT64_MAX, &number)) return false;
    if (item->kind == TL_OPTION_U32) {
        *(uint32_t *)item->value = (uint32_t)number;
    } else {
        *(uint64_t *)item->value = number;
    }
    return true;
}

static bool store_duration(const struct tl_option *item, const char *text)
{
    int64_t ns;
    if (!tl_text_parse_duration(text, &ns) || ns == 0) return false;
    *(int64_t *)item->value = ns;
    return true;
}

static bool store_text(struct tl_texts *texts, const char *text, int argc)
{
    if (!texts->items) {
        texts->items = calloc((size_t)argc, sizeof(*texts->items));
        if (!texts->items) return false;
    }
    texts->items[texts->count++] = text;
    return true;
}

/* Stores the value of a flag; -1, or the exit code. */
static int store(const struct tl_options *options, const struct tl_option *item, const char *text, int argc)
{
    bool is_on = true;
    switch (item->kind) {
    case TL_OPTION_FLAG:
    case TL_OPTION_REFUSED:
        if (text && !parse_bool(text, &is_on) && item->kind == TL_OPTION_FLAG)
            return tl_options_refuse(options, "--%s=%s: neither true nor false", item->name, text);
        if (item->kind == TL_OPTION_FLAG) *(bool *)item->value = is_on;
        if (item->kind == TL_OPTION_REFUSED && is_on)
            return tl_options_refuse(options, "--%s: %s", item->name, item->argument);
        return -1;
    case TL_OPTION_TEXT:
        *(const char **)item->value = text;
        return -1;
    case TL_OPTION_TEXTS:
        if (!store_text(item->value, text, argc)) return tl_options_refuse(options, "no memory");
        return -1;
    case TL_OPTION_DURATION:
        if (store_duration(item, text)) return -1;
        return tl_options_refuse(options, "--%s %s: not a duration above zero; write one as 250ms, 1s or 1m30s",
                                 item->name, text);
    case TL_OPTION_U32:
    case TL_OPTION_U64:
        if (store_number(item, text)) return -1;
        return tl_options_refuse(options, "--%s %s: not a whole number from 0 to %" PRIu64, item->name, text,
                                 item->kind == TL_OPTION_U32 ? UINT32_MAX : UINT64_MAX);
    }
    return -1;
}

/* -------------------------------------------------------------------------------------------------------- help -- */

static void print_item(const struct tl_option *item, const char *dashes)
{
    char left[96];
    char closure[8] = "    ";
    if (item->closure) snprintf(closure, sizeof(closure), "-%c, ", item->closure);
    int len = snprintf(left, sizeof(left), "  %s%s%s%s%s", closure, dashes, item->name, item->argument ? " " : "",
                       item->argument ? item->argument : "");
    printf("%s", left);
    if (len >= HELP_COLUMN - 1) {
        printf("\n");
        len = 0;
    }
    printf("%*s", HELP_COLUMN - len, "");
    for (const char *c = item->help; *c; c++) {
        putchar(*c);
        if (*c == '\n') printf("%*s", HELP_COLUMN, "");
    }
    putchar('\n');
}

static int print_help(const struct tl_options *options)
{
    const char *lead = "usage:";
    for (const char *line = options->usage; *line;) {
        int len = (int)strcspn(line, "\n");
        printf("%s tensorlane %s %.*s\n", lead, options->command, len, line);
        lead = "      ";
        line += len + (line[len] == '\n');
    }
    printf("\n%s\n\n", options->description);
    for (size_t i = 0; i < options->count; i++)
        if (options->items[i].help && options->items[i].kind != TL_OPTION_REFUSED)
            print_item(&options->items[i], options->is_single_dash ? "-" : "--");
    static const struct tl_option help = {.name = "help", .closure = 'h', .help = "this text"};
    print_item(&help, options->is_single_dash ? "-" : "--");
    return tl_output_finish(options->command, TL_EXIT_OK);
}

/* ----------------------------------------------------------------------------------------------------- parsing -- */

/* The tables that getopt wants. */
struct parser {
    struct option longs[MAX_ITEMS + 2];
    char closures[2 * MAX_ITEMS + 4];
};

static void build_parser(const struct tl_options *options, struct parser *parser)
{
    char *closure = parser->closures;
    TL_CHECK(options->count <= MAX_ITEMS);
    *closure++ = ':'; /* distinguishes a missing value from an unknown flag */
    *closure++ = 'h';
    for (size_t i = 0; i < options->count; i++) {
        const struct tl_option *item = &options->items[i];
        bool is_flag = item->kind == TL_OPTION_FLAG || item->kind == TL_OPTION_REFUSED;
        parser->longs[i] = (struct option){.name = item->name,
                                           .has_arg = is_flag ? optional_argument : required_argument,
                                           .val = FIRST_VALUE + (int)i};
        if (!item->closure) continue;
        *closure++ = item->closure;
        if (!is_flag) *closure++ = ':';
    }
    *closure = '\0';
    parser->longs[options->count] = (struct option){.name = "help", .val = HELP_VALUE};
    parser->longs[options->count + 1] = (struct option){0};
}

static const struct tl_option *find_closure(const struct tl_options *options, int closure)
{
    for (size_t i = 0; i < options->count; i++)
        if (options->items[i].closure && options->items[i].closure == closure) return &options->items[i];
    return NULL;
}

/* argument is what getopt could not understand, as it was written. */
static int refuse_unknown(const struct tl_options *options, const char *argument)
{
    const char *names[MAX_ITEMS];
    char name[128];
    size_t count = 0, dashes = strspn(argument, "-");
    snprintf(name, sizeof(name), "%.*s", (int)strcspn(argument + dashes, "="), argument + dashes);
    for (size_t i = 0; i < options->count; i++)
        if (options->items[i].help) names[count++] = options->items[i].name;
    const char *nearest = tl_text_nearest(name, names, count);
    if (!nearest) return tl_options_refuse(options, "unknown flag %s", argument);
    return tl_options_refuse(options, "unknown flag %s; did you mean --%s?", argument, nearest);
}

/* Handles what getopt returned, and before that last_closure, the character of a short flag or 0; -1 to go on, or the
 * exit code. */
static int take(const struct tl_options *options, int found, int last_closure, int argc, char **argv)
{
    char closure[3] = {'-', (char)optopt, '\0'};
    const struct tl_option *last = found == '?' && optopt == '=' ? find_closure(options, last_closure) : NULL;
    if (last)
        return tl_options_refuse(options, "-%c=: -%c takes no value; write -%c, or --%s=true or --%s=false",
                                 last_closure, last_closure, last_closure, last->name, last->name);
    if (found == HELP_VALUE || found == 'h') return print_help(options);
    if (found == '?' && optopt > 0 && optopt < FIRST_VALUE) return refuse_unknown(options, closure);
    if (found == '?') return refuse_unknown(options, argv[optind - 1]);
    if (found == ':' && optopt < FIRST_VALUE) {
        const struct tl_option *item = find_closure(options, optopt);
        return tl_options_refuse(options, "-%c lacks its %s", optopt, item ? item->argument : "value");
    }
    if (found == ':') {
        const struct tl_option *item = &options->items[optopt - FIRST_VALUE];
        return tl_options_refuse(options, "--%s lacks its %s", item->name, item->argument);
    }
    const struct tl_option *item =
        found >= FIRST_VALUE ? &options->items[found - FIRST_VALUE] : find_closure(options, found);
    /* With getopt, the value of -o=x would be "=x". */
    if (found < FIRST_VALUE && optarg && optarg[0] == '=' && optarg != argv[optind - 1])
        return tl_options_refuse(options, "-%c%s: write -%c %s or --%s%s", found, optarg, found, optarg + 1, item->name,
                                 optarg);
    return store(options, item, optarg, argc);
}

int tl_options_parse(const struct tl_options *options, int argc, char **argv, int *ret_first)
{
    struct parser parser;
    build_parser(options, &parser);
    unsetenv("POSIXLY_CORRECT"); /* with it, getopt takes no flags behind other arguments */
    int last_closure = 0;
    opterr = 0;
    optind = 0; /* starts anew */
    for (;;) {
        int found = options->is_single_dash ? getopt_long_only(argc, argv, parser.closures, parser.longs, NULL)
                                            : getopt_long(argc, argv, parser.closures, parser.longs, NULL);
        if (found == -1) break;
        int code = take(options, found, last_closure, argc, argv);
        if (code >= 0) return code;
        last_closure = found < FIRST_VALUE ? found : 0;
    }
    *ret_first = optind;
    return -1;
}
