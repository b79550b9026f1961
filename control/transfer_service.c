// SPDX-License-Identifier: Apache-2.0
/*
 * tensorlane.v1.Transfer for any client. Exchange, between workers, is the link (control/link.h); Receive and Publish
 * have files of their own; Withdraw and List are here.
 *
 * A listing leaves in messages of at most MAX_ENTRIES entries and about MESSAGE_BYTES, one at a time. It is taken as it
 * is when the call comes, and does not change under the client.
 */
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "control/requests.h"
#include "control/service_call.h"
#include "control/transfer_calls.h"

#define MAX_ENTRIES 256
/* Of entries in one message; what a client of this project accepts is TL_MAX_FRAME_HEAD_BYTES. */
#define MESSAGE_BYTES (192 * 1024)
/* What an entry has besides its key, at most: tags, lengths, 16 dimensions. */
#define ENTRY_BYTES (64 + 10 * TL_MAX_RANK)

/* ---------------------------------------------------------------------------------------------------- Withdraw -- */

static void withdraw_request(struct tl_service_call *call, grpc_byte_buffer *message)
{
    struct tl_control *control = call->control;
    const char *pattern;
    struct tl_error error;
    if (tl_withdraw_request_read(message, control->arena, &pattern, &error) != TL_OK) {
        tl_service_call_finish(call, &error);
        return;
    }
    Tensorlane__V1__WithdrawResponse response = TENSORLANE__V1__WITHDRAW_RESPONSE__INIT;
    response.count = control->options.handlers->withdraw(control->options.worker, &call->client, pattern);
    tl_service_call_answer(call, &response.base);
}

static const struct tl_service_call_ops withdraw_ops = {
    .size_bytes = sizeof(struct tl_service_call),
    .request = withdraw_request,
};

static void withdraw_accept(void *control, struct tl_stream *stream)
{
    tl_service_call_accept(control, stream, &withdraw_ops);
}

/* -------------------------------------------------------------------------------------------------------- List -- */

struct list_call {
    struct tl_service_call call;
    struct tl_listing listing;
    size_t sent_count;
};

/* One message of entries, while it is packed. */
struct batch {
    Tensorlane__V1__ListEntry entries[MAX_ENTRIES];
    Tensorlane__V1__ListEntry *pointers[MAX_ENTRIES];
    Tensorlane__V1__MetaData meta_data[MAX_ENTRIES];
    uint64_t dims[MAX_ENTRIES][TL_MAX_RANK];
};

static void batch_add(struct batch *batch, size_t i, const struct tl_listed *item)
{
    Tensorlane__V1__ListEntry *entry = &batch->entries[i];
    tensorlane__v1__list_entry__init(entry);
    tl_wire_from_meta_data(&item->meta_data, batch->dims[i], &batch->meta_data[i]);
    entry->key = item->key;
    entry->step = item->step;
    entry->publication = item->publication;
    entry->meta_data = &batch->meta_data[i];
    batch->pointers[i] = entry;
}

/* Packs the next entries; NULL when there is no memory. */
static grpc_byte_buffer *compose_batch(struct list_call *list)
{
    struct batch *batch = malloc(sizeof(*batch));
    if (batch == NULL) return NULL;
    Tensorlane__V1__ListResponse response = TENSORLANE__V1__LIST_RESPONSE__INIT;
    response.entries = batch->pointers;
    size_t used = 0;
    while (list->sent_count < list->listing.count && response.n_entries < MAX_ENTRIES && used < MESSAGE_BYTES) {
        const struct tl_listed *item = &list->listing.items[list->sent_count++];
        batch_add(batch, response.n_entries++, item);
        used += ENTRY_BYTES + strlen(item->key);
    }
    grpc_byte_buffer *message = tl_wire_write(&response.base);
    free(batch);
    return message;
}

static void list_send(struct tl_service_call *call)
{
    struct list_call *list = TL_CONTAINER_OF(call, struct list_call, call);
    if (list->sent_count == list->listing.count) {
        tl_service_call_finish_ok(call);
        return;
    }
    tl_service_call_expect_progress(call);
    tl_service_call_send(call, compose_batch(list));
}

static void list_request(struct tl_service_call *call, grpc_byte_buffer *message)
{
    struct list_call *list = TL_CONTAINER_OF(call, struct list_call, call);
    struct tl_control *control = call->control;
    const char *pattern;
    struct tl_error error;
    enum tl_status status = tl_list_request_read(message, control->arena, &pattern, &error);
    if (status == TL_OK) {
        status = control->options.handlers->list(control->options.worker, pattern, &list->listing, &error);
    }
    if (status == TL_OK) {
        list_send(call);
    } else {
        tl_service_call_finish(call, &error);
    }
}

static void list_closed(struct tl_service_call *call, bool is_delivered)
{
    (void)is_delivered;
    tl_listing_fini(&TL_CONTAINER_OF(call, struct list_call, call)->listing);
}

static const struct tl_service_call_ops list_ops = {
    .size_bytes = sizeof(struct list_call),
    .request = list_request,
    .sent = list_send,
    .closed = list_closed,
};

static void list_accept(void *control, struct tl_stream *stream)
{
    tl_service_call_accept(control, stream, &list_ops);
}

/* ------------------------------------------------------------------------------------------------------- public -- */

enum tl_status tl_transfer_service_add(struct tl_control *control, struct tl_error *ret_error)
{
    static const struct {
        const char *method;
        tl_accept_fn accept;
    } methods[] = {
        {"/tensorlane.v1.Transfer/Receive", tl_receive_call_accept},
        {"/tensorlane.v1.Transfer/Publish", tl_publish_call_accept},
        {"/tensorlane.v1.Transfer/Withdraw", withdraw_accept},
        {"/tensorlane.v1.Transfer/List", list_accept},
    };
    enum tl_status status = TL_OK;
    for (size_t i = 0; i < TL_ARRAY_COUNT(methods) && status == TL_OK; i++) {
        status = tl_rpc_server_add_method(control->server, methods[i].method, methods[i].accept, control, ret_error);
    }
    return status;
}
