// SPDX-License-Identifier: Apache-2.0
/* Errors: codes, messages that are cut, errno, and errors that are kept. */
#include <check.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/text.h"
#include "fakes/fault_alloc.h"
#include "fakes/run_suite.h"

/* The subject, with the allocations above. */
#include "base/error.c"

START_TEST(names_are_grpcs)
{
    ck_assert_str_eq(tl_status_name(TL_OK), "OK");
    ck_assert_str_eq(tl_status_name(TL_NOT_FOUND), "NOT_FOUND");
    ck_assert_str_eq(tl_status_name(TL_UNAUTHENTICATED), "UNAUTHENTICATED");
    for (int code = TL_OK; code <= TL_UNAUTHENTICATED; code++)
        ck_assert(code == TL_UNKNOWN || strcmp(tl_status_name((enum tl_status)code), "UNKNOWN") != 0);
    ck_assert_str_eq(tl_status_name((enum tl_status)17), "UNKNOWN");
    ck_assert_str_eq(tl_status_name((enum tl_status) - 1), "UNKNOWN");
}
END_TEST

START_TEST(set_fills_and_returns)
{
    struct tl_error error = {0};
    ck_assert_int_eq(tl_error_set(&error, TL_NOT_FOUND, "no %s %d", "task", 7), TL_NOT_FOUND);
    ck_assert_int_eq(error.code, TL_NOT_FOUND);
    ck_assert_str_eq(error.message, "no task 7");
    ck_assert_int_eq(tl_error_set(NULL, TL_ABORTED, "%s", "x"), TL_ABORTED);
}
END_TEST

START_TEST(set_accepts_its_own_message)
{
    struct tl_error error;
    tl_error_set(&error, TL_NOT_FOUND, "inner");
    tl_error_set(&error, TL_INTERNAL, "outer: %s", error.message);
    ck_assert_str_eq(error.message, "outer: inner");
}
END_TEST

/* With every length of the text before it, a character is either whole or missing. */
START_TEST(cut_at_characters)
{
    static const char *const characters[] = {"x", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80"};
    char text[2 * TL_ERROR_MESSAGE_BYTES];
    struct tl_error error;
    for (size_t kind = 0; kind < TL_ARRAY_COUNT(characters); kind++) {
        for (size_t shift = 0; shift < 4; shift++) {
            size_t len = shift;
            memset(text, 'a', shift);
            while (len + 4 < sizeof(text) - 1) {
                memcpy(text + len, characters[kind], strlen(characters[kind]));
                len += strlen(characters[kind]);
            }
            text[len] = '\0';
            tl_error_set(&error, TL_UNKNOWN, "%s", text);
            size_t cut = strlen(error.message);
            ck_assert_uint_lt(cut, TL_ERROR_MESSAGE_BYTES);
            ck_assert_uint_ge(cut, TL_ERROR_MESSAGE_BYTES - 4);
            ck_assert(tl_text_is_utf8(error.message, cut));
            ck_assert_int_eq(memcmp(error.message, text, cut), 0);
        }
    }
}
END_TEST

START_TEST(longest_message_is_not_cut)
{
    char text[TL_ERROR_MESSAGE_BYTES];
    struct tl_error error;
    memset(text, 'a', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    tl_error_set(&error, TL_UNKNOWN, "%s", text);
    ck_assert_str_eq(error.message, text);
}
END_TEST

START_TEST(errno_has_code_and_text)
{
    static const struct {
        int number;
        enum tl_status code;
    } cases[] = {
        {ENOENT, TL_NOT_FOUND},
        {ENOTDIR, TL_NOT_FOUND},
        {EACCES, TL_PERMISSION_DENIED},
        {EPERM, TL_PERMISSION_DENIED},
        {EROFS, TL_PERMISSION_DENIED},
        {ENOMEM, TL_RESOURCE_EXHAUSTED},
        {ENOSPC, TL_RESOURCE_EXHAUSTED},
        {EMFILE, TL_RESOURCE_EXHAUSTED},
        {ENFILE, TL_RESOURCE_EXHAUSTED},
        {EDQUOT, TL_RESOURCE_EXHAUSTED},
        {EFBIG, TL_RESOURCE_EXHAUSTED},
        {EEXIST, TL_ALREADY_EXISTS},
        {ETIMEDOUT, TL_DEADLINE_EXCEEDED},
        {EINVAL, TL_INVALID_ARGUMENT},
        {EISDIR, TL_INVALID_ARGUMENT},
        {ECONNREFUSED, TL_UNAVAILABLE},
        {ECONNRESET, TL_UNAVAILABLE},
        {EHOSTUNREACH, TL_UNAVAILABLE},
        {EIO, TL_INTERNAL},
        {0, TL_INTERNAL},
        {-1, TL_INTERNAL},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(cases); i++) {
        struct tl_error error = {0};
        ck_assert_int_eq(tl_error_set_errno(&error, cases[i].number, "open %s", "f"), cases[i].code);
        ck_assert_int_eq(error.code, cases[i].code);
        ck_assert_int_eq(strncmp(error.message, "open f: ", 8), 0);
        ck_assert_uint_gt(strlen(error.message), 8);
        ck_assert_int_eq(tl_error_set_errno(NULL, cases[i].number, "x"), cases[i].code);
    }
}
END_TEST

START_TEST(errno_text_survives_a_long_message)
{
    char text[3 * TL_ERROR_MESSAGE_BYTES];
    struct tl_error error;
    for (size_t i = 0; i + 1 < sizeof(text); i += 2)
        memcpy(text + i, "\xc3\xa9", 2);
    text[sizeof(text) - 2] = '\0';
    tl_error_set_errno(&error, ENOENT, "%s", text);
    size_t len = strlen(error.message);
    ck_assert_uint_ge(len, TL_ERROR_MESSAGE_BYTES - 2);
    ck_assert(tl_text_is_utf8(error.message, len));
    ck_assert_str_eq(error.message + len - strlen(": No such file or directory"), ": No such file or directory");
}
END_TEST

START_TEST(copy)
{
    struct tl_error source = {.code = TL_DATA_LOSS, .message = "why"}, copied = {0};
    ck_assert_int_eq(tl_error_copy(&copied, &source), TL_DATA_LOSS);
    ck_assert_int_eq(copied.code, TL_DATA_LOSS);
    ck_assert_str_eq(copied.message, "why");
    ck_assert_int_eq(tl_error_copy(NULL, &source), TL_DATA_LOSS);
    ck_assert_int_eq(tl_error_copy(&source, &source), TL_DATA_LOSS);
    ck_assert_str_eq(source.message, "why");
}
END_TEST

START_TEST(prefix)
{
    struct tl_error error = {.code = TL_DATA_LOSS, .message = "why"};
    tl_error_prefix(&error, "tensor '%s': ", "w");
    ck_assert_str_eq(error.message, "tensor 'w': why");
    ck_assert_int_eq(error.code, TL_DATA_LOSS);
    tl_error_prefix(NULL, "x");
    for (int i = 0; i < 2000; i++)
        tl_error_prefix(&error, "\xe2\x82\xac");
    ck_assert_uint_ge(strlen(error.message), TL_ERROR_MESSAGE_BYTES - 3);
    ck_assert(tl_text_is_utf8(error.message, strlen(error.message)));
}
END_TEST

START_TEST(kept_error_outlives_its_source)
{
    struct tl_error source = {.code = TL_DATA_LOSS, .message = "why"};
    const struct tl_error *kept = tl_error_keep(&source);
    source = (struct tl_error){.code = TL_INTERNAL, .message = "something else"};
    ck_assert_ptr_eq(tl_error_kept(kept), kept);
    ck_assert_int_eq(kept->code, TL_DATA_LOSS);
    ck_assert_str_eq(kept->message, "why");
    tl_error_drop(kept);
}
END_TEST

START_TEST(ok_is_kept_as_null)
{
    struct tl_error source = {.code = TL_OK, .message = "left over"};
    ck_assert_ptr_null(tl_error_keep(&source));
    ck_assert_ptr_null(tl_error_keep(NULL));
    ck_assert_int_eq(tl_error_kept(NULL)->code, TL_OK);
    ck_assert_str_eq(tl_error_kept(NULL)->message, "");
    tl_error_drop(NULL);
}
END_TEST

START_TEST(keep_without_memory_is_an_error_too)
{
    struct tl_error source = {.code = TL_DATA_LOSS, .message = "why"};
    fault_arm(1);
    const struct tl_error *kept = tl_error_keep(&source);
    ck_assert(fault_was_hit());
    ck_assert_int_eq(kept->code, TL_RESOURCE_EXHAUSTED);
    ck_assert_str_eq(kept->message, "no memory");
    fault_arm(1);
    ck_assert_ptr_eq(tl_error_keep(&source), kept);
    tl_error_drop(kept);
    ck_assert_str_eq(kept->message, "no memory");
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("error");
    TCase *tcase = tcase_create("error");
    tcase_add_test(tcase, names_are_grpcs);
    tcase_add_test(tcase, set_fills_and_returns);
    tcase_add_test(tcase, set_accepts_its_own_message);
    tcase_add_test(tcase, cut_at_characters);
    tcase_add_test(tcase, longest_message_is_not_cut);
    tcase_add_test(tcase, errno_has_code_and_text);
    tcase_add_test(tcase, errno_text_survives_a_long_message);
    tcase_add_test(tcase, copy);
    tcase_add_test(tcase, prefix);
    tcase_add_test(tcase, kept_error_outlives_its_source);
    tcase_add_test(tcase, ok_is_kept_as_null);
    tcase_add_test(tcase, keep_without_memory_is_an_error_too);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
