// SPDX-License-Identifier: Apache-2.0
/* The receiving half of a transfer: placing, resuming, counting, checking; peers that lie; no memory. */
#include <check.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "tests/fakes/fault_alloc.h"

#define XXH3_createState() (fault_is_due() ? NULL : XXH3_createState())
#include "fakes/run_suite.h"
#include "tensor/fetch.c"

static struct tl_error error;
static struct tl_fetch fetch;
static unsigned place_count;
static enum tl_status place_status;
static bool is_place_late;

static enum tl_status place(struct tl_fetch *placed, const struct tl_meta_data *meta_data,
                            struct tl_tensor **ret_destination, struct tl_error *ret_error)
{
    ck_assert_ptr_eq(placed, &fetch);
    ck_assert_ptr_null(placed->destination);
    place_count++;
    if (place_status != TL_OK) return tl_error_set(ret_error, place_status, "no place");
    if (is_place_late) {
        *ret_destination = NULL;
        return TL_OK;
    }
    return tl_tensor_create_for(meta_data, ret_destination, ret_error);
}

static void done(struct tl_fetch *finished, const struct tl_error *result)
{
    (void)finished, (void)result;
}

static const struct tl_fetch_ops ops = {.place = place, .done = done};
static const struct tl_meta_data ten_bytes = {.dtype = TL_U8, .shape = {1, {10}}, .size_bytes = 10};
static const struct tl_meta_data four_bytes = {.dtype = TL_F32, .size_bytes = 4};
static const unsigned char bytes[10] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};

static void setup(void)
{
    tl_fetch_init(&fetch, &ops);
    fetch.key = "layer/w";
}

static void teardown(void)
{
    tl_fetch_fini(&fetch);
}

static void begin(const struct tl_meta_data *meta_data, uint64_t publication, uint64_t offset)
{
    ck_assert_int_eq(tl_fetch_begin(&fetch, meta_data, publication, 3, offset, &error), TL_OK);
}

static void copy(void *context, unsigned char *to, size_t len)
{
    const unsigned char **from = context;
    memcpy(to, *from, len);
    *from += len;
}

static void must_not_write(void *context, unsigned char *to, size_t len)
{
    (void)context, (void)to, (void)len;
    ck_abort_msg("a place is offered for bytes that were not announced");
}

static void receive(uint64_t len)
{
    const unsigned char *from = bytes + fetch.received_bytes;
    ck_assert_int_eq(tl_fetch_fill(&fetch, len, copy, &from, &error), TL_OK);
    tl_fetch_advance(&fetch, len);
}

START_TEST(whole)
{
    begin(&ten_bytes, 7, 0);
    ck_assert_uint_eq(fetch.publication, 7);
    ck_assert_uint_eq(fetch.offer_step, 3);
    ck_assert(!tl_fetch_is_complete(&fetch));
    receive(4);
    receive(0);
    receive(6);
    ck_assert(tl_fetch_is_complete(&fetch));
    ck_assert_int_eq(tl_fetch_verify(&fetch, false, 0, &error), TL_OK);
    ck_assert(!fetch.is_verified);
    ck_assert_mem_eq(tl_tensor_data(fetch.destination), bytes, 10);
}
END_TEST

START_TEST(checksum)
{
    fetch.wants_checksum = true;
    begin(&ten_bytes, 7, 0);
    receive(3);
    receive(7);
    ck_assert_int_eq(tl_fetch_verify(&fetch, true, XXH3_64bits(bytes, 10), &error), TL_OK);
    ck_assert(fetch.is_verified);
}
END_TEST

START_TEST(checksum_differs)
{
    fetch.wants_checksum = true;
    begin(&ten_bytes, 7, 0);
    receive(10);
    ck_assert_int_eq(tl_fetch_verify(&fetch, true, XXH3_64bits(bytes, 9), &error), TL_DATA_LOSS);
    ck_assert_ptr_nonnull(strstr(error.message, "layer/w"));
    ck_assert(!fetch.is_verified);
}
END_TEST

START_TEST(checksum_missing)
{
    fetch.wants_checksum = true;
    begin(&ten_bytes, 7, 0);
    receive(10);
    ck_assert_int_eq(tl_fetch_verify(&fetch, false, XXH3_64bits(bytes, 10), &error), TL_DATA_LOSS);
    ck_assert_ptr_nonnull(strstr(error.message, "layer/w"));
}
END_TEST

START_TEST(checksum_of_nothing)
{
    const struct tl_meta_data empty = {.dtype = TL_U8, .shape = {1, {0}}};
    fetch.wants_checksum = true;
    begin(&empty, 7, 0);
    ck_assert(tl_fetch_is_complete(&fetch));
    receive(0);
    ck_assert_int_eq(tl_fetch_verify(&fetch, true, XXH3_64bits(NULL, 0), &error), TL_OK);
    ck_assert(fetch.is_verified);
}
END_TEST

START_TEST(dead)
{
    const struct tl_meta_data meta_data = {.is_dead = true};
    begin(&meta_data, 7, 0);
    ck_assert(tl_tensor_is_dead(fetch.destination));
    ck_assert(tl_fetch_is_complete(&fetch));
    ck_assert_int_eq(tl_fetch_fill(&fetch, 1, must_not_write, NULL, &error), TL_OUT_OF_RANGE);
    ck_assert_int_eq(tl_fetch_verify(&fetch, false, 0, &error), TL_OK);
}
END_TEST

START_TEST(more_than_announced)
{
    ck_assert(!tl_fetch_is_complete(&fetch));
    /* Nothing was announced yet. */
    ck_assert_int_eq(tl_fetch_fill(&fetch, 1, must_not_write, NULL, &error), TL_OUT_OF_RANGE);
    ck_assert_int_eq(tl_fetch_fill(&fetch, 0, must_not_write, NULL, &error), TL_OUT_OF_RANGE);
    begin(&ten_bytes, 7, 0);
    ck_assert_int_eq(tl_fetch_fill(&fetch, 11, must_not_write, NULL, &error), TL_OUT_OF_RANGE);
    receive(4);
    ck_assert_int_eq(tl_fetch_fill(&fetch, 7, must_not_write, NULL, &error), TL_OUT_OF_RANGE);
    ck_assert_int_eq(tl_fetch_fill(&fetch, UINT64_MAX, must_not_write, NULL, &error), TL_OUT_OF_RANGE);
    ck_assert_ptr_nonnull(strstr(error.message, "layer/w"));
}
END_TEST

START_TEST(resumed)
{
    fetch.wants_checksum = true;
    begin(&ten_bytes, 7, 0);
    receive(4);
    begin(&ten_bytes, 7, 4);
    receive(6);
    ck_assert_uint_eq(place_count, 1);
    ck_assert_int_eq(tl_fetch_verify(&fetch, true, XXH3_64bits(bytes, 10), &error), TL_OK);
}
END_TEST

START_TEST(started_again_with_another_value)
{
    fetch.wants_checksum = true;
    begin(&ten_bytes, 7, 0);
    receive(4);
    struct tl_tensor *destination = fetch.destination;
    begin(&ten_bytes, 8, 0);
    ck_assert_uint_eq(fetch.received_bytes, 0);
    ck_assert_uint_eq(fetch.publication, 8);
    ck_assert_ptr_eq(fetch.destination, destination);
    ck_assert_uint_eq(place_count, 1);
    receive(10);
    ck_assert_int_eq(tl_fetch_verify(&fetch, true, XXH3_64bits(bytes, 10), &error), TL_OK);
}
END_TEST

START_TEST(placed_again_for_other_meta_data)
{
    begin(&ten_bytes, 7, 0);
    receive(10);
    begin(&four_bytes, 8, 0);
    ck_assert_uint_eq(place_count, 2);
    ck_assert_int_eq(tl_tensor_dtype(fetch.destination), TL_F32);
    receive(4);
    ck_assert(tl_fetch_is_complete(&fetch));
}
END_TEST

static void refuse_resume(const struct tl_meta_data *meta_data, uint64_t publication, uint64_t offset)
{
    ck_assert_int_eq(tl_fetch_begin(&fetch, meta_data, publication, 3, offset, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "layer/w"));
}

START_TEST(wrong_resume)
{
    refuse_resume(&ten_bytes, 7, 4);
    begin(&ten_bytes, 7, 0);
    receive(4);
    refuse_resume(&ten_bytes, 7, 3);
    refuse_resume(&ten_bytes, 7, 5);
    refuse_resume(&ten_bytes, 7, UINT64_MAX);
    refuse_resume(&ten_bytes, 8, 4);
    refuse_resume(&four_bytes, 7, 4);
    ck_assert_uint_eq(fetch.received_bytes, 4);
    begin(&ten_bytes, 7, 4);
}
END_TEST

START_TEST(impossible_meta_data)
{
    const struct tl_meta_data bad = {.dtype = TL_F32, .size_bytes = 5};
    ck_assert_int_eq(tl_fetch_begin(&fetch, &bad, 7, 3, 0, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "layer/w"));
    ck_assert_int_eq(tl_fetch_begin(&fetch, &ten_bytes, 0, 3, 0, &error), TL_INVALID_ARGUMENT);
    ck_assert_uint_eq(place_count, 0);
}
END_TEST

START_TEST(no_place)
{
    place_status = TL_FAILED_PRECONDITION;
    ck_assert_int_eq(tl_fetch_begin(&fetch, &ten_bytes, 7, 3, 0, &error), TL_FAILED_PRECONDITION);
    ck_assert_str_eq(error.message, "no place");
    ck_assert_uint_eq(fetch.publication, 0);
    ck_assert_ptr_null(fetch.destination);
    place_status = TL_OK;
    begin(&ten_bytes, 7, 0);
    /* The former destination is given up when the next value has no place. */
    receive(4);
    place_status = TL_RESOURCE_EXHAUSTED;
    ck_assert_int_eq(tl_fetch_begin(&fetch, &four_bytes, 8, 3, 0, &error), TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_null(fetch.destination);
    ck_assert_uint_eq(fetch.received_bytes, 0);
    ck_assert_uint_eq(fetch.publication, 0);
}
END_TEST

static void placed(struct tl_fetch *of, const struct tl_error *status)
{
    (void)of, (void)status;
}

START_TEST(placed_later)
{
    is_place_late = true;
    fetch.placed = placed;
    begin(&ten_bytes, 7, 0);
    ck_assert_ptr_null(fetch.destination);
    ck_assert(!tl_fetch_is_complete(&fetch));
    ck_assert_int_eq(tl_fetch_fill(&fetch, 1, must_not_write, NULL, &error), TL_OUT_OF_RANGE);
    /* A connection that broke meanwhile begins again; what is there then is another value. */
    begin(&four_bytes, 8, 0);
    ck_assert_uint_eq(place_count, 2);
    place_status = TL_RESOURCE_EXHAUSTED;
    ck_assert_int_eq(tl_fetch_place(&fetch, &error), TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_null(fetch.destination);
    place_status = TL_OK;
    is_place_late = false;
    ck_assert_int_eq(tl_fetch_place(&fetch, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_dtype(fetch.destination), TL_F32);
    ck_assert_uint_eq(fetch.publication, 8);
    receive(4);
    ck_assert(tl_fetch_is_complete(&fetch));
}
END_TEST

START_TEST(later_is_not_for_every_transport)
{
    is_place_late = true;
    begin(&ten_bytes, 7, 0);
}
END_TEST

START_TEST(names_of_paths)
{
    ck_assert_str_eq(tl_path_name(TL_PATH_GPU_DIRECT), "gpu-direct");
    ck_assert_str_eq(tl_path_name(TL_PATH_GPU_PROXY), "gpu-proxy");
    ck_assert_str_eq(tl_path_name(TL_PATH_GPU_IPC), "gpu-ipc");
    ck_assert_str_eq(tl_path_name((enum tl_path)(TL_PATH_INLINE + 1)), "none");
}
END_TEST

START_TEST(damaged_strings)
{
    const struct tl_meta_data meta_data = {.dtype = TL_STRING, .shape = {1, {1}}, .size_bytes = 10};
    begin(&meta_data, 7, 0);
    receive(10);
    ck_assert_int_eq(tl_fetch_verify(&fetch, false, 0, &error), TL_DATA_LOSS);
    ck_assert_ptr_nonnull(strstr(error.message, "layer/w"));
}
END_TEST

START_TEST(no_memory_for_the_checksum)
{
    fetch.wants_checksum = true;
    fault_arm(1);
    ck_assert_int_eq(tl_fetch_begin(&fetch, &ten_bytes, 7, 3, 0, &error), TL_RESOURCE_EXHAUSTED);
    ck_assert(fault_was_hit());
    ck_assert_uint_eq(place_count, 0);
    begin(&ten_bytes, 7, 0);
}
END_TEST

START_TEST(advance_too_far)
{
    begin(&ten_bytes, 7, 0);
    tl_fetch_advance(&fetch, 11);
}
END_TEST

START_TEST(verify_too_early)
{
    begin(&ten_bytes, 7, 0);
    enum tl_status status = tl_fetch_verify(&fetch, false, 0, &error);
    ck_abort_msg("returned %d", (int)status);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("fetch");
    TCase *tcase = tcase_create("fetch");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, whole);
    tcase_add_test(tcase, checksum);
    tcase_add_test(tcase, checksum_differs);
    tcase_add_test(tcase, checksum_missing);
    tcase_add_test(tcase, checksum_of_nothing);
    tcase_add_test(tcase, dead);
    tcase_add_test(tcase, more_than_announced);
    tcase_add_test(tcase, resumed);
    tcase_add_test(tcase, started_again_with_another_value);
    tcase_add_test(tcase, placed_again_for_other_meta_data);
    tcase_add_test(tcase, wrong_resume);
    tcase_add_test(tcase, impossible_meta_data);
    tcase_add_test(tcase, no_place);
    tcase_add_test(tcase, placed_later);
    tcase_add_test_raise_signal(tcase, later_is_not_for_every_transport, SIGABRT);
    tcase_add_test(tcase, names_of_paths);
    tcase_add_test(tcase, damaged_strings);
    tcase_add_test(tcase, no_memory_for_the_checksum);
    tcase_add_test_raise_signal(tcase, advance_too_far, SIGABRT);
    tcase_add_test_raise_signal(tcase, verify_too_early, SIGABRT);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
