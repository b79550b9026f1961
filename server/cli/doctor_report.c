// SPDX-License-Identifier: Apache-2.0
/*
 * The report of `tensorlane doctor`: collected line by line, printed as text that fits a ticket, or as JSON.
 *
 * Failure mode: a line for which there is no memory is left out; the report remembers that and is not printed, because
 * a report without its faults would be wrong.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <tensorlane/version.h>

#include "base/check.h"
#include "server/cli/doctor.h"
#include "server/cli/json_out.h"
#include "server/cli/output.h"
#include "server/cli/remedy.h"
#include "server/cli/table.h"

static const char *const verdict_names[] = {
    [TL_DOCTOR_OK] = "ok",
    [TL_DOCTOR_NOTE] = "note",
    [TL_DOCTOR_FAULT] = "fault",
    [TL_DOCTOR_UNKNOWN] = "unknown",
};

static const char *const verdict_colours[] = {
    [TL_DOCTOR_OK] = TL_COLOUR_GREEN,
    [TL_DOCTOR_NOTE] = TL_COLOUR_YELLOW,
    [TL_DOCTOR_FAULT] = TL_COLOUR_RED,
    [TL_DOCTOR_UNKNOWN] = TL_COLOUR_YELLOW,
};

void tl_doctor_append(char *list, size_t capacity, const char *text)
{
    size_t len = strlen(list);
    snprintf(list + len, capacity - len, "%s%s", len > 0 ? ", " : "", text);
}

static bool grow(struct tl_doctor_report *report)
{
    if (report->count < report->capacity) return true;
    size_t capacity = report->capacity > 0 ? report->capacity * 2 : 64;
    struct tl_doctor_line *lines = realloc(report->lines, capacity * sizeof(*lines));
    if (!lines) return false;
    report->lines = lines;
    report->capacity = capacity;
    return true;
}

void tl_doctor_add(struct tl_doctor_report *report, enum tl_doctor_verdict verdict, const char *what,
                   const char *format, ...)
{
    va_list arguments;
    if (!grow(report)) {
        report->is_incomplete = true;
        return;
    }
    struct tl_doctor_line *line = &report->lines[report->count++];
    *line = (struct tl_doctor_line){.verdict = verdict};
    snprintf(line->what, sizeof(line->what), "%s", what);
    va_start(arguments, format);
    vsnprintf(line->value, sizeof(line->value), format, arguments);
    va_end(arguments);
}

void tl_doctor_explain(struct tl_doctor_report *report, const char *format, ...)
{
    va_list arguments;
    if (report->is_incomplete) return;
    TL_CHECK(report->count > 0);
    struct tl_doctor_line *line = &report->lines[report->count - 1];
    va_start(arguments, format);
    vsnprintf(line->cause, sizeof(line->cause), format, arguments);
    va_end(arguments);
    const char *remedy;
    size_t cause_bytes = tl_remedy_split(line->cause, &remedy);
    snprintf(line->remedy, sizeof(line->remedy), "%s", remedy);
    line->cause[cause_bytes] = '\0';
}

void tl_doctor_explain_both(struct tl_doctor_report *report, const char *cause, const char *remedy)
{
    if (report->is_incomplete) return;
    TL_CHECK(report->count > 0);
    struct tl_doctor_line *line = &report->lines[report->count - 1];
    snprintf(line->cause, sizeof(line->cause), "%s", cause);
    snprintf(line->remedy, sizeof(line->remedy), "%s", remedy);
}

size_t tl_doctor_count(const struct tl_doctor_report *report, enum tl_doctor_verdict verdict)
{
    size_t count = 0;
    for (size_t i = 0; i < report->count; i++)
        count += report->lines[i].verdict == verdict;
    return count;
}

void tl_doctor_report_fini(struct tl_doctor_report *report)
{
    free(report->lines);
    *report = (struct tl_doctor_report){.lines = NULL};
}

/* ---------------------------------------------------------------------------------------------------- printing -- */

static void read_host_name(char *ret_name, size_t capacity)
{
    if (gethostname(ret_name, capacity) != 0) snprintf(ret_name, capacity, "unknown");
    ret_name[capacity - 1] = '\0';
}

/* Universal time, so that the reports of two machines can be compared. */
static void format_time(char *ret_text, size_t capacity)
{
    struct tm utc;
    time_t now = time(NULL);
    if (!gmtime_r(&now, &utc) || strftime(ret_text, capacity, "%Y-%m-%dT%H:%M:%SZ", &utc) == 0) ret_text[0] = '\0';
}

bool tl_doctor_print_text(const struct tl_doctor_report *report)
{
    static const struct tl_column columns[] = {
        {.title = "VERDICT"},
        {.title = "WHAT", .wraps = true},
        {.title = "VALUE", .wraps = true},
    };
    char host[256], now[32];
    struct tl_table *table = report->is_incomplete ? NULL : tl_table_create(columns, TL_ARRAY_COUNT(columns));
    if (!table) return false;
    for (size_t i = 0; i < report->count; i++) {
        const struct tl_doctor_line *line = &report->lines[i];
        tl_table_add(table, "%s", verdict_names[line->verdict]);
        tl_table_paint(table, verdict_colours[line->verdict]);
        tl_table_add(table, "%s", line->what);
        tl_table_add(table, "%s", line->value);
        tl_table_add_note(table, "cause", line->cause);
        tl_table_add_note(table, "remedy", line->remedy);
    }
    read_host_name(host, sizeof(host));
    format_time(now, sizeof(now));
    printf("tensorlane %s on ", tl_version());
    tl_output_put_escaped(stdout, host);
    printf(", %s\n", now);
    bool is_printed = tl_table_print(table, stdout);
    tl_table_destroy(table);
    printf("%zu faults, %zu notes, %zu unknown, %zu ok\n", tl_doctor_count(report, TL_DOCTOR_FAULT),
           tl_doctor_count(report, TL_DOCTOR_NOTE), tl_doctor_count(report, TL_DOCTOR_UNKNOWN),
           tl_doctor_count(report, TL_DOCTOR_OK));
    return is_printed;
}

bool tl_doctor_print_json(const struct tl_doctor_report *report)
{
    char host[256], now[32];
    if (report->is_incomplete) return false;
    read_host_name(host, sizeof(host));
    format_time(now, sizeof(now));
    struct tl_json_out *root = tl_json_out_object();
    tl_json_out_put_text(root, "version", tl_version());
    tl_json_out_put_text(root, "host", host);
    tl_json_out_put_text(root, "time", now);
    tl_json_out_put_u64(root, "faults", tl_doctor_count(report, TL_DOCTOR_FAULT));
    struct tl_json_out *lines = tl_json_out_put_array(root, "lines");
    for (size_t i = 0; i < report->count; i++) {
        const struct tl_doctor_line *line = &report->lines[i];
        struct tl_json_out *object = tl_json_out_append_object(lines);
        tl_json_out_put_text(object, "verdict", verdict_names[line->verdict]);
        tl_json_out_put_text(object, "what", line->what);
        tl_json_out_put_text(object, "value", line->value);
        tl_json_out_put_text(object, "cause", line->cause);
        tl_json_out_put_text(object, "remedy", line->remedy);
    }
    return tl_json_out_print(root, false);
}
