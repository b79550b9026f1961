// SPDX-License-Identifier: Apache-2.0
/* Tests of copying closely behind the source, past the caches, and out of memory that another processor writes: every
 * alignment and length around a cache line, and nothing beside it. */
#include <check.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/copy.h"
#include "fakes/run_suite.h"

#define GUARD 0xa5
#define MARGIN 64

static unsigned char *from, *to;
static const size_t capacity = 64 * 1024;

static void setup(void)
{
    from = aligned_alloc(4096, capacity);
    to = aligned_alloc(4096, capacity);
    ck_assert_ptr_nonnull(from);
    ck_assert_ptr_nonnull(to);
    for (size_t i = 0; i < capacity; i++)
        from[i] = (unsigned char)(i * 31 + i / 256);
}

static void teardown(void)
{
    free(from);
    free(to);
}

static void check_copy_by(void (*copy)(void *, const void *, size_t), size_t to_offset, size_t from_offset, size_t len)
{
    size_t span = MARGIN + to_offset + len + MARGIN;
    unsigned char *target = to + MARGIN + to_offset;
    memset(to, GUARD, span);
    copy(target, from + from_offset, len);
    if (memcmp(target, from + from_offset, len) != 0)
        ck_abort_msg("to %zu from %zu length %zu: not the same", to_offset, from_offset, len);
    for (size_t i = 0; i < span; i++)
        if ((to + i < target || to + i >= target + len) && to[i] != GUARD)
            ck_abort_msg("to %zu from %zu length %zu: byte %zu was touched", to_offset, from_offset, len, i);
}

static void check_copy(size_t to_offset, size_t from_offset, size_t len)
{
    check_copy_by(tl_copy_uncached, to_offset, from_offset, len);
    check_copy_by(tl_copy, to_offset, from_offset, len);
}

START_TEST(every_alignment_and_length)
{
    for (size_t to_offset = 0; to_offset < 64; to_offset++)
        for (size_t len = 0; len <= 200; len++)
            check_copy(to_offset, to_offset * 7 % 61, len);
}
END_TEST

START_TEST(long_copies)
{
    static const size_t lengths[] = {4095, 4096, 4097, 60000};
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++)
        for (size_t to_offset = 0; to_offset < 64; to_offset += 9)
            check_copy(to_offset, to_offset + 1, lengths[i]);
}
END_TEST

/* `to` and `from` begin with a page, so that the distance is that of the offsets. */
START_TEST(close_copies)
{
    for (size_t distance = 0; distance < 70; distance++)
        for (size_t len = 1990; len <= 2120; len += 13)
            check_copy(distance, MARGIN, len);
}
END_TEST

START_TEST(what_is_close)
{
    ck_assert(!tl_copy_is_close(0x7000, 0x7000));
    ck_assert(!tl_copy_is_close(0x7000, 0x3000));
    ck_assert(tl_copy_is_close(0x7001, 0x3000));
    ck_assert(tl_copy_is_close(0x703f, 0x3000));
    ck_assert(!tl_copy_is_close(0x7040, 0x3000));
    ck_assert(tl_copy_is_close(0x3010, 0x7000));
    ck_assert(tl_copy_is_close(0x7008, 0x3ff8));
    ck_assert(!tl_copy_is_close(0x7000, 0x3010));
}
END_TEST

START_TEST(nothing_from_nowhere)
{
    tl_copy_uncached(NULL, NULL, 0);
    tl_copy(NULL, NULL, 0);
    check_copy(0, 0, 0);
}
END_TEST

/* The bytes arrive; only lines that lie wholly within the source are written to. */
static void check_copy_out(size_t from_offset, size_t len)
{
    unsigned char *source = from + MARGIN + from_offset, *target = to + MARGIN;
    size_t span = MARGIN + from_offset + len + MARGIN;
    for (size_t i = 0; i < span; i++)
        from[i] = (unsigned char)(1 + i % 255);
    memset(to, GUARD, len + 2 * MARGIN);
    tl_copy_out(target, source, len);
    /* Each assertion of check notes its place in a file, which would take most of the time of this test. */
    for (size_t i = 0; i < len; i++)
        if (target[i] != 1 + (source + i - from) % 255)
            ck_abort_msg("offset %zu length %zu: byte %zu is not the same", from_offset, len, i);
    ck_assert_uint_eq(target[-1], GUARD);
    ck_assert_uint_eq(target[len], GUARD);
    size_t begin = (size_t)(source - from + 63) / 64 * 64, end = (size_t)(source - from + (ptrdiff_t)len) / 64 * 64;
    size_t written = 0;
    for (size_t i = 0; i < span; i++) {
        bool is_written = from[i] != (unsigned char)(1 + i % 255);
        if (is_written && (i < begin || i >= end)) ck_abort_msg("offset %zu length %zu: byte %zu", from_offset, len, i);
        written += is_written;
    }
    if (from_offset == 0) ck_assert_uint_eq(written, len / 64);
}

START_TEST(copies_out)
{
    for (size_t offset = 0; offset < 64; offset++)
        for (size_t len = 0; len <= 200; len++)
            check_copy_out(offset, len);
    check_copy_out(0, 20000);
    check_copy_out(13, 20000);
    check_copy_out(4096 - 16, 20000); /* the target lies 16 bytes behind it */
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("copy");
    TCase *tcase = tcase_create("copy");
    tcase_set_timeout(tcase, 60);
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, every_alignment_and_length);
    tcase_add_test(tcase, long_copies);
    tcase_add_test(tcase, close_copies);
    tcase_add_test(tcase, what_is_close);
    tcase_add_test(tcase, copies_out);
    tcase_add_test(tcase, nothing_from_nowhere);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
