// SPDX-License-Identifier: Apache-2.0
/* The sentences that replace gRPC's messages. */
#include <check.h>
#include <stdio.h>

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
    {ALL "UNKNOWN: ipv4:10.0.0.1:4000: connect: Connection refused (111)",
     "ps-0:4000 refused the connection; is the worker started?"},
    {ALL "UNKNOWN: ipv4:10.0.0.1:4000: Failed to connect to remote host: connect: Connection refused (111)",
     "ps-0:4000 refused the connection; is the worker started?"},
    {"Received RST_STREAM with error code 11",
     "ps-0:4000 refused the call; does it get too many at once, or is its memory for messages used up?"},
    {ALL "UNKNOWN: ipv4:10.0.0.1:4000: connect: Connection timed out (110)",
     "ps-0:4000 did not take the connection in time; is the machine up, and is there a firewall in between?"},
    {ALL "UNKNOWN: ipv6:%5Bfd00::1%5D:4000: connect: No route to host (113)",
     "ps-0:4000 cannot be reached: No route to host; check the address and the network"},
    {"recvmsg: Connection reset by peer (104)", "ps-0:4000 reset the connection"},
    {"sendmsg: Broken pipe (32)", "ps-0:4000 reset the connection"},
    {"recvmsg: Permission denied (13)", "ps-0:4000: recvmsg: Permission denied"},
    {"sendmsg:Broken pipe", "ps-0:4000 reset the connection"},
    {"keepalive timeout", "ps-0:4000 has not answered for too long; is the machine up, and the process running?"},
    {"ping timeout", "ps-0:4000 has not answered for too long; is the machine up, and the process running?"},
    {"/job:ps/task:0 has too many calls (17)", "ps-0:4000: /job:ps/task:0 has too many calls (17)"},
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

static const struct {
    const char *given, *expected;
} wrapped[] = {
    {"Stream removed (Socket closed)", "Socket closed"},
    {"Stream removed (Deadline Exceeded) (Socket closed)", "Deadline Exceeded"},
    {"Stream removed (Endpoint read failed (recvmsg: Connection reset by peer (104)))",
     "recvmsg: Connection reset by peer (104)"},
    {"RST_STREAM (Received RST_STREAM with error code 11)", "Received RST_STREAM with error code 11"},
    {"Transport closed (Stream removed (GOAWAY received))", "GOAWAY received"},
    {"Stream removed (cut at the en", "cut at the en"},
    {"Stream removed (", ""},
    {"Stream removed", "Stream removed"},
    {"the worker said: Stream removed (x)", "the worker said: Stream removed (x)"},
    {"", ""},
};

START_TEST(what_the_current_core_writes_around_a_reason_is_taken_away)
{
    char text[128];
    snprintf(text, sizeof(text), "%s", wrapped[_i].given);
    tl_grpc_text_unwrap(text);
    ck_assert_str_eq(text, wrapped[_i].expected);
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
    tcase_add_loop_test(tcase, what_the_current_core_writes_around_a_reason_is_taken_away, 0,
                        (int)TL_ARRAY_COUNT(wrapped));
    tcase_add_test(tcase, the_address_in_a_text_is_found);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
