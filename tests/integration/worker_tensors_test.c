// SPDX-License-Identifier: Apache-2.0
/* Every kind of tensor, from worker to worker: dtypes, ranks, sizes, strings, dead ones, destinations, wrapped memory.
 */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "fakes/cluster.h"
#include "fakes/device_case.h"
#include "fakes/pattern.h"
#include "fakes/run_suite.h"

static struct cluster cluster;
static struct tl_cq *cq;
static struct tl_error error;

static void setup(void)
{
    cluster_init(&cluster, 2, "\"limits\": {\"chunk\": \"64KiB\"}");
    cluster_open_all(&cluster);
    cq = cluster_cq();
}

static void teardown(void)
{
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
}

static struct tl_tensor *create(enum tl_dtype dtype, unsigned rank, const uint64_t *dims)
{
    struct tl_tensor *tensor;
    enum tl_status status = tl_tensor_create(dtype, rank, dims, &tensor, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    if (tl_tensor_size_bytes(tensor) > 0) pattern_fill(tl_tensor_data(tensor), tl_tensor_size_bytes(tensor), rank);
    return tensor;
}

/* Sends a tensor to the other worker and receives it there, with checksum. */
static struct tl_completion move(struct tl_tensor *tensor, struct tl_tensor *destination)
{
    const struct tl_recv_options options = {
        .size_bytes = sizeof(options), .wants_checksum = true, .destination = destination};
    struct tl_completion completion;
    cluster_send(cluster.workers[0], "t", 0, tensor, cq);
    enum tl_status status = tl_recv_wait(cluster.workers[1], cluster_peer(cluster.workers[1], 0), "t", 0, &options,
                                         CLUSTER_LONG, &completion, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    cluster_expect(cq, TL_OK);
    ck_assert(completion.is_verified);
    return completion;
}

static void expect_same(const struct tl_tensor *a, const struct tl_tensor *b)
{
    ck_assert_int_eq(tl_tensor_dtype(a), tl_tensor_dtype(b));
    ck_assert_uint_eq(tl_tensor_rank(a), tl_tensor_rank(b));
    for (unsigned i = 0; i < tl_tensor_rank(a); i++)
        ck_assert_uint_eq(tl_tensor_dims(a)[i], tl_tensor_dims(b)[i]);
    ck_assert_uint_eq(tl_tensor_size_bytes(a), tl_tensor_size_bytes(b));
    ck_assert_uint_eq(tl_tensor_element_count(a), tl_tensor_element_count(b));
    ck_assert(tl_tensor_is_dead(a) == tl_tensor_is_dead(b));
    if (tl_tensor_size_bytes(a) == 0) return;
    ck_assert_int_eq(memcmp(tl_tensor_data(a), tl_tensor_data(b), tl_tensor_size_bytes(a)), 0);
}

static void expect_moved(struct tl_tensor *tensor, enum tl_path path)
{
    struct tl_completion completion = move(tensor, NULL);
    expect_same(tensor, completion.tensor);
    ck_assert_int_eq(completion.path, path);
    ck_assert_uint_eq(completion.bytes, tl_tensor_size_bytes(tensor));
    tl_tensor_put(completion.tensor);
    tl_tensor_put(tensor);
}

START_TEST(every_dtype)
{
    for (int dtype = TL_BOOL; dtype < TL_STRING; dtype++) {
        for (uint64_t count = 1; count < 8; count++)
            expect_moved(create((enum tl_dtype)dtype, 1, &count), TL_PATH_GRPC);
        const uint64_t dims[2] = {17, 1001};
        expect_moved(create((enum tl_dtype)dtype, 2, dims), TL_PATH_GRPC);
    }
}
END_TEST

START_TEST(packed_dtypes_have_their_sizes)
{
    const uint64_t five[1] = {5};
    struct tl_tensor *tensor = create(TL_I4, 1, five);
    ck_assert_uint_eq(tl_tensor_size_bytes(tensor), 3);
    expect_moved(tensor, TL_PATH_GRPC);
    tensor = create(TL_F6_E2M3, 1, five);
    ck_assert_uint_eq(tl_tensor_size_bytes(tensor), 4);
    expect_moved(tensor, TL_PATH_GRPC);
}
END_TEST

START_TEST(every_rank)
{
    uint64_t dims[TL_MAX_RANK];
    for (unsigned rank = 0; rank <= TL_MAX_RANK; rank++) {
        for (unsigned i = 0; i < rank; i++)
            dims[i] = 1 + (i + rank) % 3 / 2;
        expect_moved(create(TL_F32, rank, dims), TL_PATH_GRPC);
    }
}
END_TEST

START_TEST(zero_size)
{
    const uint64_t dims[3] = {0, UINT64_C(1) << 40, 5};
    expect_moved(create(TL_F64, 3, dims), TL_PATH_NONE);
    expect_moved(create(TL_I4, 1, dims), TL_PATH_NONE);
}
END_TEST

START_TEST(dead)
{
    struct tl_tensor *tensor;
    ck_assert_int_eq(tl_tensor_create_dead(&tensor, &error), TL_OK);
    expect_moved(tensor, TL_PATH_NONE);
}
END_TEST

START_TEST(sizes_around_the_chunk)
{
    const uint64_t sizes[] = {255,   256,   257,   65535,  65536,  65537,  65536 + 100,
                              65792, 65793, 91000, 131072, 131073, 1000000};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
        expect_moved(create(TL_U8, 1, &sizes[i]), TL_PATH_GRPC);
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- strings -- */

static struct tl_tensor *strings(unsigned rank, const uint64_t *dims, const struct tl_string *items)
{
    struct tl_tensor *tensor;
    enum tl_status status = tl_tensor_create_strings(rank, dims, items, &tensor, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    return tensor;
}

START_TEST(strings_of_every_kind)
{
    static char large[200000];
    memset(large, 'x', sizeof(large));
    const struct tl_string items[] = {{"abc", 3}, {NULL, 0}, {"", 0}, {"a\0b", 3}, {"\xff\xfe", 2}, {large, 200000}};
    const uint64_t dims[2] = {2, 3};
    struct tl_tensor *tensor = strings(2, dims, items);
    struct tl_completion completion = move(tensor, NULL);
    expect_same(tensor, completion.tensor);
    ck_assert_int_eq(completion.path, TL_PATH_SERIALIZED);
    for (uint64_t i = 0; i < 6; i++) {
        struct tl_string string;
        ck_assert_int_eq(tl_tensor_string(completion.tensor, i, &string, &error), TL_OK);
        ck_assert_uint_eq(string.len_bytes, items[i].len_bytes);
        if (string.len_bytes > 0) ck_assert_mem_eq(string.data, items[i].data, string.len_bytes);
    }
    struct tl_string string;
    ck_assert_int_eq(tl_tensor_string(completion.tensor, 6, &string, &error), TL_OUT_OF_RANGE);
    tl_tensor_put(completion.tensor);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(string_tensors_without_bytes)
{
    const struct tl_string empty[1] = {{NULL, 0}};
    const uint64_t none[1] = {0};
    expect_moved(strings(0, NULL, empty), TL_PATH_SERIALIZED); /* The length of the one string. */
    expect_moved(strings(1, none, NULL), TL_PATH_NONE);
}
END_TEST

START_TEST(many_strings)
{
    const uint64_t count = 20000;
    struct tl_string *items = calloc(count, sizeof(*items));
    for (uint64_t i = 0; i < count; i++)
        items[i] = (struct tl_string){"the quick brown fox jumps", tl_random_u64() % 26};
    expect_moved(strings(1, &count, items), TL_PATH_SERIALIZED);
    free(items);
}
END_TEST

/* ------------------------------------------------------------------------------------------------ destinations -- */

START_TEST(into_a_destination)
{
    const uint64_t dims[2] = {300, 200};
    struct tl_tensor *tensor = create(TL_F32, 2, dims);
    struct tl_tensor *destination = create(TL_F32, 2, dims);
    memset(tl_tensor_data(destination), 0, tl_tensor_size_bytes(destination));
    struct tl_completion completion = move(tensor, destination);
    ck_assert_ptr_eq(completion.tensor, destination);
    expect_same(tensor, destination);
    tl_tensor_put(completion.tensor);
    tl_tensor_put(destination);
    tl_tensor_put(tensor);
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- devices -- */

static const struct tl_device *const places[] = {&host, &gpu0, &gpu1};
/* Several pinned blocks, and the last one in part. */
#define DEVICE_BYTES (5 * 1024 * 1024 + 3)

static struct tl_completion receive_from_itself(struct tl_device device, struct tl_tensor *destination)
{
    const struct tl_recv_options options = {
        .size_bytes = sizeof(options), .device = device, .destination = destination};
    struct tl_completion completion;
    enum tl_status status = tl_recv_wait(cluster.workers[0], cluster_peer(cluster.workers[0], 0), "t", 0, &options,
                                         CLUSTER_LONG, &completion, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    ck_assert_int_eq(completion.path, TL_PATH_SELF);
    return completion;
}

/* From each place to each place: a value that was sent or published, to a new tensor or a destination. */
START_TEST(within_one_worker)
{
    struct tl_device from = *places[_i / 3], to = *places[_i % 3];
    setup_cuda();
    for (unsigned kind = 0; kind < 4; kind++) {
        struct tl_tensor *tensor = bytes_on(from, DEVICE_BYTES);
        struct tl_tensor *destination = kind % 2 == 0 ? NULL : bytes_on(to, DEVICE_BYTES);
        fill(tensor, kind);
        if (kind < 2) {
            cluster_send(cluster.workers[0], "t", 0, tensor, cq);
        } else {
            cluster_publish(cluster.workers[0], "t", 0, tensor);
        }
        struct tl_completion completion = receive_from_itself(to, destination);
        ck_assert(is_filled(completion.tensor, kind));
        ck_assert_int_eq(tl_tensor_device(completion.tensor).kind, to.kind);
        ck_assert_int_eq(tl_tensor_device(completion.tensor).index, to.index);
        ck_assert_uint_eq(completion.bytes, DEVICE_BYTES);
        if (destination != NULL) ck_assert_ptr_eq(completion.tensor, destination);
        tl_tensor_put(completion.tensor);
        if (kind < 2) {
            cluster_expect(cq, TL_OK);
        } else {
            ck_assert_int_eq(tl_withdraw(cluster.workers[0], "t", &error), TL_OK);
        }
        tl_tensor_put(destination);
        ck_assert(!tl_tensor_is_shared(tensor));
        tl_tensor_put(tensor);
    }
}
END_TEST

/* The same from one worker to another, with checksum. */
START_TEST(between_two_workers)
{
    struct tl_device from = *places[_i / 3], to = *places[_i % 3];
    setup_cuda();
    for (unsigned kind = 0; kind < 4; kind++) {
        struct tl_tensor *tensor = bytes_on(from, DEVICE_BYTES);
        struct tl_recv_options options = {.size_bytes = sizeof(options), .wants_checksum = true, .device = to};
        if (kind % 2 == 1) options.destination = bytes_on(to, DEVICE_BYTES);
        fill(tensor, kind);
        if (kind < 2) {
            cluster_send(cluster.workers[0], "t", 0, tensor, cq);
        } else {
            cluster_publish(cluster.workers[0], "t", 0, tensor);
        }
        struct tl_completion completion;
        enum tl_status status = tl_recv_wait(cluster.workers[1], cluster_peer(cluster.workers[1], 0), "t", 0, &options,
                                             CLUSTER_LONG, &completion, &error);
        ck_assert_msg(status == TL_OK, "%s", error.message);
        ck_assert(completion.is_verified && is_filled(completion.tensor, kind));
        ck_assert_int_eq(tl_tensor_device(completion.tensor).kind, to.kind);
        ck_assert_int_eq(tl_tensor_device(completion.tensor).index, to.index);
        ck_assert_int_eq(completion.path, TL_PATH_GRPC);
        tl_tensor_put(completion.tensor);
        if (kind < 2) {
            cluster_expect(cq, TL_OK);
        } else {
            ck_assert_int_eq(tl_withdraw(cluster.workers[0], "t", &error), TL_OK);
        }
        tl_tensor_put(options.destination);
        tl_tensor_put(tensor);
    }
}
END_TEST

static void fill_late(void *context)
{
    fill(context, 9);
}

/* A tensor whose stream fills it, once it is let go. */
static struct tl_tensor *filled_late(void **ret_stream)
{
    struct tl_tensor *tensor = bytes_on(gpu0, 1000);
    *ret_stream = cuda->create_stream(0, false);
    tl_tensor_set_stream(tensor, (tl_stream)*ret_stream);
    cuda->hold(*ret_stream, true);
    cuda->launch(*ret_stream, fill_late, tensor);
    return tensor;
}

static tl_op_id begin_receive(struct tl_device device, struct tl_tensor *destination, int64_t timeout_ns)
{
    const struct tl_recv_options options = {
        .size_bytes = sizeof(options), .device = device, .destination = destination};
    tl_op_id op;
    enum tl_status status = tl_recv(cluster.workers[0], cluster_peer(cluster.workers[0], 0), "t", 0, &options,
                                    timeout_ns, cq, NULL, &op, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    return op;
}

/* By reference and as a copy: what was in the stream comes first, while others are served. */
START_TEST(after_what_the_stream_holds)
{
    void *stream;
    setup_cuda();
    struct tl_tensor *tensor = filled_late(&stream);
    cluster_publish(cluster.workers[0], "t", 0, tensor);
    begin_receive(_i == 0 ? gpu0 : host, NULL, CLUSTER_LONG);
    expect_moved(create(TL_U8, 1, (const uint64_t[]){100000}), TL_PATH_GRPC);
    ck_assert(cluster_is_quiet(cq));
    cuda->hold(stream, false);
    struct tl_completion completion = cluster_next(cq);
    ck_assert_int_eq(completion.status.code, TL_OK);
    ck_assert(is_filled(completion.tensor, 9));
    tl_tensor_put(completion.tensor);
    ck_assert_int_eq(tl_withdraw(cluster.workers[0], "t", &error), TL_OK);
    tl_tensor_put(tensor);
}
END_TEST

/* A receive that waits for a stream, of the value or of the destination, ends by a cancel, its deadline or a close. */
START_TEST(ended_while_a_stream_is_held)
{
    void *stream;
    setup_cuda();
    struct tl_tensor *tensor = bytes_on(gpu0, 1000), *other = bytes_on(host, 1000);
    stream = cuda->create_stream(0, false);
    cuda->hold(stream, true);
    tl_tensor_set_stream(tensor, (tl_stream)stream);
    bool is_destination = _i % 2 == 1;
    cluster_publish(cluster.workers[0], "t", 0, is_destination ? other : tensor);
    tl_op_id op =
        begin_receive(host, is_destination ? tensor : other, _i / 2 == 1 ? CLUSTER_SECOND / 20 : CLUSTER_LONG);
    if (_i / 2 == 0) ck_assert_int_eq(tl_cancel(cluster.workers[0], op), TL_OK);
    if (_i / 2 == 2) cluster_close(&cluster, 0);
    cluster_expect(cq, _i / 2 == 1 ? TL_DEADLINE_EXCEEDED : TL_CANCELLED);
    cuda->hold(stream, false);
    if (_i / 2 < 2) ck_assert_int_eq(tl_withdraw(cluster.workers[0], "t", &error), TL_OK);
    tl_tensor_put(tensor);
    tl_tensor_put(other);
    ck_assert_uint_eq(device_allocations_at_last(), 0);
}
END_TEST

/* The worker that closes while a copy runs waits for it. */
START_TEST(closed_while_a_copy_runs)
{
    setup_cuda();
    struct tl_tensor *tensor = bytes_on(gpu0, 1000), *destination = bytes_on(gpu1, 1000);
    fill(tensor, 2);
    tl_tensor_set_stream(tensor, TL_STREAM_NONE);
    tl_tensor_set_stream(destination, TL_STREAM_NONE);
    cluster_publish(cluster.workers[0], "t", 0, tensor);
    begin_receive(host, destination, CLUSTER_LONG);
    cluster_close(&cluster, 0);
    struct tl_completion completion = cluster_next(cq);
    ck_assert(completion.status.code == TL_CANCELLED || is_filled(destination, 2));
    tl_tensor_put(completion.tensor);
    tl_tensor_put(destination);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(strings_and_dead_tensors_stay_on_the_host)
{
    const struct tl_string items[] = {{"abc", 3}};
    struct tl_tensor *dead_tensor, *tensor = strings(0, NULL, items);
    setup_cuda();
    ck_assert_int_eq(tl_tensor_create_dead(&dead_tensor, &error), TL_OK);
    cluster_publish(cluster.workers[0], "t", 0, _i == 0 ? tensor : dead_tensor);
    struct tl_recv_options options = {.size_bytes = sizeof(options), .device = gpu0};
    struct tl_completion completion;
    for (unsigned i = 0; i < 2; i++) {
        ck_assert_int_eq(tl_recv_wait(cluster.workers[i], cluster_peer(cluster.workers[i], 0), "t", 0, &options,
                                      CLUSTER_LONG, &completion, &error),
                         TL_OK);
        ck_assert_int_eq(tl_tensor_device(completion.tensor).kind, TL_DEVICE_HOST);
        expect_same(completion.tensor, _i == 0 ? tensor : dead_tensor);
        tl_tensor_put(completion.tensor);
    }
    tl_tensor_put(tensor);
    tl_tensor_put(dead_tensor);
}
END_TEST

/* The stream that is meant is that of the thread that calls, and it must not be captured. */
START_TEST(captured_streams_are_refused)
{
    setup_cuda();
    struct tl_tensor *tensor = bytes_on(gpu0, 100);
    void *stream = cuda->create_stream(0, true);
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .destination = tensor};
    tl_tensor_set_stream(tensor, (tl_stream)stream);
    cuda->begin_capture(stream);
    struct tl_worker *worker = cluster.workers[0];
    tl_op_id op;
    ck_assert_int_eq(tl_send(worker, "t", 0, tensor, CLUSTER_LONG, cq, NULL, &op, &error), TL_FAILED_PRECONDITION);
    ck_assert_int_eq(tl_publish(worker, "t", 0, tensor, &error), TL_FAILED_PRECONDITION);
    ck_assert_int_eq(tl_recv(worker, cluster_peer(worker, 1), "t", 0, &options, CLUSTER_LONG, cq, NULL, &op, &error),
                     TL_FAILED_PRECONDITION);
    ck_assert(cuda->end_capture(stream));
    ck_assert(cluster_is_quiet(cq));
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(into_a_part_of_wrapped_memory)
{
    unsigned char memory[1000];
    memset(memory, 0xee, sizeof(memory));
    const uint64_t dims[1] = {100};
    const int64_t strides[1] = {1};
    const struct tl_tensor_view view = {.size_bytes = sizeof(view),
                                        .dtype = TL_F32,
                                        .rank = 1,
                                        .dims = dims,
                                        .strides = strides,
                                        .data = memory,
                                        .offset_bytes = 100,
                                        .capacity_bytes = sizeof(memory)};
    struct tl_tensor *destination;
    ck_assert_int_eq(tl_tensor_wrap(&view, &destination, &error), TL_OK);
    struct tl_tensor *tensor = create(TL_F32, 1, dims);
    struct tl_completion completion = move(tensor, destination);
    ck_assert_mem_eq(memory + 100, tl_tensor_data(tensor), 400);
    for (unsigned i = 0; i < sizeof(memory); i++)
        if (i < 100 || i >= 500) ck_assert_uint_eq(memory[i], 0xee);
    tl_tensor_put(completion.tensor);
    tl_tensor_put(destination);
    tl_tensor_put(tensor);
}
END_TEST

static void expect_misfit(unsigned from, struct tl_tensor *destination)
{
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .destination = destination};
    struct tl_completion completion;
    ck_assert_int_eq(tl_recv_wait(cluster.workers[1], cluster_peer(cluster.workers[1], from), "t", 0, &options,
                                  CLUSTER_LONG, &completion, &error),
                     TL_FAILED_PRECONDITION);
    ck_assert_ptr_nonnull(strstr(error.message, "does not fit"));
    ck_assert_ptr_null(completion.tensor);
    tl_tensor_put(destination);
}

START_TEST(that_does_not_fit_stays_where_it_is)
{
    const uint64_t dims[2] = {4, 6};
    const uint64_t turned[2] = {6, 4};
    struct tl_tensor *tensor = create(TL_F32, 2, dims);
    for (unsigned from = 0; from < 2; from++) {
        cluster_send(cluster.workers[from], "t", 0, tensor, cq);
        expect_misfit(from, create(TL_I32, 2, dims));
        expect_misfit(from, create(TL_F32, 2, turned));
        expect_misfit(from, create(TL_F32, 1, dims));
        expect_misfit(from, create(TL_F32, 0, NULL));
        tl_tensor_put(cluster_recv_wait(cluster.workers[1], from, "t", 0));
        cluster_expect(cq, TL_OK);
    }
    tl_tensor_put(tensor);
    ck_assert_int_eq(tl_tensor_create_dead(&tensor, &error), TL_OK);
    cluster_publish(cluster.workers[0], "t", 0, tensor);
    tl_tensor_put(tensor);
    expect_misfit(0, create(TL_F32, 2, dims));
    const struct tl_string items[1] = {{"12345678", 8}};
    tensor = strings(0, NULL, items);
    cluster_publish(cluster.workers[0], "t", 0, tensor);
    tl_tensor_put(tensor);
    expect_misfit(0, create(TL_F32, 0, NULL));
}
END_TEST

START_TEST(read_only_destination_is_refused)
{
    uint64_t bytes[4];
    const uint64_t dims[1] = {4};
    const struct tl_tensor_view view = {.size_bytes = sizeof(view),
                                        .dtype = TL_U64,
                                        .rank = 1,
                                        .dims = dims,
                                        .data = bytes,
                                        .capacity_bytes = sizeof(bytes),
                                        .read_only = true};
    struct tl_recv_options options = {.size_bytes = sizeof(options)};
    ck_assert_int_eq(tl_tensor_wrap(&view, &options.destination, &error), TL_OK);
    ck_assert_int_eq(tl_recv(cluster.workers[1], cluster_peer(cluster.workers[1], 0), "t", 0, &options, CLUSTER_LONG,
                             cq, NULL, NULL, &error),
                     TL_INVALID_ARGUMENT);
    struct tl_tensor *tensor = create(TL_U64, 1, dims);
    struct tl_completion completion = move(options.destination, tensor);
    tl_tensor_put(completion.tensor);
    tl_tensor_put(tensor);
    tl_tensor_put(options.destination);
}
END_TEST

/* ---------------------------------------------------------------------------------------------- wrapped memory -- */

START_TEST(wrapped_memory_is_released_once_and_only_then)
{
    const uint64_t size_bytes = 300000;
    for (unsigned round = 0; round < 50; round++) {
        unsigned released = 0;
        void *bytes = malloc(size_bytes);
        pattern_fill(bytes, size_bytes, round);
        struct tl_tensor *tensor = cluster_wrap(bytes, size_bytes, &released);
        cluster_send(cluster.workers[0], "t", round, tensor, cq);
        tl_tensor_put(tensor);
        struct tl_tensor *got = cluster_recv_wait(cluster.workers[1], 0, "t", round);
        cluster_expect(cq, TL_OK);
        ck_assert_uint_eq(__atomic_load_n(&released, __ATOMIC_ACQUIRE), 1);
        free(bytes);
        ck_assert(cluster_tensor_is(got, size_bytes, round));
        tl_tensor_put(got);
        ck_assert_uint_eq(__atomic_load_n(&released, __ATOMIC_ACQUIRE), 1);
    }
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- counters -- */

START_TEST(large_tensors_are_not_copied)
{
    const uint64_t sizes[] = {4096, 65537, 65536 + 100, 200001, 131072 + 1};
    for (unsigned i = 0; i < 5; i++)
        expect_moved(create(TL_U8, 1, &sizes[i]), TL_PATH_GRPC);
    struct tl_tensor *tensor = create(TL_U8, 1, &sizes[0]);
    for (unsigned i = 0; i < 200; i++)
        cluster_send(cluster.workers[0], "many", i, tensor, cq);
    for (unsigned i = 0; i < 200; i++)
        cluster_recv(cluster.workers[1], 0, "many", i, cq);
    for (unsigned i = 0; i < 400; i++)
        cluster_expect(cq, TL_OK);
    ck_assert_uint_eq(cluster_stats(cluster.workers[0]).bytes_copied_send, 0);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(small_tensors_share_frames)
{
    const uint64_t size_bytes = 100;
    struct tl_tensor *tensor = create(TL_U8, 1, &size_bytes);
    tl_peer_id peer = cluster_peer(cluster.workers[1], 0);
    ck_assert_int_eq(tl_worker_wait_for_peers(cluster.workers[1], &peer, 1, 1, CLUSTER_LONG, &error), TL_OK);
    for (unsigned i = 0; i < 1000; i++)
        cluster_recv(cluster.workers[1], 0, "t", i, cq);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[0]).waiting_receivers == 1000);
    for (unsigned i = 0; i < 1000; i++)
        cluster_send(cluster.workers[0], "t", i, tensor, cq);
    for (unsigned i = 0; i < 2000; i++)
        cluster_expect(cq, TL_OK);
    struct tl_worker_stats sender = cluster_stats(cluster.workers[0]);
    struct tl_worker_stats receiver = cluster_stats(cluster.workers[1]);
    ck_assert_uint_eq(sender.tensors_sent, 1000);
    ck_assert_uint_eq(receiver.tensors_received, 1000);
    ck_assert_uint_eq(sender.bytes_sent, 100000);
    ck_assert_uint_eq(receiver.bytes_received, 100000);
    ck_assert_uint_lt(sender.frames_sent, 500);
    ck_assert_uint_lt(receiver.frames_sent, 500);
    ck_assert_uint_le(sender.frames_received, receiver.frames_sent + 1);
    tl_tensor_put(tensor);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("worker_tensors");
    TCase *pair = tcase_create("pair");
    tcase_add_checked_fixture(pair, setup, teardown);
    tcase_add_test(pair, every_dtype);
    tcase_add_test(pair, packed_dtypes_have_their_sizes);
    tcase_add_test(pair, every_rank);
    tcase_add_test(pair, zero_size);
    tcase_add_test(pair, dead);
    tcase_add_test(pair, sizes_around_the_chunk);
    tcase_add_test(pair, strings_of_every_kind);
    tcase_add_test(pair, string_tensors_without_bytes);
    tcase_add_test(pair, many_strings);
    tcase_add_test(pair, into_a_destination);
    tcase_add_loop_test(pair, within_one_worker, 0, 9);
    tcase_add_loop_test(pair, between_two_workers, 0, 9);
    tcase_add_loop_test(pair, after_what_the_stream_holds, 0, 2);
    tcase_add_loop_test(pair, ended_while_a_stream_is_held, 0, 6);
    tcase_add_test(pair, closed_while_a_copy_runs);
    tcase_add_loop_test(pair, strings_and_dead_tensors_stay_on_the_host, 0, 2);
    tcase_add_test(pair, captured_streams_are_refused);
    tcase_add_test(pair, into_a_part_of_wrapped_memory);
    tcase_add_test(pair, that_does_not_fit_stays_where_it_is);
    tcase_add_test(pair, read_only_destination_is_refused);
    tcase_add_test(pair, wrapped_memory_is_released_once_and_only_then);
    tcase_add_test(pair, large_tensors_are_not_copied);
    tcase_add_test(pair, small_tensors_share_frames);
    suite_add_tcase(suite, pair);
    return run_suite_in_process(suite);
}
