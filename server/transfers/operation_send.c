// SPDX-License-Identifier: Apache-2.0
/*
 * Sends. A send is a value in the rendezvous table, shown through an alias of the tensor: the alias tells when no
 * transport reads the memory any more, and only then the send completes.
 */
#include <stdlib.h>

#include "base/check.h"
#include "base/error.h"
#include "server/transfers/borrow.h"
#include "server/transfers/operation_internal.h"

static void send_maybe_complete(struct tl_op *op)
{
    if (op->state == OP_LINGERING && op->is_released && op->borrow == NULL) tl_op_complete(op);
}

static void send_released(struct tl_closure *closure)
{
    struct tl_op *op = TL_CONTAINER_OF(closure, struct tl_op, released_closure);
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
    tl_progress_post(&worker->progress, &op->released_closure);
    tl_worker_leave(worker);
}

void tl_op_borrow_returned(void *context)
{
    struct tl_op *op = context;
    op->borrow = NULL;
    send_maybe_complete(op);
}

void tl_ops_forget_borrows(struct tl_worker *worker)
{
    struct tl_op *op;
    struct tl_op *next;
    HASH_ITER(hh, worker->ops, op, next)
    {
        if (op->borrow != NULL && tl_borrow_forget(op->borrow)) tl_op_borrow_returned(op);
    }
}

static void over(struct tl_op *op, const struct tl_error *status)
{
    tl_op_set_error(op, status);
    op->state = OP_LINGERING;
    send_maybe_complete(op);
}

static void over_came(struct tl_closure *closure)
{
    struct tl_op *op = TL_CONTAINER_OF(closure, struct tl_op, over_closure);
    const struct tl_error *status = op->over_status;
    op->over_status = NULL;
    over(op, tl_error_kept(status));
    tl_error_drop(status);
}

/* The value has left the table. Thread: the loop's owner, or the reactor's. */
static void send_over(struct tl_sender *sender, const struct tl_error *status)
{
    struct tl_op *op = TL_CONTAINER_OF(sender, struct tl_op, sender);
    const struct tl_executor *executor = &op->worker->executor;
    if (tl_executor_is_here(executor)) {
        over(op, status);
        return;
    }
    op->over_status = tl_error_keep(status);
    executor->post(executor, &op->over_closure);
}

void tl_op_send_start(struct tl_op *op, const struct tl_error *refusal)
{
    struct tl_tensor *alias = op->alias;
    op->alias = NULL;
    struct tl_error error;
    op->state = OP_RUNNING;
    if (refusal != NULL) {
        over(op, refusal);
    } else if (tl_rendezvous_send(op->worker->table, op->key, op->step, alias, &op->sender, &error) != TL_OK) {
        over(op, &error);
    }
    tl_tensor_put(alias);
}

bool tl_op_send_end(struct tl_op *op, const struct tl_error *error)
{
    if (op->state == OP_LINGERING || !tl_rendezvous_unsend(op->worker->table, &op->sender)) return false;
    over(op, error);
    return true;
}

enum tl_status tl_op_send_create(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor,
                                 int64_t timeout_ns, struct tl_op **ret_op, struct tl_error *ret_error)
{
    struct tl_op *op;
    enum tl_status status = tl_op_create(worker, TL_OP_SEND, key, step, timeout_ns, &op, ret_error);
    if (status != TL_OK) return status;
    op->sender.over = send_over;
    op->released_closure.run = send_released;
    op->over_closure.run = over_came;
    op->bytes = tl_tensor_size_bytes(tensor);
    op->result_step = step;
    op->base = tensor;
    status = tl_tensor_create_alias(tensor, alias_released, op, &op->alias, ret_error);
    if (status != TL_OK) {
        tl_op_free(op);
        return status;
    }
    *ret_op = op;
    return TL_OK;
}
