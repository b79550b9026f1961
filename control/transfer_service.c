// SPDX-License-Identifier: Apache-2.0
/*
 * tensorlane.v1.Transfer for any client. Exchange, between workers, is the link (control/link.h); Receive and Publish
 * have files of their own; Withdraw and List are here.
 *
 * Both look through all that is published, in steps of a few milliseconds, so that many tensors and a costly pattern do
 * not hold up the loop. One step is made in each round of the loop, by one call after the other.
 *
 * A listing leaves in messages of at most MAX_ENTRIES entries and MESSAGE_BYTES, one at a time. Annotations that
 * several entries of a message share are in it once.
 */
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "control/listing.h"
#include "control/requests.h"
#include "control/service_call.h"
#include "control/transfer_calls.h"

#define MAX_ENTRIES 256
/* Size of the entries in one message; a client of this project accepts TL_MAX_FRAME_HEAD_BYTES. */
#define MESSAGE_BYTES (192 * 1024)
/* What an entry has besides its key, at most: tags, lengths, 16 dimensions. */
#define ENTRY_BYTES (64 + 10 * TL_MAX_RANK)

/* ------------------------------------------------------------------------------------------------------- walks -- */

/* A call of Withdraw or List. */
struct walk_call {
    struct tl_service_call call;
    struct tl_list place; /* in control->walks while the walk goes on */
    struct tl_walk *walk; /* NULL: not begun */
    size_t sent_count;    /* entries of the listing */
};

static void walk_later(struct walk_call *call)
{
    struct tl_control *control = call->call.control;
    tl_list_push_back(&control->walks, &call->place);
    if (!tl_list_is_linked(&control->walk_closure.link)) tl_loop_defer(control->loop, &control->walk_closure);
}

/* One step of the walk that waits longest. */
void tl_transfer_walk_on(struct tl_closure *closure)
{
    struct tl_control *control = TL_CONTAINER_OF(closure, struct tl_control, walk_closure);
    struct tl_list *place = tl_list_pop_front(&control->walks);
    if (place == NULL) return;
    struct walk_call *call = TL_CONTAINER_OF(place, struct walk_call, place);
    struct tl_error error;
    enum tl_status status = control->options.handlers->walk_step(control->options.worker, call->walk, &error);
    if (!tl_list_is_empty(&control->walks)) tl_loop_defer(control->loop, &control->walk_closure);
    if (status != TL_OK) {
        tl_service_call_finish(&call->call, &error);
    } else if (call->walk->is_complete) {
        call->call.ops->sent(&call->call);
    } else {
        walk_later(call);
    }
}

static void walk_start(struct walk_call *call, const char *pattern, bool withdraws)
{
    struct tl_control *control = call->call.control;
    struct tl_error error;
    if (control->options.handlers->walk_begin(control->options.worker, &call->call.client, pattern, withdraws,
                                              &call->walk, &error) == TL_OK) {
        walk_later(call);
    } else {
        tl_service_call_finish(&call->call, &error);
    }
}

static void walk_closed(struct tl_service_call *service_call, bool is_delivered)
{
    (void)is_delivered;
    struct walk_call *call = TL_CONTAINER_OF(service_call, struct walk_call, call);
    struct tl_control *control = service_call->control;
    if (call->walk == NULL) return;
    tl_list_remove(&call->place);
    control->options.handlers->walk_end(control->options.worker, call->walk);
}

/* ---------------------------------------------------------------------------------------------------- Withdraw -- */

static void withdraw_request(struct tl_service_call *call, grpc_byte_buffer *message)
{
    const char *pattern;
    struct tl_error error;
    if (tl_withdraw_request_read(message, call->control->arena, &pattern, &error) == TL_OK) {
        walk_start(TL_CONTAINER_OF(call, struct walk_call, call), pattern, true);
    } else {
        tl_service_call_finish(call, &error);
    }
}

static void withdraw_complete(struct tl_service_call *call)
{
    Tensorlane__V1__WithdrawResponse response = TENSORLANE__V1__WITHDRAW_RESPONSE__INIT;
    response.count = TL_CONTAINER_OF(call, struct walk_call, call)->walk->withdrawn_count;
    tl_service_call_answer(call, &response.base);
}

static const struct tl_service_call_ops withdraw_ops = {
    .size_bytes = sizeof(struct walk_call),
    .request = withdraw_request,
    .sent = withdraw_complete,
    .closed = walk_closed,
};

static void withdraw_accept(void *control, struct tl_stream *stream)
{
    tl_service_call_accept(control, stream, &withdraw_ops);
}

/* -------------------------------------------------------------------------------------------------------- List -- */

/* One message of entries, while it is packed. */
struct batch {
    size_t used_bytes; /* at most */
    Tensorlane__V1__ListEntry entries[MAX_ENTRIES];
    Tensorlane__V1__ListEntry *pointers[MAX_ENTRIES];
    Tensorlane__V1__MetaData meta_data[MAX_ENTRIES];
    uint64_t dims[MAX_ENTRIES][TL_MAX_RANK];
    const struct tl_annotations *maps[MAX_ENTRIES]; /* [map_count], each once */
    Tensorlane__V1__Annotations annotations[MAX_ENTRIES];
    Tensorlane__V1__Annotations *annotation_pointers[MAX_ENTRIES];
    size_t map_count;
};

/* Where the annotations of the item are, from 1, or will be added; 0: it has none. */
static size_t find_map(const struct batch *batch, const struct tl_listed *item)
{
    size_t i = 0;
    if (item->annotations == NULL) return 0;
    while (i < batch->map_count && batch->maps[i] != item->annotations)
        i++;
    return i + 1;
}

/* False: no memory. */
static bool add_map(struct batch *batch, const struct tl_annotations *annotations)
{
    size_t i = batch->map_count;
    if (!tl_wire_from_annotations(annotations, &batch->annotations[i])) return false;
    batch->maps[i] = annotations;
    batch->annotation_pointers[i] = &batch->annotations[i];
    batch->map_count++;
    return true;
}

static void batch_add(struct batch *batch, size_t i, const struct tl_listed *item)
{
    Tensorlane__V1__ListEntry *entry = &batch->entries[i];
    tensorlane__v1__list_entry__init(entry);
    tl_wire_from_meta_data(&item->meta_data, batch->dims[i], &batch->meta_data[i]);
    entry->key = item->key;
    entry->step = item->step;
    entry->publication = item->publication;
    entry->meta_data = &batch->meta_data[i];
    entry->annotations = (uint32_t)find_map(batch, item);
    batch->pointers[i] = entry;
}

/* Adds as many of the next entries as fit into a message; false when there is no memory. */
static bool fill_batch(struct batch *batch, struct walk_call *list, Tensorlane__V1__ListResponse *response)
{
    struct tl_listing *listing = &list->walk->listing;
    while (list->sent_count < listing->count && response->n_entries < MAX_ENTRIES) {
        const struct tl_listed *item = &listing->items[0];
        bool is_new = find_map(batch, item) > batch->map_count;
        /* What annotations take in memory is more than what they take in a message. */
        size_t bytes = ENTRY_BYTES + strlen(item->key) + (is_new ? tl_annotations_bytes(item->annotations) : 0);
        if (response->n_entries > 0 && batch->used_bytes + bytes > MESSAGE_BYTES) break;
        if (is_new && !add_map(batch, item->annotations)) return false;
        item = tl_listing_take(listing, listing->count - list->sent_count++);
        batch_add(batch, response->n_entries++, item);
        batch->used_bytes += bytes;
    }
    return true;
}

/* Packs the next entries; NULL when there is no memory. */
static grpc_byte_buffer *compose_batch(struct walk_call *list)
{
    struct batch *batch = malloc(sizeof(*batch));
    if (batch == NULL) return NULL;
    batch->used_bytes = 0;
    batch->map_count = 0;
    Tensorlane__V1__ListResponse response = TENSORLANE__V1__LIST_RESPONSE__INIT;
    response.entries = batch->pointers;
    response.annotations = batch->annotation_pointers;
    grpc_byte_buffer *message = NULL;
    bool is_filled = fill_batch(batch, list, &response);
    response.n_annotations = batch->map_count;
    if (is_filled) message = tl_wire_write(&response.base);
    for (size_t i = 0; i < batch->map_count; i++)
        free(batch->annotations[i].items);
    free(batch);
    return message;
}

static void list_send(struct tl_service_call *call)
{
    struct walk_call *list = TL_CONTAINER_OF(call, struct walk_call, call);
    if (list->sent_count == list->walk->listing.count) {
        tl_service_call_finish_ok(call);
        return;
    }
    tl_service_call_expect_progress(call);
    tl_service_call_send(call, compose_batch(list));
}

static void list_request(struct tl_service_call *call, grpc_byte_buffer *message)
{
    const char *pattern;
    struct tl_error error;
    if (tl_list_request_read(message, call->control->arena, &pattern, &error) == TL_OK) {
        walk_start(TL_CONTAINER_OF(call, struct walk_call, call), pattern, false);
    } else {
        tl_service_call_finish(call, &error);
    }
}

static const struct tl_service_call_ops list_ops = {
    .size_bytes = sizeof(struct walk_call),
    .request = list_request,
    .sent = list_send,
    .closed = walk_closed,
};

static void list_accept(void *control, struct tl_stream *stream)
{
    tl_service_call_accept(control, stream, &list_ops);
}

/* ------------------------------------------------------------------------------------------------------ public -- */

enum tl_status tl_transfer_service_add(struct tl_control *control, struct tl_error *ret_error)
{
    static const struct {
        const char *method;
        enum tl_action action;
        tl_accept_fn accept;
    } methods[] = {
        {"/tensorlane.v1.Transfer/Receive", TL_ACTION_READ, tl_receive_call_accept},
        {"/tensorlane.v1.Transfer/Publish", TL_ACTION_PUSH, tl_publish_call_accept},
        {"/tensorlane.v1.Transfer/Withdraw", TL_ACTION_WITHDRAW, withdraw_accept},
        {"/tensorlane.v1.Transfer/List", TL_ACTION_LIST, list_accept},
    };
    enum tl_status status = TL_OK;
    for (size_t i = 0; i < TL_ARRAY_COUNT(methods) && status == TL_OK; i++) {
        status = tl_rpc_server_add_method(control->server, methods[i].method, methods[i].action, methods[i].accept,
                                          control, ret_error);
    }
    return status;
}
