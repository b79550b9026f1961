// SPDX-License-Identifier: Apache-2.0
/* Anonymous memory for registration: zeroed pages, huge pages where there are any, on a NUMA node. */
#ifndef DATAPLANE_MEMORY_PAGES_H
#define DATAPLANE_MEMORY_PAGES_H

#include <stdint.h>

#include <tensorlane/status.h>

#define TL_PAGE_BYTES UINT64_C(4096)

/* Maps len_bytes, a multiple of TL_PAGE_BYTES and not 0. numa_node is preferred, not required; -1: any. Errors:
 * TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_pages_map(uint64_t len_bytes, int numa_node, void **ret_address,
                            struct tl_error *ret_error) TL_MUST_USE;
void tl_pages_unmap(void *address, uint64_t len_bytes);

#endif
