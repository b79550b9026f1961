// SPDX-License-Identifier: Apache-2.0
/* Connections that break: a one-shot tensor arrives whole and once, and its send completes once, whatever was lost. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "fakes/cluster.h"
#include "fakes/proxy.h"
#include "fakes/run_suite.h"

/* Twice as much as the sockets on the way can hold. */
#define BIG_BYTES (UINT64_C(32) << 20)
/* The dimensions of a matrix of bytes that is slightly larger than BIG_BYTES. */
#define ROWS UINT64_C(4096)
#define COLUMNS UINT64_C(8199)

static struct cluster cluster;
static struct proxy proxy;
static struct tl_cq *send_cq;
static struct tl_cq *recv_cq;

/* Worker 1 reaches worker 0 through the proxy. */
static void open_with(const char *settings)
{
    cluster_init(&cluster, 2, settings);
    cluster_use_proxy(&cluster, 0, &proxy);
    cluster_open(&cluster, 0);
    cluster_open(&cluster, 1);
    send_cq = cluster_cq();
    recv_cq = cluster_cq();
}

/* gRPC holds memory for a connection that is dead without its knowledge, and frees it when keep-alive finds out. */
static void setup(void)
{
    open_with("\"timeouts\": {\"keepalive\": \"500ms\", \"keepalive_answer\": \"500ms\"}");
}

/* The worker soon forgets receivers that broke off. */
static void setup_impatient(void)
{
    open_with("\"timeouts\": {\"reservation\": \"300ms\"}");
}

/* The worker does not forget receivers that broke off. */
static void setup_patient(void)
{
    open_with("\"timeouts\": {\"reservation\": \"1h\"}");
}

static void teardown(void)
{
    proxy_limit(&proxy, PROXY_UP, UINT64_MAX);
    proxy_limit(&proxy, PROXY_DOWN, UINT64_MAX);
    cluster_close_all(&cluster);
    tl_cq_destroy(send_cq);
    tl_cq_destroy(recv_cq);
    proxy_stop(&proxy);
}

static void send_tensor(const char *key, uint64_t step, uint64_t size_bytes, unsigned seed)
{
    struct tl_tensor *tensor = cluster_tensor(size_bytes, seed);
    cluster_send(cluster.workers[0], key, step, tensor, send_cq);
    tl_tensor_put(tensor);
}

static void recv_checked(const char *key, uint64_t step)
{
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .wants_checksum = true};
    tl_peer_id peer = cluster_peer(cluster.workers[1], 0);
    ck_assert_int_eq(tl_recv(cluster.workers[1], peer, key, step, &options, CLUSTER_LONG, recv_cq, NULL, NULL, NULL),
                     TL_OK);
}

static void expect_big(unsigned seed)
{
    struct tl_completion received = cluster_next(recv_cq);
    ck_assert_msg(received.status.code == TL_OK, "%s", received.status.message);
    ck_assert(cluster_tensor_is(received.tensor, BIG_BYTES, seed));
    tl_tensor_put(received.tensor);
    cluster_expect(send_cq, TL_OK);
    ck_assert(cluster_is_quiet(recv_cq));
    ck_assert(cluster_is_quiet(send_cq));
    ck_assert_uint_eq(cluster_stats(cluster.workers[0]).held_tensors, 0);
}

/* The tensor is gone: a receive of it times out. */
static void expect_gone(const char *key, uint64_t step)
{
    struct tl_completion completion;
    ck_assert_int_eq(tl_recv_wait(cluster.workers[1], cluster_peer(cluster.workers[1], 0), key, step, NULL,
                                  CLUSTER_SECOND / 20, &completion, NULL),
                     TL_DEADLINE_EXCEEDED);
}

START_TEST(cut_transfer_goes_on_where_it_was)
{
    send_tensor("big", 1, BIG_BYTES, 1);
    proxy_limit(&proxy, PROXY_DOWN, BIG_BYTES / 2);
    recv_checked("big", 1);
    proxy_wait_limit(&proxy, PROXY_DOWN);
    proxy_cut(&proxy);
    proxy_limit(&proxy, PROXY_DOWN, UINT64_MAX);
    expect_big(1);
    ck_assert_uint_lt(proxy_passed(&proxy, PROXY_DOWN), BIG_BYTES + BIG_BYTES / 4);
    ck_assert_uint_lt(cluster_stats(cluster.workers[0]).bytes_sent, 2 * BIG_BYTES);
    ck_assert_uint_ge(cluster_stats(cluster.workers[1]).requests_retried, 1);
    ck_assert_uint_eq(cluster_stats(cluster.workers[1]).tensors_received, 1);
    expect_gone("big", 1);
}
END_TEST

/* A matrix of bytes that say where they are. */
static struct tl_tensor *matrix(uint64_t rows, uint64_t columns)
{
    const uint64_t dims[] = {rows, columns};
    struct tl_tensor *tensor;
    ck_assert_int_eq(tl_tensor_create(TL_U8, 2, dims, &tensor, NULL), TL_OK);
    unsigned char *bytes = tl_tensor_data(tensor);
    for (uint64_t i = 0; i < rows * columns; i++)
        bytes[i] = (unsigned char)(i % 251);
    return tensor;
}

/* Columns of a sent value arrive in a box of the destination, whose other bytes stay. */
START_TEST(cut_transfer_of_columns_goes_on_where_it_was)
{
    const uint64_t start[] = {0, 3}, size[] = {ROWS, COLUMNS - 7}, place[] = {1, 5};
    const struct tl_part part = {
        .size_bytes = sizeof(part), .rank = 2, .start = start, .size = size, .destination_start = place};
    struct tl_tensor *value = matrix(ROWS, COLUMNS), *destination = matrix(ROWS + 2, COLUMNS);
    const struct tl_recv_options options = {
        .size_bytes = sizeof(options), .wants_checksum = true, .destination = destination, .part = &part};
    struct tl_worker *receiver = cluster.workers[1];
    cluster_send(cluster.workers[0], "big", 1, value, send_cq);
    proxy_limit(&proxy, PROXY_DOWN, BIG_BYTES / 2);
    ck_assert_int_eq(
        tl_recv(receiver, cluster_peer(receiver, 0), "big", 1, &options, CLUSTER_LONG, recv_cq, NULL, NULL, NULL),
        TL_OK);
    proxy_wait_limit(&proxy, PROXY_DOWN);
    proxy_cut(&proxy);
    proxy_limit(&proxy, PROXY_DOWN, UINT64_MAX);
    struct tl_completion received = cluster_next(recv_cq);
    ck_assert_msg(received.status.code == TL_OK, "%s", received.status.message);
    ck_assert_uint_eq(received.bytes, size[0] * size[1]);
    tl_tensor_put(received.tensor);
    cluster_expect(send_cq, TL_OK);
    ck_assert_uint_lt(proxy_passed(&proxy, PROXY_DOWN), BIG_BYTES + BIG_BYTES / 4);
    ck_assert_uint_ge(cluster_stats(receiver).requests_retried, 1);
    const unsigned char *bytes = tl_tensor_data(destination);
    for (uint64_t i = 0; i < (ROWS + 2) * COLUMNS; i++) {
        uint64_t row = i / COLUMNS - place[0], column = i % COLUMNS - place[1];
        uint64_t from = row < size[0] && column < size[1] ? (row + start[0]) * COLUMNS + column + start[1] : i;
        if (bytes[i] != from % 251) ck_abort_msg("byte %llu", (unsigned long long)i);
    }
    tl_tensor_put(destination);
    tl_tensor_put(value);
}
END_TEST

START_TEST(cut_again_and_again_it_still_arrives)
{
    send_tensor("big", 1, BIG_BYTES, 2);
    proxy_limit(&proxy, PROXY_DOWN, BIG_BYTES / 10);
    recv_checked("big", 1);
    for (int i = 0; i < 8; i++) {
        proxy_wait_limit(&proxy, PROXY_DOWN);
        proxy_cut(&proxy);
        proxy_limit(&proxy, PROXY_DOWN, BIG_BYTES / 10);
    }
    proxy_limit(&proxy, PROXY_DOWN, UINT64_MAX);
    expect_big(2);
    ck_assert_uint_lt(proxy_passed(&proxy, PROXY_DOWN), 2 * BIG_BYTES);
}
END_TEST

START_TEST(server_that_learns_late_of_the_break_serves_on)
{
    send_tensor("big", 1, BIG_BYTES, 3);
    proxy_limit(&proxy, PROXY_DOWN, BIG_BYTES / 2);
    recv_checked("big", 1);
    proxy_wait_limit(&proxy, PROXY_DOWN);
    proxy_cut_near(&proxy);
    proxy_limit(&proxy, PROXY_DOWN, UINT64_MAX);
    expect_big(3);
    proxy_cut(&proxy);
    expect_gone("big", 1);
}
END_TEST

/* The first connection ends for the server too, while the second one stands still: no other receiver may get its
 * tensor. */
static void expect_second_connection_holds(unsigned seed)
{
    proxy_wait_limit(&proxy, PROXY_DOWN);
    proxy_cut_broken(&proxy);
    struct tl_completion thief;
    ck_assert_int_eq(tl_recv_wait(cluster.workers[0], cluster_peer(cluster.workers[0], 0), "big", 1, NULL,
                                  CLUSTER_SECOND, &thief, NULL),
                     TL_DEADLINE_EXCEEDED);
    proxy_limit(&proxy, PROXY_DOWN, UINT64_MAX);
    expect_big(seed);
}

START_TEST(reservation_belongs_to_the_connection_that_asked_last)
{
    send_tensor("big", 1, BIG_BYTES, 4);
    proxy_limit(&proxy, PROXY_DOWN, BIG_BYTES / 4);
    recv_checked("big", 1);
    proxy_wait_limit(&proxy, PROXY_DOWN);
    proxy_cut_near(&proxy);
    proxy_limit(&proxy, PROXY_DOWN, BIG_BYTES / 4);
    expect_second_connection_holds(4);
}
END_TEST

/* The same for a receive that waited on the first connection when the value came; another tensor keeps that connection
 * busy. */
START_TEST(wait_belongs_to_the_connection_that_asked_last)
{
    struct tl_cq *other_cq = cluster_cq();
    struct tl_tensor *other = cluster_tensor(BIG_BYTES, 7);
    cluster_publish(cluster.workers[0], "other", 0, other);
    tl_tensor_put(other);
    recv_checked("big", 1);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[0]).waiting_receivers == 1);
    proxy_limit(&proxy, PROXY_DOWN, BIG_BYTES / 4);
    cluster_recv(cluster.workers[1], 0, "other", 0, other_cq);
    proxy_wait_limit(&proxy, PROXY_DOWN);
    uint64_t frames = cluster_stats(cluster.workers[0]).frames_received;
    proxy_cut_near(&proxy);
    proxy_limit(&proxy, PROXY_DOWN, BIG_BYTES / 4);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[0]).frames_received >= frames + 2);
    proxy_wait_limit(&proxy, PROXY_DOWN);
    send_tensor("big", 1, BIG_BYTES, 6);
    proxy_limit(&proxy, PROXY_DOWN, BIG_BYTES);
    expect_second_connection_holds(6);
    cluster_expect(other_cq, TL_OK);
    tl_cq_destroy(other_cq);
}
END_TEST

/* A receiver that does not come back loses its claim. */
START_TEST(reservation_of_a_receiver_that_stays_away_ends)
{
    send_tensor("big", 1, BIG_BYTES, 5);
    proxy_limit(&proxy, PROXY_DOWN, BIG_BYTES / 4);
    recv_checked("big", 1);
    proxy_wait_limit(&proxy, PROXY_DOWN);
    proxy_refuse(&proxy, true);
    proxy_cut(&proxy);
    cluster_recv(cluster.workers[0], 0, "big", 1, send_cq);
    struct tl_completion local = cluster_next(send_cq);
    ck_assert_int_eq(local.kind, TL_OP_RECV);
    ck_assert_int_eq(local.status.code, TL_OK);
    tl_tensor_put(local.tensor);
    cluster_expect(send_cq, TL_OK);
}
END_TEST

/* A receive that is cancelled while its connection is broken is reported as soon as there is another. */
START_TEST(receiver_that_gives_up_while_cut_off_says_so_later)
{
    send_tensor("big", 1, BIG_BYTES, 5);
    proxy_limit(&proxy, PROXY_DOWN, BIG_BYTES / 4);
    tl_op_id op = cluster_recv(cluster.workers[1], 0, "big", 1, recv_cq);
    proxy_wait_limit(&proxy, PROXY_DOWN);
    proxy_refuse(&proxy, true);
    proxy_cut(&proxy);
    CLUSTER_UNTIL(cluster_peer_info(cluster.workers[1], 0).state != TL_PEER_UP);
    ck_assert_int_eq(tl_cancel(cluster.workers[1], op), TL_OK);
    cluster_expect(recv_cq, TL_CANCELLED);
    cluster_recv(cluster.workers[0], 0, "big", 1, send_cq);
    proxy_limit(&proxy, PROXY_DOWN, UINT64_MAX);
    proxy_refuse(&proxy, false);
    struct tl_completion local = cluster_next(send_cq);
    ck_assert_int_eq(local.kind, TL_OP_RECV);
    ck_assert_int_eq(local.status.code, TL_OK);
    tl_tensor_put(local.tensor);
    cluster_expect(send_cq, TL_OK);
}
END_TEST

/* --------------------------------------------------------------------------------------- lost acknowledgements -- */

/* Lets the tensors arrive, and discards all later messages of the receiver. */
static void lose_acknowledgements(unsigned count)
{
    tl_peer_id peer = cluster_peer(cluster.workers[1], 0);
    ck_assert_int_eq(tl_worker_wait_for_peers(cluster.workers[1], &peer, 1, 1, CLUSTER_LONG, NULL), TL_OK);
    CLUSTER_UNTIL(cluster_peer_info(cluster.workers[0], 1).state == TL_PEER_UP);
    proxy_limit(&proxy, PROXY_DOWN, 0);
    for (unsigned i = 0; i < count; i++)
        send_tensor("small", i, 20, i);
    for (unsigned i = 0; i < count; i++)
        cluster_recv(cluster.workers[1], 0, "small", i, recv_cq);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[0]).tensors_sent == count);
    proxy_limit(&proxy, PROXY_UP, 0);
    proxy_limit(&proxy, PROXY_DOWN, UINT64_MAX);
    for (unsigned i = 0; i < count; i++)
        cluster_expect(recv_cq, TL_OK);
    ck_assert_uint_eq(cluster_stats(cluster.workers[0]).held_tensors, count);
    ck_assert(cluster_is_quiet(send_cq));
    proxy_cut(&proxy);
    proxy_limit(&proxy, PROXY_UP, UINT64_MAX);
}

START_TEST(lost_acknowledgement_is_repeated)
{
    lose_acknowledgements(1);
    /* Nothing else has to be sent to that worker. */
    cluster_expect(send_cq, TL_OK);
    expect_gone("small", 0);
    ck_assert(cluster_is_quiet(send_cq));
}
END_TEST

START_TEST(many_lost_acknowledgements_are_repeated)
{
    lose_acknowledgements(800);
    for (int i = 0; i < 800; i++)
        cluster_expect(send_cq, TL_OK);
    expect_gone("small", 0);
    expect_gone("small", 799);
    ck_assert(cluster_is_quiet(send_cq));
}
END_TEST

/* ------------------------------------------------------------------------------------------------- random cuts -- */

#define SMALL_COUNT 3000

static void expect_each_once(struct tl_cq *cq)
{
    static unsigned char seen[SMALL_COUNT];
    memset(seen, 0, sizeof(seen));
    for (unsigned i = 0; i < SMALL_COUNT; i++) {
        struct tl_completion completion = cluster_expect(cq, TL_OK);
        ck_assert_uint_lt(completion.step, SMALL_COUNT);
        ck_assert_uint_eq(seen[completion.step]++, 0);
    }
    ck_assert(cluster_is_quiet(cq));
}

START_TEST(small_tensors_survive_random_cuts)
{
    for (int round = 0; round < 5; round++) {
        for (unsigned i = 0; i < SMALL_COUNT; i++)
            cluster_recv(cluster.workers[1], 0, "s", i, recv_cq);
        for (unsigned i = 0; i < SMALL_COUNT; i++)
            send_tensor("s", i, tl_random_u64() % 2000, i);
        for (int cut = 0; cut < 10; cut++) {
            enum proxy_way way = cut % 2 == 0 ? PROXY_DOWN : PROXY_UP;
            proxy_limit(&proxy, way, tl_random_u64() % 100000);
            cluster_pause();
            proxy_cut(&proxy);
            proxy_limit(&proxy, way, UINT64_MAX);
        }
        expect_each_once(recv_cq);
        expect_each_once(send_cq);
        ck_assert_uint_eq(cluster_stats(cluster.workers[0]).held_tensors, 0);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("worker_resume");
    TCase *pair = tcase_create("pair");
    tcase_add_checked_fixture(pair, setup, teardown);
    tcase_add_test(pair, cut_transfer_goes_on_where_it_was);
    tcase_add_test(pair, cut_transfer_of_columns_goes_on_where_it_was);
    tcase_add_test(pair, cut_again_and_again_it_still_arrives);
    tcase_add_test(pair, server_that_learns_late_of_the_break_serves_on);
    tcase_add_test(pair, lost_acknowledgement_is_repeated);
    tcase_add_test(pair, many_lost_acknowledgements_are_repeated);
    tcase_add_test(pair, small_tensors_survive_random_cuts);
    suite_add_tcase(suite, pair);
    TCase *impatient = tcase_create("impatient");
    tcase_add_checked_fixture(impatient, setup_impatient, teardown);
    tcase_add_test(impatient, reservation_belongs_to_the_connection_that_asked_last);
    tcase_add_test(impatient, wait_belongs_to_the_connection_that_asked_last);
    tcase_add_test(impatient, reservation_of_a_receiver_that_stays_away_ends);
    suite_add_tcase(suite, impatient);
    TCase *patient = tcase_create("patient");
    tcase_add_checked_fixture(patient, setup_patient, teardown);
    tcase_set_timeout(patient, 60);
    tcase_add_test(patient, receiver_that_gives_up_while_cut_off_says_so_later);
    suite_add_tcase(suite, patient);
    return run_suite_in_process(suite);
}
