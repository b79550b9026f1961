// SPDX-License-Identifier: Apache-2.0
/* A thread that runs closures: their order, what waits when it stops, and that it starts only when it is asked to. */
#include <check.h>
#include <semaphore.h>
#include <signal.h>

#include "base/closure_thread.h"
#include "fakes/run_suite.h"

#define COUNT 3

static struct tl_closure_thread thread;
static struct tl_closure closures[COUNT];
static unsigned order[8];
static unsigned run_count;
static pthread_t runner;
static sem_t begun, may_end, all_run;
static bool was_stopping;
static unsigned urgent_count;

static void record(struct tl_closure *closure)
{
    runner = pthread_self();
    order[run_count++] = (unsigned)(closure - closures);
    if (run_count == COUNT) sem_post(&all_run);
}

/* Runs until the test lets it end. */
static void hold(struct tl_closure *closure)
{
    (void)closure;
    sem_post(&begun);
    sem_wait(&may_end);
}

static void post_last_as_urgent(struct tl_closure *closure)
{
    record(closure);
    tl_closure_thread_post_urgent(&thread, &closures[COUNT - 1]);
}

/* Runs until the thread is stopping. */
static void wait_for_stop(struct tl_closure *closure)
{
    (void)closure;
    sem_post(&begun);
    while (!tl_closure_thread_is_stopping(&thread)) {
    }
    was_stopping = true;
}

static void setup(void)
{
    sem_init(&begun, 0, 0);
    sem_init(&may_end, 0, 0);
    sem_init(&all_run, 0, 0);
    tl_closure_thread_init(&thread, "test");
    for (unsigned i = 0; i < COUNT; i++) {
        closures[i].run = record;
        tl_list_init(&closures[i].link);
    }
}

static void start(void)
{
    struct tl_error error;
    ck_assert_int_eq(tl_closure_thread_start(&thread, &error), TL_OK);
}

static void stop_with_none_left(void)
{
    struct tl_list left;
    tl_closure_thread_stop(&thread, &left);
    ck_assert(tl_list_is_empty(&left));
    tl_closure_thread_fini(&thread);
}

START_TEST(it_runs_them_in_order)
{
    start();
    pthread_t started = thread.thread;
    start(); /* it runs already */
    ck_assert(pthread_equal(thread.thread, started));
    for (unsigned i = 0; i < COUNT; i++)
        tl_closure_thread_post(&thread, &closures[i]);
    sem_wait(&all_run);
    stop_with_none_left();
    for (unsigned i = 0; i < COUNT; i++)
        ck_assert_uint_eq(order[i], i);
    ck_assert(!pthread_equal(runner, pthread_self()));
}
END_TEST

START_TEST(what_is_posted_before_the_start_waits)
{
    for (unsigned i = 0; i < COUNT; i++)
        tl_closure_thread_post(&thread, &closures[i]);
    ck_assert_uint_eq(run_count, 0);
    start();
    sem_wait(&all_run);
    stop_with_none_left();
}
END_TEST

START_TEST(urgent_ones_go_first)
{
    tl_closure_thread_post(&thread, &closures[0]);
    tl_closure_thread_post(&thread, &closures[1]);
    tl_closure_thread_post_urgent(&thread, &closures[2]);
    tl_closure_thread_post_urgent(&thread, &closures[2]); /* it waits already */
    start();
    sem_wait(&all_run);
    stop_with_none_left();
    ck_assert_uint_eq(run_count, COUNT);
    ck_assert_uint_eq(order[0], 2);
    ck_assert_uint_eq(order[1], 0);
    ck_assert_uint_eq(order[2], 1);
}
END_TEST

/* Posts itself again as an urgent closure, until the other closure has run. */
static void post_again(struct tl_closure *closure)
{
    ck_assert_uint_lt(urgent_count, 100);
    urgent_count++;
    if (run_count == 0) tl_closure_thread_post_urgent(&thread, closure);
}

static void record_last(struct tl_closure *closure)
{
    record(closure);
    sem_post(&all_run);
}

START_TEST(urgent_ones_do_not_starve_the_others)
{
    closures[0].run = record_last;
    closures[1].run = post_again;
    tl_closure_thread_post(&thread, &closures[0]);
    tl_closure_thread_post_urgent(&thread, &closures[1]);
    start();
    sem_wait(&all_run);
    struct tl_list left;
    tl_closure_thread_stop(&thread, &left);
    tl_closure_thread_fini(&thread);
    ck_assert_uint_eq(run_count, 1);
    ck_assert_uint_le(urgent_count, 2);
}
END_TEST

START_TEST(others_do_not_starve_urgent_ones)
{
    for (unsigned i = 0; i < COUNT - 1; i++)
        tl_closure_thread_post(&thread, &closures[i]);
    closures[0].run = post_last_as_urgent;
    start();
    sem_wait(&all_run);
    stop_with_none_left();
    ck_assert_uint_eq(order[0], 0);
    ck_assert_uint_eq(order[1], COUNT - 1);
    ck_assert_uint_eq(order[2], 1);
}
END_TEST

START_TEST(what_has_not_run_is_left)
{
    struct tl_closure holding = {.run = wait_for_stop};
    struct tl_list left;
    start();
    tl_closure_thread_post(&thread, &holding);
    sem_wait(&begun);
    tl_closure_thread_post(&thread, &closures[0]);
    tl_closure_thread_post(&thread, &closures[1]);
    ck_assert(!tl_closure_thread_is_stopping(&thread));
    tl_closure_thread_stop(&thread, &left);
    ck_assert(was_stopping);
    ck_assert_uint_eq(run_count, 0);
    ck_assert_ptr_eq(tl_list_pop_front(&left), &closures[0].link);
    ck_assert_ptr_eq(tl_list_pop_front(&left), &closures[1].link);
    ck_assert(tl_list_is_empty(&left));
    tl_closure_thread_fini(&thread);
}
END_TEST

/* One that runs does not wait any more: it may be posted again. */
START_TEST(a_running_one_may_be_posted_again)
{
    closures[0].run = hold;
    start();
    tl_closure_thread_post_urgent(&thread, &closures[0]);
    sem_wait(&begun);
    tl_closure_thread_post_urgent(&thread, &closures[0]);
    sem_post(&may_end);
    sem_wait(&begun);
    sem_post(&may_end);
    stop_with_none_left();
}
END_TEST

START_TEST(never_started)
{
    struct tl_list left;
    tl_closure_thread_post(&thread, &closures[0]);
    tl_closure_thread_stop(&thread, &left);
    ck_assert_ptr_eq(tl_list_pop_front(&left), &closures[0].link);
    ck_assert(tl_list_is_empty(&left));
    tl_closure_thread_fini(&thread);
}
END_TEST

START_TEST(no_post_after_the_stop)
{
    struct tl_list left;
    tl_closure_thread_stop(&thread, &left);
    tl_closure_thread_post(&thread, &closures[0]);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("closure_thread");
    TCase *tcase = tcase_create("closure_thread");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, it_runs_them_in_order);
    tcase_add_test(tcase, what_is_posted_before_the_start_waits);
    tcase_add_test(tcase, urgent_ones_go_first);
    tcase_add_test(tcase, urgent_ones_do_not_starve_the_others);
    tcase_add_test(tcase, others_do_not_starve_urgent_ones);
    tcase_add_test(tcase, what_has_not_run_is_left);
    tcase_add_test(tcase, a_running_one_may_be_posted_again);
    tcase_add_test(tcase, never_started);
    tcase_add_test_raise_signal(tcase, no_post_after_the_stop, SIGABRT);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
