// SPDX-License-Identifier: Apache-2.0
/*
 * What the files of the verbs provider share.
 *
 *   verbs_options.c       ranges of the options, the list of devices
 *   verbs_memlock.c       the limit of locked memory and its remedy
 *   verbs_list.c          candidates and their order
 *   verbs_device.c        open and close, the completion queue and its size, poll, sleeping
 *   verbs_region.c        registered memory
 *   verbs_events.c        events of the device: ports, addresses, errors
 *   verbs_pair.c          queue pairs: create, connect, break, drain, destroy
 *   verbs_slots.c         slots that the peer's messages arrive in
 *   verbs_post.c          posted work, doorbells
 *   verbs_window.c        memory windows, expose and revoke
 *   verbs_complete.c      completions, and why a bad one is bad
 *   verbs_address.c       the bytes that travel over the control plane
 *
 * A queue pair's posted work is a ring of records, counted by three numbers that only grow:
 *
 *       retired            posted                tail
 *     ...|  at the card      |  wait for doorbell  |  space
 *
 * An operation that needs no work request (one that ends nothing, or came after the queue pair broke) takes a record as
 * well, so that every `done` comes in the order of posting. Of the requests of a doorbell only the last one with work
 * asks for a completion, and so does every fourth part of the ring. A completion retires everything that was posted
 * before it. What was posted after the last of these is over when the queue pair is.
 *
 * A work request's id names the queue pair's entry, its generation, and the record or slot, so that a completion of a
 * destroyed queue pair touches nothing.
 */
#ifndef DATAPLANE_VERBS_VERBS_INTERNAL_H
#define DATAPLANE_VERBS_VERBS_INTERNAL_H

#include <infiniband/verbs.h>

#include "base/list.h"
#include "dataplane/provider.h"
#include "dataplane/verbs/verbs.h"

#define VERBS_MAX_PAIRS 4096
#define VERBS_BATCH 32
/* An address vector has 8 bits for the index of its GID. */
#define VERBS_MAX_GID_INDEX 255

/* ----------------------------------------------------------------------------------------- options and memlock -- */

#define VERBS_FILTER_ENTRIES 32

struct verbs_filter_entry {
    char name[IBV_SYSFS_NAME_MAX];
    unsigned port; /* 0: all */
    bool is_excluded;
    bool is_exact;
};

struct verbs_filter {
    struct verbs_filter_entry entries[VERBS_FILTER_ENTRIES];
    unsigned count;
};

/* Loads libibverbs, unless that is done; nothing else of it may be called before. TL_NOT_FOUND: it is not there, or too
 * old. From any thread. */
enum tl_status verbs_library_load(struct tl_error *ret_error);

/* Errors: TL_INVALID_ARGUMENT: the text is not such a list. */
enum tl_status verbs_filter_parse(const char *text, struct verbs_filter *ret_filter,
                                  struct tl_error *ret_error) TL_MUST_USE;
/* From now on, a name that is one of devices[count] stands for that device only. */
void verbs_filter_resolve(struct verbs_filter *filter, const char *const *devices, size_t count);
/* Returns the entry that decides about a device's port; NULL when no entry names it. *ret_is_allowed is the
 * decision. */
const struct verbs_filter_entry *verbs_filter_find(const struct verbs_filter *filter, const char *device, unsigned port,
                                                   bool *ret_is_allowed);

/* Returns the 16 bytes of the GID that is this address (IPv4 mapped); the zone is left out. Returns false when the text
 * is not an address. */
bool verbs_address_to_gid(const char *address, uint8_t ret_gid[16]);
bool verbs_gid_is_v4(const uint8_t gid[16]);
/* Formats a GID as an IPv4 address if it is a mapped one. capacity must be at least INET6_ADDRSTRLEN. */
void verbs_gid_to_text(const uint8_t gid[16], char *ret_text, size_t capacity);

/* Returns whether len_bytes exceed the limit of locked memory that holds for this process. */
bool verbs_exceeds_memlock(uint64_t len_bytes);
/* Fills *ret_error: `what` could not lock len_bytes, what the limit is, and how it is raised. */
enum tl_status verbs_memlock_error(uint64_t len_bytes, const char *what, struct tl_error *ret_error);

/* --------------------------------------------------------------------------------------------------- addresses -- */

#define VERBS_ADDRESS_VERSION 1
/* The size of a device's name and port in an address, with NUL; a longer one is cut. */
#define VERBS_ADDRESS_NAME_BYTES 32
#define VERBS_DESCRIPTOR_BYTES 20

struct verbs_address {
    uint8_t link_layer; /* IBV_LINK_LAYER_* */
    uint8_t gid_type;   /* enum ibv_gid_type */
    uint8_t mtu;        /* enum ibv_mtu */
    uint8_t keys;       /* enum tl_keys: how the sender exposes its memory */
    uint8_t initiator_depth;
    uint8_t responder_depth;
    uint8_t timeout;
    uint8_t retry_count;
    uint16_t lid;
    uint32_t number; /* the number of the queue pair, 24 bits */
    uint32_t psn;    /* the first packet sequence number, 24 bits */
    uint8_t gid[16];
    char device[VERBS_ADDRESS_NAME_BYTES]; /* "mlx5_0:1", for messages */
};

void verbs_address_write(const struct verbs_address *pair_address, struct tl_pair_address *ret_bytes);
/* Errors: TL_INVALID_ARGUMENT: not an address. TL_FAILED_PRECONDITION: an address of another version. */
enum tl_status verbs_address_read(const struct tl_pair_address *bytes, struct verbs_address *ret_pair_address,
                                  struct tl_error *ret_error) TL_MUST_USE;
/* The provider's `check`: reads the address and drops it. Errors: those of verbs_address_read. */
enum tl_status verbs_address_check(const struct tl_provider *provider, const struct tl_pair_address *bytes,
                                   struct tl_error *ret_error) TL_MUST_USE;
/* Errors: TL_FAILED_PRECONDITION: packets of one side never reach the other, with the reason. */
enum tl_status verbs_address_match(const struct verbs_address *ours, const struct verbs_address *theirs,
                                   struct tl_error *ret_error) TL_MUST_USE;

/* The parameters that both sides use. Each side computes them alone: the smaller of both values. */
struct verbs_terms {
    uint8_t mtu; /* enum ibv_mtu */
    uint8_t initiator_depth;
    uint8_t responder_depth;
    uint8_t timeout; /* 0: without end, only when both sides want that */
    uint8_t retry_count;
};
struct verbs_terms verbs_address_agree(const struct verbs_address *ours, const struct verbs_address *theirs);

void verbs_descriptor_write(uint64_t address, uint32_t rkey, uint64_t len_bytes, struct tl_descriptor *ret_descriptor);
/* Returns false when it is not a descriptor of this provider. */
bool verbs_descriptor_read(const struct tl_descriptor *descriptor, uint64_t *ret_address, uint32_t *ret_rkey,
                           uint64_t *ret_len_bytes);

uint32_t verbs_mtu_to_bytes(enum ibv_mtu mtu);
/* Returns the greatest MTU of at most so many bytes (at least 256). */
enum ibv_mtu verbs_mtu_from_bytes(uint32_t bytes);

/* ----------------------------------------------------------------------------------------------------- devices -- */

struct verbs_pair;

/* An entry of the table of queue pairs. */
struct verbs_table_entry {
    struct verbs_pair *pair; /* NULL: free */
    uint32_t generation;     /* 24 bits, of the queue pair that has the entry, or had it last */
};

/* The completion queue of all queue pairs. */
struct verbs_cq {
    struct ibv_cq *cq;
    struct ibv_comp_channel *channel;
    uint32_t capacity;
    uint32_t reserved; /* completions that all queue pairs together may have outstanding */
    unsigned polls_since_events;
    bool has_events; /* the next poll asks the device for asynchronous events */
    bool has_lost;   /* when the queue is found empty, the lost queue pairs are taken from the card */
    unsigned stash_count;
    struct ibv_wc stash[VERBS_BATCH]; /* completions that were found while arming */
};

/* The port and the address that the device was opened with. */
struct verbs_port {
    uint8_t number;
    uint8_t link_layer;
    uint8_t gid_type;
    enum ibv_mtu mtu;
    union ibv_gid gid;
    _Atomic uint32_t gid_index; /* where it was last; it is looked up again for each queue pair, and when the device is
                                   opened again, because addresses come and go. Another thread may read it. */
};

/* What the options say of queue pairs. */
struct verbs_pair_settings {
    uint8_t service_level, traffic_class, timeout, retry_count;
    uint16_t pkey_index;
    uint32_t queue_depth;
    enum tl_keys keys;
};

struct verbs_device {
    struct tl_provider base;
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct verbs_cq cq;
    struct verbs_table_entry *pairs; /* [base.limits.max_queue_pairs] */
    uint32_t pair_count;
    uint32_t next_entry;
    bool is_dead;             /* no queue pair can be created any more; base.failure says why */
    struct tl_list attention; /* queue pairs that the next poll attends to */
    struct tl_list flushing;  /* queue pairs whose work the card has to complete, the first broken first */
    struct verbs_port port;
    struct verbs_pair_settings settings;
    struct ibv_device_attr attributes;
    struct tl_verbs_options options; /* it was opened with these, less their text, for `reopen` */
    struct tl_verbs_candidate candidate;
};

static inline struct verbs_device *verbs_device_of(struct tl_provider *provider)
{
    return TL_CONTAINER_OF(provider, struct verbs_device, base);
}

/* Enlarges the completion queue by so many completions. Errors: TL_RESOURCE_EXHAUSTED. */
enum tl_status verbs_device_reserve(struct verbs_device *device, uint32_t count,
                                    struct tl_error *ret_error) TL_MUST_USE;
/* Breaks every queue pair. is_lost: the card is not relied on to complete their work. */
void verbs_device_break_all(struct verbs_device *device, bool is_lost, const struct tl_error *reason);
/* Breaks every queue pair, and refuses new ones from now on. */
void verbs_device_die(struct verbs_device *device, const struct tl_error *reason);
/* Returns true when the device does not exist any more; the device is dead then. Not every driver reports that. */
bool verbs_device_is_removed(struct verbs_device *device);
/* Finds where the device's address is in the port's table now. Returns false when it is not there. Thread: any. */
bool verbs_device_find_gid(const struct verbs_device *device, uint32_t *ret_index);
/* Returns false, with the reason, when the port is down or the address has gone. */
bool verbs_device_has_link(const struct verbs_device *device, char *ret_why, size_t capacity);

/* Handles the events that the device reports. Returns how many. */
unsigned verbs_events_handle(struct verbs_device *device);

struct verbs_region {
    struct tl_region base;
    struct ibv_mr *mr;
};

static inline const struct verbs_region *verbs_region_of(const struct tl_region *region)
{
    return TL_CONTAINER_OF(region, const struct verbs_region, base);
}

enum tl_status verbs_region_create(struct tl_provider *provider, void *address, uint64_t len_bytes,
                                   enum tl_region_access access, struct tl_region **ret_region,
                                   struct tl_error *ret_error) TL_MUST_USE;
enum tl_status verbs_region_create_on(struct tl_provider *provider, const struct tl_device_allocation *allocation,
                                      enum tl_region_access access, struct tl_region **ret_region,
                                      struct tl_error *ret_error) TL_MUST_USE;
void verbs_region_destroy(struct tl_region *region);

/* ------------------------------------------------------------------------------------------------- queue pairs -- */

/* The kind of a work request, as its id says. */
enum verbs_kind { VERBS_SEND = 0, VERBS_RECEIVE = 1 };

struct verbs_id {
    uint32_t generation; /* 24 bits of the queue pair's generation */
    uint32_t pair_index; /* 16 bits: the index of the queue pair's entry */
    enum verbs_kind kind;
    uint32_t index; /* 23 bits: the record, or the slot */
};

static inline uint64_t verbs_id_pack(struct verbs_id id)
{
    return (uint64_t)id.generation << 40 | (uint64_t)id.pair_index << 24 | (uint64_t)id.kind << 23 | id.index;
}

static inline struct verbs_id verbs_id_unpack(uint64_t id)
{
    return (struct verbs_id){(uint32_t)(id >> 40), (uint32_t)(id >> 24) & 0xffff, (enum verbs_kind)(id >> 23 & 1),
                             (uint32_t)id & 0x7fffff};
}

struct verbs_window {
    struct ibv_mw *mw;
    uint32_t rkey; /* the key of the last bind, which may not have left yet; mw->rkey is the key that the card knows */
    struct verbs_window *next; /* in its list; an exposed window is in no list */
};

struct verbs_record {
    struct ibv_send_wr request; /* its id is used even if it is not posted */
    struct ibv_sge piece;
    struct tl_work *work;        /* NULL: no work waits for it */
    struct verbs_window *window; /* free again when the record is over; NULL: none */
    uint64_t send_end;           /* when it is over, the memory of messages is free up to here (slots.send_end) */
    bool is_empty;               /* the record has no work request */
};

struct verbs_slot {
    struct ibv_recv_wr request;
    struct ibv_sge piece;
    bool is_posted; /* the card has it, and has not completed it yet */
};

/*
 *   FRESH --connect--> CONNECTED --verbs_pair_break--> BROKEN --poll: events.broken--> FLUSHING --poll: all is back,
 *     |                                                  ^                             events.drained--> DRAINED
 *     +----------------- disconnect, a failed connect --------+
 */
enum verbs_state {
    VERBS_FRESH,
    VERBS_CONNECTED,
    VERBS_BROKEN,   /* the owner does not know yet */
    VERBS_FLUSHING, /* waits for the card to complete every request */
    VERBS_DRAINED,
};

/* The numbers of a queue pair, which its packets carry, and the peer's device. */
struct verbs_pair_ids {
    uint32_t number; /* the number of the queue pair, which the card gave it */
    uint32_t psn;    /* the sequence number of the first packet */
    uint32_t gid_index;
    char peer_device[VERBS_ADDRESS_NAME_BYTES]; /* empty: not connected yet */
    uint8_t peer_gid[16];
};

/* What the queue pair holds of the device. */
struct verbs_pair_entry {
    uint32_t index;
    uint32_t generation;
    bool is_held;     /* it has an entry in the device's table */
    bool is_reserved; /* it has reserved completions in the completion queue */
    bool is_lost;     /* it is broken, and the card is not relied on to complete its work */
};

/* The ring of posted work. */
struct verbs_ring {
    struct verbs_record *records; /* [record_count] */
    uint32_t record_count;        /* work_count, rounded up to a power of two */
    uint32_t work_count;
    uint64_t retired, posted, tail;
    uint64_t signalled; /* one behind the last record that asks for a completion; the records from here to posted do not
                           ask for one */
    uint64_t bytes_since_signal;
    uint64_t send_end_signalled; /* slots.send_end of the last record that asks for a completion */
    uint32_t max_inline_bytes;
};

/* The receive buffers, and the memory of messages in both directions. */
struct verbs_slots {
    uint8_t *memory; /* slots that messages arrive in [count], then the memory that they leave from [send_bytes] */
    uint64_t memory_bytes;
    uint64_t send_bytes;
    uint64_t send_begin, send_end; /* what of it posted messages use, counted since the beginning; it is used in a
                                      circle */
    struct ibv_mr *mr;
    struct verbs_slot *slots;             /* [count] */
    uint32_t count;                       /* how many slots the owner has asked for, and some more that may be idle */
    uint32_t may_idle;                    /* how many slots may be idle before they are posted */
    uint32_t posted;                      /* how many slots are posted */
    uint32_t idle_count;                  /* how many slots are to be posted */
    struct ibv_recv_wr *idle, **idle_end; /* the slots that are to be posted, linked */
};

struct verbs_windows {
    enum tl_keys keys;
    struct verbs_window_block *blocks; /* all windows of the queue pair */
    struct verbs_window *idle;
    unsigned count;      /* in all blocks */
    unsigned idle_count; /* in idle */
};

struct verbs_pair {
    struct tl_queue_pair base;
    struct verbs_device *device;
    struct tl_queue_pair_events events;
    void *owner;
    struct ibv_qp *qp; /* NULL: it was taken from the card */
    enum verbs_state state;
    struct verbs_pair_entry entry;
    struct verbs_ring ring;
    struct verbs_slots slots;
    struct verbs_windows windows;
    struct verbs_pair_ids ids;
    struct tl_list attention, flushing; /* places in the device's lists */
    int64_t flushing_since_ns;
    struct tl_error reason; /* valid from BROKEN on */
};

static inline struct verbs_pair *verbs_pair_of(const struct tl_queue_pair *pair)
{
    return TL_CONTAINER_OF(pair, struct verbs_pair, base);
}

static inline bool verbs_pair_is_broken(const struct verbs_pair *pair)
{
    return pair->state >= VERBS_BROKEN;
}

enum tl_status verbs_pair_create(struct tl_provider *provider, const struct tl_queue_pair_options *options,
                                 const struct tl_queue_pair_events *events, void *owner,
                                 struct tl_queue_pair **ret_pair, struct tl_error *ret_error) TL_MUST_USE;
void verbs_pair_get_address(const struct tl_queue_pair *pair, struct tl_pair_address *ret_pair_address);
enum tl_status verbs_pair_connect(struct tl_queue_pair *pair, const struct tl_pair_address *peer,
                                  struct tl_error *ret_error) TL_MUST_USE;
void verbs_pair_describe_route(const struct tl_queue_pair *pair, struct tl_route *ret_route);
void verbs_pair_disconnect(struct tl_queue_pair *pair, const struct tl_error *reason);
void verbs_pair_destroy(struct tl_queue_pair *pair);

/* Does nothing when it is broken already. */
void verbs_pair_break(struct verbs_pair *pair, const struct tl_error *reason);
/* Does the same, with the reason "UNAVAILABLE: queue pair N of DEVICE: ...". */
void verbs_pair_break_because(struct verbs_pair *pair, const char *format, ...)
    __attribute__((cold, format(printf, 2, 3)));
/* A broken queue pair will be taken from the card, as soon as the owner has what arrived on it until now. */
void verbs_pair_lose(struct verbs_pair *pair);
/* Takes the lost queue pairs from the card. Called when the completion queue is empty. */
void verbs_pair_take_lost(struct verbs_device *device);
/* Takes a broken queue pair from the card: everything that was posted is over. */
void verbs_pair_destroy_qp(struct verbs_pair *pair);
void verbs_pair_needs_attention(struct verbs_pair *pair);
/* Does what is due: calls `broken`, retires what needs no card, posts slots, calls `drained`. Returns how many events
 * that were. The queue pair may be destroyed when it returns. */
unsigned verbs_pair_attend(struct verbs_pair *pair);
/* Takes queue pairs from the card whose work it has not completed for too long. */
void verbs_pair_give_up(struct verbs_device *device);
/* Calls the owner's `broken` if that is due. Returns how many events that were. */
unsigned verbs_pair_report_broken(struct verbs_pair *pair);

/* The memory from which messages leave. A message takes as many bytes of it as it has, so that it holds hundreds of
 * single messages; and as few batches as are ever under way at a time. */
#define VERBS_SEND_BYTES ((uint64_t)256 * 1024)
#define VERBS_SEND_UNIT_BYTES 64

/* How much memory a queue pair locks whose owner asks for the default number of slots, and for as much work as the
 * depth allows. */
uint64_t verbs_slots_default_bytes(uint32_t queue_depth);
/* How many slots may be idle before they are posted. */
uint32_t verbs_slots_may_idle(uint32_t slot_count);
/* Allocates and registers the slots; all are idle. Errors: TL_RESOURCE_EXHAUSTED. */
enum tl_status verbs_slots_init(struct verbs_pair *pair, struct tl_error *ret_error) TL_MUST_USE;
void verbs_slots_fini(struct verbs_pair *pair);
/* Posts the idle slots. Breaks the queue pair when that fails. */
void verbs_slots_post_idle(struct verbs_pair *pair);
/* Posts the idle slots if there are more than may be idle. Called with every doorbell. */
static inline void verbs_slots_post(struct verbs_pair *pair)
{
    if (pair->slots.idle_count > pair->slots.may_idle) verbs_slots_post_idle(pair);
}
/* How many messages of any length may be posted now. */
uint32_t verbs_slots_send_space(const struct verbs_pair *pair);
/* Takes memory for a message that is to be posted, for which there is space. */
uint8_t *verbs_slots_send(struct verbs_pair *pair, uint32_t len_bytes);
/* A slot is completed, and its owner has what was in it: it is idle. */
void verbs_slots_return(struct verbs_pair *pair, uint32_t index);
/* The memory of a slot that messages arrive in. */
static inline uint8_t *verbs_slot_memory(const struct verbs_pair *pair, uint32_t index)
{
    return pair->slots.memory + (size_t)index * TL_SLOT_BYTES;
}

uint32_t verbs_post_space(const struct tl_queue_pair *pair);
void verbs_post_message(struct tl_queue_pair *pair, const void *data, uint32_t len_bytes, struct tl_work *work);
void verbs_post_write(struct tl_queue_pair *pair, const struct tl_region *region, const void *source,
                      uint64_t len_bytes, const struct tl_descriptor *destination, uint64_t offset_bytes,
                      bool has_immediate, uint32_t immediate, struct tl_work *work);
void verbs_post_read(struct tl_queue_pair *pair, const struct tl_region *region, void *destination, uint64_t len_bytes,
                     const struct tl_descriptor *source, uint64_t offset_bytes, struct tl_work *work);
void verbs_post_doorbell(struct tl_queue_pair *pair);
/* Returns the next record, empty and without a window. The caller has looked at the space before. */
struct verbs_record *verbs_post_record(struct verbs_pair *pair, struct tl_work *work);
/* Ends the work before `end`. Returns how many records that were. */
unsigned verbs_post_retire(struct verbs_pair *pair, uint64_t end, enum tl_status status);
/* Ends records that need no card, as long as the card has no earlier one. Returns how many. */
unsigned verbs_post_retire_empty(struct verbs_pair *pair);
/* Ends all records as cancelled; the card has none any more. Returns how many. */
unsigned verbs_post_cancel_rest(struct verbs_pair *pair);

/* Errors: TL_RESOURCE_EXHAUSTED. */
enum tl_status verbs_windows_prepare(struct verbs_pair *pair, struct tl_error *ret_error) TL_MUST_USE;
/* Frees all windows, bound or not. */
void verbs_windows_release(struct verbs_pair *pair);
void verbs_window_put(struct verbs_pair *pair, struct verbs_window *window);
/* An operation of verbs_device.c (dataplane/provider.h). */
bool verbs_window_has_spare(struct tl_queue_pair *base);
enum tl_status verbs_window_expose(struct tl_queue_pair *pair, struct tl_region *region, void *address,
                                   uint64_t len_bytes, struct tl_exposure *exposure,
                                   struct tl_error *ret_error) TL_MUST_USE;
enum tl_status verbs_window_expose_source(struct tl_queue_pair *pair, struct tl_region *region, void *address,
                                          uint64_t len_bytes, bool is_writable, struct tl_exposure *exposure,
                                          struct tl_error *ret_error) TL_MUST_USE;
void verbs_window_revoke(struct tl_queue_pair *pair, struct tl_exposure *exposure, struct tl_work *work);

void verbs_complete(struct verbs_device *device, const struct ibv_wc *completion);
/* Says in plain words what a completion's status means. Static text. */
const char *verbs_complete_words(enum ibv_wc_status status);

#endif
