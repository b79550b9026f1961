// SPDX-License-Identifier: Apache-2.0
/* The id of the running kernel. It is equal only for processes of one host that has not been restarted meanwhile. */
#ifndef BASE_HOST_ID_H
#define BASE_HOST_ID_H

#include <stdint.h>

#include <tensorlane/status.h>

#define TL_HOST_ID_BYTES 16

/* Reads the id. Errors: TL_UNAVAILABLE: /proc/sys/kernel/random/boot_id cannot be read. */
enum tl_status tl_host_id_get(uint8_t ret_id[TL_HOST_ID_BYTES], struct tl_error *ret_error) TL_MUST_USE;

#endif
