// SPDX-License-Identifier: Apache-2.0
/* What is asked of a worker as a whole: its names and counters, steps. */
#include <inttypes.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/struct_version.h"
#include "base/text.h"
#include "server/worker_internal.h"
#include "tensor/device.h"

static void run_command(struct tl_closure *closure)
{
    struct tl_command *command = TL_CONTAINER_OF(closure, struct tl_command, closure);
    command->is_unfinished = false;
    command->run(command);
    if (command->is_unfinished) {
        tl_loop_post(command->worker->loop, closure);
    } else {
        tl_wait_done(&command->wait);
    }
}

void tl_worker_run_inside(struct tl_worker *worker, struct tl_command *command, void (*run)(struct tl_command *command))
{
    command->worker = worker;
    command->run = run;
    command->closure.run = run_command;
    tl_wait_init(&command->wait, &worker->progress);
    tl_loop_post(worker->loop, &command->closure);
    while (!tl_wait_for(&command->wait, TL_TIME_NEVER))
        continue;
    tl_wait_fini(&command->wait);
}

void tl_worker_run(struct tl_worker *worker, struct tl_command *command, void (*run)(struct tl_command *command))
{
    tl_worker_enter(worker);
    tl_worker_run_inside(worker, command, run);
    tl_worker_leave(worker);
}

/* ----------------------------------------------------------------------------------------------------- queries -- */

const char *tl_worker_name(const struct tl_worker *worker)
{
    return worker->self.name;
}

uint64_t tl_worker_incarnation(const struct tl_worker *worker)
{
    return worker->self.incarnation;
}

const char *tl_worker_address(const struct tl_worker *worker)
{
    return worker->setup.address;
}

uint16_t tl_worker_port(const struct tl_worker *worker)
{
    return worker->setup.port;
}

enum tl_status tl_worker_progress(struct tl_worker *worker, int64_t timeout_ns)
{
    if (worker->progress.mode != TL_PROGRESS_CALLER) return TL_FAILED_PRECONDITION;
    int64_t deadline_ns = timeout_ns <= 0 ? 0 : tl_clock_deadline_ns(timeout_ns);
    tl_worker_enter(worker);
    bool is_in_time = tl_progress_step(&worker->progress, tl_progress_rounds(&worker->progress), deadline_ns);
    tl_worker_leave(worker);
    return is_in_time ? TL_OK : TL_DEADLINE_EXCEEDED;
}

struct stats_command {
    struct tl_command command;
    struct tl_worker_stats *stats;
};

void tl_worker_count(struct tl_worker *worker, struct tl_worker_stats *ret_stats)
{
    struct tl_control_stats control;
    struct tl_rendezvous_stats table;
    tl_control_get_stats(worker->control, &control);
    tl_rendezvous_get_stats(worker->table, &table);
    struct tl_engine_stats engine;
    struct tl_memory_stats memory;
    struct tl_reactor_stats reactor;
    tl_transports_get_stats(worker, &engine, &memory, &reactor);
    *ret_stats = (struct tl_worker_stats){
        .size_bytes = sizeof(*ret_stats),
        .tensors_sent = control.tensors_sent + engine.tensors_sent,
        .tensors_received = control.tensors_received + engine.tensors_received,
        .bytes_sent = control.bytes_sent + engine.bytes_sent,
        .bytes_received = control.bytes_received + engine.bytes_received,
        .bytes_copied_send = control.bytes_copied_send,
        .frames_sent = control.frames_sent + engine.slots_sent,
        .frames_received = control.frames_received + engine.slots_received,
        .requests_retried = worker->operations.requests_retried,
        .tensors_dropped = table.dropped_tensors + worker->operations.sends_dropped,
        .waiting_receivers = table.waiting_receivers,
        .held_tensors = table.held_tensors,
        .held_bytes = table.held_bytes,
        .published_tensors = table.published_tensors,
        .published_bytes = table.published_bytes,
        .open_operations = __atomic_load_n(&worker->operations.open_ops, __ATOMIC_RELAXED),
        .protocol_errors = control.protocol_errors + engine.protocol_errors,
    };
}

static void run_stats(struct tl_command *command)
{
    tl_worker_count(command->worker, TL_CONTAINER_OF(command, struct stats_command, command)->stats);
}

enum tl_status tl_worker_stats(struct tl_worker *worker, struct tl_worker_stats *ret_stats, struct tl_error *ret_error)
{
    enum tl_status status = tl_struct_check_size(ret_stats, TL_WORKER_STATS_FIRST_BYTES, "tl_worker_stats", ret_error);
    if (status != TL_OK) return status;
    struct tl_worker_stats stats;
    struct stats_command query = {.stats = &stats};
    tl_worker_run(worker, &query.command, run_stats);
    tl_struct_fill(ret_stats, &stats, sizeof(stats));
    return TL_OK;
}

/* ------------------------------------------------------------------------------------------------------- steps -- */

/* What is done one after the other. An abort begins with the values, so that no more come. */
enum step_phase { STEP_FIRST, STEP_SECOND, STEP_RECEIVES, STEP_DELIVERIES, STEP_OVER };

struct step_command {
    struct tl_command command;
    uint64_t step;
    enum step_phase phase;
    bool is_abort;
    struct tl_error status; /* why its operations end */
    uint64_t dropped_count;
};

static bool end_values(struct step_command *step)
{
    struct tl_worker *worker = step->command.worker;
    struct tl_quota *quota = tl_loop_quota(worker->loop);
    if (step->is_abort) return tl_rendezvous_abort_step(worker->table, step->step, &step->status, quota);
    return tl_rendezvous_end_step(worker->table, step->step, quota, &step->dropped_count);
}

static bool end_unstarted(struct step_command *step)
{
    struct tl_worker *worker = step->command.worker;
    uint64_t send_count = 0;
    bool is_over = tl_ops_end_unstarted(worker, step->step, &step->status, &send_count);
    if (!step->is_abort) worker->operations.sends_dropped += send_count;
    step->dropped_count += send_count;
    return is_over;
}

/* Goes on with a phase as far as the quota allows. Returns whether it is over. */
static bool run_phase(struct step_command *step)
{
    switch (step->phase) {
    case STEP_FIRST:
        return step->is_abort ? end_values(step) : end_unstarted(step);
    case STEP_SECOND:
        return step->is_abort ? end_unstarted(step) : end_values(step);
    default:
        /* The value of a delivery that ends is offered to the next receive, which must have ended before. */
        return tl_ops_fail_step(step->command.worker, step->step, step->phase == STEP_DELIVERIES, &step->status);
    }
}

/* One end or abort is carried out after the other. */
static void run_step(struct tl_command *command)
{
    struct step_command *step = TL_CONTAINER_OF(command, struct step_command, command);
    struct worker_operations *operations = &command->worker->operations;
    command->is_unfinished = true;
    if (operations->ending_step != NULL && operations->ending_step != command) return;
    operations->ending_step = command;
    while (run_phase(step))
        if (++step->phase == STEP_OVER) break;
    command->is_unfinished = step->phase < STEP_OVER;
    if (!command->is_unfinished) operations->ending_step = NULL;
}

enum tl_status tl_worker_abort_step(struct tl_worker *worker, uint64_t step, enum tl_status status, const char *message,
                                    struct tl_error *ret_error)
{
    if (status <= TL_OK || status > TL_UNAUTHENTICATED) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a step is aborted with an error, not with status %d",
                            (int)status);
    }
    size_t length = message != NULL ? strlen(message) : 0;
    if (length >= TL_ERROR_MESSAGE_BYTES || !tl_text_is_utf8(message != NULL ? message : "", length)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "the message of an aborted step is UTF-8 of at most %d bytes; this one is not",
                            TL_ERROR_MESSAGE_BYTES - 1);
    }
    struct step_command abort_step = {.step = step, .is_abort = true};
    tl_error_set(&abort_step.status, status, "%s", message != NULL ? message : "");
    tl_worker_run(worker, &abort_step.command, run_step);
    return TL_OK;
}

enum tl_status tl_worker_end_step(struct tl_worker *worker, uint64_t step, uint64_t *ret_dropped_count,
                                  struct tl_error *ret_error)
{
    (void)ret_error;
    struct step_command end_step = {.step = step};
    tl_error_set(&end_step.status, TL_CANCELLED, "step %" PRIu64 " has ended", step);
    tl_worker_run(worker, &end_step.command, run_step);
    if (ret_dropped_count != NULL) *ret_dropped_count = end_step.dropped_count;
    return TL_OK;
}
