// SPDX-License-Identifier: Apache-2.0
/* Answers of servers when memory runs out: the call fails and leaves nothing behind. (Invalid bytes are tried over a
 * connection, in tests/integration/client_test.c.) */
#include <check.h>

#include "fakes/fault_alloc.h"

#include "control/description.c"
#include "control/responses.c"
#include "fakes/run_suite.h"

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

static int64_t unix_ns = 5;

static grpc_byte_buffer *identify_response(void)
{
    Tensorlane__V1__TransportState transport = TENSORLANE__V1__TRANSPORT_STATE__INIT;
    Tensorlane__V1__TransportState *transports[] = {&transport};
    Tensorlane__V1__PeerState peer = TENSORLANE__V1__PEER_STATE__INIT;
    Tensorlane__V1__PeerState *peers[] = {&peer, &peer};
    Tensorlane__V1__Counter counter = TENSORLANE__V1__COUNTER__INIT;
    Tensorlane__V1__Counter *counters[] = {&counter};
    Tensorlane__V1__DataPlane data_plane = TENSORLANE__V1__DATA_PLANE__INIT;
    data_plane.device = (char *)"mlx5_0";
    Tensorlane__V1__IdentifyResponse response = TENSORLANE__V1__IDENTIFY_RESPONSE__INIT;
    Tensorlane__V1__Setting setting = TENSORLANE__V1__SETTING__INIT;
    Tensorlane__V1__Setting *settings[] = {&setting};
    char *listens[] = {(char *)"127.0.0.1:4000"};
    Tensorlane__V1__Trouble trouble = TENSORLANE__V1__TROUBLE__INIT;
    Tensorlane__V1__Trouble *troubles[] = {&trouble};
    trouble.breaks_transfers = 1;
    Tensorlane__V1__Gpu gpu = TENSORLANE__V1__GPU__INIT;
    Tensorlane__V1__Gpu *gpus[] = {&gpu};
    gpu.name = (char *)"gpu:1";
    gpu.is_kept_on = 1;
    response.n_gpus = 1;
    response.gpus = gpus;
    response.n_settings = 1;
    response.settings = settings;
    response.n_listens = 1;
    response.listens = listens;
    response.n_troubles = 1;
    response.troubles = troubles;
    response.host_name = (char *)"gpu-0";
    response.unix_ns = unix_ns;
    response.data_plane = &data_plane;
    response.n_transports = 1;
    response.transports = transports;
    response.n_peers = 2;
    response.peers = peers;
    response.n_counters = 1;
    response.counters = counters;
    return tl_wire_write(&response.base);
}

START_TEST(description_without_memory)
{
    grpc_byte_buffer *buffer = identify_response();
    unsigned number = 0;
    bool was_hit = true;
    while (was_hit) {
        struct tl_description description = {.task = 99};
        fault_arm(++number);
        enum tl_status status = tl_identify_response_read(buffer, &arena, &description, &error);
        was_hit = fault_was_hit();
        ck_assert_int_eq(status, was_hit ? TL_RESOURCE_EXHAUSTED : TL_OK);
        if (was_hit) {
            ck_assert_uint_eq(description.task, 99);
            ck_assert_int_eq(error.code, TL_RESOURCE_EXHAUSTED);
        } else {
            ck_assert_uint_eq(description.peer_count, 2);
            ck_assert_str_eq(description.peers[1].reason, "");
            ck_assert_str_eq(description.data_plane->device, "mlx5_0");
            ck_assert_str_eq(description.data_plane->keys, "");
            ck_assert_str_eq(description.host_name, "gpu-0");
            ck_assert_int_eq(description.unix_ns, unix_ns);
            ck_assert_str_eq(description.settings[0].path, "");
            ck_assert_str_eq(description.listens[0], "127.0.0.1:4000");
            ck_assert(description.troubles[0].breaks_transfers);
            ck_assert_str_eq(description.troubles[0].remedy, "");
            ck_assert_uint_eq(description.gpu_count, 1);
            ck_assert_str_eq(description.gpus[0].name, "gpu:1");
            ck_assert_str_eq(description.gpus[0].path, "");
            ck_assert(description.gpus[0].is_kept_on && !description.gpus[0].is_lost);
            tl_description_fini(&description);
        }
    }
    /* 5 texts of its own, 7 arrays, 2 texts of the transport, 2 x 6 of the peers, 1 of the counter, the data plane and
     * its 11 texts, 2 texts of the setting, 1 of the socket, 3 of the trouble, 7 of the GPU. */
    ck_assert_uint_eq(number, 1 + 5 + 7 + 2 + 12 + 1 + 12 + 2 + 1 + 3 + 7);
    grpc_byte_buffer_destroy(buffer);
}
END_TEST

/* A peer may send any number as its time. */
START_TEST(impossible_times)
{
    static const int64_t times[] = {INT64_MIN, -1, INT64_C(1) << 62, INT64_MAX};
    unix_ns = times[_i];
    grpc_byte_buffer *buffer = identify_response();
    struct tl_description description = {.unix_ns = 99};
    ck_assert_int_eq(tl_identify_response_read(buffer, &arena, &description, &error), TL_OK);
    ck_assert_int_eq(description.unix_ns, 0);
    tl_description_fini(&description);
    grpc_byte_buffer_destroy(buffer);
    Tensorlane__V1__EchoResponse response = TENSORLANE__V1__ECHO_RESPONSE__INIT;
    struct tl_echo_response echo = {.unix_ns = 99};
    response.unix_ns = unix_ns;
    buffer = tl_wire_write(&response.base);
    ck_assert_int_eq(tl_echo_response_read(buffer, &arena, &echo, &error), TL_OK);
    ck_assert_int_eq(echo.unix_ns, 0);
    grpc_byte_buffer_destroy(buffer);
}
END_TEST

START_TEST(listing_without_memory)
{
    Tensorlane__V1__MetaData meta_data = TENSORLANE__V1__META_DATA__INIT;
    meta_data.is_dead = 1;
    Tensorlane__V1__ListEntry entry = TENSORLANE__V1__LIST_ENTRY__INIT;
    entry.key = (char *)"k";
    entry.meta_data = &meta_data;
    Tensorlane__V1__ListEntry *entries[] = {&entry, &entry};
    Tensorlane__V1__ListResponse response = TENSORLANE__V1__LIST_RESPONSE__INIT;
    response.n_entries = 2;
    response.entries = entries;
    grpc_byte_buffer *buffer = tl_wire_write(&response.base);
    unsigned number = 0;
    bool was_hit = true;
    while (was_hit) {
        struct tl_listing_builder builder = {0};
        fault_arm(++number);
        enum tl_status status = tl_list_response_read(buffer, &arena, &builder, &error);
        was_hit = fault_was_hit();
        ck_assert_int_eq(status, was_hit ? TL_RESOURCE_EXHAUSTED : TL_OK);
        ck_assert_uint_le(builder.listing.count, 2);
        if (!was_hit) ck_assert_uint_eq(builder.listing.count, 2);
        tl_listing_fini(&builder.listing);
    }
    /* The annotations, the items, then a key each. */
    ck_assert_uint_eq(number, 1 + 4);
    grpc_byte_buffer_destroy(buffer);
}
END_TEST

START_TEST(listing_with_annotations)
{
    Tensorlane__V1__MetaData meta_data = TENSORLANE__V1__META_DATA__INIT;
    meta_data.is_dead = 1;
    Tensorlane__V1__Annotations__ItemsEntry item = TENSORLANE__V1__ANNOTATIONS__ITEMS_ENTRY__INIT;
    item.key = (char *)"format";
    item.value = (char *)"pt";
    Tensorlane__V1__Annotations__ItemsEntry *items[] = {&item, &item};
    Tensorlane__V1__Annotations empty = TENSORLANE__V1__ANNOTATIONS__INIT, map = TENSORLANE__V1__ANNOTATIONS__INIT;
    map.n_items = 1;
    map.items = items;
    Tensorlane__V1__Annotations *maps[] = {&empty, &map};
    Tensorlane__V1__ListEntry entry = TENSORLANE__V1__LIST_ENTRY__INIT;
    entry.key = (char *)"k";
    entry.meta_data = &meta_data;
    Tensorlane__V1__ListEntry *entries[] = {&entry};
    Tensorlane__V1__ListResponse response = TENSORLANE__V1__LIST_RESPONSE__INIT;
    response.n_entries = 1;
    response.entries = entries;
    response.n_annotations = 2;
    response.annotations = maps;
    for (unsigned i = 0; i <= 4; i++) {
        /* 3: there are only two; 4: a key occurs twice. */
        struct tl_listing_builder builder = {0};
        size_t count;
        entry.annotations = i;
        if (i == 4) map.n_items = 2;
        grpc_byte_buffer *buffer = tl_wire_write(&response.base);
        ck_assert_int_eq(tl_list_response_read(buffer, &arena, &builder, &error), i < 3 ? TL_OK : TL_INTERNAL);
        ck_assert_uint_eq(builder.listing.count, i < 3);
        if (i < 3) {
            const struct tl_annotation *found = tl_annotations_items(builder.listing.items[0].annotations, &count);
            ck_assert_uint_eq(count, i == 2);
            if (i == 2) ck_assert_str_eq(found[0].value, "pt");
        }
        tl_listing_fini(&builder.listing);
        grpc_byte_buffer_destroy(buffer);
    }
}
END_TEST

START_TEST(nothing_is_freed)
{
    struct tl_description description = {0};
    struct tl_listing listing = {0};
    tl_description_fini(&description);
    tl_listing_fini(&listing);
    ck_assert_ptr_null(description.peers);
    ck_assert_ptr_null(listing.items);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("responses");
    TCase *tcase = tcase_create("responses");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, description_without_memory);
    tcase_add_loop_test(tcase, impossible_times, 0, 4);
    tcase_add_test(tcase, listing_without_memory);
    tcase_add_test(tcase, listing_with_annotations);
    tcase_add_test(tcase, nothing_is_freed);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
