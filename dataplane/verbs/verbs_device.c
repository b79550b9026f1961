// SPDX-License-Identifier: Apache-2.0
/*
 * One opened device: its protection domain, its completion queue, and how it is polled and slept on.
 *
 * One completion queue serves all queue pairs. It must never overrun, because that loses completions without a trace.
 * So every queue pair reserves one entry for each request that it may have posted, the queue grows with them, and a
 * queue pair that does not fit any more is refused.
 *
 * The descriptor to sleep on is an epoll of the completion channel and of the device's own events, so that a link that
 * goes down wakes the sleeping thread. While the reactor does not sleep, the device is asked for events now and then,
 * and whenever a request has failed.
 *
 * A completion queue or a device that fails breaks every queue pair and takes them from the card: their posted work is
 * cancelled, since its completions may never come. A queue pair is taken from the card only when the completion queue
 * was found empty after that was decided, because what has arrived goes to the owner, and a card forgets the
 * completions of a queue pair that is taken from it.
 */
#include "dataplane/verbs/verbs_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/log.h"

#define FIRST_CQ_ENTRIES 1024
#define POLLS_BETWEEN_EVENTS 1024
/* The most members that one completion stands for, about: the messages of one doorbell. */
#define MOST_OF_A_COMPLETION (2 * TL_SLOT_MESSAGES)

/* -------------------------------------------------------------------------------------------- completion queue -- */

/* Enlarges the completion queue to `needed` entries, and to twice its size where the card can. */
static enum tl_status enlarge(struct verbs_device *device, uint32_t needed, uint32_t max, struct tl_error *ret_error)
{
    uint32_t entries = (uint32_t)tl_min_u64(max, tl_max_u64(needed, (uint64_t)device->cq.capacity * 2));
    int error;
    for (;; entries = needed) {
        error = ibv_resize_cq(device->cq.cq, (int)entries);
        if (error < 0) error = errno;
        /* Some drivers report success and leave it as it is. */
        device->cq.capacity = (uint32_t)device->cq.cq->cqe;
        if (device->cq.capacity >= needed) return TL_OK;
        if (entries == needed) break;
    }
    if (error == ENOMEM && verbs_exceeds_memlock(UINT64_MAX)) {
        return verbs_memlock_error(verbs_slots_default_bytes(device->settings.queue_depth), device->base.name,
                                   ret_error);
    }
    if (error != 0) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: cannot enlarge the completion queue to %u: %s",
                            device->base.name, needed, strerror(error));
    }
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                        "%s: cannot enlarge the completion queue to %u: it still has %u; lower verbs.queue_depth, or "
                        "connect fewer peers",
                        device->base.name, needed, device->cq.capacity);
}

enum tl_status verbs_device_reserve(struct verbs_device *device, uint32_t count, struct tl_error *ret_error)
{
    uint64_t needed = (uint64_t)device->cq.reserved + count;
    uint64_t max = device->attributes.max_cqe > 0 ? (uint64_t)device->attributes.max_cqe : 0;
    if (needed > max) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                            "%s has room for %llu completions, %u are reserved and %u more are needed: lower "
                            "verbs.queue_depth, or connect fewer peers",
                            device->base.name, (unsigned long long)max, device->cq.reserved, count);
    }
    if (needed > device->cq.capacity) {
        enum tl_status status = enlarge(device, (uint32_t)needed, (uint32_t)max, ret_error);
        if (status != TL_OK) return status;
    }
    device->cq.reserved = (uint32_t)needed;
    return TL_OK;
}

static int poll_completions(struct verbs_device *device, struct ibv_wc *ret_completions)
{
    bool is_over = device->is_dead && !device->cq.has_lost;
    int count = is_over ? 0 : ibv_poll_cq(device->cq.cq, VERBS_BATCH, ret_completions);
    if (count >= 0) return count;
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "%s: the completion queue cannot be read", device->base.name);
    verbs_device_die(device, &reason);
    return 0;
}

/* -------------------------------------------------------------------------------------------------------- poll -- */

static unsigned attend_pairs(struct verbs_device *device)
{
    struct tl_list due;
    struct tl_list *node;
    unsigned count = 0;
    tl_list_init(&due);
    tl_list_splice_back(&due, &device->attention);
    while ((node = tl_list_pop_front(&due)) != NULL)
        count += verbs_pair_attend(TL_CONTAINER_OF(node, struct verbs_pair, attention));
    return count;
}

static unsigned device_poll(struct tl_provider *provider)
{
    struct verbs_device *device = verbs_device_of(provider);
    struct ibv_wc completions[VERBS_BATCH];
    unsigned events = 0;
    if (device->cq.has_events || ++device->cq.polls_since_events >= POLLS_BETWEEN_EVENTS) {
        events += verbs_events_handle(device);
    }
    if (!tl_list_is_empty(&device->flushing)) verbs_pair_give_up(device);
    if (!tl_list_is_empty(&device->attention)) events += attend_pairs(device);
    unsigned count = device->cq.stash_count;
    if (count > 0) {
        memcpy(completions, device->cq.stash, count * sizeof(completions[0]));
        device->cq.stash_count = 0;
    } else {
        count = (unsigned)poll_completions(device, completions);
        if (count == 0 && device->cq.has_lost) verbs_pair_take_lost(device);
    }
    unsigned done = 0;
    tl_quota_renew(&provider->quota);
    while (done < count && tl_quota_left(&provider->quota) >= MOST_OF_A_COMPLETION)
        verbs_complete(device, &completions[done++]);
    device->cq.stash_count = count - done; /* others have their turn first */
    memcpy(device->cq.stash, completions + done, (count - done) * sizeof(completions[0]));
    if (!tl_list_is_empty(&device->attention)) events += attend_pairs(device);
    return events + done;
}

static bool device_arm(struct tl_provider *provider)
{
    struct verbs_device *device = verbs_device_of(provider);
    if (!tl_list_is_empty(&device->attention) || device->cq.stash_count > 0 || device->cq.has_events) return false;
    if (device->cq.has_lost) return false;
    if (device->is_dead) return true;
    /* The notification is requested before the queue is polled: what comes in between is found here, or makes the
     * descriptor readable. */
    int error = ibv_req_notify_cq(device->cq.cq, 0);
    if (error != 0) {
        struct tl_error reason;
        tl_error_set(&reason, TL_UNAVAILABLE, "%s: the completion queue gives no notice: %s", device->base.name,
                     strerror(error));
        verbs_device_die(device, &reason);
        return false;
    }
    device->cq.stash_count = (unsigned)poll_completions(device, device->cq.stash);
    return device->cq.stash_count == 0 && tl_list_is_empty(&device->attention);
}

static void device_disarm(struct tl_provider *provider, bool is_woken)
{
    if (!is_woken) return;
    struct verbs_device *device = verbs_device_of(provider);
    struct epoll_event ready[2];
    int count = epoll_wait(device->base.fd, ready, TL_ARRAY_COUNT(ready), 0);
    for (int i = 0; i < count; i++) {
        struct ibv_cq *cq;
        void *context;
        if (ready[i].data.fd == device->context->async_fd) device->cq.has_events = true;
        if (ready[i].data.fd != device->cq.channel->fd) continue;
        while (ibv_get_cq_event(device->cq.channel, &cq, &context) == 0)
            ibv_ack_cq_events(cq, 1);
    }
}

/* ---------------------------------------------------------------------------------------------------- failures -- */

void verbs_device_break_all(struct verbs_device *device, bool is_lost, const struct tl_error *reason)
{
    for (uint32_t i = 0; i < device->base.limits.max_queue_pairs; i++) {
        struct verbs_pair *pair = device->pairs[i].pair;
        if (pair == NULL) continue;
        verbs_pair_break(pair, reason);
        if (is_lost) verbs_pair_lose(pair);
    }
}

void verbs_device_die(struct verbs_device *device, const struct tl_error *reason)
{
    if (device->is_dead) return;
    device->is_dead = true;
    /* The descriptors of a removed device are in error from now on, which would end every sleep at once. */
    epoll_ctl(device->base.fd, EPOLL_CTL_DEL, device->cq.channel->fd, NULL);
    epoll_ctl(device->base.fd, EPOLL_CTL_DEL, device->context->async_fd, NULL);
    tl_provider_fail(&device->base, reason);
    verbs_device_break_all(device, true, reason);
}

bool verbs_device_is_removed(struct verbs_device *device)
{
    struct tl_error reason;
    struct ibv_port_attr port;
    if (device->is_dead) return true;
    if (ibv_query_port(device->context, device->port.number, &port) != ENODEV) return false;
    tl_error_set(&reason, TL_UNAVAILABLE, "%s: the device was removed", device->base.name);
    verbs_device_die(device, &reason);
    return true;
}

bool verbs_device_find_gid(const struct verbs_device *device, uint32_t *ret_index)
{
    struct ibv_gid_entry entry;
    struct ibv_port_attr port;
    /* The entry is mostly where it was. */
    if (ibv_query_gid_ex(device->context, device->port.number, device->port.gid_index, &entry, 0) == 0 &&
        entry.gid_type == device->port.gid_type && memcmp(&entry.gid, &device->port.gid, sizeof(entry.gid)) == 0) {
        *ret_index = device->port.gid_index;
        return true;
    }
    if (ibv_query_port(device->context, device->port.number, &port) != 0) return false;
    for (int i = 0; i < port.gid_tbl_len && i <= VERBS_MAX_GID_INDEX; i++) {
        if (ibv_query_gid_ex(device->context, device->port.number, (uint32_t)i, &entry, 0) != 0) continue;
        if (entry.gid_type != device->port.gid_type || memcmp(&entry.gid, &device->port.gid, sizeof(entry.gid)) != 0)
            continue;
        *ret_index = (uint32_t)i;
        return true;
    }
    return false;
}

bool verbs_device_has_link(const struct verbs_device *device, char *ret_why, size_t capacity)
{
    struct ibv_port_attr port;
    uint32_t index;
    char gid[64];
    if (ibv_query_port(device->context, device->port.number, &port) != 0) {
        snprintf(ret_why, capacity, "link: the port does not answer: the device is gone");
        return false;
    }
    if (port.state != IBV_PORT_ACTIVE) {
        snprintf(ret_why, capacity, "link: the port is down here");
        return false;
    }
    if (!verbs_device_find_gid(device, &index)) {
        verbs_gid_to_text(device->port.gid.raw, gid, sizeof(gid));
        snprintf(ret_why, capacity, "link: the address %s has gone from the port", gid);
        return false;
    }
    return true;
}

/* ---------------------------------------------------------------------------------------------- open and close -- */

static void device_close(struct tl_provider *provider)
{
    struct verbs_device *device = verbs_device_of(provider);
    TL_CHECK(device->pair_count == 0);
    int error = device->cq.cq != NULL ? ibv_destroy_cq(device->cq.cq) : 0;
    if (error == 0 && device->cq.channel != NULL) error = ibv_destroy_comp_channel(device->cq.channel);
    if (error == 0 && device->pd != NULL) error = ibv_dealloc_pd(device->pd);
    if (error != 0) {
        TL_LOG_AT_ERROR("RDMA device not closed cleanly", TL_STR("device", device->base.name),
                        TL_STR("error", strerror(error)));
    }
    if (device->context != NULL) ibv_close_device(device->context);
    if (device->base.fd >= 0) close(device->base.fd);
    free(device->pairs);
    free(device);
}

static enum tl_status device_reopen(const struct tl_provider *provider, struct tl_provider **ret_provider,
                                    struct tl_error *ret_error);

static const struct tl_provider_ops verbs_ops = {
    .name = "verbs",
    .settings = "verbs",
    .close = device_close,
    .reopen = device_reopen,
    .poll = device_poll,
    .arm = device_arm,
    .disarm = device_disarm,
    .region_create = verbs_region_create,
    .region_create_on = verbs_region_create_on,
    .region_destroy = verbs_region_destroy,
    .create = verbs_pair_create,
    .get_address = verbs_pair_get_address,
    .check = verbs_address_check,
    .connect = verbs_pair_connect,
    .describe_route = verbs_pair_describe_route,
    .disconnect = verbs_pair_disconnect,
    .destroy = verbs_pair_destroy,
    .space = verbs_post_space,
    .message = verbs_post_message,
    .write = verbs_post_write,
    .read = verbs_post_read,
    .expose = verbs_window_expose,
    .has_spare_window = verbs_window_has_spare,
    .expose_source = verbs_window_expose_source,
    .revoke = verbs_window_revoke,
    .doorbell = verbs_post_doorbell,
};

/* Makes an error of the failed call's errno. */
static enum tl_status refuse(const struct verbs_device *device, const char *what, int error_number,
                             struct tl_error *ret_error)
{
    if (error_number == ENOMEM && verbs_exceeds_memlock(UINT64_MAX)) {
        return verbs_memlock_error(verbs_slots_default_bytes(device->settings.queue_depth), device->base.name,
                                   ret_error);
    }
    return tl_error_set(ret_error, TL_UNAVAILABLE, "%s: cannot %s: %s", device->base.name, what,
                        strerror(error_number));
}

static bool watch(int epoll_fd, int fd)
{
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0 &&
           epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

static enum tl_status open_queues(struct verbs_device *device, struct tl_error *ret_error)
{
    int entries = device->attributes.max_cqe < FIRST_CQ_ENTRIES ? device->attributes.max_cqe : FIRST_CQ_ENTRIES;
    device->pd = ibv_alloc_pd(device->context);
    if (device->pd == NULL) return refuse(device, "make a protection domain", errno, ret_error);
    device->cq.channel = ibv_create_comp_channel(device->context);
    if (device->cq.channel == NULL) return refuse(device, "make a completion channel", errno, ret_error);
    device->cq.cq = ibv_create_cq(device->context, entries, device, device->cq.channel, 0);
    if (device->cq.cq == NULL) return refuse(device, "make a completion queue", errno, ret_error);
    device->cq.capacity = (uint32_t)device->cq.cq->cqe;
    device->base.fd = epoll_create1(EPOLL_CLOEXEC);
    if (device->base.fd < 0 || !watch(device->base.fd, device->cq.channel->fd) ||
        !watch(device->base.fd, device->context->async_fd)) {
        return tl_error_set_errno(ret_error, errno, "%s: cannot wait for completions", device->base.name);
    }
    return TL_OK;
}

/* Sets the limits that follow from the device, the port and the options. */
static enum tl_status take_limits(struct verbs_device *device, const struct tl_verbs_options *options,
                                  const struct ibv_port_attr *port, struct tl_error *ret_error)
{
    struct tl_provider_limits *limits = &device->base.limits;
    const struct ibv_device_attr *attributes = &device->attributes;
    if ((int64_t)options->queue_depth > attributes->max_qp_wr) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "verbs.queue_depth: %u is more than the %d that %s does",
                            options->queue_depth, attributes->max_qp_wr, device->base.name);
    }
    limits->max_write_bytes = port->max_msg_sz;
    if (options->max_write_bytes > 0) {
        limits->max_write_bytes = tl_min_u64(limits->max_write_bytes, options->max_write_bytes);
    }
    limits->max_queue_pairs = attributes->max_qp < VERBS_MAX_PAIRS ? (uint32_t)attributes->max_qp : VERBS_MAX_PAIRS;
    limits->has_windows = (attributes->device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B) != 0;
    limits->needs_regions = true;
    device->port.mtu = port->active_mtu;
    if (options->mtu_bytes != 0) {
        enum ibv_mtu mtu = verbs_mtu_from_bytes(options->mtu_bytes);
        if (mtu < device->port.mtu) device->port.mtu = mtu;
    }
    device->port.link_layer =
        port->link_layer == IBV_LINK_LAYER_ETHERNET ? IBV_LINK_LAYER_ETHERNET : IBV_LINK_LAYER_INFINIBAND;
    device->pairs = calloc(limits->max_queue_pairs, sizeof(*device->pairs));
    return device->pairs != NULL ? TL_OK : tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a device");
}

static enum tl_status open_context(struct verbs_device *device, const struct tl_verbs_candidate *candidate,
                                   struct tl_error *ret_error)
{
    struct ibv_gid_entry entry;
    int count = 0;
    struct ibv_device **devices = ibv_get_device_list(&count);
    int error_number = ENODEV;
    for (int i = 0; devices != NULL && i < count; i++) {
        if (strcmp(ibv_get_device_name(devices[i]), candidate->device) != 0) continue;
        device->context = ibv_open_device(devices[i]);
        error_number = errno;
    }
    if (devices != NULL) ibv_free_device_list(devices);
    if (device->context == NULL) return refuse(device, "open it", error_number, ret_error);
    if (ibv_query_device(device->context, &device->attributes) != 0) return refuse(device, "ask it", errno, ret_error);
    if (ibv_query_gid_ex(device->context, device->port.number, device->port.gid_index, &entry, 0) != 0) {
        return refuse(device, "read its GID", errno, ret_error);
    }
    device->port.gid = entry.gid;
    device->port.gid_type = (uint8_t)entry.gid_type;
    return TL_OK;
}

/* A child that the application forks shares pages with the card until one of the two processes writes them, which then
 * gets the copy. Kernels from 5.12 on copy pinned pages into the child as it is forked, and rdma-core says that nothing
 * is needed (RDMAV_FORK_SAFE changes nothing there). On older kernels rdma-core keeps registered pages out of the
 * child, which must be requested before anything is registered. Another user of rdma-core in this process may have
 * requested it already. */
static void make_fork_safe(void)
{
    if (ibv_is_fork_initialized() != IBV_FORK_DISABLED) return;
    int error = ibv_fork_init();
    if (error == 0) return;
    TL_LOG_AT_WARN("children of this process must not be forked after RDMA is in use; set RDMAV_FORK_SAFE=1",
                   TL_STR("error", strerror(error)));
}

static enum tl_status open_candidate(const struct tl_verbs_options *options, const struct tl_verbs_candidate *candidate,
                                     struct tl_provider **ret_provider, struct tl_error *ret_error)
{
    struct ibv_port_attr port;
    struct verbs_device *device = calloc(1, sizeof(*device));
    if (device == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a device");
    device->base = (struct tl_provider){.ops = &verbs_ops, .fd = -1, .limits.numa_node = candidate->numa_node};
    snprintf(device->base.name, sizeof(device->base.name), "%.50s:%u", candidate->device, candidate->port);
    snprintf(device->base.reason, sizeof(device->base.reason), "GID %d %s: %.160s", candidate->gid_index,
             candidate->gid, candidate->reason);
    tl_list_init(&device->attention);
    tl_list_init(&device->flushing);
    device->port.number = (uint8_t)candidate->port;
    device->port.gid_index = (uint32_t)candidate->gid_index;
    device->settings.service_level = (uint8_t)options->service_level;
    device->settings.traffic_class = (uint8_t)options->traffic_class;
    device->settings.timeout = (uint8_t)options->timeout;
    device->settings.retry_count = (uint8_t)options->retry_count;
    device->settings.pkey_index = (uint16_t)options->pkey_index;
    device->settings.queue_depth = options->queue_depth;
    device->settings.keys = options->keys;
    device->options = *options;
    device->options.devices = NULL;
    device->options.address = NULL;
    device->options.pool_bytes = 0; /* a probe needs no pool */
    device->candidate = *candidate;

    make_fork_safe();
    enum tl_status status = tl_verbs_check_memlock(options, ret_error);
    if (status == TL_OK) status = open_context(device, candidate, ret_error);
    if (status == TL_OK && ibv_query_port(device->context, device->port.number, &port) != 0) {
        status = refuse(device, "ask its port", errno, ret_error);
    }
    if (status == TL_OK) status = take_limits(device, options, &port, ret_error);
    if (status == TL_OK) status = open_queues(device, ret_error);
    if (status != TL_OK) {
        device_close(&device->base);
        return status;
    }
    *ret_provider = &device->base;
    return TL_OK;
}

static enum tl_status device_reopen(const struct tl_provider *provider, struct tl_provider **ret_provider,
                                    struct tl_error *ret_error)
{
    const struct verbs_device *device = TL_CONTAINER_OF(provider, const struct verbs_device, base);
    struct tl_verbs_candidate candidate = device->candidate;
    uint32_t index;
    char gid[64];
    if (!verbs_device_find_gid(device, &index)) {
        verbs_gid_to_text(device->port.gid.raw, gid, sizeof(gid));
        return tl_error_set(ret_error, TL_UNAVAILABLE, "%s: the address %s has gone from the port", device->base.name,
                            gid);
    }
    candidate.gid_index = (int)index;
    return open_candidate(&device->options, &candidate, ret_provider, ret_error);
}

enum tl_status tl_verbs_open(const struct tl_verbs_options *options, unsigned order, struct tl_provider **ret_provider,
                             struct tl_error *ret_error)
{
    struct tl_verbs_candidate *candidates;
    size_t count;
    enum tl_status status = tl_verbs_list(options, &candidates, &count, ret_error);
    if (status != TL_OK) return status;
    if (order < count && candidates[order].order >= 0) {
        status = open_candidate(options, &candidates[order], ret_provider, ret_error);
    } else if (order > 0) {
        status = tl_error_set(ret_error, TL_NOT_FOUND, "no RDMA port is left after the first %u", order);
    } else {
        status = tl_verbs_explain(options, candidates, count, ret_error);
    }
    free(candidates);
    return status;
}
