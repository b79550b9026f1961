// SPDX-License-Identifier: Apache-2.0
/*
 * Queue pairs of local providers for tests: two in this process, or one here and one in a child of fakes/forker.h. Each
 * function fails the running test when it does not succeed.
 */
#ifndef TESTS_FAKES_LOCAL_SIDES_H
#define TESTS_FAKES_LOCAL_SIDES_H

#include <sys/types.h>

#include "dataplane/local/local.h"
#include "fakes/descriptors.h"
#include "fakes/sides.h"

void side_open(struct side *side, const char *name, const struct tl_local_options *options);
void side_write(struct side *side, const void *source, uint64_t len_bytes, const struct tl_exposure *exposure,
                uint64_t offset_bytes, bool has_immediate, uint32_t immediate, struct job *job);
struct tl_region *side_map(struct side *side, uint64_t len_bytes);
/* Destroys the region and its memory. */
void region_drop(struct tl_region *region);
/* Disconnects the pair unless it has ended, drains it, and destroys it. */
void side_end(struct side *side);
void side_close(struct side *side);

/* Makes a and b in this process and connects them, with 16 slots and works. The options are for both; NULL: none. */
void sides_set_up(const struct tl_local_options *options);
void sides_set_up_with(uint32_t slots, uint32_t work, const struct tl_local_options *options);
void sides_tear_down(void);

/* Returns how many mappings of shared memory this process has. */
unsigned count_mappings(void);

/* Sends the address of the side over a socket between processes. */
void send_address(int fd, const struct side *side);
/* Receives an address. Returns false when the other end has gone. */
bool receive_address(int fd, struct tl_pair_address *ret_pair_address);

#endif
