// SPDX-License-Identifier: Apache-2.0
#include "config/device_name.h"

#include <stdlib.h>
#include <string.h>

/* No machine has more devices than that, and the number fits into 32 bits. */
#define MAX_DIGITS 9

bool tl_device_name_parse(const char *name, struct tl_device *ret_device)
{
    if (strcmp(name, "host") == 0) {
        *ret_device = (struct tl_device){.kind = TL_DEVICE_HOST};
        return true;
    }
    const char *number = strncmp(name, "gpu:", 4) == 0 ? name + 4 : "";
    size_t digit_count = strspn(number, "0123456789");
    bool has_zero = digit_count > 1 && number[0] == '0';
    if (digit_count == 0 || digit_count > MAX_DIGITS || has_zero || number[digit_count] != '\0') return false;
    *ret_device = (struct tl_device){.kind = TL_DEVICE_CUDA, .index = (int32_t)strtol(number, NULL, 10)};
    return true;
}
