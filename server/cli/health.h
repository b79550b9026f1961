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
};

/* Asks grpc.health.v1.Health of one address. Returns an enum tl_health_exit. */
int tl_health_probe(const struct tl_health_flags *flags);

/* Asks all workers of a cluster, once or again and again. Returns an enum tl_health_exit. */
int tl_health_cluster(const struct tl_health_flags *flags);

/* How far the check of a worker came: the first stage that failed, or the last when all is well. */
enum tl_health_stage {
    TL_HEALTH_STAGE_CONFIG,
    TL_HEALTH_STAGE_RESOLVE,
    TL_HEALTH_STAGE_TCP,
    TL_HEALTH_STAGE_GRPC,
    TL_HEALTH_STAGE_IDENTITY,
    TL_HEALTH_STAGE_SERVING,
    TL_HEALTH_STAGE_TRANSPORTS,
};

const char *tl_health_stage_name(enum tl_health_stage stage);

/* What the check of one worker found. */
struct tl_health_finding {
    const struct tl_config_task *task;
    bool is_healthy;
    enum tl_health_stage stage;
    char reason[TL_ERROR_MESSAGE_BYTES]; /* "" when healthy */
    char remedy[TL_ERROR_MESSAGE_BYTES]; /* "" when healthy */
    bool has_description;                /* it is a tensorlane worker and said this of itself */
    struct tl_description description;   /* tl_description_fini */
};

/* Checks one worker, stage by stage. finding->task is set, the rest zero. Blocks for at most both time-outs twice.
 * Thread: any. */
void tl_health_check_worker(const struct tl_health_flags *flags, const char *config_source,
                            struct tl_health_finding *finding);

#endif
