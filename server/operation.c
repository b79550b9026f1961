// SPDX-License-Identifier: Apache-2.0
/*
 * Operations: sends and receives of this process, from the call to their one completion.
 *
 *      NEW --letter--> RUNNING --over--> LINGERING --memory free--> COMPLETE      a send
 *      NEW --letter--> RUNNING <--> RETRYING             --> COMPLETE             a receive
 *
 * A send is a value in the rendezvous table, shown through an alias of the tensor: the alias tells when no transport
 * reads the memory any more, and only then the send completes. A receive from this worker itself is a receiver in the
 * table, which borrows the memory of the send (server/loan.h); one from a peer is a fetch, started again with the same
 * request number when its connection breaks.
 * A deadline, a cancel, an aborted or ended step and the close of the worker end an operation wherever it is; the first
 * of all these wins.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/text.h"
#include "server/completion_queue.h"
#include "server/loan.h"
#include "server/worker_internal.h"

#define FIRST_RETRY_NS (10 * TL_NS_PER_MS)
#define MAX_RETRY_NS (1 * TL_NS_PER_SEC)

enum op_state {
    OP_NEW,       /* waits for the loop's owner to take the letter */
    OP_RUNNING,   /* waits for the table, the peer or the transport */
    OP_RETRYING,  /* receive: waits for the retry timer */
    OP_LINGERING, /* send: over, waits for the last reader of the memory */
    OP_COMPLETE,  /* waits for the reader of the completion */
};

struct tl_op {
    struct tl_worker *worker;
    tl_op_id id;
    enum tl_op_kind kind;
    enum op_state state;
    UT_hash_handle hh; /* in worker->ops */
    bool is_registered;
    struct tl_letter letter;
    struct tl_timer deadline_timer;
    struct tl_timer retry_timer;
    int64_t submitted_ns;
    int64_t deadline_ns;
    int64_t retry_pause_ns;
    uint64_t step;

    struct tl_cq *cq;     /* NULL: blocking form */
    struct tl_wait *wait; /* NULL: asynchronous form */
    void *user_data;
    struct tl_cq_item item;

    /* Send. */
    struct tl_sender sender;
    struct tl_tensor *alias; /* until it is in the table */
    struct tl_tensor *base;  /* the caller's; valid as long as the alias */
    struct tl_letter released_letter;
    bool is_released;     /* no transport reads the memory any more */
    struct tl_loan *loan; /* to a receiver of this worker; NULL: none */

    /* Receive. */
    struct tl_peer *peer;
    struct tl_peer_request request; /* from a peer */
    struct tl_receiver receiver;    /* from this worker */
    struct tl_tensor *destination;  /* the caller's, NULL: a new one */
    bool wants_checksum;

    /* Result. */
    struct tl_error *error; /* NULL: TL_OK */
    struct tl_tensor *tensor;
    uint64_t bytes;
    uint64_t result_step;
    enum tl_path path;
    bool is_verified;
    int64_t duration_ns;

    char key[]; /* NUL-terminated */
};

static const struct tl_error out_of_memory = {.code = TL_RESOURCE_EXHAUSTED, .message = "no memory"};

/* --------------------------------------------------------------------------------------------------- completing -- */

static void op_free(struct tl_op *op)
{
    if (op->error != &out_of_memory) free(op->error);
    free(op);
}

static void op_take(struct tl_cq_item *item, struct tl_completion *ret_completion)
{
    struct tl_op *op = TL_CONTAINER_OF(item, struct tl_op, item);
    memset(ret_completion, 0, offsetof(struct tl_completion, status));
    ret_completion->size_bytes = sizeof(*ret_completion);
    ret_completion->op = op->id;
    ret_completion->kind = op->kind;
    ret_completion->user_data = op->user_data;
    ret_completion->status.code = TL_OK;
    ret_completion->status.message[0] = '\0';
    if (op->error != NULL) ret_completion->status = *op->error;
    ret_completion->tensor = op->tensor;
    ret_completion->step = op->result_step;
    ret_completion->path = op->path;
    ret_completion->path_reason = op->path == TL_PATH_GRPC || op->path == TL_PATH_SERIALIZED
                                      ? "this version has no data plane other than gRPC"
                                      : "";
    ret_completion->bytes = op->bytes;
    ret_completion->duration_ns = op->duration_ns;
    ret_completion->is_verified = op->is_verified;
    op_free(op);
}

static void op_complete(struct tl_op *op)
{
    struct tl_worker *worker = op->worker;
    op->state = OP_COMPLETE;
    op->duration_ns = tl_clock_now_ns() - op->submitted_ns;
    tl_timers_disarm(tl_loop_timers(worker->loop), &op->deadline_timer);
    tl_timers_disarm(tl_loop_timers(worker->loop), &op->retry_timer);
    if (op->is_registered) HASH_DEL(worker->ops, op);
    tl_tensor_put(op->destination);
    if (op->kind == TL_OP_RECV) tl_fetch_fini(&op->request.fetch);
    struct tl_cq *cq = op->cq;
    struct tl_wait *wait = op->wait;
    __atomic_fetch_sub(&worker->open_ops, 1, __ATOMIC_RELEASE);
    if (cq != NULL) {
        tl_cq_push(cq, &op->item, &worker->driver);
    } else {
        tl_wait_done(wait);
    }
}

/* Sets the result; the first error wins. */
static void op_set_error(struct tl_op *op, const struct tl_error *error)
{
    if (error->code == TL_OK || op->error != NULL) return;
    op->error = malloc(sizeof(*op->error));
    if (op->error != NULL) {
        *op->error = *error;
    } else {
        op->error = (struct tl_error *)&out_of_memory;
    }
}

/* ------------------------------------------------------------------------------------------------------ sending -- */

static void send_maybe_complete(struct tl_op *op)
{
    if (op->state == OP_LINGERING && op->is_released && op->loan == NULL) op_complete(op);
}

static void send_released(struct tl_letter *letter)
{
    struct tl_op *op = TL_CONTAINER_OF(letter, struct tl_op, released_letter);
    op->is_released = true;
    send_maybe_complete(op);
}

/* The last reference to the alias is gone. Thread: any. */
static void alias_released(void *data, void *context)
{
    (void)data;
    struct tl_op *op = context;
    struct tl_worker *worker = op->worker;
    tl_worker_enter(worker);
    tl_driver_post(&worker->driver, &op->released_letter);
    tl_worker_leave(worker);
}

static void loan_returned(void *context)
{
    struct tl_op *op = context;
    op->loan = NULL;
    send_maybe_complete(op);
}

void tl_ops_forget_loans(struct tl_worker *worker)
{
    struct tl_op *op;
    struct tl_op *next;
    HASH_ITER(hh, worker->ops, op, next)
    {
        if (op->loan != NULL && tl_loan_forget(op->loan)) loan_returned(op);
    }
}

static void send_over(struct tl_sender *sender, const struct tl_error *status)
{
    struct tl_op *op = TL_CONTAINER_OF(sender, struct tl_op, sender);
    op_set_error(op, status);
    op->state = OP_LINGERING;
    send_maybe_complete(op);
}

static void send_start(struct tl_op *op, const struct tl_error *refusal)
{
    struct tl_tensor *alias = op->alias;
    op->alias = NULL;
    struct tl_error error;
    op->state = OP_RUNNING;
    if (refusal != NULL) {
        send_over(&op->sender, refusal);
    } else if (tl_rendezvous_send(op->worker->table, op->key, op->step, alias, &op->sender, &error) != TL_OK) {
        send_over(&op->sender, &error);
    }
    tl_tensor_put(alias);
}

/* ---------------------------------------------------------------------------------------------------- receiving -- */

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

static void recv_succeed(struct tl_op *op, struct tl_tensor *tensor, uint64_t step, enum tl_path path)
{
    op->tensor = tensor;
    op->bytes = tl_tensor_size_bytes(tensor);
    op->result_step = step;
    op->path = op->bytes == 0 ? TL_PATH_NONE : path;
    op_complete(op);
}

static void recv_fail(struct tl_op *op, const struct tl_error *error)
{
    op_set_error(op, error);
    op_complete(op);
}

static void recv_retry_later(struct tl_op *op)
{
    op->state = OP_RETRYING;
    op->worker->requests_retried++;
    int64_t due_ns = tl_clock_now_ns() + op->retry_pause_ns;
    op->retry_pause_ns = op->retry_pause_ns * 2 < MAX_RETRY_NS ? op->retry_pause_ns * 2 : MAX_RETRY_NS;
    if (tl_timers_arm(tl_loop_timers(op->worker->loop), &op->retry_timer, due_ns) != TL_OK) {
        recv_fail(op, &out_of_memory);
    }
}

static void fetch_done(struct tl_fetch *fetch, const struct tl_error *result)
{
    struct tl_op *op = TL_CONTAINER_OF(fetch, struct tl_op, request.fetch);
    tl_peer_fetch_done(&op->request);
    if (result->code == TL_UNAVAILABLE && !fetch->is_final && !op->worker->is_closing) {
        recv_retry_later(op);
        return;
    }
    if (result->code != TL_OK) {
        recv_fail(op, result);
        return;
    }
    struct tl_tensor *tensor = fetch->destination;
    fetch->destination = NULL;
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
    *tensor = tl_tensor_get(op->destination);
    tl_tensor_put(source);
    return TL_OK;
}

/* Puts a loan of the sender's memory in the place of the value that is reserved for the request. */
static enum tl_status self_borrow(struct tl_worker *worker, const struct tl_request_id *id, struct tl_tensor **tensor,
                                  struct tl_error *ret_error)
{
    struct tl_sender *sender = tl_rendezvous_reserved_sender(worker->table, id);
    TL_CHECK(sender != NULL);
    struct tl_op *send = TL_CONTAINER_OF(sender, struct tl_op, sender);
    struct tl_tensor *alias = *tensor;
    enum tl_status status = tl_loan_create(worker, send->base, loan_returned, send, &send->loan, tensor, ret_error);
    if (status == TL_OK) tl_tensor_put(alias);
    return status;
}

/* A value of this worker itself: handed on by reference, or copied into the caller's destination. */
static void self_deliver(struct tl_receiver *receiver, const struct tl_error *status, const struct tl_offer *offer)
{
    struct tl_op *op = TL_CONTAINER_OF(receiver, struct tl_op, receiver);
    struct tl_request_id id = op->receiver.id;
    if (status->code != TL_OK) {
        recv_fail(op, status);
        return;
    }
    struct tl_rendezvous *table = op->worker->table;
    struct tl_tensor *tensor = offer->tensor;
    struct tl_error error;
    enum tl_status problem = TL_OK;
    if (op->destination != NULL) {
        problem = self_copy(op, &tensor, &error);
    } else if (offer->is_one_shot) {
        problem = self_borrow(op->worker, &id, &tensor, &error);
    }
    if (problem != TL_OK) {
        tl_tensor_put(tensor);
        tl_rendezvous_release(table, &id);
        recv_fail(op, &error);
        return;
    }
    op->is_verified = op->wants_checksum;
    recv_succeed(op, tensor, offer->step, TL_PATH_SELF);
    tl_rendezvous_acknowledge(table, &id);
}

static void recv_start(struct tl_op *op)
{
    struct tl_worker *worker = op->worker;
    struct tl_request_id id = {.incarnation = worker->self.incarnation, .number = ++worker->next_request};
    struct tl_error error;
    op->state = OP_RUNNING;
    if (tl_peer_is_self(op->peer)) {
        op->receiver = (struct tl_receiver){.id = id, .key = op->key, .step = op->step, .deliver = self_deliver};
        tl_rendezvous_receive(worker->table, &op->receiver);
    } else if (tl_rendezvous_check_step(worker->table, op->step, &error) != TL_OK) {
        recv_fail(op, &error);
    } else {
        op->request.fetch.id = id;
        op->request.fetch.key = op->key;
        op->request.fetch.step = op->step;
        op->request.fetch.wants_checksum = op->wants_checksum;
        tl_peer_fetch(op->peer, &op->request);
    }
}

/* ------------------------------------------------------------------------------------------------------- ending -- */

/* Ends an operation that waits, with an error. False when it is past that: it will complete by itself. */
static bool op_end(struct tl_op *op, const struct tl_error *error)
{
    if (op->state == OP_LINGERING) return false;
    if (op->kind == TL_OP_SEND) {
        if (!tl_rendezvous_unsend(op->worker->table, &op->sender)) return false;
        send_over(&op->sender, error);
        return true;
    }
    if (op->state == OP_RUNNING && tl_peer_is_self(op->peer)) {
        if (!tl_rendezvous_cancel(op->worker->table, &op->receiver)) return false;
    } else if (op->state == OP_RUNNING) {
        tl_peer_cancel(&op->request);
    }
    recv_fail(op, error);
    return true;
}

static void deadline_over(struct tl_timer *timer)
{
    struct tl_op *op = TL_CONTAINER_OF(timer, struct tl_op, deadline_timer);
    char waited[32];
    tl_text_format_duration(tl_clock_now_ns() - op->submitted_ns, waited, sizeof(waited));
    struct tl_error error;
    if (op->kind == TL_OP_SEND) {
        tl_error_set(&error, TL_DEADLINE_EXCEEDED, "nobody received %s of step %" PRIu64 " within %s", op->key,
                     op->step, waited);
    } else {
        char state[TL_ERROR_MESSAGE_BYTES];
        tl_peer_format_state(op->peer, state, sizeof(state));
        tl_error_set(&error, TL_DEADLINE_EXCEEDED,
                     "%s of step %" PRIu64 " did not come from %s within %s; the peer is %.500s", op->key, op->step,
                     tl_peer_name(op->peer), waited, state);
    }
    op_end(op, &error);
}

void tl_ops_fail_receives(struct tl_worker *worker, const uint64_t *step, const struct tl_error *status)
{
    struct tl_op *op;
    struct tl_op *next;
    HASH_ITER(hh, worker->ops, op, next)
    {
        if (op->kind == TL_OP_RECV && (step == NULL || op->step == *step)) op_end(op, status);
    }
}

/* ---------------------------------------------------------------------------------------------------- submitting -- */

/* Makes the operation known by its id and watches its deadline. False when there is no memory for that. */
static bool op_register(struct tl_op *op)
{
    struct tl_worker *worker = op->worker;
    op->is_registered = true;
#undef uthash_nonfatal_oom
#define uthash_nonfatal_oom(object) op->is_registered = false
    HASH_ADD(hh, worker->ops, id, sizeof(op->id), op);
    return op->is_registered &&
           tl_timers_arm(tl_loop_timers(worker->loop), &op->deadline_timer, op->deadline_ns) == TL_OK;
}

static void op_start(struct tl_letter *letter)
{
    struct tl_op *op = TL_CONTAINER_OF(letter, struct tl_op, letter);
    const struct tl_error *refusal = NULL;
    struct tl_error closing;
    if (!op_register(op)) {
        refusal = &out_of_memory;
    } else if (op->worker->is_closing) {
        tl_error_set(&closing, TL_CANCELLED, "the worker was closed");
        refusal = &closing;
    }
    if (op->kind == TL_OP_SEND) {
        send_start(op, refusal);
    } else if (refusal != NULL) {
        recv_fail(op, refusal);
    } else {
        recv_start(op);
    }
}

static enum tl_status check_key(const char *key, struct tl_error *ret_error)
{
    size_t length = key != NULL ? strnlen(key, TL_MAX_KEY_BYTES + 1) : 0;
    if (length == 0) return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the key is empty");
    if (length > TL_MAX_KEY_BYTES) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the key %.40s... is longer than %d bytes", key,
                            TL_MAX_KEY_BYTES);
    }
    if (!tl_text_is_utf8(key, length)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the key is not UTF-8");
    }
    return TL_OK;
}

static enum tl_status op_create(struct tl_worker *worker, enum tl_op_kind kind, const char *key, uint64_t step,
                                int64_t timeout_ns, struct tl_op **ret_op, struct tl_error *ret_error)
{
    enum tl_status status = check_key(key, ret_error);
    if (status != TL_OK) return status;
    size_t key_bytes = strlen(key) + 1;
    struct tl_op *op = calloc(1, sizeof(*op) + key_bytes);
    if (op == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for an operation on %s", key);
    memcpy(op->key, key, key_bytes);
    op->worker = worker;
    op->kind = kind;
    op->step = step;
    op->letter.deliver = op_start;
    op->deadline_timer.fire = deadline_over;
    op->item.take = op_take;
    op->submitted_ns = tl_clock_now_ns();
    op->retry_pause_ns = FIRST_RETRY_NS;
    if (timeout_ns == TL_TIMEOUT_DEFAULT) timeout_ns = worker->settings.request_timeout_ns;
    op->deadline_ns = tl_clock_deadline_ns(timeout_ns);
    *ret_op = op;
    return TL_OK;
}

static enum tl_status send_create(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor,
                                  int64_t timeout_ns, struct tl_op **ret_op, struct tl_error *ret_error)
{
    struct tl_op *op;
    enum tl_status status = op_create(worker, TL_OP_SEND, key, step, timeout_ns, &op, ret_error);
    if (status != TL_OK) return status;
    op->sender.over = send_over;
    op->released_letter.deliver = send_released;
    op->bytes = tl_tensor_size_bytes(tensor);
    op->result_step = step;
    op->base = tensor;
    status = tl_tensor_create_alias(tensor, alias_released, op, &op->alias, ret_error);
    if (status != TL_OK) {
        op_free(op);
        return status;
    }
    *ret_op = op;
    return TL_OK;
}

static enum tl_status recv_create(struct tl_worker *worker, tl_peer_id peer, const char *key, uint64_t step,
                                  const struct tl_recv_options *options, int64_t timeout_ns, struct tl_op **ret_op,
                                  struct tl_error *ret_error)
{
    struct tl_peer *from = tl_peer_by_id(worker, peer);
    if (from == NULL) return tl_error_set(ret_error, TL_NOT_FOUND, "no such peer to receive %.64s from", key);
    if (options != NULL && options->size_bytes != sizeof(*options)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "size_bytes must be sizeof(struct tl_recv_options)");
    }
    struct tl_tensor *destination = options != NULL ? options->destination : NULL;
    if (destination != NULL && !tl_tensor_is_writable(destination)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the destination for %.64s is read-only", key);
    }
    struct tl_op *op;
    enum tl_status status = op_create(worker, TL_OP_RECV, key, step, timeout_ns, &op, ret_error);
    if (status != TL_OK) return status;
    op->peer = from;
    op->destination = destination != NULL ? tl_tensor_get(destination) : NULL;
    op->wants_checksum = worker->settings.checksum || (options != NULL && options->wants_checksum);
    op->retry_timer.fire = retry;
    tl_fetch_init(&op->request.fetch, &fetch_ops);
    tl_list_init(&op->request.place);
    *ret_op = op;
    return TL_OK;
}

static tl_op_id op_submit(struct tl_op *op)
{
    struct tl_worker *worker = op->worker;
    tl_op_id id = __atomic_add_fetch(&worker->next_op, 1, __ATOMIC_RELAXED);
    op->id = id;
    __atomic_fetch_add(&worker->open_ops, 1, __ATOMIC_RELAXED);
    if (op->cq != NULL) {
        tl_driver_post(&worker->driver, &op->letter);
    } else {
        tl_loop_post(worker->loop, &op->letter);
    }
    return id;
}

/* Undoes recv_create for an operation that was not submitted. */
static void recv_discard(struct tl_op *op)
{
    tl_tensor_put(op->destination);
    tl_fetch_fini(&op->request.fetch);
    op_free(op);
}

/* ------------------------------------------------------------------------------------------------------- public -- */

enum tl_status tl_send(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor,
                       int64_t timeout_ns, struct tl_cq *cq, void *user_data, tl_op_id *ret_op,
                       struct tl_error *ret_error)
{
    enum tl_status status = tl_cq_attach(cq, &worker->driver, ret_error);
    if (status != TL_OK) return status;
    struct tl_op *op;
    status = send_create(worker, key, step, tensor, timeout_ns, &op, ret_error);
    if (status != TL_OK) return status;
    op->cq = cq;
    op->user_data = user_data;
    tl_op_id id = op_submit(op);
    if (ret_op != NULL) *ret_op = id;
    return TL_OK;
}

enum tl_status tl_recv(struct tl_worker *worker, tl_peer_id peer, const char *key, uint64_t step,
                       const struct tl_recv_options *options, int64_t timeout_ns, struct tl_cq *cq, void *user_data,
                       tl_op_id *ret_op, struct tl_error *ret_error)
{
    struct tl_op *op;
    enum tl_status status = recv_create(worker, peer, key, step, options, timeout_ns, &op, ret_error);
    if (status != TL_OK) return status;
    status = tl_cq_attach(cq, &worker->driver, ret_error);
    if (status != TL_OK) {
        recv_discard(op);
        return status;
    }
    op->cq = cq;
    op->user_data = user_data;
    tl_op_id id = op_submit(op);
    if (ret_op != NULL) *ret_op = id;
    return TL_OK;
}

/* Submits and waits; the operation's deadline is the limit, so the wait has none. */
static enum tl_status op_run(struct tl_op *op, struct tl_completion *ret_completion, struct tl_error *ret_error)
{
    struct tl_worker *worker = op->worker;
    struct tl_wait wait;
    tl_worker_enter(worker);
    tl_wait_init(&wait, &worker->driver);
    op->wait = &wait;
    op_submit(op);
    while (!tl_wait_for(&wait, TL_TIME_NEVER))
        continue;
    tl_wait_fini(&wait);
    tl_worker_leave(worker);
    op_take(&op->item, ret_completion);
    return tl_error_copy(ret_error, &ret_completion->status);
}

enum tl_status tl_send_wait(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor,
                            int64_t timeout_ns, struct tl_error *ret_error)
{
    struct tl_op *op;
    enum tl_status status = send_create(worker, key, step, tensor, timeout_ns, &op, ret_error);
    if (status != TL_OK) return status;
    struct tl_completion completion;
    return op_run(op, &completion, ret_error);
}

enum tl_status tl_recv_wait(struct tl_worker *worker, tl_peer_id peer, const char *key, uint64_t step,
                            const struct tl_recv_options *options, int64_t timeout_ns,
                            struct tl_completion *ret_completion, struct tl_error *ret_error)
{
    struct tl_op *op;
    enum tl_status status = recv_create(worker, peer, key, step, options, timeout_ns, &op, ret_error);
    if (status != TL_OK) {
        *ret_completion = (struct tl_completion){.size_bytes = sizeof(*ret_completion), .kind = TL_OP_RECV};
        ret_completion->status.code = status;
        if (ret_error != NULL) ret_completion->status = *ret_error;
        return status;
    }
    return op_run(op, ret_completion, ret_error);
}

struct cancel_command {
    struct tl_command command;
    tl_op_id op;
    bool is_found;
};

static void run_cancel(struct tl_command *command)
{
    struct cancel_command *cancel = TL_CONTAINER_OF(command, struct cancel_command, command);
    struct tl_op *op;
    HASH_FIND(hh, command->worker->ops, &cancel->op, sizeof(cancel->op), op);
    if (op == NULL) return;
    struct tl_error error;
    tl_error_set(&error, TL_CANCELLED, "%s of %s was cancelled", op->kind == TL_OP_SEND ? "the send" : "the receive",
                 op->key);
    cancel->is_found = op_end(op, &error);
}

enum tl_status tl_cancel(struct tl_worker *worker, tl_op_id op)
{
    struct cancel_command cancel = {.op = op};
    tl_worker_run(worker, &cancel.command, run_cancel);
    return cancel.is_found ? TL_OK : TL_NOT_FOUND;
}

const char *tl_path_name(enum tl_path path)
{
    static const char *const names[] = {"none", "self", "grpc", "serialized", "zero-copy", "bounce"};
    return (size_t)path < TL_ARRAY_COUNT(names) ? names[path] : "none";
}
