// SPDX-License-Identifier: Apache-2.0
/* Tensors: creating, wrapping, strings, aliases, guards, references, and lack of memory. */
#include <check.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fakes/fault_alloc.h"

#include "fakes/run_suite.h"
#include "tensor/tensor.c"

static struct tl_error error;
static const uint64_t dims_2x3[] = {2, 3};

/* ---------------------------------------------------------------------------------------------------- creating -- */

START_TEST(created)
{
    struct tl_tensor *tensor = NULL;
    ck_assert_int_eq(tl_tensor_create(TL_F32, 2, dims_2x3, &tensor, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_dtype(tensor), TL_F32);
    ck_assert_uint_eq(tl_tensor_rank(tensor), 2);
    ck_assert_uint_eq(tl_tensor_dims(tensor)[0], 2);
    ck_assert_uint_eq(tl_tensor_dims(tensor)[1], 3);
    ck_assert_uint_eq(tl_tensor_element_count(tensor), 6);
    ck_assert_uint_eq(tl_tensor_size_bytes(tensor), 24);
    ck_assert_uint_eq((uintptr_t)tl_tensor_data(tensor) % 64, 0);
    ck_assert(!tl_tensor_is_dead(tensor));
    ck_assert(tl_tensor_is_writable(tensor));
    memset(tl_tensor_data(tensor), 1, 24);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(created_large)
{
    struct tl_tensor *tensor = NULL;
    const uint64_t len = (UINT64_C(5) << 20) + 3;
    ck_assert_int_eq(tl_tensor_create(TL_U8, 1, &len, &tensor, &error), TL_OK);
    memset(tl_tensor_data(tensor), 1, len);
    tl_tensor_put(tensor);
}
END_TEST

static struct tl_tensor *create_bytes(uint64_t size_bytes)
{
    struct tl_tensor *tensor;
    ck_assert_int_eq(tl_tensor_create(TL_U8, 1, &size_bytes, &tensor, &error), TL_OK);
    return tensor;
}

/* What is asked for beside a large tensor uses up the space around it. The next tensor of its size still has its pages,
 * so that the kernel need not make new ones. */
START_TEST(memory_of_a_large_tensor_is_used_again)
{
    const uint64_t size_bytes = UINT64_C(16) << 20;
    void *volatile taught = malloc((size_t)31 << 20); /* as a worker does it: glibc keeps less than this */
    free(taught);
    struct tl_tensor *tensor = create_bytes(size_bytes);
    const void *data = tl_tensor_data(tensor);
    ck_assert_uint_eq((uintptr_t)data % HUGE_PAGE_BYTES, 0);
    void *volatile behind = malloc((size_t)3 << 20);
    void *volatile before = malloc(5000);
    tl_tensor_put(tensor);
    tensor = create_bytes(size_bytes);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    ck_assert_ptr_eq(tl_tensor_data(tensor), data);
#else
    (void)data;
#endif
    tl_tensor_put(tensor);
    free(before);
    free(behind);
}
END_TEST

START_TEST(created_scalar_and_empty)
{
    struct tl_tensor *tensor = NULL;
    const uint64_t empty[] = {3, 0, INT64_MAX};
    ck_assert_int_eq(tl_tensor_create(TL_F64, 0, NULL, &tensor, &error), TL_OK);
    ck_assert_uint_eq(tl_tensor_size_bytes(tensor), 8);
    tl_tensor_put(tensor);
    ck_assert_int_eq(tl_tensor_create(TL_F64, 3, empty, &tensor, &error), TL_OK);
    ck_assert_uint_eq(tl_tensor_size_bytes(tensor), 0);
    ck_assert_uint_eq(tl_tensor_element_count(tensor), 0);
    ck_assert_uint_eq(tl_tensor_dims(tensor)[2], INT64_MAX);
    ck_assert_int_eq(tl_tensor_check_readable(tensor, 0, 0, &error), TL_OK);
    tl_tensor_put(tensor);
    tl_tensor_put(NULL);
}
END_TEST

START_TEST(create_errors)
{
    uint64_t dims[TL_MAX_RANK + 1] = {0};
    struct tl_tensor *tensor = NULL;
    ck_assert_int_eq(tl_tensor_create(TL_DTYPE_INVALID, 0, NULL, &tensor, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_tensor_create((enum tl_dtype)99, 0, NULL, &tensor, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_tensor_create(TL_STRING, 0, NULL, &tensor, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "tl_tensor_create_strings"));
    ck_assert_int_eq(tl_tensor_create(TL_F32, TL_MAX_RANK + 1, dims, &tensor, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_tensor_create(TL_F32, 1, NULL, &tensor, &error), TL_INVALID_ARGUMENT);
    dims[0] = (uint64_t)INT64_MAX / 4 + 1;
    ck_assert_int_eq(tl_tensor_create(TL_F32, 1, dims, &tensor, &error), TL_OUT_OF_RANGE);
    dims[0] = UINT64_MAX;
    ck_assert_int_eq(tl_tensor_create(TL_U8, 1, dims, &tensor, NULL), TL_OUT_OF_RANGE);
    ck_assert_ptr_null(tensor);
}
END_TEST

START_TEST(dead)
{
    struct tl_tensor *tensor = NULL;
    ck_assert_int_eq(tl_tensor_create_dead(&tensor, &error), TL_OK);
    ck_assert(tl_tensor_is_dead(tensor));
    ck_assert(!tl_tensor_is_writable(tensor));
    ck_assert_int_eq(tl_tensor_dtype(tensor), TL_DTYPE_INVALID);
    ck_assert_uint_eq(tl_tensor_element_count(tensor), 0);
    ck_assert_uint_eq(tl_tensor_size_bytes(tensor), 0);
    ck_assert_int_eq(tl_meta_data_validate(tl_tensor_meta_data(tensor), &error), TL_OK);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(created_for_meta_data)
{
    static const struct tl_meta_data cases[] = {
        {.dtype = TL_I4, .shape = {1, {5}}, .size_bytes = 3},
        {.dtype = TL_STRING, .shape = {1, {2}}, .size_bytes = 20},
        {.is_dead = true},
        {.dtype = TL_BOOL, .shape = {2, {0, 4}}},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(cases); i++) {
        struct tl_tensor *tensor = NULL;
        ck_assert_int_eq(tl_tensor_create_for(&cases[i], &tensor, &error), TL_OK);
        ck_assert(tl_meta_data_is_equal(tl_tensor_meta_data(tensor), &cases[i]));
        tl_tensor_put(tensor);
    }
    struct tl_tensor *none = NULL;
    const struct tl_meta_data bad = {.dtype = TL_F32, .size_bytes = 5};
    ck_assert_int_eq(tl_tensor_create_for(&bad, &none, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_null(none);
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- wrapping -- */

static unsigned released_count;
static void *released_data, *released_context;

static void release(void *data, void *context)
{
    released_count++;
    released_data = data;
    released_context = context;
}

static float floats[8];

static struct tl_tensor_view float_view(void)
{
    return (struct tl_tensor_view){
        .size_bytes = sizeof(struct tl_tensor_view),
        .dtype = TL_F32,
        .rank = 2,
        .dims = dims_2x3,
        .data = floats,
        .capacity_bytes = sizeof(floats),
        .release = release,
        .release_context = &error,
    };
}

START_TEST(wrapped)
{
    struct tl_tensor *tensor = NULL;
    struct tl_tensor_view view = float_view();
    view.offset_bytes = 8;
    ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, &error), TL_OK);
    ck_assert_ptr_eq(tl_tensor_data(tensor), &floats[2]);
    ck_assert_uint_eq(tl_tensor_size_bytes(tensor), 24);
    ck_assert(tl_tensor_is_writable(tensor));
    ck_assert_ptr_eq(tl_tensor_get(tensor), tensor);
    tl_tensor_put(tensor);
    ck_assert_uint_eq(released_count, 0);
    tl_tensor_put(tensor);
    ck_assert_uint_eq(released_count, 1);
    /* The start of the allocation, not of the elements. */
    ck_assert_ptr_eq(released_data, floats);
    ck_assert_ptr_eq(released_context, &error);
}
END_TEST

START_TEST(wrapped_read_only_without_release)
{
    struct tl_tensor *tensor = NULL;
    struct tl_tensor_view view = float_view();
    view.read_only = true;
    view.release = NULL;
    ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, &error), TL_OK);
    ck_assert(!tl_tensor_is_writable(tensor));
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(wrapped_nothing)
{
    struct tl_tensor *tensor = NULL;
    const uint64_t empty = 0;
    struct tl_tensor_view view = {
        .size_bytes = sizeof(view), .dtype = TL_U8, .rank = 1, .dims = &empty, .release = release};
    ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, &error), TL_OK);
    ck_assert_ptr_null(tl_tensor_data(tensor));
    tl_tensor_put(tensor);
    ck_assert_uint_eq(released_count, 1);
}
END_TEST

START_TEST(strides_accepted)
{
    static const struct {
        unsigned rank;
        uint64_t dims[3];
        int64_t strides[3];
    } cases[] = {
        {2, {2, 3}, {3, 1}}, {3, {2, 1, 3}, {3, -999, 1}}, {2, {1, 6}, {77, 1}},
        {1, {1}, {0}},       {2, {0, 3}, {5, 9}},          {3, {0, INT64_MAX, INT64_MAX}, {1, 2, 3}},
        {0, {0}, {0}},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(cases); i++) {
        struct tl_tensor *tensor = NULL;
        struct tl_tensor_view view = float_view();
        view.rank = cases[i].rank;
        view.dims = cases[i].dims;
        view.strides = cases[i].strides;
        ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, &error), TL_OK);
        tl_tensor_put(tensor);
    }
}
END_TEST

START_TEST(strides_refused)
{
    static const int64_t cases[][2] = {{1, 2}, {4, 1}, {3, 2}, {-3, 1}, {3, -1}, {0, 1}, {3, 0}, {INT64_MIN, 1}};
    for (size_t i = 0; i < TL_ARRAY_COUNT(cases); i++) {
        struct tl_tensor *tensor = NULL;
        struct tl_tensor_view view = float_view();
        view.strides = cases[i];
        ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, &error), TL_INVALID_ARGUMENT);
        ck_assert_ptr_nonnull(strstr(error.message, "contiguous"));
        ck_assert_ptr_null(tensor);
    }
    ck_assert_uint_eq(released_count, 0);
}
END_TEST

static void refuse_view(struct tl_tensor_view view, enum tl_status status)
{
    struct tl_tensor *tensor = NULL;
    ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, &error), status);
    ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, NULL), status);
    ck_assert_ptr_null(tensor);
    ck_assert_uint_eq(released_count, 0);
}

START_TEST(wrap_errors)
{
    const uint64_t huge = INT64_MAX;
    struct tl_tensor_view view = float_view();
    view.size_bytes = TL_TENSOR_VIEW_FIRST_BYTES - 1;
    refuse_view(view, TL_INVALID_ARGUMENT);
    view = float_view();
    view.dtype = TL_STRING;
    refuse_view(view, TL_INVALID_ARGUMENT);
    view = float_view();
    view.rank = 17;
    refuse_view(view, TL_INVALID_ARGUMENT);
    view = float_view();
    view.dims = NULL;
    refuse_view(view, TL_INVALID_ARGUMENT);
    view = float_view();
    view.dims = &huge;
    view.rank = 1;
    refuse_view(view, TL_OUT_OF_RANGE);
    view = float_view();
    view.data = NULL;
    refuse_view(view, TL_INVALID_ARGUMENT);
    view = float_view();
    view.offset_bytes = 9;
    refuse_view(view, TL_INVALID_ARGUMENT);
    view = float_view();
    view.offset_bytes = UINT64_MAX;
    refuse_view(view, TL_INVALID_ARGUMENT);
    view = float_view();
    view.capacity_bytes = 23;
    refuse_view(view, TL_INVALID_ARGUMENT);
    view = float_view();
    view.device.kind = (enum tl_device_kind)9;
    refuse_view(view, TL_UNIMPLEMENTED);
}
END_TEST

START_TEST(no_allocation_is_larger_than_the_address_space)
{
    struct tl_tensor_view view = float_view();
    view.capacity_bytes = UINT64_C(1) << 63;
    refuse_view(view, TL_OUT_OF_RANGE);
    view.capacity_bytes = UINT64_MAX;
    refuse_view(view, TL_OUT_OF_RANGE);
    view = float_view();
    view.data = (void *)(UINTPTR_MAX - 1000);
    view.capacity_bytes = 2000;
    refuse_view(view, TL_OUT_OF_RANGE);
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- strings -- */

static const struct tl_string words[] = {{"ab", 2}, {NULL, 0}, {"c", 1}, {"def", 3}, {"", 0}, {"g", 1}};

START_TEST(strings)
{
    struct tl_tensor *tensor = NULL;
    struct tl_string string = {0};
    ck_assert_int_eq(tl_tensor_create_strings(2, dims_2x3, words, &tensor, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_dtype(tensor), TL_STRING);
    ck_assert_uint_eq(tl_tensor_size_bytes(tensor), 6 * 8 + 7);
    for (uint64_t i = 0; i < 6; i++) {
        ck_assert_int_eq(tl_tensor_string(tensor, i, &string, &error), TL_OK);
        ck_assert_uint_eq(string.len_bytes, words[i].len_bytes);
        if (string.len_bytes > 0) ck_assert_mem_eq(string.data, words[i].data, string.len_bytes);
    }
    ck_assert_int_eq(tl_tensor_string(tensor, 6, &string, &error), TL_OUT_OF_RANGE);
    ck_assert_int_eq(tl_tensor_check_strings(tensor, &error), TL_OK);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(string_scalar_and_empty)
{
    struct tl_tensor *tensor = NULL;
    struct tl_string string = {0};
    const uint64_t empty = 0;
    ck_assert_int_eq(tl_tensor_create_strings(0, NULL, words, &tensor, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_string(tensor, 0, &string, &error), TL_OK);
    ck_assert_uint_eq(string.len_bytes, 2);
    tl_tensor_put(tensor);
    ck_assert_int_eq(tl_tensor_create_strings(1, &empty, NULL, &tensor, &error), TL_OK);
    ck_assert_uint_eq(tl_tensor_size_bytes(tensor), 0);
    ck_assert_int_eq(tl_tensor_string(tensor, 0, &string, &error), TL_OUT_OF_RANGE);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(string_errors)
{
    struct tl_tensor *tensor = NULL;
    struct tl_string string = {0};
    const uint64_t huge[] = {INT64_MAX, 2};
    const struct tl_string no_data = {NULL, 1};
    ck_assert_int_eq(tl_tensor_create_strings(17, huge, words, &tensor, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_tensor_create_strings(1, NULL, words, &tensor, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_tensor_create_strings(0, NULL, NULL, &tensor, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_tensor_create_strings(0, NULL, &no_data, &tensor, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_tensor_create_strings(2, huge, words, &tensor, &error), TL_OUT_OF_RANGE);
    ck_assert_ptr_null(tensor);
    ck_assert_int_eq(tl_tensor_create(TL_U8, 0, NULL, &tensor, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_string(tensor, 0, &string, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_tensor_check_strings(tensor, &error), TL_OK);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(received_strings_are_checked)
{
    const struct tl_meta_data meta_data = {.dtype = TL_STRING, .shape = {1, {1}}, .size_bytes = 10};
    static const unsigned char good[] = {2, 0, 0, 0, 0, 0, 0, 0, 'h', 'i'};
    struct tl_tensor *tensor = NULL;
    struct tl_string string = {0};
    ck_assert_int_eq(tl_tensor_create_for(&meta_data, &tensor, &error), TL_OK);
    memset(tl_tensor_data(tensor), 0xff, 10);
    ck_assert_int_eq(tl_tensor_string(tensor, 0, &string, &error), TL_DATA_LOSS);
    ck_assert_int_eq(tl_tensor_check_strings(tensor, &error), TL_DATA_LOSS);
    memcpy(tl_tensor_data(tensor), good, sizeof(good));
    ck_assert_int_eq(tl_tensor_check_strings(tensor, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_string(tensor, 0, &string, &error), TL_OK);
    ck_assert_mem_eq(string.data, "hi", 2);
    tl_tensor_put(tensor);
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- aliases -- */

START_TEST(alias)
{
    struct tl_tensor *base = NULL, *tensor = NULL;
    struct tl_tensor_view view = float_view();
    view.release_context = floats;
    ck_assert_int_eq(tl_tensor_wrap(&view, &base, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_create_alias(base, release, &error, &tensor, &error), TL_OK);
    ck_assert_ptr_eq(tl_tensor_data(tensor), floats);
    ck_assert(tl_meta_data_is_equal(tl_tensor_meta_data(tensor), tl_tensor_meta_data(base)));
    ck_assert(!tl_tensor_is_writable(tensor));
    tl_tensor_put(base);
    ck_assert_uint_eq(released_count, 0);
    /* The base first, then the alias. */
    tl_tensor_put(tensor);
    ck_assert_uint_eq(released_count, 2);
    ck_assert_ptr_eq(released_context, &error);
}
END_TEST

/* The caller frees the memory of an alias as soon as it is told that the alias is not read any more. */
static void free_place(void *data, void *context)
{
    memset(context, 0xff, tl_tensor_place_bytes);
    release(data, context);
    free(context);
}

START_TEST(alias_in_memory_of_the_caller)
{
    struct tl_tensor *base = NULL;
    struct tl_tensor_view view = float_view();
    ck_assert_int_eq(tl_tensor_wrap(&view, &base, &error), TL_OK);
    void *place = malloc(tl_tensor_place_bytes);
    memset(place, 0xff, tl_tensor_place_bytes);
    struct tl_tensor *tensor = tl_tensor_create_alias_in(place, base, free_place, place);
    ck_assert_ptr_eq(tensor, place);
    ck_assert_ptr_eq(tl_tensor_data(tensor), floats);
    ck_assert(tl_meta_data_is_equal(tl_tensor_meta_data(tensor), tl_tensor_meta_data(base)));
    ck_assert(!tl_tensor_is_writable(tensor));
    tl_tensor_put(base);
    ck_assert_ptr_eq(tl_tensor_get(tensor), tensor);
    tl_tensor_put(tensor);
    ck_assert_uint_eq(released_count, 0);
    tl_tensor_put(tensor);
    ck_assert_uint_eq(released_count, 2);
    ck_assert_ptr_eq(released_context, place);
}
END_TEST

/* Its base stays, although that is an alias which adds nothing to the tensor that it shows. */
START_TEST(alias_in_place_keeps_its_base)
{
    struct tl_tensor *shown = NULL, *base = NULL;
    struct tl_tensor_view view = float_view();
    void *place = malloc(tl_tensor_place_bytes);
    ck_assert_int_eq(tl_tensor_wrap(&view, &shown, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_create_alias(shown, NULL, NULL, &base, &error), TL_OK);
    tl_tensor_put(shown);
    struct tl_tensor *tensor = tl_tensor_create_alias_in(place, base, free_place, place);
    ck_assert(tl_tensor_is_shared(base));
    tl_tensor_put(base);
    tl_tensor_put(tensor);
    ck_assert_uint_eq(released_count, 2);
}
END_TEST

START_TEST(annotations)
{
    const struct tl_annotation first = {"k", "1"}, second = {"k", "2"};
    struct tl_annotations *old = NULL, *new = NULL;
    struct tl_tensor *base = NULL, *tensor = NULL;
    size_t count;
    ck_assert_int_eq(tl_annotations_create(&first, 1, &old, &error), TL_OK);
    ck_assert_int_eq(tl_annotations_create(&second, 1, &new, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_create(TL_U8, 0, NULL, &base, &error), TL_OK);
    ck_assert_ptr_null(tl_tensor_annotations(base));
    tl_tensor_set_annotations(base, old);
    ck_assert_int_eq(tl_tensor_create_alias(base, NULL, NULL, &tensor, &error), TL_OK);
    tl_tensor_set_annotations(base, new);
    tl_annotations_put(old);
    tl_annotations_put(new);
    ck_assert_str_eq(tl_annotations_items(tl_tensor_annotations(tensor), &count)->value, "1");
    ck_assert_str_eq(tl_annotations_items(tl_tensor_annotations(base), &count)->value, "2");
    tl_tensor_set_annotations(base, NULL);
    ck_assert_ptr_null(tl_tensor_annotations(base));
    tl_tensor_put(base);
    tl_tensor_put(tensor);
}
END_TEST

/* Aliases of aliases are no chain, whose end would be a recursion as deep. */
START_TEST(alias_of_alias_of_alias)
{
    uint64_t dim = 4;
    struct tl_tensor *tensor, *next;
    ck_assert_int_eq(tl_tensor_create(TL_U8, 1, &dim, &tensor, &error), TL_OK);
    memcpy(tl_tensor_data(tensor), "abcd", 4);
    for (unsigned i = 0; i < 300000; i++) {
        ck_assert_int_eq(tl_tensor_create_alias(tensor, NULL, NULL, &next, &error), TL_OK);
        tl_tensor_put(tensor);
        tensor = next;
    }
    ck_assert_mem_eq(tl_tensor_data(tensor), "abcd", 4);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(alias_of_strings_and_dead)
{
    struct tl_tensor *base = NULL, *tensor = NULL;
    struct tl_string string = {0};
    ck_assert_int_eq(tl_tensor_create_strings(2, dims_2x3, words, &base, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_create_alias(base, release, NULL, &tensor, &error), TL_OK);
    tl_tensor_put(base);
    ck_assert_int_eq(tl_tensor_string(tensor, 3, &string, &error), TL_OK);
    ck_assert_mem_eq(string.data, "def", 3);
    tl_tensor_put(tensor);
    ck_assert_int_eq(tl_tensor_create_dead(&base, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_create_alias(base, release, NULL, &tensor, &error), TL_OK);
    tl_tensor_put(base);
    ck_assert(tl_tensor_is_dead(tensor));
    tl_tensor_put(tensor);
    ck_assert_uint_eq(released_count, 2);
}
END_TEST

/* ------------------------------------------------------------------------------------------------- attachments -- */

START_TEST(created_around)
{
    const struct tl_meta_data plain = {.dtype = TL_F32, .shape = {2, {2, 3}}, .size_bytes = 24};
    const struct tl_meta_data empty = {.dtype = TL_F32, .shape = {1, {0}}};
    const struct tl_meta_data dead_one = {.is_dead = true};
    struct tl_tensor *tensor = NULL, *alias = NULL;
    ck_assert_int_eq(tl_tensor_create_around(&plain, floats, release, &error, &tensor, &error), TL_OK);
    ck_assert_ptr_eq(tl_tensor_data(tensor), floats);
    ck_assert_int_eq(tl_tensor_create_alias(tensor, NULL, NULL, &alias, &error), TL_OK);
    ck_assert_ptr_eq(tl_tensor_release_context(tensor, release), &error);
    ck_assert_ptr_eq(tl_tensor_release_context(alias, release), &error);
    ck_assert_ptr_null(tl_tensor_release_context(tensor, NULL));
    tl_tensor_put(alias);
    ck_assert_uint_eq(released_count, 0);
    ck_assert_uint_eq(tl_tensor_element_count(tensor), 6);
    ck_assert(tl_tensor_is_writable(tensor));
    tl_tensor_put(tensor);
    ck_assert_uint_eq(released_count, 1);
    ck_assert_ptr_eq(released_data, floats);
    ck_assert_ptr_eq(released_context, &error);
    ck_assert_int_eq(tl_tensor_create_around(&empty, NULL, release, NULL, &tensor, &error), TL_OK);
    tl_tensor_put(tensor);
    ck_assert_uint_eq(released_count, 2);
    ck_assert_int_eq(tl_tensor_create_around(&dead_one, NULL, NULL, NULL, &tensor, &error), TL_OK);
    ck_assert(tl_tensor_is_dead(tensor));
    ck_assert_uint_eq(tl_tensor_element_count(tensor), 0);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(strings_created_around)
{
    const struct tl_meta_data meta_data = {.dtype = TL_STRING, .shape = {1, {1}}, .size_bytes = 10};
    unsigned char bytes[] = {3, 0, 0, 0, 0, 0, 0, 0, 'h', 'i'};
    struct tl_tensor *tensor = NULL;
    struct tl_string string = {0};
    ck_assert_int_eq(tl_tensor_create_around(&meta_data, bytes, NULL, NULL, &tensor, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_check_strings(tensor, &error), TL_DATA_LOSS);
    bytes[0] = 2;
    ck_assert_int_eq(tl_tensor_check_strings(tensor, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_string(tensor, 0, &string, &error), TL_OK);
    ck_assert_ptr_eq(string.data, bytes + 8);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(created_around_without_memory)
{
    const struct tl_meta_data meta_data = {.dtype = TL_STRING, .shape = {1, {1}}, .size_bytes = 10};
    struct tl_tensor *tensor = NULL;
    for (unsigned n = 1;; n++) {
        fault_arm(n);
        enum tl_status status = tl_tensor_create_around(&meta_data, floats, release, NULL, &tensor, &error);
        if (!fault_was_hit()) {
            ck_assert_int_eq(status, TL_OK);
            ck_assert_uint_gt(n, 1);
            break;
        }
        ck_assert_int_eq(status, TL_RESOURCE_EXHAUSTED);
        ck_assert_ptr_null(tensor);
        ck_assert_uint_eq(released_count, 0);
    }
    tl_tensor_put(tensor);
    ck_assert_uint_eq(released_count, 1);
}
END_TEST

START_TEST(allocations)
{
    struct tl_tensor *tensor = NULL, *other = NULL;
    struct tl_tensor_view view = float_view();
    uint64_t capacity_bytes = 0;
    void *data = NULL;
    view.offset_bytes = 4;
    view.capacity_bytes = 28;
    ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_create_alias(tensor, release, NULL, &other, &error), TL_OK);
    tl_tensor_allocation(tensor, &data, &capacity_bytes);
    ck_assert_ptr_eq(data, floats);
    ck_assert_uint_eq(capacity_bytes, 28);
    tl_tensor_allocation(other, &data, &capacity_bytes);
    ck_assert_ptr_eq(data, floats);
    ck_assert_uint_eq(capacity_bytes, 28);
    tl_tensor_put(other);
    tl_tensor_put(tensor);
    ck_assert_int_eq(tl_tensor_create(TL_F32, 2, dims_2x3, &tensor, &error), TL_OK);
    tl_tensor_allocation(tensor, &data, &capacity_bytes);
    ck_assert_ptr_eq(data, tl_tensor_data(tensor));
    ck_assert_uint_eq(capacity_bytes, 24);
    tl_tensor_put(tensor);
    ck_assert_int_eq(tl_tensor_create_dead(&tensor, &error), TL_OK);
    tl_tensor_allocation(tensor, &data, &capacity_bytes);
    ck_assert_ptr_null(data);
    ck_assert_uint_eq(capacity_bytes, 0);
    tl_tensor_put(tensor);
}
END_TEST

static struct tl_tensor_attachment *detached[4];
static unsigned detached_count;

static void detach(struct tl_tensor_attachment *attachment)
{
    ck_assert_uint_eq(released_count, 0);
    detached[detached_count++] = attachment;
}

START_TEST(attachments)
{
    struct tl_tensor_attachment first = {.owner = &error, .detach = detach},
                                second = {.owner = words, .detach = detach};
    struct tl_tensor *tensor = NULL, *other = NULL, *another = NULL;
    struct tl_tensor_view view = float_view();
    ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, &error), TL_OK);
    ck_assert_ptr_null(tl_tensor_find_attachment(tensor, &error));
    ck_assert_int_eq(tl_tensor_create_alias(tensor, NULL, NULL, &other, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_create_alias(other, NULL, NULL, &another, &error), TL_OK);
    tl_tensor_attach(tensor, &first);
    tl_tensor_attach(another, &second);
    ck_assert_ptr_eq(tl_tensor_find_attachment(tensor, &error), &first);
    ck_assert_ptr_eq(tl_tensor_find_attachment(tensor, words), &second);
    ck_assert_ptr_eq(tl_tensor_find_attachment(another, &error), &first);
    ck_assert_ptr_null(tl_tensor_find_attachment(another, floats));
    tl_tensor_put(tensor);
    tl_tensor_put(other);
    ck_assert_uint_eq(detached_count, 0);
    tl_tensor_put(another);
    ck_assert_uint_eq(detached_count, 2);
    ck_assert_ptr_eq(detached[0], &second);
    ck_assert_ptr_eq(detached[1], &first);
    ck_assert_uint_eq(released_count, 1);
}
END_TEST

enum { ATTACHING_THREADS = 4, ATTACHMENTS = 500 };
static struct tl_tensor_attachment many[ATTACHING_THREADS][ATTACHMENTS];
static unsigned many_detached;

static void detach_one_of_many(struct tl_tensor_attachment *attachment)
{
    (void)attachment;
    many_detached++;
}

struct attaching {
    struct tl_tensor *tensor;
    struct tl_tensor_attachment *attachments;
};

static void *attach_many(void *argument)
{
    struct attaching *attaching = argument;
    for (int i = 0; i < ATTACHMENTS; i++) {
        struct tl_tensor_attachment *attachment = &attaching->attachments[i];
        *attachment = (struct tl_tensor_attachment){.owner = attachment, .detach = detach_one_of_many};
        tl_tensor_attach(attaching->tensor, attachment);
        ck_assert_ptr_eq(tl_tensor_find_attachment(attaching->tensor, attachment), attachment);
    }
    return NULL;
}

START_TEST(attachments_of_several_threads)
{
    pthread_t threads[ATTACHING_THREADS];
    struct attaching attaching[ATTACHING_THREADS];
    struct tl_tensor *tensor = NULL;
    ck_assert_int_eq(tl_tensor_create_dead(&tensor, &error), TL_OK);
    for (int i = 0; i < ATTACHING_THREADS; i++) {
        attaching[i] = (struct attaching){tensor, many[i]};
        ck_assert_int_eq(pthread_create(&threads[i], NULL, attach_many, &attaching[i]), 0);
    }
    for (int i = 0; i < ATTACHING_THREADS; i++)
        ck_assert_int_eq(pthread_join(threads[i], NULL), 0);
    tl_tensor_put(tensor);
    ck_assert_uint_eq(many_detached, ATTACHING_THREADS * ATTACHMENTS);
}
END_TEST

/* ---------------------------------------------------------------------------------------- guard and references -- */

static enum tl_status guard(void *context, const void *data, uint64_t len_bytes, struct tl_error *ret_error)
{
    ck_assert_ptr_eq(context, &error);
    ck_assert_ptr_eq(data, &floats[1]);
    ck_assert_uint_eq(len_bytes, 8);
    return tl_error_set(ret_error, TL_DATA_LOSS, "gone");
}

START_TEST(guarded)
{
    struct tl_tensor *tensor = NULL, *other = NULL;
    struct tl_tensor_view view = float_view();
    ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_check_readable(tensor, 4, 8, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_check(tensor, &error), TL_OK);
    tl_tensor_set_guard(tensor, guard, &error);
    ck_assert_int_eq(tl_tensor_check_readable(tensor, 4, 8, &error), TL_DATA_LOSS);
    ck_assert_int_eq(tl_tensor_check_readable(tensor, 24, 0, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_create_alias(tensor, release, NULL, &other, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_check_readable(other, 4, 8, &error), TL_DATA_LOSS);
    tl_tensor_put(other);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(readable_beyond_the_end)
{
    struct tl_tensor *tensor = NULL;
    ck_assert_int_eq(tl_tensor_create(TL_F32, 2, dims_2x3, &tensor, &error), TL_OK);
    enum tl_status status = tl_tensor_check_readable(tensor, 24, 1, &error);
    ck_abort_msg("returned %d", (int)status);
}
END_TEST

START_TEST(shared)
{
    struct tl_tensor *tensor = NULL;
    ck_assert_int_eq(tl_tensor_create_dead(&tensor, &error), TL_OK);
    ck_assert(!tl_tensor_is_shared(tensor));
    tl_tensor_get(tensor);
    ck_assert(tl_tensor_is_shared(tensor));
    tl_tensor_put(tensor);
    ck_assert(!tl_tensor_is_shared(tensor));
    tl_tensor_put(tensor);
}
END_TEST

static void *get_and_put(void *tensor)
{
    for (int i = 0; i < 10000; i++)
        tl_tensor_put(tl_tensor_get(tensor));
    tl_tensor_put(tensor);
    return NULL;
}

START_TEST(references_of_several_threads)
{
    pthread_t threads[4];
    struct tl_tensor *tensor = NULL;
    struct tl_tensor_view view = float_view();
    ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, &error), TL_OK);
    for (int i = 0; i < 4; i++)
        ck_assert_int_eq(pthread_create(&threads[i], NULL, get_and_put, tl_tensor_get(tensor)), 0);
    tl_tensor_put(tensor);
    for (int i = 0; i < 4; i++)
        ck_assert_int_eq(pthread_join(threads[i], NULL), 0);
    ck_assert_uint_eq(released_count, 1);
}
END_TEST

/* --------------------------------------------------------------------------------------------------- no memory -- */

static enum tl_status try_create(struct tl_tensor **ret_tensor)
{
    return tl_tensor_create(TL_F32, 2, dims_2x3, ret_tensor, &error);
}

static enum tl_status try_dead(struct tl_tensor **ret_tensor)
{
    return tl_tensor_create_dead(ret_tensor, &error);
}

static enum tl_status try_wrap(struct tl_tensor **ret_tensor)
{
    struct tl_tensor_view view = float_view();
    return tl_tensor_wrap(&view, ret_tensor, &error);
}

static enum tl_status try_strings(struct tl_tensor **ret_tensor)
{
    return tl_tensor_create_strings(2, dims_2x3, words, ret_tensor, &error);
}

static enum tl_status (*const attempts[])(struct tl_tensor **) = {try_create, try_dead, try_wrap, try_strings};

START_TEST(out_of_memory)
{
    for (size_t i = 0; i < TL_ARRAY_COUNT(attempts); i++) {
        struct tl_tensor *tensor = NULL;
        for (unsigned n = 1;; n++) {
            fault_arm(n);
            enum tl_status status = attempts[i](&tensor);
            if (!fault_was_hit()) {
                ck_assert_uint_gt(n, 1);
                ck_assert_int_eq(status, TL_OK);
                break;
            }
            ck_assert_int_eq(status, TL_RESOURCE_EXHAUSTED);
            ck_assert_int_eq(error.code, TL_RESOURCE_EXHAUSTED);
            ck_assert_ptr_null(tensor);
            ck_assert_uint_eq(released_count, 0);
        }
        tl_tensor_put(tensor);
        released_count = 0;
    }
}
END_TEST

START_TEST(out_of_memory_for_an_alias)
{
    struct tl_tensor *base = NULL, *tensor = NULL;
    ck_assert_int_eq(tl_tensor_create_strings(2, dims_2x3, words, &base, &error), TL_OK);
    fault_arm(1);
    ck_assert_int_eq(tl_tensor_create_alias(base, release, NULL, &tensor, &error), TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_null(tensor);
    ck_assert(!tl_tensor_is_shared(base));
    tl_tensor_put(base);
    ck_assert_uint_eq(released_count, 0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("tensor");
    TCase *tcase = tcase_create("tensor");
    tcase_add_test(tcase, created);
    tcase_add_test(tcase, created_large);
    tcase_add_test(tcase, memory_of_a_large_tensor_is_used_again);
    tcase_add_test(tcase, created_scalar_and_empty);
    tcase_add_test(tcase, create_errors);
    tcase_add_test(tcase, dead);
    tcase_add_test(tcase, created_for_meta_data);
    tcase_add_test(tcase, wrapped);
    tcase_add_test(tcase, wrapped_read_only_without_release);
    tcase_add_test(tcase, wrapped_nothing);
    tcase_add_test(tcase, strides_accepted);
    tcase_add_test(tcase, strides_refused);
    tcase_add_test(tcase, wrap_errors);
    tcase_add_test(tcase, no_allocation_is_larger_than_the_address_space);
    tcase_add_test(tcase, strings);
    tcase_add_test(tcase, string_scalar_and_empty);
    tcase_add_test(tcase, string_errors);
    tcase_add_test(tcase, received_strings_are_checked);
    tcase_add_test(tcase, alias);
    tcase_add_test(tcase, alias_of_alias_of_alias);
    tcase_add_test(tcase, alias_in_memory_of_the_caller);
    tcase_add_test(tcase, annotations);
    tcase_add_test(tcase, alias_of_strings_and_dead);
    tcase_add_test(tcase, created_around);
    tcase_add_test(tcase, strings_created_around);
    tcase_add_test(tcase, created_around_without_memory);
    tcase_add_test(tcase, allocations);
    tcase_add_test(tcase, attachments);
    tcase_add_test(tcase, attachments_of_several_threads);
    tcase_add_test(tcase, guarded);
    tcase_add_test_raise_signal(tcase, readable_beyond_the_end, SIGABRT);
    tcase_add_test(tcase, shared);
    tcase_add_test(tcase, references_of_several_threads);
    tcase_add_test(tcase, out_of_memory);
    tcase_add_test(tcase, out_of_memory_for_an_alias);
    add_own_case(suite, "alias_in_place_keeps_its_base", NULL, NULL, alias_in_place_keeps_its_base);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
