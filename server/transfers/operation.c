// SPDX-License-Identifier: Apache-2.0
/*
 * Operations: sends and receives of this process, from the call to their one completion.
 *
 * A send is a value in the rendezvous table (operation_send.c); a receive is a receiver there, or a fetch from a peer
 * (operation_receive.c).
 * A deadline, a cancel, an aborted or ended step and the close of the worker end an operation wherever it is; the first
 * of all these wins. Each kind has a table of its states, with its actions (operation_send.c, operation_receive.c).
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/struct_version.h"
#include "base/text.h"
#include "server/transfers/borrow.h"
#include "server/transfers/operation_internal.h"

const struct tl_error op_out_of_memory = {.code = TL_RESOURCE_EXHAUSTED, .message = "no memory"};

/* -------------------------------------------------------------------------------------------------- completing -- */

void tl_op_free(struct tl_op *op)
{
    tl_error_drop(op->result.error);
    free(op);
}

_Static_assert(sizeof(struct tl_completion) == TL_COMPLETION_BYTES, "arrays of completions have one stride");

static void op_take(struct tl_cq_item *item, struct tl_completion *ret_completion)
{
    struct tl_op *op = TL_CONTAINER_OF(item, struct tl_op, reader.item);
    const struct op_result *result = &op->result;
    memset(ret_completion, 0, offsetof(struct tl_completion, status));
    ret_completion->size_bytes = sizeof(*ret_completion);
    ret_completion->op = op->id;
    ret_completion->kind = op->kind;
    ret_completion->user_data = op->reader.user_data;
    ret_completion->status.code = TL_OK;
    ret_completion->status.message[0] = '\0';
    if (result->error != NULL) ret_completion->status = *result->error;
    ret_completion->tensor = result->tensor;
    ret_completion->step = result->step;
    ret_completion->path = result->path;
    ret_completion->path_reason = result->path_reason != NULL ? result->path_reason : "";
    ret_completion->bytes = result->bytes;
    ret_completion->duration_ns = result->duration_ns;
    ret_completion->is_verified = result->is_verified;
    memset(ret_completion->reserved, 0, sizeof(ret_completion->reserved));
    tl_op_free(op);
}

void tl_op_complete(struct tl_op *op, const struct tl_error *error)
{
    (void)error;
    struct tl_worker *worker = op->worker;
    op->result.duration_ns = tl_clock_now_ns() - op->submitted_ns;
    tl_timers_disarm(tl_loop_timers(worker->loop), &op->deadline_timer);
    tl_timers_disarm(tl_loop_timers(worker->loop), &op->receive.retry_timer);
    if (op->is_registered) HASH_DEL(worker->operations.ops, op);
    if (op->kind == TL_OP_RECV) tl_op_receive_fini(op);
    struct tl_cq *cq = op->reader.cq;
    struct tl_wait *wait = op->reader.wait;
    __atomic_fetch_sub(&worker->operations.open_ops, 1, __ATOMIC_RELEASE);
    if (cq != NULL) {
        tl_cq_push(cq, &op->reader.item, &worker->progress);
    } else {
        tl_wait_done(wait);
    }
}

void tl_op_handle(struct tl_op *op, enum op_event event, const struct tl_error *error)
{
    const struct op_transition *transition = &op->transitions[op->state][event];
    TL_CHECK(transition->next != OP_NEVER);
    op->state = transition->next;
    if (transition->action != NULL) transition->action(op, error);
}

/* ------------------------------------------------------------------------------------------------------ result -- */

void op_result_set_error(struct op_result *result, const struct tl_error *error)
{
    if (error->code == TL_OK || result->error != NULL) return;
    result->error = tl_error_keep(error);
}

void op_result_explain_error(struct op_result *result, const struct tl_error *why)
{
    struct tl_error error;
    tl_error_set(&error, result->error->code, "%s; %s", result->error->message, why->message);
    op_result_drop_error(result);
    result->error = tl_error_keep(&error);
}

void op_result_drop_error(struct op_result *result)
{
    tl_error_drop(result->error);
    result->error = NULL;
}

/* ------------------------------------------------------------------------------------------------------ ending -- */

/* Ends an operation that waits, with an error. Returns false when it is past that, and completes by itself. */
static bool op_end(struct tl_op *op, const struct tl_error *error)
{
    return op->kind == TL_OP_SEND ? tl_op_send_end(op, error) : tl_op_receive_end(op, error);
}

static void deadline_over(struct tl_timer *timer)
{
    struct tl_op *op = TL_CONTAINER_OF(timer, struct tl_op, deadline_timer);
    char waited[32];
    tl_text_format_duration(tl_clock_now_ns() - op->submitted_ns, waited, sizeof(waited));
    struct tl_error error;
    struct tl_device device;
    if (op->kind == TL_OP_SEND) {
        tl_error_set(&error, TL_DEADLINE_EXCEEDED, "%s of step %" PRIu64 " was not received within %s", op->key,
                     op->step, waited);
    } else if (tl_op_receive_finds_stream(op, &device)) {
        char where[TL_DEVICE_TEXT_BYTES];
        tl_error_set(&error, TL_DEADLINE_EXCEEDED,
                     "%s of step %" PRIu64 " waited for %s: a stream on %s has not done what comes before", op->key,
                     op->step, waited, tl_device_format(device, where));
    } else {
        char state[TL_ERROR_MESSAGE_BYTES];
        tl_peer_format_state(op->receive.peer, state, sizeof(state));
        tl_error_set(&error, TL_DEADLINE_EXCEEDED,
                     "%s of step %" PRIu64 " did not come from %s within %s; the peer is %.500s", op->key, op->step,
                     tl_peer_name(op->receive.peer), waited, state);
    }
    op_end(op, &error);
}

/* Ends the receives of a step, or all of them, that are being delivered, or that are not. */
static void fail_receives(struct tl_worker *worker, const uint64_t *step, bool is_delivering,
                          const struct tl_error *status)
{
    struct tl_op *op;
    struct tl_op *next;
    HASH_ITER(hh, worker->operations.ops, op, next)
    {
        bool is_meant = op->kind == TL_OP_RECV && (step == NULL || op->step == *step);
        if (is_meant && (op->state == OP_DELIVERING) == is_delivering) op_end(op, status);
    }
}

void tl_ops_fail_receives(struct tl_worker *worker, const uint64_t *step, const struct tl_error *status)
{
    /* The value of a delivery that ends is offered to the next receive, which must not end while it is looked at. */
    fail_receives(worker, step, false, status);
    fail_receives(worker, step, true, status);
}

/* -------------------------------------------------------------------------------------------------- submitting -- */

/* Makes the operation known by its id and watches its deadline. Returns false when there is no memory for that. */
static bool op_register(struct tl_op *op)
{
    struct tl_worker *worker = op->worker;
    op->is_registered = true;
#undef uthash_nonfatal_oom
#define uthash_nonfatal_oom(object) op->is_registered = false
    HASH_ADD(hh, worker->operations.ops, id, sizeof(op->id), op);
    return op->is_registered &&
           tl_timers_arm(tl_loop_timers(worker->loop), &op->deadline_timer, op->deadline_ns) == TL_OK;
}

static void op_start(struct tl_closure *closure)
{
    struct tl_op *op = TL_CONTAINER_OF(closure, struct tl_op, closure);
    if (!op_register(op)) {
        tl_op_handle(op, OP_EVENT_REFUSED, &op_out_of_memory);
    } else if (op->worker->closing.is_closing) {
        struct tl_error closing;
        tl_error_set(&closing, TL_CANCELLED, "the worker was closed");
        tl_op_handle(op, OP_EVENT_REFUSED, &closing);
    } else {
        tl_op_handle(op, OP_EVENT_START, NULL);
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

enum tl_status tl_op_create(struct tl_worker *worker, enum tl_op_kind kind,
                            const struct op_transition (*transitions)[OP_EVENTS], const char *key, uint64_t step,
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
    op->state = OP_NEW;
    op->transitions = transitions;
    op->step = step;
    op->closure.run = op_start;
    op->deadline_timer.fire = deadline_over;
    op->reader.item.take = op_take;
    op->submitted_ns = tl_clock_now_ns();
    if (timeout_ns == TL_TIMEOUT_DEFAULT) timeout_ns = worker->settings.request_timeout_ns;
    op->deadline_ns = tl_clock_deadline_ns(timeout_ns);
    *ret_op = op;
    return TL_OK;
}

static tl_op_id op_submit(struct tl_op *op)
{
    struct tl_worker *worker = op->worker;
    tl_op_id id = __atomic_add_fetch(&worker->operations.next_op, 1, __ATOMIC_RELAXED);
    op->id = id;
    __atomic_fetch_add(&worker->operations.open_ops, 1, __ATOMIC_RELAXED);
    if (op->reader.cq != NULL) {
        tl_progress_post(&worker->progress, &op->closure);
    } else {
        tl_loop_post(worker->loop, &op->closure);
    }
    return id;
}

/* ------------------------------------------------------------------------------------------------------ public -- */

enum tl_status tl_send(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor,
                       int64_t timeout_ns, struct tl_cq *cq, void *user_data, tl_op_id *ret_op,
                       struct tl_error *ret_error)
{
    enum tl_status status = tl_cq_attach(cq, &worker->progress, ret_error);
    if (status != TL_OK) return status;
    struct tl_op *op;
    status = tl_op_send_create(worker, key, step, tensor, timeout_ns, &op, ret_error);
    if (status != TL_OK) return status;
    op->reader.cq = cq;
    op->reader.user_data = user_data;
    tl_op_id id = op_submit(op);
    if (ret_op != NULL) *ret_op = id;
    return TL_OK;
}

enum tl_status tl_recv(struct tl_worker *worker, tl_peer_id peer, const char *key, uint64_t step,
                       const struct tl_recv_options *options, int64_t timeout_ns, struct tl_cq *cq, void *user_data,
                       tl_op_id *ret_op, struct tl_error *ret_error)
{
    struct tl_op *op;
    enum tl_status status = tl_op_receive_create(worker, peer, key, step, options, timeout_ns, &op, ret_error);
    if (status != TL_OK) return status;
    status = tl_cq_attach(cq, &worker->progress, ret_error);
    if (status != TL_OK) {
        tl_op_receive_discard(op);
        return status;
    }
    op->reader.cq = cq;
    op->reader.user_data = user_data;
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
    tl_wait_init(&wait, &worker->progress);
    op->reader.wait = &wait;
    op_submit(op);
    while (!tl_wait_for(&wait, TL_TIME_NEVER))
        continue;
    tl_wait_fini(&wait);
    tl_worker_leave(worker);
    op_take(&op->reader.item, ret_completion);
    return tl_error_copy(ret_error, &ret_completion->status);
}

enum tl_status tl_send_wait(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor,
                            int64_t timeout_ns, struct tl_error *ret_error)
{
    struct tl_op *op;
    enum tl_status status = tl_op_send_create(worker, key, step, tensor, timeout_ns, &op, ret_error);
    if (status != TL_OK) return status;
    struct tl_completion completion;
    return op_run(op, &completion, ret_error);
}

enum tl_status tl_recv_wait(struct tl_worker *worker, tl_peer_id peer, const char *key, uint64_t step,
                            const struct tl_recv_options *options, int64_t timeout_ns,
                            struct tl_completion *ret_completion, struct tl_error *ret_error)
{
    struct tl_op *op;
    enum tl_status status = tl_op_receive_create(worker, peer, key, step, options, timeout_ns, &op, ret_error);
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
    HASH_FIND(hh, command->worker->operations.ops, &cancel->op, sizeof(cancel->op), op);
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
