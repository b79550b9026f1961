// SPDX-License-Identifier: Apache-2.0
/*
 * Posted work: the ring of records of a queue pair, and its doorbell.
 *
 * A post fills the next record. The doorbell links all records since the last one and hands them to the card with one
 * call. A message is copied into memory of the queue pair, which is used again only when the message is over.
 * When the card refuses a request, the queue pair breaks and is taken from the card, since the request that asks for a
 * completion may be among those refused.
 */
#include "dataplane/verbs/verbs_internal.h"

#include <endian.h>
#include <string.h>

#include "base/arith.h"

/* How many bytes of writes may be under way before one of them asks for a completion: less than the slowest network
 * carries within the peer time-out. */
#define SIGNAL_BYTES (1u << 20)

/* Writes of at most so many bytes leave with their request, so that the card does not have to fetch them. */
#define INLINE_WRITE_BYTES 64

static struct verbs_record *record_at(const struct verbs_pair *pair, uint64_t sequence)
{
    return &pair->ring.records[sequence & (pair->ring.record_count - 1)];
}

uint32_t verbs_post_space(const struct tl_queue_pair *base)
{
    const struct verbs_pair *pair = TL_CONTAINER_OF(base, const struct verbs_pair, base);
    /* While the owner does not know that the queue pair is broken, posts are accepted and cancelled. */
    if (pair->state != VERBS_CONNECTED && pair->state != VERBS_BROKEN) return 0;
    uint32_t space = pair->ring.work_count - (uint32_t)(pair->ring.tail - pair->ring.retired);
    return (uint32_t)tl_min_u64(space, verbs_slots_send_space(pair));
}

struct verbs_record *verbs_post_record(struct verbs_pair *pair, struct tl_work *work)
{
    uint32_t index = (uint32_t)(pair->ring.tail & (pair->ring.record_count - 1));
    struct verbs_record *record = &pair->ring.records[index];
    TL_CHECK(pair->state != VERBS_FRESH && pair->state != VERBS_DRAINED);
    TL_CHECK(pair->ring.tail - pair->ring.retired < pair->ring.work_count);
    TL_CHECK(work == NULL || work->magic == TL_WORK_MAGIC);
    /* Only what is read of every request is set. The struct is large enough for all kinds of requests, and clearing it
     * takes half as long as a post. */
    record->request.wr_id =
        verbs_id_pack((struct verbs_id){pair->entry.generation, pair->entry.index, VERBS_SEND, index});
    record->request.sg_list = NULL;
    record->request.num_sge = 0;
    record->request.send_flags = 0;
    record->request.imm_data = 0; /* a driver may refuse a bind that has one */
    record->piece.length = 0;
    record->work = work;
    record->window = NULL;
    record->is_empty = true;
    record->send_end = pair->slots.send_end;
    pair->ring.tail++;
    if (verbs_pair_is_broken(pair)) verbs_pair_needs_attention(pair);
    return record;
}

/* Makes the record send this data. */
static void set_piece(struct verbs_record *record, const void *address, uint32_t len_bytes, uint32_t lkey)
{
    record->is_empty = false;
    record->piece = (struct ibv_sge){(uintptr_t)address, len_bytes, lkey};
    record->request.sg_list = &record->piece;
    record->request.num_sge = len_bytes > 0 ? 1 : 0;
}

void verbs_post_message(struct tl_queue_pair *base, const void *data, uint32_t len_bytes, struct tl_work *work)
{
    struct verbs_pair *pair = verbs_pair_of(base);
    TL_CHECK(len_bytes <= TL_SLOT_BYTES);
    struct verbs_record *record = verbs_post_record(pair, work);
    if (verbs_pair_is_broken(pair)) return;
    uint8_t *memory = verbs_slots_send(pair, len_bytes);
    record->send_end = pair->slots.send_end;
    if (len_bytes > 0) memcpy(memory, data, len_bytes);
    set_piece(record, memory, len_bytes, pair->slots.mr->lkey);
    record->request.opcode = IBV_WR_SEND;
    if (len_bytes <= pair->ring.max_inline_bytes) record->request.send_flags = IBV_SEND_INLINE;
}

/* Finds where in the peer's memory a write goes, or a read comes from. Returns false, and breaks the queue pair, when
 * the peer has sent something that is not a descriptor, or the request exceeds what it has exposed. */
static bool find_remote(struct verbs_pair *pair, const char *what, const struct tl_descriptor *remote,
                        uint64_t offset_bytes, uint64_t len_bytes, struct ibv_send_wr *request)
{
    uint64_t address, space;
    uint32_t rkey;
    if (len_bytes == 0) {
        request->wr.rdma.remote_addr = 0;
        request->wr.rdma.rkey = 0;
        return true;
    }
    if (!verbs_descriptor_read(remote, &address, &rkey, &space)) {
        verbs_pair_break_because(pair, "the peer's descriptor has %u bytes and is not one of verbs", remote->len_bytes);
        return false;
    }
    if (offset_bytes > space || len_bytes > space - offset_bytes || address > UINT64_MAX - space) {
        verbs_pair_break_because(pair, "a %s of %llu bytes at %llu is outside of the %llu that the peer has exposed",
                                 what, (unsigned long long)len_bytes, (unsigned long long)offset_bytes,
                                 (unsigned long long)space);
        return false;
    }
    request->wr.rdma.remote_addr = address + offset_bytes;
    request->wr.rdma.rkey = rkey;
    return true;
}

/* The memory here lies in this region. */
static void check_local(const struct tl_region *region, const void *address, uint64_t len_bytes)
{
    uint64_t start = (uintptr_t)address - (uintptr_t)region->address;
    TL_CHECK(start <= region->len_bytes && len_bytes <= region->len_bytes - start);
}

void verbs_post_write(struct tl_queue_pair *base, const struct tl_region *region, const void *source,
                      uint64_t len_bytes, const struct tl_descriptor *destination, uint64_t offset_bytes,
                      bool has_immediate, uint32_t immediate, struct tl_work *work)
{
    struct verbs_pair *pair = verbs_pair_of(base);
    /* Some devices do not enforce their own limit. */
    TL_CHECK(len_bytes <= base->provider->limits.max_write_bytes);
    TL_CHECK(len_bytes == 0 || region != NULL);
    struct verbs_record *record = verbs_post_record(pair, work);
    if (verbs_pair_is_broken(pair)) return;
    if (!find_remote(pair, "write", destination, offset_bytes, len_bytes, &record->request)) return;
    if (len_bytes > 0) check_local(region, source, len_bytes);
    set_piece(record, source, (uint32_t)len_bytes, len_bytes > 0 ? verbs_region_of(region)->mr->lkey : 0);
    record->request.opcode = has_immediate ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
    if (has_immediate) record->request.imm_data = htobe32(immediate);
    bool is_on_device = len_bytes > 0 && region->is_on_device; /* what is inline is copied by the CPU */
    if (!is_on_device && len_bytes <= INLINE_WRITE_BYTES && len_bytes <= pair->ring.max_inline_bytes) {
        record->request.send_flags = IBV_SEND_INLINE;
    }
}

void verbs_post_read(struct tl_queue_pair *base, const struct tl_region *region, void *destination, uint64_t len_bytes,
                     const struct tl_descriptor *source, uint64_t offset_bytes, struct tl_work *work)
{
    struct verbs_pair *pair = verbs_pair_of(base);
    TL_CHECK(len_bytes > 0 && len_bytes <= base->provider->limits.max_write_bytes);
    struct verbs_record *record = verbs_post_record(pair, work);
    if (verbs_pair_is_broken(pair)) return;
    if (!find_remote(pair, "read", source, offset_bytes, len_bytes, &record->request)) return;
    check_local(region, destination, len_bytes);
    set_piece(record, destination, (uint32_t)len_bytes, verbs_region_of(region)->mr->lkey);
    record->request.opcode = IBV_WR_RDMA_READ;
}

/* ---------------------------------------------------------------------------------------------------- doorbell -- */

static void ask_completion(struct verbs_pair *pair, uint64_t sequence)
{
    record_at(pair, sequence)->request.send_flags |= IBV_SEND_SIGNALED;
    pair->ring.signalled = sequence + 1;
    pair->ring.bytes_since_signal = 0;
    pair->ring.send_end_signalled = record_at(pair, sequence)->send_end;
}

/* Links the requests that have not left yet. The last one with work asks for a completion, and so does every fourth
 * part of the ring and of the memory of messages, each write that makes SIGNAL_BYTES full, and each read, because the
 * next one waits for it. Returns NULL when there is no request. */
static struct ibv_send_wr *link_requests(struct verbs_pair *pair)
{
    struct ibv_send_wr *first = NULL, **place = &first;
    uint64_t interval = pair->ring.work_count / 4, awaited_end = 0;
    uint64_t send_interval = pair->slots.send_bytes / 4;
    for (uint64_t sequence = pair->ring.posted; sequence < pair->ring.tail; sequence++) {
        struct verbs_record *record = record_at(pair, sequence);
        if (record->is_empty) continue;
        if (record->work != NULL) awaited_end = sequence + 1;
        *place = &record->request;
        place = &record->request.next;
        pair->ring.bytes_since_signal += record->piece.length;
        if (sequence + 1 - pair->ring.signalled >= interval || pair->ring.bytes_since_signal >= SIGNAL_BYTES ||
            record->send_end - pair->ring.send_end_signalled >= send_interval ||
            record->request.opcode == IBV_WR_RDMA_READ) {
            ask_completion(pair, sequence);
        }
    }
    *place = NULL;
    if (awaited_end > pair->ring.signalled) ask_completion(pair, awaited_end - 1);
    return first;
}

/* A window's key is that of the last bind that the card has taken: the next bind names it. */
static void update_keys(const struct ibv_send_wr *request)
{
    for (; request != NULL; request = request->next) {
        if (request->opcode == IBV_WR_BIND_MW) request->bind_mw.mw->rkey = request->bind_mw.rkey;
    }
}

void verbs_post_doorbell(struct tl_queue_pair *base)
{
    struct verbs_pair *pair = verbs_pair_of(base);
    struct ibv_send_wr *refused = NULL;
    if (verbs_pair_is_broken(pair) || pair->ring.posted == pair->ring.tail) return;
    verbs_slots_post(pair);
    if (verbs_pair_is_broken(pair)) return;
    struct ibv_send_wr *first = link_requests(pair);
    pair->ring.posted = pair->ring.tail;
    int error = first != NULL ? ibv_post_send(pair->qp, first, &refused) : 0;
    if (error != 0) {
        verbs_pair_break_because(pair, "the card refuses a request: %s", strerror(error));
        verbs_pair_lose(pair);
        return;
    }
    update_keys(first);
    if (record_at(pair, pair->ring.retired)->is_empty) verbs_pair_needs_attention(pair);
}

/* --------------------------------------------------------------------------------------------------------- end -- */

unsigned verbs_post_retire(struct verbs_pair *pair, uint64_t end, enum tl_status status)
{
    unsigned count = 0;
    while (pair->ring.retired < end) {
        struct verbs_record *record = record_at(pair, pair->ring.retired);
        struct tl_work *work = record->work;
        if (record->window != NULL) verbs_window_put(pair, record->window);
        pair->slots.send_begin = record->send_end;
        pair->ring.retired++;
        count++;
        tl_quota_use(&pair->device->base.quota, tl_work_done(work, status));
    }
    return count;
}

unsigned verbs_post_retire_empty(struct verbs_pair *pair)
{
    unsigned count = 0;
    while (pair->ring.retired < pair->ring.posted && record_at(pair, pair->ring.retired)->is_empty)
        count += verbs_post_retire(pair, pair->ring.retired + 1, verbs_pair_is_broken(pair) ? TL_CANCELLED : TL_OK);
    return count;
}

unsigned verbs_post_cancel_rest(struct verbs_pair *pair)
{
    unsigned count = 0;
    while (pair->ring.retired < pair->ring.tail) {
        pair->ring.posted = pair->ring.tail;
        count += verbs_post_retire(pair, pair->ring.tail, TL_CANCELLED);
    }
    return count;
}
