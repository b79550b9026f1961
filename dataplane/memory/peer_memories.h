// SPDX-License-Identifier: Apache-2.0
/*
 * Memories of single peers: under TL_KEYS_REGION a peer that holds the key of a region may write all of it, so that
 * each has a memory of its own.
 *
 * Making one registers a region of its pool and giving it back undoes that, which takes seconds where pools are large.
 * Both are done here, by a thread of its own: what is given back first, so that locked memory is free again before more
 * of it is asked for. Reactors ask and never wait.
 *
 * Failure modes: what cannot be made comes back as an error in its closure.
 */
#ifndef DATAPLANE_MEMORY_PEER_MEMORIES_H
#define DATAPLANE_MEMORY_PEER_MEMORIES_H

#include "dataplane/memory/memory.h"

struct tl_peer_memories;

/* A memory that is being made. Embedded in whoever waits; must stay valid until its closure was delivered. */
struct tl_memory_making {
    struct tl_memory *memory;  /* in the closure, with TL_OK */
    struct tl_error error;     /* in the closure: TL_OK, or why not */
    struct tl_closure closure; /* to the poster's mailbox: deliver is set by the caller and runs on its thread */
    void (*post)(void *context, struct tl_closure *closure); /* brings the closure there. Thread: any */
    void *context;
    struct tl_closure job; /* the maker's, as is memories */
    struct tl_peer_memories *memories;
};

/* options: of each. Errors: TL_RESOURCE_EXHAUSTED: no memory or no thread. */
enum tl_status tl_peer_memories_create(struct tl_provider *provider, const struct tl_memory_options *options,
                                       struct tl_peer_memories **ret_memories, struct tl_error *ret_error) TL_MUST_USE;
/* All memories were given back, and nobody calls anything else. Those that were asked for and not begun fail with
 * TL_CANCELLED; their closures are posted before this returns. NULL is accepted. Blocks: until all of them are
 * destroyed. */
void tl_peer_memories_destroy(struct tl_peer_memories *memories);

/* Makes a memory; the closure follows exactly once. Thread: any. */
void tl_peer_memories_make(struct tl_peer_memories *memories, struct tl_memory_making *making);
/* Gives back one that was made; as tl_memory_destroy. Thread: any. */
void tl_peer_memories_give(struct tl_peer_memories *memories, struct tl_memory *memory);
/* Adds the counters of all memories, those that are gone included. Thread: any. */
void tl_peer_memories_add_stats(struct tl_peer_memories *memories, struct tl_memory_stats *stats);

#endif
