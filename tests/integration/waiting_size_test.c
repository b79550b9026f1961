// SPDX-License-Identifier: Apache-2.0
/*
 * What a receive costs that waits for its value: at most WAITING_BYTES on each side, besides its key. The owner is a
 * process of its own, so that each side counts what it has allocated.
 *
 * A group asks for values that do not exist: many steps of few keys, so that what a connection remembers of a key
 * counts little; and as many keys, of which each is new on the connection. Receives that are in no group follow.
 */
#include <check.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "control/link_serves.h"
#include "fakes/cluster.h"
#include "fakes/forker.h"
#include "fakes/run_suite.h"

#define RECEIVES 10000
#define KEYS 20
#define KEY_BYTES 16
/* The promise of docs/groups.md. */
#define WAITING_BYTES 512
/* What a connection remembers of a key, with its texts. */
#define NEW_KEY_BYTES 192

static struct cluster cluster;
static struct tl_cq *cq;
static struct tl_error error;
static int owner; /* the socket of its process */

static bool is_counted; /* a sanitizer has another allocator, and counts nothing here */

static uint64_t allocated_bytes(void)
{
    struct mallinfo2 info = mallinfo2();
    return is_counted ? info.uordblks + info.hblkhd : 0;
}

_Static_assert(sizeof(struct link_serve) <= 136, "a request of a peer that waits is small");

/* ------------------------------------------------------------------------------------------------------- owner -- */

/* Serves until the socket is closed. A packet has a number of receivers; when so many wait, the answer says what is
 * allocated then. */
static int child_that_owns(int fd)
{
    uint64_t count;
    int none;
    if (forker_take(fd, &cluster, sizeof(cluster), &none) != sizeof(cluster)) return 1;
    cluster_open(&cluster, 0);
    while (forker_take(fd, &count, sizeof(count), &none) == sizeof(count)) {
        while (cluster_stats(cluster.workers[0]).waiting_receivers != count)
            usleep(1000);
        uint64_t bytes = allocated_bytes();
        if (!forker_pass(fd, &bytes, sizeof(bytes), -1)) return 1;
    }
    return 0;
}

/* Returns what the owner has allocated when so many receivers wait there. */
static uint64_t owner_bytes(uint64_t count)
{
    uint64_t bytes;
    int none;
    ck_assert(forker_pass(owner, &count, sizeof(count), -1));
    ck_assert_uint_eq(forker_take(owner, &bytes, sizeof(bytes), &none), sizeof(bytes));
    return bytes;
}

/* ------------------------------------------------------------------------------------------------------- asker -- */

static void open_pair(const char *protocol)
{
    is_counted = mallopt(M_ARENA_MAX, 1) == 1 && mallinfo2().uordblks > 0; /* those of the first arena */
    forker_open();
    cluster_init(&cluster, 2, "\"limits\": {\"waiting\": 200000}, \"timeouts\": {\"connect\": \"1s\"}");
    cluster.protocol = protocol;
    struct cluster copy = cluster;
    for (unsigned i = 0; i < CLUSTER_MAX; i++) {
        copy.reservations[i] = -1;
        if (cluster.reservations[i] >= 0) close(cluster.reservations[i]);
        cluster.reservations[i] = -1;
    }
    (void)forker_start(child_that_owns, &owner);
    ck_assert(forker_pass(owner, &copy, sizeof(copy), -1));
    cluster_open(&cluster, 1);
    cq = cluster_cq();
}

static void setup_grpc(void)
{
    open_pair("grpc");
}

static void setup_local(void)
{
    open_pair("auto");
}

static void teardown(void)
{
    cluster_close(&cluster, 1); /* what waits ends */
    tl_cq_destroy(cq);
    close(owner);
    forker_close();
}

/* Asks in one call, or in as many as there are items. */
static void ask(const struct tl_recv_item *items, size_t count, bool is_group)
{
    struct tl_worker *worker = cluster.workers[1];
    const struct tl_recv_many_options options = {.size_bytes = sizeof(options), .item_bytes = sizeof(*items)};
    for (size_t i = 0; !is_group && i < count; i++)
        (void)cluster_recv(worker, 0, items[i].key, items[i].step, cq);
    if (!is_group) return;
    enum tl_status status =
        tl_recv_many(worker, cluster_peer(worker, 0), items, count, &options, CLUSTER_LONG, cq, NULL, NULL, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
}

static void expect_at_most(const char *side, uint64_t before, uint64_t after, uint64_t each_bytes)
{
    int64_t each = ((int64_t)after - (int64_t)before) / RECEIVES;
    printf("%s: %lld bytes for each receive, of at most %llu\n", side, (long long)each, (unsigned long long)each_bytes);
    ck_assert_int_le(each, (int64_t)each_bytes);
    if (is_counted) ck_assert_int_gt(each, 0);
}

static void expect_cost(unsigned key_count, bool is_group, uint64_t owner_each_bytes, uint64_t asker_each_bytes)
{
    static char keys[RECEIVES][KEY_BYTES];
    static struct tl_recv_item items[RECEIVES];
    const struct tl_recv_item first = {.key = "first", .step = 1};
    for (unsigned i = 0; i < RECEIVES; i++) {
        snprintf(keys[i], KEY_BYTES, "key/%04u", i % key_count);
        items[i] = (struct tl_recv_item){.key = keys[i], .step = 1 + i / key_count};
    }
    ask(&first, 1, true); /* the connections are there when it waits */
    uint64_t owner_before = owner_bytes(1), asker_before = allocated_bytes();
    ask(items, RECEIVES, is_group);
    uint64_t owner_after = owner_bytes(1 + RECEIVES), asker_after = allocated_bytes();
    expect_at_most("owner", owner_before, owner_after, owner_each_bytes);
    expect_at_most("asker", asker_before, asker_after, asker_each_bytes);
}

START_TEST(many_steps_of_few_keys)
{
    expect_cost(KEYS, true, WAITING_BYTES + KEY_BYTES, WAITING_BYTES + KEY_BYTES);
}
END_TEST

START_TEST(many_new_keys)
{
    expect_cost(RECEIVES, true, WAITING_BYTES + NEW_KEY_BYTES, WAITING_BYTES + NEW_KEY_BYTES);
}
END_TEST

START_TEST(single_receives)
{
    expect_cost(KEYS, false, WAITING_BYTES + KEY_BYTES, WAITING_BYTES + KEY_BYTES);
}
END_TEST

static void add_cases(Suite *suite, const char *name, void (*setup)(void))
{
    TCase *tcase = tcase_create(name);
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_set_timeout(tcase, 100);
    tcase_add_test(tcase, many_steps_of_few_keys);
    tcase_add_test(tcase, many_new_keys);
    tcase_add_test(tcase, single_receives);
    suite_add_tcase(suite, tcase);
}

int main(void)
{
    Suite *suite = suite_create("waiting_size");
    add_cases(suite, "grpc", setup_grpc);
    add_cases(suite, "local", setup_local);
    return run_suite(suite);
}
