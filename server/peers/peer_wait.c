// SPDX-License-Identifier: Apache-2.0
/* Calls that wait for peers to be up, and the description of peers. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/struct_version.h"
#include "server/peers/peer_internal.h"
#include "server/peers/session.h"

/* A call that waits for peers to be up. */
struct tl_peer_wait {
    struct tl_command command;
    const struct tl_worker *worker; /* that of the command is written again while the loop still looks at the wait */
    struct tl_list link;            /* in worker->members.peer_waits */
    const tl_peer_id *peers;
    size_t count;
    size_t min_count;
    struct tl_wait done;
    bool is_met;
    bool is_closed;
    struct tl_error *ret_error; /* says which peers are missing when the time is over */
    enum tl_status status;
};

/* ------------------------------------------------------------------------------------------------------- waits -- */

/* Returns how many are up. *ret_down: one that is not; NULL: there is none. */
static size_t count_up(const struct tl_worker *worker, const struct tl_peer_wait *wait, const struct tl_peer **ret_down)
{
    size_t up = 0;
    *ret_down = NULL;
    for (size_t i = 0; i < wait->count; i++) {
        const struct tl_peer *peer = tl_peer_by_id(worker, wait->peers[i]);
        if (peer != NULL && peer->links.state == TL_PEER_UP) {
            up++;
        } else if (peer != NULL) {
            *ret_down = peer;
        }
    }
    return up;
}

static void wait_end(struct tl_peer_wait *wait)
{
    const struct tl_worker *worker = wait->worker;
    tl_list_remove(&wait->link);
    for (size_t i = 0; i < wait->count; i++) {
        struct tl_peer *peer = tl_peer_by_id(worker, wait->peers[i]);
        if (peer != NULL) peer->awaited--;
    }
}

/* Whether so many of its peers cannot come up any more that the wait fails, with this status. */
static bool fails(struct tl_peer_wait *wait)
{
    size_t lost_count = 0;
    struct tl_error reason = {.code = TL_OK};
    for (size_t i = 0; i < wait->count; i++) {
        const struct tl_peer *peer = tl_peer_by_id(wait->worker, wait->peers[i]);
        if (peer != NULL && (peer->added == NULL || peer->added->gone.code == TL_OK)) continue;
        lost_count++;
        if (peer != NULL) reason = peer->added->gone;
    }
    if (wait->count - lost_count >= wait->min_count) return false;
    if (reason.code == TL_OK) {
        tl_error_set(&reason, TL_NOT_FOUND, "%zu of the %zu peers are no peers of this worker, or were removed",
                     lost_count, wait->count);
    }
    wait->status = tl_error_copy(wait->ret_error, &reason);
    return true;
}

void tl_peer_check_waits(struct tl_worker *worker)
{
    TL_LIST_FOREACH_SAFE(&worker->members.peer_waits, place)
    {
        struct tl_peer_wait *wait = TL_CONTAINER_OF(place, struct tl_peer_wait, link);
        const struct tl_peer *down;
        wait->is_closed = worker->closing.is_closing;
        wait->is_met = count_up(worker, wait, &down) >= wait->min_count;
        if (!wait->is_met && !wait->is_closed && !fails(wait)) continue;
        wait_end(wait);
        tl_wait_done(&wait->done);
    }
}

/* ------------------------------------------------------------------------------------------------------ public -- */

/* Finds a peer that was added, or a worker without a cluster itself. */
static bool find_unconfigured(struct tl_worker *worker, const char *name, tl_peer_id *ret_peer)
{
    char job[TL_CONFIG_JOB_BYTES], text[TL_MAX_NAME_BYTES];
    uint32_t index;
    if (!tl_config_split_name(name, job, &index)) return false;
    snprintf(text, sizeof(text), "/job:%.128s/task:%" PRIu32, job, index);
    const struct tl_peer *peer = tl_peer_by_name(worker, text);
    tl_added_peers_lock(&worker->members.added);
    const struct tl_added *added = tl_added_peers_by_name(&worker->members.added, text);
    if (peer != NULL || added != NULL) *ret_peer = peer != NULL ? peer->id : added->id;
    tl_added_peers_unlock(&worker->members.added);
    return peer != NULL || added != NULL;
}

enum tl_status tl_worker_find_peer(struct tl_worker *worker, const char *name, tl_peer_id *ret_peer,
                                   struct tl_error *ret_error)
{
    const struct tl_config_task *task;
    if (find_unconfigured(worker, name, ret_peer)) return TL_OK;
    enum tl_status status = tl_config_find_name(worker->setup.config, name, &task, ret_error);
    if (status != TL_OK) return status;
    const struct tl_peer *peer = tl_peer_by_name(worker, task->name);
    if (peer == NULL) return tl_error_set(ret_error, TL_NOT_FOUND, "%s is no task of the cluster", name);
    *ret_peer = peer->id;
    return TL_OK;
}

size_t tl_worker_peers(struct tl_worker *worker, tl_peer_id *ret_peers, size_t capacity)
{
    size_t count = 0;
    const struct tl_peer *peer;
    tl_added_peers_lock(&worker->members.added);
    for (size_t place = 0; (peer = tl_peers_next(worker, &place)) != NULL; count++)
        if (count < capacity) ret_peers[count] = peer->added != NULL ? peer->added->id : peer->id;
    tl_added_peers_unlock(&worker->members.added);
    return count;
}

struct info_command {
    struct tl_command command;
    tl_peer_id peer;
    struct tl_peer_info *info;
};

static void run_info(struct tl_command *command)
{
    const struct info_command *query = TL_CONTAINER_OF(command, struct info_command, command);
    const struct tl_peer *peer = tl_peer_by_id(command->worker, query->peer);
    struct tl_peer_info *info = query->info;
    if (peer == NULL) return;
    info->id = peer->id;
    snprintf(info->name, sizeof(info->name), "%s", peer->name);
    snprintf(info->address, sizeof(info->address), "%s", peer->address);
    info->state = peer->links.state;
    info->incarnation = peer->incarnation;
    info->restart_count = peer->restart_count;
    snprintf(info->transport, sizeof(info->transport), "%s",
             peer->links.state == TL_PEER_UP ? tl_peer_transport(peer) : "");
    info->reason = peer->links.reason;
}

enum tl_status tl_worker_peer_info(struct tl_worker *worker, tl_peer_id peer, struct tl_peer_info *ret_info,
                                   struct tl_error *ret_error)
{
    enum tl_status status = tl_struct_check_size(ret_info, TL_PEER_INFO_FIRST_BYTES, "tl_peer_info", ret_error);
    if (status != TL_OK) return status;
    struct tl_peer_info info = {.size_bytes = sizeof(info)};
    struct info_command query = {.peer = peer, .info = &info};
    tl_worker_run(worker, &query.command, run_info);
    if (info.id == 0) return tl_error_set(ret_error, TL_NOT_FOUND, "no such peer");
    tl_struct_fill(ret_info, &info, sizeof(info));
    return TL_OK;
}

/* Returns why a connection within this host copies memory of users twice; NULL: it does not, or is none. */
static const char *outside_refusal_of(const struct tl_data_connection *connection)
{
    if (connection == NULL || connection->slot->source->find_host == NULL) return NULL;
    return tl_session_measures(connection->session)->outside_refusal;
}

const char *tl_peers_outside_refusal(const struct tl_worker *worker, const struct tl_transport_source *source)
{
    const struct tl_peer *peer;
    for (size_t place = 0; (peer = tl_peers_next(worker, &place)) != NULL;) {
        const struct tl_data_connection *connection = tl_data_connections_best(&peer->data);
        const char *reason = outside_refusal_of(connection);
        if (reason != NULL && connection->slot->source == source) return reason;
    }
    return NULL;
}

/* Writes why no better connection is in use, and what the one in use lacks. */
static void format_connection_reason(const struct tl_peer *peer, char *ret_text, size_t capacity)
{
    tl_data_connections_format_reason(&peer->data, ret_text, capacity);
    const char *refusal = outside_refusal_of(tl_data_connections_best(&peer->data));
    size_t len = strlen(ret_text);
    if (refusal == NULL) return;
    snprintf(ret_text + len, capacity - len, "%smemory of users is copied twice: %s", len > 0 ? "; " : "", refusal);
}

/* Writes why the peer is not connected, or is not reached over the first of the transports; "" where nothing is
 * wrong. */
static void format_reason(const struct tl_peer *peer, char *ret_text, size_t capacity)
{
    bool is_up = peer->links.state == TL_PEER_UP;
    ret_text[0] = '\0';
    if (tl_rivals_are_active(&peer->rivals)) {
        tl_rivals_format(&peer->rivals, peer->name, ret_text, capacity);
    } else if (is_up && !peer->is_self) {
        format_connection_reason(peer, ret_text, capacity);
    } else if (!is_up && (peer->links.state != TL_PEER_CONNECTING || peer->links.is_retrying)) {
        /* The reason of a first attempt would be that of an earlier failure. */
        snprintf(ret_text, capacity, "%s", peer->links.reason.message);
    }
}

/* False: there is no memory. */
static bool describe_peer(const struct tl_peer *peer, const struct tl_worker *worker, struct tl_peer_description *item)
{
    char reason[TL_ERROR_MESSAGE_BYTES];
    /* A peer that nothing wants any more is not tried again: that it was down once says nothing of now. */
    bool is_given_up = peer->links.state == TL_PEER_DOWN && peer->links.back_off.heap_place == 0;
    format_reason(peer, reason, sizeof(reason));
    item->name = strdup(peer->name);
    item->state = strdup(tl_peer_state_name(is_given_up ? TL_PEER_IDLE : peer->links.state));
    item->transport = strdup(peer->links.state == TL_PEER_UP ? tl_peer_transport(peer) : "");
    item->reason = strdup(reason);
    item->incarnation = peer->incarnation;
    item->address = strdup(peer->address);
    const struct tl_identity *latest = peer->is_self ? &worker->self : &peer->rivals.latest;
    item->host_name = strdup(latest->host_name);
    item->process_id = latest->process_id;
    const struct tl_data_connection *connection = tl_data_connections_best(&peer->data);
    if (connection != NULL) {
        const struct tl_conn_measures *measures = tl_session_measures(connection->session);
        item->latency_ns = measures->latency_ns;
        item->bytes_per_second = measures->bytes_per_second;
        item->mtu_bytes = measures->mtu_bytes;
    }
    return item->name != NULL && item->state != NULL && item->transport != NULL && item->reason != NULL &&
           item->address != NULL && item->host_name != NULL;
}

enum tl_status tl_peers_describe(struct tl_worker *worker, struct tl_description *description,
                                 struct tl_error *ret_error)
{
    size_t count = worker->members.peer_count + worker->members.added.count;
    description->peers = calloc(count > 0 ? count : 1, sizeof(*description->peers));
    bool is_complete = description->peers != NULL;
    const struct tl_peer *peer;
    for (size_t place = 0; is_complete && (peer = tl_peers_next(worker, &place)) != NULL;)
        is_complete = describe_peer(peer, worker, &description->peers[description->peer_count++]);
    return is_complete ? TL_OK : tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for peers");
}

size_t tl_peers_find_breaking(const struct tl_worker *worker, const struct tl_peer **ret_peer,
                              const struct tl_data_connection **ret_connection)
{
    size_t count = 0;
    const struct tl_peer *peer;
    for (size_t place = 0; (peer = tl_peers_next(worker, &place)) != NULL;) {
        for (size_t t = 0; t < worker->data_plane.transport_count; t++) {
            if (!tl_data_connection_keeps_breaking(&peer->data.items[t])) continue;
            if (count++ > 0) continue;
            *ret_peer = peer;
            *ret_connection = &peer->data.items[t];
        }
    }
    return count;
}

static void run_wait_start(struct tl_command *command)
{
    struct tl_peer_wait *wait = TL_CONTAINER_OF(command, struct tl_peer_wait, command);
    struct tl_worker *worker = command->worker;
    tl_list_push_back(&worker->members.peer_waits, &wait->link);
    for (size_t i = 0; i < wait->count; i++) {
        struct tl_peer *peer = tl_peer_by_id(worker, wait->peers[i]);
        if (peer != NULL) peer->awaited++;
    }
    for (size_t i = 0; i < wait->count; i++) {
        struct tl_peer *peer = tl_peer_by_id(worker, wait->peers[i]);
        if (peer != NULL) tl_peer_want(peer);
    }
    tl_peer_check_waits(worker);
}

static void run_wait_end(struct tl_command *command)
{
    struct tl_peer_wait *wait = TL_CONTAINER_OF(command, struct tl_peer_wait, command);
    if (!tl_list_is_linked(&wait->link)) return;
    const struct tl_peer *down = NULL;
    size_t up = count_up(command->worker, wait, &down);
    wait_end(wait);
    if (down == NULL) {
        wait->status = tl_error_set(wait->ret_error, TL_DEADLINE_EXCEEDED, "%zu of %zu peers are up", up, wait->count);
        return;
    }
    char state[TL_ERROR_MESSAGE_BYTES];
    tl_peer_format_state(down, state, sizeof(state));
    wait->status = tl_error_set(wait->ret_error, TL_DEADLINE_EXCEEDED, "%zu of %zu peers are up; %s (%s) is %.600s", up,
                                wait->count, down->name, down->address, state);
}

enum tl_status tl_worker_wait_for_peers(struct tl_worker *worker, const tl_peer_id *peers, size_t count,
                                        size_t min_count, int64_t timeout_ns, struct tl_error *ret_error)
{
    if (timeout_ns == TL_TIMEOUT_DEFAULT) timeout_ns = worker->settings.request_timeout_ns;
    int64_t deadline_ns = tl_clock_deadline_ns(timeout_ns);
    tl_peer_id *all = NULL;
    if (peers == NULL) {
        size_t capacity = tl_worker_peers(worker, NULL, 0);
        all = calloc(capacity > 0 ? capacity : 1, sizeof(*all));
        if (all == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for %zu peers", capacity);
        count = tl_worker_peers(worker, all, capacity);
        if (count > capacity) count = capacity;
        peers = all;
    }
    for (size_t i = 0; i < count; i++) {
        struct tl_peer *peer = tl_peer_acquire(worker, peers[i]);
        tl_peer_release(peer);
        if (peer != NULL || all != NULL) continue; /* one of all may be removed meanwhile */
        return tl_error_set(ret_error, TL_NOT_FOUND, "entry %zu of the list is not a peer of this worker", i);
    }
    if (min_count > count) {
        free(all);
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "cannot wait for %zu peers of %zu; min_count is at most %zu, and 0 for all", min_count,
                            count, count);
    }
    if (min_count == 0) min_count = count;
    struct tl_peer_wait wait = {
        .worker = worker, .peers = peers, .count = count, .min_count = min_count, .ret_error = ret_error};
    tl_list_init(&wait.link);
    tl_wait_init(&wait.done, &worker->progress);
    tl_worker_enter(worker);
    tl_worker_run_inside(worker, &wait.command, run_wait_start);
    if (!tl_wait_for(&wait.done, deadline_ns)) tl_worker_run_inside(worker, &wait.command, run_wait_end);
    tl_wait_fini(&wait.done);
    tl_worker_leave(worker);
    free(all);
    if (wait.is_closed && !wait.is_met) return tl_error_set(ret_error, TL_CANCELLED, "the worker was closed");
    return wait.status;
}
