// SPDX-License-Identifier: Apache-2.0
/*
 * The local provider as its files see it: local.c (open, poll, sleep), local_socket.c (sockets, addresses, users),
 * local_region.c (regions, rings), local_handshake.c (how two pairs are connected), local_pair.c (life of a pair),
 * local_send.c (executing what was posted), local_expose.c (memory that the peer may have written), local_receive.c
 * (what the peer has posted), local_files.c (files that the peer may map), local_memory.c (memory of devices that it
 * may import), local_drop.c (unmaps memory and closes sockets in a thread). Helper threads (memory_reader.h) read the
 * peer's memory; "reader" is the side that reads a ring.
 *
 * The peer can change everything in a ring at any time. So each word is read once, and what was read is compared with
 * our own records.
 */
#ifndef DATAPLANE_LOCAL_LOCAL_INTERNAL_H
#define DATAPLANE_LOCAL_LOCAL_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/host_id.h"
#include "base/list.h"
#include "base/unix_socket.h"
#include "dataplane/local/local.h"
#include "dataplane/memory/memory_reader.h"
#include "tensor/device.h"

/* ------------------------------------------------------------------------------------------------------- rings -- */

#define LOCAL_CACHE_LINE_BYTES 64

/* Bits of ring_head.state. Above them is a number that changes with every sleep. */
#define LOCAL_STATE_SLEEPING 1u
#define LOCAL_STATE_STALLED 2u /* the sleeping reader waits for a free slot in the other ring */
#define LOCAL_STATE_CLOSED 4u  /* the reader takes nothing more, and its memory must not be read any more */
#define LOCAL_STATE_SLEEPS 8u  /* the lowest bit of the number */

/* The words in front of the slots of a ring. The ring belongs to its reader; the peer is the writer. */
struct local_ring_head {
    /* The reader writes these three. */
    _Alignas(LOCAL_CACHE_LINE_BYTES) _Atomic uint32_t state;
    _Atomic uint32_t processor; /* the number of the one that it runs on, plus 1; 0: it does not say */
    _Alignas(
        LOCAL_CACHE_LINE_BYTES) _Atomic uint32_t consumed; /* slots taken; updated now and then, and before a sleep */
    /* The writer writes these two. First: how many LOCAL_SLOT_READ of the reader it has executed. */
    _Alignas(LOCAL_CACHE_LINE_BYTES) _Atomic uint32_t answered;
    /* Second: how many packets it has sent. */
    _Atomic uint32_t packets;
};

enum local_slot_kind {
    LOCAL_SLOT_MESSAGE = 1,
    LOCAL_SLOT_IMMEDIATE = 2, /* the writer has completed a write */
    LOCAL_SLOT_READ = 3,      /* asks the reader to copy bytes from the writer's memory */
};

#define LOCAL_FLAG_IMMEDIATE 1u
#define LOCAL_FLAG_MAY_WAIT 2u /* pages of the memory to read may have to come from a file first */

struct local_slot {
    /* The slot's number since the ring was made, plus 1, modulo 2^32. With any other value the slot is not filled
     * yet. */
    _Alignas(LOCAL_CACHE_LINE_BYTES) _Atomic uint32_t sequence;
    uint16_t kind;
    uint16_t flags;
    uint32_t immediate;
    uint32_t message_bytes;
    union {
        uint8_t message[TL_SLOT_BYTES];
        struct {
            uint64_t len_bytes;
            uint64_t source;       /* address in the writer's memory */
            uint64_t offset_bytes; /* offset in the exposed memory */
            uint32_t exposure;
            uint32_t generation;
        };
    };
};

struct local_ring {
    struct local_ring_head *head; /* NULL: the ring is not mapped */
    struct local_slot *slots;     /* [slot_count] */
    uint32_t slot_count;          /* a power of two */
    uint64_t len_bytes;           /* size of the mapping */
    uint32_t next;                /* number of the slot that is read or written next */
};

#define LOCAL_MIN_RING_SLOTS 16
#define LOCAL_MAX_RING_SLOTS 65536

static inline struct local_slot *local_ring_slot(const struct local_ring *ring, uint32_t number)
{
    return &ring->slots[number & (ring->slot_count - 1)];
}

/* Returns whether a ring may have this number of slots. */
bool local_ring_is_count(uint32_t slot_count);
uint64_t local_ring_bytes(uint32_t slot_count);
void local_ring_place(struct local_ring *ring, void *address, uint32_t slot_count);
void local_ring_unmap(struct local_ring *ring);

/* ---------------------------------------------------------------------------------------------------- segments -- */

struct local_region {
    struct tl_region base;
    bool is_segment;         /* false: the provider has not made this memory */
    int fd;                  /* the segment's descriptor, used by the reactor; -1: none, or it was passed to the peer */
    struct local_pair *pair; /* the pair whose peer the segment serves; NULL: none yet */
    uint32_t number;         /* number of the segment, unique in the pair */
    struct tl_list in_pair;  /* entry in pair->attachments */
    struct tl_list link;     /* entry in provider->gone */
    bool has_populater;      /* a thread gets the pages of this large segment */
    pthread_t populater;
    atomic_bool must_stop; /* tells the populater to end */
};

/* A segment of the peer that is mapped here. */
struct local_peer_segment {
    uint32_t number;
    uint8_t *address;
    uint64_t len_bytes;
    uint8_t *populated_chunks; /* one bit for each TL_SEGMENT_CHUNK_BYTES whose pages are there; NULL: pages come when
                                  they are touched */
};

/* How many segments of one peer can be mapped at a time. A pool has fewer regions, so that other memory can be mapped
 * too. */
#define LOCAL_MAX_SEGMENTS 1024
#define LOCAL_MAX_POOL_REGIONS (LOCAL_MAX_SEGMENTS - 16)

/* Where a peer may write: the content of a descriptor. Unshared memory lies in no segment. */
enum local_place_kind { LOCAL_PLACE_SEGMENT = 1, LOCAL_PLACE_UNSHARED = 2 };
struct local_descriptor {
    uint32_t kind;
    uint32_t number;     /* number of the segment or index of the exposure */
    uint32_t generation; /* generation of the exposure */
    uint32_t reserved;
    uint64_t offset_bytes; /* offset in the segment */
    uint64_t len_bytes;
};

/* Unshared memory that the peer may have us fill, by reading the peer's memory. */
struct local_exposed {
    uint8_t *address; /* NULL: the entry is free */
    uint64_t len_bytes;
    uint32_t generation;
    uint32_t next_free; /* index of the next free entry plus 1; 0: there is none */
};

enum tl_status local_region_create(struct tl_provider *provider, void *address, uint64_t len_bytes,
                                   enum tl_region_access access, struct tl_region **ret_region,
                                   struct tl_error *ret_error);
enum tl_status local_region_map(struct tl_provider *provider, uint64_t len_bytes, struct tl_region **ret_region,
                                struct tl_error *ret_error);
void local_region_destroy(struct tl_region *region);

/* ----------------------------------------------------------------------------------------------------- sockets -- */

/* The kinds of packets. HELLO is sent to an accept socket, the others over a control socket. */
enum local_packet_kind {
    LOCAL_PACKET_HELLO = 1,  /* carries an end of the sender's control socket, its ring, and its eventfd */
    LOCAL_PACKET_ATTACH = 2, /* carries the descriptor of a segment */
    LOCAL_PACKET_DETACH = 3,
    LOCAL_PACKET_FILE = 4,   /* carries the descriptor of a file */
    LOCAL_PACKET_MEMORY = 5, /* carries the descriptor of memory of a device */
    LOCAL_PACKET_FORGET = 6, /* that memory is given back */
};

#define LOCAL_TOKEN_BYTES 16
#define LOCAL_PROTOCOL UINT32_C(0x354c4c54)
#define LOCAL_HELLO_DESCRIPTORS 3

/* The filter of an accept socket relies on the offset of `to`. */
struct local_hello {
    uint32_t kind;
    uint32_t protocol;
    uint8_t from[LOCAL_TOKEN_BYTES]; /* token of the sender's queue pair */
    uint8_t to[LOCAL_TOKEN_BYTES];
    uint32_t slot_count; /* slots of the passed ring */
    uint32_t reserved;
    uint64_t proof_address; /* address of `proof` in the sender's memory: a process that can read it there can read that
                               memory */
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
    uint64_t number; /* chosen by the sender: at least 1, and greater than the number before */
    uint64_t size_bytes;
    int64_t modified_seconds; /* time of the last change when the sender opened the file */
};

struct local_memory_packet {
    uint32_t kind;
    uint32_t reserved;
    uint64_t number; /* MEMORY: chosen by the sender: at least 1, and greater than the number before */
    uint64_t len_bytes;
};

union local_packet {
    uint32_t kind;
    struct local_hello hello;
    struct local_segment_packet segment;
    struct local_file_packet file;
    struct local_memory_packet memory;
};

/* How many files each side remembers; the oldest is forgotten first. */
#define LOCAL_FILES 64

/* A file of ours that the peer may map. Its index in the table is its number modulo LOCAL_FILES. */
struct local_shared_file {
    uint64_t number; /* 0: none */
    uint64_t file_id;
};

/* A file of the peer that we may map. Its index in the table is its number modulo LOCAL_FILES too. */
struct local_peer_file {
    uint64_t number;                /* 0: none */
    struct tl_mapped_file *file;    /* holds one reference; NULL: the file could not be mapped */
    const struct tl_error *refusal; /* why the file could not be mapped */
};

/* How many allocations of devices each side remembers; the oldest is forgotten first. */
#define LOCAL_MEMORIES 64

/* Memory of ours that the peer may import. Its index in the table is its number modulo LOCAL_MEMORIES. */
struct local_shown_memory {
    struct tl_device_watch watch;
    struct local_pair *pair;
    uint64_t number;
    uint64_t memory_number; /* names the allocation, in this process */
    struct tl_list link;    /* in provider->freed or pair->memories.untold, once the allocation is given back */
};

/* The content of its descriptor. */
struct local_memory_descriptor {
    uint64_t number;
    uint64_t offset_bytes;
};

/* Memory of the peer that we may import; the index as above. */
struct local_peer_memory {
    uint64_t number; /* 0: none */
    uint64_t len_bytes;
    int fd;
};

/* The reason why a connection ends when this process has no free descriptor for what the peer has passed. */
#define LOCAL_NO_DESCRIPTOR "no descriptor for what the peer has passed: Too many open files (ulimit -n)"

struct local_provider;
struct local_pair;
struct local_address;

/* Chooses a token that cannot be guessed. */
void local_choose_token(uint8_t ret_token[LOCAL_TOKEN_BYTES]);
/* Makes the accept socket of the queue pair whose token is in self, and writes its name into self. The accept socket
 * belongs to the caller. Errors: TL_UNAVAILABLE: the kernel lacks a feature. TL_INVALID_ARGUMENT, TL_PERMISSION_DENIED
 * and others: the folder cannot be used. TL_RESOURCE_EXHAUSTED. */
enum tl_status local_accept_socket_open(const struct local_provider *provider, struct local_address *self,
                                        int *ret_accept_socket, struct tl_error *ret_error) TL_MUST_USE;
/* Removes the file of the accept socket, if it has one. */
void local_accept_socket_remove_name(const struct local_address *self);
/* Removes the files in the folder that dead processes have left. */
void local_clean_folder(const char *folder);
/* Sends a HELLO with these descriptors, which stay the caller's, to the peer's accept socket. That socket has an
 * abstract name, or is the file in our own folder that has the last part of the peer's path as its name. Errors:
 * TL_UNAVAILABLE: there is no such socket, or it takes nothing. */
enum tl_status local_call(const struct local_provider *provider, int accept_socket, const struct local_address *peer,
                          const struct local_hello *hello, const int fds[LOCAL_HELLO_DESCRIPTORS],
                          struct tl_error *ret_error) TL_MUST_USE;
/* Sends a packet over a control socket; fd -1: without a descriptor. Returns false as tl_unix_socket_send does. */
bool local_send(int socket, const void *packet, size_t len_bytes, int fd);
/* Reads the next packet of an accept socket without taking it out, and which process has sent it. */
enum tl_unix_received local_peek_packet(int socket, union local_packet *ret_packet, struct ucred *ret_sender);
/* Takes the next packet. The descriptors belong to the caller; -1: none has come. */
enum tl_unix_received local_receive(int socket, union local_packet *ret_packet, int ret_fds[LOCAL_HELLO_DESCRIPTORS]);
/* Makes a control socket: our end and the peer's, which both belong to the caller. Errors: TL_RESOURCE_EXHAUSTED.
 * TL_UNAVAILABLE: the kernel lacks a feature. */
enum tl_status local_control_socket_make(int *ret_own, int *ret_peers, struct tl_error *ret_error) TL_MUST_USE;
/* Returns whether the descriptor is an eventfd that does not block. A write to anything else could wait, or raise a
 * signal. */
bool local_is_eventfd(int fd);
/* Checks the user of a peer's process. Errors: TL_PERMISSION_DENIED: it is another user than this process's, or one
 * that is unknown in this container. */
enum tl_status local_check_user(const struct local_provider *provider, uid_t uid,
                                struct tl_error *ret_error) TL_MUST_USE;

/* --------------------------------------------------------------------------------------------------- addresses -- */

/* As it travels, but for what lies behind the name. */
struct local_address {
    uint8_t format[4]; /* set by local_address_write */
    uint8_t host_id[TL_HOST_ID_BYTES];
    uint8_t token[LOCAL_TOKEN_BYTES];
    uint8_t name_bytes;
    uint8_t name[sizeof(((struct sockaddr_un *)NULL)->sun_path)]; /* name of the accept socket, as in sun_path */
};

void local_address_write(const struct local_address *pair_address, struct tl_pair_address *ret_bytes);
/* Implements the provider's `check`. Errors: TL_INVALID_ARGUMENT: the bytes are not an address. TL_FAILED_PRECONDITION:
 * the address comes from another host. */
enum tl_status local_address_check(const struct tl_provider *provider, const struct tl_pair_address *bytes,
                                   struct tl_error *ret_error) TL_MUST_USE;
/* Returns false when the bytes are not an address. */
bool local_address_read(const struct tl_pair_address *bytes, struct local_address *ret_pair_address);

/* --------------------------------------------------------------------------------------- provider, queue pairs -- */

#define LOCAL_MAX_WAKEUPS 32

struct local_provider {
    struct tl_provider base; /* its fd is the epoll descriptor */
    uid_t own_uid;
    uid_t unknown_uid;
    bool is_reading_forbidden;
    uint8_t host_id[TL_HOST_ID_BYTES];
    char *socket_folder;  /* NULL: none */
    int done_fd;          /* an eventfd that is written when a helper thread has finished a reading */
    int timer_fd;         /* a timerfd that ends a sleep; it is never read */
    int64_t timer_due_ns; /* when timer_fd is due; TL_TIME_NEVER: it is off */
    struct tl_list pairs;
    struct tl_list *cursor; /* the pair that the running poll looks at next; NULL: no poll runs */
    uint32_t pair_count;
    uint64_t last_number; /* number of the latest pair */
    unsigned polls_to_look;
    int64_t next_look_ns;
    bool must_look;                      /* the next poll looks at the sockets */
    int other_fd;                        /* descriptor of the caller on which the provider sleeps too; -1: none */
    uint64_t wakeups[LOCAL_MAX_WAKEUPS]; /* [wakeup_count] numbers of the descriptors that have ended the sleep */
    unsigned wakeup_count;
    bool is_armed;
    uint32_t sleeps;
    struct tl_local_stats stats;

    pthread_mutex_t mutex; /* guards the following members */
    struct tl_list gone;   /* list of struct local_region: destroyed regions that peers may know */
    struct tl_list freed;  /* list of struct local_shown_memory: given back, and peers may know it */
    atomic_bool has_gone;
    int gone_fd;            /* an eventfd that is written when something was added to these lists */
    atomic_uint populaters; /* number of threads that are getting pages of regions */
};

enum local_work_kind { LOCAL_WORK_MESSAGE, LOCAL_WORK_WRITE, LOCAL_WORK_READ };

/* A message or a write that was posted. */
struct local_work {
    struct tl_work *work; /* its `done` is called at the end; NULL: nothing is called */
    void *message;        /* a copy of the message, NULL once it has left; or of what the peer is to read */
    const uint8_t *source;
    uint64_t len_bytes;
    uint64_t done_bytes;
    struct local_descriptor place;
    uint64_t offset_bytes; /* offset in the place */
    uint32_t immediate;
    uint32_t read_number; /* for LOCAL_WORK_READ: it is done when the peer has answered this number of reads */
    uint8_t kind;         /* enum local_work_kind */
    bool has_immediate;
};

/* What was posted, as a ring in our own memory, whose numbers are modulo 2^32. */
struct local_queue {
    struct local_work *works; /* [mask + 1] */
    uint32_t limit;           /* the greatest number of works that may be posted at a time */
    uint32_t mask;
    uint32_t posted;
    uint32_t executed;     /* number of works that were executed */
    uint32_t confirmed;    /* number of works that were executed before the peer's ring was seen open */
    uint32_t completed;    /* number of works whose end was reported */
    uint64_t queued_bytes; /* bytes of writes that were posted and are not completed */
    uint32_t reads_posted;
    uint32_t reads_answered; /* number of reads that the peer has answered */
    int64_t read_began_ns;   /* when the last read of either side began */
    int64_t read_until_ns;   /* when that read is expected to end */
};

/* Segments of ours that are passed to the peer. */
struct local_attachments {
    struct tl_list unsent, sent; /* lists of struct local_region */
    struct tl_list gone;         /* struct local_region that were destroyed, and of which the peer was not told yet */
    uint32_t next_number;
};

/* Segments of the peer that are mapped here. */
struct local_mappings {
    struct local_peer_segment *entries; /* [count], sorted by number */
    size_t count, capacity;
    uint32_t next_number;
};

/* Unshared memory that the peer may have written. */
struct local_exposures {
    struct local_exposed *entries; /* [count] */
    uint32_t count;
    uint32_t first_free; /* index of the first free entry plus 1; 0: there is none */
};

/* Files that we have passed to the peer, and files that the peer has passed. */
struct local_files {
    struct local_shared_file *shared; /* [LOCAL_FILES]; NULL: none yet */
    uint64_t last_shared;
    struct local_peer_file *peers; /* [LOCAL_FILES]; NULL: none yet */
    uint64_t last_peers;
};

/* Memory of devices that we have shown to the peer, and what the peer has shown. */
struct local_memories {
    struct local_shown_memory **shown; /* [LOCAL_MEMORIES]; NULL: none yet */
    uint64_t last_shown;
    struct tl_list untold;           /* struct local_shown_memory, of which the peer must hear that it is given back */
    struct local_peer_memory *peers; /* [LOCAL_MEMORIES]; NULL: none yet */
    uint64_t last_peers;
};

/* The two rings, and what was read from them. */
struct local_rings {
    struct local_ring in;  /* the ring that we read and the peer writes */
    struct local_ring out; /* the ring that the peer reads and we write */
    uint32_t out_consumed; /* how many slots the peer has taken, as read from its ring */
    uint32_t answered;     /* how many LOCAL_SLOT_READ of the peer were executed */
    uint32_t woken_state;  /* state of the peer's ring when the last wake was sent */
    uint32_t processor;    /* what our ring says of our processor */
    bool has_posted;       /* something was posted since the peer's state was read last */
    bool is_stalled;       /* the peer's ring is full */
};

/* Counts of the packets of the two control sockets. */
struct local_packets {
    uint32_t sent;
    uint32_t received;
    bool must_read; /* our control socket, or the accept socket, was not read to the end */
};

/* The descriptors of a pair; -1: none. */
struct local_sockets {
    int accept;    /* accept socket, until the peer's HELLO was taken */
    int in;        /* our end of our control socket, from which we read what the peer sends */
    int peers_end; /* the other end of our control socket, until it was passed */
    int out;       /* the end of the peer's control socket that we write to */
    int wake_in;   /* an eventfd that the peer writes to wake us; it is never read */
    int wake_out;  /* the peer's eventfd that we write to wake the peer */
    int process;   /* becomes readable when the peer's process ends */
    int ring;      /* the memory of our ring, until it was passed */
};

/* Random numbers: by reading the peer's number, each side finds out whether it can read the peer's memory. */
struct local_proof {
    uint64_t own;
    uint64_t peers;
    uint64_t read; /* what was read at the address of the peer's number */
};

#define LOCAL_HELPER_THREADS 2

/* The peer's LOCAL_SLOT_READ that is being executed. */
struct local_slot_read {
    bool is_under_way;
    bool has_immediate;
    bool may_wait; /* LOCAL_FLAG_MAY_WAIT */
    uint32_t immediate;
    uint32_t exposure, generation;
    uint64_t source, offset_bytes, len_bytes;
    unsigned parts_left; /* number of parts that helper threads have not read yet */
    int error;           /* errno of a part that failed; 0: none failed */
};

/*
 *   NEW --connect--> CALLING --the peer's call was taken--> CONNECTED
 *     any but NEW --disconnect, hang-up, rule broken--> ENDING --reported as broken--> DRAINING --drained--> ENDED
 */
enum local_state {
    LOCAL_NEW,
    LOCAL_CALLING,   /* has sent a HELLO; waits for the peer's HELLO, and then for the attempt to read the peer's memory
                      */
    LOCAL_CONNECTED, /* carries messages */
    LOCAL_ENDING,    /* waits for polls to take what the peer had posted, and to report it as broken */
    LOCAL_DRAINING,  /* waits until no call of a helper thread writes to memory of ours any more */
    LOCAL_ENDED,
};

struct local_pair {
    struct tl_queue_pair base;
    struct local_provider *provider;
    struct tl_list link; /* entry in provider->pairs */
    uint64_t number;
    struct tl_queue_pair_events events;
    void *owner;
    enum local_state state;
    struct tl_error reason; /* the reason why the pair ends */
    bool has_connected;
    bool is_distrusted; /* the peer has broken the protocol: nothing that it has posted counts any more */
    struct local_address self, peer;
    struct ucred credentials; /* process and user of the peer */
    struct local_proof proof;
    struct local_sockets sockets;
    struct local_packets packets;
    struct local_rings rings;
    struct local_queue queue;
    struct local_attachments attachments;
    struct local_mappings mappings;
    struct local_exposures exposures;
    struct local_files files;
    struct local_memories memories;
    struct local_slot_read reading;
    struct tl_memory_reader *helpers[LOCAL_HELPER_THREADS]; /* the second one reads the second half of a large read */
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

/* Makes the epoll descriptor report this number while fd can be read; with EPOLLET in flags, once each time that
 * something comes. Returns false when there is no memory. */
bool local_watch(struct local_provider *provider, int fd, uint64_t number, uint32_t flags);
/* The number of the eventfds that peers write: the poll that follows reads all rings. */
#define LOCAL_WAKE_NUMBER (UINT64_MAX - 2)
/* This bit is added to the number of a pair for the descriptor of its peer's process. */
#define LOCAL_PROCESS_NUMBER (UINT64_C(1) << 63)
/* Shuts the descriptor down if it is a socket, and stops watching it. */
void local_forget_descriptor(struct local_provider *provider, int fd);

/* ------------------------------------------------------------------------------------------- local_handshake.c -- */

/* Sends a HELLO to the peer of the pair. Errors: TL_UNAVAILABLE. */
enum tl_status local_shake_hands(struct local_pair *pair, struct tl_error *ret_error) TL_MUST_USE;
/* Reads the accept socket of a pair that has sent its HELLO. Returns how many packets there were. */
unsigned local_read_accept_socket(struct local_pair *pair);
/* Connects the pair after a helper thread has tried to read the peer's memory; error is an errno, or 0 when it was
 * read. */
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
/* Ends the pair because memory of the peer could not be mapped. When this process has no memory for that, the peer has
 * broken no rule, and what it has posted before is still taken. */
void local_pair_unmapped(struct local_pair *pair, const struct tl_error *error);
/* Takes the packets of the control socket, and notices the end of the peer. Returns how many packets there were. */
unsigned local_pair_read_packets(struct local_pair *pair);
/* Closes the descriptor, if there is one, and sets it to -1. */
void local_close_fd(int *fd);
/* Returns whether one of its helper threads is reading. */
bool local_pair_is_reading(const struct local_pair *pair);
/* Checks whether its helper threads have finished their readings. Returns how many have. */
unsigned local_pair_ask_helpers(struct local_pair *pair);
/* Takes what the peer had posted, as much as a poll takes. When nothing is left, reports that the pair has ended, and
 * drains it. */
void local_pair_end(struct local_pair *pair);
/* Cancels what was posted, as much as the quota allows. Reports that the pair is drained as soon as nothing is left and
 * no call writes to memory of ours any more; then its owner may destroy it. Returns how many events there were. */
unsigned local_pair_drain(struct local_pair *pair);

/* ------------------------------------------------------------------------------------------------ local_send.c -- */

uint32_t local_space(const struct tl_queue_pair *pair);
void *local_message_place(struct tl_queue_pair *pair);
void local_message(struct tl_queue_pair *pair, const void *data, uint32_t len_bytes, struct tl_work *work);
void local_write(struct tl_queue_pair *pair, const struct tl_region *region, const void *source, uint64_t len_bytes,
                 const struct tl_descriptor *destination, uint64_t offset_bytes, bool has_immediate, uint32_t immediate,
                 struct tl_work *work);
void local_ring_doorbell(struct tl_queue_pair *pair);
/* Carries out what was posted, within the limit of one poll. Returns how many events there were. */
unsigned local_execute_posts(struct local_pair *pair);
/* Calls `done` of the works that are completed, as far as the quota allows. Returns how many there were. */
unsigned local_complete(struct local_pair *pair);
/* Calls `done` of other works with TL_CANCELLED, as far as the quota allows. Returns whether none is left. */
bool local_cancel_works(struct local_pair *pair);
/* Two helper threads read memory of at least this size. */
#define LOCAL_MIN_SPLIT_BYTES (UINT64_C(1) << 20)
/* Notes that a helper thread, ours or the peer's, begins to read this number of bytes. */
void local_expect_read(struct local_pair *pair, uint64_t len_bytes);
/* What was written for the peer. */
enum local_wake_cause {
    LOCAL_WAKE_SPACE, /* slots are free again, for which only a stalled peer waits */
    LOCAL_WAKE_SLOTS,
    LOCAL_WAKE_ANSWER,
};
/* Wakes the peer if it sleeps and does not know it. */
void local_wake_peer(struct local_pair *pair, enum local_wake_cause cause);
/* Sends a packet other than HELLO, and counts it in the ring, from which the peer learns that it has a packet
 * to read. Returns false when the packet cannot be sent now, or not any more. */
bool local_send_counted(struct local_pair *pair, const void *packet, size_t len_bytes, int fd);

/* ---------------------------------------------------------------------------------------------- local_expose.c -- */

enum tl_status local_expose(struct tl_queue_pair *pair, struct tl_region *region, void *address, uint64_t len_bytes,
                            struct tl_exposure *exposure, struct tl_error *ret_error);
void local_revoke(struct tl_queue_pair *pair, struct tl_exposure *exposure, struct tl_work *work);
/* Returns the destination of the read; NULL: that memory is not exposed. */
uint8_t *local_exposures_find(const struct local_exposures *exposures, const struct local_slot_read *reading);
/* Passes the segments that were not passed to the peer yet, once it knows of those that are gone. */
void local_attach_segments(struct local_pair *pair);
/* Frees a segment that was destroyed, once the peer that uses it knows of that. */
void local_forget_region(struct local_region *region);
/* Takes all regions from the pair. */
void local_leave_regions(struct local_pair *pair);

/* --------------------------------------------------------------------------------------------- local_receive.c -- */

/* The most slots that one poll takes from one pair. */
#define LOCAL_SLOTS_PER_POLL 64
/* The most slots with messages among them: what the up to 64 messages of each have touched is in the processor's caches
 * still when they are answered. */
#define LOCAL_MESSAGES_PER_POLL 4
/* Takes at most `most` slots that the peer has posted, and so many messages among them. Returns how many events there
 * were. */
unsigned local_take_slots(struct local_pair *pair, unsigned most, unsigned most_messages);
/* Maps a segment that the peer has passed; fd stays the caller's. Errors: TL_INVALID_ARGUMENT: the packet or the memory
 * is not valid. TL_RESOURCE_EXHAUSTED. */
enum tl_status local_mappings_add(struct local_mappings *mappings, const struct local_segment_packet *packet, int fd,
                                  struct tl_error *ret_error) TL_MUST_USE;
/* Returns NULL when there is no such segment. */
struct local_peer_segment *local_mappings_find(struct local_mappings *mappings, uint32_t number);
/* Removes the entry; its memory stays mapped, and the caller has it unmapped. */
void local_mappings_remove(struct local_mappings *mappings, struct local_peer_segment *mapped);
/* Returns whether the peer's process still runs and has not closed the connection. */
bool local_peer_lives(const struct local_pair *pair);
/* Called when a helper thread has read its part of a LOCAL_SLOT_READ; error is an errno, 0: none. */
void local_part_is_read(struct local_pair *pair, int error);

/* ----------------------------------------------------------------------------------------------- local_files.c -- */

enum tl_status local_share(struct tl_queue_pair *pair, struct tl_mapped_file *file,
                           struct tl_descriptor *ret_descriptor, struct tl_error *ret_error);
enum tl_status local_map(struct tl_queue_pair *pair, const struct tl_descriptor *descriptor,
                         struct tl_mapped_file **ret_file, struct tl_error *ret_error);
/* Maps a file that the peer has passed, and remembers it instead of the file that came LOCAL_FILES earlier. Takes over
 * fd. */
void local_file_came(struct local_pair *pair, const struct local_file_packet *packet, int fd);

/* ---------------------------------------------------------------------------------------------- local_memory.c -- */

enum tl_status local_show_memory(struct tl_queue_pair *pair, struct tl_device_memory *memory, int file,
                                 uint64_t offset_bytes, struct tl_descriptor *ret_descriptor,
                                 struct tl_error *ret_error);
enum tl_status local_find_memory(struct tl_queue_pair *pair, const struct tl_descriptor *descriptor, uint64_t len_bytes,
                                 struct tl_peer_memory *ret_memory, int *ret_file, struct tl_error *ret_error);
/* Notes the memory that a packet has brought, instead of that which came LOCAL_MEMORIES earlier. Takes over fd. */
void local_memory_came(struct local_pair *pair, const struct local_memory_packet *packet, int fd);
/* Forgets memory that the peer has given back. */
void local_memory_went(struct local_pair *pair, const struct local_memory_packet *packet);
/* Tells peers of the memory in the list, which is given back. */
void local_memories_freed(struct tl_list *freed);
/* Tells the peer what could not be told before. */
void local_memories_tell(struct local_pair *pair);
/* Forgets what was shown to the peer. */
void local_memories_fini(struct local_pair *pair);

#endif
