// SPDX-License-Identifier: Apache-2.0
/* Parts of tensors: their names, and what they are made of. */
#include <check.h>
#include <stdio.h>
#include <string.h>

#include "fakes/run_suite.h"
#include "tensor/part.h"

static const struct tl_part_costs views, copies = {.copies = true};
static struct tl_error error;

static const char *name_of(const struct tl_part *part, const char *key)
{
    static char name[TL_MAX_KEY_BYTES + 1];
    ck_assert_msg(tl_part_name(part, key, name, &error) == TL_OK, "%s", error.message);
    return name;
}

/* The bytes count up from 0. */
static struct tl_tensor *make(enum tl_dtype dtype, unsigned rank, const uint64_t *dims)
{
    struct tl_tensor *tensor;
    ck_assert_msg(tl_tensor_create(dtype, rank, dims, &tensor, &error) == TL_OK, "%s", error.message);
    unsigned char *data = tl_tensor_data(tensor);
    for (uint64_t i = 0; i < tl_tensor_size_bytes(tensor); i++)
        data[i] = (unsigned char)i;
    return tensor;
}

static enum tl_status take_box(struct tl_tensor **value, unsigned rank, const uint64_t *start, const uint64_t *size)
{
    const struct tl_part part = {.size_bytes = sizeof(part), .rank = rank, .start = start, .size = size};
    return tl_part_take(name_of(&part, "k"), &views, value, &error);
}

START_TEST(names_are_read_back)
{
    const uint64_t start[] = {0, 255, UINT64_MAX}, size[] = {16, 1, 0};
    const struct tl_part box = {.size_bytes = sizeof(box), .rank = 3, .start = start, .size = size};
    ck_assert_str_eq(name_of(&box, "a/b"), "tensorlane.part/b0+10,ff+1,ffffffffffffffff+0/a/b");
    const uint64_t hex_b[] = {0, 0x1b, 0xb};
    const struct tl_part other = {.size_bytes = sizeof(other), .rank = 3, .start = hex_b, .size = hex_b};
    ck_assert_str_eq(name_of(&other, "k"), "tensorlane.part/b0+0,1b+1b,b+b/k");
    ck_assert_str_eq(tl_part_key(name_of(&box, "a/b")), "a/b");
    ck_assert(tl_part_is_name(name_of(&box, "k")));
    const struct tl_byte_range range[] = {{.offset_bytes = 1, .len_bytes = 2}};
    const struct tl_part ranges = {.size_bytes = sizeof(ranges), .ranges = range, .range_count = 1};
    ck_assert_str_eq(name_of(&ranges, "k"), "tensorlane.part/r1+2/k");
    const struct tl_part scalar = {.size_bytes = sizeof(scalar), .start = start, .size = size};
    ck_assert_str_eq(name_of(&scalar, "k"), "tensorlane.part/b/k");
    ck_assert(!tl_part_is_name("tensorlane.probe/256"));
    ck_assert_ptr_null(tl_part_key("weights"));
    ck_assert_ptr_null(tl_part_key("tensorlane.part/b0+1"));
    ck_assert_ptr_null(tl_part_key("tensorlane.part/b0+1/"));
}
END_TEST

START_TEST(parts_that_are_none_are_refused)
{
    static const struct tl_byte_range many[60];
    const uint64_t some[TL_MAX_RANK + 1] = {0};
    const struct tl_part wrong[] = {
        {.rank = 1},
        {.rank = 1, .size = some},
        {.rank = 1, .start = some, .size = some, .ranges = many, .range_count = 1},
        {.rank = TL_MAX_RANK + 1, .start = some, .size = some},
        {.range_count = 1},
    };
    char name[TL_MAX_KEY_BYTES + 1], key[TL_MAX_KEY_BYTES + 1];
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
        ck_assert_int_eq(tl_part_name(&wrong[i], "k", name, &error), TL_INVALID_ARGUMENT);
    memset(key, 'k', sizeof(key));
    key[TL_MAX_KEY_BYTES] = '\0';
    const struct tl_part row = {.rank = 1, .start = some, .size = some};
    ck_assert_int_eq(tl_part_name(&row, key, name, &error), TL_INVALID_ARGUMENT);
    key[TL_MAX_KEY_BYTES - sizeof("tensorlane.part/b0+0/") + 1] = '\0';
    ck_assert_int_eq(tl_part_name(&row, key, name, &error), TL_OK);
    ck_assert_uint_eq(strlen(name), TL_MAX_KEY_BYTES);
    const struct tl_part long_list = {.ranges = many, .range_count = 60};
    ck_assert_int_eq(tl_part_name(&long_list, key, name, &error), TL_INVALID_ARGUMENT);
}
END_TEST

START_TEST(rows_show_the_value)
{
    const uint64_t dims[] = {4, 3}, start[] = {1, 0}, size[] = {2, 3};
    struct tl_tensor *whole = make(TL_U16, 2, dims), *value = tl_tensor_get(whole);
    ck_assert_int_eq(take_box(&value, 2, start, size), TL_OK);
    ck_assert_ptr_eq(tl_tensor_data(value), (char *)tl_tensor_data(whole) + 6);
    ck_assert_uint_eq(tl_tensor_size_bytes(value), 12);
    ck_assert_uint_eq(tl_tensor_dims(value)[0], 2);
    ck_assert_int_eq(tl_tensor_dtype(value), TL_U16);
    ck_assert(tl_tensor_is_read_only(value));
    tl_tensor_put(whole); /* the view keeps it */
    ck_assert_int_eq(((unsigned char *)tl_tensor_data(value))[0], 6);
    tl_tensor_put(value);
}
END_TEST

/* Every box of a tensor of rank 3, against the obvious loop. */
START_TEST(every_box)
{
    const uint64_t dims[] = {3, 2, 4};
    struct tl_tensor *whole = make(TL_U16, 3, dims);
    const uint16_t *elements = tl_tensor_data(whole);
    unsigned count = 0;
    for (unsigned code = 0; code < 4 * 4 * 3 * 3 * 5 * 5; code++) {
        unsigned rest = code;
        uint64_t start[3], size[3];
        bool fits = true;
        for (unsigned i = 0; i < 3; i++) {
            start[i] = rest % (dims[i] + 1);
            rest /= (unsigned)dims[i] + 1;
            size[i] = rest % (dims[i] + 1);
            rest /= (unsigned)dims[i] + 1;
            fits = fits && start[i] + size[i] <= dims[i];
        }
        struct tl_tensor *value = tl_tensor_get(whole), *target = make(TL_U16, 3, dims);
        ck_assert_int_eq(take_box(&value, 3, start, size), fits ? TL_OK : TL_OUT_OF_RANGE);
        if (!fits) {
            ck_assert_ptr_eq(value, whole);
        } else {
            struct tl_box box = {.rank = 3};
            memcpy(box.start, start, sizeof(start));
            memcpy(box.size, size, sizeof(size));
            const uint16_t *got = tl_tensor_data(value);
            uint16_t *into = tl_tensor_data(target);
            memset(into, 0xee, tl_tensor_size_bytes(target));
            struct tl_tensor *shown;
            ck_assert_int_eq(tl_tensor_create_box(target, &box, false, &shown, &error), TL_OK);
            ck_assert(tl_meta_data_is_equal(tl_tensor_meta_data(shown), tl_tensor_meta_data(value)));
            tl_tensor_write(shown, 0, tl_tensor_size_bytes(value), got);
            tl_tensor_put(shown);
            size_t place = 0;
            for (uint64_t i = 0; i < 24; i++) {
                const uint64_t at[] = {i / 8, i / 4 % 2, i % 4};
                bool is_inside = true;
                for (unsigned j = 0; j < 3; j++)
                    is_inside = is_inside && at[j] >= start[j] && at[j] < start[j] + size[j];
                if (is_inside) ck_assert_uint_eq(got[place++], elements[i]);
                ck_assert_uint_eq(into[i], is_inside ? elements[i] : 0xeeee);
            }
            ck_assert_uint_eq(tl_tensor_size_bytes(value), place * 2);
            count++;
        }
        tl_tensor_put(value);
        tl_tensor_put(target);
    }
    ck_assert_uint_gt(count, 500);
    tl_tensor_put(whole);
}
END_TEST

/* Whichever bytes of a box without an address are read, they are those of one that was copied together. */
START_TEST(bytes_of_a_box)
{
    const uint64_t dims[] = {7, 30, 20, 50}, start[] = {1, 3, 0, 9}, size[] = {5, 21, 20, 33};
    const struct tl_part part = {.size_bytes = sizeof(part), .rank = 4, .start = start, .size = size};
    const struct tl_part_costs takes_runs = {.takes_runs = true};
    struct tl_tensor *whole = make(TL_U8, 4, dims), *value = tl_tensor_get(whole), *copy = tl_tensor_get(whole);
    ck_assert_int_eq(tl_part_take(name_of(&part, "k"), &takes_runs, &value, &error), TL_OK);
    ck_assert_int_eq(tl_part_take(name_of(&part, "k"), &views, &copy, &error), TL_OK);
    tl_tensor_put(whole);
    ck_assert(tl_tensor_is_in_runs(value) && !tl_tensor_is_in_runs(copy));
    const uint64_t size_bytes = tl_tensor_size_bytes(copy);
    ck_assert_uint_eq(tl_tensor_size_bytes(value), size_bytes);
    static unsigned char bytes[5 * 21 * 20 * 33];
    for (uint64_t first = 0; first <= size_bytes; first += first == 0 ? size_bytes % 997 : 997) {
        for (uint64_t len = 0; len <= size_bytes - first; len = 3 * len + 1) {
            memset(bytes, 0, sizeof(bytes));
            tl_tensor_read(value, first, len, bytes);
            ck_assert_mem_eq(bytes, (unsigned char *)tl_tensor_data(copy) + first, len);
        }
    }
    tl_tensor_put(value);
    tl_tensor_put(copy);
}
END_TEST

START_TEST(ranges_come_one_behind_the_other)
{
    const uint64_t dims[] = {10};
    const struct tl_byte_range range[] = {
        {.offset_bytes = 6, .len_bytes = 2}, {.offset_bytes = 0, .len_bytes = 3}, {.offset_bytes = 10}};
    struct tl_part part = {.ranges = range, .range_count = 3};
    struct tl_tensor *whole = make(TL_U8, 1, dims), *value = tl_tensor_get(whole);
    ck_assert_int_eq(tl_part_take(name_of(&part, "k"), &views, &value, &error), TL_OK);
    ck_assert_uint_eq(tl_tensor_size_bytes(value), 5);
    ck_assert_mem_eq(tl_tensor_data(value), "\x06\x07\x00\x01\x02", 5);
    tl_tensor_put(value);
    value = tl_tensor_get(whole);
    part.range_count = 1;
    ck_assert_int_eq(tl_part_take(name_of(&part, "k"), &views, &value, &error), TL_OK);
    ck_assert_ptr_eq(tl_tensor_data(value), (char *)tl_tensor_data(whole) + 6);
    tl_tensor_put(value);
    value = tl_tensor_get(whole);
    ck_assert_int_eq(tl_part_take(name_of(&part, "k"), &copies, &value, &error), TL_OK);
    ck_assert_ptr_ne(tl_tensor_data(value), (char *)tl_tensor_data(whole) + 6);
    ck_assert_mem_eq(tl_tensor_data(value), "\x06\x07", 2);
    tl_tensor_put(value);
    const struct tl_byte_range twice[] = {{.len_bytes = 6}, {.len_bytes = 6}};
    part.ranges = twice;
    part.range_count = 2;
    value = whole; /* what is longer than the tensor would cost its owner more memory than it has */
    ck_assert_int_eq(tl_part_take(name_of(&part, "k"), &views, &value, &error), TL_OUT_OF_RANGE);
    part.range_count = 1;
    const struct tl_byte_range beyond[] = {{.offset_bytes = 9, .len_bytes = 2},
                                           {.offset_bytes = UINT64_MAX, .len_bytes = 2}};
    for (size_t i = 0; i < 2; i++) {
        part.ranges = &beyond[i];
        value = whole;
        ck_assert_int_eq(tl_part_take(name_of(&part, "k"), &views, &value, &error), TL_OUT_OF_RANGE);
        ck_assert_ptr_eq(value, whole);
    }
    tl_tensor_put(whole);
}
END_TEST

START_TEST(what_has_no_parts)
{
    const uint64_t dims[] = {2, 3}, start[] = {0, 1}, size[] = {2, 1}, whole_size[] = {2, 3}, none[] = {0, 0};
    const struct tl_string strings[2] = {{.data = "a", .len_bytes = 1}};
    struct tl_tensor *value = make(TL_I4, 2, dims), *text, *dead;
    ck_assert_int_eq(take_box(&value, 2, start, size), TL_FAILED_PRECONDITION);
    ck_assert_int_eq(take_box(&value, 1, start, size), TL_OUT_OF_RANGE);
    ck_assert_int_eq(take_box(&value, 2, none, whole_size), TL_OK);
    ck_assert_uint_eq(tl_tensor_size_bytes(value), 3);
    tl_tensor_put(value);
    ck_assert_int_eq(tl_tensor_create_strings(1, dims, strings, &text, &error), TL_OK);
    ck_assert_int_eq(take_box(&text, 1, start, size), TL_FAILED_PRECONDITION);
    tl_tensor_put(text);
    ck_assert_int_eq(tl_tensor_create_dead(&dead, &error), TL_OK);
    ck_assert_int_eq(take_box(&dead, 2, start, size), TL_OK);
    ck_assert(tl_tensor_is_dead(dead));
    tl_tensor_put(dead);
}
END_TEST

/* What a hostile peer may ask for. */
START_TEST(names_that_cannot_be)
{
    static const char *const names[] = {
        "tensorlane.part//k",
        "tensorlane.part/x0+1/k",
        "tensorlane.part/b0/k",
        "tensorlane.part/b0+/k",
        "tensorlane.part/b+1/k",
        "tensorlane.part/b0+1,/k",
        "tensorlane.part/b0+1;/k",
        "tensorlane.part/r/k",
        "tensorlane.part/b0+1,0/k",
        "tensorlane.part/b0+A/k",
        "tensorlane.part/r0-1/k",
        "tensorlane.part/b10000000000000000+0/k",
        "tensorlane.part/b0+1,0+1,0+1,0+1,0+1,0+1,0+1,0+1,0+1,0+1,0+1,0+1,0+1,0+1,0+1,0+1,0+1/k",
    };
    const uint64_t dims[] = {4};
    struct tl_tensor *value = make(TL_U8, 1, dims);
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        ck_assert_msg(tl_part_take(names[i], &views, &value, &error) == TL_INVALID_ARGUMENT, "%s", names[i]);
    tl_tensor_put(value);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("part");
    TCase *tcase = tcase_create("part");
    tcase_add_test(tcase, names_are_read_back);
    tcase_add_test(tcase, parts_that_are_none_are_refused);
    tcase_add_test(tcase, what_has_no_parts);
    tcase_add_test(tcase, names_that_cannot_be);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("rows_show_the_value");
    tcase_add_test(tcase, rows_show_the_value);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("ranges_come_one_behind_the_other");
    tcase_add_test(tcase, ranges_come_one_behind_the_other);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("every_box");
    tcase_add_test(tcase, every_box);
    tcase_add_test(tcase, bytes_of_a_box);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
