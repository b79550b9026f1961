// SPDX-License-Identifier: Apache-2.0
/*
 * What a subscription has received: values and statuses, in the order in which the owner gave them, each as a
 * completion that lends a tensor. The last put of that tensor gives the slot back, which asks again.
 */
#include <stdlib.h>

#include "base/clock.h"
#include "base/error.h"
#include "server/transfers/subscription_internal.h"

/* -------------------------------------------------------------------------------------------------- completions -- */

void subscription_fill(struct tl_completion *ret_completion, tl_op_id op, void *user_data, const struct tl_error *error)
{
    *ret_completion = (struct tl_completion){.size_bytes = sizeof(*ret_completion),
                                             .op = op,
                                             .kind = TL_OP_SUBSCRIBE,
                                             .user_data = user_data,
                                             .path_reason = ""};
    if (error != NULL) ret_completion->status = *error;
}

void slot_take_value(struct tl_cq_item *item, struct tl_completion *ret_completion)
{
    struct value *value = TL_CONTAINER_OF(item, struct value, item);
    subscription_fill(ret_completion, value->op, value->user_data, value->error);
    ret_completion->tensor = value->tensor;
    ret_completion->step = value->step;
    ret_completion->bytes = value->bytes;
    ret_completion->path = value->path;
    ret_completion->path_reason = value->path_reason;
    ret_completion->duration_ns = value->duration_ns;
    ret_completion->is_verified = value->is_verified;
    tl_error_drop(value->error);
    tl_tensor_put(value->token);
    free(value);
}

/* ------------------------------------------------------------------------------------------------------ lending -- */

/* What was lent has come back, or the completion with an error was read. */
static void returned(void *context)
{
    struct slot *slot = context;
    struct tl_subscription *subscription = slot->subscription;
    slot->borrow = NULL;
    subscription_hold(subscription);
    slot_free(slot);
    subscription_ask(subscription);
    subscription_let_go(subscription);
}

/* Lends the tensor until the program puts it. Returns false without memory for that. */
static bool lend(struct slot *slot, struct tl_tensor *tensor, struct tl_tensor **ret_lent)
{
    struct tl_error error;
    enum tl_status status =
        tl_borrow_create(slot->subscription->worker, tensor, returned, slot, &slot->borrow, ret_lent, &error);
    if (status != TL_OK) slot->borrow = NULL;
    return status == TL_OK;
}

/* Passes the value to the program. */
static void push(struct slot *slot)
{
    struct tl_subscription *subscription = slot->subscription;
    struct value *value = slot->value;
    slot->value = NULL;
    value->duration_ns = tl_clock_now_ns() - slot->asked_ns;
    bool is_forgotten = slot->borrow == NULL || (subscription->is_ending && tl_borrow_forget(slot->borrow));
    if (is_forgotten) {
        slot->borrow = NULL;
        slot_free(slot);
    }
    tl_cq_push(subscription->cq, &value->item, &subscription->worker->progress);
    if (is_forgotten) subscription_retry_later(subscription); /* there was no memory; does nothing while it ends */
}

/* Keeps the library's memory of a value for the next one, if it can have such memory again; takes the reference. */
static void keep_memory(struct slot *slot, struct tl_tensor *tensor)
{
    const struct tl_meta_data *meta_data = tl_tensor_meta_data(tensor);
    bool may_keep = !meta_data->is_dead && meta_data->dtype != TL_STRING && meta_data->size_bytes > 0;
    if (tensor == slot->memory || slot->subscription->has_destinations || !may_keep) {
        tl_tensor_put(tensor);
        return;
    }
    tl_tensor_put(slot->memory);
    slot->memory = tensor;
}

/* Passes the completion of an error to the program. It gives the slot back when it was read. */
static void push_error(struct slot *slot)
{
    if (!lend(slot, slot->subscription->token, &slot->value->token)) slot->value->token = NULL;
    push(slot);
}

/* Passes what the slot holds to the program. Returns false, and changes nothing, when there is no memory to lend it: a
 * value that was sent is the receiver's alone, and must not be lost. */
static bool push_held(struct slot *slot)
{
    struct value *value = slot->value;
    struct tl_tensor *tensor = slot->arrived;
    bool is_lent = tensor != NULL && lend(slot, tensor, &value->tensor);
    if (tensor != NULL && !is_lent) {
        if (!slot->subscription->is_ending) return false;
        value->tensor = tl_tensor_get(tensor); /* nothing is written there any more */
    }
    slot->arrived = NULL;
    slot->state = SLOT_LENT;
    slot_close(slot);
    if (tensor != NULL) {
        keep_memory(slot, tensor);
        push(slot);
    } else {
        push_error(slot);
    }
    return true;
}

/* Returns a slot that has asked earlier, and whose value goes to the program before that of the held one; NULL: there
 * is none. The owner gives values to requests in the order in which it has got them: on a data connection, what was
 * asked before the held one has a value too, or its connection is about to end. A request that is asked again may have
 * a value that was given long before. Few are looked at: those without a value are behind those that have one. */
static struct slot *find_earlier(struct slot *held)
{
    struct tl_subscription *subscription = held->subscription;
    for (struct tl_list *link = held->link.prev; link != &subscription->open; link = link->prev) {
        struct slot *slot = TL_CONTAINER_OF(link, struct slot, link);
        const struct tl_fetch *fetch = &slot->request.fetch;
        subscription->worker->operations.slot_visits++;
        if (slot->state == SLOT_HELD) return slot;
        if (slot->state != SLOT_ASKED) continue;
        if (tl_fetch_is_begun(fetch)) return slot;
        if (!held->is_asked_again && tl_fetch_was_asked_before(fetch, &held->request.fetch)) return slot;
    }
    return NULL;
}

void slot_drop_followers(struct slot *slot)
{
    tl_list_splice_back(&slot->subscription->unchecked, &slot->followers);
}

void subscription_push_held(struct tl_subscription *subscription)
{
    while (!tl_list_is_empty(&subscription->unchecked)) {
        if (!subscription_may_go_on(subscription)) return;
        struct tl_list *link = tl_list_pop_front(&subscription->unchecked);
        struct slot *slot = TL_CONTAINER_OF(link, struct slot, follow_link);
        struct slot *earlier = find_earlier(slot);
        if (earlier != NULL) {
            tl_list_push_back(&earlier->followers, link);
        } else if (!push_held(slot)) {
            tl_list_push_front(&subscription->unchecked, link);
            subscription_retry_later(subscription);
            return;
        }
    }
}

/* The slot has its value, in the tensor whose reference is taken over, or with NULL the status in `error`. */
static void settle(struct slot *slot, struct tl_tensor *tensor, uint64_t step, const struct tl_error *error)
{
    slot->value->step = step;
    slot->value->error = tensor == NULL ? tl_error_keep(error) : NULL;
    slot->arrived = tensor;
    slot->state = SLOT_HELD;
    tl_list_push_back(&slot->subscription->unchecked, &slot->follow_link);
}

void slot_arrived(struct slot *slot, struct tl_tensor *tensor, uint64_t step, enum tl_path path)
{
    struct tl_subscription *subscription = slot->subscription;
    struct value *value = slot->value;
    struct tl_error error;
    subscription->retry_count = 0;
    if (tl_rendezvous_check_step(subscription->worker->table, step, &error) != TL_OK) {
        keep_memory(slot, tensor);
        settle(slot, NULL, step, &error);
        return;
    }
    value->bytes = tl_tensor_size_bytes(tensor);
    value->path = value->bytes == 0 ? TL_PATH_NONE : path;
    settle(slot, tensor, step, NULL);
}

void slot_failed(struct slot *slot, const struct tl_error *error, uint64_t step, bool is_refusal)
{
    struct tl_subscription *subscription = slot->subscription;
    if (!subscription->is_ending && !is_refusal) {
        settle(slot, NULL, step, error);
        return;
    }
    slot_close(slot);
    slot_free(slot);
    subscription_end(subscription, error); /* does nothing while it ends */
}
