// SPDX-License-Identifier: Apache-2.0
#include "base/host_id.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"

enum tl_status tl_host_id_get(uint8_t ret_id[TL_HOST_ID_BYTES], struct tl_error *ret_error)
{
    static const char path[] = "/proc/sys/kernel/random/boot_id";
    char text[64];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t len = fd < 0 ? -1 : read(fd, text, sizeof(text));
    int error = errno;
    if (fd >= 0) close(fd);
    if (len < 0) return tl_error_set(ret_error, TL_UNAVAILABLE, "cannot read %s: %s", path, strerror(error));
    uint8_t id[TL_HOST_ID_BYTES] = {0};
    unsigned digits = 0;
    for (ssize_t i = 0; i < len && digits < 2 * TL_HOST_ID_BYTES; i++) {
        char c = text[i];
        int value = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
        if (value < 0) continue;
        id[digits / 2] = (uint8_t)(id[digits / 2] << 4 | value);
        digits++;
    }
    if (digits < 2 * TL_HOST_ID_BYTES)
        return tl_error_set(ret_error, TL_UNAVAILABLE, "%s does not contain a host id", path);
    memcpy(ret_id, id, sizeof(id));
    return TL_OK;
}
