// SPDX-License-Identifier: Apache-2.0
/*
 * A peer of a local provider that makes others wait: a process of its own that speaks the protocol by hand, as it is
 * ordered, one order after the other; to each it says that it is done, or what this system lacks for it.
 *
 * The process ends with its test, and after SLOW_FILE_SECONDS in any case.
 */
#ifndef TESTS_FAKES_WAITING_PEER_H
#define TESTS_FAKES_WAITING_PEER_H

#include "dataplane/local_internal.h"

enum waiting_peer_do {
    /* What it is to have; one of these comes first. */
    WAITING_PEER_HAS_PAGE,   /* memory that can be read at once */
    WAITING_PEER_HAS_FAULTS, /* memory whose page comes when it is let go (userfaultfd) */
    WAITING_PEER_HAS_FILE,   /* a file that answers when it is let go, and memory that lies in it */

    WAITING_PEER_CALL,           /* as a peer does; and posts a message */
    WAITING_PEER_CALL_WITH_FILE, /* the ring is the file */
    WAITING_PEER_PASS_SEGMENT,   /* which is the file */
    WAITING_PEER_PASS_FILE,      /* number 1, and posts a message */
    WAITING_PEER_POST_READ,      /* of WAITING_PEER_BYTES, from the memory to `place` */
    WAITING_PEER_LET_GO,

    /* Calls WAITING_PEER_STRANGERS times, and passes sockets that linger when they are closed. */
    WAITING_PEER_SAY_TOKEN,   /* a wrong one */
    WAITING_PEER_SAY_NOTHING, /* that means anything */
    WAITING_PEER_SAY_AS_USER, /* everything, as a user who may not */
};

struct waiting_peer_order {
    enum waiting_peer_do what;
    struct local_introduction to;
    struct local_place place;
};

#define WAITING_PEER_BYTES 4096
#define WAITING_PEER_STRANGERS (LOCAL_MAX_CALLERS + 16)
/* What the memory is full of. */
#define WAITING_PEER_BYTE 0x5a
/* What it says when somebody begins to wait; of strangers: when one of them was hung up on. */
#define WAITING_PEER_WAITS "waits"
/* When an order was carried out; or what is lacking for it. */
#define WAITING_PEER_DONE "done"

/* A child of fakes/forker.h. */
int waiting_peer_run(int fd);

#endif
