// SPDX-License-Identifier: Apache-2.0
/*
 * The cluster of a running job, from what its launcher says to each of its processes: the variables of Slurm, the names
 * that Kubernetes gives to pods, or a host file.
 *
 * Happy path: the tasks are placed in the launcher's own order, so that a task's index among all is what the launcher
 * calls its rank; the jobs of --tasks share them one after the other; the configuration is checked and printed. No API
 * is asked and no name is looked up. Failure modes: a variable that is missing or cannot be read, numbers of tasks that
 * contradict each other, settings that are wrong. Nothing is printed then but one line on stderr.
 */
#include "server/cli/config_from.h"

#include <ctype.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "config/cluster.h"
#include "config/config.h"
#include "config/quote.h"
#include "server/cli/command.h"
#include "server/cli/output.h"

#define HOSTFILE_MAX_BYTES ((size_t)16 << 20)

const char *tl_from_variable(const char *name)
{
    const char *text = getenv(name);
    return text && text[0] ? text : NULL;
}

/* -------------------------------------------------------------------------------------------------------- jobs -- */

/* Reads "8" or "2x4". */
static bool read_job_count(const char *text, struct tl_from_job *job)
{
    char *end;
    unsigned long size = 1;
    if (!isdigit((unsigned char)*text)) return false;
    unsigned long groups = strtoul(text, &end, 10);
    if (*end == 'x') {
        if (!isdigit((unsigned char)end[1])) return false;
        size = strtoul(end + 1, &end, 10);
        job->group_size = (uint32_t)size;
    }
    if (*end || groups == 0 || groups > TL_LAUNCH_MAX_TASKS || size == 0 || size > TL_LAUNCH_MAX_TASKS / groups)
        return false;
    job->count = (uint32_t)(groups * size);
    return true;
}

static enum tl_status read_job(const char *text, struct tl_from_job *job, struct tl_error *ret_error)
{
    char quoted[TL_QUOTE_BYTES];
    size_t length = strcspn(text, "=");
    bool is_read = length < sizeof(job->name);
    if (is_read) {
        memcpy(job->name, text, length);
        is_read = tl_cluster_is_job_name(job->name) && (!text[length] || read_job_count(text + length + 1, job));
    }
    if (is_read) return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "--tasks %s: must be JOB or JOB=N, with N of 1 to %u",
                        tl_quote(text, quoted), TL_LAUNCH_MAX_TASKS);
}

enum tl_status tl_from_jobs_read(const struct tl_texts *tasks, struct tl_from_job **ret_jobs, size_t *ret_count,
                                 struct tl_error *ret_error)
{
    enum tl_status status = TL_OK;
    struct tl_from_job *jobs = calloc(tasks->count + 1, sizeof(*jobs));
    if (!jobs) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the jobs");
    if (tasks->count == 0) strcpy(jobs[0].name, "worker");
    for (size_t i = 0; status == TL_OK && i < tasks->count; i++) {
        status = read_job(tasks->items[i], &jobs[i], ret_error);
        for (size_t j = 0; status == TL_OK && j < i; j++)
            if (strcmp(jobs[i].name, jobs[j].name) == 0)
                status = tl_error_set(ret_error, TL_INVALID_ARGUMENT, "--tasks names the job %s twice", jobs[i].name);
    }
    if (status != TL_OK) {
        free(jobs);
        return status;
    }
    *ret_jobs = jobs;
    *ret_count = tasks->count ? tasks->count : 1;
    return TL_OK;
}

/* Gives each component of a heterogeneous job the job at its place. False: it has another number of components than
 * there are jobs, or numbers are given, and nothing has changed. */
static bool share_by_group(struct tl_from_job *jobs, size_t job_count, const struct tl_launch *launch)
{
    if (job_count < 2 || job_count != launch->group + 1) return false;
    for (size_t i = 0; i < job_count; i++)
        if (jobs[i].count > 0) return false;
    for (const struct tl_launch_host *host = launch->hosts; host; host = host->hh.next)
        jobs[host->group].count += host->task_count;
    return true;
}

enum tl_status tl_from_share(struct tl_from_job *jobs, size_t job_count, const struct tl_launch *launch,
                             struct tl_error *ret_error)
{
    uint32_t total = launch->task_count;
    uint64_t given = 0;
    struct tl_from_job *rest = NULL;
    if (share_by_group(jobs, job_count, launch)) return TL_OK;
    for (size_t i = 0; i < job_count; i++) {
        if (jobs[i].count == 0 && rest)
            return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                                "how many tasks have %s and %s? Only one --tasks may be without a number", rest->name,
                                jobs[i].name);
        if (jobs[i].count == 0) rest = &jobs[i];
        given += jobs[i].count;
    }
    if (rest && given < total)
        rest->count = total - (uint32_t)given;
    else if (rest)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "no task is left for %s: there are %u", rest->name, total);
    else if (given != total)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "--tasks names %llu tasks, and there are %u; one job may be without a number and has those "
                            "that the others leave",
                            (unsigned long long)given, total);
    return TL_OK;
}

/* ------------------------------------------------------------------------------------------------------ output -- */

/* Checks the text as every worker will, and prints it. */
static enum tl_status check_and_print(const char *text, const struct tl_config_from_flags *flags,
                                      struct tl_error *ret_error)
{
    struct tl_config *config = NULL;
    enum tl_status status = tl_config_parse(text, strlen(text), "cluster.json", NULL, &config, ret_error);
    tl_config_destroy(config);
    if (status == TL_OK)
        puts(text);
    else if (flags->settings)
        tl_error_prefix(ret_error, "with the settings of %s: ", flags->settings);
    return status;
}

enum tl_status tl_from_print(const struct tl_config_from_flags *flags, const struct tl_launch *launch, uint32_t run,
                             struct tl_from_job *jobs, size_t job_count, const char *listen, struct tl_error *ret_error)
{
    char *text = NULL;
    struct tl_launch_task *tasks = calloc(launch->task_count + 1, sizeof(*tasks));
    if (!tasks) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for %u tasks", launch->task_count);
    tl_launch_place(launch, run, tasks);
    const struct tl_from_cluster cluster = {jobs, job_count, tasks, listen};
    enum tl_status status = tl_json_cluster_write(flags, &cluster, &text, ret_error);
    if (status == TL_OK) status = check_and_print(text, flags, ret_error);
    free(text);
    free(tasks);
    return status;
}

enum tl_status tl_from_print_launch(const struct tl_config_from_flags *flags, const struct tl_launch *launch,
                                    uint32_t run, struct tl_error *ret_error)
{
    struct tl_from_job *jobs = NULL;
    size_t count = 0;
    enum tl_status status = tl_from_jobs_read(&flags->tasks, &jobs, &count, ret_error);
    if (status == TL_OK) status = tl_from_share(jobs, count, launch, ret_error);
    if (status == TL_OK) status = tl_from_print(flags, launch, run, jobs, count, NULL, ret_error);
    free(jobs);
    return status;
}

int tl_from_finish(enum tl_status status, const char *action, const struct tl_error *error)
{
    if (status == TL_OK) return tl_output_finish("config", TL_EXIT_OK);
    tl_output_error("config", "%s: %s", action, error->message);
    return TL_EXIT_FAILED;
}

/* --------------------------------------------------------------------------------------------------- host file -- */

/* Reads a whole file, "-" is standard input. Ownership: free(*ret_text). */
static enum tl_status read_text(const char *path, char **ret_text, struct tl_error *ret_error)
{
    FILE *file = strcmp(path, "-") == 0 ? stdin : fopen(path, "re");
    if (!file) return tl_error_set_errno(ret_error, errno, "%s", path);
    size_t capacity = 0;
    char *text = NULL;
    errno = 0;
    ssize_t length = getdelim(&text, &capacity, '\0', file);
    int number = ferror(file) ? errno : 0;
    bool is_text = length <= 0 || (size_t)length == strlen(text);
    if (file != stdin) fclose(file);
    if (number == 0 && is_text && length > 0 && (size_t)length <= HOSTFILE_MAX_BYTES) {
        *ret_text = text;
        return TL_OK;
    }
    free(text);
    if (number) return tl_error_set_errno(ret_error, number, "cannot read %s", path);
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s is %s", path,
                        length <= 0 ? "empty"
                        : is_text   ? "too large"
                                    : "no text");
}

int tl_config_from_hostfile(const struct tl_config_from_flags *flags, const char *path)
{
    struct tl_launch launch = {0};
    struct tl_error error = {.code = TL_OK};
    char *text = NULL;
    enum tl_status status = read_text(path, &text, &error);
    if (status == TL_OK) {
        status = tl_launch_add_hostfile(&launch, text, flags->per_host, &error);
        if (status != TL_OK) tl_error_prefix(&error, "%s: ", path);
    }
    if (status == TL_OK && launch.task_count == 0)
        status = tl_error_set(&error, TL_INVALID_ARGUMENT, "%s names no host", path);
    if (status == TL_OK) {
        status = tl_from_print_launch(flags, &launch, TL_LAUNCH_BLOCK, &error);
        if (status != TL_OK) tl_error_prefix(&error, "with the hosts of %s: ", path);
    }
    free(text);
    tl_launch_fini(&launch);
    return tl_from_finish(status, "from-hostfile", &error);
}
