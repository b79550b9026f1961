// SPDX-License-Identifier: Apache-2.0
/* The answer to Probe, also when it is too large. tests/integration/cli_health_test.py calls it. */
#include <check.h>
#include <stdio.h>

#include "control/responses.h"
#include "fakes/run_suite.h"

#undef fail /* check.h has a macro of this name */
#include "control/probe_service.c"

#define PEERS 1000

static struct tl_peer_probe peers[PEERS];
static struct tl_wire_arena arena;
static struct tl_error error;

/* Packs and reads the answer about the first of the peers. */
static struct tl_probe_results answer_about(size_t count)
{
    const struct tl_probe_results results = {.items = peers, .count = count};
    struct tl_probe_results ret_results = {0};
    grpc_byte_buffer *message = pack(&results);
    ck_assert_ptr_nonnull(message);
    ck_assert_uint_le(grpc_byte_buffer_length(message), TL_MAX_FRAME_HEAD_BYTES);
    ck_assert_int_eq(tl_probe_response_read(message, &arena, &ret_results, &error), TL_OK);
    ck_assert_uint_eq(ret_results.count, count);
    grpc_byte_buffer_destroy(message);
    return ret_results;
}

/* A reason is what tells a peer that was not judged from one that is well. */
START_TEST(too_many_failures)
{
    ck_assert_int_eq(tl_wire_arena_init(&arena, 4 << 20, &error), TL_OK);
    for (size_t i = 2; i < PEERS; i++) {
        snprintf(peers[i].stage, sizeof(peers[i].stage), "tcp");
        snprintf(peers[i].reason, sizeof(peers[i].reason), "%0500d", (int)i);
        snprintf(peers[i].remedy, sizeof(peers[i].remedy), "%0500d", (int)i);
    }
    peers[0].is_ok = peers[1].is_ok = true;
    snprintf(peers[1].reason, sizeof(peers[1].reason), "the time was over");
    struct tl_probe_results few = answer_about(3), all = answer_about(PEERS);
    ck_assert_str_eq(few.items[0].reason, "");
    ck_assert_str_eq(few.items[1].reason, "the time was over");
    ck_assert_uint_eq(strlen(few.items[2].reason), 500);
    ck_assert(all.items[0].is_ok && all.items[1].is_ok && !all.items[2].is_ok);
    ck_assert_str_eq(all.items[0].reason, "");
    ck_assert_str_eq(all.items[1].reason, "-");
    ck_assert_str_eq(all.items[2].reason, "");
    ck_assert_str_eq(all.items[2].remedy, "");
    ck_assert_str_eq(all.items[2].stage, "tcp");
    free(few.items);
    free(all.items);
    tl_wire_arena_fini(&arena);
}
END_TEST

START_TEST(a_reason_that_is_not_utf8_is_kept)
{
    ck_assert_int_eq(tl_wire_arena_init(&arena, 1 << 20, &error), TL_OK);
    peers[0] = (struct tl_peer_probe){.is_ok = true, .reason = "no file caf\xe9", .remedy = "make caf\xe9"};
    struct tl_probe_results one = answer_about(1);
    ck_assert_str_eq(one.items[0].reason, "no file caf?");
    ck_assert_str_eq(one.items[0].remedy, "make caf?");
    free(one.items);
    tl_wire_arena_fini(&arena);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("probe_service");
    TCase *tcase = tcase_create("probe_service");
    tcase_add_test(tcase, too_many_failures);
    tcase_add_test(tcase, a_reason_that_is_not_utf8_is_kept);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
