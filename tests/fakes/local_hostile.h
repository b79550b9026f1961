// SPDX-License-Identifier: Apache-2.0
/*
 * A queue pair of a local provider, and a peer that is played by a script of bytes: it has connected as any other, and
 * then writes what it likes into the ring, the words and the socket. For a fuzz target, and for a seeded test.
 */
#ifndef TESTS_FAKES_LOCAL_HOSTILE_H
#define TESTS_FAKES_LOCAL_HOSTILE_H

#include "fakes/local_caller.h"

struct hostile_input {
    const uint8_t *data;
    size_t left_bytes;
};

#define HOSTILE_TARGET_BYTES 4096

struct hostile {
    struct tl_provider *provider;
    struct tl_queue_pair *pair;
    unsigned broken, drained;
    unsigned works_out;
    struct tl_region *region;    /* ours, exposed to it */
    struct tl_exposure exposure; /* of a part of that */
    uint8_t *users;              /* HOSTILE_TARGET_BYTES, of which the half in the middle is exposed */
    struct tl_exposure users_exposure;
    uint8_t *source; /* what is written to the peer */

    /* The peer's. */
    struct local_caller caller;
    struct local_ring ring;   /* its own, in which we write */
    struct local_ring theirs; /* ours, in which it writes */
    int theirs_fd;
    int segment;
    uint32_t sequence;
};

/* Aborts when it cannot connect. */
void hostile_open(struct hostile *hostile);
/* The same; its ring is first shown to somebody who maps it as well, which he cannot do later. */
void hostile_open_shown(struct hostile *hostile, void (*show)(int ring_fd));
/* Takes some bytes of the script, does what they say, polls. */
void hostile_step(struct hostile *hostile, struct hostile_input *input);
/* Checks that nothing was written where nothing was exposed; ends everything. */
void hostile_close(struct hostile *hostile);

#endif
