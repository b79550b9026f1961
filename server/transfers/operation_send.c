// SPDX-License-Identifier: Apache-2.0
/*
 * Sends. A send is a value in the rendezvous table, shown through an alias of the tensor: the alias tells when no
 * transport reads the memory any more, and only then the send completes.
 */

#include "base/check.h"
#include "base/error.h"
#include "server/transfers/borrow.h"
#include "server/transfers/operation_internal.h"

/* ----------------------------------------------------------------------------------------------------- actions -- */

static void maybe_free(struct tl_op *op)
{
    if (op->send.is_released && op->send.borrow == NULL) tl_op_handle(op, OP_EVENT_FREE, NULL);
}

static void over(struct tl_op *op, const struct tl_error *status)
{
    op_set_error(op, status);
    maybe_free(op);
}

static void put_alias(struct tl_op *op)
{
    struct tl_tensor *alias = op->send.alias;
    op->send.alias = NULL;
    tl_tensor_put(alias);
}

static void refuse(struct tl_op *op, const struct tl_error *reason)
{
    over(op, reason);
    put_alias(op);
}

static void put_into_table(struct tl_op *op, const struct tl_error *unused)
{
    (void)unused;
    struct worker_starting *starting = &op_worker(op)->operations.starting;
    starting->unsent[starting->unsent_count++] = op;
    if (starting->unsent_count == TL_UNSENT_COUNT) tl_ops_send(op_worker(op));
}

/* Each operation has its alias until the end of this, and so completes in a later round. */
void tl_ops_send(struct tl_worker *worker)
{
    struct worker_starting *starting = &worker->operations.starting;
    struct tl_op *ops[TL_UNSENT_COUNT];
    struct tl_rendezvous_value values[TL_UNSENT_COUNT];
    struct tl_error statuses[TL_UNSENT_COUNT];
    size_t count = starting->unsent_count;
    if (count == 0) return;
    starting->unsent_count = 0;
    for (size_t i = 0; i < count; i++) {
        ops[i] = starting->unsent[i];
        values[i] = (struct tl_rendezvous_value){.key = ops[i]->send.key,
                                                 .step = ops[i]->send.step,
                                                 .tensor = ops[i]->send.alias,
                                                 .sender = &ops[i]->send.sender};
    }
    tl_rendezvous_send_many(worker->table, values, count, statuses);
    for (size_t i = 0; i < count; i++) {
        if (statuses[i].code != TL_OK) tl_op_handle(ops[i], OP_EVENT_OVER, &statuses[i]);
        put_alias(ops[i]);
    }
}

static void released(struct tl_op *op, const struct tl_error *unused)
{
    (void)unused;
    op->send.is_released = true;
}

static void returned(struct tl_op *op, const struct tl_error *unused)
{
    (void)unused;
    op->send.borrow = NULL;
}

static void released_last(struct tl_op *op, const struct tl_error *unused)
{
    released(op, unused);
    maybe_free(op);
}

static void returned_last(struct tl_op *op, const struct tl_error *unused)
{
    returned(op, unused);
    maybe_free(op);
}

/* --------------------------------------------------------------------------------------------------- the table -- */

/* clang-format off */
const struct op_transition op_send_transitions[OP_STATES][OP_EVENTS] = {
    [OP_NEW] = {
        [OP_EVENT_START] = {OP_RUNNING, put_into_table},
        [OP_EVENT_REFUSED] = {OP_LINGERING, refuse},
    },
    [OP_RUNNING] = {
        [OP_EVENT_OVER] = {OP_LINGERING, over},
        [OP_EVENT_RELEASED] = {OP_RUNNING, released}, /* OVER is on its way from another thread */
        [OP_EVENT_RETURNED] = {OP_RUNNING, returned},
    },
    [OP_LINGERING] = {
        [OP_EVENT_RELEASED] = {OP_LINGERING, released_last},
        [OP_EVENT_RETURNED] = {OP_LINGERING, returned_last},
        [OP_EVENT_FREE] = {OP_COMPLETE, tl_op_complete},
    },
};
/* clang-format on */

/* --------------------------------------------------------------------------------------- where events are from -- */

static void over_came(struct tl_op *op)
{
    const struct tl_error *status = op->send.over_status;
    op->send.over_status = NULL;
    tl_op_handle(op, OP_EVENT_OVER, tl_error_kept(status));
    tl_error_drop(status);
}

static void signals_came(struct tl_closure *closure)
{
    struct tl_op *op = TL_CONTAINER_OF(closure, struct tl_op, send.closure);
    unsigned signals = __atomic_exchange_n(&op->send.signals, 0, __ATOMIC_ACQ_REL);
    if ((signals & SEND_SIGNAL_OVER) != 0) over_came(op);
    if ((signals & SEND_SIGNAL_RELEASED) != 0) tl_op_handle(op, OP_EVENT_RELEASED, NULL);
}

/* Both signals often follow each other: one closure takes them to the loop. Thread: any. */
static void send_signal(struct tl_op *op, uint8_t signal)
{
    const struct tl_executor *executor = &op_worker(op)->executor;
    bool is_under_way = __atomic_fetch_or(&op->send.signals, signal, __ATOMIC_ACQ_REL) != 0;
    if (!is_under_way) tl_executor_post(executor, &op->send.closure);
}

/* The last reference to the alias is gone. Thread: any. */
static void alias_released(void *data, void *context)
{
    (void)data;
    struct tl_op *op = context;
    struct tl_worker *worker = op_worker(op);
    if (op->send.is_discarded) return;
    tl_worker_enter(worker);
    send_signal(op, SEND_SIGNAL_RELEASED);
    tl_worker_leave(worker);
}

void tl_op_borrow_returned(void *context)
{
    tl_op_handle(context, OP_EVENT_RETURNED, NULL);
}

static void forget_borrow(struct tl_op *op)
{
    if (op->send.borrow != NULL && tl_borrow_forget(op->send.borrow)) tl_op_borrow_returned(op);
}

void tl_ops_forget_borrows(struct tl_worker *worker)
{
    struct tl_hash_table *calls = &worker->operations.calls;
    struct tl_hash_link *next;
    for (struct tl_hash_link *link = tl_hash_table_first(calls); link != NULL; link = next) {
        struct op_call *call = TL_CONTAINER_OF(link, struct op_call, hash);
        struct op_group *group = call->is_group ? op_group_of(call) : NULL;
        size_t count;
        struct tl_op *ops = op_call_ops(call, &count);
        next = tl_hash_table_after(calls, link);
        if (group != NULL) op_group_hold(group);
        for (size_t i = 0; i < count; i++) /* a call without a group may be gone after its only operation */
            if (ops[i].kind == TL_OP_SEND && ops[i].state != OP_COMPLETE) forget_borrow(&ops[i]);
        if (group != NULL) op_group_let_go(group);
    }
}

/* The value has left the table. Thread: the loop's owner, or the reactor's. */
static void sender_over(struct tl_sender *sender, const struct tl_error *status)
{
    struct tl_op *op = TL_CONTAINER_OF(sender, struct tl_op, send.sender);
    if (tl_executor_is_here(&op_worker(op)->executor)) {
        tl_op_handle(op, OP_EVENT_OVER, status);
        return;
    }
    op->send.over_status = tl_error_keep(status);
    send_signal(op, SEND_SIGNAL_OVER);
}

bool tl_op_send_end(struct tl_op *op, const struct tl_error *error)
{
    if (op->state != OP_RUNNING || !tl_rendezvous_unsend(op_worker(op)->table, &op->send.sender)) return false;
    tl_op_handle(op, OP_EVENT_OVER, error);
    return true;
}

enum tl_status tl_op_send_init(struct tl_op *op, void *alias_place, const char *key, uint64_t step,
                               struct tl_tensor *tensor, struct tl_error *ret_error)
{
    struct tl_device_fence *fence = NULL;
    enum tl_status status = tl_tensor_record_fence(tensor, &fence, ret_error);
    if (status != TL_OK) return status;
    op->send.alias = tl_tensor_create_alias_in(alias_place, tensor, alias_released, op);
    if (fence != NULL) tl_tensor_set_fence(op->send.alias, fence);
    op->kind = TL_OP_SEND;
    op->state = OP_NEW;
    op->send.key = key;
    op->send.step = step;
    op->send.bytes = tl_tensor_size_bytes(tensor);
    op->send.base = tensor;
    op->send.sender.over = sender_over;
    op->send.closure.run = signals_came;
    return TL_OK;
}

void tl_op_send_discard(struct tl_op *op)
{
    op->state = OP_COMPLETE;
    op->send.is_discarded = true;
    put_alias(op);
}
