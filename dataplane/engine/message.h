// SPDX-License-Identifier: Apache-2.0
/*
 * Control messages of the data plane, which two engines send into each other's slots, and the immediates of writes
 * (docs/protocol.md, "Data plane").
 *
 * All numbers are little-endian. Numbers that are mostly small have seven bits in each byte, and as few bytes as they
 * need. A slot holds a batch of messages. Every message contains its own length, which must be right.
 *
 *   batch:    consumed 4, then one message or several
 *   message:  type 1, flags 1, length 2, handle 4, then what belongs to the type
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
 * SOURCE; 4: neither a write nor SOURCE could say that the value lies on a device; 5: a handle had an index of 16 bits,
 * and a slot held one message; 6: every REQUEST had its key as text and its numbers in full; 7: memory of a receiver
 * that copies held the whole value. */
#define TL_DATAPLANE_VERSION 8
#define TL_MESSAGE_KEY_BYTES 512

enum tl_message_type {
    TL_MESSAGE_HELLO = 1,            /* version, incarnation, token, challenge, destination (the peer's probe) */
    TL_MESSAGE_PROBED = 2,           /* the peer's probe has arrived and was right */
    TL_MESSAGE_REQUEST = 3,          /* number, step, expected_step, subscription if there is one, key_form with
                                        key_number or key or both, meta_data unless it is unknown or as before,
                                        destination, lap_bytes if it is copying */
    TL_MESSAGE_META_DATA_UPDATE = 4, /* step, meta_data: the value is another than the request expects */
    TL_MESSAGE_RE_REQUEST = 5,       /* destination, which fits now, lap_bytes if it is copying */
    TL_MESSAGE_DONE = 6,             /* step, checksum if the REQUEST wants one, meta_data of a value without bytes, or
                                        of an inline one, whose bytes follow */
    TL_MESSAGE_ERROR_STATUS = 7,     /* code, text, is_final */
    TL_MESSAGE_CANCEL = 8,           /* the asker gives the request up */
    TL_MESSAGE_CANCELLED = 9,        /* no write of that request follows */
    TL_MESSAGE_CREDIT = 10,          /* nothing but `consumed`; is_ping: asks for one in return */
    TL_MESSAGE_GOODBYE = 11,         /* the sender closes, with nothing open */
    TL_MESSAGE_MAPPED = 12,          /* step, offset, meta_data, destination (the file that the value lies in) */
    TL_MESSAGE_SOURCE = 13, /* step, meta_data, destination (where the asker may read the value), checksum if the
                               REQUEST wants one */
    TL_MESSAGE_COPIED = 14, /* the asker has copied on a further quarter of lap_bytes, where more can be written */
};

/* What a REQUEST says of its key. */
enum tl_key_form {
    TL_KEY_TEXT = 0,      /* its text; the owner remembers nothing */
    TL_KEY_NEW = 1,       /* its text, and the number that it gets */
    TL_KEY_KNOWN = 2,     /* its number */
    TL_KEY_AS_BEFORE = 3, /* its number, and the meta-data of the latest REQUEST with this number that had some */
};

struct tl_message {
    enum tl_message_type type;
    uint32_t handle; /* names the request; 0 where there is none */

    /* Flags. */
    bool has_meta_data;
    bool has_checksum; /* in a REQUEST: a checksum is wanted */
    bool is_final;     /* ERROR_STATUS: the owner's answer, whatever its code */
    bool is_ping;      /* CREDIT */
    bool is_file_slow; /* META_DATA_UPDATE: pages of the value may have to come from a file first */
    bool is_published; /* META_DATA_UPDATE, DONE, MAPPED, SOURCE: the step is the version of a published value */
    bool may_map;      /* REQUEST: MAPPED may be the answer */
    bool is_copying;   /* REQUEST, RE_REQUEST: the receiver copies the bytes on, piece by piece as they arrive; SOURCE:
                          the owner has copied them */
    bool is_on_device; /* SOURCE: the value lies on a device */
    bool is_reading;   /* REQUEST: SOURCE may be the answer, and the receiver reads the bytes */
    bool is_inline;    /* DONE: `data` has the bytes of the value */
    bool is_remote;    /* REQUEST: no processor reaches the destination, so that the value must not come inline */
    bool is_fixed;     /* REQUEST: the destination takes no value of other meta-data */

    uint64_t number; /* in an encoded REQUEST the three are differences (tl_difference) */
    uint64_t step;
    uint64_t expected_step;
    uint64_t subscription; /* REQUEST: number of the subscription that asks; 0: none */
    uint64_t checksum;
    uint64_t offset;    /* MAPPED: where the value lies in the file */
    uint64_t lap_bytes; /* REQUEST, RE_REQUEST: the destination has so many bytes, and the value more: it is written
                           round and round; 0: the destination holds the whole value */
    enum tl_status code;
    const char *text;          /* ERROR_STATUS; after decoding it is text_capacity */
    enum tl_key_form key_form; /* REQUEST */
    uint32_t key_number;       /* REQUEST, unless the form is TL_KEY_TEXT */
    uint8_t priority;          /* REQUEST: 0 to TL_MAX_PRIORITY */
    const char *key;           /* REQUEST; after decoding it is text_capacity, or NULL where there is only a number */
    size_t key_bytes;          /* REQUEST; set by decoding */
    const uint8_t *data; /* DONE, inline: as many bytes as the meta-data says; after decoding, a part of the message */

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

/* COPIED is sent for each such part of lap_bytes. */
#define TL_LAP_PARTS 4

/* How many bytes tl_message_encode may write, which are at most TL_MESSAGE_BYTES, and the bytes of an inline value. */
uint32_t tl_message_most_bytes(const struct tl_message *message);

/* Writes the message, and returns its length. The text of an error is cut to TL_ERROR_MESSAGE_BYTES. */
uint32_t tl_message_encode(const struct tl_message *message, uint8_t *buffer);

/* Reads a message, and checks everything: lengths, flags, UTF-8, meta-data, status codes. Errors: TL_INVALID_ARGUMENT:
 * not a message, with the reason. TL_OUT_OF_RANGE: a shape whose bytes cannot be counted. */
enum tl_status tl_message_decode(const uint8_t *bytes, uint32_t len_bytes, struct tl_message *ret_message,
                                 struct tl_error *ret_error) TL_MUST_USE;

/* What a REQUEST says of its key, read before the message is decoded, which then checks it. */
struct tl_message_key {
    const char *text; /* [text_bytes], in the message; NULL: there is only a number */
    size_t text_bytes;
    uint32_t number;
};

/* Returns false when the message is no REQUEST, ends before its key does, or has an empty one. */
bool tl_message_peek_key(const uint8_t *bytes, uint32_t len_bytes, struct tl_message_key *ret_key);

/* Reads the handle of a DONE before it is decoded. Returns false when the message is none, or has no handle. */
bool tl_message_peek_done(const uint8_t *bytes, uint32_t len_bytes, uint32_t *ret_handle);

/* Returns "REQUEST", say, or "?" for a number that is no type. Static text. */
const char *tl_message_name(enum tl_message_type type);

/* A difference as the wire has it: small if the two numbers are close, whichever is greater. */
static inline uint64_t tl_difference(uint64_t number, uint64_t base)
{
    uint64_t difference = number - base;
    return difference >> 63 != 0 ? ~(difference << 1) : difference << 1;
}

static inline uint64_t tl_from_difference(uint64_t difference, uint64_t base)
{
    return base + ((difference & 1) != 0 ? ~(difference >> 1) : difference >> 1);
}

/* ----------------------------------------------------------------------------------------------------- batches -- */

/* The most bytes of a message. */
#define TL_MESSAGE_BYTES 1148
#define TL_BATCH_HEAD_BYTES 4
/* How much of a slot an inline value leaves to the rest of its message. */
#define TL_INLINE_HEAD_BYTES 256
/* The shortest slot that a peer may have. */
#define TL_LEAST_SLOT_BYTES (TL_BATCH_HEAD_BYTES + TL_MESSAGE_BYTES)

/* Writes the head of a batch, which the messages follow. consumed: how many slots the sender has given back since the
 * beginning, modulo 2^32. */
void tl_batch_encode_head(uint8_t *buffer, uint32_t consumed);

/* In a batch that begins with a message of more bytes, inline values of such messages stay where they are. */
#define TL_STAYING_BYTES 1024
/* Copies a batch out of memory that can change while it is read, so that what was checked stays as it was. Values that
 * stay are not copied, and lie at the same place of `batch`: their bytes are not checked, and are copied to their
 * destination next. */
void tl_batch_copy(uint8_t *to, const uint8_t *batch, uint32_t len_bytes);

/* A batch that is being read. */
struct tl_batch {
    const uint8_t *at;
    const uint8_t *end;
    uint32_t consumed;
};

/* Reads the head of a batch. Errors: TL_INVALID_ARGUMENT: there is no message in it. */
enum tl_status tl_batch_decode_head(const uint8_t *bytes, uint32_t len_bytes, struct tl_batch *ret_batch,
                                    struct tl_error *ret_error) TL_MUST_USE;
/* Returns whether the batch seems to have more than one message. */
bool tl_batch_has_many(const struct tl_batch *batch);
/* Finds the next message of the batch, for tl_message_decode, which refuses what is no message. Returns false when
 * there is none. */
bool tl_batch_next(struct tl_batch *batch, const uint8_t **ret_bytes, uint32_t *ret_len_bytes) TL_MUST_USE;

/* -------------------------------------------------------------------------------------------------- immediates -- */

/* A handle names a request of one connection. It is an index that is used again, and a generation that tells its uses
 * apart, so that a late answer is recognised. The three highest bits belong to the sender. */
#define TL_HANDLE_INDEX_BITS 20
#define TL_HANDLE_GENERATION_BITS 9
#define TL_MAX_REQUESTS ((UINT32_C(1) << TL_HANDLE_INDEX_BITS) - 1)
#define TL_IMMEDIATE_PROBE UINT32_MAX /* no request has this index, which is TL_MAX_REQUESTS */
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
    return handle & TL_MAX_REQUESTS;
}

#define TL_HANDLE_MASK (TL_IMMEDIATE_ON_DEVICE - 1)

#endif
