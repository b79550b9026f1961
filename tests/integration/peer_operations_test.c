// SPDX-License-Identifier: Apache-2.0
/* What a worker does at a peer: tl_put, tl_list, tl_stat, tl_remove. */
#include <check.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "control/listing.h"
#include "control/loop.h"
#include "fakes/certificates.h"
#include "fakes/cluster.h"
#include "fakes/proxy.h"
#include "fakes/run_suite.h"
#include "fakes/temp_folder.h"

#define BYTES 100000

static struct cluster cluster;
static struct tl_worker *asker, *owner;
static tl_peer_id peer;
static struct tl_cq *cq;
static struct tl_error error;

/* Each entry that is taken from a listing seems to take a millisecond. */
static atomic_int taken_count;
static atomic_int passed_ms; /* so many milliseconds seem to have passed besides */
static atomic_int taken_in_round, most_in_round;

int64_t __real_tl_clock_now_ns(void);
int64_t __wrap_tl_clock_now_ns(void);
const struct tl_listed *__real_tl_listing_take(struct tl_listing *listing, size_t left_count);
const struct tl_listed *__wrap_tl_listing_take(struct tl_listing *listing, size_t left_count);
void __real_tl_loop_defer(struct tl_loop *loop, struct tl_closure *closure);
void __wrap_tl_loop_defer(struct tl_loop *loop, struct tl_closure *closure);

int64_t __wrap_tl_clock_now_ns(void)
{
    return __real_tl_clock_now_ns() + (atomic_load(&taken_count) + atomic_load(&passed_ms)) * TL_NS_PER_MS;
}

const struct tl_listed *__wrap_tl_listing_take(struct tl_listing *listing, size_t left_count)
{
    int count = atomic_fetch_add(&taken_in_round, 1) + 1;
    if (count > atomic_load(&most_in_round)) atomic_store(&most_in_round, count);
    atomic_fetch_add(&taken_count, 1);
    return __real_tl_listing_take(listing, left_count);
}

void __wrap_tl_loop_defer(struct tl_loop *loop, struct tl_closure *closure)
{
    atomic_store(&taken_in_round, 0);
    __real_tl_loop_defer(loop, closure);
}

static void setup(void)
{
    cq = cluster_cq();
}

static void teardown(void)
{
    tl_cq_destroy(cq);
}

static void open_pair(enum tl_progress progress)
{
    cluster_init(&cluster, 2, NULL);
    owner = cluster_open(&cluster, 0);
    cluster.progress = progress;
    asker = cluster_open(&cluster, 1);
    peer = cluster_peer(asker, 0);
}

static enum tl_status put_with(const char *key, uint64_t step, unsigned seed, bool may_go_back)
{
    const struct tl_put_options options = {.size_bytes = sizeof(options), .may_go_back = may_go_back};
    struct tl_tensor *tensor = cluster_tensor(BYTES, seed);
    enum tl_status status = tl_put_wait(asker, peer, key, step, tensor, &options, CLUSTER_LONG, &error);
    tl_tensor_put(tensor);
    return status;
}

static void put(const char *key, uint64_t step, unsigned seed)
{
    ck_assert_msg(put_with(key, step, seed, false) == TL_OK, "%s", error.message);
}

static void expect_at_owner(const char *key, uint64_t step, unsigned seed)
{
    struct tl_completion completion;
    ck_assert_msg(tl_recv_wait(owner, cluster_peer(owner, 0), key, 0, NULL, CLUSTER_LONG, &completion, &error) == TL_OK,
                  "%s", error.message);
    ck_assert_uint_eq(completion.step, step);
    ck_assert(cluster_tensor_is(completion.tensor, BYTES, seed));
    tl_tensor_put(completion.tensor);
}

static struct tl_listing *list(const char *pattern)
{
    struct tl_listing *listing = NULL;
    ck_assert_msg(tl_list_wait(asker, peer, pattern, CLUSTER_LONG, &listing, &error) == TL_OK, "%s", error.message);
    return listing;
}

static void expect_listed(const struct tl_listing *listing, size_t place, const char *key, uint64_t step)
{
    struct tl_listing_entry entry = {.size_bytes = sizeof(entry)};
    ck_assert_msg(tl_listing_entry(listing, place, &entry, &error) == TL_OK, "%s", error.message);
    ck_assert_str_eq(entry.key, key);
    ck_assert_uint_eq(entry.step, step);
    ck_assert_int_eq(entry.dtype, TL_U8);
    ck_assert_uint_eq(entry.rank, 1);
    ck_assert_uint_eq(entry.dims[0], BYTES);
    ck_assert_uint_eq(entry.tensor_bytes, BYTES);
    ck_assert(!entry.is_dead);
}

static void expect_count(const char *pattern, size_t count)
{
    struct tl_listing *listing = list(pattern);
    ck_assert_uint_eq(tl_listing_count(listing), count);
    tl_listing_destroy(listing);
}

static uint64_t remove_all(const char *pattern)
{
    uint64_t count = UINT64_MAX;
    ck_assert_msg(tl_remove_wait(asker, peer, pattern, CLUSTER_LONG, &count, &error) == TL_OK, "%s", error.message);
    return count;
}

static void everything(void)
{
    put("b", 3, 1);
    put("a/1", 1, 2);
    put("a/2", 2, 3);
    expect_at_owner("b", 3, 1);
    expect_at_owner("a/2", 2, 3);
    struct tl_listing *listing = list("");
    ck_assert_uint_eq(tl_listing_count(listing), 3);
    expect_listed(listing, 0, "a/1", 1);
    expect_listed(listing, 1, "a/2", 2);
    expect_listed(listing, 2, "b", 3);
    struct tl_listing_entry entry = {.size_bytes = sizeof(entry)};
    ck_assert_int_eq(tl_listing_entry(listing, 3, &entry, &error), TL_OUT_OF_RANGE);
    tl_listing_destroy(listing);
    expect_count("a/*", 2);
    expect_count("c*", 0);

    ck_assert_int_eq(put_with("b", 2, 4, false), TL_FAILED_PRECONDITION);
    expect_at_owner("b", 3, 1);
    ck_assert_int_eq(put_with("b", 2, 4, true), TL_OK);
    expect_at_owner("b", 2, 4);

    listing = NULL;
    ck_assert_msg(tl_stat_wait(asker, peer, "b", CLUSTER_LONG, &listing, &error) == TL_OK, "%s", error.message);
    ck_assert_uint_eq(tl_listing_count(listing), 1);
    expect_listed(listing, 0, "b", 2);
    tl_listing_destroy(listing);
    ck_assert_int_eq(tl_stat_wait(asker, peer, "a/?", CLUSTER_LONG, &listing, &error), TL_NOT_FOUND);

    ck_assert_uint_eq(remove_all("c*"), 0);
    ck_assert_uint_eq(remove_all("a/*"), 2);
    expect_count("", 1);
    uint64_t count = 0;
    ck_assert_int_eq(tl_remove_wait(asker, peer, "", CLUSTER_LONG, &count, &error), TL_INVALID_ARGUMENT);
    ck_assert_uint_eq(remove_all("*"), 1);
    expect_count("", 0);
}

START_TEST(all_at_a_peer)
{
    open_pair((enum tl_progress)_i);
    everything();
    cluster_close(&cluster, 1); /* first, because nothing drives it while the other one closes */
    cluster_close_all(&cluster);
}
END_TEST

/* The peer has opened the link, so that another one is opened for calls. */
START_TEST(all_at_a_peer_that_has_called_first)
{
    open_pair(TL_PROGRESS_THREAD);
    tl_peer_id asker_of_owner = cluster_peer(owner, 1);
    ck_assert_msg(tl_worker_wait_for_peers(owner, &asker_of_owner, 1, 1, CLUSTER_LONG, &error) == TL_OK, "%s",
                  error.message);
    CLUSTER_UNTIL(cluster_peer_info(asker, 0).state == TL_PEER_UP);
    everything();
    ck_assert_uint_eq(cluster_stats(owner).protocol_errors, 0);
    cluster_close_all(&cluster);
}
END_TEST

START_TEST(all_at_the_worker_itself)
{
    open_pair(TL_PROGRESS_THREAD);
    asker = owner;
    peer = cluster_peer(owner, 0);
    everything();
    cluster_close_all(&cluster);
}
END_TEST

/* Others get the loop while a worker sorts what it has listed of itself. */
START_TEST(many_at_the_worker_itself)
{
    enum { COUNT = 500 };
    char key[32];
    cluster_init(&cluster, 1, NULL);
    asker = cluster_open(&cluster, 0);
    peer = cluster_peer(asker, 0);
    struct tl_tensor *tensor = cluster_tensor(BYTES, 1);
    for (unsigned i = 0; i < COUNT; i++) {
        snprintf(key, sizeof(key), "%03u", i * 7 % COUNT);
        cluster_publish(asker, key, i * 7 % COUNT, tensor);
    }
    tl_tensor_put(tensor);
    struct tl_listing *listing = list("");
    ck_assert_uint_eq(tl_listing_count(listing), COUNT);
    for (unsigned i = 0; i < COUNT; i++) {
        snprintf(key, sizeof(key), "%03u", i);
        expect_listed(listing, i, key, i);
    }
    tl_listing_destroy(listing);
    ck_assert_int_eq(atomic_load(&taken_count), COUNT);
    ck_assert_int_le(atomic_load(&most_in_round), 2);
    cluster_close_all(&cluster);
}
END_TEST

START_TEST(all_at_an_added_peer)
{
    const struct tl_worker_options options = {.size_bytes = sizeof(options), .address = "127.0.0.1:0"};
    struct tl_worker *other = NULL;
    open_pair(TL_PROGRESS_THREAD);
    ck_assert_msg(tl_worker_open(&options, &other, &error) == TL_OK, "%s", error.message);
    asker = other;
    char address[64];
    snprintf(address, sizeof(address), "127.0.0.1:%u", tl_worker_port(owner));
    ck_assert_msg(tl_worker_add_peer(asker, address, NULL, 0, &peer, &error) == TL_OK, "%s", error.message);
    everything();
    ck_assert_int_eq(tl_worker_remove_peer(asker, peer, &error), TL_OK);
    ck_assert_int_eq(put_with("w", 1, 1, false), TL_NOT_FOUND);
    tl_worker_close(other, 0);
    cluster_close_all(&cluster);
}
END_TEST

/* ------------------------------------------------------------------------------------------- the queue, and ends -- */

START_TEST(many_complete_on_a_queue)
{
    enum { COUNT = 200 };
    tl_op_id ops[COUNT];
    bool is_done[COUNT] = {false};
    unsigned released = 0;
    static unsigned char data[BYTES];
    open_pair(TL_PROGRESS_THREAD);
    for (unsigned i = 0; i < COUNT; i++) {
        char key[32];
        snprintf(key, sizeof(key), "key %u", i);
        struct tl_tensor *tensor = cluster_wrap(data, sizeof(data), &released);
        ck_assert_msg(tl_put(asker, peer, key, i, tensor, NULL, CLUSTER_LONG, cq, &is_done[i], &ops[i], &error) ==
                          TL_OK,
                      "%s", error.message);
        tl_tensor_put(tensor);
    }
    for (unsigned i = 0; i < COUNT; i++) {
        struct tl_completion completion;
        ck_assert_uint_eq(tl_cq_wait(cq, &completion, 1, CLUSTER_LONG), 1);
        ck_assert_msg(completion.status.code == TL_OK, "%s", completion.status.message);
        ck_assert_int_eq(completion.kind, TL_OP_PUT);
        ck_assert_uint_eq(completion.bytes, BYTES);
        /* Nothing reads the memory of this one any more, while others are released. */
        ck_assert_uint_ge(__atomic_load_n(&released, __ATOMIC_ACQUIRE), i + 1);
        bool *done = completion.user_data;
        ck_assert(!*done);
        *done = true;
    }
    ck_assert_uint_eq(released, COUNT);
    ck_assert_uint_eq(cluster_stats(asker).open_operations, 0);
    tl_op_id op;
    struct tl_completion completion;
    ck_assert_int_eq(tl_list(asker, peer, "key *", CLUSTER_LONG, cq, NULL, &op, &error), TL_OK);
    ck_assert_uint_eq(tl_cq_wait(cq, &completion, 1, CLUSTER_LONG), 1);
    ck_assert_int_eq(completion.kind, TL_OP_LIST);
    ck_assert_uint_eq(completion.op, op);
    ck_assert_uint_eq(tl_listing_count(completion.listing), COUNT);
    tl_listing_destroy(completion.listing);
    ck_assert_int_eq(tl_stat(asker, peer, "key 7", CLUSTER_LONG, cq, NULL, &op, &error), TL_OK);
    ck_assert_uint_eq(tl_cq_wait(cq, &completion, 1, CLUSTER_LONG), 1);
    ck_assert_int_eq(completion.kind, TL_OP_STAT);
    expect_listed(completion.listing, 0, "key 7", 7);
    tl_listing_destroy(completion.listing);
    ck_assert_int_eq(tl_remove(asker, peer, "key 1?", CLUSTER_LONG, cq, NULL, &op, &error), TL_OK);
    ck_assert_uint_eq(tl_cq_wait(cq, &completion, 1, CLUSTER_LONG), 1);
    ck_assert_int_eq(completion.kind, TL_OP_REMOVE);
    ck_assert_uint_eq(completion.removed_count, 10);
    /* A listing that was not read is freed with its queue. */
    ck_assert_int_eq(tl_list(asker, peer, "", CLUSTER_LONG, cq, NULL, &op, &error), TL_OK);
    CLUSTER_UNTIL(cluster_stats(asker).open_operations == 0);
    cluster_close_all(&cluster);
}
END_TEST

/* At a peer and at this worker: the time until the program reads a completion is no part of the duration. */
START_TEST(completions_that_are_read_late)
{
    open_pair(TL_PROGRESS_THREAD);
    if (_i == 1) peer = cluster_peer(asker, 1);
    struct tl_tensor *tensor = cluster_tensor(BYTES, 1);
    int64_t begin_ns = cluster_now_ns();
    ck_assert_int_eq(tl_put(asker, peer, "w", 1, tensor, NULL, CLUSTER_LONG, cq, NULL, NULL, &error), TL_OK);
    ck_assert_int_eq(tl_list(asker, peer, "", CLUSTER_LONG, cq, NULL, NULL, &error), TL_OK);
    ck_assert_int_eq(tl_stat(asker, peer, "another", CLUSTER_LONG, cq, NULL, NULL, &error), TL_OK);
    ck_assert_int_eq(tl_remove(asker, peer, "*", CLUSTER_LONG, cq, NULL, NULL, &error), TL_OK);
    CLUSTER_UNTIL(cluster_stats(asker).open_operations == 0);
    int64_t most_ns = cluster_now_ns() - begin_ns;
    atomic_store(&passed_ms, 1000);
    for (unsigned i = 0; i < 4; i++) {
        struct tl_completion completion = cluster_next(cq);
        ck_assert_int_gt(completion.duration_ns, 0);
        ck_assert_int_le(completion.duration_ns, most_ns);
        tl_listing_destroy(completion.listing);
    }
    tl_tensor_put(tensor);
    cluster_close_all(&cluster);
}
END_TEST

static void expect_ended(tl_op_id op, enum tl_status status)
{
    struct tl_completion completion;
    ck_assert_uint_eq(tl_cq_wait(cq, &completion, 1, CLUSTER_LONG), 1);
    ck_assert_uint_eq(completion.op, op);
    ck_assert_msg(completion.status.code == status, "%s", completion.status.message);
    ck_assert_ptr_null(completion.listing);
    ck_assert_ptr_null(completion.tensor);
}

/* A peer that does not exist yet is waited for. */
START_TEST(an_absent_peer_is_waited_for)
{
    tl_op_id op;
    cluster_init(&cluster, 2, NULL);
    asker = cluster_open(&cluster, 1);
    peer = cluster_peer(asker, 0);
    struct tl_listing *listing;
    ck_assert_int_eq(tl_list_wait(asker, peer, "", CLUSTER_SECOND / 5, &listing, &error), TL_DEADLINE_EXCEEDED);
    ck_assert_msg(strstr(error.message, "/job:node/task:0") != NULL, "%s", error.message);
    struct tl_tensor *tensor = cluster_tensor(BYTES, 5);
    ck_assert_int_eq(tl_put(asker, peer, "w", 1, tensor, NULL, CLUSTER_LONG, cq, NULL, &op, &error), TL_OK);
    ck_assert_int_eq(tl_cancel(asker, op), TL_OK);
    expect_ended(op, TL_CANCELLED);
    ck_assert_int_eq(tl_cancel(asker, op), TL_NOT_FOUND);
    ck_assert_int_eq(tl_put(asker, peer, "w", 2, tensor, NULL, CLUSTER_LONG, cq, NULL, &op, &error), TL_OK);
    owner = cluster_open(&cluster, 0);
    expect_ended(op, TL_OK);
    expect_at_owner("w", 2, 5);
    cluster_close(&cluster, 0);
    ck_assert_int_eq(tl_put(asker, peer, "w", 3, tensor, NULL, CLUSTER_LONG, cq, NULL, &op, &error), TL_OK);
    cluster_close_all(&cluster);
    expect_ended(op, TL_CANCELLED);
    tl_tensor_put(tensor);
}
END_TEST

/* Opens the owner with this host for the other task. */
static void open_owner(const char *host_of_asker)
{
    char json[512];
    snprintf(json, sizeof(json), "{\"cluster\": {\"node\": [\"127.0.0.1:%u\", \"%s:%u\"]}, \"protocol\": \"grpc\"}",
             cluster.ports[0], host_of_asker, cluster.ports[1]);
    const struct tl_worker_options options = {.size_bytes = sizeof(options), .config_json = json, .job = "node"};
    ck_assert_msg(tl_worker_open(&options, &cluster.workers[0], &error) == TL_OK, "%s", error.message);
    owner = cluster.workers[0];
}

/* It may know the address later, as a name service may. */
START_TEST(a_peer_that_does_not_know_the_address_is_waited_for)
{
    tl_op_id op;
    struct tl_listing *listing;
    cluster_init(&cluster, 2, NULL);
    open_owner("192.0.2.1");
    asker = cluster_open(&cluster, 1);
    peer = cluster_peer(asker, 0);
    CLUSTER_UNTIL(tl_list_wait(asker, peer, "", CLUSTER_SECOND / 2, &listing, &error) == TL_DEADLINE_EXCEEDED &&
                  strstr(error.message, "which is no address of its host") != NULL);
    struct tl_tensor *tensor = cluster_tensor(BYTES, 5);
    ck_assert_int_eq(tl_put(asker, peer, "w", 1, tensor, NULL, CLUSTER_LONG, cq, NULL, &op, &error), TL_OK);
    tl_tensor_put(tensor);
    cluster_close(&cluster, 0);
    open_owner("127.0.0.1");
    expect_ended(op, TL_OK);
    expect_at_owner("w", 1, 5);
    cluster_close_all(&cluster);
}
END_TEST

/* The peer takes nothing: the put is under way, and its memory is read, when it is cancelled. */
START_TEST(a_put_that_is_under_way_ends)
{
    enum { LARGE = 64 << 20 };
    struct proxy proxy;
    unsigned released = 0;
    tl_op_id op;
    cluster_init(&cluster, 2, NULL);
    cluster_use_proxy(&cluster, 0, &proxy);
    cluster_open_all(&cluster);
    owner = cluster.workers[0];
    asker = cluster.workers[1];
    peer = cluster_peer(asker, 0);
    put("small", 1, 1);
    void *data = calloc(1, LARGE);
    struct tl_tensor *tensor = cluster_wrap(data, LARGE, &released);
    proxy_limit(&proxy, PROXY_UP, 1 << 20);
    ck_assert_int_eq(tl_put(asker, peer, "large", 1, tensor, NULL, CLUSTER_LONG, cq, NULL, &op, &error), TL_OK);
    tl_tensor_put(tensor);
    proxy_wait_limit(&proxy, PROXY_UP); /* a part of it has left */
    ck_assert_uint_eq(released, 0);
    ck_assert_int_eq(tl_cancel(asker, op), TL_OK);
    ck_assert_int_eq(tl_cancel(asker, op), TL_NOT_FOUND);
    proxy_limit(&proxy, PROXY_UP, UINT64_MAX); /* gRPC reads what is on its way to the socket */
    expect_ended(op, TL_CANCELLED);
    ck_assert_uint_eq(released, 1);
    free(data);
    put("small", 2, 2);
    expect_at_owner("small", 2, 2);
    ck_assert_int_eq(put_with("large", 0, 3, false), TL_OK);
    cluster_close_all(&cluster);
    proxy_stop(&proxy);
}
END_TEST

/* The connection breaks while a put is under way: it is sent again. */
START_TEST(a_put_survives_a_broken_connection)
{
    struct proxy proxy;
    tl_op_id op;
    cluster_init(&cluster, 2, NULL);
    cluster_use_proxy(&cluster, 0, &proxy);
    cluster_open_all(&cluster);
    owner = cluster.workers[0];
    asker = cluster.workers[1];
    peer = cluster_peer(asker, 0);
    put("small", 1, 1);
    proxy_limit(&proxy, PROXY_UP, BYTES / 2);
    struct tl_tensor *tensor = cluster_tensor(BYTES, 6);
    ck_assert_int_eq(tl_put(asker, peer, "w", 4, tensor, NULL, CLUSTER_LONG, cq, NULL, &op, &error), TL_OK);
    tl_tensor_put(tensor);
    proxy_wait_limit(&proxy, PROXY_UP); /* half of it has left */
    ck_assert_uint_eq(cluster_stats(owner).published_tensors, 1);
    proxy_cut(&proxy);
    proxy_limit(&proxy, PROXY_UP, UINT64_MAX);
    expect_ended(op, TL_OK);
    ck_assert_uint_ge(cluster_stats(asker).requests_retried, 1);
    expect_at_owner("w", 4, 6);
    cluster_close_all(&cluster);
    proxy_stop(&proxy);
}
END_TEST

START_TEST(operations_of_a_removed_peer_end)
{
    open_pair(TL_PROGRESS_THREAD);
    tl_op_id op;
    tl_peer_id absent;
    char address[64];
    snprintf(address, sizeof(address), "127.0.0.1:%u", cluster_free_port());
    ck_assert_msg(tl_worker_add_peer(asker, address, NULL, 0, &absent, &error) == TL_OK, "%s", error.message);
    ck_assert_int_eq(tl_list(asker, absent, "", CLUSTER_LONG, cq, NULL, &op, &error), TL_OK);
    ck_assert_int_eq(tl_worker_remove_peer(asker, absent, &error), TL_OK);
    expect_ended(op, TL_CANCELLED);
    cluster_close_all(&cluster);
}
END_TEST

START_TEST(wrong_calls_are_refused)
{
    char long_text[TL_MAX_KEY_BYTES + 2];
    struct tl_listing *listing;
    memset(long_text, 'k', sizeof(long_text));
    long_text[sizeof(long_text) - 1] = '\0';
    open_pair(TL_PROGRESS_THREAD);
    ck_assert_int_eq(put_with("", 1, 1, false), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(put_with(long_text, 1, 1, false), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_list_wait(asker, peer, NULL, CLUSTER_LONG, &listing, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_list_wait(asker, peer, long_text, CLUSTER_LONG, &listing, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_list_wait(asker, peer, "\xff", CLUSTER_LONG, &listing, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_stat_wait(asker, peer, "", CLUSTER_LONG, &listing, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_list_wait(asker, 99, "", CLUSTER_LONG, &listing, &error), TL_NOT_FOUND);
    struct {
        struct tl_put_options known;
        uint64_t later;
    } options = {.known.size_bytes = sizeof(options), .later = 1};
    struct tl_tensor *tensor = cluster_tensor(8, 1);
    ck_assert_int_eq(tl_put_wait(asker, peer, "w", 1, tensor, &options.known, CLUSTER_LONG, &error), TL_UNIMPLEMENTED);
    tl_tensor_put(tensor);
    cluster_close_all(&cluster);
}
END_TEST

/* --------------------------------------------------------------------------------------------------------- roles -- */

static struct authority authority;

static struct tl_worker *open_certified(const char *name, const char *text, const char *rights)
{
    static char json[2048];
    char certificate[256], key[256];
    snprintf(certificate, sizeof(certificate), "%s/%s.pem", temp_folder, name);
    snprintf(key, sizeof(key), "%s/%s.key", temp_folder, name);
    const struct certificate_kind kind = {.names = text};
    (void)authority_issue(&authority, &kind, certificate, key);
    snprintf(json, sizeof(json),
             "{\"protocol\": \"grpc\", \"security\": {\"tls\": {\"ca\": \"%s/ca.pem\", \"certificate\": \"%s\", "
             "\"key\": \"%s\"}, \"allow\": [{\"who\": [\"any\"], \"what\": [%s]}]}}",
             temp_folder, certificate, key, rights);
    const struct tl_worker_options options = {
        .size_bytes = sizeof(options), .config_json = json, .address = "127.0.0.1:0"};
    struct tl_worker *worker = NULL;
    ck_assert_msg(tl_worker_open(&options, &worker, &error) == TL_OK, "%s", error.message);
    return worker;
}

static void open_certified_pair(const char *rights)
{
    owner = open_certified("owner", "URI:spiffe://test/job/trainer/task/3", rights);
    asker = open_certified("asker", "URI:spiffe://test/job/rollout/task/0", "\"read\"");
    ck_assert_msg(tl_worker_add_peer(asker, tl_worker_address(owner), NULL, 0, &peer, &error) == TL_OK, "%s",
                  error.message);
}

static void close_certified_pair(void)
{
    tl_worker_close(asker, 0);
    tl_worker_close(owner, 0);
}

START_TEST(roles_hold)
{
    struct tl_listing *listing = NULL;
    uint64_t count = 0;
    temp_folder_make();
    authority_init(&authority, "the authority", temp_path("ca.pem"));
    open_certified_pair("\"read\", \"list\", \"push\", \"withdraw\"");
    put("w", 1, 1);
    expect_count("", 1);
    ck_assert_uint_eq(remove_all("w"), 1);
    close_certified_pair();

    open_certified_pair("\"read\"");
    ck_assert_int_eq(put_with("w", 1, 1, false), TL_PERMISSION_DENIED);
    ck_assert_int_eq(tl_list_wait(asker, peer, "", CLUSTER_LONG, &listing, &error), TL_PERMISSION_DENIED);
    ck_assert_int_eq(tl_remove_wait(asker, peer, "*", CLUSTER_LONG, &count, &error), TL_PERMISSION_DENIED);
    close_certified_pair();

    /* A worker that may not open a link is told so each time, whether its link is being tried or rests. */
    open_certified_pair("\"push\", \"list\", \"withdraw\"");
    for (unsigned i = 0; i < 3; i++) {
        ck_assert_int_eq(put_with("w", 1, 1, false), TL_PERMISSION_DENIED);
        ck_assert_msg(strstr(error.message, "may not read") != NULL, "%s", error.message);
        ck_assert_int_eq(tl_list_wait(asker, peer, "", CLUSTER_LONG, &listing, &error), TL_PERMISSION_DENIED);
    }
    close_certified_pair();
    authority_fini(&authority);
    temp_folder_remove();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("peer_operations");
    TCase *tcase = tcase_create("everything");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_loop_test(tcase, all_at_a_peer, 0, 2);
    tcase_add_test(tcase, all_at_a_peer_that_has_called_first);
    tcase_add_test(tcase, all_at_the_worker_itself);
    tcase_add_test(tcase, many_at_the_worker_itself);
    tcase_add_test(tcase, all_at_an_added_peer);
    tcase_add_test(tcase, wrong_calls_are_refused);
    tcase_add_test(tcase, roles_hold);
    tcase_add_test(tcase, many_complete_on_a_queue);
    tcase_add_loop_test(tcase, completions_that_are_read_late, 0, 2);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("ends");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, an_absent_peer_is_waited_for);
    tcase_add_test(tcase, a_peer_that_does_not_know_the_address_is_waited_for);
    tcase_add_test(tcase, a_put_that_is_under_way_ends);
    tcase_add_test(tcase, a_put_survives_a_broken_connection);
    tcase_add_test(tcase, operations_of_a_removed_peer_end);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
