// SPDX-License-Identifier: Apache-2.0
/*
 * `tensorlane serve`: one worker in the foreground.
 *
 * Happy path: read the configuration, raise the limit of open files, open the worker, say that it is ready (one line on
 * stderr, and to the service manager), wait for signals, feed the watchdog. SIGTERM or SIGINT: let running transfers
 * finish, end with 0. A second one: end at once with 1. SIGHUP: the log says that it came, and nothing else happens.
 *
 * A worker that cannot start answers at its address for a while and says why (server/cli/last_words.h), tells the
 * service manager, and then ends with 1 and the reason as its last line.
 *
 * All signals are blocked before the worker is opened, so that its threads never take one; this thread fetches them.
 * Standard error may be a pipe that no process reads: the log drops what cannot be written. The watchdog is fed only
 * after the worker has answered a call to its own port: a process that hangs is restarted.
 */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <tensorlane/tensorlane.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "control/client.h"
#include "control/control.h"
#include "server/cli/command.h"
#include "server/cli/file_limit.h"
#include "server/cli/last_words.h"
#include "server/cli/options.h"
#include "server/cli/output.h"
#include "server/cli/sd_notify.h"
#include "server/cli/serve_config.h"
#include "server/cli/task_config.h"
#include "server/worker_internal.h"
#include "tensor/mapped_file.h"

/* Descriptors that a worker needs besides its connections: files, libraries, the loop. */
#define OTHER_DESCRIPTORS 64
#define MAX_PROBE_NS (5 * TL_NS_PER_SEC)
#define DEFAULT_LAST_WORDS_NS (30 * TL_NS_PER_SEC)

struct serve {
    struct tl_serve_flags flags;
    const char *log_level;
    const char *log_format;
    uint32_t parent_pid; /* 0: none */
    int64_t last_words_ns;
    bool ends_at_once; /* without last words */
    struct tl_serve_config config;
    struct tl_worker *worker;
    char probe_address[TL_MAX_ADDRESS_BYTES]; /* where the worker reaches itself; "" when it does not listen */
};

/* ---------------------------------------------------------------------------------------------------- starting -- */

/* -1, or the exit code. */
static int configure_log(const struct serve *serve, const struct tl_options *options)
{
    enum tl_log_level level = (enum tl_log_level)serve->config.task->settings.log_level;
    enum tl_log_format format = (enum tl_log_format)serve->config.task->settings.log_format;
    if (serve->log_level && !tl_log_parse_level(serve->log_level, &level))
        return tl_options_refuse(options, "--log-level %s: there are error, warn, info and debug", serve->log_level);
    if (serve->log_format) {
        bool is_json = strcmp(serve->log_format, "json") == 0;
        if (!is_json && strcmp(serve->log_format, "key-value") != 0)
            return tl_options_refuse(options, "--log-format %s: there are key-value and json", serve->log_format);
        format = is_json ? TL_LOG_JSON : TL_LOG_KEY_VALUE;
    }
    tl_log_configure(level, format);
    return -1;
}

static void check_file_limit(uint64_t connections)
{
    rlim_t limit = tl_file_limit_raise();
    if (limit == RLIM_INFINITY || limit >= connections + OTHER_DESCRIPTORS) return;
    TL_LOG_AT_WARN("the limit of open files is below limits.connections; raise it (ulimit -Hn, LimitNOFILE=)",
                   TL_U64("limit", limit), TL_U64("wanted", connections + OTHER_DESCRIPTORS));
}

/* Ends this process when the one that started it ends. False: it already has. */
static bool follow_parent(pid_t parent)
{
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    return getppid() == parent;
}

static void get_signals(sigset_t *ret_signals)
{
    sigemptyset(ret_signals);
    sigaddset(ret_signals, SIGTERM);
    sigaddset(ret_signals, SIGINT);
    sigaddset(ret_signals, SIGHUP);
}

/* Where the worker listens; NULL: nowhere. */
static const char *listen_address(const struct serve *serve)
{
    const struct tl_config_task *task = serve->config.task;
    if (serve->flags.listen) return serve->flags.listen;
    return task->settings.listen ? task->settings.listen : task->address;
}

/* The listening address with the real port, and with the loopback address instead of "all addresses". */
static void find_probe_address(struct serve *serve)
{
    char host[256];
    uint16_t port;
    const char *listen = listen_address(serve);
    if (!listen || tl_address_split(listen, host, sizeof(host), &port, NULL) != TL_OK) return;
    if (strcmp(host, "0.0.0.0") == 0) snprintf(host, sizeof(host), "127.0.0.1");
    if (strcmp(host, "::") == 0) snprintf(host, sizeof(host), "::1");
    const char *format = strchr(host, ':') ? "[%s]:%u" : "%s:%u";
    snprintf(serve->probe_address, sizeof(serve->probe_address), format, host, tl_worker_port(serve->worker));
}

/* --------------------------------------------------------------------------------------------------- notifying -- */

static void log_notification(enum tl_status status, const struct tl_error *error)
{
    if (status != TL_OK) TL_LOG_AT_WARN("the service manager was not notified", TL_STR("reason", error->message));
}

static void notify(const char *state)
{
    struct tl_error error;
    enum tl_status status = tl_sd_notify(state, &error);
    log_notification(status, &error);
}

/* The line that the worker is ready appears at every log level. */
static void notify_ready(const struct serve *serve)
{
    struct tl_worker_stats stats = {.size_bytes = sizeof(stats)};
    char state[512];
    const char *address = serve->config.task->address ? serve->config.task->address : "";
    if (tl_worker_stats(serve->worker, &stats, NULL) != TL_OK) stats.published_tensors = 0;
    const struct tl_log_field fields[] = {
        TL_STR("name", tl_worker_name(serve->worker)),
        TL_STR("address", address),
        TL_U64("port", tl_worker_port(serve->worker)),
        TL_INCARNATION("incarnation", tl_worker_incarnation(serve->worker)),
        TL_U64("published", stats.published_tensors),
        TL_STR("version", tl_version()),
        {.key = NULL},
    };
    tl_log_write(TL_LOG_INFO, "worker ready", fields);
    snprintf(state, sizeof(state), "READY=1\nSTATUS=%s serves %" PRIu64 " published tensors on port %u",
             tl_worker_name(serve->worker), stats.published_tensors, tl_worker_port(serve->worker));
    notify(state);
}

/* Returns whether the call shows that the worker is at work. It does when the worker has refused the call or our
 * certificate, and also when we refuse its certificate, because the worker has sent that. */
static bool is_answer(enum tl_status status, enum tl_call_stage stage)
{
    if (status == TL_OK || status == TL_UNAUTHENTICATED) return true;
    return stage == TL_CALL_RPC && status != TL_DEADLINE_EXCEEDED && status != TL_UNAVAILABLE;
}

/* Feeds the watchdog when the worker answers. The call uses the worker's own TLS, which loads changed files once. */
static void feed_watchdog(const struct serve *serve, int64_t watchdog_ns)
{
    int64_t timeout_ns = watchdog_ns / 4 < MAX_PROBE_NS ? watchdog_ns / 4 : MAX_PROBE_NS;
    const struct tl_call_options call = {.address = serve->probe_address,
                                         .secure = tl_control_tls(serve->worker->control),
                                         .connect_timeout_ns = timeout_ns,
                                         .rpc_timeout_ns = timeout_ns};
    struct tl_description description = {0};
    enum tl_call_stage stage = TL_CALL_OPTIONS;
    struct tl_error error;
    enum tl_status status = TL_OK;
    if (serve->probe_address[0]) status = tl_client_identify(&call, &description, &stage, &error);
    if (!is_answer(status, stage)) {
        TL_LOG_AT_ERROR("the worker does not answer itself; the watchdog is not fed", TL_STR("reason", error.message));
        return;
    }
    tl_description_fini(&description);
    notify("WATCHDOG=1");
}

/* ----------------------------------------------------------------------------------------------------- running -- */

/* Waits for the signal that ends the worker. */
static void wait_for_end(const struct serve *serve, const sigset_t *signals)
{
    int64_t watchdog_ns = tl_sd_watchdog_ns();
    int64_t feed_ns = watchdog_ns > 0 ? tl_clock_now_ns() : TL_TIME_NEVER;
    for (;;) {
        int64_t pause_ns = tl_clock_remaining_ns(feed_ns);
        const struct timespec pause = {.tv_sec = (time_t)(pause_ns / TL_NS_PER_SEC),
                                       .tv_nsec = (long)(pause_ns % TL_NS_PER_SEC)};
        int signal_number = watchdog_ns > 0 ? sigtimedwait(signals, NULL, &pause) : sigwaitinfo(signals, NULL);
        if (signal_number == SIGTERM || signal_number == SIGINT) return;
        if (signal_number == SIGHUP)
            TL_LOG_AT_WARN("SIGHUP is ignored; start the worker anew to read the configuration again");
        if (signal_number >= 0 || errno != EAGAIN) continue;
        feed_watchdog(serve, watchdog_ns);
        feed_ns = tl_clock_deadline_ns(watchdog_ns / 2);
    }
}

/* The second signal: its sender does not want to wait. */
static void end_at_once(int signal_number)
{
    static const char message[] = "tensorlane serve: second signal, running transfers are cut off\n";
    struct pollfd place = {.fd = STDERR_FILENO, .events = POLLOUT};
    (void)signal_number;
    /* Not tl_stderr_put, which a signal handler may not call. */
    if (poll(&place, 1, 0) > 0) {
        ssize_t ignored = write(STDERR_FILENO, message, strlen(message));
        (void)ignored;
    }
    _exit(TL_EXIT_FAILED);
}

static void drain(struct serve *serve, const sigset_t *signals)
{
    const char *name = serve->config.task->name;
    struct sigaction action = {.sa_handler = end_at_once};
    struct tl_error error;
    enum tl_status status;
    sigemptyset(&action.sa_mask);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    signal(SIGHUP, SIG_IGN);
    status = tl_sd_notify_stopping(serve->config.task->settings.drain_timeout_ns,
                                   "STATUS=waiting for running transfers", &error);
    log_notification(status, &error);
    TL_LOG_AT_INFO("worker stopping", TL_STR("name", name));
    pthread_sigmask(SIG_UNBLOCK, signals, NULL);
    tl_worker_close(serve->worker, TL_TIMEOUT_DEFAULT);
    serve->worker = NULL;
    TL_LOG_AT_INFO("worker stopped", TL_STR("name", name));
}

static enum tl_status open_worker(struct serve *serve, struct tl_error *ret_error)
{
    const struct tl_worker_options options = {
        .size_bytes = sizeof(options),
        .config_json = serve->config.json,
        /* An evaluator is only in TF_CONFIG, and not in its cluster. */
        .job = serve->config.json ? serve->config.task->job : serve->flags.job,
        .task = serve->config.json || serve->flags.job ? serve->config.task->index : 0,
    };
    return tl_worker_open(&options, &serve->worker, ret_error);
}

/* Called when the last words can be heard. */
static void log_last_words(const struct tl_last_words *words)
{
    TL_LOG_AT_ERROR("the worker cannot start; it says why at its address for a while, and then ends",
                    TL_STR("reason", words->message));
}

/* The worker cannot start. */
static int end_with(const struct serve *serve, const sigset_t *signals, const struct tl_error *error)
{
    char state[TL_ERROR_MESSAGE_BYTES + 64];
    char *reason = tl_output_escape(error->message); /* a line break would begin another assignment */
    snprintf(state, sizeof(state), "STATUS=cannot start: %s", reason ? reason : "no memory");
    free(reason);
    notify(state);
    const struct tl_last_words words = {
        .config = serve->config.config,
        .task = serve->config.task,
        .listen = listen_address(serve),
        .message = error->message,
        .signals = signals,
        .duration_ns = serve->last_words_ns,
        .listening = log_last_words,
    };
    if (words.listen && !serve->ends_at_once) tl_last_words_say(&words);
    tl_output_error("serve", "%s", error->message);
    return TL_EXIT_FAILED;
}

static int run(struct serve *serve, const struct tl_options *options)
{
    sigset_t signals;
    struct tl_error error;
    /* When the task is known, what else is wrong can be said at its address. */
    enum tl_status status = tl_guard_mapped_files(&error);
    if (status == TL_OK) status = tl_serve_config_read(&serve->flags, &serve->config, &error);
    if (status != TL_OK && !serve->config.task) {
        tl_output_error("serve", "%s", error.message);
        return TL_EXIT_FAILED;
    }
    int code = configure_log(serve, options);
    if (code >= 0) return code;
    const struct tl_settings *settings = &serve->config.task->settings;
    if (settings->rdma == TL_RDMA_REQUIRE && settings->protocol == TL_PROTOCOL_GRPC)
        TL_LOG_AT_WARN("rdma is \"require\", which has no effect with protocol \"grpc\"",
                       TL_STR("name", serve->config.task->name));
    check_file_limit(settings->connections);
    get_signals(&signals);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    if (serve->parent_pid > 0 && !follow_parent((pid_t)serve->parent_pid)) {
        tl_output_error("serve", "the process %" PRIu32 " that started this one has ended", serve->parent_pid);
        return TL_EXIT_FAILED;
    }
    if (status == TL_OK) status = open_worker(serve, &error);
    if (status != TL_OK) return end_with(serve, &signals, &error);
    find_probe_address(serve);
    notify_ready(serve);
    wait_for_end(serve, &signals);
    drain(serve, &signals);
    return TL_EXIT_OK;
}

int tl_command_serve(int argc, char **argv)
{
    struct serve serve = {.flags = {.task = TL_TASK_NOT_GIVEN}, .last_words_ns = DEFAULT_LAST_WORDS_NS};
    int first;
    const struct tl_option items[] = {
        {"config", 'c', TL_OPTION_TEXT, &serve.flags.config_path, "FILE",
         "the cluster's JSON file, - for standard input; without it TF_CONFIG"},
        {"job", 'j', TL_OPTION_TEXT, &serve.flags.job, "JOB", "job of this worker; without it TF_CONFIG's task"},
        {"task", 't', TL_OPTION_U32, &serve.flags.task, "N", "its number in the job (0)"},
        {"publish", 'p', TL_OPTION_TEXTS, &serve.flags.publish, "FILE",
         "publish the tensors of this file; may be repeated"},
        {"listen", 'l', TL_OPTION_TEXT, &serve.flags.listen, "HOST:PORT",
         "listen there instead of at the task's address"},
        {"log-level", 0, TL_OPTION_TEXT, &serve.log_level, "LEVEL", "error, warn, info or debug"},
        {"log-format", 0, TL_OPTION_TEXT, &serve.log_format, "FORMAT", "key-value or json"},
        {"last-words", 0, TL_OPTION_DURATION, &serve.last_words_ns, "DURATION",
         "how long a worker that cannot start says why at its address (30s)"},
        {"no-wait", 0, TL_OPTION_FLAG, &serve.ends_at_once, NULL, "a worker that cannot start ends at once"},
        {"parent", 0, TL_OPTION_U32, &serve.parent_pid, "PID", "stop when this process, which is the parent, ends"},
    };
    const struct tl_options options = {
        .command = "serve",
        .usage = "--config FILE --job JOB --task N [--publish FILE]...",
        .description = "Starts one worker in the foreground. SIGTERM lets running transfers finish and ends it.",
        .items = items,
        .count = TL_ARRAY_COUNT(items),
        .usage_exit = TL_EXIT_USAGE,
    };
    int code = tl_options_parse(&options, argc, argv, &first);
    if (code < 0 && first < argc) code = tl_options_refuse(&options, "unexpected argument %s", argv[first]);
    struct tl_error error;
    char host[256];
    uint16_t port;
    if (code < 0 && serve.flags.listen &&
        tl_address_split(serve.flags.listen, host, sizeof(host), &port, &error) != TL_OK)
        code = tl_options_refuse(&options, "--listen: %s", error.message);
    if (code < 0) code = run(&serve, &options);
    tl_serve_config_fini(&serve.config);
    tl_texts_fini(&serve.flags.publish);
    return code;
}
