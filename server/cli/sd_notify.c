// SPDX-License-Identifier: Apache-2.0
/*
 * The notification protocol: one datagram of lines KEY=VALUE to a Unix socket whose path, or abstract name after '@',
 * is in the environment. A manager that has gone, or does not read for a while, is an error that the caller logs; the
 * worker goes on. One that is only busy is waited for: the kernel queues few datagrams for a socket, and the workers of
 * a large cluster become ready all at once.
 */
#include "server/cli/sd_notify.h"

#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"

#define SEND_TIMEOUT_SEC 5
/* What a process does after the longest time that it waits for others. */
#define STOP_SLACK_NS (10 * TL_NS_PER_SEC)

static enum tl_status make_address(const char *name, struct sockaddr_un *ret_address, socklen_t *ret_len,
                                   struct tl_error *ret_error)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t len = strlen(name);
    if (name[0] != '/' && name[0] != '@')
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "NOTIFY_SOCKET=%s: neither an absolute path nor an abstract name after '@'", name);
    if (len < 2 || len >= sizeof(address.sun_path))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "NOTIFY_SOCKET=%s: not 2 to %zu bytes long", name,
                            sizeof(address.sun_path) - 1);
    memcpy(address.sun_path, name, len);
    if (name[0] == '@') address.sun_path[0] = '\0';
    *ret_address = address;
    *ret_len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len);
    return TL_OK;
}

bool tl_sd_is_notified(void)
{
    const char *name = getenv("NOTIFY_SOCKET");
    return name && name[0];
}

enum tl_status tl_sd_notify(const char *state, struct tl_error *ret_error)
{
    struct sockaddr_un address;
    socklen_t address_len = 0;
    if (!tl_sd_is_notified()) return TL_OK;
    const char *name = getenv("NOTIFY_SOCKET");
    enum tl_status status = make_address(name, &address, &address_len, ret_error);
    if (status != TL_OK) return status;
    const struct timeval timeout = {.tv_sec = SEND_TIMEOUT_SEC};
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return tl_error_set_errno(ret_error, errno, "cannot make a socket for NOTIFY_SOCKET=%s", name);
    ssize_t sent = setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
    if (sent == 0)
        sent = sendto(fd, state, strlen(state), MSG_NOSIGNAL, (const struct sockaddr *)(const void *)&address,
                      address_len);
    int error_number = errno;
    close(fd);
    if (sent < 0) return tl_error_set_errno(ret_error, error_number, "cannot send to NOTIFY_SOCKET=%s", name);
    return TL_OK;
}

enum tl_status tl_sd_notify_stopping(int64_t longest_ns, const char *state, struct tl_error *ret_error)
{
    char text[256];
    snprintf(text, sizeof(text), "STOPPING=1\nEXTEND_TIMEOUT_USEC=%" PRId64 "\n%s",
             (longest_ns + STOP_SLACK_NS) / (TL_NS_PER_SEC / 1000000), state);
    return tl_sd_notify(text, ret_error);
}

/* A decimal number that fits; 0 when it is none. */
static int64_t parse_positive(const char *text)
{
    char *end;
    if (!text || text[0] < '0' || text[0] > '9') return 0;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    return errno == 0 && *end == '\0' ? value : 0;
}

int64_t tl_sd_watchdog_ns(void)
{
    const char *pid = getenv("WATCHDOG_PID");
    int64_t usec = parse_positive(getenv("WATCHDOG_USEC"));
    int64_t ns;
    if (pid && pid[0] && parse_positive(pid) != getpid()) return 0;
    if (__builtin_mul_overflow(usec, 1000, &ns)) return 0;
    return ns;
}
