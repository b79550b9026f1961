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
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/reason.h"
#include "base/struct_version.h"
#include "server/back_off.h"
#include "server/transfers/borrow.h"
#include "server/transfers/operation_internal.h"

static enum tl_status check_destination(const struct tl_op *op, const struct tl_meta_data *meta_data,
                                        struct tl_error *ret_error)
{
    const struct tl_meta_data *wanted = tl_tensor_meta_data(op->receive.destination);
    if (!meta_data->is_dead && meta_data->dtype != TL_STRING && tl_meta_data_is_equal(wanted, meta_data)) return TL_OK;
    char wanted_shape[TL_SHAPE_TEXT_BYTES];
    char shape[TL_SHAPE_TEXT_BYTES];
    tl_shape_format(&wanted->shape, wanted_shape, sizeof(wanted_shape));
    tl_shape_format(&meta_data->shape, shape, sizeof(shape));
    return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                        "%s of %s is %s%s %s and does not fit the destination, which is %s %s", op->key,
                        tl_peer_name(op->receive.peer), meta_data->is_dead ? "dead, " : "",
                        tl_dtype_name(meta_data->dtype), shape, tl_dtype_name(wanted->dtype), wanted_shape);
}

/* --------------------------------------------------------------------------------------------- the destination -- */

static void post_to_progress(void *loop, struct tl_closure *closure)
{
    tl_progress_post(loop, closure);
}

/* An allocation has ended. The fetch may have ended before it, to be started again. */
static void allocation_ended(void *context, struct tl_tensor *tensor, const struct tl_error *status)
{
    struct tl_op *op = context;
    struct op_receive *receive = &op->receive;
    struct tl_error error = *status;
    if (error.code != TL_OK) tl_error_prefix(&error, "tensor '%s': ", op->key);
    receive->allocation = NULL;
    receive->allocated = tensor;
    if (!receive->is_place_awaited) return;
    receive->is_place_awaited = false;
    receive->request.fetch.placed(&receive->request.fetch, &error);
}

static enum tl_status start_allocation(struct tl_op *op, const struct tl_meta_data *meta_data,
                                       struct tl_error *ret_error)
{
    const struct tl_allocation_options options = {.device = op->receive.device,
                                                  .meta_data = meta_data,
                                                  .post = post_to_progress,
                                                  .loop = &op->worker->progress,
                                                  .done = allocation_ended,
                                                  .context = op};
    op->receive.allocation = tl_allocation_start(&options);
    if (op->receive.allocation != NULL) return TL_OK;
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "tensor '%s': no memory for its allocation", op->key);
}

static void drop_allocation(struct op_receive *receive)
{
    tl_allocation_put(receive->allocation);
    receive->allocation = NULL;
    tl_tensor_put(receive->allocated);
    receive->allocated = NULL;
}

/* Finds the new tensor on a device, or leaves it for later. One that was allocated for a connection that broke is used
 * if it fits. */
static enum tl_status place_on_device(struct tl_op *op, const struct tl_meta_data *meta_data,
                                      struct tl_tensor **ret_destination, struct tl_error *ret_error)
{
    struct op_receive *receive = &op->receive;
    const struct tl_meta_data *former = receive->allocated != NULL    ? tl_tensor_meta_data(receive->allocated)
                                        : receive->allocation != NULL ? tl_allocation_meta_data(receive->allocation)
                                                                      : NULL;
    if (former != NULL && !tl_meta_data_is_equal(former, meta_data)) drop_allocation(receive);
    *ret_destination = receive->allocated;
    receive->allocated = NULL;
    if (*ret_destination != NULL) return TL_OK;
    enum tl_status status = receive->allocation != NULL ? TL_OK : start_allocation(op, meta_data, ret_error);
    receive->is_place_awaited = status == TL_OK;
    return status;
}

/* Where the destination lies for a value of this meta-data: dead tensors and strings are never on devices. */
static struct tl_device device_for(const struct tl_op *op, const struct tl_meta_data *meta_data)
{
    const struct op_receive *receive = &op->receive;
    if (receive->destination != NULL) return tl_tensor_device(receive->destination);
    if (meta_data->is_dead || meta_data->dtype == TL_STRING) return (struct tl_device){.kind = TL_DEVICE_HOST};
    return receive->device;
}

static enum tl_status fetch_place(struct tl_fetch *fetch, const struct tl_meta_data *meta_data,
                                  struct tl_tensor **ret_destination, struct tl_error *ret_error)
{
    struct tl_op *op = TL_CONTAINER_OF(fetch, struct tl_op, receive.request.fetch);
    struct tl_device device = device_for(op, meta_data);
    char where[TL_DEVICE_TEXT_BYTES];
    enum tl_status status;
    if (device.kind != TL_DEVICE_HOST && fetch->placed == NULL) {
        return tl_error_set(ret_error, TL_UNIMPLEMENTED, "%s cannot be received from %s into memory of %s", op->key,
                            tl_peer_name(op->receive.peer), tl_device_format(device, where));
    }
    if (op->receive.destination == NULL && device.kind != TL_DEVICE_HOST)
        return place_on_device(op, meta_data, ret_destination, ret_error);
    if (op->receive.destination == NULL) {
        const struct tl_allocator *allocator = fetch->allocator;
        status = allocator != NULL ? allocator->create(allocator->context, meta_data, ret_destination, ret_error)
                                   : tl_tensor_create_for(meta_data, ret_destination, ret_error);
        if (status != TL_OK) tl_error_prefix(ret_error, "tensor '%s': ", op->key);
        return status;
    }
    status = check_destination(op, meta_data, ret_error);
    if (status == TL_OK) *ret_destination = tl_tensor_get(op->receive.destination);
    return status;
}

/* Returns why the tensor has travelled on this path and not on a faster one. */
static const char *reason_of(const struct tl_op *op, enum tl_path path)
{
    bool is_on_link = op->receive.request.path_reason != NULL && op->receive.request.path_reason[0] != '\0';
    switch (path) {
    case TL_PATH_GRPC:
        return is_on_link ? op->receive.request.path_reason : "";
    case TL_PATH_SERIALIZED:
        return is_on_link ? op->receive.request.path_reason : "strings travel serialized";
    case TL_PATH_ZERO_COPY:
        return op->receive.may_map || op->worker->settings.protocol == TL_PROTOCOL_GRPC_GDR
                   ? op->receive.request.fetch.path_reason
                   : "";
    case TL_PATH_BOUNCE:
        return op->receive.request.fetch.path_reason;
    default:
        return "";
    }
}

/* Puts the caller's destination, with a copy of the bytes, in the place of the value. */
static enum tl_status self_copy(struct tl_op *op, struct tl_tensor **tensor, struct tl_error *ret_error)
{
    struct tl_tensor *source = *tensor;
    enum tl_status status = check_destination(op, tl_tensor_meta_data(source), ret_error);
    size_t size_bytes = (size_t)tl_tensor_size_bytes(source);
    if (status == TL_OK) status = tl_tensor_check_readable(source, 0, size_bytes, ret_error);
    if (status != TL_OK) return status;
    if (size_bytes > 0) memcpy(tl_tensor_data(op->receive.destination), tl_tensor_data(source), size_bytes);
    /* Checked again, because a file that is cut meanwhile is read as zeros. */
    status = tl_tensor_check_readable(source, 0, size_bytes, ret_error);
    if (status != TL_OK) return status;
    *tensor = tl_tensor_get(op->receive.destination);
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

/* Puts an alias in the place of a published value on a device: each receiver may set a stream of its own. */
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
    op_result_drop_error(&op->result);
    tl_op_complete(op, unused);
}

/* Completes with the first error. The peer may offer the value that it may keep for this receive to others again. */
static void fail(struct tl_op *op, const struct tl_error *error)
{
    op_result_set_error(&op->result, error);
    tl_peer_give_up(&op->receive.request);
    tl_op_complete(op, error);
}

/* A receive that ended while it waited for memory says so. */
static void fail_cancelled(struct tl_op *op, const struct tl_error *error)
{
    if (error->code == TL_RESOURCE_EXHAUSTED) op_result_explain_error(&op->result, error);
    fail(op, error);
}

static void set_error(struct tl_op *op, const struct tl_error *error)
{
    op_result_set_error(&op->result, error);
}

static void retry_later(struct tl_op *op, const struct tl_error *unused)
{
    (void)unused;
    struct op_receive *receive = &op->receive;
    op->worker->operations.requests_retried++;
    int64_t due_ns = tl_clock_now_ns() +
                     tl_back_off_ns(TL_RECEIVE_FIRST_BACK_OFF_NS, TL_RECEIVE_MAX_BACK_OFF_NS, receive->retry_count++);
    if (tl_timers_arm(tl_loop_timers(op->worker->loop), &receive->retry_timer, due_ns) != TL_OK) {
        tl_op_handle(op, OP_EVENT_FAILED, &op_out_of_memory);
    }
}

static void ask_again(struct tl_op *op, const struct tl_error *unused)
{
    (void)unused;
    tl_peer_fetch(op->receive.peer, &op->receive.request);
}

static void ask_on_link(struct tl_op *op, const struct tl_error *unused)
{
    (void)unused;
    tl_peer_fetch_on_link(op->receive.peer, &op->receive.request, op->receive.request.fetch.path_reason);
}

/* Completes with a tensor, which the result takes over. */
static void arrive(struct tl_op *op, struct tl_tensor *tensor, uint64_t step, enum tl_path path, bool is_verified)
{
    struct op_result *result = &op->result;
    result->tensor = tensor;
    result->bytes = tl_tensor_size_bytes(tensor);
    result->step = step;
    result->path = result->bytes == 0 ? TL_PATH_NONE : path;
    result->path_reason = reason_of(op, result->path);
    result->is_verified = is_verified;
    tl_op_handle(op, OP_EVENT_ARRIVED, NULL);
}

static void self_receive(struct tl_op *op);

static void ask_for_another(struct tl_op *op, const struct tl_error *unused)
{
    (void)unused;
    self_receive(op);
}

/* The value of this worker cannot be had after all; it is offered again. */
static void lose_offer(struct tl_op *op, const struct tl_error *error)
{
    struct tl_request_id id = op->receive.receiver.id;
    struct tl_rendezvous *table = op->worker->table;
    tl_tensor_put(op->receive.offer.tensor);
    tl_rendezvous_release(table, &id);
    tl_op_handle(op, OP_EVENT_FAILED, error);
}

/* Completes with a tensor in place of the value of this worker. */
static void arrive_from_self(struct tl_op *op, struct tl_tensor *tensor)
{
    struct tl_request_id id = op->receive.receiver.id;
    struct tl_rendezvous *table = op->worker->table;
    arrive(op, tensor, op->receive.offer.step, TL_PATH_SELF, op->receive.wants_checksum);
    tl_rendezvous_acknowledge(table, &id);
}

/* Completes with the value itself. */
static void take_by_reference(struct tl_op *op)
{
    struct tl_tensor *tensor = op->receive.offer.tensor;
    struct tl_error error;
    enum tl_status problem = TL_OK;
    if (op->receive.offer.is_one_shot) {
        struct tl_sender *sender = tl_rendezvous_reserved_sender(op->worker->table, &op->receive.receiver.id);
        if (sender == NULL) {
            /* The value was taken back before the receive looked at it, so the receive asks for another. */
            tl_tensor_put(tensor);
            tl_op_handle(op, OP_EVENT_TAKEN, NULL);
            return;
        }
        problem = self_borrow(op->worker, sender, &tensor, &error);
    } else if (tl_tensor_is_on_device(tensor)) {
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
    const struct tl_tensor *tensor = op->receive.offer.tensor;
    return tl_tensor_is_on_device(tensor) || device_for(op, tl_tensor_meta_data(tensor)).kind != TL_DEVICE_HOST;
}

/* Takes a value of this worker itself: by reference, or as a copy in the caller's destination. */
static void take_offer(struct tl_op *op, const struct tl_error *unused)
{
    (void)unused;
    struct tl_error error;
    struct tl_tensor *tensor = op->receive.offer.tensor;
    if (is_apart(op)) {
        tl_op_handle(op, OP_EVENT_APART, NULL);
    } else if (op->receive.destination == NULL) {
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
    struct tl_tensor *value = op->receive.offer.tensor;
    struct tl_error error = *status;
    op->receive.delivery = NULL;
    if (error.code != TL_OK) {
        tl_error_prefix(&error, "tensor '%s': ", op->key);
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
    struct op_receive *receive = &op->receive;
    const struct tl_meta_data *meta_data = tl_tensor_meta_data(receive->offer.tensor);
    const struct tl_delivery_options options = {.value = receive->offer.tensor,
                                                .destination = receive->destination,
                                                .device = device_for(op, meta_data),
                                                .post = post_to_progress,
                                                .loop = &op->worker->progress,
                                                .done = delivered,
                                                .context = op};
    struct tl_error error;
    if (receive->destination != NULL && check_destination(op, meta_data, &error) != TL_OK) {
        lose_offer(op, &error);
    } else if (!tl_delivery_start(&options, &receive->delivery)) {
        lose_offer(op, &op_out_of_memory);
    }
}

/* The stream of the destination has come far enough, or never will. */
static void stream_reached(void *context, struct tl_piece *piece, const struct tl_error *status)
{
    struct tl_op *op = context;
    op->receive.stream_wait = NULL;
    tl_op_handle(op, status->code == TL_OK ? OP_EVENT_REACHED : OP_EVENT_FAILED, status);
    tl_piece_put(piece);
}

static void wait_for_stream(struct tl_op *op, const struct tl_error *unused)
{
    (void)unused;
    struct op_receive *receive = &op->receive;
    const struct tl_piece_options options = {.tensor = receive->destination,
                                             .after = receive->fence,
                                             .post = post_to_progress,
                                             .loop = &op->worker->progress,
                                             .notify = stream_reached,
                                             .context = op};
    receive->stream_wait = tl_piece_read(&options);
    tl_device_fence_put(receive->fence);
    receive->fence = NULL;
    if (receive->stream_wait == NULL) tl_op_handle(op, OP_EVENT_FAILED, &op_out_of_memory);
}

/* The answer was on its way when the receive ended: its value is offered again. */
static void give_back_offer(struct tl_op *op, const struct tl_error *unused)
{
    struct tl_request_id id = op->receive.receiver.id;
    struct tl_rendezvous *table = op->worker->table;
    bool is_reserved = op->receive.offer.is_one_shot;
    tl_tensor_put(op->receive.offer.tensor);
    tl_op_complete(op, unused);
    if (is_reserved) tl_rendezvous_release(table, &id);
}

/* Why the receive must use the link, which alone reaches devices; NULL: it need not. */
static const char *link_reason(const struct tl_op *op)
{
    const struct op_receive *receive = &op->receive;
    struct tl_device device = receive->destination != NULL ? tl_tensor_device(receive->destination) : receive->device;
    char where[TL_DEVICE_TEXT_BYTES];
    char reason[TL_DEVICE_TEXT_BYTES + 32];
    if (device.kind == TL_DEVICE_HOST) return NULL;
    snprintf(reason, sizeof(reason), "the destination is on %s", tl_device_format(device, where));
    return tl_reason(reason);
}

static void start(struct tl_op *op, const struct tl_error *unused)
{
    (void)unused;
    struct tl_worker *worker = op->worker;
    struct op_receive *receive = &op->receive;
    struct tl_request_id id = {.incarnation = worker->self.incarnation};
    struct tl_error error;
    if (receive->fence != NULL) {
        tl_op_handle(op, OP_EVENT_FENCED, NULL);
        return;
    }
    id.number = ++worker->operations.next_request;
    if (tl_peer_is_self(receive->peer)) {
        receive->receiver = (struct tl_receiver){.id = id, .key = op->key, .step = op->step};
        self_receive(op);
    } else if (tl_rendezvous_check_step(worker->table, op->step, &error) != TL_OK) {
        tl_op_handle(op, OP_EVENT_FAILED, &error);
    } else {
        struct tl_fetch *fetch = &receive->request.fetch;
        fetch->id = id;
        fetch->key = op->key;
        fetch->step = op->step;
        fetch->wants_checksum = receive->wants_checksum;
        fetch->may_map = receive->may_map;
        receive->request.link_reason = link_reason(op);
        tl_peer_fetch(receive->peer, &receive->request);
    }
}

/* --------------------------------------------------------------------------------------------------- the table -- */

/* clang-format off */
static const struct op_transition receive_transitions[OP_STATES][OP_EVENTS] = {
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
        [OP_EVENT_FAILED] = {OP_COMPLETE, fail},
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
    bool may_go_on = result->code == TL_UNAVAILABLE && !fetch->is_final && !op->worker->closing.is_closing;
    tl_peer_fetch_done(&op->receive.request);
    op->receive.is_place_awaited = false;
    fetch->placed = NULL;
    if (result->code == TL_OK) {
        struct tl_tensor *tensor = fetch->destination;
        fetch->destination = NULL;
        arrive(op, tensor, fetch->offer_step, fetch->path, fetch->is_verified);
    } else if (may_go_on && fetch->is_rerouted) {
        tl_op_handle(op, OP_EVENT_REROUTED, result);
    } else {
        tl_op_handle(op, may_go_on ? OP_EVENT_BROKEN : OP_EVENT_FAILED, result);
    }
}

static const struct tl_fetch_ops fetch_ops = {.place = fetch_place, .done = fetch_done};

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
    struct tl_op *op = TL_CONTAINER_OF(closure, struct tl_op, receive.answer_closure);
    const struct tl_error *status = op->receive.answer_status;
    op->receive.answer_status = NULL;
    self_answered(op, tl_error_kept(status));
    tl_error_drop(status);
}

/* Thread: the loop's owner, or the reactor's. */
static void self_deliver(struct tl_receiver *receiver, const struct tl_error *status, const struct tl_offer *offer)
{
    struct tl_op *op = TL_CONTAINER_OF(receiver, struct tl_op, receive.receiver);
    const struct tl_executor *executor = &op->worker->executor;
    if (offer != NULL) op->receive.offer = *offer;
    if (tl_executor_is_here(executor)) {
        self_answered(op, status);
        return;
    }
    op->receive.answer_status = tl_error_keep(status);
    executor->post(executor, &op->receive.answer_closure);
}

static void self_receive(struct tl_op *op)
{
    op->receive.receiver.deliver = self_deliver;
    tl_rendezvous_receive(op->worker->table, &op->receive.receiver);
}

bool tl_op_receive_finds_stream(const struct tl_op *op, struct tl_device *ret_device)
{
    const struct op_receive *receive = &op->receive;
    if (op->state == OP_FENCED) {
        *ret_device = tl_tensor_device(receive->destination);
        return true;
    }
    if (op->state != OP_DELIVERING || !tl_delivery_is_fenced(receive->delivery)) return false;
    *ret_device = tl_tensor_device(receive->offer.tensor);
    return true;
}

bool tl_op_receive_end(struct tl_op *op, const struct tl_error *error)
{
    bool is_over = op->state == OP_RETRYING;
    if (op->state == OP_FENCED) {
        tl_piece_put(op->receive.stream_wait);
        op->receive.stream_wait = NULL;
        is_over = true;
    } else if (op->state == OP_DELIVERING) {
        if (tl_delivery_stop(op->receive.delivery)) {
            op->receive.delivery = NULL;
            lose_offer(op, error);
            return true;
        }
    } else if (op->state == OP_RUNNING && tl_peer_is_self(op->receive.peer)) {
        is_over = tl_rendezvous_cancel(op->worker->table, &op->receive.receiver);
    } else if (op->state == OP_RUNNING) {
        is_over = tl_peer_cancel(&op->receive.request);
    } else if (!is_over) {
        return false;
    }
    tl_op_handle(op, is_over ? OP_EVENT_FAILED : OP_EVENT_CANCEL, error);
    return true;
}

/* -------------------------------------------------------------------------------------------------------- life -- */

static enum tl_status read_options(const struct tl_recv_options *caller_options, struct tl_recv_options *ret_options,
                                   struct tl_error *ret_error)
{
    return tl_struct_read(ret_options, sizeof(*ret_options), TL_RECV_OPTIONS_FIRST_BYTES, caller_options,
                          "tl_recv_options", ret_error);
}

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

enum tl_status tl_op_receive_create(struct tl_worker *worker, tl_peer_id peer, const char *key, uint64_t step,
                                    const struct tl_recv_options *caller_options, int64_t timeout_ns,
                                    struct tl_op **ret_op, struct tl_error *ret_error)
{
    struct tl_recv_options options = {.size_bytes = sizeof(options)};
    struct tl_peer *from = tl_peer_by_id(worker, peer);
    if (from == NULL) return tl_error_set(ret_error, TL_NOT_FOUND, "no such peer to receive %.64s from", key);
    enum tl_status status = caller_options == NULL ? TL_OK : read_options(caller_options, &options, ret_error);
    if (status != TL_OK) return status;
    struct tl_tensor *destination = options.destination;
    if (destination != NULL && !tl_tensor_is_writable(destination)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the destination for %.64s is read-only", key);
    }
    if (destination != NULL && options.may_map) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%.64s cannot be mapped into a destination", key);
    }
    struct tl_device_fence *fence = NULL;
    status = check_device(key, &options, ret_error);
    if (status == TL_OK && destination != NULL) status = tl_tensor_record_fence(destination, &fence, ret_error);
    if (status != TL_OK) return status;
    struct tl_op *op;
    status = tl_op_create(worker, TL_OP_RECV, receive_transitions, key, step, timeout_ns, &op, ret_error);
    if (status != TL_OK) {
        tl_device_fence_put(fence);
        return status;
    }
    struct op_receive *receive = &op->receive;
    receive->fence = fence;
    receive->peer = from;
    receive->destination = destination != NULL ? tl_tensor_get(destination) : NULL;
    receive->wants_checksum = worker->settings.checksum || options.wants_checksum;
    receive->may_map = options.may_map;
    receive->device = options.device;
    receive->retry_timer.fire = retry;
    receive->answer_closure.run = answer_came;
    tl_fetch_init(&receive->request.fetch, &fetch_ops);
    tl_list_init(&receive->request.place);
    *ret_op = op;
    return TL_OK;
}

void tl_op_receive_fini(struct tl_op *op)
{
    drop_allocation(&op->receive);
    tl_device_fence_put(op->receive.fence);
    tl_tensor_put(op->receive.destination);
    tl_fetch_fini(&op->receive.request.fetch);
}

void tl_op_receive_discard(struct tl_op *op)
{
    tl_op_receive_fini(op);
    tl_op_free(op);
}
