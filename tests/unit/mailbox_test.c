// SPDX-License-Identifier: Apache-2.0
/*
 * Mailboxes: order, who has to wake the owner, and, with several threads, that no closure and no wake-up is lost. The
 * last case should also run under ThreadSanitizer.
 */
#include <check.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/mailbox.h"
#include "fakes/run_suite.h"

struct note {
    struct tl_closure closure;
    unsigned number;
    unsigned sender;
};

static struct tl_mailbox mailbox;
static unsigned delivered[16];
static unsigned delivered_count;

static void record(struct tl_closure *closure)
{
    delivered[delivered_count++] = TL_CONTAINER_OF(closure, struct note, closure)->number;
}

static struct note notes[] = {
    {.closure.run = record, .number = 0},
    {.closure.run = record, .number = 1},
    {.closure.run = record, .number = 2},
};

static void setup(void)
{
    tl_mailbox_init(&mailbox);
}

static void teardown(void)
{
    tl_mailbox_fini(&mailbox);
}

START_TEST(in_order)
{
    ck_assert_uint_eq(tl_mailbox_run(&mailbox, &(struct tl_quota){0}), 0);
    for (int i = 0; i < 3; i++)
        ck_assert(!tl_mailbox_post(&mailbox, &notes[i].closure));
    ck_assert_uint_eq(tl_mailbox_run(&mailbox, &(struct tl_quota){0}), 3);
    for (unsigned i = 0; i < 3; i++)
        ck_assert_uint_eq(delivered[i], i);
    ck_assert_uint_eq(tl_mailbox_run(&mailbox, &(struct tl_quota){0}), 0);
}
END_TEST

/* Behind what was posted before, with one wake. */
START_TEST(a_list_in_order)
{
    struct tl_list closures;
    tl_list_init(&closures);
    ck_assert(!tl_mailbox_post(&mailbox, &notes[0].closure));
    for (int i = 1; i < 3; i++)
        tl_list_push_back(&closures, &notes[i].closure.link);
    ck_assert(!tl_mailbox_post_all(&mailbox, &closures));
    ck_assert(tl_list_is_empty(&closures));
    ck_assert_uint_eq(tl_mailbox_run(&mailbox, &(struct tl_quota){0}), 3);
    for (unsigned i = 0; i < 3; i++)
        ck_assert_uint_eq(delivered[i], i);
    ck_assert(tl_mailbox_prepare_sleep(&mailbox));
    tl_list_push_back(&closures, &notes[0].closure.link);
    ck_assert(tl_mailbox_post_all(&mailbox, &closures));
    tl_list_push_back(&closures, &notes[1].closure.link);
    ck_assert(!tl_mailbox_post_all(&mailbox, &closures));
    ck_assert_uint_eq(tl_mailbox_run(&mailbox, &(struct tl_quota){0}), 2);
}
END_TEST

static void post_another(struct tl_closure *closure)
{
    record(closure);
    ck_assert(!tl_mailbox_post(&mailbox, &notes[1].closure));
}

START_TEST(posted_while_delivering_waits)
{
    struct note first = {.closure.run = post_another, .number = 7};
    ck_assert(!tl_mailbox_post(&mailbox, &first.closure));
    ck_assert_uint_eq(tl_mailbox_run(&mailbox, &(struct tl_quota){0}), 1);
    ck_assert_uint_eq(delivered_count, 1);
    ck_assert_uint_eq(tl_mailbox_run(&mailbox, &(struct tl_quota){0}), 1);
    ck_assert_uint_eq(delivered[1], 1);
}
END_TEST

static struct tl_quota quota;

static void use_much(struct tl_closure *closure)
{
    record(closure);
    tl_quota_use(&quota, TL_QUOTA - 1);
}

/* No more run than the quota allows; what is left keeps its place, and the owner awake. */
START_TEST(as_the_quota_allows)
{
    struct note much = {.closure.run = use_much, .number = 7};
    ck_assert(!tl_mailbox_post(&mailbox, &much.closure));
    for (int i = 0; i < 2; i++)
        ck_assert(!tl_mailbox_post(&mailbox, &notes[i].closure));
    ck_assert_uint_eq(tl_mailbox_run(&mailbox, &quota), 2);
    ck_assert_uint_eq(quota.used, TL_QUOTA);
    ck_assert(tl_mailbox_has_taken(&mailbox));
    ck_assert(!tl_mailbox_prepare_sleep(&mailbox));
    ck_assert_uint_eq(tl_mailbox_run(&mailbox, &quota), 0);
    ck_assert(!tl_mailbox_post(&mailbox, &notes[2].closure));
    tl_quota_renew(&quota);
    ck_assert_uint_eq(tl_mailbox_run(&mailbox, &quota), 2);
    static const unsigned wanted[] = {7, 0, 1, 2};
    ck_assert_mem_eq(delivered, wanted, sizeof(wanted));
    ck_assert_uint_eq(tl_quota_most(&quota), TL_QUOTA);
    ck_assert(tl_mailbox_prepare_sleep(&mailbox));
}
END_TEST

static void destroy_note(struct tl_closure *closure)
{
    free(TL_CONTAINER_OF(closure, struct note, closure));
}

START_TEST(closures_may_be_freed)
{
    for (int i = 0; i < 3; i++) {
        struct note *note = calloc(1, sizeof(*note));
        note->closure.run = destroy_note;
        ck_assert(!tl_mailbox_post(&mailbox, &note->closure));
    }
    ck_assert_uint_eq(tl_mailbox_run(&mailbox, &(struct tl_quota){0}), 3);
}
END_TEST

START_TEST(one_wake_per_sleep)
{
    ck_assert(tl_mailbox_prepare_sleep(&mailbox));
    ck_assert(tl_mailbox_post(&mailbox, &notes[0].closure));
    ck_assert(!tl_mailbox_post(&mailbox, &notes[1].closure));
    (void)tl_mailbox_end_sleep(&mailbox);
    ck_assert(!tl_mailbox_post(&mailbox, &notes[2].closure));
    ck_assert_uint_eq(tl_mailbox_run(&mailbox, &(struct tl_quota){0}), 3);
}
END_TEST

START_TEST(no_sleep_over_closures)
{
    ck_assert(!tl_mailbox_post(&mailbox, &notes[0].closure));
    ck_assert(!tl_mailbox_prepare_sleep(&mailbox));
    /* The refusal leaves no mark: an owner that is awake needs no wake-up. */
    ck_assert(!tl_mailbox_post(&mailbox, &notes[1].closure));
    ck_assert_uint_eq(tl_mailbox_run(&mailbox, &(struct tl_quota){0}), 2);
}
END_TEST

START_TEST(awake_after_the_end_of_sleep)
{
    ck_assert(tl_mailbox_prepare_sleep(&mailbox));
    (void)tl_mailbox_end_sleep(&mailbox);
    ck_assert(!tl_mailbox_post(&mailbox, &notes[0].closure));
    ck_assert_uint_eq(tl_mailbox_run(&mailbox, &(struct tl_quota){0}), 1);
}
END_TEST

START_TEST(fini_refuses_waiting_closures)
{
    ck_assert(!tl_mailbox_post(&mailbox, &notes[0].closure));
    tl_mailbox_fini(&mailbox);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------ stress -- */

enum { SENDERS = 4, NOTES_PER_SENDER = 3000 };

static int wake_fd;
static unsigned next_number[SENDERS];

static void check_order(struct tl_closure *closure)
{
    struct note *note = TL_CONTAINER_OF(closure, struct note, closure);
    ck_assert_uint_eq(note->number, next_number[note->sender]);
    next_number[note->sender]++;
    free(note);
}

static void *send_notes(void *argument)
{
    unsigned sender = (unsigned)(uintptr_t)argument;
    for (unsigned i = 0; i < NOTES_PER_SENDER; i++) {
        struct note *note = calloc(1, sizeof(*note));
        *note = (struct note){.closure.run = check_order, .number = i, .sender = sender};
        if (!tl_mailbox_post(&mailbox, &note->closure)) continue;
        uint64_t one = 1;
        ck_assert_int_eq(write(wake_fd, &one, sizeof(one)), sizeof(one));
    }
    return NULL;
}

/* A lost wake-up lets the owner sleep for ever, which the time-out of the test ends. The count that the descriptor
 * gives shows two wake-ups of one sleep. */
START_TEST(nothing_is_lost)
{
    pthread_t threads[SENDERS];
    unsigned received = 0;
    wake_fd = eventfd(0, EFD_CLOEXEC);
    ck_assert_int_ge(wake_fd, 0);
    for (uintptr_t i = 0; i < SENDERS; i++)
        ck_assert_int_eq(pthread_create(&threads[i], NULL, send_notes, (void *)i), 0);
    while (received < SENDERS * NOTES_PER_SENDER) {
        received += tl_mailbox_run(&mailbox, &(struct tl_quota){0});
        if (received == SENDERS * NOTES_PER_SENDER || !tl_mailbox_prepare_sleep(&mailbox)) continue;
        uint64_t wakes = 0;
        ck_assert_int_eq(read(wake_fd, &wakes, sizeof(wakes)), sizeof(wakes));
        ck_assert_uint_eq(wakes, 1);
        (void)tl_mailbox_end_sleep(&mailbox);
    }
    for (int i = 0; i < SENDERS; i++) {
        ck_assert_int_eq(pthread_join(threads[i], NULL), 0);
        ck_assert_uint_eq(next_number[i], NOTES_PER_SENDER);
    }
    close(wake_fd);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("mailbox");
    TCase *tcase = tcase_create("mailbox");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, in_order);
    tcase_add_test(tcase, a_list_in_order);
    tcase_add_test(tcase, posted_while_delivering_waits);
    tcase_add_test(tcase, closures_may_be_freed);
    tcase_add_test(tcase, one_wake_per_sleep);
    tcase_add_test(tcase, no_sleep_over_closures);
    tcase_add_test(tcase, awake_after_the_end_of_sleep);
    tcase_add_test_raise_signal(tcase, fini_refuses_waiting_closures, SIGABRT);
    tcase_add_test(tcase, nothing_is_lost);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("as_the_quota_allows"); /* tests/defects runs it alone */
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, as_the_quota_allows);
    tcase_set_timeout(tcase, 60);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
