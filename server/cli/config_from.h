// SPDX-License-Identifier: Apache-2.0
/* `tensorlane config from-slurm`, `from-kubernetes` and `from-hostfile`: the cluster.json of a running job. */
#ifndef SERVER_CLI_CONFIG_FROM_H
#define SERVER_CLI_CONFIG_FROM_H

#include <stdint.h>

#include <tensorlane/status.h>

#include "config/launch.h"
#include "server/cli/options.h"

struct tl_config_from_flags {
    struct tl_texts tasks; /* "JOB", "JOB=N", "JOB=GxN" */
    uint32_t port;         /* the first task on a host has it */
    uint32_t per_host;     /* tasks of each host; 0: what the launcher says */
    const char *settings;  /* a file whose settings are kept; NULL: none */
    const char *tls;       /* a folder with certificates; NULL: none */
    const char *service;   /* the headless Service; NULL: not given */
    const char *hosts;     /* a pattern for the names of pods; NULL: not given */
};

/* Each prints a configuration and returns the exit code of the process. */
int tl_config_from_slurm(const struct tl_config_from_flags *flags);
int tl_config_from_kubernetes(const struct tl_config_from_flags *flags);
int tl_config_from_hostfile(const struct tl_config_from_flags *flags, const char *path);

/* A job that --tasks names. */
struct tl_from_job {
    char name[129];
    uint32_t count;      /* so many tasks; 0: not given */
    uint32_t group_size; /* "GxN": N, and count is G * N; 0: there are no groups */
};

/* A variable of the environment; NULL when it is not set, or empty. */
const char *tl_from_variable(const char *name);

/* Reads all --tasks; without any there is the job "worker". Ownership: free(*ret_jobs).
 * Errors: TL_INVALID_ARGUMENT: one is none, or a job is named twice. TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_from_jobs_read(const struct tl_texts *tasks, struct tl_from_job **ret_jobs, size_t *ret_count,
                                 struct tl_error *ret_error) TL_MUST_USE;

/* Gives each job without a number of tasks its number. Where no job has one, and there are as many jobs as components
 * of a heterogeneous job, each job has the tasks of its component. Otherwise one job alone may be without a number: it
 * has the tasks that the others leave.
 * Errors: TL_INVALID_ARGUMENT: the numbers do not fit those that there are. */
enum tl_status tl_from_share(struct tl_from_job *jobs, size_t job_count, const struct tl_launch *launch,
                             struct tl_error *ret_error) TL_MUST_USE;

/* Prints the configuration of a launch whose tasks are placed in runs of so many, and are those of these jobs.
 * Errors: of tl_json_cluster_write and tl_config_parse. */
enum tl_status tl_from_print(const struct tl_config_from_flags *flags, const struct tl_launch *launch, uint32_t run,
                             struct tl_from_job *jobs, size_t job_count, const char *listen,
                             struct tl_error *ret_error) TL_MUST_USE;

/* The same for the jobs of --tasks, which share the tasks of the launch. */
enum tl_status tl_from_print_launch(const struct tl_config_from_flags *flags, const struct tl_launch *launch,
                                    uint32_t run, struct tl_error *ret_error) TL_MUST_USE;

/* Says what has failed, if anything. Returns the exit code. */
int tl_from_finish(enum tl_status status, const char *action, const struct tl_error *error);

/* The addresses of a cluster, job after job. */
struct tl_from_cluster {
    const struct tl_from_job *jobs; /* counts are given */
    size_t job_count;
    const struct tl_launch_task *tasks; /* as many as the jobs have together */
    const char *listen;                 /* the top level listens there, unless the settings say otherwise; NULL: not */
};

/* Writes the configuration's text: the settings of flags->settings, with the paths in it made absolute, this cluster,
 * and certificates of flags->tls. Ownership: free(*ret_text).
 * Errors: of reading the settings. TL_INVALID_ARGUMENT: they are no JSON object; a port above 65535.
 * TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_json_cluster_write(const struct tl_config_from_flags *flags, const struct tl_from_cluster *cluster,
                                     char **ret_text, struct tl_error *ret_error) TL_MUST_USE;

#endif
