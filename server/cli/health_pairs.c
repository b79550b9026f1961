// SPDX-License-Identifier: Apache-2.0
/*
 * The pairs of workers: each worker that serves is asked to try its peers. A worker may answer the operator and yet not
 * reach its peers, which is what transfers need.
 *
 * A pair counts as failed only when the operator has found both workers to serve: that a worker is down is said in its
 * own row, and is no fault of those that do not reach it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "server/cli/cluster_tls.h"
#include "server/cli/health.h"
#include "server/cli/health_members.h"

/* For a round of probes, and one that was under way already. */
#define PROBE_TIMEOUT_NS (10 * TL_NS_PER_SEC)
#define PEER_NS (300 * TL_NS_PER_MS)
#define CONNECT_TIMEOUT_NS (5 * TL_NS_PER_SEC)
/* How often a worker is asked again whose results are those of an older round, and how many times: for some 5 s. A
 * worker of a larger cluster than one of 80 keeps its failures for longer. */
#define ASK_PAUSE_NS (300 * TL_NS_PER_MS)
#define MAX_ASKS 17

static bool is_serving(const struct tl_health_finding *finding)
{
    return finding->has_description && finding->verified >= TL_HEALTH_STAGE_SERVING;
}

static struct tl_health_finding *find(struct tl_health_finding *findings, size_t count, const char *name)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(findings[i].task->name, name) == 0) return &findings[i];
    return NULL;
}

/* Tensors to the peer do not travel over a data path, and may take gRPC instead. */
static bool is_over_grpc(const struct tl_peer_probe *probe)
{
    return probe->is_ok && strcmp(probe->stage, TL_PROBE_STAGE_PATH) == 0;
}

/* The failure is from before the first question, and the peer serves now. */
static bool is_old_failure(const struct tl_health_finding *to, const struct tl_peer_probe *probe, int64_t asked_for_ns)
{
    bool has_failed = !probe->is_ok || is_over_grpc(probe);
    return has_failed && probe->age_ns > (uint64_t)asked_for_ns && to != NULL && is_serving(to);
}

static bool has_old_failure(struct tl_health_finding *findings, size_t count, const struct tl_probe_results *probes,
                            int64_t asked_for_ns)
{
    for (size_t i = 0; i < probes->count; i++) {
        const struct tl_peer_probe *probe = &probes->items[i];
        if (is_old_failure(find(findings, count, probe->name), probe, asked_for_ns)) return true;
    }
    return false;
}

/* It says nothing of a peer that has started since. Success with a reason means that the pair was not judged. */
static void drop_old_failures(struct tl_health_finding *findings, size_t count, struct tl_probe_results *probes,
                              int64_t asked_for_ns)
{
    for (size_t i = 0; i < probes->count; i++) {
        struct tl_peer_probe *probe = &probes->items[i];
        const struct tl_health_finding *to = find(findings, count, probe->name);
        if (!is_old_failure(to, probe, asked_for_ns) || to->description.uptime_ns >= probe->age_ns) continue;
        probe->is_ok = true;
        probe->stage[0] = probe->direction[0] = probe->remedy[0] = '\0';
        snprintf(probe->reason, sizeof(probe->reason), "the worker has not tried this peer again in time");
    }
}

/* One ask and the next, until no failure is old, have twice the time of one. */
void tl_health_probe_peers(const struct tl_health_flags *flags, struct tl_health_finding *findings, size_t count,
                           struct tl_health_finding *finding)
{
    if (!is_serving(finding)) return;
    const int64_t by_peers_ns = (int64_t)finding->description.peer_count * PEER_NS;
    const int64_t timeout_ns = by_peers_ns > PROBE_TIMEOUT_NS ? by_peers_ns : PROBE_TIMEOUT_NS;
    struct tl_call_options call = {
        .address = finding->task->address,
        .secure = tl_cluster_tls(),
        .expected_name = finding->task->name,
        .connect_timeout_ns = flags->connect_timeout_ns > 0 ? flags->connect_timeout_ns : CONNECT_TIMEOUT_NS,
        .user_agent = flags->user_agent,
    };
    struct tl_error error;
    bool has_answer = false;
    const int64_t began_ns = tl_clock_now_ns(), deadline_ns = began_ns + 2 * timeout_ns;
    int64_t asked_for_ns = 0; /* when the answer that is kept came */
    int64_t left_ns;
    for (unsigned n = 0; n < MAX_ASKS && (left_ns = tl_clock_remaining_ns(deadline_ns)) > 0; n++) {
        struct tl_probe_results results = {0};
        call.rpc_timeout_ns = left_ns < timeout_ns ? left_ns : timeout_ns;
        if (tl_client_probe(&call, &results, NULL, &error) != TL_OK) break;
        free(finding->probes.items);
        finding->probes = results;
        has_answer = true;
        asked_for_ns = tl_clock_now_ns() - began_ns;
        if (!has_old_failure(findings, count, &finding->probes, asked_for_ns)) break;
        const struct timespec pause = {.tv_nsec = ASK_PAUSE_NS};
        nanosleep(&pause, NULL);
    }
    finding->cannot_probe = !has_answer;
    drop_old_failures(findings, count, &finding->probes, asked_for_ns);
}

/* What `from` found about `to`; NULL: nothing, or no fault. */
static const struct tl_peer_probe *find_fault(const struct tl_health_finding *from, const struct tl_health_finding *to)
{
    for (size_t i = 0; i < from->probes.count; i++) {
        const struct tl_peer_probe *probe = &from->probes.items[i];
        if (!probe->is_ok && strcmp(probe->name, to->task->name) == 0) return probe;
    }
    return NULL;
}

/* The worker has said itself why it has no data path. */
static bool knows_why(const struct tl_health_finding *finding)
{
    return finding->reason[0] != '\0' && finding->stage >= TL_HEALTH_STAGE_TRANSPORTS &&
           finding->stage <= TL_HEALTH_STAGE_PORT;
}

static bool is_about_path(const struct tl_peer_probe *probe)
{
    return strcmp(probe->stage, TL_PROBE_STAGE_PATH) == 0;
}

/* A worker that knows why its data path fails keeps that reason. */
static void set_pair_fault(struct tl_health_finding *finding, const struct tl_peer_probe *probe, const char *reason,
                           const char *remedy)
{
    if (!finding->is_healthy) return;
    if (is_about_path(probe) && knows_why(finding)) {
        finding->is_healthy = false;
    } else {
        tl_health_set_fault(finding, TL_HEALTH_STAGE_PROBE, reason, remedy);
    }
}

static void judge_fault(struct tl_health_finding *from, struct tl_health_finding *to, const struct tl_peer_probe *probe)
{
    char reason[TL_ERROR_MESSAGE_BYTES], remedy[TL_ERROR_MESSAGE_BYTES];
    bool is_tcp = strcmp(probe->stage, "tcp") == 0, is_mutual = find_fault(to, from) != NULL;
    const char *from_name = from->task->name, *to_name = to->task->name;
    if (strcmp(probe->stage, "large") == 0) {
        bool is_to = strcmp(probe->direction, "to") == 0, is_both = strcmp(probe->direction, "both") == 0;
        snprintf(reason, sizeof(reason), "large messages from %s to %s are lost%s: %.700s",
                 is_to || is_both ? from_name : to_name, is_to || is_both ? to_name : from_name,
                 is_both ? ", and the other way round" : "", probe->reason);
    } else if (is_about_path(probe)) {
        snprintf(reason, sizeof(reason), "no tensor travels between %s and %s, because their data path fails: %.700s",
                 from_name, to_name, probe->reason);
    } else {
        snprintf(reason, sizeof(reason), "%s does not reach %s%s, which answers here: %.700s", from_name, to_name,
                 is_mutual ? ", nor the other way round" : "", probe->reason);
    }
    if (is_tcp) {
        snprintf(remedy, sizeof(remedy),
                 "allow TCP to %s from the host of %s in firewalls and security groups, and look at the routes between "
                 "the two",
                 probe->address, from_name);
    } else {
        snprintf(remedy, sizeof(remedy), "%s", probe->remedy);
    }
    set_pair_fault(from, probe, reason, remedy);
    set_pair_fault(to, probe, reason, remedy);
}

/* Whether the settings of both want what the probe has tried. */
static bool is_wanted(const struct tl_config *config, const struct tl_health_finding *from,
                      const struct tl_peer_probe *probe)
{
    return !is_about_path(probe) || tl_health_wants_path(config, from, probe->name);
}

/* Tells of the data paths of a healthy worker that fail, as of those that were not set up (judge_paths). */
static void tell_paths(const struct tl_config *config, struct tl_health_finding *from)
{
    const struct tl_peer_probe *first = NULL;
    size_t failed_count = 0;
    char more[64] = "";
    for (size_t i = 0; i < from->probes.count; i++) {
        const struct tl_peer_probe *probe = &from->probes.items[i];
        if (!is_over_grpc(probe) || !is_wanted(config, from, probe)) continue;
        if (failed_count++ == 0) first = probe;
    }
    if (first == NULL || !from->is_healthy || from->stage < TL_HEALTH_STAGE_TRANSPORTS || knows_why(from)) return;
    if (failed_count > 1) snprintf(more, sizeof(more), ", and to %zu more", failed_count - 1);
    snprintf(from->reason, sizeof(from->reason), "over grpc to %.128s%s: %.700s", first->name, more, first->reason);
    snprintf(from->remedy, sizeof(from->remedy), "%s", first->remedy);
    from->stage = TL_HEALTH_STAGE_PATHS;
}

void tl_health_judge_pairs(const struct tl_config *config, struct tl_health_finding *findings, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        /* What is wrong with this worker alone is no fault of its peers. */
        bool is_own_fault = !findings[i].is_healthy && knows_why(&findings[i]);
        for (size_t j = 0; j < findings[i].probes.count; j++) {
            const struct tl_peer_probe *probe = &findings[i].probes.items[j];
            struct tl_health_finding *to = probe->is_ok ? NULL : find(findings, count, probe->name);
            if (to == NULL || !is_serving(to) || !is_wanted(config, &findings[i], probe)) continue;
            if (is_own_fault && is_about_path(probe)) continue;
            judge_fault(&findings[i], to, probe);
        }
        tell_paths(config, &findings[i]);
    }
}
