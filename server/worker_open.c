// SPDX-License-Identifier: Apache-2.0
/*
 * The worker's life: everything is opened in order and closed in the reverse order.
 *
 * Open: configuration -> who we are -> loop -> table -> data plane -> control transport -> peers -> files published ->
 * listen -> driver. Nothing of the loop runs before the progress engine starts, so a failure anywhere before it undoes
 * what there is without any waiting. Close: new work is refused, receives end, requests that wait are refused, running
 * transfers get until the deadline, those of the data plane first, since its paths live on links; then the table fails
 * what is left, every operation has completed, and the parts are freed.
 */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/random.h"
#include "base/struct_version.h"
#include "base/text.h"
#include "config/address.h"
#include "config/cluster.h"
#include "security/certificate_facts.h"
#include "server/peers/permissions.h"
#include "server/progress/completion_queue.h"
#include "server/transfers/subscription.h"
#include "server/transfers/walk.h"
#include "server/troubles.h"
#include "server/worker_internal.h"
#include "server/tls_options.h"

#define ABORTED_STEPS_KEPT 1024

/* ----------------------------------------------------------------------------------------------------- opening -- */

/* Settings without a cluster. */
static enum tl_status read_settings(const struct tl_worker_options *options, struct tl_config **ret_config,
                                    struct tl_error *ret_error)
{
    if (options->config_path != NULL) return tl_config_read_settings(options->config_path, ret_config, ret_error);
    const char *text = options->config_json != NULL ? options->config_json : "{}";
    return tl_config_parse_settings(text, strlen(text), "config_json", ret_config, ret_error);
}

static enum tl_status read_source(const struct tl_worker_options *options, struct tl_config **ret_config,
                                  struct tl_error *ret_error)
{
    if (options->address != NULL) return read_settings(options, ret_config, ret_error);
    if (options->config_path != NULL) return tl_config_read(options->config_path, ret_config, ret_error);
    if (options->config_json != NULL) {
        return tl_config_parse(options->config_json, strlen(options->config_json), "config_json", NULL, ret_config,
                               ret_error);
    }
    const char *text = tl_config_tf_text();
    if (text == NULL) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "no configuration: give a file or text, or set the environment variable TF_CONFIG");
    }
    return tl_config_parse_tf(text, strlen(text), ret_config, ret_error);
}

static void warn_of_variable(void *context, const char *message)
{
    (void)context;
    TL_LOG_AT_WARN("a variable is not used", TL_STR("reason", message));
}

/* The configuration, with the variables of this process. */
static enum tl_status read_config(const struct tl_worker_options *options, struct tl_config **ret_config,
                                  struct tl_error *ret_error)
{
    const struct tl_config_environment environment = {.variables = (const char *const *)environ,
                                                      .warn = warn_of_variable};
    struct tl_config *config;
    enum tl_status status = read_source(options, &config, ret_error);
    if (status != TL_OK) return status;
    status = tl_config_apply_environment(config, &environment, ret_error);
    if (status != TL_OK) {
        tl_config_destroy(config);
        return status;
    }
    *ret_config = config;
    return TL_OK;
}

/* Returns a number that is equal for the same tasks with the same addresses, however these are spelt. The tasks are
 * sorted. */
static uint64_t digest_cluster(const struct tl_config *config)
{
    uint64_t digest = 0;
    for (size_t i = 0; i < config->task_count; i++) {
        const struct tl_config_task *task = &config->tasks[i];
        char address[TL_ADDRESS_BYTES] = "";
        if (task->address != NULL && tl_address_check(task->address, TL_ADDRESS_DIAL, address, NULL) != TL_OK)
            snprintf(address, sizeof(address), "%s", task->address);
        digest = XXH3_64bits_withSeed(task->name, strlen(task->name) + 1, digest);
        digest = XXH3_64bits_withSeed(address, strlen(address) + 1, digest);
    }
    return digest;
}

/* Chooses the name of a worker in no cluster: the program's, that of its certificate, or a random one. */
static enum tl_status name_self(struct tl_worker *worker, const struct tl_worker_options *options,
                                struct tl_error *ret_error)
{
    struct worker_setup *setup = &worker->setup;
    const char *certificate = setup->config->client_settings.security.certificate;
    uint32_t index = options->task;
    if (options->job != NULL) {
        if (!tl_cluster_is_job_name(options->job))
            return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                                "\"%.64s\" is no job name; use 1 to %d letters, digits, '_', '.' and '-'", options->job,
                                TL_JOB_NAME_BYTES - 1);
        snprintf(setup->own_job, sizeof(setup->own_job), "%s", options->job);
    } else if (certificate != NULL) {
        struct tl_certificate_facts facts;
        enum tl_status status = tl_certificate_facts_read(certificate, &facts, ret_error);
        if (status != TL_OK) return status;
        bool is_task = facts.name_error.code == TL_OK && facts.name.kind == TL_CERTIFICATE_MEMBER;
        if (!is_task || !tl_config_split_name(facts.name.text, setup->own_job, &index))
            return tl_error_set(
                ret_error, TL_INVALID_ARGUMENT,
                "%s is no certificate of a worker, whose name is spiffe://TRUST-DOMAIN/job/JOB/task/INDEX",
                certificate);
    } else {
        snprintf(setup->own_job, sizeof(setup->own_job), "peer-%016" PRIx64, worker->self.incarnation);
    }
    setup->own_task.index = index;
    snprintf(setup->own_name, sizeof(setup->own_name), "/job:%.*s/task:%" PRIu32, TL_JOB_NAME_BYTES - 1, setup->own_job,
             index);
    return TL_OK;
}

/* Makes the worker a task of its own, in no cluster. */
static enum tl_status be_alone(struct tl_worker *worker, const struct tl_worker_options *options,
                               struct tl_error *ret_error)
{
    struct worker_setup *setup = &worker->setup;
    const struct tl_config *config = setup->config;
    if (config->client_error.code != TL_OK) return tl_error_copy(ret_error, &config->client_error);
    char canonical[TL_ADDRESS_BYTES];
    enum tl_status status = tl_address_check(options->address, TL_ADDRESS_LISTEN, canonical, ret_error);
    if (status != TL_OK) return status;
    if (strncmp(canonical, "0.0.0.0:", 8) == 0 || strncmp(canonical, "[::]:", 5) == 0)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "no peer can dial %s; give an address of this host, and set \"listen\" to %s", canonical,
                            canonical);
    status = name_self(worker, options, ret_error);
    if (status != TL_OK) return status;
    snprintf(setup->address, sizeof(setup->address), "%s", canonical);
    setup->own_task = (struct tl_config_task){.job = setup->own_job,
                                              .index = setup->own_task.index,
                                              .name = setup->own_name,
                                              .address = setup->address,
                                              .settings = config->client_settings};
    setup->task = &setup->own_task;
    worker->settings = config->client_settings;
    snprintf(worker->self.name, sizeof(worker->self.name), "%s", setup->own_name);
    return TL_OK;
}

/* Decides which task this process is, and its settings. */
static enum tl_status find_self(struct tl_worker *worker, const struct tl_worker_options *options,
                                struct tl_error *ret_error)
{
    const struct tl_config *config = worker->setup.config;
    if (options->address != NULL && !options->is_client) return be_alone(worker, options, ret_error);
    if (options->is_client) {
        if (options->address != NULL && options->address[0] != '\0')
            return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a client does not listen, so that it has no address");
        if (config->client_error.code != TL_OK) return tl_error_copy(ret_error, &config->client_error);
        worker->settings = config->client_settings;
        return TL_OK;
    }
    if (options->job != NULL) {
        enum tl_status status =
            tl_config_find_task(config, options->job, options->task, &worker->setup.task, ret_error);
        if (status != TL_OK) return status;
    } else if (config->self != NULL) {
        worker->setup.task = config->self;
    } else {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s does not say which task this process is; give job and task", config->source);
    }
    worker->settings = worker->setup.task->settings;
    if (worker->setup.task->address != NULL)
        snprintf(worker->setup.address, sizeof(worker->setup.address), "%s", worker->setup.task->address);
    snprintf(worker->self.name, sizeof(worker->self.name), "%s", worker->setup.task->name);
    worker->self.cluster_digest = digest_cluster(config);
    return TL_OK;
}

/* No call is without a deadline. A link that ends is replaced, and its requests go on where they were, so that this one
 * costs nothing; it ends what keep-alive cannot see. */
#define MAX_LINK_AGE_NS (24 * 3600 * TL_NS_PER_SEC)

static enum tl_status create_control(struct tl_worker *worker, struct tl_error *ret_error)
{
    const struct tl_settings *settings = &worker->settings;
    struct tl_tls_options tls;
    const struct tl_control_options options = {
        .tls = tl_tls_options_of(settings, &tls) ? &tls : NULL,
        .self = worker->self,
        .chunk_bytes = settings->chunk_bytes,
        .inflight_bytes = settings->inflight_bytes,
        .max_calls = settings->connections,
        .max_unsent = settings->waiting_receivers,
        .connect_timeout_ns = settings->connect_timeout_ns,
        .max_link_age_ns = MAX_LINK_AGE_NS,
        .request_timeout_ns = settings->request_timeout_ns,
        .stalled_timeout_ns = settings->stalled_timeout_ns,
        .keepalive_ns = settings->keepalive_ns,
        .keepalive_timeout_ns = settings->keepalive_timeout_ns,
        .device = settings->device,
        .handlers = &tl_worker_handlers,
        .worker = worker,
    };
    return tl_control_create(worker->loop, &options, &worker->control, ret_error);
}

/* Whether a task of the cluster is on another machine, as far as the addresses tell without a look-up. */
static bool has_remote_peer(const struct tl_worker *worker)
{
    const struct tl_config_task *self = worker->setup.task;
    for (size_t i = 0; i < worker->setup.config->task_count; i++) {
        const char *other = worker->setup.config->tasks[i].address;
        if (other != NULL && !tl_address_is_loopback(other) && !tl_address_is_same_host(other, self->address))
            return true;
    }
    return false;
}

/* Debian gives the own name of a machine the address 127.0.1.1: a worker that listens there is reached by no other
 * machine. A setting "listen" is taken as meant. */
static void check_listens(const struct tl_worker *worker)
{
    char texts[TL_CONTROL_MAX_LISTENS][TL_CONTROL_LISTEN_BYTES];
    size_t count = tl_control_listens(worker->control, texts, TL_CONTROL_MAX_LISTENS);
    if (count == 0 || worker->settings.listen != NULL || !has_remote_peer(worker)) return;
    for (size_t i = 0; i < count; i++)
        if (!tl_address_is_loopback(texts[i])) return;
    TL_LOG_AT_WARN("this worker listens where other machines cannot reach it; correct /etc/hosts, or set \"listen\"",
                   TL_STR("worker", worker->self.name), TL_STR("address", worker->setup.task->address),
                   TL_STR("listens", texts[0]));
}

static enum tl_status create_permissions(struct tl_worker *worker, struct tl_error *ret_error)
{
    const struct tl_security_settings *security = &worker->settings.security;
    if (security->ca == NULL) return TL_OK;
    return tl_permissions_create(worker->setup.config, security, worker->self.name, &worker->members.permissions,
                                 ret_error);
}

/* The kernel has chosen the port of a worker that was opened with port 0. */
static void name_port(struct tl_worker *worker)
{
    struct worker_setup *setup = &worker->setup;
    char host[TL_ADDRESS_BYTES];
    uint16_t port;
    if (tl_address_split(setup->address, host, sizeof(host), &port, NULL) != TL_OK || port != 0) return;
    const char *format = strchr(host, ':') != NULL ? "[%s]:%u" : "%s:%u";
    snprintf(setup->address, sizeof(setup->address), format, host, (unsigned)setup->port);
    tl_peers_address_known(worker);
}

static enum tl_status start(struct tl_worker *worker, struct tl_error *ret_error)
{
    if (worker->setup.task == NULL || worker->setup.task->address == NULL) return TL_OK;
    const char *listen = worker->settings.listen != NULL ? worker->settings.listen : worker->setup.task->address;
    enum tl_status status = tl_troubles_start(worker->troubles, ret_error);
    if (status == TL_OK) status = tl_control_start(worker->control, listen, &worker->setup.port, ret_error);
    if (status != TL_OK) return status;
    name_port(worker);
    check_listens(worker);
    tl_control_set_health(worker->control, "", TL_HEALTH_SERVING);
    tl_control_set_health(worker->control, "tensorlane.v1.Transfer", TL_HEALTH_SERVING);
    tl_control_set_health(worker->control, "tensorlane.v1.Cluster", TL_HEALTH_SERVING);
    return TL_OK;
}

/* Frees what was opened; the progress engine does not run and nothing is in flight. */
static void worker_free(struct tl_worker *worker)
{
    tl_troubles_destroy(worker->troubles);
    if (worker->table != NULL) {
        struct tl_error closed;
        tl_error_set(&closed, TL_CANCELLED, "the worker was closed");
        tl_rendezvous_close(worker->table, &closed);
    }
    tl_transports_destroy(worker);
    if (worker->members.peers != NULL) tl_peers_destroy(worker);
    tl_control_destroy(worker->control);
    tl_rendezvous_destroy(worker->table);
    if (worker->loop != NULL) {
        tl_gone_processes_fini(&worker->sources.gone);
        tl_timers_disarm(tl_loop_timers(worker->loop), &worker->sources.expire_timer);
        tl_progress_fini(&worker->progress); /* the threads of the reactors, which post to it, have ended */
    }
    tl_loop_destroy(worker->loop);
    tl_source_fini(worker);
    tl_permissions_destroy(worker->members.permissions);
    tl_hash_table_fini(&worker->operations.calls);
    tl_config_destroy(worker->setup.config);
    free(worker);
}

static void post_to_executor(const struct tl_executor *executor, struct tl_closure *closure)
{
    struct tl_worker *worker = (struct tl_worker *)TL_CONTAINER_OF(executor, struct tl_worker, executor);
    tl_progress_post(&worker->progress, closure);
}

static enum tl_status build(struct tl_worker *worker, const struct tl_worker_options *options,
                            const struct tl_transport_source *const *transports, size_t transport_count,
                            struct tl_error *ret_error)
{
    enum tl_status status = read_config(options, &worker->setup.config, ret_error);
    if (status == TL_OK) status = find_self(worker, options, ret_error);
    if (status != TL_OK) return status;
    tl_log_adopt((enum tl_log_level)worker->settings.log_level, (enum tl_log_format)worker->settings.log_format);
    status = create_permissions(worker, ret_error);
    if (status == TL_OK) status = tl_worker_open_device(worker, ret_error);
    if (status == TL_OK) status = tl_source_init(worker, ret_error);
    if (status == TL_OK) status = tl_loop_create(&worker->loop, ret_error);
    if (status != TL_OK) return status;
    if (tl_timers_reserve(tl_loop_timers(worker->loop)) != TL_OK) /* for sources.expire_timer */
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a worker");
    tl_progress_init(&worker->progress, worker->loop, options->progress);
    const struct tl_rendezvous_limits limits = {.waiting_receivers = worker->settings.waiting_receivers,
                                                .subscription_ns = worker->settings.reservation_timeout_ns,
                                                .held_bytes = worker->settings.held_bytes,
                                                .aborted_steps = ABORTED_STEPS_KEPT};
    status = tl_rendezvous_create(&limits, &worker->table, ret_error);
    if (status == TL_OK) {
        status = tl_transports_create(worker, transports, transport_count, options->progress == TL_PROGRESS_THREAD,
                                      ret_error);
    }
    if (status == TL_OK) status = create_control(worker, ret_error);
    if (status == TL_OK) status = tl_peers_create(worker, ret_error);
    if (status == TL_OK && worker->setup.task != NULL)
        status = tl_troubles_create(worker, &worker->troubles, ret_error);
    if (status == TL_OK) status = tl_worker_publish_files(worker, ret_error);
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

static enum tl_status start_progress(struct tl_worker *worker, struct tl_error *ret_error)
{
    struct tl_polled_reactor reactors[TL_MAX_TRANSPORTS];
    size_t count = tl_transports_polled(worker, reactors);
    return tl_progress_start(&worker->progress, &worker->executor, reactors, count, ret_error);
}

enum tl_status tl_worker_open(const struct tl_worker_options *options, struct tl_worker **ret_worker,
                              struct tl_error *ret_error)
{
    return tl_worker_open_with(options, tl_transports_all, TL_MAX_TRANSPORTS, ret_worker, ret_error);
}

enum tl_status tl_worker_open_with(const struct tl_worker_options *caller_options,
                                   const struct tl_transport_source *const *transports, size_t transport_count,
                                   struct tl_worker **ret_worker, struct tl_error *ret_error)
{
    struct tl_worker_options options;
    enum tl_status status = tl_struct_read(&options, sizeof(options), TL_WORKER_OPTIONS_FIRST_BYTES, caller_options,
                                           "tl_worker_options", ret_error);
    if (status != TL_OK) return status;
    struct tl_worker *worker = calloc(1, sizeof(*worker));
    if (worker == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a worker");
    static pthread_once_t taught = PTHREAD_ONCE_INIT;
    pthread_once(&taught, teach_allocator);
    worker->setup.opened_ns = tl_clock_now_ns();
    worker->self.incarnation = tl_random_u64();
    worker->self.process_id = (uint64_t)getpid();
    worker->self.serves_probes = true;
    worker->self.serves_subscriptions = true;
    worker->self.serves_parts = true;
    worker->self.fetches_puts = true;
    tl_text_host_name(worker->self.host_name, sizeof(worker->self.host_name));
    worker->executor.post = post_to_executor;
    worker->executor.send = tl_worker_executor_send;
    tl_list_init(&worker->members.peer_waits);
    tl_list_init(&worker->operations.starting.groups);
    tl_walks_init(worker);
    status = build(worker, &options, transports, transport_count, ret_error);
    if (status == TL_OK) status = start(worker, ret_error);
    if (status != TL_OK) {
        worker_free(worker);
        return status;
    }
    tl_peers_start(worker);
    status = start_progress(worker, ret_error);
    if (status != TL_OK) {
        stop_now(worker);
        worker_free(worker);
        return status;
    }
    if (worker->settings.security.ca == NULL) {
        TL_LOG_AT_INFO("this worker authenticates nobody: whoever reaches its port may do everything; see "
                       "docs/security.md for certificates",
                       TL_STR("worker", tl_worker_name(worker)));
    }
    *ret_worker = worker;
    return TL_OK;
}

/* ----------------------------------------------------------------------------------------------------- closing -- */

static void control_stopped(void *context)
{
    struct tl_worker *worker = context;
    worker->closing.is_stopped = true;
    struct tl_error closed;
    tl_error_set(&closed, TL_CANCELLED, "the worker was closed");
    tl_rendezvous_close(worker->table, &closed);
    if (worker->closing.stopped_wait != NULL) tl_wait_done(worker->closing.stopped_wait);
}

static void stop_control(void *context)
{
    struct tl_worker *worker = context;
    tl_control_stop(worker->control, worker->closing.stop_deadline_ns, control_stopped, worker);
}

/* No operation of the program asks for anything any more. */
static void operations_ended(struct tl_ops_ending *ending)
{
    struct tl_worker *worker = ending->worker;
    tl_serving_close(&worker->serving);
    tl_control_set_health(worker->control, "", TL_HEALTH_NOT_SERVING);
    tl_transports_drain(worker, worker->closing.stop_deadline_ns, stop_control, worker);
}

static void begin_stop(struct tl_worker *worker, int64_t deadline_ns)
{
    struct worker_closing *closing = &worker->closing;
    tl_error_set(&closing->reason, TL_CANCELLED, "the worker was closed");
    closing->is_closing = true;
    closing->stop_deadline_ns = deadline_ns;
    tl_peers_stop(worker);
    closing->ending = (struct tl_ops_ending){.worker = worker, .status = &closing->reason, .over = operations_ended};
    tl_ops_end(&closing->ending);
}

/* Without a driver: what was started before it could not be. */
static void stop_now(struct tl_worker *worker)
{
    const struct tl_executor *former = tl_executor_enter(&worker->executor);
    begin_stop(worker, tl_clock_now_ns());
    struct tl_polled_reactor reactors[TL_MAX_TRANSPORTS];
    size_t count = tl_transports_polled(worker, reactors);
    while (!worker->closing.is_stopped) {
        for (size_t i = 0; i < count; i++)
            if (reactors[i].thread == NULL) (void)tl_reactor_run_once(reactors[i].reactor, 0);
        tl_loop_run_once(worker->loop,
                         tl_transports_count(worker) > 0 ? tl_clock_deadline_ns(TL_NS_PER_MS) : TL_TIME_NEVER);
    }
    tl_executor_leave(former);
}

struct close_command {
    struct tl_command command;
    int64_t deadline_ns;
    struct tl_wait stopped;
};

static void run_close(struct tl_command *command)
{
    struct close_command *close = TL_CONTAINER_OF(command, struct close_command, command);
    command->worker->closing.stopped_wait = &close->stopped;
    begin_stop(command->worker, close->deadline_ns);
}

static void run_forget_borrows(struct tl_command *command)
{
    tl_ops_forget_borrows(command->worker);
}

void tl_worker_close(struct tl_worker *worker, int64_t timeout_ns)
{
    if (worker == NULL) return;
    if (timeout_ns == TL_TIMEOUT_DEFAULT) timeout_ns = worker->settings.drain_timeout_ns;
    struct close_command close = {.deadline_ns = tl_clock_deadline_ns(timeout_ns)};
    tl_wait_init(&close.stopped, &worker->progress);
    tl_worker_run(worker, &close.command, run_close);
    while (!tl_wait_for(&close.stopped, TL_TIME_NEVER))
        continue;
    tl_wait_fini(&close.stopped);
    /* What is left are operations whose memory gRPC has not let go of yet, and threads on their way out. */
    while (__atomic_load_n(&worker->operations.open_ops, __ATOMIC_ACQUIRE) > 0 ||
           __atomic_load_n(&worker->operations.blocked_calls, __ATOMIC_ACQUIRE) > 0) {
        struct tl_command forget_borrows = {0};
        tl_worker_run(worker, &forget_borrows, run_forget_borrows);
        usleep(100);
    }
    tl_cq_detach_all(&worker->progress);
    tl_progress_stop(&worker->progress);
    worker_free(worker);
}
