// SPDX-License-Identifier: Apache-2.0
#include "server/data_path.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/random.h"
#include "base/reason.h"
#include "control/endpoint.h"
#include "server/session.h"
#include "server/worker_internal.h"

#define FIRST_PAUSE_NS (100 * TL_NS_PER_MS)
#define MAX_PAUSE_NS (5 * TL_NS_PER_SEC)
/* A connection that breaks before it is that old counts as an attempt that failed: one that is set up again and again
 * costs both sides more than it carries. */
#define SETTLED_NS (5 * TL_NS_PER_SEC)

static const struct tl_session_events session_events;

/* What the peer is told when a path ends without a failure. */
#define IT_SHUTS_DOWN "it is shutting down"
#define IT_CLOSED_IN_ORDER "its half was closed in order"

/* ----------------------------------------------------------------------------------------------------- messages -- */

static const char *transport_of(const struct tl_data_path *path)
{
    return path->slot->source->name;
}

static void tell(struct tl_data_path *path, enum tl_path_message_kind kind, const uint8_t *bytes, uint32_t len_bytes)
{
    struct tl_path_message message = {.kind = kind, .attempt = path->attempt, .len_bytes = len_bytes};
    snprintf(message.transport, sizeof(message.transport), "%s", transport_of(path));
    memcpy(message.bytes, bytes, len_bytes);
    tl_link_tell_path(path->link, &message);
}

static void tell_refusal(struct tl_link *link, const char *transport, uint64_t attempt, bool is_final,
                         const char *reason)
{
    struct tl_path_message message = {.kind = TL_PATH_MESSAGE_REFUSAL, .attempt = attempt, .is_final = is_final};
    snprintf(message.transport, sizeof(message.transport), "%s", transport);
    snprintf(message.reason, sizeof(message.reason), "%s", reason);
    tl_link_tell_path(link, &message);
}

/* -------------------------------------------------------------------------------------------------------- state -- */

static void log_change(struct tl_data_path *path)
{
    if (path->name[0] == '\0' || (path->has_logged && tl_reason_is_same(path->logged, path->reason))) return;
    const struct tl_plane *plane = path->slot->plane;
    path->has_logged = true;
    memcpy(path->logged, path->reason, sizeof(path->logged));
    if (path->state == TL_DATA_PATH_UP) {
        TL_LOG_AT_INFO("data path up", TL_STR("peer", path->name), TL_STR("transport", transport_of(path)),
                       TL_STR("device", plane->provider->name));
    } else if (plane == NULL || path->is_elsewhere) {
        TL_LOG_AT_DEBUG("no data path", TL_STR("peer", path->name), TL_STR("transport", transport_of(path)),
                        TL_STR("reason", path->reason));
    } else if (!path->worker->is_closing) {
        TL_LOG(path->is_left ? TL_LOG_INFO : TL_LOG_WARN, "no data path", TL_STR("peer", path->name),
               TL_STR("transport", transport_of(path)), TL_STR("reason", path->reason));
    }
}

__attribute__((format(printf, 2, 3))) static void set_reason(struct tl_data_path *path, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(path->reason, sizeof(path->reason), format, args);
    va_end(args);
    path->lasting_reason = tl_reason(path->reason);
}

static void arm(struct tl_data_path *path, int64_t after_ns)
{
    int64_t due_ns = tl_clock_deadline_ns(after_ns);
    if (tl_timers_arm(tl_loop_timers(path->worker->loop), &path->timer, due_ns) != TL_OK) {
        TL_LOG_AT_ERROR("no memory to watch a data path", TL_STR("peer", path->name));
    }
}

static void disarm(struct tl_data_path *path)
{
    tl_timers_disarm(tl_loop_timers(path->worker->loop), &path->timer);
}

/* The session is the path's no more. */
static void let_go(struct tl_data_path *path)
{
    const uint64_t *numbers;
    size_t count = tl_session_unconfirmed(path->session, &numbers);
    if (count > 0 && path->events->unconfirmed != NULL) {
        path->events->unconfirmed(path->owner, tl_session_peer(path->session)->incarnation, numbers, count);
    }
    path->session = NULL;
}

static void abandon(struct tl_data_path *path, const struct tl_error *reason)
{
    struct tl_session *session = path->session;
    if (session == NULL) return;
    let_go(path);
    tl_session_abandon(session, reason);
}

static void pause_before_offer(struct tl_data_path *path)
{
    unsigned shift = path->failure_count < 6 ? path->failure_count : 6;
    int64_t pause_ns = FIRST_PAUSE_NS << shift;
    if (pause_ns > MAX_PAUSE_NS) pause_ns = MAX_PAUSE_NS;
    path->state = TL_DATA_PATH_BACK_OFF;
    path->failure_count++;
    arm(path, pause_ns / 2 + (int64_t)(tl_random_u64() % (uint64_t)(pause_ns / 2)));
}

static void expect_offer(struct tl_data_path *path)
{
    path->state = TL_DATA_PATH_EXPECTING;
    set_reason(path, "the data path is being set up");
    arm(path, path->slot->plane->options.attempt_ns);
}

/* The attempt, or the connection, is over; path->reason says why. */
static void failed(struct tl_data_path *path, bool is_final)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "%s", path->reason);
    abandon(path, &reason);
    disarm(path);
    if (path->is_passing && path->state != TL_DATA_PATH_EXPECTING && !is_final && !path->worker->is_closing) {
        /* The peer goes over to the other link first, and ends its half without a word: nothing is wrong then, and
         * who waits for the path still does. Where it has not, it offers again, and the next failure counts. */
        path->is_passing = false;
        TL_LOG_AT_DEBUG("a data path has ended, perhaps for that of another link", TL_STR("peer", path->name),
                        TL_STR("transport", transport_of(path)), TL_STR("reason", path->reason));
        expect_offer(path);
        path->events->changed(path->owner);
        return;
    }
    if (path->state == TL_DATA_PATH_UP && tl_clock_now_ns() - path->up_since_ns >= SETTLED_NS) path->failure_count = 0;
    path->is_first = false;
    if (is_final || path->worker->is_closing) {
        path->state = TL_DATA_PATH_REFUSED;
    } else if (tl_link_is_ours(path->link)) {
        pause_before_offer(path);
    } else {
        path->state = TL_DATA_PATH_EXPECTING;
    }
    log_change(path);
    path->events->changed(path->owner);
}

static void offer(struct tl_data_path *path)
{
    struct tl_error error;
    path->attempt = tl_random_u64();
    path->state = TL_DATA_PATH_CREATING;
    path->is_left = false;
    if (path->is_first) set_reason(path, "the data path is being set up");
    arm(path, path->slot->plane->options.attempt_ns);
    if (tl_session_open(path->slot->plane, tl_link_peer(path->link), NULL, 0, &session_events, path, &path->session,
                        &error) != TL_OK) {
        set_reason(path, "%s", error.message);
        failed(path, false);
    }
}

static void timer_fired(struct tl_timer *timer)
{
    struct tl_data_path *path = TL_CONTAINER_OF(timer, struct tl_data_path, timer);
    if (path->state == TL_DATA_PATH_BACK_OFF && path->worker->is_closing) {
        /* The data plane may have ended already. */
        path->state = TL_DATA_PATH_REFUSED;
        set_reason(path, "this worker is shutting down");
    } else if (path->state == TL_DATA_PATH_BACK_OFF) {
        offer(path);
    } else if (path->state == TL_DATA_PATH_EXPECTING) {
        set_reason(path, "%s has offered no data path in time", path->name);
        failed(path, false);
    } else {
        set_reason(path, "the data path to %s was not set up in time", path->name);
        tell_refusal(path->link, transport_of(path), path->attempt, false, "not set up in time");
        failed(path, false);
    }
}

/* ------------------------------------------------------------------------------------------------------ session -- */

static void introduced(void *owner, const uint8_t *bytes, uint32_t len_bytes)
{
    struct tl_data_path *path = owner;
    bool is_ours = tl_link_is_ours(path->link);
    tell(path, is_ours ? TL_PATH_MESSAGE_OFFER : TL_PATH_MESSAGE_ANSWER, bytes, len_bytes);
    path->state = is_ours ? TL_DATA_PATH_OFFERED : TL_DATA_PATH_CONNECTING;
}

static void session_up(void *owner)
{
    struct tl_data_path *path = owner;
    disarm(path);
    path->state = TL_DATA_PATH_UP;
    path->up_since_ns = tl_clock_now_ns();
    set_reason(path, "%s", "");
    log_change(path);
    path->events->changed(path->owner);
}

/* Two that do not fit, or whose users may not connect, will not while they run. */
static bool is_lasting(enum tl_status code)
{
    return code == TL_FAILED_PRECONDITION || code == TL_PERMISSION_DENIED;
}

static void session_closed(void *owner, const struct tl_error *reason)
{
    struct tl_data_path *path = owner;
    bool was_up = path->state == TL_DATA_PATH_UP;
    let_go(path);
    path->is_left = reason->code == TL_OK;
    if (path->is_left) {
        set_reason(path, "%s has closed the data path", path->name);
    } else {
        set_reason(path, "%s%s", was_up ? "the data path broke: " : "", reason->message);
    }
    /* The peer's half may not notice for long. */
    const char *told = !path->is_left ? reason->message : path->worker->is_closing ? IT_SHUTS_DOWN : IT_CLOSED_IN_ORDER;
    bool is_final = !was_up && is_lasting(reason->code);
    tell_refusal(path->link, transport_of(path), path->attempt, is_final, told);
    failed(path, is_final);
}

static const struct tl_session_events session_events = {
    .introduced = introduced, .up = session_up, .closed = session_closed};

/* ------------------------------------------------------------------------------------------------- what is heard -- */

static void take_offer(struct tl_data_path *path, const struct tl_path_message *message)
{
    struct tl_error error;
    path->attempt = message->attempt;
    path->state = TL_DATA_PATH_CREATING;
    path->is_left = false;
    arm(path, path->slot->plane->options.attempt_ns);
    if (tl_session_open(path->slot->plane, tl_link_peer(path->link), message->bytes, message->len_bytes,
                        &session_events, path, &path->session, &error) == TL_OK) {
        return;
    }
    set_reason(path, "%s", error.message);
    tell_refusal(path->link, message->transport, message->attempt, is_lasting(error.code), error.message);
    failed(path, is_lasting(error.code));
}

static void hear_offer(struct tl_data_path *path, const struct tl_path_message *message)
{
    struct tl_link *link = path->link;
    const char *transport = message->transport;
    if (path->slot->plane == NULL || path->is_elsewhere) {
        tell_refusal(link, transport, message->attempt, true, path->reason);
    } else if (path->worker->is_closing) {
        /* The link is about to end, and with it the attempt: a refusal would only fail what can still wait. */
    } else if (tl_link_is_ours(link) || message->attempt == 0) {
        tell_refusal(link, transport, message->attempt, false, "offers come from the side that opened the link");
    } else if (path->session != NULL) {
        /* The peer has given up the attempt before this one without a word. It may offer again when that is gone. */
        tell_refusal(link, transport, message->attempt, false, "the attempt before this one has not ended yet");
        set_reason(path, "%s has offered another data path", tl_link_peer(link)->name);
        failed(path, false);
    } else {
        take_offer(path, message);
    }
}

void tl_data_path_refuse_offer(const struct tl_worker *worker, struct tl_link *link,
                               const struct tl_path_message *offer)
{
    struct tl_error error;
    tl_error_set(&error, TL_UNIMPLEMENTED, "%s has no transport %s", worker->self.name, offer->transport);
    tell_refusal(link, offer->transport, offer->attempt, true, error.message);
}

static void hear_answer(struct tl_data_path *path, const struct tl_path_message *message)
{
    if (path->state != TL_DATA_PATH_OFFERED || message->attempt != path->attempt) return;
    struct tl_error error;
    path->state = TL_DATA_PATH_CONNECTING;
    if (tl_session_connect(path->session, message->bytes, message->len_bytes, &error) == TL_OK) return;
    set_reason(path, "%s", error.message);
    tell_refusal(path->link, message->transport, path->attempt, false, error.message);
    failed(path, false);
}

static void hear_refusal(struct tl_data_path *path, const struct tl_path_message *message)
{
    bool is_of_all = message->attempt == 0;
    bool is_of_this = message->attempt == path->attempt && path->session != NULL;
    if (path->state == TL_DATA_PATH_REFUSED || (!is_of_all && !is_of_this)) return;
    const char *reason = message->reason[0] != '\0' ? message->reason : "it gives no reason";
    bool was_up = path->state == TL_DATA_PATH_UP;
    path->is_left = was_up && (strcmp(reason, IT_SHUTS_DOWN) == 0 || strcmp(reason, IT_CLOSED_IN_ORDER) == 0);
    set_reason(path,
               is_of_all ? "%s has no data plane: %s"
               : was_up  ? "%s has given up the data path: %s"
                         : "%s refuses the data path: %s",
               path->name, reason);
    failed(path, is_of_all || message->is_final);
}

void tl_data_path_hear(struct tl_data_path *path, struct tl_link *link, const struct tl_path_message *message)
{
    /* One that is not in use is about to end. */
    if (link != path->link) return;
    if (message->kind == TL_PATH_MESSAGE_OFFER) {
        hear_offer(path, message);
    } else if (message->kind == TL_PATH_MESSAGE_ANSWER) {
        hear_answer(path, message);
    } else {
        hear_refusal(path, message);
    }
}

/* -------------------------------------------------------------------------------------------------------- links -- */

void tl_data_path_init(struct tl_data_path *path, struct tl_worker *worker, const struct tl_plane_slot *slot,
                       const char *name, const struct tl_data_path_events *events, void *owner)
{
    *path = (struct tl_data_path){.worker = worker, .slot = slot, .name = name, .events = events, .owner = owner};
    path->timer.fire = timer_fired;
    set_reason(path, "the peer is not connected");
}

void tl_data_path_end(struct tl_data_path *path)
{
    if (path->link == NULL) return;
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "the link to %s has ended", path->name);
    abandon(path, &reason);
    disarm(path);
    /* That it comes back over the next link is news. */
    if (path->state == TL_DATA_PATH_UP) path->has_logged = false;
    path->link = NULL;
    path->state = TL_DATA_PATH_OFF;
    set_reason(path, "the peer is not connected");
}

/* Whether the transport does not reach the peer; then the reason is set. The side that has accepted the link does not
 * take the peer's word for it, except between containers, which share the folder of the sockets and not the network. */
static bool find_elsewhere(struct tl_data_path *path)
{
    const struct tl_identity *peer = tl_link_peer(path->link);
    if (path->slot->source->find_host == NULL) return false;
    if (!tl_identity_has_host(peer) || memcmp(peer->host, path->worker->self.host, TL_HOST_BYTES) != 0) {
        set_reason(path, "it is on another host");
        return true;
    }
    if (tl_link_is_ours(path->link) || path->worker->settings.local.socket_folder != NULL) return false;
    if (tl_endpoint_is_here(peer->address)) return false;
    set_reason(path,
               "the connection comes from %s, which is no address of this host; set local.socket_folder where "
               "containers of one host have networks of their own",
               peer->address);
    return true;
}

void tl_data_path_begin(struct tl_data_path *path, struct tl_link *link, bool is_passing)
{
    const struct tl_plane_slot *slot = path->slot;
    if (path->link == link) return;
    tl_data_path_end(path);
    path->link = link;
    path->is_first = true;
    path->is_passing = is_passing;
    path->is_left = false;
    path->failure_count = 0;
    path->is_elsewhere = slot->plane != NULL && find_elsewhere(path);
    if (slot->plane != NULL && !path->is_elsewhere && !path->worker->is_closing) {
        path->state = TL_DATA_PATH_HELD;
        set_reason(path, "another data path is tried first");
        return;
    }
    path->state = TL_DATA_PATH_REFUSED;
    if (!path->is_elsewhere) {
        set_reason(path, "%s", slot->plane == NULL ? slot->reason : "this worker is shutting down");
    }
    /* Both know on which hosts they are. */
    if (tl_link_is_ours(link) && !path->is_elsewhere) tell_refusal(link, transport_of(path), 0, true, path->reason);
    log_change(path);
}

void tl_data_path_stay(struct tl_data_path *path)
{
    path->is_passing = false;
}

void tl_data_path_go_on(struct tl_data_path *path)
{
    if (path->state != TL_DATA_PATH_HELD) return;
    if (path->worker->is_closing) {
        /* The data plane may have ended already. */
        path->state = TL_DATA_PATH_REFUSED;
        set_reason(path, "this worker is shutting down");
    } else if (tl_link_is_ours(path->link)) {
        offer(path);
    } else {
        expect_offer(path);
    }
}

bool tl_data_path_has_failed(const struct tl_data_path *path)
{
    return path->state == TL_DATA_PATH_REFUSED || !path->is_first;
}

enum tl_data_path_use tl_data_path_use(const struct tl_data_path *path)
{
    /* A peer that restarts is no reason to fail, where there is no other way. */
    bool can_wait = path->is_left && path->worker->is_plane_required;
    switch (path->state) {
    case TL_DATA_PATH_UP:
        return TL_DATA_PATH_TAKE;
    case TL_DATA_PATH_EXPECTING:
        return path->is_first || can_wait ? TL_DATA_PATH_AWAIT : TL_DATA_PATH_AVOID;
    case TL_DATA_PATH_BACK_OFF:
        return can_wait ? TL_DATA_PATH_AWAIT : TL_DATA_PATH_AVOID;
    case TL_DATA_PATH_CREATING:
    case TL_DATA_PATH_OFFERED:
    case TL_DATA_PATH_CONNECTING:
        return path->is_first || path->worker->is_plane_required ? TL_DATA_PATH_AWAIT : TL_DATA_PATH_AVOID;
    case TL_DATA_PATH_OFF:
    case TL_DATA_PATH_HELD:
    case TL_DATA_PATH_REFUSED:
        break;
    }
    return TL_DATA_PATH_AVOID;
}
