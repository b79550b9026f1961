// SPDX-License-Identifier: Apache-2.0
/* Tensors on devices, from worker to worker: all bytes, what they cost, and what may fail on the way. Most travel over
 * gRPC. */
#include <check.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "fakes/cluster.h"
#include "fakes/device_case.h"
#include "fakes/log_capture.h"
#include "fakes/proxy.h"
#include "fakes/run_suite.h"
#include "server/worker_internal.h"
#include "tensor/device.h"

#define BLOCK TL_STAGING_BLOCK_BYTES
#define BIG_BYTES (16 * BLOCK + 77)

static struct cluster cluster;
static struct proxy proxy;
static struct tl_cq *send_cq;
static struct tl_cq *recv_cq;
static bool is_local; /* nothing may travel over gRPC */

static void open_with(const char *settings)
{
    setup_cuda();
    cluster_init(&cluster, 2, settings);
    cluster_use_proxy(&cluster, 0, &proxy); /* worker 1 reaches worker 0 through it */
    cluster_open_all(&cluster);
    send_cq = cluster_cq();
    recv_cq = cluster_cq();
}

static void setup(void)
{
    open_with(NULL);
}

static void setup_small_chunks(void)
{
    open_with("\"limits\": {\"chunk\": \"64KiB\"}");
}

/* One value of 100,000 bytes is under way at a time. */
static void setup_little_inflight(void)
{
    open_with("\"timeouts\": {\"stalled\": \"5s\"}, \"limits\": {\"inflight\": \"64KiB\", \"chunk\": \"16KiB\"}");
}

static void setup_short_stalled(void)
{
    open_with("\"timeouts\": {\"stalled\": \"1s\"}");
}

/* Within the host, and not over gRPC. */
static void setup_local(void)
{
    open_with("\"protocol\": \"grpc+local\", \"rdma\": \"require\"");
    is_local = true;
}

static void teardown(void)
{
    proxy_limit(&proxy, PROXY_DOWN, UINT64_MAX);
    cuda->hold(NULL, false);
    cluster_close_all(&cluster);
    tl_cq_destroy(send_cq);
    tl_cq_destroy(recv_cq);
    proxy_stop(&proxy);
}

static void publish_tensor(const char *key, struct tl_tensor *tensor, unsigned seed)
{
    if (tl_tensor_size_bytes(tensor) > 0) fill(tensor, seed);
    cluster_publish(cluster.workers[0], key, 0, tensor);
    tl_tensor_put(tensor);
}

static void publish(const char *key, struct tl_device device, uint64_t size_bytes, unsigned seed)
{
    publish_tensor(key, bytes_on(device, size_bytes), seed);
}

static tl_op_id receive(const char *key, struct tl_tensor *destination, bool wants_checksum)
{
    tl_op_id op;
    struct tl_error error;
    const struct tl_recv_options options = {
        .size_bytes = sizeof(options), .destination = destination, .wants_checksum = wants_checksum};
    tl_peer_id peer = cluster_peer(cluster.workers[1], 0);
    enum tl_status status =
        tl_recv(cluster.workers[1], peer, key, 0, &options, CLUSTER_LONG, recv_cq, destination, &op, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    return op;
}

/* A tensor that may be read or written at once, so that the copy is what a test holds, and not a stream before it. */
static struct tl_tensor *ready_on(struct tl_device device, uint64_t size_bytes)
{
    struct tl_tensor *tensor = bytes_on(device, size_bytes);
    tl_tensor_set_stream(tensor, TL_STREAM_NONE);
    return tensor;
}

/* The value and its destination are on devices, and no checksum is wanted. */
static bool is_from_device_to_device;

/* The next receive must succeed, with the bytes of this seed. */
static void expect(struct tl_tensor *destination, unsigned seed, bool is_verified)
{
    struct tl_completion completion = cluster_next(recv_cq);
    ck_assert_msg(completion.status.code == TL_OK, "%s", completion.status.message);
    ck_assert(completion.is_verified == is_verified);
    if (!is_local) ck_assert_int_eq(completion.path, TL_PATH_GRPC);
    if (is_local && destination && tl_tensor_is_on_device(destination))
        ck_assert_int_eq(completion.path, is_from_device_to_device ? TL_PATH_GPU_IPC : TL_PATH_GPU_PROXY);
    if (destination) ck_assert_ptr_eq(completion.tensor, destination);
    ck_assert(is_filled(completion.tensor, seed));
    tl_tensor_put(completion.tensor);
}

static struct fake_cuda_counts counts(void)
{
    struct fake_cuda_counts counts;
    cuda->get_counts(&counts);
    return counts;
}

static void pause_for(unsigned ms)
{
    int64_t until_ns = cluster_now_ns() + ms * (CLUSTER_SECOND / 1000);
    while (cluster_now_ns() < until_ns)
        cluster_pause();
}

/* Waits until a device has another copy in a stream: before that the transfer may wait for blocks, and be given up at
 * once. */
static void await_copy(uint64_t before_bytes)
{
    CLUSTER_UNTIL(counts().begun_bytes > before_bytes);
}

/* ------------------------------------------------------------------------------------------------------- bytes -- */

static const struct tl_device *const places[] = {&host, &gpu0, &gpu1};
static const uint64_t sizes[] = {1, 256, 257, 65537, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5};

/* Between all places, with and without a checksum; each side that is a device copies each byte once. */
START_TEST(all_bytes_arrive)
{
    struct tl_device from = *places[_i / 3], to = *places[_i % 3];
    bool is_from_device = from.kind != TL_DEVICE_HOST, is_to_device = to.kind != TL_DEVICE_HOST;
    char key[32];
    for (unsigned i = 0; i < TL_ARRAY_COUNT(sizes); i++) {
        snprintf(key, sizeof(key), "size %u", i);
        publish(key, from, sizes[i], i);
        for (unsigned wants_checksum = 0; wants_checksum < 2; wants_checksum++) {
            struct tl_tensor *destination = bytes_on(to, sizes[i]);
            uint64_t before_bytes = counts().copied_bytes;
            is_from_device_to_device = is_from_device && is_to_device && wants_checksum == 0;
            receive(key, destination, wants_checksum);
            expect(destination, i, wants_checksum);
            uint64_t sides = (is_from_device ? 1u : 0u) + (is_to_device ? 1u + wants_checksum : 0u);
            /* Memory of these sizes need not be copied before another process imports it. */
            if (is_local && is_from_device_to_device && sizes[i] + 1 >= BLOCK && sizes[i] <= BLOCK) sides = 1;
            ck_assert_uint_eq(counts().copied_bytes - before_bytes, sides * sizes[i]);
            tl_tensor_put(destination);
        }
    }
    if (is_from_device) check_blocks(from);
    if (is_to_device) check_blocks(to);
}
END_TEST

/* A send completes, and its memory is free, when the receiver has the tensor. */
START_TEST(sends)
{
    for (unsigned i = 0; i < TL_ARRAY_COUNT(sizes); i++) {
        struct tl_tensor *tensor = bytes_on(gpu0, sizes[i]), *destination = bytes_on(gpu1, sizes[i]);
        fill(tensor, i);
        cluster_send(cluster.workers[0], "sent", 0, tensor, send_cq);
        receive("sent", destination, true);
        expect(destination, i, true);
        cluster_expect(send_cq, TL_OK);
        ck_assert(!tl_tensor_is_shared(tensor));
        tl_tensor_put(tensor);
        tl_tensor_put(destination);
    }
}
END_TEST

START_TEST(without_bytes)
{
    struct tl_tensor *destination = bytes_on(gpu1, 0);
    publish("none", gpu0, 0, 1);
    receive("none", destination, true);
    struct tl_completion completion = cluster_expect(recv_cq, TL_OK);
    ck_assert_uint_eq(completion.bytes, 0);
    ck_assert_uint_eq(counts().copies, 0);
    tl_tensor_put(destination);
}
END_TEST

/* Many more than there are blocks, of all sizes, under way at once. */
START_TEST(many_at_once)
{
    enum { MANY = 120 };
    struct tl_tensor *destinations[MANY];
    char key[32];
    for (unsigned i = 0; i < MANY; i++) {
        snprintf(key, sizeof(key), "many %u", i);
        publish(key, *places[i % 3], 1 + i * 12345, i);
    }
    for (unsigned i = 0; i < MANY; i++) {
        snprintf(key, sizeof(key), "many %u", i);
        destinations[i] = bytes_on(*places[i / 3 % 3], 1 + i * 12345);
        receive(key, destinations[i], i % 2 == 0);
    }
    for (unsigned n = 0; n < MANY; n++)
        cluster_expect(recv_cq, TL_OK);
    for (unsigned i = 0; i < MANY; i++) {
        ck_assert_msg(is_filled(destinations[i], i), "tensor %u", i);
        tl_tensor_put(destinations[i]);
    }
    check_blocks(gpu0);
    check_blocks(gpu1);
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- streams -- */

static struct tl_tensor *late;

static void do_nothing(void *unused)
{
    (void)unused;
}

static void fill_late(void *context)
{
    fill(late, *(const unsigned *)context);
}

/* Bytes that a kernel is still to write are read after it, and bytes that it still reads are written after it; others
 * pass by meanwhile, though there are more such tensors than blocks. */
START_TEST(streams_come_first)
{
    enum { HELD = 2 * TL_STAGING_BLOCKS };
    static const unsigned seed = 40;
    void *streams[2] = {cuda->create_stream(0, false), cuda->create_stream(1, false)};
    struct tl_tensor *destinations[HELD];
    char key[32];
    for (unsigned i = 0; i < 2; i++)
        cuda->hold(streams[i], true);
    late = bytes_on(gpu0, 1000);
    fill(late, 1);
    cuda->launch(streams[0], fill_late, (void *)&seed);
    tl_tensor_set_stream(late, (tl_stream)streams[0]);
    cluster_publish(cluster.workers[0], "late", 0, late);
    publish("ready", gpu0, 1000, 2);
    for (unsigned i = 0; i < HELD; i++) {
        destinations[i] = bytes_on(gpu1, 1000);
        if (i % 2 == 0) tl_tensor_set_stream(destinations[i], (tl_stream)streams[1]);
        receive(i % 2 == 0 ? "ready" : "late", destinations[i], false);
    }
    pause_for(100);
    ck_assert(cluster_is_quiet(recv_cq));
    struct tl_tensor *other = bytes_on(gpu1, 1000);
    receive("ready", other, true);
    expect(other, 2, true);
    ck_assert(cluster_is_quiet(recv_cq));
    for (unsigned i = 0; i < 2; i++)
        cuda->hold(streams[i], false);
    for (unsigned i = 0; i < HELD; i++)
        cluster_expect(recv_cq, TL_OK);
    for (unsigned i = 0; i < HELD; i++) {
        snprintf(key, sizeof(key), "destination %u", i);
        ck_assert_msg(is_filled(destinations[i], i % 2 == 0 ? 2 : seed), "%s", key);
        tl_tensor_put(destinations[i]);
    }
    tl_tensor_put(late);
    tl_tensor_put(other);
    check_blocks(gpu0);
    check_blocks(gpu1);
}
END_TEST

/* A value whose stream is not so far lets others pass, and the peer is not blamed for it. */
START_TEST(a_stream_holds_up_nothing_else)
{
    static const unsigned seed = 7;
    void *stream = cuda->create_stream(0, false);
    cuda->hold(stream, true);
    late = bytes_on(gpu0, 100000);
    tl_tensor_set_stream(late, (tl_stream)stream);
    cuda->launch(stream, fill_late, (void *)&seed);
    cluster_publish(cluster.workers[0], "late", 0, late);
    publish("ready", host, 100000, 2);
    receive("late", NULL, false);
    pause_for(50);
    receive("ready", NULL, false);
    expect(NULL, 2, false);
    pause_for(6000); /* longer than timeouts.stalled */
    ck_assert_uint_eq(cluster_stats(cluster.workers[1]).requests_retried, 0);
    cuda->hold(stream, false);
    expect(NULL, seed, false);
    tl_tensor_put(late);
}
END_TEST

/* The peer has opened the link and sent all of the value, the end of which is not read while the device is busy. */
START_TEST(what_waits_for_a_device_is_no_fault_of_the_peer)
{
    const uint64_t size_bytes = UINT64_C(17) << 19; /* more than is read, and less than the windows let pass */
    struct tl_tensor *opener = bytes_on(host, 1000);
    log_capture_begin();
    cluster_publish(cluster.workers[1], "opener", 0, opener);
    tl_tensor_put(opener);
    tl_tensor_put(cluster_recv_wait(cluster.workers[0], 1, "opener", 0));
    publish("wide", host, 100 << 20, 1); /* widens the window */
    for (unsigned i = 0; i < 3; i++) {
        receive("wide", NULL, false);
        expect(NULL, 1, false);
    }
    pause_for(1500); /* what was received so far is explained */
    tl_log_configure(TL_LOG_WARN, TL_LOG_KEY_VALUE);
    struct tl_tensor *destination = ready_on(gpu1, size_bytes);
    publish("big", host, size_bytes, 3);
    cuda->hold(NULL, true);
    receive("big", destination, false);
    pause_for(4000); /* longer than twice timeouts.stalled */
    cuda->hold(NULL, false);
    expect(destination, 3, false);
    tl_tensor_put(destination);
    ck_assert_uint_eq(log_capture_count("connection ended"), 0);
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- broken off -- */

/* A receive that is cancelled while the device writes its destination completes when the device has let go. */
START_TEST(cancelled_in_a_copy)
{
    struct tl_tensor *destination = ready_on(gpu1, 2 * BLOCK);
    publish("big", host, 2 * BLOCK, 1);
    cuda->hold(NULL, true);
    tl_op_id op = receive("big", destination, false);
    await_copy(0);
    ck_assert_int_eq(tl_cancel(cluster.workers[1], op), TL_OK);
    pause_for(100);
    ck_assert(cluster_is_quiet(recv_cq));
    cuda->hold(NULL, false);
    cluster_expect(recv_cq, TL_CANCELLED);
    ck_assert(!tl_tensor_is_shared(destination));
    fill(destination, 9);
    pause_for(50);
    ck_assert(is_filled(destination, 9));
    tl_tensor_put(destination);
    check_blocks(gpu1);
}
END_TEST

/* The owner is still reading a value from its device when its receiver gives up: nothing is left behind. */
START_TEST(cancelled_while_the_owner_reads)
{
    publish_tensor("big", ready_on(gpu0, BIG_BYTES), 1);
    cuda->hold(NULL, true);
    tl_op_id op = receive("big", NULL, false);
    await_copy(0);
    ck_assert_int_eq(tl_cancel(cluster.workers[1], op), TL_OK);
    cluster_expect(recv_cq, TL_CANCELLED);
    cuda->hold(NULL, false);
    check_blocks(gpu0);
    receive("big", NULL, true);
    expect(NULL, 1, true);
}
END_TEST

/* The connection breaks in the middle: the transfer goes on where it was. */
START_TEST(resumed)
{
    struct tl_device from = _i % 2 == 0 ? host : gpu0;
    bool wants_checksum = _i >= 2;
    struct tl_tensor *destination = bytes_on(gpu1, BIG_BYTES);
    publish("big", from, BIG_BYTES, 5);
    proxy_limit(&proxy, PROXY_DOWN, BIG_BYTES / 2);
    receive("big", destination, wants_checksum);
    proxy_wait_limit(&proxy, PROXY_DOWN);
    pause_for(50);
    proxy_cut(&proxy);
    proxy_limit(&proxy, PROXY_DOWN, UINT64_MAX);
    expect(destination, 5, wants_checksum);
    ck_assert_uint_lt(cluster_stats(cluster.workers[0]).bytes_sent, 2 * (uint64_t)BIG_BYTES);
    ck_assert_uint_gt(proxy_accepted(&proxy), 1);
    tl_tensor_put(destination);
    check_blocks(gpu1);
}
END_TEST

/* Breaks the connection of a receive while its bytes are being copied to the device, which is held. */
static tl_op_id break_in_a_copy(struct tl_tensor *destination, bool wants_checksum)
{
    publish("big", host, BIG_BYTES, 5);
    proxy_limit(&proxy, PROXY_DOWN, BIG_BYTES / 2);
    cuda->hold(NULL, true);
    tl_op_id op = receive("big", destination, wants_checksum);
    await_copy(0);
    proxy_cut(&proxy);
    return op;
}

/* The connection breaks while the device holds the bytes: nothing else uses the destination until it has let go. */
START_TEST(broken_in_a_copy)
{
    struct tl_tensor *destination = ready_on(gpu1, BIG_BYTES);
    (void)break_in_a_copy(destination, true);
    proxy_limit(&proxy, PROXY_DOWN, UINT64_MAX);
    pause_for(100);
    cuda->hold(NULL, false);
    expect(destination, 5, true);
    tl_tensor_put(destination);
    check_blocks(gpu1);
}
END_TEST

/* Given up after the connection broke, while the device still writes the destination. */
START_TEST(cancelled_after_the_break)
{
    struct tl_tensor *destination = ready_on(gpu1, BIG_BYTES);
    tl_op_id op = break_in_a_copy(destination, false);
    pause_for(100);
    ck_assert_int_eq(tl_cancel(cluster.workers[1], op), TL_OK);
    pause_for(100);
    ck_assert(cluster_is_quiet(recv_cq));
    cuda->hold(NULL, false);
    cluster_expect(recv_cq, TL_CANCELLED);
    ck_assert(!tl_tensor_is_shared(destination));
    tl_tensor_put(destination);
    check_blocks(gpu1);
}
END_TEST

static void *close_owner(void *unused)
{
    (void)unused;
    tl_worker_close(cluster.workers[0], CLUSTER_LONG);
    return NULL;
}

/* The owner closes while the device of the receiver is at work: the connection ends as soon as that is done. */
START_TEST(drained_while_the_device_writes)
{
    pthread_t thread;
    struct tl_tensor *destination = ready_on(gpu1, 1000);
    publish("big", host, 1000, 5);
    cuda->hold(NULL, true);
    receive("big", destination, false);
    await_copy(0);
    ck_assert_int_eq(pthread_create(&thread, NULL, close_owner, NULL), 0);
    pause_for(200);
    cuda->hold(NULL, false);
    expect(destination, 5, false);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    cluster.workers[0] = NULL;
    tl_tensor_put(destination);
}
END_TEST

/* A worker that closes does not wait for the peer, and what its device does is waited for. */
START_TEST(closed_in_a_copy)
{
    struct tl_tensor *destination = ready_on(gpu1, BIG_BYTES);
    publish("big", gpu0, BIG_BYTES, 5);
    proxy_limit(&proxy, PROXY_DOWN, BIG_BYTES / 2);
    receive("big", destination, true);
    proxy_wait_limit(&proxy, PROXY_DOWN);
    for (unsigned i = 0; i < 2; i++) {
        unsigned task = (unsigned)_i ^ i;
        tl_worker_close(cluster.workers[task], CLUSTER_SECOND / 5);
        cluster.workers[task] = NULL;
    }
    struct tl_completion completion = cluster_next(recv_cq);
    ck_assert_int_ne(completion.status.code, TL_OK);
    ck_assert(!tl_tensor_is_shared(destination));
    tl_tensor_put(destination);
    check_blocks(gpu0);
    check_blocks(gpu1);
}
END_TEST

/* ------------------------------------------------------------------------------------------------- shared memory -- */

struct count {
    struct tl_command command;
    uint64_t bytes;
};

static void run_count(struct tl_command *command)
{
    struct tl_engine_stats engine;
    struct tl_memory_stats memory;
    struct tl_reactor_stats reactor;
    tl_transports_get_stats(command->worker, &engine, &memory, &reactor);
    TL_CONTAINER_OF(command, struct count, command)->bytes = engine.bytes_bounced;
}

/* What the CPU has copied for a worker. */
static uint64_t bounced_bytes(unsigned task)
{
    struct count count = {.bytes = 0};
    tl_worker_run(cluster.workers[task], &count.command, run_count);
    return count.bytes;
}

/* Receives a small value from a device; returns whether the device has copied it straight into the pool. */
static bool is_straight(void)
{
    uint64_t bounced = bounced_bytes(0);
    receive("small", NULL, false);
    tl_tensor_put(cluster_next(recv_cq).tensor);
    return bounced_bytes(0) == bounced;
}

/* The first values that are sent to the host pin the pool. From then on a device copies each byte once, straight into
 * the pool, and the CPU none. */
START_TEST(through_a_pinned_pool)
{
    struct tl_tensor *destination = bytes_on(host, BIG_BYTES);
    publish("small", gpu0, 1000, 1);
    CLUSTER_UNTIL(is_straight());
    ck_assert_uint_gt(counts().registrations, 0);
    for (unsigned round = 0; round < 4; round++) {
        publish("big", round % 2 == 0 ? gpu0 : gpu1, BIG_BYTES, round);
        uint64_t copied = counts().copied_bytes, bounced = bounced_bytes(0);
        receive("big", round < 2 ? NULL : destination, false);
        struct tl_completion completion = cluster_next(recv_cq);
        ck_assert_msg(completion.status.code == TL_OK, "%s", completion.status.message);
        ck_assert(is_filled(completion.tensor, round));
        ck_assert_int_eq(completion.path, TL_PATH_GPU_PROXY);
        ck_assert_str_ne(completion.path_reason, "");
        if (round < 2) ck_assert_str_eq(completion.path_reason, "copied by the owner");
        tl_tensor_put(completion.tensor);
        ck_assert_uint_eq(counts().copied_bytes - copied, BIG_BYTES);
        ck_assert_uint_eq(bounced_bytes(0), bounced);
    }
    tl_tensor_put(destination);
    cluster_close(&cluster, 0);
    CLUSTER_UNTIL(counts().registrations == 0);
}
END_TEST

/* The owner closes while its device copies into the pool: the memory stays until that is over. */
START_TEST(closed_in_a_copy_into_the_pool)
{
    publish("small", gpu0, 1000, 1);
    publish_tensor("big", ready_on(gpu0, BIG_BYTES), 1);
    CLUSTER_UNTIL(is_straight());
    cuda->hold(NULL, true);
    uint64_t before_bytes = counts().begun_bytes;
    tl_op_id op = receive("big", NULL, false);
    await_copy(before_bytes);
    tl_worker_close(cluster.workers[0], 0);
    cluster.workers[0] = NULL;
    ck_assert_uint_gt(counts().registrations, 0);
    cuda->hold(NULL, false);
    CLUSTER_UNTIL(counts().registrations == 0);
    (void)!tl_cancel(cluster.workers[1], op); /* unless it has failed, it waits for the owner to come back */
    ck_assert_int_ne(cluster_next(recv_cq).status.code, TL_OK);
    check_blocks(gpu0);
}
END_TEST

/* ---------------------------------------------------------------------------------------------- within a worker -- */

static void receive_from_self(struct tl_device device, struct tl_tensor *destination)
{
    struct tl_error error;
    const struct tl_recv_options options = {
        .size_bytes = sizeof(options), .destination = destination, .device = device};
    tl_peer_id self = cluster_peer(cluster.workers[0], 0);
    enum tl_status status =
        tl_recv(cluster.workers[0], self, "own", 0, &options, CLUSTER_LONG, recv_cq, NULL, NULL, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
}

/* Each receiver of a published value has a tensor and a stream of its own, whatever the publisher's is by then. */
START_TEST(references_have_no_stream)
{
    struct tl_completion got[2];
    void *stream = cuda->create_stream(0, false);
    struct tl_tensor *tensor = bytes_on(gpu0, 1000);
    tl_tensor_set_stream(tensor, (tl_stream)stream);
    cluster_publish(cluster.workers[0], "own", 0, tensor);
    for (unsigned i = 0; i < 2; i++) {
        receive_from_self(gpu0, NULL);
        got[i] = cluster_next(recv_cq);
        ck_assert_int_eq(got[i].status.code, TL_OK);
        ck_assert_int_eq(tl_tensor_stream(got[i].tensor), TL_STREAM_NONE);
        ck_assert_ptr_eq(tl_tensor_data(got[i].tensor), tl_tensor_data(tensor));
    }
    ck_assert_ptr_ne(got[0].tensor, got[1].tensor);
    for (unsigned i = 0; i < 2; i++)
        tl_tensor_put(got[i].tensor);
    tl_tensor_put(tensor);
}
END_TEST

static atomic_bool is_closed;

static void *read_completions(void *unused)
{
    (void)unused;
    struct tl_completion completions[4];
    while (!is_closed) {
        size_t count = tl_cq_poll(recv_cq, completions, TL_ARRAY_COUNT(completions));
        for (size_t i = 0; i < count; i++)
            tl_tensor_put(completions[i].tensor);
    }
    return NULL;
}

/* The worker closes while a receive waits for the stream of a value, and others wait for the value. */
START_TEST(closed_while_others_wait_for_the_value)
{
    pthread_t thread;
    struct tl_tensor *value = bytes_on(gpu0, 100), *unfit = bytes_on(host, 5);
    void *stream = cuda->create_stream(0, false);
    tl_tensor_set_stream(value, (tl_stream)stream);
    for (unsigned round = 0; round < 20; round++) {
        cuda->hold(stream, true);
        cuda->launch(stream, do_nothing, NULL);
        is_closed = false;
        ck_assert_int_eq(pthread_create(&thread, NULL, read_completions, NULL), 0);
        receive_from_self(gpu0, NULL);
        for (unsigned i = 0; i < 2; i++)
            receive_from_self(host, unfit);
        cluster_send(cluster.workers[0], "own", 0, value, send_cq);
        pause_for(5);
        tl_worker_close(cluster.workers[0], 0);
        is_closed = true;
        ck_assert_int_eq(pthread_join(thread, NULL), 0);
        cuda->hold(stream, false);
        (void)cluster_next(send_cq);
        cluster.workers[0] = NULL;
        cluster_open(&cluster, 0);
    }
    tl_tensor_put(value);
    tl_tensor_put(unfit);
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- the device -- */

/* A peer that takes nothing of what it has asked for keeps no block that others need. */
START_TEST(blocks_are_not_kept_by_a_slow_peer)
{
    char key[32];
    for (unsigned i = 0; i < 6; i++) {
        snprintf(key, sizeof(key), "slow %u", i);
        publish(key, gpu0, BIG_BYTES, i);
    }
    proxy_limit(&proxy, PROXY_DOWN, 100000);
    for (unsigned i = 0; i < 6; i++) {
        snprintf(key, sizeof(key), "slow %u", i);
        receive(key, NULL, false);
    }
    proxy_wait_limit(&proxy, PROXY_DOWN);
    pause_for(100);
    struct tl_tensor *from = bytes_on(gpu0, BIG_BYTES), *to = bytes_on(host, BIG_BYTES);
    fill(from, 8);
    copy(to, from);
    ck_assert(is_filled(to, 8));
    tl_tensor_put(from);
    tl_tensor_put(to);
    proxy_limit(&proxy, PROXY_DOWN, UINT64_MAX);
    for (unsigned i = 0; i < 6; i++)
        cluster_expect(recv_cq, TL_OK);
    check_blocks(gpu0);
}
END_TEST

/* A device that fails ends what needs it, with its name; the workers go on. */
START_TEST(lost_device)
{
    struct tl_tensor *destination = ready_on(gpu1, BIG_BYTES);
    bool is_the_owners = _i == 0;
    publish_tensor("big", ready_on(is_the_owners ? gpu0 : host, BIG_BYTES), 5);
    publish("small", host, 1000, 6);
    cuda->hold(NULL, true);
    receive("big", is_the_owners ? NULL : destination, false);
    await_copy(0);
    cuda->break_device(is_the_owners ? 0 : 1, 700);
    cuda->hold(NULL, false);
    struct tl_completion completion = cluster_next(recv_cq);
    ck_assert_int_eq(completion.status.code, TL_FAILED_PRECONDITION);
    const char *name = is_the_owners ? "gpu:0 is lost" : "gpu:1 is lost";
    ck_assert_msg(strstr(completion.status.message, name) != NULL, "%s", completion.status.message);
    ck_assert_msg(strstr(completion.status.message, "big") != NULL, "%s", completion.status.message);
    receive("small", NULL, true);
    expect(NULL, 6, true);
    tl_tensor_put(destination);
}
END_TEST

/* A value that the owner cannot read is an error of its own, after which the subscription goes on. */
START_TEST(lost_device_of_a_subscription)
{
    const struct tl_subscribe_options options = {.size_bytes = sizeof(options), .count = 2};
    struct tl_error error;
    struct tl_tensor *lost = ready_on(gpu0, 1000), *other = ready_on(host, 1000);
    fill(other, 6);
    ck_assert_int_eq(tl_subscribe(cluster.workers[1], cluster_peer(cluster.workers[1], 0), "w", &options, recv_cq, NULL,
                                  NULL, &error),
                     TL_OK);
    cuda->break_device(0, 700);
    cluster_send(cluster.workers[0], "w", 1, lost, send_cq);
    struct tl_completion completion = cluster_next(recv_cq);
    ck_assert(!completion.is_last);
    ck_assert_int_eq(completion.status.code, TL_FAILED_PRECONDITION);
    ck_assert_msg(strstr(completion.status.message, "gpu:0 is lost") != NULL, "%s", completion.status.message);
    cluster_send(cluster.workers[0], "w", 2, other, send_cq);
    completion = cluster_next(recv_cq);
    ck_assert_msg(completion.status.code == TL_OK, "%s", completion.status.message);
    ck_assert_uint_eq(completion.step, 2);
    ck_assert(is_filled(completion.tensor, 6));
    tl_tensor_put(completion.tensor);
    tl_tensor_put(lost);
    tl_tensor_put(other);
}
END_TEST

int main(void)
{
    TCase *whole = tcase_create("whole");
    tcase_add_checked_fixture(whole, setup, teardown);
    tcase_add_loop_test(whole, all_bytes_arrive, 0, 9);
    tcase_add_test(whole, sends);
    tcase_add_test(whole, without_bytes);
    tcase_add_test(whole, many_at_once);
    tcase_add_test(whole, streams_come_first);
    tcase_add_test(whole, cancelled_in_a_copy);
    tcase_add_test(whole, cancelled_while_the_owner_reads);
    tcase_add_loop_test(whole, resumed, 0, 4);
    tcase_add_test(whole, broken_in_a_copy);
    tcase_add_test(whole, cancelled_after_the_break);
    tcase_add_test(whole, drained_while_the_device_writes);
    tcase_add_loop_test(whole, closed_in_a_copy, 0, 2);
    tcase_add_test(whole, references_have_no_stream);
    tcase_add_test(whole, closed_while_others_wait_for_the_value);
    tcase_add_test(whole, blocks_are_not_kept_by_a_slow_peer);
    tcase_add_loop_test(whole, lost_device, 0, 2);
    tcase_add_test(whole, lost_device_of_a_subscription);
    TCase *local = tcase_create("shared memory");
    tcase_add_checked_fixture(local, setup_local, teardown);
    tcase_add_loop_test(local, all_bytes_arrive, 0, 9);
    tcase_add_test(local, sends);
    tcase_add_test(local, without_bytes);
    tcase_add_test(local, many_at_once);
    tcase_add_test(local, streams_come_first);
    tcase_add_test(local, lost_device_of_a_subscription);
    tcase_add_test(local, through_a_pinned_pool);
    tcase_add_test(local, closed_in_a_copy_into_the_pool);
    TCase *small = tcase_create("small chunks");
    tcase_add_checked_fixture(small, setup_small_chunks, teardown);
    tcase_add_loop_test(small, all_bytes_arrive, 4, 9);
    tcase_add_test(small, many_at_once);
    tcase_add_loop_test(small, resumed, 0, 4);
    TCase *stalled = tcase_create("short stalled");
    tcase_add_checked_fixture(stalled, setup_short_stalled, teardown);
    tcase_add_test(stalled, what_waits_for_a_device_is_no_fault_of_the_peer);

    TCase *little = tcase_create("little in flight");
    tcase_add_checked_fixture(little, setup_little_inflight, teardown);
    tcase_add_test(little, a_stream_holds_up_nothing_else);
    Suite *suite = suite_create("worker_devices");
    suite_add_tcase(suite, stalled);
    suite_add_tcase(suite, little);
    suite_add_tcase(suite, whole);
    suite_add_tcase(suite, local);
    suite_add_tcase(suite, small);
    return run_suite(suite);
}
