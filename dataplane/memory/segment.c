// SPDX-License-Identifier: Apache-2.0
/*
 * Segments. Huge pages that the administrator has reserved are tried first, transparent ones second. Memory of another
 * process is mapped only if it is sealed and as large as that process says; we then add a seal that keeps its pages.
 */
#include "dataplane/memory/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <linux/memfd.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"
#include "base/file_size.h"
#include "dataplane/memory/pages.h"

/* Headers of older systems lack these macros. */
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

#define HUGE_PAGE_BYTES (UINT64_C(2) << 20)
/* The huge pages of a segment of at most this size are allocated when it is mapped; those of larger ones are allocated
 * when they are written. */
#define MAX_HUGE_MAP_BYTES (UINT64_C(32) << 20)
#define SIZE_SEALS (F_SEAL_SHRINK | F_SEAL_GROW)

static int make_memfd(const char *name, unsigned flags)
{
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL | flags);
    /* Kernels before 6.3 do not know MFD_NOEXEC_SEAL. */
    if (fd < 0 && errno == EINVAL) fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | flags);
    return fd;
}

static void *map(int fd, uint64_t len_bytes)
{
    return mmap(NULL, len_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
}

/* Makes memory of this size. Returns its descriptor; -1 with errno when it is not possible. */
static int make_sized(const char *name, uint64_t len_bytes, unsigned flags, void **ret_address)
{
    int fd = make_memfd(name, flags);
    if (fd < 0) return -1;
    bool is_right = tl_file_size_is_allowed(len_bytes) && ftruncate(fd, (off_t)len_bytes) == 0 &&
                    fcntl(fd, F_ADD_SEALS, SIZE_SEALS) == 0;
    void *address = is_right ? map(fd, len_bytes) : MAP_FAILED;
    if (address != MAP_FAILED) {
        *ret_address = address;
        return fd;
    }
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

enum tl_status tl_segment_make(const char *name, uint64_t len_bytes, enum tl_segment_pages pages, int *ret_fd,
                               void **ret_address, struct tl_error *ret_error)
{
    int fd = -1;
    TL_CHECK(len_bytes > 0 && len_bytes % TL_PAGE_BYTES == 0);
    if (pages == TL_SEGMENT_HUGE_PAGES && len_bytes % HUGE_PAGE_BYTES == 0) {
        fd = make_sized(name, len_bytes, MFD_HUGETLB | MFD_HUGE_2MB, ret_address);
    }
    /* A container may be allowed to map reserved pages but not to touch them: that would raise a signal. */
    if (fd >= 0 && madvise(*ret_address, len_bytes, MADV_POPULATE_WRITE) != 0) {
        tl_pages_unmap(*ret_address, len_bytes);
        close(fd);
        fd = -1;
    }
    if (fd < 0) {
        fd = make_sized(name, len_bytes, 0, ret_address);
        if (fd >= 0 && pages == TL_SEGMENT_HUGE_PAGES) (void)madvise(*ret_address, len_bytes, MADV_HUGEPAGE);
    }
    if (fd < 0) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "cannot make %" PRIu64 " bytes of shared memory: %s%s",
                            len_bytes, strerror(errno),
                            errno == EMFILE ? "; raise the limit of open files (ulimit -n)" : "");
    }
    *ret_fd = fd;
    return TL_OK;
}

static bool is_reserved(int fd)
{
    struct statfs system;
    return fstatfs(fd, &system) == 0 && system.f_type == HUGETLBFS_MAGIC;
}

/* Seals the memory that both sides have mapped, so that no process can punch holes into it. Kernels before 5.1 do not
 * know this seal. */
static bool keep_pages(int fd)
{
    return fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) == 0 || errno == EINVAL ||
           (fcntl(fd, F_GET_SEALS) & F_SEAL_FUTURE_WRITE) != 0;
}

enum tl_status tl_segment_map(int fd, uint64_t len_bytes, void **ret_address, struct tl_error *ret_error)
{
    struct stat stat;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & SIZE_SEALS) != SIZE_SEALS) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a segment that is not sealed");
    }
    if (fstat(fd, &stat) != 0 || stat.st_size < 0 || (uint64_t)stat.st_size != len_bytes || len_bytes == 0) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a segment whose size is not the announced one");
    }
    void *address = map(fd, len_bytes);
    if (address != MAP_FAILED && !keep_pages(fd)) {
        tl_pages_unmap(address, len_bytes);
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a segment that cannot be sealed");
    }
    if (address != MAP_FAILED && len_bytes <= MAX_HUGE_MAP_BYTES && is_reserved(fd) &&
        madvise(address, len_bytes, MADV_POPULATE_WRITE) != 0) {
        int error = errno;
        tl_pages_unmap(address, len_bytes);
        address = MAP_FAILED;
        errno = error;
    }
    if (address == MAP_FAILED) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "cannot map %" PRIu64 " bytes of a peer: %s%s", len_bytes,
                            strerror(errno),
                            errno == ENOMEM ? "; raise vm.max_map_count, or the limit of memory (ulimit -v)" : "");
    }
    (void)madvise(address, len_bytes, MADV_HUGEPAGE);
    *ret_address = address;
    return TL_OK;
}

bool tl_segment_populate(void *address, uint64_t len_bytes)
{
    return madvise(address, len_bytes, MADV_POPULATE_READ) == 0;
}

void tl_segment_populate_from_end(void *address, uint64_t len_bytes, const atomic_bool *must_stop)
{
    while (len_bytes > 0 && !atomic_load_explicit(must_stop, memory_order_relaxed)) {
        uint64_t chunk_bytes = tl_min_u64(TL_SEGMENT_CHUNK_BYTES, len_bytes);
        len_bytes -= chunk_bytes;
        if (!tl_segment_populate((char *)address + len_bytes, chunk_bytes)) return;
    }
}
