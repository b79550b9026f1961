// SPDX-License-Identifier: Apache-2.0
#include "server/peers/prober.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"
#include "server/peers/path_probe.h"
#include "server/peers/peer_internal.h"

/* One peer is tried at a time, which is soon over where it answers: the workers of a cluster are asked at the same
 * time, and many of them may share a machine, whose processors would be too busy to answer in time. A probe that takes
 * longer than this waits for an answer, and two others may begin for it. Each takes two seconds at most. So 30 peers
 * are tried in 4.5 s, and 63 in 7 s, when none of them answers. */
#define YOUNG_NS (500 * TL_NS_PER_MS)
#define MAX_THREADS 32
#define MIN_ROUND_NS (4500 * TL_NS_PER_MS)
/* The results of a round hold for this long: then probing takes less than 1 % of a network of 1 Gbit/s. */
#define MIN_PAUSE_NS (2 * TL_NS_PER_SEC)
/* Larger clusters get this much time for each peer, for a round. */
#define PEER_NS (150 * TL_NS_PER_MS)
/* The same between two rounds. A round sends and receives some 200 KiB for each peer. */
#define PEER_PAUSE_NS (250 * TL_NS_PER_MS)
#define FAILURE_HOLD_DIVISOR 4 /* results with a failure hold for a quarter of the time */

/* A round belongs to its threads until the last of them has posted it. After tl_prober_stop the last one frees it. */
struct tl_probe_round {
    struct tl_closure closure;
    struct tl_worker *worker;
    struct tl_tls *tls; /* a reference; NULL: none */
    int64_t deadline_ns;
    pthread_mutex_t mutex;  /* guards the next five */
    pthread_cond_t changed; /* a probe has ended */
    bool is_abandoned;
    size_t next;                   /* the first peer that is not being tried yet */
    unsigned holder_count;         /* threads that use the round, and the one that starts them */
    unsigned thread_count;         /* threads that have begun */
    int64_t begun_ns[MAX_THREADS]; /* when the probe of each thread began; 0: it has none */
    size_t first;                  /* the result of the peer that is tried first */
    struct tl_probe_results results;
    /* The loop's. */
    struct tl_path_round *paths; /* NULL: there is none, for lack of memory or after tl_prober_stop */
    bool are_paths_over;
    bool are_threads_over;
};

static int64_t of_peers(size_t count, int64_t peer_ns, int64_t min_ns)
{
    int64_t ns = (int64_t)count * peer_ns;
    return ns > min_ns ? ns : min_ns;
}

/* How long the results hold. Failures hold for a shorter time, since a peer may have started meanwhile. */
static int64_t hold_ns(const struct tl_probe_results *results)
{
    int64_t pause_ns = of_peers(results->count, PEER_PAUSE_NS, MIN_PAUSE_NS);
    for (size_t i = 0; i < results->count; i++)
        if (results->items[i].stage[0] != '\0') return pause_ns / FAILURE_HOLD_DIVISOR;
    return pause_ns;
}

static void round_free(struct tl_probe_round *round)
{
    pthread_cond_destroy(&round->changed);
    pthread_mutex_destroy(&round->mutex);
    tl_tls_release(round->tls);
    free(round->results.items);
    free(round);
}

/* Gives up one part of the round. */
static void leave(struct tl_probe_round *round)
{
    pthread_mutex_lock(&round->mutex);
    bool is_last = --round->holder_count == 0, is_abandoned = round->is_abandoned;
    if (is_last && !is_abandoned) tl_loop_post(round->worker->loop, &round->closure);
    pthread_mutex_unlock(&round->mutex);
    if (is_last && is_abandoned) round_free(round);
}

/* Every worker begins with the peer behind itself, so that those that are asked at the same time do not all try the
 * same peer. */
static struct tl_peer_probe *result_at(const struct tl_probe_round *round, size_t index)
{
    return &round->results.items[(round->first + index) % round->results.count];
}

static bool is_over(const struct tl_probe_round *round)
{
    return round->is_abandoned || round->next >= round->results.count;
}

/* Waits until there are more probes that take long than others, or one has ended. The caller has the mutex. True: there
 * are, or none is under way. */
static bool may_begin(struct tl_probe_round *round)
{
    unsigned young_count = 0, long_count = 0;
    int64_t now_ns = tl_clock_now_ns(), due_ns = INT64_MAX;
    for (unsigned i = 0; i < round->thread_count; i++) {
        if (round->begun_ns[i] == 0) continue;
        int64_t young_until_ns = round->begun_ns[i] + YOUNG_NS;
        bool is_young = young_until_ns > now_ns;
        young_count += is_young;
        long_count += !is_young;
        if (is_young && young_until_ns < due_ns) due_ns = young_until_ns;
    }
    if (young_count <= long_count) return true;
    const struct timespec due = {.tv_sec = due_ns / TL_NS_PER_SEC, .tv_nsec = due_ns % TL_NS_PER_SEC};
    (void)pthread_cond_timedwait(&round->changed, &round->mutex, &due);
    return false;
}

static void *run(void *argument)
{
    struct tl_probe_round *round = argument;
    pthread_mutex_lock(&round->mutex);
    int64_t *begun_ns = &round->begun_ns[round->thread_count++];
    while (!is_over(round)) {
        if (!may_begin(round)) continue;
        size_t index = round->next++;
        *begun_ns = tl_clock_now_ns();
        pthread_mutex_unlock(&round->mutex);
        tl_client_probe_peer(result_at(round, index), round->tls, round->deadline_ns);
        pthread_mutex_lock(&round->mutex);
        *begun_ns = 0;
        pthread_cond_signal(&round->changed);
    }
    pthread_mutex_unlock(&round->mutex);
    leave(round);
    return NULL;
}

/* Adds what is wrong with the data path to a peer that is well over gRPC: no failure where tensors may take the link.
 */
static void add_path(const struct tl_worker *worker, const char *failure, struct tl_peer_probe *item)
{
    if (failure[0] == '\0' || !item->is_ok || item->reason[0] != '\0') return;
    const char *semicolon = strstr(failure, "; ");
    size_t reason_bytes = semicolon != NULL ? (size_t)(semicolon - failure) : strlen(failure);
    item->is_ok = !worker->data_plane.is_transport_required;
    item->ended_ns = tl_clock_now_ns();
    snprintf(item->stage, sizeof(item->stage), TL_PROBE_STAGE_PATH);
    snprintf(item->direction, sizeof(item->direction), "both");
    snprintf(item->reason, sizeof(item->reason), "%.*s", (int)reason_bytes, failure);
    snprintf(item->remedy, sizeof(item->remedy), "%s",
             semicolon != NULL ? semicolon + 2 : "look at the logs of both workers");
}

static void keep(struct worker_probing *probing, const struct tl_probe_results *results)
{
    free(probing->latest.items);
    probing->latest = *results;
    probing->latest_ns = tl_clock_now_ns();
}

static void maybe_over(struct tl_probe_round *round)
{
    if (!round->are_threads_over || !round->are_paths_over) return;
    struct tl_worker *worker = round->worker;
    for (size_t i = 0; round->paths != NULL && i < round->results.count; i++)
        add_path(worker, tl_path_round_reason(round->paths, i), &round->results.items[i]);
    tl_path_round_release(round->paths);
    worker->members.probing.round = NULL;
    keep(&worker->members.probing, &round->results);
    round->results.items = NULL;
    tl_control_probed(worker->control, &worker->members.probing.latest);
    round_free(round);
}

static void paths_over(void *context)
{
    struct tl_probe_round *round = context;
    round->are_paths_over = true;
    maybe_over(round);
}

/* Nothing need be known of the data path to a peer that is not well over gRPC. */
static void give_up_paths(struct tl_probe_round *round)
{
    for (size_t i = 0; round->paths != NULL && i < round->results.count; i++) {
        const struct tl_peer_probe *item = &round->results.items[i];
        if (!item->is_ok || item->reason[0] != '\0') tl_path_round_give_up(round->paths, i);
    }
}

static void threads_over(struct tl_closure *closure)
{
    struct tl_probe_round *round = TL_CONTAINER_OF(closure, struct tl_probe_round, closure);
    /* Waits for the thread to leave the mutex. */
    pthread_mutex_lock(&round->mutex);
    bool is_abandoned = round->is_abandoned;
    pthread_mutex_unlock(&round->mutex);
    if (is_abandoned) {
        round_free(round);
        return;
    }
    /* Those that no thread could be started for. */
    for (size_t i = round->next; i < round->results.count; i++) {
        struct tl_peer_probe *item = result_at(round, i);
        item->ended_ns = tl_clock_now_ns();
        snprintf(item->reason, sizeof(item->reason), "no thread for a probe");
    }
    give_up_paths(round);
    round->are_threads_over = true;
    maybe_over(round);
}

static enum tl_status create(struct tl_worker *worker, struct tl_probe_round **ret_round, struct tl_error *ret_error)
{
    struct tl_probe_round *round = calloc(1, sizeof(*round));
    struct tl_peer_probe *items = calloc(worker->members.peer_count + 1, sizeof(*items));
    if (round == NULL || items == NULL) {
        free(round);
        free(items);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to probe the peers");
    }
    *round = (struct tl_probe_round){.closure = {.run = threads_over},
                                     .worker = worker,
                                     .tls = tl_tls_retain(tl_control_tls(worker->control)),
                                     .holder_count = 1,
                                     .results = {.items = items}};
    pthread_mutex_init(&round->mutex, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&round->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    for (size_t i = 0; i < worker->members.peer_count; i++) {
        const struct tl_peer *peer = worker->members.peers[i];
        if (peer->is_self) round->first = round->results.count;
        if (peer->is_self || peer->address[0] == '\0') continue;
        struct tl_peer_probe *probe = &items[round->results.count++];
        probe->is_ok = true;
        snprintf(probe->name, sizeof(probe->name), "%s", peer->name);
        snprintf(probe->address, sizeof(probe->address), "%s", peer->address);
    }
    round->deadline_ns = tl_clock_deadline_ns(of_peers(round->results.count, PEER_NS, MIN_ROUND_NS));
    *ret_round = round;
    return TL_OK;
}

static void join(struct tl_probe_round *round)
{
    pthread_mutex_lock(&round->mutex);
    round->holder_count++;
    pthread_mutex_unlock(&round->mutex);
}

static void start(struct tl_probe_round *round)
{
    size_t wanted = round->results.count < MAX_THREADS ? round->results.count : MAX_THREADS;
    round->paths =
        tl_path_round_start(round->worker, &round->results, round->first, round->deadline_ns, paths_over, round);
    if (round->paths == NULL) round->are_paths_over = true;
    for (size_t i = 0; i < wanted; i++) {
        join(round);
        if (tl_thread_start("tl-probe", run, round, NULL, NULL) == TL_OK) continue;
        leave(round);
        break;
    }
    leave(round);
}

enum tl_status tl_prober_ask(void *context, const struct tl_probe_results **ret_results, struct tl_error *ret_error)
{
    struct tl_worker *worker = context;
    struct worker_probing *probing = &worker->members.probing;
    if (worker->closing.is_closing) return tl_error_set(ret_error, TL_UNAVAILABLE, "the worker is shutting down");
    *ret_results = NULL;
    if (probing->round != NULL) return TL_OK;
    int64_t age_ns = tl_clock_now_ns() - probing->latest_ns;
    if (probing->latest.items != NULL && age_ns < hold_ns(&probing->latest)) {
        *ret_results = &probing->latest;
        return TL_OK;
    }
    enum tl_status status = create(worker, &probing->round, ret_error);
    if (status == TL_OK) start(probing->round);
    return status;
}

/* Ends the round for the loop. Threads that still try peers free it. */
static void abandon(struct tl_probe_round *round)
{
    tl_path_round_release(round->paths);
    round->paths = NULL;
    if (round->are_threads_over) {
        round_free(round);
        return;
    }
    pthread_mutex_lock(&round->mutex);
    round->is_abandoned = true;
    pthread_mutex_unlock(&round->mutex);
}

void tl_prober_stop(struct tl_worker *worker)
{
    struct tl_probe_round *round = worker->members.probing.round;
    worker->members.probing.round = NULL;
    if (round != NULL) abandon(round);
    tl_control_probed(worker->control, NULL);
}

void tl_prober_fini(struct tl_worker *worker)
{
    free(worker->members.probing.latest.items);
}
