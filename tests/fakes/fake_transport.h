// SPDX-License-Identifier: Apache-2.0
/*
 * Workers of a cluster whose data plane is a fake provider, all on one fabric.
 *
 * fake_transport_init before the first worker; each task that is opened with fake_transport_open has a card of its own,
 * which is closed with its worker; fake_transport_fini after the last one checks that nothing is left in the fabric.
 * With has_local each has another data plane besides, the preferred one, for workers that are on the same host.
 */
#ifndef FAKES_FAKE_TRANSPORT_H
#define FAKES_FAKE_TRANSPORT_H

#include "fakes/cluster.h"
#include "fakes/fake_provider.h"
#include "server/transports/transport.h"

struct fake_transport {
    struct fake_fabric *fabric;
    struct cluster *cluster;
    struct fake_card {
        struct fake_transport *transport;
        struct tl_transport_source source;
        struct tl_provider *provider; /* of the latest worker of the task; gone when that is closed */
        uint8_t host;                 /* of those in locals */
        bool is_missing;              /* there is no card */
        bool has_no_windows;
        unsigned spare_count;       /* so many more may be opened when the first cannot be used */
        struct fake_rule faults[3]; /* of each in its order, from its opening on; kinds 0: none */
    } cards[CLUSTER_MAX + 1];       /* by task, then that of clients */
    struct fake_card locals[CLUSTER_MAX + 1];
    bool has_local;
    int64_t peer_timeout_ns; /* of every engine; 0: a long time */
    int64_t cancel_ns;       /* the same */
    int64_t attempt_ns;      /* the same */
    uint64_t pool_bytes;     /* all that the pool may have; 0: plenty */
};

void fake_transport_init(struct fake_transport *transport, struct cluster *cluster);
void fake_transport_fini(struct fake_transport *transport);

/* Opens a task with a card; its progress is `progress`. */
struct tl_worker *fake_transport_open(struct fake_transport *transport, unsigned task, enum tl_progress progress);
/* The same, which may fail. */
enum tl_status fake_transport_try(struct fake_transport *transport, unsigned task, enum tl_progress progress,
                                  struct tl_error *ret_error);
/* A worker that is no member, with a card; closed by the caller. */
struct tl_worker *fake_transport_open_client(struct fake_transport *transport);

#endif
