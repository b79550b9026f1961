// SPDX-License-Identifier: Apache-2.0
/* Answers of server reflection: files with their imports, each once, and lack of memory. The descriptors are those of
 * this test, because the project's own files import nothing. */
#include <check.h>

#include "fakes/fault_alloc.h"

#include "control/proto_symbols.c"
#include "control/reflection_service.c"
#include "fakes/run_suite.h"

/* FileDescriptorProto {name, package, dependency*, message*, service*}, written by hand. a imports b and c, both import
 * d, which imports a. */
#define FILE_A                                                                                                         \
    "\x0a\x01"                                                                                                         \
    "a\x12\x01p\x1a\x01"                                                                                               \
    "b\x1a\x01"                                                                                                        \
    "c\x22\x03\x0a\x01M\x32\x03\x0a\x01S"
#define FILE_B                                                                                                         \
    "\x0a\x01"                                                                                                         \
    "b\x1a\x01"                                                                                                        \
    "d\x22\x03\x0a\x01N"
#define FILE_C                                                                                                         \
    "\x0a\x01"                                                                                                         \
    "c\x1a\x01"                                                                                                        \
    "d\x1a\x07missing"
#define FILE_D                                                                                                         \
    "\x0a\x01"                                                                                                         \
    "d\x1a\x01"                                                                                                        \
    "a"
/* Fields that are no names, then a wrong length. */
#define FILE_DAMAGED "\x08\x01\x11________\x1d____\x22\x7f\x0a\x01X"

const struct tl_proto_file tl_proto_files[] = {
    {"a", (const unsigned char *)FILE_A, sizeof(FILE_A) - 1},
    {"b", (const unsigned char *)FILE_B, sizeof(FILE_B) - 1},
    {"c", (const unsigned char *)FILE_C, sizeof(FILE_C) - 1},
    {"d", (const unsigned char *)FILE_D, sizeof(FILE_D) - 1},
    {"damaged", (const unsigned char *)FILE_DAMAGED, sizeof(FILE_DAMAGED) - 1},
};
const size_t tl_proto_file_count = TL_ARRAY_COUNT(tl_proto_files);

static struct tl_wire_arena arena;
static struct tl_error error;

static void setup(void)
{
    ck_assert(tl_wire_arena_init(&arena, 65536, &error) == TL_OK);
}

static void teardown(void)
{
    tl_wire_arena_fini(&arena);
}

static reflection_response *answer_of(reflection_request *request)
{
    grpc_byte_buffer *question = tl_wire_write(&request->base);
    grpc_byte_buffer *answer;
    ck_assert_msg(tl_reflection_answer(question, &arena, &answer, &error) == TL_OK, "%s", error.message);
    ProtobufCMessage *message;
    struct tl_wire_data data;
    ck_assert(tl_wire_read(&grpc__reflection__v1__server_reflection_response__descriptor, answer, &arena, &message,
                           &data, &error) == TL_OK);
    tl_wire_data_fini(&data);
    grpc_byte_buffer_destroy(answer);
    grpc_byte_buffer_destroy(question);
    return (reflection_response *)message;
}

START_TEST(imports_come_once)
{
    reflection_request request = GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__INIT;
    request.message_request_case = GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_BY_FILENAME;
    request.file_by_filename = (char *)"a";
    reflection_response *response = answer_of(&request);
    ck_assert_int_eq(response->message_response_case,
                     GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_FILE_DESCRIPTOR_RESPONSE);
    const Grpc__Reflection__V1__FileDescriptorResponse *files = response->file_descriptor_response;
    static const size_t order[] = {0, 1, 3, 2};
    ck_assert_uint_eq(files->n_file_descriptor_proto, 4);
    for (size_t i = 0; i < 4; i++) {
        const struct tl_proto_file *file = &tl_proto_files[order[i]];
        ck_assert_uint_eq(files->file_descriptor_proto[i].len, file->len_bytes);
        ck_assert_mem_eq(files->file_descriptor_proto[i].data, file->bytes, file->len_bytes);
    }
}
END_TEST

START_TEST(symbols_without_package)
{
    ck_assert_ptr_eq(tl_proto_file_of_symbol("N"), &tl_proto_files[1]);
    ck_assert_ptr_eq(tl_proto_file_of_symbol("p.M"), &tl_proto_files[0]);
    ck_assert_ptr_eq(tl_proto_file_of_symbol("p.S"), &tl_proto_files[0]);
    ck_assert_ptr_eq(tl_proto_file_of_message("p.M"), &tl_proto_files[0]);
    ck_assert_ptr_null(tl_proto_file_of_message("p.S"));
    ck_assert_ptr_null(tl_proto_file_of_symbol("M"));
    ck_assert_ptr_null(tl_proto_file_of_symbol("p"));
    ck_assert_ptr_null(tl_proto_file_of_symbol("X"));
}
END_TEST

START_TEST(answers_without_memory)
{
    reflection_request request = GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__INIT;
    request.message_request_case = GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_LIST_SERVICES;
    request.list_services = (char *)"";
    grpc_byte_buffer *question = tl_wire_write(&request.base);
    unsigned number = 0;
    bool was_hit = true;
    while (was_hit) {
        grpc_byte_buffer *answer = NULL;
        fault_arm(++number);
        enum tl_status status = tl_reflection_answer(question, &arena, &answer, &error);
        was_hit = fault_was_hit();
        ck_assert_int_eq(status, was_hit ? TL_RESOURCE_EXHAUSTED : TL_OK);
        ck_assert_int_eq(answer == NULL, was_hit);
        grpc_byte_buffer_destroy(answer);
    }
    ck_assert_uint_eq(number, 1 + 4);
    grpc_byte_buffer_destroy(question);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("reflection");
    TCase *tcase = tcase_create("reflection");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, imports_come_once);
    tcase_add_test(tcase, symbols_without_package);
    tcase_add_test(tcase, answers_without_memory);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
