// SPDX-License-Identifier: Apache-2.0
/* The list of RDMA devices that may be used, as NCCL writes it: "mlx5_0:1,^mlx5_1". */
#ifndef CONFIG_DEVICE_LIST_H
#define CONFIG_DEVICE_LIST_H

#include <tensorlane/status.h>

/* Whether the text is such a list; an empty one is. Errors: TL_INVALID_ARGUMENT: an entry without a name, with one that
 * no device can have, or with a port that is not in 1..255; too many entries. */
enum tl_status tl_device_list_check(const char *text, struct tl_error *ret_error) TL_MUST_USE;

#endif
