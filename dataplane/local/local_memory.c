// SPDX-License-Identifier: Apache-2.0
/*
 * Memory of devices that a peer may import (tensor/device.h).
 *
 * Happy path: the owner passes a descriptor of an allocation over the socket, once, with a number that messages then
 * use; the peer has the packet before the message. The memory stays known until LOCAL_MEMORIES others have come, or
 * until its owner gives it back: then FORGET says so, because what a peer has mapped stays allocated.
 *
 * Failure modes: the socket is full, or the number was forgotten: the caller gets an error. A FORGET for which the
 * socket is full is sent later. What a descriptor is, only an import shows.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"
#include "dataplane/local/local_drop.h"

/* ----------------------------------------------------------------------------------------------------- showing -- */

static void lock(struct local_provider *provider)
{
    TL_CHECK(pthread_mutex_lock(&provider->mutex) == 0);
}

static void unlock(struct local_provider *provider)
{
    TL_CHECK(pthread_mutex_unlock(&provider->mutex) == 0);
}

static struct local_shown_memory **place_of(const struct local_pair *pair, uint64_t number)
{
    return &pair->memories.shown[number % LOCAL_MEMORIES];
}

static struct local_shown_memory *find_shown(const struct local_pair *pair, uint64_t memory_number)
{
    for (unsigned i = 0; i < LOCAL_MEMORIES; i++) {
        struct local_shown_memory *shown = pair->memories.shown[i];
        if (shown != NULL && shown->memory_number == memory_number) return shown;
    }
    return NULL;
}

/* Forgets memory, whether it is given back already or not. */
static void forget(struct local_shown_memory *shown)
{
    struct local_provider *provider = shown->pair->provider;
    tl_device_watch_end(&shown->watch);
    lock(provider);
    tl_list_remove(&shown->link);
    unlock(provider);
    free(shown);
}

/* Thread: any. The memory is given back. */
static void freed(struct tl_device_watch *watch)
{
    static const uint64_t one = 1;
    struct local_shown_memory *shown = TL_CONTAINER_OF(watch, struct local_shown_memory, watch);
    struct local_provider *provider = shown->pair->provider;
    lock(provider);
    tl_list_push_back(&provider->freed, &shown->link);
    atomic_store_explicit(&provider->has_gone, true, memory_order_release);
    (void)!write(provider->gone_fd, &one, sizeof(one));
    unlock(provider);
}

static void tell(struct local_shown_memory *shown)
{
    struct local_pair *pair = shown->pair;
    const struct local_memory_packet packet = {.kind = LOCAL_PACKET_FORGET, .number = shown->number};
    if (pair->state == LOCAL_CONNECTED && !local_send_counted(pair, &packet, sizeof(packet), -1)) {
        tl_list_push_back(&pair->memories.untold, &shown->link);
        return;
    }
    free(shown);
}

void local_memories_freed(struct tl_list *list)
{
    struct tl_list *link;
    while ((link = tl_list_pop_front(list)) != NULL) {
        struct local_shown_memory *shown = TL_CONTAINER_OF(link, struct local_shown_memory, link);
        *place_of(shown->pair, shown->number) = NULL;
        tell(shown);
    }
}

void local_memories_tell(struct local_pair *pair)
{
    struct tl_list untold, *link;
    tl_list_init(&untold);
    tl_list_splice_back(&untold, &pair->memories.untold);
    while ((link = tl_list_pop_front(&untold)) != NULL)
        tell(TL_CONTAINER_OF(link, struct local_shown_memory, link));
}

void local_memories_fini(struct local_pair *pair)
{
    struct tl_list *link;
    for (unsigned i = 0; pair->memories.shown != NULL && i < LOCAL_MEMORIES; i++)
        if (pair->memories.shown[i] != NULL) forget(pair->memories.shown[i]);
    free(pair->memories.shown);
    pair->memories.shown = NULL;
    while ((link = tl_list_pop_front(&pair->memories.untold)) != NULL)
        free(TL_CONTAINER_OF(link, struct local_shown_memory, link));
}

/* Passes the memory to the peer, and notes that. NULL: it cannot be passed now. */
static struct local_shown_memory *pass(struct local_pair *pair, struct tl_device_memory *memory, int file)
{
    struct local_memories *memories = &pair->memories;
    struct local_memory_packet packet = {.kind = LOCAL_PACKET_MEMORY, .number = memories->last_shown + 1};
    struct local_shown_memory *shown = calloc(1, sizeof(*shown));
    if (shown == NULL) return NULL;
    *shown = (struct local_shown_memory){.watch.freed = freed, .pair = pair, .number = packet.number};
    shown->memory_number = tl_device_memory_number(memory, &packet.len_bytes);
    tl_list_init(&shown->link);
    if (!local_send_counted(pair, &packet, sizeof(packet), file)) {
        free(shown);
        return NULL;
    }
    memories->last_shown = packet.number;
    if (*place_of(pair, packet.number) != NULL) forget(*place_of(pair, packet.number));
    *place_of(pair, packet.number) = shown;
    tl_device_watch_start(&shown->watch, memory);
    return shown;
}

enum tl_status local_show_memory(struct tl_queue_pair *base, struct tl_device_memory *memory, int file,
                                 uint64_t offset_bytes, struct tl_descriptor *ret_descriptor,
                                 struct tl_error *ret_error)
{
    struct local_pair *pair = local_pair_of(base);
    const char *name = base->provider->name;
    uint64_t len_bytes;
    if (pair->state != LOCAL_CONNECTED) return tl_error_set(ret_error, TL_UNAVAILABLE, "%s: not connected", name);
    if (pair->memories.shown == NULL)
        pair->memories.shown = calloc(LOCAL_MEMORIES, sizeof(struct local_shown_memory *));
    if (pair->memories.shown == NULL)
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: no memory to show memory", name);
    struct local_shown_memory *shown = find_shown(pair, tl_device_memory_number(memory, &len_bytes));
    if (shown == NULL && file < 0)
        return tl_error_set(ret_error, TL_NOT_FOUND, "%s: the peer does not have this memory", name);
    if (shown == NULL) shown = pass(pair, memory, file);
    if (shown == NULL)
        return tl_error_set(ret_error, TL_UNAVAILABLE, "%s: the descriptor of memory cannot be sent now", name);
    const struct local_memory_descriptor descriptor = {.number = shown->number, .offset_bytes = offset_bytes};
    ret_descriptor->len_bytes = sizeof(descriptor);
    memcpy(ret_descriptor->bytes, &descriptor, sizeof(descriptor));
    return TL_OK;
}

/* --------------------------------------------------------------------------------------------------- importing -- */

static struct local_peer_memory *find(const struct local_pair *pair, uint64_t number)
{
    if (pair->memories.peers == NULL || number == 0) return NULL;
    struct local_peer_memory *known = &pair->memories.peers[number % LOCAL_MEMORIES];
    return known->number == number ? known : NULL;
}

/* Closing the last descriptor of memory can take long, because it frees the memory. */
static void drop(struct local_pair *pair, struct local_peer_memory *known)
{
    uint64_t number = known->number;
    local_drop(&(struct local_leftovers){.fds = {known->fd}, .fd_count = 1});
    known->number = 0;
    if (pair->events.memory_gone != NULL) pair->events.memory_gone(pair->owner, number);
}

void local_memory_came(struct local_pair *pair, const struct local_memory_packet *packet, int fd)
{
    struct local_memories *memories = &pair->memories;
    bool is_next = packet->number > memories->last_peers;
    if (is_next && memories->peers == NULL) memories->peers = calloc(LOCAL_MEMORIES, sizeof(*memories->peers));
    if (!is_next || memories->peers == NULL) {
        close(fd);
        if (!is_next) local_pair_violation(pair, "memory whose number does not follow the one before");
        local_pair_break(pair, TL_RESOURCE_EXHAUSTED, "no memory for the peer's memory");
        return;
    }
    struct local_peer_memory *known = &memories->peers[packet->number % LOCAL_MEMORIES];
    if (known->number != 0) drop(pair, known);
    memories->last_peers = packet->number;
    *known = (struct local_peer_memory){.number = packet->number, .len_bytes = packet->len_bytes, .fd = fd};
}

void local_memory_went(struct local_pair *pair, const struct local_memory_packet *packet)
{
    struct local_peer_memory *known = find(pair, packet->number);
    if (known != NULL) {
        drop(pair, known);
    } else if (packet->number > pair->memories.last_peers) {
        local_pair_violation(pair, "FORGET of unknown memory");
    }
}

enum tl_status local_find_memory(struct tl_queue_pair *base, const struct tl_descriptor *descriptor, uint64_t len_bytes,
                                 struct tl_peer_memory *ret_memory, int *ret_file, struct tl_error *ret_error)
{
    struct local_pair *pair = local_pair_of(base);
    const char *name = base->provider->name;
    struct local_memory_descriptor part = {.number = 0};
    if (descriptor->len_bytes != sizeof(part))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: not a descriptor of memory", name);
    memcpy(&part, descriptor->bytes, sizeof(part));
    const struct local_peer_memory *known = find(pair, part.number);
    if (known == NULL)
        return tl_error_set(ret_error, TL_NOT_FOUND, "%s: the peer has not shown this memory, or has given it back",
                            name);
    if (part.offset_bytes > known->len_bytes || len_bytes > known->len_bytes - part.offset_bytes)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: the peer's value lies beyond its memory", name);
    if (ret_file != NULL) {
        *ret_file = fcntl(known->fd, F_DUPFD_CLOEXEC, 0);
        if (*ret_file < 0) return tl_error_set_errno(ret_error, errno, "no descriptor for the peer's memory");
    }
    *ret_memory = (struct tl_peer_memory){
        .number = known->number, .len_bytes = known->len_bytes, .offset_bytes = part.offset_bytes};
    return TL_OK;
}
