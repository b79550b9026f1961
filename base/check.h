// SPDX-License-Identifier: Apache-2.0
/*
 * Always-on assertions. A failed check is a programming error of this project: it prints what was expected and aborts,
 * in production too. Never check anything that a peer, a file, a flag or a device decides.
 */
#ifndef BASE_CHECK_H
#define BASE_CHECK_H

#include <stddef.h>

#define TL_CHECK(condition)                                                                                            \
    do {                                                                                                               \
        if (__builtin_expect(!(condition), 0)) tl_check_failed(__FILE__, __LINE__, #condition);                        \
    } while (0)

_Noreturn void tl_check_failed(const char *file, int line, const char *condition) __attribute__((cold));

/* Returns the object whose member `member` is *pointer. */
#define TL_CONTAINER_OF(pointer, type, member) ((type *)(void *)((char *)(pointer)-offsetof(type, member)))

#define TL_ARRAY_COUNT(array) (sizeof(array) / sizeof((array)[0]))

#endif
