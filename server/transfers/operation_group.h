// SPDX-License-Identifier: Apache-2.0
/* Groups of operations, as the calls with many items use them. */
#ifndef SERVER_TRANSFERS_OPERATION_GROUP_H
#define SERVER_TRANSFERS_OPERATION_GROUP_H

#include "server/transfers/operation_internal.h"

struct op_group_options {
    enum tl_op_kind kind; /* kind of the group's completion */
    int64_t timeout_ns;   /* the deadline of all members */
    int64_t over_ns;      /* the group is over then; 0: no such limit */
    size_t min_count;     /* the group is over when so many have succeeded; 0: all */
    enum tl_rest rest;
    bool is_quiet; /* members that succeed are not reported */
};

/* Creates a group of `count` members, which the caller adds and initialises one after the other, and memory of
 * more_bytes, aligned to 8 bytes, for their keys and the aliases of what is sent. Ownership: op_group_submit or
 * op_group_run, or op_group_discard. Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status op_group_create(struct tl_worker *worker, size_t count, size_t more_bytes,
                               const struct op_group_options *options, struct op_group **ret_group, char **ret_more,
                               struct tl_error *ret_error) TL_MUST_USE;
/* Returns the next member, zeroed but for its call. It is zeroed here, where it is about to be filled, because all
 * members together are more than the processor's caches keep until then. */
struct tl_op *op_group_add(struct op_group *group, size_t place);
/* Says the step of a member that was added: a step that ends leaves groups alone whose members have lesser or greater
 * ones. */
void op_group_note_step(struct op_group *group, uint64_t step);
/* Returns a member that was added. */
struct tl_op *op_group_member(struct op_group *group, size_t place);
/* Frees a group whose members were not initialised, or are discarded. */
void op_group_discard(struct op_group *group);
/* Starts the group, whose completions go to the queue. Returns its id. */
tl_op_id op_group_submit(struct op_group *group, struct tl_cq *cq, void *user_data);
/* Starts the group, waits for its end, and reads the completions of its members (ret_members NULL: drops them). Returns
 * the status of the group. */
enum tl_status op_group_run(struct op_group *group, struct tl_completion *ret_members, struct tl_error *ret_error);

#endif
