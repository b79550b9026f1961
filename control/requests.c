// SPDX-License-Identifier: Apache-2.0
/* Requests of clients, read and checked. */
#include "control/requests.h"

#include "base/error.h"
#include "grpc/health/v1/health.pb-c.h"
#include "tensorlane/v1/cluster.pb-c.h"

enum tl_status tl_receive_request_read(grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                       struct tl_receive_request *ret_request, struct tl_error *ret_error)
{
    ProtobufCMessage *base;
    enum tl_status status =
        tl_wire_read_plain(&tensorlane__v1__receive_request__descriptor, message, arena, &base, ret_error);
    if (status != TL_OK) return status;
    const Tensorlane__V1__ReceiveRequest *request = (const Tensorlane__V1__ReceiveRequest *)base;
    status = tl_wire_text(request->key, 1, TL_MAX_KEY_BYTES, "key", ret_error);
    if (status != TL_OK) return status;
    *ret_request = (struct tl_receive_request){
        .key = request->key, .step = request->step, .wants_checksum = request->wants_checksum != 0};
    return TL_OK;
}

/* What only the first message of a Publish has. */
static enum tl_status read_publish_start(const Tensorlane__V1__PublishRequest *message,
                                         struct tl_publish_request *ret_request, struct tl_error *ret_error)
{
    enum tl_status status = tl_wire_text(message->key, 1, TL_MAX_KEY_BYTES, "key", ret_error);
    if (status != TL_OK) return status;
    status = tl_wire_to_meta_data(message->meta_data, &ret_request->meta_data, ret_error);
    if (status == TL_OK) status = tl_wire_to_annotations(message->annotations, &ret_request->annotations, ret_error);
    if (status != TL_OK) {
        tl_error_prefix(ret_error, "%s: ", message->key);
        return status;
    }
    ret_request->key = message->key;
    ret_request->step = message->step;
    ret_request->may_go_back = message->may_go_back != 0;
    ret_request->source =
        (struct tl_put_source){.incarnation = message->source_incarnation, .number = message->source_number};
    return TL_OK;
}

static enum tl_status read_publish_rest(const Tensorlane__V1__PublishRequest *message, struct tl_error *ret_error)
{
    if (message->key[0] == '\0' && message->step == 0 && message->meta_data == NULL && message->annotations == NULL)
        return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                        "key, step, meta-data and annotations stand in the first message only; publish each tensor "
                        "with a call of its own");
}

enum tl_status tl_publish_request_read(grpc_byte_buffer *message, struct tl_wire_arena *arena, bool is_first,
                                       struct tl_publish_request *ret_request, struct tl_error *ret_error)
{
    ProtobufCMessage *base;
    struct tl_wire_data data;
    enum tl_status status =
        tl_wire_read(&tensorlane__v1__publish_request__descriptor, message, arena, &base, &data, ret_error);
    if (status != TL_OK) return status;
    const Tensorlane__V1__PublishRequest *request = (const Tensorlane__V1__PublishRequest *)base;
    struct tl_publish_request result = {.has_checksum = request->has_checksum != 0, .checksum = request->checksum};
    status = is_first ? read_publish_start(request, &result, ret_error) : read_publish_rest(request, ret_error);
    if (status != TL_OK) {
        tl_wire_data_fini(&data);
        return status;
    }
    result.data = data;
    *ret_request = result;
    return TL_OK;
}

enum tl_status tl_withdraw_request_read(grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                        const char **ret_pattern, struct tl_error *ret_error)
{
    ProtobufCMessage *base;
    enum tl_status status =
        tl_wire_read_plain(&tensorlane__v1__withdraw_request__descriptor, message, arena, &base, ret_error);
    if (status != TL_OK) return status;
    const char *pattern = ((const Tensorlane__V1__WithdrawRequest *)base)->pattern;
    status = tl_wire_text(pattern, 1, TL_MAX_PATTERN_BYTES, "pattern", ret_error);
    if (status == TL_OK) *ret_pattern = pattern;
    return status;
}

enum tl_status tl_list_request_read(grpc_byte_buffer *message, struct tl_wire_arena *arena, const char **ret_pattern,
                                    struct tl_error *ret_error)
{
    ProtobufCMessage *base;
    enum tl_status status =
        tl_wire_read_plain(&tensorlane__v1__list_request__descriptor, message, arena, &base, ret_error);
    if (status != TL_OK) return status;
    const char *pattern = ((const Tensorlane__V1__ListRequest *)base)->pattern;
    status = tl_wire_text(pattern, 0, TL_MAX_PATTERN_BYTES, "pattern", ret_error);
    if (status == TL_OK) *ret_pattern = pattern;
    return status;
}

enum tl_status tl_identify_request_read(grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                        struct tl_error *ret_error)
{
    ProtobufCMessage *base;
    return tl_wire_read_plain(&tensorlane__v1__identify_request__descriptor, message, arena, &base, ret_error);
}

enum tl_status tl_probe_request_read(grpc_byte_buffer *message, struct tl_wire_arena *arena, struct tl_error *ret_error)
{
    ProtobufCMessage *base;
    return tl_wire_read_plain(&tensorlane__v1__probe_request__descriptor, message, arena, &base, ret_error);
}

enum tl_status tl_echo_request_read(grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                    struct tl_echo_request *ret_request, struct tl_error *ret_error)
{
    ProtobufCMessage *base;
    struct tl_wire_data data;
    enum tl_status status =
        tl_wire_read(&tensorlane__v1__echo_request__descriptor, message, arena, &base, &data, ret_error);
    if (status != TL_OK) return status;
    uint32_t answer_bytes = ((const Tensorlane__V1__EchoRequest *)base)->answer_bytes;
    if (answer_bytes > TL_MAX_ECHO_BYTES || data.left_bytes > TL_MAX_ECHO_BYTES) {
        tl_wire_data_fini(&data);
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "an echo has at most %d bytes of data each way",
                            TL_MAX_ECHO_BYTES);
    }
    *ret_request = (struct tl_echo_request){.answer_bytes = answer_bytes, .data = data};
    return TL_OK;
}

enum tl_status tl_health_request_read(grpc_byte_buffer *message, struct tl_wire_arena *arena, const char **ret_service,
                                      struct tl_error *ret_error)
{
    ProtobufCMessage *base;
    enum tl_status status =
        tl_wire_read_plain(&grpc__health__v1__health_check_request__descriptor, message, arena, &base, ret_error);
    if (status != TL_OK) return status;
    const char *service = ((const Grpc__Health__V1__HealthCheckRequest *)base)->service;
    status = tl_wire_text(service, 0, TL_MAX_SYMBOL_BYTES, "service", ret_error);
    if (status == TL_OK) *ret_service = service;
    return status;
}

/* The text of the question; NULL when it has none. */
static const char *reflection_text(const Grpc__Reflection__V1__ServerReflectionRequest *request)
{
    switch (request->message_request_case) {
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_BY_FILENAME:
        return request->file_by_filename;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_SYMBOL:
        return request->file_containing_symbol;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_EXTENSION:
        return request->file_containing_extension->containing_type;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_ALL_EXTENSION_NUMBERS_OF_TYPE:
        return request->all_extension_numbers_of_type;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_LIST_SERVICES:
        return request->list_services;
    default:
        return NULL;
    }
}

enum tl_status tl_reflection_request_read(grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                          Grpc__Reflection__V1__ServerReflectionRequest **ret_request,
                                          struct tl_error *ret_error)
{
    ProtobufCMessage *base;
    enum tl_status status = tl_wire_read_plain(&grpc__reflection__v1__server_reflection_request__descriptor, message,
                                               arena, &base, ret_error);
    if (status != TL_OK) return status;
    Grpc__Reflection__V1__ServerReflectionRequest *request = (Grpc__Reflection__V1__ServerReflectionRequest *)base;
    status = tl_wire_text(request->host, 0, TL_MAX_SYMBOL_BYTES, "host", ret_error);
    if (status == TL_OK) {
        status = tl_wire_text(reflection_text(request), 0, TL_MAX_SYMBOL_BYTES, "name that is asked for", ret_error);
    }
    if (status == TL_OK) *ret_request = request;
    return status;
}
