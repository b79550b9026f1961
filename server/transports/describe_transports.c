// SPDX-License-Identifier: Apache-2.0
/*
 * What a worker reports about its transports when a tool asks for it: which it has, and for the transport over cards
 * the card, its port and how peers reach its memory.
 *
 * A transport describes its own device (struct tl_transport_source). Where a transport could not be opened the reason
 * is reported; the limit of locked memory is reported separately, because its remedy has nothing to do with cards.
 */
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"
#include "server/transports/transport_choice.h"
#include "server/worker_internal.h"

static enum tl_status add_transport(struct tl_description *description, const char *name, bool is_available,
                                    const char *reason, struct tl_error *ret_error)
{
    struct tl_transport_state *state = &description->transports[description->transport_count++];
    state->name = strdup(name);
    state->is_available = is_available;
    state->reason = strdup(reason);
    if (state->name != NULL && state->reason != NULL) return TL_OK;
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for transports");
}

static enum tl_status describe_transports(const struct tl_worker *worker, struct tl_description *description,
                                          struct tl_error *ret_error)
{
    struct tl_error failures[TL_MAX_TRANSPORTS];
    bool works[TL_MAX_TRANSPORTS], is_any_working = false;
    for (size_t i = 0; i < worker->data_plane.transport_count; i++) {
        struct tl_transport *transport = worker->data_plane.transports[i].transport;
        failures[i].code = TL_OK;
        works[i] = transport != NULL && !tl_transport_has_failed(transport, &failures[i]);
        is_any_working |= works[i];
    }
    description->transports = calloc(1 + worker->data_plane.transport_count, sizeof(*description->transports));
    if (description->transports == NULL) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for transports");
    }
    const char *grpc = is_any_working ? "in use where there is no data connection" : "in use for all peers";
    enum tl_status status = add_transport(description, "grpc", true, grpc, ret_error);
    for (size_t i = 0; i < worker->data_plane.transport_count && status == TL_OK; i++) {
        const struct tl_transport_slot *slot = &worker->data_plane.transports[i];
        char state[TL_ERROR_MESSAGE_BYTES];
        bool has_state = slot->transport != NULL && slot->source->describe_state != NULL;
        if (has_state) slot->source->describe_state(slot->transport, state, sizeof(state));
        const char *reason = failures[i].code != TL_OK ? failures[i].message
                             : has_state               ? state
                             : slot->transport != NULL ? slot->transport->describes_device
                                                       : slot->reason;
        status = add_transport(description, slot->source->name, works[i], reason, ret_error);
    }
    return status;
}

/* Returns the slot of the transport over cards. NULL: the settings want none. */
static const struct tl_transport_slot *find_cards(const struct tl_worker *worker)
{
    for (size_t i = 0; i < worker->data_plane.transport_count; i++) {
        const struct tl_transport_slot *slot = &worker->data_plane.transports[i];
        if (slot->is_wanted && slot->source->describe_card != NULL) return slot;
    }
    return NULL;
}

static enum tl_status describe_card(const struct tl_worker *worker, struct tl_description *description,
                                    struct tl_error *ret_error)
{
    const struct tl_transport_slot *slot = find_cards(worker);
    if (slot == NULL) return TL_OK;
    const struct tl_transport *transport = slot->transport;
    const void *detail = transport != NULL ? transport->candidates[transport->order].detail : NULL;
    bool lacks_memlock = transport == NULL && tl_transport_is_about_memlock(slot->reason);
    const char *keys = transport == NULL ? "" : transport->options.engine.keys == TL_KEYS_REGION ? "region" : "window";
    struct tl_data_plane_description *to = calloc(1, sizeof(*to));
    description->data_plane = to;
    if (to != NULL) {
        slot->source->describe_card(detail, &worker->settings, to);
        if (transport != NULL && detail == NULL) {
            free(to->device);
            to->device = strdup(transport->provider->name);
        }
        to->memlock = strdup(lacks_memlock ? slot->reason : "");
        to->keys = strdup(keys);
        to->reason = strdup(transport != NULL ? transport->provider->reason : "");
        to->passed_over = strdup(transport != NULL ? transport->passed_over : "");
        to->not_tried = strdup(transport != NULL ? transport->not_tried : "");
    }
    bool is_complete = to != NULL && to->memlock != NULL && to->device != NULL && to->gid != NULL &&
                       to->gid_type != NULL && to->interface != NULL && to->port_state != NULL &&
                       to->link_layer != NULL && to->keys != NULL && to->reason != NULL && to->passed_over != NULL &&
                       to->not_tried != NULL;
    if (is_complete) return TL_OK;
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the description of the data plane");
}

enum tl_status tl_transports_describe(const struct tl_worker *worker, struct tl_description *description,
                                      struct tl_error *ret_error)
{
    enum tl_status status = describe_transports(worker, description, ret_error);
    if (status == TL_OK) status = describe_card(worker, description, ret_error);
    return status == TL_OK ? tl_transports_describe_gpus(worker, description, ret_error) : status;
}
