// SPDX-License-Identifier: Apache-2.0
#include "server/transfers/serving.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "server/peers/permissions.h"
#include "server/transports/transport.h"
#include "server/worker_internal.h"
#include "tensor/device.h"
#include "tensor/part.h"

/* A request of a peer, from its arrival to the end of its serve, or to the table's answer if that comes later. Many may
 * wait, so that its size is bounded (tests/integration/waiting_size_test.c). */
struct served {
    struct tl_serving *serving;
    struct tl_list link;       /* in serving->serves, or unrefused, while there is a serve */
    struct tl_serve *serve;    /* NULL: the request is over, and the table's answer is on its way */
    enum tl_serve_end end : 8; /* how the request ended, when serve is NULL */
    bool is_answered;
    bool is_reserved;            /* the answer was a one-shot value, which this serve must acknowledge or give back */
    struct tl_receiver receiver; /* its answer has the closure, the status (kept; NULL: TL_OK) and the offer, when the
                                    table has given it on another thread */
};

/* Replaces the tensor of the offer by its registered copy, if there is one. */
static void take_copy(struct tl_offer *offer)
{
    struct tl_tensor *copy = tl_transport_copy_of(offer->tensor);
    if (copy == NULL) return;
    struct tl_tensor *tensor = offer->tensor;
    offer->tensor = tl_tensor_get(copy);
    tl_tensor_put(tensor);
}

static void acknowledge_received(struct tl_serving *serving)
{
    struct tl_request_id received[TL_SERVING_RECEIVED];
    size_t count = serving->received_count;
    if (count == 0) return;
    memcpy(received, serving->received, count * sizeof(received[0]));
    serving->received_count = 0;
    tl_rendezvous_acknowledge_many(serving->worker->table, received, count);
}

static void acknowledge_deferred(struct tl_closure *closure)
{
    struct tl_serving *serving = TL_CONTAINER_OF(closure, struct tl_serving, received_closure);
    serving->is_received_deferred = false;
    acknowledge_received(serving);
}

static void add_received(struct tl_serving *serving, const struct tl_request_id *id)
{
    bool is_immediate = serving->executor->defer == NULL || serving->is_closing;
    serving->received[serving->received_count++] = *id;
    if (is_immediate || serving->received_count == TL_SERVING_RECEIVED) {
        acknowledge_received(serving);
    } else if (!serving->is_received_deferred) {
        serving->is_received_deferred = true;
        serving->executor->defer(serving->executor, &serving->received_closure);
    }
}

/* Ends a serve: what was reserved for it is dropped, offered again, or kept for a while. */
static void settle(struct tl_serving *serving, const struct tl_request_id *id, enum tl_serve_end end)
{
    struct tl_worker *worker = serving->worker;
    if (end == TL_SERVE_RECEIVED) {
        add_received(serving, id);
        return;
    }
    acknowledge_received(serving);
    if (end == TL_SERVE_CANCELLED || serving->is_closing) {
        tl_rendezvous_release(worker->table, id);
    } else {
        int64_t until_ns = tl_clock_deadline_ns(worker->settings.reservation_timeout_ns);
        tl_rendezvous_receiver_lost(worker->table, id, until_ns);
        tl_source_expire_reservations(worker);
    }
}

static bool is_on_device(const struct tl_tensor *tensor)
{
    return tl_tensor_is_on_device(tensor) && tl_tensor_size_bytes(tensor) > 0;
}

/* Answers with a value that lies on a device to a transport that cannot send it. Over a data connection the asker is
 * told to ask over the link, for which the value stays reserved. */
static void decline(struct served *served, const struct tl_offer *offer)
{
    struct tl_serve *serve = served->serve;
    struct tl_error error;
    char device[TL_DEVICE_TEXT_BYTES];
    serve->is_final = served->serving == &served->serving->worker->serving;
    tl_device_format(tl_tensor_device(offer->tensor), device);
    tl_error_set(&error, TL_UNIMPLEMENTED,
                 serve->is_final ? "the tensor lies on %s, which this way of asking cannot read"
                                 : "the tensor lies on %s",
                 device);
    tl_tensor_put(offer->tensor);
    if (offer->is_one_shot) settle(served->serving, &serve->id, serve->is_final ? TL_SERVE_CANCELLED : TL_SERVE_BROKEN);
    serve->ops->reply(serve, &error, NULL);
}

/* The memory of a part that is copied together, charged to its client until the last reference is put. */
struct part_charge {
    struct tl_serving *serving;
    const struct tl_share_client *client;
    struct tl_share *share; /* NULL: nothing is charged */
    uint64_t bytes;
};

static enum tl_status charge(void *context, uint64_t bytes, struct tl_error *ret_error)
{
    struct part_charge *part = context;
    struct tl_worker *worker = part->serving->worker;
    part->bytes = bytes;
    enum tl_status status = tl_shares_take(worker->sources.pushed, part->client, bytes, &part->share, ret_error);
    if (status == TL_OK && part->serving == &worker->serving) tl_quota_use_copy(tl_loop_quota(worker->loop), bytes);
    return status;
}

static void part_released(void *data, void *context)
{
    (void)data;
    struct part_charge *part = context;
    tl_shares_give(part->share, part->bytes);
    free(part);
}

/* Has the charge given back with the last reference to the part. */
static enum tl_status keep_charge(const struct part_charge *given, struct tl_tensor **tensor,
                                  struct tl_error *ret_error)
{
    struct part_charge *part = malloc(sizeof(*part));
    struct tl_tensor *alias;
    enum tl_status status = TL_RESOURCE_EXHAUSTED;
    if (part == NULL) return tl_error_set(ret_error, status, "no memory for a part");
    *part = *given;
    status = tl_tensor_create_alias(*tensor, part_released, part, &alias, ret_error);
    if (status != TL_OK) {
        free(part);
        return status;
    }
    tl_tensor_put(*tensor);
    *tensor = alias;
    return TL_OK;
}

/* Returns the client that a part is charged to: the address, since one host may open many links, or else the link. */
static struct tl_share_client client_of(const struct tl_identity *peer)
{
    static const struct tl_share_client unknown;
    struct tl_share_client client = tl_share_client_of(peer->address);
    return memcmp(&client, &unknown, sizeof(client)) != 0 ? client : peer->client;
}

/* Puts a part in the place of the value. */
static enum tl_status make_part(struct served *served, struct tl_tensor **tensor, struct tl_error *ret_error)
{
    const struct tl_share_client client = client_of(served->serve->peer);
    struct part_charge part = {.serving = served->serving, .client = &client};
    const struct tl_part_costs costs = {.takes_runs = served->serve->takes_runs, .charge = charge, .context = &part};
    enum tl_status status = tl_part_take(served->serve->key, &costs, tensor, ret_error);
    if (part.share == NULL) return status;
    if (status == TL_OK) status = keep_charge(&part, tensor, ret_error);
    if (status != TL_OK) tl_shares_give(part.share, part.bytes);
    return status;
}

/* Puts the part that was asked for in the place of the value. Returns false when that failed and was answered; a value
 * that was sent is then offered to others. */
static bool take_part(struct served *served, struct tl_offer *offer)
{
    struct tl_serve *serve = served->serve;
    struct tl_error error;
    if (!tl_part_is_name(serve->key) || make_part(served, &offer->tensor, &error) == TL_OK) return true;
    tl_error_prefix(&error, "%s: ", tl_part_key(serve->key));
    tl_tensor_put(offer->tensor);
    if (offer->is_one_shot) settle(served->serving, &serve->id, TL_SERVE_CANCELLED);
    serve->ops->reply(serve, &error, NULL);
    return false;
}

static void answer(struct served *served, const struct tl_error *status, struct tl_offer *offer)
{
    served->is_answered = true;
    served->serve->is_final = true;
    served->serve->order = served->receiver.order;
    if (served->serving->wants_copies && status->code == TL_OK) take_copy(offer);
    if (status->code == TL_OK && !take_part(served, offer)) return;
    if (status->code == TL_OK && !served->serve->takes_devices && is_on_device(offer->tensor)) {
        decline(served, offer);
        return;
    }
    served->is_reserved = status->code == TL_OK && offer->is_one_shot;
    served->serve->ops->reply(served->serve, status, offer);
}

/* The answer has arrived at the executor. */
static void answer_came(struct tl_closure *closure)
{
    struct served *served = TL_CONTAINER_OF(closure, struct served, receiver.answer.closure);
    const struct tl_error *failure = served->receiver.answer.status;
    struct tl_offer offer = served->receiver.answer.offer;
    if (served->serve != NULL) {
        answer(served, tl_error_kept(failure), &offer);
        tl_error_drop(failure);
        return;
    }
    if (failure == NULL) {
        tl_tensor_put(offer.tensor);
        if (offer.is_one_shot) settle(served->serving, &served->receiver.id, served->end);
    }
    tl_error_drop(failure);
    tl_spares_put(&served->serving->spares, served);
}

static void deliver(struct tl_receiver *receiver, const struct tl_error *status, const struct tl_offer *offer)
{
    struct served *served = TL_CONTAINER_OF(receiver, struct served, receiver);
    const struct tl_executor *executor = served->serving->executor;
    struct tl_offer given = {.tensor = NULL};
    if (status->code == TL_OK) given = *offer;
    /* The receiver before this one may be giving it back right now. Each of many would have that call nested in its
     * own, so that the answer comes later. */
    if (tl_executor_is_here(executor) && !given.was_given_back) {
        answer(served, status, &given);
        return;
    }
    receiver->answer =
        (struct tl_table_answer){.closure.run = answer_came, .status = tl_error_keep(status), .offer = given};
    tl_executor_post(executor, &receiver->answer.closure);
}

static void refuse(struct tl_serving *serving, struct tl_serve *serve)
{
    struct tl_error error;
    tl_error_set(&error, TL_UNAVAILABLE, "%s is shutting down", serving->worker->self.name);
    serve->ops->reply(serve, &error, NULL);
}

/* Refuses a request that waits in the table; does nothing when the table has answered it. */
static void stop_waiting(struct served *served)
{
    struct tl_serving *serving = served->serving;
    if (served->is_answered || !tl_rendezvous_cancel(serving->worker->table, &served->receiver)) return;
    served->is_answered = true;
    refuse(serving, served->serve);
}

/* Answers a request of a probe. Returns false when it is another one. */
static bool answer_probe(struct tl_worker *worker, struct tl_serve *serve)
{
    static const struct tl_error ok = {.code = TL_OK};
    struct tl_offer offer;
    if (!tl_probe_values_find(&worker->sources.probe_values, serve->key, serve->step, &offer)) return false;
    serve->is_final = true;
    serve->ops->reply(serve, &ok, &offer);
    return true;
}

/* Answers a peer that fetches the tensor of a put of this worker. Returns false when it asks for something else. */
static bool answer_put(struct tl_worker *worker, struct tl_serve *serve)
{
    struct tl_error error; /* no need to clear its text for each request */
    struct tl_offer offer;
    if (!tl_put_sources_find(&worker->sources.puts, serve->key, serve->step, serve->id.incarnation, &offer))
        return false;
    serve->is_final = true;
    error.code = TL_OK;
    if (offer.tensor == NULL) tl_error_set(&error, TL_NOT_FOUND, "no such put is under way");
    serve->ops->reply(serve, &error, &offer);
    return true;
}

static void request(void *context, struct tl_serve *serve)
{
    struct tl_serving *serving = context;
    struct tl_worker *worker = serving->worker;
    bool was_answered = serve->is_final; /* it has let its value go, and asks again */
    struct tl_error error;
    serve->is_final = false;
    serve->source_state = NULL;
    if (serving->is_closing && !was_answered) {
        refuse(serving, serve);
        return;
    }
    if (answer_probe(worker, serve) || answer_put(worker, serve)) return;
    if (tl_permissions_check(worker->members.permissions, serve->peer, TL_ACTION_READ, &error) != TL_OK) {
        serve->is_final = true;
        serve->ops->reply(serve, &error, NULL);
        return;
    }
    const char *key = tl_part_is_name(serve->key) ? tl_part_key(serve->key) : serve->key;
    if (key == NULL) {
        tl_error_set(&error, TL_INVALID_ARGUMENT, "%s names no part of a tensor", serve->key);
        serve->is_final = true;
        serve->ops->reply(serve, &error, NULL);
        return;
    }
    struct served *served = tl_spares_get(&serving->spares, sizeof(*served));
    if (served == NULL) {
        tl_error_set(&error, TL_RESOURCE_EXHAUSTED, "%s has no memory for the request", worker->self.name);
        serve->ops->reply(serve, &error, NULL);
        return;
    }
    served->serving = serving;
    served->serve = serve;
    /* The peer may have made the request again on another link, where it waits: then the one that was made last counts,
     * whichever of the two asks again last. */
    served->receiver = (struct tl_receiver){.id = serve->id,
                                            .key = key,
                                            .step = serve->step,
                                            .subscription = serve->subscription,
                                            .client = &serve->peer->client,
                                            .order = was_answered ? serve->order : 0,
                                            .deliver = deliver};
    serve->source_state = served;
    tl_list_push_back(&serving->serves, &served->link);
    tl_rendezvous_receive(worker->table, &served->receiver);
    /* A request that asks again while the worker closes is answered with what there is, and does not wait. */
    if (serving->is_closing) stop_waiting(served);
}

/* An asker takes a waiting request back only when it needs the subscription no more. */
static void unsubscribe(const struct tl_serving *serving, const struct tl_serve *serve)
{
    const struct tl_request_id id = {.incarnation = serve->id.incarnation, .number = serve->subscription};
    if (serve->subscription != 0) tl_rendezvous_unsubscribe(serving->worker->table, &id);
}

static void closed(void *context, struct tl_serve *serve, enum tl_serve_end end)
{
    struct tl_serving *serving = context;
    struct served *served = serve->source_state;
    if (served == NULL) return;
    tl_list_remove(&served->link);
    if (!served->is_answered) {
        if (end == TL_SERVE_CANCELLED) unsubscribe(serving, serve);
        if (!tl_rendezvous_cancel(serving->worker->table, &served->receiver)) {
            served->serve = NULL;
            served->end = end;
            return;
        }
    } else if (served->is_reserved) {
        settle(serving, &serve->id, end);
    }
    tl_spares_put(&serving->spares, served);
}

static void received(void *context, const struct tl_request_id *id)
{
    add_received(context, id);
}

static void prefetch(void *context, const struct tl_key_text *keys, size_t count)
{
    struct tl_serving *serving = context;
    tl_rendezvous_prefetch(serving->worker->table, keys, count);
}

static void given_up(void *context, const struct tl_request_id *id)
{
    struct tl_serving *serving = context;
    acknowledge_received(serving);
    tl_rendezvous_give_up(serving->worker->table, id);
}

const struct tl_source_ops tl_serving_ops = {
    .request = request, .prefetch = prefetch, .closed = closed, .received = received, .given_up = given_up};

/* Refuses requests that wait; the rest when others had their turn. */
static void refuse_some(struct tl_closure *closure)
{
    struct tl_serving *serving = TL_CONTAINER_OF(closure, struct tl_serving, round_closure);
    for (unsigned count = 0; !tl_list_is_empty(&serving->unrefused); count++) {
        if (count == TL_QUOTA) {
            tl_executor_post(serving->executor, &serving->round_closure);
            return;
        }
        struct tl_list *place = tl_list_pop_front(&serving->unrefused);
        tl_list_push_back(&serving->serves, place);
        stop_waiting(TL_CONTAINER_OF(place, struct served, link));
    }
}

void tl_serving_init(struct tl_serving *serving, struct tl_worker *worker, const struct tl_executor *executor)
{
    *serving = (struct tl_serving){.worker = worker, .executor = executor};
    tl_list_init(&serving->serves);
    tl_list_init(&serving->unrefused);
    serving->round_closure.run = refuse_some;
    serving->received_closure.run = acknowledge_deferred;
    tl_list_init(&serving->received_closure.link);
}

void tl_serving_close(struct tl_serving *serving)
{
    serving->is_closing = true;
    acknowledge_received(serving);
    tl_list_splice_back(&serving->unrefused, &serving->serves);
    refuse_some(&serving->round_closure);
}

void tl_serving_fini(struct tl_serving *serving)
{
    tl_spares_fini(&serving->spares);
}
