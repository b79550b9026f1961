// SPDX-License-Identifier: Apache-2.0
/*
 * Groups: what the operations of one call with many items share.
 *
 * Happy path: one block of memory holds the group, its members, their keys, and the aliases of what is sent; one
 * closure brings it to the loop, where its members begin, as many in a round as the quota allows; each completes alone;
 * what completes in a round goes to the queue together; the completion of the group is the last. The block is freed
 * when the last completion has been taken and the loop has let go of it.
 *
 * A group is over when enough members have succeeded, when its time is up, or when all have completed. Members that are
 * open then are left alone, or ended as by a deadline or a cancel of the whole group: some in each round, so that
 * others have their turn.
 */
#include "server/transfers/operation_group.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/prefetch.h"
#include "base/text.h"

/* No more receives of a group leave for a data connection in one round: what they have touched is in the cache still
 * when their requests are composed, and the owner begins while the next ones are. */
#define ROUND_DATA_MEMBERS 64
/* Of a large group nothing is in the caches any more when its members begin. A member's tensor is brought there so many
 * members before it is needed, and the member, which names the tensor, twice as many. */
#define PREFETCHED_AHEAD 8

/* Why the open members of a group end. */
enum group_ending {
    GROUP_GOES_ON,
    GROUP_IS_LATE,  /* the deadline of all members has come; each says so by itself */
    GROUP_IS_ENDED, /* with end_error */
};

struct group_counts {
    uint64_t ok_count, dead_count, failed_count;
};

struct op_group {
    struct op_call call;
    struct op_group_options options;
    struct tl_op *ops; /* [count] */
    size_t count;
    struct tl_wait *wait; /* NULL: asynchronous form */
    void *user_data;
    struct tl_closure round_closure; /* starts and ends members */
    struct tl_cq_item item;          /* the group's completion */
    struct tl_timer over_timer;      /* for options.over_ns */
    struct tl_list starting_link;    /* in worker->operations.starting.groups, while members have not begun */
    struct tl_closure flush_closure;
    struct tl_list done; /* completions of this round */
    bool is_flush_out;   /* flush_closure is deferred */
    uint32_t done_count; /* members in `done`, which count as open operations until the flush */
    bool is_posted;      /* call.closure or round_closure is on its way to the loop */
    bool is_over;        /* its status is known */
    bool is_reported;    /* its completion is in `done`, or was */
    enum group_ending ending;
    const struct tl_error *end_error;   /* kept */
    const struct tl_error *first_error; /* the error of the first member that failed; kept; NULL: none has */
    const struct tl_error *error;       /* the group's; kept; NULL: TL_OK */
    uint64_t least_step, greatest_step; /* those of the members */
    size_t started_count;               /* members that have begun */
    size_t ended_count;                 /* members that were ended, as `ending` says */
    size_t scanned_count;               /* how many tl_ops_end_unstarted has looked at, in the scan with this number */
    uint64_t scan;
    size_t open_count;            /* members that have not completed */
    struct group_counts counts;   /* counts members that have completed */
    struct group_counts reported; /* `counts` when the completion was reported; the rest may go on after it */
    int64_t duration_ns;
    int64_t round_duration_ns; /* what members have taken that complete in this round; valid while is_flush_out */
    size_t
        use_count; /* why the loop needs it: open members, closures under way, the completion that was not reported */
    size_t reference_count; /* completions that were not taken, and the loop while it needs the group; atomic */
};

struct op_group *op_group_of(struct op_call *call)
{
    return TL_CONTAINER_OF(call, struct op_group, call);
}

struct tl_op *op_group_members(struct op_group *group, size_t *ret_count)
{
    *ret_count = group->count;
    return group->ops;
}

/* ------------------------------------------------------------------------------------------------------ memory -- */

static void put_references(struct op_group *group, size_t count)
{
    if (__atomic_sub_fetch(&group->reference_count, count, __ATOMIC_ACQ_REL) > 0) return;
    tl_error_drop(group->error);
    free(group);
}

/* The loop does not need the group any more for one of its reasons. The group may be gone when this returns. */
static void end_use(struct op_group *group)
{
    if (--group->use_count > 0) return;
    struct tl_worker *worker = group->call.worker;
    tl_error_drop(group->end_error);
    tl_error_drop(group->first_error);
    put_references(group, 1);
    __atomic_fetch_sub(&worker->operations.open_ops, 1, __ATOMIC_RELEASE);
}

void op_group_hold(struct op_group *group)
{
    group->use_count++;
}

void op_group_let_go(struct op_group *group)
{
    end_use(group);
}

/* ------------------------------------------------------------------------------------------------- completions -- */

static void read_group(struct op_group *group, struct tl_completion *ret_completion)
{
    memset(ret_completion, 0, sizeof(*ret_completion));
    ret_completion->size_bytes = sizeof(*ret_completion);
    ret_completion->op = group->call.id;
    ret_completion->kind = group->options.kind;
    ret_completion->user_data = group->user_data;
    if (group->error != NULL) ret_completion->status = *group->error;
    ret_completion->path_reason = "";
    ret_completion->duration_ns = group->duration_ns;
    ret_completion->ok_count = group->reported.ok_count;
    ret_completion->dead_count = group->reported.dead_count;
    ret_completion->failed_count = group->reported.failed_count;
}

static void take_group(struct tl_cq_item *item, struct tl_completion *ret_completion)
{
    struct op_group *group = TL_CONTAINER_OF(item, struct op_group, item);
    read_group(group, ret_completion);
    put_references(group, 1);
}

static void take_member(struct tl_cq_item *item, struct tl_completion *ret_completion)
{
    struct tl_op *op = TL_CONTAINER_OF(item, struct tl_op, item);
    struct op_group *group = op_group_of(op->call);
    size_t place = (size_t)(op - group->ops);
    op_read(op, group->call.id + 1 + place, place, ret_completion);
    put_references(group, 1);
}

/* So many operations are not open any more. */
static void count_closed(struct op_group *group, uint64_t count)
{
    __atomic_fetch_sub(&group->call.worker->operations.open_ops, count, __ATOMIC_RELAXED);
}

static void flush(struct tl_closure *closure)
{
    struct op_group *group = TL_CONTAINER_OF(closure, struct op_group, flush_closure);
    group->is_flush_out = false;
    count_closed(group, group->done_count);
    group->done_count = 0;
    tl_cq_push_all(group->call.cq, &group->done, &group->call.worker->progress);
    end_use(group);
}

/* Adds a completion to those of this round. */
static void report(struct op_group *group, struct tl_cq_item *item)
{
    tl_list_push_back(&group->done, &item->link);
    if (group->is_flush_out) return;
    group->is_flush_out = true;
    group->use_count++;
    tl_loop_defer(group->call.worker->loop, &group->flush_closure);
}

static void report_member(struct op_group *group, struct tl_op *op)
{
    bool is_quiet = group->options.is_quiet && op->error == NULL;
    op->item.take = take_member;
    if (group->call.cq != NULL && !is_quiet) {
        group->done_count++;
        report(group, &op->item);
        return;
    }
    count_closed(group, 1);
    if (group->call.cq != NULL) put_references(group, 1); /* otherwise the caller reads it when the group is over */
}

static void report_group(struct op_group *group)
{
    group->is_reported = true;
    group->reported = group->counts;
    group->duration_ns = tl_clock_now_ns() - group->call.submitted_ns;
    group->item.take = take_group;
    if (group->call.cq != NULL) {
        report(group, &group->item);
    } else {
        tl_wait_done(group->wait);
    }
    end_use(group);
}

/* ------------------------------------------------------------------------------------------------------ ending -- */

static void post(struct op_group *group)
{
    if (group->is_posted) return;
    group->is_posted = true;
    group->use_count++;
    tl_loop_post(group->call.worker->loop, &group->round_closure);
}

static void begin_ending(struct op_group *group, enum group_ending ending, const struct tl_error *error)
{
    if (group->ending != GROUP_GOES_ON) return;
    group->ending = ending;
    group->end_error = error != NULL ? tl_error_keep(error) : NULL;
    post(group);
}

/* The group is over with this error, NULL: TL_OK. */
static void conclude(struct op_group *group, const struct tl_error *error)
{
    struct tl_error rest;
    group->is_over = true;
    group->error = error != NULL ? tl_error_keep(error) : NULL;
    tl_timers_disarm(tl_loop_timers(group->call.worker->loop), &group->over_timer);
    if (group->open_count == 0) return;
    if (group->options.rest == TL_REST_LEAVE) {
        report_group(group);
        return;
    }
    tl_error_set(&rest, TL_CANCELLED, "the group was over when %" PRIu64 " of %zu had come", group->counts.ok_count,
                 group->count);
    begin_ending(group, GROUP_IS_ENDED, &rest);
}

static bool has_enough(const struct op_group *group)
{
    size_t wanted = group->options.min_count > 0 ? group->options.min_count : group->count;
    return group->counts.ok_count >= wanted;
}

static void time_is_up(struct tl_timer *timer)
{
    struct op_group *group = TL_CONTAINER_OF(timer, struct op_group, over_timer);
    char waited[32];
    struct tl_error error;
    tl_text_format_duration(tl_clock_now_ns() - group->call.submitted_ns, waited, sizeof(waited));
    tl_error_set(&error, TL_DEADLINE_EXCEEDED, "%" PRIu64 " of %zu had come within %s", group->counts.ok_count,
                 group->count, waited);
    conclude(group, group->first_error != NULL ? tl_error_kept(group->first_error) : &error);
}

bool op_group_end(struct op_group *group, const struct tl_error *error)
{
    if (group->open_count == 0 || group->ending != GROUP_GOES_ON) return false;
    begin_ending(group, GROUP_IS_ENDED, error);
    return true;
}

void op_group_late(struct op_group *group)
{
    begin_ending(group, GROUP_IS_LATE, NULL);
}

/* Members that complete in one round share a look at the clock, which would be a twentieth of their cost. */
static int64_t duration_of_member(struct op_group *group)
{
    if (!group->is_flush_out) group->round_duration_ns = tl_clock_now_ns() - group->call.submitted_ns;
    return group->round_duration_ns;
}

static void count_member(struct op_group *group, const struct tl_op *op)
{
    group->open_count--;
    if (op->error != NULL) {
        group->counts.failed_count++;
        if (group->first_error == NULL) group->first_error = tl_error_keep(tl_error_kept(op->error));
        return;
    }
    group->counts.ok_count++;
    if (op->has_arrived && tl_tensor_meta_data(op->tensor)->is_dead) group->counts.dead_count++;
}

void op_group_member_over(struct op_group *group, struct tl_op *op)
{
    op->duration_ns = duration_of_member(group);
    count_member(group, op);
    bool is_last = group->open_count == 0;
    report_member(group, op);
    if (is_last) {
        op_call_unregister(&group->call);
        tl_list_remove(&group->starting_link);
    }
    if (!group->is_over && (is_last || has_enough(group)))
        conclude(group, has_enough(group) ? NULL : tl_error_kept(group->first_error));
    if (is_last && !group->is_reported) report_group(group);
    end_use(group);
}

/* ------------------------------------------------------------------------------------------------------ rounds -- */

static bool is_on_data_connection(const struct tl_op *op)
{
    return op->kind == TL_OP_RECV && op->receive.request.carrier == TL_CARRIER_SESSION;
}

/* A member that was ended before it began may belong to the program already. */
static void prefetch_ahead(const struct op_group *group, size_t place)
{
    if (place + 2 * PREFETCHED_AHEAD < group->count)
        tl_prefetch(&group->ops[place + 2 * PREFETCHED_AHEAD], sizeof(struct tl_op));
    if (place + PREFETCHED_AHEAD >= group->count) return;
    const struct tl_op *later = &group->ops[place + PREFETCHED_AHEAD];
    if (later->state == OP_NEW && later->tensor != NULL) tl_tensor_prefetch(later->tensor);
}

/* Starts members, as many as the quota allows. A member that copies a value of this worker uses more of it. */
static void start_members(struct op_group *group, struct tl_quota *quota)
{
    size_t request_count = 0;
    while (tl_quota_left(quota) > 0 && request_count < ROUND_DATA_MEMBERS && group->started_count < group->count) {
        prefetch_ahead(group, group->started_count);
        struct tl_op *op = &group->ops[group->started_count++];
        tl_quota_use(quota, 1);
        if (op->state == OP_NEW) op_start(op, group->end_error != NULL ? tl_error_kept(group->end_error) : NULL);
        request_count += is_on_data_connection(op);
    }
    tl_ops_send(group->call.worker);
    if (group->started_count == group->count) tl_list_remove(&group->starting_link);
}

/* Ends members that have begun, at most `count`. Returns how many were looked at. */
static size_t end_members(struct op_group *group, size_t count)
{
    size_t done = 0;
    while (done < count && group->ended_count < group->started_count) {
        struct tl_op *op = &group->ops[group->ended_count++];
        done++;
        if (op->state == OP_COMPLETE) continue;
        if (group->ending == GROUP_IS_LATE) {
            op_end_late(op);
        } else {
            op_end(op, tl_error_kept(group->end_error));
        }
    }
    return done;
}

/* Starts and ends members, as many as the quota allows. Returns whether none is left. */
static bool run_members(struct op_group *group)
{
    struct tl_quota *quota = tl_loop_quota(group->call.worker->loop);
    start_members(group, quota);
    if (group->ending != GROUP_GOES_ON) tl_quota_use(quota, (uint32_t)end_members(group, tl_quota_left(quota)));
    bool is_ending = group->ending != GROUP_GOES_ON && group->ended_count < group->started_count;
    return group->started_count == group->count && !is_ending;
}

static void run_round(struct tl_closure *closure)
{
    struct op_group *group = TL_CONTAINER_OF(closure, struct op_group, round_closure);
    group->is_posted = false;
    if (!run_members(group)) post(group);
    end_use(group);
}

bool op_group_end_some(struct op_group *group, const struct tl_error *error)
{
    begin_ending(group, GROUP_IS_ENDED, error);
    return run_members(group);
}

/* The loop takes the group. */
static void begin(struct tl_closure *closure)
{
    struct op_group *group = TL_CONTAINER_OF(closure, struct op_group, call.closure);
    struct tl_worker *worker = group->call.worker;
    tl_list_push_back(&worker->operations.starting.groups, &group->starting_link);
    bool has_memory =
        op_call_register(&group->call, true) &&
        tl_timers_arm(tl_loop_timers(worker->loop), &group->over_timer, group->over_timer.due_ns) == TL_OK;
    if (!has_memory) begin_ending(group, GROUP_IS_ENDED, &op_out_of_memory);
    if (group->count == 0) {
        op_call_unregister(&group->call);
        tl_list_remove(&group->starting_link);
        conclude(group, NULL);
        report_group(group);
    }
    run_round(&group->round_closure);
}

/* Ends those of one group. Returns false when others are left. */
static bool end_unstarted(struct op_group *group, uint64_t step, const struct tl_error *status, uint64_t *send_count)
{
    struct tl_quota *quota = tl_loop_quota(group->call.worker->loop);
    struct worker_operations *operations = &group->call.worker->operations;
    if (group->scan != operations->scan_count) group->scanned_count = 0;
    group->scan = operations->scan_count;
    if (group->scanned_count < group->started_count) group->scanned_count = group->started_count;
    for (; group->scanned_count < group->count; group->scanned_count++) {
        struct tl_op *op = &group->ops[group->scanned_count];
        if (tl_quota_left(quota) == 0) return false;
        tl_quota_use(quota, 1);
        operations->step_visits++;
        if (op->state != OP_NEW || op_step(op) != step) continue;
        if (op->kind == TL_OP_SEND) (*send_count)++;
        op_end(op, status);
    }
    return true;
}

bool tl_ops_end_unstarted(struct tl_worker *worker, uint64_t step, const struct tl_error *status, uint64_t *send_count)
{
    bool is_over = true;
    TL_LIST_FOREACH_SAFE(&worker->operations.starting.groups, link)
    {
        struct op_group *group = TL_CONTAINER_OF(link, struct op_group, starting_link);
        if (step < group->least_step || step > group->greatest_step) continue;
        op_group_hold(group);
        is_over = end_unstarted(group, step, status, send_count);
        op_group_let_go(group);
        if (!is_over) break;
    }
    worker->operations.scan_count += is_over;
    return is_over;
}

/* -------------------------------------------------------------------------------------------------------- life -- */

enum tl_status op_group_create(struct tl_worker *worker, size_t count, size_t more_bytes,
                               const struct op_group_options *options, struct op_group **ret_group, char **ret_more,
                               struct tl_error *ret_error)
{
    size_t ops_bytes, bytes;
    struct op_group *group = NULL;
    if (!__builtin_mul_overflow(count, sizeof(struct tl_op), &ops_bytes) &&
        !__builtin_add_overflow(ops_bytes, sizeof(*group) + more_bytes, &bytes))
        group = malloc(bytes);
    if (group == NULL)
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a group of %zu operations", count);
    memset(group, 0, sizeof(*group));
    op_call_init(&group->call, worker, options->timeout_ns, begin);
    group->round_closure.run = run_round;
    group->ops = (struct tl_op *)(group + 1);
    group->count = count;
    group->options = *options;
    group->over_timer.fire = time_is_up;
    group->over_timer.due_ns = options->over_ns > 0 ? tl_clock_deadline_ns(options->over_ns) : TL_TIME_NEVER;
    group->flush_closure.run = flush;
    tl_list_init(&group->starting_link);
    tl_list_init(&group->done);
    group->least_step = UINT64_MAX;
    group->open_count = count;
    *ret_more = (char *)(group->ops + count);
    *ret_group = group;
    return TL_OK;
}

struct tl_op *op_group_add(struct op_group *group, size_t place)
{
    struct tl_op *op = &group->ops[place];
    memset(op, 0, sizeof(*op));
    op->call = &group->call;
    return op;
}

void op_group_note_step(struct op_group *group, uint64_t step)
{
    if (step < group->least_step) group->least_step = step;
    if (step > group->greatest_step) group->greatest_step = step;
}

struct tl_op *op_group_member(struct op_group *group, size_t place)
{
    return &group->ops[place];
}

void op_group_discard(struct op_group *group)
{
    free(group);
}

/* Each member is a reason to use the group, and so are the first closure and the completion of the group. */
static tl_op_id submit(struct op_group *group)
{
    size_t count = group->count;
    group->use_count = count + 2;
    group->reference_count = count + 2;
    group->is_posted = true;
    return op_call_submit(&group->call, (uint64_t)count + 1);
}

tl_op_id op_group_submit(struct op_group *group, struct tl_cq *cq, void *user_data)
{
    group->call.cq = cq;
    group->user_data = user_data;
    return submit(group);
}

enum tl_status op_group_run(struct op_group *group, struct tl_completion *ret_members, struct tl_error *ret_error)
{
    struct tl_worker *worker = group->call.worker;
    struct tl_completion completion;
    struct tl_wait wait;
    tl_worker_enter(worker);
    tl_wait_init(&wait, &worker->progress);
    group->wait = &wait;
    submit(group);
    while (!tl_wait_for(&wait, TL_TIME_NEVER))
        continue;
    tl_wait_fini(&wait);
    tl_worker_leave(worker);
    for (size_t i = 0; i < group->count; i++)
        take_member(&group->ops[i].item, ret_members != NULL ? &ret_members[i] : &completion);
    take_group(&group->item, &completion);
    return tl_error_copy(ret_error, &completion.status);
}
