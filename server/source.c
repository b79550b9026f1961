// SPDX-License-Identifier: Apache-2.0
/*
 * What peers and clients ask of this worker, between the control plane and the rendezvous table.
 *
 * Happy path: a request becomes a receiver in the table; the table's answer, now or later, is the reply; the end of the
 * serve acknowledges, releases or orphans what was reserved for it. Failure modes: a worker that is closing refuses; a
 * request that broke off frees its slot at once if it still waited, else the value stays reserved for
 * reservation_timeout_ns.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tensorlane/version.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "server/worker_internal.h"

/* A request of a peer, from its arrival to the end of its serve. */
struct served {
    struct tl_worker *worker;
    struct tl_list link; /* in worker->serves */
    struct tl_serve *serve;
    struct tl_receiver receiver;
    bool is_answered;
    bool is_reserved; /* the answer was a one-shot value, which this serve must acknowledge or give back */
};

static void deliver(struct tl_receiver *receiver, const struct tl_error *status, const struct tl_offer *offer)
{
    struct served *served = TL_CONTAINER_OF(receiver, struct served, receiver);
    served->is_answered = true;
    served->is_reserved = status->code == TL_OK && offer->is_one_shot;
    served->serve->is_final = true;
    served->serve->ops->reply(served->serve, status, offer);
}

static void request(void *context, struct tl_serve *serve)
{
    struct tl_worker *worker = context;
    struct tl_error error;
    serve->source_state = NULL;
    if (worker->is_closing) {
        tl_error_set(&error, TL_UNAVAILABLE, "%s is shutting down", worker->self.name);
        serve->ops->reply(serve, &error, NULL);
        return;
    }
    struct served *served = calloc(1, sizeof(*served));
    if (served == NULL) {
        tl_error_set(&error, TL_RESOURCE_EXHAUSTED, "%s has no memory for the request", worker->self.name);
        serve->ops->reply(serve, &error, NULL);
        return;
    }
    served->worker = worker;
    served->serve = serve;
    served->receiver =
        (struct tl_receiver){.id = serve->id, .key = serve->key, .step = serve->step, .deliver = deliver};
    serve->source_state = served;
    tl_list_push_back(&worker->serves, &served->link);
    tl_rendezvous_receive(worker->table, &served->receiver);
}

static void expire(struct tl_timer *timer)
{
    struct tl_worker *worker = TL_CONTAINER_OF(timer, struct tl_worker, expire_timer);
    int64_t next_ns = tl_rendezvous_expire(worker->table, tl_clock_now_ns());
    if (tl_timers_arm(tl_loop_timers(worker->loop), timer, next_ns) != TL_OK) {
        TL_LOG_AT_ERROR("no memory to free reservations in time");
    }
}

/* The asker may come back: keeps the value for it for a while. */
static void keep_for(struct tl_worker *worker, const struct tl_request_id *id)
{
    int64_t until_ns = tl_clock_deadline_ns(worker->settings.reservation_timeout_ns);
    tl_rendezvous_orphan(worker->table, id, until_ns);
    expire(&worker->expire_timer);
}

static void closed(void *context, struct tl_serve *serve, enum tl_serve_end end)
{
    struct tl_worker *worker = context;
    struct served *served = serve->source_state;
    if (served == NULL) return;
    tl_list_remove(&served->link);
    if (!served->is_answered) {
        bool is_cancelled = tl_rendezvous_cancel(worker->table, &served->receiver);
        TL_CHECK(is_cancelled);
    } else if (!served->is_reserved) {
        /* A published value or a status: nothing is kept for this request. */
    } else if (end == TL_SERVE_RECEIVED) {
        tl_rendezvous_acknowledge(worker->table, &serve->id);
    } else if (end == TL_SERVE_CANCELLED || worker->is_closing) {
        tl_rendezvous_release(worker->table, &serve->id);
    } else {
        keep_for(worker, &serve->id);
    }
    free(served);
}

static void received(void *context, const struct tl_request_id *id)
{
    struct tl_worker *worker = context;
    tl_rendezvous_acknowledge(worker->table, id);
}

void tl_source_refuse_waiting(struct tl_worker *worker)
{
    struct tl_error error;
    tl_error_set(&error, TL_UNAVAILABLE, "%s is shutting down", worker->self.name);
    TL_LIST_FOREACH_SAFE(&worker->serves, place)
    {
        struct served *served = TL_CONTAINER_OF(place, struct served, link);
        if (served->is_answered || !tl_rendezvous_cancel(worker->table, &served->receiver)) continue;
        served->is_answered = true;
        served->serve->ops->reply(served->serve, &error, NULL);
    }
}

/* ------------------------------------------------------------------------------------------------------ pushing -- */

/* Bytes admitted or published by clients and not released. Whoever received such a tensor by reference, and gRPC, may
 * keep it longer than the worker lives; so the account lives as long as the last of them. */
struct pushed_account {
    uint64_t bytes;       /* any thread, atomic */
    uint64_t owner_count; /* the worker and the tensors; any thread, atomic */
};

static void account_put(struct pushed_account *account)
{
    if (__atomic_sub_fetch(&account->owner_count, 1, __ATOMIC_ACQ_REL) == 0) free(account);
}

enum tl_status tl_source_init(struct tl_worker *worker, struct tl_error *ret_error)
{
    tl_list_init(&worker->serves);
    worker->expire_timer.fire = expire;
    worker->pushed = calloc(1, sizeof(*worker->pushed));
    if (worker->pushed == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a worker");
    worker->pushed->owner_count = 1;
    return TL_OK;
}

void tl_source_fini(struct tl_worker *worker)
{
    if (worker->pushed != NULL) account_put(worker->pushed);
}

static enum tl_status admit(void *context, const struct tl_identity *client, const char *key,
                            const struct tl_meta_data *meta_data, struct tl_error *ret_error)
{
    struct tl_worker *worker = context;
    (void)client;
    if (worker->is_closing) return tl_error_set(ret_error, TL_UNAVAILABLE, "%s is shutting down", worker->self.name);
    uint64_t pushed_bytes = __atomic_load_n(&worker->pushed->bytes, __ATOMIC_RELAXED);
    struct tl_rendezvous_stats stats;
    tl_rendezvous_get_stats(worker->table, &stats);
    uint64_t total;
    bool fits = tl_add_u64(pushed_bytes, stats.held_bytes, &total) &&
                tl_add_u64(total, meta_data->size_bytes, &total) && total <= worker->settings.held_bytes;
    if (!fits) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                            "%s holds %" PRIu64 " bytes and cannot take the %" PRIu64
                            " of %s; withdraw something or raise limits.held (%" PRIu64 ")",
                            worker->self.name, pushed_bytes + stats.held_bytes, meta_data->size_bytes, key,
                            worker->settings.held_bytes);
    }
    __atomic_fetch_add(&worker->pushed->bytes, meta_data->size_bytes, __ATOMIC_RELAXED);
    return TL_OK;
}

/* A pushed tensor's part of the account, given back with its last reference. */
struct pushed {
    struct pushed_account *account;
    uint64_t size_bytes;
};

static void pushed_released(void *data, void *context)
{
    (void)data;
    struct pushed *pushed = context;
    __atomic_fetch_sub(&pushed->account->bytes, pushed->size_bytes, __ATOMIC_RELAXED);
    account_put(pushed->account);
    free(pushed);
}

static enum tl_status publish_pushed(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor,
                                     uint64_t *ret_publication, struct tl_error *ret_error)
{
    struct pushed *pushed = malloc(sizeof(*pushed));
    if (pushed == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to publish %s", key);
    *pushed = (struct pushed){.account = worker->pushed, .size_bytes = tl_tensor_size_bytes(tensor)};
    struct tl_tensor *alias;
    enum tl_status status = tl_tensor_create_alias(tensor, pushed_released, pushed, &alias, ret_error);
    if (status != TL_OK) {
        free(pushed);
        return status;
    }
    /* From here on the alias gives the account back, also when publishing fails. */
    __atomic_fetch_add(&worker->pushed->owner_count, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&worker->pushed->bytes, pushed->size_bytes, __ATOMIC_RELAXED);
    status = tl_rendezvous_publish(worker->table, key, step, alias, ret_publication, ret_error);
    tl_tensor_put(alias);
    return status;
}

static enum tl_status publish(void *context, const struct tl_identity *client, const char *key, uint64_t step,
                              const struct tl_meta_data *meta_data, struct tl_tensor *tensor, uint64_t *ret_publication,
                              struct tl_error *ret_error)
{
    struct tl_worker *worker = context;
    (void)client;
    enum tl_status status = TL_OK;
    if (tensor != NULL) status = publish_pushed(worker, key, step, tensor, ret_publication, ret_error);
    __atomic_fetch_sub(&worker->pushed->bytes, meta_data->size_bytes, __ATOMIC_RELAXED);
    return status;
}

static uint64_t withdraw(void *context, const struct tl_identity *client, const char *pattern)
{
    struct tl_worker *worker = context;
    (void)client;
    return tl_rendezvous_withdraw_matching(worker->table, pattern);
}

static enum tl_status list(void *context, const char *pattern, struct tl_listing *ret_listing,
                           struct tl_error *ret_error)
{
    struct tl_worker *worker = context;
    return tl_rendezvous_list(worker->table, pattern, ret_listing, ret_error);
}

/* ------------------------------------------------------------------------------------------------------ identity -- */

static enum tl_status describe_counters(struct tl_worker *worker, struct tl_description *description,
                                        struct tl_error *ret_error)
{
    struct tl_control_stats control;
    struct tl_rendezvous_stats table;
    tl_control_get_stats(worker->control, &control);
    tl_rendezvous_get_stats(worker->table, &table);
    const struct {
        const char *name;
        uint64_t value;
    } counters[] = {
        {"tensors_sent", control.tensors_sent},
        {"tensors_received", control.tensors_received},
        {"bytes_sent", control.bytes_sent},
        {"bytes_received", control.bytes_received},
        {"bytes_copied_send", control.bytes_copied_send},
        {"frames_sent", control.frames_sent},
        {"frames_received", control.frames_received},
        {"protocol_errors", control.protocol_errors},
        {"late_chunks", control.late_chunks},
        {"requests_retried", worker->requests_retried},
        {"tensors_dropped", table.dropped_tensors},
        {"waiting_receivers", table.waiting_receivers},
        {"held_tensors", table.held_tensors},
        {"held_bytes", table.held_bytes},
        {"published_tensors", table.published_tensors},
        {"published_bytes", table.published_bytes},
        {"open_operations", __atomic_load_n(&worker->open_ops, __ATOMIC_RELAXED)},
    };
    description->counters = calloc(TL_ARRAY_COUNT(counters), sizeof(*description->counters));
    if (description->counters == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for counters");
    for (size_t i = 0; i < TL_ARRAY_COUNT(counters); i++) {
        struct tl_counter *counter = &description->counters[description->counter_count++];
        counter->name = strdup(counters[i].name);
        counter->value = counters[i].value;
        if (counter->name == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for counters");
    }
    return TL_OK;
}

static enum tl_status describe_transports(struct tl_description *description, struct tl_error *ret_error)
{
    static const struct {
        const char *name;
        bool is_available;
        const char *reason;
    } transports[] = {
        {"grpc", true, "in use for all peers"},
        {"verbs", false, "this version has no RDMA data plane"},
        {"local", false, "this version has no shared-memory data plane"},
    };
    description->transports = calloc(TL_ARRAY_COUNT(transports), sizeof(*description->transports));
    if (description->transports == NULL) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for transports");
    }
    for (size_t i = 0; i < TL_ARRAY_COUNT(transports); i++) {
        struct tl_transport_state *state = &description->transports[description->transport_count++];
        state->name = strdup(transports[i].name);
        state->is_available = transports[i].is_available;
        state->reason = strdup(transports[i].reason);
        if (state->name == NULL || state->reason == NULL) {
            return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for transports");
        }
    }
    return TL_OK;
}

static enum tl_status describe(void *context, struct tl_description *ret_description, struct tl_error *ret_error)
{
    struct tl_worker *worker = context;
    ret_description->job = strdup(worker->task != NULL ? worker->task->job : "");
    ret_description->task = worker->task != NULL ? worker->task->index : 0;
    ret_description->incarnation = worker->self.incarnation;
    ret_description->software_version = strdup(tl_version());
    ret_description->is_serving = !worker->is_closing;
    ret_description->uptime_ns = (uint64_t)(tl_clock_now_ns() - worker->opened_ns);
    if (ret_description->job == NULL || ret_description->software_version == NULL) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a description");
    }
    enum tl_status status = describe_transports(ret_description, ret_error);
    if (status == TL_OK) status = tl_peers_describe(worker, ret_description, ret_error);
    if (status == TL_OK) status = describe_counters(worker, ret_description, ret_error);
    return status;
}

static void link_up(void *context, struct tl_link *link)
{
    tl_peers_link_up(context, link);
}

const struct tl_control_handlers tl_worker_handlers = {
    .source = {.request = request, .closed = closed, .received = received},
    .link_up = link_up,
    .admit = admit,
    .publish = publish,
    .withdraw = withdraw,
    .list = list,
    .describe = describe,
};
