// SPDX-License-Identifier: Apache-2.0
/*
 * Whether a provider really moves bytes: tries a message, and a write or a read, from the provider to itself.
 *
 * What a device reports proves little: a GID may have no route, a window may not bind, a card may hang.
 */
#ifndef DATAPLANE_PROBE_H
#define DATAPLANE_PROBE_H

#include <tensorlane/tensor.h>

#include "dataplane/provider.h"

/* Connects two queue pairs of the provider to each other, sends a message, answers it with a write with an immediate
 * into memory that is exposed under `keys`, and compares the bytes. Frees everything it has created. Errors, with a
 * message that begins with "a probe write failed: ": the code of a call that failed; TL_FAILED_PRECONDITION: windows
 * are asked for and there are none; TL_DEADLINE_EXCEEDED: nothing came in time; TL_DATA_LOSS: the wrong bytes came;
 * TL_UNAVAILABLE: a queue pair broke. Thread: the provider's owner, which uses the provider for nothing else. Blocks:
 * for timeout_ns, and until the card has completed what was posted. */
enum tl_status tl_provider_probe(struct tl_provider *provider, enum tl_keys keys, int64_t timeout_ns,
                                 struct tl_error *ret_error) TL_MUST_USE;
/* Does the same with a read under TL_KEYS_WINDOW in place of the write, where the provider reads. Its message begins
 * with "a probe read failed: ". */
enum tl_status tl_provider_probe_reads(struct tl_provider *provider, int64_t timeout_ns,
                                       struct tl_error *ret_error) TL_MUST_USE;

/* Tries whether the card reads and writes the memory of a device: opens the provider once more, allocates memory of the
 * device, registers it, and writes from there to the host and from the host to there, under `keys`. Each time it
 * compares what has come with what CUDA has copied. Frees everything it has created. Errors: as of
 * tl_provider_probe, of opening, of tl_device_memory_create and of tl_region_create_on. Thread: any. Blocks: so. */
enum tl_status tl_provider_probe_device(const struct tl_provider *provider, enum tl_keys keys, struct tl_device device,
                                        int64_t timeout_ns, struct tl_error *ret_error) TL_MUST_USE;

#endif
