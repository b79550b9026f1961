// SPDX-License-Identifier: Apache-2.0
/* Pauses between attempts that fail. */
#ifndef BASE_BACK_OFF_H
#define BASE_BACK_OFF_H

#include <stdint.h>

/* Returns how long to wait after an attempt has failed, when failure_count attempts in a row had failed before it. The
 * pause is first_ns (at least 2) for the first failure and doubles with each further one up to max_ns. A random part of
 * it, at most half, is taken off, so that many workers that have failed together do not try again together. Thread:
 * any.
 */
int64_t tl_back_off_ns(int64_t first_ns, int64_t max_ns, unsigned failure_count);

#endif
