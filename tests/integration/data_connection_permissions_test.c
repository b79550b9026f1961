// SPDX-License-Identifier: Apache-2.0
/*
 * security.allow on a data connection: task 0 may read and task 1 may not. The link is task 0's, so it is allowed, and
 * the data connection over it carries requests both ways; each of them is asked for its caller's right.
 */
#include <check.h>
#include <stdio.h>
#include <string.h>

#include "fakes/certificates.h"
#include "fakes/cluster.h"
#include "fakes/run_suite.h"
#include "fakes/temp_folder.h"
#include "server/worker_internal.h"

#define BYTES 100000

static struct cluster cluster;
static struct tl_error error;

static void setup(void)
{
    static char settings[1024];
    struct authority authority;
    temp_folder_make();
    authority_init(&authority, "test authority", temp_path("ca.pem"));
    for (unsigned task = 0; task < 2; task++) {
        char uri[80], certificate[16], key[16];
        snprintf(uri, sizeof(uri), "URI:spiffe://test/job/node/task/%u", task);
        snprintf(certificate, sizeof(certificate), "node-%u.pem", task);
        snprintf(key, sizeof(key), "node-%u.key", task);
        authority_issue(&authority, &(struct certificate_kind){.names = uri}, temp_path(certificate), temp_path(key));
    }
    authority_fini(&authority);
    snprintf(settings, sizeof(settings),
             "\"security\": {\"tls\": {\"ca\": \"%s/ca.pem\", \"certificate\": \"%s/{name}.pem\","
             " \"key\": \"%s/{name}.key\"}, \"allow\": [{\"who\": [\"task:node:0\"], \"what\": [\"read\"]},"
             " {\"who\": [\"member\"], \"what\": [\"peers\"]}]}",
             temp_folder, temp_folder, temp_folder);
    cluster_init(&cluster, 2, settings);
    cluster.protocol = "grpc+local";
    cluster_open_all(&cluster);
}

static void teardown(void)
{
    cluster_close_all(&cluster);
    temp_folder_remove();
}

struct count {
    struct tl_command command;
    uint64_t received; /* messages over data connections */
};

static void run_count(struct tl_command *command)
{
    struct tl_engine_stats engine;
    struct tl_memory_stats memory;
    struct tl_reactor_stats reactor;
    tl_transports_get_stats(command->worker, &engine, &memory, &reactor);
    TL_CONTAINER_OF(command, struct count, command)->received = engine.messages_received;
}

static uint64_t messages_received(unsigned task)
{
    struct count count;
    tl_worker_run(cluster.workers[task], &count.command, run_count);
    return count.received;
}

/* Returns the status of a receive, which comes over the data connection if it comes. */
static enum tl_status receive(unsigned task, const char *key)
{
    struct tl_completion completion;
    tl_peer_id owner = cluster_peer(cluster.workers[task], 1 - task);
    enum tl_status status =
        tl_recv_wait(cluster.workers[task], owner, key, 1, NULL, TL_TIMEOUT_DEFAULT, &completion, &error);
    if (status == TL_OK) {
        ck_assert(cluster_tensor_is(completion.tensor, BYTES, task));
        ck_assert(completion.path == TL_PATH_BOUNCE || completion.path == TL_PATH_ZERO_COPY);
    }
    tl_tensor_put(completion.tensor);
    return status;
}

START_TEST(a_peer_without_read_gets_nothing_over_a_data_connection)
{
    for (unsigned task = 0; task < 2; task++) {
        struct tl_tensor *tensor = cluster_tensor(BYTES, 1 - task);
        cluster_publish(cluster.workers[task], "key", 1, tensor);
        tl_tensor_put(tensor);
    }
    ck_assert_int_eq(receive(0, "key"), TL_OK);
    uint64_t before = messages_received(0);
    ck_assert_int_eq(receive(1, "key"), TL_PERMISSION_DENIED);
    ck_assert_msg(strstr(error.message, "/job:node/task:1 may not read at /job:node/task:0") != NULL, "%s",
                  error.message);
    ck_assert_uint_gt(messages_received(0), before);
    /* What it does not know and what is not there are refused alike, and the connection stays. */
    ck_assert_int_eq(receive(1, "nothing"), TL_PERMISSION_DENIED);
    ck_assert_int_eq(receive(0, "key"), TL_OK);
    ck_assert_uint_eq(cluster_stats(cluster.workers[0]).protocol_errors, 0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("data_connection_permissions");
    TCase *tcase = tcase_create("data_connection_permissions");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_set_timeout(tcase, 100);
    tcase_add_test(tcase, a_peer_without_read_gets_nothing_over_a_data_connection);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
