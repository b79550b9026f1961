// SPDX-License-Identifier: Apache-2.0
/* The engine's calls of a provider, with the answers for operations that a provider leaves out. */
#include "dataplane/provider.h"

#include "base/error.h"
#include "base/log.h"
#include "dataplane/memory/pages.h"

const char tl_outside_refused[] = "the peer writes only into the pool that was made for it (verbs.keys: region)";

static enum tl_status not_supported(const struct tl_provider *provider, const char *what, struct tl_error *ret_error)
{
    return tl_error_set(ret_error, TL_UNIMPLEMENTED, "%s (%s) does not support %s", provider->name, provider->ops->name,
                        what);
}

enum tl_status tl_region_create(struct tl_provider *provider, void *address, uint64_t len_bytes,
                                enum tl_region_access access, struct tl_region **ret_region, struct tl_error *ret_error)
{
    if (provider->ops->region_create == NULL) return not_supported(provider, "registered memory", ret_error);
    return provider->ops->region_create(provider, address, len_bytes, access, ret_region, ret_error);
}

enum tl_status tl_provider_reopen(const struct tl_provider *provider, struct tl_provider **ret_provider,
                                  struct tl_error *ret_error)
{
    if (provider->ops->reopen == NULL) return not_supported(provider, "a probe while it is used", ret_error);
    return provider->ops->reopen(provider, ret_provider, ret_error);
}

enum tl_status tl_region_create_on(struct tl_provider *provider, const struct tl_device_allocation *allocation,
                                   enum tl_region_access access, struct tl_region **ret_region,
                                   struct tl_error *ret_error)
{
    if (provider->ops->region_create_on == NULL) return not_supported(provider, "memory of devices", ret_error);
    return provider->ops->region_create_on(provider, allocation, access, ret_region, ret_error);
}

enum tl_status tl_region_map(struct tl_provider *provider, uint64_t len_bytes, struct tl_region **ret_region,
                             struct tl_error *ret_error)
{
    void *address;
    if (provider->ops->region_map != NULL) return provider->ops->region_map(provider, len_bytes, ret_region, ret_error);
    enum tl_status status = tl_pages_map(len_bytes, provider->limits.numa_node, &address, ret_error);
    if (status != TL_OK) return status;
    status = tl_region_create(provider, address, len_bytes, TL_REGION_WRITE, ret_region, ret_error);
    if (status != TL_OK) tl_pages_unmap(address, len_bytes);
    return status;
}

void tl_region_destroy(struct tl_region *region)
{
    if (region != NULL) region->provider->ops->region_destroy(region);
}

enum tl_status tl_queue_pair_create(struct tl_provider *provider, const struct tl_queue_pair_options *options,
                                    const struct tl_queue_pair_events *events, void *owner,
                                    struct tl_queue_pair **ret_pair, struct tl_error *ret_error)
{
    if (options->keys == TL_KEYS_WINDOW && !provider->limits.has_windows) {
        return not_supported(provider, "memory windows; set verbs.keys to \"region\"", ret_error);
    }
    return provider->ops->create(provider, options, events, owner, ret_pair, ret_error);
}

enum tl_status tl_queue_pair_expose(struct tl_queue_pair *pair, struct tl_region *region, void *address,
                                    uint64_t len_bytes, struct tl_exposure *exposure, struct tl_error *ret_error)
{
    if (pair->ops->expose == NULL) return not_supported(pair->provider, "writes of its peer", ret_error);
    return pair->ops->expose(pair, region, address, len_bytes, exposure, ret_error);
}

enum tl_status tl_queue_pair_expose_source(struct tl_queue_pair *pair, struct tl_region *region, void *address,
                                           uint64_t len_bytes, bool is_writable, struct tl_exposure *exposure,
                                           struct tl_error *ret_error)
{
    if (pair->ops->expose_source == NULL) return not_supported(pair->provider, "reads of its peer", ret_error);
    return pair->ops->expose_source(pair, region, address, len_bytes, is_writable, exposure, ret_error);
}

enum tl_status tl_queue_pair_share(struct tl_queue_pair *pair, struct tl_mapped_file *file,
                                   struct tl_descriptor *ret_descriptor, struct tl_error *ret_error)
{
    if (pair->ops->share == NULL) return not_supported(pair->provider, "mapping what its peer publishes", ret_error);
    return pair->ops->share(pair, file, ret_descriptor, ret_error);
}

enum tl_status tl_queue_pair_map(struct tl_queue_pair *pair, const struct tl_descriptor *descriptor,
                                 struct tl_mapped_file **ret_file, struct tl_error *ret_error)
{
    if (pair->ops->map == NULL) return not_supported(pair->provider, "mapping what its peer publishes", ret_error);
    return pair->ops->map(pair, descriptor, ret_file, ret_error);
}

void tl_provider_fail(struct tl_provider *provider, const struct tl_error *reason)
{
    if (provider->failure.code != TL_OK) return;
    (void)tl_error_set(&provider->failure, TL_UNAVAILABLE, "%s; start the worker anew to use it again",
                       reason->message);
    TL_LOG_AT_ERROR("data plane lost", TL_STR("device", provider->name), TL_STR("reason", reason->message),
                    TL_STR("remedy", "start the worker anew"));
}

bool tl_provider_arm(struct tl_provider *provider)
{
    return provider->ops->arm == NULL || provider->ops->arm(provider);
}

void tl_provider_disarm(struct tl_provider *provider, bool is_woken)
{
    if (provider->ops->disarm != NULL) provider->ops->disarm(provider, is_woken);
}

bool tl_queue_pair_has_spare_window(struct tl_queue_pair *pair)
{
    return pair->ops->has_spare_window == NULL || pair->ops->has_spare_window(pair);
}

void *tl_queue_pair_message_place(struct tl_queue_pair *pair)
{
    return pair->ops->message_place != NULL ? pair->ops->message_place(pair) : NULL;
}

void tl_queue_pair_doorbell(struct tl_queue_pair *pair)
{
    if (pair->ops->doorbell != NULL) pair->ops->doorbell(pair);
}
