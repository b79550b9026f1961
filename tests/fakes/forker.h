// SPDX-License-Identifier: Apache-2.0
/*
 * Children of a test, forked by a process that has no threads and does nothing else: a process that is forked beside
 * threads may find the allocator locked for ever. A fixture opens it before anything else, so that there are no threads
 * yet. Children see the variables of the test as they were then; everything else reaches them over their socket.
 *
 * Everything here fails the running test when it does not work.
 */
#ifndef TESTS_FAKES_FORKER_H
#define TESTS_FAKES_FORKER_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

void forker_open(void);
/* Kills the children that were not waited for. Harmless when it is not open. */
void forker_close(void);
/* The child runs `child` with its end of a SOCK_SEQPACKET socket, and exits with what that returns. It is killed when
 * the test ends, however that ends. */
pid_t forker_start(int (*child)(int fd), int *ret_fd);
/* Returns the status, as waitpid has it. */
int forker_wait(pid_t pid);

/* A packet with descriptor fd; -1: without one. False: the other end has gone, or takes nothing now. */
bool forker_pass(int socket, const void *packet, size_t len_bytes, int fd);
/* The next packet, and its descriptor; -1: it has none. Returns its size, 0: the other end has gone. Blocks. */
size_t forker_take(int socket, void *packet, size_t capacity_bytes, int *ret_fd);

#endif
