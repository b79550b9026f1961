// SPDX-License-Identifier: Apache-2.0
/* Messages to systemd, or another service manager that started the process in this way: it is ready, alive or stopping.
 * Source: sd_notify(3), "Standalone Implementations". */
#ifndef SERVER_CLI_SD_NOTIFY_H
#define SERVER_CLI_SD_NOTIFY_H

#include <stdbool.h>
#include <stdint.h>

#include <tensorlane/status.h>

/* Sends a state ("READY=1\nSTATUS=...") to the socket that NOTIFY_SOCKET names; TL_OK when it names none. Errors:
 * TL_INVALID_ARGUMENT: NOTIFY_SOCKET is neither a path nor an abstract name, or too long. As tl_error_set_errno for the
 * socket: EAGAIN when no process reads it. Blocks: while the socket's queue is full, for a few seconds at most. */
enum tl_status tl_sd_notify(const char *state, struct tl_error *ret_error) TL_MUST_USE;

/* Sends that the process is stopping, which takes so long at most: the manager waits at least a few seconds longer
 * before it ends the process. state: what is sent besides ("STATUS=..."). Errors, Blocks: as tl_sd_notify. */
enum tl_status tl_sd_notify_stopping(int64_t longest_ns, const char *state, struct tl_error *ret_error) TL_MUST_USE;

/* True when NOTIFY_SOCKET is set. */
bool tl_sd_is_notified(void);

/* Nanoseconds after which a process that has sent nothing is taken for dead (WATCHDOG_USEC); 0: this process is not
 * watched. */
int64_t tl_sd_watchdog_ns(void);

#endif
