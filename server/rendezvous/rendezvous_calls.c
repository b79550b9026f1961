// SPDX-License-Identifier: Apache-2.0
/*
 * The mutex of the rendezvous table, and the calls that run once it is free.
 *
 * A call is embedded in the value, receiver or publication that has left the table. Values come and go by the thousand,
 * so that the first calls to senders are copied while the mutex is still held, and the memory of their values is used
 * again. When more have left at once, as when a step ends, the others are freed as they run.
 *
 * A sender or receiver may be gone as soon as it was called, and so may the table.
 */
#include <stdlib.h>

#include "base/check.h"
#include "server/rendezvous/rendezvous_table.h"

/* So many calls are copied. */
#define MAX_TAKEN_CALLS 16

static const struct tl_error no_error = {.code = TL_OK};

/* A call to a sender, without the value that it was embedded in. */
struct taken_call {
    struct tl_sender *sender;
    const struct tl_error *status;
    struct tl_tensor *tensor; /* is put before the sender is called */
};

/* ------------------------------------------------------------------------------------------------------ freeing -- */

static void run_over(struct tl_closure *closure)
{
    struct tl_table_value *value = TL_CONTAINER_OF(closure, struct tl_table_value, closure);
    struct tl_sender *sender = value->sender;
    const struct tl_error *status = value->status;
    tl_tensor_put(value->tensor);
    free(value);
    sender->over(sender, status);
}

static void run_deliver(struct tl_closure *closure)
{
    struct tl_receiver *receiver = TL_CONTAINER_OF(closure, struct tl_receiver, answer.closure);
    const struct tl_error *status = receiver->answer.status;
    const struct tl_offer offer = receiver->answer.offer; /* whose memory the callee may use for something else */
    receiver->deliver(receiver, status, status->code == TL_OK ? &offer : NULL);
}

static void run_put(struct tl_closure *closure)
{
    struct tl_table_publication *publication = TL_CONTAINER_OF(closure, struct tl_table_publication, closure);
    tl_tensor_put(publication->tensor);
    free(publication);
}

static void defer_call(struct tl_list *deferred_calls, struct tl_closure *closure,
                       void (*run)(struct tl_closure *closure))
{
    closure->run = run;
    tl_list_push_back(deferred_calls, &closure->link);
}

void tl_table_defer_over(struct tl_list *deferred_calls, struct tl_table_value *value, const struct tl_error *status)
{
    value->status = status ? status : &no_error;
    defer_call(deferred_calls, &value->closure, run_over);
}

void tl_table_defer_deliver(struct tl_list *deferred_calls, struct tl_receiver *receiver, const struct tl_error *status,
                            const struct tl_offer *offer)
{
    receiver->answer.status = status ? status : &no_error;
    if (status == NULL) receiver->answer.offer = *offer;
    defer_call(deferred_calls, &receiver->answer.closure, run_deliver);
}

void tl_table_defer_put(struct tl_list *deferred_calls, struct tl_table_publication *publication)
{
    defer_call(deferred_calls, &publication->closure, run_put);
}

/* ------------------------------------------------------------------------------------------------------- taking -- */

/* Takes the call to a sender out of its value, whose memory may be used again. Returns false when it is another call.
 */
static bool take_call(struct tl_rendezvous *table, struct tl_closure *closure, struct taken_call *ret_taken)
{
    if (closure->run != run_over) return false;
    struct tl_table_value *value = TL_CONTAINER_OF(closure, struct tl_table_value, closure);
    *ret_taken = (struct taken_call){.sender = value->sender, .status = value->status, .tensor = value->tensor};
    tl_list_remove(&closure->link);
    tl_spares_put(&table->spare_values, value);
    return true;
}

static void run_taken(const struct taken_call *call)
{
    tl_tensor_put(call->tensor);
    call->sender->over(call->sender, call->status);
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
           take_call(table, TL_CONTAINER_OF(deferred_calls->next, struct tl_closure, link), &taken[count]))
        count++;
    tl_table_unlock(table);
    for (size_t i = 0; i < count; i++)
        run_taken(&taken[i]);
    for (struct tl_list *link; (link = tl_list_pop_front(deferred_calls));) {
        struct tl_closure *closure = TL_CONTAINER_OF(link, struct tl_closure, link);
        closure->run(closure);
    }
}
