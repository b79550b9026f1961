// SPDX-License-Identifier: Apache-2.0
/*
 * Two workers with a data plane, in one process: gRPC between them, and the fake provider for the tensors.
 *
 * Task 0 sends and publishes, with threads of its own; task 1 receives, once with threads and once driven by its caller
 * (the loop's index).
 */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "fakes/device_case.h"
#include "fakes/transport_case.h"
#include "fakes/run_suite.h"

#define LARGE (1 << 20)
#define SMALL 5000  /* Too small to be registered. */
#define INLINE 1000 /* So small that it comes inside of a message. */

/* Receives with the blocking form, which must succeed; the caller owns the tensor. */
static struct tl_completion receive(const char *key, uint64_t step, struct tl_tensor *destination, bool wants_checksum)
{
    const struct tl_recv_options options = {
        .size_bytes = sizeof(options), .destination = destination, .wants_checksum = wants_checksum};
    struct tl_completion got;
    enum tl_status status =
        tl_recv_wait(receiver, cluster_peer(receiver, 0), key, step, &options, CLUSTER_LONG, &got, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    return got;
}

static void send_tensor(const char *key, uint64_t step, uint64_t size_bytes, unsigned seed)
{
    struct tl_tensor *tensor = cluster_tensor(size_bytes, seed);
    cluster_send(sender, key, step, tensor, sent);
    tl_tensor_put(tensor);
}

static void expect_path(const struct tl_completion *got, enum tl_path path)
{
    ck_assert_msg(got->path == path, "%s instead of %s: %s", tl_path_name(got->path), tl_path_name(path),
                  got->path_reason);
}

/* Advances a worker that has no thread; returns true. */
static bool driven(struct tl_worker *worker)
{
    (void)!tl_worker_progress(worker, 0);
    return true;
}

/* Receives a large tensor, which must take this path. */
static void expect_transfer(uint64_t step, enum tl_path path)
{
    send_tensor("probe", step, LARGE, (unsigned)step);
    struct tl_completion got = receive("probe", step, NULL, false);
    expect_path(&got, path);
    ck_assert(cluster_tensor_is(got.tensor, LARGE, (unsigned)step));
    tl_tensor_put(got.tensor);
    cluster_expect(sent, TL_OK);
}

/* -------------------------------------------------------------------------------------------------- every kind -- */

START_TEST(a_tensor_that_is_sent_is_written_in_place)
{
    prepare("\"rdma\": \"require\"");
    open_both(_i);
    for (unsigned step = 0; step < 10; step++) {
        send_tensor("w", step, LARGE, step);
        struct tl_completion got = receive("w", step, NULL, step % 2 == 1);
        expect_path(&got, TL_PATH_ZERO_COPY);
        ck_assert_str_eq(got.path_reason, "");
        ck_assert_uint_eq(got.step, step);
        ck_assert_uint_eq(got.bytes, LARGE);
        ck_assert(got.is_verified == (step % 2 == 1));
        ck_assert(cluster_tensor_is(got.tensor, LARGE, step));
        tl_tensor_put(got.tensor);
        cluster_expect(sent, TL_OK);
    }
    ck_assert_str_eq(cluster_peer_info(receiver, 0).transport, "verbs");
    ck_assert_uint_eq(cluster_stats(receiver).tensors_received, 10);
    ck_assert_uint_eq(cluster_stats(sender).tensors_sent, 10);
    ck_assert_uint_eq(cluster_stats(sender).held_tensors, 0);
    teardown();
}
END_TEST

START_TEST(a_receive_that_comes_first_waits)
{
    prepare("\"rdma\": \"require\"");
    open_both(_i);
    cluster_recv(receiver, 0, "late", 3, cq);
    CLUSTER_UNTIL(driven(receiver) && cluster_stats(sender).waiting_receivers == 1);
    send_tensor("late", 3, LARGE, 9);
    struct tl_completion got = cluster_next(cq);
    ck_assert_int_eq(got.status.code, TL_OK);
    expect_path(&got, TL_PATH_ZERO_COPY);
    ck_assert(cluster_tensor_is(got.tensor, LARGE, 9));
    tl_tensor_put(got.tensor);
    cluster_expect(sent, TL_OK);
    teardown();
}
END_TEST

START_TEST(what_is_published_is_written_in_place)
{
    prepare("\"rdma\": \"require\", \"connect\": \"eager\"");
    open_both(_i);
    struct tl_tensor *tensor = cluster_tensor(LARGE, 5);
    cluster_publish(sender, "p", 4, tensor);
    for (unsigned i = 0; i < 5; i++) {
        struct tl_completion got = receive("p", i, NULL, false);
        expect_path(&got, TL_PATH_ZERO_COPY);
        ck_assert_uint_eq(got.step, 4);
        ck_assert(cluster_tensor_is(got.tensor, LARGE, 5));
        tl_tensor_put(got.tensor);
    }
    tl_tensor_put(tensor);
    teardown();
}
END_TEST

START_TEST(the_users_destination_is_written)
{
    prepare("\"rdma\": \"require\"");
    open_both(_i);
    unsigned released = 0;
    unsigned char *memory = malloc(LARGE);
    struct tl_tensor *destination = cluster_wrap(memory, LARGE, &released);
    for (unsigned step = 0; step < 3; step++) {
        send_tensor("d", step, LARGE, step);
        struct tl_completion got = receive("d", step, destination, true);
        expect_path(&got, TL_PATH_ZERO_COPY);
        ck_assert_ptr_eq(got.tensor, destination);
        ck_assert(cluster_tensor_is(got.tensor, LARGE, step));
        tl_tensor_put(got.tensor);
        cluster_expect(sent, TL_OK);
    }
    tl_tensor_put(destination);
    CLUSTER_UNTIL(__atomic_load_n(&released, __ATOMIC_ACQUIRE) == 1);
    free(memory);
    teardown();
}
END_TEST

START_TEST(a_destination_that_does_not_fit_is_refused)
{
    prepare("\"rdma\": \"require\"");
    open_both(_i);
    struct tl_tensor *destination = cluster_tensor(SMALL, 0);
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .destination = destination};
    send_tensor("d", 1, LARGE, 1);
    struct tl_completion got;
    enum tl_status status =
        tl_recv_wait(receiver, cluster_peer(receiver, 0), "d", 1, &options, CLUSTER_LONG, &got, &error);
    ck_assert_int_eq(status, TL_FAILED_PRECONDITION);
    tl_tensor_put(destination);
    /* The memory was given back, and is free for the next receive. */
    got = receive("d", 1, NULL, false);
    ck_assert(cluster_tensor_is(got.tensor, LARGE, 1));
    tl_tensor_put(got.tensor);
    cluster_expect(sent, TL_OK);
    teardown();
}
END_TEST

START_TEST(small_tensors_are_copied_and_say_why)
{
    prepare("\"rdma\": \"require\"");
    open_both(_i);
    send_tensor("s", 1, SMALL, 1);
    struct tl_completion got = receive("s", 1, NULL, false);
    expect_path(&got, TL_PATH_BOUNCE);
    ck_assert_str_eq(got.path_reason, "copied by the owner");
    ck_assert(cluster_tensor_is(got.tensor, SMALL, 1));
    tl_tensor_put(got.tensor);
    cluster_expect(sent, TL_OK);
    teardown();
}
END_TEST

/* The path is inline, in memory that the library or the user has chosen, although RDMA is required. */
START_TEST(smallest_tensors_come_inside_of_messages)
{
    prepare("\"rdma\": \"require\"");
    open_both(_i);
    for (unsigned step = 1; step < 5; step++) {
        struct tl_tensor *destination = step % 2 == 0 ? cluster_tensor(INLINE, 0) : NULL;
        send_tensor("s", step, INLINE, step);
        struct tl_completion got = receive("s", step, destination, step > 2);
        expect_path(&got, TL_PATH_INLINE);
        ck_assert_str_eq(got.path_reason, "");
        ck_assert_int_eq(got.is_verified, step > 2);
        ck_assert(cluster_tensor_is(got.tensor, INLINE, step));
        tl_tensor_put(got.tensor);
        tl_tensor_put(destination);
        cluster_expect(sent, TL_OK);
    }
    teardown();
}
END_TEST

START_TEST(strings_dead_and_empty_tensors)
{
    prepare("\"rdma\": \"require\"");
    open_both(_i);
    const struct tl_string strings[2] = {{"hello", 5}, {"", 0}};
    uint64_t dims[1] = {2};
    uint64_t no_dims[2] = {0, 7};
    struct tl_tensor *tensors[3];
    ck_assert_int_eq(tl_tensor_create_strings(1, dims, strings, &tensors[0], &error), TL_OK);
    ck_assert_int_eq(tl_tensor_create_dead(&tensors[1], &error), TL_OK);
    ck_assert_int_eq(tl_tensor_create(TL_F32, 2, no_dims, &tensors[2], &error), TL_OK);
    for (unsigned i = 0; i < 6; i++) {
        cluster_send(sender, "kind", i, tensors[i % 3], sent);
        struct tl_completion got = receive("kind", i, NULL, false);
        expect_path(&got, i % 3 == 0 ? TL_PATH_SERIALIZED : TL_PATH_NONE);
        ck_assert(tl_tensor_is_dead(got.tensor) == (i % 3 == 1));
        if (i % 3 == 2) ck_assert_uint_eq(tl_tensor_rank(got.tensor), 2);
        if (i % 3 == 0) {
            struct tl_string string;
            ck_assert_int_eq(tl_tensor_string(got.tensor, 0, &string, &error), TL_OK);
            ck_assert_uint_eq(string.len_bytes, 5);
            ck_assert_mem_eq(string.data, "hello", 5);
        }
        tl_tensor_put(got.tensor);
        cluster_expect(sent, TL_OK);
    }
    for (unsigned i = 0; i < 3; i++)
        tl_tensor_put(tensors[i]);
    teardown();
}
END_TEST

/* Each side whose tensor lies on a device copies it through pinned memory, also where the link is forbidden. */
START_TEST(tensors_on_devices)
{
    setup_cuda();
    prepare("\"rdma\": \"require\"");
    open_both(_i);
    expect_transfer(0, TL_PATH_ZERO_COPY);
    for (unsigned step = 1; step < 4; step++) {
        struct tl_tensor *tensor = bytes_on(step == 2 ? host : gpu0, LARGE);
        struct tl_tensor *destination = bytes_on(step == 1 ? host : gpu1, LARGE);
        fill(tensor, step);
        cluster_send(sender, "w", step, tensor, sent);
        struct tl_completion got = receive("w", step, destination, true);
        expect_path(&got, TL_PATH_GPU_PROXY);
        if (step > 1) ck_assert_str_eq(got.path_reason, "the transport reaches no memory of devices");
        ck_assert(is_filled(destination, step));
        tl_tensor_put(got.tensor);
        cluster_expect(sent, TL_OK);
        tl_tensor_put(destination);
        tl_tensor_put(tensor);
    }
    expect_transfer(4, TL_PATH_ZERO_COPY);
}
END_TEST

START_TEST(many_at_once_in_any_order)
{
    enum { COUNT = 600 };
    prepare("\"rdma\": \"require\"");
    open_both(_i);
    for (unsigned i = 0; i < COUNT; i++) {
        send_tensor("many", i, 1 + i * 37 % 3000, i);
        cluster_recv(receiver, 0, "many", (i * 7919) % COUNT, cq);
    }
    for (unsigned i = 0; i < COUNT; i++) {
        struct tl_completion got = cluster_next(cq);
        ck_assert_int_eq(got.status.code, TL_OK);
        unsigned step = (unsigned)got.step;
        ck_assert(cluster_tensor_is(got.tensor, 1 + step * 37 % 3000, step));
        tl_tensor_put(got.tensor);
    }
    for (unsigned i = 0; i < COUNT; i++)
        cluster_expect(sent, TL_OK);
    teardown();
}
END_TEST

START_TEST(both_ask_each_other)
{
    enum { COUNT = 50 };
    prepare("\"rdma\": \"require\", \"connect\": \"eager\"");
    open_both(_i);
    for (unsigned i = 0; i < COUNT; i++) {
        struct tl_tensor *tensor = cluster_tensor(100000, i);
        cluster_send(sender, "there", i, tensor, sent);
        cluster_send(receiver, "back", i, tensor, cq);
        tl_tensor_put(tensor);
        cluster_recv(receiver, 0, "there", i, cq);
        cluster_recv(sender, 1, "back", i, sent);
    }
    for (unsigned i = 0; i < 2 * COUNT; i++)
        cluster_expect(cq, TL_OK);
    for (unsigned i = 0; i < 2 * COUNT; i++)
        cluster_expect(sent, TL_OK);
    teardown();
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- endings -- */

START_TEST(a_receive_is_cancelled)
{
    prepare("\"rdma\": \"require\"");
    open_both(_i);
    tl_op_id op = cluster_recv(receiver, 0, "never", 1, cq);
    CLUSTER_UNTIL(driven(receiver) && cluster_stats(sender).waiting_receivers == 1);
    ck_assert_int_eq(tl_cancel(receiver, op), TL_OK);
    cluster_expect(cq, TL_CANCELLED);
    ck_assert_int_eq(tl_cancel(receiver, op), TL_NOT_FOUND);
    CLUSTER_UNTIL(driven(receiver) && cluster_stats(sender).waiting_receivers == 0);
    expect_transfer(2, TL_PATH_ZERO_COPY);
    teardown();
}
END_TEST

START_TEST(a_deadline_ends_a_receive)
{
    prepare("\"rdma\": \"require\"");
    open_both(_i);
    expect_transfer(1, TL_PATH_ZERO_COPY);
    struct tl_completion got;
    enum tl_status status =
        tl_recv_wait(receiver, cluster_peer(receiver, 0), "never", 1, NULL, 50 * TL_NS_PER_MS, &got, &error);
    ck_assert_int_eq(status, TL_DEADLINE_EXCEEDED);
    ck_assert_ptr_null(got.tensor);
    expect_transfer(2, TL_PATH_ZERO_COPY);
    teardown();
}
END_TEST

/* The peer's card sends nothing more: all messages stay in its queue. */
static void stop_sender(void)
{
    const struct fake_rule rule = {.fault = FAKE_DROP, .provider = transport.cards[0].provider, .times = FAKE_ALWAYS};
    fake_fabric_add_rule(transport.fabric, &rule);
}

START_TEST(a_cancel_that_is_not_answered_costs_the_connection)
{
    prepare(NULL);
    transport.cancel_ns = 100 * TL_NS_PER_MS;
    open_both(_i);
    expect_transfer(1, TL_PATH_ZERO_COPY);
    stop_sender();
    if (_i % 2 == 0) {
        tl_op_id op = cluster_recv(receiver, 0, "never", 1, cq);
        CLUSTER_UNTIL(driven(receiver) && cluster_stats(sender).waiting_receivers == 1);
        ck_assert_int_eq(tl_cancel(receiver, op), TL_OK);
        cluster_expect(cq, TL_CANCELLED);
    } else {
        struct tl_completion got;
        enum tl_status status =
            tl_recv_wait(receiver, cluster_peer(receiver, 0), "never", 1, NULL, 50 * TL_NS_PER_MS, &got, &error);
        ck_assert_int_eq(status, TL_DEADLINE_EXCEEDED);
    }
    expect_transfer(2, TL_PATH_GRPC);
    fake_fabric_clear_rules(transport.fabric);
    teardown();
}
END_TEST

START_TEST(a_step_that_is_aborted_here_ends_its_receives)
{
    prepare("\"rdma\": \"require\"");
    open_both(_i);
    cluster_recv(receiver, 0, "a", 5, cq);
    cluster_recv(receiver, 0, "b", 5, cq);
    CLUSTER_UNTIL(driven(receiver) && cluster_stats(sender).waiting_receivers == 2);
    ck_assert_int_eq(tl_worker_abort_step(receiver, 5, TL_DATA_LOSS, "here", &error), TL_OK);
    cluster_expect(cq, TL_DATA_LOSS);
    cluster_expect(cq, TL_DATA_LOSS);
    teardown();
}
END_TEST

START_TEST(a_step_that_is_aborted_there_ends_its_receives)
{
    prepare("\"rdma\": \"require\"");
    open_both(_i);
    cluster_recv(receiver, 0, "a", 5, cq);
    CLUSTER_UNTIL(driven(receiver) && cluster_stats(sender).waiting_receivers == 1);
    ck_assert_int_eq(tl_worker_abort_step(sender, 5, TL_UNAVAILABLE, "there", &error), TL_OK);
    struct tl_completion got = cluster_expect(cq, TL_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(got.status.message, "there"));
    teardown();
}
END_TEST

START_TEST(the_receiver_closes_while_it_waits)
{
    prepare("\"rdma\": \"require\"");
    open_both(_i);
    cluster_recv(receiver, 0, "never", 1, cq);
    CLUSTER_UNTIL(driven(receiver) && cluster_stats(sender).waiting_receivers == 1);
    cluster_close(&cluster, 1);
    cluster_expect(cq, TL_CANCELLED);
    CLUSTER_UNTIL(cluster_stats(sender).waiting_receivers == 0);
    teardown();
}
END_TEST

START_TEST(the_sender_restarts_while_a_receiver_waits)
{
    prepare("\"rdma\": \"require\"");
    open_both(_i);
    expect_transfer(1, TL_PATH_ZERO_COPY);
    cluster_recv(receiver, 0, "w", 1, cq);
    CLUSTER_UNTIL(driven(receiver) && cluster_stats(sender).waiting_receivers == 1);
    uint64_t incarnation = cluster_peer_info(receiver, 0).incarnation;
    cluster_close(&cluster, 0);
    sender = fake_transport_open(&transport, 0, TL_PROGRESS_THREAD);
    send_tensor("w", 1, LARGE, 7);
    struct tl_completion got = cluster_next(cq);
    ck_assert_msg(got.status.code == TL_OK, "%s", got.status.message);
    ck_assert(cluster_tensor_is(got.tensor, LARGE, 7));
    tl_tensor_put(got.tensor);
    cluster_expect(sent, TL_OK);
    ck_assert_uint_ne(cluster_peer_info(receiver, 0).incarnation, incarnation);
    expect_transfer(2, TL_PATH_ZERO_COPY);
    teardown();
}
END_TEST

START_TEST(the_receiver_restarts_and_asks_again)
{
    prepare("\"rdma\": \"require\"");
    open_both(TL_PROGRESS_THREAD);
    cluster_recv(receiver, 0, "w", 1, cq);
    CLUSTER_UNTIL(cluster_stats(sender).waiting_receivers == 1);
    cluster_close(&cluster, 1);
    cluster_expect(cq, TL_CANCELLED);
    receiver = fake_transport_open(&transport, 1, _i);
    expect_transfer(1, TL_PATH_ZERO_COPY);
    teardown();
}
END_TEST

START_TEST(everything_closes_in_the_middle)
{
    prepare(_i % 2 == 0 ? "\"rdma\": \"require\"" : NULL);
    open_both(TL_PROGRESS_THREAD);
    unsigned first = _i / 2 % 2;
    for (unsigned i = 0; i < 100; i++) {
        send_tensor("w", i, 200000, i);
        cluster_recv(receiver, 0, "w", i, cq);
    }
    for (int i = 0; i < _i / 4 * 10; i++)
        tl_tensor_put(cluster_next(cq).tensor);
    tl_worker_close(cluster.workers[first], 0);
    cluster.workers[first] = NULL;
    tl_worker_close(cluster.workers[1 - first], 0);
    cluster.workers[1 - first] = NULL;
    teardown();
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- failures -- */

/* A write or message of the receiver's card breaks its queue pair in the middle. */
static void break_at(enum fake_kind kind, unsigned task)
{
    const struct fake_rule rule = {.fault = FAKE_BREAK, .kinds = kind, .provider = transport.cards[task].provider};
    fake_fabric_add_rule(transport.fabric, &rule);
}

START_TEST(a_connection_that_breaks_is_replaced_by_grpc)
{
    prepare(NULL);
    open_both(_i % 2);
    expect_transfer(1, TL_PATH_ZERO_COPY);
    break_at(_i / 2 == 0 ? FAKE_WRITE : FAKE_MESSAGE, _i / 2 == 0 ? 0 : 1);
    send_tensor("w", 1, LARGE, 3);
    struct tl_completion got = receive("w", 1, NULL, false);
    ck_assert(cluster_tensor_is(got.tensor, LARGE, 3));
    ck_assert(got.path == TL_PATH_GRPC || got.path == TL_PATH_ZERO_COPY);
    ck_assert((got.path == TL_PATH_GRPC) == (got.path_reason[0] != '\0'));
    tl_tensor_put(got.tensor);
    cluster_expect(sent, TL_OK);
    ck_assert_uint_ge(cluster_stats(receiver).requests_retried, 1);
    /* The path comes back by itself. */
    CLUSTER_UNTIL(driven(receiver) && strcmp(cluster_peer_info(receiver, 0).transport, "verbs") == 0);
    expect_transfer(2, TL_PATH_ZERO_COPY);
    teardown();
}
END_TEST

START_TEST(a_connection_that_breaks_fails_where_rdma_is_required)
{
    /* The value was given to the request that has failed; other requests get it at once all the same. */
    prepare("\"rdma\": \"require\", \"timeouts\": {\"reservation\": \"1h\"}");
    open_both(_i);
    expect_transfer(1, TL_PATH_ZERO_COPY);
    const struct fake_rule rules[] = {
        {.fault = FAKE_BREAK, .kinds = FAKE_WRITE, .provider = transport.cards[0].provider},
        {.fault = FAKE_CREATE_FAILURE, .provider = transport.cards[1].provider, .times = FAKE_ALWAYS},
        {.fault = FAKE_CREATE_FAILURE, .provider = transport.cards[0].provider, .times = FAKE_ALWAYS},
    };
    for (unsigned i = 0; i < 3; i++)
        fake_fabric_add_rule(transport.fabric, &rules[i]);
    send_tensor("w", 1, LARGE, 3);
    struct tl_completion got;
    enum tl_status status = tl_recv_wait(receiver, cluster_peer(receiver, 0), "w", 1, NULL, CLUSTER_LONG, &got, &error);
    ck_assert_int_eq(status, TL_UNAVAILABLE);
    ck_assert_msg(strstr(error.message, "require") != NULL, "%s", error.message);
    fake_fabric_clear_rules(transport.fabric);
    CLUSTER_UNTIL(driven(receiver) && strcmp(cluster_peer_info(receiver, 0).transport, "verbs") == 0);
    got = receive("w", 1, NULL, false);
    expect_path(&got, TL_PATH_ZERO_COPY);
    tl_tensor_put(got.tensor);
    cluster_expect(sent, TL_OK);
    teardown();
}
END_TEST

START_TEST(a_path_that_cannot_be_made_is_replaced_by_grpc)
{
    static const enum fake_fault faults[] = {FAKE_CREATE_FAILURE, FAKE_CONNECT_FAILURE};
    prepare(NULL);
    open_both(TL_PROGRESS_THREAD);
    const struct fake_rule rule = {
        .fault = faults[_i % 2], .provider = transport.cards[_i / 2].provider, .times = FAKE_ALWAYS};
    fake_fabric_add_rule(transport.fabric, &rule);
    send_tensor("w", 1, LARGE, 3);
    struct tl_completion got = receive("w", 1, NULL, false);
    expect_path(&got, TL_PATH_GRPC);
    ck_assert_str_ne(got.path_reason, "");
    tl_tensor_put(got.tensor);
    cluster_expect(sent, TL_OK);
    fake_fabric_clear_rules(transport.fabric);
    CLUSTER_UNTIL(strcmp(cluster_peer_info(receiver, 0).transport, "verbs") == 0);
    expect_transfer(2, TL_PATH_ZERO_COPY);
    teardown();
}
END_TEST

START_TEST(a_card_that_goes_is_replaced_by_grpc)
{
    prepare(NULL);
    open_both(_i % 2);
    expect_transfer(1, TL_PATH_ZERO_COPY);
    fake_provider_remove(transport.cards[_i / 2].provider);
    send_tensor("w", 1, LARGE, 3);
    struct tl_completion got = receive("w", 1, NULL, false);
    expect_path(&got, TL_PATH_GRPC);
    ck_assert(cluster_tensor_is(got.tensor, LARGE, 3));
    tl_tensor_put(got.tensor);
    cluster_expect(sent, TL_OK);
    teardown();
}
END_TEST

/* --------------------------------------------------------------------------------------- workers without cards -- */

START_TEST(with_and_without_a_card_in_one_cluster)
{
    prepare(NULL);
    transport.cards[_i].is_missing = true;
    open_both(TL_PROGRESS_THREAD);
    send_tensor("w", 1, LARGE, 3);
    struct tl_completion got = receive("w", 1, NULL, false);
    expect_path(&got, TL_PATH_GRPC);
    ck_assert_msg(strstr(got.path_reason, "no RDMA device: the slot is empty") != NULL, "%s", got.path_reason);
    ck_assert_str_eq(cluster_peer_info(receiver, 0).transport, "grpc");
    tl_tensor_put(got.tensor);
    cluster_expect(sent, TL_OK);
    teardown();
}
END_TEST

START_TEST(settings_that_rule_the_data_plane_out)
{
    static const char *const settings[] = {"\"protocol\": \"grpc\"", "\"rdma\": \"off\""};
    static const char *const reasons[] = {"the protocol is grpc", "rdma is off"};
    prepare(NULL);
    snprintf(cluster.task_settings[0], sizeof(cluster.task_settings[0]), "%s", settings[_i]);
    open_both(TL_PROGRESS_THREAD);
    send_tensor("w", 1, LARGE, 3);
    struct tl_completion got = receive("w", 1, NULL, false);
    expect_path(&got, TL_PATH_GRPC);
    ck_assert_msg(strstr(got.path_reason, reasons[_i]) != NULL, "%s", got.path_reason);
    tl_tensor_put(got.tensor);
    cluster_expect(sent, TL_OK);
    teardown();
}
END_TEST

START_TEST(a_worker_that_requires_a_card_does_not_open_without)
{
    prepare("\"rdma\": \"require\"");
    transport.cards[1].is_missing = true;
    ck_assert_int_eq(fake_transport_try(&transport, 1, TL_PROGRESS_THREAD, &error), TL_NOT_FOUND);
    ck_assert_msg(strstr(error.message, "require") != NULL && strstr(error.message, "the slot is empty") != NULL, "%s",
                  error.message);
    teardown();
}
END_TEST

START_TEST(a_worker_that_requires_a_card_does_not_take_grpc)
{
    prepare(NULL);
    transport.cards[0].is_missing = true;
    snprintf(cluster.task_settings[1], sizeof(cluster.task_settings[1]), "\"rdma\": \"require\"");
    open_both(_i);
    send_tensor("w", 1, LARGE, 3);
    struct tl_completion got;
    enum tl_status status = tl_recv_wait(receiver, cluster_peer(receiver, 0), "w", 1, NULL, CLUSTER_LONG, &got, &error);
    ck_assert_int_eq(status, TL_UNAVAILABLE);
    ck_assert_msg(strstr(error.message, "the slot is empty") != NULL, "%s", error.message);
    teardown();
}
END_TEST

START_TEST(a_client_has_a_data_connection_too)
{
    prepare("\"rdma\": \"require\"");
    sender = fake_transport_open(&transport, 0, TL_PROGRESS_THREAD);
    receiver = fake_transport_open_client(&transport);
    struct tl_tensor *tensor = cluster_tensor(LARGE, 5);
    cluster_publish(sender, "p", 4, tensor);
    tl_tensor_put(tensor);
    struct tl_completion got = receive("p", 0, NULL, true);
    expect_path(&got, TL_PATH_ZERO_COPY);
    ck_assert(cluster_tensor_is(got.tensor, LARGE, 5));
    tl_tensor_put(got.tensor);
    tl_worker_close(receiver, TL_TIMEOUT_DEFAULT);
    teardown();
}
END_TEST

int main(void)
{
    const struct {
        const char *name;
        const TTest *test;
        int count; /* The index of the loop. */
    } tests[] = {
        {"kinds", a_tensor_that_is_sent_is_written_in_place, 2},
        {"kinds", a_receive_that_comes_first_waits, 2},
        {"kinds", what_is_published_is_written_in_place, 2},
        {"kinds", the_users_destination_is_written, 2},
        {"kinds", a_destination_that_does_not_fit_is_refused, 2},
        {"kinds", small_tensors_are_copied_and_say_why, 2},
        {"kinds", smallest_tensors_come_inside_of_messages, 2},
        {"kinds", strings_dead_and_empty_tensors, 2},
        {"kinds", tensors_on_devices, 2},
        {"kinds", many_at_once_in_any_order, 2},
        {"kinds", both_ask_each_other, 1},
        {"endings", a_receive_is_cancelled, 2},
        {"endings", a_deadline_ends_a_receive, 2},
        {"endings", a_cancel_that_is_not_answered_costs_the_connection, 2},
        {"endings", a_step_that_is_aborted_here_ends_its_receives, 2},
        {"endings", a_step_that_is_aborted_there_ends_its_receives, 2},
        {"endings", the_receiver_closes_while_it_waits, 2},
        {"endings", the_sender_restarts_while_a_receiver_waits, 2},
        {"endings", the_receiver_restarts_and_asks_again, 2},
        {"endings", everything_closes_in_the_middle, 12},
        {"failures", a_connection_that_breaks_is_replaced_by_grpc, 4},
        {"failures", a_connection_that_breaks_fails_where_rdma_is_required, 2},
        {"failures", a_path_that_cannot_be_made_is_replaced_by_grpc, 4},
        {"failures", a_card_that_goes_is_replaced_by_grpc, 4},
        {"cards", with_and_without_a_card_in_one_cluster, 2},
        {"cards", settings_that_rule_the_data_plane_out, 2},
        {"cards", a_worker_that_requires_a_card_does_not_open_without, 1},
        {"cards", a_worker_that_requires_a_card_does_not_take_grpc, 2},
        {"cards", a_client_has_a_data_connection_too, 1},
    };
    Suite *suite = suite_create("dataplane_worker");
    TCase *cases = NULL;
    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++) {
        if (i == 0 || strcmp(tests[i].name, tests[i - 1].name) != 0) {
            cases = tcase_create(tests[i].name);
            tcase_set_timeout(cases, 100);
            suite_add_tcase(suite, cases);
        }
        tcase_add_loop_test(cases, tests[i].test, 0, tests[i].count);
    }
    return run_suite(suite);
}
