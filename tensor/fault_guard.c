// SPDX-License-Identifier: Apache-2.0
/*
 * The SIGBUS handler and the table that it reads.
 *
 * Happy path: nothing happens. When a read touches a page that the file no longer has, or that the disk cannot deliver,
 * the handler finds the mapping in the table, marks it as damaged, puts a page of zeros there and returns; the read
 * goes on with zeros, and a check of the mapping afterwards finds that it is damaged.
 *
 * Failure modes: a SIGBUS that belongs to no mapping of the table goes to the handler that was there before, or ends
 * the process as if this one did not exist.
 *
 * The table has a fixed place for every mapping, and a place is claimed, filled and cleared with atomic stores only: a
 * signal handler cannot wait.
 */
#include "tensor/fault_guard.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

#include <tensorlane/tensor.h>

#include "base/error.h"

#define MAX_RANGES 16384
#define PAGE_BYTES 4096
#define PAGES_PER_LOOK 2048

struct tl_fault_range {
    atomic_bool is_claimed;
    atomic_bool is_damaged;
    atomic_bool tells_residency;
    atomic_int protection;
    atomic_uintptr_t start; /* 0: not valid; stored last, cleared first */
    atomic_uintptr_t end;   /* first byte behind */
};

static struct tl_fault_range ranges[MAX_RANGES];
static atomic_size_t ranges_used; /* places that have ever been claimed: the handler looks no further */

static uintptr_t page_bytes;
static struct sigaction previous;

enum tl_status tl_fault_range_add(const void *data, uint64_t len_bytes, int protection, bool tells_residency,
                                  struct tl_fault_range **ret_range, struct tl_error *ret_error)
{
    for (size_t i = 0; i < MAX_RANGES; i++) {
        struct tl_fault_range *range = &ranges[i];
        bool expected = false;
        if (atomic_load_explicit(&range->is_claimed, memory_order_relaxed)) continue;
        if (!atomic_compare_exchange_strong(&range->is_claimed, &expected, true)) continue;
        size_t used = atomic_load(&ranges_used);
        while (used < i + 1 && !atomic_compare_exchange_weak(&ranges_used, &used, i + 1)) {
        }
        atomic_store(&range->is_damaged, false);
        atomic_store(&range->protection, protection);
        atomic_store(&range->tells_residency, tells_residency);
        atomic_store(&range->end, (uintptr_t)data + len_bytes);
        atomic_store(&range->start, (uintptr_t)data);
        *ret_range = range;
        return TL_OK;
    }
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "more than %d files are mapped; publish fewer, larger files",
                        MAX_RANGES);
}

void tl_fault_range_remove(struct tl_fault_range *range)
{
    if (!range) return;
    atomic_store(&range->start, 0);
    atomic_store(&range->is_claimed, false);
}

bool tl_fault_range_is_damaged(const struct tl_fault_range *range)
{
    return range && atomic_load(&range->is_damaged);
}

/* The range of the address; NULL when there is none. The thread that faults is using the range, so it cannot go away;
 * the places of others may change meanwhile, which the second look at start finds out. */
static struct tl_fault_range *find(uintptr_t address)
{
    size_t used = atomic_load(&ranges_used);
    for (size_t i = 0; i < used; i++) {
        uintptr_t start = atomic_load(&ranges[i].start);
        uintptr_t end = atomic_load(&ranges[i].end);
        if (start != 0 && address >= start && address < end && atomic_load(&ranges[i].start) == start)
            return &ranges[i];
    }
    return NULL;
}

static bool are_in_memory(uintptr_t first, uintptr_t end)
{
    unsigned char is_there[PAGES_PER_LOOK];
    const uintptr_t look_bytes = sizeof(is_there) * PAGE_BYTES;
    for (uintptr_t at = first - first % PAGE_BYTES; at < end; at += look_bytes) {
        size_t len_bytes = end - at < look_bytes ? end - at : look_bytes;
        if (mincore((void *)at, len_bytes, is_there) != 0) return false;
        for (size_t i = 0; i < (len_bytes + PAGE_BYTES - 1) / PAGE_BYTES; i++) {
            if ((is_there[i] & 1) == 0) return false;
        }
    }
    return true;
}

bool tl_fault_range_may_wait(const void *data, uint64_t len_bytes)
{
    uintptr_t first = (uintptr_t)data;
    const struct tl_fault_range *range = find(first);
    if (range == NULL) return false;
    return !atomic_load(&range->tells_residency) || !are_in_memory(first, first + len_bytes);
}

static bool replace_page(uintptr_t address)
{
    struct tl_fault_range *range = find(address);
    if (!range) return false;
    /* This comes first, so that no thread can see the zeros and an undamaged range. */
    atomic_store(&range->is_damaged, true);
    void *page = (void *)(address - address % page_bytes);
    return mmap(page, page_bytes, atomic_load(&range->protection),
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != MAP_FAILED;
}

/* Passes the signal to the handler that was there before. */
static void pass_on(int number, siginfo_t *info, void *context)
{
    bool was_sent = info->si_code <= 0; /* by kill or sigqueue, not by a failed access */
    if (previous.sa_flags & SA_SIGINFO) {
        previous.sa_sigaction(number, info, context);
        return;
    }
    if (previous.sa_handler == SIG_IGN && was_sent) return;
    if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
        previous.sa_handler(number);
        return;
    }
    /* The default action: a failed access happens again as soon as this handler returns, a sent signal has to be. */
    signal(number, SIG_DFL);
    if (was_sent) raise(number);
}

static void on_sigbus(int number, siginfo_t *info, void *context)
{
    int old_errno = errno;
    bool is_access = info->si_code > 0;
    if (!is_access || !replace_page((uintptr_t)info->si_addr)) pass_on(number, info, context);
    errno = old_errno;
}

enum tl_status tl_guard_mapped_files(struct tl_error *ret_error)
{
    static atomic_bool is_installed;
    struct sigaction action = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART};
    sigemptyset(&action.sa_mask);
    if (atomic_exchange(&is_installed, true)) return TL_OK;
    page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    /* Read first: the handler may run before a sigaction that does both has returned. */
    if (sigaction(SIGBUS, NULL, &previous) != 0 || sigaction(SIGBUS, &action, NULL) != 0) {
        atomic_store(&is_installed, false);
        return tl_error_set(ret_error, TL_INTERNAL, "the SIGBUS handler cannot be installed (errno %d)", errno);
    }
    return TL_OK;
}
