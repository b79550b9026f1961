// SPDX-License-Identifier: Apache-2.0
/*
 * The reactor beside other threads: closures, wakes and events of the provider come while its owner spins, goes to
 * sleep or sleeps, here or on a descriptor of its own. A wake-up that is lost lets a test sleep until its time-out ends
 * it; meant to run under ThreadSanitizer as well.
 */
#include <check.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "dataplane/reactor.h"
#include "fakes/run_suite.h"

enum { SENDERS = 3, CLOSURES = 2000, EVENTS = 2000, WAKES = 1000 };

/* A provider whose events are made by another thread. */
struct source {
    struct tl_provider base;
    atomic_uint pending;
    atomic_bool is_armed;
};

static struct source source;
static struct tl_reactor *reactor;
static unsigned event_count;
static unsigned next_number[SENDERS];
static unsigned closure_count;

struct note {
    struct tl_closure closure;
    unsigned sender;
    unsigned number;
};

static unsigned source_poll(struct tl_provider *provider)
{
    (void)provider;
    unsigned events = atomic_exchange(&source.pending, 0);
    event_count += events;
    return events;
}

static bool source_arm(struct tl_provider *provider)
{
    (void)provider;
    atomic_store(&source.is_armed, true);
    return atomic_load(&source.pending) == 0;
}

static void source_disarm(struct tl_provider *provider, bool is_woken)
{
    (void)is_woken;
    uint64_t value;
    atomic_store(&source.is_armed, false);
    ssize_t len = read(provider->fd, &value, sizeof(value));
    (void)len; /* There is nothing to read when something else ended the sleep. */
}

static const struct tl_provider_ops source_ops = {
    .name = "source", .poll = source_poll, .arm = source_arm, .disarm = source_disarm};

static void *make_events(void *argument)
{
    uint64_t one = 1;
    for (unsigned i = 0; i < EVENTS; i++) {
        atomic_fetch_add(&source.pending, 1);
        if (atomic_exchange(&source.is_armed, false)) {
            ck_assert_int_eq(write(source.base.fd, &one, sizeof(one)), sizeof(one));
        }
    }
    return argument;
}

static void deliver_note(struct tl_closure *closure)
{
    struct note *note = TL_CONTAINER_OF(closure, struct note, closure);
    ck_assert_uint_eq(note->number, next_number[note->sender]);
    next_number[note->sender]++;
    closure_count++;
    free(note);
}

static void *send_notes(void *argument)
{
    unsigned sender = *(unsigned *)argument;
    for (unsigned i = 0; i < CLOSURES; i++) {
        struct note *note = malloc(sizeof(*note));
        ck_assert_ptr_nonnull(note);
        *note = (struct note){.closure.run = deliver_note, .sender = sender, .number = i};
        tl_reactor_post(reactor, &note->closure);
        struct tl_reactor_stats stats;
        tl_reactor_get_stats(reactor, &stats);
        ck_assert_uint_le(stats.events, EVENTS);
    }
    return argument;
}

static void create(int64_t spin_ns)
{
    source.base = (struct tl_provider){.ops = &source_ops, .fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
    ck_assert_int_ge(source.base.fd, 0);
    struct tl_reactor_options options = {.spin_ns = spin_ns};
    ck_assert_int_eq(tl_reactor_create(&source.base, &options, &reactor, NULL), TL_OK);
}

static void teardown(void)
{
    tl_reactor_destroy(reactor);
    close(source.base.fd);
}

static void run_here(void)
{
    tl_reactor_run_once(reactor, TL_TIME_NEVER);
}

/* Sleeps as an owner does that has a descriptor of its own. */
static void run_outside(void)
{
    if (tl_reactor_run_once(reactor, 0) || !tl_reactor_prepare_sleep(reactor)) return;
    struct pollfd descriptor = {.fd = tl_reactor_fd(reactor), .events = POLLIN};
    ck_assert_int_eq(poll(&descriptor, 1, -1), 1);
    tl_reactor_end_sleep(reactor, true);
}

static void receive_all(void (*run)(void))
{
    unsigned numbers[SENDERS];
    pthread_t threads[SENDERS + 1];
    for (unsigned i = 0; i < SENDERS; i++) {
        numbers[i] = i;
        ck_assert_int_eq(pthread_create(&threads[i], NULL, send_notes, &numbers[i]), 0);
    }
    ck_assert_int_eq(pthread_create(&threads[SENDERS], NULL, make_events, NULL), 0);
    while (closure_count < SENDERS * CLOSURES || event_count < EVENTS)
        run();
    for (unsigned i = 0; i < SENDERS + 1; i++)
        ck_assert_int_eq(pthread_join(threads[i], NULL), 0);
    struct tl_reactor_stats stats;
    tl_reactor_get_stats(reactor, &stats);
    ck_assert_uint_eq(stats.events, EVENTS);
    ck_assert_uint_eq(closure_count, SENDERS * CLOSURES);
}

START_TEST(sleeping)
{
    create(0);
    receive_all(run_here);
}
END_TEST

START_TEST(spinning)
{
    create(20000);
    tl_reactor_busy(reactor, 1);
    receive_all(run_here);
    tl_reactor_busy(reactor, -1);
}
END_TEST

START_TEST(outside)
{
    create(0);
    receive_all(run_outside);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------- wakes -- */

static atomic_uint asked;
static atomic_uint answered;

/* Makes a request, and wakes the owner, which looks for it only between its rounds. */
static void *ask(void *argument)
{
    for (unsigned i = 1; i <= WAKES; i++) {
        atomic_store(&asked, i);
        tl_reactor_wake(reactor);
        while (atomic_load(&answered) != i)
            sched_yield();
    }
    return argument;
}

static void answer_all(void (*run)(void))
{
    pthread_t thread;
    ck_assert_int_eq(pthread_create(&thread, NULL, ask, NULL), 0);
    while (atomic_load(&answered) < WAKES) {
        atomic_store(&answered, atomic_load(&asked));
        if (atomic_load(&answered) < WAKES) run();
    }
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
}

START_TEST(wakes_while_sleeping)
{
    create(0);
    answer_all(run_here);
}
END_TEST

START_TEST(wakes_while_spinning)
{
    create(20000);
    tl_reactor_busy(reactor, 1);
    answer_all(run_here);
    tl_reactor_busy(reactor, -1);
}
END_TEST

START_TEST(wakes_outside)
{
    create(0);
    answer_all(run_outside);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("reactor_threads");
    TCase *tcase = tcase_create("reactor_threads");
    tcase_add_checked_fixture(tcase, NULL, teardown);
    tcase_set_timeout(tcase, 100);
    tcase_add_test(tcase, sleeping);
    tcase_add_test(tcase, spinning);
    tcase_add_test(tcase, outside);
    tcase_add_test(tcase, wakes_while_sleeping);
    tcase_add_test(tcase, wakes_while_spinning);
    tcase_add_test(tcase, wakes_outside);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
