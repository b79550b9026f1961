// SPDX-License-Identifier: Apache-2.0
/*
 * What clients ask of the services, read from the wire and checked: whatever the bytes are, a reader either gives
 * values that the services may use as they are, or an error for the client.
 *
 * All of them: Errors: TL_INVALID_ARGUMENT: not such a message, or a value that cannot be, naming it. Ownership: what
 * is pointed to lies in the arena, until its next use.
 */
#ifndef CONTROL_REQUESTS_H
#define CONTROL_REQUESTS_H

#include <tensorlane/tensor.h>

#include "control/wire.h"
#include "grpc/reflection/v1/reflection.pb-c.h"
#include "tensor/transfer.h"

/* Longest pattern in Withdraw and List. */
/* A key, each of its bytes behind a backslash. */
#define TL_MAX_PATTERN_BYTES (2 * TL_MAX_KEY_BYTES)
/* Longest service name in a health check, and longest name in reflection. */
#define TL_MAX_SYMBOL_BYTES 512

struct tl_receive_request {
    const char *key;
    uint64_t step;
    bool wants_checksum;
};

enum tl_status tl_receive_request_read(grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                       struct tl_receive_request *ret_request, struct tl_error *ret_error) TL_MUST_USE;

struct tl_publish_request {
    const char *key; /* the first six fields come with the first message only */
    uint64_t step;
    bool may_go_back;
    struct tl_meta_data meta_data;
    struct tl_put_source source;
    struct tl_annotations *annotations; /* one reference, the caller's; NULL: none */
    bool has_checksum;
    uint64_t checksum;
    struct tl_wire_data data; /* to be ended with tl_wire_data_fini; the message must live until then */
};

/* Only the first message of a call has, and must have, key and meta-data. */
enum tl_status tl_publish_request_read(grpc_byte_buffer *message, struct tl_wire_arena *arena, bool is_first,
                                       struct tl_publish_request *ret_request, struct tl_error *ret_error) TL_MUST_USE;

enum tl_status tl_withdraw_request_read(grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                        const char **ret_pattern, struct tl_error *ret_error) TL_MUST_USE;

/* The pattern may be empty. */
enum tl_status tl_list_request_read(grpc_byte_buffer *message, struct tl_wire_arena *arena, const char **ret_pattern,
                                    struct tl_error *ret_error) TL_MUST_USE;

enum tl_status tl_identify_request_read(grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                        struct tl_error *ret_error) TL_MUST_USE;

enum tl_status tl_probe_request_read(grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                     struct tl_error *ret_error) TL_MUST_USE;

/* The most data that Echo takes and gives. */
#define TL_MAX_ECHO_BYTES 65536

struct tl_echo_request {
    uint32_t answer_bytes;
    struct tl_wire_data data; /* to be ended with tl_wire_data_fini; the message must live until then */
};

enum tl_status tl_echo_request_read(grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                    struct tl_echo_request *ret_request, struct tl_error *ret_error) TL_MUST_USE;

enum tl_status tl_health_request_read(grpc_byte_buffer *message, struct tl_wire_arena *arena, const char **ret_service,
                                      struct tl_error *ret_error) TL_MUST_USE;

/* The same for both versions of the protocol, whose messages are the same. */
enum tl_status tl_reflection_request_read(grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                          Grpc__Reflection__V1__ServerReflectionRequest **ret_request,
                                          struct tl_error *ret_error) TL_MUST_USE;

#endif
