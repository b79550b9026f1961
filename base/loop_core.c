// SPDX-License-Identifier: Apache-2.0
#include "base/loop_core.h"

#include "base/clock.h"

_Thread_local unsigned tl_loop_core_depth;

void tl_loop_core_init(struct tl_loop_core *core)
{
    tl_mailbox_init(&core->mailbox);
    tl_timers_init(&core->timers);
    tl_list_init(&core->deferred);
    tl_list_init(&core->last);
}

void tl_loop_core_fini(struct tl_loop_core *core)
{
    tl_loop_core_enter();
    while (tl_loop_core_run_closures(core) > 0 || tl_loop_core_run_deferred(core)) {
    }
    tl_loop_core_leave();
    tl_mailbox_fini(&core->mailbox);
    tl_timers_fini(&core->timers);
}

unsigned tl_loop_core_fire_timers(struct tl_loop_core *core)
{
    if (tl_timers_next_due_ns(&core->timers) == TL_TIME_NEVER) return 0;
    tl_quota_renew(&core->quota);
    return tl_timers_fire_due(&core->timers, tl_clock_now_ns(), &core->quota);
}

static bool run_those(struct tl_list *deferred, struct tl_quota *quota)
{
    struct tl_list batch;
    tl_list_init(&batch);
    tl_list_splice_back(&batch, deferred);
    bool was_any = !tl_list_is_empty(&batch);
    struct tl_list *link;
    while ((link = tl_list_pop_front(&batch)) != NULL) {
        struct tl_closure *closure = TL_CONTAINER_OF(link, struct tl_closure, link);
        tl_quota_renew(quota); /* each is of another object */
        closure->run(closure);
    }
    return was_any;
}

bool tl_loop_core_run_deferred(struct tl_loop_core *core)
{
    bool was_any = run_those(&core->deferred, &core->quota);
    return run_those(&core->last, &core->quota) || was_any;
}
