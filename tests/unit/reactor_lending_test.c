// SPDX-License-Identifier: Apache-2.0
/*
 * A reactor with a thread, and this thread as the owner of the loop, which borrows it. The provider notes which thread
 * polls it. What is lost lets a test wait until its time-out ends it; meant to run under ThreadSanitizer as well.
 */
#include <check.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "fakes/run_suite.h"
#include "server/progress/poller.h"

enum { MANY = 2000, ENOUGH = 16, MOST_LEFT = 4, FEW = 2 };

static struct {
    struct tl_provider base;
    atomic_uint pending;
    atomic_uint handled;
    atomic_uint handled_here; /* by the thread of the test */
    atomic_bool is_armed;
    atomic_bool is_endless; /* each poll finds something */
    atomic_uint looked;     /* how often what has perhaps ended a sleep was looked at */
} source;

static pthread_t here;
static struct tl_loop *loop;
static struct tl_reactor *reactor;
static struct tl_reactor_thread thread;
static struct tl_poller poller;
static atomic_uint closure_count;

static unsigned source_poll(struct tl_provider *provider)
{
    (void)provider;
    unsigned events = atomic_exchange(&source.pending, 0) + atomic_load(&source.is_endless);
    if (pthread_equal(pthread_self(), here)) atomic_fetch_add(&source.handled_here, events);
    atomic_fetch_add(&source.handled, events);
    return events;
}

static bool source_arm(struct tl_provider *provider)
{
    (void)provider;
    atomic_store(&source.is_armed, true);
    return atomic_load(&source.pending) == 0 && !atomic_load(&source.is_endless);
}

static void source_disarm(struct tl_provider *provider, bool is_woken)
{
    uint64_t value;
    atomic_store(&source.is_armed, false);
    atomic_fetch_add(&source.looked, is_woken);
    ssize_t len = read(provider->fd, &value, sizeof(value));
    (void)len; /* There is nothing to read when something else ended the sleep. */
}

static const struct tl_provider_ops source_ops = {
    .name = "source", .poll = source_poll, .arm = source_arm, .disarm = source_disarm};

static void ring(void)
{
    uint64_t one = 1;
    ck_assert_int_eq(write(source.base.fd, &one, sizeof(one)), sizeof(one));
}

static void happen(void)
{
    atomic_fetch_add(&source.pending, 1);
    if (atomic_exchange(&source.is_armed, false)) ring();
}

/* In the place of the C library's: other threads want the processor of the test's thread when it yields. */
static bool others_run;
static unsigned yield_count; /* while they do */

__attribute__((visibility("default"))) int sched_yield(void)
{
    if (others_run && pthread_equal(pthread_self(), here)) {
        yield_count++;
        usleep(1000);
    }
    return (int)syscall(SYS_sched_yield);
}

static const struct tl_executor of_loop, of_reactor;

static void setup(void)
{
    here = pthread_self();
    source.base = (struct tl_provider){.ops = &source_ops, .fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
    atomic_store(&source.pending, 0);
    atomic_store(&source.handled, 0);
    atomic_store(&source.handled_here, 0);
    atomic_store(&source.looked, 0);
    atomic_store(&closure_count, 0);
    const struct tl_reactor_options options = {.spin_ns = 0};
    ck_assert_int_eq(tl_loop_create(&loop, NULL), TL_OK);
    ck_assert_int_eq(tl_reactor_create(&source.base, &options, &reactor, NULL), TL_OK);
    ck_assert_int_eq(tl_reactor_thread_start(&thread, reactor, &of_reactor, loop, NULL), TL_OK);
    const struct tl_polled_reactor polled = {.reactor = reactor, .executor = &of_reactor, .thread = &thread};
    ck_assert_int_eq(tl_poller_init(&poller, loop, &of_loop, &polled, 1, NULL, NULL), TL_OK);
}

static void teardown(void)
{
    atomic_store(&source.is_endless, false);
    tl_poller_give_back(&poller);
    tl_poller_fini(&poller);
    tl_reactor_thread_stop(&thread);
    tl_reactor_destroy(reactor);
    tl_loop_destroy(loop);
    close(source.base.fd);
}

/* Borrows the reactor as the callers of a worker do that have enough requests, and asks for it about once a second: a
 * question that comes while the thread lends the reactor stays, and is forgotten here. The thread counts that it has
 * lent the reactor, and wakes the loop, after the reactor can be borrowed. */
static void borrow(void)
{
    for (unsigned i = 0; !tl_poller_has_borrowed(&poller); i++) {
        poller.begun_count = i % 1000 == 0 ? ENOUGH : 0;
        tl_poller_borrow(&poller);
        if (!tl_poller_has_borrowed(&poller)) (void)tl_poller_run(&poller, tl_clock_deadline_ns(TL_NS_PER_MS));
    }
    while (atomic_load(&thread.lent_count) == 0)
        sched_yield();
    atomic_store(&thread.is_asked_for, false);
}

static void wait_until_handled(unsigned count)
{
    while (atomic_load(&source.handled) != count)
        sched_yield();
}

static void count_closure(struct tl_closure *closure)
{
    (void)closure;
    atomic_fetch_add(&closure_count, 1);
}

static void *make_events(void *argument)
{
    struct tl_closure closures[MANY];
    for (unsigned i = 0; i < MANY; i++) {
        closures[i].run = count_closure;
        tl_reactor_post(reactor, &closures[i]);
        happen();
        if (i % 16 == 0) sched_yield();
    }
    while (atomic_load(&closure_count) < MANY)
        sched_yield();
    return argument;
}

/* --------------------------------------------------------------------------------------------------------- tests -- */

START_TEST(a_borrower_drives)
{
    happen();
    wait_until_handled(1);
    ck_assert_uint_eq(source.handled_here, 0);
    borrow();
    ck_assert_uint_eq(thread.lent_count, 1);
    for (unsigned i = 1; i <= 100; i++) {
        happen();
        ck_assert(tl_poller_run(&poller, 0));
        ck_assert_uint_eq(source.handled_here, i);
        tl_poller_rest(&poller);
        ck_assert(!tl_poller_has_borrowed(&poller));
        tl_poller_borrow(&poller);
        ck_assert(tl_poller_has_borrowed(&poller));
    }
    ck_assert_uint_eq(thread.lent_count, 1);
    ck_assert_uint_eq(thread.taken_count, 0);
}
END_TEST

/* What has not ended the sleep of the thread is not looked at, since that takes system calls. */
START_TEST(a_borrower_makes_no_system_call)
{
    borrow();
    unsigned looked = source.looked;
    for (unsigned i = 0; i < 100; i++) {
        tl_poller_rest(&poller);
        tl_poller_borrow(&poller);
        ck_assert(tl_poller_has_borrowed(&poller));
    }
    ck_assert_uint_eq(source.looked, looked);
    tl_poller_rest(&poller);
    happen();
    wait_until_handled(1);
    ck_assert_uint_eq(source.looked, looked + 1);
}
END_TEST

static void ask_and_answer(void)
{
    tl_poller_busy(&poller, 1);
    tl_poller_busy(&poller, -1);
}

START_TEST(only_who_has_requests_asks)
{
    for (unsigned i = 0; i < ENOUGH - 1; i++)
        ask_and_answer();
    tl_poller_borrow(&poller);
    ck_assert(!atomic_load(&thread.is_asked_for));
    ask_and_answer();
    tl_poller_borrow(&poller);
    while (atomic_load(&thread.lent_count) == 0)
        sched_yield();
}
END_TEST

START_TEST(many_requests_leave_it_to_the_thread)
{
    borrow();
    poller.most_to_borrow = 8;
    for (unsigned i = 0; i < 9; i++)
        tl_poller_busy(&poller, 1);
    tl_poller_borrow(&poller);
    ck_assert(!tl_poller_has_borrowed(&poller));
    happen();
    wait_until_handled(1);
    ck_assert_uint_eq(source.handled_here, 0);
    tl_poller_busy(&poller, -9);
    tl_poller_borrow(&poller);
    ck_assert(!atomic_load(&thread.is_asked_for));
    ck_assert_uint_eq(thread.lent_count, 1);
}
END_TEST

/* On two processors there is none for a thread beside the borrower and the peer. */
START_TEST(few_processors_leave_many_requests_to_the_borrower)
{
    cpu_set_t all, one;
    struct tl_poller other;
    ck_assert_int_eq(sched_getaffinity(0, sizeof(all), &all), 0);
    CPU_ZERO(&one);
    CPU_SET((size_t)sched_getcpu(), &one);
    ck_assert_int_eq(sched_setaffinity(0, sizeof(one), &one), 0);
    ck_assert_int_eq(tl_poller_init(&other, loop, &of_loop, NULL, 0, NULL, NULL), TL_OK);
    ck_assert_int_eq(sched_setaffinity(0, sizeof(all), &all), 0);
    ck_assert_int_eq(other.most_to_borrow, INT64_MAX);
    tl_poller_fini(&other);
    poller.most_to_borrow = INT64_MAX;
    borrow();
    for (unsigned i = 0; i < MANY; i++)
        tl_poller_busy(&poller, 1);
    tl_poller_borrow(&poller);
    ck_assert(tl_poller_has_borrowed(&poller));
    tl_poller_busy(&poller, -MANY);
}
END_TEST

/* The thread takes a resting reactor when there is something to do, and keeps it when that happens often. */
START_TEST(the_thread_takes_what_rests)
{
    borrow();
    tl_poller_rest(&poller);
    for (unsigned i = 1; i <= MOST_LEFT + 1; i++) {
        happen();
        wait_until_handled(i);
    }
    ck_assert_uint_eq(source.handled_here, 0);
    while (atomic_load(&thread.taken_count) == 0)
        sched_yield();
    tl_poller_borrow(&poller);
    ck_assert(!tl_poller_has_borrowed(&poller));
    happen();
    wait_until_handled(MOST_LEFT + 2);
    ck_assert_uint_eq(source.handled_here, 0);
}
END_TEST

/* What is left to the thread between two calls of a borrower does not take the reactor from it. */
START_TEST(few_events_leave_it_resting)
{
    borrow();
    for (unsigned i = 0; i < 100; i++) {
        tl_poller_rest(&poller);
        for (unsigned j = 1; j <= FEW; j++) {
            happen();
            wait_until_handled(i * FEW + j);
        }
        poller.begun_count = 0;
        while (tl_poller_borrow(&poller), !tl_poller_has_borrowed(&poller))
            sched_yield();
    }
    ck_assert_uint_eq(source.handled_here, 0);
    ck_assert_uint_eq(thread.taken_count, 0);
    ck_assert_uint_eq(thread.lent_count, 1);
}
END_TEST

/* What is to be done when the borrower leaves is done before the reactor rests. */
START_TEST(a_busy_reactor_rests)
{
    borrow();
    happen();
    tl_poller_rest(&poller);
    ck_assert(!tl_poller_has_borrowed(&poller));
    ck_assert_uint_eq(source.handled_here, 1);
    ck_assert_uint_eq(thread.taken_count, 0);
}
END_TEST

/* A borrower that takes a few results at a time finds the reactor that it has left, unless it is kept away for long. */
START_TEST(a_borrower_finds_what_it_left)
{
    bool is_found = false;
    for (unsigned i = 0; i < 100 && !is_found; i++) {
        borrow();
        atomic_store(&source.is_endless, true);
        tl_poller_rest(&poller);
        ck_assert(!tl_poller_has_borrowed(&poller));
        poller.begun_count = 0;
        tl_poller_borrow(&poller);
        is_found = tl_poller_has_borrowed(&poller);
        atomic_store(&source.is_endless, false);
    }
    ck_assert(is_found);
}
END_TEST

/* When the loop goes to one who borrows nothing, the thread has at once what was left. */
START_TEST(what_was_left_is_given_back)
{
    for (unsigned i = 0; i < 10; i++) {
        borrow();
        atomic_store(&source.is_endless, true);
        tl_poller_rest(&poller);
        tl_poller_give_back(&poller);
        poller.begun_count = 0;
        tl_poller_borrow(&poller);
        ck_assert(!tl_poller_has_borrowed(&poller));
        atomic_store(&source.is_endless, false);
    }
}
END_TEST

/* What has no end goes on in the thread. */
START_TEST(a_reactor_that_cannot_rest_goes_back)
{
    borrow();
    atomic_store(&source.is_endless, true);
    tl_poller_rest(&poller);
    ck_assert(!tl_poller_has_borrowed(&poller));
    unsigned handled_here = source.handled_here, handled = source.handled;
    while (atomic_load(&source.handled) < handled + 100)
        sched_yield();
    ck_assert_uint_eq(source.handled_here, handled_here);
}
END_TEST

/* The descriptor may be readable without any reason; the borrower gets the reactor again. */
START_TEST(a_false_alarm_leaves_it_resting)
{
    borrow();
    for (unsigned i = 0; i < 100; i++) {
        tl_poller_rest(&poller);
        ring();
        for (unsigned j = 0; j < i; j++)
            sched_yield();
        poller.begun_count = 0;
        while (tl_poller_borrow(&poller), !tl_poller_has_borrowed(&poller))
            sched_yield();
    }
    ck_assert_uint_eq(thread.taken_count, 0);
    ck_assert_uint_eq(thread.lent_count, 1);
}
END_TEST

START_TEST(given_back)
{
    borrow();
    tl_poller_give_back(&poller);
    ck_assert(!tl_poller_has_borrowed(&poller));
    happen();
    wait_until_handled(1);
    ck_assert_uint_eq(source.handled_here, 0);
}
END_TEST

/* A borrower without requests sleeps in the loop, and leaves the events to the thread. */
START_TEST(a_sleeping_borrower_rests)
{
    borrow();
    do { /* A round does not sleep when its deadline has passed, or the thread has only now woken the loop. */
        (void)tl_poller_run(&poller, tl_clock_deadline_ns(TL_NS_PER_MS));
    } while (tl_poller_has_borrowed(&poller));
    happen();
    wait_until_handled(1);
    ck_assert_uint_eq(source.handled_here, 0);
}
END_TEST

/* A borrower that awaits something polls, but not in the place of threads that want its processor. */
START_TEST(a_borrower_that_polls_gives_way)
{
    borrow();
    poller.spin_ns = TL_TIME_NEVER / 4;
    tl_poller_busy(&poller, 1);
    others_run = true;
    unsigned round_count = 0;
    do { /* a round may end because the thread has only now woken the loop */
        (void)tl_poller_run(&poller, tl_clock_deadline_ns(TL_NS_PER_SEC));
        round_count++;
    } while (tl_poller_has_borrowed(&poller));
    ck_assert_uint_gt(yield_count, 0);
    ck_assert_uint_le(yield_count, round_count);
    others_run = false;
    tl_poller_busy(&poller, -1);
    happen();
    wait_until_handled(1);
    ck_assert_uint_eq(source.handled_here, 0);
}
END_TEST

/* Events and closures come while the reactor goes from hand to hand. */
START_TEST(nothing_is_lost)
{
    pthread_t maker;
    ck_assert_int_eq(pthread_create(&maker, NULL, make_events, NULL), 0);
    for (unsigned i = 0; atomic_load(&source.handled) < MANY || atomic_load(&closure_count) < MANY; i++) {
        poller.begun_count = i % 2 == 0 ? ENOUGH : 0;
        tl_poller_borrow(&poller);
        (void)tl_poller_run(&poller, 0);
        if (i % 8 == 0)
            tl_poller_give_back(&poller);
        else if (i % 3 != 0)
            tl_poller_rest(&poller);
        if (i % 16 == 0) sched_yield();
    }
    pthread_join(maker, NULL);
    ck_assert_uint_eq(source.handled, MANY);
}
END_TEST

static void add(Suite *suite, const char *name, const TTest *test)
{
    TCase *tcase = tcase_create(name);
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_set_timeout(tcase, 20);
    tcase_add_test(tcase, test);
    suite_add_tcase(suite, tcase);
}

int main(void)
{
    Suite *suite = suite_create("reactor_lending");
    add(suite, "drives", a_borrower_drives);
    add(suite, "looks", a_borrower_makes_no_system_call);
    add(suite, "asks", only_who_has_requests_asks);
    add(suite, "many", many_requests_leave_it_to_the_thread);
    add(suite, "few_processors", few_processors_leave_many_requests_to_the_borrower);
    add(suite, "takes", the_thread_takes_what_rests);
    add(suite, "few", few_events_leave_it_resting);
    add(suite, "busy", a_busy_reactor_rests);
    add(suite, "left", a_borrower_finds_what_it_left);
    add(suite, "left_and_given", what_was_left_is_given_back);
    add(suite, "endless", a_reactor_that_cannot_rest_goes_back);
    add(suite, "false_alarm", a_false_alarm_leaves_it_resting);
    add(suite, "given_back", given_back);
    add(suite, "sleeps", a_sleeping_borrower_rests);
    add(suite, "gives_way", a_borrower_that_polls_gives_way);
    add(suite, "nothing_lost", nothing_is_lost);
    return run_suite(suite);
}
