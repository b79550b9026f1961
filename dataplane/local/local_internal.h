// SPDX-License-Identifier: Apache-2.0
/*
 * The local provider as its files see it: local.c (open, poll, sleep), local_socket.c (sockets, credentials),
 * local_segment.c (shared memory), local_handshake.c (how two pairs are connected), local_pair.c (life of a pair),
 * local_send.c (what was posted leaves), local_expose.c (memory that the peer may have written), local_receive.c (what
 * the peer has posted), local_files.c (files that the peer may map), local_helper.c (threads that read peers' memory
 * and drop what is left).
 *
 * The peer may change everything in a ring at any time: each word is read once, and what was read is compared with our
 * own records.
 */
#ifndef DATAPLANE_LOCAL_LOCAL_INTERNAL_H
#define DATAPLANE_LOCAL_LOCAL_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "base/list.h"
#include "dataplane/local/local.h"

/* ------------------------------------------------------------------------------------------------------- rings -- */

#define LOCAL_CACHE_LINE_BYTES 64

/* Bits of ring_head.state. Above them is a number that changes with every sleep. */
#define LOCAL_STATE_SLEEPING 1u
#define LOCAL_STATE_STALLED 2u /* while it sleeps: it waits for a free slot in the other ring */
#define LOCAL_STATE_CLOSED 4u  /* the reader takes nothing more, and its memory may not be read any more */
#define LOCAL_STATE_SLEEPS 8u  /* the first bit of the number */

/* In front of the slots of a ring. The ring belongs to its reader; the peer writes. */
struct local_ring_head {
    /* Written by the reader. */
    _Alignas(LOCAL_CACHE_LINE_BYTES) _Atomic uint32_t state;
    _Alignas(LOCAL_CACHE_LINE_BYTES) _Atomic uint32_t consumed; /* slots, now and then */
    /* Written by the writer: how many LOCAL_SLOT_READ of the reader it has carried out, */
    _Alignas(LOCAL_CACHE_LINE_BYTES) _Atomic uint32_t answered;
    /* and how many packets it has sent, wakes not counted. */
    _Atomic uint32_t packets;
};

enum local_slot_kind {
    LOCAL_SLOT_MESSAGE = 1,
    LOCAL_SLOT_IMMEDIATE = 2, /* a write has been done */
    LOCAL_SLOT_READ = 3,      /* a write is to be done by the reader, from the writer's memory */
};

#define LOCAL_FLAG_IMMEDIATE 1u
#define LOCAL_FLAG_FILE 2u /* the memory to read lies in a file, whose pages may come late */

struct local_slot {
    /* The number of the slot since the beginning plus 1, modulo 2^32. Anything else: the slot is not filled yet. */
    _Alignas(LOCAL_CACHE_LINE_BYTES) _Atomic uint32_t sequence;
    uint16_t kind;
    uint16_t flags;
    uint32_t immediate;
    uint32_t message_bytes;
    union {
        uint8_t message[TL_SLOT_BYTES];
        struct {
            uint64_t len_bytes;
            uint64_t source;       /* in the writer's memory */
            uint64_t offset_bytes; /* in the exposure */
            uint32_t exposure;
            uint32_t generation;
        };
    };
};

struct local_ring {
    struct local_ring_head *head; /* NULL: not mapped */
    struct local_slot *slots;     /* [slot_count] */
    uint32_t slot_count;          /* a power of two */
    uint64_t len_bytes;           /* mapped */
    uint32_t next;                /* number of the next slot: to read, or to write */
};

#define LOCAL_MIN_RING_SLOTS 16
#define LOCAL_MAX_RING_SLOTS 65536

static inline struct local_slot *local_ring_slot(const struct local_ring *ring, uint32_t number)
{
    return &ring->slots[number & (ring->slot_count - 1)];
}

/* Whether a ring may have so many slots. */
bool local_ring_is_count(uint32_t slot_count);
uint64_t local_ring_bytes(uint32_t slot_count);
void local_ring_place(struct local_ring *ring, void *address, uint32_t slot_count);
void local_ring_unmap(struct local_ring *ring);

/* ---------------------------------------------------------------------------------------------------- segments -- */

struct local_region {
    struct tl_region base;
    bool is_segment;     /* else it is memory that the provider has not made */
    int fd;              /* of the segment, used by the reactor; -1: none, or it was passed */
    uint64_t number;     /* unique in the provider */
    struct tl_list link; /* in provider->gone */
    bool has_populater;  /* a thread that gets the pages of a large segment */
    pthread_t populater;
    atomic_bool must_stop; /* the populater */
};

/* A segment of ours that the peer has been told of. */
struct local_attached {
    struct local_region *region;
    uint32_t number; /* unique in the pair */
    bool is_sent;
};

/* A segment of the peer's. */
struct local_mapped {
    uint32_t number;
    uint8_t *address;
    uint64_t len_bytes;
    uint8_t *has_pages; /* a bit for each LOCAL_CHUNK_BYTES; NULL: pages come when they are touched */
};

#define LOCAL_CHUNK_BYTES (UINT64_C(2) << 20)
/* Segments of one peer that are mapped at a time. A pool has fewer regions, so that some are left for other memory. */
#define LOCAL_MAX_SEGMENTS 1024
#define LOCAL_MAX_POOL_REGIONS (LOCAL_MAX_SEGMENTS - 16)

/* Where a peer may write: the content of a descriptor. */
enum local_place_kind { LOCAL_PLACE_SEGMENT = 1, LOCAL_PLACE_OUTSIDE = 2 };
struct local_place {
    uint32_t kind;
    uint32_t number;     /* of the segment or the exposure */
    uint32_t generation; /* of the exposure */
    uint32_t reserved;
    uint64_t offset_bytes; /* in the segment */
    uint64_t len_bytes;
};

/* Memory outside of segments into which the peer may ask us to read. */
struct local_exposed {
    uint8_t *address; /* NULL: free */
    uint64_t len_bytes;
    uint32_t generation;
    uint32_t next_free; /* index and 1; 0: none */
};

enum local_pages {
    LOCAL_PAGES_SMALL,
    LOCAL_PAGES_HUGE, /* those that the administrator has reserved, if any are left; else transparent ones */
};

/* Makes shared memory; the descriptor and the mapping belong to the caller. Errors: TL_RESOURCE_EXHAUSTED. */
enum tl_status local_memory_make(const char *name, uint64_t len_bytes, enum local_pages pages, int *ret_fd,
                                 void **ret_address, struct tl_error *ret_error) TL_MUST_USE;
/* Maps memory that a peer has passed. fd stays the caller's. Errors: TL_INVALID_ARGUMENT: the memory is not sealed
 * against shrinking, or has another size. TL_RESOURCE_EXHAUSTED. */
enum tl_status local_memory_map(int fd, uint64_t len_bytes, void **ret_address, struct tl_error *ret_error) TL_MUST_USE;

enum tl_status local_region_create(struct tl_provider *provider, void *address, uint64_t len_bytes,
                                   enum tl_region_access access, struct tl_region **ret_region,
                                   struct tl_error *ret_error);
enum tl_status local_region_map(struct tl_provider *provider, uint64_t len_bytes, struct tl_region **ret_region,
                                struct tl_error *ret_error);
void local_region_destroy(struct tl_region *region);

/* ----------------------------------------------------------------------------------------------------- sockets -- */

/* The packets: HELLO goes into an accept socket, the others over a control socket. */
enum local_packet_kind {
    LOCAL_PACKET_WAKE = 1,
    LOCAL_PACKET_HELLO = 2,  /* with descriptors of the end of the sender's control socket, and of its ring */
    LOCAL_PACKET_ATTACH = 3, /* with the descriptor of a segment */
    LOCAL_PACKET_DETACH = 4,
    LOCAL_PACKET_FILE = 5, /* with the descriptor of a file */
};

#define LOCAL_TOKEN_BYTES 16
#define LOCAL_PROTOCOL UINT32_C(0x334c4c54)
#define LOCAL_HELLO_DESCRIPTORS 2

/* The filter of an accept socket relies on the place of `to`. */
struct local_hello {
    uint32_t kind;
    uint32_t protocol;
    uint8_t from[LOCAL_TOKEN_BYTES]; /* of the sender's queue pair */
    uint8_t to[LOCAL_TOKEN_BYTES];
    uint32_t slot_count; /* of the ring */
    uint32_t reserved;
    uint64_t proof_address; /* where the sender has `proof`: a process that can read it there can read its memory */
    uint64_t proof;
};

struct local_segment_packet {
    uint32_t kind;
    uint32_t number;
    uint64_t len_bytes;
};

struct local_file_packet {
    uint32_t kind;
    uint32_t modified_ns;
    uint64_t number; /* chosen by the sender, from 1, each greater than the one before */
    uint64_t size_bytes;
    int64_t modified_seconds; /* as the sender has found it */
};

union local_packet {
    uint32_t kind;
    struct local_hello hello;
    struct local_segment_packet segment;
    struct local_file_packet file;
};

/* Files that each side remembers; the oldest is forgotten first. */
#define LOCAL_FILES 64

/* A file of ours that the peer may map. Its place in the table is its number modulo LOCAL_FILES. */
struct local_shared_file {
    uint64_t number; /* 0: none */
    uint64_t file_id;
};

/* A file of the peer's. Its place is found likewise. */
struct local_peer_file {
    uint64_t number;             /* 0: none */
    struct tl_mapped_file *file; /* one reference; NULL: it could not be mapped */
    struct tl_error *refusal;    /* why not; NULL: no memory to tell */
};

struct local_credentials {
    pid_t pid; /* 0: not visible from here */
    uid_t uid;
};

enum local_received {
    LOCAL_RECEIVED_NOTHING,
    LOCAL_RECEIVED_PACKET,
    LOCAL_RECEIVED_WRONG,         /* a packet that cannot be */
    LOCAL_RECEIVED_NO_DESCRIPTOR, /* this process has no place for what was passed, which is lost */
    LOCAL_RECEIVED_END,           /* the other side has closed, or died */
};

/* Why a connection ends when this process has no place for a descriptor that the peer has passed. */
#define LOCAL_NO_DESCRIPTOR "no descriptor for what the peer has passed: Too many open files (ulimit -n)"

struct local_provider;
struct local_pair;

struct local_address;

/* Chooses a token that cannot be guessed. */
void local_choose_token(uint8_t ret_token[LOCAL_TOKEN_BYTES]);
/* Makes the accept socket of the queue pair whose token is in self, and writes its name there. The accept socket
 * belongs to the caller. Errors: TL_UNAVAILABLE: the kernel lacks something. TL_INVALID_ARGUMENT, TL_PERMISSION_DENIED
 * and others: the folder cannot be used. TL_RESOURCE_EXHAUSTED. */
enum tl_status local_accept_socket_open(const struct local_provider *provider, struct local_address *self,
                                        int *ret_accept_socket, struct tl_error *ret_error) TL_MUST_USE;
/* Removes the file of the accept socket, if it is one. */
void local_accept_socket_remove_name(const struct local_address *self);
/* Removes the sockets of processes that have died. */
void local_clean_folder(const char *folder);
/* Sends a HELLO with these descriptors, which stay the caller's, to the peer's accept socket: one with an abstract
 * name, or the file in our own folder whose name is the last part of the peer's. Errors: TL_UNAVAILABLE: there is none,
 * or it takes nothing. */
enum tl_status local_call(const struct local_provider *provider, int accept_socket, const struct local_address *peer,
                          const struct local_hello *hello, const int fds[LOCAL_HELLO_DESCRIPTORS],
                          struct tl_error *ret_error) TL_MUST_USE;
/* Sends a packet with at most 4 descriptors, which stay the caller's. to NULL: to the peer of the socket. Returns false
 * with errno when it cannot be sent now, or not any more. */
bool local_send_to(int socket, const struct sockaddr_un *to, socklen_t to_bytes, const void *packet, size_t len_bytes,
                   const int *fds, size_t fd_count);
/* Sends a packet over a control socket; fd -1: without a descriptor. Returns false as local_send_to does. */
bool local_send(int socket, const void *packet, size_t len_bytes, int fd);
/* Looks at the next packet of an accept socket, which stays there, and at the process that has sent it. */
enum local_received local_look_at(int socket, union local_packet *ret_packet,
                                  struct local_credentials *ret_credentials);
/* Takes the next packet. The descriptors are the caller's; -1: none has come. */
enum local_received local_receive(int socket, union local_packet *ret_packet, int ret_fds[LOCAL_HELLO_DESCRIPTORS]);
/* Makes a control socket: our end and the peer's, which belong to the caller. Errors: TL_RESOURCE_EXHAUSTED.
 * TL_UNAVAILABLE: the kernel lacks something. */
enum tl_status local_control_socket_make(int *ret_own, int *ret_peers, struct tl_error *ret_error) TL_MUST_USE;
/* Whether packets can be sent over this descriptor as over a control socket. */
bool local_is_control_socket(int fd);
/* Returns the number by which the kernel shows all users that are unknown in this container; -1: every user is known.
 */
uid_t local_unknown_uid(void);
/* Errors: TL_PERMISSION_DENIED: the process belongs to another user than this one, or to one unknown here. */
enum tl_status local_check_user(const struct local_provider *provider, uid_t uid,
                                struct tl_error *ret_error) TL_MUST_USE;
/* Returns a descriptor that is readable when the process has ended, for the caller; -1 with errno: there is none. */
int local_process_fd(pid_t pid);

/* --------------------------------------------------------------------------------------------------- addresses -- */

struct local_address {
    uint8_t host_id[TL_HOST_ID_BYTES];
    uint8_t token[LOCAL_TOKEN_BYTES];
    uint32_t name_bytes;
    uint8_t name[sizeof(((struct sockaddr_un *)NULL)->sun_path)]; /* of the accept socket, as in sun_path */
};

void local_address_write(const struct local_address *pair_address, struct tl_pair_address *ret_bytes);
/* The provider's `check`. Errors: TL_INVALID_ARGUMENT: not an address. TL_FAILED_PRECONDITION: it comes from
 * another host. */
enum tl_status local_address_check(const struct tl_provider *provider, const struct tl_pair_address *bytes,
                                   struct tl_error *ret_error) TL_MUST_USE;
/* Returns false when it is not an address. */
bool local_address_read(const struct tl_pair_address *bytes, struct local_address *ret_pair_address);

/* --------------------------------------------------------------------------------------- provider, queue pairs -- */

#define LOCAL_MAX_WAKEUPS 32

struct local_helper;

struct local_provider {
    struct tl_provider base; /* fd: epoll */
    uid_t own_uid;
    uid_t unknown_uid;
    bool is_reading_forbidden;
    uint8_t host_id[TL_HOST_ID_BYTES];
    char *socket_folder; /* NULL: none */
    int done_fd;         /* eventfd: a helper has read what it was to read */
    struct tl_list pairs;
    struct tl_list *cursor; /* the next pair of the poll that runs; NULL: none runs */
    uint32_t pair_count;
    uint64_t last_number; /* of a pair */
    unsigned polls_to_look;
    int64_t next_look_ns;
    bool must_look;       /* the next poll looks at the sockets */
    bool has_slept;       /* since the last look */
    int other_fd;         /* slept on as well; -1: none */
    struct local_wakeup { /* what has ended the sleep */
        uint64_t number;
        uint32_t events;
    } wakeups[LOCAL_MAX_WAKEUPS];
    unsigned wakeup_count;
    bool is_armed;
    uint32_t sleeps;
    struct tl_local_stats stats;

    pthread_mutex_t mutex; /* guards what follows */
    struct tl_list gone;   /* of local_region: destroyed regions that peers may know */
    atomic_bool has_gone;
    int gone_fd; /* eventfd: regions have gone */
    _Atomic uint64_t last_region;
    atomic_uint populaters; /* threads that get pages of regions now */
};

enum local_work_kind { LOCAL_WORK_MESSAGE, LOCAL_WORK_WRITE, LOCAL_WORK_READ };

/* A message or a write that was posted. */
struct local_work {
    struct tl_work *work; /* is told of the end; NULL: none */
    void *message;        /* a copy of the message; NULL once it has left */
    const uint8_t *source;
    uint64_t len_bytes;
    uint64_t done_bytes;
    struct local_place place;
    uint64_t offset_bytes; /* in the place */
    uint32_t immediate;
    uint32_t read_number; /* of LOCAL_WORK_READ: it is done when so many were answered */
    uint8_t kind;         /* enum local_work_kind */
    bool has_immediate;
};

/* What was posted: a ring of its own, whose numbers are modulo 2^32. */
struct local_queue {
    struct local_work *works; /* [mask + 1] */
    uint32_t limit;           /* so many may be posted at a time */
    uint32_t mask;
    uint32_t posted;
    uint32_t carried;      /* have left */
    uint32_t confirmed;    /* have left before the peer's ring was seen open */
    uint32_t completed;    /* have been reported */
    uint64_t queued_bytes; /* of writes that were posted and are not completed */
    uint32_t reads_posted;
    uint32_t reads_answered; /* by the peer */
    int64_t read_began_ns;   /* the last read, of either side */
    int64_t read_until_ns;   /* when that is expected to be over */
};

/* Segments of ours that the peer is told of. */
struct local_attachments {
    struct local_attached *entries; /* [count] */
    size_t count, capacity;
    size_t unsent; /* of them */
    uint32_t next_number;
    uint64_t last_region; /* the region that was found last, and its number */
    uint32_t last_number;
};

/* Segments of the peer's that are mapped here. */
struct local_mappings {
    struct local_mapped *entries; /* [count], by number */
    size_t count, capacity;
    uint32_t next_number;
};

/* Memory outside of segments that the peer may have written. */
struct local_exposures {
    struct local_exposed *entries; /* [count] */
    uint32_t count;
    uint32_t first_free; /* index and 1; 0: none */
};

/* Files that were passed to the peer, and by the peer. */
struct local_files {
    struct local_shared_file *shared; /* [LOCAL_FILES]; NULL: none yet */
    uint64_t last_shared;
    struct local_peer_file *peers; /* [LOCAL_FILES]; NULL: none yet */
    uint64_t last_peers;
};

/* The two rings, and what was seen in them. */
struct local_rings {
    struct local_ring in;  /* ours */
    struct local_ring out; /* the peer's */
    uint32_t out_consumed; /* by the peer, as it has told */
    uint32_t answered;     /* LOCAL_SLOT_READ of the peer's that were carried out */
    uint32_t woken_state;  /* of the peer, in which it was woken last */
    bool has_posted;       /* since the peer's state was looked at */
    bool is_stalled;       /* the peer's ring is full */
};

/* Packets of the two control sockets; wakes are not counted. */
struct local_packets {
    uint32_t sent;
    uint32_t received;
    uint32_t heard_sleeps; /* provider->sleeps when ours was read last */
    bool must_hear;        /* our control socket, or the accept socket, was not read to the end */
};

/* Descriptors; -1: none. */
struct local_sockets {
    int accept;    /* where the peer calls, until it has */
    int in;        /* our end of our control socket: what the peer says */
    int peers_end; /* the other end, until it was passed */
    int out;       /* our end of the peer's control socket; nothing is read from it */
    int process;   /* readable when the peer's process has ended */
    int ring;      /* the memory of our ring, until it was passed */
};

/* By reading the other's number, each side finds out whether it can read the other's memory. */
struct local_proof {
    uint64_t own;
    uint64_t peers;
    uint64_t read; /* what was there */
};

/* The peer's LOCAL_SLOT_READ that is being carried out. */
struct local_slot_read {
    bool is_under_way;
    bool has_immediate;
    bool is_in_file; /* LOCAL_FLAG_FILE */
    uint32_t immediate;
    uint32_t exposure, generation;
    uint64_t source, offset_bytes, len_bytes;
    unsigned parts_left; /* that helpers have not read */
    int error;           /* of a part; 0: none */
};

/*
 *   NEW --connect--> CALLING --the peer's call was taken--> CONNECTED
 *     any but NEW --disconnect, hang-up, rule broken--> ENDING --told broken--> DRAINING --drained--> ENDED
 */
enum local_state {
    LOCAL_NEW,
    LOCAL_CALLING,   /* has called; waits for the peer's call, and then for whether the peer's memory can be read */
    LOCAL_CONNECTED, /* carries messages */
    LOCAL_ENDING,    /* waits for poll to report it as broken */
    LOCAL_DRAINING,  /* waits for the call that still writes to memory of ours */
    LOCAL_ENDED,
};

struct local_pair {
    struct tl_queue_pair base;
    struct local_provider *provider;
    struct tl_list link; /* in provider->pairs */
    uint64_t number;
    struct tl_queue_pair_events events;
    void *owner;
    enum local_state state;
    struct tl_error reason; /* why it ends */
    bool has_connected;
    bool is_distrusted; /* the peer has broken a rule: nothing of it counts any more */
    struct local_address self, peer;
    struct local_credentials credentials; /* of the peer's process */
    struct local_proof proof;
    struct local_sockets sockets;
    struct local_packets packets;
    struct local_rings rings;
    struct local_queue queue;
    struct local_attachments attachments;
    struct local_mappings mappings;
    struct local_exposures exposures;
    struct local_files files;
    struct local_slot_read reading;
    struct local_helper *helper;
    struct local_helper *second; /* reads half of what is large */
};

static inline struct local_provider *local_provider_of(const struct tl_provider *provider)
{
    return (struct local_provider *)(uintptr_t)provider;
}

static inline struct local_pair *local_pair_of(const struct tl_queue_pair *pair)
{
    return (struct local_pair *)(uintptr_t)pair;
}

/* ----------------------------------------------------------------------------------------------------- local.c -- */

/* Has the epoll descriptor report the number of a pair once for what comes. Returns false when there is no memory. */
bool local_watch_socket(struct local_provider *provider, int fd, uint64_t number);
/* Added to the number of a pair for the descriptor of its peer's process. */
#define LOCAL_PROCESS_NUMBER (UINT64_C(1) << 63)
/* Shuts the socket down, and stops watching it. */
void local_forget_socket(struct local_provider *provider, int socket);

/* ------------------------------------------------------------------------------------------- local_handshake.c -- */

/* Calls the peer of the pair. Errors: TL_UNAVAILABLE. */
enum tl_status local_shake_hands(struct local_pair *pair, struct tl_error *ret_error) TL_MUST_USE;
/* Reads the accept socket of a pair that has called. Returns how many packets there were. */
unsigned local_read_accept_socket(struct local_pair *pair);
/* Connects the pair, once a helper has tried to read the peer's memory; error is an errno, 0: it was read. */
void local_proof_was_read(struct local_pair *pair, int error);

/* ------------------------------------------------------------------------------------------------ local_pair.c -- */

enum tl_status local_pair_create(struct tl_provider *provider, const struct tl_queue_pair_options *options,
                                 const struct tl_queue_pair_events *events, void *owner,
                                 struct tl_queue_pair **ret_pair, struct tl_error *ret_error);
void local_pair_get_address(const struct tl_queue_pair *pair, struct tl_pair_address *ret_pair_address);
enum tl_status local_pair_connect(struct tl_queue_pair *pair, const struct tl_pair_address *peer,
                                  struct tl_error *ret_error);
void local_pair_disconnect(struct tl_queue_pair *pair, const struct tl_error *reason);
void local_pair_destroy(struct tl_queue_pair *pair);
/* Ends the pair for this reason, which poll reports. Does nothing when it ends already. */
void local_pair_break(struct local_pair *pair, enum tl_status code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Ends the pair because the peer has broken the protocol. */
void local_pair_violation(struct local_pair *pair, const char *what);
/* Takes what has come over the control socket, and notices the end of the peer. Returns how many packets there were. */
unsigned local_pair_hear(struct local_pair *pair);
/* Whether one of its helpers reads. */
bool local_pair_is_reading(const struct local_pair *pair);
/* Looks whether its helpers have read what they were to read; returns how many have. */
unsigned local_pair_ask_helpers(struct local_pair *pair);
/* Tells that it has ended, and drains it. */
void local_pair_end(struct local_pair *pair);
/* Tells that it is drained, once no call writes to memory of ours any more; the owner may destroy it then. Returns 1
 * when it has, or 0. */
unsigned local_pair_drain(struct local_pair *pair);

/* ------------------------------------------------------------------------------------------------ local_send.c -- */

uint32_t local_space(const struct tl_queue_pair *pair);
void local_message(struct tl_queue_pair *pair, const void *data, uint32_t len_bytes, struct tl_work *work);
void local_write(struct tl_queue_pair *pair, const struct tl_region *region, const void *source, uint64_t len_bytes,
                 const struct tl_descriptor *destination, uint64_t offset_bytes, bool has_immediate, uint32_t immediate,
                 struct tl_work *work);
void local_ring(struct tl_queue_pair *pair);
/* Carries out what was posted, as much as one poll may. Returns how many things have happened. */
unsigned local_carry(struct local_pair *pair);
/* Calls `done` of what is over. Returns how many works were. */
unsigned local_complete(struct local_pair *pair);
/* Calls `done` of all other works with TL_CANCELLED. */
void local_cancel_works(struct local_pair *pair);
/* Memory of at least that size is read by two helpers. */
#define LOCAL_MIN_SPLIT_BYTES (UINT64_C(1) << 20)
/* Notes that a helper, ours or the peer's, begins to read so many bytes. */
void local_expect_read(struct local_pair *pair, uint64_t len_bytes);
/* Wakes the peer if it sleeps, after something was written for it. */
void local_look_at_peer(struct local_pair *pair, bool is_posted);
/* Sends a packet other than HELLO and WAKE, and counts it in the ring, so that the peer knows that there is something
 * to read. Returns false when it cannot be sent now, or not any more. */
bool local_send_counted(struct local_pair *pair, const void *packet, size_t len_bytes, int fd);

/* ---------------------------------------------------------------------------------------------- local_expose.c -- */

enum tl_status local_expose(struct tl_queue_pair *pair, struct tl_region *region, void *address, uint64_t len_bytes,
                            struct tl_exposure *exposure, struct tl_error *ret_error);
void local_revoke(struct tl_queue_pair *pair, struct tl_exposure *exposure, struct tl_work *work);
/* Returns where the read goes; NULL: to memory that is not exposed. */
uint8_t *local_exposures_find(const struct local_exposures *exposures, const struct local_slot_read *reading);
/* Passes the segments that the peer has not been told of. */
void local_attach_segments(struct local_pair *pair);
/* Tells the peer that a region of ours is gone. */
void local_forget_region(struct local_pair *pair, uint64_t region_number);

/* --------------------------------------------------------------------------------------------- local_receive.c -- */

/* Hands over at most so many slots that the peer has posted. Returns how many events there were. */
unsigned local_take_slots(struct local_pair *pair, unsigned most);
/* Maps a segment that the peer has passed; fd stays the caller's. Errors: TL_INVALID_ARGUMENT: not a segment that may
 * come now. TL_RESOURCE_EXHAUSTED. */
enum tl_status local_mappings_add(struct local_mappings *mappings, const struct local_segment_packet *packet, int fd,
                                  struct tl_error *ret_error) TL_MUST_USE;
/* Returns NULL when there is no such segment. */
struct local_mapped *local_mappings_find(struct local_mappings *mappings, uint32_t number);
/* Takes the record out; the caller has its memory unmapped. */
void local_mappings_remove(struct local_mappings *mappings, struct local_mapped *mapped);
/* Thread: any. */
void local_unmap(struct local_mapped *mapped);
/* Whether the peer's process still runs and has not closed. */
bool local_peer_lives(const struct local_pair *pair);
/* A helper has read its part of what the peer has asked for; error is an errno, 0: none. */
void local_part_is_read(struct local_pair *pair, int error);

/* ----------------------------------------------------------------------------------------------- local_files.c -- */

enum tl_status local_share(struct tl_queue_pair *pair, struct tl_mapped_file *file,
                           struct tl_descriptor *ret_descriptor, struct tl_error *ret_error);
enum tl_status local_map(struct tl_queue_pair *pair, const struct tl_descriptor *descriptor,
                         struct tl_mapped_file **ret_file, struct tl_error *ret_error);
/* Maps a file that the peer has passed, and remembers it in place of the one that has come LOCAL_FILES before; fd is
 * taken over. */
void local_file_came(struct local_pair *pair, const struct local_file_packet *packet, int fd);
/* Puts the reference to the file. Thread: any. */
void local_file_free(struct local_peer_file *file);

#endif
