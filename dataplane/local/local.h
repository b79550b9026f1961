// SPDX-License-Identifier: Apache-2.0
/*
 * The local provider: workers of one host exchange tensors through shared memory (docs/local.md).
 *
 * Until a queue pair is connected it has an accept socket, and only its peer can send something there. A connected pair
 * has a control socket and a ring in shared memory for each direction. Control sockets pass descriptors, wake a
 * sleeping reactor and show the end of a process; rings carry messages and immediates. A segment is a region that was
 * made by region_map; a peer maps it and writes to it.
 *
 * Happy path: each side sends an end of its control socket, and its ring, to the other one's accept socket. The
 * functions poll and doorbell copy what was posted into the peer's ring and segments, where the peer's poll finds it.
 * While both reactors are awake, this takes no system call.
 *
 * Failure modes: the peer is on another host, belongs to another user, has a wrong token, dies, or writes something
 * invalid into the ring: the queue pair breaks, with the reason. A crash leaves at most the file of an accept socket
 * behind, which the next provider in that folder removes.
 */
#ifndef DATAPLANE_LOCAL_LOCAL_H
#define DATAPLANE_LOCAL_LOCAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dataplane/provider.h"

/* A region of at most this size takes memory only when it is used; a larger one takes all of its memory at once. */
#define TL_LOCAL_LAZY_BYTES (UINT64_C(4) << 20)

/* Tensors that are received into memory of users are copied through so much of the pool while it has enough free
 * memory, a larger one round and round: one that is received alone takes less time than when helper threads read it.
 * When many are under way, the helper threads read the others, and the pool is not made larger. */
#define TL_LOCAL_COPY_BYTES (UINT64_C(2) << 20)

struct tl_local_options {
    const char *socket_folder; /* accept sockets are files in this folder; NULL: accept sockets have abstract names */
    bool is_reading_forbidden; /* process_vm_readv is not tried, so that memory outside of the pool is copied twice */
};

/* Opens the provider, which belongs to the caller. Errors: TL_UNAVAILABLE: the kernel lacks a feature, which the
 * message names. TL_PERMISSION_DENIED, TL_INVALID_ARGUMENT, TL_NOT_FOUND: the folder cannot be used.
 * TL_RESOURCE_EXHAUSTED: no memory or descriptor. */
enum tl_status tl_local_open(const struct tl_local_options *options, struct tl_provider **ret_provider,
                             struct tl_error *ret_error) TL_MUST_USE;

/* Counters of all queue pairs since the provider was opened. */
struct tl_local_stats {
    uint64_t wakes_sent;
    uint64_t bytes_written; /* bytes that were copied into segments of peers */
    uint64_t bytes_read;    /* bytes that were read from memory of peers */
};
/* Thread: the reactor that owns the provider. */
void tl_local_get_stats(const struct tl_provider *provider, struct tl_local_stats *ret_stats);

#endif
