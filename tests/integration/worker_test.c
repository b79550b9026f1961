// SPDX-License-Identifier: Apache-2.0
/* Workers: opening, peers, sending and receiving in either order, and every error that those calls name. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/struct_version.h"
#include "fakes/cluster.h"
#include "fakes/run_suite.h"

static struct cluster cluster;
static struct tl_cq *cq;
static struct tl_error error;

static void setup(void)
{
    cluster_init(&cluster, 2, NULL);
    cluster_open_all(&cluster);
    cq = cluster_cq();
}

static void teardown(void)
{
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
}

/* ----------------------------------------------------------------------------------------------------- opening -- */

static enum tl_status open_with(const char *json, const char *job, uint32_t task, struct tl_worker **ret_worker)
{
    const struct tl_worker_options options = {
        .size_bytes = sizeof(options), .config_json = json, .job = job, .task = task};
    return tl_worker_open(&options, ret_worker, &error);
}

static void expect_open(enum tl_status expected, const char *json, const char *job, uint32_t task, const char *text)
{
    struct tl_worker *worker = NULL;
    ck_assert_int_eq(open_with(json, job, task, &worker), expected);
    ck_assert_int_eq(error.code, expected);
    ck_assert_msg(strstr(error.message, text) != NULL, "no \"%s\" in: %s", text, error.message);
    ck_assert_ptr_null(worker);
}

START_TEST(open_refuses_what_is_wrong)
{
    const char *one = "{\"cluster\": {\"ps\": [\"127.0.0.1:4000\"]}}";
    expect_open(TL_INVALID_ARGUMENT, "{\n  \"clustr\": {}\n}", "ps", 0, "config_json:2:3");
    expect_open(TL_INVALID_ARGUMENT, one, NULL, 0, "does not say which task");
    expect_open(TL_NOT_FOUND, one, "ps", 1, "task");
    expect_open(TL_NOT_FOUND, one, "pss", 0, "ps");
    expect_open(TL_NOT_FOUND,
                "{\"cluster\": {\"ps\": [\"127.0.0.1:4000\"]}, \"publish\": [\"/no/such/file.safetensors\"]}", "ps", 0,
                "/no/such/file.safetensors");
    expect_open(TL_UNIMPLEMENTED, "{\"cluster\": {\"ps\": [\"127.0.0.1:4000\"]}, \"protocol\": \"grpc+mpi\"}", "ps", 0,
                "grpc");
}
END_TEST

START_TEST(open_refuses_options_of_another_size)
{
    struct tl_worker_options options = {.size_bytes = TL_WORKER_OPTIONS_FIRST_BYTES - 1, .config_json = "{}"};
    struct tl_worker *worker;
    ck_assert_int_eq(tl_worker_open(&options, &worker, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_worker_open(&options, &worker, NULL), TL_INVALID_ARGUMENT);
}
END_TEST

START_TEST(open_needs_a_configuration)
{
    const struct tl_worker_options options = {.size_bytes = sizeof(options)};
    struct tl_worker *worker;
    unsetenv("TF_CONFIG");
    ck_assert_int_eq(tl_worker_open(&options, &worker, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "TF_CONFIG"));
}
END_TEST

static enum tl_status open_client(const char *settings, struct tl_worker **ret_client)
{
    char json[512];
    snprintf(json, sizeof(json), "{\"cluster\": {\"ps\": [\"127.0.0.1:4000\"]}, %s}", settings);
    const struct tl_worker_options options = {.size_bytes = sizeof(options), .config_json = json, .is_client = true};
    return tl_worker_open(&options, ret_client, &error);
}

START_TEST(a_client_has_the_settings_of_the_top_level)
{
    struct tl_worker *client = NULL;
    /* A worker could not start with these settings; a client does not use them. */
    ck_assert_int_eq(open_client("\"jobs\": {\"ps\": {\"protocol\": \"grpc+local\", \"rdma\": \"require\", "
                                 "\"local\": {\"socket_folder\": \"/nowhere/at/all\"}}}",
                                 &client),
                     TL_OK);
    tl_worker_close(client, 0);
    ck_assert_int_eq(open_client("\"limits\": {\"chunk\": \"1MiB\", \"inflight\": \"4KiB\"}, "
                                 "\"jobs\": {\"ps\": {\"limits\": {\"chunk\": \"4KiB\"}}}",
                                 &client),
                     TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "limits.inflight: inflight is \"4KiB\" and chunk is \"1MiB\""));
}
END_TEST

START_TEST(opens_from_tf_config)
{
    char text[256];
    snprintf(text, sizeof(text),
             "{\"cluster\": {\"worker\": [\"127.0.0.1:%u\"]}, \"task\": {\"type\": \"worker\", \"index\": 0}}",
             cluster_free_port());
    setenv("TF_CONFIG", text, 1);
    const struct tl_worker_options options = {.size_bytes = sizeof(options)};
    struct tl_worker *worker;
    enum tl_status status = tl_worker_open(&options, &worker, &error);
    unsetenv("TF_CONFIG");
    ck_assert_msg(status == TL_OK, "%s", error.message);
    ck_assert_str_eq(tl_worker_name(worker), "/job:worker/task:0");
    tl_worker_close(worker, 0);
}
END_TEST

START_TEST(second_worker_at_an_address_is_refused)
{
    char json[CLUSTER_JSON_BYTES];
    cluster_write_json(&cluster, json);
    expect_open(TL_ALREADY_EXISTS, json, "node", 0, "another process uses the address");
    struct tl_tensor *tensor = cluster_tensor(10, 1);
    cluster_publish(cluster.workers[0], "still there", 0, tensor);
    tl_tensor_put(tensor);
    tensor = cluster_recv_wait(cluster.workers[1], 0, "still there", 0);
    ck_assert(cluster_tensor_is(tensor, 10, 1));
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(has_its_name_and_incarnation)
{
    struct tl_worker *client = cluster_open_client(&cluster);
    ck_assert_str_eq(tl_worker_name(cluster.workers[1]), "/job:node/task:1");
    ck_assert_uint_eq(tl_worker_port(cluster.workers[1]), cluster.ports[1]);
    ck_assert_uint_ne(tl_worker_incarnation(cluster.workers[1]), 0);
    ck_assert_uint_ne(tl_worker_incarnation(cluster.workers[1]), tl_worker_incarnation(cluster.workers[0]));
    ck_assert_str_eq(tl_worker_name(client), "");
    ck_assert_uint_eq(tl_worker_port(client), 0);
    tl_worker_close(client, 0);
    tl_worker_close(NULL, 0);
}
END_TEST

START_TEST(listens_at_the_address_in_the_options)
{
    struct cluster other;
    cluster_init(&other, 1, NULL);
    snprintf(other.task_settings[0], sizeof(other.task_settings[0]), "\"listen\": \"127.0.0.1:0\"");
    struct tl_worker *worker = cluster_open(&other, 0);
    ck_assert_uint_ne(tl_worker_port(worker), 0);
    ck_assert_uint_ne(tl_worker_port(worker), other.ports[0]);
    cluster_close_all(&other);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------- peers -- */

START_TEST(finds_peers)
{
    struct tl_worker *worker = cluster.workers[0];
    tl_peer_id peer = 0;
    ck_assert_int_eq(tl_worker_find_peer(worker, "/job:node/task:1", &peer, &error), TL_OK);
    ck_assert_uint_ne(peer, 0);
    tl_peer_id again = 0;
    ck_assert_int_eq(tl_worker_find_peer(worker, "node:1", &again, &error), TL_OK);
    ck_assert_uint_eq(peer, again);
    ck_assert_int_eq(tl_worker_find_peer(worker, "/job:nodes/task:1", &again, &error), TL_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(error.message, "node"));
    ck_assert_uint_eq(peer, again);
    tl_peer_id peers[3] = {0};
    ck_assert_uint_eq(tl_worker_peers(worker, NULL, 0), 2);
    ck_assert_uint_eq(tl_worker_peers(worker, peers, 1), 2);
    ck_assert_uint_eq(peers[1], 0);
    ck_assert_uint_eq(tl_worker_peers(worker, peers, 3), 2);
    ck_assert(peers[0] != peers[1] && peers[2] == 0 && peers[1] == peer);
}
END_TEST

START_TEST(peer_info_follows_the_peer)
{
    struct tl_worker *worker = cluster.workers[0];
    struct tl_peer_info info = cluster_peer_info(worker, 1);
    ck_assert_int_eq(info.state, TL_PEER_IDLE);
    ck_assert_str_eq(info.name, "/job:node/task:1");
    ck_assert_str_eq(info.transport, "");
    ck_assert_uint_eq(info.incarnation, 0);
    tl_peer_id peer = info.id;
    ck_assert_int_eq(tl_worker_wait_for_peers(worker, &peer, 1, 1, CLUSTER_LONG, &error), TL_OK);
    info = cluster_peer_info(worker, 1);
    ck_assert_int_eq(info.state, TL_PEER_UP);
    ck_assert_str_eq(info.transport, "grpc");
    ck_assert_uint_eq(info.incarnation, tl_worker_incarnation(cluster.workers[1]));
    ck_assert_uint_eq(info.restart_count, 0);
    ck_assert_int_eq(info.reason.code, TL_OK);
    char address[64];
    snprintf(address, sizeof(address), "127.0.0.1:%u", cluster.ports[1]);
    ck_assert_str_eq(info.address, address);
    CLUSTER_UNTIL(cluster_peer_info(cluster.workers[1], 0).state == TL_PEER_UP);
}
END_TEST

START_TEST(peer_calls_refuse_what_is_wrong)
{
    struct tl_worker *worker = cluster.workers[0];
    struct tl_peer_info info = {.size_bytes = sizeof(info) - 8};
    ck_assert_int_eq(tl_worker_peer_info(worker, cluster_peer(worker, 1), &info, &error), TL_INVALID_ARGUMENT);
    const tl_peer_id wrong[] = {0, 1, UINT64_MAX, (UINT64_C(1) << 32) + 3, UINT64_C(1) << 32};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        info.size_bytes = sizeof(info);
        ck_assert_int_eq(tl_worker_peer_info(worker, wrong[i], &info, &error), TL_NOT_FOUND);
        ck_assert_int_eq(tl_worker_wait_for_peers(worker, &wrong[i], 1, 0, 0, &error), TL_NOT_FOUND);
        ck_assert_int_eq(tl_recv(worker, wrong[i], "a", 0, NULL, 0, cq, NULL, NULL, &error), TL_NOT_FOUND);
        struct tl_completion completion;
        ck_assert_int_eq(tl_recv_wait(worker, wrong[i], "a", 0, NULL, 0, &completion, NULL), TL_NOT_FOUND);
        ck_assert_int_eq(completion.status.code, TL_NOT_FOUND);
        ck_assert_str_eq(completion.path_reason, "");
    }
    struct tl_worker_stats stats = {.size_bytes = 1};
    ck_assert_int_eq(tl_worker_stats(worker, &stats, &error), TL_INVALID_ARGUMENT);
}
END_TEST

START_TEST(waits_for_all_or_some_peers)
{
    struct cluster three;
    cluster_init(&three, 3, "\"timeouts\": {\"connect\": \"500ms\"}");
    cluster_open(&three, 0);
    cluster_open(&three, 1);
    struct tl_worker *worker = three.workers[0];
    const tl_peer_id peers[3] = {cluster_peer(worker, 1), cluster_peer(worker, 2), cluster_peer(worker, 0)};
    ck_assert_int_eq(tl_worker_wait_for_peers(worker, NULL, 0, 2, CLUSTER_LONG, &error), TL_OK);
    ck_assert_int_eq(tl_worker_wait_for_peers(worker, peers, 3, 2, CLUSTER_LONG, &error), TL_OK);
    ck_assert_int_eq(tl_worker_wait_for_peers(worker, peers, 0, 0, CLUSTER_LONG, &error), TL_OK);
    ck_assert_int_eq(tl_worker_wait_for_peers(worker, NULL, 0, 4, CLUSTER_LONG, &error), TL_INVALID_ARGUMENT);
    ck_assert_str_eq(error.message, "cannot wait for 4 peers of 3; min_count is at most 3, and 0 for all");
    ck_assert_int_eq(tl_worker_wait_for_peers(worker, peers, 1, 2, CLUSTER_LONG, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_worker_wait_for_peers(worker, peers, 3, 0, CLUSTER_SECOND / 20, &error), TL_DEADLINE_EXCEEDED);
    ck_assert_ptr_nonnull(strstr(error.message, "/job:node/task:2"));
    ck_assert_int_eq(tl_worker_wait_for_peers(worker, NULL, 0, 0, 0, &error), TL_DEADLINE_EXCEEDED);
    ck_assert_int_eq(tl_worker_wait_for_peers(worker, NULL, 0, 0, 0, NULL), TL_DEADLINE_EXCEEDED);
    CLUSTER_UNTIL(tl_worker_wait_for_peers(worker, peers + 1, 1, 1, CLUSTER_SECOND / 100, &error) ==
                      TL_DEADLINE_EXCEEDED &&
                  strstr(error.message, "refused") != NULL);
    cluster_open(&three, 2);
    ck_assert_int_eq(tl_worker_wait_for_peers(worker, NULL, 0, 0, CLUSTER_LONG, &error), TL_OK);
    cluster_close_all(&three);
}
END_TEST

START_TEST(eager_workers_find_each_other)
{
    struct cluster three;
    cluster_init(&three, 3, "\"connect\": \"eager\"");
    cluster_open_all(&three);
    for (unsigned i = 0; i < 3; i++)
        for (unsigned j = 0; j < 3; j++)
            CLUSTER_UNTIL(cluster_peer_info(three.workers[i], j).state == TL_PEER_UP);
    cluster_close_all(&three);
}
END_TEST

/* ------------------------------------------------------------------------------------------ sending, receiving -- */

START_TEST(send_before_recv)
{
    struct tl_tensor *tensor = cluster_tensor(100000, 3);
    cluster_send(cluster.workers[0], "a", 7, tensor, cq);
    tl_tensor_put(tensor);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[0]).held_tensors == 1);
    ck_assert_uint_eq(cluster_stats(cluster.workers[0]).held_bytes, 100000);
    tensor = cluster_recv_wait(cluster.workers[1], 0, "a", 7);
    ck_assert(cluster_tensor_is(tensor, 100000, 3));
    tl_tensor_put(tensor);
    struct tl_completion sent = cluster_expect(cq, TL_OK);
    ck_assert_int_eq(sent.kind, TL_OP_SEND);
    ck_assert_uint_eq(sent.step, 7);
    ck_assert_uint_eq(sent.bytes, 100000);
    ck_assert_uint_eq(cluster_stats(cluster.workers[0]).held_tensors, 0);
}
END_TEST

START_TEST(recv_before_send)
{
    int marker;
    tl_op_id op = 0;
    tl_peer_id peer = cluster_peer(cluster.workers[1], 0);
    ck_assert_int_eq(tl_recv(cluster.workers[1], peer, "a", 7, NULL, CLUSTER_LONG, cq, &marker, &op, &error), TL_OK);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[0]).waiting_receivers == 1);
    struct tl_tensor *tensor = cluster_tensor(100000, 3);
    ck_assert_int_eq(tl_send_wait(cluster.workers[0], "a", 7, tensor, CLUSTER_LONG, &error), TL_OK);
    tl_tensor_put(tensor);
    struct tl_completion got = cluster_next(cq);
    ck_assert_int_eq(got.status.code, TL_OK);
    ck_assert_uint_eq(got.size_bytes, sizeof(got));
    ck_assert_uint_eq(got.op, op);
    ck_assert_int_eq(got.kind, TL_OP_RECV);
    ck_assert_ptr_eq(got.user_data, &marker);
    ck_assert_uint_eq(got.step, 7);
    ck_assert_int_eq(got.path, TL_PATH_GRPC);
    ck_assert_str_ne(got.path_reason, "");
    ck_assert_uint_eq(got.bytes, 100000);
    ck_assert_int_gt(got.duration_ns, 0);
    ck_assert(!got.is_verified);
    ck_assert(cluster_tensor_is(got.tensor, 100000, 3));
    tl_tensor_put(got.tensor);
    ck_assert_uint_eq(cluster_stats(cluster.workers[0]).waiting_receivers, 0);
}
END_TEST

START_TEST(keys_and_steps_keep_tensors_apart)
{
    char longest[TL_MAX_KEY_BYTES + 1];
    memset(longest, 'k', TL_MAX_KEY_BYTES);
    longest[TL_MAX_KEY_BYTES] = '\0';
    const char *keys[] = {"a", "a/b", "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", " ", longest};
    const uint64_t steps[] = {0, 1, UINT64_MAX};
    for (unsigned k = 0; k < 5; k++) {
        for (unsigned s = 0; s < 3; s++) {
            struct tl_tensor *tensor = cluster_tensor(1000 + k, s);
            cluster_send(cluster.workers[0], keys[k], steps[s], tensor, cq);
            tl_tensor_put(tensor);
        }
    }
    for (unsigned k = 5; k-- > 0;) {
        for (unsigned s = 3; s-- > 0;) {
            struct tl_tensor *tensor = cluster_recv_wait(cluster.workers[1], 0, keys[k], steps[s]);
            ck_assert(cluster_tensor_is(tensor, 1000 + k, s));
            tl_tensor_put(tensor);
        }
    }
    for (unsigned i = 0; i < 15; i++)
        cluster_expect(cq, TL_OK);
}
END_TEST

START_TEST(client_receives_from_everybody_and_sends_to_itself)
{
    struct tl_worker *client = cluster_open_client(&cluster);
    for (unsigned i = 0; i < 2; i++) {
        struct tl_tensor *tensor = cluster_tensor(5000, i);
        cluster_send(cluster.workers[i], "k", 1, tensor, cq);
        tl_tensor_put(tensor);
        tensor = cluster_recv_wait(client, i, "k", 1);
        ck_assert(cluster_tensor_is(tensor, 5000, i));
        tl_tensor_put(tensor);
        cluster_expect(cq, TL_OK);
    }
    ck_assert_int_eq(tl_worker_wait_for_peers(client, NULL, 0, 0, CLUSTER_LONG, &error), TL_OK);
    ck_assert_int_eq(tl_worker_find_peer(client, "", &(tl_peer_id){0}, &error), TL_NOT_FOUND);
    tl_worker_close(client, TL_TIMEOUT_DEFAULT);
}
END_TEST

START_TEST(receives_from_itself)
{
    struct tl_tensor *tensor = cluster_tensor(5000, 9);
    cluster_send(cluster.workers[0], "k", 1, tensor, cq);
    struct tl_tensor *got = cluster_recv_wait(cluster.workers[0], 0, "k", 1);
    ck_assert(cluster_tensor_is(got, 5000, 9));
    ck_assert_ptr_eq(tl_tensor_data(got), tl_tensor_data(tensor));
    ck_assert(tl_tensor_is_read_only(got));
    ck_assert(cluster_is_quiet(cq));
    tl_tensor_put(got);
    struct tl_completion sent = cluster_expect(cq, TL_OK);
    ck_assert_int_eq(sent.kind, TL_OP_SEND);
    /* The tensor is copied into a destination, so the send completes at once. */
    struct tl_tensor *destination = cluster_tensor(5000, 0);
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .destination = destination};
    ck_assert_int_eq(tl_recv(cluster.workers[0], cluster_peer(cluster.workers[0], 0), "k", 2, &options, CLUSTER_LONG,
                             cq, NULL, NULL, &error),
                     TL_OK);
    ck_assert_int_eq(tl_send_wait(cluster.workers[0], "k", 2, tensor, CLUSTER_LONG, &error), TL_OK);
    struct tl_completion received = cluster_next(cq);
    ck_assert_ptr_eq(received.tensor, destination);
    ck_assert_int_eq(received.path, TL_PATH_SELF);
    ck_assert(cluster_tensor_is(destination, 5000, 9));
    tl_tensor_put(received.tensor);
    tl_tensor_put(destination);
    /* What is published must not change, so that none of its receivers may write it. */
    ck_assert_int_eq(tl_publish(cluster.workers[0], "p", 3, tensor, &error), TL_OK);
    got = cluster_recv_wait(cluster.workers[0], 0, "p", 3);
    ck_assert_ptr_eq(tl_tensor_data(got), tl_tensor_data(tensor));
    ck_assert(tl_tensor_is_read_only(got) && !tl_tensor_is_read_only(tensor));
    /* What was received is sent on: the send keeps it. */
    cluster_send(cluster.workers[0], "k", 3, got, cq);
    tl_tensor_put(got);
    got = cluster_recv_wait(cluster.workers[0], 0, "k", 3);
    ck_assert_ptr_eq(tl_tensor_data(got), tl_tensor_data(tensor));
    tl_tensor_put(got);
    cluster_expect(cq, TL_OK);
    tl_tensor_put(tensor);
    ck_assert_uint_eq(cluster_stats(cluster.workers[0]).frames_sent, 0);
}
END_TEST

START_TEST(calls_refuse_what_is_wrong)
{
    struct tl_worker *worker = cluster.workers[0];
    struct tl_tensor *tensor = cluster_tensor(10, 1);
    char long_key[TL_MAX_KEY_BYTES + 2];
    memset(long_key, 'k', TL_MAX_KEY_BYTES + 1);
    long_key[TL_MAX_KEY_BYTES + 1] = '\0';
    const char *keys[] = {NULL, "", long_key, "\xff", "\xc0\x80", "\xed\xa0\x80", "abc\xe2\x82"};
    tl_peer_id peer = cluster_peer(worker, 1);
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        struct tl_completion completion;
        ck_assert_int_eq(tl_send(worker, keys[i], 0, tensor, 0, cq, NULL, NULL, &error), TL_INVALID_ARGUMENT);
        ck_assert_int_eq(tl_send_wait(worker, keys[i], 0, tensor, 0, &error), TL_INVALID_ARGUMENT);
        ck_assert_int_eq(tl_recv(worker, peer, keys[i], 0, NULL, 0, cq, NULL, NULL, &error), TL_INVALID_ARGUMENT);
        ck_assert_int_eq(tl_recv_wait(worker, peer, keys[i], 0, NULL, 0, &completion, &error), TL_INVALID_ARGUMENT);
        ck_assert_int_eq(completion.status.code, TL_INVALID_ARGUMENT);
        ck_assert_str_eq(completion.path_reason, "");
        ck_assert_int_eq(tl_publish(worker, keys[i], 0, tensor, &error), TL_INVALID_ARGUMENT);
        ck_assert_int_eq(tl_withdraw(worker, keys[i], &error), TL_INVALID_ARGUMENT);
    }
    struct tl_recv_options options = {.size_bytes = TL_RECV_OPTIONS_FIRST_BYTES - 1};
    ck_assert_int_eq(tl_recv(worker, peer, "a", 0, &options, 0, cq, NULL, NULL, &error), TL_INVALID_ARGUMENT);
    ck_assert_uint_eq(cluster_stats(worker).open_operations, 0);
    ck_assert(cluster_is_quiet(cq));
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(second_offer_of_a_tensor_is_refused)
{
    struct tl_tensor *tensor = cluster_tensor(10, 1);
    cluster_send(cluster.workers[0], "a", 1, tensor, cq);
    ck_assert_int_eq(tl_send_wait(cluster.workers[0], "a", 1, tensor, CLUSTER_LONG, &error), TL_ALREADY_EXISTS);
    ck_assert_ptr_nonnull(strstr(error.message, "a of step 1"));
    ck_assert(cluster_is_quiet(cq));
    tl_tensor_put(cluster_recv_wait(cluster.workers[1], 0, "a", 1));
    cluster_expect(cq, TL_OK);
    cluster_send(cluster.workers[0], "a", 1, tensor, cq);
    tl_tensor_put(cluster_recv_wait(cluster.workers[1], 0, "a", 1));
    cluster_expect(cq, TL_OK);
    tl_tensor_put(tensor);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("worker");
    TCase *opening = tcase_create("opening");
    tcase_add_test(opening, open_refuses_what_is_wrong);
    tcase_add_test(opening, open_refuses_options_of_another_size);
    tcase_add_test(opening, open_needs_a_configuration);
    tcase_add_test(opening, a_client_has_the_settings_of_the_top_level);
    tcase_add_test(opening, opens_from_tf_config);
    tcase_add_test(opening, listens_at_the_address_in_the_options);
    tcase_add_test(opening, waits_for_all_or_some_peers);
    tcase_add_test(opening, eager_workers_find_each_other);
    suite_add_tcase(suite, opening);
    TCase *pair = tcase_create("pair");
    tcase_add_checked_fixture(pair, setup, teardown);
    tcase_add_test(pair, second_worker_at_an_address_is_refused);
    tcase_add_test(pair, has_its_name_and_incarnation);
    tcase_add_test(pair, finds_peers);
    tcase_add_test(pair, peer_info_follows_the_peer);
    tcase_add_test(pair, peer_calls_refuse_what_is_wrong);
    tcase_add_test(pair, send_before_recv);
    tcase_add_test(pair, recv_before_send);
    tcase_add_test(pair, keys_and_steps_keep_tensors_apart);
    tcase_add_test(pair, client_receives_from_everybody_and_sends_to_itself);
    tcase_add_test(pair, receives_from_itself);
    tcase_add_test(pair, calls_refuse_what_is_wrong);
    tcase_add_test(pair, second_offer_of_a_tensor_is_refused);
    suite_add_tcase(suite, pair);
    return run_suite_in_process(suite);
}
