// SPDX-License-Identifier: Apache-2.0
/*
 * The peers that a program has added to a worker (tl_worker_add_peer), by id and by name.
 *
 * Happy path: tl_added_peers_insert, then lookups from any thread; tl_added_peers_remove takes a peer out. A slot that
 * has become free is used again with another generation, so that the id of a removed peer names no other one.
 *
 * Thread: the loop's owner changes it, and may look up at any time; other threads look up between lock and unlock.
 */
#ifndef SERVER_PEERS_ADDED_PEERS_H
#define SERVER_PEERS_ADDED_PEERS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tensorlane/status.h>

#include "base/list.h"
#include "base/mailbox.h"
#include "server/operation_ending.h"

#define HASH_NONFATAL_OOM 1
#include <uthash.h>

struct tl_peer;
struct tl_added_slot;

/* What a peer has besides that a program has added (added_peer.c). */
struct tl_added {
    struct tl_peer *peer;
    uint64_t id;
    const char *name; /* the peer's */
    bool is_found_by_name;
    UT_hash_handle hh;           /* with is_found_by_name: in by_name */
    unsigned references;         /* atomic: one until it is removed, and one for each that refers to the peer */
    bool is_named;               /* the program has said which name it has; otherwise it is called by its address
                                    until it answers */
    uint64_t wanted_incarnation; /* the process that is meant; 0: any */
    bool is_removed;
    struct tl_error gone;         /* why nothing can be asked of it any more; code TL_OK otherwise */
    struct tl_list removed_place; /* in worker->members.removed_peers */
    struct tl_closure free_closure;
    struct tl_ops_ending ending; /* ends what was asked of the peer, while is_ending */
    bool is_ending;
};

struct tl_added_peers {
    pthread_mutex_t mutex;
    struct tl_added_slot *slots; /* [slot_count] */
    size_t slot_count;
    size_t first_index;       /* the index in an id of the first slot; the configuration's peers have those before */
    size_t count;             /* slots with a peer */
    uint32_t free_slot;       /* place of the first free slot, plus 1; 0: none */
    struct tl_added *by_name; /* one peer for each name */
    size_t hidden_count;      /* peers that are not in by_name */
    bool has_mutex;
};

void tl_added_peers_init(struct tl_added_peers *added, size_t first_index);
/* No peer is in it any more. A zeroed struct is accepted. */
void tl_added_peers_fini(struct tl_added_peers *added);

/* Gives the peer an id, and finds it by its name unless another one has that. Returns false when there is no memory. */
bool tl_added_peers_insert(struct tl_added_peers *added, struct tl_added *peer) TL_MUST_USE;
/* Gives a peer another name: name_bytes bytes at `memory`, which it points to, are written anew. Other threads read
 * them between lock and unlock. */
void tl_added_peers_rename(struct tl_added_peers *added, struct tl_added *peer, const char *name, char *memory,
                           size_t name_bytes);
void tl_added_peers_remove(struct tl_added_peers *added, struct tl_added *peer);

/* Return NULL when there is none. */
struct tl_added *tl_added_peers_by_id(const struct tl_added_peers *added, uint64_t id);
struct tl_added *tl_added_peers_by_name(const struct tl_added_peers *added, const char *name);
/* Returns the peer of the slot at *place, or of the next one that has a peer, and moves *place behind it. */
struct tl_added *tl_added_peers_next(const struct tl_added_peers *added, size_t *place);

void tl_added_peers_lock(struct tl_added_peers *added);
void tl_added_peers_unlock(struct tl_added_peers *added);

#endif
