// SPDX-License-Identifier: Apache-2.0
/* Segments: memory that several processes share. A segment is a memfd that is sealed against shrinking and growing, so
 * that using a mapping of it never raises a signal. */
#ifndef DATAPLANE_MEMORY_SEGMENT_H
#define DATAPLANE_MEMORY_SEGMENT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <tensorlane/status.h>

enum tl_segment_pages {
    TL_SEGMENT_SMALL_PAGES,
    TL_SEGMENT_HUGE_PAGES, /* reserved huge pages while any are free; otherwise transparent ones */
};

/* Makes a segment of len_bytes, a multiple of TL_PAGE_BYTES and not 0. Errors: TL_RESOURCE_EXHAUSTED. Ownership: the
 * descriptor and the mapping belong to the caller, which unmaps with tl_pages_unmap. */
enum tl_status tl_segment_make(const char *name, uint64_t len_bytes, enum tl_segment_pages pages, int *ret_fd,
                               void **ret_address, struct tl_error *ret_error) TL_MUST_USE;

/* Maps a segment that another process has made. Errors: TL_INVALID_ARGUMENT: the memory is not sealed, or its size
 * differs. TL_RESOURCE_EXHAUSTED. Ownership: fd stays the caller's, which unmaps with tl_pages_unmap. */
enum tl_status tl_segment_map(int fd, uint64_t len_bytes, void **ret_address, struct tl_error *ret_error) TL_MUST_USE;

/* The pages of a large segment are got in chunks of this size, at multiples of it: as much as a huge page. */
#define TL_SEGMENT_CHUNK_BYTES (UINT64_C(2) << 20)

/* Gets the pages of at most TL_SEGMENT_CHUNK_BYTES of a segment, because writing to a page that cannot be had raises a
 * signal. To ask for reading is enough: it allocates pages of shared memory, and maps existing ones 16 at a time and
 * writable, in a quarter of the time that asking for writing takes. Returns false with errno when there are no pages.
 * Thread: any. */
bool tl_segment_populate(void *address, uint64_t len_bytes);

/* Gets all pages of a segment, from its end, until *must_stop is set or there are no more. Thread: any. */
void tl_segment_populate_from_end(void *address, uint64_t len_bytes, const atomic_bool *must_stop);

#endif
