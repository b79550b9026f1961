// SPDX-License-Identifier: Apache-2.0
/*
 * The local provider: workers of one host exchange tensors through shared memory (docs/local.md).
 *
 * Each queue pair has an accept socket until it is connected, where only its peer can call. A connected pair has, for
 * each direction, a control socket, over which descriptors are passed, sleepers are woken and a death is noticed, and a
 * ring in shared memory with messages and immediates. A segment is a region made by region_map, which a peer maps and
 * writes.
 *
 * Happy path: both sides call the other one's accept socket, and pass an end of their control socket and their ring.
 * What is posted is copied into the peer's ring and segments by poll and doorbell, and found there by the peer's poll.
 * No system call is made between two that are awake.
 *
 * Failure modes: a peer on another host or of another user, with a wrong token, one that dies, or one whose ring holds
 * what cannot be: the queue pair breaks, with the reason. Nothing is left behind but, after a crash, the file of an
 * accept socket, which the next provider in its folder removes.
 */
#ifndef DATAPLANE_LOCAL_LOCAL_H
#define DATAPLANE_LOCAL_LOCAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dataplane/provider.h"

/* The id of a running kernel is equal only for processes of one host that has not been restarted meanwhile. */
#define TL_HOST_ID_BYTES 16

/* A region of at most that size takes memory only when it is used; a larger one takes all of it at once. */
#define TL_LOCAL_LAZY_BYTES (UINT64_C(4) << 20)

struct tl_local_options {
    const char *socket_folder; /* accept sockets are files in this folder; NULL: they have abstract names */
    bool is_reading_forbidden; /* process_vm_readv is not tried: other memory than the pool's is copied twice */
};

/* Opens the provider, which belongs to the caller. Errors: TL_UNAVAILABLE: the kernel lacks something, which the
 * message names. TL_PERMISSION_DENIED, TL_INVALID_ARGUMENT, TL_NOT_FOUND: the folder cannot be used.
 * TL_RESOURCE_EXHAUSTED: no memory or descriptor. */
enum tl_status tl_local_open(const struct tl_local_options *options, struct tl_provider **ret_provider,
                             struct tl_error *ret_error) TL_MUST_USE;

/* Errors: TL_UNAVAILABLE: /proc/sys/kernel/random/boot_id cannot be read. */
enum tl_status tl_local_host_id(uint8_t ret_id[TL_HOST_ID_BYTES], struct tl_error *ret_error) TL_MUST_USE;

/* Counts of all queue pairs since open. */
struct tl_local_stats {
    uint64_t wakes_sent;
    uint64_t bytes_written; /* into peers' segments */
    uint64_t bytes_read;    /* from peers' memory */
};
/* Thread: the reactor that owns the provider. */
void tl_local_get_stats(const struct tl_provider *provider, struct tl_local_stats *ret_stats);

#endif
