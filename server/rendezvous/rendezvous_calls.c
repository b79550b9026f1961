// SPDX-License-Identifier: Apache-2.0
/*
 * The mutex of the rendezvous table, and the calls that run once it is free.
 *
 * A call is embedded in the value, waiter or publication that has left the table. Values and waiters come and go by the
 * thousand, so that the first of them are copied while the mutex is still held, and their memory is used again. When
 * more have left at once, as when a step ends, the others are freed as they run.
 *
 * A sender or receiver may be gone as soon as it was called, and so may the table.
 */
#include <stdlib.h>

#include "base/check.h"
#include "server/rendezvous/rendezvous_table.h"

/* So many calls are copied. */
#define MAX_TAKEN_CALLS 4

static const struct tl_error no_error = {.code = TL_OK};

/* A call without the value or waiter that it was embedded in. */
struct taken_call {
    struct tl_sender *sender;     /* NULL: it is the receiver's */
    struct tl_receiver *receiver; /* NULL: it is the sender's */
    const struct tl_error *status;
    struct tl_tensor *tensor; /* is put before the sender is called */
    struct tl_offer offer;    /* for the receiver */
};

/* ------------------------------------------------------------------------------------------------------ freeing -- */

static void run_over(struct tl_table_deferred_call *deferred_call)
{
    struct tl_table_value *value = TL_CONTAINER_OF(deferred_call, struct tl_table_value, deferred_call);
    struct tl_sender *sender = value->sender;
    const struct tl_error *status = value->status;
    tl_tensor_put(value->tensor);
    free(value);
    sender->over(sender, status);
}

static void run_deliver(struct tl_table_deferred_call *deferred_call)
{
    struct tl_table_waiter *waiter = TL_CONTAINER_OF(deferred_call, struct tl_table_waiter, deferred_call);
    struct tl_receiver *receiver = waiter->receiver;
    const struct tl_error *status = waiter->status;
    const struct tl_offer offer = waiter->offer;
    free(waiter);
    receiver->deliver(receiver, status, status->code == TL_OK ? &offer : NULL);
}

static void run_put(struct tl_table_deferred_call *deferred_call)
{
    struct tl_table_publication *publication =
        TL_CONTAINER_OF(deferred_call, struct tl_table_publication, deferred_call);
    tl_tensor_put(publication->tensor);
    free(publication);
}

static void defer_call(struct tl_list *deferred_calls, struct tl_table_deferred_call *deferred_call,
                       void (*run)(struct tl_table_deferred_call *deferred_call))
{
    deferred_call->run = run;
    tl_list_push_back(deferred_calls, &deferred_call->link);
}

void tl_table_defer_over(struct tl_list *deferred_calls, struct tl_table_value *value, const struct tl_error *status)
{
    value->status = status ? status : &no_error;
    defer_call(deferred_calls, &value->deferred_call, run_over);
}

void tl_table_defer_deliver(struct tl_list *deferred_calls, struct tl_table_waiter *waiter,
                            const struct tl_error *status)
{
    waiter->status = status ? status : &no_error;
    defer_call(deferred_calls, &waiter->deferred_call, run_deliver);
}

void tl_table_defer_put(struct tl_list *deferred_calls, struct tl_table_publication *publication)
{
    defer_call(deferred_calls, &publication->deferred_call, run_put);
}

/* ------------------------------------------------------------------------------------------------------- taking -- */

/* Takes a deferred call out of its value or waiter, whose memory may be used again. Returns false when it is in
 * neither. */
static bool take_call(struct tl_rendezvous *table, struct tl_table_deferred_call *call, struct taken_call *ret_taken)
{
    if (call->run == run_over) {
        struct tl_table_value *value = TL_CONTAINER_OF(call, struct tl_table_value, deferred_call);
        ret_taken->sender = value->sender;
        ret_taken->status = value->status;
        ret_taken->tensor = value->tensor;
        tl_list_remove(&call->link);
        tl_spares_put(&table->spare_values, value);
        return true;
    }
    if (call->run != run_deliver) return false;
    struct tl_table_waiter *waiter = TL_CONTAINER_OF(call, struct tl_table_waiter, deferred_call);
    ret_taken->sender = NULL;
    ret_taken->receiver = waiter->receiver;
    ret_taken->status = waiter->status;
    ret_taken->offer = waiter->offer;
    tl_list_remove(&call->link);
    tl_spares_put(&table->spare_waiters, waiter);
    return true;
}

static void run_taken(const struct taken_call *call)
{
    if (call->sender != NULL) {
        tl_tensor_put(call->tensor);
        call->sender->over(call->sender, call->status);
    } else {
        call->receiver->deliver(call->receiver, call->status, call->status->code == TL_OK ? &call->offer : NULL);
    }
}

/* --------------------------------------------------------------------------------------------------------- mutex -- */

void tl_table_lock(struct tl_rendezvous *table)
{
    TL_CHECK(pthread_mutex_lock(&table->mutex) == 0);
}

void tl_table_unlock(struct tl_rendezvous *table)
{
    TL_CHECK(pthread_mutex_unlock(&table->mutex) == 0);
}

void tl_table_unlock_and_run(struct tl_rendezvous *table, struct tl_list *deferred_calls)
{
    struct taken_call taken[MAX_TAKEN_CALLS];
    size_t count = 0;
    while (count < MAX_TAKEN_CALLS && !tl_list_is_empty(deferred_calls) &&
           take_call(table, TL_CONTAINER_OF(deferred_calls->next, struct tl_table_deferred_call, link), &taken[count]))
        count++;
    tl_table_unlock(table);
    for (size_t i = 0; i < count; i++)
        run_taken(&taken[i]);
    for (struct tl_list *link; (link = tl_list_pop_front(deferred_calls));) {
        struct tl_table_deferred_call *deferred_call = TL_CONTAINER_OF(link, struct tl_table_deferred_call, link);
        deferred_call->run(deferred_call);
    }
}
