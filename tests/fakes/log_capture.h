// SPDX-License-Identifier: Apache-2.0
/* Collects what the process writes to stderr, above all its log, in a file that the test reads. */
#ifndef TESTS_FAKES_LOG_CAPTURE_H
#define TESTS_FAKES_LOG_CAPTURE_H

#include <check.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Applies from now on, to the end of the test. */
static inline void log_capture_begin(void)
{
    FILE *file = tmpfile();
    ck_assert_ptr_nonnull(file);
    ck_assert_int_ge(dup2(fileno(file), STDERR_FILENO), 0);
    fclose(file);
}

/* Returns how many lines contain the text. */
static inline unsigned log_capture_count(const char *part)
{
    static char line[8192];
    unsigned count = 0;
    FILE *lines = fopen("/proc/self/fd/2", "r"); /* The descriptor has an offset of its own. */
    ck_assert_ptr_nonnull(lines);
    while (fgets(line, sizeof(line), lines) != NULL)
        count += strstr(line, part) != NULL;
    fclose(lines);
    return count;
}

#endif
