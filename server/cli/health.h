// SPDX-License-Identifier: Apache-2.0
/* The two halves of `tensorlane health`: one address as grpc_health_probe does it, and all workers of a cluster. */
#ifndef SERVER_CLI_HEALTH_H
#define SERVER_CLI_HEALTH_H

#include <stdbool.h>
#include <stdint.h>

#include "config/config.h"
#include "control/client.h"
#include "server/cli/probe_call.h"

struct tl_health_flags {
    const char *address;
    const char *service;
    const char *user_agent;
    const char *config_path;
    struct tl_probe_flags probe;
    int64_t connect_timeout_ns; /* 0: the default of what is asked */
    int64_t rpc_timeout_ns;
    int64_t interval_ns;
    bool is_verbose;
    bool is_json;
    bool is_watching;
    bool has_pairs;
    bool has_incarnations;
    bool is_quick; /* workers are not asked to probe their peers */
    bool is_local; /* all workers are on this machine, whatever their addresses say */
};

/* Asks grpc.health.v1.Health of one address. Returns an enum tl_health_exit. */
int tl_health_probe(const struct tl_health_flags *flags);

/* Asks all workers of a cluster, once or again and again. Returns an enum tl_health_exit. */
int tl_health_cluster(const struct tl_health_flags *flags);

/* The stages of a check. LOCAL to PATHS are about the transports of workers whose settings want one; PROBE is about
 * pairs. */
enum tl_health_stage {
    TL_HEALTH_STAGE_CONFIG,
    TL_HEALTH_STAGE_RESOLVE,
    TL_HEALTH_STAGE_TCP,
    TL_HEALTH_STAGE_GRPC,
    TL_HEALTH_STAGE_IDENTITY,
    TL_HEALTH_STAGE_SERVING,
    TL_HEALTH_STAGE_TRANSPORTS,
    TL_HEALTH_STAGE_LOCAL,
    TL_HEALTH_STAGE_MEMLOCK,
    TL_HEALTH_STAGE_DEVICE,
    TL_HEALTH_STAGE_PORT,
    TL_HEALTH_STAGE_PATHS,
    TL_HEALTH_STAGE_PROBE, /* a worker has tried its peers */
};

const char *tl_health_stage_name(enum tl_health_stage stage);

/* What the check of one worker found. */
struct tl_health_finding {
    const struct tl_config_task *task;
    bool is_healthy;
    bool is_local;                       /* it is on this machine */
    bool is_silent;                      /* its address takes connections, but does not answer */
    bool has_http2;                      /* silent all the same: it speaks HTTP/2, but does not answer a call */
    bool has_rivals;                     /* workers are connected to different processes that claim this task */
    bool is_unconfirmed;                 /* it must tell once more which processes there are */
    enum tl_health_stage stage;          /* the first that failed, or the last that was passed */
    enum tl_health_stage verified;       /* the last that was passed */
    char reason[TL_ERROR_MESSAGE_BYTES]; /* why it is not healthy, or does less than it might; "" when all is well */
    char remedy[TL_ERROR_MESSAGE_BYTES]; /* "" when there is no reason */
    bool has_description;                /* it is a tensorlane worker and said this of itself */
    struct tl_description description;   /* tl_description_fini */
    struct tl_probe_results probes;      /* what it found when it tried its peers; free(items) */
    bool cannot_probe;                   /* it was asked to, and could not */
};

/* Checks one worker, stage by stage. finding->task is set, the rest zero. Blocks for at most both time-outs three
 * times, and for the devices of this machine. Thread: any. */
void tl_health_check_worker(const struct tl_health_flags *flags, const struct tl_config *config,
                            struct tl_health_finding *finding);

/* Says of a worker that is silent what is the matter, from the process that listens and what the other workers know of
 * it. Thread: any. Blocks: for the name resolution. */
void tl_health_explain_silent(const struct tl_health_finding *findings, size_t count, struct tl_health_finding *silent);

/* The stages of the data plane, from what the worker says of itself and, for a worker of this machine, from what can be
 * seen here. The worker has passed TRANSPORTS. Without a data plane a worker is healthy unless "rdma" is "require".
 * Thread: any. Blocks: for the devices of this machine. */
void tl_health_judge_data_plane(const struct tl_config *config, struct tl_health_finding *finding);

/* Asks a worker once more what it says of itself, which is then confirmed. One that does not answer soon stays
 * unconfirmed. Thread: any. Blocks: 2 s at most, or both time-outs of the flags. */
void tl_health_ask_again(const struct tl_health_flags *flags, struct tl_health_finding *finding);

/* Compares what the workers say of each other, and marks the rows of those that contradict each other or cannot reach
 * each other. All of findings[config->task_count] have been checked, and those that tl_health_find_rivals has chosen
 * have been asked again. Writes into ret_note (TL_ERROR_MESSAGE_BYTES) what the configuration of this command lacks;
 * "": nothing. */
void tl_health_compare(const struct tl_config *config, struct tl_health_finding *findings, char *ret_note);

/* Finds the tasks of which the workers tell different processes, and chooses all workers that tell of them to be asked
 * again. False: there are none. */
bool tl_health_find_rivals(const struct tl_config *config, struct tl_health_finding *findings);

/* Asks a worker that serves, one of findings[count], to try its peers; all of them have been checked. Blocks: until it
 * has, and some seconds longer while a failure is older than the question. Thread: any. */
void tl_health_probe_peers(const struct tl_health_flags *flags, struct tl_health_finding *findings, size_t count,
                           struct tl_health_finding *finding);

/* Both workers of a pair that cannot transfer are unhealthy, unless one of them is so already: one does not reach the
 * other, or their data path fails and tensors may not take gRPC. Where they may, the rows tell of the path. */
void tl_health_judge_pairs(const struct tl_config *config, struct tl_health_finding *findings, size_t count);

/* Returns whether the settings of the worker and of the task with this name want a data path between the two. */
bool tl_health_wants_path(const struct tl_config *config, const struct tl_health_finding *finding, const char *name);

/* What this machine lacks for a data plane with the task's settings, at the stage that it returns;
 * TL_HEALTH_STAGE_PATHS with TL_OK: nothing. Blocks: opens every device. Thread: any. */
enum tl_health_stage tl_health_look_at_machine(const struct tl_config_task *task, struct tl_error *ret_error);

/* Checks all workers at the same time, as one round of `health` does. findings is zeroed, one for each task.
 * Ownership: tl_health_findings_destroy. Writes into ret_note (TL_ERROR_MESSAGE_BYTES) what the configuration lacks, or
 * "". Blocks: as tl_health_check_worker. */
void tl_health_check_cluster(const struct tl_health_flags *flags, const struct tl_config *config,
                             struct tl_health_finding *findings, char *ret_note);

/* Frees findings[count], which calloc has made, with what they hold. NULL is accepted. */
void tl_health_findings_destroy(struct tl_health_finding *findings, size_t count);

#endif
