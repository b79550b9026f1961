// SPDX-License-Identifier: Apache-2.0
#include "server/cli/proc_line.h"

#include <stdio.h>
#include <string.h>

bool tl_proc_find_line(const char *path, const char *key, char *ret_rest, size_t capacity)
{
    char line[512];
    const size_t len = strlen(key);
    bool is_found = false;
    FILE *file = fopen(path, "re");
    if (file == NULL) return false;
    while (!is_found && fgets(line, sizeof(line), file) != NULL)
        is_found = strncmp(line, key, len) == 0;
    fclose(file);
    if (!is_found) return false;
    line[strcspn(line, "\n")] = '\0';
    snprintf(ret_rest, capacity, "%s", line + len + strspn(line + len, " \t"));
    return true;
}
