// SPDX-License-Identifier: Apache-2.0
/* Links between workers when the other side, or the way to it, does not behave: what one loses the other does not miss,
 * and who does not read, asks too much or claims to be somebody else harms nobody. */
#include <check.h>
#include <stdio.h>

#include "fakes/cluster.h"
#include "fakes/proxy.h"

static struct cluster cluster;
static struct proxy proxy;
static struct tl_cq *send_cq;
static struct tl_cq *recv_cq;

/* Worker `behind` is reached through the proxy. */
static void open_behind_proxy(unsigned behind, const char *settings)
{
    cluster_init(&cluster, 2, settings);
    cluster_use_proxy(&cluster, behind, &proxy);
    cluster_open_all(&cluster);
    send_cq = cluster_cq();
    recv_cq = cluster_cq();
}

static void close_all(void)
{
    cluster_close_all(&cluster);
    tl_cq_destroy(send_cq);
    tl_cq_destroy(recv_cq);
    proxy_stop(&proxy);
}

static void connect_from(unsigned from, unsigned to)
{
    tl_peer_id peer = cluster_peer(cluster.workers[from], to);
    ck_assert_int_eq(tl_worker_wait_for_peers(cluster.workers[from], &peer, 1, 1, CLUSTER_LONG, NULL), TL_OK);
    CLUSTER_UNTIL(cluster_peer_info(cluster.workers[to], from).state == TL_PEER_UP);
}

/* ------------------------------------------------------------------------------------------------ one-sided breaks --
 */

/* The accepting side says that it has the tensors, into a connection that is dead without its knowing. When the peer
 * comes back it ends the old call with a status, which is sent, but arrives no more than what was said before. */
START_TEST(acknowledgements_into_a_dead_connection_are_repeated)
{
    open_behind_proxy(0, "\"connect\": \"eager\"");
    connect_from(1, 0);
    for (unsigned i = 0; i < 10; i++)
        cluster_recv(cluster.workers[0], 1, "k", i, recv_cq);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[1]).waiting_receivers == 10);
    proxy_limit(&proxy, PROXY_DOWN, 0);
    struct tl_tensor *tensor = cluster_tensor(100, 1);
    for (unsigned i = 0; i < 10; i++)
        cluster_send(cluster.workers[1], "k", i, tensor, send_cq);
    tl_tensor_put(tensor);
    for (unsigned i = 0; i < 10; i++)
        cluster_expect(recv_cq, TL_OK);
    proxy_cut_near(&proxy);
    proxy_limit(&proxy, PROXY_DOWN, UINT64_MAX);
    for (unsigned i = 0; i < 10; i++)
        cluster_expect(send_cq, TL_OK);
    close_all();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("worker_links");
    TCase *breaks = tcase_create("one_sided_breaks");
    tcase_set_timeout(breaks, 60);
    tcase_add_test(breaks, acknowledgements_into_a_dead_connection_are_repeated);
    suite_add_tcase(suite, breaks);
    SRunner *runner = srunner_create(suite);
    srunner_set_fork_status(runner, CK_NOFORK);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed != 0;
}
