// SPDX-License-Identifier: Apache-2.0
#include "server/peers/admission.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "server/peers/peer_internal.h"

/* The addresses that a lookup has found are used for this long. */
#define KEPT_NS (60 * TL_NS_PER_SEC)
/* Two lookups of one host are at least this far apart, however many links claim to come from it. */
#define LOOKUP_PAUSE_NS (1 * TL_NS_PER_SEC)

/* ------------------------------------------------------------------------------------------- the configuration -- */

enum tl_status tl_admission_init(struct tl_worker *worker, struct tl_error *ret_error)
{
    const char *networks = worker->settings.peer_networks;
    tl_list_init(&worker->members.client_peers);
    tl_log_limit_init(&worker->members.origin_log.limit);
    tl_log_limit_init(&worker->members.incarnation_log.limit);
    worker->members.takes_any_origin = networks != NULL && strcmp(networks, "any") == 0;
    if (networks == NULL || worker->members.takes_any_origin) return TL_OK;
    worker->members.peer_networks = calloc(TL_MAX_PEER_NETWORKS, sizeof(*worker->members.peer_networks));
    if (worker->members.peer_networks == NULL)
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for networks");
    for (const char *entry = networks; *entry != '\0' && worker->members.peer_network_count < TL_MAX_PEER_NETWORKS;) {
        char text[64];
        size_t len = strcspn(entry, ",");
        snprintf(text, sizeof(text), "%.*s", (int)len, entry);
        worker->members.peer_network_count +=
            tl_ip_network_parse(text, &worker->members.peer_networks[worker->members.peer_network_count]) ? 1 : 0;
        entry += len + (entry[len] == ',');
    }
    return TL_OK;
}

void tl_admission_fini(struct tl_worker *worker)
{
    tl_log_limit_fini(&worker->members.origin_log.limit);
    tl_log_limit_fini(&worker->members.incarnation_log.limit);
    free(worker->members.peer_networks);
}

enum tl_status tl_origin_init(struct tl_origin *origin, const char *address, struct tl_error *ret_error)
{
    struct tl_ip ip;
    enum tl_status status = tl_endpoint_parse(address, &origin->endpoint, ret_error);
    if (status != TL_OK || !tl_ip_parse(origin->endpoint.host, &ip)) return status;
    origin->ips = malloc(sizeof(*origin->ips));
    if (origin->ips == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for %s", address);
    origin->ips[0] = ip;
    origin->ip_count = 1;
    origin->is_numeric = true;
    return TL_OK;
}

void tl_origin_fini(struct tl_origin *origin)
{
    if (origin->lookup != NULL) tl_lookup_abandon(origin->lookup);
    free(origin->ips);
}

/* --------------------------------------------------------------------------------------------------- addresses -- */

static bool is_listed(const struct tl_worker *worker, const struct tl_ip *ip)
{
    for (size_t i = 0; i < worker->members.peer_network_count; i++)
        if (tl_ip_network_has(&worker->members.peer_networks[i], ip)) return true;
    return false;
}

/* Returns whether a link from this address may be the member's. Between two addresses of this machine the kernel may
 * choose either as the source. */
static bool fits(const struct tl_origin *origin, const struct tl_ip *ip)
{
    for (size_t i = 0; i < origin->ip_count; i++)
        if (tl_ip_is_equal(&origin->ips[i], ip)) return true;
    if (!tl_ip_is_here(ip)) return false;
    for (size_t i = 0; i < origin->ip_count; i++)
        if (tl_ip_is_here(&origin->ips[i])) return true;
    return false;
}

static void looked_up(void *owner, const struct tl_ip *ips, size_t count, const struct tl_error *error)
{
    struct tl_peer *peer = owner;
    struct tl_origin *origin = &peer->origin;
    struct tl_ip *kept = count > 0 ? malloc(count * sizeof(*kept)) : NULL;
    origin->lookup = NULL;
    origin->looked_up_ns = tl_clock_now_ns();
    origin->failure = *error;
    if (kept != NULL) {
        memcpy(kept, ips, count * sizeof(*kept));
        free(origin->ips);
        origin->ips = kept;
        origin->ip_count = count;
    } else if (error->code == TL_OK) {
        (void)tl_error_set(&origin->failure, TL_UNAVAILABLE, "the host \"%s\" has no address that can be kept",
                           origin->endpoint.host);
    }
    tl_control_ask_again(peer->worker->control);
}

/* Returns whether a refusal with this cause is logged, and then the number of those that were left out before. */
static bool is_logged(struct worker_refusal_log *log, const char *cause, uint64_t *ret_unlogged_count)
{
    if (!tl_log_limit_passes(&log->limit, cause)) {
        log->unlogged_count++;
        return false;
    }
    *ret_unlogged_count = log->unlogged_count;
    log->unlogged_count = 0;
    return true;
}

/* The address is not part of the cause: a peer can call from many. */
static void log_refusal(const struct tl_peer *peer, const struct tl_identity *who, const struct tl_error *why)
{
    uint64_t unlogged_count;
    if (!is_logged(&peer->worker->members.origin_log, peer->name, &unlogged_count)) return;
    TL_LOG_AT_WARN("a connection that claims to be a peer was refused", TL_STR("peer", peer->name),
                   TL_STR("address", who->address), TL_STR("reason", why->message), TL_U64("others", unlogged_count));
}

/* Refuses a link from an address that the peer is not known to have. */
static enum tl_link_admission refuse(struct tl_peer *peer, const struct tl_identity *who, const struct tl_ip *ip,
                                     struct tl_error *ret_error)
{
    const struct tl_origin *origin = &peer->origin;
    char expected[4 * TL_IP_TEXT_BYTES + 8] = "", text[TL_IP_TEXT_BYTES];
    size_t used = 0;
    if (origin->ip_count == 0) {
        (void)tl_error_set(
            ret_error, TL_UNAVAILABLE,
            "%s cannot tell whether %s may call from %s: %.400s; or list that address in peers.addresses",
            peer->worker->self.name, peer->name, tl_ip_format(ip, text), origin->failure.message);
        log_refusal(peer, who, ret_error);
        return TL_LINK_REFUSED;
    }
    for (size_t i = 0; i < origin->ip_count && i < 4; i++) {
        used += (size_t)snprintf(expected + used, sizeof(expected) - used, "%s%s", i > 0 ? ", " : "",
                                 tl_ip_format(&origin->ips[i], text));
    }
    (void)tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                       "%s called %s from %s, which is no address of its host %s (%s%s); if it is right, list it in "
                       "peers.addresses of %s",
                       peer->name, peer->worker->self.name, tl_ip_format(ip, text), origin->endpoint.host, expected,
                       origin->ip_count > 4 ? ", ..." : "", peer->worker->self.name);
    log_refusal(peer, who, ret_error);
    return TL_LINK_REFUSED;
}

static enum tl_link_admission check_origin(struct tl_peer *peer, const struct tl_identity *who,
                                           struct tl_error *ret_error)
{
    struct tl_origin *origin = &peer->origin;
    struct tl_ip ip;
    if (peer->worker->members.takes_any_origin) return TL_LINK_ADMITTED;
    if (!tl_endpoint_ip(who->address, &ip)) {
        /* It is a Unix socket, or a connection that has ended already. */
        if (tl_endpoint_is_here(who->address)) return TL_LINK_ADMITTED;
        (void)tl_error_set(ret_error, TL_UNAVAILABLE, "the connection of %s has no address any more", peer->name);
        return TL_LINK_REFUSED;
    }
    int64_t age_ns = tl_clock_now_ns() - origin->looked_up_ns;
    bool is_fresh = origin->is_numeric || (origin->looked_up_ns != 0 && age_ns < KEPT_NS);
    if (is_listed(peer->worker, &ip) || (is_fresh && fits(origin, &ip))) return TL_LINK_ADMITTED;
    if (origin->lookup != NULL) return TL_LINK_LATER;
    if (!origin->is_numeric && (origin->looked_up_ns == 0 || age_ns >= LOOKUP_PAUSE_NS)) {
        if (tl_lookup_ips(peer->worker->loop, &origin->endpoint, looked_up, peer, &origin->lookup, ret_error) ==
            TL_OK) {
            return TL_LINK_LATER;
        }
        return TL_LINK_REFUSED;
    }
    return refuse(peer, who, &ip, ret_error);
}

/* ------------------------------------------------------------------------------------------------ incarnations -- */

/* Returns whether the incarnation belongs to another member, or to a client elsewhere. A member whose address fits is
 * believed rather than a client. */
static bool is_incarnation_taken(const struct tl_worker *worker, const struct tl_peer *peer,
                                 const struct tl_identity *who)
{
    for (size_t i = 0; i < worker->members.peer_count; i++) {
        const struct tl_peer *other = worker->members.peers[i];
        if (other != peer && other->incarnation == who->incarnation) return true;
    }
    return peer == NULL && tl_client_peer_has_incarnation(worker, who);
}

static void log_incarnation(struct tl_worker *worker, const struct tl_peer *peer, const struct tl_identity *who)
{
    uint64_t unlogged_count;
    struct tl_ip ip;
    char address[TL_IP_TEXT_BYTES] = "", cause[TL_IP_TEXT_BYTES + TL_MAX_NAME_BYTES];
    if (tl_endpoint_ip(who->address, &ip)) tl_ip_format(&ip, address);
    /* A name that is no task's is not part of the cause: a client can make up another one each time. */
    snprintf(cause, sizeof(cause), "%s %s", address, peer != NULL ? peer->name : "");
    if (!is_logged(&worker->members.incarnation_log, cause, &unlogged_count)) return;
    TL_LOG_AT_WARN("a connection with the incarnation of another process was refused", TL_STR("peer", who->name),
                   TL_STR("address", who->address), TL_INCARNATION("incarnation", who->incarnation),
                   TL_U64("others", unlogged_count));
}

static void log_second_worker(const struct tl_peer *self, const struct tl_identity *who)
{
    uint64_t unlogged_count;
    if (!is_logged(&self->worker->members.origin_log, self->name, &unlogged_count)) return;
    TL_LOG_AT_WARN("a second worker claims this task", TL_STR("address", who->address), TL_STR("host", who->host_name),
                   TL_U64("process", who->process_id), TL_U64("others", unlogged_count));
}

enum tl_link_admission tl_peers_admit(struct tl_worker *worker, const struct tl_identity *who,
                                      struct tl_error *ret_error)
{
    if (tl_control_uses_spares(worker->control)) {
        (void)tl_error_set(ret_error, TL_UNAVAILABLE,
                           "%s has no descriptors left for another connection; give it more: \"prlimit --pid %" PRIu64
                           " --nofile=NUMBER\" as root on host %s, or LimitNOFILE= for its next start",
                           worker->self.name, worker->self.process_id, worker->self.host_name);
        return TL_LINK_REFUSED;
    }
    struct tl_peer *peer = who->name[0] != '\0' ? tl_peer_by_name(worker, who->name) : NULL;
    if (peer != NULL && peer->is_self) {
        (void)tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                           "%s is this worker itself; is the same task started twice? give each process its own task",
                           peer->name);
        log_second_worker(peer, who);
        return TL_LINK_REFUSED;
    }
    /* What a certificate proves holds from every address. */
    bool is_proven = who->source == TL_IDENTITY_PROVEN;
    enum tl_link_admission admission = peer == NULL ? TL_LINK_ADMITTED_AS_CLIENT
                                       : is_proven  ? TL_LINK_ADMITTED
                                                    : check_origin(peer, who, ret_error);
    bool is_admitted = admission == TL_LINK_ADMITTED || admission == TL_LINK_ADMITTED_AS_CLIENT;
    if (!is_admitted || !is_incarnation_taken(worker, peer, who)) return admission;
    (void)tl_error_set(ret_error, TL_UNAVAILABLE,
                       "%s is connected to another process with the incarnation that %s at %s gives", worker->self.name,
                       who->name[0] != '\0' ? who->name : "a client", who->address);
    log_incarnation(worker, peer, who);
    return TL_LINK_REFUSED;
}
