// SPDX-License-Identifier: Apache-2.0
/*
 * What a connection posts, and when.
 *
 * Happy path: requests and responses queue a post each time they have something to send. At the end of the round the
 * pump takes the posts in order, as long as the peer has slots and the queue pair has space, and rings the doorbell
 * once. It also completes the fetches that have finished.
 *
 * Batches: the messages of one pump share slots. A batch leaves when the next message does not fit, and at the end of
 * the pump, so that a single message is as early as it would be alone. Writes that are posted meanwhile pass it, which
 * no message minds (docs/protocol.md, "Slots"), but only a few bytes: behind large tensors small ones must not wait for
 * more than a piece of each. A long pump rings the doorbell every now and then, so that both sides work at the same
 * time.
 *
 * Priorities: the queues of ranks are run one after the other, so that a value waits while there are posts of a lesser
 * rank.
 *
 * Credits: a batch or a write with an immediate uses one slot at the peer. Slots come back in two ways: every batch
 * says how many slots its sender has consumed, and an answer to a request shows that everything up to the batch of that
 * request was consumed. So a request and its write need no further message. The last slot is kept for a CREDIT that
 * gives back half of our slots: when both sides have used all slots of each other, at least one of them has such a
 * CREDIT to send.
 *
 * Requests: an asker that is faster than its peer holds REQUESTs back, with all that has their rank, until the peer has
 * taken most of those before.
 *
 * Failure modes: none of its own. A connection that is closing posts nothing, and leaves its queues to those whose
 * posts are in them.
 */
#include <string.h>

#include "base/check.h"
#include "dataplane/engine/conn_internal.h"

/* The most that one post takes in the queue pair: an expose and what it is for. */
#define SPACE_OF_A_POST 2
/* How many bytes of writes may pass a batch: as many as one piece of a value that is copied. */
#define PASSING_BYTES (256 * 1024)
/* So many REQUESTs are a lot (struct conn_asked). */
#define LOT_REQUESTS 1024
/* So many bytes of a long pump, or TL_SLOT_MESSAGES, leave with a doorbell of their own, and the peer works on them
 * while the rest is composed. */
#define EARLY_BYTES (64 * 1024)

/* ------------------------------------------------------------------------------------------------------ queues -- */

void conn_pump_later(struct tl_conn *conn)
{
    if (conn->posts.is_pump_queued) return;
    conn->posts.is_pump_queued = true;
    tl_reactor_defer(conn->engine->reactor, &conn->posts.pump_closure);
}

void conn_post_when_slot(struct tl_conn *conn, struct pending_post *pending)
{
    if (conn->state == CONN_CLOSING || tl_list_is_linked(&pending->place)) return;
    tl_list_push_back(&conn->posts.slot_queues[pending->rank], &pending->place);
    conn_pump_later(conn);
}

void conn_post_when_space(struct tl_conn *conn, struct pending_post *pending)
{
    if (conn->state == CONN_CLOSING || tl_list_is_linked(&pending->place)) return;
    tl_list_push_back(&conn->posts.space_queue, &pending->place);
    conn_pump_later(conn);
}

static bool are_empty(const struct tl_list *queues)
{
    for (unsigned rank = 0; rank < POST_RANKS; rank++)
        if (!tl_list_is_empty(&queues[rank])) return false;
    return true;
}

void conn_space_freed(struct tl_conn *conn)
{
    const struct conn_posts *posts = &conn->posts;
    if (posts->is_pump_queued) return;
    if (!are_empty(posts->slot_queues) || !tl_list_is_empty(&posts->space_queue) || !are_empty(posts->reads.queues))
        conn_pump_later(conn);
}

void conn_post_when_readable(struct tl_conn *conn, struct pending_post *pending)
{
    if (conn->state == CONN_CLOSING || tl_list_is_linked(&pending->place)) return;
    tl_list_push_back(&conn->posts.reads.queues[pending->rank], &pending->place);
    conn_pump_later(conn);
}

void conn_copy_later(struct tl_conn *conn, struct pending_post *pending)
{
    if (conn->state == CONN_CLOSING || tl_list_is_linked(&pending->place)) return;
    tl_list_push_back(&conn->posts.copy_queue, &pending->place);
    conn_pump_later(conn);
}

uint32_t conn_read_depth(const struct tl_conn *conn)
{
    return conn->pair->read_depth < MAX_READS ? conn->pair->read_depth : MAX_READS;
}

static void space_done(struct tl_work *work, enum tl_status status)
{
    struct tl_conn *conn = TL_CONTAINER_OF(work, struct tl_conn, posts.space_work);
    (void)status;
    conn->posts.is_space_work_out = false;
    conn_space_freed(conn);
}

static bool is_batch_open(const struct tl_conn *conn)
{
    return conn->engine->batch.conn == conn;
}

/* How many operations may be posted now, without the one that the open batch needs. */
static uint32_t space(const struct tl_conn *conn)
{
    uint32_t space = conn->pair->ops->space(conn->pair);
    return space > 0 && is_batch_open(conn) ? space - 1 : space;
}

bool conn_may_post(const struct tl_conn *conn)
{
    return conn->state != CONN_CLOSING && conn->requests.unplaced_count == 0 && space(conn) >= SPACE_OF_A_POST &&
           credits_left(&conn->credits) >= 2;
}

/* ------------------------------------------------------------------------------------------------------- pump -- */

static void ring_doorbell(struct tl_conn *conn)
{
    if (!is_batch_open(conn)) conn->posts.unsent_messages = 0;
    conn->posts.unsent_bytes = 0;
    tl_queue_pair_doorbell(conn->pair);
}

/* A batch is left open behind large values, of which only so many pass it. */
static void maybe_send_early(struct tl_conn *conn)
{
    bool has_many = conn->posts.unsent_messages >= TL_SLOT_MESSAGES;
    if (conn->state == CONN_CLOSING || (!has_many && conn->posts.unsent_bytes < EARLY_BYTES)) return;
    if (has_many) conn_post_batch(conn);
    ring_doorbell(conn);
}

/* Counts what a post has sent while others of its rank wait. A value that is alone is written as fast as space allows.
 */
static void count_shared(struct tl_conn *conn, uint64_t len_bytes)
{
    uint64_t *budget_bytes = &conn->posts.budgets.values_bytes;
    *budget_bytes -= len_bytes < *budget_bytes ? len_bytes : *budget_bytes;
}

static bool is_pump_over(const struct conn_posts *posts)
{
    return posts->budgets.response_bytes == 0 || posts->budgets.values_bytes == 0;
}

/* Whether a REQUEST may be posted now. A peer that has not said that it has taken the former lot is asked once; it does
 * not say so by itself while it has nothing to answer. */
static bool may_ask(struct tl_conn *conn)
{
    struct conn_credits *credits = &conn->credits;
    struct conn_asked *asked = &credits->asked;
    if (asked->count < LOT_REQUESTS) return true;
    uint32_t used_since = credits->peer_slots_used - asked->former_slot;
    if (credits->peer_slots_used - credits->peer_slots_returned <= used_since) {
        *asked = (struct conn_asked){.former_slot = credits->peer_slots_used};
        return true;
    }
    if (!asked->is_ping_wanted) credits->is_ping_wanted = credits->is_wanted = asked->is_ping_wanted = true;
    return false;
}

static void run_queue(struct tl_conn *conn, struct tl_list *queue, bool needs_credit)
{
    const uint64_t *bytes_sent = &conn->engine->stats.bytes_sent;
    while (!tl_list_is_empty(queue) && space(conn) >= SPACE_OF_A_POST && conn->state != CONN_CLOSING) {
        if (needs_credit && credits_left(&conn->credits) < 2) return;
        if (is_pump_over(&conn->posts)) return;
        if (queue == &conn->posts.slot_queues[0] && !may_ask(conn)) return;
        struct pending_post *pending = TL_CONTAINER_OF(tl_list_pop_front(queue), struct pending_post, place);
        bool is_alone = tl_list_is_empty(queue);
        uint64_t before_bytes = *bytes_sent;
        if (pending->post(pending)) tl_list_push_back(queue, &pending->place);
        if (!is_alone) count_shared(conn, *bytes_sent - before_bytes);
        maybe_send_early(conn);
    }
}

/* Requests of one rank post one read each in turn, so that a large tensor does not hold up small ones. */
static void run_reads(struct tl_conn *conn, struct tl_list *queue)
{
    while (!tl_list_is_empty(queue) && conn->posts.reads.posted_count < conn_read_depth(conn) &&
           space(conn) >= SPACE_OF_A_POST && conn->state != CONN_CLOSING) {
        struct pending_post *pending = TL_CONTAINER_OF(tl_list_pop_front(queue), struct pending_post, place);
        if (pending->post(pending)) tl_list_push_back(queue, &pending->place);
    }
}

/* Requests take turns to copy, a piece each, so that a large tensor does not hold up small ones. */
static void run_copies(struct tl_conn *conn)
{
    struct conn_posts *posts = &conn->posts;
    while (!tl_list_is_empty(&posts->copy_queue) && posts->budgets.copy_bytes > 0 && conn->state != CONN_CLOSING) {
        struct pending_post *pending =
            TL_CONTAINER_OF(tl_list_pop_front(&posts->copy_queue), struct pending_post, place);
        (void)pending->post(pending);
    }
}

static void maybe_post_credits(struct tl_conn *conn)
{
    struct conn_credits *credits = &conn->credits;
    if (is_batch_open(conn)) { /* says all that a CREDIT does, unless it is a ping */
        if (!credits->is_ping_wanted) credits->is_wanted = false;
        conn_post_batch(conn);
    }
    bool is_half = conn->requests.unplaced_count == 0 &&
                   credits->own_slots_returned - credits->own_slots_reported >= conn->engine->options.slot_count / 2;
    uint32_t needed = is_half ? 1 : 2;
    if (!is_half && !credits->is_wanted) return;
    if (conn->state == CONN_CLOSING || credits_left(credits) < needed || space(conn) < 1) return;
    credits->is_wanted = false;
    struct tl_message *message = conn_compose(conn, TL_MESSAGE_CREDIT, 0);
    message->is_ping = credits->is_ping_wanted;
    credits->is_ping_wanted = false;
    conn->engine->stats.credits_sent++;
    conn_post_message(conn, message, NULL);
}

static void maybe_complete(struct tl_conn *conn)
{
    const struct conn_requests *requests = &conn->requests;
    if (!tl_list_is_empty(&requests->finished) || !tl_list_is_empty(&requests->unrequested))
        requests_complete_fetches(conn);
}

/* Requests begin when those before them have left: what they touch is in the caches still when they are composed.
 * Returns true when there are more for another round. */
static bool begin_requests(struct tl_conn *conn)
{
    struct tl_list *queue = &conn->posts.slot_queues[0];
    if (conn->requests.unplaced_count == 0) run_queue(conn, queue, true);
    return tl_list_is_empty(queue) && requests_begin(conn);
}

static void pump(struct tl_closure *closure)
{
    struct tl_conn *conn = TL_CONTAINER_OF(closure, struct tl_conn, posts.pump_closure);
    struct conn_posts *posts = &conn->posts;
    bool has_more = false;
    tl_quota_renew(&conn->engine->provider->quota);
    posts->budgets.response_bytes = PUMP_BYTES;
    posts->budgets.values_bytes = VALUES_BYTES;
    posts->budgets.completion_bytes = PUMP_BYTES;
    posts->budgets.copy_bytes = COPY_BYTES;
    if (conn->requests.unplaced_count > 0) tl_list_splice_back(&conn->requests.finished, &conn->requests.unplaced);
    if (conn->state != CONN_NEW && conn->state != CONN_CLOSING) {
        run_copies(conn);
        requests_give_laps(conn);
        maybe_complete(conn); /* the worker may ask for more, which this doorbell posts as well */
        if (!tl_list_is_empty(&conn->requests.waiting)) has_more = begin_requests(conn);
        run_queue(conn, &posts->space_queue, false);
        /* An answer gives our slots back. A ping does not. */
        for (unsigned rank = 0; rank < POST_RANKS && conn->requests.unplaced_count == 0; rank++)
            run_queue(conn, &posts->slot_queues[rank], true);
        maybe_post_credits(conn);
        conn_post_batch(conn);
        for (unsigned rank = 0; rank < POST_RANKS; rank++)
            run_reads(conn, &posts->reads.queues[rank]);
        if (conn->state != CONN_CLOSING) ring_doorbell(conn);
    }
    /* What was queued so far is posted, or waits for something. What is queued from here on needs another pump. */
    posts->is_pump_queued = false;
    has_more |= !tl_list_is_empty(&posts->copy_queue) || requests_can_give_laps(conn);
    if (is_pump_over(posts) || has_more) conn_pump_later(conn);
    if (conn->ending.is_breaking) conn_break_open(conn);
    maybe_complete(conn);
    requests_free_completed(conn);
    conn_check_idle(conn);
}

/* ----------------------------------------------------------------------------------------------------- posting -- */

struct tl_message *conn_compose(struct tl_conn *conn, enum tl_message_type type, uint32_t handle)
{
    struct tl_message *message = &conn->engine->outgoing;
    tl_message_clear(message);
    message->type = type;
    message->handle = handle;
    return message;
}

/* The work of a post whose completion is needed only to go on with the posts that wait for space. NULL: there is space
 * enough, or such a completion is on its way already. */
static struct tl_work *work_for_space(struct tl_conn *conn)
{
    if (conn->posts.is_space_work_out || space(conn) >= 2 * SPACE_OF_A_POST) return NULL;
    conn->posts.is_space_work_out = true;
    return &conn->posts.space_work;
}

void conn_post_batch(struct tl_conn *conn)
{
    struct engine_batch *batch = &conn->engine->batch;
    struct conn_credits *credits = &conn->credits;
    if (!is_batch_open(conn)) return;
    batch->conn = NULL;
    if (conn->requests.unplaced_count == 0) credits->own_slots_reported = credits->own_slots_returned;
    tl_batch_encode_head(batch->bytes, credits->own_slots_reported);
    conn->engine->stats.slots_sent++;
    struct tl_work *work = batch->works != NULL ? batch->works : work_for_space(conn);
    conn->pair->ops->message(conn->pair, batch->bytes, batch->len_bytes, work);
}

/* Takes the open batch out of the place from which it would be sent, because something is posted before it. */
static void move_batch(struct engine_batch *batch)
{
    if (batch->bytes == batch->memory) return;
    memcpy(batch->memory, batch->bytes, batch->len_bytes);
    batch->bytes = batch->memory;
}

static void begin_batch(struct tl_conn *conn)
{
    struct engine_batch *batch = &conn->engine->batch;
    batch->conn = conn;
    batch->bytes = tl_queue_pair_message_place(conn->pair);
    if (batch->bytes == NULL) batch->bytes = batch->memory;
    batch->len_bytes = TL_BATCH_HEAD_BYTES;
    batch->passed_bytes = 0;
    batch->works = NULL;
    batch->works_end = &batch->works;
    conn->credits.peer_slots_used++;
}

void conn_post_message(struct tl_conn *conn, const struct tl_message *message, struct tl_work *work)
{
    struct engine_batch *batch = &conn->engine->batch;
    uint32_t slot_bytes = conn->credits.peer_slot_bytes;
    if (is_batch_open(conn) && tl_message_most_bytes(message) > slot_bytes - batch->len_bytes) conn_post_batch(conn);
    TL_CHECK(batch->conn == NULL || batch->conn == conn);
    if (batch->conn == NULL) begin_batch(conn);
    uint32_t len_bytes = tl_message_encode(message, batch->bytes + batch->len_bytes);
    batch->len_bytes += len_bytes;
    conn->posts.unsent_messages++;
    conn->posts.unsent_bytes += len_bytes;
    conn->engine->stats.messages_sent++;
    if (work == NULL) return;
    work->next = NULL;
    *batch->works_end = work;
    batch->works_end = &work->next;
}

void conn_post_write(struct tl_conn *conn, const struct tl_region *region, const void *source, uint64_t len_bytes,
                     const struct tl_descriptor *destination, uint64_t offset_bytes, uint32_t immediate,
                     struct tl_work *work)
{
    struct engine_batch *batch = &conn->engine->batch;
    if (is_batch_open(conn)) {
        move_batch(batch);
        batch->passed_bytes += len_bytes;
        if (batch->passed_bytes > PASSING_BYTES) conn_post_batch(conn);
    }
    conn->credits.peer_slots_used++;
    conn->posts.unsent_bytes += len_bytes;
    conn->engine->stats.writes_posted++;
    conn->engine->stats.bytes_sent += len_bytes;
    if (work == NULL) work = work_for_space(conn);
    conn->pair->ops->write(conn->pair, region, source, len_bytes, destination, offset_bytes, true, immediate, work);
}

void conn_posts_init(struct tl_conn *conn)
{
    struct conn_posts *posts = &conn->posts;
    for (unsigned rank = 0; rank < POST_RANKS; rank++) {
        tl_list_init(&posts->slot_queues[rank]);
        tl_list_init(&posts->reads.queues[rank]);
    }
    tl_list_init(&posts->space_queue);
    tl_list_init(&posts->copy_queue);
    tl_list_init(&posts->window_queue);
    tl_list_init(&posts->pump_closure.link);
    posts->pump_closure.run = pump;
    posts->space_work = (struct tl_work){.magic = TL_WORK_MAGIC, .done = space_done};
}
