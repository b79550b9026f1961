// SPDX-License-Identifier: Apache-2.0
/*
 * Events that a device reports on its own. A port that goes down, an address that goes, and a new local identifier
 * break every queue pair. An error of one queue pair breaks that one. An error of the completion queue or of the device
 * ends the device. A port or a path that comes back is logged; the owner connects again.
 *
 * Queue pairs are only marked as broken here; the next poll calls their owners, because this also runs in the middle of
 * a failed completion, to learn its reason.
 */
#include "dataplane/verbs/verbs_internal.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/log.h"

/* A device that reports without end must not keep the reactor from its other work. */
#define MAX_EVENTS 64

static void break_all(struct verbs_device *device, const char *why)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "%s: %s", device->base.name, why);
    verbs_device_break_all(device, false, &reason);
}

static void handle_port(struct verbs_device *device, const struct ibv_async_event *event)
{
    uint32_t index;
    char gid[64], why[128];
    if (event->element.port_num != device->port.number) return;
    switch (event->event_type) {
    case IBV_EVENT_PORT_ERR:
        if (!verbs_device_is_removed(device)) break_all(device, "link: the port went down here");
        break;
    case IBV_EVENT_LID_CHANGE:
        if (device->port.link_layer == IBV_LINK_LAYER_INFINIBAND) break_all(device, "link: the port's LID has changed");
        break;
    case IBV_EVENT_GID_CHANGE:
        if (verbs_device_find_gid(device, &index)) {
            device->port.gid_index = index;
            break;
        }
        if (verbs_device_is_removed(device)) break;
        verbs_gid_to_text(device->port.gid.raw, gid, sizeof(gid));
        snprintf(why, sizeof(why), "link: the address %s was taken from the port", gid);
        break_all(device, why);
        break;
    default:
        break;
    }
}

static void handle_pair(struct verbs_device *device, const struct ibv_async_event *event)
{
    uintptr_t index = (uintptr_t)event->element.qp->qp_context;
    struct verbs_pair *pair = index < device->base.limits.max_queue_pairs ? device->pairs[index].pair : NULL;
    if (pair == NULL || pair->qp != event->element.qp) return;
    switch (event->event_type) {
    case IBV_EVENT_QP_ACCESS_ERR:
        verbs_pair_break_because(pair, "the peer has used a key that it may not use");
        break;
    case IBV_EVENT_QP_REQ_ERR:
        verbs_pair_break_because(pair, "the peer has sent an invalid request, or one that does not fit a slot");
        break;
    case IBV_EVENT_QP_FATAL:
        verbs_pair_break_because(pair, "the card has failed on this queue pair");
        break;
    case IBV_EVENT_PATH_MIG_ERR:
        verbs_pair_break_because(pair, "link: the path to the peer is lost");
        break;
    default:
        break;
    }
}

static void handle(struct verbs_device *device, const struct ibv_async_event *event)
{
    struct tl_error reason;
    switch (event->event_type) {
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_PATH_MIG_ERR:
        handle_pair(device, event);
        break;
    case IBV_EVENT_PORT_ERR:
    case IBV_EVENT_LID_CHANGE:
    case IBV_EVENT_GID_CHANGE:
        handle_port(device, event);
        break;
    case IBV_EVENT_CQ_ERR:
        tl_error_set(&reason, TL_UNAVAILABLE, "%s: the completion queue has failed", device->base.name);
        verbs_device_die(device, &reason);
        break;
    case IBV_EVENT_DEVICE_FATAL:
        tl_error_set(&reason, TL_UNAVAILABLE, "%s: the device has failed or was removed", device->base.name);
        verbs_device_die(device, &reason);
        break;
    default:
        break;
    }
}

unsigned verbs_events_handle(struct verbs_device *device)
{
    unsigned count = 0;
    struct ibv_async_event event;
    device->cq.has_events = false;
    device->cq.polls_since_events = 0;
    while (count < MAX_EVENTS && ibv_get_async_event(device->context, &event) == 0) {
        count++;
        TL_LOG_AT_INFO("RDMA device reports", TL_STR("device", device->base.name),
                       TL_STR("event", ibv_event_type_str(event.event_type)));
        handle(device, &event); /* destroys no queue pair, which would wait until its events are acknowledged */
        ibv_ack_async_event(&event);
    }
    if (count == MAX_EVENTS) device->cq.has_events = true;
    return count;
}
