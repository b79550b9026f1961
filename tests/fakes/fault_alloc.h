// SPDX-License-Identifier: Apache-2.0
/*
 * Allocation that fails on demand. A test includes this, then the .c file that it tests, so that the names below
 * replace the functions of the C library in that file; the library's own copy of it is then not linked.
 *
 * A fault walk: for n = 1, 2, ... fault_arm(n) and call the subject; it must fail and leave nothing behind, until
 * fault_was_hit() says that there was no n-th allocation.
 */
#ifndef TESTS_FAKES_FAULT_ALLOC_H
#define TESTS_FAKES_FAULT_ALLOC_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static unsigned fault_countdown; /* The allocation that fails, counted from 1; 0: none. */

static inline void fault_arm(unsigned number)
{
    fault_countdown = number;
}

/* Disarms; returns whether the allocation that was to fail has been asked for. */
static inline bool fault_was_hit(void)
{
    bool was_hit = fault_countdown == 0;
    fault_countdown = 0;
    return was_hit;
}

/* Returns whether this call is the one that fails. */
static inline bool fault_is_due(void)
{
    return fault_countdown > 0 && --fault_countdown == 0;
}

static inline void *fault_malloc(size_t len)
{
    return fault_is_due() ? NULL : malloc(len);
}

static inline void *fault_calloc(size_t count, size_t len)
{
    return fault_is_due() ? NULL : calloc(count, len);
}

static inline void *fault_realloc(void *memory, size_t len)
{
    return fault_is_due() ? NULL : realloc(memory, len);
}

static inline int fault_posix_memalign(void **ret_memory, size_t alignment, size_t len)
{
    return fault_is_due() ? 12 : posix_memalign(ret_memory, alignment, len);
}

static inline char *fault_strdup(const char *text)
{
    return fault_is_due() ? NULL : strdup(text);
}

static inline char *fault_strndup(const char *text, size_t len)
{
    return fault_is_due() ? NULL : strndup(text, len);
}

__attribute__((format(printf, 2, 3))) static inline int fault_asprintf(char **ret_text, const char *format, ...)
{
    va_list arguments;
    if (fault_is_due()) return -1;
    va_start(arguments, format);
    int len = vasprintf(ret_text, format, arguments);
    va_end(arguments);
    return len;
}

#undef malloc
#undef calloc
#undef realloc
#undef strdup
#undef strndup
#define malloc fault_malloc
#define calloc fault_calloc
#define realloc fault_realloc
#define posix_memalign fault_posix_memalign
#define strdup fault_strdup
#define strndup fault_strndup
#define asprintf fault_asprintf

#endif
