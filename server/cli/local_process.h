// SPDX-License-Identifier: Apache-2.0
/* Which process of this machine listens at an address, and in which state it is, as /proc shows it. */
#ifndef SERVER_CLI_LOCAL_PROCESS_H
#define SERVER_CLI_LOCAL_PROCESS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include <tensorlane/status.h>

struct tl_local_process {
    pid_t pid;            /* 0: this user may not see which process it is */
    uint32_t user;        /* the socket's owner */
    char name[32];        /* what the kernel calls the program */
    char state;           /* as in /proc/PID/stat: 'R', 'S', 'D', 'T' stopped, 't' held by a debugger; 0: not known */
    bool is_worker;       /* it is this program, or has loaded the library */
    uint64_t descriptors; /* that are open */
    uint64_t descriptor_limit; /* 0: none, or not known */
};

/* Finds the process that listens at "host:port". False: no socket of this machine, in this network namespace, does.
 * Blocks: for the name resolution. Thread: any. */
bool tl_local_process_listening(const char *address, struct tl_local_process *ret_process);

/* Writes what keeps the process from answering at the address, and what to do: it is stopped, a debugger holds it, or
 * it is out of descriptors. False: none of these. */
bool tl_local_process_trouble(const struct tl_local_process *process, const char *address,
                              char ret_reason[TL_ERROR_MESSAGE_BYTES], char ret_remedy[TL_ERROR_MESSAGE_BYTES]);

#endif
