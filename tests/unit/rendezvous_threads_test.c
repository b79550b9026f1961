// SPDX-License-Identifier: Apache-2.0
/*
 * Rendezvous table under several threads: each does random operations with senders and receivers of its own, whose
 * callbacks run on whichever thread causes them and call into the table themselves. Whatever the order: every sender is
 * called back exactly once unless it took its value back, every receiver exactly once unless it cancelled, every tensor
 * comes back, and at the end nothing is left. ThreadSanitizer finds the rest.
 */
#include <check.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/error.h"
#include "fakes/run_suite.h"
#include "fakes/table_list.h"
#include "fakes/whole_steps.h"
#include "server/rendezvous/rendezvous.h"

enum { THREADS = 4, ROUNDS = 24, OPERATIONS = 1500, SLOTS = 6, KEYS = 2, STEPS = 2, NUMBERS = 8 };

static const char *const keys[KEYS] = {"alpha", "beta"};

/* The present use of a slot for a sender or receiver. Only its thread makes a free one busy. */
enum { FREE, BUSY };

struct sender_slot {
    struct tl_sender sender;
    atomic_int state;
};

struct receiver_slot {
    struct tl_receiver receiver;
    atomic_int state;
    atomic_uint choice; /* What deliver does with an offer. */
};

struct actor {
    uint64_t random_state;
    uint64_t incarnation;
    bool closes; /* Closes the table half-way. */
    struct sender_slot senders[SLOTS];
    struct receiver_slot receivers[SLOTS];
};

static struct tl_rendezvous *table;
static struct actor actors[THREADS];

/* Counted over all threads and rounds. */
static atomic_ulong created, released;                       /* Tensors. */
static atomic_ulong sent, over, over_ok, unsent;             /* sent: the table accepted it. */
static atomic_ulong asked, delivered, delivered_ok, cancels; /* Receivers. */
static atomic_ulong violations;                              /* Callbacks that must not come. */

/* SplitMix64. */
static unsigned below(struct actor *actor, unsigned limit)
{
    uint64_t z = (actor->random_state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (unsigned)((z ^ (z >> 31)) % limit);
}

static void move(atomic_int *state, int from, int to)
{
    if (atomic_exchange(state, to) != from) atomic_fetch_add(&violations, 1);
}

/* --------------------------------------------------------------------------------------------------- callbacks -- */

static void on_release(void *data, void *context)
{
    (void)data, (void)context;
    atomic_fetch_add(&released, 1);
}

static void on_over(struct tl_sender *sender, const struct tl_error *status)
{
    struct sender_slot *slot = TL_CONTAINER_OF(sender, struct sender_slot, sender);
    atomic_fetch_add(&over, 1);
    if (status->code == TL_OK) atomic_fetch_add(&over_ok, 1);
    move(&slot->state, BUSY, FREE);
}

static void on_deliver(struct tl_receiver *receiver, const struct tl_error *status, const struct tl_offer *offer)
{
    struct receiver_slot *slot = TL_CONTAINER_OF(receiver, struct receiver_slot, receiver);
    const struct tl_request_id id = receiver->id;
    unsigned choice = atomic_load(&slot->choice);
    atomic_fetch_add(&delivered, 1);
    if ((status->code == TL_OK) != (offer != NULL)) atomic_fetch_add(&violations, 1);
    /* From here on the slot belongs to its thread again. */
    move(&slot->state, BUSY, FREE);
    if (offer == NULL) return;
    atomic_fetch_add(&delivered_ok, 1);
    if (choice == 0) tl_rendezvous_acknowledge(table, &id);
    if (choice == 1) tl_rendezvous_release(table, &id);
    if (choice == 2) tl_rendezvous_receiver_lost(table, &id, 5);
    tl_tensor_put(offer->tensor);
}

/* -------------------------------------------------------------------------------------------------- operations -- */

static struct tl_tensor *make_tensor(void)
{
    static char memory[8];
    static const uint64_t dims[1] = {sizeof(memory)};
    struct tl_tensor *tensor;
    const struct tl_tensor_view view = {.size_bytes = sizeof(view),
                                        .dtype = TL_U8,
                                        .rank = 1,
                                        .dims = dims,
                                        .data = memory,
                                        .capacity_bytes = sizeof(memory),
                                        .release = on_release};
    TL_CHECK(tl_tensor_wrap(&view, &tensor, NULL) == TL_OK);
    atomic_fetch_add(&created, 1);
    return tensor;
}

static void do_send(struct actor *actor)
{
    struct sender_slot *slot = &actor->senders[below(actor, SLOTS)];
    if (atomic_load(&slot->state) != FREE) return;
    struct tl_tensor *tensor = make_tensor();
    slot->sender.over = on_over;
    atomic_store(&slot->state, BUSY);
    /* From here to the answer the value may be given, received and over. */
    if (tl_rendezvous_send(table, keys[below(actor, KEYS)], below(actor, STEPS), tensor, &slot->sender, NULL) ==
        TL_OK) {
        atomic_fetch_add(&sent, 1);
    } else {
        move(&slot->state, BUSY, FREE);
    }
    tl_tensor_put(tensor);
}

static void do_unsend(struct actor *actor)
{
    struct sender_slot *slot = &actor->senders[below(actor, SLOTS)];
    if (atomic_load(&slot->state) != BUSY || !tl_rendezvous_unsend(table, &slot->sender)) return;
    atomic_fetch_add(&unsent, 1);
    move(&slot->state, BUSY, FREE);
}

static void do_receive(struct actor *actor)
{
    struct receiver_slot *slot = &actor->receivers[below(actor, SLOTS)];
    if (atomic_load(&slot->state) != FREE) return;
    slot->receiver = (struct tl_receiver){.id = {actor->incarnation, 1 + below(actor, NUMBERS)},
                                          .key = keys[below(actor, KEYS)],
                                          .step = below(actor, STEPS),
                                          .deliver = on_deliver};
    atomic_store(&slot->choice, below(actor, 4));
    atomic_store(&slot->state, BUSY);
    atomic_fetch_add(&asked, 1);
    tl_rendezvous_receive(table, &slot->receiver);
}

static void do_cancel(struct actor *actor)
{
    struct receiver_slot *slot = &actor->receivers[below(actor, SLOTS)];
    if (atomic_load(&slot->state) != BUSY || !tl_rendezvous_cancel(table, &slot->receiver)) return;
    atomic_fetch_add(&cancels, 1);
    move(&slot->state, BUSY, FREE);
}

static void do_publish(struct actor *actor)
{
    struct tl_tensor *tensor = make_tensor();
    uint64_t number = 0;
    enum tl_status code =
        tl_rendezvous_publish(table, keys[below(actor, KEYS)], below(actor, STEPS), tensor, &number, NULL);
    if ((code == TL_OK) != (number != 0)) atomic_fetch_add(&violations, 1);
    tl_tensor_put(tensor);
}

static void do_list(struct actor *actor)
{
    struct tl_listing listing;
    (void)actor;
    if (table_list(table, "*", &listing, NULL) != TL_OK) return;
    if (listing.count > KEYS) atomic_fetch_add(&violations, 1);
    table_listing_fini(&listing);
}

static void do_withdraw(struct actor *actor)
{
    enum tl_status code = tl_rendezvous_withdraw(table, keys[below(actor, KEYS)], NULL);
    if (code != TL_OK && code != TL_NOT_FOUND && code != TL_UNAVAILABLE) atomic_fetch_add(&violations, 1);
    if (below(actor, 2) && table_withdraw_matching(table, "*a") > KEYS) atomic_fetch_add(&violations, 1);
}

static void do_reservation(struct actor *actor)
{
    const struct tl_request_id id = {actor->incarnation, 1 + below(actor, NUMBERS)};
    switch (below(actor, 4)) {
    case 0:
        tl_rendezvous_release(table, &id);
        break;
    case 1:
        tl_rendezvous_receiver_lost(table, &id, below(actor, 10));
        break;
    default:
        tl_rendezvous_acknowledge(table, &id);
        break;
    }
}

static void do_expire(struct actor *actor)
{
    if (expire_all(table, below(actor, 10)) < 0) atomic_fetch_add(&violations, 1);
    if (below(actor, 4) == 0) release_whole_incarnation(table, 1 + below(actor, THREADS));
}

static void do_step(struct actor *actor)
{
    uint64_t step = below(actor, STEPS);
    if (below(actor, 3) == 0) {
        struct tl_error status;
        tl_error_set(&status, TL_DATA_LOSS, "aborted");
        abort_whole_step(table, step, &status);
    }
    if (end_whole_step(table, step) > KEYS) atomic_fetch_add(&violations, 1);
}

static void close_table(void)
{
    struct tl_error status;
    tl_error_set(&status, TL_UNAVAILABLE, "closed");
    tl_rendezvous_close(table, &status);
}

static void *act(void *argument)
{
    static void (*const kinds[])(struct actor *) = {
        do_send,    do_send,    do_send,    do_send,     do_send,        do_receive,     do_receive,
        do_receive, do_receive, do_receive, do_receive,  do_reservation, do_reservation, do_reservation,
        do_unsend,  do_cancel,  do_publish, do_withdraw, do_list,        do_expire,      do_step,
    };
    struct actor *actor = argument;
    for (int i = 0; i < OPERATIONS; i++) {
        if (actor->closes && i == OPERATIONS / 2) close_table();
        kinds[below(actor, TL_ARRAY_COUNT(kinds))](actor);
    }
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------- round -- */

static void assert_nothing_is_left(void)
{
    struct tl_rendezvous_stats stats;
    tl_rendezvous_get_stats(table, &stats);
    ck_assert_uint_eq(stats.waiting_receivers, 0);
    ck_assert_uint_eq(stats.held_tensors, 0);
    ck_assert_uint_eq(stats.held_bytes, 0);
    ck_assert_uint_eq(stats.published_tensors, 0);
    ck_assert_uint_eq(stats.published_bytes, 0);
    for (int i = 0; i < THREADS; i++) {
        for (int j = 0; j < SLOTS; j++) {
            ck_assert_int_eq(atomic_load(&actors[i].senders[j].state), FREE);
            ck_assert_int_eq(atomic_load(&actors[i].receivers[j].state), FREE);
        }
    }
    ck_assert_uint_eq(atomic_load(&violations), 0);
    ck_assert_uint_eq(atomic_load(&sent), atomic_load(&over) + atomic_load(&unsent));
    ck_assert_uint_eq(atomic_load(&asked), atomic_load(&delivered) + atomic_load(&cancels));
    ck_assert_uint_eq(atomic_load(&created), atomic_load(&released));
}

static void run_round(unsigned round)
{
    const struct tl_rendezvous_limits limits = {10, 80, 1, 0};
    pthread_t threads[THREADS];
    ck_assert_int_eq(tl_rendezvous_create(&limits, &table, NULL), TL_OK);
    for (unsigned i = 0; i < THREADS; i++) {
        actors[i] = (struct actor){
            .random_state = round * THREADS + i, .incarnation = 1 + i, .closes = i == 0 && round % 3 == 0};
        ck_assert_int_eq(pthread_create(&threads[i], NULL, act, &actors[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        ck_assert_int_eq(pthread_join(threads[i], NULL), 0);
    close_table();
    assert_nothing_is_left();
    tl_rendezvous_destroy(table);
}

START_TEST(every_callback_comes_once)
{
    for (unsigned round = 0; round < ROUNDS; round++)
        run_round(round);
    /* The test has covered something. */
    ck_assert_uint_gt(atomic_load(&over_ok), 1000);
    ck_assert_uint_gt(atomic_load(&delivered_ok), 1000);
    ck_assert_uint_gt(atomic_load(&unsent), 100);
    ck_assert_uint_gt(atomic_load(&cancels), 100);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("rendezvous_threads");
    TCase *tcase = tcase_create("threads");
    tcase_set_timeout(tcase, 100);
    tcase_add_test(tcase, every_callback_comes_once);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
