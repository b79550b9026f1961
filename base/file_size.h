// SPDX-License-Identifier: Apache-2.0
/* How large a file may become. */
#ifndef BASE_FILE_SIZE_H
#define BASE_FILE_SIZE_H

#include <stdbool.h>
#include <stdint.h>

/* Returns whether this process may make a file, or shared memory, of this size (ulimit -f); sets errno to EFBIG if not.
 * To try it would raise a signal that ends the process. Thread: any. */
bool tl_file_size_is_allowed(uint64_t len_bytes);

#endif
