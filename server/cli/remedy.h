// SPDX-License-Identifier: Apache-2.0
/* Messages of the form "what is wrong; what to do", taken apart. */
#ifndef SERVER_CLI_REMEDY_H
#define SERVER_CLI_REMEDY_H

#include <stddef.h>

/* Returns the number of bytes of the message that say what is wrong, and where what to do begins: "" when the message
 * does not say, as a list of devices, each with its reason, does not. *ret_remedy points into the message. */
size_t tl_remedy_split(const char *message, const char **ret_remedy);

#endif
