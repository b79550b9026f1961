// SPDX-License-Identifier: Apache-2.0
/* Requests of peers that let their value go and ask the table again, also while the worker closes. */
#include <check.h>
#include <string.h>

#include "fakes/device_case.h"
#include "fakes/run_suite.h"
#include "base/clock.h"
#include "fakes/region_provider.h"
#include "server/rendezvous/rendezvous.h"
#include "server/peers/permissions.h"
#include "server/transports/transport.h"
#include "server/worker_internal.h"

static struct tl_worker worker;

static void never_post(const struct tl_executor *of, struct tl_closure *closure)
{
    (void)of, (void)closure;
    ck_abort();
}

static struct tl_closure *deferred; /* NULL: nothing is */

static void defer(const struct tl_executor *of, struct tl_closure *closure)
{
    (void)of;
    ck_assert_ptr_null(deferred);
    deferred = closure;
}

/* The end of the executor's round. */
static void end_round(void)
{
    struct tl_closure *closure = deferred;
    ck_assert_ptr_nonnull(closure);
    deferred = NULL;
    closure->run(closure);
}

static struct tl_executor executor = {.is_only = true, .post = never_post, .defer = defer};
static struct tl_executor loop_executor = {.is_only = true, .post = never_post};
static struct tl_identity peer = {.name = "/job:worker/task:0", .incarnation = 7};
static struct tl_serve serve;
static struct tl_serve newer; /* the same request, on a newer link */
static struct tl_tensor *tensor;
static struct tl_error answer; /* to serve */
static unsigned answers;
static unsigned newer_answers;
static uint64_t newer_bytes;

static void post(const struct tl_executor *of, struct tl_closure *closure)
{
    (void)of, (void)closure;
}

static void reply(struct tl_serve *of, const struct tl_error *status, const struct tl_offer *offer)
{
    if (of == &newer && status->code == TL_OK) newer_bytes = tl_tensor_size_bytes(offer->tensor);
    if (status->code == TL_OK) tl_tensor_put(offer->tensor);
    if (of == &newer) {
        ck_assert_int_eq(status->code, TL_OK);
        newer_answers++;
        return;
    }
    ck_assert_ptr_eq(of, &serve);
    answer = *status;
    answers++;
}

static const struct tl_serve_ops ops = {.reply = reply};

static void ask(void)
{
    answers = 0;
    tl_serving_ops.request(&worker.serving, &serve);
}

static void publish(void)
{
    ck_assert_int_eq(tl_rendezvous_publish(worker.table, "key", 1, tensor, NULL, NULL), TL_OK);
}

static void withdraw(void)
{
    ck_assert_int_eq(tl_rendezvous_withdraw(worker.table, "key", NULL), TL_OK);
}

/* The request is answered with a published tensor, lets go of it, and the tensor is withdrawn. */
static void setup(void)
{
    const struct tl_rendezvous_limits limits = {.waiting_receivers = 10, .held_bytes = 1 << 20};
    memset(&worker, 0, sizeof(worker));
    ck_assert_int_eq(tl_rendezvous_create(&limits, &worker.table, NULL), TL_OK);
    ck_assert_int_eq(tl_tensor_create(TL_U8, 1, (uint64_t[]){4}, &tensor, NULL), TL_OK);
    worker.executor.post = post;
    worker.settings.reservation_timeout_ns = TL_NS_PER_SEC;
    tl_serving_init(&worker.serving, &worker, &executor);
    serve = (struct tl_serve){.ops = &ops, .id = {.number = 1}, .peer = &peer, .key = "key", .step = 1};
    publish();
    ask();
    ck_assert_uint_eq(answers, 1);
    ck_assert_int_eq(answer.code, TL_OK);
    tl_serving_ops.closed(&worker.serving, &serve, TL_SERVE_BROKEN);
    withdraw();
}

static void teardown(void)
{
    tl_serving_ops.closed(&worker.serving, &serve, TL_SERVE_CANCELLED);
    tl_rendezvous_close(worker.table, &(struct tl_error){.code = TL_CANCELLED});
    tl_rendezvous_destroy(worker.table);
    tl_tensor_put(tensor);
}

static void expect_refusal(void)
{
    ck_assert_uint_eq(answers, 1);
    ck_assert_int_eq(answer.code, TL_UNAVAILABLE);
    ck_assert(!serve.is_final); /* so that the receiver asks again after the restart */
}

START_TEST(waits_again)
{
    ask();
    ck_assert_uint_eq(answers, 0);
    publish();
    ck_assert_uint_eq(answers, 1);
    ck_assert_int_eq(answer.code, TL_OK);
    ck_assert(serve.is_final);
}
END_TEST

START_TEST(the_same_request_on_a_newer_link_goes_on_waiting)
{
    newer = serve;
    newer.is_final = false;
    newer_answers = 0;
    tl_serving_ops.request(&worker.serving, &newer);
    ask();
    ck_assert_uint_eq(answers, 1);
    ck_assert_int_eq(answer.code, TL_ABORTED);
    publish();
    ck_assert_uint_eq(newer_answers, 1);
    tl_serving_ops.closed(&worker.serving, &newer, TL_SERVE_RECEIVED);
}
END_TEST

START_TEST(of_two_that_ask_again_the_newer_goes_on_waiting)
{
    newer = serve;
    newer.is_final = false;
    newer_answers = 0;
    publish();
    tl_serving_ops.request(&worker.serving, &newer);
    ck_assert_uint_eq(newer_answers, 1);
    tl_serving_ops.closed(&worker.serving, &newer, TL_SERVE_BROKEN);
    withdraw();
    ask();
    ck_assert_uint_eq(answers, 0);
    tl_serving_ops.request(&worker.serving, &newer);
    ck_assert_uint_eq(answers, 1);
    ck_assert_int_eq(answer.code, TL_ABORTED);
    publish();
    ck_assert_uint_eq(newer_answers, 2);
    tl_serving_ops.closed(&worker.serving, &newer, TL_SERVE_RECEIVED);
}
END_TEST

START_TEST(the_worker_closes_while_it_waits_again)
{
    ask();
    tl_serving_close(&worker.serving);
    expect_refusal();
}
END_TEST

START_TEST(asks_again_while_the_worker_closes)
{
    tl_serving_close(&worker.serving);
    ask();
    expect_refusal();
}
END_TEST

START_TEST(gets_what_there_is_while_the_worker_closes)
{
    publish();
    tl_serving_close(&worker.serving);
    ask();
    ck_assert_uint_eq(answers, 1);
    ck_assert_int_eq(answer.code, TL_OK);
}
END_TEST

/* The values for probes are in no table: a worker without any value answers, and one of the user with the same key is
 * another one. */
START_TEST(a_probe_is_answered_at_once)
{
    ck_assert_int_eq(tl_probe_values_init(&worker.sources.probe_values, NULL), TL_OK);
    struct tl_serve probe = {.ops = &ops, .id = {.number = 2}, .peer = &peer, .step = TL_PROBE_STEP};
    for (enum tl_probe_size size = 0; size < TL_PROBE_SIZES; size++) {
        newer = probe;
        newer.key = tl_probe_value_key(size);
        newer_answers = 0;
        tl_serving_ops.request(&worker.serving, &newer);
        ck_assert_uint_eq(newer_answers, 1);
        ck_assert(newer.is_final);
        ck_assert_uint_eq(newer_bytes, tl_probe_value_bytes(size));
        tl_serving_ops.closed(&worker.serving, &newer, TL_SERVE_RECEIVED);
        newer.step = 1;
        newer.is_final = false;
        tl_serving_ops.request(&worker.serving, &newer);
        ck_assert_uint_eq(newer_answers, 1);
        tl_serving_ops.closed(&worker.serving, &newer, TL_SERVE_CANCELLED);
    }
    tl_probe_values_fini(&worker.sources.probe_values);
    serve.source_state = NULL; /* it is over */
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- devices -- */

static struct tl_sender sender;
static unsigned over_count;

static void over(struct tl_sender *of, const struct tl_error *status)
{
    (void)of, (void)status;
    over_count++;
}

/* A one-shot value on a device is asked for. */
static void ask_for_device(struct tl_serving *serving, uint64_t size_bytes)
{
    setup_cuda();
    struct tl_tensor *on_gpu = bytes_on(gpu0, size_bytes);
    sender.over = over;
    ck_assert_int_eq(tl_rendezvous_send(worker.table, "key", 1, on_gpu, &sender, NULL), TL_OK);
    tl_tensor_put(on_gpu);
    answers = 0;
    tl_serving_ops.request(serving, &serve);
    ck_assert_uint_eq(answers, 1);
}

/* The receiver asks again over the link, as the same request, for which the value is kept. */
START_TEST(a_transport_that_reaches_no_device)
{
    struct tl_serving transport;
    tl_serving_init(&transport, &worker, &executor);
    ask_for_device(&transport, 100);
    ck_assert_int_eq(answer.code, TL_UNIMPLEMENTED);
    ck_assert_str_eq(answer.message, "the tensor lies on gpu:0");
    ck_assert(!serve.is_final);
    tl_serving_ops.closed(&transport, &serve, TL_SERVE_RECEIVED);
    ck_assert_uint_eq(over_count, 0);
    newer = serve;
    newer.id.number = 2;
    newer_answers = 0;
    tl_serving_ops.request(&worker.serving, &newer);
    ck_assert_uint_eq(newer_answers, 0);
    tl_serving_ops.closed(&worker.serving, &newer, TL_SERVE_CANCELLED);
    newer.id.number = 1;
    newer.takes_devices = true;
    tl_serving_ops.request(&worker.serving, &newer);
    ck_assert_uint_eq(newer_answers, 1);
    ck_assert_uint_eq(newer_bytes, 100);
    tl_serving_ops.closed(&worker.serving, &newer, TL_SERVE_RECEIVED);
    ck_assert_uint_eq(over_count, 0);
    end_round();
    ck_assert_uint_eq(over_count, 1);
    serve.source_state = NULL; /* it is over */
}
END_TEST

/* Nothing else can carry the value to it: the value is for others. */
START_TEST(a_call_that_reaches_no_device)
{
    ask_for_device(&worker.serving, 100);
    ck_assert_int_eq(answer.code, TL_UNIMPLEMENTED);
    ck_assert_ptr_nonnull(strstr(answer.message, "lies on gpu:0"));
    ck_assert(serve.is_final);
    tl_serving_ops.closed(&worker.serving, &serve, TL_SERVE_RECEIVED);
    ck_assert_uint_eq(over_count, 0);
    ck_assert(tl_rendezvous_unsend(worker.table, &sender));
    serve.source_state = NULL; /* it is over */
}
END_TEST

START_TEST(no_bytes_lie_nowhere)
{
    ask_for_device(&worker.serving, 0);
    ck_assert_int_eq(answer.code, TL_OK);
    tl_serving_ops.closed(&worker.serving, &serve, TL_SERVE_RECEIVED);
    end_round();
    serve.source_state = NULL; /* it is over */
}
END_TEST

/* --------------------------------------------------------------------------------------------- what was received -- */

#define SENT_COUNT (TL_SERVING_RECEIVED + 1)

/* Sends a value, which a peer asks for and receives. */
static void deliver(struct tl_sender *from, struct tl_serve *to, uint64_t step)
{
    from->over = over;
    *to = (struct tl_serve){.ops = &ops, .id = {.number = 100 + step}, .peer = &peer, .key = "sent", .step = step};
    ck_assert_int_eq(tl_rendezvous_send(worker.table, to->key, step, tensor, from, NULL), TL_OK);
    newer = *to;
    newer_answers = 0;
    tl_serving_ops.request(&worker.serving, &newer);
    ck_assert_uint_eq(newer_answers, 1);
    tl_serving_ops.closed(&worker.serving, &newer, TL_SERVE_RECEIVED);
}

/* A few values are acknowledged at the end of the round, and many at once. */
START_TEST(many_values_are_received_together)
{
    static struct tl_sender senders[SENT_COUNT];
    static struct tl_serve serves[SENT_COUNT];
    for (uint64_t i = 0; i < TL_SERVING_RECEIVED; i++) {
        ck_assert_uint_eq(over_count, 0);
        deliver(&senders[i], &serves[i], i);
    }
    ck_assert_uint_eq(over_count, TL_SERVING_RECEIVED);
    deliver(&senders[SENT_COUNT - 1], &serves[SENT_COUNT - 1], SENT_COUNT - 1);
    ck_assert_uint_eq(over_count, TL_SERVING_RECEIVED);
    end_round();
    ck_assert_uint_eq(over_count, SENT_COUNT);
    serve.source_state = NULL; /* it is over */
}
END_TEST

/* A value that was received does not fail because the worker closes. */
START_TEST(received_before_and_while_the_worker_closes)
{
    static struct tl_sender senders[2];
    static struct tl_serve serves[2];
    senders[1].over = over;
    serves[1] = (struct tl_serve){.ops = &ops, .id = {.number = 102}, .peer = &peer, .key = "sent", .step = 2};
    ck_assert_int_eq(tl_rendezvous_send(worker.table, "sent", 2, tensor, &senders[1], NULL), TL_OK);
    newer = serves[1];
    tl_serving_ops.request(&worker.serving, &newer);
    serves[1] = newer;
    deliver(&senders[0], &serves[0], 1);
    ck_assert_uint_eq(over_count, 0);
    tl_serving_close(&worker.serving);
    ck_assert_uint_eq(over_count, 1);
    tl_serving_ops.closed(&worker.serving, &serves[1], TL_SERVE_RECEIVED);
    ck_assert_uint_eq(over_count, 2);
    end_round();
    ck_assert_uint_eq(over_count, 2);
    serve.source_state = NULL; /* it is over */
}
END_TEST

/* What was received before a receiver gives up is not offered again. */
START_TEST(received_before_it_is_given_up)
{
    static struct tl_sender sender_of_one;
    static struct tl_serve served_once;
    deliver(&sender_of_one, &served_once, 1);
    ck_assert_uint_eq(over_count, 0);
    tl_serving_ops.given_up(&worker.serving, &served_once.id);
    ck_assert_uint_eq(over_count, 1);
    ck_assert(!tl_rendezvous_unsend(worker.table, &sender_of_one));
    end_round();
    ck_assert_uint_eq(over_count, 1);
    serve.source_state = NULL; /* it is over */
}
END_TEST

/* The loop learns in the same round that receivers are gone, so that it acknowledges at once. */
START_TEST(the_loop_acknowledges_at_once)
{
    static struct tl_sender sender_of_one;
    static struct tl_serve served_once;
    worker.serving.executor = &loop_executor;
    deliver(&sender_of_one, &served_once, 1);
    ck_assert_uint_eq(over_count, 1);
    tl_serving_ops.received(&worker.serving, &served_once.id);
    ck_assert_uint_eq(over_count, 1);
    serve.source_state = NULL; /* it is over */
}
END_TEST

START_TEST(a_peer_that_may_not_read_gets_no_value)
{
    static const char text[] =
        "{\"cluster\": {\"ps\": [\"a:1\"], \"worker\": [\"b:1\"]}, \"security\": {\"tls\": {\"ca\": "
        "\"c\", \"certificate\": \"c\", \"key\": \"k\"}, \"allow\": [{\"who\": "
        "[\"task:worker:0\"], \"what\": [\"read\"]}]}}";
    struct tl_config *config;
    struct tl_identity stranger = {.source = TL_IDENTITY_CLAIMED, .name = "/job:worker/task:0"};
    struct tl_identity reader = {
        .source = TL_IDENTITY_PROVEN, .certified = "/job:worker/task:0", .is_member = true, .incarnation = 7};
    ck_assert_int_eq(tl_config_parse(text, strlen(text), "f", NULL, &config, NULL), TL_OK);
    ck_assert_int_eq(tl_permissions_create(config, &config->tasks[0].settings.security, "/job:ps/task:0",
                                           &worker.members.permissions, NULL),
                     TL_OK);
    publish();
    serve.peer = &stranger;
    ask();
    ck_assert_uint_eq(answers, 1);
    ck_assert_int_eq(answer.code, TL_PERMISSION_DENIED);
    ck_assert(serve.is_final);
    ck_assert_ptr_null(serve.source_state);
    ck_assert_uint_eq(tl_permissions_refused(worker.members.permissions), 1);
    serve.peer = &reader;
    serve.is_final = false;
    ask();
    ck_assert_int_eq(answer.code, TL_OK);
    ck_assert_uint_eq(tl_permissions_refused(worker.members.permissions), 1);
    tl_serving_ops.closed(&worker.serving, &serve, TL_SERVE_RECEIVED);
    serve.source_state = NULL; /* it is over */
    tl_permissions_destroy(worker.members.permissions);
    tl_config_destroy(config);
}
END_TEST

/* A part of a tensor of which the transport has a copy is not taken for the whole. */
START_TEST(part_of_a_tensor_with_a_copy)
{
    static const struct tl_memory_options options = {
        .pool_bytes = 65536, .max_pool_bytes = 131072, .max_cached_bytes = 65536, .max_cached_count = 4};
    static const struct tl_meta_data half = {.dtype = TL_U8, .shape = {1, {2}}, .size_bytes = 2};
    struct region_provider provider;
    struct tl_transport transport = {.memory = NULL};
    struct tl_tensor *whole, *part;
    region_provider_init(&provider);
    ck_assert_int_eq(tl_memory_create(&provider.base, &options, &transport.memory, NULL), TL_OK);
    ck_assert_int_eq(tl_tensor_create(TL_U8, 1, (uint64_t[]){4}, &whole, NULL), TL_OK);
    ck_assert_int_eq(tl_transport_copy(&transport, whole, NULL), TL_OK);
    ck_assert_ptr_nonnull(tl_transport_copy_of(whole));
    ck_assert_int_eq(tl_tensor_create_view(whole, &half, 2, true, &part, NULL), TL_OK);
    ck_assert_ptr_null(tl_transport_copy_of(part));
    tl_tensor_put(part);
    tl_tensor_put(whole);
    tl_memory_destroy(transport.memory);
}
END_TEST

/* Asks for a part of the value, and returns how much of the loop's quota the answer has used. */
static uint32_t quota_used_by(struct tl_serving *serving, const char *name)
{
    uint32_t used = tl_loop_quota(worker.loop)->used;
    newer = serve;
    newer.key = name;
    newer.is_final = false;
    newer_answers = 0;
    tl_serving_ops.request(serving, &newer);
    ck_assert_uint_eq(newer_answers, 1);
    tl_serving_ops.closed(serving, &newer, TL_SERVE_RECEIVED);
    return tl_loop_quota(worker.loop)->used - used;
}

/* 1 MiB is copied for several ranges, which counts as 16 members of the control loop's quota, or as what is left of
 * it. A part in one piece is not copied, and a copy by another thread takes none of the loop's time. */
START_TEST(a_copied_part_uses_the_quota)
{
    static const char copied[] = "tensorlane.part/r80000+80000,0+80000/large";
    struct tl_serving transport;
    struct tl_tensor *large;
    ck_assert_int_eq(tl_loop_create(&worker.loop, NULL), TL_OK);
    worker.sources.pushed = tl_shares_create("limits.held", 4 << 20);
    ck_assert_int_eq(tl_tensor_create(TL_U8, 1, (uint64_t[]){1 << 20}, &large, NULL), TL_OK);
    memset(tl_tensor_data(large), 1, 1 << 20);
    ck_assert_int_eq(tl_rendezvous_publish(worker.table, "large", 1, large, NULL, NULL), TL_OK);
    tl_serving_init(&transport, &worker, &executor);
    ck_assert_uint_eq(quota_used_by(&worker.serving, copied), 16);
    ck_assert_uint_eq(quota_used_by(&worker.serving, "tensorlane.part/r0+80000/large"), 0);
    ck_assert_uint_eq(quota_used_by(&transport, copied), 0);
    tl_quota_use(tl_loop_quota(worker.loop), tl_quota_left(tl_loop_quota(worker.loop)) - 5);
    ck_assert_uint_eq(quota_used_by(&worker.serving, copied), 5);
    ck_assert_uint_eq(tl_shares_used(worker.sources.pushed), 0);
    ck_assert_int_eq(tl_rendezvous_withdraw(worker.table, "large", NULL), TL_OK);
    tl_tensor_put(large);
    tl_serving_fini(&transport);
    tl_shares_destroy(worker.sources.pushed);
    tl_loop_destroy(worker.loop);
    serve.source_state = NULL; /* it is over */
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("serving");
    TCase *tcase = tcase_create("serving");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, waits_again);
    tcase_add_test(tcase, the_same_request_on_a_newer_link_goes_on_waiting);
    tcase_add_test(tcase, of_two_that_ask_again_the_newer_goes_on_waiting);
    tcase_add_test(tcase, the_worker_closes_while_it_waits_again);
    tcase_add_test(tcase, asks_again_while_the_worker_closes);
    tcase_add_test(tcase, gets_what_there_is_while_the_worker_closes);
    tcase_add_test(tcase, a_probe_is_answered_at_once);
    tcase_add_test(tcase, a_transport_that_reaches_no_device);
    tcase_add_test(tcase, a_call_that_reaches_no_device);
    tcase_add_test(tcase, no_bytes_lie_nowhere);
    suite_add_tcase(suite, tcase);
    add_own_case(suite, "part_of_a_tensor_with_a_copy", NULL, NULL, part_of_a_tensor_with_a_copy);
    add_own_case(suite, "a_copied_part_uses_the_quota", setup, teardown, a_copied_part_uses_the_quota);
    add_own_case(suite, "received_before_it_is_given_up", setup, teardown, received_before_it_is_given_up);
    add_own_case(suite, "the_loop_acknowledges_at_once", setup, teardown, the_loop_acknowledges_at_once);
    add_own_case(suite, "many_values_are_received_together", setup, teardown, many_values_are_received_together);
    add_own_case(suite, "received_before_and_while_the_worker_closes", setup, teardown,
                 received_before_and_while_the_worker_closes);
    TCase *refusals = tcase_create("a_peer_that_may_not_read_gets_no_value");
    tcase_add_checked_fixture(refusals, setup, teardown);
    tcase_add_test(refusals, a_peer_that_may_not_read_gets_no_value);
    suite_add_tcase(suite, refusals);
    return run_suite(suite);
}
