// SPDX-License-Identifier: Apache-2.0
/*
 * The paths of tl_put: a peer that shares a data connection with the worker fetches the tensor over it, into its own
 * memory; else the call carries the bytes.
 */
#include <check.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "control/internal.h"
#include "fakes/cluster.h"
#include "fakes/proxy.h"
#include "fakes/run_suite.h"
#include "server/peers/peer_internal.h"
#include "server/worker_internal.h"

#define LARGE (4 << 20)

static struct cluster cluster;
static struct tl_worker *asker, *owner;
static tl_peer_id peer;
static struct tl_cq *cq;
static struct tl_error error;

static void open_pair(const char *settings)
{
    cluster_init(&cluster, 2, settings);
    cluster.protocol = "auto";
    owner = cluster_open(&cluster, 0);
    asker = cluster_open(&cluster, 1);
    peer = cluster_peer(asker, 0);
    cq = cluster_cq();
}

static void teardown(void)
{
    tl_cq_destroy(cq);
}

struct count {
    struct tl_command command;
    uint64_t link_bytes, data_bytes;
};

static void run_count(struct tl_command *command)
{
    struct count *count = TL_CONTAINER_OF(command, struct count, command);
    struct tl_control_stats control;
    struct tl_engine_stats engine;
    struct tl_memory_stats memory;
    struct tl_reactor_stats reactor;
    tl_control_get_stats(command->worker->control, &control);
    tl_transports_get_stats(command->worker, &engine, &memory, &reactor);
    count->link_bytes = control.bytes_received;
    count->data_bytes = engine.bytes_received;
}

static struct count count_at_owner(void)
{
    struct count count = {.link_bytes = 0};
    tl_worker_run(owner, &count.command, run_count);
    return count;
}

static struct tl_completion wait_for_put(tl_op_id op)
{
    struct tl_completion completion;
    ck_assert_uint_eq(tl_cq_wait(cq, &completion, 1, CLUSTER_LONG), 1);
    ck_assert_uint_eq(completion.op, op);
    return completion;
}

static tl_op_id start_put(const char *key, uint64_t step, struct tl_tensor *tensor)
{
    tl_op_id op;
    ck_assert_msg(tl_put(asker, peer, key, step, tensor, NULL, CLUSTER_LONG, cq, NULL, &op, &error) == TL_OK, "%s",
                  error.message);
    return op;
}

static struct tl_completion put(const char *key, uint64_t step, uint64_t bytes)
{
    struct tl_tensor *tensor = cluster_tensor(bytes, (unsigned)step);
    struct tl_completion completion = wait_for_put(start_put(key, step, tensor));
    tl_tensor_put(tensor);
    ck_assert_msg(completion.status.code == TL_OK, "%s", completion.status.message);
    return completion;
}

static void expect_at_owner(const char *key, uint64_t step, uint64_t bytes)
{
    struct tl_completion completion;
    ck_assert_msg(tl_recv_wait(owner, cluster_peer(owner, 0), key, 0, NULL, CLUSTER_LONG, &completion, &error) == TL_OK,
                  "%s", error.message);
    ck_assert_uint_eq(completion.step, step);
    ck_assert(cluster_tensor_is(completion.tensor, bytes, (unsigned)step));
    tl_tensor_put(completion.tensor);
}

/* Puts it, and expects that not one byte of it was in the call. */
static void put_over_local(const char *key, uint64_t step, uint64_t bytes, enum tl_path path)
{
    struct count before = count_at_owner();
    struct tl_completion completion = put(key, step, bytes);
    struct count after = count_at_owner();
    ck_assert_msg(completion.path == path, "%s: %s", tl_path_name(completion.path), completion.path_reason);
    ck_assert_uint_eq(completion.bytes, bytes);
    ck_assert_uint_eq(after.link_bytes, before.link_bytes);
    ck_assert_uint_eq(after.data_bytes - before.data_bytes, bytes);
    expect_at_owner(key, step, bytes);
}

static void put_all_sizes(void)
{
    put_over_local("w", 1, LARGE, TL_PATH_ZERO_COPY);
    put_over_local("w", 2, LARGE, TL_PATH_ZERO_COPY);
    put_over_local("w", 3, 100000, TL_PATH_ZERO_COPY);
    put_over_local("small", 1, 100, TL_PATH_INLINE);
    put_over_local("empty", 1, 0, TL_PATH_NONE);
}

START_TEST(a_put_is_fetched_over_local)
{
    open_pair(NULL);
    put_all_sizes();
    struct tl_worker_stats stats = cluster_stats(owner);
    ck_assert_uint_eq(stats.published_tensors, 3);
    ck_assert_uint_eq(stats.published_bytes, 100100);
    cluster_close_all(&cluster);
}
END_TEST

/* The data connection belongs to the link of the peer, and the call to another one. */
START_TEST(a_put_is_fetched_over_a_link_of_the_peer)
{
    open_pair(NULL);
    tl_peer_id asker_of_owner = cluster_peer(owner, 1);
    ck_assert_msg(tl_worker_wait_for_peers(owner, &asker_of_owner, 1, 1, CLUSTER_LONG, &error) == TL_OK, "%s",
                  error.message);
    CLUSTER_UNTIL(cluster_peer_info(asker, 0).state == TL_PEER_UP);
    put_all_sizes();
    cluster_close_all(&cluster);
}
END_TEST

/* The owner knows the worker as a client with a one-way link. */
START_TEST(a_put_is_fetched_from_a_worker_that_has_added_its_peer)
{
    const struct tl_worker_options options = {.size_bytes = sizeof(options), .address = "127.0.0.1:0"};
    struct tl_worker *other = NULL;
    char address[64];
    open_pair(NULL);
    ck_assert_msg(tl_worker_open(&options, &other, &error) == TL_OK, "%s", error.message);
    snprintf(address, sizeof(address), "127.0.0.1:%u", tl_worker_port(owner));
    asker = other;
    ck_assert_msg(tl_worker_add_peer(asker, address, NULL, 0, &peer, &error) == TL_OK, "%s", error.message);
    tl_cq_destroy(cq);
    cq = cluster_cq();
    put_all_sizes();
    tl_worker_close(other, 0);
    expect_at_owner("w", 3, 100000); /* it lives on */
    cluster_close_all(&cluster);
}
END_TEST

struct end_link {
    struct tl_command command;
    tl_peer_id peer;
};

static void run_end_link(struct tl_command *command)
{
    const struct end_link *end = TL_CONTAINER_OF(command, struct end_link, command);
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "the test ends this link");
    tl_link_close(tl_peer_by_id(command->worker, end->peer)->links.link, &reason);
}

/* The link of the peer ends, and that of the calls stays. */
START_TEST(a_put_opens_the_link_that_its_data_needs)
{
    struct end_link end = {.peer = 0};
    open_pair(NULL);
    tl_peer_id asker_of_owner = cluster_peer(owner, 1);
    ck_assert_msg(tl_worker_wait_for_peers(owner, &asker_of_owner, 1, 1, CLUSTER_LONG, &error) == TL_OK, "%s",
                  error.message);
    CLUSTER_UNTIL(cluster_peer_info(asker, 0).state == TL_PEER_UP);
    ck_assert_int_eq(tl_remove_wait(asker, peer, "*", CLUSTER_LONG, &(uint64_t){0}, &error), TL_OK);
    end.peer = peer;
    tl_worker_run(asker, &end.command, run_end_link);
    CLUSTER_UNTIL(cluster_peer_info(asker, 0).state != TL_PEER_UP && cluster_peer_info(owner, 1).state != TL_PEER_UP);
    ck_assert_int_eq(put("w", 2, LARGE).path, TL_PATH_ZERO_COPY);
    put_over_local("w", 3, LARGE, TL_PATH_ZERO_COPY);
    cluster_close_all(&cluster);
}
END_TEST

struct set_state {
    struct tl_command command;
    tl_peer_id peer;
    enum tl_data_connection_state from, to;
    size_t set_count;
};

static void run_set_state(struct tl_command *command)
{
    struct set_state *set = TL_CONTAINER_OF(command, struct set_state, command);
    struct tl_peer *of = tl_peer_by_id(command->worker, set->peer);
    for (size_t i = 0; i < command->worker->data_plane.transport_count; i++) {
        if (of->data.items[i].state != set->from) continue;
        of->data.items[i].state = set->to;
        set->set_count++;
    }
}

/* Two workers have added each other, and only one of the two data connections between them is up. */
START_TEST(a_put_is_fetched_over_the_data_connection_that_is_up)
{
    const struct tl_worker_options options = {.size_bytes = sizeof(options), .address = "127.0.0.1:0"};
    struct tl_worker *other = NULL;
    struct set_state down = {.from = TL_DATA_CONNECTION_UP, .to = TL_DATA_CONNECTION_BACK_OFF};
    struct set_state up = {.from = TL_DATA_CONNECTION_BACK_OFF, .to = TL_DATA_CONNECTION_UP};
    open_pair(NULL);
    ck_assert_msg(tl_worker_open(&options, &other, &error) == TL_OK, "%s", error.message);
    asker = other;
    ck_assert_msg(tl_worker_add_peer(asker, tl_worker_address(owner), NULL, 0, &peer, &error) == TL_OK, "%s",
                  error.message);
    ck_assert_msg(tl_worker_add_peer(owner, tl_worker_address(asker), NULL, 0, &down.peer, &error) == TL_OK, "%s",
                  error.message);
    ck_assert_msg(tl_worker_wait_for_peers(owner, &down.peer, 1, 1, CLUSTER_LONG, &error) == TL_OK, "%s",
                  error.message);
    tl_cq_destroy(cq);
    cq = cluster_cq();
    CLUSTER_UNTIL((tl_worker_run(owner, &down.command, run_set_state), down.set_count > 0));
    put_over_local("w", 1, LARGE, TL_PATH_ZERO_COPY);
    up.peer = down.peer;
    tl_worker_run(owner, &up.command, run_set_state);
    ck_assert_uint_eq(up.set_count, down.set_count);
    tl_worker_close(other, 0);
    cluster_close_all(&cluster);
}
END_TEST

START_TEST(a_put_is_fetched_from_a_client)
{
    open_pair(NULL);
    struct tl_worker *client = cluster_open_client(&cluster);
    asker = client;
    ck_assert_int_eq(tl_worker_find_peer(asker, "/job:node/task:0", &peer, &error), TL_OK);
    tl_cq_destroy(cq);
    cq = cluster_cq();
    put_all_sizes();
    tl_worker_close(client, 0);
    cluster_close_all(&cluster);
}
END_TEST

START_TEST(rules_hold_for_a_put_that_is_fetched)
{
    open_pair("\"limits\": {\"held\": \"1MiB\"}");
    put_over_local("w", 5, 1000, TL_PATH_INLINE);
    struct tl_tensor *tensor = cluster_tensor(1000, 4);
    ck_assert_int_eq(wait_for_put(start_put("w", 4, tensor)).status.code, TL_FAILED_PRECONDITION);
    tl_tensor_put(tensor);
    tensor = cluster_tensor(LARGE, 6);
    ck_assert_int_eq(wait_for_put(start_put("w", 6, tensor)).status.code, TL_RESOURCE_EXHAUSTED);
    tl_tensor_put(tensor);
    expect_at_owner("w", 5, 1000);
    /* Each replaces the one before, whose part of the limit comes back. */
    for (uint64_t step = 6; step < 16; step++)
        put_over_local("w", step, 300000, TL_PATH_ZERO_COPY);
    cluster_close_all(&cluster);
}
END_TEST

START_TEST(the_call_carries_what_cannot_be_fetched)
{
    open_pair(NULL);
    owner->control->options.self.fetches_puts = _i == 1;
    static struct tl_control_handlers handlers;
    handlers = *owner->control->options.handlers;
    if (_i == 1) handlers.fetch_put = NULL;
    owner->control->options.handlers = &handlers;
    struct tl_completion completion = put("w", 1, LARGE);
    ck_assert_int_eq(completion.path, TL_PATH_GRPC);
    ck_assert_str_ne(completion.path_reason, "");
    expect_at_owner("w", 1, LARGE);
    cluster_close_all(&cluster);
}
END_TEST

static atomic_uint wanted_count;

/* Makes a call that carries its tensor look like one that says where it is. */
static enum tl_status admit_as_source(void *context, const struct tl_identity *client, const struct tl_push *push,
                                      void **ret_admission, struct tl_error *ret_error)
{
    if (wanted_count++ < 3) ((struct tl_push *)(uintptr_t)push)->source.number = 1;
    return tl_worker_handlers.admit(context, client, push, ret_admission, ret_error);
}

/* Each time the put is made again as after a broken connection, with a pause. */
START_TEST(a_peer_wants_the_data_of_a_call_that_had_them)
{
    static struct tl_control_handlers handlers;
    open_pair("\"protocol\": \"grpc\"");
    handlers = *owner->control->options.handlers;
    handlers.admit = admit_as_source;
    handlers.fetch_put = NULL;
    owner->control->options.handlers = &handlers;
    put("empty", 1, 0);
    ck_assert_uint_eq(wanted_count, 4);
    ck_assert_uint_eq(cluster_stats(asker).requests_retried, 3);
    cluster_close_all(&cluster);
}
END_TEST

START_TEST(the_key_of_puts_is_no_key)
{
    const struct tl_push push = {.key = TL_PUT_KEY};
    const struct tl_identity client = {.incarnation = 1};
    void *admission;
    open_pair(NULL);
    struct tl_tensor *tensor = cluster_tensor(100, 1);
    ck_assert_int_eq(tl_publish(owner, TL_PUT_KEY, 1, tensor, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_put_wait(asker, peer, TL_PUT_KEY, 1, tensor, NULL, CLUSTER_LONG, &error), TL_INVALID_ARGUMENT);
    ck_assert_msg(strstr(error.message, "is no key") != NULL, "%s", error.message);
    ck_assert_int_eq(tl_worker_handlers.admit(owner, &client, &push, &admission, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_publish(owner, TL_PUT_KEY "s", 1, tensor, &error), TL_OK);
    tl_tensor_put(tensor);
    cluster_close_all(&cluster);
}
END_TEST

/* Where gRPC may carry no tensors, a put waits for a data connection. */
START_TEST(a_put_does_not_travel_over_grpc_where_that_is_forbidden)
{
    cluster_init(&cluster, 2, NULL);
    cluster.protocol = "grpc";
    owner = cluster_open(&cluster, 0);
    cluster.protocol = "grpc+local\", \"rdma\": \"require";
    asker = cluster_open(&cluster, 1);
    peer = cluster_peer(asker, 0);
    cq = cluster_cq();
    struct tl_tensor *tensor = cluster_tensor(1000, 1);
    CLUSTER_UNTIL(tl_put_wait(asker, peer, "w", 1, tensor, NULL, CLUSTER_SECOND, &error) == TL_DEADLINE_EXCEEDED &&
                  strstr(error.message, "may not travel over gRPC") != NULL);
    tl_tensor_put(tensor);
    ck_assert_uint_eq(cluster_stats(owner).published_tensors, 0);
    cluster_close_all(&cluster);
}
END_TEST

/* Connections break while many puts are under way. Each is complete in the end, and what was published before is whole
 * until then. */
START_TEST(puts_survive_broken_connections)
{
    enum { ROUNDS = 20 };
    struct proxy proxy;
    cluster_init(&cluster, 2, NULL);
    cluster.protocol = "auto";
    cluster_use_proxy(&cluster, 0, &proxy);
    cluster_open_all(&cluster);
    owner = cluster.workers[0];
    asker = cluster.workers[1];
    peer = cluster_peer(asker, 0);
    cq = cluster_cq();
    put_over_local("w", 1, LARGE, TL_PATH_ZERO_COPY);
    for (uint64_t step = 2; step < ROUNDS; step++) {
        struct tl_tensor *tensor = cluster_tensor(LARGE, (unsigned)step);
        tl_op_id op = start_put("w", step, tensor);
        proxy_cut(&proxy);
        struct tl_completion got;
        ck_assert_int_eq(tl_recv_wait(owner, cluster_peer(owner, 0), "w", 0, NULL, CLUSTER_LONG, &got, &error), TL_OK);
        ck_assert(got.step == step || got.step == step - 1);
        ck_assert(cluster_tensor_is(got.tensor, LARGE, (unsigned)got.step));
        tl_tensor_put(got.tensor);
        struct tl_completion done = wait_for_put(op);
        ck_assert_msg(done.status.code == TL_OK, "%s", done.status.message);
        tl_tensor_put(tensor);
        expect_at_owner("w", step, LARGE);
    }
    ck_assert_uint_eq(cluster_stats(owner).published_tensors, 1);
    cluster_close_all(&cluster);
    proxy_stop(&proxy);
}
END_TEST

/* A put is cancelled, and the workers close, while its tensor is fetched. */
START_TEST(puts_that_are_fetched_end)
{
    enum { COUNT = 40 };
    tl_op_id ops[COUNT];
    open_pair(NULL);
    put_over_local("w", 1, 100, TL_PATH_INLINE);
    for (unsigned i = 0; i < COUNT; i++) {
        struct tl_tensor *tensor = cluster_tensor(LARGE, i);
        ops[i] = start_put("x", i, tensor);
        tl_tensor_put(tensor);
        if (i % 2 == 0) (void)!tl_cancel(asker, ops[i]);
    }
    if (_i == 1) cluster_close(&cluster, 0);
    if (_i == 2) cluster_close(&cluster, 1);
    if (_i == 0) {
        for (unsigned i = 0; i < COUNT; i++) {
            struct tl_completion completion;
            ck_assert_uint_eq(tl_cq_wait(cq, &completion, 1, CLUSTER_LONG), 1);
            ck_assert(completion.status.code == TL_OK || completion.status.code == TL_CANCELLED ||
                      completion.status.code == TL_FAILED_PRECONDITION);
        }
        put_over_local("w", 2, LARGE, TL_PATH_ZERO_COPY);
        ck_assert_int_eq(tl_remove_wait(asker, peer, "*", CLUSTER_LONG, &(uint64_t){0}, &error), TL_OK);
        ck_assert_uint_eq(cluster_stats(owner).published_tensors, 0);
        ck_assert_uint_eq(cluster_stats(asker).protocol_errors + cluster_stats(owner).protocol_errors, 0);
    }
    cluster_close_all(&cluster);
}
END_TEST

/* What was published stays whole until the new tensor is, or for good. */
START_TEST(puts_are_cancelled)
{
    cluster_init(&cluster, 2, NULL);
    cluster.protocol = _i == 0 ? "grpc" : "auto";
    owner = cluster_open(&cluster, 0);
    asker = cluster_open(&cluster, 1);
    peer = cluster_peer(asker, 0);
    cq = cluster_cq();
    put("w", 0, LARGE);
    for (uint64_t step = 1; step < 20; step++) {
        struct tl_completion got;
        struct tl_tensor *tensor = cluster_tensor(LARGE, (unsigned)step);
        tl_op_id op = start_put("w", step, tensor);
        tl_tensor_put(tensor);
        (void)!tl_cancel(asker, op);
        enum tl_status status = wait_for_put(op).status.code;
        ck_assert(status == TL_OK || status == TL_CANCELLED);
        ck_assert_int_eq(tl_recv_wait(owner, cluster_peer(owner, 0), "w", 0, NULL, CLUSTER_LONG, &got, &error), TL_OK);
        ck_assert(cluster_tensor_is(got.tensor, LARGE, (unsigned)got.step));
        tl_tensor_put(got.tensor);
    }
    cluster_close_all(&cluster);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("put_paths");
    TCase *tcase = tcase_create("a_put_is_fetched_over_local");
    tcase_add_checked_fixture(tcase, NULL, teardown);
    tcase_add_test(tcase, a_put_is_fetched_over_local);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("who_puts");
    tcase_add_checked_fixture(tcase, NULL, teardown);
    tcase_add_test(tcase, a_put_is_fetched_over_a_link_of_the_peer);
    tcase_add_test(tcase, a_put_is_fetched_from_a_worker_that_has_added_its_peer);
    tcase_add_test(tcase, a_put_is_fetched_from_a_client);
    tcase_add_test(tcase, a_put_opens_the_link_that_its_data_needs);
    tcase_add_test(tcase, a_put_is_fetched_over_the_data_connection_that_is_up);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("ends");
    tcase_add_checked_fixture(tcase, NULL, teardown);
    tcase_add_test(tcase, rules_hold_for_a_put_that_is_fetched);
    tcase_add_loop_test(tcase, the_call_carries_what_cannot_be_fetched, 0, 2);
    tcase_add_test(tcase, a_peer_wants_the_data_of_a_call_that_had_them);
    tcase_add_test(tcase, the_key_of_puts_is_no_key);
    tcase_add_test(tcase, a_put_does_not_travel_over_grpc_where_that_is_forbidden);
    tcase_add_test(tcase, puts_survive_broken_connections);
    tcase_add_loop_test(tcase, puts_that_are_fetched_end, 0, 3);
    tcase_add_loop_test(tcase, puts_are_cancelled, 0, 2);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
