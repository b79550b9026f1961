// SPDX-License-Identifier: Apache-2.0
/*
 * Everything at once, at random: three workers exchange tensors through connections that break, are cancelled, come to
 * their deadlines, have their steps aborted, and are started again.
 *
 * Whatever happens: every operation completes once; a tensor that is received is whole; a send that succeeded was
 * received, and nothing is received twice; nothing is left over. The seed is in the message of a failure;
 * CHAOS_SEED=n repeats it as far as threads and networks repeat.
 */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "fakes/cluster.h"
#include "fakes/proxy.h"
#include "fakes/run_suite.h"

#define WORKERS 3
#define PAIRS 300
#define ROUNDS 6

/* A tensor that one worker sends and another one receives. */
struct pair {
    unsigned from;
    unsigned to;
    uint64_t step;
    uint64_t size_bytes;
    tl_op_id send_op;
    tl_op_id recv_op;
    int send_status; /* -1: not completed. */
    int recv_status;
};

static struct cluster cluster;
static struct proxy proxies[WORKERS];
static struct tl_cq *cq;
static struct pair pairs[PAIRS];
static uint64_t seed;
static uint64_t random_state;

/* Returns a random number below `limit`. */
static unsigned pick(unsigned limit)
{
    random_state = random_state * UINT64_C(6364136223846793005) + 1442695040888963407;
    return (unsigned)((random_state >> 33) % limit);
}

static uint64_t pick_size(void)
{
    static const uint64_t limits[] = {1, 300, 5000, 100000, 3000000};
    return pick((unsigned)limits[pick(5)]);
}

static int64_t pick_timeout(void)
{
    return pick(4) == 0 ? (int64_t)pick(200) * 1000 * 1000 : CLUSTER_LONG;
}

/* ---------------------------------------------------------------------------------------------------- starting -- */

static void start_send(struct pair *pair, unsigned number)
{
    struct tl_tensor *tensor = cluster_tensor(pair->size_bytes, number);
    enum tl_status status = tl_send(cluster.workers[pair->from], "chaos", pair->step, tensor, pick_timeout(), cq, pair,
                                    &pair->send_op, NULL);
    ck_assert_int_eq(status, TL_OK);
    tl_tensor_put(tensor);
}

static void start_recv(struct pair *pair)
{
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .wants_checksum = pick(2) == 0};
    enum tl_status status = tl_recv(cluster.workers[pair->to], cluster_peer(cluster.workers[pair->to], pair->from),
                                    "chaos", pair->step, &options, pick_timeout(), cq, pair, &pair->recv_op, NULL);
    ck_assert_int_eq(status, TL_OK);
}

static void start_pair(unsigned number, unsigned round)
{
    struct pair *pair = &pairs[number];
    *pair = (struct pair){.from = pick(WORKERS),
                          .to = pick(WORKERS),
                          .step = round * PAIRS + number,
                          .size_bytes = pick_size(),
                          .send_status = -1,
                          .recv_status = -1};
    if (pick(2) == 0) {
        start_send(pair, number);
        start_recv(pair);
    } else {
        start_recv(pair);
        start_send(pair, number);
    }
}

/* -------------------------------------------------------------------------------------------------- disturbing -- */

static void disturb(unsigned started)
{
    struct pair *pair = &pairs[pick(started)];
    struct proxy *proxy = &proxies[pick(WORKERS)];
    enum tl_status status = TL_OK;
    switch (pick(12)) {
    case 0:
        status = tl_cancel(cluster.workers[pair->from], pair->send_op);
        break;
    case 1:
        status = tl_cancel(cluster.workers[pair->to], pair->recv_op);
        break;
    case 2:
        status = tl_worker_abort_step(cluster.workers[pair->from], pair->step, TL_ABORTED, "chaos", NULL);
        break;
    case 3:
        status = tl_worker_end_step(cluster.workers[pair->from], pair->step, NULL, NULL);
        break;
    case 4:
        proxy_limit(proxy, PROXY_DOWN, pick(2000000));
        break;
    case 5:
        proxy_limit(proxy, PROXY_UP, pick(20000));
        break;
    case 6:
        proxy_cut(proxy);
        break;
    case 7:
        proxy_cut_near(proxy);
        break;
    default:
        proxy_limit(proxy, PROXY_DOWN, UINT64_MAX);
        proxy_limit(proxy, PROXY_UP, UINT64_MAX);
        proxy_cut_broken(proxy);
        break;
    }
    ck_assert(status == TL_OK || status == TL_NOT_FOUND);
}

static void heal(void)
{
    for (unsigned i = 0; i < WORKERS; i++) {
        proxy_limit(&proxies[i], PROXY_DOWN, UINT64_MAX);
        proxy_limit(&proxies[i], PROXY_UP, UINT64_MAX);
        proxy_cut_broken(&proxies[i]);
    }
}

/* ---------------------------------------------------------------------------------------------------- checking -- */

static void note(struct tl_completion *completion)
{
    struct pair *pair = completion->user_data;
    int *status = completion->kind == TL_OP_SEND ? &pair->send_status : &pair->recv_status;
    ck_assert_msg(*status == -1, "seed %llu: completed twice", (unsigned long long)seed);
    *status = (int)completion->status.code;
    if (completion->tensor == NULL) return;
    ck_assert_msg(cluster_tensor_is(completion->tensor, pair->size_bytes, (unsigned)(pair - pairs)),
                  "seed %llu: another tensor of step %llu", (unsigned long long)seed, (unsigned long long)pair->step);
    tl_tensor_put(completion->tensor);
}

static void take_completions(unsigned *open)
{
    struct tl_completion completion;
    while (tl_cq_poll(cq, &completion, 1) == 1) {
        note(&completion);
        (*open)--;
    }
}

static void check_pairs(void)
{
    for (unsigned i = 0; i < PAIRS; i++) {
        bool is_right = pairs[i].send_status != TL_OK || pairs[i].recv_status == TL_OK;
        ck_assert_msg(is_right, "seed %llu: step %llu: sent, but the receive ended with %s", (unsigned long long)seed,
                      (unsigned long long)pairs[i].step, tl_status_name((enum tl_status)pairs[i].recv_status));
    }
}

static void expect_nothing_left(void)
{
    for (unsigned i = 0; i < WORKERS; i++) {
        CLUSTER_UNTIL(cluster_stats(cluster.workers[i]).waiting_receivers == 0);
        struct tl_worker_stats stats = cluster_stats(cluster.workers[i]);
        ck_assert_uint_eq(stats.open_operations, 0);
        ck_assert_uint_eq(stats.held_tensors, 0);
        ck_assert_uint_eq(stats.held_bytes, 0);
        ck_assert_uint_eq(stats.protocol_errors, 0);
    }
}

/* Cancels the other half of pairs of which one half has failed. */
static void end_halves(void)
{
    for (unsigned i = 0; i < PAIRS; i++) {
        struct pair *pair = &pairs[i];
        enum tl_status status = TL_OK;
        if (pair->send_status == -1 && pair->recv_status > TL_OK) {
            status = tl_worker_end_step(cluster.workers[pair->from], pair->step, NULL, NULL);
        } else if (pair->recv_status == -1 && pair->send_status > TL_OK) {
            status = tl_cancel(cluster.workers[pair->to], pair->recv_op);
        }
        ck_assert(status == TL_OK || status == TL_NOT_FOUND);
    }
}

static void run_round(unsigned round)
{
    unsigned open = 0;
    for (unsigned i = 0; i < PAIRS; i++) {
        start_pair(i, round);
        open += 2;
        if (pick(2) == 0) disturb(i + 1);
        if (pick(8) == 0) cluster_pause();
        take_completions(&open);
    }
    heal();
    int64_t until_ns = cluster_now_ns() + CLUSTER_LONG;
    while (open > 0) {
        ck_assert_msg(cluster_now_ns() < until_ns, "seed %llu: %u operations do not end", (unsigned long long)seed,
                      open);
        take_completions(&open);
        end_halves();
        cluster_pause();
    }
    check_pairs();
    expect_nothing_left();
}

static void restart(unsigned task)
{
    cluster_close(&cluster, task);
    cluster_open(&cluster, task);
}

START_TEST(everything_at_once)
{
    const char *wanted = getenv("CHAOS_SEED");
    seed = wanted != NULL ? strtoull(wanted, NULL, 10) : tl_random_u64();
    random_state = seed;
    cluster_init(&cluster, WORKERS,
                 "\"timeouts\": {\"keepalive\": \"300ms\", \"keepalive_answer\": \"300ms\", \"reservation\": \"2s\"}");
    for (unsigned i = 0; i < WORKERS; i++)
        cluster_use_proxy(&cluster, i, &proxies[i]);
    cluster_open_all(&cluster);
    cq = cluster_cq();
    for (unsigned round = 0; round < ROUNDS; round++) {
        run_round(round);
        if (round % 3 == 2) restart(pick(WORKERS));
    }
    cluster_close_all(&cluster);
    ck_assert(cluster_is_quiet(cq));
    tl_cq_destroy(cq);
    for (unsigned i = 0; i < WORKERS; i++)
        proxy_stop(&proxies[i]);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("worker_chaos");
    TCase *chaos = tcase_create("chaos");
    tcase_add_test(chaos, everything_at_once);
    suite_add_tcase(suite, chaos);
    return run_suite_in_process(suite);
}
