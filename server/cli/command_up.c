// SPDX-License-Identifier: Apache-2.0
/*
 * `tensorlane up`: all workers of a cluster whose host is this machine, as child processes.
 *
 * Happy path: choose the tasks, start `tensorlane serve` for each, pass their logs on with the task's name before every
 * line, say so when all are ready, wait. Ctrl-C or SIGTERM: all get SIGTERM and time to drain, then SIGKILL; exit 0.
 *
 * Failure modes: a child that ends unasked, or is not ready in time, ends all; the exit code is 1 and the last line
 * says which one and how it ended. When this process is killed, the children end by themselves.
 *
 * Children report that they are ready in the way that a service does (sd_notify), to a socket of ours; the kernel says
 * which process has sent a message.
 */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "server/cli/command.h"
#include "server/cli/options.h"
#include "server/cli/output.h"
#include "server/cli/task_config.h"
#include "server/cli/sd_notify.h"
#include "server/cli/up_child.h"
#include "server/cli/up_tasks.h"

#define DEFAULT_READY_NS (60 * TL_NS_PER_SEC)
/* After the drain time-out of the workers, until they are killed. */
#define KILL_SLACK_NS (3 * TL_NS_PER_SEC)

enum up_phase { UP_STARTING, UP_RUNNING, UP_STOPPING };

struct up {
    /* The flags. */
    struct tl_up_launch launch;
    struct tl_texts only;
    int64_t ready_ns;

    struct tl_config *config;
    struct tl_up_child *children; /* [count] */
    size_t count;
    size_t ready_count;
    size_t ended_count;
    char notify_name[32];
    int notify_fd;
    int signal_fd;
    enum up_phase phase;
    int64_t start_ns;
    int64_t due_ns; /* when the phase has taken too long */
    bool is_killed;
    int code;
};

/* ------------------------------------------------------------------------------------------------------- setup -- */

/* A datagram socket with an abstract name that the kernel chooses. */
static enum tl_status open_notify_socket(struct up *up, struct tl_error *ret_error)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    socklen_t len = sizeof(address);
    int on = 1;
    up->notify_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (up->notify_fd < 0 ||
        bind(up->notify_fd, (const struct sockaddr *)(const void *)&address, sizeof(sa_family_t)) != 0 ||
        setsockopt(up->notify_fd, SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)) != 0 ||
        getsockname(up->notify_fd, (struct sockaddr *)(void *)&address, &len) != 0)
        return tl_error_set_errno(ret_error, errno, "cannot make a socket for notifications");
    size_t name_len = len - offsetof(struct sockaddr_un, sun_path) - 1;
    TL_CHECK(name_len + 2 <= sizeof(up->notify_name));
    up->notify_name[0] = '@';
    memcpy(up->notify_name + 1, address.sun_path + 1, name_len);
    up->launch.notify_name = up->notify_name;
    return TL_OK;
}

static enum tl_status open_signals(struct up *up, struct tl_error *ret_error)
{
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGHUP);
    sigaddset(&signals, SIGCHLD);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    up->signal_fd = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
    if (up->signal_fd < 0) return tl_error_set_errno(ret_error, errno, "cannot receive signals");
    return TL_OK;
}

static enum tl_status choose_children(struct up *up, struct tl_error *ret_error)
{
    static const char *const colours[] = {"36", "33", "35", "32", "34", "96", "93", "95", "92", "94"};
    const struct tl_config_task **tasks = NULL;
    enum tl_status status =
        tl_up_tasks_choose(up->config, up->only.items, up->only.count, &tasks, &up->count, ret_error);
    if (status != TL_OK) return status;
    up->children = calloc(up->count, sizeof(*up->children));
    if (!up->children) status = tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for %zu workers", up->count);
    for (size_t i = 0; up->children && i < up->count; i++) {
        up->children[i].task = tasks[i];
        up->children[i].colour = colours[i % TL_ARRAY_COUNT(colours)];
        up->children[i].log_fd = -1;
    }
    free(tasks);
    return status;
}

/* ---------------------------------------------------------------------------------------------------- stopping -- */

static void signal_children(const struct up *up, int signal_number)
{
    for (size_t i = 0; i < up->count; i++)
        if (up->children[i].pid > 0 && !up->children[i].is_ended) kill(up->children[i].pid, signal_number);
}

static void stop(struct up *up, int code)
{
    int64_t drain_ns = 0;
    if (code != TL_EXIT_OK) up->code = code;
    if (up->phase == UP_STOPPING) return;
    up->phase = UP_STOPPING;
    for (size_t i = 0; i < up->count; i++)
        if (up->children[i].task->settings.drain_timeout_ns > drain_ns)
            drain_ns = up->children[i].task->settings.drain_timeout_ns;
    up->due_ns = tl_clock_deadline_ns(drain_ns + KILL_SLACK_NS);
    if (tl_sd_notify_stopping(drain_ns + KILL_SLACK_NS, "", NULL) != TL_OK)
        tl_output_error("up", "the service manager was not notified");
    signal_children(up, SIGTERM);
}

/* The phase has taken too long. */
static void give_up(struct up *up)
{
    if (up->phase == UP_STOPPING) {
        signal_children(up, SIGKILL);
        up->is_killed = true;
        up->due_ns = TL_TIME_NEVER;
        up->code = TL_EXIT_FAILED;
        tl_output_error("up", "workers that did not stop in time were killed");
        return;
    }
    for (size_t i = 0; i < up->count; i++)
        if (!up->children[i].is_ready)
            tl_output_error("up", "%s is not ready in time; stopping all", up->children[i].task->name);
    stop(up, TL_EXIT_FAILED);
}

/* ------------------------------------------------------------------------------------------------------ events -- */

static void child_ended(struct up *up, struct tl_up_child *child, int wait_status)
{
    char end[64];
    child->is_ended = true;
    child->wait_status = wait_status;
    up->ended_count++;
    tl_up_child_read_log(child);
    bool is_clean = WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == 0;
    if (up->phase != UP_STOPPING) {
        tl_output_error("up", "%s ended with %s%s%s%s", child->task->name,
                        tl_up_child_format_end(child, end, sizeof(end)), up->count > 1 ? "; stopping all" : "",
                        child->reason[0] != '\0' ? ": " : "", child->reason);
        stop(up, TL_EXIT_FAILED);
    } else if (!is_clean && !up->is_killed) {
        tl_output_error("up", "%s ended with %s", child->task->name, tl_up_child_format_end(child, end, sizeof(end)));
        up->code = TL_EXIT_FAILED;
    }
}

static void reap(struct up *up)
{
    for (size_t i = 0; i < up->count; i++) {
        int wait_status;
        struct tl_up_child *child = &up->children[i];
        if (child->pid > 0 && !child->is_ended && waitpid(child->pid, &wait_status, WNOHANG) == child->pid)
            child_ended(up, child, wait_status);
    }
}

static void take_signals(struct up *up)
{
    struct signalfd_siginfo info;
    while (read(up->signal_fd, &info, sizeof(info)) == (ssize_t)sizeof(info)) {
        if (info.ssi_signo == SIGCHLD) {
            reap(up);
        } else if (up->phase == UP_STOPPING && info.ssi_signo != SIGHUP) {
            up->due_ns = tl_clock_now_ns(); /* a user who asks twice does not want to wait */
        } else if (info.ssi_signo != SIGHUP) {
            stop(up, up->phase == UP_STARTING ? TL_EXIT_FAILED : TL_EXIT_OK);
        }
    }
}

static void all_ready(struct up *up)
{
    char duration[32];
    up->phase = UP_RUNNING;
    up->due_ns = TL_TIME_NEVER;
    tl_text_format_duration(tl_clock_now_ns() - up->start_ns, duration, sizeof(duration));
    tl_output_put_escaped(stdout, up->config->source);
    printf(": %zu of %zu workers run here, all ready after %s\n", up->count, up->config->task_count, duration);
    if (tl_output_finish("up", TL_EXIT_OK) != TL_EXIT_OK) stop(up, TL_EXIT_FAILED);
    if (tl_sd_notify("READY=1", NULL) != TL_OK) tl_output_error("up", "the service manager was not notified");
}

/* The process that has sent the message; 0 when that is unknown. */
static pid_t sender_of(struct msghdr *message)
{
    for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header; header = CMSG_NXTHDR(message, header)) {
        struct ucred credentials;
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_CREDENTIALS) continue;
        memcpy(&credentials, CMSG_DATA(header), sizeof(credentials));
        return credentials.pid;
    }
    return 0;
}

static void take_notifications(struct up *up)
{
    char text[1024];
    union {
        char bytes[CMSG_SPACE(sizeof(struct ucred))];
        struct cmsghdr align;
    } control;
    for (;;) {
        struct iovec place = {.iov_base = text, .iov_len = sizeof(text) - 1};
        struct msghdr message = {
            .msg_iov = &place, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
        ssize_t len = recvmsg(up->notify_fd, &message, MSG_CMSG_CLOEXEC);
        if (len < 0) return;
        text[len] = '\0';
        pid_t sender = sender_of(&message);
        for (size_t i = 0; sender > 0 && i < up->count; i++) {
            struct tl_up_child *child = &up->children[i];
            if (child->pid != sender || child->is_ready || strncmp(text, "READY=1", 7) != 0) continue;
            child->is_ready = true;
            up->ready_count++;
        }
    }
}

/* -------------------------------------------------------------------------------------------------------- loop -- */

static int poll_timeout_ms(const struct up *up)
{
    int64_t left_ns = tl_clock_remaining_ns(up->due_ns);
    if (left_ns == TL_TIME_NEVER) return -1;
    int64_t left_ms = left_ns / TL_NS_PER_MS + 1;
    return left_ms < 60000 ? (int)left_ms : 60000;
}

static enum tl_status run_loop(struct up *up, struct tl_error *ret_error)
{
    struct pollfd *polled = calloc(up->count + 2, sizeof(*polled));
    if (!polled) {
        signal_children(up, SIGKILL);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to wait for %zu workers", up->count);
    }
    while (up->ended_count < up->count) {
        polled[0] = (struct pollfd){.fd = up->signal_fd, .events = POLLIN};
        polled[1] = (struct pollfd){.fd = up->notify_fd, .events = POLLIN};
        for (size_t i = 0; i < up->count; i++)
            polled[i + 2] = (struct pollfd){.fd = up->children[i].log_fd, .events = POLLIN};
        poll(polled, up->count + 2, poll_timeout_ms(up));
        for (size_t i = 0; i < up->count; i++)
            if (polled[i + 2].revents) tl_up_child_read_log(&up->children[i]);
        if (tl_clock_remaining_ns(up->due_ns) == 0) give_up(up);
        take_notifications(up);
        take_signals(up);
        if (up->phase == UP_STARTING && up->ready_count == up->count) all_ready(up);
    }
    free(polled);
    return TL_OK;
}

static enum tl_status start_all(struct up *up, struct tl_error *ret_error)
{
    up->start_ns = tl_clock_now_ns();
    up->due_ns = tl_clock_deadline_ns(up->ready_ns);
    for (size_t i = 0; i < up->count; i++) {
        enum tl_status status = tl_up_child_start(&up->children[i], &up->launch, ret_error);
        if (status == TL_OK) continue;
        up->count = i; /* those that run are stopped */
        return status;
    }
    return TL_OK;
}

static int run(struct up *up)
{
    struct tl_error error;
    const char *text = tl_config_tf_text();
    enum tl_status status = up->launch.config_path
                                ? tl_config_read(up->launch.config_path, &up->config, &error)
                                : tl_config_parse_tf(text ? text : "", text ? strlen(text) : 0, &up->config, &error);
    if (status == TL_OK) status = choose_children(up, &error);
    if (status == TL_OK) status = open_notify_socket(up, &error);
    if (status == TL_OK) status = open_signals(up, &error);
    if (status == TL_OK) {
        status = start_all(up, &error);
        if (status != TL_OK) {
            tl_output_error("up", "%s", error.message);
            stop(up, TL_EXIT_FAILED);
        }
        status = run_loop(up, &error);
    }
    if (status == TL_OK) return up->code;
    tl_output_error("up", "%s", error.message);
    return TL_EXIT_FAILED;
}

/* Whether it is the standard input, or a pipe such as a shell makes of <(command). */
static bool can_be_read_once(const char *path)
{
    struct stat status;
    return strcmp(path, "-") == 0 || (stat(path, &status) == 0 && !S_ISREG(status.st_mode));
}

/* The workers would refuse it, after some had started. -1, or the exit code. */
static int check_log(const struct tl_up_launch *launch, const struct tl_options *options)
{
    enum tl_log_level level;
    const char *format = launch->log_format;
    if (launch->log_level && !tl_log_parse_level(launch->log_level, &level))
        return tl_options_refuse(options, "--log-level %s: there are error, warn, info and debug", launch->log_level);
    if (format && strcmp(format, "json") != 0 && strcmp(format, "key-value") != 0)
        return tl_options_refuse(options, "--log-format %s: there are key-value and json", format);
    return -1;
}

int tl_command_up(int argc, char **argv)
{
    struct up up = {.ready_ns = DEFAULT_READY_NS, .notify_fd = -1, .signal_fd = -1, .due_ns = TL_TIME_NEVER};
    int first;
    const struct tl_option items[] = {
        {"config", 'c', TL_OPTION_TEXT, &up.launch.config_path, "FILE",
         "the cluster's JSON file; without it TF_CONFIG"},
        {"only", 'o', TL_OPTION_TEXTS, &up.only, "JOB[:N]",
         "only these tasks, as ps, ps:0 or /job:ps/task:0; may be repeated"},
        {"timeout", 0, TL_OPTION_DURATION, &up.ready_ns, "DURATION", "until all must be ready (60s)"},
        {"log-level", 0, TL_OPTION_TEXT, &up.launch.log_level, "LEVEL", "error, warn, info or debug"},
        {"log-format", 0, TL_OPTION_TEXT, &up.launch.log_format, "FORMAT", "key-value or json"},
    };
    const struct tl_options options = {
        .command = "up",
        .usage = "--config FILE [--only JOB[:N]]...",
        .description =
            "Starts every worker of a cluster whose host is this machine, and stops all on Ctrl-C or when one\n"
            "fails.",
        .items = items,
        .count = TL_ARRAY_COUNT(items),
        .usage_exit = TL_EXIT_USAGE,
    };
    int code = tl_options_parse(&options, argc, argv, &first);
    if (code < 0 && first < argc) code = tl_options_refuse(&options, "unexpected argument %s", argv[first]);
    if (code < 0 && !up.launch.config_path && !tl_config_tf_text())
        code = tl_options_refuse(&options, "which cluster? --config FILE");
    if (code < 0 && up.launch.config_path && can_be_read_once(up.launch.config_path))
        code = tl_options_refuse(&options, "--config %s: every worker reads the file by itself, so it must be one",
                                 up.launch.config_path);
    if (code < 0) code = check_log(&up.launch, &options);
    if (code < 0) code = run(&up);
    if (up.notify_fd >= 0) close(up.notify_fd);
    if (up.signal_fd >= 0) close(up.signal_fd);
    free(up.children);
    tl_config_destroy(up.config);
    tl_texts_fini(&up.only);
    return code;
}
