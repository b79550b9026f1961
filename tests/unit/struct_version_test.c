// SPDX-License-Identifier: Apache-2.0
/* Structs that are older or newer than the library: which fields are read, refused and filled. */
#include "base/struct_version.c"

#include <check.h>
#include <stdint.h>

#include "fakes/run_suite.h"

struct first {
    size_t size_bytes;
    uint64_t a;
};
struct ours {
    size_t size_bytes;
    uint64_t a, b;
};
struct later {
    size_t size_bytes;
    uint64_t a, b, c, d;
};

static struct tl_error error;

static enum tl_status read_struct(const void *theirs, struct ours *ret_ours)
{
    return tl_struct_read(ret_ours, sizeof(*ret_ours), sizeof(struct first), theirs, "tl_thing", &error);
}

START_TEST(of_an_older_program_lacks_what_is_new)
{
    struct ours ours = {.b = 9};
    const struct first first = {.size_bytes = sizeof(first), .a = 1};
    ck_assert_int_eq(read_struct(&first, &ours), TL_OK);
    ck_assert_uint_eq(ours.a, 1);
    ck_assert_uint_eq(ours.b, 0);
}
END_TEST

START_TEST(of_this_version_is_read)
{
    struct ours ours;
    const struct ours theirs = {.size_bytes = sizeof(theirs), .a = 1, .b = 2};
    ck_assert_int_eq(read_struct(&theirs, &ours), TL_OK);
    ck_assert_mem_eq(&ours, &theirs, sizeof(ours));
}
END_TEST

START_TEST(of_a_newer_program_must_be_zero_beyond)
{
    struct ours ours = {.a = 5};
    struct later later = {.size_bytes = sizeof(later), .a = 1, .b = 2, .d = UINT64_C(1) << 63};
    ck_assert_int_eq(read_struct(&later, &ours), TL_UNIMPLEMENTED);
    ck_assert_ptr_nonnull(strstr(error.message, "byte 39 of struct tl_thing"));
    ck_assert_uint_eq(ours.a, 5);
    later.d = 0;
    ck_assert_int_eq(read_struct(&later, &ours), TL_OK);
    ck_assert_uint_eq(ours.a, 1);
    ck_assert_uint_eq(ours.b, 2);
}
END_TEST

START_TEST(a_size_that_is_none_is_refused)
{
    struct ours ours = {.a = 5};
    const size_t sizes[] = {0, sizeof(struct first) - 1, TL_STRUCT_MAX_BYTES + 1, SIZE_MAX};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        const struct first first = {.size_bytes = sizes[i]};
        ck_assert_int_eq(read_struct(&first, &ours), TL_INVALID_ARGUMENT);
        ck_assert_int_eq(tl_struct_check_size(&first, sizeof(first), "tl_thing", NULL), TL_INVALID_ARGUMENT);
        ck_assert_ptr_nonnull(strstr(error.message, "sizeof(struct tl_thing)"));
    }
    ck_assert_uint_eq(ours.a, 5);
}
END_TEST

/* An element of an array does not say its size itself. */
START_TEST(element_of_an_array)
{
    struct ours ours = {.a = 5};
    const struct later later = {.size_bytes = 7, .a = 1, .b = 2, .c = 3};
    ck_assert_int_eq(
        tl_struct_read_sized(&ours, sizeof(ours), sizeof(struct first), &later, sizeof(later), "tl_thing", &error),
        TL_UNIMPLEMENTED);
    ck_assert_ptr_nonnull(strstr(error.message, "byte 24 of struct tl_thing"));
    ck_assert_uint_eq(ours.a, 5);
    const size_t sizes[] = {sizeof(struct first), sizeof(ours)};
    for (size_t i = 0; i < 2; i++) {
        ck_assert_int_eq(
            tl_struct_read_sized(&ours, sizeof(ours), sizeof(struct first), &later, sizes[i], "tl_thing", &error),
            TL_OK);
        ck_assert_uint_eq(ours.size_bytes, 7);
        ck_assert_uint_eq(ours.a, 1);
        ck_assert_uint_eq(ours.b, i == 1 ? 2 : 0);
    }
    ck_assert_int_eq(tl_struct_read_sized(&ours, sizeof(ours), sizeof(struct first), &later, 15, "tl_thing", &error),
                     TL_INVALID_ARGUMENT);
    ck_assert_str_eq(error.message, "item_bytes of struct tl_thing is 15; set it to sizeof(struct tl_thing)");
    ck_assert_int_eq(tl_struct_check_item_bytes(16, sizeof(struct first), "tl_thing", NULL), TL_OK);
    ck_assert_int_eq(tl_struct_check_item_bytes(15, sizeof(struct first), "tl_thing", NULL), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_struct_check_item_bytes(TL_STRUCT_MAX_BYTES + 1, 8, "tl_thing", NULL), TL_INVALID_ARGUMENT);
}
END_TEST

START_TEST(is_filled_as_far_as_it_reaches)
{
    const struct ours ours = {.size_bytes = sizeof(ours), .a = 1, .b = 2};
    struct later later = {.size_bytes = sizeof(later), .c = 3, .d = 4};
    tl_struct_fill(&later, &ours, sizeof(ours));
    const struct later filled = {.size_bytes = sizeof(later), .a = 1, .b = 2};
    ck_assert_mem_eq(&later, &filled, sizeof(filled));
    struct ours beyond = {.size_bytes = sizeof(struct first), .b = 7};
    tl_struct_fill(&beyond, &ours, sizeof(ours));
    ck_assert_uint_eq(beyond.size_bytes, sizeof(struct first));
    ck_assert_uint_eq(beyond.a, 1);
    ck_assert_uint_eq(beyond.b, 7);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("struct_version");
    TCase *cases = tcase_create("sizes");
    tcase_add_test(cases, of_an_older_program_lacks_what_is_new);
    tcase_add_test(cases, of_this_version_is_read);
    tcase_add_test(cases, of_a_newer_program_must_be_zero_beyond);
    tcase_add_test(cases, a_size_that_is_none_is_refused);
    tcase_add_test(cases, element_of_an_array);
    tcase_add_test(cases, is_filled_as_far_as_it_reaches);
    suite_add_tcase(suite, cases);
    return run_suite(suite);
}
