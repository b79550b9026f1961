// SPDX-License-Identifier: Apache-2.0
/*
 * What a request posts: REQUEST or RE_REQUEST with the exposure of its memory, CANCEL, and the end of the exposure.
 *
 * A request whose value may not exist gets a window only while a quarter of them stays free, and asks without a place
 * otherwise. One whose value exists waits in conn->posts.window_queue until another request gives its window back.
 */
#include "dataplane/engine/request_internal.h"

#include "base/error.h"

/* The most windows of a connection that requests have whose values may never exist. */
#define MAX_EARLY_WINDOWS 3072

/* ----------------------------------------------------------------------------------------------------- windows -- */

void request_exposure_over(struct request *request)
{
    if (!request->is_exposed) return;
    request->is_exposed = false;
    request->conn->posts.windows_used--;
    if (request->is_early) request->conn->posts.early_windows--;
    request->is_early = false;
    conn_try_next_window(request->conn);
}

bool requests_may_expose_early(const struct tl_conn *conn)
{
    return conn->posts.early_windows < MAX_EARLY_WINDOWS && tl_list_is_empty(&conn->posts.window_queue) &&
           tl_queue_pair_has_spare_window(conn->pair);
}

static enum tl_status try_expose(struct request *request, struct tl_error *ret_error)
{
    struct request_placement *placement = request->placement;
    struct tl_conn *conn = request->conn;
    enum tl_status status =
        tl_queue_pair_expose(conn->pair, placement->pin.region, placement->pin.address,
                             placement->lap_bytes > 0 ? placement->lap_bytes : placement->expected.meta_data.size_bytes,
                             &placement->exposure, ret_error);
    if (status != TL_OK) return status;
    request->is_exposed = true;
    conn->posts.windows_used++;
    return TL_OK;
}

/* The value may never exist: without a window that others can spare it is asked for without a place. */
static void expose_early(struct request *request)
{
    struct tl_error error;
    if (!requests_may_expose_early(request->conn) || try_expose(request, &error) != TL_OK) {
        request_drop_place(request);
        return;
    }
    request->is_early = true;
    request->conn->posts.early_windows++;
}

/* Returns false when there is no window now, or the exposure has failed. */
static bool expose(struct request *request)
{
    struct tl_conn *conn = request->conn;
    struct tl_error error;
    if (try_expose(request, &error) == TL_OK) {
        conn_try_next_window(conn);
        return true;
    }
    if (error.code == TL_RESOURCE_EXHAUSTED && conn->posts.windows_used > 0) {
        tl_list_push_front(&conn->posts.window_queue, &request->pending.place);
    } else {
        request_fail(request, &error);
    }
    return false;
}

/* ------------------------------------------------------------------------------------------------------ asking -- */

static bool post_cancel(struct request *request)
{
    struct tl_conn *conn = request->conn;
    conn_post_message(conn, conn_compose(conn, TL_MESSAGE_CANCEL, request->handle), NULL);
    request_limit(request, conn->engine->options.cancel_ns);
    return false;
}

static void number_subscribed(struct tl_engine *engine, struct tl_fetch *fetch)
{
    if (++engine->asked_count == 0) engine->asked_count++;
    tl_fetch_asked(fetch, engine->asked_count);
}

/* Fills a REQUEST, but for where the value may be written. */
static struct tl_message *compose_request(struct request *request)
{
    struct tl_fetch *fetch = request->fetch;
    struct tl_message *message = conn_compose(request->conn, TL_MESSAGE_REQUEST, request->handle);
    message->number = fetch->number;
    message->step = fetch->step;
    message->expected_step = request->has_meta_data ? request_expected_step(request) : fetch->step;
    message->subscription = tl_fetch_subscription(fetch);
    message->key = fetch->key;
    message->has_checksum = fetch->wants_checksum;
    message->may_map = request->mapping.is_allowed;
    message->is_reading = request->is_reading;
    message->is_remote = fetch->is_for_device;
    message->priority = fetch->priority;
    const struct tl_meta_data *wanted = fetch->ops->wanted != NULL ? fetch->ops->wanted(fetch) : NULL;
    message->is_fixed = wanted != NULL;
    const struct tl_meta_data *expected = request->has_meta_data ? &request->placement->expected.meta_data : wanted;
    message->has_meta_data = expected != NULL;
    if (expected != NULL) tl_meta_data_copy(&message->meta_data, expected);
    return message;
}

static bool has_memory(const struct request *request)
{
    return request->placement != NULL && request->placement->pin.address != NULL;
}

static bool post_next(struct pending_post *pending)
{
    struct request *request = TL_CONTAINER_OF(pending, struct request, pending);
    struct tl_conn *conn = request->conn;
    struct tl_fetch *fetch = request->fetch;
    if (request->state == REQUEST_CANCELLING) return post_cancel(request);
    if (request->state == REQUEST_ASKED) {
        request_advance_early(request);
        return false;
    }
    if (request->has_source) return request_post_read(request);
    if (has_memory(request) && !request->is_asked) expose_early(request);
    bool is_place_sent = has_memory(request);
    if (is_place_sent && request->is_asked && !expose(request)) return false;
    struct tl_message *message =
        !request->is_asked ? compose_request(request) : conn_compose(conn, TL_MESSAGE_RE_REQUEST, request->handle);
    if (is_place_sent) {
        message->is_copying = request->placement->bounce_buffer != NULL;
        message->lap_bytes = request->placement->lap_bytes;
        message->destination = request->placement->exposure.descriptor;
    }
    if (!request->is_asked) conn_shorten_request(conn, request->key_number, message);
    conn_post_message(conn, message, NULL);
    if (!request->is_asked && tl_fetch_subscription(fetch) != 0) number_subscribed(conn->engine, fetch);
    if (!request->is_asked) conn->credits.asked.count++;
    request->is_asked = true;
    fetch->is_unsettled = false; /* the peer's last answer will come, or the connection breaks */
    request->is_place_sent = is_place_sent;
    request->pending.sent_slot = conn->credits.peer_slots_used;
    request_handle(request, REQUEST_EVENT_SENT);
    return false;
}

void request_queue_post(struct request *request)
{
    request->pending.rank = 0;
    conn_post_when_slot(request->conn, &request->pending);
}

void request_leave_queue(struct request *request)
{
    tl_list_remove(&request->pending.place);
    conn_try_next_window(request->conn);
}

/* ---------------------------------------------------------------------------------------------------- revoking -- */

static void revoke_done(struct tl_work *work, enum tl_status status)
{
    struct request *request = TL_CONTAINER_OF(work, struct request_placement, revoke_work)->request;
    request->is_revoke_posted = false;
    /* The work was flushed: the peer may write until the queue pair is drained. */
    if (status != TL_OK) return;
    conn_space_freed(request->conn);
    request_exposure_over(request);
    request_handle(request, REQUEST_EVENT_REVOKED);
}

static bool post_revoke(struct pending_post *pending)
{
    struct request_placement *placement = TL_CONTAINER_OF(pending, struct request_placement, revoke);
    struct request *request = placement->request;
    struct tl_conn *conn = request->conn;
    request->is_revoke_posted = true;
    conn->pair->ops->revoke(conn->pair, &placement->exposure, &placement->revoke_work);
    return false;
}

void request_start_revoke(struct request *request)
{
    struct tl_conn *conn = request->conn;
    request_leave_queue(request);
    request_end_limit(request);
    if (!request->is_exposed) {
        request_handle(request, REQUEST_EVENT_REVOKED);
    } else if (conn->engine->options.keys == TL_KEYS_REGION) {
        conn->pair->ops->revoke(conn->pair, &request->placement->exposure, NULL);
        request_exposure_over(request);
        request_handle(request, REQUEST_EVENT_REVOKED);
    } else if (!request->is_revoke_posted) {
        conn_post_when_space(conn, &request->placement->revoke);
    }
}

void request_posts_init(struct request *request)
{
    request->pending.post = post_next;
    tl_list_init(&request->pending.place);
}

void request_revoke_init(struct request_placement *placement)
{
    placement->revoke.post = post_revoke;
    placement->revoke_work = (struct tl_work){.magic = TL_WORK_MAGIC, .done = revoke_done};
    tl_list_init(&placement->revoke.place);
}
