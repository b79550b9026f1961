// SPDX-License-Identifier: Apache-2.0
/*
 * Dropping: a thread unmaps what a queue pair has mapped, and closes its descriptors. Both can take long: the process
 * that unmaps memory last frees all of its pages, and a socket may contain descriptors that are slow to close.
 */
#ifndef DATAPLANE_LOCAL_LOCAL_DROP_H
#define DATAPLANE_LOCAL_LOCAL_DROP_H

#include "dataplane/local/local_internal.h"

/* What a queue pair, or a part of it, leaves to be unmapped and closed. Members that are zero leave nothing. */
struct local_leftovers {
    struct local_ring ring;
    struct local_peer_segment *mapped; /* [mapped_count] on the heap, or NULL */
    size_t mapped_count;
    struct local_peer_segment segment;
    struct local_peer_file *files; /* [LOCAL_FILES] on the heap, or NULL */
    struct local_peer_file file;
    struct local_peer_memory *memories; /* [LOCAL_MEMORIES] on the heap, or NULL */
    int fds[5];                         /* [fd_count] sockets that are shut down, and eventfds; in no epoll set */
    unsigned fd_count;
};

/* Takes over the leftovers; a thread unmaps, closes and frees them. Without a thread they are dropped before this
 * returns. */
void local_drop(const struct local_leftovers *leftovers);

#endif
