// SPDX-License-Identifier: Apache-2.0
/*
 * The scripted source of a side: a list of values, and the open requests.
 *
 * A request is answered with the first value that it may have; otherwise it waits until there is one. A one-shot value
 * has an owner from the moment it is offered: see engine_pair.h.
 */
#include "fakes/engine_source.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "fakes/engine_pair.h"

struct value {
    struct tl_list link;
    uint64_t step;
    bool is_final;
    bool is_one_shot;
    bool is_offered;               /* An open serve has it. */
    struct tl_request_id reserved; /* The owner of a one-shot value; number 0: none. */
    struct tl_tensor *tensor;      /* NULL: the status is the answer. */
    struct tl_error status;
    char key[TL_MAX_KEY_BYTES + 1];
};

struct served {
    struct tl_list link;
    struct tl_serve *serve;
    struct value *value; /* The one-shot value that was offered; NULL: none. */
    bool is_replied;
};

static bool is_same(const struct tl_request_id *a, const struct tl_request_id *b)
{
    return a->incarnation == b->incarnation && a->number == b->number;
}

/* A value that was reserved for the request goes before others. */
static struct value *find_value(const struct engine_side *side, const struct tl_serve *serve)
{
    struct value *found = NULL;
    TL_LIST_FOREACH(&side->values, link)
    {
        struct value *value = TL_CONTAINER_OF(link, struct value, link);
        /* Tests have thousands of values with one key, so that keys are compared last. */
        bool is_wanted = serve->subscription != 0 ? value->step >= serve->step : value->step == serve->step;
        if (value->is_one_shot && (!is_wanted || value->is_offered)) continue;
        if (strcmp(value->key, serve->key) != 0) continue;
        if (!value->is_one_shot) return value;
        if (is_same(&value->reserved, &serve->id)) return value;
        if (value->reserved.number == 0 && found == NULL) found = value;
    }
    return found;
}

static void reply(struct served *served, struct value *value)
{
    static uint64_t publication;
    struct tl_serve *serve = served->serve;
    served->is_replied = true;
    if (value->tensor == NULL) {
        serve->is_final = value->is_final;
        serve->ops->reply(serve, &value->status, NULL);
        return;
    }
    if (value->is_one_shot) {
        served->value = value;
        value->is_offered = true;
        value->reserved = serve->id;
    }
    const struct tl_error ok = {.code = TL_OK};
    const struct tl_offer offer = {.tensor = tl_tensor_get(value->tensor),
                                   .step = value->step,
                                   .publication = ++publication,
                                   .is_one_shot = value->is_one_shot};
    serve->ops->reply(serve, &ok, &offer);
}

static void maybe_reply(struct engine_side *side, struct served *served)
{
    struct value *value = served->is_replied ? NULL : find_value(side, served->serve);
    if (value != NULL) reply(served, value);
}

static void request(void *context, struct tl_serve *serve)
{
    struct engine_side *side = context;
    TL_CHECK(serve->key[0] != '\0' && serve->id.number != 0 && serve->peer != NULL);
    TL_CHECK(serve->id.incarnation == serve->peer->incarnation);
    struct served *served = calloc(1, sizeof(*served));
    TL_CHECK(served != NULL);
    served->serve = serve;
    serve->source_state = served;
    tl_list_push_back(&side->serves, &served->link);
    side->open_serve_count++;
    maybe_reply(side, served);
}

static void prefetch(void *context, const struct tl_key_text *keys, size_t count)
{
    struct engine_side *side = context;
    TL_CHECK(count > 1);
    for (size_t i = 0; i < count; i++)
        TL_CHECK(keys[i].text_bytes > 0 && memchr(keys[i].text, '\0', keys[i].text_bytes) == NULL);
    side->prefetched_count += (unsigned)count;
}

static void value_free(struct value *value)
{
    tl_list_remove(&value->link);
    tl_tensor_put(value->tensor);
    free(value);
}

static void answer_waiting(struct engine_side *side)
{
    TL_LIST_FOREACH_SAFE(&side->serves, link)
    {
        maybe_reply(side, TL_CONTAINER_OF(link, struct served, link));
    }
}

static void closed(void *context, struct tl_serve *serve, enum tl_serve_end end)
{
    struct engine_side *side = context;
    struct served *served = serve->source_state;
    TL_CHECK(served != NULL && served->serve == serve && tl_list_is_linked(&served->link));
    TL_CHECK(served->is_replied || end != TL_SERVE_RECEIVED);
    struct value *value = served->value;
    tl_list_remove(&served->link);
    free(served);
    side->open_serve_count--;
    side->ended_counts[end]++;
    side->last_end = end;
    if (value == NULL) return;
    value->is_offered = false;
    if (end == TL_SERVE_RECEIVED) value_free(value);
    if (end != TL_SERVE_CANCELLED) return;
    value->reserved = (struct tl_request_id){0};
    answer_waiting(side);
}

static void received(void *context, const struct tl_request_id *id)
{
    (void)context;
    TL_CHECK(id->number != 0);
}

const struct tl_source_ops engine_source_ops = {
    .request = request, .prefetch = prefetch, .closed = closed, .received = received};

static struct value *add_value(struct engine_side *side, const char *key, uint64_t step, struct tl_tensor *tensor)
{
    struct value *value = calloc(1, sizeof(*value));
    TL_CHECK(value != NULL);
    snprintf(value->key, sizeof(value->key), "%s", key);
    value->step = step;
    value->tensor = tensor;
    tl_list_push_back(&side->values, &value->link);
    return value;
}

/* Drops the values of the key that are not one-shot. */
static void forget(struct engine_side *side, const char *key)
{
    TL_LIST_FOREACH_SAFE(&side->values, link)
    {
        struct value *value = TL_CONTAINER_OF(link, struct value, link);
        if (!value->is_one_shot && strcmp(value->key, key) == 0) value_free(value);
    }
}

void engine_side_send(struct engine_side *side, const char *key, uint64_t step, struct tl_tensor *tensor)
{
    add_value(side, key, step, tensor)->is_one_shot = true;
    answer_waiting(side);
}

void engine_side_publish(struct engine_side *side, const char *key, uint64_t step, struct tl_tensor *tensor)
{
    forget(side, key);
    (void)add_value(side, key, step, tensor);
    answer_waiting(side);
}

void engine_side_refuse(struct engine_side *side, const char *key, enum tl_status code, const char *text, bool is_final)
{
    forget(side, key);
    struct value *value = add_value(side, key, 0, NULL);
    tl_error_set(&value->status, code, "%s", text);
    value->is_final = is_final;
    answer_waiting(side);
}

unsigned engine_side_values(const struct engine_side *side)
{
    unsigned count = 0;
    TL_LIST_FOREACH(&side->values, link)
    {
        if (TL_CONTAINER_OF(link, struct value, link)->is_one_shot) count++;
    }
    return count;
}

bool engine_side_has(const struct engine_side *side, const char *key, uint64_t step)
{
    TL_LIST_FOREACH(&side->values, link)
    {
        const struct value *value = TL_CONTAINER_OF(link, struct value, link);
        if (value->is_one_shot && value->step == step && strcmp(value->key, key) == 0) return true;
    }
    return false;
}

void engine_source_fini(struct engine_side *side)
{
    TL_LIST_FOREACH_SAFE(&side->values, link)
    {
        value_free(TL_CONTAINER_OF(link, struct value, link));
    }
}
