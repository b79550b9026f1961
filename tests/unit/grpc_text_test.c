// SPDX-License-Identifier: Apache-2.0
/* The sentences that replace gRPC's messages. */
#include <check.h>

#include "base/check.h"
#include "base/error.h"
#include "control/grpc_text.h"
#include "fakes/run_suite.h"

#define ALL "failed to connect to all addresses; last error: "

static const struct {
    const char *given, *expected;
} cases[] = {
    {ALL "UNKNOWN: ipv4:10.0.0.1:4000: Failed to connect to remote host: Connection refused",
     "ps-0:4000 refused the connection; is the worker started?"},
    {ALL "UNKNOWN: ipv6:[fd00::1]:4000: Failed to connect to remote host: No route to host",
     "ps-0:4000 cannot be reached: No route to host; check the address and the network"},
    {ALL "INTERNAL: ipv4:10.0.0.1:4000: Trying to connect an http1.x server",
     "ps-0:4000 accepts connections but does not speak gRPC (HTTP/2 without TLS); is it the port of another program?"},
    {ALL "UNKNOWN: ipv6:%5Bfd00::1%5D:4000: Failed to connect to remote host: Connection refused",
     "ps-0:4000 refused the connection; is the worker started?"},
    {ALL "UNAVAILABLE: ipv4:10.0.0.1:4000: Socket closed",
     "ps-0:4000 accepts connections and closes them at once; is it the port of another program?"},
    {ALL "UNKNOWN: something of a later version", "ps-0:4000 cannot be connected to: something of a later version"},
    {"Socket closed", "ps-0:4000 closed the connection"},
    {"recvmsg:Connection reset by peer", "ps-0:4000 reset the connection"},
    {"DNS resolution failed for ps-0:4000: no name",
     "ps-0:4000 cannot be resolved: ps-0:4000: no name; check the name, and the name service of this machine"},
    {"/job:ps/task:0 is shutting down", "ps-0:4000: /job:ps/task:0 is shutting down"},
    {"", "ps-0:4000: "},
};

START_TEST(texts_become_sentences_that_name_the_address)
{
    struct tl_error error;
    tl_error_set(&error, TL_UNAVAILABLE, "%s", cases[_i].given);
    tl_grpc_text_explain(&error, "ps-0:4000");
    ck_assert_str_eq(error.message, cases[_i].expected);
    ck_assert_int_eq(error.code, TL_UNAVAILABLE);
}
END_TEST

START_TEST(the_address_in_a_text_is_found)
{
    char buffer[24];
    ck_assert_str_eq(tl_grpc_text_address("ipv4:10.0.0.1:4000: Got goaway", buffer, sizeof(buffer)), "10.0.0.1:4000");
    ck_assert_str_eq(tl_grpc_text_address("ipv6:[::1]:4000: x", buffer, sizeof(buffer)), "[::1]:4000");
    ck_assert_str_eq(tl_grpc_text_address("ipv6:%5B::1%5D:4000: x", buffer, sizeof(buffer)), "[::1]:4000");
    ck_assert_str_eq(tl_grpc_text_address("ipv4:10.0.0.1:4000", buffer, sizeof(buffer)), "10.0.0.1:4000");
    ck_assert_str_eq(tl_grpc_text_address("transport:0x7f SERVER peer:ipv4:10.0.0.1:4000 Final GOAWAY sent.", buffer,
                                          sizeof(buffer)),
                     "10.0.0.1:4000");
    ck_assert_str_eq(tl_grpc_text_address("{\"peer\":\"ipv6:%5Bfd00::1%5D:4000\"}", buffer, sizeof(buffer)),
                     "[fd00::1]:4000");
    ck_assert_str_eq(tl_grpc_text_address("ipv4:10.0.0.1:4000", buffer, 13), "");
    ck_assert_str_eq(tl_grpc_text_address("ipv4:10.0.0.1:4000", buffer, 14), "10.0.0.1:4000");
    ck_assert_str_eq(tl_grpc_text_address("ipv4:", buffer, sizeof(buffer)), "");
    ck_assert_str_eq(tl_grpc_text_address("Error parsing metadata: error=x", buffer, sizeof(buffer)), "");
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("grpc_text");
    TCase *tcase = tcase_create("grpc_text");
    tcase_add_loop_test(tcase, texts_become_sentences_that_name_the_address, 0, (int)TL_ARRAY_COUNT(cases));
    tcase_add_test(tcase, the_address_in_a_text_is_found);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
