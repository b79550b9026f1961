// SPDX-License-Identifier: Apache-2.0
/*
 * What servers answer, read and checked, because a client may have called any server.
 *
 * All of them: Errors: TL_INTERNAL: not such a message, or a value that cannot be, naming it. TL_RESOURCE_EXHAUSTED: no
 * memory, or more than a client accepts.
 */
#ifndef CONTROL_RESPONSES_H
#define CONTROL_RESPONSES_H

#include "control/client.h"
#include "control/wire.h"

/* Returns the status of reading a response: bad bytes from a server are no argument of its client. Errors: those of
 * `status` with TL_INTERNAL for all but TL_RESOURCE_EXHAUSTED, in *error (may be NULL) as well. */
enum tl_status tl_response_status(enum tl_status status, struct tl_error *error) TL_MUST_USE;

/* The number that was answered, whatever it is. */
enum tl_status tl_health_response_read(grpc_byte_buffer *message, struct tl_wire_arena *arena, int *ret_health,
                                       struct tl_error *ret_error) TL_MUST_USE;

enum tl_status tl_withdraw_response_read(grpc_byte_buffer *message, struct tl_wire_arena *arena, uint64_t *ret_count,
                                         struct tl_error *ret_error) TL_MUST_USE;

/* What answered a Publish. */
struct tl_publish_response {
    uint64_t publication;
    enum tl_path path; /* how a fetched tensor has travelled */
    bool wants_data;   /* nothing is published, because the tensor cannot be fetched */
};

enum tl_status tl_publish_response_read(grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                        struct tl_publish_response *ret_response,
                                        struct tl_error *ret_error) TL_MUST_USE;

/* Ownership of *ret_description: tl_description_fini. */
enum tl_status tl_identify_response_read(grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                         struct tl_description *ret_description,
                                         struct tl_error *ret_error) TL_MUST_USE;

/* Ownership: free(ret_results->items). */
enum tl_status tl_probe_response_read(grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                      struct tl_probe_results *ret_results, struct tl_error *ret_error) TL_MUST_USE;

/* What answered an Echo. */
struct tl_echo_response {
    char name[TL_MAX_NAME_BYTES];
    char host_name[TL_HOST_NAME_BYTES];
    uint64_t incarnation;
    uint64_t process_id;
    int64_t unix_ns; /* 0: unknown */
    uint64_t checksum;
    uint64_t data_bytes;
};

enum tl_status tl_echo_response_read(grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                     struct tl_echo_response *ret_response, struct tl_error *ret_error) TL_MUST_USE;

#define TL_MAX_LISTED_COUNT 1000000
#define TL_MAX_LISTED_BYTES (UINT64_C(256) * 1024 * 1024)

/* A listing that grows message by message. Starts zeroed. */
struct tl_listing_builder {
    struct tl_listing listing; /* in the order it came; freed with tl_listing_fini */
    size_t capacity;
    uint64_t used_bytes; /* size of items, keys and annotations */
};

/* Adds the entries of one message; on error what was there stays. */
enum tl_status tl_list_response_read(grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                     struct tl_listing_builder *builder, struct tl_error *ret_error) TL_MUST_USE;

/* Sorts what was read by key and gives it away. */
void tl_listing_builder_finish(struct tl_listing_builder *builder, struct tl_listing *ret_listing);

#endif
