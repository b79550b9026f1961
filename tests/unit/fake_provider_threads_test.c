// SPDX-License-Identifier: Apache-2.0
/*
 * Two reactors over the fake provider, each in a thread of its own: messages and writes go back and forth while both
 * spin and sleep, and regions come and go beside them. A wake-up that is lost lets the test sleep until its time-out
 * ends it; meant to run under ThreadSanitizer as well.
 */
#include <check.h>
#include <pthread.h>
#include <string.h>

#include "base/clock.h"
#include "dataplane/reactor.h"
#include "fakes/fake_provider.h"
#include "fakes/run_suite.h"

enum { ROUNDS = 3000 };

struct player {
    struct tl_provider *provider;
    struct tl_reactor *reactor;
    struct tl_queue_pair *pair;
    struct tl_region *region;
    struct tl_exposure exposure;
    struct tl_descriptor destination; /* At the peer. */
    uint32_t memory;                  /* The peer's latest number. */
    uint32_t source;
    uint32_t number; /* Our own numbers. */
    bool is_source_used;
    bool is_drained;
    struct tl_work work;
    struct tl_work over_work;
};

static struct fake_fabric *fabric;
static struct player players[2];

/* Writes the next number to the peer; after the last one comes a message. */
static void play(struct player *self)
{
    struct tl_queue_pair *pair = self->pair;
    ck_assert(!self->is_source_used);
    self->source = ++self->number;
    self->is_source_used = true;
    pair->ops->write(pair, self->region, &self->source, sizeof(self->source), &self->destination, 0, true, self->number,
                     &self->work);
    if (self->number == ROUNDS) pair->ops->message(pair, "over", 4, &self->over_work);
    tl_queue_pair_doorbell(pair);
}

static void on_done(struct tl_work *work, enum tl_status status)
{
    struct player *self = TL_CONTAINER_OF(work, struct player, work);
    ck_assert_int_eq(status, TL_OK);
    self->is_source_used = false;
}

static void disconnect(struct player *self)
{
    struct tl_error reason = {.code = TL_ABORTED};
    self->pair->ops->disconnect(self->pair, &reason);
}

/* The side that finishes second leaves when its message has arrived, the other side when it has got that message. */
static void on_over(struct tl_work *work, enum tl_status status)
{
    struct player *self = TL_CONTAINER_OF(work, struct player, over_work);
    ck_assert_int_eq(status, TL_OK);
    if (self == &players[1]) disconnect(self);
}

static void on_immediate(void *owner, uint32_t immediate, uint64_t len_bytes)
{
    struct player *self = owner;
    ck_assert_uint_eq(len_bytes, sizeof(self->memory));
    ck_assert_uint_eq(self->memory, immediate);
    if (self->number < ROUNDS) play(self);
}

static void on_message(void *owner, const void *data, uint32_t len_bytes)
{
    struct player *self = owner;
    ck_assert(len_bytes == 4 && memcmp(data, "over", 4) == 0);
    if (self == &players[0]) disconnect(self);
}

static void on_broken(void *owner, const struct tl_error *reason)
{
    (void)owner;
    (void)reason;
}

static void on_drained(void *owner)
{
    ((struct player *)owner)->is_drained = true;
}

static const struct tl_queue_pair_events events = {
    .message = on_message, .immediate = on_immediate, .broken = on_broken, .drained = on_drained};

static void open_player(struct player *self, const char *name, int64_t spin_ns)
{
    struct tl_queue_pair_options options = {.slot_count = 8, .work_count = 8, .keys = TL_KEYS_WINDOW};
    struct tl_reactor_options reactor_options = {.spin_ns = spin_ns};
    self->provider = fake_provider_open(fabric, name, NULL);
    self->work = (struct tl_work){.magic = TL_WORK_MAGIC, .done = on_done};
    self->over_work = (struct tl_work){.magic = TL_WORK_MAGIC, .done = on_over};
    ck_assert_int_eq(tl_reactor_create(self->provider, &reactor_options, &self->reactor, NULL), TL_OK);
    ck_assert_int_eq(tl_region_create(self->provider, self, sizeof(*self), TL_REGION_WRITE, &self->region, NULL),
                     TL_OK);
    ck_assert_int_eq(tl_queue_pair_create(self->provider, &options, &events, self, &self->pair, NULL), TL_OK);
}

static void connect_player(struct player *self, struct player *peer)
{
    struct tl_pair_address pair_address;
    peer->pair->ops->get_address(peer->pair, &pair_address);
    ck_assert_int_eq(self->pair->ops->connect(self->pair, &pair_address, NULL), TL_OK);
    ck_assert_int_eq(
        tl_queue_pair_expose(self->pair, self->region, &self->memory, sizeof(self->memory), &self->exposure, NULL),
        TL_OK);
    peer->destination = self->exposure.descriptor;
    tl_queue_pair_doorbell(self->pair);
}

static void *run(void *argument)
{
    struct player *self = argument;
    tl_reactor_busy(self->reactor, 1);
    while (!self->is_drained)
        tl_reactor_run_once(self->reactor, TL_TIME_NEVER);
    tl_reactor_busy(self->reactor, -1);
    return NULL;
}

static void *register_memory(void *argument)
{
    char memory[64];
    for (unsigned i = 0; i < ROUNDS; i++) {
        struct tl_region *region;
        ck_assert_int_eq(
            tl_region_create(players[i % 2].provider, memory, sizeof(memory), TL_REGION_READ, &region, NULL), TL_OK);
        tl_region_destroy(region);
    }
    return argument;
}

static void close_player(struct player *self)
{
    self->pair->ops->destroy(self->pair);
    tl_region_destroy(self->region);
    tl_reactor_destroy(self->reactor);
}

static void play_all(int64_t spin_ns)
{
    pthread_t threads[3];
    fabric = fake_fabric_create(NULL);
    open_player(&players[0], "fake_a", spin_ns);
    open_player(&players[1], "fake_b", spin_ns);
    connect_player(&players[0], &players[1]);
    connect_player(&players[1], &players[0]);
    while (tl_reactor_run_once(players[0].reactor, 0) || tl_reactor_run_once(players[1].reactor, 0)) {
    }
    play(&players[0]);
    ck_assert_int_eq(pthread_create(&threads[0], NULL, run, &players[0]), 0);
    ck_assert_int_eq(pthread_create(&threads[2], NULL, register_memory, NULL), 0);
    run(&players[1]);
    ck_assert_int_eq(pthread_join(threads[0], NULL), 0);
    ck_assert_int_eq(pthread_join(threads[2], NULL), 0);
    ck_assert_uint_eq(players[0].memory, ROUNDS);
    ck_assert_uint_eq(players[1].memory, ROUNDS);
    close_player(&players[0]);
    close_player(&players[1]);
    const char *why = "";
    ck_assert_msg(fake_fabric_is_clean(fabric, &why), "%s is left", why);
    players[0].provider->ops->close(players[0].provider);
    players[1].provider->ops->close(players[1].provider);
    fake_fabric_destroy(fabric);
}

START_TEST(sleeping)
{
    play_all(0);
}
END_TEST

START_TEST(spinning)
{
    play_all(50000);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("fake_provider_threads");
    TCase *tcase = tcase_create("fake_provider_threads");
    tcase_set_timeout(tcase, 100);
    tcase_add_test(tcase, sleeping);
    tcase_add_test(tcase, spinning);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
