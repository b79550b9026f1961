// SPDX-License-Identifier: Apache-2.0
/* Registrations of users' memory: shared, pinned, replaced, evicted, ended with their memory, and all possible
 * failures. */
#include <check.h>
#include <string.h>

#include "fakes/region_provider.h"

#include "tests/fakes/fault_alloc.h"

#include "dataplane/memory/registrations.c"
#include "fakes/run_suite.h"

static struct region_provider provider;
static struct tl_registrations *registrations;
static struct tl_error error;
static char memory[4][1000];

static void setup(void)
{
    region_provider_init(&provider);
    ck_assert_int_eq(tl_registrations_create(&provider.base, 3000, 3, &registrations, &error), TL_OK);
}

static void teardown(void)
{
    tl_registrations_close(registrations);
    ck_assert_uint_eq(provider.live_count, 0);
}

static unsigned live_at_release;

static void release(void *data, void *context)
{
    (void)data;
    (void)context;
    live_at_release = provider.live_count;
}

/* Makes a tensor of len_bytes at offset_bytes in an allocation. */
static struct tl_tensor *wrap_part(void *data, uint64_t capacity_bytes, uint64_t offset_bytes, uint64_t len_bytes)
{
    struct tl_tensor *tensor = NULL;
    struct tl_tensor_view view = {
        .size_bytes = sizeof(view),
        .dtype = TL_U8,
        .rank = 1,
        .dims = &len_bytes,
        .data = data,
        .offset_bytes = offset_bytes,
        .capacity_bytes = capacity_bytes,
        .release = release,
    };
    ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, &error), TL_OK);
    return tensor;
}

static struct tl_tensor *wrap(void *data)
{
    return wrap_part(data, 1000, 0, 1000);
}

static struct tl_registered *add(struct tl_tensor *tensor, enum tl_region_access access)
{
    struct tl_registered *registered = NULL;
    ck_assert_int_eq(tl_registrations_add(registrations, tensor, access, &registered, &error), TL_OK);
    return registered;
}

/* Registers the tensor, and leaves it idle. */
static void add_idle(struct tl_tensor *tensor)
{
    tl_registrations_unpin(registrations, add(tensor, TL_REGION_READ));
}

static bool is_registered(struct tl_tensor *tensor, enum tl_region_access access)
{
    struct tl_registered *registered = tl_registrations_pin(registrations, tensor, access);
    if (registered) tl_registrations_unpin(registrations, registered);
    return registered != NULL;
}

static void expect(uint64_t added_count, uint64_t count, uint64_t bytes, uint64_t evictions)
{
    struct tl_registrations_stats stats;
    tl_registrations_get_stats(registrations, &stats);
    ck_assert_uint_eq(stats.added_count, added_count);
    ck_assert_uint_eq(stats.count, count);
    ck_assert_uint_eq(stats.bytes, bytes);
    ck_assert_uint_eq(stats.evictions, evictions);
    ck_assert_uint_eq(provider.created_count, added_count);
    ck_assert_uint_eq(provider.live_count, count);
}

/* ----------------------------------------------------------------------------------------------------- sharing -- */

START_TEST(one_for_all_tensors)
{
    struct tl_tensor *whole = wrap(memory[0]), *part = wrap_part(memory[0], 1000, 999, 1);
    ck_assert(!is_registered(whole, TL_REGION_READ));
    struct tl_registered *registered = add(part, TL_REGION_READ);
    struct tl_region *region = tl_registered_region(registered);
    ck_assert_ptr_eq(region->address, memory[0]);
    ck_assert_uint_eq(region->len_bytes, 1000);
    ck_assert_ptr_eq(tl_registrations_pin(registrations, whole, TL_REGION_READ), registered);
    ck_assert_ptr_eq(add(whole, TL_REGION_READ), registered);
    for (int i = 0; i < 3; i++)
        tl_registrations_unpin(registrations, registered);
    expect(1, 1, 1000, 0);
    tl_tensor_put(part);
    expect(1, 1, 1000, 0);
    tl_tensor_put(whole);
    expect(1, 0, 0, 0);
    ck_assert_uint_eq(live_at_release, 0);
}
END_TEST

enum { VIEWS = 10000, VIEW_BYTES = 200000 };

/* This memory is never touched. */
static char *const arena = (char *)0x100000000000;

static struct tl_tensor *wrap_view(uint64_t i)
{
    return wrap_part(arena, (uint64_t)VIEWS * VIEW_BYTES, i * VIEW_BYTES, VIEW_BYTES);
}

static void open_large(void)
{
    tl_registrations_close(registrations);
    ck_assert_int_eq(tl_registrations_create(&provider.base, UINT64_MAX, 1, &registrations, &error), TL_OK);
}

START_TEST(ten_thousand_views_at_once)
{
    static struct tl_tensor *views[VIEWS];
    open_large();
    for (uint64_t i = 0; i < VIEWS; i++) {
        views[i] = wrap_view(i);
        tl_registrations_unpin(registrations, add(views[i], TL_REGION_WRITE));
    }
    expect(1, 1, (uint64_t)VIEWS * VIEW_BYTES, 0);
    for (uint64_t i = 0; i < VIEWS; i++) {
        ck_assert_uint_eq(provider.live_count, 1);
        ck_assert(is_registered(views[i], TL_REGION_WRITE));
        tl_tensor_put(views[i]);
    }
    expect(1, 0, 0, 0);
}
END_TEST

START_TEST(ten_thousand_views_one_after_another)
{
    open_large();
    struct tl_tensor *before = wrap_view(0);
    for (uint64_t i = 0; i < VIEWS; i++) {
        struct tl_tensor *view = wrap_view(i);
        tl_registrations_unpin(registrations, add(view, TL_REGION_WRITE));
        tl_tensor_put(before);
        before = view;
    }
    expect(1, 1, (uint64_t)VIEWS * VIEW_BYTES, 0);
    tl_tensor_put(before);
    expect(1, 0, 0, 0);
}
END_TEST

START_TEST(aliases_and_own_memory)
{
    struct tl_tensor *base = wrap(memory[0]), *alias = NULL, *own = NULL;
    ck_assert_int_eq(tl_tensor_create_alias(base, NULL, NULL, &alias, &error), TL_OK);
    add_idle(alias);
    ck_assert(is_registered(base, TL_REGION_READ));
    tl_tensor_put(base);
    expect(1, 1, 1000, 0);
    tl_tensor_put(alias);
    expect(1, 0, 0, 0);
    ck_assert_int_eq(tl_tensor_create(TL_U8, 1, &(uint64_t){100}, &own, &error), TL_OK);
    add_idle(own);
    expect(2, 1, 100, 0);
    tl_tensor_put(own);
    expect(2, 0, 0, 0);
}
END_TEST

START_TEST(overlapping_allocations)
{
    /* The same start, the same end, inside, across. */
    static const uint64_t parts[][2] = {{0, 1000}, {0, 600}, {400, 600}, {200, 600}, {600, 400}};
    struct tl_tensor *tensors[5];
    struct tl_registered *pins[5];
    tl_registrations_close(registrations);
    ck_assert_int_eq(tl_registrations_create(&provider.base, 5000, 5, &registrations, &error), TL_OK);
    for (size_t i = 0; i < 5; i++) {
        tensors[i] = wrap_part(memory[0] + parts[i][0], parts[i][1], 0, parts[i][1]);
        pins[i] = add(tensors[i], TL_REGION_WRITE);
    }
    expect(5, 5, 3200, 0);
    for (size_t i = 0; i < 5; i++) {
        const struct tl_region *region = tl_registered_region(pins[i]);
        ck_assert_ptr_eq(region->address, memory[0] + parts[i][0]);
        ck_assert_uint_eq(region->len_bytes, parts[i][1]);
        tl_registrations_unpin(registrations, pins[i]);
    }
    for (size_t i = 0; i < 5; i++) {
        tl_tensor_put(tensors[i]);
        ck_assert_uint_eq(provider.live_count, 4 - i);
        for (size_t j = i + 1; j < 5; j++)
            ck_assert(is_registered(tensors[j], TL_REGION_WRITE));
    }
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- lifetime -- */

START_TEST(memory_that_comes_back_is_registered_anew)
{
    struct tl_tensor *tensor = wrap(memory[0]);
    add_idle(tensor);
    tl_tensor_put(tensor);
    tensor = wrap(memory[0]);
    ck_assert(!is_registered(tensor, TL_REGION_READ));
    add_idle(tensor);
    expect(2, 1, 1000, 0);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(a_pin_outlives_the_tensor)
{
    struct tl_tensor *tensor = wrap(memory[0]);
    struct tl_registered *registered = add(tensor, TL_REGION_WRITE);
    tl_tensor_put(tensor);
    expect(1, 1, 1000, 0);
    /* It cannot be found any more, not even by the same address. */
    tensor = wrap(memory[0]);
    ck_assert(!is_registered(tensor, TL_REGION_READ));
    ck_assert_ptr_ne(add(tensor, TL_REGION_READ), registered);
    expect(2, 2, 2000, 0);
    tl_registrations_unpin(registrations, registered);
    expect(2, 1, 1000, 0);
    tl_registrations_unpin(registrations, tl_registrations_pin(registrations, tensor, TL_REGION_READ));
    registered = tl_registrations_pin(registrations, tensor, TL_REGION_READ);
    tl_registrations_unpin(registrations, registered);
    tl_registrations_unpin(registrations, registered);
    tl_tensor_put(tensor);
    expect(2, 0, 0, 0);
}
END_TEST

START_TEST(tensors_outlive_the_cache)
{
    struct tl_tensor *tensors[] = {wrap(memory[0]), wrap(memory[0]), wrap(memory[1])};
    for (size_t i = 0; i < 3; i++)
        add_idle(tensors[i]);
    tl_registrations_close(registrations);
    ck_assert_uint_eq(provider.live_count, 0);
    ck_assert_int_eq(tl_registrations_create(&provider.base, 3000, 3, &registrations, &error), TL_OK);
    ck_assert(!is_registered(tensors[0], TL_REGION_READ));
    add_idle(tensors[0]);
    ck_assert_uint_eq(provider.live_count, 1);
    for (size_t i = 0; i < 3; i++)
        tl_tensor_put(tensors[i]);
    ck_assert_uint_eq(provider.live_count, 0);
}
END_TEST

START_TEST(two_caches_of_one_tensor)
{
    struct region_provider other_provider;
    struct tl_registrations *other = NULL;
    struct tl_registered *registered = NULL;
    struct tl_tensor *tensor = wrap(memory[0]);
    region_provider_init(&other_provider);
    ck_assert_int_eq(tl_registrations_create(&other_provider.base, 3000, 3, &other, &error), TL_OK);
    add_idle(tensor);
    ck_assert_ptr_null(tl_registrations_pin(other, tensor, TL_REGION_READ));
    ck_assert_int_eq(tl_registrations_add(other, tensor, TL_REGION_READ, &registered, &error), TL_OK);
    ck_assert_ptr_eq(tl_registered_region(registered)->provider, &other_provider.base);
    tl_registrations_unpin(other, registered);
    tl_tensor_put(tensor);
    ck_assert_uint_eq(other_provider.live_count, 0);
    expect(1, 0, 0, 0);
    tl_registrations_close(other);
    tl_registrations_close(NULL);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------ access -- */

START_TEST(writing_serves_reading)
{
    struct tl_tensor *tensor = wrap(memory[0]);
    struct tl_registered *registered = add(tensor, TL_REGION_WRITE);
    ck_assert_ptr_eq(add(tensor, TL_REGION_READ), registered);
    ck_assert_int_eq(tl_registered_region(registered)->access, TL_REGION_WRITE);
    tl_registrations_unpin(registrations, registered);
    tl_registrations_unpin(registrations, registered);
    expect(1, 1, 1000, 0);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(reading_is_replaced_by_writing)
{
    struct tl_tensor *tensor = wrap(memory[0]);
    struct tl_registered *reading = add(tensor, TL_REGION_READ);
    ck_assert(!is_registered(tensor, TL_REGION_WRITE));
    struct tl_registered *writing = add(tensor, TL_REGION_WRITE);
    ck_assert_ptr_ne(writing, reading);
    /* The old registration stays for those that pinned it, and serves no others. */
    ck_assert_int_eq(tl_registered_region(reading)->access, TL_REGION_READ);
    expect(2, 2, 2000, 0);
    ck_assert_ptr_eq(add(tensor, TL_REGION_READ), writing);
    tl_registrations_unpin(registrations, reading);
    expect(2, 1, 1000, 0);
    tl_registrations_unpin(registrations, writing);
    tl_registrations_unpin(registrations, writing);
    ck_assert(is_registered(tensor, TL_REGION_WRITE));
    tl_tensor_put(tensor);
    expect(2, 0, 0, 0);
}
END_TEST

START_TEST(replacing_an_idle_one_needs_no_space)
{
    struct tl_tensor *tensor = wrap_part(memory[0], 3000, 0, 10);
    add_idle(tensor);
    tl_registrations_unpin(registrations, add(tensor, TL_REGION_WRITE));
    expect(2, 1, 3000, 0);
    tl_tensor_put(tensor);
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- eviction -- */

START_TEST(least_recently_used_goes_first)
{
    struct tl_tensor *tensors[4];
    for (size_t i = 0; i < 4; i++)
        tensors[i] = wrap_part(memory[i], 10, 0, 10);
    for (size_t i = 0; i < 3; i++)
        add_idle(tensors[i]);
    ck_assert(is_registered(tensors[0], TL_REGION_READ));
    add_idle(tensors[3]);
    expect(4, 3, 30, 1);
    ck_assert(!is_registered(tensors[1], TL_REGION_READ));
    ck_assert(is_registered(tensors[2], TL_REGION_READ));
    ck_assert(is_registered(tensors[0], TL_REGION_READ));
    ck_assert(is_registered(tensors[3], TL_REGION_READ));
    add_idle(tensors[1]);
    expect(5, 3, 30, 2);
    ck_assert(!is_registered(tensors[2], TL_REGION_READ));
    for (size_t i = 0; i < 4; i++)
        tl_tensor_put(tensors[i]);
    expect(5, 0, 0, 2);
}
END_TEST

START_TEST(bytes_are_limited)
{
    struct tl_tensor *tensors[] = {wrap(memory[0]), wrap(memory[1]), wrap_part(memory[2], 2000, 0, 1)};
    for (size_t i = 0; i < 3; i++)
        add_idle(tensors[i]);
    expect(3, 2, 3000, 1);
    ck_assert(!is_registered(tensors[0], TL_REGION_READ));
    for (size_t i = 0; i < 3; i++)
        tl_tensor_put(tensors[i]);
}
END_TEST

static void refuse(struct tl_tensor *tensor)
{
    struct tl_registered *registered = NULL;
    ck_assert_int_eq(tl_registrations_add(registrations, tensor, TL_REGION_READ, &registered, &error),
                     TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_null(registered);
}

START_TEST(pinned_ones_stay)
{
    struct tl_tensor *tensors[] = {wrap(memory[0]), wrap(memory[1]), wrap(memory[2]), wrap(memory[3])};
    struct tl_registered *pins[3];
    for (size_t i = 0; i < 3; i++)
        pins[i] = add(tensors[i], TL_REGION_READ);
    refuse(tensors[3]);
    ck_assert_ptr_nonnull(strstr(error.message, "3000 bytes in 3 registrations"));
    ck_assert_ptr_nonnull(strstr(error.message, "verbs.cached"));
    expect(3, 3, 3000, 0);
    tl_registrations_unpin(registrations, pins[1]);
    add_idle(tensors[3]);
    expect(4, 3, 3000, 1);
    ck_assert(!is_registered(tensors[1], TL_REGION_READ));
    tl_registrations_unpin(registrations, pins[0]);
    tl_registrations_unpin(registrations, pins[2]);
    for (size_t i = 0; i < 4; i++)
        tl_tensor_put(tensors[i]);
}
END_TEST

START_TEST(more_than_the_limit)
{
    struct tl_tensor *small = wrap(memory[0]), *large = wrap_part(memory[0], 3001, 0, 1);
    add_idle(small);
    refuse(large);
    ck_assert_ptr_nonnull(strstr(error.message, "3001"));
    /* Nothing was evicted in vain. */
    expect(1, 1, 1000, 0);
    tl_tensor_put(small);
    tl_tensor_put(large);
}
END_TEST

START_TEST(the_provider_has_no_more)
{
    struct tl_tensor *tensors[] = {wrap(memory[0]), wrap(memory[1]), wrap(memory[2])};
    provider.locked_limit_bytes = 2000;
    add_idle(tensors[0]);
    struct tl_registered *pinned = add(tensors[1], TL_REGION_READ);
    add_idle(tensors[2]);
    expect(3, 2, 2000, 1);
    provider.locked_limit_bytes = 1999;
    refuse(tensors[0]);
    ck_assert_ptr_nonnull(strstr(error.message, "locked memory is scarce"));
    expect(3, 1, 1000, 2);
    tl_registrations_unpin(registrations, pinned);
    for (size_t i = 0; i < 3; i++)
        tl_tensor_put(tensors[i]);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------ faults -- */

START_TEST(no_memory)
{
    struct tl_registrations *other = NULL;
    struct tl_tensor *tensor = wrap(memory[0]), *view = wrap(memory[0]);
    fault_arm(1);
    ck_assert_int_eq(tl_registrations_create(&provider.base, 1, 1, &other, &error), TL_RESOURCE_EXHAUSTED);
    ck_assert(fault_was_hit());
    ck_assert_ptr_null(other);
    for (unsigned n = 1;; n++) {
        struct tl_registered *registered = NULL;
        struct tl_tensor *another = wrap(memory[1]);
        fault_arm(n);
        enum tl_status status = tl_registrations_add(registrations, another, TL_REGION_READ, &registered, &error);
        bool was_hit = fault_was_hit();
        ck_assert_int_eq(status, was_hit ? TL_RESOURCE_EXHAUSTED : TL_OK);
        ck_assert_uint_eq(provider.live_count, was_hit ? 0 : 1);
        if (!was_hit) tl_registrations_unpin(registrations, registered);
        tl_tensor_put(another);
        expect(was_hit ? 0 : 1, 0, 0, 0);
        ck_assert_ptr_null(registrations->allocations);
        ck_assert_uint_eq(registrations->reference_count, 1);
        if (!was_hit) break;
        ck_assert_ptr_null(registered);
        ck_assert_uint_le(n, 20);
    }
    add_idle(tensor);
    fault_arm(1);
    ck_assert_ptr_null(tl_registrations_pin(registrations, view, TL_REGION_READ));
    ck_assert(fault_was_hit());
    ck_assert(is_registered(view, TL_REGION_READ));
    tl_tensor_put(tensor);
    tl_tensor_put(view);
    expect(2, 0, 0, 0);
}
END_TEST

START_TEST(the_provider_fails_once)
{
    /* The n-th of 6 registrations fails; with an idle one to evict it is tried again. */
    for (unsigned n = 1; n <= 6; n++) {
        struct tl_tensor *tensors[] = {wrap(memory[0]), wrap(memory[1]), wrap(memory[2])};
        unsigned failures = 0;
        provider.fail_countdown = n;
        for (size_t i = 0; i < 6; i++) {
            struct tl_registered *registered = NULL;
            enum tl_region_access access = i < 3 ? TL_REGION_READ : TL_REGION_WRITE;
            enum tl_status status = tl_registrations_add(registrations, tensors[i % 3], access, &registered, &error);
            if (status == TL_OK)
                tl_registrations_unpin(registrations, registered);
            else
                failures++;
        }
        ck_assert_uint_eq(provider.fail_countdown, 0);
        ck_assert_uint_eq(failures, n == 1);
        for (size_t i = 0; i < 3; i++) {
            ck_assert_uint_le(provider.live_count, 3 - i);
            tl_tensor_put(tensors[i]);
        }
        ck_assert_uint_eq(provider.live_count, 0);
        ck_assert_ptr_null(registrations->allocations);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("registrations");
    TCase *tcase = tcase_create("registrations");
    tcase_set_timeout(tcase, 60);
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, one_for_all_tensors);
    tcase_add_test(tcase, ten_thousand_views_at_once);
    tcase_add_test(tcase, ten_thousand_views_one_after_another);
    tcase_add_test(tcase, aliases_and_own_memory);
    tcase_add_test(tcase, overlapping_allocations);
    tcase_add_test(tcase, memory_that_comes_back_is_registered_anew);
    tcase_add_test(tcase, a_pin_outlives_the_tensor);
    tcase_add_test(tcase, tensors_outlive_the_cache);
    tcase_add_test(tcase, two_caches_of_one_tensor);
    tcase_add_test(tcase, writing_serves_reading);
    tcase_add_test(tcase, reading_is_replaced_by_writing);
    tcase_add_test(tcase, replacing_an_idle_one_needs_no_space);
    tcase_add_test(tcase, least_recently_used_goes_first);
    tcase_add_test(tcase, bytes_are_limited);
    tcase_add_test(tcase, pinned_ones_stay);
    tcase_add_test(tcase, more_than_the_limit);
    tcase_add_test(tcase, the_provider_has_no_more);
    tcase_add_test(tcase, no_memory);
    tcase_add_test(tcase, the_provider_fails_once);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
