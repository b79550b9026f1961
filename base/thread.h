// SPDX-License-Identifier: Apache-2.0
/* Threads of the library: they have names, and signals are not delivered to them. */
#ifndef BASE_THREAD_H
#define BASE_THREAD_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include <tensorlane/status.h>

/* Starts a thread. name has at most 15 bytes. With ret_thread NULL the thread is detached. Errors:
 * TL_RESOURCE_EXHAUSTED: the system gives no thread. */
enum tl_status tl_thread_start(const char *name, void *(*run)(void *argument), void *argument, pthread_t *ret_thread,
                               struct tl_error *ret_error) TL_MUST_USE;

/* Checks that the system gives count more threads (at most TL_THREAD_MAX_PROBES) at the same time, by starting them;
 * they end at once. This is for libraries that wait for ever for a thread that they could not start. Errors:
 * TL_RESOURCE_EXHAUSTED: it does not. Blocks: some 50 us for each thread. */
#define TL_THREAD_MAX_PROBES 64
enum tl_status tl_thread_check_available(unsigned count, struct tl_error *ret_error) TL_MUST_USE;

/* Returns whether the calling thread may use two processors at most, of which a peer within the host needs one: another
 * thread of ours beside it would take its time from both. False where the system does not say. */
bool tl_thread_has_few_processors(void);

/* How often a thread that polls for something yields its processor. */
#define TL_THREAD_YIELD_NS 25000

/* Yields the processor when *inout_now_ns has come to *inout_next_ns, and sets both anew. Returns whether another
 * thread has run meanwhile: to poll on would keep that one from its work. */
bool tl_thread_yields(int64_t *inout_now_ns, int64_t *inout_next_ns);

#endif
