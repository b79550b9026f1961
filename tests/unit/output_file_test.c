// SPDX-License-Identifier: Apache-2.0
/* Files written in place: space that is reserved and given back, full disks, limits, file systems that cannot allocate,
 * failing syncs. */
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <tensorlane/tensor.h>

#include "tests/fakes/fault_alloc.h"
#include "tests/fakes/temp_folder.h"

static int scripted_errors[4]; /* The next calls of fallocate fail with this error; 0: they succeed. */
static unsigned fallocate_count;
static int fsync_error, msync_error, mmap_error, fchmod_error, fsetxattr_error;
static unsigned long free_blocks;
static bool has_free_blocks; /* free_blocks counts. */

static int fake_fallocate(int fd, int mode, off_t offset, off_t len)
{
    errno = fallocate_count < 4 ? scripted_errors[fallocate_count] : 0;
    fallocate_count++;
    return errno == 0 ? fallocate(fd, mode, offset, len) : -1;
}

static int fake_fsync(int fd)
{
    errno = fsync_error;
    return fsync_error == 0 ? fsync(fd) : -1;
}

static int fake_msync(void *data, size_t len, int flags)
{
    errno = msync_error;
    return msync_error == 0 ? msync(data, len, flags) : -1;
}

static int fake_fchmod(int fd, mode_t mode)
{
    errno = fchmod_error;
    return fchmod_error == 0 ? fchmod(fd, mode) : -1;
}

static int fake_fsetxattr(int fd, const char *name, const void *value, size_t len, int flags)
{
    errno = fsetxattr_error;
    return fsetxattr_error == 0 ? fsetxattr(fd, name, value, len, flags) : -1;
}

static void *fake_mmap(void *place, size_t len, int protection, int flags, int fd, off_t offset)
{
    errno = mmap_error;
    return mmap_error == 0 ? mmap(place, len, protection, flags, fd, offset) : MAP_FAILED;
}

static int fake_fstatvfs(int fd, struct statvfs *ret_info)
{
    int result = fstatvfs(fd, ret_info);
    if (has_free_blocks) ret_info->f_bavail = free_blocks;
    return result;
}

#define fallocate fake_fallocate
#define fsync fake_fsync
#define msync fake_msync
#define fchmod fake_fchmod
#define fsetxattr fake_fsetxattr
#define mmap fake_mmap
#define fstatvfs fake_fstatvfs
#include "fakes/run_suite.h"
#include "tensor/output_file.c"

static struct tl_error error;
static struct tl_output_file *file;

static void create(uint64_t len_bytes)
{
    ck_assert_int_eq(tl_output_file_create(temp_path("f"), len_bytes, NULL, &file, &error), TL_OK);
}

static void refuse(uint64_t len_bytes, enum tl_status status)
{
    file = NULL;
    ck_assert_int_eq(tl_output_file_create(temp_path("f"), len_bytes, NULL, &file, &error), status);
    ck_assert_ptr_null(file);
    ck_assert_uint_eq(temp_entry_count(temp_folder), 0);
}

static uint64_t size_on_disk(void)
{
    struct stat info;
    ck_assert_int_eq(stat(temp_path("f"), &info), 0);
    return (uint64_t)info.st_size;
}

START_TEST(written)
{
    char text[6] = "";
    create(100000);
    ck_assert_uint_eq(size_on_disk(), 100000);
    ck_assert_uint_eq(tl_output_file_len_bytes(file), 100000);
    ck_assert_str_eq(tl_output_file_path(file), temp_path("f"));
    memcpy((char *)tl_output_file_data(file) + 99995, "hello", 5);
    ck_assert_int_eq(tl_output_file_sync(file, &error), TL_OK);
    ck_assert_ptr_eq(tl_output_file_get(file), file);
    tl_output_file_put(file);
    tl_output_file_put(file);
    tl_output_file_put(NULL);
    int fd = open(temp_path("f"), O_RDONLY);
    ck_assert_int_eq(pread(fd, text, 5, 99995), 5);
    ck_assert_str_eq(text, "hello");
    close(fd);
}
END_TEST

START_TEST(exists)
{
    temp_write(temp_path("f"), "mine", 4);
    ck_assert_int_eq(tl_output_file_create(temp_path("f"), 10, NULL, &file, &error), TL_ALREADY_EXISTS);
    ck_assert_uint_eq(size_on_disk(), 4);
}
END_TEST

START_TEST(no_folder)
{
    ck_assert_int_eq(tl_output_file_create(temp_path("none/f"), 10, NULL, &file, &error), TL_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(error.message, temp_path("none/f")));
}
END_TEST

START_TEST(disk_is_full)
{
    static const int numbers[] = {ENOSPC, EDQUOT, EFBIG};
    for (size_t i = 0; i < TL_ARRAY_COUNT(numbers); i++) {
        fallocate_count = 0;
        scripted_errors[0] = numbers[i];
        refuse(123456789, TL_RESOURCE_EXHAUSTED);
        ck_assert_ptr_nonnull(strstr(error.message, "123456789"));
        ck_assert_ptr_nonnull(strstr(error.message, temp_path("f")));
    }
}
END_TEST

START_TEST(larger_than_any_file)
{
    refuse((uint64_t)INT64_MAX + 1, TL_RESOURCE_EXHAUSTED);
}
END_TEST

/* If the writer did not check the limit first, the signal would end the process. */
START_TEST(larger_than_the_limit)
{
    struct rlimit limit = {.rlim_cur = 4096, .rlim_max = 4096};
    ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
    refuse(4097, TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(error.message, "4097"));
    create(4096);
    tl_output_file_put(file);
}
END_TEST

START_TEST(allocation_is_interrupted)
{
    scripted_errors[0] = scripted_errors[1] = EINTR;
    create(10);
    ck_assert_uint_eq(fallocate_count, 3);
    tl_output_file_put(file);
}
END_TEST

START_TEST(file_system_cannot_allocate)
{
    scripted_errors[0] = EOPNOTSUPP;
    create(200000);
    ck_assert_uint_eq(size_on_disk(), 200000);
    for (int i = 0; i < 200000; i++)
        ck_assert_int_eq(((char *)tl_output_file_data(file))[i], 0);
    tl_output_file_put(file);
}
END_TEST

START_TEST(file_system_cannot_allocate_and_is_full)
{
    scripted_errors[0] = EOPNOTSUPP;
    has_free_blocks = true;
    free_blocks = 1;
    refuse(INT64_C(1) << 40, TL_RESOURCE_EXHAUSTED);
}
END_TEST

static int64_t blocks_on_disk(void)
{
    struct stat info;
    ck_assert_int_eq(stat(temp_path("f"), &info), 0);
    return info.st_blocks;
}

START_TEST(space_is_given_back)
{
    create(1000000);
    ck_assert_int_ge(blocks_on_disk(), 1000000 / 512);
    bool was_allocated = file->is_allocated; /* Some file systems cannot. */
    ck_assert_int_eq(tl_output_file_give_back_space(file, &error), TL_OK);
    if (was_allocated) ck_assert_int_lt(blocks_on_disk(), 100);
    ck_assert_uint_eq(size_on_disk(), 1000000);
    memcpy((char *)tl_output_file_data(file) + 500000, "hello", 6);
    ck_assert_int_eq(tl_output_file_give_back_space(file, &error), TL_OK);
    ck_assert_str_eq((char *)tl_output_file_data(file) + 500000, "hello");
    ck_assert_int_eq(tl_output_file_sync(file, &error), TL_OK);
    tl_output_file_put(file);
}
END_TEST

START_TEST(space_that_is_zeros_stays)
{
    scripted_errors[0] = EOPNOTSUPP;
    create(1000000);
    ck_assert_int_eq(tl_output_file_give_back_space(file, &error), TL_OK);
    ck_assert_int_ge(blocks_on_disk(), 1000000 / 512);
    tl_output_file_put(file);
}
END_TEST

START_TEST(space_of_a_file_that_is_gone)
{
    create(10);
    file->is_allocated = true;
    unlink(temp_path("f"));
    ck_assert_int_eq(tl_output_file_give_back_space(file, &error), TL_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(error.message, temp_path("f")));
    tl_output_file_put(file);
}
END_TEST

START_TEST(no_address_space)
{
    mmap_error = ENOMEM;
    refuse(10, TL_RESOURCE_EXHAUSTED);
}
END_TEST

START_TEST(sync_fails)
{
    create(10);
    fsync_error = EIO;
    ck_assert_int_eq(tl_output_file_sync(file, &error), TL_INTERNAL);
    fsync_error = 0;
    msync_error = EIO;
    ck_assert_int_eq(tl_output_file_sync(file, &error), TL_INTERNAL);
    ck_assert_ptr_nonnull(strstr(error.message, temp_path("f")));
    msync_error = 0;
    unlink(temp_path("f"));
    ck_assert_int_eq(tl_output_file_sync(file, &error), TL_NOT_FOUND);
    tl_output_file_put(file);
}
END_TEST

/* While it is written, the file may be read and written by its user alone. */
START_TEST(file_system_without_permissions)
{
    static const int numbers[] = {EPERM, ENOSYS, EOPNOTSUPP};
    struct tl_replaced_file replaced = {0};
    temp_write(temp_path("old"), "old", 3);
    ck_assert_int_eq(stat(temp_path("old"), &replaced.info), 0);
    for (size_t i = 0; i < TL_ARRAY_COUNT(numbers); i++) {
        fchmod_error = numbers[i];
        replaced.info.st_mode = S_IFREG | 0644;
        ck_assert_int_eq(tl_output_file_create(temp_path("f"), 10, &replaced, &file, &error), TL_OK);
        ck_assert_int_eq(tl_output_file_sync(file, &error), TL_OK);
        tl_output_file_put(file);
        unlink(temp_path("f"));
        replaced.info.st_mode = S_IFREG | 0444;
        ck_assert_int_eq(tl_output_file_create(temp_path("f"), 10, &replaced, &file, &error), TL_OK);
        ck_assert_int_ne(tl_output_file_sync(file, &error), TL_OK);
        tl_output_file_put(file);
        unlink(temp_path("f"));
    }
    fchmod_error = EIO;
    replaced.info.st_mode = S_IFREG | 0644;
    ck_assert_int_eq(tl_output_file_create(temp_path("f"), 10, &replaced, &file, &error), TL_OK);
    ck_assert_int_eq(tl_output_file_sync(file, &error), TL_INTERNAL);
    tl_output_file_put(file);
}
END_TEST

/* One entry of an ACL as extended attributes have it, after the version in the first 4 bytes. */
struct acl_entry {
    uint16_t tag;
    uint16_t permissions;
    uint32_t id;
};

struct acl {
    uint32_t version;
    struct acl_entry entries[5];
};

#define NO_ID UINT32_MAX

/* The owner may read and write, the user 1234 too, the group of the file may nothing, others may read. */
static const struct acl shared = {
    2, {{0x01, 6, NO_ID}, {0x02, 6, 1234}, {0x04, 0, NO_ID}, {0x10, 6, NO_ID}, {0x20, 4, NO_ID}}};

/* Sets an ACL; false, which is said, where the file system has none. */
static bool set_acl(const char *path, const char *name)
{
    if (setxattr(path, name, &shared, sizeof(shared), 0) == 0) return true;
    ck_assert_int_eq(errno, EOPNOTSUPP);
    printf("%s: the file system has no ACLs, so they are not tested\n", path);
    return false;
}

static void check_mode(mode_t mode)
{
    struct stat info;
    ck_assert_int_eq(stat(temp_path("f"), &info), 0);
    ck_assert_uint_eq(info.st_mode & 0777, mode);
}

/* Replaces a file by another, which is synced and then still held. */
static void replace(const char *path)
{
    struct tl_replaced_file replaced = {0};
    ck_assert_int_eq(stat(path, &replaced.info), 0);
    ck_assert_int_eq(tl_replaced_file_read_acl(&replaced, path, &error), TL_OK);
    ck_assert_int_eq(tl_output_file_create(temp_path("f"), 10, &replaced, &file, &error), TL_OK);
    tl_replaced_file_fini(&replaced);
    enum tl_status status = tl_output_file_sync(file, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    tl_output_file_put(file);
}

START_TEST(acl_of_the_replaced_file)
{
    struct acl acl;
    temp_write(temp_path("old"), "old", 3);
    if (!set_acl(temp_path("old"), "system.posix_acl_access")) return;
    replace(temp_path("old"));
    check_mode(0664);
    ck_assert_int_eq(getxattr(temp_path("f"), "system.posix_acl_access", &acl, sizeof(acl)), sizeof(acl));
    ck_assert_mem_eq(&acl, &shared, sizeof(acl));
    unlink(temp_path("f"));
    fsetxattr_error = ENOSPC;
    replace(temp_path("old"));
    check_mode(0600);
    ck_assert_int_eq(getxattr(temp_path("f"), "system.posix_acl_access", &acl, sizeof(acl)), -1);
}
END_TEST

/* The file that is replaced is from before the folder had a default ACL. */
START_TEST(default_acl_of_the_folder)
{
    struct acl acl;
    temp_write(temp_path("old"), "old", 3);
    ck_assert_int_eq(chmod(temp_path("old"), 0660), 0);
    if (!set_acl(temp_folder, "system.posix_acl_default")) return;
    replace(temp_path("old"));
    check_mode(0660);
    ck_assert_int_eq(getxattr(temp_path("f"), "system.posix_acl_access", &acl, sizeof(acl)), -1);
    ck_assert_int_eq(errno, ENODATA);
    /* It applies to a file that replaces none. */
    unlink(temp_path("f"));
    create(10);
    ck_assert_int_eq(getxattr(temp_path("f"), "system.posix_acl_access", &acl, sizeof(acl)), sizeof(acl));
    tl_output_file_put(file);
}
END_TEST

START_TEST(acl_of_a_file_that_is_missing)
{
    struct tl_replaced_file replaced = {0};
    ck_assert_int_eq(tl_replaced_file_read_acl(&replaced, temp_path("none"), &error), TL_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(error.message, temp_path("none")));
}
END_TEST

START_TEST(page_could_not_be_written)
{
    signal(SIGBUS, SIG_DFL);
    create(10);
    ck_assert_int_eq(tl_guard_mapped_files(&error), TL_OK);
    ck_assert_int_eq(tl_output_file_check(file, &error), TL_OK);
    ck_assert_int_eq(truncate(temp_path("f"), 0), 0);
    *(volatile char *)tl_output_file_data(file) = 'x';
    ck_assert_int_eq(tl_output_file_check(file, &error), TL_DATA_LOSS);
    ck_assert_ptr_nonnull(strstr(error.message, temp_path("f")));
    ck_assert_int_eq(tl_output_file_sync(file, &error), TL_DATA_LOSS);
    tl_output_file_put(file);
}
END_TEST

START_TEST(folder_sync)
{
    ck_assert_int_eq(tl_folder_sync(temp_folder, &error), TL_OK);
    fsync_error = EINVAL;
    ck_assert_int_eq(tl_folder_sync(temp_folder, &error), TL_OK);
    fsync_error = EIO;
    ck_assert_int_eq(tl_folder_sync(temp_folder, &error), TL_INTERNAL);
    ck_assert_int_eq(tl_folder_sync(temp_path("none"), &error), TL_NOT_FOUND);
}
END_TEST

START_TEST(no_memory)
{
    for (unsigned n = 1;; n++) {
        file = NULL;
        fault_arm(n);
        enum tl_status status = tl_output_file_create(temp_path("f"), 10, NULL, &file, &error);
        if (!fault_was_hit()) {
            ck_assert_uint_gt(n, 2);
            ck_assert_int_eq(status, TL_OK);
            break;
        }
        ck_assert_int_eq(status, TL_RESOURCE_EXHAUSTED);
        ck_assert_ptr_null(file);
        ck_assert_uint_eq(temp_entry_count(temp_folder), 0);
    }
    tl_output_file_put(file);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("output_file");
    TCase *tcase = tcase_create("output_file");
    tcase_add_checked_fixture(tcase, temp_folder_make, temp_folder_remove);
    tcase_add_test(tcase, written);
    tcase_add_test(tcase, exists);
    tcase_add_test(tcase, no_folder);
    tcase_add_test(tcase, disk_is_full);
    tcase_add_test(tcase, larger_than_any_file);
    tcase_add_test(tcase, larger_than_the_limit);
    tcase_add_test(tcase, allocation_is_interrupted);
    tcase_add_test(tcase, file_system_cannot_allocate);
    tcase_add_test(tcase, file_system_cannot_allocate_and_is_full);
    tcase_add_test(tcase, space_is_given_back);
    tcase_add_test(tcase, space_that_is_zeros_stays);
    tcase_add_test(tcase, space_of_a_file_that_is_gone);
    tcase_add_test(tcase, no_address_space);
    tcase_add_test(tcase, sync_fails);
    tcase_add_test(tcase, file_system_without_permissions);
    tcase_add_test(tcase, acl_of_the_replaced_file);
    tcase_add_test(tcase, default_acl_of_the_folder);
    tcase_add_test(tcase, acl_of_a_file_that_is_missing);
    tcase_add_test(tcase, page_could_not_be_written);
    tcase_add_test(tcase, folder_sync);
    tcase_add_test(tcase, no_memory);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
