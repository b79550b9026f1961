// SPDX-License-Identifier: Apache-2.0
/*
 * A file mapped read-only, shared by the tensors that lie in it and unmapped when the last of them is gone.
 *
 * A file that was made here is memory without a name: writable through the mapping that was there before it was sealed.
 *
 * The descriptor stays open, so that a check is one fstat of the very file that is mapped, whatever its name means by
 * then: a file that is replaced by rename goes on being served as it was.
 */
#include "tensor/mapped_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"
#include "base/file_size.h"
#include "tensor/fault_guard.h"

struct tl_mapped_file {
    atomic_uint reference_count;
    uint64_t id;
    int fd;
    char *path;
    void *data; /* NULL: an empty file */
    struct tl_file_stamp stamp;
    bool is_memory; /* it cannot shrink, and its times say nothing */
    bool is_own;    /* it belongs to the user of this process */
    struct tl_fault_range *range;
};

static void destroy(struct tl_mapped_file *file)
{
    tl_fault_range_remove(file->range);
    if (file->data) munmap(file->data, file->stamp.size_bytes);
    if (file->fd >= 0) close(file->fd);
    free(file->path);
    free(file);
}

static bool is_same_time(const struct tl_file_stamp *a, const struct tl_file_stamp *b)
{
    return a->modified_seconds == b->modified_seconds && a->modified_ns == b->modified_ns;
}

static struct tl_file_stamp stamp_of(const struct stat *info)
{
    return (struct tl_file_stamp){.size_bytes = (uint64_t)info->st_size,
                                  .modified_seconds = info->st_mtim.tv_sec,
                                  .modified_ns = (uint32_t)info->st_mtim.tv_nsec};
}

/* One reference, and nothing mapped yet; takes over the descriptor, if there is one, also on error. */
static enum tl_status create(int fd, const char *path, struct tl_mapped_file **ret_file, struct tl_error *ret_error)
{
    static atomic_uint_least64_t last_id;
    struct tl_mapped_file *file = calloc(1, sizeof(*file));
    if (file) file->path = strdup(path);
    if (!file || !file->path) {
        free(file);
        if (fd >= 0) close(fd);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to open %s", path);
    }
    atomic_init(&file->reference_count, 1);
    file->id = atomic_fetch_add_explicit(&last_id, 1, memory_order_relaxed) + 1;
    file->fd = fd;
    *ret_file = file;
    return TL_OK;
}

static enum tl_status look(struct tl_mapped_file *file, struct tl_error *ret_error)
{
    struct stat info;
    if (file->fd < 0 && errno == EMFILE) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                            "cannot open %s: this process has as many files open as it may; raise the limit (ulimit -n,"
                            " LimitNOFILE=) or put the tensors into fewer files",
                            file->path);
    }
    if (file->fd < 0 || fstat(file->fd, &info) != 0)
        return tl_error_set_errno(ret_error, errno, "cannot open %s", file->path);
    if (!S_ISREG(info.st_mode))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s is not a regular file", file->path);
    file->stamp = stamp_of(&info);
    file->is_own = info.st_uid == geteuid();
    int seals = fcntl(file->fd, F_GET_SEALS);
    file->is_memory = seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
    return TL_OK;
}

static bool is_as_it_was(const struct tl_mapped_file *file, const struct tl_file_stamp *stamp)
{
    return file->stamp.size_bytes == stamp->size_bytes && (file->is_memory || is_same_time(&file->stamp, stamp));
}

static enum tl_status map(struct tl_mapped_file *file, struct tl_error *ret_error)
{
    if (file->stamp.size_bytes == 0) return TL_OK;
    void *data = mmap(NULL, file->stamp.size_bytes, PROT_READ, MAP_SHARED, file->fd, 0);
    if (data == MAP_FAILED) return tl_error_set_errno(ret_error, errno, "cannot map %s", file->path);
    file->data = data;
    return tl_fault_range_add(data, file->stamp.size_bytes, PROT_READ, file->is_own, &file->range, ret_error);
}

enum tl_status tl_mapped_file_open(const char *path, struct tl_mapped_file **ret_file, struct tl_error *ret_error)
{
    struct tl_mapped_file *file;
    enum tl_status status = create(-1, path, &file, ret_error);
    if (status != TL_OK) return status;
    /* Without O_NONBLOCK opening a FIFO would wait for its writer. */
    file->fd = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    status = look(file, ret_error);
    if (status == TL_OK) status = map(file, ret_error);
    if (status != TL_OK) {
        destroy(file);
        return status;
    }
    *ret_file = file;
    return TL_OK;
}

enum tl_status tl_mapped_file_adopt(int fd, const struct tl_file_stamp *stamp, const char *name,
                                    struct tl_mapped_file **ret_file, struct tl_error *ret_error)
{
    struct tl_mapped_file *file;
    enum tl_status status = create(fd, name, &file, ret_error);
    if (status != TL_OK) return status;
    status = look(file, ret_error);
    if (status == TL_OK && !is_as_it_was(file, stamp))
        status = tl_error_set(ret_error, TL_DATA_LOSS, "%s was modified after it was opened", name);
    if (status == TL_OK) status = map(file, ret_error);
    if (status != TL_OK) {
        destroy(file);
        return status;
    }
    *ret_file = file;
    return TL_OK;
}

enum tl_status tl_mapped_file_make(uint64_t len_bytes, struct tl_mapped_file **ret_file, struct tl_error *ret_error)
{
    static const char name[] = "shared memory";
    struct tl_mapped_file *file;
    int fd = memfd_create("tensorlane-tensor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return tl_error_set_errno(ret_error, errno, "no shared memory");
    enum tl_status status = create(fd, name, &file, ret_error);
    if (status != TL_OK) return status;
    void *data = MAP_FAILED;
    if (tl_file_size_is_allowed(len_bytes) && ftruncate(fd, (off_t)len_bytes) == 0) {
        data = mmap(NULL, len_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    if (data == MAP_FAILED) {
        status = tl_error_set_errno(ret_error, errno, "no %" PRIu64 " bytes of shared memory", len_bytes);
    } else if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0) {
        status = tl_error_set(ret_error, TL_UNIMPLEMENTED, "this kernel cannot seal shared memory (errno %d)", errno);
        munmap(data, len_bytes);
    } else {
        file->data = data;
        file->stamp.size_bytes = len_bytes; /* for destroy, should the next call fail */
        status = look(file, ret_error);
    }
    if (status != TL_OK) {
        destroy(file);
        return status;
    }
    *ret_file = file;
    return TL_OK;
}

bool tl_mapped_file_may_wait(const void *data, uint64_t len_bytes)
{
    return tl_fault_range_may_wait(data, len_bytes);
}

bool tl_mapped_file_is_memory(const struct tl_mapped_file *file)
{
    return file->is_memory;
}

struct tl_mapped_file *tl_mapped_file_get(struct tl_mapped_file *file)
{
    TL_CHECK(atomic_fetch_add_explicit(&file->reference_count, 1, memory_order_relaxed) > 0);
    return file;
}

void tl_mapped_file_put(struct tl_mapped_file *file)
{
    if (!file) return;
    unsigned before = atomic_fetch_sub_explicit(&file->reference_count, 1, memory_order_acq_rel);
    TL_CHECK(before > 0);
    if (before == 1) destroy(file);
}

const void *tl_mapped_file_data(const struct tl_mapped_file *file)
{
    return file->data;
}

uint64_t tl_mapped_file_size_bytes(const struct tl_mapped_file *file)
{
    return file->stamp.size_bytes;
}

const char *tl_mapped_file_path(const struct tl_mapped_file *file)
{
    return file->path;
}

int tl_mapped_file_fd(const struct tl_mapped_file *file)
{
    return file->fd;
}

uint64_t tl_mapped_file_id(const struct tl_mapped_file *file)
{
    return file->id;
}

void tl_mapped_file_get_stamp(const struct tl_mapped_file *file, struct tl_file_stamp *ret_stamp)
{
    *ret_stamp = file->stamp;
}

enum tl_file_at_path tl_mapped_file_look_up(const struct tl_mapped_file *file)
{
    struct stat mapped, named;
    if (fstat(file->fd, &mapped) != 0) return TL_FILE_AT_PATH_SAME;
    if (stat(file->path, &named) != 0) return errno == ENOENT ? TL_FILE_AT_PATH_NONE : TL_FILE_AT_PATH_SAME;
    bool is_same = mapped.st_dev == named.st_dev && mapped.st_ino == named.st_ino;
    return is_same ? TL_FILE_AT_PATH_SAME : TL_FILE_AT_PATH_OTHER;
}

bool tl_mapped_file_is_shared(const struct tl_mapped_file *file)
{
    return atomic_load(&file->reference_count) > 1;
}

static enum tl_status check_stamp(const struct tl_mapped_file *file, struct tl_error *ret_error)
{
    struct stat info;
    if (fstat(file->fd, &info) != 0)
        return tl_error_set(ret_error, TL_DATA_LOSS, "%s cannot be examined any more (errno %d)", file->path, errno);
    struct tl_file_stamp now = stamp_of(&info);
    if (now.size_bytes != file->stamp.size_bytes)
        return tl_error_set(ret_error, TL_DATA_LOSS,
                            "%s had %" PRIu64 " bytes when it was opened and has %" PRIu64
                            " now; publish it again, and replace files by rename",
                            file->path, file->stamp.size_bytes, now.size_bytes);
    if (!is_same_time(&now, &file->stamp))
        return tl_error_set(ret_error, TL_DATA_LOSS,
                            "%s was modified after it was opened; publish it again, and replace files by rename",
                            file->path);
    return TL_OK;
}

enum tl_status tl_mapped_file_check(void *context, const void *data, uint64_t len_bytes, struct tl_error *ret_error)
{
    (void)data;
    (void)len_bytes;
    const struct tl_mapped_file *file = context;
    enum tl_status status = file->is_memory ? TL_OK : check_stamp(file, ret_error);
    if (status == TL_OK && tl_fault_range_is_damaged(file->range))
        status = tl_error_set(ret_error, TL_DATA_LOSS, "a part of %s could not be read", file->path);
    return status;
}

enum tl_status tl_mapped_file_blame(struct tl_mapped_file *file, enum tl_status status, struct tl_error *ret_error)
{
    struct tl_error reason;
    return tl_mapped_file_check(file, NULL, 0, &reason) == TL_OK ? status : tl_error_copy(ret_error, &reason);
}
