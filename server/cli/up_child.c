// SPDX-License-Identifier: Apache-2.0
/*
 * A child of `tensorlane up`. Its log comes through a pipe, line by line; a line that is longer than the buffer is
 * printed in pieces. The child gets the id of its parent, so that it ends when the parent dies without stopping it.
 */
#include "server/cli/up_child.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"
#include "base/log.h"
#include "server/cli/json_out.h"
#include "server/cli/output.h"

#define MAX_ARGUMENTS 20
/* What a worker that cannot start ends its log with. */
#define LAST_LINE "tensorlane serve: "
/* More than fits into a pipe. */
#define MAX_READS 64

/* ---------------------------------------------------------------------------------------------------- starting -- */

/* The environment for the children: notifications go to this process, and no child has a watchdog. NULL: no memory.
 * Ownership: free the array and its first entry. */
static char **make_environment(const char *notify_name)
{
    static const char *const dropped[] = {"NOTIFY_SOCKET=", "WATCHDOG_USEC=", "WATCHDOG_PID="};
    size_t count = 0, kept = 1;
    while (environ[count])
        count++;
    char **environment = calloc(count + 2, sizeof(*environment));
    if (!environment) return NULL;
    if (asprintf(&environment[0], "NOTIFY_SOCKET=%s", notify_name) < 0) {
        free(environment);
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        bool is_dropped = false;
        for (size_t j = 0; j < TL_ARRAY_COUNT(dropped); j++)
            is_dropped = is_dropped || strncmp(environ[i], dropped[j], strlen(dropped[j])) == 0;
        if (!is_dropped) environment[kept++] = environ[i];
    }
    return environment;
}

/* Fills arguments, whose strings the caller keeps in texts. */
static void make_arguments(const struct tl_up_child *child, const struct tl_up_launch *launch, char texts[2][16],
                           const char *arguments[MAX_ARGUMENTS])
{
    size_t count = 0;
    snprintf(texts[0], sizeof(texts[0]), "%" PRIu32, child->task->index);
    snprintf(texts[1], sizeof(texts[1]), "%d", (int)getpid());
    const char *const pairs[][2] = {
        {"--config", launch->config_path},
        {"--job", child->task->job},
        {"--task", texts[0]},
        {"--parent", texts[1]},
        {"--log-level", launch->log_level},
        {"--log-format", launch->log_format},
    };
    arguments[count++] = "tensorlane";
    arguments[count++] = "serve";
    arguments[count++] = "--no-wait"; /* its reason is printed here */
    for (size_t i = 0; i < TL_ARRAY_COUNT(pairs); i++) {
        if (!pairs[i][1]) continue;
        arguments[count++] = pairs[i][0];
        arguments[count++] = pairs[i][1];
    }
    arguments[count] = NULL;
}

/* Spawns with stdout and stderr going to log_fd; errno value. */
static int spawn(const struct tl_up_child *child, const struct tl_up_launch *launch, char **environment, int log_fd,
                 pid_t *ret_pid)
{
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    const char *arguments[MAX_ARGUMENTS];
    char texts[2][16];
    sigset_t none;
    sigemptyset(&none);
    make_arguments(child, launch, texts, arguments);
    int error_number = posix_spawn_file_actions_init(&actions);
    if (error_number != 0) return error_number;
    error_number = posix_spawnattr_init(&attributes);
    if (error_number != 0) {
        posix_spawn_file_actions_destroy(&actions);
        return error_number;
    }
    posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, log_fd, STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, log_fd, STDERR_FILENO);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK);
    posix_spawnattr_setpgroup(&attributes, 0);
    posix_spawnattr_setsigmask(&attributes, &none);
    error_number = posix_spawn(ret_pid, "/proc/self/exe", &actions, &attributes, (char *const *)arguments, environment);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    return error_number;
}

enum tl_status tl_up_child_start(struct tl_up_child *child, const struct tl_up_launch *launch,
                                 struct tl_error *ret_error)
{
    int fds[2];
    pid_t pid;
    char **environment = make_environment(launch->notify_name);
    if (!environment) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: no memory", child->task->name);
    int error_number = pipe2(fds, O_CLOEXEC) == 0 ? 0 : errno;
    if (error_number == 0) {
        error_number = spawn(child, launch, environment, fds[1], &pid);
        close(fds[1]);
        if (error_number != 0) close(fds[0]);
    }
    free(environment[0]);
    free(environment);
    if (error_number != 0) return tl_error_set_errno(ret_error, error_number, "cannot start %s", child->task->name);
    fcntl(fds[0], F_SETFL, O_NONBLOCK);
    child->has_json_log =
        launch->log_format ? strcmp(launch->log_format, "json") == 0 : child->task->settings.log_format == TL_LOG_JSON;
    child->pid = pid;
    child->log_fd = fds[0];
    return TL_OK;
}

/* --------------------------------------------------------------------------------------------------------- log -- */

/* "NAME | line" for people. */
static void compose_text(FILE *stream, const struct tl_up_child *child, const char *line, size_t len)
{
    bool has_colours = tl_output_has_colours(stderr);
    if (has_colours) fprintf(stream, "\033[%sm", child->colour);
    tl_output_put_escaped(stream, child->task->name);
    fputs(" |", stream);
    if (has_colours) fputs("\033[0m", stream);
    fputc(' ', stream);
    fwrite(line, 1, len, stream);
    fputc('\n', stream);
}

/* An object with the member "task" in front. What a worker writes without its log - an error before there is one, words
 * of a library - becomes the msg of one, so that every line is an object. A task's name needs no escapes. */
static void compose_json(FILE *stream, const struct tl_up_child *child, const char *line, size_t len)
{
    if (len > 2 && line[0] == '{' && line[len - 1] == '}') {
        fprintf(stream, "{\"task\":\"%s\",", child->task->name);
        fwrite(line + 1, 1, len - 1, stream);
        fputc('\n', stream);
        return;
    }
    char *text = strndup(line, len);
    char *escaped = text ? tl_output_escape(text) : NULL;
    struct tl_json_out *object = tl_json_out_object();
    tl_json_out_put_text(object, "task", child->task->name);
    tl_json_out_put_text(object, "msg", escaped ? escaped : "no memory for a line");
    char *json = tl_json_out_text(object, true);
    if (json) fprintf(stream, "%s\n", json);
    free(json);
    free(escaped);
    free(text);
}

/* A standard error that no process reads must not keep the workers from being stopped, so these lines go through the
 * log. */
static void print_line(const struct tl_up_child *child, const char *line, size_t len)
{
    char *text = NULL;
    size_t text_len = 0;
    FILE *stream = open_memstream(&text, &text_len);
    if (!stream) return;
    if (child->has_json_log) {
        compose_json(stream, child, line, len);
    } else {
        compose_text(stream, child, line, len);
    }
    if (fclose(stream) == 0) tl_log_put(text, text_len);
    free(text);
}

/* Keeps the reason when the line is one that says why the child cannot start. */
static void keep_reason(struct tl_up_child *child, const char *line, size_t len)
{
    size_t prefix_len = strlen(LAST_LINE);
    if (len < prefix_len || memcmp(line, LAST_LINE, prefix_len) != 0) return;
    snprintf(child->reason, sizeof(child->reason), "%.*s", (int)(len - prefix_len), line + prefix_len);
}

/* Prints the complete lines of the buffer, or all of it. */
static void print_lines(struct tl_up_child *child, bool is_all)
{
    size_t start = 0;
    for (size_t i = 0; i < child->line_len; i++) {
        if (child->line[i] != '\n') continue;
        print_line(child, child->line + start, i - start);
        keep_reason(child, child->line + start, i - start);
        start = i + 1;
    }
    if (start < child->line_len && (is_all || (start == 0 && child->line_len == sizeof(child->line)))) {
        print_line(child, child->line + start, child->line_len - start);
        start = child->line_len;
    }
    memmove(child->line, child->line + start, child->line_len - start);
    child->line_len -= start;
}

void tl_up_child_read_log(struct tl_up_child *child)
{
    /* Bounded, so that one that never stops writing does not keep the others waiting. */
    for (unsigned i = 0; child->log_fd >= 0 && i < MAX_READS; i++) {
        ssize_t count = read(child->log_fd, child->line + child->line_len, sizeof(child->line) - child->line_len);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0 && errno == EAGAIN) return;
        if (count <= 0) {
            print_lines(child, true);
            close(child->log_fd);
            child->log_fd = -1;
            return;
        }
        child->line_len += (size_t)count;
        print_lines(child, false);
    }
}

char *tl_up_child_format_end(const struct tl_up_child *child, char *buffer, size_t capacity)
{
    if (WIFSIGNALED(child->wait_status)) {
        int signal_number = WTERMSIG(child->wait_status);
        snprintf(buffer, capacity, "signal %d (%s)", signal_number, strsignal(signal_number));
    } else {
        snprintf(buffer, capacity, "exit status %d", WEXITSTATUS(child->wait_status));
    }
    return buffer;
}
