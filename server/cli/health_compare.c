// SPDX-License-Identifier: Apache-2.0
/*
 * What the answers of all workers say together.
 *
 * Each worker was asked by itself, and each may be well while two of them cannot reach each other. A worker tells the
 * state of its peers: a peer that it cannot reach, although that peer has answered here, makes both rows unhealthy. The
 * workers of a cluster start one after the other, so this does not count in their first half minute.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "config/address.h"
#include "server/cli/health.h"
#include "server/cli/health_members.h"
#include "server/cli/remedy.h"

/* Workers of one cluster start within this time, and try each other again within it. */
#define START_NS (UINT64_C(30) * TL_NS_PER_SEC)

static bool has_started(const struct tl_health_finding *finding)
{
    return finding->has_description && finding->verified >= TL_HEALTH_STAGE_SERVING &&
           finding->description.uptime_ns >= START_NS;
}

/* The worker tries to reach the peer, and has failed. */
static bool is_down(const struct tl_peer_description *peer)
{
    return strcmp(peer->state, "down") == 0 || (strcmp(peer->state, "connecting") == 0 && peer->reason[0] != '\0');
}

/* A reason "what is wrong; what to do" becomes both; a row that has a fault of its own keeps it. A question whether the
 * worker is there is no remedy: it has answered here. */
static void set_unreachable(struct tl_health_finding *finding, const char *what, const char *message)
{
    const char *remedy;
    char reason[TL_ERROR_MESSAGE_BYTES];
    int len = (int)tl_remedy_split(message, &remedy);
    if (!finding->is_healthy) return;
    if (remedy[0] == '\0' || strncmp(remedy, "is ", 3) == 0)
        remedy = "both answer from here: look at routes and firewalls between the two, and at the logs of both";
    snprintf(reason, sizeof(reason), "%s: %.*s", what, len, message);
    tl_health_set_fault(finding, TL_HEALTH_STAGE_PATHS, reason, remedy);
}

/* Returns a setting of the worker; NULL: it does not say, or the row's address has another worker. */
static const char *setting_of(const struct tl_health_finding *finding, const char *path)
{
    const struct tl_description *description = &finding->description;
    if (!tl_health_is_identified(finding)) return NULL;
    for (size_t i = 0; i < description->setting_count; i++)
        if (strcmp(description->settings[i].path, path) == 0) return description->settings[i].value;
    return NULL;
}

/* Returns where the worker listens, if other machines cannot reach that; NULL: they can, or it does not say. */
static const char *find_loopback(const struct tl_health_finding *finding)
{
    const struct tl_description *description = &finding->description;
    if (!finding->has_description || description->listen_count == 0) return NULL;
    for (size_t i = 0; i < description->listen_count; i++)
        if (!tl_address_is_loopback(description->listens[i])) return NULL;
    return description->listens[0];
}

/* The two are on different machines, as far as their addresses tell. */
static bool is_remote(const struct tl_config_task *a, const struct tl_config_task *b)
{
    return !tl_address_is_loopback(b->address) && !tl_address_is_same_host(a->address, b->address);
}

static void set_loopback(struct tl_health_finding *finding, const char *what, const char *listens)
{
    snprintf(finding->reason, sizeof(finding->reason), "%sit listens at %s, where other machines cannot reach it", what,
             listens);
    snprintf(finding->remedy, sizeof(finding->remedy),
             "correct /etc/hosts on its machine, so that the host of %s is not a loopback address there, or set "
             "\"listen\"; start it anew afterwards",
             finding->task->address);
}

/* A worker that listens on loopback addresses only, although its cluster has other machines: Debian gives the own name
 * of a machine the address 127.0.1.1. It may reach the others all the same. One that was told to listen there has a
 * process in front of it that forwards its port. */
static void note_loopback(const struct tl_config *config, struct tl_health_finding *finding)
{
    const char *listens = find_loopback(finding), *setting = setting_of(finding, "listen");
    if (!listens || !finding->is_healthy || finding->reason[0] != '\0' || finding->task->settings.listen) return;
    if (setting && tl_address_is_loopback(setting)) return;
    for (size_t i = 0; i < config->task_count; i++) {
        if (!is_remote(finding->task, &config->tasks[i])) continue;
        set_loopback(finding, "", listens);
        return;
    }
}

/* Where a worker looks for a task; "" when it does not say. */
static const char *address_of(const struct tl_description *description, const char *name, size_t hint)
{
    const struct tl_peer_description *peer = tl_health_find_member(description, name, hint);
    return peer ? peer->address : "";
}

/* The two have different addresses for one of them: that may explain why the other one does not reach it. */
static void explain_address(struct tl_health_finding *finding, const struct tl_health_finding *from,
                            const struct tl_health_finding *to, const char *dialled, const char *own)
{
    char first[TL_ADDRESS_BYTES], second[TL_ADDRESS_BYTES];
    struct tl_error error;
    size_t len = strlen(finding->remedy);
    if (tl_address_check(dialled, TL_ADDRESS_DIAL, first, &error) != TL_OK) return;
    if (tl_address_check(own, TL_ADDRESS_DIAL, second, &error) != TL_OK || strcmp(first, second) == 0) return;
    snprintf(finding->remedy + len, sizeof(finding->remedy) - len,
             "; also: %s dials %s at %s, the cluster.json of %s says %s: unless ports are forwarded, give all workers "
             "the same file, and start them anew",
             from->task->name, to->task->name, dialled, to->task->name, own);
}

/* A pair that is not connected, although both of its workers answer. */
static void judge_pair(struct tl_health_finding *from, const struct tl_peer_description *peer,
                       struct tl_health_finding *to)
{
    char what[2 * TL_MAX_NAME_BYTES + TL_MAX_ADDRESS_BYTES];
    const char *reason = peer->reason[0] != '\0' ? peer->reason : "no reason is known";
    const char *dialled = peer->address[0] != '\0' ? peer->address : to->task->address;
    const char *own = address_of(&to->description, to->task->name, 0);
    const char *listens = find_loopback(to);
    if (from->is_healthy) {
        snprintf(what, sizeof(what), "it cannot reach %s at %s", to->task->name, dialled);
        set_unreachable(from, what, reason);
        explain_address(from, from, to, peer->address, own);
    }
    if (!to->is_healthy) return;
    snprintf(what, sizeof(what), "%s cannot reach it at %s", from->task->name, dialled);
    set_unreachable(to, what, reason);
    explain_address(to, from, to, peer->address, own);
    if (!listens || !is_remote(from->task, to->task)) return;
    snprintf(what, sizeof(what), "%s cannot reach it at %s: ", from->task->name, dialled);
    set_loopback(to, what, listens);
}

static void judge_pairs(const struct tl_config *config, struct tl_health_finding *findings)
{
    for (size_t i = 0; i < config->task_count; i++) {
        struct tl_health_finding *from = &findings[i];
        if (!has_started(from)) continue;
        for (size_t j = 0; j < config->task_count; j++) {
            struct tl_health_finding *to = &findings[j];
            const struct tl_peer_description *peer = tl_health_find_member(&from->description, to->task->name, j);
            if (i != j && peer && is_down(peer) && has_started(to)) judge_pair(from, peer, to);
        }
    }
}

/* --------------------------------------------------------------------------------------------------- protocols -- */

/* grpc+gdr uses the transport of grpc+verbs in another way. */
static const char *transport_of(const char *protocol)
{
    return strcmp(protocol, "grpc+gdr") == 0 ? "grpc+verbs" : protocol;
}

/* Both have a transport besides gRPC, and none that the other one has. */
static bool share_grpc_only(const char *own, const char *theirs)
{
    const char *a = transport_of(own), *b = transport_of(theirs);
    bool is_auto = strcmp(a, "auto") == 0 || strcmp(b, "auto") == 0;
    return !is_auto && strcmp(a, "grpc") != 0 && strcmp(b, "grpc") != 0 && strcmp(a, b) != 0;
}

static void judge_protocol(struct tl_health_finding *finding, const struct tl_health_finding *other)
{
    const char *own = setting_of(finding, "protocol"), *theirs = setting_of(other, "protocol");
    const char *rdma = setting_of(finding, "rdma");
    if (!own || !theirs || !share_grpc_only(own, theirs)) return;
    bool is_required = rdma && strcmp(rdma, "require") == 0;
    if (!finding->is_healthy || (!is_required && finding->reason[0] != '\0')) return;
    finding->is_healthy = !is_required;
    finding->stage = TL_HEALTH_STAGE_PATHS;
    snprintf(finding->reason, sizeof(finding->reason),
             "its protocol is \"%.64s\", that of %s is \"%.64s\": the two share gRPC only", own, other->task->name,
             theirs);
    snprintf(finding->remedy, sizeof(finding->remedy), "set the same protocol for both, and start them anew");
}

static void judge_protocols(const struct tl_config *config, struct tl_health_finding *findings)
{
    for (size_t i = 0; i < config->task_count; i++) {
        if (!setting_of(&findings[i], "protocol")) continue;
        for (size_t j = 0; j < config->task_count; j++)
            if (i != j && tl_health_find_member(&findings[i].description, findings[j].task->name, j))
                judge_protocol(&findings[i], &findings[j]);
    }
}

void tl_health_compare(const struct tl_config *config, struct tl_health_finding *findings, char *ret_note)
{
    tl_health_judge_rivals(config, findings);
    tl_health_compare_members(config, findings, ret_note);
    judge_pairs(config, findings);
    judge_protocols(config, findings);
    for (size_t i = 0; i < config->task_count; i++)
        note_loopback(config, &findings[i]);
}
