// SPDX-License-Identifier: Apache-2.0
/*
 * The parts of the rendezvous table and its indexes; see rendezvous_table.h. Nothing here decides who gets what.
 *
 * Without memory nothing is added and everything is as before. Taking something out always succeeds.
 */
#include "server/rendezvous/rendezvous_table.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/check.h"
#include "base/error.h"

static const struct tl_error no_error = {.code = TL_OK};

/* -------------------------------------------------------------------------------------- mutex and deferred_calls -- */

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
    tl_table_unlock(table);
    for (struct tl_list *link; (link = tl_list_pop_front(deferred_calls));) {
        struct tl_table_deferred_call *deferred_call = TL_CONTAINER_OF(link, struct tl_table_deferred_call, link);
        deferred_call->run(deferred_call);
    }
}

static void defer_call(struct tl_list *deferred_calls, struct tl_table_deferred_call *deferred_call,
                       void (*run)(struct tl_table_deferred_call *deferred_call))
{
    deferred_call->run = run;
    tl_list_push_back(deferred_calls, &deferred_call->link);
}

uint64_t tl_table_next_publication(struct tl_rendezvous *table)
{
    if (++table->last_publication == 0) table->last_publication = 1;
    return table->last_publication;
}

/* uthash's macros evaluate the hash more than once, so it goes into a variable first. */
static unsigned hash_of(const struct tl_rendezvous *table, const void *data, size_t len_bytes)
{
    return (unsigned)XXH3_64bits_withSeed(data, len_bytes, table->hash_seed);
}

/* ------------------------------------------------------------------------------------------------------- names -- */

struct tl_table_name *tl_table_name_find(struct tl_rendezvous *table, const char *key)
{
    struct tl_table_name *name;
    size_t len = strlen(key);
    unsigned hash = hash_of(table, key, len);
    HASH_FIND_BYHASHVALUE(hh, table->names, key, len, hash, name);
    return name;
}

struct tl_table_name *tl_table_name_get(struct tl_rendezvous *table, const char *key)
{
    struct tl_table_name *name;
    size_t len = strlen(key);
    unsigned hash = hash_of(table, key, len);
    HASH_FIND_BYHASHVALUE(hh, table->names, key, len, hash, name);
    if (name == NULL) {
        name = malloc(sizeof(*name) + len + 1);
        if (name == NULL) return NULL;
        memset(name, 0, sizeof(*name));
        memcpy(name->key, key, len + 1);
        tl_list_init(&name->places);
        HASH_ADD_KEYPTR_BYHASHVALUE(hh, table->names, name->key, len, hash, name);
        if (name->hh.tbl == NULL) {
            free(name);
            return NULL;
        }
    }
    name->use_count++;
    return name;
}

void tl_table_name_put(struct tl_rendezvous *table, struct tl_table_name *name)
{
    if (--name->use_count > 0) return;
    HASH_DELETE(hh, table->names, name);
    free(name);
}

/* ------------------------------------------------------------------------------------------------------ places -- */

struct tl_table_place *tl_table_place_find(struct tl_rendezvous *table, struct tl_table_name *name, uint64_t step)
{
    struct tl_table_place *place;
    const struct tl_table_place_id id = {.name = (uintptr_t)name, .step = step};
    unsigned hash = hash_of(table, &id, sizeof(id));
    HASH_FIND_BYHASHVALUE(hh, table->places, &id, sizeof(id), hash, place);
    return place;
}

struct tl_table_place *tl_table_place_get(struct tl_rendezvous *table, const char *key, uint64_t step)
{
    struct tl_table_name *name = tl_table_name_get(table, key);
    if (name == NULL) return NULL;
    struct tl_table_place *place = tl_table_place_find(table, name, step);
    if (place) {
        tl_table_name_put(table, name);
        place->use_count++;
        return place;
    }
    place = calloc(1, sizeof(*place));
    if (place == NULL) goto fail;
    place->id = (struct tl_table_place_id){.name = (uintptr_t)name, .step = step};
    place->use_count = 1;
    place->name = name;
    tl_list_init(&place->waiters);
    unsigned hash = hash_of(table, &place->id, sizeof(place->id));
    HASH_ADD_KEYPTR_BYHASHVALUE(hh, table->places, &place->id, sizeof(place->id), hash, place);
    if (place->hh.tbl == NULL) goto fail;
    tl_list_push_back(&name->places, &place->name_link);
    return place;
fail:
    free(place);
    tl_table_name_put(table, name);
    return NULL;
}

void tl_table_place_put(struct tl_rendezvous *table, struct tl_table_place *place)
{
    if (--place->use_count > 0) return;
    HASH_DELETE(hh, table->places, place);
    tl_list_remove(&place->name_link);
    tl_table_name_put(table, place->name);
    free(place);
}

/* ------------------------------------------------------------------------------------------------------- steps -- */

struct tl_table_step *tl_table_step_find(struct tl_rendezvous *table, uint64_t step)
{
    struct tl_table_step *found;
    unsigned hash = hash_of(table, &step, sizeof(step));
    HASH_FIND_BYHASHVALUE(hh, table->steps, &step, sizeof(step), hash, found);
    return found;
}

struct tl_table_step *tl_table_step_get(struct tl_rendezvous *table, uint64_t number)
{
    struct tl_table_step *step = tl_table_step_find(table, number);
    if (step == NULL) {
        step = calloc(1, sizeof(*step));
        if (step == NULL) return NULL;
        step->step = number;
        tl_list_init(&step->values);
        tl_list_init(&step->waiters);
        tl_list_init(&step->mark_link);
        unsigned hash = hash_of(table, &step->step, sizeof(step->step));
        HASH_ADD_KEYPTR_BYHASHVALUE(hh, table->steps, &step->step, sizeof(step->step), hash, step);
        if (step->hh.tbl == NULL) {
            free(step);
            return NULL;
        }
    }
    step->use_count++;
    return step;
}

void tl_table_step_put(struct tl_rendezvous *table, struct tl_table_step *step)
{
    if (--step->use_count > 0) return;
    HASH_DELETE(hh, table->steps, step);
    free(step);
}

bool tl_table_step_mark(struct tl_rendezvous *table, uint64_t number, const struct tl_error *status)
{
    if (table->limits.aborted_steps == 0) return true;
    struct tl_table_step *step = tl_table_step_find(table, number);
    if (step == NULL || step->mark == NULL) {
        step = tl_table_step_get(table, number);
        if (step == NULL) return false;
        step->mark = malloc(sizeof(*step->mark));
        if (step->mark == NULL) {
            tl_table_step_put(table, step);
            return false;
        }
        table->mark_count++;
    }
    *step->mark = *status;
    tl_list_remove(&step->mark_link);
    tl_list_push_back(&table->marks, &step->mark_link);
    if (table->mark_count > table->limits.aborted_steps)
        tl_table_step_unmark(table, TL_CONTAINER_OF(table->marks.next, struct tl_table_step, mark_link));
    return true;
}

void tl_table_step_unmark(struct tl_rendezvous *table, struct tl_table_step *step)
{
    if (step->mark == NULL) return;
    free(step->mark);
    step->mark = NULL;
    tl_list_remove(&step->mark_link);
    table->mark_count--;
    tl_table_step_put(table, step);
}

/* ------------------------------------------------------------------------------------------------------ values -- */

struct tl_table_value *tl_table_value_add(struct tl_rendezvous *table, struct tl_table_place *place,
                                          struct tl_tensor *tensor, struct tl_sender *sender)
{
    struct tl_table_value *value = calloc(1, sizeof(*value));
    if (value == NULL) return NULL;
    value->step = tl_table_step_get(table, place->id.step);
    if (value->step == NULL) {
        free(value);
        return NULL;
    }
    value->sender = sender;
    value->tensor = tl_tensor_get(tensor);
    value->size_bytes = tl_tensor_size_bytes(tensor);
    value->publication = tl_table_next_publication(table);
    value->name = place->name;
    value->name->use_count++;
    value->place = place;
    place->use_count++;
    place->value = value;
    tl_list_push_back(&value->step->values, &value->step_link);
    tl_list_init(&value->orphan_link);
    sender->entry = value;
    table->stats.held_tensors++;
    table->stats.held_bytes += value->size_bytes;
    return value;
}

struct tl_table_value *tl_table_value_find(struct tl_rendezvous *table, const struct tl_request_id *id)
{
    struct tl_table_value *value;
    unsigned hash = hash_of(table, id, sizeof(*id));
    HASH_FIND_BYHASHVALUE(hh, table->reservations, id, sizeof(*id), hash, value);
    return value;
}

bool tl_table_value_reserve(struct tl_rendezvous *table, struct tl_table_value *value, const struct tl_request_id *id)
{
    value->id = *id;
    value->holder_count = 0;
    unsigned hash = hash_of(table, &value->id, sizeof(value->id));
    HASH_ADD_KEYPTR_BYHASHVALUE(hh, table->reservations, &value->id, sizeof(value->id), hash, value);
    value->is_reserved = value->hh.tbl != NULL;
    return value->is_reserved;
}

void tl_table_value_unreserve(struct tl_rendezvous *table, struct tl_table_value *value)
{
    if (!value->is_reserved) return;
    HASH_DELETE(hh, table->reservations, value);
    tl_list_remove(&value->orphan_link);
    value->is_reserved = false;
}

void tl_table_value_orphan(struct tl_rendezvous *table, struct tl_table_value *value, int64_t deadline_ns)
{
    if (value->holder_count > 0 && --value->holder_count > 0) return;
    tl_list_remove(&value->orphan_link);
    value->deadline_ns = deadline_ns;
    /* Deadlines nearly always come in order. */
    struct tl_list *place = &table->orphans;
    while (place->prev != &table->orphans &&
           TL_CONTAINER_OF(place->prev, struct tl_table_value, orphan_link)->deadline_ns > deadline_ns)
        place = place->prev;
    tl_list_insert_before(place, &value->orphan_link);
}

void tl_table_value_detach(struct tl_rendezvous *table, struct tl_table_value *value)
{
    if (value->place == NULL) return;
    value->place->value = NULL;
    tl_table_place_put(table, value->place);
    value->place = NULL;
}

void tl_table_value_offer(struct tl_table_value *value, struct tl_offer *ret_offer)
{
    tl_list_remove(&value->orphan_link);
    value->holder_count++;
    *ret_offer = (struct tl_offer){.tensor = tl_tensor_get(value->tensor),
                                   .step = value->step->step,
                                   .publication = value->publication,
                                   .is_one_shot = true};
}

void tl_table_value_remove(struct tl_rendezvous *table, struct tl_table_value *value)
{
    tl_table_value_unreserve(table, value);
    tl_table_value_detach(table, value);
    tl_list_remove(&value->step_link);
    tl_table_step_put(table, value->step);
    tl_table_name_put(table, value->name);
    value->sender->entry = NULL;
    table->stats.held_tensors--;
    table->stats.held_bytes -= value->size_bytes;
}

/* The sender may be gone as soon as it was called; so may the table. */
static void run_over(struct tl_table_deferred_call *deferred_call)
{
    struct tl_table_value *value = TL_CONTAINER_OF(deferred_call, struct tl_table_value, deferred_call);
    struct tl_sender *sender = value->sender;
    const struct tl_error *status = value->status;
    tl_tensor_put(value->tensor);
    free(value);
    sender->over(sender, status);
}

void tl_table_value_conclude(struct tl_rendezvous *table, struct tl_table_value *value, const struct tl_error *status,
                             struct tl_list *deferred_calls)
{
    tl_table_value_remove(table, value);
    value->status = status ? status : &no_error;
    defer_call(deferred_calls, &value->deferred_call, run_over);
}

/* ----------------------------------------------------------------------------------------------------- waiters -- */

struct tl_table_waiter *tl_table_waiter_add(struct tl_rendezvous *table, struct tl_receiver *receiver,
                                            struct tl_share *share)
{
    struct tl_table_waiter *waiter = calloc(1, sizeof(*waiter));
    if (waiter == NULL) return NULL;
    waiter->receiver = receiver;
    waiter->id = receiver->id;
    waiter->place = tl_table_place_get(table, receiver->key, receiver->step);
    if (waiter->place == NULL) goto fail;
    waiter->step = tl_table_step_get(table, receiver->step);
    if (waiter->step == NULL) goto fail;
    unsigned hash = hash_of(table, &waiter->id, sizeof(waiter->id));
    HASH_ADD_KEYPTR_BYHASHVALUE(hh, table->waiters, &waiter->id, sizeof(waiter->id), hash, waiter);
    if (waiter->hh.tbl == NULL) goto fail;
    tl_list_push_back(&waiter->place->waiters, &waiter->place_link);
    tl_list_push_back(&waiter->step->waiters, &waiter->step_link);
    waiter->share = share;
    if (share == NULL) table->own_waiting++;
    receiver->entry = waiter;
    table->stats.waiting_receivers++;
    return waiter;
fail:
    if (waiter->step) tl_table_step_put(table, waiter->step);
    if (waiter->place) tl_table_place_put(table, waiter->place);
    free(waiter);
    return NULL;
}

struct tl_table_waiter *tl_table_waiter_find(struct tl_rendezvous *table, const struct tl_request_id *id)
{
    struct tl_table_waiter *waiter;
    unsigned hash = hash_of(table, id, sizeof(*id));
    HASH_FIND_BYHASHVALUE(hh, table->waiters, id, sizeof(*id), hash, waiter);
    return waiter;
}

void tl_table_waiter_remove(struct tl_rendezvous *table, struct tl_table_waiter *waiter)
{
    HASH_DELETE(hh, table->waiters, waiter);
    tl_list_remove(&waiter->place_link);
    tl_list_remove(&waiter->step_link);
    tl_table_place_put(table, waiter->place);
    tl_table_step_put(table, waiter->step);
    waiter->receiver->entry = NULL;
    table->stats.waiting_receivers--;
    if (waiter->share != NULL) {
        tl_shares_give(waiter->share, 1);
    } else {
        table->own_waiting--;
    }
}

/* The receiver may be gone as soon as it was called; so may the table. */
static void run_deliver(struct tl_table_deferred_call *deferred_call)
{
    struct tl_table_waiter *waiter = TL_CONTAINER_OF(deferred_call, struct tl_table_waiter, deferred_call);
    struct tl_receiver *receiver = waiter->receiver;
    const struct tl_error *status = waiter->status;
    const struct tl_offer offer = waiter->offer;
    free(waiter);
    receiver->deliver(receiver, status, status->code == TL_OK ? &offer : NULL);
}

void tl_table_waiter_conclude(struct tl_rendezvous *table, struct tl_table_waiter *waiter,
                              const struct tl_error *status, struct tl_list *deferred_calls)
{
    tl_table_waiter_remove(table, waiter);
    waiter->status = status ? status : &no_error;
    defer_call(deferred_calls, &waiter->deferred_call, run_deliver);
}

/* ------------------------------------------------------------------------------------------------ publications -- */

void tl_table_publication_offer(const struct tl_table_publication *publication, struct tl_offer *ret_offer)
{
    *ret_offer = (struct tl_offer){.tensor = tl_tensor_get(publication->tensor),
                                   .step = publication->step,
                                   .publication = publication->number,
                                   .is_one_shot = false};
}

static void run_put(struct tl_table_deferred_call *deferred_call)
{
    struct tl_table_publication *publication =
        TL_CONTAINER_OF(deferred_call, struct tl_table_publication, deferred_call);
    tl_tensor_put(publication->tensor);
    free(publication);
}

void tl_table_publication_end(struct tl_rendezvous *table, struct tl_table_publication *publication,
                              struct tl_list *deferred_calls)
{
    publication->name->publication = NULL;
    TL_LIST_FOREACH(&table->walks, link)
    {
        struct tl_table_walk *walk = TL_CONTAINER_OF(link, struct tl_table_walk, link);
        if (walk->next == &publication->link) walk->next = publication->link.next;
    }
    tl_list_remove(&publication->link);
    tl_table_name_put(table, publication->name);
    table->stats.published_tensors--;
    table->stats.published_bytes -= publication->size_bytes;
    defer_call(deferred_calls, &publication->deferred_call, run_put);
}
