// SPDX-License-Identifier: Apache-2.0
/*
 * A file on a file system that is a process (FUSE). It answers the process that has started it, and makes all other
 * processes wait: a call that closes the file, asks for its size, reads it or looks up a name beside it does not
 * return.
 *
 * It is mounted in a namespace of the process that starts it, so that nothing is left behind. Other processes reach it
 * through a descriptor that they get, or through /proc/PID/root. The server ends with that process, after
 * SLOW_FILE_SECONDS at the latest; then all waiting calls fail.
 */
#ifndef TESTS_FAKES_SLOW_FILE_H
#define TESTS_FAKES_SLOW_FILE_H

#include <sys/types.h>

#define SLOW_FILE_SECONDS 40
/* The file system is mounted here. */
#define SLOW_FILE_FOLDER "/tmp"
#define SLOW_FILE_BYTES (1 << 20)
/* Every byte of the file has this value. */
#define SLOW_FILE_BYTE 0x5a
/* The server sends this word to `notify_fd` each time that a call begins to wait. */
#define SLOW_FILE_WAITS "waits"

struct slow_file {
    int fd;
    pid_t server;
    int control;
};

/* Mounts the file system and opens the file. notify_fd is a SOCK_SEQPACKET socket. Returns NULL, or what this system
 * lacks. Thread: the process has only one thread, and does not need its present mounts any more. */
const char *slow_file_begin(struct slow_file *file, int notify_fd);
/* Answers all waiting calls, and from now on all others at once. */
void slow_file_let_go(struct slow_file *file);

#endif
