// SPDX-License-Identifier: Apache-2.0
/* Many waits of `tensorlane doctor` at once. */
#ifndef SERVER_CLI_DOCTOR_THREADS_H
#define SERVER_CLI_DOCTOR_THREADS_H

#include <stddef.h>

/* Calls run once for each place below count, from a bounded number of threads of which the caller's is one, and returns
 * when all calls have. Without memory or threads fewer threads take longer. */
void tl_doctor_run_all(size_t count, void (*run)(void *context, size_t place), void *context);

#endif
