// SPDX-License-Identifier: Apache-2.0
/* The configuration of one task as a command line names it: --config, --job, --task, or TF_CONFIG. */
#ifndef SERVER_CLI_TASK_CONFIG_H
#define SERVER_CLI_TASK_CONFIG_H

#include <stdint.h>

#include <tensorlane/status.h>

#include "config/config.h"
#include "server/cli/options.h"

/* The flags; begin with TL_TASK_FLAGS_INIT. */
struct tl_task_flags {
    const char *config_path; /* NULL: TF_CONFIG */
    const char *job;         /* NULL: the task of TF_CONFIG */
    uint32_t task;           /* TL_TASK_NOT_GIVEN: the first one of the job */
};

#define TL_TASK_NOT_GIVEN UINT32_MAX
#define TL_TASK_FLAGS_INIT                                                                                             \
    {                                                                                                                  \
        .task = TL_TASK_NOT_GIVEN                                                                                      \
    }

/* The flags for a command's table. */
#define TL_TASK_OPTIONS(flags)                                                                                         \
    {"config",       'c',                                                                                              \
     TL_OPTION_TEXT, &(flags)->config_path,                                                                            \
     "FILE",         "the cluster's JSON file, - for standard input; without it TF_CONFIG"},                           \
        {"job", 'j', TL_OPTION_TEXT, &(flags)->job, "JOB", "of which job; without it TF_CONFIG's task"},               \
    {                                                                                                                  \
        "task", 't', TL_OPTION_U32, &(flags)->task, "N", "which task of it (0)"                                        \
    }

/* Reads the configuration, gives it the environment and finds the task. Warnings go to stderr.
 * Ownership: *ret_config until tl_config_destroy; the task belongs to it.
 * Errors: of tl_config_read, tl_config_parse_tf, tl_config_apply_environment and tl_task_config_find. */
enum tl_status tl_task_config_read(const struct tl_task_flags *flags, const char *command,
                                   struct tl_config **ret_config, const struct tl_config_task **ret_task,
                                   struct tl_error *ret_error) TL_MUST_USE;

/* Finds the task that --job and --task name, or the one of TF_CONFIG. job may be NULL, task TL_TASK_NOT_GIVEN. The task
 * belongs to the configuration. Errors: of tl_config_find_task. TL_INVALID_ARGUMENT: no task is named, or its number
 * without its job. */
enum tl_status tl_task_config_find(const struct tl_config *config, const char *job, uint32_t task,
                                   const struct tl_config_task **ret_task, struct tl_error *ret_error) TL_MUST_USE;

/* Gives a configuration the variables of this process. Warnings go to stderr. Errors: of tl_config_apply_environment.
 */
enum tl_status tl_task_config_apply_environment(struct tl_config *config, const char *command,
                                                struct tl_error *ret_error) TL_MUST_USE;

#endif
