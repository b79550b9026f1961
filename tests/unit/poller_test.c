// SPDX-License-Identifier: Apache-2.0
/* A reactor without a thread, whose rounds this thread runs, as the callers of a worker that they drive. */
#include <check.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "fakes/run_suite.h"
#include "server/progress/poller.h"

/* Enough for a sleeper to have polled for the last time. */
#define LATE_POLLS 5
#define TRIES 5

static struct {
    struct tl_provider base;
    unsigned polls_left; /* the poll that makes it 0 finds something, of which no descriptor tells */
} source;

/* In the place of the C library's: the peer, which shares the processor, answers while this thread yields it. */
static bool has_peer_here;
static pthread_t here;

__attribute__((visibility("default"))) int sched_yield(void)
{
    if (!has_peer_here || !pthread_equal(pthread_self(), here)) return (int)syscall(SYS_sched_yield);
    source.polls_left = 1;
    return 0;
}

static bool source_shares_processor(struct tl_provider *provider)
{
    (void)provider;
    return has_peer_here;
}

static struct tl_loop *loop;
static struct tl_reactor *reactor;
static struct tl_poller poller;

static unsigned source_poll(struct tl_provider *provider)
{
    (void)provider;
    return source.polls_left > 0 && --source.polls_left == 0;
}

static bool source_arm(struct tl_provider *provider)
{
    (void)provider;
    return true;
}

static void source_disarm(struct tl_provider *provider, bool is_woken)
{
    (void)provider, (void)is_woken;
}

static const struct tl_provider_ops source_ops = {.name = "source",
                                                  .poll = source_poll,
                                                  .arm = source_arm,
                                                  .disarm = source_disarm,
                                                  .shares_processor = source_shares_processor};
static const struct tl_executor of_loop, of_reactor;

static void look(void *context)
{
    (void)context;
}

static void setup(void)
{
    const struct tl_reactor_options options = {.spin_ns = 0};
    const struct tl_poller_heartbeat beat = {.look = look};
    source.base = (struct tl_provider){.ops = &source_ops, .fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
    source.polls_left = 0;
    has_peer_here = false;
    here = pthread_self();
    ck_assert_int_eq(tl_loop_create(&loop, NULL), TL_OK);
    ck_assert_int_eq(tl_reactor_create(&source.base, &options, &reactor, NULL), TL_OK);
    const struct tl_polled_reactor polled = {
        .reactor = reactor, .executor = &of_reactor, .spin_ns = TL_NS_PER_SEC, .beat_ns = TL_NS_PER_SEC};
    ck_assert_int_eq(tl_poller_init(&poller, loop, &of_loop, &polled, 1, &beat, NULL), TL_OK);
}

static void teardown(void)
{
    tl_poller_fini(&poller);
    tl_reactor_destroy(reactor);
    tl_loop_destroy(loop);
    close(source.base.fd);
}

/* Whether something that is found by polling alone is found. */
static bool is_found_late(void)
{
    source.polls_left = LATE_POLLS;
    return tl_poller_run(&poller, tl_clock_deadline_ns(100 * TL_NS_PER_MS));
}

/* A peer that has just sent something is likely to send more. So the worker polls on, although it awaits nothing
 * itself. It stops early while other threads want the processor: one try may fail. */
START_TEST(a_server_polls_on)
{
    bool is_found = false;
    for (unsigned i = 0; i < TRIES && !is_found; i++) {
        source.polls_left = 1;
        ck_assert(tl_poller_run(&poller, 0));
        is_found = is_found_late();
    }
    ck_assert(is_found);
}
END_TEST

START_TEST(an_idle_server_sleeps)
{
    source.polls_left = 1;
    ck_assert(tl_poller_run(&poller, 0));
    ck_assert(!tl_poller_run(&poller, 0));
    ck_assert(!is_found_late());
}
END_TEST

/* Its next call looks at gRPC, however long it takes until that comes. */
START_TEST(a_server_that_does_not_wait)
{
    const int64_t past_ns = 1;
    source.polls_left = 1;
    poller.rounds_to_grpc = 16;
    ck_assert(tl_poller_run(&poller, past_ns));
    ck_assert(!tl_poller_run(&poller, past_ns));
    ck_assert_uint_eq(poller.rounds_to_grpc, 0);
}
END_TEST

/* A sleep on each side would take many times as long as the two switches of threads. */
START_TEST(a_peer_on_this_processor_answers)
{
    has_peer_here = true;
    tl_poller_busy(&poller, 1);
    ck_assert(tl_poller_run(&poller, tl_clock_deadline_ns(TL_NS_PER_SEC)));
    tl_poller_busy(&poller, -1);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("poller");
    TCase *tcase = tcase_create("serving");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, a_server_polls_on);
    tcase_add_test(tcase, an_idle_server_sleeps);
    tcase_add_test(tcase, a_server_that_does_not_wait);
    tcase_add_test(tcase, a_peer_on_this_processor_answers);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
