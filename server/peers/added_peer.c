// SPDX-License-Identifier: Apache-2.0
/*
 * Peers that no configuration names: a program adds them by their address, and removes them.
 *
 * Happy path: added; dialled when something is asked of it; the process that answers gives its name; removed, with all
 * operations that receive from it.
 *
 * The link to such a peer is one-way: it carries the requests of this worker alone. So neither side needs to know the
 * other one as a peer, two workers that add each other have a link each, and none of them replaces another.
 *
 * Failure modes: a process with another incarnation than was wanted answers: the process that was meant is gone for
 * ever, and so all that is asked of the peer fails at once, now and later.
 *
 * A peer is freed when it was removed and nothing refers to it any more: operations and links have a reference each.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "config/address.h"
#include "config/cluster.h"
#include "server/peers/peer_internal.h"

/* -------------------------------------------------------------------------------------------------- references -- */

static void free_peer(struct tl_closure *closure)
{
    struct tl_added *added = TL_CONTAINER_OF(closure, struct tl_added, free_closure);
    tl_list_remove(&added->removed_place);
    tl_peer_destroy(added->peer);
}

void tl_peer_retain(struct tl_peer *peer)
{
    if (peer->added != NULL) __atomic_fetch_add(&peer->added->references, 1, __ATOMIC_RELAXED);
}

void tl_peer_release(struct tl_peer *peer)
{
    if (peer == NULL || peer->added == NULL) return;
    if (__atomic_sub_fetch(&peer->added->references, 1, __ATOMIC_ACQ_REL) > 0) return;
    tl_executor_post(&peer->worker->executor, &peer->added->free_closure);
}

/* ------------------------------------------------------------------------------------------------------ ending -- */

/* All has ended that was asked of the peer. */
static void all_ended(struct tl_ops_ending *ending)
{
    struct tl_added *added = TL_CONTAINER_OF(ending, struct tl_added, ending);
    struct tl_peer *peer = added->peer;
    added->is_ending = false;
    TL_CHECK(tl_list_is_empty(&peer->requests));
    if (added->is_removed) {
        tl_peer_unlink(peer);
        tl_peer_check_waits(peer->worker);
        tl_peer_release(peer);
    }
    tl_peer_release(peer);
}

/* Nothing can be asked of the peer any more, and what was asked ends: some operations in each round of the loop. */
static void lose(struct tl_peer *peer, const struct tl_error *reason)
{
    struct tl_added *added = peer->added;
    added->gone = *reason;
    if (added->is_ending) return;
    added->is_ending = true;
    tl_peer_retain(peer);
    added->ending =
        (struct tl_ops_ending){.worker = peer->worker, .peer = peer, .status = &added->gone, .over = all_ended};
    tl_ops_end(&added->ending);
}

static void remove_peer(struct tl_peer *peer)
{
    struct tl_worker *worker = peer->worker;
    struct tl_error reason;
    tl_error_set(&reason, TL_CANCELLED, "%s was removed from the peers", peer->name);
    tl_added_peers_remove(&worker->members.added, peer->added);
    tl_list_push_back(&worker->members.removed_peers, &peer->added->removed_place);
    peer->added->is_removed = true;
    lose(peer, &reason);
}

bool tl_added_peer_knows(struct tl_peer *peer, const struct tl_identity *who, struct tl_error *ret_error)
{
    struct tl_added *added = peer->added;
    if (added->gone.code != TL_OK) {
        (void)tl_error_copy(ret_error, &added->gone);
        return false;
    }
    if (added->wanted_incarnation != 0 && who->incarnation != added->wanted_incarnation) {
        tl_error_set(ret_error, TL_UNAVAILABLE,
                     "the process with incarnation 0x%016" PRIx64 " at %s is gone: %s with incarnation 0x%016" PRIx64
                     " answers there; add it as another peer",
                     added->wanted_incarnation, peer->address, who->name, who->incarnation);
        lose(peer, ret_error);
        return false;
    }
    if (!added->is_named && strcmp(peer->name, who->name) != 0) {
        tl_added_peers_rename(&peer->worker->members.added, added, who->name, peer->name, sizeof(peer->name));
    }
    return true;
}

void tl_added_peers_destroy(struct tl_worker *worker)
{
    struct tl_added_peers *added = &worker->members.added;
    struct tl_added *item;
    size_t place = 0;
    while ((item = tl_added_peers_next(added, &place)) != NULL) {
        tl_added_peers_remove(added, item);
        tl_peer_destroy(item->peer);
    }
    struct tl_list *removed;
    while ((removed = tl_list_pop_front(&worker->members.removed_peers)) != NULL)
        tl_peer_destroy(TL_CONTAINER_OF(removed, struct tl_added, removed_place)->peer);
    tl_added_peers_fini(added);
}

/* ------------------------------------------------------------------------------------------------------ public -- */

struct add_command {
    struct tl_command command;
    char address[TL_ADDRESS_BYTES];
    char name[TL_MAX_NAME_BYTES]; /* "": any */
    uint64_t incarnation;
    tl_peer_id peer;
    enum tl_status status;
    struct tl_error *ret_error;
};

/* Whether a peer at the address of the call is what the call means: the same process, and the same certainty about its
 * name. */
static bool is_same_process(const struct tl_peer *peer, const struct add_command *add)
{
    const struct tl_added *added = peer->added;
    if (added == NULL) return add->incarnation == 0 || add->incarnation == peer->incarnation;
    return added->wanted_incarnation == add->incarnation && added->is_named == (add->name[0] != '\0');
}

/* Looks for a peer that has this name, or address, already. Returns whether the call is over. */
static bool find_known(struct add_command *add)
{
    struct tl_worker *worker = add->command.worker;
    size_t place = 0;
    const struct tl_peer *peer;
    while ((peer = tl_peers_next(worker, &place)) != NULL) {
        bool is_same_name = add->name[0] != '\0' && strcmp(peer->name, add->name) == 0;
        bool is_same_address = strcmp(peer->address, add->address) == 0;
        if (!is_same_name && !(is_same_address && add->name[0] == '\0')) continue;
        if (peer->is_self && is_same_address && add->incarnation != 0 && add->incarnation != peer->incarnation) {
            add->status =
                tl_error_set(add->ret_error, TL_UNAVAILABLE,
                             "the process with incarnation 0x%016" PRIx64 " at %s is gone: this worker itself, "
                             "with incarnation 0x%016" PRIx64 ", answers there",
                             add->incarnation, peer->address, peer->incarnation);
            return true;
        }
        if (is_same_address && is_same_process(peer, add)) {
            add->peer = peer->id;
            return true;
        }
        if (!is_same_name || is_same_address) continue;
        add->status = tl_error_set(add->ret_error, TL_ALREADY_EXISTS, "%s is a peer at %s already, not at %s; %s",
                                   peer->name, peer->address, add->address,
                                   peer->added != NULL ? "remove that one first" : "the configuration says so");
        return true;
    }
    return false;
}

static struct tl_peer *create(struct tl_worker *worker, const struct add_command *add)
{
    struct tl_peer *peer = tl_peer_create(worker, add->name[0] != '\0' ? add->name : add->address, add->address);
    if (peer == NULL) return NULL;
    peer->added = calloc(1, sizeof(*peer->added));
    if (peer->added != NULL) {
        *peer->added = (struct tl_added){.peer = peer,
                                         .name = peer->name,
                                         .references = 1,
                                         .is_named = add->name[0] != '\0',
                                         .wanted_incarnation = add->incarnation,
                                         .free_closure = {.run = free_peer}};
        tl_list_init(&peer->added->removed_place);
        tl_list_init(&peer->added->free_closure.link);
        tl_list_init(&peer->added->ending.closure.link);
        if (tl_added_peers_insert(&worker->members.added, peer->added)) {
            peer->id = peer->added->id;
            return peer;
        }
    }
    tl_peer_destroy(peer);
    return NULL;
}

static void run_add(struct tl_command *command)
{
    struct add_command *add = TL_CONTAINER_OF(command, struct add_command, command);
    if (find_known(add)) return;
    const struct tl_peer *peer = create(command->worker, add);
    if (peer == NULL) {
        add->status = tl_error_set(add->ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a peer at %s", add->address);
        return;
    }
    add->peer = peer->id;
}

static enum tl_status check_name(const char *name, char ret_name[TL_MAX_NAME_BYTES], struct tl_error *ret_error)
{
    char job[TL_CONFIG_JOB_BYTES];
    uint32_t index;
    if (!tl_config_split_name(name, job, &index) || !tl_cluster_is_job_name(job)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "\"%.64s\" is no name of a worker, which is written \"/job:ps/task:0\" or \"ps:0\"", name);
    }
    snprintf(ret_name, TL_MAX_NAME_BYTES, "/job:%.*s/task:%" PRIu32, TL_JOB_NAME_BYTES - 1, job, index);
    return TL_OK;
}

enum tl_status tl_worker_add_peer(struct tl_worker *worker, const char *address, const char *name, uint64_t incarnation,
                                  tl_peer_id *ret_peer, struct tl_error *ret_error)
{
    struct add_command add = {.incarnation = incarnation, .ret_error = ret_error};
    if (address == NULL) return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the peer has no address");
    enum tl_status status = tl_address_check(address, TL_ADDRESS_DIAL, add.address, ret_error);
    if (status == TL_OK && name != NULL) status = check_name(name, add.name, ret_error);
    if (status != TL_OK) return status;
    tl_worker_run(worker, &add.command, run_add);
    if (add.status == TL_OK) *ret_peer = add.peer;
    return add.status;
}

struct remove_command {
    struct tl_command command;
    tl_peer_id peer;
    enum tl_status status;
    struct tl_error *ret_error;
};

static void run_remove(struct tl_command *command)
{
    struct remove_command *removal = TL_CONTAINER_OF(command, struct remove_command, command);
    struct tl_peer *peer = tl_peer_by_id(command->worker, removal->peer);
    if (peer == NULL) {
        removal->status = tl_error_set(removal->ret_error, TL_NOT_FOUND, "no such peer; was it removed already?");
    } else if (peer->added == NULL) {
        removal->status = tl_error_set(removal->ret_error, TL_FAILED_PRECONDITION,
                                       "%s is %s, and stays for as long as the worker is open", peer->name,
                                       peer->is_self ? "this worker itself" : "a task of the configuration");
    } else {
        remove_peer(peer);
    }
}

enum tl_status tl_worker_remove_peer(struct tl_worker *worker, tl_peer_id peer, struct tl_error *ret_error)
{
    struct remove_command removal = {.peer = peer, .ret_error = ret_error};
    tl_worker_run(worker, &removal.command, run_remove);
    return removal.status;
}
