// SPDX-License-Identifier: Apache-2.0
/* The serialized form of string tensors, honest and damaged. */
#include <check.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fakes/fault_alloc.h"

#include "fakes/run_suite.h"
#include "tensor/strings.c"

static struct tl_error error;
static const struct tl_string three[] = {{"ab", 2}, {NULL, 0}, {"c\0d", 3}};
static const unsigned char three_bytes[] = {2, 0, 0, 0, 0, 0, 0, 0, 0, 0,   0,   0,   0, 0,  0,
                                            0, 3, 0, 0, 0, 0, 0, 0, 0, 'a', 'b', 'c', 0, 'd'};

START_TEST(serialized)
{
    uint64_t size_bytes = 0;
    unsigned char bytes[sizeof(three_bytes)];
    ck_assert_int_eq(tl_strings_size_bytes(three, 3, &size_bytes, &error), TL_OK);
    ck_assert_uint_eq(size_bytes, sizeof(three_bytes));
    tl_strings_serialize(three, 3, bytes);
    ck_assert_mem_eq(bytes, three_bytes, sizeof(bytes));
    ck_assert_int_eq(tl_strings_size_bytes(NULL, 0, &size_bytes, &error), TL_OK);
    ck_assert_uint_eq(size_bytes, 0);
}
END_TEST

START_TEST(size_errors)
{
    uint64_t size_bytes = 77;
    const struct tl_string no_data = {NULL, 1};
    const struct tl_string huge[] = {{"x", INT64_MAX}, {"x", INT64_MAX}, {"x", INT64_MAX}};
    ck_assert_int_eq(tl_strings_size_bytes(&no_data, 1, &size_bytes, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_strings_size_bytes(huge, 1, &size_bytes, &error), TL_OUT_OF_RANGE);
    ck_assert_int_eq(tl_strings_size_bytes(huge, 3, &size_bytes, &error), TL_OUT_OF_RANGE);
    ck_assert_int_eq(tl_strings_size_bytes(huge, UINT64_MAX / 4, &size_bytes, &error), TL_OUT_OF_RANGE);
    ck_assert_uint_eq(size_bytes, 77);
}
END_TEST

START_TEST(found)
{
    struct tl_string_index *index = tl_string_index_create(3);
    struct tl_string string = {0};
    ck_assert_int_eq(tl_string_index_build(index, three_bytes, sizeof(three_bytes), &error), TL_OK);
    for (uint64_t i = 0; i < 3; i++) {
        ck_assert_int_eq(tl_string_index_find(index, three_bytes, sizeof(three_bytes), i, &string, &error), TL_OK);
        ck_assert_uint_eq(string.len_bytes, three[i].len_bytes);
        if (string.len_bytes > 0) ck_assert_mem_eq(string.data, three[i].data, string.len_bytes);
    }
    tl_string_index_destroy(index);
}
END_TEST

/* There are more strings than one entry of the index covers. */
START_TEST(found_among_many)
{
    enum { COUNT = 1000 };
    static char texts[COUNT][8];
    static struct tl_string strings[COUNT];
    uint64_t size_bytes = 0;
    for (int i = 0; i < COUNT; i++)
        strings[i] = (struct tl_string){texts[i], (uint64_t)snprintf(texts[i], sizeof(texts[i]), "%d", i)};
    ck_assert_int_eq(tl_strings_size_bytes(strings, COUNT, &size_bytes, &error), TL_OK);
    unsigned char *bytes = malloc(size_bytes);
    tl_strings_serialize(strings, COUNT, bytes);
    struct tl_string_index *index = tl_string_index_create(COUNT);
    ck_assert_int_eq(tl_string_index_build(index, bytes, size_bytes, &error), TL_OK);
    for (uint64_t i = 0; i < COUNT; i++) {
        struct tl_string string = {0};
        ck_assert_int_eq(tl_string_index_find(index, bytes, size_bytes, i, &string, &error), TL_OK);
        ck_assert_uint_eq(string.len_bytes, strings[i].len_bytes);
        ck_assert_mem_eq(string.data, texts[i], string.len_bytes);
    }
    tl_string_index_destroy(index);
    free(bytes);
}
END_TEST

START_TEST(no_strings)
{
    struct tl_string_index *index = tl_string_index_create(0);
    ck_assert_int_eq(tl_string_index_build(index, NULL, 0, &error), TL_OK);
    ck_assert_int_eq(tl_string_index_build(index, three_bytes, 1, &error), TL_DATA_LOSS);
    tl_string_index_destroy(index);
    tl_string_index_destroy(NULL);
}
END_TEST

START_TEST(damage_is_found)
{
    struct tl_string_index *index = tl_string_index_create(3);
    struct tl_string string = {0};
    unsigned char bytes[sizeof(three_bytes) + 1] = {0};
    /* The data is too short for its table, ends too early, or ends too late. */
    ck_assert_int_eq(tl_string_index_build(index, three_bytes, 23, &error), TL_DATA_LOSS);
    ck_assert_int_eq(tl_string_index_build(index, three_bytes, sizeof(three_bytes) - 1, &error), TL_DATA_LOSS);
    memcpy(bytes, three_bytes, sizeof(three_bytes));
    ck_assert_int_eq(tl_string_index_build(index, bytes, sizeof(bytes), &error), TL_DATA_LOSS);
    /* The sum of the lengths wraps around to the right one. */
    memset(bytes, 0xff, 8);
    bytes[8] = 6;
    bytes[16] = 0;
    ck_assert_int_eq(tl_string_index_build(index, bytes, sizeof(three_bytes), &error), TL_DATA_LOSS);
    ck_assert_int_eq(tl_string_index_find(index, bytes, sizeof(three_bytes), 0, &string, &error), TL_DATA_LOSS);
    tl_string_index_destroy(index);
}
END_TEST

START_TEST(not_built)
{
    struct tl_string_index *index = tl_string_index_create(3);
    struct tl_string string = {0};
    ck_assert_int_eq(tl_string_index_find(index, three_bytes, sizeof(three_bytes), 0, &string, &error), TL_DATA_LOSS);
    /* A failure leaves nothing of what was built before. */
    ck_assert_int_eq(tl_string_index_build(index, three_bytes, sizeof(three_bytes), &error), TL_OK);
    ck_assert_int_eq(tl_string_index_build(index, three_bytes, 3, &error), TL_DATA_LOSS);
    ck_assert_int_eq(tl_string_index_find(index, three_bytes, sizeof(three_bytes), 0, &string, &error), TL_DATA_LOSS);
    tl_string_index_destroy(index);
}
END_TEST

/* Bytes that change after the index was built must not lead outside. */
START_TEST(changed_meanwhile)
{
    struct tl_string_index *index = tl_string_index_create(3);
    struct tl_string string = {0};
    unsigned char *bytes = malloc(sizeof(three_bytes));
    memcpy(bytes, three_bytes, sizeof(three_bytes));
    ck_assert_int_eq(tl_string_index_build(index, bytes, sizeof(three_bytes), &error), TL_OK);
    memset(bytes, 0xff, 16);
    for (uint64_t i = 0; i < 3; i++)
        ck_assert_int_eq(tl_string_index_find(index, bytes, sizeof(three_bytes), i, &string, &error), TL_DATA_LOSS);
    free(bytes);
    tl_string_index_destroy(index);
}
END_TEST

START_TEST(index_beyond_the_count)
{
    struct tl_string_index *index = tl_string_index_create(3);
    struct tl_string string = {0};
    enum tl_status status = tl_string_index_find(index, three_bytes, sizeof(three_bytes), 3, &string, &error);
    ck_abort_msg("returned %d", (int)status);
}
END_TEST

START_TEST(no_memory)
{
    fault_arm(1);
    ck_assert_ptr_null(tl_string_index_create(3));
    ck_assert(fault_was_hit());
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("strings");
    TCase *tcase = tcase_create("strings");
    tcase_add_test(tcase, serialized);
    tcase_add_test(tcase, size_errors);
    tcase_add_test(tcase, found);
    tcase_add_test(tcase, found_among_many);
    tcase_add_test(tcase, no_strings);
    tcase_add_test(tcase, damage_is_found);
    tcase_add_test(tcase, not_built);
    tcase_add_test(tcase, changed_meanwhile);
    tcase_add_test_raise_signal(tcase, index_beyond_the_count, SIGABRT);
    tcase_add_test(tcase, no_memory);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
