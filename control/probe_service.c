// SPDX-License-Identifier: Apache-2.0
/*
 * The two methods of tensorlane.v1.Cluster that try connections: Probe makes the worker try its peers, and Echo is what
 * it sends them.
 *
 * Happy path: calls of Probe wait together; the worker answers all of them when its round is over. The worker
 * answers an Echo at once, and only the caller, with as many bytes as it asked for, at most 64 KiB. Both belong to the
 * health check, so that a worker whose calls are all in use still answers them.
 */
#include <stdlib.h>

#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/text.h"
#include "control/requests.h"
#include "control/service_call.h"
#include "tensorlane/v1/cluster.pb-c.h"

/* The data of a request and what stands before it. */
#define MAX_ECHO_REQUEST_BYTES (TL_MAX_ECHO_BYTES + 1024)

/* -------------------------------------------------------------------------------------------------------- Echo -- */

static uint64_t hash(struct tl_wire_data *data)
{
    XXH3_state_t state;
    XXH3_INITSTATE(&state);
    XXH3_64bits_reset(&state);
    while (data->left_bytes > 0) {
        const void *run;
        size_t run_bytes = tl_wire_data_next(data, data->left_bytes, &run);
        XXH3_64bits_update(&state, run, run_bytes);
    }
    return XXH3_64bits_digest(&state);
}

static void echo_request(struct tl_service_call *call, grpc_byte_buffer *message)
{
    static const char zeros[TL_MAX_ECHO_BYTES];
    const struct tl_control *control = call->control;
    const struct tl_identity *self = &control->options.self;
    struct tl_echo_request request;
    struct tl_error error;
    if (tl_echo_request_read(message, control->arena, &request, &error) != TL_OK) {
        tl_service_call_finish(call, &error);
        return;
    }
    Tensorlane__V1__EchoResponse response = TENSORLANE__V1__ECHO_RESPONSE__INIT;
    response.name = (char *)self->name;
    response.incarnation = self->incarnation;
    response.host_name = (char *)self->host_name;
    response.process_id = self->process_id;
    response.unix_ns = tl_clock_unix_ns();
    response.checksum = hash(&request.data);
    tl_wire_data_fini(&request.data);
    grpc_slice slice = grpc_slice_from_static_buffer(zeros, request.answer_bytes);
    tl_service_call_send(call, request.answer_bytes > 0
                                   ? tl_wire_write_with_data(&response.base, &slice, 1, request.answer_bytes)
                                   : tl_wire_write(&response.base));
    tl_service_call_finish_ok(call);
}

static const struct tl_service_call_ops echo_ops = {
    .size_bytes = sizeof(struct tl_service_call),
    .max_request_bytes = MAX_ECHO_REQUEST_BYTES,
    .request = echo_request,
};

static void echo_accept(void *control, struct tl_stream *stream)
{
    tl_service_call_accept(control, stream, &echo_ops);
}

/* ------------------------------------------------------------------------------------------------------- Probe -- */

/* A call that waits for the end of a probe. */
struct probe_call {
    struct tl_service_call call;
    struct tl_list place; /* in control->probe_calls */
};

/* A reason may name a file whose path is not UTF-8, which the answer must be. */
static void pack_probe(struct tl_peer_probe *from, Tensorlane__V1__PeerProbe *to)
{
    tensorlane__v1__peer_probe__init(to);
    to->name = from->name;
    to->is_ok = from->is_ok;
    to->stage = from->stage;
    to->direction = from->direction;
    to->address = from->address;
    tl_text_make_utf8(from->reason, strlen(from->reason));
    tl_text_make_utf8(from->remedy, strlen(from->remedy));
    to->reason = from->reason;
    to->remedy = from->remedy;
    to->incarnation = from->incarnation;
    to->age_ns = (uint64_t)(tl_clock_now_ns() - from->ended_ns);
    to->clock_offset_ns = from->clock_offset_ns;
}

static grpc_byte_buffer *pack(const struct tl_probe_results *results)
{
    size_t count = results->count;
    Tensorlane__V1__PeerProbe *items = calloc(count + 1, sizeof(*items));
    Tensorlane__V1__PeerProbe **pointers = calloc(count + 1, sizeof(*pointers));
    grpc_byte_buffer *message = NULL;
    if (items != NULL && pointers != NULL) {
        Tensorlane__V1__ProbeResponse response = TENSORLANE__V1__PROBE_RESPONSE__INIT;
        for (size_t i = 0; i < count; i++) {
            pack_probe(&results->items[i], &items[i]);
            pointers[i] = &items[i];
        }
        response.n_peers = count;
        response.peers = pointers;
        if (protobuf_c_message_get_packed_size(&response.base) > TL_MAX_FRAME_HEAD_BYTES) {
            /* The stages say enough when so many peers fail. A peer that was not judged is told by its reason. */
            for (size_t i = 0; i < count; i++) {
                bool is_judged = !items[i].is_ok || items[i].reason[0] == '\0';
                items[i].reason = (char *)(is_judged ? "" : "-");
                items[i].remedy = (char *)"";
            }
        }
        message = tl_wire_write(&response.base);
    }
    free(items);
    free(pointers);
    return message;
}

static void answer(struct tl_service_call *call, const struct tl_probe_results *results)
{
    tl_service_call_send(call, pack(results));
    tl_service_call_finish_ok(call);
}

static void probe_request(struct tl_service_call *call, grpc_byte_buffer *message)
{
    struct tl_control *control = call->control;
    struct tl_error error;
    const struct tl_probe_results *results = NULL;
    enum tl_status status = tl_probe_request_read(message, control->arena, &error);
    if (status == TL_OK && control->options.handlers->probe == NULL) {
        status = tl_error_set(&error, TL_UNIMPLEMENTED, "this worker cannot probe its peers");
    }
    if (status == TL_OK) status = control->options.handlers->probe(control->options.worker, &results, &error);
    if (status != TL_OK) {
        tl_service_call_finish(call, &error);
    } else if (results != NULL) {
        answer(call, results);
    } else {
        tl_list_push_back(&control->probe_calls, &TL_CONTAINER_OF(call, struct probe_call, call)->place);
    }
}

static void probe_closed(struct tl_service_call *call, bool is_delivered)
{
    (void)is_delivered;
    struct probe_call *probe = TL_CONTAINER_OF(call, struct probe_call, call);
    if (probe->place.next != NULL) tl_list_remove(&probe->place);
}

void tl_control_probed(struct tl_control *control, const struct tl_probe_results *results)
{
    while (!tl_list_is_empty(&control->probe_calls)) {
        struct probe_call *probe = TL_CONTAINER_OF(tl_list_pop_front(&control->probe_calls), struct probe_call, place);
        struct tl_error closed;
        if (results != NULL) {
            answer(&probe->call, results);
        } else {
            tl_error_set(&closed, TL_UNAVAILABLE, "the worker was closed");
            tl_service_call_finish(&probe->call, &closed);
        }
    }
}

static const struct tl_service_call_ops probe_ops = {
    .size_bytes = sizeof(struct probe_call),
    .request = probe_request,
    .closed = probe_closed,
};

static void probe_accept(void *control, struct tl_stream *stream)
{
    tl_service_call_accept(control, stream, &probe_ops);
}

enum tl_status tl_probe_service_add(struct tl_control *control, struct tl_error *ret_error)
{
    enum tl_status status = tl_rpc_server_add_health_method(control->server, "/tensorlane.v1.Cluster/Probe",
                                                            TL_ACTION_PEERS, probe_accept, control, ret_error);
    if (status != TL_OK) return status;
    return tl_rpc_server_add_health_method(control->server, "/tensorlane.v1.Cluster/Echo", TL_ACTION_HEALTH,
                                           echo_accept, control, ret_error);
}
