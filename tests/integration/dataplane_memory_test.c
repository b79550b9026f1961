// SPDX-License-Identifier: Apache-2.0
/*
 * Two workers with a data plane whose registered memory runs out. Task 0 sends, with threads of its own; task 1
 * receives, once with threads and once driven by its caller (the loop's index).
 */
#include <check.h>
#include <stdio.h>
#include <string.h>

#include "control/client.h"
#include "fakes/cluster.h"
#include "fakes/fake_transport.h"
#include "fakes/run_suite.h"

#define LARGE (1 << 20)
#define FULL 4 /* So many of them fill the pool. */

static struct cluster cluster;
static struct fake_transport transport;
static struct tl_worker *sender;
static struct tl_worker *receiver;
static struct tl_cq *cq;
static struct tl_cq *sent;
static struct tl_error error;

static void open_both(int progress)
{
    cluster_init(&cluster, 2, "\"rdma\": \"require\"");
    fake_transport_init(&transport, &cluster);
    transport.pool_bytes = FULL * LARGE;
    cq = cluster_cq();
    sent = cluster_cq();
    sender = fake_transport_open(&transport, 0, TL_PROGRESS_THREAD);
    receiver = fake_transport_open(&transport, 1, progress);
}

static void teardown(void)
{
    cluster_close(&cluster, 1);
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
    tl_cq_destroy(sent);
    fake_transport_fini(&transport);
}

static void send_tensor(uint64_t step)
{
    struct tl_tensor *tensor = cluster_tensor(LARGE, (unsigned)step);
    cluster_send(sender, "w", step, tensor, sent);
    tl_tensor_put(tensor);
}

static struct tl_tensor *expect_one(void)
{
    struct tl_completion got = cluster_next(cq);
    ck_assert_msg(got.status.code == TL_OK, "%s", got.status.message);
    ck_assert_int_eq(got.path, TL_PATH_ZERO_COPY);
    ck_assert(cluster_tensor_is(got.tensor, LARGE, (unsigned)got.step));
    return got.tensor;
}

/* Eight receives share a pool with space for four results: the others wait until results are released. */
START_TEST(receives_wait_until_results_are_released)
{
    enum { COUNT = 8 };
    open_both(_i);
    for (uint64_t step = 0; step < COUNT; step++) {
        send_tensor(step);
        cluster_recv(receiver, 0, "w", step, cq);
    }
    for (uint64_t step = 0; step < COUNT; step++)
        tl_tensor_put(expect_one());
    for (unsigned i = 0; i < COUNT; i++)
        cluster_expect(sent, TL_OK);
    teardown();
}
END_TEST

/* Receives the value of step FULL, which the pool cannot hold. Returns whether the reason is that. */
static bool waits_for_the_pool(int64_t timeout_ns)
{
    struct tl_completion got;
    enum tl_status status =
        tl_recv_wait(receiver, cluster_peer(receiver, 0), "w", FULL, NULL, timeout_ns, &got, &error);
    ck_assert_int_eq(status, TL_DEADLINE_EXCEEDED);
    return strstr(error.message, "it waited for 1048576 bytes of the pool") != NULL;
}

/* A receive that ran out of time says what it waited for, and leaves the value to the next one. On a busy machine a
 * short one may not have come so far. */
START_TEST(a_deadline_tells_of_the_full_pool)
{
    struct tl_tensor *results[FULL];
    open_both(_i);
    for (uint64_t step = 0; step < FULL; step++) {
        send_tensor(step);
        cluster_recv(receiver, 0, "w", step, cq);
        results[step] = expect_one();
        cluster_expect(sent, TL_OK);
    }
    send_tensor(FULL);
    int64_t timeout_ns = CLUSTER_SECOND / 4;
    while (!waits_for_the_pool(timeout_ns)) {
        ck_assert_msg(timeout_ns < 16 * CLUSTER_SECOND, "%s", error.message);
        timeout_ns *= 4;
    }
    ck_assert_ptr_nonnull(strstr(error.message, "verbs.max_pool"));
    tl_tensor_put(results[0]);
    cluster_recv(receiver, 0, "w", FULL, cq);
    tl_tensor_put(expect_one());
    cluster_expect(sent, TL_OK);
    for (unsigned i = 1; i < FULL; i++)
        tl_tensor_put(results[i]);
    teardown();
}
END_TEST

/* A worker that closes does not wait for the pool. */
START_TEST(a_worker_closes_while_its_receives_wait)
{
    struct tl_tensor *results[FULL];
    open_both(_i);
    for (uint64_t step = 0; step < FULL; step++) {
        send_tensor(step);
        cluster_recv(receiver, 0, "w", step, cq);
        results[step] = expect_one();
    }
    send_tensor(FULL);
    cluster_recv(receiver, 0, "w", FULL, cq);
    cluster_close(&cluster, 1);
    struct tl_completion got = cluster_next(cq);
    ck_assert_int_ne(got.status.code, TL_OK);
    for (unsigned i = 0; i < FULL; i++)
        tl_tensor_put(results[i]);
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
    tl_cq_destroy(sent);
    fake_transport_fini(&transport);
}
END_TEST

/* --------------------------------------------------------------------------------------------- keys of regions -- */

static uint64_t transport_counter(const char *name)
{
    struct tl_description description = {0};
    uint64_t value = UINT64_MAX;
    char address[64];
    snprintf(address, sizeof(address), "127.0.0.1:%u", cluster.ports[1]);
    const struct tl_call_options options = {
        .address = address, .connect_timeout_ns = CLUSTER_LONG, .rpc_timeout_ns = CLUSTER_LONG};
    ck_assert_int_eq(tl_client_identify(&options, &description, NULL, &error), TL_OK);
    for (size_t i = 0; i < description.counter_count; i++)
        if (strcmp(description.counters[i].name, name) == 0) value = description.counters[i].value;
    tl_description_fini(&description);
    return value;
}

/* A peer writes only into its own pool. What a user brings is copied, with a reason, and nothing is registered in
 * vain. */
START_TEST(a_destination_of_the_user_under_keys_of_regions)
{
    cluster_init(&cluster, 2, "\"rdma\": \"require\", \"verbs\": {\"keys\": \"region\", \"pool\": \"4MiB\"}");
    fake_transport_init(&transport, &cluster);
    cq = cluster_cq();
    sent = cluster_cq();
    sender = fake_transport_open(&transport, 0, TL_PROGRESS_THREAD);
    receiver = fake_transport_open(&transport, 1, TL_PROGRESS_THREAD);
    send_tensor(0);
    cluster_recv(receiver, 0, "w", 0, cq);
    tl_tensor_put(expect_one());
    struct tl_tensor *destination = cluster_tensor(LARGE, 99);
    struct tl_completion got;
    send_tensor(1);
    const struct tl_recv_options recv_options = {.size_bytes = sizeof(recv_options), .destination = destination};
    enum tl_status status =
        tl_recv_wait(receiver, cluster_peer(receiver, 0), "w", 1, &recv_options, CLUSTER_LONG, &got, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    ck_assert(cluster_tensor_is(destination, LARGE, 1));
    ck_assert_int_eq(got.path, TL_PATH_BOUNCE);
    ck_assert_ptr_nonnull(strstr(got.path_reason, "verbs.keys: region"));
    tl_tensor_put(got.tensor);
    tl_tensor_put(destination);
    ck_assert_uint_eq(transport_counter("data_registrations"), 0);
    /* The worker's, and those of the peer: what an idle one has, and a whole piece. */
    ck_assert_uint_eq(transport_counter("data_pool_bytes"), (4 + 1 + 4) << 20);
    teardown();
}
END_TEST

/* The pool of a peer takes for ever to make. Meanwhile tensors travel over gRPC; the worker gives the connection up,
 * and in the end frees what was made for it. */
START_TEST(a_pool_of_a_peer_that_takes_too_long)
{
    cluster_init(&cluster, 2, "\"verbs\": {\"keys\": \"region\", \"pool\": \"4MiB\"}");
    fake_transport_init(&transport, &cluster);
    transport.attempt_ns = CLUSTER_SECOND / 20;
    cq = cluster_cq();
    sent = cluster_cq();
    sender = fake_transport_open(&transport, 0, TL_PROGRESS_THREAD);
    receiver = fake_transport_open(&transport, 1, _i);
    fake_fabric_hold_regions(transport.fabric, true);
    for (uint64_t step = 0; step < 3; step++) {
        send_tensor(step);
        struct tl_tensor *tensor = cluster_recv_wait(receiver, 0, "w", step);
        ck_assert(cluster_tensor_is(tensor, LARGE, (unsigned)step));
        tl_tensor_put(tensor);
    }
    fake_fabric_hold_regions(transport.fabric, false);
    teardown();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("dataplane_memory");
    TCase *tcase = tcase_create("dataplane_memory");
    tcase_set_timeout(tcase, 100);
    tcase_add_loop_test(tcase, receives_wait_until_results_are_released, 0, 2);
    tcase_add_loop_test(tcase, a_deadline_tells_of_the_full_pool, 0, 2);
    tcase_add_loop_test(tcase, a_worker_closes_while_its_receives_wait, 0, 2);
    tcase_add_test(tcase, a_destination_of_the_user_under_keys_of_regions);
    tcase_add_loop_test(tcase, a_pool_of_a_peer_that_takes_too_long, 0, 2);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
