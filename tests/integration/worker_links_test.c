// SPDX-License-Identifier: Apache-2.0
/* Links between workers when the other side, or the way to it, does not behave: what one loses the other does not miss,
 * and who does not read, asks too much or claims to be somebody else harms nobody. */
#include <check.h>
#include <stdio.h>
#include <unistd.h>

#include "base/clock.h"
#include "control/internal.h"
#include "fakes/cluster.h"
#include "fakes/proxy.h"
#include "fakes/raw_call.h"
#include "fakes/run_suite.h"
#include "tensorlane/v1/transfer.pb-c.h"

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

/* The opener of the link, which has the smaller name, believes in it; the other side has lost it and opens another one.
 * Without a look at its age the opener would keep the dead one until keep-alive, far away here, ends it. */
START_TEST(link_that_only_the_other_side_has_lost_is_replaced)
{
    open_behind_proxy(1, "\"timeouts\": {\"connect\": \"200ms\", \"keepalive\": \"1h\"}");
    connect_from(0, 1);
    struct tl_tensor *tensor = cluster_tensor(100, 1);
    cluster_publish(cluster.workers[0], "k", 1, tensor);
    tl_tensor_put(tensor);
    usleep(250000);
    proxy_cut_far(&proxy);
    CLUSTER_UNTIL(cluster_peer_info(cluster.workers[1], 0).state != TL_PEER_UP);
    tl_tensor_put(cluster_recv_wait(cluster.workers[1], 0, "k", 1));
    ck_assert_int_eq(cluster_peer_info(cluster.workers[0], 1).state, TL_PEER_UP);
    close_all();
}
END_TEST

/* ------------------------------------------------------------------------------------------------------ impostors --
 */

/* Each link of the one ends that of the other, and both want theirs back. */
START_TEST(task_that_runs_twice_does_not_keep_its_peers_busy)
{
    static struct cluster second;
    cluster_init(&cluster, 2, "\"connect\": \"eager\"");
    second = cluster;
    snprintf(second.task_settings[0], sizeof(second.task_settings[0]), "\"listen\": \"127.0.0.1:%u\"",
             cluster_free_port());
    cluster_open_all(&cluster);
    connect_from(0, 1);
    cluster_open(&second, 0);
    CLUSTER_UNTIL(cluster_peer_info(cluster.workers[1], 0).restart_count > 0);
    /* Without pauses there are a thousand. A slow machine sees fewer. */
    sleep(1);
    ck_assert_uint_lt(cluster_peer_info(cluster.workers[1], 0).restart_count, 100);
    cluster_close(&second, 0);
    cluster_close_all(&cluster);
}
END_TEST

/* Even with the right incarnation, which every client may ask for. */
START_TEST(nobody_else_is_the_worker_itself)
{
    cluster_init(&cluster, 1, NULL);
    struct tl_worker *worker = cluster_open(&cluster, 0);
    char address[32];
    snprintf(address, sizeof(address), "127.0.0.1:%u", cluster.ports[0]);
    struct raw_call call;
    raw_call_open(&call, address, "/tensorlane.v1.Transfer/Exchange", TL_TIME_NEVER);
    Tensorlane__V1__Hello hello = TENSORLANE__V1__HELLO__INIT;
    hello.protocol_version = TL_PROTOCOL_VERSION;
    hello.name = (char *)tl_worker_name(worker);
    hello.incarnation = tl_worker_incarnation(worker);
    Tensorlane__V1__Frame frame = TENSORLANE__V1__FRAME__INIT;
    frame.hello = &hello;
    raw_call_send_message(&call, &frame.base);
    ck_assert_int_eq(raw_call_finish(&call)->code, TL_FAILED_PRECONDITION);
    raw_call_close(&call);
    ck_assert_int_eq(tl_worker_wait_for_peers(worker, NULL, 0, 0, CLUSTER_LONG, NULL), TL_OK);
    cluster_close_all(&cluster);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("worker_links");
    TCase *breaks = tcase_create("one_sided_breaks");
    tcase_set_timeout(breaks, 60);
    tcase_add_test(breaks, acknowledgements_into_a_dead_connection_are_repeated);
    tcase_add_test(breaks, link_that_only_the_other_side_has_lost_is_replaced);
    suite_add_tcase(suite, breaks);
    TCase *impostors = tcase_create("impostors");
    tcase_add_test(impostors, task_that_runs_twice_does_not_keep_its_peers_busy);
    tcase_add_test(impostors, nobody_else_is_the_worker_itself);
    suite_add_tcase(suite, impostors);
    return run_suite_in_process(suite);
}
