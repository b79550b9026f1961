// SPDX-License-Identifier: Apache-2.0
/* Peers that no file names: workers that belong to no cluster, find each other at run time, and are removed again. */
#include <check.h>
#include <inttypes.h>
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fakes/certificates.h"
#include "fakes/cluster.h"
#include "fakes/descriptors.h"
#include "fakes/run_suite.h"
#include "fakes/temp_folder.h"
#include "server/peers/peer_internal.h"
#include "server/transfers/operation_internal.h"

#define SETTINGS "{\"protocol\": \"%s\", \"timeouts\": {\"connect\": \"5s\"}, \"security\": %s}"

static const char *protocol = "grpc";
static const char *security = "{}";
static struct authority authority;
static struct tl_error error;
static struct tl_cq *cq;

static enum tl_status try_open(const char *address, const char *job, uint32_t task, struct tl_worker **ret_worker)
{
    char json[2048];
    snprintf(json, sizeof(json), SETTINGS, protocol, security);
    const struct tl_worker_options options = {
        .size_bytes = sizeof(options), .config_json = json, .address = address, .job = job, .task = task};
    return tl_worker_open(&options, ret_worker, &error);
}

static struct tl_worker *open_named(const char *address, const char *job, uint32_t task)
{
    struct tl_worker *worker = NULL;
    ck_assert_msg(try_open(address, job, task, &worker) == TL_OK, "%s", error.message);
    return worker;
}

static struct tl_worker *open_any(void)
{
    return open_named("127.0.0.1:0", NULL, 0);
}

static tl_peer_id add(struct tl_worker *worker, const char *address, const char *name, uint64_t incarnation)
{
    tl_peer_id peer = 0;
    ck_assert_msg(tl_worker_add_peer(worker, address, name, incarnation, &peer, &error) == TL_OK, "%s", error.message);
    ck_assert_uint_ne(peer, 0);
    return peer;
}

static void publish(struct tl_worker *worker, const char *key, unsigned seed)
{
    struct tl_tensor *tensor = cluster_tensor(1000, seed);
    cluster_publish(worker, key, 1, tensor);
    tl_tensor_put(tensor);
}

static void expect_received(struct tl_worker *worker, tl_peer_id peer, const char *key, unsigned seed)
{
    struct tl_completion completion;
    enum tl_status status = tl_recv_wait(worker, peer, key, 0, NULL, CLUSTER_LONG, &completion, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    ck_assert(cluster_tensor_is(completion.tensor, 1000, seed));
    tl_tensor_put(completion.tensor);
}

static struct tl_peer_info info_of(struct tl_worker *worker, tl_peer_id peer)
{
    struct tl_peer_info info = {.size_bytes = sizeof(info)};
    ck_assert_int_eq(tl_worker_peer_info(worker, peer, &info, &error), TL_OK);
    return info;
}

static void remove_peer(struct tl_worker *worker, tl_peer_id peer)
{
    ck_assert_msg(tl_worker_remove_peer(worker, peer, &error) == TL_OK, "%s", error.message);
}

static void setup(void)
{
    protocol = "grpc";
    security = "{}";
    cq = cluster_cq();
}

static void teardown(void)
{
    tl_cq_destroy(cq);
}

/* ------------------------------------------------------------------------------------------------ without a file -- */

static const char *const protocols[] = {"grpc", "grpc+local"};

START_TEST(two_workers_find_each_other)
{
    protocol = protocols[_i];
    struct tl_worker *owner = open_any(), *asker = open_any();
    ck_assert_ptr_nonnull(strstr(tl_worker_name(owner), "/job:peer-"));
    ck_assert_str_ne(tl_worker_name(owner), tl_worker_name(asker));
    ck_assert_uint_gt(tl_worker_port(owner), 0);
    char address[64];
    snprintf(address, sizeof(address), "127.0.0.1:%u", tl_worker_port(owner));
    ck_assert_str_eq(tl_worker_address(owner), address);

    tl_peer_id peer = add(asker, address, NULL, 0);
    ck_assert_str_eq(info_of(asker, peer).name, address);
    ck_assert_int_eq(info_of(asker, peer).state, TL_PEER_IDLE);
    publish(owner, "weights", 7);
    expect_received(asker, peer, "weights", 7);

    const struct tl_peer_info info = info_of(asker, peer);
    ck_assert_str_eq(info.name, tl_worker_name(owner));
    ck_assert_str_eq(info.address, address);
    ck_assert_int_eq(info.state, TL_PEER_UP);
    ck_assert_uint_eq(info.incarnation, tl_worker_incarnation(owner));
    tl_peer_id found = 0;
    ck_assert_int_eq(tl_worker_find_peer(asker, tl_worker_name(owner), &found, &error), TL_OK);
    ck_assert_uint_eq(found, peer);
    ck_assert_int_eq(tl_worker_find_peer(asker, tl_worker_name(asker), &found, &error), TL_OK);
    ck_assert_uint_ne(found, peer);
    if (_i == 1) CLUSTER_UNTIL(strcmp(info_of(asker, peer).transport, "local") == 0);
    tl_worker_close(asker, 0);
    tl_worker_close(owner, 0);
}
END_TEST

START_TEST(both_add_each_other)
{
    protocol = protocols[_i];
    struct tl_worker *a = open_named("127.0.0.1:0", "a", 0), *b = open_named("127.0.0.1:0", "b", 0);
    publish(a, "of a", 1);
    publish(b, "of b", 2);
    /* One of them knows the name of the other one. */
    tl_peer_id b_of_a = add(a, tl_worker_address(b), "/job:b/task:0", 0),
               a_of_b = add(b, tl_worker_address(a), NULL, 0);
    const tl_peer_id peers_of_a[] = {b_of_a}, peers_of_b[] = {a_of_b};
    for (unsigned i = 0; i < 20; i++) {
        expect_received(a, b_of_a, "of b", 2);
        expect_received(b, a_of_b, "of a", 1);
    }
    ck_assert_int_eq(tl_worker_wait_for_peers(a, peers_of_a, 1, 0, CLUSTER_LONG, &error), TL_OK);
    ck_assert_int_eq(tl_worker_wait_for_peers(b, peers_of_b, 1, 0, CLUSTER_LONG, &error), TL_OK);
    ck_assert_uint_eq(info_of(a, b_of_a).restart_count + info_of(b, a_of_b).restart_count, 0);
    ck_assert_uint_eq(cluster_stats(a).requests_retried + cluster_stats(b).requests_retried, 0);
    tl_worker_close(a, 0);
    tl_worker_close(b, 0);
}
END_TEST

START_TEST(a_member_of_a_cluster_and_one_of_none)
{
    struct cluster cluster;
    cluster_init(&cluster, 2, NULL);
    cluster_open_all(&cluster);
    struct tl_worker *alone = open_any();
    publish(alone, "alone", 3);
    publish(cluster.workers[1], "member", 4);
    char address[64];
    snprintf(address, sizeof(address), "127.0.0.1:%u", cluster.ports[1]);
    expect_received(cluster.workers[0], add(cluster.workers[0], tl_worker_address(alone), NULL, 0), "alone", 3);
    expect_received(alone, add(alone, address, "node:1", 0), "member", 4);
    /* A task of the configuration is returned as what it is. */
    ck_assert_uint_eq(add(cluster.workers[0], address, NULL, 0), cluster_peer(cluster.workers[0], 1));
    ck_assert_uint_eq(add(cluster.workers[0], address, "node:1", 0), cluster_peer(cluster.workers[0], 1));
    tl_peer_id none;
    ck_assert_int_eq(tl_worker_add_peer(cluster.workers[0], "127.0.0.1:9", "node:1", 0, &none, &error),
                     TL_ALREADY_EXISTS);
    ck_assert_int_eq(tl_worker_remove_peer(cluster.workers[0], cluster_peer(cluster.workers[0], 1), &error),
                     TL_FAILED_PRECONDITION);
    ck_assert_int_eq(tl_worker_remove_peer(cluster.workers[0], cluster_peer(cluster.workers[0], 0), &error),
                     TL_FAILED_PRECONDITION);
    tl_worker_close(alone, 0);
    cluster_close_all(&cluster);
}
END_TEST

START_TEST(a_client_of_no_cluster)
{
    protocol = protocols[_i];
    struct tl_worker *owner = open_any(), *client = NULL;
    const struct tl_worker_options options = {.size_bytes = sizeof(options),
                                              .address = "",
                                              .is_client = true,
                                              .config_json = _i == 0 ? NULL : "{\"protocol\": \"grpc+local\"}"};
    ck_assert_msg(tl_worker_open(&options, &client, &error) == TL_OK, "%s", error.message);
    ck_assert_str_eq(tl_worker_name(client), "");
    ck_assert_str_eq(tl_worker_address(client), "");
    ck_assert_uint_eq(tl_worker_port(client), 0);
    tl_peer_id peer = add(client, tl_worker_address(owner), _i == 0 ? NULL : tl_worker_name(owner), 0);
    publish(owner, "weights", 7);
    expect_received(client, peer, "weights", 7);
    struct tl_tensor *tensor = cluster_tensor(1000, 8);
    ck_assert_msg(tl_put_wait(client, peer, "weights", 2, tensor, NULL, CLUSTER_LONG, &error) == TL_OK, "%s",
                  error.message);
    tl_tensor_put(tensor);
    expect_received(client, peer, "weights", 8);
    tl_worker_close(client, 0);
    tl_worker_close(owner, 0);
}
END_TEST

START_TEST(what_is_wrong_is_refused)
{
    struct tl_worker *worker = NULL;
    tl_peer_id peer;
    static const char *const no_addresses[] = {"nowhere", "0.0.0.0:0", "[::]:1", "127.0.0.1:99999", ""};
    for (size_t i = 0; i < sizeof(no_addresses) / sizeof(no_addresses[0]); i++)
        ck_assert_int_eq(try_open(no_addresses[i], NULL, 0, &worker), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(try_open("127.0.0.1:0", "a/b", 0, &worker), TL_INVALID_ARGUMENT);
    const struct tl_worker_options client = {.size_bytes = sizeof(client), .address = "127.0.0.1:0", .is_client = true};
    ck_assert_int_eq(tl_worker_open(&client, &worker, &error), TL_INVALID_ARGUMENT);
    const struct tl_worker_options no_client = {.size_bytes = sizeof(no_client), .address = ""};
    ck_assert_int_eq(tl_worker_open(&no_client, &worker, &error), TL_INVALID_ARGUMENT);
    const struct tl_worker_options both = {.size_bytes = sizeof(both),
                                           .address = "127.0.0.1:0",
                                           .config_json = "{\"cluster\": {\"a\": [\"127.0.0.1:1\"]}}"};
    ck_assert_int_eq(tl_worker_open(&both, &worker, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "belongs to no cluster"));

    worker = open_any();
    ck_assert_int_eq(tl_worker_add_peer(worker, NULL, NULL, 0, &peer, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_worker_add_peer(worker, "127.0.0.1:0", NULL, 0, &peer, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_worker_add_peer(worker, "127.0.0.1:9", "no name", 0, &peer, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_worker_remove_peer(worker, 12345, &error), TL_NOT_FOUND);
    /* The worker itself is no other process, and not the one that was there before it. */
    ck_assert_int_eq(tl_worker_find_peer(worker, tl_worker_name(worker), &peer, &error), TL_OK);
    ck_assert_uint_eq(add(worker, tl_worker_address(worker), NULL, tl_worker_incarnation(worker)), peer);
    ck_assert_int_eq(
        tl_worker_add_peer(worker, tl_worker_address(worker), NULL, tl_worker_incarnation(worker) + 1, &peer, &error),
        TL_UNAVAILABLE);
    peer = add(worker, "127.0.0.1:9", "ps:0", 0);
    ck_assert_uint_eq(add(worker, "127.0.0.1:9", "/job:ps/task:0", 0), peer);
    ck_assert_int_eq(tl_worker_add_peer(worker, "127.0.0.1:8", "ps:0", 0, &peer, &error), TL_ALREADY_EXISTS);
    tl_worker_close(worker, 0);
}
END_TEST

static bool fails_with(struct tl_worker *worker, tl_peer_id peer, const char *reason)
{
    struct tl_completion completion;
    ck_assert_int_eq(tl_recv_wait(worker, peer, "weights", 0, NULL, CLUSTER_SECOND / 2, &completion, &error),
                     TL_DEADLINE_EXCEEDED);
    return strstr(error.message, reason) != NULL;
}

/* A receive says what was wrong with the peer when the first attempt at a link has ended. */
static void expect_refused(struct tl_worker *worker, tl_peer_id peer, const char *reason)
{
    CLUSTER_UNTIL(fails_with(worker, peer, reason));
}

START_TEST(another_name_answers)
{
    struct tl_worker *owner = open_named("127.0.0.1:0", "owner", 0), *asker = open_any();
    publish(owner, "weights", 1);
    tl_peer_id peer = add(asker, tl_worker_address(owner), "/job:other/task:0", 0);
    expect_refused(asker, peer, "/job:owner/task:0");
    ck_assert_ptr_nonnull(strstr(error.message, "/job:other/task:0"));
    tl_worker_close(asker, 0);
    tl_worker_close(owner, 0);
}
END_TEST

static const char *readers = "\"any\"";

static struct tl_worker *open_certified(const char *name, const char *text)
{
    static char settings[1024];
    char certificate[256], key[256];
    snprintf(certificate, sizeof(certificate), "%s/%s.pem", temp_folder, name);
    snprintf(key, sizeof(key), "%s/%s.key", temp_folder, name);
    const struct certificate_kind kind = {.names = text};
    (void)authority_issue(&authority, &kind, certificate, key);
    snprintf(settings, sizeof(settings),
             "{\"tls\": {\"ca\": \"%s/ca.pem\", \"certificate\": \"%s\", \"key\": \"%s\"}, "
             "\"allow\": [{\"who\": [%s], \"what\": [\"read\"]}]}",
             temp_folder, certificate, key, readers);
    security = settings;
    struct tl_worker *worker = NULL;
    (void)!try_open("127.0.0.1:0", NULL, 0, &worker);
    return worker;
}

START_TEST(certificates_name_them)
{
    protocol = protocols[_i];
    temp_folder_make();
    authority_init(&authority, "the authority", temp_path("ca.pem"));
    ck_assert_ptr_null(open_certified("client", "URI:spiffe://test/client/ann"));
    ck_assert_int_eq(error.code, TL_INVALID_ARGUMENT);
    struct tl_worker *owner = open_certified("owner", "URI:spiffe://test/job/trainer/task/3");
    struct tl_worker *asker = open_certified("asker", "URI:spiffe://test/job/rollout/task/0");
    ck_assert_msg(owner != NULL && asker != NULL, "%s", error.message);
    ck_assert_str_eq(tl_worker_name(owner), "/job:trainer/task:3");
    publish(owner, "weights", 9);
    tl_peer_id any = add(asker, tl_worker_address(owner), NULL, 0);
    expect_received(asker, any, "weights", 9);
    ck_assert_str_eq(info_of(asker, any).name, "/job:trainer/task:3");
    expect_received(asker, add(asker, tl_worker_address(owner), "trainer:3", 0), "weights", 9);
    tl_peer_id wrong = add(asker, tl_worker_address(owner), "trainer:4", 0);
    expect_refused(asker, wrong, "is for /job:trainer/task:3");
    tl_worker_close(asker, 0);
    tl_worker_close(owner, 0);
    authority_fini(&authority);
    temp_folder_remove();
}
END_TEST

/* A worker of another trust domain is called by its whole URI, whatever it calls itself. */
START_TEST(trust_domains_that_allow_names)
{
    protocol = protocols[_i];
    temp_folder_make();
    authority_init(&authority, "the authority", temp_path("ca.pem"));
    readers = "\"trust-domain:b.org\"";
    struct tl_worker *owner = open_certified("owner", "URI:spiffe://a.org/job/trainer/task/3");
    readers = "\"trust-domain:a.org\"";
    struct tl_worker *asker = open_certified("asker", "URI:spiffe://b.org/job/trainer/task/3");
    readers = "\"trust-domain:c.org\"";
    struct tl_worker *stranger = open_certified("stranger", "URI:spiffe://b.org/job/trainer/task/4");
    readers = "\"any\"";
    ck_assert_msg(owner != NULL && asker != NULL && stranger != NULL, "%s", error.message);
    publish(owner, "weights", 9);
    publish(asker, "gradients", 8);
    tl_peer_id peer = add(asker, tl_worker_address(owner), NULL, 0);
    expect_received(asker, peer, "weights", 9);
    ck_assert_str_eq(info_of(asker, peer).name, "spiffe://a.org/job/trainer/task/3");
    expect_received(owner, add(owner, tl_worker_address(asker), NULL, 0), "gradients", 8);
    tl_peer_id named = add(asker, tl_worker_address(owner), "trainer:5", 0);
    expect_refused(asker, named, "is for spiffe://a.org/job/trainer/task/3, and not for /job:trainer/task:5");
    tl_peer_id refused = add(stranger, tl_worker_address(owner), NULL, 0);
    expect_refused(stranger, refused, "trust domain \"a.org\"");
    tl_worker_close(stranger, 0);
    tl_worker_close(asker, 0);
    tl_worker_close(owner, 0);
    authority_fini(&authority);
    temp_folder_remove();
}
END_TEST

/* One task of another trust domain may read, and no other one there. */
START_TEST(a_foreign_task_that_is_named)
{
    protocol = protocols[_i];
    temp_folder_make();
    authority_init(&authority, "the authority", temp_path("ca.pem"));
    readers = "\"spiffe://b.org/job/trainer/task/3\"";
    struct tl_worker *owner = open_certified("owner", "URI:spiffe://a.org/job/trainer/task/3");
    readers = "\"spiffe://a.org/job/trainer/task/3\"";
    ck_assert_ptr_null(open_certified("own", "URI:spiffe://a.org/job/trainer/task/4"));
    ck_assert_int_eq(error.code, TL_INVALID_ARGUMENT);
    ck_assert_str_eq(error.message, "security.allow names spiffe://a.org/job/trainer/task/3, a task of this trust "
                                    "domain; write it as \"task:JOB:INDEX\"");
    struct tl_worker *asker = open_certified("asker", "URI:spiffe://b.org/job/trainer/task/3");
    struct tl_worker *stranger = open_certified("stranger", "URI:spiffe://b.org/job/trainer/task/4");
    readers = "\"any\"";
    ck_assert_msg(owner != NULL && asker != NULL && stranger != NULL, "%s", error.message);
    publish(owner, "weights", 9);
    expect_received(asker, add(asker, tl_worker_address(owner), NULL, 0), "weights", 9);
    tl_peer_id refused = add(stranger, tl_worker_address(owner), NULL, 0);
    expect_refused(stranger, refused, "it does not accept our certificate");
    tl_worker_close(stranger, 0);
    tl_worker_close(asker, 0);
    tl_worker_close(owner, 0);
    authority_fini(&authority);
    temp_folder_remove();
}
END_TEST

/* -------------------------------------------------------------------------------------------------- incarnations -- */

static void expect_gone(struct tl_worker *asker, tl_peer_id peer)
{
    struct tl_completion completion;
    ck_assert_int_eq(tl_recv_wait(asker, peer, "weights", 0, NULL, CLUSTER_LONG, &completion, &error), TL_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(error.message, "is gone"));
}

START_TEST(another_process_is_not_taken_for_the_one_that_is_meant)
{
    char text[64];
    tl_peer_id none;
    struct tl_worker *owner = open_any(), *asker = open_any();
    publish(owner, "weights", 1);
    tl_peer_id right = add(asker, tl_worker_address(owner), NULL, tl_worker_incarnation(owner));
    tl_peer_id wrong = add(asker, tl_worker_address(owner), NULL, tl_worker_incarnation(owner) + 1);
    ck_assert_uint_ne(right, wrong);
    expect_received(asker, right, "weights", 1);
    expect_gone(asker, wrong);
    expect_gone(asker, wrong);
    snprintf(text, sizeof(text), "incarnation 0x%016" PRIx64 " at ", tl_worker_incarnation(owner) + 1);
    ck_assert_msg(strstr(error.message, text) != NULL, "%s", error.message);
    snprintf(text, sizeof(text), "incarnation 0x%016" PRIx64 " answers", tl_worker_incarnation(owner));
    ck_assert_msg(strstr(error.message, text) != NULL, "%s", error.message);
    ck_assert_int_eq(tl_worker_add_peer(asker, tl_worker_address(asker), NULL, 7, &none, &error), TL_UNAVAILABLE);
    ck_assert_msg(strstr(error.message, "incarnation 0x0000000000000007 at") != NULL, "%s", error.message);
    ck_assert_int_eq(tl_worker_wait_for_peers(asker, &wrong, 1, 0, CLUSTER_LONG, &error), TL_UNAVAILABLE);
    const tl_peer_id both[] = {wrong, right};
    ck_assert_int_eq(tl_worker_wait_for_peers(asker, both, 2, 1, CLUSTER_LONG, &error), TL_OK);
    remove_peer(asker, wrong);
    expect_received(asker, right, "weights", 1);
    tl_worker_close(asker, 0);
    tl_worker_close(owner, 0);
}
END_TEST

START_TEST(a_process_restarts)
{
    char address[64];
    snprintf(address, sizeof(address), "127.0.0.1:%u", cluster_free_port());
    struct tl_worker *owner = open_named(address, "owner", 0), *asker = open_any();
    publish(owner, "weights", 1);
    tl_peer_id any = add(asker, address, NULL, 0), first = add(asker, address, NULL, tl_worker_incarnation(owner));
    expect_received(asker, any, "weights", 1);
    expect_received(asker, first, "weights", 1);
    tl_worker_close(owner, 0);
    owner = open_named(address, "owner", 0);
    publish(owner, "weights", 2);
    expect_received(asker, any, "weights", 2);
    ck_assert_uint_eq(info_of(asker, any).restart_count, 1);
    expect_gone(asker, first);
    tl_worker_close(asker, 0);
    tl_worker_close(owner, 0);
}
END_TEST

#define NAME_A "/job:a/task:0"
#define NAME_B "/job:longer_than_a/task:1"

struct rename {
    struct tl_command command;
    struct tl_peer *peer;
    const char *name;
};

static void run_rename(struct tl_command *command)
{
    const struct rename *rename = TL_CONTAINER_OF(command, struct rename, command);
    struct tl_identity who = {.incarnation = 1};
    snprintf(who.name, sizeof(who.name), "%s", rename->name);
    ck_assert(tl_added_peer_knows(rename->peer, &who, &error));
}

struct refusing {
    struct tl_op op;
    struct tl_meta_data meta_data;
    bool is_over; /* atomic */
    size_t refused_count;
    size_t torn_count;
};

/* As the thread of a reactor does, when a value does not fit its destination. */
static void *refuse_values(void *context)
{
    struct refusing *refusing = context;
    struct tl_error refusal;
    while (!__atomic_load_n(&refusing->is_over, __ATOMIC_RELAXED)) {
        if (op_check_destination(&refusing->op, &refusing->meta_data, &refusal) == TL_OK) continue;
        refusing->refused_count++;
        refusing->torn_count +=
            strstr(refusal.message, "of " NAME_A " is") == NULL && strstr(refusal.message, "of " NAME_B " is") == NULL;
    }
    return NULL;
}

/* Other processes answer at the address of a peer that was added without a name, while values of the former ones still
 * arrive. */
START_TEST(a_peer_gets_other_names)
{
    struct tl_worker *asker = open_any();
    struct rename rename = {.peer = tl_peer_acquire(asker, add(asker, "127.0.0.1:9", NULL, 0)), .name = NAME_A};
    struct refusing refusing = {.op = {.kind = TL_OP_RECV, .tensor = cluster_tensor(100, 1)}};
    refusing.op.receive.request.peer = rename.peer;
    refusing.op.receive.request.fetch.key = "weights";
    refusing.meta_data = *tl_tensor_meta_data(refusing.op.tensor);
    refusing.meta_data.is_dead = true;
    tl_worker_run(asker, &rename.command, run_rename);
    pthread_t thread;
    ck_assert_int_eq(pthread_create(&thread, NULL, refuse_values, &refusing), 0);
    for (unsigned i = 0; i < 20000; i++) {
        rename.name = i % 2 == 0 ? NAME_B : NAME_A;
        tl_worker_run(asker, &rename.command, run_rename);
    }
    __atomic_store_n(&refusing.is_over, true, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
    ck_assert_uint_gt(refusing.refused_count, 0);
    ck_assert_uint_eq(refusing.torn_count, 0);
    tl_tensor_put(refusing.op.tensor);
    tl_peer_release(rename.peer);
    tl_worker_close(asker, 0);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------- removal -- */

START_TEST(operations_of_a_removed_peer_end)
{
    protocol = protocols[_i % 2];
    bool is_reachable = _i < 2;
    struct tl_worker *owner = open_any(), *asker = open_any();
    publish(owner, "weights", 1);
    tl_peer_id peer = add(asker, is_reachable ? tl_worker_address(owner) : "127.0.0.1:9", NULL, 0), other;
    if (is_reachable) expect_received(asker, peer, "weights", 1);
    const struct tl_recv_item items[] = {{.key = "absent 1"}, {.key = "absent 2"}};
    const struct tl_recv_many_options many = {.size_bytes = sizeof(many), .item_bytes = sizeof(items[0])};
    const struct tl_subscribe_options subscribe = {.size_bytes = sizeof(subscribe), .count = 2};
    ck_assert_int_eq(tl_recv(asker, peer, "absent", 0, NULL, TL_TIMEOUT_NONE, cq, NULL, NULL, &error), TL_OK);
    ck_assert_int_eq(tl_recv_many(asker, peer, items, 2, &many, TL_TIMEOUT_NONE, cq, NULL, NULL, &error), TL_OK);
    ck_assert_int_eq(tl_subscribe(asker, peer, "absent", &subscribe, cq, NULL, NULL, &error), TL_OK);
    if (is_reachable) CLUSTER_UNTIL(cluster_stats(owner).waiting_receivers == 5);
    other = add(asker, tl_worker_address(owner), NULL, tl_worker_incarnation(owner));
    ck_assert_int_eq(tl_recv(asker, other, "later", 0, NULL, TL_TIMEOUT_NONE, cq, NULL, NULL, &error), TL_OK);

    remove_peer(asker, peer);
    for (unsigned i = 0; i < 5; i++) {
        const struct tl_completion completion = cluster_expect(cq, TL_CANCELLED);
        ck_assert_ptr_nonnull(strstr(completion.status.message, "was removed"));
    }
    /* Nothing of it is left, and the other peer has lost nothing. */
    ck_assert_int_eq(tl_recv(asker, peer, "weights", 0, NULL, 0, cq, NULL, NULL, &error), TL_NOT_FOUND);
    ck_assert_int_eq(tl_recv_many(asker, peer, items, 2, &many, 0, cq, NULL, NULL, &error), TL_NOT_FOUND);
    ck_assert_int_eq(tl_subscribe(asker, peer, "weights", &subscribe, cq, NULL, NULL, &error), TL_NOT_FOUND);
    struct tl_peer_info info = {.size_bytes = sizeof(info)};
    ck_assert_int_eq(tl_worker_peer_info(asker, peer, &info, &error), TL_NOT_FOUND);
    ck_assert_int_eq(tl_worker_wait_for_peers(asker, &peer, 1, 0, 0, &error), TL_NOT_FOUND);
    ck_assert_int_eq(tl_worker_remove_peer(asker, peer, &error), TL_NOT_FOUND);
    CLUSTER_UNTIL(cluster_stats(owner).waiting_receivers == 1);
    publish(owner, "later", 5);
    cluster_expect(cq, TL_OK);
    tl_worker_close(asker, 0);
    tl_worker_close(owner, 0);
}
END_TEST

#define MANY_BUFFERS 2000 /* more than one round ends */

/* Its requests wait for a connection that never comes; once it was cancelled before. */
START_TEST(a_large_subscription_ends_with_its_peer)
{
    struct tl_worker *asker = open_any();
    tl_peer_id peer = add(asker, "127.0.0.1:9", NULL, 0);
    const struct tl_subscribe_options options = {.size_bytes = sizeof(options), .count = MANY_BUFFERS};
    tl_op_id op;
    ck_assert_int_eq(tl_subscribe(asker, peer, "k", &options, cq, NULL, &op, &error), TL_OK);
    if (_i == 1) ck_assert_int_eq(tl_cancel(asker, op), TL_OK);
    remove_peer(asker, peer);
    struct tl_completion last = cluster_next(cq);
    ck_assert(last.is_last);
    ck_assert_int_ne(last.status.code, TL_OK);
    tl_worker_close(asker, 0);
}
END_TEST

/* What has arrived is acknowledged, also when its receiver removes the owner at once. */
START_TEST(sends_are_acknowledged)
{
    protocol = protocols[_i];
    struct tl_worker *owner = open_any(), *asker = open_any();
    for (unsigned i = 0; i < 20; i++) {
        struct tl_tensor *tensor = cluster_tensor(i % 2 == 0 ? 1000 : 1000000, i);
        cluster_send(owner, "sent", i, tensor, cq);
        tl_tensor_put(tensor);
        tl_peer_id peer = add(asker, tl_worker_address(owner), NULL, 0);
        struct tl_completion completion;
        enum tl_status status = tl_recv_wait(asker, peer, "sent", i, NULL, CLUSTER_LONG, &completion, &error);
        ck_assert_msg(status == TL_OK, "%s", error.message);
        tl_tensor_put(completion.tensor);
        remove_peer(asker, peer);
        cluster_expect(cq, TL_OK);
        ck_assert_uint_eq(cluster_stats(owner).held_tensors, 0);
    }
    tl_worker_close(asker, 0);
    tl_worker_close(owner, 0);
}
END_TEST

START_TEST(a_wait_ends_with_its_peer)
{
    struct tl_worker *asker = open_any();
    tl_peer_id peer = add(asker, "127.0.0.1:9", NULL, 0);
    ck_assert_int_eq(tl_worker_wait_for_peers(asker, &peer, 1, 0, CLUSTER_SECOND / 5, &error), TL_DEADLINE_EXCEEDED);
    remove_peer(asker, peer);
    tl_peer_id next = add(asker, "127.0.0.1:9", NULL, 0);
    ck_assert_uint_ne(next, peer);
    ck_assert_uint_eq(tl_worker_peers(asker, NULL, 0), 2);
    tl_worker_close(asker, 0);
}
END_TEST

/* Bytes that are allocated, and not free inside of the allocator. */
static size_t used_bytes(void)
{
    return mallinfo2().uordblks + mallinfo2().hblkhd;
}

static void add_and_remove(struct tl_worker *asker, struct tl_worker *const owners[2], unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        tl_peer_id peer = add(asker, tl_worker_address(owners[i % 2]), NULL, 0);
        if (i % 10 == 0) expect_received(asker, peer, "weights", i % 2);
        if (i % 10 == 5)
            ck_assert_int_eq(tl_recv(asker, peer, "absent", 0, NULL, TL_TIMEOUT_NONE, cq, NULL, NULL, &error), TL_OK);
        remove_peer(asker, peer);
        if (i % 10 == 5) cluster_expect(cq, TL_CANCELLED);
    }
}

START_TEST(thousands_come_and_go)
{
    protocol = protocols[_i];
    struct tl_worker *const owners[] = {open_any(), open_any()};
    struct tl_worker *asker = open_any();
    publish(owners[0], "weights", 0);
    publish(owners[1], "weights", 1);
    unsigned count = getenv("TENSORLANE_SANITIZE")[0] != 0 ? 1000 : 5000;
    add_and_remove(asker, owners, 200);
    unsigned descriptors = count_descriptors();
    size_t bytes = used_bytes();
    add_and_remove(asker, owners, count);
    ck_assert_uint_eq(tl_worker_peers(asker, NULL, 0), 1);
    CLUSTER_UNTIL(count_descriptors() <= descriptors);
    CLUSTER_UNTIL(used_bytes() < bytes + (1 << 20));
    tl_worker_close(asker, 0);
    tl_worker_close(owners[0], 0);
    tl_worker_close(owners[1], 0);
}
END_TEST

START_TEST(many_at_once)
{
    struct tl_worker *asker = open_any();
    enum { COUNT = 10000 };
    tl_peer_id *peers = calloc(COUNT, sizeof(*peers));
    for (unsigned i = 0; i < COUNT; i++) {
        char address[64];
        snprintf(address, sizeof(address), "127.%u.%u.1:9", i / 250, i % 250);
        peers[i] = add(asker, address, NULL, i + 1);
    }
    ck_assert_uint_eq(tl_worker_peers(asker, NULL, 0), COUNT + 1);
    for (unsigned i = 0; i < COUNT; i++)
        if (i % 2 == 0) remove_peer(asker, peers[i]);
    ck_assert_uint_eq(tl_worker_peers(asker, NULL, 0), COUNT / 2 + 1);
    free(peers);
    tl_worker_close(asker, 0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("added_peers");
    TCase *tcase = tcase_create("alone");
    tcase_set_timeout(tcase, 200);
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_loop_test(tcase, two_workers_find_each_other, 0, 2);
    tcase_add_loop_test(tcase, both_add_each_other, 0, 2);
    tcase_add_test(tcase, a_member_of_a_cluster_and_one_of_none);
    tcase_add_loop_test(tcase, a_client_of_no_cluster, 0, 2);
    tcase_add_test(tcase, what_is_wrong_is_refused);
    tcase_add_test(tcase, another_name_answers);
    tcase_add_loop_test(tcase, certificates_name_them, 0, 2);
    tcase_add_loop_test(tcase, trust_domains_that_allow_names, 0, 2);
    tcase_add_loop_test(tcase, a_foreign_task_that_is_named, 0, 2);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("incarnation");
    tcase_set_timeout(tcase, 200);
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, another_process_is_not_taken_for_the_one_that_is_meant);
    tcase_add_test(tcase, a_process_restarts);
    tcase_add_test(tcase, a_peer_gets_other_names);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("removed");
    tcase_set_timeout(tcase, 200);
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_loop_test(tcase, operations_of_a_removed_peer_end, 0, 4);
    tcase_add_loop_test(tcase, a_large_subscription_ends_with_its_peer, 0, 2);
    tcase_add_loop_test(tcase, sends_are_acknowledged, 0, 2);
    tcase_add_test(tcase, a_wait_ends_with_its_peer);
    tcase_add_loop_test(tcase, thousands_come_and_go, 0, 2);
    tcase_add_test(tcase, many_at_once);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
