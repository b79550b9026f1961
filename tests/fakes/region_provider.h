// SPDX-License-Identifier: Apache-2.0
/*
 * A provider that has regions only: it counts them, fails on demand, and remembers the last one. Include it before
 * fault_alloc.h, so that its own memory never fails.
 */
#ifndef TESTS_FAKES_REGION_PROVIDER_H
#define TESTS_FAKES_REGION_PROVIDER_H

#include <check.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/error.h"
#include "dataplane/provider.h"
#include "tensor/device.h"

struct region_provider {
    struct tl_provider base;
    pthread_mutex_t mutex;
    unsigned created_count; /* Counted since the start. */
    unsigned live_count;
    uint64_t live_bytes;
    uint64_t locked_limit_bytes; /* The greatest value of live_bytes. */
    unsigned fail_countdown;     /* The creation that fails, counted from 1; 0: none. */
    bool is_blind;               /* memory of devices cannot be registered, for a reason that stays */
    void *last_address;
    uint64_t last_len_bytes;
    void (*hook)(struct region_provider *provider); /* Called in every creation; may be NULL. */
    void (*destroy_hook)(struct region_provider *provider);
};

static enum tl_status region_provider_create(struct tl_provider *base, void *address, uint64_t len_bytes,
                                             enum tl_region_access access, struct tl_region **ret_region,
                                             struct tl_error *ret_error)
{
    struct region_provider *provider = TL_CONTAINER_OF(base, struct region_provider, base);
    if (provider->hook) provider->hook(provider);
    pthread_mutex_lock(&provider->mutex);
    bool fails = provider->fail_countdown > 0 && --provider->fail_countdown == 0;
    fails = fails || provider->live_bytes + len_bytes > provider->locked_limit_bytes;
    if (!fails) {
        struct tl_region *region = calloc(1, sizeof(*region));
        ck_assert_ptr_nonnull(region);
        *region = (struct tl_region){base, address, len_bytes, access, false};
        provider->created_count++;
        provider->live_count++;
        provider->live_bytes += len_bytes;
        provider->last_address = address;
        provider->last_len_bytes = len_bytes;
        *ret_region = region;
    }
    pthread_mutex_unlock(&provider->mutex);
    return fails ? tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "locked memory is scarce") : TL_OK;
}

static enum tl_status region_provider_create_on(struct tl_provider *base, const struct tl_device_allocation *allocation,
                                                enum tl_region_access access, struct tl_region **ret_region,
                                                struct tl_error *ret_error)
{
    struct region_provider *provider = TL_CONTAINER_OF(base, struct region_provider, base);
    ck_assert(allocation->file < 0 || fcntl(allocation->file, F_GETFD) >= 0);
    ck_assert_uint_lt(allocation->offset_bytes, 4096);
    if (provider->is_blind) return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the card does not see devices");
    enum tl_status status =
        region_provider_create(base, allocation->address, allocation->len_bytes, access, ret_region, ret_error);
    if (status == TL_OK) (*ret_region)->is_on_device = true;
    return status;
}

static void region_provider_destroy(struct tl_region *region)
{
    struct region_provider *provider = TL_CONTAINER_OF(region->provider, struct region_provider, base);
    if (provider->destroy_hook) provider->destroy_hook(provider);
    pthread_mutex_lock(&provider->mutex);
    ck_assert_uint_gt(provider->live_count, 0);
    provider->live_count--;
    provider->live_bytes -= region->len_bytes;
    pthread_mutex_unlock(&provider->mutex);
    free(region);
}

static inline void region_provider_init(struct region_provider *provider)
{
    static const struct tl_provider_ops ops = {.name = "regions",
                                               .settings = "verbs",
                                               .region_create = region_provider_create,
                                               .region_create_on = region_provider_create_on,
                                               .region_destroy = region_provider_destroy};
    *provider = (struct region_provider){.base = {.ops = &ops, .limits = {.numa_node = -1}, .fd = -1},
                                         .locked_limit_bytes = UINT64_MAX / 2};
    pthread_mutex_init(&provider->mutex, NULL);
}

#endif
