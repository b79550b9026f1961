// SPDX-License-Identifier: Apache-2.0
/*
 * Exposures. Under TL_KEYS_WINDOW each exposure has a type 2 memory window of its own. A request that leaves with the
 * next doorbell binds it to this queue pair and to nothing but the exposed bytes, for writes, for reads or for both,
 * and another request invalidates it. A window can be bound again once its invalidation is over, with the next key: an
 * old descriptor opens nothing for the next 255 binds of that window, and never anything to another peer.
 *
 * Windows are made in blocks, the first when the queue pair is created, and kept for it. Windows that are still bound
 * when it has broken go back to the card before the owner learns that it is drained: until then they keep their
 * regions.
 *
 * Under TL_KEYS_REGION, and for an exposure of no bytes, there is nothing to bind or to invalidate.
 */
#include "dataplane/verbs/verbs_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/log.h"

#define BLOCK_WINDOWS 32

struct verbs_window_block {
    struct verbs_window_block *next;
    unsigned count;
    struct verbs_window windows[BLOCK_WINDOWS];
};

/* Makes another block of windows. A part of a block is enough; it fails when not a single window can be made. */
static enum tl_status add_block(struct verbs_pair *pair, struct tl_error *ret_error)
{
    struct verbs_window_block *block = calloc(1, sizeof(*block));
    if (block == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for memory windows");
    while (block->count < BLOCK_WINDOWS) {
        struct verbs_window *window = &block->windows[block->count];
        window->mw = ibv_alloc_mw(pair->device->pd, IBV_MW_TYPE_2);
        if (window->mw == NULL) break;
        window->rkey = window->mw->rkey;
        block->count++;
        verbs_window_put(pair, window);
    }
    if (block->count == 0) {
        free(block);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                            "%s has no memory window left (%s; it has %d): connect fewer peers, or set "
                            "verbs.keys to region",
                            pair->device->base.name, strerror(errno), pair->device->attributes.max_mw);
    }
    block->next = pair->windows.blocks;
    pair->windows.blocks = block;
    pair->windows.count += block->count;
    return TL_OK;
}

enum tl_status verbs_windows_prepare(struct verbs_pair *pair, struct tl_error *ret_error)
{
    return pair->windows.keys == TL_KEYS_WINDOW ? add_block(pair, ret_error) : TL_OK;
}

void verbs_windows_release(struct verbs_pair *pair)
{
    pair->windows.idle = NULL;
    pair->windows.idle_count = pair->windows.count = 0;
    while (pair->windows.blocks != NULL) {
        struct verbs_window_block *block = pair->windows.blocks;
        pair->windows.blocks = block->next;
        for (unsigned i = 0; i < block->count; i++) {
            int error = ibv_dealloc_mw(block->windows[i].mw);
            if (error == 0) continue;
            TL_LOG_AT_ERROR("a memory window cannot be freed", TL_STR("device", pair->device->base.name),
                            TL_STR("error", strerror(error)));
        }
        free(block);
    }
}

void verbs_window_put(struct verbs_pair *pair, struct verbs_window *window)
{
    window->next = pair->windows.idle;
    pair->windows.idle = window;
    pair->windows.idle_count++;
}

bool verbs_window_has_spare(struct tl_queue_pair *base)
{
    struct verbs_pair *pair = verbs_pair_of(base);
    struct tl_error error;
    if (pair->windows.keys == TL_KEYS_REGION || verbs_pair_is_broken(pair)) return true;
    while (pair->windows.idle_count == 0 || 4 * (pair->windows.idle_count - 1) < pair->windows.count) {
        if (add_block(pair, &error) != TL_OK) return false;
    }
    return true;
}

static void post_bind(struct verbs_pair *pair, struct verbs_window *window, const struct verbs_region *region,
                      void *address, uint64_t len_bytes, unsigned access)
{
    struct verbs_record *record = verbs_post_record(pair, NULL);
    window->rkey = ibv_inc_rkey(window->rkey);
    record->is_empty = false;
    record->request.opcode = IBV_WR_BIND_MW;
    record->request.bind_mw.mw = window->mw;
    record->request.bind_mw.rkey = window->rkey;
    record->request.bind_mw.bind_info = (struct ibv_mw_bind_info){region->mr, (uintptr_t)address, len_bytes, access};
}

static enum tl_status expose(struct tl_queue_pair *base, struct tl_region *region, void *address, uint64_t len_bytes,
                             unsigned access, struct tl_exposure *exposure, struct tl_error *ret_error)
{
    struct verbs_pair *pair = verbs_pair_of(base);
    const struct verbs_region *memory = verbs_region_of(region);
    struct verbs_window *window = NULL;
    uint64_t offset = (uintptr_t)address - (uintptr_t)region->address;
    TL_CHECK(region->access == TL_REGION_WRITE && offset <= region->len_bytes &&
             len_bytes <= region->len_bytes - offset);
    uint32_t rkey = len_bytes > 0 && pair->windows.keys == TL_KEYS_REGION ? memory->mr->rkey : 0;
    if (len_bytes > 0 && pair->windows.keys == TL_KEYS_WINDOW && !verbs_pair_is_broken(pair)) {
        if (pair->windows.idle == NULL) {
            enum tl_status status = add_block(pair, ret_error);
            if (status != TL_OK) return status;
        }
        window = pair->windows.idle;
        pair->windows.idle = window->next;
        pair->windows.idle_count--;
        post_bind(pair, window, memory, address, len_bytes, access);
        rkey = window->rkey;
    }
    exposure->region = region;
    exposure->address = address;
    exposure->len_bytes = len_bytes;
    exposure->provider_state = window;
    verbs_descriptor_write((uintptr_t)address, rkey, len_bytes, &exposure->descriptor);
    return TL_OK;
}

enum tl_status verbs_window_expose(struct tl_queue_pair *base, struct tl_region *region, void *address,
                                   uint64_t len_bytes, struct tl_exposure *exposure, struct tl_error *ret_error)
{
    return expose(base, region, address, len_bytes, IBV_ACCESS_REMOTE_WRITE, exposure, ret_error);
}

enum tl_status verbs_window_expose_source(struct tl_queue_pair *base, struct tl_region *region, void *address,
                                          uint64_t len_bytes, bool is_writable, struct tl_exposure *exposure,
                                          struct tl_error *ret_error)
{
    TL_CHECK(verbs_pair_of(base)->windows.keys == TL_KEYS_WINDOW);
    unsigned access = IBV_ACCESS_REMOTE_READ | (is_writable ? IBV_ACCESS_REMOTE_WRITE : 0u);
    return expose(base, region, address, len_bytes, access, exposure, ret_error);
}

void verbs_window_revoke(struct tl_queue_pair *base, struct tl_exposure *exposure, struct tl_work *work)
{
    struct verbs_pair *pair = verbs_pair_of(base);
    struct verbs_window *window = exposure->provider_state;
    TL_CHECK(exposure->region != NULL);
    exposure->region = NULL;
    exposure->provider_state = NULL;
    if (pair->windows.keys == TL_KEYS_REGION) {
        TL_CHECK(work == NULL);
        return;
    }
    struct verbs_record *record = verbs_post_record(pair, work);
    if (window == NULL || verbs_pair_is_broken(pair)) return;
    record->is_empty = false;
    record->window = window;
    record->request.opcode = IBV_WR_LOCAL_INV;
    record->request.invalidate_rkey = window->rkey;
}
