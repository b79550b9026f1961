// SPDX-License-Identifier: Apache-2.0
/*
 * A file on a file system that is a process (FUSE), which answers the process that has begun it, and lets everybody
 * else wait: whoever closes the file, asks for its size, reads it or looks for a name beside it does not return.
 *
 * It is mounted in a namespace of the process that begins it, so that nothing is left behind; others reach it through
 * a descriptor that they were passed, or through /proc/PID/root. The server ends with that process, and in any case
 * after SLOW_FILE_SECONDS, when all who wait get an error.
 */
#ifndef TESTS_FAKES_SLOW_FILE_H
#define TESTS_FAKES_SLOW_FILE_H

#include <sys/types.h>

#define SLOW_FILE_SECONDS 40
/* Where it is mounted. */
#define SLOW_FILE_FOLDER "/tmp"
#define SLOW_FILE_BYTES (1 << 20)
/* What the file is full of. */
#define SLOW_FILE_BYTE 0x5a
/* What is sent to `told` as often as somebody begins to wait. */
#define SLOW_FILE_WAITS "waits"

struct slow_file {
    int fd;
    pid_t server;
    int control;
};

/* told: a SOCK_SEQPACKET socket. Returns what this system lacks; NULL: nothing, it is there. Thread: this process has
 * one only, and is nobody who must keep his mounts. */
const char *slow_file_begin(struct slow_file *file, int told);
/* Who waits gets his answer, and so does everybody from now on. */
void slow_file_let_go(struct slow_file *file);

#endif
