// SPDX-License-Identifier: Apache-2.0
/* The packed form of requests and chunks: what is packed comes back, with the bytes that docs/protocol.md says; what is
 * no record is an error. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "control/packed.h"
#include "fakes/run_suite.h"

static unsigned char bytes[4096];
static struct tl_packer packer;
static struct tl_unpacker unpacker;
static struct tl_error error;

static const uint64_t numbers[] = {
    0, 1, 127, 128, 16383, 16384, UINT64_C(1) << 32, UINT64_MAX / 2, UINT64_MAX / 2 + 1, UINT64_MAX};
#define NUMBER_COUNT (sizeof(numbers) / sizeof(numbers[0]))

static void setup(void)
{
    packer = (struct tl_packer){.bytes = bytes};
}

/* Reads exactly what was packed, from memory that ends with it. */
static unsigned char *begin_reading(size_t len_bytes)
{
    unsigned char *copy = malloc(len_bytes + 1);
    memcpy(copy, bytes, len_bytes);
    unsigned char *exact = realloc(copy, len_bytes > 0 ? len_bytes : 1);
    unpacker = (struct tl_unpacker){.at = exact, .end = exact + len_bytes};
    return exact;
}

static void pack_numbered(uint64_t number, uint32_t key_number, uint64_t step)
{
    Tensorlane__V1__Request request = TENSORLANE__V1__REQUEST__INIT;
    const struct tl_packed_key key = {.number = key_number};
    request.number = number;
    request.step = step;
    tl_pack_request(&packer, &request, &key);
}

static void expect_bytes(const char *expected, size_t len_bytes)
{
    ck_assert_uint_eq(packer.used, len_bytes);
    ck_assert_mem_eq(bytes, expected, len_bytes);
}

/* ---------------------------------------------------------------------------------------------------- requests -- */

START_TEST(bytes_of_requests)
{
    Tensorlane__V1__Request request = TENSORLANE__V1__REQUEST__INIT;
    const struct tl_packed_key key = {.text = "w", .text_bytes = 1, .is_kept = true};
    request.number = 1;
    request.step = 2;
    request.wants_checksum = 1;
    tl_pack_request(&packer, &request, &key);
    pack_numbered(2, 0, 2);
    expect_bytes("\x0f\x02\x01w\x04"
                 "\x00\x02\x00",
                 8);
}
END_TEST

/* The first record of a field has whole numbers, the others have differences. */
START_TEST(requests_in_the_steady_state_take_few_bytes)
{
    pack_numbered(UINT64_C(1) << 34, 32767, 1800000000);
    ck_assert_uint_le(packer.used, 16);
    size_t before = packer.used;
    for (unsigned i = 1; i < 100; i++) {
        pack_numbered((UINT64_C(1) << 34) + i, (i * 7919) % 32768, 1800000000 + i % 2);
        ck_assert_uint_le(packer.used - before, 6);
        before = packer.used;
    }
}
END_TEST

static void expect_same_request(const Tensorlane__V1__Request *expected, const struct tl_packed_key *expected_key)
{
    Tensorlane__V1__Request request;
    struct tl_packed_key key;
    ck_assert_msg(tl_unpack_request(&unpacker, &request, &key, &error) == TL_OK, "%s", error.message);
    ck_assert_uint_eq(request.number, expected->number);
    ck_assert_uint_eq(request.step, expected->step);
    ck_assert_uint_eq(request.subscription, expected->subscription);
    ck_assert_int_eq(request.wants_checksum, expected->wants_checksum);
    ck_assert_uint_eq(request.priority, expected->priority);
    ck_assert_uint_eq(request.publication, expected->publication);
    ck_assert_uint_eq(request.resume_offset, expected->resume_offset);
    ck_assert_uint_eq(key.text_bytes, expected_key->text_bytes);
    ck_assert_int_eq(key.is_kept, expected_key->is_kept);
    if (expected_key->text == NULL) {
        ck_assert_ptr_null(key.text);
        ck_assert_uint_eq(key.number, expected_key->number);
    } else {
        ck_assert_mem_eq(key.text, expected_key->text, key.text_bytes);
    }
}

/* The request and key that a few bits and numbers make. */
static void make_request(unsigned seed, Tensorlane__V1__Request *ret_request, struct tl_packed_key *ret_key)
{
    static const char text[] = "a key with a name";
    tensorlane__v1__request__init(ret_request);
    *ret_key = (struct tl_packed_key){.number = (uint32_t)numbers[seed % NUMBER_COUNT]};
    if ((seed & 1) != 0) {
        *ret_key = (struct tl_packed_key){.text = text, .text_bytes = seed % sizeof(text), .is_kept = (seed & 2) != 0};
    }
    ret_request->number = numbers[(seed + 3) % NUMBER_COUNT];
    ret_request->step = numbers[seed / 2 % NUMBER_COUNT];
    ret_request->wants_checksum = (seed & 4) != 0;
    ret_request->priority = seed / 8 % 4;
    ret_request->subscription = numbers[seed / 32 % NUMBER_COUNT];
    if (seed % 3 != 0) return;
    ret_request->publication = numbers[(seed + 5) % NUMBER_COUNT];
    ret_request->resume_offset = numbers[(seed + 7) % NUMBER_COUNT];
}

#define SEEDS 120

START_TEST(requests_come_back)
{
    Tensorlane__V1__Request request;
    struct tl_packed_key key;
    unsigned char *large = malloc(SEEDS * (TL_PACKED_REQUEST_BYTES + 32));
    packer.bytes = large;
    for (unsigned seed = 0; seed < SEEDS; seed++) {
        size_t before = packer.used;
        make_request(seed, &request, &key);
        tl_pack_request(&packer, &request, &key);
        ck_assert_uint_le(packer.used - before, TL_PACKED_REQUEST_BYTES + key.text_bytes);
    }
    unpacker = (struct tl_unpacker){.at = large, .end = large + packer.used};
    for (unsigned seed = 0; seed < SEEDS; seed++) {
        make_request(seed, &request, &key);
        expect_same_request(&request, &key);
    }
    ck_assert(tl_unpacker_is_at_end(&unpacker));
    free(large);
}
END_TEST

/* A record that is cut anywhere is none. */
START_TEST(requests_that_are_cut)
{
    for (unsigned seed = 0; seed < SEEDS; seed++) {
        Tensorlane__V1__Request request;
        struct tl_packed_key key;
        setup();
        make_request(seed, &request, &key);
        tl_pack_request(&packer, &request, &key);
        for (size_t len_bytes = 0; len_bytes < packer.used; len_bytes++) {
            unsigned char *exact = begin_reading(len_bytes);
            ck_assert_int_eq(tl_unpack_request(&unpacker, &request, &key, &error), TL_INVALID_ARGUMENT);
            free(exact);
        }
    }
}
END_TEST

static void expect_no_request(const char *record, size_t len_bytes)
{
    Tensorlane__V1__Request request;
    struct tl_packed_key key;
    memcpy(bytes, record, len_bytes);
    unsigned char *exact = begin_reading(len_bytes);
    ck_assert_int_eq(tl_unpack_request(&unpacker, &request, &key, &error), TL_INVALID_ARGUMENT);
    ck_assert_str_eq(error.message, "packed requests that are no such records");
    free(exact);
}

START_TEST(requests_that_are_none)
{
    expect_no_request("\x80\x02\x02\x00", 4);                                      /* an unknown flag */
    expect_no_request("\x80\x01\x02\x00\x00", 5);                                  /* subscription 0 */
    expect_no_request("\x02\x02\x00", 3);                                          /* a number that is to be kept */
    expect_no_request("\x00\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02\x00", 12);     /* 65 bits */
    expect_no_request("\x00\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x00\x00", 13); /* eleven bytes */
    expect_no_request("\x00\x02\x80\x80\x80\x80\x20", 7);                          /* key number 2^32 */
    expect_no_request("\x00\x02\x01", 3);                                          /* key number -1 */
    expect_no_request("\x01\x02\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01w", 13);    /* a text of 2^64-1 bytes */
    expect_no_request("\x01\x02\x02w", 4);                                         /* a text beyond the end */
}
END_TEST

/* ------------------------------------------------------------------------------------------------------ chunks -- */

static void make_chunk(unsigned seed, struct tl_unpacked_chunk *ret_chunk)
{
    Tensorlane__V1__Chunk *chunk = &ret_chunk->chunk;
    tensorlane__v1__chunk__init(chunk);
    chunk->number = numbers[seed % NUMBER_COUNT];
    chunk->offset = numbers[seed / 2 % NUMBER_COUNT];
    chunk->len_bytes = numbers[seed / 3 % NUMBER_COUNT];
    chunk->has_checksum = (seed & 2) != 0;
    if (chunk->has_checksum) chunk->checksum = numbers[seed / 5 % NUMBER_COUNT];
    if ((seed & 1) == 0) return;
    tensorlane__v1__meta_data__init(&ret_chunk->meta_data);
    chunk->meta_data = &ret_chunk->meta_data;
    chunk->publication = numbers[seed / 4 % NUMBER_COUNT];
    chunk->step = numbers[seed / 6 % NUMBER_COUNT];
    chunk->is_one_shot = (seed & 4) != 0;
    ret_chunk->meta_data.dtype = (Tensorlane__V1__DType)(seed % 27);
    ret_chunk->meta_data.is_dead = (seed & 8) != 0;
    ret_chunk->meta_data.size_bytes = numbers[(seed + 1) % NUMBER_COUNT];
    ret_chunk->meta_data.n_dims = seed % (TL_MAX_RANK + 1);
    ret_chunk->meta_data.dims = ret_chunk->dims;
    for (unsigned i = 0; i < TL_MAX_RANK; i++)
        ret_chunk->dims[i] = numbers[(seed + i) % NUMBER_COUNT];
}

static void expect_same_chunk(const Tensorlane__V1__Chunk *expected)
{
    struct tl_unpacked_chunk unpacked;
    ck_assert_msg(tl_unpack_chunk(&unpacker, &unpacked, &error) == TL_OK, "%s", error.message);
    const Tensorlane__V1__Chunk *chunk = &unpacked.chunk;
    ck_assert_uint_eq(chunk->number, expected->number);
    ck_assert_uint_eq(chunk->offset, expected->offset);
    ck_assert_uint_eq(chunk->len_bytes, expected->len_bytes);
    ck_assert_uint_eq(chunk->publication, expected->publication);
    ck_assert_uint_eq(chunk->step, expected->step);
    ck_assert_int_eq(chunk->is_one_shot, expected->is_one_shot);
    ck_assert_int_eq(chunk->has_checksum, expected->has_checksum);
    ck_assert_uint_eq(chunk->checksum, expected->checksum);
    ck_assert_int_eq(chunk->meta_data != NULL, expected->meta_data != NULL);
    if (chunk->meta_data == NULL) return;
    ck_assert_int_eq(chunk->meta_data->dtype, expected->meta_data->dtype);
    ck_assert_int_eq(chunk->meta_data->is_dead, expected->meta_data->is_dead);
    ck_assert_uint_eq(chunk->meta_data->size_bytes, expected->meta_data->size_bytes);
    ck_assert_uint_eq(chunk->meta_data->n_dims, expected->meta_data->n_dims);
    ck_assert_mem_eq(chunk->meta_data->dims, expected->meta_data->dims, chunk->meta_data->n_dims * sizeof(uint64_t));
}

START_TEST(bytes_of_chunks)
{
    struct tl_unpacked_chunk made;
    make_chunk(0, &made);
    made.chunk.number = 1;
    made.chunk.len_bytes = 8;
    made.chunk.meta_data = &made.meta_data;
    made.chunk.publication = 5;
    made.chunk.step = 3;
    tensorlane__v1__meta_data__init(&made.meta_data);
    made.meta_data.dtype = TENSORLANE__V1__DTYPE__F32;
    made.meta_data.n_dims = 1;
    made.meta_data.dims = made.dims;
    made.dims[0] = 2;
    made.meta_data.size_bytes = 8;
    tl_pack_chunk(&packer, &made.chunk);
    made.chunk.number = 0;
    made.chunk.publication = 4;
    made.chunk.offset = 300;
    made.chunk.has_checksum = 1;
    made.chunk.checksum = 0x0807060504030201;
    tl_pack_chunk(&packer, &made.chunk);
    expect_bytes("\x02\x02\x08\x0a\x06\x0c\x01\x02\x08"
                 "\x13\x01\x08\xac\x02\x01\x00\x0c\x01\x02\x08\x01\x02\x03\x04\x05\x06\x07\x08",
                 28);
}
END_TEST

START_TEST(chunks_come_back)
{
    struct tl_unpacked_chunk made;
    unsigned char *large = malloc(SEEDS * TL_PACKED_CHUNK_BYTES);
    packer.bytes = large;
    for (unsigned seed = 0; seed < SEEDS; seed++) {
        size_t before = packer.used;
        make_chunk(seed, &made);
        tl_pack_chunk(&packer, &made.chunk);
        ck_assert_uint_le(packer.used - before, TL_PACKED_CHUNK_BYTES);
    }
    unpacker = (struct tl_unpacker){.at = large, .end = large + packer.used};
    for (unsigned seed = 0; seed < SEEDS; seed++) {
        make_chunk(seed, &made);
        expect_same_chunk(&made.chunk);
    }
    ck_assert(tl_unpacker_is_at_end(&unpacker));
    free(large);
}
END_TEST

START_TEST(chunks_that_are_cut)
{
    for (unsigned seed = 0; seed < SEEDS; seed++) {
        struct tl_unpacked_chunk made;
        setup();
        make_chunk(seed, &made);
        tl_pack_chunk(&packer, &made.chunk);
        for (size_t len_bytes = 0; len_bytes < packer.used; len_bytes++) {
            unsigned char *exact = begin_reading(len_bytes);
            ck_assert_int_eq(tl_unpack_chunk(&unpacker, &made, &error), TL_INVALID_ARGUMENT);
            free(exact);
        }
    }
}
END_TEST

static void expect_no_chunk(const char *record, size_t len_bytes)
{
    struct tl_unpacked_chunk unpacked;
    memcpy(bytes, record, len_bytes);
    unsigned char *exact = begin_reading(len_bytes);
    ck_assert_int_eq(tl_unpack_chunk(&unpacker, &unpacked, &error), TL_INVALID_ARGUMENT);
    ck_assert_str_eq(error.message, "packed chunks that are no such records");
    free(exact);
}

START_TEST(chunks_that_are_none)
{
    expect_no_chunk("\x20\x02\x00", 3);                                      /* an unknown flag */
    expect_no_chunk("\x04\x02\x00", 3);                                      /* dead, without meta-data */
    expect_no_chunk("\x08\x02\x00", 3);                                      /* one-shot, without meta-data */
    expect_no_chunk("\x02\x02\x00\x02\x00\x80\x80\x80\x80\x08\x00\x00", 12); /* dtype 2^31 */
    expect_no_chunk("\x02\x02\x00\x02\x00\x02\x11"
                    "\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01",
                    25);                                             /* 17 dimensions */
    expect_no_chunk("\x10\x02\x00\x01\x02\x03\x04\x05\x06\x07", 10); /* seven bytes of a checksum */
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("packed");
    TCase *tcase = tcase_create("packed");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, bytes_of_requests);
    tcase_add_test(tcase, requests_in_the_steady_state_take_few_bytes);
    tcase_add_test(tcase, requests_come_back);
    tcase_add_test(tcase, requests_that_are_cut);
    tcase_add_test(tcase, requests_that_are_none);
    tcase_add_test(tcase, bytes_of_chunks);
    tcase_add_test(tcase, chunks_come_back);
    tcase_add_test(tcase, chunks_that_are_cut);
    tcase_add_test(tcase, chunks_that_are_none);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
