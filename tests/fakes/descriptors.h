// SPDX-License-Identifier: Apache-2.0
/* Counts the descriptors of this process. The number grows where something leaks. */
#ifndef FAKES_DESCRIPTORS_H
#define FAKES_DESCRIPTORS_H

#include <dirent.h>

#include "base/check.h"

static inline unsigned count_descriptors(void)
{
    unsigned count = 0;
    DIR *folder = opendir("/proc/self/fd");
    TL_CHECK(folder != NULL);
    while (readdir(folder) != NULL)
        count++;
    closedir(folder);
    return count;
}

#endif
