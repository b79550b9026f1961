// SPDX-License-Identifier: Apache-2.0
/*
 * Rendezvous table against a model: random sequences of operations over few keys, steps and request ids are made on the
 * table and on a model that is too simple to be wrong (arrays that are searched from the start). After each operation
 * everything that can be seen must be the same: what was returned, what the callback of every sender and receiver has
 * got so far, and the counters.
 *
 * A failure names the seed of its sequence; TENSORLANE_SEED=that in the environment makes it the first one.
 */
#include <check.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "fakes/run_suite.h"
#include "fakes/table_list.h"
#include "fakes/whole_steps.h"
#include "server/rendezvous/rendezvous.h"

enum {
    SEQUENCES = 25000,
    OPERATIONS = 40,
    KEYS = 3,
    STEPS = 6, /* more than a key without an index has */
    INCARNATIONS = 2,
    NUMBERS = 5,
    SUBSCRIPTIONS = 2, /* for each incarnation */
    TIMES = 20,
};

static const char *const keys[KEYS] = {"alpha", "alphabet", "beta"};
static const enum tl_status abort_codes[] = {TL_DATA_LOSS, TL_INTERNAL, TL_FAILED_PRECONDITION};

/* ------------------------------------------------------------------------------------------------------ random -- */

static uint64_t random_state;

/* SplitMix64. */
static uint64_t next_random(void)
{
    uint64_t z = (random_state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static unsigned below(unsigned limit)
{
    return (unsigned)(next_random() % limit);
}

/* ------------------------------------------------------------------------------------------------ the sequence -- */

/* What the callback of a sender or receiver got from the table, or should get according to the model. */
struct outcome {
    int count;
    enum tl_status code;
    int value; /* The operation that sent or published the given value; -1: none. */
    bool is_one_shot;
};

/* One operation; its number is that of the sender, receiver or publication that it makes. */
struct operation {
    const char *name;
    unsigned key;
    uint64_t step;
    struct tl_request_id id;
    uint64_t subscription; /* 0: it wants exactly one value. */
    struct outcome seen, expected;

    /* The state in the table. */
    struct tl_sender sender;
    struct tl_receiver receiver;
    uint64_t publication; /* 0: not known yet. */

    /* The state in the model. */
    bool is_sent; /* The value is in the table. */
    bool is_reserved;
    bool is_ended;
    bool is_refused; /* A subscription has given it back. */
    struct tl_request_id reserved_for;
    int holder_count;
    unsigned order;      /* Values are reserved in this order, */
    unsigned orphaned;   /* and orphaned in this one. */
    int64_t deadline_ns; /* -1: not orphaned. */
    bool is_waiting;
};

static struct tl_rendezvous *table;
static struct tl_tensor *tensors[OPERATIONS]; /* The tensor of operation i has i * 10 bytes. */
static int released_count;
static struct operation operations[OPERATIONS];
static int operation_count;
static uint64_t sequence_seed;
static unsigned outcome_counts[TL_UNAUTHENTICATED + 1]; /* Counted over all sequences, by code. */

struct model_subscription {
    bool exists;
    bool is_given_up;
    unsigned key;
    uint64_t from_step;           /* It gets no value of an earlier step that a subscription has given back. */
    int published;                /* The publication that it has had; -1: none. */
    uint64_t publication_request; /* The request that has got it. */
    unsigned place;               /* Those of a key get a value in this order; 0: none of its requests waits. */
};

struct model {
    struct tl_rendezvous_limits limits;
    struct model_subscription subscriptions[INCARNATIONS][SUBSCRIPTIONS];
    unsigned last_place;
    unsigned last_order;
    int published[KEYS]; /* The operation; -1: none. */
    uint64_t mark_steps[STEPS];
    enum tl_status mark_codes[STEPS];
    unsigned mark_count;
    uint64_t dropped;
    enum tl_status close_code; /* TL_OK: open. */
};

static struct model model;

static void stop(const char *what)
{
    for (int i = 0; i < operation_count; i++) {
        const struct operation *o = &operations[i];
        printf("%2d %s %s step %" PRIu64 " id %" PRIu64 ".%" PRIu64 ": outcome %d %s %d, expected %d %s %d\n", i,
               o->name, keys[o->key], o->step, o->id.incarnation, o->id.number, o->seen.count,
               tl_status_name(o->seen.code), o->seen.value, o->expected.count, tl_status_name(o->expected.code),
               o->expected.value);
    }
    ck_abort_msg("TENSORLANE_SEED=%" PRIu64 ", operation %d: %s", sequence_seed, operation_count - 1, what);
}

static void require(bool condition, const char *what)
{
    if (!condition) stop(what);
}

/* --------------------------------------------------------------------------------------------------- callbacks -- */

static void on_over(struct tl_sender *sender, const struct tl_error *status)
{
    struct operation *o = TL_CONTAINER_OF(sender, struct operation, sender);
    o->seen.count++;
    o->seen.code = status->code;
}

static void on_deliver(struct tl_receiver *receiver, const struct tl_error *status, const struct tl_offer *offer)
{
    struct operation *o = TL_CONTAINER_OF(receiver, struct operation, receiver);
    o->seen.count++;
    o->seen.code = status->code;
    require((offer != NULL) == (status->code == TL_OK), "an offer goes with TL_OK");
    if (offer == NULL) return;
    o->seen.is_one_shot = offer->is_one_shot;
    o->seen.value = (int)(tl_tensor_size_bytes(offer->tensor) / 10);
    struct operation *value = &operations[o->seen.value];
    require(offer->tensor == tensors[o->seen.value], "the tensor that was sent");
    require(offer->step == value->step, "the step of the value");
    require(offer->publication != 0, "a publication has a number");
    if (value->publication == 0) value->publication = offer->publication;
    require(offer->publication == value->publication, "one value, one number");
    for (int i = 0; i < operation_count; i++)
        require(i == o->seen.value || operations[i].publication != offer->publication, "a number of its own");
    tl_tensor_put(offer->tensor);
}

/* ------------------------------------------------------------------------------------------------------- model -- */

static bool is_same_id(struct tl_request_id a, struct tl_request_id b)
{
    return a.incarnation == b.incarnation && a.number == b.number;
}

static struct model_subscription *subscription_of(struct tl_request_id id, uint64_t number)
{
    return number > 0 ? &model.subscriptions[id.incarnation - 1][number - 1] : NULL;
}

/* The first request of the subscription that waits; NULL: none does. */
static struct operation *first_waiting(const struct model_subscription *subscription)
{
    for (int i = 0; i < operation_count; i++)
        if (operations[i].is_waiting && subscription_of(operations[i].id, operations[i].subscription) == subscription)
            return &operations[i];
    return NULL;
}

/* A request of the subscription waits no more, or a value is not reserved for it any more. */
static void model_used_less(struct model_subscription *subscription, bool was_waiting)
{
    if (subscription == NULL) return;
    bool is_used = first_waiting(subscription) != NULL;
    if (was_waiting) subscription->place = is_used ? ++model.last_place : 0;
    for (int i = 0; i < operation_count; i++) {
        const struct operation *o = &operations[i];
        if (o->is_sent && o->is_reserved) is_used |= subscription_of(o->reserved_for, o->subscription) == subscription;
    }
    if (!is_used && subscription->is_given_up) subscription->exists = false;
}

static void model_unreserve(struct operation *value)
{
    struct model_subscription *subscription = subscription_of(value->reserved_for, value->subscription);
    value->is_reserved = false;
    value->subscription = 0;
    model_used_less(subscription, false);
}

static void model_stop_waiting(struct operation *o)
{
    o->is_waiting = false;
    model_used_less(subscription_of(o->id, o->subscription), true);
}

static void expect(struct operation *o, enum tl_status code, int value, bool is_one_shot)
{
    o->expected.count++;
    o->expected.code = code;
    o->expected.value = value;
    o->expected.is_one_shot = is_one_shot;
    o->is_sent = false;
    if (o->is_reserved) model_unreserve(o);
    if (o->is_waiting) model_stop_waiting(o);
    outcome_counts[code]++;
}

static enum tl_status model_mark(uint64_t step)
{
    for (unsigned i = 0; i < model.mark_count; i++)
        if (model.mark_steps[i] == step) return model.mark_codes[i];
    return TL_OK;
}

static void model_unmark(unsigned index)
{
    model.mark_count--;
    for (unsigned i = index; i < model.mark_count; i++) {
        model.mark_steps[i] = model.mark_steps[i + 1];
        model.mark_codes[i] = model.mark_codes[i + 1];
    }
}

static void model_unmark_step(uint64_t step)
{
    for (unsigned i = 0; i < model.mark_count; i++)
        if (model.mark_steps[i] == step) model_unmark(i);
}

static struct operation *model_reserved(struct tl_request_id id)
{
    for (int i = 0; i < operation_count; i++)
        if (operations[i].is_sent && operations[i].is_reserved && is_same_id(operations[i].reserved_for, id))
            return &operations[i];
    return NULL;
}

static struct tl_rendezvous_stats model_stats(void)
{
    struct tl_rendezvous_stats stats = {.dropped_tensors = model.dropped};
    for (int i = 0; i < operation_count; i++) {
        stats.waiting_receivers += operations[i].is_waiting;
        stats.held_tensors += operations[i].is_sent;
        stats.held_bytes += operations[i].is_sent ? (uint64_t)i * 10 : 0;
    }
    for (int i = 0; i < KEYS; i++) {
        stats.published_tensors += model.published[i] >= 0;
        stats.published_bytes += model.published[i] >= 0 ? (uint64_t)model.published[i] * 10 : 0;
    }
    return stats;
}

static void model_reserve(struct operation *value, struct operation *receiver)
{
    value->is_reserved = true;
    value->reserved_for = receiver->id;
    value->subscription = receiver->subscription;
    value->order = ++model.last_order;
    value->holder_count = 1;
    value->deadline_ns = -1;
    expect(receiver, TL_OK, (int)(value - operations), true);
}

/* Returns the subscription of the key behind this place; NULL: there is none. */
static struct model_subscription *next_subscription(unsigned key, unsigned place)
{
    struct model_subscription *next = NULL;
    for (unsigned i = 0; i < INCARNATIONS * SUBSCRIPTIONS; i++) {
        struct model_subscription *other = &model.subscriptions[i / SUBSCRIPTIONS][i % SUBSCRIPTIONS];
        bool is_one = other->exists && other->key == key && other->place > place;
        if (is_one && (next == NULL || other->place < next->place)) next = other;
    }
    return next;
}

static bool may_have(const struct operation *receiver, const struct operation *value)
{
    const struct model_subscription *subscription = subscription_of(receiver->id, receiver->subscription);
    return is_same_id(value->reserved_for, receiver->id) ||
           (value->step >= receiver->step && (!value->is_refused || value->step >= subscription->from_step));
}

static void model_offer(struct operation *value)
{
    for (int i = 0; i < operation_count; i++) {
        struct operation *o = &operations[i];
        if (!o->is_waiting || o->subscription > 0 || o->key != value->key || o->step != value->step) continue;
        model_reserve(value, o);
        return;
    }
    struct model_subscription *subscription = NULL;
    while ((subscription = next_subscription(value->key, subscription != NULL ? subscription->place : 0)) != NULL) {
        struct operation *o = first_waiting(subscription);
        if (!may_have(o, value)) continue;
        model_reserve(value, o);
        return;
    }
}

static void model_release(struct operation *value)
{
    bool was_subscribed = value->subscription > 0;
    model_unreserve(value);
    for (int i = 0; i < operation_count; i++) { /* a request of a subscription may have again what it had last */
        struct operation *o = &operations[i];
        if ((o == value) != was_subscribed && !o->is_reserved && is_same_id(o->reserved_for, value->reserved_for))
            o->reserved_for = (struct tl_request_id){0};
    }
    value->deadline_ns = -1;
    if (value->is_ended) {
        expect(value, TL_CANCELLED, -1, false);
        model.dropped++;
    } else {
        model_offer(value);
    }
}

static enum tl_status model_send(struct operation *sender, uint64_t size_bytes)
{
    if (model.close_code) return model.close_code;
    if (model_mark(sender->step)) return model_mark(sender->step);
    for (int i = 0; i < operation_count; i++) {
        const struct operation *o = &operations[i];
        if (o->is_sent && !o->is_ended && o->key == sender->key && o->step == sender->step) return TL_ALREADY_EXISTS;
    }
    if (model_stats().held_bytes + size_bytes > model.limits.held_bytes) return TL_RESOURCE_EXHAUSTED;
    sender->is_sent = true;
    model_offer(sender);
    return TL_OK;
}

/* Whether a request of a subscription may have a publication; it is noted then. */
static bool model_takes(const struct operation *receiver, int published)
{
    struct model_subscription *subscription = subscription_of(receiver->id, receiver->subscription);
    if (operations[published].step < receiver->step) return false;
    if (subscription->published == published && subscription->publication_request != receiver->id.number) return false;
    subscription->published = published;
    subscription->publication_request = receiver->id.number;
    return true;
}

static void model_publish(struct operation *publisher)
{
    model.published[publisher->key] = (int)(publisher - operations);
    for (int i = 0; i < operation_count; i++) {
        struct operation *o = &operations[i];
        if (o->is_waiting && o->subscription == 0 && o->key == publisher->key && o->step <= publisher->step)
            expect(o, TL_OK, (int)(publisher - operations), false);
    }
    unsigned place = 0, last_place = model.last_place;
    struct model_subscription *subscription;
    while ((subscription = next_subscription(publisher->key, place)) != NULL && subscription->place <= last_place) {
        struct operation *o = first_waiting(subscription);
        place = subscription->place;
        if (model_takes(o, (int)(publisher - operations))) expect(o, TL_OK, (int)(publisher - operations), false);
    }
}

static void model_wait(struct operation *receiver)
{
    uint64_t waiting = 0;
    struct model_subscription *subscription = subscription_of(receiver->id, receiver->subscription);
    for (unsigned i = 0; i < INCARNATIONS * SUBSCRIPTIONS; i++)
        waiting += model.subscriptions[i / SUBSCRIPTIONS][i % SUBSCRIPTIONS].exists;
    if (model_stats().waiting_receivers + waiting >= model.limits.waiting_receivers) {
        expect(receiver, TL_RESOURCE_EXHAUSTED, -1, false);
        return;
    }
    if (subscription != NULL && subscription->place == 0) subscription->place = ++model.last_place;
    receiver->is_waiting = true;
}

/* Returns false when the receiver has its answer: there cannot be such a subscription. */
static bool model_subscribe(struct operation *receiver)
{
    struct model_subscription *subscription = subscription_of(receiver->id, receiver->subscription);
    if (!subscription->exists) {
        model_wait(receiver); /* it counts as one that waits */
        if (!receiver->is_waiting) return false;
        receiver->is_waiting = false;
        *subscription = (struct model_subscription){.exists = true, .key = receiver->key, .published = -1};
    }
    if (subscription->key != receiver->key) {
        expect(receiver, TL_INVALID_ARGUMENT, -1, false);
        return false;
    }
    subscription->is_given_up = false;
    return true;
}

static void model_answer_subscription(struct operation *receiver)
{
    struct operation *value = NULL;
    int published = model.published[receiver->key];
    for (int i = 0; i < operation_count; i++) {
        struct operation *o = &operations[i];
        if (!o->is_sent || o->is_reserved || o->key != receiver->key || !may_have(receiver, o)) continue;
        bool is_again = is_same_id(o->reserved_for, receiver->id);
        if (value == NULL || is_again || o->step < value->step) value = o;
        if (is_again) break;
    }
    if (value != NULL) {
        model_reserve(value, receiver);
    } else if (published >= 0 && model_takes(receiver, published)) {
        expect(receiver, TL_OK, published, false);
    } else {
        model_wait(receiver);
    }
}

/* Answers at once or lets the request wait. */
static void model_answer(struct operation *receiver)
{
    if (model.close_code) {
        expect(receiver, model.close_code, -1, false);
        return;
    }
    if (receiver->subscription > 0 && !model_subscribe(receiver)) return;
    struct operation *value = model_reserved(receiver->id);
    if (value) {
        bool is_same = value->key == receiver->key && value->subscription == receiver->subscription &&
                       (receiver->subscription > 0 || value->step == receiver->step);
        if (is_same) {
            value->holder_count++;
            value->deadline_ns = -1;
        }
        expect(receiver, is_same ? TL_OK : TL_INVALID_ARGUMENT, is_same ? (int)(value - operations) : -1, is_same);
        return;
    }
    if (receiver->subscription > 0) {
        model_answer_subscription(receiver);
        return;
    }
    for (int i = 0; i < operation_count; i++) {
        struct operation *o = &operations[i];
        if (!o->is_sent || o->is_reserved || o->key != receiver->key || o->step != receiver->step) continue;
        model_reserve(o, receiver);
        return;
    }
    int published = model.published[receiver->key];
    if (published >= 0 && operations[published].step >= receiver->step) {
        expect(receiver, TL_OK, published, false);
    } else if (model_mark(receiver->step)) {
        expect(receiver, model_mark(receiver->step), -1, false);
    } else {
        model_wait(receiver);
    }
}

static void model_receive(struct operation *receiver)
{
    for (int i = 0; i < operation_count; i++)
        if (operations[i].is_waiting && is_same_id(operations[i].id, receiver->id))
            expect(&operations[i], TL_ABORTED, -1, false);
    model_answer(receiver);
}

static void model_fail_all(enum tl_status code, const uint64_t *step)
{
    for (int i = 0; i < operation_count; i++) {
        struct operation *o = &operations[i];
        bool is_of_step = step == NULL || (o->step == *step && (o->is_sent || o->subscription == 0));
        if ((o->is_sent || o->is_waiting) && is_of_step) expect(o, code, -1, false);
    }
}

static void model_abort(uint64_t step, enum tl_status code)
{
    if (model.close_code) return;
    model_fail_all(code, &step);
    if (model.limits.aborted_steps == 0) return;
    model_unmark_step(step);
    if (model.mark_count == model.limits.aborted_steps) model_unmark(0);
    model.mark_steps[model.mark_count] = step;
    model.mark_codes[model.mark_count++] = code;
}

static uint64_t model_end(uint64_t step)
{
    uint64_t dropped = 0;
    for (int i = 0; i < operation_count; i++) {
        struct operation *o = &operations[i];
        if (o->step != step) continue;
        if (o->is_sent && o->is_reserved) {
            o->is_ended = true;
        } else if (o->is_sent) {
            expect(o, TL_CANCELLED, -1, false);
            dropped++;
        } else if (o->is_waiting && o->subscription == 0) {
            expect(o, TL_CANCELLED, -1, false);
        }
    }
    model_unmark_step(step);
    model.dropped += dropped;
    return dropped;
}

static int64_t model_expire(int64_t now_ns)
{
    struct operation *first;
    do {
        first = NULL;
        for (int i = 0; i < operation_count; i++) {
            struct operation *o = &operations[i];
            if (!o->is_sent || o->deadline_ns < 0) continue;
            bool is_earlier = first == NULL || o->deadline_ns < first->deadline_ns ||
                              (o->deadline_ns == first->deadline_ns && o->orphaned < first->orphaned);
            if (is_earlier) first = o;
        }
        if (first == NULL || first->deadline_ns > now_ns) break;
        model_release(first);
    } while (true);
    return first != NULL ? first->deadline_ns : TL_TIME_NEVER;
}

static void model_unsubscribe(struct tl_request_id id)
{
    struct model_subscription *subscription = subscription_of(id, id.number);
    subscription->is_given_up = true;
    model_used_less(subscription, false);
}

/* Returns the one that was reserved first; -1: none is due. */
static int first_due(const bool *is_due)
{
    int first = -1;
    for (int i = 0; i < operation_count; i++)
        if (is_due[i] && (first < 0 || operations[i].order < operations[first].order)) first = i;
    return first;
}

static void model_release_incarnation(uint64_t incarnation)
{
    bool is_due[OPERATIONS] = {false};
    for (int i = 0; i < operation_count; i++)
        if (operations[i].is_waiting && operations[i].id.incarnation == incarnation)
            expect(&operations[i], TL_ABORTED, -1, false);
    for (int i = 0; i < operation_count; i++)
        is_due[i] =
            operations[i].is_sent && operations[i].is_reserved && operations[i].reserved_for.incarnation == incarnation;
    int next;
    while ((next = first_due(is_due)) >= 0) {
        is_due[next] = false;
        model_release(&operations[next]);
    }
    for (uint64_t number = 1; number <= SUBSCRIPTIONS; number++)
        model_unsubscribe((struct tl_request_id){.incarnation = incarnation, .number = number});
}

static void close_table(enum tl_status code)
{
    struct tl_error status;
    tl_error_set(&status, code, "closed");
    tl_rendezvous_close(table, &status);
    if (model.close_code) return;
    model_fail_all(code, NULL);
    model.mark_count = 0;
    memset(model.subscriptions, 0, sizeof(model.subscriptions));
    for (int i = 0; i < KEYS; i++)
        model.published[i] = -1;
    model.close_code = code;
}

/* -------------------------------------------------------------------------------------------------- operations -- */

static void do_send(struct operation *o)
{
    int index = (int)(o - operations);
    struct tl_error error = {.code = TL_UNKNOWN};
    o->sender.over = on_over;
    enum tl_status code = tl_rendezvous_send(table, keys[o->key], o->step, tensors[index], &o->sender, &error);
    require(code == model_send(o, (uint64_t)index * 10), "what send returns");
    require(code == TL_OK || error.code == code, "the error that send returns");
}

static void do_unsend(struct operation *o)
{
    struct operation *other = &operations[below((unsigned)operation_count)];
    if (other->sender.over == NULL || other == o) return;
    require(tl_rendezvous_unsend(table, &other->sender) == other->is_sent, "what unsend returns");
    other->is_sent = false;
    if (other->is_reserved) model_unreserve(other);
}

static void do_publish(struct operation *o)
{
    int index = (int)(o - operations);
    uint64_t number = 0;
    enum tl_status code = tl_rendezvous_publish(table, keys[o->key], o->step, tensors[index], &number, NULL);
    require(code == model.close_code, "what publish returns");
    if (code != TL_OK) return;
    require(o->publication == 0 || o->publication == number, "the number that publish returns");
    o->publication = number;
    model_publish(o);
}

static void do_withdraw(struct operation *o)
{
    enum tl_status code = tl_rendezvous_withdraw(table, keys[o->key], NULL);
    enum tl_status expected = model.published[o->key] >= 0 ? TL_OK : TL_NOT_FOUND;
    require(code == (model.close_code ? model.close_code : expected), "what withdraw returns");
    model.published[o->key] = -1;
}

static void do_withdraw_matching(struct operation *o)
{
    (void)o;
    size_t expected = (model.published[0] >= 0) + (model.published[1] >= 0);
    require(table_withdraw_matching(table, "alpha*") == expected, "how many are withdrawn");
    model.published[0] = model.published[1] = -1;
}

static void do_list(struct operation *o)
{
    struct tl_listing listing;
    size_t count = 0;
    (void)o;
    enum tl_status code = table_list(table, NULL, &listing, NULL);
    require(code == model.close_code, "what list returns");
    if (code != TL_OK) return;
    for (int i = 0; i < KEYS; i++) {
        if (model.published[i] < 0) continue;
        const struct operation *published = &operations[model.published[i]];
        require(count < listing.count, "how many are listed");
        require(strcmp(listing.items[count].key, keys[i]) == 0, "which key is listed");
        require(listing.items[count].step == published->step, "which step is listed");
        require(listing.items[count].publication == published->publication, "which number is listed");
        count++;
    }
    require(count == listing.count, "how many are listed");
    table_listing_fini(&listing);
}

static void do_receive(struct operation *o)
{
    o->subscription = below(2) == 0 ? 1 + below(SUBSCRIPTIONS) : 0;
    o->receiver = (struct tl_receiver){
        .id = o->id, .key = keys[o->key], .step = o->step, .subscription = o->subscription, .deliver = on_deliver};
    tl_rendezvous_receive(table, &o->receiver);
    model_receive(o);
}

static void do_unsubscribe(struct operation *o)
{
    o->id.number = 1 + below(SUBSCRIPTIONS);
    tl_rendezvous_unsubscribe(table, &o->id);
    model_unsubscribe(o->id);
}

static void do_cancel(struct operation *o)
{
    struct operation *other = &operations[below((unsigned)operation_count)];
    if (other->receiver.deliver == NULL || other == o) return;
    require(tl_rendezvous_cancel(table, &other->receiver) == other->is_waiting, "what cancel returns");
    if (other->is_waiting) model_stop_waiting(other);
}

static void do_acknowledge(struct operation *o)
{
    struct operation *value = model_reserved(o->id);
    tl_rendezvous_acknowledge(table, &o->id);
    if (value) expect(value, TL_OK, -1, false);
}

/* The subscription goes on behind a value that is given back. */
static void model_refuse(struct operation *value)
{
    struct model_subscription *subscription = subscription_of(value->reserved_for, value->subscription);
    if (subscription != NULL) value->is_refused = true;
    if (subscription != NULL && value->step >= subscription->from_step) subscription->from_step = value->step + 1;
    model_release(value);
}

static void do_release(struct operation *o)
{
    struct operation *value = model_reserved(o->id);
    tl_rendezvous_release(table, &o->id);
    if (value) model_refuse(value);
}

static void do_orphan(struct operation *o)
{
    struct operation *value = model_reserved(o->id);
    int64_t deadline_ns = below(TIMES);
    tl_rendezvous_receiver_lost(table, &o->id, deadline_ns);
    if (value == NULL) return;
    if (value->holder_count > 0) value->holder_count--;
    if (value->holder_count > 0) return;
    value->deadline_ns = deadline_ns;
    value->orphaned = ++model.last_order;
}

static void do_expire(struct operation *o)
{
    int64_t now_ns = below(TIMES);
    (void)o;
    require(expire_all(table, now_ns) == model_expire(now_ns), "when to expire next");
}

static void do_release_incarnation(struct operation *o)
{
    release_whole_incarnation(table, o->id.incarnation);
    model_release_incarnation(o->id.incarnation);
}

static void do_abort(struct operation *o)
{
    struct tl_error status;
    tl_error_set(&status, abort_codes[below(TL_ARRAY_COUNT(abort_codes))], "aborted");
    abort_whole_step(table, o->step, &status);
    model_abort(o->step, status.code);
}

static void do_end(struct operation *o)
{
    require(end_whole_step(table, o->step) == model_end(o->step), "how many are dropped");
}

static void do_close(struct operation *o)
{
    (void)o;
    close_table(TL_UNAVAILABLE);
}

static const struct {
    const char *name;
    unsigned weight; /* Out of 1000. */
    void (*perform)(struct operation *o);
} kinds[] = {
    {"receive", 300, do_receive},
    {"send", 255, do_send},
    {"acknowledge", 65, do_acknowledge},
    {"release", 65, do_release},
    {"publish", 50, do_publish},
    {"orphan", 60, do_orphan},
    {"expire", 40, do_expire},
    {"cancel", 30, do_cancel},
    {"unsend", 30, do_unsend},
    {"end", 30, do_end},
    {"release_incarnation", 20, do_release_incarnation},
    {"withdraw", 20, do_withdraw},
    {"abort", 15, do_abort},
    {"unsubscribe", 10, do_unsubscribe},
    {"list", 5, do_list},
    {"withdraw_matching", 3, do_withdraw_matching},
    {"close", 2, do_close},
};

/* ----------------------------------------------------------------------------------------------------- compare -- */

static void compare(void)
{
    struct tl_rendezvous_stats seen, expected = model_stats();
    for (int i = 0; i < operation_count; i++) {
        const struct outcome *a = &operations[i].seen, *b = &operations[i].expected;
        require(a->count == b->count && a->code == b->code && a->value == b->value && a->is_one_shot == b->is_one_shot,
                "what a callback got");
    }
    tl_rendezvous_get_stats(table, &seen);
    require(seen.waiting_receivers == expected.waiting_receivers, "how many receivers wait");
    require(seen.held_tensors == expected.held_tensors, "how many tensors are held");
    require(seen.held_bytes == expected.held_bytes, "how many bytes are held");
    require(seen.published_tensors == expected.published_tensors, "how many tensors are published");
    require(seen.published_bytes == expected.published_bytes, "how many bytes are published");
    require(seen.dropped_tensors == expected.dropped_tensors, "how many tensors were dropped");
}

static void perform_one(void)
{
    unsigned choice = below(1000), kind = 0;
    for (; choice >= kinds[kind].weight; kind++)
        choice -= kinds[kind].weight;
    struct operation *o = &operations[operation_count++];
    *o = (struct operation){.name = kinds[kind].name,
                            .key = below(KEYS),
                            .step = below(STEPS),
                            .id = {1 + below(INCARNATIONS), 1 + below(NUMBERS)},
                            .seen.value = -1,
                            .expected.value = -1,
                            .deadline_ns = -1};
    kinds[kind].perform(o);
    compare();
}

static void explore(uint64_t seed)
{
    sequence_seed = random_state = seed;
    operation_count = 0;
    model = (struct model){.limits = {.waiting_receivers = 1 + below(8),
                                      .held_bytes = 100 + below(900),
                                      .aborted_steps = below(3),
                                      .subscription_ns = TL_NS_PER_SEC * 3600},
                           .published = {-1, -1, -1}};
    ck_assert_int_eq(tl_rendezvous_create(&model.limits, &table, NULL), TL_OK);
    while (operation_count < OPERATIONS)
        perform_one();
    close_table(TL_CANCELLED);
    compare();
    tl_rendezvous_destroy(table);
}

static void count_release(void *data, void *context)
{
    (void)data, (void)context;
    released_count++;
}

START_TEST(table_does_what_the_model_does)
{
    static char memory[OPERATIONS * 10];
    const char *text = getenv("TENSORLANE_SEED");
    uint64_t seed = text ? strtoull(text, NULL, 10) : 1;
    for (uint64_t i = 0; i < OPERATIONS; i++) {
        uint64_t size_bytes = i * 10;
        const struct tl_tensor_view view = {.size_bytes = sizeof(view),
                                            .dtype = TL_U8,
                                            .rank = 1,
                                            .dims = &size_bytes,
                                            .data = memory,
                                            .capacity_bytes = sizeof(memory),
                                            .release = count_release};
        ck_assert_int_eq(tl_tensor_wrap(&view, &tensors[i], NULL), TL_OK);
    }
    for (uint64_t i = 0; i < SEQUENCES; i++)
        explore(seed + i);
    /* The table kept none of its references, and put none twice. */
    ck_assert_int_eq(released_count, 0);
    for (int i = 0; i < OPERATIONS; i++)
        tl_tensor_put(tensors[i]);
    ck_assert_int_eq(released_count, OPERATIONS);
    /* Every kind of result occurred often. */
    static const enum tl_status codes[] = {TL_OK,         TL_CANCELLED,        TL_ABORTED,   TL_RESOURCE_EXHAUSTED,
                                           TL_INTERNAL,   TL_INVALID_ARGUMENT, TL_DATA_LOSS, TL_FAILED_PRECONDITION,
                                           TL_UNAVAILABLE};
    for (size_t i = 0; i < TL_ARRAY_COUNT(codes); i++)
        ck_assert_msg(outcome_counts[codes[i]] > 1000, "%s was the outcome %u times", tl_status_name(codes[i]),
                      outcome_counts[codes[i]]);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("rendezvous_model");
    TCase *tcase = tcase_create("model");
    tcase_set_timeout(tcase, 100);
    tcase_add_test(tcase, table_does_what_the_model_does);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
