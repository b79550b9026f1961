// SPDX-License-Identifier: Apache-2.0
/*
 * The choice among the devices that a transport can open: the first through which a write has been verified.
 *
 * The candidates are tried in their order: each is opened, then probed (dataplane/probe.h). One that fails is closed
 * and reported, and the next one is tried, unless three seconds have passed. If the process as a whole lacks memory
 * that it may lock, the choice ends, because the next candidate would lack it too.
 *
 * Thread: any.
 */
#ifndef SERVER_TRANSPORTS_TRANSPORT_CHOICE_H
#define SERVER_TRANSPORTS_TRANSPORT_CHOICE_H

#include <stdbool.h>
#include <stddef.h>

#include "dataplane/provider.h"

/* The beginning of the message when several candidates have failed; a list with their reasons follows. */
#define TL_NO_PORT "no RDMA port can be used"

typedef void tl_transport_failed_fn(void *context, unsigned order, const char *name, const char *why);

/* A device that a transport can open. */
struct tl_transport_candidate {
    char name[192];  /* name in messages, as "mlx5_0:1 GID 3 10.0.0.1"; "" when nothing is known before it is opened */
    char device[96]; /* for example "mlx5_0:1"; messages about the candidate may begin with it; "": not known */
    const void *detail; /* other facts that the transport knows about the candidate; NULL: none */
};

struct tl_transport_candidates {
    const struct tl_transport_candidate *items; /* [count], in their order */
    size_t count;                               /* at least 1 */
    enum tl_keys keys;
    bool is_reading; /* what is received is read: a candidate whose reads fail is told apart (read_failure) */
    enum tl_status (*open)(void *context, unsigned order, struct tl_provider **ret_provider,
                           struct tl_error *ret_error);
    tl_transport_failed_fn *failed; /* called for each candidate that has failed, with its name; may be NULL */
    void *context;
};

struct tl_transport_choice {
    struct tl_provider *provider;
    unsigned order;                           /* index of the chosen candidate; all candidates before it have failed */
    char passed_over[TL_ERROR_MESSAGE_BYTES]; /* the failed candidates, as "NAME: why; NAME: why" */
    char not_tried[TL_ERROR_MESSAGE_BYTES];   /* the candidates after the chosen one, as "NAME; NAME" */
};

/* Chooses a candidate. Errors: the error of the only candidate; TL_UNAVAILABLE: none of several works, with a list of
 * reasons; TL_RESOURCE_EXHAUSTED: the limit of locked memory, with its remedy. Ownership: the caller closes
 * ret_choice->provider. Blocks: opens devices, writes, waits up to 5 s. */
enum tl_status tl_transport_choose(const struct tl_transport_candidates *candidates,
                                   struct tl_transport_choice *ret_choice, struct tl_error *ret_error) TL_MUST_USE;

/* Returns whether a reason is about the limit of locked memory. */
bool tl_transport_is_about_memlock(const char *reason);

#endif
