// SPDX-License-Identifier: Apache-2.0
/*
 * Work that is posted while a caller runs the last round before it leaves. The parked thread takes it at once: here it
 * does not look by itself after a while, so that a test in which it is not woken runs into its time-out.
 *
 * A thread that posts uses the engine after its closure has run: the engine stays until such threads have ended.
 */
#include <check.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "fakes/cluster.h"
#include "fakes/run_suite.h"
#include "server/progress/poller.h"
#include "server/worker_internal.h"

static bool round_of_a_caller(struct tl_poller *poller, int64_t deadline_ns);
static int lock_late(pthread_mutex_t *mutex);
static int note_destroyed(pthread_mutex_t *mutex);
#define tl_poller_run round_of_a_caller
#define tl_clock_deadline_ns(timeout_ns) TL_TIME_NEVER
#define pthread_mutex_lock lock_late
#define pthread_mutex_destroy note_destroyed
#include "server/progress/progress.c"
#undef tl_poller_run
#undef pthread_mutex_lock
#undef pthread_mutex_destroy

static struct tl_loop *loop;
static struct tl_progress_engine progress;
static struct tl_wait wait;
static struct tl_closure closure;
static atomic_bool has_run;
static pthread_t here;
static void (*in_round)(void); /* what happens in the next round of this thread; NULL: the round */
static const struct tl_executor executor;

static bool round_of_a_caller(struct tl_poller *poller, int64_t deadline_ns)
{
    if (!pthread_equal(pthread_self(), here) || in_round == NULL) return tl_poller_run(poller, deadline_ns);
    in_round();
    in_round = NULL;
    return true;
}

/* A reactor's thread that posts is slow after its closure has run; so much time is enough for a worker to close. */
#define LATE_NS (5 * TL_NS_PER_SEC)
static atomic_uint late_count;
static atomic_bool is_destroyed, is_used_afterwards;

static int lock_late(pthread_mutex_t *mutex)
{
    char name[16];
    if (pthread_getname_np(pthread_self(), name, sizeof(name)) == 0 && strcmp(name, "tl-reactor") == 0) {
        atomic_fetch_add(&late_count, 1);
        int64_t until_ns = tl_clock_now_ns() + LATE_NS;
        while (tl_clock_now_ns() < until_ns && !atomic_load(&is_destroyed))
            usleep(1000);
        if (atomic_load(&is_destroyed)) atomic_store(&is_used_afterwards, true);
    }
    return pthread_mutex_lock(mutex);
}

static int note_destroyed(pthread_mutex_t *mutex)
{
    atomic_store(&is_destroyed, true);
    return pthread_mutex_destroy(mutex);
}

static void note(struct tl_closure *its)
{
    (void)its;
    ck_assert(!pthread_equal(pthread_self(), here));
    atomic_store(&has_run, true);
}

static void post_and_end_the_wait(void)
{
    tl_progress_post(&progress, &closure);
    tl_wait_done(&wait);
}

/* The same when the thread has noticed that a caller runs a round, and sleeps until that leaves. */
static void post_while_the_thread_awaits_the_end(void)
{
    bool is_awaited = false;
    while (!is_awaited) {
        pthread_mutex_lock(&progress.mutex);
        pthread_cond_signal(&progress.thread_cond);
        is_awaited = progress.is_leave_awaited;
        pthread_mutex_unlock(&progress.mutex);
        sched_yield();
    }
    post_and_end_the_wait();
}

static void end_the_wait(void)
{
    tl_wait_done(&wait);
}

static void setup(void)
{
    here = pthread_self();
    closure.run = note;
    ck_assert_int_eq(tl_loop_create(&loop, NULL), TL_OK);
    tl_progress_init(&progress, loop, TL_PROGRESS_THREAD);
    ck_assert_int_eq(tl_progress_start(&progress, &executor, NULL, 0, NULL), TL_OK);
}

static void teardown(void)
{
    tl_progress_stop(&progress);
    tl_progress_fini(&progress);
    tl_loop_destroy(loop);
}

/* Waits, and runs one round. */
static void wait_for_round(void (*happen)(void))
{
    in_round = happen;
    progress.streak = STREAK_LENGTH; /* lets this caller run the rounds */
    progress.last_left_ns = TL_TIME_NEVER;
    tl_wait_init(&wait, &progress);
    ck_assert(tl_wait_for(&wait, TL_TIME_NEVER));
    tl_wait_fini(&wait);
}

START_TEST(posted_in_the_last_round)
{
    for (unsigned i = 0; i < 20; i++) {
        atomic_store(&has_run, false);
        wait_for_round(_i == 0 ? post_and_end_the_wait : post_while_the_thread_awaits_the_end);
        while (!atomic_load(&has_run))
            sched_yield();
    }
}
END_TEST

/* A caller has run what the thread was wanted for before that could take the loop. */
START_TEST(run_by_a_caller)
{
    wait_for_round(end_the_wait);
    ck_assert(progress.is_parked);
    progress.is_thread_wanted = true;
    wait_for_round(end_the_wait);
    ck_assert(progress.is_parked && !progress.is_thread_wanted);
}
END_TEST

static void open_and_close(void)
{
    struct cluster cluster;
    atomic_store(&is_destroyed, false);
    cluster_init(&cluster, 1, NULL);
    cluster.protocol = "auto";
    struct tl_worker *worker = cluster_open(&cluster, 0);
    struct tl_tensor *tensor = cluster_tensor(8, 1);
    cluster_publish(worker, "p", 0, tensor);
    tl_tensor_put(tensor);
    while (!__atomic_load_n(&worker->progress.is_parked, __ATOMIC_RELAXED))
        tl_tensor_put(cluster_recv_wait(worker, 0, "p", 0));
    cluster_close_all(&cluster);
    ck_assert(is_destroyed);
}

/* The caller that closes a worker runs what a reactor's thread has posted last, and goes on while that still posts.
 * Where the worker's thread takes the loop before, it is not woken. */
START_TEST(closes_while_a_reactor_posts)
{
    while (atomic_load(&late_count) == 0)
        open_and_close();
    ck_assert(!is_used_afterwards);
}
END_TEST

#define MANY 300

static void *take_many(void *cq)
{
    static struct tl_completion completions[MANY];
    ck_assert_uint_eq(tl_cq_wait_many(cq, completions, MANY, MANY, CLUSTER_LONG), MANY);
    for (size_t i = 0; i < MANY; i++)
        tl_tensor_put(completions[i].tensor);
    return NULL;
}

/* One wait for so many completions is as good as several for a few: the worker's thread leaves the loop to it. */
START_TEST(a_wait_for_many_drives_the_loop)
{
    struct cluster cluster;
    pthread_t reader;
    cluster_init(&cluster, 1, NULL);
    struct tl_worker *worker = cluster_open(&cluster, 0);
    struct tl_cq *cq = cluster_cq();
    for (unsigned i = 0; i < MANY; i++)
        cluster_recv(worker, 0, "later", 0, cq);
    ck_assert_int_eq(pthread_create(&reader, NULL, take_many, cq), 0);
    while (!__atomic_load_n(&worker->progress.is_parked, __ATOMIC_RELAXED))
        sched_yield();
    struct tl_tensor *tensor = cluster_tensor(8, 1);
    cluster_publish(worker, "later", 0, tensor);
    tl_tensor_put(tensor);
    pthread_join(reader, NULL);
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
}
END_TEST

static void add_waiting(Suite *suite)
{
    TCase *tcase = tcase_create("waiting");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, a_wait_for_many_drives_the_loop);
    suite_add_tcase(suite, tcase);
}

static void add_closing(Suite *suite)
{
    TCase *tcase = tcase_create("closing");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, closes_while_a_reactor_posts);
    suite_add_tcase(suite, tcase);
}

static void add(Suite *suite, const char *name, const TTest *test, int end)
{
    TCase *tcase = tcase_create(name);
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_set_timeout(tcase, 20);
    tcase_add_loop_test(tcase, test, 0, end);
    suite_add_tcase(suite, tcase);
}

int main(void)
{
    Suite *suite = suite_create("progress");
    add(suite, "posted", posted_in_the_last_round, 2);
    add(suite, "stale", run_by_a_caller, 1);
    add_waiting(suite);
    add_closing(suite);
    return run_suite(suite);
}
