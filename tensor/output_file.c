// SPDX-License-Identifier: Apache-2.0
/*
 * A file that is written in place.
 *
 * Happy path: create it under a name that no other file has, allocate its disk space, map it, close the descriptor (a
 * folder of thousands of files must not need thousands of descriptors), give the space back when all files have theirs,
 * let others write into the mapping, sync.
 *
 * The space is allocated only to see whether it is there: writing through a mapping into space that was allocated but
 * never written costs two to three times as much as into a hole (ext4).
 *
 * Failure modes: a disk that is full shows when the space is allocated, before anything is written. When the disk
 * becomes full later, or fails, the fault guard takes the write, and check and sync report it.
 */
#include "tensor/output_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"
#include "base/file_size.h"
#include "tensor/fault_guard.h"

/* The extended attribute that has a file's POSIX ACL, and the longest value that any may have. */
#define ACL_NAME "system.posix_acl_access"
#define MAX_ACL_BYTES 65536

struct tl_output_file {
    atomic_uint reference_count;
    char *path;
    void *data;
    uint64_t len_bytes;
    bool is_allocated; /* and never written: space to give back */
    bool is_replacing; /* a file whose owner, group and permissions these are: */
    uid_t owner;
    gid_t group;
    mode_t mode;     /* at the end, also when no file is replaced */
    bool is_widened; /* the user got permissions for a while that mode may lack */
    void *acl;       /* [acl_bytes]; NULL: none */
    size_t acl_bytes;
    struct tl_fault_range *range;
};

static void destroy(struct tl_output_file *file)
{
    tl_fault_range_remove(file->range);
    if (file->data) munmap(file->data, file->len_bytes);
    free(file->acl);
    free(file->path);
    free(file);
}

enum tl_status tl_replaced_file_read_acl(struct tl_replaced_file *replaced, const char *path,
                                         struct tl_error *ret_error)
{
    unsigned char acl[MAX_ACL_BYTES];
    ssize_t len = getxattr(path, ACL_NAME, acl, sizeof(acl));
    if (len < 0 && (errno == ENODATA || errno == EOPNOTSUPP)) return TL_OK;
    if (len < 0) return tl_error_set_errno(ret_error, errno, "cannot read the ACL of %s", path);
    replaced->acl_bytes = (size_t)len;
    replaced->acl = malloc(replaced->acl_bytes);
    if (!replaced->acl) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the ACL of %s", path);
    memcpy(replaced->acl, acl, replaced->acl_bytes);
    return TL_OK;
}

void tl_replaced_file_fini(struct tl_replaced_file *replaced)
{
    free(replaced->acl);
    replaced->acl = NULL;
}

/* For file systems that cannot allocate without writing. Returns an errno. */
static int write_zeros(int fd, uint64_t len_bytes)
{
    static const char zeros[64 * 1024];
    struct statvfs info;
    /* Better to know now than after the disk has been filled. */
    if (fstatvfs(fd, &info) == 0 && info.f_frsize > 0 && len_bytes / info.f_frsize > info.f_bavail) return ENOSPC;
    for (uint64_t offset = 0; offset < len_bytes;) {
        ssize_t written = pwrite(fd, zeros, tl_min_u64(sizeof(zeros), len_bytes - offset), (off_t)offset);
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return errno;
        offset += (uint64_t)written;
    }
    return 0;
}

/* Makes sure that the disk has enough space, and sizes the file. Returns an errno. */
static int allocate(struct tl_output_file *file, int fd)
{
    uint64_t len_bytes = file->len_bytes;
    if (!tl_file_size_is_allowed(len_bytes)) return errno;
    do {
        file->is_allocated = fallocate(fd, 0, 0, (off_t)len_bytes) == 0;
    } while (!file->is_allocated && errno == EINTR);
    if (file->is_allocated) return 0;
    return errno == EOPNOTSUPP || errno == ENOSYS ? write_zeros(fd, len_bytes) : errno;
}

static enum tl_status allocate_and_map(struct tl_output_file *file, int fd, struct tl_error *ret_error)
{
    int error_number = allocate(file, fd);
    if (error_number != 0)
        return tl_error_set_errno(ret_error, error_number, "cannot allocate %" PRIu64 " bytes of disk space for %s",
                                  file->len_bytes, file->path);
    void *data = mmap(NULL, file->len_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED)
        return tl_error_set_errno(ret_error, errno, "cannot map the %" PRIu64 " bytes of %s", file->len_bytes,
                                  file->path);
    file->data = data;
    return tl_fault_range_add(data, file->len_bytes, PROT_READ | PROT_WRITE, true, &file->range, ret_error);
}

/* The umask may take the user's own permissions away, which are needed until the file is synced. Where they cannot be
 * set, opening the file again shows whether they matter. */
static void let_user_open(struct tl_output_file *file, int fd)
{
    struct stat info;
    if (fstat(fd, &info) != 0) return;
    mode_t mode = info.st_mode & (S_IRWXU | S_IRWXG | S_IRWXO);
    if (!file->is_replacing) file->mode = mode;
    if ((mode & (S_IRUSR | S_IWUSR)) != (S_IRUSR | S_IWUSR))
        file->is_widened = fchmod(fd, mode | S_IRUSR | S_IWUSR) == 0;
}

enum tl_status tl_output_file_create(const char *path, uint64_t len_bytes, const struct tl_replaced_file *replaced,
                                     struct tl_output_file **ret_file, struct tl_error *ret_error)
{
    TL_CHECK(len_bytes > 0);
    if (len_bytes > INT64_MAX)
        return tl_error_set_errno(ret_error, EFBIG, "cannot create %s of %" PRIu64 " bytes", path, len_bytes);
    struct tl_output_file *file = calloc(1, sizeof(*file));
    if (file) file->path = strdup(path);
    if (file && replaced && replaced->acl) file->acl = malloc(replaced->acl_bytes);
    if (!file || !file->path || (replaced && replaced->acl && !file->acl)) {
        if (file) destroy(file);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to create %s", path);
    }
    atomic_init(&file->reference_count, 1);
    file->len_bytes = len_bytes;
    if (replaced) {
        file->is_replacing = true;
        file->owner = replaced->info.st_uid;
        file->group = replaced->info.st_gid;
        file->mode = replaced->info.st_mode & (S_IRWXU | S_IRWXG | S_IRWXO);
        file->acl_bytes = replaced->acl_bytes;
        if (file->acl) memcpy(file->acl, replaced->acl, file->acl_bytes);
    }
    /* The file that is replaced may be private, so that only the user can open the new one until it is complete. */
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, replaced ? 0600 : 0666);
    if (fd < 0) {
        enum tl_status status = tl_error_set_errno(ret_error, errno, "cannot create %s", path);
        destroy(file);
        return status;
    }
    let_user_open(file, fd);
    enum tl_status status = allocate_and_map(file, fd, ret_error);
    close(fd);
    if (status != TL_OK) {
        unlink(path);
        destroy(file);
        return status;
    }
    *ret_file = file;
    return TL_OK;
}

enum tl_status tl_output_file_give_back_space(struct tl_output_file *file, struct tl_error *ret_error)
{
    if (!file->is_allocated) return TL_OK;
    int error_number = 0;
    int fd = open(file->path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    /* What is left is a file of the same size that is one hole. */
    if (fd < 0 || ftruncate(fd, 0) != 0 || ftruncate(fd, (off_t)file->len_bytes) != 0) error_number = errno;
    if (fd >= 0) close(fd);
    if (error_number != 0) return tl_error_set_errno(ret_error, error_number, "cannot empty %s", file->path);
    file->is_allocated = false;
    return TL_OK;
}

struct tl_output_file *tl_output_file_get(struct tl_output_file *file)
{
    TL_CHECK(atomic_fetch_add_explicit(&file->reference_count, 1, memory_order_relaxed) > 0);
    return file;
}

void tl_output_file_put(struct tl_output_file *file)
{
    if (!file) return;
    unsigned before = atomic_fetch_sub_explicit(&file->reference_count, 1, memory_order_acq_rel);
    TL_CHECK(before > 0);
    if (before == 1) destroy(file);
}

void *tl_output_file_data(const struct tl_output_file *file)
{
    return file->data;
}

uint64_t tl_output_file_len_bytes(const struct tl_output_file *file)
{
    return file->len_bytes;
}

const char *tl_output_file_path(const struct tl_output_file *file)
{
    return file->path;
}

/* Sets the ACL of the file that is replaced. If that file has none, removes the ACL that the new file may have got from
 * a default ACL of its folder. Returns false when the ACL cannot be set or removed. */
static bool take_over_acl(const struct tl_output_file *file, int fd)
{
    if (file->acl) return fsetxattr(fd, ACL_NAME, file->acl, file->acl_bytes, 0) == 0;
    return fremovexattr(fd, ACL_NAME) == 0 || errno == ENODATA || errno == EOPNOTSUPP;
}

/* Gives the file the owner, group and permissions of the one that it replaces. Without the right to change the owner
 * the permissions stay; without the right to change the group, its own group gets none. If it then cannot have the same
 * ACL, only the owner gets permissions: an ACL may deny a user what the group and others may do. File systems without
 * permissions (vfat, some of FUSE) refuse to set them: then those that the file has are good enough unless they grant
 * more. Returns an errno. */
static int take_over_mode(const struct tl_output_file *file, int fd)
{
    struct stat info;
    mode_t mode = file->mode;
    if (fstat(fd, &info) != 0) return errno;
    bool has_group = fchown(fd, file->owner, file->group) == 0 || fchown(fd, (uid_t)-1, file->group) == 0 ||
                     info.st_gid == file->group;
    if (!has_group) mode &= ~(mode_t)S_IRWXG;
    /* An ACL takes effect as soon as it is set, and would grant to another group what it grants to that of the old
     * file. */
    bool has_acl = (has_group || !file->acl) && take_over_acl(file, fd);
    if (!has_acl) mode &= S_IRWXU;
    if (fchmod(fd, mode) == 0) return 0;
    int error_number = errno;
    bool cannot_set = error_number == EPERM || error_number == ENOSYS || error_number == EOPNOTSUPP;
    bool grants_more = (info.st_mode & (S_IRWXU | S_IRWXG | S_IRWXO) & ~mode) != 0;
    return cannot_set && !grants_more ? 0 : error_number;
}

enum tl_status tl_output_file_check(const struct tl_output_file *file, struct tl_error *ret_error)
{
    if (!tl_fault_range_is_damaged(file->range)) return TL_OK;
    return tl_error_set(ret_error, TL_DATA_LOSS, "a part of %s could not be written; has its disk become full?",
                        file->path);
}

static int sync_and_close(int fd)
{
    int error_number = fsync(fd) == 0 ? 0 : errno;
    close(fd);
    return error_number;
}

enum tl_status tl_output_file_sync(const struct tl_output_file *file, struct tl_error *ret_error)
{
    int error_number = 0;
    int fd = open(file->path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0 || msync(file->data, file->len_bytes, MS_SYNC) != 0) error_number = errno;
    if (error_number == 0 && file->is_replacing) {
        error_number = take_over_mode(file, fd);
    } else if (error_number == 0 && file->is_widened && fchmod(fd, file->mode) != 0) {
        error_number = errno;
    }
    int sync_error = fd < 0 ? 0 : sync_and_close(fd);
    if (error_number == 0) error_number = sync_error;
    if (error_number != 0) return tl_error_set_errno(ret_error, error_number, "cannot sync %s", file->path);
    return tl_output_file_check(file, ret_error);
}

enum tl_status tl_folder_sync(const char *path, struct tl_error *ret_error)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECTORY);
    int error_number = fd < 0 ? errno : sync_and_close(fd);
    /* EINVAL: a file system whose folders cannot be synced. */
    if (error_number == 0 || error_number == EINVAL) return TL_OK;
    return tl_error_set_errno(ret_error, error_number, "cannot sync the folder %s", path);
}
