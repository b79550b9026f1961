// SPDX-License-Identifier: Apache-2.0
/* Two processes that claim one task are told from one that restarts, and are logged once a minute. */
#include <check.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "fakes/fake_clock.h"
#include "fakes/log_capture.h"
#include "fakes/run_suite.h"
#include "server/peers/rivals.h"

static struct tl_rivals rivals;

static void note(uint64_t incarnation)
{
    struct tl_identity who = {.incarnation = incarnation, .process_id = incarnation + 100};
    snprintf(who.host_name, sizeof(who.host_name), "host-%u", (unsigned)incarnation);
    snprintf(who.address, sizeof(who.address), "ipv4:10.0.0.%u:4000", (unsigned)incarnation);
    tl_rivals_note(&rivals, "/job:ps/task:0", &who);
}

START_TEST(restarts_are_no_rivals)
{
    for (uint64_t incarnation = 1; incarnation < 100; incarnation++) {
        note(incarnation);
        note(incarnation);
        ck_assert(!tl_rivals_are_active(&rivals));
    }
}
END_TEST

START_TEST(processes_that_alternate)
{
    char text[TL_ERROR_MESSAGE_BYTES];
    note(1);
    note(2);
    note(1);
    ck_assert(!tl_rivals_are_active(&rivals));
    note(2);
    ck_assert(tl_rivals_are_active(&rivals));
    tl_rivals_format(&rivals, "/job:ps/task:0", text, sizeof(text));
    ck_assert_str_eq(text, "two processes are /job:ps/task:0: process 102 on host-2 (ipv4:10.0.0.2:4000) and process "
                           "101 on host-1 (ipv4:10.0.0.1:4000), which last took turns 0 s ago; stop one of them, if "
                           "both still run");
    fake_clock_advance(59 * TL_NS_PER_SEC);
    ck_assert(tl_rivals_are_active(&rivals));
    tl_rivals_format(&rivals, "/job:ps/task:0", text, sizeof(text));
    ck_assert_ptr_nonnull(strstr(text, ", which last took turns 59 s ago; "));
    fake_clock_advance(TL_NS_PER_SEC);
    ck_assert(!tl_rivals_are_active(&rivals));
    /* One return after a minute may be anything. */
    note(1);
    ck_assert(!tl_rivals_are_active(&rivals));
}
END_TEST

START_TEST(one_warning_a_minute)
{
    log_capture_begin();
    for (unsigned i = 0; i < 590; i++) {
        note(1 + i % 2);
        fake_clock_advance(TL_NS_PER_SEC / 10);
    }
    ck_assert_uint_eq(log_capture_count("level=warn msg=\"two processes claim one task\""), 1);
    for (unsigned i = 0; i < 20; i++) {
        note(1 + i % 2);
        fake_clock_advance(TL_NS_PER_SEC / 10);
    }
    ck_assert_uint_eq(log_capture_count("level=warn msg=\"two processes claim one task\""), 2);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("rivals");
    TCase *tcase = tcase_create("rivals");
    tcase_add_test(tcase, restarts_are_no_rivals);
    tcase_add_test(tcase, processes_that_alternate);
    tcase_add_test(tcase, one_warning_a_minute);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
