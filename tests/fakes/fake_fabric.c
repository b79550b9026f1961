// SPDX-License-Identifier: Apache-2.0
/*
 * The cable and the two cards: one step carries the first operation of a queue pair to its peer.
 *
 * A step looks at the fault of the operation, then does what the card would do: it binds or unbinds a window, or finds
 * the peer, its slot and its memory, copies the bytes and queues the events. The operation is then done. An operation
 * that cannot be carried holds the queue pair (HELD: steps alone change nothing), is tried again (TRIED), or breaks it.
 *
 * A broken queue pair cancels one operation with each step. An operation that was late leaves a copy of itself and its
 * bytes behind, which arrives at the target as long as that is not drained.
 */
#include "fakes/fake_fabric.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"

/* Writes and reads of at least so many bytes are large. */
#define HOLLOW_BYTES (1 << 17)

enum outcome { HELD, TRIED, CARRIED };
enum arrival { ARRIVED, NO_SLOT, NO_ACCESS };

#define LOCK(fabric) TL_CHECK(pthread_mutex_lock(&(fabric)->mutex) == 0)
#define UNLOCK(fabric) TL_CHECK(pthread_mutex_unlock(&(fabric)->mutex) == 0)

void *fake_alloc(size_t len_bytes)
{
    void *memory = calloc(1, len_bytes > 0 ? len_bytes : 1);
    TL_CHECK(memory != NULL);
    return memory;
}

struct fake_provider *fake_provider_of(const struct fake_pair *pair)
{
    return (struct fake_provider *)pair->base.provider;
}

struct fake_pair *fake_find_pair(struct fake_fabric *fabric, uint64_t number)
{
    TL_LIST_FOREACH(&fabric->pairs, link)
    {
        struct fake_pair *pair = TL_CONTAINER_OF(link, struct fake_pair, link);
        if (pair->number == number) return pair;
    }
    return NULL;
}

bool fake_parse_address(const struct tl_descriptor *descriptor, struct fake_address *ret_address)
{
    struct fake_address address;
    if (descriptor == NULL || descriptor->len_bytes != sizeof(address)) return false;
    memcpy(&address, descriptor->bytes, sizeof(address));
    if (address.magic != FAKE_ADDRESS_MAGIC) return false;
    *ret_address = address;
    return true;
}

void fake_operation_free(struct fake_operation *operation)
{
    if (operation == NULL) return;
    free(operation->copy);
    free(operation);
}

/* ------------------------------------------------------------------------------------------------------ events -- */

void fake_signal(struct fake_provider *provider)
{
    uint64_t one = 1;
    if (!provider->is_armed || provider->base.fd < 0) return;
    provider->is_armed = false;
    TL_CHECK(write(provider->base.fd, &one, sizeof(one)) == sizeof(one));
}

static struct fake_event *new_event(struct fake_pair *pair, enum fake_event_kind kind)
{
    struct fake_event *event = fake_alloc(sizeof(*event));
    event->pair = pair;
    event->kind = kind;
    return event;
}

void fake_push_event(struct fake_event *event)
{
    struct fake_provider *provider = fake_provider_of(event->pair);
    tl_list_push_back(&provider->events, &event->link);
    fake_signal(provider);
}

static void push_done(struct fake_pair *pair, struct fake_operation *operation, enum tl_status status)
{
    struct fake_event *event = new_event(pair, EVENT_DONE);
    event->operation = operation;
    event->status = status;
    tl_list_remove(&operation->link);
    fake_push_event(event);
}

static void push_broken(struct fake_pair *pair)
{
    if (pair->is_break_queued) return;
    pair->is_break_queued = true;
    fake_push_event(new_event(pair, EVENT_BROKEN));
}

void fake_break(struct fake_pair *pair, const struct tl_error *reason)
{
    if (pair->state == PAIR_BROKEN || pair->state == PAIR_DRAINED) return;
    pair->state = PAIR_BROKEN;
    pair->reason = *reason;
    if (!fake_provider_of(pair)->fabric->options.is_flushed_first) push_broken(pair);
    fake_signal(fake_provider_of(pair));
}

static void break_with(struct fake_pair *pair, const char *why)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "%s: queue pair %llu: %s", pair->base.provider->name,
                 (unsigned long long)pair->number, why);
    fake_break(pair, &reason);
}

void fake_break_all(struct fake_provider *provider, const char *why)
{
    TL_LIST_FOREACH(&provider->fabric->pairs, link)
    {
        struct fake_pair *pair = TL_CONTAINER_OF(link, struct fake_pair, link);
        if (fake_provider_of(pair) == provider) break_with(pair, why);
    }
}

/* ----------------------------------------------------------------------------------------------------- arrival -- */

void *fake_reach(const struct fake_fabric *fabric, const void *memory)
{
    return fabric->reach != NULL ? fabric->reach(memory) : (void *)(uintptr_t)memory;
}

static bool is_within(uint64_t start, uint64_t len_bytes, uint64_t outer_start, uint64_t outer_len_bytes)
{
    return start >= outer_start && len_bytes <= outer_len_bytes && start - outer_start <= outer_len_bytes - len_bytes;
}

/* The bytes of a read come from the peer. Returns false when they may not. */
static bool fetch_bytes(struct fake_pair *target, const struct fake_operation *operation)
{
    struct fake_address address;
    uint64_t start;
    if (!fake_parse_address(&operation->destination, &address)) return false;
    if (__builtin_add_overflow(address.address, operation->offset_bytes, &start)) return false;
    TL_LIST_FOREACH(&target->windows, link)
    {
        const struct fake_window *window = TL_CONTAINER_OF(link, struct fake_window, link);
        if (window->key != address.key || !window->is_bound || !window->is_source) continue;
        if (!is_within(start, operation->len_bytes, (uintptr_t)window->address, window->len_bytes)) return false;
        bool is_moved = !fake_provider_of(target)->fabric->options.is_hollow || operation->len_bytes < HOLLOW_BYTES;
        const struct fake_fabric *fabric = fake_provider_of(target)->fabric;
        uint8_t *to = fake_reach(fabric, operation->target_memory);
        if (is_moved) memcpy(to, fake_reach(fabric, (const void *)(uintptr_t)start), operation->len_bytes);
        if (operation->fault == FAKE_CORRUPT) *to ^= 1;
        return true;
    }
    return false;
}

static bool is_writable(const struct fake_pair *target, const struct fake_address *address, uint64_t start,
                        uint64_t len_bytes)
{
    TL_LIST_FOREACH(&target->windows, link)
    {
        const struct fake_window *window = TL_CONTAINER_OF(link, struct fake_window, link);
        if (window->key != address->key || !window->is_bound || !window->is_writable) continue;
        return is_within(start, len_bytes, (uintptr_t)window->address, window->len_bytes);
    }
    if (target->options.keys == TL_KEYS_WINDOW) return false;
    TL_LIST_FOREACH(&fake_provider_of(target)->regions, link)
    {
        const struct fake_region *region = TL_CONTAINER_OF(link, struct fake_region, link);
        if (region->key != address->key || region->base.access != TL_REGION_WRITE) continue;
        return is_within(start, len_bytes, (uintptr_t)region->base.address, region->base.len_bytes);
    }
    return false;
}

/* The bytes of a write arrive. Returns false when they may not. */
static bool land(struct fake_pair *target, const struct fake_operation *operation, const void *bytes)
{
    struct fake_address address;
    struct fake_provider *provider = fake_provider_of(target);
    uint64_t start;
    if (operation->len_bytes > 0) {
        if (!fake_parse_address(&operation->destination, &address)) return false;
        if (__builtin_add_overflow(address.address, operation->offset_bytes, &start)) return false;
        if (!is_writable(target, &address, start, operation->len_bytes)) return false;
        bool is_moved = !provider->fabric->options.is_hollow || operation->len_bytes < HOLLOW_BYTES;
        uint8_t *to = fake_reach(provider->fabric, (const void *)(uintptr_t)start);
        if (is_moved) memcpy(to, bytes, operation->len_bytes);
        if (operation->fault == FAKE_CORRUPT) *to ^= 1;
    }
    provider->fabric->writes[operation->write_place].has_landed = true;
    return true;
}

static bool needs_slot(const struct fake_operation *operation)
{
    return operation->kind == FAKE_MESSAGE || operation->has_immediate;
}

/* A message or a write arrives at a queue pair. A broken one takes the bytes, and raises no event. */
static enum arrival arrive(struct fake_pair *target, const struct fake_operation *operation, const void *bytes)
{
    bool tells = needs_slot(operation) && target->state == PAIR_CONNECTED;
    if (tells && target->slots_free == 0) return NO_SLOT;
    if (operation->kind == FAKE_WRITE && !land(target, operation, bytes)) return NO_ACCESS;
    if (operation->kind == FAKE_READ && !fetch_bytes(target, operation)) return NO_ACCESS;
    if (!tells) return ARRIVED;
    target->slots_free--;
    struct fake_counters *counters = &fake_provider_of(target)->counters;
    counters->slots_taken++;
    counters->slots_out++;
    struct fake_event *event = new_event(target, operation->has_immediate ? EVENT_IMMEDIATE : EVENT_MESSAGE);
    event->len_bytes = operation->len_bytes;
    event->immediate = operation->immediate;
    if (operation->kind == FAKE_MESSAGE) {
        event->data = malloc(operation->len_bytes > 0 ? operation->len_bytes : 1);
        TL_CHECK(event->data != NULL);
        memcpy(event->data, bytes, operation->len_bytes);
    }
    fake_push_event(event);
    return ARRIVED;
}

/* ---------------------------------------------------------------------------------------------------- carrying -- */

static void count_carried(struct fake_counters *counters, const struct fake_operation *operation)
{
    if (operation->kind == FAKE_MESSAGE) counters->messages++;
    if (operation->kind == FAKE_READ) {
        counters->reads++;
        counters->read_bytes += operation->len_bytes;
    }
    if (operation->kind != FAKE_WRITE) return;
    counters->writes++;
    counters->write_bytes += operation->len_bytes;
    if (operation->has_immediate) counters->immediates++;
}

/* The peer has no slot, or seems to have none. */
static enum outcome receiver_not_ready(struct fake_pair *pair, struct fake_pair *peer, struct fake_operation *operation)
{
    struct fake_provider *provider = fake_provider_of(pair);
    provider->counters.rnr_tries++;
    if (++operation->rnr_count <= provider->fabric->options.rnr_tries) return TRIED;
    break_with(pair, "receiver not ready, retry counter exceeded");
    break_with(peer, "the peer found no slot posted");
    return CARRIED;
}

static bool seems_not_ready(struct fake_operation *operation)
{
    if (operation->fault != FAKE_RNR || !needs_slot(operation)) return false;
    if (operation->fault_count == 0) return true;
    if (--operation->fault_count == 0) operation->fault = FAKE_FAULT_COUNT;
    return true;
}

/* The operation has been carried. */
static enum outcome complete(struct fake_pair *pair, struct fake_operation *operation)
{
    if (operation->fault == FAKE_LOSE_ACK) {
        operation->fault = FAKE_DROP;
        return CARRIED;
    }
    push_done(pair, operation, TL_OK);
    pair->rung_count--;
    return CARRIED;
}

static enum outcome carry_to_peer(struct fake_pair *pair, struct fake_operation *operation)
{
    struct fake_provider *provider = fake_provider_of(pair);
    struct fake_pair *peer = fake_find_pair(provider->fabric, pair->peer_number);
    if (peer != NULL && peer->state == PAIR_CREATED) return HELD;
    if (peer == NULL || peer->state != PAIR_CONNECTED || peer->peer_number != pair->number) {
        break_with(pair, "transport retry counter exceeded: the peer does not answer");
        return CARRIED;
    }
    const void *bytes =
        operation->kind == FAKE_MESSAGE ? operation->copy : fake_reach(provider->fabric, operation->source);
    enum arrival arrival = seems_not_ready(operation) ? NO_SLOT : arrive(peer, operation, bytes);
    if (arrival == NO_SLOT) return receiver_not_ready(pair, peer, operation);
    if (arrival == NO_ACCESS) {
        break_with(pair, "remote access error: the peer does not let us write there");
        break_with(peer, "the peer wrote where it may not");
        return CARRIED;
    }
    count_carried(&provider->counters, operation);
    return complete(pair, operation);
}

static enum outcome carry_first(struct fake_pair *pair)
{
    struct fake_operation *operation = TL_CONTAINER_OF(pair->operations.next, struct fake_operation, link);
    switch (operation->fault) {
    case FAKE_DROP:
    case FAKE_LATE:
        return HELD;
    case FAKE_DELAY:
        if (operation->fault_count-- > 0) return TRIED;
        operation->fault = FAKE_FAULT_COUNT;
        break;
    case FAKE_BREAK:
        break_with(pair, "work completion with an error");
        return CARRIED;
    case FAKE_UNANSWERED: {
        struct tl_error reason;
        tl_error_set(&reason, TL_DEADLINE_EXCEEDED, "%s: the peer's card does not answer", pair->base.provider->name);
        fake_break(pair, &reason);
        return CARRIED;
    }
    case FAKE_CQ_OVERRUN:
        fake_break_all(fake_provider_of(pair), "the completion queue has overrun");
        return CARRIED;
    case FAKE_DEVICE_GONE:
        fake_provider_of(pair)->is_gone = true;
        fake_break_all(fake_provider_of(pair), "the device is gone");
        return CARRIED;
    default:
        break;
    }
    if (operation->window == NULL) return carry_to_peer(pair, operation);
    operation->window->is_bound = operation->kind == FAKE_BIND;
    return complete(pair, operation);
}

/* Keeps the bytes that the peer will still get from an operation that is cancelled here. */
static void leave_behind(struct fake_pair *pair, const struct fake_operation *operation)
{
    struct fake_provider *provider = fake_provider_of(pair);
    struct fake_operation *late = fake_alloc(sizeof(*late));
    *late = *operation;
    late->work = NULL;
    late->region = NULL;
    late->target = pair->peer_number;
    late->copy = fake_alloc(operation->len_bytes);
    const void *bytes =
        operation->kind == FAKE_MESSAGE ? operation->copy : fake_reach(provider->fabric, operation->source);
    if (operation->len_bytes > 0) memcpy(late->copy, bytes, operation->len_bytes);
    tl_list_push_back(&provider->fabric->late, &late->link);
    struct fake_pair *target = fake_find_pair(provider->fabric, late->target);
    if (target != NULL) fake_signal(fake_provider_of(target));
}

static enum outcome flush(struct fake_pair *pair)
{
    if (!tl_list_is_empty(&pair->operations)) {
        struct fake_operation *operation = TL_CONTAINER_OF(pair->operations.next, struct fake_operation, link);
        bool travels = operation->kind == FAKE_MESSAGE || operation->kind == FAKE_WRITE;
        if (operation->fault == FAKE_LATE && travels) leave_behind(pair, operation);
        push_done(pair, operation, TL_CANCELLED);
        return CARRIED;
    }
    push_broken(pair);
    /* The owner may post more until it knows. */
    if (!pair->is_break_reported) return HELD;
    pair->state = PAIR_DRAINED;
    fake_push_event(new_event(pair, EVENT_DRAINED));
    return CARRIED;
}

static enum outcome step(struct fake_pair *pair)
{
    if (pair->state == PAIR_BROKEN) return flush(pair);
    if (pair->state != PAIR_CONNECTED || pair->rung_count == 0) return HELD;
    return carry_first(pair);
}

/* -------------------------------------------------------------------------------------------------------- late -- */

static void land_late(struct fake_fabric *fabric, struct fake_operation *late)
{
    struct fake_pair *target = fake_find_pair(fabric, late->target);
    tl_list_remove(&late->link);
    if (target != NULL) {
        struct fake_counters *counters = &fake_provider_of(target)->counters;
        bool is_reachable = target->peer_number != 0 && !target->is_drain_reported;
        enum arrival arrival = is_reachable ? arrive(target, late, late->copy) : NO_SLOT;
        if (arrival == NO_ACCESS) break_with(target, "the peer wrote where it may not");
        if (arrival == ARRIVED) counters->late_landed++;
        if (arrival != ARRIVED) counters->late_refused++;
    }
    fake_operation_free(late);
}

/* The call is about one provider's queue pairs, or about a queue pair that has gone. */
static bool land_all_late(struct fake_fabric *fabric, const struct fake_provider *provider)
{
    bool was_any = false;
    TL_LIST_FOREACH_SAFE(&fabric->late, link)
    {
        struct fake_operation *late = TL_CONTAINER_OF(link, struct fake_operation, link);
        const struct fake_pair *target = fake_find_pair(fabric, late->target);
        if (target != NULL && fake_provider_of(target) != provider) continue;
        land_late(fabric, late);
        was_any = true;
    }
    return was_any;
}

bool fake_fabric_land_late(struct fake_fabric *fabric)
{
    LOCK(fabric);
    bool was_any = !tl_list_is_empty(&fabric->late);
    if (was_any) land_late(fabric, TL_CONTAINER_OF(fabric->late.next, struct fake_operation, link));
    UNLOCK(fabric);
    return was_any;
}

/* ------------------------------------------------------------------------------------------------------- steps -- */

bool fake_fabric_step(struct fake_fabric *fabric, struct tl_queue_pair *pair)
{
    LOCK(fabric);
    enum outcome outcome = step(TL_CONTAINER_OF(pair, struct fake_pair, base));
    UNLOCK(fabric);
    return outcome != HELD;
}

static unsigned count_pairs(const struct fake_fabric *fabric)
{
    unsigned count = 0;
    TL_LIST_FOREACH(&fabric->pairs, link)
    count++;
    return count;
}

static struct fake_pair *pair_at(struct fake_fabric *fabric, uint64_t place)
{
    TL_LIST_FOREACH(&fabric->pairs, link)
    {
        if (place-- == 0) return TL_CONTAINER_OF(link, struct fake_pair, link);
    }
    return NULL;
}

static bool step_any(struct fake_fabric *fabric)
{
    unsigned pair_count = count_pairs(fabric);
    unsigned choices = pair_count + !tl_list_is_empty(&fabric->late);
    if (choices == 0) return false;
    uint64_t first = fabric->options.seed != 0 ? fake_random(fabric, choices) : fabric->next_choice++ % choices;
    for (unsigned i = 0; i < choices; i++) {
        uint64_t place = (first + i) % choices;
        if (place == pair_count) {
            land_late(fabric, TL_CONTAINER_OF(fabric->late.next, struct fake_operation, link));
            return true;
        }
        if (step(pair_at(fabric, place)) != HELD) return true;
    }
    return false;
}

bool fake_fabric_step_any(struct fake_fabric *fabric)
{
    LOCK(fabric);
    bool did_step = step_any(fabric);
    UNLOCK(fabric);
    return did_step;
}

bool fake_carry_all(struct fake_provider *provider)
{
    bool did_move = land_all_late(provider->fabric, provider);
    TL_LIST_FOREACH(&provider->fabric->pairs, link)
    {
        struct fake_pair *pair = TL_CONTAINER_OF(link, struct fake_pair, link);
        enum outcome outcome = fake_provider_of(pair) == provider ? step(pair) : HELD;
        did_move |= outcome != HELD;
        while (outcome == CARRIED)
            outcome = step(pair);
    }
    return did_move;
}

bool fake_carry_some(struct fake_provider *provider)
{
    struct fake_fabric *fabric = provider->fabric;
    if (fabric->options.seed == 0) return fake_carry_all(provider);
    bool did_move = fake_random(fabric, 4) == 0 && land_all_late(fabric, provider);
    unsigned pair_count = count_pairs(fabric);
    for (uint64_t left = pair_count * fake_random(fabric, 4); left > 0; left--) {
        struct fake_pair *pair = pair_at(fabric, fake_random(fabric, pair_count));
        if (fake_provider_of(pair) == provider) did_move |= step(pair) != HELD;
    }
    return did_move || fake_carry_all(provider);
}
