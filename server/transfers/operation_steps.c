// SPDX-License-Identifier: Apache-2.0
#include "server/transfers/operation_steps.h"

#include <stdlib.h>

#define HASH_NONFATAL_OOM 1
#include <uthash.h>

/* One list of members; each knows its step. */
struct members {
    struct tl_list list;
    struct tl_op_step *step;
};

struct tl_op_step {
    UT_hash_handle hh;
    uint64_t step;
    struct members members;
    struct members unvisited; /* those that a walk has not come to */
    bool is_walked;           /* it stays, even without members */
};

static void free_if_unused(struct tl_op_step **steps, struct tl_op_step *step)
{
    if (step->is_walked || !tl_list_is_empty(&step->members.list)) return;
    HASH_DEL(*steps, step);
    free(step);
}

static struct tl_op_step *add_step(struct tl_op_step **steps, uint64_t number)
{
    struct tl_op_step *step = calloc(1, sizeof(*step));
    if (step == NULL) return NULL;
    step->step = number;
    tl_list_init(&step->members.list);
    tl_list_init(&step->unvisited.list);
    step->members.step = step->unvisited.step = step;
    HASH_ADD(hh, *steps, step, sizeof(step->step), step);
    if (step->hh.tbl != NULL) return step;
    free(step);
    return NULL;
}

static struct tl_op_step *find_step(struct tl_op_step *steps, uint64_t number)
{
    struct tl_op_step *step;
    if (steps != NULL && steps->step == number) return steps; /* most have the oldest step, or that is the only one */
    HASH_FIND(hh, steps, &number, sizeof(number), step);
    return step;
}

bool tl_op_steps_join(struct tl_op_step **steps, uint64_t number, struct tl_op_step_member *member)
{
    struct tl_op_step *step = find_step(*steps, number);
    if (step == NULL) step = add_step(steps, number);
    if (step == NULL) return false;
    tl_list_push_back(&step->members.list, &member->link);
    return true;
}

void tl_op_steps_leave(struct tl_op_step **steps, struct tl_op_step_member *member)
{
    struct tl_list *other = member->link.next;
    if (other == NULL || other == &member->link) return;
    bool is_only = other == member->link.prev;
    tl_list_remove(&member->link);
    /* The neighbour of the only member is the head. */
    if (is_only) free_if_unused(steps, TL_CONTAINER_OF(other, struct members, list)->step);
}

bool tl_op_steps_walk(struct tl_op_step **steps, uint64_t number, struct tl_quota *quota,
                      void (*visit)(struct tl_op_step_member *member, void *context), void *context)
{
    struct tl_op_step *step = find_step(*steps, number);
    if (step == NULL) return true;
    if (!step->is_walked) tl_list_splice_back(&step->unvisited.list, &step->members.list);
    step->is_walked = true;
    while (!tl_list_is_empty(&step->unvisited.list)) {
        if (tl_quota_left(quota) == 0) return false;
        struct tl_list *link = tl_list_pop_front(&step->unvisited.list);
        tl_list_push_back(&step->members.list, link);
        tl_quota_use(quota, 1);
        visit(TL_CONTAINER_OF(link, struct tl_op_step_member, link), context);
    }
    step->is_walked = false;
    free_if_unused(steps, step);
    return true;
}
