// SPDX-License-Identifier: Apache-2.0
/* Answers of workers to Probe and Echo, read and checked. */
#include <stdio.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/error.h"
#include "control/responses.h"
#include "tensorlane/v1/cluster.pb-c.h"

static enum tl_status copy_text(const char *text, const char *what, char *ret_copy, size_t capacity,
                                struct tl_error *ret_error)
{
    enum tl_status status = tl_wire_text(text, 0, capacity - 1, what, ret_error);
    if (status == TL_OK) snprintf(ret_copy, capacity, "%s", text);
    return tl_response_status(status, ret_error);
}

static enum tl_status copy_probe(const Tensorlane__V1__PeerProbe *from, struct tl_peer_probe *to,
                                 struct tl_error *ret_error)
{
    to->is_ok = from->is_ok != 0;
    to->incarnation = from->incarnation;
    to->age_ns = from->age_ns;
    to->clock_offset_ns = from->clock_offset_ns;
    const struct {
        const char *text, *what;
        char *copy;
        size_t capacity;
    } texts[] = {
        {from->name, "name of a peer", to->name, sizeof(to->name)},
        {from->address, "address of a peer", to->address, sizeof(to->address)},
        {from->stage, "stage of a probe", to->stage, sizeof(to->stage)},
        {from->direction, "direction of a probe", to->direction, sizeof(to->direction)},
        {from->reason, "reason of a probe", to->reason, sizeof(to->reason)},
        {from->remedy, "remedy of a probe", to->remedy, sizeof(to->remedy)},
    };
    enum tl_status status = TL_OK;
    for (size_t i = 0; i < TL_ARRAY_COUNT(texts) && status == TL_OK; i++)
        status = copy_text(texts[i].text, texts[i].what, texts[i].copy, texts[i].capacity, ret_error);
    return status;
}

enum tl_status tl_probe_response_read(grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                      struct tl_probe_results *ret_results, struct tl_error *ret_error)
{
    ProtobufCMessage *base;
    enum tl_status status =
        tl_wire_read_plain(&tensorlane__v1__probe_response__descriptor, message, arena, &base, ret_error);
    if (status != TL_OK) return tl_response_status(status, ret_error);
    const Tensorlane__V1__ProbeResponse *response = (const Tensorlane__V1__ProbeResponse *)base;
    size_t count = response->n_peers;
    struct tl_peer_probe *items = calloc(count > 0 ? count : 1, sizeof(*items));
    if (items == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for %zu probes", count);
    for (size_t i = 0; i < count && status == TL_OK; i++)
        status = copy_probe(response->peers[i], &items[i], ret_error);
    if (status != TL_OK) {
        free(items);
        return status;
    }
    *ret_results = (struct tl_probe_results){.items = items, .count = count};
    return TL_OK;
}

enum tl_status tl_echo_response_read(grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                     struct tl_echo_response *ret_response, struct tl_error *ret_error)
{
    ProtobufCMessage *base;
    struct tl_wire_data data;
    enum tl_status status =
        tl_wire_read(&tensorlane__v1__echo_response__descriptor, message, arena, &base, &data, ret_error);
    if (status != TL_OK) return tl_response_status(status, ret_error);
    const Tensorlane__V1__EchoResponse *from = (const Tensorlane__V1__EchoResponse *)base;
    struct tl_echo_response to = {.incarnation = from->incarnation,
                                  .process_id = from->process_id,
                                  .unix_ns = tl_wire_unix_ns(from->unix_ns),
                                  .checksum = from->checksum,
                                  .data_bytes = data.left_bytes};
    tl_wire_data_fini(&data);
    status = copy_text(from->name, "name of a worker", to.name, sizeof(to.name), ret_error);
    if (status == TL_OK)
        status = copy_text(from->host_name, "host name", to.host_name, sizeof(to.host_name), ret_error);
    if (status == TL_OK) *ret_response = to;
    return status;
}
