// SPDX-License-Identifier: Apache-2.0
/* `tensorlane cert show`: what a certificate says, whether it can be used, and whether the key beside it can. */
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "security/certificate_facts.h"
#include "server/cli/cert.h"
#include "server/cli/json_out.h"
#include "server/cli/output.h"

#define SECONDS_PER_DAY 86400
/* Fewer are worth a warning. */
#define SOON_DAYS 14
#define MAX_WARNINGS 4

struct showing {
    const char *path;
    struct tl_certificate_facts facts;
    int64_t days_left; /* a day that has begun counts; negative: it expired so many days ago */
    bool is_usable;
    struct tl_error warnings[MAX_WARNINGS];
    size_t warning_count;
};

static void warn(struct showing *showing, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void warn(struct showing *showing, const char *format, ...)
{
    va_list arguments;
    char message[TL_ERROR_MESSAGE_BYTES];
    va_start(arguments, format);
    vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    (void)tl_error_set(&showing->warnings[showing->warning_count++], TL_FAILED_PRECONDITION, "%s", message);
}

static const char *format_time(int64_t seconds, char ret_text[32])
{
    time_t time = (time_t)seconds;
    struct tm parts;
    gmtime_r(&time, &parts);
    strftime(ret_text, 32, "%Y-%m-%dT%H:%M:%SZ", &parts);
    return ret_text;
}

/* Finds what is wrong with the certificate itself. */
static void judge_certificate(struct showing *showing)
{
    const struct tl_certificate_facts *facts = &showing->facts;
    int64_t now_s = tl_clock_unix_ns() / TL_NS_PER_SEC;
    char text[32];
    showing->is_usable = true;
    if (!facts->is_authority && facts->name_error.code != TL_OK) {
        warn(showing, "it has no name for tensorlane: %s", facts->name_error.message);
        showing->is_usable = false;
    }
    if (facts->is_key_weak) {
        warn(showing, "its key (%s) is too weak; issue one of EC P-256 or RSA 2048", facts->key_kind);
        showing->is_usable = false;
    }
    int64_t left_s = facts->not_after_s - now_s;
    int64_t rest_of_day_s = left_s > 0 ? SECONDS_PER_DAY - 1 : 1 - SECONDS_PER_DAY; /* a day that has begun counts */
    showing->days_left = (left_s + rest_of_day_s) / SECONDS_PER_DAY;
    if (now_s < facts->not_before_s) {
        warn(showing, "it is not valid before %s; look at the clock of this machine",
             format_time(facts->not_before_s, text));
        showing->is_usable = false;
    } else if (left_s < 0) {
        warn(showing, "it has expired; issue another one (tensorlane cert issue --force)");
        showing->is_usable = false;
    } else if (showing->days_left < SOON_DAYS) {
        warn(showing, "it expires in %" PRId64 " days; issue another one (tensorlane cert issue --force)",
             showing->days_left);
    }
}

/* Looks at NAME.key beside NAME.pem. Not being there is no fault: keys need not lie beside their certificates. */
static void judge_key(struct showing *showing)
{
    char key_path[PATH_MAX];
    struct tl_error error;
    size_t len = strlen(showing->path);
    if (len < 4 || len >= sizeof(key_path) || strcmp(showing->path + len - 4, ".pem") != 0) return;
    snprintf(key_path, sizeof(key_path), "%.*s.key", (int)(len - 4), showing->path);
    if (access(key_path, F_OK) != 0) return;
    if (tl_certificate_check_key(showing->path, key_path, &error) != TL_OK) warn(showing, "%s", error.message);
}

static const char *kind_of(const struct tl_certificate_facts *facts)
{
    if (facts->is_authority) return "authority";
    if (facts->name_error.code != TL_OK) return "";
    return facts->name.kind == TL_CERTIFICATE_MEMBER ? "member" : "client";
}

static bool print_json(const struct showing *showing)
{
    const struct tl_certificate_facts *facts = &showing->facts;
    char text[32], names[sizeof(facts->names)];
    struct tl_json_out *root = tl_json_out_object();
    tl_json_out_put_text(root, "file", showing->path);
    tl_json_out_put_text(root, "kind", kind_of(facts));
    tl_json_out_put_text(root, "name", facts->is_authority ? "" : facts->name.text);
    tl_json_out_put_text(root, "trust_domain", facts->is_authority ? "" : facts->name.trust_domain);
    struct tl_json_out *list = tl_json_out_put_array(root, "names");
    memcpy(names, facts->names, sizeof(names));
    char *rest = names;
    for (char *line; rest && *rest != '\0' && (line = strsep(&rest, "\n"));)
        tl_json_out_append_text(list, line);
    tl_json_out_put_text(root, "subject", facts->subject);
    tl_json_out_put_text(root, "issuer", facts->issuer);
    tl_json_out_put_text(root, "serial", facts->serial);
    tl_json_out_put_text(root, "not_before", format_time(facts->not_before_s, text));
    tl_json_out_put_text(root, "not_after", format_time(facts->not_after_s, text));
    snprintf(text, sizeof(text), "%" PRId64, showing->days_left);
    tl_json_out_put_json(root, "days_left", text);
    tl_json_out_put_text(root, "key", facts->key_kind);
    tl_json_out_put_text(root, "fingerprint", facts->fingerprint);
    tl_json_out_put_bool(root, "usable", showing->is_usable);
    struct tl_json_out *warnings = tl_json_out_put_array(root, "warnings");
    for (size_t i = 0; i < showing->warning_count; i++)
        tl_json_out_append_text(warnings, showing->warnings[i].message);
    return tl_json_out_print(root, false);
}

static void print_line(const char *label, const char *text)
{
    printf("%-13s", label);
    tl_output_put_escaped(stdout, text);
    putchar('\n');
}

static void print_lines(const struct showing *showing)
{
    const struct tl_certificate_facts *facts = &showing->facts;
    char from[32], until[32], text[TL_CERTIFICATE_NAME_BYTES + 32], names[sizeof(facts->names)];
    const char *kind = kind_of(facts);
    if (facts->is_authority || kind[0] == '\0') {
        print_line("name", facts->is_authority ? "none: an authority" : "none");
    } else {
        snprintf(text, sizeof(text), "%s (%s)", facts->name.text, kind);
        print_line("name", text);
    }
    memcpy(names, facts->names, sizeof(names));
    char *rest = names;
    for (char *line; rest && *rest != '\0' && (line = strsep(&rest, "\n"));)
        print_line(line == names ? "names" : "", line);
    print_line("subject", facts->subject);
    print_line("issuer", facts->issuer);
    print_line("serial", facts->serial);
    snprintf(text, sizeof(text), "%s to %s, %" PRId64 " days left", format_time(facts->not_before_s, from),
             format_time(facts->not_after_s, until), showing->days_left);
    print_line("valid", text);
    print_line("key", facts->key_kind);
    print_line("fingerprint", facts->fingerprint);
}

enum tl_status tl_cert_show(const char *path, bool is_json, struct tl_error *ret_error)
{
    struct showing *showing = calloc(1, sizeof(*showing));
    if (!showing) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for %s", path);
    showing->path = path;
    enum tl_status status = tl_certificate_facts_read(path, &showing->facts, ret_error);
    if (status == TL_OK) {
        judge_certificate(showing);
        judge_key(showing);
        for (size_t i = 0; i < showing->warning_count; i++)
            tl_output_error("cert", "warning: %s: %s", path, showing->warnings[i].message);
        if (!is_json) print_lines(showing);
        if (is_json && !print_json(showing))
            status = tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the output");
    }
    free(showing);
    return status;
}
