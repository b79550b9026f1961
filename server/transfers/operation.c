// SPDX-License-Identifier: Apache-2.0
/*
 * Operations: sends and receives of this process, from the call to their one completion.
 *
 * A send is a value in the rendezvous table (operation_send.c); a receive is a receiver there, or a fetch from a peer
 * (operation_receive.c).
 * A deadline, a cancel, an aborted or ended step and the close of the worker end an operation wherever it is; the first
 * of all these wins. Each kind has a table of its states, with its actions (operation_send.c, operation_receive.c).
 * What the operations of one call share is in its op_call; many of them are a group (operation_group.c).
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/struct_version.h"
#include "base/text.h"
#include "server/transfers/borrow.h"
#include "server/transfers/operation_internal.h"
#include "server/transfers/peer_operation.h"
#include "server/transfers/subscription.h"

const struct tl_error op_out_of_memory = {.code = TL_RESOURCE_EXHAUSTED, .message = "no memory"};

/* The alias of a single send lies behind its key, and begins at a multiple of this. */
#define PLACE_ALIGNMENT_BYTES 8

/* -------------------------------------------------------------------------------------------------- completing -- */

_Static_assert(sizeof(struct tl_completion) == TL_COMPLETION_BYTES, "arrays of completions have one stride");
_Static_assert(offsetof(struct op_send, closure) == 0 && offsetof(struct op_receive, request.closure) == 0,
               "the completion takes the place of a closure");

static void fill_send(const struct tl_op *op, struct tl_completion *ret_completion)
{
    ret_completion->step = op->send.step;
    ret_completion->bytes = op->send.bytes;
    ret_completion->path = TL_PATH_NONE;
    ret_completion->path_reason = "";
}

static void fill_receive(const struct tl_op *op, struct tl_completion *ret_completion)
{
    const struct tl_fetch *fetch = &op->receive.request.fetch;
    ret_completion->tensor = op->has_arrived ? op->tensor : NULL;
    ret_completion->step = op->has_arrived ? fetch->offer_step : 0;
    ret_completion->bytes = op->has_arrived ? fetch->received_bytes : 0;
    ret_completion->path = op->has_arrived ? fetch->path : TL_PATH_NONE;
    ret_completion->path_reason = op->has_arrived ? fetch->path_reason : "";
    ret_completion->is_verified = op->has_arrived && fetch->is_verified;
}

void op_read(struct tl_op *op, tl_op_id id, size_t place, struct tl_completion *ret_completion)
{
    memset(ret_completion, 0, offsetof(struct tl_completion, status));
    ret_completion->size_bytes = sizeof(*ret_completion);
    ret_completion->op = id;
    ret_completion->kind = op->kind;
    ret_completion->user_data = op->user_data;
    ret_completion->status.code = TL_OK;
    ret_completion->status.message[0] = '\0';
    if (op->error != NULL) ret_completion->status = *op->error;
    memset(&ret_completion->tensor, 0, sizeof(*ret_completion) - offsetof(struct tl_completion, tensor));
    if (op->kind == TL_OP_SEND) {
        fill_send(op, ret_completion);
    } else {
        fill_receive(op, ret_completion);
    }
    ret_completion->duration_ns = op->duration_ns;
    ret_completion->item = place;
    op_drop_error(op);
}

static void single_take(struct tl_cq_item *item, struct tl_completion *ret_completion)
{
    struct tl_op *op = TL_CONTAINER_OF(item, struct tl_op, item);
    op_read(op, op->call->id, 0, ret_completion);
    free(TL_CONTAINER_OF(op, struct op_single, op));
}

/* Makes room for the error. */
static void leave_step(struct tl_op *op)
{
    if (!op->is_in_step) return;
    tl_op_steps_leave(&op_worker(op)->operations.steps, &op->step_member);
    op->is_in_step = false;
    op->error = NULL;
}

void tl_op_complete(struct tl_op *op, const struct tl_error *error)
{
    (void)error;
    struct op_call *call = op->call;
    struct tl_worker *worker = call->worker;
    leave_step(op);
    if (op->kind == TL_OP_RECV) tl_op_receive_fini(op);
    if (call->is_group) {
        op_group_member_over(op_group_of(call), op);
        return;
    }
    op->duration_ns = tl_clock_now_ns() - call->submitted_ns;
    op_call_unregister(call);
    __atomic_fetch_sub(&worker->operations.open_ops, 1, __ATOMIC_RELEASE);
    op->item.take = single_take;
    if (call->cq != NULL) {
        tl_cq_push(call->cq, &op->item, &worker->progress);
    } else {
        tl_wait_done(op->user_data);
    }
}

void tl_op_handle(struct tl_op *op, enum op_event event, const struct tl_error *error)
{
    const struct op_transition *transition =
        op->kind == TL_OP_SEND ? &op_send_transitions[op->state][event] : &op_receive_transitions[op->state][event];
    TL_CHECK(transition->next != OP_NEVER);
    op->state = (uint8_t)transition->next;
    if (transition->action != NULL) transition->action(op, error);
}

/* ------------------------------------------------------------------------------------------------------- error -- */

void op_set_error(struct tl_op *op, const struct tl_error *error)
{
    if (error->code == TL_OK) return;
    leave_step(op);
    if (op->error == NULL) op->error = tl_error_keep(error);
}

void op_explain_error(struct tl_op *op, const struct tl_error *why)
{
    struct tl_error error;
    tl_error_set(&error, op->error->code, "%s; %s", op->error->message, why->message);
    op_drop_error(op);
    op->error = tl_error_keep(&error);
}

void op_drop_error(struct tl_op *op)
{
    leave_step(op);
    tl_error_drop(op->error);
    op->error = NULL;
}

/* ------------------------------------------------------------------------------------------------------ ending -- */

bool op_end(struct tl_op *op, const struct tl_error *error)
{
    if (op->state == OP_NEW) {
        tl_op_handle(op, OP_EVENT_REFUSED, error);
        return true;
    }
    return op->kind == TL_OP_SEND ? tl_op_send_end(op, error) : tl_op_receive_end(op, error);
}

void op_end_late(struct tl_op *op)
{
    char waited[32];
    tl_text_format_duration(tl_clock_now_ns() - op->call->submitted_ns, waited, sizeof(waited));
    struct tl_error error;
    struct tl_device device;
    if (op->kind == TL_OP_SEND) {
        tl_error_set(&error, TL_DEADLINE_EXCEEDED, "%s of step %" PRIu64 " was not received within %s", op_key(op),
                     op_step(op), waited);
    } else if (tl_op_receive_finds_stream(op, &device)) {
        char where[TL_DEVICE_TEXT_BYTES];
        tl_error_set(&error, TL_DEADLINE_EXCEEDED,
                     "%s of step %" PRIu64 " waited for %s: a stream on %s has not done what comes before", op_key(op),
                     op_step(op), waited, tl_device_format(device, where));
    } else {
        char state[TL_ERROR_MESSAGE_BYTES];
        tl_peer_format_state(op->receive.request.peer, state, sizeof(state));
        tl_error_set(&error, TL_DEADLINE_EXCEEDED,
                     "%s of step %" PRIu64 " did not come from %s within %s; the peer is %.500s", op_key(op),
                     op_step(op), tl_peer_name(op->receive.request.peer), waited, state);
    }
    op_end(op, &error);
}

bool op_cancel(struct tl_op *op)
{
    struct tl_error error;
    tl_error_set(&error, TL_CANCELLED, "%s of %s was cancelled", op->kind == TL_OP_SEND ? "the send" : "the receive",
                 op_key(op));
    return op_end(op, &error);
}

static struct op_single *single_of(struct op_call *call)
{
    return TL_CONTAINER_OF(call, struct op_single, call);
}

static void deadline_over(struct tl_timer *timer)
{
    struct op_call *call = TL_CONTAINER_OF(timer, struct op_call, deadline_timer);
    if (call->is_group) {
        op_group_late(op_group_of(call));
    } else {
        op_end_late(&single_of(call)->op);
    }
}

/* Which receives of a step end, and with what status. */
struct failing {
    bool is_delivering; /* those that are being delivered, or those that are not */
    const struct tl_error *status;
    uint64_t *visits; /* counts the members of a step */
};

static void fail_member(struct tl_op_step_member *member, void *context)
{
    struct failing *failing = context;
    struct tl_op *op = TL_CONTAINER_OF(member, struct tl_op, step_member);
    if (!failing->is_delivering) (*failing->visits)++;
    if (op->state == OP_COMPLETE) return;
    if ((op->state == OP_DELIVERING) == failing->is_delivering) op_end(op, failing->status);
}

static bool is_receive_from(struct op_call *call, const struct tl_peer *peer)
{
    size_t count;
    const struct tl_op *ops = op_call_ops(call, &count); /* those of a group have one peer */
    return count > 0 && ops->kind == TL_OP_RECV && (peer == NULL || ops->receive.request.peer == peer);
}

/* Ends the receives of a call, as many as the quota allows. Returns whether none is left. *ret_is_known: whether the
 * call still is in the table of calls, for certain. */
static bool fail_call(struct op_call *call, const struct tl_error *status, bool *ret_is_known)
{
    if (!call->is_group) {
        *ret_is_known = !op_end(&single_of(call)->op, status);
        return true;
    }
    struct op_group *group = op_group_of(call);
    op_group_hold(group);
    bool is_over = op_group_end_some(group, status);
    *ret_is_known = call->is_registered;
    op_group_let_go(group);
    return is_over;
}

bool tl_ops_fail_receives(struct tl_worker *worker, const struct tl_peer *peer, const struct tl_error *status,
                          size_t *chain)
{
    struct tl_quota *quota = tl_loop_quota(worker->loop);
    const struct tl_hash_table *calls = &worker->operations.calls;
    struct tl_hash_link *link = tl_hash_table_first_from(calls, chain);
    while (link != NULL) {
        struct op_call *call = TL_CONTAINER_OF(link, struct op_call, hash);
        bool is_known = true;
        if (tl_quota_left(quota) == 0) return false; /* the next time begins with this chain again */
        tl_quota_use(quota, 1);
        if (is_receive_from(call, peer) && !fail_call(call, status, &is_known)) return false;
        if (is_known && link->next != NULL) {
            link = link->next;
            continue;
        }
        if (is_known) (*chain)++;
        link = tl_hash_table_first_from(calls, chain);
    }
    return true;
}

bool tl_ops_fail_step(struct tl_worker *worker, uint64_t step, bool is_delivering, const struct tl_error *status)
{
    struct worker_operations *operations = &worker->operations;
    struct failing failing = {.is_delivering = is_delivering, .status = status, .visits = &operations->step_visits};
    return tl_op_steps_walk(&operations->steps, step, tl_loop_quota(worker->loop), fail_member, &failing);
}

/* -------------------------------------------------------------------------------------------------- submitting -- */

void op_call_init(struct op_call *call, struct tl_worker *worker, int64_t timeout_ns,
                  void (*start)(struct tl_closure *))
{
    call->worker = worker;
    call->closure.run = start;
    call->deadline_timer.fire = deadline_over;
    call->submitted_ns = tl_clock_now_ns();
    if (timeout_ns == TL_TIMEOUT_DEFAULT) timeout_ns = worker->settings.request_timeout_ns;
    call->deadline_timer.due_ns = tl_clock_deadline_ns(timeout_ns);
}

struct tl_op *op_call_ops(struct op_call *call, size_t *ret_count)
{
    if (call->is_group) return op_group_members(op_group_of(call), ret_count);
    *ret_count = 1;
    return &single_of(call)->op;
}

/* Programs do not choose their ids, which lie close together. */
static uint32_t hash_of(tl_op_id id)
{
    return (uint32_t)((id * UINT64_C(0x9e3779b97f4a7c15)) >> 32);
}

bool op_call_register(struct op_call *call, bool is_group)
{
    struct tl_worker *worker = call->worker;
    call->hash = (struct tl_hash_link){.next = NULL};
    call->is_group = is_group;
    call->is_registered = tl_hash_table_add(&worker->operations.calls, &call->hash, hash_of(call->id));
    return call->is_registered &&
           tl_timers_arm(tl_loop_timers(worker->loop), &call->deadline_timer, call->deadline_timer.due_ns) == TL_OK;
}

void op_call_unregister(struct op_call *call)
{
    tl_timers_disarm(tl_loop_timers(call->worker->loop), &call->deadline_timer);
    if (call->is_registered) tl_hash_table_remove(&call->worker->operations.calls, &call->hash);
    call->is_registered = false;
}

/* Returns the first of `count` ids that follow each other. It is a multiple of a power of two that is not smaller than
 * count, so that find_call finds it from each of the others. */
static tl_op_id take_ids(struct tl_worker *worker, uint64_t count)
{
    uint64_t mask = 1;
    while (mask < count)
        mask <<= 1;
    mask--;
    uint64_t latest = __atomic_load_n(&worker->operations.next_op, __ATOMIC_RELAXED);
    tl_op_id id;
    do {
        id = (latest + 1 + mask) & ~mask;
    } while (!__atomic_compare_exchange_n(&worker->operations.next_op, &latest, id + count - 1, false, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    return id;
}

/* Returns the open call with this id; NULL: there is none. */
static struct op_call *call_with_id(const struct tl_worker *worker, tl_op_id id)
{
    struct tl_hash_link *link = tl_hash_table_find(&worker->operations.calls, hash_of(id));
    while (link != NULL && TL_CONTAINER_OF(link, struct op_call, hash)->id != id)
        link = tl_hash_table_another(link);
    return link != NULL ? TL_CONTAINER_OF(link, struct op_call, hash) : NULL;
}

/* Returns the open call that the id belongs to; NULL: there is none. */
static struct op_call *find_call(const struct tl_worker *worker, tl_op_id id)
{
    for (uint64_t mask = 0; mask != UINT64_MAX; mask = mask << 1 | 1) {
        tl_op_id first = id & ~mask;
        if (first == 0) return NULL;
        struct op_call *call = call_with_id(worker, first);
        size_t count;
        if (call == NULL) continue;
        op_call_ops(call, &count);
        return id == first || (call->is_group && id - first <= count) ? call : NULL;
    }
    return NULL;
}

tl_op_id op_call_submit(struct op_call *call, uint64_t id_count)
{
    struct tl_worker *worker = call->worker;
    tl_op_id id = take_ids(worker, id_count);
    call->id = id;
    __atomic_fetch_add(&worker->operations.open_ops, id_count, __ATOMIC_RELAXED);
    tl_cq_post(call->cq, &worker->progress, &call->closure);
    return id;
}

static bool join_step(struct tl_op *op)
{
    struct tl_op_step **steps = &op_worker(op)->operations.steps;
    op->is_in_step = tl_op_steps_join(steps, op_step(op), &op->step_member);
    if (!op->is_in_step) op->error = NULL;
    return op->is_in_step;
}

void op_start(struct tl_op *op, const struct tl_error *refusal)
{
    struct tl_worker *worker = op_worker(op);
    struct tl_error closing;
    if (refusal == NULL && op->kind == TL_OP_RECV && !join_step(op)) refusal = &op_out_of_memory;
    if (refusal == NULL && worker->closing.is_closing) {
        tl_error_set(&closing, TL_CANCELLED, "the worker was closed");
        refusal = &closing;
    }
    tl_op_handle(op, refusal != NULL ? OP_EVENT_REFUSED : OP_EVENT_START, refusal);
}

static void single_start(struct tl_closure *closure)
{
    struct op_call *call = TL_CONTAINER_OF(closure, struct op_call, closure);
    struct tl_worker *worker = call->worker;
    op_start(&single_of(call)->op, op_call_register(call, false) ? NULL : &op_out_of_memory);
    tl_ops_send(worker);
}

enum tl_status op_check_key(const char *key, struct tl_error *ret_error)
{
    size_t length = key != NULL ? strnlen(key, TL_MAX_KEY_BYTES + 1) : 0;
    if (length == 0) return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the key is empty");
    if (length > TL_MAX_KEY_BYTES) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the key %.40s... is longer than %d bytes", key,
                            TL_MAX_KEY_BYTES);
    }
    if (!tl_text_is_utf8(key, length)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the key is not UTF-8");
    }
    if (tl_part_is_name(key)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%.64s is no key: " TL_PART_PREFIX " names parts of tensors", key);
    }
    if (strcmp(key, TL_PUT_KEY) == 0)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, TL_PUT_KEY " is no key: it names what is put at a peer");
    return TL_OK;
}

enum tl_status op_name(const char *key, const struct tl_part *part, char buffer[TL_MAX_KEY_BYTES + 1],
                       const char **ret_name, struct tl_error *ret_error)
{
    struct tl_part ours;
    enum tl_status status = op_check_key(key, ret_error);
    *ret_name = key;
    if (status != TL_OK || part == NULL) return status;
    status = tl_struct_read(&ours, sizeof(ours), TL_PART_FIRST_BYTES, part, "tl_part", ret_error);
    *ret_name = buffer;
    return status == TL_OK ? tl_part_name(&ours, key, buffer, ret_error) : status;
}

/* Creates a call with one operation, and more_bytes behind its key. The key, or the name of a part, was checked. */
static enum tl_status single_create(struct tl_worker *worker, const char *key, size_t more_bytes, int64_t timeout_ns,
                                    struct op_single **ret_single, struct tl_error *ret_error)
{
    size_t key_bytes = strlen(key) + 1;
    struct op_single *single = calloc(1, sizeof(*single) + key_bytes + more_bytes);
    if (single == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for an operation on %s", key);
    memcpy(single->key, key, key_bytes);
    op_call_init(&single->call, worker, timeout_ns, single_start);
    single->op.call = &single->call;
    *ret_single = single;
    return TL_OK;
}

static enum tl_status create_send_of(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor,
                                     int64_t timeout_ns, struct op_single **ret_single, struct tl_error *ret_error)
{
    struct op_single *single;
    enum tl_status status = op_check_key(key, ret_error);
    size_t place_bytes = PLACE_ALIGNMENT_BYTES - 1 + tl_tensor_place_bytes;
    if (status == TL_OK) status = single_create(worker, key, place_bytes, timeout_ns, &single, ret_error);
    if (status != TL_OK) return status;
    uintptr_t place = (uintptr_t)single->key + strlen(key) + 1;
    place += -place % PLACE_ALIGNMENT_BYTES;
    status = tl_op_send_init(&single->op, (void *)place, single->key, step, tensor, ret_error);
    if (status == TL_OK) {
        *ret_single = single;
    } else {
        free(single);
    }
    return status;
}

static enum tl_status create_receive_of(struct tl_worker *worker, tl_peer_id peer, const char *key, uint64_t step,
                                        const struct tl_recv_options *caller_options, int64_t timeout_ns,
                                        struct op_single **ret_single, struct tl_error *ret_error)
{
    struct tl_recv_options options = {.size_bytes = sizeof(options)};
    struct tl_peer *from = tl_peer_acquire(worker, peer);
    if (from == NULL) return tl_error_set(ret_error, TL_NOT_FOUND, "no such peer to receive %.64s from", key);
    enum tl_status status = TL_OK;
    if (caller_options != NULL)
        status = tl_struct_read(&options, sizeof(options), TL_RECV_OPTIONS_FIRST_BYTES, caller_options,
                                "tl_recv_options", ret_error);
    struct op_single *single = NULL;
    char buffer[TL_MAX_KEY_BYTES + 1];
    const char *name;
    if (status == TL_OK) status = op_name(key, options.part, buffer, &name, ret_error);
    if (status == TL_OK) status = single_create(worker, name, 0, timeout_ns, &single, ret_error);
    if (status == TL_OK) status = tl_op_receive_init(&single->op, from, single->key, step, &options, ret_error);
    tl_peer_release(from);
    if (status == TL_OK) {
        *ret_single = single;
    } else {
        free(single);
    }
    return status;
}

/* ------------------------------------------------------------------------------------------------------ public -- */

static void submit_single(struct op_single *single, struct tl_cq *cq, void *user_data, tl_op_id *ret_op)
{
    single->call.cq = cq;
    single->op.user_data = user_data;
    tl_op_id id = op_call_submit(&single->call, 1);
    if (ret_op != NULL) *ret_op = id;
}

enum tl_status tl_send(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor,
                       int64_t timeout_ns, struct tl_cq *cq, void *user_data, tl_op_id *ret_op,
                       struct tl_error *ret_error)
{
    struct op_single *single;
    enum tl_status status = tl_cq_attach(cq, &worker->progress, ret_error);
    if (status == TL_OK) status = create_send_of(worker, key, step, tensor, timeout_ns, &single, ret_error);
    if (status == TL_OK) submit_single(single, cq, user_data, ret_op);
    return status;
}

enum tl_status tl_recv(struct tl_worker *worker, tl_peer_id peer, const char *key, uint64_t step,
                       const struct tl_recv_options *options, int64_t timeout_ns, struct tl_cq *cq, void *user_data,
                       tl_op_id *ret_op, struct tl_error *ret_error)
{
    struct op_single *single;
    enum tl_status status = create_receive_of(worker, peer, key, step, options, timeout_ns, &single, ret_error);
    if (status != TL_OK) return status;
    status = tl_cq_attach(cq, &worker->progress, ret_error);
    if (status != TL_OK) {
        tl_op_receive_fini(&single->op);
        free(single);
        return status;
    }
    submit_single(single, cq, user_data, ret_op);
    return TL_OK;
}

/* Submits and waits; the operation's deadline is the limit, so the wait has none. */
static enum tl_status run_single(struct op_single *single, struct tl_completion *ret_completion,
                                 struct tl_error *ret_error)
{
    struct tl_worker *worker = single->call.worker;
    struct tl_wait wait;
    tl_worker_enter(worker);
    tl_wait_init(&wait, &worker->progress);
    single->op.user_data = &wait;
    op_call_submit(&single->call, 1);
    while (!tl_wait_for(&wait, TL_TIME_NEVER))
        continue;
    tl_wait_fini(&wait);
    tl_worker_leave(worker);
    single->op.user_data = NULL;
    single_take(&single->op.item, ret_completion);
    return tl_error_copy(ret_error, &ret_completion->status);
}

enum tl_status tl_send_wait(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor,
                            int64_t timeout_ns, struct tl_error *ret_error)
{
    struct op_single *single;
    enum tl_status status = create_send_of(worker, key, step, tensor, timeout_ns, &single, ret_error);
    if (status != TL_OK) return status;
    struct tl_completion completion;
    return run_single(single, &completion, ret_error);
}

enum tl_status tl_recv_wait(struct tl_worker *worker, tl_peer_id peer, const char *key, uint64_t step,
                            const struct tl_recv_options *options, int64_t timeout_ns,
                            struct tl_completion *ret_completion, struct tl_error *ret_error)
{
    struct op_single *single;
    enum tl_status status = create_receive_of(worker, peer, key, step, options, timeout_ns, &single, ret_error);
    if (status != TL_OK) {
        *ret_completion = (struct tl_completion){
            .size_bytes = sizeof(*ret_completion), .kind = TL_OP_RECV, .path_reason = "", .status.code = status};
        if (ret_error != NULL) ret_completion->status = *ret_error;
        return status;
    }
    return run_single(single, ret_completion, ret_error);
}

struct cancel_command {
    struct tl_command command;
    tl_op_id op;
    bool is_found;
};

static void run_cancel(struct tl_command *command)
{
    struct cancel_command *cancel = TL_CONTAINER_OF(command, struct cancel_command, command);
    struct op_call *call = find_call(command->worker, cancel->op);
    if (call == NULL) {
        cancel->is_found =
            tl_subscription_cancel(command->worker, cancel->op) || tl_peer_op_cancel(command->worker, cancel->op);
    } else if (!call->is_group) {
        cancel->is_found = op_cancel(&single_of(call)->op);
    } else if (cancel->op == call->id) {
        struct tl_error error;
        tl_error_set(&error, TL_CANCELLED, "the group was cancelled");
        cancel->is_found = op_group_end(op_group_of(call), &error);
    } else {
        size_t count;
        cancel->is_found = op_cancel(&op_call_ops(call, &count)[cancel->op - call->id - 1]);
    }
}

enum tl_status tl_cancel(struct tl_worker *worker, tl_op_id op)
{
    struct cancel_command cancel = {.op = op};
    tl_worker_run(worker, &cancel.command, run_cancel);
    return cancel.is_found ? TL_OK : TL_NOT_FOUND;
}
