// SPDX-License-Identifier: Apache-2.0
/*
 * Workers of a cluster whose data plane is a fake provider, all on one fabric.
 *
 * Call fake_transport_init before the first worker. Each task that is opened with fake_transport_open has a card of its
 * own, which is closed with its worker. fake_transport_fini after the last one checks that nothing is left in the
 * fabric. With has_local each has a second, preferred data plane for workers on the same host.
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
        struct tl_provider *provider; /* The provider of the task's latest worker; it is gone when that is closed. */
        uint8_t host;                 /* The host of a card in locals. */
        bool is_missing;              /* There is no card. */
        bool has_no_windows;
        unsigned spare_count;       /* So many more cards may be opened when the first cannot be used. */
        struct fake_rule faults[3]; /* The rules of each card in its order, from its opening on; kinds 0: none. */
    } cards[CLUSTER_MAX + 1];       /* By task; the last is for clients. */
    struct fake_card locals[CLUSTER_MAX + 1];
    bool has_local;
    int64_t peer_timeout_ns; /* For every engine; 0: a long time. */
    int64_t cancel_ns;       /* the same */
    int64_t attempt_ns;      /* the same */
    uint64_t pool_bytes;     /* The whole pool; 0: plenty. */
};

void fake_transport_init(struct fake_transport *transport, struct cluster *cluster);
void fake_transport_fini(struct fake_transport *transport);

/* Opens a task with a card; its progress is `progress`. */
struct tl_worker *fake_transport_open(struct fake_transport *transport, unsigned task, enum tl_progress progress);
/* Does the same, and may fail. */
enum tl_status fake_transport_try(struct fake_transport *transport, unsigned task, enum tl_progress progress,
                                  struct tl_error *ret_error);
/* Opens a worker that is no member, with a card; the caller closes it. */
struct tl_worker *fake_transport_open_client(struct fake_transport *transport);

#endif
