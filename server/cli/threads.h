// SPDX-License-Identifier: Apache-2.0
/* Many waits at once: for workers that answer, for names that are resolved. */
#ifndef SERVER_CLI_THREADS_H
#define SERVER_CLI_THREADS_H

#include <stddef.h>

/* Calls run once for each index below count, from a bounded number of threads of which the caller's is one, and returns
 * when all calls have. Without memory or threads fewer threads take longer. */
void tl_run_all(size_t count, void (*run)(void *context, size_t index), void *context);

#endif
