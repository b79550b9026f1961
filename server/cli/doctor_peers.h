// SPDX-License-Identifier: Apache-2.0
/* What `tensorlane doctor` finds about the workers of a cluster, as far as they can be reached from here. */
#ifndef SERVER_CLI_DOCTOR_PEERS_H
#define SERVER_CLI_DOCTOR_PEERS_H

#include "server/cli/doctor.h"
#include "server/cli/doctor_tasks.h"
#include "server/cli/health.h"

/* Asks all workers as `tensorlane health` does, and tries each address of each of them over TCP with small and large
 * packets. Blocks: as long as health does, and at most 20 s for each address that does not answer. */
void tl_doctor_check_peers(struct tl_doctor_report *report, const struct tl_doctor_tasks *tasks);

/* What a worker's clock said while this machine's went from before_ns to after_ns. */
struct tl_doctor_clock {
    int64_t before_ns, after_ns;
    int64_t unix_ns; /* 0: the worker did not say */
};

void tl_doctor_judge_clock(struct tl_doctor_report *report, const char *task, const struct tl_doctor_clock *clock);

/* What the check of one worker means; own_version is that of this program. */
void tl_doctor_judge_worker(struct tl_doctor_report *report, const struct tl_health_finding *finding,
                            const char *own_version);

#endif
