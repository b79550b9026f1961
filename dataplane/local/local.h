// SPDX-License-Identifier: Apache-2.0
/*
 * The local provider: workers of one host exchange tensors through shared memory (docs/local.md).
 *
 *   accept socket               of each pair until it is connected: a socket with a name, where only the peer can call
 *   control socket               of each pair and direction: a socket over which they pass descriptors, wake each
 * other, and notice that the other one has died ring               of each pair and direction, in shared memory:
 * messages and immediates segment            a region that was made by region_map: memory that a peer maps and writes
 *
 * Happy path: both call the other one's accept socket, and pass an end of their control socket and their ring; what is
 * posted is copied into the peer's ring and segments by poll and ring, and found there by the peer's poll. No system
 * call is made between two that are awake.
 *
 * Failure modes: a peer on another host, of a user who may not, with the wrong token, one that dies, or one whose ring
 * holds what cannot be: the queue pair breaks, with the reason. Nothing is left behind but, after a crash, the file of
 * an accept socket, which the next provider in its folder removes.
 */
#ifndef DATAPLANE_LOCAL_LOCAL_H
#define DATAPLANE_LOCAL_LOCAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dataplane/provider.h"

/* Names a running kernel: equal only for processes of one host that has not been restarted meanwhile. */
#define TL_HOST_ID_BYTES 16

/* A region of at most that size takes memory only when it is used; larger ones have all of it at once. */
#define TL_LOCAL_LAZY_BYTES (UINT64_C(4) << 20)

struct tl_local_options {
    const char *socket_folder; /* where the socket is a file; NULL: it has an abstract name */
    bool is_reading_forbidden; /* process_vm_readv is not tried: other memory than the pool's is copied twice */
};

/* Errors: TL_UNAVAILABLE: the kernel lacks something, and what. TL_PERMISSION_DENIED, TL_INVALID_ARGUMENT,
 * TL_NOT_FOUND: the folder. TL_RESOURCE_EXHAUSTED: no memory or descriptor. */
enum tl_status tl_local_open(const struct tl_local_options *options, struct tl_provider **ret_provider,
                             struct tl_error *ret_error) TL_MUST_USE;

/* Errors: TL_UNAVAILABLE: /proc/sys/kernel/random/boot_id cannot be read. */
enum tl_status tl_local_host_id(uint8_t ret_id[TL_HOST_ID_BYTES], struct tl_error *ret_error) TL_MUST_USE;

/* What has happened, of all queue pairs since open. */
struct tl_local_stats {
    uint64_t wakes_sent;
    uint64_t bytes_written; /* into peers' segments */
    uint64_t bytes_read;    /* from peers' memory */
};
/* Thread: the reactor that owns the provider. */
void tl_local_get_stats(const struct tl_provider *provider, struct tl_local_stats *ret_stats);

#endif
