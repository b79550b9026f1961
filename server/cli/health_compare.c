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

/* Workers of one cluster start within this time, and try each other again within it. */
#define START_NS (UINT64_C(30) * TL_NS_PER_SEC)

struct comparison {
    const struct tl_config *config;
    struct tl_health_finding *findings; /* [config->task_count] */
};

static struct tl_health_finding *find_row(const struct comparison *comparison, const char *name)
{
    for (size_t i = 0; i < comparison->config->task_count; i++)
        if (strcmp(comparison->findings[i].task->name, name) == 0) return &comparison->findings[i];
    return NULL;
}

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

/* A reason "what is wrong; what to do" becomes both; a row that has a fault of its own keeps it. */
static void set_fault(struct tl_health_finding *finding, const char *what, const char *reason)
{
    const char *semicolon = strstr(reason, "; ");
    int len = semicolon ? (int)(semicolon - reason) : (int)strlen(reason);
    if (!finding->is_healthy) return;
    finding->is_healthy = false;
    finding->stage = TL_HEALTH_STAGE_PATHS;
    snprintf(finding->reason, sizeof(finding->reason), "%s: %.*s", what, len, reason);
    snprintf(finding->remedy, sizeof(finding->remedy), "%s",
             semicolon
                 ? semicolon + 2
                 : "both answer from here: look at routes and firewalls between the two, and at the logs of both");
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
    char host_a[256], host_b[256];
    uint16_t port;
    return !tl_address_is_loopback(b->address) &&
           tl_address_split(a->address, host_a, sizeof(host_a), &port, NULL) == TL_OK &&
           tl_address_split(b->address, host_b, sizeof(host_b), &port, NULL) == TL_OK && strcmp(host_a, host_b) != 0;
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
 * of a machine the address 127.0.1.1. It may reach the others all the same. */
static void note_loopback(const struct tl_config *config, struct tl_health_finding *finding)
{
    const char *listens = find_loopback(finding);
    if (!listens || !finding->is_healthy || finding->reason[0] != '\0' || finding->task->settings.listen) return;
    for (size_t i = 0; i < config->task_count; i++) {
        if (!is_remote(finding->task, &config->tasks[i])) continue;
        set_loopback(finding, "", listens);
        return;
    }
}

/* A pair that is not connected, although both of its workers answer. */
static void judge_pair(struct tl_health_finding *from, const struct tl_peer_description *peer,
                       struct tl_health_finding *to)
{
    char what[2 * TL_MAX_NAME_BYTES + TL_MAX_ADDRESS_BYTES];
    snprintf(what, sizeof(what), "it cannot reach %s at %s", to->task->name, to->task->address);
    set_fault(from, what, peer->reason[0] != '\0' ? peer->reason : "no reason is known");
    snprintf(what, sizeof(what), "%s cannot reach it at %s", from->task->name, to->task->address);
    bool was_healthy = to->is_healthy;
    set_fault(to, what, peer->reason[0] != '\0' ? peer->reason : "no reason is known");
    const char *listens = find_loopback(to);
    if (!was_healthy || !listens || !is_remote(from->task, to->task)) return;
    snprintf(what, sizeof(what), "%s cannot reach it at %s: ", from->task->name, to->task->address);
    set_loopback(to, what, listens);
}

void tl_health_compare(const struct tl_config *config, struct tl_health_finding *findings)
{
    const struct comparison comparison = {config, findings};
    for (size_t i = 0; i < config->task_count; i++) {
        struct tl_health_finding *from = &findings[i];
        for (size_t j = 0; has_started(from) && j < from->description.peer_count; j++) {
            const struct tl_peer_description *peer = &from->description.peers[j];
            struct tl_health_finding *to = is_down(peer) ? find_row(&comparison, peer->name) : NULL;
            if (to && to != from && has_started(to)) judge_pair(from, peer, to);
        }
    }
    for (size_t i = 0; i < config->task_count; i++)
        note_loopback(config, &findings[i]);
}
