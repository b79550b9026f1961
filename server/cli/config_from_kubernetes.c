// SPDX-License-Identifier: Apache-2.0
/*
 * The pods of a running workload of Kubernetes, from their names, which follow from the workload's and from an index:
 * no API is asked. A headless Service makes DNS names of them.
 *
 *     StatefulSet, Indexed Job   NAME-{index}.SERVICE
 *     JobSet                     JOBSET-JOB-{group}-{index}.SERVICE
 *     LeaderWorkerSet            LWS-GROUP.LWS for the leader, LWS-GROUP-{index}.LWS for the workers of its group
 */
#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "server/cli/config_from.h"

/* Length of text without "-NUMBER" at its end; 0: it has none. */
static size_t without_index(const char *text, size_t length)
{
    size_t end = length;
    while (end > 0 && isdigit((unsigned char)text[end - 1]))
        end--;
    return end == length || end < 2 || text[end - 1] != '-' ? 0 : end - 1;
}

/* Writes the pattern of the names of all pods, from that of this one: it ends with the index, before which the name of
 * the job stands when there are several. */
static enum tl_status pattern_of_pods(const char *service, const struct tl_from_job *jobs, size_t job_count,
                                      char ret_pattern[TL_LAUNCH_HOST_BYTES], struct tl_error *ret_error)
{
    const char *name = tl_from_variable("HOSTNAME"), *job = NULL;
    bool has_groups = jobs[0].group_size > 0;
    if (!name)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "the variable HOSTNAME is not set, which has the name of this "
                            "pod; say how pods are called: --hosts 'NAME-{index}.SERVICE'");
    size_t length = without_index(name, strlen(name));
    if (length > 0 && has_groups) length = without_index(name, length);
    size_t base = length;
    for (size_t i = 0; job_count > 1 && i < job_count; i++) {
        size_t job_bytes = strlen(jobs[i].name);
        if (length < job_bytes || strncmp(name + length - job_bytes, jobs[i].name, job_bytes) != 0) continue;
        if (length > job_bytes && name[length - job_bytes - 1] != '-') continue;
        /* "param-server" ends with "server", too: the longer name is the job. */
        if (job && job_bytes < strlen(job)) continue;
        job = jobs[i].name;
        base = length - job_bytes;
    }
    if (length == 0 || (job_count > 1 && !job))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "HOSTNAME=%s does not end with %s; say how pods are called: --hosts 'NAME-{index}.SERVICE'",
                            name, job_count > 1 ? "the name of a job and its index, such as worker-0" : "an index");
    int written = snprintf(ret_pattern, TL_LAUNCH_HOST_BYTES, "%.*s%s-%s{index}.%s", (int)base, name,
                           job ? "{job}" : "", has_groups ? "{group}-" : "", service);
    if (written < TL_LAUNCH_HOST_BYTES) return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the names of pods are too long");
}

static enum tl_status add_pods(struct tl_launch *launch, const char *pattern, const struct tl_from_job *job,
                               struct tl_error *ret_error)
{
    char host[TL_LAUNCH_HOST_BYTES];
    if (job->count == 0)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "how many tasks has %s? Kubernetes does not tell it to a pod: --tasks %s=N, with N as in "
                            "replicas or completions",
                            job->name, job->name);
    for (uint32_t i = 0; i < job->count; i++) {
        size_t before = launch->host_count;
        enum tl_status status = tl_launch_expand(pattern, job->name, i, job->group_size, host, ret_error);
        if (status == TL_OK) status = tl_launch_add(launch, host, strlen(host), 1, ret_error);
        if (status != TL_OK) {
            tl_error_prefix(ret_error, "the hosts of pods (--hosts): ");
            return status;
        }
        if (launch->host_count == before)
            return tl_error_set(
                ret_error, TL_INVALID_ARGUMENT,
                "two tasks would be in the pod %s; the pattern of --hosts lacks {index}, {job} or {group}", host);
    }
    return TL_OK;
}

/* Adds the pods of this group of a LeaderWorkerSet: the leader, and the workers, which are called after it. */
static enum tl_status add_leader_and_workers(struct tl_launch *launch, const char *leader, struct tl_error *ret_error)
{
    const char *size = tl_from_variable("LWS_GROUP_SIZE");
    char host[TL_LAUNCH_HOST_BYTES];
    char *end = NULL;
    unsigned long count = size ? strtoul(size, &end, 10) : 0;
    size_t name_bytes = strcspn(leader, ".");
    if (count == 0 || *end || count > TL_LAUNCH_MAX_TASKS)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "LWS_LEADER_ADDRESS is set, and LWS_GROUP_SIZE is no number of "
                            "pods; LeaderWorkerSet sets both in each container");
    enum tl_status status = tl_launch_add(launch, leader, strlen(leader), 1, ret_error);
    for (unsigned long i = 1; status == TL_OK && i < count; i++) {
        int length = snprintf(host, sizeof(host), "%.*s-%lu%s", (int)name_bytes, leader, i, leader + name_bytes);
        if ((size_t)length >= sizeof(host))
            return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "LWS_LEADER_ADDRESS is too long");
        status = tl_launch_add(launch, host, (size_t)length, 1, ret_error);
    }
    if (status != TL_OK) tl_error_prefix(ret_error, "LWS_LEADER_ADDRESS: ");
    return status;
}

static enum tl_status add_kubernetes(const struct tl_config_from_flags *flags, struct tl_launch *launch,
                                     struct tl_from_job *jobs, size_t count, struct tl_error *ret_error)
{
    const char *leader = tl_from_variable("LWS_LEADER_ADDRESS"), *pattern = flags->hosts;
    char made[TL_LAUNCH_HOST_BYTES];
    enum tl_status status = TL_OK;
    if (leader && !pattern && !flags->service) {
        status = add_leader_and_workers(launch, leader, ret_error);
        return status == TL_OK ? tl_from_share(jobs, count, launch, ret_error) : status;
    }
    if (!pattern && !flags->service)
        return tl_error_set(
            ret_error, TL_INVALID_ARGUMENT,
            "which pods? --service NAME, the headless Service of a StatefulSet, Job or JobSet, or --hosts "
            "'NAME-{index}.SERVICE'; in a LeaderWorkerSet the variable LWS_LEADER_ADDRESS says it");
    if (!pattern) {
        status = pattern_of_pods(flags->service, jobs, count, made, ret_error);
        pattern = made;
    }
    for (size_t i = 0; status == TL_OK && i < count; i++)
        status = add_pods(launch, pattern, &jobs[i], ret_error);
    return status;
}

int tl_config_from_kubernetes(const struct tl_config_from_flags *flags)
{
    struct tl_launch launch = {0};
    struct tl_error error = {.code = TL_OK};
    struct tl_from_job *jobs = NULL;
    size_t count = 0;
    char listen[32];
    const char *ip = tl_from_variable("POD_IP");
    enum tl_status status = tl_from_jobs_read(&flags->tasks, &jobs, &count, &error);
    /* A pod's own name may be known to the name service only after it has started, so workers listen everywhere. */
    snprintf(listen, sizeof(listen), "%s:%u", ip && strchr(ip, ':') ? "[::]" : "0.0.0.0", flags->port);
    if (status == TL_OK) status = add_kubernetes(flags, &launch, jobs, count, &error);
    if (status == TL_OK) status = tl_from_print(flags, &launch, TL_LAUNCH_BLOCK, jobs, count, listen, &error);
    free(jobs);
    tl_launch_fini(&launch);
    return tl_from_finish(status, "from-kubernetes", &error);
}
