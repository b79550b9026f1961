// SPDX-License-Identifier: Apache-2.0
/*
 * Maps memory for registration.
 *
 * Huge pages that the administrator has reserved are tried first, then transparent huge pages, then small pages. The
 * NUMA node is a wish: a node that is full, or a container that forbids to choose one, is no error.
 */
#include "dataplane/memory/pages.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/mempolicy.h>
#include <linux/mman.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"
#include "base/log.h"

/* Headers of older systems lack it. */
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define HUGE_PAGE_BYTES (UINT64_C(2) << 20)

static void *map(uint64_t len_bytes, int flags)
{
    return mmap(NULL, len_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
}

/* Maps memory that begins at a huge page, so that transparent huge pages fit: maps more, and unmaps what lies before
 * and behind. */
static void *map_aligned(uint64_t len_bytes)
{
    uint64_t whole_bytes;
    if (!tl_add_u64(len_bytes, HUGE_PAGE_BYTES, &whole_bytes)) return MAP_FAILED;
    char *whole = map(whole_bytes, 0);
    if (whole == MAP_FAILED) return MAP_FAILED;
    uint64_t head_bytes = -(uintptr_t)whole & (HUGE_PAGE_BYTES - 1);
    uint64_t tail_bytes = HUGE_PAGE_BYTES - head_bytes;
    if (head_bytes > 0) munmap(whole, head_bytes);
    munmap(whole + head_bytes + len_bytes, tail_bytes);
    (void)madvise(whole + head_bytes, len_bytes, MADV_HUGEPAGE);
    return whole + head_bytes;
}

static void prefer_node(void *address, uint64_t len_bytes, int numa_node)
{
    unsigned long nodes[16] = {0};
    const unsigned word_bits = sizeof(nodes[0]) * CHAR_BIT;
    if (numa_node < 0 || (unsigned)numa_node >= TL_ARRAY_COUNT(nodes) * word_bits) return;
    nodes[(unsigned)numa_node / word_bits] = 1ul << (unsigned)numa_node % word_bits;
    /* The kernel reads one bit less than this number. */
    (void)syscall(SYS_mbind, address, len_bytes, MPOL_PREFERRED, nodes, sizeof(nodes) * CHAR_BIT + 1, 0);
}

/* Maps huge pages that the administrator has reserved, if there are any. They are populated at once: a container may be
 * allowed to map them and not to touch them, and touching them later would end in a signal. */
static void *map_reserved(uint64_t len_bytes, int numa_node)
{
    void *address = map(len_bytes, MAP_HUGETLB | MAP_HUGE_2MB);
    if (address == MAP_FAILED) return address;
    prefer_node(address, len_bytes, numa_node);
    if (madvise(address, len_bytes, MADV_POPULATE_WRITE) == 0) return address;
    munmap(address, len_bytes);
    return MAP_FAILED;
}

enum tl_status tl_pages_map(uint64_t len_bytes, int numa_node, void **ret_address, struct tl_error *ret_error)
{
    void *address = MAP_FAILED;
    TL_CHECK(len_bytes > 0 && len_bytes % TL_PAGE_BYTES == 0);
    if (len_bytes % HUGE_PAGE_BYTES == 0) address = map_reserved(len_bytes, numa_node);
    if (address == MAP_FAILED) {
        address = len_bytes < HUGE_PAGE_BYTES ? map(len_bytes, 0) : map_aligned(len_bytes);
        if (address != MAP_FAILED) prefer_node(address, len_bytes, numa_node);
    }
    if (address == MAP_FAILED)
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "cannot map %" PRIu64 " bytes of memory: %s", len_bytes,
                            strerror(errno));
    *ret_address = address;
    return TL_OK;
}

void tl_pages_unmap(void *address, uint64_t len_bytes)
{
    if (munmap(address, len_bytes) == 0) return;
    /* The kernel needs one mapping more to unmap the middle of one. */
    TL_CHECK(errno == ENOMEM);
    TL_LOG_AT_WARN("memory cannot be given back to the system", TL_U64("bytes", len_bytes),
                   TL_STR("remedy", "raise vm.max_map_count"));
}
