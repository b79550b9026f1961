// SPDX-License-Identifier: Apache-2.0
#include "control/peer_call.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "control/client_publish.h"
#include "control/link_internal.h"
#include "control/responses.h"

#define CHUNK_BYTES (UINT64_C(1) << 20)
#define LIST_ARENA_BYTES (4 * 1024 * 1024)
#define SHORT_ARENA_BYTES (16 * 1024)

struct tl_peer_call {
    struct tl_client_publish publish; /* its client makes the call, whatever is asked */
    struct tl_call_options options;
    char address[TL_MAX_ADDRESS_BYTES];
    enum tl_peer_call_kind kind;
    struct tl_listing_builder builder;
    uint64_t count;
    tl_peer_call_done done;
    void *context;
};

static void call_free(struct tl_peer_call *call)
{
    tl_client_publish_fini(&call->publish);
    tl_listing_fini(&call->builder.listing);
    free(call);
}

/* The link has ended while the call waited for its connection: gRPC says so without a code of its own. */
static bool has_lost_channel(const struct tl_error *status)
{
    return status->code == TL_UNKNOWN && strstr(status->message, "Channel Destroyed") != NULL;
}

static void ended(struct tl_client *client)
{
    struct tl_peer_call *call = TL_CONTAINER_OF(client, struct tl_peer_call, publish.client);
    struct tl_peer_call_result result = {.count = call->count};
    if (tl_client_result(client, &result.status) == TL_OK) {
        result.status.code = TL_OK;
        result.path = call->publish.response.path;
        result.wants_data = call->publish.response.wants_data;
        if (call->kind == TL_PEER_CALL_LIST) tl_listing_builder_finish(&call->builder, &result.listing);
    } else if (has_lost_channel(&result.status)) {
        tl_error_set(&result.status, TL_UNAVAILABLE, "%s: the connection has ended", call->address);
    }
    tl_peer_call_done done = call->done;
    void *context = call->context;
    call_free(call);
    done(context, &result);
}

/* A call with one request. */
static enum tl_status ask(struct tl_peer_call *call, const struct tl_client_method *method,
                          const ProtobufCMessage *request, void *context, struct tl_error *ret_error)
{
    struct tl_client *client = &call->publish.client;
    enum tl_status status = tl_client_start(client, method, context, TL_TIME_NEVER, tl_wire_write(request), ret_error);
    if (status == TL_OK) tl_stream_half_close(client->stream);
    return status;
}

static enum tl_status start(struct tl_peer_call *call, const char *text, struct tl_error *ret_error)
{
    Tensorlane__V1__ListRequest list = TENSORLANE__V1__LIST_REQUEST__INIT;
    Tensorlane__V1__WithdrawRequest withdraw = TENSORLANE__V1__WITHDRAW_REQUEST__INIT;
    list.pattern = withdraw.pattern = (char *)text;
    switch (call->kind) {
    case TL_PEER_CALL_PUBLISH:
        return tl_client_publish_start(&call->publish, ret_error);
    case TL_PEER_CALL_LIST:
        return ask(call, &tl_client_list_method, &list.base, &call->builder, ret_error);
    case TL_PEER_CALL_WITHDRAW:
        break;
    }
    return ask(call, &tl_client_withdraw_method, &withdraw.base, &call->count, ret_error);
}

enum tl_status tl_peer_call_start(struct tl_link *link, const struct tl_peer_call_request *request,
                                  tl_peer_call_done done, void *context, struct tl_peer_call **ret_call,
                                  struct tl_error *ret_error)
{
    TL_CHECK(tl_link_is_ours(link) && link->channel != NULL);
    struct tl_peer_call *call = calloc(1, sizeof(*call));
    if (call == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a call to a peer");
    call->kind = request->kind;
    call->done = done;
    call->context = context;
    snprintf(call->address, sizeof(call->address), "%s", link->peer.address);
    call->options = (struct tl_call_options){.address = call->address, .rpc_timeout_ns = TL_TIME_NEVER};
    call->publish.key = request->text;
    call->publish.step = request->step;
    call->publish.may_go_back = request->may_go_back;
    call->publish.tensor = request->tensor;
    call->publish.source = request->source;
    call->publish.chunk_bytes = CHUNK_BYTES;
    size_t arena_bytes = request->kind == TL_PEER_CALL_LIST ? LIST_ARENA_BYTES : SHORT_ARENA_BYTES;
    enum tl_status status = tl_client_attach(&call->publish.client, &call->options, link->control->loop, link->channel,
                                             arena_bytes, ended, ret_error);
    if (status == TL_OK) status = start(call, request->text, ret_error);
    if (status != TL_OK) {
        call_free(call);
        return status;
    }
    *ret_call = call;
    return TL_OK;
}

void tl_peer_call_cancel(struct tl_peer_call *call, const struct tl_error *reason)
{
    tl_client_fail(&call->publish.client, reason);
}
