// SPDX-License-Identifier: Apache-2.0
#ifndef FUZZ_KEPT_THREADS_H
#define FUZZ_KEPT_THREADS_H

/* What threads of that name would run is run by kept_threads_run_held, so that it does not depend on time. Threads that
 * the product waits for are started at once all the same. */
void kept_threads_hold(const char *name);
void kept_threads_run_held(void);

#endif
