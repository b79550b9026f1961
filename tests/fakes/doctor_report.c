// SPDX-License-Identifier: Apache-2.0
#include "fakes/doctor_report.h"

#include <check.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct tl_doctor_report report;
struct tl_doctor_roots roots;
static char folder[64], proc[80], sys[80], etc[80];

void make_roots(void)
{
    snprintf(folder, sizeof(folder), "/tmp/tensorlane-test.XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(folder));
    snprintf(proc, sizeof(proc), "%s/proc", folder);
    snprintf(sys, sizeof(sys), "%s/sys", folder);
    snprintf(etc, sizeof(etc), "%s/etc", folder);
    roots = (struct tl_doctor_roots){.proc = proc, .sys = sys, .etc = etc};
}

static int remove_one(const char *path, const struct stat *status, int kind, struct FTW *place)
{
    (void)status;
    (void)kind;
    (void)place;
    return remove(path);
}

void remove_roots(void)
{
    tl_doctor_report_fini(&report);
    nftw(folder, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

void make_file(const char *path, const char *content)
{
    char whole[512];
    snprintf(whole, sizeof(whole), "%s/%s", folder, path);
    for (char *slash = strchr(whole + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        (void)mkdir(whole, 0700);
        *slash = '/';
    }
    FILE *file = fopen(whole, "w");
    ck_assert_msg(file != NULL, "%s", whole);
    ck_assert_int_ge(fputs(content, file), 0);
    fclose(file);
}

static void check_text(const char *text, const char *expected)
{
    if (expected[0] == '\0') {
        ck_assert_str_eq(text, "");
    } else {
        ck_assert_msg(strstr(text, expected) != NULL, "no \"%s\" in \"%s\"", expected, text);
    }
}

void check_last(enum tl_doctor_verdict verdict, const char *what, const char *value, const char *cause,
                const char *remedy)
{
    ck_assert_uint_gt(report.count, 0);
    const struct tl_doctor_line *line = &report.lines[report.count - 1];
    ck_assert_str_eq(line->what, what);
    check_text(line->value, value);
    check_text(line->cause, cause);
    check_text(line->remedy, remedy);
    ck_assert_int_eq(line->verdict, verdict);
}
