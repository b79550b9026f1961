// SPDX-License-Identifier: Apache-2.0
/*
 * What a peer of the local transport could make us wait for is done aside of the reactor, by the helper thread of its
 * queue pair: it takes what the peer passes (recvmsg, fstat, mmap, seals, close), reads the peer's memory, unmaps what
 * the peer may have filled, and closes the sockets, with what the peer has left in them. A file system that is a
 * process (FUSE) answers when it likes, so do pages that the peer keeps back (userfaultfd); a TCP socket lingers; and
 * freeing pages takes as long as there are many. A helper thread's thread runs from the first job until it has had none
 * for a second.
 *
 * A helper thread whose queue pair ends is left alone, and ends itself when it comes back. Of these there may be
 * LOCAL_MAX_LEFT_OF_PEER for one peer and LOCAL_MAX_LEFT_OF_USER for the processes of one user: then these get no new
 * connection, until some have come back.
 */
#ifndef DATAPLANE_LOCAL_LOCAL_HELPER_H
#define DATAPLANE_LOCAL_LOCAL_HELPER_H

#include "dataplane/local/local_internal.h"

#define LOCAL_MAX_LEFT_OF_PEER 16
#define LOCAL_MAX_LEFT_OF_USER 256

struct local_helper;

enum local_job {
    LOCAL_JOB_NONE,
    LOCAL_JOB_TAKE,
    LOCAL_JOB_READ,
    LOCAL_JOB_DROP,
};

/* The packet in front of the socket, and what was passed with it. */
struct local_taking {
    /* What the job is given. */
    int socket;
    bool is_accept_socket;           /* the helper thread's, who closes it */
    pid_t peer;                      /* whose memory is tried to be read, with a HELLO; 0: none */
    uint64_t files_bytes;            /* no file is mapped that is larger */
    struct local_peer_file replaced; /* with FILE: what is freed first; the helper thread's */
    /* What comes of it. */
    enum local_received received;
    union local_packet packet;
    void *address;               /* of the memory, with HELLO and ATTACH; the caller's */
    int control_socket;          /* with HELLO, if there is an address; the caller's */
    struct tl_mapped_file *file; /* with FILE; the caller's */
    struct tl_error error;       /* why there is neither; code TL_OK: there is */
    const char *reading_refusal; /* with HELLO: why the peer's memory cannot be read; NULL: it can */
};

/* Bytes of the peer's memory. */
struct local_reading {
    pid_t peer;
    uint64_t source;
    uint8_t *destination; /* not touched any more once local_helper_forget has returned */
    uint64_t len_bytes;
    int error; /* errno; 0: they were read */
};

/* What is left of a queue pair, or a part of it: to be unmapped and freed. */
struct local_leftovers {
    struct local_ring ring;
    struct local_mapped *mapped; /* [mapped_count] */
    size_t mapped_count;
    struct local_peer_file *files; /* [file_count] */
    size_t file_count;
    int sockets[3]; /* [socket_count] shut down, and in no epoll set */
    unsigned socket_count;
    int *segments; /* [segment_count] descriptors of ours, that peers have had */
    size_t segment_count;
};

/* Whether a helper thread may be made for this peer (a number of its name; 0: nobody is known), and may do something
 * for this user. Thread: any. Errors: TL_RESOURCE_EXHAUSTED: too many wait for it already. */
enum tl_status local_helper_may_serve(uint64_t peer, struct tl_error *ret_error) TL_MUST_USE;
enum tl_status local_helper_may_serve_user(uid_t uid, struct tl_error *ret_error) TL_MUST_USE;
/* NULL: no memory. done_fd: an eventfd that is written when a job is over; open until local_helper_end. */
struct local_helper *local_helper_make(uint64_t peer, int done_fd);
/* Only one job at a time. Errors: TL_RESOURCE_EXHAUSTED: no thread. */
enum tl_status local_helper_take(struct local_helper *helper, const struct local_taking *taking,
                                 struct tl_error *ret_error) TL_MUST_USE;
enum tl_status local_helper_read(struct local_helper *helper, const struct local_reading *reading,
                                 struct tl_error *ret_error) TL_MUST_USE;
/* One segment; its records are copied. */
enum tl_status local_helper_drop(struct local_helper *helper, const struct local_mapped *mapped,
                                 struct tl_error *ret_error) TL_MUST_USE;
/* What is given has a job. */
bool local_helper_is_busy(const struct local_helper *helper);
/* The job that is over, once; LOCAL_JOB_NONE: it is not, or there is none. */
enum local_job local_helper_done(struct local_helper *helper);
/* Of the job that local_helper_done has told of, until the next one. */
struct local_taking *local_helper_taken(struct local_helper *helper);
const struct local_reading *local_helper_has_read(const struct local_helper *helper);
/* The destination of what is being read is the user's again. */
void local_helper_forget(struct local_helper *helper);
/* The helper thread is not the caller's any more, and sees to the remains, which are taken over. uid: whose process may
 * make it wait. */
void local_helper_end(struct local_helper *helper, uid_t uid, const struct local_leftovers *leftovers);
/* A helper thread of nobody's sees to the remains. */
void local_helper_drop_all(const struct local_leftovers *leftovers);

#endif
