// SPDX-License-Identifier: Apache-2.0
/* Why there is no data connection: health and the log show the whole reason even when the table of reasons is full. */
#include <check.h>
#include <stdio.h>
#include <string.h>

#include <tensorlane/worker.h>

#include "base/log.h"
#include "base/reason.h"
#include "control/client.h"
#include "fakes/cluster.h"
#include "fakes/fake_transport.h"
#include "fakes/log_capture.h"
#include "fakes/run_suite.h"

#define REASON "no RDMA device: the slot is empty"

static void fill_the_table(void)
{
    char text[32];
    for (unsigned i = 0; i <= TL_MAX_REASONS; i++) {
        snprintf(text, sizeof(text), "reason%u", i);
        (void)tl_reason(text);
    }
}

/* Returns whether a peer's reason is there as health shows it. */
static bool is_described(const struct cluster *cluster, const char *part)
{
    struct tl_description description = {0};
    struct tl_error error;
    char address[64];
    bool is_found = false;
    snprintf(address, sizeof(address), "127.0.0.1:%u", cluster->ports[1]);
    const struct tl_call_options options = {
        .address = address, .connect_timeout_ns = CLUSTER_LONG, .rpc_timeout_ns = CLUSTER_LONG};
    ck_assert_int_eq(tl_client_identify(&options, &description, NULL, &error), TL_OK);
    for (size_t i = 0; i < description.peer_count; i++)
        is_found |= strstr(description.peers[i].reason, part) != NULL;
    tl_description_fini(&description);
    return is_found;
}

START_TEST(the_table_is_full)
{
    static struct cluster cluster;
    static struct fake_transport transport;
    struct tl_completion got;
    struct tl_error error;
    fill_the_table();
    cluster_init(&cluster, 2, NULL);
    fake_transport_init(&transport, &cluster);
    tl_log_configure(TL_LOG_WARN, TL_LOG_KEY_VALUE);
    log_capture_begin();
    transport.cards[0].is_missing = true;
    struct tl_cq *sent = cluster_cq();
    struct tl_worker *sender = fake_transport_open(&transport, 0, TL_PROGRESS_THREAD);
    struct tl_worker *receiver = fake_transport_open(&transport, 1, TL_PROGRESS_THREAD);
    struct tl_tensor *tensor = cluster_tensor(100000, 1);
    cluster_send(sender, "key", 1, tensor, sent);
    tl_tensor_put(tensor);
    enum tl_status status =
        tl_recv_wait(receiver, cluster_peer(receiver, 0), "key", 1, NULL, CLUSTER_LONG, &got, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    ck_assert_int_eq(got.path, TL_PATH_GRPC);
    ck_assert_str_eq(got.path_reason, "see the log");
    tl_tensor_put(got.tensor);
    cluster_expect(sent, TL_OK);
    ck_assert(is_described(&cluster, REASON));
    ck_assert(!is_described(&cluster, "see the log"));
    ck_assert_uint_ge(log_capture_count(REASON), 1);
    ck_assert_uint_eq(log_capture_count("see the log"), 0);
    cluster_close_all(&cluster);
    tl_cq_destroy(sent);
    fake_transport_fini(&transport);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("dataplane_reasons");
    TCase *tcase = tcase_create("dataplane_reasons");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, the_table_is_full);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
