// SPDX-License-Identifier: Apache-2.0
#include "base/thread.h"

#include <check.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "fakes/run_suite.h"

/* In the place of the C library's: another thread runs for so long. */
static unsigned yield_count, others_us;

__attribute__((visibility("default"))) int sched_yield(void)
{
    yield_count++;
    if (others_us > 0) usleep(others_us);
    return 0;
}

struct seen {
    sigset_t blocked;
    sem_t may_end; /* The thread runs until then. */
    sem_t is_over;
};

static void *look(void *argument)
{
    struct seen *seen = argument;
    pthread_sigmask(SIG_SETMASK, NULL, &seen->blocked);
    while (sem_wait(&seen->may_end) != 0) {
    }
    sem_post(&seen->is_over);
    return argument;
}

START_TEST(signals_of_the_program_are_not_taken)
{
    struct seen seen;
    pthread_t thread;
    void *result;
    sigset_t before, after;
    sem_init(&seen.may_end, 0, 0);
    sem_init(&seen.is_over, 0, 0);
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    ck_assert_int_eq(tl_thread_start("tl-test", look, &seen, &thread, NULL), TL_OK);
    char name[16];
    ck_assert_int_eq(pthread_getname_np(thread, name, sizeof(name)), 0);
    ck_assert_str_eq(name, "tl-test");
    sem_post(&seen.may_end);
    ck_assert_int_eq(pthread_join(thread, &result), 0);
    ck_assert_ptr_eq(result, &seen);
    static const int left_to_the_program[] = {SIGTERM, SIGINT, SIGHUP, SIGCHLD, SIGUSR1, SIGALRM};
    for (size_t i = 0; i < TL_ARRAY_COUNT(left_to_the_program); i++)
        ck_assert_int_eq(sigismember(&seen.blocked, left_to_the_program[i]), 1);
    static const int faults[] = {SIGBUS, SIGSEGV, SIGFPE, SIGABRT};
    for (size_t i = 0; i < TL_ARRAY_COUNT(faults); i++)
        ck_assert_int_eq(sigismember(&seen.blocked, faults[i]), 0);
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    for (int number = 1; number < SIGRTMIN; number++)
        ck_assert_int_eq(sigismember(&before, number), sigismember(&after, number));
    sem_destroy(&seen.may_end);
    sem_destroy(&seen.is_over);
}
END_TEST

START_TEST(detached_threads_run_too)
{
    struct seen seen;
    sem_init(&seen.may_end, 0, 1);
    sem_init(&seen.is_over, 0, 0);
    ck_assert_int_eq(tl_thread_start("tl-test", look, &seen, NULL, NULL), TL_OK);
    ck_assert_int_eq(sem_wait(&seen.is_over), 0);
    sem_destroy(&seen.may_end);
    sem_destroy(&seen.is_over);
}
END_TEST

START_TEST(as_many_as_there_may_be)
{
    struct tl_error error;
    ck_assert_int_eq(tl_thread_check_available(0, &error), TL_OK);
    ck_assert_int_eq(tl_thread_check_available(TL_THREAD_MAX_PROBES, &error), TL_OK);
}
END_TEST

START_TEST(yields_at_times)
{
    int64_t now_ns = 1, next_ns = 2;
    ck_assert(!tl_thread_yields(&now_ns, &next_ns));
    ck_assert_uint_eq(yield_count, 0);
    ck_assert(now_ns == 1 && next_ns == 2);
    others_us = 1000;
    now_ns = next_ns = tl_clock_now_ns();
    int64_t before_ns = now_ns;
    ck_assert(tl_thread_yields(&now_ns, &next_ns));
    ck_assert_uint_eq(yield_count, 1);
    ck_assert_int_ge(now_ns - before_ns, TL_NS_PER_MS);
    ck_assert_int_eq(next_ns, now_ns + TL_THREAD_YIELD_NS);
    others_us = 0;
    do /* the system may let others run in any case */
        now_ns = next_ns = tl_clock_now_ns();
    while (tl_thread_yields(&now_ns, &next_ns));
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("thread");
    TCase *cases = tcase_create("thread");
    tcase_add_test(cases, signals_of_the_program_are_not_taken);
    tcase_add_test(cases, detached_threads_run_too);
    tcase_add_test(cases, as_many_as_there_may_be);
    tcase_add_test(cases, yields_at_times);
    suite_add_tcase(suite, cases);
    return run_suite(suite);
}
