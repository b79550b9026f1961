// SPDX-License-Identifier: Apache-2.0
/*
 * A peer of a local provider that makes calls of other processes wait. It is a process that speaks the protocol by hand
 * and carries out one order after the other. It answers each with WAITING_PEER_DONE, or with what this system lacks for
 * it.
 *
 * The process ends with its test, after SLOW_FILE_SECONDS at the latest.
 */
#ifndef TESTS_FAKES_WAITING_PEER_H
#define TESTS_FAKES_WAITING_PEER_H

#include "fakes/local_caller.h"

enum waiting_peer_do {
    /* These orders choose the memory that the peer has; one of them comes first. */
    WAITING_PEER_HAS_PAGE,   /* memory that can be read at once */
    WAITING_PEER_HAS_FAULTS, /* memory whose page comes with WAITING_PEER_LET_GO (userfaultfd) */
    WAITING_PEER_HAS_FILE,   /* a file that answers with WAITING_PEER_LET_GO, and memory that is mapped from it */

    /* These orders use the connection. An accept socket that already contains the HELLO of the process under test is
     * passed with the first one. */
    WAITING_PEER_CALL,      /* connects as any peer does, and posts a message */
    WAITING_PEER_POST_READ, /* posts a slot that asks to read WAITING_PEER_BYTES from the memory to `place` */
    WAITING_PEER_LET_GO,

    /* With these orders the peer passes sockets that linger when they are closed, many times. */
    WAITING_PEER_SAY_TOKEN,     /* passes them in a HELLO with a wrong token, and keeps them open */
    WAITING_PEER_SAY_NOTHING,   /* passes them in a packet without meaning, and keeps them open */
    WAITING_PEER_LEAVE_AS_USER, /* passes them in a HELLO with the right token, as another user */
};

struct waiting_peer_order {
    enum waiting_peer_do what;
    struct local_address to;
    struct local_descriptor place;
};

#define WAITING_PEER_BYTES 4096
/* Every byte of the memory has this value. */
#define WAITING_PEER_BYTE 0x5a
/* The peer sends this word when a call begins to wait for it. */
#define WAITING_PEER_WAITS "waits"
/* The peer sends this word when an order was carried out; otherwise it sends what is lacking for it. */
#define WAITING_PEER_DONE "done"

/* The function of a child of fakes/forker.h. */
int waiting_peer_run(int fd);

#endif
