// SPDX-License-Identifier: Apache-2.0
/*
 * A worker tries the data paths to its peers when it is asked to probe them: one that is up and idle, one that is not
 * set up yet, one that has died, and one over which large writes are lost. What works is not disturbed.
 */
#include <check.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "control/client.h"
#include "control/internal.h"
#include "fakes/transport_case.h"
#include "fakes/run_suite.h"
#include "server/worker_internal.h"

#define LARGE (1 << 20)
#define EAGER "\"connect\": \"eager\""
#define LAZY "\"connect\": \"lazy\""
/* Each side of a handshake says it in its own words. */
#define BLOCKED "arrives through card"
#define REQUIRE ", \"rdma\": \"require\""

static struct tl_peer_probe found; /* what the receiver says about the sender */
static unsigned rounds;            /* how often it was asked, and has tried the path at most */
static char address[64];           /* where the receiver listens */
static const struct tl_call_options options = {
    .address = address, .connect_timeout_ns = CLUSTER_LONG, .rpc_timeout_ns = CLUSTER_LONG};

static void begin(const char *settings)
{
    prepare(settings);
    rounds = 0;
    snprintf(address, sizeof(address), "127.0.0.1:%u", cluster.ports[1]);
}

/* Asks the receiver to probe its peers. One of them, the third task, does not run. */
static void probe_once(void)
{
    struct tl_probe_results results;
    enum tl_status status = tl_client_probe(&options, &results, NULL, &error);
    rounds++;
    ck_assert_msg(status == TL_OK, "%s", error.message);
    ck_assert_uint_eq(results.count, 2);
    ck_assert_str_eq(results.items[0].name, cluster_task_name(0));
    ck_assert_str_eq(results.items[1].stage, "tcp");
    found = results.items[0];
    free(results.items);
}

/* On a busy machine an Echo may take longer than a second, and then nothing is said of the path. */
static void probe(void)
{
    int64_t until_ns = cluster_now_ns() + CLUSTER_LONG;
    do {
        probe_once();
    } while (found.stage[0] != '\0' && strcmp(found.stage, "path") != 0 && cluster_now_ns() < until_ns);
}

/* The same once what was found before does not hold any more. */
static void probe_again(void)
{
    uint64_t age_ns;
    do {
        cluster_pause();
        age_ns = found.age_ns;
        probe();
    } while (found.age_ns > age_ns);
}

static void expect_ok(void)
{
    ck_assert_msg(found.is_ok && found.stage[0] == '\0' && found.reason[0] == '\0', "%s: %s", found.stage,
                  found.reason);
}

/* The reason has this in it, or that the machine was too busy for it to be found. */
static void expect_failure(bool is_ok, const char *reason)
{
    bool is_busy = strstr(found.reason, "was not set up in time") != NULL;
    ck_assert_msg(found.is_ok == is_ok, "%s: %s", found.stage, found.reason);
    ck_assert_str_eq(found.stage, "path");
    ck_assert_str_eq(found.direction, "both");
    ck_assert_msg(is_busy || strstr(found.reason, reason) != NULL, "\"%s\" lacks \"%s\"", found.reason, reason);
    ck_assert_str_ne(found.remedy, "");
}

static bool is_up(void)
{
    return strcmp(cluster_peer_info(receiver, 0).transport, "verbs") == 0;
}

/* Applies to what the sender's card, or each card, sends from now on. */
static void lose(unsigned kinds, uint64_t min_bytes, const struct tl_provider *provider)
{
    const struct fake_rule rule = {
        .fault = FAKE_DROP, .kinds = kinds, .provider = provider, .times = FAKE_ALWAYS, .min_bytes = min_bytes};
    fake_fabric_add_rule(transport.fabric, &rule);
}

/* A counter of the receiver. */
static uint64_t counter(const char *name)
{
    struct tl_description description = {0};
    uint64_t value = UINT64_MAX;
    ck_assert_int_eq(tl_client_identify(&options, &description, NULL, &error), TL_OK);
    for (size_t i = 0; i < description.counter_count; i++)
        if (strcmp(description.counters[i].name, name) == 0) value = description.counters[i].value;
    tl_description_fini(&description);
    return value;
}

/* Each round receives at most so many values, and the last one has received all of these. */
static void expect_probed(uint64_t before, unsigned values)
{
    uint64_t received = counter("data_tensors_received") - before;
    ck_assert_uint_ge(received, values);
    ck_assert_uint_le(received, (uint64_t)rounds * values);
}

static void receive_one(uint64_t step, enum tl_path path)
{
    struct tl_completion got;
    struct tl_tensor *tensor = cluster_tensor(LARGE, (unsigned)step);
    cluster_send(sender, "w", step, tensor, sent);
    tl_tensor_put(tensor);
    enum tl_status status =
        tl_recv_wait(receiver, cluster_peer(receiver, 0), "w", step, NULL, CLUSTER_LONG, &got, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    ck_assert_msg(got.path == path, "%s: %s", tl_path_name(got.path), got.path_reason);
    tl_tensor_put(got.tensor);
    cluster_expect(sent, TL_OK);
}

/* Both values have come over the path, which is the same as before. */
START_TEST(a_path_that_works)
{
    begin(EAGER);
    open_both(TL_PROGRESS_THREAD);
    CLUSTER_UNTIL(is_up());
    uint64_t before = counter("data_tensors_received");
    probe();
    expect_ok();
    expect_probed(before, 2);
    ck_assert_uint_eq(counter("data_connections_broken"), 0);
    receive_one(1, TL_PATH_ZERO_COPY);
    teardown();
}
END_TEST

/* The probe sets up what a receive would. */
START_TEST(a_path_that_nothing_has_wanted_yet)
{
    begin(LAZY);
    open_both(TL_PROGRESS_THREAD);
    ck_assert(!is_up());
    probe();
    expect_ok();
    ck_assert(is_up());
    expect_probed(0, 2);
    teardown();
}
END_TEST

/* Nothing has told the worker that the path is dead. Tensors go on over gRPC while the probe waits, and without a
 * fault, once it has come back, it is well. */
START_TEST(a_path_that_died_while_it_was_idle)
{
    begin(_i == 0 ? EAGER : EAGER REQUIRE);
    transport.peer_timeout_ns = 200 * TL_NS_PER_MS;
    transport.attempt_ns = CLUSTER_SECOND;
    open_both(TL_PROGRESS_THREAD);
    CLUSTER_UNTIL(is_up());
    lose(0, 0, NULL);
    ck_assert(is_up());
    probe();
    expect_failure(_i == 0, BLOCKED);
    if (_i == 0) receive_one(1, TL_PATH_GRPC);
    fake_fabric_clear_rules(transport.fabric);
    CLUSTER_UNTIL(is_up());
    CLUSTER_UNTIL((probe_again(), found.stage[0] == '\0'));
    expect_ok();
    teardown();
}
END_TEST

START_TEST(a_path_that_never_came_up)
{
    begin(_i == 0 ? LAZY : LAZY REQUIRE);
    transport.attempt_ns = CLUSTER_SECOND;
    open_both(TL_PROGRESS_THREAD);
    lose(0, 0, NULL);
    probe();
    expect_failure(_i == 0, BLOCKED);
    teardown();
}
END_TEST

/* Returns whether 256 bytes have passed, of which a path that broke before says nothing. */
static bool passes_small_writes_only(void)
{
    begin(EAGER);
    transport.peer_timeout_ns = CLUSTER_SECOND;
    transport.attempt_ns = CLUSTER_SECOND;
    open_both(TL_PROGRESS_THREAD);
    CLUSTER_UNTIL(is_up());
    uint64_t before = counter("data_tensors_received");
    lose(FAKE_WRITE, 4096, transport.cards[0].provider);
    probe();
    expect_failure(true, "");
    bool has_passed = counter("data_tensors_received") > before;
    if (has_passed) expect_probed(before, 1);
    teardown();
    return has_passed;
}

/* 256 bytes pass, 64 KiB do not. */
START_TEST(a_path_that_loses_large_writes)
{
    CLUSTER_UNTIL(passes_small_writes_only());
}
END_TEST

/* A peer of an older release would wait for a value that never comes. */
START_TEST(a_peer_that_serves_no_probes)
{
    begin(LAZY);
    open_both(TL_PROGRESS_THREAD);
    sender->control->options.self.serves_probes = false;
    probe();
    expect_ok();
    ck_assert(is_up());
    ck_assert_uint_eq(counter("data_tensors_received"), 0);
    teardown();
}
END_TEST

/* What waits for memory says nothing of the path. The smaller value comes inside of a message, and needs no memory of
 * the pool. */
START_TEST(a_pool_that_is_full)
{
    enum { FULL = 4 };
    struct tl_tensor *results[FULL];
    begin(EAGER REQUIRE);
    transport.pool_bytes = FULL * LARGE;
    open_both(TL_PROGRESS_THREAD);
    for (uint64_t step = 0; step < FULL; step++) {
        struct tl_tensor *tensor = cluster_tensor(LARGE, (unsigned)step);
        cluster_send(sender, "w", step, tensor, sent);
        tl_tensor_put(tensor);
        results[step] = cluster_recv_wait(receiver, 0, "w", step);
        cluster_expect(sent, TL_OK);
    }
    probe();
    expect_ok();
    expect_probed(FULL, 1);
    ck_assert_uint_eq(counter("data_connections_broken"), 0);
    for (uint64_t step = 0; step < FULL; step++)
        tl_tensor_put(results[step]);
    probe_again();
    expect_ok();
    ck_assert_uint_ge(counter("data_tensors_received"), FULL + 3);
    teardown();
}
END_TEST

/* With settings under which it takes long until a path is given up, the probe says what it knows. */
START_TEST(a_peer_that_does_not_answer)
{
    begin(EAGER REQUIRE);
    transport.cancel_ns = CLUSTER_LONG;
    open_both(TL_PROGRESS_THREAD);
    CLUSTER_UNTIL(is_up());
    lose(FAKE_MESSAGE, 0, transport.cards[0].provider);
    probe();
    expect_failure(false, "does not answer a request for 256 bytes over verbs in time");
    ck_assert_str_eq(found.remedy, "its process is overloaded, or packets are lost: look at its log, and at the "
                                   "counters of the ports between the two");
    fake_provider_overrun(transport.cards[0].provider);
    teardown();
}
END_TEST

static bool is_probed;

static void *probe_beside(void *argument)
{
    probe();
    __atomic_store_n(&is_probed, true, __ATOMIC_RELEASE);
    return argument;
}

/* A round waits for longer than this before it gives a path up. */
#define LOOK_NS (2 * CLUSTER_SECOND)

/* While the probe waits for a path to be set up again, tensors take the link at once. */
START_TEST(a_probe_holds_no_receive_up)
{
    pthread_t thread;
    begin(EAGER);
    transport.peer_timeout_ns = 200 * TL_NS_PER_MS;
    open_both(TL_PROGRESS_THREAD);
    CLUSTER_UNTIL(is_up());
    lose(0, 0, NULL);
    int64_t begin_ns = cluster_now_ns();
    ck_assert_int_eq(pthread_create(&thread, NULL, probe_beside, NULL), 0);
    CLUSTER_UNTIL(!is_up());
    for (unsigned i = 0; i < 200; i++) /* until the probe waits, too */
        cluster_pause();
    receive_one(1, TL_PATH_GRPC);
    bool was_probed = __atomic_load_n(&is_probed, __ATOMIC_ACQUIRE);
    ck_assert(!was_probed || cluster_now_ns() - begin_ns > LOOK_NS);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    expect_failure(true, "has been silent for");
    teardown();
}
END_TEST

static void *ask(void *argument)
{
    struct tl_probe_results results;
    struct tl_error reason;
    enum tl_status status = tl_client_probe(&options, &results, NULL, &reason);
    ck_assert_int_eq(status, TL_UNAVAILABLE);
    return argument;
}

/* The worker is closed while the probe waits: for a data connection, or for the answer of the peer. */
START_TEST(a_worker_that_closes_meanwhile)
{
    pthread_t thread;
    begin(_i == 0 ? LAZY : EAGER);
    transport.cancel_ns = transport.peer_timeout_ns = CLUSTER_SECOND;
    open_both(TL_PROGRESS_THREAD);
    if (_i == 1) CLUSTER_UNTIL(is_up());
    lose(FAKE_MESSAGE, 0, NULL);
    ck_assert_int_eq(pthread_create(&thread, NULL, ask, NULL), 0);
    CLUSTER_UNTIL(_i == 1 || cluster_peer_info(receiver, 0).state == TL_PEER_UP);
    int64_t until_ns = cluster_now_ns() + 300 * TL_NS_PER_MS; /* the probe does not wait much longer than a second */
    while (cluster_now_ns() < until_ns)
        cluster_pause();
    cluster_close(&cluster, 1);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    teardown();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("dataplane_probe");
    TCase *tcase = tcase_create("dataplane_probe");
    tcase_set_timeout(tcase, 120);
    tcase_add_test(tcase, a_path_that_works);
    tcase_add_test(tcase, a_path_that_nothing_has_wanted_yet);
    tcase_add_loop_test(tcase, a_path_that_died_while_it_was_idle, 0, 2);
    tcase_add_loop_test(tcase, a_path_that_never_came_up, 0, 2);
    tcase_add_test(tcase, a_path_that_loses_large_writes);
    tcase_add_test(tcase, a_peer_that_serves_no_probes);
    tcase_add_test(tcase, a_pool_that_is_full);
    tcase_add_test(tcase, a_peer_that_does_not_answer);
    tcase_add_test(tcase, a_probe_holds_no_receive_up);
    tcase_add_loop_test(tcase, a_worker_that_closes_meanwhile, 0, 2);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
