// SPDX-License-Identifier: Apache-2.0
/*
 * What the two sides of a link send each other about data connections of other transports.
 *
 * Happy path: a message of ours waits in a list and goes into the next frame, in front of all requests; one of the peer
 * is checked and handed to the owner of the link. Failure modes: a message that cannot be ends the link; one that this
 * version does not know is ignored; a peer that does not take its messages ends the link before they use up the memory.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/text.h"
#include "control/link_internal.h"

/* Messages that may wait to be sent. */
#define MAX_WAITING 64

void tl_link_send_connection_message(struct tl_link *link, const struct tl_connection_message *message)
{
    if (link->state != LINK_UP && link->state != LINK_DRAINING) return;
    if (link->connection_message_count == MAX_WAITING) {
        link_protocol_error(link, "it does not read the answers to its offers of data connections");
        return;
    }
    struct link_connection_message *entry = malloc(sizeof(*entry));
    if (entry == NULL) {
        struct tl_error error;
        tl_error_set(&error, TL_UNAVAILABLE, "no memory to set up a data connection");
        tl_link_close(link, &error);
        return;
    }
    entry->message = *message;
    /* The peer ends a link with a frame whose text is not UTF-8, and a reason may name a file whose path is not. */
    tl_text_make_utf8(entry->message.reason, strlen(entry->message.reason));
    tl_list_push_back(&link->connection_messages, &entry->place);
    link->connection_message_count++;
    link_flush_later(link);
}

size_t link_connections_add(struct tl_link *link, Tensorlane__V1__ConnectionMessage **ret_messages)
{
    size_t count = 0;
    TL_LIST_FOREACH(&link->connection_messages, place)
    {
        if (count == LINK_MAX_CONNECTION_MESSAGES) break;
        struct link_connection_message *entry = TL_CONTAINER_OF(place, struct link_connection_message, place);
        struct tl_connection_message *message = &entry->message;
        tensorlane__v1__connection_message__init(&entry->wire);
        entry->wire.transport = message->transport;
        entry->wire.kind = (Tensorlane__V1__ConnectionMessage__Kind)message->kind;
        entry->wire.attempt = message->attempt;
        if (message->kind == TL_CONNECTION_MESSAGE_REFUSAL) {
            entry->wire.reason = message->reason;
            entry->wire.is_final = message->is_final;
        } else {
            entry->wire.pair_address = (ProtobufCBinaryData){.len = message->len_bytes, .data = message->bytes};
        }
        ret_messages[count++] = &entry->wire;
    }
    return count;
}

void link_connections_sent(struct tl_link *link, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        struct tl_list *place = tl_list_pop_front(&link->connection_messages);
        free(TL_CONTAINER_OF(place, struct link_connection_message, place));
        link->connection_message_count--;
    }
}

void link_connections_drop(struct tl_link *link)
{
    link_connections_sent(link, link->connection_message_count);
}

/* False: it cannot be, and the link ends. */
static bool read_message(struct tl_link *link, const Tensorlane__V1__ConnectionMessage *wire,
                         struct tl_connection_message *ret_message)
{
    struct tl_error error;
    enum tl_status status = tl_wire_text(wire->transport, 1, TL_CONNECTION_TRANSPORT_BYTES - 1, "transport", &error);
    if (status == TL_OK) status = tl_wire_text(wire->reason, 0, TL_ERROR_MESSAGE_BYTES - 1, "reason", &error);
    if (status != TL_OK) {
        link_protocol_error(link, "%s", error.message);
        return false;
    }
    if (wire->pair_address.len > TL_CONNECTION_ADDRESS_BYTES) {
        link_protocol_error(link, "a pair address of %zu bytes; there may be %d", wire->pair_address.len,
                            TL_CONNECTION_ADDRESS_BYTES);
        return false;
    }
    ret_message->kind = (enum tl_connection_message_kind)wire->kind;
    ret_message->attempt = wire->attempt;
    ret_message->is_final = wire->is_final != 0;
    ret_message->len_bytes = (uint32_t)wire->pair_address.len;
    if (wire->pair_address.len > 0) memcpy(ret_message->bytes, wire->pair_address.data, wire->pair_address.len);
    snprintf(ret_message->transport, sizeof(ret_message->transport), "%s", wire->transport);
    snprintf(ret_message->reason, sizeof(ret_message->reason), "%s", wire->reason);
    return true;
}

/* Others come from a newer version. */
static bool is_known(const Tensorlane__V1__ConnectionMessage *wire)
{
    switch (wire->kind) {
    case TENSORLANE__V1__CONNECTION_MESSAGE__KIND__OFFER:
    case TENSORLANE__V1__CONNECTION_MESSAGE__KIND__ANSWER:
    case TENSORLANE__V1__CONNECTION_MESSAGE__KIND__REFUSAL:
        return true;
    default:
        return false;
    }
}

void link_connections_handle(struct tl_link *link, const Tensorlane__V1__Frame *frame)
{
    for (size_t i = 0; i < frame->n_connections && link->state != LINK_CLOSING; i++) {
        struct tl_connection_message message = {.len_bytes = 0};
        if (!is_known(frame->connections[i]) || !read_message(link, frame->connections[i], &message)) continue;
        if (link->events->connection_message != NULL) link->events->connection_message(link, &message);
    }
}
