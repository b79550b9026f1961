// SPDX-License-Identifier: Apache-2.0
/*
 * Borrows. The thread that puts the tensor and the loop's owner may meet: the first of the two that takes the borrow
 * out of LENT decides whether `returned` is called.
 */
#include "server/transfers/borrow.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/error.h"

enum borrow_state {
    LENT,
    RETURNED, /* its closure is on the way to the loop, which frees it */
    FORGOTTEN /* the tensor's last reference frees it */
};

struct tl_borrow {
    struct tl_worker *worker; /* not valid when forgotten */
    void (*returned)(void *context);
    void *context;
    atomic_int state; /* enum borrow_state */
    struct tl_closure closure;
};

static void deliver(struct tl_closure *closure)
{
    struct tl_borrow *borrow = TL_CONTAINER_OF(closure, struct tl_borrow, closure);
    borrow->returned(borrow->context);
    free(borrow);
}

/* Takes the borrow out of LENT. Returns false when it is out already. */
static bool leave_lent(struct tl_borrow *borrow, enum borrow_state state)
{
    int expected = LENT;
    return atomic_compare_exchange_strong(&borrow->state, &expected, (int)state);
}

/* The last reference to the tensor is gone. Thread: any. */
static void tensor_released(void *data, void *context)
{
    (void)data;
    struct tl_borrow *borrow = context;
    if (!leave_lent(borrow, RETURNED)) {
        free(borrow);
        return;
    }
    struct tl_worker *worker = borrow->worker;
    tl_worker_enter(worker);
    tl_progress_post(&worker->progress, &borrow->closure);
    tl_worker_leave(worker);
}

enum tl_status tl_borrow_create(struct tl_worker *worker, struct tl_tensor *base, void (*returned)(void *context),
                                void *context, struct tl_borrow **ret_borrow, struct tl_tensor **ret_tensor,
                                struct tl_error *ret_error)
{
    struct tl_borrow *borrow = calloc(1, sizeof(*borrow));
    if (borrow == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to lend a tensor");
    borrow->worker = worker;
    borrow->returned = returned;
    borrow->context = context;
    borrow->closure.run = deliver;
    atomic_init(&borrow->state, LENT);
    enum tl_status status = tl_tensor_create_alias(base, tensor_released, borrow, ret_tensor, ret_error);
    if (status == TL_OK) {
        *ret_borrow = borrow;
    } else {
        free(borrow);
    }
    return status;
}

bool tl_borrow_forget(struct tl_borrow *borrow)
{
    return leave_lent(borrow, FORGOTTEN);
}
