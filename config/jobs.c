// SPDX-License-Identifier: Apache-2.0
/*
 * Reads the "jobs" object.
 *
 * Happy path: every member names a job of the cluster; its settings become the layer of all tasks of the job; then
 * every member of its "tasks" names a task, whose settings become the layer of that task. Failure modes: a job or a
 * task that is not in the cluster is refused with those that are.
 */
#include "config/jobs.h"

#include <string.h>

#include "base/error.h"
#include "config/cluster.h"
#include "config/quote.h"

/* More jobs than these are not searched for the nearest name. */
#define MAX_NAMES 256

struct reading {
    const struct tl_json_value *cluster;
    const struct tl_settings_layer *top;
    struct tl_config_task *tasks;
    size_t count;
    const char *folder;
    struct tl_arena *arena;
    const struct tl_settings_layer **layers;
};

/* The tasks of one job: [first, end). */
struct range {
    size_t first;
    size_t end;
};

/* Whether the text has a cluster in which this job is missing. If not, the text's error is elsewhere. */
static bool is_unknown_job(const struct reading *reading, const char *job)
{
    struct tl_json_value found;
    return json_is_object(reading->cluster->json) && !tl_json_member(reading->cluster, job, &found);
}

/* Checks the settings of a task that has no layer, because its entry in the cluster is wrong. */
static enum tl_status read_unplaced(const struct reading *reading, enum tl_settings_level level,
                                    const struct tl_json_value *object, struct tl_error *ret_error)
{
    const struct tl_settings_layer *layer;
    return tl_settings_read(object, level, reading->folder, reading->arena, reading->top, &layer, ret_error);
}

static enum tl_status read_task(struct reading *reading, const struct range *range, const struct tl_json_value *task,
                                struct tl_error *ret_error)
{
    char quoted[TL_QUOTE_BYTES], described[TL_QUOTE_BYTES + 96];
    uint32_t index;
    if (!tl_cluster_parse_index(task->key, &index)) {
        return tl_json_fail_key(task, TL_INVALID_ARGUMENT, ret_error,
                                "%s is no task index; write a number of 0 to %u without leading zeros",
                                tl_quote(task->key, quoted), TL_MAX_TASK_INDEX);
    }
    if (range->first == range->end) return read_unplaced(reading, TL_LEVEL_TASK, task, ret_error);
    struct tl_config_task *found = tl_cluster_find_index(reading->tasks, range->first, range->end, index);
    if (!found) {
        tl_cluster_describe_job(reading->tasks, range->first, range->end, described, sizeof(described));
        return tl_json_fail_key(task, TL_INVALID_ARGUMENT, ret_error,
                                "task %u is not in the cluster, where %s; add it there or correct the index", index,
                                described);
    }
    const struct tl_settings_layer **layer = &reading->layers[found - reading->tasks];
    return tl_settings_read(task, TL_LEVEL_TASK, reading->folder, reading->arena, *layer, layer, ret_error);
}

static enum tl_status read_job(struct reading *reading, const struct tl_json_value *job, struct tl_error *ret_error)
{
    struct range range = {0};
    bool is_found = tl_cluster_find_job(reading->tasks, reading->count, job->key, &range.first, &range.end);
    if (!is_found && is_unknown_job(reading, job->key)) {
        const char *names[MAX_NAMES];
        size_t count = tl_cluster_job_names(reading->tasks, reading->count, names, MAX_NAMES);
        return tl_json_fail_unknown_key(job, "job in the cluster called", names, count, ret_error);
    }
    const struct tl_settings_layer *layer = is_found ? reading->layers[range.first] : reading->top;
    enum tl_status status =
        tl_settings_read(job, TL_LEVEL_JOB, reading->folder, reading->arena, layer, &layer, ret_error);
    if (status != TL_OK) return status;
    for (size_t i = range.first; i < range.end; i++) {
        reading->layers[i] = layer;
    }
    struct tl_json_value tasks, task;
    if (!tl_json_member(job, "tasks", &tasks)) return TL_OK;
    status = tl_json_expect(&tasks, JSON_OBJECT, "an object of tasks, {\"0\": {...}}", ret_error);
    if (status != TL_OK) return status;
    TL_JSON_FOREACH(&tasks, task)
    {
        status = tl_json_collect(job->doc, read_task(reading, &range, &task, ret_error), ret_error);
        if (status != TL_OK) return status;
    }
    return TL_OK;
}

enum tl_status tl_jobs_read(const struct tl_json_value *jobs, const struct tl_json_value *cluster,
                            struct tl_config_task *tasks, size_t count, const char *folder, struct tl_arena *arena,
                            const struct tl_settings_layer *top, const struct tl_settings_layer **layers,
                            struct tl_error *ret_error)
{
    struct reading reading = {
        .cluster = cluster,
        .top = top,
        .tasks = tasks,
        .count = count,
        .folder = folder,
        .arena = arena,
        .layers = layers,
    };
    struct tl_json_value job;
    enum tl_status status = tl_json_expect(jobs, JSON_OBJECT, "an object of jobs, {\"ps\": {...}}", ret_error);
    if (status != TL_OK) return status;
    TL_JSON_FOREACH(jobs, job)
    {
        status = tl_json_collect(jobs->doc, read_job(&reading, &job, ret_error), ret_error);
        if (status != TL_OK) return status;
    }
    return TL_OK;
}
