// SPDX-License-Identifier: Apache-2.0
/* The names of devices that tensors lie on, as a configuration and --device write them: "host", "gpu:0". */
#ifndef CONFIG_DEVICE_NAME_H
#define CONFIG_DEVICE_NAME_H

#include <stdbool.h>

#include <tensorlane/tensor.h>

/* Reads a name. False: it is none. Whether there is such a device is known only when it is opened. */
bool tl_device_name_parse(const char *name, struct tl_device *ret_device);

#endif
