// SPDX-License-Identifier: Apache-2.0
/* What the slots of a subscription ask: a peer, by a fetch, or the table of this worker, whose values are copied. */

#include "base/copy.h"
#include "base/error.h"
#include "server/peers/session.h"
#include "server/transfers/subscription_internal.h"

/* ----------------------------------------------------------------------------------------- from another worker -- */

static bool fits(const struct slot *slot, const struct tl_meta_data *meta_data)
{
    return slot->memory != NULL && !meta_data->is_dead && meta_data->dtype != TL_STRING &&
           tl_meta_data_is_equal(tl_tensor_meta_data(slot->memory), meta_data);
}

static enum tl_status does_not_fit(const struct slot *slot, const struct tl_meta_data *meta_data,
                                   struct tl_error *ret_error)
{
    const struct tl_subscription *subscription = slot->subscription;
    const struct tl_meta_data *wanted = tl_tensor_meta_data(slot->memory);
    char wanted_shape[TL_SHAPE_TEXT_BYTES], shape[TL_SHAPE_TEXT_BYTES], name[TL_MAX_NAME_BYTES];
    tl_shape_format(&wanted->shape, wanted_shape, sizeof(wanted_shape));
    tl_shape_format(&meta_data->shape, shape, sizeof(shape));
    return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                        "%s of %s is %s%s %s and does not fit the destinations, which are %s %s", subscription->key,
                        tl_peer_copy_name(subscription->peer, name), meta_data->is_dead ? "dead, " : "",
                        tl_dtype_name(meta_data->dtype), shape, tl_dtype_name(wanted->dtype), wanted_shape);
}

/* Chooses where a value goes. Thread: the transport's. */
static enum tl_status place(struct slot *slot, const struct tl_meta_data *meta_data,
                            const struct tl_allocator *allocator, struct tl_tensor **ret_destination,
                            struct tl_error *ret_error)
{
    const struct tl_device host = {.kind = TL_DEVICE_HOST};
    if (fits(slot, meta_data)) {
        *ret_destination = tl_tensor_get(slot->memory);
        return TL_OK;
    }
    if (slot->subscription->has_destinations) return does_not_fit(slot, meta_data, ret_error);
    enum tl_status status = allocator != NULL
                                ? allocator->create(allocator->context, host, meta_data, ret_destination, ret_error)
                                : tl_tensor_create_for(meta_data, ret_destination, ret_error);
    if (status != TL_OK) tl_error_prefix(ret_error, "tensor '%s': ", slot->subscription->key);
    return status;
}

static enum tl_status fetch_place(struct tl_fetch *fetch, const struct tl_meta_data *meta_data,
                                  struct tl_tensor **ret_destination, struct tl_error *ret_error)
{
    struct slot *slot = TL_CONTAINER_OF(fetch, struct slot, request.fetch);
    return place(slot, meta_data, fetch->allocator, ret_destination, ret_error);
}

static const char *reason_of(const struct tl_fetch *fetch)
{
    bool has_reason = fetch->path == TL_PATH_BOUNCE || fetch->path == TL_PATH_GPU_PROXY ||
                      fetch->path == TL_PATH_GRPC || fetch->path == TL_PATH_SERIALIZED;
    return has_reason && fetch->path_reason != NULL ? fetch->path_reason : "";
}

void slot_forget_connection(struct slot *slot)
{
    slot->request.fetch.is_begun = false;
    slot->request.fetch.asked_order = 0;
    slot->is_asked_again = true;
    slot_drop_followers(slot);
}

/* Memory that a subscription has chosen may be shared with a peer that is still about to write there. */
static void leave_memory(struct slot *slot)
{
    if (slot->subscription->has_destinations) return;
    tl_tensor_put(slot->memory);
    slot->memory = NULL;
}

/* Whether the failure concerns one value, which the peer cannot read or send. */
static bool is_of_one_value(const struct tl_fetch *fetch, const struct tl_error *error)
{
    return !fetch->is_final || error->code == TL_DATA_LOSS || error->code == TL_UNAVAILABLE;
}

/* is_refused_here: this worker has refused the request, and would refuse every other one. */
static void fetch_failed(struct slot *slot, const struct tl_error *error, bool is_refused_here)
{
    struct tl_fetch *fetch = &slot->request.fetch;
    const struct tl_subscription *subscription = slot->subscription;
    bool may_ask_again = !fetch->is_final && !subscription->is_ending;
    if (may_ask_again && fetch->is_rerouted && !subscription->worker->data_plane.is_transport_required) {
        slot_forget_connection(slot);
        tl_peer_fetch_on_link(subscription->peer, &slot->request, fetch->path_reason);
    } else if (may_ask_again && error->code == TL_UNAVAILABLE) {
        slot->state = SLOT_BROKEN;
        leave_memory(slot);
        slot_drop_followers(slot);
        subscription_retry_later(slot->subscription);
    } else {
        bool is_refusal = is_refused_here || !is_of_one_value(fetch, error);
        tl_peer_give_up(&slot->request);
        slot_failed(slot, error, fetch->offer_step, is_refusal);
    }
}

static void fetch_done(struct tl_fetch *fetch, const struct tl_error *result)
{
    struct slot *slot = TL_CONTAINER_OF(fetch, struct slot, request.fetch);
    struct tl_subscription *subscription = slot->subscription;
    bool is_refused_here = slot->request.carrier == TL_CARRIER_REFUSAL;
    tl_peer_fetch_done(&slot->request);
    subscription_hold(subscription);
    if (result->code == TL_OK) {
        struct tl_tensor *tensor = tl_fetch_pass_destination(fetch);
        slot->value->is_verified = fetch->is_verified;
        slot->value->path_reason = reason_of(fetch);
        slot_arrived(slot, tensor, fetch->offer_step, fetch->path);
    } else {
        fetch_failed(slot, result, is_refused_here);
    }
    subscription_let_go(subscription);
}

static const struct tl_meta_data *fetch_wanted(const struct tl_fetch *fetch)
{
    const struct slot *slot = TL_CONTAINER_OF(fetch, const struct slot, request.fetch);
    return slot->subscription->has_destinations ? tl_tensor_meta_data(slot->memory) : NULL;
}

static uint64_t fetch_subscription(const struct tl_fetch *fetch)
{
    return TL_CONTAINER_OF(fetch, const struct slot, request.fetch)->subscription->id;
}

static const struct tl_request_ops request_ops = {
    .on_loop = {.place = fetch_place, .wanted = fetch_wanted, .subscription = fetch_subscription, .done = fetch_done},
    .on_reactor = {.place = fetch_place,
                   .wanted = fetch_wanted,
                   .subscription = fetch_subscription,
                   .done = tl_session_fetch_done},
};

/* --------------------------------------------------------------------------------------------- from this worker -- */

/* Copies a value of this worker. */
static enum tl_status copy_own(struct slot *slot, struct tl_tensor *source, struct tl_tensor **ret_tensor,
                               struct tl_error *ret_error)
{
    size_t size_bytes = (size_t)tl_tensor_size_bytes(source);
    if (tl_tensor_is_on_device(source)) {
        return tl_error_set(ret_error, TL_UNIMPLEMENTED,
                            "%s lies on a device of this worker, whose own subscriptions take values of the host only",
                            slot->subscription->key);
    }
    enum tl_status status = place(slot, tl_tensor_meta_data(source), NULL, ret_tensor, ret_error);
    if (status != TL_OK) return status;
    status = tl_tensor_check_readable(source, 0, size_bytes, ret_error);
    tl_quota_use_copy(tl_loop_quota(slot->subscription->worker->loop), size_bytes);
    if (status == TL_OK && size_bytes > 0) tl_copy(tl_tensor_data(*ret_tensor), tl_tensor_data(source), size_bytes);
    /* Checked again, because a file that is cut meanwhile is read as zeros. */
    if (status == TL_OK) status = tl_tensor_check_readable(source, 0, size_bytes, ret_error);
    if (status != TL_OK) tl_tensor_put(*ret_tensor);
    return status;
}

static void take_own(struct slot *slot)
{
    struct tl_offer *offer = &slot->own.offer;
    struct tl_rendezvous *table = slot->subscription->worker->table;
    const struct tl_request_id id = slot->own.receiver.id;
    struct tl_tensor *tensor;
    struct tl_error error;
    enum tl_status status = copy_own(slot, offer->tensor, &tensor, &error);
    tl_tensor_put(offer->tensor);
    if (status == TL_OK) {
        if (offer->is_one_shot) tl_rendezvous_acknowledge(table, &id);
        slot->value->path_reason = "";
        slot->value->is_verified = slot->subscription->wants_checksum;
        slot_arrived(slot, tensor, offer->step, TL_PATH_SELF);
    } else {
        if (offer->is_one_shot) tl_rendezvous_release(table, &id);
        slot_failed(slot, &error, offer->step, false);
    }
}

static void own_answered(struct slot *slot, const struct tl_error *status)
{
    struct tl_subscription *subscription = slot->subscription;
    subscription_hold(subscription);
    if (status->code == TL_OK) {
        take_own(slot);
    } else {
        slot_failed(slot, status, 0, true);
    }
    subscription_let_go(subscription);
}

static void own_answer_came(struct tl_closure *closure)
{
    struct slot *slot = TL_CONTAINER_OF(closure, struct slot, own.closure);
    const struct tl_error *status = slot->own.status;
    slot->own.status = NULL;
    __atomic_fetch_sub(&slot->subscription->own_answer_count, 1, __ATOMIC_RELAXED);
    own_answered(slot, tl_error_kept(status));
    tl_error_drop(status);
}

/* Thread: the loop's owner, or the reactor's. */
static void own_deliver(struct tl_receiver *receiver, const struct tl_error *status, const struct tl_offer *offer)
{
    struct slot *slot = TL_CONTAINER_OF(receiver, struct slot, own.receiver);
    struct tl_subscription *subscription = slot->subscription;
    const struct tl_executor *executor = &subscription->worker->executor;
    bool is_one_shot = offer != NULL && offer->is_one_shot;
    bool is_next = __atomic_load_n(&subscription->own_answer_count, __ATOMIC_RELAXED) == 0;
    bool may_copy = tl_executor_is_here(executor) && tl_quota_left(tl_loop_quota(subscription->worker->loop)) > 0;
    if (offer != NULL) slot->own.offer = *offer;
    /* A value that is refused is offered to the next receiver at once: each of many would have that call nested in its
     * own. Answers keep their order, and come later when the loop has copied enough in this round. */
    if (may_copy && !is_one_shot && is_next) {
        own_answered(slot, status);
        return;
    }
    slot->own.status = tl_error_keep(status);
    __atomic_fetch_add(&subscription->own_answer_count, 1, __ATOMIC_RELAXED);
    executor->post(executor, &slot->own.closure);
}

/* ------------------------------------------------------------------------------------------------------- asking -- */

void slot_ask_own(struct slot *slot, uint64_t number)
{
    const struct tl_subscription *subscription = slot->subscription;
    slot->own.closure.run = own_answer_came;
    slot->own.receiver =
        (struct tl_receiver){.id = {.incarnation = subscription->worker->self.incarnation, .number = number},
                             .key = subscription->key,
                             .step = subscription->from_step,
                             .subscription = subscription->id,
                             .deliver = own_deliver};
    tl_rendezvous_receive(subscription->worker->table, &slot->own.receiver);
}

void slot_ask_peer(struct slot *slot, uint64_t number)
{
    const struct tl_subscription *subscription = slot->subscription;
    struct tl_fetch *fetch = &slot->request.fetch;
    tl_fetch_fini(fetch);
    tl_fetch_init(fetch, &request_ops.on_loop);
    fetch->number = number;
    fetch->key = subscription->key;
    fetch->step = subscription->from_step;
    fetch->wants_checksum = subscription->wants_checksum;
    tl_peer_fetch(subscription->peer, &slot->request);
}

void slot_init_request(struct slot *slot)
{
    tl_fetch_init(&slot->request.fetch, &request_ops.on_loop);
}
