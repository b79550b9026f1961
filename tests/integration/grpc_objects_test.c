// SPDX-License-Identifier: Apache-2.0
/* gRPC keeps nothing of a worker that has closed. gRPC itself counts its servers, channels and connections; its own
 * check at shutdown cannot run, because gRPC stays initialised. One channel stays as long as the process, so that gRPC
 * keeps its threads (control/grpc_start.c). */
#include <check.h>
#include <grpc/grpc.h>
#include <grpc/support/alloc.h>
#include <string.h>

#include "fakes/run_suite.h"
#include "tests/fakes/cluster.h"

static struct cluster cluster;

/* Returns how often an entry is in one of gRPC's lists, which is JSON. */
static unsigned count_entries(char *list, const char *entry)
{
    unsigned count = 0;
    ck_assert_ptr_nonnull(list);
    for (const char *place = list; (place = strstr(place, entry)) != NULL; place++)
        count++;
    gpr_free(list);
    return count;
}

static bool has_servers(void)
{
    return count_entries(grpc_channelz_get_servers(0), "serverId") > 0;
}

/* Returns the channels apart from the one that stays. */
static bool has_channels(void)
{
    unsigned kept = count_entries(grpc_channelz_get_top_channels(0), "\"target\":\"keeper\"");
    ck_assert_uint_le(kept, 1);
    return count_entries(grpc_channelz_get_top_channels(0), "channelId") > kept;
}

/* Two workers and a client move a tensor; then the workers are closed first, or the client. */
START_TEST(nothing_is_left_of_workers)
{
    for (unsigned round = 0; round < 3; round++) {
        cluster = (struct cluster){0};
        cluster_init(&cluster, 2, NULL);
        cluster_open_all(&cluster);
        struct tl_worker *client = cluster_open_client(&cluster);
        struct tl_tensor *tensor = cluster_tensor(100000, round);
        cluster_publish(cluster.workers[0], "key", 1, tensor);
        tl_tensor_put(cluster_recv_wait(cluster.workers[1], 0, "key", 1));
        tl_tensor_put(cluster_recv_wait(client, 0, "key", 1));
        tl_tensor_put(tensor);
        ck_assert(has_servers());
        ck_assert(has_channels());
        if (round == 1) tl_worker_close(client, 0);
        cluster_close_all(&cluster);
        if (round != 1) tl_worker_close(client, 0);
        CLUSTER_UNTIL(!has_servers() && !has_channels());
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("grpc_objects");
    TCase *tcase = tcase_create("grpc_objects");
    tcase_set_timeout(tcase, 100);
    tcase_add_test(tcase, nothing_is_left_of_workers);
    suite_add_tcase(suite, tcase);
    return run_suite_in_process(suite);
}
