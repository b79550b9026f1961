// SPDX-License-Identifier: Apache-2.0
/*
 * Peers that lie about memory of devices, or break the protocol of values that are imported (gpu-ipc). What cannot be
 * imported is written by its owner; everything else costs at most the connection. Nothing is left behind.
 */
#include <fcntl.h>

#include "base/error.h"
#include "fakes/ipc_case.h"
#include "fakes/run_suite.h"

/* Sends a packet on the control socket of the owner. file is -1 where the kind has none. */
static void send_packet(uint32_t kind, uint64_t number, uint64_t len_bytes, int file)
{
    const struct local_memory_packet packet = {.kind = kind, .number = number, .len_bytes = len_bytes};
    ck_assert(local_send_counted(local_pair_of(owner->conn->pair), &packet, sizeof(packet), file));
}

/* ------------------------------------------------------------------------------------------------------ sources -- */

/* What an owner says of memory. Without a lie it lies at the beginning of a value of LARGE_BYTES. */
struct lie {
    uint64_t len_bytes;    /* in the packet */
    uint64_t offset_bytes; /* this and the following ones are in SOURCE */
    uint64_t number_more;  /* than that of the packet, modulo 2^64 */
    uint32_t missing_bytes;
    bool is_no_memory; /* the descriptor is one of a file */
    bool is_forgotten; /* before SOURCE names it */
    const char *reason;
};

static const struct lie lies[] = {
    {.len_bytes = LARGE_BYTES, .missing_bytes = 1, .reason = "not a descriptor of memory"},
    {.len_bytes = LARGE_BYTES, .number_more = 1, .reason = "has not shown this memory"},
    {.len_bytes = LARGE_BYTES, .number_more = UINT64_MAX, .reason = "has not shown this memory"}, /* number 0 */
    {.len_bytes = LARGE_BYTES, .number_more = LOCAL_MEMORIES, .reason = "has not shown this memory"},
    {.len_bytes = LARGE_BYTES, .is_forgotten = true, .reason = "has given it back"},
    {.len_bytes = 0, .reason = "lies beyond its memory"},
    {.len_bytes = LARGE_BYTES - 1, .reason = "lies beyond its memory"},
    {.len_bytes = LARGE_BYTES, .offset_bytes = 1, .reason = "lies beyond its memory"},
    {.len_bytes = LARGE_BYTES, .offset_bytes = LARGE_BYTES + 1, .reason = "lies beyond its memory"},
    {.len_bytes = LARGE_BYTES, .offset_bytes = UINT64_MAX - LARGE_BYTES + 1, .reason = "lies beyond its memory"},
    {.len_bytes = 2 * LARGE_BYTES, .reason = "mapping memory of another process failed"},
    {.len_bytes = LARGE_BYTES + 4096, .reason = "mapping memory of another process failed"},
    {.len_bytes = UINT64_C(1) << 63, .reason = "mapping memory of another process failed"},
    {.len_bytes = LARGE_BYTES, .is_no_memory = true, .reason = "mapping memory of another process failed"},
};
#define LIE_COUNT ((int)TL_ARRAY_COUNT(lies))

static const struct lie *lie;

static enum tl_status show_memory(struct tl_queue_pair *base, struct tl_device_memory *memory, int file,
                                  uint64_t offset_bytes, struct tl_descriptor *ret_descriptor,
                                  struct tl_error *ret_error)
{
    (void)memory;
    if (file < 0) return tl_error_set(ret_error, TL_NOT_FOUND, "the peer does not have this memory");
    uint64_t number = ++local_pair_of(base)->memories.last_shown;
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    send_packet(LOCAL_PACKET_MEMORY, number, lie->len_bytes, lie->is_no_memory ? null : file);
    close(null);
    if (lie->is_forgotten) send_packet(LOCAL_PACKET_FORGET, number, 0, -1);
    const struct local_memory_descriptor descriptor = {.number = number + lie->number_more,
                                                       .offset_bytes = offset_bytes + lie->offset_bytes};
    ret_descriptor->len_bytes = (uint8_t)(sizeof(descriptor) - lie->missing_bytes);
    memcpy(ret_descriptor->bytes, &descriptor, sizeof(descriptor));
    return TL_OK;
}

/* The owner writes the value instead, and the receiver says why. The next value is imported as any other. */
START_TEST(source_lies)
{
    open_pair();
    const struct tl_provider_ops *truth = owner->conn->pair->ops;
    struct tl_provider_ops liar = *truth;
    liar.show_memory = show_memory;
    lie = &lies[_i];
    owner->conn->pair->ops = &liar;
    engine_side_send(owner, "key", 1, value_on(gpu0, LARGE_BYTES, 1));
    start(gpu0, 1);
    expect(1, TL_PATH_GPU_PROXY);
    expect_reason(lie->reason);
    engine_ask_fini(&ask);
    owner->conn->pair->ops = truth;
    engine_side_send(owner, "key", 2, value_on(gpu0, LARGE_BYTES, 2));
    start(gpu0, 2);
    expect(2, TL_PATH_GPU_IPC);
    engine_ask_fini(&ask);
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- messages -- */

static const struct request *request_of(void)
{
    return ask.fetch.transport_state;
}

/* The owner sends a message that the source did not ask it for. */
static void say(enum tl_message_type type, enum tl_dtype dtype, uint64_t size_bytes)
{
    struct tl_message *message = conn_compose(owner->conn, type, request_of()->handle);
    message->has_meta_data = true;
    message->meta_data = (struct tl_meta_data){
        .dtype = dtype, .shape = {.rank = 1, .dims = {dtype == TL_STRING ? 1 : size_bytes}}, .size_bytes = size_bytes};
    message->destination.len_bytes = sizeof(struct local_memory_descriptor);
    conn_post_message(owner->conn, message, NULL);
    conn_post_batch(owner->conn);
    tl_queue_pair_doorbell(owner->conn->pair);
}

static void expect_protocol_error(const struct engine_side *side, const char *reason)
{
    RUN_UNTIL(side->closed_count > 0);
    ck_assert_uint_eq(side->closed_count, 1);
    ck_assert_msg(strstr(side->reason.message, reason) != NULL, "%s", side->reason.message);
    ck_assert_uint_eq(engine_side_stats(side).protocol_errors, 1);
}

/* A destination on the host, strings, and values without bytes are never read. */
START_TEST(source_that_is_not_allowed)
{
    static const struct {
        bool is_for_host;
        enum tl_dtype dtype;
        uint64_t size_bytes;
    } cases[] = {{true, TL_U8, LARGE_BYTES}, {false, TL_STRING, LARGE_BYTES}, {false, TL_U8, 0}};
    open_pair();
    start(cases[_i].is_for_host ? host : gpu0, 1);
    run_until_state(REQUEST_ASKED);
    say(TL_MESSAGE_SOURCE, cases[_i].dtype, cases[_i].size_bytes);
    run_until_done();
    ck_assert_int_eq(ask.result.code, TL_UNAVAILABLE);
    engine_ask_fini(&ask);
    run_for_a_while();
    expect_protocol_error(asker, "SOURCE for key, which the request does not allow");
}
END_TEST

/* An answer after SOURCE ends the connection; the receive ends with the copy, which writes into its destination. */
START_TEST(answer_after_source)
{
    static const enum tl_message_type types[] = {TL_MESSAGE_SOURCE, TL_MESSAGE_META_DATA_UPDATE};
    start_held(1);
    say(types[_i], TL_U8, LARGE_BYTES);
    run_for_a_while();
    ck_assert_uint_eq(engine_side_stats(asker).protocol_errors, 1);
    ck_assert_uint_eq(ask.done_count, 0);
    cuda->hold(NULL, false);
    run_until_done();
    ck_assert_int_eq(ask.result.code, TL_UNAVAILABLE);
    engine_ask_fini(&ask);
    run_for_a_while();
    expect_protocol_error(asker, "for key after its SOURCE");
    ck_assert(engine_side_has(owner, "key", 1));
}
END_TEST

/* ---------------------------------------------------------------------------------------- while the copy runs -- */

/* The peer forgets memory that is being read: its import stays until the copy is over, and no longer. */
START_TEST(forgotten_while_it_is_read)
{
    start_held(2);
    unsigned mappings = counts().mappings;
    send_packet(LOCAL_PACKET_FORGET, local_pair_of(owner->conn->pair)->memories.last_shown, 0, -1);
    run_for_a_while();
    ck_assert_uint_eq(counts().mappings, mappings);
    cuda->hold(NULL, false);
    expect(2, TL_PATH_GPU_IPC);
    ck_assert(tl_list_is_empty(&asker->conn->requests.placing.imports));
    engine_ask_fini(&ask);
    run_for_a_while(); /* the owner itself gives the memory back, which the receiver does not know any more */
    engine_side_send(owner, "key", 2, value_on(gpu0, LARGE_BYTES, 3));
    start(gpu0, 2);
    expect(3, TL_PATH_GPU_IPC);
    engine_ask_fini(&ask);
}
END_TEST

static void release_by_hand(void)
{
    static const struct tl_descriptor nowhere;
    conn_post_write(asker->conn, NULL, NULL, 0, &nowhere, 0, request_of()->handle, NULL);
    tl_queue_pair_doorbell(asker->conn->pair);
}

/* The receiver releases what it was not shown: the owner keeps the value, whose copy is under way. */
START_TEST(released_before_it_is_shown)
{
    open_pair();
    engine_side_send(owner, "key", 1, value_on(gpu0, SMALL_BYTES, 4));
    cuda->hold(NULL, true);
    start(gpu0, 1);
    run_until_state(REQUEST_ASKED);
    run_for_a_while();
    release_by_hand();
    run_for_a_while();
    cuda->hold(NULL, false);
    run_until_done();
    ck_assert_int_eq(ask.result.code, TL_UNAVAILABLE);
    engine_ask_fini(&ask);
    run_for_a_while();
    expect_protocol_error(owner, "a release of a source that was not shown");
    ck_assert(engine_side_has(owner, "key", 1));
}
END_TEST

/* The receiver releases what it still reads: the owner gives the memory back, of which the receiver has its mapping
 * until the copy is over. The second release costs the connection. */
START_TEST(released_while_it_is_read)
{
    start_held(5);
    release_by_hand();
    RUN_UNTIL(!engine_side_has(owner, "key", 1));
    run_for_a_while();
    ck_assert_uint_eq(ask.done_count, 0);
    cuda->hold(NULL, false);
    run_until_done();
    ck_assert(is_filled(ask.fetch.destination, 5));
    engine_ask_fini(&ask);
    run_for_a_while();
    expect_protocol_error(owner, "a release of a source that was not shown");
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("engine_ipc_hostile");
    TCase *tcase = tcase_create("engine_ipc_hostile");
    tcase_set_timeout(tcase, 60);
    tcase_add_checked_fixture(tcase, setup_ipc, teardown_ipc);
    tcase_add_loop_test(tcase, source_lies, 0, LIE_COUNT);
    tcase_add_loop_test(tcase, source_that_is_not_allowed, 0, 3);
    tcase_add_loop_test(tcase, answer_after_source, 0, 2);
    tcase_add_test(tcase, forgotten_while_it_is_read);
    tcase_add_test(tcase, released_before_it_is_shown);
    tcase_add_test(tcase, released_while_it_is_read);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
