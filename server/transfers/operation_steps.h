// SPDX-License-Identifier: Apache-2.0
/*
 * The open receives of each step, so that ending or aborting a step costs its own receives only.
 *
 * A receive joins the list of its step when it is registered, and leaves it when it completes. A step exists as long as
 * it has members, or is being walked.
 */
#ifndef SERVER_TRANSFERS_OPERATION_STEPS_H
#define SERVER_TRANSFERS_OPERATION_STEPS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"
#include "base/quota.h"

struct tl_op_step;

/* Embedded in a receive. */
struct tl_op_step_member {
    struct tl_list link; /* zeroed, or in no list, when it is no member */
};

/* Returns false when there is no memory; then the member is in no list. */
bool tl_op_steps_join(struct tl_op_step **steps, uint64_t step, struct tl_op_step_member *member);
/* Does nothing when the member is in no list. */
void tl_op_steps_leave(struct tl_op_step **steps, struct tl_op_step_member *member);
/* Walks over the members of a step: calls visit for each, which may leave then. A call visits no more than the quota
 * allows and returns false when others are left; the next call goes on. Members that join meanwhile are not visited. A
 * step has one walk at a time. */
bool tl_op_steps_walk(struct tl_op_step **steps, uint64_t step, struct tl_quota *quota,
                      void (*visit)(struct tl_op_step_member *member, void *context), void *context);

#endif
