// SPDX-License-Identifier: Apache-2.0
/*
 * Peers: the tasks of the cluster as this worker sees them, and the links to them.
 *
 *      IDLE --wanted--> CONNECTING --greeted--> UP --link lost--> IDLE, or CONNECTING while wanted
 *                        |   ^
 *                  failed|   |back-off over
 *                        v   |
 *                        DOWN
 *
 * A peer is wanted while somebody waits for it: a fetch, tl_worker_wait_for_peers, or always with "connect": "eager".
 * A pair of workers uses one link. When both have opened one at the same time, both keep the one that was opened by the
 * worker with the smaller name and drain the other. A peer that opens one while it should have one has lost that: it is
 * replaced. So it is by a link with a new incarnation: the peer has restarted, and what was reserved for its former
 * self is offered again.
 *
 * One-shot tensors that have arrived, but of which a lost link may not have told the peer, are told on the next link.
 * For that a peer is wanted too, for as long as its values wait.
 *
 * The members come as events (add_member); the configuration is their only source so far. A connection is a set of
 * paths, each with its own state; gRPC is the only one so far.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/numbers.h"
#include "base/random.h"
#include "base/text.h"
#include "server/worker_internal.h"

#define FIRST_BACK_OFF_NS (20 * TL_NS_PER_MS)
#define MAX_BACK_OFF_NS (1 * TL_NS_PER_SEC)
/* Links that end before they are that old, */
#define SETTLED_NS (5 * TL_NS_PER_SEC)
/* and more than so many of them in a row, are opened again only after longer and longer pauses, as if they had failed:
 * two processes that claim one task end each other's links. */
#define LOSSES_WITHOUT_PAUSE 3

/* How a peer is reached by one transport. */
struct path {
    const char *transport;   /* "grpc" */
    struct tl_link *link;    /* in use: up; NULL: none */
    int64_t link_since_ns;   /* when it came into use */
    struct tl_link *opening; /* ours, not greeted yet; NULL: none */
    enum tl_peer_state state;
    struct tl_error reason;   /* why it is down; code TL_OK otherwise */
    unsigned failure_count;   /* attempts since it was up last */
    unsigned loss_count;      /* links that ended before SETTLED_NS, in a row */
    struct tl_timer back_off; /* armed: another attempt will follow */
};

struct tl_peer {
    struct tl_worker *worker;
    tl_peer_id id;
    char name[TL_MAX_NAME_BYTES];
    char address[TL_MAX_ADDRESS_BYTES];
    bool is_self;
    uint64_t incarnation; /* 0: never greeted */
    uint64_t restart_count;
    struct tl_list requests; /* of tl_peer_request: wait until it is up */
    unsigned awaited;        /* by so many tl_worker_wait_for_peers */
    bool is_eager;
    struct tl_numbers received; /* requests whose tensors have arrived, to be told on the next link */
    int64_t received_until_ns;  /* the peer no longer waits to hear of them */
    struct path path;
};

/* Somebody who waits for peers to be up. */
struct tl_peer_wait {
    struct tl_command command;
    struct tl_list link; /* in worker->peer_waits */
    const tl_peer_id *peers;
    size_t count;
    size_t min_count;
    struct tl_wait done;
    bool is_met;
    bool is_closed;
    struct tl_error *ret_error; /* for what is missing when the time is up */
    enum tl_status status;
};

static void connect_now(struct tl_peer *peer);
static void link_closed(struct tl_link *link, const struct tl_error *reason);
static void link_opened(struct tl_link *link);

static const struct tl_link_events link_events = {.up = link_opened, .closed = link_closed};

/* ------------------------------------------------------------------------------------------------------- waits -- */

static size_t count_up(const struct tl_worker *worker, const struct tl_peer_wait *wait, const struct tl_peer **ret_down)
{
    size_t up = 0;
    for (size_t i = 0; i < wait->count; i++) {
        const struct tl_peer *peer = tl_peer_by_id(worker, wait->peers[i]);
        if (peer->path.state == TL_PEER_UP) {
            up++;
        } else {
            *ret_down = peer;
        }
    }
    return up;
}

static void wait_end(struct tl_peer_wait *wait)
{
    const struct tl_worker *worker = wait->command.worker;
    tl_list_remove(&wait->link);
    for (size_t i = 0; i < wait->count; i++)
        tl_peer_by_id(worker, wait->peers[i])->awaited--;
}

static void check_waits(struct tl_worker *worker)
{
    TL_LIST_FOREACH_SAFE(&worker->peer_waits, place)
    {
        struct tl_peer_wait *wait = TL_CONTAINER_OF(place, struct tl_peer_wait, link);
        const struct tl_peer *down;
        wait->is_closed = worker->is_closing;
        wait->is_met = count_up(worker, wait, &down) >= wait->min_count;
        if (!wait->is_met && !wait->is_closed) continue;
        wait_end(wait);
        tl_wait_done(&wait->done);
    }
}

/* ------------------------------------------------------------------------------------------------------- state -- */

static bool is_wanted(const struct tl_peer *peer)
{
    if (peer->worker->is_closing || peer->is_self) return false;
    if (!tl_list_is_empty(&peer->requests) || peer->awaited > 0 || peer->is_eager) return true;
    return peer->received.count > 0 && tl_clock_now_ns() < peer->received_until_ns;
}

static void set_state(struct tl_peer *peer, enum tl_peer_state state, const struct tl_error *reason)
{
    struct path *path = &peer->path;
    bool was_up = path->state == TL_PEER_UP;
    /* Not when only the words differ: they alternate with how far an attempt came. */
    bool is_news = reason != NULL && (path->failure_count == 0 || path->reason.code != reason->code);
    path->state = state;
    if (reason != NULL) path->reason = *reason;
    if (state == TL_PEER_UP) {
        path->reason = (struct tl_error){.code = TL_OK};
        path->failure_count = 0;
        TL_LOG_AT_INFO("peer up", TL_STR("peer", peer->name), TL_STR("address", peer->address),
                       TL_STR("transport", path->transport), TL_HEX("incarnation", peer->incarnation));
    } else if (was_up && reason != NULL && reason->code == TL_OK) {
        TL_LOG_AT_INFO("peer has closed its connection", TL_STR("peer", peer->name));
    } else if (was_up && reason != NULL) {
        TL_LOG_AT_WARN("peer lost", TL_STR("peer", peer->name), TL_STR("reason", reason->message));
    } else if (state == TL_PEER_DOWN && is_news) {
        TL_LOG_AT_WARN("peer cannot be reached", TL_STR("peer", peer->name), TL_STR("reason", reason->message));
    }
    check_waits(peer->worker);
}

/* Tries again after a while that doubles with each failure, a random part of it, so that many workers do not come at
 * once. */
static void retry_later(struct tl_peer *peer)
{
    struct path *path = &peer->path;
    unsigned losses = path->loss_count > LOSSES_WITHOUT_PAUSE ? path->loss_count - LOSSES_WITHOUT_PAUSE : 0;
    unsigned count = path->failure_count + losses;
    unsigned shift = count < 6 ? count : 6;
    int64_t pause_ns = FIRST_BACK_OFF_NS << shift;
    if (pause_ns > MAX_BACK_OFF_NS) pause_ns = MAX_BACK_OFF_NS;
    pause_ns = pause_ns / 2 + (int64_t)(tl_random_u64() % (uint64_t)(pause_ns / 2));
    int64_t due_ns = tl_clock_now_ns() + pause_ns;
    if (tl_timers_arm(tl_loop_timers(peer->worker->loop), &path->back_off, due_ns) != TL_OK) {
        TL_LOG_AT_ERROR("no memory to try a peer again", TL_STR("peer", peer->name));
    }
}

static void back_off_over(struct tl_timer *timer)
{
    struct tl_peer *peer = TL_CONTAINER_OF(timer, struct tl_peer, path.back_off);
    connect_now(peer);
}

/* Takes over what the peer may not have heard of when a link to it ends. */
static void inherit_received(struct tl_peer *peer, const struct tl_link *link)
{
    const uint64_t *numbers;
    size_t count = tl_link_unconfirmed(link, &numbers);
    uint64_t incarnation = tl_link_peer(link)->incarnation; /* 0: it never was up */
    if (count == 0 || (incarnation != 0 && incarnation != peer->incarnation)) return;
    if (!tl_numbers_push_all(&peer->received, numbers, count)) {
        TL_LOG_AT_ERROR("no memory to acknowledge tensors again", TL_STR("peer", peer->name), TL_U64("tensors", count));
    }
    if (incarnation == 0) return;
    peer->received_until_ns = tl_clock_deadline_ns(peer->worker->settings.reservation_timeout_ns);
}

/* Tells it on the link in use. */
static void tell_received(struct tl_peer *peer)
{
    struct tl_numbers *received = &peer->received;
    if (peer->path.link == NULL || received->count == 0) return;
    if (tl_link_tell_received(peer->path.link, tl_numbers_items(received), received->count)) {
        tl_numbers_drop(received, received->count);
    }
}

static void connect_now(struct tl_peer *peer)
{
    struct path *path = &peer->path;
    if (!is_wanted(peer) || path->link != NULL || path->opening != NULL) return;
    tl_timers_disarm(tl_loop_timers(peer->worker->loop), &path->back_off);
    struct tl_numbers *received = &peer->received;
    struct tl_error error;
    if (tl_link_open(peer->worker->control, peer->address, peer->name, tl_numbers_items(received), received->count,
                     &link_events, peer, &path->opening, &error) == TL_OK) {
        tl_numbers_drop(received, received->count);
        set_state(peer, TL_PEER_CONNECTING, NULL);
    } else {
        set_state(peer, TL_PEER_DOWN, &error);
        retry_later(peer);
        path->failure_count++;
    }
}

static void want(struct tl_peer *peer)
{
    if (peer->path.back_off.heap_place == 0) connect_now(peer);
}

/* ------------------------------------------------------------------------------------------------------- links -- */

static void send_waiting(struct tl_peer *peer)
{
    struct tl_list *place;
    while (peer->path.link != NULL && (place = tl_list_pop_front(&peer->requests)) != NULL) {
        struct tl_peer_request *request = TL_CONTAINER_OF(place, struct tl_peer_request, place);
        request->link = peer->path.link;
        tl_link_fetch(request->link, &request->fetch);
    }
}

/* The process behind the peer is another one than before. */
static void note_incarnation(struct tl_peer *peer, uint64_t incarnation)
{
    if (peer->incarnation == incarnation) return;
    if (peer->incarnation != 0) {
        peer->restart_count++;
        TL_LOG_AT_INFO("peer has restarted", TL_STR("peer", peer->name), TL_HEX("incarnation", incarnation));
        tl_rendezvous_release_incarnation(peer->worker->table, peer->incarnation);
    }
    peer->incarnation = incarnation;
    tl_numbers_drop(&peer->received, peer->received.count);
}

/* Of two links to the same process, one opened by each side, whether the second one is to be used. */
static bool is_preferred(const struct tl_peer *peer, const struct tl_link *current, const struct tl_link *other)
{
    if (!tl_link_is_up(current)) return true;
    bool is_ours_preferred = strcmp(peer->worker->self.name, peer->name) < 0;
    return tl_link_is_ours(other) == is_ours_preferred;
}

/* Of two links to the same process, whether the one in use is dead at the other side. That side opens another one only
 * while it has none: so it is when it has opened both, and when it had the present one before the other was begun,
 * whose greeting takes no longer than the connect time-out. */
static bool is_dead(const struct tl_peer *peer, const struct tl_link *current, const struct tl_link *other)
{
    if (tl_link_is_ours(current) == tl_link_is_ours(other)) return true;
    int64_t age_ns = tl_clock_now_ns() - peer->path.link_since_ns;
    return tl_link_is_ours(current) && age_ns > peer->worker->settings.connect_timeout_ns;
}

static void close_former(const struct tl_peer *peer, struct tl_link *former, const char *what)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "%s has %s", peer->name, what);
    tl_link_close(former, &reason);
}

/* Keeps one of the link in use and another one, ends the other. */
static void choose_link(struct tl_peer *peer, struct tl_link *link, bool is_restart)
{
    struct tl_link *former = peer->path.link;
    bool is_former_dead = is_dead(peer, former, link);
    if (!is_restart && !is_former_dead && !is_preferred(peer, former, link)) {
        tl_link_drain(link);
        return;
    }
    peer->path.link = link;
    if (is_restart || is_former_dead) {
        close_former(peer, former, is_restart ? "restarted" : "connected again");
    } else {
        tl_link_drain(former);
    }
}

static void use_link(struct tl_peer *peer, struct tl_link *link)
{
    struct path *path = &peer->path;
    uint64_t incarnation = tl_link_peer(link)->incarnation;
    bool is_restart = path->link != NULL && peer->incarnation != incarnation;
    note_incarnation(peer, incarnation);
    if (path->link != NULL) {
        choose_link(peer, link, is_restart);
    } else {
        path->link = link;
    }
    if (path->link != link) return;
    path->link_since_ns = tl_clock_now_ns();
    tl_timers_disarm(tl_loop_timers(peer->worker->loop), &path->back_off);
    if (path->state != TL_PEER_UP || is_restart) set_state(peer, TL_PEER_UP, NULL);
    tell_received(peer);
    send_waiting(peer);
}

static void link_opened(struct tl_link *link)
{
    struct tl_peer *peer = tl_link_owner(link);
    peer->path.opening = NULL;
    use_link(peer, link);
}

static void link_closed(struct tl_link *link, const struct tl_error *reason)
{
    struct tl_peer *peer = tl_link_owner(link);
    struct path *path = &peer->path;
    inherit_received(peer, link);
    if (link == path->opening) {
        path->opening = NULL;
        tell_received(peer);
        if (path->link != NULL) return;
        set_state(peer, TL_PEER_DOWN, reason);
        if (is_wanted(peer)) retry_later(peer);
        path->failure_count++;
        return;
    }
    if (link != path->link) {
        tell_received(peer);
        return;
    }
    path->link = NULL;
    bool was_settled = tl_clock_now_ns() - path->link_since_ns >= SETTLED_NS;
    path->loss_count = was_settled ? 0 : path->loss_count + 1;
    set_state(peer, is_wanted(peer) ? TL_PEER_CONNECTING : TL_PEER_IDLE, reason);
    if (path->loss_count <= LOSSES_WITHOUT_PAUSE) {
        want(peer);
    } else if (is_wanted(peer)) {
        retry_later(peer);
    }
}

static struct tl_peer *peer_by_name(const struct tl_worker *worker, const char *name)
{
    for (size_t i = 0; i < worker->peer_count; i++) {
        if (strcmp(worker->peers[i]->name, name) == 0) return worker->peers[i];
    }
    return NULL;
}

void tl_peers_link_up(struct tl_worker *worker, struct tl_link *link)
{
    const struct tl_identity *identity = tl_link_peer(link);
    if (identity->name[0] == '\0') return;
    struct tl_peer *peer = peer_by_name(worker, identity->name);
    struct tl_error reason;
    if (peer == NULL) {
        TL_LOG_AT_WARN("a worker that is not in the configuration has connected", TL_STR("peer", identity->name),
                       TL_STR("address", identity->address));
        return;
    }
    if (peer->is_self) {
        tl_error_set(&reason, TL_FAILED_PRECONDITION,
                     "%s is this worker itself; is the same task started twice? give each process its own task",
                     peer->name);
        TL_LOG_AT_WARN("a second worker claims this task", TL_STR("address", identity->address));
        tl_link_close(link, &reason);
        return;
    }
    tl_link_set_events(link, &link_events, peer);
    use_link(peer, link);
}

/* ----------------------------------------------------------------------------------------------------- requests -- */

void tl_peer_fetch(struct tl_peer *peer, struct tl_peer_request *request)
{
    request->peer = peer;
    request->link = NULL;
    tl_list_push_back(&peer->requests, &request->place);
    if (peer->path.link != NULL && tl_link_is_up(peer->path.link)) {
        send_waiting(peer);
    } else {
        want(peer);
    }
}

void tl_peer_cancel(struct tl_peer_request *request)
{
    if (request->link != NULL) {
        tl_link_cancel(request->link, &request->fetch);
        request->link = NULL;
    } else {
        tl_list_remove(&request->place);
    }
}

void tl_peer_fetch_done(struct tl_peer_request *request)
{
    request->link = NULL;
}

/* ------------------------------------------------------------------------------------------------------ members -- */

static enum tl_status add_member(struct tl_worker *worker, const char *name, const char *address,
                                 struct tl_error *ret_error)
{
    struct tl_peer *peer = calloc(1, sizeof(*peer));
    if (peer == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for peer %s", name);
    peer->worker = worker;
    snprintf(peer->name, sizeof(peer->name), "%s", name);
    snprintf(peer->address, sizeof(peer->address), "%s", address);
    peer->is_self = strcmp(name, worker->self.name) == 0;
    peer->path.transport = "grpc";
    peer->path.back_off.fire = back_off_over;
    if (peer->is_self) {
        peer->path.transport = "self";
        peer->path.state = TL_PEER_UP;
        peer->incarnation = worker->self.incarnation;
    }
    tl_list_init(&peer->requests);
    size_t index = worker->peer_count++;
    worker->peers[index] = peer;
    /* The upper half is a generation: an id of a member that is removed will never name its successor. */
    peer->id = (UINT64_C(1) << 32) | (index + 1);
    return TL_OK;
}

enum tl_status tl_peers_create(struct tl_worker *worker, struct tl_error *ret_error)
{
    size_t count = worker->config->task_count;
    worker->peers = calloc(count > 0 ? count : 1, sizeof(*worker->peers));
    if (worker->peers == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for %zu peers", count);
    for (size_t i = 0; i < count; i++) {
        const struct tl_config_task *task = &worker->config->tasks[i];
        enum tl_status status = add_member(worker, task->name, task->address, ret_error);
        if (status != TL_OK) return status;
    }
    return TL_OK;
}

void tl_peers_destroy(struct tl_worker *worker)
{
    for (size_t i = 0; i < worker->peer_count; i++) {
        struct tl_peer *peer = worker->peers[i];
        TL_CHECK(tl_list_is_empty(&peer->requests) && peer->path.link == NULL && peer->path.opening == NULL);
        tl_timers_disarm(tl_loop_timers(worker->loop), &peer->path.back_off);
        tl_numbers_fini(&peer->received);
        free(peer);
    }
    free(worker->peers);
}

void tl_peers_start(struct tl_worker *worker)
{
    if (worker->settings.connect != TL_CONNECT_EAGER || worker->task == NULL) return;
    for (size_t i = 0; i < worker->peer_count; i++) {
        worker->peers[i]->is_eager = true;
        want(worker->peers[i]);
    }
}

void tl_peers_stop(struct tl_worker *worker)
{
    for (size_t i = 0; i < worker->peer_count; i++) {
        struct tl_peer *peer = worker->peers[i];
        tl_timers_disarm(tl_loop_timers(worker->loop), &peer->path.back_off);
    }
    check_waits(worker);
}

struct tl_peer *tl_peer_by_id(const struct tl_worker *worker, tl_peer_id id)
{
    uint64_t index = (id & UINT32_MAX) - 1;
    if (index >= worker->peer_count || worker->peers[index]->id != id) return NULL;
    return worker->peers[index];
}

bool tl_peer_is_self(const struct tl_peer *peer)
{
    return peer->is_self;
}

const char *tl_peer_name(const struct tl_peer *peer)
{
    return peer->name;
}

static const char *state_name(enum tl_peer_state state)
{
    static const char *const names[] = {"idle", "connecting", "up", "down"};
    return names[state];
}

void tl_peer_format_state(const struct tl_peer *peer, char *buffer, size_t capacity)
{
    const struct path *path = &peer->path;
    const char *reason = path->state != TL_PEER_UP ? path->reason.message : "";
    snprintf(buffer, capacity, "%s%s%.700s", state_name(path->state), reason[0] != '\0' ? ": " : "", reason);
}

/* ------------------------------------------------------------------------------------------------------- public -- */

enum tl_status tl_worker_find_peer(struct tl_worker *worker, const char *name, tl_peer_id *ret_peer,
                                   struct tl_error *ret_error)
{
    const struct tl_config_task *task;
    enum tl_status status = tl_config_find_name(worker->config, name, &task, ret_error);
    if (status != TL_OK) return status;
    const struct tl_peer *peer = peer_by_name(worker, task->name);
    if (peer == NULL) return tl_error_set(ret_error, TL_NOT_FOUND, "%s is no task of the cluster", name);
    *ret_peer = peer->id;
    return TL_OK;
}

size_t tl_worker_peers(struct tl_worker *worker, tl_peer_id *ret_peers, size_t capacity)
{
    for (size_t i = 0; i < worker->peer_count && i < capacity; i++)
        ret_peers[i] = worker->peers[i]->id;
    return worker->peer_count;
}

struct info_command {
    struct tl_command command;
    const struct tl_peer *peer;
    struct tl_peer_info *info;
};

static void run_info(struct tl_command *command)
{
    const struct info_command *query = TL_CONTAINER_OF(command, struct info_command, command);
    const struct tl_peer *peer = query->peer;
    struct tl_peer_info *info = query->info;
    info->id = peer->id;
    snprintf(info->name, sizeof(info->name), "%s", peer->name);
    snprintf(info->address, sizeof(info->address), "%s", peer->address);
    info->state = peer->path.state;
    info->incarnation = peer->incarnation;
    info->restart_count = peer->restart_count;
    snprintf(info->transport, sizeof(info->transport), "%s",
             peer->path.state == TL_PEER_UP ? peer->path.transport : "");
    info->reason = peer->path.reason;
}

enum tl_status tl_worker_peer_info(struct tl_worker *worker, tl_peer_id peer, struct tl_peer_info *ret_info,
                                   struct tl_error *ret_error)
{
    if (ret_info->size_bytes != sizeof(*ret_info)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "size_bytes must be sizeof(struct tl_peer_info)");
    }
    struct info_command query = {.peer = tl_peer_by_id(worker, peer), .info = ret_info};
    if (query.peer == NULL) return tl_error_set(ret_error, TL_NOT_FOUND, "no such peer");
    tl_worker_run(worker, &query.command, run_info);
    return TL_OK;
}

enum tl_status tl_peers_describe(struct tl_worker *worker, struct tl_description *description,
                                 struct tl_error *ret_error)
{
    description->peers = calloc(worker->peer_count > 0 ? worker->peer_count : 1, sizeof(*description->peers));
    if (description->peers == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for peers");
    for (size_t i = 0; i < worker->peer_count; i++) {
        const struct tl_peer *peer = worker->peers[i];
        struct tl_peer_description *item = &description->peers[description->peer_count++];
        item->name = strdup(peer->name);
        item->state = strdup(state_name(peer->path.state));
        item->transport = strdup(peer->path.state == TL_PEER_UP ? peer->path.transport : "");
        item->reason = strdup(peer->path.reason.message);
        item->incarnation = peer->incarnation;
        if (item->name == NULL || item->state == NULL || item->transport == NULL || item->reason == NULL) {
            return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for peers");
        }
    }
    return TL_OK;
}

static void run_wait_start(struct tl_command *command)
{
    struct tl_peer_wait *wait = TL_CONTAINER_OF(command, struct tl_peer_wait, command);
    struct tl_worker *worker = command->worker;
    tl_list_push_back(&worker->peer_waits, &wait->link);
    for (size_t i = 0; i < wait->count; i++)
        tl_peer_by_id(worker, wait->peers[i])->awaited++;
    for (size_t i = 0; i < wait->count; i++)
        want(tl_peer_by_id(worker, wait->peers[i]));
    check_waits(worker);
}

static void run_wait_end(struct tl_command *command)
{
    struct tl_peer_wait *wait = TL_CONTAINER_OF(command, struct tl_peer_wait, command);
    if (!tl_list_is_linked(&wait->link)) return;
    const struct tl_peer *down = NULL;
    size_t up = count_up(command->worker, wait, &down);
    wait_end(wait);
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
        count = worker->peer_count;
        all = calloc(count > 0 ? count : 1, sizeof(*all));
        if (all == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for %zu peers", count);
        tl_worker_peers(worker, all, count);
        peers = all;
    }
    for (size_t i = 0; i < count; i++) {
        if (tl_peer_by_id(worker, peers[i]) != NULL) continue;
        free(all);
        return tl_error_set(ret_error, TL_NOT_FOUND, "peer %zu of the list is no peer", i);
    }
    if (min_count == 0 || min_count > count) min_count = count;
    struct tl_peer_wait wait = {.peers = peers, .count = count, .min_count = min_count, .ret_error = ret_error};
    tl_list_init(&wait.link);
    tl_wait_init(&wait.done, &worker->driver);
    tl_worker_enter(worker);
    tl_worker_run(worker, &wait.command, run_wait_start);
    if (!tl_wait_for(&wait.done, deadline_ns)) tl_worker_run(worker, &wait.command, run_wait_end);
    tl_wait_fini(&wait.done);
    tl_worker_leave(worker);
    free(all);
    if (wait.is_closed && !wait.is_met) return tl_error_set(ret_error, TL_CANCELLED, "the worker was closed");
    return wait.status;
}
