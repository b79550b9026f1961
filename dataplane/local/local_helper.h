// SPDX-License-Identifier: Apache-2.0
/*
 * Helper threads of the local provider: what can take long, or wait for a peer's memory, is done by a thread and not by
 * the reactor.
 *
 * Reading: each queue pair has two helpers, which read memory of the peer's process (process_vm_readv). Pages that the
 * peer keeps back (userfaultfd) or that lie in a file let such a call wait. The thread of a helper runs from its first
 * reading until it has had none for a second.
 *
 * Dropping: what a queue pair has mapped, and its sockets, are unmapped and closed by a thread of their own. The
 * process that frees memory last frees all of its pages, and a descriptor that is left in a socket may take long to
 * close.
 */
#ifndef DATAPLANE_LOCAL_LOCAL_HELPER_H
#define DATAPLANE_LOCAL_LOCAL_HELPER_H

#include "dataplane/local/local_internal.h"

struct local_helper;

/* Bytes of the peer's memory. */
struct local_reading {
    pid_t peer;
    uint64_t source;
    uint8_t *destination; /* not written any more once local_helper_forget has returned */
    uint64_t len_bytes;
    bool is_buffered; /* goes through a buffer, so that the destination can be taken back at any time */
};

/* What is left of a queue pair, or of a part of it. */
struct local_leftovers {
    struct local_ring ring;
    struct local_mapped *mapped; /* [mapped_count] on the heap, or NULL */
    size_t mapped_count;
    struct local_peer_file *files; /* [file_count] on the heap, or NULL */
    size_t file_count;
    int sockets[3]; /* [socket_count] shut down, and in no epoll set */
    unsigned socket_count;
};

/* done_fd: an eventfd that is written when a reading is over; open until local_helper_destroy. Returns NULL when there
 * is no memory. */
struct local_helper *local_helper_create(int done_fd);
/* Starts a reading; there is only one at a time. Errors: TL_RESOURCE_EXHAUSTED: no thread. */
enum tl_status local_helper_read(struct local_helper *helper, const struct local_reading *reading,
                                 struct tl_error *ret_error) TL_MUST_USE;
/* Whether a reading was started whose end local_helper_is_done has not told yet. NULL is accepted. */
bool local_helper_is_busy(const struct local_helper *helper);
/* Whether the reading has ended; true once. ret_error is an errno, 0 when all bytes were read. */
bool local_helper_is_done(struct local_helper *helper, int *ret_error);
/* Takes the destination of the reading back: its owner may use it again. Blocks while a call writes there directly. */
void local_helper_forget(struct local_helper *helper);
/* The same, without blocking: stops the reading, and returns false when a call still writes to the destination. Then
 * the eventfd is written when the call has returned. */
bool local_helper_try_to_forget(struct local_helper *helper);
/* The helper's thread, if it has one, frees the helper as soon as its last call returns. The destination of a reading
 * was taken back before. NULL is accepted. */
void local_helper_destroy(struct local_helper *helper);

/* Takes over the leftovers; a thread unmaps, closes and frees them. Without a thread they are dropped before this
 * returns. */
void local_drop(const struct local_leftovers *leftovers);

#endif
