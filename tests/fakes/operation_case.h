// SPDX-License-Identifier: Apache-2.0
/* Sends and receives alone: the table of values, peers, queues and the loop are fakes. For one test program each. */
#ifndef FAKES_OPERATION_CASE_H
#define FAKES_OPERATION_CASE_H

#include <check.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "fakes/fake_clock.h"

#undef fail /* check.h has a macro of this name */
#include "server/transfers/operation.c"
#include "server/transfers/operation_group.c"
#include "server/transfers/operation_place.c"
#include "server/transfers/operation_receive.c"
#include "server/transfers/operation_send.c"
#include "base/loop_core.h"
#include "fakes/calls.h"

static struct tl_worker worker;
static struct tl_timers timers;
static struct tl_tensor *tensor;
static struct tl_op *op;
static struct tl_error error;
static const struct tl_error why = {.code = TL_UNAVAILABLE, .message = "why"};
static int the_peer, the_borrow; /* stand for a peer and a borrow */
static bool is_self, can_take_back, can_cancel;
static bool is_crowd; /* so many operations that calls are only counted */
static size_t fetch_count, sent_count;
static size_t table_lock_count; /* by tl_rendezvous_send_many */
static bool is_on_session;      /* requests leave over a data connection */
static enum tl_status send_status, step_status;
static struct tl_tensor *value;           /* the table's reference to what is sent */
static struct tl_tensor *values[4096];    /* the same for each in a crowd */
static struct tl_sender *reserved;        /* whose value is reserved for the receive */
static struct tl_closure *posted;         /* to the loop; the latest */
static struct tl_closure *closures[4096]; /* all that were posted and not taken by run_round_of_loop */
static size_t closure_count, all_closure_count;
static struct tl_closure *deferred;
static struct tl_completion pushed[4096]; /* by a group */
static size_t pushed_count;
static pthread_mutex_t posted_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t posted_came = PTHREAD_COND_INITIALIZER;

/* ------------------------------------------------------------------------------------------------------ fakes -- */

struct tl_timers *tl_loop_timers(struct tl_loop *loop)
{
    (void)loop;
    return &timers;
}

static struct tl_quota loop_quota;

struct tl_quota *tl_loop_quota(struct tl_loop *loop)
{
    (void)loop;
    return &loop_quota;
}

static inline void note_posted(struct tl_closure *closure)
{
    posted = closure;
    all_closure_count++;
    if (closure_count < TL_ARRAY_COUNT(closures)) closures[closure_count++] = closure;
}

void tl_loop_post(struct tl_loop *loop, struct tl_closure *closure)
{
    (void)loop;
    note_posted(closure);
}

void tl_loop_defer(struct tl_loop *loop, struct tl_closure *closure)
{
    (void)loop;
    deferred = closure;
}

void tl_progress_post(struct tl_progress_engine *progress, struct tl_closure *closure)
{
    (void)progress;
    pthread_mutex_lock(&posted_mutex);
    note_posted(closure);
    pthread_cond_signal(&posted_came);
    pthread_mutex_unlock(&posted_mutex);
}

/* Waits until a closure was posted, by whichever thread, and runs it as the loop does. */
static inline void run_posted(void)
{
    pthread_mutex_lock(&posted_mutex);
    while (posted == NULL)
        pthread_cond_wait(&posted_came, &posted_mutex);
    struct tl_closure *closure = posted;
    posted = NULL;
    pthread_mutex_unlock(&posted_mutex);
    tl_loop_core_enter();
    closure->run(closure);
    tl_loop_core_leave();
}

/* Runs what was posted until now, then what was deferred meanwhile: one round of the loop. */
static inline void run_round_of_loop(void)
{
    struct tl_closure *round[TL_ARRAY_COUNT(closures)];
    size_t count = closure_count;
    memcpy(round, closures, count * sizeof(round[0]));
    closure_count = 0;
    for (size_t i = 0; i < count; i++) {
        tl_quota_renew(&loop_quota);
        round[i]->run(round[i]);
    }
    struct tl_closure *last = deferred;
    deferred = NULL;
    if (last != NULL) last->run(last);
}

void tl_wait_init(struct tl_wait *wait, struct tl_progress_engine *progress)
{
    (void)wait, (void)progress;
}

void tl_wait_fini(struct tl_wait *wait)
{
    (void)wait;
}

bool tl_wait_for(struct tl_wait *wait, int64_t deadline_ns)
{
    (void)wait, (void)deadline_ns;
    return true;
}

void tl_wait_done(struct tl_wait *wait)
{
    (void)wait;
}

void tl_worker_run(struct tl_worker *of, struct tl_command *command, void (*run)(struct tl_command *command))
{
    command->worker = of;
    run(command);
}

enum tl_status tl_cq_attach(struct tl_cq *cq, struct tl_progress_engine *progress, struct tl_error *ret_error)
{
    (void)cq, (void)progress, (void)ret_error;
    return TL_OK;
}

void tl_cq_post(struct tl_cq *cq, struct tl_progress_engine *progress, struct tl_closure *closure)
{
    (void)cq;
    tl_progress_post(progress, closure);
}

void tl_cq_push(struct tl_cq *cq, struct tl_cq_item *item, const struct tl_progress_engine *progress)
{
    (void)cq, (void)progress;
    ck_assert_ptr_eq(item, &op->item);
    note("complete:");
    note(op->error != NULL ? op->error->message : "ok");
}

/* The completions of a group in one round, in their order. */
void tl_cq_push_all(struct tl_cq *cq, struct tl_list *items, const struct tl_progress_engine *progress)
{
    (void)cq, (void)progress;
    struct tl_list *link;
    while ((link = tl_list_pop_front(items)) != NULL) {
        struct tl_cq_item *item = TL_CONTAINER_OF(link, struct tl_cq_item, link);
        ck_assert_uint_lt(pushed_count, TL_ARRAY_COUNT(pushed));
        item->take(item, &pushed[pushed_count++]);
    }
}

static void post_to_loop(const struct tl_executor *executor, struct tl_closure *closure)
{
    (void)executor;
    note_posted(closure);
}

enum tl_status tl_rendezvous_send(struct tl_rendezvous *table, const char *key, uint64_t step, struct tl_tensor *sent,
                                  struct tl_sender *sender, struct tl_error *ret_error)
{
    (void)table, (void)key, (void)step, (void)sender;
    if (!is_crowd) note("send");
    if (send_status != TL_OK) return tl_error_set(ret_error, send_status, "full");
    value = tl_tensor_get(sent);
    if (is_crowd) values[sent_count] = value;
    sent_count++;
    return TL_OK;
}

void tl_rendezvous_send_many(struct tl_rendezvous *table, const struct tl_rendezvous_value *sent, size_t count,
                             struct tl_error *ret_statuses)
{
    table_lock_count++;
    for (size_t i = 0; i < count; i++)
        ret_statuses[i].code =
            tl_rendezvous_send(table, sent[i].key, sent[i].step, sent[i].tensor, sent[i].sender, &ret_statuses[i]);
}

bool tl_rendezvous_unsend(struct tl_rendezvous *table, struct tl_sender *sender)
{
    (void)table, (void)sender;
    if (!is_crowd) note("unsend");
    return can_take_back;
}

void tl_rendezvous_receive(struct tl_rendezvous *table, struct tl_receiver *receiver)
{
    (void)table, (void)receiver;
    note("receive");
}

bool tl_rendezvous_cancel(struct tl_rendezvous *table, struct tl_receiver *receiver)
{
    (void)table, (void)receiver;
    return can_cancel;
}

struct tl_sender *tl_rendezvous_reserved_sender(struct tl_rendezvous *table, const struct tl_request_id *id)
{
    (void)table, (void)id;
    return reserved;
}

void tl_rendezvous_acknowledge(struct tl_rendezvous *table, const struct tl_request_id *id)
{
    (void)table, (void)id;
    note("acknowledge");
}

void tl_rendezvous_release(struct tl_rendezvous *table, const struct tl_request_id *id)
{
    (void)table, (void)id;
    note("release");
}

enum tl_status tl_rendezvous_check_step(struct tl_rendezvous *table, uint64_t step, struct tl_error *ret_error)
{
    (void)table, (void)step;
    return step_status == TL_OK ? TL_OK : tl_error_set(ret_error, step_status, "aborted");
}

struct tl_peer *tl_peer_acquire(struct tl_worker *of, tl_peer_id id)
{
    (void)of, (void)id;
    return (struct tl_peer *)&the_peer;
}

void tl_peer_retain(struct tl_peer *peer)
{
    (void)peer;
}

void tl_peer_release(struct tl_peer *peer)
{
    (void)peer;
}

bool tl_peer_is_self(const struct tl_peer *peer)
{
    (void)peer;
    return is_self;
}

const char *tl_peer_copy_name(const struct tl_peer *peer, char ret_name[TL_MAX_NAME_BYTES])
{
    (void)peer;
    snprintf(ret_name, TL_MAX_NAME_BYTES, "/job:ps/task:1");
    return ret_name;
}

const char *tl_peer_name(const struct tl_peer *peer)
{
    (void)peer;
    return "/job:ps/task:1";
}

void tl_peer_format_state(const struct tl_peer *peer, char *buffer, size_t capacity)
{
    (void)peer;
    snprintf(buffer, capacity, "down");
}

void tl_session_fetch_done(struct tl_fetch *fetch, const struct tl_error *result)
{
    (void)fetch, (void)result;
}

void tl_peer_request_init(struct tl_peer_request *request, const struct tl_request_ops *ops)
{
    *request = (struct tl_peer_request){.is_probe = false};
    tl_fetch_init(&request->fetch, &ops->on_loop);
    tl_list_init(&request->closure.link);
}

void tl_peer_fetch(struct tl_peer *peer, struct tl_peer_request *request)
{
    (void)peer;
    fetch_count++;
    if (is_on_session) request->carrier = TL_CARRIER_SESSION;
    if (!is_crowd) note("fetch");
}

void tl_peer_fetch_on_link(struct tl_peer *peer, struct tl_peer_request *request, const char *reason)
{
    (void)peer, (void)request, (void)reason;
    note("fetch_on_link");
}

bool tl_peer_cancel(struct tl_peer_request *request)
{
    (void)request;
    return can_cancel;
}

void tl_peer_fetch_done(struct tl_peer_request *request)
{
    (void)request;
}

void tl_peer_give_up(struct tl_peer_request *request)
{
    (void)request;
    if (!is_crowd) note("give_up");
}

enum tl_status tl_borrow_create(struct tl_worker *of, struct tl_tensor *base, void (*returned_)(void *context),
                                void *context, struct tl_borrow **ret_borrow, struct tl_tensor **ret_tensor,
                                struct tl_error *ret_error)
{
    (void)of, (void)returned_, (void)context, (void)ret_error;
    note("borrow");
    *ret_borrow = (struct tl_borrow *)&the_borrow;
    *ret_tensor = tl_tensor_get(base);
    return TL_OK;
}

bool tl_borrow_forget(struct tl_borrow *borrow)
{
    (void)borrow;
    return true;
}

bool tl_subscription_cancel(struct tl_worker *of, tl_op_id id)
{
    (void)of, (void)id;
    return false;
}

bool tl_peer_op_cancel(struct tl_worker *of, tl_op_id id)
{
    (void)of, (void)id;
    return false;
}

static inline void setup(void)
{
    const uint64_t dims[] = {4};
    tl_timers_init(&timers);
    worker.executor.post = post_to_loop;
    tl_list_init(&worker.operations.starting.groups);
    worker.executor.is_only = true;
    ck_assert_int_eq(tl_tensor_create(TL_U8, 1, dims, &tensor, &error), TL_OK);
}

static inline void adopt(struct op_single *single)
{
    op = &single->op;
    single->call.cq = (struct tl_cq *)&worker;
}

static inline void create_send(void)
{
    struct op_single *single;
    ck_assert_int_eq(create_send_of(&worker, "key", 1, tensor, TL_NS_PER_SEC, &single, &error), TL_OK);
    adopt(single);
}

static inline void create_receive(void)
{
    struct op_single *single;
    ck_assert_int_eq(create_receive_of(&worker, 1, "key", 1, NULL, TL_NS_PER_SEC, &single, &error), TL_OK);
    adopt(single);
}

/* The operation is at the loop, in whatever state. */
static inline void register_op(void)
{
    ck_assert(op_call_register(op->call, false));
}

/* Runs the closure that takes the operation to the loop. */
static inline void start_op(void)
{
    op->call->closure.run(&op->call->closure);
}

static inline void free_op(struct tl_op *of)
{
    op_drop_error(of);
    free(TL_CONTAINER_OF(of, struct op_single, op));
}

#endif
