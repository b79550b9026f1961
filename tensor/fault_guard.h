// SPDX-License-Identifier: Apache-2.0
/*
 * Mappings of files that may lose their pages: what the SIGBUS handler has to know about them.
 *
 * Between siblings of this folder: mapped files and files that are written register their mappings here. The handler
 * is installed only when a program asks for it; registering costs next to nothing otherwise.
 */
#ifndef TENSOR_FAULT_GUARD_H
#define TENSOR_FAULT_GUARD_H

#include <stdbool.h>
#include <stdint.h>

#include <tensorlane/status.h>

struct tl_fault_range;

/* Registers a mapping of len_bytes > 0; protection is that of mmap. tells_residency: mincore tells the truth about its
 * pages, which it does to the owner of the file only. Thread: any.
 * Errors: TL_RESOURCE_EXHAUSTED: too many mappings. Ownership: until tl_fault_range_remove, before munmap. */
enum tl_status tl_fault_range_add(const void *data, uint64_t len_bytes, int protection, bool tells_residency,
                                  struct tl_fault_range **ret_range, struct tl_error *ret_error) TL_MUST_USE;
void tl_fault_range_remove(struct tl_fault_range *range); /* NULL is accepted */

/* Whether a read of the bytes may have to wait for a file system: they lie in a registered mapping, and not all of
 * their pages are in memory, or that cannot be known. Thread: any. */
bool tl_fault_range_may_wait(const void *data, uint64_t len_bytes);

/* True when a page of the mapping could not be read and was replaced by zeros. NULL is never damaged. */
bool tl_fault_range_is_damaged(const struct tl_fault_range *range);

#endif
