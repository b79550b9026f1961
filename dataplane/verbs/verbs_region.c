// SPDX-License-Identifier: Apache-2.0
/*
 * Registered memory. A region that is only read gives the card no right to write. A region that peers reach through
 * windows cannot be written until a window is bound to a part of it. Only under TL_KEYS_REGION a peer that has the key
 * may write all of it.
 */
#include "dataplane/verbs/verbs_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/log.h"

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
    region->base = (struct tl_region){provider, address, len_bytes, access};
    region->mr = ibv_reg_mr(device->pd, address, len_bytes, access_flags(device, access));
    if (region->mr == NULL) {
        int error_number = errno;
        free(region);
        return refuse(device, len_bytes, error_number, ret_error);
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
