// SPDX-License-Identifier: Apache-2.0
/*
 * Completions. A good completion of posted work retires everything that was posted before it. A completion of a slot
 * hands the message or the immediate to the owner. The first bad completion breaks the queue pair. Of the completions
 * that follow it, good ones of slots are still handed to the owner, and the others only return what was posted. When
 * the card is not relied on any more, completions of posted work end nothing: it ends when the queue pair is taken from
 * the card.
 *
 * In a failed completion only the id, the status and the vendor's number are valid. Many failures have the same status,
 * and a failed link has none of its own. So before a reason is given, the device is asked for its events, for the state
 * of its port and for its address.
 */
#include "dataplane/verbs/verbs_internal.h"

#include <endian.h>

const char *verbs_complete_words(enum ibv_wc_status status)
{
    switch (status) {
    case IBV_WC_LOC_LEN_ERR:
        return "a message is longer than its slot";
    case IBV_WC_LOC_QP_OP_ERR:
        return "the card could not carry out a request of ours";
    case IBV_WC_LOC_PROT_ERR:
        return "a request of ours named memory that is not registered";
    case IBV_WC_WR_FLUSH_ERR:
        return "the queue pair is in the error state: the peer has used a key that it may not use, or sent what does "
               "not fit";
    case IBV_WC_MW_BIND_ERR:
        return "a memory window could not be bound";
    case IBV_WC_BAD_RESP_ERR:
        return "the peer's card answered what it was not asked";
    case IBV_WC_LOC_ACCESS_ERR:
        return "the peer wrote where it may not";
    case IBV_WC_REM_INV_REQ_ERR:
        return "the peer's card refuses a request: it does not fit the slot";
    case IBV_WC_REM_ACCESS_ERR:
        return "the peer's card refuses a write or a read: the key was revoked, or never given for this place";
    case IBV_WC_REM_OP_ERR:
        return "the peer's card could not carry out a request";
    case IBV_WC_RETRY_EXC_ERR:
        return "the peer does not answer: it is gone, or the network between is down";
    case IBV_WC_RNR_RETRY_EXC_ERR:
        return "the peer has no slot posted for a message of ours";
    case IBV_WC_REM_ABORT_ERR:
        return "the peer has aborted";
    case IBV_WC_FATAL_ERR:
        return "the card has failed";
    case IBV_WC_RESP_TIMEOUT_ERR:
        return "the peer's card does not answer in time";
    default:
        return "a request failed";
    }
}

/* Breaks the queue pair for a bad completion. */
static void break_for(struct verbs_pair *pair, const struct ibv_wc *completion)
{
    char link[160];
    verbs_events_handle(pair->device);
    if (verbs_pair_is_broken(pair)) return;
    bool has_link = verbs_device_has_link(pair->device, link, sizeof(link));
    verbs_pair_break_because(pair, "%s (%s, vendor %#x)", has_link ? verbs_complete_words(completion->status) : link,
                             ibv_wc_status_str(completion->status), completion->vendor_err);
    bool is_unanswered = completion->status == IBV_WC_RETRY_EXC_ERR || completion->status == IBV_WC_RESP_TIMEOUT_ERR;
    if (has_link && is_unanswered) pair->reason.code = TL_DEADLINE_EXCEEDED;
}

/* The card's completions contradict each other: it is not relied on any more, and the queue pair is taken from it. */
static void distrust(struct verbs_pair *pair, const char *why)
{
    verbs_pair_break_because(pair, "%s", why);
    verbs_pair_lose(pair);
}

static void complete_send(struct verbs_pair *pair, uint32_t index, const struct ibv_wc *completion)
{
    bool is_bad = completion->status != IBV_WC_SUCCESS;
    uint64_t sequence = pair->ring.retired + ((index - pair->ring.retired) & (pair->ring.record_count - 1));
    if (index >= pair->ring.record_count || sequence >= pair->ring.posted) {
        distrust(pair, "the card completed a request that it does not have");
        return;
    }
    if (!verbs_pair_is_broken(pair)) {
        /* All requests before a failed one have succeeded. */
        verbs_post_retire(pair, is_bad ? sequence : sequence + 1, TL_OK);
        if (is_bad) break_for(pair, completion);
    }
    if (verbs_pair_is_broken(pair)) {
        verbs_pair_report_broken(pair);
        verbs_post_retire(pair, sequence + 1, TL_CANCELLED);
    }
    verbs_post_retire_empty(pair);
}

static void deliver(struct verbs_pair *pair, uint32_t index, const struct ibv_wc *completion)
{
    if (completion->opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
        pair->events.immediate(pair->owner, be32toh(completion->imm_data), completion->byte_len);
    } else if (completion->opcode == IBV_WC_RECV && completion->byte_len <= TL_SLOT_BYTES) {
        pair->events.message(pair->owner, verbs_slot_memory(pair, index), completion->byte_len);
    } else {
        verbs_pair_break_because(pair, "something has arrived that is neither a message nor an immediate");
    }
}

static void complete_receive(struct verbs_pair *pair, uint32_t index, const struct ibv_wc *completion)
{
    if (index >= pair->slots.count || !pair->slots.slots[index].is_posted) {
        distrust(pair, "the card completed a slot that it does not have");
        return;
    }
    pair->slots.slots[index].is_posted = false;
    pair->slots.posted--;
    if (completion->status == IBV_WC_SUCCESS) {
        /* The owner gets it even if the queue pair has broken meanwhile, because the peer knows that it has arrived. */
        deliver(pair, index, completion);
    } else if (!verbs_pair_is_broken(pair)) {
        break_for(pair, completion);
    }
    verbs_slots_return(pair, index);
}

void verbs_complete(struct verbs_device *device, const struct ibv_wc *completion)
{
    struct verbs_id id = verbs_id_unpack(completion->wr_id);
    if (id.pair_index >= device->base.limits.max_queue_pairs) return;
    struct verbs_pair *pair = device->pairs[id.pair_index].pair;
    /* The queue pair was taken from the card before its completions were read. */
    if (pair == NULL || pair->entry.generation != id.generation || pair->qp == NULL) return;
    if (id.kind == VERBS_RECEIVE) {
        complete_receive(pair, id.index, completion);
    } else if (!pair->entry.is_lost) {
        complete_send(pair, id.index, completion);
    }
    bool has_idle_slots = pair->slots.idle_count > pair->slots.may_idle;
    if (has_idle_slots || pair->state != VERBS_CONNECTED) verbs_pair_needs_attention(pair);
}
