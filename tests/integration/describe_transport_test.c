// SPDX-License-Identifier: Apache-2.0
/* How a worker describes its data plane to a tool, and the effect of the variables of its environment. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "control/client.h"
#include "dataplane/verbs/verbs_internal.h"
#include "fakes/cluster.h"
#include "fakes/fake_transport.h"
#include "fakes/run_suite.h"

static struct cluster cluster;
static struct fake_transport fake;
static struct tl_description description;
static struct tl_error error;
static uint64_t seen_service_level;

static void prepare(const char *settings)
{
    cluster_init(&cluster, 2, settings);
    fake_transport_init(&fake, &cluster);
}

static void teardown(void)
{
    tl_description_fini(&description);
    cluster_close_all(&cluster);
    fake_transport_fini(&fake);
}

/* No kernel knows these cards, so the state of their port cannot be read. */
static enum tl_status list(void *context, const struct tl_settings *settings, const char *address,
                           struct tl_transport_candidate **ret_candidates, size_t *ret_count,
                           struct tl_error *ret_error)
{
    static struct tl_verbs_candidate cards[3];
    const struct fake_card *card = context;
    (void)ret_error;
    ck_assert_ptr_nonnull(address);
    seen_service_level = settings->verbs.service_level;
    *ret_count = 1 + card->spare_count;
    ck_assert_uint_le(*ret_count, 3);
    *ret_candidates = calloc(*ret_count, sizeof(**ret_candidates));
    ck_assert_ptr_nonnull(*ret_candidates);
    for (int i = 0; i < (int)*ret_count; i++) {
        struct tl_transport_candidate *candidate = &(*ret_candidates)[i];
        cards[i] = (struct tl_verbs_candidate){.order = i,
                                               .device = "no_such_card",
                                               .port = 2,
                                               .gid_index = 3 - i,
                                               .gid = "10.0.0.1",
                                               .gid_type = "RoCE v2",
                                               .interface = "eth9",
                                               .state = "active",
                                               .link_layer = "Ethernet",
                                               .mtu_bytes = 4096};
        candidate->detail = &cards[i];
        snprintf(candidate->device, sizeof(candidate->device), "no_such_card:2");
        snprintf(candidate->name, sizeof(candidate->name), "no_such_card:2 GID %d 10.0.0.1", 3 - i);
    }
    return TL_OK;
}

static enum tl_status open_without_memory(void *context, const struct tl_settings *settings, const char *address,
                                          unsigned order, struct tl_provider **ret_provider, struct tl_error *ret_error)
{
    (void)context;
    (void)settings;
    (void)address;
    ck_assert_uint_eq(order, 0);
    (void)ret_provider;
    return verbs_memlock_error(1 << 20, "the data plane", ret_error);
}

static void ask(void)
{
    char address[64];
    snprintf(address, sizeof(address), "127.0.0.1:%u", cluster.ports[0]);
    const struct tl_call_options options = {
        .address = address, .connect_timeout_ns = CLUSTER_LONG, .rpc_timeout_ns = CLUSTER_LONG};
    enum tl_status status = tl_client_identify(&options, &description, NULL, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
}

static void identify(void)
{
    fake_transport_open(&fake, 0, TL_PROGRESS_THREAD);
    ask();
}

static const struct tl_transport_state *transport(const char *name)
{
    for (size_t i = 0; i < description.transport_count; i++) {
        if (strcmp(description.transports[i].name, name) == 0) return &description.transports[i];
    }
    ck_abort_msg("no transport %s", name);
    return NULL;
}

START_TEST(a_card)
{
    prepare("\"verbs\": {\"mtu\": 1024}");
    fake.cards[0].source.list = list;
    identify();
    const struct tl_data_plane_description *data_plane = description.data_plane;
    ck_assert_ptr_nonnull(data_plane);
    ck_assert_str_eq(data_plane->device, "no_such_card");
    ck_assert_uint_eq(data_plane->port, 2);
    ck_assert_uint_eq(data_plane->gid_index, 3);
    ck_assert_str_eq(data_plane->gid, "10.0.0.1");
    ck_assert_str_eq(data_plane->gid_type, "RoCE v2");
    ck_assert_str_eq(data_plane->interface, "eth9");
    ck_assert_str_eq(data_plane->link_layer, "Ethernet");
    ck_assert_str_eq(data_plane->keys, "window");
    ck_assert_str_eq(data_plane->memlock, "");
    ck_assert_str_eq(data_plane->reason, "the only one of this test");
    ck_assert_str_eq(data_plane->passed_over, "");
    /* The state of the port from the start would be out of date here; the MTU is the smaller one. */
    ck_assert_str_eq(data_plane->port_state, "");
    ck_assert_uint_eq(data_plane->mtu_bytes, 1024);
    teardown();
}
END_TEST

START_TEST(a_card_that_nothing_is_known_of)
{
    prepare("\"verbs\": {\"keys\": \"region\"}");
    identify();
    ck_assert_ptr_nonnull(description.data_plane);
    ck_assert_str_eq(description.data_plane->device, fake.cards[0].provider->name);
    ck_assert_str_eq(description.data_plane->keys, "region");
    ck_assert_uint_eq(description.data_plane->mtu_bytes, 0);
    teardown();
}
END_TEST

/* Latency and rate are those between these two workers, not of another pair. */
START_TEST(latency_and_rate_of_a_pair)
{
    prepare("\"rdma\": \"require\", \"connect\": \"eager\"");
    struct tl_worker *other = fake_transport_open(&fake, 1, TL_PROGRESS_THREAD);
    identify();
    CLUSTER_UNTIL(strcmp(cluster_peer_info(other, 0).transport, "verbs") == 0 &&
                  strcmp(cluster_peer_info(cluster.workers[0], 1).transport, "verbs") == 0);
    ck_assert_uint_eq(description.peer_count, 2);
    tl_description_fini(&description);
    ask();
    ck_assert_uint_eq(description.peers[0].latency_ns, 0);
    ck_assert_uint_eq(description.peers[0].bytes_per_second, 0);
    ck_assert_uint_gt(description.peers[1].latency_ns, 0);
    ck_assert_uint_gt(description.peers[1].bytes_per_second, 0);
    ck_assert_uint_eq(description.peers[1].mtu_bytes, FAKE_MTU_BYTES);
    cluster_close(&cluster, 1);
    CLUSTER_UNTIL(strcmp(cluster_peer_info(cluster.workers[0], 1).transport, "verbs") != 0);
    tl_description_fini(&description);
    ask();
    ck_assert_uint_eq(description.peers[1].latency_ns, 0);
    ck_assert_uint_eq(description.peers[1].bytes_per_second, 0);
    ck_assert_uint_eq(description.peers[1].mtu_bytes, 0);
    teardown();
}
END_TEST

/* The card was taken out, or it has failed as a whole. */
START_TEST(a_card_that_is_lost)
{
    prepare(_i == 0 ? "\"connect\": \"eager\"" : "\"rdma\": \"require\", \"connect\": \"eager\"");
    struct tl_worker *other = fake_transport_open(&fake, 1, TL_PROGRESS_THREAD);
    identify();
    ck_assert(transport("verbs")->is_available);
    CLUSTER_UNTIL(strcmp(cluster_peer_info(other, 0).transport, "verbs") == 0);
    fake_provider_remove(fake.cards[0].provider);
    CLUSTER_UNTIL(strcmp(cluster_peer_info(other, 0).transport, "verbs") != 0);
    tl_description_fini(&description);
    ask();
    ck_assert(!transport("verbs")->is_available);
    const char *reason = transport("verbs")->reason;
    ck_assert_msg(strcmp(reason, "card0: the device is gone; start the worker anew to use it again") == 0, "%s",
                  reason);
    ck_assert_str_eq(transport("grpc")->reason, "in use for all peers");
    cluster_close(&cluster, 0);
    tl_description_fini(&description);
    identify();
    ck_assert(transport("verbs")->is_available);
    teardown();
}
END_TEST

START_TEST(no_card)
{
    prepare(NULL);
    fake.cards[0].is_missing = true;
    identify();
    ck_assert_ptr_nonnull(description.data_plane);
    ck_assert_str_eq(description.data_plane->device, "");
    ck_assert_str_eq(description.data_plane->memlock, "");
    ck_assert_str_eq(description.data_plane->keys, "");
    ck_assert(!transport("verbs")->is_available);
    ck_assert_str_eq(transport("verbs")->reason, "no RDMA device: the slot is empty");
    teardown();
}
END_TEST

/* These cards report that they work; the first two move no bytes, or wrong ones. */
START_TEST(a_card_that_was_not_the_first)
{
    prepare(_i == 0 ? "\"rdma\": \"require\"" : "\"verbs\": {\"keys\": \"region\"}");
    struct fake_card *card = &fake.cards[0];
    card->source.list = list;
    card->spare_count = 2;
    card->faults[0] = (struct fake_rule){.fault = FAKE_BREAK, .kinds = FAKE_WRITE, .times = FAKE_ALWAYS};
    card->faults[1] = (struct fake_rule){.fault = FAKE_CORRUPT, .kinds = FAKE_WRITE, .times = FAKE_ALWAYS};
    identify();
    ck_assert_str_eq(card->provider->name, "card0-2");
    ck_assert_uint_eq(description.data_plane->gid_index, 1);
    const char *passed_over = description.data_plane->passed_over;
    ck_assert_ptr_eq(strstr(passed_over, "no_such_card:2 GID 3 10.0.0.1: a probe write failed: queue pair "),
                     passed_over);
    ck_assert_ptr_nonnull(strstr(passed_over,
                                 "; no_such_card:2 GID 2 10.0.0.1: a probe write failed: it has delivered wrong "
                                 "bytes"));
    ck_assert(transport("verbs")->is_available);
    ck_assert_ptr_nonnull(
        strstr(transport("verbs")->reason, "card0-2: the only one of this test; passed over: no_such"));
    teardown();
}
END_TEST

/* Whether it reads is part of its state. */
START_TEST(a_card_that_does_not_read)
{
    prepare("\"protocol\": \"grpc+gdr\"");
    if (_i == 1) {
        fake.cards[0].faults[0] = (struct fake_rule){.fault = FAKE_BREAK, .kinds = FAKE_READ, .times = FAKE_ALWAYS};
    }
    identify();
    ck_assert(transport("verbs")->is_available);
    const char *reason = transport("verbs")->reason;
    ck_assert((strstr(reason, "; what it receives is read from its owner (grpc+gdr)") != NULL) == (_i == 0));
    ck_assert((strstr(reason, "; a probe read failed: ") != NULL) == (_i == 1));
    ck_assert((strstr(reason, ": owners write what it receives, in spite of grpc+gdr") != NULL) == (_i == 1));
    teardown();
}
END_TEST

START_TEST(no_card_that_works)
{
    prepare(NULL);
    struct fake_card *card = &fake.cards[0];
    card->source.list = list;
    card->spare_count = (unsigned)_i;
    for (unsigned i = 0; i < 2; i++)
        card->faults[i] = (struct fake_rule){.fault = FAKE_BREAK, .kinds = FAKE_MESSAGE, .times = FAKE_ALWAYS};
    identify();
    const char *reason = transport("verbs")->reason;
    ck_assert(!transport("verbs")->is_available);
    ck_assert_str_eq(description.data_plane->device, "");
    ck_assert_str_eq(description.data_plane->passed_over, "");
    /* Several values make a list. */
    ck_assert((strstr(reason, "no RDMA port can be used; no_such_card:2 GID 3 ") == reason) == (_i == 1));
    ck_assert((strstr(reason, "; no_such_card:2 GID 2 ") != NULL) == (_i == 1));
    ck_assert((strstr(reason, "no_such_card:2 GID 3 10.0.0.1: a probe write failed: ") == reason) == (_i == 0));
    teardown();
}
END_TEST

START_TEST(a_card_that_does_not_work_where_one_is_required)
{
    prepare("\"rdma\": \"require\"");
    fake.cards[0].faults[0] = (struct fake_rule){.fault = FAKE_CORRUPT, .kinds = FAKE_WRITE, .times = FAKE_ALWAYS};
    ck_assert_int_eq(fake_transport_try(&fake, 0, TL_PROGRESS_THREAD, &error), TL_DATA_LOSS);
    ck_assert_str_eq(error.message,
                     "rdma is \"require\", but no tensor can travel from here over verbs: a probe write failed: it has "
                     "delivered wrong bytes; repair that, or set rdma to \"prefer\", which allows gRPC");
    teardown();
}
END_TEST

/* What health shows is also what a worker says that does not start. */
START_TEST(a_card_without_windows)
{
    prepare(NULL);
    fake.cards[0].has_no_windows = true;
    identify();
    ck_assert(!transport("verbs")->is_available);
    ck_assert_msg(strstr(transport("verbs")->reason, "it has no memory windows; set verbs.keys to \"region\"") != NULL,
                  "%s", transport("verbs")->reason);
    teardown();
    prepare("\"rdma\": \"require\"");
    fake.cards[0].has_no_windows = true;
    ck_assert_int_eq(fake_transport_try(&fake, 0, TL_PROGRESS_THREAD, &error), TL_FAILED_PRECONDITION);
    ck_assert_msg(strstr(error.message, "it has no memory windows; set verbs.keys to \"region\"") != NULL, "%s",
                  error.message);
    teardown();
    prepare("\"rdma\": \"require\", \"verbs\": {\"keys\": \"region\"}");
    fake.cards[0].has_no_windows = true;
    identify();
    ck_assert(transport("verbs")->is_available);
    teardown();
}
END_TEST

/* The next card would lack it, too. */
START_TEST(too_little_locked_memory)
{
    prepare(NULL);
    fake.cards[0].spare_count = 1;
    fake.cards[0].source.open = open_without_memory;
    identify();
    ck_assert_ptr_nonnull(strstr(description.data_plane->memlock, "ulimit -l unlimited"));
    ck_assert_str_eq(description.data_plane->memlock, transport("verbs")->reason);
    teardown();
}
END_TEST

/* Only this transport is described as shared memory. */
START_TEST(shared_memory)
{
    prepare("\"local\": {\"socket_folder\": \"/tmp\"}");
    fake.has_local = true;
    identify();
    ck_assert(transport("local")->is_available && transport("verbs")->is_available);
    ck_assert_ptr_nonnull(strstr(transport("local")->reason, "shared memory with workers of this host; socket: /tmp;"));
    ck_assert_ptr_null(strstr(transport("verbs")->reason, "shared memory"));
    ck_assert_uint_gt(description.setting_count, 0);
    for (size_t i = 0; i < description.setting_count; i++)
        ck_assert_str_ne(description.settings[i].path, "local.socket_folder"); /* It matters to no other worker. */
    teardown();
}
END_TEST

START_TEST(none_is_wanted)
{
    prepare("\"rdma\": \"off\"");
    identify();
    ck_assert_ptr_null(description.data_plane);
    teardown();
}
END_TEST

START_TEST(variables_reach_the_card)
{
    prepare(NULL);
    fake.cards[0].source.list = list;
    setenv("RDMA_SL", "5", 1);
    identify();
    ck_assert_uint_eq(seen_service_level, 5);
    teardown();
}
END_TEST

START_TEST(wrong_variables_are_refused)
{
    prepare(NULL);
    setenv("RDMA_SL", "9", 1);
    ck_assert_int_eq(fake_transport_try(&fake, 0, TL_PROGRESS_THREAD, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "environment variable RDMA_SL: 9 is out of range"));
    teardown();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("describe_plane");
    TCase *tcase = tcase_create("describe_plane");
    tcase_set_timeout(tcase, 100);
    tcase_add_test(tcase, a_card);
    tcase_add_test(tcase, a_card_that_nothing_is_known_of);
    tcase_add_test(tcase, latency_and_rate_of_a_pair);
    tcase_add_loop_test(tcase, a_card_that_is_lost, 0, 2);
    tcase_add_test(tcase, no_card);
    tcase_add_loop_test(tcase, a_card_that_was_not_the_first, 0, 2);
    tcase_add_loop_test(tcase, a_card_that_does_not_read, 0, 2);
    tcase_add_loop_test(tcase, no_card_that_works, 0, 2);
    tcase_add_test(tcase, a_card_that_does_not_work_where_one_is_required);
    tcase_add_test(tcase, a_card_without_windows);
    tcase_add_test(tcase, too_little_locked_memory);
    tcase_add_test(tcase, shared_memory);
    tcase_add_test(tcase, none_is_wanted);
    tcase_add_test(tcase, variables_reach_the_card);
    tcase_add_test(tcase, wrong_variables_are_refused);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
