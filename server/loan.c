// SPDX-License-Identifier: Apache-2.0
/*
 * Loans. The thread that puts the tensor and the loop's owner may meet: whoever takes the loan out of LENT first
 * decides whether the loop is told.
 */
#include "server/loan.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/error.h"

enum loan_state {
    LENT,
    RETURNED, /* its letter is on the way to the loop, which frees it */
    FORGOTTEN /* the tensor's last reference frees it */
};

struct tl_loan {
    struct tl_worker *worker; /* not valid when forgotten */
    void (*returned)(void *context);
    void *context;
    atomic_int state; /* enum loan_state */
    struct tl_letter letter;
};

static void deliver(struct tl_letter *letter)
{
    struct tl_loan *loan = TL_CONTAINER_OF(letter, struct tl_loan, letter);
    loan->returned(loan->context);
    free(loan);
}

/* Takes the loan out of LENT; false when it is out already. */
static bool leave_lent(struct tl_loan *loan, enum loan_state state)
{
    int expected = LENT;
    return atomic_compare_exchange_strong(&loan->state, &expected, (int)state);
}

/* The last reference to the tensor is gone. Thread: any. */
static void tensor_released(void *data, void *context)
{
    (void)data;
    struct tl_loan *loan = context;
    if (!leave_lent(loan, RETURNED)) {
        free(loan);
        return;
    }
    struct tl_worker *worker = loan->worker;
    tl_worker_enter(worker);
    tl_driver_post(&worker->driver, &loan->letter);
    tl_worker_leave(worker);
}

enum tl_status tl_loan_create(struct tl_worker *worker, struct tl_tensor *base, void (*returned)(void *context),
                              void *context, struct tl_loan **ret_loan, struct tl_tensor **ret_tensor,
                              struct tl_error *ret_error)
{
    struct tl_loan *loan = calloc(1, sizeof(*loan));
    if (loan == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to lend a tensor");
    loan->worker = worker;
    loan->returned = returned;
    loan->context = context;
    loan->letter.deliver = deliver;
    atomic_init(&loan->state, LENT);
    enum tl_status status = tl_tensor_create_alias(base, tensor_released, loan, ret_tensor, ret_error);
    if (status == TL_OK) {
        *ret_loan = loan;
    } else {
        free(loan);
    }
    return status;
}

bool tl_loan_forget(struct tl_loan *loan)
{
    return leave_lent(loan, FORGOTTEN);
}
