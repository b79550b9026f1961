// SPDX-License-Identifier: Apache-2.0
/* The setting "device": tensors that clients push go to a device without keeping the worker from anything, and whatever
 * fails on the way is the answer of the push. */
#include <check.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "control/client.h"
#include "fakes/cluster.h"
#include "fakes/device_case.h"
#include "fakes/run_suite.h"
#include "tensor/annotations.h"
#include "tensor/device.h"

#define BLOCK TL_STAGING_BLOCK_BYTES
#define CHUNK_BYTES ((uint64_t)256 * 1024)

static struct cluster cluster;
static struct tl_cq *cq;

static void open_with(const char *settings)
{
    setup_cuda();
    cluster_init(&cluster, 1, settings);
    cluster_open_all(&cluster);
    cq = cluster_cq();
}

static void setup(void)
{
    open_with("\"device\": \"gpu:1\"");
}

/* A client may use three quarters of limits.held. */
static void setup_little_held(void)
{
    open_with("\"device\": \"gpu:1\", \"limits\": {\"held\": \"4MiB\"}");
}

static void teardown(void)
{
    cuda->hold(NULL, false);
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
}

static struct fake_cuda_counts counts(void)
{
    struct fake_cuda_counts counts;
    cuda->get_counts(&counts);
    return counts;
}

static unsigned allocation_count(void)
{
    return counts().device_allocations;
}

/* Whether a copy is under way: it has pinned blocks, of which there are some since the first one. */
static bool is_copying(void)
{
    void *blocks[TL_STAGING_BLOCKS];
    unsigned count = 0;
    while (count < TL_STAGING_BLOCKS && (blocks[count] = tl_device_staging_try(gpu1)) != NULL)
        count++;
    for (unsigned i = 0; i < count; i++)
        tl_device_staging_put(gpu1, blocks[i], false);
    return count < TL_STAGING_BLOCKS;
}

/* ----------------------------------------------------------------------------------------------------- pushing -- */

struct push {
    pthread_t thread;
    const char *key;
    uint64_t step;
    struct tl_tensor *tensor; /* put at the end */
    int64_t timeout_ns;
    enum tl_status status;
    struct tl_error error;
    atomic_bool is_over;
};

static void *run_push(void *context)
{
    struct push *push = context;
    char address[64];
    snprintf(address, sizeof(address), "127.0.0.1:%u", cluster.ports[0]);
    const struct tl_call_options call = {
        .address = address, .connect_timeout_ns = CLUSTER_LONG, .rpc_timeout_ns = push->timeout_ns};
    push->status = tl_client_publish(&call, push->key, push->step, false, push->tensor, CHUNK_BYTES, NULL, NULL, NULL,
                                     &push->error);
    tl_tensor_put(push->tensor);
    push->is_over = true;
    return NULL;
}

static void push_start(struct push *push, const char *key, uint64_t step, struct tl_tensor *tensor, int64_t timeout_ns)
{
    *push = (struct push){.key = key, .step = step, .tensor = tensor, .timeout_ns = timeout_ns};
    ck_assert_int_eq(pthread_create(&push->thread, NULL, run_push, push), 0);
}

static void push_end(struct push *push, enum tl_status status)
{
    ck_assert_int_eq(pthread_join(push->thread, NULL), 0);
    ck_assert_msg(push->status == status, "%d: %s", (int)push->status, push->error.message);
}

static void push(const char *key, uint64_t step, struct tl_tensor *tensor, enum tl_status status, const char *text)
{
    struct push push;
    push_start(&push, key, step, tensor, CLUSTER_LONG);
    push_end(&push, status);
    if (text != NULL) ck_assert_msg(strstr(push.error.message, text) != NULL, "%s", push.error.message);
}

/* What the worker has under this key, which must lie on the device: it then comes by reference, and is read-only. */
static struct tl_tensor *kept(const char *key)
{
    tl_op_id op;
    struct tl_error error;
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .device = gpu1};
    tl_peer_id self = cluster_peer(cluster.workers[0], 0);
    enum tl_status status = tl_recv(cluster.workers[0], self, key, 0, &options, CLUSTER_LONG, cq, NULL, &op, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    struct tl_completion completion = cluster_next(cq);
    ck_assert_msg(completion.status.code == TL_OK, "%s", completion.status.message);
    ck_assert_int_eq(tl_tensor_device(completion.tensor).kind, TL_DEVICE_CUDA);
    ck_assert_int_eq(tl_tensor_device(completion.tensor).index, 1);
    ck_assert(tl_tensor_is_read_only(completion.tensor));
    return completion.tensor;
}

static void expect_kept(const char *key, uint64_t size_bytes, unsigned seed)
{
    struct tl_tensor *tensor = kept(key), *expected = cluster_tensor(size_bytes, seed);
    ck_assert_uint_eq(tl_tensor_size_bytes(tensor), size_bytes);
    ck_assert(size_bytes == 0 || memcmp(look(tensor), tl_tensor_data(expected), size_bytes) == 0);
    tl_tensor_put(expected);
    tl_tensor_put(tensor);
}

static uint64_t published_count(void)
{
    return cluster_stats(cluster.workers[0]).published_tensors;
}

START_TEST(pushed_tensors_lie_on_the_device)
{
    static const uint64_t sizes[] = {0, 1, 4096, BLOCK, 3 * BLOCK + 5};
    char key[16];
    for (unsigned i = 0; i < TL_ARRAY_COUNT(sizes); i++) {
        snprintf(key, sizeof(key), "key %u", i);
        push(key, 1, cluster_tensor(sizes[i], i), TL_OK, NULL);
        expect_kept(key, sizes[i], i);
    }
    push("key 1", 2, cluster_tensor(77, 9), TL_OK, NULL); /* in place of the first */
    expect_kept("key 1", 77, 9);
    push("key 1", 1, cluster_tensor(77, 8), TL_FAILED_PRECONDITION, "is published with step 2");
    expect_kept("key 1", 77, 9);
}
END_TEST

START_TEST(strings_stay_on_the_host)
{
    const uint64_t count = 2;
    const struct tl_string strings[] = {{"a", 1}, {"bc", 2}};
    struct tl_tensor *tensor;
    ck_assert_int_eq(tl_tensor_create_strings(1, &count, strings, &tensor, NULL), TL_OK);
    push("words", 0, tensor, TL_OK, NULL);
    ck_assert_uint_eq(counts().copies, 0);
    tl_tensor_put(cluster_recv_wait(cluster.workers[0], 0, "words", 0));
}
END_TEST

START_TEST(annotations_stay)
{
    const struct tl_annotation annotation = {"format", "pt"};
    struct tl_annotations *annotations;
    ck_assert_int_eq(tl_annotations_create(&annotation, 1, &annotations, NULL), TL_OK);
    struct tl_tensor *tensor = cluster_tensor(10, 1);
    tl_tensor_set_annotations(tensor, annotations);
    tl_annotations_put(annotations);
    push("key", 0, tensor, TL_OK, NULL);
    tensor = kept("key");
    ck_assert_ptr_nonnull(tl_tensor_annotations(tensor));
    tl_tensor_put(tensor);
}
END_TEST

/* The loop serves others while the device copies. */
START_TEST(nothing_waits_for_the_copy)
{
    struct push first;
    cuda->hold(NULL, true);
    push_start(&first, "key", 0, cluster_tensor(3 * BLOCK, 1), CLUSTER_LONG);
    for (unsigned i = 0; i < 20; i++) {
        struct tl_tensor *tensor = cluster_tensor(1000, i);
        cluster_send(cluster.workers[0], "other", i, tensor, cq);
        tl_tensor_put(cluster_recv_wait(cluster.workers[0], 0, "other", i));
        cluster_expect(cq, TL_OK);
        tl_tensor_put(tensor);
    }
    ck_assert(!first.is_over);
    ck_assert_uint_eq(published_count(), 0);
    cuda->hold(NULL, false);
    push_end(&first, TL_OK);
    expect_kept("key", 3 * BLOCK, 1);
}
END_TEST

/* A client that gives up while the device copies is charged until the copy is over. */
START_TEST(given_up_while_it_is_copied)
{
    struct push first;
    push("key", 0, cluster_tensor(10, 1), TL_OK, NULL); /* what there is once only is made */
    unsigned allocations = allocation_count();
    cuda->hold(NULL, true);
    push_start(&first, "key", 1, cluster_tensor(BLOCK, 1), 5 * CLUSTER_SECOND);
    CLUSTER_UNTIL(is_copying());
    push_end(&first, TL_DEADLINE_EXCEEDED);
    push("next", 0, cluster_tensor(BLOCK, 2), TL_RESOURCE_EXHAUSTED, "cannot take next");
    cuda->hold(NULL, false);
    await_frees(allocations);
    for (bool is_taken = false; !is_taken; cluster_pause()) {
        struct push next;
        push_start(&next, "next", 0, cluster_tensor(BLOCK, 2), CLUSTER_LONG);
        ck_assert_int_eq(pthread_join(next.thread, NULL), 0);
        is_taken = next.status == TL_OK;
        if (!is_taken) ck_assert_int_eq(next.status, TL_RESOURCE_EXHAUSTED);
    }
    expect_kept("next", BLOCK, 2);
    expect_kept("key", 10, 1);
    ck_assert_uint_eq(published_count(), 2);
}
END_TEST

static void *let_go(void *context)
{
    atomic_bool *is_let_go = context;
    for (unsigned i = 0; i < 200; i++)
        cluster_pause();
    *is_let_go = true;
    cuda->hold(NULL, false);
    return NULL;
}

/* The worker is closed while the device copies: it waits for the copy, and for nothing else. */
START_TEST(closed_while_it_is_copied)
{
    struct push first;
    pthread_t thread;
    atomic_bool is_let_go = false;
    push("key", 0, cluster_tensor(BLOCK, 1), TL_OK, NULL); /* what there is once only is made */
    cuda->hold(NULL, true);
    push_start(&first, "key", 0, cluster_tensor(3 * BLOCK, 1), CLUSTER_LONG);
    CLUSTER_UNTIL(is_copying());
    ck_assert_int_eq(pthread_create(&thread, NULL, let_go, &is_let_go), 0);
    tl_worker_close(cluster.workers[0], 0);
    cluster.workers[0] = NULL;
    ck_assert(is_let_go);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    ck_assert_int_eq(pthread_join(first.thread, NULL), 0);
    await_frees(0);
}
END_TEST

/* A device without memory for the tensor: the push is refused, and what was there stays. */
START_TEST(the_device_is_full)
{
    push("key", 0, cluster_tensor(1000, 1), TL_OK, NULL);
    cuda->set_capacity(BLOCK);
    for (unsigned i = 0; i < 3; i++) { /* what is refused is not charged any more */
        push("key", 1, cluster_tensor(BLOCK + BLOCK / 4, 2), TL_RESOURCE_EXHAUSTED, "key cannot be kept on gpu:1: ");
        expect_kept("key", 1000, 1);
    }
    cuda->set_capacity((size_t)1 << 29);
    push("key", 1, cluster_tensor(BLOCK + BLOCK / 4, 2), TL_OK, NULL);
    expect_kept("key", BLOCK + BLOCK / 4, 2);
}
END_TEST

START_TEST(the_device_is_lost)
{
    push("key", 0, cluster_tensor(1000, 1), TL_OK, NULL);
    cuda->break_device(1, 700);
    push("key", 1, cluster_tensor(1000, 2), TL_FAILED_PRECONDITION, "gpu:1 is lost");
    ck_assert_uint_eq(published_count(), 1);
}
END_TEST

/* Returns whether the call that failed was one that frees: then the memory stays. */
static bool has_failed_to_free(void)
{
    const char *name = cuda->failed_call();
    return name != NULL && strcmp(name, "cudaFree") == 0;
}

/* Whichever call of CUDA fails, the push is answered, and nothing is lost. */
START_TEST(any_call_fails)
{
    push("key", 0, cluster_tensor(10, 1), TL_OK, NULL); /* what there is once only is made */
    unsigned left = allocation_count() + 1, failures = 0;
    for (unsigned number = 1; number < 40; number++) {
        struct push push;
        cuda->fail_call(number, 2, false);
        push_start(&push, "other", number, cluster_tensor(3 * BLOCK, number), CLUSTER_LONG);
        ck_assert_int_eq(pthread_join(push.thread, NULL), 0);
        bool has_text = strstr(push.error.message, "other cannot be kept on gpu:1: ") != NULL;
        ck_assert_msg(push.status == TL_OK || has_text, "%s", push.error.message);
        failures += push.status != TL_OK;
        CLUSTER_UNTIL(allocation_count() <= left || has_failed_to_free());
        left += has_failed_to_free();
        cuda->fail_call(0, 0, false);
        if (push.status == TL_OK) expect_kept("other", 3 * BLOCK, number);
    }
    ck_assert_uint_gt(failures, 2);
    await_frees(left);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("worker_device_setting");
    TCase *pushed = tcase_create("pushed");
    tcase_add_checked_fixture(pushed, setup, teardown);
    tcase_add_test(pushed, pushed_tensors_lie_on_the_device);
    tcase_add_test(pushed, strings_stay_on_the_host);
    tcase_add_test(pushed, annotations_stay);
    tcase_add_test(pushed, nothing_waits_for_the_copy);
    tcase_add_test(pushed, closed_while_it_is_copied);
    tcase_add_test(pushed, the_device_is_lost);
    tcase_add_test(pushed, any_call_fails);
    suite_add_tcase(suite, pushed);
    TCase *little = tcase_create("little_held");
    tcase_add_checked_fixture(little, setup_little_held, teardown);
    tcase_add_test(little, given_up_while_it_is_copied);
    tcase_add_test(little, the_device_is_full);
    suite_add_tcase(suite, little);
    return run_suite(suite);
}
