// SPDX-License-Identifier: Apache-2.0
/*
 * Shared memory: memfds that cannot be made smaller, so that a mapping of them does not fault.
 *
 * Huge pages that the administrator has reserved are tried first, transparent ones second. Memory that a peer has
 * passed is mapped only if it is sealed and as large as the peer says; we then add a seal that keeps its pages.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <linux/memfd.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"
#include "base/thread.h"
#include "dataplane/local/local_internal.h"
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
/* The huge pages of a peer's memory of at most this size are allocated when it is mapped; those of larger segments are
 * allocated when they are written. */
#define MAX_HUGE_MAP_BYTES (UINT64_C(32) << 20)
#define SIZE_SEALS (F_SEAL_SHRINK | F_SEAL_GROW)
/* The most threads of one provider that get pages at a time. */
#define MAX_POPULATERS 2

/* ------------------------------------------------------------------------------------------------------ memory -- */

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
    bool is_right = ftruncate(fd, (off_t)len_bytes) == 0 && fcntl(fd, F_ADD_SEALS, SIZE_SEALS) == 0;
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

enum tl_status local_memory_make(const char *name, uint64_t len_bytes, enum local_pages pages, int *ret_fd,
                                 void **ret_address, struct tl_error *ret_error)
{
    int fd = -1;
    TL_CHECK(len_bytes > 0 && len_bytes % TL_PAGE_BYTES == 0);
    if (pages == LOCAL_PAGES_HUGE && len_bytes % HUGE_PAGE_BYTES == 0) {
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
        if (fd >= 0 && pages == LOCAL_PAGES_HUGE) (void)madvise(*ret_address, len_bytes, MADV_HUGEPAGE);
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

enum tl_status local_memory_map(int fd, uint64_t len_bytes, void **ret_address, struct tl_error *ret_error)
{
    struct stat stat;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & SIZE_SEALS) != SIZE_SEALS) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "memory that is not sealed");
    }
    if (fstat(fd, &stat) != 0 || stat.st_size < 0 || (uint64_t)stat.st_size != len_bytes || len_bytes == 0) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "memory of another size than it says");
    }
    void *address = map(fd, len_bytes);
    if (address != MAP_FAILED && !keep_pages(fd)) {
        tl_pages_unmap(address, len_bytes);
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "memory that cannot be sealed");
    }
    if (address != MAP_FAILED && len_bytes <= MAX_HUGE_MAP_BYTES && is_reserved(fd) &&
        madvise(address, len_bytes, MADV_POPULATE_WRITE) != 0) {
        int error = errno;
        tl_pages_unmap(address, len_bytes);
        address = MAP_FAILED;
        errno = error;
    }
    if (address == MAP_FAILED) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "cannot map %" PRIu64 " bytes of a peer: %s", len_bytes,
                            strerror(errno));
    }
    (void)madvise(address, len_bytes, MADV_HUGEPAGE);
    *ret_address = address;
    return TL_OK;
}

/* ----------------------------------------------------------------------------------------------------- regions -- */

static enum tl_status make_region(struct tl_provider *provider, void *address, uint64_t len_bytes,
                                  enum tl_region_access access, int fd, struct tl_region **ret_region,
                                  struct tl_error *ret_error)
{
    struct local_provider *local = local_provider_of(provider);
    struct local_region *region = calloc(1, sizeof(*region));
    if (region == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a region");
    region->base =
        (struct tl_region){.provider = provider, .address = address, .len_bytes = len_bytes, .access = access};
    region->is_segment = fd >= 0;
    region->fd = fd;
    region->number = atomic_fetch_add_explicit(&local->last_region, 1, memory_order_relaxed) + 1;
    tl_list_init(&region->link);
    *ret_region = &region->base;
    return TL_OK;
}

enum tl_status local_region_create(struct tl_provider *provider, void *address, uint64_t len_bytes,
                                   enum tl_region_access access, struct tl_region **ret_region,
                                   struct tl_error *ret_error)
{
    if (address == NULL || len_bytes == 0) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: no memory to register", provider->name);
    }
    return make_region(provider, address, len_bytes, access, -1, ret_region, ret_error);
}

/* Gets the pages of a segment, from its end. The peer gets those that it is about to write, from the start, so that two
 * processors share work that takes longer than the copy. When no pages can be had, the peer notices that before it
 * writes, and its tensors take another path. To ask for reading is enough, as in have_pages of local_send.c. */
static void *populate(void *argument)
{
    struct local_region *region = argument;
    char *address = region->base.address;
    for (uint64_t left_bytes = region->base.len_bytes; left_bytes > 0;) {
        uint64_t len_bytes = tl_min_u64(LOCAL_CHUNK_BYTES, left_bytes);
        left_bytes -= len_bytes;
        if (atomic_load_explicit(&region->must_stop, memory_order_relaxed)) break;
        if (madvise(address + left_bytes, len_bytes, MADV_POPULATE_READ) != 0) break;
    }
    atomic_fetch_sub_explicit(&local_provider_of(region->base.provider)->populaters, 1, memory_order_relaxed);
    return NULL;
}

/* Gets the pages in a thread, or before it returns if no thread can be started. */
static void start_populating(struct local_region *region)
{
    struct tl_error error;
    struct local_provider *local = local_provider_of(region->base.provider);
    unsigned before = atomic_fetch_add_explicit(&local->populaters, 1, memory_order_relaxed);
    region->has_populater =
        before < MAX_POPULATERS && tl_thread_start("tl-pages", populate, region, &region->populater, &error) == TL_OK;
    if (!region->has_populater) (void)populate(region);
}

enum tl_status local_region_map(struct tl_provider *provider, uint64_t len_bytes, struct tl_region **ret_region,
                                struct tl_error *ret_error)
{
    int fd = -1;
    void *address = NULL;
    enum tl_status status =
        local_memory_make("tensorlane-segment", len_bytes, LOCAL_PAGES_HUGE, &fd, &address, ret_error);
    if (status != TL_OK) return status;
    status = make_region(provider, address, len_bytes, TL_REGION_WRITE, fd, ret_region, ret_error);
    if (status != TL_OK) {
        tl_pages_unmap(address, len_bytes);
        close(fd);
        return status;
    }
    if (len_bytes > TL_LOCAL_LAZY_BYTES) start_populating((struct local_region *)*ret_region);
    return TL_OK;
}

void local_region_destroy(struct tl_region *base)
{
    struct local_region *region = (struct local_region *)base;
    struct local_provider *provider = local_provider_of(base->provider);
    atomic_store_explicit(&region->must_stop, true, memory_order_relaxed);
    if (region->has_populater) TL_CHECK(pthread_join(region->populater, NULL) == 0);
    if (!region->is_segment) {
        free(region);
        return;
    }
    /* The peer keeps its mapping until the reactor reports that the region is gone. The reactor also closes the
     * segment. */
    const uint64_t one = 1;
    TL_CHECK(pthread_mutex_lock(&provider->mutex) == 0);
    bool is_first = tl_list_is_empty(&provider->gone);
    tl_list_push_back(&provider->gone, &region->link);
    atomic_store_explicit(&provider->has_gone, true, memory_order_release);
    if (is_first) (void)!write(provider->gone_fd, &one, sizeof(one));
    TL_CHECK(pthread_mutex_unlock(&provider->mutex) == 0);
}

/* ------------------------------------------------------------------------------------------------------- rings -- */

static uint64_t slots_at(void)
{
    _Static_assert(sizeof(struct local_ring_head) <= TL_PAGE_BYTES, "a page in front of the slots");
    return TL_PAGE_BYTES;
}

bool local_ring_is_count(uint32_t slot_count)
{
    return slot_count >= LOCAL_MIN_RING_SLOTS && slot_count <= LOCAL_MAX_RING_SLOTS &&
           (slot_count & (slot_count - 1)) == 0;
}

uint64_t local_ring_bytes(uint32_t slot_count)
{
    uint64_t bytes = slots_at() + slot_count * (uint64_t)sizeof(struct local_slot);
    return (bytes + TL_PAGE_BYTES - 1) / TL_PAGE_BYTES * TL_PAGE_BYTES;
}

void local_ring_place(struct local_ring *ring, void *address, uint32_t slot_count)
{
    *ring = (struct local_ring){.head = address,
                                .slots = (struct local_slot *)(void *)((char *)address + slots_at()),
                                .slot_count = slot_count,
                                .len_bytes = local_ring_bytes(slot_count)};
}

void local_ring_unmap(struct local_ring *ring)
{
    if (ring->head == NULL) return;
    tl_pages_unmap(ring->head, ring->len_bytes);
    ring->head = NULL;
}
