// SPDX-License-Identifier: Apache-2.0
/*
 * The tasks of a job of Slurm, from the variables that Slurm sets in batch scripts and in each task.
 *
 * In a step that srun has started these are the tasks of the step, so that their numbers are SLURM_PROCID; elsewhere
 * those of the job. The batch script and an interactive shell are steps, too, of one node, which are not meant. The
 * components of a heterogeneous job follow one another.
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
static enum tl_status add_slurm_groups(struct tl_launch *launch, unsigned long count, uint32_t per_host,
                                       struct tl_error *ret_error)
{
    char list_name[64], tasks_name[64];
    for (unsigned long i = 0; i < count; i++) {
        snprintf(list_name, sizeof(list_name), "SLURM_JOB_NODELIST_HET_GROUP_%lu", i);
        snprintf(tasks_name, sizeof(tasks_name), "SLURM_TASKS_PER_NODE_HET_GROUP_%lu", i);
        launch->group = (uint32_t)i;
        enum tl_status status = add_slurm(launch, list_name, tasks_name, per_host, ret_error);
        if (status != TL_OK) return status;
    }
    return TL_OK;
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
    char quoted[TL_QUOTE_BYTES], *end;
    *ret_run = TL_LAUNCH_BLOCK;
    if (!text || strncmp(text, "block", 5) == 0 || strncmp(text, "unknown", 7) == 0) return TL_OK;
    *ret_run = TL_LAUNCH_CYCLIC;
    if (strncmp(text, "cyclic", 6) == 0) return TL_OK;
    if (strncmp(text, "plane", 5) == 0) {
        unsigned long run = size ? strtoul(size, &end, 10) : 0;
        *ret_run = (uint32_t)run;
        if (run > 0 && run <= TL_LAUNCH_MAX_TASKS) return TL_OK;
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "SLURM_DISTRIBUTION is plane, and SLURM_DIST_PLANESIZE says "
                            "no size; set it to that of srun --distribution=plane=SIZE");
    }
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                        "SLURM_DISTRIBUTION=%s does not say which node has which task; use from-hostfile with the file "
                        "of SLURM_HOSTFILE, or --per-host",
                        tl_quote(text, quoted));
}

int tl_config_from_slurm(const struct tl_config_from_flags *flags)
{
    struct tl_launch launch = {0};
    struct tl_error error = {.code = TL_OK};
    uint32_t run;
    const char *size = tl_from_variable("SLURM_HET_SIZE");
    enum tl_status status = read_distribution(&run, &error);
    if (status == TL_OK && size && strtoul(size, NULL, 10) > 1)
        status = add_slurm_groups(&launch, strtoul(size, NULL, 10), flags->per_host, &error);
    else if (status == TL_OK && is_in_slurm_step())
        status = add_slurm(&launch, "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", flags->per_host, &error);
    else if (status == TL_OK)
        status = add_slurm(&launch, "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", flags->per_host, &error);
    if (status == TL_OK) status = tl_from_print_launch(flags, &launch, run, &error);
    tl_launch_fini(&launch);
    return tl_from_finish(status, "from-slurm", &error);
}
