// SPDX-License-Identifier: Apache-2.0
/*
 * A peer that sends what a test wants: a queue pair on the right side of an engine pair (options.is_right_raw), from
 * which messages, bytes and writes leave as they are, even against the protocol. The left side is a real engine.
 */
#ifndef TESTS_FAKES_RAW_PEER_H
#define TESTS_FAKES_RAW_PEER_H

#include "dataplane/engine/message.h"
#include "fakes/engine_pair.h"

#define RAW_PEER_HEARD 64
#define RAW_PEER_BYTES 65536
#define RAW_PEER_REQUESTS 64 /* How many requests it takes at a time. */

/* How long its slots are, as it says in its pair address. */
extern uint32_t raw_peer_slot_bytes;
/* How many keys it keeps by number, as it says in its pair address. */
extern uint32_t raw_peer_key_count;

struct raw_peer {
    struct engine_pair *engines;
    struct tl_queue_pair *pair;
    uint64_t token;                          /* The engine's token, which we present. */
    struct tl_message heard[RAW_PEER_HEARD]; /* The latest messages, by their number modulo RAW_PEER_HEARD. */
    unsigned heard_count;
    uint32_t consumed;     /* How many batches and immediates have come; what is sent says so. */
    uint64_t heard_number; /* The latest REQUEST that has come had this number, */
    uint64_t heard_step;   /* and this step. */
    uint32_t heard_bytes;  /* How long it was without its descriptor. */
    uint64_t sent_number;  /* The latest REQUEST that was sent had this number; the next one is relative to it. */
    uint64_t sent_step;
    unsigned probe_count;
    unsigned immediate_count;
    uint32_t last_immediate;
    uint64_t written_bytes; /* Written by the engine, not counting the probe. */
    bool is_broken;
    bool is_drained;
    uint8_t *memory; /* [RAW_PEER_BYTES], in one region; the engine may write it all. */
    struct tl_region *region;
    struct tl_exposure exposure;
    struct tl_exposure source; /* The same memory, which the engine may read; under TL_KEYS_WINDOW. */
    bool has_source;
};

/* Connects the left side (the opener) with our queue pair; nothing is sent. */
void raw_peer_open(struct raw_peer *raw, struct engine_pair *engines);
/* Does everything that is right, until the engine is up. */
void raw_peer_shake_hands(struct raw_peer *raw);
/* Lets both sides work until nothing happens any more. */
void raw_peer_run(struct raw_peer *raw);
/* Destroys the queue pair, which is broken or gets broken. Call it before engine_pair_close. */
void raw_peer_close(struct raw_peer *raw);

/* Makes a message with this type and handle; the rest is zero. */
struct tl_message raw_peer_message(enum tl_message_type type, uint32_t handle);
/* Makes a correct HELLO. */
struct tl_message raw_peer_hello(struct raw_peer *raw);
/* Sends it in a slot of its own, with a true `consumed`. */
void raw_peer_send(struct raw_peer *raw, const struct tl_message *message);
/* Sends messages that fit into one slot. */
void raw_peer_send_batch(struct raw_peer *raw, const struct tl_message *messages, unsigned count);
/* Sends what a slot has. */
void raw_peer_send_bytes(struct raw_peer *raw, const void *bytes, uint32_t len_bytes);
/* Writes bytes of raw->memory. */
void raw_peer_write(struct raw_peer *raw, const struct tl_descriptor *destination, uint64_t offset_bytes,
                    uint64_t len_bytes, uint32_t immediate);
/* Sends the name of a file of at least so many bytes that the engine may map. */
struct tl_descriptor raw_peer_file(struct raw_peer *raw, uint64_t size_bytes);
/* Returns the latest message of this type, or NULL when none has come. */
const struct tl_message *raw_peer_heard(const struct raw_peer *raw, enum tl_message_type type);

#endif
