// SPDX-License-Identifier: Apache-2.0
/*
 * Two workers with two data planes each, in one process: which of them carries a pair's tensors, and why. Task 0 sends,
 * task 1 receives, once with threads and once driven by its caller (the loop's index).
 */
#include <check.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "fakes/transport_case.h"
#include "fakes/run_suite.h"

#define LARGE (1 << 20)

static void prepare_both(const char *settings)
{
    prepare(settings);
    transport.has_local = true;
}

static bool driven(struct tl_worker *worker)
{
    (void)!tl_worker_progress(worker, 0);
    return true;
}

static struct tl_completion transfer(uint64_t step)
{
    struct tl_tensor *tensor = cluster_tensor(LARGE, (unsigned)step);
    cluster_send(sender, "probe", step, tensor, sent);
    tl_tensor_put(tensor);
    struct tl_completion got;
    enum tl_status status =
        tl_recv_wait(receiver, cluster_peer(receiver, 0), "probe", step, NULL, CLUSTER_LONG, &got, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    ck_assert(cluster_tensor_is(got.tensor, LARGE, (unsigned)step));
    tl_tensor_put(got.tensor);
    cluster_expect(sent, TL_OK);
    return got;
}

static void expect(uint64_t step, const char *transport, enum tl_path path, const char *reason)
{
    struct tl_completion got = transfer(step);
    const char *used = cluster_peer_info(receiver, 0).transport;
    ck_assert_msg(strcmp(used, transport) == 0, "%s instead of %s: %s", used, transport, got.path_reason);
    ck_assert_msg(got.path == path, "%s instead of %s: %s", tl_path_name(got.path), tl_path_name(path),
                  got.path_reason);
    ck_assert_str_eq(got.path_reason, reason);
}

static bool carries(const char *transport)
{
    return driven(receiver) && strcmp(cluster_peer_info(receiver, 0).transport, transport) == 0;
}

/* Whether a tensor has travelled over verbs, and the next one would. Where local breaks with each message, it may have
 * come up again meanwhile. */
static bool travels_over_verbs(uint64_t step)
{
    struct tl_completion got = transfer(step);
    return got.path == TL_PATH_ZERO_COPY && got.path_reason[0] == '\0' && carries("verbs");
}

static unsigned queue_pairs_of(const struct fake_card *card)
{
    struct fake_counters counters;
    fake_provider_get_counters(card->provider, &counters);
    return counters.queue_pairs;
}

START_TEST(the_first_and_no_other)
{
    prepare_both(NULL);
    open_both(_i);
    expect(1, "local", TL_PATH_ZERO_COPY, "");
    /* Pairs that have the fastest path have no other. */
    ck_assert_uint_eq(queue_pairs_of(&transport.locals[1]), 1);
    ck_assert_uint_eq(queue_pairs_of(&transport.cards[1]), 0);
    teardown();
}
END_TEST

START_TEST(two_hosts)
{
    prepare_both(NULL);
    transport.locals[0].host = 2;
    open_both(_i);
    expect(1, "verbs", TL_PATH_ZERO_COPY, "");
    ck_assert_uint_eq(queue_pairs_of(&transport.locals[1]), 0);
    teardown();
}
END_TEST

START_TEST(two_hosts_without_cards)
{
    prepare_both(NULL);
    transport.locals[0].host = 2;
    transport.cards[0].is_missing = true;
    open_both(_i);
    expect(1, "grpc", TL_PATH_GRPC,
           "local: it is on another host; verbs: /job:node/task:0 refuses the data connection: no RDMA device: the "
           "slot is "
           "empty");
    teardown();
}
END_TEST

/* This worker does not say on which host it is. */
START_TEST(one_without_local)
{
    prepare_both(NULL);
    snprintf(cluster.task_settings[0], sizeof(cluster.task_settings[0]), "\"protocol\": \"grpc+verbs\"");
    open_both(_i);
    expect(1, "verbs", TL_PATH_ZERO_COPY, "");
    teardown();
}
END_TEST

START_TEST(what_is_asked_for_alone)
{
    static const struct {
        const char *settings, *transport, *reason;
    } cases[] = {
        {"\"protocol\": \"grpc+local\"", "local", ""},
        {"\"protocol\": \"grpc+verbs\"", "verbs", ""},
        {"\"protocol\": \"grpc\"", "grpc", "the protocol is grpc"},
        {"\"protocol\": \"grpc+local\", \"rdma\": \"require\"", "local", ""},
        {"\"rdma\": \"require\"", "local", ""},
        {"\"rdma\": \"off\"", "local", ""},
    };
    for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        prepare_both(cases[i].settings);
        open_both(_i);
        bool is_grpc = strcmp(cases[i].transport, "grpc") == 0;
        expect(1, cases[i].transport, is_grpc ? TL_PATH_GRPC : TL_PATH_ZERO_COPY, cases[i].reason);
        teardown();
    }
}
END_TEST

START_TEST(local_alone_where_there_is_none)
{
    prepare_both("\"protocol\": \"grpc+local\"");
    transport.locals[0].host = 2;
    open_both(_i);
    expect(1, "grpc", TL_PATH_GRPC, "it is on another host");
    teardown();
}
END_TEST

START_TEST(local_is_required_where_there_is_none)
{
    prepare_both("\"protocol\": \"grpc+local\", \"rdma\": \"require\"");
    transport.locals[0].host = 2;
    open_both(_i);
    struct tl_completion got;
    enum tl_status status = tl_recv_wait(receiver, cluster_peer(receiver, 0), "w", 1, NULL, CLUSTER_LONG, &got, &error);
    ck_assert_int_eq(status, TL_UNAVAILABLE);
    ck_assert_str_eq(error.message, "rdma is \"require\", but no tensor can travel from /job:node/task:0 over local: "
                                    "it is on another host; repair that, or set rdma to \"prefer\", which allows gRPC");
    teardown();
}
END_TEST

/* A worker can open with one data plane, but not without any. */
START_TEST(all_are_missing_where_one_is_required)
{
    prepare_both("\"rdma\": \"require\"");
    transport.cards[0].is_missing = true;
    transport.locals[0].is_missing = true;
    ck_assert_int_eq(fake_transport_try(&transport, 0, TL_PROGRESS_THREAD, &error), TL_NOT_FOUND);
    ck_assert_str_eq(error.message, "rdma is \"require\", but no tensor can travel from here over local or verbs: "
                                    "local: no RDMA device: the slot is empty; verbs: no RDMA device: the slot is "
                                    "empty; repair that, or set rdma to \"prefer\", which allows gRPC");
    transport.locals[0].is_missing = false;
    open_both(_i);
    expect(1, "local", TL_PATH_ZERO_COPY, "");
    teardown();
}
END_TEST

/* The next data plane is set up, and is left again when the first is back. */
START_TEST(the_first_breaks_and_comes_back)
{
    prepare_both(NULL);
    open_both(_i);
    expect(1, "local", TL_PATH_ZERO_COPY, "");
    struct fake_rule fault = {
        .fault = FAKE_BREAK, .kinds = FAKE_MESSAGE, .times = FAKE_ALWAYS, .provider = transport.locals[0].provider};
    fake_fabric_add_rule(transport.fabric, &fault);
    CLUSTER_UNTIL(travels_over_verbs(2));
    fake_fabric_clear_rules(transport.fabric);
    CLUSTER_UNTIL(carries("local"));
    expect(4, "local", TL_PATH_ZERO_COPY, "");
    teardown();
}
END_TEST

/* The same without a second data plane: tensors travel over gRPC, with the reason. */
START_TEST(the_only_one_breaks_and_comes_back)
{
    prepare_both(NULL);
    transport.cards[0].is_missing = transport.cards[1].is_missing = true;
    open_both(_i);
    expect(1, "local", TL_PATH_ZERO_COPY, "");
    const struct fake_rule fault = {.fault = FAKE_BREAK,
                                    .kinds = FAKE_MESSAGE | FAKE_WRITE,
                                    .times = FAKE_ALWAYS,
                                    .provider = transport.locals[0].provider};
    fake_fabric_add_rule(transport.fabric, &fault);
    CLUSTER_UNTIL((transfer(2), carries("grpc")));
    struct tl_completion got = transfer(3);
    ck_assert_int_eq(got.path, TL_PATH_GRPC);
    ck_assert_msg(strncmp(got.path_reason, "local: ", 7) == 0, "%s", got.path_reason);
    ck_assert_msg(strstr(got.path_reason, "; verbs: no RDMA device: the slot is empty") != NULL, "%s", got.path_reason);
    fake_fabric_clear_rules(transport.fabric);
    CLUSTER_UNTIL(carries("local"));
    expect(4, "local", TL_PATH_ZERO_COPY, "");
    teardown();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("dataplane_choice");
    TCase *tcase = tcase_create("dataplane_choice");
    tcase_set_timeout(tcase, 100);
    const TTest *const tests[] = {the_first_and_no_other,
                                  two_hosts,
                                  two_hosts_without_cards,
                                  one_without_local,
                                  what_is_asked_for_alone,
                                  local_alone_where_there_is_none,
                                  local_is_required_where_there_is_none,
                                  all_are_missing_where_one_is_required,
                                  the_first_breaks_and_comes_back,
                                  the_only_one_breaks_and_comes_back};
    for (unsigned i = 0; i < sizeof(tests) / sizeof(tests[0]); i++)
        tcase_add_loop_test(tcase, tests[i], TL_PROGRESS_THREAD, TL_PROGRESS_CALLER + 1);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
