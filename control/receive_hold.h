// SPDX-License-Identifier: Apache-2.0
/*
 * How many values the Receive calls of one client hold.
 *
 * A call holds its value until the client has taken all of it, also when the value was replaced in the meantime. So the
 * calls of a client hold at most TL_REFERENCED_FACTOR * options.inflight_bytes, or two values of any size. The others
 * wait without a value, first come first served, and ask for it again when calls before them have ended: they get the
 * value that there is then.
 *
 * No call waits for ever: its client has others that hold values, and these end when the client takes nothing for
 * options.request_timeout_ns.
 *
 * Thread: the loop's owner.
 */
#ifndef CONTROL_RECEIVE_HOLD_H
#define CONTROL_RECEIVE_HOLD_H

#include "base/list.h"
#include "control/internal.h"

/* The part of a call, embedded in it. It starts zeroed. */
struct tl_receive_hold {
    void (*retry)(struct tl_receive_hold *hold); /* there is space now: asks for the value again */
    struct tl_receive_client *client;            /* NULL: not joined */
    uint64_t bytes;                              /* what the value that it holds, or waits for, counts */
    bool is_holding;
    struct tl_list link; /* in the client's list of calls that wait */
};

/* Counts the call among those of its client. Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_receive_hold_join(struct tl_control *control, const struct tl_share_client *client,
                                    struct tl_receive_hold *hold, struct tl_error *ret_error) TL_MUST_USE;
/* Lets the call hold a value of so many bytes. False: it must let it go; retry is called when there is space. Within
 * retry the answer is always true. */
bool tl_receive_hold_take(struct tl_receive_hold *hold, uint64_t bytes) TL_MUST_USE;
/* Ends the hold or the wait, and retries calls of the client for which there is space now. A call that has not joined
 * is accepted. */
void tl_receive_hold_leave(struct tl_receive_hold *hold);

#endif
