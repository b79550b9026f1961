// SPDX-License-Identifier: Apache-2.0
/* What fakes were called with, in its order: fakes note it, and the test checks it. */
#ifndef TESTS_FAKES_CALLS_H
#define TESTS_FAKES_CALLS_H

#include <check.h>
#include <string.h>

static char calls[1024];

static inline void note(const char *what)
{
    size_t used = strlen(calls), len = strlen(what);
    ck_assert_uint_lt(used + len + 2, sizeof(calls));
    if (used > 0) calls[used++] = ' ';
    memcpy(calls + used, what, len + 1);
}

/* What was noted since the last check, separated by spaces. */
static inline void check_calls(const char *expected)
{
    ck_assert_str_eq(calls, expected);
    calls[0] = '\0';
}

#endif
