// SPDX-License-Identifier: Apache-2.0
/* Links between workers when the other side, or the way to it, misbehaves: a loss on one side goes unnoticed on the
 * other, and peers that do not read, ask for too much or use a false name harm no other worker. */
#include <check.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "control/internal.h"
#include "fakes/cluster.h"
#include "fakes/log_capture.h"
#include "fakes/proxy.h"
#include "fakes/raw_call.h"
#include "fakes/run_suite.h"
#include "server/peers/admission.h"
#include "server/worker_internal.h"
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

/* -------------------------------------------------------------------------------------------- one-sided breaks -- */

/* The accepting side acknowledges the tensors into a connection that is dead without its knowledge. When the peer comes
 * back, it ends the old call with a status, which is sent but does not arrive either. */
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

/* The opener of the link, which has the smaller name, still uses it; the other side has lost it and opens another
 * one. If the opener did not check the age of its link, it would keep the dead one until keep-alive, far away here,
 * ends it. */
START_TEST(link_that_only_the_other_side_has_lost_is_replaced)
{
    open_behind_proxy(1, "\"timeouts\": {\"connect\": \"2s\", \"keepalive\": \"1h\"}");
    connect_from(0, 1);
    struct tl_tensor *tensor = cluster_tensor(100, 1);
    cluster_publish(cluster.workers[0], "k", 1, tensor);
    tl_tensor_put(tensor);
    usleep(2100000); /* The link becomes older than the connect time-out. */
    proxy_cut_far(&proxy);
    CLUSTER_UNTIL(cluster_peer_info(cluster.workers[1], 0).state != TL_PEER_UP);
    tl_tensor_put(cluster_recv_wait(cluster.workers[1], 0, "k", 1));
    CLUSTER_UNTIL(cluster_peer_info(cluster.workers[0], 1).state == TL_PEER_UP);
    close_all();
}
END_TEST

/* --------------------------------------------------------------------------------------------------- impostors -- */

/* Each link of one process ends that of the other, and both reconnect. */
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
    /* Without back-off there are a thousand. A slow machine sees fewer. */
    sleep(1);
    ck_assert_uint_lt(cluster_peer_info(cluster.workers[1], 0).restart_count, 100);
    cluster_close(&second, 0);
    cluster_close_all(&cluster);
}
END_TEST

/* The worker refuses a link under its own name, even with the right incarnation, which every client may ask for. */
START_TEST(no_peer_is_the_worker_itself)
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

#define MEMBER "/job:node/task:1"
#define CLIENT ""

static struct raw_call calls[3];

/* Opens a link to task 0 as this peer, and acknowledges the tensor of its first request. */
static void call_as(struct raw_call *call, const char *name, uint64_t incarnation, bool tells_received)
{
    char address[32];
    uint64_t number = 1;
    snprintf(address, sizeof(address), "127.0.0.1:%u", cluster.ports[0]);
    raw_call_open(call, address, "/tensorlane.v1.Transfer/Exchange", CLUSTER_LONG);
    Tensorlane__V1__Hello hello = TENSORLANE__V1__HELLO__INIT;
    hello.protocol_version = TL_PROTOCOL_VERSION;
    hello.name = (char *)name;
    hello.incarnation = incarnation;
    hello.n_received = tells_received;
    hello.received = &number;
    Tensorlane__V1__Frame frame = TENSORLANE__V1__FRAME__INIT;
    frame.hello = &hello;
    raw_call_send_message(call, &frame.base);
}

static void expect_hello(struct raw_call *call)
{
    Tensorlane__V1__Frame *frame = raw_call_receive_message(call, &tensorlane__v1__frame__descriptor);
    ck_assert_ptr_nonnull(frame);
    ck_assert_ptr_nonnull(frame->hello);
    tensorlane__v1__frame__free_unpacked(frame, NULL);
}

static void expect_refused(struct raw_call *call, enum tl_status code, const char *text)
{
    const struct tl_error *status = raw_call_finish(call);
    ck_assert_msg(status->code == code && strstr(status->message, text) != NULL, "%d: %s", (int)status->code,
                  status->message);
}

/* Asks for k of step 0 as request 1, and reads the tensor. */
static void take(struct raw_call *call)
{
    Tensorlane__V1__Request request = TENSORLANE__V1__REQUEST__INIT, *requests[] = {&request};
    request.number = 1;
    request.key = (char *)"k";
    Tensorlane__V1__Frame frame = TENSORLANE__V1__FRAME__INIT;
    frame.n_requests = 1;
    frame.requests = requests;
    raw_call_send_message(call, &frame.base);
    Tensorlane__V1__Frame *answer = raw_call_receive_message(call, &tensorlane__v1__frame__descriptor);
    ck_assert_ptr_nonnull(answer);
    ck_assert_uint_eq(answer->n_chunks, 1);
    tensorlane__v1__frame__free_unpacked(answer, NULL);
}

static void hang_up(struct raw_call *call)
{
    raw_call_close(call);
    memset(call, 0, sizeof(*call));
}

static void setup_impostors(const char *settings)
{
    cluster_init(&cluster, 2, settings);
    cluster_open(&cluster, 0);
    send_cq = cluster_cq();
    memset(calls, 0, sizeof(calls));
}

static void teardown_impostors(void)
{
    for (unsigned i = 0; i < 3; i++)
        if (calls[i].loop != NULL) hang_up(&calls[i]);
    cluster_close_all(&cluster);
    tl_cq_destroy(send_cq);
}

/* The incarnation of a member is no secret. */
START_TEST(an_acknowledgement_counts_only_from_the_peer_that_asked)
{
    setup_impostors(NULL);
    struct tl_tensor *tensor = cluster_tensor(100, 1);
    cluster_send(cluster.workers[0], "k", 0, tensor, send_cq);
    tl_tensor_put(tensor);
    call_as(&calls[0], MEMBER, 77, false);
    expect_hello(&calls[0]);
    take(&calls[0]);
    call_as(&calls[1], _i == 0 ? CLIENT : "/job:other/task:0", 77, true);
    expect_refused(&calls[1], TL_UNAVAILABLE, "another process with the incarnation");
    hang_up(&calls[1]);
    ck_assert_uint_eq(cluster_stats(cluster.workers[0]).held_tensors, 1);
    /* The same when the member has no link. */
    hang_up(&calls[0]);
    CLUSTER_UNTIL(cluster_peer_info(cluster.workers[0], 1).state != TL_PEER_UP);
    call_as(&calls[1], CLIENT, 77, true);
    expect_refused(&calls[1], TL_UNAVAILABLE, "another process with the incarnation");
    ck_assert_uint_eq(cluster_stats(cluster.workers[0]).held_tensors, 1);
    call_as(&calls[0], MEMBER, 77, true);
    expect_hello(&calls[0]);
    cluster_expect(send_cq, TL_OK);
    teardown_impostors();
}
END_TEST

/* Each caller is logged once, with the number of refusals that were not logged before. */
START_TEST(refusals_of_an_incarnation_do_not_fill_the_log)
{
    static const char logged[] = "the incarnation of another process was refused";
    cluster_init(&cluster, 3, NULL);
    cluster_open(&cluster, 0);
    send_cq = cluster_cq();
    memset(calls, 0, sizeof(calls));
    log_capture_begin();
    tl_log_configure(TL_LOG_WARN, TL_LOG_KEY_VALUE);
    call_as(&calls[0], MEMBER, 77, false);
    expect_hello(&calls[0]);
    for (unsigned i = 0; i < 6; i++) {
        call_as(&calls[1], i % 2 == 0 ? CLIENT : "/job:other/task:0", 77, false);
        expect_refused(&calls[1], TL_UNAVAILABLE, "another process with the incarnation");
        hang_up(&calls[1]);
    }
    ck_assert_uint_eq(log_capture_count(logged), 1);
    call_as(&calls[1], "/job:node/task:2", 77, false);
    expect_refused(&calls[1], TL_UNAVAILABLE, "another process with the incarnation");
    ck_assert_uint_eq(log_capture_count(logged), 2);
    ck_assert_uint_eq(log_capture_count("others=5"), 1);
    teardown_impostors();
}
END_TEST

/* A false member that connects first does not keep the real one out. */
START_TEST(a_member_takes_its_incarnation_from_a_client)
{
    setup_impostors(NULL);
    call_as(&calls[0], CLIENT, 77, false);
    expect_hello(&calls[0]);
    call_as(&calls[1], MEMBER, 77, false);
    expect_hello(&calls[1]);
    expect_refused(&calls[0], TL_UNAVAILABLE, "belongs to a member");
    call_as(&calls[2], MEMBER, 78, false);
    expect_hello(&calls[2]);
    ck_assert_uint_eq(cluster_peer_info(cluster.workers[0], 1).restart_count, 1);
    teardown_impostors();
}
END_TEST

START_TEST(a_client_connects_twice)
{
    setup_impostors(NULL);
    for (unsigned i = 0; i < 2; i++) {
        call_as(&calls[i], CLIENT, 77, false);
        expect_hello(&calls[i]);
    }
    teardown_impostors();
}
END_TEST

/* Makes a cluster whose task 1 has this host. */
static void open_with_host(const char *host, const char *settings)
{
    char json[512];
    cluster_init(&cluster, 2, NULL);
    memset(calls, 0, sizeof(calls));
    snprintf(json, sizeof(json), "{\"cluster\": {\"node\": [\"127.0.0.1:%u\", \"%s:%u\"]}, \"protocol\": \"grpc\"%s}",
             cluster.ports[0], host, cluster.ports[1], settings);
    const struct tl_worker_options options = {.size_bytes = sizeof(options), .config_json = json, .job = "node"};
    struct tl_error error;
    ck_assert_msg(tl_worker_open(&options, &cluster.workers[0], &error) == TL_OK, "%s", error.message);
    send_cq = cluster_cq();
}

/* 192.0.2.0/24 and 2001:db8::/32 are for documentation: no machine has them. */
START_TEST(a_member_must_come_from_its_address)
{
    static const struct {
        const char *host, *settings, *refusal; /* NULL: the name is believed. */
    } cases[] = {
        {"127.0.0.1", "", NULL},
        {"127.0.0.9", "", NULL},
        {"localhost", "", NULL},
        {"[::1]", "", NULL},
        {"192.0.2.1", "", "called /job:node/task:0 from 127.0.0.1, which is no address of its host 192.0.2.1"},
        {"[2001:db8::7]", "", "list it in peers.addresses of /job:node/task:0"},
        {"192.0.2.1", ", \"peers\": {\"addresses\": [\"192.0.2.0/24\"]}", "from 127.0.0.1"},
        {"192.0.2.1", ", \"peers\": {\"addresses\": [\"::1\", \"127.0.0.0/8\"]}", NULL},
        {"192.0.2.1", ", \"peers\": {\"addresses\": \"any\"}", NULL},
    };
    open_with_host(cases[_i].host, cases[_i].settings);
    call_as(&calls[0], MEMBER, 77, false);
    if (cases[_i].refusal == NULL) {
        expect_hello(&calls[0]);
        CLUSTER_UNTIL(cluster_peer_info(cluster.workers[0], 1).state == TL_PEER_UP);
    } else {
        expect_refused(&calls[0], TL_FAILED_PRECONDITION, cases[_i].refusal);
        ck_assert_int_ne(cluster_peer_info(cluster.workers[0], 1).state, TL_PEER_UP);
    }
    /* Clients claim no name. */
    call_as(&calls[1], CLIENT, 78, false);
    expect_hello(&calls[1]);
    teardown_impostors();
}
END_TEST

START_TEST(a_member_whose_host_is_not_found_may_come_again)
{
    open_with_host("nowhere.invalid", "");
    call_as(&calls[0], MEMBER, 77, false);
    expect_refused(&calls[0], TL_UNAVAILABLE, "the host \"nowhere.invalid\" cannot be resolved");
    teardown_impostors();
}
END_TEST

/* Calls as task 1, now from one wrong address and now from another one, and then as task 2. */
static void run_false_calls(struct tl_command *command)
{
    struct tl_error error;
    struct tl_identity who = {.source = TL_IDENTITY_CLAIMED, .incarnation = 77};
    for (unsigned i = 0; i < 7; i++) {
        snprintf(who.name, sizeof(who.name), "/job:node/task:%u", i < 6 ? 1 : 2);
        snprintf(who.address, sizeof(who.address), "ipv4:198.51.100.%u:4000", i % 2 + 1);
        ck_assert_int_eq(tl_peers_admit(command->worker, &who, &error), TL_LINK_REFUSED);
    }
}

START_TEST(refusals_of_two_addresses_do_not_fill_the_log)
{
    static const char logged[] = "a connection that claims to be a peer was refused";
    struct tl_command command;
    cluster_init(&cluster, 3, NULL);
    cluster_open(&cluster, 0);
    log_capture_begin();
    tl_log_configure(TL_LOG_WARN, TL_LOG_KEY_VALUE);
    tl_worker_run(cluster.workers[0], &command, run_false_calls);
    ck_assert_uint_eq(log_capture_count(logged), 2);
    ck_assert_uint_eq(log_capture_count("others=5"), 1);
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
    tcase_add_test(impostors, no_peer_is_the_worker_itself);
    tcase_add_loop_test(impostors, an_acknowledgement_counts_only_from_the_peer_that_asked, 0, 2);
    tcase_add_test(impostors, refusals_of_an_incarnation_do_not_fill_the_log);
    tcase_add_test(impostors, a_member_takes_its_incarnation_from_a_client);
    tcase_add_test(impostors, a_client_connects_twice);
    tcase_add_loop_test(impostors, a_member_must_come_from_its_address, 0, 9);
    tcase_add_test(impostors, a_member_whose_host_is_not_found_may_come_again);
    tcase_add_test(impostors, refusals_of_two_addresses_do_not_fill_the_log);
    suite_add_tcase(suite, impostors);
    return run_suite_in_process(suite);
}
