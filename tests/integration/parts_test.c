// SPDX-License-Identifier: Apache-2.0
/* Receives of parts of tensors, over a link, within a host, and from the worker itself. */
#include <check.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fakes/cluster.h"
#include "fakes/run_suite.h"
#include "control/internal.h"
#include "server/worker_internal.h"

#define ROWS 512
#define COLUMNS 256
#define ELEMENTS (ROWS * COLUMNS)

static const char *const protocols[] = {"grpc", "grpc+local"};

static struct cluster cluster;
static struct tl_worker *asker, *owner;
static tl_peer_id peer;
static struct tl_cq *cq;
static struct tl_error error;
static bool wants_checksum = true;

/* In this way the asker has shared memory for neither a large box nor its bounce buffer. */
#define LITTLE_POOL 3

/* The third way is from the worker itself. */
static void open_pair(int way)
{
    cluster_init(&cluster, 2, way == LITTLE_POOL ? "\"local\": {\"pool\": \"1MiB\", \"max_pool\": \"1MiB\"}" : NULL);
    cluster.protocol = protocols[way % 2];
    cluster_open_all(&cluster);
    owner = cluster.workers[0];
    asker = way == 2 ? owner : cluster.workers[1];
    peer = cluster_peer(asker, 0);
    cq = cluster_cq();
    if (way % 2 == 1) {
        struct tl_tensor *tensor = cluster_tensor(8, 1);
        cluster_publish(owner, "first", 1, tensor);
        tl_tensor_put(tensor);
        tl_tensor_put(cluster_recv_wait(asker, 0, "first", 1));
        CLUSTER_UNTIL(strcmp(cluster_peer_info(asker, 0).transport, "local") == 0);
    }
}

static void close_pair(void)
{
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
}

/* A matrix in which each element says where it is. */
static struct tl_tensor *matrix(void)
{
    const uint64_t dims[] = {ROWS, COLUMNS};
    struct tl_tensor *tensor;
    ck_assert_int_eq(tl_tensor_create(TL_U32, 2, dims, &tensor, &error), TL_OK);
    uint32_t *elements = tl_tensor_data(tensor);
    for (uint32_t i = 0; i < ELEMENTS; i++)
        elements[i] = i;
    return tensor;
}

static void publish_matrix(void)
{
    struct tl_tensor *tensor = matrix();
    cluster_publish(owner, "m", 1, tensor);
    tl_tensor_put(tensor);
}

static struct tl_part box(const uint64_t *start, const uint64_t *size)
{
    return (struct tl_part){.size_bytes = sizeof(struct tl_part), .rank = 2, .start = start, .size = size};
}

static enum tl_status receive(const struct tl_part *part, struct tl_tensor *destination,
                              struct tl_completion *ret_completion)
{
    const struct tl_recv_options options = {
        .size_bytes = sizeof(options), .destination = destination, .wants_checksum = wants_checksum, .part = part};
    return tl_recv_wait(asker, peer, "m", 0, &options, CLUSTER_LONG, ret_completion, &error);
}

/* Each assertion of check notes its place in a file, which would take most of the time of these tests. */
static void expect_element(uint64_t element, uint64_t expected, uint64_t row, uint64_t column)
{
    if (element != expected)
        ck_abort_msg("row %" PRIu64 " column %" PRIu64 ": %" PRIu64 " and not %" PRIu64, row, column, element,
                     expected);
}

static void expect_box(const struct tl_tensor *tensor, const uint64_t *start, const uint64_t *size)
{
    ck_assert_int_eq(tl_tensor_dtype(tensor), TL_U32);
    ck_assert_uint_eq(tl_tensor_rank(tensor), 2);
    const uint32_t *elements = tl_tensor_data(tensor);
    for (unsigned i = 0; i < 2; i++)
        ck_assert_uint_eq(tl_tensor_dims(tensor)[i], size[i]);
    for (uint64_t row = 0; row < size[0]; row++)
        for (uint64_t column = 0; column < size[1]; column++)
            expect_element(*elements++, (start[0] + row) * COLUMNS + start[1] + column, row, column);
}

static const uint64_t starts[][2] = {{128, 0}, {0, 64}, {3, 5}, {511, 255}, {0, 0}, {512, 0}, {0, 5}};
static const uint64_t sizes[][2] = {{128, COLUMNS}, {ROWS, 64}, {7, 9}, {1, 1}, {ROWS, COLUMNS}, {0, COLUMNS}, {27, 3}};
#define BOXES (sizeof(starts) / sizeof(starts[0]))

START_TEST(boxes_arrive)
{
    open_pair(_i);
    publish_matrix();
    for (size_t i = 0; i < 2 * BOXES; i++) { /* the second time their meta-data is known */
        struct tl_completion completion;
        const struct tl_part part = box(starts[i % BOXES], sizes[i % BOXES]);
        uint64_t before = cluster_stats(owner).bytes_sent;
        wants_checksum = i % 2 == 0;
        ck_assert_msg(receive(&part, NULL, &completion) == TL_OK, "%s", error.message);
        expect_box(completion.tensor, starts[i % BOXES], sizes[i % BOXES]);
        uint64_t bytes = sizes[i % BOXES][0] * sizes[i % BOXES][1] * 4;
        ck_assert_uint_eq(completion.bytes, bytes);
        ck_assert_uint_eq(completion.step, 1);
        ck_assert_int_eq(completion.is_verified, wants_checksum);
        if (_i == 1 && bytes > 0) ck_assert_int_ne(completion.path, TL_PATH_GRPC);
        if (_i != 2) ck_assert_uint_eq(cluster_stats(owner).bytes_sent - before, bytes); /* no other bytes travel */
        tl_tensor_put(completion.tensor);
    }
    close_pair();
}
END_TEST

START_TEST(into_a_destination)
{
    open_pair(_i);
    publish_matrix();
    for (size_t i = 0; i < BOXES; i++) {
        struct tl_completion completion;
        struct tl_tensor *destination;
        const struct tl_part part = box(starts[i], sizes[i]);
        ck_assert_int_eq(tl_tensor_create(TL_U32, 2, sizes[i], &destination, &error), TL_OK);
        ck_assert_msg(receive(&part, destination, &completion) == TL_OK, "%s", error.message);
        ck_assert_ptr_eq(completion.tensor, destination);
        expect_box(destination, starts[i], sizes[i]);
        tl_tensor_put(completion.tensor);
        tl_tensor_put(destination);
    }
    struct tl_tensor *wrong = matrix();
    struct tl_completion completion;
    const struct tl_part part = box(starts[0], sizes[0]);
    ck_assert_int_eq(receive(&part, wrong, &completion), TL_FAILED_PRECONDITION);
    tl_tensor_put(wrong);
    close_pair();
}
END_TEST

/* A part is put into a box of the destination, whose other elements stay. */
START_TEST(into_a_box_of_the_destination)
{
    static const uint64_t places[][2] = {{0, 0}, {128, 64}, {100, 17}, {0, 0}, {0, 0}, {4, 0}, {9, 4}};
    open_pair(_i);
    publish_matrix();
    for (size_t j = 0; j < 3 * BOXES; j++) {
        size_t i = j % BOXES;
        wants_checksum = j % 2 == 0;
        const uint64_t dims[] = {640, COLUMNS + (i % 2) * 100};
        struct tl_completion completion;
        struct tl_tensor *destination;
        struct tl_part part = box(starts[i], sizes[i]);
        part.destination_start = places[i];
        ck_assert_int_eq(tl_tensor_create(TL_U32, 2, dims, &destination, &error), TL_OK);
        uint32_t *elements = tl_tensor_data(destination);
        memset(elements, 0xee, tl_tensor_size_bytes(destination));
        ck_assert_msg(receive(&part, destination, &completion) == TL_OK, "%s", error.message);
        ck_assert_ptr_eq(completion.tensor, destination);
        ck_assert_uint_eq(completion.bytes, sizes[i][0] * sizes[i][1] * 4);
        for (uint64_t row = 0; row < dims[0]; row++) {
            for (uint64_t column = 0; column < dims[1]; column++) {
                uint64_t from_row = row - places[i][0], from_column = column - places[i][1];
                bool is_inside = row >= places[i][0] && column >= places[i][1] && from_row < sizes[i][0] &&
                                 from_column < sizes[i][1];
                uint64_t expected =
                    is_inside ? (starts[i][0] + from_row) * COLUMNS + starts[i][1] + from_column : 0xeeeeeeee;
                expect_element(elements[row * dims[1] + column], expected, row, column);
            }
        }
        tl_tensor_put(completion.tensor);
        tl_tensor_put(destination);
    }
    close_pair();
}
END_TEST

#define LARGE_ROWS 2048
#define LARGE_COLUMNS 1024

static struct tl_tensor *large_matrix(bool is_counting)
{
    const uint64_t dims[] = {LARGE_ROWS, LARGE_COLUMNS};
    struct tl_tensor *tensor;
    ck_assert_int_eq(tl_tensor_create(TL_U32, 2, dims, &tensor, &error), TL_OK);
    uint32_t *elements = tl_tensor_data(tensor);
    for (uint32_t i = 0; i < LARGE_ROWS * LARGE_COLUMNS; i++)
        elements[i] = is_counting ? i : UINT32_MAX;
    return tensor;
}

static void expect_path(int way, bool has_destination, bool is_in_box, const struct tl_completion *completion)
{
    const bool is_large = is_in_box || !has_destination; /* for the pool of LITTLE_POOL */
    const enum tl_path path = way == 0 || (way == LITTLE_POOL && is_large) ? TL_PATH_GRPC
                              : way == 2                                   ? TL_PATH_SELF
                              : way == LITTLE_POOL || !has_destination     ? TL_PATH_ZERO_COPY
                                                                           : TL_PATH_BOUNCE;
    ck_assert_msg(completion->path == path, "%s: %s", tl_path_name(completion->path), completion->path_reason);
    if (path == TL_PATH_BOUNCE && is_in_box) ck_assert_ptr_nonnull(strstr(completion->path_reason, "in one piece"));
}

/* Most of the columns of a matrix, whose bytes are not aligned to anything. */
static void receive_large(int way, struct tl_tensor *destination, bool is_in_box)
{
    static const uint64_t start[] = {1, 3}, size[] = {LARGE_ROWS - 2, LARGE_COLUMNS - 23}, place[] = {2, 11};
    struct tl_part part = box(start, size);
    struct tl_completion completion;
    if (is_in_box) part.destination_start = place;
    ck_assert_msg(receive(&part, destination, &completion) == TL_OK, "%s", error.message);
    ck_assert_uint_eq(completion.bytes, size[0] * size[1] * 4);
    expect_path(way, destination != NULL, is_in_box, &completion);
    const uint32_t *elements = tl_tensor_data(completion.tensor);
    const uint64_t *dims = tl_tensor_dims(completion.tensor);
    const uint64_t first_row = is_in_box ? place[0] : 0, first_column = is_in_box ? place[1] : 0;
    for (uint64_t row = 0; row < dims[0]; row++) {
        for (uint64_t column = 0; column < dims[1]; column++) {
            uint64_t from_row = row - first_row, from_column = column - first_column;
            bool is_inside = from_row < size[0] && from_column < size[1];
            expect_element(*elements++,
                           is_inside ? (start[0] + from_row) * LARGE_COLUMNS + start[1] + from_column : UINT32_MAX, row,
                           column);
        }
    }
    tl_tensor_put(completion.tensor);
}

/* Large boxes go from the value to the destination without a copy of their size at either side: into memory of the
 * library, the caller's, and a box of the caller's. In the fourth way the peer has little shared memory, and reads. */
START_TEST(large_boxes)
{
    const uint64_t dims[] = {LARGE_ROWS - 2, LARGE_COLUMNS - 23};
    struct tl_tensor *value = large_matrix(true), *dense;
    open_pair(_i);
    cluster_publish(owner, "m", 1, value);
    ck_assert_int_eq(tl_tensor_create(TL_U32, 2, dims, &dense, &error), TL_OK);
    for (unsigned i = 0; i < 2; i++) { /* the second time the meta-data is known */
        struct tl_tensor *whole = large_matrix(false);
        wants_checksum = i == 1;
        receive_large(_i, NULL, false);
        receive_large(_i, dense, false);
        receive_large(_i, whole, true);
        tl_tensor_put(whole);
    }
    tl_tensor_put(dense);
    tl_tensor_put(value);
    close_pair();
}
END_TEST

START_TEST(ranges_arrive)
{
    const struct tl_byte_range ranges[] = {{.offset_bytes = 400000, .len_bytes = 4000}, {.len_bytes = 8}};
    struct tl_part part = {.size_bytes = sizeof(part), .ranges = ranges, .range_count = 2};
    struct tl_completion completion;
    open_pair(_i);
    publish_matrix();
    ck_assert_msg(receive(&part, NULL, &completion) == TL_OK, "%s", error.message);
    ck_assert_int_eq(tl_tensor_dtype(completion.tensor), TL_U8);
    ck_assert_uint_eq(tl_tensor_size_bytes(completion.tensor), 4008);
    const uint32_t *elements = tl_tensor_data(completion.tensor);
    ck_assert_uint_eq(elements[0], 100000);
    ck_assert_uint_eq(elements[999], 100999);
    ck_assert_uint_eq(elements[1000], 0);
    ck_assert_uint_eq(elements[1001], 1);
    tl_tensor_put(completion.tensor);
    part.range_count = 1;
    ck_assert_msg(receive(&part, NULL, &completion) == TL_OK, "%s", error.message);
    ck_assert_uint_eq(completion.bytes, 4000);
    tl_tensor_put(completion.tensor);
    close_pair();
}
END_TEST

START_TEST(many_at_once)
{
    enum { COUNT = 64 };
    uint64_t start[COUNT][2], size[COUNT][2];
    struct tl_part parts[COUNT];
    struct tl_recv_item items[COUNT];
    struct tl_completion completions[COUNT];
    struct tl_tensor *destination = matrix();
    open_pair(_i);
    publish_matrix();
    memset(tl_tensor_data(destination), 0, tl_tensor_size_bytes(destination));
    for (size_t i = 0; i < COUNT; i++) { /* tiles of 64 rows and 32 columns, each to its place */
        start[i][0] = i / 8 * 64;
        start[i][1] = i % 8 * 32;
        size[i][0] = 64;
        size[i][1] = 32;
        parts[i] = box(start[i], size[i]);
        parts[i].destination_start = start[i];
        items[i] = (struct tl_recv_item){.key = "m", .destination = destination, .part = &parts[i]};
    }
    const struct tl_recv_many_options options = {.size_bytes = sizeof(options), .item_bytes = sizeof(items[0])};
    ck_assert_msg(tl_recv_many_wait(asker, peer, items, COUNT, &options, CLUSTER_LONG, completions, &error) == TL_OK,
                  "%s", error.message);
    for (size_t i = 0; i < COUNT; i++) {
        ck_assert_ptr_eq(completions[i].tensor, destination);
        tl_tensor_put(completions[i].tensor);
    }
    const uint32_t *elements = tl_tensor_data(destination);
    for (uint32_t i = 0; i < ELEMENTS; i++)
        expect_element(elements[i], i, i / COLUMNS, i % COLUMNS);
    tl_tensor_put(destination);
    items[1].part = &(struct tl_part){.size_bytes = sizeof(struct tl_part)};
    ck_assert_int_eq(tl_recv_many_wait(asker, peer, items, 2, &options, CLUSTER_LONG, completions, &error),
                     TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "item 1: "));
    close_pair();
}
END_TEST

/* A sent value is over when a part of it has arrived, and offered to others when there is no such part. */
START_TEST(of_a_sent_value)
{
    struct tl_completion completion;
    struct tl_tensor *tensor = matrix();
    const uint64_t beyond[] = {500, 0};
    struct tl_part part = box(beyond, sizes[0]);
    open_pair(_i);
    cluster_send(owner, "m", 0, tensor, cq);
    ck_assert_int_eq(receive(&part, NULL, &completion), TL_OUT_OF_RANGE);
    ck_assert(cluster_is_quiet(cq));
    part = box(starts[2], sizes[2]);
    ck_assert_msg(receive(&part, NULL, &completion) == TL_OK, "%s", error.message);
    expect_box(completion.tensor, starts[2], sizes[2]);
    (void)cluster_expect(cq, TL_OK);
    tl_tensor_put(completion.tensor);
    for (size_t i = 0; i < 2; i++) { /* rows, and columns */
        cluster_send(owner, "m", 0, tensor, cq);
        part = box(starts[i], sizes[i]);
        ck_assert_msg(receive(&part, NULL, &completion) == TL_OK, "%s", error.message);
        expect_box(completion.tensor, starts[i], sizes[i]);
        tl_tensor_put(completion.tensor);
        (void)cluster_expect(cq, TL_OK);
    }
    tl_tensor_put(tensor);
    close_pair();
}
END_TEST

/* A sent value goes from one receiver to the next, however many there are, until it has the part that one wants. */
START_TEST(of_a_sent_value_that_many_cannot_use)
{
    enum { COUNT = 20000 };
    const uint64_t beyond[] = {500, 0};
    const struct tl_part wrong = box(beyond, sizes[0]), right = box(starts[2], sizes[2]);
    struct tl_recv_item *items = calloc(COUNT, sizeof(*items));
    struct tl_completion completion;
    struct tl_tensor *tensor = matrix();
    open_pair(_i);
    for (size_t i = 0; i < COUNT; i++)
        items[i] = (struct tl_recv_item){.key = "m", .part = &wrong};
    const struct tl_recv_many_options options = {.size_bytes = sizeof(options), .item_bytes = sizeof(items[0])};
    ck_assert_int_eq(tl_recv_many(asker, peer, items, COUNT, &options, CLUSTER_LONG, cq, NULL, NULL, &error), TL_OK);
    CLUSTER_UNTIL(cluster_stats(owner).waiting_receivers == COUNT);
    struct tl_cq *sent = cluster_cq();
    cluster_send(owner, "m", 0, tensor, sent);
    for (size_t i = 0; i < COUNT; i++)
        (void)cluster_expect(cq, TL_OUT_OF_RANGE);
    completion = cluster_expect(cq, TL_OUT_OF_RANGE);
    ck_assert_uint_eq(completion.failed_count, COUNT);
    ck_assert_msg(receive(&right, NULL, &completion) == TL_OK, "%s", error.message);
    expect_box(completion.tensor, starts[2], sizes[2]);
    (void)cluster_expect(sent, TL_OK);
    tl_tensor_put(completion.tensor);
    tl_tensor_put(tensor);
    free(items);
    close_pair();
    tl_cq_destroy(sent);
}
END_TEST

/* The program may keep a dead value when it closes the worker. */
START_TEST(of_a_dead_value_of_its_own)
{
    struct tl_completion completion;
    struct tl_tensor *dead;
    const struct tl_part part = box(starts[2], sizes[2]);
    open_pair(2);
    ck_assert_int_eq(tl_tensor_create_dead(&dead, &error), TL_OK);
    cluster_send(owner, "m", 0, dead, cq);
    ck_assert_msg(receive(&part, NULL, &completion) == TL_OK, "%s", error.message);
    ck_assert(tl_tensor_is_dead(completion.tensor));
    tl_tensor_put(dead);
    close_pair();
    tl_tensor_put(completion.tensor);
}
END_TEST

START_TEST(what_is_refused)
{
    const uint64_t beyond[][2] = {{500, 0}, {0, 200}, {UINT64_MAX, 0}}, size[] = {64, 64};
    struct tl_completion completion;
    struct tl_tensor *destination = matrix(), *dead;
    struct tl_part part;
    open_pair(_i);
    publish_matrix();
    for (size_t i = 0; i < 3; i++) {
        part = box(beyond[i], size);
        ck_assert_int_eq(receive(&part, NULL, &completion), TL_OUT_OF_RANGE);
        ck_assert_msg(strstr(error.message, "m: the box has") != NULL, "%s", error.message);
        part = box(starts[2], size);
        part.destination_start = beyond[i];
        ck_assert_int_eq(receive(&part, destination, &completion), TL_OUT_OF_RANGE);
    }
    ck_assert_int_eq(receive(&part, NULL, &completion), TL_INVALID_ARGUMENT);
    part.rank = 1;
    part.destination_start = NULL;
    ck_assert_int_eq(receive(&part, NULL, &completion), TL_OUT_OF_RANGE);
    part.size_bytes = 8;
    ck_assert_int_eq(receive(&part, NULL, &completion), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_publish(owner, "tensorlane.part/b/m", 1, destination, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_tensor_create_dead(&dead, &error), TL_OK);
    cluster_publish(owner, "m", 2, dead);
    part = box(starts[2], sizes[2]);
    ck_assert_msg(receive(&part, NULL, &completion) == TL_OK, "%s", error.message);
    ck_assert(tl_tensor_is_dead(completion.tensor));
    tl_tensor_put(completion.tensor);
    tl_tensor_put(dead);
    tl_tensor_put(destination);
    close_pair();
}
END_TEST

/* Rows of a value that may be mapped are mapped. */
START_TEST(rows_are_mapped)
{
    const uint64_t dims[] = {ROWS, COLUMNS};
    struct tl_tensor *tensor;
    struct tl_completion completion;
    const struct tl_part part = box(starts[0], sizes[0]);
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .may_map = true, .part = &part};
    open_pair(1);
    ck_assert_int_eq(tl_tensor_create_shared(TL_U32, 2, dims, &tensor, &error), TL_OK);
    uint32_t *elements = tl_tensor_data(tensor);
    for (uint32_t i = 0; i < ELEMENTS; i++)
        elements[i] = i;
    cluster_publish(owner, "m", 1, tensor);
    ck_assert_msg(tl_recv_wait(asker, peer, "m", 0, &options, CLUSTER_LONG, &completion, &error) == TL_OK, "%s",
                  error.message);
    ck_assert_msg(completion.path == TL_PATH_MAPPED, "%s", completion.path_reason);
    expect_box(completion.tensor, starts[0], sizes[0]);
    tl_tensor_put(completion.tensor);
    tl_tensor_put(tensor);
    close_pair();
}
END_TEST

/* Ranges are copied together, in memory of their owner, which a client may have only so much of. A box is not. */
START_TEST(copies_are_charged)
{
    struct tl_completion completion;
    cluster_init(&cluster, 2, "\"limits\": {\"held\": \"256KiB\"}");
    cluster_open_all(&cluster);
    owner = cluster.workers[0];
    asker = cluster.workers[1];
    peer = cluster_peer(asker, 0);
    publish_matrix();
    const uint64_t columns[] = {ROWS, COLUMNS - 1}, from[] = {0, 0};
    struct tl_byte_range ranges[] = {{.len_bytes = 256 << 10}, {.offset_bytes = 256 << 10, .len_bytes = 128 << 10}};
    struct tl_part part = {.size_bytes = sizeof(part), .ranges = ranges, .range_count = 2};
    ck_assert_int_eq(receive(&part, NULL, &completion), TL_RESOURCE_EXHAUSTED);
    ck_assert_msg(strstr(error.message, "limits.held") != NULL, "%s", error.message);
    ranges[0].len_bytes = 64 << 10;
    for (unsigned i = 0; i < 20; i++) { /* what was charged is given back */
        ck_assert_msg(receive(&part, NULL, &completion) == TL_OK, "%s", error.message);
        tl_tensor_put(completion.tensor);
        CLUSTER_UNTIL(tl_shares_used(owner->sources.pushed) == 0);
    }
    part = box(from, columns);
    ck_assert_msg(receive(&part, NULL, &completion) == TL_OK, "%s", error.message);
    expect_box(completion.tensor, from, columns);
    tl_tensor_put(completion.tensor);
    cluster_close_all(&cluster);
}
END_TEST

START_TEST(a_peer_of_an_older_version_is_not_asked)
{
    struct tl_completion completion;
    const struct tl_part part = box(starts[0], sizes[0]);
    cluster_init(&cluster, 2, NULL);
    cluster_open_all(&cluster);
    owner = cluster.workers[0];
    asker = cluster.workers[1];
    peer = cluster_peer(asker, 0);
    owner->control->options.self.serves_parts = false;
    ck_assert_int_eq(receive(&part, NULL, &completion), TL_UNIMPLEMENTED);
    ck_assert_msg(strstr(error.message, "the whole of m") != NULL, "%s", error.message);
    cluster_close_all(&cluster);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("parts");
    TCase *tcase = tcase_create("parts");
    tcase_add_loop_test(tcase, boxes_arrive, 0, 3);
    tcase_add_loop_test(tcase, into_a_destination, 0, 3);
    tcase_add_loop_test(tcase, into_a_box_of_the_destination, 0, 3);
    tcase_add_loop_test(tcase, ranges_arrive, 0, 3);
    tcase_add_loop_test(tcase, many_at_once, 0, 3);
    tcase_add_loop_test(tcase, of_a_sent_value, 0, 3);
    tcase_add_loop_test(tcase, of_a_sent_value_that_many_cannot_use, 0, 3);
    tcase_add_test(tcase, of_a_dead_value_of_its_own);
    tcase_add_loop_test(tcase, what_is_refused, 0, 3);
    tcase_add_test(tcase, rows_are_mapped);
    tcase_add_test(tcase, a_peer_of_an_older_version_is_not_asked);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("large_boxes");
    tcase_add_loop_test(tcase, large_boxes, 0, 4);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("copies_are_charged");
    tcase_add_test(tcase, copies_are_charged);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
