// SPDX-License-Identifier: Apache-2.0
/*
 * Memory of the data plane under several threads: each makes tensors of the pool, some after a wait for room, and of
 * shared allocations, pins and registers them, and lets them die in any order, some only while the memory is destroyed.
 * Whatever the order: blocks keep their bytes, a pin names a region that lives and covers it, each request is answered
 * once, and the provider can go as soon as destroy returns. ThreadSanitizer finds the rest.
 */
#include <check.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "fakes/region_provider.h"

#include "dataplane/memory/memory.h"
#include "fakes/run_suite.h"

#define KIB UINT64_C(1024)

enum { THREADS = 4, ROUNDS = 12, OPERATIONS = 400, SLOTS = 8, ALLOCATIONS = 6, ALLOCATION_BYTES = 4096 };

static const struct tl_memory_options options = {.pool_bytes = 32 * KIB,
                                                 .max_pool_bytes = 160 * KIB,
                                                 .max_cached_bytes = 5 * ALLOCATION_BYTES,
                                                 .max_cached_count = 4};

static struct region_provider provider;
static struct tl_memory *memory;
static char allocations[ALLOCATIONS][ALLOCATION_BYTES];
static pthread_barrier_t barrier;
static atomic_ulong asked, answered, registered, pinned, failures, waited, granted;

struct slot {
    struct tl_tensor *tensor; /* NULL: free. */
    struct tl_pin pin;
    unsigned char mark; /* The content of a tensor of the pool; 0: a tensor of an allocation. */
};

struct actor {
    uint64_t random_state;
    struct slot slots[SLOTS];
    struct tl_registration registration;
    struct tl_memory_wait memory_wait;
    sem_t is_answered;
};

static struct actor actors[THREADS];

/* SplitMix64. */
static unsigned below(struct actor *actor, unsigned limit)
{
    uint64_t z = (actor->random_state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (unsigned)((z ^ (z >> 31)) % limit);
}

static void post(void *context, struct tl_closure *closure)
{
    struct actor *actor = context;
    if (closure == &actor->registration.closure) {
        atomic_fetch_add(&answered, 1);
    } else {
        ck_assert_ptr_eq(closure, &actor->memory_wait.closure);
    }
    sem_post(&actor->is_answered);
}

/* Waits a moment for space: the other threads may wait as well, while they hold all blocks. */
static enum tl_status make_after_a_wait(struct actor *actor, const struct tl_meta_data *meta_data,
                                        struct tl_tensor **ret_tensor, struct tl_error *ret_error)
{
    actor->memory_wait = (struct tl_memory_wait){.post = post, .context = actor};
    enum tl_status status = tl_memory_await(memory, &actor->memory_wait, meta_data->size_bytes, ret_error);
    if (status != TL_OK) return status;
    atomic_fetch_add(&waited, 1);
    for (unsigned i = below(actor, 100); i > 0; i--)
        sched_yield();
    if (tl_memory_withdraw(memory, &actor->memory_wait)) return TL_RESOURCE_EXHAUSTED;
    while (sem_wait(&actor->is_answered) != 0)
        continue;
    *ret_error = actor->memory_wait.wait.error;
    if (ret_error->code != TL_OK) return ret_error->code;
    atomic_fetch_add(&granted, 1);
    return tl_memory_tensor_take(memory, meta_data, &actor->memory_wait, ret_tensor, ret_error);
}

static enum tl_status make(struct actor *actor, const struct tl_meta_data *meta_data, struct tl_tensor **ret_tensor,
                           struct tl_error *ret_error)
{
    if (below(actor, 2)) return tl_memory_tensor_create(memory, meta_data, ret_tensor, ret_error);
    enum tl_status status = tl_memory_tensor_take(memory, meta_data, NULL, ret_tensor, ret_error);
    return status == TL_UNAVAILABLE ? make_after_a_wait(actor, meta_data, ret_tensor, ret_error) : status;
}

static void make_in_pool(struct actor *actor, struct slot *slot)
{
    uint64_t len_bytes = 1 + below(actor, below(actor, 8) == 0 ? 50000 : 3000);
    struct tl_meta_data meta_data = {.dtype = TL_U8, .shape = {1, {len_bytes}}, .size_bytes = len_bytes};
    struct tl_error error;
    enum tl_status status = make(actor, &meta_data, &slot->tensor, &error);
    if (status != TL_OK) {
        ck_assert_int_eq(status, TL_RESOURCE_EXHAUSTED);
        return;
    }
    slot->mark = (unsigned char)(1 + below(actor, 255));
    memset(tl_tensor_data(slot->tensor), slot->mark, len_bytes);
}

static void make_around_user_memory(struct actor *actor, struct slot *slot)
{
    uint64_t len_bytes = 1 + below(actor, 1000);
    struct tl_tensor_view view = {.size_bytes = sizeof(view),
                                  .dtype = TL_U8,
                                  .rank = 1,
                                  .dims = &len_bytes,
                                  .data = allocations[below(actor, ALLOCATIONS)],
                                  .offset_bytes = below(actor, 3000),
                                  .capacity_bytes = ALLOCATION_BYTES};
    ck_assert_int_eq(tl_tensor_wrap(&view, &slot->tensor, NULL), TL_OK);
    slot->mark = 0;
}

/* Pins the tensor, through the registration thread where that is needed. */
static void pin(struct actor *actor, struct slot *slot)
{
    enum tl_region_access access = below(actor, 2) ? TL_REGION_WRITE : TL_REGION_READ;
    if (tl_memory_pin(memory, slot->tensor, access, &slot->pin)) {
        atomic_fetch_add(&pinned, 1);
    } else {
        actor->registration =
            (struct tl_registration){.tensor = slot->tensor, .access = access, .post = post, .context = actor};
        atomic_fetch_add(&asked, 1);
        tl_memory_register(memory, &actor->registration);
        while (sem_wait(&actor->is_answered) != 0)
            continue;
        slot->pin = actor->registration.pin;
        if (actor->registration.error.code == TL_OK) atomic_fetch_add(&registered, 1);
        if (actor->registration.error.code != TL_OK) atomic_fetch_add(&failures, 1);
        ck_assert((slot->pin.region != NULL) == (actor->registration.error.code == TL_OK));
    }
    if (!slot->pin.region) return;
    const struct tl_region *region = slot->pin.region;
    ck_assert(region->access == TL_REGION_WRITE || access == TL_REGION_READ);
    ck_assert(slot->pin.address == tl_tensor_data(slot->tensor));
    ck_assert((char *)region->address <= (char *)slot->pin.address);
    ck_assert((char *)slot->pin.address + slot->pin.len_bytes <= (char *)region->address + region->len_bytes);
}

static void drop(struct slot *slot)
{
    const unsigned char *bytes = tl_tensor_data(slot->tensor);
    if (slot->mark != 0) {
        ck_assert_uint_eq(bytes[0], slot->mark);
        ck_assert_int_eq(memcmp(bytes, bytes + 1, tl_tensor_size_bytes(slot->tensor) - 1), 0);
    }
    tl_tensor_put(slot->tensor);
    slot->tensor = NULL;
}

static void do_one(struct actor *actor)
{
    struct slot *slot = &actor->slots[below(actor, SLOTS)];
    if (!slot->tensor) {
        if (below(actor, 2))
            make_in_pool(actor, slot);
        else
            make_around_user_memory(actor, slot);
    } else if (slot->pin.region) {
        /* Now and then a pin outlives its tensor. */
        bool dies_first = below(actor, 8) == 0;
        if (dies_first) drop(slot);
        tl_memory_unpin(memory, &slot->pin);
    } else if (below(actor, 2)) {
        pin(actor, slot);
    } else {
        drop(slot);
    }
}

/* What is alive at the end dies while the main thread destroys the memory. */
static void *act(void *argument)
{
    struct actor *actor = argument;
    for (int i = 0; i < OPERATIONS; i++)
        do_one(actor);
    for (int i = 0; i < SLOTS; i++)
        tl_memory_unpin(memory, &actor->slots[i].pin);
    pthread_barrier_wait(&barrier);
    for (int i = 0; i < SLOTS; i++)
        if (actor->slots[i].tensor) drop(&actor->slots[i]);
    return NULL;
}

static void run_round(uint64_t seed)
{
    pthread_t threads[THREADS];
    struct tl_memory_stats stats;
    struct tl_error error;
    ck_assert_int_eq(tl_memory_create(&provider.base, &options, &memory, &error), TL_OK);
    for (unsigned i = 0; i < THREADS; i++) {
        actors[i].random_state = seed * THREADS + i;
        ck_assert_int_eq(pthread_create(&threads[i], NULL, act, &actors[i]), 0);
    }
    pthread_barrier_wait(&barrier);
    tl_memory_get_stats(memory, &stats);
    ck_assert_uint_le(stats.cached_count, options.max_cached_count);
    ck_assert_uint_le(stats.cached_bytes, options.max_cached_bytes);
    ck_assert_uint_le(stats.pool_bytes, options.max_pool_bytes);
    tl_memory_destroy(memory);
    ck_assert_uint_eq(provider.live_count, 0);
    for (unsigned i = 0; i < THREADS; i++)
        ck_assert_int_eq(pthread_join(threads[i], NULL), 0);
}

START_TEST(everything_at_once)
{
    region_provider_init(&provider);
    pthread_barrier_init(&barrier, NULL, THREADS + 1);
    for (unsigned i = 0; i < THREADS; i++)
        sem_init(&actors[i].is_answered, 0, 0);
    for (uint64_t round = 0; round < ROUNDS; round++) {
        provider.fail_countdown = (unsigned)round * 3;
        run_round(round);
    }
    ck_assert_uint_eq(asked, answered);
    ck_assert_uint_eq(asked, registered + failures);
    ck_assert_uint_gt(registered, 0);
    ck_assert_uint_gt(pinned, 0);
    ck_assert_uint_gt(granted, 0);
    ck_assert_uint_gt(waited, granted);
    pthread_barrier_destroy(&barrier);
}
END_TEST

/* ------------------------------------------------------------------------------------------ a death at the end -- */

static sem_t is_dying, is_ending;

/* Holds the thread that destroys the first region until the memory is being destroyed, and a little longer. */
static void hold_until_the_end(struct region_provider *of)
{
    of->destroy_hook = NULL;
    sem_post(&is_dying);
    while (sem_wait(&is_ending) != 0)
        continue;
    nanosleep(&(struct timespec){.tv_nsec = 20 * 1000 * 1000}, NULL);
}

static void *put(void *tensor)
{
    tl_tensor_put(tensor);
    return NULL;
}

START_TEST(destroy_waits_for_a_tensor_that_dies)
{
    pthread_t thread;
    struct actor *actor = &actors[0];
    struct slot *slot = &actor->slots[0];
    region_provider_init(&provider);
    sem_init(&actor->is_answered, 0, 0);
    sem_init(&is_dying, 0, 0);
    sem_init(&is_ending, 0, 0);
    ck_assert_int_eq(tl_memory_create(&provider.base, &options, &memory, NULL), TL_OK);
    make_around_user_memory(actor, slot);
    pin(actor, slot);
    tl_memory_unpin(memory, &slot->pin);
    provider.destroy_hook = hold_until_the_end;
    ck_assert_int_eq(pthread_create(&thread, NULL, put, slot->tensor), 0);
    while (sem_wait(&is_dying) != 0)
        continue;
    sem_post(&is_ending);
    tl_memory_destroy(memory);
    /* The provider may be closed now. */
    pthread_mutex_lock(&provider.mutex);
    ck_assert_uint_eq(provider.live_count, 0);
    pthread_mutex_unlock(&provider.mutex);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("memory threads");
    TCase *tcase = tcase_create("memory threads");
    tcase_set_timeout(tcase, 100);
    tcase_add_test(tcase, everything_at_once);
    tcase_add_test(tcase, destroy_waits_for_a_tensor_that_dies);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
