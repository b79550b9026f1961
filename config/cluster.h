// SPDX-License-Identifier: Apache-2.0
/* The "cluster" object: jobs, tasks and their addresses. */
#ifndef CONFIG_CLUSTER_H
#define CONFIG_CLUSTER_H

#include <stdbool.h>
#include <stddef.h>

#include <tensorlane/status.h>

#include "config/arena.h"
#include "config/config.h"
#include "config/json_doc.h"

/* Tasks are numbered from 0 to this. */
#define TL_MAX_TASK_INDEX 999999999u

/* Holds every name of a job. */
#define TL_JOB_NAME_BYTES 129

/* Reads {"ps": ["host:port", ...], "worker": {"0": "host:port", ...}} into tasks sorted by job name, then index, whose
 * settings are not filled. allows_empty_jobs: a job without tasks is passed over, as TensorFlow does, not refused.
 * Errors: TL_INVALID_ARGUMENT: no tasks, a job name, index or address that is none, two tasks at one address.
 * TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_cluster_read(const struct tl_json_value *cluster, bool allows_empty_jobs, struct tl_arena *arena,
                               struct tl_config_task **ret_tasks, size_t *ret_count,
                               struct tl_error *ret_error) TL_MUST_USE;

/* 1 to 128 letters, digits, '_', '.' and '-'. */
bool tl_cluster_is_job_name(const char *name);

/* "/job:ps/task:0". NULL: no memory. */
const char *tl_cluster_task_name(struct tl_arena *arena, const char *job, uint32_t index);

/* A task index as text: digits without leading zeros, up to TL_MAX_TASK_INDEX. */
bool tl_cluster_parse_index(const char *text, uint32_t *ret_index);

/* The tasks of a job, [*ret_first, *ret_end) of the sorted tasks. False when there is no such job. */
bool tl_cluster_find_job(const struct tl_config_task *tasks, size_t count, const char *job, size_t *ret_first,
                         size_t *ret_end);

/* The task in [first, end), which are of one job; NULL when there is none. */
struct tl_config_task *tl_cluster_find_index(struct tl_config_task *tasks, size_t first, size_t end, uint32_t index);

/* The names of all jobs, once each, up to capacity; returns how many. */
size_t tl_cluster_job_names(const struct tl_config_task *tasks, size_t count, const char **ret_names, size_t capacity);

/* Writes "job "ps" has the tasks 0 to 3" or "... has 4 tasks from 0 to 9"; returns the buffer. */
char *tl_cluster_describe_job(const struct tl_config_task *tasks, size_t first, size_t end, char *buffer,
                              size_t capacity);

#endif
