// SPDX-License-Identifier: Apache-2.0
/* The requests of the peer on a link (link_serves.c), and what sends their answers: link_chunks.c, link_device.c. */
#ifndef CONTROL_LINK_SERVES_H
#define CONTROL_LINK_SERVES_H

#include "control/device_reader.h"
#include "control/link_internal.h"

/*
 *   WAITING --reply: offer on a device--> FENCED --stream is so far--> READY
 *   WAITING --reply: offer--> READY ---may--> ACTIVE --all sent, one-shot--> SENT --received--> (freed)
 *      |    <-has let go: asks-/  \             |  \---all sent, published--> (freed)
 *      |                   on a device: STAGING <-nothing read-/ --a piece was read--> ACTIVE
 *      |                                       \--file, all but its end--> LEAVING --kernel has it--> ACTIVE
 *      \--reply: status--> FAILED --sent--> (freed)        cancel, broken: from any state --> (freed)
 */
enum serve_state {
    SERVE_WAITING, /* for the source's reply */
    SERVE_FENCED,  /* until a stream has come so far that its value on a device may be read */
    SERVE_READY,   /* until so little is in flight that it may be sent */
    SERVE_ACTIVE,  /* until the frame has space for a piece of it */
    SERVE_STAGING, /* until a piece of it was read from its device */
    SERVE_LEAVING, /* for the kernel to have what was sent of a file; then the file is checked and its end is sent */
    SERVE_SENT,    /* for the acknowledgement */
    SERVE_FAILED,  /* until the status is sent */
};

/* What a request of the peer needs only when its answer is there, or when it resumes a transfer. */
struct link_sending {
    struct link_serve *entry;
    uint64_t asked_publication;
    uint64_t resume_offset;
    struct tl_offer offer; /* from READY to SENT; holds the tensor's reference until all is sent. READY, and the tensor
                              is NULL: the value was let go, and the source is asked again before it is sent */
    uint64_t size_bytes;   /* the size of that tensor */
    uint64_t ready_bytes;  /* FENCED, READY: left to send of the value that was offered */
    struct tl_piece *fence_wait; /* FENCED: what it waits for; else NULL */
    uint64_t sent_bytes;
    uint64_t hashed_bytes;
    bool is_announced;              /* the meta-data was sent */
    struct tl_device_reader reader; /* reads the value when it lies on a device */
    void *hash_state;               /* XXH3; NULL unless wants_checksum */
    struct link_status *failure;    /* FAILED; NULL: no memory */
};

/* Many of them may wait for their values, so that its size is bounded (tests/integration/waiting_size_test.c). */
struct link_serve {
    struct tl_hash_link hash; /* in link->answers.serves, by number */
    struct tl_serve serve;    /* the number is in its id */
    struct tl_link *link;
    struct tl_list place; /* in failures, ready, active or leaving */
    enum serve_state state : 8;
    bool wants_checksum;
    bool is_asking_again; /* the source is being asked for the value that was let go */
    uint8_t priority;
    struct link_sending *sending; /* NULL: WAITING, or FAILED because there is no memory */
    char own_key[];               /* NUL-terminated copy of the key, unless the link keeps it */
};

/* The key of a request that has come; it was checked. */
struct link_key {
    const char *text; /* [text_bytes]; NUL-terminated if the link keeps it */
    size_t text_bytes;
    bool is_kept; /* until the link ends */
};

/* A request of the peer; request->key is not looked at. */
/* The hash by which a serve is found by its number. */
uint32_t link_serve_hash(const struct tl_link *link, uint64_t number);
void link_serve_start(struct tl_link *link, const Tensorlane__V1__Request *request, const struct link_key *key);
void link_serve_cancel(struct tl_link *link, uint64_t number);
void link_serve_received(struct tl_link *link, uint64_t number);
/* The link has ended: ends its serves, as many as the loop's quota allows. Returns whether none is left. */
bool link_serves_break(struct tl_link *link);
/* Every change of state goes through here, so that what the link and the worker count is always right. */
void link_serve_set_state(struct link_serve *entry, enum serve_state state);
/* Its value may be sent as soon as so little is in flight. */
void link_serve_become_ready(struct link_serve *entry);
void link_serve_fail(struct link_serve *entry, const struct tl_error *status);
/* It is over: the source is told how, and the serve is freed. */
void link_serve_end(struct link_serve *entry, enum tl_serve_end end);
/* Whether the link may hold the value of a ready serve besides so many bytes of others, and whether the worker may. The
 * only value may have any size. */
bool link_serve_fits_link(const struct link_serve *entry, uint64_t held);
bool link_serve_fits_worker(const struct link_serve *entry);
/* Asks the source for a value in the place of the one that was let go. If there is one, the serve is the first that is
 * ready; otherwise it waits for one, or it has failed. */
void link_serve_ask_again(struct link_serve *entry);

static inline uint64_t link_serve_bytes_left(const struct link_serve *entry)
{
    return entry->sending->size_bytes - entry->sending->sent_bytes;
}

/* What is left to send of the active serves of this priority and of greater ones. */
static inline uint64_t link_active_bytes(const struct tl_link *link, unsigned priority)
{
    uint64_t bytes = 0;
    for (unsigned i = priority; i < LINK_PRIORITIES; i++)
        bytes += link->answers.active_bytes[i];
    return bytes;
}

static inline void link_queue_init(struct link_queue *queue)
{
    for (unsigned i = 0; i < LINK_PRIORITIES; i++)
        tl_list_init(&queue->lists[i]);
}

/* The serve that is sent next; NULL: none. */
static inline struct link_serve *link_queue_first(const struct link_queue *queue)
{
    for (unsigned i = LINK_PRIORITIES; i > 0; i--) {
        const struct tl_list *list = &queue->lists[i - 1];
        if (!tl_list_is_empty(list)) return TL_CONTAINER_OF(list->next, struct link_serve, place);
    }
    return NULL;
}

static inline bool link_queue_is_empty(const struct link_queue *queue)
{
    return link_queue_first(queue) == NULL;
}

static inline void link_queue_push(struct link_queue *queue, struct link_serve *entry)
{
    tl_list_push_back(&queue->lists[entry->priority], &entry->place);
}

/* link_chunks.c */
/* The frame in flight was sent: files that it had bytes of are not read any more. */
void link_serves_left(struct tl_link *link);

/* link_device.c, sending */
/* Whether the value has bytes, on a device. */
bool link_serve_is_on_device(const struct link_serve *entry);
/* Waits for the stream of the value. Others pass by meanwhile: the stream may wait for one of them. */
void link_serve_await_fence(struct link_serve *entry);
/* Reads the first piece of the value from its device; the serve becomes active when it is there. */
void link_serve_stage(struct link_serve *entry);
/* Fails a serve whose value cannot be read. */
void link_serve_fail_reading(struct link_serve *entry, struct tl_error *error);
/* Forgets what is read from a device, or will be. */
void link_serve_stop_reading(struct link_serve *entry);

#endif
