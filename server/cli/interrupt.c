// SPDX-License-Identifier: Apache-2.0
/* Signals that interrupt a command. A second one while it cleans up changes nothing: cleaning up has a bound of its
 * own.
 */
#include "server/cli/interrupt.h"

#include <signal.h>
#include <stddef.h>

#include "base/check.h"

/* Batch systems say with some of them that the time is nearly over. */
static const int interrupting[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGXCPU};

static volatile sig_atomic_t caught_signal;

static void note_signal(int signal_number)
{
    caught_signal = signal_number;
}

void tl_interrupt_catch(void)
{
    for (size_t i = 0; i < TL_ARRAY_COUNT(interrupting); i++) {
        struct sigaction old;
        struct sigaction note = {.sa_handler = note_signal};
        sigemptyset(&note.sa_mask);
        /* nohup's SIGHUP stays ignored. */
        if (sigaction(interrupting[i], NULL, &old) == 0 && old.sa_handler == SIG_IGN) continue;
        sigaction(interrupting[i], &note, NULL);
    }
}

bool tl_interrupt_is_set(void)
{
    return caught_signal != 0;
}

void tl_interrupt_die(void)
{
    if (caught_signal == 0) return;
    signal((int)caught_signal, SIG_DFL);
    raise((int)caught_signal);
}
