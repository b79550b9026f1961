// SPDX-License-Identifier: Apache-2.0
/*
 * The table of operations of the fake provider, its poll, and its counters.
 *
 * A post only queues an operation; fake_fabric.c carries it and queues events; poll passes those to their owners, one
 * by one and without the mutex, so that callbacks may post, ring, break and destroy.
 */
#include "fakes/fake_provider.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"
#include "fakes/fake_fabric.h"
#include "tensor/device.h"

static const struct tl_provider_ops fake_ops;

static void lock(struct fake_fabric *fabric)
{
    TL_CHECK(pthread_mutex_lock(&fabric->mutex) == 0);
}

static void unlock(struct fake_fabric *fabric)
{
    TL_CHECK(pthread_mutex_unlock(&fabric->mutex) == 0);
}

static struct fake_provider *as_provider(struct tl_provider *provider)
{
    TL_CHECK(provider->ops->close == fake_ops.close);
    return TL_CONTAINER_OF(provider, struct fake_provider, base);
}

static struct fake_pair *as_pair(const struct tl_queue_pair *pair)
{
    TL_CHECK(pair->ops->close == fake_ops.close);
    return TL_CONTAINER_OF(pair, struct fake_pair, base);
}

static struct fake_fabric *fabric_of(const struct fake_pair *pair)
{
    return fake_provider_of(pair)->fabric;
}

/* ---------------------------------------------------------------------------------------- fabric and providers -- */

struct fake_fabric *fake_fabric_create(const struct fake_fabric_options *options)
{
    struct fake_fabric *fabric = fake_alloc(sizeof(*fabric));
    if (options != NULL) fabric->options = *options;
    if (fabric->options.rnr_tries == 0) fabric->options.rnr_tries = 7;
    if (fabric->options.poll_batch == 0) fabric->options.poll_batch = 16;
    fabric->random = fabric->options.seed;
    fabric->next_number = 1;
    TL_CHECK(pthread_mutex_init(&fabric->mutex, NULL) == 0);
    TL_CHECK(pthread_cond_init(&fabric->regions_go, NULL) == 0);
    tl_list_init(&fabric->providers);
    tl_list_init(&fabric->pairs);
    tl_list_init(&fabric->late);
    tl_list_init(&fabric->shared);
    return fabric;
}

void fake_fabric_set_manual(struct fake_fabric *fabric, bool is_manual)
{
    fabric->options.is_manual = is_manual;
}

void fake_fabric_destroy(struct fake_fabric *fabric)
{
    if (fabric == NULL) return;
    TL_CHECK(tl_list_is_empty(&fabric->providers) && tl_list_is_empty(&fabric->pairs));
    while (fake_fabric_land_late(fabric)) {
    }
    TL_CHECK(pthread_cond_destroy(&fabric->regions_go) == 0);
    TL_CHECK(pthread_mutex_destroy(&fabric->mutex) == 0);
    free(fabric->writes);
    free(fabric);
}

struct tl_provider *fake_provider_open(struct fake_fabric *fabric, const char *name,
                                       const struct fake_provider_options *options)
{
    static const struct fake_provider_options defaults;
    if (options == NULL) options = &defaults;
    struct fake_provider *provider = fake_alloc(sizeof(*provider));
    provider->ops = fake_ops;
    if (options->has_no_mapping) provider->ops.share = NULL;
    if (options->has_no_mapping) provider->ops.map = NULL;
    if (options->has_no_reads) provider->ops.read = NULL;
    if (options->has_no_reads) provider->ops.expose_source = NULL;
    if (options->reach == NULL) provider->ops.region_create_on = NULL;
    provider->options = *options;
    provider->read_depth = options->has_no_reads ? 0 : options->read_depth != 0 ? options->read_depth : 4;
    provider->base.ops = &provider->ops;
    provider->base.limits = (struct tl_provider_limits){
        .max_write_bytes = options->max_write_bytes != 0 ? options->max_write_bytes : UINT64_C(1) << 30,
        .max_queue_pairs = options->max_queue_pairs != 0 ? options->max_queue_pairs : 64,
        .has_windows = !options->has_no_windows,
        .needs_regions = !options->needs_no_regions,
        .is_processor_writing = options->needs_no_regions,
        .numa_node = -1,
    };
    provider->base.fd = options->has_no_fd ? -1 : eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    TL_CHECK(options->has_no_fd || provider->base.fd >= 0);
    snprintf(provider->base.name, sizeof(provider->base.name), "%s", name);
    snprintf(provider->base.reason, sizeof(provider->base.reason), "the only one of this test");
    provider->fabric = fabric;
    provider->network = options->network;
    tl_list_init(&provider->events);
    tl_list_init(&provider->regions);
    lock(fabric);
    tl_list_push_back(&fabric->providers, &provider->link);
    if (options->reach != NULL) fabric->reach = options->reach;
    unlock(fabric);
    return &provider->base;
}

static enum tl_status provider_reopen(const struct tl_provider *base, struct tl_provider **ret_provider,
                                      struct tl_error *ret_error)
{
    const struct fake_provider *provider = TL_CONTAINER_OF(base, const struct fake_provider, base);
    (void)ret_error;
    *ret_provider = fake_provider_open(provider->fabric, base->name, &provider->options);
    return TL_OK;
}

static void provider_close(struct tl_provider *base)
{
    struct fake_provider *provider = as_provider(base);
    struct fake_fabric *fabric = provider->fabric;
    lock(fabric);
    TL_CHECK(!provider->is_polling);
    TL_CHECK(tl_list_is_empty(&provider->events));
    TL_CHECK(provider->counters.queue_pairs == 0 && provider->counters.regions_out == 0);
    tl_list_remove(&provider->link);
    fake_forget_rules(fabric, base);
    unlock(fabric);
    if (base->fd >= 0) close(base->fd);
    free(provider);
}

struct tl_queue_pair *fake_provider_pair(struct tl_provider *base, unsigned place)
{
    struct fake_provider *provider = as_provider(base);
    struct tl_queue_pair *found = NULL;
    lock(provider->fabric);
    TL_LIST_FOREACH(&provider->fabric->pairs, link)
    {
        struct fake_pair *pair = TL_CONTAINER_OF(link, struct fake_pair, link);
        if (fake_provider_of(pair) != provider || place-- > 0) continue;
        found = &pair->base;
        break;
    }
    unlock(provider->fabric);
    return found;
}

/* -------------------------------------------------------------------------------------------------------- poll -- */

static struct fake_event *take_event(struct fake_provider *provider)
{
    lock(provider->fabric);
    struct tl_list *link = provider->is_held ? NULL : tl_list_pop_front(&provider->events);
    unlock(provider->fabric);
    return link == NULL ? NULL : TL_CONTAINER_OF(link, struct fake_event, link);
}

static void window_free(struct fake_provider *provider, struct fake_window *window)
{
    tl_list_remove(&window->link);
    if (window->region != NULL) window->region->use_count--;
    provider->counters.exposures_out--;
    free(window);
}

static void tell_arrival(struct fake_provider *provider, struct fake_event *event)
{
    struct fake_pair *pair = event->pair;
    if (event->kind == EVENT_MESSAGE) {
        pair->events->message(pair->owner, event->data, (uint32_t)event->len_bytes);
    } else {
        pair->events->immediate(pair->owner, event->immediate, event->len_bytes);
    }
    uint8_t **slot = &pair->slots[pair->next_slot++ % pair->options.slot_count];
    free(*slot);
    *slot = event->data; /* it lies there until the slot is used again */
    event->data = NULL;
    lock(provider->fabric);
    pair->slots_free++;
    provider->counters.slots_out--;
    unlock(provider->fabric);
}

static void tell_done(struct fake_provider *provider, struct fake_event *event)
{
    struct fake_operation *operation = event->operation;
    struct tl_work *work = operation->work;
    lock(provider->fabric);
    event->pair->out_count--;
    if (operation->kind == FAKE_READ) event->pair->reads_out--;
    provider->counters.operations_out--;
    if (event->status == TL_OK) provider->counters.done++;
    if (event->status != TL_OK) provider->counters.cancelled++;
    if (operation->region != NULL) operation->region->use_count--;
    /* A cancelled revoke changes nothing: the exposure ends with the queue pair. */
    if (operation->kind == FAKE_REVOKE && event->status == TL_OK) window_free(provider, operation->window);
    unlock(provider->fabric);
    fake_operation_free(operation);
    tl_quota_use(&provider->base.quota, tl_work_done(work, event->status));
}

static void tell_broken(struct fake_provider *provider, struct fake_event *event)
{
    lock(provider->fabric);
    event->pair->is_break_reported = true;
    struct tl_error reason = event->pair->reason;
    unlock(provider->fabric);
    event->pair->events->broken(event->pair->owner, &reason);
}

static void tell_drained(struct fake_provider *provider, struct fake_event *event)
{
    struct fake_pair *pair = event->pair;
    lock(provider->fabric);
    TL_LIST_FOREACH_SAFE(&pair->windows, link)
    window_free(provider, TL_CONTAINER_OF(link, struct fake_window, link));
    pair->is_drain_reported = true;
    unlock(provider->fabric);
    pair->events->drained(pair->owner);
}

static void tell(struct fake_provider *provider, struct fake_event *event)
{
    switch (event->kind) {
    case EVENT_MESSAGE:
    case EVENT_IMMEDIATE:
        tell_arrival(provider, event);
        break;
    case EVENT_DONE:
        tell_done(provider, event);
        break;
    case EVENT_BROKEN:
        tell_broken(provider, event);
        break;
    case EVENT_DRAINED:
        tell_drained(provider, event);
        break;
    }
    free(event->data);
    free(event);
}

static void tell_gone(struct fake_provider *provider)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "%s: the device is gone", provider->base.name);
    tl_provider_fail(&provider->base, &reason);
}

void fake_provider_hold(struct tl_provider *base, bool is_held)
{
    struct fake_provider *provider = as_provider(base);
    lock(provider->fabric);
    provider->is_held = is_held;
    unlock(provider->fabric);
}

static unsigned provider_poll(struct tl_provider *base)
{
    struct fake_provider *provider = as_provider(base);
    TL_CHECK(!provider->is_polling);
    provider->is_polling = true;
    bool did_move = false;
    lock(provider->fabric);
    if (!provider->fabric->options.is_manual) did_move = fake_carry_some(provider);
    bool is_gone = provider->is_gone;
    unlock(provider->fabric);
    if (is_gone) tell_gone(provider);
    unsigned count = 0;
    struct fake_event *event;
    tl_quota_renew(&base->quota);
    while (count < provider->fabric->options.poll_batch && tl_quota_left(&base->quota) >= TL_SLOT_MESSAGES &&
           (event = take_event(provider)) != NULL) {
        tell(provider, event);
        count++;
    }
    provider->is_polling = false;
    /* Something moved, and more may: the fabric is not idle, even when the events are for others. */
    return count == 0 && did_move ? 1 : count;
}

static bool provider_arm(struct tl_provider *base)
{
    struct fake_provider *provider = as_provider(base);
    lock(provider->fabric);
    provider->is_armed = true;
    bool did_move = !provider->fabric->options.is_manual && fake_carry_all(provider);
    bool may_sleep = !did_move && tl_list_is_empty(&provider->events);
    unlock(provider->fabric);
    return may_sleep;
}

static void provider_disarm(struct tl_provider *base, bool is_woken)
{
    (void)is_woken;
    struct fake_provider *provider = as_provider(base);
    lock(provider->fabric);
    provider->is_armed = false;
    uint64_t value;
    ssize_t len = base->fd >= 0 ? read(base->fd, &value, sizeof(value)) : 0;
    (void)len; /* There is nothing to read when something else ended the sleep. */
    unlock(provider->fabric);
}

/* ----------------------------------------------------------------------------------------------------- regions -- */

_Thread_local bool fake_is_reactor;

void fake_fabric_hold_regions(struct fake_fabric *fabric, bool are_held)
{
    lock(fabric);
    fabric->are_regions_held = are_held;
    if (!are_held) TL_CHECK(pthread_cond_broadcast(&fabric->regions_go) == 0);
    unlock(fabric);
}

static void count_reactor(struct fake_provider *provider)
{
    if (fake_is_reactor) provider->counters.reactor_regions++;
}

static enum tl_status provider_region_create(struct tl_provider *base, void *address, uint64_t len_bytes,
                                             enum tl_region_access access, struct tl_region **ret_region,
                                             struct tl_error *ret_error)
{
    struct fake_provider *provider = as_provider(base);
    if (address == NULL || len_bytes == 0) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: no memory to register", base->name);
    }
    lock(provider->fabric);
    while (provider->fabric->are_regions_held)
        TL_CHECK(pthread_cond_wait(&provider->fabric->regions_go, &provider->fabric->mutex) == 0);
    bool is_gone = provider->is_gone;
    bool fails = fake_call_fails(provider->fabric, FAKE_REGION_FAILURE, base, NULL);
    if (!is_gone && !fails) {
        struct fake_region *region = fake_alloc(sizeof(*region));
        region->base =
            (struct tl_region){.provider = base, .address = address, .len_bytes = len_bytes, .access = access};
        region->key = provider->fabric->next_number++;
        tl_list_push_back(&provider->regions, &region->link);
        provider->counters.regions++;
        provider->counters.regions_out++;
        count_reactor(provider);
        *ret_region = &region->base;
    }
    unlock(provider->fabric);
    if (is_gone) return tl_error_set(ret_error, TL_UNAVAILABLE, "%s: the device is gone", base->name);
    if (fails) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: cannot register memory", base->name);
    return TL_OK;
}

static enum tl_status provider_region_create_on(struct tl_provider *base, const struct tl_device_allocation *allocation,
                                                enum tl_region_access access, struct tl_region **ret_region,
                                                struct tl_error *ret_error)
{
    enum tl_status status =
        provider_region_create(base, allocation->address, allocation->len_bytes, access, ret_region, ret_error);
    if (status == TL_OK) (*ret_region)->is_on_device = true;
    return status;
}

static void region_destroy(struct tl_region *base)
{
    struct fake_region *region = TL_CONTAINER_OF(base, struct fake_region, base);
    struct fake_provider *provider = as_provider(base->provider);
    lock(provider->fabric);
    TL_CHECK(region->use_count == 0);
    tl_list_remove(&region->link);
    provider->counters.regions_out--;
    count_reactor(provider);
    unlock(provider->fabric);
    free(region);
}

/* ------------------------------------------------------------------------------------------------- queue pairs -- */

static struct fake_pair *new_pair(struct fake_provider *provider, const struct tl_queue_pair_options *options,
                                  const struct tl_queue_pair_events *events, void *owner)
{
    struct fake_pair *pair = fake_alloc(sizeof(*pair));
    bool is_confined = options->keys == TL_KEYS_REGION && provider->base.limits.needs_regions;
    pair->base = (struct tl_queue_pair){
        .ops = &provider->ops, .provider = &provider->base, .outside_refusal = is_confined ? tl_outside_refused : NULL};
    pair->options = *options;
    pair->events = events;
    pair->owner = owner;
    pair->slots_free = options->slot_count;
    pair->slots = fake_alloc(options->slot_count * sizeof(*pair->slots));
    pair->number = provider->fabric->next_number++;
    tl_list_init(&pair->operations);
    tl_list_init(&pair->windows);
    tl_list_push_back(&provider->fabric->pairs, &pair->link);
    provider->counters.queue_pairs++;
    return pair;
}

static enum tl_status pair_create(struct tl_provider *base, const struct tl_queue_pair_options *options,
                                  const struct tl_queue_pair_events *events, void *owner,
                                  struct tl_queue_pair **ret_pair, struct tl_error *ret_error)
{
    struct fake_provider *provider = as_provider(base);
    TL_CHECK(events->message && events->immediate && events->broken && events->drained);
    if (options->keys == TL_KEYS_WINDOW && !base->limits.has_windows) {
        return tl_error_set(ret_error, TL_UNIMPLEMENTED, "%s: no memory windows", base->name);
    }
    enum tl_status status = TL_OK;
    lock(provider->fabric);
    provider->counters.creates++;
    if (provider->is_gone) {
        tell_gone(provider);
        status = tl_error_copy(ret_error, &base->failure);
    } else if (fake_call_fails(provider->fabric, FAKE_CREATE_FAILURE, base, NULL) ||
               provider->counters.queue_pairs >= base->limits.max_queue_pairs) {
        status = tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: no queue pair is left", base->name);
    } else {
        *ret_pair = &new_pair(provider, options, events, owner)->base;
    }
    unlock(provider->fabric);
    return status;
}

static void pair_get_address(const struct tl_queue_pair *base, struct tl_pair_address *ret_pair_address)
{
    const struct fake_pair *pair = as_pair(base);
    struct fake_pair_address pair_address = {
        .magic = FAKE_PAIR_ADDRESS_MAGIC, .number = pair->number, .network = fake_provider_of(pair)->network};
    *ret_pair_address = (struct tl_pair_address){.len_bytes = sizeof(pair_address)};
    memcpy(ret_pair_address->bytes, &pair_address, sizeof(pair_address));
}

static enum tl_status connect_locked(struct fake_pair *pair, const struct fake_pair_address *peer,
                                     struct tl_error *ret_error)
{
    struct fake_provider *provider = fake_provider_of(pair);
    const char *name = provider->base.name;
    if (peer->network != provider->network || peer->number == pair->number) {
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION, "%s: the peer is in network %llu, not in %u", name,
                            (unsigned long long)peer->network, provider->network);
    }
    if (provider->is_gone || fake_call_fails(provider->fabric, FAKE_CONNECT_FAILURE, &provider->base, &pair->base)) {
        return tl_error_set(ret_error, TL_UNAVAILABLE, "%s: the device refuses to connect", name);
    }
    if (pair->state == PAIR_BROKEN || pair->state == PAIR_DRAINED) {
        return tl_error_set(ret_error, TL_UNAVAILABLE, "%s: broken already: %s", name, pair->reason.message);
    }
    TL_CHECK(pair->state == PAIR_CREATED);
    pair->state = PAIR_CONNECTED;
    pair->base.mtu_bytes = FAKE_MTU_BYTES;
    bool may_read =
        pair->options.keys == TL_KEYS_WINDOW && provider->read_depth > 0 && provider->base.read_failure == NULL;
    pair->base.read_depth = may_read ? provider->read_depth : 0;
    pair->base.read_refusal = may_read ? NULL : "written: the fabric does not read";
    pair->peer_number = peer->number;
    const struct fake_pair *other = fake_find_pair(provider->fabric, peer->number);
    if (other != NULL) fake_signal(fake_provider_of(other)); /* What it has posted may leave. */
    return TL_OK;
}

static enum tl_status pair_connect(struct tl_queue_pair *base, const struct tl_pair_address *peer,
                                   struct tl_error *ret_error)
{
    struct fake_pair *pair = as_pair(base);
    struct fake_pair_address pair_address;
    if (peer->len_bytes == sizeof(pair_address)) memcpy(&pair_address, peer->bytes, sizeof(pair_address));
    if (peer->len_bytes != sizeof(pair_address) || pair_address.magic != FAKE_PAIR_ADDRESS_MAGIC) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: not a pair address", base->provider->name);
    }
    lock(fabric_of(pair));
    enum tl_status status = connect_locked(pair, &pair_address, ret_error);
    unlock(fabric_of(pair));
    return status;
}

static void pair_describe_route(const struct tl_queue_pair *base, struct tl_route *ret_route)
{
    (void)base;
    *ret_route = (struct tl_route){.own_address = "10.0.0.1",
                                   .peer_address = "10.0.0.2",
                                   .head_bytes = 60,
                                   .blocked = "the fabric is blocked; open it"};
}

static void pair_disconnect(struct tl_queue_pair *base, const struct tl_error *reason)
{
    struct fake_pair *pair = as_pair(base);
    lock(fabric_of(pair));
    fake_break(pair, reason);
    unlock(fabric_of(pair));
}

/* Drops the events of a queue pair that never connected. */
static void forget_events(struct fake_pair *pair)
{
    TL_LIST_FOREACH_SAFE(&fake_provider_of(pair)->events, link)
    {
        struct fake_event *event = TL_CONTAINER_OF(link, struct fake_event, link);
        if (event->pair != pair) continue;
        TL_CHECK(event->kind == EVENT_BROKEN || event->kind == EVENT_DRAINED);
        tl_list_remove(link);
        free(event);
    }
}

static void pair_destroy(struct tl_queue_pair *base)
{
    struct fake_pair *pair = as_pair(base);
    struct fake_provider *provider = fake_provider_of(pair);
    lock(provider->fabric);
    TL_CHECK(pair->is_drain_reported || pair->peer_number == 0);
    TL_CHECK(pair->out_count == 0 && tl_list_is_empty(&pair->operations) && tl_list_is_empty(&pair->windows));
    forget_events(pair);
    fake_forget_shared(pair);
    tl_list_remove(&pair->link);
    provider->counters.queue_pairs--;
    unlock(provider->fabric);
    for (unsigned i = 0; i < pair->options.slot_count; i++)
        free(pair->slots[i]);
    free(pair->slots);
    free(pair);
}

/* ----------------------------------------------------------------------------------------------------- posting -- */

static uint32_t space_locked(const struct fake_pair *pair)
{
    if (pair->peer_number == 0 || pair->is_break_reported) return 0;
    return pair->options.work_count - pair->out_count;
}

static uint32_t pair_space(const struct tl_queue_pair *base)
{
    const struct fake_pair *pair = as_pair(base);
    lock(fabric_of(pair));
    uint32_t space = space_locked(pair);
    unlock(fabric_of(pair));
    return space;
}

static struct fake_operation *new_operation(enum fake_kind kind, struct tl_work *work)
{
    struct fake_operation *operation = fake_alloc(sizeof(*operation));
    TL_CHECK(work == NULL || (work->magic == TL_WORK_MAGIC && work->done != NULL));
    operation->kind = kind;
    operation->work = work;
    return operation;
}

static void post(struct fake_pair *pair, struct fake_operation *operation)
{
    TL_CHECK(space_locked(pair) > 0);
    if (operation->kind == FAKE_READ) {
        struct fake_counters *counters = &fake_provider_of(pair)->counters;
        TL_CHECK(pair->reads_out < pair->base.read_depth);
        pair->reads_out++;
        if (pair->reads_out > counters->most_reads_out) counters->most_reads_out = pair->reads_out;
    }
    TL_LIST_FOREACH(&pair->operations, link)
    TL_CHECK(operation->work == NULL || TL_CONTAINER_OF(link, struct fake_operation, link)->work != operation->work);
    fake_choose_fault(pair, operation);
    tl_list_push_back(&pair->operations, &operation->link);
    pair->out_count++;
    fake_provider_of(pair)->counters.operations_out++;
    if (operation->region != NULL) operation->region->use_count++;
    if (operation->fault != FAKE_POST_FAILURE) return;
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "%s: the card refuses what is posted", pair->base.provider->name);
    fake_break(pair, &reason);
}

/* There is one while nothing else is posted. Its content is lost when something is, also when it was moved before. */
static void *pair_message_place(struct tl_queue_pair *base)
{
    struct fake_pair *pair = as_pair(base);
    lock(fabric_of(pair));
    pair->has_message_place = tl_list_is_empty(&pair->operations);
    unlock(fabric_of(pair));
    return pair->has_message_place ? pair->message_place : NULL;
}

static void lose_message_place(struct fake_pair *pair)
{
    if (pair->has_message_place) memset(pair->message_place, 0xee, sizeof(pair->message_place));
    pair->has_message_place = false;
}

static void pair_message(struct tl_queue_pair *base, const void *data, uint32_t len_bytes, struct tl_work *work)
{
    struct fake_pair *pair = as_pair(base);
    TL_CHECK(len_bytes <= TL_SLOT_BYTES && (data != pair->message_place || pair->has_message_place));
    struct fake_operation *operation = new_operation(FAKE_MESSAGE, work);
    operation->copy = fake_alloc(len_bytes);
    if (len_bytes > 0) memcpy(operation->copy, data, len_bytes);
    operation->len_bytes = len_bytes;
    lock(fabric_of(pair));
    fake_provider_of(pair)->counters.messages_in_place += data == pair->message_place;
    lose_message_place(pair);
    post(pair, operation);
    unlock(fabric_of(pair));
}

static void record_write(struct fake_pair *pair, struct fake_operation *operation)
{
    struct fake_fabric *fabric = fabric_of(pair);
    if (fabric->write_count == fabric->write_capacity) {
        fabric->write_capacity = fabric->write_capacity == 0 ? 64 : fabric->write_capacity * 2;
        fabric->writes = realloc(fabric->writes, fabric->write_capacity * sizeof(*fabric->writes));
        TL_CHECK(fabric->writes != NULL);
    }
    struct fake_address address = {0};
    bool is_known = fake_parse_address(&operation->destination, &address);
    operation->write_place = fabric->write_count++;
    fabric->writes[operation->write_place] = (struct fake_write){
        .provider = pair->base.provider,
        .source = operation->source,
        .destination = is_known ? (void *)(uintptr_t)(address.address + operation->offset_bytes) : NULL,
        .len_bytes = operation->len_bytes,
        .has_immediate = operation->has_immediate,
        .immediate = operation->immediate,
    };
}

/* The source does not lie in its region, or lies in another provider's. */
static void check_source(const struct fake_pair *pair, const struct tl_region *region, const void *source,
                         uint64_t len_bytes)
{
    TL_CHECK(len_bytes <= pair->base.provider->limits.max_write_bytes);
    if (len_bytes == 0) return;
    TL_CHECK(source != NULL);
    TL_CHECK(region != NULL || !pair->base.provider->limits.needs_regions);
    if (region == NULL) return;
    TL_CHECK(region->provider == pair->base.provider);
    uintptr_t begin = (uintptr_t)region->address;
    uintptr_t at = (uintptr_t)source;
    TL_CHECK(at >= begin && len_bytes <= region->len_bytes && at - begin <= region->len_bytes - len_bytes);
}

static void pair_write(struct tl_queue_pair *base, const struct tl_region *region, const void *source,
                       uint64_t len_bytes, const struct tl_descriptor *destination, uint64_t offset_bytes,
                       bool has_immediate, uint32_t immediate, struct tl_work *work)
{
    struct fake_pair *pair = as_pair(base);
    struct fake_operation *operation = new_operation(FAKE_WRITE, work);
    if (source == NULL && work != NULL && work->fill != NULL) {
        TL_CHECK(base->provider->limits.is_processor_writing);
        source = operation->copy = fake_alloc(len_bytes);
        work->fill(work, operation->copy, 0, len_bytes);
    }
    check_source(pair, region, source, len_bytes);
    /* Only the count of users changes in a region. */
    if (region != NULL) operation->region = TL_CONTAINER_OF((void *)(uintptr_t)region, struct fake_region, base);
    operation->source = source;
    operation->len_bytes = len_bytes;
    if (destination != NULL) operation->destination = *destination;
    operation->offset_bytes = offset_bytes;
    operation->has_immediate = has_immediate;
    operation->immediate = immediate;
    lock(fabric_of(pair));
    record_write(pair, operation);
    lose_message_place(pair);
    post(pair, operation);
    unlock(fabric_of(pair));
}

static void pair_read(struct tl_queue_pair *base, const struct tl_region *region, void *destination, uint64_t len_bytes,
                      const struct tl_descriptor *source, uint64_t offset_bytes, struct tl_work *work)
{
    struct fake_pair *pair = as_pair(base);
    TL_CHECK(len_bytes > 0 && (region == NULL || region->access == TL_REGION_WRITE));
    check_source(pair, region, destination, len_bytes);
    struct fake_operation *operation = new_operation(FAKE_READ, work);
    if (region != NULL) operation->region = TL_CONTAINER_OF((void *)(uintptr_t)region, struct fake_region, base);
    operation->target_memory = destination;
    operation->len_bytes = len_bytes;
    operation->destination = *source;
    operation->offset_bytes = offset_bytes;
    lock(fabric_of(pair));
    lose_message_place(pair);
    post(pair, operation);
    unlock(fabric_of(pair));
}

static void pair_doorbell(struct tl_queue_pair *base)
{
    struct fake_pair *pair = as_pair(base);
    lock(fabric_of(pair));
    pair->rung_count = 0;
    TL_LIST_FOREACH(&pair->operations, link)
    pair->rung_count++;
    fake_provider_of(pair)->counters.rings++;
    unlock(fabric_of(pair));
}

/* --------------------------------------------------------------------------------------------------- exposures -- */

static struct fake_window *new_window(struct fake_pair *pair, struct tl_region *region, void *address,
                                      uint64_t len_bytes)
{
    struct fake_provider *provider = fake_provider_of(pair);
    struct fake_window *window = fake_alloc(sizeof(*window));
    window->region = region == NULL ? NULL : TL_CONTAINER_OF(region, struct fake_region, base);
    if (region != NULL) window->region->use_count++;
    window->address = address;
    window->len_bytes = len_bytes;
    bool is_own = pair->options.keys == TL_KEYS_WINDOW || region == NULL;
    window->key = is_own ? provider->fabric->next_number++ : window->region->key;
    window->is_bound = is_own && pair->options.keys == TL_KEYS_REGION;
    tl_list_push_back(&pair->windows, &window->link);
    provider->counters.exposures++;
    provider->counters.unregistered_exposures += region == NULL;
    provider->counters.exposures_out++;
    return window;
}

static void fill_exposure(const struct fake_window *window, struct tl_exposure *exposure)
{
    struct fake_address address = {.magic = FAKE_ADDRESS_MAGIC,
                                   .key = window->key,
                                   .address = (uintptr_t)window->address,
                                   .len_bytes = window->len_bytes};
    *exposure = (struct tl_exposure){.region = window->region == NULL ? NULL : &window->region->base,
                                     .address = window->address,
                                     .len_bytes = window->len_bytes,
                                     .descriptor = {.len_bytes = sizeof(address)},
                                     .provider_state = (void *)(uintptr_t)window};
    memcpy(exposure->descriptor.bytes, &address, sizeof(address));
}

static void check_exposed(const struct tl_queue_pair *pair, const struct tl_region *region, const void *address,
                          uint64_t len_bytes)
{
    TL_CHECK(address != NULL && len_bytes > 0);
    TL_CHECK(region != NULL || (!pair->provider->limits.needs_regions && pair->outside_refusal == NULL));
    if (region == NULL) return;
    uintptr_t begin = (uintptr_t)region->address;
    uintptr_t at = (uintptr_t)address;
    TL_CHECK(region->provider == pair->provider && region->access == TL_REGION_WRITE);
    TL_CHECK(at >= begin && len_bytes <= region->len_bytes && at - begin <= region->len_bytes - len_bytes);
}

/* How many windows the queue pair has left. Called under the lock. */
static uint32_t windows_left(const struct fake_pair *pair)
{
    uint32_t left = fake_provider_of(pair)->options.window_count;
    if (left == 0 || pair->options.keys != TL_KEYS_WINDOW) return UINT32_MAX;
    TL_LIST_FOREACH(&pair->windows, link)
    {
        TL_CHECK(left-- > 0);
    }
    return left;
}

static bool pair_has_spare_window(struct tl_queue_pair *base)
{
    const struct fake_pair *pair = as_pair(base);
    lock(fabric_of(pair));
    uint32_t left = windows_left(pair);
    unlock(fabric_of(pair));
    return left == UINT32_MAX || (left > 0 && 4 * (left - 1) >= fake_provider_of(pair)->options.window_count);
}

static enum tl_status expose(struct tl_queue_pair *base, struct tl_region *region, void *address, uint64_t len_bytes,
                             bool is_source, bool is_writable, struct tl_exposure *exposure, struct tl_error *ret_error)
{
    struct fake_pair *pair = as_pair(base);
    check_exposed(base, region, address, len_bytes);
    lock(fabric_of(pair));
    TL_CHECK(space_locked(pair) > 0);
    bool fails = fake_call_fails(fabric_of(pair), FAKE_EXPOSE_FAILURE, base->provider, base);
    fails |= windows_left(pair) == 0;
    if (!fails) {
        struct fake_window *window = new_window(pair, region, address, len_bytes);
        window->is_source = is_source;
        window->is_writable = is_writable;
        fill_exposure(window, exposure);
        struct fake_operation *bind = NULL;
        if (pair->options.keys == TL_KEYS_WINDOW) {
            bind = new_operation(FAKE_BIND, NULL);
            bind->window = window;
            post(pair, bind);
        }
    }
    unlock(fabric_of(pair));
    if (fails) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: no window is left", base->provider->name);
    return TL_OK;
}

static enum tl_status pair_expose(struct tl_queue_pair *base, struct tl_region *region, void *address,
                                  uint64_t len_bytes, struct tl_exposure *exposure, struct tl_error *ret_error)
{
    return expose(base, region, address, len_bytes, false, true, exposure, ret_error);
}

static enum tl_status pair_expose_source(struct tl_queue_pair *base, struct tl_region *region, void *address,
                                         uint64_t len_bytes, bool is_writable, struct tl_exposure *exposure,
                                         struct tl_error *ret_error)
{
    TL_CHECK(as_pair(base)->options.keys == TL_KEYS_WINDOW);
    return expose(base, region, address, len_bytes, true, is_writable, exposure, ret_error);
}

static void pair_revoke(struct tl_queue_pair *base, struct tl_exposure *exposure, struct tl_work *work)
{
    struct fake_pair *pair = as_pair(base);
    TL_CHECK(exposure->provider_state != NULL);
    struct fake_window *window = exposure->provider_state;
    exposure->provider_state = NULL; /* A second time is an error. */
    exposure->region = NULL;
    lock(fabric_of(pair));
    fake_provider_of(pair)->counters.revokes++;
    if (pair->options.keys == TL_KEYS_REGION) {
        TL_CHECK(work == NULL);
        window_free(fake_provider_of(pair), window);
    } else {
        struct fake_operation *operation = new_operation(FAKE_REVOKE, work);
        operation->window = window;
        post(pair, operation);
    }
    unlock(fabric_of(pair));
}

static enum tl_status pair_share(struct tl_queue_pair *base, struct tl_mapped_file *file,
                                 struct tl_descriptor *ret_descriptor, struct tl_error *ret_error)
{
    struct fake_pair *pair = as_pair(base);
    lock(fabric_of(pair));
    bool fails = fake_call_fails(fabric_of(pair), FAKE_SHARE_FAILURE, base->provider, base);
    if (!fails) fake_share(pair, file, ret_descriptor);
    unlock(fabric_of(pair));
    if (fails) return tl_error_set(ret_error, TL_UNAVAILABLE, "%s: cannot share a file", base->provider->name);
    return TL_OK;
}

static enum tl_status pair_map(struct tl_queue_pair *base, const struct tl_descriptor *descriptor,
                               struct tl_mapped_file **ret_file, struct tl_error *ret_error)
{
    struct fake_pair *pair = as_pair(base);
    lock(fabric_of(pair));
    bool fails = fake_call_fails(fabric_of(pair), FAKE_MAP_FAILURE, base->provider, base);
    struct tl_mapped_file *file = fails ? NULL : fake_map(pair, descriptor);
    unlock(fabric_of(pair));
    if (file == NULL) return tl_error_set(ret_error, TL_NOT_FOUND, "%s: no such file", base->provider->name);
    *ret_file = file;
    return TL_OK;
}

static const struct tl_provider_ops fake_ops = {
    .name = "fake",
    .settings = "verbs",
    .close = provider_close,
    .poll = provider_poll,
    .arm = provider_arm,
    .disarm = provider_disarm,
    .reopen = provider_reopen,
    .region_create = provider_region_create,
    .region_create_on = provider_region_create_on,
    .region_destroy = region_destroy,
    .create = pair_create,
    .get_address = pair_get_address,
    .connect = pair_connect,
    .describe_route = pair_describe_route,
    .disconnect = pair_disconnect,
    .destroy = pair_destroy,
    .space = pair_space,
    .message_place = pair_message_place,
    .message = pair_message,
    .write = pair_write,
    .read = pair_read,
    .expose = pair_expose,
    .has_spare_window = pair_has_spare_window,
    .expose_source = pair_expose_source,
    .revoke = pair_revoke,
    .doorbell = pair_doorbell,
    .share = pair_share,
    .map = pair_map,
};

/* ------------------------------------------------------------------------------------------- what has happened -- */

void fake_provider_get_counters(struct tl_provider *base, struct fake_counters *ret_counters)
{
    struct fake_provider *provider = as_provider(base);
    lock(provider->fabric);
    *ret_counters = provider->counters;
    unlock(provider->fabric);
}

static const char *what_is_under_way(const struct fake_fabric *fabric)
{
    if (!tl_list_is_empty(&fabric->late)) return "a late operation";
    TL_LIST_FOREACH(&fabric->providers, link)
    {
        const struct fake_provider *provider = TL_CONTAINER_OF(link, struct fake_provider, link);
        if (provider->counters.operations_out > 0) return "an operation";
        if (provider->counters.exposures_out > 0) return "an exposure";
        if (provider->counters.slots_out > 0) return "a slot";
        if (!tl_list_is_empty(&provider->events)) return "an event";
    }
    return NULL;
}

static const char *what_is_left(const struct fake_fabric *fabric)
{
    if (!tl_list_is_empty(&fabric->pairs)) return "a queue pair";
    TL_LIST_FOREACH(&fabric->providers, link)
    {
        if (TL_CONTAINER_OF(link, struct fake_provider, link)->counters.regions_out > 0) return "a region";
    }
    return NULL;
}

static bool is_none_out(struct fake_fabric *fabric, bool is_all, const char **ret_why)
{
    lock(fabric);
    const char *why = what_is_under_way(fabric);
    if (why == NULL && is_all) why = what_is_left(fabric);
    unlock(fabric);
    if (ret_why != NULL && why != NULL) *ret_why = why;
    return why == NULL;
}

bool fake_fabric_is_quiet(struct fake_fabric *fabric, const char **ret_why)
{
    return is_none_out(fabric, false, ret_why);
}

bool fake_fabric_is_clean(struct fake_fabric *fabric, const char **ret_why)
{
    return is_none_out(fabric, true, ret_why);
}

size_t fake_fabric_write_count(struct fake_fabric *fabric)
{
    lock(fabric);
    size_t count = fabric->write_count;
    unlock(fabric);
    return count;
}

struct fake_write fake_fabric_write_at(struct fake_fabric *fabric, size_t place)
{
    lock(fabric);
    TL_CHECK(place < fabric->write_count);
    struct fake_write write = fabric->writes[place];
    unlock(fabric);
    return write;
}
