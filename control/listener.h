// SPDX-License-Identifier: Apache-2.0
/*
 * Listening sockets, and a thread that accepts connections from them.
 *
 * gRPC has a listener of its own, which ends for ever with the first connection that it cannot take: too many open
 * files for a moment, and the server never hears of a client again (CVE-2023-4785, gRPC 1.51). This one waits and goes
 * on.
 */
#ifndef CONTROL_LISTENER_H
#define CONTROL_LISTENER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tensorlane/status.h>

struct tl_listener;

/* Descriptors that are kept for connections: one for Identify, one for the health check, and as many for another client
 * that asks. */
#define TL_LISTENER_MAX_SPARES 4

/* A connection was taken: a non-blocking TCP socket, which is the callee's. Thread: the listener's. */
typedef void (*tl_connection_fn)(void *context, int fd);

/* Binds every address that "host:port" stands for; port 0 is one that is free, the same for all. "[::]" stands for IPv4
 * too. Clients can connect from now on, and wait until tl_listener_start.
 * Errors: TL_INVALID_ARGUMENT: no such address. TL_ALREADY_EXISTS: another process uses one of them. TL_UNAVAILABLE: it
 * cannot be resolved, or none of them can be bound, naming it and why. TL_RESOURCE_EXHAUSTED: no memory, descriptor or
 * thread. Blocks: while the name is resolved. */
enum tl_status tl_listener_open(const char *address, tl_connection_fn take, void *context,
                                struct tl_listener **ret_listener, uint16_t *ret_port,
                                struct tl_error *ret_error) TL_MUST_USE;

/* Writes the address of each bound socket, "10.0.0.7:4000", as many as there is space for. Returns how many. */
#define TL_LISTENER_TEXT_BYTES 64
size_t tl_listener_describe(const struct tl_listener *listener, char (*ret_texts)[TL_LISTENER_TEXT_BYTES],
                            size_t capacity);

/* Takes connections from now on. */
void tl_listener_start(struct tl_listener *listener);

/* Whether connections have taken spare descriptors that could not be opened again yet. Thread: any. */
bool tl_listener_uses_spares(const struct tl_listener *listener);

/* When a connection came and no descriptor was free for the last time (monotonic); 0: never. Thread: any. */
int64_t tl_listener_short_ns(const struct tl_listener *listener);

/* Closes the sockets; when it returns nothing is taken any more. NULL is accepted. Blocks: while one is being taken. */
void tl_listener_close(struct tl_listener *listener);

#endif
