// SPDX-License-Identifier: Apache-2.0
#include "server/cli/remedy.h"

#include <string.h>

#include "server/transports/transport_choice.h"

size_t tl_remedy_split(const char *message, const char **ret_remedy)
{
    size_t len = strlen(message);
    const char *list = strstr(message, TL_NO_PORT), *separator = NULL;
    for (const char *next = message; (next = strstr(next, "; ")) != NULL; next++) {
        separator = next;
        if (list == NULL) break;
    }
    /* The semicolons of a list stand between its devices; what to do follows the last one, if the message goes on. */
    if (separator == NULL || list == message) {
        *ret_remedy = message + len;
        return len;
    }
    *ret_remedy = separator + 2;
    return (size_t)(separator - message);
}
