// SPDX-License-Identifier: Apache-2.0
/*
 * The requests of the peer on a link, from their arrival until they are over: struct link_serve.
 *
 * Answers that wait must not keep versions of a published tensor that were replaced in the meantime: a peer that asks
 * for each version and takes none would keep as much memory as the worker publishes. So values are held within two
 * bounds: options.inflight_bytes for the answers of a link, and TL_REFERENCED_FACTOR times as much for those of all
 * links together. A value that would be the only one may exceed a bound. An answer beyond one of them lets its value go
 * and asks the source again when it may be sent: it gets the version that there is then. So beyond the second bound
 * each link holds what it has begun, one value at a time.
 */
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"
#include "control/link_serves.h"

/* Serves with a key of their own that is shorter than this are used again. */
#define SHORT_KEY_BYTES 64

static bool is_unsent(enum serve_state state)
{
    return state == SERVE_FENCED || state == SERVE_READY || state == SERVE_ACTIVE || state == SERVE_STAGING ||
           state == SERVE_LEAVING || state == SERVE_FAILED;
}

/* Whether what is left of the value counts as being sent. */
static bool is_active(enum serve_state state)
{
    return state == SERVE_ACTIVE || state == SERVE_STAGING;
}

/* Whether the value is held, and waits for its turn. */
static bool is_ready(const struct link_serve *entry)
{
    return entry->state == SERVE_FENCED || entry->state == SERVE_READY;
}

static uint64_t referenced_bytes(const struct tl_link *link)
{
    return link_active_bytes(link, 0) + link->answers.ready_bytes;
}

void link_serve_set_state(struct link_serve *entry, enum serve_state state)
{
    struct link_sending *sending = entry->sending;
    struct tl_link *link = entry->link;
    uint64_t before_bytes = referenced_bytes(link);
    if (is_active(entry->state)) link->answers.active_bytes[entry->priority] -= link_serve_bytes_left(entry);
    if (is_ready(entry)) link->answers.unbegun_bytes -= sending->ready_bytes;
    if (is_ready(entry) && sending->offer.tensor != NULL) link->answers.ready_bytes -= sending->ready_bytes;
    if (is_unsent(entry->state)) link->answers.unsent_count--;
    if (entry->state == SERVE_STAGING) link->answers.staging_count--;
    if (entry->state == SERVE_FENCED) link->answers.fenced_count--;
    entry->state = state;
    if (is_active(entry->state)) link->answers.active_bytes[entry->priority] += link_serve_bytes_left(entry);
    if (entry->state == SERVE_STAGING) link->answers.staging_count++;
    if (entry->state == SERVE_FENCED) link->answers.fenced_count++;
    if (is_ready(entry)) link->answers.unbegun_bytes += sending->ready_bytes;
    if (is_ready(entry) && sending->offer.tensor != NULL) link->answers.ready_bytes += sending->ready_bytes;
    if (is_unsent(entry->state)) link->answers.unsent_count++;
    link->control->referenced_bytes += referenced_bytes(link) - before_bytes;
}

/* Gives the serve what it needs to send, unless it has it. Returns false when there is no memory. */
static bool has_sending(struct link_serve *entry)
{
    if (entry->sending != NULL) return true;
    entry->sending = tl_spares_get(&entry->link->control->sendings, sizeof(struct link_sending));
    if (entry->sending != NULL) entry->sending->entry = entry;
    return entry->sending != NULL;
}

static void end_sending(struct link_serve *entry)
{
    struct link_sending *sending = entry->sending;
    if (sending == NULL) return;
    link_serve_stop_reading(entry);
    tl_tensor_put(sending->offer.tensor);
    XXH3_freeState(sending->hash_state);
    link_status_put(entry->link, sending->failure);
    tl_spares_put(&entry->link->control->sendings, sending);
}

/* Returns zeroed memory for a serve with this key; NULL: there is none. */
static struct link_serve *serve_allocate(struct tl_control *control, const struct link_key *key)
{
    struct link_serve *entry;
    if (key->is_kept) return tl_spares_get(&control->serves, sizeof(*entry));
    if (key->text_bytes >= SHORT_KEY_BYTES) return calloc(1, sizeof(*entry) + key->text_bytes + 1);
    return tl_spares_get(&control->keyed_serves, sizeof(*entry) + SHORT_KEY_BYTES);
}

static void serve_free(struct link_serve *entry)
{
    struct tl_link *link = entry->link;
    link_serve_set_state(entry, SERVE_SENT);
    tl_hash_table_remove(&link->answers.serves, &entry->hash);
    tl_list_remove(&entry->place);
    end_sending(entry);
    if (entry->serve.key != entry->own_key) {
        tl_spares_put(&link->control->serves, entry);
    } else if (strlen(entry->own_key) < SHORT_KEY_BYTES) {
        tl_spares_put(&link->control->keyed_serves, entry);
    } else {
        free(entry);
    }
}

void link_serve_end(struct link_serve *entry, enum tl_serve_end end)
{
    struct tl_control *control = entry->link->control;
    control->options.handlers->source.closed(control->options.worker, &entry->serve, end);
    serve_free(entry);
}

/* Without a status it fails for lack of memory. */
static void queue_failure(struct link_serve *entry)
{
    struct tl_link *link = entry->link;
    link_serve_set_state(entry, SERVE_FAILED);
    tl_list_remove(&entry->place);
    tl_list_push_back(&link->answers.failures, &entry->place);
    link_flush_later(link);
}

void link_serve_fail(struct link_serve *entry, const struct tl_error *status)
{
    if (entry->sending != NULL) link_serve_stop_reading(entry);
    if (has_sending(entry)) entry->sending->failure = link_status_get(entry->link, status);
    /* A final failure would end a subscription, which goes on with other values. UNAVAILABLE stays final, since the
     * peer would ask for this value again otherwise; subscriptions go on after it. */
    bool has_value = entry->sending != NULL && entry->sending->offer.tensor != NULL;
    if (has_value && status->code != TL_UNAVAILABLE) entry->serve.is_final = false;
    queue_failure(entry);
}

/* Whether there is space for a value besides those that are held. The only one may have any size. */
static bool fits(uint64_t bytes, uint64_t held, uint64_t limit)
{
    return held == 0 || (bytes <= limit && held <= limit - bytes);
}

bool link_serve_fits_link(const struct link_serve *entry, uint64_t held)
{
    return fits(entry->sending->ready_bytes, held, entry->link->control->options.inflight_bytes);
}

bool link_serve_fits_worker(const struct link_serve *entry)
{
    const struct tl_control *control = entry->link->control;
    return fits(entry->sending->ready_bytes, control->referenced_bytes,
                TL_REFERENCED_FACTOR * control->options.inflight_bytes);
}

/* Whether the answer would make the link or the worker hold too many values. One-shot values are reserved anyway. */
static bool must_let_go(const struct link_serve *entry)
{
    if (entry->sending->offer.is_one_shot || entry->is_asking_again) return false;
    return !link_serve_fits_link(entry, referenced_bytes(entry->link)) || !link_serve_fits_worker(entry);
}

void link_serve_become_ready(struct link_serve *entry)
{
    link_serve_set_state(entry, SERVE_READY);
    link_queue_push(&entry->link->answers.ready, entry);
    link_flush_later(entry->link);
}

static void serve_reply(struct tl_serve *serve, const struct tl_error *status, const struct tl_offer *offer)
{
    struct link_serve *entry = TL_CONTAINER_OF(serve, struct link_serve, serve);
    TL_CHECK(entry->state == SERVE_WAITING);
    if (status->code != TL_OK) {
        link_serve_fail(entry, status);
        return;
    }
    struct tl_error error;
    if (!has_sending(entry)) {
        tl_tensor_put(offer->tensor);
        queue_failure(entry); /* without a link_sending the value counts as not sent, and the owner keeps it */
        return;
    }
    struct link_sending *sending = entry->sending;
    sending->offer = *offer;
    sending->size_bytes = tl_tensor_size_bytes(offer->tensor);
    bool can_resume = sending->asked_publication == offer->publication && sending->resume_offset <= sending->size_bytes;
    sending->sent_bytes = can_resume ? sending->resume_offset : 0;
    sending->ready_bytes = link_serve_bytes_left(entry);
    if (entry->wants_checksum && sending->hash_state == NULL) {
        sending->hash_state = XXH3_createState();
        if (sending->hash_state == NULL) {
            tl_error_set(&error, TL_RESOURCE_EXHAUSTED, "no memory for a checksum");
            link_serve_fail(entry, &error);
            return;
        }
        XXH3_64bits_reset(sending->hash_state);
    }
    if (must_let_go(entry)) {
        tl_tensor_put(sending->offer.tensor);
        sending->offer.tensor = NULL;
    }
    if (sending->offer.tensor != NULL && tl_tensor_fence(sending->offer.tensor) != NULL) {
        link_serve_await_fence(entry);
    } else {
        link_serve_become_ready(entry);
    }
}

static const struct tl_serve_ops serve_ops = {.reply = serve_reply};

/* Notes which bytes the peer has of an earlier attempt, if any. Returns false without memory. */
static bool resume(struct link_serve *entry, const Tensorlane__V1__Request *request)
{
    if (request->publication == 0) return true;
    if (!has_sending(entry)) return false;
    entry->sending->asked_publication = request->publication;
    entry->sending->resume_offset = request->resume_offset;
    return true;
}

/* The peer chooses the numbers, and must not be able to make them collide. The highest bits of the product depend on
 * all bits of the number; they are the lowest of the hash, which choose the chain. Numbers that follow each other, as
 * most do, have chains that do: eight are in one cache line. */
uint32_t link_serve_hash(const struct tl_link *link, uint64_t number)
{
    uint32_t highest = (uint32_t)(((number >> 3) * link->answers.factor) >> 32);
    return __builtin_bswap32(highest) << 3 | (uint32_t)(number & 7);
}

static struct link_serve *serve_create(struct tl_link *link, const Tensorlane__V1__Request *request,
                                       const struct link_key *key)
{
    struct link_serve *entry = serve_allocate(link->control, key);
    if (entry == NULL) return NULL;
    if (!key->is_kept) memcpy(entry->own_key, key->text, key->text_bytes);
    entry->link = link;
    entry->wants_checksum = request->wants_checksum != 0;
    entry->priority = (uint8_t)tl_min_u64(request->priority, LINK_PRIORITIES - 1);
    entry->serve = (struct tl_serve){.ops = &serve_ops,
                                     .id = {.incarnation = link->peer.incarnation, .number = request->number},
                                     .peer = &link->peer,
                                     .key = key->is_kept ? key->text : entry->own_key,
                                     .step = request->step,
                                     .subscription = request->subscription,
                                     .takes_devices = true,
                                     .takes_runs = true};
    tl_list_init(&entry->place);
    if (resume(entry, request) &&
        tl_hash_table_add(&link->answers.serves, &entry->hash, link_serve_hash(link, request->number)))
        return entry;
    free(entry->sending);
    free(entry);
    return NULL;
}

static struct link_serve *serve_find(struct tl_link *link, uint64_t number)
{
    struct tl_hash_link *found = tl_hash_table_find(&link->answers.serves, link_serve_hash(link, number));
    for (; found != NULL; found = tl_hash_table_another(found)) {
        struct link_serve *entry = TL_CONTAINER_OF(found, struct link_serve, hash);
        if (entry->serve.id.number == number) return entry;
    }
    return NULL;
}

void link_serve_start(struct tl_link *link, const Tensorlane__V1__Request *request, const struct link_key *key)
{
    struct tl_control *control = link->control;
    if (request->number == 0 || serve_find(link, request->number) != NULL) {
        link_protocol_error(link, "request number %llu is 0 or already in use", (unsigned long long)request->number);
        return;
    }
    struct tl_error error;
    struct link_serve *entry = serve_create(link, request, key);
    if (entry == NULL) {
        tl_error_set(&error, TL_UNAVAILABLE, "%s: no memory for a request", control->options.self.name);
        tl_link_close(link, &error);
        return;
    }
    if (link->state == LINK_DRAINING) {
        tl_error_set(&error, TL_UNAVAILABLE, "%s is shutting down or uses another connection",
                     control->options.self.name);
        serve_reply(&entry->serve, &error, NULL);
        return;
    }
    control->options.handlers->source.request(control->options.worker, &entry->serve);
}

void link_serve_cancel(struct tl_link *link, uint64_t number)
{
    struct link_serve *entry = serve_find(link, number);
    if (entry != NULL) {
        link_serve_end(entry, TL_SERVE_CANCELLED);
        return;
    }
    struct tl_control *control = link->control;
    struct tl_request_id id = {.incarnation = link->peer.incarnation, .number = number};
    control->options.handlers->source.given_up(control->options.worker, &id);
}

void link_serve_received(struct tl_link *link, uint64_t number)
{
    struct tl_control *control = link->control;
    struct link_serve *entry = serve_find(link, number);
    if (entry != NULL && entry->state == SERVE_SENT) {
        link_serve_end(entry, TL_SERVE_RECEIVED);
        return;
    }
    struct tl_request_id id = {.incarnation = link->peer.incarnation, .number = number};
    control->options.handlers->source.received(control->options.worker, &id);
}

bool link_serves_break(struct tl_link *link)
{
    struct tl_quota *quota = tl_loop_quota(link->control->loop);
    struct tl_hash_link *first;
    while ((first = tl_hash_table_first_from(&link->answers.serves, &link->answers.broken_chain)) != NULL) {
        if (tl_quota_left(quota) == 0) return false;
        tl_quota_use(quota, 1);
        link_serve_end(TL_CONTAINER_OF(first, struct link_serve, hash), TL_SERVE_BROKEN);
    }
    return true;
}

void link_serve_ask_again(struct link_serve *entry)
{
    struct tl_control *control = entry->link->control;
    link_serve_set_state(entry, SERVE_WAITING);
    tl_list_remove(&entry->place);
    entry->is_asking_again = true;
    control->options.handlers->source.closed(control->options.worker, &entry->serve, TL_SERVE_CANCELLED);
    control->options.handlers->source.request(control->options.worker, &entry->serve);
    entry->is_asking_again = false;
    if (entry->state != SERVE_READY) return;
    tl_list_remove(&entry->place);
    tl_list_push_front(&entry->link->answers.ready.lists[entry->priority], &entry->place);
}
