// SPDX-License-Identifier: Apache-2.0
/*
 * Ends the process when an always-on assertion fails: one line on stderr, then abort. Neither the heap nor stdio's
 * buffers are used, because either may be what is damaged.
 */
#include "base/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

void tl_check_failed(const char *file, int line, const char *condition)
{
    char text[512];
    int len = snprintf(text, sizeof(text), "tensorlane: %s:%d: check failed: %s\n", file, line, condition);
    if (len >= (int)sizeof(text)) {
        len = (int)sizeof(text) - 1;
        text[len - 1] = '\n';
    }
    /* A stderr that is gone changes nothing: the abort follows. */
    if (len > 0 && write(STDERR_FILENO, text, (size_t)len) < 0) abort();
    abort();
}
