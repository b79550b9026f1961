// SPDX-License-Identifier: Apache-2.0
/*
 * What processes that are gone had in the rendezvous table: it is offered to others, some of it in each round of the
 * loop, one process after the other.
 *
 * Thread: the loop's.
 */
#ifndef SERVER_GONE_PROCESSES_H
#define SERVER_GONE_PROCESSES_H

#include "base/mailbox.h"
#include "base/numbers.h"
#include "server/rendezvous/rendezvous.h"

struct tl_worker;

struct tl_gone_processes {
    struct tl_closure closure;         /* the next round, deferred */
    struct tl_numbers incarnations;    /* the first one is being released */
    struct tl_table_release releasing; /* what the first one has, once that has begun */
};

void tl_gone_processes_init(struct tl_gone_processes *gone);
/* The table is closed. */
void tl_gone_processes_fini(struct tl_gone_processes *gone);

/* The process with this incarnation is known to be gone: a member of the cluster that has restarted. Its receivers end,
 * and what is reserved for it is offered again. Without memory to note that, this happens as its connections end and
 * its reservations expire. */
void tl_process_is_gone(struct tl_worker *worker, uint64_t incarnation);

#endif
