// SPDX-License-Identifier: Apache-2.0
/*
 * A peer of a local provider that makes others wait: a process of its own that speaks the protocol by hand, as it is
 * ordered, one order after the other; to each it says that it is done, or what this system lacks for it.
 *
 * The process ends with its test, and after SLOW_FILE_SECONDS in any case.
 */
#ifndef TESTS_FAKES_WAITING_PEER_H
#define TESTS_FAKES_WAITING_PEER_H

#include "fakes/local_caller.h"

enum waiting_peer_do {
    /* What it is to have; one of these comes first. */
    WAITING_PEER_HAS_PAGE,   /* memory that can be read at once */
    WAITING_PEER_HAS_FAULTS, /* memory whose page comes when it is let go (userfaultfd) */
    WAITING_PEER_HAS_FILE,   /* a file that answers when it is let go, and memory that lies in it */

    /* With the accept socket of the one who calls, into which the other one has called already. */
    WAITING_PEER_CALL,      /* as a peer does; and posts a message */
    WAITING_PEER_POST_READ, /* of WAITING_PEER_BYTES, from the memory to `place` */
    WAITING_PEER_LET_GO,

    /* Passes sockets that linger when they are closed, again and again. */
    WAITING_PEER_SAY_TOKEN,     /* into the accept socket, with a wrong token; and keeps them */
    WAITING_PEER_SAY_NOTHING,   /* into the accept socket, with words that mean nothing; and keeps them */
    WAITING_PEER_LEAVE_AS_USER, /* with the right token, as another user */
};

struct waiting_peer_order {
    enum waiting_peer_do what;
    struct local_address to;
    struct local_place place;
};

#define WAITING_PEER_BYTES 4096
/* What the memory is full of. */
#define WAITING_PEER_BYTE 0x5a
/* What it says when somebody begins to wait. */
#define WAITING_PEER_WAITS "waits"
/* When an order was carried out; or what is lacking for it. */
#define WAITING_PEER_DONE "done"

/* A child of fakes/forker.h. */
int waiting_peer_run(int fd);

#endif
