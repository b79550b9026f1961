// SPDX-License-Identifier: Apache-2.0
/*
 * A link: the long-lived stream between two workers that carries requests for tensors, their bytes and their ends, in
 * both directions (docs/protocol.md).
 *
 * Opened by either side; after the first frame of each side (Hello) it is up and symmetrical. A link that breaks ends
 * all its fetches with TL_UNAVAILABLE, for the worker to start again elsewhere, and all its serves with
 * TL_SERVE_BROKEN.
 *
 * Thread: the loop's owner. No callback runs inside a call to these functions.
 */
#ifndef CONTROL_LINK_H
#define CONTROL_LINK_H

#include <stdbool.h>
#include <stdint.h>

#include "tensor/transfer.h"

struct tl_control;
struct tl_link;

/* What the two sides of a link send each other about a data connection of another transport. The link carries it and
 * knows nothing of what it says. */
#define TL_CONNECTION_TRANSPORT_BYTES 32 /* with NUL */
#define TL_CONNECTION_ADDRESS_BYTES 1024

enum tl_connection_message_kind {
    TL_CONNECTION_MESSAGE_OFFER = 1,
    TL_CONNECTION_MESSAGE_ANSWER = 2,
    TL_CONNECTION_MESSAGE_REFUSAL = 3,
};

struct tl_connection_message {
    char transport[TL_CONNECTION_TRANSPORT_BYTES]; /* "verbs" */
    enum tl_connection_message_kind kind;
    uint64_t attempt;   /* which attempt of the side that offers it belongs to; 0: a refusal of all */
    uint32_t len_bytes; /* in an offer or an answer */
    uint8_t bytes[TL_CONNECTION_ADDRESS_BYTES];
    char reason[TL_ERROR_MESSAGE_BYTES]; /* in a refusal */
    bool is_final;                       /* in a refusal: it holds for as long as this link */
};

struct tl_link_events {
    /* Opened by us: the peer has answered and is the expected one; tl_link_peer returns it. */
    void (*up)(struct tl_link *link);
    /* The end, exactly once; the link is freed when it returns. Its fetches have been ended before. Errors:
     * TL_UNAVAILABLE: cannot be reached, or the connection broke. TL_DEADLINE_EXCEEDED: no answer within the connect
     * time-out. TL_FAILED_PRECONDITION: another worker, or another protocol version, answers there. TL_OK: closed by
     * either side. */
    void (*closed)(struct tl_link *link, const struct tl_error *reason);
    /* A message of the peer about a data connection has come; it is valid during the call. */
    void (*connection_message)(struct tl_link *link, const struct tl_connection_message *message);
};

struct tl_link_address {
    const char *address;       /* "host:port" */
    const char *expected_name; /* NULL: any worker */
    bool is_one_way;           /* the peer will not use the link for requests of its own */
};

/* Opens a link. `again` are numbers of requests whose one-shot tensors have arrived, which the peer is sent once more
 * (NULL: none). */
enum tl_status tl_link_open(struct tl_control *control, const struct tl_link_address *address, const uint64_t *again,
                            size_t again_count, const struct tl_link_events *events, void *owner,
                            struct tl_link **ret_link, struct tl_error *ret_error) TL_MUST_USE;

void tl_link_set_events(struct tl_link *link, const struct tl_link_events *events, void *owner);
void *tl_link_owner(const struct tl_link *link);

/* The worker on the other side; complete once the link is up. */
const struct tl_identity *tl_link_peer(const struct tl_link *link);
bool tl_link_is_up(const struct tl_link *link);
/* True when this side opened it. */
bool tl_link_is_ours(const struct tl_link *link);
/* True when no fetch and no serve is open on it. */
bool tl_link_is_idle(const struct tl_link *link);

/* Acknowledges the tensors of these requests once more, on a link that the peer has opened. False: no memory. */
bool tl_link_acknowledge(struct tl_link *link, const uint64_t *numbers, size_t count) TL_MUST_USE;
/* Informs the peer that these requests, made on another connection, are over without their tensors. False: no memory.
 */
bool tl_link_cancel_requests(struct tl_link *link, const uint64_t *numbers, size_t count) TL_MUST_USE;
/* How many one-shot tensors have arrived that the peer may not know of, and their numbers: for the next link, when this
 * one is closed. Valid until the link is used again. */
size_t tl_link_unconfirmed(const struct tl_link *link, const uint64_t **ret_numbers);

/* Asks for the tensor of the fetch; fetch->ops->done follows exactly once unless it is cancelled first. The link is up.
 */
void tl_link_fetch(struct tl_link *link, struct tl_fetch *fetch);
/* Forgets a fetch and informs the peer that it will not be asked for again. True: done is not called. False: a device
 * still writes the destination; done follows with TL_CANCELLED when it has let go. */
bool tl_link_cancel(struct tl_link *link, struct tl_fetch *fetch) TL_MUST_USE;

/* Sends the peer a message about a data connection, in the next frame and before any request; the message is copied.
 * When the link ends, a message that has not been sent is dropped. */
void tl_link_send_connection_message(struct tl_link *link, const struct tl_connection_message *message);

/* Ends the link once it is idle; new requests of the peer are refused with TL_UNAVAILABLE meanwhile. */
void tl_link_drain(struct tl_link *link);
/* Ends it now, with this reason for our own fetches. */
void tl_link_close(struct tl_link *link, const struct tl_error *reason);

#endif
