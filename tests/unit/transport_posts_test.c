// SPDX-License-Identifier: Apache-2.0
/* What the loop and a reactor send to each other: one post for all closures of a round, each way, in their order. */
#include <check.h>
#include <stdint.h>

#include "fakes/run_suite.h"
#include "server/transports/transport_posts.c"

#define COUNT 512

static struct tl_worker worker;
static struct tl_transport transport;
static struct tl_closure closures[COUNT];
static struct tl_closure *deferred; /* to the end of a round; NULL: none */
static struct tl_list posted;       /* what has come to the other side */
static unsigned defer_count, post_count;

/* ------------------------------------------------------------------------------------------------------- fakes -- */

static void defer(struct tl_closure *closure)
{
    ck_assert_ptr_null(deferred);
    deferred = closure;
    defer_count++;
}

void tl_loop_defer_last(struct tl_loop *loop, struct tl_closure *closure)
{
    (void)loop;
    defer(closure);
}

void tl_reactor_defer_last(struct tl_reactor *reactor, struct tl_closure *closure)
{
    (void)reactor;
    defer(closure);
}

void tl_reactor_defer(struct tl_reactor *reactor, struct tl_closure *closure)
{
    (void)reactor, (void)closure;
    ck_abort();
}

void tl_reactor_post_all(struct tl_reactor *reactor, struct tl_list *all)
{
    (void)reactor;
    tl_list_splice_back(&posted, all);
    post_count++;
}

void tl_progress_post_all(struct tl_progress_engine *progress, struct tl_list *all)
{
    ck_assert_ptr_eq(progress, &worker.progress);
    tl_list_splice_back(&posted, all);
    post_count++;
}

static void setup(void)
{
    transport.worker = &worker;
    worker.data_plane.transport_count = 2; /* there is only one of them */
    worker.data_plane.transports[1].transport = &transport;
    tl_transport_init_posts(&transport);
    tl_list_init(&posted);
}

static void end_round(void)
{
    struct tl_closure *closure = deferred;
    deferred = NULL;
    closure->run(closure);
}

/* ------------------------------------------------------------------------------------------------------- tests -- */

static void send_to_reactor(struct tl_transport *to, struct tl_closure *closure)
{
    ck_assert(tl_worker_executor_send(&worker.executor, &to->executor, closure));
}

static void send_to_loop(struct tl_transport *from, struct tl_closure *closure)
{
    ck_assert(tl_transport_executor_send(&from->executor, &worker.executor, closure));
}

typedef void (*send_function)(struct tl_transport *transport, struct tl_closure *closure);

static const send_function ways[] = {tl_transport_send, tl_transport_send_back, send_to_reactor, send_to_loop};

START_TEST(one_post_for_a_round)
{
    for (unsigned round = 1; round <= 3; round++) {
        for (unsigned i = 0; i < COUNT; i++)
            ways[_i](&transport, &closures[i]);
        ck_assert_uint_eq(post_count, round - 1);
        end_round();
        ck_assert_uint_eq(post_count, round);
        ck_assert_uint_eq(defer_count, round);
        for (unsigned i = 0; i < COUNT; i++)
            ck_assert_ptr_eq(tl_list_pop_front(&posted), &closures[i].link);
        ck_assert(tl_list_is_empty(&posted));
    }
    ck_assert_ptr_null(deferred);
}
END_TEST

/* To other executors, and to the same one, nothing is gathered. */
START_TEST(other_ways)
{
    struct tl_executor other = {.is_only = false};
    ck_assert(!tl_worker_executor_send(&worker.executor, &worker.executor, &closures[1]));
    ck_assert(!tl_worker_executor_send(&worker.executor, &other, &closures[1]));
    ck_assert(!tl_transport_executor_send(&transport.executor, &other, &closures[1]));
    ck_assert(!tl_transport_executor_send(&transport.executor, &transport.executor, &closures[1]));
    ck_assert_uint_eq(post_count + defer_count, 0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("transport_posts");
    TCase *tcase = tcase_create("one_post_for_a_round");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_loop_test(tcase, one_post_for_a_round, 0, TL_ARRAY_COUNT(ways));
    tcase_add_test(tcase, other_ways);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
