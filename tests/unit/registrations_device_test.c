// SPDX-License-Identifier: Apache-2.0
/* Registrations of memory on devices: one for each allocation of CUDA, which ends before the memory does. */
#include <check.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "dataplane/memory/registrations.h"
#include "fakes/device_case.h"
#include "fakes/region_provider.h"
#include "fakes/run_suite.h"

static struct region_provider provider;
static struct tl_registrations *registrations;
static struct tl_error error;
static int live_at_release;

static void setup(void)
{
    setup_cuda();
    region_provider_init(&provider);
    ck_assert_int_eq(tl_registrations_create(&provider.base, 1 << 20, 2, &registrations, &error), TL_OK);
}

static void teardown(void)
{
    tl_registrations_close(registrations);
    ck_assert_uint_eq(provider.live_count, 0);
}

static struct tl_registered *add(struct tl_tensor *tensor, enum tl_region_access access)
{
    struct tl_registered *registered = NULL;
    enum tl_status status = tl_registrations_add(registrations, tensor, access, &registered, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    return registered;
}

static void release(void *data, void *context)
{
    (void)data;
    (void)context;
    __atomic_store_n(&live_at_release, (int)provider.live_count, __ATOMIC_SEQ_CST);
}

static struct tl_tensor *wrap(char *data, uint64_t len_bytes)
{
    struct tl_tensor_view view = view_of(gpu0, data, &len_bytes);
    struct tl_tensor *tensor = NULL;
    view.release = release;
    ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, &error), TL_OK);
    return tensor;
}

/* Two tensors that the program has wrapped by themselves share the registration of what CUDA has allocated. It ends
 * with the last of them, before the program hears that the memory is free. */
START_TEST(one_for_an_allocation)
{
    char *data = cuda->allocate(0, 10000);
    struct tl_tensor *first = wrap(data + 100, 50), *second = wrap(data + 9000, 1000);
    struct tl_registered *registered = add(first, TL_REGION_READ);
    const struct tl_region *region = tl_registered_region(registered);
    ck_assert_ptr_eq(region->address, data);
    ck_assert_uint_eq(region->len_bytes, 10000);
    ck_assert(region->is_on_device);
    ck_assert_ptr_eq(tl_registrations_pin(registrations, first, TL_REGION_READ), registered);
    ck_assert_ptr_null(tl_registrations_pin(registrations, second, TL_REGION_READ)); /* CUDA would have to be asked */
    ck_assert_ptr_eq(add(second, TL_REGION_READ), registered);
    ck_assert_ptr_eq(tl_registrations_pin(registrations, second, TL_REGION_READ), registered);
    for (int i = 0; i < 4; i++)
        tl_registrations_unpin(registrations, registered);
    live_at_release = -1;
    tl_tensor_put(first);
    while (__atomic_load_n(&live_at_release, __ATOMIC_SEQ_CST) < 0)
        usleep(100);
    ck_assert_int_eq(live_at_release, 1);
    live_at_release = -1;
    tl_tensor_put(second);
    while (__atomic_load_n(&live_at_release, __ATOMIC_SEQ_CST) < 0)
        usleep(100);
    ck_assert_int_eq(live_at_release, 0);
    ck_assert_uint_eq(provider.created_count, 1);
    cuda->free(data);
}
END_TEST

static atomic_bool is_ending, may_end;

static void wait_to_end(struct region_provider *region_provider)
{
    (void)region_provider;
    atomic_store(&is_ending, true);
    while (!atomic_load(&may_end))
        usleep(100);
}

static void *evict_one(void *unused)
{
    (void)tl_registrations_evict(registrations);
    return unused;
}

static void *put_last(void *tensor)
{
    tl_tensor_put(tensor);
    return NULL;
}

/* Another thread is about to end the registration when the last tensor of the memory goes. */
START_TEST(evicted_meanwhile)
{
    char *data = cuda->allocate(0, 10000);
    struct tl_tensor *tensor = wrap(data, 10000);
    pthread_t evicting, putting;
    tl_registrations_unpin(registrations, add(tensor, TL_REGION_READ));
    provider.destroy_hook = wait_to_end;
    live_at_release = -1;
    ck_assert_int_eq(pthread_create(&evicting, NULL, evict_one, NULL), 0);
    while (!atomic_load(&is_ending))
        usleep(100);
    ck_assert_int_eq(pthread_create(&putting, NULL, put_last, tensor), 0);
    usleep(50000); /* the memory would be released meanwhile */
    ck_assert_int_eq(__atomic_load_n(&live_at_release, __ATOMIC_SEQ_CST), -1);
    atomic_store(&may_end, true);
    ck_assert_int_eq(pthread_join(evicting, NULL) + pthread_join(putting, NULL), 0);
    while (__atomic_load_n(&live_at_release, __ATOMIC_SEQ_CST) < 0)
        usleep(100);
    ck_assert_int_eq(live_at_release, 0);
    cuda->free(data);
}
END_TEST

static unsigned allocations_at_destroy;

static void note_allocations(struct region_provider *region_provider)
{
    struct fake_cuda_counts counts;
    (void)region_provider;
    cuda->get_counts(&counts);
    allocations_at_destroy = counts.device_allocations;
}

START_TEST(it_ends_before_the_memory)
{
    struct tl_tensor *tensor = bytes_on(gpu0, 5000);
    tl_registrations_unpin(registrations, add(tensor, TL_REGION_WRITE));
    ck_assert_uint_eq(provider.live_count, 1);
    provider.destroy_hook = note_allocations;
    tl_tensor_put(tensor);
    ck_assert_uint_eq(provider.live_count, 0);
    ck_assert_uint_eq(allocations_at_destroy, 1);
    await_frees(0);
}
END_TEST

/* A registration for reading is replaced by one for writing. */
START_TEST(replaced)
{
    struct tl_tensor *tensor = bytes_on(gpu0, 5000);
    tl_registrations_unpin(registrations, add(tensor, TL_REGION_READ));
    struct tl_registered *registered = add(tensor, TL_REGION_WRITE);
    ck_assert_int_eq(tl_registered_region(registered)->access, TL_REGION_WRITE);
    ck_assert_uint_eq(provider.live_count, 1);
    tl_registrations_unpin(registrations, registered);
    tl_tensor_put(tensor);
    await_frees(0);
}
END_TEST

/* When there is no space, what is idle goes; without anything idle it is refused, and so is what never works. */
START_TEST(no_space_is_left)
{
    struct tl_tensor *tensors[3];
    struct tl_registered *registered, *refused;
    for (int i = 0; i < 3; i++)
        tensors[i] = bytes_on(gpu0, 5000);
    tl_registrations_unpin(registrations, add(tensors[0], TL_REGION_READ));
    provider.fail_countdown = 1;
    registered = add(tensors[1], TL_REGION_READ);
    ck_assert_uint_eq(provider.live_count, 1);
    provider.fail_countdown = 1;
    ck_assert_int_eq(tl_registrations_add(registrations, tensors[2], TL_REGION_READ, &refused, &error),
                     TL_RESOURCE_EXHAUSTED);
    provider.is_blind = true;
    ck_assert_int_eq(tl_registrations_add(registrations, tensors[2], TL_REGION_READ, &refused, &error),
                     TL_INVALID_ARGUMENT);
    cuda->set_direct(false, false);
    ck_assert_int_eq(tl_registrations_add(registrations, tensors[2], TL_REGION_READ, &refused, &error),
                     TL_UNIMPLEMENTED);
    tl_registrations_unpin(registrations, tl_registrations_pin(registrations, tensors[1], TL_REGION_READ));
    tl_registrations_unpin(registrations, registered);
    for (int i = 0; i < 3; i++)
        tl_tensor_put(tensors[i]);
    await_frees(0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("registrations_device");
    TCase *tcase = tcase_create("registrations_device");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, one_for_an_allocation);
    tcase_add_test(tcase, it_ends_before_the_memory);
    tcase_add_test(tcase, replaced);
    tcase_add_test(tcase, no_space_is_left);
    suite_add_tcase(suite, tcase);
    add_own_case(suite, "evicted_meanwhile", setup, teardown, evicted_meanwhile);
    return run_suite(suite);
}
