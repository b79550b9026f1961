// SPDX-License-Identifier: Apache-2.0
/*
 * Workers with a data plane and nothing to do sleep. The test reads from them how many rounds their reactor and their
 * loop have made in two seconds, and how often these slept. A thread that polls makes some hundred thousand rounds a
 * second, one that naps a thousand.
 *
 * After a wake-up a reactor spins for a while (verbs.spin), so one case of the test turns that off.
 */
#include <check.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "control/client.h"
#include "fakes/transport_case.h"
#include "fakes/run_suite.h"
#include "server/worker_internal.h"

#define LARGE (1 << 20)
#define LOOK_NS (2 * CLUSTER_SECOND)
/* The most rounds in that time. A hundredth of a core is 20 ms of it; a wake-up takes three rounds, and costs little
 * more than verbs.spin, 50 us. */
#define FEW 500

struct counts {
    uint64_t rounds, sleeps, loop_rounds;
};

/* Returns the counts so far. Asking takes a few rounds itself. */
static struct counts counts_of(unsigned task)
{
    struct tl_description description = {0};
    struct counts counts = {UINT64_MAX, UINT64_MAX, tl_progress_rounds(&cluster.workers[task]->progress)};
    char address[64];
    snprintf(address, sizeof(address), "127.0.0.1:%u", cluster.ports[task]);
    const struct tl_call_options options = {
        .address = address, .connect_timeout_ns = CLUSTER_LONG, .rpc_timeout_ns = CLUSTER_LONG};
    ck_assert_int_eq(tl_client_identify(&options, &description, NULL, &error), TL_OK);
    for (size_t i = 0; i < description.counter_count; i++) {
        const struct tl_counter *counter = &description.counters[i];
        if (strcmp(counter->name, "data_reactor_rounds") == 0) counts.rounds = counter->value;
        if (strcmp(counter->name, "data_reactor_sleeps") == 0) counts.sleeps = counter->value;
    }
    tl_description_fini(&description);
    ck_assert_uint_ne(counts.rounds, UINT64_MAX);
    ck_assert_uint_ne(counts.sleeps, UINT64_MAX);
    return counts;
}

/* Nothing completes meanwhile; a waiting caller drives the receiver. */
static void leave_alone(void)
{
    struct tl_completion got;
    ck_assert_uint_eq(tl_cq_wait(cq, &got, 1, LOOK_NS), 0);
}

static void expect_sleep(const char *when, bool spins)
{
    struct counts before[2];
    for (unsigned task = 0; task < 2; task++)
        before[task] = counts_of(task);
    leave_alone();
    for (unsigned task = 0; task < 2; task++) {
        struct counts counts = counts_of(task);
        counts.rounds -= before[task].rounds;
        counts.sleeps -= before[task].sleeps;
        counts.loop_rounds -= before[task].loop_rounds;
        printf("%s, task %u: %llu rounds and %llu sleeps of the reactor, %llu rounds of the loop\n", when, task,
               (unsigned long long)counts.rounds, (unsigned long long)counts.sleeps,
               (unsigned long long)counts.loop_rounds);
        ck_assert_uint_le(counts.sleeps, FEW);
        if (spins) continue;
        ck_assert_uint_le(counts.rounds, FEW);
        ck_assert_uint_le(counts.loop_rounds, FEW);
    }
}

/* Advances a worker that has no thread; returns true. */
static bool driven(struct tl_worker *worker)
{
    (void)!tl_worker_progress(worker, 0);
    return true;
}

/* The path is up; first nothing is open, then a request waits, so that both sides check that the other one lives. */
START_TEST(workers_without_work_sleep)
{
    struct tl_completion got;
    bool spins = _i / 2 == 1;
    prepare(spins ? "\"rdma\": \"require\"" : "\"rdma\": \"require\", \"verbs\": {\"spin\": \"0\"}");
    transport.peer_timeout_ns = 800 * TL_NS_PER_MS;
    open_both(_i % 2);
    struct tl_tensor *tensor = cluster_tensor(LARGE, 1);
    cluster_publish(sender, "w", 1, tensor);
    tl_tensor_put(tensor);
    enum tl_status status = tl_recv_wait(receiver, cluster_peer(receiver, 0), "w", 1, NULL, CLUSTER_LONG, &got, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    ck_assert_int_eq(got.path, TL_PATH_ZERO_COPY);
    tl_tensor_put(got.tensor);
    expect_sleep("nothing is open", spins);
    cluster_recv(receiver, 0, "never", 1, cq);
    CLUSTER_UNTIL(driven(receiver) && cluster_stats(sender).waiting_receivers == 1);
    expect_sleep("a receive waits", spins);
    teardown();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("dataplane_idle");
    TCase *tcase = tcase_create("dataplane_idle");
    tcase_set_timeout(tcase, 100);
    tcase_add_loop_test(tcase, workers_without_work_sleep, 0, 4);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
