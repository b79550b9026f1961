// SPDX-License-Identifier: Apache-2.0
/* What programs that test two workers with a data plane begin with: the workers, and queues of what they are asked. */
#ifndef TESTS_FAKES_PLANE_CASE_H
#define TESTS_FAKES_PLANE_CASE_H

#include "fakes/cluster.h"
#include "fakes/fake_plane.h"

static struct cluster cluster;
static struct fake_plane plane;
static struct tl_worker *sender;
static struct tl_worker *receiver;
static struct tl_cq *cq;
static struct tl_cq *sent;
static struct tl_error error;

static inline void prepare(const char *settings)
{
    cluster_init(&cluster, 3, settings);
    fake_plane_init(&plane, &cluster);
    cq = cluster_cq();
    sent = cluster_cq();
}

static inline void open_both(int progress)
{
    sender = fake_plane_open(&plane, 0, TL_PROGRESS_THREAD);
    receiver = fake_plane_open(&plane, 1, progress);
}

/* The receiver first: while nobody drives it, it does not answer when the sender says goodbye. */
static inline void teardown(void)
{
    if (cluster.workers[1] != NULL) cluster_close(&cluster, 1);
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
    tl_cq_destroy(sent);
    fake_plane_fini(&plane);
}

#endif
