// SPDX-License-Identifier: Apache-2.0
/* Workers that start late, restart, run twice, or have the wrong name. */
#include <arpa/inet.h>
#include <check.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "control/internal.h"
#include "fakes/cluster.h"
#include "fakes/proxy.h"
#include "fakes/run_suite.h"
#include "server/worker_internal.h"

/* Twice as much as the sockets on the way can hold. */
#define BIG_BYTES (UINT64_C(32) << 20)

static struct cluster cluster;
static struct tl_cq *cq;
static struct tl_error error;

static void setup(void)
{
    cluster_init(&cluster, 2, "\"timeouts\": {\"connect\": \"1s\"}");
    cq = cluster_cq();
}

static void teardown(void)
{
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
}

static void publish(unsigned worker, const char *key, uint64_t step, uint64_t size_bytes, unsigned seed)
{
    struct tl_tensor *tensor = cluster_tensor(size_bytes, seed);
    cluster_publish(cluster.workers[worker], key, step, tensor);
    tl_tensor_put(tensor);
}

/* ----------------------------------------------------------------------------------------------------- restart -- */

START_TEST(receiver_may_come_first)
{
    cluster_open(&cluster, 1);
    cluster_recv(cluster.workers[1], 0, "k", 1, cq);
    CLUSTER_UNTIL(cluster_peer_info(cluster.workers[1], 0).state == TL_PEER_DOWN);
    struct tl_peer_info info = cluster_peer_info(cluster.workers[1], 0);
    ck_assert_uint_eq(info.incarnation, 0);
    ck_assert_int_ne(info.reason.code, TL_OK);
    ck_assert_str_ne(info.reason.message, "");
    cluster_open(&cluster, 0);
    publish(0, "k", 1, 1000, 1);
    cluster_expect(cq, TL_OK);
    info = cluster_peer_info(cluster.workers[1], 0);
    ck_assert_int_eq(info.state, TL_PEER_UP);
    ck_assert_int_eq(info.reason.code, TL_OK);
    ck_assert_uint_eq(info.restart_count, 0);
}
END_TEST

START_TEST(restart_is_seen_and_waited_through)
{
    cluster_open_all(&cluster);
    for (unsigned round = 1; round <= 5; round++) {
        char key[8];
        snprintf(key, sizeof(key), "k%u", round);
        tl_peer_id peer = cluster_peer(cluster.workers[1], 0);
        ck_assert_int_eq(tl_worker_wait_for_peers(cluster.workers[1], &peer, 1, 1, CLUSTER_LONG, &error), TL_OK);
        uint64_t before = cluster_peer_info(cluster.workers[1], 0).incarnation;
        ck_assert_uint_eq(before, tl_worker_incarnation(cluster.workers[0]));
        cluster_recv(cluster.workers[1], 0, key, 0, cq);
        CLUSTER_UNTIL(cluster_stats(cluster.workers[0]).waiting_receivers == 1);
        cluster_close(&cluster, 0);
        CLUSTER_UNTIL(cluster_peer_info(cluster.workers[1], 0).state != TL_PEER_UP);
        ck_assert(cluster_is_quiet(cq));
        cluster_open(&cluster, 0);
        publish(0, key, round, 1000, round);
        ck_assert_uint_eq(cluster_expect(cq, TL_OK).step, round);
        struct tl_peer_info info = cluster_peer_info(cluster.workers[1], 0);
        ck_assert_uint_eq(info.incarnation, tl_worker_incarnation(cluster.workers[0]));
        ck_assert_uint_ne(info.incarnation, before);
        ck_assert_uint_eq(info.restart_count, round);
    }
}
END_TEST

START_TEST(restarted_receiver_takes_over_what_was_reserved_for_it)
{
    struct proxy proxy;
    cluster_use_proxy(&cluster, 0, &proxy);
    cluster_open_all(&cluster);
    struct tl_tensor *tensor = cluster_tensor(BIG_BYTES, 1);
    struct tl_cq *recv_cq = cluster_cq();
    cluster_send(cluster.workers[0], "big", 1, tensor, cq);
    tl_tensor_put(tensor);
    proxy_limit(&proxy, PROXY_DOWN, BIG_BYTES / 2);
    cluster_recv(cluster.workers[1], 0, "big", 1, recv_cq);
    proxy_wait_limit(&proxy, PROXY_DOWN);
    /* The worker ends without a goodbye: the default reservation of 30 s would be too long for this test. */
    proxy_cut_near(&proxy);
    tl_worker_close(cluster.workers[1], 0);
    cluster.workers[1] = NULL;
    cluster_expect(recv_cq, TL_CANCELLED);
    proxy_cut(&proxy);
    proxy_limit(&proxy, PROXY_DOWN, UINT64_MAX);
    cluster_open(&cluster, 1);
    tensor = cluster_recv_wait(cluster.workers[1], 0, "big", 1);
    ck_assert(cluster_tensor_is(tensor, BIG_BYTES, 1));
    tl_tensor_put(tensor);
    cluster_expect(cq, TL_OK);
    CLUSTER_UNTIL(cluster_peer_info(cluster.workers[0], 1).restart_count == 1);
    cluster_close_all(&cluster);
    tl_cq_destroy(recv_cq);
    proxy_stop(&proxy);
}
END_TEST

START_TEST(restarted_owner_has_another_value_from_its_first_byte)
{
    struct proxy proxy;
    cluster_use_proxy(&cluster, 0, &proxy);
    cluster_open_all(&cluster);
    publish(0, "big", 1, BIG_BYTES, 1);
    proxy_limit(&proxy, PROXY_DOWN, BIG_BYTES / 2);
    cluster_recv(cluster.workers[1], 0, "big", 1, cq);
    proxy_wait_limit(&proxy, PROXY_DOWN);
    proxy_refuse(&proxy, true);
    proxy_cut(&proxy);
    cluster_close(&cluster, 0);
    cluster_open(&cluster, 0);
    publish(0, "big", 1, BIG_BYTES, 2);
    proxy_limit(&proxy, PROXY_DOWN, UINT64_MAX);
    proxy_refuse(&proxy, false);
    struct tl_completion completion = cluster_next(cq);
    ck_assert_int_eq(completion.status.code, TL_OK);
    ck_assert(cluster_tensor_is(completion.tensor, BIG_BYTES, 2));
    tl_tensor_put(completion.tensor);
    cluster_close_all(&cluster);
    proxy_stop(&proxy);
}
END_TEST

/* -------------------------------------------------------------------------------------------- both at one time -- */

static size_t link_count(const struct tl_worker *worker)
{
    size_t count = 0;
    TL_LIST_FOREACH(&worker->control->links, link)
    {
        count++;
    }
    return count;
}

/* Lets both workers look once for work; returns true. */
static bool driven(void)
{
    for (unsigned i = 0; i < 2; i++)
        (void)!tl_worker_progress(cluster.workers[i], CLUSTER_SECOND / 1000);
    return true;
}

/* Lets both workers run until they have had nothing to do for a while. */
static void settle(void)
{
    for (unsigned quiet = 0; quiet < 20;) {
        bool is_busy = false;
        for (unsigned i = 0; i < 2; i++)
            is_busy |= tl_worker_progress(cluster.workers[i], CLUSTER_SECOND / 1000) == TL_OK;
        quiet = is_busy ? 0 : quiet + 1;
    }
}

START_TEST(workers_that_meet_half_way_keep_one_link)
{
    cluster.progress = TL_PROGRESS_CALLER;
    for (int round = 0; round < 20; round++) {
        struct tl_cq *cqs[2] = {cluster_cq(), cluster_cq()};
        cluster_open_all(&cluster);
        publish(0, "a", 1, 1000, 1);
        publish(1, "b", 1, 1000, 2);
        cluster_recv(cluster.workers[0], 1, "b", 1, cqs[0]);
        cluster_recv(cluster.workers[1], 0, "a", 1, cqs[1]);
        for (unsigned i = 0; i < 2; i++) {
            struct tl_completion completion;
            CLUSTER_UNTIL(driven() && tl_cq_poll(cqs[i], &completion, 1) == 1);
            ck_assert_int_eq(completion.status.code, TL_OK);
            tl_tensor_put(completion.tensor);
        }
        settle();
        CLUSTER_UNTIL(driven() && link_count(cluster.workers[0]) == 1 && link_count(cluster.workers[1]) == 1);
        for (unsigned i = 0; i < 2; i++) {
            ck_assert_uint_eq(cluster_stats(cluster.workers[i]).protocol_errors, 0);
            tl_worker_close(cluster.workers[i], 0);
            cluster.workers[i] = NULL;
            tl_cq_destroy(cqs[i]);
        }
    }
}
END_TEST

START_TEST(workers_that_meet_half_way_many_times)
{
    for (int round = 0; round < 100; round++) {
        cluster_open_all(&cluster);
        publish(0, "a", 1, 100, 1);
        publish(1, "b", 1, 100, 2);
        for (unsigned i = 0; i < 10; i++) {
            cluster_recv(cluster.workers[i % 2], 1 - i % 2, i % 2 == 0 ? "b" : "a", 1, cq);
            struct tl_tensor *tensor = cluster_tensor(100, 3);
            cluster_send(cluster.workers[i % 2], "c", i, tensor, cq);
            tl_tensor_put(tensor);
            cluster_recv(cluster.workers[1 - i % 2], i % 2, "c", i, cq);
        }
        for (unsigned i = 0; i < 30; i++)
            cluster_expect(cq, TL_OK);
        for (unsigned i = 0; i < 2; i++)
            ck_assert_uint_eq(cluster_stats(cluster.workers[i]).protocol_errors, 0);
        cluster_close_all(&cluster);
    }
}
END_TEST

/* ----------------------------------------------------------------------------------------------- wrong process -- */

/* Waits until worker 1 says in these words why it cannot reach worker 0. */
static void expect_reason(const char *text)
{
    tl_peer_id peer = cluster_peer(cluster.workers[1], 0);
    CLUSTER_UNTIL(tl_worker_wait_for_peers(cluster.workers[1], &peer, 1, 1, CLUSTER_SECOND / 10, &error) ==
                      TL_DEADLINE_EXCEEDED &&
                  strstr(error.message, text) != NULL);
}

START_TEST(another_task_at_the_address_is_named)
{
    /* The tasks have each other's addresses. */
    struct cluster other = cluster;
    other.ports[0] = cluster.ports[1];
    other.ports[1] = cluster.ports[0];
    cluster_open(&other, 1);
    cluster_open(&cluster, 1);
    expect_reason("/job:node/task:1");
    cluster_close_all(&other);
    cluster_open(&cluster, 0);
    tl_peer_id peer = cluster_peer(cluster.workers[1], 0);
    ck_assert_int_eq(tl_worker_wait_for_peers(cluster.workers[1], &peer, 1, 1, CLUSTER_LONG, &error), TL_OK);
}
END_TEST

START_TEST(another_job_at_the_address_is_named)
{
    char json[256];
    snprintf(json, sizeof(json), "{\"cluster\": {\"other\": [\"127.0.0.1:%u\"]}}", cluster.ports[0]);
    const struct tl_worker_options options = {.size_bytes = sizeof(options), .config_json = json, .job = "other"};
    struct tl_worker *other;
    ck_assert_int_eq(tl_worker_open(&options, &other, &error), TL_OK);
    cluster_open(&cluster, 1);
    expect_reason("/job:other/task:0");
    struct tl_completion completion;
    ck_assert_int_eq(tl_recv_wait(cluster.workers[1], cluster_peer(cluster.workers[1], 0), "k", 0, NULL,
                                  CLUSTER_SECOND / 10, &completion, &error),
                     TL_DEADLINE_EXCEEDED);
    ck_assert_ptr_nonnull(strstr(error.message, "/job:other/task:0"));
    ck_assert_uint_eq(cluster_stats(cluster.workers[1]).protocol_errors, 0);
    tl_worker_close(other, 0);
}
END_TEST

static int listen_at(unsigned port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int on = 1;
    address.sin_port = htons((uint16_t)port);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    ck_assert_int_eq(listen(fd, 16), 0);
    return fd;
}

START_TEST(something_silent_at_the_address_is_given_up)
{
    int listener = listen_at(cluster.ports[0]);
    cluster_open(&cluster, 1);
    expect_reason("did not answer within the connect time-out");
    close(listener);
    cluster_open(&cluster, 0);
    tl_peer_id peer = cluster_peer(cluster.workers[1], 0);
    ck_assert_int_eq(tl_worker_wait_for_peers(cluster.workers[1], &peer, 1, 1, CLUSTER_LONG, &error), TL_OK);
}
END_TEST

static void *talk_nonsense(void *context)
{
    int listener = *(int *)context;
    static const char text[] = "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n";
    int fd;
    while ((fd = accept(listener, NULL, NULL)) >= 0) {
        (void)!write(fd, text, sizeof(text) - 1);
        close(fd);
    }
    return NULL;
}

START_TEST(something_else_at_the_address_is_no_worker)
{
    int listener = listen_at(cluster.ports[0]);
    pthread_t thread;
    ck_assert_int_eq(pthread_create(&thread, NULL, talk_nonsense, &listener), 0);
    cluster_open(&cluster, 1);
    CLUSTER_UNTIL(tl_worker_wait_for_peers(cluster.workers[1], NULL, 0, 0, CLUSTER_SECOND / 10, &error) ==
                      TL_DEADLINE_EXCEEDED &&
                  cluster_peer_info(cluster.workers[1], 0).reason.code != TL_OK);
    shutdown(listener, SHUT_RDWR);
    pthread_join(thread, NULL);
    close(listener);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("worker_restart");
    TCase *pair = tcase_create("pair");
    tcase_add_checked_fixture(pair, setup, teardown);
    tcase_add_test(pair, receiver_may_come_first);
    tcase_add_test(pair, restart_is_seen_and_waited_through);
    tcase_add_test(pair, restarted_receiver_takes_over_what_was_reserved_for_it);
    tcase_add_test(pair, restarted_owner_has_another_value_from_its_first_byte);
    tcase_add_test(pair, workers_that_meet_half_way_keep_one_link);
    tcase_add_test(pair, workers_that_meet_half_way_many_times);
    tcase_add_test(pair, another_task_at_the_address_is_named);
    tcase_add_test(pair, another_job_at_the_address_is_named);
    tcase_add_test(pair, something_silent_at_the_address_is_given_up);
    tcase_add_test(pair, something_else_at_the_address_is_no_worker);
    suite_add_tcase(suite, pair);
    return run_suite_in_process(suite);
}
