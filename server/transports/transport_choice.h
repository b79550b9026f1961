// SPDX-License-Identifier: Apache-2.0
/*
 * The choice among the cards of a machine: the first through which a write has been verified.
 *
 * The candidates are tried in their order: opened, then probed (dataplane/probe.h). One that fails is closed, told of,
 * and the next one tried; one after three seconds at the latest is the last. What the process as a whole lacks, memory
 * that it may lock, ends the choice: the next candidate would lack the same.
 *
 * Thread: any.
 */
#ifndef SERVER_TRANSPORTS_TRANSPORT_CHOICE_H
#define SERVER_TRANSPORTS_TRANSPORT_CHOICE_H

#include <stddef.h>

#include "dataplane/verbs/verbs.h"

/* Begins the message when several candidates have failed: a list follows, each with its reason. */
#define TL_NO_PORT "no RDMA port can be used"

typedef void tl_transport_failed_fn(void *context, unsigned order, const char *name, const char *why);

struct tl_transport_candidates {
    const struct tl_verbs_candidate *items; /* [count], those that can be used, in their order; of a device without a
                                               name nothing is known */
    size_t count;                           /* at least 1 */
    enum tl_keys keys;
    enum tl_status (*open)(void *context, unsigned order, struct tl_provider **ret_provider,
                           struct tl_error *ret_error);
    /* This one has failed; NULL: nobody wants to know. name: "mlx5_0:1 GID 3 10.0.0.1". */
    tl_transport_failed_fn *failed;
    void *context;
};

struct tl_transport_choice {
    struct tl_provider *provider;
    unsigned order;                           /* so many before it have failed */
    char passed_over[TL_ERROR_MESSAGE_BYTES]; /* these: "NAME: why; NAME: why" */
    char not_tried[TL_ERROR_MESSAGE_BYTES];   /* those after it: "NAME; NAME" */
};

/* Errors: that of the only candidate; TL_UNAVAILABLE: none works, a list; TL_RESOURCE_EXHAUSTED: the limit of locked
 * memory, with its remedy. Blocks: opens devices, writes, waits up to 5 s. */
enum tl_status tl_transport_choose(const struct tl_transport_candidates *candidates,
                                   struct tl_transport_choice *ret_choice, struct tl_error *ret_error) TL_MUST_USE;

/* The same for the RDMA devices that tl_verbs_list has given, of which nothing stays open. *ret_order: which one. */
enum tl_status tl_transport_choose_verbs(const struct tl_verbs_options *options,
                                         const struct tl_verbs_candidate *candidates, size_t count,
                                         tl_transport_failed_fn *failed, void *context, unsigned *ret_order,
                                         struct tl_error *ret_error) TL_MUST_USE;

/* How many of them can be used: they come first. */
size_t tl_transport_count_usable(const struct tl_verbs_candidate *candidates, size_t count);

/* Whether a reason is about the limit of locked memory. */
bool tl_transport_is_about_memlock(const char *reason);

#endif
