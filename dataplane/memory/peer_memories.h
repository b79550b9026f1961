// SPDX-License-Identifier: Apache-2.0
/*
 * Memories of single peers. Under TL_KEYS_REGION a peer that holds the key of a region may write all of it, so each
 * peer has a memory of its own.
 *
 * Making a memory registers a region of its pool, and giving it back undoes that, which takes seconds where pools are
 * large. A thread does both: it destroys what was given back first, so that locked memory is free again before more is
 * locked. Reactors ask for a memory and never wait.
 *
 * Failure modes: a memory that cannot be made comes back as an error in its closure.
 */
#ifndef DATAPLANE_MEMORY_PEER_MEMORIES_H
#define DATAPLANE_MEMORY_PEER_MEMORIES_H

#include "dataplane/memory/memory.h"

struct tl_peer_memories;

/* A memory that is being made. Embedded in the object that waits; must stay valid until its closure was delivered. */
struct tl_memory_making {
    struct tl_memory *memory;  /* set in the closure, when error is TL_OK */
    struct tl_error error;     /* set in the closure: TL_OK, or the reason why not */
    struct tl_closure closure; /* goes to the poster's mailbox; the caller sets `run`, which is called on its thread */
    void (*post)(void *context, struct tl_closure *closure); /* posts the closure. Thread: any */
    void *context;
    struct tl_closure job; /* the maker's, as is memories */
    struct tl_peer_memories *memories;
};

/* options hold for each memory. Errors: TL_RESOURCE_EXHAUSTED: no memory or no thread. */
enum tl_status tl_peer_memories_create(struct tl_provider *provider, const struct tl_memory_options *options,
                                       struct tl_peer_memories **ret_memories, struct tl_error *ret_error) TL_MUST_USE;
/* All memories must have been given back, and no other call may run. Memories that were asked for and not begun fail
 * with TL_CANCELLED; their closures are posted before this returns. NULL is accepted. Blocks: until all memories are
 * destroyed. */
void tl_peer_memories_destroy(struct tl_peer_memories *memories);

/* Makes a memory; the closure follows exactly once. Thread: any. */
void tl_peer_memories_make(struct tl_peer_memories *memories, struct tl_memory_making *making);
/* Gives a memory back that was made, under the conditions of tl_memory_destroy. Thread: any. */
void tl_peer_memories_give(struct tl_peer_memories *memories, struct tl_memory *memory);
/* Adds the counters of all memories, including those that were given back. Thread: any. */
void tl_peer_memories_add_stats(struct tl_peer_memories *memories, struct tl_memory_stats *stats);

#endif
