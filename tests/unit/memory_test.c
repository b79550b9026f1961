// SPDX-License-Identifier: Apache-2.0
/* Memory of the data plane: tensors of the pool, pins, the registration thread, the end, and all possible failures. */
#include <check.h>
#include <semaphore.h>
#include <string.h>

#include "fakes/region_provider.h"

#include "tests/fakes/fault_alloc.h"

#include "base/mailbox.h"
#include "dataplane/memory/memory.c"
#include "dataplane/memory/pages.h"
#include "fakes/run_suite.h"
#include "tensor/tensor.c"

#define KIB UINT64_C(1024)

static struct region_provider provider;
static struct tl_memory *memory;
static struct tl_error error;
static char users[2][4096];

static const struct tl_memory_options options = {
    .pool_bytes = 64 * KIB, .max_pool_bytes = 128 * KIB, .max_cached_bytes = 64 * KIB, .max_cached_count = 4};

static const struct tl_meta_data bytes_1000 = {.dtype = TL_U8, .shape = {1, {1000}}, .size_bytes = 1000};

/* The owner of the requests. */
static struct tl_mailbox mailbox;
static sem_t posted;

static void post(void *context, struct tl_closure *closure)
{
    if (tl_mailbox_post(context, closure)) ck_abort_msg("the owner is awake");
    sem_post(&posted);
}

struct request {
    struct tl_registration registration;
    unsigned done_count;
};

static void done(struct tl_closure *closure)
{
    struct tl_registration *registration = TL_CONTAINER_OF(closure, struct tl_registration, closure);
    TL_CONTAINER_OF(registration, struct request, registration)->done_count++;
}

static void setup(void)
{
    region_provider_init(&provider);
    tl_mailbox_init(&mailbox);
    sem_init(&posted, 0, 0);
    ck_assert_int_eq(tl_memory_create(&provider.base, &options, &memory, &error), TL_OK);
}

static void teardown(void)
{
    tl_memory_destroy(memory);
    ck_assert_uint_eq(provider.live_count, 0);
    tl_mailbox_fini(&mailbox);
}

static struct tl_tensor *create(const struct tl_meta_data *meta_data)
{
    struct tl_tensor *tensor = NULL;
    ck_assert_int_eq(tl_memory_tensor_create(memory, meta_data, &tensor, &error), TL_OK);
    ck_assert(tl_meta_data_is_equal(tl_tensor_meta_data(tensor), meta_data));
    return tensor;
}

static struct tl_tensor *wrap(void *data)
{
    struct tl_tensor *tensor = NULL;
    struct tl_tensor_view view = {.size_bytes = sizeof(view),
                                  .dtype = TL_U8,
                                  .rank = 1,
                                  .dims = &(uint64_t){1000},
                                  .data = data,
                                  .offset_bytes = 96,
                                  .capacity_bytes = 4096};
    ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, &error), TL_OK);
    return tensor;
}

static void ask(struct request *request, struct tl_tensor *tensor)
{
    *request = (struct request){
        .registration = {
            .tensor = tensor, .access = TL_REGION_WRITE, .closure = {.run = done}, .post = post, .context = &mailbox}};
    tl_memory_register(memory, &request->registration);
}

static enum tl_status wait_for(struct request *request)
{
    while (request->done_count == 0) {
        sem_wait(&posted);
        tl_mailbox_run(&mailbox, &(struct tl_quota){0});
    }
    ck_assert_uint_eq(request->done_count, 1);
    return request->registration.error.code;
}

static struct tl_memory_stats stats(void)
{
    struct tl_memory_stats now;
    tl_memory_get_stats(memory, &now);
    return now;
}

/* -------------------------------------------------------------------------------------------------------- pool -- */

START_TEST(tensors_of_the_pool)
{
    struct tl_pin pin, part_pin;
    struct tl_tensor *tensor = create(&bytes_1000), *alias = NULL;
    memset(tl_tensor_data(tensor), 1, 1000);
    ck_assert(tl_tensor_is_writable(tensor));
    ck_assert(tl_memory_pin(memory, tensor, TL_REGION_WRITE, &pin));
    ck_assert_ptr_eq(pin.address, tl_tensor_data(tensor));
    ck_assert_uint_eq(pin.len_bytes, 1000);
    ck_assert_ptr_null(pin.entry);
    ck_assert_ptr_eq(pin.region->address, provider.last_address);
    ck_assert_int_eq(tl_tensor_create_alias(tensor, NULL, NULL, &alias, &error), TL_OK);
    ck_assert(tl_memory_pin(memory, alias, TL_REGION_READ, &part_pin));
    ck_assert_ptr_eq(part_pin.region, pin.region);
    ck_assert_uint_eq(stats().pool_used_bytes, 1024);
    tl_memory_unpin(memory, &pin);
    ck_assert_ptr_null(pin.region);
    tl_memory_unpin(memory, &pin);
    tl_memory_unpin(memory, &part_pin);
    tl_tensor_put(tensor);
    ck_assert_uint_eq(stats().pool_used_bytes, 1024);
    tl_tensor_put(alias);
    ck_assert_uint_eq(stats().pool_used_bytes, 0);
    ck_assert_uint_eq(stats().registrations, 0);
}
END_TEST

START_TEST(strings_of_the_pool)
{
    const struct tl_meta_data meta_data = {.dtype = TL_STRING, .shape = {1, {1}}, .size_bytes = 10};
    static const unsigned char good[] = {2, 0, 0, 0, 0, 0, 0, 0, 'h', 'i'};
    struct tl_string string = {0};
    struct tl_tensor *tensor = create(&meta_data);
    memset(tl_tensor_data(tensor), 0xff, 10);
    ck_assert_int_eq(tl_tensor_check_strings(tensor, &error), TL_DATA_LOSS);
    memcpy(tl_tensor_data(tensor), good, sizeof(good));
    ck_assert_int_eq(tl_tensor_check_strings(tensor, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_string(tensor, 0, &string, &error), TL_OK);
    ck_assert_mem_eq(string.data, "hi", 2);
    tl_tensor_put(tensor);
    ck_assert_uint_eq(stats().pool_used_bytes, 0);
}
END_TEST

START_TEST(tensors_without_bytes)
{
    static const struct tl_meta_data all[] = {
        {.is_dead = true}, {.dtype = TL_F32, .shape = {2, {0, 7}}}, {.dtype = TL_STRING, .shape = {1, {0}}}};
    for (size_t i = 0; i < TL_ARRAY_COUNT(all); i++) {
        struct request request;
        struct tl_pin pin;
        struct tl_tensor *tensor = create(&all[i]);
        ck_assert(tl_memory_pin(memory, tensor, TL_REGION_WRITE, &pin));
        ck_assert_ptr_null(pin.region);
        tl_memory_unpin(memory, &pin);
        ask(&request, tensor);
        ck_assert_int_eq(wait_for(&request), TL_OK);
        ck_assert_ptr_null(request.registration.pin.region);
        ck_assert_uint_eq(stats().pool_used_bytes, 0);
        tl_tensor_put(tensor);
    }
}
END_TEST

START_TEST(refused_tensors)
{
    struct tl_meta_data meta_data = bytes_1000;
    struct tl_tensor *tensor = NULL;
    meta_data.size_bytes++;
    ck_assert_int_eq(tl_memory_tensor_create(memory, &meta_data, &tensor, &error), TL_INVALID_ARGUMENT);
    meta_data.size_bytes = 1 << 20;
    meta_data.shape.dims[0] = 1 << 20;
    ck_assert_int_eq(tl_memory_tensor_create(memory, &meta_data, &tensor, &error), TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(error.message, "verbs.max_pool"));
    ck_assert_ptr_null(tensor);
    ck_assert_uint_eq(stats().pool_used_bytes, 0);
}
END_TEST

START_TEST(no_memory_for_a_tensor)
{
    const struct tl_meta_data meta_data = {.dtype = TL_STRING, .shape = {1, {1}}, .size_bytes = 10};
    for (unsigned n = 1;; n++) {
        struct tl_tensor *tensor = NULL;
        fault_arm(n);
        enum tl_status status = tl_memory_tensor_create(memory, &meta_data, &tensor, &error);
        if (!fault_was_hit()) {
            ck_assert_int_eq(status, TL_OK);
            ck_assert_uint_gt(n, 1);
            tl_tensor_put(tensor);
            break;
        }
        ck_assert_int_eq(status, TL_RESOURCE_EXHAUSTED);
        ck_assert_ptr_null(tensor);
        ck_assert_uint_eq(stats().pool_used_bytes, 0);
    }
}
END_TEST

START_TEST(tensors_outlive_the_memory)
{
    struct request request;
    struct tl_tensor *of_pool = create(&bytes_1000), *of_user = wrap(users[0]);
    ask(&request, of_user);
    ck_assert_int_eq(wait_for(&request), TL_OK);
    tl_memory_unpin(memory, &request.registration.pin);
    tl_memory_destroy(memory);
    memory = NULL;
    ck_assert_uint_eq(provider.live_count, 0);
    memset(tl_tensor_data(of_pool), 1, 1000);
    tl_tensor_put(of_pool);
    tl_tensor_put(of_user);
}
END_TEST

/* -------------------------------------------------------------------------------------------------------- room -- */

struct waiter {
    struct tl_memory_wait memory_wait;
    unsigned done_count;
};

static void came(struct tl_closure *closure)
{
    TL_CONTAINER_OF(closure, struct waiter, memory_wait.closure)->done_count++;
}

static enum tl_status await(struct waiter *waiter, uint64_t len_bytes)
{
    *waiter = (struct waiter){.memory_wait = {.closure = {.run = came}, .post = post, .context = &mailbox}};
    return tl_memory_await(memory, &waiter->memory_wait, len_bytes, &error);
}

static void wait_for_memory(struct waiter *waiter)
{
    while (waiter->done_count == 0) {
        sem_wait(&posted);
        tl_mailbox_run(&mailbox, &(struct tl_quota){0});
    }
    ck_assert_uint_eq(waiter->done_count, 1);
}

static const struct tl_meta_data bytes_65536 = {.dtype = TL_U8, .shape = {1, {65536}}, .size_bytes = 65536};

/* There may be two regions: the second is made for the waiting request; then only freed memory helps. */
START_TEST(memory_wait)
{
    struct waiter waiter;
    struct tl_tensor *first = create(&bytes_65536), *second = NULL, *third = NULL;
    ck_assert_int_eq(tl_memory_tensor_take(memory, &bytes_1000, NULL, &second, &error), TL_UNAVAILABLE);
    ck_assert_int_eq(await(&waiter, 65536), TL_OK);
    wait_for_memory(&waiter);
    ck_assert_int_eq(waiter.memory_wait.wait.error.code, TL_OK);
    ck_assert_uint_eq(stats().pool_regions, 2);
    ck_assert_int_eq(tl_memory_tensor_take(memory, &bytes_65536, &waiter.memory_wait, &second, &error), TL_OK);
    memset(tl_tensor_data(second), 1, 65536);
    tl_memory_wait_drop(&waiter.memory_wait); /* Nothing of it is left. */
    ck_assert_int_eq(await(&waiter, 1000), TL_OK);
    ck_assert_uint_eq(stats().pool_waiting, 1);
    tl_tensor_put(first);
    wait_for_memory(&waiter);
    ck_assert_int_eq(tl_memory_tensor_take(memory, &bytes_1000, &waiter.memory_wait, &third, &error), TL_OK);
    ck_assert_uint_eq(stats().pool_waiting, 0);
    ck_assert_uint_eq(stats().pool_waits, 2);
    tl_tensor_put(second);
    tl_tensor_put(third);
    ck_assert_uint_eq(stats().pool_used_bytes, 0);
}
END_TEST

START_TEST(space_that_is_not_taken)
{
    struct waiter waiter;
    ck_assert_int_eq(await(&waiter, 200 * KIB), TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(error.message, "verbs.max_pool"));
    struct tl_tensor *first = create(&bytes_65536), *second = create(&bytes_65536);
    ck_assert_int_eq(await(&waiter, 1000), TL_OK);
    ck_assert(tl_memory_withdraw(memory, &waiter.memory_wait));
    tl_memory_wait_drop(&waiter.memory_wait);
    ck_assert_int_eq(await(&waiter, 1000), TL_OK);
    tl_tensor_put(first);
    wait_for_memory(&waiter);
    ck_assert(!tl_memory_withdraw(memory, &waiter.memory_wait));
    ck_assert_uint_eq(stats().pool_used_bytes, 65536 + 1024);
    tl_memory_wait_drop(&waiter.memory_wait);
    ck_assert_uint_eq(stats().pool_used_bytes, 65536);
    tl_tensor_put(second);
}
END_TEST

/* Unused registrations have reached the limit of locked memory: they are evicted, and the pool grows, or another
 * registration succeeds. */
START_TEST(idle_registrations_make_space)
{
    struct tl_region *region = NULL;
    struct waiter waiter;
    struct request requests[2];
    struct tl_tensor *of_users[] = {wrap(users[0]), wrap(users[1])}, *first = create(&bytes_65536), *second = NULL;
    for (size_t i = 0; i < 2; i++) {
        ask(&requests[i], of_users[i]);
        ck_assert_int_eq(wait_for(&requests[i]), TL_OK);
    }
    tl_memory_unpin(memory, &requests[0].registration.pin);
    provider.locked_limit_bytes = provider.live_bytes + 64 * KIB - sizeof(users[0]);
    if (_i == 0) {
        second = create(&bytes_65536);
    } else if (_i == 1) {
        ck_assert_int_eq(await(&waiter, 65536), TL_OK);
        wait_for_memory(&waiter);
        ck_assert_int_eq(tl_memory_tensor_take(memory, &bytes_65536, &waiter.memory_wait, &second, &error), TL_OK);
    } else {
        ck_assert_int_eq(tl_memory_region_map(memory, 64 * KIB, &region, &error), TL_OK);
        void *address = region->address;
        tl_region_destroy(region);
        tl_pages_unmap(address, 64 * KIB);
    }
    ck_assert_uint_eq(stats().evictions, 1);
    ck_assert_uint_eq(stats().cached_count, 1); /* The one that is in use. */
    tl_memory_unpin(memory, &requests[1].registration.pin);
    tl_tensor_put(first);
    tl_tensor_put(second);
    tl_tensor_put(of_users[0]);
    tl_tensor_put(of_users[1]);
}
END_TEST

/* ----------------------------------------------------------------------------------------- registration thread -- */

START_TEST(registered)
{
    struct request request;
    struct tl_pin pin;
    struct tl_tensor *tensor = wrap(users[0]), *other = wrap(users[0]);
    ck_assert(!tl_memory_pin(memory, tensor, TL_REGION_READ, &pin));
    ask(&request, tensor);
    ck_assert_int_eq(wait_for(&request), TL_OK);
    ck_assert_ptr_eq(request.registration.pin.address, users[0] + 96);
    ck_assert_uint_eq(request.registration.pin.len_bytes, 1000);
    ck_assert_ptr_eq(request.registration.pin.region->address, users[0]);
    ck_assert_uint_eq(request.registration.pin.region->len_bytes, 4096);
    ck_assert(tl_memory_pin(memory, other, TL_REGION_READ, &pin));
    ck_assert_ptr_eq(pin.region, request.registration.pin.region);
    tl_memory_unpin(memory, &pin);
    tl_memory_unpin(memory, &request.registration.pin);
    ask(&request, other);
    ck_assert_int_eq(wait_for(&request), TL_OK);
    tl_memory_unpin(memory, &request.registration.pin);
    ck_assert_uint_eq(stats().registrations, 1);
    ck_assert_uint_eq(stats().cached_count, 1);
    ck_assert_uint_eq(stats().cached_bytes, 4096);
    tl_tensor_put(tensor);
    tl_tensor_put(other);
    ck_assert_uint_eq(stats().cached_count, 0);
}
END_TEST

START_TEST(memory_of_the_pool_is_not_registered_again)
{
    struct request request;
    struct tl_tensor *tensor = create(&bytes_1000);
    struct tl_tensor *slice = wrap((char *)tl_tensor_data(tensor) - 96 + 500);
    ask(&request, tensor);
    ck_assert_int_eq(wait_for(&request), TL_OK);
    tl_memory_unpin(memory, &request.registration.pin);
    ask(&request, slice);
    ck_assert_int_eq(wait_for(&request), TL_OK);
    ck_assert_ptr_null(request.registration.pin.entry);
    tl_memory_unpin(memory, &request.registration.pin);
    ck_assert_uint_eq(stats().registrations, 0);
    tl_tensor_put(slice);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(failed)
{
    struct request request;
    struct tl_tensor *tensor = wrap(users[0]);
    provider.fail_countdown = 1;
    ask(&request, tensor);
    ck_assert_int_eq(wait_for(&request), TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(request.registration.error.message, "locked memory is scarce"));
    ck_assert_ptr_null(request.registration.pin.region);
    ck_assert_uint_eq(stats().cached_count, 0);
    /* Makes the same request once more. */
    request.done_count = 0;
    tl_memory_register(memory, &request.registration);
    ck_assert_int_eq(wait_for(&request), TL_OK);
    tl_memory_unpin(memory, &request.registration.pin);
    tl_tensor_put(tensor);
}
END_TEST

/* Holds the registration thread in the provider until destroy has begun. */
static sem_t is_registering;

static void hold_until_destroy(struct region_provider *of)
{
    of->hook = NULL;
    sem_post(&is_registering);
    while (!tl_closure_thread_is_stopping(&memory->registration_thread))
        sched_yield();
}

START_TEST(destroyed_with_waiting_registrations)
{
    struct request requests[3];
    struct tl_tensor *tensors[] = {wrap(users[0]), wrap(users[0]), wrap(users[1])};
    sem_init(&is_registering, 0, 0);
    provider.hook = hold_until_destroy;
    for (size_t i = 0; i < 3; i++)
        ask(&requests[i], tensors[i]);
    sem_wait(&is_registering);
    tl_memory_destroy(memory);
    memory = NULL;
    ck_assert_uint_eq(tl_mailbox_run(&mailbox, &(struct tl_quota){0}), 3);
    for (size_t i = 0; i < 3; i++) {
        ck_assert_uint_eq(requests[i].done_count, 1);
        ck_assert_int_eq(requests[i].registration.error.code, TL_CANCELLED);
        ck_assert_ptr_null(requests[i].registration.pin.region);
        tl_tensor_put(tensors[i]);
    }
    ck_assert_uint_eq(provider.live_count, 0);
    /* The pool, and the registration that was under way. */
    ck_assert_uint_eq(provider.created_count, 2);
}
END_TEST

/* -------------------------------------------------------------------------------------------- faults, counters -- */

START_TEST(counters)
{
    ck_assert_uint_eq(stats().pool_regions, 1);
    ck_assert_uint_eq(stats().pool_bytes, 64 * KIB);
    ck_assert_uint_eq(stats().bounced_bytes, 0);
    tl_memory_count_bounce(memory, 7);
    tl_memory_count_bounce(memory, UINT64_C(1) << 40);
    ck_assert_uint_eq(stats().bounced_bytes, (UINT64_C(1) << 40) + 7);
}
END_TEST

START_TEST(cannot_be_created)
{
    struct tl_memory *other = NULL;
    provider.fail_countdown = 1;
    ck_assert_int_eq(tl_memory_create(&provider.base, &options, &other, &error), TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(error.message, "locked memory is scarce"));
    fault_arm(1);
    ck_assert_int_eq(tl_memory_create(&provider.base, &options, &other, &error), TL_RESOURCE_EXHAUSTED);
    ck_assert(fault_was_hit());
    ck_assert_ptr_null(other);
    ck_assert_uint_eq(provider.live_count, 1);
    tl_memory_destroy(NULL);
}
END_TEST

/* Does what a worker does in its life; only the provider fails. Returns how many of its steps failed. */
static unsigned live_a_life(void)
{
    unsigned failures = 0;
    struct tl_memory *life = memory;
    struct tl_tensor *tensors[3] = {NULL};
    const struct tl_meta_data large = {.dtype = TL_U8, .shape = {1, {40000}}, .size_bytes = 40000};
    if (tl_memory_create(&provider.base, &options, &memory, &error) != TL_OK) {
        memory = life;
        return 1;
    }
    for (size_t i = 0; i < 3; i++)
        failures += tl_memory_tensor_create(memory, &large, &tensors[i], &error) != TL_OK;
    for (size_t i = 0; i < 4; i++) {
        struct request request;
        struct tl_tensor *tensor = wrap(users[i % 2]);
        ask(&request, tensor);
        failures += wait_for(&request) != TL_OK;
        tl_memory_unpin(memory, &request.registration.pin);
        tl_tensor_put(tensor);
    }
    for (size_t i = 0; i < 3; i++)
        tl_tensor_put(tensors[i]);
    tl_memory_destroy(memory);
    memory = life;
    return failures;
}

START_TEST(the_provider_fails_once)
{
    /* The third large tensor always exceeds the pool. */
    ck_assert_uint_eq(live_a_life(), 1);
    unsigned n = 1;
    for (;; n++) {
        provider.fail_countdown = n;
        unsigned failures = live_a_life();
        bool was_hit = provider.fail_countdown == 0;
        provider.fail_countdown = 0;
        ck_assert_uint_eq(provider.live_count, 1);
        if (!was_hit) break;
        /* Without the pool nothing else works; the third tensor tries again to grow it, and then fits. */
        ck_assert_uint_eq(failures, n <= 2 ? 1 : 2);
    }
    /* The pool, its growth, four registrations. */
    ck_assert_uint_eq(n, 7);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("memory");
    TCase *tcase = tcase_create("memory");
    tcase_set_timeout(tcase, 60);
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, tensors_of_the_pool);
    tcase_add_test(tcase, strings_of_the_pool);
    tcase_add_test(tcase, tensors_without_bytes);
    tcase_add_test(tcase, refused_tensors);
    tcase_add_test(tcase, no_memory_for_a_tensor);
    tcase_add_test(tcase, tensors_outlive_the_memory);
    tcase_add_test(tcase, memory_wait);
    tcase_add_test(tcase, space_that_is_not_taken);
    tcase_add_loop_test(tcase, idle_registrations_make_space, 0, 3);
    tcase_add_test(tcase, registered);
    tcase_add_test(tcase, memory_of_the_pool_is_not_registered_again);
    tcase_add_test(tcase, failed);
    tcase_add_test(tcase, destroyed_with_waiting_registrations);
    tcase_add_test(tcase, counters);
    tcase_add_test(tcase, cannot_be_created);
    tcase_add_test(tcase, the_provider_fails_once);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
