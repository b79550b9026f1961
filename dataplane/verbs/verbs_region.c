// SPDX-License-Identifier: Apache-2.0
/*
 * Registered memory. A region that is only read gives the card no right to write. A region that peers reach through
 * windows cannot be written until a window is bound to a part of it. Only under TL_KEYS_REGION a peer that has the key
 * may write all of it.
 *
 * Memory of a device is registered by its dma-buf, which keeps it from moving; where there is none, or the card's
 * driver takes none, by its address, which nvidia-peermem makes known to the kernel.
 */
#include "dataplane/verbs/verbs_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/log.h"
#include "tensor/device.h"

static unsigned access_flags(const struct verbs_device *device, enum tl_region_access access)
{
    if (access == TL_REGION_READ) return 0;
    unsigned flags = IBV_ACCESS_LOCAL_WRITE;
    if (device->base.limits.has_windows) flags |= IBV_ACCESS_MW_BIND;
    if (device->settings.keys == TL_KEYS_REGION) flags |= IBV_ACCESS_REMOTE_WRITE;
    return flags;
}

static enum tl_status refuse(const struct verbs_device *device, uint64_t len_bytes, int error_number,
                             struct tl_error *ret_error)
{
    /* The limit counts what other regions have locked already, so any limit may be the reason. */
    if (error_number == ENOMEM && verbs_exceeds_memlock(UINT64_MAX)) {
        return verbs_memlock_error(len_bytes, "registered memory", ret_error);
    }
    if (error_number == EFAULT || error_number == EINVAL || error_number == EOPNOTSUPP) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s: this memory cannot be registered (%s): not mapped, or a read-only mapping of a file, "
                            "or of a device",
                            device->base.name, strerror(error_number));
    }
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                        "%s: cannot register %llu bytes, the card's table or the memory is full: %s", device->base.name,
                        (unsigned long long)len_bytes, strerror(error_number));
}

enum tl_status verbs_region_create(struct tl_provider *provider, void *address, uint64_t len_bytes,
                                   enum tl_region_access access, struct tl_region **ret_region,
                                   struct tl_error *ret_error)
{
    struct verbs_device *device = verbs_device_of(provider);
    if (len_bytes == 0 || len_bytes > device->attributes.max_mr_size) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: a region has 1 to %llu bytes, not %llu",
                            device->base.name, (unsigned long long)device->attributes.max_mr_size,
                            (unsigned long long)len_bytes);
    }
    struct verbs_region *region = calloc(1, sizeof(*region));
    if (region == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a region");
    region->base = (struct tl_region){provider, address, len_bytes, access, false};
    region->mr = ibv_reg_mr(device->pd, address, len_bytes, access_flags(device, access));
    if (region->mr == NULL) {
        int error_number = errno;
        free(region);
        return refuse(device, len_bytes, error_number, ret_error);
    }
    *ret_region = &region->base;
    return TL_OK;
}

/* The card's table, its window to the device, or locked memory is full, unless it is something that will not pass. */
static bool is_scarce(int error_number)
{
    return error_number == ENOMEM || error_number == ENOSPC || error_number == EAGAIN;
}

static enum tl_status refuse_on_device(const struct verbs_device *device, const struct tl_device_allocation *allocation,
                                       int by_file, int by_address, struct tl_error *ret_error)
{
    if (is_scarce(by_file) || is_scarce(by_address)) {
        return tl_error_set(
            ret_error, TL_RESOURCE_EXHAUSTED,
            "%s: cannot register %llu bytes of a device: the device shows no more of its memory (BAR1), "
            "or the card's table is full: %s",
            device->base.name, (unsigned long long)allocation->len_bytes,
            strerror(is_scarce(by_address) ? by_address : by_file));
    }
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                        "%s: cannot register memory of a device: by dma-buf: %s; by its address: %s, is nvidia-peermem "
                        "loaded?",
                        device->base.name, by_file != 0 ? strerror(by_file) : allocation->why_no_file,
                        strerror(by_address));
}

enum tl_status verbs_region_create_on(struct tl_provider *provider, const struct tl_device_allocation *allocation,
                                      enum tl_region_access access, struct tl_region **ret_region,
                                      struct tl_error *ret_error)
{
    struct verbs_device *device = verbs_device_of(provider);
    uint64_t len_bytes = allocation->len_bytes;
    int flags = (int)access_flags(device, access), by_file = 0;
    if (len_bytes == 0 || len_bytes > device->attributes.max_mr_size) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: a region has 1 to %llu bytes, not %llu",
                            device->base.name, (unsigned long long)device->attributes.max_mr_size,
                            (unsigned long long)len_bytes);
    }
    struct verbs_region *region = calloc(1, sizeof(*region));
    if (region == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a region");
    region->base = (struct tl_region){provider, allocation->address, len_bytes, access, true};
    if (allocation->file >= 0) {
        region->mr = ibv_reg_dmabuf_mr(device->pd, allocation->offset_bytes, len_bytes, (uintptr_t)allocation->address,
                                       allocation->file, flags);
        by_file = region->mr != NULL ? 0 : errno;
    }
    /* What is scarce by one way is scarce by the other, and idle registrations may go for it. */
    if (region->mr == NULL && !is_scarce(by_file)) {
        region->mr = ibv_reg_mr(device->pd, allocation->address, len_bytes, (unsigned)flags);
    }
    if (region->mr == NULL) {
        int by_address = is_scarce(by_file) ? by_file : errno;
        free(region);
        return refuse_on_device(device, allocation, by_file, by_address, ret_error);
    }
    *ret_region = &region->base;
    return TL_OK;
}

void verbs_region_destroy(struct tl_region *base)
{
    struct verbs_region *region = TL_CONTAINER_OF(base, struct verbs_region, base);
    int error = ibv_dereg_mr(region->mr);
    if (error != 0) {
        TL_LOG_AT_ERROR("memory cannot be deregistered", TL_STR("device", base->provider->name),
                        TL_U64("bytes", base->len_bytes), TL_STR("error", strerror(error)));
    }
    free(region);
}
