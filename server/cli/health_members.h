// SPDX-License-Identifier: Apache-2.0
/* Which tasks each worker has in its cluster.json, and which processes claim a task. */
#ifndef SERVER_CLI_HEALTH_MEMBERS_H
#define SERVER_CLI_HEALTH_MEMBERS_H

#include "server/cli/health.h"

/* What the worker says of a task. NULL: its cluster.json lacks the task. `hint` is the place where it probably is. */
const struct tl_peer_description *tl_health_find_member(const struct tl_description *description, const char *name,
                                                        size_t hint);

/* Whether it is the worker of the row that has answered. */
bool tl_health_is_identified(const struct tl_health_finding *finding);

/* Makes the row unhealthy at the stage. */
void tl_health_set_fault(struct tl_health_finding *finding, enum tl_health_stage stage, const char *reason,
                         const char *remedy);

/* Whether the worker tells all tasks of its cluster.json. */
bool tl_health_tells_members(const struct tl_health_finding *finding);

/* Marks the rows of workers of which one has the other in its cluster.json, and the other lacks it. Writes into
 * ret_note (TL_ERROR_MESSAGE_BYTES) what the configuration of this command lacks; "": nothing. */
void tl_health_compare_members(const struct tl_config *config, struct tl_health_finding *findings, char *ret_note);

/* Marks the rows of tasks that two processes claim. */
void tl_health_judge_rivals(const struct tl_config *config, struct tl_health_finding *findings);

#endif
