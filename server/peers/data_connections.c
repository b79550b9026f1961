// SPDX-License-Identifier: Apache-2.0
#include "server/peers/data_connections.h"

#include <string.h>

#include "base/reason.h"
#include "server/worker_internal.h"

/* Begins to set up each connection that follows failed ones only. */
static void go_on(struct tl_data_connections *connections)
{
    for (size_t i = 0; i < connections->worker->data_plane.transport_count; i++) {
        tl_data_connection_go_on(&connections->items[i]);
        if (!tl_data_connection_has_failed(&connections->items[i])) return;
    }
}

static void changed(void *owner)
{
    struct tl_data_connections *connections = owner;
    go_on(connections);
    connections->events->changed(connections->owner);
}

static void unconfirmed(void *owner, uint64_t incarnation, const uint64_t *numbers, size_t count)
{
    struct tl_data_connections *connections = owner;
    if (connections->events->unconfirmed == NULL) return;
    connections->events->unconfirmed(connections->owner, incarnation, numbers, count);
}

static const struct tl_data_connection_events connection_events = {.changed = changed, .unconfirmed = unconfirmed};

enum tl_status tl_data_connections_init(struct tl_data_connections *connections, struct tl_worker *worker,
                                        const char *name, const struct tl_data_connection_events *events, void *owner)
{
    *connections = (struct tl_data_connections){.worker = worker, .events = events, .owner = owner};
    for (size_t i = 0; i < worker->data_plane.transport_count; i++) {
        enum tl_status status = tl_data_connection_init(
            &connections->items[i], worker, &worker->data_plane.transports[i], name, &connection_events, connections);
        if (status == TL_OK) continue;
        while (i-- > 0)
            tl_data_connection_fini(&connections->items[i]);
        return status;
    }
    return TL_OK;
}

void tl_data_connections_fini(struct tl_data_connections *connections)
{
    for (size_t i = 0; i < connections->worker->data_plane.transport_count; i++)
        tl_data_connection_fini(&connections->items[i]);
}

void tl_data_connections_begin(struct tl_data_connections *connections, struct tl_link *link, bool is_being_replaced)
{
    for (size_t i = 0; i < connections->worker->data_plane.transport_count; i++)
        tl_data_connection_begin(&connections->items[i], link, is_being_replaced);
    go_on(connections);
    tl_put_fetches_go_on(connections->worker);
}

void tl_data_connections_stay(struct tl_data_connections *connections)
{
    for (size_t i = 0; i < connections->worker->data_plane.transport_count; i++)
        tl_data_connection_stay(&connections->items[i]);
}

void tl_data_connections_end(struct tl_data_connections *connections)
{
    for (size_t i = 0; i < connections->worker->data_plane.transport_count; i++)
        tl_data_connection_end(&connections->items[i]);
    tl_put_fetches_go_on(connections->worker);
}

void tl_data_connections_handle_message(struct tl_data_connections *connections, struct tl_link *link,
                                        const struct tl_connection_message *message)
{
    for (size_t i = 0; i < connections->worker->data_plane.transport_count; i++) {
        if (strcmp(connections->worker->data_plane.transports[i].source->name, message->transport) != 0) continue;
        tl_data_connection_handle_message(&connections->items[i], link, message);
        return;
    }
    if (message->kind == TL_CONNECTION_MESSAGE_OFFER)
        tl_data_connection_refuse_offer(connections->worker, link, message);
}

const struct tl_data_connection *tl_data_connections_best(const struct tl_data_connections *connections)
{
    for (size_t i = 0; i < connections->worker->data_plane.transport_count; i++) {
        if (connections->items[i].state == TL_DATA_CONNECTION_UP) return &connections->items[i];
    }
    return NULL;
}

bool tl_data_connections_are_coming_up(const struct tl_data_connections *connections)
{
    for (size_t i = 0; i < connections->worker->data_plane.transport_count; i++) {
        if (connections->items[i].state == TL_DATA_CONNECTION_CONNECTING) return true;
    }
    return false;
}

static int rank(const struct tl_data_connections *connections)
{
    if (tl_data_connections_best(connections) != NULL) return 2;
    return tl_data_connections_are_coming_up(connections) ? 1 : 0;
}

const struct tl_data_connections *tl_data_connections_sooner(const struct tl_data_connections *first,
                                                             const struct tl_data_connections *second)
{
    if (first == NULL || second == NULL) return first != NULL ? first : second;
    return rank(second) > rank(first) ? second : first;
}

enum tl_data_connection_use tl_data_connections_use(const struct tl_data_connections *connections,
                                                    const struct tl_data_connection **ret_connection)
{
    enum tl_data_connection_use use = TL_DATA_CONNECTION_AVOID;
    const struct tl_data_connection *best = tl_data_connections_best(connections);
    if (best != NULL) {
        *ret_connection = best;
        return TL_DATA_CONNECTION_TAKE;
    }
    for (size_t i = 0; i < connections->worker->data_plane.transport_count; i++) {
        if (tl_data_connection_use(&connections->items[i]) == TL_DATA_CONNECTION_AWAIT) use = TL_DATA_CONNECTION_AWAIT;
    }
    return use;
}

void tl_data_connections_format_reason(const struct tl_data_connections *connections, char *ret_text, size_t capacity)
{
    const struct tl_worker *worker = connections->worker;
    const struct tl_data_connection *best = tl_data_connections_best(connections);
    size_t count = best != NULL ? (size_t)(best - connections->items) : worker->data_plane.transport_count;
    const char *reasons[TL_MAX_TRANSPORTS];
    for (size_t i = 0; i < count; i++)
        reasons[i] = connections->items[i].reason;
    tl_transports_join(worker, reasons, count, ret_text, capacity);
}

bool tl_data_connections_are_judged(const struct tl_data_connections *connections)
{
    if (tl_data_connections_best(connections) != NULL) return true;
    for (size_t i = 0; i < connections->worker->data_plane.transport_count; i++) {
        if (!tl_data_connection_is_judged(&connections->items[i])) return false;
    }
    return true;
}

const char *tl_data_connections_failure(const struct tl_data_connections *connections)
{
    if (tl_data_connections_best(connections) != NULL) return "";
    const struct worker_transports *own = &connections->worker->data_plane;
    for (size_t i = 0; i < own->transport_count; i++) {
        const struct tl_data_connection *connection = &connections->items[i];
        if (connection->slot->transport == NULL || connection->is_elsewhere || connection->is_left) continue;
        if (connection->state == TL_DATA_CONNECTION_REFUSED && !own->is_transport_required) continue;
        if (tl_data_connection_has_failed(connection)) return connection->reason;
    }
    return "";
}

const char *tl_data_connections_lasting_reason(struct tl_data_connections *connections)
{
    bool is_known = connections->lasting_reason != NULL;
    for (size_t i = 0; i < connections->worker->data_plane.transport_count; i++) {
        is_known = is_known && connections->lasting_parts[i] == connections->items[i].lasting_reason;
        connections->lasting_parts[i] = connections->items[i].lasting_reason;
    }
    if (!is_known) {
        char text[TL_ERROR_MESSAGE_BYTES];
        tl_data_connections_format_reason(connections, text, sizeof(text));
        connections->lasting_reason = tl_reason(text);
    }
    return connections->lasting_reason;
}
