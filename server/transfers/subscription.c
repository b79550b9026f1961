// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/struct_version.h"
#include "server/back_off.h"
#include "server/transfers/operation_internal.h"
#include "server/transfers/subscription_internal.h"

const struct tl_error subscription_out_of_memory = {.code = TL_RESOURCE_EXHAUSTED, .message = "no memory"};

/* ---------------------------------------------------------------------------------------------------- being over -- */

/* Frees all but what the last completion needs. */
static void drop_parts(struct tl_subscription *subscription)
{
    for (size_t i = 0; i < subscription->slot_count; i++) {
        struct slot *slot = &subscription->slots[i];
        tl_fetch_fini(&slot->request.fetch);
        tl_tensor_put(slot->memory);
        free(slot->value);
    }
    tl_tensor_put(subscription->token);
    free(subscription->key);
}

static void take_last(struct tl_cq_item *item, struct tl_completion *ret_completion)
{
    struct tl_subscription *subscription = TL_CONTAINER_OF(item, struct tl_subscription, last);
    subscription_fill(ret_completion, subscription->id, subscription->user_data, subscription->error);
    ret_completion->is_last = true;
    ret_completion->duration_ns = subscription->duration_ns;
    tl_error_drop(subscription->error);
    free(subscription);
}

static bool is_over(const struct tl_subscription *subscription)
{
    return subscription->is_ending && subscription->hold_count == 0 && !subscription->is_deferred &&
           subscription->busy_count == 0;
}

void subscription_maybe_over(struct tl_subscription *subscription)
{
    struct tl_worker *worker = subscription->worker;
    if (!is_over(subscription)) return;
    subscription->duration_ns = tl_clock_now_ns() - subscription->submitted_ns;
    if (subscription->is_registered) HASH_DEL(worker->operations.subscriptions, subscription);
    drop_parts(subscription);
    const struct tl_request_id id = {.incarnation = worker->self.incarnation, .number = subscription->id};
    if (tl_peer_is_self(subscription->peer)) tl_rendezvous_unsubscribe(worker->table, &id);
    tl_peer_release(subscription->peer);
    __atomic_fetch_sub(&worker->operations.open_ops, 1, __ATOMIC_RELEASE);
    tl_cq_push(subscription->cq, &subscription->last, &worker->progress);
}

void subscription_hold(struct tl_subscription *subscription)
{
    subscription->hold_count++;
}

void subscription_let_go(struct tl_subscription *subscription)
{
    subscription_push_held(subscription);
    subscription->hold_count--;
    subscription_maybe_over(subscription);
}

/* ------------------------------------------------------------------------------------------------------- rounds -- */

bool subscription_may_go_on(struct tl_subscription *subscription)
{
    struct tl_loop *loop = subscription->worker->loop;
    struct tl_quota *quota = tl_loop_quota(loop);
    if (tl_quota_left(quota) > 0) {
        tl_quota_use(quota, 1);
        return true;
    }
    if (!subscription->is_deferred) tl_loop_defer(loop, &subscription->round_closure);
    subscription->is_deferred = true;
    return false;
}

static struct slot *slot_at(struct tl_list *link)
{
    return TL_CONTAINER_OF(link, struct slot, link);
}

void slot_close(struct slot *slot)
{
    struct tl_subscription *subscription = slot->subscription;
    if (subscription->retried == &slot->link) subscription->retried = slot->link.next;
    tl_list_remove(&slot->link);
    slot_drop_followers(slot);
}

void slot_free(struct slot *slot)
{
    slot->state = SLOT_FREE;
    slot->subscription->busy_count--;
    tl_list_push_back(&slot->subscription->unasked, &slot->link);
}

/* ------------------------------------------------------------------------------------------------------- asking -- */

void subscription_retry_later(struct tl_subscription *subscription)
{
    if (subscription->is_ending || subscription->retry_timer.heap_place != 0) return;
    int64_t pause_ns =
        tl_back_off_ns(TL_RECEIVE_FIRST_BACK_OFF_NS, TL_RECEIVE_MAX_BACK_OFF_NS, subscription->retry_count++);
    if (tl_timers_arm(tl_loop_timers(subscription->worker->loop), &subscription->retry_timer,
                      tl_clock_now_ns() + pause_ns) != TL_OK) {
        subscription_end(subscription, &subscription_out_of_memory);
    }
}

static void ask_again(struct slot *slot)
{
    slot->subscription->worker->operations.requests_retried++;
    slot->state = SLOT_ASKED;
    slot_forget_connection(slot);
    tl_peer_fetch(slot->subscription->peer, &slot->request);
}

/* Asks again what is broken, in the order in which it was asked first: the owner may keep values for these requests. */
static void ask_broken(struct tl_subscription *subscription)
{
    while (!subscription->is_ending && subscription->retried != &subscription->open) {
        if (!subscription_may_go_on(subscription)) return;
        struct slot *slot = slot_at(subscription->retried);
        subscription->retried = slot->link.next;
        if (slot->state == SLOT_BROKEN) ask_again(slot);
    }
}

/* Asks for another value. Returns false without memory for its completion. */
static bool ask(struct slot *slot)
{
    struct tl_subscription *subscription = slot->subscription;
    struct tl_worker *worker = subscription->worker;
    if (slot->value == NULL) slot->value = calloc(1, sizeof(*slot->value));
    if (slot->value == NULL) return false;
    *slot->value = (struct value){
        .item.take = slot_take_value, .op = subscription->id, .user_data = subscription->user_data, .path_reason = ""};
    uint64_t number = ++worker->operations.next_request;
    slot->state = SLOT_ASKED;
    subscription->busy_count++;
    tl_list_remove(&slot->link);
    tl_list_push_back(&subscription->open, &slot->link);
    slot->is_asked_again = false;
    slot->asked_ns = tl_clock_now_ns();
    if (tl_peer_is_self(subscription->peer)) {
        slot_ask_own(slot, number);
    } else {
        slot_ask_peer(slot, number);
    }
    return true;
}

void subscription_ask(struct tl_subscription *subscription)
{
    while (!subscription->is_ending && !tl_list_is_empty(&subscription->unasked)) {
        if (!subscription_may_go_on(subscription)) return;
        if (ask(slot_at(subscription->unasked.next))) continue;
        subscription_retry_later(subscription);
        return;
    }
}

static void retry(struct tl_timer *timer)
{
    struct tl_subscription *subscription = TL_CONTAINER_OF(timer, struct tl_subscription, retry_timer);
    subscription_hold(subscription);
    subscription->retried = subscription->open.next;
    ask_broken(subscription);
    subscription_ask(subscription);
    subscription_let_go(subscription);
}

/* ------------------------------------------------------------------------------------------------------- ending -- */

/* Ends what the slot waits for. A request that ends later leaves ASKED then. */
static void end_slot(struct slot *slot)
{
    struct tl_subscription *subscription = slot->subscription;
    bool is_over = slot->state == SLOT_BROKEN;
    if (slot->state == SLOT_ASKED && tl_peer_is_self(subscription->peer)) {
        is_over = tl_rendezvous_cancel(subscription->worker->table, &slot->own.receiver);
    } else if (slot->state == SLOT_ASKED) {
        is_over = tl_peer_cancel(&slot->request);
    } else if (slot->state == SLOT_LENT && tl_borrow_forget(slot->borrow)) {
        slot->borrow = NULL;
        slot_free(slot);
    }
    if (!is_over) return;
    if (!tl_peer_is_self(subscription->peer)) tl_peer_give_up(&slot->request);
    slot_close(slot);
    slot_free(slot);
}

/* Ends slots, as many as the quota allows. */
static void end_slots(struct tl_subscription *subscription)
{
    for (; subscription->ended_count < subscription->slot_count; subscription->ended_count++) {
        if (!subscription_may_go_on(subscription)) return;
        end_slot(&subscription->slots[subscription->ended_count]);
    }
}

void subscription_end(struct tl_subscription *subscription, const struct tl_error *error)
{
    if (subscription->is_ending) return;
    subscription->is_ending = true;
    subscription->error = tl_error_keep(error);
    tl_timers_disarm(tl_loop_timers(subscription->worker->loop), &subscription->retry_timer);
    subscription_hold(subscription);
    end_slots(subscription);
    subscription_let_go(subscription);
}

bool tl_subscription_cancel(struct tl_worker *worker, tl_op_id id)
{
    struct tl_subscription *subscription;
    HASH_FIND(hh, worker->operations.subscriptions, &id, sizeof(id), subscription);
    if (subscription == NULL || subscription->is_ending) return false;
    struct tl_error error;
    tl_error_set(&error, TL_CANCELLED, "the subscription of %s was cancelled", subscription->key);
    subscription_end(subscription, &error);
    return true;
}

/* Returns whether all slots have ended; some may end in a later round. */
static bool end_now(struct tl_subscription *subscription, const struct tl_error *status)
{
    subscription_hold(subscription);
    subscription_end(subscription, status);
    bool is_done = subscription->ended_count == subscription->slot_count;
    subscription_let_go(subscription);
    return is_done;
}

bool tl_subscriptions_end(struct tl_worker *worker, const struct tl_peer *peer, const struct tl_error *status)
{
    struct tl_subscription *subscription, *next;
    bool are_done = true;
    HASH_ITER(hh, worker->operations.subscriptions, subscription, next)
    {
        if (peer != NULL && subscription->peer != peer) continue;
        if (!subscription->is_ending && tl_quota_left(tl_loop_quota(worker->loop)) == 0) return false;
        are_done &= end_now(subscription, status);
    }
    return are_done;
}

/* ------------------------------------------------------------------------------------------------------ starting -- */

static bool add_to_worker(struct tl_subscription *subscription)
{
    bool is_added = true;
#undef uthash_nonfatal_oom
#define uthash_nonfatal_oom(object) is_added = false
    HASH_ADD(hh, subscription->worker->operations.subscriptions, id, sizeof(subscription->id), subscription);
    return is_added;
}

/* Others had their turn: what was left over is done. */
static void go_on(struct tl_closure *closure)
{
    struct tl_subscription *subscription = TL_CONTAINER_OF(closure, struct tl_subscription, round_closure);
    subscription->is_deferred = false;
    subscription_hold(subscription);
    if (subscription->is_ending) end_slots(subscription);
    ask_broken(subscription);
    subscription_ask(subscription);
    subscription_let_go(subscription);
}

static void start(struct tl_closure *closure)
{
    struct tl_subscription *subscription = TL_CONTAINER_OF(closure, struct tl_subscription, round_closure);
    struct tl_error closing;
    subscription->round_closure.run = go_on;
    subscription_hold(subscription);
    subscription->is_registered = add_to_worker(subscription);
    if (!subscription->is_registered) {
        subscription_end(subscription, &subscription_out_of_memory);
    } else if (subscription->worker->closing.is_closing) {
        tl_error_set(&closing, TL_CANCELLED, "the worker was closed");
        subscription_end(subscription, &closing);
    }
    subscription_ask(subscription);
    subscription_let_go(subscription);
}

static enum tl_status check_destinations(const char *key, const struct tl_subscribe_options *options,
                                         struct tl_error *ret_error)
{
    if (options->count == 0) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "the subscription of %.64s has count 0; it needs at least one buffer", key);
    }
    for (size_t i = 0; options->destinations != NULL && i < options->count; i++) {
        struct tl_tensor *tensor = options->destinations[i];
        const char *flaw = NULL;
        if (tensor == NULL) {
            flaw = "is NULL";
        } else if (!tl_tensor_is_writable(tensor)) {
            flaw = "is read-only";
        } else if (tl_tensor_is_on_device(tensor)) {
            flaw = "lies on a device; subscriptions receive into memory of the host";
        } else if (!tl_meta_data_is_equal(tl_tensor_meta_data(tensor), tl_tensor_meta_data(options->destinations[0]))) {
            flaw = "has another dtype or shape than the first";
        }
        if (flaw == NULL) continue;
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "destination %zu for %.64s %s", i, key, flaw);
    }
    return TL_OK;
}

static void init_slot(struct tl_subscription *subscription, struct slot *slot, struct tl_tensor *destination)
{
    slot->subscription = subscription;
    slot->state = SLOT_FREE;
    tl_list_push_back(&subscription->unasked, &slot->link);
    tl_list_init(&slot->followers);
    tl_list_init(&slot->follow_link);
    slot->memory = destination != NULL ? tl_tensor_get(destination) : NULL;
    slot_init_request(slot);
}

static enum tl_status create(struct tl_worker *worker, struct tl_peer *peer, const char *key,
                             const struct tl_subscribe_options *options, struct tl_subscription **ret_subscription,
                             struct tl_error *ret_error)
{
    const uint64_t dims[] = {0};
    size_t most = (SIZE_MAX - sizeof(struct tl_subscription)) / sizeof(struct slot);
    struct tl_subscription *subscription = NULL;
    if (options->count <= most) subscription = calloc(1, sizeof(*subscription) + options->count * sizeof(struct slot));
    if (subscription != NULL) subscription->key = strdup(key);
    bool is_whole = subscription != NULL && subscription->key != NULL &&
                    tl_tensor_create(TL_U8, 1, dims, &subscription->token, ret_error) == TL_OK;
    if (!is_whole) {
        if (subscription != NULL) drop_parts(subscription);
        free(subscription);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a subscription of %.64s with %zu buffers",
                            key, options->count);
    }
    subscription->worker = worker;
    subscription->peer = peer;
    tl_peer_retain(peer);
    subscription->last.take = take_last;
    subscription->round_closure.run = start;
    subscription->retry_timer.fire = retry;
    subscription->has_destinations = options->destinations != NULL;
    subscription->wants_checksum = worker->settings.checksum || options->wants_checksum;
    subscription->from_step = options->from_step;
    subscription->slot_count = options->count;
    tl_list_init(&subscription->unasked);
    tl_list_init(&subscription->open);
    tl_list_init(&subscription->unchecked);
    subscription->retried = &subscription->open;
    for (size_t i = 0; i < options->count; i++)
        init_slot(subscription, &subscription->slots[i], options->destinations ? options->destinations[i] : NULL);
    *ret_subscription = subscription;
    return TL_OK;
}

enum tl_status tl_subscribe(struct tl_worker *worker, tl_peer_id peer, const char *key,
                            const struct tl_subscribe_options *caller_options, struct tl_cq *cq, void *user_data,
                            tl_op_id *ret_op, struct tl_error *ret_error)
{
    struct tl_subscribe_options options;
    struct tl_subscription *subscription = NULL;
    enum tl_status status = op_check_key(key, ret_error);
    if (status == TL_OK && caller_options == NULL)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the subscription of %.64s has no options", key);
    if (status == TL_OK)
        status = tl_struct_read(&options, sizeof(options), sizeof(options), caller_options, "tl_subscribe_options",
                                ret_error);
    if (status == TL_OK) status = check_destinations(key, &options, ret_error);
    if (status == TL_OK) status = tl_cq_attach(cq, &worker->progress, ret_error);
    struct tl_peer *from = status == TL_OK ? tl_peer_acquire(worker, peer) : NULL;
    if (status == TL_OK && from == NULL) status = tl_error_set(ret_error, TL_NOT_FOUND, "no such peer to subscribe to");
    if (status == TL_OK) status = create(worker, from, key, &options, &subscription, ret_error);
    tl_peer_release(from);
    if (status != TL_OK) return status;
    subscription->cq = cq;
    subscription->user_data = user_data;
    subscription->submitted_ns = tl_clock_now_ns();
    tl_op_id id = __atomic_add_fetch(&worker->operations.next_op, 1, __ATOMIC_RELAXED);
    subscription->id = id;
    __atomic_fetch_add(&worker->operations.open_ops, 1, __ATOMIC_RELAXED);
    tl_progress_post(&worker->progress, &subscription->round_closure);
    if (ret_op != NULL) *ret_op = id;
    return TL_OK;
}
