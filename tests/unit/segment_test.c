// SPDX-License-Identifier: Apache-2.0
/* Segments: made and mapped, what is refused, and their pages. */
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/check.h"
#include "dataplane/memory/pages.h"
#include "dataplane/memory/segment.h"
#include "fakes/run_suite.h"

/* Headers of older systems lack this macro. */
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

static struct tl_error error;

/* Returns the seal that keeps pages; 0 on kernels before 5.1, which do not know it. */
static int seal_that_keeps_pages(void)
{
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    ck_assert_int_ge(fd, 0);
    bool is_known = fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) == 0;
    ck_assert(is_known || errno == EINVAL);
    close(fd);
    return is_known ? F_SEAL_FUTURE_WRITE : 0;
}

/* What is written through one mapping is read through the other one, and the size cannot change any more. */
START_TEST(made_and_mapped)
{
    static const uint64_t lens[] = {TL_PAGE_BYTES, 3 * TL_PAGE_BYTES, 2 * TL_SEGMENT_CHUNK_BYTES};
    for (size_t i = 0; i < 2 * TL_ARRAY_COUNT(lens); i++) {
        uint64_t len_bytes = lens[i / 2];
        int fd;
        void *own, *peers;
        enum tl_segment_pages pages = i % 2 == 0 ? TL_SEGMENT_SMALL_PAGES : TL_SEGMENT_HUGE_PAGES;
        ck_assert_int_eq(tl_segment_make("test", len_bytes, pages, &fd, &own, &error), TL_OK);
        ck_assert_int_eq(tl_segment_map(fd, len_bytes, &peers, &error), TL_OK);
        ck_assert_int_ne(ftruncate(fd, 0), 0);
        ck_assert_int_ne(ftruncate(fd, (off_t)(2 * len_bytes)), 0);
        ck_assert_int_eq(fcntl(fd, F_GET_SEALS) & F_SEAL_FUTURE_WRITE, seal_that_keeps_pages());
        ((char *)own)[len_bytes - 1] = 7;
        ck_assert_int_eq(((char *)peers)[len_bytes - 1], 7);
        close(fd);
        tl_pages_unmap(own, len_bytes);
        tl_pages_unmap(peers, len_bytes);
    }
}
END_TEST

START_TEST(refused)
{
    static const struct {
        int seals;
        uint64_t said_bytes;
    } wrong[] = {{0, 8192},
                 {F_SEAL_GROW, 8192},
                 {F_SEAL_SHRINK, 8192},
                 {F_SEAL_GROW | F_SEAL_SHRINK, 4096},
                 {F_SEAL_GROW | F_SEAL_SHRINK, 0},
                 {F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL, 8192}};
    /* The last memory is refused only because that seal cannot be added. */
    size_t count = TL_ARRAY_COUNT(wrong) - (seal_that_keeps_pages() == 0 ? 1 : 0);
    void *address = NULL;
    for (size_t i = 0; i < count; i++) {
        int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        ck_assert(fd >= 0 && ftruncate(fd, 8192) == 0 && fcntl(fd, F_ADD_SEALS, wrong[i].seals) == 0);
        ck_assert_int_eq(tl_segment_map(fd, wrong[i].said_bytes, &address, &error), TL_INVALID_ARGUMENT);
        close(fd);
    }
    ck_assert_int_eq(tl_segment_map(-1, 8192, &address, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_null(address);
}
END_TEST

START_TEST(too_much)
{
    void *address = NULL;
    int fd = -1;
    enum tl_status status = tl_segment_make("test", UINT64_C(1) << 62, TL_SEGMENT_SMALL_PAGES, &fd, &address, &error);
    ck_assert_int_eq(status, TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(error.message, "cannot make"));
    ck_assert_int_eq(fd, -1);
    ck_assert_ptr_null(address);
}
END_TEST

static bool is_there(const void *address)
{
    unsigned char there;
    ck_assert_int_eq(mincore((void *)(uintptr_t)address, TL_PAGE_BYTES, &there), 0);
    return (there & 1) != 0;
}

START_TEST(pages_that_are_got)
{
    const uint64_t len_bytes = 4 * TL_SEGMENT_CHUNK_BYTES;
    atomic_bool must_stop = true;
    void *address;
    int fd;
    ck_assert_int_eq(tl_segment_make("test", len_bytes, TL_SEGMENT_SMALL_PAGES, &fd, &address, &error), TL_OK);
    char *end = (char *)address + len_bytes;
    tl_segment_populate_from_end(address, len_bytes, &must_stop);
    ck_assert(!is_there(end - TL_PAGE_BYTES));
    /* Kernels before 5.14 do not know MADV_POPULATE_READ. */
    bool is_known = tl_segment_populate(address, TL_PAGE_BYTES);
    ck_assert(is_known || errno == EINVAL);
    ck_assert(is_there(address) == is_known && !is_there(end - TL_PAGE_BYTES));
    atomic_store(&must_stop, false);
    tl_segment_populate_from_end(address, len_bytes, &must_stop);
    for (const char *page = address; page < end; page += TL_PAGE_BYTES)
        ck_assert(is_there(page) == is_known);
    close(fd);
    tl_pages_unmap(address, len_bytes);
    ck_assert(!tl_segment_populate(address, TL_PAGE_BYTES));
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("segment");
    TCase *tcase = tcase_create("segment");
    tcase_add_test(tcase, made_and_mapped);
    tcase_add_test(tcase, refused);
    tcase_add_test(tcase, too_much);
    tcase_add_test(tcase, pages_that_are_got);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
