// SPDX-License-Identifier: Apache-2.0
/*
 * Control messages of the data plane, which two engines send into each other's slots, and the immediates of writes
 * (docs/protocol.md, "Data plane").
 *
 * All numbers are little-endian. Numbers that are mostly small have seven bits in each byte, and as few bytes as they
 * need. Every message contains its own length, which must be right.
 *
 *   type 1, flags 1, length 2, consumed 4, handle 4, then what belongs to the type
 */
#ifndef DATAPLANE_ENGINE_MESSAGE_H
#define DATAPLANE_ENGINE_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "dataplane/provider.h"
#include "tensor/meta_data.h"

/* 1: numbers had their full width; 2: REQUEST and RE_REQUEST could not say that the receiver copies; 3: there was no
 * SOURCE; 4: neither a write nor SOURCE could say that the value lies on a device. */
#define TL_DATAPLANE_VERSION 5
#define TL_MESSAGE_KEY_BYTES 512

enum tl_message_type {
    TL_MESSAGE_HELLO = 1,            /* version, incarnation, token, challenge, destination (the peer's probe) */
    TL_MESSAGE_PROBED = 2,           /* the peer's probe has arrived and was right */
    TL_MESSAGE_REQUEST = 3,          /* number, step, expected_step, key, meta_data unless it is unknown, destination */
    TL_MESSAGE_META_DATA_UPDATE = 4, /* step, meta_data: the value is another than the request expects */
    TL_MESSAGE_RE_REQUEST = 5,       /* destination, which fits now */
    TL_MESSAGE_DONE = 6,             /* step, meta_data of a value without bytes, checksum if the REQUEST wants one */
    TL_MESSAGE_ERROR_STATUS = 7,     /* code, text, is_final */
    TL_MESSAGE_CANCEL = 8,           /* the asker gives the request up */
    TL_MESSAGE_CANCELLED = 9,        /* no write of that request follows */
    TL_MESSAGE_CREDIT = 10,          /* nothing but `consumed`; is_ping: asks for one in return */
    TL_MESSAGE_GOODBYE = 11,         /* the sender closes, with nothing open */
    TL_MESSAGE_MAPPED = 12,          /* step, offset, meta_data, destination (the file that the value lies in) */
    TL_MESSAGE_SOURCE = 13, /* step, meta_data, destination (where the asker may read the value), checksum if the
                               REQUEST wants one */
};

struct tl_message {
    enum tl_message_type type;
    uint32_t consumed; /* slots that the sender has given back since the beginning, modulo 2^32 */
    uint32_t handle;   /* names the request; 0 where there is none */

    /* Flags. */
    bool has_meta_data;
    bool has_checksum; /* in a REQUEST: a checksum is wanted */
    bool is_final;     /* ERROR_STATUS: the owner's answer, whatever its code */
    bool is_ping;      /* CREDIT */
    bool is_published; /* META_DATA_UPDATE, DONE, MAPPED, SOURCE: the step is the version of a published value */
    bool may_map;      /* REQUEST: MAPPED may be the answer */
    bool is_copying;   /* REQUEST, RE_REQUEST: the receiver copies the bytes on, piece by piece as they arrive; SOURCE:
                          the   owner has copied them */
    bool is_on_device; /* SOURCE: the value lies on a device */
    bool is_reading;   /* REQUEST: SOURCE may be the answer, and the receiver reads the bytes */

    uint64_t number;
    uint64_t step;
    uint64_t expected_step;
    uint64_t checksum;
    uint64_t offset; /* MAPPED: where the value lies in the file */
    enum tl_status code;
    const char *text; /* ERROR_STATUS; after decoding it is text_capacity */
    const char *key;  /* REQUEST; after decoding it is text_capacity */
    size_t key_bytes; /* REQUEST; set by decoding */

    /* The fields up to here are cleared by tl_message_clear. */
    uint32_t version; /* HELLO, like the three fields that follow */
    uint64_t incarnation;
    uint64_t token;
    uint64_t challenge;
    struct tl_meta_data meta_data;
    struct tl_descriptor destination;
    char text_capacity[TL_ERROR_MESSAGE_BYTES];
};

/* Makes it a message without content. Only what must be zero is written, because this runs for every message. */
static inline void tl_message_clear(struct tl_message *message)
{
    memset(message, 0, offsetof(struct tl_message, version));
    tl_meta_data_clear(&message->meta_data);
    message->destination.len_bytes = 0;
}

/* Writes the message into buffer[TL_SLOT_BYTES]. Returns its length. The text of an error is cut to what fits. */
uint32_t tl_message_encode(const struct tl_message *message, uint8_t *buffer);

/* Reads a message, and checks everything: lengths, flags, UTF-8, meta-data, status codes. Errors: TL_INVALID_ARGUMENT:
 * not a message, with the reason. TL_OUT_OF_RANGE: a shape whose bytes cannot be counted. */
enum tl_status tl_message_decode(const uint8_t *bytes, uint32_t len_bytes, struct tl_message *ret_message,
                                 struct tl_error *ret_error) TL_MUST_USE;

/* Returns "REQUEST", say, or "?" for a number that is no type. Static text. */
const char *tl_message_name(enum tl_message_type type);

/* -------------------------------------------------------------------------------------------------- immediates -- */

/* A handle names a request of one connection. It is an index that is used again, and a generation that tells its uses
 * apart, so that a late answer is recognised. The three highest bits belong to the sender. */
#define TL_HANDLE_INDEX_BITS 16
#define TL_HANDLE_GENERATION_BITS 13
#define TL_MAX_REQUESTS 65535
#define TL_IMMEDIATE_PROBE UINT32_MAX /* no request has this index */
/* The immediate of a write without bytes is the handle of a request whose SOURCE the receiver has read. */
#define TL_IMMEDIATE_SENDER_COPYING (UINT32_C(1) << 31) /* the sender has copied the bytes into its pool */
#define TL_IMMEDIATE_DONE_FOLLOWS (UINT32_C(1) << 30)   /* a DONE follows */
#define TL_IMMEDIATE_ON_DEVICE (UINT32_C(1) << 29)      /* the value lies on a device */

static inline uint32_t tl_handle(uint32_t index, uint32_t generation)
{
    return (generation & ((1u << TL_HANDLE_GENERATION_BITS) - 1)) << TL_HANDLE_INDEX_BITS | index;
}

static inline uint32_t tl_handle_index(uint32_t handle)
{
    return handle & UINT16_MAX;
}

#define TL_HANDLE_MASK (TL_IMMEDIATE_ON_DEVICE - 1)

#endif
