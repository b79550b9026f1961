// SPDX-License-Identifier: Apache-2.0
/*
 * The tasks of a job of Slurm, from the variables that Slurm sets in batch scripts and in each task.
 *
 * In a step that srun has started these are the tasks of the step, so that their numbers are SLURM_PROCID; elsewhere
 * those of the job. The batch script and an interactive shell are steps, too, of one node, which are not meant. The
 * components of a heterogeneous job follow one another, unless a step is of one of them.
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "config/quote.h"
#include "server/cli/config_from.h"

/* Steps from this number on are none that srun has started. */
#define FIRST_SPECIAL_STEP 0xfffffff0u

/* Returns the number that a variable is, up to TL_LAUNCH_MAX_TASKS; 0: it is none, or not set. */
static uint32_t read_number(const char *text)
{
    char *end;
    if (!text || text[0] < '0' || text[0] > '9') return 0;
    unsigned long number = strtoul(text, &end, 10);
    return *end == '\0' && number <= TL_LAUNCH_MAX_TASKS ? (uint32_t)number : 0;
}

/* Adds the hosts that two variables name. */
static enum tl_status add_slurm(struct tl_launch *launch, const char *list_name, const char *tasks_name,
                                uint32_t per_host, struct tl_error *ret_error)
{
    const char *list = tl_from_variable(list_name), *tasks = per_host ? NULL : tl_from_variable(tasks_name);
    if (!list)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "the variable %s is not set, which Slurm sets in a job: run this in sbatch, salloc or srun",
                            list_name);
    if (!tasks && !per_host)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "the variable %s is not set: start the job with --ntasks or --ntasks-per-node, or say here "
                            "how many tasks each node has: --per-host N",
                            tasks_name);
    enum tl_status status = tl_launch_add_slurm(launch, list, tasks, per_host, ret_error);
    if (status != TL_OK)
        tl_error_prefix(ret_error, "%s%s%s: ", list_name, tasks ? " and " : "", tasks ? tasks_name : "");
    return status;
}

/* Adds the components of a heterogeneous job, each as a group. */
static enum tl_status add_slurm_groups(struct tl_launch *launch, uint32_t count, uint32_t per_host,
                                       struct tl_error *ret_error)
{
    char list_name[64], tasks_name[64];
    for (uint32_t i = 0; i < count; i++) {
        snprintf(list_name, sizeof(list_name), "SLURM_JOB_NODELIST_HET_GROUP_%u", i);
        snprintf(tasks_name, sizeof(tasks_name), "SLURM_TASKS_PER_NODE_HET_GROUP_%u", i);
        launch->group = i;
        enum tl_status status = add_slurm(launch, list_name, tasks_name, per_host, ret_error);
        if (status != TL_OK) return status;
    }
    return TL_OK;
}

/* Adds the tasks of a step of a heterogeneous job: those of its component, or of all components if it has so many. */
static enum tl_status add_slurm_group_step(struct tl_launch *launch, uint32_t count, uint32_t per_host,
                                           struct tl_error *ret_error)
{
    const char *tasks = tl_from_variable("SLURM_NTASKS"); /* the step has so many in all of its components */
    uint32_t step_tasks = tasks ? read_number(tasks) : 0;
    struct tl_launch component = {0}, job = {0};
    enum tl_status status = add_slurm(&component, "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", 0, ret_error);
    bool has_one = step_tasks <= component.task_count;
    if (status == TL_OK && !has_one) status = add_slurm_groups(&job, count, 0, ret_error);
    bool has_all = step_tasks == job.task_count;
    tl_launch_fini(&component);
    tl_launch_fini(&job);
    if (status != TL_OK) return status;
    if (has_one) return add_slurm(launch, "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", per_host, ret_error);
    if (has_all) return add_slurm_groups(launch, count, per_host, ret_error);
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                        "the step has %u tasks, which are those of several components of the job and not of all, and "
                        "no variable says of which; start it with srun --het-group of one component or of all",
                        step_tasks);
}

/* Whether this process is a task of a step that srun has started. */
static bool is_in_slurm_step(void)
{
    const char *id = tl_from_variable("SLURM_STEP_ID");
    if (!id) id = tl_from_variable("SLURM_STEPID");
    return id && tl_from_variable("SLURM_STEP_NODELIST") && strtoul(id, NULL, 10) < FIRST_SPECIAL_STEP;
}

/* The order in which Slurm has distributed tasks to nodes. */
static enum tl_status read_distribution(uint32_t *ret_run, struct tl_error *ret_error)
{
    const char *text = tl_from_variable("SLURM_DISTRIBUTION"), *size = tl_from_variable("SLURM_DIST_PLANESIZE");
    char quoted[TL_QUOTE_BYTES];
    *ret_run = TL_LAUNCH_BLOCK;
    if (!text || strncmp(text, "block", 5) == 0 || strncmp(text, "unknown", 7) == 0) return TL_OK;
    *ret_run = TL_LAUNCH_CYCLIC;
    if (strncmp(text, "cyclic", 6) == 0) return TL_OK;
    if (strncmp(text, "plane", 5) == 0) {
        *ret_run = read_number(size);
        if (*ret_run > 0) return TL_OK;
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "SLURM_DISTRIBUTION is plane, and SLURM_DIST_PLANESIZE says "
                            "no size; set it to that of srun --distribution=plane=SIZE");
    }
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                        "SLURM_DISTRIBUTION=%s does not say which node has which task; use from-hostfile with the file "
                        "of SLURM_HOSTFILE",
                        tl_quote(text, quoted));
}

/* Adds the hosts of the job or the step. */
static enum tl_status add_hosts(struct tl_launch *launch, uint32_t per_host, struct tl_error *ret_error)
{
    const char *size = tl_from_variable("SLURM_HET_SIZE");
    uint32_t components = size ? read_number(size) : 1;
    char quoted[TL_QUOTE_BYTES];
    if (components == 0)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "SLURM_HET_SIZE is %s and must be a number; Slurm sets it in a heterogeneous job alone",
                            tl_quote(size, quoted));
    if (components > 1 && is_in_slurm_step()) return add_slurm_group_step(launch, components, per_host, ret_error);
    if (components > 1) return add_slurm_groups(launch, components, per_host, ret_error);
    if (is_in_slurm_step())
        return add_slurm(launch, "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", per_host, ret_error);
    return add_slurm(launch, "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", per_host, ret_error);
}

int tl_config_from_slurm(const struct tl_config_from_flags *flags)
{
    struct tl_launch launch = {0};
    struct tl_error error = {.code = TL_OK};
    uint32_t run;
    enum tl_status status = read_distribution(&run, &error);
    if (status == TL_OK) status = add_hosts(&launch, flags->per_host, &error);
    if (status == TL_OK) status = tl_from_print_launch(flags, &launch, run, &error);
    tl_launch_fini(&launch);
    return tl_from_finish(status, "from-slurm", &error);
}
