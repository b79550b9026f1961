// SPDX-License-Identifier: Apache-2.0
/* A peer of the local transport that is played by hand: its accept socket, its control socket and its eventfd, and what
 * it puts into others' accept sockets. */
#ifndef TESTS_FAKES_LOCAL_CALLER_H
#define TESTS_FAKES_LOCAL_CALLER_H

#include "dataplane/local/local_internal.h"

struct local_caller {
    struct local_address self; /* its token is zero */
    int accept_socket;
    int in;        /* the end of its control socket on which it hears */
    int peers_end; /* the other one */
    int out;       /* the end of the other one's control socket; -1: not taken yet */
    int wake_in;   /* the eventfd that the other one writes to wake it */
    int wake_out;  /* the other one's eventfd; -1: not taken yet */
};

/* Opens a caller on the host of the peer that it is going to call. */
void caller_open(struct local_caller *caller, const struct local_address *peer);
void caller_close(struct local_caller *caller);
/* What it is to say, with a ring of that many slots. */
struct local_hello caller_hello(const struct local_address *peer, uint32_t slot_count);
/* Sends this to the peer's accept socket, with that many descriptors, at most 4. False: it takes nothing. */
bool caller_say(const struct local_address *peer, const void *bytes, size_t len_bytes, const int *fds, size_t fd_count);
/* Calls as a peer does, with this ring, and closes the end that is the peer's then. */
void caller_call(struct local_caller *caller, const struct local_address *peer, const struct local_hello *hello,
                 int ring);
/* Takes the other one's HELLO, which has been said; its ring is the caller's. */
int caller_take(struct local_caller *caller, struct local_hello *ret_hello);

#endif
