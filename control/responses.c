// SPDX-License-Identifier: Apache-2.0
/* Answers of servers, read and checked. */
#include "control/responses.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <tensorlane/tensor.h>

#include "base/check.h"
#include "base/error.h"
#include "grpc/health/v1/health.pb-c.h"
#include "tensorlane/v1/cluster.pb-c.h"

/* Longest text in a description. */
#define MAX_TEXT_BYTES 4096

enum tl_status tl_response_status(enum tl_status status, struct tl_error *error)
{
    if (status == TL_OK || status == TL_RESOURCE_EXHAUSTED) return status;
    if (error != NULL) error->code = TL_INTERNAL;
    return TL_INTERNAL;
}

static enum tl_status no_memory(const char *what, struct tl_error *ret_error)
{
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the %s", what);
}

static enum tl_status read_plain(const ProtobufCMessageDescriptor *descriptor, grpc_byte_buffer *message,
                                 struct tl_wire_arena *arena, ProtobufCMessage **ret_message,
                                 struct tl_error *ret_error)
{
    enum tl_status status = tl_wire_read_plain(descriptor, message, arena, ret_message, ret_error);
    return tl_response_status(status, ret_error);
}

enum tl_status tl_health_response_read(grpc_byte_buffer *message, struct tl_wire_arena *arena, int *ret_health,
                                       struct tl_error *ret_error)
{
    ProtobufCMessage *base;
    enum tl_status status =
        read_plain(&grpc__health__v1__health_check_response__descriptor, message, arena, &base, ret_error);
    if (status == TL_OK) *ret_health = (int)((const Grpc__Health__V1__HealthCheckResponse *)base)->status;
    return status;
}

enum tl_status tl_withdraw_response_read(grpc_byte_buffer *message, struct tl_wire_arena *arena, uint64_t *ret_count,
                                         struct tl_error *ret_error)
{
    ProtobufCMessage *base;
    enum tl_status status =
        read_plain(&tensorlane__v1__withdraw_response__descriptor, message, arena, &base, ret_error);
    if (status == TL_OK) *ret_count = ((const Tensorlane__V1__WithdrawResponse *)base)->count;
    return status;
}

enum tl_status tl_publish_response_read(grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                        struct tl_publish_response *ret_response, struct tl_error *ret_error)
{
    ProtobufCMessage *base;
    enum tl_status status = read_plain(&tensorlane__v1__publish_response__descriptor, message, arena, &base, ret_error);
    if (status != TL_OK) return status;
    const Tensorlane__V1__PublishResponse *response = (const Tensorlane__V1__PublishResponse *)base;
    *ret_response =
        (struct tl_publish_response){.publication = response->publication,
                                     .path = response->path <= TL_PATH_INLINE ? response->path : TL_PATH_NONE,
                                     .wants_data = response->wants_data != 0};
    return TL_OK;
}

/* ------------------------------------------------------------------------------------------------- description -- */

/* Copies a checked text. */
static enum tl_status copy_text(const char *text, const char *what, char **ret_copy, struct tl_error *ret_error)
{
    enum tl_status status = tl_wire_text(text, 0, MAX_TEXT_BYTES, what, ret_error);
    if (status != TL_OK) return tl_response_status(status, ret_error);
    char *copy = strdup(text != NULL ? text : "");
    if (copy == NULL) return no_memory(what, ret_error);
    *ret_copy = copy;
    return TL_OK;
}

static enum tl_status copy_transports(const Tensorlane__V1__IdentifyResponse *message,
                                      struct tl_description *description, struct tl_error *ret_error)
{
    if (message->n_transports == 0) return TL_OK;
    description->transports = calloc(message->n_transports, sizeof(*description->transports));
    if (description->transports == NULL) return no_memory("transports", ret_error);
    description->transport_count = message->n_transports;
    enum tl_status status = TL_OK;
    for (size_t i = 0; i < message->n_transports && status == TL_OK; i++) {
        struct tl_transport_state *to = &description->transports[i];
        to->is_available = message->transports[i]->is_available != 0;
        status = copy_text(message->transports[i]->name, "name of a transport", &to->name, ret_error);
        if (status == TL_OK) {
            status = copy_text(message->transports[i]->reason, "reason of a transport", &to->reason, ret_error);
        }
    }
    return status;
}

static enum tl_status copy_peer(const Tensorlane__V1__PeerState *from, struct tl_peer_description *to,
                                struct tl_error *ret_error)
{
    to->incarnation = from->incarnation;
    to->latency_ns = from->latency_ns;
    to->bytes_per_second = from->bytes_per_second;
    to->mtu_bytes = from->mtu_bytes;
    to->process_id = from->process_id;
    enum tl_status status = copy_text(from->name, "name of a peer", &to->name, ret_error);
    if (status == TL_OK) status = copy_text(from->state, "state of a peer", &to->state, ret_error);
    if (status == TL_OK) status = copy_text(from->transport, "transport of a peer", &to->transport, ret_error);
    if (status == TL_OK) status = copy_text(from->reason, "reason of a peer", &to->reason, ret_error);
    if (status == TL_OK) status = copy_text(from->address, "address of a peer", &to->address, ret_error);
    if (status == TL_OK) status = copy_text(from->host_name, "host name of a peer", &to->host_name, ret_error);
    return status;
}

static enum tl_status copy_peers(const Tensorlane__V1__IdentifyResponse *message, struct tl_description *description,
                                 struct tl_error *ret_error)
{
    if (message->n_peers == 0) return TL_OK;
    description->peers = calloc(message->n_peers, sizeof(*description->peers));
    if (description->peers == NULL) return no_memory("peers", ret_error);
    description->peer_count = message->n_peers;
    enum tl_status status = TL_OK;
    for (size_t i = 0; i < message->n_peers && status == TL_OK; i++) {
        status = copy_peer(message->peers[i], &description->peers[i], ret_error);
    }
    return status;
}

static enum tl_status copy_counters(const Tensorlane__V1__IdentifyResponse *message, struct tl_description *description,
                                    struct tl_error *ret_error)
{
    if (message->n_counters == 0) return TL_OK;
    description->counters = calloc(message->n_counters, sizeof(*description->counters));
    if (description->counters == NULL) return no_memory("counters", ret_error);
    description->counter_count = message->n_counters;
    enum tl_status status = TL_OK;
    for (size_t i = 0; i < message->n_counters && status == TL_OK; i++) {
        description->counters[i].value = message->counters[i]->value;
        status = copy_text(message->counters[i]->name, "name of a counter", &description->counters[i].name, ret_error);
    }
    return status;
}

static enum tl_status copy_data_plane(const Tensorlane__V1__IdentifyResponse *message,
                                      struct tl_description *description, struct tl_error *ret_error)
{
    const Tensorlane__V1__DataPlane *from = message->data_plane;
    if (from == NULL) return TL_OK;
    struct tl_data_plane_description *to = calloc(1, sizeof(*to));
    if (to == NULL) return no_memory("data plane", ret_error);
    description->data_plane = to;
    to->port = from->port;
    to->gid_index = from->gid_index;
    to->mtu_bytes = from->mtu_bytes;
    const struct {
        const char *text, *what;
        char **copy;
    } texts[] = {
        {from->memlock, "limit of locked memory", &to->memlock},
        {from->device, "device", &to->device},
        {from->gid, "GID", &to->gid},
        {from->gid_type, "type of a GID", &to->gid_type},
        {from->interface, "interface", &to->interface},
        {from->port_state, "state of a port", &to->port_state},
        {from->link_layer, "link layer", &to->link_layer},
        {from->keys, "mode of keys", &to->keys},
        {from->reason, "reason of a device", &to->reason},
        {from->passed_over, "devices passed over", &to->passed_over},
        {from->not_tried, "devices not tried", &to->not_tried},
    };
    enum tl_status status = TL_OK;
    for (size_t i = 0; i < TL_ARRAY_COUNT(texts) && status == TL_OK; i++)
        status = copy_text(texts[i].text, texts[i].what, texts[i].copy, ret_error);
    return status;
}

static enum tl_status copy_settings(const Tensorlane__V1__IdentifyResponse *message, struct tl_description *description,
                                    struct tl_error *ret_error)
{
    if (message->n_settings == 0) return TL_OK;
    description->settings = calloc(message->n_settings, sizeof(*description->settings));
    if (description->settings == NULL) return no_memory("settings", ret_error);
    description->setting_count = message->n_settings;
    enum tl_status status = TL_OK;
    for (size_t i = 0; i < message->n_settings && status == TL_OK; i++) {
        struct tl_setting_text *to = &description->settings[i];
        status = copy_text(message->settings[i]->path, "path of a setting", &to->path, ret_error);
        if (status == TL_OK) {
            status = copy_text(message->settings[i]->value, "value of a setting", &to->value, ret_error);
        }
    }
    return status;
}

static enum tl_status copy_listens(const Tensorlane__V1__IdentifyResponse *message, struct tl_description *description,
                                   struct tl_error *ret_error)
{
    if (message->n_listens == 0) return TL_OK;
    description->listens = calloc(message->n_listens, sizeof(*description->listens));
    if (description->listens == NULL) return no_memory("bound addresses", ret_error);
    description->listen_count = message->n_listens;
    enum tl_status status = TL_OK;
    for (size_t i = 0; i < message->n_listens && status == TL_OK; i++)
        status = copy_text(message->listens[i], "bound address", &description->listens[i], ret_error);
    return status;
}

static enum tl_status copy_troubles(const Tensorlane__V1__IdentifyResponse *message, struct tl_description *description,
                                    struct tl_error *ret_error)
{
    if (message->n_troubles == 0) return TL_OK;
    description->troubles = calloc(message->n_troubles, sizeof(*description->troubles));
    if (description->troubles == NULL) return no_memory("troubles", ret_error);
    description->trouble_count = message->n_troubles;
    enum tl_status status = TL_OK;
    for (size_t i = 0; i < message->n_troubles && status == TL_OK; i++) {
        const Tensorlane__V1__Trouble *from = message->troubles[i];
        struct tl_trouble *to = &description->troubles[i];
        to->breaks_transfers = from->breaks_transfers != 0;
        status = copy_text(from->what, "name of a trouble", &to->what, ret_error);
        if (status == TL_OK) status = copy_text(from->reason, "reason of a trouble", &to->reason, ret_error);
        if (status == TL_OK) status = copy_text(from->remedy, "remedy of a trouble", &to->remedy, ret_error);
    }
    return status;
}

static enum tl_status copy_gpu(const Tensorlane__V1__Gpu *from, struct tl_gpu_description *to,
                               struct tl_error *ret_error)
{
    to->is_lost = from->is_lost != 0;
    to->is_kept_on = from->is_kept_on != 0;
    to->is_slower = from->is_slower != 0;
    enum tl_status status = copy_text(from->name, "name of a GPU", &to->name, ret_error);
    if (status == TL_OK) status = copy_text(from->model, "model of a GPU", &to->model, ret_error);
    if (status == TL_OK) status = copy_text(from->pci_address, "place of a GPU", &to->pci_address, ret_error);
    if (status == TL_OK) status = copy_text(from->card, "card of a GPU", &to->card, ret_error);
    if (status == TL_OK) status = copy_text(from->distance, "distance of a GPU", &to->distance, ret_error);
    if (status == TL_OK) status = copy_text(from->path, "path of a GPU", &to->path, ret_error);
    if (status == TL_OK) status = copy_text(from->reason, "reason of a GPU", &to->reason, ret_error);
    return status;
}

static enum tl_status copy_gpus(const Tensorlane__V1__IdentifyResponse *message, struct tl_description *description,
                                struct tl_error *ret_error)
{
    if (message->n_gpus == 0) return TL_OK;
    description->gpus = calloc(message->n_gpus, sizeof(*description->gpus));
    if (description->gpus == NULL) return no_memory("GPUs", ret_error);
    description->gpu_count = message->n_gpus;
    enum tl_status status = TL_OK;
    for (size_t i = 0; i < message->n_gpus && status == TL_OK; i++)
        status = copy_gpu(message->gpus[i], &description->gpus[i], ret_error);
    return status;
}

/* What the worker says about its process, its settings, its troubles and its GPUs. */
static enum tl_status copy_own_state(const Tensorlane__V1__IdentifyResponse *message,
                                     struct tl_description *description, struct tl_error *ret_error)
{
    description->cluster_digest = message->cluster_digest;
    description->process_id = message->process_id;
    description->unix_ns = tl_wire_unix_ns(message->unix_ns);
    enum tl_status status = copy_text(message->host_name, "host name", &description->host_name, ret_error);
    if (status == TL_OK) status = copy_text(message->reason, "reason", &description->reason, ret_error);
    if (status == TL_OK) status = copy_text(message->remedy, "remedy", &description->remedy, ret_error);
    if (status == TL_OK) status = copy_settings(message, description, ret_error);
    if (status == TL_OK) status = copy_listens(message, description, ret_error);
    if (status == TL_OK) status = copy_troubles(message, description, ret_error);
    if (status == TL_OK) status = copy_gpus(message, description, ret_error);
    return status;
}

enum tl_status tl_identify_response_read(grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                         struct tl_description *ret_description, struct tl_error *ret_error)
{
    ProtobufCMessage *base;
    enum tl_status status =
        read_plain(&tensorlane__v1__identify_response__descriptor, message, arena, &base, ret_error);
    if (status != TL_OK) return status;
    const Tensorlane__V1__IdentifyResponse *response = (const Tensorlane__V1__IdentifyResponse *)base;
    struct tl_description description = {
        .task = response->task,
        .incarnation = response->incarnation,
        .protocol_version = response->protocol_version,
        .is_serving = response->is_serving != 0,
        .uptime_ns = response->uptime_ns,
    };
    status = copy_text(response->job, "job", &description.job, ret_error);
    if (status == TL_OK) {
        status = copy_text(response->software_version, "software version", &description.software_version, ret_error);
    }
    if (status == TL_OK) status = copy_transports(response, &description, ret_error);
    if (status == TL_OK) status = copy_peers(response, &description, ret_error);
    if (status == TL_OK) status = copy_counters(response, &description, ret_error);
    if (status == TL_OK) status = copy_data_plane(response, &description, ret_error);
    if (status == TL_OK) status = copy_own_state(response, &description, ret_error);
    if (status != TL_OK) {
        tl_description_fini(&description);
        return status;
    }
    *ret_description = description;
    return TL_OK;
}

/* ----------------------------------------------------------------------------------------------------- listing -- */

static enum tl_status too_many(const struct tl_listing_builder *builder, struct tl_error *ret_error)
{
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                        "the listing has more than %zu tensors; ask for fewer with a pattern", builder->listing.count);
}

static enum tl_status reserve(struct tl_listing_builder *builder, struct tl_error *ret_error)
{
    if (builder->listing.count < builder->capacity) return TL_OK;
    size_t capacity = builder->capacity > 0 ? builder->capacity * 2 : 256;
    struct tl_listed *items = realloc(builder->listing.items, capacity * sizeof(*items));
    if (items == NULL) return no_memory("listing", ret_error);
    builder->listing.items = items;
    builder->capacity = capacity;
    return TL_OK;
}

static enum tl_status add_map(struct tl_listing_builder *builder, const Tensorlane__V1__Annotations *message,
                              struct tl_annotations **ret_map, struct tl_error *ret_error)
{
    enum tl_status status = tl_wire_to_annotations(message, ret_map, ret_error);
    if (status != TL_OK) return tl_response_status(status, ret_error);
    builder->used_bytes += tl_annotations_bytes(*ret_map);
    if (builder->used_bytes <= TL_MAX_LISTED_BYTES) return TL_OK;
    return too_many(builder, ret_error);
}

/* maps: [map_count], the annotations of this message. */
static enum tl_status add_entry(struct tl_listing_builder *builder, const Tensorlane__V1__ListEntry *entry,
                                struct tl_annotations *const *maps, size_t map_count, struct tl_error *ret_error)
{
    enum tl_status status = tl_wire_text(entry->key, 1, TL_MAX_KEY_BYTES, "key", ret_error);
    if (status != TL_OK) return tl_response_status(status, ret_error);
    struct tl_listed item = {.step = entry->step, .publication = entry->publication};
    status = tl_wire_to_meta_data(entry->meta_data, &item.meta_data, ret_error);
    if (status != TL_OK) {
        tl_error_prefix(ret_error, "%s: ", entry->key);
        return tl_response_status(status, ret_error);
    }
    if (entry->annotations > map_count)
        return tl_error_set(ret_error, TL_INTERNAL, "%s: has annotations %u of %zu", entry->key, entry->annotations,
                            map_count);
    uint64_t bytes = sizeof(item) + strlen(entry->key) + 1;
    if (builder->listing.count == TL_MAX_LISTED_COUNT || bytes > TL_MAX_LISTED_BYTES - builder->used_bytes) {
        return too_many(builder, ret_error);
    }
    status = reserve(builder, ret_error);
    if (status != TL_OK) return status;
    item.key = strdup(entry->key);
    if (item.key == NULL) return no_memory("listing", ret_error);
    if (entry->annotations > 0) item.annotations = tl_annotations_get(maps[entry->annotations - 1]);
    builder->listing.items[builder->listing.count++] = item;
    builder->used_bytes += bytes;
    return TL_OK;
}

enum tl_status tl_list_response_read(grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                     struct tl_listing_builder *builder, struct tl_error *ret_error)
{
    ProtobufCMessage *base;
    enum tl_status status = read_plain(&tensorlane__v1__list_response__descriptor, message, arena, &base, ret_error);
    if (status != TL_OK) return status;
    const Tensorlane__V1__ListResponse *response = (const Tensorlane__V1__ListResponse *)base;
    size_t map_count = 0;
    struct tl_annotations **maps = calloc(response->n_annotations + 1, sizeof(struct tl_annotations *));
    if (maps == NULL) return no_memory("listing", ret_error);
    for (; map_count < response->n_annotations && status == TL_OK; map_count++) {
        status = add_map(builder, response->annotations[map_count], &maps[map_count], ret_error);
    }
    for (size_t i = 0; i < response->n_entries && status == TL_OK; i++) {
        status = add_entry(builder, response->entries[i], maps, map_count, ret_error);
    }
    while (map_count > 0)
        tl_annotations_put(maps[--map_count]);
    free(maps);
    return status;
}

static int compare_keys(const void *a, const void *b)
{
    return strcmp(((const struct tl_listed *)a)->key, ((const struct tl_listed *)b)->key);
}

void tl_listing_builder_finish(struct tl_listing_builder *builder, struct tl_listing *ret_listing)
{
    if (builder->listing.count > 1) {
        qsort(builder->listing.items, builder->listing.count, sizeof(*builder->listing.items), compare_keys);
    }
    *ret_listing = builder->listing;
    *builder = (struct tl_listing_builder){0};
}
