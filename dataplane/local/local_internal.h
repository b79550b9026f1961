// SPDX-License-Identifier: Apache-2.0
/*
 * The local provider as its files see it: local.c (open, poll, sleep), local_socket.c (sockets, descriptors, who may),
 * local_segment.c (shared memory), local_handshake.c (how two get connected), local_pair.c (life and posting),
 * local_send.c (what was posted leaves), local_receive.c (what the peer has posted), local_files.c (files that the peer
 * may map), local_helper.c (threads that read peers' memory and drop what is left).
 *
 * Everything in a ring may be changed by the peer at any time: it is read once, and only what was read is believed, as
 * far as our own records allow it.
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

/* Bits of ring_head.state; above them a number that changes with every sleep. */
#define LOCAL_STATE_SLEEPING 1u
#define LOCAL_STATE_STALLED 2u /* while sleeping: it waits for room in the other one's ring */
#define LOCAL_STATE_CLOSED 4u  /* it looks at nothing more, and what it lets the peer read is not valid any more */
#define LOCAL_STATE_SLEEPS 8u  /* the first bit of the number */

/* In front of the slots of a ring, which belongs to its reader: the writer is the peer. */
struct local_ring_head {
    /* Written by the reader. */
    _Alignas(LOCAL_CACHE_LINE_BYTES) _Atomic uint32_t state;
    _Alignas(LOCAL_CACHE_LINE_BYTES) _Atomic uint32_t consumed; /* slots, now and then */
    /* Written by the writer: how many of the reader's LOCAL_SLOT_READ it has carried out. */
    _Alignas(LOCAL_CACHE_LINE_BYTES) _Atomic uint32_t answered;
    /* ... and how many packets it has sent that are more than a wake. */
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
    /* The slot's number since the beginning, and 1: modulo 2^32. Anything else: the slot is not filled yet. */
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

/* Whether a ring can have so many slots. */
bool local_ring_is_count(uint32_t slot_count);
uint64_t local_ring_bytes(uint32_t slot_count);
void local_ring_place(struct local_ring *ring, void *address, uint32_t slot_count);
void local_ring_unmap(struct local_ring *ring);

/* ---------------------------------------------------------------------------------------------------- segments -- */

struct local_region {
    struct tl_region base;
    bool is_segment;     /* else memory of somebody else's */
    int fd;              /* of the segment, the reactor's; -1: none, or the peer has it, which is enough */
    uint64_t number;     /* of the provider */
    struct tl_list link; /* in provider->gone */
    bool has_populater;  /* a thread that gets the pages of a large segment */
    pthread_t populater;
    atomic_bool must_stop; /* the populater */
};

/* A segment of ours that the peer has been told of. */
struct local_attached {
    struct local_region *region;
    uint32_t number; /* for this pair */
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
/* Of one peer, mapped at a time; and regions of a pool, which leave some for what lies outside of it. */
#define LOCAL_MAX_SEGMENTS 1024
#define LOCAL_MAX_POOL_REGIONS (LOCAL_MAX_SEGMENTS - 16)

/* Where a peer may write, as it travels. */
enum local_place_kind { LOCAL_PLACE_SEGMENT = 1, LOCAL_PLACE_OUTSIDE = 2 };
struct local_place {
    uint32_t kind;
    uint32_t number;     /* of the segment or the exposure */
    uint32_t generation; /* of the exposure */
    uint32_t reserved;
    uint64_t offset_bytes; /* in the segment */
    uint64_t len_bytes;
};

/* Memory outside of segments that the peer may have written, by us. */
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

/* Errors: TL_RESOURCE_EXHAUSTED. */
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

/* Everything that passes over a socket, one packet each: HELLO into an accept socket, the others over the control
 * socket. */
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

/* The filter of an accept socket looks for `to` where it is here. */
struct local_hello {
    uint32_t kind;
    uint32_t protocol;
    uint8_t from[LOCAL_TOKEN_BYTES]; /* of the sender's queue pair */
    uint8_t to[LOCAL_TOKEN_BYTES];
    uint32_t slot_count; /* of the ring */
    uint32_t reserved;
    uint64_t proof_address; /* where the sender has `proof`: whoever can read it there can read its memory */
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
    uint64_t number; /* of the sender's, from 1, each greater than the one before */
    uint64_t size_bytes;
    int64_t modified_seconds; /* as the sender has found it */
};

union local_packet {
    uint32_t kind;
    struct local_hello hello;
    struct local_segment_packet segment;
    struct local_file_packet file;
};

/* Of each side: more are forgotten, the oldest first. */
#define LOCAL_FILES 64

/* A file of ours that the peer may map, in the place that its number has modulo LOCAL_FILES. */
struct local_shared_file {
    uint64_t number; /* 0: none */
    uint64_t file_id;
};

/* A file of the peer's, likewise. */
struct local_peer_file {
    uint64_t number;             /* 0: none */
    struct tl_mapped_file *file; /* one reference; NULL: it could not be mapped */
    struct tl_error *refusal;    /* why not; NULL: no memory to tell */
};

struct local_credentials {
    pid_t pid; /* 0: not to be seen from here */
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

/* One that nobody can guess. */
void local_choose_token(uint8_t ret_token[LOCAL_TOKEN_BYTES]);
/* Makes the accept socket of the queue pair with the token in self, and puts the name in there. The accept socket is
 * the caller's. Errors: TL_UNAVAILABLE: the kernel lacks something; TL_INVALID_ARGUMENT, TL_PERMISSION_DENIED and
 * others: the folder; TL_RESOURCE_EXHAUSTED. */
enum tl_status local_accept_socket_open(const struct local_provider *provider, struct local_address *self,
                                        int *ret_accept_socket, struct tl_error *ret_error) TL_MUST_USE;
/* Nobody needs to find it any more. */
void local_accept_socket_remove_name(const struct local_address *self);
/* Removes what processes that have died have left in the folder. */
void local_clean_folder(const char *folder);
/* Puts a HELLO with these descriptors, which stay the caller's, into the peer's accept socket: one with an abstract
 * name, or the file in our own folder that is called as the last part of the name. Errors: TL_UNAVAILABLE: there is
 * none, or it takes nothing. */
enum tl_status local_call(const struct local_provider *provider, int accept_socket, const struct local_address *peer,
                          const struct local_hello *hello, const int fds[LOCAL_HELLO_DESCRIPTORS],
                          struct tl_error *ret_error) TL_MUST_USE;
/* At most 4 descriptors, which stay the caller's; to NULL: where the socket is connected to. False: not now, or never
 * any more, errno tells why. */
bool local_send_to(int socket, const struct sockaddr_un *to, socklen_t to_bytes, const void *packet, size_t len_bytes,
                   const int *fds, size_t fd_count);
/* fd -1: none goes with it. False: not now, or never any more. */
bool local_send(int socket, const void *packet, size_t len_bytes, int fd);
/* Looks at the next packet of an accept socket, which stays there, and at the process that has sent it. */
enum local_received local_look_at(int socket, union local_packet *ret_packet,
                                  struct local_credentials *ret_credentials);
/* Takes the next packet. The descriptors are the caller's; -1: none has come. */
enum local_received local_receive(int socket, union local_packet *ret_packet, int ret_fds[LOCAL_HELLO_DESCRIPTORS]);
/* A control socket: our end, on which it is told who has sent what, and the peer's.
 * Errors: TL_RESOURCE_EXHAUSTED; TL_UNAVAILABLE: the kernel lacks something. */
enum tl_status local_control_socket_make(int *ret_own, int *ret_peers, struct tl_error *ret_error) TL_MUST_USE;
/* Whether this is a socket over which packets can be sent as over a control socket. */
bool local_is_control_socket(int fd);
/* The number as which the kernel shows all users who have none here, in a container with users of its own; -1:
 * everybody has one. */
uid_t local_unknown_uid(void);
/* Errors: TL_PERMISSION_DENIED: the process belongs to another user than this one, or to one unknown here. */
enum tl_status local_check_user(const struct local_provider *provider, uid_t uid,
                                struct tl_error *ret_error) TL_MUST_USE;
/* Readable when the process has ended; -1: there is none to be had, errno tells why. */
int local_process_fd(pid_t pid);

/* --------------------------------------------------------------------------------------------------- addresses -- */

struct local_address {
    uint8_t host_id[TL_HOST_ID_BYTES];
    uint8_t token[LOCAL_TOKEN_BYTES];
    uint32_t name_bytes;
    uint8_t name[sizeof(((struct sockaddr_un *)NULL)->sun_path)]; /* of the socket; as in sun_path */
};

void local_address_write(const struct local_address *pair_address, struct tl_pair_address *ret_bytes);
/* The provider's `check`. Errors: TL_INVALID_ARGUMENT: not an address. TL_FAILED_PRECONDITION: it comes from
 * another host. */
enum tl_status local_address_check(const struct tl_provider *provider, const struct tl_pair_address *bytes,
                                   struct tl_error *ret_error) TL_MUST_USE;
/* False: not an address. */
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
    int done_fd;         /* eventfd: a helper thread has done its job */
    struct tl_list pairs;
    struct tl_list *cursor; /* of the poll: the next one in pairs; NULL: no poll */
    uint32_t pair_count;
    uint64_t last_number; /* of pairs */
    unsigned polls_to_look;
    int64_t next_look_ns;
    bool must_look;       /* at the sockets, in the next poll */
    bool has_slept;       /* since it has looked */
    int other_fd;         /* slept on as well; -1: none */
    struct local_wakeup { /* what ended the sleep */
        uint64_t number;
        uint32_t events;
    } wakeups[LOCAL_MAX_WAKEUPS];
    unsigned wakeup_count;
    bool is_armed;
    uint32_t sleeps;
    struct tl_local_stats stats;

    pthread_mutex_t mutex; /* of what follows */
    struct tl_list gone;   /* of local_region: destroyed, of which peers may have to be told */
    atomic_bool has_gone;
    int gone_fd; /* eventfd: who sleeps is told of them, too */
    _Atomic uint64_t last_region;
    atomic_uint populaters; /* now: threads that get the pages of regions */
};

enum local_work_kind { LOCAL_WORK_MESSAGE, LOCAL_WORK_WRITE, LOCAL_WORK_READ };

/* Something posted. */
struct local_work {
    struct tl_work *work; /* NULL: nobody waits */
    void *message;        /* a copy */
    const uint8_t *source;
    uint64_t len_bytes;
    uint64_t done_bytes;
    struct local_place place;
    uint64_t offset_bytes;
    uint32_t immediate;
    uint32_t read_number; /* of LOCAL_WORK_READ: it is done when so many were answered */
    uint8_t kind;         /* enum local_work_kind */
    bool has_immediate;
};

/*
 *   NEW --connect--> CALLING --the peer's call was taken--> CONNECTED
 *     any but NEW --disconnect, hang-up, rule broken--> ENDING --told broken--> DRAINING --drained--> ENDED
 */
enum local_state {
    LOCAL_NEW,
    LOCAL_CALLING,   /* has called; waits for the peer's call, and then for whether the peer's memory can be read */
    LOCAL_CONNECTED, /* carries messages */
    LOCAL_ENDING,    /* waits for poll to tell */
    LOCAL_DRAINING,  /* waits for the call that still writes to memory of ours */
    LOCAL_ENDED,
};

struct local_pair {
    struct tl_queue_pair base;
    struct local_provider *provider;
    struct tl_list link;
    uint64_t number;
    struct tl_queue_pair_events events;
    void *owner;
    enum local_state state;
    struct tl_error reason; /* why it ends */
    bool has_connected;     /* rings were exchanged */
    bool is_distrusted;     /* the peer has broken a rule: nothing of it counts any more */
    struct local_address self, peer;
    uint64_t proof;
    struct local_credentials credentials; /* of the peer's process */
    uint64_t read_proof;                  /* what was read from the peer's proof_address */
    uint64_t peers_proof;                 /* what should be there */
    int accept_socket;                    /* where the peer calls; -1: it has */
    int in_socket;                        /* our end of our control socket: what the peer says */
    int peers_end;                        /* the other one, until it was passed */
    int out_socket;                       /* of the peer's control socket: nothing is read from it. -1: not connected */
    int process_fd;
    struct local_helper *helper;
    struct local_helper *second; /* reads half of what is large */

    struct local_ring in;      /* ours */
    int in_fd;                 /* until it was sent */
    struct local_ring out;     /* the peer's */
    uint32_t in_reported;      /* consumed, as told */
    uint32_t out_consumed;     /* by the peer, as it has told */
    uint32_t woken_state;      /* of the peer, in which it was woken last */
    bool has_posted;           /* since the peer's state was looked at */
    bool is_stalled;           /* there is no room in the peer's ring */
    bool must_hear;            /* our control socket, or the accept socket, was not read to the end */
    uint32_t heard_sleeps;     /* provider->sleeps when our control socket was read last */
    uint32_t packets_received; /* packets, but for wakes */
    uint32_t packets_sent;

    /* What was posted: a ring of its own, numbers modulo 2^32. */
    struct local_work *works; /* [work_capacity] */
    uint32_t work_count;      /* the limit */
    uint32_t work_mask;
    uint32_t posted, carried, confirmed, completed; /* confirmed: the peer looked at its ring after that */
    uint64_t queued_bytes;                          /* of writes that were posted and are not completed */
    uint32_t reads_posted;
    uint32_t reads_answered; /* by the peer */
    int64_t read_began_ns;   /* the last one, of either side */
    int64_t read_until_ns;   /* ... and until when it is expected to be over */

    struct local_attached *attached; /* [attached_count] */
    size_t attached_count, attached_capacity;
    size_t attached_unsent;
    uint32_t next_attached;
    uint64_t last_attached_region; /* the one that was found last, and its number */
    uint32_t last_attached_number;
    struct local_mapped *mapped; /* [mapped_count], by number */
    size_t mapped_count, mapped_capacity;
    uint32_t next_mapped;
    struct local_exposed *exposed; /* [exposed_count] */
    uint32_t exposed_count;
    uint32_t free_exposed; /* index and 1; 0: none */

    /* The peer's LOCAL_SLOT_READ that is being carried out; answered when it is over. */
    struct local_slot_read {
        bool is_under_way;
        bool has_immediate;
        bool is_in_file; /* LOCAL_FLAG_FILE */
        uint32_t immediate;
        uint32_t exposure, generation;
        uint64_t source, offset_bytes, len_bytes;
        unsigned parts_left; /* that helper threads have not read */
        int error;           /* of one of them; 0: none */
    } reading;
    uint32_t answered;

    struct local_shared_file *shared_files; /* [LOCAL_FILES]; NULL: none */
    uint64_t last_shared_file;
    struct local_peer_file *peer_files; /* [LOCAL_FILES]; NULL: none */
    uint64_t last_peer_file;
    uint32_t awaited_slot; /* of ours and the peer's ring: the last one for which our control socket was looked at */
    uint32_t awaited_work;
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

/* What comes is told once, with the number of a pair. False: no memory. */
bool local_watch_socket(struct local_provider *provider, int fd, uint64_t number);
/* Added to the number of a pair: it is the peer's process that has ended. */
#define LOCAL_PROCESS_NUMBER (UINT64_C(1) << 63)
/* Nothing more comes or goes over this socket, and nothing is told of it any more. */
void local_forget_socket(struct local_provider *provider, int socket);

/* ------------------------------------------------------------------------------------------- local_handshake.c -- */

/* Calls the peer that the pair was told of. Errors: TL_UNAVAILABLE. */
enum tl_status local_shake_hands(struct local_pair *pair, struct tl_error *ret_error) TL_MUST_USE;
/* Something may be in the accept socket of a pair that has called. Returns how much there was. */
unsigned local_read_accept_socket(struct local_pair *pair);
/* The peer's memory was tried to be read; error is an errno, 0 when it was. The pair is connected then. */
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
/* It ends, for this reason; poll tells. Harmless when it ends already. */
void local_pair_break(struct local_pair *pair, enum tl_status code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The peer has done what may not be. */
void local_pair_violation(struct local_pair *pair, const char *what);
/* Something has come over its socket, or the peer has gone. Returns how much there was. */
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
enum tl_status local_expose(struct tl_queue_pair *pair, struct tl_region *region, void *address, uint64_t len_bytes,
                            struct tl_exposure *exposure, struct tl_error *ret_error);
void local_revoke(struct tl_queue_pair *pair, struct tl_exposure *exposure, struct tl_work *work);
void local_ring(struct tl_queue_pair *pair);
/* Carries out what was posted, as much as one poll may; returns how much happened. */
unsigned local_carry(struct local_pair *pair);
/* Calls `done` of what is over; returns how many. */
unsigned local_complete(struct local_pair *pair);
/* Calls `done` of everything else with TL_CANCELLED. */
void local_cancel_works(struct local_pair *pair);
/* Memory of at least that size is read by two helper threads. */
#define LOCAL_MIN_SPLIT_BYTES (UINT64_C(1) << 20)
/* Memory of so many bytes is read from now on, by a helper thread of ours or of the peer's. */
void local_expect_read(struct local_pair *pair, uint64_t len_bytes);
/* Wakes the peer if it sleeps, after something was written for it. */
void local_look_at_peer(struct local_pair *pair, bool is_posted);
/* Sends a packet that is more than a wake, once connected; everything but HELLO and WAKE goes this way, so that the
 * peer knows that there is something to read. False: not now, or never any more. */
bool local_send_counted(struct local_pair *pair, const void *packet, size_t len_bytes, int fd);
/* Tells the peer of segments that it has not been told of. */
void local_attach_segments(struct local_pair *pair);
/* A region of ours is gone. */
void local_forget_region(struct local_pair *pair, uint64_t region_number);

/* --------------------------------------------------------------------------------------------- local_receive.c -- */

/* Hands over what the peer has posted, at most a batch of it; returns how many events there were. */
unsigned local_take_slots(struct local_pair *pair, unsigned most);
/* Maps a segment that the peer has passed; fd stays the caller's. Errors: TL_INVALID_ARGUMENT: not a segment that may
 * come now. TL_RESOURCE_EXHAUSTED. */
enum tl_status local_attach(struct local_pair *pair, const struct local_segment_packet *packet, int fd,
                            struct tl_error *ret_error) TL_MUST_USE;
/* NULL: there is no such segment. */
struct local_mapped *local_find_attached(struct local_pair *pair, uint32_t number);
/* Takes the record of the segment out; its memory is somebody else's to unmap. */
void local_detach(struct local_pair *pair, struct local_mapped *mapped);
/* Thread: any. */
void local_unmap(struct local_mapped *mapped);
/* Whether the process at the other end still runs and has not closed. */
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
/* What is mapped outlives it. Thread: any. */
void local_file_free(struct local_peer_file *file);

#endif
