// SPDX-License-Identifier: Apache-2.0
/* The beginning of programs that test two workers with a data plane: the workers, and their completion queues. */
#ifndef FAKES_TRANSPORT_CASE_H
#define FAKES_TRANSPORT_CASE_H

#include "fakes/cluster.h"
#include "fakes/fake_transport.h"

static struct cluster cluster;
static struct fake_transport transport;
static struct tl_worker *sender;
static struct tl_worker *receiver;
static struct tl_cq *cq;
static struct tl_cq *sent;
static struct tl_error error;

static inline void prepare(const char *settings)
{
    cluster_init(&cluster, 3, settings);
    fake_transport_init(&transport, &cluster);
    cq = cluster_cq();
    sent = cluster_cq();
}

static inline void open_both(int progress)
{
    sender = fake_transport_open(&transport, 0, TL_PROGRESS_THREAD);
    receiver = fake_transport_open(&transport, 1, progress);
}

/* Closes the receiver first: without a driver it does not answer the sender's goodbye. */
static inline void teardown(void)
{
    if (cluster.workers[1] != NULL) cluster_close(&cluster, 1);
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
    tl_cq_destroy(sent);
    fake_transport_fini(&transport);
}

#endif
