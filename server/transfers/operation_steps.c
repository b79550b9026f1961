// SPDX-License-Identifier: Apache-2.0
#include "server/transfers/operation_steps.h"

#include <stdlib.h>

#define HASH_NONFATAL_OOM 1
#include <uthash.h>

struct tl_op_step {
    UT_hash_handle hh;
    uint64_t step;
    struct tl_list members;
    bool is_walked; /* it stays, even without members */
};

static void free_if_unused(struct tl_op_step **steps, struct tl_op_step *step)
{
    if (step->is_walked || !tl_list_is_empty(&step->members)) return;
    HASH_DEL(*steps, step);
    free(step);
}

static struct tl_op_step *add_step(struct tl_op_step **steps, uint64_t number)
{
    struct tl_op_step *step = calloc(1, sizeof(*step));
    if (step == NULL) return NULL;
    step->step = number;
    tl_list_init(&step->members);
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
    tl_list_push_back(&step->members, &member->link);
    return true;
}

void tl_op_steps_leave(struct tl_op_step **steps, struct tl_op_step_member *member)
{
    struct tl_list *other = member->link.next;
    if (other == NULL || other == &member->link) return;
    bool is_only = other == member->link.prev;
    tl_list_remove(&member->link);
    /* The neighbour of the only member is the head. */
    if (is_only) free_if_unused(steps, TL_CONTAINER_OF(other, struct tl_op_step, members));
}

uint64_t tl_op_steps_walk(struct tl_op_step **steps, uint64_t number,
                          void (*visit)(struct tl_op_step_member *member, void *context), void *context)
{
    struct tl_op_step *step = find_step(*steps, number);
    uint64_t count = 0;
    if (step == NULL) return 0;
    step->is_walked = true;
    TL_LIST_FOREACH_SAFE(&step->members, link)
    {
        count++;
        visit(TL_CONTAINER_OF(link, struct tl_op_step_member, link), context);
    }
    step->is_walked = false;
    free_if_unused(steps, step);
    return count;
}
