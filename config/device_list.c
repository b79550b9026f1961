// SPDX-License-Identifier: Apache-2.0
/*
 * Checks a list of RDMA devices when the configuration is read, so that a typing error is found there and not when a
 * worker starts.
 *
 * An entry is a name with an optional port; '^' in front takes out what it names, '=' means the whole name. Whether
 * there are such devices is known only on the worker's machine.
 */
#include "config/device_list.h"

#include <stdbool.h>
#include <string.h>

#include "base/error.h"
#include "config/quote.h"

/* The data plane takes as many. */
#define MAX_ENTRIES 32
/* Longest name of a device, with its NUL: the kernel's IB_DEVICE_NAME_MAX. */
#define NAME_BYTES 64
/* What drivers and udev make names of. A blank, above all, is a slip that would match nothing. */
#define NAME_CHARACTERS "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-"

static bool is_port(const char *text, size_t len)
{
    unsigned port = 0;
    if (len == 0 || len > 3) return false;
    for (size_t i = 0; i < len; i++) {
        if (text[i] < '0' || text[i] > '9') return false;
        port = port * 10 + (unsigned)(text[i] - '0');
    }
    return port >= 1 && port <= 255;
}

static enum tl_status check_entry(const char *text, size_t len, struct tl_error *ret_error)
{
    char entry[NAME_BYTES + 16], quoted[TL_QUOTE_BYTES];
    size_t shown = len < sizeof(entry) - 1 ? len : sizeof(entry) - 1;
    *(char *)mempcpy(entry, text, shown) = '\0';
    const char *name = text, *end = text + len;
    if (name < end && *name == '^') name++;
    if (name < end && *name == '=') name++;
    const char *colon = memchr(name, ':', (size_t)(end - name));
    size_t name_len = (size_t)((colon ? colon : end) - name);
    if (name_len == 0 || name_len >= NAME_BYTES || strspn(name, NAME_CHARACTERS) < name_len) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s does not name a device; entries are like mlx5_0, mlx5_0:1 or ^mlx5_1",
                            tl_quote(entry, quoted));
    }
    if (colon && !is_port(colon + 1, (size_t)(end - colon - 1))) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: a port is a number of 1 to 255",
                            tl_quote(entry, quoted));
    }
    return TL_OK;
}

enum tl_status tl_device_list_check(const char *text, struct tl_error *ret_error)
{
    unsigned count = 0;
    for (bool is_more = *text != '\0'; is_more; count++) {
        size_t len = strcspn(text, ",");
        if (count == MAX_ENTRIES) {
            return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "more than %d entries; name a common beginning instead",
                                MAX_ENTRIES);
        }
        enum tl_status status = check_entry(text, len, ret_error);
        if (status != TL_OK) return status;
        is_more = text[len] == ',';
        text += len + 1;
    }
    return TL_OK;
}
