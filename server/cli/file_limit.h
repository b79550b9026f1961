// SPDX-License-Identifier: Apache-2.0
/* How many files this process may have open: each file of tensors that is mapped keeps a descriptor. */
#ifndef SERVER_CLI_FILE_LIMIT_H
#define SERVER_CLI_FILE_LIMIT_H

#include <sys/resource.h>

/* Raises the soft limit of open files to the hard one, and returns that; RLIM_INFINITY: there is none. */
rlim_t tl_file_limit_raise(void);

#endif
