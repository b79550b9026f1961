// SPDX-License-Identifier: Apache-2.0
/*
 * Slots: the registered memory of one queue pair in which messages arrive, and from which they leave. The latter is
 * used in a circle.
 *
 * Each slot that messages arrive in has one receive request, made once. There are more of them than the owner counts
 * on, so that some may be idle: these are linked and posted together. Whether too many are idle is checked after a poll
 * and before each doorbell, so that a slot is posted before the peer learns that it is free.
 */
#include "dataplane/verbs/verbs_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"

/* How many slots are posted together. */
#define MAX_IDLE_SLOTS 64

uint32_t verbs_slots_may_idle(uint32_t slot_count)
{
    return (uint32_t)tl_min_u64(slot_count / 4, MAX_IDLE_SLOTS);
}

/* With one slot more, so that work_count messages fit even where the end of the memory cannot be used. */
static uint64_t send_bytes(uint32_t work_count)
{
    return tl_min_u64(((uint64_t)work_count + 1) * TL_SLOT_BYTES, VERBS_SEND_BYTES);
}

uint64_t verbs_slots_default_bytes(uint32_t queue_depth)
{
    uint32_t slot_count = (uint32_t)tl_min_u64(queue_depth, TL_VERBS_DEFAULT_SLOTS);
    return ((uint64_t)slot_count + verbs_slots_may_idle(slot_count)) * TL_SLOT_BYTES + send_bytes(queue_depth);
}

uint32_t verbs_slots_send_space(const struct verbs_pair *pair)
{
    const struct verbs_slots *slots = &pair->slots;
    const uint64_t end_bytes = TL_SLOT_BYTES - VERBS_SEND_UNIT_BYTES; /* what the end may leave unused */
    uint64_t free_bytes = slots->send_bytes - (slots->send_end - slots->send_begin);
    return free_bytes > end_bytes ? (uint32_t)((free_bytes - end_bytes) / TL_SLOT_BYTES) : 0;
}

uint8_t *verbs_slots_send(struct verbs_pair *pair, uint32_t len_bytes)
{
    struct verbs_slots *slots = &pair->slots;
    uint64_t taken_bytes = ((uint64_t)len_bytes + VERBS_SEND_UNIT_BYTES - 1) & ~(uint64_t)(VERBS_SEND_UNIT_BYTES - 1);
    uint64_t left_bytes = slots->send_bytes - slots->send_end % slots->send_bytes;
    if (taken_bytes > left_bytes) slots->send_end += left_bytes;
    uint8_t *memory = verbs_slot_memory(pair, slots->count) + slots->send_end % slots->send_bytes;
    slots->send_end += taken_bytes;
    TL_CHECK(slots->send_end - slots->send_begin <= slots->send_bytes);
    return memory;
}

enum tl_status verbs_slots_init(struct verbs_pair *pair, struct tl_error *ret_error)
{
    pair->slots.send_bytes = send_bytes(pair->ring.work_count);
    pair->slots.memory_bytes = pair->slots.count * (uint64_t)TL_SLOT_BYTES + pair->slots.send_bytes;
    pair->slots.slots = calloc(pair->slots.count, sizeof(*pair->slots.slots));
    /* It is a mapping of its own: registering pins whole pages, which must not be shared with anything else. */
    void *memory = mmap(NULL, pair->slots.memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    pair->slots.memory = memory != MAP_FAILED ? memory : NULL;
    if (pair->slots.slots == NULL || pair->slots.memory == NULL) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the slots of a queue pair");
    }
    pair->slots.mr = ibv_reg_mr(pair->device->pd, pair->slots.memory, pair->slots.memory_bytes, IBV_ACCESS_LOCAL_WRITE);
    if (pair->slots.mr == NULL) {
        if (errno == ENOMEM && verbs_exceeds_memlock(UINT64_MAX))
            return verbs_memlock_error(pair->slots.memory_bytes, "a queue pair", ret_error);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: cannot register the slots of a queue pair: %s",
                            pair->device->base.name, strerror(errno));
    }
    for (uint32_t i = 0; i < pair->slots.count; i++) {
        struct verbs_slot *slot = &pair->slots.slots[i];
        slot->piece = (struct ibv_sge){(uintptr_t)verbs_slot_memory(pair, i), TL_SLOT_BYTES, pair->slots.mr->lkey};
        slot->request.wr_id =
            verbs_id_pack((struct verbs_id){pair->entry.generation, pair->entry.index, VERBS_RECEIVE, i});
        slot->request.sg_list = &slot->piece;
        slot->request.num_sge = 1;
        slot->request.next = i + 1 < pair->slots.count ? &pair->slots.slots[i + 1].request : NULL;
    }
    pair->slots.idle = &pair->slots.slots[0].request;
    pair->slots.idle_end = &pair->slots.slots[pair->slots.count - 1].request.next;
    pair->slots.idle_count = pair->slots.count;
    return TL_OK;
}

void verbs_slots_fini(struct verbs_pair *pair)
{
    if (pair->slots.mr != NULL) ibv_dereg_mr(pair->slots.mr);
    if (pair->slots.memory != NULL) munmap(pair->slots.memory, pair->slots.memory_bytes);
    free(pair->slots.slots);
}

void verbs_slots_post_idle(struct verbs_pair *pair)
{
    struct ibv_recv_wr *refused = NULL;
    if (verbs_pair_is_broken(pair) || pair->qp == NULL) return;
    int error = ibv_post_recv(pair->qp, pair->slots.idle, &refused);
    if (error == 0) refused = NULL;
    for (struct ibv_recv_wr *each = pair->slots.idle; each != NULL && each != refused; each = each->next) {
        TL_CONTAINER_OF(each, struct verbs_slot, request)->is_posted = true;
        pair->slots.posted++;
    }
    pair->slots.idle = NULL;
    pair->slots.idle_end = &pair->slots.idle;
    pair->slots.idle_count = 0;
    if (error != 0) verbs_pair_break_because(pair, "the card refuses receive buffers: %s", strerror(error));
}

void verbs_slots_return(struct verbs_pair *pair, uint32_t index)
{
    struct ibv_recv_wr *request = &pair->slots.slots[index].request;
    request->next = NULL;
    *pair->slots.idle_end = request;
    pair->slots.idle_end = &request->next;
    pair->slots.idle_count++;
}
