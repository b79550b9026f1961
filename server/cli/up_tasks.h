// SPDX-License-Identifier: Apache-2.0
/* Which tasks of a cluster `tensorlane up` starts. */
#ifndef SERVER_CLI_UP_TASKS_H
#define SERVER_CLI_UP_TASKS_H

#include <stddef.h>

#include "config/config.h"

/* The tasks whose host is this machine, or those of them that are named: by job, by "JOB:N" or by "/job:JOB/task:N".
 * Errors: TL_NOT_FOUND: a name that no task has; no such task is of this machine. TL_RESOURCE_EXHAUSTED: no memory.
 * Ownership: free(*ret_tasks). Blocks: for the name resolution. */
enum tl_status tl_up_tasks_choose(const struct tl_config *config, const char *const *names, size_t name_count,
                                  const struct tl_config_task ***ret_tasks, size_t *ret_count,
                                  struct tl_error *ret_error) TL_MUST_USE;

#endif
