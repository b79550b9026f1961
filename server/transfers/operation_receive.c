// SPDX-License-Identifier: Apache-2.0
/*
 * Receives. One from this worker itself is a receiver in the table, which borrows the memory of the send
 * (server/transfers/borrow.h); one from a peer is a fetch, started again with the same request number when its
 * connection breaks.
 *
 * Over a link a receive ends at once. Over the data plane its memory may still be written by the peer: it keeps its
 * first error and completes when the transport has let go. So does one whose answer of the table, given on another
 * thread, is on its way: what it brings is given back.
 */
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/struct_version.h"
#include "server/back_off.h"
#include "server/peers/session.h"
#include "server/transfers/borrow.h"
#include "server/transfers/operation_internal.h"

/* Whether the destination lies on a device, or a new one will. */
static bool is_for_device(const struct tl_op *op)
{
    static const struct tl_meta_data any = {.dtype = TL_U8};
    return op_device_for(op, &any).kind != TL_DEVICE_HOST;
}

/* Returns why the tensor has travelled on this path and not on a faster one. */
static const char *reason_of(const struct tl_op *op, enum tl_path path)
{
    const char *reason = op->receive.request.fetch.path_reason;
    switch (path) {
    case TL_PATH_GRPC:
        return reason != NULL ? reason : "";
    case TL_PATH_SERIALIZED:
        return reason != NULL && reason[0] != '\0' ? reason : "strings travel serialized";
    case TL_PATH_ZERO_COPY:
        return op->receive.request.fetch.may_map || op_worker(op)->settings.protocol == TL_PROTOCOL_GRPC_GDR ? reason
                                                                                                             : "";
    case TL_PATH_BOUNCE:
    case TL_PATH_GPU_PROXY:
        return reason;
    default:
        return "";
    }
}

/* Bytes are copied on the loop, where others wait meanwhile. */
static void use_quota(const struct tl_op *op, uint64_t len_bytes)
{
    tl_quota_use_copy(tl_loop_quota(op_worker(op)->loop), len_bytes);
}

static enum tl_status count_part(void *context, uint64_t len_bytes, struct tl_error *ret_error)
{
    (void)ret_error;
    use_quota(context, len_bytes);
    return TL_OK;
}

/* Puts the part that is wanted in the place of the value of this worker. It is no view of a sent one, which is lent as
 * a whole only. */
static enum tl_status self_part(struct tl_op *op, struct tl_error *ret_error)
{
    struct tl_offer *offer = &op->receive.rare->offer;
    if (!tl_part_is_name(op_key(op))) return TL_OK;
    if (tl_tensor_is_on_device(offer->tensor))
        return tl_error_set(ret_error, TL_UNIMPLEMENTED, "%s lies on a device of this very worker; receive the whole",
                            tl_part_key(op_key(op)));
    const struct tl_part_costs costs = {.copies = offer->is_one_shot, .charge = count_part, .context = op};
    enum tl_status status = tl_part_take(op_key(op), &costs, &offer->tensor, ret_error);
    if (status != TL_OK) tl_error_prefix(ret_error, "%s: ", tl_part_key(op_key(op)));
    return status;
}

/* Puts the caller's destination, with a copy of the bytes, in the place of the value. */
static enum tl_status self_copy(struct tl_op *op, struct tl_tensor **tensor, struct tl_error *ret_error)
{
    struct tl_tensor *source = *tensor;
    enum tl_status status = op_check_destination(op, tl_tensor_meta_data(source), ret_error);
    uint64_t size_bytes = tl_tensor_size_bytes(source);
    if (status == TL_OK) status = tl_tensor_check_readable(source, 0, size_bytes, ret_error);
    if (status != TL_OK) return status;
    use_quota(op, size_bytes);
    tl_tensor_write(op->tensor, 0, size_bytes, tl_tensor_data(source));
    /* Checked again, because a file that is cut meanwhile is read as zeros. */
    status = tl_tensor_check_readable(source, 0, size_bytes, ret_error);
    if (status != TL_OK) return status;
    *tensor = tl_tensor_get(op->tensor);
    tl_tensor_put(source);
    return TL_OK;
}

/* Puts a borrow of the sender's memory in the place of the value. */
static enum tl_status self_borrow(struct tl_worker *worker, struct tl_sender *sender, struct tl_tensor **tensor,
                                  struct tl_error *ret_error)
{
    struct tl_op *op = TL_CONTAINER_OF(sender, struct tl_op, send.sender);
    struct tl_tensor *alias = *tensor;
    enum tl_status status =
        tl_borrow_create(worker, op->send.base, tl_op_borrow_returned, op, &op->send.borrow, tensor, ret_error);
    if (status == TL_OK) tl_tensor_put(alias);
    return status;
}

/* Puts an alias in the place of a published value: it is read-only, and each receiver may set a stream of its own. */
static enum tl_status self_alias(struct tl_tensor **tensor, struct tl_error *ret_error)
{
    struct tl_tensor *value = *tensor;
    enum tl_status status = tl_tensor_create_alias(value, NULL, NULL, tensor, ret_error);
    if (status == TL_OK) tl_tensor_put(value);
    return status;
}

/* ----------------------------------------------------------------------------------------------------- actions -- */

static void succeed(struct tl_op *op, const struct tl_error *unused)
{
    op_drop_error(op);
    tl_op_complete(op, unused);
}

/* Completes with the first error. The peer may offer the value that it may keep for this receive to others again. */
static void fail(struct tl_op *op, const struct tl_error *error)
{
    op_set_error(op, error);
    tl_peer_give_up(&op->receive.request);
    tl_op_complete(op, error);
}

static void fail_retry(struct tl_op *op, const struct tl_error *error)
{
    tl_timers_disarm(tl_loop_timers(op_worker(op)->loop), &op->receive.retry_timer);
    fail(op, error);
}

/* A receive that ended while it waited for memory says so. */
static void fail_cancelled(struct tl_op *op, const struct tl_error *error)
{
    if (error->code == TL_RESOURCE_EXHAUSTED) op_explain_error(op, error);
    fail(op, error);
}

static void set_error(struct tl_op *op, const struct tl_error *error)
{
    op_set_error(op, error);
}

static void retry(struct tl_timer *timer);

static void retry_later(struct tl_op *op, const struct tl_error *unused)
{
    (void)unused;
    struct op_receive *receive = &op->receive;
    op_worker(op)->operations.requests_retried++;
    int64_t due_ns =
        tl_clock_now_ns() + tl_back_off_ns(TL_RECEIVE_FIRST_BACK_OFF_NS, TL_RECEIVE_MAX_BACK_OFF_NS, op->retry_count);
    if (op->retry_count < UINT8_MAX) op->retry_count++;
    receive->retry_timer = (struct tl_timer){.fire = retry};
    if (tl_timers_arm(tl_loop_timers(op_worker(op)->loop), &receive->retry_timer, due_ns) != TL_OK) {
        tl_op_handle(op, OP_EVENT_FAILED, &op_out_of_memory);
    }
}

static void ask_again(struct tl_op *op, const struct tl_error *unused)
{
    (void)unused;
    tl_peer_fetch(op->receive.request.peer, &op->receive.request);
}

static void ask_on_link(struct tl_op *op, const struct tl_error *unused)
{
    (void)unused;
    tl_peer_fetch_on_link(op->receive.request.peer, &op->receive.request, op->receive.request.fetch.path_reason);
}

/* Completes with a tensor, which the completion takes over. */
static void arrive(struct tl_op *op, struct tl_tensor *tensor, uint64_t step, enum tl_path path, bool is_verified)
{
    struct tl_fetch *fetch = &op->receive.request.fetch;
    uint64_t bytes = tl_tensor_size_bytes(tensor);
    tl_fetch_fini(fetch);
    tl_tensor_put(op->tensor);
    op->tensor = op_settle_in_box(op, tensor);
    op->has_arrived = true;
    fetch->offer_step = step;
    fetch->received_bytes = bytes;
    if (bytes == 0) path = TL_PATH_NONE;
    fetch->path = path;
    fetch->path_reason = reason_of(op, fetch->path);
    fetch->is_verified = is_verified;
    tl_op_handle(op, OP_EVENT_ARRIVED, NULL);
}

static void self_receive(struct tl_op *op);
static void self_deliver(struct tl_receiver *receiver, const struct tl_error *status, const struct tl_offer *offer);

static void ask_for_another(struct tl_op *op, const struct tl_error *unused)
{
    (void)unused;
    self_receive(op);
}

/* The value of this worker cannot be had after all; it is offered again. */
static void lose_offer(struct tl_op *op, const struct tl_error *error)
{
    struct tl_request_id id = op->receive.rare->receiver.id;
    struct tl_rendezvous *table = op_worker(op)->table;
    tl_tensor_put(op->receive.rare->offer.tensor);
    tl_rendezvous_release(table, &id);
    tl_op_handle(op, OP_EVENT_FAILED, error);
}

/* Completes with a tensor in place of the value of this worker. */
static void arrive_from_self(struct tl_op *op, struct tl_tensor *tensor)
{
    struct tl_request_id id = op->receive.rare->receiver.id;
    struct tl_rendezvous *table = op_worker(op)->table;
    arrive(op, tensor, op->receive.rare->offer.step, TL_PATH_SELF, op->receive.request.fetch.wants_checksum);
    tl_rendezvous_acknowledge(table, &id);
}

/* Completes with the value itself. */
static void take_by_reference(struct tl_op *op)
{
    struct tl_tensor *tensor = op->receive.rare->offer.tensor;
    struct tl_error error;
    enum tl_status problem = TL_OK;
    if (op->receive.rare->offer.is_one_shot) {
        struct tl_sender *sender = tl_rendezvous_reserved_sender(op_worker(op)->table, &op->receive.rare->receiver.id);
        if (sender == NULL) {
            /* The value was taken back before the receive looked at it, so the receive asks for another. */
            tl_tensor_put(tensor);
            tl_op_handle(op, OP_EVENT_TAKEN, NULL);
            return;
        }
        problem = self_borrow(op_worker(op), sender, &tensor, &error);
    } else if (tl_tensor_is_on_device(tensor) || !tl_tensor_is_read_only(tensor)) {
        problem = self_alias(&tensor, &error);
    }
    if (problem == TL_OK) {
        arrive_from_self(op, tensor);
    } else {
        lose_offer(op, &error);
    }
}

/* Whether the value of this worker is not taken on the spot: it, or where it is wanted, is a device. */
static bool is_apart(const struct tl_op *op)
{
    const struct tl_tensor *tensor = op->receive.rare->offer.tensor;
    return tl_tensor_is_on_device(tensor) || op_device_for(op, tl_tensor_meta_data(tensor)).kind != TL_DEVICE_HOST;
}

/* Takes a value of this worker itself: by reference, or as a copy in the caller's destination. */
static void take_offer(struct tl_op *op, const struct tl_error *unused)
{
    (void)unused;
    struct tl_error error;
    if (self_part(op, &error) != TL_OK) {
        lose_offer(op, &error);
        return;
    }
    struct tl_tensor *tensor = op->receive.rare->offer.tensor;
    if (is_apart(op)) {
        tl_op_handle(op, OP_EVENT_APART, NULL);
    } else if (op->tensor == NULL && op->receive.rare->offer.is_one_shot && tl_part_is_name(op_key(op)) &&
               !tl_tensor_is_dead(tensor)) {
        arrive_from_self(op, tensor); /* a copy */
    } else if (op->tensor == NULL) {
        take_by_reference(op);
    } else if (self_copy(op, &tensor, &error) == TL_OK) {
        arrive_from_self(op, tensor);
    } else {
        lose_offer(op, &error);
    }
}

static void delivered(void *context, struct tl_tensor *tensor, const struct tl_error *status)
{
    struct tl_op *op = context;
    struct tl_tensor *value = op->receive.rare->offer.tensor;
    struct tl_error error = *status;
    op->receive.rare->delivery = NULL;
    if (error.code != TL_OK) {
        tl_error_prefix(&error, "tensor '%s': ", op_key(op));
        lose_offer(op, &error);
        return;
    }
    tl_tensor_put(value); /* one of two references to it, or the only one */
    if (tensor == value) {
        take_by_reference(op);
    } else {
        arrive_from_self(op, tensor);
    }
}

/* Brings the value of this worker to where it is wanted. */
static void deliver(struct tl_op *op, const struct tl_error *unused)
{
    (void)unused;
    struct op_receive_rare *rare = op->receive.rare;
    const struct tl_meta_data *meta_data = tl_tensor_meta_data(rare->offer.tensor);
    const struct tl_delivery_options options = {.value = rare->offer.tensor,
                                                .destination = op->tensor,
                                                .device = op_device_for(op, meta_data),
                                                .post = op_post_to_progress,
                                                .loop = &op_worker(op)->progress,
                                                .done = delivered,
                                                .context = op};
    struct tl_error error;
    if (op->tensor != NULL && op_check_destination(op, meta_data, &error) != TL_OK) {
        lose_offer(op, &error);
    } else if (!tl_delivery_start(&options, &rare->delivery)) {
        lose_offer(op, &op_out_of_memory);
    }
}

/* The stream of the destination has come far enough, or never will. */
static void stream_reached(void *context, struct tl_piece *piece, const struct tl_error *status)
{
    struct tl_op *op = context;
    op->receive.rare->stream_wait = NULL;
    tl_op_handle(op, status->code == TL_OK ? OP_EVENT_REACHED : OP_EVENT_FAILED, status);
    tl_piece_put(piece);
}

static void wait_for_stream(struct tl_op *op, const struct tl_error *unused)
{
    (void)unused;
    struct op_receive_rare *rare = op->receive.rare;
    const struct tl_piece_options options = {.tensor = op->tensor,
                                             .after = rare->fence,
                                             .post = op_post_to_progress,
                                             .loop = &op_worker(op)->progress,
                                             .notify = stream_reached,
                                             .context = op};
    rare->stream_wait = tl_piece_read(&options);
    tl_device_fence_put(rare->fence);
    rare->fence = NULL;
    if (rare->stream_wait == NULL) tl_op_handle(op, OP_EVENT_FAILED, &op_out_of_memory);
}

/* The answer was on its way when the receive ended: its value is offered again. */
static void give_back_offer(struct tl_op *op, const struct tl_error *unused)
{
    struct tl_request_id id = op->receive.rare->receiver.id;
    struct tl_rendezvous *table = op_worker(op)->table;
    bool is_reserved = op->receive.rare->offer.is_one_shot;
    tl_tensor_put(op->receive.rare->offer.tensor);
    tl_op_complete(op, unused);
    if (is_reserved) tl_rendezvous_release(table, &id);
}

static void start(struct tl_op *op, const struct tl_error *unused)
{
    (void)unused;
    struct tl_worker *worker = op_worker(op);
    struct tl_peer_request *request = &op->receive.request;
    struct op_receive_rare *rare = op->receive.rare;
    struct tl_error error;
    if (rare != NULL && rare->fence != NULL) {
        tl_op_handle(op, OP_EVENT_FENCED, NULL);
        return;
    }
    request->fetch.number = ++worker->operations.next_request;
    if (tl_peer_is_self(request->peer)) {
        rare->receiver = (struct tl_receiver){
            .id = {.incarnation = worker->self.incarnation, .number = request->fetch.number}, .deliver = self_deliver};
        self_receive(op);
    } else if (tl_rendezvous_check_step(worker->table, op_step(op), &error) != TL_OK) {
        tl_op_handle(op, OP_EVENT_FAILED, &error);
    } else {
        tl_peer_fetch(request->peer, request);
    }
}

/* --------------------------------------------------------------------------------------------------- the table -- */

/* clang-format off */
const struct op_transition op_receive_transitions[OP_STATES][OP_EVENTS] = {
    [OP_NEW] = {
        [OP_EVENT_START] = {OP_RUNNING, start},
        [OP_EVENT_REFUSED] = {OP_COMPLETE, fail},
    },
    [OP_RUNNING] = {
        [OP_EVENT_REFUSED] = {OP_COMPLETE, fail},
        [OP_EVENT_ARRIVED] = {OP_COMPLETE, succeed},
        [OP_EVENT_OFFERED] = {OP_RUNNING, take_offer},
        [OP_EVENT_FAILED] = {OP_COMPLETE, fail},
        [OP_EVENT_BROKEN] = {OP_RETRYING, retry_later},
        [OP_EVENT_REROUTED] = {OP_RUNNING, ask_on_link},
        [OP_EVENT_FENCED] = {OP_FENCED, wait_for_stream},
        [OP_EVENT_APART] = {OP_DELIVERING, deliver},
        [OP_EVENT_TAKEN] = {OP_RUNNING, ask_for_another},
        [OP_EVENT_CANCEL] = {OP_CANCELLING, set_error},
    },
    [OP_FENCED] = {
        [OP_EVENT_FAILED] = {OP_COMPLETE, fail},
        [OP_EVENT_REACHED] = {OP_RUNNING, start},
    },
    [OP_DELIVERING] = {
        [OP_EVENT_ARRIVED] = {OP_COMPLETE, succeed},
        [OP_EVENT_FAILED] = {OP_COMPLETE, fail},
        [OP_EVENT_TAKEN] = {OP_RUNNING, ask_for_another},
        [OP_EVENT_CANCEL] = {OP_CANCELLING, set_error},
    },
    [OP_RETRYING] = {
        [OP_EVENT_FAILED] = {OP_COMPLETE, fail_retry},
        [OP_EVENT_RETRY] = {OP_RUNNING, ask_again},
    },
    [OP_CANCELLING] = {
        [OP_EVENT_REFUSED] = {OP_COMPLETE, fail},
        [OP_EVENT_ARRIVED] = {OP_COMPLETE, succeed}, /* its sender knows already that it has been received */
        [OP_EVENT_OFFERED] = {OP_COMPLETE, give_back_offer},
        [OP_EVENT_FAILED] = {OP_COMPLETE, fail_cancelled},
        [OP_EVENT_BROKEN] = {OP_COMPLETE, fail_cancelled},
        [OP_EVENT_REROUTED] = {OP_COMPLETE, fail_cancelled},
    },
};
/* clang-format on */

/* --------------------------------------------------------------------------------------- where events are from -- */

static void fetch_done(struct tl_fetch *fetch, const struct tl_error *result)
{
    struct tl_op *op = TL_CONTAINER_OF(fetch, struct tl_op, receive.request.fetch);
    const struct tl_worker *worker = op_worker(op);
    bool may_ask_again = !fetch->is_final && !worker->closing.is_closing;
    bool may_go_on = may_ask_again && result->code == TL_UNAVAILABLE;
    bool may_take_link = may_ask_again && fetch->is_rerouted && !worker->data_plane.is_transport_required;
    /* A worker that closes does not ask again. Its operations end in portions, and this one has not had its turn. */
    if (!fetch->is_final && worker->closing.is_closing && result->code == TL_UNAVAILABLE)
        result = &worker->closing.reason;
    tl_peer_fetch_done(&op->receive.request);
    if (op->receive.rare != NULL) op->receive.rare->is_place_awaited = false;
    fetch->placed = NULL;
    if (result->code == TL_OK) {
        struct tl_tensor *tensor = tl_fetch_pass_destination(fetch);
        arrive(op, tensor, fetch->offer_step, fetch->path, fetch->is_verified);
    } else if (may_take_link) {
        tl_op_handle(op, OP_EVENT_REROUTED, result);
    } else {
        tl_op_handle(op, may_go_on ? OP_EVENT_BROKEN : OP_EVENT_FAILED, result);
    }
}

static const struct tl_meta_data *fetch_wanted(const struct tl_fetch *fetch)
{
    const struct tl_op *op = TL_CONTAINER_OF(fetch, const struct tl_op, receive.request.fetch);
    return op->tensor != NULL ? tl_tensor_meta_data(op->tensor) : NULL;
}

static const struct tl_request_ops request_ops = {
    .on_loop = {.place = op_fetch_place, .wanted = fetch_wanted, .done = fetch_done},
    .on_reactor = {.place = op_fetch_place, .wanted = fetch_wanted, .done = tl_session_fetch_done},
};

static void retry(struct tl_timer *timer)
{
    tl_op_handle(TL_CONTAINER_OF(timer, struct tl_op, receive.retry_timer), OP_EVENT_RETRY, NULL);
}

static void self_answered(struct tl_op *op, const struct tl_error *status)
{
    if (status->code != TL_OK) {
        tl_op_handle(op, OP_EVENT_REFUSED, status);
    } else {
        tl_op_handle(op, OP_EVENT_OFFERED, NULL);
    }
}

static void answer_came(struct tl_closure *closure)
{
    struct tl_op *op = TL_CONTAINER_OF(closure, struct op_receive_rare, answer_closure)->op;
    const struct tl_error *status = op->receive.rare->answer_status;
    op->receive.rare->answer_status = NULL;
    self_answered(op, tl_error_kept(status));
    tl_error_drop(status);
}

/* Thread: the loop's owner, or the reactor's. */
static void self_deliver(struct tl_receiver *receiver, const struct tl_error *status, const struct tl_offer *offer)
{
    struct tl_op *op = TL_CONTAINER_OF(receiver, struct op_receive_rare, receiver)->op;
    const struct tl_executor *executor = &op_worker(op)->executor;
    bool was_given_back = offer != NULL && offer->was_given_back;
    if (offer != NULL) op->receive.rare->offer = *offer;
    bool may_copy = tl_executor_is_here(executor) && tl_quota_left(tl_loop_quota(op_worker(op)->loop)) > 0;
    /* The receiver before this one may be giving it back right now. Each of many would have that call nested in its
     * own, so that the answer comes later. So it does when the loop has copied enough in this round. */
    if (may_copy && !was_given_back) {
        self_answered(op, status);
        return;
    }
    op->receive.rare->answer_status = tl_error_keep(status);
    tl_executor_post(executor, &op->receive.rare->answer_closure);
}

static void self_receive(struct tl_op *op)
{
    struct tl_receiver *receiver = &op->receive.rare->receiver;
    receiver->key = tl_part_is_name(op_key(op)) ? tl_part_key(op_key(op)) : op_key(op);
    receiver->step = op_step(op);
    receiver->subscription = 0;
    receiver->client = NULL;
    tl_rendezvous_receive(op_worker(op)->table, receiver);
}

bool tl_op_receive_finds_stream(const struct tl_op *op, struct tl_device *ret_device)
{
    const struct op_receive_rare *rare = op->receive.rare;
    if (op->state == OP_FENCED) {
        *ret_device = tl_tensor_device(op->tensor);
        return true;
    }
    if (op->state != OP_DELIVERING || !tl_delivery_is_fenced(rare->delivery)) return false;
    *ret_device = tl_tensor_device(rare->offer.tensor);
    return true;
}

bool tl_op_receive_end(struct tl_op *op, const struct tl_error *error)
{
    bool is_over = op->state == OP_RETRYING;
    if (op->state == OP_FENCED) {
        tl_piece_put(op->receive.rare->stream_wait);
        op->receive.rare->stream_wait = NULL;
        is_over = true;
    } else if (op->state == OP_DELIVERING) {
        if (tl_delivery_stop(op->receive.rare->delivery)) {
            op->receive.rare->delivery = NULL;
            lose_offer(op, error);
            return true;
        }
    } else if (op->state == OP_RUNNING && tl_peer_is_self(op->receive.request.peer)) {
        is_over = tl_rendezvous_cancel(op_worker(op)->table, &op->receive.rare->receiver);
    } else if (op->state == OP_RUNNING) {
        is_over = tl_peer_cancel(&op->receive.request);
    } else if (!is_over) {
        return false;
    }
    tl_op_handle(op, is_over ? OP_EVENT_FAILED : OP_EVENT_CANCEL, error);
    return true;
}

/* -------------------------------------------------------------------------------------------------------- life -- */

/* Checks that `device` can be used, and opens it. */
static enum tl_status check_device(const char *key, const struct tl_recv_options *options, struct tl_error *ret_error)
{
    const struct tl_tensor *destination = options->destination;
    char wanted[TL_DEVICE_TEXT_BYTES], given[TL_DEVICE_TEXT_BYTES];
    if (options->device.kind == TL_DEVICE_HOST) return TL_OK;
    if (options->may_map)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%.64s cannot be mapped into memory of a device", key);
    if (destination == NULL) return tl_device_open(options->device, ret_error);
    struct tl_device device = tl_tensor_device(destination);
    if (device.kind == options->device.kind && device.index == options->device.index) return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the destination for %.64s is on %s, and not on %s as wanted",
                        key, tl_device_format(device, given), tl_device_format(options->device, wanted));
}

static enum tl_status check_options(const char *key, const struct tl_recv_options *options, struct tl_error *ret_error)
{
    const struct tl_tensor *destination = options->destination;
    if (destination != NULL && !tl_tensor_is_writable(destination)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the destination for %.64s is read-only", key);
    }
    if (destination != NULL && options->may_map) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%.64s cannot be mapped into a destination", key);
    }
    return check_device(key, options, ret_error);
}

/* Adds what a receive from this worker itself, or for a device, needs. */
static enum tl_status add_rare(struct tl_op *op, const struct tl_recv_options *options, struct tl_error *ret_error)
{
    const struct tl_tensor *destination = options->destination;
    bool is_on_device =
        options->device.kind != TL_DEVICE_HOST || (destination != NULL && tl_tensor_is_on_device(destination));
    bool is_for_box = options->part != NULL && options->part->destination_start != NULL;
    if (!is_on_device && !is_for_box && !tl_peer_is_self(op->receive.request.peer)) return TL_OK;
    struct op_receive_rare *rare = calloc(1, sizeof(*rare));
    if (rare == NULL)
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a receive of %s", op_key(op));
    rare->op = op;
    rare->device = options->device;
    rare->answer_closure.run = answer_came;
    enum tl_status status = destination != NULL ? tl_tensor_record_fence(destination, &rare->fence, ret_error) : TL_OK;
    if (status == TL_OK) {
        op->receive.rare = rare;
    } else {
        free(rare);
    }
    return status;
}

enum tl_status tl_op_receive_init(struct tl_op *op, struct tl_peer *peer, const char *key, uint64_t step,
                                  const struct tl_recv_options *options, struct tl_error *ret_error)
{
    struct tl_peer_request *request = &op->receive.request;
    enum tl_status status = check_options(key, options, ret_error);
    if (status != TL_OK) return status;
    tl_peer_request_init(request, &request_ops);
    request->peer = peer;
    request->fetch.key = key;
    request->fetch.step = step;
    op->kind = TL_OP_RECV;
    op->state = OP_NEW;
    status = add_rare(op, options, ret_error);
    if (status != TL_OK) return status;
    if (options->part != NULL && options->part->destination_start != NULL) {
        status = op_place_in_box(op, options->destination, options->part, ret_error);
    } else if (options->destination != NULL) {
        op->tensor = tl_tensor_get(options->destination);
    }
    tl_peer_retain(peer);
    if (status != TL_OK) {
        tl_op_receive_fini(op);
        return status;
    }
    request->fetch.wants_checksum = op_worker(op)->settings.checksum || options->wants_checksum;
    request->fetch.may_map = options->may_map;
    request->fetch.is_for_device = is_for_device(op);
    return TL_OK;
}

void tl_op_receive_fini(struct tl_op *op)
{
    struct op_receive_rare *rare = op->receive.rare;
    tl_peer_release(op->receive.request.peer);
    if (rare != NULL) {
        op_drop_allocation(rare);
        tl_device_fence_put(rare->fence);
        tl_tensor_put(rare->whole);
        free(rare);
        op->receive.rare = NULL;
    }
    if (op->has_arrived) return;
    tl_tensor_put(op->tensor);
    op->tensor = NULL;
    tl_fetch_fini(&op->receive.request.fetch);
}
