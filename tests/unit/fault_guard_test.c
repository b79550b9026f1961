// SPDX-License-Identifier: Apache-2.0
/* The SIGBUS handler: zeros for what is registered, the handler before it for all else; the table of mappings. */
#include <check.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/fakes/temp_folder.h"

#include "fakes/run_suite.h"
#include "tensor/fault_guard.c"

static struct tl_error error;
static size_t page;
static int fd;
static volatile unsigned char *bytes; /* Three pages of a file, all 'x'. */

static void setup(void)
{
    static unsigned char content[3 * 65536];
    temp_folder_make();
    /* Removes a handler of a sanitizer. */
    signal(SIGBUS, SIG_DFL);
    page = (size_t)sysconf(_SC_PAGESIZE);
    memset(content, 'x', 3 * page);
    temp_write(temp_path("f"), content, 3 * page);
    fd = open(temp_path("f"), O_RDWR | O_CLOEXEC);
    ck_assert_int_ge(fd, 0);
    bytes = mmap(NULL, 3 * page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ck_assert_ptr_ne((void *)bytes, MAP_FAILED);
}

static void teardown(void)
{
    munmap((void *)bytes, 3 * page);
    close(fd);
    temp_folder_remove();
}

static struct tl_fault_range *add(int protection)
{
    struct tl_fault_range *range = NULL;
    ck_assert_int_eq(tl_fault_range_add((const void *)bytes, 3 * page, protection, true, &range, &error), TL_OK);
    return range;
}

START_TEST(zeros_and_damaged)
{
    struct tl_fault_range *range = add(PROT_READ);
    ck_assert_int_eq(tl_guard_mapped_files(&error), TL_OK);
    ck_assert_int_eq(tl_guard_mapped_files(&error), TL_OK);
    ck_assert_int_eq(ftruncate(fd, (off_t)page), 0);
    ck_assert_int_eq(bytes[0], 'x');
    ck_assert(!tl_fault_range_is_damaged(range));
    ck_assert_int_eq(bytes[2 * page + 5], 0);
    ck_assert(tl_fault_range_is_damaged(range));
    ck_assert_int_eq(bytes[2 * page - 1], 0);
    ck_assert_int_eq(bytes[page - 1], 'x');
    tl_fault_range_remove(range);
    /* A new mapping in the same place of the table starts undamaged. */
    range = add(PROT_READ);
    ck_assert(!tl_fault_range_is_damaged(range));
    tl_fault_range_remove(range);
}
END_TEST

START_TEST(written_pages)
{
    struct tl_fault_range *range = add(PROT_READ | PROT_WRITE);
    ck_assert_int_eq(tl_guard_mapped_files(&error), TL_OK);
    ck_assert_int_eq(ftruncate(fd, 0), 0);
    bytes[7] = 'y';
    ck_assert_int_eq(bytes[7], 'y');
    ck_assert(tl_fault_range_is_damaged(range));
    tl_fault_range_remove(range);
}
END_TEST

START_TEST(unregistered_ends_the_process)
{
    struct tl_fault_range *range = add(PROT_READ);
    ck_assert_int_eq(tl_guard_mapped_files(&error), TL_OK);
    tl_fault_range_remove(range);
    ck_assert_int_eq(ftruncate(fd, 0), 0);
    ck_assert_int_eq(bytes[0], 0);
}
END_TEST

START_TEST(sent_signal_ends_the_process)
{
    struct tl_fault_range *range = add(PROT_READ);
    ck_assert_int_eq(tl_guard_mapped_files(&error), TL_OK);
    ck_assert_ptr_nonnull(range);
    raise(SIGBUS);
    ck_abort_msg("still here");
}
END_TEST

START_TEST(sent_signal_stays_ignored)
{
    signal(SIGBUS, SIG_IGN);
    ck_assert_int_eq(tl_guard_mapped_files(&error), TL_OK);
    ck_assert_int_eq(raise(SIGBUS), 0);
}
END_TEST

START_TEST(failed_access_cannot_be_ignored)
{
    signal(SIGBUS, SIG_IGN);
    ck_assert_int_eq(tl_guard_mapped_files(&error), TL_OK);
    ck_assert_int_eq(ftruncate(fd, 0), 0);
    ck_assert_int_eq(bytes[0], 0);
}
END_TEST

static volatile sig_atomic_t passed_count;
static sigjmp_buf escape;

static void simple_handler(int number)
{
    passed_count += number == SIGBUS;
}

static void full_handler(int number, siginfo_t *info, void *context)
{
    passed_count += number == SIGBUS && context;
    if (info->si_code > 0) siglongjmp(escape, 1);
}

START_TEST(passed_to_a_simple_handler)
{
    signal(SIGBUS, simple_handler);
    ck_assert_int_eq(tl_guard_mapped_files(&error), TL_OK);
    raise(SIGBUS);
    ck_assert_int_eq(passed_count, 1);
}
END_TEST

START_TEST(passed_to_a_full_handler)
{
    struct sigaction action = {.sa_sigaction = full_handler, .sa_flags = SA_SIGINFO};
    sigaction(SIGBUS, &action, NULL);
    ck_assert_int_eq(tl_guard_mapped_files(&error), TL_OK);
    raise(SIGBUS);
    ck_assert_int_eq(passed_count, 1);
    ck_assert_int_eq(ftruncate(fd, 0), 0);
    if (sigsetjmp(escape, 1) == 0) {
        ck_assert_int_eq(bytes[0], 0);
        ck_abort_msg("the access did not fail");
    }
    ck_assert_int_eq(passed_count, 2);
}
END_TEST

/* Pages are in memory; the kernel tells that of files of this user only. */
START_TEST(pages_that_are_in_memory)
{
    struct tl_fault_range *range = NULL;
    bytes[0] = bytes[page] = bytes[2 * page] = 'y';
    ck_assert(!tl_fault_range_may_wait((const void *)bytes, 3 * page));
    for (unsigned tells = 0; tells < 2; tells++) {
        ck_assert_int_eq(tl_fault_range_add((const void *)bytes, 3 * page, PROT_READ, tells, &range, &error), TL_OK);
        ck_assert_int_eq(tl_fault_range_may_wait((const void *)bytes, 3 * page), !tells);
        tl_fault_range_remove(range);
    }
}
END_TEST

START_TEST(table_is_bounded)
{
    static struct tl_fault_range *added[MAX_RANGES];
    struct tl_fault_range *range = NULL;
    for (int i = 0; i < MAX_RANGES; i++)
        added[i] = add(PROT_READ);
    ck_assert_int_eq(tl_fault_range_add((const void *)bytes, page, PROT_READ, true, &range, &error),
                     TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_null(range);
    tl_fault_range_remove(added[77]);
    ck_assert_ptr_eq(add(PROT_READ), added[77]);
    tl_fault_range_remove(NULL);
    ck_assert(!tl_fault_range_is_damaged(NULL));
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("fault_guard");
    TCase *tcase = tcase_create("fault_guard");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, zeros_and_damaged);
    tcase_add_test(tcase, written_pages);
    tcase_add_test(tcase, sent_signal_stays_ignored);
    tcase_add_test(tcase, passed_to_a_simple_handler);
    tcase_add_test(tcase, passed_to_a_full_handler);
    tcase_add_test(tcase, pages_that_are_in_memory);
    tcase_add_test(tcase, table_is_bounded);
    tcase_set_timeout(tcase, 60);
    suite_add_tcase(suite, tcase);
    TCase *fatal = tcase_create("fatal");
    tcase_add_unchecked_fixture(fatal, setup, teardown);
    tcase_add_test_raise_signal(fatal, unregistered_ends_the_process, SIGBUS);
    tcase_add_test_raise_signal(fatal, sent_signal_ends_the_process, SIGBUS);
    tcase_add_test_raise_signal(fatal, failed_access_cannot_be_ignored, SIGBUS);
    suite_add_tcase(suite, fatal);
    return run_suite(suite);
}
