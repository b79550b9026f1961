// SPDX-License-Identifier: Apache-2.0
/*
 * Helper threads of the local provider. They do what can take long or has to wait for memory of a peer, so that the
 * reactor does not wait.
 *
 * Reading: each queue pair has two helpers, which read memory of the peer's process (process_vm_readv). Such a call can
 * wait for pages that the peer keeps back (userfaultfd) or that lie in a file. The thread of a helper starts with the
 * first reading, and ends when there was none for a second.
 *
 * Dropping: a separate thread unmaps what a queue pair has mapped, and closes its sockets. Both can take long: the
 * process that unmaps memory last frees all of its pages, and a socket may contain descriptors that are slow to close.
 */
#ifndef DATAPLANE_LOCAL_LOCAL_HELPER_H
#define DATAPLANE_LOCAL_LOCAL_HELPER_H

#include "dataplane/local/local_internal.h"

struct local_helper;

/* Bytes of the peer's memory that a helper reads. */
struct local_reading {
    pid_t peer;
    uint64_t source;
    uint8_t *destination; /* not written any more once local_helper_forget has returned */
    uint64_t len_bytes;
    bool is_buffered; /* the bytes go through a buffer, so that the destination can be taken back at any time */
};

/* What a queue pair, or a part of it, leaves to be unmapped and closed. */
struct local_leftovers {
    struct local_ring ring;
    struct local_peer_segment *mapped; /* [mapped_count] on the heap, or NULL */
    size_t mapped_count;
    struct local_peer_file *files; /* [file_count] on the heap, or NULL */
    size_t file_count;
    int sockets[3]; /* [socket_count] shut down, and in no epoll set */
    unsigned socket_count;
};

/* Creates a helper. done_fd is an eventfd that is written when a reading has ended; it must stay open until
 * local_helper_destroy. Returns NULL when there is no memory. */
struct local_helper *local_helper_create(int done_fd);
/* Starts a reading; there is only one at a time. Errors: TL_RESOURCE_EXHAUSTED: no thread. */
enum tl_status local_helper_read(struct local_helper *helper, const struct local_reading *reading,
                                 struct tl_error *ret_error) TL_MUST_USE;
/* Returns whether a reading was started whose end local_helper_is_done has not returned yet. NULL is accepted. */
bool local_helper_is_busy(const struct local_helper *helper);
/* Returns whether the reading has ended; it returns true once. ret_error is an errno, or 0 when all bytes were read. */
bool local_helper_is_done(struct local_helper *helper, int *ret_error);
/* Takes the destination of the reading back: its owner may use it again. Blocks while a call writes there directly. */
void local_helper_forget(struct local_helper *helper);
/* Does the same without blocking: stops the reading, and returns false while a call still writes to the destination. In
 * that case the eventfd is written when the call has returned. */
bool local_helper_try_to_forget(struct local_helper *helper);
/* Destroys the helper. If it has a thread, that thread frees it as soon as its last call returns. The destination of a
 * reading must have been taken back before. NULL is accepted. */
void local_helper_destroy(struct local_helper *helper);

/* Takes over the leftovers; a thread unmaps, closes and frees them. Without a thread they are dropped before this
 * returns. */
void local_drop(const struct local_leftovers *leftovers);

#endif
