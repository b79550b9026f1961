// SPDX-License-Identifier: Apache-2.0
/* Mapped files: which can be opened, what the check notices, and lack of memory. */
#include <check.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/fakes/fault_alloc.h"
#include "tests/fakes/temp_folder.h"

#include "fakes/run_suite.h"
#include "tensor/mapped_file.c"
#include "tensor/tensor.h"

#define PAGE_BYTES 4096
#define PAGES UINT64_C(1500)

static struct tl_error error;
static struct tl_mapped_file *file;

static void setup(void)
{
    /* A time in the past: writing to the file now changes it for certain. */
    const struct timespec times[2] = {{.tv_sec = 1000000000}, {.tv_sec = 1000000000}};
    temp_folder_make();
    temp_write(temp_path("f"), "hello", 5);
    ck_assert_int_eq(utimensat(AT_FDCWD, temp_path("f"), times, 0), 0);
    ck_assert_int_eq(tl_mapped_file_open(temp_path("f"), &file, &error), TL_OK);
}

static void teardown(void)
{
    tl_mapped_file_put(file);
    temp_folder_remove();
}

START_TEST(opened)
{
    ck_assert_uint_eq(tl_mapped_file_size_bytes(file), 5);
    ck_assert_mem_eq(tl_mapped_file_data(file), "hello", 5);
    ck_assert_str_eq(tl_mapped_file_path(file), temp_path("f"));
    ck_assert_int_eq(tl_mapped_file_check(file, NULL, 0, &error), TL_OK);
    ck_assert(!tl_mapped_file_is_shared(file));
    ck_assert_ptr_eq(tl_mapped_file_get(file), file);
    ck_assert(tl_mapped_file_is_shared(file));
    tl_mapped_file_put(file);
    ck_assert_int_eq(tl_mapped_file_check(file, NULL, 0, &error), TL_OK);
    tl_mapped_file_put(NULL);
}
END_TEST

/* Pages of a hole are in memory once they were read. */
START_TEST(reads_that_may_wait)
{
    struct tl_mapped_file *sparse = NULL;
    const uint64_t len_bytes = 3 * PAGES * PAGE_BYTES;
    uint8_t heap[5];
    temp_write(temp_path("sparse"), "", 0);
    ck_assert_int_eq(truncate(temp_path("sparse"), (off_t)len_bytes), 0);
    ck_assert_int_eq(tl_mapped_file_open(temp_path("sparse"), &sparse, &error), TL_OK);
    const volatile uint8_t *bytes = tl_mapped_file_data(sparse);
    ck_assert(!tl_mapped_file_may_wait(heap, sizeof(heap)));
    ck_assert(!tl_mapped_file_may_wait(tl_mapped_file_data(file), 5));
    ck_assert(tl_mapped_file_may_wait((const void *)bytes, len_bytes));
    for (uint64_t at = 0; at < len_bytes; at += PAGE_BYTES)
        ck_assert_int_eq(bytes[at], 0);
    ck_assert(!tl_mapped_file_may_wait((const void *)bytes, len_bytes));
    ck_assert(!tl_mapped_file_may_wait((const void *)(bytes + 1), 1));
    ck_assert_int_eq(truncate(temp_path("sparse"), (off_t)(len_bytes - PAGE_BYTES)), 0);
    ck_assert(tl_mapped_file_may_wait((const void *)bytes, len_bytes));
    ck_assert(tl_mapped_file_may_wait((const void *)(bytes + len_bytes - PAGE_BYTES - 1), 2));
    ck_assert(!tl_mapped_file_may_wait((const void *)bytes, len_bytes - PAGE_BYTES));
    tl_mapped_file_put(sparse);
}
END_TEST

/* The kernel does not tell which pages of the file are in memory. */
START_TEST(file_of_another_user)
{
    struct tl_mapped_file *others = NULL;
    if (geteuid() != 0) {
        printf("skipped: only root can give a file away\n");
        return;
    }
    temp_write(temp_path("others"), "hello", 5);
    ck_assert_int_eq(chown(temp_path("others"), 1, 1), 0);
    ck_assert_int_eq(tl_mapped_file_open(temp_path("others"), &others, &error), TL_OK);
    ck_assert(tl_mapped_file_may_wait(tl_mapped_file_data(others), 5));
    tl_mapped_file_put(others);
}
END_TEST

START_TEST(empty)
{
    struct tl_mapped_file *nothing = NULL;
    temp_write(temp_path("empty"), "", 0);
    ck_assert_int_eq(tl_mapped_file_open(temp_path("empty"), &nothing, &error), TL_OK);
    ck_assert_uint_eq(tl_mapped_file_size_bytes(nothing), 0);
    ck_assert_int_eq(tl_mapped_file_check(nothing, NULL, 0, &error), TL_OK);
    tl_mapped_file_put(nothing);
}
END_TEST

static void refuse(const char *path, enum tl_status status)
{
    struct tl_mapped_file *none = NULL;
    ck_assert_int_eq(tl_mapped_file_open(path, &none, &error), status);
    ck_assert_ptr_nonnull(strstr(error.message, path));
    ck_assert_ptr_null(none);
}

START_TEST(not_opened)
{
    refuse(temp_path("missing"), TL_NOT_FOUND);
    refuse(temp_path("f/g"), TL_NOT_FOUND);
    refuse(temp_folder, TL_INVALID_ARGUMENT);
    ck_assert_int_eq(mkfifo(temp_path("fifo"), 0600), 0);
    refuse(temp_path("fifo"), TL_INVALID_ARGUMENT);
    refuse("/dev/null", TL_INVALID_ARGUMENT);
    if (geteuid() == 0) {
        printf("skipped: root may read every file\n");
        return;
    }
    chmod(temp_path("f"), 0);
    refuse(temp_path("f"), TL_PERMISSION_DENIED);
}
END_TEST

static void check_fails(void)
{
    ck_assert_int_eq(tl_mapped_file_check(file, NULL, 0, &error), TL_DATA_LOSS);
    ck_assert_ptr_nonnull(strstr(error.message, temp_path("f")));
    ck_assert_int_eq(tl_mapped_file_check(file, NULL, 0, NULL), TL_DATA_LOSS);
}

START_TEST(shrunk)
{
    ck_assert_int_eq(truncate(temp_path("f"), 4), 0);
    check_fails();
}
END_TEST

/* What has come of a file that was cut off is not blamed for it. */
START_TEST(blamed)
{
    error = (struct tl_error){.code = TL_INVALID_ARGUMENT, .message = "nonsense"};
    ck_assert_int_eq(tl_mapped_file_blame(file, TL_INVALID_ARGUMENT, &error), TL_INVALID_ARGUMENT);
    ck_assert_str_eq(error.message, "nonsense");
    ck_assert_int_eq(truncate(temp_path("f"), 4), 0);
    ck_assert_int_eq(tl_mapped_file_blame(file, TL_INVALID_ARGUMENT, &error), TL_DATA_LOSS);
    ck_assert_ptr_nonnull(strstr(error.message, temp_path("f")));
}
END_TEST

START_TEST(grown)
{
    ck_assert_int_eq(truncate(temp_path("f"), 6), 0);
    check_fails();
}
END_TEST

START_TEST(changed_in_place)
{
    temp_write(temp_path("f"), "jello", 5);
    check_fails();
}
END_TEST

START_TEST(replaced_or_removed_by_name)
{
    temp_write(temp_path("g"), "other bytes", 11);
    ck_assert_int_eq(tl_mapped_file_look_up(file), TL_FILE_AT_PATH_SAME);
    ck_assert_int_eq(rename(temp_path("g"), temp_path("f")), 0);
    ck_assert_int_eq(tl_mapped_file_look_up(file), TL_FILE_AT_PATH_OTHER);
    ck_assert_int_eq(tl_mapped_file_check(file, NULL, 0, &error), TL_OK);
    ck_assert_int_eq(unlink(temp_path("f")), 0);
    ck_assert_int_eq(tl_mapped_file_look_up(file), TL_FILE_AT_PATH_NONE);
    ck_assert_int_eq(tl_mapped_file_check(file, NULL, 0, &error), TL_OK);
    ck_assert_mem_eq(tl_mapped_file_data(file), "hello", 5);
}
END_TEST

/* The size and the time are as before, and yet a page was lost in between. */
START_TEST(read_failed)
{
    const struct timespec times[2] = {{.tv_sec = 1000000000}, {.tv_sec = 1000000000}};
    signal(SIGBUS, SIG_DFL);
    ck_assert_int_eq(tl_guard_mapped_files(&error), TL_OK);
    ck_assert_int_eq(truncate(temp_path("f"), 0), 0);
    ck_assert_int_eq(*(const volatile char *)tl_mapped_file_data(file), 0);
    temp_write(temp_path("f"), "hello", 5);
    ck_assert_int_eq(utimensat(AT_FDCWD, temp_path("f"), times, 0), 0);
    check_fails();
    ck_assert_ptr_nonnull(strstr(error.message, "could not be read"));
}
END_TEST

/* ---------------------------------------------------------------------------------- another owner's descriptor -- */

static const struct tl_file_stamp as_it_was = {.size_bytes = 5, .modified_seconds = 1000000000};

static enum tl_status adopt(const char *path, int flags, const struct tl_file_stamp *stamp,
                            struct tl_mapped_file **ret_file)
{
    int fd = open(path, flags | O_CLOEXEC | O_NONBLOCK);
    ck_assert_int_ge(fd, 0);
    return tl_mapped_file_adopt(fd, stamp, "the file of a peer", ret_file, &error);
}

START_TEST(adopted)
{
    struct tl_mapped_file *other = NULL;
    struct tl_file_stamp stamp;
    tl_mapped_file_get_stamp(file, &stamp);
    ck_assert_int_eq(tl_mapped_file_adopt(dup(tl_mapped_file_fd(file)), &stamp, "it", &other, &error), TL_OK);
    ck_assert_uint_ne(tl_mapped_file_id(other), tl_mapped_file_id(file));
    tl_mapped_file_put(file);
    ck_assert_int_eq(unlink(temp_path("f")), 0);
    ck_assert_mem_eq(tl_mapped_file_data(other), "hello", 5);
    ck_assert_str_eq(tl_mapped_file_path(other), "it");
    ck_assert_int_eq(tl_mapped_file_check(other, NULL, 0, &error), TL_OK);
    file = other;
}
END_TEST

START_TEST(not_adopted)
{
    struct tl_mapped_file *none = NULL;
    struct tl_file_stamp other_size = as_it_was, other_second = as_it_was, other_ns = as_it_was;
    int lowest = dup(0);
    close(lowest);
    other_size.size_bytes = 4;
    other_second.modified_seconds++;
    other_ns.modified_ns = 1;
    ck_assert_int_eq(adopt(temp_path("f"), O_RDONLY, &other_size, &none), TL_DATA_LOSS);
    ck_assert_ptr_nonnull(strstr(error.message, "the file of a peer"));
    ck_assert_int_eq(adopt(temp_path("f"), O_RDONLY, &other_second, &none), TL_DATA_LOSS);
    ck_assert_int_eq(adopt(temp_path("f"), O_RDONLY, &other_ns, &none), TL_DATA_LOSS);
    ck_assert_int_eq(adopt(temp_path("f"), O_WRONLY, &as_it_was, &none), TL_PERMISSION_DENIED);
    ck_assert_int_eq(adopt(temp_folder, O_RDONLY, &as_it_was, &none), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(adopt("/dev/null", O_RDONLY, &as_it_was, &none), TL_INVALID_ARGUMENT);
    ck_assert_ptr_null(none);
    int after = dup(0);
    close(after);
    ck_assert_int_eq(after, lowest);
}
END_TEST

/* The file is written through one mapping, and in no other way. */
START_TEST(made)
{
    struct tl_mapped_file *memory = NULL, *other = NULL;
    struct tl_file_stamp stamp;
    ck_assert_int_eq(tl_mapped_file_make(10000, &memory, &error), TL_OK);
    ck_assert(tl_mapped_file_is_memory(memory) && !tl_mapped_file_is_memory(file));
    ck_assert_uint_eq(tl_mapped_file_size_bytes(memory), 10000);
    char *data = (char *)(uintptr_t)tl_mapped_file_data(memory);
    ck_assert_int_eq(data[9999], 0);
    int fd = tl_mapped_file_fd(memory);
    ck_assert_int_ne(ftruncate(fd, 5000), 0);
    ck_assert_int_ne(ftruncate(fd, 20000), 0);
    ck_assert_int_eq(pwrite(fd, "x", 1, 0), -1);
    ck_assert_ptr_eq(mmap(NULL, 10000, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
    tl_mapped_file_get_stamp(memory, &stamp);
    memcpy(data, "hello", 6);
    stamp.modified_seconds++; /* The time has no meaning here. */
    ck_assert_int_eq(tl_mapped_file_adopt(dup(fd), &stamp, "it", &other, &error), TL_OK);
    ck_assert(tl_mapped_file_is_memory(other));
    tl_mapped_file_put(memory);
    ck_assert_str_eq(tl_mapped_file_data(other), "hello");
    ck_assert_int_eq(tl_mapped_file_check(other, NULL, 0, &error), TL_OK);
    stamp.size_bytes--;
    fd = dup(tl_mapped_file_fd(other));
    tl_mapped_file_put(other);
    ck_assert_int_eq(tl_mapped_file_adopt(fd, &stamp, "it", &other, &error), TL_DATA_LOSS);
}
END_TEST

static enum tl_status open_own(struct tl_mapped_file **ret_file)
{
    return tl_mapped_file_open(temp_path("f"), ret_file, &error);
}

static enum tl_status adopt_own(struct tl_mapped_file **ret_file)
{
    return adopt(temp_path("f"), O_RDONLY, &as_it_was, ret_file);
}

static enum tl_status make_own(struct tl_mapped_file **ret_file)
{
    return tl_mapped_file_make(1, ret_file, &error);
}

START_TEST(no_memory)
{
    enum tl_status (*const subjects[])(struct tl_mapped_file * *ret_file) = {open_own, adopt_own, make_own};
    int lowest = dup(0);
    close(lowest);
    for (unsigned n = 1;; n++) {
        struct tl_mapped_file *other = NULL;
        fault_arm(n);
        enum tl_status status = subjects[_i](&other);
        if (!fault_was_hit()) {
            ck_assert_uint_eq(n, 3);
            ck_assert_int_eq(status, TL_OK);
            tl_mapped_file_put(other);
            break;
        }
        ck_assert_int_eq(status, TL_RESOURCE_EXHAUSTED);
        ck_assert_ptr_null(other);
    }
    int after = dup(0);
    close(after);
    ck_assert_int_eq(after, lowest);
}
END_TEST

/* What was opened is closed again: the lowest free descriptor is the same. */
START_TEST(no_descriptor_is_left)
{
    struct tl_mapped_file *other = NULL;
    int before = dup(0);
    close(before);
    ck_assert_int_eq(tl_mapped_file_open(temp_path("f"), &other, &error), TL_OK);
    tl_mapped_file_put(other);
    refuse(temp_folder, TL_INVALID_ARGUMENT);
    int after = dup(0);
    close(after);
    ck_assert_int_eq(after, before);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("mapped_file");
    TCase *tcase = tcase_create("mapped_file");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, opened);
    tcase_add_test(tcase, reads_that_may_wait);
    tcase_add_test(tcase, file_of_another_user);
    tcase_add_test(tcase, empty);
    tcase_add_test(tcase, not_opened);
    tcase_add_test(tcase, shrunk);
    tcase_add_test(tcase, blamed);
    tcase_add_test(tcase, grown);
    tcase_add_test(tcase, changed_in_place);
    tcase_add_test(tcase, replaced_or_removed_by_name);
    tcase_add_test(tcase, read_failed);
    tcase_add_test(tcase, adopted);
    tcase_add_test(tcase, not_adopted);
    tcase_add_test(tcase, made);
    tcase_add_loop_test(tcase, no_memory, 0, 3);
    tcase_add_test(tcase, no_descriptor_is_left);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
