// SPDX-License-Identifier: Apache-2.0
/*
 * The worker: opens everything in order, closes it in the reverse order, and answers what is asked of it as a whole.
 *
 * Open: configuration -> who we are -> loop -> table -> control plane -> peers -> files published -> listen -> driver.
 * Nothing runs before the driver starts, so a failure anywhere before it undoes what there is without any waiting.
 * Close: new work is refused, receives end, requests that wait are refused, running transfers get until the deadline,
 * then the table fails what is left, every operation has completed, and the parts are freed.
 */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/random.h"
#include "base/text.h"
#include "server/completion_queue.h"
#include "server/worker_internal.h"
#include "tensor/tensor_file.h"

#define ABORTED_STEPS_KEPT 1024

static void run_command(struct tl_letter *letter)
{
    struct tl_command *command = TL_CONTAINER_OF(letter, struct tl_command, letter);
    command->run(command);
    tl_wait_done(&command->wait);
}

void tl_worker_run(struct tl_worker *worker, struct tl_command *command, void (*run)(struct tl_command *command))
{
    command->worker = worker;
    command->run = run;
    command->letter.deliver = run_command;
    tl_worker_enter(worker);
    tl_wait_init(&command->wait, &worker->driver);
    tl_loop_post(worker->loop, &command->letter);
    while (!tl_wait_for(&command->wait, TL_TIME_NEVER))
        continue;
    tl_wait_fini(&command->wait);
    tl_worker_leave(worker);
}

/* ------------------------------------------------------------------------------------------------------ opening -- */

static enum tl_status read_config(const struct tl_worker_options *options, struct tl_config **ret_config,
                                  struct tl_error *ret_error)
{
    if (options->config_path != NULL) return tl_config_read(options->config_path, ret_config, ret_error);
    if (options->config_json != NULL) {
        return tl_config_parse(options->config_json, strlen(options->config_json), "config_json", NULL, ret_config,
                               ret_error);
    }
    const char *text = getenv("TF_CONFIG");
    if (text == NULL) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "no configuration: give a file or text, or set the environment variable TF_CONFIG");
    }
    return tl_config_parse_tf(text, strlen(text), ret_config, ret_error);
}

/* Decides which task this process is, and its settings. */
static enum tl_status find_self(struct tl_worker *worker, const struct tl_worker_options *options,
                                struct tl_error *ret_error)
{
    const struct tl_config *config = worker->config;
    if (options->is_client) {
        worker->settings = config->tasks[0].settings;
        return TL_OK;
    }
    if (options->job != NULL) {
        enum tl_status status = tl_config_find_task(config, options->job, options->task, &worker->task, ret_error);
        if (status != TL_OK) return status;
    } else if (config->self != NULL) {
        worker->task = config->self;
    } else {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s does not say which task this process is; give job and task", config->source);
    }
    worker->settings = worker->task->settings;
    snprintf(worker->self.name, sizeof(worker->self.name), "%s", worker->task->name);
    return TL_OK;
}

/* No call is without a deadline. A link that ends is replaced, and its requests go on where they were, so that this one
 * costs nothing; it ends what keep-alive cannot see. */
#define MAX_LINK_AGE_NS (24 * 3600 * TL_NS_PER_SEC)

static enum tl_status create_control(struct tl_worker *worker, struct tl_error *ret_error)
{
    const struct tl_settings *settings = &worker->settings;
    const struct tl_control_options options = {
        .self = worker->self,
        .chunk_bytes = settings->chunk_bytes,
        .inflight_bytes = settings->inflight_bytes,
        .max_calls = settings->connections,
        .connect_timeout_ns = settings->connect_timeout_ns,
        .max_link_age_ns = MAX_LINK_AGE_NS,
        .request_timeout_ns = settings->request_timeout_ns,
        .keepalive_ns = settings->keepalive_ns,
        .keepalive_timeout_ns = settings->keepalive_timeout_ns,
        .handlers = &tl_worker_handlers,
        .worker = worker,
    };
    return tl_control_create(worker->loop, &options, &worker->control, ret_error);
}

static enum tl_status publish_files(struct tl_worker *worker, struct tl_error *ret_error)
{
    for (size_t i = 0; worker->task != NULL && i < worker->settings.publish_count; i++) {
        struct tl_tensor_list list;
        enum tl_status status = tl_tensor_file_read(worker->settings.publish[i], &list, ret_error);
        if (status != TL_OK) return status;
        for (size_t t = 0; status == TL_OK && t < list.count; t++) {
            uint64_t publication;
            status = tl_rendezvous_publish(worker->table, list.items[t].name, 0, list.items[t].tensor, &publication,
                                           ret_error);
        }
        tl_tensor_list_fini(&list);
        if (status != TL_OK) return status;
    }
    return TL_OK;
}

static enum tl_status start(struct tl_worker *worker, struct tl_error *ret_error)
{
    if (worker->task == NULL || worker->task->address == NULL) return TL_OK;
    const char *listen = worker->settings.listen != NULL ? worker->settings.listen : worker->task->address;
    enum tl_status status = tl_control_start(worker->control, listen, &worker->port, ret_error);
    if (status != TL_OK) return status;
    tl_control_set_health(worker->control, "", TL_HEALTH_SERVING);
    tl_control_set_health(worker->control, "tensorlane.v1.Transfer", TL_HEALTH_SERVING);
    tl_control_set_health(worker->control, "tensorlane.v1.Cluster", TL_HEALTH_SERVING);
    return TL_OK;
}

/* Frees what was opened; the driver does not run and nothing is in flight. */
static void worker_free(struct tl_worker *worker)
{
    if (worker->table != NULL) {
        struct tl_error closed;
        tl_error_set(&closed, TL_CANCELLED, "the worker was closed");
        tl_rendezvous_close(worker->table, &closed);
    }
    if (worker->peers != NULL) tl_peers_destroy(worker);
    tl_control_destroy(worker->control);
    tl_rendezvous_destroy(worker->table);
    if (worker->loop != NULL) tl_timers_disarm(tl_loop_timers(worker->loop), &worker->expire_timer);
    tl_loop_destroy(worker->loop);
    tl_source_fini(worker);
    tl_config_destroy(worker->config);
    free(worker);
}

static enum tl_status build(struct tl_worker *worker, const struct tl_worker_options *options,
                            struct tl_error *ret_error)
{
    enum tl_status status = read_config(options, &worker->config, ret_error);
    if (status == TL_OK) status = find_self(worker, options, ret_error);
    if (status == TL_OK) status = tl_loop_create(&worker->loop, ret_error);
    if (status != TL_OK) return status;
    const struct tl_rendezvous_limits limits = {.waiting_receivers = worker->settings.waiting_receivers,
                                                .held_bytes = worker->settings.held_bytes,
                                                .aborted_steps = ABORTED_STEPS_KEPT};
    status = tl_rendezvous_create(&limits, &worker->table, ret_error);
    if (status == TL_OK) status = create_control(worker, ret_error);
    if (status == TL_OK) status = tl_peers_create(worker, ret_error);
    if (status == TL_OK) status = publish_files(worker, ret_error);
    return status;
}

/* gRPC takes fresh memory for every piece it receives. Until a program has freed one large block, glibc returns such
 * memory to the kernel each time and has it zeroed again, which halves the rate of large tensors. Freeing one block as
 * large as glibc's own adaptation goes (32 MiB) makes it keep up to twice that; a program that has set these thresholds
 * itself keeps its own. */
static void teach_allocator(void)
{
    void *volatile block = malloc((size_t)31 << 20);
    free(block);
}

static void stop_now(struct tl_worker *worker);

enum tl_status tl_worker_open(const struct tl_worker_options *options, struct tl_worker **ret_worker,
                              struct tl_error *ret_error)
{
    if (options->size_bytes != sizeof(*options)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "size_bytes must be sizeof(struct tl_worker_options)");
    }
    struct tl_worker *worker = calloc(1, sizeof(*worker));
    if (worker == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a worker");
    static pthread_once_t taught = PTHREAD_ONCE_INIT;
    pthread_once(&taught, teach_allocator);
    worker->opened_ns = tl_clock_now_ns();
    worker->self.incarnation = tl_random_u64();
    tl_list_init(&worker->peer_waits);
    enum tl_status status = tl_source_init(worker, ret_error);
    if (status == TL_OK) status = build(worker, options, ret_error);
    if (status == TL_OK) status = start(worker, ret_error);
    if (status != TL_OK) {
        worker_free(worker);
        return status;
    }
    tl_peers_start(worker);
    status = tl_driver_init(&worker->driver, worker->loop, options->progress, ret_error);
    if (status != TL_OK) {
        stop_now(worker);
        worker_free(worker);
        return status;
    }
    *ret_worker = worker;
    return TL_OK;
}

/* ------------------------------------------------------------------------------------------------------ closing -- */

static void control_stopped(void *context)
{
    struct tl_worker *worker = context;
    worker->is_stopped = true;
    struct tl_error closed;
    tl_error_set(&closed, TL_CANCELLED, "the worker was closed");
    tl_rendezvous_close(worker->table, &closed);
    if (worker->stopped_wait != NULL) tl_wait_done(worker->stopped_wait);
}

static void begin_stop(struct tl_worker *worker, int64_t deadline_ns)
{
    struct tl_error closed;
    tl_error_set(&closed, TL_CANCELLED, "the worker was closed");
    worker->is_closing = true;
    tl_peers_stop(worker);
    tl_ops_fail_receives(worker, NULL, &closed);
    tl_source_refuse_waiting(worker);
    tl_control_stop(worker->control, deadline_ns, control_stopped, worker);
}

/* Without a driver: what was started before it could not be. */
static void stop_now(struct tl_worker *worker)
{
    begin_stop(worker, tl_clock_now_ns());
    while (!worker->is_stopped)
        tl_loop_run_once(worker->loop, TL_TIME_NEVER);
}

struct close_command {
    struct tl_command command;
    int64_t deadline_ns;
    struct tl_wait stopped;
};

static void run_close(struct tl_command *command)
{
    struct close_command *close = TL_CONTAINER_OF(command, struct close_command, command);
    command->worker->stopped_wait = &close->stopped;
    begin_stop(command->worker, close->deadline_ns);
}

static void run_forget_loans(struct tl_command *command)
{
    tl_ops_forget_loans(command->worker);
}

void tl_worker_close(struct tl_worker *worker, int64_t timeout_ns)
{
    if (worker == NULL) return;
    if (timeout_ns == TL_TIMEOUT_DEFAULT) timeout_ns = worker->settings.drain_timeout_ns;
    struct close_command close = {.deadline_ns = tl_clock_deadline_ns(timeout_ns)};
    tl_wait_init(&close.stopped, &worker->driver);
    tl_worker_run(worker, &close.command, run_close);
    while (!tl_wait_for(&close.stopped, TL_TIME_NEVER))
        continue;
    tl_wait_fini(&close.stopped);
    /* What is left are operations whose memory gRPC has not let go of yet, and threads on their way out. */
    while (__atomic_load_n(&worker->open_ops, __ATOMIC_ACQUIRE) > 0 ||
           __atomic_load_n(&worker->blocked_calls, __ATOMIC_ACQUIRE) > 0) {
        struct tl_command forget_loans = {0};
        tl_worker_run(worker, &forget_loans, run_forget_loans);
        usleep(100);
    }
    tl_cq_detach_all(&worker->driver);
    tl_driver_fini(&worker->driver);
    worker_free(worker);
}

/* ------------------------------------------------------------------------------------------------------- queries -- */

const char *tl_worker_name(const struct tl_worker *worker)
{
    return worker->self.name;
}

uint64_t tl_worker_incarnation(const struct tl_worker *worker)
{
    return worker->self.incarnation;
}

uint16_t tl_worker_port(const struct tl_worker *worker)
{
    return worker->port;
}

enum tl_status tl_worker_progress(struct tl_worker *worker, int64_t timeout_ns)
{
    if (worker->driver.progress != TL_PROGRESS_CALLER) return TL_FAILED_PRECONDITION;
    int64_t deadline_ns = timeout_ns <= 0 ? 0 : tl_clock_deadline_ns(timeout_ns);
    uint64_t rounds = tl_driver_rounds(&worker->driver);
    return tl_driver_step(&worker->driver, rounds, deadline_ns) ? TL_OK : TL_DEADLINE_EXCEEDED;
}

struct stats_command {
    struct tl_command command;
    struct tl_worker_stats *stats;
};

static void run_stats(struct tl_command *command)
{
    struct tl_worker_stats *stats = TL_CONTAINER_OF(command, struct stats_command, command)->stats;
    struct tl_worker *worker = command->worker;
    struct tl_control_stats control;
    struct tl_rendezvous_stats table;
    tl_control_get_stats(worker->control, &control);
    tl_rendezvous_get_stats(worker->table, &table);
    *stats = (struct tl_worker_stats){
        .size_bytes = sizeof(*stats),
        .tensors_sent = control.tensors_sent,
        .tensors_received = control.tensors_received,
        .bytes_sent = control.bytes_sent,
        .bytes_received = control.bytes_received,
        .bytes_copied_send = control.bytes_copied_send,
        .frames_sent = control.frames_sent,
        .frames_received = control.frames_received,
        .requests_retried = worker->requests_retried,
        .tensors_dropped = table.dropped_tensors,
        .waiting_receivers = table.waiting_receivers,
        .held_tensors = table.held_tensors,
        .held_bytes = table.held_bytes,
        .published_tensors = table.published_tensors,
        .published_bytes = table.published_bytes,
        .open_operations = __atomic_load_n(&worker->open_ops, __ATOMIC_RELAXED),
        .protocol_errors = control.protocol_errors,
    };
}

enum tl_status tl_worker_stats(struct tl_worker *worker, struct tl_worker_stats *ret_stats, struct tl_error *ret_error)
{
    if (ret_stats->size_bytes != sizeof(*ret_stats)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "size_bytes must be sizeof(struct tl_worker_stats)");
    }
    struct stats_command query = {.stats = ret_stats};
    tl_worker_run(worker, &query.command, run_stats);
    return TL_OK;
}

/* --------------------------------------------------------------------------------------------------- publishing -- */

struct publish_command {
    struct tl_command command;
    const char *key;
    uint64_t step;
    struct tl_tensor *tensor; /* NULL: withdraw */
    enum tl_status status;
    struct tl_error *ret_error;
};

static void run_publish(struct tl_command *command)
{
    struct publish_command *publish = TL_CONTAINER_OF(command, struct publish_command, command);
    struct tl_rendezvous *table = command->worker->table;
    if (publish->tensor != NULL) {
        uint64_t publication;
        publish->status = tl_rendezvous_publish(table, publish->key, publish->step, publish->tensor, &publication,
                                                publish->ret_error);
    } else {
        publish->status = tl_rendezvous_withdraw(table, publish->key, publish->ret_error);
    }
}

static enum tl_status check_key(const char *key, struct tl_error *ret_error)
{
    size_t length = key != NULL ? strnlen(key, TL_MAX_KEY_BYTES + 1) : 0;
    if (length > 0 && length <= TL_MAX_KEY_BYTES && tl_text_is_utf8(key, length)) return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a key is UTF-8 of 1 to %d bytes; this one is not",
                        TL_MAX_KEY_BYTES);
}

enum tl_status tl_publish(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor,
                          struct tl_error *ret_error)
{
    enum tl_status status = check_key(key, ret_error);
    if (status != TL_OK) return status;
    struct publish_command publish = {.key = key, .step = step, .tensor = tensor, .ret_error = ret_error};
    tl_worker_run(worker, &publish.command, run_publish);
    return publish.status;
}

enum tl_status tl_withdraw(struct tl_worker *worker, const char *key, struct tl_error *ret_error)
{
    enum tl_status status = check_key(key, ret_error);
    if (status != TL_OK) return status;
    struct publish_command withdraw = {.key = key, .ret_error = ret_error};
    tl_worker_run(worker, &withdraw.command, run_publish);
    return withdraw.status;
}

/* -------------------------------------------------------------------------------------------------------- steps -- */

struct step_command {
    struct tl_command command;
    uint64_t step;
    struct tl_error status; /* of an abort; TL_OK: the step ends */
    uint64_t dropped_count;
};

static void run_step(struct tl_command *command)
{
    struct step_command *step = TL_CONTAINER_OF(command, struct step_command, command);
    struct tl_worker *worker = command->worker;
    if (step->status.code != TL_OK) {
        tl_rendezvous_abort_step(worker->table, step->step, &step->status);
        tl_ops_fail_receives(worker, &step->step, &step->status);
        return;
    }
    step->dropped_count = tl_rendezvous_end_step(worker->table, step->step);
    struct tl_error ended;
    tl_error_set(&ended, TL_CANCELLED, "step %" PRIu64 " has ended", step->step);
    tl_ops_fail_receives(worker, &step->step, &ended);
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
    struct step_command abort_step = {.step = step};
    tl_error_set(&abort_step.status, status, "%s", message != NULL ? message : "");
    tl_worker_run(worker, &abort_step.command, run_step);
    return TL_OK;
}

enum tl_status tl_worker_end_step(struct tl_worker *worker, uint64_t step, uint64_t *ret_dropped_count,
                                  struct tl_error *ret_error)
{
    (void)ret_error;
    struct step_command end_step = {.step = step};
    tl_worker_run(worker, &end_step.command, run_step);
    if (ret_dropped_count != NULL) *ret_dropped_count = end_step.dropped_count;
    return TL_OK;
}
