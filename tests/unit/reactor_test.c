// SPDX-License-Identifier: Apache-2.0
/*
 * The reactor over a provider that does what each test says, when it is polled or armed. A wake-up that is lost lets a
 * test sleep until its time-out ends it.
 */
#include <check.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>

#include "fakes/fault_alloc.h"

static bool stub_yields(int64_t *inout_now_ns, int64_t *inout_next_ns);
#define tl_thread_yields stub_yields
#include "dataplane/reactor.c"
#include "fakes/run_suite.h"

/* A time so long that only an event ends the sleep. */
#define LONG_NS (INT64_C(1) << 60)

struct stub {
    struct tl_provider base;
    unsigned pending; /* What the next poll returns. */
    unsigned poll_count;
    unsigned arm_count;
    unsigned disarm_count;
    bool is_arm_refused;
    bool shares_processor;
    bool others_run;       /* when this thread yields */
    void (*on_poll)(void); /* Called before it looks at pending. */
    void (*on_arm)(void);
};

static struct stub stub;
static struct tl_reactor *reactor;
static char trace[64]; /* What has run, one character for a closure. */

static void note(char what)
{
    size_t len = strlen(trace);
    ck_assert_uint_lt(len + 1, sizeof(trace));
    trace[len] = what;
}

static void stub_close(struct tl_provider *provider)
{
    (void)provider;
}

static unsigned stub_poll(struct tl_provider *provider)
{
    ck_assert_ptr_eq(provider, &stub.base);
    ck_assert(tl_loop_core_is_driven_here());
    stub.poll_count++;
    if (stub.on_poll != NULL) stub.on_poll();
    unsigned events = stub.pending;
    if (events > 0) note('p');
    stub.pending = 0;
    return events;
}

static bool stub_arm(struct tl_provider *provider)
{
    (void)provider;
    stub.arm_count++;
    if (stub.on_arm != NULL) stub.on_arm();
    return !stub.is_arm_refused;
}

static void signal_provider(void)
{
    uint64_t one = 1;
    ck_assert_int_eq(write(stub.base.fd, &one, sizeof(one)), sizeof(one));
}

static void stub_disarm(struct tl_provider *provider, bool is_woken)
{
    (void)is_woken;
    uint64_t value;
    stub.disarm_count++;
    ssize_t len = read(provider->fd, &value, sizeof(value));
    ck_assert(len == sizeof(value) || len == -1);
}

static bool stub_shares_processor(struct tl_provider *provider)
{
    (void)provider;
    return stub.shares_processor;
}

static bool stub_yields(int64_t *inout_now_ns, int64_t *inout_next_ns)
{
    (void)inout_now_ns;
    (void)inout_next_ns;
    return stub.others_run;
}

static const struct tl_provider_ops stub_ops = {
    .name = "stub",
    .shares_processor = stub_shares_processor,
    .close = stub_close,
    .poll = stub_poll,
    .arm = stub_arm,
    .disarm = stub_disarm,
};

static void create(int64_t spin_ns)
{
    struct tl_reactor_options options = {.spin_ns = spin_ns};
    struct tl_error error = {0};
    ck_assert_msg(tl_reactor_create(&stub.base, &options, &reactor, &error) == TL_OK, "%s", error.message);
}

static void setup(void)
{
    stub = (struct stub){.base = {.ops = &stub_ops, .name = "stub0", .fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)}};
    ck_assert_int_ge(stub.base.fd, 0);
    create(0);
}

static void teardown(void)
{
    tl_reactor_destroy(reactor);
    ck_assert(!tl_loop_core_is_driven_here());
    if (stub.base.fd >= 0) close(stub.base.fd);
}

static void create_again(int64_t spin_ns)
{
    tl_reactor_destroy(reactor);
    create(spin_ns);
}

static struct tl_reactor_stats stats(void)
{
    struct tl_reactor_stats stats;
    tl_reactor_get_stats(reactor, &stats);
    return stats;
}

static void on_closure(struct tl_closure *closure)
{
    (void)closure;
    note('l');
}

static void on_deferred(struct tl_closure *closure)
{
    (void)closure;
    note('d');
}

static void on_timer(struct tl_timer *timer)
{
    (void)timer;
    note('t');
}

static struct tl_closure closure = {.run = on_closure};
static struct tl_closure deferred = {.run = on_deferred};
static struct tl_timer timer = {.fire = on_timer};

static void arm_timer(int64_t due_ns)
{
    ck_assert_int_eq(tl_timers_arm(tl_reactor_timers(reactor), &timer, due_ns), TL_OK);
}

/* ------------------------------------------------------------------------------------------------------ rounds -- */

START_TEST(a_round_in_order)
{
    tl_reactor_defer(reactor, &deferred);
    tl_reactor_post(reactor, &closure);
    stub.pending = 3;
    ck_assert(tl_reactor_run_once(reactor, 0));
    ck_assert_str_eq(trace, "lpd");
    ck_assert_uint_eq(stats().events, 3);
    ck_assert_uint_eq(stats().rounds, 1);
}
END_TEST

START_TEST(nothing_to_do)
{
    ck_assert(!tl_reactor_run_once(reactor, 0));
    ck_assert_uint_eq(stub.poll_count, 1);
    ck_assert_uint_eq(stub.arm_count, 0);
    ck_assert_uint_eq(stats().sleeps, 0);
    ck_assert_uint_eq(stats().events, 0);
    ck_assert_ptr_eq(tl_reactor_provider(reactor), &stub.base);
}
END_TEST

START_TEST(an_idle_round_fires_timers)
{
    arm_timer(1);
    ck_assert(tl_reactor_run_once(reactor, 0));
    ck_assert_str_eq(trace, "t");
    ck_assert(!tl_reactor_run_once(reactor, 0));
}
END_TEST

static void one_event(void)
{
    stub.pending = 1;
}

START_TEST(a_busy_reactor_fires_timers)
{
    arm_timer(1);
    stub.on_poll = one_event;
    for (unsigned i = 0; i < POLLS_PER_CLOCK && strchr(trace, 't') == NULL; i++)
        ck_assert(tl_reactor_run_once(reactor, 0));
    ck_assert_ptr_nonnull(strchr(trace, 't'));
}
END_TEST

static unsigned many_fired;

static void count_fired(struct tl_timer *self)
{
    (void)self;
    many_fired++;
}

/* Those that one round leaves are not late, however busy the reactor is. */
START_TEST(a_busy_reactor_with_many_timers)
{
    static struct tl_timer many[2 * TL_QUOTA];
    for (unsigned i = 0; i < TL_ARRAY_COUNT(many); i++) {
        many[i].fire = count_fired;
        ck_assert_int_eq(tl_timers_arm(tl_reactor_timers(reactor), &many[i], 1 + i), TL_OK);
    }
    many_fired = 0;
    ck_assert(tl_reactor_run_once(reactor, 0));
    ck_assert_uint_eq(many_fired, TL_QUOTA);
    stub.pending = 1;
    ck_assert(tl_reactor_run_once(reactor, 0));
    ck_assert_uint_eq(many_fired, 2 * TL_QUOTA);
}
END_TEST

static void defer_again(struct tl_closure *self)
{
    note('d');
    tl_reactor_defer(reactor, self);
}

START_TEST(what_is_deferred_meanwhile_waits)
{
    struct tl_closure again = {.run = defer_again};
    tl_reactor_defer(reactor, &again);
    ck_assert(tl_reactor_run_once(reactor, 0));
    ck_assert_str_eq(trace, "d");
    ck_assert(tl_reactor_run_once(reactor, TL_TIME_NEVER));
    ck_assert_str_eq(trace, "dd");
    again.run = on_deferred;
    ck_assert(tl_reactor_run_once(reactor, 0));
    ck_assert(!tl_reactor_run_once(reactor, 0));
}
END_TEST

START_TEST(a_wake_ends_one_round)
{
    tl_reactor_wake(reactor);
    ck_assert(tl_reactor_run_once(reactor, TL_TIME_NEVER));
    ck_assert_uint_eq(stats().sleeps, 0);
    int64_t deadline_ns = tl_clock_deadline_ns(TL_NS_PER_MS);
    ck_assert(!tl_reactor_run_once(reactor, deadline_ns));
    ck_assert_int_ge(tl_clock_now_ns(), deadline_ns);
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- sleeping -- */

START_TEST(sleeps_until_the_deadline)
{
    int64_t deadline_ns = tl_clock_deadline_ns(100 * TL_NS_PER_MS);
    ck_assert(!tl_reactor_run_once(reactor, deadline_ns));
    ck_assert_int_ge(tl_clock_now_ns(), deadline_ns);
    ck_assert_uint_eq(stats().sleeps, 1);
    ck_assert_uint_eq(stub.arm_count, 1);
    ck_assert_uint_eq(stub.disarm_count, 1);
}
END_TEST

START_TEST(does_not_sleep_beyond_its_deadline)
{
    ck_assert(!tl_reactor_run_once(reactor, 1));
    ck_assert_uint_eq(stub.arm_count, 0);
    ck_assert_uint_eq(stats().sleeps, 0);
}
END_TEST

START_TEST(sleeps_until_the_next_timer)
{
    int64_t due_ns = tl_clock_deadline_ns(100 * TL_NS_PER_MS);
    arm_timer(due_ns);
    ck_assert(tl_reactor_run_once(reactor, TL_TIME_NEVER));
    ck_assert_int_ge(tl_clock_now_ns(), due_ns);
    ck_assert_str_eq(trace, "t");
    ck_assert_uint_eq(stats().sleeps, 1);
}
END_TEST

/* An event that came after the last poll and before arming makes no descriptor readable. */
START_TEST(an_event_before_arming)
{
    stub.on_arm = one_event;
    ck_assert(tl_reactor_run_once(reactor, TL_TIME_NEVER));
    ck_assert_str_eq(trace, "p");
    ck_assert_uint_eq(stats().sleeps, 0);
    ck_assert_uint_eq(stub.disarm_count, 0);
}
END_TEST

START_TEST(a_provider_that_refuses_to_arm)
{
    stub.is_arm_refused = true;
    ck_assert(!tl_reactor_run_once(reactor, TL_TIME_NEVER));
    ck_assert_uint_eq(stub.poll_count, 2);
    ck_assert_uint_eq(stats().sleeps, 0);
    /* The owner is not known to sleep, and a post need not wake it. */
    tl_reactor_post(reactor, &closure);
    ck_assert(tl_reactor_run_once(reactor, 0));
}
END_TEST

static void signal_when_armed(void)
{
    if (stub.arm_count == 0) return;
    stub.on_poll = one_event;
    signal_provider();
}

START_TEST(an_event_after_arming)
{
    stub.on_poll = signal_when_armed;
    ck_assert(tl_reactor_run_once(reactor, TL_TIME_NEVER));
    ck_assert_str_eq(trace, "p");
    ck_assert_uint_eq(stats().sleeps, 1);
    ck_assert_uint_eq(stub.disarm_count, 1);
}
END_TEST

static void post_closure(void)
{
    stub.on_arm = NULL;
    tl_reactor_post(reactor, &closure);
}

START_TEST(a_closure_before_sleeping)
{
    stub.on_arm = post_closure;
    ck_assert(tl_reactor_run_once(reactor, TL_TIME_NEVER));
    ck_assert_str_eq(trace, "l");
    ck_assert(!tl_reactor_run_once(reactor, 0));
}
END_TEST

static void wake_reactor(void)
{
    stub.on_arm = NULL;
    tl_reactor_wake(reactor);
}

START_TEST(a_wake_before_sleeping)
{
    stub.on_arm = wake_reactor;
    ck_assert(tl_reactor_run_once(reactor, TL_TIME_NEVER));
    ck_assert(!tl_reactor_run_once(reactor, tl_clock_deadline_ns(TL_NS_PER_MS)));
    ck_assert_uint_eq(stats().sleeps, 2);
}
END_TEST

static void no_signal(int number)
{
    (void)number;
}

static void raise_signal(void)
{
    stub.on_arm = NULL;
    struct itimerval in_a_moment = {.it_value.tv_usec = 1000, .it_interval.tv_usec = 1000};
    ck_assert_int_eq(setitimer(ITIMER_REAL, &in_a_moment, NULL), 0);
}

START_TEST(a_signal_ends_the_sleep)
{
    struct sigaction action = {.sa_handler = no_signal};
    ck_assert_int_eq(sigaction(SIGALRM, &action, NULL), 0);
    stub.on_arm = raise_signal;
    ck_assert(!tl_reactor_run_once(reactor, TL_TIME_NEVER));
    ck_assert_int_eq(setitimer(ITIMER_REAL, &(struct itimerval){0}, NULL), 0);
}
END_TEST

START_TEST(a_provider_without_descriptor)
{
    close(stub.base.fd);
    stub.base.fd = -1;
    create_again(0);
    ck_assert(!tl_reactor_prepare_sleep(reactor));
    ck_assert(!tl_reactor_run_once(reactor, TL_TIME_NEVER)); /* A nap. */
    stub.on_arm = one_event;
    ck_assert(tl_reactor_run_once(reactor, TL_TIME_NEVER));
    stub.on_arm = post_closure;
    ck_assert(tl_reactor_run_once(reactor, TL_TIME_NEVER));
    ck_assert_str_eq(trace, "pl");
}
END_TEST

START_TEST(a_provider_that_leaves_out_arm)
{
    static const struct tl_provider_ops ops = {.name = "stub", .close = stub_close, .poll = stub_poll};
    stub.base.ops = &ops;
    ck_assert(!tl_reactor_run_once(reactor, tl_clock_deadline_ns(TL_NS_PER_MS)));
    ck_assert_uint_eq(stats().sleeps, 1);
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- spinning -- */

static void event_at_poll_1000(void)
{
    if (stub.poll_count == 1000) stub.pending = 2;
}

START_TEST(spins_while_busy)
{
    create_again(LONG_NS);
    tl_reactor_busy(reactor, 1);
    stub.on_poll = event_at_poll_1000;
    ck_assert(tl_reactor_run_once(reactor, TL_TIME_NEVER));
    ck_assert_uint_eq(stub.poll_count, 1000);
    ck_assert_uint_eq(stub.arm_count, 0);
    ck_assert_uint_eq(stats().events, 2);
    ck_assert_uint_eq(stats().rounds, 1000);
    tl_reactor_busy(reactor, -1);
}
END_TEST

START_TEST(sleeps_at_once_when_not_busy)
{
    create_again(LONG_NS);
    tl_reactor_busy(reactor, 1);
    tl_reactor_busy(reactor, -1);
    stub.on_arm = one_event;
    ck_assert(tl_reactor_run_once(reactor, TL_TIME_NEVER));
    ck_assert_uint_eq(stub.arm_count, 1);
    ck_assert_uint_eq(stub.poll_count, 2);
}
END_TEST

START_TEST(sleeps_at_once_without_spinning)
{
    tl_reactor_busy(reactor, 1);
    stub.on_arm = one_event;
    ck_assert(tl_reactor_run_once(reactor, TL_TIME_NEVER));
    ck_assert_uint_eq(stub.poll_count, 2);
    tl_reactor_busy(reactor, -1);
}
END_TEST

START_TEST(spins_as_long_as_a_helper_is_expected_to_take)
{
    create_again(1);
    tl_reactor_busy(reactor, 1);
    stub.base.helper_until_ns = LONG_NS;
    stub.on_poll = event_at_poll_1000;
    ck_assert(tl_reactor_run_once(reactor, TL_TIME_NEVER));
    ck_assert_uint_eq(stub.poll_count, 1000);
    ck_assert_uint_eq(stub.arm_count, 0);
    tl_reactor_busy(reactor, -1);
}
END_TEST

/* Polling would only take time from it. */
START_TEST(sleeps_at_once_when_a_helper_takes_longer)
{
    create_again(TL_NS_PER_SEC);
    tl_reactor_busy(reactor, 1);
    stub.base.helper_until_ns = 1;
    stub.on_arm = one_event;
    ck_assert(tl_reactor_run_once(reactor, TL_TIME_NEVER));
    ck_assert_uint_eq(stub.poll_count, 2);
    tl_reactor_busy(reactor, -1);
}
END_TEST

/* Polling would only keep the peer from its answer, or other threads from what is perhaps awaited. */
START_TEST(sleeps_at_once_when_others_want_its_processor)
{
    create_again(LONG_NS);
    tl_reactor_busy(reactor, 1);
    stub.shares_processor = _i == 0;
    stub.others_run = _i == 1;
    stub.on_arm = one_event;
    ck_assert(tl_reactor_run_once(reactor, TL_TIME_NEVER));
    ck_assert_uint_eq(stub.arm_count, 1);
    ck_assert_uint_eq(stub.poll_count, 2 + POLLS_PER_CLOCK);
    tl_reactor_busy(reactor, -1);
}
END_TEST

START_TEST(spinning_comes_to_an_end)
{
    create_again(1);
    tl_reactor_busy(reactor, 2);
    stub.on_arm = one_event;
    ck_assert(tl_reactor_run_once(reactor, TL_TIME_NEVER));
    ck_assert_uint_eq(stub.arm_count, 1);
    ck_assert_uint_ge(stub.poll_count, 2 + POLLS_PER_CLOCK);
    tl_reactor_busy(reactor, -2);
}
END_TEST

/* Rounds that end at their deadline spin together no longer than one that does not. */
START_TEST(spinning_goes_on_over_rounds)
{
    create_again(5 * TL_NS_PER_MS);
    tl_reactor_busy(reactor, 1);
    while (stub.arm_count == 0)
        ck_assert(!tl_reactor_run_once(reactor, tl_clock_deadline_ns(TL_NS_PER_MS)));
    unsigned polls = stub.poll_count;
    ck_assert(!tl_reactor_run_once(reactor, tl_clock_deadline_ns(TL_NS_PER_MS)));
    ck_assert_uint_le(stub.poll_count, polls + 3); /* It has not begun again. */
    stub.pending = 1;
    ck_assert(tl_reactor_run_once(reactor, TL_TIME_NEVER));
    ck_assert_int_eq(reactor->idle_since_ns, 0); /* The next spin is a whole one. */
    tl_reactor_busy(reactor, -1);
}
END_TEST

static void closure_at_poll_1000(void)
{
    if (stub.poll_count == 1000) tl_reactor_post(reactor, &closure);
}

START_TEST(a_closure_ends_spinning)
{
    create_again(LONG_NS);
    tl_reactor_busy(reactor, 1);
    stub.on_poll = closure_at_poll_1000;
    ck_assert(tl_reactor_run_once(reactor, TL_TIME_NEVER));
    ck_assert_uint_eq(stub.poll_count, 1000);
    ck_assert_str_eq(trace, "l");
    tl_reactor_busy(reactor, -1);
}
END_TEST

static void wake_at_poll_1000(void)
{
    if (stub.poll_count == 1000) tl_reactor_wake(reactor);
}

START_TEST(a_wake_ends_spinning)
{
    create_again(LONG_NS);
    tl_reactor_busy(reactor, 1);
    stub.on_poll = wake_at_poll_1000;
    ck_assert(tl_reactor_run_once(reactor, TL_TIME_NEVER));
    ck_assert_uint_eq(stub.poll_count, 1000);
    tl_reactor_busy(reactor, -1);
}
END_TEST

START_TEST(a_timer_ends_spinning)
{
    create_again(LONG_NS);
    tl_reactor_busy(reactor, 1);
    arm_timer(tl_clock_deadline_ns(TL_NS_PER_MS));
    ck_assert(tl_reactor_run_once(reactor, TL_TIME_NEVER));
    ck_assert_str_eq(trace, "t");
    ck_assert_uint_eq(stub.arm_count, 0);
    tl_reactor_busy(reactor, -1);
}
END_TEST

START_TEST(busy_below_nothing)
{
    tl_reactor_busy(reactor, -1);
}
END_TEST

/* ---------------------------------------------------------------------------------------------- outside owners -- */

static bool is_readable(void)
{
    struct pollfd descriptor = {.fd = tl_reactor_fd(reactor), .events = POLLIN};
    int ready = poll(&descriptor, 1, 0);
    ck_assert_int_ge(ready, 0);
    return ready == 1;
}

START_TEST(outside_a_closure)
{
    ck_assert(tl_reactor_prepare_sleep(reactor));
    ck_assert(!is_readable());
    tl_reactor_post(reactor, &closure);
    ck_assert(is_readable());
    tl_reactor_end_sleep(reactor, true);
    ck_assert(!is_readable());
    ck_assert(!tl_reactor_prepare_sleep(reactor));
    ck_assert(tl_reactor_run_once(reactor, 0));
    ck_assert_str_eq(trace, "l");
    ck_assert(tl_reactor_prepare_sleep(reactor));
    tl_reactor_end_sleep(reactor, true);
    ck_assert_uint_eq(stats().sleeps, 2);
}
END_TEST

/* The descriptor has not ended the sleep, but a closure was posted meanwhile. */
START_TEST(outside_a_closure_for_another_owner)
{
    ck_assert(tl_reactor_prepare_sleep(reactor));
    tl_reactor_post(reactor, &closure);
    tl_reactor_end_sleep(reactor, false);
    ck_assert(!is_readable());
    ck_assert(tl_reactor_run_once(reactor, 0));
    ck_assert_str_eq(trace, "l");
}
END_TEST

START_TEST(outside_a_wake)
{
    ck_assert(tl_reactor_prepare_sleep(reactor));
    tl_reactor_wake(reactor);
    ck_assert(is_readable());
    tl_reactor_end_sleep(reactor, true);
    ck_assert(!tl_reactor_prepare_sleep(reactor)); /* The owner must return first. */
    ck_assert(tl_reactor_run_once(reactor, TL_TIME_NEVER));
    ck_assert(tl_reactor_prepare_sleep(reactor));
    ck_assert(!is_readable());
    tl_reactor_end_sleep(reactor, true);
}
END_TEST

START_TEST(outside_an_event)
{
    ck_assert(tl_reactor_prepare_sleep(reactor));
    signal_provider();
    ck_assert(is_readable());
    tl_reactor_end_sleep(reactor, true);
    ck_assert_uint_eq(stub.disarm_count, 1);
    ck_assert(!is_readable());
}
END_TEST

START_TEST(outside_an_event_before_arming)
{
    stub.on_arm = one_event;
    ck_assert(!tl_reactor_prepare_sleep(reactor));
    ck_assert_str_eq(trace, "p");
    tl_reactor_end_sleep(reactor, true); /* It does nothing. */
    ck_assert_uint_eq(stub.disarm_count, 0);
}
END_TEST

START_TEST(outside_something_deferred)
{
    tl_reactor_defer(reactor, &deferred);
    ck_assert(!tl_reactor_prepare_sleep(reactor));
    ck_assert_uint_eq(stub.arm_count, 0);
    ck_assert(tl_reactor_run_once(reactor, 0));
}
END_TEST

START_TEST(outside_a_timer)
{
    arm_timer(tl_clock_deadline_ns(TL_NS_PER_MS));
    ck_assert(tl_reactor_prepare_sleep(reactor));
    struct pollfd descriptor = {.fd = tl_reactor_fd(reactor), .events = POLLIN};
    ck_assert_int_eq(poll(&descriptor, 1, -1), 1);
    tl_reactor_end_sleep(reactor, true);
    ck_assert(tl_reactor_run_once(reactor, 0));
    ck_assert_str_eq(trace, "t");
    ck_assert(tl_reactor_prepare_sleep(reactor));
    ck_assert(!is_readable());
    tl_reactor_end_sleep(reactor, true);
    arm_timer(-5); /* A time long gone. */
    ck_assert(tl_reactor_prepare_sleep(reactor));
    ck_assert(is_readable());
    tl_reactor_end_sleep(reactor, true);
    tl_timers_disarm(tl_reactor_timers(reactor), &timer);
    ck_assert(tl_reactor_prepare_sleep(reactor));
    ck_assert(!is_readable());
    tl_reactor_end_sleep(reactor, true);
}
END_TEST

/* ---------------------------------------------------------------------------------------- creating, destroying -- */

static void post_another(struct tl_closure *self)
{
    (void)self;
    note('a');
    tl_reactor_post(reactor, &closure);
    tl_reactor_defer(reactor, &deferred);
}

START_TEST(destroy_delivers_what_is_left)
{
    struct tl_closure first = {.run = post_another};
    tl_reactor_post(reactor, &first);
    tl_reactor_destroy(reactor);
    reactor = NULL;
    ck_assert_str_eq(trace, "ald");
}
END_TEST

START_TEST(destroy_while_busy)
{
    tl_reactor_busy(reactor, 1);
    tl_reactor_destroy(reactor);
}
END_TEST

START_TEST(no_memory)
{
    struct tl_reactor_options options = {0};
    struct tl_reactor *none = (void *)&options;
    struct tl_error error = {0};
    fault_arm(1);
    ck_assert_int_eq(tl_reactor_create(&stub.base, &options, &none, &error), TL_RESOURCE_EXHAUSTED);
    ck_assert(fault_was_hit());
    ck_assert_ptr_eq(none, &options);
    ck_assert_ptr_nonnull(strstr(error.message, "stub0"));
}
END_TEST

static int lowest_free_descriptor(void)
{
    int fd = fcntl(STDIN_FILENO, F_DUPFD, 0);
    ck_assert_int_ge(fd, 0);
    close(fd);
    return fd;
}

START_TEST(no_descriptors)
{
    struct tl_reactor_options options = {0};
    struct tl_reactor *none = (void *)&options;
    int first = lowest_free_descriptor();
    struct rlimit limit;
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    for (int left = 0; left < 3; left++) {
        struct tl_error error = {0};
        struct rlimit low = {.rlim_cur = (rlim_t)(first + left), .rlim_max = limit.rlim_max};
        ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &low), 0);
        enum tl_status status = tl_reactor_create(&stub.base, &options, &none, &error);
        ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
        ck_assert_int_eq(status, TL_RESOURCE_EXHAUSTED);
        ck_assert_ptr_eq(none, &options);
        ck_assert_ptr_nonnull(strstr(error.message, "stub0"));
        ck_assert_int_eq(lowest_free_descriptor(), first);
    }
}
END_TEST

static void add_rounds(TCase *tcase)
{
    tcase_add_test(tcase, a_round_in_order);
    tcase_add_test(tcase, nothing_to_do);
    tcase_add_test(tcase, an_idle_round_fires_timers);
    tcase_add_test(tcase, a_busy_reactor_fires_timers);
    tcase_add_test(tcase, a_busy_reactor_with_many_timers);
    tcase_add_test(tcase, what_is_deferred_meanwhile_waits);
    tcase_add_test(tcase, a_wake_ends_one_round);
}

static void add_sleeping(TCase *tcase)
{
    tcase_add_test(tcase, sleeps_until_the_deadline);
    tcase_add_test(tcase, does_not_sleep_beyond_its_deadline);
    tcase_add_test(tcase, sleeps_until_the_next_timer);
    tcase_add_test(tcase, an_event_before_arming);
    tcase_add_test(tcase, a_provider_that_refuses_to_arm);
    tcase_add_test(tcase, an_event_after_arming);
    tcase_add_test(tcase, a_closure_before_sleeping);
    tcase_add_test(tcase, a_wake_before_sleeping);
    tcase_add_test(tcase, a_signal_ends_the_sleep);
    tcase_add_test(tcase, a_provider_without_descriptor);
    tcase_add_test(tcase, a_provider_that_leaves_out_arm);
}

static void add_spinning(TCase *tcase)
{
    tcase_add_test(tcase, spins_while_busy);
    tcase_add_test(tcase, sleeps_at_once_when_not_busy);
    tcase_add_test(tcase, sleeps_at_once_without_spinning);
    tcase_add_test(tcase, spins_as_long_as_a_helper_is_expected_to_take);
    tcase_add_test(tcase, sleeps_at_once_when_a_helper_takes_longer);
    tcase_add_loop_test(tcase, sleeps_at_once_when_others_want_its_processor, 0, 2);
    tcase_add_test(tcase, spinning_comes_to_an_end);
    tcase_add_test(tcase, spinning_goes_on_over_rounds);
    tcase_add_test(tcase, a_closure_ends_spinning);
    tcase_add_test(tcase, a_wake_ends_spinning);
    tcase_add_test(tcase, a_timer_ends_spinning);
    tcase_add_test_raise_signal(tcase, busy_below_nothing, SIGABRT);
}

static void add_outside(TCase *tcase)
{
    tcase_add_test(tcase, outside_a_closure);
    tcase_add_test(tcase, outside_a_closure_for_another_owner);
    tcase_add_test(tcase, outside_a_wake);
    tcase_add_test(tcase, outside_an_event);
    tcase_add_test(tcase, outside_an_event_before_arming);
    tcase_add_test(tcase, outside_something_deferred);
    tcase_add_test(tcase, outside_a_timer);
}

static void add_lifetime(TCase *tcase)
{
    tcase_add_test(tcase, destroy_delivers_what_is_left);
    tcase_add_test_raise_signal(tcase, destroy_while_busy, SIGABRT);
    tcase_add_test(tcase, no_memory);
    tcase_add_test(tcase, no_descriptors);
}

int main(void)
{
    Suite *suite = suite_create("reactor");
    TCase *tcase = tcase_create("reactor");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_set_timeout(tcase, 60);
    add_rounds(tcase);
    add_sleeping(tcase);
    add_spinning(tcase);
    add_outside(tcase);
    add_lifetime(tcase);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
