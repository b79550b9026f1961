// SPDX-License-Identifier: Apache-2.0
/*
 * Memory of the data plane: the pool, registrations of users' memory, and the registration thread that makes both.
 *
 * The registration thread starts with the first request. It carries out one registration at a time, in order,
 * and posts its closure; in turn with them it serves the requests that wait for space in the pool. Destroying the
 * memory lets it finish the registration that it is at, whose pin is given back at once, and cancels the others: each
 * closure is posted exactly once.
 */
#include "dataplane/memory/memory.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/closure_thread.h"
#include "base/error.h"
#include "base/log.h"
#include "base/reason.h"
#include "dataplane/memory/device_access.h"
#include "dataplane/memory/registrations.h"

/* How often the log says that the pool is full. */
#define FULL_LOG_NS (60 * TL_NS_PER_SEC)

static const char reason_pinning[] = "the pool is being pinned for GPUs";
static const char reason_no_thread[] = "there is no thread to pin the pool for GPUs";

struct tl_memory {
    struct tl_provider *provider;
    struct tl_pool *pool;
    struct tl_registrations *registrations;
    _Atomic uint64_t bounced_bytes;

    struct tl_closure_thread registration_thread;
    struct tl_device_accesses accesses;
    struct tl_closure serve_job; /* waits in that thread when the pool may serve a request that waits */
    atomic_bool is_pinning;      /* pin_job was posted, for pin_device */
    struct tl_device pin_device;
    struct tl_closure pin_job; /* pins one region of the pool for copies of devices */
    atomic_bool is_pin_failure_logged;

    /* The fields from here on belong to the registration thread. */
    int64_t next_full_log_ns;
    char logged_refusal[TL_ERROR_MESSAGE_BYTES]; /* the last refusal of a registration that was logged; "": none was */
};

/* ----------------------------------------------------------------------------------------- registration thread -- */

static void set_cancelled(struct tl_registration *registration)
{
    (void)tl_error_set(&registration->error, TL_CANCELLED, "the data plane was stopped");
}

static inline void set_pin(struct tl_pin *pin, void *data, uint64_t len_bytes, struct tl_region *region, void *entry)
{
    uint64_t offset_bytes = (uintptr_t)data - (uintptr_t)region->address;
    TL_CHECK(offset_bytes <= region->len_bytes && len_bytes <= region->len_bytes - offset_bytes);
    pin->region = region;
    pin->address = data;
    pin->len_bytes = len_bytes;
    pin->entry = entry;
}

/* Memory that cannot be registered is copied. Logs each reason once, until another one follows. */
static void log_refusal(struct tl_memory *memory, const struct tl_error *error)
{
    if (tl_reason_is_same(error->message, memory->logged_refusal)) return;
    snprintf(memory->logged_refusal, sizeof(memory->logged_refusal), "%s", error->message);
    TL_LOG_AT_WARN("memory cannot be registered, its tensors are copied", TL_STR("reason", error->message));
}

static void carry_out(struct tl_memory *memory, struct tl_registration *registration)
{
    struct tl_registered *registered;
    struct tl_error error;
    if (!tl_memory_pin(memory, registration->tensor, registration->access, &registration->pin)) {
        enum tl_status status = tl_registrations_add(memory->registrations, registration->tensor, registration->access,
                                                     &registered, &error);
        if (status != TL_OK) {
            registration->error = error;
            log_refusal(memory, &error);
            return;
        }
        set_pin(&registration->pin, tl_tensor_data(registration->tensor), tl_tensor_size_bytes(registration->tensor),
                tl_registered_region(registered), registered);
    }
    if (!tl_closure_thread_is_stopping(&memory->registration_thread)) return;
    tl_memory_unpin(memory, &registration->pin);
    set_cancelled(registration);
}

/* Called under a lock of the pool. */
static void memory_wanted(void *context)
{
    struct tl_memory *memory = context;
    tl_closure_thread_post_urgent(&memory->registration_thread, &memory->serve_job);
}

static bool evict(void *context)
{
    const struct tl_memory *memory = context;
    return tl_registrations_evict(memory->registrations);
}

/* The waits that are left last until memory comes back. */
static void log_full(struct tl_memory *memory)
{
    struct tl_memory_stats stats;
    struct tl_error refusal;
    int64_t now_ns = tl_clock_now_ns();
    tl_memory_get_stats(memory, &stats);
    if (stats.pool_waiting == 0 || now_ns < memory->next_full_log_ns) return;
    memory->next_full_log_ns = now_ns + FULL_LOG_NS;
    tl_pool_get_refusal(memory->pool, &refusal);
    TL_LOG_AT_WARN("requests wait for registered memory", TL_U64("waiting", stats.pool_waiting),
                   TL_U64("pool_bytes", stats.pool_bytes), TL_U64("used_bytes", stats.pool_used_bytes),
                   TL_STR("reason", refusal.message), TL_STR("remedy", "release received tensors sooner"));
}

static void serve_waits(struct tl_closure *job)
{
    struct tl_memory *memory = TL_CONTAINER_OF(job, struct tl_memory, serve_job);
    struct tl_pool_wait *wait;
    while ((wait = tl_pool_serve(memory->pool)) != NULL) {
        struct tl_memory_wait *memory_wait = TL_CONTAINER_OF(wait, struct tl_memory_wait, wait);
        memory_wait->post(memory_wait->context, &memory_wait->closure);
    }
    log_full(memory);
}

static void log_pin_failure(struct tl_memory *memory, const char *failure)
{
    if (failure == NULL || atomic_exchange(&memory->is_pin_failure_logged, true)) return;
    TL_LOG_AT_WARN("memory is not pinned for GPUs, their tensors are copied once more", TL_STR("reason", failure),
                   TL_STR("remedy", "nothing fails; CUDA may pin a smaller pool (max_pool)"));
}

static void pin_region(struct tl_closure *job)
{
    struct tl_memory *memory = TL_CONTAINER_OF(job, struct tl_memory, pin_job);
    bool has_more = tl_pool_pin_next(memory->pool, memory->pin_device);
    log_pin_failure(memory, tl_pool_pin_failure(memory->pool));
    if (has_more) tl_closure_thread_post_urgent(&memory->registration_thread, job);
}

const char *tl_memory_why_not_pinned(struct tl_memory *memory, struct tl_device device)
{
    struct tl_error error;
    const char *failure = tl_pool_pin_failure(memory->pool);
    log_pin_failure(memory, failure); /* a region that was added since may have failed */
    if (failure != NULL) return failure;
    if (tl_pool_is_pinned(memory->pool)) return NULL;
    if (tl_closure_thread_start(&memory->registration_thread, &error) != TL_OK) return reason_no_thread;
    if (!atomic_exchange(&memory->is_pinning, true)) {
        memory->pin_device = device;
        tl_closure_thread_post_urgent(&memory->registration_thread, &memory->pin_job);
    }
    return reason_pinning;
}

static void run_registration(struct tl_closure *job)
{
    struct tl_registration *registration = TL_CONTAINER_OF(job, struct tl_registration, job);
    carry_out(registration->memory, registration);
    registration->post(registration->context, &registration->closure);
}

/* A worker with many peers has a memory for each of them, most of which never need a registration thread. */
void tl_memory_register(struct tl_memory *memory, struct tl_registration *registration)
{
    registration->pin = (struct tl_pin){0};
    registration->error.code = TL_OK;
    registration->error.message[0] = '\0';
    registration->memory = memory;
    registration->job.run = run_registration;
    if (tl_closure_thread_start(&memory->registration_thread, &registration->error) == TL_OK) {
        tl_closure_thread_post(&memory->registration_thread, &registration->job);
    } else {
        registration->post(registration->context, &registration->closure);
    }
}

const char *tl_memory_why_not_direct(struct tl_memory *memory, struct tl_device device, enum tl_keys keys)
{
    return tl_device_accesses_why_not(&memory->accesses, device, keys, TL_REGION_READ);
}

const char *tl_memory_why_not_written(struct tl_memory *memory, struct tl_device device, enum tl_keys keys)
{
    return tl_device_accesses_why_not(&memory->accesses, device, keys, TL_REGION_WRITE);
}

bool tl_memory_look_direct(struct tl_memory *memory, struct tl_device device, enum tl_keys keys,
                           enum tl_region_access access, const char **ret_why_not)
{
    return tl_device_accesses_look(&memory->accesses, device, keys, access, ret_why_not);
}

/* Ends the registration thread and cancels the requests that are left. */
static void stop_registration_thread(struct tl_memory *memory)
{
    struct tl_list left, *link;
    tl_closure_thread_stop(&memory->registration_thread, &left);
    while ((link = tl_list_pop_front(&left)) != NULL) {
        if (link == &memory->serve_job.link || link == &memory->pin_job.link) continue;
        if (tl_device_accesses_owns(TL_CONTAINER_OF(link, struct tl_closure, link))) continue;
        struct tl_registration *registration = TL_CONTAINER_OF(link, struct tl_registration, job.link);
        set_cancelled(registration);
        registration->post(registration->context, &registration->closure);
    }
}

/* -------------------------------------------------------------------------------------------------- life cycle -- */

enum tl_status tl_memory_create(struct tl_provider *provider, const struct tl_memory_options *options,
                                struct tl_memory **ret_memory, struct tl_error *ret_error)
{
    struct tl_memory *memory = calloc(1, sizeof(*memory));
    if (!memory) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the data plane's memory");
    memory->provider = provider;
    tl_closure_thread_init(&memory->registration_thread, "tl-register");
    tl_device_accesses_init(&memory->accesses, provider, &memory->registration_thread);
    memory->serve_job.run = serve_waits;
    tl_list_init(&memory->serve_job.link);
    memory->pin_job.run = pin_region;
    tl_list_init(&memory->pin_job.link);
    enum tl_status status = tl_registrations_create(provider, options->max_cached_bytes, options->max_cached_count,
                                                    &memory->registrations, ret_error);
    if (status != TL_OK) goto fail;
    const struct tl_pool_hooks hooks = {.wanted = memory_wanted, .evict = evict, .context = memory};
    uint64_t first_bytes = options->first_pool_bytes > 0 ? options->first_pool_bytes : options->pool_bytes;
    status = tl_pool_create(provider, first_bytes, options->pool_bytes, options->max_pool_bytes, &hooks, &memory->pool,
                            ret_error);
    if (status != TL_OK) goto fail;
    *ret_memory = memory;
    return TL_OK;

fail:
    tl_memory_destroy(memory);
    return status;
}

void tl_memory_destroy(struct tl_memory *memory)
{
    if (!memory) return;
    stop_registration_thread(memory);
    tl_registrations_close(memory->registrations);
    tl_pool_close(memory->pool);
    tl_device_accesses_fini(&memory->accesses);
    tl_closure_thread_fini(&memory->registration_thread);
    free(memory);
}

/* ----------------------------------------------------------------------------------------------- pool and pins -- */

static void give_block(void *data, void *block)
{
    (void)data;
    tl_pool_give(block);
}

/* Creates a tensor around the block, which it takes over; on error the block is given back. */
static enum tl_status create_around(const struct tl_meta_data *meta_data, struct tl_block *block,
                                    struct tl_tensor **ret_tensor, struct tl_error *ret_error)
{
    enum tl_status status =
        tl_tensor_create_around(meta_data, (void *)block->address, give_block, block, ret_tensor, ret_error);
    if (status != TL_OK) tl_pool_give(block);
    return status;
}

enum tl_status tl_memory_tensor_create(struct tl_memory *memory, const struct tl_meta_data *meta_data,
                                       struct tl_tensor **ret_tensor, struct tl_error *ret_error)
{
    struct tl_block *block = NULL;
    enum tl_status status = tl_meta_data_validate(meta_data, ret_error);
    if (status != TL_OK) return status;
    if (meta_data->size_bytes == 0) return tl_tensor_create_around(meta_data, NULL, NULL, NULL, ret_tensor, ret_error);
    status = tl_pool_take(memory->pool, meta_data->size_bytes, &block, ret_error);
    return status == TL_OK ? create_around(meta_data, block, ret_tensor, ret_error) : status;
}

enum tl_status tl_memory_tensor_take(struct tl_memory *memory, const struct tl_meta_data *meta_data,
                                     struct tl_memory_wait *memory_wait, struct tl_tensor **ret_tensor,
                                     struct tl_error *ret_error)
{
    struct tl_block *block = NULL;
    enum tl_status status = TL_OK;
    if (meta_data->size_bytes == 0) return tl_tensor_create_around(meta_data, NULL, NULL, NULL, ret_tensor, ret_error);
    if (memory_wait != NULL && meta_data->size_bytes <= memory_wait->wait.len_bytes) {
        block = memory_wait->wait.block;
        memory_wait->wait.block = NULL;
    } else {
        status = tl_pool_take_now(memory->pool, meta_data->size_bytes, &block, ret_error);
    }
    if (status != TL_OK) return status;
    if (block == NULL) return tl_error_set(ret_error, TL_UNAVAILABLE, "the pool has no free memory now");
    return create_around(meta_data, block, ret_tensor, ret_error);
}

enum tl_status tl_memory_tensor_take_early(struct tl_memory *memory, const struct tl_meta_data *meta_data,
                                           struct tl_tensor **ret_tensor, struct tl_error *ret_error)
{
    struct tl_block *block = NULL;
    bool is_more_wanted;
    TL_CHECK(meta_data->size_bytes > 0);
    enum tl_status status = tl_pool_take_early(memory->pool, meta_data->size_bytes, &block, &is_more_wanted, ret_error);
    if (status != TL_OK) return status;
    if (is_more_wanted && tl_closure_thread_start(&memory->registration_thread, ret_error) == TL_OK)
        tl_closure_thread_post_urgent(&memory->registration_thread, &memory->serve_job);
    if (block == NULL) return tl_error_set(ret_error, TL_UNAVAILABLE, "the pool has no memory to spare now");
    return create_around(meta_data, block, ret_tensor, ret_error);
}

enum tl_status tl_memory_await(struct tl_memory *memory, struct tl_memory_wait *memory_wait, uint64_t len_bytes,
                               struct tl_error *ret_error)
{
    memory_wait->wait.len_bytes = len_bytes;
    tl_list_init(&memory_wait->wait.link);
    enum tl_status status = tl_closure_thread_start(&memory->registration_thread, ret_error);
    if (status != TL_OK) return status;
    return tl_pool_wait(memory->pool, &memory_wait->wait, ret_error);
}

bool tl_memory_withdraw(struct tl_memory *memory, struct tl_memory_wait *memory_wait)
{
    return tl_pool_withdraw(memory->pool, &memory_wait->wait);
}

void tl_memory_wait_drop(struct tl_memory_wait *memory_wait)
{
    if (memory_wait->wait.block == NULL) return;
    tl_pool_give(memory_wait->wait.block);
    memory_wait->wait.block = NULL;
}

bool tl_memory_is_pinned(struct tl_memory *memory, const struct tl_tensor *tensor)
{
    const struct tl_block *block = tl_tensor_release_context(tensor, give_block);
    return block != NULL && tl_pool_is_block_pinned(memory->pool, block);
}

bool tl_memory_pin(struct tl_memory *memory, struct tl_tensor *tensor, enum tl_region_access access,
                   struct tl_pin *ret_pin)
{
    uint64_t len_bytes = tl_tensor_size_bytes(tensor);
    void *data = tl_tensor_data(tensor);
    if (len_bytes == 0) {
        *ret_pin = (struct tl_pin){0};
        return true;
    }
    if (tl_tensor_is_in_runs(tensor)) return false;
    const struct tl_block *block = tl_tensor_release_context(tensor, give_block);
    struct tl_region *region = block ? tl_pool_region_of(memory->pool, block) : NULL;
    if (!region) region = tl_pool_find(memory->pool, data, len_bytes);
    if (region) {
        set_pin(ret_pin, data, len_bytes, region, NULL);
        return true;
    }
    struct tl_registered *registered = tl_registrations_pin(memory->registrations, tensor, access);
    if (!registered) return false;
    set_pin(ret_pin, data, len_bytes, tl_registered_region(registered), registered);
    return true;
}

void tl_memory_unpin_entry(struct tl_memory *memory, void *entry)
{
    tl_registrations_unpin(memory->registrations, entry);
}

enum tl_status tl_memory_region_map(struct tl_memory *memory, uint64_t len_bytes, struct tl_region **ret_region,
                                    struct tl_error *ret_error)
{
    enum tl_status status;
    do {
        status = tl_region_map(memory->provider, len_bytes, ret_region, ret_error);
    } while (status == TL_RESOURCE_EXHAUSTED && tl_registrations_evict(memory->registrations));
    return status;
}

/* ---------------------------------------------------------------------------------------------------- counters -- */

void tl_memory_count_bounce(struct tl_memory *memory, uint64_t len_bytes)
{
    atomic_fetch_add_explicit(&memory->bounced_bytes, len_bytes, memory_order_relaxed);
}

void tl_memory_format_wait(struct tl_memory *memory, uint64_t len_bytes, struct tl_error *ret_error)
{
    struct tl_memory_stats stats;
    struct tl_error refusal;
    tl_memory_get_stats(memory, &stats);
    tl_pool_get_refusal(memory->pool, &refusal);
    tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                 "it waited for %" PRIu64 " bytes of the pool, of which %" PRIu64 " of %" PRIu64
                 " are in use; release received tensors sooner%s%.500s",
                 len_bytes, stats.pool_used_bytes, stats.pool_bytes,
                 refusal.code != TL_OK ? "; it does not grow: " : "", refusal.code != TL_OK ? refusal.message : "");
}

void tl_memory_get_stats(struct tl_memory *memory, struct tl_memory_stats *ret_stats)
{
    struct tl_pool_stats pool;
    struct tl_registrations_stats registrations;
    tl_pool_get_stats(memory->pool, &pool);
    tl_registrations_get_stats(memory->registrations, &registrations);
    *ret_stats = (struct tl_memory_stats){
        .pool_regions = pool.regions,
        .pool_bytes = pool.bytes,
        .pool_used_bytes = pool.used_bytes,
        .pool_waits = pool.waits,
        .pool_waiting = pool.waiting,
        .registrations = registrations.added_count,
        .cached_count = registrations.count,
        .cached_bytes = registrations.bytes,
        .evictions = registrations.evictions,
        .bounced_bytes = atomic_load_explicit(&memory->bounced_bytes, memory_order_relaxed),
    };
}
