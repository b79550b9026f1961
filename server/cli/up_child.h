// SPDX-License-Identifier: Apache-2.0
/* One worker that `tensorlane up` runs: its process, its log, whether it is ready, how it ended. */
#ifndef SERVER_CLI_UP_CHILD_H
#define SERVER_CLI_UP_CHILD_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "config/config.h"

#define TL_MAX_LOG_LINE_BYTES 16384

struct tl_up_child {
    const struct tl_config_task *task;
    const char *colour; /* escape sequence that colours its prefix */
    pid_t pid;          /* 0: not started */
    int log_fd;         /* where its log comes from, -1: closed */
    bool has_json_log;
    bool is_ready;
    bool is_ended;
    int wait_status;
    char reason[TL_ERROR_MESSAGE_BYTES]; /* why it could not start, as its last line says; "" when it does not */
    size_t line_len;
    char line[TL_MAX_LOG_LINE_BYTES]; /* the line that is not complete yet */
};

struct tl_up_launch {
    const char *config_path; /* NULL: TF_CONFIG */
    const char *log_level;   /* NULL: as configured */
    const char *log_format;
    const char *notify_name; /* value of NOTIFY_SOCKET for the children */
};

/* Starts `tensorlane serve` for child->task, in a process group of its own so that a Ctrl-C reaches only the parent,
 * with its output coming through child->log_fd. Errors: as tl_error_set_errno for what could not be made. */
enum tl_status tl_up_child_start(struct tl_up_child *child, const struct tl_up_launch *launch,
                                 struct tl_error *ret_error) TL_MUST_USE;

/* Reads what there is of its log and prints the complete lines to stderr, each after the task's name, or as a JSON
 * object with the name in it when the log is JSON; closes log_fd at the end. */
void tl_up_child_read_log(struct tl_up_child *child);

/* "exit status 1", "signal 9 (Killed)"; returns buffer. */
char *tl_up_child_format_end(const struct tl_up_child *child, char *buffer, size_t capacity);

#endif
