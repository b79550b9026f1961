// SPDX-License-Identifier: Apache-2.0
/* Published tensors: versions, many receivers, replacement and withdrawal while they are on their way. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "fakes/cluster.h"
#include "fakes/pattern.h"
#include "fakes/proxy.h"
#include "fakes/raw_call.h"
#include "fakes/run_suite.h"
#include "tensorlane/v1/transfer.pb-c.h"

/* Twice as much as the sockets on the way can hold. */
#define BIG_BYTES (UINT64_C(32) << 20)

static struct cluster cluster;
static struct proxy proxy;
static struct tl_cq *cq;
static struct tl_error error;

/* Worker 1 reaches worker 0 through the proxy. */
static void setup(void)
{
    cluster_init(&cluster, 2, NULL);
    cluster_use_proxy(&cluster, 0, &proxy);
    cluster_open_all(&cluster);
    cq = cluster_cq();
}

static void teardown(void)
{
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
    proxy_stop(&proxy);
}

/* Publishes a pattern from memory whose releases are counted. */
static void publish(const char *key, uint64_t step, uint64_t size_bytes, unsigned seed)
{
    struct tl_tensor *tensor = cluster_tensor(size_bytes, seed);
    cluster_publish(cluster.workers[0], key, step, tensor);
    tl_tensor_put(tensor);
}

static void expect_recv(uint64_t step, uint64_t version, uint64_t size_bytes, unsigned seed)
{
    struct tl_completion completion;
    enum tl_status status = tl_recv_wait(cluster.workers[1], cluster_peer(cluster.workers[1], 0), "w", step, NULL,
                                         CLUSTER_LONG, &completion, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    ck_assert_uint_eq(completion.step, version);
    ck_assert(cluster_tensor_is(completion.tensor, size_bytes, seed));
    tl_tensor_put(completion.tensor);
}

START_TEST(is_received_again_and_again)
{
    publish("w", 5, 70000, 1);
    struct tl_worker_stats stats = cluster_stats(cluster.workers[0]);
    ck_assert_uint_eq(stats.published_tensors, 1);
    ck_assert_uint_eq(stats.published_bytes, 70000);
    expect_recv(0, 5, 70000, 1);
    expect_recv(5, 5, 70000, 1);
    expect_recv(4, 5, 70000, 1);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[0]).tensors_sent == 3);
    ck_assert_uint_eq(cluster_stats(cluster.workers[0]).bytes_sent, 210000);
    ck_assert_uint_eq(cluster_stats(cluster.workers[0]).published_tensors, 1);
}
END_TEST

START_TEST(receivers_wait_for_their_version)
{
    publish("w", 5, 1000, 1);
    for (uint64_t step = 6; step < 9; step++)
        cluster_recv(cluster.workers[1], 0, "w", step, cq);
    cluster_recv(cluster.workers[1], 0, "other", 0, cq);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[0]).waiting_receivers == 4);
    publish("w", 7, 2000, 2);
    for (int i = 0; i < 2; i++)
        ck_assert_uint_eq(cluster_expect(cq, TL_OK).step, 7);
    ck_assert_uint_eq(cluster_stats(cluster.workers[0]).waiting_receivers, 2);
    publish("w", 100, 3000, 3);
    ck_assert_uint_eq(cluster_expect(cq, TL_OK).step, 100);
    expect_recv(0, 100, 3000, 3);
    /* An earlier version may replace a later one. */
    publish("w", 1, 4000, 4);
    expect_recv(0, 1, 4000, 4);
    publish("other", 0, 10, 1);
    cluster_expect(cq, TL_OK);
}
END_TEST

START_TEST(sent_tensor_goes_before_published)
{
    publish("w", 5, 1000, 1);
    struct tl_tensor *tensor = cluster_tensor(2000, 2);
    cluster_send(cluster.workers[0], "w", 5, tensor, cq);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[0]).held_tensors == 1);
    expect_recv(4, 5, 1000, 1);
    expect_recv(5, 5, 2000, 2);
    expect_recv(5, 5, 1000, 1);
    cluster_expect(cq, TL_OK);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(goes_to_many_receivers_at_once)
{
    struct cluster many;
    cluster_init(&many, CLUSTER_MAX, NULL);
    cluster_open_all(&many);
    struct tl_tensor *tensor = cluster_tensor(3000000, 7);
    for (unsigned i = 1; i < CLUSTER_MAX; i++)
        for (int twice = 0; twice < 2; twice++)
            cluster_recv(many.workers[i], 0, "w", 1, cq);
    cluster_publish(many.workers[0], "w", 1, tensor);
    for (unsigned i = 0; i < 2 * (CLUSTER_MAX - 1); i++) {
        struct tl_completion completion = cluster_next(cq);
        ck_assert_int_eq(completion.status.code, TL_OK);
        ck_assert(cluster_tensor_is(completion.tensor, 3000000, 7));
        tl_tensor_put(completion.tensor);
    }
    tl_tensor_put(tensor);
    ck_assert_uint_eq(cluster_stats(many.workers[0]).bytes_copied_send, 0);
    cluster_close_all(&many);
}
END_TEST

/* ---------------------------------------------------------------------------------------- while they are moved -- */

/* Starts a receive of the big tensor and holds it in the middle. */
static void hold_in_the_middle(void)
{
    proxy_limit(&proxy, PROXY_DOWN, BIG_BYTES / 2);
    cluster_recv(cluster.workers[1], 0, "w", 0, cq);
    proxy_wait_limit(&proxy, PROXY_DOWN);
}

static void expect_old_bytes(uint64_t version, unsigned seed)
{
    proxy_limit(&proxy, PROXY_DOWN, UINT64_MAX);
    struct tl_completion completion = cluster_next(cq);
    ck_assert_int_eq(completion.status.code, TL_OK);
    ck_assert_uint_eq(completion.step, version);
    ck_assert(cluster_tensor_is(completion.tensor, BIG_BYTES, seed));
    tl_tensor_put(completion.tensor);
}

START_TEST(replaced_tensor_finishes_with_its_old_bytes)
{
    unsigned released = 0;
    void *bytes = malloc(BIG_BYTES);
    pattern_fill(bytes, BIG_BYTES, 1);
    struct tl_tensor *tensor = cluster_wrap(bytes, BIG_BYTES, &released);
    cluster_publish(cluster.workers[0], "w", 1, tensor);
    tl_tensor_put(tensor);
    hold_in_the_middle();
    publish("w", 2, BIG_BYTES, 2);
    ck_assert_uint_eq(__atomic_load_n(&released, __ATOMIC_ACQUIRE), 0);
    expect_old_bytes(1, 1);
    CLUSTER_UNTIL(__atomic_load_n(&released, __ATOMIC_ACQUIRE) == 1);
    free(bytes);
    expect_recv(0, 2, BIG_BYTES, 2);
}
END_TEST

START_TEST(withdrawn_tensor_finishes_too)
{
    publish("w", 1, BIG_BYTES, 1);
    hold_in_the_middle();
    ck_assert_int_eq(tl_withdraw(cluster.workers[0], "w", &error), TL_OK);
    ck_assert_uint_eq(cluster_stats(cluster.workers[0]).published_tensors, 0);
    cluster_recv(cluster.workers[1], 0, "w", 0, cq);
    expect_old_bytes(1, 1);
    publish("w", 3, 10, 3);
    ck_assert_uint_eq(cluster_expect(cq, TL_OK).step, 3);
}
END_TEST

START_TEST(broken_transfer_of_a_replaced_tensor_starts_over_with_the_new)
{
    publish("w", 1, BIG_BYTES, 1);
    hold_in_the_middle();
    publish("w", 2, BIG_BYTES, 2);
    proxy_cut(&proxy);
    expect_old_bytes(2, 2);
    ck_assert_uint_ge(cluster_stats(cluster.workers[1]).requests_retried, 1);
}
END_TEST

START_TEST(broken_transfer_of_a_replaced_tensor_may_change_its_shape)
{
    publish("w", 1, BIG_BYTES, 1);
    hold_in_the_middle();
    publish("w", 2, 100, 2);
    proxy_cut(&proxy);
    proxy_limit(&proxy, PROXY_DOWN, UINT64_MAX);
    struct tl_completion completion = cluster_next(cq);
    ck_assert(cluster_tensor_is(completion.tensor, 100, 2));
    tl_tensor_put(completion.tensor);
}
END_TEST

/* -------------------------------------------------------------------------------------------------- withdrawal -- */

START_TEST(withdraw_refuses_what_is_not_there)
{
    publish("weights/layer1", 1, 10, 1);
    ck_assert_int_eq(tl_withdraw(cluster.workers[0], "weights/layer2", &error), TL_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(error.message, "weights/layer1"));
    ck_assert_int_eq(tl_withdraw(cluster.workers[0], "weights/layer1", &error), TL_OK);
    ck_assert_int_eq(tl_withdraw(cluster.workers[0], "weights/layer1", &error), TL_NOT_FOUND);
    ck_assert_int_eq(tl_withdraw(cluster.workers[0], "weights/layer1", NULL), TL_NOT_FOUND);
}
END_TEST

START_TEST(a_worker_receives_what_it_publishes_itself)
{
    publish("w", 3, 5000, 4);
    struct tl_tensor *tensor = cluster_recv_wait(cluster.workers[0], 0, "w", 1);
    publish("w", 4, 10, 5);
    ck_assert(cluster_tensor_is(tensor, 5000, 4));
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(annotations_are_listed)
{
    const struct tl_annotation items[] = {{"format", "pt"}, {"epoch", "7"}};
    struct tl_annotations *annotations;
    ck_assert_int_eq(tl_annotations_create(items, 2, &annotations, &error), TL_OK);
    for (unsigned i = 0; i < 2; i++) {
        struct tl_tensor *tensor = cluster_tensor(100, i);
        tl_tensor_set_annotations(tensor, annotations);
        cluster_publish(cluster.workers[0], i == 0 ? "weights" : "biases", 1, tensor);
        tl_tensor_put(tensor);
    }
    tl_annotations_put(annotations);
    char address[64];
    struct raw_call call;
    snprintf(address, sizeof(address), "127.0.0.1:%u", tl_worker_port(cluster.workers[0]));
    raw_call_open(&call, address, "/tensorlane.v1.Transfer/List", 20 * TL_NS_PER_SEC);
    Tensorlane__V1__ListRequest request = TENSORLANE__V1__LIST_REQUEST__INIT;
    raw_call_send_message(&call, &request.base);
    raw_call_half_close(&call);
    Tensorlane__V1__ListResponse *response =
        raw_call_receive_message(&call, &tensorlane__v1__list_response__descriptor);
    ck_assert_ptr_nonnull(response);
    ck_assert_uint_eq(response->n_entries, 2);
    ck_assert_uint_eq(response->n_annotations, 1); /* the tensors share them */
    ck_assert_uint_eq(response->entries[0]->annotations, 1);
    ck_assert_uint_eq(response->entries[1]->annotations, 1);
    ck_assert_uint_eq(response->annotations[0]->n_items, 2);
    ck_assert_str_eq(response->annotations[0]->items[0]->key, "epoch");
    ck_assert_str_eq(response->annotations[0]->items[1]->value, "pt");
    tensorlane__v1__list_response__free_unpacked(response, NULL);
    raw_call_close(&call);
}
END_TEST

/* A tensor that a client pushed counts as held until its last reference is gone, which may be after the worker. */
START_TEST(pushed_tensor_outlives_the_worker)
{
    char address[32];
    snprintf(address, sizeof(address), "127.0.0.1:%u", cluster.ports[0]);
    struct raw_call call;
    raw_call_open(&call, address, "/tensorlane.v1.Transfer/Publish", 20 * TL_NS_PER_SEC);
    Tensorlane__V1__PublishRequest request = TENSORLANE__V1__PUBLISH_REQUEST__INIT;
    Tensorlane__V1__MetaData meta_data = TENSORLANE__V1__META_DATA__INIT;
    uint64_t dims[1] = {1000};
    unsigned char bytes[1000];
    pattern_fill(bytes, sizeof(bytes), 6);
    meta_data.dtype = TENSORLANE__V1__DTYPE__U8;
    meta_data.n_dims = 1;
    meta_data.dims = dims;
    meta_data.size_bytes = sizeof(bytes);
    request.key = "pushed";
    request.meta_data = &meta_data;
    request.data.data = bytes;
    request.data.len = sizeof(bytes);
    raw_call_send_message(&call, &request.base);
    raw_call_half_close(&call);
    const struct tl_error *status = raw_call_finish(&call);
    ck_assert_msg(status->code == TL_OK, "%s", status->message);
    raw_call_close(&call);
    struct tl_tensor *tensor = cluster_recv_wait(cluster.workers[0], 0, "pushed", 0);
    cluster_close(&cluster, 0);
    ck_assert(cluster_tensor_is(tensor, 1000, 6));
    tl_tensor_put(tensor);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("worker_publish");
    TCase *pair = tcase_create("pair");
    tcase_add_checked_fixture(pair, setup, teardown);
    tcase_add_test(pair, is_received_again_and_again);
    tcase_add_test(pair, receivers_wait_for_their_version);
    tcase_add_test(pair, sent_tensor_goes_before_published);
    tcase_add_test(pair, goes_to_many_receivers_at_once);
    tcase_add_test(pair, replaced_tensor_finishes_with_its_old_bytes);
    tcase_add_test(pair, withdrawn_tensor_finishes_too);
    tcase_add_test(pair, broken_transfer_of_a_replaced_tensor_starts_over_with_the_new);
    tcase_add_test(pair, broken_transfer_of_a_replaced_tensor_may_change_its_shape);
    tcase_add_test(pair, withdraw_refuses_what_is_not_there);
    tcase_add_test(pair, a_worker_receives_what_it_publishes_itself);
    tcase_add_test(pair, annotations_are_listed);
    tcase_add_test(pair, pushed_tensor_outlives_the_worker);
    suite_add_tcase(suite, pair);
    return run_suite_in_process(suite);
}
