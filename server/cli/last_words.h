// SPDX-License-Identifier: Apache-2.0
/*
 * What a worker that cannot start leaves behind: for a while it listens at its address and says why it does not serve.
 *
 * Identify says who it would be, that it does not serve, the reason and the remedy; the health service says
 * NOT_SERVING; links, requests for tensors and pushes are refused with the reason.
 */
#ifndef SERVER_CLI_LAST_WORDS_H
#define SERVER_CLI_LAST_WORDS_H

#include <signal.h>
#include <stdint.h>

#include "config/config.h"

struct tl_last_words {
    const struct tl_config *config;
    const struct tl_config_task *task; /* one of the configuration */
    const char *listen;                /* "host:port" */
    const char *message;               /* "what is wrong; what to do" */
    const sigset_t *signals;           /* blocked; SIGTERM and SIGINT among them end the wait */
    int64_t duration_ns;
    void (*listening)(const struct tl_last_words *words); /* called when it can be asked; NULL: nothing is called */
};

/* Answers until the time is over or a signal has come. Returns at once when the address cannot be listened at or memory
 * or threads are missing, since then nothing can be answered. Blocks. Thread: the only one of the process that takes
 * the signals. */
void tl_last_words_say(const struct tl_last_words *words);

#endif
