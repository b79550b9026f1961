// SPDX-License-Identifier: Apache-2.0
/*
 * Receives. One from this worker itself is a receiver in the table, which borrows the memory of the send
 * (server/borrow.h); one from a peer is a fetch, started again with the same request number when its connection breaks.
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
#include "server/transfers/borrow.h"
#include "server/transfers/operation_internal.h"

#define MAX_RETRY_NS (1 * TL_NS_PER_SEC)

static const struct tl_error out_of_memory = {.code = TL_RESOURCE_EXHAUSTED, .message = "no memory"};

static enum tl_status check_destination(const struct tl_op *op, const struct tl_meta_data *meta_data,
                                        struct tl_error *ret_error)
{
    const struct tl_meta_data *wanted = tl_tensor_meta_data(op->destination);
    if (!meta_data->is_dead && meta_data->dtype != TL_STRING && tl_meta_data_is_equal(wanted, meta_data)) return TL_OK;
    char wanted_shape[TL_SHAPE_TEXT_BYTES];
    char shape[TL_SHAPE_TEXT_BYTES];
    tl_shape_format(&wanted->shape, wanted_shape, sizeof(wanted_shape));
    tl_shape_format(&meta_data->shape, shape, sizeof(shape));
    return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                        "%s of %s is %s%s %s and does not fit the destination, which is %s %s", op->key,
                        tl_peer_name(op->peer), meta_data->is_dead ? "dead, " : "", tl_dtype_name(meta_data->dtype),
                        shape, tl_dtype_name(wanted->dtype), wanted_shape);
}

static enum tl_status fetch_place(struct tl_fetch *fetch, const struct tl_meta_data *meta_data,
                                  struct tl_tensor **ret_destination, struct tl_error *ret_error)
{
    struct tl_op *op = TL_CONTAINER_OF(fetch, struct tl_op, request.fetch);
    enum tl_status status;
    if (op->destination == NULL) {
        const struct tl_allocator *allocator = fetch->allocator;
        status = allocator != NULL ? allocator->create(allocator->context, meta_data, ret_destination, ret_error)
                                   : tl_tensor_create_for(meta_data, ret_destination, ret_error);
        if (status != TL_OK) tl_error_prefix(ret_error, "tensor '%s': ", op->key);
        return status;
    }
    status = check_destination(op, meta_data, ret_error);
    if (status == TL_OK) *ret_destination = tl_tensor_get(op->destination);
    return status;
}

/* Why this path and not a faster one. */
static const char *reason_of(const struct tl_op *op, enum tl_path path)
{
    bool is_on_link = op->request.path_reason != NULL && op->request.path_reason[0] != '\0';
    switch (path) {
    case TL_PATH_GRPC:
        return is_on_link ? op->request.path_reason : "";
    case TL_PATH_SERIALIZED:
        return is_on_link ? op->request.path_reason : "strings travel serialized";
    case TL_PATH_ZERO_COPY:
        return op->may_map ? op->request.fetch.path_reason : "";
    case TL_PATH_BOUNCE:
        return op->request.fetch.path_reason;
    default:
        return "";
    }
}

static void recv_succeed(struct tl_op *op, struct tl_tensor *tensor, uint64_t step, enum tl_path path)
{
    op->tensor = tensor;
    op->bytes = tl_tensor_size_bytes(tensor);
    op->result_step = step;
    op->path = op->bytes == 0 ? TL_PATH_NONE : path;
    op->path_reason = reason_of(op, op->path);
    tl_op_complete(op);
}

/* Its error is set: the value that may be kept for it is somebody else's. */
static void recv_fail(struct tl_op *op)
{
    tl_peer_give_up(&op->request);
    tl_op_complete(op);
}

void tl_op_receive_fail(struct tl_op *op, const struct tl_error *error)
{
    tl_op_set_error(op, error);
    recv_fail(op);
}

static void recv_retry_later(struct tl_op *op)
{
    op->state = OP_RETRYING;
    op->worker->requests_retried++;
    int64_t due_ns = tl_clock_now_ns() + op->retry_pause_ns;
    op->retry_pause_ns = op->retry_pause_ns * 2 < MAX_RETRY_NS ? op->retry_pause_ns * 2 : MAX_RETRY_NS;
    if (tl_timers_arm(tl_loop_timers(op->worker->loop), &op->retry_timer, due_ns) != TL_OK) {
        tl_op_receive_fail(op, &out_of_memory);
    }
}

static void fetch_done(struct tl_fetch *fetch, const struct tl_error *result)
{
    struct tl_op *op = TL_CONTAINER_OF(fetch, struct tl_op, request.fetch);
    tl_peer_fetch_done(&op->request);
    /* What has arrived all the same is delivered: its sender has been told so. */
    if (op->state == OP_CANCELLING && result->code != TL_OK) {
        if (result->code == TL_RESOURCE_EXHAUSTED) tl_op_explain_error(op, result);
        recv_fail(op);
        return;
    }
    bool may_go_on = result->code == TL_UNAVAILABLE && !fetch->is_final && !op->worker->is_closing;
    if (may_go_on && fetch->is_rerouted) {
        tl_peer_fetch_on_link(op->peer, &op->request, fetch->path_reason);
        return;
    }
    if (may_go_on) {
        recv_retry_later(op);
        return;
    }
    if (result->code != TL_OK) {
        tl_op_receive_fail(op, result);
        return;
    }
    struct tl_tensor *tensor = fetch->destination;
    fetch->destination = NULL;
    tl_op_drop_error(op);
    op->is_verified = fetch->is_verified;
    recv_succeed(op, tensor, fetch->offer_step, fetch->path);
}

static const struct tl_fetch_ops fetch_ops = {.place = fetch_place, .done = fetch_done};

static void retry(struct tl_timer *timer)
{
    struct tl_op *op = TL_CONTAINER_OF(timer, struct tl_op, retry_timer);
    op->state = OP_RUNNING;
    tl_peer_fetch(op->peer, &op->request);
}

/* Puts the caller's destination, with a copy of the bytes, in the place of the value. */
static enum tl_status self_copy(struct tl_op *op, struct tl_tensor **tensor, struct tl_error *ret_error)
{
    struct tl_tensor *source = *tensor;
    enum tl_status status = check_destination(op, tl_tensor_meta_data(source), ret_error);
    size_t size_bytes = (size_t)tl_tensor_size_bytes(source);
    if (status == TL_OK) status = tl_tensor_check_readable(source, 0, size_bytes, ret_error);
    if (status != TL_OK) return status;
    if (size_bytes > 0) memcpy(tl_tensor_data(op->destination), tl_tensor_data(source), size_bytes);
    /* Again: a file that is cut meanwhile is read as zeros. */
    status = tl_tensor_check_readable(source, 0, size_bytes, ret_error);
    if (status != TL_OK) return status;
    *tensor = tl_tensor_get(op->destination);
    tl_tensor_put(source);
    return TL_OK;
}

/* Puts a borrow of the sender's memory in the place of the value. */
static enum tl_status self_borrow(struct tl_worker *worker, struct tl_sender *sender, struct tl_tensor **tensor,
                                  struct tl_error *ret_error)
{
    struct tl_op *send = TL_CONTAINER_OF(sender, struct tl_op, sender);
    struct tl_tensor *alias = *tensor;
    enum tl_status status =
        tl_borrow_create(worker, send->base, tl_op_borrow_returned, send, &send->borrow, tensor, ret_error);
    if (status == TL_OK) tl_tensor_put(alias);
    return status;
}

/* A value that was matched but taken back before it was looked at: it is asked for again. */
static void self_receive(struct tl_op *op);

/* A value of this worker itself: handed on by reference, or copied into the caller's destination. */
static void self_succeed(struct tl_op *op, const struct tl_offer *offer)
{
    struct tl_rendezvous *table = op->worker->table;
    struct tl_request_id id = op->receiver.id;
    struct tl_tensor *tensor = offer->tensor;
    struct tl_error error;
    enum tl_status problem = TL_OK;
    if (op->destination != NULL) {
        problem = self_copy(op, &tensor, &error);
    } else if (offer->is_one_shot) {
        struct tl_sender *sender = tl_rendezvous_reserved_sender(table, &id);
        if (sender == NULL) {
            tl_tensor_put(tensor);
            self_receive(op);
            return;
        }
        problem = self_borrow(op->worker, sender, &tensor, &error);
    }
    if (problem != TL_OK) {
        tl_tensor_put(tensor);
        tl_rendezvous_release(table, &id);
        tl_op_receive_fail(op, &error);
        return;
    }
    op->is_verified = op->wants_checksum;
    recv_succeed(op, tensor, offer->step, TL_PATH_SELF);
    tl_rendezvous_acknowledge(table, &id);
}

static void self_answered(struct tl_op *op, const struct tl_error *status, const struct tl_offer *offer)
{
    if (op->state == OP_CANCELLING) {
        struct tl_request_id id = op->receiver.id;
        struct tl_rendezvous *table = op->worker->table;
        bool is_reserved = offer != NULL && offer->is_one_shot;
        if (offer != NULL) tl_tensor_put(offer->tensor);
        tl_op_complete(op);
        if (is_reserved) tl_rendezvous_release(table, &id);
    } else if (status->code != TL_OK) {
        tl_op_receive_fail(op, status);
    } else {
        self_succeed(op, offer);
    }
}

static void answer_came(struct tl_closure *closure)
{
    struct tl_op *op = TL_CONTAINER_OF(closure, struct tl_op, answer_closure);
    const struct tl_error *status = op->answer_status;
    op->answer_status = NULL;
    self_answered(op, tl_error_kept(status), status == NULL ? &op->answer_offer : NULL);
    tl_error_drop(status);
}

/* Thread: the loop's owner, or the reactor's. */
static void self_deliver(struct tl_receiver *receiver, const struct tl_error *status, const struct tl_offer *offer)
{
    struct tl_op *op = TL_CONTAINER_OF(receiver, struct tl_op, receiver);
    const struct tl_executor *executor = &op->worker->executor;
    if (tl_executor_is_here(executor)) {
        self_answered(op, status, offer);
        return;
    }
    op->answer_status = tl_error_keep(status);
    if (offer != NULL) op->answer_offer = *offer;
    executor->post(executor, &op->answer_closure);
}

static void self_receive(struct tl_op *op)
{
    op->receiver.deliver = self_deliver;
    tl_rendezvous_receive(op->worker->table, &op->receiver);
}

void tl_op_receive_start(struct tl_op *op)
{
    struct tl_worker *worker = op->worker;
    struct tl_request_id id = {.incarnation = worker->self.incarnation, .number = ++worker->next_request};
    struct tl_error error;
    op->state = OP_RUNNING;
    if (tl_peer_is_self(op->peer)) {
        op->receiver = (struct tl_receiver){.id = id, .key = op->key, .step = op->step};
        self_receive(op);
    } else if (tl_rendezvous_check_step(worker->table, op->step, &error) != TL_OK) {
        tl_op_receive_fail(op, &error);
    } else {
        op->request.fetch.id = id;
        op->request.fetch.key = op->key;
        op->request.fetch.step = op->step;
        op->request.fetch.wants_checksum = op->wants_checksum;
        op->request.fetch.may_map = op->may_map;
        tl_peer_fetch(op->peer, &op->request);
    }
}

bool tl_op_receive_end(struct tl_op *op, const struct tl_error *error)
{
    bool is_over = op->state == OP_RETRYING;
    if (op->state == OP_RUNNING && tl_peer_is_self(op->peer)) {
        is_over = tl_rendezvous_cancel(op->worker->table, &op->receiver);
    } else if (op->state == OP_RUNNING) {
        is_over = tl_peer_cancel(&op->request);
    } else if (!is_over) {
        return false;
    }
    if (is_over) {
        tl_op_receive_fail(op, error);
        return true;
    }
    tl_op_set_error(op, error);
    op->state = OP_CANCELLING;
    return true;
}

static enum tl_status read_options(const struct tl_recv_options *caller_options, struct tl_recv_options *ret_options,
                                   struct tl_error *ret_error)
{
    return tl_struct_read(ret_options, sizeof(*ret_options), TL_RECV_OPTIONS_FIRST_BYTES, caller_options,
                          "tl_recv_options", ret_error);
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
    struct tl_op *op;
    status = tl_op_create(worker, TL_OP_RECV, key, step, timeout_ns, &op, ret_error);
    if (status != TL_OK) return status;
    op->peer = from;
    op->destination = destination != NULL ? tl_tensor_get(destination) : NULL;
    op->wants_checksum = worker->settings.checksum || options.wants_checksum;
    op->may_map = options.may_map;
    op->retry_timer.fire = retry;
    op->answer_closure.run = answer_came;
    tl_fetch_init(&op->request.fetch, &fetch_ops);
    tl_list_init(&op->request.place);
    *ret_op = op;
    return TL_OK;
}

/* Undoes recv_create for an operation that was not submitted. */
void tl_op_receive_discard(struct tl_op *op)
{
    tl_tensor_put(op->destination);
    tl_fetch_fini(&op->request.fetch);
    tl_op_free(op);
}
