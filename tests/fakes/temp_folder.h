// SPDX-License-Identifier: Apache-2.0
/* A folder of its own for each test that writes files: make it in a checked fixture, remove it in the other. */
#ifndef TESTS_FAKES_TEMP_FOLDER_H
#define TESTS_FAKES_TEMP_FOLDER_H

#include <check.h>
#include <dirent.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char temp_folder[128];

static inline void temp_folder_make(void)
{
    const char *parent = getenv("TMPDIR");
    snprintf(temp_folder, sizeof(temp_folder), "%.90s/tensorlane-XXXXXX", parent ? parent : "/tmp");
    ck_assert_ptr_nonnull(mkdtemp(temp_folder));
}

static inline int temp_folder_remove_one(const char *path, const struct stat *info, int type, struct FTW *place)
{
    (void)info, (void)type, (void)place;
    return remove(path);
}

static inline void temp_folder_remove(void)
{
    nftw(temp_folder, temp_folder_remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

/* Returns the path of a name in the folder; it lies in one of four buffers, used in rotation. */
static inline const char *temp_path(const char *name)
{
    static char paths[4][1024];
    static unsigned next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof(paths[0]), "%s/%s", temp_folder, name);
    return path;
}

/* Returns how many entries a folder has, including hidden ones. */
static inline unsigned temp_entry_count(const char *path)
{
    unsigned count = 0;
    DIR *folder = opendir(path);
    ck_assert_ptr_nonnull(folder);
    for (struct dirent *entry; (entry = readdir(folder));)
        count += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
    closedir(folder);
    return count;
}

static inline void temp_write(const char *path, const void *data, size_t len)
{
    FILE *file = fopen(path, "wb");
    ck_assert_ptr_nonnull(file);
    ck_assert_uint_eq(fwrite(data, 1, len, file), len);
    ck_assert_int_eq(fclose(file), 0);
}

#endif
