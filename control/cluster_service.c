// SPDX-License-Identifier: Apache-2.0
/*
 * tensorlane.v1.Cluster: who this worker is and how it is.
 *
 * The worker fills a description, which is packed into one message. Texts that are not UTF-8 (a reason may quote what a
 * peer sent) and texts that are missing leave as empty ones, because a message with them would be refused. Should a
 * cluster be so large that the message would exceed what clients accept, the addresses and host names of the peers are
 * left out, then their reasons.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/text.h"
#include "control/requests.h"
#include "control/service_call.h"
#include "tensorlane/v1/cluster.pb-c.h"

/* Space for all the messages that a description becomes. */
struct packing {
    Tensorlane__V1__TransportState *transports; /* [transport_count] */
    Tensorlane__V1__TransportState **transport_pointers;
    Tensorlane__V1__PeerState *peers; /* [peer_count] */
    Tensorlane__V1__PeerState **peer_pointers;
    Tensorlane__V1__Counter *counters; /* [counter_count] */
    Tensorlane__V1__Counter **counter_pointers;
    Tensorlane__V1__Setting *settings; /* [setting_count] */
    Tensorlane__V1__Setting **setting_pointers;
    char **listens;                    /* [listen_count] */
    Tensorlane__V1__Trouble *troubles; /* [trouble_count] */
    Tensorlane__V1__Trouble **trouble_pointers;
    Tensorlane__V1__Gpu *gpus; /* [gpu_count] */
    Tensorlane__V1__Gpu **gpu_pointers;
};

static void packing_fini(struct packing *packing)
{
    free(packing->transports);
    free(packing->transport_pointers);
    free(packing->peers);
    free(packing->peer_pointers);
    free(packing->counters);
    free(packing->counter_pointers);
    free(packing->settings);
    free(packing->setting_pointers);
    free(packing->listens);
    free(packing->troubles);
    free(packing->trouble_pointers);
    free(packing->gpus);
    free(packing->gpu_pointers);
}

/* Memory for count items; never NULL for want of items. */
static void *array(size_t count, size_t item_bytes)
{
    return calloc(count > 0 ? count : 1, item_bytes);
}

static bool packing_init(struct packing *packing, const struct tl_description *description)
{
    *packing = (struct packing){
        .transports = array(description->transport_count, sizeof(*packing->transports)),
        .transport_pointers = array(description->transport_count, sizeof(*packing->transport_pointers)),
        .peers = array(description->peer_count, sizeof(*packing->peers)),
        .peer_pointers = array(description->peer_count, sizeof(*packing->peer_pointers)),
        .counters = array(description->counter_count, sizeof(*packing->counters)),
        .counter_pointers = array(description->counter_count, sizeof(*packing->counter_pointers)),
        .settings = array(description->setting_count, sizeof(*packing->settings)),
        .setting_pointers = array(description->setting_count, sizeof(*packing->setting_pointers)),
        .listens = array(description->listen_count, sizeof(*packing->listens)),
        .troubles = array(description->trouble_count, sizeof(*packing->troubles)),
        .trouble_pointers = array(description->trouble_count, sizeof(*packing->trouble_pointers)),
        .gpus = array(description->gpu_count, sizeof(*packing->gpus)),
        .gpu_pointers = array(description->gpu_count, sizeof(*packing->gpu_pointers)),
    };
    if (packing->transports != NULL && packing->transport_pointers != NULL && packing->peers != NULL &&
        packing->peer_pointers != NULL && packing->counters != NULL && packing->counter_pointers != NULL &&
        packing->settings != NULL && packing->setting_pointers != NULL && packing->listens != NULL &&
        packing->troubles != NULL && packing->trouble_pointers != NULL && packing->gpus != NULL &&
        packing->gpu_pointers != NULL) {
        return true;
    }
    packing_fini(packing);
    return false;
}

/* Returns the text, made UTF-8, which it may not be: a reason may name a file. */
static char *wire_text(char *text)
{
    if (text == NULL) return (char *)"";
    tl_text_make_utf8(text, strlen(text));
    return text;
}

static void pack_transports(struct packing *packing, const struct tl_description *description)
{
    for (size_t i = 0; i < description->transport_count; i++) {
        const struct tl_transport_state *from = &description->transports[i];
        Tensorlane__V1__TransportState *to = packing->transport_pointers[i] = &packing->transports[i];
        tensorlane__v1__transport_state__init(to);
        to->name = wire_text(from->name);
        to->is_available = from->is_available;
        to->reason = wire_text(from->reason);
    }
}

static void pack_peers(struct packing *packing, const struct tl_description *description)
{
    for (size_t i = 0; i < description->peer_count; i++) {
        const struct tl_peer_description *from = &description->peers[i];
        Tensorlane__V1__PeerState *to = packing->peer_pointers[i] = &packing->peers[i];
        tensorlane__v1__peer_state__init(to);
        to->name = wire_text(from->name);
        to->state = wire_text(from->state);
        to->transport = wire_text(from->transport);
        to->reason = wire_text(from->reason);
        to->incarnation = from->incarnation;
        to->latency_ns = from->latency_ns;
        to->bytes_per_second = from->bytes_per_second;
        to->mtu_bytes = from->mtu_bytes;
        to->address = wire_text(from->address);
        to->host_name = wire_text(from->host_name);
        to->process_id = from->process_id;
    }
}

static void pack_counters(struct packing *packing, const struct tl_description *description)
{
    for (size_t i = 0; i < description->counter_count; i++) {
        Tensorlane__V1__Counter *to = packing->counter_pointers[i] = &packing->counters[i];
        tensorlane__v1__counter__init(to);
        to->name = wire_text(description->counters[i].name);
        to->value = description->counters[i].value;
    }
}

static void pack_data_plane(const struct tl_data_plane_description *from, Tensorlane__V1__DataPlane *to)
{
    tensorlane__v1__data_plane__init(to);
    to->memlock = wire_text(from->memlock);
    to->device = wire_text(from->device);
    to->port = from->port;
    to->gid_index = from->gid_index;
    to->gid = wire_text(from->gid);
    to->gid_type = wire_text(from->gid_type);
    to->interface = wire_text(from->interface);
    to->port_state = wire_text(from->port_state);
    to->link_layer = wire_text(from->link_layer);
    to->mtu_bytes = from->mtu_bytes;
    to->keys = wire_text(from->keys);
    to->reason = wire_text(from->reason);
    to->passed_over = wire_text(from->passed_over);
    to->not_tried = wire_text(from->not_tried);
}

static void pack_settings(struct packing *packing, const struct tl_description *description)
{
    for (size_t i = 0; i < description->setting_count; i++) {
        Tensorlane__V1__Setting *to = packing->setting_pointers[i] = &packing->settings[i];
        tensorlane__v1__setting__init(to);
        to->path = wire_text(description->settings[i].path);
        to->value = wire_text(description->settings[i].value);
    }
}

static void pack_troubles(struct packing *packing, const struct tl_description *description)
{
    for (size_t i = 0; i < description->trouble_count; i++) {
        const struct tl_trouble *from = &description->troubles[i];
        Tensorlane__V1__Trouble *to = packing->trouble_pointers[i] = &packing->troubles[i];
        tensorlane__v1__trouble__init(to);
        to->what = wire_text(from->what);
        to->reason = wire_text(from->reason);
        to->remedy = wire_text(from->remedy);
        to->breaks_transfers = from->breaks_transfers;
    }
}

static void pack_gpus(struct packing *packing, const struct tl_description *description)
{
    for (size_t i = 0; i < description->gpu_count; i++) {
        const struct tl_gpu_description *from = &description->gpus[i];
        Tensorlane__V1__Gpu *to = packing->gpu_pointers[i] = &packing->gpus[i];
        tensorlane__v1__gpu__init(to);
        to->name = wire_text(from->name);
        to->model = wire_text(from->model);
        to->pci_address = wire_text(from->pci_address);
        to->is_lost = from->is_lost;
        to->is_kept_on = from->is_kept_on;
        to->card = wire_text(from->card);
        to->distance = wire_text(from->distance);
        to->path = wire_text(from->path);
        to->reason = wire_text(from->reason);
        to->is_slower = from->is_slower;
    }
}

/* What the worker says about its process, its settings, its troubles and its GPUs. */
static void pack_own_state(struct packing *packing, const struct tl_description *description,
                           Tensorlane__V1__IdentifyResponse *response)
{
    response->cluster_digest = description->cluster_digest;
    response->host_name = wire_text(description->host_name);
    response->process_id = description->process_id;
    response->unix_ns = description->unix_ns;
    response->reason = wire_text(description->reason);
    response->remedy = wire_text(description->remedy);
    pack_settings(packing, description);
    response->n_settings = description->setting_count;
    response->settings = packing->setting_pointers;
    for (size_t i = 0; i < description->listen_count; i++)
        packing->listens[i] = wire_text(description->listens[i]);
    response->n_listens = description->listen_count;
    response->listens = packing->listens;
    pack_troubles(packing, description);
    response->n_troubles = description->trouble_count;
    response->troubles = packing->trouble_pointers;
    pack_gpus(packing, description);
    response->n_gpus = description->gpu_count;
    response->gpus = packing->gpu_pointers;
}

static bool is_too_large(const Tensorlane__V1__IdentifyResponse *response)
{
    return protobuf_c_message_get_packed_size(&response->base) > TL_MAX_FRAME_HEAD_BYTES;
}

/* Makes the description of a large cluster fit: addresses and host names go first, because the reasons say more. */
static void leave_out_texts(const Tensorlane__V1__IdentifyResponse *response, struct packing *packing)
{
    if (!is_too_large(response)) return;
    for (size_t i = 0; i < response->n_peers; i++) {
        packing->peers[i].address = (char *)"";
        packing->peers[i].host_name = (char *)"";
    }
    if (!is_too_large(response)) return;
    for (size_t i = 0; i < response->n_peers; i++)
        packing->peers[i].reason = (char *)"";
}

static enum tl_status pack(const struct tl_description *description, grpc_byte_buffer **ret_message,
                           struct tl_error *ret_error)
{
    struct packing packing;
    Tensorlane__V1__DataPlane data_plane;
    if (!packing_init(&packing, description)) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the description of the worker");
    }
    pack_transports(&packing, description);
    pack_peers(&packing, description);
    pack_counters(&packing, description);
    Tensorlane__V1__IdentifyResponse response = TENSORLANE__V1__IDENTIFY_RESPONSE__INIT;
    response.job = wire_text(description->job);
    response.task = description->task;
    response.incarnation = description->incarnation;
    response.software_version = wire_text(description->software_version);
    response.protocol_version = TL_PROTOCOL_VERSION;
    response.is_serving = description->is_serving;
    response.uptime_ns = description->uptime_ns;
    response.n_transports = description->transport_count;
    response.transports = packing.transport_pointers;
    response.n_peers = description->peer_count;
    response.peers = packing.peer_pointers;
    response.n_counters = description->counter_count;
    response.counters = packing.counter_pointers;
    if (description->data_plane != NULL) {
        pack_data_plane(description->data_plane, &data_plane);
        response.data_plane = &data_plane;
    }
    pack_own_state(&packing, description, &response);
    leave_out_texts(&response, &packing);
    grpc_byte_buffer *message = tl_wire_write(&response.base);
    packing_fini(&packing);
    if (message == NULL) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the description of the worker");
    }
    *ret_message = message;
    return TL_OK;
}

static void identify_request(struct tl_service_call *call, grpc_byte_buffer *message)
{
    struct tl_control *control = call->control;
    struct tl_description description = {0};
    grpc_byte_buffer *answer = NULL;
    struct tl_error error;
    enum tl_status status = tl_identify_request_read(message, control->arena, &error);
    if (status == TL_OK) {
        status = control->options.handlers->describe(control->options.worker, &description, &error);
    }
    if (status == TL_OK) status = pack(&description, &answer, &error);
    tl_description_fini(&description);
    if (status != TL_OK) {
        tl_service_call_finish(call, &error);
        return;
    }
    tl_service_call_send(call, answer);
    tl_service_call_finish_ok(call);
}

static const struct tl_service_call_ops identify_ops = {
    .size_bytes = sizeof(struct tl_service_call),
    .request = identify_request,
};

static void identify_accept(void *control, struct tl_stream *stream)
{
    tl_service_call_accept(control, stream, &identify_ops);
}

enum tl_status tl_cluster_service_add(struct tl_control *control, struct tl_error *ret_error)
{
    return tl_rpc_server_add_method(control->server, "/tensorlane.v1.Cluster/Identify", TL_ACTION_PEERS,
                                    identify_accept, control, ret_error);
}
