// SPDX-License-Identifier: Apache-2.0
/*
 * Whether a provider really moves bytes: a message and a write from it to itself.
 *
 * What a device says of itself proves little: a GID may have no route, a window may not bind, a card may be wedged.
 */
#ifndef DATAPLANE_PROBE_H
#define DATAPLANE_PROBE_H

#include "dataplane/provider.h"

/* Connects two queue pairs of the provider to each other, sends a message, answers it with a write with an immediate
 * into memory that is exposed under `keys`, and compares the bytes. Nothing of it is left afterwards.
 * Errors: "a probe write failed: " and why; the code is that of the call that failed, TL_FAILED_PRECONDITION: windows
 * are asked for and there are none, TL_DEADLINE_EXCEEDED: nothing came in time, TL_DATA_LOSS: the wrong bytes came,
 * TL_UNAVAILABLE: a queue pair broke. Thread: the provider's owner, with nothing else of it in use. Blocks: for
 * timeout_ns, and until the card has handed back what was posted. */
enum tl_status tl_provider_probe(struct tl_provider *provider, enum tl_keys keys, int64_t timeout_ns,
                                 struct tl_error *ret_error) TL_MUST_USE;

#endif
