// SPDX-License-Identifier: Apache-2.0
/* A link that has no memory for an answer: the receive fails, and the value that was sent stays for the next one. */
#include <check.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "control/link_serves.h"
#include "fakes/cluster.h"
#include "fakes/run_suite.h"

static atomic_bool is_out_of_memory; /* for what an answer is sent from, once */

void *__real_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size);

void *__wrap_calloc(size_t count, size_t size)
{
    bool must_fail = count * size == sizeof(struct link_sending) && atomic_exchange(&is_out_of_memory, false);
    return must_fail ? NULL : __real_calloc(count, size);
}

START_TEST(a_value_that_could_not_be_answered_stays)
{
    struct cluster cluster;
    struct tl_completion completion;
    struct tl_error error;
    cluster_init(&cluster, 2, NULL);
    cluster.protocol = "grpc";
    cluster_open_all(&cluster);
    struct tl_worker *owner = cluster.workers[0], *receiver = cluster.workers[1];
    struct tl_cq *cq = cluster_cq();
    struct tl_tensor *tensor = cluster_tensor(1000, 1);
    atomic_store(&is_out_of_memory, true);
    cluster_send(owner, "k", 1, tensor, cq);
    tl_tensor_put(tensor);
    ck_assert_int_eq(tl_recv_wait(receiver, cluster_peer(receiver, 0), "k", 1, NULL, CLUSTER_LONG, &completion, &error),
                     TL_RESOURCE_EXHAUSTED);
    ck_assert(!atomic_load(&is_out_of_memory));
    ck_assert(cluster_is_quiet(cq));
    struct tl_tensor *received = cluster_recv_wait(receiver, 0, "k", 1);
    ck_assert(cluster_tensor_is(received, 1000, 1));
    tl_tensor_put(received);
    cluster_expect(cq, TL_OK);
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("link_memory");
    TCase *tcase = tcase_create("memory");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, a_value_that_could_not_be_answered_stays);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
