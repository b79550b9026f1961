// SPDX-License-Identifier: Apache-2.0
/*
 * grpc.reflection.v1 and v1alpha: lists the services and messages of this server, for tools that do not know them.
 *
 * Happy path: each message of the stream is a question; the answer is the list of services, or the file that was asked
 * for (by its name, or by a symbol in it) together with all files it imports.
 *
 * Both versions are served because tools ask for either: grpcurl begins with v1, while grpc_cli (gRPC's own tool) and
 * evans know v1alpha only. The versions differ in the name of their package alone, so that one implementation serves
 * both and the second costs one registered method.
 *
 * Failure modes: a name that does not exist is an error inside the answer, and the stream goes on; a message that is no
 * question ends it with INVALID_ARGUMENT; a client that sends nothing for too long with DEADLINE_EXCEEDED. The
 * project's files have no extensions, so every question for one is answered with NOT_FOUND or an empty list.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "control/proto_symbols.h"
#include "control/reflection.h"
#include "control/service_call.h"

typedef Grpc__Reflection__V1__ServerReflectionRequest reflection_request;
typedef Grpc__Reflection__V1__ServerReflectionResponse reflection_response;

/* Names are "package.Service". */
#define MAX_SERVICE_BYTES 128

/* An answer while it is composed. */
struct answer {
    reflection_response response;
    Grpc__Reflection__V1__FileDescriptorResponse files;
    Grpc__Reflection__V1__ExtensionNumberResponse numbers;
    Grpc__Reflection__V1__ListServiceResponse services;
    Grpc__Reflection__V1__ErrorResponse error;
    char error_message[TL_MAX_SYMBOL_BYTES + 64];
    ProtobufCBinaryData *file_bytes;                      /* [tl_proto_file_count] */
    Grpc__Reflection__V1__ServiceResponse *service_items; /* [service_capacity] */
    Grpc__Reflection__V1__ServiceResponse **service_pointers;
    char (*service_names)[MAX_SERVICE_BYTES];
    size_t service_capacity;
};

static void answer_error(struct answer *answer, enum tl_status code, const char *what, const char *name)
{
    grpc__reflection__v1__error_response__init(&answer->error);
    snprintf(answer->error_message, sizeof(answer->error_message), "%s%s", what, name);
    answer->error.error_code = (int32_t)code;
    answer->error.error_message = answer->error_message;
    answer->response.message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_ERROR_RESPONSE;
    answer->response.error_response = &answer->error;
}

/* ------------------------------------------------------------------------------------------------------- files -- */

static bool has_file(const struct answer *answer, const struct tl_proto_file *file)
{
    for (size_t i = 0; i < answer->files.n_file_descriptor_proto; i++) {
        if (answer->file_bytes[i].data == file->bytes) return true;
    }
    return false;
}

/* Adds the file, then what it imports, each file once. */
static void add_file(void *context, const struct tl_proto_file *file)
{
    struct answer *answer = context;
    if (has_file(answer, file)) return;
    TL_CHECK(answer->files.n_file_descriptor_proto < tl_proto_file_count);
    answer->file_bytes[answer->files.n_file_descriptor_proto++] =
        (ProtobufCBinaryData){.len = file->len_bytes, .data = (uint8_t *)file->bytes};
    tl_proto_file_imports(file, add_file, answer);
}

static void answer_file(struct answer *answer, const struct tl_proto_file *file, const char *what, const char *name)
{
    if (file == NULL) {
        answer_error(answer, TL_NOT_FOUND, what, name);
        return;
    }
    grpc__reflection__v1__file_descriptor_response__init(&answer->files);
    add_file(answer, file);
    answer->files.file_descriptor_proto = answer->file_bytes;
    answer->response.message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_FILE_DESCRIPTOR_RESPONSE;
    answer->response.file_descriptor_response = &answer->files;
}

static void answer_extensions(struct answer *answer, const char *type)
{
    if (tl_proto_file_of_message(type) == NULL) {
        answer_error(answer, TL_NOT_FOUND, "there is no message ", type);
        return;
    }
    grpc__reflection__v1__extension_number_response__init(&answer->numbers);
    answer->numbers.base_type_name = (char *)type;
    answer->response.message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_ALL_EXTENSION_NUMBERS_RESPONSE;
    answer->response.all_extension_numbers_response = &answer->numbers;
}

/* ---------------------------------------------------------------------------------------------------- services -- */

static void count_service(void *context, struct tl_proto_text package, struct tl_proto_text service)
{
    (void)package;
    (void)service;
    ((struct answer *)context)->service_capacity++;
}

static void add_service(void *context, struct tl_proto_text package, struct tl_proto_text service)
{
    struct answer *answer = context;
    size_t i = answer->services.n_service++;
    snprintf(answer->service_names[i], MAX_SERVICE_BYTES, "%.*s.%.*s", (int)package.len_bytes, package.text,
             (int)service.len_bytes, service.text);
    grpc__reflection__v1__service_response__init(&answer->service_items[i]);
    answer->service_items[i].name = answer->service_names[i];
    answer->service_pointers[i] = &answer->service_items[i];
}

static void answer_services(struct answer *answer)
{
    grpc__reflection__v1__list_service_response__init(&answer->services);
    for (size_t i = 0; i < tl_proto_file_count; i++)
        tl_proto_file_services(&tl_proto_files[i], add_service, answer);
    answer->services.service = answer->service_pointers;
    answer->response.message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_LIST_SERVICES_RESPONSE;
    answer->response.list_services_response = &answer->services;
}

/* ------------------------------------------------------------------------------------------------------ answer -- */

static void answer_fini(struct answer *answer)
{
    free(answer->file_bytes);
    free(answer->service_items);
    free(answer->service_pointers);
    free(answer->service_names);
}

static bool answer_init(struct answer *answer)
{
    memset(answer, 0, sizeof(*answer));
    grpc__reflection__v1__server_reflection_response__init(&answer->response);
    for (size_t i = 0; i < tl_proto_file_count; i++)
        tl_proto_file_services(&tl_proto_files[i], count_service, answer);
    answer->file_bytes = calloc(tl_proto_file_count, sizeof(*answer->file_bytes));
    answer->service_items = calloc(answer->service_capacity, sizeof(*answer->service_items));
    answer->service_pointers = calloc(answer->service_capacity, sizeof(*answer->service_pointers));
    answer->service_names = calloc(answer->service_capacity, sizeof(*answer->service_names));
    if (answer->file_bytes != NULL && answer->service_items != NULL && answer->service_pointers != NULL &&
        answer->service_names != NULL) {
        return true;
    }
    answer_fini(answer);
    return false;
}

static void compose(struct answer *answer, const reflection_request *request)
{
    const char *name;
    switch (request->message_request_case) {
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_BY_FILENAME:
        name = request->file_by_filename;
        answer_file(answer, tl_proto_file_find(name), "there is no file ", name);
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_SYMBOL:
        name = request->file_containing_symbol;
        answer_file(answer, tl_proto_file_of_symbol(name), "there is no symbol ", name);
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_EXTENSION:
        name = request->file_containing_extension->containing_type;
        answer_error(answer, TL_NOT_FOUND, "there are no extensions of ", name);
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_ALL_EXTENSION_NUMBERS_OF_TYPE:
        answer_extensions(answer, request->all_extension_numbers_of_type);
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_LIST_SERVICES:
        answer_services(answer);
        break;
    default:
        answer_error(answer, TL_UNIMPLEMENTED, "a kind of request that this server does not know", "");
        break;
    }
}

enum tl_status tl_reflection_answer(grpc_byte_buffer *question, struct tl_wire_arena *arena,
                                    grpc_byte_buffer **ret_answer, struct tl_error *ret_error)
{
    reflection_request *request;
    enum tl_status status = tl_reflection_request_read(question, arena, &request, ret_error);
    if (status != TL_OK) return status;
    struct answer answer;
    grpc_byte_buffer *message = NULL;
    if (answer_init(&answer)) {
        answer.response.valid_host = request->host;
        answer.response.original_request = request;
        compose(&answer, request);
        message = tl_wire_write(&answer.response.base);
        answer_fini(&answer);
    }
    if (message == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the answer");
    *ret_answer = message;
    return TL_OK;
}

/* ----------------------------------------------------------------------------------------------------- service -- */

static void reflection_asked(struct tl_service_call *call, grpc_byte_buffer *message)
{
    grpc_byte_buffer *answer;
    struct tl_error error;
    if (tl_reflection_answer(message, call->control->arena, &answer, &error) != TL_OK) {
        tl_service_call_finish(call, &error);
        return;
    }
    tl_service_call_expect_progress(call);
    tl_service_call_send(call, answer);
}

static const struct tl_service_call_ops reflection_ops = {
    .size_bytes = sizeof(struct tl_service_call),
    .is_stream = true,
    .request = reflection_asked,
    .half_closed = tl_service_call_finish_ok,
    .sent = tl_service_call_read,
};

static void reflection_accept(void *control, struct tl_stream *stream)
{
    tl_service_call_accept(control, stream, &reflection_ops);
}

enum tl_status tl_reflection_service_add(struct tl_control *control, struct tl_error *ret_error)
{
    enum tl_status status =
        tl_rpc_server_add_method(control->server, "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
                                 TL_ACTION_LIST, reflection_accept, control, ret_error);
    if (status != TL_OK) return status;
    return tl_rpc_server_add_method(control->server, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                                    TL_ACTION_LIST, reflection_accept, control, ret_error);
}
