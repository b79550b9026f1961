// SPDX-License-Identifier: Apache-2.0
/* Which readers of a completion queue make a worker's progress, and which of them a push wakes. */
#include <check.h>
#include <sched.h>

#include "fakes/run_suite.h"
#include "server/progress/completion_queue.c"

static struct tl_cq *cq;
static struct tl_error error;
static struct tl_progress_engine threaded, other_threaded, driven, other_driven;
static struct tl_cq_item items[4];
static void (*in_wait)(void); /* what happens while the next reader makes progress; NULL: nothing */
static bool done_waits[4];    /* whether each wait so far was ended */
static unsigned wait_count, wake_count;
static int64_t wait_deadline_ns;

/* ------------------------------------------------------------------------------------------------------- fakes -- */

void tl_wait_init(struct tl_wait *wait, struct tl_progress_engine *progress)
{
    *wait = (struct tl_wait){.progress = progress};
}

void tl_wait_fini(struct tl_wait *wait)
{
    (void)wait;
}

void tl_wait_done(struct tl_wait *wait)
{
    wait->is_done = true;
}

bool tl_wait_for(struct tl_wait *wait, int64_t deadline_ns)
{
    unsigned number = wait_count++;
    ck_assert_uint_lt(number, TL_ARRAY_COUNT(done_waits));
    wait_deadline_ns = deadline_ns;
    void (*happen)(void) = in_wait;
    in_wait = NULL;
    if (happen != NULL) happen();
    done_waits[number] = wait->is_done;
    return wait->is_done;
}

void tl_loop_wake(struct tl_loop *loop)
{
    (void)loop;
    wake_count++;
}

static unsigned loop_posts, thread_posts;

void tl_loop_post(struct tl_loop *loop, struct tl_closure *closure)
{
    (void)loop, (void)closure;
    loop_posts++;
}

void tl_progress_post(struct tl_progress_engine *progress, struct tl_closure *closure)
{
    (void)progress, (void)closure;
    thread_posts++;
}

static void take(struct tl_cq_item *item, struct tl_completion *ret_completion)
{
    *ret_completion = (struct tl_completion){.user_data = item};
}

static void init_engine(struct tl_progress_engine *engine, enum tl_progress mode)
{
    *engine = (struct tl_progress_engine){.mode = mode};
    tl_list_init(&engine->queues);
}

static void setup(void)
{
    in_wait = NULL;
    wait_count = wake_count = 0;
    init_engine(&threaded, TL_PROGRESS_THREAD);
    init_engine(&other_threaded, TL_PROGRESS_THREAD);
    init_engine(&driven, TL_PROGRESS_CALLER);
    init_engine(&other_driven, TL_PROGRESS_CALLER);
    for (size_t i = 0; i < TL_ARRAY_COUNT(items); i++)
        items[i].take = take;
    ck_assert_int_eq(tl_cq_create(&cq, &error), TL_OK);
}

static void teardown(void)
{
    tl_cq_destroy(cq);
}

static void attach(struct tl_progress_engine *engine)
{
    ck_assert_int_eq(tl_cq_attach(cq, engine, &error), TL_OK);
}

/* Returns how many completions one wait for so many brings, of which it takes as many as there are. */
static size_t wait_for_many(size_t min_count)
{
    struct tl_completion completions[4];
    return tl_cq_wait_many(cq, completions, TL_ARRAY_COUNT(completions), min_count, 1);
}

/* Returns how many completions one wait brings. */
static size_t wait_briefly(void)
{
    struct tl_completion completions[4];
    return tl_cq_wait(cq, completions, TL_ARRAY_COUNT(completions), 1);
}

/* ------------------------------------------------------------------------------------------------------- tests -- */

static void push_one(void)
{
    tl_cq_push(cq, &items[0], &threaded);
}

START_TEST(reader_makes_the_progress)
{
    attach(&threaded);
    in_wait = push_one;
    struct tl_completion completion;
    ck_assert_uint_eq(tl_cq_wait(cq, &completion, 1, TL_TIMEOUT_NONE), 1);
    ck_assert_ptr_eq(completion.user_data, &items[0]);
    ck_assert_uint_eq(wait_count, 1);
    ck_assert(done_waits[0]);
    ck_assert(wait_deadline_ns == TL_TIME_NEVER);
    ck_assert_uint_eq(wake_count, 0);
    ck_assert_uint_eq(threaded.reader_count, 0);
    /* What is there already needs no progress. */
    push_one();
    ck_assert_uint_eq(wait_briefly(), 1);
    ck_assert_uint_eq(wait_count, 1);
}
END_TEST

START_TEST(time_is_up)
{
    attach(&threaded);
    ck_assert_uint_eq(wait_briefly(), 0);
    ck_assert_uint_eq(wait_count, 1);
    ck_assert(tl_list_is_empty(&cq->readers));
    struct tl_completion completion;
    ck_assert_uint_eq(tl_cq_wait(cq, &completion, 0, TL_TIMEOUT_NONE), 0);
    ck_assert_uint_eq(wait_count, 1);
}
END_TEST

/* The second reader makes progress while the first one waits. */
static void read_and_push_one(void)
{
    in_wait = push_one;
    ck_assert_uint_eq(wait_briefly(), 1);
}

START_TEST(push_wakes_one_reader)
{
    attach(&threaded);
    in_wait = read_and_push_one;
    ck_assert_uint_eq(wait_briefly(), 0);
    ck_assert_uint_eq(wait_count, 3); /* the first reader was woken, and its item was gone */
    ck_assert(!done_waits[1]);
    ck_assert(done_waits[0]);
}
END_TEST

static void push_two(void)
{
    struct tl_list both;
    tl_list_init(&both);
    tl_list_push_back(&both, &items[0].link);
    tl_list_push_back(&both, &items[1].link);
    tl_cq_push_all(cq, &both, &threaded);
}

static void read_and_push_two(void)
{
    in_wait = push_two;
    ck_assert_uint_eq(wait_briefly(), 2);
}

START_TEST(many_items_wake_all_readers)
{
    attach(&threaded);
    in_wait = read_and_push_two;
    ck_assert_uint_eq(wait_briefly(), 0);
    ck_assert(done_waits[0] && done_waits[1]);
}
END_TEST

/* Pushes one after the other, and then nothing. */
static void push_three(void)
{
    for (size_t i = 0; i < 3; i++) {
        ck_assert(!tl_list_is_empty(&cq->readers));
        tl_cq_push(cq, &items[i], &threaded);
    }
}

START_TEST(wait_for_many_ends_with_the_last_of_them)
{
    attach(&threaded);
    in_wait = push_three;
    ck_assert_uint_eq(wait_for_many(3), 3);
    ck_assert_uint_eq(wait_count, 1);
    ck_assert(done_waits[0]);
    /* More than it takes. */
    struct tl_completion completion;
    in_wait = push_three;
    ck_assert_uint_eq(tl_cq_wait_many(cq, &completion, 1, 3, TL_TIMEOUT_NONE), 1);
    ck_assert_ptr_eq(completion.user_data, &items[0]);
    ck_assert_uint_eq(wait_for_many(2), 2);
    ck_assert_uint_eq(wait_count, 2);
    /* None. */
    ck_assert_uint_eq(wait_for_many(0), 0);
    ck_assert_uint_eq(wait_count, 2);
}
END_TEST

START_TEST(wait_for_many_takes_what_is_there_when_time_is_up)
{
    attach(&threaded);
    in_wait = push_three;
    ck_assert_uint_eq(wait_for_many(4), 3);
    ck_assert(!done_waits[0]);
    ck_assert_uint_eq(wait_for_many(4), 0);
    ck_assert(tl_list_is_empty(&cq->readers));
}
END_TEST

static void read_and_push_three(void)
{
    in_wait = push_three;
    ck_assert_uint_eq(wait_for_many(2), 3);
}

/* The first reader needs more than there is, so that the second one is woken. */
START_TEST(push_wakes_a_reader_for_which_there_is_enough)
{
    attach(&threaded);
    in_wait = read_and_push_three;
    ck_assert_uint_eq(wait_for_many(4), 0);
    ck_assert(done_waits[1]);
    ck_assert(!done_waits[0]);
}
END_TEST

/* A reader that has not run yet since it was woken. */
struct slow_reader {
    struct reader reader;
    struct tl_wait wait;
};

static void add_slow_reader(struct slow_reader *slow, size_t min_count)
{
    *slow = (struct slow_reader){.reader = {.min_count = min_count, .wait = &slow->wait}};
    tl_list_push_back(&cq->readers, &slow->reader.link);
}

/* Two readers are woken for two items and for three, and one sleeps that needs two. The first one takes one item, so
 * that there are too few for the second one, and enough for the third. */
START_TEST(woken_reader_hands_on_what_it_does_not_take)
{
    struct slow_reader first, second, third;
    struct tl_completion completion;
    for (unsigned is_taken_by_poll = 0; is_taken_by_poll < 2; is_taken_by_poll++) {
        add_slow_reader(&first, 2);
        add_slow_reader(&second, 3);
        add_slow_reader(&third, 2);
        push_three();
        ck_assert(first.wait.is_done && second.wait.is_done && !third.wait.is_done);
        if (is_taken_by_poll) {
            ck_assert_uint_eq(tl_cq_poll(cq, &completion, 1), 1);
            ck_assert_uint_eq(wait_for_many(3), 2); /* the second one, which tries again */
        } else {
            ck_assert_uint_eq(tl_cq_wait_many(cq, &completion, 1, 2, TL_TIMEOUT_NONE), 1);
        }
        ck_assert(third.wait.is_done);
        while (tl_cq_poll(cq, &completion, 1) == 1)
            continue;
    }
}
END_TEST

static void *read_one_asleep(void *got)
{
    struct tl_completion completion;
    *(size_t *)got = tl_cq_wait_many(cq, &completion, 1, 1, TL_TIMEOUT_NONE);
    return NULL;
}

static void wait_for_readers(size_t count)
{
    size_t found;
    do {
        found = 0;
        pthread_mutex_lock(&cq->mutex);
        TL_LIST_FOREACH(&cq->readers, link)
        found++;
        pthread_mutex_unlock(&cq->mutex);
        sched_yield();
    } while (found != count);
}

static void *read_three_asleep(void *got)
{
    struct tl_completion completions[3];
    *(size_t *)got = tl_cq_wait_many(cq, completions, 3, 3, TL_TIMEOUT_NONE);
    return NULL;
}

/* At a queue of no worker readers sleep. One that needs more is not woken in place of one that needs less. */
START_TEST(readers_that_sleep_are_woken_for_enough)
{
    pthread_t three, one;
    size_t got_three = 0, got_one = 0;
    ck_assert_int_eq(pthread_create(&three, NULL, read_three_asleep, &got_three), 0);
    wait_for_readers(1);
    ck_assert_int_eq(pthread_create(&one, NULL, read_one_asleep, &got_one), 0);
    wait_for_readers(2);
    tl_cq_push(cq, &items[0], &threaded);
    ck_assert_int_eq(pthread_join(one, NULL), 0);
    ck_assert_uint_eq(got_one, 1);
    for (size_t i = 0; i < 3; i++) {
        wait_for_readers(1);
        tl_cq_push(cq, &items[1 + i], &threaded);
    }
    ck_assert_int_eq(pthread_join(three, NULL), 0);
    ck_assert_uint_eq(got_three, 3);
}
END_TEST

static void share(void)
{
    attach(&other_threaded);
}

START_TEST(shared_queue_makes_no_progress)
{
    attach(&threaded);
    in_wait = share;
    ck_assert_uint_eq(wait_briefly(), 0);
    ck_assert(done_waits[0]); /* the reader leaves the loop in which it may sleep */
    ck_assert_uint_eq(wake_count, 1);
    attach(&threaded);
    attach(&other_threaded);
    ck_assert_uint_eq(wait_briefly(), 0);
    ck_assert_uint_eq(wait_count, 1);
    push_one();
    ck_assert_uint_eq(wait_briefly(), 1);
    ck_assert(tl_list_is_empty(&threaded.queues) && tl_list_is_empty(&other_threaded.queues));
}
END_TEST

START_TEST(worker_without_thread_keeps_its_readers)
{
    attach(&threaded);
    attach(&driven);
    attach(&other_threaded);
    ck_assert(cq->progress == &driven);
    ck_assert_int_eq(tl_cq_attach(cq, &other_driven, &error), TL_FAILED_PRECONDITION);
    in_wait = push_one; /* by a worker with a thread */
    ck_assert_uint_eq(wait_briefly(), 1);
    ck_assert(done_waits[0]);
    ck_assert_uint_eq(wake_count, 1);
    /* Its place is free when it has closed. */
    tl_cq_detach_all(&driven);
    attach(&threaded);
    ck_assert(cq->progress == NULL);
    attach(&other_driven);
    ck_assert(cq->progress == &other_driven);
}
END_TEST

/* Returns whether work of the worker is left to a wait that makes its progress. */
static bool is_left_to_a_wait(struct tl_progress_engine *engine)
{
    struct tl_closure closure;
    loop_posts = thread_posts = 0;
    tl_cq_post(cq, engine, &closure);
    ck_assert_uint_eq(loop_posts + thread_posts, 1);
    return loop_posts == 1;
}

static void *post_from_another_thread(void *engine)
{
    ck_assert(!is_left_to_a_wait(engine));
    return NULL;
}

/* The waiter may work on a result for long. */
START_TEST(work_of_other_threads_is_not_left_to_the_waiter)
{
    pthread_t other;
    attach(&threaded);
    wait_briefly();
    ck_assert_int_eq(pthread_create(&other, NULL, post_from_another_thread, &threaded), 0);
    ck_assert_int_eq(pthread_join(other, NULL), 0);
    ck_assert(is_left_to_a_wait(&threaded));
}
END_TEST

START_TEST(work_is_left_to_a_wait_that_follows)
{
    struct tl_completion completion;
    attach(&threaded);
    ck_assert(!is_left_to_a_wait(&threaded));
    wait_briefly();
    ck_assert(is_left_to_a_wait(&threaded));
    ck_assert(!is_left_to_a_wait(&other_threaded));
    ck_assert_uint_eq(tl_cq_poll(cq, &completion, 1), 0);
    ck_assert(!is_left_to_a_wait(&threaded));
    wait_briefly();
    ck_assert_uint_eq(tl_cq_wait(cq, &completion, 1, 0), 0);
    ck_assert(!is_left_to_a_wait(&threaded));
    wait_count = 0;
    wait_briefly();
    (void)tl_cq_fd(cq);
    ck_assert(!is_left_to_a_wait(&threaded));
    /* A queue that workers with threads share drives none of them. */
    attach(&other_threaded);
    wait_briefly();
    ck_assert(!is_left_to_a_wait(&threaded));
    ck_assert(!is_left_to_a_wait(&other_threaded));
}
END_TEST

static void add(Suite *suite, const char *name, const TTest *test)
{
    TCase *tcase = tcase_create(name);
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, test);
    suite_add_tcase(suite, tcase);
}

int main(void)
{
    Suite *suite = suite_create("completion_queue");
    add(suite, "progress", reader_makes_the_progress);
    add(suite, "time", time_is_up);
    add(suite, "one", push_wakes_one_reader);
    add(suite, "many", many_items_wake_all_readers);
    add(suite, "wait_many", wait_for_many_ends_with_the_last_of_them);
    add(suite, "wait_many_time", wait_for_many_takes_what_is_there_when_time_is_up);
    add(suite, "wait_many_two", push_wakes_a_reader_for_which_there_is_enough);
    add(suite, "hand_on", woken_reader_hands_on_what_it_does_not_take);
    add(suite, "sleep", readers_that_sleep_are_woken_for_enough);
    add(suite, "shared", shared_queue_makes_no_progress);
    add(suite, "driven", worker_without_thread_keeps_its_readers);
    add(suite, "waited", work_is_left_to_a_wait_that_follows);
    add(suite, "others", work_of_other_threads_is_not_left_to_the_waiter);
    return run_suite(suite);
}
