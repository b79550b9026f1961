// SPDX-License-Identifier: Apache-2.0
/* Being interrupted (SIGINT, SIGTERM, SIGHUP) while there is something to clean up: the signal is noted, the command
 * cleans up and then dies of it, so that the shell sees what happened. */
#ifndef SERVER_CLI_INTERRUPT_H
#define SERVER_CLI_INTERRUPT_H

#include <stdbool.h>

/* From here on the signals are noted instead of ending the process. */
void tl_interrupt_catch(void);

/* True once a signal has come. */
bool tl_interrupt_is_set(void);

/* Ends the process by the signal that came; does nothing when none has. */
void tl_interrupt_die(void);

#endif
