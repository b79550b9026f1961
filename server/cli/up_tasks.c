// SPDX-License-Identifier: Apache-2.0
/* Choosing the tasks of this machine. A host that cannot be resolved is taken for another machine, and that is said. */
#include "server/cli/up_tasks.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/text.h"
#include "server/cli/local_host.h"
#include "server/cli/output.h"

/* True when the name means the task: its job, or the task itself. */
static bool is_named(const struct tl_config *config, const struct tl_config_task *task, const char *name)
{
    const struct tl_config_task *found;
    if (strcmp(name, task->job) == 0) return true;
    return tl_config_find_name(config, name, &found, NULL) == TL_OK && found == task;
}

static bool is_wanted(const struct tl_config *config, const struct tl_config_task *task, const char *const *names,
                      size_t name_count)
{
    for (size_t i = 0; i < name_count; i++)
        if (is_named(config, task, names[i])) return true;
    return name_count == 0;
}

static enum tl_status check_name(const struct tl_config *config, const char *name, struct tl_error *ret_error)
{
    const struct tl_config_task *found;
    enum tl_status status = TL_OK;
    for (size_t i = 0; i < config->task_count; i++)
        if (is_named(config, &config->tasks[i], name)) return TL_OK;
    const char **jobs = calloc(config->task_count, sizeof(*jobs));
    if (!jobs) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory");
    for (size_t i = 0; i < config->task_count; i++)
        jobs[i] = config->tasks[i].job;
    const char *nearest = tl_text_nearest(name, jobs, config->task_count);
    if (strchr(name, ':')) {
        status = tl_config_find_name(config, name, &found, ret_error);
    } else {
        status = tl_error_set(ret_error, TL_NOT_FOUND, "%s has no job '%s'; there is '%s'", config->source, name,
                              nearest ? nearest : jobs[0]);
    }
    free(jobs);
    return status;
}

/* The host of the task is this machine. */
static bool is_local(struct tl_local_hosts *hosts, const struct tl_config_task *task)
{
    char host[256];
    uint16_t port;
    const char *reason = NULL;
    if (!task->address || tl_address_split(task->address, host, sizeof(host), &port, NULL) != TL_OK) return false;
    bool answer = tl_local_hosts_has(hosts, host, &reason);
    if (reason) tl_output_error("up", "%s: host '%s' is taken for another machine: %s", task->name, host, reason);
    return answer;
}

static enum tl_status choose(const struct tl_config *config, const char *const *names, size_t name_count,
                             struct tl_local_hosts *hosts, const struct tl_config_task **tasks, size_t *ret_count,
                             struct tl_error *ret_error)
{
    size_t count = 0;
    for (size_t i = 0; i < config->task_count; i++) {
        const struct tl_config_task *task = &config->tasks[i];
        if (!is_wanted(config, task, names, name_count)) continue;
        if (is_local(hosts, task)) tasks[count++] = task;
    }
    *ret_count = count;
    if (count > 0) return TL_OK;
    return tl_error_set(ret_error, TL_NOT_FOUND, "%s: no host of %s tasks is this machine", config->source,
                        name_count > 0 ? "the named" : "its");
}

enum tl_status tl_up_tasks_choose(const struct tl_config *config, const char *const *names, size_t name_count,
                                  const struct tl_config_task ***ret_tasks, size_t *ret_count,
                                  struct tl_error *ret_error)
{
    for (size_t i = 0; i < name_count; i++) {
        enum tl_status status = check_name(config, names[i], ret_error);
        if (status != TL_OK) return status;
    }
    struct tl_local_hosts *hosts = tl_local_hosts_create();
    if (!hosts) return tl_error_set_errno(ret_error, errno, "cannot read the addresses of this machine");
    const struct tl_config_task **tasks = calloc(config->task_count + 1, sizeof(*tasks));
    enum tl_status status = TL_OK;
    if (!tasks) {
        status = tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for %zu tasks", config->task_count);
    } else {
        status = choose(config, names, name_count, hosts, tasks, ret_count, ret_error);
    }
    tl_local_hosts_destroy(hosts);
    if (status != TL_OK) {
        free(tasks);
        return status;
    }
    *ret_tasks = tasks;
    return TL_OK;
}
