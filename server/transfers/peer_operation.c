// SPDX-License-Identifier: Apache-2.0
#include "server/transfers/peer_operation.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/struct_version.h"
#include "base/text.h"
#include "control/listing.h"
#include "control/peer_call.h"
#include "server/back_off.h"
#include "server/peers/peer_calls.h"
#include "server/progress/completion_queue.h"
#include "server/transfers/operation_internal.h"
#include "server/transfers/walk.h"

/*
 *   NEW --start--> WAITING --a link is there--> RUNNING --answered--> LINGERING --memory free--> (freed when read)
 *                    ^  \--failed--\             |
 *                    |             v            |broken
 *                    \---retry--- PAUSED <-------/
 *   at this worker: NEW --start--> LOOKING --found--> LINGERING
 *
 *   From all but LINGERING: --ended--> LINGERING; from RUNNING by way of ENDING.
 */
enum peer_op_state {
    PEER_OP_NEW,       /* waits for the loop's owner to take the closure */
    PEER_OP_WAITING,   /* waits for a link to the peer, or for calls before it */
    PEER_OP_RUNNING,   /* waits for the answer */
    PEER_OP_PAUSED,    /* waits for the retry timer */
    PEER_OP_LOOKING,   /* looks through the table of this worker, some milliseconds in each round */
    PEER_OP_ENDING,    /* has its error; waits for the end of the call, which may read the tensor */
    PEER_OP_LINGERING, /* has its result; a put waits until nothing reads the tensor any more */
};

struct tl_peer_op {
    struct tl_cq_item item;
    struct tl_worker *worker;
    struct tl_peer *peer;
    tl_op_id id;
    UT_hash_handle hh; /* in worker->operations.peer_ops, by id */
    bool is_registered;
    bool may_go_back;
    bool sends_bytes; /* a put's: the peer could not fetch the tensor, so that the call carries it */
    enum tl_op_kind kind;
    enum peer_op_state state;
    unsigned retry_count;
    struct tl_closure closure; /* takes it to the loop, then the next round in LOOKING */
    struct tl_closure released_closure;
    struct tl_call_wait wait;
    struct tl_peer_call *call; /* RUNNING, ENDING */
    struct tl_walk *walk;      /* LOOKING */
    size_t sorted_count;       /* LOOKING: what sort_found has done: entries that were taken, and then put in order */
    struct tl_timer deadline_timer;
    struct tl_timer retry_timer;
    int64_t submitted_ns;
    int64_t duration_ns; /* from then to the completion */
    struct tl_cq *cq;    /* NULL: blocking form */
    void *user_data;     /* blocking form: its tl_wait */
    uint64_t step;
    uint64_t bytes;
    struct tl_tensor *base;          /* a put's: the caller's, valid as long as the alias */
    struct tl_tensor *alias;         /* a put's, until it has ended */
    struct tl_put_item source;       /* a put's: where the peer fetches the tensor, while it is RUNNING or ENDING */
    enum tl_path path;               /* a put's that has succeeded */
    const char *path_reason;         /* never freed */
    const struct tl_error *error;    /* kept; NULL: TL_OK */
    const struct tl_error *breakage; /* kept; why the latest call broke; NULL: none did */
    struct tl_listing *listing;
    uint64_t removed_count;
    char text[]; /* the key, or the pattern */
};

static const struct tl_error out_of_memory = {.code = TL_RESOURCE_EXHAUSTED, .message = "no memory"};

static const char *verb_of(const struct tl_peer_op *op)
{
    switch (op->kind) {
    case TL_OP_PUT:
        return "put";
    case TL_OP_LIST:
        return "list";
    case TL_OP_STAT:
        return "stat";
    default:
        return "remove";
    }
}

/* ---------------------------------------------------------------------------------------------------- being over -- */

static void take(struct tl_cq_item *item, struct tl_completion *ret_completion)
{
    struct tl_peer_op *op = TL_CONTAINER_OF(item, struct tl_peer_op, item);
    memset(ret_completion, 0, sizeof(*ret_completion));
    ret_completion->size_bytes = sizeof(*ret_completion);
    ret_completion->op = op->id;
    ret_completion->kind = op->kind;
    ret_completion->user_data = op->user_data;
    if (op->error != NULL) ret_completion->status = *op->error;
    ret_completion->step = op->step;
    ret_completion->path = op->error == NULL ? op->path : TL_PATH_NONE;
    ret_completion->path_reason = op->error == NULL && op->path_reason != NULL ? op->path_reason : "";
    ret_completion->bytes = op->error == NULL ? op->bytes : 0;
    ret_completion->duration_ns = op->duration_ns;
    ret_completion->listing = op->listing;
    ret_completion->removed_count = op->removed_count;
    tl_error_drop(op->error);
    free(op);
}

static void complete(struct tl_peer_op *op)
{
    struct tl_worker *worker = op->worker;
    op->duration_ns = tl_clock_now_ns() - op->submitted_ns;
    if (op->is_registered) HASH_DEL(worker->operations.peer_ops, op);
    tl_timers_disarm(tl_loop_timers(worker->loop), &op->deadline_timer);
    tl_peer_release(op->peer);
    tl_error_drop(op->breakage);
    __atomic_fetch_sub(&worker->operations.open_ops, 1, __ATOMIC_RELEASE);
    if (op->cq != NULL) {
        tl_cq_push(op->cq, &op->item, &worker->progress);
    } else {
        tl_wait_done(op->user_data);
    }
}

/* The operation has its result. It may be gone when this returns. */
static void finish(struct tl_peer_op *op, const struct tl_error *error)
{
    struct tl_tensor *alias = op->alias;
    if (error->code != TL_OK && op->error == NULL) op->error = tl_error_keep(error);
    op->state = PEER_OP_LINGERING;
    op->alias = NULL;
    if (alias != NULL) {
        tl_tensor_put(alias);
    } else {
        complete(op);
    }
}

static void released(struct tl_closure *closure)
{
    complete(TL_CONTAINER_OF(closure, struct tl_peer_op, released_closure));
}

/* Thread: any. */
static void alias_released(void *data, void *context)
{
    (void)data;
    struct tl_peer_op *op = context;
    struct tl_worker *worker = op->worker;
    tl_worker_enter(worker);
    tl_executor_post(&worker->executor, &op->released_closure);
    tl_worker_leave(worker);
}

/* ------------------------------------------------------------------------------------------------ at this worker -- */

static void drop_walk(struct tl_peer_op *op)
{
    if (op->walk != NULL) tl_walk_end(op->worker, op->walk);
    op->walk = NULL;
    tl_list_remove(&op->closure.link);
}

/* Puts what the walk has found into the order of the keys. Returns false when there is more to do after others had the
 * loop. */
static bool sort_found(struct tl_peer_op *op)
{
    struct tl_listing *found = &op->walk->listing;
    size_t count = found->count;
    int64_t end_ns = tl_clock_now_ns() + TL_WALK_STEP_NS;
    for (; op->sorted_count < count; op->sorted_count++) {
        if (tl_clock_now_ns() >= end_ns) return false;
        (void)tl_listing_take(found, count - op->sorted_count);
    }
    /* They were taken from the smallest on, each to the end of those that were left. */
    for (; op->sorted_count < count + count / 2; op->sorted_count++) {
        size_t i = op->sorted_count - count;
        if (tl_clock_now_ns() >= end_ns) return false;
        struct tl_listed item = found->items[i];
        found->items[i] = found->items[count - 1 - i];
        found->items[count - 1 - i] = item;
    }
    return true;
}

/* Takes what the walk has found. */
static enum tl_status take_found(struct tl_peer_op *op, struct tl_error *ret_error)
{
    op->removed_count = op->walk->withdrawn_count;
    if (op->kind == TL_OP_REMOVE) return TL_OK;
    op->listing = calloc(1, sizeof(*op->listing));
    if (op->listing == NULL) return tl_error_copy(ret_error, &out_of_memory);
    *op->listing = op->walk->listing;
    op->walk->listing = (struct tl_listing){0};
    return TL_OK;
}

static void found_all(struct tl_peer_op *op, struct tl_error *error);

static void look(struct tl_closure *closure)
{
    struct tl_peer_op *op = TL_CONTAINER_OF(closure, struct tl_peer_op, closure);
    struct tl_error error = {.code = TL_OK};
    enum tl_status status = TL_OK;
    if (!op->walk->is_complete) status = tl_walk_step(op->worker, op->walk, &error);
    if (status == TL_OK && !(op->walk->is_complete && sort_found(op))) {
        tl_loop_defer(op->worker->loop, &op->closure);
        return;
    }
    if (status == TL_OK) status = take_found(op, &error);
    if (status == TL_OK) error.code = TL_OK;
    drop_walk(op);
    found_all(op, &error);
}

static void start_here(struct tl_peer_op *op)
{
    struct tl_worker *worker = op->worker;
    struct tl_error error = {.code = TL_OK};
    enum tl_status status = TL_OK;
    if (op->kind == TL_OP_PUT) {
        if (!op->may_go_back) status = tl_rendezvous_check_version(worker->table, op->text, op->step, &error);
        if (status == TL_OK) status = tl_rendezvous_publish(worker->table, op->text, op->step, op->base, NULL, &error);
        if (status == TL_OK) error.code = TL_OK;
        op->path = TL_PATH_SELF;
        finish(op, &error);
        return;
    }
    op->state = PEER_OP_LOOKING;
    status = tl_walk_begin(worker, &worker->self, op->text, op->kind == TL_OP_REMOVE, &op->walk, &error);
    if (status != TL_OK) {
        finish(op, &error);
        return;
    }
    op->closure.run = look;
    look(&op->closure);
}

/* ----------------------------------------------------------------------------------------------------- at a peer -- */

static void wait_for_link(struct tl_peer_op *op)
{
    op->state = PEER_OP_WAITING;
    op->wait.awaits_data = op->kind == TL_OP_PUT && !op->sends_bytes;
    tl_peer_call_wait(op->peer, &op->wait);
}

static void retry(struct tl_timer *timer)
{
    struct tl_peer_op *op = TL_CONTAINER_OF(timer, struct tl_peer_op, retry_timer);
    op->worker->operations.requests_retried++;
    wait_for_link(op);
}

/* The call could not be made, or broke: another one may succeed. */
static void retry_later(struct tl_peer_op *op, const struct tl_error *reason)
{
    int64_t pause_ns = tl_back_off_ns(TL_RECEIVE_FIRST_BACK_OFF_NS, TL_RECEIVE_MAX_BACK_OFF_NS, op->retry_count++);
    tl_error_drop(op->breakage);
    op->breakage = tl_error_keep(reason);
    op->sends_bytes = false;
    op->state = PEER_OP_PAUSED;
    if (tl_timers_arm(tl_loop_timers(op->worker->loop), &op->retry_timer, tl_clock_now_ns() + pause_ns) != TL_OK)
        finish(op, &out_of_memory);
}

static void no_link(struct tl_call_wait *wait, const struct tl_error *reason)
{
    struct tl_peer_op *op = TL_CONTAINER_OF(wait, struct tl_peer_op, wait);
    if (reason->code != TL_PERMISSION_DENIED) {
        retry_later(op, reason);
        return;
    }
    struct tl_error error;
    tl_error_set(&error, TL_PERMISSION_DENIED, "the %s of \"%.64s\" needs a link: %.800s", verb_of(op), op->text,
                 reason->message);
    finish(op, &error);
}

/* A stat is a list of one key. */
static void found_all(struct tl_peer_op *op, struct tl_error *error)
{
    if (error->code == TL_OK && op->kind == TL_OP_STAT && op->listing->count == 0) {
        tl_error_set(error, TL_NOT_FOUND, "%s publishes nothing under \"%.64s\"", tl_peer_name(op->peer), op->text);
        tl_listing_destroy(op->listing);
        op->listing = NULL;
    }
    finish(op, error);
}

static void take_result(struct tl_peer_op *op, struct tl_peer_call_result *result)
{
    op->removed_count = result->count;
    if (result->status.code == TL_OK && (op->kind == TL_OP_LIST || op->kind == TL_OP_STAT)) {
        op->listing = calloc(1, sizeof(*op->listing));
        if (op->listing == NULL) {
            tl_listing_fini(&result->listing);
            result->status = out_of_memory;
        } else {
            *op->listing = result->listing;
        }
    }
    found_all(op, &result->status);
}

/* The peer could not fetch the tensor of a put. */
static void send_bytes(struct tl_peer_op *op)
{
    op->sends_bytes = true;
    wait_for_link(op);
}

/* How a tensor has travelled that the call has carried. */
static enum tl_path path_of_call(const struct tl_peer_op *op)
{
    const struct tl_meta_data *meta_data = tl_tensor_meta_data(op->alias);
    if (meta_data->size_bytes == 0) return TL_PATH_NONE;
    return meta_data->dtype == TL_STRING ? TL_PATH_SERIALIZED : TL_PATH_GRPC;
}

static void call_done(void *context, struct tl_peer_call_result *result)
{
    struct tl_peer_op *op = context;
    bool was_ready = op->source.tensor != NULL;
    op->call = NULL;
    tl_put_sources_remove(&op->worker->sources.puts, &op->source);
    tl_peer_call_over(op->peer, &op->wait);
    if (op->kind == TL_OP_PUT && result->status.code == TL_OK) {
        op->path = was_ready ? result->path : path_of_call(op);
        if (op->path == TL_PATH_BOUNCE) op->path_reason = "copied through registered memory, here or at the peer";
    }
    if (op->state == PEER_OP_ENDING) {
        tl_listing_fini(&result->listing);
        finish(op, &result->status);
    } else if (result->status.code == TL_OK && result->wants_data && was_ready) {
        send_bytes(op);
    } else if (result->status.code == TL_OK && result->wants_data) {
        /* Only a faulty peer does so; without a pause the bytes would go to it again and again. */
        struct tl_error error;
        tl_error_set(&error, TL_UNAVAILABLE, "%s asks for the data of a call that had them", tl_peer_name(op->peer));
        retry_later(op, &error);
    } else if (result->status.code != TL_UNAVAILABLE) {
        take_result(op, result);
    } else if (op->kind == TL_OP_REMOVE) {
        struct tl_error error;
        tl_error_set(&error, TL_UNAVAILABLE, "%.800s; it is not known whether %s was removed", result->status.message,
                     op->text);
        finish(op, &error);
    } else {
        retry_later(op, &result->status);
    }
}

/* Has the peer fetch the tensor of a put, where it can. Returns false, and the put is made again later, when its bytes
 * may travel in no other way and cannot travel so now. */
static bool choose_way(struct tl_peer_op *op)
{
    const char *reason = "the peer could not fetch it over the data connection";
    if (!op->sends_bytes && tl_peer_put_use(op->peer, &reason) == TL_DATA_CONNECTION_TAKE) {
        tl_put_sources_add(&op->worker->sources.puts, &op->source, op->alias, tl_peer_incarnation(op->peer));
        op->path_reason = "";
        return true;
    }
    op->path_reason = reason;
    if (!op->worker->data_plane.is_transport_required) return true;
    struct tl_error error;
    tl_error_set(&error, TL_UNAVAILABLE, "its tensor may not travel over gRPC: %s", reason);
    tl_peer_call_over(op->peer, &op->wait);
    retry_later(op, &error);
    return false;
}

static void call_ready(struct tl_call_wait *wait, struct tl_link *link)
{
    struct tl_peer_op *op = TL_CONTAINER_OF(wait, struct tl_peer_op, wait);
    if (op->kind == TL_OP_PUT && !choose_way(op)) return;
    struct tl_peer_call_request request = {
        .kind = TL_PEER_CALL_LIST, .text = op->text, .step = op->step, .may_go_back = op->may_go_back};
    struct tl_error error;
    if (op->kind == TL_OP_PUT) request.kind = TL_PEER_CALL_PUBLISH;
    if (op->kind == TL_OP_REMOVE) request.kind = TL_PEER_CALL_WITHDRAW;
    request.tensor = op->alias;
    request.source = (struct tl_put_source){.incarnation = op->worker->self.incarnation, .number = op->source.number};
    op->state = PEER_OP_RUNNING;
    if (tl_peer_call_start(link, &request, call_done, op, &op->call, &error) == TL_OK) return;
    tl_put_sources_remove(&op->worker->sources.puts, &op->source);
    tl_peer_call_over(op->peer, &op->wait);
    finish(op, &error);
}

/* -------------------------------------------------------------------------------------------------------- ending -- */

/* Returns false when it has its result already. It may be gone when this returns. */
static bool end(struct tl_peer_op *op, const struct tl_error *error)
{
    if (op->state == PEER_OP_ENDING || op->state == PEER_OP_LINGERING) return false;
    if (op->state == PEER_OP_RUNNING) {
        op->state = PEER_OP_ENDING;
        op->error = tl_error_keep(error);
        tl_peer_call_cancel(op->call, error);
        return true;
    }
    if (op->state == PEER_OP_WAITING) tl_peer_call_over(op->peer, &op->wait);
    if (op->state == PEER_OP_LOOKING) drop_walk(op);
    tl_timers_disarm(tl_loop_timers(op->worker->loop), &op->retry_timer);
    finish(op, error);
    return true;
}

static void deadline_over(struct tl_timer *timer)
{
    struct tl_peer_op *op = TL_CONTAINER_OF(timer, struct tl_peer_op, deadline_timer);
    struct tl_error error;
    char waited[32], state[TL_ERROR_MESSAGE_BYTES];
    tl_text_format_duration(tl_clock_now_ns() - op->submitted_ns, waited, sizeof(waited));
    tl_peer_format_state(op->peer, state, sizeof(state));
    tl_error_set(&error, TL_DEADLINE_EXCEEDED,
                 "the %s of \"%.64s\" at %s did not end within %s; the peer is %.300s%s%.300s", verb_of(op), op->text,
                 tl_peer_name(op->peer), waited, state, op->breakage != NULL ? "; " : "",
                 op->breakage != NULL ? op->breakage->message : "");
    end(op, &error);
}

bool tl_peer_op_cancel(struct tl_worker *worker, tl_op_id id)
{
    struct tl_peer_op *op;
    HASH_FIND(hh, worker->operations.peer_ops, &id, sizeof(id), op);
    if (op == NULL) return false;
    struct tl_error error;
    tl_error_set(&error, TL_CANCELLED, "the %s of \"%.64s\" was cancelled", verb_of(op), op->text);
    return end(op, &error);
}

bool tl_peer_ops_end(struct tl_worker *worker, const struct tl_peer *peer, const struct tl_error *status)
{
    struct tl_quota *quota = tl_loop_quota(worker->loop);
    struct tl_peer_op *op, *next;
    HASH_ITER(hh, worker->operations.peer_ops, op, next)
    {
        if (peer != NULL && op->peer != peer) continue;
        if (tl_quota_left(quota) == 0) return false;
        tl_quota_use(quota, end(op, status));
    }
    return true;
}

/* ------------------------------------------------------------------------------------------------------ starting -- */

static bool add_to_worker(struct tl_peer_op *op)
{
    bool is_added = true;
#undef uthash_nonfatal_oom
#define uthash_nonfatal_oom(object) is_added = false
    HASH_ADD(hh, op->worker->operations.peer_ops, id, sizeof(op->id), op);
    return is_added;
}

static void start(struct tl_closure *closure)
{
    struct tl_peer_op *op = TL_CONTAINER_OF(closure, struct tl_peer_op, closure);
    struct tl_worker *worker = op->worker;
    struct tl_error error;
    op->is_registered = add_to_worker(op);
    if (!op->is_registered ||
        tl_timers_arm(tl_loop_timers(worker->loop), &op->deadline_timer, op->deadline_timer.due_ns) != TL_OK) {
        finish(op, &out_of_memory);
    } else if (worker->closing.is_closing) {
        tl_error_set(&error, TL_CANCELLED, "the worker was closed");
        finish(op, &error);
    } else if (tl_peer_is_gone(op->peer, &error)) {
        finish(op, &error);
    } else if (tl_peer_is_self(op->peer)) {
        start_here(op);
    } else {
        wait_for_link(op);
    }
}

static struct tl_peer_op *create(struct tl_worker *worker, struct tl_peer *peer, enum tl_op_kind kind, const char *text,
                                 int64_t timeout_ns)
{
    struct tl_peer_op *op = calloc(1, sizeof(*op) + strlen(text) + 1);
    if (op == NULL) return NULL;
    memcpy(op->text, text, strlen(text) + 1);
    op->worker = worker;
    op->peer = peer;
    tl_peer_retain(peer);
    op->kind = kind;
    op->item.take = take;
    op->closure.run = start;
    op->released_closure.run = released;
    tl_list_init(&op->closure.link);
    tl_list_init(&op->wait.place);
    op->wait.ready = call_ready;
    op->wait.failed = no_link;
    op->deadline_timer.fire = deadline_over;
    op->retry_timer.fire = retry;
    op->submitted_ns = tl_clock_now_ns();
    if (timeout_ns == TL_TIMEOUT_DEFAULT) timeout_ns = worker->settings.request_timeout_ns;
    op->deadline_timer.due_ns = tl_clock_deadline_ns(timeout_ns);
    return op;
}

static void discard(struct tl_peer_op *op)
{
    tl_peer_release(op->peer);
    free(op);
}

/* Finds the peer, and creates an operation there. */
static enum tl_status create_at(struct tl_worker *worker, tl_peer_id peer, enum tl_op_kind kind, const char *text,
                                int64_t timeout_ns, struct tl_peer_op **ret_op, struct tl_error *ret_error)
{
    struct tl_peer *at = tl_peer_acquire(worker, peer);
    if (at == NULL) return tl_error_set(ret_error, TL_NOT_FOUND, "there is no such peer");
    *ret_op = create(worker, at, kind, text, timeout_ns);
    tl_peer_release(at);
    return *ret_op != NULL ? TL_OK : tl_error_copy(ret_error, &out_of_memory);
}

static enum tl_status create_put(struct tl_worker *worker, tl_peer_id peer, const char *key, uint64_t step,
                                 struct tl_tensor *tensor, const struct tl_put_options *caller_options,
                                 int64_t timeout_ns, struct tl_peer_op **ret_op, struct tl_error *ret_error)
{
    struct tl_put_options options = {.size_bytes = sizeof(options)};
    struct tl_peer_op *op;
    enum tl_status status = op_check_key(key, ret_error);
    if (status == TL_OK && caller_options != NULL)
        status = tl_struct_read(&options, sizeof(options), TL_PUT_OPTIONS_FIRST_BYTES, caller_options, "tl_put_options",
                                ret_error);
    if (status == TL_OK && tl_tensor_is_on_device(tensor))
        status = tl_error_set(ret_error, TL_UNIMPLEMENTED,
                              "%.64s lies on a device; copy it to the host to put it at a peer", key);
    if (status == TL_OK) status = create_at(worker, peer, TL_OP_PUT, key, timeout_ns, &op, ret_error);
    if (status != TL_OK) return status;
    status = tl_tensor_create_alias(tensor, alias_released, op, &op->alias, ret_error);
    if (status != TL_OK) {
        discard(op);
        return status;
    }
    op->base = tensor;
    op->step = step;
    op->bytes = tl_tensor_size_bytes(tensor);
    op->may_go_back = options.may_go_back;
    *ret_op = op;
    return TL_OK;
}

static enum tl_status create_for_pattern(struct tl_worker *worker, tl_peer_id peer, enum tl_op_kind kind,
                                         const char *pattern, int64_t timeout_ns, struct tl_peer_op **ret_op,
                                         struct tl_error *ret_error)
{
    if (pattern == NULL || (pattern[0] == '\0' && kind == TL_OP_REMOVE))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the pattern is missing; \"*\" matches all");
    size_t length = strnlen(pattern, TL_MAX_KEY_BYTES + 1);
    if (length > TL_MAX_KEY_BYTES || !tl_text_is_utf8(pattern, length))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "the pattern \"%.40s\" is longer than %d bytes or not UTF-8", pattern, TL_MAX_KEY_BYTES);
    return create_at(worker, peer, kind, pattern, timeout_ns, ret_op, ret_error);
}

/* Makes the pattern that only this key matches. */
static enum tl_status create_stat(struct tl_worker *worker, tl_peer_id peer, const char *key, int64_t timeout_ns,
                                  struct tl_peer_op **ret_op, struct tl_error *ret_error)
{
    char pattern[2 * TL_MAX_KEY_BYTES + 1];
    size_t length = 0;
    enum tl_status status = op_check_key(key, ret_error);
    if (status != TL_OK) return status;
    for (size_t i = 0; key[i] != '\0'; i++) {
        if (strchr("*?[]\\", key[i]) != NULL) pattern[length++] = '\\';
        pattern[length++] = key[i];
    }
    pattern[length] = '\0';
    return create_at(worker, peer, TL_OP_STAT, pattern, timeout_ns, ret_op, ret_error);
}

/* -------------------------------------------------------------------------------------------------------- public -- */

static tl_op_id take_id(struct tl_peer_op *op)
{
    op->id = __atomic_add_fetch(&op->worker->operations.next_op, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&op->worker->operations.open_ops, 1, __ATOMIC_RELAXED);
    return op->id;
}

static void submit(struct tl_peer_op *op, struct tl_cq *cq, void *user_data, tl_op_id *ret_op)
{
    op->cq = cq;
    op->user_data = user_data;
    tl_op_id id = take_id(op);
    tl_cq_post(cq, &op->worker->progress, &op->closure);
    if (ret_op != NULL) *ret_op = id;
}

/* Submits and waits; the operation's deadline is the limit, so the wait has none. */
static enum tl_status run(struct tl_peer_op *op, struct tl_completion *ret_completion, struct tl_error *ret_error)
{
    struct tl_worker *worker = op->worker;
    struct tl_wait wait;
    tl_worker_enter(worker);
    tl_wait_init(&wait, &worker->progress);
    op->user_data = &wait;
    take_id(op);
    tl_loop_post(worker->loop, &op->closure);
    while (!tl_wait_for(&wait, TL_TIME_NEVER))
        continue;
    tl_wait_fini(&wait);
    tl_worker_leave(worker);
    take(&op->item, ret_completion);
    return tl_error_copy(ret_error, &ret_completion->status);
}

enum tl_status tl_put(struct tl_worker *worker, tl_peer_id peer, const char *key, uint64_t step,
                      struct tl_tensor *tensor, const struct tl_put_options *options, int64_t timeout_ns,
                      struct tl_cq *cq, void *user_data, tl_op_id *ret_op, struct tl_error *ret_error)
{
    struct tl_peer_op *op;
    enum tl_status status = tl_cq_attach(cq, &worker->progress, ret_error);
    if (status == TL_OK) status = create_put(worker, peer, key, step, tensor, options, timeout_ns, &op, ret_error);
    if (status == TL_OK) submit(op, cq, user_data, ret_op);
    return status;
}

enum tl_status tl_list(struct tl_worker *worker, tl_peer_id peer, const char *pattern, int64_t timeout_ns,
                       struct tl_cq *cq, void *user_data, tl_op_id *ret_op, struct tl_error *ret_error)
{
    struct tl_peer_op *op;
    enum tl_status status = tl_cq_attach(cq, &worker->progress, ret_error);
    if (status == TL_OK) status = create_for_pattern(worker, peer, TL_OP_LIST, pattern, timeout_ns, &op, ret_error);
    if (status == TL_OK) submit(op, cq, user_data, ret_op);
    return status;
}

enum tl_status tl_stat(struct tl_worker *worker, tl_peer_id peer, const char *key, int64_t timeout_ns, struct tl_cq *cq,
                       void *user_data, tl_op_id *ret_op, struct tl_error *ret_error)
{
    struct tl_peer_op *op;
    enum tl_status status = tl_cq_attach(cq, &worker->progress, ret_error);
    if (status == TL_OK) status = create_stat(worker, peer, key, timeout_ns, &op, ret_error);
    if (status == TL_OK) submit(op, cq, user_data, ret_op);
    return status;
}

enum tl_status tl_remove(struct tl_worker *worker, tl_peer_id peer, const char *pattern, int64_t timeout_ns,
                         struct tl_cq *cq, void *user_data, tl_op_id *ret_op, struct tl_error *ret_error)
{
    struct tl_peer_op *op;
    enum tl_status status = tl_cq_attach(cq, &worker->progress, ret_error);
    if (status == TL_OK) status = create_for_pattern(worker, peer, TL_OP_REMOVE, pattern, timeout_ns, &op, ret_error);
    if (status == TL_OK) submit(op, cq, user_data, ret_op);
    return status;
}

enum tl_status tl_put_wait(struct tl_worker *worker, tl_peer_id peer, const char *key, uint64_t step,
                           struct tl_tensor *tensor, const struct tl_put_options *options, int64_t timeout_ns,
                           struct tl_error *ret_error)
{
    struct tl_peer_op *op;
    struct tl_completion completion;
    enum tl_status status = create_put(worker, peer, key, step, tensor, options, timeout_ns, &op, ret_error);
    return status == TL_OK ? run(op, &completion, ret_error) : status;
}

enum tl_status tl_list_wait(struct tl_worker *worker, tl_peer_id peer, const char *pattern, int64_t timeout_ns,
                            struct tl_listing **ret_listing, struct tl_error *ret_error)
{
    struct tl_peer_op *op;
    struct tl_completion completion;
    enum tl_status status = create_for_pattern(worker, peer, TL_OP_LIST, pattern, timeout_ns, &op, ret_error);
    if (status == TL_OK) status = run(op, &completion, ret_error);
    if (status == TL_OK) *ret_listing = completion.listing;
    return status;
}

enum tl_status tl_stat_wait(struct tl_worker *worker, tl_peer_id peer, const char *key, int64_t timeout_ns,
                            struct tl_listing **ret_listing, struct tl_error *ret_error)
{
    struct tl_peer_op *op;
    struct tl_completion completion;
    enum tl_status status = create_stat(worker, peer, key, timeout_ns, &op, ret_error);
    if (status == TL_OK) status = run(op, &completion, ret_error);
    if (status == TL_OK) *ret_listing = completion.listing;
    return status;
}

enum tl_status tl_remove_wait(struct tl_worker *worker, tl_peer_id peer, const char *pattern, int64_t timeout_ns,
                              uint64_t *ret_count, struct tl_error *ret_error)
{
    struct tl_peer_op *op;
    struct tl_completion completion;
    enum tl_status status = create_for_pattern(worker, peer, TL_OP_REMOVE, pattern, timeout_ns, &op, ret_error);
    if (status == TL_OK) status = run(op, &completion, ret_error);
    if (status == TL_OK) *ret_count = completion.removed_count;
    return status;
}
