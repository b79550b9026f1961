// SPDX-License-Identifier: Apache-2.0
#include "server/peers/data_connection_internal.h"

#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "control/endpoint.h"
#include "server/worker_internal.h"

#define BREAKS_KEPT_NS (60 * TL_NS_PER_SEC)
#define TRIES_TO_JUDGE 2

/* ---------------------------------------------------------------------------------------------------- messages -- */

/* An offer that may not be answered, whatever the state, is refused here. */
static void handle_offer(struct tl_data_connection *connection, const struct tl_connection_message *message)
{
    struct tl_link *link = connection->link;
    const char *transport = message->transport;
    if (connection->slot->transport == NULL || connection->is_elsewhere) {
        data_connection_send_refusal(link, transport, message->attempt, true, connection->reason);
    } else if (connection->worker->closing.is_closing) {
        /* The link is about to end, and with it the attempt: a refusal would only fail what can still wait. */
    } else if (tl_link_is_ours(link) || message->attempt == 0) {
        data_connection_send_refusal(link, transport, message->attempt, false,
                                     "offers come from the side that opened the link");
    } else {
        data_connection_handle(connection,
                               &(struct connection_event){.kind = CONNECTION_EVENT_OFFER_RECEIVED, .message = message});
    }
}

static void handle_answer(struct tl_data_connection *connection, const struct tl_connection_message *message)
{
    if (message->attempt != connection->attempt) return;
    data_connection_handle(connection,
                           &(struct connection_event){.kind = CONNECTION_EVENT_ANSWER_RECEIVED, .message = message});
}

static void handle_refusal(struct tl_data_connection *connection, const struct tl_connection_message *message)
{
    bool is_of_all = message->attempt == 0;
    bool is_of_this = message->attempt == connection->attempt && connection->session != NULL;
    if (!is_of_all && !is_of_this) return;
    data_connection_handle(connection,
                           &(struct connection_event){.kind = CONNECTION_EVENT_REFUSAL_RECEIVED, .message = message});
}

void tl_data_connection_handle_message(struct tl_data_connection *connection, struct tl_link *link,
                                       const struct tl_connection_message *message)
{
    /* A link that is not in use is about to end. */
    if (link != connection->link) return;
    if (message->kind == TL_CONNECTION_MESSAGE_OFFER) {
        handle_offer(connection, message);
    } else if (message->kind == TL_CONNECTION_MESSAGE_ANSWER) {
        handle_answer(connection, message);
    } else {
        handle_refusal(connection, message);
    }
}

void tl_data_connection_refuse_offer(const struct tl_worker *worker, struct tl_link *link,
                                     const struct tl_connection_message *offer)
{
    struct tl_error error;
    tl_error_set(&error, TL_UNIMPLEMENTED, "%s has no transport %s", worker->self.name, offer->transport);
    data_connection_send_refusal(link, offer->transport, offer->attempt, true, error.message);
}

/* ------------------------------------------------------------------------------------------------------- links -- */

/* Returns whether the transport does not reach the peer; then the reason is set. The side that has accepted the link
 * checks the address as well as the peer's claim, unless the settings allow other addresses. */
static bool find_elsewhere(struct tl_data_connection *connection)
{
    const struct tl_identity *peer = tl_link_peer(connection->link);
    const struct tl_transport_source *source = connection->slot->source;
    if (source->find_host == NULL) return false;
    if (!tl_identity_has_host(peer) || memcmp(peer->host, connection->worker->self.host, TL_HOST_BYTES) != 0) {
        data_connection_set_reason(connection, "it is on another host");
        return true;
    }
    const char *remedy = source->address_remedy(&connection->worker->settings);
    if (tl_link_is_ours(connection->link) || remedy == NULL || tl_endpoint_is_here(peer->address)) return false;
    data_connection_set_reason(connection, "the connection comes from %s, which is no address of this host; %s",
                               peer->address, remedy);
    return true;
}

void tl_data_connection_end(struct tl_data_connection *connection)
{
    data_connection_happen(connection, CONNECTION_EVENT_LINK_LOST);
}

void tl_data_connection_begin(struct tl_data_connection *connection, struct tl_link *link, bool is_being_replaced)
{
    const struct tl_transport_slot *slot = connection->slot;
    if (connection->link == link) return;
    tl_data_connection_end(connection);
    connection->link = link;
    connection->is_first = true;
    connection->tries = 0;
    connection->is_being_replaced = is_being_replaced;
    connection->is_left = false;
    connection->failure_count = 0;
    connection->is_elsewhere = slot->transport != NULL && find_elsewhere(connection);
    bool is_fit = slot->transport != NULL && !connection->is_elsewhere && !connection->worker->closing.is_closing;
    data_connection_happen(connection, is_fit ? CONNECTION_EVENT_LINK : CONNECTION_EVENT_LINK_UNFIT);
}

void tl_data_connection_stay(struct tl_data_connection *connection)
{
    connection->is_being_replaced = false;
}

void tl_data_connection_go_on(struct tl_data_connection *connection)
{
    if (connection->state != TL_DATA_CONNECTION_HELD) return;
    if (connection->worker->closing.is_closing) {
        data_connection_happen(connection, CONNECTION_EVENT_CLOSING);
    } else {
        data_connection_happen(connection,
                               tl_link_is_ours(connection->link) ? CONNECTION_EVENT_OFFER : CONNECTION_EVENT_EXPECT);
    }
}

bool tl_data_connection_has_failed(const struct tl_data_connection *connection)
{
    return connection->state == TL_DATA_CONNECTION_REFUSED || !connection->is_first;
}

bool tl_data_connection_is_judged(const struct tl_data_connection *connection)
{
    return connection->state == TL_DATA_CONNECTION_REFUSED || connection->tries >= TRIES_TO_JUDGE;
}

enum tl_data_connection_use tl_data_connection_use(const struct tl_data_connection *connection)
{
    /* Where there is no other way, a request waits for a peer that restarts. */
    bool can_wait = connection->is_left && connection->worker->data_plane.is_transport_required;
    switch (connection->state) {
    case TL_DATA_CONNECTION_UP:
        return TL_DATA_CONNECTION_TAKE;
    case TL_DATA_CONNECTION_EXPECTING:
        return connection->is_first || can_wait ? TL_DATA_CONNECTION_AWAIT : TL_DATA_CONNECTION_AVOID;
    case TL_DATA_CONNECTION_BACK_OFF:
        return can_wait ? TL_DATA_CONNECTION_AWAIT : TL_DATA_CONNECTION_AVOID;
    case TL_DATA_CONNECTION_CREATING:
    case TL_DATA_CONNECTION_OFFERED:
    case TL_DATA_CONNECTION_CONNECTING:
        return connection->is_first || connection->worker->data_plane.is_transport_required ? TL_DATA_CONNECTION_AWAIT
                                                                                            : TL_DATA_CONNECTION_AVOID;
    case TL_DATA_CONNECTION_OFF:
    case TL_DATA_CONNECTION_HELD:
    case TL_DATA_CONNECTION_REFUSED:
        break;
    }
    return TL_DATA_CONNECTION_AVOID;
}

bool tl_data_connection_keeps_breaking(const struct tl_data_connection *connection)
{
    int64_t oldest_ns = connection->broken_ns[connection->break_count % TL_MANY_BREAKS];
    return oldest_ns != 0 && tl_clock_now_ns() - oldest_ns < BREAKS_KEPT_NS;
}
