// SPDX-License-Identifier: Apache-2.0
/* What keeps a process from answering, as far as its state and its descriptors show. */
#include <inttypes.h>
#include <stdio.h>

#include "server/cli/local_process.h"

/* A process with no more descriptors than these left takes no connection. */
#define FEW_DESCRIPTORS 2

bool tl_local_process_trouble(const struct tl_local_process *process, const char *address,
                              char ret_reason[TL_ERROR_MESSAGE_BYTES], char ret_remedy[TL_ERROR_MESSAGE_BYTES])
{
    const int pid = (int)process->pid;
    if (process->state == 'T') {
        snprintf(ret_reason, TL_ERROR_MESSAGE_BYTES, "process %d (%s) at %s is stopped", pid, process->name, address);
        snprintf(ret_remedy, TL_ERROR_MESSAGE_BYTES, "let it go on: kill -CONT %d", pid);
    } else if (process->state == 't') {
        snprintf(ret_reason, TL_ERROR_MESSAGE_BYTES, "a debugger holds process %d (%s) at %s", pid, process->name,
                 address);
        snprintf(ret_remedy, TL_ERROR_MESSAGE_BYTES, "let it go on in the debugger, or detach that");
    } else if (process->descriptor_limit > 0 && process->descriptors + FEW_DESCRIPTORS >= process->descriptor_limit) {
        snprintf(ret_reason, TL_ERROR_MESSAGE_BYTES,
                 "process %d (%s) at %s has %" PRIu64 " of %" PRIu64 " descriptors open", pid, process->name, address,
                 process->descriptors, process->descriptor_limit);
        snprintf(
            ret_remedy, TL_ERROR_MESSAGE_BYTES,
            "give it more: prlimit --pid %d --nofile=NUMBER for now, ulimit -Hn or LimitNOFILE= for its next start",
            pid);
    } else {
        return false;
    }
    return true;
}
