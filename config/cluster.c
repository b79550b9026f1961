// SPDX-License-Identifier: Apache-2.0
/*
 * Reads the "cluster" object.
 *
 * Happy path: every job is a list or a map of addresses; each address is checked and becomes a task; the tasks are
 * compared by the one spelling of their address, then sorted by job and index. Failure modes: whatever is wrong is
 * refused where it stands; where two tasks have one address, the second one is refused. When the document collects
 * errors, a task with a wrong address stays among the tasks, so that "jobs" can refer to it.
 */
#include "config/cluster.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "config/address.h"
#include "config/quote.h"

/* A task while the cluster is read. */
struct draft {
    struct tl_config_task task;
    const char *canonical; /* its address */
    uint32_t node;         /* node of its address; also the order of the text */
};

struct reading {
    struct tl_json_doc *doc;
    struct tl_arena *arena;
    struct draft *drafts;
    size_t count;
};

bool tl_cluster_parse_index(const char *text, uint32_t *ret_index)
{
    size_t length = strlen(text);
    if (length == 0 || length > 9 || strspn(text, "0123456789") != length) return false;
    if (text[0] == '0' && length > 1) return false;
    *ret_index = (uint32_t)strtoul(text, NULL, 10);
    return true;
}

const char *tl_cluster_task_name(struct tl_arena *arena, const char *job, uint32_t index)
{
    return tl_arena_format(arena, "/job:%s/task:%" PRIu32, job, index);
}

bool tl_cluster_is_job_name(const char *name)
{
    size_t length = strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-");
    return length > 0 && length < TL_JOB_NAME_BYTES && name[length] == '\0';
}

/* Checks a task's address and writes its one spelling. */
static enum tl_status check_address(const struct tl_json_value *value, char ret_canonical[TL_ADDRESS_BYTES],
                                    struct tl_error *ret_error)
{
    struct tl_error reason;
    enum tl_status status = tl_json_expect(value, JSON_STRING, "an address such as \"host:4000\"", ret_error);
    if (status != TL_OK) return status;
    status = tl_address_check(json_string_value(value->json), TL_ADDRESS_DIAL, ret_canonical, &reason);
    return status == TL_OK ? TL_OK : tl_json_fail(value, status, ret_error, "%s", reason.message);
}

static enum tl_status read_task(struct reading *reading, const char *job, uint32_t index,
                                const struct tl_json_value *value, struct tl_error *ret_error)
{
    char canonical[TL_ADDRESS_BYTES] = "";
    enum tl_status status = tl_json_collect(value->doc, check_address(value, canonical, ret_error), ret_error);
    if (status != TL_OK) return status;
    const char *address = json_is_string(value->json) ? json_string_value(value->json) : "";
    struct draft *draft = &reading->drafts[reading->count];
    draft->node = value->node;
    draft->canonical = tl_arena_format(reading->arena, "%s", canonical);
    draft->task.job = job;
    draft->task.index = index;
    draft->task.name = tl_cluster_task_name(reading->arena, job, index);
    draft->task.address = tl_arena_format(reading->arena, "%s", address);
    if (!draft->canonical || !draft->task.name || !draft->task.address) {
        return tl_json_no_memory(value->doc->source, ret_error);
    }
    reading->count++;
    return TL_OK;
}

static enum tl_status read_job(struct reading *reading, const struct tl_json_value *job, struct tl_error *ret_error)
{
    char quoted[TL_QUOTE_BYTES];
    const char *name = tl_arena_format(reading->arena, "%s", job->key);
    if (!name) return tl_json_no_memory(job->doc->source, ret_error);
    struct tl_json_value value;
    TL_JSON_FOREACH(job, value)
    {
        uint32_t index = (uint32_t)value.index;
        enum tl_status status = TL_OK;
        if (!value.key || tl_cluster_parse_index(value.key, &index)) {
            status = read_task(reading, name, index, &value, ret_error);
        } else {
            status = tl_json_fail_key(&value, TL_INVALID_ARGUMENT, ret_error,
                                      "%s is no task index; write a number of 0 to %u without leading zeros",
                                      tl_quote(value.key, quoted), TL_MAX_TASK_INDEX);
        }
        status = tl_json_collect(job->doc, status, ret_error);
        if (status != TL_OK) return status;
    }
    return TL_OK;
}

static size_t task_count(const struct tl_json_value *job)
{
    return json_is_array(job->json) ? json_array_size(job->json) : json_object_size(job->json);
}

/* Checks a job's name and type. */
static enum tl_status check_job(const struct tl_json_value *job, bool allows_empty_jobs, struct tl_error *ret_error)
{
    char quoted[TL_QUOTE_BYTES];
    if (!tl_cluster_is_job_name(job->key)) {
        return tl_json_fail_key(job, TL_INVALID_ARGUMENT, ret_error,
                                "%s is no job name; use 1 to %d letters, digits, '_', '.' and '-'",
                                tl_quote(job->key, quoted), TL_JOB_NAME_BYTES - 1);
    }
    if (!json_is_array(job->json) && !json_is_object(job->json)) {
        return tl_json_fail(job, TL_INVALID_ARGUMENT, ret_error,
                            "must be a list of addresses, [\"host:4000\"], or a map, {\"0\": \"host:4000\"}, not %s",
                            tl_json_type_name(job->json));
    }
    if (task_count(job) == 0 && !allows_empty_jobs) {
        return tl_json_fail(job, TL_INVALID_ARGUMENT, ret_error,
                            "the job has no tasks; add an address such as \"host:4000\" or remove the job");
    }
    return TL_OK;
}

/* Checks all jobs and counts their tasks. */
static enum tl_status check_jobs(const struct tl_json_value *cluster, bool allows_empty_jobs, size_t *ret_count,
                                 struct tl_error *ret_error)
{
    size_t total = 0;
    struct tl_json_value job;
    bool is_wrong = false;
    TL_JSON_FOREACH(cluster, job)
    {
        enum tl_status status = check_job(&job, allows_empty_jobs, ret_error);
        is_wrong |= status != TL_OK;
        status = tl_json_collect(cluster->doc, status, ret_error);
        if (status != TL_OK) return status;
        total += task_count(&job);
    }
    *ret_count = total;
    if (total > 0 || is_wrong) return TL_OK;
    return tl_json_fail(cluster, TL_INVALID_ARGUMENT, ret_error,
                        "the cluster has no tasks; add a job such as \"worker\": [\"host:4000\"]");
}

static int compare_addresses(const void *left, const void *right)
{
    const struct draft *a = left, *b = right;
    int order = strcmp(a->canonical, b->canonical);
    if (order != 0) return order;
    return a->node < b->node ? -1 : a->node > b->node;
}

static enum tl_status refuse_address(const struct reading *reading, const struct draft *second,
                                     struct tl_error *ret_error)
{
    struct tl_json_value value = {.doc = reading->doc, .node = second->node};
    return tl_json_fail(&value, TL_INVALID_ARGUMENT, ret_error,
                        "%s has the address %s, which %s has too; give each task its own", second->task.name,
                        second->task.address, second[-1].task.name);
}

/* Reports the tasks that have the address of another one. When the document collects no errors, it reports the task
 * that comes first in the text. */
static enum tl_status check_addresses(struct reading *reading, struct tl_error *ret_error)
{
    const struct draft *first = NULL;
    qsort(reading->drafts, reading->count, sizeof(*reading->drafts), compare_addresses);
    for (size_t i = 1; i < reading->count; i++) {
        const struct draft *draft = &reading->drafts[i];
        /* A task whose address is wrong has none to compare. */
        if (draft->canonical[0] == '\0' || strcmp(draft[-1].canonical, draft->canonical) != 0) continue;
        if (!first || draft->node < first->node) first = draft;
        if (!reading->doc->errors) continue;
        enum tl_status status = tl_json_collect(reading->doc, refuse_address(reading, draft, ret_error), ret_error);
        if (status != TL_OK) return status;
    }
    return first && !reading->doc->errors ? refuse_address(reading, first, ret_error) : TL_OK;
}

static int compare_tasks(const void *left, const void *right)
{
    const struct tl_config_task *a = left, *b = right;
    int order = strcmp(a->job, b->job);
    if (order != 0) return order;
    return a->index < b->index ? -1 : a->index > b->index;
}

enum tl_status tl_cluster_read(const struct tl_json_value *cluster, bool allows_empty_jobs, struct tl_arena *arena,
                               struct tl_config_task **ret_tasks, size_t *ret_count, struct tl_error *ret_error)
{
    struct reading reading = {.doc = cluster->doc, .arena = arena};
    size_t total = 0;
    enum tl_status status = tl_json_expect(cluster, JSON_OBJECT, "an object of jobs", ret_error);
    if (status == TL_OK) status = check_jobs(cluster, allows_empty_jobs, &total, ret_error);
    if (status != TL_OK) return status;
    reading.drafts = tl_arena_alloc_array(arena, total, sizeof(*reading.drafts));
    struct tl_config_task *tasks = tl_arena_alloc_array(arena, total, sizeof(*tasks));
    if (!reading.drafts || !tasks) return tl_json_no_memory(cluster->doc->source, ret_error);
    struct tl_json_value job;
    TL_JSON_FOREACH(cluster, job)
    {
        if (!tl_cluster_is_job_name(job.key)) continue;
        status = read_job(&reading, &job, ret_error);
        if (status != TL_OK) return status;
    }
    status = check_addresses(&reading, ret_error);
    if (status != TL_OK) return status;
    for (size_t i = 0; i < reading.count; i++) {
        tasks[i] = reading.drafts[i].task;
    }
    qsort(tasks, reading.count, sizeof(*tasks), compare_tasks);
    *ret_tasks = tasks;
    *ret_count = reading.count;
    return TL_OK;
}

/* --------------------------------------------------------------------------------------------------- searching -- */

/* The first task that does not come before (job, index). */
static size_t lower_bound(const struct tl_config_task *tasks, size_t first, size_t end, const char *job, uint32_t index)
{
    const struct tl_config_task wanted = {.job = job, .index = index};
    while (first < end) {
        size_t middle = first + (end - first) / 2;
        if (compare_tasks(&tasks[middle], &wanted) < 0) {
            first = middle + 1;
        } else {
            end = middle;
        }
    }
    return first;
}

bool tl_cluster_find_job(const struct tl_config_task *tasks, size_t count, const char *job, size_t *ret_first,
                         size_t *ret_end)
{
    size_t first = lower_bound(tasks, 0, count, job, 0);
    if (first == count || strcmp(tasks[first].job, job) != 0) return false;
    size_t end = lower_bound(tasks, first, count, job, UINT32_MAX);
    *ret_first = first;
    *ret_end = end;
    return true;
}

struct tl_config_task *tl_cluster_find_index(struct tl_config_task *tasks, size_t first, size_t end, uint32_t index)
{
    size_t place = lower_bound(tasks, first, end, tasks[first].job, index);
    return place < end && tasks[place].index == index ? &tasks[place] : NULL;
}

size_t tl_cluster_job_names(const struct tl_config_task *tasks, size_t count, const char **ret_names, size_t capacity)
{
    size_t names = 0;
    for (size_t i = 0; i < count && names < capacity; i++) {
        if (i == 0 || strcmp(tasks[i - 1].job, tasks[i].job) != 0) ret_names[names++] = tasks[i].job;
    }
    return names;
}

char *tl_cluster_describe_job(const struct tl_config_task *tasks, size_t first, size_t end, char *buffer,
                              size_t capacity)
{
    uint32_t low = tasks[first].index, high = tasks[end - 1].index;
    char quoted[TL_QUOTE_BYTES];
    const char *job = tl_quote(tasks[first].job, quoted);
    if (end - first == 1) {
        snprintf(buffer, capacity, "job %s has only task %" PRIu32, job, low);
    } else if (high - low == end - first - 1) {
        snprintf(buffer, capacity, "job %s has the tasks %" PRIu32 " to %" PRIu32, job, low, high);
    } else {
        snprintf(buffer, capacity, "job %s has %zu tasks between %" PRIu32 " and %" PRIu32, job, end - first, low,
                 high);
    }
    return buffer;
}
