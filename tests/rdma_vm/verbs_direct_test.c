// SPDX-License-Identifier: Apache-2.0
/*
 * Memory of a device over the verbs provider on soft-RoCE. The device is the double's; ibv_reg_dmabuf_mr, which
 * soft-RoCE does not have, registers the double's second mapping under the addresses of the device, so that the card
 * moves the bytes and the CPU cannot.
 */
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"
#include "dataplane/probe.h"
#include "fakes/cluster.h"
#include "fakes/device_case.h"
#include "fakes/engine_case.h"
#include "fakes/run_suite.h"
#include "tensor/device.h"
#include "tests/rdma_vm/verbs_sides.h"

enum registering {
    REACHES,   /* the memory of the device */
    MISSES,    /* other memory */
    IS_REFUSED /* there is no dma-buf; and without nvidia-peermem the address cannot be registered either */
};
static enum registering registering;
static uint8_t elsewhere[64 * 1024] __attribute__((aligned(4096)));

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *domain, uint64_t offset, size_t len_bytes, uint64_t iova, int file,
                                 int access)
{
    ck_assert_int_ge(fcntl(file, F_GETFD), 0);
    ck_assert_uint_eq(offset, iova % 4096);
    if (registering == IS_REFUSED) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    void *memory = registering == REACHES ? cuda->reach((void *)(uintptr_t)iova) : elsewhere;
    return ibv_reg_mr_iova2(domain, memory, len_bytes, iova, (unsigned)access);
}

static void setup(void)
{
    setup_cuda();
    registering = REACHES;
    engine_pair_defaults(&options);
}

/* ------------------------------------------------------------------------------------------------------ probing -- */

START_TEST(probed)
{
    struct tl_error error;
    enum tl_keys keys = _i == 0 ? TL_KEYS_WINDOW : TL_KEYS_REGION;
    struct tl_provider *provider = open_at(address_a(), keys);
    ck_assert_msg(tl_provider_probe_device(provider, keys, gpu0, TL_NS_PER_SEC, &error) == TL_OK, "%s", error.message);
    registering = MISSES;
    ck_assert_int_eq(tl_provider_probe_device(provider, keys, gpu0, TL_NS_PER_SEC, &error), TL_DATA_LOSS);
    registering = IS_REFUSED;
    ck_assert_int_eq(tl_provider_probe_device(provider, keys, gpu0, TL_NS_PER_SEC, &error), TL_INVALID_ARGUMENT);
    ck_assert_msg(strstr(error.message, "nvidia-peermem") != NULL, "%s", error.message);
    provider->ops->close(provider);
    await_frees(0);
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- transfers -- */

static struct tl_provider *open_side(const char *name)
{
    return open_at(strcmp(name, "left") == 0 ? address_a() : address_b(), options.engine.keys);
}

static void fetch_between(struct tl_device from, struct tl_device to, const char *key, uint64_t size_bytes,
                          unsigned seed, enum tl_path path)
{
    const struct timespec moment = {.tv_nsec = 200 * 1000};
    struct tl_tensor *value = bytes_on(from, size_bytes);
    ask.device = to;
    fill(value, seed);
    engine_side_publish(owner, key, 1, value);
    engine_ask_start(asker, &ask, key, 1);
    for (unsigned i = 0; i < 5000 && ask.done_count == 0; i++) {
        engine_pair_run(&pair);
        nanosleep(&moment, NULL);
    }
    ck_assert_uint_eq(ask.done_count, 1);
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert_int_eq(ask.fetch.path, path);
    ck_assert_int_eq(tl_tensor_device(ask.fetch.destination).kind, to.kind);
    ck_assert(is_filled(ask.fetch.destination, seed));
    engine_ask_fini(&ask);
}

static void fetch(const char *key, uint64_t size_bytes, unsigned seed, enum tl_path path)
{
    fetch_between(gpu0, host, key, size_bytes, seed, path);
}

/* Returns when it is known whether the owner's card reaches the device. */
static void await_probe(void)
{
    const char *why_not = "";
    for (unsigned i = 0; i < 5000; i++) {
        why_not = tl_memory_why_not_direct(owner->memory, gpu0, options.engine.keys);
        if (why_not == NULL || strstr(why_not, "for the first time") == NULL) return;
        usleep(1000);
    }
    ck_assert_msg(false, "%s", why_not);
}

/* Values of all sizes, those that a card would take inline too: written by the owner's card, or read by the asker's. */
START_TEST(from_a_device)
{
    static const uint64_t sizes[] = {1, 100, 4096, 65536, 3 * MIB + 7};
    struct fake_cuda_counts before, after;
    char key[32];
    options.engine.keys = _i == 1 ? TL_KEYS_REGION : TL_KEYS_WINDOW;
    options.engine.is_reading = _i == 2;
    options.engine.register_bytes = 1;
    options.open_provider = open_side;
    open_pair();
    await_probe();
    cuda->get_counts(&before);
    for (unsigned i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        snprintf(key, sizeof(key), "key %u", i);
        fetch(key, sizes[i], i, TL_PATH_GPU_DIRECT);
    }
    cuda->get_counts(&after);
    ck_assert_uint_eq(after.copied_bytes, before.copied_bytes);
    if (_i == 2) ck_assert_uint_eq(engine_side_stats(owner).sources_shown, 5);
    engine_pair_close(&pair);
    await_frees(0);
}
END_TEST

/* The same into a device: written by the owner's card, or read by the asker's. With a key of a whole region the peer
 * writes the pool alone, and a device that does not order what cards write is left alone by them. */
START_TEST(into_a_device)
{
    static const uint64_t sizes[] = {1, 100, 4096, 65536, 3 * MIB + 7};
    bool is_direct = _i < 2;
    struct fake_cuda_counts before, after;
    char key[32];
    options.engine.keys = _i == 2 ? TL_KEYS_REGION : TL_KEYS_WINDOW;
    options.engine.is_reading = _i == 1;
    options.engine.register_bytes = 1;
    options.open_provider = open_side;
    if (_i == 3) cuda->order_writes(false);
    ck_assert_int_eq(tl_device_open(gpu1, NULL), TL_OK);
    open_pair();
    await_probe();
    const char *why_not;
    do {
        why_not = tl_memory_why_not_written(asker->memory, gpu1, options.engine.keys);
    } while (why_not != NULL && strstr(why_not, "for the first time") != NULL);
    for (unsigned from_gpu = 0; from_gpu < 2; from_gpu++) {
        cuda->get_counts(&before);
        uint64_t all_bytes = 0;
        for (unsigned i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
            snprintf(key, sizeof(key), "key %u of %u", i, from_gpu);
            fetch_between(from_gpu ? gpu0 : host, gpu1, key, sizes[i], i,
                          is_direct ? TL_PATH_GPU_DIRECT : TL_PATH_GPU_PROXY);
            all_bytes += sizes[i];
        }
        cuda->get_counts(&after);
        ck_assert_uint_eq(after.copied_bytes - before.copied_bytes, is_direct ? 0 : all_bytes);
    }
    if (_i == 1) ck_assert_uint_gt(engine_side_stats(asker).reads_posted, 0);
    engine_pair_close(&pair);
    await_frees(0);
    cuda->order_writes(true);
}
END_TEST

/* A card that does not reach the device moves nothing of it; the bytes are right all the same. */
START_TEST(not_reached)
{
    registering = _i == 0 ? MISSES : IS_REFUSED;
    options.open_provider = open_side;
    open_pair();
    await_probe();
    fetch("key", 3 * MIB + 7, 1, TL_PATH_GPU_PROXY);
    fetch_between(host, gpu0, "to a device", 3 * MIB + 7, 1, TL_PATH_GPU_PROXY);
    engine_pair_close(&pair);
    await_frees(0);
}
END_TEST

static void receive_on(struct tl_worker *worker, struct tl_device device, const char *key, uint64_t step,
                       struct tl_cq *cq)
{
    const struct tl_recv_options receive = {.size_bytes = sizeof(receive), .device = device};
    tl_op_id op;
    ck_assert_int_eq(tl_recv(worker, cluster_peer(worker, 0), key, step, &receive, CLUSTER_LONG, cq, NULL, &op, NULL),
                     TL_OK);
}

/* Whole workers: after the first values the owner's card, or with gdr the receiver's, takes them from the device to the
 * host or to another device. */
START_TEST(between_workers)
{
    static const char *const settings[] = {
        "\"protocol\": \"grpc+verbs\", \"rdma\": \"require\", "
        "\"verbs\": {\"devices\": \"rxe0\", \"gid_index\": 1, \"timeout\": 22, \"pool\": \"4MiB\"}",
        "\"protocol\": \"grpc+gdr\", \"rdma\": \"require\", "
        "\"verbs\": {\"devices\": \"rxe0\", \"gid_index\": 1, \"timeout\": 22, \"pool\": \"4MiB\"}",
    };
    struct cluster cluster;
    struct fake_cuda_counts before, after;
    /* The card has taken a value, and no probe has copied anything meanwhile. */
    bool is_direct = false;
    cluster_init(&cluster, 2, settings[_i % 2]);
    cluster_open_all(&cluster);
    struct tl_cq *cq = cluster_cq();
    for (unsigned step = 1; step < 1000 && !is_direct; step++) {
        struct tl_tensor *value = bytes_on(gpu0, MIB);
        fill(value, step);
        cuda->get_counts(&before);
        cluster_publish(cluster.workers[0], "key", step, value);
        tl_tensor_put(value);
        receive_on(cluster.workers[1], _i < 2 ? host : gpu1, "key", step, cq);
        struct tl_completion completion = cluster_next(cq);
        ck_assert_msg(completion.status.code == TL_OK, "%s", completion.status.message);
        ck_assert(is_filled(completion.tensor, step));
        cuda->get_counts(&after);
        is_direct = completion.path == TL_PATH_GPU_DIRECT && after.copied_bytes == before.copied_bytes;
        tl_tensor_put(completion.tensor);
        if (!is_direct) usleep(1000);
    }
    ck_assert(is_direct);
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
    await_frees(0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("verbs_direct");
    TCase *tcase = tcase_create("verbs_direct");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_set_timeout(tcase, 60);
    tcase_add_loop_test(tcase, probed, 0, 2);
    tcase_add_loop_test(tcase, from_a_device, 0, 3);
    tcase_add_loop_test(tcase, into_a_device, 0, 4);
    tcase_add_loop_test(tcase, not_reached, 0, 2);
    tcase_add_loop_test(tcase, between_workers, 0, 4);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
