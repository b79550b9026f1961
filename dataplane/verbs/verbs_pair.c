// SPDX-License-Identifier: Apache-2.0
/*
 * Queue pairs: how they begin and end.
 *
 * create takes everything that the queue pair will ever need: its part of the completion queue, slots, records,
 * windows, and the card's queue pair in the state INIT, so that it has an address. connect posts the slots and takes it
 * to ready-to-receive and ready-to-send with the parameters that both sides agree on.
 *
 * Every failure moves the card's queue pair to the state ERR, in which the card completes every request. The owner
 * learns of it from poll: broken, then its work cancelled, and drained when the last request is completed. When the
 * card is not relied on for that, the queue pair is lost: it is taken from the card instead, after which the card
 * touches its memory no more.
 */
#include "dataplane/verbs/verbs_internal.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/random.h"

/* A requester whose peer has no slot posted waits 0.64 ms and tries again, this often. Credits make a missing slot an
 * error, but a short lack of one must not break the queue pair. 7 would be without end. */
#define RNR_TIMER 12
#define RNR_RETRY_COUNT 6
#define MAX_READ_DEPTH 16
/* How long a card may take to complete what was posted on a broken queue pair. */
#define FLUSH_PATIENCE_NS TL_NS_PER_SEC
#define HOP_LIMIT 255
#define MASK_24_BITS UINT32_C(0xffffff)

static uint8_t clamp_depth(int depth)
{
    return (uint8_t)(depth < 0 ? 0 : depth > MAX_READ_DEPTH ? MAX_READ_DEPTH : depth);
}

/* ------------------------------------------------------------------------------------------------------ create -- */

/* Takes an entry in the device's table. Returns false when all are taken. */
static bool take_entry(struct verbs_device *device, struct verbs_pair *pair)
{
    uint32_t count = device->base.limits.max_queue_pairs;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t index = (device->next_entry + i) % count;
        if (device->pairs[index].pair != NULL) continue;
        device->pairs[index].generation = (device->pairs[index].generation + 1) & MASK_24_BITS;
        device->pairs[index].pair = pair;
        device->next_entry = (index + 1) % count;
        pair->entry.index = index;
        pair->entry.generation = device->pairs[index].generation;
        device->pair_count++;
        return true;
    }
    return false;
}

static enum tl_status create_on_card(struct verbs_pair *pair, struct tl_error *ret_error)
{
    static const uint32_t inline_sizes[] = {256, 64, 0};
    struct verbs_device *device = pair->device;
    for (size_t i = 0; i < TL_ARRAY_COUNT(inline_sizes) && pair->qp == NULL; i++) {
        struct ibv_qp_init_attr attributes = {
            .qp_context = (void *)(uintptr_t)pair->entry.index,
            .send_cq = device->cq.cq,
            .recv_cq = device->cq.cq,
            .cap = {.max_send_wr = pair->ring.work_count,
                    .max_recv_wr = pair->slots.count,
                    .max_send_sge = 1,
                    .max_recv_sge = 1,
                    .max_inline_data = inline_sizes[i]},
            .qp_type = IBV_QPT_RC,
        };
        pair->qp = ibv_create_qp(device->pd, &attributes);
        if (pair->qp != NULL) pair->ring.max_inline_bytes = attributes.cap.max_inline_data;
    }
    if (pair->qp == NULL) {
        if (errno == ENOMEM && verbs_exceeds_memlock(UINT64_MAX))
            return verbs_memlock_error(pair->slots.memory_bytes, "a queue pair", ret_error);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: cannot make a queue pair for %u operations: %s",
                            device->base.name, pair->ring.work_count, strerror(errno));
    }
    pair->ids.number = pair->qp->qp_num;
    struct ibv_qp_attr attributes = {.qp_state = IBV_QPS_INIT,
                                     .pkey_index = device->settings.pkey_index,
                                     .port_num = device->port.number,
                                     .qp_access_flags = IBV_ACCESS_REMOTE_WRITE};
    if (pair->windows.keys == TL_KEYS_WINDOW) attributes.qp_access_flags |= IBV_ACCESS_REMOTE_READ;
    int error =
        ibv_modify_qp(pair->qp, &attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    if (error == 0) return TL_OK;
    return tl_error_set(ret_error, TL_UNAVAILABLE, "%s: cannot use the port with partition key index %u: %s",
                        device->base.name, device->settings.pkey_index, strerror(error));
}

static enum tl_status check_options(const struct verbs_device *device, const struct tl_queue_pair_options *options,
                                    struct tl_error *ret_error)
{
    TL_CHECK(options->slot_count > 0 && options->work_count > 0);
    if (device->is_dead) return tl_error_copy(ret_error, &device->base.failure);
    if (options->keys == TL_KEYS_REGION && device->settings.keys != TL_KEYS_REGION) {
        return tl_error_set(ret_error, TL_UNIMPLEMENTED, "%s was opened for keys of windows only", device->base.name);
    }
    if (options->keys == TL_KEYS_WINDOW && !device->base.limits.has_windows) {
        return tl_error_set(ret_error, TL_UNIMPLEMENTED, "%s has no type 2 memory windows; set verbs.keys to region",
                            device->base.name);
    }
    if (options->slot_count > device->settings.queue_depth || options->work_count > device->settings.queue_depth) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                            "%s: %u slots and %u operations were asked for, verbs.queue_depth allows %u of each",
                            device->base.name, options->slot_count, options->work_count, device->settings.queue_depth);
    }
    return TL_OK;
}

static enum tl_status fill(struct verbs_pair *pair, struct tl_error *ret_error)
{
    struct verbs_device *device = pair->device;
    char gid[64];
    if (!verbs_device_find_gid(device, &pair->ids.gid_index)) {
        if (verbs_device_is_removed(device)) return tl_error_copy(ret_error, &device->base.failure);
        verbs_gid_to_text(device->port.gid.raw, gid, sizeof(gid));
        return tl_error_set(ret_error, TL_UNAVAILABLE, "%s: the address %s has gone from the port", device->base.name,
                            gid);
    }
    if (!take_entry(device, pair)) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: all %u queue pairs are in use", device->base.name,
                            device->base.limits.max_queue_pairs);
    }
    pair->entry.is_held = true;
    enum tl_status status = verbs_device_reserve(device, pair->slots.count + pair->ring.work_count, ret_error);
    if (status != TL_OK) return status;
    pair->entry.is_reserved = true;
    pair->ring.records = calloc(pair->ring.record_count, sizeof(*pair->ring.records));
    if (pair->ring.records == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a queue pair");
    status = verbs_slots_init(pair, ret_error);
    if (status == TL_OK) status = create_on_card(pair, ret_error);
    if (status == TL_OK) status = verbs_windows_prepare(pair, ret_error);
    return status;
}

enum tl_status verbs_pair_create(struct tl_provider *provider, const struct tl_queue_pair_options *options,
                                 const struct tl_queue_pair_events *events, void *owner,
                                 struct tl_queue_pair **ret_pair, struct tl_error *ret_error)
{
    struct verbs_device *device = verbs_device_of(provider);
    enum tl_status status = check_options(device, options, ret_error);
    if (status != TL_OK) return status;
    struct verbs_pair *pair = calloc(1, sizeof(*pair));
    if (pair == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a queue pair");
    pair->base = (struct tl_queue_pair){.ops = provider->ops,
                                        .provider = provider,
                                        .outside_refusal = options->keys == TL_KEYS_REGION ? tl_outside_refused : NULL};
    pair->device = device;
    pair->events = *events;
    pair->owner = owner;
    pair->windows.keys = options->keys;
    /* The card has space for as many slots as the options may ask for, and perhaps for more. */
    uint32_t space_count = (uint32_t)device->attributes.max_qp_wr - options->slot_count;
    pair->slots.may_idle = (uint32_t)tl_min_u64(verbs_slots_may_idle(options->slot_count), space_count);
    pair->slots.count = options->slot_count + pair->slots.may_idle;
    pair->ring.work_count = options->work_count;
    pair->ring.record_count = 1;
    while (pair->ring.record_count < pair->ring.work_count)
        pair->ring.record_count *= 2;
    pair->ids.psn = (uint32_t)tl_random_u64() & MASK_24_BITS;
    tl_list_init(&pair->attention);
    tl_list_init(&pair->flushing);
    status = fill(pair, ret_error);
    if (status != TL_OK) {
        verbs_pair_destroy(&pair->base);
        return status;
    }
    *ret_pair = &pair->base;
    return TL_OK;
}

void verbs_pair_destroy(struct tl_queue_pair *base)
{
    struct verbs_pair *pair = verbs_pair_of(base);
    struct verbs_device *device = pair->device;
    TL_CHECK(pair->state != VERBS_CONNECTED && pair->slots.posted == 0 && pair->ring.retired == pair->ring.tail);
    tl_list_remove(&pair->attention);
    tl_list_remove(&pair->flushing);
    verbs_windows_release(pair);
    verbs_pair_destroy_qp(pair);
    verbs_slots_fini(pair);
    if (pair->entry.is_reserved) device->cq.reserved -= pair->slots.count + pair->ring.work_count;
    if (pair->entry.is_held) {
        device->pairs[pair->entry.index].pair = NULL;
        device->pair_count--;
    }
    free(pair->ring.records);
    free(pair);
}

/* ----------------------------------------------------------------------------------------------------- connect -- */

static void describe(const struct verbs_pair *pair, struct verbs_address *ret_ours)
{
    const struct verbs_device *device = pair->device;
    struct ibv_port_attr port = {0};
    bool does_read = device->base.read_failure == NULL;
    /* The subnet manager may have given another LID since the device was opened. */
    if (device->port.link_layer == IBV_LINK_LAYER_INFINIBAND)
        ibv_query_port(device->context, device->port.number, &port);
    *ret_ours = (struct verbs_address){
        .link_layer = device->port.link_layer,
        .gid_type = device->port.gid_type,
        .mtu = (uint8_t)device->port.mtu,
        .keys = (uint8_t)pair->windows.keys,
        .initiator_depth = does_read ? clamp_depth(device->attributes.max_qp_init_rd_atom) : 0,
        .responder_depth = does_read ? clamp_depth(device->attributes.max_qp_rd_atom) : 0,
        .timeout = device->settings.timeout,
        .retry_count = device->settings.retry_count,
        .lid = port.lid,
        .number = pair->ids.number,
        .psn = pair->ids.psn,
    };
    memcpy(ret_ours->gid, device->port.gid.raw, sizeof(ret_ours->gid));
    memcpy(ret_ours->device, device->base.name, strnlen(device->base.name, sizeof(ret_ours->device) - 1));
}

void verbs_pair_get_address(const struct tl_queue_pair *base, struct tl_pair_address *ret_pair_address)
{
    struct verbs_address ours;
    describe(TL_CONTAINER_OF(base, const struct verbs_pair, base), &ours);
    verbs_address_write(&ours, ret_pair_address);
}

static void set_address(const struct verbs_pair *pair, const struct verbs_address *theirs,
                        struct ibv_ah_attr *ret_address)
{
    const struct verbs_device *device = pair->device;
    bool is_ethernet = device->port.link_layer == IBV_LINK_LAYER_ETHERNET;
    *ret_address = (struct ibv_ah_attr){
        .dlid = theirs->lid, .sl = device->settings.service_level, .port_num = device->port.number, .is_global = 1};
    /* Within one InfiniBand subnet the LID is enough. */
    if (!is_ethernet && theirs->lid != 0 && memcmp(device->port.gid.raw, theirs->gid, 8) == 0) {
        ret_address->is_global = 0;
        return;
    }
    memcpy(ret_address->grh.dgid.raw, theirs->gid, sizeof(theirs->gid));
    ret_address->grh.sgid_index = (uint8_t)pair->ids.gid_index;
    ret_address->grh.hop_limit = HOP_LIMIT;
    ret_address->grh.traffic_class = device->settings.traffic_class;
}

/* A source is shown through a window, which only keys of windows have. */
static const char *why_not_read(const struct verbs_address *ours, const struct verbs_address *theirs,
                                const struct verbs_terms *terms)
{
    if (ours->keys != TL_KEYS_WINDOW) return "written by its owner, because verbs.keys is region here";
    if (theirs->keys != TL_KEYS_WINDOW) return "written by its owner, whose verbs.keys is region";
    return terms->initiator_depth == 0 ? "written by its owner, because a card of the two does not read" : NULL;
}

static int make_ready(struct verbs_pair *pair, const struct verbs_address *ours, const struct verbs_address *theirs)
{
    struct verbs_terms terms = verbs_address_agree(ours, theirs);
    struct ibv_qp_attr receive = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = (enum ibv_mtu)terms.mtu,
        .dest_qp_num = theirs->number,
        .rq_psn = theirs->psn,
        .max_dest_rd_atomic = terms.responder_depth,
        .min_rnr_timer = RNR_TIMER,
    };
    set_address(pair, theirs, &receive.ah_attr);
    pair->base.mtu_bytes = verbs_mtu_to_bytes(receive.path_mtu);
    pair->base.read_refusal = why_not_read(ours, theirs, &terms);
    pair->base.read_depth = pair->base.read_refusal == NULL ? terms.initiator_depth : 0;
    int error = ibv_modify_qp(pair->qp, &receive,
                              IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                  IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    if (error != 0) return error;
    struct ibv_qp_attr send = {
        .qp_state = IBV_QPS_RTS,
        .timeout = terms.timeout,
        .retry_cnt = terms.retry_count,
        .rnr_retry = RNR_RETRY_COUNT,
        .sq_psn = ours->psn,
        .max_rd_atomic = terms.initiator_depth,
    };
    return ibv_modify_qp(pair->qp, &send,
                         IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                             IBV_QP_MAX_QP_RD_ATOMIC);
}

enum tl_status verbs_pair_connect(struct tl_queue_pair *base, const struct tl_pair_address *peer,
                                  struct tl_error *ret_error)
{
    struct verbs_pair *pair = verbs_pair_of(base);
    struct verbs_address ours, theirs;
    char gid[64];
    TL_CHECK(pair->state != VERBS_CONNECTED);
    describe(pair, &ours);
    enum tl_status status = verbs_address_read(peer, &theirs, ret_error);
    if (status == TL_OK) status = verbs_address_match(&ours, &theirs, ret_error);
    if (status != TL_OK) return status;
    if (verbs_pair_is_broken(pair)) return tl_error_copy(ret_error, &pair->reason);
    if (pair->qp == NULL) {
        return tl_error_set(ret_error, TL_UNAVAILABLE, "%s: a queue pair connects once", base->provider->name);
    }
    verbs_slots_post(pair);
    if (verbs_pair_is_broken(pair)) {
        verbs_pair_destroy_qp(pair);
        return tl_error_copy(ret_error, &pair->reason);
    }
    int error = make_ready(pair, &ours, &theirs);
    if (error != 0) {
        verbs_pair_destroy_qp(pair);
        verbs_gid_to_text(theirs.gid, gid, sizeof(gid));
        return tl_error_set(
            ret_error, TL_UNAVAILABLE,
            "%s: the card cannot reach the peer's %s at %s: %s; look at routes and neighbours with \"ip "
            "route get\"",
            base->provider->name, theirs.device, gid, strerror(error));
    }
    memcpy(pair->ids.peer_device, theirs.device, sizeof(pair->ids.peer_device));
    memcpy(pair->ids.peer_gid, theirs.gid, sizeof(pair->ids.peer_gid));
    pair->state = VERBS_CONNECTED;
    return TL_OK;
}

/* Bytes of the headers of a packet, as the MTU of interfaces counts them: IP, UDP, and those of a write (BTH 12, RETH
 * 16, ICRC 4). RoCE v1 has a GRH (40) instead of IP and UDP. */
#define HEADS_OF_A_WRITE 32
#define IPV4_AND_UDP 28
#define IPV6_AND_UDP 48
#define GRH 40

void verbs_pair_describe_route(const struct tl_queue_pair *base, struct tl_route *ret_route)
{
    const struct verbs_pair *pair = TL_CONTAINER_OF(base, const struct verbs_pair, base);
    const struct verbs_device *device = pair->device;
    verbs_gid_to_text(device->port.gid.raw, ret_route->own_address, sizeof(ret_route->own_address));
    verbs_gid_to_text(pair->ids.peer_gid, ret_route->peer_address, sizeof(ret_route->peer_address));
    if (device->port.link_layer != IBV_LINK_LAYER_ETHERNET) {
        ret_route->head_bytes = HEADS_OF_A_WRITE;
        ret_route->blocked = "the InfiniBand subnet does not carry packets between these two ports; look at the subnet "
                             "manager, and at the partition keys of both";
    } else if (device->port.gid_type != IBV_GID_TYPE_ROCE_V2) {
        ret_route->head_bytes = GRH + HEADS_OF_A_WRITE;
        ret_route->blocked = "packets of RoCE v1 (Ethernet type 0x8915) are blocked between these two ports; they pass "
                             "no router: choose a GID of RoCE v2 on both with verbs.gid_index";
    } else {
        ret_route->head_bytes = (verbs_gid_is_v4(pair->ids.peer_gid) ? IPV4_AND_UDP : IPV6_AND_UDP) + HEADS_OF_A_WRITE;
        ret_route->blocked = "UDP port 4791 is blocked between these two addresses; allow it in both directions in "
                             "firewalls and security groups";
    }
}

/* --------------------------------------------------------------------------------------------------------- end -- */

void verbs_pair_needs_attention(struct verbs_pair *pair)
{
    if (!tl_list_is_linked(&pair->attention)) tl_list_push_back(&pair->device->attention, &pair->attention);
}

void verbs_pair_destroy_qp(struct verbs_pair *pair)
{
    if (pair->qp == NULL) return;
    int error = ibv_destroy_qp(pair->qp);
    if (error != 0) {
        TL_LOG_AT_ERROR("a queue pair cannot be destroyed", TL_STR("device", pair->device->base.name),
                        TL_U64("number", pair->ids.number), TL_STR("error", strerror(error)));
    }
    pair->qp = NULL;
    pair->slots.posted = 0;
}

void verbs_pair_lose(struct verbs_pair *pair)
{
    if (pair->qp == NULL) return;
    pair->entry.is_lost = true;
    pair->device->cq.has_lost = true;
}

void verbs_pair_take_lost(struct verbs_device *device)
{
    device->cq.has_lost = false;
    for (uint32_t i = 0; i < device->base.limits.max_queue_pairs; i++) {
        struct verbs_pair *pair = device->pairs[i].pair;
        if (pair == NULL || !pair->entry.is_lost) continue;
        verbs_pair_destroy_qp(pair);
        verbs_pair_needs_attention(pair);
    }
}

void verbs_pair_break(struct verbs_pair *pair, const struct tl_error *reason)
{
    if (verbs_pair_is_broken(pair)) return;
    pair->state = VERBS_BROKEN;
    pair->reason = *reason;
    verbs_pair_needs_attention(pair);
    if (pair->qp == NULL) return;
    struct ibv_qp_attr attributes = {.qp_state = IBV_QPS_ERR};
    if (ibv_modify_qp(pair->qp, &attributes, IBV_QP_STATE) != 0) verbs_pair_lose(pair);
}

void verbs_pair_break_because(struct verbs_pair *pair, const char *format, ...)
{
    char text[TL_ERROR_MESSAGE_BYTES / 2];
    struct tl_error reason;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    bool has_peer = pair->ids.peer_device[0] != '\0';
    tl_error_set(&reason, TL_UNAVAILABLE, "queue pair %u of %s%s%s: %s", pair->ids.number, pair->device->base.name,
                 has_peer ? " to the peer's " : "", pair->ids.peer_device, text);
    verbs_pair_break(pair, &reason);
}

void verbs_pair_disconnect(struct tl_queue_pair *base, const struct tl_error *reason)
{
    verbs_pair_break(verbs_pair_of(base), reason);
}

unsigned verbs_pair_report_broken(struct verbs_pair *pair)
{
    if (pair->state != VERBS_BROKEN) return 0;
    pair->state = VERBS_FLUSHING;
    pair->flushing_since_ns = tl_clock_now_ns();
    tl_list_push_back(&pair->device->flushing, &pair->flushing);
    pair->events.broken(pair->owner, &pair->reason);
    return 1;
}

void verbs_pair_give_up(struct verbs_device *device)
{
    int64_t now_ns = tl_clock_now_ns();
    TL_LIST_FOREACH(&device->flushing, node)
    {
        struct verbs_pair *pair = TL_CONTAINER_OF(node, struct verbs_pair, flushing);
        int64_t age_ns = now_ns - pair->flushing_since_ns;
        if (age_ns < FLUSH_PATIENCE_NS) return;
        if (pair->qp == NULL) continue;
        if (!pair->entry.is_lost) {
            TL_LOG_AT_WARN("the card does not hand back the work of a broken queue pair, which is taken from it",
                           TL_STR("device", device->base.name), TL_U64("number", pair->ids.number));
            verbs_pair_lose(pair);
        } else if (age_ns >= 2 * FLUSH_PATIENCE_NS) {
            /* Other queue pairs keep the completion queue from being empty. */
            verbs_pair_destroy_qp(pair);
            verbs_pair_needs_attention(pair);
        }
    }
}

unsigned verbs_pair_attend(struct verbs_pair *pair)
{
    unsigned count = verbs_pair_report_broken(pair);
    if (pair->state == VERBS_CONNECTED || pair->state == VERBS_FLUSHING) count += verbs_post_retire_empty(pair);
    if (pair->state == VERBS_CONNECTED) verbs_slots_post(pair);
    if (pair->state != VERBS_FLUSHING) return count;
    bool has_work = pair->slots.posted > 0 || pair->ring.retired < pair->ring.signalled;
    bool is_at_card = pair->qp != NULL && (pair->entry.is_lost || has_work);
    if (is_at_card) return count;
    count += verbs_post_cancel_rest(pair);
    verbs_windows_release(pair);
    pair->state = VERBS_DRAINED;
    tl_list_remove(&pair->flushing);
    pair->events.drained(pair->owner);
    return count + 1;
}
