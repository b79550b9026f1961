// SPDX-License-Identifier: Apache-2.0
/*
 * A queue pair of a local provider, and a peer that a script of bytes controls: it connects as any other peer, and then
 * writes anything into the ring, its head and the socket. A fuzz target and a seeded test use it.
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
    bool owns_provider;
    struct tl_queue_pair *pair;
    unsigned broken, drained;
    unsigned works_out;
    struct tl_region *region;    /* a region of ours, of which a part is exposed to the peer */
    struct tl_exposure exposure; /* the exposure of that part */
    uint8_t *users;              /* [HOSTILE_TARGET_BYTES], of which the half in the middle is exposed */
    struct tl_exposure users_exposure;
    uint8_t *source; /* the bytes that we write to the peer */

    /* The following members belong to the peer. */
    struct local_caller caller;
    struct local_ring ring;   /* the peer's ring, which we write */
    struct local_ring theirs; /* our ring, which the peer writes */
    int theirs_fd;
    int segment;
    int unsealed; /* a file of the same size that may shrink */
    uint32_t sequence;
    uint64_t memory_number; /* that of the latest memory of a device that the peer has shown; 0: none */
    uint64_t file_number;   /* that of the latest file that it has passed; 0: none */
};

/* Opens both sides and connects them. Aborts on failure. */
void hostile_open(struct hostile *hostile);
/* Does the same, and first passes the peer's ring to `show`, so that another process can map it, which is not possible
 * later. */
void hostile_open_shown(struct hostile *hostile, void (*show)(int ring_fd));
/* Opens both sides on a provider of the caller, which stays open when they close. */
void hostile_open_on(struct hostile *hostile, struct tl_provider *provider);
/* Takes some bytes of the script, does what they say, and polls. */
void hostile_step(struct hostile *hostile, struct hostile_input *input);
/* Checks that nothing was written outside of the exposed memory, and closes both sides. */
void hostile_close(struct hostile *hostile);

#endif
