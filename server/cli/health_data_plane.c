// SPDX-License-Identifier: Apache-2.0
/*
 * The stages of the transports: shared memory, locked memory, device, port, paths to the other workers.
 *
 * Happy path: the worker says that shared memory works, or verbs and on which device, and that every peer it is
 * connected to is reached by one of them: a path counts only once a write in both directions has been verified. A
 * worker that reaches all peers through shared memory needs no card. A path whose first attempt is under way lacks
 * nothing yet. Failure modes: what is missing stops the check with its reason; that makes a worker unhealthy where rdma
 * is "require"; otherwise the worker is healthy, since its tensors travel over gRPC, and the reason is reported. A
 * worker that does not say why is looked at from here when it is on this machine.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "config/address.h"
#include "server/cli/health.h"
#include "server/cli/remedy.h"
#include "server/peers/data_connection.h"
#include "server/transports/local_settings.h"
#include "server/transports/transport_verbs.h"
#include "server/transports/verbs_settings.h"

#define VERBS "verbs"
#define LOCAL "local"
#define GRPC "grpc"

static void set_reason(struct tl_health_finding *finding, enum tl_health_stage stage, const char *reason,
                       const char *remedy)
{
    finding->stage = stage;
    snprintf(finding->reason, sizeof(finding->reason), "%s", reason);
    snprintf(finding->remedy, sizeof(finding->remedy), "%s", remedy);
}

/* The same from "what is wrong; what to do", unless that is a list of devices, each with its reason; without a remedy
 * of its own the message gets the other one. */
static void split_reason(struct tl_health_finding *finding, enum tl_health_stage stage, const char *message,
                         const char *other_remedy)
{
    const char *remedy;
    size_t len = tl_remedy_split(message, &remedy);
    set_reason(finding, stage, message, remedy[0] != '\0' ? remedy : other_remedy);
    if (len < sizeof(finding->reason)) finding->reason[len] = '\0';
}

static void pass(struct tl_health_finding *finding, enum tl_health_stage stage)
{
    finding->stage = stage;
    finding->verified = stage;
}

/* ------------------------------------------------------------------------------------------------ this machine -- */

/* Why none of the candidates can be used. */
static enum tl_health_stage judge_candidates(const struct tl_verbs_candidate *candidates, size_t count,
                                             struct tl_error *ret_error)
{
    const struct tl_verbs_candidate *first = &candidates[0];
    if (count == 0) {
        tl_error_set(ret_error, TL_NOT_FOUND, "no RDMA device has a port");
        return TL_HEALTH_STAGE_DEVICE;
    }
    if (first->order == 0) return TL_HEALTH_STAGE_PATHS;
    bool is_down = first->port != 0 && strcmp(first->state, "active") != 0;
    tl_error_set(ret_error, TL_NOT_FOUND, TL_NO_PORT ": %s port %" PRIu32 ": %s", first->device, first->port,
                 first->reason);
    return is_down ? TL_HEALTH_STAGE_PORT : TL_HEALTH_STAGE_DEVICE;
}

/* The same for those that can be used, as far as they say: a write shows whether they do. */
static enum tl_health_stage try_candidates(const struct tl_verbs_options *options,
                                           const struct tl_verbs_candidate *candidates, size_t count,
                                           struct tl_error *ret_error)
{
    unsigned order;
    /* Without a device the limit of locked memory is not what stands in the way. */
    if (tl_verbs_check_memlock(options, ret_error) != TL_OK) return TL_HEALTH_STAGE_MEMLOCK;
    if (tl_transport_choose_verbs(options, candidates, count, NULL, NULL, &order, ret_error) == TL_OK) {
        return TL_HEALTH_STAGE_PATHS;
    }
    return tl_transport_is_about_memlock(ret_error->message) ? TL_HEALTH_STAGE_MEMLOCK : TL_HEALTH_STAGE_DEVICE;
}

enum tl_health_stage tl_health_look_at_machine(const struct tl_config_task *task, struct tl_error *ret_error)
{
    struct tl_verbs_options options;
    struct tl_verbs_candidate *candidates;
    size_t count;
    char host[TL_VERBS_HOST_BYTES];
    enum tl_status status = tl_verbs_settings_read(&task->settings, task->address, host, &options, ret_error);
    if (status == TL_OK) status = tl_verbs_list(&options, &candidates, &count, ret_error);
    if (status != TL_OK) return TL_HEALTH_STAGE_DEVICE;
    enum tl_health_stage stage = judge_candidates(candidates, count, ret_error);
    if (stage == TL_HEALTH_STAGE_PATHS) {
        stage = try_candidates(&options, candidates, count, ret_error);
    }
    free(candidates);
    return stage;
}

/* -------------------------------------------------------------------------------------------------- the worker -- */

static const struct tl_transport_state *find_transport(const struct tl_description *description, const char *name)
{
    for (size_t i = 0; i < description->transport_count; i++)
        if (strcmp(description->transports[i].name, name) == 0) return &description->transports[i];
    return NULL;
}

/* Of a list of ports the first is the one that the settings mean, and says what to do. */
static void judge_first_port(const struct tl_config *config, struct tl_health_finding *finding)
{
    const char *first = strstr(finding->reason, "; ");
    const char *end = first ? strstr(first + 2, "; ") : NULL;
    const char *is_down = first ? strstr(first, TL_VERBS_PORT_IS) : NULL;
    const char *lacks_key = first ? strstr(first, TL_VERBS_NO_PKEY) : NULL;
    if (is_down && (!end || is_down < end)) {
        finding->stage = TL_HEALTH_STAGE_PORT;
        snprintf(finding->remedy, sizeof(finding->remedy),
                 "look at the cable, the switch and \"ip link\" there; start the worker anew afterwards");
    } else if (lacks_key && (!end || lacks_key < end)) {
        snprintf(finding->remedy, sizeof(finding->remedy),
                 "correct verbs.pkey_index in %s; start the worker anew afterwards", config->source);
    }
}

/* The worker has no data plane. */
static void judge_lack(const struct tl_config *config, bool is_local, const struct tl_transport_state *verbs,
                       struct tl_health_finding *finding)
{
    const struct tl_data_plane_description *data_plane = finding->description.data_plane;
    const struct tl_config_task *task = finding->task;
    char remedy[TL_ERROR_MESSAGE_BYTES];
    struct tl_error error;
    snprintf(remedy, sizeof(remedy),
             "run there: tensorlane devices --config %s --job %s --task %" PRIu32
             ", and tensorlane doctor --config %s; start the worker anew afterwards",
             config->source, task->job, task->index, config->source);
    if (data_plane && data_plane->memlock[0] != '\0') {
        split_reason(finding, TL_HEALTH_STAGE_MEMLOCK, data_plane->memlock, remedy);
    } else if (verbs && verbs->reason[0] != '\0') {
        split_reason(finding, TL_HEALTH_STAGE_DEVICE, verbs->reason, remedy);
        if (is_local) finding->stage = tl_health_look_at_machine(task, &error);
        /* All is there by now: it was the start that failed. */
        if (finding->stage == TL_HEALTH_STAGE_PATHS) finding->stage = TL_HEALTH_STAGE_DEVICE;
        if (strncmp(verbs->reason, TL_NO_PORT, strlen(TL_NO_PORT)) == 0) judge_first_port(config, finding);
    } else {
        enum tl_health_stage stage = is_local ? tl_health_look_at_machine(task, &error) : TL_HEALTH_STAGE_PATHS;
        if (stage == TL_HEALTH_STAGE_PATHS) {
            set_reason(finding, TL_HEALTH_STAGE_DEVICE, "the worker says nothing of RDMA", remedy);
        } else {
            split_reason(finding, stage, error.message, remedy);
        }
    }
    finding->verified = finding->stage == TL_HEALTH_STAGE_PORT ? TL_HEALTH_STAGE_DEVICE : TL_HEALTH_STAGE_TRANSPORTS;
}

/* False: the port is not active. */
static bool judge_port(struct tl_health_finding *finding)
{
    const struct tl_data_plane_description *data_plane = finding->description.data_plane;
    char message[TL_ERROR_MESSAGE_BYTES];
    pass(finding, TL_HEALTH_STAGE_DEVICE);
    if (!data_plane || data_plane->port_state[0] == '\0') return true;
    if (strcmp(data_plane->port_state, "active") == 0) {
        pass(finding, TL_HEALTH_STAGE_PORT);
        return true;
    }
    snprintf(message, sizeof(message), "port %" PRIu32 " of %s is %s", data_plane->port, data_plane->device,
             data_plane->port_state);
    set_reason(finding, TL_HEALTH_STAGE_PORT, message, "look at the cable, the switch and \"ip link\"");
    return false;
}

/* ------------------------------------------------------------------------------------------------------- paths -- */

/* Both are on one host, and want shared memory. */
static bool can_share(const struct tl_health_finding *finding, const struct tl_config_task *task)
{
    const struct tl_transport_state *local = find_transport(&finding->description, LOCAL);
    return local && local->is_available && finding->task->address && task->address &&
           tl_address_is_same_host(finding->task->address, task->address) &&
           !tl_local_settings_refusal(&task->settings);
}

/* The two want a data plane that they can both have; over shared memory, where only that counts. */
static bool wants_path(const struct tl_config *config, const struct tl_health_finding *finding, const char *name,
                       bool is_shared)
{
    const struct tl_config_task *self = finding->task, *task;
    if (tl_config_find_name(config, name, &task, NULL) != TL_OK || task == self) return false;
    return can_share(finding, task) ||
           (!is_shared && !tl_verbs_settings_refusal(&self->settings) && !tl_verbs_settings_refusal(&task->settings));
}

bool tl_health_wants_path(const struct tl_config *config, const struct tl_health_finding *finding, const char *name)
{
    return wants_path(config, finding, name, false);
}

/* The first attempt after the two have connected is under way. */
static bool is_being_set_up(const struct tl_peer_description *peer)
{
    return strcmp(peer->transport, GRPC) == 0 && strstr(peer->reason, TL_DATA_CONNECTION_BEGINS) != NULL;
}

/* The same of a peer that is connected, unless the two are just setting the path up. */
static bool should_have_path(const struct tl_config *config, const struct tl_health_finding *finding,
                             const struct tl_peer_description *peer, bool is_shared)
{
    return strcmp(peer->state, "up") == 0 && !is_being_set_up(peer) &&
           wants_path(config, finding, peer->name, is_shared);
}

/* Some peer that wants a data plane is reached without one. */
static bool is_any_over_grpc(const struct tl_config *config, const struct tl_health_finding *finding, bool is_shared)
{
    const struct tl_description *description = &finding->description;
    for (size_t i = 0; i < description->peer_count; i++) {
        const struct tl_peer_description *peer = &description->peers[i];
        bool is_over_grpc = strcmp(peer->transport, GRPC) == 0;
        if (is_over_grpc && should_have_path(config, finding, peer, is_shared)) return true;
    }
    return false;
}

/* False: a peer is reached over something else; over shared memory, where only that counts. */
static bool judge_paths(const struct tl_config *config, struct tl_health_finding *finding, bool is_shared)
{
    const struct tl_description *description = &finding->description;
    const struct tl_peer_description *first = NULL;
    size_t verified_count = 0, other_count = 0;
    char message[TL_ERROR_MESSAGE_BYTES], more[64] = "";
    for (size_t i = 0; i < description->peer_count; i++) {
        const struct tl_peer_description *peer = &description->peers[i];
        if (!should_have_path(config, finding, peer, is_shared)) continue;
        bool is_verified = strcmp(peer->transport, GRPC) != 0;
        verified_count += is_verified;
        other_count += !is_verified;
        if (!is_verified && !first) first = peer;
    }
    if (!first) {
        if (verified_count > 0) pass(finding, TL_HEALTH_STAGE_PATHS);
        return true;
    }
    if (other_count > 1) snprintf(more, sizeof(more), ", and to %zu more", other_count - 1);
    snprintf(message, sizeof(message), "over %s to %.128s%s: %.512s", first->transport, first->name, more,
             first->reason[0] != '\0' ? first->reason : "no reason is known");
    set_reason(finding, TL_HEALTH_STAGE_PATHS, message, "see its row, --pairs, and the logs of both");
    return false;
}

/* A healthy worker that uses another card than its first choice, or whose peers can write what they should not. */
static void note_shortcomings(struct tl_health_finding *finding)
{
    const struct tl_data_plane_description *data_plane = finding->description.data_plane;
    if (!data_plane) return;
    bool is_second = data_plane->passed_over[0] != '\0', is_open = strcmp(data_plane->keys, "region") == 0;
    char passed_over[TL_ERROR_MESSAGE_BYTES] = "";
    if (is_second) {
        snprintf(passed_over, sizeof(passed_over), "%.64s port %" PRIu32 " is not the first choice: %.800s",
                 data_plane->device, data_plane->port, data_plane->passed_over);
    }
    snprintf(finding->reason, sizeof(finding->reason), "%s%s%.900s",
             is_open ? "peers are not isolated: verbs.keys is \"region\"" : "", is_open && is_second ? "; " : "",
             passed_over);
    snprintf(finding->remedy, sizeof(finding->remedy), "%s%s%s",
             is_open ? "where peers are not trusted, set verbs.keys to \"window\"" : "",
             is_open && is_second ? "; " : "",
             is_second ? "repair what was passed over, or choose with verbs.devices and verbs.gid_index" : "");
}

/* The machine has no card at all. */
static bool lacks_card(const struct tl_transport_state *verbs, bool is_on_this_machine,
                       const struct tl_health_finding *finding)
{
    struct tl_error error;
    if (verbs) return strncmp(verbs->reason, TL_VERBS_NO_CARD, strlen(TL_VERBS_NO_CARD)) == 0;
    /* A worker of an older version does not report it. */
    return is_on_this_machine && tl_health_look_at_machine(finding->task, &error) == TL_HEALTH_STAGE_DEVICE &&
           strncmp(error.message, TL_VERBS_NO_CARD, strlen(TL_VERBS_NO_CARD)) == 0;
}

/* Those over cards, where they are wanted. False: something is missing. */
static bool judge_verbs(const struct tl_config *config, bool is_on_this_machine, bool has_local,
                        struct tl_health_finding *finding)
{
    const struct tl_transport_state *verbs = find_transport(&finding->description, VERBS);
    if (verbs && verbs->is_available) return judge_port(finding) && judge_paths(config, finding, false);
    /* A card is not what two on one host lack. */
    bool is_card_missed = is_any_over_grpc(config, finding, false) && !is_any_over_grpc(config, finding, true);
    if (has_local && !is_card_missed) return judge_paths(config, finding, false);
    /* "auto" asks for a card only where there is one. */
    const struct tl_settings *settings = &finding->task->settings;
    if (settings->protocol == TL_PROTOCOL_AUTO && settings->rdma != TL_RDMA_REQUIRE &&
        lacks_card(verbs, is_on_this_machine, finding))
        return judge_paths(config, finding, true);
    judge_lack(config, is_on_this_machine, verbs, finding);
    return false;
}

/* What the worker's own configuration sets otherwise, so that it has a transport less than this configuration wants. */
struct other_setting {
    enum tl_health_stage stage; /* where health looks at the first such transport */
    const char *name;           /* NULL: there is none */
    const char *value;
};

static struct other_setting find_other_setting(const struct tl_description *description, bool wants_local,
                                               bool wants_verbs)
{
    const struct {
        const char *transport;
        enum tl_health_stage stage;
        bool is_wanted;
    } wanted[] = {{LOCAL, TL_HEALTH_STAGE_LOCAL, wants_local}, {VERBS, TL_HEALTH_STAGE_DEVICE, wants_verbs}};
    static const struct {
        const char *begin, *name;
    } refusals[] = {{"the protocol is ", "protocol"}, {"rdma is ", "rdma"}};
    for (size_t i = 0; i < TL_ARRAY_COUNT(wanted); i++) {
        const struct tl_transport_state *state = find_transport(description, wanted[i].transport);
        if (!wanted[i].is_wanted || !state || state->is_available) continue;
        for (size_t j = 0; j < TL_ARRAY_COUNT(refusals); j++) {
            size_t len = strlen(refusals[j].begin);
            if (strncmp(state->reason, refusals[j].begin, len) == 0)
                return (struct other_setting){wanted[i].stage, refusals[j].name, state->reason + len};
        }
    }
    return (struct other_setting){.name = NULL};
}

/* The worker lacks nothing: it was started with other settings than these. */
static void judge_other_setting(const struct tl_config *config, const struct other_setting *other,
                                struct tl_health_finding *finding)
{
    char reason[TL_ERROR_MESSAGE_BYTES];
    const char *own = strcmp(other->name, "rdma") == 0 ? tl_settings_rdma_name(finding->task->settings.rdma)
                                                       : tl_settings_protocol_name(finding->task->settings.protocol);
    bool is_grpc = strcmp(other->value, GRPC) == 0;
    snprintf(reason, sizeof(reason), "the worker's own configuration sets %s to \"%.64s\", %.256s to \"%s\"",
             other->name, other->value, config->source, own);
    set_reason(finding, other->stage, reason,
               is_grpc ? "give it this configuration and start it anew; if it reads TF_CONFIG, set \"rpc_layer\" "
                         "there to \"auto\", because without it gRPC is meant alone"
                       : "give all workers the same configuration, and start this one anew");
    finding->is_healthy = finding->task->settings.rdma != TL_RDMA_REQUIRE;
}

/* Shared memory is broken: that is the reason, whether or not there is a card. */
static void judge_broken_local(const struct tl_config *config, const struct tl_transport_state *local, bool has_verbs,
                               struct tl_health_finding *finding)
{
    finding->is_healthy = finding->task->settings.rdma != TL_RDMA_REQUIRE;
    if (has_verbs) {
        bool is_complete = judge_port(finding) && judge_paths(config, finding, false);
        if (!is_complete) return;
        finding->is_healthy = true;
    }
    enum tl_health_stage verified = has_verbs ? finding->verified : TL_HEALTH_STAGE_TRANSPORTS;
    split_reason(finding, TL_HEALTH_STAGE_LOCAL, local->reason,
                 "repair what the reason names, on the machine of the worker; start the worker anew afterwards");
    finding->verified = verified;
}

void tl_health_judge_data_plane(const struct tl_config *config, struct tl_health_finding *finding)
{
    const struct tl_settings *settings = &finding->task->settings;
    const struct tl_description *description = &finding->description;
    const struct tl_transport_state *local = find_transport(description, LOCAL);
    const struct tl_transport_state *verbs = find_transport(description, VERBS);
    bool wants_local = !tl_local_settings_refusal(settings), wants_verbs = !tl_verbs_settings_refusal(settings);
    pass(finding, TL_HEALTH_STAGE_TRANSPORTS);
    finding->is_healthy = true;
    if (!wants_local && !wants_verbs) return;
    const struct other_setting other = find_other_setting(description, wants_local, wants_verbs);
    if (other.name) {
        judge_other_setting(config, &other, finding);
        return;
    }
    /* A worker of an older version does not report it. */
    bool has_local = wants_local && local && local->is_available;
    bool is_complete = false;
    if (wants_local && local && !local->is_available) {
        judge_broken_local(config, local, wants_verbs && verbs && verbs->is_available, finding);
        return;
    }
    if (has_local) pass(finding, TL_HEALTH_STAGE_LOCAL);
    if (wants_verbs) {
        is_complete = judge_verbs(config, finding->is_local, has_local, finding);
    } else if (has_local) {
        is_complete = judge_paths(config, finding, false);
    }
    finding->is_healthy = is_complete || settings->rdma != TL_RDMA_REQUIRE;
    if (is_complete && wants_verbs) note_shortcomings(finding);
}
